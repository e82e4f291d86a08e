# SPDX-License-Identifier: MIT
"""Many threads with calls of all shapes at once, each result checked; then a wrong call, after which all goes on."""
import concurrent.futures

import numpy as np

import fmha

fmha.start()


def one(seed):
    rng = np.random.default_rng(seed)
    rows, keys, heads, hdim = (int(x) for x in (rng.integers(1, 60), rng.integers(1, 90), rng.integers(1, 5), rng.integers(1, 65)))
    q = rng.standard_normal((2, rows, heads, hdim), dtype=np.float32)
    k, v = (rng.standard_normal((2, keys, heads, hdim), dtype=np.float32) for _ in range(2))
    o = fmha.attention(q, k, v)
    s = np.einsum("bihd,bjhd->bhij", q, k) * hdim ** -0.5
    p = np.exp(s - s.max(-1, keepdims=True))
    return np.abs(o - np.einsum("bhij,bjhd->bihd", p / p.sum(-1, keepdims=True), v)).max()


with concurrent.futures.ThreadPoolExecutor(8) as pool:
    errors = list(pool.map(one, range(100)))
assert max(errors) < 1e-5, max(errors)
try:
    fmha.attention(*(np.zeros((1, 4, 1, 600), np.float32) for _ in range(3)))
except fmha.FmhaError as error:
    print(f"head dim 600: {error.code}, field {error.field}: {error}")
else:
    raise AssertionError("head dims beyond 512 are refused")
assert one(1000) < 1e-5
print(f"{len(errors)} calls from 8 threads, largest error {max(errors):.1e}")
