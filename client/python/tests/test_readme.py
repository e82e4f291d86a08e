# SPDX-License-Identifier: MIT
"""README's snippets and python -m fmha, each in a process of its own."""
import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", ROOT / "client/python/README.md", ROOT / "docs/engines.md", *sorted((ROOT / "client/docs").glob("python*.md")), ROOT / "client/docs/pool.md", ROOT / "client/docs/masks.md"]
SNIPPETS = {f"{page.relative_to(ROOT)} {n}": text for page in PAGES
            for n, text in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.S))}


def run(*arguments, **environment):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment})


def test_each_use_has_a_page_with_programs():
    for name in ("README.md", "client/python/README.md", *(f"client/docs/python-{use}.md" for use in ("numpy", "torch", "transformers"))):
        assert f"{name} 0" in SNIPPETS


@pytest.mark.parametrize("name", SNIPPETS)
def test_snippets(name):
    for module in re.findall(r"^(?:import|from) (torch|transformers|diffusers)", SNIPPETS[name], re.M):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    if "activate_flash_attention_impl" in SNIPPETS[name] and not hasattr(importlib.import_module("torch.nn.attention"), "activate_flash_attention_impl"):
        pytest.skip("this torch has no slot for flash attention")
    done = run("-c", SNIPPETS[name])
    assert done.returncode == 0, done.stderr


def test_python_m_fmha():
    done = run("-m", "fmha")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "self-test   passed" in done.stdout and re.search(r"^device 0 .*: ready$", done.stdout, re.M)
    done = run("-m", "fmha", "--start", FMHAD_SOCKET="")
    assert done.returncode == 0 and re.search(r"^device \d .*\(cpu, .*: ready$", done.stdout, re.M), done.stdout + done.stderr
    done = run("-m", "fmha", FMHAD_SOCKET="/nonexistent/s")
    assert done.returncode == 1 and "/nonexistent/s" in done.stderr and "Traceback" not in done.stderr
