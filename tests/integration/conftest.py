# SPDX-License-Identifier: MIT
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "lib"))

import fmhad  # noqa: E402


@pytest.fixture
def make_daemon():
    """Starts private daemons: make_daemon({"devices": [...], "limits": {...}}) -> fmhad.Daemon."""
    started = []

    def make(config=None, **options):
        started.append(fmhad.Daemon(config, **options))
        return started[-1]

    yield make
    for daemon in started:
        daemon.stop()
    for daemon in started:  # in builds with sanitizers
        for word in ("Sanitizer", "runtime error:"):
            assert word not in daemon.last_log, daemon.last_log


@pytest.fixture
def daemon(make_daemon):
    """A private fmhad with one CPU device: .socket, .pid, .config, .client(), .device(), ..."""
    return make_daemon()


@pytest.fixture
def fake_daemon(make_daemon):
    """The same with the device that fails on command, and deadlines short enough for tests."""
    return make_daemon(fmhad.FAKE)
