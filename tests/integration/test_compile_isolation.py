# SPDX-License-Identifier: MIT
"""Compiling for many users: nobody's builds keep another waiting, nobody pays for who has left, and
no state of the cache's disk costs more than time. On the libcuda stub, with scripts as compilers.
"""
import contextlib
import errno
import fcntl
import os
import shutil
import signal
import struct
import subprocess
import time

import fmha_wire
import fmhad
import pytest
from test_gpu_layer import FORWARD, Compiler, host_buffer, stub_folder

ALICE, BOB = 3001, 3002
TENSOR_BYTES = 64 * 2 * 256 * 4
KERNELS = [
    {"hdim_q": hdim, "hdim_v": hdim, **cap}
    for hdim in (32, 64, 96, 128, 160, 192, 256)
    for cap in ({}, {"logits_soft_cap": 30.0})
]
QUICK = "printf 'stub code' >\"$5\""
# Quick for one head dimension, half a second for all others.
SLOW = "case \"$*\" in *HDIM_Q=64*) ;; *) sleep 0.5;; esac; printf 'stub code' >\"$5\""


@pytest.fixture
def compiler(tmp_path):
    return Compiler(tmp_path)


@pytest.fixture
def make_gpu(make_daemon, compiler, tmp_path):
    def make(limits=None, **compile_keys):
        keys = {"helper": str(compiler.path), "cache": str(tmp_path / "cache"), **compile_keys}
        keys = {key: value for key, value in keys.items() if value}
        daemon = make_daemon(
            {
                "devices": [{"backend": "cuda"}],
                "compile": keys,
                "limits": limits or {},
                "supervision": {"restart_ms": 20},
                "admin_uids": [0],
            },
            env={**os.environ, "LD_LIBRARY_PATH": str(stub_folder())},
        )
        os.chmod(daemon.socket, 0o666)
        os.chmod(daemon.directory, 0o755)
        return daemon

    return make


@contextlib.contextmanager
def user(uid):
    """What connects meanwhile is this user's."""
    if fmhad.NO_OTHER_USERS:
        pytest.skip(fmhad.NO_OTHER_USERS)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)


def device_of(daemon, uid):
    with user(uid):
        return daemon.device()


class Asker:
    """A connection that asks for plans."""

    def __init__(self, daemon, uid=None):
        self.device = daemon.device() if uid is None else device_of(daemon, uid)
        self.buffer = host_buffer(self.device, 4 * TENSOR_BYTES)

    def ask(self, kernel):
        tensors = {
            role: {"buffer": self.buffer.id, "offset": i * TENSOR_BYTES, "dtype": "f32"}
            for i, role in enumerate("qkvo")
        }
        problem = {**FORWARD, **kernel, "tensors": tensors}
        return self.device.submit("plan", {"problem": problem})

    def plan(self, kernel, timeout=20):
        """Asks and waits; how long it took."""
        start = time.monotonic()
        assert self.device.wait(self.ask(kernel), timeout)[0]["stages"]
        return time.monotonic() - start

    def close(self):
        self.device.close()


def compiling(daemon):
    return daemon.status()["front"]["compile"]


def cache(daemon):
    return compiling(daemon)["cache"]


def new_worker(daemon):
    """Kills the worker: the next one has no kernel loaded and asks for each again."""
    worker = daemon.worker_pid()
    os.kill(worker, signal.SIGKILL)

    def ready():
        device = daemon.status()["devices"][0]
        return device["state"] == "ready" and device["worker_pid"] != worker

    assert fmhad.until(ready)


def test_a_kernel_that_does_not_compile_is_said_once(make_gpu, compiler):
    """Who asked gets the compiler's words, the log too: once, however often it is asked for."""
    compiler.does('case "$*" in *HDIM_Q=64*) echo "fwd.h(7): error: no such name" >&2; exit 1;; esac; ' + QUICK)
    daemon = make_gpu()
    asker = Asker(daemon)
    for _ in range(3):
        with pytest.raises(fmha_wire.WireError) as caught:
            asker.plan(KERNELS[2])
        assert caught.value.name == "ENOKERNEL" and "no such name" in caught.value.message
    asker.plan(KERNELS[0])
    asker.close()
    assert daemon.log().count("a kernel does not compile: ") == 1 and "no such name" in daemon.log()


# ---- turns ----


def test_a_flood_of_one_user_does_not_keep_another_waiting(make_gpu, compiler):
    compiler.does(SLOW)
    daemon = make_gpu(jobs=1)
    alice, bob = Asker(daemon, ALICE), Asker(daemon, BOB)
    for kernel in KERNELS[:-1]:  # more than five seconds of builds
        alice.ask(kernel)
    assert fmhad.until(compiler.count)
    assert bob.plan(KERNELS[-1], 5) < 2.5
    alice.close()
    bob.close()


