# SPDX-License-Identifier: MIT
"""Gradients, beside the change of the loss when one element is moved a little."""
import numpy as np

import fmha

fmha.start()
rng = np.random.default_rng(0)
q = rng.standard_normal((1, 20, 4, 16), dtype=np.float32)
k, v = (rng.standard_normal((1, 30, 2, 16), dtype=np.float32) for _ in range(2))  # summed over a group's heads
grad = rng.standard_normal(q.shape, dtype=np.float32)
o, lse = fmha.attention(q, k, v, causal=True, return_lse=True)
dq, dk, dv = fmha.attention_backward(grad, q, k, v, o, lse, causal=True)

for name, x, dx in (("dQ", q, dq), ("dK", k, dk), ("dV", v, dv)):
    direction = rng.standard_normal(x.shape).astype(np.float32)
    step = 1e-2
    losses = []
    for sign in (1, -1):
        moved = {id(q): q, id(k): k, id(v): v}
        moved[id(x)] = x + sign * step * direction
        losses.append((fmha.attention(*moved.values(), causal=True).astype(np.float64) * grad).sum())
    slope, expected = (losses[0] - losses[1]) / (2 * step), (dx.astype(np.float64) * direction).sum()
    print(f"{name}: {expected:.4f} by the gradient, {slope:.4f} by moving it")
    assert abs(slope - expected) < 2e-3 * max(1, abs(expected)), name
