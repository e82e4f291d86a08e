#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""fmhad on a GPU, through registry and plans, beside cuDNN and FlashAttention-2 as PyTorch has them, and FlashAttention-3 and -4 where
tests/gpu/libraries.py finds them.

    tests/bench/bench_gpu.py [--tables forward,backward,features,decode,fp8,models,local] [--match TEXT] [--out FOLDER] [--quick]
                             [--layer CACHE] [--seconds N]
    tests/bench/bench_gpu.py --plan-only CACHE       # compiles what the rest needs; a stub driver will do, no PyTorch

A private daemon runs the plans; a time is what its worker says the kernels took, by device events. Both sides read the same
memory, in turn, normally distributed, several sets of it rotated so that no cache holds them; medians of 20 (--quick: of
5). Local launch and served runs are bench_local's and tests/gpu/local.py's. Writes gpu.json, gpu.csv and gpu.svg;
gpu_report.py --pages puts them into docs/speed.md. Of the layers of models that are not said to run by a general loop, those that do have failed,
as does what differs from a library. --layer: kernels that were compiled before; --seconds: no row begins later
than that. Needs an NVIDIA GPU, PyTorch, numpy and msgpack; FMHA_BUILD names the build folder.
"""
import argparse
import contextlib
import datetime
import math
import os
import re
import subprocess
import sys
import time
import warnings

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
for folder in ("lib", "gpu", "bench"):
    sys.path.insert(0, os.path.join(ROOT, "tests", folder))
import fmha_wire  # noqa: E402
import fmhad  # noqa: E402
import gpu_problems  # noqa: E402
import gpu_report  # noqa: E402
import libraries  # noqa: E402
from driver_device import Driver  # noqa: E402
from gpu_timer import copy_rate, once  # noqa: E402

CACHE_BYTES = 160 << 20  # inputs of all sets together are more than any cache
BACKENDS = {"cuDNN": "CUDNN_ATTENTION", "FlashAttention-2": "FLASH_ATTENTION"}
ALIGNMENT = 1024
BYTES = {"bf16": 2, "f16": 2, "e4m3": 1, "f32": 4, "i32": 4}
AHEAD = 16  # runs that the device is given at a time
QUEUE_S = 0.004  # until it has them all


def daemon_of(**options):
    config = fmhad.gpu_config("cuda", deadline_ms=600000, **options)
    config["devices"][0]["queue_depth"] = AHEAD
    config["limits"] = {"memory_bytes": 1 << 40, "memory_bytes_per_uid": 1 << 40}
    return config


def forward_of(backward):
    """The problem whose O and LSE a backward problem takes."""
    tensors = {role: x for role, x in backward["tensors"].items() if role not in ("d_o", "dq", "dk", "dv")}
    return {k: v for k, v in backward.items() if k not in ("op", "deterministic")} | {"tensors": tensors}


class Sets:
    """A row's tensors, several times, in one buffer of the worker's that PyTorch sees, too."""

    def __init__(self, torch, driver, device, row):
        self.torch, self.driver, self.device, self.row = torch, driver, device, row
        self.extra = {role: x.make(torch) for role, x in row.extra.items()}
        self.layout, size = {}, 0
        for role, (word, shape) in row.tensors().items():
            dtype = self.type_of(word)
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

    def type_of(self, word):
        torch = self.torch
        return {"bf16": torch.bfloat16, "f16": torch.float16, "e4m3": torch.float8_e4m3fn, "f32": torch.float32,
                "i32": torch.int32}[word]

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
        return {role: {"buffer": self.buffer, "offset": i * self.bytes + self.layout[role][0], "dtype": word}
                for role, (word, _) in self.row.tensors().items()}

    def make_plans(self):
        self.plans = [self.device.plan({**self.row.fields, "tensors": self.wire(i)}) for i in range(self.count)]
        return self.plans[-1]  # the first may have waited for code that others replace, since it spills

    def make_forward(self):
        """O and LSE for backward, by fmhad."""
        for i in range(self.count):
            plan = self.device.plan(forward_of({**self.row.fields, "tensors": self.wire(i)}))["plan"]
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
    """Another library on the same memory. attend(q, k, v) takes and gives tensors as rows have them."""

    def __init__(self, torch, sets, attend, only=contextlib.nullcontext):
        self.torch, self.sets, self.attend, self.only = torch, sets, attend, only
        self.is_backward = sets.row.fields.get("op") == "backward"
        self.calls = [self.call(t) for t in sets.tensors]

    def call(self, t):
        parts = [t[r].detach() for r in "qkv"]
        if not self.is_backward:
            return lambda: self.attend(*parts)
        parts = [x.requires_grad_(True) for x in parts]
        with self.only():
            out = self.attend(*parts)
        return lambda: self.torch.autograd.grad(out, parts, t["d_o"], retain_graph=True)

    def run(self, n):
        """Microseconds of one of n launches in a row, each on its own inputs."""
        with self.only():
            return [once(self.torch, self.calls, n) * 1e3]

    def result(self):
        with self.only():
            return self.calls[0]()


def torch_backend(torch, sets, name):
    """One of PyTorch's."""
    if name not in sets.row.libraries:
        return None
    from torch.nn.attention import SDPBackend, sdpa_kernel
    f, sdpa = sets.row.fields, torch.nn.functional.scaled_dot_product_attention
    options = dict(is_causal=sets.row.is_causal() and f["seqlen_q"] > 1, enable_gqa=f["nhead_q"] != f["nhead_k"])
    return Library(torch, sets, lambda *x: sdpa(*(x.transpose(1, 2) for x in x), **options).transpose(1, 2),
                   lambda: sdpa_kernel(getattr(SDPBackend, BACKENDS[name])))


