# SPDX-License-Identifier: MIT
"""The list of problems that every GPU kernel family is run with, and how one is run."""
import ctypes
import itertools

import numpy as np

import abi
from backward_cases import Append, Backward
from cases import Forward, Merge, pointer

BR, TL = abi.MASK_BOTTOM_RIGHT, abi.MASK_TOP_LEFT


class Case:
    """kind: forward, codes, alone, tail, backward, append or merge; pipeline: tiles of that name only, of the arch's name in a dict, or one
    tile, an abi.Tile."""

    def __init__(self, kind, pipeline=None, **options):
        self.kind, self.options, self.pipeline = kind, options, pipeline

    def run(self, lib, device, arch, pipeline):
        return globals()["run_" + self.kind](self, lib, device, arch, pipeline)

    def __str__(self):
        return self.kind + " " + " ".join(
            f"{k}={abi.DTYPE_NAMES[v] if k.endswith('dtype') else v}" for k, v in self.options.items()) + (
                f" {self.pipeline}" if isinstance(self.pipeline, str) else "")


def forward_small():
    d = dict(dtype=abi.BF16, sq=20, sk=70, dq=32, dv=32)
    yield Case("forward", **d)
    yield Case("forward", **d | dict(dtype=abi.F16, dq=64, dv=64, hq=2, hk=1))
    yield Case("forward", **d, mask=BR, right=0)
    yield Case("forward", **d, mask=TL, right=0)
    yield Case("forward", **d | dict(sq=70, sk=20), mask=BR, right=0)
    yield Case("forward", **d | dict(sq=40, sk=150), mask=BR, left=10, right=3, sinks=5)
    # Rows whose window lies beyond the keys see the sink positions, in a tile that is also the window's.
    yield Case("forward", **d | dict(sq=130, sk=30), mask=TL, left=1, right=4, sinks=2)
    yield Case("forward", **d, bias=abi.BF16, dropout=0.3, randval=True)
    yield Case("forward", **d, alibi=True, batch=2, mask=BR, right=0)
    yield Case("forward", **d, cap=5.0, sink=True)
    yield Case("forward", **d | dict(dtype=abi.F32), bias=abi.F32)
    yield Case("forward", dtype=abi.BF16, hq=2, hk=1, group=[(5, 30), (0, 8), (33, 9), (4, 0)], dq=32, dv=32,
               mask=BR, right=0, min_sq=5)
    yield Case("forward", **d | dict(sq=3, hq=4, hk=2), lens_k=[33], strided=True)
    yield Case("forward", **d, leftpad=[7], lens_k=[50], page=16)
    yield Case("forward", **d | dict(sq=2, hq=4, hk=2, batch=2), lens_k=[33, 70], page=4)
    yield Case("forward", **d | dict(sq=2, hq=4, hk=2, batch=2), lens_k=[33, 70], page=16, layout=1)
    yield Case("forward", **d | dict(sq=2, hq=4, hk=2, batch=2), lens_k=[33, 70], page=16, layout=1, shift=1)
    yield Case("forward", **d | dict(sq=2, hq=2, hk=2, batch=2), page=16, table="sglang")
    yield Case("forward", **d | dict(sq=2, hq=4, hk=2), splits=3, split_size=32, sink=True)
    yield Case("forward", **d | dict(dtype=abi.E4M3), descale=True)
    yield Case("forward", **d | dict(dtype=abi.E5M2, dq=40, dv=24), descale=True)
    yield Case("forward", **d, scale=-0.2)
    yield Case("forward", **d, scale=0.0, mask=BR, right=0)
    yield Case("forward", **d | dict(dq=96, dv=64, batch=2), cache_idx=True)
    yield Case("forward", **d, mask=TL, right=0, poison=(20, 70))
    yield Case("forward", **d | dict(sk=150), mask=BR, left=10, right=0, poison=(0, 120))
    yield Case("forward", **d | dict(sq=2, sk=150, hq=4), mask=BR, left=30, right=0, poison=(0, 118))


def backward_small():
    d = dict(dtype=abi.BF16, sq=20, sk=40, dq=32, dv=32)
    yield Case("backward", **d)
    yield Case("backward", **d | dict(dtype=abi.F16, hq=4, hk=2, dq=64, dv=64), mask=BR, right=0)
    yield Case("backward", **d | dict(sq=70, sk=50), mask=TL, left=9, right=4, sinks=3)
    yield Case("backward", **d | dict(sq=130, sk=30), mask=TL, left=1, right=4, sinks=2)
    yield Case("backward", **d, bias=abi.BF16, dbias=True, dropout=0.25)
    yield Case("backward", **d, alibi=True, cap=4.0, sink=True, dsink=True)
    yield Case("backward", **d | dict(dtype=abi.F32, hq=2), mask=BR, right=0)
    yield Case("backward", dtype=abi.BF16, hq=2, hk=1, group=[(5, 30), (0, 8), (33, 9), (4, 0)], dq=32, dv=64,
               mask=BR, right=0)
    yield Case("backward", **d | dict(sq=40, sk=150), acc=3)
    yield Case("backward", dtype=abi.BF16, hq=2, hk=1, group=[(5, 30), (0, 8), (33, 90), (4, 0)], dq=32, dv=32,
               mask=BR, right=0, acc=2)
    yield Case("backward", **d | dict(batch=2, hq=2), bias=abi.F32, dbias=True, bias_broadcast="bh")
    yield Case("backward", **d | dict(batch=2, hq=4, hk=2), bias=abi.BF16, dbias=True, bias_broadcast="h",
               mask=BR, right=0, dropout=0.25)
    yield Case("backward", **d | dict(batch=2, hq=2, sq=50), bias=abi.F32, dbias=True, bias_broadcast="br")
    yield Case("backward", **d | dict(batch=2, hq=2), bias=abi.F32, dbias=True, lens_k=[17, 0])
    yield Case("backward", dtype=abi.F16, hq=2, hk=1, group=[(5, 30), (33, 9)], dq=32, dv=32, bias=abi.F32,
               dbias=True, bias_broadcast="h")
    yield Case("backward", dtype=abi.BF16, hq=2, hk=1, group=[(0, 30), (0, 9)], dq=32, dv=32, bias=abi.F32,
               dbias=True, bias_broadcast="hr")


def append_small():
    yield Case("append")
    yield Case("append", page=8, rope=abi.ROPE_INTERLEAVED, rotary_dim=16)
    yield Case("append", page=16, layout=1, rope=abi.ROPE_HALF_ROTATED, rotary_dim=32, dtype=abi.F16,
               rotary_dtype=abi.F16, same=1)
    for new_dtype in (abi.BF16, abi.F16):
        d = dict(widens=1, new_dtype=new_dtype, hk=3)
        yield Case("append", **d, dtype=abi.E4M3, dq=128, dv=64, page=16, cap=70)
        yield Case("append", **d, dtype=abi.E5M2, dq=96, dv=40)
        yield Case("append", **d, dtype=abi.I8, dq=64, dv=128, page=16, cap=70)
        yield Case("append", **d, dtype=abi.I8, dq=40, dv=24)
        yield Case("append", **d, dtype=abi.E4M3, dq=32, dv=32, page=16, layout=1)
    d = dict(widens=1, dtype=abi.E4M3, new_dtype=abi.BF16, hk=3, page=16)
    for factors in ("heads", "pages", "found"):
        yield Case("append", **d, dq=64, dv=48, cap=70, factors=factors)
    yield Case("append", **d | dict(dtype=abi.E5M2), dq=40, dv=20, factors="found")
    # Sequences of few rows stay, and those behind the last place; more of them than a wave has lanes.
    d = dict(widens=1, dtype=abi.E4M3, new_dtype=abi.BF16, hk=2, dq=64, dv=32, page=16)
    yield Case("append", **d, batch=6, rows=(1, 9, 0, 17, 2, 40), few=2, places=3, cap=70)
    yield Case("append", **d, batch=5, rows=(9, 1, 17, 3, 40), few=1, places=2, cap=40)
    yield Case("append", **d | dict(dtype=abi.I8), batch=5, rows=(9, 1, 17, 3, 40), few=1, places=2, cap=40)
    yield Case("append", **d, batch=80, rows=(1, 2, 3, 1) * 20, few=1, places=30, cap=20)


