# SPDX-License-Identifier: MIT
"""Who has which rows of a sequence, or of a pack of sequences, and how much there is to do for each.

Rows are numbered over the whole axis, whatever lies where. A rank has intervals of them, in rising order, and its tensors hold those
rows one behind the other. All that follows (what a rank needs of whom, which mask a part has) comes from the intervals alone.
"""
from __future__ import annotations

import bisect
import collections
import functools
import heapq
import itertools
from typing import NamedTuple

import torch

from ... import _check
from ..._lib import invalid

PATCH = 32  # dropout's random numbers come in patches of 16 rows and 32 keys: cuts at multiples of it need no others


class Shares(NamedTuple):
    """Hashable, so that what follows from it is found once.

    ranks: of each rank the intervals ((begin, end), ...) of rows that it has, rising. documents: where sequences begin, and where the
    last one ends, of packed ones: cu_seqlens as a tuple; (0, rows) of one sequence.
    """

    ranks: tuple
    documents: tuple
    packed: bool = False

    @property
    def total(self) -> int:
        return self.documents[-1]

    def rows(self, rank: int) -> int:
        return sum(end - begin for begin, end in self.ranks[rank])

    @property
    def most(self) -> int:
        return max(map(self.rows, range(len(self.ranks))))

    def take(self, tensor: torch.Tensor, rank: int, dim: int | None = None) -> torch.Tensor:
        """@rank's rows of a whole tensor: inputs, labels, positions. @dim: of the rows; None: 0 of packed ones, else 1."""
        dim = self._dim(dim)
        if tensor.shape[dim] != self.total:
            raise invalid(f"dimension {dim} has {tensor.shape[dim]} rows: the shares are of {self.total}", "shares")
        parts = self.ranks[rank] or ((0, 0),)
        return torch.cat([tensor.narrow(dim, begin, end - begin) for begin, end in parts], dim)

    def put(self, parts, dim: int | None = None) -> torch.Tensor:
        """The whole tensor of what each rank has: take() backwards."""
        whole = torch.cat(tuple(parts), self._dim(dim))
        return whole.index_select(self._dim(dim), torch.tensor(whole_order(self), dtype=torch.int64, device=whole.device))

    def _dim(self, dim):
        return dim if dim is not None else 0 if self.packed else 1

    def work(self, causal: bool = True, window: tuple = (-1, -1)) -> list:
        """Of each rank, how many pairs of a row and a key that it sees there are."""
        return [sum(visible(self.documents, begin, end, causal, window) for begin, end in intervals) for intervals in self.ranks]


def _order(ranks) -> list:
    """Where each row, in rising order, lies in the ranks' rows one rank behind the other."""
    at, places = 0, []
    for intervals in ranks:
        for begin, end in intervals:
            places.append((begin, at, end - begin))
            at += end - begin
    return [i for _, start, n in sorted(places) for i in range(start, start + n)]


@functools.lru_cache(maxsize=64)
def whole_order(shares: Shares) -> tuple:
    return tuple(_order(shares.ranks))


def by_document(documents: tuple, intervals) -> dict:
    """The parts of @intervals, (begin, end, where in a tensor), by the number of the document that they are in."""
    found: dict = {}
    for begin, end, at in intervals:
        d = bisect.bisect_right(documents, begin) - 1
        while begin < end:
            stop = min(end, documents[d + 1])
            if stop > begin:
                found.setdefault(d, []).append(Held(begin, stop, at))
                at += stop - begin
                begin = stop
            d += 1
    return found


class Held(NamedTuple):
    """An interval of rows, and where in a tensor it begins."""

    begin: int
    end: int
    at: int


def held(intervals) -> tuple:
    """Intervals that lie one behind the other."""
    at, found = 0, []
    for begin, end in intervals:
        found.append(Held(begin, end, at))
        at += end - begin
    return tuple(found)


