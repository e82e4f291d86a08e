# SPDX-License-Identifier: MIT
"""What fmha.torch gives to people, and what flash_attn, transformers and torch's own slot are made of."""
from __future__ import annotations

import contextlib
import functools
import math
import threading
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _again, _arrays, _check, _problem, _run, _tensors, masks
from .._lib import invalid

MAX_HDIM = 256


class Call(NamedTuple):
    """What one attention says besides its tensors. Hashable."""

    layout: str = "bhsd"
    mask: int = 0
    left: int = -1
    right: int = -1
    scale: float | None = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    deterministic: bool = False
    softcap_approx: bool = False


@functools.lru_cache(maxsize=4096)
def _options(op: str, call: Call) -> _problem.Options:
    return _problem.Options(
        op=op, layout=call.layout, mask=call.mask, window=(call.left, call.right), scale=call.scale, softcap=call.softcap,
        softcap_approx=call.softcap_approx and op == "forward", dropout_p=call.dropout_p,
        deterministic=call.deterministic and op == "backward", max_seqlen_q=call.max_seqlen_q, max_seqlen_k=call.max_seqlen_k)


def _execute(tensors: dict, options, state: Tensor | None, n_said: int = _run.ALL) -> None:
    if state is None:
        return _run.execute(tensors, options, n_said=n_said)
    if state.is_cuda:
        at = state.data_ptr()
        return _run.execute(tensors, options, (0, 0), (at, at + 8), n_said=n_said)
    return _run.execute(tensors, options, tuple(state.tolist()), n_said=n_said)


_NAMES = ("bias", "alibi_slopes", "sink", "seqstart_q", "seqstart_k", "seqlen_q", "seqlen_k", "mask_intervals", "mask_bits")
_NO_EXTRAS = (None,) * len(_NAMES)


def _extras(bias=None, slopes=None, sink=None, seqstart_q=None, seqstart_k=None, seqlen_q=None, seqlen_k=None, intervals=None, bits=None):
    """All of them; _NO_EXTRAS itself where there are none: most calls have none, and go a shorter way."""
    if (bias is None and slopes is None and sink is None and seqstart_q is None and seqstart_k is None and seqlen_q is None
            and seqlen_k is None and intervals is None and bits is None):
        return _NO_EXTRAS
    return bias, slopes, sink, seqstart_q, seqstart_k, seqlen_q, seqlen_k, intervals, bits


def _masked(mask, q, layout, packed) -> tuple:
    """(endpoints of intervals or None, bits or None) of what a caller gave as mask=, beside @q."""
    if mask is None:
        return None, None
    lead, _, rows = (1, *_problem.row_extents(q.shape, layout, True)) if packed else _problem.row_extents(q.shape, layout, False)
    role, data = masks.data_of(mask, q, rows, lead)
    if not isinstance(data, Tensor):
        raise invalid(f"mask is a {type(data).__name__}: one of fmha.masks, or a torch tensor", "mask")
    if data.device != q.device:
        raise invalid(f"mask is on {data.device} and q on {q.device}", "mask")
    return (_arrays.int32(data, "mask"), None) if role == "mask_intervals" else (None, data)


def _inputs(q, k, v, extras):
    tensors = {"q": q, "k": k, "v": v}
    if extras is not _NO_EXTRAS:
        tensors |= {n: x for n, x in zip(_NAMES, extras) if x is not None}
    return tensors


