# SPDX-License-Identifier: MIT
"""Hopper's forward loops (fwd_wgmma.h, fwd_wide.h), by themselves: checked against float64, timed against cuDNN.

    python3 tests/gpu/hopper.py build DIR [--match TEXT]       # needs NVRTC, no GPU
    python3 tests/gpu/hopper.py run DIR [--no-check] [--no-bench] [--few] [--match TEXT]
    python3 tests/gpu/hopper.py sanitize DIR [--match TEXT]    # compute-sanitizer, a few problems a kernel

`run` needs a Hopper GPU and PyTorch. Both sides run in one process in turn, on normally distributed inputs, three
sets of them rotated; a time is the median of 20, each of several launches in a row between two events. The table
comes last. Wide heads are timed by hopper_wide.py.
"""
import argparse
import dataclasses
import itertools
import json
import math
import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import abi  # noqa: E402
import cuda_device  # noqa: E402
import libraries  # noqa: E402
from gpu_timer import compare  # noqa: E402

ARCH = "sm_90a"
EVERY_PIECE = 1 << 20  # units: more than there are pieces of work, each of which then has a block of its own


def variant(dq, dv, m, n, dtype="bf16", **features):
    """The options of one kernel, by name."""
    words = [f"{k.lower()}{v}" for k, v in features.items()]
    return "_".join([dtype, f"{dq}x{dv}", f"t{m}x{n}", *words]), dict(dq=dq, dv=dv, m=m, n=n, dtype=dtype, features=features)


VARIANTS = dict([
    variant(64, 64, 192, 128), variant(64, 64, 192, 128, MASK=1),
    variant(96, 96, 128, 128), variant(96, 96, 128, 128, MASK=1),
    variant(128, 128, 128, 128), variant(128, 128, 128, 128, MASK=1),
    variant(192, 128, 128, 128), variant(192, 128, 128, 128, MASK=1),
    variant(256, 256, 128, 80), variant(256, 256, 128, 80, MASK=1),
    variant(64, 64, 192, 96, SPLIT=1), variant(96, 96, 128, 128, SPLIT=1), variant(128, 128, 128, 128, SPLIT=1),
    variant(128, 128, 128, 128, MASK=1, SPLIT=1), variant(192, 128, 128, 128, SPLIT=1), variant(128, 128, 128, 128, "f16", SPLIT=1),
    variant(128, 128, 128, 64, LOGITS=1, SOFTCAP=1, SPLIT=1),
    variant(128, 128, 128, 128, MASK=1, SPLIT=1, PAGED=1), variant(256, 256, 128, 64, MASK=1, SPLIT=1, PAGED=1), variant(64, 64, 192, 96, MASK=1, SPLIT=1, PAGED=1),
    variant(128, 128, 128, 128, "f16"), variant(128, 128, 128, 128, "f16", MASK=1),
    variant(128, 128, 128, 128, LOGITS=1, SOFTCAP=1, MASK=1), variant(128, 128, 128, 128, LOGITS=1, SOFTCAP=1),
    variant(128, 128, 128, 128, "f16", LOGITS=1, SOFTCAP=1, MASK=1), variant(192, 128, 128, 128, LOGITS=1, SOFTCAP=1, MASK=1),
    variant(256, 256, 128, 64, LOGITS=1, SOFTCAP=1, MASK=1), variant(256, 256, 128, 64, LOGITS=1, SOFTCAP=1),
    variant(256, 256, 128, 64, LOGITS=1, SOFTCAP=1, MASK=1, PAGED=1), variant(64, 64, 192, 64, LOGITS=1, SOFTCAP=1, MASK=1),
    *(variant(*tile, LOGITS=1, SOFTCAP=1, CAP_APPROX=1, **more) for tile, more in (
        ((128, 128, 128, 128), {}), ((128, 128, 128, 128), dict(MASK=1)), ((128, 128, 128, 128, "f16"), dict(MASK=1)),
        ((64, 64, 192, 128), dict(MASK=1)), ((192, 128, 128, 128), dict(MASK=1)), ((256, 256, 128, 64), dict(MASK=1)),
        ((128, 128, 128, 128), dict(MASK=1, PAGED=1)), ((128, 128, 128, 64), dict(MASK=1, SPLIT=1)),
        ((128, 128, 128, 128), dict(BIAS=2, MASK=1)), ((256, 256, 128, 32), dict(BIAS=1, MASK=1)), ((128, 128, 128, 96), dict(DROPOUT=1, MASK=1)))),
    variant(128, 128, 128, 128, LOGITS=1, BIAS=2, MASK=1), variant(128, 128, 128, 128, LOGITS=1, BIAS=2, SOFTCAP=1, MASK=1),
    variant(128, 128, 128, 96, LOGITS=1, SOFTCAP=1, DROPOUT=1, MASK=1), variant(256, 256, 128, 64, LOGITS=1, BIAS=1, MASK=1),
    variant(256, 256, 128, 32, DROPOUT=1, MASK=1), variant(256, 256, 128, 32, LOGITS=1, BIAS=2, MASK=1),
    variant(256, 256, 128, 32, LOGITS=1, BIAS=1, SOFTCAP=1, MASK=1), variant(256, 256, 128, 32, DROPOUT=1, MASK=1, PAGED=1),
    variant(192, 192, 128, 64, DROPOUT=1, MASK=1), variant(192, 192, 128, 32, LOGITS=1, BIAS=1, SOFTCAP=1, MASK=1),
    variant(192, 128, 128, 64, DROPOUT=1, MASK=1),
    variant(128, 128, 128, 128, LOGITS=1, BIAS=1), variant(128, 128, 128, 128, LOGITS=1, BIAS=1, MASK=1),
    variant(192, 128, 128, 64, LOGITS=1, BIAS=2, MASK=1), variant(192, 128, 128, 64, LOGITS=1, BIAS=1, MASK=1),
    variant(64, 64, 192, 64, LOGITS=1, BIAS=1, MASK=1), variant(64, 64, 192, 64, DROPOUT=1, MASK=1),
    variant(128, 128, 128, 96, DROPOUT=1, MASK=1), variant(128, 128, 128, 96, DROPOUT=1),
    variant(64, 64, 192, 128, PAGED=1), variant(64, 64, 192, 128, MASK=1, PAGED=1), variant(64, 64, 192, 64, LOGITS=1, BIAS=1, MASK=1, PAGED=1),
    variant(128, 128, 128, 128, PAGED=1), variant(128, 128, 128, 128, MASK=1, PAGED=1), variant(128, 128, 128, 128, "f16", MASK=1, PAGED=1),
    variant(128, 128, 128, 128, LOGITS=1, SOFTCAP=1, MASK=1, PAGED=1), variant(128, 128, 128, 96, DROPOUT=1, MASK=1, PAGED=1),
    variant(192, 128, 128, 128, MASK=1, PAGED=1), variant(256, 256, 128, 80, MASK=1, PAGED=1),
    variant(128, 128, 128, 128, "e4m3", DESCALE=1, MASK=1, PAGED=1), variant(256, 256, 128, 80, "e4m3", DESCALE=1, PAGED=1),
    variant(64, 64, 128, 192, "e4m3", DESCALE=1), variant(64, 64, 128, 192, "e4m3", DESCALE=1, MASK=1),
    variant(128, 128, 128, 128, "e4m3", DESCALE=1), variant(128, 128, 128, 128, "e4m3", DESCALE=1, MASK=1),
    variant(96, 96, 128, 128, "e4m3", MASK=1), variant(160, 160, 128, 96, "e4m3"), variant(192, 128, 128, 128, "e4m3"),
    variant(192, 192, 128, 96, "e4m3", DESCALE=1, MASK=1),
    variant(256, 256, 128, 80, "e4m3", DESCALE=1), variant(256, 256, 128, 80, "e4m3", DESCALE=1, MASK=1),
    variant(512, 512, 64, 64), variant(512, 512, 64, 64, MASK=1), variant(512, 512, 64, 64, "f16", MASK=1), variant(384, 384, 64, 64, MASK=1),
    variant(512, 512, 64, 64, PAGED=1), variant(512, 512, 64, 64, MASK=1, PAGED=1), variant(384, 384, 64, 64, "f16", MASK=1, PAGED=1),
    variant(512, 512, 64, 64, LOGITS=1, SOFTCAP=1), variant(512, 512, 64, 64, LOGITS=1, SOFTCAP=1, MASK=1),
    variant(512, 512, 64, 64, LOGITS=1, SOFTCAP=1, MASK=1, PAGED=1),
] + [
    variant(d, dv, m, n, INTERVALS=1, **mask) for d, dv, m, n in ((64, 64, 192, 64), (128, 128, 128, 128)) for mask in ({}, dict(MASK=1))
] + [
    variant(96, 96, 128, 128, INTERVALS=1, MASK=1), variant(192, 128, 128, 128, INTERVALS=1), variant(256, 256, 128, 64, INTERVALS=1),
    variant(128, 128, 128, 128, INTERVALS=1, MASK=1, LOGITS=1, SOFTCAP=1), variant(64, 64, 192, 64, BITS=1, MASK=1),
    variant(128, 128, 128, 128, BITS=1),
])


