# SPDX-License-Identifier: MIT
"""How long attention over shared rows takes, from a machine's latency, bandwidth and kernel times; which schedule is fastest.

Seconds and bytes. A message between two ranks costs alpha + bytes * beta; a collective of n ranks is n - 1 of them one behind the other,
as rings and pairwise exchanges are. Kernel times are measured ones, between which and beyond which the time a FLOP is read off a line in
logarithms. What overlaps in schedules.py overlaps here, and nothing else does.
"""
from __future__ import annotations

import dataclasses
import json
import math
from typing import NamedTuple


class Link(NamedTuple):
    alpha: float  # seconds a message
    beta: float  # seconds a byte, of one rank

    def message(self, n_bytes: float) -> float:
        return self.alpha + n_bytes * self.beta

    def collective(self, n: int, n_bytes: float) -> float:
        """@n ranks, each of which sends and gets @n_bytes in @n blocks, its own among them: all_gather, all_to_all, reduce_scatter."""
        return 0.0 if n == 1 else (n - 1) * self.message(n_bytes / n)


@dataclasses.dataclass(frozen=True)
class Machine:
    """near, far: links within a host and between hosts. forward, backward: ((FLOP of a call, seconds), ...), rising. copy: bytes a second
    that are read and written by what is no attention."""

    name: str
    near: Link
    far: Link
    forward: tuple
    backward: tuple
    copy: float
    ranks_a_host: int = 8

    @staticmethod
    def read(path) -> Machine:
        with open(path) as file:
            d = json.load(file)
        tables = {k: tuple(map(tuple, d[k])) for k in ("forward", "backward")}
        return Machine(d["name"], Link(*d["near"]), Link(*d["far"]), copy=d["copy"], ranks_a_host=d.get("ranks_a_host", 8), **tables)

    def write(self, path) -> None:
        with open(path, "w") as file:
            json.dump(dataclasses.asdict(self), file, indent=1)
            file.write("\n")

    def kernel(self, which: str, flops: float) -> float:
        """Seconds of one call."""
        return 0.0 if flops <= 0 else _on_line(getattr(self, which), flops)


def _on_line(table, flops: float) -> float:
    """Between two measured sizes on the line through both in logarithms; below the smallest as long as that one takes at least in part,
    above the largest at its speed."""
    if flops >= table[-1][0]:
        return table[-1][1] * flops / table[-1][0]
    if flops <= table[0][0]:
        if len(table) == 1:
            return table[0][1] * flops / table[0][0]
        rate = (table[1][1] - table[0][1]) / (table[1][0] - table[0][0])
        return max(table[0][1] - max(rate, 0.0) * (table[0][0] - flops), table[0][1] * flops / table[0][0])
    for (x0, y0), (x1, y1) in zip(table, table[1:]):
        if x0 <= flops <= x1:
            share = math.log(flops / x0) / math.log(x1 / x0)
            return y0 * (y1 / y0) ** share
    raise AssertionError("not rising")


class Job(NamedTuple):
    """What is computed. document: length of the packed documents, 0: one sequence."""

    rows: int
    heads: int = 64
    kv_heads: int = 8
    hdim: int = 128
    batch: int = 1
    causal: bool = True
    document: int = 0
    element: int = 2  # bytes

    def pairs(self) -> float:
        length = min(self.document or self.rows, self.rows)
        return self.batch * self.rows * length / (2 if self.causal else 1)

    def travels(self, ranks: int) -> bool:
        """Whether documents are so long that shares.balanced() cuts them."""
        return not self.document or self.document * 4 * ranks > self.rows

    def forward_flops(self) -> float:
        return 4.0 * self.pairs() * self.heads * self.hdim

    def backward_flops(self) -> float:
        return 2.5 * self.forward_flops()