def _forward(q, k, v, extras, call: Call, state, with_lse=True, with_randval=False):
    """(O, LSE, dropout's bytes), the last two None when not wanted."""
    tensors = _inputs(q, k, v, extras)
    n_said = len(tensors)
    packed = "seqstart_q" in tensors  # rows behind the last sequence are 0
    same = v.size(-1) == q.size(-1) and q.is_contiguous() and not packed
    new = q.new_zeros if packed else q.new_empty
    o = tensors["o"] = torch.empty_like(q) if same else new((*q.shape[:-1], v.shape[-1]))
    lse = randval = None
    if with_lse or with_randval:
        rows = _problem.row_extents(q.shape, call.layout, "seqstart_q" in tensors)
    if with_lse:
        lse = tensors["lse"] = torch.empty(rows, dtype=torch.float32, device=q.device)
        if packed:
            lse.fill_(-math.inf)
    if with_randval:
        keys = call.max_seqlen_k if "seqstart_k" in tensors else k.shape[_problem.LAYOUTS[call.layout][1]]
        randval = tensors["randval"] = torch.empty((*rows, keys), dtype=torch.uint8, device=q.device)
    _execute(tensors, _options("forward", call), state, n_said)
    return o, lse, randval


_SUMS_KEYS = frozenset(("cpu",))  # whose kernels sum dBias over keys


def _with_keys(bias, tensors, call):
    """@bias, expanded along the keys where its gradient would be a sum over them that kernels do not make."""
    if bias.device.type in _SUMS_KEYS or (bias.dim() and bias.shape[-1] != 1):
        return bias
    keys = call.max_seqlen_k if "seqstart_k" in tensors else tensors["k"].shape[_problem.LAYOUTS[call.layout][1]]
    return bias.expand(*bias.shape[:-1], keys)


def _backward(grad, dlse, q, k, v, o, lse, extras, call: Call, state, want_dbias, own=False):
    """(dQ, dK, dV, dBias or None, dSink or None). @grad, @dlse: of O and LSE, None: none. @own: O and LSE are what _forward() made."""
    tensors = _inputs(q, k, v, extras)
    tensors["do"] = torch.zeros_like(o) if grad is None else _again.readable(grad)
    if dlse is not None:
        tensors["dlse"] = dlse.resolve_neg().contiguous()
    n_said = len(tensors) + (0 if own else 2)
    tensors["o"], tensors["lse"] = o, lse
    like = torch.zeros_like if "seqstart_q" in tensors else torch.empty_like
    dq, dk, dv = tensors["dq"], tensors["dk"], tensors["dv"] = like(q), like(k), like(v)
    dbias = dsink = None
    if want_dbias:
        bias = tensors["bias"] = _with_keys(tensors["bias"], tensors, call)
        # Contiguous: an expanded bias's own strides would make its elements overlap.
        dbias = tensors["dbias"] = (torch.zeros if "seqstart_q" in tensors else torch.empty)(bias.shape, dtype=bias.dtype, device=q.device)
    if "sink" in tensors:
        dsink = tensors["dsink"] = torch.empty_like(tensors["sink"])
    _execute(tensors, _options("backward", call), state, n_said)
    if want_dbias and dbias.shape != extras[0].shape:
        dbias = dbias.sum(-1, keepdim=extras[0].dim() > 0, dtype=torch.float32).to(bias.dtype)
    return dq, dk, dv, dbias, dsink


class _Attention(torch.autograd.Function):
    """O, or (O, LSE). @names: of the extras that are passed."""

    @staticmethod
    def forward(ctx, call, state, with_lse, names, q, k, v, *present):
        extras = _spread(names, present)
        o, lse, _ = _forward(q, k, v, extras, call, state)
        ctx.save_for_backward(q, k, v, o, lse, *present)
        ctx.call, ctx.state, ctx.names = call, state, names
        ctx.set_materialize_grads(False)
        return (o, lse) if with_lse else o

    @staticmethod
    def backward(ctx, grad, dlse=None):
        if not torch.is_grad_enabled():
            return _gradients(ctx, grad, dlse)
        with torch.no_grad():  # create_graph=True
            found = _gradients(ctx, grad, dlse)
        q, k, _, _, _, *present = ctx.saved_tensors
        return _again.once(found, grad, dlse, q, k, *present)  # not of v, in which O is linear


_apply_attention = _again.apply_of(_Attention)


