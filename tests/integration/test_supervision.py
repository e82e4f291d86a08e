# SPDX-License-Identifier: MIT
"""Workers and clients that die, hang or misbehave: what the others notice (RELIABILITY 4.D, 4.E)."""
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import fmha_wire
import fmhad
import numpy
import pytest

SHAPE = (1, 64, 4, 64)


def tensors(seed=0, shape=SHAPE):
    generator = numpy.random.default_rng(seed)
    return [generator.standard_normal(shape, dtype=numpy.float32) for _ in range(3)]


def prepare(device, shape=SHAPE):
    """A plan that can be run again and again, and the buffer that it works in."""
    batch, seqlen, heads, hdim = shape
    size = 4 * batch * seqlen * heads * hdim
    buffer = device.buffer_create(4 * size)
    for index, array in enumerate(tensors(0, shape)):
        buffer.array("f32", shape, index * size)[...] = array
    device.last_problem = {
        "batch": batch,
        "nhead_q": heads,
        "nhead_k": heads,
        "seqlen_q": seqlen,
        "seqlen_k": seqlen,
        "hdim_q": hdim,
        "hdim_v": hdim,
        "tensors": {
            role: {"buffer": buffer.id, "offset": index * size, "dtype": "f32"}
            for index, role in enumerate(("q", "k", "v", "o"))
        },
    }
    return device.plan(device.last_problem)["plan"], buffer


def worker_is_back(daemon, old_pid):
    """Waits until a new worker answers."""
    assert fmhad.until(lambda: [p for p in daemon.children() if p != old_pid]), "no new worker"
    with daemon.client() as client, client.open_device(0) as device:
        assert device.worker_pid != old_pid
        device.ping()


def assert_worker_lost(call):
    """The worker's socket ends: what libfmha_client reports as FMHA_EDEVICE."""
    with pytest.raises((fmha_wire.Disconnected, fmha_wire.WireError)) as caught:
        call()
    if isinstance(caught.value, fmha_wire.WireError):
        assert caught.value.name == "EDEVICE"


# ---- workers ----


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_killed_worker_is_replaced(fake_daemon, number):
    with fake_daemon.device() as device:
        plan, _ = prepare(device)
        device.run(plan)
        if number == signal.SIGTERM:  # ignored: only the front ends a worker
            os.kill(device.worker_pid, number)
            device.run(plan)
            return
        os.kill(device.worker_pid, number)
        assert_worker_lost(lambda: device.run(plan))
        worker_is_back(fake_daemon, device.worker_pid)
    assert fake_daemon.process.poll() is None
    with fake_daemon.device() as device:
        plan, _ = prepare(device)
        device.run(plan)


def test_stopped_worker_is_killed_and_replaced(fake_daemon):
    with fake_daemon.device() as device:
        plan, _ = prepare(device)
        os.kill(device.worker_pid, signal.SIGSTOP)
        assert_worker_lost(lambda: device.run(plan))
        worker_is_back(fake_daemon, device.worker_pid)


@pytest.mark.parametrize("fault", ["hang", "abort", "segv", "sticky", "block"])
def test_fault_ends_the_worker_and_nothing_else(fake_daemon, fault):
    front = fake_daemon.pid
    with fake_daemon.client() as client, fake_daemon.device() as other:
        device = client.open_device(0)
        plan, _ = prepare(device)
        other_plan, _ = prepare(other)
        device.call("inject", {"fault": fault, "after": 2})
        device.run(plan)
        other.run(other_plan)
        assert_worker_lost(lambda: device.run(plan))
        assert_worker_lost(lambda: other.run(other_plan))  # shares the device
        client.ping()  # the front has not noticed
        worker_is_back(fake_daemon, device.worker_pid)
        device.close()
        device = client.open_device(0)
        plan, _ = prepare(device)
        device.run(plan)
        device.close()
    assert fake_daemon.pid == front and fake_daemon.process.poll() is None


def test_out_of_memory_is_an_answer(fake_daemon):
    with fake_daemon.device() as device:
        plan, _ = prepare(device)
        device.call("inject", {"fault": "oom"})
        with pytest.raises(fmha_wire.WireError) as caught:
            device.run(plan)
        assert caught.value.name == "ENOMEM"
        device.run(plan)


