# SPDX-License-Identifier: MIT
"""flash-attn 2's functions, by the same names, arguments and results: `from fmha.flash_attn import flash_attn_func`.

Gradients as there: of q, k and v. What differs is in the docstrings: LSE of rows that see no key is -inf (there +inf or 0), ALiBi's
LSE is the true one, the dropout rate has 256 steps, as there, and S_dmask is softmax(S) with the problem's own extents, where flash-attn
stores exponentials by the maximum of a kernel's blocks, rounded up to 128. seqused_*, out and descales have flash-attn 3's names.
"""
from __future__ import annotations

import functools
import math
import operator

import torch
from torch import Tensor

from . import _again, _arrays, _check, _problem, _run, _tensors
from ._lib import invalid, lib, not_supported
from .torch import _functions as ft

__all__ = [
    "flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_kvpacked_func", "flash_attn_varlen_func",
    "flash_attn_varlen_qkvpacked_func", "flash_attn_varlen_kvpacked_func", "flash_attn_with_kvcache",
    "index_first_axis", "index_put_first_axis", "pad_input", "unpad_input", "unpad_input_for_concatenated_sequences",
]


def _pair(window_size):
    """Two integers, whatever holds them: tensors do in flash-attn's own tests. What else it is, _check judges."""
    if type(window_size) is tuple and len(window_size) == 2 and type(window_size[0]) is int and type(window_size[1]) is int:
        return window_size
    try:
        return tuple(w if w is None else operator.index(w) for w in window_size)
    except TypeError:
        return window_size


def _call(*said):
    """ft.Call of what the caller said, judged once for each."""
    try:
        return _judged_call(*said)
    except TypeError:  # something among it is no key of a cache
        return _judged_call.__wrapped__(*said)


@functools.lru_cache(maxsize=4096)
def _judged_call(layout, dropout_p, softmax_scale, causal, window_size, softcap, deterministic, softcap_approx, longest=(0, 0)):
    if not torch.compiler.is_compiling():
        _check.words(dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
                     deterministic=deterministic, max_seqlen_q=longest[0], max_seqlen_k=longest[1], softcap_approx=softcap_approx)
    mask, (left, right) = _problem.masking(causal, window_size, "bottom_right")
    return ft.Call(layout, mask, left, right, softmax_scale, _cap(softcap), float(dropout_p), int(longest[0]), int(longest[1]),
                   deterministic, softcap_approx)


