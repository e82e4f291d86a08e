# SPDX-License-Identifier: MIT
"""A rank's own computing: calls of attention on slices, sums of parts in float32.

Tensors have rows first: [rows, batch, heads, hdim], packed [rows, heads, hdim]; LSE has them last.
"""
from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from . import pieces as _pieces
from .shares import Shares, held
from ... import _problem, _run


class Problem(NamedTuple):
    """What all calls of one attention have in common; hashable. rank: of @shares; heads, head0: of all query heads, and the first here."""

    shares: Shares
    rank: int
    left: int
    right: int
    scale: float | None
    softcap: float
    dropout_p: float
    deterministic: bool
    heads: int
    head0: int = 0

    @property
    def packed(self) -> bool:
        return self.shares.packed

    def calls(self, keys: tuple, n_keys: int) -> tuple:
        """On @keys (Held) of @n_keys rows."""
        rows = held(self.shares.ranks[self.rank])
        alone = self.dropout_p > 0
        found = _pieces.pieces(self.shares.documents, rows, keys, self.left, self.right, alone)
        if alone:
            _pieces.check_patches(found, "a share")
            return tuple(_pieces.Call((p,)) for p in found)
        return _pieces.calls(found, self.packed, self.shares.rows(self.rank), n_keys)


def _device(tensor):
    return torch.device("cpu") if not tensor.is_cuda else torch.device("cuda", tensor.get_device())


def _options(op, problem, call):
    piece = call.pieces[0]
    at = (piece.row, piece.key) if problem.dropout_p > 0 else (0, 0)
    left, right = (-1, -1) if piece.mask == _problem.MASK_NONE else (piece.left, piece.right)
    return _problem.Options(
        op=op, layout="sbhd", mask=piece.mask, window=(left, right), scale=problem.scale, softcap=problem.softcap,
        dropout_p=problem.dropout_p, deterministic=problem.deterministic and op == "backward", max_seqlen_q=call.longest_q,
        max_seqlen_k=call.longest_k, dropout_row=at[0], dropout_column=at[1])


def _run_call(op, problem, call, of_rows: dict, of_keys: dict, rows_last: dict, fixed: dict, state):
    """One call. of_rows, of_keys, rows_last: role -> whole tensors, of which it takes its part; fixed: as they are."""
    options = _options(op, problem, call)
    if call.sums is not None:
        device = _device(of_rows["q"])
        sums = dict(zip(("seqstart_q", "seqlen_q", "seqstart_k", "seqlen_k"), _pieces.sums_on(call.sums, device)))
        sums = {n: t for n, t in sums.items() if t.numel()}
        return _run.execute({**of_rows, **of_keys, **rows_last, **fixed, **sums}, options)
    p = call.pieces[0]
    packed = problem.packed
    of_rows = {n: t[p.q0 : p.q1, None] if packed else t[p.q0 : p.q1] for n, t in of_rows.items()}
    of_keys = {n: t[p.k0 : p.k1, None] if packed else t[p.k0 : p.k1] for n, t in of_keys.items()}
    rows_last = {n: t[None, ..., p.q0 : p.q1] if packed else t[..., p.q0 : p.q1] for n, t in rows_last.items()}
    if state is None:
        return _run.execute({**of_rows, **of_keys, **rows_last, **fixed}, options)
    for i in range(of_rows["q"].shape[1]):  # a sequence's random numbers begin at its own place
        offset = 32 * ((p.document if packed else i) * problem.heads + problem.head0)
        one = {n: t[:, i : i + 1] for n, t in (of_rows | of_keys).items()} | {n: t[i : i + 1] for n, t in rows_last.items()}
        if state.is_cuda:
            at = state.data_ptr()
            _run.execute({**one, **fixed}, options, (0, offset), (at, at + 8))
        else:
            seed, first = state.tolist()
            _run.execute({**one, **fixed}, options, (seed, first + offset))


def new_outputs(q: Tensor, v: Tensor, empty: bool) -> tuple:
    """(O, LSE) for rows of @q, of what sees nothing."""
    o = (q.new_empty if not empty else q.new_zeros)((*q.shape[:-1], v.shape[-1]))
    rows = (q.shape[1], q.shape[0]) if q.dim() == 3 else (q.shape[1], q.shape[2], q.shape[0])
    return o, torch.full(rows, -math.inf, dtype=torch.float32, device=q.device)


