#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""No kernel of a profile may spill registers on NVIDIA GPUs; how long each compiles. No GPU needed.

    tests/gpu/spill_check.py [--profile pytorch] [--arch sm_80,sm_90a] [--full] [--match REGEX]

The names come from `fmhactl build --list`, so this is what the profile ships. The short version
takes, of each family, the tile that is offered first at head dimensions 64 and 128, plain and causal, in
bf16; --full all of them (hours). Times are CPU seconds of one compile: 2 s are wanted, not asserted.
"""
import argparse
import collections
import concurrent.futures
import os
import re
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import abi  # noqa: E402
from backward_cases import Append, Backward  # noqa: E402
from cases import Forward  # noqa: E402
from cuda_device import compile_cubin, find_nvrtc  # noqa: E402

BUILD = os.environ.get("FMHA_BUILD", os.path.join(abi.ROOT, "build", "release"))
NAME = re.compile(r"fmha_(?P<family>[a-z_]+?)_(?P<dtype>f32|f16|bf16|e4m3|e5m2)_(?P<arch>(?:sm_|gfx)\w+?)_(?P<pipeline>gpu_[a-z_]+?)"
                  r"_h(?P<hq>\d+)x(?P<hv>\d+)_t(?P<m>\d+)x(?P<n>\d+)_w(?P<wm>\d+)x(?P<wn>\d+)_b(?P<blocks>\d+)"
                  r"(?P<features>\w*)$")
FAMILIES = ["fwd", "fwd_splitkv", "fwd_splitkv_combine", "fwd_pagedkv", "fwd_appendkv", "batch_prefill",
            "bwd_dot_do_o", "bwd_dq_dk_dv", "bwd_convert_dq"]


def listed(arch, profile):
    command = [os.path.join(BUILD, "client", "ctl", "fmhactl"), "build", "--arch", arch, "--profile", profile, "--list"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def kernel_of(lib, name):
    """The kernel that a name stands for: a problem with its features, made with its tile."""
    p = NAME.match(name).groupdict()
    family, words = FAMILIES.index(p["family"]), p["features"].split("_")
    options = dict(dtype=abi.DTYPE_NAMES.index(p["dtype"]), hq=4, hk=2, sq=2, sk=2, dq=int(p["hq"]), dv=int(p["hv"]))
    if "mask" in words:
        options.update(mask=abi.MASK_BOTTOM_RIGHT, right=0)
    if "bias" in words:
        options.update(bias=abi.BF16)
    options.update(alibi="alibi" in words, cap=5.0 if "cap" in words else 0.0, dropout=0.2 if "drop" in words else 0.0,
                   descale="descale" in words)
    if family == abi.FWD_APPENDKV:
        args = Append(page=16 if "paged" in words else 0).args
    elif p["family"].startswith("bwd"):
        args = Backward(None, **{k: v for k, v in options.items() if k != "descale"}).bwd
    else:
        if "paged" in words:
            options.update(page=16, table="sglang" if family == abi.BATCH_PREFILL else "block")
        problem = Forward(**options, splits=2 if "split" in p["family"] else 0, split_size=1)
        args = problem.combine_args() if family == abi.FWD_SPLITKV_COMBINE else problem.args
    tile = abi.Tile(p["pipeline"].encode(), *(int(p[k]) for k in ("m", "n", "hq", "hv", "wm", "wn", "blocks")))
    kernel = abi.Kernel()
    if lib.gpu_kernel_make(p["arch"].encode(), family, options["dtype"], abi.ctypes.byref(args), abi.ctypes.byref(tile),
                           abi.ctypes.byref(kernel)) or kernel.name.decode() != name:
        return None
    return kernel


def compile_one(job):
    name, source, options, arch = job
    start = time.process_time()
    try:
        _, log = compile_cubin(source, options, arch)
    except RuntimeError as error:
        return name, None, 0, time.process_time() - start, str(error)[-300:]
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", log))
    return name, spills, int(re.search(r"Used (\d+) registers", log).group(1)), time.process_time() - start, ""


def first_tiles(names):
    """The short version: lists are in the order of the tables, best tile first."""
    chosen = {}
    for name in names:
        p = NAME.match(name)
        if p["dtype"] != "bf16" or p["features"] not in ("", "_mask", "_paged", "_mask_paged", "_buffers2", "_mask_buffers2"):
            continue
        if p["family"] in FAMILIES[4:5] or (p["hq"] in ("64", "128") and "mma" in p["pipeline"]):
            chosen.setdefault((p["family"], p["pipeline"], p["hq"], p["features"]), name)
    return [n for n in chosen.values() if "batch_prefill" not in n and "splitkv" not in n]  # as pagedkv, as fwd


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", default="pytorch")
    parser.add_argument("--arch", default="sm_80,sm_90a")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--match", default="")
    parser.add_argument("--may-spill", default="$^", help="names that are listed but do not fail the run")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    if not find_nvrtc():
        print("spills: skipped, no libnvrtc here")
        return 77
    lib, jobs, unknown = abi.load_library(), [], []
    for arch in options.arch.split(","):
        names = [n for n in listed(arch, options.profile) if re.search(options.match, n)]
        for name in names if options.full or options.match else first_tiles(names):
            kernel = kernel_of(lib, name)
            if kernel is None:
                unknown.append(name)
            else:
                jobs.append((name, kernel.source.decode(), abi.kernel_options(kernel), arch))
    spilled, failed, seconds = [], [], collections.defaultdict(list)
    with concurrent.futures.ProcessPoolExecutor(options.jobs) as pool:
        for name, spills, registers, cpu, error in pool.map(compile_one, jobs):
            seconds[NAME.match(name)["family"]].append((cpu, name))
            if error:
                failed.append(f"{name}: {error}")
            elif spills:
                spilled.append(name)
                print(f"spills {spills:4} bytes, {registers} registers, {cpu:.1f} s: {name}", flush=True)
    for family, times in seconds.items():
        times.sort()
        print(f"{family:20} {len(times):5} kernels, CPU seconds: median {times[len(times) // 2][0]:.2f}, "
              f"most {times[-1][0]:.2f} ({times[-1][1]})")
    for line in failed + [f"not understood: {n}" for n in unknown]:
        print(line)
    print(f"spills: {len(spilled)} of {len(jobs)} kernels of profile {options.profile}, {len(failed)} failed")
    bad = [n for n in spilled if not re.search(options.may_spill, n)]
    return 1 if bad or failed or unknown else 0


if __name__ == "__main__":
    sys.exit(main())
