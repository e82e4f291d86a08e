# SPDX-License-Identifier: MIT
"""The ways in which keys come to rows: all to all of the ranks in chunks of heads, around a ring; and heads in exchange for rows.

Each is a torch.autograd.Function whose backward is the same traffic the other way round.
"""
from __future__ import annotations

import torch
from torch import Tensor

from . import groups, local, shares
from ... import _again
from ..._lib import invalid

_REFUSED = "context parallel attention has no second derivative"


def _taken(grad, like):
    return torch.zeros_like(like) if grad is None else _again.readable(grad)


def _contiguous(dlse):
    return None if dlse is None else dlse.resolve_neg().contiguous()


def _refuse_second(ctx):
    if torch.is_grad_enabled():
        from ..._lib import not_supported

        raise not_supported(_REFUSED)


class _Chunk:
    """Some KV heads and the query heads that read them."""

    def __init__(self, i, n, q, k):
        size, share = k.shape[-2] // n, q.shape[-2] // k.shape[-2]
        self.keys = slice(i * size, (i + 1) * size)
        self.rows = slice(i * size * share, (i + 1) * size * share)

    def heads(self, *tensors):
        return (None if t is None else t[..., self.rows, :] for t in tensors)

    def kv(self, *tensors):
        return (t[..., self.keys, :] for t in tensors)

    def lse(self, lse):
        return None if lse is None else lse[..., self.rows, :]

    def problem(self, problem):
        return problem._replace(head0=problem.head0 + self.rows.start) if problem.dropout_p > 0 else problem


class _Parts:
    """Which calls there are on keys that come, and on those that nobody else needs."""

    def __init__(self, problem, group):
        self.problem, self.group = problem, group
        self.travel = shares.travel(problem.shares)
        self.comes = self.travel.shares.most > 0
        # As one interval where they can be: a document's keys lie together, and a row is in one call.
        whole = shares.joined(i for intervals in self.travel.shares.ranks for i in intervals)
        self.whole = shares.held(whole)
        self.n_whole = sum(e - b for b, e in whole)
        self.on_others = problem.calls(self.whole, self.n_whole) if self.comes else ()
        n_rows = problem.shares.rows(problem.rank)
        self.on_own = problem.calls(self.travel.staying[problem.rank], n_rows) if self.travel.staying[problem.rank] else ()

    def gather(self, chunk, k, v):
        if not self.comes:
            return None
        return [groups.Gathering(self.travel.take(t, self.problem.rank), self.travel.shares, self.group) for t in chunk.kv(k, v)]

    def reduce(self, parts):
        shared = self.travel.shares
        return [groups.Reduction(t, shared, self.group, self.problem.deterministic) for t in parts]


def _zeros(*tensors):
    return tuple(torch.zeros_like(t, dtype=torch.float32) for t in tensors)


