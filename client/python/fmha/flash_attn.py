# SPDX-License-Identifier: MIT
"""flash-attn 2's functions, by the same names, arguments and results: `from fmha.flash_attn import flash_attn_func`.

Gradients as there: of q, k and v. What differs is in the docstrings: LSE of rows that see no key is -inf (there +inf or 0), ALiBi's
LSE is the true one, the dropout rate has 256 steps, as there, and S_dmask has the problem's own extents, not rounded up.
"""
from __future__ import annotations

import functools

import torch
from torch import Tensor

from . import _again, _arrays, _check, _problem, _tensors
from . import torch as ft
from ._lib import invalid, lib, not_supported

__all__ = [
    "flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_kvpacked_func", "flash_attn_varlen_func",
    "flash_attn_varlen_qkvpacked_func", "flash_attn_varlen_kvpacked_func", "flash_attn_with_kvcache",
    "index_first_axis", "pad_input", "unpad_input",
]


def _pair(window_size):
    return window_size if type(window_size) is tuple else tuple(window_size) if isinstance(window_size, list) else window_size


def _call(*said):
    """ft.Call of what the caller said, judged once for each."""
    try:
        return _judged_call(*said)
    except TypeError:  # something among it is no key of a cache
        return _judged_call.__wrapped__(*said)


@functools.lru_cache(maxsize=4096)
def _judged_call(layout, dropout_p, softmax_scale, causal, window_size, softcap, deterministic, longest=(0, 0)):
    if not torch.compiler.is_compiling():
        _check.words(dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
                     deterministic=deterministic, max_seqlen_q=longest[0], max_seqlen_k=longest[1])
    mask, (left, right) = _problem.masking(causal, window_size, "bottom_right")
    return ft.Call(layout, mask, left, right, softmax_scale, float(softcap), float(dropout_p), int(longest[0]), int(longest[1]),
                   deterministic)


_ARGUMENTS = ("q", "k", "v", "alibi_slopes", "cu_seqlens_q", "cu_seqlens_k")


def _attend(q, k, v, slopes, cu, call, return_attn_probs):
    if not torch.compiler.is_compiling():
        q, k, v, slopes, *cu = _tensors.checked_inputs(_ARGUMENTS, q, k, v, slopes, *cu)
    extras = ft._extras(None, slopes, None, *cu)
    if not return_attn_probs:
        return ft._with_hdim(q, k, v, extras, call, words=call if extras is ft._NO_EXTRAS else None)[0]
    if call.dropout_p == 0:
        return *ft._with_hdim(q, k, v, extras, call, True), None
    if cu[0] is not None:
        raise not_supported("return_attn_probs with dropout takes sequences of one length")
    if q.shape[-1] % 8 or v.shape[-1] % 8:
        raise not_supported("return_attn_probs with dropout takes head dims that are multiples of 8")
    if _tensors.by_operator(q, k, v, *extras):
        raise not_supported("return_attn_probs with dropout needs tensors with memory, and no graph that records the call")
    state = ft._state(q)
    if torch.is_grad_enabled() and ft._needs_gradient(q, k, v, None, None):
        lse_to = []
        o = ft._differentiable(q, k, v, extras, call, state, lse_to)
        lse = lse_to[0]
    else:
        o, lse, _ = ft._forward(q, k, v, extras, call, state)
    with torch.no_grad():
        randval = ft._forward(q, k, v, extras, call, state, with_randval=True)[2]
        return o, lse, _probabilities(q, k, slopes, call, lse, randval)


