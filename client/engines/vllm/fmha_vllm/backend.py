# SPDX-License-Identifier: MIT
"""The backend, its metadata and one layer's attention.

The cache of a layer is [blocks, kv heads, tokens of a block, 2 * head size], in any strides: K and V share a row; of the model's type,
or of fp8 or int8 under queries of 16 bits, where each may have its factor behind it. On a GPU the kernels
read it where it lies, by vLLM's own block table, on torch's current stream. On a CPU fmhad is another process: the blocks that a step
reads are gathered into memory that both see, once a layer.
"""
from __future__ import annotations

import collections
import dataclasses

import fmha
import numpy
import torch
from fmha import _problem, _run
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend, AttentionCGSupport, AttentionImpl, AttentionMetadataBuilder, AttentionType, MultipleOf,
)
from vllm.v1.kv_cache_interface import KVQuantMode

from . import name

calls = collections.Counter()  # what fmhad was asked, by kind: "cache", "encoder"
MAX_HEAD_SIZE = 512
# What vLLM calls a cache of 8 bits; its rows are divided by a layer's _k_scale and _v_scale, or each by a factor that lies behind it as
# four bytes.
PER_ROW = {"fp8_per_token_head": torch.float8_e4m3fn, "int8_per_token_head": torch.int8}
NARROW = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, **PER_ROW}
_PER_ROW_MODES = KVQuantMode.FP8_PER_TOKEN_HEAD, KVQuantMode.INT8_PER_TOKEN_HEAD
_FACTOR_BYTES = 4
_ENCODERS = (AttentionType.ENCODER_ONLY, AttentionType.ENCODER)


class FmhaBackend(AttentionBackend):
    accept_output_buffer = True
    forward_includes_kv_cache_update = False
    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16", *NARROW]

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
    def supports_combination(cls, head_size, dtype, kv_cache_dtype, *_, **__) -> str | None:
        if kv_cache_dtype in PER_ROW and not current_platform.is_cpu():
            return f"{kv_cache_dtype} is known on CPUs alone"
        return f"a cache of {kv_cache_dtype} takes queries of 16 bits" if kv_cache_dtype in NARROW and dtype == torch.float32 else None

    @classmethod
    def customize_spec(cls, spec):
        """K, its factor, V, its factor, of a token and head each."""
        if spec.state_content_bytes is not None or spec.kv_quant_mode not in _PER_ROW_MODES:
            return spec
        return dataclasses.replace(spec, state_content_bytes=(spec.head_size + spec.head_size_v) * spec.dtype.itemsize + 2 * _FACTOR_BYTES)

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
    parts: tuple = ()  # on a GPU: Part, one launch each


@dataclasses.dataclass
class Part:
    """Requests that one launch serves. Those of one row each are a batch, others packed sequences."""

    rows: slice  # of the queries
    first: int  # of the requests
    lengths: torch.Tensor  # of keys
    table: torch.Tensor
    longest_q: int
    longest_k: int
    starts: torch.Tensor | None = None  # None: a batch, a row each
    rows_each: torch.Tensor | None = None  # how many rows this launch is to see
    least_rows: int = 0  # requests with fewer are another launch's


def _reads_in_place(tensor) -> bool:
    """Whether what computes reads vLLM's cache where it lies."""
    return tensor.is_cuda


def _rounded(n: int, most: int) -> int:
    """Few numbers for many, so that few plans are made."""
    return min(1 << max(n - 1, 0).bit_length(), most) if n > 0 else 1