def wide():
    """Every head dimension class, with lengths around the tiles: for real GPUs."""
    for dtype in (abi.BF16, abi.F16):
        for dq, dv in ((32, 32), (40, 64), (64, 64), (96, 128), (128, 128), (160, 160), (192, 128),
                       (192, 192), (256, 256)):
            d = dict(dtype=dtype, batch=2, hq=4, hk=2, dq=dq, dv=dv)
            yield Case("forward", **d, sq=300, sk=257, sink=True)
            yield Case("forward", **d, sq=130, sk=333, mask=BR, right=0)
            yield Case("forward", **d, sq=3, sk=333, splits=4, split_size=96)
            yield Case("backward", **d, sq=150, sk=170, mask=BR, right=0)
            yield Case("backward", **d, sq=129, sk=65)
    for dtype in (abi.F32, abi.E4M3, abi.E5M2):
        d = dict(dtype=dtype, batch=2, hq=4, hk=2, dq=128, dv=128)
        yield Case("forward", **d, sq=130, sk=333, mask=BR, right=0, descale=dtype >= abi.E4M3)
        yield Case("forward", **d, sq=3, sk=333, splits=4, split_size=96)
    for dq in (64, 128, 256):
        yield Case("backward", dtype=abi.F32, batch=2, hq=2, hk=1, dq=dq, dv=dq, sq=70, sk=90, mask=BR, right=0)
        yield Case("backward", dtype=abi.F32, batch=2, hq=2, hk=1, dq=dq, dv=dq, sq=70, sk=90, mask=BR, right=0,
                   bias=abi.F32, dbias=True, bias_broadcast="b")
    d = dict(dtype=abi.BF16, batch=2, hq=4, hk=2, dq=128, dv=128)
    yield Case("forward", **d, sq=150, sk=170, bias=abi.F32, dropout=0.2, randval=True)
    yield Case("forward", **d, sq=150, sk=170, alibi=True, cap=20.0, mask=BR, left=40, right=0, sinks=9)
    yield Case("forward", **d, sq=9, sk=700, page=64, lens_k=[650, 1])
    yield Case("forward", **d, sq=300, sk=700, page=16, table="sglang", mask=BR, right=0)
    yield Case("forward", **d, sq=1, sk=700, page=1, lens_k=[650, 333], splits=3, split_size=256)
    # Few rows, tile by tile of 16, 32 and 64 of them, and as many parts as waves share a row of the merge for.
    for dq in (64, 96, 128, 256):
        few = d | dict(dq=dq, dv=dq, hq=8)
        for sq in (1, 7, 16):
            yield Case("forward", **few, sq=sq, sk=1500, mask=BR, right=0)
            yield Case("forward", **few, sq=sq, sk=1500, splits=20, split_size=80, sink=True)
            yield Case("forward", **few, sq=sq, sk=1500, page=16, lens_k=[1403, 77], mask=BR, left=700, right=0, sinks=5)
            yield Case("forward", **few, sq=sq, sk=1500, page=3, lens_k=[1403, 77])
    yield Case("forward", **d, sq=1, sk=4700, splits=147, split_size=32)
    for pad in (5, 32):
        yield Case("forward", **d, sq=2, sk=700, page=32, leftpad=[pad, 0], lens_k=[650, 333])
    yield Case("forward", **d, sq=1, sk=700, page=32, layout=1, lens_k=[650, 333], splits=3, split_size=256)
    yield Case("forward", **d, sq=200, sk=190, strided=True, bias=abi.BF16, bias_broadcast=True)
    yield Case("backward", **d, sq=150, sk=170, bias=abi.F32, dbias=True, dropout=0.2)
    yield Case("backward", **d, sq=150, sk=170, alibi=True, cap=20.0, sink=True, dsink=True)
    yield Case("backward", dtype=abi.F16, hq=4, hk=1, group=[(200, 130), (1, 300), (0, 5), (77, 0)],
               dq=128, dv=128, mask=BR, right=0)
    yield Case("backward", **d, sq=300, sk=500, mask=BR, right=0, acc=4)
    yield Case("backward", **d, sq=150, sk=170, bias=abi.F32, dbias=True, bias_broadcast="bhr", mask=BR, right=0)
    yield Case("backward", **d | dict(dq=64, dv=64), sq=150, sk=170, bias=abi.BF16, dbias=True, bias_broadcast="b")
    yield Case("backward", **d | dict(dq=64, dv=64), sq=300, sk=500, mask=BR, left=64, right=9, sinks=4)
    # As many rows as have a wave take several times what it takes at once.
    d = dict(batch=2, new=4200, hk=8, hq=2, dq=40, dv=72, page=16, slots=1, cap=4300, rotary_dim=16)
    yield Case("append", dtype=abi.BF16, **d, rope=abi.ROPE_HALF_ROTATED)
    for factors in ("pages", "found", "odd"):
        yield Case("append", dtype=abi.E4M3, new_dtype=abi.BF16, **d, rope=abi.ROPE_INTERLEAVED, factors=factors)


def small(quick):
    """Tiny shapes: an emulator runs each in a second or so."""
    cases = [case for part in (forward_small, backward_small, append_small, forward_tails, backward_tails) for case in part()]
    return cases[::4] if quick else cases


def forward_features():
    """Every family with every type; tails that are no multiple of a tile, heads that share keys. Few
    different kernels a type, since those take longest."""
    for n, dtype in enumerate((abi.F16, abi.BF16, abi.F32, abi.E4M3, abi.E5M2)):
        d = dict(dtype=dtype, sq=37, sk=53, dq=(64, 32, 32, 64, 32)[n], dv=(32, 64, 32, 64, 64)[n],
                 descale=dtype >= abi.E4M3, seed=n + 1)
        yield Case("forward", **d | dict(sk=64), hq=4, hk=2)
        yield Case("forward", **d | dict(sk=150), heavy=0.1)
        yield Case("forward", **d, mask=TL, right=0, batch=2)
        yield Case("forward", **d, mask=BR, right=0, sink=True)
        yield Case("forward", **d | dict(hq=2), mask=TL, left=9, right=4, sinks=3)
        yield Case("forward", **d | dict(hq=2), mask=BR, left=17, right=0, lens_k=[41])
        yield Case("forward", **d | dict(hq=2), group=[(17, 40), (1, 33), (0, 9), (37, 5)], mask=BR, right=0)
        yield Case("forward", **d | dict(hq=2), dropout=0.2, randval=n % 2 == 0)
        yield Case("forward", **d | dict(sq=5, hq=4, hk=1), splits=3, split_size=24, sink=True, mask=BR, right=0)
        yield Case("forward", **d | dict(batch=2, sq=9), page=16, lens_k=[53, 20], mask=BR, right=0)
        yield Case("forward", **d | dict(batch=2, sq=33, sk=64), page=16, table="sglang", mask=BR, right=0)
        yield Case("forward", **d | dict(sq=1, sk=1))
    d = dict(dtype=abi.F16, sq=37, sk=53, dq=64, dv=64)
    yield Case("forward", **d, bias=abi.F32, bias_broadcast=True, hq=2)
    yield Case("forward", **d, alibi=True, cap=3.0, hq=2, mask=TL, right=0)
    yield Case("forward", **d | dict(dtype=abi.E4M3, batch=2, sq=1, hq=4, hk=2), page=16, layout=1, lens_k=[53, 20],
               splits=2, split_size=32)
    yield Case("forward", **d | dict(sq=3, sk=2, strided=True), mask=BR, right=0)


def forward_rest():
    """What is left of types times features, and what has to do with one type only."""
    for n, dtype in enumerate((abi.F16, abi.BF16, abi.F32, abi.E4M3, abi.E5M2)):
        d = dict(dtype=dtype, sq=37, sk=53, dq=32, dv=32, hq=2, descale=dtype >= abi.E4M3, seed=n + 1)
        if dtype not in (abi.F16, abi.BF16):  # elsewhere
            yield Case("forward", **d, bias=abi.F32 if dtype == abi.F32 else abi.BF16)
            yield Case("forward", **d, alibi=True, cap=3.0, mask=BR, right=0)
        yield Case("forward", **d | dict(batch=2, sq=2, hq=4, hk=2), page=1, lens_k=[53, 20], splits=2, split_size=32)
        yield Case("forward", **d | dict(hk=2), group=[(17, 40), (1, 33), (0, 9), (9, 5)], splits=2, split_size=24,
                   mask=BR, right=0)
        yield Case("forward", **d | dict(batch=2, sq=33, sk=64), page=16, table="sglang", layout=1, mask=TL, left=20,
                   right=3)
    d = dict(dtype=abi.E4M3, sq=37, sk=53, dq=32, dv=32, hq=2, hk=1)
    yield Case("forward", **d, descale="block", batch=2, mask=BR, right=0)
    yield Case("forward", **d | dict(batch=2), descale="page", page=16, lens_k=[53, 20])
    yield Case("forward", **d | dict(batch=2), descale="page", page=16, table="sglang", o_dtype=abi.F32)
    yield Case("forward", **d | dict(sq=2), descale=True, o_dtype=abi.F16, splits=2, split_size=32)
    yield Case("forward", dtype=abi.BF16, dq=32, dv=32, hq=2, hk=1, group=[(17, 40), (9, 33), (5, 20)],
               used_q=[11, 0, 5], lens_k=[40, 20, 0], mask=BR, right=0)


def merges():
    # More parts than one wave takes: the waves of a block share a row.
    for dv in (32, 64):
        yield Case("forward", dtype=abi.BF16, dq=32, dv=dv, sq=3, sk=150, hq=4, hk=2, splits=19, split_size=8)
    for dtype, o_dtype in ((abi.F32, abi.F32), (abi.F32, abi.BF16), (abi.F16, abi.F16), (abi.BF16, abi.BF16)):
        yield Case("merge", dtype=dtype, o_dtype=o_dtype, sink=dtype == abi.F16)
    for parts in (3, 30):  # a wave a row, and several
        yield Case("merge", sq=37, hq=3, parts=parts, few=4)
    for parts, dv, o_dtype in (2, 512, abi.BF16), (3, 384, abi.F16), (4, 512, abi.F32), (20, 320, abi.BF16):  # of wide rows
        yield Case("merge", dtype=abi.F32, o_dtype=o_dtype, parts=parts, dv=dv, sink=parts == 3)


