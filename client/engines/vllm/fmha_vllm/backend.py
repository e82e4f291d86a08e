# SPDX-License-Identifier: MIT
"""The backend, its metadata and one layer's attention.

The cache of a layer is [blocks, kv heads, tokens of a block, 2 * head size], in any strides: K and V share a row. On a GPU the kernels
read it where it lies, by vLLM's own block table, on torch's current stream. On a CPU fmhad is another process: the blocks that a step
reads are gathered into memory that both see, once a layer.
"""
from __future__ import annotations

import collections
import dataclasses

import fmha
import torch
from fmha import _problem, _run
from vllm.v1.attention.backend import (
    AttentionBackend, AttentionCGSupport, AttentionImpl, AttentionMetadataBuilder, AttentionType, MultipleOf,
)

from . import name

calls = collections.Counter()  # what fmhad was asked, by kind: "cache", "encoder"
MAX_HEAD_SIZE = 256
_ENCODERS = (AttentionType.ENCODER_ONLY, AttentionType.ENCODER)


class FmhaBackend(AttentionBackend):
    accept_output_buffer = True
    forward_includes_kv_cache_update = False
    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return name()

    @staticmethod
    def get_impl_cls():
        return FmhaImpl

    @staticmethod
    def get_builder_cls():
        return FmhaMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return [MultipleOf(16)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and head_size <= MAX_HEAD_SIZE

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in (AttentionType.DECODER, *_ENCODERS)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability) -> bool:
        return capability is None or capability.major >= 8


@dataclasses.dataclass
class Gathered:
    """On a CPU: the blocks that a step reads."""

    blocks: torch.Tensor  # int64, their numbers in the cache
    table: torch.Tensor  # vLLM's block table, in terms of places in @blocks


@dataclasses.dataclass
class FmhaMetadata:
    """Names are those that vLLM's other backends have: the engine reads some of them."""

    num_actual_tokens: int  # without padding
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor  # int32 [requests + 1], of queries
    seq_lens: torch.Tensor  # int32 [requests], of keys
    block_table: torch.Tensor  # int32 [requests, columns]
    slot_mapping: torch.Tensor
    causal: bool
    gathered: Gathered | None = None


def _rounded(n: int, most: int) -> int:
    """Few numbers for many, so that few plans are made."""
    return min(1 << max(n - 1, 0).bit_length(), most) if n > 0 else 1


class FmhaMetadataBuilder(AttentionMetadataBuilder):
    # Lengths, tables and slots are read on the device by each replay; no number of a batch is in a captured launch but its extents.
    _cudagraph_support = AttentionCGSupport.ALWAYS
    supports_update_block_table = True

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False) -> FmhaMetadata:
        common = common_attn_metadata
        if isinstance(common.causal, torch.Tensor):
            raise fmha.NotSupportedError("ENOTSUP", "a causal flag for each request is not known here", "mask")
        return FmhaMetadata(
            num_actual_tokens=common.num_actual_tokens, max_query_len=common.max_query_len, max_seq_len=common.max_seq_len,
            query_start_loc=common.query_start_loc, seq_lens=common.seq_lens, block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping, causal=bool(common.causal))

    def update_block_table(self, metadata, blk_table, slot_mapping):
        return dataclasses.replace(metadata, block_table=blk_table, slot_mapping=slot_mapping, gathered=None)


def _gathered(metadata: FmhaMetadata, block_size: int) -> Gathered:
    """@block_size: the cache's own, which may be a part of vLLM's."""
    table, lengths = metadata.block_table, metadata.seq_lens
    used = torch.arange(table.shape[1])[None, :] * block_size < lengths[:, None]
    blocks, places = torch.unique(table[used].long(), return_inverse=True)
    found = torch.zeros_like(table, dtype=torch.int32)
    found[used] = places.int()
    return Gathered(blocks, found)


