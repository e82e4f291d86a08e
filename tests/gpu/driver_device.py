# SPDX-License-Identifier: MIT
"""Kernels through libcuda alone, each tensor in an allocation of its own: what a memory checker wants.

An allocator that hands out pieces of large blocks, as PyTorch's does, would hide an access past a
tensor's end from it.
"""
import ctypes
import os

import abi
from cuda_device import relocate


class DriverDevice:
    """code: {kernel name: code object}. The context is the device's primary one."""

    def __init__(self, lib, code, library="libcuda.so.1"):
        self.lib, self.code, self.functions = lib, code, {}
        self.cuda = ctypes.CDLL(library)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(device), int(os.environ.get("FMHA_GPU", "0")))
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name, *arguments):
        status = getattr(self.cuda, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self.cuda.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"{name}: {text.value.decode() if text.value else status}")

    def memory_info(self):
        """(free, total) bytes of the device."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def function(self, kernel):
        name = kernel.name.decode()
        if name not in self.functions:
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            self.call("cuModuleLoadData", ctypes.byref(module), self.code[name])
            self.call("cuModuleGetFunction", ctypes.byref(function), module, kernel.entry)
            if kernel.lds_bytes > 48 * 1024:
                self.call("cuFuncSetAttribute", function, 8, kernel.lds_bytes)
            self.functions[name] = function
        return self.functions[name]

    def run(self, kernel, args, problem):
        """Copies every tensor there, runs, copies the outputs back, frees."""
        stream, places = ctypes.c_void_p(), []
        self.call("cuStreamCreate", ctypes.byref(stream), 1)
        for array in problem.keep:
            place = ctypes.c_uint64()
            self.call("cuMemAlloc_v2", ctypes.byref(place), ctypes.c_size_t(max(array.nbytes, 1)))
            self.copy("cuMemcpyHtoDAsync_v2", place, array.ctypes.data, array.nbytes, stream)
            places.append((array, place))
        device_args = type(args).from_buffer_copy(args)
        relocate(device_args, [(a.ctypes.data, a.nbytes, p.value) for a, p in places])
        grid = abi.kernel_grid(self.lib, kernel, args)
        if 0 not in grid:
            parameters = (ctypes.c_void_p * 1)(ctypes.addressof(device_args))
            self.call("cuLaunchKernel", self.function(kernel), *grid, kernel.block[0], 1, 1,
                      kernel.lds_bytes, stream, parameters, None)
        self.call("cuStreamSynchronize", stream)
        for array, place in places:
            if any(array is o for o in problem.outputs.values()):
                self.copy("cuMemcpyDtoHAsync_v2", array.ctypes.data, place, array.nbytes, stream)
        self.call("cuStreamSynchronize", stream)
        for _, place in places:
            self.call("cuMemFree_v2", place)
        self.call("cuStreamDestroy_v2", stream)

    def copy(self, name, to, start, size, stream):
        ends = [ctypes.c_void_p(x) if isinstance(x, int) else x for x in (to, start)]
        self.call(name, *ends, ctypes.c_size_t(size), stream)
