# SPDX-License-Identifier: MIT
"""One user against the front, the sockets and the supervision: it costs that user only."""
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import fmha_wire
import fmhad
import pytest
from test_supervision import assert_worker_lost, prepare, status, worker_is_back

NOBODY, ATTACKER, OTHER = 65534, 3001, 3002

pytestmark = pytest.mark.skipif(bool(fmhad.NO_OTHER_USERS), reason=fmhad.NO_OTHER_USERS)

PROBLEM = {
    "batch": 1, "nhead_q": 1, "nhead_k": 1, "seqlen_q": 64, "seqlen_k": 64,
    "hdim_q": 64, "hdim_v": 64,
    "tensors": {
        role: {"buffer": 1, "offset": index * 16384, "dtype": "f32"}
        for index, role in enumerate(("q", "k", "v", "o"))
    },
}  # fmt: skip

PROLOGUE = textwrap.dedent(
    """
    import os, socket, sys, time
    sys.path[:0] = [{lib!r}, {here!r}]
    import fmha_wire, fmhad
    from fmha_wire import frame
    fmhad.become({uid})
    path, problem = {socket!r}, {problem!r}

    def flood(sock, message, seconds=0.1):
        '''Sends without reading until the other side takes no more, or hangs up.'''
        data, sent = message * 200, 0
        sock.settimeout(seconds)
        try:
            while sent < 4 << 20:
                sent += sock.send(data[sent % len(message):])
        except OSError:
            pass

    def ready():
        print("ready", flush=True)
    """
)