def flash_attention_3(torch, sets, name):
    """Forward, packed or in pages of whole 16 rows."""
    f, t, row = sets.row.fields, sets.tensors[0], sets.row
    attend = libraries.find_flash_attention_3()
    known = {"block_table", "seqstart_q", "seqstart_k", "q_descale", "k_descale", "v_descale"}
    if (not attend or f.get("op") == "backward" or not row.extra.keys() <= known or f["hdim_q"] != f["hdim_v"] or f.get("page_size", 0) % 16
            or f.get("dropout_p")):
        return None

    def starts(n):
        return torch.arange(f["batch"] + 1, device="cuda", dtype=torch.int32) * n

    options = dict(cu_seqlens_q=starts(f["seqlen_q"]), max_seqlen_q=f["seqlen_q"], max_seqlen_k=f["seqlen_k"],
                   causal="window_right" in f, softcap=f.get("logits_soft_cap", 0.0), fa_version=3)
    if "window_left" in f:
        options["window_size"] = [f["window_left"], 0]
    if f.get("page_size"):
        options.update(block_table=t["block_table"], seqused_k=torch.full((f["batch"],), f["seqlen_k"], device="cuda", dtype=torch.int32))
    else:
        options["cu_seqlens_k"] = starts(f["seqlen_k"])
    if row.dtype == "e4m3":  # a factor of a KV head
        options.update({x: torch.ones(f["batch"], f["nhead_k"], device="cuda") for x in ("q_descale", "k_descale", "v_descale")})

    def call(q, k, v):
        q, kv = q.reshape(-1, *q.shape[-2:]), (k, v) if f.get("page_size") else (x.reshape(-1, *x.shape[-2:]) for x in (k, v))
        return attend(q, *kv, **options).view(t["o"].shape)
    return Library(torch, sets, call)


def flash_attention_4(torch, sets, name):
    """Forward and backward of whole sequences."""
    f, attend = sets.row.fields, libraries.find_flash_attention_4()
    if not attend or sets.row.extra or sets.row.dtype != "bf16" or sets.row.table in ("decode", "models") or f.get("logits_soft_cap"):
        return None
    options = dict(causal=sets.row.is_causal(), deterministic=bool(f.get("deterministic")))
    if "window_left" in f:
        options = dict(window_size=(f["window_left"], 0))
    return Library(torch, sets, lambda q, k, v: attend(q, k, v, **options))


LIBRARIES = {**dict.fromkeys(BACKENDS, torch_backend), "FlashAttention-3": flash_attention_3, "FlashAttention-4": flash_attention_4}


def difference(sets, library):
    """The largest, of what fmhad left and what the library gives, in units of the largest element."""
    want, t = library.result(), sets.tensors[0]
    got = [t[r] for r in ("dq", "dk", "dv")] if library.is_backward else [t["o"]]
    want = want if library.is_backward else [want]
    return max(((x.float() - w.float()).abs().max() / w.float().abs().max()).item() for x, w in zip(got, want))


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
        for name, make in LIBRARIES.items():
            try:
                library = make(torch, sets, name)
                if library:
                    line[f"differs from {name}"] = difference(sets, library)
                    sides[name] = library
            except Exception as error:  # noqa: BLE001: a library that lacks a row is a column without a number
                line[f"no {name}"] = (str(error).splitlines() or [type(error).__name__])[0]
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


