# SPDX-License-Identifier: MIT
"""fmha.attention and its siblings on numpy arrays, against float64 formulas."""
import gc
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import fmha
import formula


def normal(*shape, dtype=np.float32, seed=1):
    return np.random.default_rng(seed + sum(shape)).standard_normal(shape).astype(dtype)


def qkv(batch=2, rows=37, keys=53, heads=4, kv_heads=2, hdim=64, dtype=np.float32):
    return (normal(batch, rows, heads, hdim, dtype=dtype), normal(batch, keys, kv_heads, hdim, dtype=dtype, seed=2),
            normal(batch, keys, kv_heads, hdim, dtype=dtype, seed=3))


def expect(q, k, v, **options):
    found = [formula.attention(*one, **options) for one in zip(q, k, v)]
    return np.stack([f[0] for f in found]), np.stack([f[1] for f in found])


@pytest.mark.parametrize("options, words", [
    ({}, {}),
    ({"causal": True}, {"right": 0}),
    ({"causal": True, "align": "top_left"}, {"right": 0, "corner": "top_left"}),
    ({"window": (9, 4)}, {"left": 9, "right": 4}),
    ({"window": (9, 4), "causal": True}, {"left": 9, "right": 0}),
    ({"window": (5, 0), "sink_tokens": 3}, {"left": 5, "right": 0, "sink_tokens": 3}),
])
def test_masks(options, words):
    q, k, v = qkv()
    o, lse = fmha.attention(q, k, v, return_lse=True, **options)
    want_o, want_lse = expect(q, k, v, seen=formula.visible(37, 53, **words))
    np.testing.assert_allclose(o, want_o, atol=3e-6)
    np.testing.assert_allclose(lse, want_lse, atol=3e-6)


@pytest.mark.parametrize("hdim", [1, 59, 100, 255, 300, 512])
def test_any_head_dim(hdim):
    q, k, v = qkv(hdim=hdim)
    o, lse = fmha.attention(q, k, v, return_lse=True)
    want_o, want_lse = expect(q, k, v)
    np.testing.assert_allclose(o, want_o, atol=5e-6)
    np.testing.assert_allclose(lse, want_lse, atol=5e-6)


def test_logits():
    q, k, v = qkv()
    slopes, sink = np.float32([0.5, 0.25, 0.125, 1]), np.float32([0.1, -1, 2, 0])
    for options, words in (
        ({"softcap": 3.0}, {"softcap": 3.0}), ({"softcap": 3.0, "softcap_approx": True}, {"softcap": 3.0}),
        ({"scale": 0.3}, {"scale": 0.3}), ({"alibi_slopes": slopes}, {"slopes": slopes}), ({"sink": sink}, {"sink": sink}),
    ):
        o, lse = fmha.attention(q, k, v, return_lse=True, **options)
        want_o, want_lse = expect(q, k, v, **words)
        np.testing.assert_allclose(o, want_o, atol=3e-6, err_msg=str(options))
        np.testing.assert_allclose(lse, want_lse, atol=3e-6, err_msg=str(options))


@pytest.mark.parametrize("shape", [(37, 53), (1, 53), (4, 37, 53), (1, 4, 37, 53), (2, 1, 37, 53), (2, 4, 1, 53), (2, 4, 37, 53)])
def test_a_bias_broadcasts_as_numpy_does(shape):
    q, k, v = qkv()
    bias = normal(*shape)
    wide = np.broadcast_to(bias, (2, 4, 37, 53))
    want = np.stack([formula.attention(*one, bias=b)[0] for *one, b in zip(q, k, v, wide)])
    np.testing.assert_allclose(fmha.attention(q, k, v, bias=bias), want, atol=3e-6)


@pytest.mark.parametrize("layout, order", [("bshd", (0, 1, 2, 3)), ("bhsd", (0, 2, 1, 3)), ("sbhd", (1, 0, 2, 3))])
def test_layouts_and_strides(layout, order):
    q, k, v = qkv()
    want = expect(q, k, v)[0].transpose(order)
    packed = [np.ascontiguousarray(x.transpose(order)) for x in (q, k, v)]
    views = [x.transpose(order) for x in (q, k, v)]
    for arrays in (packed, views):
        np.testing.assert_allclose(fmha.attention(*arrays, layout=layout), want, atol=3e-6)


