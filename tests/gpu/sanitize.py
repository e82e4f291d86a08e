#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""compute-sanitizer over a small set of every kernel family on an NVIDIA GPU.

    python3 tests/gpu/sanitize.py [--arch sm_90a] [--tools memcheck,racecheck] [--match TEXT]

Every kernel is compiled first. Then each problem runs in a process of its own under each tool: it
launches through libcuda with one allocation a tensor, so that a byte beyond a tensor is found, and
compares with the reference. The table comes last. Needs numpy, NVRTC, compute-sanitizer and the
shared library of the checks (FMHA_CHECK_LIB, or the build directory's).
"""
import argparse
import concurrent.futures
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import abi  # noqa: E402
import suite  # noqa: E402
from cuda_device import compile_job  # noqa: E402
from sanitizer import find_sanitizer  # noqa: E402
from suite import BR, Case  # noqa: E402

SECONDS = 75  # for one problem under one tool


def cases():
    """[(families, problem)]: odd lengths, more than one tile, every pipeline that a table offers."""
    d = dict(dtype=abi.BF16, batch=2, hq=4, hk=2)
    yield "fwd", Case("forward", **d, sq=150, sk=170, dq=64, dv=64, mask=BR, right=0)
    yield "fwd", Case("forward", **d, sq=131, sk=70, dq=128, dv=128)
    yield "fwd", Case("forward", **d, sq=70, sk=90, dq=64, dv=64, bias=abi.BF16, dropout=0.2, randval=True)
    yield "fwd", Case("forward", **d | dict(dtype=abi.F32), sq=50, sk=70, dq=40, dv=40, mask=BR, right=0)
    yield "fwd", Case("forward", **d | dict(dtype=abi.E4M3), sq=70, sk=90, dq=64, dv=64, descale=True)
    narrow = dict(kv_dtype=abi.E4M3, descale=True)
    yield "fwd narrow", Case("forward", **d, **narrow, sq=150, sk=300, dq=128, dv=128, mask=BR, right=0)
    yield "fwd narrow", Case("forward", **d | dict(dtype=abi.F16, kv_dtype=abi.E5M2), sq=200, sk=230, dq=64, dv=64)
    yield "fwd narrow", Case("forward", **d, **narrow, sq=70, sk=150, dq=256, dv=256)
    yield "fwd narrow", Case("forward", **d, **narrow | dict(kv_dtype=abi.I8), sq=150, sk=300, dq=128, dv=128, mask=BR, right=0)
    yield "fwd_splitkv narrow", Case("forward", **d, **narrow | dict(kv_dtype=abi.I8), sq=2, sk=333, dq=128, dv=128, splits=3, split_size=128)
    yield "fwd_pagedkv narrow", Case("forward", **d, **narrow, sq=70, sk=290, dq=192, dv=128, page=16, lens_k=[289, 1], cap=3.0)
    yield "fwd_splitkv narrow", Case("forward", **d, **narrow, sq=2, sk=333, dq=128, dv=128, splits=3, split_size=128)
    yield "fwd_splitkv", Case("forward", **d, sq=1, sk=333, dq=128, dv=128, splits=3, split_size=128, sink=True)
    yield "fwd_splitkv", Case("forward", **d | dict(dtype=abi.F16), sq=70, sk=200, dq=64, dv=64, splits=2,
                              split_size=128)
    yield "fwd_pagedkv", Case("forward", **d, sq=9, sk=130, dq=128, dv=128, page=16, lens_k=[129, 1])
    yield "fwd_pagedkv", Case("forward", **d, sq=70, sk=130, dq=64, dv=64, page=16, layout=1, lens_k=[99, 130])
    yield "batch_prefill", Case("forward", **d, sq=70, sk=130, dq=64, dv=64, page=16, table="sglang", mask=BR, right=0)
    yield "batch_prefill", Case("forward", **d | dict(dtype=abi.E4M3), sq=40, sk=90, dq=64, dv=64, page=16,
                                table="sglang", descale=True)
    yield "fwd_appendkv", Case("append", page=16, rope=abi.ROPE_HALF_ROTATED, rotary_dim=32)
    yield "fwd_appendkv", Case("append", dtype=abi.F32, rope=abi.ROPE_INTERLEAVED, rotary_dim=16)
    yield "bwd", Case("backward", **d, sq=150, sk=170, dq=64, dv=64, mask=BR, right=0)
    yield "bwd", Case("backward", **d, sq=70, sk=90, dq=128, dv=128, bias=abi.BF16, dbias=True, dropout=0.2)
    yield "bwd", Case("backward", **d | dict(dtype=abi.F16), sq=70, sk=90, dq=64, dv=64, bias=abi.F32, dbias=True,
                      mask=BR, right=0)
    yield "bwd", Case("backward", **d | dict(dtype=abi.F32), sq=40, sk=50, dq=40, dv=40, mask=BR, right=0)
    # Partial sums of dQ: the third stage, bwd_convert_dq.
    yield "bwd", Case("backward", **d, sq=150, sk=170, dq=64, dv=64, acc=3)
    yield "bwd", Case("backward", **{k: v for k, v in d.items() if k != "batch"}, group=[(5, 30), (0, 8), (33, 90)],
                      dq=128, dv=128, mask=BR, right=0, acc=2)
    for dim, broadcast in ((184, "b"), (104, "bh"), (72, "bhr")):
        yield "bwd", Case("backward", **d | dict(dtype=abi.F32), sq=40, sk=50, dq=dim, dv=dim, bias=abi.F32,
                          dbias=True, bias_broadcast=broadcast)
    yield "bwd", Case("backward", **d | dict(dtype=abi.F32), sq=40, sk=50, dq=104, dv=104, bias=abi.F32, dbias=True)


def child(number, folder):
    """Runs one problem; what the sanitizer is attached to."""
    from driver_device import DriverDevice

    with open(os.path.join(folder, "code"), "rb") as file:
        arch, code = pickle.load(file)
    lib = abi.load_library(os.environ.get("FMHA_CHECK_LIB"))
    case = list(cases())[number][1]
    device = DriverDevice(lib, code)
    print("JUDGED", suite.run(case, lib, device, arch), flush=True)


def build(lib, arch, selected, jobs):
    """{name: code} of every kernel that the problems launch."""
    kernels = {k.name.decode(): k for _, _, c in selected for k in suite.kernels(c, lib, arch)}
    work = [(n, k.source.decode(), abi.kernel_options(k), arch) for n, k in kernels.items()]
    with concurrent.futures.ProcessPoolExecutor(jobs) as pool:
        built = list(pool.map(compile_job, work))
    for name, code, log in built:
        if code is None:
            sys.exit(f"{name}: {log[-500:]}")
    return {name: code for name, code, _ in built}


def run_one(sanitizer, tool, number, folder):
    """(errors or None, one line that says more)."""
    log = os.path.join(folder, f"{tool}-{number}.log")
    command = [sanitizer, "--tool", tool, "--target-processes", "all", "--print-limit", "5",
               sys.executable, os.path.abspath(__file__), "--child", str(number), "--folder", folder]
    with open(log, "wb") as file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                                   start_new_session=True)
        try:
            process.wait(SECONDS)
            text = ""
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its own session: nobody else is in it
            process.wait()
            text = f"no end after {SECONDS} s"
    with open(log, encoding="utf-8", errors="replace") as file:
        lines = file.read().splitlines()
    # racecheck: "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"
    summary = [line for line in lines if "SUMMARY:" in line]
    counts = [int(n) for line in summary for n in re.findall(r"(\d+) (?:errors?|hazards?|warnings?)", line)]
    said = [line for line in lines if line.startswith("=========") and "SUMMARY" not in line
            and len(line) > 12 and "COMPUTE-SANITIZER" not in line]
    judged = [line for line in lines if line.startswith("JUDGED")]
    if not counts or text:
        return None, text or " / ".join((said or lines)[-2:])[-200:]
    if not judged:
        return max(counts), "wrong or not finished: " + " / ".join(lines[-3:])[-200:]
    return max(counts), said[0][10:150] if max(counts) and said else ""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--tools", default="memcheck,racecheck")
    parser.add_argument("--match", default="")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        return child(options.child, options.folder)
    start, sanitizer = time.monotonic(), find_sanitizer()
    if not sanitizer:
        sys.exit("no compute-sanitizer on this machine")
    lib = abi.load_library(os.environ.get("FMHA_CHECK_LIB"))
    selected = [(n, family, c) for n, (family, c) in enumerate(cases())
                if options.match in f"{family} {c}"]
    folder = tempfile.mkdtemp(prefix="fmha-sanitize-")
    code = build(lib, options.arch, selected, options.jobs)
    with open(os.path.join(folder, "code"), "wb") as file:
        pickle.dump((options.arch, code), file)
    print(f"{len(code)} kernels built in {time.monotonic() - start:.0f} s", flush=True)
    tools = options.tools.split(",")
    work = [(tool, item) for tool in tools for item in selected]
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        results = list(pool.map(lambda w: run_one(sanitizer, w[0], w[1][0], folder), work))
    table, bad = [], 0
    for (tool, (number, family, case)), (errors, text) in zip(work, results):
        wrong = errors != 0 or bool(text)
        bad += wrong
        table.append(f"{tool:10} {family:14} {'?' if errors is None else errors:>4} errors  {case}"
                     f"{'  ' + text if wrong else ''}")
        if wrong:
            print(table[-1])
            with open(os.path.join(folder, f"{tool}-{number}.log"), errors="replace") as file:
                print("".join("    | " + line for line in file.readlines()[:14]), end="")
    print("\n".join(table))
    shutil.rmtree(folder, ignore_errors=True)
    print(f"compute-sanitizer {' '.join(tools)}: {len(work) - bad} of {len(work)} runs clean,"
          f" {time.monotonic() - start:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
