#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Fences on a real card: PyTorch's stream and the worker's order each other, the host waits for nothing.

    tests/gpu/fences.py [--rounds 50] [--stub FOLDER]

A round: PyTorch keeps its stream busy and writes q, the stream raises a counter (or records an
interprocess event), fmhad runs behind it and raises (records) another, the stream waits for that and
PyTorch copies o. All rounds are queued before anything is synchronised. In some rounds the stream also
writes how many keys there are, behind what fmhad waits for. Then a wait that nobody ends must meet its
deadline and cost nobody else anything. Needs PyTorch (not with --stub), numpy and msgpack.
"""
import argparse
import ctypes
import mmap
import os
import sys
import time

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import stress  # noqa: E402
from driver_device import Driver  # noqa: E402

fmha_wire = stress.fmha_wire
BATCH, SEQLEN, HEADS, HDIM = 1, 256, 4, 64
AHEAD = 12  # rounds that fmhad has to take while the first one is under way; it takes 16
SHAPE = (BATCH, SEQLEN, HEADS, HDIM)


class TorchSide:
    """The client's stream work, in PyTorch."""

    dtype, busy_ms = "bf16", 20

    def __init__(self, driver, place):
        import torch

        self.torch, self.driver = torch, driver
        self.stream = torch.cuda.Stream()
        self.handle = ctypes.c_void_p(self.stream.cuda_stream)
        torch.manual_seed(1)
        self.q, self.k, self.v, self.o = (self.tensor(place + i * self.bytes()) for i in range(4))
        self.k.copy_(torch.randn(SHAPE)), self.v.copy_(torch.randn(SHAPE))
        torch.cuda.synchronize()

    @staticmethod
    def bytes():
        return int(np.prod(SHAPE)) * 2

    def tensor(self, place):
        class Memory:
            __cuda_array_interface__ = {"shape": SHAPE, "typestr": "<i2", "data": (place, False),
                                        "version": 3, "strides": None}
        return self.torch.as_tensor(Memory(), device="cuda").view(self.torch.bfloat16)

    def put_length(self, place):
        """Where write_q() writes how many keys count, from now on."""
        class Memory:
            __cuda_array_interface__ = {"shape": (1,), "typestr": "<i4", "data": (place, False),
                                        "version": 3, "strides": None}
        self.length = self.torch.as_tensor(Memory(), device="cuda")

    def write_q(self, n_keys=None):
        """Queued: some work, then a new q. Returns what the round must give, computed on the way."""
        torch = self.torch
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(2_000_000)  # about a millisecond
            self.q.copy_(torch.randn(SHAPE, device="cuda"))
            if n_keys:
                self.length.fill_(n_keys)
            parts = [x.transpose(1, 2) for x in (self.q, self.k[:, :n_keys], self.v[:, :n_keys])]
            return torch.nn.functional.scaled_dot_product_attention(*parts).transpose(1, 2).clone()

    def read_o(self):
        with self.torch.cuda.stream(self.stream):
            return self.o.clone()

    def make_event(self):
        return TorchEvent(self.torch, self.stream)

    def synchronize(self):
        self.stream.synchronize()

    def off_by(self, got, want):
        return (got.float() - want.float()).abs().max().item() / 0.03


class TorchEvent:
    def __init__(self, torch, stream):
        self.torch, self.stream = torch, stream
        self.event = torch.cuda.Event(interprocess=True)
        self.handle = self.event.ipc_handle()

    def record(self):
        self.event.record(self.stream)

    def wait(self):
        self.stream.wait_event(self.event)

    def record_behind_seconds(self):
        self.busy = self.torch.cuda.Stream()
        with self.torch.cuda.stream(self.busy):
            self.torch.cuda._sleep(8_000_000_000)  # about four seconds
        self.event.record(self.busy)

    def end(self):
        self.busy.synchronize()


class StubEvent:
    """As the stub knows them: two counters in a memfd, of records and of those that were reached."""

    def __init__(self):
        fd = os.memfd_create("event")
        os.ftruncate(fd, 4096)
        self.words = np.frombuffer(mmap.mmap(fd, 4096), np.uint32)
        self.handle = (b"event %d %d" % (os.getpid(), fd)).ljust(64, b"\0")

    def record(self):
        self.words[0] += 1
        self.words[1] = self.words[0]

    def wait(self):
        deadline = time.monotonic() + 10
        while self.words[0] != self.words[1] and time.monotonic() < deadline:
            time.sleep(0.001)

    def record_behind_seconds(self):
        self.words[0] += 1

    def end(self):
        self.words[1] = self.words[0]


