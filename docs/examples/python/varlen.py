# SPDX-License-Identifier: MIT
"""Packed sequences of different lengths, one of them empty: no padding is stored or computed."""
import numpy as np

import fmha

fmha.start()
rng = np.random.default_rng(0)
lengths = [100, 1, 0, 37]
starts = np.cumsum([0, *lengths]).astype(np.int32)
q = rng.standard_normal((starts[-1], 8, 64), dtype=np.float32)
k, v = (rng.standard_normal((starts[-1], 2, 64), dtype=np.float32) for _ in range(2))
o, lse = fmha.attention(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, causal=True, return_lse=True)
assert lse.shape == (8, starts[-1])
for begin, end in zip(starts, starts[1:]):
    if end > begin:
        alone = fmha.attention(*(x[None, begin:end] for x in (q, k, v)), causal=True)
        assert np.allclose(o[begin:end], alone[0], atol=1e-6)
print(f"{len(lengths)} sequences in {starts[-1]} rows")
