# SPDX-License-Identifier: MIT
"""Hopper's forward loop over heads above 256 (fwd_wide.h), by itself: checked by hopper.py's and decode.py's means, timed against PyTorch's
backends, the general loops and the loop of heads of 256.

    python3 tests/gpu/hopper_wide.py build DIR [--match TEXT]  # needs NVRTC, no GPU
    python3 tests/gpu/hopper_wide.py run DIR [--seconds N] [--beside DIR...]
    python3 tests/gpu/hopper.py sanitize DIR --match 512x512_t64x64

`run` needs a Hopper GPU and PyTorch. A few checks first, then times, then as many of the other checks as time is left for; the tables come last.
--beside: folders with code of the same kernels by other sources, which is timed in turn with them.
"""
import argparse
import itertools
import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import abi  # noqa: E402
import cuda_device  # noqa: E402
import decode  # noqa: E402
import hopper  # noqa: E402
from gpu_timer import compare, compare_graphs  # noqa: E402

WIDE = {name: v for name, v in hopper.VARIANTS.items() if hopper.is_wide(v)}
FIRST = ("bf16_512x512_t64x64", "bf16_512x512_t64x64_mask1")
BESIDE = {name: v for name, v in hopper.VARIANTS.items() if name.startswith("bf16_256x256_t128x80") and "paged" not in name}
GENERAL = {"general 64x32": ("gpu_mma", (64, 32, 4, 1, 1)), "general 16x64": ("gpu_mma_pack", (16, 64, 1, 4, 1))}
DECODE = {"wide": ("gpu_wide", (64, 64, 4, 2, 1)), "general": ("gpu_mma_pack", (16, 64, 1, 4, 1))}


def general_of(lib, v, side):
    pipeline, (m, n, wm, wn, blocks) = GENERAL[side]
    args = hopper.ask(abi.FwdArgs(), v)
    tile = abi.Tile(abi.PIPELINES.index(pipeline), m, n, v["dq"], v["dv"], wm, wn, blocks)
    return abi.make_kernel(lib, hopper.ARCH, abi.FWD, args.dtype, args, tile)


def few_rows():
    """Decode by splits: (case of decode.py for each loop)."""
    for b, hk, group, n, rows, page, splits in (
            (1, 8, 2, 8192, 1, 0, (8, 16, 32)), (1, 4, 8, 32768, 1, 64, (16, 33)), (32, 8, 2, 4096, 1, 16, (1, 2)), (8, 4, 8, 8192, 4, 0, (4, 8)),
            (16, 8, 2, 8192, 1, 64, (1, 2))):
        for pipeline, tile in DECODE.values():
            yield decode.Case(b, hk, group, n, d=512, rows=rows, page=page, causal=rows > 1, splits=splits, pipeline=pipeline, tile=tile)


def odd_splits():
    """Checked only."""
    pipeline, tile = DECODE["wide"]
    for d, page in itertools.product((512, 384), (0, 16, 64)):
        more = dict(d=d, page=page, pipeline=pipeline, tile=tile, timed=False)
        yield decode.Case(3, 2, 3, 1280, splits=(1, 4, 7), **more)
        yield decode.Case(3, 2, 8, 1280, rows=20, causal=True, splits=(3,), **more)
        yield decode.Case(5, 2, 3, 704, least=1, splits=((7, 4), (40, 9), (264, 20)), empty=True, **more)
        yield decode.Case(3, 2, 5, 1984, causal=True, rows=5, least=300, splits=((5, 3), (100, 40)), **more)
        yield decode.Case(3, 1, 8, 1984, causal=True, window=255, rows=7, least=300, splits=((9, 3), (33, 12)), **more)


def kernels(lib):
    found = {name: hopper.kernel_of(lib, v) for name, v in {**WIDE, **BESIDE}.items()}
    for name in FIRST:
        found |= {f"{side} {name}": general_of(lib, WIDE[name], side) for side in GENERAL}
    return found | decode.kernels(lib, [*few_rows(), *odd_splits()])


