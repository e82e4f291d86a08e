# SPDX-License-Identifier: MIT
"""fmha.flash_attn against formulas in float64, on the CPU or, with FMHA_TEST_DEVICE=cuda, on a GPU."""
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
import fmha  # noqa: E402
import fmha.flash_attn as fa  # noqa: E402
from test_torch import BARS, DEVICE, normal  # noqa: E402

F16 = torch.float16


def distance(rows, keys):
    return torch.arange(rows, device=DEVICE)[:, None] + keys - rows - torch.arange(keys, device=DEVICE)[None]


def formula(q, k, v, left=-1, right=-1, softcap=0.0, slopes=None, scale=None):
    """(O, LSE, P) of [batch, rows, heads, hdim] in float64."""
    q, k, v = (t.double() for t in (q, k, v))
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    s = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    away = distance(q.shape[1], k.shape[1])
    if slopes is not None:
        s = s - slopes.double().view(-1, q.shape[2], 1, 1) * away.abs()
    if left >= 0:
        s = s.masked_fill(away > left, float("-inf"))
    if right >= 0:
        s = s.masked_fill(-away > right, float("-inf"))
    p = torch.softmax(s, -1)
    return torch.einsum("bhij,bjhd->bihd", p, v), torch.logsumexp(s, -1), p


def close(mine, want, dtype, times=1):
    torch.testing.assert_close(mine.double(), want, atol=times * BARS[dtype], rtol=times * BARS[dtype])


def qkv(dtype, rows=40, keys=56, heads=4, kv_heads=2, hdim=64):
    return (normal(2, rows, heads, hdim, dtype=dtype), normal(2, keys, kv_heads, hdim, dtype=dtype, seed=1),
            normal(2, keys, kv_heads, hdim, dtype=dtype, seed=2))


@pytest.mark.parametrize("mine, words", [
    ({}, {}), ({"causal": True}, {"right": 0}), ({"window_size": (9, 3)}, {"left": 9, "right": 3}),
    ({"softcap": 4.0}, {"softcap": 4.0}), ({"softcap": 4.0, "softcap_approx": True}, {"softcap": 4.0}), ({"softmax_scale": 0.2, "deterministic": True}, {"scale": 0.2}),
])
def test_flash_attn_func(mine, words):
    for dtype in (F16, torch.bfloat16):
        inputs = qkv(dtype)
        copies = [t.detach().double().requires_grad_() for t in inputs]
        o, lse, dmask = fa.flash_attn_func(*inputs, **mine, return_attn_probs=True)
        want, want_lse, _ = formula(*copies, **words)
        close(o, want, dtype)
        close(lse, want_lse, dtype)
        assert dmask is None and torch.equal(o, fa.flash_attn_func(*inputs, **mine))
        grad = normal(*o.shape, dtype=dtype, seed=5, grad=False)
        for m, w in zip(torch.autograd.grad(o, inputs, grad), torch.autograd.grad(want, copies, grad.double())):
            close(m, w, dtype, 6)


def test_alibi_of_both_shapes():
    for slopes in (normal(4, grad=False).abs(), normal(2, 4, grad=False).abs()):
        q, k, v = qkv(F16)
        close(fa.flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes), formula(q, k, v, right=0, slopes=slopes)[0], F16)


def test_packed_forms_agree_with_the_plain_one():
    qkv3 = normal(2, 24, 3, 4, 64, dtype=F16)
    plain = fa.flash_attn_func(*qkv3.unbind(2), causal=True)
    assert torch.equal(fa.flash_attn_qkvpacked_func(qkv3, causal=True), plain)
    assert torch.equal(fa.flash_attn_kvpacked_func(qkv3[:, :, 0], qkv3[:, :, 1:], causal=True), plain)
    (packed,) = torch.autograd.grad(fa.flash_attn_qkvpacked_func(qkv3, causal=True).float().sum(), qkv3)
    (unpacked,) = torch.autograd.grad(plain.float().sum(), qkv3)
    close(packed, unpacked.double(), F16)
    cu = torch.tensor([0, 24, 48], dtype=torch.int32, device=DEVICE)
    flat = qkv3.flatten(0, 1)
    close(fa.flash_attn_varlen_qkvpacked_func(flat, cu, 24, causal=True), plain.flatten(0, 1).double(), F16)
    close(fa.flash_attn_varlen_kvpacked_func(flat[:, 0], flat[:, 1:], cu, cu, 24, 24, causal=True), plain.flatten(0, 1).double(), F16)


