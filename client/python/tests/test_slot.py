# SPDX-License-Identifier: MIT
"""fmhad in torch's slot for flash attention, judged against torch's math and double formulas."""
import math

import pytest

torch = pytest.importorskip("torch")
attention_of_torch = pytest.importorskip("torch.nn.attention")
if not hasattr(attention_of_torch, "activate_flash_attention_impl"):
    pytest.skip("this torch has no slot for flash attention", allow_module_level=True)

import fmha  # noqa: E402
import fmha.torch  # noqa: E402
from fmha import _slot  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention as sdpa  # noqa: E402

TYPES = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def slot():
    torch.manual_seed(0)
    attention_of_torch.activate_flash_attention_impl("fmha")
    yield
    attention_of_torch.restore_flash_attention_impl(_raise_warn=False)


def _qkv(rows=17, keys=20, heads=4, kv_heads=4, hdim=16, dtype=torch.float32, batch=2):
    shapes = (batch, heads, rows, hdim), (batch, kv_heads, keys, hdim), (batch, kv_heads, keys, hdim)
    return tuple(torch.randn(s, dtype=dtype, requires_grad=True) for s in shapes)


def _with_gradients(function, tensors, grad):
    o = function(*tensors)
    return o, *torch.autograd.grad(o, tensors, grad.to(o.dtype))


def _math(tensors, grad, **words):
    """The same in double, by torch's math."""
    doubles = tuple(t.detach().double().requires_grad_() for t in tensors)
    with sdpa_kernel(SDPBackend.MATH):
        return _with_gradients(lambda q, k, v: sdpa(q, k, v, **words), doubles, grad.double())


def _served(function):
    """What @function returns, after fmhad was asked in it."""
    before = sum(_slot.calls().values())
    found = function()
    assert sum(_slot.calls().values()) > before
    return found


def _close(found, wanted, tolerance):
    for a, b in zip(found, wanted):
        assert a.shape == b.shape
        assert (a.double() - b.double()).abs().max() <= tolerance * max(1, b.abs().max().item())


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("words", [{}, {"is_causal": True}, {"enable_gqa": True}, {"scale": 0.3}, {"attn_mask": "bool"}, {"attn_mask": "float"},
                                   {"attn_mask": "rows"}], ids=str)
def test_sdpa(dtype, words):
    words = dict(words)
    q, k, v = _qkv(kv_heads=2 if "enable_gqa" in words else 4, dtype=dtype)
    masks = {"bool": torch.rand(17, 20) > 0.4, "float": torch.randn(2, 1, 17, 20).to(dtype), "rows": torch.arange(17)[:, None] % 3 > 0}
    masks["rows"] = masks["rows"].expand(17, 20)  # some see nothing
    exact = dict(words)
    if "attn_mask" in words:
        words["attn_mask"] = exact["attn_mask"] = masks[words["attn_mask"]]
        if exact["attn_mask"].dtype != torch.bool:
            exact["attn_mask"] = exact["attn_mask"].double()
    grad = torch.randn(q.shape, dtype=dtype)
    found = _served(lambda: _with_gradients(lambda *t: sdpa(*t, **words), (q, k, v), grad))
    _close(found, _math((q, k, v), grad, **exact), TYPES[dtype])


def test_a_float_mask_beside_halves_keeps_its_numbers():
    q, k, v = _qkv(dtype=torch.bfloat16)
    mask = torch.full((17, 20), 1000.0)
    mask[:, 3] += 2.5  # lost in bfloat16
    found = _served(lambda: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask)[0])
    weights = (q.double() @ k.double().mT / 4 + mask.double()).softmax(-1)
    _close([found], [weights @ v.double()], 3e-2)


@pytest.mark.parametrize("transposed", [False, True])
def test_results_lie_as_torchs_own(transposed):
    tensors = [t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() if transposed else t for t in _qkv()]
    grad = torch.randn(tensors[0].shape)

    def run():
        o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*tensors)
        return o, lse, *torch.autograd.grad(o, tensors, grad)

    found = _served(run)
    attention_of_torch.restore_flash_attention_impl()
    wanted = run()
    assert [t.stride() for t in found] == [t.stride() for t in wanted]
    _close(found, wanted, 2e-6)


def test_lse_is_the_natural_logarithm():
    q, k, v = _qkv()
    _, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=True)
    hidden = torch.ones(17, 20, dtype=torch.bool).triu(1)
    _close([lse], [(q.double() @ k.double().mT / 4).masked_fill(hidden, -math.inf).logsumexp(-1)], 2e-6)