def test_types():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for dtype, bar in ((np.float16, 2e-3), (ml_dtypes.bfloat16, 2e-2)):
        q, k, v = qkv(dtype=dtype)
        o = fmha.attention(q, k, v, causal=True)
        assert o.dtype == dtype
        np.testing.assert_allclose(o.astype(np.float64), expect(q, k, v, seen=formula.visible(37, 53, right=0))[0], atol=bar)


def test_float16_needs_numpy_alone():
    q, k, v = qkv(dtype=np.float16)
    np.testing.assert_allclose(fmha.attention(q, k, v).astype(np.float64), expect(q, k, v)[0], atol=2e-3)


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("hdim", [64, 59])
def test_a_cache_of_int8(rows, hdim):
    """Every number of it, in pages of any order, beside pages that nobody has; a factor of each key, NaN where there is none."""
    rng, keys, size = np.random.default_rng(rows), 100, 16
    q = normal(2, rows, 4, hdim, dtype=np.float16)
    table = rng.permutation(2 * 7 + 2)[:14].reshape(2, 7).astype(np.int32)
    cache = {n: np.full((16, size, 2, hdim), -128, np.int8) for n in "kv"}
    factors = {n: np.full((16, 2, size), np.nan, np.float32) for n in "kv"}
    means = {n: np.empty((2, keys, 2, hdim)) for n in "kv"}
    for n, b, j in itertools.product("kv", range(2), range(keys)):
        place = table[b, j // size], j % size
        cache[n][place] = rng.integers(-128, 128, (2, hdim))
        factors[n][place[0], :, place[1]] = rng.uniform(0.01, 0.02, 2)
        means[n][b, j] = cache[n][place] * factors[n][place[0], :, place[1], None].astype(float)
    o, lse = fmha.attention(q, cache["k"], cache["v"], k_descale=factors["k"], v_descale=factors["v"], descale_per_page=True,
                            descale_block_k=1, block_table=table, seqlens_k=np.full(2, keys, np.int32), return_lse=True, causal=True)
    want_o, want_lse = expect(q.astype(float), means["k"], means["v"], seen=formula.visible(rows, keys, right=0))
    np.testing.assert_allclose(o, want_o, atol=4e-3)
    np.testing.assert_allclose(lse, want_lse, atol=2e-5)
    for bad in (16, -1, 2**31 - 1):
        wild = table.copy()
        wild[1, 2] = bad
        with pytest.raises(fmha.InvalidError, match="block_table"):
            fmha.attention(q, cache["k"], cache["v"], block_table=wild, seqlens_k=np.full(2, keys, np.int32))
    with pytest.raises(fmha.InvalidError, match="tensor.q.dtype: i8, must be f16 or bf16"):
        fmha.attention(cache["k"][:2], cache["k"][:2], cache["v"][:2])


def test_appending_to_a_cache_of_int8():
    """To nearest even, as much of either sign, by the row's own factor: its largest over 127. A NaN is 0."""
    cache = [np.full((3, 16, 2, 32), 77, np.int8) for _ in range(2)]
    new = [normal(4, 2, 32, dtype=np.float16, seed=s) for s in (1, 2)]
    new[1][0, 0, 5] = np.nan
    slots, found = np.array([20, -1, 3, 47]), [np.zeros((3, 2, 16), np.float32) for _ in range(2)]
    fmha.append_kv(*cache, *new, slot_mapping=slots, k_descale=found[0], v_descale=found[1], find_descales=True)
    for kept, rows, factors in zip(cache, new, found):
        want, want_factors = np.full((48, 2, 32), 77, np.int8), np.zeros((48, 2), np.float32)
        for slot, row in zip(slots, rows.astype(np.float32)):
            if slot >= 0:
                want_factors[slot] = np.nanmax(np.abs(row), -1) / np.float32(127)
                want[slot] = np.rint(np.nan_to_num(row / want_factors[slot][:, None])).clip(-127, 127)
        assert (kept.reshape(48, 2, 32) == want).all() and (factors.transpose(0, 2, 1).reshape(48, 2) == want_factors).all()
    given = np.array([0.01, 0.02], np.float32)[None]
    fmha.append_kv(*cache, *new, slot_mapping=np.array([40, 41, 42, -1]), k_descale=given, v_descale=given)
    want = np.rint((new[0].astype(np.float32)[:3] / given[0][:, None]).clip(-127, 127))
    assert (cache[0][2, 8:11] == want).all()
    before = [c.copy() for c in cache]
    for bad in ([1, 2, 48, -1], [-2, 1, 2, 3], [2**62, 1, 2, 3]):
        with pytest.raises(fmha.InvalidError, match="slot_mapping"):
            fmha.append_kv(*cache, *new, slot_mapping=np.array(bad), k_descale=given, v_descale=given)
    with pytest.raises(fmha.InvalidError, match="no positive number"):
        fmha.append_kv(*cache, *new, slot_mapping=np.array([1, 2, 3, 4]), k_descale=given, v_descale=given * np.float32(np.nan))
    assert all((c == b).all() for c, b in zip(cache, before))


def test_packed_sequences():
    lengths_q, lengths_k = [5, 0, 33], [30, 8, 90]
    cu_q, cu_k = np.cumsum([0, *lengths_q]), np.cumsum([0, *lengths_k]).tolist()
    q, k, v = normal(38, 4, 64), normal(128, 2, 64, seed=2), normal(128, 2, 64, seed=3)
    o, lse = fmha.attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True, return_lse=True)
    for n in range(3):
        rows, keys = slice(cu_q[n], cu_q[n + 1]), slice(cu_k[n], cu_k[n + 1])
        want, want_lse, _ = formula.attention(q[rows], k[keys], v[keys], seen=formula.visible(lengths_q[n], lengths_k[n], right=0))
        np.testing.assert_allclose(o[rows], want, atol=3e-6)
        np.testing.assert_allclose(lse[:, rows], want_lse, atol=3e-6)


