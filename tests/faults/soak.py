#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Mixed load of several users, whose clients and workers are killed, for as long as asked; between rounds
everybody leaves, and what front and worker hold has to be what it was.

    tests/faults/soak.py [--seconds 1200] [--rounds N] [--seed S]

A round has the same clients as every other, each of one kind and one user: runs whose results are compared,
plans, buffers that are touched and kept, imports, local runs, tuning, traces and exports. One after another is
killed and replaced, in every third round also the worker. Then, with nobody there, accounts have to be empty,
and descriptors, mappings and threads no more than after the first round, and resident memory no more than
--grown-mib above what it was before anybody had come. (An idle worker that measures what has run has the tensors
of that, for as long as it takes and five seconds more: 5 MB become 90 here and there.) Prints a row a round; exits
with 1 when something was wrong, or when a kind of client has done nothing.
"""
import argparse
import contextlib
import fcntl
import multiprocessing
import os
import pathlib
import random
import signal
import sys
import time

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent),
                str(pathlib.Path(__file__).resolve().parents[1] / "lib")]
import fmha_wire  # noqa: E402
import fmhad  # noqa: E402
import numpy  # noqa: E402
import visits  # noqa: E402

USERS = [0, 1001, 1002, 1003]  # root, who may have kernels measured, and tenants
SHAPES = [(1, 16, 2, 32), (1, 160, 2, 32), (2, 65, 4, 64), (1, 300, 2, 128)]
KILL_S = 0.15  # from one client's end to the next one's
SEALS = 1 | 2 | 4


# ---- clients: each does one kind of thing until it is killed, and says how often it has ----


def runs(device, rng):
    shape = rng.choice(SHAPES)
    q, k, v = visits.inputs(shape, rng.randrange(1000))
    if not numpy.allclose(device.forward(q, k, v), visits.reference(q, k, v), atol=1e-4):
        raise visits.Lie(f"O of {shape}")


def plans(device, rng):
    buffer = device.buffer_create(1 << 20)
    kept = [device.plan(visits.problem(buffer.id, rng.choice(SHAPES[:2]), scale=rng.random()))["plan"]
            for _ in range(rng.randrange(1, 40))]
    device.explain(visits.problem(buffer.id))
    for plan in kept[::2]:
        device.call("plan_release", {"plan": plan})
    os.close(buffer.fd)


def buffers(device, rng):
    made = [device.buffer_create(rng.choice([4096, 1 << 20, 16 << 20])) for _ in range(rng.randrange(1, 6))]
    for buffer in made:
        view = buffer.array("u8", (buffer.size,))
        if view.any():
            raise visits.Lie("a new buffer is not zero")
        view[::4096] = 1
        del view
    for buffer in made[::2]:
        device.call("buffer_release", {"buffer": buffer.id})
    for buffer in made:
        os.close(buffer.fd)


def imports(device, rng):
    size = rng.choice([1 << 16, 1 << 20])
    fd = os.memfd_create("mine", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        os.close(device.buffer_import(fd, size).fd)
    finally:
        os.close(fd)


def local_runs(device, rng):
    visits.refusal(lambda: device.call("local_runs", {"problem": visits.problem(1, rng.choice(SHAPES)), "runs": 3,
                                                      "version": 1}))


def tunes(device, rng):
    device.call("tune", {"problem": visits.problem(1, rng.choice(SHAPES)), "again": True, "budget_ms": 20})


def traces(device, rng):
    device.call_json("trace")
    device.forward(*visits.INPUTS[visits.TINY])
    device.call_json(rng.choice(["trace", "census"]))
    device.call_json("registry_export", {"filter": visits.KERNELS})


def statuses(device, rng):
    with fmha_wire.Client.connect(device.front) as client:
        client.status()
        client.devices()
    for _ in range(rng.randrange(50)):
        device.ping()


KINDS = [runs, plans, buffers, imports, local_runs, tunes, traces, statuses]


def client(path, slot, uid, kind, seed, done):
    """Goes on when its worker is gone; a refusal for want of something is fair, any other is not."""
    fmhad.become(uid or None)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    rng = random.Random(seed)
    while True:
        with contextlib.suppress(OSError, fmha_wire.Disconnected, Refused):
            with fair(), fmha_wire.Client.connect(path) as front, front.open_device(0) as device:
                device.front = path
                while rng.random() > 0.05:
                    kind(device, rng)
                    done[slot] += 1
        time.sleep(0.001)


class Refused(Exception):
    """For want of something."""


@contextlib.contextmanager
def fair():
    try:
        yield
    except fmha_wire.WireError as error:
        if error.name not in ("EDEVICE", "EQUOTA", "ENOMEM", "EBUSY"):
            raise
        raise Refused from error


class Load:
    """The clients of one daemon. Each of its own process; what they have done is counted without a lock, which a
    client that is killed could keep."""

    def __init__(self, daemon, seed):
        self.daemon, self.rng = daemon, random.Random(seed)
        self.posts = [(uid, kind) for kind in KINDS for uid in ([0] if kind is tunes else USERS[1:])]
        self.done = multiprocessing.RawArray("Q", len(self.posts))
        self.processes = [None] * len(self.posts)
        self.n_killed = 0
        self.failed = []

    def begin(self, slot):
        uid, kind = self.posts[slot]
        arguments = (self.daemon.socket, slot, uid, kind, self.rng.random(), self.done)
        self.processes[slot] = multiprocessing.get_context("fork").Process(target=client, args=arguments, daemon=True)
        self.processes[slot].start()

    def end(self, slot):
        """Kills it; one that has ended by itself has found something."""
        process = self.processes[slot]
        if not process.is_alive():
            self.failed.append(f"a client of {self.posts[slot][1].__name__} ended with {process.exitcode}")
        process.kill()
        process.join()
        process.close()
        self.n_killed += 1

    def round(self, seconds, kill_worker):
        over = time.monotonic() + seconds
        middle = over - seconds / 2
        for slot in range(len(self.posts)):
            self.begin(slot)
        while time.monotonic() < over:
            time.sleep(KILL_S)
            slot = self.rng.randrange(len(self.posts))
            self.end(slot)
            if kill_worker and time.monotonic() > middle:
                os.kill(self.daemon.worker_pid(), signal.SIGKILL)
                kill_worker = False
            self.begin(slot)
        for slot in range(len(self.posts)):
            self.end(slot)

    def by_kind(self):
        return {kind.__name__: sum(n for n, (_, k) in zip(self.done, self.posts) if k is kind) for kind in KINDS}


# ---- what is held when nobody is there ----


def field(pid, name):
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name + ":"))


def held(daemon):
    """(what, of whom): how much. Heaps are told by resident memory: how many maps they have is malloc's."""
    found = {}
    worker = daemon.worker_pid()
    time.sleep(0.2)  # who asked for that has left, and its connection is closed soon after
    for who, pid in (("front", daemon.pid), ("worker", worker)):
        with open(f"/proc/{pid}/maps", encoding="utf-8") as file:
            found["mappings", who] = sum(" /" in line for line in file)
        found["descriptors", who] = len(os.listdir(f"/proc/{pid}/fd"))
        found["threads", who] = field(pid, "Threads")
        found["KiB", who] = field(pid, "VmRSS")
    return found


