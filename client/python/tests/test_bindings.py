# SPDX-License-Identifier: MIT
"""The bindings alone, built from nothing but client/python, against an installed libfmha_client."""
import os
import pathlib
import re
import runpy
import shutil
import subprocess
import sys

import fmha
import pytest
from conftest import BUILD, ROOT

PROGRAM = """
import numpy as np, fmha
x = np.ones((1, 4, 1, 32), np.float32)
assert (fmha.attention(x, x, x) == 1).all()
print(fmha.__file__, fmha.start.__globals__["program"]("fmhad"))
"""


def run(*command, **environment):
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    prefix = tmp_path_factory.mktemp("installed")
    subprocess.run(["cmake", "--install", str(BUILD), "--prefix", str(prefix)], check=True, capture_output=True)
    return prefix


def test_bindings_for_an_installed_library(installed, tmp_path, monkeypatch):
    pytest.importorskip("setuptools")
    monkeypatch.chdir(tmp_path)
    (pkgconfig,) = {p.parent for p in installed.rglob("fmha_client.pc")}
    (library,) = installed.rglob("libfmha_client.so.1")
    shutil.copytree(ROOT / "client/python", "source", ignore=shutil.ignore_patterns("tests", "__pycache__"))
    monkeypatch.chdir("source")
    build = [sys.executable, "setup.py", "-q", "build", "--build-base", str(tmp_path / "built"), "--build-lib", str(tmp_path / "lib")]
    code, _, told = run(*build, FMHA_WHEEL="bindings", PKG_CONFIG_LIBDIR=str(tmp_path))
    assert code == 1 and "pkg-config finds no libfmha_client" in told
    code, _, told = run(*build, FMHA_WHEEL="bindings", PKG_CONFIG_PATH=str(pkgconfig))
    assert code == 0, told
    assert not (tmp_path / "lib/fmha/_native").exists()
    monkeypatch.chdir(tmp_path)
    code, said, told = run(sys.executable, "-c", PROGRAM, PYTHONPATH=str(tmp_path / "lib"), FMHA_BIN="",
                           LD_LIBRARY_PATH=str(library.parent), PATH=f"{installed}/bin:{os.environ['PATH']}")
    assert code == 0, told
    assert said.split() == [str(tmp_path / "lib/fmha/__init__.py"), str(next(installed.rglob("bin/fmhad")))]


def test_bundled_libraries_bring_their_licences(installed, tmp_path, monkeypatch):
    setuptools = pytest.importorskip("setuptools")
    if not shutil.which("dpkg"):
        pytest.skip("licences are found by dpkg")
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    (client,) = installed.rglob("libfmha_client.so.1")
    (tmp_path / "lib").mkdir()
    shutil.copy(client, tmp_path / "lib")
    shutil.copy(next(installed.rglob("bin/fmhad")), tmp_path)
    runpy.run_path(str(ROOT / "client/python/setup.py"))["bundle"](tmp_path)
    bundled = {p.name for p in (tmp_path / "lib").iterdir()} - {client.name}
    assert {re.match(r"lib(uv|msgpack|cjson|nettle)", name)[1] for name in bundled} >= {"uv", "nettle"}
    for name in bundled:
        assert "Copyright" in (tmp_path / "licenses" / name).read_text()
    assert "LESSER GENERAL PUBLIC LICENSE" in (tmp_path / "licenses/LGPL").read_text()


def test_every_name_of_the_library_is_there():
    """cffi finds out at the first use, which may be on another machine."""
    names = set()
    for path in pathlib.Path(fmha.__file__).parent.glob("*.py"):
        names |= set(re.findall(r"\blib\.(FMHA_\w+|fmha_\w+)", path.read_text()))
    assert len(names) > 40 and "FMHA_ANY_DEVICE" in names
    assert [name for name in sorted(names) if not hasattr(fmha._lib.lib, name)] == []


def test_a_machine_without_a_cpu_device():
    program = """
import numpy as np, fmha
fmha.start(config={"devices": [{"backend": "fake"}]})
x = np.ones((1, 4, 2, 32), np.float32)
assert (fmha.attention(x, x, x) == 1).all()
assert fmha.default_client().device().info.backend == "fake"
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120,
                          env={**{k: v for k, v in os.environ.items() if k != "FMHAD_SOCKET"},
                               "PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == 0, done.stderr
