# SPDX-License-Identifier: MIT
"""Caches that grow by a key a token: which plans they take, and their results at every length."""
import ctypes
import mmap
import types

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
import fmha.torch  # noqa: E402
from fmha import _again, _arrays, _local, _problem  # noqa: E402
from test_numpy import status  # noqa: E402
from test_torch import DEVICE, normal  # noqa: E402

sdpa = torch.nn.functional.scaled_dot_product_attention
DECODE = _problem.Options(layout="bhsd")


class Made:
    """Stands for _local.Plan: holds for steps of 64 keys, as a daemon's plan does."""

    made: list = []

    def __init__(self, views, shape, options, place):
        rows = shape.rows_k
        self.most = -(-rows // 64) * 64
        self.least, self.unit, self.captured, self.index = self.most - 63, 8, False, place[1]
        self.views = views
        Made.made.append(rows)

    holds = _local.Plan.holds


@pytest.fixture
def plans(monkeypatch):
    monkeypatch.setattr(_local, "Plan", Made)
    monkeypatch.setattr(_local, "_plans", {})
    monkeypatch.setattr(_local, "_ranges", {})
    monkeypatch.setattr(_local, "_is_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index: None)
    Made.made = []
    return Made.made


def ask(rows, options=DECODE, batch=2, heads=2, hdim=64, k=None, **arrays):
    """(plan, keys) of one decode over @rows keys, which lie as torch.cat() makes them."""
    def zeros(*shape):  # where torch would have put it on a GPU
        return _arrays.view(torch.zeros(shape, dtype=torch.bfloat16), "k")._replace(pointer=4096)

    views = {"q": zeros(batch, 4, 1, hdim), "k": k or zeros(batch, heads, rows, hdim), "v": zeros(batch, heads, rows, hdim),
             "o": zeros(batch, 4, 1, hdim), **arrays}
    shape = types.SimpleNamespace(rows_k=rows)
    key = options, tuple((n, v.shape, v.strides) for n, v in views.items())
    return _local._plan(key, views, shape, options, ("cuda", 0))


def test_64_tokens_take_two_plans(plans):
    for rows in range(1000, 1064):
        plan, keys = ask(rows)
        assert plan.least <= rows <= plan.most
        assert keys == (None if rows in (1000, 1025) else (rows, *(2 * rows * 64, rows * 64) * 2))
    assert plans == [1000, 1025]
    ask(1000), ask(1063), ask(999)
    assert plans == [1000, 1025], "other layers, and shorter caches, share them"


def test_what_chooses_kernels_has_plans_of_its_own(plans):
    view = _arrays.view(torch.zeros(2, 2, 70, 64, dtype=torch.bfloat16), "k")._replace(pointer=4096)
    others = [dict(options=DECODE._replace(scale=0.5)), dict(batch=3), dict(heads=1), dict(hdim=128),
              dict(k=view._replace(pointer=4098)),                      # not where wide loads reach
              dict(k=view._replace(strides=(9000, 70 * 64, 64, 1))),    # good: another place of batches
              dict(k=view._replace(strides=(9001, 70 * 64, 64, 1))),    # a step that wide loads do not take
              dict(k=view._replace(strides=(0, 70 * 64, 64, 1))),       # one cache for all
              dict(k=view._replace(strides=(8960, 4480, 1, 70))),       # columns
              dict(bias=_arrays.view(torch.zeros(2, 1, 1, 70), "bias"))]
    ask(69)
    n_plans = [len(plans)]
    for other in others:
        ask(70, **other)
        n_plans.append(len(plans))
    assert [b - a for a, b in zip(n_plans, n_plans[1:])] == [1, 1, 1, 1, 1, 0, 1, 1, 1, 1]


def test_old_ranges_go_with_their_plans(plans, monkeypatch):
    monkeypatch.setattr(_local, "KEPT", 4)
    for hdim in (8, 16, 24, 32, 40, 48):
        ask(100, hdim=hdim)
    kept = {id(p) for p in _local._plans.values()}
    assert len(kept) <= 4 and {id(p) for of in _local._ranges.values() for p in of} == kept
    before = len(plans)
    ask(101, hdim=48)
    assert len(plans) == before
    ask(101, hdim=8)
    assert len(plans) == before + 1


class Kernels:
    """Stands for _local.Run."""

    def __init__(self, keys=None):
        self.plan = Made({}, types.SimpleNamespace(rows_k=70), DECODE, ("cuda", 0))
        self.keys = keys

    def with_keys(self, keys):
        return Kernels(keys)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_a_call_seen_with_fewer_keys_is_known(monkeypatch, layout):
    monkeypatch.setattr(_again, "_kept", _again._Kept())

    def tensors(rows, heads=2, hdim=64):
        made = [torch.zeros(2, heads, n, hdim, dtype=torch.bfloat16) for n in (1, rows, rows)]
        return made if layout == "bhsd" else [t.transpose(1, 2) for t in made]

    words = layout, False, 0.0
    first = tensors(70)
    seen = _again.Seen(first[0], first[2], DECODE, DECODE)
    seen.runs[0] = Kernels()
    _again._remember(seen, words, *first)
    assert _again._grown(words, *tensors(71)).runs[0].keys == (71, *(2 * 71 * 64, 71 * 64) * 2)
    assert _again._kept.seen[_again._key(words, *tensors(71))].o is seen.o
    assert _again._grown(words, *tensors(128)) is not None
    q, k, v = tensors(80)
    for other in ((words, *tensors(129)), (words, *tensors(64)), ((layout, True, 0.0), q, k, v), (words, *tensors(80, heads=1)),
                  (words, *tensors(80, hdim=32)), (words, q, k, torch.zeros(*v.shape[:3], 128, dtype=v.dtype)[..., ::2]),
                  (words, q, k, tensors(81)[2]), (words, q, k[:1].expand_as(k), v), (words, q.float(), k, v),
                  (words, q, k[0], v[0]), (("sbhd", *words[1:]), q, k, v)):
        assert _again._grown(*other) is None


@pytest.mark.parametrize("function", ["sdpa", "attention", "replaced"])
@pytest.mark.parametrize("heads, kv_heads, hdim, first", [(4, 2, 64, 1), (4, 4, 128, 120), (8, 1, 64, 1020), (2, 2, 40, 60)])
def test_every_length_is_right(function, heads, kv_heads, hdim, first):
    dtype = torch.float32 if DEVICE == "cpu" else torch.bfloat16
    before = len(_local._plans)
    with torch.no_grad():
        for rows in range(first, first + 12):
            q = normal(2, heads, 1, hdim, dtype=dtype, seed=1)
            k, v = (normal(2, kv_heads, rows, hdim, dtype=dtype, seed=s + rows) for s in (2, 3))
            want = sdpa(q.double(), k.double(), v.double(), enable_gqa=heads != kv_heads)
            if function == "sdpa":
                found = fmha.torch.scaled_dot_product_attention(q, k, v, enable_gqa=heads != kv_heads)
            elif function == "attention":
                found = fmha.torch.attention(*(t.transpose(1, 2) for t in (q, k, v)), causal=True).transpose(1, 2)
            else:
                with fmha.torch.replace_sdpa():
                    found = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=heads != kv_heads)
            assert (found.double() - want).abs().max() < (1e-5 if dtype == torch.float32 else 0.02), rows
    if DEVICE != "cpu" and hdim % 8 == 0:
        assert len(_local._plans) - before <= 3, "one for a single key, one before and one behind a border"


class Guarded:
    """An array of float32 flush at a page that nobody may touch: behind it, or in front of it."""

    def __init__(self, values, at_end):
        page = mmap.PAGESIZE
        pages = -(-values.nbytes // page)
        self.map = mmap.mmap(-1, (pages + 2) * page)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        for guard in (start, start + (pages + 1) * page):
            assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(guard), page, 0) == 0
        at = page + (pages * page - values.nbytes if at_end else 0)
        self.array = np.frombuffer(self.map, np.float32, values.size, at).reshape(values.shape)
        self.array[...] = values


@pytest.mark.skipif(DEVICE != "cpu", reason="pages of the CPU's")
@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_nothing_beyond_the_cache_is_touched(library, at_end):
    rng = np.random.default_rng(3)
    for rows in (1, 2, 63, 64, 65, 127, 128, 129, 300):
        q, k, v = (rng.standard_normal((2, 2, n, 32), dtype=np.float32) for n in (1, rows, rows))
        scores = np.einsum("bhid,bhjd->bhij", q.astype(float), k) / np.sqrt(32)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        want = np.einsum("bhij,bhjd->bhid", p / p.sum(-1, keepdims=True), v)
        caches = [Guarded(x, at_end) for x in (k, v)]
        if library == "numpy":
            found = fmha.attention(q, *(c.array for c in caches), layout="bhsd")
        else:
            found = fmha.torch.scaled_dot_product_attention(*(torch.from_numpy(x) for x in (q, *(c.array for c in caches)))).numpy()
        assert np.abs(found - want).max() < 1e-5, rows


def plans_made():
    return sum(sum(d["worker"]["plans_by"].values()) for d in status()["devices"] if "worker" in d)


@pytest.mark.skipif(DEVICE != "cpu", reason="those of local launches are counted above")
def test_64_tokens_take_few_plans_of_the_daemon():
    q = normal(1, 4, 1, 48)
    before = plans_made()
    for rows in range(900, 964):
        k, v = normal(1, 4, rows, 48, seed=1), normal(1, 4, rows, 48, seed=2)
        fmha.torch.scaled_dot_product_attention(q, k, v)
    assert 1 <= plans_made() - before <= 2


def test_generation_takes_few_plans_and_the_same_tokens():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    fmha.torch.enable_transformers()
    config = transformers.LlamaConfig(vocab_size=100, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                                      num_key_value_heads=2, max_position_embeddings=256, eos_token_id=None, pad_token_id=0)
    torch.manual_seed(4)
    model = transformers.LlamaForCausalLM(config).to(DEVICE).eval()
    prompt = torch.arange(1, 61, device=DEVICE)[None]
    tokens, before = {}, 0
    for name in ("eager", "fmhad"):
        model.set_attn_implementation(name)
        if name == "fmhad":
            before = len(_local._plans) if DEVICE != "cpu" else plans_made()
        tokens[name] = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, do_sample=False)
    assert torch.equal(tokens["eager"], tokens["fmhad"])
    after = len(_local._plans) if DEVICE != "cpu" else plans_made()
    assert after - before <= 4, "the prompt, and lengths up to 64 and 128"