def accounts(daemon):
    """What is still somebody's."""
    status = daemon.status()
    worker = status["devices"][0]["worker"]
    if not worker:
        return "no worker"
    memory = worker["memory"]
    clients = len(status["front"]["clients"]) - 1  # who asks
    left = {"sessions": len(worker["sessions"]), "buffers": memory["buffers"], "bytes": memory["bytes"],
            "pending": worker["runs"]["pending"], "clients": clients}
    return {what: n for what, n in left.items() if n}


def quiet(daemon, most, grown_kib):
    """Waits until nothing is left that was not there before. Returns (what is held, what is wrong)."""
    def look():
        left = accounts(daemon)
        now = held(daemon)
        return now, ([f"accounts: {left}"] if left else []) + [
            f"{who}: {now[what, who]} {what} instead of {n}" for (what, who), n in most.items()
            if now[what, who] > n + (grown_kib if what == "KiB" else 0)]

    fmhad.until(lambda: not accounts(daemon), 30, 0.1)
    time.sleep(6)  # a worker gives idle memory back after five seconds
    fmhad.until(lambda: not look()[1], 30, 0.5)
    return look()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1200, help="of load, in all rounds")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--grown-mib", type=float, default=8)
    options = parser.parse_args()
    if os.geteuid() != 0:
        USERS[1:] = [os.geteuid()]
    n_wrong = 0
    config = {"devices": [{"backend": "cpu", "threads": 2}],
              "supervision": {"restart_ms": 20, "quarantine_deaths": 1000}}
    with fmhad.Daemon(config, open_to_all=True) as daemon:
        load = Load(daemon, options.seed)
        columns = list(held(daemon))
        print(" ".join(["round    ", *(f"{who} {what}".rjust(19) for what, who in columns)]))
        begin = held(daemon)
        print(" ".join(["begin    ", *(f"{n:19}" for n in begin.values())]), flush=True)
        most = {key: n for key, n in begin.items() if key[0] == "KiB"}
        for number in range(options.rounds):
            load.round(options.seconds / options.rounds, kill_worker=number % 3 == 2)
            now, wrong = quiet(daemon, most, options.grown_mib * 1024)
            if number == 0:
                most = {**now, **most}
            print(" ".join([f"{number:9}", *(f"{now[c]:19}" for c in columns)]), *wrong, sep="\n  ", flush=True)
            n_wrong += len(wrong)
        deaths = daemon.status()["devices"][0]["deaths"]
    done = load.by_kind()
    print(", ".join(f"{n} {kind}" for kind, n in done.items()))
    print(f"{load.n_killed} clients and {deaths} workers killed")
    if deaths != options.rounds // 3:
        load.failed.append(f"{deaths} deaths of workers instead of {options.rounds // 3}")
    print(*load.failed, f"{n_wrong + len(load.failed)} wrong", sep="\n", flush=True)
    return 1 if n_wrong or load.failed or not all(done.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
