# SPDX-License-Identifier: MIT
"""What an administrator does with a running fmhad: reload it, read its log, find its processes."""
import json
import os
import pty
import re
import signal
import socket
import subprocess

import fmhad
import pytest


def rewrite(daemon, **keys):
    """Another configuration in the daemon's file, and SIGHUP."""
    daemon.config = {**daemon.config, **keys}
    (daemon.directory / "fmhad.json").write_text(json.dumps(daemon.config))
    daemon.process.send_signal(signal.SIGHUP)


def limits(daemon):
    """The front's and, once it has told them, the worker's."""
    status = fmhad.until(lambda: (said := daemon.status())["devices"][0]["worker"] and said)
    return status["front"]["limits"], status["devices"][0]["worker"]["limits"]


# ---- reload ----


def test_limits_are_taken_over_by_everybody(make_daemon):
    daemon = make_daemon({"log_level": "info"})
    with daemon.device() as device:
        pid = device.worker_pid
        rewrite(daemon, limits={"plans_per_connection": 3, "connections_per_uid": 5}, log_level="debug")
        assert fmhad.until(lambda: all(part["plans_per_connection"]["value"] == 3 for part in limits(daemon)))
        assert limits(daemon)[0]["connections_per_uid"]["value"] == 5
        assert daemon.worker_pid() == pid and daemon.status()["devices"][0]["starts"] == 1
        device.ping()
        rewrite(daemon, limits={})
        assert fmhad.until(lambda: all(part["plans_per_connection"]["value"] == 4096 for part in limits(daemon)))
    assert "configuration read again: 3 keys have changed" in daemon.log()


def test_a_reload_reaches_workers_that_start_later(make_daemon):
    daemon = make_daemon(fmhad.FAKE)
    rewrite(daemon, limits={"plans_per_connection": 3})
    assert fmhad.until(lambda: limits(daemon)[1]["plans_per_connection"]["value"] == 3)
    os.kill(daemon.worker_pid(), signal.SIGKILL)
    assert fmhad.until(lambda: daemon.status()["devices"][0]["starts"] == 2)
    assert fmhad.until(lambda: daemon.status()["devices"][0]["worker"] is not None)
    assert limits(daemon)[1]["plans_per_connection"]["value"] == 3


def test_what_needs_a_restart_is_named(make_daemon):
    daemon = make_daemon()
    devices = [*daemon.config["devices"], {"backend": "cpu", "threads": 1}]
    rewrite(daemon, devices=devices, limits={"spin_us": 7, "plans": 9}, compile={"jobs": 3})
    assert fmhad.until(lambda: "a restart is needed for compile.jobs, limits.spin_us, devices" in daemon.log())
    assert "1 keys have changed" in daemon.log() and len(daemon.status()["devices"]) == 1
    assert limits(daemon)[0]["spin_us"]["value"] == 50 and limits(daemon)[0]["plans"]["value"] == 9


