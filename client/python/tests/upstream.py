#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""flash-attention's own tests/test_flash_attn.py (v2.8.3), cases drawn at random, with fmha.flash_attn in flash_attn's place.

    upstream.py [FILE] [--cases 300] [--seed YYYYMMDD] [--device cpu|cuda] [--jobs N] [--kernels K] [--seconds S]
                [--case-seconds S] [--only NAME ...] [--repeat NAME:INDEX ...] [--config FILE]

FILE, or $FLASH_ATTN_TESTS, is that file; nothing of it is kept here. Needed beside it: torch, einops and the fmha package of
$FMHA_BUILD (build/release), or one that is installed; no pytest. A daemon is started, unless FMHA_TEST_SOCKET names one.

Functions are drawn by the logarithm of how many cases they have, cases of one alike. On the CPU ("cuda" in the file becomes "cpu")
cases of more than --max-keys keys are not drawn, and those that ask for more than --max-gflop of attention are cut; their number is
printed. --kernels draws K settings of what a kernel is compiled for (type, head dim, mask, ...) first, and the cases' shapes
for each of them then. Each worker is a process: a case that ends it, or outlasts --case-seconds, is lost alone.

The last lines are a table, then each failure with its parameters and the word for --repeat. Exits with 1 when a case failed.

S_dmask: upstream stores exp(S - the maximum so far) of its kernel's blocks, and its test scales that; fmha.flash_attn stores
softmax(S). So normalize_flash_attn_S() is replaced by one that changes nothing. The sign says what was dropped in both.
"""
import argparse
import ast
import collections
import contextlib
import datetime
import inspect
import itertools
import json
import math
import os
import pathlib
import queue
import random
import select
import subprocess
import sys
import threading
import time
import traceback
import types

HERE = pathlib.Path(__file__).resolve()
BUILD = pathlib.Path(os.environ.get("FMHA_BUILD", HERE.parents[3] / "build/release"))
if (BUILD / "client/python/fmha/_abi.py").exists():
    sys.path.insert(0, str(BUILD / "client/python"))

# Parameters that no kernel is compiled for, by their names in the file.
SHAPES = {"seqlen", "seqlen_q", "seqlen_k", "swap_sq_sk", "mha_type", "kvpacked", "new_kv", "seqlen_new_eq_seqlen_q", "num_splits",
          "rotary_fraction", "rotary_interleaved", "has_leftpad", "has_batch_idx"}
# How often a test computes the same again, besides its first time.
AGAIN = {"test_flash_attn_race_condition": 250, "test_flash_attn_deterministic": 50, "test_flash_attn_varlen_deterministic": 50}


# ---- what the file imports ----


class Skipped(Exception):
    """pytest.skip(): a combination that the file does not test."""


class Cut(Exception):
    """More work than --max-gflop."""


def _skip(*_):
    raise Skipped


def _parametrize(names, values):
    def keep(function):
        axes = getattr(function, "axes", [])
        function.axes = [*axes, (names.split(","), [v if "," in names else (v,) for v in values])]
        return function

    return keep


def _stand_in_for_pytest():
    module = types.ModuleType("pytest")
    module.mark, module.skip = types.SimpleNamespace(parametrize=_parametrize), _skip
    return module


def apply_rotary_emb(x, cos, sin, interleaved=False, seqlen_offsets=0):
    """x [batch, rows, heads, hdim], row i rotated by the position seqlen_offsets[b] + i, as <fmha/base.h> has it."""
    import torch

    half = cos.shape[1]
    first = seqlen_offsets if isinstance(seqlen_offsets, torch.Tensor) else torch.full((len(x),), seqlen_offsets, device=x.device)
    at = (first[:, None] + torch.arange(x.shape[1], device=x.device)).clamp(max=len(cos) - 1)
    c, s = (t.double()[at][:, :, None] for t in (cos, sin))
    turning, rest = x[..., : 2 * half].double(), x[..., 2 * half :]
    a, b = (turning[..., ::2], turning[..., 1::2]) if interleaved else turning.chunk(2, -1)
    pair = (a * c - b * s, a * s + b * c)
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([turned.to(x.dtype), rest], -1)


def _limited(function, budget):
    """The function, raising Cut before a case's first call that is too much work."""
    from fmha import flash_attn

    signature = inspect.signature(function)

    def call(*args, **words):
        given = signature.bind(*args, **words).arguments
        budget.spend(given)
        return function(*args, **words)

    return call if function is not flash_attn.flash_attn_with_kvcache else function


