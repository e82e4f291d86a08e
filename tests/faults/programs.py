#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Fails the N-th call of a class in programs that are no daemon: libfmha_client in a client's process
(client_faults.c), and fmhad-compile with a script for clang.

    tests/faults/programs.py [--every N] [--only client|helper] [--class CLASS] [--mode once|always] [--at N]

A client: every call works or is refused with a fitting error, no result is another one, what was refused
works once the fault is gone, in the same client, and after its end nothing is left. A helper: ends in
time, by itself, and with status 0 only when its code and what it says of it are what they are without
a fault. Counts come last; exit status 1 when something was wrong.
"""
import argparse
import collections
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent),
                str(pathlib.Path(__file__).resolve().parents[1] / "lib")]
import campaign  # noqa: E402
import fmhad  # noqa: E402
import page  # noqa: E402

REFUSED, NO_COMPILER, LACKED = 1, 3, 4  # exit statuses of fmhad-compile
LOST = "ENOENT what was in this memory ended with the connection"
PATIENCE = 20  # seconds for an answer
REPEATS = 4


class Client:
    """A process of client_faults.c."""

    def __init__(self, faults, socket, folder, library_path=""):
        self.side = faults["client"]
        environment = os.environ | faults.environment | {
            "FMHA_FAULTS_KIND": "client", "FMHAD_SOCKET": str(socket), "LD_LIBRARY_PATH": library_path}
        self.said = open(folder / "client.err", "w+", encoding="ascii")  # pylint: disable=consider-using-with
        self.process = subprocess.Popen(  # pylint: disable=consider-using-with
            [fmhad.find_program("client_faults")], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self.said, env=environment, text=True, bufsize=1)

    def ask(self, word):
        try:
            self.process.stdin.write(word + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline().strip()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise campaign.Wrong(f"the client died: {self.process.wait(PATIENCE)}")
        return answer

    def held(self):
        return (self.side.blocks, *campaign.held(self.process.pid))

    def end(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        self.said.close()


def judge_answer(answer, what):
    """Raises when it is a lie, or blames the wrong thing."""
    if answer.startswith("wrong"):
        raise campaign.Wrong(f"a lie: {answer} {what}")
    if answer.startswith("refused") and LOST not in answer and answer.split(": ", 1)[1].split()[0] not in campaign.FITTING:
        raise campaign.Wrong(f"{answer} {what}")


def whole(client, visit):
    """A visit that ends, and gives back what one before it has left open."""
    if not any(client.ask(visit) == "ok" for _ in range(20)):
        raise campaign.Wrong("not whole")


class Programs:
    def __init__(self, options):
        self.options = options
        self.counts = collections.Counter()
        self.n_wrong = self.number = 0

    def points(self, n_calls):
        """The calls to fail, with some to spare: a fault makes more of them."""
        for nth in [self.options.at] if self.options.at else range(1, n_calls + 1):
            self.number += 1
            if self.options.at or self.number % self.options.every == 0:
                yield nth

    def cases(self, calls):
        """(class, mode, N) of every fault."""
        for class_, n_calls in calls.items():
            for word, mode in campaign.MODES.items():
                if self.options.class_ in (None, class_) and self.options.mode in (None, word):
                    for nth in self.points(n_calls):
                        yield class_, mode, nth

    def say(self, kind, visit, class_, mode, nth, side, error):
        word = next(w for w, m in campaign.MODES.items() if m == mode)
        self.n_wrong += 1
        print(f"{visit}: {error}\n  again: --only {kind} --class {class_} --mode {word} --at {nth}\n  {side.where()}",
              flush=True)

    # ---- clients ----

    def client_fault(self, client, visit, class_, mode, nth):
        before = client.held()
        client.side.arm(class_, nth, mode, mode - 1)
        answer = client.ask(visit)
        if client.side.disarm():
            self.counts["client", class_] += 1
        judge_answer(answer, "under a fault")
        if answer != "ok":
            answer = client.ask("again")
            if LOST in answer:  # the user's own buffer: it has to be made anew
                answer = client.ask(visit)
            if answer != "ok":
                raise campaign.Wrong(f"{answer}, when nothing fails any more")
        if any(now > then for now, then in zip(client.held(), before)):
            self.client_leaks(client, visit, class_, mode, nth)

    @staticmethod
    def client_leaks(client, visit, class_, mode, nth):
        """More is held than before: does it grow each time?"""
        whole(client, visit)
        before = client.held()
        for _ in range(REPEATS):
            client.side.arm(class_, nth, mode, mode - 1)
            answer = client.ask(visit)
            client.side.disarm()
            if answer != "ok":
                client.ask("again")
        whole(client, visit)
        for what, then, now in zip(("blocks of memory", "descriptors", "mappings"), before, client.held()):
            if now >= then + REPEATS:
                raise campaign.Wrong(f"{now - then} more {what} after {REPEATS} times")

    def clients(self, device, visit, folder):
        daemon = campaign.FaultyDaemon(device, folder)
        stub = next(iter(fmhad.build_dir().rglob("libcuda.so.1")))
        # The daemon's page lies in the same folder; a client's own is another.
        faults = page.Faults(folder / "client page")
        client = None
        try:
            fmhad.until(daemon.serves, 20)
            client = self.new_client(faults, daemon, folder, stub, visit)
            calls = client.side.count(lambda: client.ask(visit))
            for class_, mode, nth in self.cases(calls):
                try:
                    self.client_fault(client, visit, class_, mode, nth)
                except campaign.Wrong as error:
                    self.say("client", visit, class_, mode, nth, client.side, error)
                    client.side.disarm()
                    client.end()
                    client = self.new_client(faults, daemon, folder, stub, visit)
        finally:
            if client:
                client.end()
            daemon.stop()

    @staticmethod
    def new_client(faults, daemon, folder, stub, visit):
        client = Client(faults, daemon.socket, folder, str(stub.parent) if visit == "local" else "")
        try:
            for _ in range(3):  # what is made once is made
                answer = client.ask(visit)
                if answer != "ok":
                    raise RuntimeError(f"without a fault: {answer}")
        except BaseException:
            client.end()
            raise
        return client

    # ---- compile helpers ----

    def helper(self, faults, folder, arguments):
        """(status, what it told, its code)."""
        environment = os.environ | faults.environment
        code = folder / "code"
        code.write_bytes(b"")
        done = subprocess.run([fmhad.find_program("fmhad-compile"), *map(str, arguments)], capture_output=True,
                              env=environment, check=False, timeout=PATIENCE)
        if done.returncode < 0:
            raise campaign.Wrong(f"ended by signal {-done.returncode}")
        return done.returncode, done.stdout, code.read_bytes(), done.stderr

    def helpers(self, folder):
        faults = page.Faults(folder / "page")
        side = faults["helper"]
        clang = folder / "clang"
        clang.write_text("#!/bin/sh\n[ \"$1\" = --version ] && echo 'AMD clang version 19.1.7 (fake)' && exit 0\n"
                         f"[ -t 0 ] || exec cat '{amd_object(folder)}'\n")
        clang.chmod(0o755)
        (folder / "source.hip").write_text("int x;\n")
        visits = {"version": ["--version", "clang", clang],
                  "build": ["clang", "gfx942", folder, "source.hip", folder / "code", "1000000000,60", clang, ""]}
        for name, arguments in visits.items():
            said = []
            calls = side.count(lambda a=arguments, s=said: s.extend(self.helper(faults, folder, a)))
            status, expected = said[0], said[1:3]
            if status != 0 or not expected[0]:
                raise RuntimeError(f"{name}, without a fault: {said}")
            for class_, mode, nth in self.cases(calls):
                side.arm(class_, nth, mode, mode - 1)
                try:
                    status, *got, errors = self.helper(faults, folder, arguments)
                    if status == 0 and got != expected:
                        raise campaign.Wrong(f"a lie: {got} instead of {expected}")
                    if status not in (0, LACKED, NO_COMPILER):
                        raise campaign.Wrong(f"status {status}: {errors.decode()}")
                    # Where nothing can be written, nothing can be said.
                    if status and not errors and mode == campaign.ONCE:
                        raise campaign.Wrong(f"status {status} without a word")
                except (campaign.Wrong, subprocess.TimeoutExpired) as error:
                    self.say("helper", name, class_, mode, nth, side, error)
                if side.disarm():
                    self.counts["helper", class_] += 1

    def print_counts(self):
        page.print_counts(self.counts)
        print(f"{self.n_wrong} wrong", flush=True)


def amd_object(folder):
    """An ELF file with the note in which clang says what a kernel uses."""
    import struct

    import msgpack

    note = msgpack.packb({"amdhsa.kernels": [{".vgpr_count": 32, ".sgpr_count": 16, ".vgpr_spill_count": 0,
                                              ".group_segment_fixed_size": 1024, ".private_segment_fixed_size": 0}]})
    note += bytes(-len(note) % 4)
    content = struct.pack("<III", 7, len(note), 32) + b"AMDGPU\0\0" + note
    head = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 3, 224, 1, 0, 64, 0, 0, 64, 56, 1, 64, 0, 0)
    segment = struct.pack("<IIQQQQQQ", 4, 4, 120, 0, 0, len(content), len(content), 4)
    path = folder / "object"
    path.write_bytes(head + segment + content)
    return path


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--only", choices=["client", "helper"])
    parser.add_argument("--class", dest="class_", choices=page.CLASSES)
    parser.add_argument("--mode", choices=campaign.MODES)
    parser.add_argument("--at", type=int, help="only this call")
    programs = Programs(parser.parse_args())
    start = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # no daemon stays, and what was tried is told
    try:
        for kind, function, arguments in [("helper", programs.helpers, ()), ("client", programs.clients, ("fake", "cycle")),
                                          ("client", programs.clients, ("cuda", "local"))]:
            if programs.options.only in (None, kind):
                with tempfile.TemporaryDirectory(prefix="fmhad-faults-") as name:
                    function(*arguments, pathlib.Path(name))
    finally:
        programs.print_counts()
        print(f"{time.monotonic() - start:.0f} s", flush=True)
    return 1 if programs.n_wrong or not programs.counts.total() else 0


if __name__ == "__main__":
    sys.exit(main())
