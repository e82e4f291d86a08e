#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""fmhad on a GPU, through registry and plans, beside cuDNN and FlashAttention-2 as PyTorch has them.

    tests/bench/bench_gpu.py [--tables forward,backward,features,decode,fp8] [--match TEXT] [--out FOLDER] [--quick]

A private daemon runs the plans; a time is what its worker says the kernels took, by device events. Both sides read the same
memory, in turn, normally distributed, several sets of it rotated so that no cache holds them; medians of 20 (--quick: of
5). Writes gpu.json, gpu.csv and gpu.svg; gpu_report.py --readme puts them into README. Needs an NVIDIA GPU, PyTorch, numpy and
msgpack; FMHA_BUILD names the build folder.
"""
import argparse
import datetime
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
for folder in ("lib", "gpu", "bench"):
    sys.path.insert(0, os.path.join(ROOT, "tests", folder))
import fmha_wire  # noqa: E402
import gpu_problems  # noqa: E402
import gpu_report  # noqa: E402
from driver_device import Driver  # noqa: E402

CACHE_BYTES = 160 << 20  # inputs of all sets together are more than any cache
BACKENDS = {"cuDNN": "CUDNN_ATTENTION", "FlashAttention-2": "FLASH_ATTENTION"}
ALIGNMENT = 1024
AHEAD = 16  # runs that the device is given at a time
QUEUE_S = 0.004  # until it has them all


class Daemon:
    def __init__(self, build):
        self.folder = tempfile.mkdtemp(prefix="fmhad-bench-")
        self.socket, config = os.path.join(self.folder, "fmhad.sock"), os.path.join(self.folder, "fmhad.json")
        with open(config, "w", encoding="ascii") as file:
            json.dump({"socket": self.socket, "devices": [{"backend": "cuda", "queue_depth": AHEAD}],
                       "compile": {"cache": os.path.join(self.folder, "cache"), "sources": os.path.join(ROOT, "kernels", "gpu"),
                                   "library_path": os.environ.get("LD_LIBRARY_PATH") or "/usr/lib", "jobs": os.cpu_count()}}, file)
        self.process = subprocess.Popen([os.path.join(build, "daemon", "front", "fmhad"), "--config", config])

    def connect(self):
        deadline = time.monotonic() + 20
        while True:
            try:
                return fmha_wire.Client.connect(self.socket, timeout=120)
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)
        shutil.rmtree(self.folder, ignore_errors=True)


class Sets:
    """A row's tensors, several times, in one buffer of the worker's that PyTorch sees, too."""

    def __init__(self, torch, driver, device, row):
        self.torch, self.driver, self.device, self.row = torch, driver, device, row
        self.extra = {role: make(torch) for role, make in row.extra.items()}
        self.layout, size = {}, 0
        for role, (dtype, shape) in self.roles().items():
            self.layout[role] = (size, dtype, shape)
            size += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        self.bytes, self.count, self.value = size, max(3, min(8, -(-CACHE_BYTES // size))), 0
        made, (fd,) = device.call_with_fds("buffer_create", {"size": size * self.count + ALIGNMENT})
        self.buffer, self.mapped = made["buffer"], made["allocation_bytes"]
        self.place = driver.map_descriptor(fd, self.mapped)
        os.close(fd)
        self.tensors = [{role: self.tensor(role, i) for role in self.layout} for i in range(self.count)]
        for tensors in self.tensors:
            self.fill(tensors)
        self.counter = self.view(size * self.count, torch.int32, (1,))
        self.counter.zero_()
        self.plans = []

    def roles(self):
        torch, row = self.torch, self.row
        kind = {"bf16": torch.bfloat16, "f16": torch.float16, "e4m3": torch.float8_e4m3fn}[row.dtype]
        found = {role: (torch.bfloat16 if role == "o" and row.dtype == "e4m3" else kind, row.shape(role)) for role in "qkvo"}
        if row.fields.get("op") == "backward":
            found["lse"] = (torch.float32, row.shape("lse"))
            found |= {"d_o": found["o"], "dq": found["q"], "dk": found["k"], "dv": found["v"]}
        return found | {role: (x.dtype, tuple(x.shape)) for role, x in self.extra.items()}

    def tensor(self, role, i):
        at, dtype, shape = self.layout[role]
        return self.view(i * self.bytes + at, dtype, shape)

    def view(self, at, dtype, shape):
        class Memory:
            __cuda_array_interface__ = {"shape": (math.prod(shape) * dtype.itemsize,), "typestr": "|u1",
                                        "data": (self.place + at, False), "version": 3, "strides": None}
        return self.torch.as_tensor(Memory(), device="cuda").view(dtype).view(shape)

    def fill(self, tensors):
        for role, x in tensors.items():
            if role in self.extra:
                x.copy_(self.extra[role])
            elif role in ("q", "k", "v", "d_o"):
                x.copy_(self.torch.randn(x.shape, device="cuda"))
            else:
                x.zero_()

    def wire(self, i):
        names = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "int32": "i32", "float8_e4m3fn": "e4m3"}
        return {role: {"buffer": self.buffer, "offset": i * self.bytes + at, "dtype": names[str(dtype).split(".")[1]]}
                for role, (at, dtype, _) in self.layout.items()}

    def make_plans(self):
        self.plans = [self.device.plan({**self.row.fields, "tensors": self.wire(i)}) for i in range(self.count)]
        return self.plans[0]

    def make_forward(self):
        """O and LSE for backward, by fmhad."""
        fields = {k: v for k, v in self.row.fields.items() if k not in ("op", "deterministic")}
        for i in range(self.count):
            tensors = {r: t for r, t in self.wire(i).items() if r in ("q", "k", "v", "o", "lse")}
            plan = self.device.plan({**fields, "tensors": tensors})["plan"]
            self.device.run(plan)
            self.device.call("plan_release", {"plan": plan})

    def run(self, n):
        """
        Microseconds of n runs, all queued behind one that waits for a counter, so that none of them waits for the host;
        that one does not count.
        """
        self.value += 1
        fence = {"buffer": self.buffer, "offset": self.bytes * self.count, "value": self.value}
        numbers = [self.device.submit("run", {"plan": self.plans[i % self.count]["plan"], **({} if i else {"waits": [fence]})})
                   for i in range(n + 1)]
        time.sleep(QUEUE_S)
        self.counter.fill_(self.value)
        times = [self.device.wait(number)[0]["kernel_ns"] / 1e3 for number in numbers]
        return times[1:]

    def release(self):
        for plan in self.plans:
            self.device.call("plan_release", {"plan": plan["plan"]})
        self.torch.cuda.synchronize()
        self.tensors = self.counter = None
        self.device.call("buffer_release", {"buffer": self.buffer})
        self.driver.unmap(self.place, self.mapped)


class Library:
    """One of PyTorch's backends on the same memory."""

    def __init__(self, torch, sets, backend):
        from torch.nn.attention import SDPBackend, sdpa_kernel
        self.torch, self.sets = torch, sets
        self.only = lambda: sdpa_kernel(getattr(SDPBackend, BACKENDS[backend]))
        f = sets.row.fields
        self.options = dict(is_causal=sets.row.is_causal() and f["seqlen_q"] > 1, enable_gqa=f["nhead_q"] != f["nhead_k"])
        self.is_backward = f.get("op") == "backward"
        self.calls = [self.call(t) for t in sets.tensors]

    def call(self, t):
        torch, sdpa = self.torch, self.torch.nn.functional.scaled_dot_product_attention
        q, k, v = (t[r].transpose(1, 2).detach() for r in "qkv")
        if not self.is_backward:
            return lambda: sdpa(q, k, v, **self.options)
        parts = [x.requires_grad_(True) for x in (q, k, v)]
        with self.only():
            out = sdpa(*parts, **self.options)
        gradient = t["d_o"].transpose(1, 2)
        return lambda: torch.autograd.grad(out, parts, gradient, retain_graph=True)

    def run(self, n):
        """Microseconds of one of n launches in a row, each on its own inputs."""
        torch = self.torch
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with self.only():
            self.calls[-1]()
            a.record()
            for i in range(n):
                self.calls[i % len(self.calls)]()
            b.record()
        b.synchronize()
        return [a.elapsed_time(b) * 1e3 / n]

    def result(self):
        with self.only():
            return self.calls[0]()


