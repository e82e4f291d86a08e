# SPDX-License-Identifier: MIT
"""attention() and its siblings, on arrays of any kind."""
from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from . import _arrays, _check, _problem, _run, masks
from ._lib import invalid, lib
from ._service import Device

_ROPE = {"interleaved": lib.FMHA_ROPE_INTERLEAVED, "half": lib.FMHA_ROPE_HALF_ROTATED}


# Roles whose arguments have other names.
_ROLES = {"out": "o", "grad": "do", "cu_seqlens_q": "seqstart_q", "cu_seqlens_k": "seqstart_k", "seqlens_q": "seqlen_q",
          "seqlens_k": "seqlen_k", "kv_cache": "k", "kv_new": "k_new"}


def _adopted(device, needed, written, **given) -> dict:
    """The arrays that a call got, by role. @given: by argument; @needed, @written: of those."""
    _check.is_a(device, Device, "device", "one of Client.device()")
    judged = _check.arrays(needed, written, **given)
    return _run.adopted({_ROLES.get(n, n): a for n, a in judged.items()}, tuple(_ROLES.get(n, n) for n in written))


def _longest(kept, side, given):
    """The longest of packed sequences: @given, or read where the CPU sees the prefix sums; None: they are not packed."""
    cu = kept.get("seqstart_" + side)
    if given is not None or cu is None:
        return given
    if isinstance(cu, np.ndarray) or not cu.is_cuda:
        return int(np.diff(np.asarray(cu)).max(initial=0))
    raise invalid(f"give max_seqlen_{side}: the prefix sums lie on a GPU, and reading them would wait for it", f"seqlen_{side}")


def _options(op, layout, causal, window, *said, **more):
    """_problem.Options of what the caller said, judged once for each."""
    if type(window) is not tuple:
        _check.window(window, "window")
    try:
        return _judged_options(op, layout, causal, tuple(window), *said, **more)
    except TypeError:  # something among them is no key of a cache
        return _judged_options.__wrapped__(op, layout, causal, tuple(window), *said, **more)


def _table_keys(kept) -> int:
    """How many keys a block table can hold."""
    table = kept["block_table"]
    if len(table.shape) != 2 or len(kept["k"].shape) != 4:
        raise invalid(f"block_table is {tuple(table.shape)} and k {tuple(kept['k'].shape)}: [batch, columns] and [pages, page size, heads, "
                      "hdim]", "tensor.block_table")
    return table.shape[1] * kept["k"].shape[1]


@functools.lru_cache(maxsize=4096)
def _judged_options(op, layout, causal, window, align, sink_tokens, scale, softcap, dropout_p, longest_q, longest_k, deterministic=False,
                    n_splits=0, split_size=0, softcap_approx=False):
    _check.words(layout=layout, causal=causal, window=window, align=align, sink_tokens=sink_tokens, scale=scale, softcap=softcap,
                 dropout_p=dropout_p, max_seqlen_q=longest_q, max_seqlen_k=longest_k, deterministic=deterministic, n_splits=n_splits,
                 split_size=split_size, softcap_approx=softcap_approx)
    mask, band = _problem.masking(causal, window, align)
    return _problem.Options(op=op, layout=layout, mask=mask, window=band, sink_tokens=sink_tokens, scale=scale, softcap=float(softcap),
                            softcap_approx=softcap_approx, dropout_p=float(dropout_p), deterministic=deterministic, n_splits=n_splits,
                            split_size=split_size,
                            max_seqlen_q=longest_q or 0, max_seqlen_k=longest_k or 0)


