# SPDX-License-Identifier: MIT
"""The backend of multi-head latent attention: decoding over vLLM's cache of latents, [blocks, tokens of a block, 576], by
fmha.mla_decode(). Metadata, prompts (which vLLM attends to without latents) and writing the cache are vLLM's own, as its other such
backends have them. Requests of a step that decode have as many rows each, of which speculation makes several."""
from __future__ import annotations

import collections

import fmha
import torch
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend, MLACommonImpl, MLACommonMetadataBuilder, QueryLenSupport
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, MultipleOf

from . import MLA_NAME
from .backend import _rounded

calls = collections.Counter()  # what fmhad was asked: "decode"
NARROW = ("fp8", "fp8_e4m3")  # rows are divided by a layer's _k_scale


class FmhaMlaBackend(MLACommonBackend):
    supported_dtypes = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16", *NARROW]

    @staticmethod
    def get_name() -> str:
        return MLA_NAME

    @staticmethod
    def get_impl_cls():
        return FmhaMlaImpl

    @staticmethod
    def get_builder_cls():
        return FmhaMlaMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return [MultipleOf(16)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [576]

    @classmethod
    def supports_compute_capability(cls, capability) -> bool:
        return capability is None or capability.major >= 8


class FmhaMlaMetadataBuilder(MLACommonMetadataBuilder):
    # Lengths and tables are read on the device by each replay.
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    query_len_support = QueryLenSupport.UNIFORM


class FmhaMlaImpl(MLACommonImpl):
    can_return_lse_for_decode = True

    def __init__(self, num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap, attn_type,
                 kv_sharing_target_layer_name, **latents):
        super().__init__(num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap, attn_type,
                         kv_sharing_target_layer_name, **latents)
        told = [n for n, x in (("ALiBi", alibi_slopes), ("a sliding window", sliding_window), ("a soft cap", logits_soft_cap)) if x]
        if told or attn_type != AttentionType.DECODER:
            raise fmha.NotSupportedError("ENOTSUP", f"latents with {', '.join(told) or attn_type} are not known here", "mask")
        if kv_cache_dtype not in FmhaMlaBackend.supported_kv_cache_dtypes:
            raise fmha.NotSupportedError("ENOTSUP", f"latents in a cache of {kv_cache_dtype} are not known here", "tensor.k.dtype")
        self.supports_quant_query_input = False

    def forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata, layer):
        """q: [tokens, heads, 576], or that as (512, 64). Returns: O [tokens, heads, 512], and LSE [tokens, heads] or None."""
        q = torch.cat(q, -1) if isinstance(q, tuple) else q
        cache, decode = kv_c_and_k_pe_cache, attn_metadata.decode
        narrow = self.kv_cache_dtype in NARROW
        longest = _rounded(attn_metadata.max_seq_len, decode.block_table.shape[1] * cache.shape[1])
        calls["decode"] += 1
        found = fmha.mla_decode(
            q.view(attn_metadata.num_decodes, -1, *q.shape[1:]), cache.view(torch.float8_e4m3fn) if narrow else cache, hdim_v=self.kv_lora_rank,
            block_table=decode.block_table, seqlens_k=decode.seq_lens, max_seqlen_k=longest, causal=attn_metadata.causal, scale=self.scale,
            k_descale=layer._k_scale if narrow else None, return_lse=self.need_to_return_lse_for_decode)
        if not self.need_to_return_lse_for_decode:
            return found.flatten(0, 1), None
        o, lse = found
        return o.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)