class Travel(NamedTuple):
    """Which keys others than their owner need. shares: of the documents that several ranks have. going, staying: of each rank what it has
    of those, and of the others, where its tensors hold them."""

    shares: Shares
    going: tuple
    staying: tuple

    def take(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """@rank's rows that travel."""
        going = self.going[rank]
        if not self.staying[rank]:
            return tensor
        return torch.cat([tensor[at : at + end - begin] for begin, end, at in going] or [tensor[:0]])

    def put(self, into: torch.Tensor, rows: torch.Tensor, rank: int) -> None:
        """take() backwards."""
        first = 0
        for begin, end, at in self.going[rank]:
            into[at : at + end - begin] = rows[first : first + end - begin]
            first += end - begin


@functools.lru_cache(maxsize=256)
def travel(shares: Shares) -> Travel:
    parts = [by_document(shares.documents, held(intervals)) for intervals in shares.ranks]
    owners = collections.Counter(d for of_rank in parts for d in of_rank)
    going = tuple(tuple(h for d, some in of_rank.items() if owners[d] > 1 for h in some) for of_rank in parts)
    staying = tuple(tuple(h for d, some in of_rank.items() if owners[d] == 1 for h in some) for of_rank in parts)
    ranks = tuple(joined((begin, end) for begin, end, _ in some) for some in going)
    return Travel(shares._replace(ranks=ranks), going, staying)


@functools.lru_cache(maxsize=256)
def checked(shares: Shares) -> Shares:
    """@shares, whose ranks have each row once."""
    found = sorted(i for intervals in shares.ranks for i in intervals)
    if [b for b, _ in found] + [shares.total] != [0] + [e for _, e in found] or any(b >= e for b, e in found):
        raise invalid(f"the ranks' intervals do not have each of {shares.total} rows once", "shares")
    for intervals in shares.ranks:
        if list(intervals) != sorted(intervals):
            raise invalid("a rank's intervals are not in rising order", "shares")
    return shares


def joined(intervals) -> tuple:
    """In rising order, neighbours as one."""
    found: list = []
    for begin, end in sorted(i for i in intervals if i[0] < i[1]):
        if found and found[-1][1] == begin:
            found[-1] = (found[-1][0], end)
        else:
            found.append((begin, end))
    return tuple(found)


def _cuts(begin: int, end: int, n: int, unit: int) -> list:
    """n + 1 places that cut [begin, end) into parts as equal as multiples of @unit from @begin allow."""
    length = end - begin
    return [begin + (length * i // n + unit // 2) // unit * unit for i in range(n)] + [end]


def _documents(rows) -> tuple:
    """(cu_seqlens as a tuple, whether sequences are packed) of a length or of cu_seqlens."""
    if isinstance(rows, torch.Tensor):
        rows = rows.tolist()
    if isinstance(rows, int):
        _check.count(rows, "rows")
        return (0, rows), False
    found = tuple(int(i) for i in rows)
    if len(found) < 2 or found[0] != 0 or any(a > b for a, b in itertools.pairwise(found)):
        raise invalid("cu_seqlens are sums of lengths: 0 first, and rising", "tensor.seqstart_q")
    return found, True


def contiguous(rows, n: int) -> Shares:
    """Equal parts, one behind the other. @rows: how many, or cu_seqlens."""
    documents, packed = _documents(rows)
    cuts = _cuts(0, documents[-1], n, 1)
    return Shares(tuple(joined([i]) for i in itertools.pairwise(cuts)), documents, packed)


def head_tail(rows, n: int) -> Shares:
    """Each sequence in 2n equal parts, of which a rank has one from the head and its counterpart from the tail: under a causal mask
    all have as much to do. TransformerEngine's and Megatron's order. @rows: how many, or cu_seqlens."""
    documents, packed = _documents(rows)
    ranks: list = [[] for _ in range(n)]
    for begin, end in itertools.pairwise(documents):
        for i, part in enumerate(itertools.pairwise(_cuts(begin, end, 2 * n, 1))):
            ranks[min(i, 2 * n - 1 - i)].append(part)
    return Shares(tuple(map(joined, ranks)), documents, packed)


def balanced(rows, n: int, *, causal: bool = True, window: tuple = (-1, -1), equal: bool = False) -> Shares:
    """Work spread evenly, sequences left whole where that can be: long ones are cut head and tail over all ranks, short ones go, the
    largest first, to whoever has least to do.

    Args:
        rows: how many, or cu_seqlens.
        equal: every rank gets as many rows (to within one), as the rest of a model would like; costs some cuts.
    """
    documents, packed = _documents(rows)
    pairs = [(b, e) for b, e in itertools.pairwise(documents) if e > b]
    costs = [visible(documents, b, e, causal, window) for b, e in pairs]
    fair = sum(costs) / n
    ranks, heap = [[] for _ in range(n)], [(0, 0, r) for r in range(n)]
    short = []
    for (begin, end), cost in zip(pairs, costs):
        if cost <= fair / 4 or end - begin < 2 * n * PATCH:
            short.append((cost, begin, end))
            continue
        for i, part in enumerate(itertools.pairwise(_cuts(begin, end, 2 * n, PATCH))):
            ranks[min(i, 2 * n - 1 - i)].append(part)
    heap = [(sum(visible(documents, b, e, causal, window) for b, e in ranks[r]), r) for r in range(n)]
    heapq.heapify(heap)
    for cost, begin, end in sorted(short, reverse=True):
        least, r = heapq.heappop(heap)
        ranks[r].append((begin, end))
        heapq.heappush(heap, (least + cost, r))
    if equal:
        _level(ranks, documents, n)
    return Shares(tuple(map(joined, ranks)), documents, packed)


def _level(ranks, documents, n):
    """Moves rows from who has too many to who has too few: the shortest intervals first, cut where they are too long."""
    total = documents[-1]
    surplus = [sum(e - b for b, e in ranks[r]) - total * (r + 1) // n + total * r // n for r in range(n)]
    for needy in (r for r in range(n) if surplus[r] < 0):
        for giver in sorted((r for r in range(n) if surplus[r] > 0), key=lambda r: -surplus[r]):
            while surplus[giver] > 0 > surplus[needy]:
                begin, end = min(ranks[giver], key=lambda i: i[1] - i[0])
                ranks[giver].remove((begin, end))
                moved = min(end - begin, surplus[giver], -surplus[needy])
                if moved < end - begin:
                    ranks[giver].append((begin + moved, end))
                ranks[needy].append((begin, begin + moved))
                surplus[giver] -= moved
                surplus[needy] += moved


def _prefix(n: int, bound: int) -> int:
    """sum of min(i, bound) for i = 1 .. n"""
    full = min(n, bound)
    return full * (full + 1) // 2 + (n - full) * bound


def visible(documents, begin: int, end: int, causal: bool, window: tuple) -> int:
    """How many keys the rows [begin, end) see in all."""
    left, right = window
    total, d = 0, bisect.bisect_right(documents, begin) - 1
    while begin < end:
        first, last = documents[d], documents[d + 1]
        stop = min(end, last)
        if stop > begin:
            length = last - first
            bound_left = length if left is None or left < 0 else left + 1
            bound_right = 1 if causal else length if right is None or right < 0 else right + 1
            a, b = begin - first, stop - first
            # Row i sees min(i + 1, left + 1) keys up to its own, and min(length - i, right + 1) from its own on.
            total += _prefix(b, bound_left) - _prefix(a, bound_left)
            total += _prefix(length - a, bound_right) - _prefix(length - b, bound_right) - (b - a)
        begin, d = max(stop, begin), d + 1
    return total
