# SPDX-License-Identifier: MIT
"""Local launch without a GPU: this process has loaded the stub driver, and launches what the daemon planned.

Device memory is numpy's. The stub (tests/gpu/stub/cuda_stub.c) makes tables as a GPU would, out of the
kernel's own text, and tells what a launch got.
"""
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time

import fmha_local
import fmha_wire
import fmhad
import numpy
import pytest
from test_gpu_layer import FORWARD, SHAPE, compiler, make_gpu, stub_folder  # noqa: F401

sys.path.insert(0, str(fmhad.ROOT / "tests/gpu"))
import abi  # noqa: E402
import local_cases  # noqa: E402

POINTERS = ctypes.c_void_p


@pytest.fixture(scope="module")
def cuda():
    stub = ctypes.CDLL(str(stub_folder() / "libcuda.so.1"))
    stub.cuda_stub_arguments.restype = POINTERS
    return stub


@pytest.fixture(scope="module")
def library(cuda):
    return fmha_local.Library(fmhad.build_dir() / "client/libfmha_client.so.1")


@pytest.fixture
def gpu(make_gpu):  # noqa: F811
    return make_gpu()


@pytest.fixture
def device(library, gpu):
    device = library.open(gpu.socket, 0)
    yield device
    if device.device:
        device.close()


def aligned(shape, dtype=numpy.float32, at=256):
    n = int(numpy.prod(shape)) * numpy.dtype(dtype).itemsize
    raw = numpy.zeros(n + at, numpy.uint8)
    start = -raw.ctypes.data % at
    return raw[start : start + n].view(dtype).reshape(shape)


def problem(roles="qkvo", **options):
    return {**FORWARD, **options, "tensors": {role: {"dtype": "f32"} for role in roles}}


def forward_tensors():
    tensors = {role: aligned(SHAPE) for role in "qkvo"}
    tensors["q"][...] = numpy.random.default_rng(1).standard_normal(SHAPE)
    return tensors


def addresses(tensors):
    return {role: tensor.ctypes.data for role, tensor in tensors.items()}


def arguments(cuda, kind):
    return abi.STRUCTS[kind].from_address(cuda.cuda_stub_arguments())


def test_a_plan_runs_here(device, cuda, gpu):
    tensors = forward_tensors()
    plan = device.plan(problem(), addresses(tensors))
    (launch,) = plan.launches()
    assert launch.family == b"fwd" and b"gpu_" in launch.kernel and any(launch.code)
    assert plan.tensor("q").bytes == tensors["q"].nbytes
    with pytest.raises(fmha_local.Failure) as caught:
        plan.tensor("lse")
    assert caught.value.name == "ENOENT"
    plan.run(addresses(tensors))
    assert numpy.array_equal(tensors["o"], tensors["q"])
    args = arguments(cuda, "abi_fwd_args")
    assert (args.q.data, args.k.data, args.o.data) == tuple(tensors[r].ctypes.data for r in "qko")
    assert args.scale == numpy.float32(64**-0.5)
    other = forward_tensors()
    plan.run(addresses(other))
    assert numpy.array_equal(other["o"], other["q"])
    assert plan.read_info().n_runs == 2
    assert gpu.status()["devices"][0]["worker"]["runs"]["done"] == 0, "the worker has run nothing"
    plan.free()


def test_code_is_loaded_once_and_unloaded_with_the_last_plan(device, cuda, compiler):  # noqa: F811
    before = cuda.cuda_stub_modules()
    tensors = forward_tensors()
    plans = [device.plan(problem(), addresses(tensors)) for _ in range(3)]
    assert cuda.cuda_stub_modules() == before + 1
    assert compiler.count() == 2, "the kernel, and the one that makes tables"
    for plan in plans:
        assert bytes(plan.launches()[0].code) == bytes(plans[0].launches()[0].code)
        plan.free()
    assert cuda.cuda_stub_modules() == before


def test_what_a_run_lacks_is_named(device):
    tensors = forward_tensors()
    plan = device.plan(problem(), addresses(tensors))

    def refused(at, field):
        with pytest.raises(fmha_local.Failure) as caught:
            plan.run(at)
        assert (caught.value.name, caught.value.field) == ("EINVAL", field)

    refused(addresses(tensors) | {"k": None}, "tensor.k")
    refused(addresses(tensors) | {"v": tensors["v"].ctypes.data + 2}, "tensor.v")
    plan.free()