def test_varlen_by_pages():
    lengths, page = [50, 7], 16
    cu_q = torch.tensor([0, 5, 7], dtype=torch.int32, device=DEVICE)
    cu_k = torch.tensor([0, 50, 57], dtype=torch.int32, device=DEVICE)
    table = torch.tensor([[3, 1, 4, 0], [2, 0, 0, 0]], dtype=torch.int32, device=DEVICE)
    q = normal(7, 4, 64, dtype=F16, grad=False)
    k, v = normal(6, page, 2, 64, dtype=F16, grad=False), normal(6, page, 2, 64, dtype=F16, seed=1, grad=False)
    o = fa.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 64, causal=True, block_table=table)
    for n in range(2):
        flat = [x[table[n].long()].flatten(0, 1)[: lengths[n]][None] for x in (k, v)]
        rows = slice(cu_q[n], cu_q[n + 1])
        close(o[rows], formula(q[rows][None], *flat, right=0)[0][0], F16)


def test_dropout_and_its_mask():
    q, k, v = qkv(F16)
    torch.manual_seed(5)
    o, _, dmask = fa.flash_attn_func(q, k, v, dropout_p=0.25, causal=True, return_attn_probs=True)
    torch.manual_seed(5)
    assert torch.equal(o, fa.flash_attn_func(q, k, v, dropout_p=0.25, causal=True))
    p = formula(q, k, v, right=0)[2]
    close(dmask.abs(), p, F16)
    dropped = torch.signbit(dmask)[p > 0].double().mean().item()
    assert dropped == pytest.approx(64 / 256, abs=0.02)
    kept = torch.where(torch.signbit(dmask), 0, p) / 0.75
    close(o, torch.einsum("bhij,bjhd->bihd", kept, v.double().repeat_interleave(2, 2)), F16)


@pytest.mark.parametrize("hdim", [64, 59])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_cache_that_grows(paged, interleaved, hdim):
    before, new, page = torch.tensor([20, 33], dtype=torch.int32, device=DEVICE), 3, 16
    q, k, v = (normal(2, new, h, hdim, dtype=F16, seed=n, grad=False) for n, h in enumerate((4, 2, 2)))
    angles = torch.arange(64, device=DEVICE)[:, None] / 100 ** (torch.arange(16, device=DEVICE)[None] / 16)
    cos, sin = angles.cos().to(F16), angles.sin().to(F16)
    if paged:
        table = torch.tensor([[5, 2, 7, 0], [1, 6, 3, 4]], dtype=torch.int32, device=DEVICE)
        k_cache, v_cache = (normal(8, page, 2, hdim, dtype=F16, seed=n, grad=False) for n in (7, 8))
        rows = [table.long()[b] for b in range(2)]
        whole = lambda x, b: x[rows[b]].flatten(0, 1)  # noqa: E731
        options = {"block_table": table}
    else:
        index = torch.tensor([2, 0], dtype=torch.int32, device=DEVICE)
        k_cache, v_cache = (normal(3, 48, 2, hdim, dtype=F16, seed=n, grad=False) for n in (7, 8))
        whole = lambda x, b: x[index[b]]  # noqa: E731
        options = {"cache_batch_idx": index}

    def turned(x, at):
        x, c, s = x.double(), cos[at].double()[:, None], sin[at].double()[:, None]
        a, b = (x[..., 0:32:2], x[..., 1:32:2]) if interleaved else (x[..., :16], x[..., 16:32])
        y = torch.stack([a * c - b * s, a * s + b * c], -1)
        y = y.flatten(-2) if interleaved else torch.cat(y.unbind(-1), -1)
        return torch.cat([y, x[..., 32:]], -1)

    want_k = [torch.cat([whole(k_cache, b)[: before[b]].double(), turned(k[b], before[b] + torch.arange(new, device=DEVICE))]) for b in range(2)]
    want_v = [torch.cat([whole(v_cache, b)[: before[b]], v[b]]) for b in range(2)]
    o, lse = fa.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cos, sin, before, causal=True, rotary_interleaved=interleaved,
                                        return_softmax_lse=True, **options)
    for b in range(2):
        close(whole(k_cache, b)[: before[b] + new], want_k[b], F16)
        assert torch.equal(whole(v_cache, b)[: before[b] + new], want_v[b])
        at = before[b] + torch.arange(new, device=DEVICE)
        want, want_lse, _ = formula(turned(q[b], at).to(F16)[None], want_k[b].to(F16)[None], want_v[b][None], right=0)
        close(o[b], want[0], F16)
        close(lse[b], want_lse[0], F16)


