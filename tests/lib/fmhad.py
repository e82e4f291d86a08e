# SPDX-License-Identifier: MIT
"""A private fmhad in a temporary directory, for integration tests, and what one may ask of it."""
import collections
import json
import os
import pathlib
import re
import resource
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time

import fmha_wire

ROOT = pathlib.Path(__file__).resolve().parents[2]


def build_dir():
    return pathlib.Path(os.environ.get("FMHA_BUILD", ROOT / "build/release"))


def find_program(name):
    """A program of the build tree, wherever its folder is."""
    found = [p for p in build_dir().rglob(name) if p.is_file() and os.access(p, os.X_OK)]
    if not found:
        raise FileNotFoundError(f"{name} in {build_dir()}: build it first")
    return min(found, key=lambda path: len(path.parts))


def write_pack(cache, arch, pack):
    """What a cache has, as it is shipped. Builds nothing that is not there: no kernel has that head dim, and what any arch needs is."""
    subprocess.run([find_program("fmhactl"), "build", "--arch", arch, "--cache", cache, "--filter", "hdim_q == 7", "--pack", pack,
                    "--library-path", os.environ.get("LD_LIBRARY_PATH") or "/usr/lib"], stdout=subprocess.DEVNULL, check=True)


def until(condition, timeout=60.0, pause=0.005):
    """Waits for a condition and returns what it returned last, true or not. Only what never comes takes the whole time,
    so that a busy machine fails no test."""
    deadline = time.monotonic() + timeout
    while True:
        result = condition()
        if result or time.monotonic() > deadline:
            return result
        time.sleep(pause)


class Ended(RuntimeError):
    """A daemon that did not come up."""

    def __init__(self, status, said):
        super().__init__(f"fmhad exited with {status}:\n{said}")
        self.status, self.said = status, said


def open_files(pid):
    """What a process's descriptors are, without the numbers of sockets, and how many of each."""
    found = collections.Counter()
    for number in os.listdir(f"/proc/{pid}/fd"):
        try:
            found[re.sub(r"\d+", "", os.readlink(f"/proc/{pid}/fd/{number}"))] += 1
        except FileNotFoundError:  # the listing's own, or closed meanwhile
            pass
    return found


