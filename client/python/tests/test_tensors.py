# SPDX-License-Identifier: MIT
"""torch's tensors that are not plain numbers in memory, at every door: the right result, or a sentence."""
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
import fmha  # noqa: E402
import fmha.flash_attn as fa  # noqa: E402
import fmha.torch  # noqa: E402
from test_torch import DEVICE, normal, qkv, sdpa  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402


def replaced(*args, **words):
    with fmha.torch.replace_sdpa():
        return torch.nn.functional.scaled_dot_product_attention(*args, **words)


def swapped(function):
    """@function on [batch, heads, rows, hdim]."""
    return lambda q, k, v: function(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)


DOORS = {
    "sdpa": fmha.torch.scaled_dot_product_attention, "replace_sdpa": replaced, "torch.attention": swapped(fmha.torch.attention),
    "flash_attn_func": swapped(fa.flash_attn_func),
    "qkvpacked": swapped(lambda q, k, v: fa.flash_attn_qkvpacked_func(torch.stack((q, k, v), 2))),
    "with_kvcache": swapped(fa.flash_attn_with_kvcache),
    "numpy's": lambda *qkv: fmha.attention(*qkv, layout="bhsd"),
}
DIFFERENTIABLE = ("sdpa", "replace_sdpa", "torch.attention", "flash_attn_func", "qkvpacked")


def same(door):
    """q, k and v that every door takes, without gradients."""
    return [t.detach() for t in qkv(rows=21, keys=21)]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 1, 2)])