def test_a_cache_that_grows_runs_one_plan(device, cuda):
    heads, hdim = 2, 64
    tensors = {role: aligned((1, heads, 1 if role in "qo" else 128, hdim)) for role in "qkvo"}
    asked = {**FORWARD, "seqlen_q": 1, "seqlen_k": 70,
             "tensors": {role: {"dtype": "f32", "stride": [heads * n * hdim, hdim, n * hdim, 1]}
                         for role, n in (("q", 1), ("k", 70), ("v", 70), ("o", 1))}}
    plan = device.plan(asked, addresses(tensors))
    info = plan.read_info()
    assert info.seqlen_k_least <= 70 <= info.seqlen_k_most and info.key_stride_unit == 4
    room = aligned((max(info.workspace_bytes, 1),), numpy.uint8).ctypes.data

    def of(rows, **other):
        return {"seqlen_k": rows, **{f"{t}_stride_{axis}": n * rows * hdim for t in "kv" for axis, n in (("batch", heads), ("head", 1))},
                **other}

    for rows in (info.seqlen_k_least, 70, 71, info.seqlen_k_most):
        plan.run(addresses(tensors), room, keys=of(rows))
        args = arguments(cuda, "abi_fwd_args")
        assert args.sequences.seqlen_k_max == args.sequences.total_k == rows
        for tensor in (args.k, args.v):
            assert (tensor.stride_batch, tensor.stride_head, tensor.stride_seq) == (heads * rows * hdim, rows * hdim, hdim)
    plan.run(addresses(tensors), room)
    assert arguments(cuda, "abi_fwd_args").sequences.seqlen_k_max == 70, "the plan itself has not changed"
    for keys in (of(info.seqlen_k_least - 1), of(info.seqlen_k_most + 1), of(71, k_stride_head=71 * hdim + 1),
                 of(71, v_stride_batch=0), of(71, k_stride_batch=1 << 40)):
        with pytest.raises(fmha_local.Failure) as caught:
            plan.run(addresses(tensors), room, keys=keys)
        assert (caught.value.name, caught.value.field) == ("EINVAL", "keys")
    plan.free()
    fixed = device.plan({**asked, "deterministic": True}, addresses(tensors))
    assert fixed.read_info().seqlen_k_most == 0
    with pytest.raises(fmha_local.Failure) as caught:
        fixed.run(addresses(tensors), room, keys=of(70))
    assert caught.value.field == "keys"
    fixed.free()


def test_bad_problems_are_refused(device):
    tensors = addresses(forward_tensors())
    for change, name, field in (({"hdim_q": 584}, "EINVAL", "hdim_q"), ({"batch": -1}, "EINVAL", "batch")):
        with pytest.raises(fmha_local.Failure) as caught:
            device.plan(problem(**change), tensors)
        assert (caught.value.name, caught.value.field) == (name, field)
    device.plan(problem(), tensors).free()


def test_a_cpu_has_no_code_to_launch(library, daemon):
    device = library.open(daemon.socket, 0)
    with pytest.raises(fmha_local.Failure) as caught:
        device.plan(problem(), addresses(forward_tensors()))
    assert caught.value.name == "ENOTSUP"
    device.close()


def words(values):
    array = aligned(len(values), numpy.int32)
    array[...] = values
    return array


def read_words(address, n, dtype=ctypes.c_int32):
    return list((dtype * n).from_address(address)) if address else None


class Tables:
    """A problem with integer tensors, and what the kernel got of them."""

    def __init__(self, device, cuda, options, integers, kind="abi_fwd_args"):
        self.cuda, self.kind = cuda, kind
        roles = {"q": "f32", "k": "f32", "v": "f32", "o": "f32"} if kind == "abi_fwd_args" else {
            r: "f32" for r in ("q", "k", "v", "o", "lse", "d_o", "dq", "dk", "dv")}
        self.tensors = {role: aligned(1 << 16) for role in roles}
        self.tensors |= {role: words(values) for role, values in integers.items()}
        tensors = {r: {"dtype": t} for r, t in roles.items()} | {r: {"dtype": "i32"} for r in integers}
        self.plan = device.plan({**FORWARD, **options, "tensors": tensors}, addresses(self.tensors))
        self.workspace = aligned(self.plan.info.workspace_bytes, numpy.uint8)

    def run(self):
        self.workspace[...] = 0xA5
        self.plan.run(addresses(self.tensors), self.workspace.ctypes.data)
        return arguments(self.cuda, self.kind)


GROUP = {"mode": "group", "batch": 3, "seqlen_q": 20, "seqlen_k": 30, "total_q": 40, "total_k": 60}


def test_packed_sequences_are_what_was_said(device, cuda):
    t = Tables(device, cuda, GROUP, {"seqstart_q": [0, 5, 25, 40], "seqstart_k": [0, 30, 31, 60],
                                     "seqlen_k_per_batch": [29, 0, 29]})
    assert [launch.family for launch in t.plan.launches()] == [b"prepare", b"fwd"]
    args = t.run()
    assert read_words(args.sequences.seqstart_q, 4) == [0, 5, 25, 40]
    assert read_words(args.sequences.seqstart_k, 4) == [0, 30, 31, 60]
    assert read_words(args.sequences.seqlen_k, 3) == [29, 0, 29]
    t.tensors["seqstart_q"][...] = [0, 0, 0, 7]  # another run's lengths
    assert read_words(t.run().sequences.seqstart_q, 4) == [0, 0, 0, 7]


@pytest.mark.parametrize("seed", range(20))
def test_no_content_leads_outside(device, cuda, seed):
    rng = numpy.random.default_rng(seed)
    anything = lambda n: rng.choice([-(2**31), -1, 0, 1, 3, 17, 39, 41, 59, 61, 2**31 - 1], n)  # noqa: E731
    t = Tables(device, cuda, GROUP, {"seqstart_q": anything(4), "seqstart_k": anything(4),
                                     "seqlen_q_per_batch": anything(3), "seqlen_k_per_batch": anything(3)})
    s = t.run().sequences
    for starts, total, most, lengths in ((s.seqstart_q, 40, 40, s.seqlen_q), (s.seqstart_k, 60, 30, s.seqlen_k)):
        starts, lengths = read_words(starts, 4), read_words(lengths, 3)
        assert 0 <= starts[0] and starts == sorted(starts) and starts[3] <= total
        for i in range(3):
            assert 0 <= lengths[i] <= min(starts[i + 1] - starts[i], most)