def loop_seconds(pid):
    """CPU time of a process's first thread, which has the loop. What it spends between a question and its answer is
    what the one who asks had to wait for, however busy the machine is."""
    return int(pathlib.Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def bare_specs(folder):
    """A folder of specs without models of times: the cost formula decides."""
    for entry in (ROOT / "specs").iterdir():
        if entry.name != "models":
            (folder / entry.name).symlink_to(entry)
    return folder


# A device that fails on command, with deadlines short enough for tests.
FAKE = {
    "devices": [{"backend": "fake", "threads": 2, "allow_faults": True, "stall_ms": 600}],
    "supervision": {"heartbeat_ms": 100, "heartbeat_timeout_ms": 800, "quarantine_deaths": 1000},
}


def _no_other_users():
    """Why tests cannot become other users, who are to run what is built here; "": they can."""
    if os.geteuid() != 0:
        return "needs root to become other users"
    for folder in (ROOT, *ROOT.parents):
        if not folder.stat().st_mode & stat.S_IXOTH:
            return f"other users cannot reach this tree: {folder} is closed to them"
    return ""


NO_OTHER_USERS = _no_other_users()


def connects(path):
    """Does a daemon answer on this socket?"""
    try:
        with fmha_wire.Client.connect(path) as client:
            client.ping()
        return True
    except (OSError, fmha_wire.Disconnected):
        return False


def start(arguments, **options):
    """fmhad with a command line of one's own."""
    return subprocess.Popen(
        [find_program("fmhad"), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def finish(process, timeout=20):
    """Waits for it. Returns its exit status, stdout and stderr."""
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def become(uid, max_fds=None):
    """What this process is from now on."""
    if max_fds is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max_fds, max_fds))
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


def gpu_config(backend, cache="{directory}/cache", **compiling):
    """With one GPU, for which this tree's kernels are compiled."""
    return {
        "devices": [{"backend": backend}],
        "compile": {
            "cache": str(cache), "sources": str(ROOT / "kernels/gpu"), "jobs": os.cpu_count() or 1,
            "library_path": os.environ.get("LD_LIBRARY_PATH") or "/usr/lib", **compiling,
        },
    }  # fmt: skip


class Daemon:
    """config: the keys of a configuration file but for the socket; "{directory}" in it is the daemon's. uid: to run as.
    max_fds: its RLIMIT_NOFILE. open_to_all: other users may connect."""

    def __init__(self, config=None, env=None, uid=None, max_fds=None, open_to_all=False):
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="fmhad-test-"))
        if uid is not None:
            os.chown(self.directory, uid, uid)
        if open_to_all:
            self.directory.chmod(0o755)
            config = {"socket_mode": "0666", **(config or {})}
        self.socket = str(self.directory / "fmhad.sock")
        self.log_path = self.directory / "log"
        self.last_log = ""
        config = {"devices": [{"backend": "cpu", "threads": 2}], **(config or {})}
        # What root's daemon remembers is not to outlive its test.
        config["tuning"] = {"state": str(self.directory / "state"), **config.get("tuning", {})}
        text = json.dumps({"socket": self.socket, **config}).replace("{directory}", str(self.directory))
        self.config = json.loads(text)
        (self.directory / "fmhad.json").write_text(text)
        self.options = {"env": {**os.environ, **(env or {})}, "preexec_fn": lambda: become(uid, max_fds)}
        self.start()

    def start(self):
        """Also once more, after kill()."""
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                [find_program("fmhad"), "--config", str(self.directory / "fmhad.json")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                **self.options,
            )
        self.pid = self.process.pid
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop(signal.SIGKILL)
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def _wait_until_ready(self):
        def ready():
            if self.process.poll() is not None:
                raise Ended(self.process.returncode, self.log())
            try:
                with fmha_wire.Client.connect(self.socket) as client:
                    return all(d["state"] in ("ready", "failed") for d in client.devices())
            except (OSError, fmha_wire.Disconnected):
                return False

        if not until(ready):
            raise RuntimeError(f"fmhad is not ready:\n{self.log()}")

    def kill(self):
        """What it has in its directory stays."""
        self.process.kill()
        self.process.wait()

    def stop(self, number=signal.SIGTERM):
        """Ends it and removes everything. Returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.directory.exists():
            self.last_log = self.log()
            shutil.rmtree(self.directory, ignore_errors=True)
        return self.process.returncode

    def log(self):
        if not self.log_path.exists():
            return self.last_log
        return self.log_path.read_text(errors="replace")

    def status(self):
        """The parsed answer to method status."""
        with self.client() as client:
            return json.loads(client.status())

    # ---- clients ----

    def client(self, **options):
        return fmha_wire.Client.connect(self.socket, **options)

    def device(self, index=0):
        """A connection to a worker; the front's connection is closed at once."""
        with self.client() as client:
            return client.open_device(index)

    def raw(self):
        """A bare socket, connected."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(self.socket)
        return sock

    # ---- processes ----

    def children(self):
        """Process ids of the workers (and helpers), oldest first."""
        with open(f"/proc/{self.pid}/task/{self.pid}/children", encoding="ascii") as file:
            return [int(word) for word in file.read().split()]

    def worker_pid(self, index=0):
        with self.client() as client:
            with client.open_device(index) as device:
                return device.worker_pid

    def fd_counts(self):
        """Open descriptors of the front and of each worker."""
        return [open_files(pid).total() for pid in [self.pid, *self.children()]]

    def settled_fds(self):
        """Counts that stay for a moment, of a daemon that has begun: connections are closed by the daemon's loops, soon
        after their clients."""
        until(lambda: all(device["state"] != "starting" for device in self.status()["devices"]))
        counts = None
        while counts != (counts := self.fd_counts()):
            time.sleep(0.1)
        return counts

    def has_no_more_than(self, fds):
        """Whether the daemon comes back to so many descriptors. Fewer are as good: on a busy machine even settled counts
        may include a connection that was being closed."""

        def back():
            now = self.fd_counts()
            return len(now) == len(fds) and all(a <= b for a, b in zip(now, fds))

        return until(back)

    def rss_kib(self):
        """Resident memory of the front and of each worker."""
        sizes = []
        for pid in [self.pid, *self.children()]:
            with open(f"/proc/{pid}/status", encoding="ascii") as file:
                sizes += [int(line.split()[1]) for line in file if line.startswith("VmRSS:")]
        return sizes
