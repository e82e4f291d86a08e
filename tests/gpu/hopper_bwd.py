# SPDX-License-Identifier: MIT
"""Hopper's backward loop (bwd_wgmma.h) with its two small stages, by itself: checked against float64, timed against cuDNN.

    python3 tests/gpu/hopper_bwd.py build DIR [--match TEXT]       # needs NVRTC, no GPU
    python3 tests/gpu/hopper_bwd.py run DIR [--no-check] [--no-bench] [--few] [--match TEXT] [--shapes N,N,..]
                                          [--parts [--peers NAMES]]
    python3 tests/gpu/hopper_bwd.py sanitize DIR [--match TEXT]    # compute-sanitizer, a few problems a kernel

As hopper.py, whose problems, timing and options these are. A time is of all three stages, and of the zeros that dq_acc
starts from. --parts: problems whose heads are in parts, and shapes where that is worth it, in one part and in as many as a plan takes.
"""
import argparse
import ctypes
import dataclasses
import json
import math
import sys

import abi
import cuda_device
import hopper
import libraries
from gpu_timer import compare
from hopper import CAUSAL, documents, unions, variant

COUNTERS = 64  # 2 LDS_DQ_COUNTER
KEEP = 0.8  # dropout
FEW = ("odd", "group", "modified", "odd, parts", "group, parts", "modified, parts", "bits of 300 rows")


VARIANTS = dict([
    variant(d, dv, m, n, dtype, **mask)
    for d, dv, m, n in ((64, 64, 64, 128), (64, 64, 128, 128), (96, 96, 64, 128), (128, 128, 64, 128), (192, 128, 64, 96),
                        (256, 256, 64, 64))
    for dtype, mask in (("bf16", {}), ("bf16", dict(MASK=1)), ("f16", dict(MASK=1)))
] + [
    variant(32, 32, 64, 128, MASK=1), variant(96, 96, 64, 128, MASK=1, LOGITS=1, BIAS=2), variant(96, 96, 64, 128, MASK=1, DROPOUT=1),
    variant(160, 128, 64, 96), variant(192, 128, 64, 64, MASK=1, LOGITS=1, BIAS=2),
    variant(160, 160, 64, 64, MASK=1), variant(192, 192, 64, 64, MASK=1),
    variant(128, 128, 64, 128, MASK=1, LOGITS=1, BIAS=1), variant(256, 256, 64, 64, MASK=1, LOGITS=1, BIAS=1),
    variant(128, 128, 64, 128, MASK=1, LOGITS=1, BIAS=2), variant(256, 256, 64, 64, MASK=1, LOGITS=1, BIAS=2),
    variant(128, 128, 64, 128, MASK=1, LOGITS=1, SOFTCAP=1), variant(128, 128, 64, 128, MASK=1, DROPOUT=1),
    variant(64, 64, 64, 128, MASK=1, LOGITS=1, SOFTCAP=1, DROPOUT=1, BIAS=1),
] + [variant(d, d, 64, 128, INTERVALS=1, **mask) for d in (64, 128) for mask in ({}, dict(MASK=1))] + [variant(128, 128, 64, 128, BITS=1)])
SMALL = {"dot": abi.BWD_DOT_DO_O, "convert": abi.BWD_CONVERT_DQ}


