# SPDX-License-Identifier: MIT
"""Layouts: batch, rows, heads in any order, and any strides: V by columns, heads side by side in one projection."""
import numpy as np

import fmha

fmha.start()
rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((2, 30, 4, 16), dtype=np.float32) for _ in range(3))  # "bshd"
o = fmha.attention(q, k, v)
for layout, order in (("bhsd", (0, 2, 1, 3)), ("sbhd", (1, 0, 2, 3))):
    moved = [np.ascontiguousarray(x.transpose(order)) for x in (q, k, v)]
    assert np.allclose(fmha.attention(*moved, layout=layout), o.transpose(order), atol=1e-6), layout
    print(f"{layout}: the same")

# Column-major V: the rows of each head are what lies side by side.
columns = np.ascontiguousarray(v.transpose(0, 2, 3, 1))  # batch, heads, head dim, rows
assert np.allclose(fmha.attention(q, k, columns.transpose(0, 3, 1, 2)), o, atol=1e-6)
print("V by columns: the same")

# One projection's output, of which Q, K and V are views.
qkv = np.concatenate([q, k, v], axis=2)
assert np.allclose(fmha.attention(qkv[:, :, :4], qkv[:, :, 4:8], qkv[:, :, 8:]), o, atol=1e-6)
print("views of one array: the same")
