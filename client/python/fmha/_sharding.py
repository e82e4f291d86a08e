# SPDX-License-Identifier: MIT
"""How fmha::attention and its gradient split over DTensor's meshes: by batch, and by heads where those of k divide evenly."""
from __future__ import annotations

import functools

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

_AXES = {"bshd": (0, 2), "bhsd": (0, 1), "sbhd": (1, 2)}  # batch and heads of q, k, v and o


class _Split:
    """One way to split: where each tensor is cut along it. @at: of q, k, v and o; @lse, @bias, @slopes: of those; None: it is not."""

    def __init__(self, of_batch, at, lse, packed):
        self.of_batch, self.at, self.lse, self.packed = of_batch, at, lse, packed

    def rows(self):
        return Shard(self.at)

    def extra(self, tensor, name):
        """Of the tensor by that name; None where there is none."""
        if tensor is None:
            return None
        if name in ("bias", "mask_intervals", "mask_bits"):  # [batch, heads, .., ..], fewer axes and extents of 1 broadcast
            axis = tensor.ndim - (4 if self.of_batch else 3)
            return Shard(axis) if axis >= 0 and tensor.shape[axis] > 1 else Replicate()
        if name == "alibi_slopes":  # [heads] or [batch, heads]
            if self.of_batch:
                return Shard(0) if tensor.ndim == 2 and tensor.shape[0] > 1 else Replicate()
            return Shard(tensor.ndim - 1)
        if name == "sink":
            return Replicate() if self.of_batch else Shard(0)
        if name in ("seqlen_q", "seqlen_k"):
            return Shard(0) if self.of_batch else Replicate()
        return Replicate()  # prefix sums


def _splits(q, k, seqstart_q, seqlen_q, seqlen_k, layout, dropout_p):
    """What may be split. Dropout counts heads and batches from each part's own first one: it would draw the same for all parts."""
    if dropout_p > 0:
        return
    packed = seqstart_q is not None
    batch, heads = (None, 1) if packed else _AXES[layout]
    parts = q.mesh.size()
    if batch is not None and q.shape[batch] > 1:
        yield _Split(True, batch, 0, packed)
    # Uneven parts would part a head of k from its heads of q.
    if k.shape[heads] % parts == 0 and q.shape[heads] % parts == 0:
        yield _Split(False, heads, 0 if packed else 1, packed)


_NAMES = ("bias", "alibi_slopes", "sink", "seqstart_q", "seqstart_k", "seqlen_q", "seqlen_k", "mask_intervals", "mask_bits")


def _whole(tensor):
    return None if tensor is None else Replicate()


def _forward(q, k, v, bias, alibi_slopes, sink, seqstart_q, seqstart_k, seqlen_q, seqlen_k, mask_intervals, mask_bits, state, layout, mask, left,
             right, scale, softcap, dropout_p, *words):
    extras = (bias, alibi_slopes, sink, seqstart_q, seqstart_k, seqlen_q, seqlen_k, mask_intervals, mask_bits)
    rest = [None] * (7 + len(words))
    found = [([Replicate(), Replicate()], [Replicate()] * 3 + [_whole(t) for t in (*extras, state)] + rest)]
    for split in _splits(q, k, seqstart_q, seqlen_q, seqlen_k, layout, dropout_p):
        given = [split.extra(t, n) for n, t in zip(_NAMES, extras)]
        found.append(([split.rows(), Shard(split.lse)], [split.rows()] * 3 + given + [_whole(state)] + rest))
    return found


def _backward(grad, dlse, q, k, v, o, lse, bias, alibi_slopes, sink, seqstart_q, seqstart_k, seqlen_q, seqlen_k, mask_intervals, mask_bits,
              state, want_dbias, layout, mask, left, right, scale, softcap, dropout_p, *words):
    extras = (bias, alibi_slopes, sink, seqstart_q, seqstart_k, seqlen_q, seqlen_k, mask_intervals, mask_bits)
    rest = [None] * (8 + len(words))
    whole = [_whole(t) for t in (grad, dlse, q, k, v, o, lse, *extras, state)]
    found = [([Replicate()] * 5, whole + rest)]
    for split in _splits(q, k, seqstart_q, seqlen_q, seqlen_k, layout, dropout_p):
        given = [split.extra(t, n) for n, t in zip(_NAMES, extras)]
        # What is not cut along with the rows gets a sum of all parts.
        dbias = (Partial() if given[0].is_replicate() else given[0]) if want_dbias else Replicate()
        dsink = Replicate() if sink is None else Partial() if given[2].is_replicate() else given[2]
        tensors = [split.rows() if grad is not None else None, Shard(split.lse) if dlse is not None else None, *[split.rows()] * 4, Shard(split.lse)]
        found.append(([split.rows()] * 3 + [dbias, dsink], tensors + given + [_whole(state)] + rest))
    return found


@functools.cache
def register() -> None:
    register_sharding(torch.ops.fmha.attention.default)(_forward)
    register_sharding(torch.ops.fmha.attention_backward.default)(_backward)
