# SPDX-License-Identifier: MIT
"""What a request may cost the loop, in CPU time of its thread, and who is to blame when one ends a
worker: of every method, not of those that somebody thought of."""
import contextlib
import functools
import json
import multiprocessing
import os
import pathlib
import re
import socket
import time

import pytest

import fmha_wire
import fmhad
from test_gpu_layer import Compiler, device_buffer, stub_folder
from test_isolation_worker import paged_problem

ATTACKER, OTHER = 65534, 65533
SANITIZED = b"__asan_init" in fmhad.find_program("fmhad").read_bytes()
SLOWER = 20 if SANITIZED else 1


def methods_of_a_worker():
    text = (fmhad.ROOT / "proto/include/proto/methods.h").read_text()
    found = re.findall(r'X\(\w+, "(\w+)", (\w+),', text)
    return [name for name, server in found if server in ("WORKER", "BOTH")]


def in_child(uid, function, *arguments):
    """What function returns as another user; an exception's name and words otherwise."""
    ours, theirs = multiprocessing.Pipe()

    def work():
        fmhad.become(uid)
        try:
            theirs.send(function(*arguments))
        except Exception as error:  # noqa: BLE001: told to the parent
            theirs.send(f"{type(error).__name__}: {error}")

    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    answer = ours.recv() if ours.poll(60) else "no answer"
    child.join()
    return answer


# ---- blame ----

PARAMS = {
    "buffer_create": {"size": 4096}, "buffer_release": {"buffer": 1}, "event_import": {"handle": b"x" * 64},
    "event_release": {"event": 1}, "plan_release": {"plan": 1}, "run": {"plan": 1}, "cancel": {"request": 1},
    "registry_export": {"filter": ""}, "registry_load": {"set": "x"}, "registry_unload": {"set": "x"},
    "inject": {"fault": "hang"}, "registry_get": {"kernel": "x"}, "registry_lift": {"kernel": "x"},
    "registry_set_priority": {"kernel": "x", "priority": 1}, "registry_forget": {"kernel": "x", "shape": "x"},
    "code": {"hash": b"x" * 32},
}
PROBLEM = {"batch": 1, "nhead_q": 1, "nhead_k": 1, "seqlen_q": 16, "seqlen_k": 16, "hdim_q": 32, "hdim_v": 32,
           "tensors": {role: {"buffer": i + 1, "dtype": "f32"} for i, role in enumerate("qkvo")}}
for _method in ("plan", "explain", "local_plan", "local_runs", "tune"):
    PARAMS[_method] = {"problem": PROBLEM}


def end_worker(daemon, method):
    with daemon.device() as device:
        device.call("inject", {"fault": f"in {method}"})
        fds = []
        if method in ("buffer_import", "registry_import", "registry_load"):
            fds = [pathlib.Path("/dev/null").open("rb")]
        params = {"kind": "memfd", "size": 4096} if method == "buffer_import" else PARAMS.get(method, {})
        try:
            device.call(method, params, [f.fileno() for f in fds], timeout=20)
        except (fmha_wire.Disconnected, OSError):
            return "ended"
    return "lives"


def may_open(daemon):
    with daemon.client() as client:
        with client.open_device(0) as device:
            device.ping()
    return "served"


def test_every_method_has_somebody_to_blame():
    """A worker that ends in any method of one user's: the user is barred after as many deaths as the
    configuration says, and told so; others are served."""
    supervision = {**fmhad.FAKE["supervision"], "quarantine_deaths": 2, "quarantine_s": 60, "restart_ms": 10}
    methods = methods_of_a_worker()
    assert len(methods) > 20
    with fmhad.Daemon({**fmhad.FAKE, "supervision": supervision}, open_to_all=True) as daemon:
        for n, method in enumerate(methods):
            uid = 50000 + n
            for _ in range(2):
                assert in_child(uid, may_open, daemon) == "served", method
                assert in_child(uid, end_worker, daemon, method) == "ended", method
            assert "no device can be opened" in in_child(uid, may_open, daemon), method
            assert in_child(OTHER, may_open, daemon) == "served", method
            device = daemon.status()["devices"][0]
            assert device["last_death"].endswith(f"during {method}"), device["last_death"]
            assert any(entry.get("uid") == uid and "kernel" not in entry for entry in device["quarantined"])