@pytest.mark.parametrize("end", ["cancel", "hang-up"])
def test_a_run_that_was_refused_at_its_start_is_given_up_before_it_is_answered(make_daemon, end):
    """In one turn of the loop: the device has refused the launch, and its answer still waits."""
    daemon = make_daemon({**fmhad.FAKE, "limits": {"wake_us": 1000000}})
    with daemon.device() as device, daemon.device() as other:
        plan, _ = prepare(device)
        device.call("inject", {"fault": "oom"})
        run = fmha_wire.frame([0, 901, "run", {"plan": plan}])
        if end == "cancel":
            device.send_bytes(run + fmha_wire.frame([0, 902, "cancel", {"request": 901}]))
            answers = {message[1]: message[2] for message in (device.receive(), device.receive())}
            assert answers[901]["name"] == "ENOMEM" and answers[902] is None
        else:
            device.send_bytes(run + bytes([0xC1]))  # starts no frame: the connection ends here
            with pytest.raises(fmha_wire.Disconnected):
                device.receive()
        other.ping()
        assert daemon.worker_pid() == other.worker_pid


def test_every_pending_request_gets_an_answer_when_the_device_fails(make_daemon):
    """Whatever the worker has taken in: one turn is long enough for all of it here."""
    daemon = make_daemon({**fmhad.FAKE, "limits": {"wake_us": 1000000}})
    with daemon.device() as device:
        plan, _ = prepare(device)
        device.call("inject", {"fault": "sticky", "after": 3})
        numbers = range(1000, 1020)  # all in one piece, before the worker can be gone
        device.send_bytes(
            b"".join(fmha_wire.frame([0, n, "run", {"plan": plan}]) for n in numbers)
        )
        answers = []
        for number in numbers:
            try:
                device.wait(number, 5)
                answers.append("ok")
            except fmha_wire.WireError as error:
                answers.append(error.name)
        # Of the first three, those that were under way may have been lost.
        assert answers[0] == "ok" and set(answers[:3]) <= {"ok", "EDEVICE"}
        assert answers[3:] == ["EDEVICE"] * 17


def test_faults_need_permission(daemon, make_daemon):
    with daemon.device() as device:
        with pytest.raises(fmha_wire.WireError) as caught:
            device.call("inject", {"fault": "abort"})
        assert caught.value.name == "ENOTSUP"
    fake = make_daemon({"devices": [{"backend": "fake"}]})
    with fake.device() as device:
        with pytest.raises(fmha_wire.WireError) as caught:
            device.call("inject", {"fault": "abort"})
        assert caught.value.name == "EPERM"


def test_a_kernel_that_keeps_ending_workers_is_quarantined(make_daemon):
    config = {**fmhad.FAKE, "supervision": {**fmhad.FAKE["supervision"], "quarantine_deaths": 3}}
    daemon = make_daemon(config)
    for _ in range(3):
        with daemon.device() as device:
            plan, _ = prepare(device)
            device.call("inject", {"fault": "abort"})
            assert_worker_lost(lambda: device.run(plan))
            worker_is_back(daemon, device.worker_pid)
    with daemon.client() as client, client.open_device(0) as device:
        state = status(client)["devices"][0]
        assert state["deaths"] == 3
        (entry,) = state["quarantined"]
        culprit = entry["kernel"]
        assert "uid" not in entry and 0 < entry["remaining_s"] <= 600  # for everybody
        plan, _ = prepare(device)  # another kernel takes its place
        device.run(plan)
        problem = device.last_problem
        assert device.plan(problem)["stages"][0]["kernel"] != culprit


def test_killing_workers_from_outside_blames_no_kernel(make_daemon):
    config = {**fmhad.FAKE, "supervision": {**fmhad.FAKE["supervision"], "quarantine_deaths": 2}}
    daemon = make_daemon(config)
    for _ in range(3):
        with daemon.device() as device:
            plan, _ = prepare(device)
            number = device.submit("run", {"plan": plan})
            os.kill(device.worker_pid, signal.SIGKILL)
            try:
                device.wait(number, 5)
            except (fmha_wire.Disconnected, fmha_wire.WireError):
                pass
            worker_is_back(daemon, device.worker_pid)
    with daemon.client() as client:
        assert status(client)["devices"][0]["quarantined"] == []


