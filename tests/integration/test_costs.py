# SPDX-License-Identifier: MIT
"""What one request of each method may cost a loop in one piece: SECURITY.md's table says it, in CPU time of the loop's
thread, and here each is asked for with much behind it, while somebody else's question waits."""
import contextlib
import fcntl
import json
import os
import pathlib
import random
import re
import signal
import socket

import fmha_wire
import fmhad
import pytest
from test_bounds import SANITIZED, SMALL, small_plan
from test_gpu_layer import F_ADD_SEALS, SEALS, Compiler, Event, compiler, device_buffer, make_gpu, stub_folder  # noqa: F401
from test_isolation_worker import paged_problem

MANY = 4000  # plans, buffers, runs
SLOWER = 20 if SANITIZED else 1
DECODE = {"batch": 8, "nhead_q": 64, "nhead_k": 8, "seqlen_q": 1, "seqlen_k": 65536, "hdim_q": 128, "hdim_v": 128}


def methods():
    text = (fmhad.ROOT / "proto/include/proto/methods.h").read_text()
    return {name: server for name, server in re.findall(r'X\(\w+, "(\w+)", (\w+),', text)}


def bounds():
    """Milliseconds by method."""
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| ([\d.]+) ms \|", (fmhad.ROOT / "SECURITY.md").read_text(), re.M)
    return {method: float(bound) for names, bound in rows for method in re.findall(r"\w+", names)}


def test_every_method_has_a_bound():
    assert bounds().keys() == methods().keys()


def longest_piece_ms(pid, other, begin):
    """The most CPU time of the loop that one ping of another connection's had to wait for, from @begin() until what it
    returns is true. Of three attempts the least: the loop has other things to do now and then."""
    least = 1e9
    for _ in range(3):
        other.ping()
        longest, before = 0.0, fmhad.loop_seconds(pid)
        is_over, over = begin(), False
        while not over:
            over = is_over()
            other.ping()
            now = fmhad.loop_seconds(pid)
            longest, before = max(longest, now - before), now
        least = min(least, longest)
    return least * 1e3


class Asker:
    """One request of a method at a time on a connection."""

    def __init__(self, connection):
        self.connection = connection

    def __call__(self, method, params=None, fds=(), refused=None):
        connection, opened = self.connection, [fd() if callable(fd) else fd for fd in fds]

        def begin():
            number = connection.submit(method, params, opened)

            def is_over():
                if not connection.is_answered(number):
                    return False
                try:
                    for fd in connection.wait(number)[1]:
                        os.close(fd)
                except fmha_wire.WireError as error:
                    assert error.name == refused, (method, error)
                return True

            return is_over

        return begin


def sealed(text):
    fd = os.memfd_create("document", os.MFD_ALLOW_SEALING)
    os.write(fd, text)
    fcntl.fcntl(fd, F_ADD_SEALS, SEALS)
    return fd


def fill(device):
    """Plans, buffers, shapes in the census, runs in the trace."""
    device.call_with_fds("trace", {})
    buffer = device.buffer_create(65536)
    for n in range(1, 65):
        tensors = {r: {"buffer": buffer.id, "offset": 16384 * i, "dtype": "f32"} for i, r in enumerate("qkvo")}
        plan = device.plan({**SMALL, "seqlen_k": n, "tensors": tensors})["plan"]
        device.run(plan)
    plans = [small_plan(device, buffer) for _ in range(MANY)]
    for _ in range(MANY):
        device.run(plans[0])
    for _ in range(MANY - 100):
        os.close(device.call_with_fds("buffer_create", {"size": 4096})[1][0])
    return buffer, plans


def on_a_worker(device, ask):
    """Method: a request of it, with much behind it."""
    buffer, plans = fill(device)
    problem = {**DECODE, "tensors": {r: {"buffer": i + 1, "dtype": "bf16"} for i, r in enumerate("qkvo")}}
    exported = device.call_json("registry_export", {})
    kernel = json.loads(exported)["kernels"][0]["name"] if json.loads(exported)["kernels"] else device.plan(
        {**SMALL, "tensors": {r: {"buffer": buffer.id, "offset": 16384 * i, "dtype": "f32"} for i, r in enumerate("qkvo")}}
    )["stages"][0]["kernel"]
    tables = device.plan(paged_problem(device, 512, 14336, 14336, seqlen_k=1))["plan"]  # 28 MiB
    memory = sealed(bytes(1 << 20))
    return {
        "ping": ask("ping"),
        "buffer_create": ask("buffer_create", {"size": 256 << 20}),
        "buffer_import": ask("buffer_import", {"kind": "memfd", "size": 1 << 20}, [memory]),
        "buffer_release": ask("buffer_release", {"buffer": buffer.id}, refused="ENOENT"),
        "plan_release": ask("plan_release", {"plan": plans[1]}, refused="ENOENT"),
        "explain": ask("explain", {"problem": problem}),
        "run": ask("run", {"plan": tables}),
        "cancel": ask("cancel", {"request": 1}, refused="ENOENT"),
        "registry_export": ask("registry_export", {}),
        "registry_import": ask("registry_import", {}, [sealed(exported.encode())]),
        "registry_load": ask("registry_load", {"set": "all"}, [sealed(json.dumps(["*"]).encode())]),
        "registry_unload": ask("registry_unload", {"set": "all"}, refused="ENOENT"),
        "registry_get": ask("registry_get", {"kernel": kernel}),
        "registry_set_priority": ask("registry_set_priority", {"kernel": kernel, "priority": 3}),
        "registry_lift": ask("registry_lift", {"kernel": kernel}, refused="ENOENT"),
        "registry_forget": ask("registry_forget", {"kernel": kernel, "shape": "*"}, refused="ENOENT"),
        "census": ask("census"),
        "trace": ask("trace"),
    }


