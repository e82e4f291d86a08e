#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""fmha.torch.cp on several GPUs of one host, beside torch's own context_parallel, and tenants that share the host's daemon.

    tests/gpu/cp.py [--ranks N] [--seconds 360] [--only speed,equal,torch,tenants] [--cpu]

Four parts, each a process group or clients of its own with a deadline, so that one that fails leaves the others' results:
  speed    32k and 128k rows causal, 128k in documents: one GPU, then all of them by each schedule, forward and backward; weak scaling;
           what model.py says beforehand, from latency, bandwidth and kernels that it measures itself
  equal    every schedule gets what one GPU gets, features included, 2k rows in bfloat16
  torch    torch's context_parallel on the same 32k and 128k
  tenants  clients on all devices behind one socket: equal results, kernels compiled once for all, one device's worker killed until the
           daemon gives it up, and what the others notice
All of it with 64 query heads on 8, head dim 128. --cpu: gloo, the daemon's CPU devices and small sizes, to try the program itself.
NVLink multicast is left off (NCCL_NVLS_ENABLE=0). A short table comes last.
"""
import argparse
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
PARTS = ("speed", "equal", "torch", "tenants")
LIMITS = {"speed": 170, "equal": 120, "torch": 70, "tenants": 100}  # seconds
KINDS = ("all_gather", "a2a", "p2p", "a2a+p2p", "a2a+all_gather")


def build_folders():
    """The package of a build tree, where PYTHONPATH names no other."""
    build = pathlib.Path(os.environ.get("FMHA_BUILD", HERE.parents[1] / "build/release"))
    if (build / "client/python/fmha/_abi.py").exists():
        sys.path.append(str(build / "client/python"))


build_folders()


# ---- ranks -----------------------------------------------------------------------------------


class Ranks:
    """This rank and what all measure together."""

    def __init__(self, o):
        import datetime

        import torch
        import torch.distributed as dist

        self.torch, self.dist, self.cpu = torch, dist, o.cpu
        self.rank, self.n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if not o.cpu:
            torch.cuda.set_device(self.rank)
        self.device = torch.device("cpu") if o.cpu else torch.device("cuda", self.rank)
        said = {} if o.cpu else {"device_id": self.device}
        dist.init_process_group("gloo" if o.cpu else "nccl", timeout=datetime.timedelta(seconds=60), **said)
        self.groups = None
        self.out = pathlib.Path(o.out)
        self.found = {}

    def kinds(self):
        from fmha.torch import cp

        if self.n % 4:
            return KINDS[:3]
        if self.groups is None:
            self.groups = cp.two_level(2)
        return KINDS

    def group(self, kind):
        return self.groups if "+" in kind else None

    def keep(self, name, value):
        """Written at once: a part that ends early has left what it found."""
        self.found[name] = value
        if self.rank == 0:
            (self.out.with_suffix(".new")).write_text(json.dumps(self.found))
            os.replace(self.out.with_suffix(".new"), self.out)

    def largest(self, *values):
        t = self.torch.tensor(values, dtype=self.torch.float64, device=self.device)
        self.dist.all_reduce(t, self.dist.ReduceOp.MAX)
        return t.tolist()

    def wait(self):
        if not self.cpu:
            self.torch.cuda.synchronize()

    def timed(self, forward, rounds, alone=False):
        """(forward, backward) seconds, medians of the slowest rank's. @forward: gives (O, inputs, gradient of O)."""
        times = []
        for _ in range(rounds + 1):
            self.wait()
            if not alone:
                self.dist.barrier()
            start = time.perf_counter()
            o, inputs, g = forward()
            self.wait()
            middle = time.perf_counter()
            self.torch.autograd.grad(o, inputs, g)
            self.wait()
            end = time.perf_counter()
            del o
            times.append((middle - start, end - middle))
        if alone:
            return [statistics.median(t) for t in zip(*times[1:])]
        # The first of each shape makes plans; the slowest rank is what a step waits for.
        slowest = [self.largest(*t) for t in times[1:]]
        return [statistics.median(t) for t in zip(*slowest)]


HEADS, KV_HEADS, HDIM = 64, 8, 128