def forward_tails():
    """Rows that end within eight elements: odd ones, those that lie in words, the longest and the shortest; what lies behind
    a row is another's."""
    for dtype, dq, dv in ((abi.BF16, 59, 59), (abi.F16, 100, 36), (abi.F32, 3, 17), (abi.E4M3, 111, 63), (abi.E5M2, 12, 1),
                          (abi.BF16, 255, 129), (abi.F16, 1, 250), (abi.BF16, 72, 59), (abi.F16, 59, 72)):
        d = dict(dtype=dtype, dq=dq, dv=dv, hq=2, hk=1)
        yield Case("forward", **d, sq=37, sk=53, mask=BR, right=0)
        yield Case("forward", **d | dict(hq=4), sq=3, sk=150, splits=3, split_size=64, sink=True)
        yield Case("forward", **d, sq=2, batch=2, sk=70, page=16, lens_k=[33, 70], mask=BR, right=0)
    d = dict(dtype=abi.BF16, dq=59, dv=100, hq=2, hk=1)
    yield Case("forward", **d, group=[(5, 30), (0, 8), (33, 9), (4, 0)], mask=BR, right=0)
    yield Case("forward", **d, sq=20, sk=70, strided=True)
    yield Case("forward", **d | dict(hk=2), sq=20, sk=70, dropout=0.3, bias=abi.BF16)
    yield Case("forward", dtype=abi.F32, dq=12, dv=59, hq=2, hk=1, sq=2, sk=70, page=16, layout=1)
    for dtype, o_dtype, dv in ((abi.F32, abi.F32, 59), (abi.F16, abi.F16, 3), (abi.F32, abi.BF16, 100)):
        yield Case("merge", dtype=dtype, o_dtype=o_dtype, dv=dv)


def backward_tails():
    for dtype, dq, dv in ((abi.BF16, 59, 59), (abi.F16, 100, 36), (abi.F32, 3, 17), (abi.BF16, 255, 129), (abi.F16, 1, 250),
                          (abi.BF16, 72, 59)):
        yield Case("backward", dtype=dtype, dq=dq, dv=dv, hq=2, hk=1, sq=37, sk=53, mask=BR, right=0)
    d = dict(dtype=abi.BF16, dq=59, dv=100, hq=2, hk=1)
    yield Case("backward", **d, group=[(17, 40), (1, 33), (0, 9), (21, 5)], mask=BR, right=0)
    yield Case("backward", **d, sq=20, sk=40, bias=abi.F32, dbias=True, bias_broadcast="h", sink=True, dsink=True)
    yield Case("backward", **d, sq=40, sk=150, acc=3)


def wide_heads():
    """Head dims above 256, of which kernels sum halves: every type and loop, rows that end in either half, and what parts of a block
    share: splits, waves that share keys, dBias, dropout, pages whose values lie in columns."""
    for dtype, dq, dv in ((abi.BF16, 512, 512), (abi.F16, 300, 384), (abi.F32, 512, 257), (abi.BF16, 512, 64), (abi.F16, 40, 511)):
        d = dict(dtype=dtype, dq=dq, dv=dv, hq=2, hk=1)
        yield Case("forward", **d, sq=37, sk=53, mask=BR, right=0)
        yield Case("forward", **d | dict(hq=4), sq=3, sk=90, splits=2, split_size=64, sink=True)
        yield Case("backward", **d, sq=37, sk=53, mask=BR, right=0)
    d = dict(dtype=abi.BF16, dq=512, dv=512, hq=2, hk=1)
    yield Case("forward", **d | dict(dtype=abi.E4M3), sq=20, sk=40, descale=True)
    yield Case("forward", **d, kv_dtype=abi.E4M3, sq=2, sk=70, batch=2, page=16, lens_k=[33, 70], descale="slot")
    yield Case("forward", **d | dict(dtype=abi.F16), sq=20, sk=40, batch=2, page=16, layout=1, lens_k=[33, 40])
    yield Case("forward", **d, sq=20, sk=40, dropout=0.3, randval=True, bias=abi.BF16, strided=True)
    yield Case("backward", **d, group=[(17, 40), (1, 33), (0, 9), (21, 5)], mask=BR, right=0, strided=True)
    yield Case("backward", **d, sq=20, sk=40, bias=abi.F32, dbias=True, dropout=0.25, sink=True, dsink=True)
    yield Case("backward", **d | dict(dq=384, dv=320), sq=20, sk=40, bias=abi.F32, dbias=True, bias_broadcast="h", cap=4.0)
    yield Case("backward", **d | dict(dtype=abi.F16), sq=40, sk=150, acc=3)
    for name in ("gpu_scalar", "gpu_scalar_pack"):
        yield Case("forward", **d, sq=3, sk=40, pipeline=name)
    yield Case("backward", **d, sq=20, sk=40, pipeline="gpu_scalar")


def latents():
    """Multi-head latent attention, absorbed: one key head of 576 elements, of which values are the first 512."""
    d = dict(dtype=abi.BF16, dq=576, dv=512, hk=1, v_in_k=True)
    yield Case("forward", **d, hq=16, sq=1, sk=150, page=64, batch=3, lens_k=[150, 64, 1])
    yield Case("forward", **d | dict(dtype=abi.F16), hq=8, sq=5, sk=90, mask=BR, right=0, splits=2, split_size=48, sink=True)
    yield Case("forward", **d, hq=24, sq=3, sk=70, page=16, batch=2, lens_k=[33, 70], mask=BR, right=0, poison=(70, 80))
    yield Case("forward", **d, hq=3, group=[(17, 40), (1, 33), (0, 9), (21, 5)], mask=BR, right=0, strided=True)
    yield Case("forward", **d, kv_dtype=abi.E4M3, hq=16, sq=2, sk=70, batch=2, page=64, lens_k=[33, 70], descale="slot")
    yield Case("forward", **d | dict(dq=192, dv=128), hq=16, sq=2, sk=70, page=16, lens_k=[70], cap=9.0)
    yield Case("forward", **d | dict(dtype=abi.F32), hq=4, sq=5, sk=40)
    yield Case("forward", **d | dict(hk=2), hq=2, sq=40, sk=53, mask=BR, right=0, one_sign=True)
    yield Case("forward", **d | dict(v_in_k=False), hq=4, sq=3, sk=60)


def latents_of_fp8():
    """FlashMLA's cache of 656 bytes a token, by all that reads and writes it."""
    d = dict(dtype=abi.BF16, latent_fp8=True)
    yield Case("forward", **d, hq=16, sq=1, sk=150, page=64, batch=3, lens_k=[150, 64, 1])
    yield Case("forward", **d | dict(dtype=abi.F16), hq=8, sq=5, sk=90, mask=BR, right=0, splits=2, split_size=48, sink=True)
    yield Case("forward", **d, hq=24, sq=2, sk=90, page=16, lens_k=[90], topk=40, slots=True)
    yield Case("forward", **d, hq=3, group=[(5, 40), (1, 33), (0, 9), (4, 5)], topk=20)
    for new in (abi.BF16, abi.F16):
        yield Case("append", dtype=abi.E4M3, new_dtype=new, latent=1, new=5)
        yield Case("append", dtype=abi.E4M3, new_dtype=new, latent=1, page=16, slots=1, new=9)
    yield Case("append", latent=-1, dq=576, dv=512)


def chosen_keys():
    """Each row sees keys that its indices name: of latents and of others, in pages by table or by slot, in splits, some rows none."""
    d = dict(dtype=abi.BF16, dq=576, dv=512, hk=1, v_in_k=True)
    yield Case("forward", **d, hq=16, sq=2, sk=150, page=64, batch=2, lens_k=[150, 64], topk=40)
    yield Case("forward", **d, hq=8, sq=3, sk=90, page=16, lens_k=[90], topk=70, slots=True)
    yield Case("forward", **d | dict(dtype=abi.F16), hq=24, sq=4, sk=90, topk=33, splits=2, split_size=16, sink=True)
    yield Case("forward", **d, hq=3, group=[(5, 40), (1, 33), (0, 9), (4, 5)], topk=20, strided=True)
    yield Case("forward", **d, hq=3, sq=2, sk=40, batch=2, lens_k=[0, 40], topk=20)
    yield Case("forward", **d, kv_dtype=abi.E4M3, hq=16, sq=2, sk=70, batch=2, page=64, lens_k=[33, 70], descale="slot", topk=30)
    yield Case("forward", dtype=abi.BF16, dq=128, dv=64, hq=6, hk=2, sq=5, sk=150, topk=64, poison=(20, 60))
    yield Case("forward", dtype=abi.F16, dq=40, dv=40, hq=4, hk=4, sq=3, sk=50, page=16, lens_k=[50], topk=20, layout=1)
    yield Case("forward", dtype=abi.F32, dq=64, dv=64, hq=4, hk=1, sq=3, sk=50, topk=20)
    yield Case("forward", dtype=abi.BF16, dq=59, dv=36, hq=2, hk=1, sq=3, sk=50, topk=20)


