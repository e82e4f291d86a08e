# SPDX-License-Identifier: MIT
"""Multi-head latent attention: one cache of latents is keys and, in its first elements, values."""
from __future__ import annotations

from typing import Any

import numpy as np

from . import _arrays, _attention, _check, _problem, _run
from ._lib import invalid, lib
from ._service import Device

FP8_BYTES = lib.FMHA_LATENT_BYTES  # of a token in a cache of fp8: 512 e4m3, 4 float32 factors, 64 bfloat16
_BYTES = ("uint8", "float8_e4m3fn")


def _cache(kept) -> int:
    """Gives the cache a head axis. Returns: enum fmha_kv_layout."""
    k = kept["k"]
    if len(k.shape) == 3:
        k = kept["k"] = k[:, :, None]
    if len(k.shape) != 4:
        raise invalid(f"kv_cache is {tuple(k.shape)}: [pages or batch, tokens, elements], or with an axis of heads before the last", "tensor.k")
    if str(k.dtype).removeprefix("torch.") not in _BYTES or k.shape[3] != FP8_BYTES:
        return lib.FMHA_KV_LINEAR
    return lib.FMHA_KV_LATENT_FP8


def mla_decode(
    q: Any, kv_cache: Any, *, hdim_v: int = 512, block_table: Any = None, seqlens_k: Any = None, max_seqlen_k: int | None = None,
    kv_indptr: Any = None, kv_page_indices: Any = None, kv_last_page_len: Any = None, indices: Any = None, slots: bool = True,
    causal: bool = True, scale: float | None = None, softcap: float = 0.0, sink: Any = None, k_descale: Any = None,
    cu_seqlens_q: Any = None, max_seqlen_q: int | None = None, seqlens_q: Any = None, n_splits: int = 0, out: Any = None,
    return_lse: bool = False, device: Device | None = None,
) -> Any:
    """O = softmax(scale * Q K^T) V with K the latents of a cache and V their first hdim_v elements: decode and absorbed prefill of
    DeepSeek's attention.

    Args:
        q: [batch, rows, heads, hdim], a row each as [batch, heads, hdim], or packed with cu_seqlens_q, [total rows, heads, hdim]; hdim is
            576 there: what is multiplied with the latent, then what turns. Any number of heads.
        kv_cache: with block_table or kv_indptr pages, [pages, page size, hdim] (or [pages, page size, 1, hdim]); else [batch, keys, hdim].
            Of q's type, of fp8 with k_descale, or FlashMLA's "FP8 with scale": uint8 or float8_e4m3fn [.., 656], under a q of float16
            or bfloat16.
        block_table: int32 [batch, columns], with seqlens_k, int32 [batch], as in attention(); or SGLang's kv_indptr and its lists.
        indices: int32 [batch, rows, topk], packed [total rows, topk]: the keys that a row sees, and no others; what is none, as -1, is
            left out. With a block_table or kv_indptr, or slots=False, positions of the sequence; else slots, page * page size + place.
        causal: with several rows, the last one sees all keys; nothing with indices.
        scale: None: 1 / sqrt(hdim). A model's own is 1 / sqrt(192) and what its rope adds.
        sink, softcap, n_splits, out, return_lse, device, max_seqlen_*: as in attention().

    Returns:
        O, shaped like q with hdim_v elements, or (O, LSE), float32 [batch, heads, rows], packed [heads, total rows].
    """
    _check.words(causal=causal, return_lse=return_lse, slots=slots, hdim_v=hdim_v)
    kept = _attention._adopted(device, ("q", "kv_cache"), ("out",), q=q, kv_cache=kv_cache, block_table=block_table, seqlens_k=seqlens_k,
                               kv_indptr=kv_indptr, kv_page_indices=kv_page_indices, kv_last_page_len=kv_last_page_len, indices=indices,
                               sink=sink, k_descale=k_descale, cu_seqlens_q=cu_seqlens_q, seqlens_q=seqlens_q, out=out)
    layout = _cache(kept)
    single = cu_seqlens_q is None and len(kept["q"].shape) == 3
    if single:
        for name in ("q", "o", "indices"):
            if name in kept and len(kept[name].shape) == (2 if name == "indices" else 3):
                kept[name] = kept[name][:, None]
    tabled = block_table is not None or kv_indptr is not None
    by_slots = indices is not None and not tabled and slots
    longest_q = _attention._longest(kept, "q", max_seqlen_q)
    if max_seqlen_k is None and block_table is not None:
        max_seqlen_k = _attention._table_keys(kept)
    if max_seqlen_k is None and kv_indptr is not None:
        raise invalid("give max_seqlen_k: the longest cache", "seqlen_k")
    options = _attention._options("forward", "bshd", causal and indices is None and _rows(kept) > 1, (-1, -1), "bottom_right", 0, scale,
                                  softcap, 0.0, longest_q, max_seqlen_k, n_splits=n_splits)
    options = options._replace(v_in_k=True, values=hdim_v, kv_layout=layout, in_slots=by_slots)
    if "o" not in kept:
        kept["o"] = _arrays.output_like(kept["q"], (*kept["q"].shape[:-1], hdim_v), _attention._is_ragged(kept, "q"))
    if return_lse:
        _attention._row_outputs(kept, "bshd", True, False)
    _run.execute(kept, options, device=device)
    o = kept["o"][:, 0] if single else kept["o"]
    return (o, kept["lse"]) if return_lse else o


