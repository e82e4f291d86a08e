#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Every kind of problem of a profile has a tile that spills no registers on NVIDIA GPUs, and no kernel of Hopper's
loops spills, has its products serialised (C7510 to C7515) or is above 150 KB; how long each compiles. No GPU needed.

    tests/gpu/spill_check.py [--profile pytorch] [--arch sm_80,sm_90a] [--full] [--share N] [--match REGEX]

A daemon sets kernels aside that turn out to spill, so here a kind's tiles are compiled in the order of the table
until one does not; how many were tried is how many compiles its first user may have to wait for. Hopper's loops have
their rows to be fast, so all of those are compiled. The names come from
`fmhactl build --list`, so this is what the profile ships. The short version takes the kinds that have few registers
left (f16 on sm_80, bf16 elsewhere), and fp8 ones of another profile; --share one of N of its kinds; --full all of them (some hours of one core), of
which batch_prefill is fwd_pagedkv under another name. Times are CPU seconds of one compile: 2 s are wanted, not
asserted.
"""
import argparse
import collections
import concurrent.futures
import os
import re
import subprocess
import sys
import time
import zlib

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "..", "lib")]
import abi  # noqa: E402
import progress  # noqa: E402
from backward_cases import Append, Backward  # noqa: E402
from cases import Forward  # noqa: E402
from cuda_device import compile_cubin, find_nvrtc  # noqa: E402

BUILD = os.environ.get("FMHA_BUILD", os.path.join(abi.ROOT, "build", "release"))
NAME = re.compile(r"fmha_(?P<family>[a-z_]+?)_(?P<dtype>f32|f16|bf16|e4m3|e5m2|i8)_(?P<arch>(?:sm_|gfx)\w+?)_(?P<pipeline>gpu_[a-z_]+?)"
                  r"_h(?P<hq>\d+)x(?P<hv>\d+)_t(?P<m>\d+)x(?P<n>\d+)_w(?P<wm>\d+)x(?P<wn>\d+)_b(?P<blocks>\d+)"
                  r"(?P<features>\w*)$")
FAMILIES = ["fwd", "fwd_splitkv", "fwd_splitkv_combine", "fwd_pagedkv", "fwd_appendkv", "batch_prefill",
            "bwd_dot_do_o", "bwd_dq_dk_dv", "bwd_convert_dq"]


def listed(arch, profile=None):
    """Every kernel that a plan can choose, or those of a profile."""
    command = [os.path.join(BUILD, "client", "ctl", "fmhactl"), "build", "--arch", arch, "--list"]
    command += ["--profile", profile] if profile else []
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return [n for n in names if NAME.match(n)]  # all but those without a tile: prepare


def tile_of(name):
    p = NAME.match(name)
    return abi.Tile(abi.PIPELINES.index(p["pipeline"]), *(int(p[k]) for k in ("m", "n", "hq", "hv", "wm", "wn", "blocks")))


def kernel_of(lib, name):
    """The kernel that a name stands for: a problem with its features, made with its tile."""
    p = NAME.match(name).groupdict()
    family, words = FAMILIES.index(p["family"]), p["features"].split("_")
    options = dict(dtype=abi.DTYPE_NAMES.index(p["dtype"]), hq=4, hk=2, sq=2, sk=2, dq=int(p["hq"]), dv=int(p["hv"]))
    if "mask" in words:
        options.update(mask=abi.MASK_BOTTOM_RIGHT, right=0)
    if "bias" in words:
        options.update(bias=abi.BF16)
    options.update(alibi="bias2" in words, cap=5.0 if "cap" in words else 0.0, dropout=0.2 if "drop" in words else 0.0,
                   descale="descale" in words)
    narrow = {"narrow": abi.E4M3, "narrow2": abi.E5M2, "narrow3": abi.I8}
    if narrow.keys() & set(words):
        options.update(kv_dtype=next(code for word, code in narrow.items() if word in words))
    if "latent" in words:
        options.update(latent_fp8=True, hk=1, hq=128 if "pair" in words else 4)
    if "chosen" in words:
        options.update(topk=2)
    if family == abi.FWD_APPENDKV:
        ropes = {"turns": abi.ROPE_INTERLEAVED, "turns2": abi.ROPE_HALF_ROTATED}
        more = dict(widens=1, dtype=options["dtype"], new_dtype=abi.BF16) if "widens" in words else {}
        args = Append(page=16 if "paged" in words else 0, rope=next((ropes[w] for w in words if w in ropes), abi.ROPE_NONE), **more).args
    elif p["family"].startswith("bwd"):
        options.update(acc=2 if "split" in words else 0)  # sums of dQ in splits, for what is deterministic
        args = Backward(None, **{k: v for k, v in options.items() if k != "descale"}).bwd
    else:
        if "paged" in words:
            options.update(page=16, table="sglang" if family == abi.BATCH_PREFILL else "block")
        problem = Forward(**options, splits=2 if "split" in p["family"] else 0, split_size=1)
        args = problem.combine_args() if family == abi.FWD_SPLITKV_COMBINE else problem.args
    kernel = abi.make_kernel(lib, p["arch"], family, options["dtype"], args, tile_of(name), "approx" in words)
    names = (name, name.replace("_t128x64_", "_t128x80_")) if "approx" in words else (name,)  # code has more keys than its row
    return kernel if kernel is not None and kernel.name.decode() in names else None


def is_strict(name):
    return NAME.match(name)["pipeline"] in ("gpu_wgmma", "gpu_latent", "gpu_wide")


def kind_of(name):
    """All that the tile has no part in. The scalar pipeline serves what the general ones on matrix units do; one that packs
    heads serves other problems than one that does not."""
    p = NAME.match(name)
    if is_strict(name):
        return name
    words = [w for w in p["features"].split("_") if w not in ("buffers", "dkdv", "parked")]
    pipeline = re.sub("^gpu_(scalar|mma|mfma|wmma)", "general", p["pipeline"])
    return " ".join([p["arch"], p["family"], p["dtype"], pipeline, f"{p['hq']}x{p['hv']}", *words])


def compile_kind(jobs):
    """Until one does not spill: (name, spills, registers, CPU seconds, error) of each that was compiled."""
    tried = []
    for name, source, options, arch in jobs:
        start = time.process_time()
        try:
            code, log = compile_cubin(source, options, arch)
        except RuntimeError as error:
            return tried + [(name, 0, 0, time.process_time() - start, str(error)[-300:])]
        spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", log))
        registers = int(re.search(r"Used (\d+) registers", log).group(1))
        faults = sorted(set(re.findall(r"C751[0-5]", log))) + [f"{len(code)} bytes"] * (len(code) > MOST_BYTES)
        tried.append((name, spills, registers, time.process_time() - start, ", ".join(faults) if is_strict(name) else ""))
        if not spills:
            break
    return tried


MOST_BYTES = 150 * 1024

# Head dimensions and features of the short version's kinds.
SHORT = {
    "fwd": {"64x64": ["", "mask", "mask bias", "mask drop"], "128x128": ["", "mask", "mask bias", "mask bias drop"],
            "256x256": ["mask"]},
    "fwd_splitkv": {"128x128": ["mask", "mask bias"]},
    "fwd_pagedkv": {"64x64": ["mask"], "128x128": ["mask", "mask bias"], "256x256": ["mask"]},
    "bwd_dq_dk_dv": {"64x64": ["", "mask", "mask bias", "mask drop", "mask bias drop"],
                     "128x128": ["", "mask", "mask bias", "mask drop", "mask bias drop"],
                     "160x160": ["mask"], "192x128": ["mask", "mask bias drop"], "256x256": ["mask", "mask bias drop"]},
}


def is_short(name, dtype):
    """Of the short version: what has few registers left, one scalar kernel of a family, and the small families."""
    p = NAME.match(name)
    words = p["features"].split("_")
    if p["dtype"] != dtype:
        return False
    if p["pipeline"] != "gpu_mma":
        return not p["features"].replace("_buffers", "") and p["hq"] in ("32", "64") and "pack" not in p["pipeline"]
    if {"alibi", "cap", "paged", "descale", "logits"} & set(words) - ({"logits"} if "bias" in words else set()) - (
            {"paged"} if p["family"] == "fwd_pagedkv" else set()):
        return False
    return " ".join(w for w in words if w in ("mask", "bias", "drop")) in SHORT.get(p["family"], {}).get(
        f"{p['hq']}x{p['hv']}", [])


# Hopper's loops: bf16 or e4m3, whatever is nearest to having no registers left.
SHORT_STRICT = re.compile(r"fmha_fwd_(bf16|e4m3)_\w+_gpu_wgmma_h(64x64|128x128|192x128|256x256)_\w+?_b1"
                          r"_mask(_bias_logits|_bias_drop_logits|_descale_logits)?$"
                          r"|fmha_fwd_bf16_\w+_gpu_wgmma_h256x256_t128x64_w8x1_b1_mask_cap_logits$")

# Under a mask, with factors and without.
SHORT_FP8 = re.compile(r"fmha_fwd_e4m3_\w+_gpu_mma_h128x128_\w+_mask(_descale_logits)?(_parked)?$")

# Hopper's loops over keys of 8 bits, which no profile of 16 bits has, and a daemon leaves in silence when they do not compile: in every share.
SHORT_BYTES = re.compile(r"fmha_fwd(_pagedkv)?_e4m3_\w+_gpu_wgmma_h128x128_t128x128_w8x1_b1_mask(_paged)?_descale_logits$"
                         r"|fmha_fwd_bf16_\w+_gpu_wgmma_h(64x64_t192x96|128x128_t128x128|192x128_t128x80|256x256_t128x64)_w\d+x1_b1"
                         r"_mask_descale_narrow3?_logits$"
                         r"|fmha_fwd_pagedkv_f16_\w+_gpu_wgmma_h128x128_t128x128_w8x1_b1_mask_paged_descale_narrow[23]_logits$"
                         r"|fmha_fwd_splitkv_(bf16|f16)_\w+_gpu_decode_h128x128_t16x128_w1x4_b2_pack_split_paged_descale_narrow3?_logits"
                         r"_buffers3$")

# Whose caps may be approximate, which no list has either.
SHORT_CAPPED = re.compile(r"fmha_fwd(_pagedkv)?_bf16_\w+_gpu_wgmma_h(64x64_t192x128_w12|128x128_t128x128_w8|256x256_t128x64_w8)x1_b1"
                          r"_mask(_cap|_cap_paged)_logits$")

# Latents of fp8, which no list has: problems alone tell them from other keys of 8 bits. In every share.
LATENTS_OF_FP8 = ["fmha_fwd_{}_sm_90a_gpu_latent_h576x512_t64x64_w4x2_b1_pack_{}".format(*words) for words in (
    ("pagedkv_bf16", "mask_paged_narrow_latent"), ("splitkv_bf16", "split_narrow_latent"),
    ("splitkv_f16", "split_paged_narrow_chosen_latent"), ("splitkv_f16", "split_paged_narrow_chosen_latent_pair"))]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", default="pytorch")
    parser.add_argument("--arch", default="sm_80,sm_90a")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--share", type=int, default=1, metavar="N", help="one of N kinds of problems, always the same")
    parser.add_argument("--match", default="")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    if not find_nvrtc():
        print("spills: skipped, no libnvrtc here")
        return 77
    lib, kinds, unknown = abi.load_library(), collections.defaultdict(list), []
    for arch in options.arch.split(","):
        names = [n for n in listed(arch, options.profile) if re.search(options.match, n)]
        if options.full or options.match:
            shipped = set(names)
            names = [n for n in names if n.replace("batch_prefill", "fwd_pagedkv") == n
                     or n.replace("batch_prefill", "fwd_pagedkv") not in shipped]
            if options.full:  # of e4m3, too
                names += [n for n in listed(arch, "fp8_test") if is_strict(n) and n not in shipped]
        else:
            names = [n for n in names if is_short(n, "f16" if arch == "sm_80" else "bf16") or SHORT_STRICT.match(n)]
            names += [n for n in listed(arch, "fp8_test") if SHORT_FP8.match(n) or SHORT_STRICT.match(n)]
            names += [n for n in listed(arch) if SHORT_BYTES.match(n)]
            names += [f"{n}_approx" for n in listed(arch) if SHORT_CAPPED.match(n)]
            names += LATENTS_OF_FP8 if arch == "sm_90a" else []
        for name in dict.fromkeys(names):
            kernel = kernel_of(lib, name)
            if kernel is None:
                unknown.append(name)
            else:
                kind = kind_of(name)
                if zlib.crc32(kind.encode()) % options.share == 0 or SHORT_BYTES.match(name) or name in LATENTS_OF_FP8:
                    kinds[kind].append((name, kernel.source.decode(), abi.kernel_options(kernel), arch))
    n_tried, hopeless, failed, seconds = collections.Counter(), [], [], collections.defaultdict(list)
    with concurrent.futures.ProcessPoolExecutor(options.jobs) as pool:
        for kind, tried in progress.told(zip(kinds, pool.map(compile_kind, kinds.values())), len(kinds), "spills"):
            for name, spills, registers, cpu, error in tried:
                seconds[NAME.match(name)["family"]].append((cpu, name))
                if error:
                    failed.append(f"{name}: {error}")
                if spills:
                    print(f"spills {spills:4} bytes, {registers} registers, {cpu:.1f} s: {name}", flush=True)
            n_tried[len(tried)] += 1
            if all(spills for _, spills, *_ in tried):
                hopeless.append(f"each tile spills: {kind}")
    for family, times in seconds.items():
        times.sort()
        print(f"{family:20} {len(times):5} kernels, CPU seconds: median {times[len(times) // 2][0]:.2f}, "
              f"99 % {times[(len(times) - 1) * 99 // 100][0]:.2f}, most {times[-1][0]:.2f} ({times[-1][1]})")
    for line in hopeless + failed + [f"not understood: {n}" for n in unknown]:
        print(line)
    print(f"spills: {len(kinds)} kinds of problems of profile {options.profile}: " + ", ".join(
        f"{n} take {tries} compile{'s' * (tries > 1)}" for tries, n in sorted(n_tried.items())))
    print(f"spills: of {len(hopeless)} every tile spills, {len(failed)} failed")
    return 1 if hopeless or failed or unknown else 0


if __name__ == "__main__":
    sys.exit(main())
