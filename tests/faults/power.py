#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Loses power between any two operations on the disk: what a daemon writes is recorded by strace, and each disk
that a loss could leave is given to a new daemon.

    tests/faults/power.py [--only state|cache|pack] [--every N] [--random N] [--seed S] [--at N --form FORM]
                          [--forget bytes|names]

A disk that has lost its power holds what was synced: a file's bytes by fsync() of the file, a name by fsync() of
its folder. Of what came later it holds any part, in any order. So after each operation there are these forms of a disk:
all of it; nothing; names without bytes (empty files); names with zeros for bytes; bytes without names; and at random,
by --random, some names, and of some files some sectors.

state: settings, sets, measured times and quarantine. The new daemon has what was answered for last, or what was being
stored: never a mixture, never less than an answer has said, and it starts without a word about a file.
cache: compiled kernels. What is whole is found, what is not is built again, and every plan is made.
pack: what `fmhactl build --pack` writes over an older one is the older one or the new one.

Counts come last; exit status 1 when something was wrong, or nothing was tried.
"""
import argparse
import collections
import contextlib
import datetime
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent),
                str(pathlib.Path(__file__).resolve().parents[1] / "lib")]
import fmha_wire  # noqa: E402
import fmhad  # noqa: E402
import visits  # noqa: E402

# What changes a disk. One that is not known below, on a file that matters, ends the campaign.
CALLS = ("open openat openat2 creat write pwrite64 writev pwritev pwritev2 copy_file_range sendfile splice truncate ftruncate"
         " fallocate rename renameat renameat2 link linkat symlink symlinkat unlink unlinkat mkdir mkdirat rmdir mknodat"
         " fsync fdatasync sync_file_range syncfs sync lseek").split()
FORMS = ("all", "nothing", "empty", "zeros", "unnamed")
SECTOR = 512

Op = collections.namedtuple("Op", "what when inode path other offset data")


class Wrong(Exception):
    """The judgement on a disk."""


# ---- recording ----


def text_of(quoted):
    """A string as strace -xx writes it."""
    return bytes.fromhex(quoted.replace("\\x", ""))


class Recorder:
    """strace on a process that runs, or on a command."""

    def __init__(self, folder):
        self.prefix = str(folder / "trace")
        self.process = None

    def options(self):
        return ["strace", "-ff", "-ttt", "-xx", "-y", "-s", str(1 << 26), "-e", "trace=" + ",".join(CALLS), "-o", self.prefix]

    def command(self, command):
        done = subprocess.run([*self.options(), "-f", *map(str, command)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"under strace: {done.stderr}")

    def attach(self, pid):
        self.process = subprocess.Popen([*self.options(), "-f", "-p", str(pid)], stderr=subprocess.PIPE, text=True)
        said = self.process.stderr.readline()
        if "attached" not in said:
            raise RuntimeError(f"strace cannot look at the daemon: {said.strip()}")

    def detach(self):
        if self.process is None:
            return
        self.process.send_signal(signal.SIGINT)
        self.process.wait()
        self.process.stderr.close()

    def lines(self):
        """(when, call, arguments, result) of all threads, in order."""
        folder, name = os.path.split(self.prefix)
        found = []
        for file in os.listdir(folder):
            if not file.startswith(name + "."):
                continue
            with open(os.path.join(folder, file), encoding="ascii") as text:
                for line in text:
                    match = re.match(r"([\d.]+) (\w+)\((.*)\) += (-?\d+|\?)", line)
                    if match and match[4] != "?" and int(match[4]) >= 0:
                        found.append((float(match[1]), match[2], match[3], int(match[4])))
        return sorted(found, key=lambda line: line[0])


def path_of(descriptor):
    """Of 3</a/path>, as -y and -xx write it."""
    match = re.fullmatch(r"(?:\d+|AT_FDCWD)<(.*?)>(?:\(deleted\))?", descriptor.strip())
    word = match[1] if match else ""
    return os.fsdecode(text_of(word)) if word.startswith("\\x") else word


def arguments(text):
    """Split at the commas that stand in no string, bracket or path."""
    found, depth, quoted, start = [], 0, False, 0
    for i, c in enumerate(text):
        if c == '"':
            quoted = not quoted
        elif not quoted and c in "([{<":
            depth += 1
        elif not quoted and c in ")]}>":
            depth -= 1
        elif c == "," and depth == 0 and not quoted:
            found.append(text[start:i].strip())
            start = i + 1
    return [*found, text[start:].strip()]


def is_string(argument):
    return argument.startswith('"')


class Tree:
    """The names and bytes below a folder, and the operations that made them."""

    def __init__(self, root):
        self.root = str(root)
        self.inodes = {}  # path -> number
        self.base = {}  # path -> bytes, None for a folder
        self.n_inodes = 0
        self.ops = []
        self.positions = {}  # where an inode is written next
        for folder, _, files in os.walk(root):
            self.base[os.path.relpath(folder, root)] = None
            for name in files:
                path = os.path.join(folder, name)
                self.base[os.path.relpath(path, root)] = pathlib.Path(path).read_bytes()
        self.inodes_at_first = {path: self._new(path) for path in self.base}

    def _new(self, path):
        self.inodes[path] = self.n_inodes
        self.n_inodes += 1
        return self.inodes[path]

    def _inside(self, path):
        """The path below the root, or None."""
        path = os.path.normpath(path)
        return os.path.relpath(path, self.root) if path == self.root or path.startswith(self.root + "/") else None

    def _named(self, args, i):
        """(the path that argument i, behind its folder, names; the arguments from it on)."""
        folder = path_of(args[i]) if not is_string(args[i]) else None
        at = i + 1 if folder is not None else i
        name = os.fsdecode(text_of(args[at].strip('"')))
        return self._inside(os.path.join(folder, name) if folder is not None else os.path.abspath(name)), args[at:]

    def add(self, line):
        """An operation, if it is one on this tree."""
        when, call, text, result = line
        args = arguments(text)
        op = lambda what, inode, path=None, other=None, offset=0, data=b"": self.ops.append(  # noqa: E731
            Op(what, when, inode, path, other, offset, data))
        if call in ("open", "openat", "openat2", "creat"):
            path, rest = self._named(args, 0)
            if path is None:
                return
            flags = rest[1] if call != "creat" else "O_CREAT|O_TRUNC|O_WRONLY"
            if "O_TMPFILE" in flags:
                raise RuntimeError("O_TMPFILE is not known here")
            if "O_CREAT" in flags and path not in self.inodes:
                op("create", self._new(path), path)
            elif "O_TRUNC" in flags:
                op("truncate", self.inodes[path], offset=0)
            if path in self.inodes:
                self.positions[self.inodes[path]] = 0
        elif call in ("rename", "renameat", "renameat2"):
            path, rest = self._named(args, 0)
            other, _ = self._named(rest, 1)
            if path is None and other is None:
                return
            inode = self.inodes.pop(path)
            self.inodes[other] = inode
            op("rename", inode, path, other)
        elif call in ("unlink", "unlinkat", "rmdir"):
            path, _ = self._named(args, 0)
            if path is not None:
                op("unlink", self.inodes.pop(path), path)
        elif call in ("mkdir", "mkdirat"):
            path, _ = self._named(args, 0)
            if path is not None:
                op("mkdir", self._new(path), path)
        elif call in ("write", "fsync", "fdatasync", "ftruncate", "pwrite64", "lseek"):
            path = self._inside(path_of(args[0]))
            if path is None:
                return
            inode = self.inodes[path]
            if call in ("fsync", "fdatasync"):
                op("sync", inode, path)
            elif call == "write":
                data = text_of(args[1].strip('"'))[:result]
                op("write", inode, offset=self.positions.get(inode, 0), data=data)
                self.positions[inode] = self.positions.get(inode, 0) + result
            elif call == "ftruncate":
                op("truncate", inode, offset=int(args[1]))
            elif call == "lseek":
                self.positions[inode] = result
            else:
                op("write", inode, offset=int(args[3]), data=text_of(args[1].strip('"'))[:result])
        elif any(self.root in path for path in map(path_of, args)) or any(
                is_string(a) and self.root in os.fsdecode(text_of(a.strip('"'))) for a in args):
            raise RuntimeError(f"{call} is not known here: {text[:200]}")


# ---- disks ----


def folder_of(path):
    return os.path.dirname(path) or "."


def durable(ops, end):
    """Which of ops[:end] have certainly reached the disk: whatever a later sync of the same file or folder held."""
    synced, kept = set(), [False] * end
    for i in range(end - 1, -1, -1):
        op = ops[i]
        if op.what == "sync":
            synced.add(("bytes", op.inode))
            synced.add(("names", op.path))
        elif op.what in ("write", "truncate"):
            kept[i] = ("bytes", op.inode) in synced
        else:
            kept[i] = all(("names", folder_of(path)) in synced for path in (op.path, op.other) if path is not None)
    return kept


def disk_of(tree, end, form, rng):
    """path -> bytes or None, as a loss of power after ops[:end] leaves it in this form."""
    certain = durable(tree.ops, end)
    names = {path: tree.inodes_at_first[path] for path in tree.base}
    bytes_of = {tree.inodes_at_first[path]: bytearray(data) for path, data in tree.base.items() if data is not None}
    folders = {tree.inodes_at_first[path] for path, data in tree.base.items() if data is None}
    for i, op in enumerate(tree.ops[:end]):
        if op.what == "sync":
            continue
        is_bytes = op.what in ("write", "truncate")
        held = (certain[i] or form == "all" or (form in ("empty", "zeros") and not is_bytes) or (form == "unnamed" and is_bytes)
                or (form == "random" and rng.random() < 0.5))
        data = op.data
        if not held and form == "zeros" and op.what == "write":
            held, data = True, bytes(len(data))
        if held and form == "random" and not certain[i] and op.what == "write":
            data = b"".join(data[at: at + SECTOR] if rng.random() < 0.7 else bytes(len(data[at: at + SECTOR]))
                            for at in range(0, len(data), SECTOR))
            data = data[: rng.randrange(len(data) + 1)] if rng.random() < 0.5 else data
        if op.what == "create":
            bytes_of.setdefault(op.inode, bytearray())
            if held:
                names[op.path] = op.inode
        elif op.what == "mkdir":
            folders.add(op.inode)
            if held:
                names[op.path] = op.inode
        elif not held:
            continue
        elif op.what == "write":
            content = bytes_of.setdefault(op.inode, bytearray())
            if len(content) < op.offset + len(data):
                content.extend(bytes(op.offset + len(data) - len(content)))
            content[op.offset: op.offset + len(data)] = data
        elif op.what == "truncate":
            content = bytes_of.setdefault(op.inode, bytearray())
            del content[op.offset:]
            content.extend(bytes(op.offset - len(content)))
        elif op.what == "unlink":
            names.pop(op.path, None)
        elif op.what == "rename":
            # A journal writes both names or none; the old one may never have been written.
            names.pop(op.path, None)
            names[op.other] = op.inode
    return {path: None if inode in folders else bytes(bytes_of[inode]) for path, inode in names.items()
            if path == "." or folder_of(path) in names or folder_of(path) == "."}


def lay_out(disk, folder):
    for path in sorted(disk):
        where = folder / path
        if disk[path] is None:
            where.mkdir(mode=0o700, parents=True, exist_ok=True)
        else:
            where.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            where.write_bytes(disk[path])
            where.chmod(0o600)


# ---- what is written, and what a new daemon makes of it ----

SMALL = (1, 64, 2, 64)  # batch, rows and keys, heads, head dim


class Service:
    """A daemon that writes below a folder."""

    name = below = ""

    def __init__(self, folder):
        self.folder = folder
        self.daemon = None

    def start(self, at):
        raise NotImplementedError

    @contextlib.contextmanager
    def recorded(self, recorder):
        """The folder's Tree, whose operations the recorder sees from here on."""
        with self.start(self.folder) as daemon:
            tree = Tree(self.folder / self.below)
            recorder.attach(daemon.pid)
            yield tree
            recorder.detach()

    @staticmethod
    def plan(device, shape):
        return device.plan(visits.problem(device.buffer_create(1 << 22).id, shape))


