# SPDX-License-Identifier: MIT
"""torch's slot in C (fmha/slot.h), on the CPU: what a launch would be is here a function that finds its tensors by their addresses
and computes attention in them.

Python's side is this file's, too: functions that compute by the formula and say that it was a launch.
"""
import ctypes
import threading
import time
import warnings

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
from fmha import _problem, _slot_native  # noqa: E402
from fmha._lib import ffi, lib  # noqa: E402

if _slot_native.why_not() is not None:
    pytest.skip(_slot_native.why_not(), allow_module_level=True)

FORWARD, BACKWARD = (getattr(torch.ops.aten, name).default for name in _slot_native.SERVED)
ROLES = {n: _problem.ROLES[n] for n in ("q", "k", "v", "o", "lse", "do", "dq", "dk", "dv")}
launches: list = []  # what was launched: (plan's number, addresses by role, workspace, keys)
plans: dict = {}  # number -> what it takes: ({role: (sizes, strides)}, causal, scale)
asked: list = []  # calls that came to Python
refuse: list = []  # codes that launches return


def at(address, sizes, strides, dtype=torch.float32):
    n = 1 + sum((a - 1) * b for a, b in zip(sizes, strides))
    raw = torch.frombuffer((ctypes.c_char * (n * 4)).from_address(address), dtype=dtype)
    return raw.as_strided(sizes, strides)


def formula(q, k, v, causal, scale):
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    return s.softmax(-1) @ v, s.logsumexp(-1)


