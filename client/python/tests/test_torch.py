# SPDX-License-Identifier: MIT
"""fmha.torch against torch's math backend in float64, on the CPU or, with FMHA_TEST_DEVICE=cuda, on a GPU."""
import os

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
import fmha.flash_attn  # noqa: E402
import fmha.torch  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

DEVICE = os.environ.get("FMHA_TEST_DEVICE", "cpu")
BARS = {torch.float32: 2e-5 if DEVICE == "cpu" else 2e-3, torch.float16: 4e-3, torch.bfloat16: 3e-2}
STEPS = 60 if DEVICE == "cpu" else 200  # of training
sdpa = torch.nn.functional.scaled_dot_product_attention


def normal(*shape, dtype=torch.float32, seed=0, grad=True):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype).requires_grad_(grad)


def qkv(batch=2, heads=4, kv_heads=4, rows=33, keys=47, hdim=64, dtype=torch.float32):
    return (normal(batch, heads, rows, hdim, dtype=dtype), normal(batch, kv_heads, keys, hdim, dtype=dtype, seed=1),
            normal(batch, kv_heads, keys, hdim, dtype=dtype, seed=2))


def compare(mine, inputs, theirs=sdpa, **options):
    """@mine's output and gradients against @theirs in float64."""
    dtype = inputs[0].dtype
    copies = [t.detach().double().requires_grad_() if t.is_floating_point() else t for t in inputs]
    with sdpa_kernel(SDPBackend.MATH):
        want = theirs(*copies, **options)
    found = mine(*inputs, **options)
    grad = normal(*found.shape, dtype=dtype, seed=9, grad=False)
    leaves = [i for i, t in enumerate(inputs) if t.requires_grad]
    bar = BARS[dtype]
    torch.testing.assert_close(found.double(), want, atol=bar, rtol=bar)
    if leaves:
        mine_grads = torch.autograd.grad(found, [inputs[i] for i in leaves], grad)
        want_grads = torch.autograd.grad(want, [copies[i] for i in leaves], grad.double())
        for m, w in zip(mine_grads, want_grads):
            torch.testing.assert_close(m.double(), w, atol=6 * bar, rtol=6 * bar)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}])
def test_sdpa(dtype, options):
    compare(fmha.torch.scaled_dot_product_attention, qkv(dtype=dtype), **options)


def test_gqa_and_odd_shapes():
    mine = fmha.torch.scaled_dot_product_attention
    compare(mine, qkv(kv_heads=2), enable_gqa=True)
    with pytest.raises(ValueError, match="enable_gqa"):
        mine(*qkv(kv_heads=2))
    for hdim in (20, 33, 59, 256):
        compare(mine, qkv(hdim=hdim))
    compare(mine, [normal(3, 2, 4, 9, 32), normal(3, 2, 4, 11, 32, seed=1), normal(3, 2, 4, 11, 40, seed=2)])
    compare(mine, [normal(4, 9, 32), normal(4, 11, 32, seed=1), normal(4, 11, 32, seed=2)])
    compare(mine, [normal(9, 32), normal(11, 32, seed=1), normal(11, 32, seed=2)])
    compare(mine, [t.transpose(1, 2) for t in (normal(2, 33, 4, 64), normal(2, 47, 4, 64, seed=1), normal(2, 47, 4, 64, seed=2))])


