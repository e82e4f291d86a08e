# SPDX-License-Identifier: MIT
"""A pool of the daemon's behind vLLM's cache: prefixes that other vLLM processes have computed, dead ones too, are copied in instead of
computed again.

    --kv-transfer-config '{"kv_connector": "FmhaPoolConnector", "kv_connector_module_path": "fmha_vllm.pool", "kv_role": "kv_both",
                           "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"pool": "llama", "pages": 4096}}'

A page is a block of vLLM's with all layers of one worker; each worker of a model has a pool of its own, POOL.RANK. Keys cover model,
weights, types, adapters, salts and all tokens up to the page's end. Extra configuration: "pool", a name; "pages", as many as vLLM has
blocks by default; "spill_pages", as `fmha.pool.Pool` has it; "cause", more words for the keys where weights change under a name.

Without the daemon vLLM computes everything itself; the connector looks for it again every few seconds.
"""
from __future__ import annotations

import collections
import dataclasses
import json
import math
import os
import time

import fmha
import torch
from fmha.pool import Pool, chain_keys
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole
from vllm.logger import init_logger

logger = init_logger(__name__)
counts = collections.Counter()  # of blocks in this process: "loaded", "saved", "failed"
MOST_PAGES = 65536
RETRY_S = 5.0
WAIT_S = 1.0  # for pages that come from the pool's file
SPARE = 64  # pages that are leased beyond what a step needs


