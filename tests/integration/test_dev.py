# SPDX-License-Identifier: MIT
"""./dev, the demo and the benchmarks, as far as they can be tested without doing all of their work."""
import os
import re
import shutil
import subprocess
import sys
import time

import pytest

import fmhad

sys.path.insert(0, str(fmhad.ROOT / "tests/demo"))
import demo  # noqa: E402

import progress  # noqa: E402
import turns  # noqa: E402


def run(*command, **options):
    return subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False, timeout=60, **options
    )


@pytest.mark.parametrize("words", [["nonsense"], ["unit", "ls"], ["--halp"], ["need"], ["failed"], [""]])
def test_only_steps_are_run(words):
    for command in (["./dev", "test"], ["tests/run.sh"], ["tests/run.sh", "--only-known"]):
        done = run(*command, *words, cwd=fmhad.ROOT)
        assert done.returncode == 2, done.stderr
        assert "there are lint unit integration gpu tsan asan fuzz nightly" in done.stderr
        assert done.stdout == "" and "==" not in done.stderr


def test_known_steps_are_known():
    for words in ([], ["unit"], ["gpu", "nightly"]):
        assert run("tests/run.sh", "--only-known", *words, cwd=fmhad.ROOT).returncode == 0


COMMANDS = ["build", "package", "demo", "test", "bench", "lint", "format", "help"]


def test_every_command_explains_itself():
    everything = run("./dev", "help", cwd=fmhad.ROOT)
    assert everything.returncode == 0 and run("./dev", "--help", cwd=fmhad.ROOT).stdout == everything.stdout
    for command in COMMANDS:
        assert f"  {command} " in everything.stdout
        done = run("./dev", command, "--help", cwd=fmhad.ROOT)
        assert done.returncode == 0 and done.stderr == ""
        assert done.stdout.startswith(f"usage: ./dev {command}\n  {command} ")
        assert "\033" not in done.stdout


@pytest.mark.parametrize("words", [["nonsense"], ["build", "relase"], ["demo", "x"], ["format", "-i"], ["bench", "gpuu"],
                                   ["lint", "--all"], ["package", "deb"]])  # fmt: skip
def test_unknown_words_are_refused(words):
    done = run("./dev", *words, cwd=fmhad.ROOT)
    assert done.returncode == 2 and words[-1] in done.stderr and done.stdout == "" and "\033" not in done.stderr


def test_what_installs_a_package_configures_again(tmp_path):
    """A build tree that was configured before HIP's headers came has no module for it."""
    script = (fmhad.ROOT / "dev").read_text()
    tree, bin_ = tmp_path / "tree", tmp_path / "bin"
    bin_.mkdir()
    (tree / "build/release").mkdir(parents=True)
    (tree / "tests/lib").mkdir(parents=True)
    shutil.copy(fmhad.ROOT / "tests/lib/say.sh", tree / "tests/lib")
    (tree / "build/release/build.ninja").write_text("old")
    (tree / "dev").write_text(script.rsplit("command=${1:-help}", 1)[0] + "need one two\n")
    installed = tmp_path / "installed"
    for name, text in {
        "dpkg-query": f"[ -e {installed} ] && echo install ok installed",
        "sudo": 'exec "$@"',
        "apt-get": f'case "$*" in *install*) touch {installed};; esac',
    }.items():
        (bin_ / name).write_text(f"#!/bin/sh\n{text}\n")
        (bin_ / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{bin_}:{os.environ['PATH']}"}
    assert run("bash", tree / "dev", env=environment).returncode == 0
    assert installed.exists() and not (tree / "build/release/build.ninja").exists()
    (tree / "build/release/build.ninja").write_text("new")
    assert run("bash", tree / "dev", env=environment).returncode == 0
    assert (tree / "build/release/build.ninja").exists()


def test_silent_commands_are_heard_of(tmp_path):
    def shell(script):
        return run("bash", "-c", f". {fmhad.ROOT}/tests/lib/say.sh; {script}", env={**os.environ, "FMHA_PROGRESS": "0.1"})

    told = tmp_path / "told"  # the command ends when it was told of, however long that takes
    done = shell(f"quietly making bash -c 'echo one of two; until grep -q two {told}; do sleep 0.05; done' 2>{told}")
    assert done.returncode == 0 and done.stdout == "" and done.stderr == ""
    assert all(re.fullmatch(r"   making: \d+ s(: one of two)?", line) for line in told.read_text().splitlines())
    done = shell("quietly making bash -c 'echo first; echo second; exit 3'")
    assert done.returncode == 3 and done.stderr.endswith("first\nsecond\n")


def test_steps_are_told_with_their_times(tmp_path):
    script = f"""export FMHA_TIMES={tmp_path}/times; . tests/lib/say.sh
        one() {{ timed 'one: part' true; timed 'one: other' false; }}
        timed one one || echo "status $?"; timed two true; tell_times"""
    done = run("bash", "-c", script, cwd=fmhad.ROOT)
    assert done.stdout == "status 1\n"
    rows = [line.split() for line in done.stderr.splitlines()]
    assert [(" ".join(row[:-3]), row[-1]) for row in rows[:-1]] == [
        ("one: part", "passed"), ("one: other", "FAILED"), ("one", "FAILED"), ("two", "passed")]
    assert rows[-1][:2] == ["in", "all"]


def test_loops_say_how_far_they_are(capsys):
    clock = iter(range(0, 100, 3)).__next__
    assert list(progress.told("abcdef", 6, "letters", clock, sys.stdout)) == list("abcdef")
    assert capsys.readouterr().out == "   letters: 2 of 6\n   letters: 5 of 6\n"


def test_turns_without_git_or_a_clone(tmp_path, monkeypatch):
    assert turns.turn(tmp_path) > 20000  # days
    monkeypatch.setenv("PATH", str(tmp_path))
    assert turns.turn() > 20000


def without_git(folder):
    """A PATH with all that there is here but git."""
    for name in os.listdir("/usr/bin"):
        if not name.startswith("git"):
            (folder / name).symlink_to(f"/usr/bin/{name}")
    return {**os.environ, "PATH": str(folder)}


def test_what_needs_a_list_of_sources_needs_no_git(tmp_path):
    """Neither its program nor a clone. An archive has neither."""
    tree, bin_ = tmp_path / "tree", tmp_path / "bin"
    bin_.mkdir()
    (tree / "kernels/gpu").mkdir(parents=True)
    (tree / "tests").mkdir()
    shutil.copytree(fmhad.ROOT / "tests/lib", tree / "tests/lib")
    shutil.copy(fmhad.ROOT / ".clang-format", tree)
    for name in ("a.c", "kernels/gpu/b.c", "build/c.c"):
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).write_text("int   x;\n")
    script = (fmhad.ROOT / "dev").read_text()
    (tree / "dev").write_text(script.rsplit("command=${1:-help}", 1)[0] + "need() { :; }\ncommand=format\ncmd_format\n")
    done = run("bash", tree / "dev", env=without_git(bin_))
    assert done.returncode == 0, done.stderr
    assert [(tree / name).read_text() for name in ("a.c", "kernels/gpu/b.c", "build/c.c")] == ["int x;\n"] + 2 * ["int   x;\n"]


