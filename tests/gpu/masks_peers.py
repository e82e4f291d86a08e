#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Every builder of fmha.masks beside torch's flex_attention, on one card and in one process; documents beside themselves packed, too.

    FMHA_BIN=... python3 tests/gpu/masks_peers.py [--seconds 900] [--only WORD ...] [--ways ours,flex] [--ahead] [--cache DIR]
    FMHA_BIN=... python3 tests/gpu/masks_peers.py --race 20    instead: forward and backward for so many seconds beside a writer of the mask
    FMHA_BIN=... python3 tests/gpu/masks_peers.py --device cpu --shrink 32       whether it runs at all; flex_attention without a compiler

64 heads on 8 of 128, bfloat16. Times are medians, taken in turns, of calls from Python (trees, forward: of CUDA graphs); what is made
of a mask ahead, BlockMask and intervals, is not in them. TFLOP/s are of the pairs that are seen: 4 a pair, head and dimension forward, 10
backward. Errors are of the first KV head and all that share it, against float64: of O, and of gradients as a share of the
largest. What takes longer than its share of time, or fails, is a line without numbers. --ahead: every builder has a process of its own.
What is compiled they all compile at once, then they measure one after the other. --cache: fmhad's compiled kernels, kept.
"""
import argparse
import collections
import contextlib
import fcntl
import functools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np
import torch

import gpu_timer

HEADS, KV_HEADS, HDIM = 64, 8, 128
TILE = 128
CASE_SECONDS = 150  # at most
LIMIT_O, LIMIT_GRADIENT = 2e-2, 2e-2

# make(): (one of fmha.masks, torch's mask_mod, BlockMask) of so many rows and keys; cu_seqlens: where those are documents
Case = collections.namedtuple("Case", "name batch rows keys make cu_seqlens", defaults=[None])


def index(values, device):
    return torch.as_tensor(np.asarray(values), device=device)


# ---- one function a builder: sizes -> Case ----


def documents(mean, causal):
    def case(rows, device):
        rng = np.random.default_rng(mean)
        lengths = []
        while sum(lengths) < rows:  # as texts are: many short ones, some long
            lengths.append(min(int(rng.lognormal(math.log(mean) - 0.32, 0.8)) + 16, rows - sum(lengths)))
        starts = np.concatenate([[0], np.cumsum(lengths)])
        document = index(np.repeat(np.arange(len(lengths)), lengths), device)

        def seen(b, h, i, j):
            same = document[i] == document[j]
            return same & (j <= i) if causal else same

        return Case(f"document, mean {rows // len(lengths)}{', causal' if causal else ''}", 1, rows, rows,
                    lambda masks: (masks.document_mask(starts, causal=causal), seen), starts)
    return case


def prefix_lm(rows, device):
    prefixes = [rows // 4, rows // 2]
    those = index(prefixes, device)
    return Case("prefix_lm, a quarter and half", 2, rows, rows,
                lambda masks: (masks.prefix_lm(prefixes, rows), lambda b, h, i, j: (j < those[b]) | (j <= i)))


def sliding(left):
    def case(rows, device):
        span = min(left, rows // 4)
        return Case(f"sliding, {span}", 1, rows, rows,
                    lambda masks: (masks.sliding(span, 0, rows), lambda b, h, i, j: (j <= i) & (i - j <= span)))
    return case


def chunked(rows, device):
    chunk = rows // 2
    return Case(f"chunked, {chunk}", 1, rows, rows,
                lambda masks: (masks.chunked(chunk, rows), lambda b, h, i, j: (j <= i) & (i // chunk == j // chunk)))


def shared_question(rows, device):
    question = rows // 4
    answers = [(rows - question) // 8 + (-1) ** n * rows // 64 for n in range(7)]
    answers.append(rows - question - sum(answers))
    answer = index(np.repeat(np.arange(9), [question, *answers]), device)
    return Case("shared_question, 8 answers", 1, rows, rows, lambda masks: (
        masks.shared_question(question, answers), lambda b, h, i, j: (j <= i) & ((j < question) | (answer[i] == answer[j]))))


def image_spans(rows, device):
    size = rows // 32
    spans = [(begin, begin + size) for begin in range(size // 3, rows - size, rows // 8)]
    image = np.full(rows, -1)
    for n, (begin, end) in enumerate(spans):
        image[begin:end] = n
    image = index(image, device)
    return Case(f"image_spans, 8 of {size}", 1, rows, rows, lambda masks: (
        masks.image_spans(spans, rows), lambda b, h, i, j: (j <= i) | ((image[i] == image[j]) & (image[i] >= 0))))


def tree(sequences, tokens):
    def case(context, device):
        rng = np.random.default_rng(tokens)
        parents = np.array([-1, *(rng.integers(max(-1, n // 2 - 4), n) for n in range(1, tokens))])
        seen = np.zeros((tokens, tokens), bool)
        for i, parent in enumerate(parents):
            seen[i] = seen[parent] if parent >= 0 else False
            seen[i, i] = True
        ancestors = index(seen, device)
        return Case(f"tree, {tokens} behind {context}", sequences, tokens, context + tokens, lambda masks: (
            masks.tree(parents, context), lambda b, h, i, j: (j < context) | ancestors[i, (j - context).clamp(0, tokens - 1)]))
    return case


def first_neighbour(at, kernel, length):
    return (at - kernel // 2).clamp(0, length - kernel)


def natten_1d(rows, device):
    kernel = rows // 16 + 1

    def seen(b, h, i, j):
        first = first_neighbour(i, kernel, rows)
        return (j >= first) & (j < first + kernel)

    return Case(f"natten_1d, {kernel}", 1, rows, rows, lambda masks: (masks.natten_1d(rows, kernel), seen))


def natten_2d(rows, device):
    side = math.isqrt(rows)
    kernel = side // 8 + 1

    def seen(b, h, i, j):
        y, x = first_neighbour(i // side, kernel, side), first_neighbour(i % side, kernel, side)
        return (j // side >= y) & (j // side < y + kernel) & (j % side >= x) & (j % side < x + kernel)

    return Case(f"natten_2d, {side} x {side}, {kernel} x {kernel}", 1, side * side, side * side,
                lambda masks: (masks.natten_2d(side, side, (kernel, kernel)), seen))


def from_block_mask(rows, device):
    """As BigBird: all see the first keys, their neighbours, and some blocks by chance."""
    rng = np.random.default_rng(0)
    size = rows // 64
    chosen = index(rng.random((64, 64)) < 0.06, device)

    def seen(b, h, i, j):
        return (j <= i) & ((j < size) | (i - j < 2 * size) | chosen[i // size, j // size])

    def make(masks):
        from torch.nn.attention.flex_attention import create_block_mask

        return masks.from_block_mask(create_block_mask(seen, None, None, rows, rows, device=device)), seen

    return Case("from_block_mask, BigBird", 1, rows, rows, make)


CASES = [
    (documents(2048, True), 32768), (documents(2048, False), 32768), (documents(512, True), 32768), (prefix_lm, 8192),
    (sliding(1024), 16384), (chunked, 16384), (shared_question, 16384), (image_spans, 8192), (tree(32, 64), 8192), (tree(8, 256), 4096),
    (natten_1d, 16384), (natten_2d, 16384), (from_block_mask, 8192),
]


# ---- what is compared ----


def count_tiles(seen):
    """Of 128 x 128, in which something is seen."""
    whole = torch.nn.functional.pad(seen, (0, -seen.shape[1] % TILE, 0, -seen.shape[0] % TILE))
    return int(whole.unflatten(1, (-1, TILE)).unflatten(0, (-1, TILE)).any(3).any(1).sum())


class Problem:
    """Leaves [batch, rows, heads, hdim], and as torch's function wants them, with heads before rows."""

    def __init__(self, case, device):
        self.case, self.device = case, device
        generator = torch.Generator(device).manual_seed(case.rows + case.keys)

        def normal(rows, heads):
            return torch.randn(case.batch, rows, heads, HDIM, device=device, generator=generator).to(torch.bfloat16)

        self.inputs = [normal(case.rows, HEADS), normal(case.keys, KV_HEADS), normal(case.keys, KV_HEADS)]
        self.d_o = normal(case.rows, HEADS)
        import fmha

        self.mask, self.seen = case.make(fmha.masks)
        self.pairs = self.tiles = 0
        for b in range(case.batch):
            for part in self.visible(b):
                self.pairs += int(part.sum())
                self.tiles += count_tiles(part)

    def visible(self, b, step=1024):
        """What the batch entry's rows see by torch's function, in slices; head 0's, which is like all others."""
        zero, j = torch.zeros((), device=self.device, dtype=torch.int64), torch.arange(self.case.keys, device=self.device)[None]
        for first in range(0, self.case.rows, step):
            i = torch.arange(first, min(first + step, self.case.rows), device=self.device)[:, None]
            yield self.seen(zero + b, zero, i, j).expand(len(i), self.case.keys)

    def flop(self, backward):
        return (10 if backward else 4) * HEADS * HDIM * self.pairs

    @functools.cached_property
    def exact(self):
        """O, dQ [rows, heads that share a KV head, hdim], dK, dV [keys, hdim] of the first batch entry and KV head, in float64."""
        group, scale = HEADS // KV_HEADS, 1 / math.sqrt(HDIM)
        q, d_o = self.inputs[0][0, :, :group].double(), self.d_o[0, :, :group].double()
        k, v = (x[0, :, 0].double() for x in self.inputs[1:])
        o, dq, dk, dv = torch.zeros_like(q), torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        first = 0
        for seen in self.visible(0):
            rows = slice(first, first + len(seen))
            first += len(seen)
            for h in range(group):
                p = (q[rows, h] @ k.T * scale).masked_fill_(~seen, -math.inf).softmax(-1)
                o[rows, h] = p @ v
                dv += p.T @ d_o[rows, h]
                ds = p * (d_o[rows, h] @ v.T - (d_o[rows, h] * o[rows, h]).sum(-1, keepdim=True))
                dq[rows, h] = ds @ k * scale
                dk += ds.T @ q[rows, h] * scale
        return o, dq, dk, dv

    def errors(self, o, gradients):
        """Of O; the worst of gradients, as shares of their largest. Both as they are with rows before heads."""
        group = HEADS // KV_HEADS
        exact_o, *exact = self.exact
        of_o = (o[0, :, :group].double() - exact_o).abs().max().item()
        if gradients is None:
            return of_o, None
        found = [gradients[0][0, :, :group], gradients[1][0, :, 0], gradients[2][0, :, 0]]
        return of_o, max(((x.double() - y).abs().max() / y.abs().max()).item() for x, y in zip(found, exact))


