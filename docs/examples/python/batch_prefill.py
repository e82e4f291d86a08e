# SPDX-License-Identifier: MIT
"""Chunked prefill: new rows of several prompts, packed, on what their paged caches hold."""
import numpy as np

import fmha

fmha.start()
rng = np.random.default_rng(0)
size = 16
cached, new = np.int32([48, 20, 5]), np.int32([10, 20, 1])  # keys of each sequence, of which the last `new` are its rows'
starts = np.cumsum([0, *new]).astype(np.int32)
q = rng.standard_normal((starts[-1], 8, 64), dtype=np.float32)
pages_k, pages_v = (rng.standard_normal((12, size, 2, 64), dtype=np.float32) for _ in range(2))
owned = [[0, 4, 8], [1, 5], [2]]
indptr = np.cumsum([0, *map(len, owned)]).astype(np.int32)
o = fmha.attention(q, pages_k, pages_v, cu_seqlens_q=starts, kv_indptr=indptr, kv_page_indices=np.int32(sum(owned, [])),
                   kv_last_page_len=np.int32([n - (len(p) - 1) * size for n, p in zip(cached, owned)]),
                   max_seqlen_k=int(cached.max()), causal=True)
for b, pages in enumerate(owned):
    k, v = (x[pages].reshape(1, -1, 2, 64)[:, :cached[b]] for x in (pages_k, pages_v))
    rows = slice(starts[b], starts[b + 1])
    # Tied to the bottom right corner: the last row sees the last key.
    assert np.allclose(o[rows], fmha.attention(q[None, rows], k, v, causal=True)[0], atol=1e-6)
print(f"{starts[-1]} rows of {len(owned)} prompts in one call")