PAGED = {"batch": 2, "seqlen_q": 1, "seqlen_k": 40, "page_size": 16, "n_pages": 5}


def test_pages_stay_inside_the_cache(device, cuda):
    t = Tables(device, cuda, PAGED | {"max_blocks": 3, "n_splits": 1},
               {"block_table": [0, 4, 9, -1, 2, 2**31 - 1], "seqlen_k_per_batch": [40, -5]})
    args = t.run()
    assert read_words(args.cache.block_table, 6) == [0, 4, 4, 0, 2, 4]
    assert read_words(args.sequences.seqlen_k, 2) == [40, 0]
    t = Tables(device, cuda, PAGED | {"mode": "group", "total_q": 2, "n_page_indices": 4, "n_splits": 1},
               {"seqstart_q": [0, 1, 2], "kv_indptr": [0, 3, 99], "kv_page_indices": [0, -1, 7, 3],
                "kv_last_page_len": [8, 17]})
    args = t.run()
    assert read_words(args.cache.kv_indptr, 3) == [0, 3, 4]
    assert read_words(args.cache.kv_page_indices, 4) == [0, 0, 4, 3]
    assert read_words(args.cache.kv_last_page_len, 2) == [8, 16]
    assert read_words(args.sequences.seqlen_k, 2) == [40, 16]


def test_a_backward_that_writes_dq_has_no_head(device, cuda):
    """Its workspace is D; where sequences lie in sums of dQ is said where there are some (tests/unit/dispatch/test_local.c)."""
    options = GROUP | {"op": "backward", "deterministic": True}
    t = Tables(device, cuda, options, {"seqstart_q": [0, 5, 25, 40], "seqstart_k": [0, 30, 31, 60]}, "abi_bwd_args")
    assert t.plan.launches()[0].family == b"prepare"  # of the checked lengths
    args = t.run()
    assert args.nsplits is None and args.dq_acc_offsets is None and args.dq_acc is None
    assert read_words(args.sequences.seqstart_q, 4) == [0, 5, 25, 40]


def test_parts_of_heads_are_summed_in_the_workspace(device, cuda):
    """Of few heads of keys each has several blocks, also where sequences are packed and a graph is made."""
    for packed in (False, True):
        options = {"op": "backward", "nhead_q": 8, "nhead_k": 2, "seqlen_q": 1600, "seqlen_k": 1600, "hdim_q": 128, "hdim_v": 128}
        options |= {"mode": "group", "batch": 2, "total_q": 1700, "total_k": 1700} if packed else {}
        roles = {r: "f32" if r == "lse" else "bf16" for r in ("q", "k", "v", "o", "lse", "d_o", "dq", "dk", "dv")}
        tensors = {role: aligned(1 << 21, numpy.uint16) for role in roles}
        if packed:
            tensors |= {role: words([0, 1600, 1700]) for role in ("seqstart_q", "seqstart_k")}
            roles |= dict.fromkeys(("seqstart_q", "seqstart_k"), "i32")
        plan = device.plan({**FORWARD, **options, "tensors": {r: {"dtype": t} for r, t in roles.items()}}, addresses(tensors))
        workspace = aligned(plan.info.workspace_bytes, numpy.uint8)
        plan.run(addresses(tensors), workspace.ctypes.data)
        args = arguments(cuda, "abi_bwd_args")
        assert args.kv_parts == 4 and args.sequences.total_k == (1700 if packed else 1600)
        sums, start = 2 * 4 * args.sequences.total_k * 256 * 4, workspace.ctypes.data
        assert start <= args.kv_acc and args.kv_acc % 16 == 0
        assert args.kv_acc + sums <= args.dq_acc < start + workspace.nbytes
        graph = ctypes.c_void_p()
        assert cuda.cuStreamBeginCapture_v2(None, 0) == 0
        try:
            plan.run(addresses(tensors), workspace.ctypes.data)
        finally:
            cuda.cuStreamEndCapture(None, ctypes.byref(graph))
        assert cuda.cuGraphLaunch(graph, None) == 0 and arguments(cuda, "abi_bwd_args").kv_acc == args.kv_acc
        cuda.cuGraphDestroy(graph)
        plan.free()


def test_dropout_counts_from_memory(device, cuda):
    tensors = forward_tensors()
    plan = device.plan(problem(dropout_p=0.25, dropout_seed=7, dropout_offset=9), addresses(tensors))
    plan.run(addresses(tensors))
    d = arguments(cuda, "abi_fwd_args").dropout
    assert (d.seed, d.offset, d.seed_at, d.offset_at) == (7, 9, None, None)
    state = aligned(2, numpy.uint64)
    plan.run(addresses(tensors), dropout_seed=1, dropout_offset=2, dropout_seed_at=state.ctypes.data,
             dropout_offset_at=state.ctypes.data + 8)
    d = arguments(cuda, "abi_fwd_args").dropout
    assert (d.seed, d.offset, d.seed_at, d.offset_at) == (1, 2, state.ctypes.data, state.ctypes.data + 8)
    with pytest.raises(fmha_local.Failure):
        plan.run(addresses(tensors), dropout_seed_at=state.ctypes.data + 4)
    plan.free()