class Side:
    """One way: forward(), backward() of a forward that is kept."""

    def __init__(self, inputs, d_o, attend, has_backward=True):
        self.inputs, self.d_o = [x.detach().requires_grad_(has_backward) for x in inputs], d_o
        self.attend = attend
        self.o = self.gradients = None

    def forward(self):
        return self.attend(*self.inputs)

    def forward_alone(self):
        with torch.no_grad():
            return self.attend(*self.inputs)

    def backward(self):
        return torch.autograd.grad(self.o, self.inputs, self.d_o, retain_graph=True)


def ours(p):
    import fmha.torch

    return Side(p.inputs, p.d_o, lambda q, k, v: fmha.torch.attention(q, k, v, mask=p.mask)), lambda x: x


def packed(p):
    import fmha.torch

    if p.case.cu_seqlens is None:
        return None
    starts = index(p.case.cu_seqlens, p.device).int()
    longest = int(np.diff(p.case.cu_seqlens).max())
    return Side([x[0] for x in p.inputs], p.d_o[0], lambda q, k, v: fmha.torch.attention(
        q, k, v, causal="causal" in p.case.name, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=longest,
        max_seqlen_k=longest)), lambda x: x[None]


def flex(p):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # Without a batch entry of its own a mask is made once for all.
    batch = p.case.batch if p.case.name.startswith("prefix_lm") else None
    with by_itself(p.device):
        block_mask = create_block_mask(p.seen, batch, None, p.case.rows, p.case.keys, device=p.device)
    if p.device == "cuda":
        torch._dynamo.reset()
        attend = torch.compile(flex_attention, dynamic=False)
    else:
        attend = flex_attention

    def swap(x):
        return x.transpose(1, 2)

    return Side([swap(x).contiguous() for x in p.inputs], swap(p.d_o).contiguous(),
                lambda q, k, v: attend(q, k, v, block_mask=block_mask, enable_gqa=True), p.device == "cuda"), swap


