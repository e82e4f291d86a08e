# SPDX-License-Identifier: MIT
"""Attention on a GPU of q, k and v alone, seen before: one look into a table, then addresses and a launch.

What torch.py and _run.py find out about a call (its mask, whether extents fit each other, the plan) follows from its words and
from the tensors' extents, strides, types and devices. Here it is found out once for each of them and thread. Addresses have
to be multiples of 16, as memory from torch's allocator is; others go the general way.
"""
from __future__ import annotations

import threading

import torch
from torch.compiler import is_compiling

from . import _problem, _run, _tensors
from ._lib import not_supported

ALIGNMENT = 16
Q, K, V, O, LSE, DO, DQ, DK, DV = (_problem.ROLES[n] for n in ("q", "k", "v", "o", "lse", "do", "dq", "dk", "dv"))


class _Kept(threading.local):
    def __init__(self):
        self.seen: dict = {}
        self.gradients: dict = {}  # runs, by (Seen, the gradient's strides)
        self.growing: dict = {}  # the Seen whose plan holds for other lengths, by all but the length


_kept = _Kept()
_PLAIN = _tensors.PLAIN.issuperset
_is_transforming = torch._C._are_functorch_transforms_active


def apply_of(function):
    """What the Function's apply() ends in: itself it first looks for functorch's tensors, which are refused here."""
    return super(torch.autograd.Function, function).apply


def readable(grad):
    """An incoming gradient, whose sign is in its numbers and whose heads lie element by element."""
    if grad.is_neg():
        grad = grad.resolve_neg()
    return grad if grad.stride(-1) == 1 else grad.contiguous()


class _Refusal(torch.autograd.Function):
    """The first @n_kept of the tensors, whose own gradients are refused."""

    @staticmethod
    def forward(ctx, n_kept, *tensors):
        return tensors[:n_kept]

    @staticmethod
    def backward(ctx, *grads):
        raise not_supported("attention's gradients cannot be differentiated again: it has no second derivative here")


def once(gradients: tuple, *depends_on) -> tuple:
    """@gradients, some of them None, for create_graph=True: to differentiate them again by what they depend on is an error.

    Not torch's once_differentiable: that one takes them for constants where the incoming gradient is one.
    """
    on = [t for t in depends_on if t is not None and t.requires_grad]
    if not on:
        return gradients
    present = [g for g in gradients if g is not None]
    kept = iter(_Refusal.apply(len(present), *present, *on))
    return tuple(g if g is None else next(kept) for g in gradients)


def _keep(table: dict, key, value) -> None:
    if len(table) >= _run.KEPT:
        table.clear()
    table[key] = value


class Seen:
    """What is known of a call. Any thread may compute its gradients; the rest belongs to the one that made it.

    options, gradient_options: _problem.Options of the two directions.
    """

    __slots__ = ("options", "gradient_options", "o", "lse", "runs")

    def __init__(self, q, v, options, gradient_options):
        self.options, self.gradient_options = options, gradient_options
        # One element each, seen as all of it: torch.empty_like() is faster than what takes extents.
        self.o = q.new_empty(1).expand(*q.shape[:-1], v.shape[-1])
        self.lse = q.new_empty(1, dtype=torch.float32).expand(_problem.row_extents(q.shape, options.layout, False))
        self.runs = [None, None]  # without and with LSE

    def with_keys(self, run):
        """The same over other keys: @run is self.runs[0]'s for them."""
        other = Seen.__new__(Seen)
        other.options, other.gradient_options, other.o, other.lse = self.options, self.gradient_options, self.o, self.lse
        other.runs = [run, None]
        return other

    def forward(self, at, q, k, v, with_lse: bool):
        """(O, LSE or None). @at: the addresses of q, k and v."""
        o = torch.empty_like(self.o)
        lse = torch.empty_like(self.lse) if with_lse else None
        run = self.runs[with_lse]
        if run is None:
            arrays = {"q": q, "k": k, "v": v, "o": o, **({"lse": lse} if with_lse else {})}
            run = self.runs[with_lse] = _run.find(arrays, self.options, n_said=3)[0]
        tensors = run.tensors
        tensors[Q], tensors[K], tensors[V] = at
        tensors[O] = o.data_ptr()
        if with_lse:
            tensors[LSE] = lse.data_ptr()
        run.launch()
        return o, lse

    def backward(self, grad, q, k, v, o, lse, own=True, tell=None):
        """(dQ, dK, dV). @own: @o and @lse are what forward() made; else any, of its extents and types. @tell: gets the _local.Run."""
        grad = readable(grad)
        at = q.data_ptr(), k.data_ptr(), v.data_ptr(), grad.data_ptr(), o.data_ptr(), lse.data_ptr()
        if (at[0] | at[1] | at[2] | at[3] | at[4] | at[5]) % ALIGNMENT:
            q, k, v, grad, o, lse = (t.clone() for t in (q, k, v, grad, o, lse))
            at = q.data_ptr(), k.data_ptr(), v.data_ptr(), grad.data_ptr(), o.data_ptr(), lse.data_ptr()
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        # Hooks on saved tensors may have given q, k and v other strides.
        key = self, q.stride(), k.stride(), v.stride(), grad.stride(), *(() if own else (o.stride(), lse.stride()))
        run = _kept.gradients.get(key)
        if run is None:
            arrays = {"q": q, "k": k, "v": v, "do": grad, "o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
            run = _run.find(arrays, self.gradient_options, n_said=4 if own else 6)[0]
            _keep(_kept.gradients, key, run)
        tensors = run.tensors
        tensors[Q], tensors[K], tensors[V], tensors[DO], tensors[O], tensors[LSE] = at
        tensors[DQ], tensors[DK], tensors[DV] = dq.data_ptr(), dk.data_ptr(), dv.data_ptr()
        run.launch()
        if tell is not None:
            tell(run)
        return dq, dk, dv

    def attend(self, at, q, k, v):
        """O, with gradients where they are wanted."""
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            return _apply((self, at), q, k, v)
        return self.forward(at, q, k, v, False)[0]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, seen, q, k, v):
        ctx.seen, at = seen
        o, lse = ctx.seen.forward(at, q, k, v, True)
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx, grad):
        q, k, v, o, lse = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return None, *ctx.seen.backward(grad, q, k, v, o, lse)
        with torch.no_grad():  # create_graph=True
            found = ctx.seen.backward(grad, q, k, v, o, lse)
        return None, *once(found, grad, q, k)  # not of v, in which O is linear