def test_a_slow_build_of_one_user_leaves_a_slot_for_another(make_gpu, compiler):
    compiler.does(SLOW.replace("0.5", "20"))
    daemon = make_gpu(jobs=2)
    alice, bob = Asker(daemon, ALICE), Asker(daemon, BOB)
    for kernel in KERNELS[4:8]:
        alice.ask(kernel)
    assert fmhad.until(compiler.count)
    assert bob.plan(KERNELS[2], 5) < 2
    assert compiling(daemon)["built"] == 1
    alice.close()
    assert bob.plan(KERNELS[3], 5) < 2
    bob.close()


def test_a_kernel_that_two_wait_for_is_built_once_and_for_whoever_stays(make_gpu, compiler):
    compiler.does(SLOW)
    daemon = make_gpu(jobs=1)
    alice, bob = Asker(daemon, ALICE), Asker(daemon, BOB)
    alice.ask(KERNELS[0])
    assert fmhad.until(compiler.count)
    number = bob.ask(KERNELS[0])
    bob.device.ping()  # it has been read
    alice.close()
    assert bob.device.wait(number, 5)[0]["stages"]
    assert compiler.count() == 1
    bob.close()


# ---- whoever leaves ----


def test_nothing_is_built_for_a_client_that_has_left(make_gpu, compiler, tmp_path):
    compiler.does(f"echo $$ >>{tmp_path}/pids; exec sleep 60")
    daemon = make_gpu(jobs=1)
    asker = Asker(daemon)
    for kernel in KERNELS:
        asker.ask(kernel)
    assert fmhad.until(lambda: compiling(daemon)["queued"] == len(KERNELS) - 1)
    assert fmhad.until(compiler.count)
    asker.close()

    def idle():
        status = compiling(daemon)
        return status["queued"] == 0 and status["running"] == 0

    assert fmhad.until(idle)
    status = compiling(daemon)
    assert compiler.count() == 1 and status["built"] == 0 and status["failed"] == 0
    assert status["cancelled"] == len(KERNELS)
    pid = (tmp_path / "pids").read_text().strip()
    assert fmhad.until(lambda: not os.path.exists(f"/proc/{pid}"))
    # And whoever comes next finds everything in order.
    compiler.does(QUICK)
    asker = Asker(daemon)
    asker.plan(KERNELS[0])
    asker.close()


def test_compiles_of_one_user_are_limited(make_gpu, compiler):
    compiler.does(SLOW)
    daemon = make_gpu(limits={"compiles_per_uid": 3}, jobs=1)
    alice, bob = Asker(daemon, ALICE), Asker(daemon, BOB)
    numbers = [alice.ask(kernel) for kernel in KERNELS[4:8]]
    with pytest.raises(fmha_wire.WireError) as caught:
        alice.device.wait(numbers[-1], 5)
    assert caught.value.name == "EQUOTA"
    # Bob asks for the very kernel that Alice may not have: that is between her and her limit.
    assert bob.plan(KERNELS[7], 5) < 3
    for number in numbers[:-1]:
        assert alice.device.wait(number, 5)[0]["stages"]
    for kernel in KERNELS[8:11]:  # what has ended is given back
        alice.plan(kernel, 5)
    assert daemon.status()["front"]["limits"]["compiles_per_uid"]["hits"] == 1
    alice.close()
    bob.close()


# ---- the cache's disk ----