def _probabilities(q, k, slopes, call, lse, randval):
    """softmax(S) of [batch, heads, rows, keys], negative where dropped."""
    rows, keys, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    k = k.repeat_interleave(group, 2)
    s = torch.einsum("bihd,bjhd->bhij", q.float(), k.float()) * (q.shape[-1] ** -0.5 if call.scale is None else call.scale)
    if call.softcap:
        s = call.softcap * torch.tanh(s / call.softcap)
    distance = torch.arange(rows, device=q.device)[:, None] + keys - rows - torch.arange(keys, device=q.device)[None]
    if slopes is not None:
        s = s - (slopes if slopes.dim() == 2 else slopes[None])[:, :, None, None] * distance.abs()
    if call.mask != _problem.MASK_NONE:
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if call.left >= 0:
            hidden |= distance > call.left
        if call.right >= 0:
            hidden |= -distance > call.right
        s = s.masked_fill(hidden, float("-inf"))
    p = torch.exp(s - lse[..., None]).nan_to_num(0.0)
    keep = randval <= int(255 * (1 - call.dropout_p))
    return torch.where(keep, p, -p).to(q.dtype)


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
                    causal: bool = False, window_size: tuple = (-1, -1), softcap: float = 0.0,
                    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False):
    """q [batch, rows, heads, hdim], k, v [batch, keys, kv heads, hdim] -> O, or (O, softmax_lse [batch, heads, rows], S_dmask).

    causal and window_size are tied to the bottom right corner. alibi_slopes float32 [heads] or [batch, heads]. S_dmask: None
    without dropout, else [batch, heads, rows, keys] in q's type, negative where dropped.
    """
    call = _call("bshd", dropout_p, softmax_scale, causal, _pair(window_size), softcap, deterministic)
    if alibi_slopes is None and not return_attn_probs:
        o = _again.attend(call, q, k, v)
        if o is not None:
            return o
    return _attend(q, k, v, alibi_slopes, (None, None), call, return_attn_probs)


def flash_attn_qkvpacked_func(qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
                              window_size: tuple = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
                              deterministic: bool = False, return_attn_probs: bool = False):
    """flash_attn_func() on [batch, rows, 3, heads, hdim], without copies."""
    return flash_attn_func(*qkv.unbind(2), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                           return_attn_probs)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
                             causal: bool = False, window_size: tuple = (-1, -1), softcap: float = 0.0,
                             alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False):
    """flash_attn_func() with k and v as [batch, keys, 2, kv heads, hdim], without copies."""
    return flash_attn_func(q, *kv.unbind(2), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                           return_attn_probs)


def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
                           max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
                           window_size: tuple = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
                           deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None):
    """Packed sequences: q [total rows, heads, hdim], cu_seqlens_* int32 [sequences + 1]; softmax_lse is [heads, total rows].

    With block_table, k and v are pages, [pages, page size, kv heads, hdim], and cu_seqlens_k gives the lengths; no gradient.
    """
    call = _call("bshd", dropout_p, softmax_scale, causal, _pair(window_size), softcap, deterministic, (max_seqlen_q, max_seqlen_k))
    if block_table is not None:
        return _paged_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, call, return_attn_probs, block_table)
    return _attend(q, k, v, alibi_slopes, (cu_seqlens_q, cu_seqlens_k), call, return_attn_probs)


def _paged_varlen(q, k, v, cu_q, cu_k, slopes, call, return_attn_probs, block_table):
    q, k, v, slopes, cu_q, cu_k, block_table = _tensors.checked_inputs((*_ARGUMENTS, "block_table"), q, k, v, slopes, cu_q, cu_k, block_table)
    if _tensors.by_operator(q, k, v, slopes, cu_q, cu_k, block_table):
        raise not_supported("a paged cache needs tensors with memory, and no graph that records the call")
    if call.dropout_p > 0:
        raise not_supported("dropout on a paged cache")
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
        raise not_supported("a paged cache has no gradient")
    tensors = ft._inputs(q, k, v, (None, slopes, None, cu_q, None))
    tensors |= {"seqlen_k": cu_k.diff(), "block_table": block_table, "o": torch.empty_like(q)}
    if return_attn_probs:
        tensors["lse"] = torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)
    ft._execute(tensors, ft._options("forward", call), None)
    return (tensors["o"], tensors["lse"], None) if return_attn_probs else tensors["o"]


def flash_attn_varlen_qkvpacked_func(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0,
                                     softmax_scale: float | None = None, causal: bool = False, window_size: tuple = (-1, -1),
                                     softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
                                     return_attn_probs: bool = False):
    """flash_attn_varlen_func() on [total rows, 3, heads, hdim]."""
    return flash_attn_varlen_func(*qkv.unbind(1), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale,
                                  causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
                                    max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
                                    causal: bool = False, window_size: tuple = (-1, -1), softcap: float = 0.0,
                                    alibi_slopes: Tensor | None = None, deterministic: bool = False,
                                    return_attn_probs: bool = False):
    """flash_attn_varlen_func() with k and v as [total keys, 2, kv heads, hdim]."""
    return flash_attn_varlen_func(q, *kv.unbind(1), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
                                  softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)


_CACHE_ARGUMENTS = ("q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx",
                    "cache_leftpad", "block_table", "alibi_slopes")


