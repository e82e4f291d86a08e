# SPDX-License-Identifier: MIT
"""fmha.masks: each builder against its definition, pair by pair, and attention with masks as data against the formula."""
import importlib.util
import os
import pathlib
import re

import formula
import numpy as np
import pytest

import fmha
from fmha import masks

NIGHTLY = "FMHA_NIGHTLY" in os.environ


def by_definition(sees, rows, keys):
    return np.array([[bool(sees(i, j)) for j in range(keys)] for i in range(rows)])


def document(cu, i):
    return max(d for d in range(len(cu) - 1) if cu[d] <= i)


def ancestors(parents, i):
    return {i} | (ancestors(parents, parents[i]) if parents[i] >= 0 else set())


def neighbours(i, length, kernel, dilation=1, causal=False):
    """By counting: the kernel nearest of those that are a multiple of the dilation away."""
    group = range(i % dilation, length, dilation)
    if causal:
        return set([j for j in group if j <= i][-kernel:])
    first = min(max(group.index(i) - kernel // 2, 0), len(group) - kernel)
    return set(group[first : first + kernel])


CU = [0, 5, 5, 40, 64]
PARENTS = [-1, 0, 0, 1, 1, 2, -1, 6, 3, 3, 8]
SPANS = [(2, 9), (20, 31)]

BUILDERS = {
    "document": (masks.document_mask(CU), lambda i, j: document(CU, i) == document(CU, j)),
    "document_causal": (masks.document_mask(CU, causal=True), lambda i, j: document(CU, i) == document(CU, j) and j <= i),
    "prefix_lm": (masks.prefix_lm(13, 50), lambda i, j: j <= i or j < 13),
    "sliding": (masks.sliding(7, 3, 40, 60), lambda i, j: i + 20 - 7 <= j <= i + 20 + 3),
    "sliding_left": (masks.sliding(-1, 0, 40), lambda i, j: j <= i),
    "sliding_right": (masks.sliding(4, -1, 40), lambda i, j: j >= i - 4),
    "chunked": (masks.chunked(16, 70), lambda i, j: j <= i and i // 16 == j // 16),
    "chunked_cache": (masks.chunked(16, 10, 70), lambda i, j: j <= i + 60 and (i + 60) // 16 == j // 16),
    "shared_question": (masks.shared_question(20, [7, 0, 12]),
                        lambda i, j: j <= i and (j < 20 or (i < 27) == (j < 27))),
    "image_spans": (masks.image_spans(SPANS, 50), lambda i, j: j <= i or any(a <= i < b and a <= j < b for a, b in SPANS)),
    "tree": (masks.tree(PARENTS, 9), lambda i, j: j < 9 or j - 9 in ancestors(PARENTS, i)),
    "natten_1d": (masks.natten_1d(40, 7), lambda i, j: j in neighbours(i, 40, 7)),
    "natten_1d_causal": (masks.natten_1d(40, 7, causal=True), lambda i, j: j in neighbours(i, 40, 7, causal=True)),
    "natten_1d_dilated": (masks.natten_1d(43, 5, 4), lambda i, j: j in neighbours(i, 43, 5, 4)),
    "natten_2d": (masks.natten_2d(7, 9, (3, 5)),
                  lambda i, j: j // 9 in neighbours(i // 9, 7, 3) and j % 9 in neighbours(i % 9, 9, 5)),
    "natten_2d_dilated": (masks.natten_2d(8, 9, (3, 3), (2, 3), (True, False)),
                          lambda i, j: j // 9 in neighbours(i // 9, 8, 3, 2, True) and j % 9 in neighbours(i % 9, 9, 3, 3)),
    "from_function": (masks.from_function(lambda b, h, i, j: (i ^ j) % 5 != 0, 30, 44), lambda i, j: (i ^ j) % 5 != 0),
}


@pytest.mark.parametrize("name", BUILDERS)
def test_builder_sees_what_its_definition_does(name):
    mask, sees = BUILDERS[name]
    rows, keys = mask.shape[2:]
    assert np.array_equal(mask.dense()[0, 0], by_definition(sees, rows, keys))


def test_batches_of_prefixes_and_spans():
    mask = masks.prefix_lm([3, 0, 30], 25)
    for b, prefix in enumerate((3, 0, 30)):
        assert np.array_equal(mask.dense()[b, 0], by_definition(lambda i, j: j <= i or j < prefix, 25, 25))
    mask = masks.image_spans([[(0, 4)], [], [(3, 5), (9, 20)]], 20)
    for b, spans in enumerate(([(0, 4)], [], [(3, 5), (9, 20)])):
        seen = by_definition(lambda i, j: j <= i or any(x <= i < y and x <= j < y for x, y in spans), 20, 20)
        assert np.array_equal(mask.dense()[b, 0], seen)


def test_intervals_where_they_hold_it_else_bits():
    random = np.random.default_rng(1)
    for chance in (0.0, 0.02, 0.5, 0.98, 1.0):
        seen = random.random((2, 3, 33, 200)) < chance
        mask = masks.from_dense(seen)
        assert np.array_equal(mask.dense(), seen)
        assert isinstance(mask, masks.BitMask if chance == 0.5 else masks.IntervalMask)
        assert np.array_equal(masks.from_dense(seen, bits=True).dense(), seen)
    checkers = np.tile([True, False], (4, 40))
    assert isinstance(masks.from_dense(checkers), masks.BitMask)
    with pytest.raises(fmha.InvalidError, match="bits hold it"):
        masks.from_dense(checkers, bits=False)
    assert isinstance(masks.from_dense(checkers[:, :62], bits=False), masks.IntervalMask)  # 31 intervals: 61 endpoints


@pytest.mark.parametrize("call, said", [
    (lambda: masks.document_mask([1, 4]), "0 first"), (lambda: masks.document_mask([0, 4, 3]), "none below"),
    (lambda: masks.chunked(0, 8), "chunk is 0"), (lambda: masks.tree([1]), "a token before"),
    (lambda: masks.natten_1d(6, 7), "does not fit"), (lambda: masks.image_spans([(3, 9)], 8), "within 0 to 8"),
    (lambda: masks.IntervalMask(np.zeros((2, 5), np.int32), 9), "n odd"),
    (lambda: masks.IntervalMask(np.zeros((65, 5), np.int32), 9), "at most 63"),
    (lambda: masks.IntervalMask(np.zeros((3, 5)), 9), "integers are wanted"),
    (lambda: masks.BitMask(np.zeros((5, 3), np.uint8), 9), "uint8"), (lambda: masks.from_dense(np.zeros((3, 3))), "bool"),
])
def test_what_no_mask_is_named(call, said):
    with pytest.raises(fmha.InvalidError, match=said):
        call()


def test_pictures_and_work():
    mask = masks.document_mask([0, 128, 256], causal=False)
    assert mask.work() == (0.5, 0.5)
    assert masks.plot(mask, size=4) == "##..\n##..\n..##\n..##"
    picture = masks.svg(mask)
    assert picture.startswith("<svg") and "50.0% seen, 50.0% of 128 x 128 tiles" in picture
    assert masks.plot(masks.chunked(1, 3), size=3) == "#..\n.#.\n..#"
    assert "sees 50.0%" in repr(mask)


def test_the_pages_sketches_are_the_builders():
    page = (pathlib.Path(__file__).resolve().parents[2] / "docs/masks.md").read_text()
    found = re.findall(r"^    masks\.(\w+)(\(.*\))\n\n((?:    [#+.]+\n)+)", page, re.M)
    named = {n for n in masks.__all__ if n.islower()} - {"plot", "svg", "from_block_mask", "from_dense", "from_function"}
    assert {name for name, _, _ in found} == named
    for name, arguments, sketch in found:
        mask = eval(f"masks.{name}{arguments}", {"masks": masks})
        assert masks.plot(mask, size=16) == re.sub("^ +", "", sketch.rstrip(), flags=re.M), name


def numbers(random, *extents):
    return random.standard_normal(extents).astype(np.float32)


def judge(mask, random, batch=2, heads=4, kv_heads=2, window=(-1, -1), hdim=32, **said):
    """Forward and gradients with @mask against the formula with its definition."""
    _, _, rows, keys = mask.shape
    q, grad = numbers(random, batch, rows, heads, hdim), numbers(random, batch, rows, heads, hdim)
    k, v = numbers(random, batch, keys, kv_heads, hdim), numbers(random, batch, keys, kv_heads, hdim)
    o, lse = fmha.attention(q, k, v, mask=mask, window=window, return_lse=True, **said)
    got = fmha.attention_backward(grad, q, k, v, o, lse, mask=mask, window=window, **said)
    seen = mask.dense() & formula.visible(rows, keys, *window)
    for b in range(batch):
        mine = np.broadcast_to(seen[b % mask.shape[0]], (heads, rows, keys))
        want_o, want_lse, _ = formula.attention(q[b], k[b], v[b], seen=mine)
        assert np.abs(o[b] - want_o).max() < 2e-5
        finite = np.isfinite(want_lse)
        assert np.array_equal(np.isneginf(lse[b]), ~finite) and np.abs(lse[b][finite] - want_lse[finite]).max(initial=0) < 1e-4
        for mine_got, want in zip(got, formula.gradients(grad[b], q[b], k[b], v[b], seen=mine)):
            assert np.abs(mine_got[b] - want).max() < 3e-4
    return o


@pytest.mark.parametrize("name", BUILDERS)
def test_attention_by_builder(name):
    judge(BUILDERS[name][0], np.random.default_rng(len(name)))


def random_mask(random, rows, keys, batch, heads):
    n = int(random.choice([1, 3, 5, 7, 63]))
    batch, heads = (x if random.random() < 0.5 else 1 for x in (batch, heads))
    if random.random() < 0.25:
        return masks.BitMask(random.integers(0, 256, (batch, heads, rows, (keys + 7) // 8)).astype(np.uint8), keys)
    endpoints = random.integers(0, keys + 1, (batch, heads, n, rows))
    if random.random() < 0.5:
        endpoints.sort(2)
    if random.random() < 0.3:  # borders of tiles
        endpoints = endpoints // 64 * 64
    wild = random.random(endpoints.shape) < 0.05
    endpoints[wild] = random.choice([-1, -2**31, 2**31 - 1], wild.sum())
    endpoints[..., random.random(rows) < 0.1] = 0  # rows that see nothing
    return masks.IntervalMask(endpoints, keys)


def test_random_unions():
    random = np.random.default_rng(7)
    for _ in range(2000 if NIGHTLY else 60):
        rows, keys = (int(x) for x in random.integers(1, 260, 2))
        window = (-1, -1) if random.random() < 0.5 else (int(random.integers(-1, 80)), int(random.integers(-1, 20)))
        judge(random_mask(random, rows, keys, 2, 4), random, window=window, hdim=16)


def test_packed_sequences():
    random = np.random.default_rng(8)
    cu = np.array([0, 30, 30, 97, 160], np.int32)
    q, k, v = (numbers(random, 160, 4, 32) for _ in range(3))
    for mask in (masks.IntervalMask(np.sort(random.integers(0, 68, (4, 5, 160)), 1), 67),
                 masks.BitMask(random.integers(0, 256, (160, 9)).astype(np.uint8), 67)):
        o = fmha.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, mask=mask, causal=True)
        seen = mask.dense()[0]
        for first, end in zip(cu, cu[1:]):
            n = end - first
            mine = np.broadcast_to(seen[:, first:end, :n] & formula.visible(n, n, -1, 0), (4, n, n))
            want = formula.attention(q[first:end], k[first:end], v[first:end], seen=mine)[0] if n else q[:0]
            assert np.abs(o[first:end] - want).max(initial=0) < 2e-5


def test_rows_of_all_sequences_as_cudnn_has_them():
    random = np.random.default_rng(9)
    q, k, v = (numbers(random, 3, 40, 2, 16) for _ in range(3))
    endpoints = np.sort(random.integers(0, 41, (2, 3, 3 * 40)), 1).astype(np.int32)
    o = fmha.attention(q, k, v, mask=endpoints)
    mine = masks.IntervalMask(endpoints.reshape(2, 3, 3, 40).transpose(2, 0, 1, 3), 40)
    assert np.array_equal(o, fmha.attention(q, k, v, mask=mine))
    for b, seen in enumerate(mine.dense()):
        assert np.abs(o[b] - formula.attention(q[b], k[b], v[b], seen=seen)[0]).max() < 2e-5


def test_pages_and_splits():
    random = np.random.default_rng(10)
    q = numbers(random, 2, 5, 4, 32)
    pages_k, pages_v = numbers(random, 16, 16, 2, 32), numbers(random, 16, 16, 2, 32)
    table, used = random.permutation(16).reshape(2, 8).astype(np.int32), np.array([128, 77], np.int32)
    mask = masks.IntervalMask(np.sort(random.integers(0, 129, (2, 4, 5, 5)), 2), 128)
    whole = fmha.attention(q, pages_k, pages_v, block_table=table, seqlens_k=used, mask=mask)
    split = fmha.attention(q, pages_k, pages_v, block_table=table, seqlens_k=used, mask=mask, n_splits=3)
    for b in range(2):
        k, v = (p[table[b]].reshape(128, 2, 32)[: used[b]] for p in (pages_k, pages_v))
        want = formula.attention(q[b], k, v, seen=mask.dense()[b][..., : used[b]])[0]
        assert np.abs(whole[b] - want).max() < 2e-5 and np.abs(split[b] - want).max() < 2e-5


@pytest.mark.parametrize("mask, said", [
    (np.zeros((2, 30), np.int32), "mask_endpoints 2"), (np.zeros((3, 29), np.int32), "mask_intervals"),
    (np.zeros((3, 30), np.float32), "mask is float32"), (np.zeros((30, 5), np.uint8), "mask_bits"), ("causal", "mask is str"),
])
def test_masks_that_do_not_fit_are_named(mask, said):
    q = np.zeros((2, 30, 2, 16), np.float32)
    with pytest.raises(fmha.InvalidError, match=said):
        fmha.attention(q, q, q, mask=mask)


# ---- torch ----


with_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="no torch here")


def flex(q, k, v, sees):
    """torch's flex_attention in float64, heads first; and the same by a dense mask, which has gradients on a CPU."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

    extents = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
    block_mask, seen = create_block_mask(sees, *extents, device="cpu"), create_mask(sees, *extents, device="cpu")
    q, k, v = q.double(), k.double(), v.double()
    with torch.no_grad():
        o = flex_attention(q.detach(), k.detach(), v.detach(), block_mask=block_mask, enable_gqa=True)
    return o, torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True), block_mask


@with_torch
def test_block_masks_against_flex_attention():
    import torch

    import fmha.torch as ft

    cases = [(lambda b, h, i, j: (j <= i) & (i // 50 == j // 50), 170, 170), (lambda b, h, i, j: (i + j + h) % (3 + b) != 0, 90, 140),
             (lambda b, h, i, j: (i - j).abs() <= 9 + 4 * h, 150, 150)]
    for number, (sees, rows, keys) in enumerate(cases):
        torch.manual_seed(number)
        q = torch.randn(2, 4, rows, 32, requires_grad=True)
        k, v = (torch.randn(2, 2, keys, 32, requires_grad=True) for _ in range(2))
        grad = torch.randn(2, 4, rows, 32)
        by_flex, want, block_mask = flex(q, k, v, sees)
        mask = masks.from_block_mask(block_mask)
        assert isinstance(mask, masks.BitMask if number == 1 else masks.IntervalMask)
        o = ft.attention(q, k, v, layout="bhsd", mask=mask)
        got, wanted = (torch.autograd.grad(x, (q, k, v), grad.to(x.dtype)) for x in (o, want))
        assert (o - by_flex).abs().max() < 2e-5
        assert all((a - b).abs().max() < 3e-4 for a, b in zip(got, wanted))


@with_torch
def test_flash_attn_functions_take_masks():
    import torch

    from fmha.flash_attn import flash_attn_func, flash_attn_varlen_func

    torch.manual_seed(3)
    q, k, v = (torch.randn(2, 96, 4, 32, requires_grad=True) for _ in range(3))
    mask = masks.chunked(32, 96)
    o = flash_attn_func(q, k, v, mask=mask)
    seen = torch.from_numpy(mask.dense())
    want = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), attn_mask=seen).transpose(1, 2)
    grad = torch.randn_like(o)
    assert (o - want).abs().max() < 2e-5
    for a, b in zip(torch.autograd.grad(o, (q, k, v), grad), torch.autograd.grad(want, (q, k, v), grad)):
        assert (a - b).abs().max() < 2e-4
    cu = torch.tensor([0, 96, 192], dtype=torch.int32)
    packed = masks.IntervalMask(np.tile(mask.data, (1, 1, 1, 2)), 96)
    o = flash_attn_varlen_func(*(t.flatten(0, 1) for t in (q, k, v)), cu, cu, 96, 96, mask=packed)
    assert (o.unflatten(0, (2, 96)) - want).abs().max() < 2e-5
    with torch.no_grad():  # what has no gradient goes another way
        out = torch.empty_like(q)
        flash_attn_func(q, k, v, mask=mask, out=out)
    assert (out - want).abs().max() < 2e-5


@with_torch
def test_endpoints_beyond_32_bits_are_behind_all_keys():
    import torch

    import fmha.torch as ft

    q, k, v = (torch.randn(1, 20, 2, 16) for _ in range(3))
    everything = torch.full((1, 1, 20), 2**32)
    assert torch.equal(ft.attention(q, k, v, mask=everything), ft.attention(q, k, v))
    assert torch.equal(fmha.attention(q, k, v, mask=everything), ft.attention(q, k, v))


@with_torch
def test_masks_in_a_graph():
    import torch

    import fmha.torch as ft

    mask = masks.document_mask([0, 20, 64], causal=True)
    q, k, v = (torch.randn(1, 64, 2, 16, requires_grad=True) for _ in range(3))
    endpoints = mask.beside(q)

    def attend(q, k, v):
        return ft.attention(q, k, v, mask=endpoints)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    o, want = compiled(q, k, v), attend(q, k, v)
    assert torch.equal(o, want)
    for a, b in zip(torch.autograd.grad(o.sum(), (q, k, v)), torch.autograd.grad(want.sum(), (q, k, v))):
        assert torch.equal(a, b)