def test_a_cache_that_is_only_read():
    q = normal(2, 1, 4, 64, dtype=F16, grad=False)
    k_cache, v_cache = (normal(2, 48, 2, 64, dtype=F16, seed=n, grad=False) for n in (1, 2))
    leftpad = torch.tensor([3, 0], dtype=torch.int32, device=DEVICE)
    for splits in (0, 1, 3):
        o = fa.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=30, cache_leftpad=leftpad, num_splits=splits)
        for b in range(2):
            keys = slice(int(leftpad[b]), 30)
            close(o[b], formula(q[b : b + 1], k_cache[b : b + 1, keys], v_cache[b : b + 1, keys])[0][0], F16)
    with pytest.raises(ValueError, match="come together"):
        fa.flash_attn_with_kvcache(q, k_cache, v_cache, k_cache[:, :1], v_cache[:, :1])


def test_padding_helpers():
    x = normal(3, 6, 2, 8)
    mask = torch.tensor([[1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1]], device=DEVICE)
    packed, indices, cu, longest, used = fa.unpad_input(x, mask)
    assert cu.tolist() == [0, 2, 8, 10] and longest == 6 and used.tolist() == [2, 6, 2] and cu.dtype == torch.int32
    assert torch.equal(packed, x[mask.bool()]) and torch.equal(fa.index_first_axis(x.flatten(0, 1), indices), packed)
    assert torch.equal(fa.pad_input(packed, indices, 3, 6), x * mask[..., None, None])
    _, _, cu, longest, used = fa.unpad_input(x, mask, 1 - mask)
    assert cu.tolist() == [0, 6, 12, 18] and longest == 6 and used.tolist() == [2, 6, 2]


def test_a_softcap_below_zero_is_none():
    q, k, v = qkv(F16)
    assert torch.equal(fa.flash_attn_func(q, k, v, softcap=-1.0), fa.flash_attn_func(q, k, v))
    cache = {"cache_seqlens": 40}
    with torch.no_grad():
        assert torch.equal(fa.flash_attn_with_kvcache(q, k, v, softcap=-1.0, **cache), fa.flash_attn_with_kvcache(q, k, v, **cache))


def test_windows_as_tensors():
    q, k, v = qkv(F16)
    window = torch.tensor([9, 3])
    assert torch.equal(fa.flash_attn_func(q, k, v, window_size=window), fa.flash_attn_func(q, k, v, window_size=(9, 3)))
    with pytest.raises(ValueError, match="window_size"):
        fa.flash_attn_func(q, k, v, window_size=(1.5, 0))


def packed(lengths, heads, hdim, seed, dtype=F16):
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)
    return normal(sum(lengths), heads, hdim, dtype=dtype, seed=seed), cu