def forward_hdims():
    # f32 without a bias between 33 and 64: clang 19's post-RA sinking gave dQ = 0 on gfx942.
    for dq in (64, 40):
        yield Case("backward", dtype=abi.F32, dq=dq, dv=dq, sq=8, sk=8, mask=BR, right=0)
    for dtype, dq, dv in ((abi.BF16, 8, 8), (abi.BF16, 40, 40), (abi.F16, 96, 96), (abi.BF16, 128, 128),
                          (abi.F16, 192, 128), (abi.BF16, 256, 256), (abi.F32, 256, 256), (abi.E4M3, 128, 128)):
        yield Case("forward", dtype=dtype, dq=dq, dv=dv, sq=37, sk=53, hq=2, hk=1, mask=BR, right=0)
    # Wide heads of few rows, whose tiles do not travel in registers everywhere.
    d = dict(dtype=abi.BF16, dq=256, dv=256, sq=5, sk=150, hq=4, hk=2, mask=BR, right=0)
    yield Case("forward", **d, left=30, poison=(0, 115))
    yield Case("forward", **d | dict(sq=2, page=16), lens_k=[150], splits=2, split_size=80)
    yield Case("forward", **d | dict(dtype=abi.F16, dq=128, dv=128), strided=True)
    yield Case("forward", dtype=abi.E4M3, dq=96, dv=96, sq=100, sk=150, hq=2, hk=1, mask=BR, right=0, descale=True)
    for dtype, pipeline in ((abi.F16, "gpu_scalar"), (abi.BF16, "gpu_scalar_pack"), (abi.E5M2, "gpu_scalar")):
        yield Case("forward", dtype=dtype, dq=40, dv=64, sq=19, sk=37, hq=2, hk=1, mask=BR, right=0, pipeline=pipeline)
    yield Case("forward", dtype=abi.BF16, dq=32, dv=32, sq=19, sk=37, dropout=0.3, pipeline="gpu_scalar")


def backward_features():
    for n, dtype in enumerate((abi.F16, abi.BF16, abi.F32)):
        d = dict(dtype=dtype, sq=37, sk=53, dq=32, dv=(64, 32, 32)[n], seed=n + 1)
        yield Case("backward", **d, mask=TL, right=0, hq=4, hk=2)
        yield Case("backward", **d, mask=BR, right=0, batch=2)
        yield Case("backward", **d, mask=BR, left=9, right=4, sinks=3)
        yield Case("backward", **d, hq=2, hk=1, group=[(17, 40), (1, 33), (0, 9), (21, 5)], mask=BR, right=0)
        yield Case("backward", **d | dict(sq=1, sk=1))
        if dtype != abi.BF16:  # elsewhere
            yield Case("backward", **d, bias=(abi.F16, abi.F32, abi.F32)[n], dbias=True, dropout=0.25, hq=2)
            yield Case("backward", **d, alibi=True, cap=4.0, sink=True, dsink=True)
            yield Case("backward", **d, acc=3)
        yield Case("backward", **d, dropout=0.25, randval=True, hq=2, hk=1)
    yield Case("backward", dtype=abi.BF16, dq=32, dv=32, hq=2, hk=1, group=[(17, 40), (9, 33), (5, 20)],
               used_q=[11, 0, 5], lens_k=[40, 20, 0], mask=BR, right=0, acc=2)
    # f32 without a bias between 33 and 64: clang 19's post-RA sinking gave dQ = 0 on gfx942.
    for dq in (64, 40):
        yield Case("backward", dtype=abi.F32, dq=dq, dv=dq, sq=8, sk=8, mask=BR, right=0)
    for dtype, dq, dv in ((abi.BF16, 8, 8), (abi.BF16, 40, 40), (abi.F16, 96, 96), (abi.BF16, 128, 128),
                          (abi.F16, 192, 128), (abi.BF16, 256, 256), (abi.F32, 128, 96),
                          (abi.F32, 256, 256)):
        yield Case("backward", dtype=dtype, dq=dq, dv=dv, sq=21, sk=37, mask=BR, right=0)
    yield Case("backward", dtype=abi.BF16, dq=32, dv=64, sq=37, sk=21, mask=BR, right=0, pipeline="gpu_scalar")


def append_features():
    for dtype in (abi.F16, abi.F32):
        yield Case("append", dtype=dtype, rope=abi.ROPE_HALF_ROTATED, rotary_dim=32)
        yield Case("append", dtype=dtype, page=16, rope=abi.ROPE_INTERLEAVED, rotary_dim=16, dq=40, dv=24)
        yield Case("append", dtype=dtype, rope=abi.ROPE_HALF_ROTATED, rotary_dim=16, dq=59, dv=3)
    yield Case("append", page=16, layout=1, dq=64, dv=64, hk=2, new=5)
    yield Case("append", dtype=abi.E4M3, page=16, dq=40, dv=24)
    yield Case("append", dtype=abi.E5M2, page=16, layout=1)
    yield Case("append", dtype=abi.I8, page=16, layout=1)
    for i, new in enumerate((abi.F16, abi.BF16)):
        yield Case("append", dtype=abi.E4M3 + i, new_dtype=new, page=16, factors="heads", rope=abi.ROPE_HALF_ROTATED, rotary_dim=32)
        yield Case("append", dtype=abi.E5M2 - i, new_dtype=new, factors="heads", dq=59, dv=3)
        yield Case("append", dtype=new, page=16, slots=1, new=9, rope=abi.ROPE_INTERLEAVED, rotary_dim=16, dq=40, dv=40, shared=1)
        yield Case("append", dtype=abi.E4M3 + i, new_dtype=new, page=16, slots=1, new=9, factors="pages", layout=1)
        for dtype in (abi.E4M3, abi.I8):
            yield Case("append", dtype=dtype, new_dtype=new, page=16, slots=1, new=9, factors="found", shared=1, hk=2, dq=96, dv=40,
                       rope=abi.ROPE_HALF_ROTATED, rotary_dim=64)
        yield Case("append", dtype=abi.I8, new_dtype=new, page=16, factors="heads", dq=59, dv=3)
        yield Case("append", dtype=abi.I8, new_dtype=new, page=16, slots=1, new=9, factors="pages", layout=i)
        # What turns is an odd number of chunks, or not all of a row; a row is more than a wave takes at once.
        d = dict(page=16, slots=1, new=9, hk=3, hq=5)
        for rope, rotary_dim in ((abi.ROPE_INTERLEAVED, 24), (abi.ROPE_HALF_ROTATED, 48)):
            yield Case("append", **d, dtype=new, rope=rope, rotary_dim=rotary_dim, rotary_dtype=new, dq=80, dv=40)
            yield Case("append", **d, dtype=abi.E5M2, new_dtype=new, factors="pages", rope=rope, rotary_dim=rotary_dim, dq=80, dv=40)
        yield Case("append", **d, dtype=new, dq=576, dv=512)
        yield Case("append", **d, dtype=abi.E4M3, new_dtype=new, dq=576, dv=512)
    for dtype in (abi.E4M3, abi.E5M2, abi.I8):
        for factors in ("odd", "found"):
            yield Case("append", dtype=dtype, new_dtype=abi.BF16, page=16, slots=1, new=40, hk=2, dq=64, dv=128, factors=factors, odd=1)
    # Of f16 a quotient that lies just above the middle of two of e5m2's least codes.
    yield Case("append", dtype=abi.E5M2, new_dtype=abi.F16, page=16, slots=1, new=40, hk=2, dq=64, dv=59, factors="odd", odd=1)
    yield Case("append", dtype=abi.E4M3, new_dtype=abi.BF16, page=16, slots=1, new=9, hk=3, dq=80, dv=80, factors="found", rope=abi.ROPE_HALF_ROTATED,
               rotary_dim=80)
    yield Case("append", dtype=abi.BF16, page=16, slots=1, new=9, dq=64, dv=128, odd=1)