def test_a_sign_that_torch_keeps_in_a_bit(door, which):
    tensors = same(door)
    want = sdpa(*tensors)
    given = [torch._neg_view(-t) if i in which else t for i, t in enumerate(tensors)]
    assert any(t.is_neg() for t in given)
    for _ in range(2):
        torch.testing.assert_close(DOORS[door](*given), want, atol=2e-5, rtol=1e-4)
    # As people come by one: the imaginary part of a conjugate.
    lazy = [torch.complex(torch.zeros_like(t), -t).conj().imag if i in which else t for i, t in enumerate(tensors)]
    assert any(t.is_neg() for t in lazy)
    torch.testing.assert_close(DOORS[door](*lazy), want, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("door", DIFFERENTIABLE)
def test_a_gradient_with_its_sign_in_a_bit(door):
    tensors = [t.requires_grad_() for t in same(door)]
    grad = normal(*tensors[0].shape, seed=9, grad=False)
    want = torch.autograd.grad(sdpa(*tensors), tensors, grad)
    found = torch.autograd.grad(DOORS[door](*tensors), tensors, torch._neg_view(-grad))
    for a, b in zip(found, want):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("door", ["sdpa", "replace_sdpa"])
def test_a_mask_with_its_sign_in_a_bit(door):
    tensors, bias = same(door), normal(21, 21, seed=5, grad=False)
    torch.testing.assert_close(DOORS[door](*tensors, torch._neg_view(-bias)), sdpa(*tensors, bias), atol=2e-5, rtol=1e-4)


def test_what_is_written_to_has_no_sign_in_a_bit():
    q, k, v = (t.transpose(1, 2) for t in same(""))
    lengths = torch.full((q.shape[0],), 3, dtype=torch.int32, device=DEVICE)
    with pytest.raises(fmha.FmhaError, match="k_cache|out"):
        fa.flash_attn_with_kvcache(q[:, :1], torch._neg_view(k), v, k[:, :1], v[:, :1], cache_seqlens=lengths)
    with pytest.raises(fmha.FmhaError, match="out"):
        fmha.attention(q, k, v, out=torch._neg_view(torch.empty_like(q)))


@pytest.mark.parametrize("door", DOORS)
def test_complex_numbers_are_refused(door):
    with pytest.raises((ValueError, RuntimeError), match="complex|Complex|c64"):
        DOORS[door](*(t.to(torch.complex64).conj() for t in same(door)))


@pytest.mark.parametrize("door", DIFFERENTIABLE)
def test_a_trace_holds_the_operator(door):
    """A trace of what writes into fresh memory behind torch's back would hold the memory alone."""
    tensors = same(door)
    traced = torch.jit.trace(lambda q, k, v: DOORS[door](q * 2, k, v) + 1, tensors)
    assert "fmha::attention" in str(traced.graph)
    others = [normal(*t.shape, seed=30 + i, grad=False) for i, t in enumerate(tensors)]
    torch.testing.assert_close(traced(*others), sdpa(others[0] * 2, *others[1:]) + 1, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("door", ["with_kvcache", "numpy's"])
def test_what_cannot_be_traced_says_so(door):
    with pytest.raises(fmha.NotSupportedError, match="trace"):
        torch.jit.trace(DOORS[door], same(door))


@pytest.mark.parametrize("door", DIFFERENTIABLE)
def test_tensors_without_memory_give_such(door):
    q, k, v = same(door)
    found = DOORS[door](*(t.to("meta") for t in (q, k, v)))
    assert found.device.type == "meta" and found.shape == q.shape and found.dtype == q.dtype
    with FakeTensorMode() as mode:
        found = DOORS[door](*(mode.from_tensor(t) for t in (q, k, v)))
        assert found.shape == q.shape and found.device == q.device and type(found).__name__ == "FakeTensor"


@pytest.mark.parametrize("door", ["with_kvcache", "numpy's"])
def test_tensors_without_memory_are_refused_where_only_numbers_help(door):
    q, k, v = same(door)
    with pytest.raises(fmha.NotSupportedError, match="meta"):
        DOORS[door](*(t.to("meta") for t in (q, k, v)))
    with FakeTensorMode() as mode, pytest.raises(fmha.NotSupportedError, match="FakeTensor"):
        DOORS[door](*(mode.from_tensor(t) for t in (q, k, v)))


@pytest.mark.parametrize("door", DOORS)
def test_memory_and_none_do_not_mix(door):
    q, k, v = same(door)
    if door == "replace_sdpa":
        pytest.skip("torch's own")
    with pytest.raises((fmha.FmhaError, RuntimeError), match="meta"):
        DOORS[door](q, k.to("meta"), v)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("door", ["sdpa", "torch.attention", "flash_attn_func", "numpy's"])
def test_nested_tensors_are_refused(door, layout):
    rows = [normal(n, 4, 64, grad=False) for n in (5, 9)]
    nested = torch.nested.nested_tensor(rows, layout=layout, device=DEVICE)
    named = {"sdpa": fmha.torch.scaled_dot_product_attention, "torch.attention": fmha.torch.attention,
             "flash_attn_func": fa.flash_attn_func, "numpy's": fmha.attention}[door]
    with pytest.raises(fmha.NotSupportedError, match="(query|q) is a nested tensor"):
        named(nested, nested, nested)
    q, k, v = same(door)
    with pytest.raises(fmha.FmhaError, match="(key|k|value|v) is a nested tensor|jagged|nested"):
        named(q, nested, v)


def test_torchs_own_takes_nested_tensors():
    nested = torch.nested.nested_tensor([normal(n, 4, 64, grad=False) for n in (5, 9)], layout=torch.jagged, device=DEVICE)
    given = [nested.transpose(1, 2)] * 3
    for a, b in zip(replaced(*given).unbind(), sdpa(*given).unbind()):
        torch.testing.assert_close(a, b)


def test_sparse_tensors_are_refused():
    q, k, v = same("")
    with pytest.raises(fmha.NotSupportedError, match="key is torch.sparse"):
        fmha.torch.scaled_dot_product_attention(q, k.to_sparse(), v)


def test_vmap_over_a_mask():
    q, k, v = same("")
    masks = torch.rand(5, 21, 21, device=DEVICE) > 0.3
    masks[..., 0] = True
    with pytest.raises(fmha.NotSupportedError, match="attn_mask.*vmap"):
        torch.vmap(lambda m: fmha.torch.scaled_dot_product_attention(q, k, v, m))(masks)
    with pytest.raises(fmha.NotSupportedError, match="bias.*vmap"):
        torch.vmap(lambda m: fmha.torch.attention(q, k, v, bias=m, layout="bhsd"))(masks.float())
    with pytest.raises(fmha.NotSupportedError, match="vmap"):
        torch.vmap(lambda m: fmha.attention(q, k, v, bias=m, layout="bhsd"))(masks.float())
    found = torch.vmap(lambda m: replaced(q, k, v, m))(masks)
    torch.testing.assert_close(found, torch.vmap(lambda m: sdpa(q, k, v, m))(masks))


def test_lengths_as_lists():
    q, k, v = (normal(14, 4, 64, seed=i, grad=False) for i in range(3))
    with pytest.raises(fmha.InvalidError, match="cu_seqlens_q is a list"):
        fa.flash_attn_varlen_func(q, k, v, [0, 5, 14], [0, 5, 14], 9, 9)
    with pytest.raises(fmha.InvalidError, match="cu_seqlens_k is a list"):
        cu = torch.tensor([0, 5, 14], dtype=torch.int32, device=DEVICE)
        fmha.torch.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=[0, 5, 14], max_seqlen_q=9, max_seqlen_k=9)
    if DEVICE == "cpu":
        found = fmha.attention(q, k, v, cu_seqlens_q=[0, 5, 14], cu_seqlens_k=[0, 5, 14])
        torch.testing.assert_close(found, fa.flash_attn_varlen_func(q, k, v, cu, cu, 9, 9))


def test_a_gradient_is_never_lost_in_silence():
    q, k, v = qkv()
    with pytest.raises(fmha.NotSupportedError, match="q requires a gradient"):
        fmha.attention(q, k, v, layout="bhsd")
    with torch.no_grad():
        assert np.isfinite(fmha.attention(q, k, v, layout="bhsd").cpu().numpy()).all()
