# SPDX-License-Identifier: MIT
"""Every GPU kernel family on an instruction-level emulator of AMD GPUs, judged by the reference.

    TINYGRAD=/path/to/tinygrad python3 tests/emulator/run.py [--arch gfx942] [--match TEXT] [--quick]

Skipped (exit 77), saying so, when TINYGRAD is unset. Needs clang-19 and python3-pyelftools.
"""
import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "gpu"))

import abi  # noqa: E402
import suite  # noqa: E402

CLANG = os.environ.get("FMHA_CLANG", "clang-19")
# The emulator's dual-issue instructions may write one half before they read the other's sources.
NO_DUAL_ISSUE = ["-mllvm", "-amdgpu-enable-vopd=0"]


def compile_kernel(kernel, arch, folder):
    options = abi.kernel_options(kernel)
    key = hashlib.sha256((arch + " ".join(options)).encode()).hexdigest()[:24]
    out = os.path.join(folder, key + ".co")
    if os.path.exists(out):
        return out
    source = os.path.join(abi.ROOT, "kernels", "gpu", kernel.source.decode())
    subprocess.run(
        [CLANG, "-w", "-x", "hip", "--cuda-device-only", "--no-gpu-bundle-output", "-nogpulib", "-nogpuinc",
         "-std=c++17", "-O3", f"--offload-arch={arch}", "-I" + os.path.join(abi.ROOT, "kernels", "gpu"),
         "-I" + os.path.join(abi.ROOT, "kernels"),
         *(NO_DUAL_ISSUE if arch.startswith(("gfx11", "gfx12")) else []), *options, "-o", out, source], check=True, stderr=subprocess.DEVNULL)
    return out


class EmulatedDevice:
    """Runs a kernel on the memory that the argument struct points to."""

    def __init__(self, lib, arch, folder, reverse):
        import emulator
        self.lib, self.arch, self.folder, self.reverse = lib, arch, folder, reverse
        self.emulator = emulator

    def run(self, kernel, args, problem):
        grid = abi.kernel_grid(self.lib, kernel, args)
        if 0 in grid:
            return
        code = self.emulator.CodeObject(compile_kernel(kernel, self.arch, self.folder), self.arch)
        code.launch(kernel.entry.decode(), grid, kernel.block[0], args, kernel.lds_bytes,
                    self.reverse)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--arch", action="append")
    parser.add_argument("--match", default="")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--pipeline")
    options = parser.parse_args()
    if not os.environ.get("TINYGRAD"):
        print("emulator: skipped, TINYGRAD is not set (a checkout of github:tinygrad/tinygrad)")
        return 77
    lib = abi.load_library()
    failed = done = 0
    with tempfile.TemporaryDirectory() as folder:
        for arch in options.arch or ["gfx942", "gfx1100", "gfx1201"]:
            for n, case in enumerate(suite.small(options.quick)):
                title = f"{arch} {case}"
                if options.match not in title:
                    continue
                device = EmulatedDevice(lib, arch, folder, reverse=n % 2 == 1)
                start = time.time()
                try:
                    text = suite.run(case, lib, device, arch, options.pipeline)
                    print(f"ok   {title}: {text} ({time.time() - start:.1f} s)", flush=True)
                except (AssertionError, RuntimeError, subprocess.CalledProcessError) as error:
                    failed += 1
                    print(f"FAIL {title}: {str(error)[:160]}", flush=True)
                done += 1
    print(f"emulator: {done - failed} of {done} passed")
    return 1 if failed or not done else 0


if __name__ == "__main__":
    sys.exit(main())
