# SPDX-License-Identifier: MIT
"""SGLang's adapter, driven by a runner that stands in for SGLang's: its wheels are for CUDA. What stands in has the names and meanings of
SGLang 0.5.23's interfaces; numbers are judged by a formula in double.

SGLANG_SOURCE names a folder with SGLang's wheel unpacked: then its own base class, registry, choices, write places and forward
modes are used (transformers, torchvision and what else SGLang's modules import have to be there, but for a few stand-ins).
"""
import dataclasses
import enum
import importlib
import os
import pathlib
import sys
import types

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
import fmha  # noqa: E402

ENGINES = pathlib.Path(__file__).resolve().parents[2] / "engines"
HEADS, KV_HEADS, HDIM, PAGE, CONTEXT = 4, 2, 16, 4, 64


SOURCE = os.environ.get("SGLANG_SOURCE")
BASE, MEMORY, CHOICES, REGISTRY, MODES = (f"sglang.srt.{name}" for name in (
    "layers.attention.base_attn_backend", "mem_cache.memory_pool", "arg_groups.choices", "layers.attention.attention_registry",
    "model_executor.forward_batch_info"))


class Mode(enum.Enum):
    EXTEND = 1
    DECODE = 2

    def is_decode(self):
        return self is Mode.DECODE


@dataclasses.dataclass
class KVWriteLoc:
    loc: torch.Tensor
    swa_loc: object = None


if SOURCE:
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "tests/lib"))
    import stand_ins

    stand_ins.install(("kernels", "orjson", "IPython", "gguf"))
    package = types.ModuleType("sglang")  # its own changes transformers for the models that it serves
    package.__path__ = [f"{SOURCE}/sglang"]
    sys.modules["sglang"] = package
    own = types.SimpleNamespace(base=importlib.import_module(BASE), memory=importlib.import_module(MEMORY),
                                choices=importlib.import_module(CHOICES), registry=importlib.import_module(REGISTRY))
    Mode = importlib.import_module(MODES).ForwardMode


class Pool:
    """Keys and values of all tokens, by place."""

    def __init__(self, size):
        self.k, self.v = torch.randn(2, size, KV_HEADS, HDIM)

    def get_key_buffer(self, layer):
        return self.k

    def get_value_buffer(self, layer):
        return self.v

    def set_kv_buffer(self, layer, places, k, v):
        self.k[places.loc], self.v[places.loc] = k, v


@pytest.fixture
def adapter(monkeypatch):
    """fmha_sglang, with modules of SGLang's names around it, or SGLang's."""
    monkeypatch.syspath_prepend(str(ENGINES / "sglang"))
    if SOURCE:
        import fmha_sglang

        names, known = own.choices.ATTENTION_BACKEND_CHOICES, dict(own.registry.ATTENTION_BACKENDS)
        before = list(names)
        assert "triton" in names and "triton" in known
        names[:], own.choices.names = ["triton"], names
        own.registry.ATTENTION_BACKENDS.clear()
        assert issubclass(importlib.import_module("fmha_sglang.backend").FmhaAttnBackend, own.base.AttentionBackend)
        yield fmha_sglang, own.choices, own.registry
        names[:] = before
        own.registry.ATTENTION_BACKENDS.update(known)
        return
    base = types.ModuleType("sglang.srt.layers.attention.base_attn_backend")
    base.AttentionBackend = type("AttentionBackend", (), {})
    memory = types.ModuleType("sglang.srt.mem_cache.memory_pool")
    memory.KVWriteLoc = KVWriteLoc
    choices = types.ModuleType("sglang.srt.arg_groups.choices")
    choices.names = ["triton"]
    choices.add_attention_backend_choices = choices.names.extend
    registry = types.ModuleType("sglang.srt.layers.attention.attention_registry")
    registry.ATTENTION_BACKENDS = {}
    registry.register_attention_backend = lambda name: lambda make: registry.ATTENTION_BACKENDS.setdefault(name, make)
    for module in (base, memory, choices, registry):
        parts = module.__name__.split(".")
        for i in range(1, len(parts)):
            parent = ".".join(parts[:i])
            if parent not in sys.modules:
                monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    import fmha_sglang

    yield fmha_sglang, choices, registry
    for name in ("fmha_sglang", "fmha_sglang.backend"):
        sys.modules.pop(name, None)