class StubSide:
    """The same on the libcuda stub, whose kernel copies q to o."""

    dtype, busy_ms = "f32", 0

    def __init__(self, driver, place):
        self.driver, self.place, self.handle = driver, place, driver.stream
        self.rng = np.random.default_rng(1)

    @staticmethod
    def bytes():
        return int(np.prod(SHAPE)) * 4

    def write_q(self):
        q = self.rng.standard_normal(SHAPE).astype(np.float32)
        self.driver.write(self.place, q)
        return q

    def read_o(self):
        event = ctypes.c_void_p()
        self.driver.call("cuEventCreate", ctypes.byref(event), 2)
        self.driver.call("cuEventRecord", event, self.handle)
        self.driver.call("cuEventSynchronize", event)
        o = np.empty(SHAPE, np.float32)
        self.driver.read(o, self.place + 3 * self.bytes())
        return o

    def make_event(self):
        return StubEvent()

    def synchronize(self):
        pass

    def off_by(self, got, want):
        return np.abs(got - want).max()


class Counters:
    """Two 32-bit words in a buffer: one that the stream writes, one that fmhad writes."""

    name = "counters"

    def __init__(self, side, device, buffer, place, at):
        self.side, self.buffer, self.place, self.at, self.value = side, buffer, place, at, 0

    def signal(self):
        """The stream has come so far."""
        self.value += 1
        self.side.driver.call("cuStreamWriteValue32_v2", self.side.handle,
                              ctypes.c_uint64(self.place + self.at), self.value, 0)

    def wait(self):
        """The stream waits for the run."""
        self.side.driver.call("cuStreamWaitValue32_v2", self.side.handle,
                              ctypes.c_uint64(self.place + self.at + 4), self.value, 0)

    def word(self, at, value):
        return {"buffer": self.buffer, "offset": self.at + at, "value": value}

    def params(self):
        return {"waits": [self.word(0, self.value)], "signals": [self.word(4, self.value)]}

    def stuck(self):
        return {"waits": [self.word(8, 1)]}

    def end_stuck(self):
        pass


class Events:
    """Two interprocess events of this process: the stream records one, fmhad the other."""

    name = "events"

    def __init__(self, side, device, buffer, place, at):
        self.side = side
        self.before, self.after, self.never = (side.make_event() for _ in range(3))
        self.ids = [device.call("event_import", {"handle": e.handle})["event"]
                    for e in (self.before, self.after, self.never)]

    def signal(self):
        self.before.record()

    def wait(self):
        self.after.wait()

    def params(self):
        return {"waits": [{"event": self.ids[0]}], "signals": [{"event": self.ids[1]}]}

    def stuck(self):
        self.never.record_behind_seconds()
        return {"waits": [{"event": self.ids[2]}]}

    def end_stuck(self):
        self.never.end()


def rounds(side, fences, device, plan, n):
    """Queues n rounds, then waits and checks. Returns the table's rows."""
    pairs, start, in_runs, ahead = [], time.monotonic(), 0, 0
    for i in range(n):
        want = side.write_q()
        fences.signal()
        asked = time.monotonic()
        device.run(plan, **fences.params())
        in_runs += time.monotonic() - asked
        if i < AHEAD:
            ahead = in_runs
        fences.wait()
        pairs.append((side.read_o(), want))
    queued = time.monotonic() - start
    side.synchronize()
    took = time.monotonic() - start
    worst = max(side.off_by(got, want) for got, want in pairs)
    rows = [(f"{n} rounds right", f"worst error {worst:.2f} of what is allowed", worst <= 1)]
    rows.append(("queued ahead of the device", f"{queued * 1e3:.0f} ms to queue, {in_runs * 1e3:.0f} of them fmhad, {took * 1e3:.0f} ms in all",
                 side.busy_ms == 0 or ahead < took / n * min(n, AHEAD) * 0.5))
    return rows


