# SPDX-License-Identifier: MIT
"""The package as the build tree has it, on a daemon that it starts itself, or on that of FMHA_TEST_SOCKET."""
import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[3]
BUILD = pathlib.Path(os.environ.get("FMHA_BUILD", ROOT / "build/release"))
os.environ.pop("FMHAD_SOCKET", None)
sys.path.insert(0, str(BUILD / "client/python"))

import pytest  # noqa: E402

if not (BUILD / "client/python/fmha/_abi.py").exists():
    pytest.exit("the build has no Python package: configure it again where python3-cffi is", returncode=1)

import fmha  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def daemon():
    if "FMHA_TEST_SOCKET" in os.environ:
        os.environ["FMHAD_SOCKET"] = os.environ["FMHA_TEST_SOCKET"]
        yield os.environ["FMHAD_SOCKET"]
        return
    yield fmha.start(config={"devices": [{"backend": "cpu", "threads": 2}]})
    fmha.stop()
