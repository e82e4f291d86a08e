# SPDX-License-Identifier: MIT
"""fmhad as a service: start, configuration, socket, service manager, stop (RELIABILITY 4.G, 4.H)."""
import grp
import json
import os
import pathlib
import pwd
import signal
import socket
import stat
import subprocess
import time

import fmha_wire
import fmhad
import pytest
from fmhad import connects, finish, start
from test_supervision import prepare


# ---- command line and configuration ----


def test_help_and_version():
    code, out, err = finish(start(["--help"]))
    assert code == 0 and out.startswith("usage: fmhad") and not err
    code, out, err = finish(start(["--version"]))
    assert code == 0 and out.startswith("fmhad ") and not err
    code, out, err = finish(start(["--no-such-option"]))
    assert code == 64 and not out and "no-such-option" in err
    code, _, err = finish(start(["extra"]))
    assert code == 64 and "extra" in err
    code, _, err = finish(start(["--worker"]))
    assert code == 64 and "own use" in err


@pytest.mark.parametrize(
    "text, expected",
    [
        ("{", ":1:"),
        ("[]", "must be an object"),
        ('{"sokcet": "/x"}', "sokcet: unknown key"),
        ('{"limits": {"conections": 3}}', "limits.conections: unknown key"),
        ('{"limits": {"connections": 0}}', "limits.connections: must be an integer"),
        ('{"limits": {"connections": 1.5}}', "limits.connections: must be an integer"),
        ('{"limits": {"connections": 1, "connections": 2}}', "limits.connections: given twice"),
        ('{"devices": []}', "devices: must be an array"),
        ('{"devices": [{"backend": "tpu"}]}', "devices[0].backend: "),
        ('{"devices": [{"backend": "cpu", "allow_faults": true}]}', "devices[0].allow_faults: "),
        ('{"socket": ""}', "socket: must be a string"),
        ('{"socket_mode": "99"}', "socket_mode: must be an octal"),
        ('{"log_level": "loud"}', "log_level: must be"),
        ('{} {}', "not valid JSON"),
        ('{"supervision": {"heartbeat_ms": 9000}}', "heartbeat_timeout_ms: less than"),
        ("\0", "not valid JSON"),
        ("", "not valid JSON"),
        ("[" * 100000, "not valid JSON"),
        (" " * (1 << 20) + "{}", "more than 1 MiB"),
    ],
    ids=lambda value: value[:24] if value.isprintable() else "bytes",
)
def test_wrong_configuration_is_78_and_one_line(tmp_path, text, expected):
    path = tmp_path / "fmhad.json"
    path.write_text(text)
    code, out, err = finish(start(["--config", str(path), "--check"]))
    assert code == 78
    assert not out
    assert err.count("\n") == 1 and expected in err


def test_configuration_that_cannot_be_read(tmp_path):
    for path in (tmp_path / "absent.json", tmp_path, "/dev/null/x"):
        code, _, err = finish(start(["--config", str(path), "--check"]))
        assert code == 78 and err.count("\n") == 1 and str(path) in err
    os.mkfifo(tmp_path / "fifo")
    code, _, err = finish(start(["--config", str(tmp_path / "fifo"), "--check"]))
    assert code == 78 and "not a regular file" in err


def test_example_configuration_is_accepted(tmp_path):
    example = json.loads((fmhad.ROOT / "systemd" / "fmhad.json").read_text())
    assert example["socket_group"] == "fmha"  # which the package makes
    example["socket_group"] = grp.getgrgid(os.getgid()).gr_name
    (tmp_path / "fmhad.json").write_text(json.dumps(example))
    code, out, err = finish(start(["--config", str(tmp_path / "fmhad.json"), "--check"]))
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == f"{tmp_path}/fmhad.json is fine" and "device   0: cpu" in out