class Budget:
    """flops that one case may ask for: 4 for each element of S and of a head, and 10 more for gradients."""

    def __init__(self, flops):
        self.flops, self.times = flops, 1

    def spend(self, given):
        tensors = [t for t in given.values() if hasattr(t, "dim") and t.dim() >= 3]
        q = tensors[0]
        packed = next((int(n) for name, n in given.items() if name in ("max_seqlen", "max_seqlen_k")), None)
        if packed is None:
            heads, hdim = q.shape[-2:]
            elements = q.shape[0] * q.shape[1] * heads * tensors[-1].shape[1]
        else:
            heads, hdim = q.shape[-2:]
            elements = q.shape[0] * heads * packed
        if elements * hdim * (14 if any(t.requires_grad for t in tensors) else 4) * self.times > self.flops:
            raise Cut


def load(path, device, budget):
    """The file as a module."""
    import torch

    if device == "cpu":
        torch.cuda.get_device_capability = lambda *_: (9, 0)
    modules = {"pytest": _stand_in_for_pytest()}
    if budget is not None:
        from fmha import flash_attn

        for name in ("flash_attn", "flash_attn.bert_padding", "flash_attn.flash_attn_interface", "flash_attn.layers",
                     "flash_attn.layers.rotary"):
            modules[name] = types.ModuleType(name)
        for name in flash_attn.__all__:
            function = getattr(flash_attn, name)
            setattr(modules["flash_attn"], name, _limited(function, budget) if name.endswith("func") else function)
        modules["flash_attn.bert_padding"].pad_input = flash_attn.pad_input
        modules["flash_attn.bert_padding"].unpad_input = flash_attn.unpad_input
        modules["flash_attn.flash_attn_interface"]._get_block_size_n = None
        modules["flash_attn.layers.rotary"].apply_rotary_emb = apply_rotary_emb
    else:  # only its parameters are read
        class Anything(types.ModuleType):
            __path__ = []
            __getattr__ = staticmethod(lambda name: None)

        for name in ("flash_attn", "flash_attn.bert_padding", "flash_attn.flash_attn_interface", "flash_attn.layers",
                     "flash_attn.layers.rotary"):
            modules[name] = Anything(name)
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    text = pathlib.Path(path).read_text()
    module = types.ModuleType("upstream_tests")
    module.source = text.replace('"cuda"', '"cpu"') if device == "cpu" else text
    try:
        exec(compile(module.source, path, "exec"), module.__dict__)
    finally:
        for name, module_before in before.items():
            if module_before is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module_before
    module.normalize_flash_attn_S = lambda attention, *_, **__: attention
    return module


def tests_of(module):
    """name -> its parametrisation: lists of (names, values)."""
    return {name: function.axes for name, function in vars(module).items() if name.startswith("test_") and hasattr(function, "axes")}


# ---- cases ----


class Case(collections.namedtuple("Case", "name picks")):
    """A test and, for each of its parametrisations, which value."""

    __slots__ = ()

    def __str__(self):
        return f"{self.name}:{'.'.join(map(str, self.picks))}"

    def parameters(self, tests):
        found = {}
        for (names, values), pick in zip(tests[self.name], self.picks):
            found |= zip((n.strip() for n in names), values[pick])
        return found


def longest(parameters):
    return max((v for n, v in parameters.items() if n.startswith("seqlen") and type(v) is int), default=0)