class Choice(NamedTuple):
    """kind: cp_comm_type. inner: ranks that exchange heads. chunks: of all_gather."""

    kind: str
    inner: int
    chunks: int
    forward: float
    backward: float
    memory: float  # bytes a rank needs beside its own rows

    @property
    def total(self) -> float:
        return self.forward + self.backward

    def rate(self, job: Job, ranks: int) -> float:
        """TFLOP/s a rank."""
        return (job.forward_flops() + job.backward_flops()) / self.total / ranks / 1e12


def _link(machine: Machine, n: int, spread: int) -> Link:
    """Of @n ranks that lie @spread apart: far as soon as two of them are on different hosts."""
    return machine.near if (n - 1) * spread < machine.ranks_a_host else machine.far


class _Local(NamedTuple):
    """A rank's part after heads were exchanged: rows * batch, heads; and the ranks that share keys."""

    rows: float
    heads: float
    kv_heads: float
    ranks: int


def _keys(job: Job, part: _Local, element: float) -> float:
    """Bytes of K and V of a rank's own rows, if others need them."""
    return 2 * job.travels(part.ranks) * part.rows * part.kv_heads * job.hdim * element


def _pieces(job: Job) -> int:
    """Calls of a rank on all keys: head and tail."""
    return 2 if job.causal and not job.document else 1


class _Time:
    """One rank's clock, and its link, which takes one message after the other."""

    def __init__(self):
        self.now = self.free = 0.0

    def send(self, seconds: float) -> float:
        """When what is sent now has arrived."""
        self.free = max(self.free, self.now) + seconds
        return self.free

    def wait(self, moment: float) -> None:
        self.now = max(self.now, moment)


def _gathering(chunks: int, gather: float, compute: float, reduce: float) -> float:
    """AllGather's loop: the next chunk comes, and the last one's sums go, while one is computed."""
    t = _Time()
    coming, going = t.send(gather), 0.0
    for i in range(chunks):
        found = coming
        if i + 1 < chunks:
            coming = t.send(gather)
        t.wait(found)
        t.now += compute
        if reduce:
            t.wait(going)
            going = t.send(reduce)
    t.wait(going)
    return t.now


def _turning(n: int, message: float, compute: float, sums: float) -> float:
    """Ring's loop: keys go on while they are computed on, their sums a step later."""
    t, going, coming = _Time(), 0.0, 0.0
    for step in range(n):
        if step + 1 < n:
            coming = t.send(message)
        t.now += compute
        if sums and n > 1:
            t.wait(going)
            going = t.send(sums)
        if step + 1 < n:
            t.wait(coming)
    t.wait(going)
    return t.now


def _gather(machine, job, part, link, chunks, ranks):
    """(forward, backward) of all_gather."""
    n, calls = part.ranks, _pieces(job)
    own = _keys(job, part, job.element) / chunks
    gather = 2 * link.collective(n, n * own / 2) if own else 0.0
    order = 2 * n * own / machine.copy if n > 1 else 0.0
    flops = [f / ranks / chunks / calls for f in (job.forward_flops(), job.backward_flops())]
    forward = _gathering(chunks, gather, order + calls * machine.kernel("forward", flops[0]), 0.0)
    wide = 4 / job.element
    reduce = 2 * link.collective(n, n * own / 2 * wide) if n > 1 and own else 0.0
    # Gradients are added in float32 (read and written by each call), put in ranks' order and added again by their owner.
    sums = (2 * calls * wide + calls + 3 * wide) * n * own / machine.copy
    backward = _gathering(chunks, gather, order + sums + calls * machine.kernel("backward", flops[1]), reduce)
    return forward, backward


def _ring(machine, job, part, link, ranks):
    """(forward, backward) of p2p."""
    n = part.ranks
    own = _keys(job, part, job.element)
    steps = n if own else 1  # keys that nobody else needs
    rows = part.rows * part.heads * job.hdim
    flops = job.forward_flops() / ranks / steps, job.backward_flops() / ranks / steps
    message, sums = (2 * link.message(own / 2 * wide) if own else 0.0 for wide in (1, 4 / job.element))
    merge = rows * (job.element + 4 + 3 * 4) / machine.copy
    forward = _turning(steps, message, machine.kernel("forward", flops[0]) + merge, 0.0)
    add = (own * 4 / job.element * 3 + rows * (4 * 2 + job.element)) / machine.copy
    return forward, _turning(steps, message, machine.kernel("backward", flops[1]) + add, sums)