_ARGUMENTS = ("q", "k", "v", "alibi_slopes", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")


def _cap(softcap) -> float:
    """As in flash-attn: none below 0 either."""
    return 0.0 if softcap <= 0 else float(softcap)


def _at_most(longest, *axes):
    """The longest sequence's length, of which flash-attn takes more than there is. @axes: (tensor, axis), all there is together."""
    try:
        return min(longest, math.prod(tensor.shape[axis] for tensor, axis in axes))
    except (TypeError, AttributeError, IndexError):  # what is wrong with them is said where they are judged
        return longest


def _parts(tensor, name: str, axis: int):
    """qkv's three, or kv's two."""
    if not torch.compiler.is_compiling():
        if tensor is None:
            raise invalid(f"{name} is None: a torch tensor is needed", f"tensor.{name}")
        _tensors.checked((name,), tensor)
        if tensor.dim() != axis + 3 or tensor.shape[axis] != len(name):
            raise invalid(f"{name} is {tuple(tensor.shape)}: {axis + 3} dimensions, {len(name)} at axis {axis}", f"tensor.{name}")
    return tensor.unbind(axis)


def _attend(q, k, v, slopes, cu, call, return_attn_probs, used=(None, None), mask=None):
    if not torch.compiler.is_compiling():
        _check.flag(return_attn_probs, "return_attn_probs")
        q, k, v, slopes, *rest = _tensors.checked_inputs(_ARGUMENTS, q, k, v, slopes, *cu, *used)
        cu, used = rest[:2], rest[2:]
    if mask is not None and return_attn_probs and call.dropout_p > 0:
        raise not_supported("return_attn_probs with dropout and mask=", "mask")
    extras = ft._extras(None, slopes, None, *cu, *used, *ft._masked(mask, q, call.layout, cu[0] is not None))
    if not return_attn_probs:
        return ft._apply(q, k, v, extras, call, words=call if extras is ft._NO_EXTRAS else None)[0]
    if call.dropout_p == 0:
        return *ft._apply(q, k, v, extras, call, True), None
    if _tensors.by_operator(q, k, v, *extras):
        raise not_supported("return_attn_probs with dropout needs tensors with memory, and no graph that records the call")
    call = call._replace(scale=q.shape[-1] ** -0.5 if call.scale is None else call.scale)
    state = ft._state(q)
    if torch.is_grad_enabled() and ft._needs_gradient(q, k, v, None, None):
        o, lse = ft._differentiable(q, k, v, extras, call, state, True)
    else:
        o, lse, _ = ft._forward(q, k, v, extras, call, state)
    with torch.no_grad():
        randval = ft._forward(q, k, v, extras, call, state, with_randval=True)[2]
        probabilities = _probabilities(q, k, slopes, cu, used, call, lse, randval)
    return o, lse, probabilities


def _probabilities(q, k, slopes, cu, used, call, lse, randval):
    """softmax(S) of [batch, heads, rows, keys], negative where dropped; of packed sequences 0 behind their rows and keys."""
    rows, keys, group = q.shape[1], k.shape[1], q.shape[-2] // k.shape[-2]
    n_rows, n_keys = rows, keys
    if cu[0] is not None:
        (q, lse, randval), n_rows = _unpacked(cu[0], call.max_seqlen_q, q, lse.t(), randval.transpose(0, 1))
        (k,), n_keys = _unpacked(cu[1], call.max_seqlen_k, k)
        n_rows, n_keys = (n if u is None else u[:, None, None, None] for n, u in zip((n_rows, n_keys), used))
        lse, randval, rows, keys = lse.transpose(1, 2), randval.transpose(1, 2), q.shape[1], k.shape[1]
    k = k.repeat_interleave(group, 2)
    s = torch.einsum("bihd,bjhd->bhij", q.float(), k.float()) * call.scale
    if call.softcap:
        s = call.softcap * torch.tanh(s / call.softcap)
    row, key = torch.arange(rows, device=q.device)[:, None], torch.arange(keys, device=q.device)
    distance = row + n_keys - n_rows - key
    if slopes is not None:
        s = s - (slopes if slopes.dim() == 2 else slopes[None])[:, :, None, None] * distance.abs()
    hidden = (row >= n_rows) | (key >= n_keys)
    if call.mask != _problem.MASK_NONE and call.left >= 0:
        hidden = hidden | (distance > call.left)
    if call.mask != _problem.MASK_NONE and call.right >= 0:
        hidden = hidden | (-distance > call.right)
    p = torch.exp(s - lse[..., None]).nan_to_num(0.0).masked_fill(hidden, 0.0)
    return torch.where((randval > lib.fmha_dropout_threshold(call.dropout_p)) & ~hidden, -p, p).to(q.dtype)


def _unpacked(cu, longest, *packed):
    """([sequences, longest, ...] of each [total, ...], zeros behind a sequence; lengths as [sequences, 1, 1, 1])."""
    at = torch.arange(longest, device=cu.device)
    lengths = cu.diff()
    index = torch.where(at < lengths[:, None], cu[:-1, None] + at, len(packed[0]))
    behind = [torch.cat([t, t.new_zeros((1, *t.shape[1:]))]) for t in packed]
    return [t[index] for t in behind], lengths[:, None, None, None]


class _Ungraded(torch.autograd.Function):
    """Results that have no gradient, of inputs that ask for one: whoever differentiates is told."""

    @staticmethod
    def forward(ctx, work, sentence, *inputs):
        ctx.sentence = sentence
        return work()

    @staticmethod
    def backward(ctx, *_):
        raise not_supported(ctx.sentence)


_OUTPUTS = {torch.float8_e4m3fn: torch.bfloat16, torch.float8_e5m2: torch.bfloat16}
_CALLED = {"k": "k_cache", "v": "v_cache", "k_new": "k", "v_new": "v", "seqlen_k": "cache_seqlens", "leftpad_k": "cache_leftpad"}


def _inputs(called, written=(), **given):
    """role -> tensor of what is given. @called: what the caller knows roles by, where that differs."""
    names = [called.get(n, n) for n in given]
    checked = zip(given, names, _tensors.checked_inputs(names, *given.values()))
    with torch.no_grad():  # who asks for gradients is told by _Ungraded
        alone = {n: _tensors.alone(t, name, n in written) for n, name, t in checked if t is not None}
    return {n: _arrays.int32(t, called.get(n, n)) if n in _run._INTEGERS else t for n, t in alone.items()}


def _forward_only(tensors, options, return_lse, out, state, sentence):
    """(O, LSE or None). @tensors: by role, but for those two. @out: where O goes, or None."""
    inputs = [t for t in tensors.values() if t.is_floating_point()]
    asked = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
    if out is not None:
        if asked:
            raise invalid("out= has no gradient, but an input requires one", "tensor.o")
        out = _tensors.alone(out, "out", True)

    def work():
        q, lse = tensors["q"], None
        # What lies behind the rows in use is not written.
        new = torch.empty if tensors.keys().isdisjoint(("seqlen_q", "seqstart_q")) else torch.zeros
        extents = (*q.shape[:-1], options.values if options.v_in_k else tensors["v"].shape[-1])
        o = tensors["o"] = new(extents, dtype=_OUTPUTS.get(q.dtype, q.dtype), device=q.device) if out is None else out
        if return_lse:
            rows = _problem.row_extents(q.shape, options.layout, "seqstart_q" in tensors)
            lse = tensors["lse"] = torch.full(rows, float("-inf"), dtype=torch.float32, device=q.device)
        ft._execute(tensors, options, state)
        return o, lse

    return _Ungraded.apply(work, sentence, *inputs) if asked else work()


def _descales(q, k, q_descale, k_descale, v_descale):
    """As roles: float32, one number or [batch, heads]; q's may be given for k's heads, as flash-attn 3 does."""
    q_descale, k_descale, v_descale = _tensors.checked(("q_descale", "k_descale", "v_descale"), q_descale, k_descale, v_descale)
    if q_descale is not None and q_descale.dim() == 2 and q_descale.shape[1] == k.shape[-2] != q.shape[-2]:
        q_descale = q_descale.repeat_interleave(q.shape[-2] // k.shape[-2], 1)
    return {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}


def _is_plain(q, k, out, descales) -> bool:
    return out is not None or getattr(q, "dtype", None) in _OUTPUTS or getattr(k, "dtype", None) in _tensors.NARROW or any(d is not None for d in descales)


def _plain(q, k, v, slopes, cu, call, return_attn_probs, out, descales, block_table=None, mask=None, **more):
    """What has no gradient: fp8, pages, an output that is given."""
    _check.flag(return_attn_probs, "return_attn_probs")
    if call.dropout_p > 0 and (block_table is not None or return_attn_probs):
        what = "dropout on a paged cache" if block_table is not None else "return_attn_probs with dropout and out= or fp8"
        raise not_supported(what)
    what = "a paged cache" if block_table is not None else "attention over int8" if k is not None and k.dtype == torch.int8 else "attention in fp8"
    tensors = _inputs(_SEQUENCES, q=q, k=k, v=v, alibi_slopes=slopes, seqstart_q=cu[0], seqstart_k=cu[1], block_table=block_table,
                      **more, **_descales(q, k, *descales))
    masked = zip(("mask_intervals", "mask_bits"), ft._masked(mask, q, call.layout, cu[0] is not None))
    tensors |= {n: t for n, t in masked if t is not None}
    o, lse = _forward_only(tensors, ft._options("forward", call), return_attn_probs, out, ft._state(q) if call.dropout_p > 0 else None,
                           f"{what} has no gradient")
    return (o, lse, None) if return_attn_probs else o


_SEQUENCES = {"seqstart_q": "cu_seqlens_q", "seqstart_k": "cu_seqlens_k", "seqlen_q": "seqused_q", "seqlen_k": "seqused_k"}


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
                    causal: bool = False, window_size: tuple = (-1, -1), softcap: float = 0.0,
                    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False, *,
                    q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
                    out: Tensor | None = None, mask=None, softcap_approx: bool = False):
    """q [batch, rows, heads, hdim], k, v [batch, keys, kv heads, hdim] -> O, or (O, softmax_lse [batch, heads, rows], S_dmask).

    causal and window_size are tied to the bottom right corner; a softcap of 0 or less is none, and softcap_approx is fmha.attention()'s.
    alibi_slopes float32 [heads] or
    [batch, heads]. S_dmask: None without dropout, else softmax(S) of [batch, heads, rows, keys] in q's type, negative where
    dropped. out: where O goes, without gradients. mask: one of fmha.masks, or its data, under causal and window_size. fp8 takes
    q_descale, k_descale, v_descale, float32, one number or [batch, kv heads] (q's also [batch, heads]), and gives bfloat16, without
    gradients; k and v of fp8 and int8 take a q of float16 or bfloat16, too, and O is as q then.
    """
    call = _call("bshd", dropout_p, softmax_scale, causal, _pair(window_size), softcap, deterministic, softcap_approx)
    descales = q_descale, k_descale, v_descale
    if _is_plain(q, k, out, descales):
        return _plain(q, k, v, alibi_slopes, (None, None), call, return_attn_probs, out, descales, mask=mask)
    if alibi_slopes is None and mask is None and not return_attn_probs:
        o = _again.attend(call, q, k, v)
        if o is not None:
            return o
    return _attend(q, k, v, alibi_slopes, (None, None), call, return_attn_probs, mask=mask)


def flash_attn_qkvpacked_func(qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
                              window_size: tuple = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
                              deterministic: bool = False, return_attn_probs: bool = False):
    """flash_attn_func() on [batch, rows, 3, heads, hdim], without copies."""
    return flash_attn_func(*_parts(qkv, "qkv", 2), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                           return_attn_probs)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
                             causal: bool = False, window_size: tuple = (-1, -1), softcap: float = 0.0,
                             alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False):
    """flash_attn_func() with k and v as [batch, keys, 2, kv heads, hdim], without copies."""
    return flash_attn_func(q, *_parts(kv, "kv", 2), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                           return_attn_probs)