def _spread(names, present):
    if not names:
        return _NO_EXTRAS
    found = dict(zip(names, present))
    return tuple(found.get(n) for n in _NAMES)


def _gradients(ctx, grad, dlse):
    q, k, v, o, lse, *present = ctx.saved_tensors
    names = ctx.names
    want_dbias = "bias" in names and ctx.needs_input_grad[7 + names.index("bias")]
    dq, dk, dv, dbias, dsink = _backward(grad, dlse, q, k, v, o, lse, _spread(names, present), ctx.call, ctx.state, want_dbias,
                                         own=True)
    if not names:
        return None, None, None, None, dq, dk, dv
    return None, None, None, None, dq, dk, dv, *({"bias": dbias, "sink": dsink}.get(n) for n in names)


def _differentiable(q, k, v, extras, call, state, with_lse=False):
    if extras is _NO_EXTRAS:
        return _apply_attention(call, state, with_lse, (), q, k, v)
    names = tuple(n for n, x in zip(_NAMES, extras) if x is not None)
    return _apply_attention(call, state, with_lse, names, q, k, v, *(x for x in extras if x is not None))


# ---- torch.compile: the same as operators that a graph can hold ----


def _operator(name: str):
    """The function as an operator of torch. torch.library.custom_op would look for aliases at each call, for 5 us."""
    def register(function):
        schema = torch.library.infer_schema(function, mutates_args=())
        torch.library.define(f"fmha::{name}", schema, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.impl(f"fmha::{name}", ("cpu", "cuda"), function)
        return function

    return register


@_operator("attention")
def _op(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, alibi_slopes: Tensor | None, sink: Tensor | None,
        seqstart_q: Tensor | None, seqstart_k: Tensor | None, seqlen_q: Tensor | None, seqlen_k: Tensor | None,
        mask_intervals: Tensor | None, mask_bits: Tensor | None, state: Tensor | None,
        layout: str, mask: int, left: int, right: int, scale: float | None, softcap: float, dropout_p: float, max_seqlen_q: int, max_seqlen_k: int,
        deterministic: bool, softcap_approx: bool = False) -> tuple[Tensor, Tensor]:
    call = Call(layout, mask, left, right, scale, softcap, dropout_p, max_seqlen_q, max_seqlen_k, deterministic, softcap_approx)
    return _forward(q, k, v, _extras(bias, alibi_slopes, sink, seqstart_q, seqstart_k, seqlen_q, seqlen_k, mask_intervals, mask_bits),
                    call, state)[:2]


@torch.library.register_fake("fmha::attention")
def _(q, k, v, bias, alibi_slopes, sink, seqstart_q, seqstart_k, seqlen_q, seqlen_k, mask_intervals, mask_bits, state, layout, *_):
    o = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return o, q.new_empty(_problem.row_extents(q.shape, layout, seqstart_q is not None), dtype=torch.float32)


@_operator("attention_backward")
def _op_backward(grad: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, bias: Tensor | None,
                 alibi_slopes: Tensor | None, sink: Tensor | None, seqstart_q: Tensor | None, seqstart_k: Tensor | None,
                 seqlen_q: Tensor | None, seqlen_k: Tensor | None,
        mask_intervals: Tensor | None, mask_bits: Tensor | None, state: Tensor | None, want_dbias: bool, layout: str, mask: int, left: int, right: int, scale: float | None,
                 softcap: float, dropout_p: float, max_seqlen_q: int, max_seqlen_k: int,
                 deterministic: bool, softcap_approx: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    call = Call(layout, mask, left, right, scale, softcap, dropout_p, max_seqlen_q, max_seqlen_k, deterministic, softcap_approx)
    extras = _extras(bias, alibi_slopes, sink, seqstart_q, seqstart_k, seqlen_q, seqlen_k, mask_intervals, mask_bits)
    found = _backward(grad, dlse, q, k, v, o, lse, extras, call, state, want_dbias)
    return tuple(x if x is not None else q.new_empty(0) for x in found)


@torch.library.register_fake("fmha::attention_backward")
def _(grad, dlse, q, k, v, o, lse, bias, alibi_slopes, sink, seqstart_q, seqstart_k, seqlen_q, seqlen_k, mask_intervals, mask_bits, state,
      want_dbias, *_):
    dbias = torch.empty(bias.shape, dtype=bias.dtype, device=q.device) if want_dbias else q.new_empty(0)
    dsink = torch.empty_like(sink) if sink is not None else q.new_empty(0)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), dbias, dsink


def _setup(ctx, inputs, output):
    q, k, v, bias, alibi_slopes, sink, seqstart_q, seqstart_k, seqlen_q, seqlen_k, mask_intervals, mask_bits, state, *ctx.call = inputs
    o, lse = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, o, lse, bias, alibi_slopes, sink, seqstart_q, seqstart_k, seqlen_q, seqlen_k, mask_intervals, mask_bits,
                          state)


