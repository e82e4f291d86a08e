# SPDX-License-Identifier: MIT
"""What convert_dq makes of dK and dV in parts (kernels/gpu/general/bwd_rows.h), which Hopper's loops alone leave: by the same text as
machine code of RDNA, whose blocks have as many threads.

    TINYGRAD=/path/to/tinygrad python3 tests/emulator/parts.py [--arch gfx1201]

dQ is converted by the blocks in front of those; NaN lies in parts and sums where nobody is to look, and rows without a key stay what
they were.
"""
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "..", "gpu")]

import numpy as np  # noqa: E402

import abi  # noqa: E402
import run  # noqa: E402
from cases import NP_STORAGE, aligned, decode, encode, pointer, tensor  # noqa: E402

ROWS, COUNTERS, UNTOUCHED = 64, 64, 0x1234
THREADS = 128
CASES = [  # nhead_q, nhead_k, parts, hdim_q, hdim_v, keys of each sequence, packed, leftpad
    (8, 2, 2, 128, 128, [70, 33], False, 0), (8, 2, 4, 64, 64, [0, 50, 1], True, 0), (7, 1, 7, 96, 40, [41], False, 5),
    (6, 2, 3, 192, 128, [9, 20], True, 2),
]


def problem(rng, dtype, heads, heads_k, parts, hq, hv, keys, packed, pad):
    """(arguments, dk, dv and what they are to be, what has to stay alive)"""
    a, n, most, n_q = abi.BwdArgs(), len(keys), max(keys), 40
    s, total = a.sequences, sum(keys) if packed else n * most
    s.batch, s.seqlen_q_max, s.seqlen_k_max, s.total_q, s.total_k = n, n_q, most, n * n_q, total
    starts = np.cumsum([0] + keys)
    lengths, pads = (np.array(x, np.int32) for x in (keys, [min(pad, k) for k in keys]))
    seqstart_k, seqstart_q = starts.astype(np.int32), (np.arange(n + 1) * n_q).astype(np.int32)
    if packed:
        s.seqstart_k, s.seqstart_q = pointer(seqstart_k), pointer(seqstart_q)
    s.seqlen_k = pointer(lengths)
    if pad:
        s.leftpad_k = pointer(pads)
    a.nhead_q, a.nhead_k, a.hdim_q, a.hdim_v, a.dtype, a.scale, a.kv_parts = heads, heads_k, hq, hv, dtype, 0.3, parts
    rows, tile = 1 if packed else n, ROWS * -(-hq // 64) * 64 + COUNTERS
    acc = aligned((n * heads * tile,), np.float32)  # a tile has all rows of a head
    acc[...] = rng.standard_normal(acc.shape)
    offsets, splits = (np.arange(n + 1) * heads * tile).astype(np.int64), np.ones(n, np.int32)
    a.dq_acc, a.nsplits, a.dq_tile_rows, a.dq_tile_floats = pointer(acc), pointer(splits), ROWS, tile
    if packed:
        a.dq_acc_offsets = pointer(offsets)
    dq = aligned((rows, n * n_q // rows, heads, hq), NP_STORAGE[dtype])
    a.dq = tensor(dq, [x // dq.itemsize for x in dq.strides])
    sums = aligned((heads_k * parts * total * (hq + hv),), np.float32)
    sums[...] = np.nan
    found, wanted = [], []
    at = 0
    for d, factor in ((hq, 0.3), (hv, 1)):
        part = sums[at:at + heads_k * parts * total * d].reshape(heads_k, parts, total, d)
        at += part.size
        out = aligned((rows, total // rows, heads_k, d), NP_STORAGE[dtype])
        out[...] = UNTOUCHED
        want = out.copy()
        for b, k in enumerate(keys):
            p, first = (int(pads[b]) if pad else 0), int(starts[b]) if packed else b * most
            x = rng.standard_normal((heads_k, parts, k - p, d)).astype(np.float32)
            part[:, :, first + p:first + k] = x
            total_x = np.zeros_like(x[:, 0])
            for i in range(parts):
                total_x += x[:, i]
            to = want.reshape(total, heads_k, d)
            to[first + p:first + k] = encode((total_x * np.float32(factor)).transpose(1, 0, 2), dtype)
        found.append(out)
        wanted.append(want)
    a.dk, a.dv = (tensor(x, [y // x.itemsize for y in x.strides]) for x in found)
    a.kv_acc = pointer(sums)
    return a, found, wanted, (acc, offsets, splits, dq, sums, lengths, pads, seqstart_k, seqstart_q)


def check(arch, folder):
    """What it does wrong."""
    import emulator
    lib, rng, wrong = run.library(), np.random.default_rng(1), []
    for dtype in (abi.BF16, abi.F16):
        for case in CASES:
            a, found, wanted, keep = problem(rng, dtype, *case)
            kernel = abi.choose_kernel(lib, arch, abi.BWD_CONVERT_DQ, dtype, a)
            assert kernel.block[0] == THREADS
            grid = abi.kernel_grid(lib, kernel, a)
            code = emulator.CodeObject(run.compile_kernel(kernel, arch, folder), arch)
            code.launch(kernel.entry.decode(), grid, kernel.block[0], a, kernel.lds_bytes)
            for name, x, want in zip(("dK", "dV"), found, wanted):
                if not np.array_equal(x, want):
                    wrong.append(f"{abi.DTYPE_NAMES[dtype]} {case}: {name} has {np.count_nonzero(x != want)} wrong of {x.size}")
            if not np.isfinite(decode(keep[3], dtype)).all():
                wrong.append(f"{case}: dQ")
    return wrong


if __name__ == "__main__":
    sys.exit(run.check_archs("parts", ("gfx1100", "gfx1201"), check, "adds parts"))