def test_paged_caches_of_both_kinds():
    pages, page, lengths = 11, 16, np.int32([33, 70])
    k, v = normal(pages, page, 2, 64), normal(pages, page, 2, 64, seed=2)
    table = np.int32([[3, 1, 7, 0, 0], [2, 9, 4, 10, 5]])
    q = normal(2, 1, 4, 64)
    flat = [[np.concatenate(x[row])[:n] for row, n in zip(table, lengths)] for x in (k, v)]
    want = np.stack([formula.attention(*one)[0] for one in zip(q, *flat)])
    np.testing.assert_allclose(fmha.attention(q, k, v, block_table=table, seqlens_k=lengths), want, atol=3e-6)
    sglang = fmha.attention(q, k, v, kv_indptr=[0, 3, 8], kv_page_indices=[3, 1, 7, 2, 9, 4, 10, 5], kv_last_page_len=[1, 6],
                            max_seqlen_k=80)
    np.testing.assert_allclose(sglang, want, atol=3e-6)


@pytest.mark.parametrize("options, words", [({}, {}), ({"causal": True}, {"right": 0}), ({"window": (7, 2)}, {"left": 7, "right": 2})])
def test_gradients(options, words):
    q, k, v = qkv()
    grad = normal(*q.shape, seed=9)
    o, lse = fmha.attention(q, k, v, return_lse=True, **options)
    found = fmha.attention_backward(grad, q, k, v, o, lse, **options)
    each = [formula.gradients(*one, seen=formula.visible(37, 53, **words)) for one in zip(grad, q, k, v)]
    for name, got, want in zip(("dq", "dk", "dv"), found, zip(*each)):
        np.testing.assert_allclose(got, np.stack(want), atol=2e-5, err_msg=name)


