# SPDX-License-Identifier: MIT
"""README's snippets and python -m fmha, each in a process of its own."""
import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

README = pathlib.Path(__file__).resolve().parents[1] / "README.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)


def run(*arguments, **environment):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment})


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_snippets(number):
    for module in re.findall(r"^(?:import|from) (torch|transformers)", SNIPPETS[number], re.M):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    done = run("-c", SNIPPETS[number])
    assert done.returncode == 0, done.stderr


def test_python_m_fmha():
    done = run("-m", "fmha")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "self-test   passed" in done.stdout and "device 0" in done.stdout
    done = run("-m", "fmha", FMHAD_SOCKET="/nonexistent/s")
    assert done.returncode == 1 and "/nonexistent/s" in done.stderr and "Traceback" not in done.stderr
