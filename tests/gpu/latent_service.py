#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Multi-head latent attention as a caller has it beside FlashMLA and FlashAttention-3, on one card and in one process.

    FMHA_BIN=... [FMHA_PEERS=...] python3 tests/gpu/latent_service.py [--match TEXT] [--cache DIR] [--ahead]

The other libraries are those of libraries.py. Of each library's results two sequences are compared with float64. Times are of CUDA
graphs, taken in turns, us; the kernels by themselves are latent.py's. FlashMLA has its heads by 64 where keys are chosen, and plans
once for latents of fp8, as a server's layers share it. One table comes last: of the better other library, and of what a copy of the
keys' bytes takes. --ahead: fmhad's kernels are compiled into the cache, and nothing is measured.
"""
import argparse
import dataclasses
import math
import os
import random
import sys

import torch

import libraries
from gpu_timer import compare_graphs, copy_rate
from latent import encode

PAGE, LATENT, TURNING, TOPK, LAUNCHES = 64, 512, 64, 2048, 5
SCALE = 1 / math.sqrt(192)


@dataclasses.dataclass(frozen=True)
class Shape:
    batch: int
    heads: int
    keys: int  # that a table has room for
    shortest: int = 0  # lengths are drawn from here on, up to `longest`; 0: all keys
    longest: int = 0
    topk: int = 0  # keys that a row has chosen
    fp8: bool = False

    def __str__(self):
        words = ["fp8"] * self.fp8 + [f"{self.topk:,} chosen"] * (self.topk > 0)
        words += [f"{self.shortest:,} to {self.longest:,}"] * (self.longest > 0)
        return f"{self.batch} x {self.heads} x {self.keys:,}" + "".join(f", {x}" for x in words)

    def lengths(self):
        draw = random.Random(5)
        if not self.longest:
            return [self.keys] * self.batch
        return [self.longest] + [draw.randint(self.shortest, self.longest) for _ in range(self.batch - 1)]


DENSE = [Shape(128, 16, 1024), Shape(2, 16, 1024), Shape(32, 16, 8192), Shape(64, 128, 4096), Shape(4, 128, 32768), Shape(1, 128, 65536)]
UNLIKE = [Shape(8, 128, 16384, 1024, 16384), Shape(32, 16, 8192, 1024, 8192), Shape(64, 16, 32768, 512, 2048)]
CHOSEN = [Shape(n, heads, 8192, topk=TOPK) for n, heads in ((2, 128), (64, 128), (64, 64), (64, 16))]
FP8 = [Shape(n, heads, 8192, topk=TOPK, fp8=True) for n, heads in ((2, 128), (64, 128), (64, 64), (64, 16))]
FP8_DENSE = [Shape(32, 16, 8192, fp8=True), Shape(64, 128, 4096, fp8=True)]


class Problem:
    def __init__(self, shape):
        generator = torch.Generator("cuda").manual_seed(shape.batch * shape.heads + shape.keys)
        self.shape, lengths, columns = shape, shape.lengths(), -(-shape.keys // PAGE)
        counts = [-(-n // PAGE) for n in lengths]
        pages = torch.randperm(sum(counts), device="cuda", generator=generator).int()

        def normal(*sizes):
            return torch.randn(sizes, device="cuda", generator=generator).to(torch.bfloat16)

        self.q, self.cache = normal(shape.batch, 1, shape.heads, LATENT + TURNING), normal(sum(counts), PAGE, 1, LATENT + TURNING)
        if shape.fp8:
            coded, _ = encode(torch, self.cache.flatten(0, 2), generator)
            self.cache = coded.view(*self.cache.shape[:3], -1)
        self.table = torch.zeros(shape.batch, columns, device="cuda", dtype=torch.int32)
        for b, n in enumerate(counts):
            self.table[b, :n] = pages[sum(counts[:b]):sum(counts[:b]) + n]
        self.lengths, self.used = lengths, torch.tensor(lengths, device="cuda", dtype=torch.int32)
        self.rows = torch.arange(shape.batch + 1, device="cuda", dtype=torch.int32)
        if shape.topk:
            chosen = torch.rand(shape.batch, shape.keys, device="cuda", generator=generator).topk(shape.topk, -1).indices
            self.indices = (self.table.gather(1, chosen // PAGE) * PAGE + chosen % PAGE).int().view(shape.batch, 1, shape.topk)

    def flop(self):
        seen = self.shape.batch * self.shape.topk or sum(self.lengths)
        return 2 * self.shape.heads * seen * (2 * LATENT + TURNING)

    def bytes(self):
        """Of the keys; those that sequences share are counted for each."""
        return self.flop() / (2 * self.shape.heads * (2 * LATENT + TURNING)) * self.cache.shape[-1] * self.cache.element_size()

    def exact(self, b):
        at = self.indices[b, 0].long() if self.shape.topk else (
            self.table[b].long()[:, None] * PAGE + torch.arange(PAGE, device="cuda")).flatten()[:self.lengths[b]]
        rows = self.cache.flatten(0, 2)[at]
        if self.shape.fp8:
            factors = rows[:, LATENT:LATENT + 16].contiguous().view(torch.float32).double()
            codes = rows[:, :LATENT].contiguous().view(torch.float8_e4m3fn).double().unflatten(1, (4, -1)) * factors[..., None]
            rows = torch.cat([codes.flatten(1), rows[:, LATENT + 16:].contiguous().view(torch.bfloat16).double()], 1)
        rows = rows.double()
        return (self.q[b, 0].double() @ rows.T * SCALE).softmax(-1) @ rows[:, :LATENT]


def ours(p):
    import fmha
    import fmha.torch

    if p.shape.topk:
        return lambda: fmha.mla_decode(p.q, p.cache, indices=p.indices, scale=SCALE)
    return lambda: fmha.mla_decode(p.q, p.cache, block_table=p.table, seqlens_k=p.used, scale=SCALE)


def flash_mla(p):
    if not p.shape.topk:
        dense = None if p.shape.fp8 else libraries.find_flash_mla()
        return dense and (lambda: dense(p.q, p.cache, LATENT, p.used, p.table, SCALE, True, None, None, None)[0])
    heads, q = p.shape.heads, p.q[:, 0]
    if heads % 64:
        q = torch.cat([q, q.new_zeros(len(q), -heads % 64, q.shape[2])], 1)
    if not p.shape.fp8:
        sparse = libraries.find_flash_mla_sparse()
        return sparse and (lambda: sparse(q, p.cache.flatten(0, 1), p.indices, SCALE, LATENT, None, None, None)[0][:, None, :heads])
    coded, plan = libraries.find_flash_mla_fp8(), [None, None]
    cache = p.cache.view(torch.float8_e4m3fn)

    def attend():
        o, _, *found = coded(q[:, None], cache, p.indices, None, None, *plan, None, None, None, LATENT, SCALE)
        plan[:] = plan if found[0] is None else found
        return o[:, :, :heads]
    return coded and attend


def flash_attention_3(p):
    attend = None if p.shape.topk or p.shape.fp8 else libraries.find_flash_attention_3()
    q, cache = p.q[:, 0], p.cache
    return attend and (lambda: attend(
        q=q[..., LATENT:], k=cache[..., LATENT:], v=cache[..., :LATENT], q_v=q[..., :LATENT], max_seqlen_q=1, cu_seqlens_q=p.rows,
        max_seqlen_k=p.shape.keys, seqused_k=p.used, block_table=p.table, softmax_scale=SCALE, causal=True, fa_version=3)[:, None])


WAYS = {"fmhad": ours, "FlashMLA": flash_mla, "FA3": flash_attention_3}


def measure(p, copy):
    """A line of the table, and how often fmhad failed. @copy: GB/s."""
    functions, failed = {}, 0
    for name, make in WAYS.items():
        try:
            function = make(p)
            if function is None:
                continue
            worst = max((function()[b, 0].double() - p.exact(b)).abs().max().item() for b in range(min(p.shape.batch, 2)))
            functions[name] = lambda i, f=function: f()
        except Exception as error:  # noqa: BLE001: a library that lacks a case is one column without a number
            print(f"  {name}: {type(error).__name__}: {str(error).splitlines()[0][:150]}", flush=True)
            failed += name == "fmhad"
            continue
        if not worst <= 2e-2:
            print(f"  {name}: off by {worst:.1e}", flush=True)
            failed += name == "fmhad"
        if name == "fmhad":  # launch behind launch, as they overlap
            first, *others = [function() for _ in range(8)]
            if not all(torch.equal(first, o) for o in others):
                print(f"  {name}: other bits", flush=True)
                failed += 1
    times = compare_graphs(torch, functions, LAUNCHES)
    best = min((t for name, t in times.items() if name != "fmhad"), default=None)
    ratio = f"{best / times['fmhad']:.2f}" if best and "fmhad" in times else ""
    of_copy = f"{p.bytes() / copy / 1e3 / times['fmhad']:.2f}" if "fmhad" in times else ""
    line = (f"{p.shape}: " + ", ".join(f"{name} {t:.1f} us ({p.flop() / t / 1e6:.0f} TFLOP/s)" for name, t in times.items())
            + f"  {ratio}, of a copy {of_copy}")
    print(line, flush=True)
    return line, failed


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--match", default="", help="shapes that have this in their line")
    parser.add_argument("--cache", help="where compiled kernels are kept")
    parser.add_argument("--ahead", action="store_true", help="compile alone")
    args = parser.parse_args()
    lines, failed = [], 0
    import fmha

    compiles = {"library_path": os.environ.get("LD_LIBRARY_PATH", "/usr/lib")} | ({"cache": args.cache} if args.cache else {})
    fmha.start(config={"tuning": {"automatic": False}, "compile": compiles}, timeout=60)
    shapes = [shape for shape in [*DENSE, *UNLIKE, *FP8_DENSE, *CHOSEN, *FP8] if args.match in str(shape)]
    if args.ahead:
        for shape in shapes:
            ours(Problem(shape))()
        return 0
    copy = copy_rate(torch)
    for shape in shapes:
        line, bad = measure(Problem(shape), copy)
        lines.append(line)
        failed += bad
    print(torch.cuda.get_device_name(), *lines, sep="\n")
    return failed


if __name__ == "__main__":
    sys.exit(main())