@dataclasses.dataclass
class Transfers(KVConnectorMetadata):
    """What workers do in one step: runs of keys and the blocks that they belong to."""

    loads: list[tuple[list[bytes], list[int]]] = dataclasses.field(default_factory=list)
    saves: list[tuple[list[bytes], list[int]]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _Sequence:
    """What the scheduler's side knows of a request."""

    request: object
    cause: str
    keys: list[bytes] = dataclasses.field(default_factory=list)
    blocks: list[int] = dataclasses.field(default_factory=list)
    saved: int = 0  # blocks that are in the pool, or on their way
    since: float | None = None  # the file is waited for
    pinned: list[list[int]] = dataclasses.field(default_factory=list)  # pages, a list for each rank

    def keys_to(self, n: int, block_size: int) -> list[bytes]:
        if n > len(self.keys):
            tokens = self.request.all_token_ids[len(self.keys) * block_size : n * block_size]
            self.keys += chain_keys(tokens, block_size, self.cause, after=self.keys[-1] if self.keys else None)
        return self.keys[:n]


class _Handle:
    """A pool that is there as long as the daemon is."""

    def __init__(self, name: str, page_bytes: int, layout: str, pages: int | None, spill: int = 0):
        self.name, self.page_bytes, self.layout, self.pages, self.spill = name, page_bytes, layout, pages, spill
        self.pool: Pool | None = None
        self.tried = -math.inf

    def get(self) -> Pool | None:
        if self.pool is None and time.monotonic() - self.tried >= RETRY_S:
            self.tried = time.monotonic()
            try:
                self.pool = self._open()
            except fmha.UnreachableError as error:
                logger.warning("pool %s: %s; everything is computed until it is back", self.name, error)
        return self.pool

    def _open(self) -> Pool | None:
        shape = (self.page_bytes // 4,)
        try:
            return Pool(self.name, shape, layout=self.layout)
        except fmha.FmhaError as error:
            if error.code != "ENOENT":
                raise
        return Pool(self.name, shape, pages=self.pages, layout=self.layout, **({"spill_pages": self.spill} if self.spill else {})) \
            if self.pages else None

    def lost(self, error: fmha.FmhaError) -> None:
        logger.warning("pool %s: %s", self.name, error)
        self.close()

    def close(self) -> None:
        pool, self.pool = self.pool, None
        if pool is not None:
            pool.close()


def _weights(model: str) -> list:
    """Of a local model: which files it is made of, so that others under its name have other keys."""
    if not os.path.isdir(model):
        return [model]
    return [os.path.realpath(model)] + sorted((e.name, e.stat().st_size, e.stat().st_mtime_ns) for e in os.scandir(model) if e.is_file())


def _cause(config, spec, extra: dict) -> str:
    model = config.model_config
    return json.dumps([_weights(model.model), model.revision, str(model.dtype), model.quantization, model.compute_hash(),
                       config.cache_config.cache_dtype, str(spec), config.parallel_config.tensor_parallel_size, extra.get("cause")], default=str)


class FmhaPoolConnector(KVConnectorBase_V1):
    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        parallel, groups = vllm_config.parallel_config, kv_cache_config.kv_cache_groups
        if len(groups) != 1 or parallel.pipeline_parallel_size > 1 or getattr(parallel, "decode_context_parallel_size", 1) > 1 \
                or getattr(parallel, "prefill_context_parallel_size", 1) > 1:
            raise fmha.NotSupportedError("ENOTSUP", "a pool serves models with one kind of cache, split among workers by heads alone", "pool")
        extra, self.spec = self._kv_transfer_config.kv_connector_extra_config, groups[0].kv_cache_spec
        self.block_size = vllm_config.cache_config.block_size
        if self.spec.block_size != self.block_size:
            raise fmha.NotSupportedError("ENOTSUP", f"a cache of blocks of {self.spec.block_size} under blocks of {self.block_size}", "pool")
        self.cause = _cause(vllm_config, self.spec, extra)
        name, layers = extra.get("pool", "vllm"), len(groups[0].layer_names)
        size = self.spec.page_size_bytes * layers
        layout = f"vLLM, {layers} layers of {self.spec.page_size_bytes} bytes, {self.block_size} tokens"
        pages = min(int(extra.get("pages") or kv_cache_config.num_blocks), MOST_PAGES)
        if role == KVConnectorRole.SCHEDULER:  # the workers make them
            self.handles = [_Handle(f"{name}.{rank}", size, layout, None) for rank in range(parallel.tensor_parallel_size)]
        else:
            from vllm.distributed import get_tensor_model_parallel_rank

            self.handles = [_Handle(f"{name}.{get_tensor_model_parallel_rank()}", size, layout, pages, int(extra.get("spill_pages") or 0))]
        self.sequences: dict[str, _Sequence] = {}
        self.transfers = Transfers()
        self.layers: list[torch.Tensor] = []
        self.spare: list[int] = []
        self.failed: set[int] = set()

    def shutdown(self):
        for handle in self.handles:
            handle.close()

    # ---- the scheduler's side ----

    def _sequence(self, request) -> _Sequence:
        if request.request_id not in self.sequences:
            adapter = request.lora_request
            more = [request.cache_salt, adapter and [adapter.lora_name, adapter.lora_path],
                    [[f.identifier, f.mm_position.offset, f.mm_position.length] for f in request.mm_features or ()]]
            self.sequences[request.request_id] = _Sequence(request, self.cause + json.dumps(more))
        return self.sequences[request.request_id]

    def _unpin(self, sequence: _Sequence) -> None:
        pinned, sequence.pinned = sequence.pinned, []
        for handle, pages in zip(self.handles, pinned):
            if pages and handle.pool is not None:
                try:
                    handle.pool.give_back(pages)
                except fmha.FmhaError as error:
                    handle.lost(error)

    def _find(self, sequence: _Sequence, keys: list[bytes]) -> int:
        """How many of @keys all workers' pools have; these are pinned."""
        self._unpin(sequence)
        for handle in self.handles:
            try:
                pool = handle.get()
                sequence.pinned.append(pool.find(keys) if pool else [])
            except fmha.FmhaError as error:
                handle.lost(error)
                sequence.pinned.append([])
        return min(len(pages) for pages in sequence.pinned)

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        if request.prompt_token_ids is None or getattr(request, "prompt_embeds", None) is not None:
            return 0, False  # nothing that a key could be made of
        sequence = self._sequence(request)
        whole = (request.num_tokens - 1) // self.block_size  # the last token is always computed: what follows it is asked for
        keys = sequence.keys_to(whole, self.block_size)
        if getattr(request, "skip_reading_prefix_cache", False):
            return 0, False
        found = self._find(sequence, keys)
        if any(handle.pool is not None and handle.pool.coming for handle in self.handles):
            sequence.since = sequence.since or time.monotonic()
            if time.monotonic() - sequence.since < WAIT_S:
                self._unpin(sequence)
                return None, False  # vLLM asks again
        sequence.saved = found
        if found * self.block_size <= num_computed_tokens:
            self._unpin(sequence)
            return 0, False
        return found * self.block_size - num_computed_tokens, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if num_external_tokens > 0:
            sequence = self.sequences[request.request_id]
            first, end = sequence.saved - -(-num_external_tokens // self.block_size), sequence.saved
            self.transfers.loads.append((sequence.keys[first:end], list(blocks.get_block_ids()[0][first:end])))

    def build_connector_meta(self, scheduler_output):
        scheduled = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            self._save(new.req_id, list(new.block_ids[0]), new.num_computed_tokens, scheduled[new.req_id])
        cached = scheduler_output.scheduled_cached_reqs
        for req_id, blocks, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens):
            known = [] if req_id in cached.resumed_req_ids or req_id not in self.sequences else self.sequences[req_id].blocks
            self._save(req_id, known + (list(blocks[0]) if blocks else []), computed, scheduled[req_id])
        transfers, self.transfers = self.transfers, Transfers()
        return transfers

    def _save(self, req_id: str, blocks: list[int], computed: int, scheduled: int) -> None:
        """Blocks that are full when the step has run: of the prompt, and of tokens that steps before it have settled."""
        sequence = self.sequences.get(req_id)
        if sequence is None:
            return
        sequence.blocks, request = blocks, sequence.request
        tokens = max(min(computed + scheduled, request.num_prompt_tokens), min(computed, len(request.all_token_ids)))
        full = min(tokens // self.block_size, len(blocks))
        if full > sequence.saved:
            keys = sequence.keys_to(full, self.block_size)
            self.transfers.saves.append((keys[sequence.saved : full], blocks[sequence.saved : full]))
            sequence.saved = full

    def request_finished(self, request, block_ids):
        sequence = self.sequences.pop(request.request_id, None)
        if sequence is not None:
            self._unpin(sequence)
        return False, None

    # ---- a worker's ----

    def register_kv_caches(self, kv_caches):
        layers = list(kv_caches.values())
        if any(layer.device.type != "cpu" for layer in layers):
            raise fmha.NotSupportedError("ENOTSUP", "a pool's pages lie in the machine's memory; copying between them and a GPU's cache "
                                         "has not been run on one and is refused: serve without this connector there", "pool")
        if any(layer.shape != layers[0].shape or layer.shape[0] != self._kv_cache_config.num_blocks for layer in layers):
            raise fmha.NotSupportedError("ENOTSUP", f"a cache of shape {tuple(layers[0].shape)} has no dimension of blocks first", "pool")
        self.layers = layers
        self.handles[0].get()

    def _pages(self, pool: Pool) -> torch.Tensor:
        """[pages, layers, a block of one layer]."""
        first = self.layers[0]
        return torch.from_numpy(pool.pages).view(first.dtype).view(len(pool.pages), len(self.layers), *first.shape[1:])

    def start_load_kv(self, forward_context, **kwargs):
        handle = self.handles[0]
        for keys, blocks in self._get_connector_metadata().loads:
            pages = []
            try:
                pool = handle.get()
                pages = pool.find(keys) if pool else []
                if pages:
                    data, to = self._pages(pool)[torch.tensor(pages)], torch.tensor(blocks[: len(pages)])
                    for number, layer in enumerate(self.layers):
                        layer[to] = data[:, number]
                    pool.give_back(pages)
            except fmha.FmhaError as error:
                handle.lost(error)
                self.spare, pages = [], []
            counts["loaded"] += len(pages)
            counts["failed"] += len(blocks) - len(pages)
            self.failed.update(blocks[len(pages) :])

    def wait_for_save(self):
        saves, handle = self._get_connector_metadata().saves, self.handles[0]
        keys, blocks = ([item for save in saves for item in save[part]] for part in (0, 1))
        if not keys:
            return
        try:
            pool = handle.get()
            if pool is not None:
                self._publish(pool, keys, blocks)
        except fmha.FmhaError as error:
            handle.lost(error)
            self.spare = []

    def _publish(self, pool: Pool, keys: list[bytes], blocks: list[int]) -> None:
        if len(self.spare) < len(keys):
            self.spare += pool.lease(len(keys) - len(self.spare) + SPARE)
        mine, self.spare = self.spare[: len(keys)], self.spare[len(keys) :]
        if not mine:
            return  # all pages are in use
        data, of, to = self._pages(pool), torch.tensor(blocks[: len(mine)]), torch.tensor(mine)
        for number, layer in enumerate(self.layers):
            data[to, number] = layer[of]
        published = pool.seal(mine, keys[: len(mine)])
        left = [page for page, other in zip(mine, published) if page != other]  # somebody was faster
        self.spare += left
        pool.give_back(published)
        counts["saved"] += len(published) - len(left)

    def get_block_ids_with_load_errors(self):
        failed, self.failed = self.failed, set()
        return failed

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        pass
