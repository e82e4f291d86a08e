# SPDX-License-Identifier: MIT
"""One layer of vLLM's backend FMHA, without an engine around it: cache update and attention, judged by a formula in double. The engine:
client/engines/tests/vllm_check.py."""
import importlib
import pathlib
import sys

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


def test_what_is_not_known_is_refused_or_said():
    with pytest.raises(fmha.NotSupportedError, match="fp8"):
        backend.FmhaImpl(HEADS, HDIM, 0.3, KV_HEADS, kv_cache_dtype="fp8")
    with pytest.raises(fmha.NotSupportedError, match="encoder_decoder"):
        backend.FmhaImpl(HEADS, HDIM, 0.3, KV_HEADS, attn_type="encoder_decoder")
    assert not backend.FmhaBackend.supports_kv_cache_dtype("fp8") and not backend.FmhaBackend.supports_head_size(264)
    assert not backend.FmhaBackend.supports_head_size(36) and backend.FmhaBackend.supports_head_size(80)
    assert not backend.FmhaBackend.is_mla() and not backend.FmhaBackend.supports_mm_prefix() and not backend.FmhaBackend.supports_non_causal()


def test_versions():
    assert fmha_vllm.is_supported("0.32.0") and fmha_vllm.is_supported("0.31.4+cpu") and not fmha_vllm.is_supported("0.33.0")
    with pytest.raises(ImportError, match="0.31 and 0.32"):
        importlib.import_module("fmha_vllm.unsupported")