class State(Service):
    """Settings, sets, measured times and quarantine of one device."""

    name = below = "state"

    def start(self, at):
        self.daemon = fmhad.Daemon({**fmhad.FAKE, "supervision": {**fmhad.FAKE["supervision"], "quarantine_deaths": 1},
                                    "tuning": {"state": str(at / "state"), "automatic": False}})
        return self.daemon

    def steps(self):
        """Each leaves the disk as it is to be: what it changes is answered for when it returns."""
        with self.daemon.device() as device:
            planned = self.plan(device, SMALL)
            kernel = planned["stages"][0]["kernel"]
            yield "nothing"
            for priority in (3, 5):
                assert device.call("registry_set_priority", {"kernel": kernel, "priority": priority})["stored"]
                yield f"priority {priority}"
            assert device.call_with_text("registry_load", '["fwd-fp32-*"]', set="mine")["stored"]
            yield "a set"
            self._tune(device, SMALL)
            yield "times"
            assert device.call("registry_unload", {"set": "default"})["stored"]
            yield "no default set"
            self._tune(device, (1, 256, 4, 64), nhead_k=2, seqlen_q=1)
            yield "more times"
            device.call("inject", {"fault": "abort"})
            try:
                device.call("run", {"plan": planned["plan"]})
            except (fmha_wire.Disconnected, fmha_wire.WireError, OSError):
                pass
        assert fmhad.until(lambda: self.daemon.status()["devices"][0]["state"] == "ready" and any(
            '"until"' in text for text in self._texts()))
        yield "quarantine"
        with self.daemon.device() as device:
            assert device.call("registry_lift", {"kernel": kernel})["stored"]
        yield "lifted"

    def _tune(self, device, shape, **options):
        """Times are stored after they are answered for."""
        device.call("tune", {"problem": visits.problem(1, shape, **options)}, timeout=60)
        known = sum(len(k.get("tuned", [])) for k in json.loads(device.call_json("registry_export", {}))["kernels"])
        assert known and fmhad.until(lambda: sum(text.count('"us":') for text in self._texts()) >= known)

    def _texts(self):
        return [f.read_text() for f in (self.folder / "state").glob("[!.]*")]

    def look(self):
        """What a daemon shows of it."""
        with self.daemon.device() as device:
            document = json.loads(device.call_json("registry_export", {}))
        kernels = sorted((k["name"], k.get("priority", 0), sorted((t["shape"], t["splits"], t["us"]) for t in k.get("tuned", [])))
                         for k in document["kernels"] if k.get("priority") or k.get("tuned"))
        quarantined = sorted(json.dumps(q.get("kernel", q)) if isinstance(q, dict) else q
                             for q in self.daemon.status()["devices"][0]["quarantined"])
        return json.dumps([kernels, document.get("sets"), quarantined])

    def judge(self, disk, at, allowed):
        with self.start(at) as daemon:
            found, log = self.look(), daemon.log()
        if found not in allowed:
            raise Wrong(f"neither the old nor the new:\n  {found[:600]}\n  " + "\n  ".join(a[:600] for a in allowed))
        if "left as" in log or "cannot be" in log:
            raise Wrong(f"it says: {log}")