def flash_attn_with_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
                            rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None,
                            cache_seqlens: int | Tensor | None = None, cache_batch_idx: Tensor | None = None,
                            cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
                            softmax_scale: float | None = None, causal: bool = False, window_size: tuple = (-1, -1),
                            softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None,
                            num_splits: int = 0, return_softmax_lse: bool = False):
    """Attention over a cache that k and v, [batch, new rows, kv heads, hdim], are written to first, in place; no gradient.

    k_cache, v_cache: [batch, capacity, kv heads, hdim], rows of it chosen by cache_batch_idx; or with block_table pages, [pages, page
    size, kv heads, hdim]. cache_seqlens: how much is in use before the call. rotary_cos, rotary_sin: [positions, rotary_dim / 2],
    of the cache's type or float32: k is rotated by its position, q by the first new one, or with a mask each row by its own.
    """
    _check.words(softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap, num_splits=num_splits,
                 rotary_interleaved=rotary_interleaved, return_softmax_lse=return_softmax_lse)
    if isinstance(cache_seqlens, int):
        _check.count(cache_seqlens, "cache_seqlens")
        cache_seqlens = torch.full((q.shape[0],), cache_seqlens, dtype=torch.int32, device=q.device)
    q, k_cache, v_cache, *others = _tensors.checked_inputs(
        _CACHE_ARGUMENTS, q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table,
        alibi_slopes)
    k_cache, v_cache = (_tensors.alone(t, n, k is not None) for t, n in ((k_cache, "k_cache"), (v_cache, "v_cache")))
    k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table, alibi_slopes = (
        t if t is None else _tensors.alone(t, n) for t, n in zip(others, _CACHE_ARGUMENTS[3:]))
    q = _tensors.alone(q, "q")
    if (k is None) != (v is None) or (k is not None and cache_seqlens is None):
        raise invalid("k, v and cache_seqlens come together", "tensor.k_new")
    mask, band = _problem.masking(causal, window_size, "bottom_right")
    rope = lib.FMHA_ROPE_INTERLEAVED if rotary_interleaved else lib.FMHA_ROPE_HALF_ROTATED
    longest = block_table.shape[1] * k_cache.shape[1] if block_table is not None else 0
    options = _problem.Options(
        op="forward", mask=mask, window=band, scale=softmax_scale, softcap=float(softcap), n_splits=num_splits,
        max_seqlen_k=longest, rope=rope if rotary_cos is not None else 0,
        rotary_dim=2 * rotary_cos.shape[1] if rotary_cos is not None else 0)
    given = dict(q=q, k=k_cache, v=v_cache, k_new=k, v_new=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin, seqlen_k=cache_seqlens,
                 cache_batch_idx=cache_batch_idx, leftpad_k=cache_leftpad, block_table=block_table, alibi_slopes=alibi_slopes)
    tensors = {n: _arrays.int32(t, n) if n in _INTEGERS else t for n, t in given.items() if t is not None}
    tensors["o"] = q.new_empty((*q.shape[:-1], v_cache.shape[-1]))
    if return_softmax_lse:
        tensors["lse"] = torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32, device=q.device)
    ft._execute(tensors, options, None)
    return (tensors["o"], tensors["lse"]) if return_softmax_lse else tensors["o"]


_INTEGERS = ("seqlen_k", "cache_batch_idx", "leftpad_k", "block_table")


# ---- flash_attn.bert_padding ----


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """Rows @indices of [rows, ...]."""
    return x[indices]


def unpad_input(hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None):
    """Packs [batch, rows, ...] by a mask of [batch, rows], 1: in use.

    Returns: (packed [total, ...], indices [total] into batch * rows, cu_seqlens int32 [batch + 1], the longest, lengths in use
    int32 [batch]). unused_mask: rows that are packed too, but not in use. The longest is read on the host.
    """
    everything = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = everything.sum(-1, dtype=torch.int32)
    used = attention_mask.sum(-1, dtype=torch.int32)
    indices = torch.nonzero(everything.flatten()).flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return hidden_states.flatten(0, 1)[indices], indices, cu_seqlens, int(lengths.max()), used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """What unpad_input() packed as [batch, seqlen, ...] again, zeros elsewhere."""
    out = hidden_states.new_zeros((batch * seqlen, *hidden_states.shape[1:]))
    return out.index_copy(0, indices, hidden_states).unflatten(0, (batch, seqlen))
