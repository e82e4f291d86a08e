# SPDX-License-Identifier: MIT
"""What a call costs the host, and graphs: fmha beside torch's own attention, in one process, on a GPU.

    FMHAD_SOCKET=... python3 client/python/tests/gpu_speed.py
"""
import statistics
import time

import fmha.flash_attn
import fmha.torch
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

sdpa = torch.nn.functional.scaled_dot_product_attention


def host_us(calls, rounds=15, n=300):
    """Median microseconds of each callable until it returns, in turn."""
    found = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(n):
                call()
            found[name].append((time.perf_counter() - start) / n * 1e6)
    return {name: statistics.median(times) for name, times in found.items()}


def device_ms(calls, rounds=11, n=10):
    found = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            call()
            a.record()
            for _ in range(n):
                call()
            b.record()
            b.synchronize()
            found[name].append(a.elapsed_time(b) / n)
    return {name: statistics.median(times) for name, times in found.items()}


def main():
    q, k, v = (torch.randn(1, 4, 64, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    rows = [t.transpose(1, 2) for t in (q, k, v)]
    out = torch.empty_like(rows[0])
    with torch.no_grad(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        print("host us, tiny:", host_us({
            "flash_attn_func": lambda: fmha.flash_attn.flash_attn_func(*rows),
            "fmha.attention": lambda: fmha.attention(*rows, out=out),
            "fmha sdpa": lambda: fmha.torch.scaled_dot_product_attention(q, k, v),
            "torch sdpa flash": lambda: sdpa(q, k, v),
            "empty kernel": lambda: out.zero_(),
        }))
    compiled = torch.compile(fmha.torch.scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        compiled(q, k, v)
        print("host us, compiled:", host_us({"fmha": lambda: compiled(q, k, v), "operator": lambda: torch.ops.fmha.attention(
            q, k, v, None, None, None, None, None, None, "bhsd", 0, -1, -1, None, 0.0, 0.0, 0, 0, False)}))
    for shape in ((4, 16, 2048, 128), (2, 16, 8192, 128), (4, 16, 1024, 64)):
        inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
        grad = torch.randn_like(inputs[0])

        def step(f, causal):
            o = f(*inputs, is_causal=causal)
            torch.autograd.grad(o, inputs, grad)

        def own(*a, **b):
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return sdpa(*a, **b)

        for causal in (False, True):
            times = device_ms({"fmha": lambda: step(fmha.torch.scaled_dot_product_attention, causal), "flash": lambda: step(own, causal)})
            print(shape, "causal" if causal else "full", "forward and backward, ms:", times, f"{times['flash'] / times['fmha']:.2f}")
    graph_of_layers()


def graph_of_layers():
    q, k, v = (torch.randn(1, 2048, 16, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def layers(x):
        for _ in range(50):
            x = fmha.flash_attn.flash_attn_func(x, k, v, causal=True)
        return x

    with torch.no_grad():
        want = layers(q)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = layers(q)
        graph.replay()
        torch.cuda.synchronize()
        print("graph of 50 layers, same bits:", torch.equal(got, want))
        drop = lambda: fmha.torch.attention(q, k, v, dropout_p=0.5)  # noqa: E731
        drop()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            dropped = drop()
        graph.replay()
        first = dropped.clone()
        graph.replay()
        print("replays drop other elements:", not torch.equal(first, dropped))


if __name__ == "__main__":
    main()
