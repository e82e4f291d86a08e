#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""fmhad on a GPU, end to end: a private daemon, real compiles, several client processes.

    tests/gpu/service.py [--backend cuda|hip]

Host tensors go through memfds (the worker copies them); the oracle is numpy in float64. Prints a
table; exits with 1 when anything failed. Needs numpy and msgpack; FMHA_BUILD names the build folder.
"""
import argparse
import fcntl
import json
import multiprocessing
import os
import sys
import time

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(ROOT, "tests", "lib"))
import fmha_wire  # noqa: E402
import fmhad  # noqa: E402

F_ADD_SEALS, SEAL_SEAL, SEAL_SHRINK, SEAL_GROW = 1033, 1, 2, 4


class HostDevice:
    """A device whose buffers are memfds of ours, as a GPU's worker cannot make mappable ones."""

    def __init__(self, device):
        self.device = device
        device.buffer_create = self.buffer_create

    def buffer_create(self, size):
        fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, F_ADD_SEALS, SEAL_SEAL | SEAL_SHRINK | SEAL_GROW)
        try:
            return self.device.buffer_import(fd, size)
        finally:
            os.close(fd)


def to_bf16(x):
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(x):
    return (x.astype(np.uint32) << 16).view(np.float32)


def oracle(q, k, v, causal):
    group = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, group, 2).astype(float), np.repeat(v, group, 2).astype(float)
    s = np.einsum("bihd,bjhd->bhij", q.astype(float), k) / np.sqrt(q.shape[3])
    if causal:
        i, j = np.indices(s.shape[2:])
        s = np.where(j <= i + s.shape[3] - s.shape[2], s, -np.inf)
    m = s.max(-1, keepdims=True)
    p = np.exp(s - m)
    lse = (m + np.log(p.sum(-1, keepdims=True)))[..., 0]
    return np.einsum("bhij,bjhd->bihd", p / p.sum(-1, keepdims=True), v), lse


CASES = [
    # dtype, batch, seqlen_q, seqlen_k, nhead_q, nhead_k, hdim, causal
    ("f32", 1, 64, 64, 2, 1, 64, False),
    ("f32", 2, 65, 127, 4, 2, 40, True),
    ("f16", 2, 128, 128, 4, 2, 64, False),
    ("bf16", 2, 100, 300, 8, 2, 128, True),
    ("bf16", 1, 1, 1000, 8, 2, 128, False),
    ("f16", 1, 77, 77, 3, 3, 96, True),
    ("bf16", 1, 130, 190, 2, 2, 256, False),
]


def run_case(device, case, seed):
    dtype, batch, seqlen_q, seqlen_k, nhead_q, nhead_k, hdim, causal = case
    random = np.random.default_rng(seed)
    shapes = [(batch, seqlen_q, nhead_q, hdim)] + [(batch, seqlen_k, nhead_k, hdim)] * 2
    q, k, v = (random.standard_normal(s).astype(np.float32) for s in shapes)
    if dtype == "bf16":
        wire = [to_bf16(x) for x in (q, k, v)]
        q, k, v = (from_bf16(x) for x in wire)
    else:
        wire = [x.astype({"f16": np.float16, "f32": np.float32}[dtype]) for x in (q, k, v)]
        q, k, v = (x.astype(np.float32) for x in wire)
    options = {"mask": "bottom_right", "window_right": 0} if causal else {}
    o, lse = device.forward(*wire, dtype=dtype, lse=True, **options)
    o = from_bf16(o) if dtype == "bf16" else o.astype(np.float32)
    want, want_lse = oracle(q, k, v, causal)
    bar = {"f32": 2e-5, "f16": 4e-3, "bf16": 2e-2}[dtype]
    error, lse_error = np.abs(o - want).max(), np.abs(lse - want_lse).max()
    good = error <= bar * max(1, np.abs(want).max()) and lse_error <= 2e-3
    return good, error, lse_error, device.last_plan["stages"][0]["kernel"]


def client_process(path, number, seconds, queue):
    device = fmha_wire.Client.connect(path).open_device(number)
    HostDevice(device)
    end, n, bad = time.monotonic() + seconds, 0, 0
    while time.monotonic() < end:
        good, *_ = run_case(device, CASES[n % len(CASES)], n)
        n, bad = n + 1, bad + (not good)
    queue.put((n, bad))


def daemon_of(backend):
    """With a CPU and a GPU, device 1."""
    config = fmhad.gpu_config(backend)
    return fmhad.Daemon({**config, "devices": [{"backend": "cpu"}, *config["devices"]]})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="cuda", choices=["cuda", "hip"])
    parser.add_argument("--seconds", type=float, default=10, help="of the run of four clients")
    arguments = parser.parse_args()
    failed = 0
    with daemon_of(arguments.backend) as daemon, daemon.client() as client:
        device = client.open_device(1)
        print("device:", device.info)
        HostDevice(device)
        for number, case in enumerate(CASES):
            start = time.monotonic()
            try:
                good, error, lse_error, kernel = run_case(device, case, number)
            except fmha_wire.WireError as wire_error:
                good, error, lse_error, kernel = False, float("nan"), float("nan"), str(wire_error)
            failed += not good
            print(
                f"{'ok  ' if good else 'FAIL'} {str(case):58} {time.monotonic() - start:6.2f} s"
                f"  err {error:.1e}  lse {lse_error:.1e}  {kernel}"
            )
        queue = multiprocessing.Queue()
        workers = [
            multiprocessing.Process(
                target=client_process, args=(daemon.socket, 1, arguments.seconds, queue)
            )
            for _ in range(4)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        counts = [queue.get() for _ in workers]
        bad = sum(b for _, b in counts)
        failed += bad
        print(f"4 clients, {arguments.seconds:.0f} s: {sum(n for n, _ in counts)} runs, {bad} wrong")
        status = json.loads(client.status())
        print("compile:", json.dumps(status["front"]["compile"]))
    print("failed:", failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
