# SPDX-License-Identifier: MIT
"""What a hostile or careless client may cost the others in a worker: memory that it keeps, tables that
it makes large or writes late, runs that are longer than they look."""
import json
import mmap
import os
import subprocess
import threading
import time

import fmha_wire
import fmhad
import numpy
import pytest
from test_gpu_layer import (FORWARD, TENSOR_BYTES, compiler, device_buffer, make_gpu,  # noqa: F401
                            problem)


def memory(daemon, index=0):
    return daemon.status()["devices"][index]["worker"]["memory"]


# ---- what clients keep ----


def test_answers_that_are_kept_are_counted(make_daemon):
    daemon = make_daemon({"limits": {"fds_per_uid": 24}})
    with daemon.device() as device:
        buffer = device.buffer_create(1 << 16)
        tensors = {r: {"buffer": buffer.id, "offset": 16384 * i, "dtype": "f32"}
                   for i, r in enumerate("qkvo")}
        asked = {"problem": {"batch": 1, "nhead_q": 1, "nhead_k": 1, "seqlen_q": 4, "seqlen_k": 4,
                             "hdim_q": 64, "hdim_v": 64, "tensors": tensors}}
        before = memory(daemon)["bytes"]
        kept = []
        with pytest.raises(fmha_wire.WireError) as caught:
            for _ in range(64):
                kept += device.call_with_fds("explain", asked)[1]
        assert caught.value.name == "EQUOTA"
        assert 8 <= len(kept) <= 24
        assert memory(daemon)["bytes"] >= before + 4096 * len(kept)
    # Hanging up changes nothing: it still has them.
    time.sleep(0.5)
    assert memory(daemon)["bytes"] >= 4096 * len(kept)
    for fd in kept:
        os.close(fd)
    assert fmhad.until(lambda: memory(daemon)["bytes"] == 0)
    with daemon.device() as device:
        device.buffer_create(4096)


def test_memory_that_is_kept_after_its_release_is_the_clients_own(daemon):
    """Its pages are gone when the daemon has taken them back, whatever the client still has mapped."""
    with daemon.device() as device:
        buffer = device.buffer_create(8 << 20)
        view = numpy.frombuffer(buffer.map, numpy.uint8)
        view[...] = 7
        os.fsync(buffer.fd)
        assert os.fstat(buffer.fd).st_blocks * 512 == 8 << 20
        device.call("buffer_release", {"buffer": buffer.id})
        assert fmhad.until(lambda: os.fstat(buffer.fd).st_blocks == 0)
        assert not view.any()
        view[0] = 1  # harmless
        # What the client brings along stays as it is.
        own = os.memfd_create("own", os.MFD_ALLOW_SEALING)
        os.ftruncate(own, 4096)
        os.pwrite(own, b"mine", 0)
        import fcntl
        fcntl.fcntl(own, 1033, 1 | 2 | 4)
        imported = device.buffer_import(own, 4096)
        device.call("buffer_release", {"buffer": imported.id})
        device.ping()
        assert os.pread(own, 4, 0) == b"mine"
        os.close(own)


def test_an_export_is_charged_and_one_at_a_time(make_gpu):
    """Of a GPU's kernels, which are so many that the first is still being written when the second is asked for."""
    daemon = make_gpu(limits={"memory_bytes_per_uid": 96 << 20})
    with daemon.device() as device, daemon.device() as other:
        everything = {"filter": "family == 'fwd'"}
        numbers = [(d, d.submit("registry_export", everything)) for d in (device, other)]
        outcomes = []
        for d, number in numbers:
            try:
                result, fds = d.wait(number)
                outcomes.append((result["size"], fds))
            except fmha_wire.WireError as error:
                outcomes.append(error.name)
        assert "EBUSY" in outcomes
        size, (fd,) = next(o for o in outcomes if not isinstance(o, str))
        assert memory(daemon)["bytes"] >= size
        assert json.loads(os.pread(fd, size, 0))["statistics"]["kernels"] > 1000
        os.close(fd)
        assert fmhad.until(lambda: memory(daemon)["bytes"] == 0)
        # Without a filter: what something is known about, which is nothing yet.
        assert json.loads(device.call_json("registry_export", {"filter": ""}))["kernels"] == []


