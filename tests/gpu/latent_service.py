#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Multi-head latent attention as a caller has it beside FlashMLA and FlashAttention-3, on one card and in one process.

    FMHA_BIN=... [FMHA_PEERS=...] python3 tests/gpu/latent_service.py [--sparse]

The other libraries are those of libraries.py. Of each library's results two sequences are compared with float64. Times are of CUDA
graphs, taken in turns, us; the kernels by themselves are latent.py's.
"""
import argparse
import math
import sys

import torch

import libraries
from gpu_timer import compare_graphs

DENSE = [(128, 16, 1024), (2, 16, 1024), (32, 16, 8192), (64, 128, 4096), (4, 128, 32768), (1, 128, 65536)]
SPARSE = [(2, 128, 8192), (64, 128, 8192), (64, 64, 8192), (64, 16, 8192)]  # 2,048 keys of them a row
PAGE, LATENT, TURNING, TOPK, LAUNCHES = 64, 512, 64, 2048, 5
SCALE = 1 / math.sqrt(192)


class Problem:
    def __init__(self, batch, heads, keys, indices=0):
        generator = torch.Generator("cuda").manual_seed(batch * heads + keys)
        pages = batch * keys // PAGE
        self.batch, self.heads, self.keys, self.topk = batch, heads, keys, indices

        def normal(*shape):
            return torch.randn(shape, device="cuda", generator=generator).to(torch.bfloat16)

        self.q, self.cache = normal(batch, 1, heads, LATENT + TURNING), normal(pages, PAGE, 1, LATENT + TURNING)
        self.table = torch.randperm(pages, device="cuda", generator=generator).int().view(batch, -1)
        self.used = torch.full((batch,), keys, device="cuda", dtype=torch.int32)
        self.rows = torch.arange(batch + 1, device="cuda", dtype=torch.int32)
        if indices:
            chosen = torch.rand(batch, keys, device="cuda", generator=generator).topk(indices, -1).indices
            self.indices = (self.table.gather(1, chosen // PAGE) * PAGE + chosen % PAGE).int().view(batch, 1, indices)

    def flop(self):
        return 2 * self.batch * self.heads * (self.topk or self.keys) * (2 * LATENT + TURNING)

    def exact(self, b):
        if self.topk:
            rows = self.cache.flatten(0, 1)[self.indices[b, 0].long(), 0].double()
        else:
            rows = self.cache[self.table[b].long()].flatten(0, 1)[: self.keys, 0].double()
        return (self.q[b, 0].double() @ rows.T * SCALE).softmax(-1) @ rows[:, :LATENT]


def ours(p):
    import fmha
    import fmha.torch

    if p.topk:
        return lambda: fmha.mla_decode(p.q, p.cache, indices=p.indices, scale=SCALE)
    return lambda: fmha.mla_decode(p.q, p.cache, block_table=p.table, seqlens_k=p.used, scale=SCALE)


def flash_mla(p):
    if p.topk:
        sparse = libraries.find_flash_mla_sparse()
        return sparse and (lambda: sparse(p.q[:, 0], p.cache.flatten(0, 1), p.indices, SCALE, LATENT, None, None, None)[0][:, None])
    dense = libraries.find_flash_mla()
    return dense and (lambda: dense(p.q, p.cache, LATENT, p.used, p.table, SCALE, True, None, None, None)[0])


def flash_attention_3(p):
    attend = None if p.topk else libraries.find_flash_attention_3()
    q, cache = p.q[:, 0], p.cache
    return attend and (lambda: attend(
        q=q[..., LATENT:], k=cache[..., LATENT:], v=cache[..., :LATENT], q_v=q[..., :LATENT], max_seqlen_q=1, cu_seqlens_q=p.rows,
        max_seqlen_k=p.keys, seqused_k=p.used, block_table=p.table, softmax_scale=SCALE, causal=True, fa_version=3)[:, None])


WAYS = {"fmhad": ours, "FlashMLA": flash_mla, "FA3": flash_attention_3}


def measure(p):
    functions, failed = {}, 0
    for name, make in WAYS.items():
        try:
            function = make(p)
            if function is None:
                continue
            worst = max((function()[b, 0].double() - p.exact(b)).abs().max().item() for b in range(min(p.batch, 2)))
            functions[name] = lambda i, f=function: f()
        except Exception as error:  # noqa: BLE001: a library that lacks a case is one column without a number
            print(f"  {name}: {type(error).__name__}: {str(error).splitlines()[0][:150]}")
            failed += name == "fmhad"
            continue
        if worst > 2e-2:
            print(f"  {name}: off by {worst:.1e}")
            failed += name == "fmhad"
    times = compare_graphs(torch, functions, LAUNCHES)
    best = min((t for name, t in times.items() if name != "fmhad"), default=None)
    ratio = f"{best / times['fmhad']:.2f}" if best and "fmhad" in times else ""
    print(f"{'chosen ' if p.topk else ''}{p.batch} x {p.heads} x {p.keys}: "
          + ", ".join(f"{name} {t:.1f} us ({p.flop() / t / 1e6:.0f} TFLOP/s)" for name, t in times.items()) + f"  {ratio}", flush=True)
    return failed


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sparse", action="store_true", help="keys by indices, too")
    args = parser.parse_args()
    failed = 0
    for shape in DENSE:
        failed += measure(Problem(*shape))
    for shape in SPARSE if args.sparse else []:
        failed += measure(Problem(*shape, indices=TOPK))
    return failed


if __name__ == "__main__":
    sys.exit(main())
