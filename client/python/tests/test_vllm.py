# SPDX-License-Identifier: MIT
"""One layer of vLLM's backend FMHA, without an engine around it: cache update and attention, judged by a formula in double. The engine:
client/engines/tests/vllm_check.py."""
import importlib
import pathlib
import sys
import types

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("vllm", reason="vLLM is not installed")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "engines/vllm"))
import fmha  # noqa: E402
import fmha_vllm  # noqa: E402
from fmha_vllm import backend  # noqa: E402

HEADS, KV_HEADS, HDIM, BLOCK = 4, 2, 16, 16


def exact(q, k, v, slopes=None, window=None, cap=0.0, sinks=None):
    """Of one sequence, q [rows, heads, hdim] the last of k's rows."""
    q, k, v = (t.double().transpose(0, 1) for t in (q, k, v))
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, 0) for t in (k, v))
    s = q @ k.mT * 0.3
    s = cap * torch.tanh(s / cap) if cap else s
    distance = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1] - torch.arange(k.shape[1])
    if slopes is not None:
        s = s - torch.tensor(slopes).double()[:, None, None] * distance.abs()
    s = s.masked_fill((distance < 0) | (distance >= (window or 10**6)), -torch.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.double()[:, None, None].expand(-1, s.shape[1], 1)], -1)
    return (s.softmax(-1)[..., : k.shape[1]] @ v).transpose(0, 1)


@pytest.mark.parametrize("layout", ["heads outside", "tokens outside"])
@pytest.mark.parametrize("words", [{}, {"slopes": [0.5, 0.25, 0.125, 0.0625]}, {"window": 7}, {"cap": 4.0},
                                   {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}, {"window": 9, "cap": 3.0, "sinks": torch.zeros(4)}], ids=lambda w: str(w)[:40])