class FmhaMetadataBuilder(AttentionMetadataBuilder):
    # Lengths, tables and slots are read on the device by each replay; no number of a batch is in a captured launch but its extents.
    _cudagraph_support = AttentionCGSupport.ALWAYS
    supports_update_block_table = True

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1)  # requests of one row come first
        self.rows_each: torch.Tensor | None = None  # for graphs of mixed batches: 1 for requests of one row, else 0

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False) -> FmhaMetadata:
        common = common_attn_metadata
        if isinstance(common.causal, torch.Tensor):
            raise fmha.NotSupportedError("ENOTSUP", "a causal flag for each request is not known here", "mask")
        metadata = FmhaMetadata(
            num_actual_tokens=common.num_actual_tokens, max_query_len=common.max_query_len, max_seq_len=common.max_seq_len,
            query_start_loc=common.query_start_loc, seq_lens=common.seq_lens, block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping, causal=bool(common.causal))
        if _reads_in_place(common.seq_lens):
            self._tell_graphs(common)
            metadata.parts = _parts(common)
        return metadata

    def build_for_cudagraph_capture(self, common_attn_metadata) -> FmhaMetadata:
        common = common_attn_metadata
        metadata = self.build(0, common)
        if _reads_in_place(common.seq_lens) and common.max_query_len > 1:
            if self.rows_each is None:
                self.rows_each = torch.zeros(self.vllm_config.scheduler_config.max_num_seqs + 1, dtype=torch.int32, device=self.device)
                self._tell_graphs(common)
            metadata.parts = _masked_parts(common, self.rows_each[: common.num_reqs])
        return metadata

    def _tell_graphs(self, common) -> None:
        """Which requests have one row, where captured launches look."""
        if self.rows_each is not None:
            each = self.rows_each[: common.num_reqs]
            torch.sub(common.query_start_loc[1 : common.num_reqs + 1], common.query_start_loc[: common.num_reqs], out=each)
            each.eq_(1)

    def update_block_table(self, metadata, blk_table, slot_mapping):
        parts = tuple(dataclasses.replace(p, table=blk_table[p.first : p.first + len(p.lengths)]) for p in metadata.parts)
        return dataclasses.replace(metadata, block_table=blk_table, slot_mapping=slot_mapping, gathered=None, parts=parts)


def _parts(common) -> tuple:
    """Launches for a batch whose numbers the host knows."""
    n, tokens = common.num_reqs, common.num_actual_tokens
    lengths, table = common.seq_lens[:n], common.block_table_tensor[:n]
    if common.max_query_len == 1 and tokens == n:
        return (Part(slice(0, n), 0, lengths, table, 1, common.max_seq_len),)
    others = numpy.diff(common.query_start_loc_cpu.numpy()[: n + 1]) != 1
    first = int(others.argmax()) if others.any() else n
    if first == 0 or not common.causal:
        return (Part(slice(0, tokens), 0, lengths, table, common.max_query_len, common.max_seq_len, common.query_start_loc[: n + 1]),)
    one = Part(slice(0, first), 0, lengths[:first], table[:first], 1, common.max_seq_len)
    if first == n:
        return (one,)
    return one, Part(slice(first, tokens), first, lengths[first:], table[first:], common.max_query_len, common.max_seq_len,
                     common.query_start_loc[first : n + 1] - first)


