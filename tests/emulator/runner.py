#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""What executes code objects for the libamdhip64 without a GPU (tests/gpu/stub/hip_fake.h): each line of stdin is a launch,
each line of stdout "ok" or what was wrong. The memory of the process that launches is mapped here at its own addresses.
"""
import ctypes
import json
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)

PROT_READ_WRITE, MAP_SHARED, MAP_FIXED_NOREPLACE = 3, 1, 0x100000

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Mapped:
    def __init__(self, memory):
        self.memory = memory

    def __enter__(self):
        for address, size, path in self.memory:
            fd = os.open(path, os.O_RDWR)
            at = libc.mmap(address, size, PROT_READ_WRITE, MAP_SHARED | MAP_FIXED_NOREPLACE, fd, 0)
            os.close(fd)
            if at != address:
                raise OSError(ctypes.get_errno(), f"{size} bytes at {address:#x} cannot be mapped")

    def __exit__(self, *_):
        for address, size, _ in self.memory:
            libc.munmap(address, size)


def launch(asked):
    import emulator
    code = emulator.CodeObject(asked["code"], asked["arch"].split(":")[0])
    kernel = code.kernels[asked["entry"]]
    if asked["threads"] > kernel[".max_flat_workgroup_size"]:
        raise ValueError(f"{asked['threads']} threads, compiled for {kernel['.max_flat_workgroup_size']}")
    size = next(a[".size"] for a in kernel[".args"] if not a[".value_kind"].startswith("hidden_"))
    with Mapped(asked["memory"]):
        code.launch(asked["entry"], asked["grid"], asked["threads"], bytes.fromhex(asked["args"])[:size], asked["lds"])


def main():
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            launch(json.loads(line))
            answers.write("ok\n")
        except Exception as error:
            answers.write(f"{type(error).__name__}: {error}\n".replace("\n", " ") + "\n")


if __name__ == "__main__":
    main()