class AllGather(torch.autograd.Function):
    """Every rank gets all keys that several need, some heads at a time: while one chunk's attention is computed the next one's keys come."""

    @staticmethod
    def forward(ctx, problem, group, n_chunks, state, q, k, v, sink):
        chunks, parts = [_Chunk(i, n_chunks, q, k) for i in range(n_chunks)], _Parts(problem, group)
        o, lse = local.new_outputs(q, v, empty=problem.packed)
        coming = parts.gather(chunks[0], k, v)
        for i, chunk in enumerate(chunks):
            found, coming = coming, parts.gather(chunks[i + 1], k, v) if i + 1 < n_chunks else None
            mine, out = chunk.heads(q, o)
            logit, said = None if sink is None else sink[chunk.rows], chunk.problem(problem)
            if parts.on_own:
                local.forward_into(out, chunk.lse(lse), mine, *chunk.kv(k, v), said, parts.on_own, state, logit)
            if parts.comes:
                keys, values = (g.wait() for g in found)
                local.forward_into(out, chunk.lse(lse), mine, keys, values, said, parts.on_others, state, logit)
        ctx.save_for_backward(q, k, v, o, lse, sink)
        ctx.said = parts, chunks, state
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx, do, dlse):
        _refuse_second(ctx)
        q, k, v, o, lse, sink = ctx.saved_tensors
        parts, chunks, state = ctx.said
        do, dlse = _taken(do, o), _contiguous(dlse)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        coming, going = parts.gather(chunks[0], k, v), None
        for i, chunk in enumerate(chunks):
            found, coming = coming, parts.gather(chunks[i + 1], k, v) if i + 1 < len(chunks) else None
            gradients = local.Gradients(*chunk.heads(do), chunk.lse(dlse), *chunk.heads(q, o), chunk.lse(lse), chunk.problem(parts.problem),
                                        state, *chunk.heads(dq))
            if parts.on_own:
                for into, found_here in zip(chunk.kv(dk, dv), gradients.add(*chunk.kv(k, v), parts.on_own)):
                    into.copy_(found_here)
            sums = None
            if parts.comes:
                keys, values = (g.wait() for g in found)
                sums = gradients.add(keys, values, parts.on_others) or _zeros(keys, values)
            _arrived(going, parts, dk, dv)
            going = None if sums is None else (chunk, parts.reduce(sums))
        _arrived(going, parts, dk, dv)
        dsink = local.sink_gradient(do, dlse, o, lse, sink) if sink is not None and ctx.needs_input_grad[7] else None
        return None, None, None, None, dq, dk, dv, dsink


def _arrived(going, parts, dk, dv):
    if going is None:
        return
    chunk, reductions = going
    for into, reduction in zip(chunk.kv(dk, dv), reductions):
        parts.travel.put(into, reduction.wait(), parts.problem.rank)


class Ring(torch.autograd.Function):
    """Keys go around; each rank computes on those that it has and merges, by LSE in float32."""

    @staticmethod
    def forward(ctx, problem, group, state, q, k, v, sink):
        parts, total = _Parts(problem, group), local.Sum(q, v)
        total.add(k, v, problem, parts.on_own, state)
        for owner, keys, values in _around(parts, k, v):
            total.add(keys, values, problem, _calls(parts, owner), state)
        o, lse = total.finish(q.dtype, sink)
        ctx.save_for_backward(q, k, v, o, lse, sink)
        ctx.said = parts, state
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx, do, dlse):
        _refuse_second(ctx)
        q, k, v, o, lse, sink = ctx.saved_tensors
        parts, state = ctx.said
        problem, group, most = parts.problem, parts.group, parts.travel.shares.most
        do, dlse = _taken(do, o), _contiguous(dlse)
        gradients, passing = local.Gradients(do, dlse, q, o, lse, problem, state), None
        dk, dv = (t.to(k.dtype) for t in gradients.add(k, v, parts.on_own) or _zeros(k, v))
        sums = None
        for owner, keys, values in _around(parts, k, v):
            sums = gradients.add(keys, values, _calls(parts, owner)) or _zeros(keys, values)
            if passing is not None:
                sums = tuple(p.add_(s) for p, s in zip(sums, passing.wait()))
            if group.size > 1:
                # The sums follow their keys, one rank behind, and the last step takes them home.
                sums = tuple(groups.padded(p, most) for p in sums)
                passing = groups.Passing(sums, group)
        if passing is not None:
            sums = passing.wait()
        if sums is not None:
            for into, rows in zip((dk, dv), sums):
                parts.travel.put(into, rows, problem.rank)
        dsink = local.sink_gradient(do, dlse, o, lse, sink) if sink is not None and ctx.needs_input_grad[6] else None
        return None, None, None, gradients.rows(), dk, dv, dsink


def _around(parts, k, v):
    """(owner, its keys that travel, its values), this rank's own first; the next ones come meanwhile. All have as many rows."""
    group, most = parts.group, parts.travel.shares.most
    if not parts.comes:
        return
    own = [parts.travel.take(t, parts.problem.rank) for t in (k, v)]
    sent = own if group.size == 1 else [groups.padded(t, most) for t in own]
    for step in range(group.size):
        passing = groups.Passing(sent, group) if step + 1 < group.size else None
        yield (group.rank - step) % group.size, *sent
        if passing is not None:
            sent = passing.wait()


