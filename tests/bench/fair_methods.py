#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""What a user who calls now and then notices of another one whose 64 sessions ask for one method all the time.

For each method: the loop's CPU time a request of the attacker's, and the p50 of tiny runs of the light user beside it, quiet and
beside as many processes that only spin, which is what the attackers' own processor time costs. The bar: at most three times
the latter. As root the attackers are another user; otherwise figures say what sessions of one user do to each other."""
import contextlib
import multiprocessing
import os
import pathlib
import statistics
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "lib"), str(HERE.parent / "integration")]
import fmha_wire  # noqa: E402
import fmhad  # noqa: E402
from test_bounds import SMALL, small_plan  # noqa: E402
from test_isolation_worker import paged_problem  # noqa: E402

PROCESSES, SESSIONS, SECONDS, BAR = 4, 64, 2.0, 3.0
NOBODY = 65534


def small(device):
    return {**SMALL, "tensors": {r: {"buffer": i + 1, "dtype": "f32"} for i, r in enumerate("qkvo")}}


def runs(device):
    plan = small_plan(device, device.buffer_create(4096))
    return lambda: [("run", {"plan": plan})]


def large_tables(device):
    """28 MiB in 16 of the sessions."""
    plan = device.plan(paged_problem(device, 512, 14336, 14336, seqlen_k=1))["plan"]
    return lambda: [("run", {"plan": plan})]


def plans(device):
    buffer = device.buffer_create(4096)

    def pair():
        return [("plan_release", {"plan": small_plan(device, buffer)})]

    return pair


def traces(device):
    """8,192 events each time, in one of the sessions."""
    plan = small_plan(device, device.buffer_create(4096))
    device.call_with_fds("trace", {})

    def read():
        for _ in range(8192):
            device.run(plan)
        return [("trace", {})]

    return read


def asks(method, params=None):
    return lambda device: lambda: [(method, params(device) if params else {})]


ATTACKS = {
    "run": (runs, SESSIONS), "run, tables of 28 MiB": (large_tables, 16), "plan, plan_release": (plans, SESSIONS),
    "explain": (asks("explain", lambda device: {"problem": small(device)}), SESSIONS),
    "local_runs": (asks("local_runs", lambda device: {"problem": small(device), "runs": 1}), SESSIONS),
    "census": (asks("census"), SESSIONS), "trace": (traces, 4), "ping": (asks("ping"), SESSIONS),
    "registry_export": (asks("registry_export"), SESSIONS),
    "buffer_create": (asks("buffer_create", lambda device: {"size": 4096}), SESSIONS),
}


def attack(daemon, prepare, n_sessions, ready, counter):
    """Two requests of each session under way at a time."""
    fmhad.become(NOBODY if os.geteuid() == 0 else None)
    with contextlib.ExitStack() as stack:
        devices = [stack.enter_context(daemon.device()) for _ in range(n_sessions)]
        nexts, flying = [prepare(device) for device in devices], [[] for _ in devices]
        ready.set()
        while True:
            for device, following, numbers in zip(devices, nexts, flying):
                while len(numbers) < 2:
                    numbers += [device.submit(*request) for request in following()]
                with contextlib.suppress(fmha_wire.WireError):
                    result, fds = device.wait(numbers.pop(0), timeout=120)
                    for fd in fds:
                        os.close(fd)
                    if "buffer" in result:
                        device.call("buffer_release", {"buffer": result["buffer"]})
                counter.value += 1


def spin(ready):
    ready.set()
    while True:
        pass


@contextlib.contextmanager
def processes(target, *arguments):
    context, started = multiprocessing.get_context("fork"), []
    for _ in range(PROCESSES):
        ready = multiprocessing.Event()
        counter = multiprocessing.Value("L", 0)
        process = context.Process(target=target, args=[*arguments, ready, counter] if arguments else [ready], daemon=True)
        process.start()
        started.append((process, ready, counter))
    try:
        for _, ready, _ in started:
            assert ready.wait(120), "an attacker did not start"
        yield lambda: sum(counter.value for _, _, counter in started)
    finally:
        for process, _, _ in started:
            process.kill()
            process.join()


def p50_ms(device, plan):
    times, end = [], time.monotonic() + SECONDS
    while time.monotonic() < end or len(times) < 20:
        begun = time.monotonic()
        device.run(plan, timeout=120)
        times.append(time.monotonic() - begun)
        time.sleep(0.001)
    return statistics.median(times) * 1e3


def main():
    limits = {"sessions_per_uid": 128, "in_flight_per_uid": 1024, "connections_per_uid": 128, "memory_bytes_per_uid": 4 << 30,
              "fds_per_uid": 4096}
    rows, quiet, beside = [], [], []
    with fmhad.Daemon({"limits": limits}, open_to_all=True) as daemon, daemon.device() as device:
        plan = small_plan(device, device.buffer_create(4096))
        for name, (prepare, n) in ATTACKS.items():
            if len(sys.argv) > 1 and sys.argv[1] not in name:
                continue
            quiet.append(p50_ms(device, plan))
            with processes(spin):
                beside.append(p50_ms(device, plan))
            with processes(attack, daemon, prepare, max(n // PROCESSES, 1)) as count:
                before, loop, begun = count(), fmhad.loop_seconds(device.worker_pid), time.monotonic()
                attacked = p50_ms(device, plan)
                calls, loop = count() - before, fmhad.loop_seconds(device.worker_pid) - loop
            rows.append((name, calls / (time.monotonic() - begun), loop / max(calls, 1) * 1e6, attacked))
    control = statistics.median(beside)
    print("a tiny run of a light user, p50: quiet %.3f ms, beside %d spinning processes %.3f ms (%.3f to %.3f)" % (
        statistics.median(quiet), PROCESSES, control, min(beside), max(beside)))
    print("%-24s %10s %12s %10s %7s" % ("64 sessions of", "calls/s", "loop us/call", "p50, ms", "ratio"))
    for name, calls, loop, attacked in rows:
        print("%-24s %10.0f %12.0f %10.3f %7.2f %s" % (
            name, calls, loop, attacked, attacked / control, "ok" if attacked <= BAR * control else "MISSED"))
    return 1 if any(attacked > BAR * control for *_, attacked in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