class Engine:
    """Requests that grow, and what SGLang's runner would say of them."""

    def __init__(self, window=-1, cap=0.0):
        torch.manual_seed(0)
        self.pool = Pool(48 * PAGE)
        self.free = torch.randperm(47).tolist()
        self.table = torch.full((8, CONTEXT), 10**6, dtype=torch.int32)  # what is not in use is no place
        self.runner = types.SimpleNamespace(
            req_to_token_pool=types.SimpleNamespace(req_to_token=self.table), token_to_kv_pool=self.pool, page_size=PAGE, device="cpu",
            kv_cache_dtype=torch.float32, use_mla_backend=False, is_hybrid_swa=False,
            model_config=types.SimpleNamespace(context_len=CONTEXT, is_encoder_decoder=False))
        self.layer = types.SimpleNamespace(
            layer_id=0, tp_q_head_num=HEADS, tp_k_head_num=KV_HEADS, qk_head_dim=HDIM, v_head_dim=HDIM, scaling=0.3, logit_cap=cap,
            sliding_window_size=window, is_cross_attention=False, attn_type="decoder")
        self.keys, self.values = {}, {}

    def grow(self, request, n):
        """Places for @n more tokens of a request."""
        used = len(self.keys.setdefault(request, torch.empty(0, KV_HEADS, HDIM)))
        for at in range(used, used + n):
            if at % PAGE == 0:
                page = self.free.pop()
                self.table[request, at : at + PAGE] = torch.arange(page * PAGE, page * PAGE + PAGE)
        return self.table[request, used : used + n].long()

    def batch(self, grown, mode):
        """(a batch in which each request of @grown has so many new tokens, their q, k and v, what attention is to say)."""
        places = torch.cat([self.grow(r, n) for r, n in grown.items()])
        total = sum(grown.values())
        q, (k, v) = torch.randn(total, HEADS, HDIM), torch.randn(2, total, KV_HEADS, HDIM)
        want, at = [], 0
        for request, n in grown.items():
            new = slice(at, at + n)
            self.keys[request] = torch.cat([self.keys[request], k[new]])
            self.values[request] = torch.cat([self.values.get(request, torch.empty(0, KV_HEADS, HDIM)), v[new]])
            want.append(self.exact(q[new], self.keys[request], self.values[request]))
            at += n
        lengths = torch.tensor([len(self.keys[r]) for r in grown])
        batch = types.SimpleNamespace(
            forward_mode=mode, seq_lens=lengths, seq_lens_cpu=lengths, req_pool_indices=torch.tensor(list(grown)), out_cache_loc=places,
            extend_seq_lens=torch.tensor(list(grown.values()), dtype=torch.int32), extend_seq_lens_cpu=list(grown.values()),
            spec_info=None, encoder_lens=None)
        return batch, (q.flatten(1), k, v), torch.cat(want).flatten(1)

    def exact(self, q, k, v):
        q, k, v = (t.double().transpose(0, 1) for t in (q, k, v))
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, 0) for t in (k, v))
        s = q @ k.mT * self.layer.scaling
        if self.layer.logit_cap:
            s = self.layer.logit_cap * torch.tanh(s / self.layer.logit_cap)
        distance = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1] - torch.arange(k.shape[1])
        hidden = distance < 0
        if self.layer.sliding_window_size >= 0:
            hidden |= distance > self.layer.sliding_window_size
        return (s.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1)


@pytest.mark.parametrize("words", [{}, {"window": 6}, {"cap": 5.0}], ids=str)
def test_prompts_parts_of_prompts_and_tokens(adapter, words):
    engine = Engine(**words)
    backend = adapter[0].make(engine.runner)
    steps = [({0: 5, 3: 9}, Mode.EXTEND), ({3: 4, 0: 2, 5: 1}, Mode.EXTEND), *[({5: 1, 0: 1, 3: 1}, Mode.DECODE)] * 5]
    for grown, mode in steps:
        batch, tensors, want = engine.batch(grown, mode)
        backend.init_forward_metadata(batch)
        forward = backend.forward_decode if mode.is_decode() else backend.forward_extend
        o = forward(*tensors, engine.layer, batch)
        assert o.shape == want.shape and (o - want).abs().max() < 2e-6
    from fmha_sglang.backend import calls

    assert calls["extend"] >= 2 and calls["decode"] >= 5


def test_a_replay_reads_what_was_filled_in_before_it(adapter):
    """What a graph has captured are addresses: a launch with the capture's metadata has to see the batch of now."""
    engine = Engine()
    backend = adapter[0].make(engine.runner)
    batch, tensors, want = engine.batch({1: 7, 2: 12}, Mode.EXTEND)
    backend.init_forward_metadata(batch)
    backend.forward_extend(*tensors, engine.layer, batch)
    backend.init_cuda_graph_state(max_bs=4, max_num_tokens=4)
    batch, tensors, want = engine.batch({1: 1, 2: 1}, Mode.DECODE)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    backend.init_forward_metadata_in_graph(batch)
    captured = backend.forward_metadata
    assert (backend.forward_decode(*tensors, engine.layer, batch) - want).abs().max() < 2e-6
    for _ in range(6):  # past the end of a page
        batch, tensors, want = engine.batch({2: 1, 1: 1}, Mode.DECODE)
        backend.init_forward_metadata_out_graph(batch)
        backend.forward_metadata = captured
        assert (backend.forward_decode(*tensors, engine.layer, batch) - want).abs().max() < 2e-6
    assert backend.get_cuda_graph_seq_len_fill_value() == 1


def test_it_registers_once(adapter):
    package, choices, registry = adapter
    package.register()
    package.register()
    assert choices.names == ["triton", "fmha"] and list(registry.ATTENTION_BACKENDS) == ["fmha"]
    assert type(registry.ATTENTION_BACKENDS["fmha"](Engine().runner)).__name__ == "FmhaAttnBackend"


@pytest.mark.parametrize("name, value, what", [("use_mla_backend", True, "MLA"), ("is_hybrid_swa", True, "sliding windows"),
                                               ("kv_cache_dtype", torch.float8_e4m3fn, "float8")])
def test_what_is_not_known_is_refused(adapter, name, value, what):
    engine = Engine()
    setattr(engine.runner, name, value)
    with pytest.raises(fmha.NotSupportedError, match=what):
        adapter[0].make(engine.runner)


def test_batches_that_are_not_known_are_refused(adapter):
    engine = Engine()
    backend = adapter[0].make(engine.runner)
    batch, tensors, _ = engine.batch({1: 3}, Mode.EXTEND)
    batch.spec_info = object()
    with pytest.raises(fmha.NotSupportedError, match="speculative"):
        backend.init_forward_metadata(batch)
    batch.spec_info = None
    backend.init_forward_metadata(batch)
    with pytest.raises(fmha.NotSupportedError, match="k_rope"):
        backend.forward_extend(*tensors, engine.layer, batch, k_rope=tensors[1])
    engine.layer.attn_type = "decoder_bidirectional"
    with pytest.raises(fmha.NotSupportedError, match="decoder_bidirectional"):
        backend.forward_extend(*tensors, engine.layer, batch)
