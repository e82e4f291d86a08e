# SPDX-License-Identifier: MIT
"""GPU kernels on a real NVIDIA GPU: conformance against the reference, speed against PyTorch.

    python3 tests/gpu/h200.py [--arch sm_90a] [--no-conformance] [--bench forward,backward] [--trials] [--match TEXT]

Needs PyTorch, NVRTC and the shared library (FMHA_CHECK_LIB, or the build directory's). The table comes last. It is
about the kernels that a plan takes; --trials prints others beside them. Times are of several launches in
a row, so that neither side's cost of launching counts.
"""
import argparse
import concurrent.futures
import ctypes
import multiprocessing
import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import abi  # noqa: E402
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


def time_ms(torch, f, reps=20, at_once=4):
    """The median of `reps` times, each of several calls in a row, so that the GPU never waits for the host."""
    for _ in range(3):
        f()
    torch.cuda.synchronize()
    times = []
    for _ in range(reps):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        f()
        a.record()
        for _ in range(at_once):
            f()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b) / at_once)
    times.sort()
    return times[len(times) // 2]


def tensor_of(t):
    """(batch, seq, head, dim) strides of a torch tensor in that order."""
    return abi.STRUCTS["abi_tensor"](t.data_ptr(), *t.stride())


def forward_args(torch, q, k, v, o, lse, causal):
    a = abi.FwdArgs()
    b, sq, hq, d = q.shape
    a.q, a.k, a.v, a.o = (tensor_of(x) for x in (q, k, v, o))
    if lse is not None:
        a.lse = abi.STRUCTS["abi_rows"](lse.data_ptr(), hq * sq, sq, 1)
    s = a.sequences
    s.batch, s.seqlen_q_max, s.seqlen_k_max = b, sq, k.shape[1]
    s.total_q, s.total_k = b * sq, b * k.shape[1]
    a.nhead_q, a.nhead_k, a.hdim_q, a.hdim_v = hq, k.shape[2], d, v.shape[3]
    a.scale, a.dtype, a.o_dtype = d ** -0.5, abi.BF16, abi.BF16
    a.band.window_left = -1
    a.band.window_right = -1
    if causal:
        a.band.mask, a.band.window_right = abi.MASK_BOTTOM_RIGHT, 0
    return a


def make_kernel(lib, arch, family, args, tile):
    """tile: (pipeline, m, n, hq, hv, wm, wn, blocks)"""
    t, kernel = abi.Tile(abi.PIPELINES.index(tile[0]), *tile[1:]), abi.Kernel()
    if lib.check_make(arch.encode(), family, abi.BF16, ctypes.byref(args), ctypes.byref(t), ctypes.byref(kernel)):
        return None
    return kernel


def candidates(lib, arch, family, args, extra=None):
    """The kernel that a plan takes, first. With extra tiles: all others that it could take, and those."""
    found, n = [], 0
    if extra is None:
        return [abi.choose_kernel(lib, arch, family, abi.BF16, args)]
    while (kernel := abi.choose_kernel(lib, arch, family, abi.BF16, args, candidate=n)) is not None:
        if "scalar" not in abi.pipeline_of(kernel):
            found.append(kernel)
        n += 1
    found += [k for t in extra if (k := make_kernel(lib, arch, family, args, t)) is not None]
    unique = {}
    for k in found:
        unique.setdefault(k.name, k)
    return list(unique.values())


def bench_forward(lib, device, arch, workers, trials):
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    lines, shapes = [], [(64, 4, 4096, 16), (128, 4, 4096, 16), (64, 1, 16384, 16), (128, 1, 16384, 16), (128, 16, 1024, 16),
                         (256, 2, 4096, 8)]
    extra = {64: [("gpu_mma", 128, 64, 64, 64, 4, 1, 3), ("gpu_mma", 64, 64, 64, 64, 4, 1, 4), ("gpu_mma", 128, 96, 64, 64, 4, 1, 2),
                  ("gpu_mma", 128, 64, 64, 64, 8, 1, 2)],
             128: [("gpu_mma", 128, 64, 128, 128, 4, 1, 2), ("gpu_mma", 128, 32, 128, 128, 4, 1, 2), ("gpu_mma", 64, 64, 128, 128, 4, 1, 3), ("gpu_mma", 128, 64, 128, 128, 8, 1, 2),
                   ("gpu_mma", 128, 128, 128, 128, 8, 1, 1), ("gpu_mma", 256, 64, 128, 128, 8, 1, 1), ("gpu_mma", 192, 64, 128, 128, 6, 1, 1)],
             256: []}
    plans = []
    for d, b, s, h in shapes:
        for causal in (False, True):
            q, k, v = (torch.randn(b, s, h, d, device="cuda", dtype=torch.bfloat16) for _ in range(3))
            o = torch.empty_like(q)
            lse = torch.empty(b, h, s, device="cuda", dtype=torch.float32)
            args = forward_args(torch, q, k, v, o, lse, causal)
            plans.append((d, b, s, h, causal, q, k, v, o, lse, args, candidates(lib, arch, abi.FWD, args, extra[d] if trials else None)))
    logs = device.build([k for p in plans for k in p[-1]], workers)
    for n, text in logs.items():
        print("built", n, [x.strip()[-75:] for x in text.splitlines() if "spill" in x or "registers" in x])
    for d, b, s, h, causal, q, k, v, o, lse, args, kernels in plans:
        flops = 4 * b * h * s * s * d * (0.5 if causal else 1)
        qt, kt, vt = (x.transpose(1, 2) for x in (q, k, v))

        def sdpa():
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return torch.nn.functional.scaled_dot_product_attention(qt, kt, vt, is_causal=causal)
        want = sdpa().transpose(1, 2)
        base = time_ms(torch, sdpa, 10)
        best = None
        for kernel in kernels:
            try:
                ms = time_ms(torch, lambda: device.launch(kernel, args), 10)
            except RuntimeError as error:
                print(kernel.name, error)
                continue
            error = (o.float() - want.float()).abs().max().item()
            t = kernel.tile
            print(f"  fwd d{d} s{s} causal={int(causal)} {t.tile_m}x{t.tile_n} w{t.waves_m} b{t.blocks_per_cu}: "
                  f"{flops / ms / 1e9:.0f} TF ({base / ms:.2f} of SDPA), diff {error:.3g}", flush=True)
            if best is None:  # the one that a plan takes
                best = (ms, kernel)
        ms, kernel = best
        base = min(base, time_ms(torch, sdpa, 10))
        t = kernel.tile
        lines.append(f"fwd d{d} b{b} s{s} h{h} {'causal' if causal else 'full  '}  SDPA {flops / base / 1e9:5.0f}  ours "
                     f"{flops / ms / 1e9:5.0f} TFLOP/s  {base / ms:.2f}  {t.tile_m}x{t.tile_n} w{t.waves_m} b{t.blocks_per_cu}")
    return lines


def bench_backward(lib, device, arch, workers, trials):
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    lines, plans = [], []
    extra = {64: [("gpu_mma", 32, 128, 64, 64, 4, 1, 1), ("gpu_mma", 64, 128, 64, 64, 8, 1, 1), ("gpu_mma", 32, 64, 64, 64, 4, 1, 2),
                  ("gpu_mma", 64, 64, 64, 64, 4, 1, 2), ("gpu_mma", 32, 128, 64, 64, 4, 1, 2)],
             128: [("gpu_mma", 32, 128, 128, 128, 8, 1, 1), ("gpu_mma", 32, 64, 128, 128, 4, 1, 1), ("gpu_mma", 32, 64, 128, 128, 4, 1, 2),
                   ("gpu_mma", 64, 64, 128, 128, 4, 1, 1)]}
    for d, b, s, h in ((64, 4, 4096, 16), (128, 4, 4096, 16)):
        for causal in (False, True):
            q, k, v, g = (torch.randn(b, s, h, d, device="cuda", dtype=torch.bfloat16) for _ in range(4))
            plans.append((d, b, s, h, causal, q, k, v, g))
    for d, b, s, h, causal, q, k, v, g in plans:
        flops = 10 * b * h * s * s * d * (0.5 if causal else 1)
        qt, kt, vt = (x.transpose(1, 2).detach().requires_grad_(True) for x in (q, k, v))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(qt, kt, vt, is_causal=causal)
        gt = g.transpose(1, 2)

        def sdpa():
            return torch.autograd.grad(out, (qt, kt, vt), gt, retain_graph=True)
        want = [x.transpose(1, 2) for x in sdpa()]
        base = time_ms(torch, sdpa, 10)
        o = torch.empty_like(q)
        lse = torch.empty(b, h, s, device="cuda", dtype=torch.float32)
        f = forward_args(torch, q, k, v, o, lse, causal)
        device.launch(candidates(lib, arch, abi.FWD, f)[0], f)
        a = abi.BwdArgs()
        for name in ("q", "k", "v", "o", "lse", "sequences", "band", "nhead_q", "nhead_k", "hdim_q", "hdim_v", "scale", "dtype"):
            setattr(a, name, getattr(f, name))
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        row = torch.empty(b, h, s, device="cuda", dtype=torch.float32)
        a.d_o, a.dq, a.dk, a.dv = (tensor_of(x) for x in (g, dq, dk, dv))
        a.d = abi.STRUCTS["abi_rows"](row.data_ptr(), h * s, s, 1)
        dot = abi.choose_kernel(lib, arch, abi.BWD_DOT_DO_O, abi.BF16, a)
        kernels = candidates(lib, arch, abi.BWD_DQ_DK_DV, a, extra[d] if trials else None)
        logs = device.build([dot, *kernels], workers)
        for n, text in logs.items():
            print("built", n, [x.strip()[-75:] for x in text.splitlines() if "spill" in x or "registers" in x])
        dot_ms, best = time_ms(torch, lambda: device.launch(dot, a), 10), None
        for kernel in kernels:
            try:
                ms = time_ms(torch, lambda: device.launch(kernel, a), 10) + dot_ms
            except RuntimeError as error:
                print(kernel.name, error)
                continue
            error = max((x.float() - w.float()).abs().max().item() for x, w in zip((dq, dk, dv), want))
            t = kernel.tile
            print(f"  bwd d{d} causal={int(causal)} {t.tile_m}x{t.tile_n} w{t.waves_m} b{t.blocks_per_cu}: {flops / ms / 1e9:.0f} TF "
                  f"({base / ms:.2f} of SDPA), dot {dot_ms:.3f} of {ms:.3f} ms, diff {error:.3g}", flush=True)
            if best is None:  # the one that a plan takes
                best = (ms, kernel)
        ms, kernel = best
        t = kernel.tile
        lines.append(f"bwd d{d} b{b} s{s} h{h} {'causal' if causal else 'full  '}  SDPA {flops / base / 1e9:5.0f}  ours "
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
            table += globals()["bench_" + name](lib, device, options.arch, workers, options.trials)
        except RuntimeError as error:
            table.append(f"{name}: {str(error)[:300]}")
        print(f"bench {name}: {time.time() - start:.0f} s", flush=True)
    print("\n".join(table))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