@pytest.mark.parametrize("of", [{"dtype": torch.float64}, {"hdim": 264}], ids=str)
def test_what_fmhad_does_not_take_stays_torchs(of):
    q, k, v = _qkv(**of)
    grad, before = torch.randn(q.shape, dtype=q.dtype), sum(_slot.left_to_torch.values())
    found = _with_gradients(lambda *t: sdpa(*t, is_causal=True), (q, k, v), grad)
    assert sum(_slot.left_to_torch.values()) == before + 2
    attention_of_torch.restore_flash_attention_impl()
    assert all(map(torch.equal, found, _with_gradients(lambda *t: sdpa(*t, is_causal=True), (q, k, v), grad)))


def test_restored_it_is_torchs_again():
    q, k, v = _qkv()
    before = sum(_slot.calls().values())
    _served(lambda: sdpa(q, k, v))
    attention_of_torch.restore_flash_attention_impl()
    assert attention_of_torch.current_flash_attention_impl() is None
    sdpa(q, k, v)
    assert sum(_slot.calls().values()) == before + 1
    attention_of_torch.activate_flash_attention_impl("fmha")
    attention_of_torch.activate_flash_attention_impl("fmha")
    _served(lambda: sdpa(q, k, v))
    assert attention_of_torch.current_flash_attention_impl() == "fmha"


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_whole(backend):
    q, k, v = _qkv(rows=32, keys=32)
    grad = torch.randn(q.shape)

    def layer(q, k, v):
        return sdpa(q * 2, k, v, is_causal=True) + 1

    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    found = _served(lambda: _with_gradients(compiled, (q, k, v), grad))
    _close(found, _with_gradients(layer, (q, k, v), grad), 2e-6)


def test_autocast():
    q, k, v = _qkv()
    with torch.autocast("cpu", torch.bfloat16):
        o = _served(lambda: sdpa(q, k, v))
    assert o.dtype == torch.bfloat16
    o.float().sum().backward()
    assert q.grad.dtype == torch.float32 and q.grad.abs().sum() > 0


def test_a_layer_of_torch_trains():
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    x = torch.randn(2, 9, 32)

    def gradients():
        layer.zero_grad()
        layer(x).square().mean().backward()
        return [p.grad.clone() for p in layer.parameters()]

    found = _served(gradients)
    attention_of_torch.restore_flash_attention_impl()
    _close(found, gradients(), 2e-6)


# ---- flash-attn's operators, by torch's front doors ----


def _packed(lengths=(7, 0, 23), heads=4, kv_heads=2, hdim=16):
    total = sum(lengths)
    q = torch.randn(total, heads, hdim, requires_grad=True)
    k, v = (torch.randn(total, kv_heads, hdim, requires_grad=True) for _ in range(2))
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    return q, k, v, cu


def _each(q, k, v, cu_q, spans, window):
    """In double, a sequence at a time; @spans: of keys."""
    parts = []
    for (a, b), (c, d) in zip(zip(cu_q.tolist(), cu_q.tolist()[1:]), spans):
        group = q.shape[1] // k.shape[1]
        x, y, z = q[a:b].transpose(0, 1), *(t[c:d].repeat_interleave(group, 1).transpose(0, 1) for t in (k, v))
        distance = torch.arange(b - a)[:, None] + (d - c) - (b - a) - torch.arange(d - c)
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if window[0] >= 0:
            hidden |= distance > window[0]
        if window[1] >= 0:
            hidden |= -distance > window[1]
        parts.append(((x @ y.mT / 4).masked_fill(hidden, -1e30).softmax(-1) @ z).transpose(0, 1))
    return torch.cat(parts)


def _spans(cu):
    return list(zip(cu.tolist(), cu.tolist()[1:]))


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (5, 0), (3, 4)])
def test_varlen(window):
    varlen_attn = pytest.importorskip("torch.nn.attention.varlen").varlen_attn
    q, k, v, cu = _packed(kv_heads=4)
    grad = torch.randn(q.shape)
    found = _served(lambda: _with_gradients(lambda *t: varlen_attn(*t, cu, cu, 23, 23, window_size=window), (q, k, v), grad))
    doubles = tuple(t.detach().double().requires_grad_() for t in (q, k, v))
    _close(found, _with_gradients(lambda *t: _each(*t, cu, _spans(cu), window), doubles, grad.double()), 2e-6)


