#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Attention as models and servers ask for it, beside the best libraries that run on the card: cuDNN by PyTorch, FlashAttention-3 and
FlashAttention-4 where libraries.py finds them. On one card, in one process, through the Python package.

    FMHA_BIN=... [FMHA_PEERS=...] python3 tests/gpu/beside.py [--kind WORD ...] [--match TEXT] [--json FILE]
    FMHA_BIN=... [FMHA_PEERS=...] python3 tests/gpu/beside.py --first [--match TEXT]    the first call of a shape on a machine that has compiled nothing
    ncu --profile-from-start off ... python3 tests/gpu/beside.py --match TEXT --once     each way once, between the profiler's marks

Forward's and decode's times are of CUDA graphs, taken in turns, medians, with inputs rotated where caches would hold them; backward's are of
calls in a row. Ways are compared with each other, not with float64, which other tests do. A last table has the ratio to the fastest other.
"""
import argparse
import dataclasses
import json
import math
import os
import subprocess
import sys
import tempfile
import time

import torch

import gpu_timer
import libraries

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
import fmhad  # noqa: E402

CACHE_BYTES = 160 << 20  # inputs of all sets together are more than any cache
DIFFER = {"bf16": 2e-2, "e4m3": 8e-2, "backward": 4e-2}  # of the largest element


@dataclasses.dataclass
class Cell:
    kind: str
    batch: int
    heads: int
    heads_k: int
    rows: int
    keys: int = 0
    hdim: int = 128
    hdim_v: int = 0
    causal: bool = False
    page: int = 0
    least: int = 0  # keys of the shortest sequence, where they differ
    softcap: float = 0.0
    far: float = 1.0  # the deviation of Q: with 20 most tiles have scores beyond half of the cap
    approx: bool = False  # the cap may be FlashAttention-3's
    ones: int = 0  # sequences of one row in front of the others, packed
    dtype: str = "bf16"
    wanted: float = 1.05

    def __post_init__(self):
        self.keys, self.hdim_v = self.keys or self.rows, self.hdim_v or self.hdim

    def __str__(self):
        dim = str(self.hdim) if self.hdim == self.hdim_v else f"{self.hdim}/{self.hdim_v}"
        keys = f"{self.least} to {self.keys}" if self.least else str(self.keys)
        size = (f"{self.ones} x 1 and " if self.ones else "") + f"{self.batch} x {self.heads}/{self.heads_k} x {self.rows}"
        return (f"{self.kind} {size}" + ("" if self.keys == self.rows else f" over {keys}") + f" d{dim}"
                + (f" pages {self.page}" if self.page else "") + (" causal" if self.causal else " full" if self.rows > 1 else "")
                + (f" {'approximate ' * self.approx}cap{' far' if self.far > 1 else ''}" if self.softcap else "") + (f" {self.dtype}" if self.dtype != "bf16" else ""))

    def lengths(self):
        n, draw = self.batch + self.ones, torch.Generator().manual_seed(3)
        if not self.least:
            return [self.keys] * n
        return [self.keys, *torch.randint(self.least, self.keys + 1, (n - 1,), generator=draw).tolist()]

    def flop(self):
        rows = [1] * self.ones + [self.rows] * self.batch
        pairs = sum(r * n - (r * (r - 1) // 2 if self.causal else 0) for r, n in zip(rows, self.lengths()))
        return (5 if self.kind == "backward" else 2) * self.heads * pairs * (self.hdim + self.hdim_v)

    def bytes(self):
        return self.heads_k * sum(self.lengths()) * (self.hdim + self.hdim_v) * (1 if self.dtype == "e4m3" else 2)


def both(*args, **more):
    return [Cell(*args, causal=causal, **more) for causal in (False, True)]


CELLS = [
    *both("backward", 1, 64, 8, 6144), *both("backward", 1, 16, 16, 10000, hdim=64), *both("backward", 1, 24, 24, 4600, hdim=96),
    *both("backward", 1, 32, 8, 32768), *both("backward", 16, 16, 16, 768), *both("backward", 1, 16, 8, 8192, hdim=256),
    *both("backward", 2, 16, 16, 4096, hdim=192, hdim_v=128), *both("backward", 1, 32, 8, 5120), *both("backward", 4, 16, 4, 4096),
    *both("forward", 1, 20, 4, 5000), *both("forward", 1, 40, 8, 12000), *both("forward", 1, 32, 8, 32768),
    *both("forward", 1, 24, 24, 4600, hdim=96), *both("forward", 1, 16, 16, 10000, hdim=64), *both("forward", 1, 16, 8, 8192, hdim=256),
    *both("forward", 32, 16, 16, 384), *both("forward", 4, 32, 8, 2048),
    *(Cell("cap", 1, heads, 8, 8192, hdim=hdim, causal=True, softcap=50.0, far=far, approx=approx, wanted=1.0 if approx else 0.9)
      for approx in (False, True) for heads, hdim in ((32, 128), (16, 256)) for far in (1.0, 20.0)),
    Cell("chunk", 4, 32, 8, 2048, 16384, page=16, causal=True), Cell("chunk", 4, 32, 8, 512, 16384, page=64, causal=True),
    Cell("chunk", 1, 64, 8, 2048, 16384, page=16, causal=True), Cell("chunk", 1, 32, 8, 256, 16384, page=16, causal=True),
    Cell("mixed", 1, 32, 8, 512, 8192, least=4096, page=16, causal=True, ones=32),
    Cell("mixed", 1, 32, 8, 2048, 8192, least=4096, page=16, causal=True, ones=64),
    Cell("mixed", 4, 32, 8, 512, 4096, least=2048, page=16, causal=True, ones=4),
    Cell("mixed", 1, 28, 4, 1000, 6000, least=3000, page=16, causal=True, ones=16),
    *(Cell("decode", 16, 32, 8, 1, 12000, least=6000, page=page) for page in (16, 64, 256)),
    Cell("decode", 128, 32, 8, 1, 2048, least=1024, page=16), Cell("decode", 1, 32, 8, 1, 20000, page=16),
    *(Cell("decode", batch, 32, 8, 1, keys, wanted=1.0) for batch, keys in ((4, 30000), (32, 3000), (128, 1500), (256, 500), (1, 4000))),
    Cell("decode", 8, 64, 8, 4, 9000, causal=True), Cell("decode", 8, 64, 8, 4, 9000, page=64, causal=True),
    *both("forward", 2, 16, 16, 8192, dtype="e4m3"), *both("forward", 1, 32, 8, 16384, dtype="e4m3"),
    *both("forward", 1, 16, 8, 8192, hdim=256, dtype="e4m3"),
]


class Problem:
    """Sets of inputs, [batch, rows, heads, hdim], packed where sequences differ in rows, or K and V in pages."""

    def __init__(self, c):
        self.c, generator = c, torch.Generator("cuda").manual_seed(c.rows + c.keys)

        def normal(*shape, by=1.0):
            x = torch.randn(shape, device="cuda", generator=generator, dtype=torch.bfloat16) * by
            return x.to(torch.float8_e4m3fn) if c.dtype == "e4m3" else x

        lengths, n = c.lengths(), c.batch + c.ones
        rows = (c.ones + c.batch * c.rows,) if c.ones else (c.batch, c.rows)
        store = (-(-c.keys // c.page) * n, c.page) if c.page else (c.batch, c.keys)
        self.sets = [(normal(*rows, c.heads, c.hdim, by=c.far), normal(*store, c.heads_k, c.hdim), normal(*store, c.heads_k, c.hdim_v))
                     for _ in range(1 if c.kind == "backward" else max(1, min(8, -(-CACHE_BYTES // c.bytes()))))]
        self.d_o = normal(*rows, c.heads, c.hdim_v) if c.kind == "backward" else None
        self.used = torch.tensor(lengths, device="cuda", dtype=torch.int32) if c.page else None
        self.table = torch.randperm(store[0], device="cuda", generator=generator).int().view(n, -1) if c.page else None
        self.starts_q = torch.tensor([*range(c.ones), *range(c.ones, c.ones + c.batch * c.rows + 1, c.rows)], device="cuda", dtype=torch.int32)
        self.starts_k = torch.arange(c.batch + 1, device="cuda", dtype=torch.int32) * c.keys


# ---- ways: a function of q, k, v that returns O as Q lies, or None ----


def ours(p):
    import fmha
    import fmha.torch

    c, options = p.c, {}
    if c.page:
        options.update(block_table=p.table, seqlens_k=p.used, max_seqlen_k=c.keys)
    if c.ones:
        options.update(cu_seqlens_q=p.starts_q, max_seqlen_q=c.rows)
    if c.dtype == "e4m3":
        options["out"] = torch.empty(*p.sets[0][0].shape[:-1], c.hdim_v, device="cuda", dtype=torch.bfloat16)
    attend = fmha.torch.attention if c.kind == "backward" else fmha.attention
    return lambda q, k, v: attend(q, k, v, causal=c.causal, softcap=c.softcap, softcap_approx=c.approx, **options)


def flash_attention_3(p):
    c, attend = p.c, libraries.find_flash_attention_3()
    if not attend or c.kind == "backward" or c.hdim != c.hdim_v:
        return None
    options = dict(block_table=p.table, seqused_k=p.used) if c.page else dict(cu_seqlens_k=p.starts_k)
    if c.dtype == "e4m3":
        one = torch.ones(c.batch, c.heads_k, device="cuda")
        options.update(q_descale=one, k_descale=one, v_descale=one)

    def call(q, k, v):
        if not c.page:
            k, v = k.flatten(0, 1), v.flatten(0, 1)
        o = attend(q=q if c.ones else q.flatten(0, 1), k=k, v=v, max_seqlen_q=c.rows, cu_seqlens_q=p.starts_q, max_seqlen_k=c.keys,
                   causal=c.causal and c.rows > 1, softcap=c.softcap, fa_version=3, **options)
        return o.view(*q.shape[:-1], c.hdim_v)
    return call


def flash_attention_4(p):
    c, attend = p.c, libraries.find_flash_attention_4()
    if not attend or c.page or c.dtype == "e4m3" or c.kind in ("cap", "decode"):
        return None
    return lambda q, k, v: attend(q, k, v, causal=c.causal)


def cudnn(p):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    c = p.c
    if c.page or c.softcap or c.dtype == "e4m3" or c.causal and c.rows != c.keys:
        return None

    def call(q, k, v):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(
                *(x.transpose(1, 2) for x in (q, k, v)), is_causal=c.causal, enable_gqa=c.heads != c.heads_k).transpose(1, 2)
    return call


WAYS = {"ours": ours, "FA3": flash_attention_3, "FA4": flash_attention_4, "cuDNN": cudnn}


# ---- measuring ----


def launch_of(p, attend):
    """launch(i) of set i, and what it gives: O, or gradients of a forward that is kept."""
    if p.c.kind != "backward":
        return lambda i: attend(*p.sets[i % len(p.sets)])
    leaves = [x.detach().requires_grad_() for x in p.sets[0]]
    o = attend(*leaves)
    return lambda i: torch.autograd.grad(o, leaves, p.d_o, retain_graph=True)


def difference(found, wanted):
    found, wanted = ((x if isinstance(x, tuple) else (x,)) for x in (found, wanted))
    return max(((x.float() - y.float()).abs().max() / y.float().abs().max()).item() for x, y in zip(found, wanted))


def measure(c, once):
    """A line: {way: us}, how far they are apart."""
    p, launches, said, failed = Problem(c), {}, [], False
    for name, make in WAYS.items():
        try:
            attend = make(p)
            if attend is None:
                continue
            launch = launch_of(p, attend)
            result = launch(0)
            torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001: a way that lacks a cell is a column without a number
            said.append(f"{name}: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}")
            failed |= name == "ours"
            continue
        if name == "ours":
            base = result
        elif "ours" in launches:
            apart = difference(result, base)
            if not apart < DIFFER["backward" if c.kind == "backward" else c.dtype]:
                said.append(f"{name} differs by {apart:.1e}")
                failed = True
        launches[name] = launch
    if once:
        torch.cuda.profiler.start()
        for launch in launches.values():
            launch(0)
            torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        return dict(cell=str(c), us={}, said=said, failed=failed, wanted=c.wanted)
    if c.kind == "backward":
        us = {name: ms * 1e3 for name, ms in gpu_timer.compare(torch, {n: [lambda f=f: f(0)] for n, f in launches.items()}, 7).items()}
    else:
        us = gpu_timer.compare_graphs(torch, launches, max(len(p.sets), min(24, int(2e12 / c.flop()))), 7)
    return dict(cell=str(c), us=us, flop=c.flop(), said=said, failed=failed, wanted=c.wanted)


def text_of(line):
    us = line["us"]
    return line["cell"] + ": " + ", ".join(f"{n} {t:.1f} us ({line['flop'] / t / 1e6:.0f})" for n, t in us.items()) + "".join(
        f"; {x}" for x in line["said"])


def print_table(lines):
    print("\n| | ours, us | best other | ratio | wanted |\n|--|--|--|--|--|")
    for line in lines:
        us = dict(line["us"])
        mine = us.pop("ours", math.nan)
        best = min(us, key=us.get, default=None)
        print(f"| {line['cell']} | {mine:.1f} | " + (f"{best} {us[best]:.1f} | {us[best] / mine:.2f}" if best else "- | -")
              + f" | {line['wanted']:.2f} |")


# ---- first calls ----

FIRST = [Cell("forward", 2, 16, 16, 2048, causal=True), Cell("backward", 1, 32, 8, 4096, causal=True)]


def first_call(index):
    """Seconds of one way's first call in this process, all else imported and warm, once a line has come that says to go on: what
    several processes import, they may at the same time."""
    number, way = index.split(",")
    p = Problem(FIRST[int(number)])
    attend = WAYS[way](p)
    torch.cuda.synchronize()
    sys.stdin.readline()
    if attend is None:
        return print("nan")
    if way == "ours":
        import fmha

        fmha.start(config={"tuning": {"automatic": False}, "compile": {
            "cache": os.environ["FMHA_FIRST_CACHE"], "library_path": os.environ.get("LD_LIBRARY_PATH", "/usr/lib"),
            **({"layer": os.environ["FMHA_FIRST_PACK"]} if os.path.exists(os.environ["FMHA_FIRST_PACK"]) else {})}}, timeout=60)
        import fmha.torch
        tiny = torch.zeros(1, 64, 1, 64, device="cuda", dtype=torch.float16)
        fmha.attention(tiny, tiny, tiny)  # the service has opened its device
    torch.cuda.synchronize()
    begin = time.perf_counter()
    launch_of(p, attend)(0)
    torch.cuda.synchronize()
    return print(f"{time.perf_counter() - begin:.2f}")


def start_first_call(number, way, **environment):
    return subprocess.Popen([sys.executable, __file__, "--first-call", f"{number},{way}"], env={**os.environ, **environment},
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def said_by(process):
    """What a process says of its first call, which it makes now."""
    out, errors = process.communicate("\n", timeout=60)
    return out.split()[-1] if process.returncode == 0 and out.split() else errors[-200:]


def first_calls(match):
    """All processes are there from the beginning, and call one after the other."""
    print("first call, s, cold | again from the cache | from a pack")
    major, minor = torch.cuda.get_device_capability()
    with tempfile.TemporaryDirectory() as folder:
        cells = [(number, c, os.path.join(folder, str(number))) for number, c in enumerate(FIRST) if match in str(c)]
        started = {}
        for number, _, place in cells:
            ours = [start_first_call(number, "ours", FMHA_FIRST_CACHE=f"{place}-{cache}", FMHA_FIRST_PACK=f"{place}-{pack}")
                    for cache, pack in (("cache", "none"), ("cache", "none"), ("own", "pack"))]
            started[number] = ours, start_first_call(number, "FA4")
        for number, c, place in cells:
            (cold, again, packed), theirs = started[number]
            said = [said_by(cold), said_by(again)]
            fmhad.write_pack(f"{place}-cache", f"sm_{major}{minor}a", f"{place}-pack")
            print(f"{c}: ours {' | '.join([*said, said_by(packed)])}, FA4 {said_by(theirs)}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", nargs="*", help="backward, forward, cap, chunk, mixed, decode")
    parser.add_argument("--match", default="", help="cells with this in their names")
    parser.add_argument("--json")
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no cell begins later")
    parser.add_argument("--first", action="store_true")
    parser.add_argument("--first-call", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.first_call:
        return first_call(a.first_call)
    if a.first:
        return first_calls(a.match)
    lines, begin = [], time.monotonic()
    for c in CELLS:
        if a.match not in str(c) or a.kind and c.kind not in a.kind or time.monotonic() - begin > a.seconds:
            continue
        lines.append(measure(c, a.once))
        print(text_of(lines[-1]), flush=True)
        torch.cuda.empty_cache()
        if a.json:
            with open(a.json, "w") as file:
                json.dump(dict(card=torch.cuda.get_device_name(), lines=lines), file)
    print_table(lines)
    return sum(line["failed"] for line in lines) > 0


if __name__ == "__main__":
    sys.exit(main())
