# SPDX-License-Identifier: MIT
"""libfmha_client against a running daemon; client_driver.c does the calls."""
import os
import signal
import subprocess
import time

import pytest

import fmhad

CYCLES = int(os.environ.get("FMHA_CYCLES", "150"))  # 1,000 in a long run


@pytest.fixture(name="daemon")
def fixture_daemon():
    with fmhad.Daemon() as daemon:
        yield daemon


def start(daemon, *arguments):
    return subprocess.Popen(
        [fmhad.find_program("client_driver"), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "FMHAD_SOCKET": daemon.socket},
    )


def finish(process, status=0):
    try:
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == status
    return output.split()


def values(words):
    return {name: int(value) for name, value in zip(words[::2], words[1::2])}


def test_cycles_leave_nothing_on_either_side(daemon):
    finish(start(daemon, "cycles", 2))
    before = daemon.settled_fds()
    left = values(finish(start(daemon, "cycles", CYCLES)))
    assert left["fds"] == 0
    assert abs(left["maps"]) <= 2  # the allocator's arenas
    assert daemon.has_no_more_than(before), (daemon.fd_counts(), before)


def test_sixteen_threads_get_what_one_gets(daemon):
    assert values(finish(start(daemon, "threads", 16, 20))) == {"failures": 0}


def test_a_plan_outlives_workers_and_daemons_that_were_idle(daemon):
    process = start(daemon, "restart", 4)
    assert process.stdout.readline() == "ran\n"
    for _ in range(4):
        victim = daemon.worker_pid()
        os.kill(victim, signal.SIGKILL)
        assert fmhad.until(lambda pid=victim: not os.path.exists(f"/proc/{pid}"))
        process.stdin.write("go on\n")
        process.stdin.flush()
        assert process.stdout.readline() == "ran\n"
    assert finish(process) == []


def test_a_restart_of_the_whole_daemon_is_survived(daemon):
    process = start(daemon, "restart", 1)
    assert process.stdout.readline() == "ran\n"
    daemon.process.terminate()
    daemon.process.wait(20)
    again = subprocess.Popen(
        [fmhad.find_program("fmhad"), "--config", str(daemon.directory / "fmhad.json")],
        stderr=subprocess.DEVNULL,
    )
    try:
        assert fmhad.until(lambda: os.path.exists(daemon.socket))
        process.stdin.write("go on\n")
        process.stdin.flush()
        assert process.stdout.readline() == "ran\n"
        assert finish(process) == []
    finally:
        again.terminate()
        again.wait(20)


def test_what_was_in_flight_fails_and_the_next_call_works(daemon):
    process = start(daemon, "flight")
    assert process.stdout.readline() == "flying\n"
    os.kill(daemon.worker_pid(), signal.SIGKILL)
    words = finish(process)
    assert words[-1] == "recovered"
    assert len(words) == 9
    assert set(words[:-1]) <= {"OK", "EDEVICE"}
    assert "EDEVICE" in words


def test_a_clients_death_costs_the_daemon_nothing(daemon):
    finish(start(daemon, "cycles", 1))
    before = daemon.settled_fds()
    for _ in range(5):
        process = start(daemon, "flight")
        assert process.stdout.readline() == "flying\n"
        process.kill()
        process.wait()
        process.stdout.close()
        process.stdin.close()
    finish(start(daemon, "cycles", 1))
    assert daemon.has_no_more_than(before), (daemon.fd_counts(), before)
