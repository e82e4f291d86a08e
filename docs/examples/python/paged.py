# SPDX-License-Identifier: MIT
"""A paged cache: keys and values in pages, found by vLLM's table or by SGLang's lists."""
import numpy as np

import fmha

fmha.start()
rng = np.random.default_rng(0)
size, lengths = 16, np.int32([37, 5, 64])
pages_k, pages_v = (rng.standard_normal((20, size, 2, 64), dtype=np.float32) for _ in range(2))
q = rng.standard_normal((3, 1, 8, 64), dtype=np.float32)
free = list(rng.permutation(20))
owned = [[free.pop() for _ in range(-(-n // size))] for n in lengths]

table = np.zeros((3, max(map(len, owned))), np.int32)  # vLLM: a row a sequence
for b, pages in enumerate(owned):
    table[b, :len(pages)] = pages
o = fmha.attention(q, pages_k, pages_v, block_table=table, seqlens_k=lengths)

indptr = np.cumsum([0, *map(len, owned)]).astype(np.int32)  # SGLang: one list, and where each sequence's begins
last = np.int32([n - (len(pages) - 1) * size for n, pages in zip(lengths, owned)])
lists = fmha.attention(q, pages_k, pages_v, kv_indptr=indptr, kv_page_indices=np.int32(sum(owned, [])), kv_last_page_len=last,
                       max_seqlen_k=int(lengths.max()))
for b, pages in enumerate(owned):
    k, v = (x[pages].reshape(1, -1, 2, 64)[:, :lengths[b]] for x in (pages_k, pages_v))
    assert np.allclose(o[b], fmha.attention(q[b:b + 1], k, v)[0], atol=1e-6)
assert np.allclose(o, lists, atol=1e-6)
print("table, lists and contiguous memory: one result")
