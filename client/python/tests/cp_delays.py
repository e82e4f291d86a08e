# SPDX-License-Identifier: MIT
"""model.py against schedules.py: ranks whose messages take as long as a link says, by a clock of the test's.

    torchrun --nproc-per-node 2 cp_delays.py OUT          kernels take what a table says, too: how schedules overlap is what is judged
    torchrun --nproc-per-node 2 cp_delays.py OUT --real   the kernels are real, each rank and its daemon on a core of its own, measured
                                                          in turn with what is predicted from them

Results are the same as without delays; OUT/RANK.json has (what, model's seconds, measured seconds) of each.
"""
from __future__ import annotations

import json
import os
import pathlib
import statistics
import sys
import time

BUILD = pathlib.Path(os.environ.get("FMHA_BUILD", pathlib.Path(__file__).resolve().parents[3] / "build/release"))
sys.path.insert(0, str(BUILD / "client/python"))
REAL = "--real" in sys.argv
if REAL:
    core = sorted(os.sched_getaffinity(0))[int(os.environ["RANK"])]
    os.sched_setaffinity(0, {core})
    os.environ.pop("FMHAD_SOCKET", None)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import fmha  # noqa: E402
from fmha.torch import cp  # noqa: E402
from fmha.torch.cp import groups, local, measure, model  # noqa: E402


class Delayed:
    """Work that is over no sooner than a moment."""

    def __init__(self, works, moment):
        self.works, self.moment = works, moment

    def wait(self):
        for work in self.works:
            work.wait()
        time.sleep(max(0.0, self.moment - time.perf_counter()))


class Network:
    """torch.distributed on a link that takes one message after the other."""

    def __init__(self, link):
        self.link, self.free = link, 0.0

    def __getattr__(self, name):
        return getattr(dist, name)

    def _after(self, seconds):
        self.free = max(self.free, time.perf_counter()) + seconds
        return self.free

    def _collective(self, operation, whole, *arguments, group, async_op):
        n = dist.get_world_size(group)
        moment = self._after(self.link.collective(n, whole.numel() * whole.element_size()))
        return Delayed([operation(*arguments, group=group, async_op=async_op)], moment)

    def all_gather_into_tensor(self, to, mine, **said):
        return self._collective(dist.all_gather_into_tensor, to, to, mine, **said)

    def all_to_all_single(self, to, mine, **said):
        return self._collective(dist.all_to_all_single, to, to, mine, **said)

    def batch_isend_irecv(self, ops):
        sent = [op.tensor for op in ops if op.op is dist.isend]
        moment = self._after(sum(self.link.message(t.numel() * t.element_size()) for t in sent))
        return [Delayed(dist.batch_isend_irecv(ops), moment)]


class Kernels:
    """In place of local._run_call: as long as the machine says for the pairs that a call sees; computes nothing."""

    def __init__(self, machine):
        self.machine = machine

    def __call__(self, op, problem, call, of_rows, of_keys, rows_last, fixed, state):
        heads, hdim = of_rows["q"].shape[-2:]
        pairs = 0
        for p in call.pieces:
            n_q, n_k = p.q1 - p.q0, p.k1 - p.k0
            pairs += n_q * n_k - (n_q * (n_q - 1) // 2 if p.right == 0 else 0)
        flops = 4.0 * pairs * heads * hdim * of_rows["q"][0, ..., 0, 0].numel() * (1 if op == "forward" else 2.5)
        time.sleep(self.machine.kernel(op, flops))


def run(problem, kind, group, tensors, rounds=3):
    """(forward, backward) seconds, the slowest rank's: the least, since what disturbs a clock only adds; of real kernels the median."""
    shares, mine, g = problem[0], [t.requires_grad_() for t in tensors[:3]], tensors[3]
    found = []
    for _ in range(rounds):
        dist.barrier()
        start = time.perf_counter()
        o = cp.attention(*mine, shares=shares, cp_comm_type=kind, causal=True, group=group, **problem[1])
        middle = time.perf_counter()
        torch.autograd.grad(o, mine, g)
        slowest = torch.tensor([middle - start, time.perf_counter() - middle], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        found.append(slowest.tolist())
    return [statistics.median(t) if REAL else min(t) for t in zip(*found)]


def main():
    out = pathlib.Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    levels = cp.two_level(2) if n == 4 else None
    found = []
    if REAL:
        fmha.start(config={"devices": [{"backend": "cpu", "threads": 1}]})
    rows, heads, kv_heads, hdim = (1024, 8, 4, 64) if REAL else (512, 8, 4, 16)
    job = model.Job(rows, heads, kv_heads, hdim, element=4)
    flops = job.forward_flops() / n
    link = model.Link(4e-3, 1 / 40e6) if REAL else model.Link(20e-3, 1 / 1e6)
    shares = cp.head_tail(rows, n)
    torch.manual_seed(rank)
    tensors = [torch.randn(1, rows // n, h, hdim) for h in (heads, kv_heads, kv_heads, heads)]
    kinds = ["all_gather", "a2a", "p2p"] + ["a2a+p2p", "a2a+all_gather"] * (n == 4)
    for speed in (1.0,) if REAL else (2.0, 12.0):
        # A call of half the work takes half the time, and a little.
        table = tuple((flops * x, (0.05 * x + 0.002) * speed) for x in (1 / 32, 1 / 8, 1 / 2, 2.0))
        backward = tuple((2.5 * f, 2.5 * t) for f, t in table)
        machine = model.Machine("test", link, link, table, backward, 1e12, n)
        if not REAL:
            local._run_call = Kernels(machine)
        for kind in kinds:
            for attempt in range(3 if REAL else 1):
                if REAL:  # measured now: the machine may be another one in a minute
                    groups.dist = dist
                    lengths = [rows // 8, rows // 4, rows // 2, rows]
                    dist.barrier()
                    tables = measure.kernels(torch.device("cpu"), lengths, heads, kv_heads, hdim, torch.float32)
                    machine = model.Machine("test", link, link, *tables, measure.copy_rate(torch.device("cpu")), n)
                choices = model.choices(machine, job, n, [kind])
                said = next(c for c in choices if c.inner in (1, n if kind == "a2a" else 2))
                chunks = torch.tensor(said.chunks)
                dist.broadcast(chunks, 0)
                groups.dist = Network(link)
                measured = run((shares, {"chunks": int(chunks)}), kind, levels if "+" in kind else None, tensors)
                groups.dist = dist
                for what, a, b in zip(("forward", "backward"), (said.forward, said.backward), measured):
                    found.append((f"{kind}, {what}, speed {speed}, {attempt}", a, b))
    (out / f"{rank}.json").write_text(json.dumps(found))
    if rank == 0:
        for name, a, b in found:
            print(f"{name:40} model {a * 1e3:9.2f} ms, measured {b * 1e3:9.2f}, {a / b:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
