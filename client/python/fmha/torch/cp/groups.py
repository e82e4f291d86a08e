# SPDX-License-Identifier: MIT
"""Traffic between ranks: what torch.distributed moves, in which order rows are before and after.

Rows are a tensor's first dimension here. Ranks may have different numbers of rows: on the way each has as many as the one with most.
"""
from __future__ import annotations

import functools
import weakref
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .shares import Shares
from ..._lib import invalid


class Group(NamedTuple):
    """Some ranks, of which this process is one. reference: of torch's ProcessGroup; None: this process alone. It is weak: graphs keep
    Groups for as long as a loss lives, and gloo's threads end a process whose group outlived destroy_process_group()."""

    reference: weakref.ref | None
    rank: int
    size: int

    @property
    def handle(self) -> dist.ProcessGroup | None:
        handle = self.reference() if self.reference else None
        if self.reference and handle is None:
            raise invalid("the group has been destroyed", "group")
        return handle

    def peer(self, step: int) -> int:
        """The global rank of who comes @step behind this one, in a ring."""
        return dist.get_global_rank(self.handle, (self.rank + step) % self.size)

    @property
    def adds(self) -> bool:
        """Whether its engine adds on the way, instead of the receiver."""
        return self.size > 1 and dist.get_backend(self.handle) == "nccl"


ALONE = Group(None, 0, 1)


def group_of(handle) -> Group:
    rank = dist.get_rank(handle)
    if rank < 0:
        raise invalid("this process is not in the group", "group")
    return Group(weakref.ref(handle), rank, dist.get_world_size(handle))


class _Done:
    def wait(self):
        pass


DONE = _Done()


@functools.lru_cache(maxsize=1024)
def places(ranks: tuple, most: int, device: torch.device) -> Tensor | None:
    """Where each row, in rising order, lies where every rank of @ranks has @most of them; None: it is its number."""
    found = []
    for r, intervals in enumerate(ranks):
        at = r * most
        for begin, end in intervals:
            found.append((begin, at, end - begin))
            at += end - begin
    order = [i for _, start, n in sorted(found) for i in range(start, start + n)]
    if order == list(range(most * len(ranks))):
        return None
    return torch.tensor(order, dtype=torch.int64, device=device)


def ordered(buffer: Tensor, ranks: tuple, most: int) -> Tensor:
    """Rows in rising order of a buffer that has them rank by rank."""
    at = places(ranks, most, buffer.device)
    return buffer if at is None else buffer.index_select(0, at)


def by_rank(rows: Tensor, ranks: tuple, most: int) -> Tensor:
    """ordered() backwards; behind a rank's rows there are zeros."""
    at = places(ranks, most, rows.device)
    if at is None:
        return rows.contiguous()
    return rows.new_zeros((most * len(ranks), *rows.shape[1:])).index_copy_(0, at, rows)


def padded(rows: Tensor, most: int) -> Tensor:
    """@rows, contiguous, and zeros behind them."""
    if rows.shape[0] == most:
        return rows.contiguous()
    return torch.cat([rows, rows.new_zeros((most - rows.shape[0], *rows.shape[1:]))])


class Gathering:
    """Everybody's rows, under way."""

    def __init__(self, rows: Tensor, shares: Shares, group: Group):
        self.shares = shares
        if group.size == 1:
            self.buffer, self.work = rows, DONE
            return
        mine = padded(rows, shares.most)
        self.buffer = rows.new_empty((group.size * shares.most, *rows.shape[1:]))
        self.work = dist.all_gather_into_tensor(self.buffer, mine, group=group.handle, async_op=True)
        self.mine = mine  # until it is sent

    def wait(self) -> Tensor:
        self.work.wait()
        return ordered(self.buffer, self.shares.ranks, self.shares.most)


class Reduction:
    """The sum of what everybody has for this rank's rows, under way. @rows: float32, all of them in rising order.

    in_order: the receiver adds, in the order of ranks, so that every run has the same bits.
    """

    def __init__(self, rows: Tensor, shares: Shares, group: Group, in_order: bool):
        self.n = shares.rows(group.rank)
        self.in_order = in_order or not group.adds
        if group.size == 1:
            self.sent, self.found, self.work = None, rows, DONE
            return
        self.sent = by_rank(rows, shares.ranks, shares.most)
        if self.in_order:
            self.found = torch.empty_like(self.sent)
            self.work = dist.all_to_all_single(self.found, self.sent, group=group.handle, async_op=True)
            self.found = self.found.view(group.size, shares.most, *rows.shape[1:])
        else:
            self.found = rows.new_empty((shares.most, *rows.shape[1:]))
            self.work = dist.reduce_scatter_tensor(self.found, self.sent, group=group.handle, async_op=True)

    def wait(self) -> Tensor:
        self.work.wait()
        found = self.found
        if self.sent is not None and self.in_order:
            found = functools.reduce(torch.Tensor.add_, found.unbind(0))
        self.sent = None
        return found[: self.n]


class Passing:
    """Tensors on their way to the next rank of a ring, and the same from the one before."""

    def __init__(self, tensors, group: Group):
        self.sent = tensors  # until they are
        self.found = [torch.empty_like(t) for t in tensors]
        ops = [dist.P2POp(dist.isend, t, group.peer(1), group.handle) for t in tensors]
        ops += [dist.P2POp(dist.irecv, t, group.peer(-1), group.handle) for t in self.found]
        self.works = dist.batch_isend_irecv(ops)

    def wait(self):
        for work in self.works:
            work.wait()
        self.sent = None
        return self.found


class Exchange:
    """Each rank's block of a tensor [size, ...] to that rank, under way."""

    def __init__(self, blocks: Tensor, group: Group):
        self.sent, self.work, self.found = blocks, DONE, blocks
        if group.size > 1:
            self.found = torch.empty_like(blocks)
            self.work = dist.all_to_all_single(self.found, blocks, group=group.handle, async_op=True)

    def wait(self) -> Tensor:
        self.work.wait()
        self.sent = None
        return self.found


def agreed(tensor: Tensor, *groups: Group) -> Tensor:
    """@tensor of the first rank of all."""
    for group in groups:
        if group.size > 1:
            dist.broadcast(tensor, dist.get_global_rank(group.handle, 0), group=group.handle)
    return tensor