def test_a_capture_replays_with_new_contents(device, cuda):
    """What a capture forbids fails in the stub: a run allocates, loads and waits for nothing."""
    t = Tables(device, cuda, GROUP, {"seqstart_q": [0, 5, 25, 40], "seqstart_k": [0, 30, 31, 60]})
    graph = ctypes.c_void_p()
    assert cuda.cuStreamBeginCapture_v2(None, 0) == 0
    try:
        for _ in range(50):
            t.plan.run(addresses(t.tensors), t.workspace.ctypes.data)
    finally:
        cuda.cuStreamEndCapture(None, ctypes.byref(graph))
    for starts in ([0, 5, 25, 40], [0, 20, 20, 33]):
        t.tensors["seqstart_q"][...] = starts
        t.workspace[...] = 0xA5
        assert cuda.cuGraphLaunch(graph, None) == 0
        assert read_words(arguments(cuda, "abi_fwd_args").sequences.seqstart_q, 4) == starts
    cuda.cuGraphDestroy(graph)


LOOK_EVERY = 8  # runs: local.c


def run_until(plan, run, done):
    """Runs with pauses in which the daemon can answer."""
    def turn():
        for _ in range(LOOK_EVERY):
            plan.run_bound(run)
        return done()
    assert fmhad.until(turn)


def census(raw):
    return {entry["shape"]: entry for entry in json.loads(raw.call_json("census"))["shapes"]}


def wire_problem():
    """The same problem as the worker is asked for it."""
    tensors = {role: {"buffer": i + 1, "dtype": "f32"} for i, role in enumerate("qkvo")}
    return {**FORWARD, "tensors": tensors}


def others(raw, kernel):
    """Kernels that the planner passed over."""
    (selection,) = json.loads(raw.explain(wire_problem()))["selections"]
    return [c["name"] for c in selection["candidates"] if c["verdict"] == "passed over" and c["name"] != kernel]


def claim_faster(raw, first, shape):
    """Has the daemon believe that somebody measured all kernels, and another one as the fastest. Return: that."""
    times = {first: 50} | {kernel: 40 - i for i, kernel in enumerate(others(raw, first))}
    document = json.loads(raw.call_json("registry_export", {"filter": "hdim_q == 7"}))
    document["kernels"] = [{"name": kernel, "tuned": [
        {"shape": shape, "splits": 0, "us": us, "when": int(time.time()) + 10}]} for kernel, us in times.items()]
    raw.call_with_text("registry_import", json.dumps(document))
    return min(times, key=times.get)


def test_runs_are_counted(device, gpu):
    tensors = forward_tensors()
    plan = device.plan(problem(), addresses(tensors), refresh_ms=50)
    run = plan.bind(addresses(tensors))
    with gpu.device() as raw:
        run_until(plan, run, lambda: census(raw))
        (entry,) = census(raw).values()
        assert entry["uid"] == os.getuid() and 0 < entry["runs"] <= plan.read_info().n_runs
        assert entry["device_ns"] > 0
        n = plan.read_info().n_runs
        plan.free()  # tells the rest, and waits for nothing
        assert fmhad.until(lambda: [e["runs"] for e in census(raw).values()] == [n])


def test_a_liar_counts_for_no_more_than_time(gpu):
    """However often its runs are said to have happened, a user's device time is at most the time that has passed."""
    start = time.monotonic()
    with gpu.device() as raw:
        for runs in (2**64 - 1, 1 << 40, 0, 5):
            raw.call("local_runs", {"problem": wire_problem(), "runs": runs, "version": 1})
        with gpu.device() as other:  # another connection is the same user
            other.call("local_runs", {"problem": wire_problem(), "runs": 1 << 40, "version": 1})
            raw.call("ping", {})
            counted = sum(entry["device_ns"] for entry in census(raw).values())
        assert counted <= (time.monotonic() - start + 1) * 1e9
        for bad in (-1, "many", 1.5):
            with pytest.raises(fmha_wire.WireError) as caught:
                raw.call("local_runs", {"problem": wire_problem(), "runs": bad, "version": 1})
            assert caught.value.field == "runs"
        with pytest.raises(fmha_wire.WireError) as caught:
            raw.call("local_runs", {"problem": wire_problem() | {"hdim_q": 584}, "runs": 1, "version": 1})
        assert caught.value.field == "hdim_q"


def test_a_run_of_unknown_time_counts_as_what_the_roof_allows(make_daemon, compiler, tmp_path):  # noqa: F811
    moved = sum(array.nbytes for array in forward_tensors().values())
    counted = []
    for gbs in (1, 2):
        config = {
            "devices": [{"backend": "cuda", "roof_gflops_f32": 1000000, "roof_gbs": gbs}],
            "compile": {"helper": str(compiler.path), "cache": str(tmp_path / "cache")},
        }
        gpu = make_daemon(config, env={**os.environ, "LD_LIBRARY_PATH": str(stub_folder())})
        with gpu.device() as raw:
            time.sleep(0.05)  # no more is believed than has had time to happen
            raw.call("local_runs", {"problem": wire_problem(), "runs": 5, "version": 1})
            (entry,) = census(raw).values()
        assert entry["runs"] == 5
        counted.append(entry["device_ns"])
    assert counted[0] - counted[1] == pytest.approx(5 * moved / 2, abs=10)


def kernel_of(plan):
    return plan.read_info().launches[0].kernel.decode()


EACH_ITS_OWN = "printf 'stub code of %s' \"$*\" >\"$5\""  # as kernels have, who share what is equal


