#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Local launch on a GPU: the same bits as through the service, in graphs, and what it costs.

    tests/gpu/local.py SOCKET DEVICE [--plan-only] [--no-times]

A daemon listens on SOCKET; FMHA_BUILD names the build folder. Needs PyTorch, but with --plan-only, which makes every
plan that the rest needs (and so fills the daemon's cache) in a process that has loaded any libcuda.so.1.
"""
import argparse
import concurrent.futures
import ctypes
import os
import pathlib
import subprocess
import sys
import time

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "tests" / "lib"), str(HERE)]
import fmha_local  # noqa: E402
import fmha_wire  # noqa: E402
from local_cases import Problem, problems  # noqa: E402
from service import HostDevice  # noqa: E402

BUILD = pathlib.Path(os.environ.get("FMHA_BUILD", ROOT / "build" / "release"))
CAUSAL = {"mask": "bottom_right", "window_right": 0}


class Case(Problem):
    """A problem, the shapes of its tensors, and what the integer ones hold."""

    def __init__(self, name, options, tensors, outputs, integers=None):
        super().__init__(name, **options)
        self.tensors, self.outputs = dict(tensors), outputs
        for role, values in (integers or {}).items():
            self.add_integers(role, values)


def attention(name, dtype, b, sq, sk, hq, hk, d, lse=True, integers=None, kv=None, rows=None, extra=None, **options):
    q = (b, sq, hq, d) if rows is None else (1, rows, hq, d)
    k = kv or (b, sk, hk, d)
    tensors = {"q": (dtype, q), "k": (dtype, k), "v": (dtype, k), "o": (dtype, q), **(extra or {})}
    if lse:
        tensors["lse"] = ("f32", (q[0], hq, q[1]))
    options = {"batch": b, "nhead_q": hq, "nhead_k": hk, "seqlen_q": sq, "seqlen_k": sk, "hdim_q": d, "hdim_v": d, **options}
    return Case(name, options, tensors, {"o", "lse", "randval"} | set(options.pop("inout", ())), integers)


def backward(name, dtype, b, sq, sk, hq, hk, d, integers=None, packed=None, extra=None, **options):
    q, k = ((b, sq, hq, d), (b, sk, hk, d)) if packed is None else ((1, packed[0], hq, d), (1, packed[1], hk, d))
    tensors = {role: (dtype, q) for role in ("q", "o", "d_o", "dq")} | {r: (dtype, k) for r in ("k", "v", "dk", "dv")}
    tensors |= {"lse": ("f32", (q[0], hq, q[1])), **(extra or {})}
    options = {"op": "backward", "batch": b, "nhead_q": hq, "nhead_k": hk, "seqlen_q": sq, "seqlen_k": sk, "hdim_q": d,
               "hdim_v": d, "deterministic": True, **options}
    return Case(name, options, tensors, {"dq", "dk", "dv", "dbias"}, integers)


GROUP = {"mode": "group", "total_q": 300, "total_k": 500}
STARTS = {"seqstart_q": [0, 130, 131, 300], "seqstart_k": [0, 200, 333, 500]}
PAGES = np.random.default_rng(7).permutation(64).reshape(2, 32)


def cases():
    yield attention("plain", "f16", 2, 128, 128, 4, 2, 64)
    yield attention("wide, causal", "bf16", 2, 300, 333, 8, 2, 128, **CAUSAL)
    yield attention("hopper", "bf16", 2, 1024, 1024, 16, 16, 128, **CAUSAL)
    yield attention("f32, window", "f32", 1, 70, 90, 2, 1, 40, mask="top_left", window_left=9, window_right=4, sink_tokens=3)
    yield attention("split", "bf16", 1, 1, 1000, 8, 2, 128, lse=False, n_splits=4)
    yield attention("lengths", "bf16", 2, 20, 400, 8, 2, 128, integers={"seqlen_k_per_batch": [400, 33]}, **CAUSAL)
    yield attention("packed", "bf16", 3, 170, 200, 4, 2, 128, rows=300, kv=(1, 500, 2, 128), integers=STARTS, **GROUP, **CAUSAL)
    yield attention("paged", "f16", 2, 1, 500, 8, 2, 128, lse=False, kv=(64, 16, 2, 128), page_size=16, n_pages=64,
                    max_blocks=32, integers={"block_table": PAGES, "seqlen_k_per_batch": [500, 77]})
    yield attention("page lists", "f16", 2, 9, 200, 8, 2, 128, rows=18, kv=(64, 16, 2, 128), mode="group", total_q=18,
                    page_size=16, n_pages=64, n_page_indices=20,
                    integers={"seqstart_q": [0, 9, 18], "kv_indptr": [0, 12, 20], "kv_page_indices": PAGES.ravel()[:20],
                              "kv_last_page_len": [8, 16]}, **CAUSAL)
    yield attention("append", "bf16", 2, 1, 256, 8, 2, 128, lse=False, seqlen_new=1, inout=("k", "v"),
                    extra={"k_new": ("bf16", (2, 1, 2, 128)), "v_new": ("bf16", (2, 1, 2, 128))},
                    integers={"seqlen_k_per_batch": [100, 255]}, **CAUSAL)
    yield attention("dropout", "bf16", 2, 100, 100, 4, 4, 64, dropout_p=0.2, dropout_seed=3, dropout_offset=5)
    yield attention("cap and bias", "f16", 1, 80, 80, 2, 2, 64, logits_soft_cap=20.0, extra={"bias": ("f16", (1, 2, 80, 80))})
    yield backward("backward", "bf16", 2, 150, 170, 4, 2, 128, **CAUSAL)
    yield backward("backward, hopper", "bf16", 1, 1024, 1024, 8, 8, 64)
    yield backward("backward, packed", "f16", 3, 170, 200, 4, 1, 64, integers=STARTS, packed=(300, 500), **GROUP, **CAUSAL)
    yield backward("backward, dropout", "f16", 1, 70, 90, 2, 2, 64, dropout_p=0.2, dropout_seed=3)


def by_service(device, case, contents):
    """What the outputs hold after a run of the worker's, on memory of the host's."""
    at, total = {}, 0
    for role, x in contents.items():
        at[role], total = total, total + -(-x.nbytes // 256) * 256
    buffer = device.buffer_create(total)
    views = {role: buffer.array("u8", (x.nbytes,), at[role]) for role, x in contents.items()}
    for role, x in contents.items():
        views[role][...] = x.reshape(-1).view(np.uint8)
    problem = case.problem()
    for role, tensor in problem["tensors"].items():
        tensor |= {"buffer": buffer.id, "offset": at[role]}
    try:
        plan = device.plan(problem)["plan"]
        device.run(plan)
        found = {role: views[role].tobytes() for role in contents}
        device.call("plan_release", {"plan": plan})
    finally:
        del views
        buffer.release()
    return found


class Memory:
    """Device memory of this process, through PyTorch."""

    def __init__(self, contents):
        import torch
        self.tensors = {r: torch.from_numpy(x.view(np.uint8).reshape(-1).copy()).cuda() for r, x in contents.items()}
        self.at = {r: t.data_ptr() or 4096 for r, t in self.tensors.items()}  # one without elements lies anywhere

    def bytes_of(self, role):
        return self.tensors[role].cpu().numpy().tobytes()

    def put(self, role, x):
        import torch
        self.tensors[role].copy_(torch.from_numpy(x.view(np.uint8).reshape(-1).copy()))


def judge(library, device, wire, case):
    """Return: what is wrong, "" when both ways gave the same bits, and the plan's families."""
    import torch
    contents = case.contents()
    try:
        want = by_service(wire, case, contents)
    except fmha_wire.WireError as refusal:  # then it is refused both ways
        try:
            device.plan(case.problem(), {role: 4096 for role in case.tensors}).free()
        except fmha_local.Failure as failure:
            same = (failure.code, failure.field) == (refusal.code, refusal.field)
            return "" if same else f"{failure} here, there {refusal}", f"refused: {refusal}"
        return f"the service says {refusal}", ""
    memory = Memory(contents)
    try:
        plan = device.plan(case.problem(), memory.at)
    except fmha_local.Failure as failure:
        return f"the service does it, here {failure}", ""
    workspace = torch.full((max(plan.info.workspace_bytes, 1),), 0xA5, dtype=torch.uint8, device="cuda")
    plan.run(memory.at, workspace.data_ptr(), torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    wrong = [r for r in contents if memory.bytes_of(r) != want[r]]
    changed = [r for r in case.outputs if r in contents and want[r] != contents[r].tobytes()]
    families = " + ".join(launch.family.decode() for launch in plan.launches())
    plan.free()
    return f"differ: {' '.join(wrong)}" if wrong else "" if changed else "nothing was written", families


def conformance(library, socket, number, found):
    wire = fmha_wire.Client.connect(socket).open_device(number)
    HostDevice(wire)
    device, bad, refused, n = library.open(socket, number, 60000), 0, 0, 0
    for case in found:
        wrong, families = judge(library, device, wire, case)
        bad += bool(wrong)
        refused += families.startswith("refused")
        n += 1
        if wrong or len(case.name) <= 20 or families.startswith("refused"):
            print(f"{'FAIL' if wrong else 'ok  '} {case.name:20} {wrong} {families}", flush=True)
    print(f"{n - bad} of {n} problems gave the same both ways; {refused} of them were refused", flush=True)
    device.close()
    return bad


def graphs(library, socket, number):
    """50 layers in a graph: the same bits as without, also with new lengths, and no slower than its kernels."""
    import torch
    device, bad = library.open(socket, number, 60000), 0
    for case in [c for c in cases() if c.name in ("packed", "dropout", "backward, packed")] + [
            attention("large", "bf16", 4, 2048, 2048, 16, 16, 128, **CAUSAL)]:
        layers = [Memory(case.contents(seed)) for seed in range(50)] if case.name != "large" else [Memory(case.contents())] * 50
        plan = device.plan(case.problem(), layers[0].at)
        workspace = torch.zeros(max(plan.info.workspace_bytes, 1), dtype=torch.uint8, device="cuda")
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        state = torch.tensor([11, 12], dtype=torch.int64, device="cuda")
        dropout = {} if case.name != "dropout" else {
            "dropout_seed": 0, "dropout_offset": 0, "dropout_seed_at": state.data_ptr(), "dropout_offset_at": state.data_ptr() + 8}

        def run_all():
            for memory in layers:
                plan.run(memory.at, workspace.data_ptr(), torch.cuda.current_stream().cuda_stream, **dropout)

        def outputs():
            torch.cuda.synchronize()
            return [memory.bytes_of(r) for memory in layers[:3] + layers[-1:] for r in sorted(case.outputs & set(memory.at))]

        def clear():  # rows that no sequence owns are not written
            for memory in layers:
                for r in case.outputs & set(memory.at):
                    memory.tensors[r].zero_()

        with torch.cuda.stream(stream):
            run_all()
            stream.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                run_all()
        same, before = [], None
        for turn in range(2):
            if turn and "seqstart_q" in case.integers:
                for memory in layers:
                    memory.put("seqstart_q", np.array([0, 10, 150, 290], np.int32))
            if turn:
                state += 100
            clear()
            run_all()
            want = outputs()
            clear()
            graph.replay()
            same.append(outputs() == want)
            if before is not None and (dropout or case.integers):
                same.append(want != before)
            before = want
        a, b, c = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        graph.replay()
        a.record()
        for _ in range(3):
            graph.replay()
        b.record()
        for _ in range(3):
            run_all()
        c.record()
        torch.cuda.synchronize()
        bad += not all(same)
        print(f"{'ok  ' if all(same) else 'FAIL'} graph of 50, {case.name:18} replay {a.elapsed_time(b) / 150 * 1e3:.1f} us a layer, "
              f"without {b.elapsed_time(c) / 150 * 1e3:.1f} us", flush=True)
    device.close()
    return bad


def loop(library, socket, number, seconds):
    """Runs one case again and again: prints runs a second, and whether each gave the same bits."""
    import torch
    case = next(c for c in cases() if c.name == "hopper")
    device, memory = library.open(socket, number, 60000), Memory(case.contents())
    plan, stream = device.plan(case.problem(), memory.at), torch.cuda.current_stream().cuda_stream
    plan.run(memory.at, None, stream)
    torch.cuda.synchronize()
    want, same, n, start = memory.bytes_of("o"), True, 0, time.monotonic()
    while time.monotonic() - start < seconds:
        for _ in range(50):
            plan.run(memory.at, None, stream)
        torch.cuda.synchronize()
        n += 50
    rate = n / (time.monotonic() - start)
    same = memory.bytes_of("o") == want
    print(f"{rate:.0f} {same}", flush=True)
    return 0 if same else 1


def shared(options):
    """Two processes at once, each in a context of its own, and one alone."""
    def run(n):
        command = [sys.executable, __file__, options.socket, str(options.device), "--loop", "3"]
        processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(n)]
        return [process.communicate()[0].split() for process in processes]

    (alone,), both = run(1), run(2)
    good = all(answer[1:] == ["True"] for answer in [alone, *both])
    print(f"{'ok  ' if good else 'FAIL'} alone {alone[0]} runs a second, two processes at once "
          f"{' and '.join(answer[0] for answer in both)}", flush=True)
    return not good


def plan_only(library, socket, number, parts):
    """Every plan, of the service's and of ours: addresses that are aligned are all it takes."""
    wire = fmha_wire.Client.connect(socket).open_device(number)
    HostDevice(wire)
    device = library.open(socket, number, 600000)
    extra = [attention(f"served {s}", "bf16", 1, s, s, 16, 16, 128, lse=False) for s in (512, 1024, 2048, 4096, 8192, 16384)]
    extra += [attention("large", "bf16", 4, 2048, 2048, 16, 16, 128, **CAUSAL), attention("bench", "f16", 1, 64, 64, 2, 2, 64, lse=False)]

    def one(case):
        start = time.time()
        try:
            plan = device.plan(case.problem(), {role: 4096 for role in case.tensors})
        except fmha_local.Failure as failure:
            print(f"{case.name} {failure}", flush=True)
            return
        print(f"{case.name:20} {time.time() - start:5.1f} s {' + '.join(launch.kernel.decode() for launch in plan.launches())}", flush=True)

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(one, [*cases(), *extra, *(problems() if "conformance" in parts else [])]))
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("socket")
    parser.add_argument("device", type=int)
    parser.add_argument("--plan-only", action="store_true")
    parser.add_argument("--parts", default="conformance,graphs,shared,times", help="what of it to run")
    parser.add_argument("--loop", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plan_only:
        ctypes.CDLL("libcuda.so.1")
    library = fmha_local.Library(next(BUILD.rglob("libfmha_client.so.1")))
    parts, bad = options.parts.split(","), 0
    if options.plan_only:
        return plan_only(library, options.socket, options.device, parts)
    import torch
    torch.zeros(1, device="cuda")
    if options.loop:
        return loop(library, options.socket, options.device, options.loop)
    if "conformance" in parts:
        bad += conformance(library, options.socket, options.device, [*cases(), *problems()])
    if "graphs" in parts:
        bad += graphs(library, options.socket, options.device)
    if "shared" in parts:
        bad += shared(options)
    if "times" in parts:
        bench = next(p for p in BUILD.rglob("bench_local") if p.is_file())
        for served in ([], [], ["served"]):  # a process each
            bad += subprocess.run([bench, options.socket, str(options.device), *served], check=False).returncode != 0
    print("failed:", bad)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