def test_worker_ends_with_its_front(fake_daemon):
    workers = fake_daemon.children()
    assert workers
    fake_daemon.process.kill()
    fake_daemon.process.wait()
    assert fmhad.until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in workers))


def test_open_device_waits_for_a_restarting_worker(fake_daemon):
    with fake_daemon.client() as client:
        for _ in range(5):
            pid = fake_daemon.children()[0]
            os.kill(pid, signal.SIGKILL)

            def served():
                """Refused while the dead one was attaching, else served by the next one."""
                try:
                    with client.open_device(0) as device:
                        device.ping()
                        return device.worker_pid != pid
                except (fmha_wire.WireError, fmha_wire.Disconnected):
                    return False

            assert fmhad.until(served)


# ---- clients ----


def status(client):
    return json.loads(client.status())


# Dies by fork: an interpreter's start would take longer than a victim's life.
VICTIMS = textwrap.dedent(
    """
    import os, random, signal, sys, time
    sys.path[:0] = [{lib!r}, {here!r}]
    import fmha_wire, test_supervision
    generator = random.Random(2)
    for _ in range({count}):
        pid = os.fork()
        if pid == 0:
            try:
                device = fmha_wire.Client.connect({socket!r}).open_device(0)
                plan, _ = test_supervision.prepare(device, (2, 192, 4, 64))
                while True:
                    number = device.submit("run", {{"plan": plan}})
                    if number % 4 == 0:
                        device.wait(number)
            finally:
                os._exit(3)
        time.sleep(generator.uniform(0, 0.06))
        os.kill(pid, signal.SIGKILL)
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    """
)


class Healthy(threading.Thread):
    """A client that runs until told to stop and must never see an error or a changed result."""

    def __init__(self, daemon, seed):
        super().__init__()
        self.daemon_ = daemon
        self.seed = seed
        self.stopping = False
        self.error = None
        self.runs = 0

    def run(self):
        try:
            with self.daemon_.device() as device:
                q, k, v = tensors(self.seed)
                first = device.forward(q, k, v)
                while not self.stopping:
                    assert numpy.array_equal(first, device.forward(q, k, v))
                    self.runs += 1
        except BaseException as error:  # pylint: disable=broad-except
            self.error = error


def maps(pids):
    return [sum(1 for _ in open(f"/proc/{pid}/maps", encoding="ascii")) for pid in pids]


def test_killed_clients_harm_nobody(daemon):
    """200 clients die at random moments, most of them with runs in flight."""
    here = os.path.dirname(__file__)
    victims = VICTIMS.format(
        lib=os.path.join(here, "../lib"), here=here, socket=daemon.socket, count=200
    )
    with daemon.device() as device:  # so that everything is allocated once
        device.forward(*tensors())
    pids = [daemon.pid, *daemon.children()]
    fds = daemon.settled_fds()
    healthy = [Healthy(daemon, seed) for seed in range(4)]
    for thread in healthy:
        thread.start()
    subprocess.run([sys.executable, "-c", victims], check=True, timeout=100)
    for thread in healthy:
        thread.stopping = True
    for thread in healthy:
        thread.join()
        assert thread.error is None
        assert thread.runs > 0
    assert [daemon.pid, *daemon.children()] == pids
    assert daemon.has_no_more_than(fds), (daemon.fd_counts(), fds)
    with daemon.client() as client:
        worker = status(client)["devices"][0]["worker"]
        assert worker["sessions"] == []
        assert worker["memory"]["bytes"] == 0 and worker["memory"]["buffers"] == 0
        assert worker["memory"]["sigbus_hits"] == 0
        assert worker["runs"]["pending"] == 0


def test_thousand_connections_leave_nothing_behind(daemon):
    def cycle():
        with daemon.client() as client, client.open_device(0) as device:
            plan, buffer = prepare(device, (1, 16, 2, 64))
            device.run(plan)
            os.close(buffer.fd)

    for _ in range(50):
        cycle()
    pids = [daemon.pid, *daemon.children()]
    before = daemon.settled_fds(), maps(pids), daemon.rss_kib()
    for _ in range(1000):
        cycle()
    assert daemon.has_no_more_than(before[0])
    assert all(now <= then for now, then in zip(maps(pids), before[1]))
    for now, then in zip(daemon.rss_kib(), before[2]):
        assert now - then < 512, (now, then)