def test_pages_and_lengths_in_use():
    if "block_table" not in str(torch.ops.aten._flash_attention_forward.default._schema):
        pytest.skip("this torch's operator takes no block_table")
    q, _, _, _ = _packed()
    cu = torch.tensor([0, 7, 30], dtype=torch.int32)
    pages_k, pages_v = torch.randn(2, 6, 16, 2, 16)
    table, used = torch.tensor([[4, 1], [0, 3]], dtype=torch.int32), torch.tensor([9, 30], dtype=torch.int32)
    with torch.no_grad():
        o, lse, *_ = _served(lambda: torch.ops.aten._flash_attention_forward(
            q, pages_k, pages_v, cu, None, 23, 32, 0.0, True, False, seqused_k=used, block_table=table))
    k, v = (torch.cat([pages[t].flatten(0, 1)[:n] for t, n in zip(table, used)]) for pages in (pages_k, pages_v))
    _close([o], [_each(q.double(), k.double(), v.double(), cu, [(0, 9), (9, 39)], (-1, 0))], 2e-6)
    assert lse.shape == (4, 30) and lse.isfinite().all()


def test_into_a_place_that_is_given():
    if not hasattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace"):
        pytest.skip("this torch has no such operator")
    q, k, v, cu = _packed()
    out = torch.full_like(q, math.nan)
    with torch.no_grad():
        lse = _served(lambda: torch.ops.aten._flash_attention_forward_no_dropout_inplace(out, q, k, v, cu, cu, 23, 23, 0.0, True, False))
    _close([out], [_each(q.double(), k.double(), v.double(), cu, _spans(cu), (-1, 0))], 2e-6)
    assert lse.shape == (4, 30)


def test_gradients_that_torch_would_get_wrong_are_refused():
    q, k, v, cu = _packed()
    used = torch.tensor([3, 0, 20], dtype=torch.int32)
    with pytest.raises(fmha.NotSupportedError, match="seqused_k"):
        torch.ops.aten._flash_attention_forward(q, k, v, cu, cu, 23, 23, 0.0, False, False, seqused_k=used)
    with torch.no_grad():
        o = torch.ops.aten._flash_attention_forward(q, k, v, cu, cu, 23, 23, 0.0, False, False, seqused_k=used)[0]
    _close([o], [_each(q.double(), k.double(), v.double(), cu, [(0, 3), (7, 7), (7, 27)], (-1, -1))], 2e-6)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_dropout_drops_the_same_backward(layout):
    q, k, v = _qkv(rows=32, keys=32)
    if layout == "bshd":
        tensors = tuple(t.detach().transpose(1, 2).contiguous().requires_grad_() for t in (q, k, v))
        o, lse, state, _, mask = torch.ops.aten._flash_attention_forward(*tensors, None, None, 32, 32, 0.3, True, True)
        o_heads = o.transpose(1, 2)
    else:
        tensors = q, k, v
        o, lse, *_, state, _, mask = torch.ops.aten._scaled_dot_product_flash_attention(*tensors, 0.3, True, True)
        o_heads = o
    assert state.dtype == torch.uint64 and state.shape == (2,)
    seen = torch.ones(32, 32, dtype=torch.bool).tril()
    share = ((mask < 0) & seen).sum() / (seen.sum() * 8)
    assert 0.25 < share < 0.35
    grad = torch.randn(q.shape)
    found = o_heads, *(t if layout == "bhsd" else t.transpose(1, 2)
                       for t in torch.autograd.grad(o, tensors, grad if layout == "bhsd" else grad.transpose(1, 2)))

    def exact(q, k, v):
        p = (q @ k.mT / 4).masked_fill(~seen, -math.inf).softmax(-1)
        return (p * (mask >= 0) / 0.7) @ v

    doubles = tuple(t.detach().double().requires_grad_() for t in (q, k, v))
    _close(found, _with_gradients(exact, doubles, grad.double()), 2e-6)
    again = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.3, True, False)
    assert not torch.equal(again[0], o_heads)  # another draw
    torch.manual_seed(5)
    first = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.3)[0]
    torch.manual_seed(5)
    assert torch.equal(first, torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.3)[0])


def test_without_a_kernel_of_torchs_what_is_not_taken_is_refused():
    q, k, v = _qkv(dtype=torch.float64)
    with pytest.raises(fmha.NotSupportedError, match="float64"):
        torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)


def test_importing_registers_and_does_not_activate():
    assert "fmha" in attention_of_torch.list_flash_attention_impls()
    attention_of_torch.restore_flash_attention_impl()
    before = sum(_slot.calls().values())
    sdpa(*_qkv())
    assert sum(_slot.calls().values()) == before
