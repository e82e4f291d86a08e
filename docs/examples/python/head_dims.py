# SPDX-License-Identifier: MIT
"""Head dims: any from 1 to 256, and values narrower or wider than keys."""
import numpy as np

import fmha

fmha.start()
rng = np.random.default_rng(0)
pairs = [(16, 16), (32, 32), (64, 64), (80, 96), (88, 88), (128, 128), (160, 160), (192, 128), (256, 256), (16, 128), (5, 3)]
for hdim_q, hdim_v in pairs:
    q, k = (rng.standard_normal((1, 50, 2, hdim_q), dtype=np.float32) for _ in range(2))
    v = rng.standard_normal((1, 50, 2, hdim_v), dtype=np.float32)
    o = fmha.attention(q, k, v)
    s = np.einsum("bihd,bjhd->bhij", q, k) * hdim_q ** -0.5
    p = np.exp(s - s.max(-1, keepdims=True))
    error = np.abs(o - np.einsum("bhij,bjhd->bihd", p / p.sum(-1, keepdims=True), v)).max()
    assert o.shape == (1, 50, 2, hdim_v) and error < 1e-5, (hdim_q, hdim_v, error)
    print(f"{hdim_q} x {hdim_v}: largest error {error:.1e}")
