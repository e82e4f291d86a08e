#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""torch's own test/test_transformers.py, its cases of scaled_dot_product_attention drawn at random, with fmhad in torch's slot.

    upstream_torch.py [FILE] [--cases 300] [--seed YYYYMMDD] [--device cpu|cuda] [--jobs N] [--kernels K] [--seconds S]
                      [--case-seconds S] [--only NAME ...] [--repeat NAME:INDEX ...] [--config FILE] [--without]

FILE, or $TORCH_TESTS, is that file of a torch as old as the one that runs, or near it; nothing of it is kept here. Needed beside it:
torch, numpy, expecttest and the fmha package of $FMHA_BUILD (build/release), or one that is installed.

Classes of SDPA and of attention biases are taken, and what names scaled_dot_product elsewhere. Functions are drawn by the logarithm
of how many cases they have, cases of one alike. A case counts when it ran: whether fmhad was asked in it is another column, since
many test torch's own math, or what torch refuses. --kernels draws K settings but for the lengths first, as upstream.py does.

A case that fails is run again without fmhad: what fails there too is not counted as failed here, but told. --without runs all cases
without fmhad. Exits with 1 when a case failed, or none was served.
"""
import ast
import collections
import contextlib
import importlib.util
import json
import math
import os
import pathlib
import random
import re
import sys
import time
import traceback
import unittest

import upstream
from upstream import Case

HERE = pathlib.Path(__file__).resolve()
CLASSES = re.compile(r"SDPA|AttnBias")
FUNCTIONS = re.compile(r"scaled_dot_product|sdp")
# Parameters that no kernel is compiled for.
LENGTHS = re.compile(r"_(batch_size|seq_len_q|seq_len_k|q_seq_len|kv_seq_len|n_heads?|num_heads)_?\d+(?=_)")


def load(path, device):
    """The file as a module. Its tests are methods of classes for each device."""
    os.environ.setdefault("PYTORCH_TESTING_DEVICE_ONLY_FOR", device)
    spec = importlib.util.spec_from_file_location("upstream_tests", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["upstream_tests"] = module
    sys.path.insert(0, str(pathlib.Path(path).parent))  # it imports others from beside it
    spec.loader.exec_module(module)
    return module


def tests_of(module, path, device):
    """"Class.function" -> its one axis of the methods that torch made of it, as upstream.py's cases have it."""
    found, suffix = {}, device.upper()
    for node in ast.parse(pathlib.Path(path).read_text()).body:
        made = getattr(module, f"{getattr(node, 'name', '')}{suffix}", None)
        if not isinstance(node, ast.ClassDef) or not isinstance(made, type) or not issubclass(made, unittest.TestCase):
            continue
        functions = sorted((f.name for f in node.body if isinstance(f, ast.FunctionDef) and f.name.startswith("test_")), key=len)
        methods = [m for m in dir(made) if m.startswith("test_")]
        owners = {m: next(f for f in reversed(functions) if m.startswith(f)) for m in methods if any(map(m.startswith, functions))}
        for function in functions:
            of_it = [m for m in methods if owners.get(m) == function]
            if of_it and (CLASSES.search(node.name) or FUNCTIONS.search(function)):
                found[f"{made.__name__}.{function}"] = [(["method"], [(m,) for m in of_it])]
    return found


def draw(tests, rng, kernels, per_kernel):
    if not kernels:
        yield from upstream.draw(tests, rng, 0, 0, math.inf)
        return
    groups = {}
    for name, [(_, methods)] in tests.items():
        for i, (method,) in enumerate(methods):
            groups.setdefault(name, {}).setdefault(LENGTHS.sub("", method), []).append(i)
    weights = [math.log(1 + len(of_it)) for of_it in groups.values()]
    drawn, seen = [], set()
    while len(drawn) < min(kernels, sum(map(len, groups.values()))):
        name = rng.choices(list(groups), weights)[0]
        kernel = name, rng.choice(list(groups[name]))
        if kernel not in seen:
            seen.add(kernel)
            drawn.append(kernel)
    for name, kernel in drawn:
        picks = groups[name][kernel]
        for i in rng.sample(picks, min(per_kernel, len(picks))):
            yield Case(name, (i,))


# ---- a worker ----


def _asked():
    from fmha import _slot

    return sum(_slot.calls().values()) if "fmha" in sys.modules else 0


def verdict(module, method):
    """(what became of it, a sentence)."""
    made, name = method.split(".")
    result, before = unittest.TestResult(), _asked()
    getattr(module, made)(name).run(result)
    if result.errors or result.failures:
        return "failed", (result.errors + result.failures)[0][1].strip()[-1500:]
    if result.unexpectedSuccesses:
        return "failed", "an unexpected success"
    if result.skipped:
        return "skipped", result.skipped[0][1]
    return ("passed" if _asked() > before else "unasked"), ""


