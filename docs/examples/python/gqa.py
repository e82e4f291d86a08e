# SPDX-License-Identifier: MIT
"""Grouped queries: fewer heads of K and V than of Q, down to one (MQA)."""
import numpy as np

import fmha

fmha.start()
rng = np.random.default_rng(0)
for heads_q, heads_k in ((8, 8), (8, 4), (14, 2), (12, 1)):
    q = rng.standard_normal((1, 64, heads_q, 64), dtype=np.float32)
    k, v = (rng.standard_normal((1, 64, heads_k, 64), dtype=np.float32) for _ in range(2))
    o = fmha.attention(q, k, v, causal=True)
    # Head h of Q reads head h // (heads_q // heads_k) of K and V: the same as if those were repeated.
    wide = [np.repeat(x, heads_q // heads_k, axis=2) for x in (k, v)]
    assert np.allclose(o, fmha.attention(q, *wide, causal=True), atol=1e-6)
    print(f"{heads_q} heads on {heads_k}: like {heads_q} on {heads_q}")
try:
    fmha.attention(q, k[:, :, :0], v[:, :, :0])
except fmha.InvalidError as error:
    print(f"and no heads at all: {error}")
else:
    raise AssertionError("heads that do not divide are refused")