def gradients(grad, q, k, v, causal, scale):
    """Written out: below torch's dispatcher there is no autograd."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    o, lse = formula(q, k, v, causal, scale)
    s = q @ k.mT * scale
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    p = (s - lse[..., None]).exp()
    ds = p * (grad @ v.mT - (grad * o).sum(-1, keepdim=True)) * scale
    return ds @ k, ds.mT @ q, p.mT @ grad


def by_autograd(grad, q, k, v, causal, scale):
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    return torch.autograd.grad(formula(*leaves, causal, scale)[0], leaves, grad)


@ffi.callback("int(struct fmha_local_plan *, const struct fmha_local_run *, struct fmha_error *)")
def run(plan, c, error):
    if refuse:
        return refuse.pop()
    number = int(ffi.cast("uintptr_t", plan))
    lay, causal, scale = plans[number]
    found = {n: int(ffi.cast("uintptr_t", c.tensors[i])) for n, i in ROLES.items()}
    launches.append((number, found, int(ffi.cast("uintptr_t", c.workspace)), c.keys.seqlen_k if c.keys else None))
    assert c.struct_size == ffi.sizeof("struct fmha_local_run") and c.n_tensors == _problem.N_TENSORS
    t = {n: at(found[n], *lay[n]) for n in lay}
    if "do" in t:
        for name, grad in zip(("dq", "dk", "dv"), gradients(t["do"], t["q"], t["k"], t["v"], causal, scale)):
            t[name].copy_(grad)
    else:
        t["o"].copy_(formula(t["q"], t["k"], t["v"], causal, scale)[0])
        t["lse"].copy_(formula(t["q"], t["k"], t["v"], causal, scale)[1])
    return 0


class FakePlan:
    def __init__(self, tensors, causal, scale, workspace):
        self.number = 64 * (len(plans) + 1)
        plans[self.number] = {n: (tuple(t.shape), t.stride()) for n, t in tensors.items()}, causal, scale
        self.handle = ffi.cast("struct fmha_local_plan *", self.number)
        self.workspace = torch.empty(1, dtype=torch.uint8).expand(workspace) if workspace else None
        self.flag, self.index = ffi.new("uint8_t *"), 0

    captured = property(lambda self: self.flag[0] != 0)


class FakeRun:
    def __init__(self, plan, keys=None):
        self.plan = plan
        self.keys = ffi.NULL if keys is None else ffi.new("struct fmha_local_keys *", {"seqlen_k": keys})


class Refused(ValueError):
    pass


how = {"workspace": 0, "keys": None, "raise": None}


def slow_forward(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    asked.append("forward")
    if how["raise"] is not None:
        raise how["raise"]
    o, lse = formula(query, key, value, is_causal, scale)
    o = torch.empty_like(query).copy_(o)
    tensors = {"q": query, "k": key, "v": value, "o": o, "lse": lse}
    _slot_native.learn(FakeRun(FakePlan(tensors, is_causal, scale, how["workspace"]), how["keys"]))
    nothing = torch.empty(2, dtype=torch.uint64), torch.empty((), dtype=torch.uint64), torch.empty(0)
    return o, lse, None, None, query.size(2), key.size(2), *nothing


def slow_backward(grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, philox_seed,
                  philox_offset, *, scale=None):
    asked.append("backward")
    if how["raise"] is not None:
        raise how["raise"]
    grads = gradients(grad_out, query, key, value, is_causal, scale)
    grads = tuple(torch.empty_like(t).copy_(g) for t, g in zip((query, key, value), grads))
    tensors = {"q": query, "k": key, "v": value, "do": grad_out, "o": out, "lse": logsumexp, **dict(zip(("dq", "dk", "dv"), grads))}
    _slot_native.learn(FakeRun(FakePlan(tensors, is_causal, scale, how["workspace"])))
    return grads


@pytest.fixture(autouse=True)
def slot():
    """C's functions on the CPU, which know nothing yet."""
    below = torch.library.Library("aten", "IMPL", "CPU")
    functions = dict(zip(_slot_native.SERVED, (slow_forward, slow_backward)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, function in functions.items():
            below.impl(name, function, "CPU")
    assert _slot_native.activate(functions, "CPU", run) is None
    for table in (launches, asked, refuse):
        table.clear()
    how.update({"workspace": 0, "keys": None, "raise": None})
    yield
    _slot_native._functions.fmha_slot_forget()
    _slot_native._held.clear()
    _slot_native.deactivate()
    below._destroy()


def made(*shape, seed=0, grad=False):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).requires_grad_(grad)


def qkv(heads=4, kv_heads=4, rows=16, hdim=8, keys=None, grad=False):
    return made(2, heads, rows, hdim, grad=grad), *(made(2, kv_heads, keys or rows, hdim, seed=s, grad=grad) for s in (1, 2))


def same(found, want):
    assert found.shape == want.shape and torch.allclose(found, want, atol=1e-6), (found - want).abs().max()


def test_the_second_call_is_launched_without_python():
    q, k, v = qkv()
    first = FORWARD(q, k, v, 0.0, True)
    assert asked == ["forward"] and not launches
    for seed in (3, 4):
        q = made(*q.shape, seed=seed)
        found = FORWARD(q, k, v, 0.0, True)
        want = formula(q, k, v, True, None)
        same(found[0], want[0])
        same(found[1], want[1])
        assert found[2:6] == (None, None, 16, 16)
        assert [(t.shape, t.dtype) for t in found[6:]] == [(t.shape, t.dtype) for t in first[6:]]
    assert asked == ["forward"] and len(launches) == 2
    at = launches[-1][1]
    assert (at["q"], at["k"], at["v"], at["o"], at["lse"]) == tuple(t.data_ptr() for t in (q, k, v, *found[:2]))
    assert _slot_native.counts()["known"] == 1


@pytest.mark.parametrize("other", ["causal", "scale", "strides", "rows", "keys", "heads", "hdim", "dtype"])
def test_what_chooses_a_plan_is_told_apart(other):
    q, k, v = qkv()
    FORWARD(q, k, v, 0.0, False, scale=0.5)
    FORWARD(q, k, v, 0.0, False, scale=0.5)
    assert (len(asked), len(launches)) == (1, 1)
    causal, scale = other == "causal", None if other == "scale" else 0.5
    if other == "strides":
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    elif other == "dtype":
        q, k, v = (t.double() for t in (q, k, v))
    elif other not in ("causal", "scale"):
        q, k, v = qkv(**{other: 8 if other in ("rows", "keys") else 2 if other == "heads" else 16}, **({"kv_heads": 2} if other == "heads" else {}))
    found = FORWARD(q, k, v, 0.0, causal, scale=scale)
    same(found[0], formula(q, k, v, causal, scale)[0])
    assert (len(asked), len(launches)) == (2, 1)
    if other != "dtype":
        same(FORWARD(q, k, v, 0.0, causal, scale=scale)[0], found[0])
        assert (len(asked), len(launches)) == (2, 2)


def test_outputs_lie_as_the_first_ones_did():
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in qkv())
    first, second = (FORWARD(q, k, v)[0] for _ in range(2))
    assert first.stride() == second.stride() == q.stride() and len(launches) == 1
    same(second, first)


def test_what_is_no_plain_call_goes_to_python():
    q, k, v = qkv()
    FORWARD(q, k, v)
    FORWARD(q, k, v, 0.25)
    FORWARD(q, k, v, 0.0, False, True)
    assert len(asked) == 3 and not launches
    odd = torch.empty(q.numel() + 1)[1:].view(q.shape).copy_(q)
    assert odd.data_ptr() % 16 and odd.stride() == q.stride()
    for _ in range(2):
        same(FORWARD(odd, k, v)[0], formula(q, k, v, False, None)[0])
    assert len(asked) == 5 and not launches and _slot_native.counts()["known"] == 1


