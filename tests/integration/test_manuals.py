# SPDX-License-Identifier: MIT
"""Manual pages and completion: made from the tables that programs work by, so that nothing is missing."""
import json
import os
import re
import shutil
import subprocess

import numpy
import pytest

import fmhad

PAGES = ["fmhactl.1", "fmhad.8", "fmhad.json.5", "libfmha_client.3", "fmhad.protocol.7"]


def page(name):
    return (fmhad.build_dir() / "docs" / name).read_text()


def plain(name):
    """The page without roff's escapes of what is compared."""
    return re.sub(r"\\f[BIR]", "", page(name).replace("\\-", "-"))


@pytest.mark.parametrize("name", PAGES)
def test_pages_are_clean(name):
    assert "@" + "OPTIONS@" not in page(name)
    if not shutil.which("mandoc"):
        pytest.skip("mandoc is not installed")
    done = subprocess.run(["mandoc", "-Tlint", "-Wwarning", fmhad.build_dir() / "docs" / name],
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0 and done.stdout == "", done.stdout


def check(tmp_path, config):
    path = tmp_path / "fmhad.json"
    path.write_text(json.dumps(config))
    return subprocess.run([fmhad.find_program("fmhad"), "--check", "--config", path],
                          capture_output=True, text=True, check=False)  # fmt: skip


def documented_keys():
    keys = {}
    for name, what in re.findall(r"^\.TP\n(\S+) \((.*)\)$", plain("fmhad.json.5"), re.MULTILINE):
        keys[name] = what
    return keys


def test_every_key_is_documented_with_the_range_that_is_read(tmp_path):
    keys = documented_keys()
    assert len(keys) > 70
    assert {"socket", "log_level", "limits.spin_us", "devices[].queue_depth", "compile.jobs"} <= keys.keys()
    numbers = 0
    for name, what in keys.items():
        assert ("object" in what) or what.endswith(("reload", "restart")), name
        found = re.match(r"number, (\d+) to (\d+)", what)
        if not found or "[]" in name:
            continue
        numbers += 1
        least, most = map(int, found.groups())
        for value, wrong in ((least, False), (most, False), (most + 1, True), (least - 1, True)):
            config = value
            for part in reversed(name.split(".")):
                config = {part: config}
            said = check(tmp_path, config).stderr
            assert (f"{name}: must be an integer from {least} to {most}" in said) == wrong, (name, value, said)
    assert numbers > 50


def test_keys_that_are_read_are_documented(tmp_path):
    """And the other way round: a key that is not on the page is not known."""
    keys = {name.split(".")[-1].split("[")[0] for name in documented_keys()}
    for name in ("nonsense", "helpers", "limit"):
        assert name not in keys and "unknown key" in check(tmp_path, {name: 1}).stderr


def test_every_function_is_on_the_librarys_page():
    text = page("libfmha_client.3")
    headers = [*(fmhad.ROOT / "client/include/fmha").glob("*.h"), fmhad.ROOT / "proto/include/fmha/base.h"]
    assert len(headers) >= 3
    for header in headers:
        names = re.findall(r"^FMHA_API [^;]*?\b(fmha_\w+)\(", header.read_text(), re.MULTILINE)
        assert names
        for name in names:
            assert f".SS {name}()\n" in text


def commands():
    text = subprocess.run([fmhad.find_program("fmhactl"), "help"], capture_output=True, text=True, check=True).stdout
    return re.findall(r"^  (\w+) +\S", text.split("commands;")[1], re.MULTILINE)


def test_every_command_is_on_the_page():
    assert len(commands()) >= 12
    for command in commands():
        assert f"\n.SS {command}\n" in page("fmhactl.1")


def test_options_are_described_once():
    """Where a table of options belongs to several commands, the later ones refer to the first."""
    text = page("fmhactl.1")
    for option in ("timeout", "mask", "softcap"):
        assert len(re.findall(rf"^(?:\\fB\\-\w\\fR, )?\\fB\\-\\-{option}\\fR", text, re.MULTILINE)) == 1, option
        assert len(re.findall(f"--{option}[,:]", plain("fmhactl.1"))) >= 3, option
    assert "see OPTIONS." in text and ": as of" in text


def test_examples_are_understood(tmp_path):
    """Without a daemon each ends for want of one, or by itself, and not for what it says."""
    examples = re.findall(r"^\$ fmhactl (.*)$", plain("fmhactl.1"), re.MULTILINE)
    assert len(examples) >= 10
    for name in "qkv":
        numpy.save(tmp_path / f"{name}.npy", numpy.zeros((1, 8, 2, 32), numpy.float32))
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 4, "hidden_size": 256, "model_type": "llama"}))
    for example in examples:
        done = subprocess.run([fmhad.find_program("fmhactl"), *example.split()], capture_output=True, text=True, cwd=tmp_path,
                              check=False, env={**os.environ, "FMHAD_SOCKET": str(tmp_path / "none")})  # fmt: skip
        expected = {"doctor": (1,), "top": (3,)}.get(example, (5,) if "--compare" in example else (0, 3))
        assert done.returncode in expected, (example, done.returncode, done.stderr)


def complete(*words):
    """What bash offers for the last word."""
    program = words[0]
    script = (
        f"source {fmhad.build_dir()}/docs/bash/{program}\n"
        f"COMP_WORDS=({' '.join(repr(word) for word in words)}) COMP_CWORD={len(words) - 1}\n"
        f"_{program}\nprintf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return set(done.stdout.split())


def test_bash_completes(tmp_path, monkeypatch):
    assert complete("fmhactl", "pi") == {"ping"}
    assert complete("fmhactl", "--json", "") >= set(commands())
    assert complete("fmhactl", "ping", "--c") == {"--count"}
    assert complete("fmhactl", "run", "f") == {"forward"}
    assert complete("fmhactl", "plan", "--dtype", "e") == {"e4m3", "e5m2"}
    assert complete("fmhactl", "plan", "--mask", "") == {"none", "top_left", "bottom_right"}
    monkeypatch.setenv("PATH", f"{fmhad.find_program('fmhactl').parent}:{os.environ['PATH']}")
    assert complete("fmhactl", "plan", "--arch", "gfx94") == {"gfx942"}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smooth.json").touch()
    assert complete("fmhactl", "bench", "--tier", "smo") == {"smoke", "smooth.json"}
    (tmp_path / "one.npy").touch()
    assert complete("fmhactl", "run", "forward", "--q", f"{tmp_path}/o") == {f"{tmp_path}/one.npy"}
    assert "--check" in complete("fmhad", "--")


@pytest.mark.parametrize("shell, suffix", [("zsh", "_{}"), ("fish", "{}.fish")])
@pytest.mark.parametrize("program", ["fmhad", "fmhactl"])
def test_other_shells_read_their_completion(shell, suffix, program):
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    path = fmhad.build_dir() / "docs" / shell / suffix.format(program)
    done = subprocess.run([shell, "-n", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stderr == ""
    assert "--check" in path.read_text() if shell == "zsh" else "-l check" in path.read_text()