def _gradient(ctx, grad, dlse):
    want_dbias = ctx.needs_input_grad[3]
    dq, dk, dv, dbias, dsink = torch.ops.fmha.attention_backward(grad, dlse, *ctx.saved_tensors, want_dbias, *ctx.call)
    others = (None,) * (1 + 6 + len(ctx.call))
    return dq, dk, dv, dbias if want_dbias else None, None, dsink if ctx.needs_input_grad[5] else None, *others


def _second_gradient(ctx, *grads):
    return _again._Refusal.backward(ctx, *grads)


torch.library.register_autograd("fmha::attention", _gradient, setup_context=_setup)
torch.library.register_autograd("fmha::attention_backward", _second_gradient)


# ---- what people call ----


def _autocast(*tensors):
    kind = "cuda" if tensors[0].is_cuda else tensors[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t.to(dtype) if t is not None and t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors)


def _state(q: Tensor) -> Tensor:
    """Dropout's seed and offset, drawn where @q is from torch's generator: graphs replay with new ones."""
    return torch.randint(0, 2**62, (2,), dtype=torch.int64, device=q.device)


def _apply(q, k, v, extras, call: Call, want_lse=False, words=None) -> tuple[Tensor, Tensor | None]:
    """(O, LSE or None). @words: what _again.attend() is to know this call by, if it is of q, k and v alone; or None."""
    state = None
    if call.dropout_p > 0:
        state = _state(q)
    if _tensors.by_operator(q, k, v, *extras):
        if type(q) not in _tensors.PLAIN and type(q).__name__ == "DTensor":
            from .. import _sharding  # torch.distributed.tensor is there then

            _sharding.register()
        return torch.ops.fmha.attention(q, k, v, *extras, state, *call)
    if words is not None and state is None and q.is_cuda:
        o = _again.attend_first(words, q, k, v, _options("forward", call), _options("backward", call))
        if o is not None:
            return o, None
    if torch.is_grad_enabled() and _needs_gradient(q, k, v, extras[0], extras[2]):
        found = _differentiable(q, k, v, extras, call, state, want_lse)
        return found if want_lse else (found, None)
    return _forward(q, k, v, extras, call, state, want_lse)[:2]


def _needs_gradient(q, k, v, bias, sink):
    return (q.requires_grad or k.requires_grad or v.requires_grad or (bias is not None and bias.requires_grad)
            or (sink is not None and sink.requires_grad))


def _additive(mask: Tensor, q: Tensor) -> Tensor:
    """A torch mask as a bias of [.., rows, keys] that broadcasts to [batch, heads, rows, keys]."""
    if mask.dtype == torch.bool:
        mask = torch.zeros((), dtype=q.dtype, device=q.device).masked_fill(~mask, float("-inf"))
    elif mask.dtype != q.dtype:
        mask = mask.to(q.dtype)
    return mask if mask.dim() == 0 or mask.stride(-1) == 1 or mask.shape[-1] == 1 else mask.contiguous()