def test_a_layer(words, layout):
    torch.manual_seed(0)
    queries, lengths = (1, 5, 3), (20, 40, 3)  # a token, a part of a prompt, a whole one
    impl = backend.FmhaImpl(HEADS, HDIM, 0.3, KV_HEADS, alibi_slopes=words.get("slopes"), sliding_window=words.get("window"),
                            logits_soft_cap=words.get("cap"), sinks=words.get("sinks"))
    if layout == "heads outside":
        cache = torch.full((9, KV_HEADS, BLOCK, 2 * HDIM), torch.nan)
    else:
        cache = torch.full((9, BLOCK, KV_HEADS, 2 * HDIM), torch.nan).transpose(1, 2)
    blocks, table = torch.randperm(8).tolist(), torch.full((3, 4), 10**6, dtype=torch.int32)
    keys = [torch.randn(n, KV_HEADS, HDIM) for n in lengths]
    values = [torch.randn(n, KV_HEADS, HDIM) for n in lengths]
    new = []
    for b, (n, rows) in enumerate(zip(lengths, queries)):
        for column in range(-(-n // BLOCK)):
            table[b, column] = blocks.pop()
        slots = table[b].long()[torch.arange(n) // BLOCK] * BLOCK + torch.arange(n) % BLOCK
        old = n - rows
        impl.do_kv_cache_update(None, keys[b][:old], values[b][:old], cache, slots[:old])
        new.append(slots[old:])
    q = torch.randn(sum(queries) + 2, HEADS, HDIM)  # two rows of padding
    k, v = (torch.cat([t[n - rows :] for t, n, rows in zip(ts, lengths, queries)]) for ts in (keys, values))
    slots = torch.cat([*new, torch.tensor([-1, -1])])
    k, v = (torch.cat([t, torch.full((2, KV_HEADS, HDIM), torch.nan)]) for t in (k, v))
    impl.do_kv_cache_update(None, k, v, cache, slots)
    starts = torch.tensor([0, 1, 6, 9], dtype=torch.int32)
    metadata = backend.FmhaMetadata(num_actual_tokens=9, max_query_len=5, max_seq_len=40, query_start_loc=starts,
                                    seq_lens=torch.tensor(lengths, dtype=torch.int32), block_table=table, slot_mapping=slots, causal=True)
    output, before = torch.full((11, HEADS * HDIM), 7.0), backend.calls["cache"]
    impl.forward(None, q, k, v, cache, metadata, output)
    assert backend.calls["cache"] == before + 1
    want = torch.cat([exact(q[a:b], *kv, **words) for a, b, *kv in zip(starts.tolist(), starts.tolist()[1:], keys, values)])
    assert (output[:9].view(9, HEADS, HDIM) - want).abs().max() < 2e-6
    assert (output[9:] == 7).all()  # padding is left alone


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("queries, n_launches", [((1, 1, 1), (1,)), ((1, 1, 5, 3), (2, 2)), ((5, 3), (1, 2)), ((1, 1, 4, 0), (2, 2)),
                                                 ((5, 1), (1, 2))], ids=str)
def test_launches_of_a_gpu(queries, n_launches, window, monkeypatch):
    """How a GPU's batches are cut into launches, known to the host or captured for any batch: on the CPU, whose daemon gets copies."""
    monkeypatch.setattr(backend, "_reads_in_place", lambda _: True)
    torch.manual_seed(1)
    lengths = [n and n + 10 * (b + 1) for b, n in enumerate(queries)]
    impl = backend.FmhaImpl(HEADS, HDIM, 0.3, KV_HEADS, sliding_window=window)
    cache = torch.full((17, KV_HEADS, BLOCK, 2 * HDIM), 3.0)
    table = torch.randperm(16)[: 4 * len(queries)].view(len(queries), 4).int()
    keys, values = ([torch.randn(n, KV_HEADS, HDIM) for n in lengths] for _ in range(2))
    for b, n in enumerate(lengths):
        impl.do_kv_cache_update(None, keys[b], values[b], cache, table[b].long()[torch.arange(n) // BLOCK] * BLOCK + torch.arange(n) % BLOCK)
    q = torch.randn(sum(queries), HEADS, HDIM)
    starts = torch.tensor([0, *queries]).cumsum(0, dtype=torch.int32)
    common = types.SimpleNamespace(
        num_reqs=len(queries), num_actual_tokens=len(q), max_query_len=max(queries), max_seq_len=max(lengths), query_start_loc=starts,
        query_start_loc_cpu=starts, seq_lens=torch.tensor(lengths, dtype=torch.int32), block_table_tensor=table, slot_mapping=None, causal=True)
    want = torch.cat([exact(q[a:b], *kv, window=window) for a, b, *kv in zip(starts.tolist(), starts.tolist()[1:], keys, values)])
    builder = backend.FmhaMetadataBuilder.__new__(backend.FmhaMetadataBuilder)
    builder.rows_each, builder.device = None, torch.device("cpu")
    builder.vllm_config = types.SimpleNamespace(scheduler_config=types.SimpleNamespace(max_num_seqs=8))
    for build, n in zip((lambda: builder.build(0, common), lambda: builder.build_for_cudagraph_capture(common)), n_launches):
        metadata, output = build(), torch.full((len(q), HEADS * HDIM), 7.0)
        assert len(metadata.parts) == n
        impl.forward(None, q, None, None, cache, metadata, output)
        assert (output.view(want.shape) - want).abs().max() < 2e-6
    other = builder.update_block_table(metadata, table.flip(1), None)
    assert all(torch.equal(p.table, table.flip(1)[p.first : p.first + len(p.lengths)]) for p in other.parts)


@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2", "fp8_per_token_head", "int8_per_token_head"])
@pytest.mark.parametrize("model", [torch.float16, torch.bfloat16])
def test_a_layer_over_8_bits(name, model):
    """The cache holds bytes, of rows over _k_scale and _v_scale or over factors of their own; the formula sees what they stand for."""
    torch.manual_seed(0)
    layer = types.SimpleNamespace(_k_scale=torch.tensor(0.07), _v_scale=torch.tensor([0.31]))
    impl = backend.FmhaImpl(HEADS, HDIM, 0.3, KV_HEADS, kv_cache_dtype=name)
    per_row, kind = name in backend.PER_ROW, backend.NARROW[name]
    store = torch.int8 if kind == torch.int8 else torch.uint8  # as vLLM has them
    cache = torch.full((9, KV_HEADS, BLOCK, 2 * (HDIM + 4 * per_row)), 0x7f, dtype=store)  # NaN, but for int8; as a factor: huge
    lengths, queries = (20, 40, 3), (1, 5, 3)
    table = torch.randperm(9)[:9].view(3, 3).int()
    keys, values = ([torch.randn(n, KV_HEADS, HDIM).to(model) for n in lengths] for _ in range(2))
    for b, n in enumerate(lengths):
        slots = table[b].long()[torch.arange(n) // BLOCK] * BLOCK + torch.arange(n) % BLOCK
        impl.do_kv_cache_update(layer, keys[b], values[b], cache, torch.cat([slots, torch.tensor([-1])])[: n])
    q, starts = torch.randn(9, HEADS, HDIM).to(model), torch.tensor([0, 1, 6, 9], dtype=torch.int32)
    metadata = backend.FmhaMetadata(num_actual_tokens=9, max_query_len=5, max_seq_len=40, query_start_loc=starts,
                                    seq_lens=torch.tensor(lengths, dtype=torch.int32), block_table=table, slot_mapping=None, causal=True)
    output = torch.full((9, HEADS * HDIM), 7.0, dtype=model)
    impl.forward(layer, q, None, None, cache, metadata, output)
    def factors(x, of_layer):
        return (x.float().abs().amax(-1, keepdim=True) / (127 if kind == torch.int8 else 448)).clamp_min(1e-6) if per_row else of_layer

    def codes(x):
        return (x.round() if kind == torch.int8 else x).to(kind)

    kept = [[codes(x.float() / factors(x, s)).double() * factors(x, s).double() for x in of]
            for of, s in ((keys, layer._k_scale), (values, layer._v_scale))]
    want = torch.cat([exact(q[a:b], *kv) for a, b, *kv in zip(starts.tolist(), starts.tolist()[1:], *kept)])
    assert (output.view(9, HEADS, HDIM) - want).abs().max() < (6e-3 if model is torch.float16 else 4e-2)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name, model, limit", [("auto", torch.bfloat16, 2e-2), ("auto", torch.float16, 3e-3), ("fp8", torch.bfloat16, 2e-2)])
def test_a_layer_of_latents(rows, name, model, limit):
    """What MLACommonImpl.forward_mqa() is given, by requests that decode as many rows each."""
    mla = importlib.import_module("fmha_vllm.mla")
    torch.manual_seed(2)
    heads, lengths, block = 5, (70, 3, 130), 64
    impl = mla.FmhaMlaImpl.__new__(mla.FmhaMlaImpl)
    impl.scale, impl.kv_lora_rank, impl.kv_cache_dtype, impl.need_to_return_lse_for_decode = 0.1, 512, name, True
    table = torch.randperm(9)[:9].view(3, 3).int()
    cache = (torch.randn(9, block, 576) / 4).to(model)
    layer, factor = types.SimpleNamespace(_k_scale=torch.tensor(0.11)), 1.0
    if name == "fp8":
        factor = layer._k_scale.double()
        cache = (cache.float() / layer._k_scale).to(torch.float8_e4m3fn).view(torch.uint8)
    q = torch.randn(3 * rows, heads, 576).to(model)
    metadata = types.SimpleNamespace(num_decodes=3, max_seq_len=max(lengths), causal=True, decode=types.SimpleNamespace(
        block_table=table, seq_lens=torch.tensor(lengths, dtype=torch.int32)))
    before = mla.calls["decode"]
    o, lse = impl.forward_mqa((q[..., :512], q[..., 512:]), cache, metadata, layer)
    impl.need_to_return_lse_for_decode = False
    again, nothing = impl.forward_mqa(q, cache, metadata, layer)
    assert mla.calls["decode"] == before + 2 and nothing is None and torch.equal(o, again)
    assert o.shape == (3 * rows, heads, 512) and o.dtype == model and lse.shape == (3 * rows, heads)
    for b, n in enumerate(lengths):
        keys = cache.view(torch.float8_e4m3fn) if name == "fp8" else cache
        keys = keys.double()[table[b].long()].flatten(0, 1)[:n] * factor
        for i in range(rows):
            at, seen = b * rows + i, keys[: n - rows + 1 + i]
            s = q[at].double() @ seen.T * 0.1
            assert (o[at] - s.softmax(-1) @ seen[:, :512]).abs().max() < limit
            assert (lse[at] - s.logsumexp(-1)).abs().max() < 1e-3
    assert mla.FmhaMlaBackend.is_mla() and mla.FmhaMlaBackend.supports_kv_cache_dtype("fp8")
    assert mla.FmhaMlaBackend.supports_head_size(576) and not mla.FmhaMlaBackend.supports_head_size(320)


def test_what_is_not_known_is_refused_or_said():
    with pytest.raises(fmha.NotSupportedError, match="fp8_inc"):
        backend.FmhaImpl(HEADS, HDIM, 0.3, KV_HEADS, kv_cache_dtype="fp8_inc")
    with pytest.raises(fmha.NotSupportedError, match="16 bits"):
        backend.FmhaImpl(HEADS, HDIM, 0.3, KV_HEADS, kv_cache_dtype="fp8").forward(None, torch.ones(1), None, None, None, object(), None)
    with pytest.raises(fmha.NotSupportedError, match="encoder_decoder"):
        backend.FmhaImpl(HEADS, HDIM, 0.3, KV_HEADS, attn_type="encoder_decoder")
    assert backend.FmhaBackend.supports_kv_cache_dtype("fp8") and not backend.FmhaBackend.supports_kv_cache_dtype("fp8_inc") and not backend.FmhaBackend.supports_head_size(520)
    assert not backend.FmhaBackend.supports_head_size(36) and backend.FmhaBackend.supports_head_size(80)
    assert not backend.FmhaBackend.is_mla() and not backend.FmhaBackend.supports_mm_prefix() and not backend.FmhaBackend.supports_non_causal()


def test_versions():
    assert fmha_vllm.is_supported("0.32.0") and fmha_vllm.is_supported("0.31.4+cpu") and not fmha_vllm.is_supported("0.33.0")
    with pytest.raises(ImportError, match="0.31 and 0.32"):
        importlib.import_module("fmha_vllm.unsupported")
