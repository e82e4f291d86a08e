# SPDX-License-Identifier: MIT
"""The units: accepted by systemd, tight enough, and complete when installed (RELIABILITY section 5)."""
import json
import pathlib
import re
import shutil
import subprocess

import fmhad
import pytest

UNITS = fmhad.ROOT / "systemd"

needs_analyze = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)


@pytest.fixture
def units(tmp_path):
    """The units as installed, but starting the program of the build tree."""
    shutil.copy(UNITS / "fmhad.socket", tmp_path)
    text = (UNITS / "fmhad.service.in").read_text()
    program = fmhad.find_program("fmhad").resolve()
    text, n = re.subn(r"^ExecStart=.*$", f"ExecStart={program}", text, flags=re.M)
    assert n == 1
    (tmp_path / "fmhad.service").write_text(text)
    return tmp_path


def run(*command):
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@needs_analyze
@pytest.mark.parametrize("unit", ["fmhad.service", "fmhad.socket"])
def test_verify_is_clean(units, unit):
    result = run("systemd-analyze", "verify", "--man=no", str(units / unit))
    ours = [line for line in result.stderr.splitlines() if "fmhad" in line]
    assert result.returncode == 0 and not ours, result.stderr


@needs_analyze
def test_exposure_is_low(units):
    result = run(
        "systemd-analyze", "security", "--offline=true", "--threshold=15", "--no-pager",
        str(units / "fmhad.service"),
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr


def test_nothing_that_breaks_gpus_or_quotas():
    """RELIABILITY 0.4 and 0.6: these look like free points and are not."""
    text = (UNITS / "fmhad.service.in").read_text()
    for directive in ("PrivateUsers", "MemoryDenyWriteExecute", "ProcSubset", "PrivateNetwork",
                      "PrivateDevices"):  # fmt: skip
        assert not re.search(rf"^{directive}=", text, flags=re.M), directive
    assert not re.search(r"^SystemCallFilter=~.*@resources", text, flags=re.M)


def test_service_and_daemon_agree():
    text = (UNITS / "fmhad.service.in").read_text()
    assert re.search(r"^Type=notify$", text, flags=re.M)
    assert re.search(r"^WatchdogSec=30$", text, flags=re.M)
    socket = (UNITS / "fmhad.socket").read_text()
    assert "ListenStream=/run/fmhad/fmhad.sock" in socket and "SocketMode=0660" in socket
    example = json.loads((UNITS / "fmhad.json").read_text())
    assert example["socket"] == "/run/fmhad/fmhad.sock" and example["socket_group"] == "fmha"
    drain_s = example["supervision"]["drain_ms"] / 1000
    stop_s = float(re.search(r"^TimeoutStopSec=(\d+)$", text, flags=re.M)[1])
    assert drain_s + 1 < stop_s


@pytest.mark.skipif(shutil.which("systemd-sysusers") is None, reason="no systemd-sysusers")
def test_sysusers_and_tmpfiles(tmp_path):
    (tmp_path / "etc").mkdir()
    result = run("systemd-sysusers", f"--root={tmp_path}", str(UNITS / "fmhad.sysusers"))
    assert result.returncode == 0, result.stderr
    passwd = (tmp_path / "etc/passwd").read_text()
    group = (tmp_path / "etc/group").read_text()
    assert "fmhad:" in passwd and "fmha:" in group and "render:" in group
    result = run("systemd-tmpfiles", "--create", f"--root={tmp_path}",
                 str(UNITS / "fmhad.tmpfiles"))  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "run/fmhad").is_dir()


def test_install(tmp_path):
    result = run(
        "cmake", "--install", str(fmhad.build_dir() / "systemd"), "--prefix", str(tmp_path / "usr")
    )
    assert result.returncode == 0, result.stderr
    installed = {str(p.relative_to(tmp_path / "usr")) for p in tmp_path.rglob("*") if p.is_file()}
    assert {
        "lib/systemd/system/fmhad.service",
        "lib/systemd/system/fmhad.socket",
        "lib/sysusers.d/fmhad.conf",
        "lib/tmpfiles.d/fmhad.conf",
    } <= installed
    assert any(pathlib.PurePath(name).name == "fmhad.json" for name in installed)
