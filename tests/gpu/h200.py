# SPDX-License-Identifier: MIT
"""GPU kernels on a real NVIDIA GPU: conformance against the reference, speed against PyTorch.

    python3 tests/gpu/h200.py [--arch sm_90a] [--no-conformance] [--bench forward,backward] [--trials] [--match TEXT]

Needs PyTorch, NVRTC and the shared library (FMHA_CHECK_LIB, or the build directory's). The table comes last. It is
about the kernels that a plan takes; --trials prints others beside them. Times are of several launches in
a row, so that neither side's cost of launching counts.
"""
import argparse
import concurrent.futures
import functools
import itertools
import multiprocessing
import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import abi  # noqa: E402
import gpu_timer  # noqa: E402
import hopper  # noqa: E402
import hopper_bwd  # noqa: E402
import suite  # noqa: E402
from cuda_device import CudaDevice  # noqa: E402


def conformance(lib, device, arch, match, workers):
    cases = [*suite.small(False), *suite.wide(), *(suite.hopper() if arch == "sm_90a" else [])]
    cases = [c for c in cases if match in str(c)]
    start = time.time()
    kernels = {k.name: k for c in cases for k in suite.kernels(c, lib, arch) if k}
    logs = device.build(kernels.values(), workers)
    spills = [n for n, text in logs.items() if "bytes spill stores" in text and " 0 bytes spill stores" not in text]
    print(f"{len(kernels)} kernels built in {time.time() - start:.0f} s, {len(spills)} with spills", flush=True)
    for n in spills:
        print("  spills:", n, [x.strip() for x in logs[n].splitlines() if "spill" in x][0][-70:])
    failed = done = 0

    def one(case):
        try:
            print(f"start {case}", file=sys.stderr)
            suite.run(case, lib, device, arch)
        except (AssertionError, RuntimeError, ValueError) as error:
            return f"FAIL {case}: {str(error)[:200]}"
        return None

    # The reference computes outside of Python's lock, so cases overlap; launches do not.
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        for text in pool.map(one, cases):
            done += 1
            if text:
                failed += 1
                print(text, flush=True)
            elif done % 20 == 0:
                print(f"  {done} cases, {time.time() - start:.0f} s", flush=True)
    print(f"conformance: {len(cases) - failed} of {len(cases)} cases passed, {time.time() - start:.0f} s", flush=True)
    return failed


# ---- speed ----------------------------------------------------------------------------------


# Beside the tiles that plans have, by head dim.
TRIALS = {
    "forward": {64: [(128, 64, 4, 3), (64, 64, 4, 4), (128, 96, 4, 2), (128, 64, 8, 2)],
                128: [(128, 64, 4, 2), (128, 32, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2), (128, 128, 8, 1), (256, 64, 8, 1), (192, 64, 6, 1)]},
    "backward": {64: [(32, 128, 4, 1), (64, 128, 8, 1), (32, 64, 4, 2), (64, 64, 4, 2), (32, 128, 4, 2)],
                 128: [(32, 128, 8, 1), (32, 64, 4, 1), (32, 64, 4, 2), (64, 64, 4, 1)]},
}
SHAPES = {  # head dim, batch, length, heads
    "forward": [(64, 4, 4096, 16), (128, 4, 4096, 16), (64, 1, 16384, 16), (128, 1, 16384, 16), (128, 16, 1024, 16), (256, 2, 4096, 8)],
    "backward": [(64, 4, 4096, 16), (128, 4, 4096, 16)],
}


def candidates(lib, arch, family, args, tiles=None):
    """The kernel that a plan takes, first. With tiles (rows, keys, waves, blocks): all others that it could take, and those."""
    found = [abi.choose_kernel(lib, arch, family, abi.BF16, args)]
    if tiles is None:
        return found
    while (kernel := abi.choose_kernel(lib, arch, family, abi.BF16, args, candidate=len(found))) is not None:
        found.append(kernel)
    mma, d = abi.PIPELINES.index("gpu_mma"), args.hdim_q
    found += [abi.make_kernel(lib, arch, family, abi.BF16, args, abi.Tile(mma, m, n, d, d, waves, 1, blocks)) for m, n, waves, blocks in tiles]
    return list({k.name: k for k in found if k is not None and "scalar" not in abi.pipeline_of(k)}.values())


