# SPDX-License-Identifier: MIT
"""torch: scaled_dot_product_attention with autograd and torch.compile, in place of torch's own or beside it.

    import fmha.torch

    o = fmha.torch.scaled_dot_product_attention(q, k, v, is_causal=True)
    with fmha.torch.replace_sdpa():                 # every torch.nn.functional.scaled_dot_product_attention inside
        loss = model(x).sum()
    fmha.torch.enable_transformers()                # from_pretrained(..., attn_implementation="fmhad")

Tensors on a GPU are computed by a local launch on torch's current stream: no copy, no waiting, capturable by
torch.cuda.graph. Tensors on the CPU go to the daemon's CPU device through shared memory.
"""
from __future__ import annotations

from .. import _slot
from ._functions import attention, replace_sdpa, scaled_dot_product_attention

__all__ = ["attention", "scaled_dot_product_attention", "replace_sdpa", "enable_transformers", "enable_diffusers"]


def enable_transformers(name: str = "fmhad") -> None:
    """Registers with transformers, so that attn_implementation=@name takes fmhad: causal and sliding windows, soft caps, sinks,
    padded and packed batches, static and dynamic caches. Continuous batching takes names with "flash" in them alone: that is
    "flash_fmhad"."""
    from .. import _transformers  # here: it asks for transformers

    _transformers.register(name)
    if name == "fmhad":
        _transformers.register("flash_fmhad")


def enable_diffusers(name: str = "fmhad") -> None:
    """Registers with diffusers' attention dispatcher, for model.set_attention_backend(@name) and attention_backend(@name)."""
    from .. import _diffusers

    _diffusers.register(name)


_slot.register()
