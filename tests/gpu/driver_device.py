# SPDX-License-Identifier: MIT
"""libcuda through ctypes, without PyTorch: memory shared by descriptor, and kernels for a memory checker."""
import ctypes
import os

import abi
from cuda_device import relocate


class Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class Access(ctypes.Structure):
    _fields_ = [("location", Location), ("flags", ctypes.c_int)]


class Driver:
    """A context on the device FMHA_GPU (0), and a stream."""

    def __init__(self, library="libcuda.so.1"):
        self.cuda, self.number = ctypes.CDLL(library), int(os.environ.get("FMHA_GPU", "0"))
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.stream = ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(device), self.number)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self.call("cuStreamCreate", ctypes.byref(self.stream), 1)

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

    def map_descriptor(self, fd, size):
        """The address here of an allocation that came as a descriptor; the caller keeps fd."""
        handle, place = ctypes.c_uint64(), ctypes.c_uint64()
        access = Access(Location(1, self.number), 3)  # a device; read and write
        self.call("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(fd), 1)
        self.call("cuMemAddressReserve", ctypes.byref(place), ctypes.c_size_t(size), ctypes.c_size_t(0),
                  ctypes.c_uint64(0), ctypes.c_uint64(0))
        self.call("cuMemMap", place, ctypes.c_size_t(size), ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
        self.call("cuMemRelease", handle)
        self.call("cuMemSetAccess", place, ctypes.c_size_t(size), ctypes.byref(access), ctypes.c_size_t(1))
        return place.value

    def unmap(self, place, size):
        self.call("cuMemUnmap", ctypes.c_uint64(place), ctypes.c_size_t(size))
        self.call("cuMemAddressFree", ctypes.c_uint64(place), ctypes.c_size_t(size))

    def write(self, place, array):
        """array: contiguous, in host memory."""
        self.call("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(place), ctypes.c_void_p(array.ctypes.data),
                  ctypes.c_size_t(array.nbytes), self.stream)
        self.call("cuStreamSynchronize", self.stream)

    def read(self, array, place):
        self.call("cuMemcpyDtoHAsync_v2", ctypes.c_void_p(array.ctypes.data), ctypes.c_uint64(place),
                  ctypes.c_size_t(array.nbytes), self.stream)
        self.call("cuStreamSynchronize", self.stream)


class DriverDevice(Driver):
    """
    Runs kernels with each tensor in an allocation of its own: an allocator that hands out pieces of
    large blocks, as PyTorch's does, would hide an access past a tensor's end from a memory checker.
    code: {kernel name: code object}.
    """

    def __init__(self, lib, code):
        super().__init__()
        self.lib, self.code, self.functions = lib, code, {}

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
        places = []
        for array in problem.keep:
            place = ctypes.c_uint64()
            self.call("cuMemAlloc_v2", ctypes.byref(place), ctypes.c_size_t(max(array.nbytes, 1)))
            self.write(place.value, array)
            places.append((array, place.value))
        device_args = type(args).from_buffer_copy(args)
        relocate(device_args, [(a.ctypes.data, a.nbytes, p) for a, p in places])
        grid = abi.kernel_grid(self.lib, kernel, args)
        if 0 not in grid:
            parameters = (ctypes.c_void_p * 1)(ctypes.addressof(device_args))
            self.call("cuLaunchKernel", self.function(kernel), *grid, kernel.block[0], 1, 1,
                      kernel.lds_bytes, self.stream, parameters, None)
        self.call("cuStreamSynchronize", self.stream)
        for array, place in places:
            if any(array is o for o in problem.outputs.values()):
                self.read(array, place)
            self.call("cuMemFree_v2", ctypes.c_uint64(place))