def test_an_administrator_is_not_barred():
    supervision = {**fmhad.FAKE["supervision"], "quarantine_deaths": 1, "restart_ms": 10}
    with fmhad.Daemon({**fmhad.FAKE, "supervision": supervision}) as daemon:
        for _ in range(3):
            assert end_worker(daemon, "census") == "ended"
            assert fmhad.until(lambda: daemon.status()["devices"][0]["state"] == "ready")
            assert may_open(daemon) == "served"
        assert daemon.status()["devices"][0]["quarantined"] == []


# ---- CPU time of the loop ----


class TooLong(AssertionError):
    """A piece of work was; or the machine gave its time to others in the midst of it, and counted that as ours."""


def within(pieces_ms, bounds_ms):
    for what, most in bounds_ms.items():
        if pieces_ms[what] >= most * SLOWER:
            raise TooLong(f"{what}: {pieces_ms[what]} ms, not below {most * SLOWER}: {pieces_ms}")


def three_attempts(test):
    """What takes long takes long each time."""

    @functools.wraps(test)
    def attempts(*arguments, **named):
        for left in (2, 1, 0):
            try:
                return test(*arguments, **named)
            except TooLong:
                if not left:
                    raise
        return None

    return attempts


def longest_pieces_ms(daemon):
    """What a worker's loop has done: the longest piece of each, in CPU time."""
    loop = daemon.status()["devices"][0]["worker"]["loop"]
    return {what: cost["longest_ns"] / 1e6 for what, cost in loop.items()}


def attack(function, *arguments, uid=ATTACKER):
    """Runs the function as the attacker."""

    def work():
        fmhad.become(uid)
        function(*arguments)

    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    return child


SMALL = {"batch": 1, "nhead_q": 1, "nhead_k": 1, "seqlen_q": 1, "seqlen_k": 1, "hdim_q": 32, "hdim_v": 32}


def small_plan(device, buffer):
    tensors = {role: {"buffer": buffer.id, "offset": 256 * i, "dtype": "f32"} for i, role in enumerate("qkvo")}
    return device.plan({**SMALL, "tensors": tensors})["plan"]


def hang_up_with_everything(daemon, start, ready, n):
    device = daemon.device()
    buffer = device.buffer_create(4096)
    for _ in range(n):
        small_plan(device, buffer)
        _, (fd,) = device.call_with_fds("buffer_create", {"size": 65536})
        os.write(fd, b"x" * 65536)
        os.close(fd)
    ready.set()
    start.wait(60)
    device.close()


def trace_everything(daemon, start, ready, n):
    device, reader = daemon.device(), daemon.device()
    reader.call_with_fds("trace", {})
    buffer = device.buffer_create(4096)
    plan = small_plan(device, buffer)
    for _ in range(n):
        device.run(plan)
    ready.set()
    start.wait(60)
    result, (fd,) = reader.call_with_fds("trace", {})
    events = json.loads(os.pread(fd, result["size"], 0))["events"]
    assert len(events) == n, len(events)


def use_many_shapes(daemon):
    with daemon.device() as device:
        buffer = device.buffer_create(65536)
        for n in range(1, 65):
            tensors = {role: {"buffer": buffer.id, "offset": 16384 * i, "dtype": "f32"} for i, role in enumerate("qkvo")}
            device.run(device.plan({**SMALL, "nhead_q": n, "nhead_k": n, "tensors": tensors})["plan"])
        return len(json.loads(device.call_json("census", {}))["shapes"])


@three_attempts
def test_a_census_of_everybody_gives_way():
    """1,024 shapes of 17 users, one of whom has to make room (3.5 ms in one piece for an administrator)."""
    with fmhad.Daemon({"loop_times": True, "tuning": {"automatic": False}}, open_to_all=True) as daemon:
        for uid in range(50000, 50016):
            assert in_child(uid, use_many_shapes, daemon) == 64
        assert in_child(50016, use_many_shapes, daemon) >= 1024 // 17
        with daemon.device() as device:
            census = json.loads(device.call_json("census", {}))
        assert len(census["shapes"]) == 1024 and census["evicted"] == 64
        times = [shape["device_ns"] for shape in census["shapes"]]
        assert times == sorted(times, reverse=True)
        assert {shape["uid"] for shape in in_child(50016, read_census, daemon)["shapes"]} == {50016}
        within(longest_pieces_ms(daemon), {"census": 1, "run": 2})
        assert daemon.status()["devices"][0]["worker"]["loop"]["census"]["n"] > 1024 / 12


def read_census(daemon):
    with daemon.device() as device:
        return json.loads(device.call_json("census", {}))