@pytest.mark.parametrize("hdim", [64, 59])
@pytest.mark.parametrize("dropout_p", [0.25, 0.6])
def test_what_is_dropped_of_packed_sequences(dropout_p, hdim):
    """By O and its gradients: dropped elements are those with a sign, all others are kept."""
    rows, keys = [30, 1, 17], [41, 9, 0]
    (q, cu_q), (k, cu_k), (v, _) = packed(rows, 4, hdim, 0), packed(keys, 2, hdim, 1), packed(keys, 2, hdim, 2)
    slopes = torch.tensor([0.1, 0.2, 0.0, 0.3], device=DEVICE)
    options = dict(causal=True, window_size=(20, 0), alibi_slopes=slopes, dropout_p=dropout_p, return_attn_probs=True)
    o, lse, dmask = fa.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 30, 41, **options)
    assert dmask.shape == (3, 4, 30, 41)
    grad = normal(*o.shape, dtype=F16, seed=5, grad=False)
    got = torch.autograd.grad(o, (q, k, v), grad)
    copies = [t.detach().double().requires_grad_() for t in (q, k, v)]
    want, share = [], []
    for b in range(3):
        a, c = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        assert not dmask[b, :, rows[b] :].any() and not dmask[b, :, :, keys[b] :].any()
        if not keys[b]:
            want.append(copies[0][a] * 0)
            continue
        _, want_lse, p = formula(copies[0][a][None], copies[1][c][None], copies[2][c][None], left=20, right=0, slopes=slopes)
        p = p.nan_to_num(0)
        mine = dmask[b, :, : rows[b], : keys[b]]
        close(mine.abs(), p[0], F16)
        close(lse[:, a], want_lse[0], F16)
        share.append(torch.signbit(mine)[p[0] > 1e-6])
        kept = p[0] * ~torch.signbit(mine) / (1 - dropout_p)
        want.append(torch.einsum("hij,jhd->ihd", kept, copies[2][c].repeat_interleave(2, 1)))
    want = torch.cat(want)
    close(o, want, F16, 3)
    for mine, w in zip(got, torch.autograd.grad(want, copies, grad.double())):
        close(mine, w, F16, 20)
    kept_bytes = int(255 * torch.tensor(1 - dropout_p, dtype=torch.float32).item()) + 1
    assert torch.cat(share).double().mean().item() == pytest.approx(1 - kept_bytes / 256, abs=0.04)


def test_the_threshold_is_that_of_the_contract():
    """floor(255 * (1 - p)) with 1 - p in float: 101 at 0.6, where double arithmetic has 102."""
    import numpy as np

    for p in [n / 100 for n in range(1, 100)]:
        keep = np.float32(1) - np.float32(p)
        assert fmha._lib.lib.fmha_dropout_threshold(p) == int(np.floor(np.float64(keep) * 255)), p
    assert fmha._lib.lib.fmha_dropout_threshold(0.6) == 101 and fmha._lib.lib.fmha_dropout_threshold(0) == 255


def test_longest_may_be_more_than_all():
    (q, cu_q), (k, cu_k), (v, _) = packed([20, 30], 4, 64, 0), packed([33, 10], 2, 64, 1), packed([33, 10], 2, 64, 2)
    want = fa.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 30, 33, causal=True)
    o = fa.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5000, 7000, causal=True)
    close(o, want.double(), F16)
    for mine, w in zip(torch.autograd.grad(o.float().sum(), (q, k, v)), torch.autograd.grad(want.float().sum(), (q, k, v))):
        close(mine, w.double(), F16, 3)


