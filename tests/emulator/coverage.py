# SPDX-License-Identifier: MIT
"""One problem for every class of kernels that a plan can choose, run on the emulator and judged by the reference.

    TINYGRAD=/path/to/tinygrad python3 tests/emulator/coverage.py [--arch gfx942] [--share N [--turn T]] [--count]
                                                                  [--match REGEX] [--jobs N]

A class is a family, a type, a pipeline with its tile and head dims, and which of mask, bias, ALiBi and dropout it has.
The kernels of a class differ in soft cap, factors, pages, splits and the like: which of them runs goes by the turn, so
that nights go round them. --share: one class in N, others with each turn; the turn is the number of commits. --count
runs nothing. A class for which no problem is known fails in any case.
"""
import argparse
import collections
import concurrent.futures
import functools
import hashlib
import multiprocessing
import os
import re
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "gpu"))

import abi  # noqa: E402
import clangs  # noqa: E402
import run  # noqa: E402
import spill_check  # noqa: E402
import suite  # noqa: E402

FEATURES = ("mask", "bias", "bias2", "drop")
TILED = ("fwd", "fwd_splitkv", "fwd_pagedkv", "batch_prefill", "bwd_dq_dk_dv")


def class_of(name):
    words = spill_check.NAME.match(name)["features"].split("_")
    return (*re.match(r"fmha_(.*_b\d+)", name).groups(), *(word for word in FEATURES if word in words))


def classes_of(arch):
    found = collections.defaultdict(list)
    for name in spill_check.listed(arch):
        found[class_of(name)].append(name)
    return found


def options_of(name):
    """A problem of two tiles along what the main loop walks, the second of them not full."""
    p = spill_check.NAME.match(name)
    words, tile = p["features"].split("_"), spill_check.tile_of(name)
    dtype, backward = abi.DTYPE_NAMES.index(p["dtype"]), p["family"].startswith("bwd")
    options = dict(dtype=dtype, hq=2, hk=1, dq=tile.hdim_q, dv=tile.hdim_v, sq=tile.tile_m + 5 if backward else 21,
                   sk=21 if backward else tile.tile_n + 5)
    if "pack" in words:
        options.update(sq=3, hq=4, hk=2)
    if "mask" in words:
        options.update(mask=abi.MASK_BOTTOM_RIGHT, right=2)
    if "bias" in words:
        options.update(bias=dtype if dtype <= abi.BF16 else abi.BF16)
    options.update(alibi="bias2" in words, cap=5.0 if "cap" in words else 0.0, dropout=0.2 if "drop" in words else 0.0)
    if backward:
        options.update(acc=2 if "split" in words else 0, dbias="bias" in words)
        options.update(dict(bias_broadcast="h") if "dbsum" in words else {})
        return options
    options.update(descale="descale" in words, scale=None if options["cap"] or "logits" not in words else -0.2)
    if "paged" in words:
        options.update(page=16, table="sglang" if p["family"] == "batch_prefill" else "block")
    if p["family"] == "fwd_splitkv":
        options.update(splits=2, split_size=options["sk"] // 2 + 1)
    return options


def case_of(lib, arch, name):
    """Its case, or None where this makes no problem for which the tile gives that kernel."""
    p = spill_check.NAME.match(name)
    if p["family"] not in TILED:
        return None
    case = suite.Case("backward" if p["family"].startswith("bwd") else "forward", spill_check.tile_of(name), **options_of(name))
    made = [kernel.name.decode() for kernel in suite.kernels(case, lib, arch, case.pipeline) if kernel is not None]
    return case if name in made else None


def of_suite(lib, arch):
    """What the cases that are written down run anyway."""
    found = {}
    for case in suite.emulated(False):
        for kernel in suite.kernels(case, lib, arch, case.pipeline):
            if kernel is not None and spill_check.NAME.match(kernel.name.decode()):
                found.setdefault(class_of(kernel.name.decode()), case)
    return found


def spread(key):
    """A number that has nothing to do with the order of names."""
    return int(hashlib.sha256(" ".join(key).encode()).hexdigest()[:12], 16)


def turn_of_commits():
    done = subprocess.run(["git", "-C", HERE, "rev-list", "--count", "HEAD"], capture_output=True, text=True, check=False)
    return int(done.stdout or 0)


@functools.cache
def library():
    return abi.load_library()


def choose(arch, names, turn):
    """The turn's kernel of a class, or the first after it that has a problem: (name, case)."""
    for n in range(len(names)):
        name = names[(turn + n) % len(names)]
        case = case_of(library(), arch, name)
        if case:
            return name, case
    return names[0], None


def try_class(task):
    """(name, what went wrong)"""
    arch, names, turn, folder, seconds = task
    name, case = choose(arch, names, turn)
    if folder is None or case is None:
        return name, "" if case else "no problem is known for this class"
    passed, text = run.run_case(case, library(), arch, folder, None, seconds)
    return name, "" if passed else text


def try_apart(task):
    """The same in a process of its own: on the emulator a wild address ends it."""
    mine, its = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=lambda: its.send(try_class(task)))
    process.start()
    its.close()
    try:
        result = mine.recv()
    except EOFError:
        result = None
    process.join()
    return result or (choose(*task[:3])[0], f"the process ended with {process.exitcode}")


def try_all(tasks, count, jobs):
    if count:
        with concurrent.futures.ProcessPoolExecutor(jobs) as pool:
            yield from pool.map(try_class, tasks, chunksize=16)
    else:
        import emulator
        emulator.load_emulator()  # once, for all that is forked
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            yield from pool.map(try_apart, tasks)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--arch", action="append")
    parser.add_argument("--share", type=int, default=1)
    parser.add_argument("--turn", type=int, default=turn_of_commits())
    parser.add_argument("--count", action="store_true", help="only that every class has a problem")
    parser.add_argument("--match", default="", help="a regular expression")
    parser.add_argument("--timeout", type=int, default=600, help="seconds a problem may take")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    folder = None if options.count else run.kernel_folder()
    if folder and not os.environ.get("TINYGRAD"):
        print("coverage: skipped, TINYGRAD is not set (a checkout of github:tinygrad/tinygrad)")
        return 77
    tasks, n_classes, n_written = [], 0, 0
    archs = options.arch or run.ARCHS
    for arch in archs if options.count else clangs.known(archs, "coverage"):
        written = of_suite(library(), arch)
        for key, names in classes_of(arch).items():
            n_classes, n_written = n_classes + 1, n_written + (key in written)
            turn = options.turn // options.share
            mine = spread(key) % options.share == options.turn % options.share
            if mine and key not in written and re.search(options.match, names[0]):
                tasks.append((arch, names, turn, folder, options.timeout))
    failed = 0
    for name, wrong in try_all(tasks, options.count, options.jobs):
        failed += bool(wrong)
        if wrong:
            print(f"FAIL {name}: {wrong}", flush=True)
    print(f"coverage: {n_classes} classes, {n_written} of them in run.py's cases; of {len(tasks)} others "
          f"{len(tasks) - failed} {'have a problem' if options.count else 'are right'}")
    return 1 if failed or not n_classes else 0


if __name__ == "__main__":
    sys.exit(main())