@pytest.mark.parametrize("shape", [(33, 47), (4, 33, 47), (2, 1, 33, 47), (2, 4, 33, 47), (2, 1, 1, 47)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks(shape, dtype):
    mine = fmha.torch.scaled_dot_product_attention
    seen = normal(*shape, seed=4, grad=False) > -0.5
    seen[..., 0] = True
    compare(lambda q, k, v: mine(q, k, v, attn_mask=seen), qkv(dtype=dtype), lambda q, k, v: sdpa(q, k, v, attn_mask=seen))
    compare(lambda q, k, v, m: mine(q, k, v, attn_mask=m), [*qkv(dtype=dtype), normal(*shape, dtype=dtype, seed=5)],
            lambda q, k, v, m: sdpa(q, k, v, attn_mask=m))


def test_a_row_that_sees_nothing_is_zero():
    q, k, v = qkv()
    seen = torch.ones(33, 47, dtype=torch.bool, device=DEVICE)
    seen[5] = False
    o = fmha.torch.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    assert not o[:, :, 5].any() and o.isfinite().all()
    o.sum().backward()
    assert all(t.grad.isfinite().all() for t in (q, k, v)) and not q.grad[:, :, 5].any()


def test_dropout_follows_torchs_seed_and_its_gradient_the_same_bytes():
    q, k, v = qkv(rows=64, keys=64)
    mine = fmha.torch.scaled_dot_product_attention

    def run():
        torch.manual_seed(3)
        return mine(q, k, v, dropout_p=0.3)

    o = run()
    assert torch.equal(o, run()) and not torch.equal(o, mine(q, k, v, dropout_p=0.3))
    grad = normal(*o.shape, seed=6, grad=False)
    torch.manual_seed(3)
    (dv,) = torch.autograd.grad(mine(q, k, v, dropout_p=0.3), v, grad)
    # O is linear in V: its change along a direction is what the gradient says, if both drop the same elements.
    step = normal(*v.shape, seed=7, grad=False)
    torch.manual_seed(3)
    moved = mine(q, k, v + step, dropout_p=0.3)
    assert ((moved - o) * grad).sum().item() == pytest.approx((dv * step).sum().item(), rel=1e-2 if DEVICE == "cuda" else 1e-3)
    kept = mine(q, k, torch.ones_like(v), dropout_p=0.3).mean().item()
    assert kept == pytest.approx(1.0, abs=0.05)


def test_windows_soft_caps_sinks_and_slopes():
    q, k, v = (t.detach().transpose(1, 2).contiguous().requires_grad_() for t in qkv())
    sink = normal(4, seed=8)
    i, j = torch.arange(33, device=DEVICE)[:, None], torch.arange(47, device=DEVICE)[None]
    seen = (j <= i + 14) & (j >= i + 14 - 9)

    def formula(q, k, v, sink):
        s = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
        s = (5 * torch.tanh(s / 5)).masked_fill(~seen, float("-inf"))
        p = torch.softmax(torch.cat([s, sink[None, :, None, None].expand(*s.shape[:3], 1)], -1), -1)[..., :-1]
        return torch.einsum("bhij,bjhd->bihd", p, v)

    compare(lambda *t: fmha.torch.attention(*t[:3], sink=t[3], window=(9, 0), softcap=5.0), [q, k, v, sink], formula)
    compare(lambda *t: fmha.torch.attention(*t[:3], sink=t[3], window=(9, 0), softcap=5.0, softcap_approx=True), [q, k, v, sink], formula)


def test_packed_sequences():
    cu = torch.tensor([0, 5, 5, 40], dtype=torch.int32, device=DEVICE)
    q, k, v = normal(40, 4, 64), normal(40, 2, 64, seed=1), normal(40, 2, 64, seed=2)

    def formula(q, k, v):
        parts = [sdpa(*(t[a:b].transpose(0, 1)[None] for t in (q, k, v)), is_causal=True, enable_gqa=True)[0].transpose(0, 1)
                 for a, b in ((0, 5), (5, 40))]
        return torch.cat(parts)

    compare(lambda *t: fmha.torch.attention(*t, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=35, max_seqlen_k=35, causal=True),
            [q, k, v], formula)


def test_a_freed_graph_fails_as_in_torch():
    q, k, v = qkv()
    loss = fmha.torch.scaled_dot_product_attention(q, k, v).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def attended(door, q, k, v, sink):
    if door == "sdpa":
        return fmha.torch.scaled_dot_product_attention(q, k, v)
    if door == "operator":
        return torch.ops.fmha.attention(q, k, v, *(None,) * 10, *fmha.torch._functions.Call())[0]
    if door == "attention":
        return fmha.torch.attention(q, k, v, sink=sink, layout="bhsd")
    return fmha.flash_attn.flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)))