@pytest.mark.parametrize("config, said", [
    ({"socket_group": "no-such-group"}, "socket_group no-such-group: no such group"),
    ({"devices": [{"backend": "cpu"}, {"backend": "cpu", "cpu_level": "avx9"}]}, "devices[1]: cpu_level avx9: no such level"),
    ({"socket": "fmhad.sock"}, 'socket: "fmhad.sock" does not begin with /'),
    ({"metrics_socket": "m.sock"}, 'metrics_socket: "m.sock" does not begin with /'),
    ({"socket": "/tmp/fmhad.sock", "metrics_socket": "/tmp/fmhad.sock"}, "metrics_socket /tmp/fmhad.sock: that is the clients' socket"),
])
def test_check_finds_what_cannot_work(tmp_path, config, said):
    (tmp_path / "fmhad.json").write_text(json.dumps(config))
    code, out, err = finish(start(["--config", str(tmp_path / "fmhad.json"), "--check"]))
    assert code == 78 and not out and said in err


def test_a_start_that_fails_again_and_again_is_told_once(make_daemon):
    daemon = make_daemon({"devices": [{"backend": "cpu", "cpu_level": "avx9"}], "supervision": {"restart_ms": 1}})
    assert fmhad.until(lambda: daemon.status()["devices"][0]["deaths"] > 3)
    assert daemon.log().count("cpu_level avx9: no such level") == 1


# ---- the socket ----


def test_socket_file(make_daemon):
    daemon = make_daemon({"socket_mode": "0600"})
    mode = os.lstat(daemon.socket).st_mode
    assert stat.S_ISSOCK(mode) and stat.S_IMODE(mode) == 0o600
    default = make_daemon()
    # Without a group that was named nobody but the owner: its own group may be everybody's.
    assert stat.S_IMODE(os.lstat(default.socket).st_mode) == 0o600
    named = make_daemon({"socket_group": grp.getgrgid(os.getgid()).gr_name})
    assert stat.S_IMODE(os.lstat(named.socket).st_mode) == 0o660
    path = pathlib.Path(default.socket)
    default.process.send_signal(signal.SIGTERM)
    assert default.process.wait(10) == 0
    assert not path.exists()


def test_second_daemon_does_not_take_the_socket(daemon):
    code, _, err = finish(start(["--config", str(daemon.directory / "fmhad.json")]))
    assert code == 1 and "another daemon listens" in err
    with daemon.client() as client:
        client.ping()


def test_stale_socket_is_replaced_but_nothing_else(make_daemon, tmp_path):
    daemon = make_daemon()
    daemon.process.kill()
    daemon.process.wait()
    assert os.path.exists(daemon.socket)
    process = start(["--config", str(daemon.directory / "fmhad.json")])
    try:
        assert fmhad.until(lambda: connects(daemon.socket))
    finally:
        process.terminate()
        assert finish(process)[0] == 0
    precious = tmp_path / "precious"
    precious.write_text("data")
    code, _, err = finish(start(["--socket", str(precious)]))
    assert code == 1 and "no socket" in err and precious.read_text() == "data"