def dq_width(v):
    """Columns of dQ's tile."""
    by_rows = 64 < v["dq"] <= 96 and v["m"] == 64 and not v["features"].keys() & {"SOFTCAP", "DROPOUT"}
    return 96 if by_rows else -(-v["dq"] // 64) * 64


def tile_of(v):
    """With its waves of products."""
    return hopper.tile_of(v, 12 if v["n"] == 96 else 8)


def kernel_of(lib, v):
    args = hopper.ask(abi.BwdArgs(), v)
    return abi.make_kernel(lib, hopper.ARCH, abi.BWD_DQ_DK_DV, args.dtype, args, tile_of(v))


def small_kernels(lib):
    """Of the two stages beside it, for any head dim."""
    for dtype in ("bf16", "f16"):
        for name, family in SMALL.items():
            args = abi.BwdArgs(dtype=abi.DTYPE_NAMES.index(dtype))
            yield f"{dtype}_{name}", abi.choose_kernel(lib, hopper.ARCH, family, args.dtype, args)
            args.mask_data.intervals.data = 64
            if name == "dot":
                yield f"{dtype}_order", abi.choose_kernel(lib, hopper.ARCH, family, args.dtype, args)


def kernels(lib, match):
    """All that `run` loads."""
    return {name: kernel_of(lib, v) for name, v in VARIANTS.items() if match in name} | dict(small_kernels(lib))


# ---- launching ------------------------------------------------------------------------------


class Device(hopper.Device):
    def __init__(self, folder):
        super().__init__(folder, VARIANTS)
        self.small = dict(small_kernels(self.lib))

    def parts_of(self, v, args):
        """How many parts a plan takes, and about how many microseconds one part and those are expected to take."""
        us = (ctypes.c_double * 2)()
        n = self.lib.gpu_kernel_parts(ctypes.byref(tile_of(v)), ctypes.c_uint32(cuda_device.UNITS), ctypes.byref(args), us)
        return n, *us

    def launch_of(self, name, p):
        """A function that launches the three stages."""
        v = self.variants[name]
        args = p.args(v["m"], dq_width(v))
        p.cut(args, p.parts or self.parts_of(v, args)[0])
        p.put_in_order(args)
        stages = [(f"{v['dtype']}_{'order' if p.ordered else 'dot'}", self.small), (name, {name: kernel_of(self.lib, v)}), (f"{v['dtype']}_convert", self.small)]
        stages = [self.launcher(self.function(n, found[n]), found[n], args) for n, found in stages]
        acc = p.acc  # of these arguments: the next launch of the problem has one of its own

        def launch(keep=p, only=None):
            acc.zero_()
            for i, stage in enumerate(stages):
                if only is None or only == i:
                    stage()
        return launch


@dataclasses.dataclass
class Problem(hopper.Problem):
    d_o: object = None
    deterministic: bool = False
    parts: int = 1  # of the heads that share keys; 0: as many as a plan takes
    random: object = None  # dropout's bytes: (batch, head, row, column)
    ordered: bool = False  # dot_do_o writes the order of keys under intervals: self.order
    order: object = None

    def outputs(self):
        import torch
        self.dq, self.dk, self.dv = (torch.full_like(x, math.nan) for x in (self.q, self.k, self.v))

    def plain_args(self):
        """Without sums of dQ."""
        import torch
        f, a = super().args(), abi.BwdArgs()
        for name in ("q", "k", "v", "o", "lse", "bias", "alibi_slopes", "alibi_stride_batch", "sink", "sequences", "band", "mask_data", "dropout",
                     "nhead_q", "nhead_k", "hdim_q", "hdim_v", "scale", "logits_soft_cap", "dtype", "bias_dtype"):
            setattr(a, name, getattr(f, name))
        for name in ("d_o", "dq", "dk", "dv"):
            setattr(a, name, hopper.tensor_of(getattr(self, name)))
        d = torch.full((self.q.shape[0], self.q.shape[2], self.q.shape[1]), math.nan, device="cuda")
        self.keep += (d,)
        a.d = abi.STRUCTS["abi_rows"](d.data_ptr(), d.stride(0), d.stride(1), 1)
        if self.random is not None:
            b, h, i, j = self.random.stride()
            a.dropout.randval = abi.STRUCTS["abi_tensor"](self.random.data_ptr(), b, i, h, j)
            a.dropout.p_drop, a.dropout.p_keep_inverse, a.dropout.keep_at_most = 1 - KEEP, 1 / KEEP, int(255 * KEEP)
        return a

    def args(self, rows, width):
        """Of tiles of dq_acc of so many rows and columns."""
        import torch
        a, (b, sq, hq, _) = self.plain_args(), self.q.shape
        tile = rows * width + COUNTERS
        lengths = [x for x, _ in self.group] if self.group else [sq] * b
        offsets = [0]
        for n in lengths:
            offsets.append(offsets[-1] + -(-n // rows) * hq * tile)
        offsets_t = torch.tensor(offsets, dtype=torch.int64, device="cuda")
        nsplits = torch.ones(max(len(lengths), 1), dtype=torch.int32, device="cuda")
        self.acc = torch.zeros(max(offsets[-1], 1), device="cuda")
        self.keep += (offsets_t, nsplits)
        a.nsplits, a.dq_acc = nsplits.data_ptr(), self.acc.data_ptr()
        if self.group:
            a.dq_acc_offsets = offsets_t.data_ptr()
        a.dq_tile_rows, a.dq_tile_floats, a.deterministic = rows, tile, int(self.deterministic)
        return a

    def cut(self, a, parts):
        """Heads that share keys into parts."""
        import torch
        if parts > 1:
            acc = torch.full((parts * a.nhead_k * a.sequences.total_k * (a.hdim_q + a.hdim_v),), math.nan, device="cuda")
            self.keep += (acc,)
            a.kv_parts, a.kv_acc = parts, acc.data_ptr()

    def put_in_order(self, a):
        """Makes room for the order of keys, in front of D."""
        import torch
        if not self.ordered:
            return
        lists, n, d = a.sequences.batch * (a.nhead_k if self.intervals.shape[1] > 1 else 1), -(-a.sequences.seqlen_k_max // 128), a.d
        a.order_words = -(-lists * n * 3 // 4) * 4
        both = torch.full((a.order_words + self.q.shape[0] * self.q.shape[1] * self.q.shape[2],), -1, device="cuda", dtype=torch.int32)
        a.d = abi.STRUCTS["abi_rows"](both.data_ptr() + 4 * a.order_words, d.stride_batch, d.stride_head, d.stride_seq)
        self.order = both[:lists * n * 3].view(lists, n, 3)
        self.keep += (both,)

    def gradients(self):
        """(q, k, v, dO, what was found: dq, dk, dv) of each sequence."""
        grads = (self.q, self.k, self.v, self.d_o, self.dq, self.dk, self.dv, self.o)
        of_k = (False, True, True, False, False, True, True, False)
        if not self.group:
            for b in range(self.q.shape[0]):
                n = self.lens_k[b] if self.lens_k else self.k.shape[1]
                yield [x[b, :n] if k else x[b] for x, k in zip(grads, of_k)] + [self.lse[b]]
            return
        i = j = 0
        for n_q, n_k in self.group:
            yield [x[0, j:j + n_k] if k else x[0, i:i + n_q] for x, k in zip(grads, of_k)] + [self.lse[0, :, i:i + n_q]]
            i, j = i + n_q, j + n_k

    def solve(self, fill):
        """In float64: fills O and LSE, or returns the largest relative errors of dq, dk, dv of a sequence."""
        import torch
        worst, first = [0.0, 0.0, 0.0], 0
        for b, (q, k, v, d_o, *found, o, lse) in enumerate(self.gradients()):
            n_q, n_k, group = q.shape[0], k.shape[0], self.q.shape[2] // self.k.shape[2]
            seen = self.seen_of(torch, b, n_q, n_k, first)
            first += n_q if self.group else 0
            used = seen.any(0).any(0)[:, None, None]
            k, v = (x.double().masked_fill(~used, 0).repeat_interleave(group, 1) for x in (k, v))
            q, d_o = q.double(), d_o.double()
            s = torch.einsum("ihd,jhd->hij", q, k) * q.shape[2] ** -0.5
            slope = 1.0
            if self.cap:
                t = torch.tanh(s / self.cap)
                s, slope = self.cap * t, 1 - t * t
            i, j = torch.arange(n_q, device="cuda")[:, None], torch.arange(n_k, device="cuda")[None]
            if self.slopes is not None:
                s = s - self.slopes.double()[:, None, None] * (i + n_k - n_q - j).abs()
            if self.bias is not None:
                s = s + self.bias[b].double()
            s = s.masked_fill(~seen, -math.inf)
            total = torch.logsumexp(s, -1)
            if self.sink is not None:
                total = torch.logaddexp(total, self.sink.double()[:, None].expand_as(total))
            p = torch.exp(s - total[..., None].nan_to_num(neginf=0)).masked_fill(~seen, 0)
            kept = 1.0 if self.random is None else (self.random[b] <= int(255 * KEEP)) / KEEP
            out = torch.einsum("hij,jhd->ihd", p * kept, v)
            if fill:
                o.copy_(out)
                lse.copy_(total)
                continue
            dp = torch.einsum("ihd,jhd->hij", d_o, v) * kept
            ds = (p * (dp - (d_o * out).sum(-1).transpose(0, 1)[..., None])).masked_fill(~seen, 0) * slope * q.shape[2] ** -0.5
            want = [torch.einsum("hij,jhd->ihd", ds, k), torch.einsum("hij,ihd->jhd", ds, q), torch.einsum("hij,ihd->jhd", p * kept, d_o)]
            for n, (w, f) in enumerate(zip(want, found)):
                if n:
                    w = w.unflatten(1, (-1, group)).sum(2)
                size = max(w.square().sum().item(), 1e-30 * w.numel())
                error = math.sqrt((f.double() - w).square().sum().item() / size) if w.numel() else 0.0
                worst[n] = max(worst[n], error) if error == error else math.inf
        return worst


def make(torch, *shape, solved=True, **more):
    deterministic, random, parts = more.pop("deterministic", False), more.pop("random", None), more.pop("parts", 1)
    p = hopper.make(torch, *shape, **more)
    fields = {f.name: getattr(p, f.name) for f in dataclasses.fields(hopper.Problem)}
    p = Problem(**fields, d_o=torch.randn_like(p.o), deterministic=deterministic, random=random, parts=parts)
    p.outputs()
    if solved:
        p.solve(True)
    return p


# ---- correctness ----------------------------------------------------------------------------


def checks(torch, v):
    """Problems for a variant: (name, problem)."""
    d, dv, dtype = v["dq"], v["dv"], v["dtype"]
    f = v["features"]
    masked, kind = f.get("MASK"), {"bf16": torch.bfloat16, "f16": torch.float16}[dtype]
    more = CAUSAL if masked else {}

    def at(b, hq, hk, sq, sk, solved=True, **other):
        return make(torch, b, hq, hk, sq, sk, d, dv, dtype, solved=solved, **(more | other))
    if f.get("LOGITS") or f.get("DROPOUT"):
        if f.get("BIAS") == 2:
            more = more | dict(slopes=torch.rand(4, device="cuda"))
        if f.get("BIAS") == 1:
            more = more | dict(bias=torch.randn(2, 4, 333, 777, device="cuda", dtype=kind))
        if f.get("SOFTCAP"):
            more = more | dict(cap=3.0)
        if f.get("DROPOUT"):
            more = more | dict(random=torch.randint(0, 256, (2, 4, 333, 777), device="cuda", dtype=torch.uint8))
        yield "modified", at(2, 4, 2, 333, 777)
        yield "modified, parts", at(2, 4, 1, 333, 777, parts=4)
        yield "modified, parts", at(2, 4, 2, 333, 777, parts=2, deterministic=True)
        return
    yield "small", at(1, 1, 1, 64, 128)
    yield "one", at(1, 2, 1, 1, 130)
    yield "odd", at(2, 2, 1, 301, 517)
    yield "long", at(2, 4, 2, 1000, 2333)
    yield "many", at(4, 24, 8, 700, 700)
    # Almost three rounds of blocks on 132 units, which go in an order of their own under a mask.
    yield "three rounds", at(6, 8, 8, 7 * v["n"] + 4, 7 * v["n"] + 4)
    yield "rows", at(1, 2, 2, 2333, 200)
    yield "deterministic", at(2, 4, 2, 1000, 2333, deterministic=True)
    yield "sink", at(2, 4, 2, 300, 200, sink=torch.randn(4, device="cuda"))
    short = at(2, 2, 2, 130, 900, lens_k=[333, 0])
    short.k[0, 333:], short.v[0, 333:], short.k[1], short.v[1] = (math.nan,) * 4
    yield "padded with NaN", short
    group = [(5, 300), (0, 8), (333, 90), (400, 400), (4, 0), (129, 257), (1, 1000)]
    yield "group", at(1, 6, 2, 0, 0, group=group)
    poisoned = at(1, 4, 4, 0, 0, group=[(5, 300), (77, 8), (333, 90), (400, 400), (4, 40), (1, 1000)])
    for x in (poisoned.v, poisoned.k):
        x[0, 300:308] = math.nan
    for x in (poisoned.q, poisoned.d_o):
        x[0, 5:82] = math.nan
    poisoned.ignored = 1
    yield "NaN between sequences", poisoned
    yield from in_parts(torch, v, at, group)
    if not masked:
        return
    more = {}
    yield "more rows than keys", at(1, 2, 2, 700, 300, **CAUSAL)
    yield "top left", at(1, 2, 2, 500, 300, mask=abi.MASK_TOP_LEFT, right=0)
    unseen = at(1, 2, 2, 300, 900, mask=abi.MASK_TOP_LEFT, right=0)
    unseen.v[0, 300:] = unseen.k[0, 300:] = math.nan
    yield "NaN that nobody sees", unseen
    for deterministic in (False, True):
        yield "window", at(2, 4, 2, 1500, 1500, mask=abi.MASK_BOTTOM_RIGHT, left=200, right=0, deterministic=deterministic)
        yield "window both ways", at(1, 4, 2, 900, 1500, mask=abi.MASK_TOP_LEFT, left=100, right=333, deterministic=deterministic)
        yield "sinks", at(1, 4, 2, 1500, 1500, mask=abi.MASK_BOTTOM_RIGHT, left=200, right=0, sinks=5, deterministic=deterministic)
        yield "group", at(1, 6, 2, 0, 0, group=group, deterministic=deterministic, **CAUSAL)


def in_parts(torch, v, at, group):
    """The same with heads in parts; masked ones are causal where they say nothing."""
    masked = v["features"].get("MASK")
    for deterministic in (False, True):
        yield "odd, parts", at(2, 4, 2, 301, 517, parts=2, deterministic=deterministic)
        yield "group, parts", at(1, 12, 2, 0, 0, group=group, parts=3, deterministic=deterministic)
    yield "long, parts", at(2, 8, 2, 1000, 2333, parts=4)
    yield "one, parts", at(1, 8, 1, 1, 130, parts=8)
    yield "rows, parts", at(1, 16, 2, 2333, 200, parts=8)
    # As above, almost three rounds.
    yield "three rounds, parts", at(3, 16, 4, 7 * v["n"] + 4, 7 * v["n"] + 4, parts=4)
    yield "sink, parts", at(2, 4, 1, 300, 200, sink=torch.randn(4, device="cuda"), parts=2)
    short = at(2, 4, 2, 130, 900, lens_k=[333, 0], parts=2)
    short.k[0, 333:], short.v[0, 333:], short.k[1], short.v[1] = (math.nan,) * 4
    yield "padded with NaN, parts", short
    if not masked:
        return
    for deterministic in (False, True):
        more = dict(deterministic=deterministic, parts=2)
        yield "window, parts", at(2, 4, 2, 1500, 1500, mask=abi.MASK_BOTTOM_RIGHT, left=200, right=0, **more)
        yield "window both ways, parts", at(1, 4, 1, 900, 1500, mask=abi.MASK_TOP_LEFT, left=100, right=333, **more)
        yield "sinks, parts", at(1, 4, 2, 1500, 1500, mask=abi.MASK_BOTTOM_RIGHT, left=200, right=0, sinks=5, **more)
    yield "more rows than keys, parts", at(1, 8, 2, 700, 300, parts=4)
    yield "top left, parts", at(1, 8, 1, 500, 300, mask=abi.MASK_TOP_LEFT, right=0, parts=8)


def check(device, match, few=False, parts=False):
    torch, failed, done = device.torch, 0, 0
    for name, v in device.variants.items():
        if match not in name:
            continue
        print("checking", name, file=sys.stderr, flush=True)
        bound = 8e-3 if v["dtype"] == "bf16" else 1.5e-3
        if v["features"].get("INTERVALS"):
            wrong, n = (0, 0) if parts else check_intervals(device, name, v, few)
            failed, done = failed + wrong, done + n
            continue
        for what, p in with_bits(torch, v) if v["features"].get("BITS") else checks(torch, v):
            if few and what not in FEW or parts and not what.endswith(", parts"):
                continue
            launch = device.launch_of(name, p)
            launch()
            torch.cuda.synchronize()
            if hasattr(p, "ignored"):  # a sequence of NaN: its own gradients are
                errors = poisoned_errors(p)
            else:
                errors = p.solve(False)
            first = [x.clone() for x in (p.dq, p.dk, p.dv)]
            for _ in range(1 if few else 50 if what.removesuffix(", parts") in ("long", "group", "deterministic") else 3):
                launch()
            torch.cuda.synchronize()
            same = [torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(first, (p.dq, p.dk, p.dv))]
            done += 1
            if not (max(errors) < bound and all(same[0 if p.deterministic else 1:])):
                failed += 1
                print(f"FAIL {name} {what}, {p.parts} parts, det={int(p.deterministic)}: dq, dk, dv {' '.join(f'{e:.3g}' for e in errors)}, same bits {same}", flush=True)
    print(f"checks: {done - failed} of {done} passed", flush=True)
    return failed


def expected_order(torch, p, seen):
    """What mask_order.h writes for rows that all see one interval: the blocks, and rows that may see each."""
    blocks = torch.nn.functional.pad(seen, (0, -seen.shape[1] % 128, 0, -seen.shape[0] % 32)).unflatten(1, (-1, 128)).any(2)
    waves = blocks.unflatten(0, (-1, 32)).any(1)
    work = [int(x) for x in waves.sum(0)]
    kinds = [x if x < 2 else 2 * (x.bit_length() - 1) + (x >> (x.bit_length() - 2) & 1) for x in work]
    rows = [[int(x) for x in waves[:, i].nonzero().ravel()] for i in range(len(work))]
    return [[i, 32 * rows[i][0], 32 * rows[i][-1] + 32] if work[i] else [i, p.q.shape[1], 0]
            for i in sorted(range(len(work)), key=lambda i: (-kinds[i], i))]


def with_bits(torch, v):
    """Problems of hopper.py's with gradients."""
    def at(b, *rest, **more):
        return make(torch, b, *rest, v["dq"], v["dv"], v["dtype"], **more)
    yield from hopper.with_bits(torch, at)


def check_intervals(device, name, v, few):
    """With the loop's own order and the mask's, which is looked at, too; then with words that are none."""
    torch, failed, done = device.torch, 0, 0
    masked = CAUSAL if v["features"].get("MASK") else {}
    torch.manual_seed(5)
    for case in range(3 if few else 14):
        b, group, hk, n = (int(torch.randint(1, x, ())) for x in (3, 5, 4, 33 if case % 5 == 2 else 5))
        sq, sk = (int(torch.randint(1, 1500, ())) for _ in range(2))
        if case % 4 == 1:
            sq = sk
            intervals, n = documents(sq, 200, causal=case % 8 == 1), 1
        else:
            intervals = unions(torch, 1 if case % 3 else b, 1 if case % 2 else group * hk, 2 * n - 1, sq, sk)
        packed = {}
        if case % 4 == 3:
            lengths = [(sq // 2, sk // 3), (0, 5), (sq - sq // 2, sk - sk // 3)]
            packed, b, intervals = dict(group=lengths), 1, intervals[:1]
        p = make(torch, b, group * hk, hk, sq, sk, v["dq"], v["dv"], v["dtype"], intervals=intervals, **packed, **masked)
        p.parts = group if case % 7 == 6 else 1
        for p.ordered in (False, True):
            launch = device.launch_of(name, p)
            launch()
            torch.cuda.synchronize()
            errors = p.solve(False)
            right = max(errors) < 8e-3
            if p.ordered and case % 4 == 1:
                right &= p.order[0].tolist() == expected_order(torch, p, p.seen_of(torch, 0, sq, sk)[0])
            done += 1
            if not right:
                failed += 1
                print(f"FAIL {name} case {case}, ordered={p.ordered}: dq, dk, dv {' '.join(f'{e:.3g}' for e in errors)}", flush=True)
        for junk in (-2 ** 31, 2 ** 31 - 1, 7):  # gradients that are nobody else's
            p.order.fill_(junk)
            launch(only=1)
        torch.cuda.synchronize()
    return failed, done


def poisoned_errors(p):
    """Errors with the ignored sequence's inputs and outputs cleaned."""
    import torch
    i = sum(x for x, _ in p.group[:p.ignored])
    j = sum(x for _, x in p.group[:p.ignored])
    n_q, n_k = p.group[p.ignored]
    saved = [x.clone() for x in (p.q, p.d_o, p.k, p.v, p.dq, p.dk, p.dv)]
    for x in (p.q, p.d_o, p.dq):
        x[0, i:i + n_q] = 0
    for x in (p.k, p.v, p.dk, p.dv):
        x[0, j:j + n_k] = 0
    errors = p.solve(False)
    for x, y in zip((p.q, p.d_o, p.k, p.v, p.dq, p.dk, p.dv), saved):
        x.copy_(y)
    del torch
    return errors


# ---- speed ----------------------------------------------------------------------------------


def ready(torch, p, causal):
    """O and LSE of a problem that is too large for float64, by PyTorch's own kernels."""
    q, k, v = (x.transpose(1, 2) for x in (p.q, p.k, p.v))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    if v.shape[3] != q.shape[3]:
        v = torch.nn.functional.pad(v, (0, q.shape[3] - v.shape[3]))
    out = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=p.q.shape[3] ** -0.5)
    p.o.copy_(out[0].transpose(1, 2)[..., :p.o.shape[3]])
    p.lse.copy_(out[1])


def library(torch, p, causal):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    q, k, v = (x.transpose(1, 2).detach().requires_grad_() for x in (p.q, p.k, p.v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
    d_o = p.d_o.transpose(1, 2)
    return lambda: torch.autograd.grad(out, (q, k, v), d_o, retain_graph=True)


def flash_attention_4(torch, p, causal):
    flash = libraries.find_flash_attention_4()
    if not flash:
        return None
    q, k, v = (x.detach().requires_grad_() for x in (p.q, p.k, p.v))
    out = flash(q, k, v, causal=causal)
    return lambda: torch.autograd.grad(out, (q, k, v), p.d_o, retain_graph=True)


SHAPES = hopper.SHAPES + [
    (1, 64, 8, 6144, 128, 128), (1, 16, 16, 10000, 64, 64), (1, 24, 24, 4600, 96, 96), (1, 32, 8, 32768, 128, 128), (16, 16, 16, 768, 128, 128),
    (1, 32, 8, 5120, 128, 128), (1, 16, 8, 8192, 256, 256)
]


PARTS_SHAPES = [
    (1, 32, 8, 5120, 128, 128), (1, 16, 2, 4096, 128, 128), (1, 28, 4, 8192, 128, 128), (2, 14, 2, 2048, 64, 64), (1, 64, 8, 6144, 128, 128),
    (1, 16, 2, 4096, 256, 256), (1, 32, 8, 8192, 128, 128), (1, 8, 1, 16384, 128, 128), (1, 32, 8, 2048, 128, 128), (1, 8, 1, 1024, 128, 128),
    (4, 8, 2, 512, 64, 64)
]


def bench_parts(device, match, shapes, rows, reps, peers):
    """One part beside as many as a plan takes, and, where those are none, two."""
    torch, lines = device.torch, []
    for b, hq, hk, s, d, dv in shapes:
        for causal in (False, True):
            name = f"bf16_{d}x{dv}_t64x{128 if d <= 128 else 96 if dv <= 128 else 64}" + "_mask1" * causal
            if name not in device.variants or match not in name:
                continue
            sets = [make(torch, b, hq, hk, s, s, d, dv, solved=False, **(CAUSAL if causal else {})) for _ in range(2)]
            chosen, *us = device.parts_of(device.variants[name], sets[0].args(64, -(-d // 64) * 64))
            sides = {}
            for p in sets:
                ready(torch, p, causal)
            for side, find in {"cuDNN": library, "FA4": flash_attention_4}.items():
                if side not in peers.split(","):
                    continue
                try:
                    found = [find(torch, p, causal) for p in sets]
                    if found[0]:
                        found[0]()
                        sides[side] = found
                except RuntimeError as error:
                    print(f"no {side}:", str(error)[:100])
            group = hq // hk
            numbers = sorted({1, chosen, group} | {n for n in (2, 4) if group % n == 0})
            for deterministic in (False, True):
                for n in numbers:
                    for p in sets:
                        p.parts, p.deterministic = n, deterministic
                    sides[n, deterministic] = [device.launch_of(name, p) for p in sets]
            flops = 2.5 * 2 * b * hq * s * s * (d + dv) * (0.5 if causal else 1)
            ms = compare(torch, sides, reps)
            row = f"{b} {hq}/{hk} {s} {d} {'causal' if causal else 'full'}"
            rows.append(dict(shape=row, chosen=chosen, predicted_us=us, us={str(n): x * 1e3 for n, x in ms.items()}))
            stages = {}
            for n in sorted({1, chosen}):
                for p in sets:
                    p.parts, p.deterministic = n, False
                launch = device.launch_of(name, sets[0])
                times = compare(torch, {i: [lambda i=i: launch(only=i)] for i in (-1, 1, 2)}, 3)
                stages[n] = "%.0f+%.0f" % tuple(1e3 * (times[i] - times[-1]) for i in (1, 2))
            rates = " ".join(f"{n}:{flops / ms[n, False] / 1e9:.0f}" + "*" * (n == chosen) for n in numbers)
            det = " ".join(f"{n}:{flops / ms[n, True] / 1e9:.0f}" for n in numbers)
            lines.append(f"{row:26} " + " ".join(f"{x} {flops / ms[x] / 1e9:.0f}" for x in ("cuDNN", "FA4") if x in ms) +
                         f" | {rates} | det {det} | {ms[1, False] / ms[chosen, False]:.2f}, foretold {us[0] / us[1] if us[1] else 1:.2f}"
                         f" | us main+convert {stages}, foretold {us[0]:.0f} {us[1]:.0f}")
            print(lines[-1], flush=True)
            del sets, sides
    return lines


def bench(device, match, shapes, rows, reps):
    torch, lines = device.torch, []
    for shape in shapes:
        b, hq, hk, s, d, dv = shape
        for causal in (False, True):
            names = [n for n, v in device.variants.items() if (v["dq"], v["dv"]) == (d, dv) and v["dtype"] == "bf16" and
                     v["features"].get("MASK", 0) == causal and "logits" not in n and "dropout" not in n and match in n]
            if not names:
                continue
            sets = [make(torch, b, hq, hk, s, s, d, dv, solved=False, **(CAUSAL if causal else {})) for _ in range(3)]
            for p in sets:
                ready(torch, p, causal)
            sides = {}
            try:
                sides["cuDNN"] = [library(torch, p, causal) for p in sets]
                sides["cuDNN"][0]()
            except RuntimeError as error:
                print("no cuDNN:", shape, str(error)[:100])
                sides = {}
            flash = [flash_attention_4(torch, p, causal) for p in sets]
            if flash[0]:
                sides["FA4"] = flash
            for name in names:
                sides[name] = [device.launch_of(name, p) for p in sets]
                for p in sets:
                    p.deterministic = True
                sides[name + " det"] = [device.launch_of(name, p) for p in sets]
                for p in sets:
                    p.deterministic = False
            flops = 2.5 * 2 * b * hq * s * s * (d + dv) * (0.5 if causal else 1)
            found = {n: flops / ms / 1e9 for n, ms in compare(torch, sides, reps).items()}
            base = found.pop("cuDNN", math.nan)
            row = f"{b} {hq}/{hk} {s} {d}/{dv} {'causal' if causal else 'full'}"
            rows += [dict(shape=row, kernel=n, tflops=rate, cudnn=base) for n, rate in found.items()]
            lines.append(f"{row}: cuDNN {base:.0f}; " + "; ".join(
                f"{r:.0f} ({r / base:.2f}) {n.removeprefix(f'bf16_{d}x{dv}_')}" for n, r in sorted(found.items(), key=lambda x: -x[1])))
            print(lines[-1], flush=True)
            parts = device.launch_of(names[0], sets[0])
            times = compare(torch, {i: [lambda i=i: parts(only=i)] for i in (-1, 0, 1, 2)}, 5)
            print("   ms: zero %.3f" % times[-1], "dot, main, convert", *("%.3f" % (times[i] - times[-1]) for i in (0, 1, 2)), flush=True)
            del sets, sides, parts
    return lines


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("build", "run", "sanitize"))
    parser.add_argument("folder")
    parser.add_argument("--match", default="")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--few", action="store_true", help="only some problems, each launched twice")
    parser.add_argument("--no-bench", action="store_true")
    parser.add_argument("--parts", action="store_true", help="of heads in parts alone")
    parser.add_argument("--peers", default="cuDNN,FA4", help="with --parts: those beside which it is timed, where they are found")
    parser.add_argument("--shapes", help="numbers of SHAPES, with commas between")
    parser.add_argument("--reps", type=int, default=20)
    parser.add_argument("--json")
    a = parser.parse_args()
    if a.what == "build":
        sys.exit(cuda_device.build_cubins(a.folder, kernels(abi.load_library(), a.match)) != 0)
    if a.what == "sanitize":
        sys.exit(cuda_device.sanitize_cubins(__file__, a.folder, a.match) != 0)
    device, failed, lines, rows = Device(a.folder), 0, [], []
    if not a.no_check:
        failed = check(device, a.match, a.few, a.parts)
    if not a.no_bench:
        shapes = PARTS_SHAPES if a.parts else SHAPES
        shapes = [shapes[int(i)] for i in a.shapes.split(",")] if a.shapes else shapes
        lines = bench_parts(device, a.match, shapes, rows, a.reps, a.peers) if a.parts else bench(device, a.match, shapes, rows, a.reps)
    if a.json:
        with open(a.json, "w", encoding="ascii") as f:
            json.dump(rows, f, indent=1)
    print("\n".join(lines))
    print(f"{failed} checks failed")
    sys.exit(failed != 0)


if __name__ == "__main__":
    main()
