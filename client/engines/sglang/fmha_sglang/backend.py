# SPDX-License-Identifier: MIT
"""The backend: what a forward pass needs, made once for all layers, and a layer's extend and decode.

SGLang keeps where each token of a request lies, req_to_token [requests, context]; pages of several tokens are whole, so that every
page_size-th of them, divided by that, is a page. In a graph the tables, lengths and sums lie in buffers of fixed addresses, which
each replay fills before it begins.
"""
from __future__ import annotations

import collections
import dataclasses

import fmha
import torch
from fmha import _problem, _run
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

calls = collections.Counter()  # what fmhad was asked: "extend", "decode"
MAX_HEAD_DIM = 256


def _refuse(what: str, field: str):
    raise fmha.NotSupportedError("ENOTSUP", f"{what} is not known here: choose another --attention-backend", field)


@dataclasses.dataclass
class Metadata:
    table: torch.Tensor  # int32 [requests, columns], pages
    lengths: torch.Tensor  # int32 [requests], keys
    starts: torch.Tensor  # int32 [requests + 1], of queries
    longest_query: int


class FmhaAttnBackend(AttentionBackend):
    needs_cpu_seq_lens = True

    def __init__(self, runner):
        super().__init__()
        if getattr(runner, "use_mla_backend", False):
            _refuse("MLA", "tensor.v")
        if getattr(runner, "is_hybrid_swa", False):
            _refuse("a pool of its own for sliding windows (--disable-hybrid-swa-memory leaves it out)", "window_left")
        if runner.kv_cache_dtype not in (torch.float16, torch.bfloat16, torch.float32):
            _refuse(f"a cache of {runner.kv_cache_dtype}", "tensor.k.dtype")
        if runner.model_config.is_encoder_decoder:
            _refuse("cross attention", "mask")
        self.req_to_token = runner.req_to_token_pool.req_to_token
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.page_size, self.device = runner.page_size, runner.device
        self.kv_cache_dtype = runner.kv_cache_dtype
        self.columns = -(-runner.model_config.context_len // self.page_size)
        self.forward_metadata: Metadata | None = None
        self.graph: Metadata | None = None
        self._options: dict = {}

    # ---- metadata ----

    def _table(self, requests, columns):
        tokens = self.req_to_token[requests, : columns * self.page_size : self.page_size]
        return (tokens // self.page_size).to(torch.int32)

    def _starts(self, lengths):
        return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))

    def init_forward_metadata(self, forward_batch):
        """Of a pass that is no graph's."""
        self._judge(forward_batch)
        lengths, requests = forward_batch.seq_lens, forward_batch.req_pool_indices
        columns = -(-int(forward_batch.seq_lens_cpu.max()) // self.page_size) if len(lengths) else 1
        if forward_batch.forward_mode.is_decode():
            starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device=self.device)
            longest = 1
        else:
            starts, longest = self._starts(forward_batch.extend_seq_lens), max(forward_batch.extend_seq_lens_cpu, default=1)
        # Few widths, so that few plans are made.
        columns = min(1 << max(columns - 1, 0).bit_length(), self.columns)
        self.forward_metadata = Metadata(self._table(requests, columns), lengths.to(torch.int32), starts, longest)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int):
        new = {"dtype": torch.int32, "device": self.device}
        self.graph = Metadata(torch.zeros(max_bs, self.columns, **new), torch.ones(max_bs, **new), torch.arange(max_bs + 1, **new), 1)

    def init_forward_metadata_out_graph(self, forward_batch, in_capture: bool = False):
        """Before a capture, and before each replay: the buffers that the captured launches read."""
        self._judge(forward_batch)
        if not forward_batch.forward_mode.is_decode():
            _refuse(f"a graph of {forward_batch.forward_mode}", "mask")
        n = len(forward_batch.seq_lens)
        self.graph.table[:n].copy_(self._table(forward_batch.req_pool_indices, self.columns))
        self.graph.lengths[:n].copy_(forward_batch.seq_lens)
        self.forward_metadata = Metadata(self.graph.table[:n], self.graph.lengths[:n], self.graph.starts[: n + 1], 1)

    def init_forward_metadata_in_graph(self, forward_batch):
        pass

    def get_cuda_graph_seq_len_fill_value(self):
        return 1

    def _judge(self, forward_batch):
        if getattr(forward_batch, "spec_info", None) is not None:
            _refuse("speculative decoding", "mask")
        if getattr(forward_batch, "encoder_lens", None) is not None:
            _refuse("cross attention", "mask")

    # ---- a layer ----

    def _words(self, layer, causal, longest_q, longest_k):
        window = layer.sliding_window_size
        left = window if window is not None and window >= 0 else -1
        key = causal, left, layer.scaling, layer.logit_cap, longest_q, longest_k
        found = self._options.get(key)
        if found is None:
            mask, band = _problem.masking(causal, (left, -1), "bottom_right")
            found = self._options[key] = _problem.Options(mask=mask, window=band, scale=float(layer.scaling), softcap=float(layer.logit_cap or 0),
                                                          max_seqlen_q=longest_q, max_seqlen_k=longest_k)
        return found

    def _forward(self, q, k, v, layer, forward_batch, save_kv_cache, kind, causal, sinks=None, **more):
        told = [n for n, w in more.items() if w is not None]
        if told:
            _refuse(", ".join(told), told[0])
        if layer.qk_head_dim != layer.v_head_dim or layer.qk_head_dim > MAX_HEAD_DIM or layer.is_cross_attention:
            _refuse(f"a layer of head dims {layer.qk_head_dim} and {layer.v_head_dim}, or cross attention", "hdim_q")
        pool = self.token_to_kv_pool
        if save_kv_cache and k is not None:
            self._save(layer, forward_batch.out_cache_loc, k, v)
        metadata, size = self.forward_metadata, self.page_size
        queries = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        o = torch.zeros_like(queries)  # rows of padding stay 0
        keys, values = (b.view(-1, size, *b.shape[1:]) for b in (pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)))
        tensors = {"q": queries, "k": keys, "v": values, "block_table": metadata.table, "seqstart_q": metadata.starts,
                   "seqlen_k": metadata.lengths, "o": o}
        if sinks is not None:
            tensors["sink"] = sinks.to(torch.float32)
        longest_q = min(1 << max(metadata.longest_query - 1, 0).bit_length(), len(queries))
        _run.execute(tensors, self._words(layer, causal, longest_q, metadata.table.shape[1] * size))
        calls[kind] += 1
        return o.view(len(queries), -1)

    def _save(self, layer, places, k, v):
        try:
            from sglang.srt.mem_cache.memory_pool import KVWriteLoc
        except ImportError:
            pass  # a version that takes the places as they are
        else:
            places = KVWriteLoc(places, None)
        self.token_to_kv_pool.set_kv_buffer(layer, places, k, v)

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **more):
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, "decode", True, **more)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **more):
        kind = getattr(layer.attn_type, "value", layer.attn_type)
        if kind not in ("decoder", "encoder_only"):
            _refuse(f"attention of type {kind}", "mask")
        causal = kind == "decoder"
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, "extend", causal, **more)

    def support_triton(self):
        return False
