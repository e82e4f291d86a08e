#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Gradients of packed sequences on a GPU, launched locally (fmha_local.h), judged by PyTorch in float64.

    tests/gpu/packed.py [--random N] [--seed S] [--match TEXT]

A private daemon; FMHA_BUILD names the build folder. Problems of several sequences, tiles of rows and of keys: those whose dQ
was wrong where the prepare stage and the kernels did not agree about dq_acc, then N at random. Results and workspace are NaN
before, so that what is not written shows. Deterministic ones come last, each in a process of its own with a deadline, run
twice, and their bits are the worker's, too. Needs PyTorch and msgpack.
"""
import argparse
import concurrent.futures
import ctypes
import dataclasses
import os
import pathlib
import random
import subprocess
import sys

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "tests" / "lib"), str(HERE)]
import fmha_local  # noqa: E402
import fmha_wire  # noqa: E402
from service import HostDevice, daemon_of  # noqa: E402

BUILD = pathlib.Path(os.environ.get("FMHA_BUILD", ROOT / "build" / "release"))
DEADLINE = 90  # seconds of a process with deterministic problems: PyTorch's start, and a turn that does not come (tma.h)
GRADIENTS = ("dq", "dk", "dv")


@dataclasses.dataclass(frozen=True)
class Packed:
    hdim: int
    heads: tuple
    rows: tuple
    keys: tuple
    causal: bool = False
    window: tuple = ()
    dtype: str = "f16"
    deterministic: bool = False

    def __str__(self):
        mask = "causal" if self.causal else "window {} {}".format(*self.window) if self.window else "full"
        rows = ",".join(map(str, self.rows))
        keys = "" if self.keys == self.rows else " keys " + ",".join(map(str, self.keys))
        return f"{self.dtype} d{self.hdim} {self.heads[0]}/{self.heads[1]} {mask} {rows}{keys}" + " deterministic" * self.deterministic

    def starts(self):
        return [np.cumsum([0, *lengths]).astype(np.int32) for lengths in (self.rows, self.keys)]

    def band(self):
        return (-1, 0) if self.causal else self.window or (-1, -1)

    def shapes(self):
        q, k = (1, sum(self.rows), self.heads[0], self.hdim), (1, sum(self.keys), self.heads[1], self.hdim)
        return {"q": q, "k": k, "v": k, "o": q, "d_o": q, "dq": q, "dk": k, "dv": k, "lse": (1, self.heads[0], sum(self.rows))}

    def problem(self, op):
        """The wire's map: its tensors are packed."""
        roles = ("q", "k", "v", "o", "lse") if op == "forward" else self.shapes()
        tensors = {role: {"dtype": "f32" if role == "lse" else self.dtype} for role in roles}
        tensors |= {"seqstart_q": {"dtype": "i32"}, "seqstart_k": {"dtype": "i32"}}
        found = {"op": op, "mode": "group", "batch": len(self.rows), "nhead_q": self.heads[0], "nhead_k": self.heads[1],
                 "seqlen_q": max(self.rows), "seqlen_k": max(self.keys), "total_q": sum(self.rows), "total_k": sum(self.keys),
                 "hdim_q": self.hdim, "hdim_v": self.hdim, "tensors": tensors}
        if self.band() != (-1, -1):
            found |= {"mask": "bottom_right", "window_left": self.band()[0], "window_right": self.band()[1]}
        return found | ({"deterministic": True} if op == "backward" and self.deterministic else {})


def cases():
    """Those that were wrong, and beside them some that were right."""
    for rows in ((128, 128), (64,), (300, 20)):
        yield Packed(160, (2, 2), rows, rows, causal=rows != (300, 20))
    for hdim in (192, 224, 256):
        yield Packed(hdim, (6, 2), (500, 333), (500, 333))
    for hdim in (64, 96, 128):
        for heads in ((6, 6), (16, 4)):
            yield Packed(hdim, heads, (1024, 1024), (1023, 1023), causal=True)
    yield Packed(64, (6, 6), (512, 512), (256, 256), causal=True)
    yield Packed(64, (6, 6), (256, 256), (512, 512), causal=True)
    yield Packed(64, (6, 6), (1024, 1024), (1023, 1023), window=(100, 20))
    for hdim in (32, 64, 128, 160, 256):
        yield Packed(hdim, (6, 2), (500, 333, 700, 64), (500, 333, 700, 64), dtype="bf16")
    for hdim in (64, 128, 160, 256):
        yield Packed(hdim, (6, 2), (500, 333), (500, 333), causal=True, deterministic=True)
    yield Packed(64, (16, 4), (1024, 1024), (1023, 1023), causal=True, deterministic=True)
    yield Packed(160, (2, 2), (64,), (64,), causal=True, deterministic=True)