def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None, max_seqlen_q: int,
                           max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
                           window_size: tuple = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
                           deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None, *,
                           seqused_q: Tensor | None = None, seqused_k: Tensor | None = None, q_descale: Tensor | None = None,
                           k_descale: Tensor | None = None, v_descale: Tensor | None = None, out: Tensor | None = None, mask=None,
                           softcap_approx: bool = False):
    """Packed sequences: q [total rows, heads, hdim], cu_seqlens_* int32 [sequences + 1]; softmax_lse is [heads, total rows].

    max_seqlen_*: the longest, or more. seqused_*: int32 [sequences], how much of each is in use; behind it O and gradients are 0.
    S_dmask is [sequences, heads, longest, longest], 0 behind each sequence. With block_table, k and v are pages, [pages, page size,
    kv heads, hdim], and seqused_k or else cu_seqlens_k gives the lengths; no gradient. out, mask (of all rows), softcap_approx and fp8
    as in flash_attn_func().
    """
    paged = block_table is not None
    keys = ((block_table, 1), (k, 1)) if paged else ((k, 0),)
    longest = _at_most(max_seqlen_q, (q, 0)), _at_most(max_seqlen_k, *keys)
    call = _call("bshd", dropout_p, softmax_scale, causal, _pair(window_size), softcap, deterministic, softcap_approx, longest)
    if paged:
        if seqused_k is None:
            seqused_k = cu_seqlens_k.diff()
        cu_seqlens_k = None
    descales = q_descale, k_descale, v_descale
    if paged or _is_plain(q, k, out, descales):
        return _plain(q, k, v, alibi_slopes, (cu_seqlens_q, cu_seqlens_k), call, return_attn_probs, out, descales,
                      block_table=block_table, mask=mask, seqlen_q=seqused_q, seqlen_k=seqused_k)
    return _attend(q, k, v, alibi_slopes, (cu_seqlens_q, cu_seqlens_k), call, return_attn_probs, (seqused_q, seqused_k), mask)


