# SPDX-License-Identifier: MIT
"""Data types: what each costs in accuracy against the formula in float64. bfloat16 needs ml_dtypes."""
import numpy as np

import fmha

fmha.start()
rng = np.random.default_rng(0)
exact = [rng.standard_normal((1, 256, 4, 64)) for _ in range(3)]
types = {"float32": (np.float32, 1e-5), "float16": (np.float16, 2e-3)}
try:
    import ml_dtypes
    types["bfloat16"] = (ml_dtypes.bfloat16, 2e-2)
except ImportError:
    print("bfloat16: needs ml_dtypes")

for name, (dtype, most) in types.items():
    q, k, v = (x.astype(dtype) for x in exact)
    o = fmha.attention(q, k, v)
    assert o.dtype == q.dtype
    # The same rounded inputs, all the rest in float64: what is left is the kernel's own error.
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    s = np.einsum("bihd,bjhd->bhij", q, k) / 8
    p = np.exp(s - s.max(-1, keepdims=True))
    error = np.abs(o.astype(np.float64) - np.einsum("bhij,bjhd->bihd", p / p.sum(-1, keepdims=True), v)).max()
    print(f"{name}: largest error {error:.1e}")
    assert error < most, (name, error)
