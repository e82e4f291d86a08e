# SPDX-License-Identifier: MIT
"""Padded batches: how much of each sequence's storage counts, and keys padded at the left."""
import numpy as np

import fmha

fmha.start()
rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((3, 50, 4, 64), dtype=np.float32) for _ in range(3))
rows, keys = np.int32([50, 7, 0]), np.int32([50, 20, 31])
o = fmha.attention(q, k, v, seqlens_q=rows, seqlens_k=keys, causal=True)
for b in range(3):
    alone = fmha.attention(q[b:b + 1, :rows[b]], k[b:b + 1, :keys[b]], v[b:b + 1, :keys[b]], causal=True) if rows[b] else 0
    assert np.allclose(o[b, :rows[b]], alone, atol=1e-6)
    assert (o[b, rows[b]:] == 0).all()  # new arrays hold 0 where nothing is written
left = np.int32([0, 3, 10])
o = fmha.attention(q, k, v, leftpad_k=left, seqlens_k=keys)
for b in range(3):
    alone = fmha.attention(q[b:b + 1], k[b:b + 1, left[b]:keys[b]], v[b:b + 1, left[b]:keys[b]])
    assert np.allclose(o[b], alone[0], atol=1e-6)
print("each sequence as if it were alone")