def documents_of(total):
    """Packed documents whose lengths spread as they do in practice: many short ones, few long ones."""
    import random

    draw, found = random.Random(4), [0]
    while found[-1] < total:
        found.append(min(total, found[-1] + max(total // 256, int(min(total / 4, draw.paretovariate(0.9) * total / 128)) // 64 * 64)))
    return tuple(found)


def inputs_of(r, rows, heads, kv_heads, hdim, seed=0, packed=False):
    """q, k, v and O's gradient, the same on all ranks."""
    generator = r.torch.Generator(r.device).manual_seed(seed)
    lead = (rows,) if packed else (1, rows)
    return [r.torch.randn(*lead, h, hdim, device=r.device, generator=generator, dtype=r.torch.bfloat16)
            for h in (heads, kv_heads, kv_heads, heads)]


def whole_of(r, tensors, documents=None, **said):
    import fmha.torch

    q, k, v, g = tensors
    mine = [t.detach().requires_grad_() for t in (q, k, v)]
    if documents:
        cu = r.torch.tensor(documents, dtype=r.torch.int32, device=r.device)
        longest = max(b - a for a, b in zip(documents, documents[1:]))
        said |= dict(cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest, max_seqlen_k=longest)
    return lambda: (fmha.torch.attention(*mine, **said), mine, g)


def shared_of(r, kind, shares, tensors, **said):
    from fmha.torch import cp

    q, k, v, g = (shares.take(t, r.rank).contiguous() for t in tensors)
    mine = [t.requires_grad_() for t in (q, k, v)]
    return lambda: (cp.attention(*mine, shares=shares, cp_comm_type=kind, group=r.group(kind), **said), mine, g)


def formula(r, tensors, documents=None, causal=False, window=(-1, -1), softcap=0.0, sink=None):
    """[O, dQ, dK, dV] in float32, written out, eight heads at a time."""
    torch = r.torch
    q, k, v, g = (t.float().reshape(-1, *t.shape[-2:]).transpose(0, 1) for t in tensors)
    rows, share = q.shape[1], q.shape[0] // k.shape[0]
    at = torch.arange(rows, device=r.device)
    starts = torch.tensor(documents or (0, rows), device=r.device)
    document = torch.searchsorted(starts, at, right=True)
    back = at[:, None] - at[None]
    hidden = document[:, None] != document[None]
    hidden |= (back > window[0]) if window[0] >= 0 else False
    hidden |= (-back > (0 if causal else window[1])) if causal or window[1] >= 0 else False
    found = [torch.zeros_like(t) for t in (g, q, k, v)]
    for h in range(q.shape[0]):
        one = [t.detach().clone().requires_grad_() for t in (q[h], k[h // share], v[h // share])]
        s = one[0] @ one[1].T * q.shape[-1] ** -0.5
        s = softcap * torch.tanh(s / softcap) if softcap else s
        s = s.masked_fill(hidden, -torch.inf)
        if sink is not None:
            s = torch.cat([s, sink[h].expand(rows, 1)], 1)
        out = torch.softmax(s, -1)[:, :rows] @ one[2]
        for to, part in zip((found[0][h], found[1][h], found[2][h // share], found[3][h // share]),
                            (out.detach(), *torch.autograd.grad(out, one, g[h]))):
            to += part
    return [f.transpose(0, 1).reshape(t.shape) for f, t in zip(found, (tensors[3], *tensors[:3]))]


def run_equal(r, o):
    """Each schedule, and one GPU, against the formula: twice as far off at most, and a rounding."""
    from fmha.torch import cp

    rows, heads, kv_heads, hdim = (512, 8, 2, 64) if r.cpu else (2048, HEADS, KV_HEADS, HDIM)
    documents = (0, *(rows * i // 8 + 5 * i for i in range(1, 7)), rows)
    sink = r.torch.randn(heads, device=r.device, generator=r.torch.Generator(r.device).manual_seed(3))
    cases = {
        "causal": dict(causal=True), "full": {}, "window": dict(causal=True, window=(rows // 5, 0)),
        "window, both sides": dict(window=(rows // 7, rows // 9)),
        "soft cap, sink": dict(causal=True, softcap=20.0, sink=sink), "packed": dict(causal=True, documents=documents),
        "packed, window, sink": dict(causal=True, documents=documents, window=(rows // 9, 0), sink=sink),
        "mqa": dict(causal=True, kv_heads=1), "mha": dict(causal=True, kv_heads=heads)}
    for name, said in cases.items():
        said = dict(said)
        packed, kv = said.pop("documents", None), said.pop("kv_heads", kv_heads)
        tensors = inputs_of(r, rows, heads, kv, hdim, packed=packed is not None)
        want = formula(r, tensors, packed, **said)
        out, mine, g = whole_of(r, tensors, packed, **said)()
        plain = [out.detach().float(), *(t.float() for t in r.torch.autograd.grad(out, mine, g))]
        allowed = [2 * float((c - b).abs().max()) + 2**-9 * float(b.abs().max()) for c, b in zip(plain, want)]
        r.keep(f"{name}, one", r.largest(*(float((c - b).abs().max() / b.abs().max()) / 2**-6 for c, b in zip(plain, want))))
        make = cp.balanced if packed else cp.head_tail if said.get("causal") else cp.contiguous
        shares = make(packed or rows, r.n)
        for kind in r.kinds():
            got, own, g = shared_of(r, kind, shares, tensors, **said)()
            got = [got.detach(), *r.torch.autograd.grad(got, own, g)]
            errors = []
            for a, b, most in zip(got, want, allowed):
                errors.append(float((a.float() - shares.take(b, r.rank)).abs().max()) / most)
            r.keep(f"{name}, {kind}", r.largest(*errors))
    import fmha  # dropout: the mask of one process

    tensors = inputs_of(r, rows, heads, kv_heads, hdim)
    want = fmha.attention(*tensors[:3], causal=True, dropout_p=0.3, seed=9, offset=64)
    shares = cp.head_tail(rows, r.n)
    for kind in r.kinds():
        got = shared_of(r, kind, shares, tensors, causal=True, dropout_p=0.3, seed=(9, 64))()[0]
        part = shares.take(want, r.rank).float()
        r.keep(f"dropout, {kind}", r.largest(float((got.float() - part).abs().max() / part.abs().max()) * 2**7))
    return 0


def speed_shapes(r):
    small, large = (256, 512) if r.cpu else (32768, 131072)
    weak = int(small * r.n ** 0.5) // (128 * r.n) * 128 * r.n if not r.cpu else int(small * r.n ** 0.5) // (8 * r.n) * 8 * r.n
    heads, kv_heads, hdim = (8, 2, 32) if r.cpu else (HEADS, KV_HEADS, HDIM)
    return [(f"{small // 1024}k" if small >= 1024 else str(small), small, None, heads, kv_heads, hdim),
            (f"{large // 1024}k" if large >= 1024 else str(large), large, None, heads, kv_heads, hdim),
            ("packed", large, documents_of(large), heads, kv_heads, hdim),
            ("weak", weak, None, heads, kv_heads, hdim)]


def run_speed(r, o):
    from fmha.torch import cp
    from fmha.torch.cp import measure, model

    shapes = speed_shapes(r)
    heads, kv_heads, hdim = shapes[0][3:]
    lengths = [128, 256, 512] if r.cpu else [2048, 4096, 8192, 16384, 32768]
    forward, backward = measure.kernels(r.device, lengths, heads, kv_heads, hdim)
    machine = model.Machine("here", measure.link(r.device), measure.link(r.device), forward, backward, measure.copy_rate(r.device), r.n)
    r.keep("machine", {"alpha_us": machine.near.alpha * 1e6, "GB_s": 1e-9 / machine.near.beta, "copy_GB_s": machine.copy * 1e-9,
                       "forward": forward, "backward": backward})
    rounds = 3
    for name, rows, documents, heads, kv_heads, hdim in shapes:
        tensors = inputs_of(r, rows, heads, kv_heads, hdim, packed=documents is not None)
        pairs = cp.contiguous(documents or rows, 1).work()[0]
        flops = 4.0 * pairs * heads * hdim * 3.5
        r.keep(f"{name}, flops", flops)
        one = r.timed(whole_of(r, tensors, documents, causal=True), rounds, alone=True)
        r.keep(f"{name}, one", r.largest(*one))
        shares = cp.balanced(documents, r.n) if documents else cp.head_tail(rows, r.n)
        predicted = {}
        if not documents:
            job = model.Job(rows, heads, kv_heads, hdim)
            for c in model.choices(machine, job, r.n):
                predicted.setdefault(c.kind, (c.forward, c.backward))
        for kind in r.kinds():
            r.keep(f"{name}, {kind}", r.timed(shared_of(r, kind, shares, tensors, causal=True), rounds))
            if kind in predicted:
                r.keep(f"{name}, {kind}, model", predicted[kind])
        # What chunks cost beside what they hide.
        r.keep(f"{name}, all_gather, 1 chunk", r.timed(shared_of(r, "all_gather", shares, tensors, causal=True, chunks=1), rounds))
        if documents:
            r.keep("packed, balance", max(shares.work()) / (sum(shares.work()) / r.n))
        del tensors
    return 0


def run_torch(r, o):
    """Its keys and values have all the query heads: it takes no others."""
    torch = r.torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh = init_device_mesh("cuda", (r.n,))
    for name, rows, documents, heads, kv_heads, hdim in speed_shapes(r)[:2]:
        q, k, v, g = (t.transpose(1, 2) for t in inputs_of(r, rows, heads, kv_heads, hdim))
        k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
        buffers = [t.contiguous() for t in (q, k, v, g)]
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION]), context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4):
            q, k, v, g = buffers
            for t in (q, k, v):
                t.requires_grad_()
            r.keep(f"{name}, torch", r.timed(lambda: (torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), g), 3))
            for t in (q, k, v):
                t.requires_grad_(False)
        del buffers, q, k, v, g
    return 0


def rank_main(o):
    r = Ranks(o)
    code = {"equal": run_equal, "speed": run_speed, "torch": run_torch}[o.part](r, o)
    r.keep("ended", True)
    r.dist.barrier()
    r.dist.destroy_process_group()
    return code


# ---- tenants ---------------------------------------------------------------------------------


def tenant_main(o):
    """Computes on one device through the daemon, every result checked, until a line comes; leaves its times, and what failed."""
    import numpy as np

    import fmha

    device = fmha.default_client().device(o.device)
    draw = np.random.default_rng(7)  # the same problem for all: equal devices need its kernels once
    size = (1, 128, 4, 32) if o.cpu else (1, 512, 8, 64)
    q, k, v = (draw.standard_normal(size).astype(np.float16) for _ in range(3))
    want = fmha.attention(q, k, v, causal=True, device=device).astype(np.float32)
    print(json.dumps({"sum": float(want.sum())}), flush=True)
    times, errors, wrong = [], [], 0
    import select

    while not select.select([sys.stdin], [], [], 0)[0]:
        start = time.perf_counter()
        try:
            o_ = fmha.attention(q, k, v, causal=True, device=device)
        except fmha.FmhaError as error:
            errors.append((time.time(), error.code))
            time.sleep(0.05)
            continue
        times.append((time.time(), (time.perf_counter() - start) * 1e3))
        wrong += not np.abs(o_.astype(np.float32) - want).max() < 4e-3
    pathlib.Path(o.out).write_text(json.dumps({"times": times, "errors": errors, "wrong": wrong}))
    return 0


def status_of(client):
    from fmha._lib import check, ffi, lib, new_error

    found, error = ffi.new("char **"), new_error()
    check(lib.fmha_client_status(client.handle, found, error), error)
    return json.loads(ffi.string(ffi.gc(found[0], lib.free) if hasattr(lib, "free") else found[0]))


def start_tenants(o, folder, devices):
    tenants = []
    for i in range(max(4, len(devices))):
        device = devices[i % len(devices)]
        out = folder / f"tenant{i}.json"
        command = [sys.executable, str(HERE / "cp.py"), "--part", "tenant", "--device", str(device), "--out", str(out)] + ["--cpu"] * o.cpu
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        tenants.append((device, out, process))
        if i < len(devices):  # one by one, so that what the next ones compile is counted
            process.first = process.stdout.readline()
    for _, _, process in tenants[len(devices):]:
        process.first = process.stdout.readline()
    return tenants


def run_tenants(o, folder):
    """{row: value} of the table."""
    import fmha

    client = fmha.default_client()
    backend = "cpu" if o.cpu else "cuda"
    devices = [d.index for d in client.devices() if d.backend == backend][: o.ranks]
    lost, built = devices[-1], []
    tenants, before = [], status_of(client)["front"]["compile"]["built"]
    try:
        tenants = start_tenants(o, folder, devices)
        built.append(status_of(client)["front"]["compile"]["built"] - before)
        marks = [time.time()]
        time.sleep(8 if not o.cpu else 3)
        marks.append(time.time())  # all quiet until here
        kills, until = 0, time.monotonic() + (30 if not o.cpu else 6)
        while time.monotonic() < until:
            state = next(d for d in status_of(client)["devices"] if d["device"] == lost)
            if state["state"] == "failed":
                break
            if state["state"] == "ready" and state["worker_pid"]:
                os.kill(state["worker_pid"], signal.SIGKILL)
                kills += 1
            time.sleep(0.2)
        marks.append(time.time())  # the device is gone, or comes back again and again
        time.sleep(5 if not o.cpu else 2)
        marks.append(time.time())
        found = []
        for device, out, process in tenants:
            process.stdin.write("\n")
            process.stdin.flush()
            process.wait(60)
            found.append((device, json.loads(out.read_text())))
    finally:
        for _, _, process in tenants:
            if process.poll() is None:
                process.kill()
            process.wait()
    others = [d for device, d in found if device != lost]
    mine = [d for device, d in found if device == lost]
    p50 = [statistics.median(t for d in others for at, t in d["times"] if a <= at < b) for a, b in zip(marks, marks[1:])]
    state = next(d for d in status_of(client)["devices"] if d["device"] == lost)
    return {
        "devices, tenants": f"{len(devices)}, {len(tenants)}", "kernels built for all": built[0],
        "equal first results": len({p.first for _, _, p in tenants}) == 1,
        "others' p50 ms: quiet, kills, after": [round(x, 3) for x in p50],
        "others' errors": sum(len(d["errors"]) for d in others), "wrong results": sum(d["wrong"] for _, d in found),
        "kills": kills, "lost device": state["state"], "its tenants' errors": sum(len(d["errors"]) for d in mine),
        "runs": sum(len(d["times"]) for _, d in found)}


# ---- all of it -------------------------------------------------------------------------------


def launch(o, part, folder, left):
    """What @part's ranks left, and what went wrong."""
    out, log = folder / f"{part}.json", folder / f"{part}.log"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(o.ranks), str(HERE / "cp.py"),
               "--part", part, "--out", str(out)] + ["--cpu"] * o.cpu
    environment = {**os.environ, "NCCL_NVLS_ENABLE": "0", "OMP_NUM_THREADS": "1" if o.cpu else "8", "PYTHONPATH": os.pathsep.join(sys.path)}
    problem = ""
    with open(log, "wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)
        try:
            if process.wait(max(5, min(LIMITS[part], left))):
                problem = f"ended with {process.returncode}"
        except subprocess.TimeoutExpired:
            problem = f"cut after {min(LIMITS[part], left):.0f} s"
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if problem:
        lines = log.read_text(errors="replace").splitlines()
        said = [line for line in lines if "Error" in line or "error:" in line][:4] or lines[-8:]
        problem += ": " + " | ".join(line[-200:] for line in said)
    return (json.loads(out.read_text()) if out.exists() else {}), problem


def table_equal(found):
    errors = {name: max(e) for name, e in found.items() if isinstance(e, list)}
    far = {n: e for n, e in errors.items() if not e <= 1}
    print(f"equal: {len(errors) - len(far)} of {len(errors)} within what is allowed (1.00); worst "
          + ", ".join(f"{n} {e:.2f}" for n, e in sorted(errors.items(), key=lambda x: -x[1])[:3]))
    for name, error in far.items():
        print(f"  FAIL {name}: {error:.2f}")
    return bool(errors) and not far


def table_speed(o, found, other):
    if "machine" in found:
        m = found["machine"]
        print(f"measured: alpha {m['alpha_us']:.1f} us, {m['GB_s']:.1f} GB/s a rank, copies {m['copy_GB_s']:.0f} GB/s, one rank's kernels "
              + ", ".join(f"{f / t / 1e12:.3g}" for f, t in m["forward"]) + " forward, "
              + ", ".join(f"{f / t / 1e12:.3g}" for f, t in m["backward"]) + " backward TFLOP/s")
    print(f"{'':10}{'':20}{'forward ms':>11}{'backward ms':>12}{'TFLOP/s a rank':>15}{'of one':>8}{'model/measured':>16}")
    names = [n.removesuffix(", flops") for n in found if n.endswith(", flops")]
    for name in names:
        flops, one = found[f"{name}, flops"], found.get(f"{name}, one")
        rows = [("one", one, 1)] + [(kind, found.get(f"{name}, {kind}"), o.ranks) for kind in KINDS]
        rows.insert(2, ("all_gather, 1 chunk", found.get(f"{name}, all_gather, 1 chunk"), o.ranks))
        rows.append(("torch", other.get(f"{name}, torch"), o.ranks))
        for kind, times, n in rows:
            if not times:
                continue
            said = found.get(f"{name}, {kind}, model")
            model = f"{said[0] / times[0]:.2f} {said[1] / times[1]:.2f}" if said else ""
            of_one = f"{sum(one) / n / sum(times):.3f}" if one else ""
            print(f"{name:10}{kind:20}{times[0] * 1e3:>11.2f}{times[1] * 1e3:>12.2f}{flops / sum(times) / n / 1e12:>15.4g}{of_one:>8}{model:>16}")
    base = next((found.get(f"{n}, one") for n in names), None)
    weak = {k: found[f"weak, {k}"] for k in KINDS if f"weak, {k}" in found}
    if base and weak:
        print("weak scaling (as much work a rank as one has at the first size): "
              + ", ".join(f"{k} {sum(base) / sum(t):.3f}" for k, t in weak.items()))
    if "packed, balance" in found:
        print(f"packed: the rank with most has {found['packed, balance']:.3f} of the average")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=0, help="default: the GPUs; 2 with --cpu")
    parser.add_argument("--seconds", type=float, default=360)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--cpu", action="store_true")
    for name in ("--part", "--out"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--device", type=int, help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.part:
        return tenant_main(o) if o.part == "tenant" else rank_main(o)
    import torch

    import fmha

    o.ranks = o.ranks or (2 if o.cpu else torch.cuda.device_count())
    if o.ranks < 2:
        print(f"{o.ranks} GPU: two are needed", file=sys.stderr)
        return 77
    folder, start, problems = pathlib.Path(tempfile.mkdtemp(prefix="cp-")), time.monotonic(), {}
    # What nobody asked for is not to be measured meanwhile.
    config = {"tuning": {"automatic": False}} | ({"devices": [{"backend": "cpu", "threads": 1}] * o.ranks} if o.cpu else {})
    fmha.start(config=config, timeout=60)
    found, wanted = {}, o.only.split(",")
    for part in (p for p in PARTS if p in wanted and not (p == "torch" and o.cpu)):
        began, left = time.monotonic(), o.seconds - (time.monotonic() - start)
        if part == "tenants":
            try:
                found[part] = run_tenants(o, folder)
            except Exception as error:  # the table is wanted all the same
                found[part], problems[part] = {}, f"{type(error).__name__}: {error}"
        else:
            found[part], problems[part] = launch(o, part, folder, left)
        print(f"{part}: {time.monotonic() - began:.0f} s{', ' + problems[part] if problems.get(part) else ''}", flush=True)
    name = "CPU" if o.cpu else torch.cuda.get_device_name(0)
    print(f"\n{o.ranks} x {name}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}, {time.monotonic() - start:.0f} s in all")
    good = not any(problems.get(p) for p in ("equal", "speed", "tenants"))
    if "equal" in found:
        good &= table_equal(found["equal"])
    if "speed" in found:
        table_speed(o, found["speed"], found.get("torch", {}))
    if "tenants" in found:
        t = found["tenants"]
        print("tenants: " + "; ".join(f"{k}: {v}" for k, v in t.items()))
        good &= bool(t) and t["wrong results"] == 0 and t["others' errors"] == 0 and t["equal first results"]
    print("passed" if good else "FAILED")
    fmha.stop()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
