# SPDX-License-Identifier: MIT
"""Compiles GPU kernels with every compiler this machine has; no GPU is needed.

    python3 tests/gpu/compile_check.py [--full] [--jobs N]

NVRTC for sm_80 and sm_90a; clang-19 for gfx90a, gfx942, gfx1100; hipRTC (which aborts on
a name it does not know, so in a child process) for gfx90a. What the machine lacks is skipped, saying so. The
short version takes one kernel of every family and compiler; --full all that tests/gpu/suite.py needs.
Spills are reported; a kernel that does not compile fails the run.
"""
import argparse
import concurrent.futures
import ctypes
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import abi  # noqa: E402
import clangs  # noqa: E402
import suite  # noqa: E402
from cuda_device import compile_cubin, find_nvrtc  # noqa: E402

GPU = os.path.join(abi.ROOT, "kernels", "gpu")


def with_nvrtc(arch, kernel):
    _, log = compile_cubin(kernel.source.decode(), abi.kernel_options(kernel), arch)
    return sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", log))


def with_clang(arch, kernel):
    with tempfile.NamedTemporaryFile(suffix=".co") as out:
        done = subprocess.run(
            ["clang-19", "-x", "hip", "--cuda-device-only", "--no-gpu-bundle-output", "-nogpulib", "-nogpuinc",
             "-std=c++17", "-O3", f"--offload-arch={arch}", "-I" + GPU, "-I" + abi.INCLUDE,
             "-Rpass-analysis=kernel-resource-usage", *clangs.standing_options("clang-19"),
             *abi.kernel_options(kernel), "-o", out.name,
             os.path.join(GPU, kernel.source.decode())], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[:600])
    return sum(int(n) for n in re.findall(r"VGPRs Spill: (\d+)", done.stderr))


def hiprtc_child(arch, source, options):
    """Runs in a child: hipRTC 5.2 may abort."""
    lib = ctypes.CDLL("libamdhip64.so.5")
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    text = open(os.path.join(GPU, source), "rb").read()
    lib.hiprtcCreateProgram(ctypes.byref(program), text, source.encode(), 0, None, None)
    options = [f"--offload-arch={arch}", "-std=c++17", "-I" + GPU, "-I" + abi.INCLUDE, *options]
    array = (ctypes.c_char_p * len(options))(*[o.encode() for o in options])
    status = lib.hiprtcCompileProgram(program, len(options), array)
    lib.hiprtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value + 1)
    lib.hiprtcGetProgramLog(program, log)
    if status:
        print(log.value.decode(errors="replace")[:600])
    return 1 if status else 0


def with_hiprtc(arch, kernel):
    done = subprocess.run([sys.executable, __file__, "--hiprtc", arch, kernel.source.decode(),
                           *abi.kernel_options(kernel)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"exit {done.returncode}: {done.stdout[:500]} {done.stderr[-300:]}")
    return 0


def compilers():
    if find_nvrtc():
        yield with_nvrtc, ("sm_80", "sm_90a")
    else:
        print("compile: NVRTC skipped, no libnvrtc here")
    if shutil.which("clang-19"):
        yield with_clang, ("gfx90a", "gfx942", "gfx1100")
    else:
        print("compile: clang skipped, no clang-19 here")
    try:
        ctypes.CDLL("libamdhip64.so.5")
        yield with_hiprtc, ("gfx90a",)
    except OSError:
        print("compile: hipRTC skipped, no libamdhip64 here")


SHORT = (abi.FWD, abi.FWD_SPLITKV, abi.BWD_DQ_DK_DV)  # the small families are alike everywhere


def wanted(lib, arch, full):
    cases = list(suite.small(False)) + (list(suite.wide()) if full else [])
    found = {}
    for case in cases:
        for kernel in suite.kernels(case, lib, arch):
            if kernel is not None and (full or arch == "sm_90a" or kernel.family in SHORT):
                found.setdefault(kernel.name if full else kernel.family, kernel)
    return list(found.values())


def main():
    if len(sys.argv) > 1 and sys.argv[1] == "--hiprtc":
        return hiprtc_child(sys.argv[2], sys.argv[3], sys.argv[4:])
    parser = argparse.ArgumentParser()
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    lib, failed, done, spilled, start = abi.load_library(), 0, 0, [], time.time()
    jobs = [(f, arch, k) for f, archs in compilers() for arch in archs for k in wanted(lib, arch, options.full)]

    def one(job):
        compiler, arch, kernel = job
        try:
            return job, compiler(arch, kernel), None
        except RuntimeError as error:
            return job, 0, str(error)

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for (compiler, arch, kernel), spills, error in pool.map(one, jobs):
            done += 1
            if error:
                failed += 1
                print(f"FAIL {compiler.__name__} {arch} {kernel.name.decode()}: {error}", flush=True)
            elif spills:
                spilled.append(kernel.name.decode())
    for name in spilled:
        print("spills:", name)
    print(f"compile: {done - failed} of {done} kernels, {len(spilled)} with spills, {time.time() - start:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
