# SPDX-License-Identifier: MIT
"""fmhad in torch's slot on a GPU, judged by the formula in double: what test_slot.py tests on the CPU, and graphs. No pytest is needed.

    FMHAD_SOCKET=... python3 client/python/tests/gpu_slot.py [cpu|cuda]
"""
import math
import sys
import threading

import fmha
import fmha.torch
import torch
from fmha import _slot, _slot_native
from torch.nn.attention import SDPBackend, activate_flash_attention_impl, restore_flash_attention_impl, sdpa_kernel

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cuda"
BARS = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
sdpa = torch.nn.functional.scaled_dot_product_attention
aten = torch.ops.aten
failed = []


def made(*shape, dtype=torch.float16, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype).requires_grad_()


def exact(q, k, v, hidden=None, keep=None, scale=None):
    """[.., rows, hdim] in double; @keep: dropout's mask, with the factor of what is kept."""
    group = q.shape[-3] // k.shape[-3]
    k, v = (t.repeat_interleave(group, -3) for t in (k, v))
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    p = (s if hidden is None else s.masked_fill(hidden, -math.inf)).softmax(-1)
    return (p if keep is None else p * keep) @ v


def compare(name, function, formula, tensors, bar):
    doubles = [t.detach().double().requires_grad_() for t in tensors]
    worst, asked = 0.0, 0
    for _ in range(2):  # the second time by the functions in C, where they are
        before = sum(_slot.calls().values())
        o = function(*tensors)
        asked += sum(_slot.calls().values()) - before
        want = formula(*doubles)
        grad = made(*o.shape, dtype=o.dtype, seed=9).detach()
        wanted = [want, *torch.autograd.grad(want, doubles, grad.double())]
        found = [o, *torch.autograd.grad(o, tensors, grad)]
        worst = max([worst, *(((a.double() - b).abs().max() / max(1, b.abs().max())).item() for a, b in zip(found, wanted))])
    good = worst <= bar and asked > 1
    print(f"{'ok' if good else 'FAILED'}: {name}: {worst:.1e}, fmhad was asked {asked} times", flush=True)
    if not good:
        failed.append(name)


def causal(rows, keys):
    return torch.ones(rows, keys, dtype=torch.bool, device=DEVICE).triu(keys - rows + 1)


def dense():
    for dtype, bar in BARS.items():
        for heads, kv_heads, rows, hdim in ((4, 4, 64, 64), (8, 2, 131, 128), (4, 1, 33, 40), (2, 2, 257, 256)):
            for is_causal in (False, True):
                q, k, v = made(2, heads, rows, hdim, dtype=dtype), *(made(2, kv_heads, rows, hdim, dtype=dtype, seed=s) for s in (1, 2))
                compare(f"sdpa {dtype} {heads}/{kv_heads} heads, {rows} rows, {hdim}, causal {is_causal}",
                        lambda *t, c=is_causal: sdpa(*t, is_causal=c, enable_gqa=True),
                        lambda *t, c=is_causal, n=rows: exact(*t, causal(n, n) if c else None), (q, k, v), bar)
    base = made(2, 64, 3, 4, 64)
    compare("sdpa of a packed qkv", lambda t: sdpa(*t.permute(2, 0, 3, 1, 4)), lambda t: exact(*t.permute(2, 0, 3, 1, 4)), (base,), BARS[torch.float16])
    odd = made(2 * 4 * 64 * 64 + 4)
    compare("sdpa of what is not aligned", lambda t: sdpa(*[t[4:].view(2, 4, 64, 64)] * 3), lambda t: exact(*[t[4:].view(2, 4, 64, 64)] * 3), (odd,),
            2 * BARS[torch.float16])
    q, k, v = made(2, 30, 4, 64), made(2, 50, 4, 64, seed=1), made(2, 50, 4, 64, seed=2)
    distance = torch.arange(30, device=DEVICE)[:, None] + 20 - torch.arange(50, device=DEVICE)
    words = {"window_size_left": 9, "window_size_right": 0}
    compare("_flash_attention_forward, a window", lambda *t: aten._flash_attention_forward(*t, None, None, 30, 50, 0.0, False, False, **words)[0],
            lambda *t: exact(*(x.transpose(1, 2) for x in t), (distance > 9) | (distance < 0)).transpose(1, 2), (q, k, v), BARS[torch.float16])


