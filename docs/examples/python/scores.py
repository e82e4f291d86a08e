# SPDX-License-Identifier: MIT
"""What is done to scores: soft cap, scale, a sink in the denominator; and LSE, with which results can be put together."""
import numpy as np

import fmha

fmha.start()
rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((1, 60, 3, 32), dtype=np.float32) * 4 for _ in range(3))
sink = rng.standard_normal(3, dtype=np.float32)
s = np.einsum("bihd,bjhd->bhij", q, k) * 0.1
cases = {
    "scale": (dict(scale=0.1), s, None),
    "soft cap": (dict(scale=0.1, softcap=5.0), 5 * np.tanh(s / 5), None),
    "sink": (dict(scale=0.1, sink=sink), s, sink),
}
for name, (options, scores, extra) in cases.items():
    o, lse = fmha.attention(q, k, v, return_lse=True, **options)
    e = np.exp(scores.astype(np.float64))
    total = e.sum(-1) + (0 if extra is None else np.exp(extra)[None, :, None])
    assert np.allclose(lse, np.log(total), atol=1e-4), name
    assert np.allclose(o, np.einsum("bhij,bjhd->bihd", e / total[..., None], v), atol=1e-4), name
    print(f"{name}: O and LSE as the formula has them")