def table_rounds(side, fences, device, plan, n):
    """As rounds(), with another number of keys in each, which fmhad has to read behind the fence."""
    pairs = []
    for i in range(n):
        want = side.write_q(1 + 37 * i % SEQLEN)
        fences.signal()
        device.run(plan, **fences.params())
        fences.wait()
        pairs.append((side.read_o(), want))
    side.synchronize()
    worst = max(side.off_by(got, want) for got, want in pairs)
    return [(f"{n} rounds with lengths right", f"worst error {worst:.2f} of what is allowed", worst <= 1)]


def stuck(fences, device, plan, status):
    """A wait for what nobody does in time."""
    start, pid = time.monotonic(), device.worker_pid
    device.run(plan, **fences.stuck(), timeout_ms=500)
    time.sleep(1.5)
    rows, other = [], None
    try:
        device.run(plan)
        rows.append(("stuck fence", "no error came", False))
    except fmha_wire.WireError as error:
        rows.append(("stuck fence", f"{error} (field {error.field}) after {time.monotonic() - start:.1f} s",
                     error.name == "ETIMEDOUT" and error.field == "waits"))
    device.run(plan)
    fences.end_stuck()
    other = status()
    rows.append(("worker lives on", f"{other['deaths']} deaths", other["worker_pid"] == pid))
    return rows


def latency(side, fences, device, plan, n=50):
    """Microseconds of: stream -> fence -> worker's kernel -> fence -> stream, one at a time."""
    best = []
    for _ in range(n):
        start = time.monotonic()
        fences.signal()
        device.run(plan, **fences.params())
        fences.wait()
        side.synchronize()
        best.append(time.monotonic() - start)
    return sorted(best)[n // 2] * 1e6


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--stub")
    options = parser.parse_args()
    options.backend, options.seconds, options.clients, options.seed = "cuda", 0, 0, 1
    rows, service = [], None
    try:
        if options.stub:
            options.stub = os.path.abspath(options.stub)
            ctypes.CDLL(os.path.join(options.stub, "libcuda.so.1"), ctypes.RTLD_GLOBAL)
        service = stress.Stress(options)
        service.start_daemon()
        driver = Driver()
        make = StubSide if options.stub else TorchSide
        at = 4 * make.bytes()
        device = service.daemon.device()
        made, (fd,) = device.call_with_fds("buffer_create", {"size": at + 512})
        place = driver.map_descriptor(fd, made["allocation_bytes"])
        os.close(fd)
        side = make(driver, place)
        fields = {"batch": BATCH, "nhead_q": HEADS, "nhead_k": HEADS, "seqlen_q": SEQLEN,
                  "seqlen_k": SEQLEN, "hdim_q": HDIM, "hdim_v": HDIM}
        tensors = {r: {"buffer": made["buffer"], "offset": i * make.bytes(), "dtype": make.dtype}
                   for i, r in enumerate("qkvo")}
        device.timeout = 60
        plan = device.plan({**fields, "tensors": tensors})["plan"]
        device.run(plan)
        with_lengths = None
        if not options.stub:
            side.put_length(place + at + 256)
            tensors["seqlen_k_per_batch"] = {"buffer": made["buffer"], "offset": at + 256, "dtype": "i32"}
            with_lengths = device.plan({**fields, "tensors": tensors})["plan"]
        for kind in (Counters, Events):
            fences = kind(side, device, made["buffer"], place, at)
            got = rounds(side, fences, device, plan, options.rounds)
            if with_lengths:
                got += table_rounds(side, fences, device, with_lengths, 12)
            us = latency(side, fences, device, plan)
            got.append(("one round", f"{us:.0f} us, MPS {service.device_status()['worker']['mps']}", True))
            got += stuck(fences, device, plan, service.device_status)
            got += rounds(side, fences, device, plan, 3)  # as if nothing had been stuck
            rows += [(f"{kind.name}: {name}", value, good) for name, value, good in got]
    except (OSError, RuntimeError, fmha_wire.WireError, fmha_wire.Disconnected) as error:
        rows.append(("ended early", f"{type(error).__name__}: {error}", False))
        if service and service.daemon:
            print(service.daemon.log())
    finally:
        if service:
            service.end()
            stress.shutil.rmtree(service.folder, ignore_errors=True)
    for name, value, good in rows:
        print(f"{'ok  ' if good else 'FAIL'} {name:38} {value}")
    return 0 if rows and all(good for _, _, good in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
