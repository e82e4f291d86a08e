#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""fmhad under clients that are killed at random, with every result checked.

    tests/gpu/stress.py [--seconds 600] [--clients 4] [--backend cuda|hip|cpu] [--stub FOLDER]

Clients run random problems whose results are known beforehand, on host tensors and (cuda) on memory
of the worker's that they map themselves; every second or so one is killed with SIGKILL and another
takes its place. At the end: no wrong result, no error that a client saw, no death of the worker, and
sessions, buffers, descriptors and device memory back where they were after the warm-up. The table
comes last, also when a timer had to end everything. --stub: the folder of the libcuda stub.
"""
import argparse
import ctypes
import fcntl
import os
import pickle
import random
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path[:0] = [HERE, os.path.join(ROOT, "tests", "lib")]
import fmha_wire  # noqa: E402
import fmhad  # noqa: E402
import stress_pool  # noqa: E402

F_ADD_SEALS, SEALS = 1033, 1 | 2 | 4
SLACK_BYTES = 32 << 20  # the driver keeps a few 2 MiB blocks of its own
SETTLE_S = 20  # the worker gives spare memory back 5 s after the last run


class Overtime(Exception):
    """The timer of the whole program went off."""


# ---- a client --------------------------------------------------------------------------------


class HostMemory:
    """A memfd of the client's, which a GPU's worker copies."""

    def __init__(self, device, image):
        fd = os.memfd_create("stress", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, image.size)
        fcntl.fcntl(fd, F_ADD_SEALS, SEALS)
        self.buffer = device.buffer_import(fd, image.size)
        os.close(fd)
        self.id, self.image = self.buffer.id, image

    def write(self):
        self.buffer.map[: self.image.size] = self.image.tobytes()

    def read(self):
        return np.frombuffer(self.buffer.map, np.uint8, self.image.size).copy()

    def release(self):
        self.buffer.release()
        self.buffer.map.close()


class GpuMemory:
    """The worker's own memory, mapped by descriptor and filled through libcuda."""

    def __init__(self, device, image, driver):
        made, (fd,) = device.call_with_fds("buffer_create", {"size": image.size})
        self.device, self.image, self.driver = device, image, driver
        self.id, self.bytes = made["buffer"], made["allocation_bytes"]
        self.place = driver.map_descriptor(fd, self.bytes)
        os.close(fd)

    def write(self):
        self.driver.write(self.place, self.image)

    def read(self):
        image = np.empty_like(self.image)
        self.driver.read(image, self.place)
        return image

    def release(self):
        self.device.call("buffer_release", {"buffer": self.id})
        self.driver.unmap(self.place, self.bytes)


def attempt(device, problem, memory, times, release):
    """Plans, runs (pipelined), checks. Returns what is wrong, or None."""
    memory.write()
    plan = device.plan(problem.posed(memory.id))["plan"]
    for number in [device.submit("run", {"plan": plan}) for _ in range(times)]:
        device.wait(number)
    wrong = problem.wrong(memory.read())
    if release:
        device.call("plan_release", {"plan": plan})
        memory.release()
    return wrong