@pytest.mark.parametrize("door", ["sdpa", "operator", "attention", "flash_attn"])
def test_a_second_derivative_is_refused(door):
    """Whether the first one's incoming gradient needs a gradient (square) or not (sum)."""
    q, k, v = qkv()
    sink = normal(4, seed=4) if door == "attention" else None
    for _ in range(2):  # the second time the ways of what was seen before
        for power in (1, 2):
            for inputs in ((q,), (k,), (q, k, v), (v, q)):
                loss = attended(door, q, k, v, sink).pow(power).sum()
                found = torch.autograd.grad(loss, inputs, create_graph=True)
                with pytest.raises(RuntimeError, match="second derivative"):
                    sum(g.square().sum() for g in found).backward()
    if door == "operator":
        return
    # O is linear in v: its gradient is a constant where nothing else is wanted, as torch has it.
    q, k = q.detach(), k.detach()
    (dv,) = torch.autograd.grad(attended(door, q, k, v, None).sum(), v, create_graph=True)
    assert not dv.requires_grad
    # A gradient that is only used, not differentiated, in a graph of its own.
    w = normal(*v.shape, seed=8)
    (dv,) = torch.autograd.grad(attended(door, q, k, v * w, None).sum(), v, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(dv.sum(), w)[0], (dv / w).detach(), atol=1e-4, rtol=1e-3)


def test_deterministic_gradients():
    q, k, v = qkv(rows=300, keys=300)
    torch.use_deterministic_algorithms(True)
    try:
        runs = [torch.autograd.grad(fmha.torch.scaled_dot_product_attention(q, k, v).sum(), (q, k, v)) for _ in range(5)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for run in runs for a, b in zip(run, runs[0]))


def changed(name):
    """(q, k, v, options) that differ from "plain" in one thing."""
    sizes = {"keys": dict(keys=31), "kv heads": dict(kv_heads=2), "half": dict(dtype=torch.float16), "wide": dict(hdim=72)}.get(name, {})
    q, k, v = qkv(**sizes)
    options = {"causal": {"is_causal": True}, "scale": {"scale": 0.25}, "kv heads": {"enable_gqa": True}}.get(name, {})
    if name in ("rows first", "keys first", "values first"):
        at = ("rows first", "keys first", "values first").index(name)
        laid = [t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() if i == at else t
                for i, t in enumerate((q, k, v))]
        q, k, v = laid
    if name == "values wide":
        v = normal(*v.shape[:-1], 80, seed=5)
    if name == "beside":
        space = torch.zeros(k.numel() + 2, device=DEVICE)[2:].view(k.shape)
        k = space.copy_(k.detach()).requires_grad_()
    if name == "leaf":
        q, v = q.detach(), v.detach()
    return q, k, v, options


CHANGES = ("plain", "keys", "kv heads", "half", "wide", "causal", "scale", "rows first", "keys first", "values first", "values wide",
           "beside", "leaf")


def test_a_call_like_the_one_before_but_for_one_thing():
    mine = fmha.torch.scaled_dot_product_attention
    for name in [*CHANGES, *CHANGES[::-1], *CHANGES]:
        q, k, v, options = changed(name)
        compare(mine, (q, k, v), **options)
        with torch.no_grad():
            torch.testing.assert_close(mine(q, k, v, **options), mine(q, k, v, **options), atol=0, rtol=0)
    with pytest.raises(ValueError, match="enable_gqa"):
        mine(*qkv(kv_heads=2))
    with pytest.raises(ValueError, match="tensor.v|v is"):
        mine(*qkv()[:2], qkv(keys=31)[2])
    q, k, v = (t.detach() for t in qkv())
    with pytest.raises(fmha.NotSupportedError, match="vmap"):
        torch.vmap(mine)(q[None], k[None], v[None])
    with pytest.raises(fmha.NotSupportedError, match="vmap"):
        torch.vmap(mine, (None, 0, 0))(q, k[None], v[None])


def test_saved_tensors_that_come_back_with_other_strides():
    inputs = [t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in qkv()]
    for _ in range(2):
        compare(fmha.torch.scaled_dot_product_attention, inputs)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(memory_format=torch.contiguous_format), lambda t: t):
            compare(fmha.torch.scaled_dot_product_attention, inputs)


