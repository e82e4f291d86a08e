# SPDX-License-Identifier: MIT
"""Status, idleness, and runs of several clients on one worker."""
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import fmha_wire
import fmhad
import pytest
from test_supervision import prepare, status


# ---- status ----


def test_status_shows_what_there_is(daemon):
    with daemon.client(name="tester") as client, client.open_device(0) as device:
        plan, _ = prepare(device)
        device.run(plan)
        document = status(client)
        assert document["front"]["pid"] == daemon.pid
        assert [c["client"] for c in document["front"]["clients"]] == ["tester"]
        (entry,) = document["devices"]
        assert entry["state"] == "ready" and entry["worker_pid"] == device.worker_pid
        worker = entry["worker"]
        (session,) = worker["sessions"]
        assert session["uid"] == os.geteuid() and session["pid"] == os.getpid()
        assert (session["buffers"], session["plans"], session["runs"]) == (1, 1, 1)
        assert worker["latency_ns"]["kernel"]["n"] == 1
        assert worker["latency_ns"]["total"]["p50"] >= worker["latency_ns"]["kernel"]["p50"]
        for limits in (document["front"]["limits"], worker["limits"]):
            assert all(set(entry) == {"value", "hits"} for entry in limits.values())


def test_status_does_not_wait_for_a_stuck_worker(make_daemon):
    daemon = make_daemon({"devices": [{"backend": "cpu", "threads": 1}] * 2,
                          "supervision": {"status_ms": 200, "heartbeat_timeout_ms": 60000}})  # fmt: skip
    with daemon.client() as client:
        pid = status(client)["devices"][0]["worker_pid"]
        os.kill(pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            devices = status(client)["devices"]
            assert time.monotonic() - began < 30, "before it is given up"
            assert devices[0]["worker"] is None and devices[1]["worker"]["pid"]
        finally:
            os.kill(pid, signal.SIGCONT)
        assert fmhad.until(lambda: status(client)["devices"][0]["worker"])


def test_status_hides_other_users(daemon):
    if fmhad.NO_OTHER_USERS:
        pytest.skip(fmhad.NO_OTHER_USERS)
    os.chmod(daemon.socket, 0o666)
    os.chmod(daemon.directory, 0o755)
    program = (
        "import json, sys\n"
        f"sys.path.insert(0, {os.path.dirname(fmha_wire.__file__)!r})\n"
        "import fmha_wire\n"
        "client = fmha_wire.Client.connect(sys.argv[1], name='other')\n"
        "device = client.open_device(0)\n"
        "print(client.status())\n"
    )
    with daemon.client(name="mine") as client, client.open_device(0) as device:
        device.ping()
        text = subprocess.run(
            [sys.executable, "-c", program, daemon.socket],
            user=65534, group=65534, extra_groups=[], cwd="/",
            check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
        seen = json.loads(text)
        assert {c["uid"] for c in seen["front"]["clients"]} == {65534}
        assert {s["uid"] for s in seen["devices"][0]["worker"]["sessions"]} == {65534}
        mine = status(client)
        assert "mine" in {c["client"] for c in mine["front"]["clients"]}


# ---- idle ----


def wake_ups(pid):
    total = 0
    for task in os.listdir(f"/proc/{pid}/task"):
        text = pathlib.Path(f"/proc/{pid}/task/{task}/status").read_text()
        total += int(text.split("voluntary_ctxt_switches:")[1].split()[0])
    return total


def test_idle_daemon_sleeps_and_is_small(make_daemon):
    daemon = make_daemon()
    with daemon.device() as device:
        plan, _ = prepare(device)
        device.run(plan)
        device.run(plan)
    pids = [daemon.pid, *daemon.children()]
    time.sleep(1.5)  # the last heartbeat notices that nobody is attached
    before = [wake_ups(pid) for pid in pids]
    time.sleep(2)
    assert [wake_ups(pid) - count for pid, count in zip(pids, before)] == [0, 0]
    for kib in daemon.rss_kib():
        assert kib < 10 * 1024


def core_seconds(pid):
    """The time for which threads of a process have been on a core."""
    return sum(
        int(pathlib.Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()[0])
        for task in os.listdir(f"/proc/{pid}/task")
    ) / 1e9


# The longest window that there is, so that a process that looks for requests without need shows.
WIDE_WINDOW = {"limits": {"spin_us": 1000}, "supervision": {"heartbeat_ms": 60000,
               "heartbeat_timeout_ms": 60000}}  # fmt: skip


def test_nobody_spins_for_a_client_that_calls_now_and_then(make_daemon):
    daemon = make_daemon(WIDE_WINDOW)
    with daemon.client() as client, client.open_device(0) as device:
        pids = [daemon.pid, device.worker_pid]
        before = sum(core_seconds(pid) for pid in pids)
        for _ in range(200):
            client.ping()
            device.ping()
            time.sleep(0.003)
        # Two processes that looked for the next request would have spent 0.4 s.
        assert sum(core_seconds(pid) for pid in pids) - before < 0.2


def test_spinning_ends_when_a_client_falls_silent(make_daemon):
    daemon = make_daemon(WIDE_WINDOW)
    with daemon.client() as client, client.open_device(0) as device:
        pids = [daemon.pid, device.worker_pid]
        for _ in range(2000):
            client.ping()
        for _ in range(2000):
            device.ping()
        def still():
            before = [(wake_ups(pid), core_seconds(pid)) for pid in pids]
            time.sleep(0.3)
            return [(wake_ups(pid), core_seconds(pid)) for pid in pids] == before

        assert fmhad.until(still, 10)


def test_threads_are_named_and_counted(make_daemon):
    daemon = make_daemon({"devices": [{"backend": "cpu", "threads": 3}]})
    (worker,) = daemon.children()
    names = [
        pathlib.Path(f"/proc/{worker}/task/{task}/comm").read_text().strip()
        for task in os.listdir(f"/proc/{worker}/task")
    ]
    assert sorted(n for n in names if n.startswith("fmhad-cpu-")) == [
        "fmhad-cpu-0",
        "fmhad-cpu-1",
        "fmhad-cpu-2",
    ]
    with daemon.client() as client:
        assert client.devices()[0]["compute_units"] == 3


# ---- runs ----


def test_timeout_and_cancel(daemon):
    with daemon.device() as device:
        plan, _ = prepare(device, (1, 4096, 8, 64))
        with pytest.raises(fmha_wire.WireError) as caught:
            device.run(plan, timeout_ms=30)
        assert caught.value.name == "ETIMEDOUT"
        numbers = [device.submit("run", {"plan": plan}) for _ in range(6)]
        for number in reversed(numbers):
            device.call("cancel", {"request": number})
        for number in numbers:
            with pytest.raises(fmha_wire.WireError) as caught:
                device.wait(number, 5)
            assert caught.value.name == "ECANCELED"
        with pytest.raises(fmha_wire.WireError) as caught:
            device.call("cancel", {"request": numbers[0]})
        assert caught.value.name == "ENOENT"


def test_small_runs_pass_large_ones(daemon):
    """A small request waits for at most a turn of a large one, not for its end."""
    with daemon.device() as large, daemon.device() as small:
        large_plan, _ = prepare(large, (2, 4096, 8, 128))
        small_plan, _ = prepare(small, (1, 64, 2, 64))
        small.run(small_plan)
        number = large.submit("run", {"plan": large_plan})
        time.sleep(0.05)
        times = []
        for _ in range(20):
            began = time.monotonic()
            small.run(small_plan)
            times.append(time.monotonic() - began)
        busy = large.submit("ping")
        result, _ = large.wait(number, 60)
        large.wait(busy)
        assert result["kernel_ns"] > sum(times) * 1e9 / 2  # it was under way all the time
        assert sorted(times)[10] < result["kernel_ns"] * 1e-9 / 5
        assert sorted(times)[10] < 0.03


def test_objects_are_private_to_their_connection(daemon):
    with daemon.device() as mine, daemon.device() as other:
        plan, buffer = prepare(mine)
        calls = [
            lambda: other.run(plan),
            lambda: other.call("buffer_release", {"buffer": buffer.id}),
            lambda: other.call("plan_release", {"plan": plan}),
            lambda: other.plan(mine.last_problem),
        ]
        for call in calls:
            with pytest.raises(fmha_wire.WireError) as caught:
                call()
            assert caught.value.name == "ENOENT"
        mine.run(plan)
        buffer.release()
        with pytest.raises(fmha_wire.WireError) as caught:
            mine.run(plan)  # accepted once, but its memory is gone
        assert (caught.value.name, caught.value.field) == ("ENOENT", "tensor.q.buffer")
        with pytest.raises(fmha_wire.WireError) as caught:
            mine.call("buffer_release", {"buffer": buffer.id})
        assert caught.value.name == "ENOENT"


def test_runs_of_one_plan_differ_only_as_they_say(daemon):
    """What one run was asked to do differently is forgotten by the next one."""
    shape = (1, 16, 2, 64)
    count = 16 * 2 * 64
    with daemon.device() as device:
        plan, buffer = prepare(device, shape)
        other_plan, other = prepare(device, shape)
        spare = device.buffer_create(4 * count)
        q, out = buffer.array("f32", shape), buffer.array("f32", shape, 12 * count)
        elsewhere = spare.array("f32", shape)

        device.run(plan)
        first = out.copy()
        assert abs(first).max() > 0
        for _ in range(3):
            out[...] = 0
            device.run(plan)
            assert (out == first).all()
        # Into other memory, then again into its own.
        out[...] = 0
        device.run(plan, rebinds=[{"role": "o", "buffer": spare.id, "offset": 0}])
        assert (elsewhere == first).all() and (out == 0).all()
        elsewhere[...] = 0
        device.run(plan)
        assert (out == first).all() and (elsewhere == 0).all()
        # Two plans in turn, and memory that changes between runs.
        q *= 0.5
        for _ in range(3):
            device.run(plan)
            device.run(other_plan)
        assert not (out == first).all()
        assert (other.array("f32", shape, 12 * count) == first).all()
        q *= 2
        device.run(plan)
        assert (out == first).all()
        # What was bound before is not used when it is gone.
        del q, out
        buffer.release()
        with pytest.raises(fmha_wire.WireError) as caught:
            device.run(plan)
        assert (caught.value.name, caught.value.field) == ("ENOENT", "tensor.q.buffer")
        device.run(other_plan)


def test_a_dropout_state_holds_for_one_run(daemon):
    shape = (1, 16, 2, 64)
    with daemon.device() as device:
        _, buffer = prepare(device, shape)
        problem = {**device.last_problem, "dropout_p": 0.5, "dropout_seed": 1}
        out = buffer.array("f32", shape, 3 * 4 * 16 * 2 * 64)

        def run(**params):
            device.run(plan, **params)
            return out.copy()

        plan = device.plan(problem)["plan"]
        first = run()
        other = run(has_dropout_state=True, dropout_seed=2, dropout_offset=0)
        assert not (other == first).all()
        assert (run() == first).all()
        assert (run(has_dropout_state=True, dropout_seed=2, dropout_offset=0) == other).all()
        assert (run() == first).all()


def test_many_threads_of_one_user_share_one_worker(daemon):
    errors = []

    def client(seed):
        try:
            with daemon.device() as device:
                plan, _ = prepare(device, (1, 32 + 8 * seed, 2, 64))
                for _ in range(20):
                    device.run(plan)
        except BaseException as error:  # pylint: disable=broad-except
            errors.append(error)

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
