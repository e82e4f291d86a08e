# SPDX-License-Identifier: MIT
"""Multi-head latent attention against float64 of PyTorch: dense and by indices, caches of all kinds, appends into them."""
import numpy as np
import pytest

import fmha
from fmha._latent import latents_from_fp8

torch = pytest.importorskip("torch", reason="torch is not installed")
import fmha.flash_attn as fa  # noqa: E402

BAR = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def random(*shape, seed=1, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def formula(q, latents, hdim_v, causal, scale=None, softcap=0.0, sink=None):
    """(O [rows, heads, hdim_v], LSE [heads, rows]) of q [rows, heads, hdim] over latents [keys, hdim], in float64."""
    q, latents = q.double(), latents.double()
    s = torch.einsum("ihd,jd->hij", q, latents) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    rows, keys = s.shape[1:]
    if causal:
        s = s.masked_fill(torch.arange(keys)[None] > torch.arange(rows)[:, None] + keys - rows, -torch.inf)
    with_sink = s if sink is None else torch.cat([s, sink.double()[:, None, None].expand(-1, rows, 1)], -1)
    lse = torch.logsumexp(with_sink, -1) if with_sink.shape[-1] else torch.full(s.shape[:2], -torch.inf, dtype=torch.float64)
    p = torch.exp(s - torch.where(lse.isinf(), 0, lse)[..., None])
    return torch.einsum("hij,jd->ihd", p, latents[:, :hdim_v]), lse


def in_pages(rows, size, seed=3, spare=2):
    """[batch, keys, elements] in shuffled pages, NaN where nothing is, and the block table."""
    batch, keys, hdim = rows.shape
    blocks = -(-keys // size)
    order = torch.randperm(batch * blocks + spare, generator=torch.Generator().manual_seed(seed))[: batch * blocks].view(batch, blocks)
    filler = 0xFF if rows.dtype == torch.uint8 else float("nan")
    pages = torch.full((batch * blocks + spare, size, hdim), filler, dtype=rows.dtype)
    for b in range(batch):
        for j in range(blocks):
            part = rows[b, j * size : (j + 1) * size]
            pages[order[b, j], : len(part)] = part
    return pages, order.int()


def check(got, want, dtype, factor=1.0):
    torch.testing.assert_close(got.double(), want, rtol=0, atol=BAR[dtype] * factor * max(1.0, want.abs().max().item() if want.numel() else 1.0))


def quantized(latents):
    """[.., 576] as FlashMLA's "FP8 with scale", by PyTorch alone."""
    shape = latents.shape[:-1]
    x = latents.float().reshape(-1, 576)
    raw = torch.zeros(len(x), 656, dtype=torch.uint8)
    tiles = x[:, :512].reshape(-1, 4, 128)
    factors = tiles.abs().amax(-1) / 448
    factors = torch.where(factors == 0, torch.ones_like(factors), factors)
    raw[:, :512] = (tiles / factors[..., None]).to(torch.float8_e4m3fn).view(torch.uint8).reshape(-1, 512)
    raw[:, 512:528] = factors.view(torch.uint8).reshape(-1, 16)
    raw[:, 528:] = x[:, 512:].bfloat16().view(torch.uint8).reshape(-1, 128)
    return raw.reshape(*shape, 656)


@pytest.mark.parametrize("size", [0, 64, 16, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("heads, rows", [(8, 1), (16, 1), (20, 1), (128, 1), (16, 4), (128, 2), (64, 3)])
def test_dense(heads, rows, dtype, size):
    batch, keys = 3, 333
    lengths = torch.tensor([333, 70, 0], dtype=torch.int32)
    q, latents = random(batch, rows, heads, 576, dtype=dtype), random(batch, keys, 576, seed=2, dtype=dtype)
    for b in range(batch):
        latents[b, lengths[b] :] = float("nan")
    cache, table = in_pages(latents, size) if size else (latents, None)
    o, lse = fmha.mla_decode(q, cache, block_table=table, seqlens_k=lengths, return_lse=True)
    assert o.shape == (batch, rows, heads, 512) and o.dtype == dtype
    for b in range(batch):
        want, want_lse = formula(q[b], latents[b, : lengths[b]], 512, True)
        check(o[b], want, dtype)
        torch.testing.assert_close(lse[b].double(), want_lse, rtol=1e-5, atol=1e-3)


def test_options():
    q, cache = random(2, 24, 576, dtype=torch.float32), random(2, 150, 576, seed=2)
    sink = random(24, seed=5)
    o = fmha.mla_decode(q, cache, scale=0.07, softcap=5.0, sink=sink)
    assert o.shape == (2, 24, 512)
    for b in range(2):
        check(o[b], formula(q[b : b + 1].transpose(0, 1)[:, 0][None], cache[b], 512, False, 0.07, 5.0, sink)[0][0], torch.float32)
    check(fmha.mla_decode(q, cache, n_splits=3), torch.stack([formula(q[b][None], cache[b], 512, False)[0][0] for b in range(2)]), torch.float32)
    narrow = fmha.mla_decode(q[..., :100], cache[..., :100].contiguous(), hdim_v=36)
    check(narrow, torch.stack([formula(q[b, :, :100][None], cache[b, :, :100], 36, False)[0][0] for b in range(2)]), torch.float32)


@pytest.mark.parametrize("size", [1, 64])
def test_absorbed_prefill(size):
    """Packed sequences of many rows, which see what came before them."""
    rows, keys, heads = [40, 1, 0, 97], [140, 30, 8, 97], 16
    q = random(sum(rows), heads, 576, dtype=torch.bfloat16)
    latents = random(4, 140, 576, seed=2, dtype=torch.bfloat16)
    starts = torch.tensor([0, *np.cumsum(rows)], dtype=torch.int32)
    cache, table = in_pages(latents, size)
    o, lse = fmha.mla_decode(q, cache, block_table=table, seqlens_k=torch.tensor(keys, dtype=torch.int32), cu_seqlens_q=starts, return_lse=True)
    for b in range(4):
        part = slice(starts[b], starts[b + 1])
        want, want_lse = formula(q[part], latents[b, : keys[b]], 512, True)
        check(o[part], want, torch.bfloat16)
        torch.testing.assert_close(lse[:, part].double(), want_lse, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("size", [0, 64, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads, rows", [(8, 1), (128, 1), (17, 3)])
def test_fp8(heads, rows, dtype, size):
    batch, keys = 2, 150
    lengths = torch.tensor([150, 61], dtype=torch.int32)
    q, raw = random(batch, rows, heads, 576, dtype=dtype), quantized(random(batch, keys, 576, seed=2) * torch.rand(batch, keys, 1) * 9)
    means = torch.from_numpy(latents_from_fp8(raw.numpy()))
    raw[1, 61:] = 0xFF
    cache, table = in_pages(raw, size) if size else (raw, None)
    o, lse = fmha.mla_decode(q, cache, block_table=table, seqlens_k=lengths, return_lse=True)
    for b in range(batch):
        want, want_lse = formula(q[b], means[b, : lengths[b]], 512, True)
        check(o[b], want, dtype)
        torch.testing.assert_close(lse[b].double(), want_lse, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("kind", ["bf16", "f32", "fp8"])
@pytest.mark.parametrize("heads, rows, topk", [(8, 1, 64), (128, 2, 700), (64, 3, 49), (16, 5, 1)])
@pytest.mark.parametrize("how", ["slots", "table", "positions"])
def test_chosen(how, heads, rows, topk, kind):
    batch, keys, size = 2, 300, 64
    dtype = torch.float32 if kind == "f32" else torch.bfloat16
    q = random(batch, rows, heads, 576, dtype=dtype)
    latents = random(batch, keys, 576, seed=2, dtype=dtype)
    stored = quantized(latents) if kind == "fp8" else latents
    means = torch.from_numpy(latents_from_fp8(stored.numpy())) if kind == "fp8" else latents
    cache, table = (stored, None) if how == "positions" else in_pages(stored, size)
    draw = np.random.default_rng(topk)
    chosen = torch.from_numpy(draw.integers(0, keys, (batch, rows, topk)).astype(np.int32))
    chosen[draw.random(chosen.shape) < 0.2] = -1
    chosen[0, 0] = -1 if topk > 600 else chosen[0, 0]  # a row that sees nothing
    indices = chosen.clone()
    if how == "slots":
        at = chosen.clamp(min=0).long()
        indices = torch.stack([table[b].long()[at[b] // size] * size + at[b] % size for b in range(batch)]).int()
        indices[chosen < 0] = -1
    hostile = torch.tensor([-(2**31), 2**31 - 1, -7, cache.shape[0] * cache.shape[1] if how == "slots" else keys], dtype=torch.int32)
    none = indices < 0
    indices[none] = hostile[torch.arange(int(none.sum())) % 4]
    lengths = None if how != "table" else torch.full((batch,), keys, dtype=torch.int32)
    o, lse = fmha.mla_decode(q, cache, indices=indices, block_table=table if how == "table" else None, seqlens_k=lengths, slots=how == "slots",
                             return_lse=True)
    for b in range(batch):
        for i in range(rows):
            seen = chosen[b, i][chosen[b, i] >= 0].long()
            want, want_lse = formula(q[b, i : i + 1], means[b][seen], 512, False)
            check(o[b, i : i + 1], want, dtype)
            torch.testing.assert_close(lse[b, :, i : i + 1].double(), want_lse, rtol=1e-5, atol=1e-3)


def test_chosen_beyond_the_length():
    """Positions that a sequence does not have are left out, though the cache has them."""
    q, latents = random(1, 1, 8, 576), random(1, 128, 576, seed=2)
    indices = torch.arange(128, dtype=torch.int32).view(1, 1, 128)
    o = fmha.mla_decode(q, latents, indices=indices, seqlens_k=torch.tensor([50], dtype=torch.int32), slots=False)
    check(o[0], formula(q[0], latents[0, :50], 512, False)[0], torch.float32)


@pytest.mark.parametrize("bad", [-(2**63), -(2**32), 2**32, 2**32 + 3, 2**63 - 1])
def test_chosen_beyond_32_bits(bad):
    """Of int64, as torch.topk() gives them: cut to 32 bits these would name keys."""
    q, latents = random(1, 1, 8, 576), random(1, 16, 576, seed=2)
    o = fmha.mla_decode(q, latents, indices=torch.tensor([[[5, bad]]]), slots=False)
    check(o[0], formula(q[0], latents[0, 5:6], 512, False)[0], torch.float32)


def test_one_sign():
    """Long sequences of values of one sign: what is lost in sums shows."""
    q, latents = random(1, 1, 16, 576, dtype=torch.bfloat16), (random(1, 20000, 576, seed=2).abs() + 0.5).bfloat16()
    o, lse = fmha.mla_decode(q, latents, return_lse=True)
    want, want_lse = formula(q[0], latents[0], 512, False)
    check(o[0], want, torch.bfloat16, 0.3)
    torch.testing.assert_close(lse[0].double(), want_lse, rtol=1e-6, atol=1e-3)


@pytest.mark.parametrize("heads", [8, 128])
def test_what_is_not_finite_stays_where_it_belongs(heads):
    q, latents = random(1, 3, heads, 576), random(1, 100, 576, seed=2)
    latents[0, 99, 5] = torch.inf  # the last row alone sees it
    o = fmha.mla_decode(q, latents)
    check(o[0, :2], formula(q[0, :2], latents[0, :99], 512, True)[0], torch.float32)
    assert not torch.isfinite(o[0, 2]).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_append_fp8(dtype):
    size, pages = 16, 5
    new = random(2, 3, 576, dtype=dtype) * 20
    new[0, 1, :128] = 0
    cache = torch.full((pages, size, 656), 0x11, dtype=torch.uint8)
    before = cache.clone()
    slots = torch.tensor([[3, -1, 70], [17, 18, 0]])
    fmha.mla_append(cache, new, slot_mapping=slots)
    flat, kept = cache.view(-1, 656), torch.ones(pages * size, dtype=torch.bool)
    for b in range(2):
        for i in range(3):
            if slots[b, i] >= 0:
                assert torch.equal(flat[slots[b, i]], quantized(new[b, i])), (b, i)
                kept[slots[b, i]] = False
    assert torch.equal(flat[kept], before.view(-1, 656)[kept])


def test_append_by_lengths():
    cache = torch.zeros(2, 10, 576)
    new = random(2, 2, 576)
    fmha.mla_append(cache, new, seqlens_k=torch.tensor([3, 8], dtype=torch.int32))
    assert torch.equal(cache[0, 3:5], new[0]) and torch.equal(cache[1, 8:], new[1]) and cache.count_nonzero() == new.count_nonzero()
    table, pages = torch.tensor([[2, 0]], dtype=torch.int32), torch.zeros(3, 4, 576)
    fmha.mla_append(pages, new[:1], seqlens_k=torch.tensor([3], dtype=torch.int32), block_table=table)
    assert torch.equal(pages[2, 3], new[0, 0]) and torch.equal(pages[0, 0], new[0, 1])
    tokens = torch.zeros(3, 4, 656, dtype=torch.uint8)
    fmha.mla_append(tokens, new[0].bfloat16(), slot_mapping=torch.tensor([5, 11]))
    assert torch.equal(tokens[1, 1], quantized(new[0, 0].bfloat16())) and torch.equal(tokens[2, 3], quantized(new[0, 1].bfloat16()))


def test_a_slot_outside_leaves_the_cache_alone():
    cache = torch.zeros(2, 4, 656, dtype=torch.uint8)
    with pytest.raises(fmha.InvalidError) as caught:
        fmha.mla_append(cache, random(2, 576, dtype=torch.bfloat16), slot_mapping=torch.tensor([1, 8]))
    assert caught.value.field == "tensor.slot_mapping" and not cache.any()


@pytest.mark.parametrize("appends", [False, True])
def test_qv(appends):
    """flash-attn 3's: q on the part that turns, qv on the latent, of one cache."""
    q, cache = random(2, 2, 16, 576, dtype=torch.bfloat16), random(5, 16, 1, 576, seed=2, dtype=torch.bfloat16)
    table, lengths = torch.tensor([[3, 1], [0, 4]], dtype=torch.int32), torch.tensor([20, 7], dtype=torch.int32)
    new = random(2, 2, 1, 576, seed=3, dtype=torch.bfloat16) if appends else None
    more = {} if new is None else {"k": new[..., 512:], "v": new[..., :512]}
    o = fa.flash_attn_with_kvcache(q[..., 512:], cache[..., 512:], cache[..., :512], qv=q[..., :512], block_table=table, cache_seqlens=lengths,
                                   causal=True, **more)
    for b in range(2):
        latents = cache[table[b].long()].reshape(-1, 576)[: lengths[b] + (2 if appends else 0)]
        assert not appends or torch.equal(latents[-2:], new[b, :, 0])
        check(o[b], formula(q[b], latents, 512, True)[0], torch.bfloat16)
    with pytest.raises(fmha.InvalidError, match="follow v_cache"):
        fa.flash_attn_with_kvcache(q[..., 512:], cache[..., 512:].clone(), cache[..., :512], qv=q[..., :512], block_table=table, cache_seqlens=lengths)


def test_numpy():
    q, cache = np.random.default_rng(1).standard_normal((2, 3, 16, 576), np.float32), np.random.default_rng(2).standard_normal((2, 50, 576), np.float32)
    want = torch.stack([formula(torch.from_numpy(q[b]), torch.from_numpy(cache[b]), 512, True)[0] for b in range(2)])
    check(torch.from_numpy(fmha.mla_decode(q, cache)), want, torch.float32)


@pytest.mark.parametrize("change, field", [
    ({"hdim_v": 577}, "hdim_v"),
    ({"indices": torch.zeros(1, 1, 4, dtype=torch.int32), "slots": False, "n_splits": 2}, "n_splits"),
    ({"indices": torch.zeros(2, 1, 4, dtype=torch.int32), "slots": False}, "tensor.indices"),
    ({"kv_cache": torch.zeros(1, 8, 656)}, "tensor.k"),
    ({"kv_cache": torch.zeros(1, 8, 2, 656, dtype=torch.uint8)}, "nhead_k"),
    ({"kv_cache": torch.zeros(1, 8, 656, dtype=torch.uint8), "q": torch.zeros(1, 1, 4, 576)}, "tensor.q.dtype"),
    ({"kv_cache": torch.zeros(1, 8, 656, dtype=torch.uint8), "hdim_v": 256}, "hdim_v"),
    ({"kv_cache": torch.zeros(1, 8, 672, dtype=torch.uint8)[..., 3:659]}, "tensor.k.offset"),
])
def test_refusals(change, field):
    said = {"q": torch.zeros(1, 1, 4, 576, dtype=torch.bfloat16), "kv_cache": torch.zeros(1, 8, 576, dtype=torch.bfloat16)} | change
    with pytest.raises(fmha.InvalidError) as caught:
        fmha.mla_decode(**said)
    assert caught.value.field == field, str(caught.value)