def random_cases(n, seed):
    pick = random.Random(seed)
    for _ in range(n):
        rows = tuple(pick.choice((0, 1, 63, 64, 65)) if pick.random() < 0.2 else pick.randint(1, 1100)
                     for _ in range(pick.randint(2, 5)))
        keys = rows if pick.random() < 0.5 else tuple(pick.randint(1, 1100) for _ in rows)
        window = (pick.randint(0, 400), pick.randint(0, 100)) if pick.random() < 0.2 else ()
        yield Packed(pick.choice((32, 64, 64, 96, 128, 128, 160, 192, 224, 256)), pick.choice(((2, 2), (6, 2), (4, 1), (16, 4))),
                     rows, keys, causal=not window and pick.random() < 0.6, window=window, dtype=pick.choice(("f16", "bf16")),
                     deterministic=pick.random() < 0.3)


# ---- the oracle ----


def gradients(torch, case, q, k, v, d_o):
    """(O, dQ, dK, dV) in the type of the tensors; a row that sees nothing gives 0."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    group, (left, right), outs = case.heads[0] // case.heads[1], case.band(), []
    for (q0, q1), (k0, k1) in zip(*([*zip(starts, starts[1:])] for starts in (x.tolist() for x in case.starts()))):
        s = torch.einsum("ihd,jhd->hij", q[0, q0:q1], k[0, k0:k1].repeat_interleave(group, 1)) * case.hdim ** -0.5
        at = torch.arange(q1 - q0, device=q.device)[:, None] + (k1 - k0) - (q1 - q0)
        j = torch.arange(k1 - k0, device=q.device)[None]
        seen = torch.ones_like(at + j, dtype=torch.bool)
        if left >= 0:
            seen &= j >= at - left
        if right >= 0:
            seen &= j <= at + right
        p = torch.softmax(s.masked_fill(~seen, float("-inf")), -1).masked_fill(~seen.any(-1, True), 0)
        outs.append(torch.einsum("hij,jhd->ihd", p.masked_fill(~seen, 0), v[0, k0:k1].repeat_interleave(group, 1)))
    o = torch.cat(outs)[None]
    return o.detach(), *torch.autograd.grad(o, (q, k, v), d_o)


def judge(torch, case, memory):
    """A sentence about what is wrong, or "", and each result's error as a share of what is allowed."""
    inputs = [memory[role] for role in ("q", "k", "v", "d_o")]
    want = gradients(torch, case, *(x.double() for x in inputs))
    plain = gradients(torch, case, *inputs)
    shares, wrong = {}, []
    for role, exact, rough in zip(("o", "dq", "dk", "dv"), want, plain):
        error = (memory[role].double() - exact).abs()
        unit = 2.0 ** (-10 if case.dtype == "f16" else -7)
        allowed = 3 * (rough.double() - exact).abs().nan_to_num(0).max() + unit * max(exact.abs().max().item(), 0.1)
        shares[role] = (error.max() / allowed).item()
        if not shares[role] <= 1:  # NaN is no number at all
            bad = (~(error <= allowed)).any(-1).any(-1)[0].nonzero()[:, 0]
            starts = case.starts()[role in ("dk", "dv")]
            first, last = (place_of(starts, int(bad[i])) for i in (0, -1))
            wrong.append(f"{role}: {len(bad)} rows from {first} to {last}, off by {error.nan_to_num(float('inf')).max():.2g}")
    return "; ".join(wrong), shares


def place_of(starts, row):
    """(sequence, row of it)"""
    b = int(np.searchsorted(starts, row, side="right")) - 1
    return b, row - int(starts[b])


# ---- runs ----


def memory_of(torch, case):
    """Tensors by role: inputs at random, all else NaN."""
    dtype = {"f16": torch.float16, "bf16": torch.bfloat16}[case.dtype]
    make, found = torch.Generator("cuda").manual_seed(7), {}
    for role, shape in case.shapes().items():
        kind = torch.float32 if role == "lse" else dtype
        found[role] = (torch.randn(shape, generator=make, device="cuda").to(kind) if role in ("q", "k", "v", "d_o")
                       else torch.full(shape, float("nan"), device="cuda", dtype=kind))
    for role, starts in zip(("seqstart_q", "seqstart_k"), case.starts()):
        found[role] = torch.from_numpy(starts).cuda()
    return found


