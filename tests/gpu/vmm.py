#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""
What a pool of pages on a GPU could rest on: memory that CUDA makes as a file descriptor, held by a process without CUDA.

    python3 tests/gpu/vmm.py

Asked of the driver, each by processes of their own: does a descriptor that somebody holds keep the memory after its maker was
killed; is the memory free when the last descriptor is closed, and not before; can who imports it be kept from writing; what does an
import cost; and does a kernel still write after the kernel (of the system) has said that its process has ended.
"""
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import time

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from cuda_device import find_nvrtc  # noqa: E402

MIB = 1 << 20
PATTERN = 0x5EA1ED01
POSIX_FD, PINNED, ON_DEVICE, READS, WRITES = 1, 1, 1, 1, 3
ENDLESS = b"""
extern "C" __global__ void endless(volatile unsigned *word, unsigned long long n)
{
	for (unsigned turn = 1;; turn = turn * 2 | 1)
		for (unsigned long long i = threadIdx.x; i < n; i += blockDim.x)
			word[i] = turn;
}
"""


class Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class Properties(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("handle_types", ctypes.c_int), ("location", Location), ("win32", ctypes.c_void_p),
                ("flags", ctypes.c_ubyte * 8)]


class Access(ctypes.Structure):
    _fields_ = [("location", Location), ("flags", ctypes.c_int)]


class Driver:
    """libcuda, with the primary context of card 0 current."""

    def __init__(self):
        self.lib, context, device = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_int()
        self("cuInit", 0)
        self("cuDeviceGet", ctypes.byref(device), 0)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self("cuCtxSetCurrent", context)

    def status(self, name, *args):
        return getattr(self.lib, name)(*args)

    def __call__(self, name, *args):
        status = self.status(name, *args)
        if status:
            raise RuntimeError(f"{name}: {status}")

    def create(self, size):
        properties = Properties(PINNED, POSIX_FD, Location(ON_DEVICE, 0), None)
        handle, fd = ctypes.c_ulonglong(), ctypes.c_int()
        self("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(properties), ctypes.c_ulonglong(0))
        self("cuMemExportToShareableHandle", ctypes.byref(fd), handle, POSIX_FD, ctypes.c_ulonglong(0))
        return handle, fd.value

    def import_(self, fd):
        handle = ctypes.c_ulonglong()
        self("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(fd), POSIX_FD)
        return handle

    def map(self, handle, size, access=WRITES):
        pointer = ctypes.c_ulonglong()
        self("cuMemAddressReserve", ctypes.byref(pointer), ctypes.c_size_t(size), ctypes.c_size_t(0), ctypes.c_ulonglong(0),
             ctypes.c_ulonglong(0))
        self("cuMemMap", pointer, ctypes.c_size_t(size), ctypes.c_size_t(0), handle, ctypes.c_ulonglong(0))
        self.status("cuMemRelease", handle)
        self("cuMemSetAccess", pointer, ctypes.c_size_t(size), ctypes.byref(Access(Location(ON_DEVICE, 0), access)),
             ctypes.c_size_t(1))
        return pointer

    def fill(self, pointer, word, size):
        status = self.status("cuMemsetD32_v2", pointer, ctypes.c_uint(word), ctypes.c_size_t(size // 4))
        return status or self.status("cuCtxSynchronize")

    def differing(self, pointer, word, size):
        """How many words are not @word."""
        here = ctypes.create_string_buffer(size)
        self("cuMemcpyDtoH_v2", here, pointer, ctypes.c_size_t(size))
        return int((np.frombuffer(here, np.uint32) != word).sum())

    def free_bytes(self):
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value


def compile_endless():
    lib, program, size = find_nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    lib.nvrtcCreateProgram(ctypes.byref(program), ENDLESS, b"endless", 0, None, None)
    option = (ctypes.c_char_p * 1)(b"--gpu-architecture=compute_80")
    if lib.nvrtcCompileProgram(program, 1, option):
        raise RuntimeError("NVRTC refuses the kernel")
    lib.nvrtcGetPTXSize(program, ctypes.byref(size))
    ptx = ctypes.create_string_buffer(size.value)
    lib.nvrtcGetPTX(program, ptx)
    return ptx


# What each process does: it answers "words" on the socket that it has as standard input, once a line is read from there.


def make(link, size):
    cuda = Driver()
    handle, fd = cuda.create(size)
    cuda.fill(cuda.map(handle, size), PATTERN, size)
    socket.send_fds(link, [b"made"], [fd])
    link.recv(1)


def meter(link, size):
    cuda = Driver()
    while link.recv(1):
        link.sendall(str(cuda.free_bytes() // MIB).encode())


def read(link, size):
    cuda = Driver()
    _, fds, _, _ = socket.recv_fds(link, 16, 1)
    start = time.perf_counter()
    pointer = cuda.map(cuda.import_(fds[0]), size)
    took = time.perf_counter() - start
    link.sendall(f"{cuda.differing(pointer, PATTERN, min(size, 64 * MIB))} {took * 1e3:.3f}".encode())
    link.recv(1)


def reader_writes(link, size):
    """Maps to read only, then tries to write; then maps anew as it likes."""
    cuda = Driver()
    _, fds, _, _ = socket.recv_fds(link, 16, 1)
    own = cuda.map(cuda.import_(fds[0]), size, WRITES)
    wrote = cuda.fill(own, PATTERN, size)
    try:
        refused = cuda.fill(cuda.map(cuda.import_(fds[0]), size, READS), 0, size)
        link.sendall(f"{refused} {wrote}".encode())
    except RuntimeError as error:
        link.sendall(f"{error} {wrote}".encode())


def endless(link, size):
    cuda, module, function, kernel = Driver(), ctypes.c_void_p(), ctypes.c_void_p(), compile_endless()
    _, fds, _, _ = socket.recv_fds(link, 16, 1)
    pointer = cuda.map(cuda.import_(fds[0]), size)
    cuda("cuModuleLoadData", ctypes.byref(module), kernel)
    cuda("cuModuleGetFunction", ctypes.byref(function), module, b"endless")
    words = ctypes.c_ulonglong(size // 4)
    args = (ctypes.c_void_p * 2)(ctypes.cast(ctypes.byref(pointer), ctypes.c_void_p), ctypes.cast(ctypes.byref(words), ctypes.c_void_p))
    cuda("cuLaunchKernel", function, 1, 1, 1, 1024, 1, 1, 0, None, args, None)
    link.sendall(b"runs")
    link.recv(1)


def watch(link, size):
    """Says whether words change, by two looks 20 ms apart; then, told so, zeroes them and looks whether they stay."""
    cuda = Driver()
    _, fds, _, _ = socket.recv_fds(link, 16, 1)
    pointer = cuda.map(cuda.import_(fds[0]), size)
    link.sendall(b"ready")
    link.recv(1)
    first = cuda.differing(pointer, 0, size)
    link.sendall(b"writes" if first else b"none")
    link.recv(1)
    cuda.fill(pointer, 0, size)
    until, worst = time.time() + 2, 0
    while time.time() < until:
        worst = max(worst, cuda.differing(pointer, 0, size))
    link.sendall(str(worst).encode())


ROLES = {role.__name__: role for role in (make, meter, read, reader_writes, endless, watch)}


class Process:
    def __init__(self, role, size):
        self.link, theirs = socket.socketpair()
        self.link.settimeout(60)
        self.child = subprocess.Popen([sys.executable, os.path.abspath(__file__), role, str(size)], stdin=theirs)
        theirs.close()

    def hear(self):
        return self.link.recv(256).decode()

    def ask(self):
        self.link.sendall(b"?")
        return self.hear()

    def give(self, fd):
        socket.send_fds(self.link, [b"it"], [fd])

    def kill(self):
        """Returns when the system says that the process has ended: what the front of a pool waits for, too."""
        watched = os.pidfd_open(self.child.pid)
        self.child.send_signal(signal.SIGKILL)
        select.select([watched], [], [], 60)
        os.close(watched)

    def end(self):
        self.link.close()
        self.child.wait(60)


def made(size):
    maker = Process("make", size)
    _, fds, _, _ = socket.recv_fds(maker.link, 16, 1)
    return maker, fds[0]


def main():
    failed = 0

    def said(what, holds, shown):
        nonlocal failed
        failed += not holds
        print(f"{what:<76} {'yes' if holds else 'NO':<4} {shown}", flush=True)

    gauge = Process("meter", 0)
    before = int(gauge.ask())
    size = 1024 * MIB
    maker, fd = made(size)
    maker.kill()
    time.sleep(0.5)
    kept = before - int(gauge.ask())
    said("a descriptor keeps the memory when its maker is killed", kept >= 1024, f"{kept} MiB in use of 1024")
    reader = Process("read", size)
    reader.give(fd)
    wrong, took = reader.hear().split()
    said("and its contents", wrong == "0", f"{wrong} words of 64 MiB differ; import and map of 1 GiB {took} ms")
    again = Process("read", size)
    again.give(fd)
    said("for a second reader beside the first", again.hear().split()[0] == "0", "")
    again.end()
    os.close(fd)
    kept = before - int(gauge.ask())
    said("who has it mapped keeps it when the holder closes", kept >= 1024, f"{kept} MiB")
    reader.end()
    time.sleep(0.5)
    kept = before - int(gauge.ask())
    said("then it is free", kept < 512, f"{kept} MiB")

    size = 64 * MIB
    maker, fd = made(size)
    hostile = Process("reader_writes", size)
    hostile.give(fd)
    refused, wrote = hostile.hear().rsplit(" ", 1)
    said("a mapping to read only cannot be written", refused != "0", f"status {refused}")
    said("but who imports chooses: what is shared is shared to write", wrote == "0", f"status {wrote}")
    hostile.child.wait(60)
    maker.end()
    os.close(fd)

    size = 4 * MIB
    maker, fd = made(size)
    eye, writer = Process("watch", size), Process("endless", size)
    for process in (eye, writer):
        process.give(fd)
    eye.hear(), writer.hear()
    time.sleep(0.2)
    said("an endless kernel writes", eye.ask() == "writes", "")
    writer.kill()
    late = eye.ask()
    said("nothing is written once the system says that its process has ended", late == "0", f"{late} words after zeroing")
    eye.end()
    maker.end()

    for size in (2 * MIB, 64 * MIB, 4096 * MIB):
        maker, fd = made(size)
        reader = Process("read", size)
        reader.give(fd)
        print(f"import and map of {size // MIB} MiB: {reader.hear().split()[1]} ms")
        reader.end()
        maker.end()
        os.close(fd)
    return failed


if __name__ == "__main__":
    if len(sys.argv) == 3:
        ROLES[sys.argv[1]](socket.socket(fileno=0), int(sys.argv[2]))
    else:
        sys.exit(main())