def test_socket_activation(tmp_path):
    """What systemd does: the socket is made first, clients queue until the daemon takes it."""
    path = str(tmp_path / "activated.sock")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(16)
    early = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    early.connect(path)

    def child():
        os.dup2(listener.fileno(), 3)
        os.set_inheritable(3, True)
        os.environ["LISTEN_PID"] = str(os.getpid())

    # LISTEN_PID must be the daemon's own pid: exec from a shell keeps it.
    process = subprocess.Popen(
        ["/bin/sh", "-c", 'LISTEN_PID=$$ LISTEN_FDS=1 exec "$0" "$@" 3<&3',
         str(fmhad.find_program("fmhad")), "--socket", "/nowhere/unused.sock"],
        preexec_fn=child, close_fds=False, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        connection = fmha_wire.Connection(early, 10)
        connection.call("hello", {"version": 1, "client": "early"})
        connection.call("ping")
        with fmha_wire.Client.connect(path) as client, client.open_device(0) as device:
            device.ping()
    finally:
        process.terminate()
        code = finish(process)[0]
    assert code == 0
    assert os.path.exists(path)  # not the daemon's to remove
    listener.close()
    early.close()


def test_socket_activation_checks_the_kind(tmp_path):
    wrong = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    wrong.bind(str(tmp_path / "dgram"))
    process = subprocess.Popen(
        ["/bin/sh", "-c", 'LISTEN_PID=$$ LISTEN_FDS=1 exec "$0" 3<&3',
         str(fmhad.find_program("fmhad"))],
        preexec_fn=lambda: os.dup2(wrong.fileno(), 3), close_fds=False,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    code, _, err = finish(process)
    assert code == 1 and "not a listening Unix stream socket" in err
    wrong.close()


# ---- the service manager ----


class Manager:
    """The receiving end of sd_notify."""

    def __init__(self, name):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(name)
        self.socket.settimeout(10)
        self.received = []

    def until(self, word):
        while not any(word in message for message in self.received):
            self.received.append(self.socket.recv(4096).decode())
        return self.received


@pytest.mark.parametrize("abstract", [False, True])
def test_notifies_the_service_manager(make_daemon, tmp_path, abstract):
    name = f"\0fmhad-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    manager = Manager(name)
    daemon = make_daemon(env={"NOTIFY_SOCKET": name.replace("\0", "@"), "WATCHDOG_USEC": "600000"})
    manager.until("READY=1")
    assert any("STATUS=1 of 1 devices ready" in message for message in manager.until("STATUS=1"))
    assert daemon.status()["state"] == "ready" and f"ready on {daemon.socket}" in daemon.log()
    manager.until("WATCHDOG=1")
    first = time.monotonic()
    for _ in range(3):
        assert "WATCHDOG=1" in manager.socket.recv(4096).decode()
    assert time.monotonic() - first < 3 * 0.6  # half the interval each
    daemon.process.send_signal(signal.SIGTERM)
    manager.until("STOPPING=1")
    assert daemon.process.wait(10) == 0


def test_worker_does_not_see_the_managers_variables(make_daemon, tmp_path):
    manager = Manager(str(tmp_path / "notify"))
    daemon = make_daemon(env={"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "9000000"})
    environment = pathlib.Path(f"/proc/{daemon.children()[0]}/environ").read_bytes()
    assert b"NOTIFY_SOCKET" not in environment and b"WATCHDOG" not in environment
    manager.socket.close()


def test_journal_priorities(tmp_path):
    read, write = os.pipe()
    info = os.fstat(write)
    path = tmp_path / "fmhad.json"
    path.write_text("{")
    process = subprocess.run(
        [fmhad.find_program("fmhad"), "--config", str(path)],
        stderr=write,
        env={**os.environ, "JOURNAL_STREAM": f"{info.st_dev}:{info.st_ino}"},
        check=False,
    )
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    assert process.returncode == 78 and text.startswith("<3>fmhad: ")


def test_broken_device_does_not_keep_the_daemon_down(make_daemon, tmp_path):
    """Degraded, but up: other devices serve, status says why this one does not."""
    manager = Manager(str(tmp_path / "notify"))
    config = {
        "socket": str(tmp_path / "s"),
        "devices": [{"backend": "cpu", "cpu_level": "x86_64_v9"}, {"backend": "cpu", "threads": 1}],
    }
    (tmp_path / "fmhad.json").write_text(json.dumps(config))
    process = start(
        ["--config", str(tmp_path / "fmhad.json")],
        env={**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify")},
    )
    try:
        manager.until("READY=1")
        with fmha_wire.Client.connect(config["socket"]) as client:
            states = [device["state"] for device in client.devices()]
            assert states == ["failed", "ready"]
            assert json.loads(client.status())["state"] == "degraded"
            with pytest.raises(fmha_wire.WireError) as caught:
                client.open_device(0)
            assert caught.value.name == "EDEVICE" and "x86_64_v9" in caught.value.message
            with client.open_device(1) as device:
                plan, _ = prepare(device)
                device.run(plan)
    finally:
        process.terminate()
        assert finish(process)[0] == 0


def test_every_device_failed_is_degraded(make_daemon, tmp_path):
    """It serves status, and says everywhere that it is not well: manager, log, status, health check."""
    manager = Manager(str(tmp_path / "notify"))
    daemon = make_daemon({"devices": [{"backend": "cpu", "cpu_level": "x86_64_v9"}]},
                         env={"NOTIFY_SOCKET": str(tmp_path / "notify")})
    told = manager.until("STATUS=degraded: 0 of 1 devices ready; device 0: ")
    assert "x86_64_v9" in told[-1]
    manager.until("READY=1")  # or the manager would end it
    assert daemon.status()["state"] == "degraded"
    assert f"degraded on {daemon.socket}: 0 of 1 devices ready" in daemon.log()
    assert "ready on" not in daemon.log()

    def fmhactl(*arguments):
        return subprocess.run([fmhad.find_program("fmhactl"), *arguments, "--socket", daemon.socket],
                              capture_output=True, text=True, check=False)

    shown = fmhactl("status")
    assert shown.returncode == 0 and ": degraded, pid" in shown.stdout and "last death: " in shown.stdout
    assert fmhactl("ping", "--count", "1", "--timeout", "1").returncode == 4
    manager.socket.close()


def test_without_write_access(tmp_path):
    """Read-only everything but the socket's directory, as another user."""
    if fmhad.NO_OTHER_USERS:
        pytest.skip(fmhad.NO_OTHER_USERS)
    nobody = pwd.getpwnam("nobody")
    os.chown(tmp_path, nobody.pw_uid, nobody.pw_gid)
    for parent in list(tmp_path.parents)[:-1]:
        parent.chmod(parent.stat().st_mode | 0o055)
    path = tmp_path / "s"
    process = start(
        [],
        user=nobody.pw_uid,
        group=nobody.pw_gid,
        extra_groups=[],
        cwd="/",
        env={"XDG_RUNTIME_DIR": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )
    try:
        assert fmhad.until(lambda: connects(str(tmp_path / "fmhad.sock"))), path
    finally:
        process.terminate()
        code, _, err = finish(process)
    assert code == 0, err


# ---- stopping ----


def test_drain_finishes_what_is_in_flight(make_daemon):
    daemon = make_daemon({"devices": [{"backend": "cpu"}], "supervision": {"drain_ms": 60000}})
    with daemon.device() as device:
        plan, _ = prepare(device, (1, 1024, 8, 64))
        numbers = [device.submit("run", {"plan": plan}) for _ in range(20)]
        device.wait(numbers[0])
        daemon.process.send_signal(signal.SIGTERM)
        for number in numbers[1:]:
            device.wait(number, 60)
        assert daemon.process.wait(60) == 0
        with pytest.raises((fmha_wire.Disconnected, fmha_wire.WireError)):
            device.run(plan)


def test_drain_has_a_deadline(make_daemon):
    daemon = make_daemon({"supervision": {"drain_ms": 200}})
    with daemon.device() as device:
        plan, _ = prepare(device, (1, 4096, 8, 64))
        numbers = [device.submit("run", {"plan": plan}) for _ in range(40)]
        device.wait(numbers[0], 30)
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(60) == 0
        names = []
        for number in numbers[1:]:
            try:
                device.wait(number, 5)
                names.append("ok")
            except fmha_wire.WireError as error:
                names.append(error.name)
        assert names[-1] == "ECANCELED" and set(names) <= {"ok", "ECANCELED"}


def test_sixty_four_busy_clients_do_not_delay_the_end(make_daemon):
    daemon, devices = make_daemon({"supervision": {"drain_ms": 600000}}), []
    with daemon.client() as client:
        for _ in range(64):
            devices.append(client.open_device(0))
    for device in devices:
        plan, _ = prepare(device, (1, 128, 2, 64))
        for _ in range(4):
            device.submit("run", {"plan": plan})
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(60) == 0
    for device in devices:
        device.close()