def attention(
    q: Any, k: Any, v: Any, *,
    causal: bool = False, window: tuple = (-1, -1), align: str = "bottom_right", sink_tokens: int = 0,
    scale: float | None = None, softcap: float = 0.0, bias: Any = None, alibi_slopes: Any = None, sink: Any = None,
    dropout_p: float = 0.0, seed: int | None = None, offset: int = 0,
    cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    seqlens_q: Any = None, seqlens_k: Any = None, leftpad_k: Any = None, cache_batch_idx: Any = None,
    block_table: Any = None, kv_indptr: Any = None, kv_page_indices: Any = None, kv_last_page_len: Any = None,
    q_descale: Any = None, k_descale: Any = None, v_descale: Any = None, descale_block_q: int = 0, descale_block_k: int = 0,
    descale_per_page: bool = False,
    n_splits: int = 0, split_size: int = 0, layout: str = "bshd", out: Any = None, return_lse: bool = False,
    return_randval: bool = False, mask: Any = None, device: Device | None = None, softcap_approx: bool = False,
) -> Any:
    """O = softmax(scale * Q K^T, soft cap, + bias or ALiBi, mask) V.

    Args:
        q, k, v: [batch, seqlen, heads, hdim] (layout "bshd"), [batch, heads, seqlen, hdim] ("bhsd") or [seqlen, batch,
            heads, hdim] ("sbhd"); with cu_seqlens_q packed, [total rows, heads, hdim]; with block_table or kv_indptr k and
            v are pages, [pages, page size, heads, hdim]. k and v may have fewer heads than q (GQA). Any strides. float32,
            float16, bfloat16, float8_e4m3fn, float8_e5m2; all of one type, but that k and v of fp8 take a q of float16 or
            bfloat16, too, and those of int8 no other.
        causal: row i sees no column right of its own. window: (left, right) columns that stay visible, -1: all.
        align: the corner that the band is tied to when lengths differ: "bottom_right" (flash-attn) or "top_left" (torch).
        sink_tokens: leading keys visible left of any window.
        scale: None: 1 / sqrt(hdim).
        softcap: c of c * tanh(S / c), 0: none. softcap_approx: its tanh may be off by 2^-11 of itself, so scores by 0.0005 c, as
            FlashAttention-3's are: Hopper's tensor-core loop, for many rows, is faster with it; all others stay exact.
        bias: added to S; broadcasts to [batch, heads, rows, keys] as numpy does.
        alibi_slopes: float32 [heads] or [batch, heads]: -slope * |i + seqlen_k - seqlen_q - j| is added.
        sink: float32 [heads], a logit in the softmax's denominator only.
        dropout_p, seed, offset: dropout on P, FlashAttention-2's bits for the same seed and offset; no seed: a fresh one.
            The next call's offset is this one's + 32 * batch * heads.
        cu_seqlens_q, cu_seqlens_k: int32 [sequences + 1], prefix sums of packed lengths; max_seqlen_*: the longest (found by
            itself where the CPU sees the sums).
        seqlens_q, seqlens_k: int32 [batch], how much of each sequence's storage is in use.
        block_table: int32 [batch, columns] (vLLM), or kv_indptr, kv_page_indices, kv_last_page_len (SGLang); max_seqlen_k: the
            longest cache, default: what the table can hold.
        q_descale, k_descale, v_descale: float32, the scales of fp8 and int8: one number, [batch, heads] or [batch, heads, blocks] of descale_block_q
            rows and descale_block_k keys (0: of one each, where there are as many). descale_per_page: k_descale and v_descale are
            [pages, heads] or [pages, heads, blocks of a page].
        n_splits, split_size: of the keys, 0: the planner's choice.
        out: where O goes, [.., hdim of v], of q's type; None: a new array of q's kind.
        return_lse: also the natural log of the denominators, float32 [batch, heads, rows], packed [heads, total rows].
        return_randval: also dropout's bytes, uint8 [batch, heads, rows, keys].
        mask: one of fmha.masks, for what no band says: documents, prefixes, chunks, trees, neighbourhoods; or its data, int32 endpoints
            [heads or 1, n, rows of all sequences] as cuDNN's flex_attention has them, or uint8 bits [batch or 1, heads or 1, rows,
            ceil(keys / 8)]. It is under the band, not in its place.
        device: of the service; None: arrays on a GPU are computed there on their library's current stream (nothing is copied,
            nothing waits), others by the daemon's CPU device. numpy arrays are copied into shared memory and back, 0.1 to
            0.2 ms a MiB, unless they come from fmha.empty().

    Returns:
        O, or a tuple of O and what else was asked for. A row that sees no key has O = 0 and LSE = -inf.

    Raises:
        InvalidError: shapes, types or options that do not fit; `field` names what.
        NotSupportedError, UnreachableError, ...: see FmhaError.
    """
    _check.words(seed=seed, offset=offset, return_lse=return_lse, return_randval=return_randval, descale_block_q=descale_block_q,
                 descale_block_k=descale_block_k, descale_per_page=descale_per_page)
    kept = _adopted(device, ("q", "k", "v"), ("out",), q=q, k=k, v=v, bias=bias, alibi_slopes=alibi_slopes, sink=sink,
                    q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, out=out, cu_seqlens_q=cu_seqlens_q,
                    cu_seqlens_k=cu_seqlens_k, seqlens_q=seqlens_q, seqlens_k=seqlens_k, leftpad_k=leftpad_k,
                    cache_batch_idx=cache_batch_idx, block_table=block_table, kv_indptr=kv_indptr,
                    kv_page_indices=kv_page_indices, kv_last_page_len=kv_last_page_len)
    longest_q, longest_k = _longest(kept, "q", max_seqlen_q), _longest(kept, "k", max_seqlen_k)
    if longest_k is None and block_table is not None:
        longest_k = _table_keys(kept)
    if longest_k is None and kv_indptr is not None:
        raise invalid("give max_seqlen_k: the longest cache", "seqlen_k")
    options = _options("forward", layout, causal, window, align, sink_tokens, scale, softcap, dropout_p, longest_q, longest_k,
                       n_splits=n_splits, split_size=split_size, softcap_approx=softcap_approx)
    if descale_block_q or descale_block_k or descale_per_page:
        options = options._replace(descale_block_q=descale_block_q, descale_block_k=descale_block_k, descale_per_page=bool(descale_per_page))
    _add_mask(kept, mask, layout)
    if "o" not in kept:
        kept["o"] = _arrays.output_like(kept["q"], (*kept["q"].shape[:-1], kept["v"].shape[-1]), _is_ragged(kept, "q"))
    if return_lse or return_randval:
        _row_outputs(kept, layout, return_lse, return_randval)
    dropout = (_run.seed_of(seed), offset) if dropout_p > 0 else None
    _run.execute(kept, options, dropout, device=device)
    if return_lse or return_randval:
        return tuple(kept[n] for n in ("o", "lse", "randval") if n in kept)
    return kept["o"]