def test_buffers_of_all_users_have_a_limit(make_daemon):
    daemon = make_daemon({"limits": {"buffers": 5, "buffers_per_uid": 9}})
    with daemon.device() as device:
        for _ in range(5):
            device.buffer_create(4096)
        with pytest.raises(fmha_wire.WireError) as caught:
            device.buffer_create(4096)
        assert caught.value.name == "EQUOTA" and "all users" in str(caught.value)


def test_workspaces_are_checked_as_they_are_charged(make_daemon):
    """64 KiB is the least that a workspace takes."""
    daemon = make_daemon({"limits": {"memory_bytes_per_uid": (64 << 10) + (48 << 10)}})
    with daemon.device() as device:
        buffer = device.buffer_create(64 << 10)
        tensors = {r: {"buffer": buffer.id, "offset": 16384 * i, "dtype": "f32"}
                   for i, r in enumerate("qkvo")}
        planned = device.plan({"batch": 1, "nhead_q": 1, "nhead_k": 1, "seqlen_q": 8,
                               "seqlen_k": 32, "hdim_q": 64, "hdim_v": 64, "n_splits": 2,
                               "tensors": tensors})
        assert 0 < planned["workspace_bytes"] < 48 << 10
        with pytest.raises(fmha_wire.WireError) as caught:
            device.run(planned["plan"])
        assert caught.value.name == "EQUOTA"


def test_a_packed_backward_takes_what_its_lengths_need(make_daemon):
    """64 rows of 4,096: the plan says the most, 1 MiB of dQ's sums and more, and the run takes little."""
    rows, total, hdim, part = 64, 4096, 64, 4096 * 64 * 4
    shapes = {"q": total, "o": total, "d_o": total, "dq": total, "k": rows, "v": rows, "dk": rows, "dv": rows}
    daemon = make_daemon({"limits": {"memory_bytes_per_uid": 10 * part + (512 << 10)}})
    rng = numpy.random.default_rng(1)
    with daemon.device() as device:
        buffer = device.buffer_create(10 * part)
        at = {role: i * part for i, role in enumerate([*shapes, "lse", "seqstart_q"])}
        views = {r: buffer.array("f32", (n, hdim), at[r])[:rows] for r, n in shapes.items()}
        at["seqstart_k"] = at["seqstart_q"]
        buffer.array("i32", (2,), at["seqstart_q"])[:] = 0, rows
        for role in ("q", "k", "v", "d_o"):
            views[role][...] = rng.standard_normal((rows, hdim))
        q, k, v, d_o = (views[r].astype(numpy.float64) for r in ("q", "k", "v", "d_o"))
        s = q @ k.T / 8
        lse = numpy.log(numpy.exp(s).sum(1, keepdims=True))
        p = numpy.exp(s - lse)
        views["o"][...] = p @ v
        buffer.array("f32", (total,), at["lse"])[:rows] = lse[:, 0]
        tensors = {r: {"buffer": buffer.id, "offset": at[r], "dtype": "i32" if "seq" in r else "f32"} for r in at}
        planned = device.plan({"op": "backward", "mode": "group", "batch": 1, "nhead_q": 1, "nhead_k": 1,
                               "seqlen_q": rows, "seqlen_k": rows, "total_q": total, "total_k": rows,
                               "hdim_q": hdim, "hdim_v": hdim, "tensors": tensors})
        assert planned["workspace_bytes"] > part
        device.run(planned["plan"])
        dq = p * (d_o @ v.T - ((p @ v) * d_o).sum(1, keepdims=True)) @ k / 8
        assert numpy.abs(views["dq"] - dq).max() < 1e-4
        assert numpy.abs(views["dv"] - p.T @ d_o).max() < 1e-4


# ---- time on the loop ----


class Pinger(threading.Thread):
    """Another client, which asks for a sign of life all the while: the CPU time of the loop that each answer took."""

    def __init__(self, daemon):
        super().__init__()
        self.device, self.times, self.stop = daemon.device(), [], threading.Event()

    def run(self):
        while not self.stop.is_set():
            before = fmhad.loop_seconds(self.device.worker_pid)
            self.device.ping(timeout=60)
            self.times.append(fmhad.loop_seconds(self.device.worker_pid) - before)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.stop.set()
        self.join()
        self.device.close()


