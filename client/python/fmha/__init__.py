# SPDX-License-Identifier: MIT
"""Fused attention by fmhad: numpy arrays, torch tensors, whatever speaks DLPack.

    import numpy as np, fmha

    fmha.start()                            # a private daemon; not needed where one runs
    q = k = v = np.random.randn(2, 1024, 8, 64).astype(np.float32)
    o = fmha.attention(q, k, v, causal=True)

fmha.torch, fmha.flash_attn: torch with autograd, and flash-attn's functions.
"""
from . import _check, masks, pool
from ._attention import append_kv, attention, attention_backward, merge_states
from ._latent import mla_append, mla_decode
from ._lib import (
    DeadlineError, FmhaError, InvalidError, NotAllowedError, NotSupportedError, OutOfMemoryError, UnreachableError, version,
)
from ._service import Client, Device, DeviceInfo
from ._start import default_client, start, stop

__version__ = version()
__all__ = [
    "Client", "DeadlineError", "Device", "DeviceInfo", "FmhaError", "InvalidError", "NotAllowedError", "NotSupportedError",
    "OutOfMemoryError", "UnreachableError", "append_kv", "attention", "attention_backward", "default_client", "empty",
    "masks", "merge_states", "mla_append", "mla_decode", "pool", "start", "stop",
]


def empty(shape, dtype="float32", *, device=None):
    """A numpy array of zeros that this process and fmhad share: attention() on it copies nothing.

    Args:
        dtype: "float32", numpy.float16, "bfloat16" (with ml_dtypes), ...
        device: None: the daemon's CPU device.
    """
    _check.is_a(device, Device, "device", "one of Client.device()")
    return (device or default_client().device()).empty(shape, dtype)