def _add_mask(kept, mask, layout) -> None:
    """The data of @mask joins @kept, before outputs do."""
    if mask is None:
        return
    lead, _, rows = (1, *_problem.row_extents(kept["q"].shape, layout, True)) if "seqstart_q" in kept else _problem.row_extents(
        kept["q"].shape, layout, False)
    role, data = masks.data_of(mask, kept["q"], rows, lead)
    kept |= _run.adopted({role: _check.array(data, role, True)})


def _is_ragged(kept, axis: str) -> bool:
    return f"seqstart_{axis}" in kept or f"seqlen_{axis}" in kept


def _row_outputs(kept, layout, with_lse, with_randval):
    """LSE and dropout's bytes join @kept."""
    q, packed = kept["q"], "seqstart_q" in kept
    rows = _problem.row_extents(q.shape, layout, packed)
    if with_lse:
        kept["lse"] = _arrays.empty_like(q, rows, _arrays.F32)
        if _is_ragged(kept, "q"):
            kept["lse"][...] = -math.inf  # rows that no sequence has see nothing
    if with_randval:
        if packed:
            raise invalid("return_randval takes sequences of one length", "tensor.randval")
        kept["randval"] = _arrays.empty_like(q, (*rows, kept["k"].shape[_problem.LAYOUTS[layout][1]]), _arrays.U8)