def staged():
    """AMD's own loops, which other cases leave to the tiles that pack heads: several tiles and blocks, tails, every
    feature, both types; NaN in what nobody sees, and behind the keys of a shorter sequence."""
    for dtype, d in ((abi.BF16, 128), (abi.F16, 64)):
        b = dict(dtype=dtype, dq=d, dv=d, hq=2, hk=1, pipeline="gpu_amd")
        yield Case("forward", **b, sq=300, sk=257, sink=True)
        yield Case("forward", **b, sq=130, sk=333, mask=BR, right=0, heavy=0.05)
        yield Case("forward", **b, sq=70, sk=150, mask=BR, left=40, right=3, poison=(0, 40))
        yield Case("forward", **b, sq=40, sk=190, mask=TL, left=3, right=2, sinks=9, lens_k=[150])
        yield Case("forward", **b, sq=40, sk=170, alibi=True, cap=20.0)
        yield Case("forward", **b, sq=40, sk=70, bias=abi.F32, dropout=0.2, randval=True)
        yield Case("forward", **b, sq=20, sk=500, ones=True)
        yield Case("forward", **b, sq=40, sk=70, scale=5e2, ones=True)  # scores that leave a small shift few bits
    d = dict(dtype=abi.BF16, hq=2, hk=1, pipeline="gpu_amd")
    yield Case("forward", **d, group=[(130, 40), (1, 33), (0, 9), (37, 5)], dq=96, dv=64, mask=BR, right=0)
    yield Case("forward", **d, sq=20, sk=70, dq=40, dv=72, scale=-0.2, batch=2, lens_k=[33, 70])
    yield Case("forward", **d, sq=1, sk=1, dq=64, dv=32)
    for dtype, dq in ((abi.BF16, 128), (abi.F16, 64)):
        b = d | dict(dtype=dtype, dq=dq, dv=dq)
        yield Case("forward", **b, sq=130, sk=300, page=16, batch=2, lens_k=[290, 33], mask=BR, right=0)
        yield Case("forward", **b, sq=40, sk=300, page=256, table="sglang")
        yield Case("forward", **b, sq=40, sk=400, page=32, mask=BR, left=30, right=0, poison=(0, 320))
        yield Case("forward", **b, sq=70, sk=333, splits=3, split_size=128, sink=True, mask=BR, right=0)
        yield Case("forward", **b, sq=33, sk=300, splits=2, split_size=160, lens_k=[290])
    for options in (dict(sq=150, sk=171, bias=abi.BF16, mask=BR, right=0), dict(sq=35, sk=67, bias=abi.F32, turned=True),
                    dict(sq=33, sk=150, dtype=abi.F16, bias=abi.F16, bias_broadcast="br", batch=2, lens_k=[99, 150], cap=20.0),
                    dict(group=[(30, 130), (1, 40), (0, 5), (77, 9)], bias=abi.BF16, mask=TL, left=9, right=4, sinks=3)):
        yield Case("forward", **d | dict(dq=64, dv=128) | options)
    for options in (dict(mask=BR, right=0), dict(sq=70, mask=TL, left=9, right=4, sinks=3), dict(alibi=True, cap=4.0),
                    dict(bias=abi.BF16, dbias=True, dq=32, dv=32),
                    dict(sq=70, sk=161, bias=abi.F32, dbias=True, turned=True, mask=BR, right=0)):
        yield Case("backward", **d | dict(sq=129, sk=150, dq=64, dv=64) | options)
    for options in (dict(mask=BR, right=0), dict(sq=33, sk=70, dq=96, dv=128), dict(sk=70, mask=TL, left=9, right=4, sinks=3),
                    dict(dtype=abi.F16, sq=65, dq=128, dv=72, hk=2, batch=2)):
        yield Case("backward", **d | dict(sq=81, sk=150, dq=128, dv=128) | options)
    # dQ by parts of the keys, a block each: some see none of theirs, one sequence has fewer parts than the longest.
    for options in (dict(mask=BR, left=70, right=0), dict(mask=TL, left=9, right=4, sinks=3), dict(bias=abi.BF16, dbias=True),
                    dict(dq=128, dv=96, batch=2, lens_k=[300, 20]), dict(group=[(30, 300), (1, 40), (0, 5), (77, 9)])):
        yield Case("backward", **d | dict(hq=2, sq=40, sk=300, dq=64, dv=64, acc=4) | options)
    # A bias, which of what lies behind the edges may be anything: odd rows, each type, repeated over heads or rows, turned.
    for options in (dict(bias=abi.BF16, dbias=True, mask=BR, right=0), dict(bias=abi.F32, sk=151, bias_broadcast="h"),
                    dict(dtype=abi.F16, bias=abi.F16, dbias=True, turned=True, sk=67, sq=35),
                    dict(bias=abi.BF16, bias_broadcast="br", batch=2, lens_k=[99, 150], mask=TL, left=9, right=4, sinks=3),
                    dict(dtype=abi.F16, bias=abi.F32, turned=True, sk=77, sq=50, cap=20.0, dq=96, dv=72)):
        yield Case("backward", **d | dict(sq=81, sk=150, dq=128, dv=128) | options)
    yield Case("backward", **d | dict(hq=4, bias=abi.BF16, dbias=True), group=[(30, 130), (1, 40), (0, 5), (77, 9)], dq=128,
               dv=128, mask=BR, right=0)
    yield Case("backward", **d | dict(dtype=abi.F16, hq=4), group=[(30, 130), (1, 40), (0, 5), (77, 0)], dq=64, dv=40,
               mask=BR, right=0)


MULTIPLY_BYTES = {arch: "gpu_amd" for arch in ("gfx942", "gfx950", "gfx1200", "gfx1201")}  # others: the general loop
DECODE_BYTES = {arch: "gpu_amd_decode" for arch in MULTIPLY_BYTES}


def staged_bytes():
    """The same loops where matrix units multiply e4m3: tails around tiles, factors, every mask, NaN in what nobody sees."""
    for d in (128, 64):
        b = dict(dtype=abi.E4M3, dq=d, dv=d, hq=2, hk=1, pipeline=MULTIPLY_BYTES)
        yield Case("forward", **b, sq=300, sk=257, sink=True, descale=True)
        yield Case("forward", **b, sq=130, sk=333, mask=BR, right=0, descale=True)
        yield Case("forward", **b, sq=70, sk=150, mask=BR, left=40, right=3, poison=(0, 40))
        yield Case("forward", **b, sq=40, sk=190, mask=TL, left=3, right=2, sinks=9, lens_k=[150], o_dtype=abi.F16)
        yield Case("forward", **b, sq=40, sk=170, alibi=True, cap=20.0, descale=True)
        yield Case("forward", **b, sq=130, sk=300, page=16, batch=2, lens_k=[290, 33], mask=BR, right=0, descale=True)
        yield Case("forward", **b, sq=70, sk=300, page=256, table="sglang", mask=BR, left=60, right=0, sinks=9)
        yield Case("forward", **b, sq=70, sk=333, splits=3, split_size=128, sink=True, mask=BR, right=0, descale=True)
    d = dict(dtype=abi.E4M3, hq=2, hk=1, pipeline=MULTIPLY_BYTES)
    yield Case("forward", **d, group=[(130, 40), (1, 33), (0, 9), (37, 5)], dq=128, dv=64, mask=BR, right=0, descale=True)
    yield Case("forward", **d, sq=40, sk=70, dq=64, dv=128, bias=abi.F32, o_dtype=abi.F32)
    yield Case("forward", **d, sq=20, sk=70, dq=48, dv=80, scale=-0.2, batch=2, lens_k=[33, 70])
    yield Case("forward", **d, sq=20, sk=70, dq=64, dv=64, descale="signed")


def staged_with_factors():
    """Over keys of 16 bits that a stage before has widened: their factors, of either sign."""
    for n, dtype in enumerate((abi.BF16, abi.F16)):
        d = dict(dtype=dtype, hq=2, hk=1, pipeline="gpu_amd", seed=n + 1)
        yield Case("forward", **d, dq=128, dv=128, sq=130, sk=333, mask=BR, right=0, descale=True)
        yield Case("forward", **d, dq=64, dv=64, sq=70, sk=150, descale="signed", sink=True)
        yield Case("forward", **d, dq=96, dv=64, sq=70, sk=333, splits=3, split_size=128, mask=BR, right=0, descale="signed")
    yield Case("forward", **d | dict(pipeline={arch: "gpu_amd" for arch in ("gfx90a", "gfx942", "gfx950")}), dq=256, dv=256, sq=40, sk=100,
               batch=2, lens_k=[100, 33], descale=True)
    yield Case("forward", **d, sq=1, sk=1, dq=64, dv=32)
    yield Case("codes", dtype=abi.E4M3, sq=1, sk=1, dq=64, dv=256, o_dtype=abi.F32, pipeline=MULTIPLY_BYTES)
    yield Case("tail", dtype=abi.E4M3, hq=1, hk=1, sq=1, sk=20000, dq=64, dv=64, ones=True, pipeline=MULTIPLY_BYTES)


GENERAL = {arch: "gpu_mma" for arch in ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a")} | {
    "gfx90a": "gpu_mfma", "gfx942": "gpu_mfma", "gfx950": "gpu_mfma", "gfx1100": "gpu_wmma", "gfx1201": "gpu_wmma"}
GENERAL_PACK = {arch: name + "_pack" for arch, name in GENERAL.items()}


def general_bytes():
    """fwd.h where values have 8 bits: factors of heads, blocks and pages, what a row of one key gets, sums of one sign."""
    for pipeline in (GENERAL, GENERAL_PACK):
        for dtype in (abi.E4M3, abi.E5M2):
            d = dict(dtype=dtype, hq=4, hk=1, dq=16, dv=16, sq=14, pipeline=pipeline)
            yield Case("alone", **d, sk=1, descale=True, o_dtype=abi.F32)
            yield Case("alone", **d, sk=1, descale=True, o_dtype=abi.F32, bias=abi.F16)
            yield Case("forward", **d, sk=70, descale=True, bias=abi.F16, lens_k=[33])
            yield Case("forward", **d, sk=70, descale="block")
            yield Case("forward", **d | dict(batch=2), sk=70, page=16, descale="page")
            yield Case("forward", **d, sk=300, splits=3, split_size=128, descale=True)
            yield Case("forward", **d | dict(sq=70, hq=2, dq=128, dv=128), sk=90, descale=True, mask=BR, right=0)
        d = dict(dtype=abi.E4M3, hq=4, hk=1, dq=64, dv=64, pipeline=pipeline)
        yield Case("forward", **d, sq=14, sk=4000, ones=True)
        yield Case("tail", **d | dict(hq=1), sq=1, sk=4000, ones=True)