def flash_attn_varlen_qkvpacked_func(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0,
                                     softmax_scale: float | None = None, causal: bool = False, window_size: tuple = (-1, -1),
                                     softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
                                     return_attn_probs: bool = False):
    """flash_attn_varlen_func() on [total rows, 3, heads, hdim]."""
    return flash_attn_varlen_func(*_parts(qkv, "qkv", 1), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale,
                                  causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
                                    max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
                                    causal: bool = False, window_size: tuple = (-1, -1), softcap: float = 0.0,
                                    alibi_slopes: Tensor | None = None, deterministic: bool = False,
                                    return_attn_probs: bool = False):
    """flash_attn_varlen_func() with k and v as [total keys, 2, kv heads, hdim]."""
    return flash_attn_varlen_func(q, *_parts(kv, "kv", 1), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
                                  softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)


def _latents(q, qv, k_cache, v_cache, k, v):
    """Queries, cache and new rows with the values' elements first."""
    _tensors.checked(("q", "qv", "k_cache", "v_cache", "k", "v"), q, qv, k_cache, v_cache, k, v)
    values, elements = v_cache.shape[-1], v_cache.shape[-1] + k_cache.shape[-1]
    if qv.shape[:-1] != q.shape[:-1] or qv.shape[-1] != values or qv.dtype != q.dtype:
        raise invalid(f"qv is {qv.dtype} {tuple(qv.shape)}: as q, {q.dtype} {tuple(q.shape)}, with v_cache's {values} elements", "tensor.q")
    beside = k_cache.data_ptr() - v_cache.data_ptr() == values * v_cache.element_size() and k_cache.stride() == v_cache.stride()
    if not beside or k_cache.shape[:-1] != v_cache.shape[:-1] or k_cache.stride(-1) != 1 or k_cache.dtype != v_cache.dtype:
        raise invalid("qv: k_cache has to follow v_cache in the same rows of memory, as parts of a cache of latents do", "tensor.k")
    cache = v_cache.as_strided((*v_cache.shape[:-1], elements), v_cache.stride())
    return torch.cat((qv, q), -1), cache, None if k is None else torch.cat((v, k), -1)