WAYS = {"ours": ours, "packed": packed, "flex": flex}


# ---- measuring ----


def said(error):
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0][:160] if lines else ''}"


def compare(functions, device):
    """{name: function} -> {name: ms}."""
    if device == "cuda":
        return gpu_timer.compare(torch, {name: [f] for name, f in functions.items()}, 11)
    times = {name: [] for name in functions}
    for _ in range(2):
        for name, f in functions.items():
            begin = time.perf_counter()
            f()
            times[name].append((time.perf_counter() - begin) * 1e3)
    return {name: min(t) for name, t in times.items()}


def compare_forward(problem, sides):
    if problem.device == "cuda" and problem.case.name.startswith("tree"):  # as serving has them, and too short for Python
        functions = {name: lambda i, side=side: side.forward_alone() for name, side in sides.items()}
        return {name: us / 1e3 for name, us in gpu_timer.compare_graphs(torch, functions, 5).items()}
    return compare({name: side.forward for name, side in sides.items()}, problem.device)


TURNS = None  # a file that one of several processes locks while it needs much memory


@contextlib.contextmanager
def by_itself(device):
    if not TURNS:
        yield
        return
    with open(TURNS, "w", encoding="ascii") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
        if device == "cuda":
            torch.cuda.empty_cache()


def attempt(what, f, *args):
    try:
        return f(*args)
    except TimeoutError as error:
        if not TURNS:
            raise
        print(f"  {what}: {said(error)}", file=sys.stderr, flush=True)
    except Exception as error:  # noqa: BLE001: a way that lacks a case is a column without a number
        print(f"  {what}: {said(error)}", file=sys.stderr, flush=True)
    return None