def paged_problem(device, batch, columns, row_stride, seqlen_k=None):
    """One key a page of one page; a table of batch rows, all the same page."""
    table = device.buffer_create(max(4 * columns * (batch if row_stride else 1), 4096))
    lengths = device.buffer_create(max(4 * batch, 4096))
    lengths.array("i32", (batch,))[...] = seqlen_k or columns
    data = device.buffer_create(1 << 20)

    def tensor(buffer, dtype, offset=0, **more):
        return {"buffer": buffer.id, "offset": offset, "dtype": dtype, **more}

    return {
        "batch": batch, "nhead_q": 1, "nhead_k": 1, "seqlen_q": 1, "seqlen_k": columns,
        "hdim_q": 8, "hdim_v": 8, "page_size": 1, "n_pages": 1, "max_blocks": columns,
        "tensors": {
            "q": tensor(data, "f16"), "k": tensor(data, "f16", 256 << 10),
            "v": tensor(data, "f16", 320 << 10), "o": tensor(data, "f16", 512 << 10),
            "seqlen_k_per_batch": tensor(lengths, "i32"),
            "block_table": tensor(table, "i32", stride=[row_stride, 1]),
        },
    }


def test_a_large_table_is_judged_off_the_loop(daemon):
    """8 million entries: others are served meanwhile; and a bad one is still found."""
    batch, columns = 512, 16384
    with daemon.device() as device, Pinger(daemon) as pinger:
        asked = paged_problem(device, batch, columns, columns, seqlen_k=1)
        plan = device.plan(asked)["plan"]
        for _ in range(3):
            device.run(plan, timeout=30)
    assert max(pinger.times) < 0.25, max(pinger.times)


def test_a_table_of_one_row_costs_one_row(daemon):
    """Row stride 0: 64 KiB that stand for 500 million entries."""
    with daemon.device() as device, Pinger(daemon) as pinger:
        asked = paged_problem(device, 32768, 16384, 0, seqlen_k=1)
        pid = device.worker_pid
        plan = device.plan(asked)["plan"]
        device.run(plan, timeout=60)
    assert max(pinger.times) < 0.5, max(pinger.times)
    assert daemon.worker_pid() == pid


def test_a_run_is_judged_by_the_lengths_that_it_has(daemon):
    """14,000 sequences, a row each on average; but one of them has all."""
    n = 14000
    with daemon.device() as device, Pinger(daemon) as pinger:
        starts = device.buffer_create(8 * (n + 1))
        prefix = starts.array("i32", (n + 1,))
        prefix[...] = n
        prefix[0] = 0
        data = device.buffer_create(4 * 16 * n)
        tensors = {r: {"buffer": data.id, "offset": 16 * n * i, "dtype": "f16"}
                   for i, r in enumerate("qkvo")}
        for role in ("seqstart_q", "seqstart_k"):
            tensors[role] = {"buffer": starts.id, "offset": 0, "dtype": "i32"}
        plan = device.plan({"mode": "group", "batch": n, "nhead_q": 1, "nhead_k": 1, "seqlen_q": n,
                            "seqlen_k": n, "total_q": n, "total_k": n, "hdim_q": 8, "hdim_v": 8,
                            "tensors": tensors})["plan"]
        result = device.run(plan, timeout=60)
    assert result["kernel_ns"] > 100e6, "the test needs a run that takes a while"
    assert max(pinger.times) < result["kernel_ns"] * 1e-9 / 2, (max(pinger.times), result)


# ---- a GPU's queues and fences, on the stub ----


@pytest.fixture
def gpu(make_gpu):  # noqa: F811
    return make_gpu()


def group_problem(buffer, n_heads=2):
    """One sequence of 64 rows; its prefix sums lie behind the tensors."""
    tensors = {role: {"buffer": buffer, "offset": i * TENSOR_BYTES, "dtype": "f32"}
               for i, role in enumerate("qkvo")}
    for i, role in enumerate(("seqstart_q", "seqstart_k")):
        tensors[role] = {"buffer": buffer, "offset": 4 * TENSOR_BYTES + 256 * i, "dtype": "i32"}
    return {**FORWARD, "mode": "group", "total_q": 64, "total_k": 64, "tensors": tensors}


FENCE_AT = 4 * TENSOR_BYTES + 1024


