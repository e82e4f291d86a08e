# SPDX-License-Identifier: MIT
"""Decoding with a cache: a new key and value behind what is there, rotated by their position, then attention."""
import numpy as np

import fmha

fmha.start()
rng = np.random.default_rng(0)
heads, hdim, room = 4, 64, 64
cache_k, cache_v = (np.zeros((2, room, heads, hdim), np.float32) for _ in range(2))
angles = np.arange(room)[:, None] * 10000.0 ** (-np.arange(hdim // 2) / (hdim // 2))
cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
all_k = []
for step in range(5):
    q, k_new, v_new = (rng.standard_normal((2, 1, heads, hdim), dtype=np.float32) for _ in range(3))
    lengths = np.int32([step, step])  # before
    q = fmha.append_kv(cache_k, cache_v, k_new, v_new, seqlens_k=lengths, q=q, rotary_cos=cos, rotary_sin=sin)
    o = fmha.attention(q, cache_k, cache_v, seqlens_k=lengths + 1)

    x, y = k_new[..., :hdim // 2], k_new[..., hdim // 2:]  # "half": GPT-NeoX, Llama
    all_k.append(np.concatenate([x * cos[step] - y * sin[step], x * sin[step] + y * cos[step]], -1))
    assert np.allclose(cache_k[:, :step + 1], np.concatenate(all_k, 1), atol=1e-6)
    assert np.allclose(o, fmha.attention(q, cache_k[:, :step + 1], cache_v[:, :step + 1]), atol=1e-6)
assert (cache_k[:, 5:] == 0).all()
print("5 tokens appended, rotated and attended to")