_ARGUMENTS = ("q", "k", "v", "bias", "alibi_slopes", "sink", "cu_seqlens_q", "cu_seqlens_k")
_SDPA_ARGUMENTS = ("query", "key", "value", "attn_mask")


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, window: tuple = (-1, -1), align: str = "bottom_right",
              scale: float | None = None, softcap: float = 0.0, bias: Tensor | None = None, alibi_slopes: Tensor | None = None,
              sink: Tensor | None = None, dropout_p: float = 0.0, cu_seqlens_q: Tensor | None = None,
              cu_seqlens_k: Tensor | None = None, max_seqlen_q: int = 0, max_seqlen_k: int = 0, layout: str = "bshd",
              deterministic: bool | None = None, return_lse: bool = False, mask=None, softcap_approx: bool = False):
    """fmha.attention() with gradients: for q, k, v, bias and sink.

    Args are fmha.attention()'s; deterministic: None: what torch.use_deterministic_algorithms() says. Dropout takes its seed
    from torch's generator of the device. A loss may depend on LSE too. Gradients of softcap_approx are the exact cap's.
    """
    words = None
    if (bias is None and alibi_slopes is None and sink is None and cu_seqlens_q is None and cu_seqlens_k is None and mask is None
            and return_lse is False and type(window) is tuple and not torch.is_autocast_enabled()):
        words = (layout, causal, window, align, scale, softcap, dropout_p, deterministic, max_seqlen_q, max_seqlen_k, softcap_approx,
                 torch.are_deterministic_algorithms_enabled())
        o = _again.attend(words, q, k, v)
        if o is not None:
            return o
    if not torch.compiler.is_compiling():
        _check.words(causal=causal, window=window, align=align, scale=scale, softcap=softcap, dropout_p=dropout_p, layout=layout,
                     max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, return_lse=return_lse, softcap_approx=softcap_approx)
        if deterministic is not None:
            _check.flag(deterministic, "deterministic")
        q, k, v, bias, alibi_slopes, sink, cu_seqlens_q, cu_seqlens_k = _tensors.checked_inputs(
            _ARGUMENTS, q, k, v, bias, alibi_slopes, sink, cu_seqlens_q, cu_seqlens_k)
    q, k, v, bias = _autocast(q, k, v, bias)
    intervals, bits = _masked(mask, q, layout, cu_seqlens_q is not None)
    band, (left, right) = _problem.masking(causal, window, align)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    call = Call(layout, band, left, right, scale, float(softcap), float(dropout_p), max_seqlen_q, max_seqlen_k, deterministic, softcap_approx)
    extras = _extras(bias, alibi_slopes, sink, cu_seqlens_q, cu_seqlens_k, None, None, intervals, bits)
    o, lse = _apply(q, k, v, extras, call, return_lse, words)
    return (o, lse) if return_lse else o


def _expanded(query, key, value, enable_gqa):
    """All three with the leading axes that they broadcast to; gradients are summed over those again."""
    if query.dim() < 3 or key.dim() < 3 or value.dim() < 3:
        raise invalid(f"query is {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}", "tensor.k")
    heads, kv_heads = query.size(-3), key.size(-3)
    if not enable_gqa and heads != kv_heads and 1 not in (heads, kv_heads):
        raise invalid(f"{heads} query heads and {kv_heads} key heads: say enable_gqa=True", "nhead_k")
    try:
        lead = torch.broadcast_shapes(*(t.shape[:-3] for t in (query, key, value)))
        if not enable_gqa:
            heads = kv_heads = torch.broadcast_shapes(*((t.size(-3),) for t in (query, key, value)))[0]
        return (query.expand(*lead, heads, -1, -1), key.expand(*lead, kv_heads, -1, -1), value.expand(*lead, kv_heads, -1, -1))
    except RuntimeError:
        raise invalid(f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} do not broadcast",
                      "tensor.k") from None


