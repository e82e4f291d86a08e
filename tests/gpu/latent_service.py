#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Multi-head latent attention beside FlashMLA and FlashAttention-3, on one card and in one process.

    FMHA_BIN=... python3 tests/gpu/latent_service.py [--peers FOLDER] [--sparse]

FOLDER is the root of vLLM's wheel (vllm/_flashmla_C.abi3.so, vllm/vllm_flash_attn). Results are compared with float64 for a small
problem of each kind, and among the libraries for all. Times are of CUDA graphs, taken in turns; the median of rounds, us.
"""
import argparse
import importlib.util
import math
import os
import statistics
import sys
import types

import torch

DENSE = [(128, 16, 1024), (2, 16, 1024), (32, 16, 8192), (64, 128, 4096), (4, 128, 32768), (1, 128, 65536)]
SPARSE = [(2, 128, 8192), (64, 128, 8192), (64, 64, 8192), (64, 16, 8192)]  # 2,048 keys of them a row
PAGE, LATENT, TURNING, TOPK, ROUNDS = 64, 512, 64, 2048, 9
SCALE = 1 / math.sqrt(192)


def load_peers(folder):
    """name -> function(problem), of what the folder has."""
    found = {}
    if not folder:
        return found
    for name, place in (("vllm", "vllm"), ("vllm.vllm_flash_attn", "vllm/vllm_flash_attn")):
        module = types.ModuleType(name)
        module.__path__ = [os.path.join(folder, place)]
        sys.modules[name] = module
    for name, file in (("_flashmla_C", "vllm/_flashmla_C.abi3.so"), ("_flashmla_extension_C", "vllm/_flashmla_extension_C.abi3.so")):
        try:
            spec = importlib.util.spec_from_file_location(name, os.path.join(folder, file))
            spec.loader.exec_module(importlib.util.module_from_spec(spec))
        except (ImportError, OSError, AttributeError) as error:
            try:
                torch.ops.load_library(os.path.join(folder, file))
            except OSError:
                print(f"{name}: {error}")
    found["FlashMLA"] = flashmla
    try:
        from vllm.vllm_flash_attn import flash_attn_interface

        found["FA3"] = lambda p: fa3(flash_attn_interface, p)
    except ImportError as error:
        print("FlashAttention-3:", error)
    return found


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


def flashmla(p):
    ops = torch.ops._flashmla_C
    if not p.topk:
        return lambda: ops.dense_decode_fwd(p.q, p.cache, LATENT, p.used, p.table, SCALE, True, None, None, None)[0]
    return lambda: ops.sparse_prefill_fwd(p.q[:, 0], p.cache.flatten(0, 1), p.indices, SCALE, LATENT, None, None, None)[0][:, None]


def fa3(interface, p):
    if p.topk:
        return None
    q, cache = p.q[:, 0], p.cache
    return lambda: interface.flash_attn_varlen_func(
        q=q[..., LATENT:], k=cache[..., LATENT:], v=cache[..., :LATENT], q_v=q[..., :LATENT], max_seqlen_q=1, cu_seqlens_q=p.rows,
        max_seqlen_k=p.keys, seqused_k=p.used, block_table=p.table, softmax_scale=SCALE, causal=True, fa_version=3)[:, None]


def captured(function):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(5):
            function()
    return graph


def in_turns(graphs):
    times = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            start, end = torch.cuda.Event(True), torch.cuda.Event(True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1e3 / 5)
    return {name: statistics.median(values) for name, values in times.items()}


def measure(p, libraries):
    functions, failed = {}, 0
    for name, make in libraries.items():
        try:
            function = make(p)
            if function is None:
                continue
            worst = max((function()[b, 0].double() - p.exact(b)).abs().max().item() for b in range(min(p.batch, 2)))
            functions[name] = captured(function)
        except Exception as error:  # noqa: BLE001: a library that lacks a case is one column without a number
            print(f"  {name}: {type(error).__name__}: {str(error).splitlines()[0][:150]}")
            failed += name == "fmhad"
            continue
        if worst > 2e-2:
            print(f"  {name}: off by {worst:.1e}")
            failed += name == "fmhad"
    times = in_turns(functions)
    best = min((t for name, t in times.items() if name != "fmhad"), default=None)
    ratio = f"{best / times['fmhad']:.2f}" if best and "fmhad" in times else ""
    print(f"{'chosen ' if p.topk else ''}{p.batch} x {p.heads} x {p.keys}: "
          + ", ".join(f"{name} {t:.1f} us ({p.flop() / t / 1e6:.0f} TFLOP/s)" for name, t in times.items()) + f"  {ratio}", flush=True)
    return failed


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", default=os.environ.get("FMHA_PEERS", ""), help="a folder with vLLM's wheel")
    parser.add_argument("--sparse", action="store_true", help="keys by indices, too")
    args = parser.parse_args()
    libraries = {"fmhad": ours, **load_peers(args.peers)}
    failed = 0
    for shape in DENSE:
        failed += measure(Problem(*shape), libraries)
    for shape in SPARSE if args.sparse else []:
        failed += measure(Problem(*shape, indices=TOPK), libraries)
    return failed


if __name__ == "__main__":
    sys.exit(main())
