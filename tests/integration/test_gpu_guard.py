# SPDX-License-Identifier: MIT
"""tests/gpu/guard.py without a GPU: what it would find there, it finds on the stub."""
import os
import re
import subprocess
import sys

import fmhad
import pytest

from test_gpu_layer import Compiler, stub_folder

GUARD = fmhad.ROOT / "tests" / "gpu" / "guard.py"


@pytest.fixture
def guard(tmp_path):
    def run(*arguments, **environment):
        fixed = ["--most-mib", "64", "--jobs", "2", *([] if "PATH" in environment else ["--no-memcheck"])]
        environment = {
            **os.environ,
            "FMHA_BUILD": str(fmhad.build_dir()),
            "LD_LIBRARY_PATH": str(stub_folder()),
            "CUDA_STUB_IDLE": "1",
            **environment,
        }
        command = [sys.executable, str(GUARD), "--helper", str(Compiler(tmp_path).path)]
        return subprocess.run(
            [*command, *fixed, *arguments], env=environment, capture_output=True, timeout=100, text=True
        )

    return run


def test_every_op_is_launched_and_leaves_its_surroundings_alone(guard):
    done = guard("--problems", "150", "--no-judge")
    assert done.returncode == 0, done.stdout + done.stderr
    ran, _, refused, no_room, kernels, findings, _ = map(
        int, re.search(r"^canaries +(.*)", done.stdout, re.M)[1].split()
    )
    assert ran == 150 and refused > 0 and no_room == 0 and kernels > 50 and findings == 0


@pytest.mark.parametrize(
    "environment, options, sentence",
    [
        ({"CUDA_STUB_IDLE": "stray"}, ["--no-judge"], "bytes beside it have changed"),
        ({"CUDA_STUB_FAIL": "cuLaunchKernel"}, ["--no-judge"], "CUDA_ERROR_ILLEGAL_ADDRESS"),
        ({}, [], "should be"),  # kernels that do nothing give wrong results
    ],
)
def test_what_is_wrong_is_found_with_its_problem(guard, environment, options, sentence):
    done = guard("--problems", "12", *options, **environment)
    assert done.returncode == 1, done.stdout + done.stderr
    assert sentence in done.stdout and re.search(r"seed \d+, sm_90a: ", done.stdout)


@pytest.mark.parametrize(
    "says, findings",
    [("ERROR SUMMARY: 0 errors", 0), ("ERROR SUMMARY: 10 errors", 2), ("Device not supported", 2)],
)
def test_what_the_sanitizer_says_counts(guard, tmp_path, says, findings):
    """One that runs the program at the first path among its arguments, then says so much."""
    sanitizer = tmp_path / "compute-sanitizer"
    sanitizer.write_text(
        f"#!/bin/sh\nwhile [ \"${{1#/}}\" = \"$1\" ]; do shift; done\n\"$@\"; echo \"========= {says}\"\n"
    )
    sanitizer.chmod(0o755)
    done = guard("--problems", "8", "--no-judge", PATH=f"{tmp_path}:{os.environ['PATH']}")
    row = re.search(r"^memcheck +(.*)", done.stdout, re.M)[1].split()
    assert done.returncode == (findings > 0), done.stdout + done.stderr
    assert int(row[0]) == 8 and int(row[5]) == findings


def test_a_machine_without_a_gpu_is_skipped(guard):
    assert guard(CUDA_STUB_FAIL="cuInit").returncode == 77