def test_workspaces_and_keys_are_given():
    how.update(workspace=1024, keys=77)
    q, k, v = qkv()
    FORWARD(q, k, v)
    FORWARD(q, k, v)
    ((_, at, workspace, keys),) = launches
    assert workspace and workspace not in at.values() and keys == 77


@pytest.mark.parametrize("causal", [False, True])
def test_gradients(causal):
    q, k, v = qkv(kv_heads=4, grad=True)
    grad = made(*q.shape, seed=9)
    want = by_autograd(grad, q, k, v, causal, None)
    for n in range(3):
        o = FORWARD(q, k, v, 0.0, causal)[0]
        for found, wanted in zip(torch.autograd.grad(o, (q, k, v), grad), want):
            same(found, wanted)
    assert asked == ["forward", "backward"] and len(launches) == 4
    o = FORWARD(q, k, v, 0.0, causal)[0]
    strange = grad.transpose(2, 3).contiguous().transpose(2, 3)  # its elements do not lie one by one
    for found, wanted in zip(torch.autograd.grad(o, (q, k, v), strange), want):
        same(found, wanted)
    assert asked == ["forward", "backward", "backward"]
    torch.use_deterministic_algorithms(True)
    try:
        torch.autograd.grad(FORWARD(q, k, v, 0.0, causal)[0], (q, k, v), grad)
    finally:
        torch.use_deterministic_algorithms(False)
    assert asked[3:] == ["backward"], "a plan that sums in any order does not serve deterministic gradients"


def test_exceptions_arrive_as_themselves():
    q, k, v = qkv(grad=True)
    how["raise"] = error = Refused("tensor.q is refused")
    with pytest.raises(Refused) as caught:
        FORWARD(q, k, v)
    assert caught.value is error and any(entry.name == "slow_forward" for entry in caught.traceback)
    how["raise"] = None
    o = FORWARD(q, k, v)[0]
    how["raise"] = Refused("no gradient")
    with pytest.raises(Refused, match="no gradient"):
        o.sum().backward()
    how["raise"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        FORWARD(q, k, v, 0.5)
    how["raise"] = None
    same(FORWARD(q, k, v)[0], o)


def test_a_launch_that_fails_is_pythons_to_tell():
    q, k, v = qkv()
    FORWARD(q, k, v)
    refuse.append(-5)
    same(FORWARD(q, k, v)[0], formula(q, k, v, False, None)[0])
    assert len(asked) == 2 and not launches and not refuse


def test_forgetting_frees_what_no_graph_has(monkeypatch):
    monkeypatch.setattr(_slot_native._local, "_is_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index: None)
    monkeypatch.setattr(_slot_native._run, "KEPT", 4)
    for rows in range(8, 18):
        q, k, v = qkv(rows=rows)
        FORWARD(q, k, v)
        if rows == 9:
            _slot_native._held[-1].flag[0] = 1
            kept = _slot_native._held[-1]
    assert len(_slot_native._held) == 2 and _slot_native.counts()["known"] == 2
    assert _slot_native._captured == [kept]
    _slot_native._captured.clear()
    FORWARD(q, k, v)
    assert len(launches) == 1
    monkeypatch.setattr(_slot_native._local, "_is_capturing", lambda: True)
    for rows in range(20, 26):
        FORWARD(*qkv(rows=rows))
    assert len(_slot_native._held) == 4, "in a capture nothing is freed, and no more is learned"


def test_nothing_is_left_behind():
    import gc

    q, k, v = qkv(grad=True, rows=64)

    def work(n):
        for _ in range(n):
            torch.autograd.grad(FORWARD(q, k, v, 0.0, False, scale=0.3)[0], (q, k, v), q)
        gc.collect()
        return int(open("/proc/self/statm").read().split()[1]) * 4096

    work(50)
    before = work(50)
    assert work(400) < before + (4 << 20), "each call makes some 200 KB"


def test_threads_launch_and_forget_at_once():
    shapes = [qkv(rows=rows) for rows in (8, 12, 16)]
    wrong, stop = [], threading.Event()

    def work():
        while not stop.is_set():
            for q, k, v in shapes:
                if not torch.allclose(FORWARD(q, k, v)[0], formula(q, k, v, False, None)[0], atol=1e-5):
                    wrong.append(q.shape)

    threads = [threading.Thread(target=work) for _ in range(3)]
    [t.start() for t in threads]
    for _ in range(20):
        time.sleep(0.02)
        with _slot_native._lock:
            _slot_native._functions.fmha_slot_forget()
    stop.set()
    [t.join() for t in threads]
    assert not wrong and launches


def test_closing_gives_the_operators_back():
    q, k, v = qkv()
    FORWARD(q, k, v)
    _slot_native.deactivate()
    FORWARD(q, k, v)
    assert asked == ["forward", "forward"]
