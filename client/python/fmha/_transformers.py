# SPDX-License-Identifier: MIT
"""fmhad as an attention implementation of transformers."""
from __future__ import annotations

import functools

import torch

from . import _masks
from ._lib import not_supported
from .torch import _functions as ft


def register(name: str) -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    _masks.forget_what_differs()
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, _masks.mask)
    if "flash" in name:
        _teach(name)


_flash_names: set = set()


def _teach(name: str) -> None:
    """Names with "flash" in them, which continuous batching asks for, transformers also looks up among its own packages."""
    from transformers import modeling_flash_attention_utils as utils

    own = getattr(utils, "_lazy_imports", None)
    if own is None:
        raise not_supported(f"{name}: this transformers has no place for other names with 'flash' in them: take attn_implementation='fmhad'")
    if not _flash_names:
        utils._lazy_imports = _lazy_imports(own)
    _flash_names.add(name)


def _lazy_imports(own):
    n_wanted = len(getattr(own.__annotations__.get("return"), "__args__", ())) or 4

    @functools.wraps(own)
    def find(implementation, *args, **words):
        if implementation not in _flash_names:
            return own(implementation, *args, **words)
        from . import flash_attn as fa

        with_cache = (fa.flash_attn_with_kvcache,) if n_wanted == 5 else ()
        return fa.flash_attn_func, fa.flash_attn_varlen_func, *with_cache, fa.pad_input, fa.unpad_input

    return find


# What a model may ask of an attention besides a mask and that is not done here: left out, it would be wrong.
_REFUSED = {"block_table": "a cache by a table of pages", "indices": "sparse attention by indices",
            "block_indices": "sparse attention by blocks", "sinks": "sinks of this form", "head_mask": "a mask of heads",
            "layer_head_mask": "a mask of heads"}


def _refuse(module, options, is_packed):
    if options.get("cache") is not None and not is_packed:
        raise not_supported(f"{type(module).__name__} asks for continuous batching's paged cache (cache): load the model with "
                            "attn_implementation='flash_fmhad'")
    for name, what in _REFUSED.items():
        if options.get(name) is not None:
            raise not_supported(f"{type(module).__name__} asks for {what} ({name}): load the model with attn_implementation='eager' or 'sdpa'")
    if options.get("output_attentions"):
        raise not_supported("output_attentions: the weights are never stored; load the model with attn_implementation='eager'")


def attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, sliding_window=None, softcap=None,
              is_causal=None, s_aux=None, position_bias=None, cu_seq_lens_q=None, cu_seq_lens_k=None, max_length_q=None,
              max_length_k=None, **options):
    """query [batch, heads, rows, hdim], key, value [batch, kv heads, keys, hdim] -> ([batch, rows, heads, hdim], None)."""
    if isinstance(cu_seq_lens_k, dict) and hasattr(options.get("cache"), "update"):
        # Continuous batching as 5.19 has it leaves its cache to the attention, and lengths to each layer's kind. What there is of a mask
        # knows the new rows only.
        attention_mask = None
        options |= dict(cu_seq_lens_k=cu_seq_lens_k, max_length_k=max_length_k)
        key, value = options.pop("cache").update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=options)
        cu_seq_lens_k, max_length_k = options.pop("cu_seq_lens_k"), options.pop("max_length_k")
    _refuse(module, options, cu_seq_lens_q is not None and attention_mask is None)
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    said = dict(scale=scaling, softcap=softcap or 0.0, dropout_p=dropout, sink=s_aux.float() if s_aux is not None else None)
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    own_window = (sliding_window - 1, 0) if sliding_window is not None else (-1, -1)
    if cu_seq_lens_q is not None:
        packed = ft.attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), causal=causal, window=own_window,
                              cu_seqlens_q=cu_seq_lens_q, cu_seqlens_k=cu_seq_lens_k, max_seqlen_q=int(max_length_q),
                              max_seqlen_k=int(max_length_k), **said)
        return packed.unflatten(0, q.shape[:2]), None
    if position_bias is not None:
        return ft.attention(q, k, v, bias=_with_position(position_bias, attention_mask, causal, q, k), **said), None
    if attention_mask is None:
        # Nobody made a mask: a model of one length, whose module says what it is.
        causal = causal and q.shape[1] > 1
        return ft.attention(q, k, v, causal=causal, window=own_window if causal else (-1, -1), **said), None
    form = _form(attention_mask, q, k)
    if isinstance(form, _masks.Whole):
        return ft.attention(q, k[:, : form.used], v[:, : form.used], window=(form.left, form.right), **said), None
    if isinstance(form, _masks.Packed):
        return _packed(q, k, v, form, said), None
    if form is not None:
        return ft.attention(q, k, v, mask=form, **said), None
    return ft.attention(q, k, v, bias=_dense(attention_mask, q, k), **said), None


def _form(mask, q, k):
    fits = type(mask) is _masks.Mask and mask.shape == (q.shape[0], 1, q.shape[1], k.shape[1]) and mask.device == q.device
    return mask.form() if fits else None


def _dense(mask, q, k):
    """[batch or 1, heads or 1, rows, keys]: as a bias."""
    if type(mask) is _masks.Mask:
        mask = mask.dense()
    if mask.dim() != 4:
        raise not_supported(f"attention_mask is {tuple(mask.shape)}: [batch, heads or 1, rows, keys], or none")
    return ft._additive(mask[..., : k.shape[1]], q)


def _with_position(bias, mask, causal, q, k):
    rows, keys = q.shape[1], k.shape[1]
    if mask is not None:
        return (bias[..., :keys] + _dense(mask, q, k)).to(q.dtype)
    if causal and rows > 1:
        hidden = torch.ones(rows, keys, dtype=torch.bool, device=q.device).triu(keys - rows + 1)
        bias = bias[..., :keys].masked_fill(hidden, float("-inf"))
    return bias[..., :keys].to(q.dtype)


def _packed(q, k, v, form, said):
    batch, rows = q.shape[:2]
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    if form.keys is not None:
        k, v = k[form.keys], v[form.keys]
    if form.rows is not None:
        q = q[form.rows]
    o = ft.attention(q, k, v, window=(form.left, form.right), cu_seqlens_q=form.cu_q, cu_seqlens_k=form.cu_k,
                     max_seqlen_q=form.longest_q, max_seqlen_k=form.longest_k, **said)
    if form.rows is not None:
        o = o.new_zeros((batch * rows, *o.shape[1:])).index_copy(0, form.rows, o)
    return o.unflatten(0, (batch, rows))