def ask(args, v):
    """Of @args, that code is compiled with a variant's features."""
    f = v["features"]
    args.hdim_q, args.hdim_v, args.dtype, args.scale = v["dq"], v["dv"], abi.DTYPE_NAMES.index(v["dtype"]), 1
    args.band.window_left, args.band.window_right = -1, 0 if f.get("MASK") else -1
    args.band.mask = abi.MASK_BOTTOM_RIGHT if f.get("MASK") else abi.MASK_NONE
    args.logits_soft_cap, args.dropout.p_drop = f.get("SOFTCAP", 0), f.get("DROPOUT", 0)
    args.bias.data, args.alibi_slopes = (64 if f.get("BIAS") == i else None for i in (1, 2))
    args.mask_data.intervals.data, args.mask_data.bits.data = (64 if f.get(kind) else None for kind in ("INTERVALS", "BITS"))
    return args


def is_wide(v):
    return v["dq"] > 256


def tile_of(v, waves):
    if is_wide(v):
        return abi.Tile(abi.PIPELINES.index("gpu_wide"), v["m"], v["n"], v["dq"], v["dv"], 4, 2, 1)
    return abi.Tile(abi.PIPELINES.index("gpu_wgmma"), v["m"], v["n"], v["dq"], v["dv"], waves, 1, 1)