@contextlib.contextmanager
def mounted(path, *arguments):
    path.mkdir(exist_ok=True)
    done = subprocess.run(["mount", *arguments, str(path)], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"mount is not permitted: {done.stderr.decode().strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def goes_on_without_a_cache(daemon, compiler, reason):
    """Two kernels, a new worker, the same kernels again: each built once, the state said once."""
    before = compiler.count()
    for _ in range(2):
        asker = Asker(daemon)
        for kernel in KERNELS[:2]:
            asker.plan(kernel)
        asker.close()
        new_worker(daemon)
    assert compiler.count() - before == 2
    state = cache(daemon)
    assert state["state"] == "unusable" and reason in state["reason"], state
    assert state["memory_entries"] == 2 and state["unstored"] == 2
    assert daemon.log().count("no cache of compiled kernels") == 1
    assert reason in daemon.log()


def test_a_cache_that_cannot_be_made(make_gpu, compiler, tmp_path):
    daemon = make_gpu(cache=str(tmp_path / "not" / "there"))
    goes_on_without_a_cache(daemon, compiler, "No such file or directory")


def test_a_cache_that_is_no_directory(make_gpu, compiler, tmp_path):
    (tmp_path / "cache").write_text("mine")
    goes_on_without_a_cache(make_gpu(), compiler, "not a directory")
    assert (tmp_path / "cache").read_text() == "mine"


def test_a_cache_that_others_can_write_is_not_used_until_they_cannot(make_gpu, compiler, tmp_path):
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(0o777)
    daemon = make_gpu()
    goes_on_without_a_cache(daemon, compiler, "others could write")
    assert not os.listdir(folder)
    folder.chmod(0o700)
    asker = Asker(daemon)
    asker.plan(KERNELS[2])  # the next store tries again
    asker.close()
    assert cache(daemon)["state"] == "ok" and cache(daemon)["entries"] == 1
    assert "is in use again" in daemon.log()


def test_a_full_disk(make_gpu, compiler, tmp_path):
    compiler.does("head -c 200000 /dev/zero >\"$5\"; printf 'stub code' | dd of=\"$5\" conv=notrunc")
    with mounted(tmp_path / "cache", "-t", "tmpfs", "-o", "size=64k,mode=0700", "tmpfs"):
        daemon = make_gpu()
        goes_on_without_a_cache(daemon, compiler, "No space left on device")
        compiler.does(QUICK)
        asker = Asker(daemon)
        asker.plan(KERNELS[2])  # this one fits
        asker.close()
        assert cache(daemon)["state"] == "ok"
        daemon.stop()


def test_a_read_only_disk(make_gpu, compiler, tmp_path):
    source = tmp_path / "cache"
    first = make_gpu()
    asker = Asker(first)
    asker.plan(KERNELS[5])
    asker.close()
    first.stop()
    with mounted(tmp_path / "bound", "--bind", str(source)) as bound:
        done = subprocess.run(["mount", "-o", "remount,bind,ro", str(bound)], check=False)
        if done.returncode != 0:
            pytest.skip("remounting is not permitted")
        daemon = make_gpu(cache=str(bound))
        goes_on_without_a_cache(daemon, compiler, "Read-only file system")
        before = compiler.count()
        asker = Asker(daemon)
        asker.plan(KERNELS[5])
        asker.close()
        assert compiler.count() == before, "what is there can still be read"
        daemon.stop()


def test_the_cache_has_a_limit(make_gpu, compiler, tmp_path):
    daemon = make_gpu(limits={"cache_bytes": 2000})
    asker = Asker(daemon)
    for kernel in KERNELS:
        asker.plan(kernel)
        assert cache(daemon)["bytes"] <= 2000
    asker.close()
    state = cache(daemon)
    assert state["state"] == "ok" and state["unstored"] == 0
    assert state["entries"] >= 3 and state["entries"] + state["evicted"] == len(KERNELS)
    assert sum(file.stat().st_size for file in (tmp_path / "cache").iterdir()) == state["bytes"]


def test_a_user_fills_the_cache_at_their_own_cost(make_gpu, compiler):
    daemon = make_gpu(limits={"cache_bytes_per_uid": 2000})
    alice, bob = Asker(daemon, ALICE), Asker(daemon, BOB)
    bob.plan(KERNELS[0])
    for kernel in KERNELS[1:]:
        alice.plan(kernel)
    assert cache(daemon)["evicted"] > 5
    alice.close()
    bob.close()
    new_worker(daemon)
    before, bob = compiler.count(), Asker(daemon, BOB)
    bob.plan(KERNELS[0])
    assert compiler.count() == before
    bob.close()


# ---- locks ----


def hold_lock(path):
    """A process that holds a cache lock and sleeps; its pid."""
    ready, done = os.pipe()
    pid = os.fork()
    if pid == 0:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.fcntl(fd, 37, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0))  # F_OFD_SETLK
        os.write(done, b"x")
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    os.read(ready, 1)
    os.close(ready)
    os.close(done)
    return pid


def test_a_lock_holder_that_sleeps_stops_one_key_and_not_for_ever(make_gpu, compiler, tmp_path):
    daemon = make_gpu(jobs=1, deadline_ms=1500)
    asker = Asker(daemon)
    asker.plan(KERNELS[0])
    asker.close()
    (entry,) = (tmp_path / "cache").iterdir()
    entry.unlink()
    holder = hold_lock(f"{entry}.lock")
    try:
        new_worker(daemon)
        asker = Asker(daemon)
        start, number = time.monotonic(), asker.ask(KERNELS[0])
        asker.plan(KERNELS[1])
        assert not asker.device.is_answered(number)
        assert asker.device.wait(number)[0]["stages"]
        assert time.monotonic() - start > 1.2
        assert compiler.count() == 3
        asker.close()
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)


# ---- deaths ----