@pytest.mark.parametrize("what", ["cache", "pages"])
def test_a_cache_of_what_requires_a_gradient_has_none(what):
    q, k, v = normal(2, 3, 4, 64, dtype=F16), normal(2, 48, 2, 64, dtype=F16, seed=1), normal(2, 48, 2, 64, dtype=F16, seed=2)
    used = torch.tensor([40, 48], dtype=torch.int32, device=DEVICE)

    def run():
        if what == "cache":
            return fa.flash_attn_with_kvcache(q, k, v, cache_seqlens=used, return_softmax_lse=True)
        cu_q = torch.tensor([0, 3, 6], dtype=torch.int32, device=DEVICE)
        table = torch.tensor([[0], [1]], dtype=torch.int32, device=DEVICE)
        o, lse, _ = fa.flash_attn_varlen_func(q.flatten(0, 1), k, v, cu_q, None, 3, 48, block_table=table, seqused_k=used,
                                              return_attn_probs=True)
        return o.unflatten(0, (2, 3)), lse

    o, lse = run()
    for b in range(2):
        want = formula(q[b : b + 1], k[b : b + 1, : used[b]], v[b : b + 1, : used[b]])
        close(o[b], want[0][0], F16)
        close(lse[b] if what == "cache" else lse[:, 3 * b : 3 * b + 3], want[1][0], F16)
    for result in (o, lse):
        with pytest.raises(fmha.NotSupportedError, match="has no gradient"):
            result.sum().backward(retain_graph=True)
    with torch.no_grad():
        assert torch.equal(run()[0], o) and not run()[0].requires_grad


def test_out():
    q, k, v = (t.detach() for t in qkv(F16))
    want = fa.flash_attn_func(q, k, v, causal=True)
    wide = torch.full((2, 40, 4, 80), 7.0, dtype=F16, device=DEVICE)
    o = fa.flash_attn_func(q, k, v, causal=True, out=wide[..., 8:72])
    assert o.data_ptr() == wide[..., 8:].data_ptr() and torch.equal(o, want)
    assert (wide[..., :8] == 7).all() and (wide[..., 72:] == 7).all()
    out = torch.empty_like(want)
    assert fa.flash_attn_with_kvcache(q, k, v, cache_seqlens=56, causal=True, out=out) is out
    close(out, want.double(), F16)
    cu_q, cu_k = (torch.tensor([0, n, 2 * n], dtype=torch.int32, device=DEVICE) for n in (40, 56))
    flat = torch.empty_like(want).flatten(0, 1)
    fa.flash_attn_varlen_func(*(t.flatten(0, 1) for t in (q, k, v)), cu_q, cu_k, 40, 56, causal=True, out=flat)
    close(flat, want.flatten(0, 1).double(), F16)
    with pytest.raises(ValueError, match="out="):
        fa.flash_attn_func(q.requires_grad_(), k, v, out=out)