def _masked_parts(common, rows_each) -> tuple:
    """Launches for any batch of as many tokens: each looks at all requests and leaves the other's alone."""
    n, tokens = common.num_reqs, common.num_actual_tokens
    every = Part(slice(0, tokens), 0, common.seq_lens[:n], common.block_table_tensor[:n], common.max_query_len, common.max_seq_len,
                 common.query_start_loc[: n + 1])
    if not common.causal:
        return (every,)
    return (dataclasses.replace(every, longest_q=1, rows_each=rows_each), dataclasses.replace(every, least_rows=2))


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
        self.narrow, self.per_row = NARROW.get(kv_cache_dtype), kv_cache_dtype in PER_ROW
        if self.per_row and not current_platform.is_cpu():
            raise fmha.NotSupportedError("ENOTSUP", f"a cache of {kv_cache_dtype} is known on CPUs alone", "tensor.k.dtype")
        self._options: dict = {}

    def _words(self, causal: bool, longest_q: int, longest_k: int, least_rows: int = 0):
        key = causal, longest_q, longest_k, least_rows
        found = self._options.get(key)
        if found is None:
            left = self.sliding_window - 1 if self.sliding_window else -1
            right = 0 if causal else left
            mask, band = _problem.masking(causal, (left, right), "bottom_right")
            found = self._options[key] = _problem.Options(mask=mask, window=band, scale=self.scale, softcap=self.logits_soft_cap,
                                                          max_seqlen_q=longest_q, max_seqlen_k=longest_k,
                                                          min_seqlen_q=least_rows, descale_block_k=int(self.per_row),
                                                          descale_per_page=self.per_row)
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
        if self.narrow and query.dtype == torch.float32:
            raise fmha.NotSupportedError("ENOTSUP", f"a cache of {self.kv_cache_dtype} takes queries of 16 bits", "tensor.q.dtype")
        calls["cache"] += 1
        if self.narrow:
            kv_cache = kv_cache.view(torch.uint8)
        if _reads_in_place(query):
            for part in attn_metadata.parts:
                self._launch(layer, part, query, kv_cache, attn_metadata.causal, output)
            return output
        metadata, n = attn_metadata, attn_metadata.num_actual_tokens
        block = kv_cache.shape[2]
        if metadata.gathered is None:
            metadata.gathered = _gathered(metadata, block)
        blocks = metadata.gathered.blocks
        place = _shared.take((len(blocks), *kv_cache.shape[1:]), kv_cache.dtype)
        torch.index_select(kv_cache, 0, blocks, out=place)
        tensors = {"q": query[:n], **self._pages(layer, place), "block_table": metadata.gathered.table, "seqstart_q": metadata.query_start_loc,
                   "seqlen_k": metadata.seq_lens, **self._on(query.device), "o": output[:n].view(-1, self.num_heads, self.head_size)}
        most = metadata.block_table.shape[1] * block
        _run.execute(tensors, self._words(metadata.causal, _rounded(metadata.max_query_len, query.shape[0]), _rounded(metadata.max_seq_len, most)))
        return output

    def _pages(self, layer, cache) -> dict:
        size, half = self.head_size, cache.shape[-1] // 2
        k, v = cache.transpose(1, 2).split(half, -1)  # [blocks, tokens, kv heads, head size]
        if not self.narrow:
            return {"k": k, "v": v}
        if self.per_row:
            factors = [x[..., size:].view(torch.float32).squeeze(-1) for x in cache.split(half, -1)]
        else:
            factors = layer._k_scale, layer._v_scale
        return {"k": k[..., :size].view(self.narrow), "v": v[..., :size].view(self.narrow), **dict(zip(("k_descale", "v_descale"), factors))}

    def _launch(self, layer, part: Part, query, kv_cache, causal: bool, output) -> None:
        """On a GPU, where the cache lies."""
        q, o = query[part.rows], output.view(-1, self.num_heads, self.head_size)[part.rows]
        longest = _rounded(part.longest_k, part.table.shape[1] * kv_cache.shape[2])
        tensors = {"q": q, **self._pages(layer, kv_cache), "block_table": part.table, "seqlen_k": part.lengths, **self._on(query.device)}
        rows = 0
        if part.starts is None:
            tensors["q"], o = q.unsqueeze(1), o.unsqueeze(1)
        else:
            tensors["seqstart_q"] = part.starts
            rows = _rounded(part.longest_q, q.shape[0])
            if part.rows_each is not None:
                tensors["seqlen_q"] = part.rows_each
        tensors["o"] = o
        _run.execute(tensors, self._words(causal, rows, longest, part.least_rows))

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
            reshape_and_cache_flash(key, value, pages[..., : self.head_size], pages[..., self.head_size :], slot_mapping,
                                    self.kv_cache_dtype if self.narrow else "auto", layer._k_scale, layer._v_scale)
            return
        slots = slot_mapping.long()
        key, value = key[: len(slots)], value[: len(slots)]
        if bool((slots < 0).any()):  # padding
            kept = slots >= 0
            slots, key, value = slots[kept], key[kept], value[kept]
        size = kv_cache.shape[2]
        if self.narrow:
            kv_cache = kv_cache.view(torch.uint8)
            key, value = (self._bytes(x.float(), None if self.per_row else scale)
                          for x, scale in ((key, layer._k_scale), (value, layer._v_scale)))
        kv_cache[slots // size, :, slots % size] = torch.cat([key, value], -1).to(kv_cache.dtype)

    def _bytes(self, rows, factor) -> torch.Tensor:
        """@factor: None: each row's own, as vLLM finds it, which goes along."""
        whole, mine = self.narrow == torch.int8, factor is None
        most = 127 if whole else torch.finfo(self.narrow).max
        if mine:
            factor = (rows.abs().amax(-1, keepdim=True) / most).clamp_min(1e-6)
        codes = (rows / factor).clamp(-most, most)
        codes = (codes.round().nan_to_num() if whole else codes).to(self.narrow).view(torch.uint8)
        return torch.cat([codes, factor.view(torch.uint8)], -1) if mine else codes