def forward_into(o, lse, q, k, v, problem, calls, state, sink=None) -> None:
    """@calls, of which no two have a row in common, each to its place in @o and @lse."""
    fixed = {} if sink is None else {"sink": sink}
    for call in calls:
        _run_call("forward", problem, call, {"q": q, "o": o}, {"k": k, "v": v}, {"lse": lse}, fixed, state)


def _row_weights(weights: Tensor) -> Tensor:
    """LSE's [.., heads, rows] as O's [rows, .., heads, 1]."""
    return weights.movedim(-1, 0).unsqueeze(-1)


class Sum:
    """O and LSE over keys that come part by part; O in float32."""

    def __init__(self, q, v):
        self.o = self.lse = None
        self.q, self.v = q, v

    def add(self, k, v, problem, calls, state) -> None:
        for call in calls:
            begin, end = call.rows
            whole = begin == 0 and end == self.q.shape[0]
            covered = call.sums is None
            o, lse = new_outputs(self.q, self.v, empty=not covered)
            forward_into(o, lse, self.q, k, v, problem, (call,), state)
            if self.o is None and whole:
                self.o, self.lse = o.float(), lse
                continue
            if self.o is None:
                self.o, self.lse = o.new_zeros(o.shape, dtype=torch.float32), torch.full_like(lse, -math.inf)
            self._merge(begin, end, o[begin:end], lse[..., begin:end])

    def _merge(self, begin, end, o, lse) -> None:
        into, known = self.o[begin:end], self.lse[..., begin:end]
        weight = torch.sigmoid(lse - known).nan_to_num_(nan=0.0)  # NaN: neither has seen anything
        into.lerp_(o.float(), _row_weights(weight))
        known.copy_(torch.logaddexp(known, lse))

    def finish(self, dtype, sink=None) -> tuple:
        """(O, LSE), with a sink in the denominator."""
        if self.o is None:
            o, self.lse = new_outputs(self.q, self.v, empty=True)
            self.o = o.float()
        if sink is not None:
            lse = torch.logaddexp(self.lse, sink[:, None])
            self.o *= _row_weights(torch.exp(self.lse - lse).nan_to_num_(nan=0.0))
            self.lse = lse
        return self.o.to(dtype), self.lse


class Gradients:
    """Of O and LSE with respect to rows, and to keys part by part. dq: where dQ goes if each row is in one call; None: it is added up."""

    def __init__(self, do, dlse, q, o, lse, problem, state, dq=None):
        self.problem, self.state, self.q = problem, state, q
        self.of_rows = {"q": q, "do": do, "o": o}
        self.rows_last = {"lse": lse} if dlse is None else {"lse": lse, "dlse": dlse}
        self.into, self.dq = dq, None

    def add(self, k, v, calls) -> tuple | None:
        """(dK, dV) of this part, float32; dQ is added up. None: nobody sees these keys."""
        dk = dv = None
        for call in calls:
            (q0, q1), (k0, k1) = call.rows, call.keys
            covered = call.sums is None
            like = torch.empty_like if covered else torch.zeros_like
            part_q = like(self.q) if self.into is None else self.into
            part_k, part_v = like(k), like(v)
            _run_call("backward", self.problem, call, self.of_rows | {"dq": part_q}, {"k": k, "v": v, "dk": part_k, "dv": part_v},
                      self.rows_last, {}, self.state)
            if self.into is None:
                if self.dq is None:
                    self.dq = torch.zeros_like(self.q, dtype=torch.float32)
                self.dq[q0:q1] += part_q[q0:q1]
            if dk is None:
                dk, dv = (torch.zeros_like(t, dtype=torch.float32) for t in (k, v))
            dk[k0:k1] += part_k[k0:k1]
            dv[k0:k1] += part_v[k0:k1]
        return None if dk is None else (dk, dv)

    def rows(self) -> Tensor:
        return self.q.new_zeros(self.q.shape) if self.dq is None else self.dq.to(self.q.dtype)


def sink_gradient(do, dlse, o, lse, sink) -> Tensor:
    """Of this rank's rows: -sum of exp(sink - LSE) * D."""
    d = (do.float() * o.float()).sum(-1).movedim(0, -1)
    if dlse is not None:
        d = d - dlse
    weight = torch.exp(sink[:, None] - lse)
    found = -(weight * d).sum(-1)
    return found if found.dim() == 1 else found.sum(0)