def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
                                 dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
                                 enable_gqa: bool = False) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention, with its semantics.

    Args:
        query: [..., heads, rows, hdim]; key, value: [..., kv heads, keys, hdim]; kv heads may be fewer with enable_gqa.
        attn_mask: True: visible; floats are added; broadcasts to [..., heads, rows, keys]. It may need a gradient.
        is_causal: the band starts at the top left; not together with attn_mask.

    A row that sees no key is 0 (torch's math backend: NaN). Double backward is not supported.
    """
    words = None
    if attn_mask is None and not torch.is_autocast_enabled():
        words = "bhsd", is_causal, dropout_p, scale, enable_gqa, torch.are_deterministic_algorithms_enabled()
        o = _again.attend(words, query, key, value)
        if o is not None:
            return o
    if not torch.compiler.is_compiling():
        _check.words(is_causal=is_causal, dropout_p=dropout_p, scale=scale, enable_gqa=enable_gqa)
        query, key, value, attn_mask = _tensors.checked_inputs(_SDPA_ARGUMENTS, query, key, value, attn_mask)
    if is_causal and attn_mask is not None:
        raise invalid("is_causal and attn_mask exclude each other", "attn_mask")
    n_dims = query.dim()
    if n_dims < 2:
        raise invalid(f"query has {n_dims} dimensions: at least 2", "tensor.q")
    q, k, v = query, key, value = _autocast(query, key, value)
    if query.shape[:-2] != key.shape[:-2] or key.shape[:-2] != value.shape[:-2]:
        q, k, v = query, key, value = _expanded(query, key, value, enable_gqa)
        n_dims = query.dim()
    if n_dims != 4:
        q, k, v = (t.reshape(-1, *((1,) * (3 - t.dim())), *t.shape[-3:]) for t in (query, key, value))
    bias = None
    if attn_mask is not None:
        bias = _additive(attn_mask, q)
        if bias.dim() > 4:
            bias = bias.expand(*query.shape[:-3], *bias.shape[-3:]).reshape(-1, *bias.shape[-3:])
    mask, right = (_problem.MASK_TOP_LEFT, 0) if is_causal else (_problem.MASK_NONE, -1)
    call = Call("bhsd", mask, -1, right, scale, 0.0, float(dropout_p), 0, 0, torch.are_deterministic_algorithms_enabled())
    o = _apply(q, k, v, _extras(bias), call,
                   words=words if n_dims == 4 else None)[0]
    return o if n_dims == 4 else o.reshape(*query.shape[:-1], o.shape[-1])


_own_sdpa = torch.nn.functional.scaled_dot_product_attention
_replaced = 0
_replace_lock = threading.Lock()


_KINDS = frozenset((torch.float32, torch.float16, torch.bfloat16))


def _takes(query, key, value, attn_mask) -> bool:
    for tensor in (query, key, value, attn_mask):
        if tensor is not None and (type(tensor) not in _tensors.PLAIN or tensor.layout != torch.strided or tensor.is_nested
                                   or tensor.device.type not in _tensors.DEVICES or _tensors.is_wrapped(tensor)):
            return False
    return (query is not None and key is not None and value is not None and query.dtype in _KINDS and query.shape[-1] <= MAX_HDIM
            and value.shape[-1] <= MAX_HDIM and query.numel() > 0 and key.numel() > 0)


def _or_torch(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    if not _takes(query, key, value, attn_mask):
        return _own_sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    return scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@contextlib.contextmanager
def replace_sdpa():
    """torch.nn.functional.scaled_dot_product_attention is fmhad's inside, in all threads, wherever it takes the problem; what it
    does not (float64, nested and batched tensors, head dims beyond 256) stays torch's own."""
    global _replaced
    with _replace_lock:
        _replaced += 1
        torch.nn.functional.scaled_dot_product_attention = _or_torch
    try:
        yield
    finally:
        with _replace_lock:
            _replaced -= 1
            if _replaced == 0:
                torch.nn.functional.scaled_dot_product_attention = _own_sdpa
