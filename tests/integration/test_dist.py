# SPDX-License-Identifier: MIT
"""libfmha_dist: sequences that MPI ranks share, against one process. Skipped where it was not built, for want of MPI."""
import os
import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = pathlib.Path(os.environ.get("FMHA_BUILD", ROOT / "build/release")) / "tests/dist/dist_ranks"
pytestmark = pytest.mark.skipif(not PROGRAM.exists() or not shutil.which("mpirun"), reason="libfmha_dist is not built: no MPI here")


def mpirun(socket, n, *arguments):
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(n), str(PROGRAM), *arguments]
    ended = subprocess.run(command, env={**os.environ, "FMHAD_SOCKET": str(socket), "OMPI_MCA_plm": "isolated"}, capture_output=True,
                           text=True, timeout=300)
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_equals_one_process(daemon, n):
    code, said = mpirun(daemon.socket, n)
    assert code == 0, said
    runs = int(said.split("ranks: ")[1].split(" runs")[0])
    assert runs >= 27 and f"{runs} runs, 0 wrong" in said


def test_one_rank_that_fails(daemon):
    """All ranks return, the one with its reason, by every schedule."""
    code, said = mpirun(daemon.socket, 3, "--fail")
    assert code == 0 and "0 wrong" in said, said
