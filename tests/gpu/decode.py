# SPDX-License-Identifier: MIT
"""Decode's kernels (fwd_decode.h, combine.h) by themselves: checked against float32, timed against a copy.

    python3 tests/gpu/decode.py build DIR [--match TEXT]       # needs NVRTC, no GPU
    python3 tests/gpu/decode.py run DIR [--match TEXT]

`run` needs a Hopper GPU and PyTorch. A time is the median of several replays of a graph of launches, each with its combine,
on inputs that are rotated so that no cache holds them; first as launches that wait for each other, then with the combine
beginning early (launch.h: overlaps). bench_gpu.py measures the same through plans; here is where other tiles and splits are tried:
add a Case.
"""
import argparse
import ctypes
import dataclasses
import math
import os
import re
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import abi  # noqa: E402

SMS = 132
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
    splits: tuple = (1,)
    tile: tuple = ()  # m, n, waves_m, waves_n, blocks
    pipeline: str = "gpu_decode"
    dtype: int = abi.BF16

    def __str__(self):
        return (f"{self.b}x{self.hk}x{self.n} d{self.d} group {self.group}" + (f" rows {self.rows}" if self.rows > 1 else "") +
                (f" page {self.page}" if self.page else "") + (" causal" if self.causal else "") +
                (" e4m3" if self.dtype == abi.E4M3 else "") +
                (f" {self.pipeline} {self.tile}" if self.tile else f" {self.pipeline}"))

    def bytes(self):
        return 2 * self.b * self.hk * self.n * self.d * (1 if self.dtype == abi.E4M3 else 2)


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
        a.band.mask, a.band.window_right = abi.MASK_BOTTOM_RIGHT, 0
    a.cache.page_size = case.page
    if case.dtype == abi.E4M3:
        for d, heads in (a.q_descale, hq), (a.k_descale, case.hk), (a.v_descale, case.hk):
            d.data, d.stride_batch, d.stride_head = 64, heads, 1  # an address for the choice of a kernel
    if splits > 1:
        a.n_splits, a.split_size = splits, round_up(-(-case.n // splits), 64)
        a.n_splits = -(-case.n // a.split_size)
    return a


def kernel_of(lib, case, args):
    family = abi.FWD_SPLITKV if args.n_splits > 1 else abi.FWD_PAGEDKV if case.page else abi.FWD
    if case.tile:
        m, n, wm, wn, blocks = case.tile
        tile, kernel = abi.Tile(abi.PIPELINES.index(case.pipeline), m, n, case.d, case.d, wm, wn, blocks), abi.Kernel()
        if lib.check_make(ARCH.encode(), family, case.dtype, ctypes.byref(args), ctypes.byref(tile), ctypes.byref(kernel)):
            raise RuntimeError(f"no kernel for {case}")
        return kernel
    return abi.choose_kernel(lib, ARCH, family, case.dtype, args, pipeline=case.pipeline)


def combine_of(lib):
    return abi.choose_kernel(lib, ARCH, abi.FWD_SPLITKV_COMBINE, abi.BF16, abi.CombineArgs())


def build(folder, lib, cases):
    import cuda_device
    os.makedirs(folder, exist_ok=True)
    kernels = {k.name: k for c in cases for n in c.splits for k in [kernel_of(lib, c, make_args(c, n))]}
    combine = combine_of(lib)
    kernels[combine.name] = combine
    for name, k in kernels.items():
        code, log = cuda_device.compile_cubin(k.source.decode(), abi.kernel_options(k), ARCH)
        print(name.decode(), len(code), re.findall(r"Used \d+|\d+ bytes spill stores", log), k.lds_bytes, flush=True)
        with open(os.path.join(folder, name.decode() + ".cubin"), "wb") as f:
            f.write(code)


class Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_int * 15)]


class Config(ctypes.Structure):
    _fields_ = [("dims", ctypes.c_uint * 7), ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("n", ctypes.c_uint)]


class Device:
    def __init__(self, folder, lib):
        import torch
        self.torch, self.folder, self.lib = torch, folder, lib
        self.cuda, self.functions = ctypes.CDLL("libcuda.so.1"), {}
        torch.zeros(1, device="cuda")

    def check(self, status, what):
        if status:
            raise RuntimeError(f"{what}: {status}")

    def function(self, kernel):
        name = kernel.name.decode()
        if name not in self.functions:
            with open(os.path.join(self.folder, name + ".cubin"), "rb") as f:
                code = f.read()
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            self.check(self.cuda.cuModuleLoadData(ctypes.byref(module), code), "load " + name)
            self.check(self.cuda.cuModuleGetFunction(ctypes.byref(function), module, kernel.entry), "entry")
            self.check(self.cuda.cuFuncSetAttribute(function, 8, kernel.lds_bytes), "shared memory")
            self.functions[name] = function
        return self.functions[name]

    def launch(self, kernel, args, overlaps=False):
        grid = abi.kernel_grid(self.lib, kernel, args, SMS)
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        attribute = Attribute(6, 0, 1)
        config = Config((ctypes.c_uint * 7)(*grid, *kernel.block, kernel.lds_bytes),
                        self.torch.cuda.current_stream().cuda_stream, ctypes.addressof(attribute), int(overlaps))
        self.check(self.cuda.cuLaunchKernelEx(ctypes.byref(config), self.function(kernel), parameters, None), "launch")


def tensor_of(t):
    return abi.STRUCTS["abi_tensor"](t.data_ptr(), *t.stride())


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

    def launcher(self, splits, overlaps):
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
        keep = [kernel, args]
        if args[0].n_splits > 1:
            n = args[0].n_splits
            acc = torch.full((n, hq, rows, c.d), math.nan, device="cuda")
            lse = torch.full((n, hq, rows), math.nan, device="cuda")
            for a in args:
                a.o_acc, a.lse_acc = acc.data_ptr(), lse.data_ptr()
            x = abi.CombineArgs()
            x.o_parts = abi.STRUCTS["abi_tensor"](acc.data_ptr(), c.rows * c.d, c.d, rows * c.d, 1)
            x.o_parts_stride_split = hq * rows * c.d
            x.lse_parts = abi.STRUCTS["abi_rows"](lse.data_ptr(), c.rows, rows, 1)
            x.lse_parts_stride_split = hq * rows
            x.o, x.sequences, x.n_splits, x.nhead_q, x.hdim_v = args[0].o, args[0].sequences, n, hq, c.d
            x.o_parts_dtype, x.o_dtype = abi.F32, abi.BF16
            combine = combine_of(self.device.lib)
            keep += [acc, lse, x]

        def launch(i, combines=True, keep=keep):
            self.device.launch(kernel, args[i % len(args)])
            if combine is not None and combines:
                self.device.launch(combine, x, overlaps)
        return launch, args[0].n_splits, kernel

    def error(self, i):
        """Of what the launch on set i left in o, the largest difference."""
        c, torch = self.case, self.device.torch
        k, v = self.sets[i % len(self.sets)]
        if c.page:
            k, v = (x.view(torch.uint8 if c.dtype == abi.E4M3 else x.dtype)[self.table.long()].view(x.dtype).reshape(c.b, c.n, c.hk, c.d) for x in (k, v))
        worst = 0
        for b in range(0, c.b, max(1, c.b // 4)):
            q, key, value = self.q[b].float(), k[b].float(), v[b].float()
            if c.dtype == abi.E4M3:
                q, key, value = (x * f[b][None, :, None] for x, f in zip((q, key, value), self.factors))
            q = q.reshape(c.rows, c.hk, c.group, c.d)
            s = torch.einsum("rhgd,nhd->hgrn", q, key) * c.d ** -0.5
            if c.causal:
                row = torch.arange(c.rows, device="cuda")[:, None] + c.n - c.rows
                s.masked_fill_(torch.arange(c.n, device="cuda")[None, :] > row, -math.inf)
            want = torch.einsum("hgrn,nhd->rhgd", s.softmax(-1), value).reshape(c.rows, -1, c.d)
            worst = max(worst, (self.o[b].float() - want).abs().max().item() / want.abs().max().item())
        return worst


def time_us(torch, launch, per_graph, reps=7):
    """Medians of one launch among `per_graph` in a row."""
    graph = torch.cuda.CUDAGraph()
    for i in range(3):
        launch(i)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for i in range(per_graph):
            launch(i)
    times = []
    for _ in range(reps + 1):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        graph.replay()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b) * 1e3 / per_graph)
    return sorted(times[1:])[reps // 2]


def copy_rate(torch):
    """GB/s that a large copy reads and writes."""
    x = torch.empty(1 << 30, device="cuda", dtype=torch.uint8)
    y = torch.empty_like(x)
    times = []
    for _ in range(8):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        y.copy_(x)
        a.record()
        for _ in range(4):
            y.copy_(x)
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b) / 4)
    return 2 * x.numel() / sorted(times)[4] / 1e6


