# SPDX-License-Identifier: MIT
"""What plans choose is what coverage.py runs: plans of many problems, asked for offline, name no class of kernels without a problem,
and where they send more rows to a tile that packs heads than such a tile was made for, its class has a problem of as many rows.

    python3 tests/emulator/chosen.py [--arch gfx942] [--share N] [--verbose] [--jobs N]

--share: one problem in N. Needs neither a GPU nor an emulator.
"""
import argparse
import collections
import concurrent.futures
import itertools
import json
import os
import re
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "..", "gpu"), os.path.join(HERE, "..", "lib")]

import coverage  # noqa: E402
import run  # noqa: E402

ROWS = (1, 3, 32, 200, 1024, 2048, 4096, 8192, 16384)
PACKED = 64  # rows of all heads that share keys: more are a prefill
SPEC = re.compile(r"(?P<family>[a-z_]+)-(?P<dtype>\w+?)-(?:batch-|group-)?h\d+(?:x\d+)?-(?P<pipeline>gpu_\w+)"
                  r"-t(?P<m>\d+)x(?P<n>\d+)x\d+x(?P<hv>\d+)x\d+x(?P<hq>\d+)(?:x\d+)*"
                  r"-r(?P<wm>\d+)x(?P<wn>\d+)\w*-.*-bpc(?P<blocks>\d+)")
DTYPES = {"bf16": "bf16", "fp8": "e4m3"}


def problems(share):
    """Command lines of `fmhactl plan`, with the features that classes have."""
    shapes = itertools.product(("bf16", "fp8"), (64, 96, 128, 256), ROWS, ((16, 16), (32, 8)), (False, True), ("", "bias", "alibi", "paged"))
    for n, (dtype, hdim, rows, (heads, heads_k), causal, extra) in enumerate(shapes):
        if n % share or (extra == "bias" and rows > 4096):
            continue
        words = ["forward", "--prec", dtype, "-b", "2", "-h", str(heads), "-h_k", str(heads_k), "-s", str(rows),
                 "-s_k", str(max(rows, 512)), "-d", str(hdim)]
        words += ["-mask", "b"] if causal else []
        words += {"bias": ["--bias", "e"], "alibi": ["--alibi", "1"], "paged": ["--page-size", "64"], "": []}[extra]
        yield words, rows * heads // heads_k
    for dtype, hdim, rows, heads_k in itertools.product(("bf16", "fp8"), (64, 96, 128, 256), (1, 3), (2, 16)):  # keys in splits
        words = ["forward", "--prec", dtype, "-b", "1", "-h", "16", "-h_k", str(heads_k), "-s", str(rows), "-s_k", "32768"]
        yield [*words, "-d", str(hdim)], rows * 16 // heads_k
    for hdim, rows, causal, dropout in itertools.product((64, 128, 192, 256), (200, 1024, 8192), (False, True), (False, True)):
        words = ["backward", "-b", "2", "-h", "16", "-s", str(rows), "-d", str(hdim)]
        yield words + (["-mask", "b"] if causal else []) + (["--p_drop", "0.2"] if dropout else []), rows


def asked(task):
    """(what is wrong, the stages' kernels) of a plan."""
    arch, words = task
    command = [os.path.join(run.clangs.build_folder(), "client", "ctl", "fmhactl"), "plan", *words, "--arch", arch, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        return None, [stage["kernel"] for stage in json.loads(done.stdout)["plan"]["stages"]]
    except (ValueError, KeyError, TypeError):
        return (done.stderr or done.stdout).strip()[-200:], []


def class_prefix(kernel, arch):
    """What a class's name begins with: family, type, arch, pipeline, head dims, tile; None: it has no tile of ours."""
    p = SPEC.match(kernel)
    if not p or p["family"] not in coverage.TILED:
        return None
    return (f"{p['family']}_{DTYPES.get(p['dtype'], p['dtype'])}_{arch}_{p['pipeline']}_h{p['hq']}x{p['hv']}"
            f"_t{p['m']}x{p['n']}_w{p['wm']}x{p['wn']}_b{p['blocks']}")


def is_alone(prefix, names):
    """Whether blocks of a backward loop have one wave, where the same loop has others for these head dims."""
    loop = prefix[:prefix.index("_t")]
    return "_bwd_" in f"_{prefix}" and "_w1x1_" in prefix and any(name.startswith(loop + "_t") and "_w1x1_" not in name for name in names)


def judge(arch, answers):
    """What is chosen and not run."""
    run.library()
    names, wrong, seen = collections.defaultdict(list), set(), collections.Counter()
    for key, members in coverage.classes_of(arch).items():
        names[key[0]] += members
    for (words, rows), (trouble, kernels) in answers:
        if trouble:
            wrong.add(f"{arch} {' '.join(words)}: {trouble}")
        for kernel in kernels:
            prefix = class_prefix(kernel, arch)
            if prefix is None:
                continue
            seen[prefix] += 1
            members = names.get(prefix, [])
            if is_alone(prefix, names):
                wrong.add(f"{arch} {' '.join(words)}: {prefix} has blocks of one wave, and others there are")
            if not members:
                wrong.add(f"{arch} {' '.join(words)}: {prefix} is no class that is run")
            elif "pack" in members[0] and rows > PACKED:
                seen[prefix + ", prefills"] += 1
                if not any(2 * coverage.options_of(name)["sq"] > PACKED for name in members):
                    wrong.add(f"{arch} {' '.join(words)}: no problem of {prefix} has more than {PACKED} rows")
    return sorted(wrong), seen


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--arch", action="append")
    parser.add_argument("--share", type=int, default=1)
    parser.add_argument("--verbose", action="store_true", help="say how often each class is chosen")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    asking, failed, n_classes, n_prefills = list(problems(options.share)), 0, 0, 0
    for arch in options.arch or run.ARCHS:
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            answers = list(zip(asking, pool.map(asked, [(arch, words) for words, _ in asking])))
        wrong, seen = judge(arch, answers)
        failed += len(wrong)
        n_classes += sum(", " not in key for key in seen)
        n_prefills += sum(", prefills" in key for key in seen)
        for sentence in wrong[:20]:
            print(f"FAIL {sentence}")
        for key, times in sorted(seen.items()) if options.verbose else ():
            print(f"{times:5} {key}")
    print(f"chosen: {len(asking)} problems an arch choose {n_classes} tiles, {n_prefills} of those that pack heads for prefills, too; "
          f"{failed} not run")
    return 1 if failed or not n_classes else 0


if __name__ == "__main__":
    sys.exit(main())