def flash_attn_with_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
                            rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None,
                            cache_seqlens: int | Tensor | None = None, cache_batch_idx: Tensor | None = None,
                            cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
                            softmax_scale: float | None = None, causal: bool = False, window_size: tuple = (-1, -1),
                            softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None,
                            num_splits: int = 0, return_softmax_lse: bool = False, *, q_descale: Tensor | None = None,
                            k_descale: Tensor | None = None, v_descale: Tensor | None = None, descale_block_k: int = 0,
                            descale_per_page: bool = False, out: Tensor | None = None, qv: Tensor | None = None,
                            softcap_approx: bool = False):
    """Attention over a cache that k and v, [batch, new rows, kv heads, hdim], are written to first, in place; no gradient: what
    requires one is computed all the same, and differentiating it is refused.

    k_cache, v_cache: [batch, capacity, kv heads, hdim], rows of it chosen by cache_batch_idx; or with block_table pages, [pages, page
    size, kv heads, hdim]. cache_seqlens: how much is in use before the call. rotary_cos, rotary_sin: [positions, rotary_dim / 2],
    of q's type or float32: k is rotated by its position, q by the first new one, or with a mask each row by its own.
    out, softcap_approx and fp8 as in flash_attn_func(). A cache of fp8 or int8 also takes q, k and v of float16 or bfloat16, and gives that: k_descale and
    v_descale, one number, [batch, kv heads], [batch, kv heads, blocks of descale_block_k keys] (0: a key each) or, descale_per_page,
    [pages, kv heads] or [pages, kv heads, blocks of a page], are what it is read with, and what k and v are divided by.
    qv [batch, rows, heads, hdim of v] is multiplied with v_cache, as flash-attn 3 has it: S = q K^T + qv V^T, by default times
    1 / sqrt(both head dims together). v_cache and k_cache are then the first and the last elements of the same rows of memory, as
    those of latents are (fmha.mla_decode()).
    """
    if qv is not None:
        if rotary_cos is not None or v_descale is not None:
            raise invalid("qv goes without rotary_cos and v_descale: values are part of the keys", "tensor.rotary_cos")
        q, k_cache, k = _latents(q, qv, k_cache, v_cache, k, v)
    _check.words(softmax_scale=softmax_scale, causal=causal, window_size=_pair(window_size), softcap=softcap, num_splits=num_splits,
                 descale_block_k=descale_block_k, descale_per_page=descale_per_page, rotary_interleaved=rotary_interleaved, return_softmax_lse=return_softmax_lse,
                 softcap_approx=softcap_approx)
    if (k is None) != (v is None) or (k is not None and cache_seqlens is None):
        raise invalid("k, v and cache_seqlens come together", "tensor.k_new")
    if isinstance(cache_seqlens, int):
        _check.count(cache_seqlens, "cache_seqlens")
        cache_seqlens = torch.full((q.shape[0],), cache_seqlens, dtype=torch.int32, device=q.device)
    tensors = _inputs(
        _CALLED, () if k is None else ("k", "v"), q=q, k=k_cache, v=v_cache, k_new=k, v_new=v, rotary_cos=rotary_cos,
        rotary_sin=rotary_sin, seqlen_k=cache_seqlens, cache_batch_idx=cache_batch_idx, leftpad_k=cache_leftpad, block_table=block_table,
        alibi_slopes=alibi_slopes, **_descales(q, k_cache, q_descale, k_descale, v_descale))
    mask, band = _problem.masking(causal, _pair(window_size), "bottom_right")
    rope = lib.FMHA_ROPE_INTERLEAVED if rotary_interleaved else lib.FMHA_ROPE_HALF_ROTATED
    options = _problem.Options(
        op="forward", mask=mask, window=band, scale=softmax_scale, softcap=_cap(softcap), softcap_approx=softcap_approx,
        n_splits=num_splits,
        max_seqlen_k=block_table.shape[1] * k_cache.shape[1] if block_table is not None else 0,
        rope=rope if rotary_cos is not None else 0, rotary_dim=2 * rotary_cos.shape[1] if rotary_cos is not None else 0,
        descale_block_k=descale_block_k, descale_per_page=bool(descale_per_page))
    if qv is not None:
        options = options._replace(v_in_k=True, values=tensors.pop("v").shape[-1])
        tensors.pop("v_new", None)
    o, lse = _forward_only(tensors, options, return_softmax_lse, out, None, "flash_attn_with_kvcache has no gradient")
    return (o, lse) if return_softmax_lse else o


# ---- flash_attn.bert_padding ----


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """Rows @indices of [rows, ...]."""
    return x[indices]


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """[first_axis_dim, ...] with @values as rows @indices, zeros elsewhere."""
    return values.new_zeros((first_axis_dim, *values.shape[1:])).index_copy(0, indices, values)


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


def unpad_input_for_concatenated_sequences(hidden_states: Tensor, attention_mask_in_length: Tensor):
    """Packs [batch, rows, ...] whose rows hold several sequences, one behind the other, by their lengths, 0 where there is none:
    [[2, 3, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]] is 5 rows of two sequences and 6 of one.

    Returns: (packed [total, ...], indices [total] into batch * rows, cu_seqlens int32 [sequences + 1], the longest).
    """
    lengths = attention_mask_in_length[attention_mask_in_length != 0]
    in_use = torch.arange(attention_mask_in_length.shape[1], device=lengths.device) < attention_mask_in_length.sum(-1, keepdim=True)
    indices = torch.nonzero(in_use.flatten()).flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return hidden_states.flatten(0, 1)[indices], indices, cu_seqlens, int(lengths.max())


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """What unpad_input() packed as [batch, seqlen, ...] again, zeros elsewhere."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