def measure(case, device, row, ways=WAYS, wait=lambda: None):
    """Fills @row, {column: number}. wait(): before times are taken."""
    with by_itself(device):
        p = Problem(case, device)
    row["seen"] = p.pairs / (case.batch * case.rows * case.keys)
    row["tiles"] = p.tiles * TILE * TILE / p.pairs
    row["as"] = type(p.mask).__name__.removesuffix("Mask").lower()
    sides, with_gradients = {}, {}
    for name in ways:
        made = attempt(name, WAYS[name], p)
        if made is None:
            continue
        side, turned = made
        side.o = attempt(f"{name}, forward", side.forward)
        if side.o is None:
            continue
        sides[name] = side
        found = attempt(f"{name}, backward", side.backward) if side.o.requires_grad else None
        if found is not None:
            with_gradients[name] = side
        with by_itself(device):
            row[f"{name} error"], row[f"{name} gradients"] = p.errors(turned(side.o), found and [turned(x) for x in found])
        del found
    wait()
    for backward, these in ((False, sides), (True, with_gradients)):
        if not these:
            continue
        times = attempt("times", *((compare, {n: s.backward for n, s in these.items()}, device) if backward
                                   else (compare_forward, p, these)))
        for name, ms in (times or {}).items():
            row[f"{name} {'bwd' if backward else 'fwd'}"] = p.flop(backward) / ms / 1e9


