#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""No kernel of a profile may spill registers on NVIDIA GPUs; how long each compiles. No GPU needed.

    tests/gpu/spill_check.py [--profile pytorch] [--arch sm_80,sm_90a] [--full] [--match REGEX]

The names come from `fmhactl build --list`, so this is what the profile ships. The short version
takes the tile that is offered first for each kind of problem that has few registers left (f16 on sm_80,
bf16 elsewhere), and fp8 ones of another profile; --full all of them (two hours of one core), of which
batch_prefill is fwd_pagedkv under another name. Times are CPU seconds of one compile: 2 s are wanted, not asserted.
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
    tile = abi.Tile(abi.PIPELINES.index(p["pipeline"]), *(int(p[k]) for k in ("m", "n", "hq", "hv", "wm", "wn", "blocks")))
    kernel = abi.Kernel()
    if lib.check_make(p["arch"].encode(), family, options["dtype"], abi.ctypes.byref(args), abi.ctypes.byref(tile),
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


# Head dimensions and features of the short version.
SHORT = {
    "fwd": {"64x64": ["", "mask", "mask bias", "mask drop"], "128x128": ["", "mask", "mask bias", "mask bias drop"],
            "256x256": ["mask"]},
    "fwd_splitkv": {"128x128": ["mask", "mask bias"]},
    "fwd_pagedkv": {"64x64": ["mask"], "128x128": ["mask", "mask bias"], "256x256": ["mask"]},
    "bwd_dq_dk_dv": {"64x64": ["", "mask", "mask bias", "mask drop", "mask bias drop"],
                     "128x128": ["", "mask", "mask bias", "mask drop", "mask bias drop"],
                     "160x160": ["mask"], "192x128": ["mask", "mask bias drop"], "256x256": ["mask", "mask bias drop"]},
}


def first_tiles(names, dtype):
    """The short version: lists are in the order of the tables, best tile first."""
    chosen = {}
    for name in names:
        p = NAME.match(name)
        words = [w for w in p["features"].split("_") if w in ("mask", "bias", "drop")]
        if p["pipeline"] == "gpu_mma" and p["dtype"] == dtype:
            if " ".join(words) in SHORT.get(p["family"], {}).get(f"{p['hq']}x{p['hv']}", []):
                chosen.setdefault((p["family"], p["hq"], p["hv"], *words), name)
        elif p["dtype"] == dtype and not p["features"].replace("_buffers", ""):  # scalar, and the small families
            chosen.setdefault((p["family"], p["pipeline"]), name)
    return list(chosen.values())


def first_fp8_tiles(names):
    """That are under a mask, with factors and without."""
    wanted = re.compile(r"fmha_fwd_e4m3_\w+_gpu_mma_h128x128_\w+_mask(_descale_logits)?(_parked)?$")
    chosen = {}
    for name in filter(wanted.match, names):
        chosen.setdefault("descale" in name, name)
    return list(chosen.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", default="pytorch")
    parser.add_argument("--arch", default="sm_80,sm_90a")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--match", default="")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    if not find_nvrtc():
        print("spills: skipped, no libnvrtc here")
        return 77
    lib, jobs, unknown = abi.load_library(), [], []
    for arch in options.arch.split(","):
        names = [n for n in listed(arch, options.profile) if re.search(options.match, n)]
        if options.full or options.match:
            shipped = set(names)
            names = [n for n in names if n.replace("batch_prefill", "fwd_pagedkv") == n
                     or n.replace("batch_prefill", "fwd_pagedkv") not in shipped]
        else:
            names = first_tiles(names, "f16" if arch == "sm_80" else "bf16")
            names += first_fp8_tiles(listed(arch, "fp8_test"))
        for name in names:
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
              f"99 % {times[(len(times) - 1) * 99 // 100][0]:.2f}, most {times[-1][0]:.2f} ({times[-1][1]})")
    for line in failed + [f"not understood: {n}" for n in unknown]:
        print(line)
    print(f"spills: {len(spilled)} of {len(jobs)} kernels of profile {options.profile}, {len(failed)} failed")
    return 1 if spilled or failed or unknown else 0


if __name__ == "__main__":
    sys.exit(main())
