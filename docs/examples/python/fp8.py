# SPDX-License-Identifier: MIT
"""fp8: e4m3 tensors with a scale each, and the result in bfloat16 or float32. Needs ml_dtypes."""
import sys

import numpy as np

import fmha

try:
    import ml_dtypes
except ImportError:
    print("needs ml_dtypes: pip install './client/python[types]'")
    sys.exit(77)

fmha.start()
rng = np.random.default_rng(0)
exact = [rng.standard_normal((1, 256, 4, 64)) * 30 for _ in range(3)]


def quantised(x):
    """x is about scale * what is returned, whose largest element is e4m3's."""
    scale = np.abs(x).max() / 448
    return (x / scale).astype(ml_dtypes.float8_e4m3fn), np.float32(scale)


(q, sq), (k, sk), (v, sv) = map(quantised, exact)
out = np.empty(q.shape, np.float32)
fmha.attention(q, k, v, q_descale=sq, k_descale=sk, v_descale=sv, scale=1e-3, out=out)

q, k, v = (x.astype(np.float64) * s for x, s in ((q, sq), (k, sk), (v, sv)))
s = np.einsum("bihd,bjhd->bhij", q, k) * 1e-3
p = np.exp(s - s.max(-1, keepdims=True))
expected = np.einsum("bhij,bjhd->bihd", p / p.sum(-1, keepdims=True), v)
error = np.abs(out - expected).max() / np.abs(v).max()
assert error < 0.1, error
print(f"largest error {error:.1e} of the largest value")
