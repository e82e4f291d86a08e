# SPDX-License-Identifier: MIT
"""Multi-head latent attention: one cache for keys and values, in fp8 too, dense and by the keys that an indexer chose."""
import numpy as np

import fmha
from fmha._latent import latents_from_fp8

fmha.start()
rng = np.random.default_rng(0)
batch, heads, size, lengths = 2, 16, 64, np.int32([200, 70])
q = rng.standard_normal((batch, 1, heads, 576), dtype=np.float32).astype(np.float16)
tokens = rng.standard_normal((lengths.sum(), 576), dtype=np.float32).astype(np.float16)
slots = np.int64([*range(3 * size, 3 * size + 200), *range(70)])  # where each token goes: pages 3 to 6, and 0 and 1
table = np.int32([[3, 4, 5, 6], [0, 1, 0, 0]])

cache, narrow = np.zeros((8, size, 576), np.float16), np.zeros((8, size, 656), np.uint8)
fmha.mla_append(cache, tokens, slot_mapping=slots)
fmha.mla_append(narrow, tokens, slot_mapping=slots)  # 656 bytes a token instead of 1,152
o = fmha.mla_decode(q, cache, block_table=table, seqlens_k=lengths)
of_narrow = fmha.mla_decode(q, narrow, block_table=table, seqlens_k=lengths)


def formula(q, latents):
    s = np.einsum("hd,jd->hj", q[0].astype(float), latents.astype(float)) / 24
    p = np.exp(s - s.max(-1, keepdims=True))
    return p @ latents[:, :512] / p.sum(-1, keepdims=True)


for b, of in enumerate((tokens[:200], tokens[200:])):
    assert np.abs(o[b, 0] - formula(q[b], of)).max() < 4e-3
    kept = latents_from_fp8(narrow.reshape(-1, 656)[slots[:200] if b == 0 else slots[200:]])
    assert np.abs(of_narrow[b, 0] - formula(q[b], kept)).max() < 4e-3

chosen = np.int32([[[3 * size + 5, 3 * size + 199, -1]], [[17, -1, -1]]])  # slots of the pages; -1: none
o = fmha.mla_decode(q, narrow, indices=chosen)
assert np.abs(o[1, 0] - latents_from_fp8(narrow[0, 17])[:512]).max() < 4e-3  # one key: its own values
print("dense, fp8 and chosen keys are the formula's")
