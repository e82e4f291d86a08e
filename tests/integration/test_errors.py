# SPDX-License-Identifier: MIT
"""The mistakes that people are most likely to make: each text says what was wrong, with its value, and what to do
or what would be right."""
import json
import os
import subprocess

import fmhad
import numpy
import pytest


@pytest.fixture(scope="module", name="daemon")
def fixture_daemon():
    with fmhad.Daemon() as daemon:
        yield daemon


@pytest.fixture(name="folder")
def fixture_folder(tmp_path):
    for name, shape in {"q": (1, 8, 4, 16), "k": (1, 8, 3, 16), "wide": (1, 8, 4, 1000)}.items():
        numpy.save(tmp_path / f"{name}.npy", numpy.zeros(shape, "float32"))
    numpy.save(tmp_path / "long.npy", numpy.zeros((1, 8, 4, 16), "int64"))
    (tmp_path / "text.npy").write_text("not an array")
    return tmp_path


def qkv(q, k=None):
    return ["run", "forward", "--q", f"{q}.npy", "--k", f"{k or q}.npy", "--v", f"{k or q}.npy", "--check"]


@pytest.mark.parametrize(
    "words, status, parts",
    [
        (["pong"], 2, ["no command 'pong'", "`fmhactl --help`"]),
        (["ping", "--cuont", "3"], 2, ["'--cuont'", "`fmhactl ping --help`"]),
        (["ping", "--count", "ten"], 2, ["--count 'ten'", "not a whole number"]),
        (["top", "--count", "0"], 2, ["--count '0'", "not in 1..1000000000", "`fmhactl top --help`"]),
        (["trace", "--seconds", "1e9"], 2, ["--seconds '1e9'", "not in 0.1..3600"]),
        (["enumerate", "--format", "xml"], 2, ["--format 'xml'", "not one of csv json names"]),
        (["plan", *["--kernel", "x"] * 9], 2, ["--kernel 'x'", "more than 5 of them"]),
        (["ping", "--timeout", "0"], 2, ["--timeout 0", "0.001 to 1000000"]),
        (["ping", "--device", "7"], 4, ["device 7", "there are 1, counted from 0"]),
        (qkv("missing"), 5, ["missing.npy", "No such file or directory"]),
        (qkv("text"), 5, ["text.npy", "no .npy file"]),
        (qkv("long"), 5, ["long.npy", "'<i8'", "float32 (<f4)"]),
        (qkv("q", "k"), 4, ["nhead_q 4", "not a multiple of nhead_k 3"]),
        (qkv("wide"), 4, ["hdim_q 1000", "above 576"]),
        (["run", "forward", "--q", "q.npy", "--k", "q.npy", "--v", "q.npy"], 2, ["no file is named", "--out", "--check"]),
        (["run", "forward", "--q", "q.npy", "--check"], 2, ["--k FILE is missing"]),
        (["plan", "--dtype", "f64"], 2, ["--dtype 'f64'", "not one of f32 f16 bf16"]),
        (["plan", "--hdim", "584"], 4, ["hdim_q 584", "above 576"]),
        (["plan", "--arch", "sm_99"], 4, ["arch sm_99", "`fmhactl archs`"]),
        (["enumerate", "--arch", "gfx942", "--filter", "hdim == 3"], 2, ["column 1", "no field 'hdim'", "^"]),
        (["build", "--arch", "sm_80", "--profile", "nope"], 2, ["profile nope", "`fmhactl profiles`"]),
    ],
    ids=lambda value: "_".join(map(str, value))[:40] if isinstance(value, list) else None,
)  # fmt: skip
def test_fmhactl_says_what_and_what_to_do(daemon, folder, words, status, parts):
    done = subprocess.run([fmhad.find_program("fmhactl"), *words], capture_output=True, text=True, check=False,
                          cwd=folder, env={**os.environ, "FMHAD_SOCKET": daemon.socket})  # fmt: skip
    assert done.returncode == status, done.stderr
    for part in parts:
        assert part in done.stderr
    assert len(done.stderr) < 600


def test_no_daemon(tmp_path):
    done = subprocess.run([fmhad.find_program("fmhactl"), "ping", "--socket", tmp_path / "s"], capture_output=True,
                          text=True, check=False)  # fmt: skip
    assert done.returncode == 3
    for part in (str(tmp_path / "s"), "No such file or directory", "systemctl start fmhad.socket"):
        assert part in done.stderr


def test_not_in_the_group(make_daemon):
    if fmhad.NO_OTHER_USERS:
        pytest.skip(fmhad.NO_OTHER_USERS)
    daemon = make_daemon()
    daemon.directory.chmod(0o755)
    done = subprocess.run([fmhad.find_program("fmhactl"), "ping"], capture_output=True, text=True, check=False, user=65534,
                          group=65534, extra_groups=[], env={**os.environ, "FMHAD_SOCKET": daemon.socket})  # fmt: skip
    assert done.returncode == 3
    assert daemon.socket in done.stderr and "Permission denied" in done.stderr and "usermod -aG fmha" in done.stderr


@pytest.mark.parametrize(
    "config, status, parts",
    [
        ('{"log_level": "info",}', 78, [":1:22: not valid JSON"]),
        ({"log_levle": 1}, 78, ["log_levle: unknown key", "man fmhad.json"]),
        ({"limits": {"fds": -1}}, 78, ["limits.fds", "from 0 to 1048576, not -1"]),
        ({"log_level": "loud"}, 78, ["log_level", "error, warning, notice, info or debug", '"loud"']),
        ({"devices": [{"backend": "gpu"}]}, 78, ["devices[0].backend", "cpu, fake, hip or cuda", '"gpu"']),
        ({"socket_mode": 660}, 78, ["socket_mode", 'such as "0660"', "660"]),
        ({"socket_group": "no-such-group"}, 1, ["socket_group no-such-group", "groupadd"]),
        ({"socket": "/nonexistent/fmhad.sock"}, 1, ["/nonexistent", "No such file or directory", "mkdir -p", "--socket"]),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, (dict, str)) else None,
)
def test_fmhad_says_what_and_what_to_do(tmp_path, config, status, parts):
    if isinstance(config, dict):
        config = json.dumps({"socket": str(tmp_path / "s"), **config})
    (tmp_path / "fmhad.json").write_text(config)
    done = subprocess.run([fmhad.find_program("fmhad"), "--config", tmp_path / "fmhad.json"], capture_output=True,
                          text=True, check=False, timeout=20)  # fmt: skip
    assert done.returncode == status, done.stderr
    for part in parts:
        assert part in done.stderr


def test_a_second_daemon(daemon):
    done = subprocess.run([fmhad.find_program("fmhad"), "--socket", daemon.socket], capture_output=True, text=True,
                          check=False, timeout=20)  # fmt: skip
    assert done.returncode == 1
    assert daemon.socket in done.stderr and "another daemon listens" in done.stderr and "--socket" in done.stderr
