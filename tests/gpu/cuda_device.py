# SPDX-License-Identifier: MIT
"""Compiles with NVRTC and launches through the driver API, in PyTorch's context and stream."""
import ctypes
import glob
import os
import re
import subprocess
import sys
import threading
import time

import numpy as np

import abi
from sanitizer import find_sanitizer

UNITS = 132  # of an H100 SXM and of an H200


def find_nvrtc():
    names = [os.environ.get("FMHA_NVRTC", "libnvrtc.so.13"), "/usr/local/cuda/lib64/libnvrtc.so.13",
             "libnvrtc.so"]
    for pattern in ("/usr/local/cuda*/lib64/libnvrtc.so*", "/opt/*/.venv/lib/python3*/site-packages/nvidia/*/lib/libnvrtc.so*"):
        names += sorted(glob.glob(pattern))
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            pass
    return None


def compile_cubin(source, options, arch):
    """Returns (code object, log). Raises RuntimeError with the log."""
    lib = find_nvrtc()
    if lib is None:
        raise RuntimeError("no libnvrtc")
    folder = os.path.join(abi.ROOT, "kernels", "gpu")
    text = open(os.path.join(folder, source), "rb").read()
    options = [f"--gpu-architecture={arch}", "--std=c++17", "-I" + folder,
               "-I" + abi.INCLUDE, "--ptxas-options=-v", *options]
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    lib.nvrtcCreateProgram(ctypes.byref(program), text, source.encode(), 0, None, None)
    array = (ctypes.c_char_p * len(options))(*[o.encode() for o in options])
    status = lib.nvrtcCompileProgram(program, len(options), array)
    lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    lib.nvrtcGetProgramLog(program, log)
    log = log.value.decode(errors="replace")
    if status:
        raise RuntimeError(f"NVRTC {status}: {log}")
    lib.nvrtcGetCUBINSize(program, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    lib.nvrtcGetCUBIN(program, code)
    lib.nvrtcDestroyProgram(ctypes.byref(program))
    return code.raw, log


def compile_job(job):
    name, source, options, arch = job
    try:
        code, log = compile_cubin(source, options, arch)
        return name, code, log
    except RuntimeError as error:
        return name, None, str(error)


def build_cubins(folder, kernels, arch="sm_90a"):
    """{name: kernel} -> files of code in a folder, and a line of each; returns how many spill or have products that wait."""
    os.makedirs(folder, exist_ok=True)
    bad = 0
    for name, kernel in kernels.items():
        start = time.time()
        code, log = compile_cubin(kernel.source.decode(), abi.kernel_options(kernel), arch)
        spills = sum(int(x) for x in re.findall(r"(\d+) bytes spill stores", log))
        warnings = sorted(set(re.findall(r"C75\d\d", log)))
        bad += bool(spills or warnings)
        print(f"{name}: {time.time() - start:.1f} s, {len(code)} bytes, {' '.join(re.findall('Used [0-9]+ registers', log))}, "
              f"{spills} bytes of spills {' '.join(warnings)}", flush=True)
        with open(os.path.join(folder, name + ".cubin"), "wb") as f:
            f.write(code)
    return bad


def sanitize_cubins(script, folder, match):
    """`script run` under all tools at once, each on a process of its own; of its kernels only fmhad's are looked at."""
    sanitizer, failed, running = find_sanitizer(), 0, {}
    if not sanitizer:
        sys.exit("no compute-sanitizer on this machine")
    for tool in ("memcheck", "racecheck", "synccheck"):
        running[tool] = subprocess.Popen(
            [sanitizer, "--tool", tool, "--kernel-name", "kernel_substring=fmha", "--print-limit", "3", sys.executable,
             os.path.abspath(script), "run", folder, "--no-bench", "--few", "--match", match],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for tool, process in running.items():
        lines = process.communicate()[0].splitlines()
        said = [line for line in lines if "SUMMARY" in line or line.startswith("checks:")]
        clean = process.returncode == 0 and len(said) == 2 and re.search(r"SUMMARY: 0 (errors|hazards)", " ".join(said))
        failed += not clean
        print(tool + ":", "; ".join(said).replace("=========", "").strip(), flush=True)
        if not clean:
            print("\n".join(f"    | {line}" for line in lines[-40:]), flush=True)
    return failed


class Cuda:
    """libcuda in PyTorch's context."""

    def __init__(self, lib):
        import torch
        self.torch, self.lib = torch, lib
        self.cuda = ctypes.CDLL("libcuda.so.1")
        torch.zeros(1, device="cuda")
        self.functions = {}

    def check(self, status, what):
        if status:
            text = ctypes.c_char_p()
            self.cuda.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"{what}: {text.value.decode() if text.value else status}")

    def load(self, name, code, kernel):
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.check(self.cuda.cuModuleLoadData(ctypes.byref(module), code), "load " + name)
        self.check(self.cuda.cuModuleGetFunction(ctypes.byref(function), module, kernel.entry), "entry")
        if kernel.lds_bytes > 48 * 1024:
            self.check(self.cuda.cuFuncSetAttribute(function, 8, kernel.lds_bytes), "shared memory")
        self.functions[name] = function
        return function

    def launcher(self, function, kernel, args, units=UNITS, overlaps=False, blocks=0):
        """A function that launches @args, with the tensor maps that the kernel takes, on PyTorch's stream of then, of which a graph may be
        made. @overlaps: it may begin while the kernel before it runs. @blocks: so many, whatever the units."""
        raw = ctypes.create_string_buffer(ctypes.sizeof(abi.Launch) + 64)
        launch = abi.Launch.from_buffer(raw, -ctypes.addressof(raw) % 64)
        why = self.lib.check_launch(ctypes.byref(kernel), ctypes.c_uint32(units), ctypes.byref(args),
                                    ctypes.cast(self.cuda.cuTensorMapEncodeTiled, ctypes.c_void_p), ctypes.byref(launch))
        if why:
            raise RuntimeError(f"{kernel.name.decode()}: {why.decode()}")
        if blocks:
            launch.grid[:] = (blocks, 1, 1)
        maps = ctypes.addressof(launch.maps)
        parameters = (ctypes.c_void_p * 5)(ctypes.addressof(args), *(maps + 128 * i for i in range(launch.n_maps)))
        start = ctypes.cast(self.cuda.cuLaunchKernelEx, ctypes.c_void_p) if overlaps else None

        def launched(keep=(raw, args)):
            if 0 in launch.grid:
                return
            stream = ctypes.c_void_p(self.torch.cuda.current_stream().cuda_stream)
            if overlaps:
                status = self.lib.check_overlap(ctypes.byref(launch), start, function, stream, parameters)
            else:
                status = self.cuda.cuLaunchKernel(function, *launch.grid, *launch.block, launch.lds_bytes, stream, parameters, None)
            self.check(status, "launch")
        return launched


class Cubins(Cuda):
    """What build_cubins() has left in a folder."""

    def __init__(self, lib, folder):
        super().__init__(lib)
        self.folder = folder

    def function(self, name, kernel):
        if name in self.functions:
            return self.functions[name]
        with open(os.path.join(self.folder, name + ".cubin"), "rb") as f:
            return self.load(name, f.read(), kernel)


class CudaDevice(Cuda):
    def __init__(self, lib, arch):
        super().__init__(lib)
        self.arch, self.code = arch, {}
        self.lock, self.context = threading.Lock(), ctypes.c_void_p()
        self.check(self.cuda.cuCtxGetCurrent(ctypes.byref(self.context)), "context")

    def build(self, kernels, workers):
        """Compiles many kernels at once; returns the logs by name."""
        import concurrent.futures
        jobs = {k.name.decode(): (k.name.decode(), k.source.decode(), abi.kernel_options(k), self.arch)
                for k in kernels if k.name.decode() not in self.code}
        logs = {}
        if not jobs:
            return logs
        with concurrent.futures.ProcessPoolExecutor(workers) as pool:
            for name, code, log in pool.map(compile_job, jobs.values()):
                logs[name] = log
                if code:
                    self.code[name] = code
                else:
                    print("compile failed:", name, log[-400:])
        return logs

    def function(self, kernel):
        name = kernel.name.decode()
        if name not in self.functions:
            if name not in self.code:
                _, code, log = compile_job((name, kernel.source.decode(), abi.kernel_options(kernel), self.arch))
                if code is None:
                    raise RuntimeError(log[-600:])
                self.code[name] = code
            self.load(name, self.code[name], kernel)
        return self.functions[name]

    def launch(self, kernel, args):
        """args: a struct with device pointers. Asynchronous, on PyTorch's current stream."""
        grid = abi.kernel_grid(self.lib, kernel, args)
        if 0 in grid:
            return
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        stream = ctypes.c_void_p(self.torch.cuda.current_stream().cuda_stream)
        self.check(self.cuda.cuLaunchKernel(self.function(kernel), *grid, kernel.block[0], 1, 1,
                                            kernel.lds_bytes, stream, parameters, None), "launch")

    def run(self, kernel, args, problem):
        """Copies everything there, runs, copies the outputs back."""
        with self.lock:
            self.run_locked(kernel, args, problem)

    def run_locked(self, kernel, args, problem):
        torch, copies = self.torch, []
        self.check(self.cuda.cuCtxSetCurrent(self.context), "context")
        for array in problem.keep:
            raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            copies.append((array, torch.from_numpy(raw.copy()).cuda()))
        device_args = type(args).from_buffer_copy(args)
        relocate(device_args, [(a.ctypes.data, a.nbytes, t.data_ptr()) for a, t in copies])
        self.launch(kernel, device_args)
        torch.cuda.synchronize()
        for array, t in copies:
            if any(array is o for o in problem.outputs.values()):
                array.reshape(-1).view(np.uint8)[...] = t.cpu().numpy()


def relocate(struct, ranges):
    """Replaces every host pointer in a struct by the device pointer of what it points to."""
    for name, kind in struct._fields_:
        value = getattr(struct, name)
        if isinstance(value, ctypes.Structure):
            relocate(value, ranges)
        elif kind is ctypes.c_void_p and value:
            for start, size, device in ranges:
                if start <= value < start + max(size, 1):
                    setattr(struct, name, device + value - start)
                    break
            else:
                raise ValueError(f"{name}: a pointer to nothing known")