def hopper():
    """Keys of 8 bits in decode's loop, in tiles of 16, 32 and 64 rows: factors, pages of both layouts, rows that no copy of
    16 bytes can take, NaN in what nobody sees."""
    for dq in (64, 128, 192, 256):
        for sq in (1, 7, 16):
            d = dict(dtype=abi.E4M3, batch=2, hq=8, hk=2, dq=dq, dv=dq, sq=sq, pipeline="gpu_decode")
            yield Case("forward", **d, sk=1500, mask=BR, right=0, descale=True)
            yield Case("forward", **d, sk=1500, splits=20, split_size=80, sink=True)
            yield Case("forward", **d, sk=700, page=16, lens_k=[650, 77], mask=BR, left=300, right=0, sinks=5, descale=True)
    d = dict(dtype=abi.E4M3, batch=2, hq=4, hk=2, dq=128, dv=128, sq=2, sk=333, pipeline="gpu_decode")
    yield Case("forward", **d, page=3, lens_k=[300, 77], descale=True)
    yield Case("forward", **d, page=32, layout=1, lens_k=[300, 77], splits=3, split_size=128)
    yield Case("forward", **d, page=32, table="sglang", mask=TL, left=20, right=3)
    yield Case("forward", **d, strided=True, mask=BR, right=0)
    yield Case("forward", **d | dict(dq=56, dv=40), descale=True)
    yield Case("forward", **d, alibi=True, cap=20.0, mask=BR, right=0, descale=True)
    yield Case("forward", **d, bias=abi.BF16, scale=-0.2)
    yield Case("forward", **d, mask=BR, left=40, right=0, poison=(0, 250))
    yield Case("forward", **d | dict(hk=1), group=[(7, 400), (1, 33), (0, 9), (5, 0)], o_dtype=abi.F32, descale=True)
    yield Case("tail", dtype=abi.E4M3, hq=1, hk=1, sq=1, sk=20000, dq=64, dv=64, ones=True, pipeline="gpu_decode")
    yield from hopper_narrow()


def hopper_narrow():
    """Decode's loop where queries have 16 bits and keys 8."""
    for dtype, kv in ((abi.BF16, abi.E4M3), (abi.F16, abi.I8), (abi.BF16, abi.I8)):
        d = dict(dtype=dtype, kv_dtype=kv, batch=2, hq=4, hk=2, sq=2, descale=True, pipeline="gpu_decode")
        for dq in (64, 128, 256):
            yield Case("forward", **d, dq=dq, dv=dq, sk=1500, mask=BR, right=0)
            yield Case("forward", **d, dq=dq, dv=dq, sk=1500, splits=20, split_size=80, sink=True)
            yield Case("forward", **d, dq=dq, dv=dq, sk=700, page=16, lens_k=[650, 77], mask=BR, left=300, right=0, sinks=5)
        d |= dict(dq=128, dv=128, sk=333)
        yield Case("forward", **d, page=32, layout=1, lens_k=[300, 77], splits=3, split_size=128)
        yield Case("forward", **d, strided=True, mask=BR, right=0)
        yield Case("forward", **d | dict(dq=56, dv=40))
        yield Case("forward", **d, mask=BR, left=40, right=0, poison=(0, 250))
    # Keys with factors of their own.
    for kv, dq, rows in ((abi.E4M3, 64, 2), (abi.E4M3, 128, 2), (abi.I8, 256, 2), (abi.E5M2, 128, 9), (abi.I8, 128, 30)):
        d = dict(dtype=abi.BF16, kv_dtype=kv, batch=2, hq=4, hk=2, sq=rows, dq=dq, dv=dq, pipeline="gpu_decode")
        yield Case("forward", **d, sk=1500, mask=BR, right=0, descale="key")
        yield Case("forward", **d, sk=1500, splits=20, split_size=80, sink=True, descale="key", cap=3.0)
        yield Case("forward", **d, sk=700, page=16, lens_k=[650, 77], mask=BR, left=300, right=0, sinks=5, descale="slot")
        yield Case("forward", **d, sk=700, page=48, lens_k=[650, 77], splits=3, split_size=256, descale="page")
        yield Case("forward", **d, sk=300, descale="block", mask=BR, left=40, right=0, poison=(0, 200 if rows < 9 else 0))
        yield Case("forward", **d, sk=700, page=32, layout=1, lens_k=[650, 77], descale="slot", powers=3)
    # The tiles that plans take, over many keys: sums of a wave's own share go on for long.
    for (n, dq, blocks), descale in itertools.product(((128, 64, 3), (128, 128, 2), (64, 256, 2)), (True, "key")):
        tile = abi.Tile(abi.PIPELINES.index("gpu_decode"), 16, n, dq, dq, 1, 4, blocks)
        d = dict(dtype=abi.BF16, batch=2, hq=4, hk=2, sq=2, dq=dq, dv=dq, pipeline=tile)
        yield Case("forward", **d, kv_dtype=abi.E4M3, sk=9000, descale=descale)
        yield Case("forward", **d, kv_dtype=abi.I8, sk=9000, page=64, lens_k=[8500, 770], splits=3, split_size=3072,
                   descale=True if descale is True else "slot")
    d = dict(dtype=abi.E4M3, batch=2, hq=4, hk=2, sq=2, dq=128, dv=128, sk=700, page=16, lens_k=[650, 77], pipeline="gpu_decode")
    yield Case("forward", **d, mask=BR, right=0, descale="slot")
    yield Case("forward", **d | dict(dtype=abi.F16, kv_dtype=abi.E4M3), descale="slot", powers=2)


def few_rows():
    """AMD's decode loop: tiles that waves leave empty, tails, packed rows, pages of one run and of several, each feature."""
    for dtype, d, hq in ((abi.BF16, 128, 2), (abi.F16, 64, 8)):
        b = dict(dtype=dtype, dq=d, dv=d, sq=2, hq=hq, hk=1, pipeline="gpu_amd_decode")
        yield Case("forward", **b, sk=300, sink=True, heavy=0.05)
        yield Case("forward", **b, sk=333, batch=2, lens_k=[333, 41], splits=3, split_size=128)
        yield Case("forward", **b, sk=300, page=16, batch=2, lens_k=[290, 33], mask=BR, right=0)
        yield Case("forward", **b, sk=300, page=48, lens_k=[290], splits=2, split_size=160)
        yield Case("forward", **b, sk=400, page=256, table="sglang", mask=BR, left=30, right=0, poison=(0, 360))
        yield Case("forward", **b, sk=600, page=32, mask=BR, left=150, right=0, sinks=9, lens_k=[550])
        yield Case("forward", **b | dict(sq=5), sk=170, alibi=True, cap=20.0, mask=BR, right=0)
        yield Case("forward", **b, sk=70, bias=abi.F32, scale=-0.2)
    yield Case("forward", dtype=abi.BF16, hq=4, hk=2, group=[(1, 300), (3, 40), (0, 9), (2, 0)], dq=64, dv=128, mask=BR,
               right=0, pipeline="gpu_amd_decode")
    d = dict(dtype=abi.BF16, hq=3, hk=1, sq=2, sk=300, pipeline="gpu_amd_decode")
    # Every width of a lane's part of a value, whole and narrower than the tile; splits without keys, and a last one of few.
    for n, (dq, dv) in enumerate(((256, 256), (96, 96), (160, 160), (192, 128), (192, 192), (80, 72), (232, 248))):
        b = d | dict(dq=dq, dv=dv, dtype=(abi.BF16, abi.F16)[n % 2])
        yield Case("forward", **b, page=16, batch=2, lens_k=[287, 33], mask=BR, right=0, sink=True)
        yield Case("forward", **b, splits=4, split_size=96, lens_k=[150])
    # Left padding, of whole runs and not, that holds NaN.
    for d_, pad, poison in ((128, [37, 0], None), (64, [7, 7], (0, 7)), (256, [21, 48], (0, 21))):
        b = d | dict(dq=d_, dv=d_, batch=2, leftpad=pad, poison=poison)
        yield Case("forward", **b | dict(sk=200), page=16, lens_k=[190, 75])
        yield Case("forward", **b, page=48, lens_k=[290, 120], mask=BR, left=150, right=0, sinks=20, splits=3, split_size=96)
    # A window that begins in the tile that padding leads.
    yield Case("forward", **d | dict(dq=64, dv=64, batch=2, leftpad=[7, 7], poison=(0, 38), sk=200), page=16, lens_k=[190, 190],
               mask=BR, left=150, right=0)
    # Two and four tiles of rows: the last of them not full, rows that see nothing, a window.
    for dq, sq in ((128, 7), (64, 13), (128, 13), (256, 7), (96, 11)):
        b = d | dict(dq=dq, dv=dq, sq=sq, dtype=(abi.BF16, abi.F16)[sq % 13 == 0])
        yield Case("forward", **b, page=48, batch=2, lens_k=[190, 5], mask=BR, right=0)
        yield Case("forward", **b | dict(sk=200), splits=3, split_size=96, mask=BR, left=60, right=0, sinks=9, sink=True)
    yield Case("forward", **d | dict(dq=64, dv=64, sq=21), page=16, splits=2, split_size=160, alibi=True, cap=20.0)
    # Prefills that plans give this loop: many tiles of rows.
    for dq, dv, dtype in ((256, 256, abi.BF16), (192, 128, abi.F16), (128, 128, abi.BF16), (64, 64, abi.F16)):
        b = dict(dtype=dtype, hq=2, hk=1, dq=dq, dv=dv, sq=101, sk=150, pipeline="gpu_amd_decode")
        yield Case("forward", **b, mask=BR, right=0, sink=True)
        yield Case("forward", **b | dict(hq=1), splits=2, split_size=80)