@pytest.mark.parametrize("function, n, what", [(hang_up_with_everything, 4000, "the end of a connection"),
                                               (trace_everything, 8000, "trace")])
@three_attempts
def test_what_walks_a_users_things_gives_way(function, n, what):
    """The loop does it in slices (in one piece 218 and 28 ms)."""
    limits = {"buffers_per_connection": 4096, "plans_per_connection": 4096, "memory_bytes_per_uid": 1 << 30}
    with fmhad.Daemon({"loop_times": True, "limits": limits}, open_to_all=True) as daemon:
        start, ready = multiprocessing.Event(), multiprocessing.Event()
        child = attack(function, daemon, start, ready, n)
        assert ready.wait(120)
        start.set()
        child.join(120)
        assert child.exitcode == 0
        assert fmhad.until(lambda: not sessions_of(daemon, ATTACKER))
        assert fmhad.until(lambda: daemon.status()["devices"][0]["worker"]["memory"]["bytes"] == 0)
        within(longest_pieces_ms(daemon), {what: 2})
        assert daemon.status()["devices"][0]["worker"]["loop"][what]["n"] > n / 100


@three_attempts
def test_each_user_has_a_share_of_an_iteration():
    """A flood of one user's, on many connections: another's ping waits for wake_us of it, and for what was begun before
    they were over."""
    shares = {}
    for wake_us in (200, 20000):
        with fmhad.Daemon({"limits": {"wake_us": wake_us, "frames_per_wake": 65536}}, open_to_all=True) as daemon:
            begin, end = multiprocessing.Event(), multiprocessing.Event()
            child = attack(flood, daemon, begin, end)
            assert begin.wait(20)
            shares[wake_us] = median_wait_ms(daemon, 40)
            end.set()
            child.join(20)
            assert child.exitcode == 0
    assert shares[200] < shares[20000], shares
    within({"a ping": shares[200]}, {"a ping": 2})


def flood(daemon, begin, end):
    """Always many requests under way: none waits for its answer."""
    devices = [daemon.device() for _ in range(8)]
    buffer = [device.buffer_create(4096) for device in devices]
    while not end.is_set():
        for device, one in zip(devices, buffer):
            tensors = {role: {"buffer": one.id, "offset": 256 * i, "dtype": "f32"} for i, role in enumerate("qkvo")}
            numbers = [device.submit("local_runs", {"problem": {**SMALL, "tensors": tensors}, "runs": 1})
                       for _ in range(24)]
            device.flooded = [*getattr(device, "flooded", []), numbers]
        for device in devices:
            while len(device.flooded) > 1:
                for number in device.flooded.pop(0):
                    device.wait(number)
        begin.set()