def _rows(kept) -> int:
    return 2 if "seqstart_q" in kept else kept["q"].shape[1]


def mla_append(
    kv_cache: Any, kv_new: Any, *, slot_mapping: Any = None, seqlens_k: Any = None, block_table: Any = None, k_descale: Any = None,
    device: Device | None = None,
) -> None:
    """Writes kv_new, [batch, new rows, hdim] or [tokens, hdim], into a cache of latents in place, which mla_decode() describes: into one of
    656 bytes a token with a factor for each 128 elements, the largest of them over 448.

    Args:
        slot_mapping: int64 [batch, new rows] or [tokens]: page * page size + place, -1: nowhere.
        seqlens_k: without it, rows of each sequence before the call; with block_table in pages.
        k_descale: of a cache of plain fp8: what new rows are divided by.
    """
    if seqlens_k is None and slot_mapping is None:
        raise invalid("seqlens_k is None: lengths or a slot_mapping are needed", "tensor.seqlen_k_per_batch")
    if getattr(kv_new, "ndim", 0) == 2:  # tokens
        kv_new = kv_new[:, None]
    kept = _attention._adopted(device, ("kv_cache", "kv_new"), ("kv_cache",), kv_cache=kv_cache, kv_new=kv_new, slot_mapping=slot_mapping, seqlens_k=seqlens_k,
                               block_table=block_table, k_descale=k_descale)
    layout = _cache(kept)
    new = kept["k_new"]
    if len(new.shape) == 3 and "slot_mapping" in kept and len(kept["slot_mapping"].shape) == 1:
        new = new[None]
    elif len(new.shape) == 3:
        new = new[:, :, None]
    kept["k_new"] = new
    paged = _attention._table_keys(kept) if block_table is not None else 0
    options = _problem.Options(op="append", max_seqlen_k=paged, v_in_k=True, values=min(512, new.shape[-1]), kv_layout=layout)
    _run.execute(kept, options, device=device)


def latents_from_fp8(kv_cache: Any) -> np.ndarray:
    """What a cache of 656 bytes a token stands for, uint8 [.., 656], as float32 [.., 576]; for tests and for looking."""
    raw = np.ascontiguousarray(kv_cache)
    if raw.dtype != np.uint8 or raw.shape[-1] != FP8_BYTES:
        raise invalid(f"kv_cache is {raw.dtype} {raw.shape}: uint8 [.., {FP8_BYTES}]", "tensor.k")
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, (byte & 7) / 8
    value = np.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * 2.0 ** (exponent - 7.0))
    value = np.where(byte & 0x7F == 0x7F, np.nan, np.where(byte & 0x80, -value, value)).astype(np.float32)
    factors = np.repeat(raw[..., 512:528].copy().view(np.float32), 128, axis=-1)
    rest = (raw[..., 528:].copy().view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.concatenate([value[raw[..., :512]] * factors, rest], axis=-1)