def attention_backward(
    grad: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, *, dlse: Any = None,
    causal: bool = False, window: tuple = (-1, -1), align: str = "bottom_right", sink_tokens: int = 0,
    scale: float | None = None, softcap: float = 0.0, bias: Any = None, alibi_slopes: Any = None, sink: Any = None,
    dropout_p: float = 0.0, seed: int | None = None, offset: int = 0, randval: Any = None,
    cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    seqlens_q: Any = None, seqlens_k: Any = None, deterministic: bool = False, want_dbias: bool = False,
    layout: str = "bshd", dq: Any = None, dk: Any = None, dv: Any = None, mask: Any = None, device: Device | None = None,
) -> tuple:
    """Gradients of attention().

    Args:
        grad: of O, shaped like it. o, lse: what attention(..., return_lse=True) gave.
        dlse: the gradient that reaches LSE itself, float32, shaped like it; None: none.
        deterministic: the same bits on every run.
        want_dbias: the bias's gradient too, summed over the axes that it broadcasts.
        dq, dk, dv: where they go; None: new arrays.
        The others: what attention() was given, seed and offset too (or the bytes, as randval). Of softcap_approx it knows nothing:
            gradients are the exact cap's.

    Returns:
        (dQ, dK, dV), then dBias when asked for, then dSink where there is a sink (float32 [heads]).
    """
    _check.words(seed=seed, offset=offset, want_dbias=want_dbias, dropout_p=dropout_p)
    if dropout_p > 0 and seed is None and randval is None:
        raise invalid("dropout's gradient needs its forward's seed and offset, or randval", "dropout_seed")
    kept = _adopted(device, ("grad", "q", "k", "v", "o", "lse"), ("dq", "dk", "dv"), q=q, k=k, v=v, o=o, lse=lse, bias=bias,
                    alibi_slopes=alibi_slopes, sink=sink, randval=randval, grad=grad, dlse=dlse, dq=dq, dk=dk, dv=dv,
                    cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqlens_q=seqlens_q, seqlens_k=seqlens_k)
    longest_q, longest_k = _longest(kept, "q", max_seqlen_q), _longest(kept, "k", max_seqlen_k)
    options = _options("backward", layout, causal, window, align, sink_tokens, scale, softcap, dropout_p, longest_q, longest_k,
                       deterministic)
    _add_mask(kept, mask, layout)
    made = {"dq": "q", "dk": "k", "dv": "v"}
    if want_dbias:
        if bias is None:
            raise invalid("want_dbias without a bias", "tensor.dbias")
        made["dbias"] = "bias"
    if sink is not None:
        made["dsink"] = "sink"
    for name, like in made.items():
        if name not in kept:
            ragged = _is_ragged(kept, "k" if name in ("dk", "dv") else "q")
            kept[name] = _arrays.output_like(kept[like], kept[like].shape, ragged)
    dropout = (_run.seed_of(seed), offset) if dropout_p > 0 and randval is None else None
    _run.execute(kept, options, dropout, device=device)
    return tuple(kept[name] for name in made)