def launch(torch, device, problem, memory):
    at = {role: memory[role].data_ptr() or 4096 for role in problem["tensors"]}
    plan = device.plan(problem, at)
    workspace = torch.full((max(plan.info.workspace_bytes, 1),), 0xFF, dtype=torch.uint8, device="cuda")
    plan.run(at, workspace.data_ptr(), torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    kernels = {launched.family.decode(): launched.kernel.decode() for launched in plan.launches()}
    plan.free()
    return kernels


def raw(torch, x):
    """Its bytes."""
    return x.cpu().contiguous().view(-1).view(torch.uint8).numpy()


def by_worker(torch, wire, problem, memory):
    """What the worker makes of the same inputs: the bytes of each result."""
    held, at, total = {role: raw(torch, memory[role]) for role in problem["tensors"]}, {}, 0
    for role, x in held.items():
        at[role], total = total, total + -(-x.nbytes // 256) * 256
    buffer = wire.buffer_create(total)
    views = {role: buffer.array("u8", (x.nbytes,), at[role]) for role, x in held.items()}
    try:
        for role, x in held.items():
            views[role][...] = x
        asked = {**problem, "tensors": {role: {**t, "buffer": buffer.id, "offset": at[role]} for role, t in problem["tensors"].items()}}
        plan = wire.plan(asked)["plan"]
        wire.run(plan)
        found = {role: views[role].copy() for role in GRADIENTS}
        wire.call("plan_release", {"plan": plan})
    finally:
        del views
        buffer.release()
    return found


def run_case(torch, device, wire, case):
    """Prints its line. Return: whether all was right."""
    memory = memory_of(torch, case)
    launch(torch, device, case.problem("forward"), memory)
    problem = case.problem("backward")
    kernels = launch(torch, device, problem, memory)
    wrong, shares = judge(torch, case, memory)
    if case.deterministic:
        bits = {role: raw(torch, memory[role]) for role in GRADIENTS}
        launch(torch, device, problem, memory)
        changed = [f"{role} again" for role in GRADIENTS if not np.array_equal(raw(torch, memory[role]), bits[role])]
        theirs = by_worker(torch, wire, problem, memory)
        changed += [f"{role} of the worker" for role in GRADIENTS if not np.array_equal(theirs[role], bits[role])]
        if changed:
            wrong = "; ".join(filter(None, [wrong, "other bits: " + ", ".join(changed)]))
    share = " ".join(f"{role} {x:.2f}" for role, x in shares.items())
    print(f"{'FAIL' if wrong else 'ok  '} {str(case):70} {share} {kernels.get('bwd_dq_dk_dv', '')} {wrong}", flush=True)
    return not wrong


def child(library, socket, found):
    import torch
    torch.zeros(1, device="cuda")
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    device = library.open(socket, 1, 600000)
    wire = fmha_wire.Client.connect(socket).open_device(1)
    HostDevice(wire)
    bad = sum(not run_case(torch, device, wire, case) for case in found)
    device.close()
    return min(bad, 100)


def warm(library, socket, found):
    """Every kernel compiled before anything has a deadline; a process that has loaded any libcuda.so.1 may plan."""
    ctypes.CDLL("libcuda.so.1")
    device = library.open(socket, 1, 600000)

    def plan(job):
        case, op = job
        problem = case.problem(op)
        device.plan(problem, {role: 4096 for role in problem["tensors"]}).free()

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(plan, [(case, op) for case in found for op in ("forward", "backward")]))
    device.close()
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--random", type=int, default=24, metavar="N", help="problems at random (default 24)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--match", default="", help="only cases whose line holds this")
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)  # warm, some or one of the deterministic ones; the socket
    options = parser.parse_args()
    found = [c for c in [*cases(), *random_cases(options.random, options.seed)] if options.match in str(c)]
    free, bound = [[c for c in found if c.deterministic == x] for x in (False, True)]
    if options.part:
        library, (part, socket) = fmha_local.Library(next(BUILD.rglob("libfmha_client.so.1"))), options.part
        if part == "warm":
            return warm(library, socket, found)
        return child(library, socket, free if part == "free" else [bound[int(part)]])
    command = [sys.executable, __file__, "--random", str(options.random), "--seed", str(options.seed), "--match", options.match]
    bad = 0
    with daemon_of("cuda") as daemon:
        def run(part, seconds):
            try:
                return subprocess.run([*command, "--part", part, daemon.socket], timeout=seconds, check=False).returncode
            except subprocess.TimeoutExpired:
                print(f"FAIL {part} ({bound[int(part)] if part.isdigit() else 'all'}): no end in {seconds} s", flush=True)
                return 1

        bad += run("warm", 600)
        bad += run("free", 600) if free else 0
        for i in range(len(bound)):
            bad += run(str(i), DEADLINE)
    print(f"{len(found)} problems of packed sequences, failed: {bad}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