def library(torch, p, causal, backward):
    """PyTorch's own, and its outputs beside where ours go."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    q, k, v = (x.transpose(1, 2).detach().requires_grad_(backward) for x in (p.q, p.k, p.v))

    def forward():
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    if not backward:
        return forward, [(p.o, forward().transpose(1, 2))]
    out, d_o = forward(), p.d_o.transpose(1, 2)

    def gradients():
        return torch.autograd.grad(out, (q, k, v), d_o, retain_graph=True)
    return gradients, [(mine, x.transpose(1, 2)) for mine, x in zip((p.dq, p.dk, p.dv), gradients())]


def bench(what, lib, device, arch, workers, trials):
    torch, lines, backward = device.torch, [], what == "backward"
    for (d, b, s, h), causal in itertools.product(SHAPES[what], (False, True)):
        make = functools.partial(hopper_bwd.make, solved=False) if backward else hopper.make
        p = make(torch, b, h, h, s, s, d, d, **(hopper.CAUSAL if causal else {}))
        args = hopper.Problem.args(p)
        if backward:
            device.launch(candidates(lib, arch, abi.FWD, args)[0], args)
            args = p.plain_args()
            dot = abi.choose_kernel(lib, arch, abi.BWD_DOT_DO_O, abi.BF16, args)
        kernels = candidates(lib, arch, abi.BWD_DQ_DK_DV if backward else abi.FWD, args, TRIALS[what].get(d, []) if trials else None)
        for n, text in device.build([dot, *kernels] if backward else kernels, workers).items():
            print("built", n, [x.strip()[-75:] for x in text.splitlines() if "spill" in x or "registers" in x])
        sdpa, outputs = library(torch, p, causal, backward)
        sides = {"SDPA": [sdpa], **({"dot": [lambda: device.launch(dot, args)]} if backward else {})}
        differs = {}
        for n, kernel in enumerate(kernels):
            sides[n] = [lambda kernel=kernel: device.launch(kernel, args)]
            if backward:
                sides["dot"][0]()
            try:
                sides[n][0]()
            except RuntimeError as error:
                print(kernel.name, error)
                del sides[n]
                continue
            differs[n] = max((mine.float() - x.float()).abs().max().item() for mine, x in outputs)
        times = gpu_timer.compare(torch, sides, 10)
        flops, base, dot_ms = (10 if backward else 4) * b * h * s * s * d * (0.5 if causal else 1), times["SDPA"], times.get("dot", 0)
        for n, diff in differs.items():
            t, ms = kernels[n].tile, times[n] + dot_ms
            print(f"  {what} d{d} s{s} causal={int(causal)} {t.tile_m}x{t.tile_n} w{t.waves_m} b{t.blocks_per_cu}: {flops / ms / 1e9:.0f} TF "
                  f"({base / ms:.2f} of SDPA), dot {dot_ms:.3f} of {ms:.3f} ms, diff {diff:.3g}", flush=True)
        n = next(iter(differs))  # the one that a plan takes
        t, ms = kernels[n].tile, times[n] + dot_ms
        lines.append(f"{what} d{d} b{b} s{s} h{h} {'causal' if causal else 'full  '}  SDPA {flops / base / 1e9:5.0f}  ours "
                     f"{flops / ms / 1e9:5.0f} TFLOP/s  {base / ms:.2f}  {t.tile_m}x{t.tile_n} w{t.waves_m} b{t.blocks_per_cu}")
    return lines


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--match", default="")
    parser.add_argument("--no-conformance", action="store_true")
    parser.add_argument("--bench", default="forward,backward")
    parser.add_argument("--trials", action="store_true", help="time other tiles, too")
    parser.add_argument("--list", action="store_true", help="compile what the suite needs, run nothing")
    options = parser.parse_args()
    workers = min(14, os.cpu_count() or 1)
    multiprocessing.set_start_method("spawn")
    lib = abi.load_library(os.environ.get("FMHA_CHECK_LIB"))
    device = CudaDevice(lib, options.arch)
    failed, table = 0, []
    if not options.no_conformance:
        failed = conformance(lib, device, options.arch, options.match, workers)
    for name in filter(None, options.bench.split(",")):
        start = time.time()
        try:
            table += bench(name, lib, device, options.arch, workers, options.trials)
        except RuntimeError as error:
            table.append(f"{name}: {str(error)[:300]}")
        print(f"bench {name}: {time.time() - start:.0f} s", flush=True)
    print("\n".join(table))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