def difference(torch, sets, library):
    """The largest, of what fmhad left and what the library gives, in units of the largest element."""
    want, t = library.result(), sets.tensors[0]
    got = [t[r] for r in ("dq", "dk", "dv")] if library.is_backward else [t["o"]]
    want = want if library.is_backward else [want]
    return max(((x.float() - w.transpose(1, 2).float()).abs().max() / w.float().abs().max()).item() for x, w in zip(got, want))


def measure(torch, driver, device, row, reps):
    """A line of the table."""
    line = dict(table=row.table, name=row.name, work=row.work, plain=row.plain, plot=row.plot, keys=row.fields["seqlen_k"])
    sets = Sets(torch, driver, device, row)
    try:
        if row.fields.get("op") == "backward":
            sets.make_forward()
        plan = sets.make_plans()
        line["kernels"] = [s["kernel"] for s in plan["stages"]]
        sets.run(sets.count)
        sides = {"fmhad": sets}
        for name in row.libraries:
            try:
                library = Library(torch, sets, name)
                line[f"differs from {name}"] = difference(torch, sets, library)
                sides[name] = library
            except RuntimeError as error:
                line[f"no {name}"] = str(error).splitlines()[0]
        times = {name: [] for name in sides}
        estimate = sides["fmhad"].run(2)[-1]
        at_once = max(3, min(12, int(3000 / max(estimate, 1))))
        for _ in range(reps):
            for name, side in sides.items():
                times[name] += side.run(at_once)
                torch.cuda.synchronize()
        line["us"] = {name: sorted(x)[len(x) // 2] for name, x in times.items()}
    finally:
        sets.release()
    return line


def copy_rate(torch):
    """Bytes a second that a large copy reads and writes."""
    x = torch.empty(1 << 30, device="cuda", dtype=torch.uint8)
    y = torch.empty_like(x)
    times = []
    for _ in range(8):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        y.copy_(x)
        a.record()
        for _ in range(4):
            y.copy_(x)
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b) / 4e3)
    return 2 * x.numel() / sorted(times)[4]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", default=",".join(gpu_problems.TABLES))
    parser.add_argument("--match", default="")
    parser.add_argument("--out", default=os.path.join(ROOT, "build", "bench"))
    parser.add_argument("--quick", action="store_true")
    a = parser.parse_args()
    import torch
    torch.manual_seed(1)
    warnings.filterwarnings("ignore", category=UserWarning)  # why PyTorch has not chosen what was not asked for
    daemon = Daemon(os.environ.get("FMHA_BUILD", os.path.join(ROOT, "build", "release")))
    lines, failed = [], 0
    try:
        torch.zeros(1, device="cuda")
        driver, device = Driver(), daemon.connect().open_device(0)
        result = dict(card=torch.cuda.get_device_name(), driver=gpu_report.driver_version(), torch=torch.__version__,
                      date=datetime.date.today().isoformat(), copy=copy_rate(torch), lines=lines)
        for row in gpu_problems.rows(a.tables.split(","), a.match):
            try:
                lines.append(measure(torch, driver, device, row, 5 if a.quick else 20))
            except fmha_wire.WireError as error:
                lines.append(dict(table=row.table, name=row.name, error=str(error)))
            print(gpu_report.text_of(lines[-1], result), flush=True)
            gpu_report.write(result, a.out)
            failed += any(x > 0.05 for k, x in lines[-1].items() if k.startswith("differs"))
            torch.cuda.empty_cache()
    finally:
        daemon.end()
    print(gpu_report.tables(result))
    sys.exit(failed != 0)


if __name__ == "__main__":
    main()