def test_a_faster_kernel_is_taken(device, gpu, cuda, compiler):  # noqa: F811
    compiler.does(EACH_ITS_OWN)
    tensors = forward_tensors()
    plan, pinned = (device.plan(problem(), addresses(tensors), refresh_ms=20, pinned=p) for p in (0, 1))
    first, modules = kernel_of(plan), cuda.cuda_stub_modules()
    run = plan.bind(addresses(tensors))
    graph = ctypes.c_void_p()
    with gpu.device() as raw:
        run_until(plan, run, lambda: census(raw))
        (shape,) = census(raw)
        other = claim_faster(raw, first, shape)
        assert cuda.cuStreamBeginCapture_v2(None, 0) == 0
        for _ in range(100):  # a capture takes what there is
            plan.run_bound(run)
            time.sleep(0.001)
        cuda.cuStreamEndCapture(None, ctypes.byref(graph))
        assert kernel_of(plan) == first
        run_until(plan, run, lambda: kernel_of(plan) == other)
        run_until(pinned, run, lambda: pinned.read_info().n_runs > 500)
        assert kernel_of(pinned) == first
    assert plan.info.workspace_bytes == plan.read_info().workspace_bytes, "what was told stays good"
    assert cuda.cuda_stub_modules() == modules + 1, "graphs may hold the old one"
    tensors["o"][...] = 0
    assert cuda.cuGraphLaunch(graph, None) == 0
    assert numpy.array_equal(tensors["o"], tensors["q"])
    cuda.cuGraphDestroy(graph)
    plan.free()
    pinned.free()
    assert cuda.cuda_stub_modules() == modules - 1, "the one that both had"


@pytest.mark.parametrize("options", [{"deterministic": True}, {"n_splits": 1}])
def test_results_that_must_stay_keep_their_kernel(device, gpu, options):
    tensors = forward_tensors()
    plan = device.plan(problem(**options), addresses(tensors), refresh_ms=10)
    first, run = kernel_of(plan), plan.bind(addresses(tensors))
    with gpu.device() as raw:
        run_until(plan, run, lambda: census(raw))
        (shape,) = census(raw)
        assert claim_faster(raw, first, shape) != first
        before = next(iter(census(raw).values()))["runs"]
        run_until(plan, run, lambda: next(iter(census(raw).values()))["runs"] > before + 2 * LOOK_EVERY)
    assert kernel_of(plan) == first
    plan.free()


def test_a_kernel_that_cannot_be_loaded_is_left(device, gpu, cuda, compiler, monkeypatch):  # noqa: F811
    """The plan goes on with what it has."""
    compiler.does(EACH_ITS_OWN)
    tensors = forward_tensors()
    plan = device.plan(problem(), addresses(tensors), refresh_ms=10)
    first, run = kernel_of(plan), plan.bind(addresses(tensors))
    with gpu.device() as raw:
        run_until(plan, run, lambda: census(raw))
        (shape,) = census(raw)
        monkeypatch.setenv("CUDA_STUB_FAIL", "cuModuleLoadData")
        assert claim_faster(raw, first, shape) != first
        before = next(iter(census(raw).values()))["runs"]
        run_until(plan, run, lambda: next(iter(census(raw).values()))["runs"] > before + 4 * LOOK_EVERY)
        assert kernel_of(plan) == first
        monkeypatch.delenv("CUDA_STUB_FAIL")
    plan.free()


def test_counts_do_not_outlive_the_daemon(make_gpu, library):  # noqa: F811
    """Runs go on, and nothing waits for a daemon that stands still or is away."""
    daemon, tensors = make_gpu(), forward_tensors()
    device = library.open(daemon.socket, 0, timeout_ms=30000)
    plan = device.plan(problem(), addresses(tensors), refresh_ms=1)
    run, worker = plan.bind(addresses(tensors)), daemon.worker_pid()
    os.kill(worker, signal.SIGSTOP)
    start = time.monotonic()
    while time.monotonic() < start + 0.3:
        plan.run_bound(run)
    plan.run_bound(run)
    os.kill(worker, signal.SIGCONT)
    kill(worker)
    daemon.stop()
    for _ in range(1000):
        plan.run_bound(run)
    plan.free()
    assert time.monotonic() - start < 25, "less than one wait"
    device.close()


def test_a_child_refuses(device):
    tensors = forward_tensors()
    plan = device.plan(problem(), addresses(tensors))
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            plan.run(addresses(tensors))
        except fmha_local.Failure as failure:
            status = 0 if failure.name == "ECONN" and "forked" in str(failure) else 2
        plan.free()
        os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    plan.run(addresses(tensors))
    plan.free()


def kill(pid):
    os.kill(pid, signal.SIGKILL)


def test_plans_outlive_the_daemon(make_gpu, library, cuda):  # noqa: F811
    daemon, tensors = make_gpu(), forward_tensors()
    device = library.open(daemon.socket, 0, timeout_ms=3000)
    plan = device.plan(problem(), addresses(tensors))
    kill(daemon.worker_pid())
    plan.run(addresses(tensors))
    another = device.plan(problem(), addresses(tensors))  # of the next worker
    daemon.stop()
    for p in (plan, another):
        tensors["o"][...] = 0
        p.run(addresses(tensors))
        assert numpy.array_equal(tensors["o"], tensors["q"])
    with pytest.raises(fmha_local.Failure) as caught:
        device.plan(problem(), addresses(tensors))
    assert caught.value.name in ("ECONN", "EDEVICE", "ETIMEDOUT")
    plan.free()
    another.free()
    device.close()