def gpu_kernels(n):
    """Names of kernels that fmhad-build knows for gfx942."""
    listed = subprocess.run(
        [
            fmhad.find_program("fmhad-build"), "--arch", "gfx942", "--list", "--filter",
            "data_type == 'bf16' and hdim_q == 64 and hdim_v == 64 and not dropout and "
            "bias == 'no' and not logits and not sink",
        ],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return listed.stdout.split()[:n]


def build_command(tmp_path, body, names):
    """fmhad-build with the real helper and a script for clang."""
    clang = tmp_path / "clang"
    clang.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo version 1 && exit 0\n'
        'case "$*" in *" /dev/null") exit 1;; esac\n'
        f'case "$*" in *" -S "*) ;; *) echo code; exit 0;; esac\n{body}\n'
    )
    clang.chmod(0o755)
    command = [
        fmhad.find_program("fmhad-build"), "--arch", "gfx942", "--clang", str(clang),
        "--cache", str(tmp_path / "cache"), "--helper", str(fmhad.find_program("fmhad-compile")),
        "--filter", "hdim_q == 64 and hdim_v == 64 and data_type == 'bf16'", "--jobs", "2",
    ]  # fmt: skip
    for name in names:
        command += ["--kernel", name]
    return command


def test_compilers_die_with_whoever_asked_for_them(tmp_path):
    """SIGKILL of the parent: no helper, no compiler, nothing of a compiler's stays, no file."""
    command = build_command(tmp_path, f"echo $$ >>{tmp_path}/pids; sleep 61 & wait", gpu_kernels(2))
    before = set(os.listdir("/tmp"))
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    pids = tmp_path / "pids"
    assert fmhad.until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
    groups = {os.getpgid(int(pid)) for pid in pids.read_text().split()}
    assert len(groups) == 2

    def members():
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if os.getpgid(int(pid)) in groups:
                    found.append(pid)
        return found

    assert len(members()) >= 6  # helper, script, sleep; twice
    process.kill()
    process.wait()
    assert fmhad.until(lambda: not members()), members()
    assert not {name for name in set(os.listdir("/tmp")) - before if "compile" in name}
    assert all(name.endswith(".lock") for name in os.listdir(tmp_path / "cache"))


def test_the_front_takes_its_compilers_along(make_gpu, compiler):
    """The same with the daemon itself, and a compiler that is real."""
    helper = fmhad.find_program("fmhad-compile")
    if subprocess.run([helper, "--version", "nvrtc", ""], capture_output=True, check=False).returncode:
        pytest.skip("NVRTC is not installed here")
    daemon = make_gpu(helper=str(helper), cache=f"{compiler.path.parent}/cache")
    before = set(os.listdir("/tmp"))
    asker = Asker(daemon)
    asker.ask(KERNELS[0])

    def helpers():
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{pid}/exe") == os.path.realpath(helper):
                    found.append(pid)
        return found

    assert fmhad.until(lambda: compiling(daemon)["running"] and helpers())
    time.sleep(0.3)
    daemon.process.kill()
    daemon.process.wait()
    assert fmhad.until(lambda: not helpers())
    assert not {name for name in set(os.listdir("/tmp")) - before if "compile" in name}
    asker.close()


# ---- every call that writes may fail ----

strace = pytest.mark.skipif(not shutil.which("strace"), reason="strace is not installed")


@strace
@pytest.mark.parametrize("call", ["fsync", "renameat"])
@pytest.mark.parametrize("error", ["EIO", "ENOSPC", "EDQUOT", "EROFS"])
def test_an_entry_that_cannot_be_written_is_said(tmp_path, call, error):
    command = build_command(tmp_path, "echo code", gpu_kernels(1))
    inject = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", f"inject={call}:error={error}"]
    failed = subprocess.run([*inject, *command], capture_output=True, text=True, check=False)
    if "ptrace" in failed.stderr.lower():
        pytest.skip("tracing is not permitted")
    assert failed.returncode == 5, failed.stderr
    assert "1 built" in failed.stdout and "could not be stored" in failed.stderr
    assert os.strerror(getattr(errno, error)) in failed.stderr
    assert not os.listdir(tmp_path / "cache")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "1 built" in done.stdout


@strace
@pytest.mark.parametrize("call", ["openat2", "write", "fsync", "renameat"])
def test_a_builder_killed_at_any_call_leaves_a_sound_cache(tmp_path, call):
    command = build_command(tmp_path, "echo code", gpu_kernels(1))
    for when in range(1, 4):
        subprocess.run(
            ["strace", "-f", "-qq", "-o", "/dev/null", "-P", str(tmp_path / "cache"), "-e",
             f"inject={call}:signal=KILL:when={when}", *command],
            capture_output=True, check=False,
        )  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert "0 failed" in done.stdout
        for name in os.listdir(tmp_path / "cache"):
            (tmp_path / "cache" / name).unlink()