def libraries_of(torch, p, causal):
    """PyTorch's backends, with keys repeated ahead for those that know no groups."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    q, k, v = (x.transpose(1, 2) for x in (p.q, p.k, p.v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    for name, backend in (("efficient", SDPBackend.EFFICIENT_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION), ("math", SDPBackend.MATH)):
        def launch(backend=backend):
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        try:
            launch()
            torch.cuda.synchronize()
        except RuntimeError as error:
            print(f"{name}: {str(error).splitlines()[0][:150]}", flush=True)
            torch.cuda.empty_cache()
            continue
        yield name, launch


def bench(device, beside):
    torch, lines = device.torch, []
    for (b, hq, hk, n, keys), causal in itertools.product(((1, 16, 8, 8192, 8192), (1, 32, 4, 8192, 8192), (4, 16, 8, 2048, 2048), (1, 16, 8, 2048, 16384)),
                                                          (False, True)):
        if n != keys and not causal:
            continue
        masked, name = hopper.CAUSAL if causal else {}, FIRST[causal]
        problems = [hopper.make(torch, b, hq, hk, n, keys, 512, 512, **masked) for _ in range(2)]
        sides = {"wide": [device.launch_of(name, p, True) for p in problems]}
        sides |= {d.folder: [d.launch_of(name, p, True) for p in problems] for d in beside if name in d.variants}
        narrow = [hopper.make(torch, b, hq, hk, n, keys, 256, 256, **masked) for _ in range(2)]
        sides["d256"] = [device.launch_of(name.replace("512x512_t64x64", "256x256_t128x80"), p, True) for p in narrow]
        if n == keys:
            for side in GENERAL if n < 8192 else list(GENERAL)[:1]:
                kernel = general_of(device.lib, WIDE[name], side)
                sides[side] = [device.launcher(device.function(f"{side} {name}", kernel), kernel, problems[0].args())]
            sides |= {w: [f] for w, f in libraries_of(torch, problems[0], causal)}
        else:
            for size in (16, 64, 256):
                for p in problems:
                    p.pages = hopper.Pages(torch, p, size)
                sides[f"pages of {size}"] = [device.launch_of(name + "_paged1", p, True) for p in problems]
        seen = n * keys - (n * (n - 1) / 2 if causal else 0)
        times = compare(torch, sides, 5)
        rates = {w: 4 * b * hq * seen * (256 if w == "d256" else 512) / ms / 1e9 for w, ms in times.items()}
        lines.append(f"{b} x {hq}/{hk}, {n} rows of {keys} keys, {'causal' if causal else 'full'}: " + "; ".join(f"{w} {r:.0f}" for w, r in rates.items()))
        print(lines[-1], flush=True)
        del problems, narrow, sides
        torch.cuda.empty_cache()
    capped = [hopper.make(torch, 1, 16, 8, 8192, 8192, 512, 512, cap=50.0, **hopper.CAUSAL) for _ in range(2)]
    ms = compare(torch, {"": [device.launch_of("bf16_512x512_t64x64_logits1_softcap1_mask1", p, True) for p in capped]}, 5)[""]
    lines.append(f"the first, causal, with a soft cap: {2 * 16 * 8192 * 8192 * 512 / ms / 1e9:.0f}")
    return lines


def bench_few(device):
    torch, lines = device.torch, []
    for wide, general in zip(*[iter(few_rows())] * 2):
        problem, sides = decode.Problem(device, wide), {}
        for side, case in (("wide", wide), ("general", general)):
            problem.case = case
            for splits in case.splits:
                launch, n = problem.launcher(splits, True)
                sides[f"{side} {n}"] = launch
                launch(0)
                torch.cuda.synchronize()
                error = problem.error(0)
                if not error < 1.5e-2:
                    print(f"FAIL {case} {n} splits: {error:.1e}", flush=True)
        us = compare_graphs(torch, sides, 8, 5)
        lines.append(f"{str(wide).removesuffix(' gpu_wide (64, 64, 4, 2, 1)')}, {wide.bytes() / 1e6:.0f} MB: " + "; ".join(f"{w} {t:.1f}" for w, t in us.items()))
        print(lines[-1], flush=True)
        del problem, sides
        torch.cuda.empty_cache()
    return lines


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("build", "run"))
    parser.add_argument("folder")
    parser.add_argument("--seconds", type=float, default=75, help="after which no further kernel's checks begin")
    parser.add_argument("--no-bench", action="store_true")
    parser.add_argument("--match", default="")
    parser.add_argument("--beside", nargs="*", default=[])
    a = parser.parse_args()
    lib, start, lines = abi.load_library(), time.time(), []
    if a.what == "build":
        sys.exit(cuda_device.build_cubins(a.folder, {n: k for n, k in kernels(lib).items() if a.match in n}) != 0)
    device = hopper.Device(a.folder, {**WIDE, **BESIDE})
    device.variants = {name: WIDE[name] for name in FIRST}
    failed, checked = hopper.check(device, "", few=True), 0
    print(f"{time.time() - start:.0f} s", flush=True)
    device.variants = {**WIDE, **BESIDE}
    if not a.no_bench:
        lines += bench(device, [hopper.Device(folder, WIDE) for folder in a.beside])
        print(f"{time.time() - start:.0f} s", flush=True)
        lines += bench_few(device)
        print(f"{time.time() - start:.0f} s", flush=True)
    failed += decode.run(a.folder, lib, list(odd_splits()), True, False)
    for name in WIDE:
        if time.time() - start < a.seconds:
            device.variants = {name: WIDE[name]}
            failed += hopper.check(device, "")
            checked += 1
            print(f"{time.time() - start:.0f} s", flush=True)
    print("\n".join(lines))
    print(f"{checked} of {len(WIDE)} kernels checked, {failed} checks failed, {time.time() - start:.0f} s")
    sys.exit(failed != 0)


if __name__ == "__main__":
    main()
