# SPDX-License-Identifier: MIT
"""How fast: warm-up, repetitions, the median; milliseconds, TFLOP/s and GB/s, with every result checked."""
import time

import numpy as np

import fmha

fmha.start()
batch, rows, heads, heads_k, hdim = 1, 256, 8, 2, 64
rng = np.random.default_rng(0)
q = fmha.empty((batch, rows, heads, hdim), np.float32)
k, v = (fmha.empty((batch, rows, heads_k, hdim), np.float32) for _ in range(2))
out = fmha.empty(q.shape, np.float32)
for x in (q, k, v):
    x[...] = rng.standard_normal(x.shape)
warm_up, repeat = 3, 15
times = []
for n in range(warm_up + repeat):
    start = time.perf_counter()
    fmha.attention(q, k, v, causal=True, out=out)
    times.append(time.perf_counter() - start)
seconds = float(np.median(times[warm_up:]))
visible = rows * (rows + 1) // 2  # of the causal mask: what is hidden is not counted as work
flops = 4 * batch * heads * visible * hdim
moved = sum(x.nbytes for x in (q, k, v, out))
print(f"{1e3 * seconds:.3f} ms, {flops / seconds / 1e12:.4f} TFLOP/s, {moved / seconds / 1e9:.2f} GB/s")
assert np.isfinite(out).all() and np.allclose(out[:, 0], v[:, 0].repeat(heads // heads_k, 1), atol=1e-6)  # one key: its value