@pytest.mark.parametrize("victim", ["worker", "front"])
def test_a_death_during_a_build_is_told(make_gpu, library, compiler, victim):  # noqa: F811
    compiler.does("sleep 2; printf 'stub code' >\"$5\"")
    daemon = make_gpu()
    device = library.open(daemon.socket, 0, timeout_ms=1500)
    pid = os.fork()
    if pid == 0:
        time.sleep(0.5)
        kill(daemon.worker_pid() if victim == "worker" else daemon.pid)
        os._exit(0)
    with pytest.raises(fmha_local.Failure) as caught:
        device.plan(problem(), addresses(forward_tensors()))
    os.waitpid(pid, 0)
    assert caught.value.name in ("EDEVICE", "ECONN", "ETIMEDOUT", "EBUSY")
    device.close()


def test_nothing_is_left_of_a_client(gpu, library, cuda):
    """Descriptors of the worker, descriptors and modules here: plans that were freed, a client that was killed."""
    tensors = forward_tensors()
    first = library.open(gpu.socket, 0)
    first.plan(problem(), addresses(tensors)).free()
    worker = gpu.worker_pid()
    before, mine, modules = fmhad.open_files(worker), fmhad.open_files("self"), cuda.cuda_stub_modules()
    for _ in range(5):
        first.plan(problem(), addresses(tensors)).free()
    assert fmhad.open_files("self") == mine and cuda.cuda_stub_modules() == modules
    pid = os.fork()
    if pid == 0:
        other = library.open(gpu.socket, 0)
        other.plan(problem(), addresses(tensors))
        kill(os.getpid())
    os.waitpid(pid, 0)
    assert fmhad.until(lambda: not fmhad.open_files(worker) - before)
    first.close()


def in_a_child_that_is_killed(act):
    """act(die): dies in the middle of what it does."""
    pid = os.fork()
    if pid == 0:
        act(lambda: kill(os.getpid()))
        os._exit(1)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL


PHASES = ("a build", "a plan", "its code", "its runs", "its report")


@pytest.mark.parametrize("phase", PHASES)
def test_a_client_that_is_killed_leaves_nothing(gpu, library, compiler, phase):  # noqa: F811
    """Descriptors of front and worker, in every phase of a client's life; the next one is served."""
    tensors = forward_tensors()
    first = library.open(gpu.socket, 0)
    first.plan(problem(), addresses(tensors)).free()
    built, worker = compiler.count(), gpu.worker_pid()
    before = gpu.settled_fds()

    def raw_client(die):
        raw = gpu.device().__enter__()
        if phase == "a build":
            compiler.does("sleep 0.3; printf 'stub code' >\"$5\"")
            raw.submit("local_plan", {"problem": wire_problem() | {"hdim_q": 32, "hdim_v": 32}})
            time.sleep(0.1)
        elif phase == "its code":
            code = raw.call("local_plan", {"problem": wire_problem()})["launches"][0]["code"]
            for _ in range(5):  # nobody reads the descriptors
                raw.submit("code", {"hash": code})
        die()

    def client(die):
        device = library.open(gpu.socket, 0)
        plan = device.plan(problem(), addresses(tensors), refresh_ms=1)
        if phase != "a plan":
            if phase == "its report":
                os.kill(worker, signal.SIGSTOP)
            for _ in range(100):
                plan.run(addresses(tensors))
                time.sleep(0.001)
        die()

    in_a_child_that_is_killed(raw_client if phase in ("a build", "its code") else client)
    os.kill(worker, signal.SIGCONT)
    assert gpu.has_no_more_than(before), (gpu.fd_counts(), before)
    compiler.does("printf 'stub code' >\"$5\"")
    first.plan(problem(), addresses(tensors)).free()
    assert compiler.count() <= built + 1
    first.close()


@pytest.mark.parametrize("victim", ["worker", "front"])
def test_a_death_between_a_plan_and_its_code_is_mended(make_gpu, library, cuda, victim):  # noqa: F811
    """The next worker knows no code until it has planned: the client plans once more, and nobody is left waiting."""
    daemon, tensors = make_gpu(), forward_tensors()
    with daemon.device() as raw:
        code = raw.call("local_plan", {"problem": wire_problem()})["launches"][0]["code"]
    modules, mine = cuda.cuda_stub_modules(), fmhad.open_files("self")
    device = library.open(daemon.socket, 0, timeout_ms=8000)
    worker = daemon.worker_pid()
    kill(worker if victim == "worker" else daemon.pid)
    if victim == "front":
        assert fmhad.until(lambda: not os.path.exists(f"/proc/{worker}")), "it follows its front"
        with pytest.raises(fmha_local.Failure) as caught:
            device.plan(problem(), addresses(tensors), timeout_ms=500)
        assert caught.value.name in ("ECONN", "EDEVICE", "ETIMEDOUT")
    else:
        def asked():
            try:
                with daemon.device() as raw:
                    raw.call("code", {"hash": code})
            except fmha_wire.WireError as error:
                return error.name == "ENOENT"
            except fmha_wire.Disconnected:
                return False
        assert fmhad.until(asked)
        plan = device.plan(problem(), addresses(tensors))
        plan.run(addresses(tensors))
        plan.free()
    device.close()
    assert cuda.cuda_stub_modules() == modules and fmhad.open_files("self") == mine


