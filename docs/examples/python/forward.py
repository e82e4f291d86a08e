# SPDX-License-Identifier: MIT
"""The first call: attention on numpy arrays, beside the formula itself."""
import numpy as np

import fmha

fmha.start()  # a private daemon, until this program ends; not needed where one runs
rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((2, 128, 8, 64), dtype=np.float32) for _ in range(3))  # batch, rows, heads, head dim
o = fmha.attention(q, k, v)

s = np.einsum("bihd,bjhd->bhij", q, k) / 8  # 1 / sqrt(64), the default scale
p = np.exp(s - s.max(-1, keepdims=True))
expected = np.einsum("bhij,bjhd->bihd", p / p.sum(-1, keepdims=True), v)
error = np.abs(o - expected).max()
assert error < 1e-5, error
print(f"o {o.shape}, largest error {error:.1e}")
