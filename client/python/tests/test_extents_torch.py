# SPDX-License-Identifier: MIT
"""Tensors of the wrong extents through torch's doors: what torch broadcasts is right, gradients too, the rest is named."""
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
import fmha  # noqa: E402
import fmha.flash_attn  # noqa: E402
import fmha.torch  # noqa: E402
from test_torch import DEVICE, normal  # noqa: E402



def sdpa(*arguments):
    """By the formula: torch's fast kernels on a GPU take no mask whose last axis broadcasts."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(*arguments)


def same_with_gradients(tensors, ours, theirs, tolerance=2e-4):
    found = []
    for call in (ours, theirs):
        leaves = [t.detach().clone().requires_grad_() if t is not None else None for t in tensors]
        out = call(*leaves)
        weights = torch.linspace(-1, 1, out.numel(), device=out.device).reshape(out.shape)
        found.append([out, *torch.autograd.grad((out * weights).sum(), [t for t in leaves if t is not None])])
    for a, b in zip(*found):
        assert a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("q, k, v", [
    ((2, 4, 8, 16), (1, 4, 10, 16), (1, 4, 10, 16)), ((1, 4, 8, 16), (2, 4, 10, 16), (2, 4, 10, 16)),
    ((2, 4, 8, 16), (2, 4, 10, 16), (1, 4, 10, 16)), ((2, 4, 8, 16), (2, 1, 10, 16), (2, 1, 10, 16)),
    ((3, 2, 4, 8, 16), (1, 2, 4, 10, 16), (3, 1, 4, 10, 16)), ((2, 4, 8, 16), (4, 10, 16), (4, 10, 16)),
])
def test_batches_and_heads_broadcast_as_in_torch(q, k, v):
    tensors = [normal(*shape, dtype=torch.float32, seed=n) for n, shape in enumerate((q, k, v))]
    same_with_gradients(tensors, fmha.torch.scaled_dot_product_attention, sdpa)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (), (2, 1, 1, 10), (8, 1), (1,), (10,), (4, 8, 10), (2, 4, 8, 10)])
def test_masks_broadcast_as_in_torch(shape):
    tensors = [normal(2, 4, 8, 16, dtype=torch.float32), *(normal(2, 4, 10, 16, dtype=torch.float32, seed=n) for n in (1, 2)),
               normal(*shape, dtype=torch.float32, seed=3)]
    same_with_gradients(tensors, fmha.torch.scaled_dot_product_attention, sdpa)


def test_an_expanded_mask_has_torchs_gradient():
    q, k, v = (normal(2, 4, 8, 16, dtype=torch.float32, seed=n) for n in range(3))
    row = normal(1, 1, 1, 8, dtype=torch.float32, seed=4)

    def through(call):
        return lambda mask: call(q, k, v, mask.expand(2, 4, 8, 8))

    same_with_gradients([row], through(fmha.torch.scaled_dot_product_attention), through(sdpa))


@pytest.mark.parametrize("wrong", [
    dict(k=(1, 3, 10, 16)), dict(v=(2, 4, 9, 16)), dict(k=(2, 4, 10, 24)), dict(k=(3, 4, 10, 16), v=(3, 4, 10, 16)),
    dict(mask=(2, 4, 8, 9)), dict(mask=(3, 1, 8, 10)), dict(mask=(2, 4, 7, 10)), dict(q=(16,)), dict(k=(10, 16), v=(10, 16)),
])
def test_what_does_not_broadcast_is_said(wrong):
    shapes = dict(q=(2, 4, 8, 16), k=(2, 4, 10, 16), v=(2, 4, 10, 16)) | wrong
    q, k, v = (normal(*shapes[n], dtype=torch.float32) for n in "qkv")
    mask = normal(*wrong["mask"], dtype=torch.float32) if "mask" in wrong else None
    with pytest.raises((fmha.FmhaError, RuntimeError)) as raised:
        fmha.torch.scaled_dot_product_attention(q, k, v, mask)
    assert str(raised.value)


@pytest.mark.parametrize("heads", [1, 3, 9])
def test_a_sink_too_short_or_too_long(heads):
    q, k, v = (normal(2, 16, 8, 32, dtype=torch.float32, seed=n, grad=True) for n in range(3))
    sink = normal(heads, dtype=torch.float32, grad=True)
    with pytest.raises(fmha.InvalidError, match=r"tensor.sink is \[%d\]: \[8\] is wanted" % heads):
        fmha.torch.attention(q, k, v, sink=sink).sum().backward()


@torch.no_grad()
@pytest.mark.parametrize("change", [
    dict(k_cache=(1, 64, 2, 32), v_cache=(1, 64, 2, 32)), dict(v_cache=(2, 63, 2, 32)), dict(cache_seqlens=(1,)), dict(cache_seqlens=(3,)),
    dict(k=(1, 3, 2, 32), v=(1, 3, 2, 32)), dict(v=(2, 2, 2, 32)), dict(cache_leftpad=(3,)), dict(alibi_slopes=(3,)),
    dict(rotary_sin=(63, 16)), dict(cache_batch_idx=(3,)),
], ids=str)
def test_a_cache_that_does_not_fit(change):
    shapes = dict(q=(2, 4, 4, 32), k_cache=(2, 64, 2, 32), v_cache=(2, 64, 2, 32), k=(2, 3, 2, 32), v=(2, 3, 2, 32), cache_seqlens=(2,),
                  rotary_cos=(64, 16), rotary_sin=(64, 16)) | change
    integers = ("cache_seqlens", "cache_leftpad", "cache_batch_idx")
    given = {n: torch.ones(s, dtype=torch.int32, device=DEVICE) if n in integers else normal(
        *s, dtype=torch.float32 if n == "alibi_slopes" else torch.float16) for n, s in shapes.items()}
    with pytest.raises(fmha.FmhaError) as raised:
        fmha.flash_attn.flash_attn_with_kvcache(**given)
    assert "tensor." in raised.value.field or "tensor." in str(raised.value)


@torch.no_grad()
def test_lengths_that_are_expanded():
    q, k, v = (normal(3, n, 4, 32, dtype=torch.float32, seed=n) for n in (5, 40, 40))
    v = k.clone()
    one = torch.tensor([17], dtype=torch.int32, device=DEVICE)
    a = fmha.flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=one.expand(3))
    b = fmha.flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=one.repeat(3))
    assert torch.equal(a, b)


@pytest.mark.parametrize("shape", [(2, 4, 8, 1), (1, 1, 1, 1), (8, 1), ()])
def test_a_device_whose_kernels_do_not_sum_over_keys(shape, monkeypatch):
    monkeypatch.setattr(fmha.torch._functions, "_SUMS_KEYS", frozenset())
    test_masks_broadcast_as_in_torch(shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_masks_of_the_lowest_number(dtype):
    q, k, v = (normal(2, 4, 8, 32, dtype=dtype, seed=n) for n in range(3))
    mask = torch.zeros(8, 8, dtype=dtype, device=DEVICE)
    mask[3:] = torch.finfo(dtype).min
    mask[5, 2:] = 0
    with fmha.torch.replace_sdpa():
        found = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
    wanted = sdpa(q.float(), k.float(), v.float(), mask.float())
    if dtype == torch.float16:  # whose lowest number leaves scores their say
        found, wanted = found[:, :, :3], wanted[:, :, :3]
    torch.testing.assert_close(found.float(), wanted, rtol=2e-2, atol=2e-2)


@torch.no_grad()
def test_rows_behind_the_last_sequence():
    q, k, v = (normal(40, 4, 32, dtype=torch.float16, seed=n) for n in range(3))
    cu = torch.tensor([0, 12, 29], dtype=torch.int32, device=DEVICE)
    for _ in range(3):
        torch.full((40, 4, 32), float("nan"), dtype=torch.float16, device=DEVICE)  # freed at once: what is taken next
        o = fmha.flash_attn.flash_attn_varlen_func(q, k, v, cu, cu, 17, 17)
        assert not o[29:].any() and o[:29].isfinite().all()