def submit_plans(device, row):
    """Asks for a row's plans: its buffer, the numbers of the requests."""
    tensors, size = {}, 0
    for role, (word, shape) in row.tensors().items():
        tensors[role] = {"offset": size, "dtype": word}
        size += -(-math.prod(shape) * BYTES[word] // ALIGNMENT) * ALIGNMENT
    buffer, (fd,) = device.call_with_fds("buffer_create", {"size": size})
    os.close(fd)
    for tensor in tensors.values():
        tensor["buffer"] = buffer["buffer"]
    problems = [{**row.fields, "tensors": tensors}]
    if row.fields.get("op") == "backward":
        problems.append(forward_of(problems[0]))
    return buffer["buffer"], [device.submit("plan", {"problem": x}) for x in problems]


def plan_only(build, cache, tables, match, at_once=8):
    """All plans of all rows, so that the cache has their kernels; nothing runs, so no buffer's memory is touched."""
    import coldstart
    environment, rows = coldstart.environment(), gpu_problems.rows(tables, match)
    with fmhad.Daemon(daemon_of(cache=cache), env=environment) as daemon, daemon.client(timeout=120) as client:
        device = client.open_device(0)
        for i in range(0, len(rows), at_once):
            asked = [(row, *submit_plans(device, row)) for row in rows[i:i + at_once]]
            for row, buffer, numbers in asked:
                for number in numbers:
                    made = device.wait(number, 300)[0]
                    print(f"{row.table:9} {row.name:42} {' '.join(s['kernel'] for s in made['stages'])}", flush=True)
                    device.call("plan_release", {"plan": made["plan"]})
                device.call("buffer_release", {"buffer": buffer})
        if "local" in tables:
            subprocess.run([sys.executable, os.path.join(ROOT, "tests", "gpu", "local.py"), daemon.socket, "0", "--plan-only", "--parts", "graphs"],
                           env={**environment, "FMHA_BUILD": build}, check=True)


LAUNCHED = re.compile(r"(.*): local ([0-9.]+) us, the driver's own call ([0-9.]+) us")
GRAPH = re.compile(r"\S+\s+graph of 50, (.*?) +replay ([0-9.]+) us a layer, without ([0-9.]+) us")
SERVED = re.compile(r"served, +(\d+) keys: kernel +([0-9.]+) us, on top +([0-9.]+) us \(9 of 10 below +([0-9.]+)\), busy +([0-9.]+) us")


def measure_local(build, socket):
    """Lines of the tables "local" and "served", by the programs that measure them."""
    bench = next(os.path.join(folder, "bench_local") for folder, _, files in os.walk(build) if "bench_local" in files)
    script = [sys.executable, os.path.join(ROOT, "tests", "gpu", "local.py"), socket, "0", "--parts", "graphs"]
    for command in ([bench, socket, "0"], [bench, socket, "0", "served"], script):
        done = subprocess.run(command, env={**os.environ, "FMHA_BUILD": build}, stdout=subprocess.PIPE, text=True, check=False,
                              timeout=60)
        print(done.stdout, end="", flush=True)
        if done.returncode:
            yield dict(table="local", name=os.path.basename(command[0]), error=f"exit code {done.returncode}")
        for name, local, driver in LAUNCHED.findall(done.stdout):
            yield dict(table="local", name=name, us={"local": float(local), "other": float(driver)})
        for name, replay, without in GRAPH.findall(done.stdout):
            yield dict(table="local", name=f"graph of 50, {name}: a layer", us={"local": float(replay), "other": float(without)})
        for keys, kernel, on_top, most, busy in SERVED.findall(done.stdout):
            yield dict(table="served", name=f"1, 16/16, {keys}, 128", us={"kernel": float(kernel), "on top": float(on_top),
                                                                          "9 of 10": float(most), "busy": float(busy)})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", default=",".join(gpu_problems.TABLES))
    parser.add_argument("--match", default="")
    parser.add_argument("--out", default=os.path.join(ROOT, "build", "bench"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--layer")
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--plan-only", metavar="CACHE")
    a = parser.parse_args()
    build = os.environ.get("FMHA_BUILD", os.path.join(ROOT, "build", "release"))
    tables, start = a.tables.split(","), time.monotonic()
    if a.plan_only:
        return plan_only(build, a.plan_only, tables, a.match)
    import torch
    torch.manual_seed(1)
    warnings.filterwarnings("ignore", category=UserWarning)  # why PyTorch has not chosen what was not asked for
    lines, failed = [], 0
    with fmhad.Daemon(daemon_of(**({"layer": a.layer} if a.layer else {}))) as daemon:
        torch.zeros(1, device="cuda")
        driver, device = Driver(), daemon.client(timeout=120).open_device(0)
        result = dict(card=torch.cuda.get_device_name(), driver=gpu_report.driver_version(), torch=torch.__version__,
                      date=datetime.date.today().isoformat(), copy=copy_rate(torch) * 1e9, lines=lines)
        if "local" in tables:
            lines += measure_local(build, daemon.socket)
            gpu_report.write(result, a.out)
        for row in gpu_problems.rows(tables, a.match):
            if time.monotonic() - start > a.seconds:
                lines.append(dict(table=row.table, name=row.name, error=f"not measured: {a.seconds:.0f} s were over"))
                continue
            try:
                lines.append(measure(torch, driver, device, row, 5 if a.quick else 20))
            except fmha_wire.WireError as error:
                lines.append(dict(table=row.table, name=row.name, error=str(error)))
            print(gpu_report.text_of(lines[-1], result), flush=True)
            gpu_report.write(result, a.out)
            failed += any(x > (0.1 if row.dtype == "e4m3" else 0.05) for k, x in lines[-1].items() if k.startswith("differs"))
            failed += row.table == "models" and not row.general and not gpu_report.loop_of(lines[-1]).startswith(gpu_problems.HOPPER)
            torch.cuda.empty_cache()
    print(gpu_report.tables(result))
    return int(failed != 0)


if __name__ == "__main__":
    sys.exit(main())
