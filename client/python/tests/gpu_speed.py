# SPDX-License-Identifier: MIT
"""What a call costs the host, and end to end: fmha beside torch's own attention, in one process, on a GPU.

    FMHAD_SOCKET=... python3 client/python/tests/gpu_speed.py [--host]      # --host: what a call costs the host, alone
"""
import statistics
import subprocess
import sys
import time
import warnings

import fmha.flash_attn
import fmha.torch
import torch
from fmha import _slot_native
from torch.nn.attention import SDPBackend, sdpa_kernel

sdpa = torch.nn.functional.scaled_dot_product_attention

HAS_SLOT = hasattr(torch.nn.attention, "activate_flash_attention_impl")


def through_slot(function):
    """@function with fmhad in torch's slot: where host_us() takes turns, each turn enters it before its calls."""
    def enter():
        torch.nn.attention.activate_flash_attention_impl("fmha")
        return function

    return enter, torch.nn.attention.restore_flash_attention_impl


def by_python(function):
    """The same without the functions in C."""
    enter, leave = through_slot(function)

    def without():
        enter()
        _slot_native.deactivate()
        return function

    return without, leave


def empty_function(function, q):
    """@function with a function of Python's in the slot that returns what it returned before: below that nothing in Python comes."""
    results, libraries = [], []

    def enter():
        if not results:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                results.append(torch.ops.aten._scaled_dot_product_flash_attention(q, q, q))
        library = torch.library.Library("aten", "IMPL", "CUDA")
        libraries.append(library)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            library.impl("_scaled_dot_product_flash_attention", lambda *_, **__: results[0], "CUDA")
        return function

    return enter, lambda: libraries.pop()._destroy()


def host_us(calls, rounds=15, n=300):
    """Median microseconds of each callable until it returns, in turn."""
    found = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            call, leave = (call[0](), call[1]) if isinstance(call, tuple) else (call, None)
            call()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(n):
                call()
            found[name].append((time.perf_counter() - start) / n * 1e6)
            if leave is not None:
                leave()
    return {name: statistics.median(times) for name, times in found.items()}


def both_ms(calls, rounds=11, n=10):
    """Median milliseconds of each callable, on the device and until it returns: alike, the host is what it waits for."""
    found = {name: ([], []) for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            call()
            a.record()
            start = time.perf_counter()
            for _ in range(n):
                call()
            found[name][1].append((time.perf_counter() - start) / n * 1e3)
            b.record()
            b.synchronize()
            found[name][0].append(a.elapsed_time(b) / n)
    return {name: tuple(map(statistics.median, times)) for name, times in found.items()}


def import_ms(n=15):
    """What `import fmha` adds to numpy's own, in fresh processes, in turn."""
    found = {"numpy": [], "numpy, fmha": []}
    for _ in range(n):
        for modules, times in found.items():
            program = f"import time; a = time.perf_counter(); import {modules}; print(time.perf_counter() - a)"
            times.append(float(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout))
    return 1e3 * (statistics.median(found["numpy, fmha"]) - statistics.median(found["numpy"]))


def host_costs():
    q, k, v = (torch.randn(1, 4, 64, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    rows = [t.transpose(1, 2) for t in (q, k, v)]
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = torch.empty_like(rows[0])
    none = (None,) * 10
    compiled = {name: torch.compile(f, fullgraph=True, backend="aot_eager")
                for name, f in (("fmha", fmha.torch.scaled_dot_product_attention), ("torch", sdpa))}
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        with torch.no_grad():
            calls = {
                "flash_attn_func": lambda: fmha.flash_attn.flash_attn_func(*rows),
                "fmha.attention, out=": lambda: fmha.attention(*rows, out=out),
                "fmha.attention": lambda: fmha.attention(*rows),
                "fmha.torch sdpa": lambda: fmha.torch.scaled_dot_product_attention(q, k, v),
                "torch's sdpa, flash": lambda: sdpa(q, k, v),
                **({"torch's sdpa, fmha in the slot": through_slot(lambda: sdpa(q, k, v))} if HAS_SLOT else {}),
                **({"the same by Python alone": by_python(lambda: sdpa(q, k, v))} if HAS_SLOT else {}),
                "torch's sdpa, a function in the slot that does nothing": empty_function(lambda: sdpa(q, k, v), q),
                "torch.ops.fmha.attention": lambda: torch.ops.fmha.attention(q, k, v, *none, "bhsd", 0, -1, -1, None, 0.0, 0.0, 0, 0, False),
                "compiled (aot_eager), fmha": lambda: compiled["fmha"](q, k, v),
                "compiled (aot_eager), torch": lambda: compiled["torch"](q, k, v),
                "an empty kernel (zero_)": out.zero_,
            }
            costs = host_us(calls)
        costs |= host_us({
            "with gradients, fmha.torch sdpa": lambda: fmha.torch.scaled_dot_product_attention(*leaves),
            "with gradients, torch's sdpa, flash": lambda: sdpa(*leaves),
            **({"with gradients, torch's sdpa, fmha in the slot": through_slot(lambda: sdpa(*leaves)),
                "the same with gradients by Python alone": by_python(lambda: sdpa(*leaves))} if HAS_SLOT else {}),
        })
        grad = torch.randn_like(q)

        def both(function):
            return lambda: torch.autograd.grad(function(*leaves), leaves, grad)

        costs |= host_us({
            "forward and backward, fmha.torch sdpa": both(fmha.torch.scaled_dot_product_attention),
            "forward and backward, torch's sdpa, flash": both(sdpa),
            **({"forward and backward, torch's sdpa, fmha in the slot": through_slot(both(sdpa)),
                "the same forward and backward by Python alone": by_python(both(sdpa))} if HAS_SLOT else {}),
        })
    for name, us in costs.items():
        print(f"| {name} | {us:.1f} |")


def times():
    for shape in ((4, 16, 1024, 64), (4, 16, 1024, 128), (4, 16, 2048, 128), (2, 16, 8192, 128)):
        inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
        grad = torch.randn_like(inputs[0])

        def both(f, causal):
            torch.autograd.grad(f(*inputs, is_causal=causal), inputs, grad)

        def forward(f, causal):
            with torch.no_grad():
                f(*inputs, is_causal=causal)

        for causal in (False, True):
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                for name, work in (("forward", forward), ("forward and backward", both)):
                    found = both_ms({"fmha": lambda: work(fmha.torch.scaled_dot_product_attention, causal),
                                     "torch": lambda: work(sdpa, causal)})
                    (mine, my_host), (theirs, their_host) = found["fmha"], found["torch"]
                    print(f"| {', '.join(map(str, shape))} {'causal' if causal else 'full'} | {name} | {mine:.3f} ({my_host:.3f}) | "
                          f"{theirs:.3f} ({their_host:.3f}) | {theirs / mine:.2f} |", flush=True)


def main():
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"import fmha beyond numpy: {import_ms():.1f} ms")
    print("\n| host | us |\n|--|--:|")
    host_costs()
    if "--host" in sys.argv[1:]:
        return
    print("\n| batch, heads, length, hdim | | fmha ms (host) | torch flash ms (host) | torch / fmha |\n|--|--|--:|--:|--:|")
    times()


if __name__ == "__main__":
    main()
