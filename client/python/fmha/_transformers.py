# SPDX-License-Identifier: MIT
"""fmhad as an attention implementation of transformers."""
from __future__ import annotations

import torch

from . import torch as ft
from .flash_attn import pad_input, unpad_input


def register(name: str) -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)


def mask(batch_size, q_length=None, kv_length=None, q_offset=0, kv_offset=0, attention_mask=None, cache_position=None, **options):
    """What attention() gets as attention_mask: None where every key counts; [keys in use] where those behind do not yet (static
    caches); [batch, keys in use] where some are padding.

    Causality and windows are the kernels' own matter. A mask that the caller made itself ([batch, 1, rows, keys]) passes.
    """
    if attention_mask is not None and attention_mask.dim() != 2:
        return attention_mask
    if cache_position is not None:  # before q_offset was passed
        q_length, q_offset = len(cache_position), int(cache_position[0])
    used = min(int(q_offset) + q_length - int(kv_offset), kv_length)
    if attention_mask is not None:
        attention_mask = attention_mask[:, int(kv_offset) : int(kv_offset) + used].bool()
        attention_mask = torch.nn.functional.pad(attention_mask, (0, used - attention_mask.shape[1]))
        if not attention_mask.all():
            return attention_mask
    return None if used == kv_length else torch.ones(used, dtype=torch.bool)


def attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, sliding_window=None, softcap=None,
              is_causal=None, s_aux=None, cu_seq_lens_q=None, cu_seq_lens_k=None, max_length_q=None, max_length_k=None,
              **options):
    """query [batch, heads, rows, hdim], key, value [batch, kv heads, keys, hdim] -> ([batch, rows, heads, hdim], None)."""
    causal = (is_causal if is_causal is not None else getattr(module, "is_causal", True)) and query.shape[2] > 1
    window = (sliding_window - 1, 0) if sliding_window is not None else (-1, -1)
    said = dict(scale=scaling, softcap=softcap or 0.0, dropout_p=dropout,
                sink=s_aux.float() if s_aux is not None else None)
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    if cu_seq_lens_q is not None:
        packed = ft.attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), causal=causal, window=window,
                              cu_seqlens_q=cu_seq_lens_q, cu_seqlens_k=cu_seq_lens_k, max_seqlen_q=int(max_length_q),
                              max_seqlen_k=int(max_length_k), **said)
        return packed.unflatten(0, q.shape[:2]), None
    if attention_mask is not None and attention_mask.dim() != 4:
        k, v = k[:, : attention_mask.shape[-1]], v[:, : attention_mask.shape[-1]]
    if attention_mask is None or attention_mask.dim() == 1:
        return ft.attention(q, k, v, causal=causal, window=window, **said), None
    if attention_mask.dim() == 4:
        bias = ft._additive(attention_mask[..., : k.shape[1]], q)
        return ft.attention(q, k, v, bias=bias, **said), None
    return _padded(q, k, v, attention_mask, causal, window, said), None


def _padded(q, k, v, attention_mask, causal, window, said):
    """Rows and keys that are padding are left out; rows of Q are the last ones of the mask's columns."""
    rows = q.shape[1]
    keys, _, cu_k, longest_k, _ = unpad_input(k, attention_mask)
    values = v.flatten(0, 1)[attention_mask.flatten()]
    queries, places, cu_q, longest_q, _ = unpad_input(q, attention_mask[:, -rows:] if rows > 1 else attention_mask.any(-1, keepdim=True))
    packed = ft.attention(queries, keys, values, causal=causal, window=window, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k,
                          max_seqlen_q=longest_q, max_seqlen_k=longest_k, **said)
    return pad_input(packed, places, q.shape[0], rows)
