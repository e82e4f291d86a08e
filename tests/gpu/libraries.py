# SPDX-License-Identifier: MIT
"""Other libraries that are measured beside fmhad where they are found. $FMHA_PEERS: a folder with the package vllm, of which nothing
but vllm_flash_attn and FlashMLA's library is needed. FlashAttention-4 is whatever Python finds as flash_attn.cute."""
import os
import sys
import types


def find_flash_attention_3():
    """flash_attn_varlen_func of FlashAttention-3 as vLLM ships it, or None."""
    folder = os.environ.get("FMHA_PEERS")
    if not folder:
        return None
    for name in ("vllm", "vllm.vllm_flash_attn"):
        module = sys.modules[name] = types.ModuleType(name)
        module.__path__ = [os.path.join(folder, *name.split("."))]
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func
    return flash_attn_varlen_func


def find_flash_mla():
    """FlashMLA's dense_decode_fwd as vLLM ships it, or None."""
    path = os.path.join(os.environ.get("FMHA_PEERS", ""), "vllm", "_flashmla_C.abi3.so")
    if not os.path.exists(path):
        return None
    import torch
    torch.ops.load_library(path)
    return torch.ops._flashmla_C.dense_decode_fwd


def find_flash_mla_sparse():
    """FlashMLA's sparse_prefill_fwd as vLLM ships it, or None."""
    if find_flash_mla() is None:
        return None
    import torch
    return torch.ops._flashmla_C.sparse_prefill_fwd


def find_flash_mla_fp8():
    """FlashMLA's sparse_decode_fwd, over latents of fp8, as vLLM ships it, or None."""
    if find_flash_mla() is None:
        return None
    import torch
    return torch.ops._flashmla_C.sparse_decode_fwd


def find_flash_attention_4():
    """flash_attn_func of FlashAttention-4 that returns O alone, or None."""
    try:
        from flash_attn.cute.interface import flash_attn_func
    except ImportError:
        return None

    def attend(*args, **options):
        o = flash_attn_func(*args, **options)
        return o[0] if isinstance(o, tuple) else o
    return attend
