# SPDX-License-Identifier: MIT
"""fmhactl verify, when it does not come to its end, and when a case takes long."""
import json
import os
import pty
import re
import shlex
import signal
import subprocess

import fmhad
import pytest
from test_gpu_layer import compiler, make_gpu, stub_folder  # noqa: F401

FAILED, UNREACHABLE, LATE = 1, 3, 6
QUICK = ["--features", "merge,f32"]
SUMMARY = re.compile(r"seed (\d+): (\d+) ok, (\d+) not supported, (\d+) failed(?:, (\d+) not judged)?")
GO_ON = re.compile(r"to go on: fmhactl (.*)")


def start(daemon, *arguments, ignored=(), **options):
    """It ignores these signals alone, whatever pytest has been told to: a shell's jobs in the background ignore SIGINT."""
    def dispositions():
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)

    command = [fmhad.find_program("fmhactl"), "verify", "--socket", daemon.socket, *map(str, arguments)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    return subprocess.Popen(command, preexec_fn=dispositions, **options)


def counts(said):
    """(ok, not supported, failed, not judged) of all seeds that a text sums up; there is one."""
    (found,) = SUMMARY.findall(said)
    return tuple(int(word or 0) for word in found[1:])


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_makes_it_say_what_it_knows(daemon, how):
    cases = 100_000
    verify = start(daemon, *QUICK, "--cases", cases, "--seed", 3, "--verbose")
    first = [verify.stdout.readline() for _ in range(20)]
    verify.send_signal(how)
    said = "".join(first) + verify.stdout.read()
    assert verify.wait(20) == -how
    ok, unsupported, failed, left = counts(said)
    told = [int(number) for number in re.findall(r"^case (\d+): ok", said, re.M)]
    assert ok == len(set(told)) == cases - left and (unsupported, failed) == (0, 0)
    (command,) = GO_ON.findall(said)
    words = shlex.split(command)
    begin = int(words[words.index("--from") + 1])
    assert set(range(begin)) <= set(told) and begin not in told
    assert int(words[words.index("--cases") + 1]) == cases - begin
    words[words.index("--cases") + 1] = "30"
    rest = subprocess.run([fmhad.find_program("fmhactl"), *words, "--verbose"], capture_output=True, text=True, check=True)
    assert counts(rest.stdout) == (30, 0, 0, 0)
    assert [int(n) for n in re.findall(r"^case (\d+): ok", rest.stdout, re.M)] == list(range(begin, begin + 30))


def test_what_is_ignored_does_not_stop_it(daemon):
    verify = start(daemon, *QUICK, "--cases", 150, "--verbose", ignored=[signal.SIGHUP])
    verify.stdout.readline()
    verify.send_signal(signal.SIGHUP)
    assert counts(verify.stdout.read()) == (150, 0, 0, 0) and verify.wait(20) == 0


def test_a_daemon_that_goes_away_is_no_failed_case(daemon):
    verify = start(daemon, *QUICK, "--cases", 100_000, "--jobs", 4, "--verbose")
    verify.stdout.readline()
    daemon.stop()
    out, err = verify.communicate(timeout=30)
    assert verify.returncode == UNREACHABLE and "fmhactl: " in err
    ok, unsupported, failed, left = counts(out)
    assert (unsupported, failed) == (0, 0) and left > 0 and "to go on: fmhactl verify" in out


def test_a_daemon_that_hangs_is_no_failed_case(daemon):
    verify = start(daemon, *QUICK, "--cases", 100_000, "--timeout", 0.5, "--verbose")
    verify.stdout.readline()
    stopped = [daemon.pid, *daemon.children()]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        out, _ = verify.communicate(timeout=30)
    finally:
        for pid in reversed(stopped):
            os.kill(pid, signal.SIGCONT)
    assert verify.returncode == LATE
    assert counts(out)[2] == 0 and counts(out)[3] > 0 and "--timeout 0.5" in out


def test_a_worker_that_dies_takes_no_innocent_case_along(daemon):
    verify = start(daemon, *QUICK, "--cases", 300, "--jobs", 8, "--verbose")
    verify.stdout.readline()
    os.kill(daemon.worker_pid(), signal.SIGKILL)
    said = verify.stdout.read()
    assert verify.wait(20) == 0 and counts(said) == (300, 0, 0, 0)


def test_progress_is_shown_on_a_terminal(daemon):
    ours, theirs = pty.openpty()
    verify = start(daemon, *QUICK, "--cases", 1_000_000, stderr=theirs)
    os.close(theirs)
    shown = b""
    while b"cases, 0 failed: " not in shown:
        shown += os.read(ours, 1024)
    verify.send_signal(signal.SIGTERM)
    assert counts(verify.communicate(timeout=20)[0])[3] > 0
    os.close(ours)


def test_compiles_for_the_next_cases_do_not_wait(make_gpu, compiler, tmp_path):  # noqa: F811
    """Two kernels are compiled at once, for two cases; with one job never."""
    counted = tmp_path / "counted"
    compiler.does(f"mkdir -p {counted}.now; touch {counted}.now/$$; ls {counted}.now | wc -l >>{counted}; sleep 0.2; "
                  f"rm {counted}.now/$$; echo 'it does not work' >&2; exit 1")
    daemon = make_gpu()
    for jobs, most in ((1, 1), (6, 2)):
        counted.write_text("")
        verify = start(daemon, "--cases", 6, "--seed", jobs, "--features", "f32,bias,softcap,scale", "--jobs", jobs)
        verify.communicate(timeout=60)
        assert verify.returncode == FAILED
        assert max(map(int, counted.read_text().split())) >= most if jobs > 1 else counted.read_text().split() == ["1"] * 6


def test_local_launch_needs_a_gpu(daemon):
    done = subprocess.run([fmhad.find_program("fmhactl"), "verify", "--socket", daemon.socket, "--local", "--cases", "3"],
                          capture_output=True, text=True)
    assert done.returncode != 0 and done.stdout == ""
    assert "(cpu): local launch is not supported" in done.stderr


def test_local_launch_is_judged(make_gpu):  # noqa: F811
    """The stub's forward kernels copy Q to O: that is what has to come back from this process's launches, and to be found wrong."""
    daemon = make_gpu()
    environment = {**os.environ, "LD_LIBRARY_PATH": str(stub_folder())}
    command = [fmhad.find_program("fmhactl"), "verify", "--socket", daemon.socket, "--local", "--features", "group,f32"]
    done = subprocess.run([*command, "--cases", "20", "--verbose"], capture_output=True, text=True, env=environment)
    assert done.returncode == FAILED, done.stderr
    ok, unsupported, failed, left = counts(done.stdout)
    assert failed > 10 and (unsupported, left) == (0, 0), done.stdout
    assert len(re.findall(r"kernel fwd-fp32-\S+-gpu_\w+", done.stdout)) == 20 and "packed" in done.stdout
    assert re.search(r"WRONG \(element \d+ is -?\d+\.\d+, expected", done.stdout), done.stdout  # where head dims are alike


def test_long_problems_have_many_tiles(daemon):
    done = subprocess.run([fmhad.find_program("fmhactl"), "verify", "--socket", daemon.socket, "--long", "--cases", "12",
                           "--features", "backward,group,f16,mask", "--verbose"], capture_output=True, text=True)
    assert done.returncode == 0 and counts(done.stdout) == (12, 0, 0, 0), done.stdout
    lengths = [int(n) for n in re.findall(r"seqlen (\d+)", done.stdout)]
    assert len(lengths) == 12 and min(lengths) >= 65 and sum(lengths) > 12 * 200
    assert "(packed)" in done.stdout and "with backward" in done.stdout


def fmhactl(daemon, *arguments):
    command = [fmhad.find_program("fmhactl"), *map(str, arguments), "--socket", daemon.socket]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("shape", [
    "-b=1 -h=2 -h_k=1 -s=20 -d=32 -prec=fp32 -mask=t", "-b=2 -h=2 -s=12 -s_k=17 -d=16 -d_v=40 -prec=fp32 -mask=b:4,2 -logits_soft_cap=3",
    "-b=2 -h=2 -s=16 -d=32 -prec=fp32 -bias=e -p_drop=0.3", "-b=3 -h=2 -s=15 -d=32 -prec=bf16 -mode=1 -mask=b -bias=a",
    "-b=1 -h=1 -s=1 -s_k=3 -d=8 -prec=fp32",
])
def test_gradients_by_the_loss_itself(daemon, shape):
    """L2, largest and mean difference from what moving an element does to the loss, of Q, K and V."""
    done = fmhactl(daemon, "verify", "backward", *shape.split(), "--check-grad", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(done.stdout)
    assert [g["tensor"] for g in document["gradients"]] == ["dq", "dk", "dv"]
    exact = "fp32" in shape
    assert document["eps"] == (0.01 if exact else 0.0625)
    for g in document["gradients"]:
        assert g["ok"] and 1 <= g["elements"] <= 32 and 0 <= g["mean"] <= g["max"] <= g["allowed"]
        # Of a gradient that is not 0 throughout, as dQ of a single key's row is.
        assert g["l2"] < (1e-3 if exact else 0.1) or "-s_k=3" in shape
        assert g["open"] < 0.1 * g["allowed"] or not exact or g["open"] < 1e-4


def test_gradients_that_are_wrong_are_told(daemon, tmp_path):
    """With another O than the forward's, D is wrong, and so are dQ and dK, but not dV."""
    import numpy as np

    rng = np.random.default_rng(0)
    for name in ("q", "k", "v", "do", "o"):
        np.save(tmp_path / f"{name}.npy", rng.standard_normal((1, 16, 2, 32), dtype=np.float32))
    files = [word for name in ("q", "k", "v", "do") for word in (f"--{name}", tmp_path / f"{name}.npy")]
    outputs = [word for name in ("dq", "dk", "dv") for word in (f"--{name}", tmp_path / f"{name}.npy")]
    right = fmhactl(daemon, "run", "forward", *files[:6], "--out", tmp_path / "right.npy", "--lse", tmp_path / "lse.npy")
    assert right.returncode == 0, right.stderr
    for o, wrong in (("right", []), ("o", ["dq", "dk"])):
        given = ["--o", tmp_path / f"{o}.npy", "--lse", tmp_path / "lse.npy"]
        done = fmhactl(daemon, "verify", "backward", *files, *given, *outputs, "--check-grad", "--eps", "0.005", "--json")
        assert done.returncode == (FAILED if wrong else 0), done.stdout + done.stderr
        assert [g["tensor"] for g in json.loads(done.stdout)["gradients"] if not g["ok"]] == wrong


@pytest.mark.parametrize("words,reason", [
    (["--eps", "2"], "1 at most"), (["--eps", "0.0000001"], "f16 has no values that near"), (["--eps", "-1"], "above 0"),
])
def test_what_moving_cannot_tell(daemon, words, reason):
    done = fmhactl(daemon, "verify", "backward", "-b=1", "-h=1", "-s=8", "-d=16", "-prec=fp16", "--check-grad", *words)
    assert done.returncode != 0 and reason in done.stderr and "field eps" in done.stderr
    done = fmhactl(daemon, "run", "forward", "-b=1", "-h=1", "-s=8", "-d=16", "--check-grad")
    assert done.returncode == 2 and "of backward" in done.stderr