def client(options):
    """One line a check in its own file: "ok RUNS", "wrong WHAT", "error WHAT"."""
    rng = random.Random(options.seed)
    with open(os.path.join(options.folder, "pool"), "rb") as file:
        problems = pickle.load(file)
    stop, driver = os.path.join(options.folder, "stop"), None
    out = os.open(os.path.join(options.folder, f"client-{os.getpid()}"),
                  os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    if options.gpu_memory:
        from driver_device import Driver
        driver = Driver()
    order, device = list(problems) if options.once else None, None
    while not os.path.exists(stop) and order != []:
        problem = order.pop() if order else rng.choice(problems)
        times = rng.randint(1, 6)
        try:
            if device is None or rng.random() < 0.05:
                if device:
                    device.close()
                with fmha_wire.Client.connect(options.socket, name="stress") as front:
                    device = front.open_device(options.device)
            image = problem.image()
            memory = (GpuMemory(device, image, driver) if driver else HostMemory(device, image))
            wrong = attempt(device, problem, memory, times, rng.random() < 0.9)
            line = f"wrong {wrong}" if wrong else f"ok {times}"
        except (OSError, RuntimeError, fmha_wire.WireError, fmha_wire.Disconnected) as error:
            line, device = f"error {problem.name}: {type(error).__name__} {error}", None
            time.sleep(0.1)
        os.write(out, (line + "\n").encode())
    return 0


# ---- the driver ------------------------------------------------------------------------------


class Stress:
    def __init__(self, options):
        self.options, self.folder = options, tempfile.mkdtemp(prefix="fmhad-stress-")
        self.daemon, self.clients, self.n_started, self.n_killed = None, [], 0, 0
        self.environment = dict(os.environ)
        if options.stub:
            self.environment["LD_LIBRARY_PATH"] = options.stub

    def start_daemon(self):
        config = fmhad.gpu_config(self.options.backend)
        if self.options.stub:
            helper = os.path.join(self.folder, "helper")
            with open(helper, "w", encoding="ascii") as file:
                file.write("#!/bin/sh\n[ \"$1\" = --version ] && echo 'nvrtc 0.0' && exit 0\n"
                           "printf 'stub code' >\"$5\"\n")
            os.chmod(helper, os.stat(helper).st_mode | stat.S_IXUSR)
            config["compile"] = {"cache": config["compile"]["cache"], "helper": helper}
        self.daemon = fmhad.Daemon(config, env=self.environment)
        if not self.until(lambda: self.device_status()["state"] == "ready", 30):
            raise RuntimeError("fmhad is not ready:\n" + self.daemon.log())

    def spawn(self, command, log):
        with open(os.path.join(self.folder, log), "wb") as file:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                                    env=self.environment)

    def log(self, name):
        with open(os.path.join(self.folder, name), errors="replace") as file:
            return file.read()[-2000:]

    @staticmethod
    def until(condition, seconds):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                if condition():
                    return True
            except (OSError, fmha_wire.WireError, fmha_wire.Disconnected):
                pass
            time.sleep(0.05)
        return False

    def device_status(self):
        return self.daemon.status()["devices"][0]

    def start_client(self, once=False, gpu_memory=None):
        self.n_started += 1
        if gpu_memory is None:
            gpu_memory = self.options.backend == "cuda" and self.n_started % 2 == 0
        command = [sys.executable, os.path.abspath(__file__), "--client", "--folder", self.folder,
                   "--socket", self.daemon.socket, "--seed", str(self.n_started)]
        command += ["--once"] * once + ["--gpu-memory"] * gpu_memory
        self.clients.append(self.spawn(command, f"log-{self.n_started}"))
        return self.clients[-1]

    def finish_client(self, process, seconds):
        """Waits for a client that ends by itself. Returns whether it did."""
        try:
            good = process.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            good = False
        self.clients.remove(process)
        return good

    def idle(self):
        """What must come back: waits for the worker to have let go of its clients."""
        def empty():
            worker = self.device_status()["worker"]
            return worker and not worker["sessions"] and not worker["memory"]["buffers"]
        gone = self.until(empty, SETTLE_S)
        time.sleep(0 if self.options.backend == "cpu" else 7)
        status = self.device_status()
        pid = status["worker_pid"]
        with open(f"/proc/{pid}/status", encoding="ascii") as file:
            rss = [int(line.split()[1]) for line in file if line.startswith("VmRSS:")][0]
        return {"gone": gone, "sessions": len(status["worker"]["sessions"]),
                "buffers": status["worker"]["memory"]["buffers"], "deaths": status["deaths"],
                "worker": pid, "fds": len(os.listdir(f"/proc/{pid}/fd")), "rss_kib": rss,
                "free": self.driver.memory_info()[0] if self.driver else 0}

    def warm_up(self):
        """Every kernel compiled and loaded, on both kinds of memory."""
        with open(os.path.join(self.folder, "pool"), "wb") as file:
            rng = np.random.default_rng(1)
            pickle.dump(stress_pool.copies(rng) if self.options.stub else stress_pool.pool(), file)
        self.driver = None
        if self.options.backend == "cuda":
            if self.options.stub:
                ctypes.CDLL(os.path.join(self.options.stub, "libcuda.so.1"), ctypes.RTLD_GLOBAL)
            from driver_device import Driver
            self.driver = Driver()
        for gpu_memory in [False] + [True] * (self.options.backend == "cuda"):
            process = self.start_client(True, gpu_memory)
            if not self.finish_client(process, 120):
                raise RuntimeError("the warm-up failed:\n" + self.log(f"log-{self.n_started}"))

    def press(self):
        rng, end = random.Random(self.options.seed), time.monotonic() + self.options.seconds
        next_report = time.monotonic() + 60
        for _ in range(self.options.clients):
            self.start_client()
        while time.monotonic() < end:
            time.sleep(rng.uniform(0.1, 2.0))
            victim = rng.choice(self.clients)
            if victim.poll() is not None:
                raise RuntimeError(f"a client ended by itself with {victim.returncode}")
            victim.kill()
            victim.wait()
            self.clients.remove(victim)
            self.n_killed += 1
            self.start_client()
            if time.monotonic() > next_report:
                next_report += 60
                checks, runs, bad = self.count()
                print(f"  {checks} checks, {runs} runs, {self.n_killed} killed, {len(bad)} bad", flush=True)
        open(os.path.join(self.folder, "stop"), "w").close()
        for process in list(self.clients):
            if not self.finish_client(process, 40):
                raise RuntimeError("a client did not end when asked to")

    def count(self):
        """(checks, runs, [lines that are not ok]) of all clients so far."""
        checks, runs, bad = 0, 0, []
        for name in os.listdir(self.folder):
            if not name.startswith("client-"):
                continue
            with open(os.path.join(self.folder, name), errors="replace") as file:
                for line in file:
                    word, _, rest = line.rstrip("\n").partition(" ")
                    checks += 1
                    if word == "ok":
                        runs += int(rest)
                    else:
                        bad.append(line.rstrip("\n"))
        return checks, runs, bad

    def end(self):
        for process in self.clients:
            process.kill()
            process.wait(20)
        if self.daemon:
            self.daemon.stop()

    def report(self, before, after, problem, seconds):
        checks, runs, bad = self.count()
        wrong = [line for line in bad if line.startswith("wrong")]
        errors = [line for line in bad if not line.startswith("wrong")]
        rows = [("wrong results", len(wrong), not wrong), ("errors seen by clients", len(errors), not errors)]
        if before and after:
            rows.append(("deaths of the worker", after["deaths"], after["deaths"] == 0))
            for name in ("sessions", "buffers"):
                rows.append((f"{name} left", after[name], after[name] == 0))
            rows.append(("worker's descriptors", f"{before['fds']} -> {after['fds']}",
                         after["fds"] <= before["fds"]))
            rows.append(("worker's resident KiB", f"{before['rss_kib']} -> {after['rss_kib']}",
                         after["rss_kib"] <= before["rss_kib"] * 1.25 + 8192))
            if self.driver:
                lost = before["free"] - after["free"]
                rows.append(("device memory not back", f"{lost / 2**20:.1f} MiB", lost <= SLACK_BYTES))
        if problem:
            rows.append(("ended early", problem, False))
        for line in bad[:10]:
            print("   ", line[:200])
        if problem:
            print(self.daemon.log()[-2000:] if self.daemon else "")
        print(f"stress on {self.options.backend}: {seconds:.0f} s, {self.options.clients} clients at once,"
              f" {self.n_started} started, {self.n_killed} killed, {checks} checks of {runs} runs")
        for name, value, good in rows:
            print(f"  {'ok  ' if good else 'FAIL'} {name:24} {value}")
        return 0 if all(good for _, _, good in rows) else 1

    def run(self):
        start, before, after, problem, self.driver = time.monotonic(), None, None, "", None
        try:
            self.start_daemon()
            self.warm_up()
            before = self.idle()
            print(f"warm after {time.monotonic() - start:.0f} s: {before}", flush=True)
            start = time.monotonic()
            self.press()
            after = self.idle()
        except (Overtime, RuntimeError, OSError, fmha_wire.WireError, fmha_wire.Disconnected) as error:
            problem = f"{type(error).__name__}: {error}"
        finally:
            signal.alarm(60)  # ending takes at most that
            self.end()
        code = self.report(before, after, problem, time.monotonic() - start)
        shutil.rmtree(self.folder, ignore_errors=True)
        return code


def on_alarm(_number, _frame):
    raise Overtime("the timer went off")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--backend", default="cuda", choices=["cuda", "hip", "cpu"])
    parser.add_argument("--stub")
    parser.add_argument("--seed", type=int, default=1)
    for name in ("--client", "--once", "--gpu-memory"):
        parser.add_argument(name, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--socket", help=argparse.SUPPRESS)
    parser.add_argument("--device", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        return client(options)
    if options.stub:
        options.stub = os.path.abspath(options.stub)
    signal.signal(signal.SIGALRM, on_alarm)
    signal.signal(signal.SIGTERM, on_alarm)
    signal.alarm(int(options.seconds) + 240)
    return Stress(options).run()


if __name__ == "__main__":
    sys.exit(main())