def test_skipped_tests_say_why(tmp_path):
    (tmp_path / "ctest.xml").write_text(
        """<testsuite>
        <testcase name="a" status="run"><system-out>[  PASSED  ] 3 test(s).</system-out></testcase>
        <testcase name="b" status="notrun"><skipped message="SKIP_RETURN_CODE=77"/>
          <system-out>needs an AVX-512 machine</system-out></testcase>
        <testcase name="c" status="run"><system-out>[ RUN      ] builds_with_hiprtc
hiprtc is not installed here: skipped
[  SKIPPED ] builds_with_hiprtc
[ RUN      ] short_ones_are_skipped
[       OK ] short_ones_are_skipped
[  PASSED  ] 2 test(s).
[  SKIPPED ] 1 test(s), listed below:
[  SKIPPED ] builds_with_hiprtc
 1 SKIPPED TEST(S)</system-out></testcase>
        </testsuite>"""
    )
    done = run(sys.executable, fmhad.ROOT / "tests/lib/skipped.py", tmp_path / "ctest.xml")
    assert done.stdout.splitlines() == [
        "skipped: b: needs an AVX-512 machine",
        "skipped in c: hiprtc is not installed here: skipped; [  SKIPPED ] builds_with_hiprtc",
    ]


def report(*runs):
    return {"runs": [{"end_ns": int(end * 1e6), "kernel_ms": ms} for end, ms in runs]}


def test_the_demo_counts_only_what_ran_together():
    early = report((10, 10), (20, 10), (60, 30), (90, 30))
    late = report((40, 20), (70, 30), (100, 30), (110, 10), (120, 10))
    assert demo.overlap([early, late]) == [[30, 30], [20, 30]]
    # One after the other: nothing ran together, however fast each was alone.
    assert demo.overlap([report((10, 10), (20, 10)), report((40, 10), (50, 10))]) == [[], []]


@pytest.mark.parametrize("options", [[], ["--device", "0"]])
def test_bench_rpc_ends_with_the_reason_of_a_failed_device(make_daemon, options):
    daemon = make_daemon({"devices": [{"backend": "hip", "index": 63}]})
    began = time.monotonic()
    done = run(fmhad.find_program("bench_rpc"), *options, daemon.socket)
    assert time.monotonic() - began < 15  # a call's deadline, which it used to wait for, is 30
    assert done.returncode == 1 and done.stdout == ""
    assert "bench_rpc: connect: device 0 is failed: " in done.stderr
    with daemon.client() as client:
        assert client.devices()[0]["state"] == "failed"
