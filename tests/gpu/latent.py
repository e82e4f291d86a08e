# SPDX-License-Identifier: MIT
"""Latents' kernels (fwd_latent.h, and the general loop) by themselves: checked against float64, timed against others.

    python3 tests/gpu/latent.py build DIR [--match TEXT] [--no-general]       # needs NVRTC, no GPU
    python3 tests/gpu/latent.py run DIR [--match TEXT] [--no-general] [--no-check] [--no-bench]
    python3 tests/gpu/latent.py sanitize DIR [--match TEXT]    # compute-sanitizer

`run` needs a Hopper GPU and PyTorch. A time is the median of several replays of a graph of launches, each with its combine, on inputs
that are rotated so that no cache holds them; all sides of a case by turns: numbers of splits, shares that blocks find by themselves
(decode_share.h), the general loop and, where $FMHA_PEERS has them (libraries.py), FlashAttention-3 and FlashMLA. The tables come last.
"""
import argparse
import dataclasses
import functools
import math
import os
import random
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import abi  # noqa: E402
import cuda_device  # noqa: E402
import libraries  # noqa: E402
from cases import LATENT_FP8  # noqa: E402
from decode import combine_of, merge_args, round_up  # noqa: E402
from gpu_timer import compare_graphs, copy_rate  # noqa: E402
from hopper import tensor_of  # noqa: E402

ARCH = "sm_90a"
D, DV = 576, 512
CODED, BLOCK, FP8_BYTES = 512, 128, 656  # a latent of fp8: codes, of which so many have a factor; with those and the rest as bf16
LATENT, GENERAL = ("gpu_latent", (64, 64, 4, 2, 1)), ("gpu_mma_pack", (64, 32, 4, 1, 1))
GENERAL_FEW = ("gpu_mma_pack", (16, 64, 1, 4, 1))
MOST_ERROR = {abi.BF16: 6e-3, abi.F16: 1e-3}


