#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Fails the N-th call of a class in front and worker, one after another until none is left, while every
method is visited and at every start, reload and stop.

    tests/faults/campaign.py [--every N] [--shard I/N] [--only WORDS] [--kind KIND] [--class CLASS]
                             [--mode once|always] [--at N] [--variant V]

--every 37 tries every 37th of all faults, evenly over visits and classes. What is wrong is printed at
once with the options that try it again; the counts by process and class come last. Exit status 1 when
something was wrong.

After each fault: nobody died whom it did not force to (FORCED), what was answered is true (visits.py),
refusals say that something has run out, nothing is left behind (blocks of memory, descriptors,
mappings, what status accounts for), and the next client is served as if nothing had been.
"""
import argparse
import collections
import contextlib
import errno
import json
import os
import pathlib
import signal
import sys
import tempfile
import threading
import time

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent),
                str(pathlib.Path(__file__).resolve().parents[1] / "lib")]
import fmha_wire  # noqa: E402
import fmhad  # noqa: E402
import page  # noqa: E402
import visits  # noqa: E402
from page import ALWAYS, ONCE  # noqa: E402

MODES = {"once": ONCE, "always": ALWAYS}

# What a process may die of, because nothing in this repository can keep it from that: (the function
# that failed, its error, whose abort() it was) and why.
FORCED = {
    ("epoll_ctl", "ENOSPC", "libuv"): "uv__io_poll aborts when a descriptor cannot be watched any more",
    ("epoll_ctl", "ENOMEM", "libuv"): "the same",
    ("realloc", "ENOMEM", "libuv"): "maybe_resize of uv__io_start aborts without memory for its table",
    ("pthread_create", "EAGAIN", "libuv"): "init_threads aborts without a thread for uv_queue_work",
    ("calloc", "ENOMEM", "libuv"): "the same, without memory for the thread's own variables",
    ("pipe2", "EMFILE", "libuv"): "uv__signal_global_reinit aborts, should the pipe that loop_init() has tried be gone",
    ("pipe2", "ENFILE", "libuv"): "the same",
}

# What says that something has run out or broken; any other refusal blames the wrong thing.
FITTING = {"ENOMEM", "EIO", "EBUSY", "EDEVICE", "ECONN", "EQUOTA", "ECANCELED", "ETIMEDOUT"}

LASTING_S = 3.0  # of a start, how long all calls fail
REPEATS = 6  # of a fault after which something more is held: does it grow each time?


class Wrong(Exception):
    """The judgement on a fault."""


KINDS = (Wrong, visits.Lie, OSError, fmha_wire.WireError, fmha_wire.Disconnected)


class FaultyDaemon(fmhad.Daemon):
    """A private daemon under the shim, which keeps its files in a folder that outlives it."""

    def __init__(self, device, folder, faults=None):
        self.folder = folder
        self.kernel = ""
        self.patience = 3.0  # seconds for an answer
        self.faults = faults or page.Faults(folder / "page")
        environment = dict(self.faults.environment)
        config = {"supervision": {"heartbeat_ms": 1000, "heartbeat_timeout_ms": 5000, "restart_ms": 20,
                                  "quarantine_deaths": 1000},
                  "metrics_socket": str(folder / "metrics"), "limits": {"loop_entries": 4},
                  "tuning": {"state": str(folder / "state"), "automatic": False}}
        if device == "cuda":
            helper = folder / "helper"
            helper.write_text("#!/bin/sh\n[ \"$1\" = --version ] && echo 'nvrtc 0.0' && exit 0\n"
                              "printf 'stub code' >\"$5\"\n")
            helper.chmod(0o755)
            stub = next(iter(fmhad.build_dir().rglob("libcuda.so.1")))
            environment["LD_LIBRARY_PATH"] = str(stub.parent)
            config["devices"] = [{"backend": "cuda", "stall_ms": 3000}]
            config["compile"] = {"helper": str(helper), "cache": str(folder / "cache")}
        else:
            config["devices"] = [{"backend": "fake", "threads": 2, "allow_faults": True}]
        super().__init__(config, env=environment)

    def worker(self):
        return self.faults["worker"].pid

    def restart_worker(self):
        old = self.worker()
        os.kill(old, signal.SIGKILL)
        if not fmhad.until(lambda: self.worker() != old and self.serves(), 10, 0.002):
            raise Wrong("no new worker")

    def serves(self):
        try:
            with self.client(timeout=2) as client, client.open_device(0) as device:
                device.ping()
            return True
        except (OSError, fmha_wire.Disconnected, fmha_wire.WireError):
            return False

    def client(self, **options):
        return super().client(**{"timeout": self.patience, **options})


def held(pid):
    """Descriptors and mappings of a process."""
    with open(f"/proc/{pid}/maps", "rb") as file:
        # The heap's arenas grow and shrink in place; stacks of threads and files are mappings.
        return len(os.listdir(f"/proc/{pid}/fd")), file.read().count(b"\n")


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


class Judge:
    """What a daemon is like when nothing has failed, and what has changed after a fault."""

    def __init__(self, daemon):
        self.daemon, self.faults = daemon, daemon.faults
        self.pids = {}
        self.renew()

    def renew(self):
        """A new worker is another one: what it holds counts from here."""
        daemon = self.daemon
        self.pids = {"front": daemon.pid, "worker": daemon.worker()}
        self.names = visits.kernel_names(daemon) if daemon.config["devices"][0]["backend"] == "fake" else []
        self.holds = self.look()

    def look(self):
        return {kind: (self.faults[kind].blocks, *held(pid)) for kind, pid in self.pids.items()}

    def settled(self):
        """What is held once it is no more than before, or so long has passed that also a busy machine is through."""
        fmhad.until(lambda: not self.more(self.look()), 3, 0.002)
        return self.look()

    def more(self, now):
        """(kind, what, by how much) of that of which more is held."""
        return [(kind, what, now[kind][i] - self.holds[kind][i]) for kind in self.pids
                for i, what in enumerate(("blocks of memory", "descriptors", "mappings"))
                if now[kind][i] > self.holds[kind][i]]

    def deaths(self, kind):
        """Raises when somebody has died who need not have. Returns whether somebody did."""
        daemon, side = self.daemon, self.faults[kind]
        if side.function == b"epoll_ctl" and side.delivered:  # libuv finds out when it polls next
            if not daemon.serves():
                fmhad.until(lambda: side.aborts, 1)
        if side.aborts:
            fmhad.until(lambda: not is_alive(self.pids[kind]), 5)
        if daemon.process.poll() is not None:
            self.forced(side, f"the front died: {daemon.process.returncode}")
            return True
        if is_alive(self.pids["worker"]) and daemon.worker() == self.pids["worker"]:
            return False
        said = ""
        with contextlib.suppress(OSError, fmha_wire.WireError, fmha_wire.Disconnected):
            fmhad.until(lambda: daemon.worker() != self.pids["worker"] and daemon.serves(), 10, 0.002)
            said = daemon.status()["devices"][0]["last_death"]
        self.forced(side, f"the worker died: {said}")
        return True

    @staticmethod
    def forced(side, said):
        by, error = side.aborted_in.decode().split(".")[0], errno.errorcode.get(side.error, "")
        if (side.function.decode(), error, by) not in FORCED:
            raise Wrong(f"{said}{', ended by ' + by if by else ''}")

    def whole(self):
        """The next client is served, and has the same kernels."""
        daemon = self.daemon
        try:
            daemon.device().close()
            if self.names:
                with contextlib.suppress(fmha_wire.WireError):  # that a visit has injected, and not used up
                    visits.forward(daemon)
                visits.forward(daemon)
        except (OSError, fmha_wire.WireError, fmha_wire.Disconnected, visits.Lie) as error:
            raise Wrong(f"not whole: {error!r}") from error

    def kept(self):
        if self.names and visits.kernel_names(self.daemon) != self.names:
            raise Wrong("the registry has other kernels")

        def charged():
            worker = self.daemon.status()["devices"][0]["worker"]
            memory = worker["memory"]
            return (worker["sessions"], memory) if worker["sessions"] or memory["buffers"] or memory["bytes"] else None

        fmhad.until(lambda: not charged(), 2)
        if charged():
            raise Wrong(f"accounts: {charged()}")


class Campaign:
    def __init__(self, options):
        self.options = options
        self.counts = collections.Counter()  # (kind, class): faults that were delivered
        self.deaths = collections.Counter()  # forced ones
        self.wrong = []
        self.current = None  # visit
        self.number = 0  # of all faults, tried or passed over
        self.item = 0

    def due(self):
        """Whether the next fault is one of those to try."""
        self.number += 1
        return self.number % self.options.every == 0

    def mine(self):
        self.item += 1
        return self.item % self.options.shard[1] == self.options.shard[0]

    def say(self, what, kind, class_, nth, mode, variant, side, error):
        word = next(w for w, m in MODES.items() if m == mode)
        text = (f"{what}: {error}\n  again: --only {what} --kind {kind} --class {class_} --mode {word} "
                f"--at {nth} --variant {variant}\n  {side.where()}")
        self.wrong.append(text)
        print(text, flush=True)

    def chosen(self, kind, class_, mode):
        o = self.options
        return ((not o.kind or kind == o.kind) and (not o.class_ or class_ == o.class_) and
                (not o.mode or MODES[o.mode] == mode))

    def wanted(self, name):
        return self.options.only in name and name not in self.options.without.split(",")

    def variants(self, mode):
        return [self.options.variant] if self.options.variant is not None else [mode - 1]

    # ---- visits ----

    def attempt(self, daemon, visit, expected, side, mode):
        """The visit under a fault that is armed."""
        try:
            value = visit(daemon)
            side.disarm()
            if not expected == value:  # a document may hold more than without a fault
                raise Wrong(f"{value!r} instead of {expected!r}{visits.missing(expected, value)}")
        except fmha_wire.WireError as error:
            if error.name not in FITTING:
                raise Wrong(f"refused with {error.name}: {error}") from error
        except visits.Lie as error:
            raise Wrong(f"a lie: {error}") from error
        except (TimeoutError, BlockingIOError) as error:
            # While everything fails, waiting is right; a fault that is over must not be waited for.
            if mode == ONCE:
                raise Wrong("no answer") from error
        except (OSError, fmha_wire.Disconnected):
            pass
        finally:
            side.disarm()

    def one(self, daemon, judge, visit, expected, kind, class_, nth, mode, variant):
        """One fault. Returns whether it was delivered."""
        side = daemon.faults[kind]
        if visit.ready:
            visit.ready(daemon)
            judge.renew()
        daemon.patience = visit.patience if mode == ONCE else 0.3
        side.arm(class_, nth, mode, variant)
        try:
            self.attempt(daemon, visit, expected, side, mode)
        finally:
            delivered = side.disarm()
            daemon.patience = visit.patience  # what was given up may still be under way
            died = judge.deaths(kind)
        if delivered:
            self.counts[kind, class_] += 1
        if died:
            self.deaths[kind, side.function.decode()] += 1
            return delivered
        if visit.tidy:
            visit.tidy(daemon)
        try:
            judge.whole()
        except Wrong:  # libuv finds out when it polls next
            if not judge.deaths(kind):
                raise
            self.deaths[kind, side.function.decode()] += 1
        return delivered

    def leaks(self, daemon, judge, visit, repeat):
        """More is held than before: does it grow by one each time?"""
        if visit.ready:
            return
        more = judge.more(judge.settled())
        if not more:
            return
        for last in (False, True):  # what is kept for as many as were ever under way at once grows once
            judge.holds = judge.look()
            for _ in range(REPEATS):
                repeat()
            more = [(kind, what, n) for kind, what, n in judge.more(judge.settled()) if n >= REPEATS]
            judge.holds = judge.look()
            if not more:
                return
            if last:
                kind, what, n = more[0]
                raise Wrong(f"{kind}: {n} more {what} after {REPEATS} times")

    def visit_class(self, daemon, judge, visit, expected, kind, class_, n_calls, mode, start):
        """All faults of one class in one process. Returns the daemon to go on with."""
        step = max(1, n_calls // visit.most)
        points = [self.options.at] if self.options.at else range(1, 2 * n_calls + 20, step)
        missed = 0
        for nth in points:
            if nth > n_calls and missed >= 2:
                break
            if not self.options.at and not self.due():
                missed += nth > n_calls
                continue
            for variant in self.variants(mode):
                side = daemon.faults[kind]
                arguments = (daemon, judge, visit, expected, kind, class_, nth, mode, variant)
                try:
                    delivered = self.one(*arguments)
                    if delivered and daemon.process.poll() is None:
                        if judge.pids["worker"] == daemon.worker():
                            self.leaks(daemon, judge, visit, lambda a=arguments: self.one(*a))
                    missed = 0 if delivered else missed + 1
                except Exception as error:  # pylint: disable=broad-except
                    if not isinstance(error, KINDS):
                        raise
                    self.say(visit.name, kind, class_, nth, mode, variant, side, error)
                    daemon, judge = start(daemon)
                if daemon.process.poll() is not None:
                    daemon, judge = start(daemon)
                elif judge.pids["worker"] != daemon.worker():
                    fmhad.until(daemon.serves, 10)
                    with contextlib.suppress(*KINDS):  # what a new worker makes once
                        visit(daemon)
                    judge.renew()
        try:
            if visit.tidy:  # what was given up may have been read after that was tidied
                visit.tidy(daemon)
            judge.kept()
        except KINDS as error:
            self.say(visit.name, kind, class_, 0, mode, 0, daemon.faults[kind], error)
            daemon, judge = start(daemon)
        return daemon, judge

    def visits_of(self, device):
        todo = [v for v in visits.VISITS if v.device == device and self.wanted(v.name)]
        if not todo:
            return
        with tempfile.TemporaryDirectory(prefix="fmhad-faults-") as name:
            folder = pathlib.Path(name)

            def start(old=None):
                if old:
                    old.stop(signal.SIGKILL)
                with contextlib.ExitStack() as unless:
                    daemon = FaultyDaemon(device, folder)
                    unless.callback(daemon.stop, signal.SIGKILL)
                    fmhad.until(daemon.serves, 20)
                    if device == "fake":
                        with daemon.device() as opened:
                            daemon.kernel = visits.kernels(opened)[0]["name"]
                    for visit in [self.current] if old else todo:  # what is made once is made
                        daemon.patience = visit.patience
                        if visit.ready:
                            visit.ready(daemon)
                        visit(daemon)
                        if visit.tidy:
                            visit.tidy(daemon)
                    judge = Judge(daemon)
                    unless.pop_all()
                return daemon, judge

            daemon, judge = start()
            try:
                for visit in todo:
                    self.current = visit
                    daemon.patience = visit.patience
                    if visit.ready:
                        visit.ready(daemon)
                    judge.renew()
                    sides = {kind: daemon.faults[kind] for kind in ("front", "worker")}
                    before = {kind: list(side.calls) for kind, side in sides.items()}
                    expected = visit(daemon)
                    after = {kind: list(side.calls) for kind, side in sides.items()}
                    if visit.tidy:
                        visit.tidy(daemon)
                    for kind in sides:
                        for i, class_ in enumerate(page.CLASSES):
                            n_calls = after[kind][i] - before[kind][i]
                            for mode in MODES.values():
                                if n_calls and self.chosen(kind, class_, mode) and self.mine():
                                    daemon, judge = self.visit_class(daemon, judge, visit, expected, kind,
                                                                     class_, n_calls, mode, start)
            finally:
                daemon.stop()

    # ---- starts and ends ----

    def begin(self, folder, kind, class_, nth, mode, variant):
        """A daemon of which a call fails while it starts: it says why and ends, or it serves, once nothing fails any more."""
        faults = page.Faults(folder / "page")
        faults[kind].arm(class_, nth, mode, variant)
        over = threading.Timer(LASTING_S, faults[kind].disarm)
        daemon = None
        try:
            if mode == ALWAYS:
                over.start()
            daemon = FaultyDaemon("fake", folder, faults)
        except fmhad.Ended as error:
            delivered = faults[kind].disarm()
            if error.status < 0:
                Judge.forced(faults[kind], f"the start ended by signal {-error.status}")
            elif error.status == 0 or (mode == ONCE and not error.said.strip()):  # else nothing can be written
                raise Wrong(f"a start that ends with {error.status} and says nothing") from error
            return delivered
        except fmha_wire.WireError as error:  # of the first who asked
            delivered = faults[kind].disarm()
            if error.name not in FITTING:
                raise
            return delivered
        except RuntimeError as error:
            raise Wrong(f"it neither starts nor ends: {error}") from error
        finally:
            over.cancel()
        try:
            delivered = faults[kind].disarm()
            self.served(daemon)
        finally:
            status = daemon.stop()
        if status != 0:
            raise Wrong(f"it ended with {status}")
        return delivered

    @staticmethod
    def served(daemon):
        """Once nothing fails any more: whole, soon."""
        if not fmhad.until(daemon.serves, 12, 0.01):
            raise Wrong("no device can be opened")
        deaths = daemon.status()["devices"][0]
        if "signal" in deaths["last_death"]:
            # What a front forks ends as a worker before it is one.
            side = next((daemon.faults[k] for k in ("front", "worker") if daemon.faults[k].aborts), daemon.faults["worker"])
            Judge.forced(side, deaths["last_death"])
        visits.forward(daemon)
        names = visits.kernel_names(daemon)
        if Campaign.names is None:
            Campaign.names = names
        if names != Campaign.names:
            raise Wrong("the registry has other kernels")

    names = None

    def end(self, folder, kind, class_, nth, mode, variant):
        """A daemon of which a call fails while it stops: what was stored stays, and it ends in time."""
        daemon = FaultyDaemon("fake", folder)
        try:
            with daemon.device() as device:
                daemon.kernel = visits.kernels(device)[0]["name"]
                answer = device.call("registry_set_priority", {"kernel": daemon.kernel, "priority": 7})
                device.call("registry_forget", {"kernel": "*"})
            side = daemon.faults[kind]
            side.arm(class_, nth, mode, variant)
        finally:
            status = daemon.stop()
        delivered = side.disarm()
        if status not in (0, 1):
            Judge.forced(side, f"it ended with {status}")
        if answer.get("stored") and visits.stored_settings(daemon)["priorities"].get(daemon.kernel) != 7:
            raise Wrong("what was stored is gone")
        return delivered

    def lives_of(self, name, function, kinds, counts):
        """All faults of starts, or of ends."""
        for kind in kinds:
            for class_ in page.CLASSES:
                for mode in MODES.values():
                    n_calls = counts[kind][class_]
                    if not n_calls or not self.chosen(kind, class_, mode) or not self.mine():
                        continue
                    # A start has thousands of equal allocations: of those beyond, one in so many.
                    step = max(1, n_calls // self.options.starts)
                    for nth in [self.options.at] if self.options.at else range(1, n_calls + 1, step):
                        if not self.options.at and not self.due():
                            continue
                        with tempfile.TemporaryDirectory(prefix="fmhad-faults-") as path:
                            folder = pathlib.Path(path)
                            variant = self.variants(mode)[0]
                            self.live(name, function, folder, kind, class_, nth, mode, variant)

    def live(self, name, function, folder, kind, class_, nth, mode, variant):
        try:
            self.counts[kind, class_] += function(folder, kind, class_, nth, mode, variant)
        except KINDS as error:
            side = page.Faults.open(folder / "page")[kind]
            self.say(name, kind, class_, nth, mode, variant, side, error)

    def lives(self):
        if not (self.wanted("start") or self.wanted("stop")):
            return
        with tempfile.TemporaryDirectory(prefix="fmhad-faults-") as path:
            daemon = FaultyDaemon("fake", pathlib.Path(path))
            try:
                counts = {kind: {c: daemon.faults[kind].calls[i] for i, c in enumerate(page.CLASSES)}
                          for kind in ("front", "worker")}
                self.served(daemon)
                before = {kind: list(daemon.faults[kind].calls) for kind in counts}
            finally:
                daemon.stop()
            ends = {kind: {c: daemon.faults[kind].calls[i] - before[kind][i]
                           for i, c in enumerate(page.CLASSES)} for kind in counts}
        if self.wanted("start"):
            self.lives_of("start", self.begin, ("front", "worker"), counts)
        if self.wanted("stop"):
            self.lives_of("stop", self.end, ("front", "worker"), ends)

    def print_counts(self):
        page.print_counts(self.counts)
        for (kind, function), n in sorted(self.deaths.items()):
            print(f"forced deaths: {kind}, {function}(): {n}")
        print(f"{len(self.wrong)} wrong", flush=True)


def shard(text):
    index, n = map(int, text.split("/"))
    return index, n


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--shard", type=shard, default=(0, 1), metavar="I/N")
    parser.add_argument("--starts", type=int, default=1000, help="faults of a class in a start, at most")
    parser.add_argument("--only", default="", help="visits whose names hold this; start, stop")
    parser.add_argument("--without", default="", help="visits to leave out, with commas between them")
    parser.add_argument("--kind", choices=page.KINDS)
    parser.add_argument("--class", dest="class_", choices=page.CLASSES)
    parser.add_argument("--mode", choices=MODES)
    parser.add_argument("--at", type=int, help="only this call")
    parser.add_argument("--variant", type=int, choices=[0, 1])
    return parser.parse_args()


def unvisited():
    """Methods that no visit names."""
    return visits.all_methods() - {method for visit in visits.VISITS for method in visit.methods}


def main():
    campaign = Campaign(parse())
    start = time.monotonic()
    missing = unvisited() - {"worker_ready", "worker_drain"}  # of every start and stop
    if missing:
        sys.exit(f"methods without a visit: {', '.join(sorted(missing))}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # no daemon stays, and what was tried is told
    try:
        campaign.visits_of("fake")
        if list(fmhad.build_dir().rglob("libcuda.so.1")):
            campaign.visits_of("cuda")
        campaign.lives()
    finally:
        campaign.print_counts()
        print(f"{time.monotonic() - start:.0f} s", flush=True)
    return 1 if campaign.wrong or not campaign.counts.total() else 0


if __name__ == "__main__":
    sys.exit(main())
