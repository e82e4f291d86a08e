# SPDX-License-Identifier: MIT
"""fmhad as an attention backend of diffusers."""
from __future__ import annotations

from ._lib import not_supported
from .torch import _functions as ft


def register(name: str) -> None:
    try:
        from diffusers.models import attention_dispatch as dispatch

        names, registry = dispatch.AttentionBackendName, dispatch._AttentionBackendRegistry
        backends, members, values = registry._backends, names._member_map_, names._value2member_map_
    except (ImportError, AttributeError) as error:
        raise not_supported(f"this diffusers has no attention dispatcher that fmhad knows ({error}): 0.36 to 0.42 have") from error
    if name in backends:
        return
    # diffusers keeps the names of its backends in an enumeration that has no place for more.
    backend = str.__new__(names, name)
    backend._name_, backend._value_ = name.upper(), name
    members[backend._name_] = values[name] = backend
    registry.register(backend)(_attention)


def _attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False, return_lse=False,
               _parallel_config=None):
    """query [batch, rows, heads, hdim], key, value [batch, keys, kv heads, hdim]; attn_mask True: visible, floats are added;
    [batch, keys] or what broadcasts to [batch, heads, rows, keys]. Returns [batch, rows, heads, hdim]."""
    if return_lse or _parallel_config is not None:
        raise not_supported("context parallelism through diffusers: fmha.torch.cp has its own")
    if attn_mask is not None and attn_mask.dim() == 2 and attn_mask.shape == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None]
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    return ft.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa).transpose(1, 2)
