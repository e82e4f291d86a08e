# SPDX-License-Identifier: MIT
"""Decode's kernels (fwd_decode.h, combine.h) by themselves: checked against float32, timed against a copy.

    python3 tests/gpu/decode.py build DIR [--match TEXT]       # needs NVRTC, no GPU
    python3 tests/gpu/decode.py run DIR [--match TEXT]

`run` needs a Hopper GPU and PyTorch. A time is the median of several replays of a graph of launches, each with its combine,
on inputs that are rotated so that no cache holds them; all sides of a case by turns: splits that the host has cut, shares that
blocks find by themselves (decode_share.h), cuDNN and, where $FMHA_PEERS has it (libraries.py), FlashAttention-3. bench_gpu.py measures the
same through plans; here is where other tiles and splits are tried: add a Case.
"""
import argparse
import dataclasses
import math
import os
import random
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import abi  # noqa: E402
import cuda_device  # noqa: E402
import libraries  # noqa: E402
from gpu_timer import compare_graphs, copy_rate  # noqa: E402
from hopper import tensor_of  # noqa: E402

ARCH = "sm_90a"


@dataclasses.dataclass
class Case:
    b: int
    hk: int
    group: int
    n: int  # keys
    d: int = 128
    rows: int = 1  # queries of a head
    page: int = 0
    causal: bool = False
    splits: tuple = (1,)  # numbers of splits, or (blocks, parts) of shares
    least: int = 0  # keys of the shortest sequence, where they differ
    most: int = 0  # of the longest one, where that is less than there is room for
    window: int = -1
    empty: bool = False  # the second sequence has no keys
    timed: bool = True
    tile: tuple = ()  # m, n, waves_m, waves_n, blocks
    pipeline: str = "gpu_decode"
    dtype: int = abi.BF16

    def __str__(self):
        return (f"{self.b}x{self.hk}x{self.n} d{self.d} group {self.group}" + (f" rows {self.rows}" if self.rows > 1 else "") +
                (f" page {self.page}" if self.page else "") + (" causal" if self.causal else "") +
                (f" window {self.window}" if self.window >= 0 else "") +
                (f" of {self.least} to {self.longest()}" if self.is_ragged() else "") +
                (" e4m3" if self.dtype == abi.E4M3 else "") +
                (f" {self.pipeline} {self.tile}" if self.tile else f" {self.pipeline}"))

    def longest(self):
        return self.most or self.n

    def is_ragged(self):
        return bool(self.least or self.most or self.empty)

    def lengths(self):
        """Of the first sequence the most, of the others anything."""
        draw, longest = random.Random(7), self.longest()
        found = [longest] + [draw.randint(self.least, longest) if self.least else longest for _ in range(self.b - 1)]
        return found[:1] + [0] + found[2:] if self.empty else found

    def bytes(self):
        keys = sum(min(n, self.window + self.rows) if self.window >= 0 else n for n in self.lengths())
        return 2 * self.hk * keys * self.d * (1 if self.dtype == abi.E4M3 else 2)