def append_kv(
    k: Any, v: Any, k_new: Any, v_new: Any, *, seqlens_k: Any = None, q: Any = None, rotary_cos: Any = None, rotary_sin: Any = None,
    rotary: str = "half", causal: bool = False, block_table: Any = None, cache_batch_idx: Any = None, slot_mapping: Any = None,
    positions: Any = None, k_descale: Any = None, v_descale: Any = None, descale_block_k: int = 0, descale_per_page: bool = False,
    find_descales: bool = False, layout: str = "bshd", device: Device | None = None,
) -> Any:
    """Writes k_new and v_new, [batch, new rows, heads, hdim], into the cache k, v behind seqlens_k rows, in place; or, by
    slot_mapping, into the pages k, v, [pages, page size, heads, hdim].

    Args:
        rotary_cos, rotary_sin: [positions, rotary_dim / 2]: k_new is rotated by its position on the way; rotary: "half"
            (GPT-NeoX, Llama) or "interleaved" (GPT-J).
        q: rotated too, into a new array, which is returned.
        slot_mapping: int64 [batch, new rows], or [tokens] with k_new, v_new and q as [tokens, heads, hdim]: page * page size + slot of
            each row, -1: nowhere. No lengths, no table; positions, int64 of the same shape, say by what rows turn.
        k_descale, v_descale: of a cache of fp8 or int8 whose new rows are float16 or bfloat16: what these are divided by, as attention()
            reads them. find_descales: they are [pages, heads, page size], and the operation finds and writes those of its slots.
    """
    if not isinstance(rotary, str) or rotary not in _ROPE:
        raise invalid(f"rotary is {rotary!r}: half or interleaved", "rope")
    _check.words(causal=causal, layout=layout, descale_block_k=descale_block_k, descale_per_page=descale_per_page, find_descales=find_descales)
    if seqlens_k is None and slot_mapping is None:
        raise invalid("seqlens_k is None: lengths or a slot_mapping are needed", "tensor.seqlen_k_per_batch")
    written = ("k", "v", "k_descale", "v_descale") if find_descales else ("k", "v")
    kept = _adopted(device, ("k", "v", "k_new", "v_new"), written, q=q, k=k, v=v, k_new=k_new, v_new=v_new, rotary_cos=rotary_cos,
                    rotary_sin=rotary_sin, seqlens_k=seqlens_k, block_table=block_table, cache_batch_idx=cache_batch_idx,
                    slot_mapping=slot_mapping, positions=positions, k_descale=k_descale, v_descale=v_descale)
    if (rotary_cos is None) != (rotary_sin is None):
        raise invalid("rotary_cos and rotary_sin come together", "tensor.rotary_cos")
    for name in ("rotary_cos", "rotary_sin"):
        if rotary_cos is not None and len(kept[name].shape) != 2:
            raise invalid(f"{name} is {tuple(kept[name].shape)}: [positions, rotary_dim / 2]", f"tensor.{name}")
    tokens = slot_mapping is not None and len(kept["slot_mapping"].shape) == 1
    for name in ("k_new", "v_new", "q") if tokens else ():
        if name in kept:
            if len(kept[name].shape) != 3 or layout != "bshd":
                raise invalid(f"{name} is {tuple(kept[name].shape)}: [tokens, heads, hdim] with slots of tokens", f"tensor.{name}")
            kept[name] = kept[name][None]
    turning = rotary_cos is not None
    mask, band = _problem.masking(causal, (-1, -1), "bottom_right")
    paged = _table_keys(kept) if block_table is not None else 0
    options = _problem.Options(op="append", layout=layout, mask=mask, window=band, rope=_ROPE[rotary] if turning else 0,
                               rotary_dim=2 * kept["rotary_cos"].shape[1] if turning else 0, max_seqlen_k=paged,
                               descale_block_k=1 if find_descales else descale_block_k,
                               descale_per_page=bool(descale_per_page or find_descales), descale_computed=bool(find_descales))
    if q is not None:
        kept["q_rotated"] = _arrays.empty_like(kept["q"], kept["q"].shape)
    _run.execute(kept, options, device=device)
    turned = kept.get("q_rotated")
    return turned[0] if tokens and turned is not None else turned


_LOG2_E = 1.4426950408889634


def merge_states(o_parts: Any, lse_parts: Any, *, sink: Any = None, lse_base: float | str = "e", layout: str = "bshd",
                 device: Device | None = None) -> tuple:
    """(O, LSE) of all keys from the pairs of disjoint key ranges.

    Args:
        o_parts: [parts, ...], each part in @layout.
        lse_parts: float32 [parts, batch, heads, rows].
        sink: float32 [heads]; the parts came without it.
        lse_base: "e", or 2 for FlashInfer's LSE, which are logarithms of base 2; the LSE returned has the same base.
    """
    if not isinstance(lse_base, (str, int, float)) or lse_base not in ("e", 2):
        raise invalid(f"lse_base is {lse_base!r}: 'e' or 2", "lse_base")
    _check.words(layout=layout)
    kept = _adopted(device, ("o_parts", "lse_parts"), (), o_parts=o_parts, lse_parts=lse_parts, sink=sink)
    if lse_base == 2:
        kept["lse_parts"] = kept["lse_parts"] / _LOG2_E
    parts = kept["o_parts"]
    if len(parts.shape) != 5:
        raise invalid(f"o_parts is {tuple(parts.shape)}: [parts, then {layout}]", "tensor.o_parts")
    rows = _problem.row_extents(parts.shape[1:], layout, False)
    kept["o"] = _arrays.empty_like(parts, parts.shape[1:])
    kept["lse"] = _arrays.empty_like(parts, rows, _arrays.F32)
    _run.execute(kept, _problem.Options(op="merge", layout=layout, n_parts=parts.shape[0]), device=device)
    lse = kept["lse"]
    return kept["o"], lse * _LOG2_E if lse_base == 2 else lse