def test_the_gradient_that_reaches_lse():
    """dS = P * dlse, and nothing for V, where a loss depends on LSE alone."""
    q, k, v = qkv()
    o, lse = fmha.attention(q, k, v, return_lse=True)
    dlse = normal(*lse.shape, seed=4)
    dq, dk, dv = fmha.attention_backward(np.zeros_like(o), q, k, v, o, lse, dlse=dlse)
    for b in range(len(q)):
        ds = formula.attention(q[b], k[b], v[b])[2] * dlse[b][..., None] / 8
        want_k = np.einsum("hij,ihd->jhd", ds, q[b]).reshape(53, 2, 2, 64).sum(2)
        np.testing.assert_allclose(dq[b], np.einsum("hij,jhd->ihd", ds, np.repeat(k[b], 2, 1)), atol=1e-5)
        np.testing.assert_allclose(dk[b], want_k, atol=1e-5)
    assert not dv.any()


def test_the_gradients_of_bias_and_sink_are_slopes():
    """By central differences of sum(grad * O)."""
    q, k, v = qkv(batch=1, rows=5, keys=7, heads=2, kv_heads=2, hdim=32)
    bias, sink, grad = normal(2, 5, 7), np.float32([0.3, -0.2]), normal(1, 5, 2, 32, seed=5)
    o, lse = fmha.attention(q, k, v, bias=bias, sink=sink, return_lse=True)
    *_, dbias, dsink = fmha.attention_backward(grad, q, k, v, o, lse, bias=bias, sink=sink, want_dbias=True)

    def loss(bias, sink):
        return (formula.attention(q[0], k[0], v[0], bias=bias, sink=sink)[0] * grad[0]).sum()

    step = 1e-4
    for at in itertools.product(range(2), (0, 4), (0, 6)):
        bump = np.zeros(bias.shape)
        bump[at] = step
        assert dbias[at] == pytest.approx((loss(bias + bump, sink) - loss(bias - bump, sink)) / (2 * step), abs=1e-3)
    for head in range(2):
        bump = step * np.eye(2)[head]
        assert dsink[head] == pytest.approx((loss(bias, sink + bump) - loss(bias, sink - bump)) / (2 * step), abs=1e-3)


def test_dropout_keeps_what_its_bytes_say():
    q, k, v = qkv(batch=1)
    o, randval = fmha.attention(q, k, v, dropout_p=0.25, seed=7, offset=40, return_randval=True)
    keep = randval[0] <= np.floor(255 * 0.75)
    p = formula.attention(q[0], k[0], v[0])[2] * keep / 0.75
    np.testing.assert_allclose(o[0], np.einsum("hij,jhd->ihd", p, np.repeat(v[0], 2, 1)), atol=3e-6)
    again = fmha.attention(q, k, v, dropout_p=0.25, seed=7, offset=40)
    assert np.array_equal(o, again)
    assert not np.array_equal(again, fmha.attention(q, k, v, dropout_p=0.25)), "no seed: a fresh one"


def test_merging_states_of_either_base():
    q, k, v = qkv()
    halves = [fmha.attention(q, k[:, part], v[:, part], return_lse=True) for part in (slice(0, 20), slice(20, 53))]
    parts, lses = (np.stack(x) for x in zip(*halves))
    want, want_lse = expect(q, k, v)
    o, lse = fmha.merge_states(parts, lses)
    np.testing.assert_allclose(o, want, atol=3e-6)
    np.testing.assert_allclose(lse, want_lse, atol=3e-6)
    o, lse = fmha.merge_states(parts, lses * np.float32(np.log2(np.e)), lse_base=2)
    np.testing.assert_allclose(o, want, atol=3e-6)
    np.testing.assert_allclose(lse, want_lse * np.log2(np.e), atol=1e-5)


def test_appending_rotates_by_the_position():
    k, v = np.zeros((2, 32, 2, 64), np.float32), np.zeros((2, 32, 2, 64), np.float32)
    new_k, new_v = normal(2, 3, 2, 64), normal(2, 3, 2, 64, seed=2)
    angles = np.arange(40)[:, None] / 10000 ** (np.arange(16)[None] / 16)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    before = np.int32([4, 11])
    fmha.append_kv(k, v, new_k, new_v, seqlens_k=before, rotary_cos=cos, rotary_sin=sin)
    for b, row in itertools.product(range(2), range(3)):
        at = before[b] + row
        x, y = new_k[b, row, :, :16], new_k[b, row, :, 16:32]
        c, s = cos[at], sin[at]
        np.testing.assert_allclose(k[b, at, :, :32], np.concatenate([x * c - y * s, x * s + y * c], -1), atol=1e-6)
        assert np.array_equal(k[b, at, :, 32:], new_k[b, row, :, 32:]) and np.array_equal(v[b, at], new_v[b, row])
    assert not k[0, :4].any() and not k[0, 7:].any() and not v[1, :11].any() and not v[1, 14:].any()