@pytest.mark.parametrize("heads_of_q", [2, 4, 0])
def test_fp8_and_its_scales(heads_of_q):
    e4m3 = torch.float8_e4m3fn
    q, k, v = (t.detach().to(e4m3) for t in qkv(torch.float32))
    if heads_of_q:
        scales = [normal(2, h, grad=False, seed=n).abs() + 0.5 for n, h in enumerate((heads_of_q, 2, 2))]
        wide = [s[:, None, :, None] for s in scales]
        wide[0] = wide[0].repeat_interleave(4 // heads_of_q, 2)
    else:
        scales = wide = [torch.tensor([x], device=DEVICE) for x in (0.5, 1.25, 2.0)]
    words = dict(zip(("q_descale", "k_descale", "v_descale"), scales))
    want = formula(*(t.double() * s.double() for t, s in zip((q, k, v), wide)), right=0)
    o, lse, _ = fa.flash_attn_func(q, k, v, causal=True, return_attn_probs=True, **words)
    assert o.dtype == torch.bfloat16
    close(o, want[0], torch.bfloat16, 4)
    close(lse, want[1], torch.bfloat16, 4)
    cu_q, cu_k = (torch.tensor([0, n, 2 * n], dtype=torch.int32, device=DEVICE) for n in (40, 56))
    flat = fa.flash_attn_varlen_func(*(t.flatten(0, 1) for t in (q, k, v)), cu_q, cu_k, 40, 56, causal=True, **words)
    close(flat, want[0].flatten(0, 1), torch.bfloat16, 4)
    cached = fa.flash_attn_with_kvcache(q, k, v, cache_seqlens=56, causal=True, **words)
    close(cached, want[0], torch.bfloat16, 4)


def test_sequences_behind_each_other():
    x = normal(2, 6, 3)
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]], device=DEVICE)
    flat, indices, cu, longest = fa.unpad_input_for_concatenated_sequences(x, lengths)
    assert cu.tolist() == [0, 2, 5, 11] and cu.dtype == torch.int32 and longest == 6
    assert indices.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11] and torch.equal(flat, x.flatten(0, 1)[indices])
    back = fa.index_put_first_axis(flat, indices, 12)
    assert torch.equal(back[indices], flat) and not back[5].any()
    (grad,) = torch.autograd.grad((back * 3).sum(), x)
    assert (grad[0, 5] == 0).all() and (grad[0, :5] == 3).all() and (grad[1] == 3).all()


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("options, words, blind", [
    ({"causal": True}, {"right": 0}, 16), ({"window_size": (5, 2), "softcap": 3.0}, {"left": 5, "right": 2, "softcap": 3.0}, 14),
    ({"deterministic": True}, {}, 0),
])
def test_gradients_through_lse(options, words, blind, alone):
    """@blind: so many rows see no key, 40 keys for 56 rows. @alone: the loss depends on LSE only."""
    for dtype in (F16, torch.float32):
        inputs = qkv(dtype, rows=56, keys=40)
        copies = [t.detach().double().requires_grad_() for t in inputs]
        o, lse, _ = fa.flash_attn_func(*inputs, **options, return_attn_probs=True)
        want, want_lse, _ = formula(copies[0][:, blind:], *copies[1:], **words)
        assert (lse[..., :blind] == float("-inf")).all() and not o[:, :blind].any()
        close(lse[..., blind:], want_lse, dtype)
        weights = normal(*want_lse.shape, grad=False, seed=6)
        losses = [((of_lse * weights).sum() if alone else (of_lse * weights).sum() + of_o.square().sum())
                  for of_o, of_lse in ((o, lse[..., blind:]), (want, want_lse))]
        theirs = torch.autograd.grad(losses[1], copies, allow_unused=True)
        for m, w in zip(torch.autograd.grad(losses[0], inputs), theirs):
            close(m, torch.zeros_like(m).double() if w is None else w, dtype, 8)
        # A gradient without strides of its own: that of a sum.
        (mine,) = torch.autograd.grad(fa.flash_attn_func(*inputs, **options, return_attn_probs=True)[1].sum(), inputs[0])
        close(mine[:, blind:], torch.autograd.grad(formula(copies[0][:, blind:], *copies[1:], **words)[1].sum(), copies[0])[0][:, blind:],
              dtype, 8)


def test_what_reaches_lse_of_rows_without_keys_is_not_used():
    q, k, v = qkv(F16, rows=56, keys=40)
    o, lse, _ = fa.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    grads = torch.autograd.grad((o, lse), (q, k, v), (torch.ones_like(o), torch.where(lse > float("-inf"), 0.0, float("nan"))))
    assert all(g.isfinite().all() for g in grads)


def test_gradients_through_lse_of_packed_sequences_with_dropout():
    rows, keys = [30, 1, 17], [41, 9, 3]
    (q, cu_q), (k, cu_k), (v, _) = packed(rows, 4, 64, 0), packed(keys, 2, 64, 1), packed(keys, 2, 64, 2)
    o, lse, dmask = fa.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 30, 41, dropout_p=0.3, return_attn_probs=True)
    weights = normal(*lse.shape, grad=False, seed=6)
    got = torch.autograd.grad((lse * weights).sum() + o.float().square().sum(), (q, k, v))
    copies = [t.detach().double().requires_grad_() for t in (q, k, v)]
    loss = 0
    for b in range(3):
        a, c = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        _, want_lse, p = formula(copies[0][a][None], copies[1][c][None], copies[2][c][None])
        kept = p[0] * ~torch.signbit(dmask[b, :, : rows[b], : keys[b]]) / 0.7
        want = torch.einsum("hij,jhd->ihd", kept, copies[2][c].repeat_interleave(2, 1))
        loss = loss + (want_lse[0] * weights[:, a]).sum() + want.square().sum()
    for mine, w in zip(got, torch.autograd.grad(loss, copies)):
        close(mine, w, F16, 20)


