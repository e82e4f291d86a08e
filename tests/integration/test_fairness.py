# SPDX-License-Identifier: MIT
"""Turns on the CPU go by user, then by session, by the work done; long tasks and what ends them."""
import multiprocessing
import os
import select
import time

import fmha_wire
import fmhad
import pytest
from test_supervision import prepare

NOBODY = 65534
MEDIUM = (1, 512, 2, 64)  # some milliseconds


class Runner:
    """Sessions of one user that always have runs with the daemon."""

    def __init__(self, path, n_sessions, shape=MEDIUM, depth=2):
        with fmha_wire.Client.connect(path) as client:
            self.devices = [client.open_device(0) for _ in range(n_sessions)]
        self.plans = {device: prepare(device, shape)[0] for device in self.devices}
        self.pending = {device: [] for device in self.devices}
        for _ in range(depth):
            for device in self.devices:
                self.submit(device)

    def submit(self, device):
        number = device.submit("run", {"plan": self.plans[device]})
        self.pending[device].append(number)

    def step(self, again=True):
        """Takes the answers that have come. Returns how many."""
        waiting = [device for device in self.devices if self.pending[device]]
        readable = select.select([device.sock for device in waiting], [], [], 0.1)[0]
        ready = [device for device in waiting if device.sock in readable]
        for device in ready:
            device.wait(self.pending[device].pop(0))
            if again:
                self.submit(device)
        return len(ready)


def run_as_nobody(path, n_sessions, shape, count, ready, end):
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    runner = Runner(path, n_sessions, shape)
    ready.set()
    while not end.is_set():
        count.value += runner.step()


class HeavyUser:
    """Another user, in a process of its own. count: runs that have ended."""

    def __init__(self, daemon, n_sessions, shape=MEDIUM):
        if fmhad.NO_OTHER_USERS:
            pytest.skip(fmhad.NO_OTHER_USERS)
        os.chmod(daemon.directory, 0o755)
        os.chmod(daemon.socket, 0o666)
        context = multiprocessing.get_context("fork")
        self.value, self.end = context.Value("Q", 0), context.Event()
        ready = context.Event()
        self.process = context.Process(
            target=run_as_nobody,
            args=(daemon.socket, n_sessions, shape, self.value, ready, self.end),
        )
        self.process.start()
        if not ready.wait(30):
            self.process.kill()
            raise RuntimeError("the other user did not start")

    @property
    def count(self):
        return self.value.value

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end.set()
        self.process.join(20)
        assert self.process.exitcode == 0


def shares(daemon, heavy):
    """Runs that this user's one session and the heavy user's sessions get done meanwhile."""
    runner = Runner(daemon.socket, 1, depth=24)  # has work even while this process waits its turn
    for _ in range(10):
        runner.step()
    began, before, own = time.monotonic(), heavy.count, 0
    while True:
        own += runner.step()
        elapsed, others = time.monotonic() - began, heavy.count - before
        if elapsed > 2 and (own + others > 100 or elapsed > 40):
            return own, others


def test_a_users_sessions_do_not_add_up(daemon):
    with HeavyUser(daemon, 8) as heavy:
        own, others = shares(daemon, heavy)
    # By session it would be an eighth.
    assert others / 4 < own < others * 4, (own, others)


def test_priorities(make_daemon):
    daemon = make_daemon({"priorities": [{"uid": NOBODY, "weight": 5}]})
    with HeavyUser(daemon, 3) as heavy:
        own, others = shares(daemon, heavy)
    assert others / 12 < own < others / 2, (own, others)


def test_a_light_user_does_not_wait_for_a_long_queue(daemon):
    """40 runs one after the other, beside 40 sessions of large ones."""
    with HeavyUser(daemon, 40, (1, 1024, 2, 64)) as heavy:
        with daemon.device() as device:
            plan, _ = prepare(device, (1, 256, 2, 64))
            before = heavy.count
            for _ in range(40):
                device.run(plan)
            during = heavy.count - before
    # A large one is 16 of these, so that half of the device does 3 of them meanwhile; the rest is
    # for turns, for a busy machine, and for one that computes so fast that messages count. By session it
    # would be more than a hundred.
    assert during < 90, during


@pytest.fixture
def slow_daemon(make_daemon):
    """Code that any machine runs, a short patience, and one thread."""
    return make_daemon(
        {"devices": [{"backend": "cpu", "threads": 1, "cpu_level": "portable", "stall_ms": 300}]}
    )


def long_task(device):
    """A plan with one task that takes a second or so: 48 rows, very long keys, all the same."""
    rows, keys, hdim = 48, 3 << 19, 64
    buffer = device.buffer_create(4 * rows * hdim)
    same = {"buffer": buffer.id, "offset": 0, "dtype": "f32"}
    tensors = {role: dict(same) for role in ("q", "k", "v")}
    tensors["k"]["stride"] = tensors["v"]["stride"] = [0, 0, 0, 1]
    tensors["o"] = dict(same, buffer=device.buffer_create(4 * rows * hdim).id)
    return device.plan(
        {"batch": 1, "nhead_q": 1, "nhead_k": 1, "seqlen_q": rows, "seqlen_k": keys,
         "hdim_q": hdim, "hdim_v": hdim, "tensors": tensors}
    )["plan"]  # fmt: skip


def timed(function):
    began = time.monotonic()
    function()
    return time.monotonic() - began


def test_a_long_task_is_no_hang_and_can_be_cancelled(slow_daemon):
    with slow_daemon.device() as device:
        plan = long_task(device)
        whole = min(timed(lambda: device.run(plan)) for _ in range(2))
        assert whole > 0.6, "too fast to say anything"

        def cancelled():
            number = device.submit("run", {"plan": plan})
            time.sleep(whole / 4)
            device.call("cancel", {"request": number})
            with pytest.raises(fmha_wire.WireError) as caught:
                device.wait(number)
            assert caught.value.name == "ECANCELED"

        assert min(timed(cancelled) for _ in range(3)) < whole * 0.75
        pid = device.worker_pid
    assert slow_daemon.worker_pid() == pid