def activate():
    import fmha.torch  # noqa: F401: registers the slot
    from torch.nn.attention import activate_flash_attention_impl

    activate_flash_attention_impl("fmha")


def work(options):
    answers = os.fdopen(os.dup(1), "w")
    sys.argv = sys.argv[:1]  # torch's test suite has options of its own
    import torch

    if options.device == "cpu":
        torch.set_num_threads(1)
    module = load(options.file, options.device)
    if not options.without:
        activate()
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
            try:
                found = verdict(module, json.loads(line)[0])
            except Exception:
                found = "failed", traceback.format_exc()[-1500:]
        print(json.dumps(found), file=answers, flush=True)


# ---- all of it ----


class Results(upstream.Results):
    def n_run(self):
        return sum(c["passed"] + c["unasked"] + c["failed"] for c in self.counts.values())

    def table(self):
        kinds = ("passed", "unasked", "failed", "too", "skipped", "cut")
        heads = {"passed": "served", "unasked": "not asked", "too": "torch's too"}
        print(f"{'':80}" + "".join(f"{heads.get(k, k):>12}" for k in kinds))
        total = collections.Counter()
        for name in self.tests:
            counts = self.counts[name]
            total += counts
            if counts:
                print(f"{name:80}" + "".join(f"{counts[k]:12}" for k in kinds))
        print(f"{'all':80}" + "".join(f"{total[k]:12}" for k in kinds))
        for case, found, said in self.failures:
            print(f"{found}: --repeat {case} {case.parameters(self.tests)['method']}\n  {said}")
        return total


class _Named:
    """A worker that is told methods, not places in a list: a child's list might differ."""

    def __init__(self, tests, worker):
        self.tests, self.worker = tests, worker

    def run(self, case, seconds):
        method = f"{case.name.split('.')[0]}.{case.parameters(self.tests)['method']}"
        return self.worker.run(Case(method, ()), seconds)


def run_all(options, command, cases, results):
    worker = _Named(results.tests, upstream.Worker([*command, *(["--without"] if options.without else [])]))
    judge = _Named(results.tests, upstream.Worker([*command, "--without"]))
    until = time.monotonic() + options.seconds
    for case in cases:
        left = until - time.monotonic()
        if results.n_run() >= options.cases or left <= 0:
            break
        start = time.monotonic()
        found, said = worker.run(case, min(options.case_seconds, max(1, left)))
        if found == "failed" and time.monotonic() > until:
            found = "cut"
        elif found == "failed" and not options.without and judge.run(case, options.case_seconds)[0] == "failed":
            found = "too"
        results.add(case, found, said, time.monotonic() - start)
        if found == "too":
            results.failures.append((case, "fails with torch's own too", said))
    worker.worker.end()
    judge.worker.end()


def parse():
    parser = upstream.parser_of(__doc__, os.environ.get("TORCH_TESTS"), "functions whose names have this in them")
    parser.add_argument("--without", action="store_true", help="torch's own kernels")
    options = parser.parse_args()
    if not options.file:
        parser.error("which file? Give torch's test/test_transformers.py, or set TORCH_TESTS")
    return options


def serve(options, command, cases, results):
    """@options.jobs of run_all() at once, each with its share of the cases."""
    import threading

    lock = threading.Lock()

    def shared():
        while True:
            with lock:
                case = next(cases, None)
            if case is None:
                return
            yield case

    threads = [threading.Thread(target=run_all, args=(options, command, shared(), results)) for _ in range(options.jobs)]
    [t.start() for t in threads]
    [t.join() for t in threads]


def main():
    options = parse()
    if options.worker:
        return work(options)
    if not options.without:
        upstream.start_daemon(options)
    argv, sys.argv = sys.argv, sys.argv[:1]
    tests = tests_of(load(options.file, options.device), options.file, options.device)
    sys.argv = argv
    tests = {name: axes for name, axes in tests.items() if not options.only or any(word in name for word in options.only)}
    if not tests:
        sys.exit("no such test")
    if options.repeat:
        cases = iter([Case(name, (int(pick),)) for name, pick in (r.split(":") for r in options.repeat)])
    else:
        per_kernel = -(-options.cases // options.kernels) if options.kernels else 0
        cases = draw(tests, random.Random(options.seed), options.kernels, per_kernel)
    results, start = Results(tests, options.cases), time.monotonic()
    command = [sys.executable, str(HERE), options.file, "--worker", "--device", options.device]
    serve(options, command, cases, results)
    total = results.table()
    print(f"of {sum(len(axes[0][1]) for axes in tests.values())} cases; seed {options.seed}, on {options.device}, "
          f"{time.monotonic() - start:.0f} s")
    return 1 if total["failed"] or (not total["passed"] and not options.without) else 0


if __name__ == "__main__":
    sys.exit(main())