def kernel_of(lib, v):
    args, f = ask(abi.FwdArgs(), v), v["features"]
    args.cache.page_size, args.q_descale.data = 16 * f.get("PAGED", 0), 64 * f.get("DESCALE", 0) or None
    family = abi.FWD_SPLITKV if f.get("SPLIT") else abi.FWD_PAGEDKV if f.get("PAGED") else abi.FWD
    return abi.make_kernel(lib, ARCH, family, args.dtype, args, tile_of(v, v["m"] // 16), f.get("CAP_APPROX", False))


def kernels(lib, match):
    return {name: kernel_of(lib, v) for name, v in VARIANTS.items() if match in name}


# ---- launching ------------------------------------------------------------------------------


class Device(cuda_device.Cubins):
    """Variants that a folder has code of."""

    def __init__(self, folder, variants=VARIANTS):
        super().__init__(abi.load_library(), folder)
        self.variants = {name: v for name, v in variants.items() if os.path.exists(os.path.join(folder, name + ".cubin"))}

    def launch_of(self, name, p, persistent):
        """A function that launches a variant on a problem."""
        kernel, args = kernel_of(self.lib, self.variants[name]), p.args()
        if p.rest:
            p.cut_rest(self.torch, args, self.variants[name])
        launch = self.launcher(self.function(name, kernel), kernel, args, cuda_device.UNITS if persistent else EVERY_PIECE)

        def launched(keep=p, arrivals=p.arrivals):
            if arrivals is not None:
                arrivals.zero_()
            launch()
        return launched


class Pages:
    """A problem's keys and values in pages: in no order, NaN wherever no key is, and behind a sequence's pages numbers that are
    none. indirect: kv_indptr's form, else a table with a row a sequence."""

    def __init__(self, torch, p, size, indirect=False):
        self.size = size
        lengths = [n for _, n in p.group] if p.group else p.lens_k or [p.k.shape[1]] * p.q.shape[0]
        counts = [-(-n // size) for n in lengths]
        spare, columns = 3, max(counts) + 2
        order = torch.randperm(sum(counts) + spare).tolist()
        self.pools = [torch.empty(len(order), size, *t.shape[2:], device="cuda", dtype=t.dtype) for t in (p.k, p.v)]
        for pool in self.pools:
            poison(torch, pool)
        table, at = [], 0
        for b, (n, count) in enumerate(zip(lengths, counts)):
            mine = [order.pop() for _ in range(count)]
            for pool, t in zip(self.pools, (p.k, p.v)):
                rows = t[0, at:at + n] if p.group else t[b, :n]
                for i, page in enumerate(mine):
                    part = rows[i * size:(i + 1) * size]
                    pool[page, :len(part)] = part
            table.append(mine)
            at += n
        self.n_pages = self.pools[0].shape[0]
        ints = lambda x: torch.tensor(x, dtype=torch.int32, device="cuda")  # noqa: E731
        self.lengths = ints(lengths)
        self.columns = columns
        if indirect:
            self.indices = ints([x for mine in table for x in mine] + [2 ** 31 - 1] * 4)
            self.starts = ints([sum(counts[:i]) for i in range(len(counts) + 1)])
            self.last = ints([n - (c - 1) * size if c else 0 for n, c in zip(lengths, counts)])
            self.n_indices = sum(counts)
        else:
            self.table = ints([mine + [-7 if i % 2 else 2 ** 31 - 1] * (columns - len(mine))
                               for i, mine in enumerate(table)])
        self.indirect = indirect

    def fill(self, args, bias):
        cache, s = args.cache, args.sequences
        cache.page_size, cache.n_pages = self.size, self.n_pages
        for name, pool in zip("kv", self.pools):
            setattr(args, name, tensor_of(pool))
        s.seqstart_k, s.total_k, s.seqlen_k_max = None, 0, bias.shape[3] if bias is not None else self.columns * self.size
        if self.indirect:
            cache.kv_indptr, cache.kv_page_indices, cache.kv_last_page_len = (t.data_ptr() for t in (self.starts, self.indices, self.last))
            cache.n_page_indices = self.n_indices
        else:
            cache.block_table, cache.block_table_stride, cache.max_blocks = self.table.data_ptr(), self.table.stride(0), self.columns
            s.seqlen_k = self.lengths.data_ptr()


def tensor_of(t):
    return abi.STRUCTS["abi_tensor"](t.data_ptr(), *t.stride())


@dataclasses.dataclass
class Problem:
    q: object
    k: object
    v: object
    o: object
    lse: object
    group: object = None  # lengths (q, k) of sequences on the packed axes
    lens_k: object = None  # lengths in batch mode
    mask: int = abi.MASK_NONE
    left: int = -1
    right: int = -1
    sinks: int = 0
    scale: float = 1  # times the usual one
    cap: float = 0
    slopes: object = None
    bias: object = None
    sink: object = None
    dropout: float = 0
    bytes: object = None  # random ones, as the kernel stores them
    descale: tuple = ()  # of q, k, v: (batch, heads)
    pages: object = None
    intervals: object = None  # endpoints (batch or 1, heads or 1, n, rows); of sequences on packed axes the first axis is 1
    bits: object = None  # the same of the bytes of a mask (.., .., rows, bytes)
    rest: int = 0  # parts of each of the last tiles
    arrivals: object = None
    keep: tuple = ()
    largest: float = 0  # score that a row sees, as wrong() found it

    def cut_rest(self, torch, args, v):
        """Room for as many parts as there may be, which hold nothing."""
        most = cuda_device.UNITS * self.rest
        parts = torch.full((most, v["m"] * (v["dv"] + 8)), math.nan, device="cuda")
        self.arrivals = torch.zeros(cuda_device.UNITS * v["m"] // 16, dtype=torch.int32, device="cuda")
        self.keep += (parts,)
        args.rest.parts, args.rest.arrivals = parts.data_ptr(), self.arrivals.data_ptr()
        args.rest.n_parts, args.rest.n_splits = most, self.rest

    def args(self):
        import torch
        a, s = abi.FwdArgs(), None
        for name in "qkvo":
            setattr(a, name, tensor_of(getattr(self, name)))
        b, sq, hq, d = self.q.shape
        a.lse = abi.STRUCTS["abi_rows"](self.lse.data_ptr(), self.lse.stride(0), self.lse.stride(1), 1)
        s = a.sequences
        s.batch, s.seqlen_q_max, s.seqlen_k_max, s.total_q, s.total_k = b, sq, self.k.shape[1], b * sq, b * self.k.shape[1]
        if self.group:
            starts = [[0], [0]]
            for lengths in self.group:
                for x, n in zip(starts, lengths):
                    x.append(x[-1] + n)
            q, k = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in starts)
            self.keep += (q, k)
            s.seqstart_q, s.seqstart_k, s.batch = q.data_ptr(), k.data_ptr(), len(self.group)
            s.seqlen_q_max, s.seqlen_k_max = (max(x) for x in zip(*self.group))
            s.total_q, s.total_k = sq, self.k.shape[1]
        if self.lens_k:
            n = torch.tensor(self.lens_k, dtype=torch.int32, device="cuda")
            self.keep += (n,)
            s.seqlen_k = n.data_ptr()
        a.nhead_q, a.nhead_k, a.hdim_q, a.hdim_v = hq, self.k.shape[2], d, self.v.shape[3]
        types = {torch.float32: abi.F32, torch.bfloat16: abi.BF16, torch.float16: abi.F16, torch.float8_e4m3fn: abi.E4M3}
        a.scale, a.dtype, a.o_dtype, a.band.mask = self.scale * d ** -0.5, types[self.q.dtype], types[self.o.dtype], self.mask
        a.band.window_left, a.band.window_right, a.band.sink_tokens = self.left, self.right, self.sinks
        a.logits_soft_cap = self.cap
        if self.slopes is not None:
            a.alibi_slopes = self.slopes.data_ptr()
        if self.sink is not None:
            a.sink = self.sink.data_ptr()
        if self.dropout:
            self.bytes = torch.zeros(b, hq, sq, s.seqlen_k_max, dtype=torch.uint8, device="cuda")
            d, t = a.dropout, self.bytes
            d.seed, d.offset, d.p_drop, d.p_keep_inverse, d.keep_at_most = 1234567, 89, self.dropout, 1 / (1 - self.dropout), self.keep_at_most()
            d.randval = abi.STRUCTS["abi_tensor"](t.data_ptr(), t.stride(0), t.stride(2), t.stride(1), 1)
        for name, t in zip("qkv", self.descale):
            setattr(a, name + "_descale", abi.STRUCTS["abi_descale"](t.data_ptr(), t.stride(0), t.stride(1), 0, 0, 0))
        if self.pages:
            self.pages.fill(a, self.bias)
        if self.intervals is not None:
            b, h, e, i = (0 if axis < 2 and n == 1 else s for axis, (n, s) in enumerate(zip(self.intervals.shape, self.intervals.stride())))
            a.mask_data.intervals = abi.STRUCTS["abi_tensor"](self.intervals.data_ptr(), b, i, h, e)
            a.mask_data.n_endpoints = self.intervals.shape[2]
        if self.bits is not None:
            b, h, i, e = (0 if axis < 2 and n == 1 else s for axis, (n, s) in enumerate(zip(self.bits.shape, self.bits.stride())))
            a.mask_data.bits = abi.STRUCTS["abi_tensor"](self.bits.data_ptr(), b, i, h, e)
        if self.bias is not None:  # (batch, head, row, column)
            b, h, i, j = self.bias.stride()
            a.bias, a.bias_dtype = abi.STRUCTS["abi_tensor"](self.bias.data_ptr(), b, i, h, j), a.dtype
        return a

    def keep_at_most(self):
        return int(255 * (1 - self.dropout))

    def sequences(self):
        """(q, k, v, o, lse, bias, kept) of each sequence: (seq, head, dim), lse (head, seq), the others (head, seq, seq)."""
        i = j = 0
        for b, (n_q, n_k) in enumerate(self.group or [(self.q.shape[1], x) for x in self.lens_k or [self.k.shape[1]] * self.q.shape[0]]):
            at = 0 if self.group else b
            q, k, v, o = self.q[at, i:i + n_q], self.k[at, j:j + n_k], self.v[at, j:j + n_k], self.o[at, i:i + n_q]
            factors = [t[b].double()[:, None] for t in self.descale] or [1, 1, 1]
            q, k, v = (x.double() * f for x, f in zip((q, k, v), factors))
            bias = None if self.bias is None else self.bias[at, :, i:i + n_q, :n_k].double()
            kept = None if not self.dropout else self.bytes[at, :, i:i + n_q, :n_k] <= self.keep_at_most()
            yield q, k, v, o, self.lse[at, :, i:i + n_q], bias, kept
            if self.group:
                i, j = i + n_q, j + n_k

    def seen(self, torch, n_q, n_k):
        i, j = torch.arange(n_q, device="cuda")[:, None], torch.arange(n_k, device="cuda")[None]
        seen = torch.ones(n_q, n_k, dtype=torch.bool, device="cuda")
        if self.mask != abi.MASK_NONE:
            at = i + (n_k - n_q if self.mask == abi.MASK_BOTTOM_RIGHT else 0)
            if self.right >= 0:
                seen &= j <= at + self.right
            if self.left >= 0:
                seen &= (j >= at - self.left) | (j < self.sinks)
        return seen

    def seen_of(self, torch, b, n_q, n_k, first=0):
        """(heads or 1, rows, keys) of a sequence, whose rows begin at @first of the mask's."""
        seen = self.seen(torch, n_q, n_k)[None]
        if self.bits is not None:
            x = self.bits[min(b, self.bits.shape[0] - 1), :, first:first + n_q, :, None] >> torch.arange(8, device="cuda")
            return seen & (x & 1).bool().flatten(2)[..., :n_k]
        if self.intervals is None:
            return seen
        f = self.intervals[min(b, self.intervals.shape[0] - 1), :, :, first:first + n_q, None].long()
        j = torch.arange(n_k, device="cuda")
        within = j < f[:, 0]
        for e in range(2, f.shape[1], 2):
            within |= (j >= f[:, e - 1]) & (j < f[:, e])
        return seen & within

    def wrong(self):
        """The relative error of O and the largest of LSE, against float64."""
        import torch
        above = below = 0.0
        worst, first = 0.0, 0
        for b, (q, k, v, o, lse, bias, kept) in enumerate(self.sequences()):
            n_q, n_k = q.shape[0], k.shape[0]
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
            s = torch.einsum("ihd,jhd->hij", q, k) * (self.scale * q.shape[2] ** -0.5)
            i, j = torch.arange(n_q, device="cuda")[:, None], torch.arange(n_k, device="cuda")[None]
            if self.cap:
                s = self.cap * torch.tanh(s / self.cap)
            if self.slopes is not None:
                s -= self.slopes.double()[:, None, None] * (i + n_k - n_q - j).abs()
            if bias is not None:
                s += bias
            seen = self.seen_of(torch, b, n_q, n_k, first)
            first += n_q if self.group else 0
            if self.cap and s.numel():
                self.largest = max(self.largest, s.abs().masked_fill(~seen, 0).nan_to_num(nan=0.0).max().item())
            s.masked_fill_(~seen, -math.inf)
            sink = s.new_full((*s.shape[:2], 1), -math.inf)
            if self.sink is not None:
                sink[...] = self.sink.double()[:, None, None]
            top = torch.cat([s, sink], -1).amax(-1, keepdim=True)
            top = top.masked_fill(top == -math.inf, 0)
            p = torch.exp(s - top).masked_fill(~seen, 0)
            total = p.sum(-1, keepdim=True) + torch.exp(sink - top)
            p = p / total.masked_fill(total == 0, 1)
            want_lse = (top + total.log())[..., 0]
            if kept is not None:
                p *= kept / (1 - self.dropout)
            used = seen.any(0).any(0)
            want = torch.einsum("hij,jhd->ihd", p, v.masked_fill(~used[:, None, None], 0))
            above += (o.double() - want).nan_to_num(nan=0.0).square().sum().item()
            below += want.nan_to_num(nan=0.0).square().sum().item()
            same = (lse == want_lse) | ((lse - want_lse).abs() < 1e30) | (lse.isnan() & want_lse.isnan())
            if not torch.equal(o.isnan(), want.isnan()):
                above = math.inf
            lowest = (want_lse < -1e38) & (lse < -1e38) & lse.isfinite()  # which count as less, see base.h
            same |= lowest
            worst = max(worst, (lse.double() - want_lse).masked_fill(lowest, 0).nan_to_num(nan=0.0).abs().max().item() if lse.numel() else 0)
            if not same.all():
                worst = math.inf
        return math.sqrt(above / below) if below else math.sqrt(above), worst


def make(torch, b, hq, hk, sq, sk, d, dv, dtype="bf16", group=None, tail=0, **more):
    """tail: rows of NaN behind each tensor's last, in the packed case."""
    kind = {"bf16": torch.bfloat16, "f16": torch.float16, "e4m3": torch.float8_e4m3fn}[dtype]
    if group:
        b, sq, sk = 1, sum(x for x, _ in group), sum(x for _, x in group)
    q, k, v = (torch.randn(b, n, h, w, device="cuda").to(kind) for n, h, w in ((sq, hq, d), (sk, hk, d), (sk, hk, dv)))
    o = torch.full((b, sq, hq, dv), math.nan, device="cuda", dtype=torch.bfloat16 if dtype == "e4m3" else kind)
    lse = torch.full((b, hq, sq), math.nan, device="cuda", dtype=torch.float32)
    return Problem(q, k, v, o, lse, group=group, **more)


# ---- correctness ----------------------------------------------------------------------------

CAUSAL = dict(mask=abi.MASK_BOTTOM_RIGHT, right=0)


def poison(torch, t):
    """Fills with NaN."""
    if t.element_size() == 1:
        t.view(torch.uint8).fill_(0x7f)
    else:
        t.fill_(math.nan)


def with_nan(torch, at, **more):
    """NaN in padding, which nobody sees, and in a key, which some rows do."""
    short = at(2, 4, 2, 130, 904, lens_k=[333, 0], **more)
    for t in (short.k, short.v):
        poison(torch, t[0, 333:])
        poison(torch, t[1])
    yield "padded with NaN", short
    seen = at(1, 4, 2, 300, 304, **more)
    poison(torch, seen.k[0, 150])
    yield "NaN in a key", seen


def modified(torch, f, at, masked):
    """Problems with a soft cap, ALiBi or a bias."""
    group = [(5, 304), (0, 8), (333, 90), (400, 400), (4, 0), (129, 257), (1, 1000)]
    n_q = sum(x for x, _ in group)
    kind = torch.bfloat16

    def random(*shape):
        return torch.randn(*shape, device="cuda", dtype=kind)
    if f.get("SOFTCAP") and f.get("BIAS") == 2:
        masked, f = masked | dict(slopes=torch.rand(4, device="cuda")), dict(f, BIAS=0)
    if f.get("SOFTCAP") and f.get("BIAS") == 1:
        masked, f = masked | dict(cap=20.0), dict(f, SOFTCAP=0)
    yield from with_nan(torch, at, **masked, **(dict(cap=5.0) if f.get("SOFTCAP") else dict(slopes=torch.rand(4, device="cuda")) if f.get(
        "BIAS") == 2 else dict(bias=random(1, 4, 300, 904).expand(2, 4, 300, 904))))
    if f.get("SOFTCAP"):
        for cap in (1.0, 20.0, 1000.0):
            yield f"cap {cap}", at(2, 4, 2, 333, 777, cap=cap, **masked)
        yield "strong scores", at(2, 4, 2, 333, 777, cap=30.0, scale=100.0, **masked)
        yield "negative scale", at(2, 4, 2, 333, 777, cap=30.0, scale=-1.0, **masked)
        yield "scale 0", at(2, 4, 2, 333, 777, cap=30.0, scale=0.0, **masked)
        # Of some tiles all scores are small beside the cap, of others not; maxima that rise, far beyond the cap at last.
        yield "scores near and far", at(2, 4, 2, 333, 1777, cap=30.0, scale=3.7, **masked)
        rising = at(2, 4, 2, 333, 1777, cap=30.0, scale=2.0, **masked)
        rising.k *= torch.linspace(12, 0.1, 1777, device="cuda").square()[:, None, None].to(rising.k.dtype)
        yield "rising scores", rising
        yield "group", at(1, 4, 4, 0, 0, group=group, cap=3.0, sink=torch.randn(4, device="cuda"), **masked)
    if f.get("BIAS") == 2:
        slopes = torch.tensor([0.5, -0.25, 1e-3, 0.0], device="cuda")
        for what, scale in (("ALiBi", 1.0), ("negative scale", -1.0), ("scale 0", 0.0)):
            yield what, at(2, 4, 2, 333, 777, slopes=slopes, scale=scale, **masked)
        yield "long", at(1, 4, 4, 1500, 1500, slopes=slopes, sink=torch.randn(4, device="cuda"), **masked)
        yield "group", at(1, 4, 4, 0, 0, group=group, slopes=slopes, **masked)
        if masked:
            yield "both sides", at(1, 4, 4, 700, 900, slopes=slopes, mask=abi.MASK_BOTTOM_RIGHT, left=300, right=200)
            yield "top left", at(1, 4, 4, 700, 900, slopes=slopes, mask=abi.MASK_TOP_LEFT, right=0)
    if f.get("BIAS") == 1:
        whole = random(2, 4, 333, 784)[..., :777]
        for what, bias in (("bias", whole), ("of all heads", whole[:, :1]), ("of all entries", whole[:1]), ("of all rows", whole[:, :, :1]),
                           ("of all", whole[:1, :1])):
            yield what, at(2, 4, 2, 333, 777, bias=bias.expand(2, 4, 333, 777), **masked)
        yield "negative scale", at(2, 4, 2, 333, 777, bias=whole, scale=-1.0, **masked)
        hidden = whole.clone()
        hidden[..., 100:300] = -math.inf
        hidden[:, :, 7] = -math.inf
        padded = random(2, 4, 333, 784)
        padded[..., :777], padded[..., 777:] = hidden, math.nan
        yield "minus infinity, NaN beside it", at(2, 4, 2, 333, 777, bias=padded[..., :777], **masked)
        lowest = padded.clone()[..., :777]
        lowest.copy_(whole)
        lowest[:, :, 5:70] = lowest[:, 1, 200] = lowest[..., 300:400] = torch.finfo(lowest.dtype).min
        yield "rows of the lowest number", at(2, 4, 2, 333, 777, bias=lowest, **masked)
        yield "lowest number, small scale", at(2, 4, 2, 333, 777, bias=lowest, scale=0.01, **masked)
        yield "group", at(1, 4, 4, 0, 0, group=group, bias=random(1, 4, n_q, 1000), **masked)


def edges(torch, v, masked):
    """Of rows of all heads in tiles of 64, two of which go together, and tiles of 64 keys: lengths around those, and narrower heads."""
    d, dtype = v["dq"], v["dtype"]
    for heads, (rows, keys) in itertools.product(((16, 8), (32, 4), (6, 1), (3, 3)), ((1, 1), (1, 65), (4, 129), (31, 64), (33, 63), (64, 128), (65, 320))):
        yield f"{rows} rows of {heads[0]}/{heads[1]} heads, {keys} keys", make(torch, 2, *heads, rows, keys, d, d, dtype, **masked)
    yield "narrower", make(torch, 2, 4, 2, 77, 333, d - 64, d - 64, dtype, **masked)
    yield "narrowest", make(torch, 2, 4, 2, 77, 333, d - 120, d - 104, dtype, **masked)
    yield "rows of one among others", make(torch, 1, 4, 2, 0, 0, d, d, dtype, group=[(1, n) for n in (1, 64, 65, 500)] + [(65, 700), (1, 0), (0, 9), (1, 300)],
                                           **masked)


def split(torch, at, masked, causal):
    """Of kernels of splits that get none: rows of all heads that share keys in a tile, and last tiles that are cut."""
    for heads, rows, keys in (((40, 8), 300, 700), ((6, 2), 515, 515), ((32, 8), 97, 4000)):
        yield f"{rows} rows of {heads[0]}/{heads[1]} heads", at(2, *heads, rows, keys, **causal)
    if masked:
        return
    for b, heads, rows, keys, parts in ((1, (20, 4), 1000, 1000, 4), (2, (24, 8), 700, 333, 2), (1, (25, 5), 1500, 1501, 5), (3, (60, 12), 140, 2000, 16),
                                        (1, (70, 70), 500, 77, 7), (1, (24, 24), 1500, 900, 11)):
        yield f"{parts} parts of {b} x {heads[0]}/{heads[1]} x {rows}", at(b, *heads, rows, keys, rest=parts, sink=torch.randn(heads[0], device="cuda"))
    group = [(5, 300), (0, 8), (333, 90), (900, 1400), (4, 0), (1500, 257), (1, 1000), (1300, 700)]
    yield "3 parts in a group", at(1, 20, 4, 0, 0, group=group, rest=3)


def documents(n, mean, causal):
    """Endpoints (1, 1, 3, n) of documents behind each other."""
    import torch
    starts = [0]
    while starts[-1] < n:
        starts.append(min(starts[-1] + int(torch.randint(1, 2 * mean, ())), n))
    starts = torch.tensor(starts)
    i = torch.arange(n)
    at = torch.searchsorted(starts, i, right=True) - 1
    return torch.stack([0 * i, starts[at], i + 1 if causal else starts[at + 1]])[None, None].int().cuda()


def unions(torch, b, h, n, rows, keys):
    """Endpoints of which some are those of their neighbours, some mean nothing, and some rows see nothing."""
    size = (b, h, n, rows)
    alike = torch.randint(-50, keys + 50, (b, h, n, -(-rows // 100))).repeat_interleave(100, 3)[..., :rows]
    f = torch.where(torch.rand(b, h, 1, 1) < 0.6, alike, torch.randint(-50, keys + 50, size))
    f = torch.where(torch.rand(size) < 0.01, torch.tensor([-2 ** 31, 2 ** 31 - 1])[torch.randint(0, 2, size)], f)
    f[..., rows // 3:rows // 3 + 7] = 0
    return f.int().cuda()


def random_bits(torch, b, h, rows, keys):
    """Of a mask: tiles of which nothing is seen, all, and some of it."""
    tiles = torch.randint(0, 3, (b, h, -(-rows // 64), -(-keys // 128))).repeat_interleave(64, 2).repeat_interleave(16, 3)
    tiles = tiles[..., :rows, :-(-keys // 8)]
    return torch.where(tiles == 2, torch.randint(0, 256, tiles.shape), 255 * tiles).to(torch.uint8).cuda()


def with_bits(torch, at, **masked):
    torch.manual_seed(5)
    for b, h, sq, sk in ((1, 1, 300, 800), (2, 6, 777, 1333), (1, 6, 1, 9)):
        yield f"bits of {sq} rows", at(b, 6, 2, sq, sk, bits=random_bits(torch, b, h, sq, sk), **masked)
    group = [(5, 300), (0, 8), (333, 90), (400, 400), (4, 0), (129, 257)]
    yield "group of bits", at(1, 6, 2, 0, 0, group=group, bits=random_bits(torch, 1, 1, sum(x for x, _ in group), 400), **masked)


def with_intervals(torch, at, cap, **masked):
    """Masks that are data: for one head and for all, of few intervals and of many, for sequences behind each other."""
    torch.manual_seed(5)
    for what, causal in (("documents", False), ("causal documents", True)):
        yield what, at(2, 24, 8, 1500, 1500, intervals=documents(1500, 200, causal), cap=cap, **masked)
    for b, h, n, sq, sk in ((1, 1, 1, 300, 800), (2, 24, 3, 777, 1333), (1, 1, 7, 450, 900), (2, 1, 33, 390, 2500), (1, 24, 63, 200, 9500), (1, 1, 3, 1, 1)):
        yield f"unions of {n} endpoints", at(b, 24, 8, sq, sk, intervals=unions(torch, b, h, n, sq, sk), cap=cap, **masked)
    side, near = 40, 7  # as natten_2d: an interval a row of an image
    y, x = (torch.clamp(i - near // 2, 0, side - near) for i in (torch.arange(side ** 2) // side, torch.arange(side ** 2) % side))
    low = (y[:, None] + torch.arange(near)) * side + x[:, None]
    image = torch.stack([low, low + near], 2).flatten(1).T
    yield "image", at(1, 4, 4, side ** 2, side ** 2, intervals=torch.cat([image[:1] * 0, image])[None, None].int().cuda(), cap=cap, **masked)
    group = [(5, 300), (0, 8), (333, 90), (400, 400), (4, 0), (129, 257), (1, 1000)]
    yield "group of unions", at(1, 6, 2, 0, 0, group=group, intervals=unions(torch, 1, 6, 5, sum(x for x, _ in group), 400), cap=cap, **masked)


def checks(torch, v):
    """Problems for a variant."""
    d, dv, dtype = v["dq"], v["dv"], v["dtype"]
    f = v["features"]
    masked, causal = f.get("MASK"), CAUSAL if f.get("MASK") else {}

    def at(b, *rest, group=None, **more):
        if f.get("DESCALE"):
            n = len(group) if group else b
            more["descale"] = tuple(torch.rand(n, h, device="cuda") + 0.5 for h in (rest[0], rest[1], rest[1]))
        return make(torch, b, *rest, d, dv, dtype, group=group, **more)
    if f.get("INTERVALS"):
        yield from with_intervals(torch, at, 5.0 if f.get("SOFTCAP") else 0, **causal)
        return
    if f.get("BITS"):
        yield from with_bits(torch, at, **causal)
        return
    if f.get("DROPOUT"):
        causal = causal | (dict(cap=20.0) if f.get("SOFTCAP") else {})
        yield "dropout", at(2, 4, 2, 333, 777, dropout=0.2, **causal)
        yield "group", at(1, 4, 4, 0, 0, group=[(5, 304), (0, 8), (333, 90), (400, 400), (4, 0), (129, 257)], dropout=0.5, **causal)
        return
    if f.get("LOGITS"):
        if f.get("SPLIT"):
            yield from split(torch, at, True, causal | dict(cap=20.0))
        yield from modified(torch, f, at, causal)
        return
    if f.get("SPLIT"):
        yield from split(torch, at, masked, causal)
    yield "sink", at(2, 4, 2, 300, 200, sink=torch.randn(4, device="cuda"), **causal)
    yield "small", at(1, 1, 1, 64, 128, **causal)
    yield "odd", at(2, 2, 1, 301, 517, **causal)
    yield "long", at(2, 4, 2, 1000, 2333, **causal)
    yield "many", at(4, 24, 8, 700, 700, **causal)
    if is_wide(v):
        yield from edges(torch, v, causal)
    else:  # code of wide heads is another one where scales are not positive
        yield "negative scale", at(1, 2, 2, 200, 300, scale=-1.0, **causal)
    if dtype == "e4m3":
        for kind in (torch.float32, torch.float16):
            other = at(1, 3, 3, 200, 300, **causal)
            other.o = other.o.to(kind)
            yield f"O in {kind}", other
        # One key weighs as much as all others together, each of which is next to nothing beside it.
        for what, at_key in (("heavy first key", 0), ("heavy last key", -1)):
            uneven = at(1, 2, 2, 200, 20000, **causal)
            uneven.k.zero_(), uneven.k[:, at_key].fill_(1), uneven.q.fill_(1), uneven.v.fill_(1)
            uneven.scale, uneven.descale = math.log(19999) * d ** -0.5, tuple(map(torch.ones_like, uneven.descale))
            yield what, uneven
        # Sums that grow with every key.
        rising = at(1, 2, 2, 200, 20000, **causal)
        rising.v.fill_(1.375)
        yield "values of one sign", rising
    yield from with_nan(torch, at, **causal)
    group = [(5, 300), (0, 8), (333, 90), (400, 400), (4, 0), (129, 257), (1, 1000)]
    yield "group", at(1, 6, 2, 0, 0, group=group, **causal)
    # More sequences than a warp has lanes.
    yield "seventy sequences", at(1, 3, 3, 0, 0, group=[(n * 37 % 301, n * 53 % 402) for n in range(70)], **causal)
    poisoned = at(1, 4, 4, 0, 0, group=group, **causal)
    poison(torch, poisoned.v[0, 300:308])
    poison(torch, poisoned.k[0, 300:308])
    yield "NaN between sequences", poisoned
    if masked:
        yield "more rows than keys", at(1, 2, 2, 700, 300, **CAUSAL)
        yield "top left", at(1, 2, 2, 500, 300, mask=abi.MASK_TOP_LEFT, right=0)
        unseen = at(1, 2, 2, 300, 900, mask=abi.MASK_TOP_LEFT, right=0)
        poison(torch, unseen.v[0, 300:])
        yield "NaN that nobody sees", unseen
        yield "window", at(2, 4, 2, 1500, 1500, mask=abi.MASK_BOTTOM_RIGHT, left=200, right=0)
        yield "window both ways", at(1, 4, 2, 900, 1500, mask=abi.MASK_TOP_LEFT, left=100, right=333)
        yield "sinks", at(1, 4, 2, 1500, 1500, mask=abi.MASK_BOTTOM_RIGHT, left=200, right=0, sinks=5)


# Of O, relative. Scores of 8-bit products have 13 bits.
MOST = {"bf16": 6e-3, "f16": 1e-3, "e4m3": 6e-3}
APPROXIMATE = 2 ** -15  # of a score that tanh.approx caps: 1.1e-5 on an H200, where NVIDIA promises 2^-11


FEW = ("odd", "2 parts of 2 x 24/8 x 700", "group", "seventy sequences", "window", "ALiBi", "bias", "of all rows", "cap 20.0", "dropout", "padded with NaN", "NaN in a key",
       "heavy first key", "heavy last key", "values of one sign", "causal documents", "unions of 7 endpoints", "image", "group of unions",
       "bits of 300 rows")


def check(device, match, few=False):
    torch, failed, done = device.torch, 0, 0
    for name, v in device.variants.items():
        if match not in name:
            continue
        print("checking", name, file=sys.stderr, flush=True)
        forms = itertools.cycle(itertools.product((16, 64, 256, 48, 8, 128, 32), (False, True)))
        for what, p in checks(torch, v):
            if few and what not in FEW:
                continue
            for persistent in (False,) if is_wide(v) else (False, True):
                if v["features"].get("PAGED"):
                    p.pages = Pages(torch, p, *next(forms))
                p.o.fill_(math.nan)
                p.lse.fill_(math.nan)
                launch = device.launch_of(name, p, persistent)
                launch()
                torch.cuda.synchronize()
                error, lse_error = p.wrong()
                first = p.o.clone()
                for _ in range(1 if few else 100 if what in ("long", "group", "dropout") else 5):
                    launch()
                torch.cuda.synchronize()
                same = torch.equal(first.view(torch.uint8), p.o.view(torch.uint8))
                done += 1
                allowed = APPROXIMATE * p.largest if v["features"].get("CAP_APPROX") else 0
                # Products of 8 bits are added up with 13 bits or so.
                if not (error < MOST[v["dtype"]] + allowed and lse_error < (1e-2 if v["dtype"] == "e4m3" else 1e-3) + allowed and same):
                    failed += 1
                    in_pages = f" pages of {p.pages.size}, {'indirect' if p.pages.indirect else 'table'}" if p.pages else ""
                    print(f"FAIL {name} {what}{in_pages} persistent={int(persistent)}: O {error:.3g}, LSE {lse_error:.3g}, "
                          f"{'same' if same else 'other'} bits again", flush=True)
    print(f"checks: {done - failed} of {done} passed", flush=True)
    return failed


# ---- speed ----------------------------------------------------------------------------------

SHAPES = [  # batch, heads, heads of keys, length, head dims
    (4, 16, 16, 2048, 128, 128), (2, 16, 16, 8192, 128, 128), (1, 16, 16, 16384, 128, 128), (1, 32, 8, 8192, 128, 128),
    (4, 32, 32, 4096, 64, 64), (2, 8, 8, 4096, 256, 256), (16, 16, 16, 512, 128, 128),
    (4, 16, 16, 4096, 96, 96), (2, 16, 16, 4096, 192, 128),
]


def bench(device, match, rows):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    torch, lines = device.torch, []
    for shape in SHAPES:
        b, hq, hk, s, d, dv = shape
        for dtype, causal in itertools.product(("bf16", "e4m3"), (False, True)):
            names = [n for n, v in device.variants.items() if (v["dq"], v["dv"]) == (d, dv) and v["dtype"] == dtype and
                     v["features"].get("MASK", 0) == causal and not {"LOGITS", "DROPOUT", "PAGED", "SPLIT", "INTERVALS", "BITS"} & set(v["features"]) and
                     match in n]
            if not names:
                continue
            sets = [make(torch, b, hq, hk, s, s, d, dv, dtype, **(CAUSAL if causal else {})) for _ in range(3)]

            def library(p):
                q, k, v = (x.transpose(1, 2) for x in (p.q, p.k, p.v))

                def launch():
                    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=hq != hk)
                return launch
            sides = {"cuDNN": [library(p) for p in sets]}
            if dtype == "e4m3":
                del sides["cuDNN"]  # PyTorch has no attention of this type
            for name in names:
                for persistent in (True,) if s > 512 else (False, True):
                    sides[name + (" persistent" if persistent else "")] = [device.launch_of(name, p, persistent) for p in sets]
            flops = 2 * b * hq * s * s * (d + dv) * (0.5 if causal else 1)
            found = {n: flops / ms / 1e9 for n, ms in compare(torch, sides).items()}
            base = found.pop("cuDNN", math.nan)
            row = f"{dtype} {b} {hq}/{hk} {s} {d}/{dv} {'causal' if causal else 'full'}"
            for n, rate in found.items():
                rows.append(dict(shape=row, kernel=n, tflops=rate, cudnn=base))
            best = sorted(found.items(), key=lambda x: -x[1])
            lines.append(f"{row}: cuDNN {base:.0f}; " + "; ".join(
                f"{r:.0f} ({r / base:.2f}) {n.removeprefix(f'{dtype}_{d}x{dv}_').replace('persistent', 'P')}" for n, r in best))
            print(lines[-1], flush=True)
            del sets, sides
            time.sleep(0.5)
    return lines


def features(device):
    """Rates of what is more than a plain mask, beside the plain one at as many operations."""
    torch, b, h, n, d = device.torch, 2, 16, 4096, 128
    plain, masked = "bf16_128x128_t128x128", "bf16_128x128_t128x128_mask1"
    full, half = 4 * b * h * n * n * d, 2 * b * h * n * n * d
    group = [(n, n)] * b
    mixed = [(4096, 4096), (1024, 1024), (2048, 2048), (512, 512), (256, 256), (256, 256)]
    window = dict(mask=abi.MASK_BOTTOM_RIGHT, left=1023, right=0)
    alibi, capped, biased = (masked.replace("mask1", f"logits1_{x}_mask1") for x in ("bias2", "softcap1", "bias1"))
    bias = torch.randn(b, h, n, n, device="cuda", dtype=torch.bfloat16)
    cases = {
        "full": (plain, full, h, {}), "causal": (masked, half, h, CAUSAL), "GQA 16/2 causal": (masked, half, 2, CAUSAL),
        "window 1024": (masked, 4 * b * h * d * (n * 1024 - 1024 * 1023 // 2), h, window),
        "sink, causal": (masked, half, h, CAUSAL | dict(sink=torch.randn(h, device="cuda"))),
        "packed, causal": (masked, half, h, CAUSAL | dict(group=group)),
        "packed, mixed, causal": (masked, sum(2 * h * x * x * d for x, _ in mixed), h, CAUSAL | dict(group=mixed)),
        "ALiBi, causal": (alibi, half, h, CAUSAL | dict(slopes=torch.rand(h, device="cuda"))),
        "bias": (biased.removesuffix("_mask1"), full, h, dict(bias=bias)),
        "bias, causal": (biased, half, h, CAUSAL | dict(bias=bias)),
        "bias of all heads": (biased.removesuffix("_mask1"), full, h, dict(bias=bias[:, :1].expand(b, h, n, n))),
        "soft cap, causal": (capped, half, h, CAUSAL | dict(cap=20.0)),
    }
    cases = {what: case for what, case in cases.items() if case[0] in device.variants}
    sides = {what: [device.launch_of(name, make(torch, b, h, hk, n, n, d, d, **more), True) for _ in range(2)]
             for what, (name, _, hk, more) in cases.items()}
    return [f"{what}: {cases[what][1] / ms / 1e9:.0f}" for what, ms in compare(torch, sides).items()]


def in_pages(device):
    """TFLOP/s of chunks of a prompt over what is there already, in pages and not, and FlashAttention-3's where $FMHA_PEERS has it."""
    torch, lines = device.torch, []
    flash = find_flash_attention_3(torch)
    for b, hq, hk, n, keys, d in ((1, 32, 8, 2048, 16384, 128), (4, 32, 8, 512, 16384, 128), (4, 32, 8, 512, 8192, 64), (1, 16, 8, 2048, 8192, 256),
                                  (16, 32, 8, 128, 4096, 128)):
        name = next(x for x, v in device.variants.items() if v["dq"] == v["dv"] == d and v["dtype"] == "bf16" and v["features"] == dict(MASK=1))
        problems = [make(torch, b, hq, hk, n, keys, d, d, **CAUSAL) for _ in range(2)]
        sides = {"in rows": [device.launch_of(name, p, True) for p in problems]}
        for size in (16, 64, 128, 256):
            for p in problems:
                p.pages = Pages(torch, p, size)
            sides[f"pages of {size}"] = [device.launch_of(name + "_paged1", p, True) for p in problems]
            if flash:
                sides[f"FA3, pages of {size}"] = [flash(p) for p in problems]
        flops = 4 * b * hq * d * (n * keys - n * (n - 1) / 2)
        times = compare(torch, sides, 10)
        lines.append(f"{b} x {hq}/{hk} d{d}, {n} rows of {keys} keys, causal: " + "; ".join(f"{w} {flops / ms / 1e9:.0f}" for w, ms in times.items()))
        print(lines[-1], flush=True)
    return lines


def find_flash_attention_3(torch):
    """A function that makes launches of a problem in pages, or None."""
    flash_attn_varlen_func = libraries.find_flash_attention_3()
    if not flash_attn_varlen_func:
        return None

    def launches(p):
        b, n, hq, d = p.q.shape
        q, o, (k, v) = p.q.reshape(-1, hq, d), torch.empty(b * n, hq, d, device="cuda", dtype=p.q.dtype), p.pages.pools
        table, lengths = p.pages.table.clamp(0, p.pages.n_pages - 1), p.pages.lengths
        starts, longest = torch.arange(b + 1, device="cuda", dtype=torch.int32) * n, p.k.shape[1]

        def launch():
            flash_attn_varlen_func(q, k, v, max_seqlen_q=n, cu_seqlens_q=starts, max_seqlen_k=longest, seqused_k=lengths, causal=True,
                                   block_table=table, out=o, fa_version=3)
        launch()
        torch.cuda.synchronize()
        return launch
    return launches


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("build", "run", "sanitize"))
    parser.add_argument("folder")
    parser.add_argument("--match", default="")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--few", action="store_true", help="only some problems, each launched twice")
    parser.add_argument("--no-bench", action="store_true")
    parser.add_argument("--json")
    a = parser.parse_args()
    if a.what == "build":
        sys.exit(cuda_device.build_cubins(a.folder, kernels(abi.load_library(), a.match)) != 0)
    if a.what == "sanitize":
        sys.exit(cuda_device.sanitize_cubins(__file__, a.folder, a.match) != 0)
    device, failed, lines, rows = Device(a.folder), 0, [], []
    if not a.no_check:
        failed = check(device, a.match, a.few)
    if failed:
        sys.exit(1)
    if not a.no_bench and a.match != "paged":
        lines = bench(device, a.match, rows)
        if not a.match:
            lines += features(device)
    if not a.no_bench and a.match in ("", "paged"):
        lines += in_pages(device)
    if a.json:
        with open(a.json, "w", encoding="ascii") as f:
            json.dump(rows, f, indent=1)
    print("\n".join(lines))
    print(f"{failed} checks failed")
    sys.exit(failed != 0)


if __name__ == "__main__":
    main()