class Cache(Service):
    """Compiled kernels, by scripts that stand for a compiler."""

    name = below = "cache"
    kernels = [(1, 64, 2, hdim) for hdim in (64, 96, 128)]

    def __init__(self, folder):
        super().__init__(folder)
        self.helper = folder / "helper"
        self.helper.write_text("#!/bin/sh\n[ \"$1\" = --version ] && echo 'nvrtc 0.0' && exit 0\nprintf 'stub code%4000s' x >\"$5\"\n")
        self.helper.chmod(0o755)
        stub = next(iter(fmhad.build_dir().rglob("libcuda.so.1")))
        self.environment = {"LD_LIBRARY_PATH": str(stub.parent)}
        self.whole = {}  # what the folder holds at the end

    def start(self, at):
        self.daemon = fmhad.Daemon({"devices": [{"backend": "cuda"}], "tuning": {"automatic": False},
                                    "compile": {"helper": str(self.helper), "cache": str(at / "cache")}}, env=self.environment)
        return self.daemon

    def steps(self):
        with self.daemon.device() as device:
            yield "nothing"
            for i, shape in enumerate(self.kernels):
                assert self.plan(device, shape)["stages"]
                # Nothing is promised of when it is on the disk.
                assert fmhad.until(lambda n=i + 1: len(self._entries(self.folder / "cache")) >= n)
                yield f"kernel {i}"
        self.whole = self._entries(self.folder / "cache")

    @staticmethod
    def _entries(folder):
        return {p.name: p.read_bytes() for p in folder.iterdir() if re.fullmatch("[0-9a-f]{64}", p.name)}

    def look(self):
        return ""

    def judge(self, disk, at, allowed):
        good = sum(self.whole.get(os.path.basename(path)) == data for path, data in disk.items() if data is not None)
        with self.start(at) as daemon, daemon.device() as device:
            for shape in self.kernels:
                if not self.plan(device, shape)["stages"]:
                    raise Wrong("no plan")
            compiled = daemon.status()["front"]["compile"]
        n_built = compiled["built"]
        if n_built != len(self.whole) - good:
            raise Wrong(f"{good} of {len(self.whole)} entries were whole, and {n_built} kernels built again")


