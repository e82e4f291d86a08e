# SPDX-License-Identifier: MIT
"""Arrays of the wrong extents, through every function and every argument: an error that names the tensor, or the right
result. What is given ends at a page that nobody may read, so that a byte too many ends the test."""
import ctypes
import itertools
import mmap

import numpy as np
import pytest

import fmha

libc = ctypes.CDLL(None, use_errno=True)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
rng = np.random.default_rng(3)
B, S, T, H, G, D = 2, 12, 20, 4, 2, 32  # batch, rows, keys, heads, heads of K, head dim


def guarded(array):
    """A copy whose last byte lies in front of an inaccessible page; strides of 0 stay."""
    array = np.asarray(array)
    shape = tuple(e if s else min(e, 1) for e, s in zip(array.shape, array.strides))  # expanded axes are one element
    bytes_needed = max(int(np.prod(shape, dtype=np.int64)) * array.itemsize, 1)
    pages = -(-bytes_needed // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, pages + mmap.PAGESIZE)
    end = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + pages
    assert libc.mprotect(end, mmap.PAGESIZE, 0) == 0
    size = int(np.prod(shape, dtype=np.int64))
    copy = np.frombuffer(memory, array.dtype, size, pages - size * array.itemsize).reshape(shape)
    copy[...] = array[tuple(slice(0, e) for e in shape)]
    return np.broadcast_to(copy, array.shape) if shape != array.shape else copy


def floats(*shape):
    return rng.standard_normal(shape, dtype=np.float32)


def ints(*values):
    return np.array(values, np.int32)


def forward(**more):
    return fmha.attention, dict(q=floats(B, S, H, D), k=floats(B, T, G, D), v=floats(B, T, G, D), **more)


def packed(**more):
    return fmha.attention, dict(q=floats(20, H, D), k=floats(30, G, D), v=floats(30, G, D), cu_seqlens_q=ints(0, 12, 20),
                                cu_seqlens_k=ints(0, 18, 30), max_seqlen_q=12, max_seqlen_k=18, **more)


def backward():
    _, given = forward(bias=floats(B, H, S, T), sink=floats(H))
    o, lse = fmha.attention(**given, return_lse=True)
    return fmha.attention_backward, dict(grad=floats(*o.shape), o=o, lse=lse, want_dbias=True, **given)


def append():
    return fmha.append_kv, dict(k=floats(B, T, G, D), v=floats(B, T, G, D), k_new=floats(B, 3, G, D), v_new=floats(B, 3, G, D),
                                seqlens_k=ints(4, 9), rotary_cos=floats(32, D // 2), rotary_sin=floats(32, D // 2))


CALLS = {
    "plain": lambda: forward(bias=floats(B, H, S, T), sink=floats(H), out=np.zeros((B, S, H, D), np.float32)),
    "alibi": lambda: forward(alibi_slopes=floats(B, H), seqlens_q=ints(S, 7), seqlens_k=ints(T, 5)),
    "cache": lambda: forward(cache_batch_idx=ints(1, 0), leftpad_k=ints(1, 2)),
    "packed": packed,
    "paged": lambda: (fmha.attention, dict(q=floats(B, 1, H, D), k=floats(6, 16, G, D), v=floats(6, 16, G, D), seqlens_k=ints(30, 9),
                                           block_table=ints(0, 5, 1, 2).reshape(2, 2))),
    "backward": backward,
    "append": append,
    "merge": lambda: (fmha.merge_states, dict(o_parts=floats(3, B, S, H, D), lse_parts=floats(3, B, H, S), sink=floats(H))),
}


def bent(array):
    """(fault, array) of each axis and kind of fault."""
    for axis, extent in enumerate(array.shape):
        for name, size in (("1", 1), ("-1", extent - 1), ("+1", extent + 1), ("0", 0)):
            if size != extent and size >= 0:
                yield f"axis {axis}: {name}", np.resize(array, tuple(size if i == axis else e for i, e in enumerate(array.shape)))
        yield f"axis {axis}: expanded", np.broadcast_to(np.take(array, [0], axis), array.shape)
    yield "rank + 1", array[None]
    yield "rank - 1", array[0]
    yield "0-d", array.reshape(-1)[0]


def as_said(given, name, array):
    """The same problem by arrays that say all in full; None: there is none, an error is due."""
    broadcasts = {"bias": (B, H, S, T), "alibi_slopes": (B, H)}
    if name == "alibi_slopes" and array.shape[-1:] != (H,):
        return None  # heads do not broadcast
    if name in broadcasts and "grad" not in given:
        try:
            return given | {name: np.ascontiguousarray(np.broadcast_to(array, broadcasts[name]))}
        except ValueError:
            return None
    if array.shape == given[name].shape and name != "out" and not ("k_new" in given and name in ("k", "v")):
        return given | {name: np.ascontiguousarray(array)}
    return None


# Other extents of these make another problem, which is as sound.
FREE = {
    "plain": {("q", 1), ("k", 1)}, "paged": {("q", 1), ("k", 0), ("v", 3), ("block_table", 1)}, "cache": {("q", 1), ("v", 3)},
    "packed": {("q", 0), ("v", 2)}, "alibi": {("q", 1), ("v", 3)}, "backward": set(), "append": {("rotary_cos", 0)},
    "merge": {("o_parts", 4)},
}


@pytest.mark.parametrize("kind", CALLS)
def test_wrong_extents_are_named_or_right(kind):
    call, given = CALLS[kind]()
    n_errors = n_right = 0
    for name, array in given.items():
        if not isinstance(array, np.ndarray):
            continue
        for fault, other in bent(array):
            arrays = {n: guarded(a) if isinstance(a, np.ndarray) else a for n, a in given.items()}
            arrays[name] = guarded(other)
            want = as_said(given, name, np.asarray(other))
            try:
                found = call(**arrays)
            except fmha.FmhaError as e:
                n_errors += 1
                assert str(e) and (want is None or e.code == "ENOTSUP"), (kind, name, fault, str(e))
                continue
            except ValueError as e:  # arrays of one element more or less, which numpy itself refuses
                raise AssertionError((kind, name, fault)) from e
            if want is None:  # it was another problem: its result has another shape, or the array was used as it is
                assert fits_another_problem(name, np.asarray(other), given, kind), (kind, name, fault)
                continue
            n_right += 1
            for a, b in zip(flat(found), flat(call(**want))):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5, err_msg=f"{kind} {name} {fault}")
    assert n_errors > 10 and n_right > 0


def fits_another_problem(name, other, given, kind):
    """One axis that no other array has, so that its extent alone says it."""
    old = given[name].shape
    if name == "bias" and kind == "backward":  # its gradient has its extents
        return len(other.shape) <= 4 and all(a in (1, b) for a, b in zip(other.shape[::-1], old[::-1]))
    return len(other.shape) == len(old) and any((name, i) in FREE[kind] for i, (a, b) in enumerate(zip(other.shape, old)) if a != b)


def flat(found):
    return found if isinstance(found, tuple) else () if found is None else (found,)


@pytest.mark.parametrize("axes", itertools.product((False, True), repeat=4))
def test_a_bias_broadcasts_along_any_axis(axes):
    call, given = forward()
    bias = floats(*(1 if one else e for one, e in zip(axes, (B, H, S, T))))
    full = np.ascontiguousarray(np.broadcast_to(bias, (B, H, S, T)))
    np.testing.assert_allclose(call(**given, bias=bias), call(**given, bias=full), rtol=1e-5, atol=1e-5)
    o, lse = call(**given, bias=bias, return_lse=True)
    grad = floats(*o.shape)
    one = fmha.attention_backward(grad, o=o, lse=lse, bias=bias, want_dbias=True, **given)
    all_ = fmha.attention_backward(grad, o=o, lse=lse, bias=full, want_dbias=True, **given)
    for a, b in zip(one[:3], all_[:3]):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    summed = tuple(i for i, is_one in enumerate(axes) if is_one)
    np.testing.assert_allclose(one[3], all_[3].sum(axis=summed, keepdims=True), rtol=1e-3, atol=1e-4)


def test_an_expanded_bias_has_a_gradient_for_each_element():
    _, given = forward()
    bias = np.broadcast_to(floats(1, 1, S, T), (B, H, S, T))
    o, lse = fmha.attention(**given, bias=bias, return_lse=True)
    grad = floats(*o.shape)
    expanded = fmha.attention_backward(grad, o=o, lse=lse, bias=bias, want_dbias=True, **given)[3]
    full = fmha.attention_backward(grad, o=o, lse=lse, bias=bias.copy(), want_dbias=True, **given)[3]
    assert expanded.shape == (B, H, S, T)
    np.testing.assert_allclose(expanded, full, rtol=1e-4, atol=1e-5)


def test_arrays_that_run_backwards():
    call, given = forward()
    turned = {n: a[:, ::-1] for n, a in given.items()}
    np.testing.assert_allclose(call(**turned), call(**{n: a.copy() for n, a in turned.items()}), rtol=1e-5, atol=1e-6)
    with pytest.raises(fmha.InvalidError, match="negative strides"):
        call(**given, out=np.zeros((B, S, H, D), np.float32)[:, ::-1])


def test_rows_of_no_sequence_are_zero():
    call, given = packed()
    given |= dict(cu_seqlens_q=ints(0, 12, 17), cu_seqlens_k=ints(0, 18, 25))
    for _ in range(3):  # memory that has been used before
        o, lse = call(**given, return_lse=True)
        assert not o[17:].any() and o[:17].all()
        assert np.isneginf(lse[:, 17:]).all() and np.isfinite(lse[:, :17]).all()
        dq, dk, dv = fmha.attention_backward(floats(*o.shape), o=o, lse=lse, **given)
        assert not dq[17:].any() and not dk[25:].any() and not dv[25:].any()


@pytest.mark.parametrize("rows, heads", [(S, H), (1, H), (70, G)])  # loops for many rows, for few, and over more tiles
@pytest.mark.parametrize("value", [np.finfo(np.float32).min, np.finfo(np.float32).max, -3e38, 3e38])
def test_a_row_of_the_largest_numbers_is_an_average(value, rows, heads):
    q, k, v = floats(B, rows, heads, D), floats(B, T, G, D), floats(B, T, G, D)
    bias = np.zeros((B, heads, rows, T), np.float32)
    bias[:, :, 0] = value
    o, lse = fmha.attention(q, k, v, bias=bias, return_lse=True)
    plain = fmha.attention(q, k, v)
    mean = np.repeat(v.mean(1), heads // G, axis=1)
    np.testing.assert_allclose(o[:, 0], mean, atol=1e-5)
    np.testing.assert_allclose(o[:, 1:], plain[:, 1:], atol=1e-5)
    assert np.isfinite(lse).all()
    bias[:, :, 0, 1:] = -np.inf
    np.testing.assert_allclose(fmha.attention(q, k, v, bias=bias)[:, 0], np.repeat(v[:, 0], heads // G, axis=1), atol=1e-5)
    bias[:, :, 0] = -np.inf
    assert not fmha.attention(q, k, v, bias=bias)[:, 0].any()


def test_one_of_the_largest_numbers_takes_it_all():
    call, given = forward()
    bias = np.zeros((B, H, S, T), np.float32)
    bias[..., 3] = 3e38
    np.testing.assert_allclose(call(**given, bias=bias), np.repeat(given["v"][:, 3:4], H // G, axis=2).repeat(S, axis=1), atol=1e-6)