# ---- memory ----


def test_arrays_of_empty_are_used_where_they_lie():
    q, k, v = qkv()
    shared = [fmha.empty(x.shape) for x in (q, k, v)]
    for mine, theirs in zip(shared, (q, k, v)):
        mine[...] = theirs
    out = fmha.empty(q.shape)
    assert fmha.attention(*shared, out=out) is out
    np.testing.assert_allclose(out, expect(q, k, v)[0], atol=3e-6)
    part = fmha.attention(shared[0][:, 5:20], shared[1], shared[2])
    np.testing.assert_allclose(part, expect(q[:, 5:20], k, v)[0], atol=3e-6)


def status():
    done = subprocess.run([fmha._start.program("fmhactl"), "status", "--json"], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def used_by(pid):
    return len(os.listdir(f"/proc/{pid}/fd")), len(open(f"/proc/{pid}/maps").read().splitlines())


def test_arrays_of_changing_sizes_leave_nothing_behind():
    def round_of(n):
        for i in range(n):
            a = fmha.empty((1, 1 + i % 7, 1, 32))
            fmha.attention(a, a, a, out=a.copy())

    round_of(300)
    gc.collect()
    before = used_by(os.getpid())
    round_of(1000)
    gc.collect()
    after = used_by(os.getpid())
    assert after[0] <= before[0] + 2 and after[1] <= before[1] + 8, (before, after)


def test_ten_thousand_sizes_grow_neither_side():
    """Counted: what the daemon says of this session, and what this process holds."""
    random = np.random.default_rng(1)

    def round_of(n):
        for _ in range(n):
            x = np.ones((1, random.integers(1, 4000), 1, 8), np.float32)
            fmha.attention(x[:, :3], x, x)
        gc.collect()
        (session,) = [s for s in status()["devices"][0]["worker"]["sessions"] if s["pid"] == os.getpid()]
        return [session[n] for n in ("buffers", "memory_bytes", "plans", "events")], [len(fmha._run._kept.runs), *used_by(os.getpid())]

    (daemons, mine), (daemons_later, mine_later) = round_of(5000), round_of(5000)
    # A plan holds for a range of lengths: a range that few numbers are in may be drawn late.
    assert max(daemons[2], daemons_later[2]) <= 64
    del daemons[2], daemons_later[2]
    assert daemons_later == daemons and daemons[0] <= 8
    assert max(mine[0], mine_later[0]) <= fmha._run.KEPT
    assert mine_later[1] <= mine[1] and mine_later[2] <= mine[2] + 8


def test_a_call_asks_the_front_nothing():
    x = np.ones((1, 4, 1, 32), np.float32)
    fmha.attention(x, x, x)
    frames = status()["front"]["frames"]
    for _ in range(500):
        fmha.attention(x, x, x)
    assert status()["front"]["frames"] - frames < 250  # of status, and of a worker that is alive


# ---- misuse ----


@pytest.mark.parametrize("change, said", [
    ({"q": lambda q: q.astype(np.float64)}, "float64"),
    ({"q": lambda q: q[0]}, "3 dimensions"),
    ({"q": lambda q: q[..., :32]}, "k's heads have 64"),
    ({"k": lambda k: np.repeat(k, 3, 2)[:, :, :3], "v": lambda v: np.repeat(v, 3, 2)[:, :, :3]}, "no multiple"),
    ({"v": lambda v: v[:, :20]}, "v is"),
    ({"k": lambda k: k.astype(np.float16), "v": lambda v: v}, "must be f16"),
    ({"q": lambda q: q.tolist()}, "list, not an array"),
])
def test_wrong_arrays_are_named(change, said):
    arrays = dict(zip("qkv", qkv()))
    arrays = {n: change.get(n, lambda x: x)(a) for n, a in arrays.items()}
    with pytest.raises(ValueError) as caught:
        fmha.attention(**arrays)
    assert said in str(caught.value) + " " + caught.value.field and caught.value.code == "EINVAL"


def test_wrong_words_are_named():
    q, k, v = qkv()
    for options, said in (({"layout": "bdsh"}, "layout"), ({"align": "left"}, "align"), ({"out": np.zeros((1, 1, 1, 1), np.float32)}, "o"),
                          ({"dropout_p": 1.5}, "dropout"), ({"scale": float("inf")}, "scale")):
        with pytest.raises(fmha.InvalidError) as caught:
            fmha.attention(q, k, v, **options)
        assert said in str(caught.value) + caught.value.field
    with pytest.raises(TypeError):
        fmha.attention(q, k, v, casual=True)


def test_an_output_that_cannot_be_written_is_refused():
    q, k, v = qkv()
    out = np.zeros(q.shape, np.float32)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        fmha.attention(q, k, v, out=out)


# ---- processes and threads ----


def test_threads_compute_at_once():
    q, k, v = qkv(rows=200, keys=200)
    want, wrong = expect(q, k, v)[0], []

    def work():
        for _ in range(20):
            if np.abs(fmha.attention(q, k, v) - want).max() > 3e-6:
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not wrong


def test_a_forked_child_connects_by_itself():
    q, k, v = qkv(rows=3)
    want = fmha.attention(q, k, v)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if np.array_equal(fmha.attention(q, k, v), want) else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert np.array_equal(fmha.attention(q, k, v), want)


PROGRAM = """
import os, sys, time
import numpy as np
import fmha
path = fmha.start(config={"devices": [{"backend": "cpu", "threads": 1}]})
x = np.ones((1, 4, 1, 32), np.float32)
assert (fmha.attention(x, x, x) == 1).all()
print(path, fmha.default_client()._info().daemon_pid, flush=True)
time.sleep(60)
"""


def test_a_private_daemon_ends_with_its_process_however_that_ends():
    environment = {n: v for n, v in os.environ.items() if n != "FMHAD_SOCKET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    program = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, env=environment)
    path, daemon = program.stdout.readline().split()
    assert os.path.exists(path) and os.path.exists(f"/proc/{daemon}")
    program.send_signal(signal.SIGKILL)
    program.wait()
    until = time.monotonic() + 10
    while os.path.exists(f"/proc/{daemon}") or os.path.exists(path):
        assert time.monotonic() < until, "the daemon outlived its process"
        time.sleep(0.02)


def test_importing_brings_little_beyond_numpy():
    program = "import sys, numpy; before = set(sys.modules); import fmha; print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    brought = set(done.stdout.split())
    assert "fmha._attention" in brought and not brought & {"torch", "subprocess", "tempfile", "shutil", "cffi"}


EXIT = """
import gc, sys
import numpy as np
import fmha
x = np.ones((1, 4, 1, 32), np.float32)
fmha.attention(x, x, x)
client, lib = fmha.default_client(), fmha._lib.lib
for module in [m for name, m in sys.modules.items() if name.startswith("fmha.")]:
    if vars(module).get("lib") is lib:
        del module.lib
del lib, module
gc.collect()
fmha._start._default = None
fmha._run._kept.runs.clear()
del client, x
gc.collect()
"""


def test_handles_may_outlive_the_library_object():
    """As in an interpreter's last collection, whose order nobody promises."""
    done = subprocess.run([sys.executable, "-c", EXIT], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == 0


def test_without_a_daemon_the_error_says_what_to_do():
    program = "import numpy as np, fmha; x = np.ones((1, 1, 1, 32), np.float32); fmha.attention(x, x, x)"
    environment = {**os.environ, "FMHAD_SOCKET": "/nonexistent/fmhad.sock", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    for word in ("UnreachableError", "/nonexistent/fmhad.sock", "fmha.start()", "FMHA_AUTOSTART=1"):
        assert word in done.stderr
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env={**environment, "FMHA_AUTOSTART": "1"})
    assert done.returncode == 0, done.stderr
