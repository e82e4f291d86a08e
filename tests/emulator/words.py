# SPDX-License-Identifier: MIT
"""The kernel that waits for words and writes them (kernels/gpu/words.hip), as machine code of every arch on the emulator.

    TINYGRAD=/path/to/tinygrad python3 tests/emulator/words.py [--arch gfx942]

A wait ends at once where the word is there, at a later value too, across 2^31 and 2^32; it does not end before somebody else has written it.
"""
import ctypes
import os
import signal
import sys
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "..", "gpu")]

import clangs  # noqa: E402
import run  # noqa: E402

HELD_S = 0.05  # the emulator ends what takes a million instructions


class Args(ctypes.Structure):
    """abi_word_args"""
    _fields_ = [("word", ctypes.c_uint64), ("value", ctypes.c_uint32), ("writes", ctypes.c_int32)]


def launch(code, memory, index, value, writes):
    at = ctypes.addressof(memory) + 4 * index
    code.launch("fmha_word", (1, 1, 1), 32, Args(at, value, writes), 0)


def check(arch, folder):
    """What it does wrong."""
    import emulator
    path = os.path.join(folder, f"words_{arch}.co")
    clangs.compile_object(arch, os.path.join(run.abi.ROOT, "kernels", "gpu", "words.hip"), [], path)
    code, memory, wrong = emulator.CodeObject(path, arch), (ctypes.c_uint32 * 3)(1, 2, 3), []
    launch(code, memory, 1, 0xfffffffe, 1)
    if list(memory) != [1, 0xfffffffe, 3]:
        wrong.append(f"writes {list(memory)}")
    for value in (0xfffffffe, 0xfffffff0, 0x7fffffff):  # there, or passed
        launch(code, memory, 1, value, 0)
    memory[1] = 1
    launch(code, memory, 1, 0xffffffff, 0)
    written = []

    def write():
        memory[0] = memory[2] = 9  # its neighbours
        time.sleep(HELD_S)
        written.append(time.monotonic())
        memory[1] = 6

    threading.Timer(HELD_S, write).start()
    signal.alarm(60)  # where it does not see it
    launch(code, memory, 1, 5, 0)
    ended = time.monotonic()
    signal.alarm(0)
    if not written or ended < written[0]:
        wrong.append("does not wait")
    return wrong


if __name__ == "__main__":
    sys.exit(run.check_archs("words", run.ARCHS, check, "waits and writes"))