def draw(tests, rng, kernels, per_kernel, max_keys):
    """Cases without end, or until there are no others; with @kernels each of them @per_kernel times in a row."""
    names = list(tests)
    weights = [math.log(1 + math.prod(len(values) for _, values in tests[n])) for n in names]

    def picks(axes, fixed):
        return tuple(f if f is not None else rng.randrange(len(values)) for (_, values), f in zip(axes, fixed))

    chosen = []
    for _ in range(kernels):
        name = rng.choices(names, weights)[0]
        fixed = [None if SHAPES & {n.strip() for n in names_} else rng.randrange(len(values)) for names_, values in tests[name]]
        chosen.append((name, fixed))
    seen, in_vain = set(), 0
    for n in itertools.count():
        if chosen:
            name, fixed = chosen[n // per_kernel % len(chosen)]
        else:
            name = rng.choices(names, weights)[0]
            fixed = [None] * len(tests[name])
        case = Case(name, picks(tests[name], fixed))
        if case in seen or longest(case.parameters(tests)) > max_keys:
            in_vain += 1
            if in_vain > 10000:
                return
            continue
        in_vain = 0
        seen.add(case)
        yield case


# ---- a worker: cases from standard input, verdicts to the standard output that it was started with ----


def _values(error, module):
    """The assertion that failed, as written and with both sides' values."""
    frame, line = None, 0
    for entry, at in traceback.walk_tb(error.__traceback__):
        if entry.f_globals is module.__dict__:
            frame, line = entry, at
    for node in ast.walk(ast.parse(module.source)):
        if isinstance(node, ast.Assert) and node.lineno <= line <= node.end_lineno:
            said = " ".join(ast.unparse(node.test).split())
            if isinstance(node.test, ast.Compare) and len(node.test.comparators) == 1:
                sides = [eval(compile(ast.Expression(side), "", "eval"), frame.f_globals, frame.f_locals)
                         for side in (node.test.left, node.test.comparators[0])]
                return f"line {line}: {said}: {sides[0]!r}, {sides[1]!r}"
            return f"line {line}: {said}"
    return f"line {line}: {error}"


def verdict(module, case, tests, budget):
    """(what became of it, a sentence)."""
    import fmha

    budget.times = 1 + AGAIN.get(case.name, 0)
    try:
        getattr(module, case.name)(**case.parameters(tests))
    except Skipped:
        return "skipped", ""
    except Cut:
        return "cut", ""
    except fmha.NotSupportedError as error:
        return "refused", str(error)
    except AssertionError as error:
        return "failed", _values(error, module)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return "failed", f"{type(error).__name__}: {error} ({pathlib.Path(where.filename).name}:{where.lineno})"
    return "passed", ""


def work(options):
    import torch

    if options.device == "cpu":
        torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    budget = Budget(options.max_gflop * 1e9 if options.device == "cpu" else math.inf)
    module = load(options.file, options.device, budget)
    tests = tests_of(module)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        case = Case(*json.loads(line))
        with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
            found = verdict(module, case, tests, budget)
        print(json.dumps(found), file=answers, flush=True)


class Worker:
    """A child that runs one case after the other; a new one follows one that was lost."""

    def __init__(self, command):
        self.command = command
        self.child = None

    def _answer(self, seconds):
        ready, _, _ = select.select([self.child.stdout], [], [], seconds)
        return self.child.stdout.readline() if ready else None

    def run(self, case, seconds):
        if self.child is None:
            self.child = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            if not self._answer(300):
                self.end()
                return "failed", "no worker: it ended, or did not start within 300 s"
        try:
            self.child.stdin.write(json.dumps([case.name, case.picks]) + "\n")
            self.child.stdin.flush()
            answer = self._answer(seconds)
        except BrokenPipeError:
            answer = ""
        if answer:
            return tuple(json.loads(answer))
        hung = answer is None
        status = self.end()
        return "failed", f"no answer within {seconds} s" if hung else f"its process ended with {status}"

    def end(self):
        """The child's exit status."""
        child, self.child = self.child, None
        if child is None:
            return 0
        with contextlib.suppress(OSError):
            child.stdin.close()
        try:
            child.wait(5)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        child.stdout.close()
        return child.returncode


# ---- all of it ----


class Results:
    """What became of the cases, as they end; tells what is wrong at once."""

    def __init__(self, tests, wanted):
        self.tests, self.wanted = tests, wanted
        self.counts = collections.defaultdict(collections.Counter)
        self.refusals, self.failures = collections.Counter(), []
        self.lock = threading.Lock()

    def n_run(self):
        return sum(c["passed"] + c["failed"] + c["refused"] for c in self.counts.values())

    def add(self, case, found, said, seconds):
        with self.lock:
            self.counts[case.name][found] += 1
            if found == "refused":
                self.refusals[said] += 1
            if found in ("refused", "failed"):
                self.failures.append((case, found, said))
                print(f"{found} after {seconds:.1f} s: {case} {said}", flush=True)

    def table(self):
        kinds = ("passed", "failed", "refused", "skipped", "cut")
        print(f"{'':40}{'run':>6}" + "".join(f"{kind:>9}" for kind in kinds))
        total = collections.Counter()
        for name in self.tests:
            counts = self.counts[name]
            total += counts
            print(f"{name:40}{sum(counts[k] for k in kinds[:3]):6}" + "".join(f"{counts[kind]:9}" for kind in kinds))
        print(f"{'all':40}{sum(total[k] for k in kinds[:3]):6}" + "".join(f"{total[kind]:9}" for kind in kinds))
        for said, count in self.refusals.most_common():
            print(f"refused {count} times: {said}")
        for case, found, said in self.failures:
            if found == "failed":
                words = " ".join(f"{n}={v}" for n, v in case.parameters(self.tests).items())
                print(f"failed: --repeat {case}\n  {words}\n  {said}")


def run_all(options, command, cases, results):
    """@options.jobs workers, each @command, at a time, until as many have run as are wanted, or the time is over."""
    until = time.monotonic() + options.seconds
    waiting = queue.Queue(maxsize=1)  # drawn as they are needed: how many are skipped is not known before

    def enough():
        return results.n_run() >= options.cases or time.monotonic() > until

    def serve():
        worker = Worker(command)
        while (case := waiting.get()) is not None:
            if not enough():
                start = time.monotonic()
                found, said = worker.run(case, min(options.case_seconds, max(1, until - start)))
                late = time.monotonic() > until and "no answer" in said
                results.add(case, "cut" if late else found, said, time.monotonic() - start)
        worker.end()

    threads = [threading.Thread(target=serve) for _ in range(options.jobs)]
    [t.start() for t in threads]
    for case in cases:
        if enough():
            break
        waiting.put(case)
    [waiting.put(None) for _ in threads]
    [t.join() for t in threads]


def parser_of(description, file, only):
    """The options that every script of upstream's tests takes."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("file", nargs="?", default=file)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=int(datetime.date.today().strftime("%Y%m%d")))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="workers; of a GPU they share it")
    parser.add_argument("--kernels", type=int, default=0, help="0: each case has its own")
    parser.add_argument("--seconds", type=float, default=math.inf, help="then it stops and reports")
    parser.add_argument("--case-seconds", type=float, default=300)
    parser.add_argument("--only", action="append", help=only)
    parser.add_argument("--repeat", action="append", help="this case alone")
    parser.add_argument("--config", help="keys of fmhad.json for the daemon")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


def parse():
    parser = parser_of(__doc__, os.environ.get("FLASH_ATTN_TESTS"), "this test function")
    parser.add_argument("--max-keys", type=int, default=None, help="default: 1024 on the CPU")
    parser.add_argument("--max-gflop", type=float, default=15, help="of a case, on the CPU")
    options = parser.parse_args()
    if not options.file:
        parser.error("which file? Give flash-attention's tests/test_flash_attn.py, or set FLASH_ATTN_TESTS")
    if options.max_keys is None:
        options.max_keys = 1024 if options.device == "cpu" else 1 << 30
    return options


def start_daemon(options):
    import fmha

    if "FMHA_TEST_SOCKET" in os.environ:
        os.environ["FMHAD_SOCKET"] = os.environ["FMHA_TEST_SOCKET"]
        return
    os.environ.pop("FMHAD_SOCKET", None)
    config = json.loads(pathlib.Path(options.config).read_text()) if options.config else {}
    if options.device == "cpu":
        config.setdefault("devices", [{"backend": "cpu", "threads": 2}])
    fmha.start(config=config)


def main():
    options = parse()
    if options.worker:
        return work(options)
    start_daemon(options)
    tests = tests_of(load(options.file, "cpu", None))
    unknown = set(options.only or ()) - set(tests)
    if unknown:
        sys.exit(f"no such test: {', '.join(sorted(unknown))}; there are {', '.join(tests)}")
    tests = {name: axes for name, axes in tests.items() if not options.only or name in options.only}
    if options.repeat:
        cases = [Case(name, tuple(map(int, picks.split(".")))) for name, picks in (r.split(":") for r in options.repeat)]
    else:
        per_kernel = -(-options.cases // options.kernels) if options.kernels else 0
        cases = draw(tests, random.Random(options.seed), options.kernels, per_kernel, options.max_keys)
    results = Results(tests, options.cases)
    start = time.monotonic()
    command = [sys.executable, str(HERE), options.file, "--worker", "--device", options.device, "--max-gflop", str(options.max_gflop)]
    run_all(options, command, cases, results)
    results.table()
    print(f"seed {options.seed}, on {options.device}, {time.monotonic() - start:.0f} s")
    return 1 if results.n_run() == 0 or any(c["failed"] for c in results.counts.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