@pytest.mark.parametrize("text, said", [("{", "not valid JSON"), ('{"log_levle": 1}', "log_levle: unknown key")])
def test_a_wrong_configuration_changes_nothing(make_daemon, text, said):
    daemon = make_daemon({"limits": {"plans": 77}})
    (daemon.directory / "fmhad.json").write_text(text)
    daemon.process.send_signal(signal.SIGHUP)
    assert fmhad.until(lambda: "not taken over, the old one stays" in daemon.log()) and said in daemon.log()
    assert limits(daemon)[0]["plans"]["value"] == 77
    done = subprocess.run([fmhad.find_program("fmhad"), "--check", "--config", daemon.directory / "fmhad.json"],
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 78 and said in done.stderr


def test_admins_are_taken_over(make_daemon):
    if fmhad.NO_OTHER_USERS:
        pytest.skip(fmhad.NO_OTHER_USERS)
    daemon = make_daemon(open_to_all=True)
    script = (
        "import os, sys, json; os.setuid(12345); sys.path.insert(0, sys.argv[1]); import fmha_wire\n"
        "with fmha_wire.Client.connect(sys.argv[2]) as client:\n"
        "    print(len(json.loads(client.status())['front']['clients']))"
    )

    def seen():
        done = subprocess.run(["/usr/bin/python3", "-c", script, str(fmhad.ROOT / "tests/lib"), daemon.socket],
                              capture_output=True, text=True, check=True)  # fmt: skip
        return int(done.stdout)

    with daemon.client():
        assert seen() == 1
        rewrite(daemon, admin_uids=[12345])
        assert fmhad.until(lambda: seen() == 2)


# ---- names and the log ----


def test_processes_are_named(make_daemon):
    daemon = make_daemon({"devices": [{"backend": "cpu", "threads": 1}] * 2})
    names = [open(f"/proc/{pid}/comm", encoding="ascii").read().strip() for pid in [daemon.pid, *daemon.children()]]
    assert names == ["fmhad-front", "fmhad-worker/0", "fmhad-worker/1"]


def test_a_terminal_shows_time_and_level(tmp_path):
    master, slave = pty.openpty()
    (tmp_path / "fmhad.json").write_text("{")
    subprocess.run([fmhad.find_program("fmhad"), "--config", tmp_path / "fmhad.json"], stderr=slave, check=False)
    os.close(slave)
    text = os.read(master, 4096).decode()
    os.close(master)
    assert re.match(r"\d\d:\d\d:\d\d\.\d{3} error   fmhad\[\d+\]: .*not valid JSON", text), text


def test_verbose_is_debug(tmp_path):
    (tmp_path / "fmhad.json").write_text(json.dumps({"log_level": "error", "devices": [{"backend": "cpu"}]}))
    arguments = ["--config", str(tmp_path / "fmhad.json"), "--socket", str(tmp_path / "s")]
    for option, expected in (("-v", True), ("--foreground", False)):
        process = fmhad.start([option, *arguments])
        assert fmhad.until(lambda: fmhad.connects(str(tmp_path / "s")))
        process.send_signal(signal.SIGTERM)
        _, _, err = fmhad.finish(process)
        assert ("stopping" in err) == expected


def test_a_refused_request_is_found_in_the_log(tmp_path):
    """At level debug, with the client and the number that it gave the request."""
    master, slave = pty.openpty()
    (tmp_path / "fmhad.json").write_text(json.dumps(fmhad.FAKE))
    process = subprocess.Popen(
        [fmhad.find_program("fmhad"), "-v", "--config", tmp_path / "fmhad.json", "--socket", tmp_path / "s"], stderr=slave)
    os.close(slave)
    assert fmhad.until(lambda: fmhad.connects(str(tmp_path / "s")))
    with fmhad.fmha_wire.Client.connect(str(tmp_path / "s")) as client, client.open_device(0) as device:
        with pytest.raises(fmhad.fmha_wire.WireError):
            device.run(4711)
        wanted = f"uid {os.getuid()}, pid {os.getpid()}, request {device.next_id - 1}: ENOENT plan: plan 4711: no such"
    process.send_signal(signal.SIGTERM)
    text = ""
    while wanted not in text:
        text += os.read(master, 65536).decode()  # raises at the end
    assert process.wait(20) == 0
    os.close(master)


def test_the_journal_gets_fields(tmp_path):
    """Another stderr, as systemd makes it, and a socket in place of the journal's."""
    read, write = os.pipe()
    info = os.fstat(write)
    journal = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    journal.bind(str(tmp_path / "journal"))
    journal.settimeout(20)
    (tmp_path / "fmhad.json").write_text(json.dumps({**fmhad.FAKE, "log_level": "debug", "limits": {"connections_per_uid": 1}}))
    process = subprocess.Popen(
        [fmhad.find_program("fmhad"), "--config", tmp_path / "fmhad.json", "--socket", tmp_path / "s"], stderr=write,
        env={**os.environ, "JOURNAL_STREAM": f"{info.st_dev}:{info.st_ino}",
             "FMHAD_JOURNAL_SOCKET": str(tmp_path / "journal")},
    )  # fmt: skip
    os.close(write)
    entries = []

    def until(message):
        while True:
            entry = dict(line.split("=", 1) for line in journal.recv(8192).decode().splitlines())
            entries.append(entry)
            if message in entry["MESSAGE"]:
                return entry

    try:
        ready = until("is ready")
        assert ready["FMHA_DEVICE"] == "0" and ready["PRIORITY"] == "6" and ready["SYSLOG_IDENTIFIER"] == "fmhad"
        until("ready on")
        with fmhad.fmha_wire.Client.connect(str(tmp_path / "s")) as client:
            with client.open_device(0) as device:
                with pytest.raises(fmhad.fmha_wire.WireError):
                    device.run(4711)
                refusal = until("plan 4711: no such")
                assert refusal["MESSAGE"].startswith("ENOENT plan: ") and refusal["FMHA_DEVICE"] == "0"
                assert refusal["FMHA_REQUEST"] == str(device.next_id - 1) and refusal["FMHA_CLIENT_PID"] == str(os.getpid())
                os.kill(device.worker_pid, signal.SIGSEGV)
        dead = until("signal 11 (Segmentation fault)")
        assert dead["PRIORITY"] == "4" and dead["FMHA_DEVICE"] == "0"
        with fmhad.fmha_wire.Client.connect(str(tmp_path / "s")) as client:
            other = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            other.connect(str(tmp_path / "s"))
            refused = until("refusing a connection")
            assert refused["FMHA_CLIENT_PID"] == str(os.getpid()) and refused["FMHA_CLIENT_UID"] == str(os.getuid())
            other.close()
            client.sock.sendall(b"\xff" * 64)
            closing = until("closing a connection")
        assert closing["FMHA_CLIENT_UID"] == str(os.getuid())
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)
    with os.fdopen(read) as pipe:
        assert pipe.read() == ""


def test_a_lost_terminal_ends_the_daemon(tmp_path):
    """SIGHUP of a terminal that is gone is no wish to reload."""
    master, slave = pty.openpty()
    (tmp_path / "fmhad.json").write_text(json.dumps({"devices": [{"backend": "cpu", "threads": 1}]}))
    process = subprocess.Popen(
        [fmhad.find_program("fmhad"), "--config", tmp_path / "fmhad.json", "--socket", tmp_path / "s"], stderr=slave)
    os.close(slave)
    assert fmhad.until(lambda: fmhad.connects(str(tmp_path / "s")))
    process.send_signal(signal.SIGHUP)
    assert fmhad.until(lambda: b"read again" in os.read(master, 65536))
    os.close(master)
    process.send_signal(signal.SIGHUP)
    assert process.wait(20) == 0