class Pack:
    """A file of compiled kernels, written over an older one. It is made by a script that stands for a compiler."""

    name, below = "pack", "packs"

    def __init__(self, folder):
        self.folder = folder
        clang = folder / "clang"
        clang.write_text('#!/bin/sh\n[ "$1" = --version ] && echo version 1 && exit 0\ncase "$*" in *" /dev/null") exit 1;; esac\n'
                         "printf 'code%4000s' x\n")
        clang.chmod(0o755)
        self.build = [fmhad.find_program("fmhad-build"), "--arch", "gfx942", "--clang", clang, "--cache", folder / "cache", "--helper",
                      fmhad.find_program("fmhad-compile"), "--pack", folder / "packs/pack"]
        listed = subprocess.run([*map(str, self.build[:3]), "--list", "--filter", "data_type == 'bf16' and hdim_q == 64 and hdim_v == 64"],
                                capture_output=True, text=True, check=True)
        self.kernels = listed.stdout.split()[:3]

    @contextlib.contextmanager
    def recorded(self, recorder):
        self.recorder = recorder
        subprocess.run([*map(str, self.build), "--kernel", self.kernels[0]], capture_output=True, check=True)
        yield Tree(self.folder / self.below)

    def steps(self):
        yield "one kernel"
        for kernel in self.kernels[1:]:
            self.recorder.command([*self.build, "--kernel", kernel])
            yield "one more"

    def look(self):
        return (self.folder / "packs/pack").read_bytes().hex()

    def judge(self, disk, at, allowed):
        if disk["pack"].hex() not in allowed:
            raise Wrong(f"{len(disk['pack'])} bytes, which nobody has written")


