# SPDX-License-Identifier: MIT
"""Dropout: the same seed and offset give the same elements, whatever computes them."""
import numpy as np

import fmha

fmha.start()
rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((2, 128, 4, 64), dtype=np.float32) for _ in range(3))
rate = 0.2
o, drawn = fmha.attention(q, k, v, dropout_p=rate, seed=7, offset=0, return_randval=True)
again = fmha.attention(q, k, v, dropout_p=rate, seed=7, offset=0)
other = fmha.attention(q, k, v, dropout_p=rate, seed=7, offset=32 * 2 * 4)  # where the next call's begin
assert (o == again).all() and not np.allclose(o, other)

# A byte an element: kept up to floor(255 * 0.8), scaled by 1 / 0.8.
kept = drawn <= int(255 * (1 - rate))
s = np.einsum("bihd,bjhd->bhij", q, k) / 8
p = np.exp(s - s.max(-1, keepdims=True))
p /= p.sum(-1, keepdims=True)
assert np.allclose(o, np.einsum("bhij,bjhd->bihd", np.where(kept, p / (1 - rate), 0), v), atol=1e-5)
print(f"{kept.mean():.3f} of the elements kept, {1 - rate} wanted")
assert abs(kept.mean() - (int(255 * (1 - rate)) + 1) / 256) < 0.005
