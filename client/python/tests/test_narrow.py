# SPDX-License-Identifier: MIT
"""Caches of fp8 and int8 under queries of 16 bits, and rows that are appended by slots, against float64 of what the cache stands for. On the
CPU or, with FMHA_TEST_DEVICE=cuda, on a GPU."""
import numpy as np
import pytest

import fmha

torch = pytest.importorskip("torch", reason="torch is not installed")
import fmha.flash_attn as fa  # noqa: E402
from test_flash_attn import close, formula  # noqa: E402
from test_torch import DEVICE  # noqa: E402

KINDS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]
WIDE = [torch.float16, torch.bfloat16]
MOST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}


def random(*shape, seed=1, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def narrowed(x, factor, kind):
    """As an engine does it: divided in float, cut, rounded."""
    x = (x.float() / factor).clamp(-MOST[kind], MOST[kind])
    return x.round().nan_to_num().to(kind) if kind == torch.int8 else x.to(kind)


def unused(shape, like):
    """What no key is: NaN, or of integers, which have none, the least one."""
    return torch.full(shape, -128, dtype=torch.int8, device=like.device) if like.dtype == torch.int8 else torch.full(shape, float("nan"), device=like.device).to(like.dtype)


def pages_of(x, size, seed=3, spare=2):
    """[batch, keys, heads, hdim] as shuffled pages, with what no key is elsewhere, and the block table."""
    batch, keys, heads, hdim = x.shape
    blocks = -(-keys // size)
    table = torch.randperm(batch * blocks + spare, generator=torch.Generator().manual_seed(seed))[: batch * blocks].view(batch, blocks)
    pages = unused((batch * blocks + spare, size, heads, hdim), x)
    for b in range(batch):
        for j in range(blocks):
            part = x[b, j * size : (j + 1) * size]
            pages[table[b, j], : len(part)] = part
    return pages, table.int().to(x.device)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("rows, how", [(1, "tensor"), (1, "key"), (3, "head"), (40, "tensor"), (40, "head"), (40, "key"), (2, "slot"), (33, "page")])
def test_cache(paged, kind, wide, rows, how):
    if how in ("slot", "page") and not paged:
        pytest.skip("contiguous caches have no pages")
    batch, keys, heads, hdim, size = 2, 100, 2, 64, 16
    q = random(batch, rows, 4, hdim, dtype=wide)
    k, v = random(batch, keys, heads, hdim, seed=2) * 3, random(batch, keys, heads, hdim, seed=4)
    shape = {"tensor": (1, 1, 1), "head": (batch, heads, 1), "key": (batch, heads, keys)}
    factors = {}
    for name in "kv":
        if how in shape:
            factors[name] = random(*shape[how], seed=7).abs() * 0.02 + 0.01
    if how in shape:
        spread = {n: f.permute(0, 2, 1)[..., None] for n, f in factors.items()}
        stored = {"k": narrowed(k, spread["k"], kind), "v": narrowed(v, spread["v"], kind)}
        means = {n: x.double() * spread[n].double() for n, x in stored.items()}
        table = None
        if paged:
            (kc, table), (vc, _) = pages_of(stored["k"], size), pages_of(stored["v"], size)
            if how == "key":  # factors count what the table can hold
                room = float("nan") * torch.ones(batch, heads, -keys % size, device=DEVICE)
                factors = {n: torch.cat([f, room], -1) for n, f in factors.items()}
        else:
            kc, vc = stored["k"], stored["v"]
        words = dict(k_descale=factors["k"].squeeze(-1) if how == "head" else factors["k"].reshape(()) if how == "tensor" else factors["k"],
                     v_descale=factors["v"].squeeze(-1) if how == "head" else factors["v"].reshape(()) if how == "tensor" else factors["v"])
    else:
        (kp, table), (vp, _) = pages_of(k, size), pages_of(v, size)
        each = kp.shape[0], heads, size if how == "slot" else 1
        factors = {n: random(*each, seed=7 + len(n)).abs() * 0.02 + 0.01 for n in "kv"}
        for f in factors.values():  # of pages that nobody has, and of slots behind the last key
            used = torch.zeros(each[0], size, dtype=torch.bool, device=DEVICE)
            used[table.flatten().long()] = True
            if how == "slot":
                used[table[:, -1].long(), (keys - 1) % size + 1:] = False
            f[~(used if how == "slot" else used[:, :1])[:, None].expand(f.shape)] = float("nan")
        spread = {n: f.permute(0, 2, 1)[..., None] for n, f in factors.items()}
        kc, vc = narrowed(kp, spread["k"], kind), narrowed(vp, spread["v"], kind)
        means = {}
        for n, x in (("k", kc), ("v", vc)):
            whole = (x.double() * spread[n].double())[table.long()].reshape(batch, -1, heads, hdim)
            means[n] = whole[:, :keys]
        words = dict(k_descale=factors["k"], v_descale=factors["v"], descale_per_page=True)
    lengths = torch.tensor([keys, keys - 13], dtype=torch.int32, device=DEVICE)

    def attend():
        return fa.flash_attn_with_kvcache(q, kc, vc, cache_seqlens=lengths, block_table=table, causal=True, return_softmax_lse=True, **words)

    if DEVICE == "cuda" and wide == torch.float16 and how in ("key", "slot", "page"):
        # A weight times its value's factor is below what float16 holds.
        with pytest.raises(fmha.NotSupportedError) as refused:
            attend()
        assert refused.value.field == "v_descale" and "bf16" in str(refused.value)
        return
    o, lse = attend()
    assert o.dtype == wide
    for b in range(batch):
        n = int(lengths[b])
        want, want_lse, _ = formula(q[b:b + 1], means["k"][b:b + 1, :n], means["v"][b:b + 1, :n], right=0)
        close(o[b:b + 1], want, wide)
        torch.testing.assert_close(lse[b:b + 1].double(), want_lse, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.int8])
def test_one_sign_over_thousands_of_keys(kind, wide):
    q, k = random(1, 2, 4, 64, dtype=wide).abs(), random(1, 6000, 1, 64, seed=2).abs()
    v = random(1, 6000, 1, 64, seed=3).abs() + 1
    kc, vc = narrowed(k, 0.017, kind), narrowed(v, 0.013, kind)
    factor = [torch.tensor(x, device=DEVICE) for x in (0.017, 0.013)]
    o = fa.flash_attn_with_kvcache(q, kc, vc, k_descale=factor[0], v_descale=factor[1])
    close(o, formula(q, kc.double() * float(factor[0]), vc.double() * float(factor[1]))[0], wide)


@pytest.mark.parametrize("kind", KINDS)
def test_appending_divides_and_turns(kind):
    """New rows of bfloat16 into a cache of fp8, turned on the way, and attention over both in one call."""
    wide, batch, rows, room = torch.bfloat16, 2, 3, 64
    kc, vc = (torch.zeros(batch, room, 2, 64, device=DEVICE).to(kind) for _ in range(2))
    before = torch.tensor([5, 0], dtype=torch.int32, device=DEVICE)
    for b in range(batch):
        for cache, seed in ((kc, 1), (vc, 2)):
            cache[b, : before[b]] = narrowed(random(int(before[b]), 2, 64, seed=seed), 0.01, kind)
    q, k, v = random(batch, rows, 4, 64, dtype=wide), random(batch, rows, 2, 64, seed=3, dtype=wide), random(batch, rows, 2, 64, seed=4, dtype=wide)
    angles = torch.arange(room)[:, None] / 10000 ** (torch.arange(16)[None] / 16)
    cos, sin = angles.cos().to(DEVICE), angles.sin().to(DEVICE)
    factor = torch.tensor(0.02, device=DEVICE)
    o = fa.flash_attn_with_kvcache(q, kc, vc, k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=before, causal=True, rotary_interleaved=False,
                                   k_descale=factor, v_descale=factor)
    for b in range(batch):
        n = int(before[b])
        at = torch.arange(n, n + rows)
        def turned(x):
            x, c, s = x.double(), cos[at].double()[:, None], sin[at].double()[:, None]
            a, z = x[..., :16], x[..., 16:32]
            return torch.cat([a * c - z * s, a * s + z * c, x[..., 32:]], -1)
        assert torch.equal(kc[b, n:n + rows].float(), narrowed(turned(k[b]).float(), factor, kind).float())
        assert torch.equal(vc[b, n:n + rows].float(), narrowed(v[b], factor, kind).float())
        assert not kc[b, n + rows:].float().any()
        keys, values = (c[b:b + 1, :n + rows].double() * float(factor) for c in (kc, vc))
        close(o[b:b + 1], formula(turned(q[b]).to(wide)[None], keys, values, right=0)[0], wide, 2)


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.int8])
def test_slots(kind):
    """[tokens] into pages whose rows hold K and V; one row nowhere; factors that are found."""
    pages, size, heads, hdim = 5, 16, 2, 32
    cache = torch.zeros(pages, size, heads, 2 * hdim, device=DEVICE).to(kind)
    k, v = cache[..., :hdim], cache[..., hdim:]
    new = [random(4, heads, hdim, seed=s, dtype=torch.bfloat16) for s in (1, 2)]
    slots = torch.tensor([37, -1, 0, 79], device=DEVICE)
    found = [torch.zeros(pages, heads, size, device=DEVICE) for _ in range(2)]
    fmha.append_kv(k, v, *new, slot_mapping=slots, k_descale=found[0], v_descale=found[1], find_descales=True)
    want = torch.zeros(pages * size, heads, 2 * hdim, device=DEVICE).to(kind)
    for i, slot in enumerate(slots.tolist()):
        for part, (x, f) in enumerate(zip(new, found)):
            if slot >= 0:
                factor = x[i].float().abs().amax(-1) / MOST[kind]
                torch.testing.assert_close(f[slot // size, :, slot % size], factor, atol=0, rtol=1e-6)
                want[slot, :, part * hdim:(part + 1) * hdim] = narrowed(x[i], f[slot // size, :, slot % size, None], kind)
    assert torch.equal(cache.view(-1, heads, 2 * hdim).view(torch.uint8), want.view(torch.uint8))
    assert sum(int((f != 0).sum()) for f in found) == 2 * 3 * heads


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU alone reads its slots, and leaves such rows out")
def test_what_cannot_be_is_refused_and_nothing_written():
    cache = [np.full((4, 16, 2, 32), 7, np.float32) for _ in range(2)]
    new = [np.ones((3, 2, 32), np.float32)] * 2
    for bad in (64, -2, 2**32, 2**63 - 1, -(2**63)):
        with pytest.raises(fmha.InvalidError, match=r"slot_mapping\[0\]\[1\] is -?[0-9]+: -1, or a slot up to 63") as told:
            fmha.append_kv(*cache, *new, slot_mapping=np.array([3, bad, -1]))
        assert told.value.field == "tensor.slot_mapping"
    table = np.ones((9, 8), np.float32)
    with pytest.raises(fmha.InvalidError, match="positions up to 8"):
        fmha.append_kv(*cache, *new, slot_mapping=np.array([3, 4, 5]), positions=np.array([0, 9, 1]), rotary_cos=table, rotary_sin=table)
    with pytest.raises(fmha.InvalidError, match="slot_mapping says where rows go"):
        fmha.append_kv(*cache, *new, slot_mapping=np.array([3, 4, 5]), seqlens_k=np.zeros(1, np.int32))
    assert all((c == 7).all() for c in cache)
    for kind in (torch.float8_e4m3fn, torch.int8):
        check_refusals_of_rows(kind)


def check_refusals_of_rows(kind):
    narrow = [torch.ones(4, 16, 2, 32).to(kind) for _ in range(2)]
    rows = [torch.ones(3, 2, 32, dtype=torch.bfloat16)] * 2
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        factor = torch.tensor([[0.5, bad]])
        with pytest.raises(fmha.InvalidError, match="no positive number, and new rows of head 1") as told:
            fmha.append_kv(*narrow, *rows, slot_mapping=torch.tensor([3, 4, 5]), k_descale=torch.tensor(1.0), v_descale=factor)
        assert told.value.field == "tensor.v_descale"
    assert all((c.float() == 1).all() for c in narrow)
    with pytest.raises(fmha.InvalidError, match="k_new"):
        fmha.append_kv(*narrow, *(r.float() for r in rows), slot_mapping=torch.tensor([3, 4, 5]))
    q = torch.ones(1, 1, 2, 32, dtype=torch.bfloat16)
    with pytest.raises(fmha.InvalidError, match=f"k_cache holds {kind} and v_cache torch.float8_e5m2: one type"):
        fa.flash_attn_with_kvcache(q, narrow[0].view(1, 64, 2, 32), narrow[1].view(1, 64, 2, 32).to(torch.float8_e5m2))
    # The service is as it was.
    fmha.append_kv(*narrow, *rows, slot_mapping=torch.tensor([3, -1, 5]), k_descale=torch.tensor(0.5), v_descale=torch.tensor(0.5))
    assert narrow[0].view(64, 2, 32)[3].float().eq(2).all() and narrow[1].view(64, 2, 32)[4].float().eq(1).all()


@pytest.mark.parametrize("wide", WIDE)
def test_integers(wide):
    """The ends of int8, what becomes them, and whose rows they are not."""
    codes = torch.tensor([-128, -127, -1, 0, 1, 127] * 4 + [5, -7], dtype=torch.int8, device=DEVICE)
    kc, vc = codes.repeat(3, 1)[None, :, None], codes.roll(1).repeat(3, 1)[None, :, None]
    q = random(1, 1, 1, 26, dtype=wide)
    o = fa.flash_attn_with_kvcache(q, kc, vc)
    close(o, vc[:, :1].double(), wide)  # three values alike
    new = torch.tensor([[float("inf"), -float("inf"), float("nan"), 126.5, 127.5, -127.5, 0.5, 1.5, -2.5, 1e4]], dtype=wide, device=DEVICE)
    cache = [torch.full((1, 16, 1, 10), 9, dtype=torch.int8, device=DEVICE) for _ in range(2)]
    fmha.append_kv(*cache, new[None], new[None], slot_mapping=torch.tensor([3], device=DEVICE))
    for c in cache:
        want = (new.float().nan_to_num(nan=0.0, posinf=127.0, neginf=-127.0)).clamp(-127, 127).round()
        assert torch.equal(c[0, 3].float(), want) and (c[0, :3] == 9).all() and (c[0, 4:] == 9).all()
    found = [torch.zeros(1, 1, 16, device=DEVICE) for _ in range(2)]
    fmha.append_kv(*cache, new[None], new[None], slot_mapping=torch.tensor([3], device=DEVICE), k_descale=found[0], v_descale=found[1], find_descales=True)
    assert found[0][0, 0, 3] == 1, "a row that is not finite is taken as it is"
    factor = torch.tensor(0.5, device=DEVICE)
    rows = random(1, 3, 1, 26, dtype=wide).requires_grad_()
    packed = torch.tensor([0, 3], dtype=torch.int32, device=DEVICE)
    whole = fa.flash_attn_func(rows, kc, vc, k_descale=factor, v_descale=factor)
    close(whole.detach(), formula(rows.detach(), kc.double() / 2, vc.double() / 2)[0], wide)
    close(fa.flash_attn_varlen_func(rows.detach()[0], kc[0], vc[0], packed, packed, 3, 3), formula(rows.detach(), kc.double(), vc.double())[0][0], wide)
    with pytest.raises(fmha.NotSupportedError, match="attention over int8 has no gradient"):
        whole.sum().backward()
    for bad in (q.float(), codes.view(1, 1, 1, 26)):
        with pytest.raises(fmha.FmhaError, match="q"):
            fmha.attention(bad, kc, vc)
    with pytest.raises(fmha.InvalidError, match="only inputs of 8 bits have scale factors"):
        fmha.attention(q, kc, vc, q_descale=torch.ones(1, device=DEVICE))