def round_up(x, n):
    return -(-x // n) * n


def make_args(case, splits):
    a = abi.FwdArgs()
    hq, s = case.hk * case.group, a.sequences
    s.batch, s.seqlen_q_max, s.seqlen_k_max = case.b, case.rows, case.n
    s.total_q, s.total_k = case.b * case.rows, case.b * case.n
    a.nhead_q, a.nhead_k, a.hdim_q, a.hdim_v = hq, case.hk, case.d, case.d
    a.scale, a.dtype, a.o_dtype = case.d ** -0.5, case.dtype, abi.BF16
    a.band.window_left = a.band.window_right = -1
    if case.causal:
        a.band.mask, a.band.window_right, a.band.window_left = abi.MASK_BOTTOM_RIGHT, 0, case.window
    a.cache.page_size = case.page
    if case.dtype == abi.E4M3:
        for d, heads in (a.q_descale, hq), (a.k_descale, case.hk), (a.v_descale, case.hk):
            d.data, d.stride_batch, d.stride_head = 64, heads, 1  # an address for the choice of a kernel
    if isinstance(splits, tuple):
        a.n_splits, a.split_size = splits[1], 0
    elif splits > 1:
        a.n_splits, a.split_size = splits, round_up(-(-case.n // splits), 64)
        a.n_splits = -(-case.n // a.split_size)
    return a


def kernel_of(lib, case, args):
    family = abi.FWD_SPLITKV if args.n_splits > 1 else abi.FWD_PAGEDKV if case.page else abi.FWD
    if case.tile:
        m, n, wm, wn, blocks = case.tile
        tile = abi.Tile(abi.PIPELINES.index(case.pipeline), m, n, case.d, case.d, wm, wn, blocks)
        return abi.make_kernel(lib, ARCH, family, case.dtype, args, tile)
    return abi.choose_kernel(lib, ARCH, family, case.dtype, args, pipeline=case.pipeline)


def combine_of(lib, dtype=abi.BF16, args=None):
    return abi.choose_kernel(lib, ARCH, abi.FWD_SPLITKV_COMBINE, dtype, args or abi.CombineArgs())


def merge_args(torch, args, rows):
    """Parts of @args, which are alike, of sequences of @rows, and what merges them into o and lse: (arguments, what to keep)."""
    a, x = args[0], abi.CombineArgs()
    n, hq, total, d = a.n_splits, a.nhead_q, a.sequences.total_q, a.hdim_v
    acc = torch.full((n, hq, total, d), math.nan, device="cuda")
    lse = torch.full((n, hq, total), math.nan, device="cuda")
    for a in args:
        a.o_acc, a.lse_acc = acc.data_ptr(), lse.data_ptr()
    x.o_parts = abi.STRUCTS["abi_tensor"](acc.data_ptr(), rows * d, d, total * d, 1)
    x.o_parts_stride_split = hq * total * d
    x.lse_parts = abi.STRUCTS["abi_rows"](lse.data_ptr(), rows, total, 1)
    x.lse_parts_stride_split = hq * total
    x.o, x.lse, x.sequences, x.n_splits, x.nhead_q, x.hdim_v = a.o, a.lse, a.sequences, n, hq, d
    x.o_parts_dtype, x.o_dtype = abi.F32, a.o_dtype
    return x, (acc, lse)


def kernels(lib, cases):
    found = [kernel_of(lib, c, make_args(c, n)) for c in cases for n in c.splits] + [combine_of(lib)]
    return {k.name.decode(): k for k in found}


class Problem:
    """Three sets of inputs (more where they are small) and their launches."""

    def __init__(self, device, case):
        torch, c = device.torch, case
        self.device, self.case = device, case
        g = torch.Generator(device="cuda").manual_seed(1)
        n_sets = max(3, min(8, -(-(160 << 20) // c.bytes())))

        def randn(*shape):
            x = torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=g)
            return x.to(torch.float8_e4m3fn) if c.dtype == abi.E4M3 else x
        self.q = randn(c.b, c.rows, c.hk * c.group, c.d)
        self.o = torch.empty_like(self.q, dtype=torch.bfloat16)
        self.factors = [torch.rand(c.b, h, device="cuda", generator=g) + 0.5 for h in (self.q.shape[2], c.hk, c.hk)]
        shape = (c.b * c.n // c.page, c.page, c.hk, c.d) if c.page else (c.b, c.n, c.hk, c.d)
        self.sets = [(randn(*shape), randn(*shape)) for _ in range(n_sets)]
        if c.page:
            self.table = torch.randperm(shape[0], device="cuda").to(torch.int32).reshape(c.b, -1)
        self.lengths = torch.tensor(c.lengths(), device="cuda", dtype=torch.int32) if c.is_ragged() else None

    def launcher(self, splits, overlaps, first=False):
        """@first: the splits begin early, too."""
        c, torch = self.case, self.device.torch
        args = [make_args(c, splits) for _ in self.sets]
        kernel, combine = kernel_of(self.device.lib, c, args[0]), None
        hq, rows = c.hk * c.group, c.b * c.rows
        for a, (k, v) in zip(args, self.sets):
            a.q, a.k, a.v, a.o = (tensor_of(x) for x in (self.q, k, v, self.o))
            if c.dtype == abi.E4M3:
                for d, x in zip((a.q_descale, a.k_descale, a.v_descale), self.factors):
                    d.data = x.data_ptr()
            if c.page:
                a.cache.block_table, a.cache.block_table_stride = self.table.data_ptr(), self.table.stride(0)
                a.cache.max_blocks, a.cache.n_pages = self.table.shape[1], self.table.numel()
            if c.is_ragged():
                a.sequences.seqlen_k = self.lengths.data_ptr()
        keep = [kernel, args]
        blocks = splits[0] if isinstance(splits, tuple) else 0
        if args[0].n_splits > 1:
            x, parts = merge_args(torch, args, c.rows)
            combine = combine_of(self.device.lib)
            keep += [x, parts]

        def launcher(kernel, args, **how):
            return self.device.launcher(self.device.function(kernel.name.decode(), kernel), kernel, args, **how)
        launches = [launcher(kernel, a, overlaps=first, blocks=blocks) for a in args]
        merge = launcher(combine, x, overlaps=overlaps) if combine is not None else None

        def launch(i, combines=True, keep=keep):
            launches[i % len(launches)]()
            if merge and combines:
                merge()
        return launch, args[0].n_splits

    def error(self, i):
        """Of what the launch on set i left in o, the largest difference."""
        c, torch = self.case, self.device.torch
        k, v = self.sets[i % len(self.sets)]
        if c.page:
            k, v = (x.view(torch.uint8 if c.dtype == abi.E4M3 else x.dtype)[self.table.long()].view(x.dtype).reshape(c.b, c.n, c.hk, c.d) for x in (k, v))
        worst = 0
        for b in range(0, c.b, max(1, c.b // 4)):
            n = c.lengths()[b]
            if n == 0:
                worst = max(worst, self.o[b].float().abs().max().item())
                continue
            q, key, value = self.q[b].float(), k[b, :n].float(), v[b, :n].float()
            if c.dtype == abi.E4M3:
                q, key, value = (x * f[b][None, :, None] for x, f in zip((q, key, value), self.factors))
            q = q.reshape(c.rows, c.hk, c.group, c.d)
            s = torch.einsum("rhgd,nhd->hgrn", q, key) * c.d ** -0.5
            if c.causal:
                row, key_at = torch.arange(c.rows, device="cuda")[:, None] + n - c.rows, torch.arange(n, device="cuda")[None, :]
                s.masked_fill_((key_at > row) | (key_at < row - c.window if c.window >= 0 else False), -math.inf)
            want = torch.einsum("hgrn,nhd->rhgd", s.softmax(-1), value).reshape(c.rows, -1, c.d)
            worst = max(worst, (self.o[b].float() - want).abs().max().item() / want.abs().max().item())
        return worst


def others(problem):
    """Launches of other libraries."""
    c, torch, sides = problem.case, problem.device.torch, {}
    if c.dtype != abi.BF16:
        return sides
    flash = libraries.find_flash_attention_3()
    hq, o = c.hk * c.group, torch.empty(c.b * c.rows, c.hk * c.group, c.d, device="cuda", dtype=torch.bfloat16)
    window = [c.window, 0] if c.window >= 0 else None
    starts_q, starts_k = (torch.arange(c.b + 1, device="cuda", dtype=torch.int32) * n for n in (c.rows, c.n))
    q = problem.q.reshape(-1, hq, c.d)
    if flash and (c.page % 16 == 0 and c.page or not c.is_ragged()):
        lengths = problem.lengths if c.is_ragged() else torch.full((c.b,), c.n, device="cuda", dtype=torch.int32)

        def launch_flash(i):
            k, v = problem.sets[i % len(problem.sets)]
            where = dict(seqused_k=lengths, block_table=problem.table) if c.page else dict(cu_seqlens_k=starts_k)
            if not c.page:
                k, v = k.reshape(-1, c.hk, c.d), v.reshape(-1, c.hk, c.d)
            flash(q, k, v, max_seqlen_q=c.rows, cu_seqlens_q=starts_q, max_seqlen_k=c.longest(), causal=c.causal, window_size=window,
                  out=o, fa_version=3, **where)
        sides["FA3"] = launch_flash
    if not c.page and c.rows == 1 and not c.is_ragged() and not c.causal:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def launch_cudnn(i):
            q, k, v = (x.transpose(1, 2) for x in (problem.q, *problem.sets[i % len(problem.sets)]))
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        sides["cuDNN"] = launch_cudnn
    return sides


def cases():
    """With the splits that plans choose, and others."""
    for page in (16, 64, 256):
        yield Case(16, 8, 4, 12288, page=page, least=6144, splits=(2, (264, 6), (264, 12), (396, 8)))
    yield Case(128, 8, 4, 2048, page=16, least=1024, splits=(1, (264, 4), (264, 8)))
    yield Case(1, 8, 4, 20480, page=16, most=20000, splits=(32, (132, 18), (264, 35)))
    yield Case(1, 8, 4, 32768, page=16, most=20000, splits=(29, (132, 18), (264, 35)))
    yield Case(16, 8, 4, 32768, page=16, least=1024, most=20000, splits=(2, (264, 6), (264, 12)))
    yield Case(4, 8, 4, 30000, splits=(4, (264, 12)))
    yield Case(32, 8, 4, 3000, splits=(1, (264, 4)))
    yield Case(128, 8, 4, 1500, splits=(1, (264, 4)))
    yield Case(256, 8, 4, 500, splits=(1, (264, 3)))
    yield Case(1, 8, 4, 4000, splits=(16, (132, 18), (264, 35)))
    yield Case(8, 8, 8, 9000, rows=4, causal=True, splits=(2, 4, (264, 6)))
    yield Case(8, 8, 4, 16384, page=16, causal=True, window=4095, least=2000, splits=(3, (264, 6)))
    for group in (1, 4, 8):
        yield Case(1, 1, group, 131072, splits=(103, 128, 256))
        yield Case(1, 8, group, 8192, splits=(13, 16, 32))
        yield Case(1, 8, group, 131072, splits=(13, 33))
        yield Case(8, 8, group, 16384, splits=(2, 4))
        yield Case(64, 8, group, 4096, splits=(1, 2))
    for page in (16, 1):
        yield Case(8, 8, 4, 16384, splits=(3, 4), page=page)
        yield Case(1, 8, 4, 8192, splits=(22, 32), page=page)
        yield Case(64, 8, 4, 4096, splits=(1,), page=page)
    for rows, group in ((4, 8), (8, 8)):
        yield Case(8, 8, group, 16384, splits=(3, 4), rows=rows)
        yield Case(1, 8, group, 8192, splits=(22, 32), rows=rows, causal=True)
    for b, n, splits in ((1, 8192, (13, 16, 22, 32)), (8, 16384, (2, 3, 4)), (64, 4096, (1,))):
        for page in (0, 16, 1):
            yield Case(b, 8, 4, n, splits=splits, page=page, dtype=abi.E4M3)
    for rows in (4, 8):
        yield Case(8, 8, 8, 16384, splits=(3, 4), rows=rows, causal=True, dtype=abi.E4M3)
    for d in (64, 256):
        yield Case(8, 8, 4, 16384, d=d, splits=(2, 4), dtype=abi.E4M3)
        yield Case(8, 8, 4, 16384, d=d, splits=(2, 3, 4))
        yield Case(64, 8, 4, 4096, d=d, splits=(1,))


def odd_cases():
    """Shares that are not even: checked, not timed."""
    for d, more in ((128, {}), (64, {}), (256, {}), (96, {}), (128, dict(dtype=abi.E4M3))):
        for page in (0, 16, 1):
            yield Case(5, 2, 3, 704, timed=False, d=d, page=page, least=1, splits=((7, 4), (40, 9), (264, 20)), empty=True, **more)
        yield Case(3, 2, 5, 1984, timed=False, d=d, page=16, causal=True, rows=5, least=300, splits=((5, 3), (100, 40)), **more)
        yield Case(3, 1, 8, 1984, timed=False, d=d, page=64, causal=True, window=255, rows=7, least=300, splits=((9, 3), (33, 12)), **more)
    yield Case(300, 1, 4, 256, timed=False, page=16, least=1, splits=((132, 5), (264, 3)), empty=True)
    yield Case(4, 2, 4, 1000, timed=False, splits=((11, 6), (264, 60)))
    yield Case(2, 2, 30, 1000, timed=False, rows=3, causal=True, splits=((11, 6), (264, 60)))


def run(folder, lib, chosen, shares, bench):
    device = cuda_device.Cubins(lib, folder)
    torch, failed, before = device.torch, 0, None
    copy = copy_rate(torch)
    print(f"copy {copy:.0f} GB/s")
    for case in chosen:
        key = dataclasses.replace(case, splits=(), tile=(), pipeline="")
        if before is None or key != before[0]:
            before = None
            torch.cuda.empty_cache()
            before = (key, Problem(device, case))
        problem = before[1]
        problem.case = case
        floor, sides = case.bytes() / copy / 1e3, {}
        for splits in (x for x in case.splits if shares or not isinstance(x, tuple)):
            launch, n = problem.launcher(splits, True)
            problem.o.fill_(math.nan)
            launch(1)
            torch.cuda.synchronize()
            error, first = problem.error(1), problem.o.clone()
            launch(1)
            torch.cuda.synchronize()
            same = torch.equal(first.view(torch.int16), problem.o.view(torch.int16))
            bad = not (error < 1.5e-2 and same)
            failed += bad
            if bad:
                print(f"{case} splits {splits}: err {error:.1e}, {'same' if same else 'other'} bits FAIL", flush=True)
            name = "share of {} in {}".format(*splits) if isinstance(splits, tuple) else f"{n} splits"
            sides[name + (f" {case.tile}" if case.tile else "")] = launch
            sides[name + " early"] = problem.launcher(splits, True, True)[0]
            if n > 1:
                sides[name + " alone"] = lambda i, f=launch: f(i, False)
        if not bench or not case.timed:
            continue
        sides |= others(problem)
        times = compare_graphs(torch, sides, max(4, min(24, int(1500 / (floor + 5)))))
        print(f"{case}: {floor:.1f} us by a copy; " + " | ".join(f"{name} {us:.1f}" for name, us in times.items()), flush=True)
    print(f"{failed} failed")
    return failed


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("build", "run"))
    parser.add_argument("folder")
    parser.add_argument("--match", default="")
    parser.add_argument("--fixed", action="store_true", help="no shares")
    parser.add_argument("--no-bench", action="store_true")
    a = parser.parse_args()
    lib = abi.load_library()
    chosen = [c for c in [*odd_cases(), *cases()] if a.match in str(c)]
    if a.what == "build":
        cuda_device.build_cubins(a.folder, kernels(lib, chosen), ARCH)
    else:
        sys.exit(run(a.folder, lib, chosen, not a.fixed, not a.no_bench) != 0)


if __name__ == "__main__":
    main()