def median_wait_ms(daemon, n):
    """CPU time of the loop from a ping to its answer."""
    with daemon.device() as device:
        device.ping()
        waits = []
        for _ in range(n):
            before = fmhad.loop_seconds(device.worker_pid)
            device.ping()
            waits.append(fmhad.loop_seconds(device.worker_pid) - before)
            time.sleep(0.003)
    return sorted(waits)[n // 2] * 1e3


@three_attempts
def test_planning_by_a_model_gives_way(tmp_path):
    """Where a model judges many kernels in many numbers of splits, one number is a slice (2.3 ms in one piece). Clients
    that hang up in the midst of it leave nothing behind."""
    decode = {"batch": 8, "nhead_q": 64, "nhead_k": 8, "seqlen_q": 1, "hdim_q": 128, "hdim_v": 128,
              "tensors": {role: {"buffer": i + 1, "dtype": "bf16"} for i, role in enumerate("qkvo")}}
    config = {"loop_times": True, "devices": [{"backend": "cuda"}],
              "compile": {"helper": str(Compiler(tmp_path).path), "cache": str(tmp_path / "cache")}}
    with fmhad.Daemon(config, env={"LD_LIBRARY_PATH": str(stub_folder())}) as daemon:
        with daemon.device() as device:
            for n in range(10):
                problem = {**decode, "seqlen_k": 65536 - n}
                device.call("local_plan", {"problem": problem})
                device.call("local_runs", {"problem": problem, "runs": 1})
                device.explain(problem)
                with pytest.raises(fmha_wire.WireError):
                    device.plan({**problem, "tensors": {**problem["tensors"], "q": {"buffer": 77, "dtype": "bf16"}}})
        for _ in range(10):
            with daemon.device() as device:
                for _ in range(20):
                    device.submit("local_plan", {"problem": {**decode, "seqlen_k": 65536}})
        assert fmhad.until(lambda: not daemon.status()["devices"][0]["worker"]["sessions"])
        assert daemon.status()["devices"][0]["deaths"] == 0
        loop = daemon.status()["devices"][0]["worker"]["loop"]
        for method in ("plan", "explain", "local_plan", "local_runs"):
            cost = loop[method]
            assert cost["n"] > 50, loop
            assert cost["cpu_ns"] / cost["n"] < 0.5e6 * SLOWER, (method, cost)
        within(longest_pieces_ms(daemon), dict.fromkeys(("plan", "explain", "local_plan", "local_runs"), 3))


@three_attempts
def test_a_plan_that_is_chosen_again_costs_no_more_than_a_run_may(tmp_path):
    """Something faster has become known: looked for in slices (0.45 ms in one piece, now 0.35)."""
    config = {"loop_times": True, "devices": [{"backend": "cuda"}], "tuning": {"automatic": False},
              "compile": {"helper": str(Compiler(tmp_path).path), "cache": str(tmp_path / "cache")}}
    with fmhad.Daemon(config, env={"LD_LIBRARY_PATH": str(stub_folder())}) as daemon, daemon.device() as device:
        buffer, _ = device_buffer(device, 64 << 20)
        problem = {"batch": 1, "nhead_q": 8, "nhead_k": 1, "seqlen_q": 1, "seqlen_k": 65536, "hdim_q": 128, "hdim_v": 128,
                   "tensors": {r: {"buffer": buffer, "offset": i << 20, "dtype": "bf16"}
                               for r, i in zip("qokv", (0, 1, 2, 18))}}
        plan = device.plan(problem)
        splits = json.loads(device.explain(problem))["plan"]["n_splits"]
        selection = next(s for s in json.loads(device.explain(problem))["selections"] if s.get("chosen"))
        document = json.loads(device.call_json("registry_export", {"filter": "hdim_q == 128 and data_type == 'bf16'"}))

        def has_run(kernel):
            return json.loads(device.call_json("registry_get", {"kernel": kernel})).get("runs", 0)

        for us, candidate in enumerate([c["name"] for c in selection["candidates"] if c["verdict"] == "passed over"][:4]):
            document["kernels"] = [{"name": candidate, "tuned": [
                {"shape": selection["shape"], "splits": splits, "us": 0.5 - us / 10, "when": int(time.time()) + 10}]}]
            device.call_with_text("registry_import", json.dumps(document))
            assert fmhad.until(lambda c=candidate: device.run(plan["plan"]) and has_run(c) > 0, 20), candidate
        within(longest_pieces_ms(daemon), {"run": 1})


@three_attempts
def test_the_end_of_large_runs_is_another_threads_work():
    """Tables of 28 MiB and workspaces of 300 MB (5 and 25 ms of the loop for the last of them); what a user has charged
    is back when all is over, and the next run may have it at once."""
    limits = {"memory_bytes_per_uid": 2 << 30, "memory_bytes": 4 << 30}
    with fmhad.Daemon({"loop_times": True, "limits": limits}) as daemon:
        with contextlib.ExitStack() as stack:
            devices = [stack.enter_context(daemon.device()) for _ in range(8)]
            plans = [device.plan(paged_problem(device, 512, 14336, 14336, seqlen_k=1))["plan"] for device in devices]
            for _ in range(3):
                numbers = [device.submit("run", {"plan": plan}) for device, plan in zip(devices, plans)]
                for device, number in zip(devices, numbers):
                    device.wait(number, 60)
        with daemon.device() as device:
            buffer = device.buffer_create(512 << 20)
            tensors = {r: {"buffer": buffer.id, "offset": i << 24, "dtype": "f32"} for i, r in enumerate("qkvo")}
            planned = device.plan({"batch": 1, "nhead_q": 16, "nhead_k": 16, "seqlen_q": 2048, "seqlen_k": 1024,
                                   "hdim_q": 32, "hdim_v": 128, "n_splits": 16, "tensors": tensors})
            assert 256 << 20 < planned["workspace_bytes"] < 512 << 20
            for _ in range(1 if SANITIZED else 3):
                device.run(planned["plan"], timeout=100)
        within(longest_pieces_ms(daemon), {"the end of a run or call": 2, "run": 2})
        assert fmhad.until(lambda: daemon.status()["devices"][0]["worker"]["memory"]["bytes"] == 0)


NASTY = '"}\\n],{"uid":0,'


def hold_sessions(daemon, ready, end, n):
    sessions = []
    for _ in range(n):
        with daemon.client(name=NASTY) as client:
            sessions.append(client.open_device(0))
    ready.set()
    end.wait(60)
    assert len(sessions_of(daemon, os.geteuid())) == n
    assert {s["client"] for s in sessions_of(daemon, os.geteuid())} == {NASTY}
    assert len(daemon.status()["devices"][0]["worker"]["sessions"]) == n, "others' are nobody's business"


@three_attempts
def test_a_status_of_many_sessions_gives_way():
    """960 sessions were 14 ms of a worker's loop and 14 ms of the front's, for anybody who asked."""
    with fmhad.Daemon({"loop_times": True}, open_to_all=True) as daemon:
        end, children = multiprocessing.Event(), []
        for uid in range(50000, 50004):
            ready = multiprocessing.Event()
            children.append(attack(hold_sessions, daemon, ready, end, 100, uid=uid))
            assert ready.wait(60)
        status = daemon.status()
        assert len(status["devices"][0]["worker"]["sessions"]) == 400
        assert {s["client"] for s in status["devices"][0]["worker"]["sessions"]} == {NASTY}
        end.set()
        for child in children:
            child.join(60)
            assert child.exitcode == 0
        status = daemon.status()
        within(longest_pieces_ms(daemon), {"worker_status": 2})
        within({"status": status["front"]["loop"]["status"]["longest_ns"] / 1e6}, {"status": 3})


def sessions_of(daemon, uid):
    return [s for s in daemon.status()["devices"][0]["worker"]["sessions"] if s["uid"] == uid]


def private_mib(pid):
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Anonymous:")) / 1024


@pytest.mark.skipif(SANITIZED, reason="a sanitizer keeps what was freed")
def test_an_idle_worker_keeps_nothing_of_sessions_that_have_ended():
    """Plans are memory, too, and lie between those of others who stay."""
    with fmhad.Daemon({"tuning": {"automatic": False}}) as daemon, contextlib.ExitStack() as stack:
        pid, others = daemon.worker_pid(), [stack.enter_context(daemon.device()) for _ in range(20)]
        before = private_mib(pid)
        with daemon.device() as device:
            buffer = device.buffer_create(4096)
            for other in others:
                for _ in range(100):
                    small_plan(device, buffer)
                small_plan(other, other.buffer_create(4096))
            assert private_mib(pid) > before + 10
        assert fmhad.until(lambda: private_mib(pid) < before + 6, 20, 0.1)


# ---- what others see, and places that others hold ----


def exported(daemon):
    with daemon.device() as device:
        kernels = json.loads(device.call_json("registry_export", {}))["kernels"]
        return kernels, json.loads(device.call_json("registry_get", {"kernel": kernels[0]["name"]}))


def test_kernels_do_not_tell_what_others_run():
    """Shapes, measured times and counts of runs are shown to administrators only."""
    with fmhad.Daemon(open_to_all=True) as daemon, daemon.device() as device:
        buffer = device.buffer_create(4096)
        device.run(small_plan(device, buffer))
        tuned = device.call("tune", {"problem": {**SMALL, "tensors": {
            role: {"buffer": i + 1, "dtype": "f32"} for i, role in enumerate("qkvo")}}}, timeout=60)
        kernels, _ = exported(daemon)
        assert tuned["shape"] in json.dumps(kernels) and any("runs" in kernel for kernel in kernels)
        kernels, one = in_child(ATTACKER, exported, daemon)
        assert kernels and tuned["shape"] not in json.dumps([kernels, one])
        for kernel in [*kernels, one]:
            assert not {"runs", "run_ns", "tuned"} & kernel.keys(), kernel


def hold_metrics(path, ready, end):
    sockets = [socket.socket(socket.AF_UNIX) for _ in range(16)]
    for sock in sockets:
        sock.connect(path)
    ready.set()
    end.wait(20)


def test_nobody_keeps_the_administrator_from_the_metrics(tmp_path):
    path = str(tmp_path / "metrics")
    tmp_path.chmod(0o755)
    for parent in list(tmp_path.parents)[:3]:
        parent.chmod(parent.stat().st_mode | 0o055)
    with fmhad.Daemon({"metrics_socket": path}, open_to_all=True):
        ready, end = multiprocessing.Event(), multiprocessing.Event()
        child = attack(hold_metrics, path, ready, end)
        assert ready.wait(20)
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(3)
            sock.connect(path)
            sock.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert sock.recv(64).startswith(b"HTTP/1.0 200")
        end.set()
        child.join()