def test_counts_go_on_with_the_next_worker(make_gpu, library):  # noqa: F811
    daemon, tensors = make_gpu(), forward_tensors()
    device = library.open(daemon.socket, 0, timeout_ms=8000)
    plan = device.plan(problem(), addresses(tensors), refresh_ms=20)
    run, worker = plan.bind(addresses(tensors)), daemon.worker_pid()
    with daemon.device() as raw:
        run_until(plan, run, lambda: census(raw))
    kill(worker)
    for _ in range(100):
        plan.run_bound(run)
        time.sleep(0.001)
    device.plan(problem(), addresses(tensors)).free()  # a run opens no connection, whoever waits does
    with daemon.device() as raw:
        run_until(plan, run, lambda: census(raw))
    plan.free()
    device.close()


def test_code_is_kept_once(make_gpu):  # noqa: F811
    """However often it is asked for, by a client that reads late and has few descriptors."""
    gpu = make_gpu(limits={"fds_per_uid": 40})
    worker = gpu.worker_pid()
    with gpu.device() as raw:
        code = raw.call("local_plan", {"problem": wire_problem()})["launches"][0]["code"]
        state = gpu.status()["devices"][0]["worker"]["code"]
        assert state["kernels"] == 2 and state["bytes"] == 2 * len("stub code")
        before = fmhad.open_files(worker)
        for number in [raw.submit("code", {"hash": code}) for _ in range(60)]:
            _, (fd,) = raw.wait(number)
            os.close(fd)
        assert fmhad.until(lambda: not fmhad.open_files(worker) - before)
        assert gpu.status()["devices"][0]["worker"]["code"] == state


def test_code_is_sealed_and_shared(gpu, library):
    tensors = forward_tensors()
    device = library.open(gpu.socket, 0)
    code = bytes(device.plan(problem(), addresses(tensors)).launches()[0].code)
    device.close()
    files = []
    for _ in range(2):
        with gpu.device() as raw:
            result, (fd,) = raw.call_with_fds("code", {"hash": code})
            assert os.pread(fd, result["size"], 0) == b"stub code"
            with pytest.raises(OSError):
                os.pwrite(fd, b"x", 0)
            with pytest.raises(OSError):  # nor by another way
                os.close(os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_TRUNC))
            files.append(os.fstat(fd).st_ino)
            os.close(fd)
            for bad, field in ((b"", "hash"), (code[:-1] + b"\0", "hash"), (bytes(31), "hash")):
                with pytest.raises(fmha_wire.WireError) as caught:
                    raw.call("code", {"hash": bad})
                assert caught.value.field == field
    assert files[0] == files[1], "one file for all"


def test_a_pack_needs_no_daemon(make_gpu, library, cuda, tmp_path):  # noqa: F811
    daemon, tensors, path = make_gpu(), forward_tensors(), tmp_path / "pack"
    device = library.open(daemon.socket, 0)
    made = [library.problem(problem(**o), addresses(tensors)) for o in ({}, {"mask": "top_left", "window_right": 0})]
    device.write_pack(made, path)
    device.write_pack(made, path)  # over an old one
    device.close()
    daemon.stop()
    assert [p.name for p in tmp_path.glob("pack*")] == ["pack"]
    before, pack = cuda.cuda_stub_modules(), fmha_local.Pack(library, path)
    os.truncate(path, 0)  # by whoever packs anew: what was opened is whole
    plan = pack.plan(problem(), addresses(tensors))
    masked = pack.plan(problem(mask="top_left", window_right=0), addresses(tensors))
    for absent in ({"mask": "bottom_right", "window_right": 0}, {"batch": 2}):
        with pytest.raises(fmha_local.Failure) as caught:
            pack.plan(problem(**absent), addresses(tensors))
        assert caught.value.name == "ENOENT" and "warm --pack" in str(caught.value)
    pack.free()
    plan.run(addresses(tensors))
    assert numpy.array_equal(tensors["o"], tensors["q"])
    plan.free()
    masked.free()
    assert cuda.cuda_stub_modules() == before


def test_a_damaged_pack_is_refused(device, library, tmp_path):
    path = tmp_path / "pack"
    device.write_pack([library.problem(problem(), addresses(forward_tensors()))], path)
    good = path.read_bytes()
    rng = numpy.random.default_rng(1)
    for i in range(60):
        bad = bytearray(good)
        if i % 3 == 0:
            bad = bad[: rng.integers(len(good))]
        elif i % 3 == 1:
            bad[rng.integers(16)] ^= 1 << rng.integers(8)  # magic and length
        else:
            bad[rng.integers(88, len(good))] ^= 1 << rng.integers(8)
        path.write_bytes(bad)
        with pytest.raises(fmha_local.Failure) as caught:
            fmha_local.Pack(library, path)
        assert caught.value.name == "EINVAL"
    with pytest.raises(fmha_local.Failure) as caught:
        fmha_local.Pack(library, tmp_path / "absent")
    assert caught.value.name == "EIO"
    with pytest.raises(fmha_local.Failure) as caught:
        device.write_pack([library.problem(problem(), addresses(forward_tensors()))], tmp_path / "no" / "folder")
    assert caught.value.name == "EIO"


def hip_library():
    found = next(fmhad.build_dir().rglob("hip/libamdhip64.so"), None)
    return found or pytest.skip("the build has no fake of libamdhip64")