def few_rows_of_bytes():
    """The same loop where matrix units multiply e4m3: factors that differ between packed heads besides, and every code."""
    for d, hq in ((128, 2), (64, 8)):
        b = dict(dtype=abi.E4M3, dq=d, dv=d, sq=2, hq=hq, hk=1, pipeline=DECODE_BYTES)
        yield Case("forward", **b, sk=300, sink=True, heavy=0.05, descale=True)
        yield Case("forward", **b, sk=333, batch=2, lens_k=[333, 41], splits=3, split_size=128, descale=True)
        yield Case("forward", **b, sk=300, page=16, batch=2, lens_k=[290, 33], mask=BR, right=0, descale=True)
        yield Case("forward", **b, sk=300, page=48, lens_k=[290], splits=2, split_size=160, o_dtype=abi.F16)
        yield Case("forward", **b, sk=400, page=256, table="sglang", mask=BR, left=30, right=0, poison=(0, 360))
        yield Case("forward", **b, sk=600, page=32, mask=BR, left=150, right=0, sinks=9, lens_k=[550], descale=True)
        yield Case("forward", **b | dict(sq=5), sk=170, alibi=True, cap=20.0, mask=BR, right=0, descale=True)
        yield Case("forward", **b, sk=70, bias=abi.F32, scale=-0.2, o_dtype=abi.F32)
        yield Case("forward", **b, sk=70, descale="signed")
    d = dict(dtype=abi.E4M3, hq=3, hk=1, sq=2, sk=300, pipeline=DECODE_BYTES)
    yield Case("forward", **d | dict(hq=4, hk=2), group=[(1, 300), (3, 40), (0, 9), (2, 0)], dq=64, dv=128, mask=BR, right=0,
               descale=True)
    for dq, dv in ((256, 256), (192, 128), (192, 192), (112, 112), (48, 48)):
        b = d | dict(dq=dq, dv=dv)
        yield Case("forward", **b, page=16, batch=2, lens_k=[287, 33], mask=BR, right=0, sink=True, descale=True)
        yield Case("forward", **b, splits=4, split_size=96, lens_k=[150])
    for d_, pad, poison in ((128, [37, 0], None), (64, [7, 7], (0, 7)), (256, [21, 48], (0, 21))):
        b = d | dict(dq=d_, dv=d_, batch=2, leftpad=pad, poison=poison)
        yield Case("forward", **b | dict(sk=200), page=16, lens_k=[190, 75])
        yield Case("forward", **b, page=48, lens_k=[290, 120], mask=BR, left=150, right=0, sinks=20, splits=3, split_size=96)
    for dq, sq in ((128, 7), (64, 9)):
        b = d | dict(dq=dq, dv=dq, sq=sq, descale=True)
        yield Case("forward", **b, page=48, batch=2, lens_k=[190, 5], mask=BR, right=0)
        yield Case("forward", **b | dict(sk=200), splits=3, split_size=96, mask=BR, left=60, right=0, sinks=9, sink=True)
    yield Case("codes", dtype=abi.E4M3, sq=1, sk=1, dq=64, dv=256, o_dtype=abi.F32, pipeline=DECODE_BYTES)
    yield Case("tail", dtype=abi.E4M3, hq=1, hk=1, sq=1, sk=20000, dq=64, dv=64, ones=True, pipeline=DECODE_BYTES)


def masks_as_data():
    """Intervals and bits under bands, of packed sequences, pages and parts, in both directions."""
    d = dict(dtype=abi.BF16, dq=64, dv=64, hq=2, hk=1, sq=70, sk=150)
    yield Case("forward", **d, data=3)
    yield Case("forward", **d | dict(batch=2), data=5, data_broadcast="bh", mask=BR, right=0, sink=True)
    yield Case("forward", **d | dict(batch=2), data="bits", data_broadcast="b", lens_k=[150, 90])
    yield Case("forward", **d, data=63, mask=TL, left=40, right=9, sinks=3, cap=5.0)
    yield Case("forward", **d, data=3, group=[(40, 90), (1, 33), (0, 9), (60, 120)])
    yield Case("forward", **d | dict(sq=3, hq=4), data=5, splits=3, split_size=64)
    yield Case("forward", **d | dict(sq=3, hq=4), data="bits", page=16, lens_k=[150])
    yield Case("forward", **d | dict(dtype=abi.F32), data=7, dropout=0.3)
    yield Case("forward", **d | dict(dtype=abi.E5M2), descale=True, data=3)
    yield Case("forward", **d | dict(dq=128, dv=128, sq=130, sk=300), data=5, bias=abi.BF16)
    yield Case("forward", **d | dict(sk=90), data=1, leftpad=[17], lens_k=[90])
    d = dict(dtype=abi.BF16, dq=64, dv=64, hq=2, hk=1, sq=70, sk=90)
    yield Case("backward", **d, data=3)
    yield Case("backward", **d | dict(dtype=abi.F16, batch=2), data=5, data_broadcast="b", mask=BR, right=0)
    yield Case("backward", **d | dict(dtype=abi.F16), data="bits", cap=5.0)
    yield Case("backward", **d, data=63, cap=3.0, mask=TL, left=30, right=4)
    yield Case("backward", **d, data=3, group=[(40, 60), (1, 33), (0, 9), (60, 40)], sink=True, dsink=True)
    yield Case("backward", **d, data=5, bias=abi.F32, dbias=True, bias_broadcast="h")
    yield Case("backward", **d, data="bits", bias=abi.BF16, dbias=True, dropout=0.2)
    yield Case("backward", **d | dict(dq=96, dv=96), data=3, acc=2)
    yield Case("backward", **d | dict(dtype=abi.F32, dq=32, dv=32), data=3)
    d = dict(dtype=abi.BF16, dq=256, dv=256, hq=2, hk=1, sq=20, sk=40)  # dK and dV have a block each
    yield Case("backward", **d, data=3)
    yield Case("backward", **d | dict(dtype=abi.F16, sq=37, sk=70), data="bits", mask=BR, right=0)
    d = dict(dtype=abi.BF16, dq=512, dv=512, hq=2, hk=1, sq=37, sk=53)
    for kind in ("forward", "backward"):
        yield Case(kind, **d, data=3)
        yield Case(kind, **d, data="bits", mask=BR, right=0)
        yield Case(kind, **d | dict(dtype=abi.F16, dq=320, dv=320, batch=2), data=5, data_broadcast="h", cap=4.0)


def narrow():
    """16-bit queries over 8 bits: rows and few rows, dense, split and in pages, factors of every kind, by the reference and by the bits of
    the kernel of 16 bits on what the cache stands for."""
    for n, (dtype, kv) in enumerate(((abi.BF16, abi.E4M3), (abi.F16, abi.E5M2), (abi.F16, abi.E4M3), (abi.BF16, abi.E5M2),
                                     (abi.BF16, abi.I8), (abi.F16, abi.I8))):
        d = dict(dtype=dtype, kv_dtype=kv, hq=4, hk=2, sk=53, dq=32, dv=32, seed=n + 3)
        for sq, several in ((37, "key"), (2, "block")):
            for descale in (False, True) if dtype == abi.F16 else (True, several) if n else (False, True, several):
                yield Case("forward", **d, sq=sq, descale=descale)
        pages = dict(sk=70, batch=2, page=16, lens_k=[70, 33], descale=True if dtype == abi.F16 else "slot")
        yield Case("forward", **d | pages, sq=2, powers=True)
        yield Case("narrow", **d, sq=(20, 2)[n % 2], powers=True, descale=(True, "key")[dtype == abi.BF16 and n > 1])
    d = dict(dtype=abi.BF16, kv_dtype=abi.E4M3, hq=2, hk=1, dq=64, dv=32, batch=2)
    yield Case("forward", **d | dict(batch=1), sq=3, sk=700, descale=True, one_sign=True)
    yield Case("forward", **d, sq=40, sk=70, page=16, lens_k=[33, 70], descale="page", mask=BR, right=0)
    yield Case("forward", **d, sq=2, sk=70, page=32, layout=1, table="sglang", descale=True, cap=3.0)
    yield Case("forward", **d, sq=33, sk=130, descale="block", bias=abi.BF16, mask=TL, left=30, right=9, sinks=2)
    yield Case("forward", **d, sq=2, sk=130, splits=2, split_size=96, descale="key", sink=True)
    yield Case("forward", **d, sq=37, sk=50, dropout=0.3, randval=True, strided=True)
    yield Case("forward", **d | dict(dq=59, dv=3), sq=20, sk=50, descale=True)
    yield Case("forward", **d, sq=20, sk=50, descale="signed")
    yield Case("narrow", **d, sq=2, sk=70, page=16, lens_k=[70, 33], descale="page", powers=True)
    d |= dict(kv_dtype=abi.I8)
    yield Case("forward", **d | dict(batch=1), sq=3, sk=700, descale=True, one_sign=True)
    yield Case("forward", **d, sq=40, sk=70, page=16, lens_k=[33, 70], descale="page", mask=BR, right=0)
    yield Case("forward", **d, sq=2, sk=70, page=32, layout=1, table="sglang", descale=True, cap=3.0)
    yield Case("forward", **d | dict(dq=59, dv=3), sq=20, sk=50, descale=True, poison=(30, 37), mask=TL, right=0)
    yield Case("narrow", **d, sq=2, sk=70, page=16, lens_k=[70, 33], descale="page", powers=True)


