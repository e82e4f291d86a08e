# SPDX-License-Identifier: MIT
"""docs/examples: every program runs, checks its own result and is listed; and the 14 configurations that AMD's dispatcher
compares itself by."""
import os
import pathlib
import subprocess
import sys

import fmhad
import pytest

EXAMPLES = fmhad.ROOT / "docs/examples"
PYTHON = sorted((EXAMPLES / "python").glob("*.py"))
C = sorted((EXAMPLES / "c").glob("*.c"))
FMHACTL = fmhad.build_dir() / "client/ctl/fmhactl"


def run(words, **environment):
    return subprocess.run([str(w) for w in words], capture_output=True, text=True, check=False, timeout=300,
                          env={**os.environ, **environment})


def passes(done):
    if done.returncode == 77:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("path", PYTHON, ids=lambda p: p.stem)
def test_python(path):
    """Each with a daemon of its own, as a reader would run it."""
    package = fmhad.build_dir() / "client/python"
    if not (package / "fmha/_abi.py").exists():
        pytest.skip("the build has no Python package")
    folder = str(FMHACTL.parent)
    environment = {"PYTHONPATH": str(package), "PATH": f"{folder}:{os.environ['PATH']}", "FMHAD_SOCKET": ""}
    passes(run([sys.executable, path], **environment))


@pytest.fixture(scope="module", name="socket")
def fixture_socket():
    daemon = fmhad.Daemon()
    yield str(daemon.socket)
    daemon.stop()


@pytest.mark.parametrize("path", C, ids=lambda p: p.stem)
def test_c(path, socket, tmp_path):
    library = fmhad.build_dir() / "client"
    sanitize = ["-fsanitize=address,undefined"] if fmhad.build_dir().name == "asan" else []
    built = run(["cc", "-Wall", "-Wextra", "-Werror", "-O1", *sanitize, "-I", fmhad.ROOT / "proto/include", "-I",
                 fmhad.ROOT / "client/include", path, "-o", tmp_path / "program", "-L", library, "-lfmha_client", "-lm",
                 f"-Wl,-rpath,{library}"])
    assert built.returncode == 0, built.stderr
    passes(run([tmp_path / "program"], FMHAD_SOCKET=socket))


def test_the_kernel_set():
    done = run([FMHACTL, "enumerate", "--set", EXAMPLES / "kernel_set.json", "--format", "names"])
    assert done.returncode == 0, done.stderr
    names = done.stdout.splitlines()
    assert names[0].startswith("fwd-fp16-batch-h128-qr_async-t128x128x32x128x32x128-r4x1x1-")
    assert {name.split("-")[0] for name in names} == {"fwd", "bwd_dq_dk_dv"}
    assert {name.rsplit("-", 1)[1] for name in names} == {"gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"}


def test_every_program_is_listed():
    page = (EXAMPLES / "README.md").read_text()
    for path in [*PYTHON, *C, EXAMPLES / "kernel_set.json"]:
        assert f"({path.relative_to(EXAMPLES)})" in page, path
    for line in page.splitlines():  # and no row without one
        if line.startswith("| "):
            assert "](" in line or line.startswith("| what"), line


# ---- parity ----------------------------------------------------------------------------------------

# As the dispatcher's own comparison has them, by the options of its programs; what is not said is BASE.
BASE = {"prec": "fp16", "mode": 0, "b": 2, "h": 2, "d": 128, "s": 128, "s_k": 128, "bias": "n", "mask": 0, "lse": 0, "p_drop": 0}
PARITY = {
    "basic_fp16": {},
    "basic_bf16": {"prec": "bf16"},
    "longer_seq": {"s": 256, "s_k": 256},
    "small_batch": {"b": 1, "h": 8, "s": 64, "s_k": 64},
    "gqa_2_1": {"h": 4, "h_k": 2},
    "gqa_4_1": {"h": 8, "h_k": 2},
    "causal_top_left": {"mask": 1},
    "causal_bottom_right": {"mask": 2},
    "bias_elementwise": {"bias": "e"},
    "bias_alibi": {"bias": "a"},
    "with_lse": {"lse": 1},
    "big_batch": {"b": 4, "h": 8},
    "asymmetric_seq": {"s": 64, "s_k": 256},
    "single_query": {"b": 1, "h": 4, "s": 1},
}


@pytest.mark.parametrize("name", PARITY)
def test_parity(name, socket):
    """By the same command lines, judged by the reference in double precision."""
    assert len(PARITY) == 14
    options = [f"-{key}={value}" for key, value in {**BASE, **PARITY[name]}.items()]
    done = run([FMHACTL, "run", "forward", *options, "-v=1"], FMHAD_SOCKET=socket)
    assert done.returncode == 0, done.stdout + done.stderr
    judged = [line.split(": ")[-1] for line in done.stdout.splitlines() if "max error" in line]
    assert len(judged) == (2 if PARITY[name].get("lse") else 1) and set(judged) == {"ok"}, done.stdout
