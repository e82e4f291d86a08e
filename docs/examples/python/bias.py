# SPDX-License-Identifier: MIT
"""Bias: elements that are added to the scores, broadcast as numpy does, and ALiBi's slopes."""
import numpy as np

import fmha

fmha.start()
rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((2, 40, 4, 32), dtype=np.float32) for _ in range(3))
s = np.einsum("bihd,bjhd->bhij", q, k) * 32 ** -0.5


def formula(scores):
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhij,bjhd->bihd", p / p.sum(-1, keepdims=True), v)


for shape in ((2, 4, 40, 40), (1, 4, 40, 40), (1, 1, 40, 40), (2, 1, 1, 40)):
    bias = rng.standard_normal(shape, dtype=np.float32)
    assert np.allclose(fmha.attention(q, k, v, bias=bias), formula(s + bias), atol=1e-5), shape
    print(f"bias {shape}: as numpy broadcasts it")

slopes = (2.0 ** -np.arange(1, 5)).astype(np.float32)  # one a head
distance = np.abs(np.arange(40)[:, None] - np.arange(40)[None, :])
expected = formula(s - slopes[:, None, None] * distance)
assert np.allclose(fmha.attention(q, k, v, alibi_slopes=slopes), expected, atol=1e-5)
print("ALiBi: -slope * distance")
