# SPDX-License-Identifier: MIT
"""A share of the faults that nightly tries one after another (tests/faults), the same ones in every run."""
import shutil
import subprocess
import sys

import pytest

import fmhad

FOLDER = fmhad.ROOT / "tests/faults"

pytestmark = pytest.mark.skipif(not list(fmhad.build_dir().rglob("libfmha_faults.so")),
                                reason="sanitizers have a malloc of their own")

def tried(command):
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    return {row[0]: int(row[-1]) for row in rows if row and row[0] in ("front", "worker", "helper", "client")}


@pytest.mark.parametrize("visit", ["open_devices", "run_tiny", "explain", "set_priority"])
def test_every_37th_fault_of_a_visit(visit):
    counts = tried([FOLDER / "campaign.py", "--every", 37, "--only", visit])
    assert sum(counts.values()) > 1


def test_a_start_without_memory_is_begun_again_or_says_so():
    """A few of a front's allocations, among them those for a worker that reports ready."""
    counts = tried([FOLDER / "campaign.py", "--every", 11, "--only", "start", "--kind", "front", "--class", "memory", "--mode", "once"])
    assert counts["front"] > 5


def test_every_fault_of_a_compile_helper():
    assert tried([FOLDER / "programs.py", "--only", "helper"])["helper"] > 40


# ---- losses of power ----


def lost(*options):
    if not shutil.which("strace"):
        pytest.skip("strace is not installed")
    done = subprocess.run([sys.executable, FOLDER / "power.py", *options], capture_output=True, text=True, check=False, timeout=600)
    if "not permitted" in done.stderr:
        pytest.skip("tracing is not permitted")
    return done


def test_a_loss_of_power_leaves_the_old_or_the_new():
    done = lost("--random", "1")
    assert done.returncode == 0 and done.stdout.endswith("0 wrong\n"), done.stdout + done.stderr
    assert all(f"\n{name} " in done.stdout for name in ("state", "cache", "pack"))


@pytest.mark.parametrize("what", ["bytes", "names"])
def test_a_disk_that_forgets_syncs_is_found_out(what):
    assert "neither the old nor the new" in lost("--only", "state", "--every", "5", "--forget", what).stdout