class Campaign:
    def __init__(self, options):
        self.options = options
        self.rng = random.Random(options.seed)
        self.counts = collections.Counter()
        self.n_wrong = 0

    def record(self, what, folder):
        """(the tree with its operations, [(when a step was answered for, what a daemon showed then)])."""
        recorder = Recorder(folder)
        answered = []
        (folder / what.below).mkdir(mode=0o700, exist_ok=True)
        with what.recorded(recorder) as tree:
            for _ in what.steps():
                answered.append((time.time(), what.look()))
        for line in recorder.lines():
            tree.add(line)
        is_folder = {inode for path, inode in tree.inodes_at_first.items() if tree.base[path] is None}
        if self.options.forget:
            tree.ops = [op for op in tree.ops if op.what != "sync" or (op.inode in is_folder) != (self.options.forget == "names")]
        # Not every step ends with an answer that promises something. What it renamed is seen before it is synced.
        answered = [(max(when, self.synced(tree.ops, when)), shown) for when, shown in answered]
        return tree, answered

    @staticmethod
    def synced(ops, when):
        """When the last name before @when was certain."""
        last = max((i for i, op in enumerate(ops) if op.what == "rename" and op.when <= when), default=None)
        if last is None:
            return 0.0
        return next((op.when for op in ops[last:] if op.what == "sync" and op.path == folder_of(ops[last].other)), 0.0)

    def run(self, what, folder):
        tree, answered = self.record(what, folder)
        print(f"{what.name}: {len(tree.ops)} operations in {len(answered)} steps", flush=True)
        seen = set()
        forms = [(form, 0) for form in FORMS] + [("random", n) for n in range(self.options.random)]
        number = 0
        for end in range(len(tree.ops) + 1):
            # What was answered for before the next operation began is promised; what the next answer shows, too, may be there.
            at = tree.ops[end - 1].when if end else 0.0
            last = max((i for i, (when, _) in enumerate(answered) if when <= at), default=0)
            if end == len(tree.ops):
                last = len(answered) - 1
            allowed = {answered[i][1] for i in range(last, min(last + 2, len(answered)))}
            for form, n in forms:
                number += 1
                rng = random.Random(f"{self.options.seed} {end} {n}")
                if self.options.at is not None and (end, form) != (self.options.at, self.options.form):
                    continue
                if self.options.at is None and number % self.options.every:
                    continue
                disk = disk_of(tree, end, form, rng)
                key = (tuple(sorted(disk.items())), tuple(sorted(allowed)))
                if key in seen:
                    continue
                seen.add(key)
                self.try_one(what, disk, allowed, end, form, tree)

    def try_one(self, what, disk, allowed, end, form, tree):
        at = pathlib.Path(tempfile.mkdtemp(prefix="fmhad-power-"))
        try:
            lay_out(disk, at / what.below)
            self.counts[what.name] += 1
            what.judge(disk, at, allowed)
        except (Wrong, RuntimeError, OSError, fmha_wire.WireError, fmha_wire.Disconnected) as error:
            self.n_wrong += 1
            op = tree.ops[end - 1] if end else None
            print(f"{what.name}: {error}\n  again: --only {what.name} --seed {self.options.seed} --at {end} --form {form}\n  after "
                  f"{op and (op.what, op.path, op.other, op.offset, len(op.data))}", flush=True)
        finally:
            shutil.rmtree(at)


KINDS = {kind.name: kind for kind in (State, Cache, Pack)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--random", type=int, default=4)
    parser.add_argument("--seed", type=int, default=int(datetime.date.today().strftime("%Y%m%d")))
    parser.add_argument("--at", type=int)
    parser.add_argument("--forget", choices=("bytes", "names"), help="syncs of files, or of folders, that the disk forgets: these disks"
                        " have to be found wrong")
    parser.add_argument("--form", choices=(*FORMS, "random"))
    campaign = Campaign(parser.parse_args())
    for name, kind in KINDS.items():
        if campaign.options.only in (None, name):
            with tempfile.TemporaryDirectory(prefix="fmhad-power-") as folder:  # strace's files lie there, too
                campaign.run(kind(pathlib.Path(folder)), pathlib.Path(folder))
    for name, n in campaign.counts.items():
        print(f"{name:8} {n}")
    print(f"{campaign.n_wrong} wrong")
    sys.exit(campaign.n_wrong > 0 or not campaign.counts)


if __name__ == "__main__":
    main()
