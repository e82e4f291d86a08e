# SPDX-License-Identifier: MIT
"""The page of faults.h, and processes that are started with the shim."""
import ctypes
import mmap
import os
import subprocess

import fmhad

CLASSES = ["memory", "map", "file", "socket", "event", "process", "uv", "msgpack", "cjson"]
KINDS = ["front", "worker", "helper", "client"]
OFF, ONCE, ALWAYS = 0, 1, 2
FRAMES = 24


class Frame(ctypes.Structure):
    _fields_ = [("module", ctypes.c_char * 24), ("offset", ctypes.c_uint64)]


class Side(ctypes.Structure):
    _fields_ = [
        ("mode", ctypes.c_uint32),
        ("class_", ctypes.c_uint32),
        ("left", ctypes.c_int64),
        ("variant", ctypes.c_uint32),
        ("pid", ctypes.c_uint32),
        ("calls", ctypes.c_uint64 * 16),
        ("delivered", ctypes.c_uint64),
        ("blocks", ctypes.c_int64),
        ("aborts", ctypes.c_uint64),
        ("aborted_in", ctypes.c_char * 24),
        ("function", ctypes.c_char * 32),
        ("error", ctypes.c_uint32),
        ("n_frames", ctypes.c_uint32),
        ("frames", Frame * FRAMES),
    ]

    def arm(self, name, nth, mode=ONCE, variant=0):
        """The nth call of a class fails, and with ALWAYS those after it."""
        self.mode = OFF
        self.delivered = self.n_frames = self.aborts = 0
        self.aborted_in = b""
        self.class_, self.left, self.variant = CLASSES.index(name), nth, variant
        self.mode = mode

    def disarm(self):
        """Whether a call was failed."""
        self.mode = OFF
        return self.delivered > 0

    def count(self, function):
        """How many calls of each class there are while the function runs."""
        before = list(self.calls)
        function()
        return {name: self.calls[i] - before[i] for i, name in enumerate(CLASSES)}

    def where(self):
        """The failed call and who made it, as addr2line tells."""
        lines = [f"{self.function.decode()}()"]
        for i in range(self.n_frames):
            module, offset = self.frames[i].module.decode(), self.frames[i].offset
            lines.append(place(module, offset))
        return " < ".join(lines)


class Page(ctypes.Structure):
    _fields_ = [("magic", ctypes.c_uint32), ("bytes", ctypes.c_uint32), ("sides", Side * len(KINDS))]


def place(module, offset, known={}):  # pylint: disable=dangerous-default-value
    """file:line of an address that was returned to; the module when it has no such information."""
    at = (module, offset)
    if at not in known:
        known[at] = f"{module}+{offset:#x}"
        module = "fmhad" if module.isdigit() else module  # a worker's argv[0] is fmhad-worker/0
        if module.startswith(("fmhad", "libfmha_client", "client_faults")):
            said = subprocess.run(
                ["addr2line", "-f", "-e", fmhad.find_program(module), hex(offset - 1)],
                capture_output=True, text=True, check=False).stdout.split()
            if said:
                known[at] = said[0] if said[0] != "??" else f"{module}+{offset:#x}"
    return known[at]


def shim():
    found = list(fmhad.build_dir().rglob("libfmha_faults.so"))
    if not found:
        raise FileNotFoundError(f"libfmha_faults.so in {fmhad.build_dir()}: build it first, without sanitizers")
    return found[0]


class Faults:
    """A page in a file of its own, and the environment of processes that are to look at it."""

    def __init__(self, path, new=True):
        self.path = path
        if new:
            with open(path, "wb") as file:
                file.truncate(ctypes.sizeof(Page))
        with open(path, "r+b") as file:
            self.map = mmap.mmap(file.fileno(), ctypes.sizeof(Page))
        self.page = Page.from_buffer(self.map)
        self.page.bytes = ctypes.sizeof(Page)
        self.page.magic = 0x46415531
        self.sides = {kind: self.page.sides[i] for i, kind in enumerate(KINDS)}
        self.environment = {"LD_PRELOAD": str(shim()), "FMHA_FAULTS": str(path)}

    @classmethod
    def open(cls, path):
        """One that another process, or another object, has made."""
        return cls(path, new=False)

    def __getitem__(self, kind):
        return self.sides[kind]


def print_counts(counts):
    """The faults that were tried, by kind of process and class."""
    print(f"{'faults tried':14}" + "".join(f"{c:>9}" for c in CLASSES) + f"{'all':>9}")
    for kind in KINDS:
        row = [counts[kind, c] for c in CLASSES]
        if sum(row):
            print(f"{kind:14}" + "".join(f"{n:9}" for n in row) + f"{sum(row):9}")