class Attacker:
    """Another user's process. The program calls ready(); it lives until the end of the block."""

    def __init__(self, daemon, program, uid=ATTACKER):
        here = os.path.dirname(os.path.abspath(__file__))
        prologue = PROLOGUE.format(
            lib=os.path.join(here, "../lib"), here=here, uid=uid, socket=daemon.socket,
            problem=PROBLEM,
        )  # fmt: skip
        # Kept in a variable, so that nothing is closed before the end.
        self.process = subprocess.Popen(
            [sys.executable, "-c", prologue + textwrap.dedent(program) + "\nsys.stdin.read()\n"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
        )

    def until_ready(self):
        assert self.process.stdout.readline() == "ready\n"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()


def assert_served(daemon, seconds=15):
    """Somebody else opens a device and runs on it, before any deadline (a call's is 30 s): the machine may be busy."""
    began = time.monotonic()
    with daemon.device() as device:
        plan, buffer = prepare(device)
        device.run(plan)
        buffer.release()
    assert time.monotonic() - began < seconds


FLOODS = """
    kept = []
    for _ in range(12):
        try:
            client = fmha_wire.Client.connect(path)
            kept.append(client)
            kept.append(client.open_device(0))
        except (OSError, fmha_wire.Disconnected, fmha_wire.WireError):
            break
    for connection in kept:
        if isinstance(connection, fmha_wire.Device):
            flood(connection.sock, frame([0, 1, "explain", {"problem": problem}]))
        else:
            flood(connection.sock, frame([0, 1, "status", {}]))
    ready()
"""


def small_daemon(make_daemon, **config):
    """As a user without privileges, for whom the kernel limits descriptors on their way."""
    return make_daemon(
        {"limits": {"reserved_fds": 64}, **config}, uid=NOBODY, max_fds=256, open_to_all=True
    )


def test_descriptors_that_are_not_read_cost_their_user_only(make_daemon):
    daemon = small_daemon(make_daemon)
    with Attacker(daemon, FLOODS) as attacker:
        attacker.until_ready()
        assert all(count < 256 - 32 for count in daemon.fd_counts())
        assert_served(daemon)
        with daemon.client() as client:
            limits = status(client)["front"]["limits"]
            assert limits["fds_per_uid"]["hits"] + limits["fds_per_connection"]["hits"] > 0
        for _ in range(3):
            pid = daemon.children()[0]
            os.kill(pid, signal.SIGKILL)
            worker_is_back(daemon, pid)
            assert_served(daemon)
        assert attacker.process.poll() is None
    assert daemon.process.poll() is None


def test_closed_connections_keep_counting_what_they_left_unread(make_daemon):
    """Fill a connection, break the protocol, come again: the kernel still has the descriptors."""
    daemon = small_daemon(make_daemon)
    program = """
    kept, refused = [], 0
    while refused < 20 and len(kept) < 400:
        try:
            client = fmha_wire.Client.connect(path)
        except (OSError, fmha_wire.Disconnected):
            refused += 1
            time.sleep(0.01)
            continue
        client.sock.sendall(frame([0, 1, "status", {}]) * 64)
        time.sleep(0.01)
        client.sock.sendall(b"garbage")
        kept.append(client)
    assert refused == 20, len(kept)
    ready()
    """
    with Attacker(daemon, program) as attacker:
        attacker.until_ready()
        assert_served(daemon)
        assert daemon.fd_counts()[0] < 256 - 64
    # All of it is given back once the peer is gone.
    assert fmhad.until(lambda: daemon.fd_counts()[0] < 40), daemon.fd_counts()


def test_pipelining_clients_get_everything(make_daemon):
    daemon = make_daemon()
    with daemon.client() as client, client.open_device(0) as device:
        for connection, method, params, n in (
            (client, "status", {}, 500),
            (device, "explain", {"problem": PROBLEM}, 200),
            (device, "buffer_create", {"size": 4096}, 500),
        ):
            frames = b"".join(fmha_wire.frame([0, 5000 + i, method, params]) for i in range(n))
            connection.methods = {5000 + i: method for i in range(n)}
            sock = connection.sock.dup()
            sock.settimeout(10)
            writer = threading.Thread(target=sock.sendall, args=[frames])
            writer.start()
            for i in range(n):
                _, (fd,) = connection.wait(5000 + i)
                os.close(fd)
            writer.join()
            sock.close()
        assert status(client)["front"]["limits"]["fds_per_connection"]["hits"] > 0


def test_a_client_that_never_reads_its_descriptors_is_dropped(make_daemon):
    daemon = make_daemon({"limits": {"output_soft_ms": 300}})
    with daemon.client() as idle, daemon.client() as client:
        idle.sock.sendall(fmha_wire.frame([0, 1, "status", {}]) * 100)

        def n_connections():
            return status(client)["front"]["connections"]

        assert fmhad.until(lambda: n_connections() == 1)
        # As many as a connection may have, then the end.
        n = 0
        with pytest.raises(fmha_wire.Disconnected):
            while True:
                idle.receive()
                n += 1
        assert n == 64


def test_slow_readers_of_descriptors_are_not_dropped(make_daemon):
    daemon = make_daemon({"limits": {"output_soft_ms": 200, "fds_per_connection": 8}})
    with daemon.client() as slow:
        numbers = [slow.submit("status") for _ in range(20)]
        for number in numbers:
            time.sleep(0.05)
            _, (fd,) = slow.wait(number)
            os.close(fd)


def test_opening_devices_of_a_stuck_worker_is_bounded(make_daemon):
    """Come, ask for devices, go: the worker's ends of the sockets wait in the control socket."""
    daemon = small_daemon(make_daemon, supervision={"heartbeat_timeout_ms": 4000})
    worker = daemon.children()[0]
    program = """
    for _ in range(200):
        try:
            with fmha_wire.Client.connect(path) as client:
                client.send_bytes(frame([0, 9, "open_device", {"device": 0}]) * 30)
                time.sleep(0.002)
        except (OSError, fmha_wire.Disconnected):
            time.sleep(0.005)
    ready()
    """
    os.kill(worker, signal.SIGSTOP)
    with Attacker(daemon, program) as attacker:
        attacker.until_ready()
        assert daemon.fd_counts()[0] < 256 - 64
        with daemon.client() as client:
            client.ping()
        os.kill(worker, signal.SIGCONT)
        assert_served(daemon)
        assert daemon.children()[0] == worker
    assert fmhad.until(lambda: daemon.fd_counts()[0] < 40), daemon.fd_counts()


# ---- time ----


def ping_times(device, n):
    """CPU time of the loop that each answer took, in order of size."""
    times = []
    for _ in range(n):
        began = fmhad.loop_seconds(device.worker_pid)
        device.ping()
        times.append(fmhad.loop_seconds(device.worker_pid) - began)
        time.sleep(0.002)
    return sorted(times)


def test_plans_of_one_user_do_not_delay_anothers_pings(make_daemon):
    """64 connections, each full of requests that cost some hundred microseconds."""
    daemon = make_daemon(open_to_all=True)
    program = """
    request = frame([0, 1, "plan", {"problem": problem}])
    front = fmha_wire.Client.connect(path)
    devices = [front.open_device(0) for _ in range(64)]
    ready()
    while True:
        for device in devices:
            device.sock.sendall(request * 100)
        for device in devices:
            for _ in range(100):
                device.receive()
    """
    with daemon.device() as device:
        with Attacker(daemon, program) as attacker:
            attacker.until_ready()
            times = ping_times(device, 200)
        # Turns by connection would be 50 ms and more.
        assert times[len(times) // 2] < 0.01, times[:: len(times) // 10]


@pytest.mark.parametrize("attached", [True, False])
def test_a_front_that_stood_still_blames_no_worker(make_daemon, attached):
    daemon = make_daemon(fmhad.FAKE)
    pid = daemon.children()[0]
    with daemon.client() as client:
        device = client.open_device(0)
        plan, _ = prepare(device)
        if not attached:
            device.close()
        time.sleep(0.15)  # a heartbeat
        os.kill(daemon.pid, signal.SIGSTOP)
        time.sleep(1.5)  # the timeout is 0.8 s
        os.kill(daemon.pid, signal.SIGCONT)
        time.sleep(0.5)
        assert daemon.children() == [pid]
        if attached:
            device.run(plan)
            device.close()
        assert status(client)["devices"][0]["deaths"] == 0


def test_hello_may_come_while_the_front_stands_still(make_daemon):
    daemon = make_daemon({"limits": {"hello_ms": 300}})
    sock = daemon.raw()
    time.sleep(0.1)
    os.kill(daemon.pid, signal.SIGSTOP)
    connection = fmha_wire.Connection(sock, 5)
    number = connection.submit("hello", {"version": 1, "client": "late"})
    time.sleep(1.0)
    os.kill(daemon.pid, signal.SIGCONT)
    connection.wait(number)
    connection.close()


# ---- deaths ----


def last_death(daemon):
    with daemon.client() as client:
        return status(client)["devices"][0]["last_death"]


def test_what_ended_a_worker_is_told_apart(make_daemon):
    daemon = make_daemon(fmhad.FAKE)
    with daemon.device() as device:
        os.kill(device.worker_pid, signal.SIGKILL)
        assert_worker_lost(lambda: device.ping())
        worker_is_back(daemon, device.worker_pid)
    assert "signal 9" in last_death(daemon)
    with daemon.device() as device:
        os.kill(device.worker_pid, signal.SIGSTOP)
        assert_worker_lost(lambda: device.ping())
        worker_is_back(daemon, device.worker_pid)
    assert "did not answer" in last_death(daemon)
    assert daemon.log().count("did not answer") == 1


def end_a_worker(daemon):
    with daemon.device() as device:
        plan, _ = prepare(device)
        device.call("inject", {"fault": "abort"})
        assert_worker_lost(lambda: device.run(plan))
        worker_is_back(daemon, device.worker_pid)


def quarantined(daemon):
    with daemon.client() as client:
        return status(client)["devices"][0]["quarantined"]


def test_quarantine_ends_and_doubles(make_daemon):
    rules = {**fmhad.FAKE["supervision"], "quarantine_deaths": 2, "quarantine_s": 6}
    daemon = make_daemon({**fmhad.FAKE, "supervision": rules})
    end_a_worker(daemon)
    end_a_worker(daemon)
    (entry,) = quarantined(daemon)
    assert entry["remaining_s"] <= 6
    with daemon.device() as device:
        prepare(device)
        other = device.plan(device.last_problem)["stages"][0]["kernel"]
        assert other != entry["kernel"]
    assert fmhad.until(lambda: quarantined(daemon) == [])
    os.kill(daemon.children()[0], signal.SIGKILL)  # the next one is not told any more
    assert fmhad.until(lambda: chosen_kernel(daemon) == entry["kernel"])
    end_a_worker(daemon)
    end_a_worker(daemon)
    (entry,) = quarantined(daemon)
    assert 6 <= entry["remaining_s"] <= 12


def chosen_kernel(daemon):
    try:
        with daemon.device() as device:
            prepare(device)
            return device.plan(device.last_problem)["stages"][0]["kernel"]
    except (fmha_wire.WireError, fmha_wire.Disconnected):
        return None


def as_another_user(work):
    """Runs it in a process of another user's; returns what it returned, as JSON can carry it."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgid(65534)
            os.setuid(65534)
            os.write(writing, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return json.loads(text)


def test_a_users_own_quarantine_leaves_the_kernel_to_others_and_ends(make_daemon):
    """Another user's requests end workers: the kernel is kept from that user only, and for a time."""
    if fmhad.NO_OTHER_USERS:
        pytest.skip(fmhad.NO_OTHER_USERS)
    rules = {**fmhad.FAKE["supervision"], "quarantine_deaths": 2, "quarantine_s": 8}
    daemon = make_daemon({**fmhad.FAKE, "supervision": rules})
    os.chmod(daemon.socket, 0o666)
    os.chmod(daemon.directory, 0o755)

    def name_of_plan():
        with daemon.device() as device:
            prepare(device)
            return device.plan(device.last_problem)["stages"][0]["kernel"]

    def kill_and_name():
        name = name_of_plan()
        with daemon.device() as device:
            plan, _ = prepare(device)
            device.call("inject", {"fault": "abort"})
            try:
                device.run(plan)
            except (fmha_wire.WireError, fmha_wire.Disconnected):
                pass
        return name

    for _ in range(2):
        culprit = as_another_user(kill_and_name)
        assert fmhad.until(lambda: daemon.status()["devices"][0]["state"] == "ready")
    (entry,) = quarantined(daemon)
    assert entry["kernel"] == culprit and entry["uid"] == 65534
    assert name_of_plan() == culprit, "root still gets it"
    assert as_another_user(name_of_plan) != culprit
    # The same worker gives it back when the time is over.
    worker = daemon.children()
    assert fmhad.until(lambda: quarantined(daemon) == [])
    assert as_another_user(name_of_plan) == culprit
    assert daemon.children() == worker


# ---- whose fault a death is ----

KILLS = """
    seen = set()
    while True:
        try:
            with fmha_wire.Client.connect(path) as client, client.open_device(0) as device:
                planned_id, _ = test_supervision.prepare(device)
                seen.add(device.plan(device.last_problem)["stages"][0]["kernel"])
                device.call("inject", {"fault": "abort"})
                device.run(planned_id)
        except fmha_wire.WireError as error:
            if error.name == "EQUOTA":
                assert error.field == "device" and "ended too many workers" in error.message
                break
        except (OSError, fmha_wire.Disconnected):
            pass
        time.sleep(0.02)
    assert len(seen) > 1, seen  # quarantine has made it change kernels meanwhile
    ready()
"""


def over_http(path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(path)
        sock.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        return b"".join(iter(lambda: sock.recv(65536), b"")).decode()


def test_a_user_that_ends_workers_is_alone_with_the_consequences(make_daemon, tmp_path):
    rules = {**fmhad.FAKE["supervision"], "quarantine_deaths": 2, "quarantine_s": 5}
    path = str(tmp_path / "metrics")
    daemon = make_daemon({**fmhad.FAKE, "supervision": rules, "metrics_socket": path}, open_to_all=True)
    with daemon.device() as device:
        prepare(device)
        kernel = device.plan(device.last_problem)["stages"][0]["kernel"]
    with Attacker(daemon, "    import test_supervision\n" + KILLS) as attacker:
        attacker.until_ready()
        entries = quarantined(daemon)
        assert all(entry["uid"] == ATTACKER for entry in entries)
        assert any("kernel" not in entry for entry in entries)  # may open no device
        # Nobody's metrics: the sum, and not whose.
        assert fmhad.until(lambda: re.search(r'^fmhad_quarantined_kernels\{device="0"\} (\d+)$', over_http(path), re.M)[1]
                           == str(sum("kernel" in entry for entry in quarantined(daemon))) != "0")  # fmt: skip
        assert chosen_kernel(daemon) == kernel  # anybody else has the same kernel as before
        assert_served(daemon)
    assert fmhad.until(lambda: quarantined(daemon) == [])