@dataclasses.dataclass(frozen=True)
class Case:
    b: int
    heads: int
    n: int  # keys that there is room for
    rows: int = 1  # queries of a head
    page: int = 64
    lengths: tuple = ()
    causal: bool = False
    window: int = -1
    sinks: int = 0  # tokens that a window leaves
    splits: tuple = (1,)  # numbers of splits, or (blocks, parts) of shares
    positive: bool = False  # values of one sign
    sink: bool = False  # a logit a head that joins the sums
    scale: float = 0.1352
    packed: bool = False  # rows of sequences of different lengths, behind each other: absorbed prefill
    list: bool = False  # pages by kv_indptr
    dtype: int = abi.BF16
    topk: int = 0  # keys that each row has chosen
    slots: bool = False  # those by their places in the pages, without tables
    fp8: bool = False  # latents of 656 bytes
    wild: str = ""  # entries that name no key: "padding", "mixed", "rows" without any, or "all"

    def __str__(self):
        more = [k if v is True else f"{k} {v}" for k, v in dataclasses.asdict(self).items()
                if k not in ("b", "heads", "n", "splits", "lengths") and v != getattr(Case, k)]
        return f"{self.b}x{self.heads}x{self.n} {' '.join(more)}" + (f" of {min(self.lengths)} to {max(self.lengths)}" if self.lengths else "")

    def keys(self):
        return list(self.lengths) or [self.n] * self.b

    def queries(self):
        draw = random.Random(3)
        return [draw.randint(0, self.rows) for _ in range(self.b - 1)] + [self.rows] if self.packed else [self.rows] * self.b

    def flops(self):
        """Of what rows see."""
        if self.topk:
            return 2 * (D + DV) * self.heads * self.topk * sum(self.queries())
        seen = sum(q * k - (q * (q - 1) // 2 if self.causal else 0) for q, k in zip(self.queries(), self.keys()))
        return 2 * (D + DV) * self.heads * seen

    def bytes(self):
        return (self.topk * sum(self.queries()) if self.topk else sum(self.keys())) * (FP8_BYTES if self.fp8 else D * 2)


def make_args(case, splits):
    a = abi.FwdArgs()
    s, rows = a.sequences, sum(case.queries())
    s.batch, s.seqlen_q_max, s.seqlen_k_max, s.total_q, s.total_k = case.b, case.rows, case.n, rows, case.b * case.n
    a.nhead_q, a.nhead_k, a.hdim_q, a.hdim_v, a.v_in_k = case.heads, 1, D, DV, 1
    a.scale, a.dtype, a.o_dtype = case.scale, case.dtype, case.dtype
    if case.fp8:
        a.kv_dtype, a.cache.layout = abi.E4M3, LATENT_FP8
    a.band.window_left = a.band.window_right = -1
    if case.causal:
        a.band.mask, a.band.window_right, a.band.window_left = abi.MASK_BOTTOM_RIGHT, 0, case.window
        a.band.sink_tokens = case.sinks
    a.cache.page_size, a.chosen.n, a.chosen.are_slots = case.page, case.topk, case.slots
    if isinstance(splits, tuple):
        a.n_splits, a.split_size = splits[1], 0
    elif splits > 1:
        n = case.topk or case.n
        a.split_size = round_up(-(-n // splits), 64)
        a.n_splits = -(-n // a.split_size)
    return a


def kernel_of(lib, case, args, side):
    family = abi.FWD_SPLITKV if args.n_splits > 1 else abi.FWD_PAGEDKV if case.page else abi.FWD
    pipeline, (m, n, wm, wn, blocks) = side
    kernel = abi.make_kernel(lib, ARCH, family, case.dtype, args, abi.Tile(abi.PIPELINES.index(pipeline), m, n, D, DV, wm, wn, blocks))
    assert kernel is not None, f"{case} {side}"
    return kernel


def sides(case, general=True):
    """(name, tile, splits) of each kernel that runs a case; general: the general loop, too."""
    few = case.heads * (1 if case.topk else case.rows) <= 16
    for n in case.splits:
        name = "share of {} in {}".format(*n) if isinstance(n, tuple) else f"{n} splits"
        yield "latent, " + name, LATENT, n
        if general and not isinstance(n, tuple):
            yield f"general, {n} splits", GENERAL_FEW if few else GENERAL, n


def kernels(lib, cases, general=True):
    found = [kernel_of(lib, c, make_args(c, n), side) for c in cases for _, side, n in sides(c, general)]
    found += [combine_of(lib, t, x) for t in (abi.BF16, abi.F16) for x in merges()]
    return {k.name.decode(): k for k in found}


def merges():
    """By whole rows, by pieces of many parts, and another (kernels/traits.h)."""
    for heads, parts in ((4096, 2), (4096, 9), (16, 2)):
        a = abi.CombineArgs()
        a.n_splits, a.hdim_v, a.nhead_q, a.sequences.batch, a.sequences.seqlen_q_max = parts, DV, heads, 1, 1
        yield a


def encode(torch, keys, draw):
    """[n, D] as latents of fp8: their bytes, and what those say, rounded to the type of @keys as kernels are to round it once."""
    blocks = keys[:, :CODED].unflatten(1, (-1, BLOCK)).float()
    factors = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448 * (1 + torch.rand(*blocks.shape[:2], 1, device="cuda", generator=draw))
    codes, rest = (blocks / factors).to(torch.float8_e4m3fn), keys[:, CODED:].to(torch.bfloat16)
    parts = codes.flatten(1), factors.flatten(1), rest
    return (torch.cat([x.contiguous().view(torch.uint8) for x in parts], 1),
            torch.cat([(codes.float() * factors).flatten(1), rest.float()], 1).to(keys.dtype))


class Problem:
    """Sets of inputs and their launches. Where no key is there are NaN, and behind a sequence's pages numbers that are none."""

    def __init__(self, device, case, n_sets=1):
        torch, c = device.torch, case
        self.device, self.case = device, case
        kind = torch.float16 if c.dtype == abi.F16 else torch.bfloat16
        g = torch.Generator(device="cuda").manual_seed(1)
        rows = sum(c.queries())

        def randn(*shape):
            return torch.randn(*shape, device="cuda", generator=g)
        self.q = (randn(rows, c.heads, D) * 0.5).to(kind)
        self.o = torch.full((rows, c.heads, DV), math.nan, device="cuda", dtype=kind)
        self.lse = torch.full((c.heads, rows), math.nan, device="cuda")
        self.sink = randn(c.heads) * 3 if c.sink else None
        ints = lambda x: torch.tensor(x, dtype=torch.int32, device="cuda")  # noqa: E731
        self.keys = [[(lambda x: (x.abs() if c.positive else x).to(kind))(randn(n, D)) for n in c.keys()] for _ in range(n_sets)]
        self.used, self.starts = ints(c.keys()), ints([sum(c.queries()[:i]) for i in range(c.b + 1)])
        if c.page:
            counts = [-(-n // c.page) for n in c.keys()]
            order = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(2)).tolist()
            self.columns = max(-(-c.n // c.page), 1)
            mine = [[order.pop() for _ in range(n)] for n in counts]
            self.table = ints([x + [-7 if i % 2 else 2 ** 31 - 1] * (self.columns - len(x)) for i, x in enumerate(mine)])
            self.first, self.indices = ints([sum(counts[:i]) for i in range(c.b + 1)]), ints(sum(mine, []) + [2 ** 31 - 1] * 4)
            self.ends = ints([n - (m - 1) * c.page if m else 0 for n, m in zip(c.keys(), counts)])
            shape = (sum(counts) + 3, c.page, 1)
        else:
            shape = (c.b, c.n, 1)
        self.pools = [torch.full((*shape, FP8_BYTES), 255, device="cuda", dtype=torch.uint8) if c.fp8 else
                      torch.full((*shape, D), math.nan, device="cuda", dtype=kind) for _ in range(n_sets)]
        for pool, keys in zip(self.pools, self.keys):
            for b, x in enumerate(keys):
                if c.fp8:
                    x, keys[b] = encode(torch, x, g)
                for i in range(0, len(x), c.page or c.n):
                    part = x[i:i + (c.page or c.n)]
                    pool[mine[b][i // c.page] if c.page else b, :len(part), 0] = part
        if c.topk:
            self.choose(mine if c.page else None)
        if n_sets > 1:
            self.keys = None

    def choose(self, pages):
        """Positions, -1 where an entry names none; what entries say; and NaN where no entry points to."""
        c, torch = self.case, self.device.torch
        draw, found, said = torch.Generator().manual_seed(4), [], []
        slots = self.pools[0].shape[0] * c.page
        for b, (n, n_q) in enumerate(zip(c.keys(), c.queries())):
            at = torch.randint(0, max(n, 1), (n_q, c.topk), generator=draw)
            entries = torch.tensor(pages[b] or [0])[at // c.page] * c.page + at % c.page if c.slots else at.clone()
            none = torch.rand(n_q, c.topk, generator=draw) < 0.2 if c.wild == "mixed" else torch.full((n_q, c.topk), c.wild == "all" or n == 0)
            if c.wild == "padding":
                none[:, c.topk * 2 // 3:] = True
            if c.wild == "rows":
                none[::2] = True
            end = slots if c.slots else n
            values = torch.tensor([-1, -2 ** 31, 2 ** 31 - 1, end, -end - 1, end + 1000000] if c.wild == "mixed" or n == 0 else [-1])
            entries = torch.where(none, values[torch.randint(0, len(values), none.shape, generator=draw)], entries)
            found.append(torch.where(none, -1, at).cuda())
            said.append(entries)
        self.positions, self.entries = found, torch.cat(said).to(torch.int32).cuda()
        if len(self.pools) == 1:
            for b, at in enumerate(found):
                unseen = torch.ones(max(c.keys()[b], 1), dtype=torch.bool)
                unseen[at[at >= 0].cpu().unique()] = False
                for i in range(len(pages[b]) if c.page else 1):
                    gone = unseen[i * (c.page or c.n):(i + 1) * (c.page or c.n)].cuda()
                    part = self.pools[0][pages[b][i] if c.page else b, :len(gone), 0]
                    part[gone] = 255 if c.fp8 else math.nan

    def launcher(self, side, splits, overlaps=True):
        c, torch = self.case, self.device.torch
        args, merge = [make_args(c, splits) for _ in self.pools], None
        kernel = kernel_of(self.device.lib, c, args[0], side)
        rows, heads = self.q.shape[:2]
        for a, pool in zip(args, self.pools):
            s, cache = a.sequences, a.cache
            a.k = a.v = tensor_of(pool)
            a.q, a.o = (abi.STRUCTS["abi_tensor"](x.data_ptr(), c.rows * x.stride(0), x.stride(0), x.stride(1), 1) for x in (self.q, self.o))
            a.lse = abi.STRUCTS["abi_rows"](self.lse.data_ptr(), c.rows, rows, 1)
            if c.packed:
                s.seqstart_q = self.starts.data_ptr()
                a.q.stride_batch = a.o.stride_batch = a.lse.stride_batch = 0
            if c.topk:
                a.chosen.data, a.chosen.stride_batch = self.entries.data_ptr(), c.rows * c.topk
                a.chosen.stride_seq, a.chosen.stride_entry = c.topk, 1
            if c.slots:
                s.seqlen_k_max, cache.n_pages = 0, self.pools[0].shape[0]
            elif c.lengths and not c.list:
                s.seqlen_k = self.used.data_ptr()
            if c.list:
                cache.kv_indptr, cache.kv_page_indices, cache.kv_last_page_len = (x.data_ptr() for x in (self.first, self.indices, self.ends))
                cache.n_page_indices, cache.n_pages = len(self.indices) - 4, self.pools[0].shape[0]
            elif c.page and not c.slots:
                cache.block_table, cache.block_table_stride = self.table.data_ptr(), self.table.stride(0)
                cache.max_blocks, cache.n_pages = self.columns, self.pools[0].shape[0]
            if c.sink:
                a.sink = self.sink.data_ptr()
        keep = [kernel, args]
        if args[0].n_splits > 1:
            x, parts = merge_args(torch, args, 0 if c.packed else c.rows)
            x.sink = args[0].sink
            keep += [x, parts]
            combine = combine_of(self.device.lib, c.dtype, x)
            merge = self.device.launcher(self.device.function(combine.name.decode(), combine), combine, x, overlaps=overlaps)
        blocks = splits[0] if isinstance(splits, tuple) else 0
        function = self.device.function(kernel.name.decode(), kernel)
        launches = [self.device.launcher(function, kernel, a, blocks=blocks) for a in args]

        def launch(i, merges=True, keep=keep):
            launches[i % len(launches)]()
            if merge and merges:
                merge()
        return launch

    def wrong(self):
        """Of what lies in o and lse: (relative error of O, largest of LSE), against float64; infinite where something is not finite."""
        c, torch = self.case, self.device.torch
        above = below = worst = 0.0
        at = 0
        for b, (keys, n_q) in enumerate(zip(self.keys[0], c.queries())):
            q, o, lse = self.q[at:at + n_q].double(), self.o[at:at + n_q].double(), self.lse[:, at:at + n_q].double()
            at, n = at + n_q, len(keys)
            keys = keys.double()
            if c.topk:
                at_keys, none = self.positions[b].clamp(min=0), self.positions[b] < 0
                keys = keys[at_keys] if n else keys.new_zeros(n_q, c.topk, D)
                s = (torch.einsum("rhd,rnd->hrn", q, keys) * c.scale).masked_fill(none, -math.inf)
            else:
                s = torch.einsum("rhd,nd->hrn", q, keys) * c.scale
            if c.causal:
                row, key_at = torch.arange(n_q, device="cuda")[:, None] + n - n_q, torch.arange(n, device="cuda")[None, :]
                left = (key_at < row - c.window) & (key_at >= c.sinks) if c.window >= 0 else False
                s.masked_fill_((key_at > row) | left, -math.inf)
            all_of = s if self.sink is None else torch.cat([s, self.sink.double()[:, None, None].expand(c.heads, n_q, 1)], -1)
            want_lse = all_of.logsumexp(-1) if all_of.shape[-1] else s.new_full((c.heads, n_q), -math.inf)
            p = (s - want_lse[..., None]).exp().nan_to_num(nan=0.0)
            want = torch.einsum("hrn,rnd->rhd" if c.topk else "hrn,nd->rhd", p, keys[..., :DV])
            above += (o - want).square().sum().item()
            below += want.square().sum().item()
            apart = torch.where(lse == want_lse, 0.0, (lse - want_lse).abs())
            worst = max(worst, apart.nan_to_num(nan=math.inf).max().item() if apart.numel() else 0)
        return math.sqrt(above / below) if below else math.sqrt(above), worst


def checks():
    """Small ones."""
    for page in (16, 64, 256, 8, 48, 0):
        yield Case(3, 16, 700, page=page, lengths=(700, 1, 333), splits=(1, 3, (7, 4), (40, 9)))
    for heads in (8, 16, 40, 64, 128):
        for rows in (1, 2, 3, 4):
            yield Case(3, heads, 520, rows=rows, causal=rows > 1, lengths=(520, 64, 129), splits=(1, 4), page=64 if rows % 2 else 16)
    yield Case(2, 128, 2000, positive=True, lengths=(2000, 999), splits=(1, 5), scale=0.02)
    yield Case(2, 16, 2000, positive=True, lengths=(2000, 999), splits=(1, (30, 20)), scale=0.02, page=16)
    yield Case(4, 16, 640, lengths=(640, 0, 65, 127), splits=(1, 10, (132, 12)))
    yield Case(4, 16, 640, lengths=(640, 0, 65, 127), list=True, page=16, splits=(1, 5))
    yield Case(2, 16, 900, rows=3, causal=True, window=100, lengths=(900, 450), splits=(1, 3, (9, 4)))
    yield Case(2, 16, 900, rows=3, causal=True, window=100, sinks=5, lengths=(900, 450), page=16, splits=(1,))
    yield Case(2, 32, 900, sink=True, lengths=(900, 450), splits=(1, 3))
    yield Case(2, 64, 600, scale=-0.05, lengths=(600, 30), splits=(1, 3))
    yield Case(5, 16, 800, rows=150, causal=True, packed=True, lengths=(800, 200, 640, 150, 777), splits=(1,))
    yield Case(3, 128, 300, rows=20, causal=True, packed=True, lengths=(300, 250, 64), splits=(1, 2), page=16)
    yield Case(19, 128, 640, lengths=(640, 0, 65, 127, 128, 192) + (333,) * 13, splits=(2, 3, 4, 5, (132, 4)))  # merged by whole rows
    yield Case(17, 40, 640, rows=4, causal=True, dtype=abi.F16, lengths=(640, 3) + (333,) * 15, splits=(2, (132, 7)), page=16)
    yield Case(3, 128, 900, rows=6, causal=True, packed=True, lengths=(900, 250, 64), splits=(2, (132, 40), (7, 3)), sink=True)
    yield Case(70, 128, 300, lengths=tuple(37 * i % 301 for i in range(70)), page=16, splits=(1, (132, 5), (4, 9)))  # tiles beside each other
    yield Case(2, 64, 500, rows=9, causal=True, lengths=(500, 77), splits=(1, (132, 9), (16, 5)))
    yield Case(2, 128, 2048, rows=1, dtype=abi.F16, lengths=(2048, 77), splits=(1, 8))
    yield Case(2, 24, 333, rows=2, causal=True, dtype=abi.F16, page=0, lengths=(333, 55), splits=(1, 2))
    yield Case(130, 16, 256, lengths=tuple(1 + 37 * i % 256 for i in range(130)), page=16, splits=(1, (132, 5)))
    for topk in (64, 100, 2048):
        for heads in (8, 16, 64, 128):
            for slots in (True, False):
                yield Case(3, heads, 3000, rows=1 + heads % 3, topk=topk, slots=slots, lengths=(3000, 129, 700), splits=(1, 3),
                           wild="mixed" if slots else "padding")
    for page in (64, 1, 5, 16, 0):
        for slots in (True, False) if page else (False,):
            yield Case(3, 24, 900, rows=4, page=page, topk=333, slots=slots, wild="mixed", lengths=(900, 77, 450), splits=(1, 2))
    yield Case(3, 128, 900, rows=3, topk=200, wild="rows", lengths=(900, 77, 450), splits=(1, 4))
    yield Case(2, 64, 900, rows=2, topk=130, slots=True, wild="all", splits=(1, 3))
    yield Case(3, 16, 900, topk=130, lengths=(900, 0, 450), splits=(1, 2))
    yield Case(2, 16, 40, topk=500, slots=True, splits=(1,))
    yield Case(2, 128, 900, rows=2, topk=256, slots=True, sink=True, wild="mixed", splits=(1, 2))
    yield Case(2, 64, 900, topk=256, scale=-0.05, wild="mixed", splits=(1, 3))
    yield Case(2, 128, 2048, topk=2048, slots=True, positive=True, scale=0.02, dtype=abi.F16, splits=(1, 8))
    yield Case(3, 96, 700, rows=9, topk=190, packed=True, wild="mixed", lengths=(700, 65, 300), splits=(1, 2))
    for page in (64, 1, 5, 16, 0):
        yield Case(3, 16, 700, page=page, lengths=(700, 1, 333), splits=(1, 3), fp8=True)
    for heads in (8, 40, 128):
        for rows in (1, 3):
            yield Case(3, heads, 520, rows=rows, causal=rows > 1, lengths=(520, 64, 129), splits=(1, 4), fp8=True)
    yield Case(2, 128, 2000, positive=True, lengths=(2000, 999), splits=(1, 5), scale=0.02, fp8=True)
    yield Case(4, 16, 640, lengths=(640, 0, 65, 127), splits=(1, 10), fp8=True)
    yield Case(4, 16, 640, lengths=(640, 0, 65, 127), list=True, page=16, splits=(1, 5), fp8=True)
    yield Case(2, 16, 900, rows=3, causal=True, window=100, sinks=5, lengths=(900, 450), splits=(1, 3), fp8=True)
    yield Case(2, 32, 900, sink=True, scale=-0.05, lengths=(900, 450), splits=(1, 3), fp8=True)
    yield Case(3, 128, 300, rows=20, causal=True, packed=True, lengths=(300, 250, 64), splits=(1, 2), page=16, fp8=True)
    yield Case(2, 24, 333, rows=2, causal=True, dtype=abi.F16, page=0, lengths=(333, 55), splits=(1, 2), fp8=True)
    for topk in (64, 100, 2048):
        for heads in (16, 64, 128):
            yield Case(3, heads, 3000, rows=1 + heads % 3, topk=topk, slots=topk != 100, lengths=(3000, 129, 700), splits=(1, 3),
                       wild="padding" if topk == 100 else "mixed", fp8=True)
    for page in (1, 5, 0):
        yield Case(3, 24, 900, rows=4, page=page, topk=333, slots=page == 5, wild="mixed", lengths=(900, 77, 450), splits=(1, 2), fp8=True)
    yield Case(2, 64, 900, rows=2, topk=130, slots=True, wild="all", splits=(1, 3), fp8=True)
    yield Case(3, 16, 900, topk=130, lengths=(900, 0, 450), splits=(1, 2), fp8=True)
    yield Case(3, 128, 900, rows=3, topk=200, wild="rows", sink=True, lengths=(900, 77, 450), splits=(1, 4), fp8=True)
    yield Case(2, 128, 2048, topk=2048, slots=True, positive=True, scale=0.02, dtype=abi.F16, splits=(1, 8), fp8=True)
    yield Case(3, 96, 700, rows=9, topk=190, packed=True, wild="mixed", lengths=(700, 65, 300), splits=(1, 2), fp8=True)
    yield Case(3, 128, 700, rows=5, topk=190, packed=True, wild="mixed", lengths=(700, 65, 300), splits=(1, 2), fp8=True)  # tiles in pairs
    yield Case(4, 256, 640, lengths=(640, 0, 65, 127), splits=(1, 10), fp8=True)
    yield Case(3, 128, 300, rows=4, packed=True, lengths=(300, 250, 64), splits=(1, 2), page=16, fp8=True)
    yield Case(70, 128, 400, lengths=tuple(37 * i % 401 for i in range(70)), splits=(1, 3), fp8=True, dtype=abi.F16)


def benches():
    """With numbers of splits that plans might choose, of equal lengths and of others."""
    draw = random.Random(5)
    yield Case(2, 128, 8192, topk=2048, slots=True, splits=(16, 32))
    yield Case(64, 128, 8192, topk=2048, slots=True, splits=(1,))
    yield Case(64, 64, 8192, topk=2048, slots=True, splits=(1, 2))
    yield Case(64, 16, 8192, topk=2048, slots=True, splits=(1, 2))
    yield Case(2, 128, 8192, topk=2048, slots=True, splits=(16, 32), fp8=True)
    yield Case(64, 128, 8192, topk=2048, slots=True, splits=(1,), fp8=True)
    yield Case(64, 64, 8192, topk=2048, slots=True, splits=(1, 2), fp8=True)
    yield Case(64, 16, 8192, topk=2048, slots=True, splits=(1, 2), fp8=True)
    yield Case(32, 16, 8192, splits=(4, 8), fp8=True)
    yield Case(64, 128, 4096, splits=(1, 2), fp8=True)
    yield Case(128, 16, 1024, splits=(1, 2, (132, 4)))
    yield Case(2, 16, 1024, splits=(4, 8, 16))
    yield Case(32, 16, 8192, splits=(4, (132, 4), (132, 12)))
    yield Case(64, 128, 4096, splits=(1, (132, 4)))
    yield Case(4, 128, 32768, splits=(16, (132, 36)))
    yield Case(1, 128, 65536, splits=(64, 66))
    yield Case(32, 16, 8192, lengths=(8192, *(draw.randint(1024, 8192) for _ in range(31))), splits=(4, (132, 12)))
    yield Case(64, 16, 32768, lengths=tuple(draw.randint(512, 2048) for _ in range(64)), splits=(1, (132, 8)))
    yield Case(8, 128, 16384, lengths=(16384, *(draw.randint(1024, 16384) for _ in range(7))), splits=(8, (132, 20)))
    yield Case(64, 16, 4096, rows=4, causal=True, splits=(1, 2))
    yield Case(1, 16, 8192, rows=1024, causal=True, splits=(1,))


def sparse_mla(problem):
    """FlashMLA's, which has its heads by 64; over latents of fp8 with what it has planned once, as a server's layers share it."""
    c, torch = problem.case, problem.device.torch
    mla = libraries.find_flash_mla_fp8() if c.fp8 else libraries.find_flash_mla_sparse()
    if mla is None:
        return {}
    q, entries = problem.q, problem.entries.view(-1, 1, c.topk)
    if c.heads % 64:
        q = torch.cat([q, q.new_zeros(q.shape[0], -c.heads % 64, D)], 1)
    plan = [None, None]

    def launch(i):
        pool = problem.pools[i % len(problem.pools)]
        if not c.fp8:
            return mla(q, pool.view(-1, 1, D), entries, c.scale, DV, None, None, None)
        got = mla(q[:, None], pool.view(torch.float8_e4m3fn), entries, None, None, *plan, None, None, None, DV, c.scale)
        plan[:] = got[2:4] if got[2] is not None else plan
        return [got[0][:, 0]]
    try:
        got = launch(0)[0][:, :c.heads].float()
        problem.launcher(LATENT, 1)(0)
        torch.cuda.synchronize()
        apart = ((got - problem.o.float()).norm() / got.norm()).item()
    except Exception as error:  # pylint: disable=broad-except
        print(f"FlashMLA: {str(error)[:300]}", flush=True)
        return {}
    print(f"{c}: apart from FlashMLA by {apart:.1e}", flush=True)
    return {"FlashMLA": launch}


def others(problem):
    """Launches of other libraries."""
    c, torch, found = problem.case, problem.device.torch, {}
    if c.topk:
        return sparse_mla(problem)
    if c.fp8:
        return {}
    flash, mla = libraries.find_flash_attention_3(), libraries.find_flash_mla()
    q_rest, q_values = problem.q[..., DV:].contiguous(), problem.q[..., :DV].contiguous()
    used, table = problem.used, problem.table.clamp(0, len(problem.pools[0]) - 1).contiguous()

    def launch_flash(i):
        pool = problem.pools[i % len(problem.pools)]
        flash(q_rest, pool[..., DV:], pool[..., :DV], max_seqlen_q=c.rows, cu_seqlens_q=problem.starts, max_seqlen_k=c.n, seqused_k=used,
              q_v=q_values, block_table=table, softmax_scale=c.scale, causal=True, fa_version=3)

    def launch_mla(i):
        mla(problem.q.view(c.b, c.rows, c.heads, D), problem.pools[i % len(problem.pools)], DV, used, table, c.scale, True, None, None, None)
    for name, library, launch in ("FA3", flash, launch_flash), ("FlashMLA", mla if c.rows <= 8 else None, launch_mla):
        if library is None:
            continue
        try:
            launch(0)
            torch.cuda.synchronize()
            found[name] = launch
        except Exception as error:  # pylint: disable=broad-except
            print(f"{name}: {str(error)[:300]}", flush=True)
    return found


def check(device, chosen, general=True):
    torch, lines, failed = device.torch, 0, 0
    for case in chosen:
        problem = Problem(device, case)
        for name, side, splits in sides(case, general):
            problem.o.fill_(math.nan)
            problem.lse.fill_(math.nan)
            try:
                launch = problem.launcher(side, splits)
                launch(0)
                torch.cuda.synchronize()
                error, lse = problem.wrong()
                first = problem.o.clone()
                launch(0)
                torch.cuda.synchronize()
                same = torch.equal(first.view(torch.int16), problem.o.view(torch.int16))
            except RuntimeError as why:
                error = lse = math.inf
                same = False
                print(f"{case} {name}: {str(why)[:200]}", flush=True)
                if "launch" not in str(why) and "gpu_" not in str(why):
                    return lines + 1, failed + 1  # the context is lost
            lines += 1
            bad = not (error < MOST_ERROR[case.dtype] and lse < 2e-3 and same)
            failed += bad
            print(f"{'FAIL' if bad else 'ok'} {case}, {name}: O {error:.1e}, LSE {lse:.1e}, {'same' if same else 'other'} bits", flush=True)
    return lines, failed


def times_of(torch, launches, peers, n):
    """Of all that a graph holds: other libraries may do what it cannot."""
    try:
        return compare_graphs(torch, launches | peers, n)
    except RuntimeError as error:
        if not peers:
            raise
        print(f"without others: {str(error)[:200]}", flush=True)
        return compare_graphs(torch, launches, n)


def bench(device, chosen, match, general=True):
    torch, table = device.torch, []
    copy = copy_rate(torch)
    for case in chosen:
        torch.cuda.empty_cache()
        problem = Problem(device, case, max(2, min(8, -(-(160 << 20) // case.bytes()))))
        launches = {name: problem.launcher(side, n) for name, side, n in sides(case, general) if match in name}
        launches |= {name + ", alone": functools.partial(f, merges=False) for name, f in launches.items() if name.startswith("latent")}
        peers = {} if match else others(problem)
        times = times_of(torch, launches, peers, max(4, min(24, int(1500 / (case.bytes() / copy / 1e3 + case.flops() / 3e8 + 5)))))
        by_copy = case.bytes() / copy / 1e3
        table.append(f"{case}: copy {by_copy:.1f} | " + " | ".join(
            f"{name} {us:.1f} ({case.flops() / us / 1e6:.0f})" for name, us in times.items()))
        print(table[-1], flush=True)
    print("microseconds (TFLOP/s):", *table, sep="\n")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("build", "run", "sanitize"))
    parser.add_argument("folder")
    parser.add_argument("--match", default="")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--no-bench", action="store_true")
    parser.add_argument("--side", default="", help="time what has this in its name, and no other library")
    parser.add_argument("--no-general", action="store_true", help="Hopper's loop alone")
    parser.add_argument("--few", action="store_true", help="a few problems")
    a = parser.parse_args()
    lib, failed = abi.load_library(), 0
    tested, timed = ([c for c in cases if a.match in str(c)] for cases in (checks(), benches()))
    if a.what == "build":
        sys.exit(cuda_device.build_cubins(a.folder, kernels(lib, [*tested, *timed], not a.no_general), ARCH) != 0)
    if a.what == "sanitize":
        sys.exit(cuda_device.sanitize_cubins(__file__, a.folder, a.match))
    device = cuda_device.Cubins(lib, a.folder)
    if not a.no_check:
        n, failed = check(device, tested[::5] if a.few else tested, not a.no_general)
        print(f"checks: {n}, {failed} failed", flush=True)
    if not a.no_bench:
        bench(device, timed, a.side, not a.no_general)
    sys.exit(failed != 0)


if __name__ == "__main__":
    main()