def in_ms(pid, other, requests):
    allowed = bounds()
    found = {name: longest_piece_ms(pid, other, begin) for name, begin in requests.items()}
    print({name: round(ms, 3) for name, ms in found.items()})
    return {name: ms for name, ms in found.items() if ms > allowed[name] * SLOWER}


@pytest.fixture
def wide():
    limits = {"buffers_per_connection": 4200, "plans_per_connection": 4200, "memory_bytes_per_uid": 2 << 30}
    with fmhad.Daemon({"limits": limits, "tuning": {"automatic": False}}) as daemon:
        yield daemon


def test_methods_of_a_worker(wide):
    with wide.device() as device, wide.device() as other:
        assert in_ms(device.worker_pid, other, on_a_worker(device, Asker(device))) == {}


def test_methods_of_a_worker_whose_kernels_are_compiled(make_gpu):  # noqa: F811
    """Plans by a model of times, the dearest: split decode."""
    gpu = make_gpu()
    with gpu.device() as device, gpu.device() as other:
        ask, event = Asker(device), Event()
        buffer, _ = device_buffer(device, 64 << 20)
        problem = {**DECODE, "tensors": {r: {"buffer": i + 1, "dtype": "bf16"} for i, r in enumerate("qkvo")}}
        launch = device.call("local_plan", {"problem": problem})["launches"][0]
        requests = {
            "plan": ask("plan", {"problem": {**problem, "batch": 1, "nhead_q": 8, "nhead_k": 1, "tensors": {
                r: {"buffer": buffer, "offset": i << 20, "dtype": "bf16"} for r, i in zip("qokv", (0, 1, 2, 18))}}}),
            "explain": ask("explain", {"problem": problem}),
            "tune": ask("tune", {"problem": {**SMALL, "tensors": problem["tensors"]}}),
            "local_plan": ask("local_plan", {"problem": problem}),
            "local_runs": ask("local_runs", {"problem": problem, "runs": 1}),
            "code": ask("code", {"hash": launch["code"]}),
            "event_import": ask("event_import", {"handle": event.handle}),
            "event_release": ask("event_release", {"event": 77}, refused="ENOENT"),
            "inject": ask("inject", {"fault": "none"}, refused="ENOTSUP"),
        }
        assert in_ms(device.worker_pid, other, requests) == {}


def loops(status):
    """What the loops of all processes have spent, by method."""
    return [status["front"]["loop"], *(device["worker"]["loop"] for device in status["devices"])]


def change_and_tune(daemon, slow, go):
    """All that the front and its workers ask each other while they serve."""
    with daemon.device() as device, daemon.device(1) as fake:
        problem = {**DECODE, "tensors": {r: {"buffer": i + 1, "dtype": "bf16"} for i, r in enumerate("qkvo")}}
        kernel = device.call("local_plan", {"problem": problem})["launches"][0]["kernel"]
        kernel = json.loads(device.explain(problem))["selections"][0]["candidates"][0]["name"] or kernel
        device.call("registry_set_priority", {"kernel": kernel, "priority": 3})
        tensors = {r: {"buffer": i + 1, "dtype": "f32"} for i, r in enumerate("qkvo")}
        fake.call("tune", {"problem": {**SMALL, "tensors": tensors}, "again": True, "budget_ms": 20}, timeout=60)
        slow.does(f"until [ -e {go} ]; do sleep 0.02; done")
        built = slow.count()
        with daemon.device() as leaves:
            leaves.submit("local_plan", {"problem": {**problem, "hdim_q": 64, "hdim_v": 64}})
            assert fmhad.until(lambda: slow.count() > built)
        assert fmhad.until(lambda: "compile_cancel" in daemon.status()["front"]["loop"])
        go.touch()
    with daemon.client() as client:
        pool = client.call("pool_open", {"name": "p", "n_pages": 300, "page_bytes": 4096, "on_device": 1})["pool"]
        client.call("pool_lease", {"pool": pool, "n": 300})
        client.call("pool_close", {"pool": pool})
    assert fmhad.until(lambda: "worker_clear" in loops(daemon.status())[1])
    assert fmhad.until(lambda: "tuned_result" in daemon.status()["front"]["loop"])
    assert fmhad.until(lambda: "tuned_result" in loops(daemon.status())[3])
    return loops(daemon.status())