def cases():
    """With the splits that plans choose, and others."""
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


def run(folder, lib, chosen):
    device = Device(folder, lib)
    torch, failed, before = device.torch, 0, None
    copy = copy_rate(torch)
    print(f"copy {copy:.0f} GB/s")
    for case in chosen:
        key = (case.b, case.hk, case.group, case.n, case.d, case.rows, case.page, case.dtype)
        if before is None or key != before[0]:
            before = None
            torch.cuda.empty_cache()
            before = (key, Problem(device, case))
        problem = before[1]
        problem.case = case
        for splits in case.splits:
            texts = []
            floor = case.bytes() / copy / 1e3
            per_graph = max(4, min(24, int(1500 / (floor + 5))))
            for overlaps in (False, True):
                launch, n, kernel = problem.launcher(splits, overlaps)
                problem.o.fill_(math.nan)
                launch(1)
                torch.cuda.synchronize()
                error = problem.error(1)
                first = problem.o.clone()
                launch(1)
                torch.cuda.synchronize()
                same = torch.equal(first.view(torch.int16), problem.o.view(torch.int16))
                bad = not (error < 1.5e-2 and same)
                failed += bad
                us = time_us(torch, launch, per_graph)
                alone = time_us(torch, lambda i, f=launch: f(i, False), per_graph) if n > 1 else 0
                bar = case.bytes() / (0.95 * copy * 1e3) + 4
                texts.append(f"{us:.1f} us" + (f" ({alone:.1f} alone)" if alone else "") + f" {us / bar:.2f}" + (" FAIL" if bad else ""))
            print(f"{case} splits {n}: {' | '.join(texts)} of {bar:.1f} us, err {error:.1e}", flush=True)
    print(f"{failed} failed")
    return failed


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("build", "run"))
    parser.add_argument("folder")
    parser.add_argument("--match", default="")
    a = parser.parse_args()
    lib = abi.load_library()
    chosen = [c for c in cases() if a.match in str(c)]
    if a.what == "build":
        build(a.folder, lib, chosen)
    else:
        sys.exit(run(a.folder, lib, chosen) != 0)


if __name__ == "__main__":
    main()