def elsewhere(path, wire, at):
    """What planning with a pack fails with in a process that has loaded no runtime, as this one may have by now."""
    script = ("import fmha_local, json, sys\n"
              "wire, at = map(json.loads, sys.argv[3:])\n"
              "try:\n    fmha_local.Pack(fmha_local.Library(sys.argv[1]), sys.argv[2]).plan(wire, at)\n"
              "except fmha_local.Failure as failure:\n    print(failure.name, failure)")
    command = [sys.executable, "-c", script, fmhad.build_dir() / "client/libfmha_client.so.1", path, json.dumps(wire), json.dumps(at)]
    environment = os.environ | {"PYTHONPATH": os.path.dirname(fmha_local.__file__)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def test_hip_launches_the_same_way(device, library, cuda, tmp_path):
    """A pack whose plans were made for a HIP device, as far as this library can tell."""
    options = GROUP | {"deterministic": True, "op": "backward"}
    roles = {r: {"dtype": "f32"} for r in ("q", "k", "v", "o", "lse", "d_o", "dq", "dk", "dv")}
    integers = {"seqstart_q": words([0, 5, 25, 40]), "seqstart_k": words([0, 30, 31, 60])}
    wire = {**FORWARD, **options, "tensors": roles | {r: {"dtype": "i32"} for r in integers}}
    tensors = {role: aligned(1 << 16) for role in roles} | integers
    path = tmp_path / "pack"
    device.write_pack([library.problem(wire, addresses(tensors))], path)
    content = path.read_bytes()
    assert content[24:29] == b"cuda\0"
    path.write_bytes(content[:24] + b"hip\0\0" + content[29:])
    pack = fmha_local.Pack(library, path)
    assert re.match("ENOTSUP .*has not loaded HIP", elsewhere(path, wire, addresses(tensors)))
    hip = ctypes.CDLL(str(hip_library()))
    hip.hip_fake_arguments.restype = POINTERS
    modules, cuda_modules = hip.hip_fake_count(b"modules"), cuda.cuda_stub_modules()
    plan = pack.plan(wire, addresses(tensors))
    assert hip.hip_fake_count(b"modules") == modules + 1 and cuda.cuda_stub_modules() == cuda_modules
    workspace = aligned(plan.info.workspace_bytes, numpy.uint8)
    plan.run(addresses(tensors), workspace.ctypes.data)
    assert hip.hipStreamSynchronize(None) == 0
    args = abi.STRUCTS["abi_bwd_args"].from_address(hip.hip_fake_arguments())
    assert args.q.data == tensors["q"].ctypes.data
    assert read_words(args.sequences.seqstart_q, 4) == [0, 5, 25, 40]
    plan.free()
    pack.free()
    assert hip.hip_fake_count(b"modules") == modules


def every_problem():
    """A part of the GPU suite's, which are hundreds: each kind of problem, of features and of sizes is in it."""
    return list(local_cases.problems(emulated=True))[::5]


def contents_of(case):
    return {role: aligned(x.shape, x.dtype) for role, x in case.contents().items()}


def run_case(plan, case, wait=lambda stream: 0):
    """What the outputs hold after a run by the stub, which moves bytes where a GPU computes."""
    tensors = contents_of(case)
    for role, x in case.contents().items():
        tensors[role][...] = x
    workspace = aligned(max(plan.info.workspace_bytes, 1), numpy.uint8)
    plan.run(addresses(tensors), workspace.ctypes.data)
    assert wait(None) == 0
    return {role: tensors[role].tobytes() for role in case.outputs}


def test_every_problem_is_what_the_service_makes_of_it(device, gpu, library, tmp_path):
    """The same kernels, the same refusals; and by HIP, from a pack, what CUDA does."""
    hip = ctypes.CDLL(str(hip_library()))
    hip.hip_fake_set(b"HIP_FAKE_LDS", b"232448")  # the kernels are Hopper's
    at = lambda case: dict.fromkeys(case.tensors, 4096)  # noqa: E731
    planned, refused, path = {}, 0, tmp_path / "pack"
    with gpu.device() as raw:
        for case in every_problem():
            problem = case.problem()
            for i, tensor in enumerate(problem["tensors"].values()):
                tensor["buffer"] = i + 1
            try:
                said = json.loads(raw.explain(problem))
            except fmha_wire.WireError as refusal:
                with pytest.raises(fmha_local.Failure) as caught:
                    device.plan(case.problem(), at(case))
                assert (caught.value.code, caught.value.field) == (refusal.code, refusal.field), case.name
                refused += 1
                continue
            if not said["plan"]:
                with pytest.raises(fmha_local.Failure) as caught:
                    device.plan(case.problem(), at(case))
                assert caught.value.name == "ENOKERNEL", case.name
                refused += 1
                continue
            plan = device.plan(case.problem(), at(case))
            kernels = [launch.kernel.decode() for launch in plan.launches() if launch.family != b"prepare"]
            assert kernels == [stage["kernel"] for stage in said["plan"]["stages"]], case.name
            planned[case] = run_case(plan, case), any("gpu_wgmma" in name or "gpu_wide" in name for name in kernels)
            plan.free()
    assert len(planned) > 10 * refused
    device.write_pack([library.problem(case.problem(), at(case)) for case in planned], path)
    content = path.read_bytes()
    path.write_bytes(content[:24] + b"hip\0\0" + content[29:])
    pack, modules = fmha_local.Pack(library, path), hip.hip_fake_count(b"modules")
    for case, (want, mapped) in planned.items():
        if mapped:
            with pytest.raises(fmha_local.Failure, match="tensor maps"):
                pack.plan(case.problem(), at(case))
            continue
        plan = pack.plan(case.problem(), at(case))
        assert run_case(plan, case, hip.hipStreamSynchronize) == want, case.name
        plan.free()
    pack.free()
    assert hip.hip_fake_count(b"modules") == modules
