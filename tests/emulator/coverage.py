# SPDX-License-Identifier: MIT
"""One problem for every class of kernels that a plan can choose, run on the emulator and judged by the reference.

    TINYGRAD=/path/to/tinygrad python3 tests/emulator/coverage.py [--arch gfx942] [--share N [--turn T]] [--count]
                                                                  [--match REGEX] [--jobs N]

A class is a family, a type, a pipeline with its tile and head dims, and which of mask, bias, ALiBi and dropout it has.
The kernels of a class differ in soft cap, factors, pages, splits and the like: which of them runs goes by the turn, so
that nights go round them; those that run.py's cases run are left to it. --share: one class in N, others with each turn;
the turn is the number of commits, or of days. --count runs nothing. A class for which no problem is known fails in any case. Kernels
that spill are set aside on gfx90a, whose scratch memory the emulator does not have, and counted.
"""
import argparse
import collections
import concurrent.futures
import hashlib
import multiprocessing
import os
import re
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(HERE, "..", "gpu"), os.path.join(HERE, "..", "lib")]

import abi  # noqa: E402
import clangs  # noqa: E402
import progress  # noqa: E402
import run  # noqa: E402
import spill_check  # noqa: E402
import suite  # noqa: E402
import turns  # noqa: E402

FEATURES = ("mask", "bias", "bias2", "drop")
TILED = ("fwd", "fwd_splitkv", "fwd_pagedkv", "batch_prefill", "bwd_dq_dk_dv")


def class_of(name):
    words = spill_check.NAME.match(name)["features"].split("_")
    return (*re.match(r"fmha_(.*_b\d+)", name).groups(), *(word for word in FEATURES if word in words))


def classes_of(arch):
    found = collections.defaultdict(list)
    for name in spill_check.listed(arch):
        found[class_of(name)].append(name)
        if "_bwd_dq_dk_dv_" in name and "_bias_" in name:  # for a bias that repeats; the list names the other alone
            found[class_of(name)].append(name + "_dbsum")
    return found