class _Shared:
    """Memory that fmhad's worker sees too, growing as needed. A run is over when its call returns, so that one piece does."""

    def __init__(self):
        self.bytes = None

    def take(self, shape, dtype) -> torch.Tensor:
        n = torch.Size(shape).numel() * dtype.itemsize
        if self.bytes is None or self.bytes.numel() < n:
            self.bytes = None
            self.bytes = torch.from_numpy(fmha.empty(max(n, 1 << 20) * 5 // 4, "uint8"))
        return self.bytes[:n].view(dtype).view(shape)


_shared = _Shared()


class FmhaImpl(AttentionImpl):
    def __init__(self, num_heads, head_size, scale, num_kv_heads=None, alibi_slopes=None, sliding_window=None, kv_cache_dtype="auto",
                 logits_soft_cap=None, attn_type=AttentionType.DECODER, kv_sharing_target_layer_name=None, sinks=None, **unknown):
        told = [n for n, w in unknown.items() if w]
        if told:
            raise fmha.NotSupportedError("ENOTSUP", f"vLLM asks for {', '.join(told)}, which is not known here", told[0])
        if attn_type not in (AttentionType.DECODER, *_ENCODERS):
            raise fmha.NotSupportedError("ENOTSUP", f"attention of type {attn_type} is not known here", "mask")
        if kv_cache_dtype not in FmhaBackend.supported_kv_cache_dtypes:
            raise fmha.NotSupportedError("ENOTSUP", f"a cache of {kv_cache_dtype} is not known here", "tensor.k.dtype")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.logits_soft_cap = float(logits_soft_cap or 0.0)
        self.sliding_window = sliding_window if sliding_window and sliding_window > 0 else None
        self.alibi_slopes, self.sinks = alibi_slopes, sinks
        self.extras: dict | None = None  # what joins each call, on the layer's device
        self._options: dict = {}

    def _words(self, causal: bool, longest_q: int, longest_k: int):
        key = causal, longest_q, longest_k
        found = self._options.get(key)
        if found is None:
            left = self.sliding_window - 1 if self.sliding_window else -1
            right = 0 if causal else left
            mask, band = _problem.masking(causal, (left, right), "bottom_right")
            found = self._options[key] = _problem.Options(mask=mask, window=band, scale=self.scale, softcap=self.logits_soft_cap,
                                                          max_seqlen_q=longest_q, max_seqlen_k=longest_k)
        return found

    def _on(self, device) -> dict:
        if self.extras is None:
            self.extras = {}
            if self.alibi_slopes is not None:
                self.extras["alibi_slopes"] = torch.as_tensor(self.alibi_slopes, dtype=torch.float32, device=device)
            if self.sinks is not None:
                self.extras["sink"] = self.sinks.detach().to(device, torch.float32)
        return self.extras

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None):
        if output_scale is not None or output_block_scale is not None:
            raise fmha.NotSupportedError("ENOTSUP", "output that is quantized on the way is not known here", "tensor.o")
        if attn_metadata is None:  # vLLM measures how much memory the model takes
            return output.fill_(0)
        if self.attn_type in _ENCODERS:
            return self._encode(query, key, value, attn_metadata, output)
        metadata, n = attn_metadata, attn_metadata.num_actual_tokens
        block = kv_cache.shape[2]
        if query.is_cuda:
            tensors = {"q": query, "block_table": metadata.block_table}
            place = kv_cache
            o = output
        else:
            if metadata.gathered is None:
                metadata.gathered = _gathered(metadata, block)
            blocks = metadata.gathered.blocks
            place = _shared.take((len(blocks), *kv_cache.shape[1:]), kv_cache.dtype)
            torch.index_select(kv_cache, 0, blocks, out=place)
            tensors = {"q": query[:n], "block_table": metadata.gathered.table}
            o = output[:n]
        pages = place.transpose(1, 2)  # [blocks, tokens, kv heads, 2 * head size]
        tensors["k"], tensors["v"] = pages[..., : self.head_size], pages[..., self.head_size :]
        tensors["seqstart_q"], tensors["seqlen_k"] = metadata.query_start_loc, metadata.seq_lens
        tensors |= self._on(query.device)
        tensors["o"] = o.view(-1, self.num_heads, self.head_size)
        most = metadata.block_table.shape[1] * block
        options = self._words(metadata.causal, _rounded(metadata.max_query_len, query.shape[0]), _rounded(metadata.max_seq_len, most))
        _run.execute(tensors, options)
        calls["cache"] += 1
        return output

    def _encode(self, query, key, value, metadata, output):
        """Sequences that see all of themselves, without a cache."""
        n = metadata.num_actual_tokens
        starts = metadata.query_start_loc
        tensors = {"q": query[:n], "k": key[:n], "v": value[:n], "seqstart_q": starts, "seqstart_k": starts,
                   **self._on(query.device), "o": output[:n].view(-1, self.num_heads, self.head_size)}
        longest = _rounded(metadata.max_query_len, n)
        _run.execute(tensors, self._words(False, longest, longest))
        calls["encoder"] += 1
        return output

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping) -> None:
        if self.attn_type in _ENCODERS:
            return
        if key.is_cuda:
            from vllm._custom_ops import reshape_and_cache_flash

            pages = kv_cache.transpose(1, 2)
            reshape_and_cache_flash(key, value, pages[..., : self.head_size], pages[..., self.head_size :], slot_mapping, "auto",
                                    layer._k_scale, layer._v_scale)
            return
        slots = slot_mapping.long()
        key, value = key[: len(slots)], value[: len(slots)]
        if bool((slots < 0).any()):  # padding
            kept = slots >= 0
            slots, key, value = slots[kept], key[kept], value[kept]
        size = kv_cache.shape[2]
        kv_cache[slots // size, :, slots % size] = torch.cat([key, value], -1).to(kv_cache.dtype)
