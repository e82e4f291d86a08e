# SPDX-License-Identifier: MIT
"""What model.py wants to know of a machine: latency, bandwidth, kernel times, and the speed of what is no attention."""
from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist

from . import model


def _wait(device):
    if device.type != "cpu":
        torch.cuda.synchronize()


def seconds(call, device, rounds=5, n=1) -> float:
    """Median of @rounds; every rank takes part."""
    found = []
    for _ in range(rounds + 1):
        _wait(device)
        start = time.perf_counter()
        for _ in range(n):
            call()
        _wait(device)
        found.append((time.perf_counter() - start) / n)
    return statistics.median(found[1:])


def link(device, group=None, sizes=(1 << 12, 1 << 26)) -> model.Link:
    """alpha and beta of all_gather, through two sizes; the slowest rank's."""
    n = dist.get_world_size(group)
    found = []
    for size in sizes:
        mine = torch.zeros(size, dtype=torch.uint8, device=device)
        whole = mine.new_empty(n * size)
        found.append(seconds(lambda: dist.all_gather_into_tensor(whole, mine, group=group), device, n=20 if size < 1 << 20 else 3))
    times = torch.tensor(found, dtype=torch.float64, device=device)
    dist.all_reduce(times, dist.ReduceOp.MAX, group=group)
    small, large = times.tolist()
    beta = max((large - small) / (n - 1) / (sizes[1] - sizes[0]), 1e-14)
    return model.Link(max(small / (n - 1) - sizes[0] * beta, 1e-9), beta)


def kernels(device, lengths, heads=8, kv_heads=1, hdim=128, dtype=torch.bfloat16) -> tuple:
    """(forward, backward) tables of fmha's causal attention, for model.Machine."""
    from .._functions import attention

    tables = [], []
    for rows in lengths:
        q, k, v = (torch.randn(1, rows, h, hdim, device=device).to(dtype).requires_grad_() for h in (heads, kv_heads, kv_heads))
        job = model.Job(rows, heads, kv_heads, hdim)
        o = attention(q, k, v, causal=True)
        g = torch.randn_like(o)
        with torch.no_grad():
            tables[0].append((job.forward_flops(), seconds(lambda: attention(q, k, v, causal=True), device)))
        tables[1].append((job.backward_flops(), seconds(lambda: torch.autograd.grad(o, (q, k, v), g, retain_graph=True), device)))
    return tuple(map(tuple, tables))


def copy_rate(device, n=1 << 26) -> float:
    """Bytes a second that a sum in float32 reads and writes."""
    a, b = torch.zeros(n // 4, device=device), torch.ones(n // 4, device=device)
    return 3 * n / seconds(lambda: a.add_(b), device)


def machine(name, device, most=0, far=None, dtype=None) -> model.Machine:
    gpu = device.type != "cpu"
    most = most or (16384 if gpu else 1024)
    lengths = [most >> i for i in range(4, -1, -1)]
    near = link(device)
    forward, backward = kernels(device, lengths, dtype=dtype or (torch.bfloat16 if gpu else torch.float32))
    return model.Machine(name, near, far or near, forward, backward, copy_rate(device), dist.get_world_size())


def main(o) -> int:
    import os

    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if gpu else "gloo")
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    found = machine(o.name, device, o.most, model.Link(*o.far) if o.far else None)
    if dist.get_rank() == 0:
        found.write(o.out)
        print(f"{o.out}: alpha {found.near.alpha * 1e6:.1f} us, {1e-9 / found.near.beta:.1f} GB/s a rank, "
              + ", ".join(f"{f / t / 1e12:.3g}" for f, t in found.forward) + " TFLOP/s forward")
    dist.destroy_process_group()
    return 0