def test_tables_written_behind_a_fence_are_read_behind_it(gpu):
    """By a client's kernel, say: when the run is asked for they are still garbage."""
    with gpu.device() as device:
        buffer, words = device_buffer(device, 5 * TENSOR_BYTES)
        at = 4 * TENSOR_BYTES // 4
        starts = [words[at:at + 2], words[at + 64:at + 66]]
        fences = {"waits": [{"buffer": buffer, "offset": FENCE_AT, "value": 1}],
                  "signals": [{"buffer": buffer, "offset": FENCE_AT + 4, "value": 1}]}
        for start in starts:
            start[...] = 0xffffffff
        words[: TENSOR_BYTES // 4] = 5
        plan = device.plan(group_problem(buffer))["plan"]
        device.run(plan, **fences)
        device.ping()
        for start in starts:
            start[...] = (0, 64)
        words[FENCE_AT // 4] = 1
        assert fmhad.until(lambda: words[FENCE_AT // 4 + 1] == 1)
        assert (words[3 * TENSOR_BYTES // 4: 4 * TENSOR_BYTES // 4] == 5).all()
        device.run(plan)  # no error was left behind


def refusal_of(device, plan):
    try:
        device.run(plan)
    except fmha_wire.WireError as error:
        return error
    return None


def test_bad_tables_behind_a_fence_are_refused_and_signalled(gpu):
    with gpu.device() as device:
        buffer, words = device_buffer(device, 5 * TENSOR_BYTES)
        at = 4 * TENSOR_BYTES // 4
        starts = [words[at:at + 2], words[at + 64:at + 66]]
        for start in starts:
            start[...] = (0, 64)
        plan = device.plan(group_problem(buffer))["plan"]
        for value in (1, 2):
            fences = {"waits": [{"buffer": buffer, "offset": FENCE_AT, "value": value}],
                      "signals": [{"buffer": buffer, "offset": FENCE_AT + 4, "value": value}]}
            device.run(plan, **fences)
            starts[1][...] = (0, 65)
            words[FENCE_AT // 4] = value
            # The client's stream goes on all the same, and the next run says what happened.
            assert fmhad.until(lambda v=value: words[FENCE_AT // 4 + 1] == v)
            starts[1][...] = (0, 64)
            told = fmhad.until(lambda: refusal_of(device, plan))
            assert told.name == "EINVAL" and told.field == "tensor.seqstart_k"
            device.run(plan)


def test_a_wait_is_no_longer_than_the_configuration_allows(make_daemon, make_gpu):  # noqa: F811
    daemon = make_gpu(limits={"fence_ms": 200})
    with daemon.device() as device:
        buffer, words = device_buffer(device, 5 * TENSOR_BYTES)
        plan = device.plan(problem(buffer))["plan"]
        began = time.monotonic()
        device.run(plan, waits=[{"buffer": buffer, "offset": FENCE_AT, "value": 1}],
                   timeout_ms=4000000000)
        assert fmhad.until(lambda: words[FENCE_AT // 4] == 1), "let go"
        assert time.monotonic() - began < 2


def test_a_users_waits_leave_queues_to_others(make_gpu):  # noqa: F811
    """Of five sessions that wait for what never comes, two are with the device."""
    daemon = make_gpu(limits={"fenced_sessions_per_uid": 2})
    devices = [daemon.device() for _ in range(5)]
    words = []
    for device in devices:
        buffer, view = device_buffer(device, 5 * TENSOR_BYTES)
        plan = device.plan(problem(buffer))["plan"]
        device.run(plan, waits=[{"buffer": buffer, "offset": FENCE_AT, "value": 1}],
                   signals=[{"buffer": buffer, "offset": FENCE_AT + 4, "value": 1}],
                   timeout_ms=10000)
        words.append(view)
    with daemon.device() as other:
        buffer, _ = device_buffer(other, 4 * TENSOR_BYTES)
        other.run(other.plan(problem(buffer))["plan"], timeout=2)
    worker = daemon.status()["devices"][0]["worker"]
    assert worker["runs"]["pending"] == 5
    assert worker["limits"]["fenced_sessions_per_uid"]["hits"] > 0
    # Each that ends makes room for one that has waited.
    for view in words:
        view[FENCE_AT // 4] = 1
        assert fmhad.until(lambda v=view: v[FENCE_AT // 4 + 1] == 1)
    for device in devices:
        device.close()


def large_problem(buffer):
    """A grid that fills the stub's 132 units: 80 sequences of two heads."""
    return {**FORWARD, "batch": 80,
            "tensors": {role: {"buffer": buffer, "offset": 80 * i * TENSOR_BYTES, "dtype": "f32"}
                        for i, role in enumerate("qkvo")}}


def test_turns_on_a_gpu_go_by_user_and_few_launches_are_ahead(make_gpu):  # noqa: F811
    """Kernels of 4 ms, one after the other. Twenty sessions of root keep the queue full; a light user's run
    waits for two launches, not for forty."""
    if fmhad.NO_OTHER_USERS:
        pytest.skip(fmhad.NO_OTHER_USERS)
    daemon = make_gpu(CUDA_STUB_KERNEL_US="4000")
    os.chmod(daemon.socket, 0o666)
    os.chmod(daemon.directory, 0o755)
    heavy = []
    for _ in range(20):
        device = daemon.device()
        buffer, _ = device_buffer(device, 4 * 80 * TENSOR_BYTES)
        heavy.append((device, device.plan(large_problem(buffer))["plan"]))
    ready, results = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgid(65534)
            os.setuid(65534)
            device = daemon.device()
            buffer, _ = device_buffer(device, 4 * 80 * TENSOR_BYTES)
            plan = device.plan(large_problem(buffer))["plan"]
            os.read(ready[0], 1)
            times = []
            for _ in range(9):
                began = time.monotonic()
                device.run(plan, timeout=20)
                times.append(time.monotonic() - began)
            os.write(results[1], json.dumps(times).encode())
        finally:
            os._exit(0)
    for device, plan in heavy:
        for _ in range(12):
            device.submit("run", {"plan": plan})
    os.write(ready[1], b"x")
    times = sorted(json.loads(os.read(results[0], 65536)))
    os.waitpid(child, 0)
    # Two launches of 4 ms and its own, and what a busy machine adds; behind 64 launches it took 260 ms.
    assert times[-2] < 0.1, times
    for device, _ in heavy:
        device.close()


# ---- two users ----

SECRET = 0x5EC2E700


def test_nothing_of_one_user_is_seen_by_another(daemon):
    """One user's memory is full of a pattern, in buffers, runs and what they leave behind; another one's
    random problems of every operation come out right all the while, and its new memory is zero."""
    if fmhad.NO_OTHER_USERS:
        pytest.skip(fmhad.NO_OTHER_USERS)
    os.chmod(daemon.socket, 0o666)
    os.chmod(daemon.directory, 0o755)
    verify = subprocess.Popen(
        [fmhad.find_program("fmhactl"), "verify", "--cases", "120", "--seed", "11", "--socket",
         daemon.socket],
        user=65534, group=65534, extra_groups=[], cwd="/", stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True)  # fmt: skip
    shape = (1, 256, 4, 64)
    n = int(numpy.prod(shape))
    with daemon.device() as device:
        rounds = 0
        while verify.poll() is None:
            buffer = device.buffer_create(16 * n)
            words = numpy.frombuffer(buffer.map, numpy.uint32)
            assert not words.any(), "new memory is zero"
            words[:] = SECRET + (numpy.arange(words.size, dtype=numpy.uint32) & 0xff)
            tensors = {r: {"buffer": buffer.id, "offset": 4 * n * i, "dtype": "f32"}
                       for i, r in enumerate("qkvo")}
            plan = device.plan({"batch": 1, "nhead_q": 4, "nhead_k": 4, "seqlen_q": 256,
                                "seqlen_k": 256, "hdim_q": 64, "hdim_v": 64, "n_splits": 2,
                                "tensors": tensors})["plan"]
            device.run(plan)
            kept = words[: 3 * n]
            assert ((kept & 0xffffff00) == SECRET).all(), "somebody wrote into it"
            device.call("plan_release", {"plan": plan})
            device.call("buffer_release", {"buffer": buffer.id})
            rounds += 1
    said = verify.communicate()[0]
    assert verify.returncode == 0, said[-2000:]
    assert rounds > 5


# ---- one run after another ----


def lengths_problem(device, batch):
    """One row and key a sequence, lengths in tables: beyond loop_entries they are judged off the loop."""
    n = batch * 8
    data, tables = device.buffer_create(16 * n), device.buffer_create(8 * batch)
    tables.array("i32", (2 * batch,))[...] = 1
    values = data.array("f32", (4, n))
    tensors = {r: {"buffer": data.id, "offset": 4 * n * i, "dtype": "f32"} for i, r in enumerate("qkvo")}
    for i, role in enumerate(("seqlen_q_per_batch", "seqlen_k_per_batch")):
        tensors[role] = {"buffer": tables.id, "offset": 4 * batch * i, "dtype": "i32"}
    plan = device.plan({"batch": batch, "nhead_q": 1, "nhead_k": 1, "seqlen_q": 1, "seqlen_k": 1,
                        "hdim_q": 8, "hdim_v": 8, "tensors": tensors})["plan"]
    return plan, values


def small_problem(device):
    data = device.buffer_create(4 * 1024)
    values = data.array("f32", (4, 256))
    tensors = {r: {"buffer": data.id, "offset": 1024 * i, "dtype": "f32"} for i, r in enumerate("qkvo")}
    plan = device.plan({"batch": 1, "nhead_q": 1, "nhead_k": 1, "seqlen_q": 4, "seqlen_k": 4,
                        "hdim_q": 64, "hdim_v": 64, "tensors": tensors})["plan"]
    return plan, values


def holds(values, wanted):
    return (abs(values - wanted) <= 1e-5 * wanted).all()


def test_no_run_has_anothers_arguments(daemon):
    """What the worker keeps of a run for the next of its plan must not outlive another plan's turn, be it
    bound on the loop or off it, refused or run."""
    with daemon.device() as first, daemon.device() as second:
        small, small_values = small_problem(first)
        large, large_values = lengths_problem(second, 9000)
        few, few_values = lengths_problem(second, 10)
        small_values[:3], large_values[:3], few_values[:3] = 7, 5, 3

        def check_small():
            small_values[3] = 0
            first.run(small)
            assert holds(small_values[3], 7), "its own output is written"
            assert not large_values[3].any() and not few_values[3].any(), "and nobody else's"

        for plan, values, wanted in ((large, large_values, 5), (few, few_values, 3)) * 3:
            check_small()
            second.run(plan)
            assert holds(values[3], wanted) and holds(small_values[3], 7)
            values[3] = 0
            check_small()
            check_small()


def test_an_open_is_answered_while_others_ask_for_status(daemon):
    """Two answers of the worker's in one message, one of them with a descriptor."""
    stop = threading.Event()

    def ask():
        with daemon.client() as client:
            while not stop.is_set():
                client.status()

    askers = [threading.Thread(target=ask) for _ in range(2)]
    for asker in askers:
        asker.start()
    try:
        with daemon.client(timeout=3) as client:
            until = time.monotonic() + 4
            while time.monotonic() < until:
                client.open_device(0).close()
    finally:
        stop.set()
        for asker in askers:
            asker.join()


def test_tasks_without_work_take_no_loop(make_daemon):
    """130 keys in pages of one, but splits as long as 2^31 - 1: a gigabyte of partial results."""
    daemon = make_daemon({"supervision": {"heartbeat_ms": 100, "heartbeat_timeout_ms": 2500}})
    with daemon.device() as device, Pinger(daemon) as pinger:
        data, tables = device.buffer_create(1 << 16), device.buffer_create(4096)
        words = tables.array("i32", (1024,))
        words[:2], words[16:146], words[256] = (0, 130), range(130), 1

        def tensor(buffer, dtype, offset):
            return {"buffer": buffer.id, "offset": offset, "dtype": dtype}

        asked = {
            "batch": 1, "nhead_q": 1, "nhead_k": 1, "seqlen_q": 1, "seqlen_k": 1 << 29,
            "hdim_q": 8, "hdim_v": 8, "page_size": 1, "n_pages": 130, "n_page_indices": 130,
            "tensors": {
                "q": tensor(data, "f16", 0), "k": tensor(data, "f16", 4096),
                "v": tensor(data, "f16", 8192), "o": tensor(data, "f16", 16384),
                "kv_indptr": tensor(tables, "i32", 0),
                "kv_page_indices": tensor(tables, "i32", 64),
                "kv_last_page_len": tensor(tables, "i32", 1024),
            },
        }
        pid = device.worker_pid
        try:
            plan = device.plan(asked)["plan"]
            for _ in range(2):
                device.run(plan, timeout=60)
        except fmha_wire.WireError as error:
            assert error.name in ("EQUOTA", "ENOTSUP", "ENOMEM")
    assert daemon.worker_pid() == pid
    assert max(pinger.times) < 1, max(pinger.times)