def test_gradients_through_lse_in_a_graph_and_with_a_sink():
    import fmha.torch

    q, k, v = qkv(torch.float32)
    sink = normal(4, seed=9)

    def loss(q, k, v, sink):
        o, lse = fmha.torch.attention(q, k, v, sink=sink, return_lse=True)
        return lse.sum() * 0.5 + o.sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    mine = torch.autograd.grad(compiled(q, k, v, sink), (q, k, v, sink))
    eager = torch.autograd.grad(loss(q, k, v, sink), (q, k, v, sink))
    copies = [t.detach().double().requires_grad_() for t in (q, k, v, sink)]
    wide = [t.repeat_interleave(2, 2) for t in copies[1:3]]
    s = torch.einsum("bihd,bjhd->bhij", copies[0], wide[0]) / 8
    with_sink = torch.cat([s, copies[3].view(1, 4, 1, 1).expand(2, 4, 40, 1)], -1)
    o = torch.einsum("bhij,bjhd->bihd", torch.softmax(with_sink, -1)[..., :-1], wide[1])
    want = torch.autograd.grad(torch.logsumexp(with_sink, -1).sum() * 0.5 + o.sum(), copies)
    for m, e, w in zip(mine, eager, want):
        close(m, w, torch.float32, 10)
        close(e, w, torch.float32, 10)


@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
def test_lengths_in_use(dropout_p):
    rows, keys, used_rows, used_keys = [30, 4, 17], [41, 9, 20], [25, 4, 0], [33, 2, 7]
    (q, cu_q), (k, cu_k), (v, _) = packed(rows, 4, 64, 0), packed(keys, 2, 64, 1), packed(keys, 2, 64, 2)
    used = {n: torch.tensor(x, dtype=torch.int32, device=DEVICE) for n, x in (("seqused_q", used_rows), ("seqused_k", used_keys))}
    o, lse, dmask = fa.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 30, 41, dropout_p, causal=True, return_attn_probs=True, **used)
    grad = normal(*o.shape, dtype=F16, seed=5, grad=False)
    got = torch.autograd.grad(o, (q, k, v), grad)
    copies = [t.detach().double().requires_grad_() for t in (q, k, v)]
    want = torch.zeros(o.shape, dtype=torch.float64, device=DEVICE)
    for b in range(3):
        a, c = slice(cu_q[b], cu_q[b] + used_rows[b]), slice(cu_k[b], cu_k[b] + used_keys[b])
        assert not o[cu_q[b] + used_rows[b] : cu_q[b + 1]].any() and (lse[:, cu_q[b] + used_rows[b] : cu_q[b + 1]] == float("-inf")).all()
        _, want_lse, p = formula(copies[0][a][None], copies[1][c][None], copies[2][c][None], right=0)
        p = p[0].nan_to_num(0)
        close(lse[:, a], want_lse[0], F16)
        if dropout_p:
            mine = dmask[b]
            close(mine[:, : used_rows[b], : used_keys[b]].abs(), p, F16)
            assert not mine[:, used_rows[b] :].any() and not mine[:, :, used_keys[b] :].any()
            p = p * ~torch.signbit(mine[:, : used_rows[b], : used_keys[b]]) / (1 - dropout_p)
        want[a] = torch.einsum("hij,jhd->ihd", p, copies[2][c].repeat_interleave(2, 1))
    close(o, want, F16, 3)
    for mine, w in zip(got, torch.autograd.grad(want, copies, grad.double())):
        close(mine, w.nan_to_num(0), F16, 20)