def _heads_exchange(machine, job, ranks, inner):
    """(forward, backward) of a2a over @inner ranks."""
    if inner == 1:
        return 0.0, 0.0
    link, rows = _link(machine, inner, 1), job.rows * job.batch / ranks
    repeats = max(1, inner // job.kv_heads)
    q, kv = (rows * h * job.hdim * job.element for h in (job.heads, job.kv_heads * repeats))
    moved = link.collective(inner, q) * 2 + link.collective(inner, kv) * 2
    copies = (2 * q + 2 * kv) * 4 / machine.copy  # into blocks and out of them
    return moved + copies + link.collective(inner, rows * job.heads * 4), moved + copies  # LSE goes back, too


def choices(machine: Machine, job: Job, ranks: int, kinds=None) -> list:
    """All schedules and degrees that this job can have, the fastest first."""
    found = []
    for inner in (d for d in range(1, ranks + 1) if ranks % d == 0):
        if job.heads % inner or max(inner, job.kv_heads) % min(inner, job.kv_heads):
            continue
        if 1 < inner < ranks and inner > machine.ranks_a_host:
            continue
        outer = ranks // inner
        kv_heads = max(1, job.kv_heads // inner)
        part = _Local(job.rows * job.batch / outer, job.heads / inner, kv_heads, outer)
        link = _link(machine, outer, inner)
        exchanged = _heads_exchange(machine, job, ranks, inner)
        for name in ("all_gather", "p2p") if outer > 1 else ("all_gather",):
            # Keys that nobody else needs do not go around, and are computed as all_gather would.
            turns = name == "p2p" and job.travels(outer)
            kind = name if inner == 1 else "a2a" if outer == 1 else f"a2a+{name}"
            if kinds is not None and kind not in kinds:
                continue
            own = _keys(job, part, job.element)
            if turns:
                times, memory, chunks = _ring(machine, job, part, link, ranks), own * (2 + 2 * 4 / job.element), 1
            else:
                counts = [1] if outer == 1 else [c for c in range(1, 5) if kv_heads % c == 0]
                chunks = min(counts, key=lambda c: sum(_gather(machine, job, part, link, c, ranks)))
                times = _gather(machine, job, part, link, chunks, ranks)
                memory = outer * own / chunks * (2 + 2 * 4 / job.element)
            if inner > 1:
                memory += 2 * part.rows * part.heads * job.hdim * job.element * 2
            found.append(Choice(kind, inner, chunks, times[0] + exchanged[0], times[1] + exchanged[1], memory))
    return sorted(found, key=lambda c: c.total)


def _measured(factor: float, *rows) -> tuple:
    """A table from (batch, length, TFLOP/s) of causal attention with 16 heads of 128."""
    found = []
    for batch, length, rate in rows:
        flops = factor * Job(length, 16, 16, 128, batch).forward_flops()
        found.append((flops, flops / rate / 1e12))
    return tuple(found)


# Kernels and copies as docs/speed.md has measured them on one H200, bfloat16, causal. The links are assumed: four fifths of a rank's share of
# NVLink, and of a 400 Gbit/s adapter for each rank.
H200 = Machine(
    "H200, 8 a host; links assumed, 350 GB/s within a host, 40 GB/s a rank between hosts", Link(8e-6, 1 / 350e9), Link(16e-6, 1 / 40e9),
    _measured(1.0, (32, 512, 330), (16, 1024, 474), (8, 2048, 583), (4, 4096, 633), (2, 8192, 666), (1, 16384, 705)),
    _measured(2.5, (16, 512, 196), (4, 2048, 425), (2, 8192, 589), (1, 16384, 618)), 4.27e12)