def emulated(quick):
    """For an emulator: a second or two each."""
    cases = [case for part in (forward_small, staged, staged_bytes, staged_with_factors, few_rows, few_rows_of_bytes, general_bytes, forward_features,
                               forward_rest, forward_hdims, merges, backward_small, backward_features, append_small, append_features,
                               forward_tails, backward_tails, masks_as_data, narrow, wide_heads, latents,
                               latents_of_fp8, chosen_keys) for case in part()]
    return cases[::12] if quick else cases


def find(lib, arch, family, dtype, args, pipeline):
    """@pipeline as a case has it."""
    if isinstance(pipeline, dict):
        pipeline = pipeline.get(arch)
    if isinstance(pipeline, abi.Tile):
        return abi.make_kernel(lib, arch, family, dtype, args, pipeline)
    return abi.choose_kernel(lib, arch, family, dtype, args, pipeline=pipeline)


def pick(lib, arch, family, dtype, args, pipeline):
    kernel = find(lib, arch, family, dtype, args, pipeline)
    assert kernel is not None, f"no kernel for family {family}"
    return kernel


def launch_forward(problem, kernel, lib, device, arch):
    device.run(kernel, problem.args, problem)
    if problem.splits:
        args = problem.combine_args()
        device.run(pick(lib, arch, abi.FWD_SPLITKV_COMBINE, problem.o_dtype, args, None), args,
                   problem)


def launch_backward(problem, kernel, lib, device, arch):
    """@kernel: of the stage dq_dk_dv."""
    for family in problem.stages():
        chosen = kernel if family == abi.BWD_DQ_DK_DV else pick(lib, arch, family, problem.dtype, problem.bwd, None)
        device.run(chosen, problem.bwd, problem)


def run_forward(case, lib, device, arch, pipeline):
    problem = Forward(**case.options)
    kernel = pick(lib, arch, problem.family, problem.dtype, problem.args, pipeline)
    launch_forward(problem, kernel, lib, device, arch)
    name = abi.pipeline_of(kernel)
    error, allowed, lse = problem.judge(lib, multiplied_as(name, problem.dtype))
    return f"{name} O {error:.2g} of {allowed:.2g}, LSE {lse:.2g}"


def multiplied_as(pipeline, dtype):
    """The type that P has beside V."""
    if dtype == abi.E4M3 and pipeline == "gpu_amd":
        return dtype
    return min(dtype, abi.BF16)


def run_codes(case, lib, device, arch, pipeline):
    """One key, whose value has every code in its 256 dims: O is what they mean, to the bit, and NaN where they do not."""
    problem = Forward(**case.options)
    ctypes.memmove(problem.args.v.data, bytes(range(256)), 256)
    kernel = pick(lib, arch, problem.family, problem.dtype, problem.args, pipeline)
    device.run(kernel, problem.args, problem)
    want = np.array([lib.reference_load(problem.args.v.data, problem.dtype, i) for i in range(256)])
    assert np.array_equal(problem.o.reshape(-1).astype(np.float64), want, equal_nan=True), "a code means something else"
    return f"{abi.pipeline_of(kernel)} 256 codes"


def run_alone(case, lib, device, arch, pipeline):
    """Rows of one key, which weighs 1: O is its values times their head's factor, but for float32's rounding."""
    problem = Forward(**case.options)
    kernel = pick(lib, arch, problem.family, problem.dtype, problem.args, pipeline)
    device.run(kernel, problem.args, problem)
    want, lse = np.zeros(problem.o_shape), np.zeros((problem.batch, problem.hq, problem.sq))
    assert problem.sk == 1
    assert lib.reference_forward(ctypes.byref(problem.args), ctypes.c_void_p(want.ctypes.data), ctypes.c_void_p(lse.ctypes.data), None) == 0
    error, most = np.abs(problem.o[..., :problem.dv] - want).max(), np.abs(want).max()
    assert error <= 1e-5 * most, f"O is off by {error:.3g} where it is at most {most:.3g}"
    return f"{abi.pipeline_of(kernel)} O {error:.2g} of {most:.2g}"


def run_tail(case, lib, device, arch, pipeline):
    """One key, the first or the last, weighs as much as all others together, each of which is next to nothing beside it."""
    errors = []
    for heavy in (0, -1):
        problem = Forward(**case.options)
        others = problem.sk - 1
        keys = np.ctypeslib.as_array(ctypes.cast(problem.args.k.data, ctypes.POINTER(ctypes.c_uint8)), (others + 1, problem.dq))
        keys[:] = 0
        ctypes.memmove(keys[heavy].ctypes.data, problem.args.q.data, problem.dq)
        q = np.array([lib.reference_load(problem.args.q.data, problem.dtype, i) for i in range(problem.dq)])
        problem.args.scale = np.log(others) / (q @ q)
        kernel = pick(lib, arch, problem.family, problem.dtype, problem.args, pipeline)
        device.run(kernel, problem.args, problem)
        o = np.array([lib.reference_load(ctypes.c_void_p(problem.args.o.data), problem.o_dtype, i) for i in range(problem.dv)])
        errors.append((np.abs(o - 1).max(), np.abs(problem.lse_array - np.log(2 * others)).max()))
        assert errors[-1][0] < 0.01 and errors[-1][1] < 1e-3, f"O, LSE off by {errors[-1]}, heavy key {heavy}"
    return f"{abi.pipeline_of(kernel)} O, LSE off by {', '.join(f'{o:.2g} {lse:.2g}' for o, lse in errors)}"


def run_backward(case, lib, device, arch, pipeline):
    problem = Backward(lib, **case.options)
    kernel = pick(lib, arch, abi.BWD_DQ_DK_DV, problem.dtype, problem.bwd, pipeline)
    before = None
    for _ in range(2 if case.options.get("acc") or case.options.get("dbias") else 1):
        launch_backward(problem, kernel, lib, device, arch)
        after = {n: x.tobytes() for n, x in problem.outputs.items()}
        assert before in (None, after), "two runs gave different bits"
        before = after
    return f"{abi.pipeline_of(kernel)} {problem.judge_backward()}"


def run_narrow(case, lib, device, arch, pipeline):
    """With factors that are powers of two: the bits of the kernel of 16 bits, of the same tile and loop."""
    problem = Forward(**case.options)
    a = problem.args
    kernel = pick(lib, arch, problem.family, problem.dtype, a, pipeline)
    device.run(kernel, a, problem)
    got = [x.copy() for x in (problem.o, problem.lse_array)]
    wide = problem.widened()
    a.kv_dtype, a.k_descale.data, a.v_descale.data = 0, None, None
    a.k.data, a.v.data = (pointer(x) for x in wide)
    scale, tile = a.scale, kernel.tile
    if case.options["descale"]:
        a.scale = -1.0  # whose loop takes scores as they are, as one with factors does
    twin = abi.make_kernel(lib, arch, problem.family, problem.dtype, a, tile)
    a.scale = scale
    for x in (problem.o, problem.lse_array):
        x[...] = 0
    device.run(twin, a, problem)
    assert twin is not None, "no kernel of 16 bits has this tile"
    for name, mine, theirs in zip(("O", "LSE"), got, (problem.o, problem.lse_array)):
        assert mine.tobytes() == theirs.tobytes(), f"{name}: not the bits of the cache of 16 bits"
    return f"{abi.pipeline_of(kernel)} bit for bit"


def run_append(case, lib, device, arch, pipeline):
    problem = Append(**case.options)
    kernel = pick(lib, arch, abi.FWD_APPENDKV, problem.dtype, problem.args, None)
    return problem.run_and_judge(lib, lambda: device.run(kernel, problem.args, problem))


def run_merge(case, lib, device, arch, pipeline):
    problem = Merge(**case.options)
    device.run(pick(lib, arch, abi.FWD_SPLITKV_COMBINE, problem.o_dtype, problem.args, None), problem.args, problem)
    return problem.judge(lib)


def kernels(case, lib, arch, pipeline=None):
    """Every kernel that a case launches; nothing is computed."""
    pipeline = pipeline or case.pipeline
    if case.kind == "backward":
        problem = Backward(None, **case.options)
        return [find(lib, arch, family, problem.dtype, problem.bwd, pipeline if family == abi.BWD_DQ_DK_DV else None)
                for family in problem.stages()]
    if case.kind == "append":
        problem = Append(**case.options)
        return [abi.choose_kernel(lib, arch, abi.FWD_APPENDKV, problem.dtype, problem.args)]
    if case.kind == "merge":
        problem = Merge(**case.options)
        return [abi.choose_kernel(lib, arch, abi.FWD_SPLITKV_COMBINE, problem.o_dtype, problem.args)]
    problem = Forward(**case.options)
    found = [find(lib, arch, problem.family, problem.dtype, problem.args, pipeline)]
    if problem.splits:
        found.append(abi.choose_kernel(lib, arch, abi.FWD_SPLITKV_COMBINE, problem.o_dtype,
                                       problem.combine_args()))
    return found


def run(case, lib, device, arch, pipeline=None):
    """Runs one case and judges it; returns a line for people, raises AssertionError."""
    return case.run(lib, device, arch, pipeline or case.pipeline)