def drain(daemon):
    """The end of a daemon, seen by somebody who is connected still, while a run that never ends is waited for."""
    with daemon.client() as client, client.open_device(1) as fake:
        plan = small_plan(fake, fake.buffer_create(4096))
        fake.call("inject", {"fault": "hang"})
        fake.submit("run", {"plan": plan})
        fake.ping()
        daemon.process.send_signal(signal.SIGTERM)
        found = []

        def have_drained():
            found[:] = loops(json.loads(client.status()))
            return all("worker_drain" in loop for loop in found[1:])

        assert fmhad.until(have_drained, 20)
    daemon.stop(signal.SIGKILL)
    return found


def test_methods_of_the_control_sockets(tmp_path):
    """What the front and a worker ask each other, as the loops measure it themselves. Of three daemons the least: see
    test_bounds.py."""
    slow = Compiler(tmp_path)
    fake = {"backend": "fake", "threads": 2, "allow_faults": True}
    config = {"loop_times": True, "devices": [{"backend": "cuda"}, fake, fake],
              "compile": {"helper": str(slow.path), "cache": str(tmp_path / "cache")}}
    least = {}
    for n in range(3):
        slow.does("printf 'stub code' >\"$5\"")
        with fmhad.Daemon(config, env={"LD_LIBRARY_PATH": str(stub_folder())}) as daemon:
            for found in (change_and_tune(daemon, slow, tmp_path / f"go{n}"), drain(daemon)):
                for who, loop in zip(("front", "gpu", "fake", "other fake"), found):
                    for name, cost in loop.items():
                        least[who, name] = min(least.get((who, name), 1e9), cost["longest_ns"] / 1e6)
    allowed, control = bounds(), {name for name, server in methods().items() if server == "CONTROL"}
    seen = {(who, name): ms for (who, name), ms in least.items() if name in control}
    print(seen)
    assert {name for _, name in seen} == control
    assert {key: ms for key, ms in seen.items() if ms > allowed[key[1]] * SLOWER} == {}


def measured():
    """Methods that this file's tests ask for: each test holds what it asks for against the table."""
    return set(re.findall(r'"(\w+)": ask\("\1"', pathlib.Path(__file__).read_text())) | {"hello"} | {
        name for name, server in methods().items() if server == "CONTROL"}


def test_every_method_is_measured():
    assert measured() == methods().keys()


def on_pools(client, ask):
    """With as many pages, pools and pages a request as there may be."""
    def open_pool(name):
        found, (fd,) = client.call_with_fds("pool_open", {"name": name, "n_pages": 65536, "page_bytes": 4096})
        os.close(fd)
        return found["pool"]

    pool = open_pool("full")
    keys = [os.urandom(32) for _ in range(65536)]
    for at in range(0, len(keys), 1024):
        pages = client.call("pool_lease", {"pool": pool, "n": 1024})["pages"]
        client.call("pool_seal", {"pool": pool, "pages": pages, "keys": b"".join(keys[at:at + 1024])})
        client.call("pool_give_back", {"pool": pool, "pages": pages})
    leased = client.call("pool_lease", {"pool": pool, "n": 1024})["pages"]  # of the keys that were let go first
    some = b"".join(random.Random(1).sample(keys[1024:], 1024))
    pinned = [client.call("pool_find", {"pool": pool, "keys": some})["pages"] for _ in range(4)][0]
    for _ in range(58):
        open_pool("other")
    return {
        "pool_open": ask("pool_open", {"name": "new", "n_pages": 65536, "page_bytes": 4096}),
        "pool_find": ask("pool_find", {"pool": pool, "keys": some}),
        "pool_seal": ask("pool_seal", {"pool": pool, "pages": leased, "keys": some}),  # each has a page already
        "pool_give_back": ask("pool_give_back", {"pool": pool, "pages": pinned}),
        "pool_lease": ask("pool_lease", {"pool": pool, "n": 1024}),
        "pool_close": ask("pool_close", {"pool": 2}, refused="ENOENT"),
        "pool_drop": ask("pool_drop", {"name": "nobody's"}, refused="ENOENT"),
        "pool_share": ask("pool_share", {"name": "full", "uid": 5, "access": "read"}),
    }


def test_methods_of_the_front(wide):
    """With as many sessions as a user may have."""
    with contextlib.ExitStack() as stack:
        devices = [stack.enter_context(wide.device()) for _ in range(48)]
        assert len(devices) == 48
        client, other = stack.enter_context(wide.client()), stack.enter_context(wide.client())
        ask = Asker(client)

        def hello():
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(wide.socket)
            sock.close()
            return lambda: True

        requests = {"hello": hello, "ping": ask("ping"), "status": ask("status"), "devices": ask("devices"),
                    "open_device": ask("open_device", {"device": 0}), **on_pools(client, ask)}
        assert in_ms(wide.pid, other, requests) == {}