def _calls(parts, owner):
    shared = parts.travel.shares
    return parts.problem.calls(shares.held(shared.ranks[owner]), shared.most)


# ---- heads in exchange for rows ----


class Deal(tuple):
    """(ranks' intervals, the most rows of one, this rank's own rows, group)."""

    __slots__ = ()

    def __new__(cls, ranks, most, rows, group):
        return super().__new__(cls, (ranks, most, rows, group))


def _send_heads(x: Tensor, deal: Deal) -> groups.Exchange:
    _, most, _, group = deal
    blocks = groups.padded(x, most).unflatten(-2, (group.size, -1)).movedim(-3, 0)
    return groups.Exchange(blocks.contiguous(), group)


def _all_rows(exchange, deal: Deal) -> Tensor:
    ranks, most, _, _ = deal
    return groups.ordered(exchange.wait().flatten(0, 1), ranks, most)


def _send_rows(x: Tensor, deal: Deal) -> groups.Exchange:
    ranks, most, _, group = deal
    return groups.Exchange(groups.by_rank(x, ranks, most).unflatten(0, (group.size, most)), group)


def _all_heads(exchange, deal: Deal) -> Tensor:
    _, _, rows, _ = deal
    return exchange.wait().movedim(0, -3).flatten(-3, -2)[:rows]


def _repeats(heads: int, size: int) -> int:
    """How many ranks read one KV head."""
    if heads % size == 0:
        return 1
    if size % heads:
        raise invalid(f"{heads} KV heads on {size} ranks: one has to be a multiple of the other", "nhead_k")
    return size // heads


class ToHeads(torch.autograd.Function):
    """Of each rank's rows of all heads: all rows of some heads. A KV head that several ranks read goes to all of them."""

    @staticmethod
    def forward(ctx, deal, *tensors):
        group = deal[3]
        ctx.deal, ctx.repeats = deal, [_repeats(t.shape[-2], group.size) for t in tensors]
        sent = [_send_heads(t if n == 1 else t.repeat_interleave(n, -2), deal) for t, n in zip(tensors, ctx.repeats)]
        ctx.set_materialize_grads(False)
        return tuple(_all_rows(s, deal) for s in sent)

    @staticmethod
    def backward(ctx, *grads):
        _refuse_second(ctx)
        deal, found = ctx.deal, []
        sent = [None if g is None else _send_rows(g, deal) for g in grads]
        for exchange, n in zip(sent, ctx.repeats):
            grad = None if exchange is None else _all_heads(exchange, deal)
            if grad is not None and n > 1:
                grad = grad.unflatten(-2, (-1, n)).sum(-2, dtype=torch.float32).to(grad.dtype)
            found.append(grad)
        return None, *found


class ToRows(torch.autograd.Function):
    """ToHeads backwards: of O, [rows, .., heads, hdim], and LSE, [.., heads, rows]."""

    @staticmethod
    def forward(ctx, deal, o, lse):
        ctx.deal = deal
        ctx.set_materialize_grads(False)
        sent = _send_rows(o, deal), _send_rows(lse.movedim(-1, 0).unsqueeze(-1), deal)
        o, lse = (_all_heads(s, deal) for s in sent)
        return o, lse.squeeze(-1).movedim(0, -1)

    @staticmethod
    def backward(ctx, do, dlse):
        _refuse_second(ctx)
        deal = ctx.deal
        sent = [None if do is None else _send_heads(do, deal), None if dlse is None else _send_heads(dlse.movedim(-1, 0).unsqueeze(-1), deal)]
        do, dlse = (None if s is None else _all_rows(s, deal) for s in sent)
        return None, do, None if dlse is None else dlse.squeeze(-1).movedim(0, -1)