_apply = apply_of(_Attention)


def _key(words, q, k, v):
    return (words, q.shape, q.stride(), q.dtype, q.get_device(), k.shape, k.stride(), k.dtype, k.get_device(),
            v.shape, v.stride(), v.dtype, v.get_device())


_ROWS = {"bshd": 1, "bhsd": 2}  # the axis of rows; heads have the other one


def _growth(words, q, k, v):
    """(all of _key() but K's and V's length, struct fmha_local_keys' fields): of caches that grow, else None."""
    axis = _ROWS.get(words[0])
    if axis is None or k.dim() != 4 or v.dim() != 4:
        return None
    (k_batch, k_head), (v_batch, v_head) = ((t.stride(0), t.stride(3 - axis)) for t in (k, v))
    rows = k.shape[axis]
    if v.shape[axis] != rows:
        return None
    kind = (words, q.shape, q.stride(), q.dtype, q.get_device(),
            *((t.shape[0], t.shape[3 - axis], t.shape[3], t.stride(axis), t.stride(3), t.dtype, t.get_device()) for t in (k, v)))
    return kind, (rows, k_batch, k_head, v_batch, v_head)


def _grown(words, q, k, v):
    """What was seen of another length, for this one; or None."""
    found = _growth(words, q, k, v)
    known = _kept.growing.get(found[0]) if found else None
    if known is None or not known.runs[0].plan.holds(found[1]):
        return None
    seen = known.with_keys(known.runs[0].with_keys(found[1]))
    _keep(_kept.seen, _key(words, q, k, v), seen)
    return seen


def _remember(seen, words, q, k, v):
    _keep(_kept.seen, _key(words, q, k, v), seen)
    found = _growth(words, q, k, v) if seen.runs[0] is not None else None
    if found and seen.runs[0].plan.holds(found[1]):
        _keep(_kept.growing, found[0], seen)


def attend(words, q, k, v):
    """O, if this was seen before. None: go the general way.

    @words: hashable, the layout and all else that the caller was given besides q, k and v.
    """
    if (is_compiling() or not _PLAIN((type(q), type(k), type(v))) or not q.is_cuda or _is_transforming() or _tensors.is_tracing()
            or _tensors.n_modes()):
        return None
    try:
        seen = _kept.seen.get(_key(words, q, k, v)) or _grown(words, q, k, v)
    except TypeError:  # words that are no key: what is wrong with them is said on the general way
        return None
    if seen is None or q.is_neg() or k.is_neg() or v.is_neg():
        return None
    at = q.data_ptr(), k.data_ptr(), v.data_ptr()
    return None if (at[0] | at[1] | at[2]) % ALIGNMENT else seen.attend(at, q, k, v)


def attend_first(words, q, k, v, options, gradient_options):
    """O, the first time. None: go the general way. options, gradient_options: _problem.Options of the two directions."""
    at = q.data_ptr(), k.data_ptr(), v.data_ptr()
    if not q.is_cuda or (at[0] | at[1] | at[2]) % ALIGNMENT:
        return None
    seen = Seen(q, v, options, gradient_options)
    o = seen.attend(at, q, k, v)
    _remember(seen, words, q, k, v)
    return o