def window(name, sq, sk):
    """A band that leaves no row without keys. A narrow one crosses all tiles; of the other, one column falls out of a tile's
    first row, and of another tile's last row: where those are taken to be wholly inside, that shows."""
    tile, anchor = spill_check.tile_of(name), max(sk - sq, 0)
    m, n = tile.tile_m, tile.tile_n
    options = dict(mask=abi.MASK_BOTTOM_RIGHT if sk >= sq else abi.MASK_TOP_LEFT)
    if spread((name, "window")) % 2:
        return options | dict(right=2, left=max(sq, sk) - min(sq, sk) // 2)
    if "_bwd_" in name:  # one tile of keys, past which those of queries go
        return options | dict(right=n - 2 - (m if n > m + 1 else 0), left=max(3 * m, n) // m * m - 2)
    return options | dict(right=3 * n - 2 - anchor, left=anchor + (m // 2 if "_pack" in name else m) - 2)


def options_of(name):
    """A problem with rows of every wave, more of them than a tile has, and with as many tiles along what the main loop walks
    as are under way at once and one that follows, the last of them not full."""
    p = spill_check.NAME.match(name)
    words, tile = p["features"].split("_"), spill_check.tile_of(name)
    dtype, backward = abi.DTYPE_NAMES.index(p["dtype"]), p["family"].startswith("bwd")
    tail = spread((name,)) % 3  # of the head dims: none, within the last 32, or all but the first of V's
    piece = 16 if dtype >= abi.E4M3 else 8  # rows begin at multiples of 16 bytes
    options = dict(dtype=dtype, hq=2, hk=1, dq=tile.hdim_q - (32 - piece if tail else 0),
                   dv=(tile.hdim_v, tile.hdim_v - piece, piece)[tail], sq=tile.tile_m + 5, sk=3 * tile.tile_n + 5)
    if backward:  # keys stay while queries are walked along, and the other way round
        options.update(sq=max(3 * tile.tile_m, tile.tile_n) + 5, sk=tile.tile_n + 5)
    if "pack" in words:  # two heads' rows: a tile and some, or more than 64 of all, as prefills have that plans give these loops
        few = {"cap", "descale"} & set(words)  # a class has kernels without
        options.update(sq=tile.tile_m // 2 + 3 if few else max(32, tile.tile_m) + 3, hq=4, hk=2)
    if "mask" in words:
        options.update(window(name, options["sq"], options["sk"]))
    if "bias" in words:
        options.update(bias=dtype if dtype <= abi.BF16 else abi.BF16)
    options.update(alibi="bias2" in words, cap=5.0 if "cap" in words else 0.0, dropout=0.2 if "drop" in words else 0.0)
    if backward:
        options.update(acc=2 if "split" in words else 0, dbias="bias" in words)
        options.update(dict(bias_broadcast="h") if "dbsum" in words else {})
        return options
    options.update(descale="descale" in words, heavy=0.05, scale=None if options["cap"] or "logits" not in words else -0.2)
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
    """The kernels that the cases which are written down run anyway."""
    return {kernel.name.decode() for case in suite.emulated(False) for kernel in suite.kernels(case, lib, arch, case.pipeline)
            if kernel is not None}


def left_over(names, written):
    """Of a class: the kernels that no written case runs. Those without tiles have cases for a class only."""
    if spill_check.NAME.match(names[0])["family"] not in TILED and any(name in written for name in names):
        return []
    return [name for name in names if name not in written]


def spread(key):
    """A number that has nothing to do with the order of names."""
    return int(hashlib.sha256(" ".join(key).encode()).hexdigest()[:12], 16)


def choose(arch, names, turn):
    """The turn's kernel of a class, or the first after it that has a problem: (name, case)."""
    for n in range(len(names)):
        name = names[(turn + n) % len(names)]
        case = case_of(run.library(), arch, name)
        if case:
            return name, case
    return names[0], None


def try_class(task):
    """(name, what became of it, a text)"""
    arch, names, turn, folder, seconds = task
    name, case = choose(arch, names, turn)
    if case is None:
        return name, run.FAILED, "no problem is known for this class"
    if folder is None:
        return name, run.PASSED, ""
    return name, *run.run_case(case, run.library(), arch, folder, None, seconds)


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
    return result or (choose(*task[:3])[0], run.FAILED, f"the process ended with {process.exitcode}")


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
    parser.add_argument("--turn", type=int, default=turns.turn())
    parser.add_argument("--count", action="store_true", help="only that every class has a problem")
    parser.add_argument("--match", default="", help="a regular expression")
    parser.add_argument("--timeout", type=int, default=600, help="seconds a problem may take")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    folder = None if options.count else run.kernel_folder()
    if folder and not os.environ.get("TINYGRAD"):
        print("coverage: skipped, TINYGRAD is not set (a checkout of github:tinygrad/tinygrad)")
        return 77
    tasks, n_classes, verdicts = [], 0, collections.Counter()
    archs = options.arch or run.ARCHS
    for arch in archs if options.count else clangs.known(archs, "coverage"):
        written, turn = of_suite(run.library(), arch), options.turn // options.share
        for key, names in classes_of(arch).items():
            names, n_classes = left_over(names, written), n_classes + 1
            mine = spread(key) % options.share == options.turn % options.share
            if names and mine and re.search(options.match, names[0]):
                tasks.append((arch, names, turn, folder, options.timeout))
    for name, verdict, text in progress.told(try_all(tasks, options.count, options.jobs), len(tasks), "coverage"):
        verdicts[verdict] += 1
        if verdict != run.PASSED:
            print(f"{verdict} {name}: {text}", flush=True)
    print(f"coverage: {n_classes} classes; of {len(tasks)} {verdicts[run.PASSED]} "
          f"{'have a problem' if options.count else 'are right'}, {verdicts[run.ASIDE]} set aside")
    return 1 if verdicts[run.FAILED] or not n_classes else 0


if __name__ == "__main__":
    sys.exit(main())