def test_gradients_of_any_strides():
    q, k, v = qkv()
    o = fmha.torch.scaled_dot_product_attention(q, k, v)
    for grad in (torch.ones((), device=DEVICE).expand(o.shape), normal(33, 2, 4, 64, grad=False).permute(1, 2, 0, 3),
                 normal(2, 4, 64, 33, grad=False).transpose(2, 3), normal(2 * 4 * 33 * 64 + 1, grad=False)[1:].view(o.shape)):
        found = torch.autograd.grad(o, (q, k, v), grad, retain_graph=True)
        want = torch.autograd.grad(sdpa(q, k, v), (q, k, v), grad)
        for m, w in zip(found, want):
            torch.testing.assert_close(m, w, atol=6 * BARS[q.dtype], rtol=6 * BARS[q.dtype])


def test_autocast():
    q, k, v = qkv()
    assert fmha.torch.scaled_dot_product_attention(q, k, v).dtype == torch.float32  # known from now on, without autocast
    with torch.autocast(DEVICE, torch.bfloat16):
        o = fmha.torch.scaled_dot_product_attention(q, k, v)
    assert o.dtype == torch.bfloat16
    o.float().sum().backward()
    assert q.grad.dtype == torch.float32


def test_vmap_is_refused_with_a_sentence():
    q, k, v = (t.detach() for t in qkv())
    with pytest.raises(fmha.NotSupportedError, match="vmap"):
        torch.vmap(fmha.torch.scaled_dot_product_attention)(q, k, v)


def test_compiled_in_one_graph():
    q, k, v = qkv()

    def model(q, k, v, bias):
        return fmha.torch.scaled_dot_product_attention(q * 2, k, v, attn_mask=bias).relu()

    bias = normal(33, 47, seed=3)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager" if DEVICE == "cpu" else "inductor")
    found, want = compiled(q, k, v, bias), model(q, k, v, bias)
    torch.testing.assert_close(found, want)
    for mine, theirs in zip(torch.autograd.grad(found.sum(), (q, k, v, bias)), torch.autograd.grad(want.sum(), (q, k, v, bias))):
        torch.testing.assert_close(mine, theirs)


def test_operators_keep_torchs_rules():
    q, k, v = (t.detach().requires_grad_() for t in qkv(rows=5, keys=6, hdim=32))
    for intervals in (None, fmha.masks.chunked(2, 5, 6).beside(q)):
        arguments = (q, k, v, *(None,) * 7, intervals, None, None, "bhsd", 0, -1, -1, None, 0.0, 0.0, 0, 0, True)
        torch.library.opcheck(torch.ops.fmha.attention.default, arguments)


def test_replacing_torchs_own():
    q, k, v = qkv()
    functional = torch.nn.functional
    with fmha.torch.replace_sdpa():
        with fmha.torch.replace_sdpa():
            compare(functional.scaled_dot_product_attention, (q, k, v), is_causal=True)
        assert functional.scaled_dot_product_attention is not sdpa
        doubles = [t.detach().double() for t in (q, k, v)]
        torch.testing.assert_close(functional.scaled_dot_product_attention(*doubles), sdpa(*doubles))
    assert functional.scaled_dot_product_attention is sdpa


def test_training_follows_torchs_curve():
    """A small transformer that learns to copy: same seeds, both ways."""
    def curve(replace):
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        model = torch.nn.Sequential(torch.nn.Embedding(16, 32), layer, torch.nn.Linear(32, 16)).to(DEVICE)
        adam, losses = torch.optim.Adam(model.parameters(), 3e-3), []
        generator = torch.Generator().manual_seed(1)
        for _ in range(STEPS):
            x = torch.randint(0, 16, (8, 24), generator=generator).to(DEVICE)
            y = x.roll(1, 1)
            with fmha.torch.replace_sdpa() if replace else torch.enable_grad():
                loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
            adam.zero_grad()
            loss.backward()
            adam.step()
            losses.append(loss.item())
        return losses

    mine, theirs = curve(True), curve(False)
    assert mine[-1] < 0.95 * mine[0]
    assert max(abs(a - b) for a, b in zip(mine, theirs)) < (2e-3 if DEVICE == "cpu" else 2e-2)