def packed():
    lengths = (7, 0, 90)
    cu = torch.tensor([0, 7, 7, 97], dtype=torch.int32, device=DEVICE)

    def each(q, k, v):
        parts = [exact(*(t.transpose(0, 1) for t in xs), causal(n, n)).transpose(0, 1)
                 for n, *xs in zip(lengths, q.split(lengths), k.split(lengths), v.split(lengths)) if n]
        return torch.cat(parts)

    q, k, v = made(97, 4, 64), made(97, 2, 64, seed=1), made(97, 2, 64, seed=2)
    compare("packed sequences", lambda *t: aten._flash_attention_forward(*t, cu, cu, 90, 90, 0.0, True, False)[0], each, (q, k, v), BARS[torch.float16])


def dropout():
    q, k, v = (made(2, 4, 128, 64, seed=s) for s in range(3))
    kept = []

    def mine(*t):
        kept.clear()
        found = aten._scaled_dot_product_flash_attention(*t, 0.3, True, True)
        kept.append((found[-1] >= 0).double() / 0.7)
        return found[0]

    share = []

    def formula(*t):
        hidden = causal(128, 128)
        share.append(((kept[0] == 0) & ~hidden).sum().item() / ((~hidden).sum().item() * 8))
        return exact(*t, hidden, kept[0])

    compare("dropout", mine, formula, (q, k, v), BARS[torch.float16])
    if not 0.28 < share[0] < 0.32:
        failed.append(f"dropout drops {share[0]}")


def graphs():
    q, k, v = (made(2, 4, 128, 64, seed=s) for s in range(3))
    for p in (0.0, 0.2):
        with torch.no_grad():
            aten._scaled_dot_product_flash_attention(q, k, v, p, True)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                o = aten._scaled_dot_product_flash_attention(q, k, v, p, True)[0]
            graph.replay()
            first = o.clone()
            graph.replay()
            if torch.equal(first, o) != (p == 0):
                failed.append(f"a graph with dropout {p}")
    print("ok: graphs", flush=True)


def in_c():
    """The functions in C: that they were asked, that memory stays, that exceptions arrive, that threads may call them."""
    if _slot_native.why_not() is not None:
        return print(f"the slot is Python's: {_slot_native.why_not()}", flush=True)
    counts = _slot_native.counts()
    if not all(counts.get(name, 0) > 10 for name in _slot_native.SERVED):
        failed.append(f"the functions in C were hardly asked: {counts}")
    q, k, v = (made(2, 4, 128, 64, seed=s) for s in range(3))
    with torch.no_grad():
        want = sdpa(q, k, v)
        for bad, field in ((lambda: aten._scaled_dot_product_flash_attention(q, k[:, :3], v[:, :3]), "nhead"),):
            try:
                bad()
                failed.append(f"{field} is not refused")
            except fmha.FmhaError as error:
                print(f"ok: refused by name: {type(error).__name__}, {error.field}: {error}", flush=True)
        wrong = []

        def work():
            with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                for _ in range(300):
                    if not torch.equal(sdpa(q, k, v), want):
                        wrong.append(1)

        torch.cuda.synchronize()
        threads = [threading.Thread(target=work) for _ in range(4)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        if wrong:
            failed.append(f"{len(wrong)} results of threads")

    def many(n):
        for _ in range(n):
            torch.autograd.grad(sdpa(q, k, v), (q, k, v), q)
        torch.cuda.synchronize()
        return int(open("/proc/self/statm").read().split()[1]) * 4096, torch.cuda.memory_allocated()

    many(500)
    (host, device), (host_after, device_after) = many(500), many(3000)
    if host_after > host + (4 << 20) or device_after != device:
        failed.append(f"memory grows: {host_after - host} bytes of the host's, {device_after - device} of the device's")
    print(f"ok: threads, memory; {_slot_native.counts()}", flush=True)


def main():
    if DEVICE == "cuda":
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    activate_flash_attention_impl("fmha")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        dense()
        packed()
        dropout()
        if DEVICE == "cuda":
            graphs()
            in_c()
    restore_flash_attention_impl()
    print(f"{dict(_slot.calls())}, left to torch: {dict(_slot.left_to_torch)}; failed: {failed or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