def race(seconds):
    """Rounds beside a writer of the endpoints end, whatever they give; a round behind them is right. Returns whether it is not."""
    p = Problem(documents(512, True)(8192, "cuda"), "cuda")
    side, _ = ours(p)
    data, writer, rounds = p.mask.beside(p.inputs[0]), torch.cuda.Stream(), 0
    kept, end = data.clone(), time.monotonic() + seconds
    while time.monotonic() < end:
        with torch.cuda.stream(writer):
            for _ in range(50):
                data.random_(-100, p.case.keys + 100)
                data.copy_(kept)
                data.random_(-2 ** 31, 2 ** 31 - 1)
        for _ in range(4):
            side.o = side.forward()
            side.backward()
        rounds += 4
        torch.cuda.synchronize()
    data.copy_(kept)
    torch.cuda.synchronize()
    side.o = side.forward()
    errors = p.errors(side.o, side.backward())
    print(f"{rounds} rounds beside a writer; behind them errors of O {errors[0]:.0e}, of gradients {errors[1]:.0e}", flush=True)
    return not (errors[0] <= LIMIT_O and errors[1] <= LIMIT_GRADIENT)


def measure_side_by_side(cases, arguments, end):
    """All compile at once, which leaves half of the time to measure one after the other. Returns the rows."""
    rows, environment = [], os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    begin = time.monotonic()
    with tempfile.NamedTemporaryFile() as turns:
        running = [subprocess.Popen([sys.executable, __file__, *arguments, "--child", case.name, "--turns", turns.name], env=environment,
                                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for case in cases]
        last = threading.Timer(end - begin, lambda: [process.kill() for process in running])
        last.start()
        n_ready = sum("ready\n" in iter(process.stdout.readline, "") for process in running)
        print(f"ready: {n_ready} of {len(cases)}, {time.monotonic() - begin:.0f} s", flush=True)
        for case, process in zip(cases, running):
            row = {"name": case.name, "size": size_of(case), "skipped": True}
            begin = time.monotonic()
            for line in process.communicate("go\n")[0].splitlines():
                if line.startswith("{"):
                    row = json.loads(line)
                else:
                    print(line, flush=True)
            rows.append(row)
            tell(row, begin)
        last.cancel()
    return rows


def measure_as_child(case, device, ways, seconds):
    """One of those: half of the time is there to compile."""
    row = {"name": case.name, "size": size_of(case)}

    def wait():
        signal.setitimer(signal.ITIMER_REAL, 0)
        print("ready", flush=True)
        sys.stdin.readline()

    signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    measure(case, device, row, ways, wait)
    print(json.dumps(row), flush=True)


def size_of(case):
    return f"{case.batch} x {case.rows} x {case.keys}"


def tell(row, begin):
    print(f"{row['name']}: {time.monotonic() - begin:.0f} s, "
          + ", ".join(f"{k} {v:.3g}" for k, v in row.items() if isinstance(v, float)), flush=True)


def is_wrong(row):
    return "ours error" not in row or not row["ours error"] <= LIMIT_O or not (row.get("ours gradients") or 0) <= LIMIT_GRADIENT


def print_table(rows):
    def number(row, key, form="{:.0f}"):
        value = row.get(key)
        return "-" if value is None else form.format(value)

    def ratio(row, way, other):
        a, b = row.get(f"ours {way}"), row.get(f"{other} {way}")
        return f"{a / b:.2f}" if a and b else "-"

    def both(row, way, f):
        return f"{f(row, 'fwd', way)} / {f(row, 'bwd', way)}"

    def rate(row, _, way):
        return number(row, f"{way} fwd") + " / " + number(row, f"{way} bwd")

    def of_tiles(row):
        return " / ".join(number({way: row[way] * row["tiles"]}, way) if row.get(way) else "-" for way in ("ours fwd", "ours bwd"))

    table = [["builder", "size", "as", "visible", "ours fwd / bwd", "of tiles", "flex fwd / bwd", "ratio", "packed fwd / bwd", "ratio",
              "error O / gradients", "flex's"]]
    for row in rows:
        table.append([row["name"], row["size"], row.get("as", "-"), number(row, "seen", "{:.1%}"), rate(row, "", "ours"), of_tiles(row),
                      rate(row, "", "flex"), both(row, "flex", ratio), rate(row, "", "packed") if "packed fwd" in row else "",
                      both(row, "packed", ratio) if "packed fwd" in row else "",
                      *(number(row, f"{n} error", "{:.0e}") + " / " + number(row, f"{n} gradients", "{:.0e}") for n in ("ours", "flex"))])
    widths = [max(len(line[c]) for line in table) for c in range(len(table[0]))]
    print()
    for line in table:
        print("| " + " | ".join(x.ljust(w) for x, w in zip(line, widths)) + " |")
        if line is table[0]:
            print("|" + "--|" * len(widths))
    print(f"TFLOP/s of visible work, d128, 64/8 heads, bf16; of tiles: where all of a tile of {TILE} x {TILE} counts of which something is seen",
          flush=True)


def on_alarm(signal_number, frame):
    raise TimeoutError("took longer than its share of time")


def main():
    global HEADS, KV_HEADS, TURNS
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=900, help="for all of it; 900")
    parser.add_argument("--only", nargs="*", help="builders with one of these words in their names")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--shrink", type=int, default=1, help="sequences so many times as short")
    parser.add_argument("--heads", type=int, nargs=2, help="64 8")
    parser.add_argument("--ways", default=",".join(WAYS), help="of ours, packed and flex")
    parser.add_argument("--cache", help="folder of fmhad's compiled kernels")
    parser.add_argument("--ahead", action="store_true", help="all builders compile first, side by side")
    parser.add_argument("--race", type=float, metavar="SECONDS", help="beside a writer of the mask")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--turns", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.heads:
        HEADS, KV_HEADS = args.heads
    end, rows = time.monotonic() + args.seconds, []
    cases = [make(size // args.shrink, args.device) for make, size in CASES]
    ways = args.ways.split(",")
    if args.child:
        TURNS = args.turns
        measure_as_child(next(case for case in cases if case.name == args.child), args.device, ways, args.seconds / 2)
        return 0
    if args.only:
        cases = [case for case in cases if any(word in case.name for word in args.only)]
    import fmha

    if "FMHAD_SOCKET" not in os.environ:
        fmha.start(config={"tuning": {"automatic": False}, "compile": {"library_path": os.environ.get("LD_LIBRARY_PATH", "/usr/lib")} | (
            {"cache": args.cache} if args.cache else {})}, timeout=60)

    if args.race:
        return int(race(args.race))
    if args.ahead:
        rows = measure_side_by_side(cases, [x for x in sys.argv[1:] if x != "--ahead"], end)
        print_table(rows)
        return sum(is_wrong(row) for row in rows if "skipped" not in row)

    def give_up():  # something hangs where no signal is looked at
        print_table(list(rows))
        os._exit(3)

    last = threading.Timer(args.seconds + 30, give_up)
    last.daemon = True
    last.start()
    signal.signal(signal.SIGALRM, on_alarm)
    for case in cases:
        row = {"name": case.name, "size": size_of(case)}
        rows.append(row)
        left = min(end - time.monotonic(), CASE_SECONDS)
        begin = time.monotonic()
        if left < 5:
            print(f"{case.name}: no time left", flush=True)
            row["skipped"] = True
            continue
        try:
            signal.setitimer(signal.ITIMER_REAL, left)
            measure(case, args.device, row, ways)
        except Exception as error:  # noqa: BLE001: the others are measured all the same
            print(f"  {case.name}: {said(error)}", flush=True)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            if args.device == "cuda":
                attempt("memory", torch.cuda.empty_cache)
        tell(row, begin)
    print_table(rows)
    last.cancel()
    return sum(is_wrong(row) for row in rows if "skipped" not in row)


if __name__ == "__main__":
    sys.exit(main())
