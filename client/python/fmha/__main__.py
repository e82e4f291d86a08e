# SPDX-License-Identifier: MIT
"""python -m fmha: what this machine has, and whether it works. python -m fmha bench: beside torch's own attention."""
from __future__ import annotations

import argparse
import statistics
import sys
import time

import numpy as np

import fmha


def describe() -> int:
    client, torch = fmha.default_client(), _torch()
    wrong = self_test(torch)  # first: what it uses has started then
    print(f"library     {fmha.__version__}")
    print(f"daemon      {client.server} at {client.path}")
    for d in client.devices():
        print(f"device {d.index}    {d.name} ({d.backend}, {d.arch}, {d.compute_units} units, {d.memory_bytes / 2**30:.0f} GiB): {d.state}")
    if torch is None:
        print("torch       not installed: numpy arrays, by the daemon")
    else:
        where = "by local launches on torch's stream" if torch.cuda.is_available() else "none here"
        print(f"torch       {torch.__version__}; CPU tensors by the daemon, GPU tensors: {where}")
    print("self-test   " + ("passed" if not wrong else "FAILED: " + "; ".join(wrong)))
    return 1 if wrong else 0


def _torch():
    try:
        import torch
    except ImportError:
        return None
    return torch


def _formula(q, k, v):
    """Causal attention of equal lengths in float64."""
    s = np.einsum("bihd,bjhd->bhij", q, k, dtype=np.float64) * q.shape[3] ** -0.5
    s = np.where(np.tri(q.shape[1], dtype=bool), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    return np.einsum("bhij,bjhd->bihd", p / p.sum(-1, keepdims=True), v)


def self_test(torch) -> list[str]:
    """What is wrong, a sentence each."""
    rng, wrong = np.random.default_rng(1), []
    q, k, v = (rng.standard_normal((2, 70, 4, 64)).astype(np.float32) for _ in range(3))
    want = _formula(q, k, v)
    error = np.abs(fmha.attention(q, k, v, causal=True) - want).max()
    if not error < 1e-5:
        wrong.append(f"the daemon's CPU result is {error:.1e} off")
    if torch is not None and torch.cuda.is_available():
        on_gpu = [torch.from_numpy(x).to("cuda", torch.float16) for x in (q, k, v)]
        error = np.abs(fmha.attention(*on_gpu, causal=True).float().cpu().numpy() - want).max()
        if not error < 1e-2:
            wrong.append(f"the GPU's result is {error:.1e} off")
    return wrong


def bench() -> int:
    torch = _torch()
    if torch is None:
        sys.exit("fmha: bench compares with torch, which is not installed")
    import fmha.torch

    gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    shapes = [(4, 16, 2048, 128), (2, 16, 8192, 128), (64, 16, 128, 64)] if gpu else [(1, 8, 512, 64), (1, 8, 1024, 128), (8, 8, 64, 64)]
    own = torch.nn.functional.scaled_dot_product_attention
    print(f"{'batch, heads, length, hdim':32}{'':8}{'fmha ms':>10}{'torch ms':>10}{'ratio':>8}")
    for shape in shapes:
        q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
        for causal in (False, True):
            times = _in_turn([lambda f=f: f(q, k, v, is_causal=causal) for f in (fmha.torch.scaled_dot_product_attention, own)],
                             torch.cuda.synchronize if gpu else lambda: None)
            print(f"{str(shape):32}{'causal' if causal else 'full':8}{times[0]:10.3f}{times[1]:10.3f}{times[1] / times[0]:8.2f}")
    return 0


def _in_turn(calls, wait, rounds=9, n=5):
    """Median milliseconds of each, measured in turn."""
    found = [[] for _ in calls]
    for _ in range(rounds + 1):
        for times, call in zip(found, calls):
            wait()
            start = time.perf_counter()
            for _ in range(n):
                call()
            wait()
            times.append((time.perf_counter() - start) / n * 1e3)
    return [statistics.median(times[1:]) for times in found]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fmha", description=__doc__)
    parser.add_argument("command", nargs="?", choices=["bench"], help="bench: against torch's own attention, on this machine")
    parser.add_argument("--start", action="store_true", help="on a private daemon, not one that runs")
    options = parser.parse_args()
    try:
        if options.start:
            fmha.start()
        return bench() if options.command == "bench" else describe()
    except fmha.UnreachableError as error:
        sys.exit(f"fmha: {error}")


if __name__ == "__main__":
    sys.exit(main())
