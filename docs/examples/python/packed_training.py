# SPDX-License-Identifier: MIT
"""A step of training on packed sequences: forward, backward, and gradients of nothing where no sequence is."""
import numpy as np

import fmha

fmha.start()
rng = np.random.default_rng(0)
starts = np.int32([0, 40, 40, 100])  # the second is empty; 20 rows behind the last belong to nobody
q, k, v, grad = (rng.standard_normal((120, 4, 32), dtype=np.float32) for _ in range(4))
packed = dict(cu_seqlens_q=starts, cu_seqlens_k=starts, causal=True)
o, lse = fmha.attention(q, k, v, return_lse=True, **packed)
gradients = fmha.attention_backward(grad, q, k, v, o, lse, **packed)
for begin, end in ((0, 40), (40, 100)):
    one = [x[None, begin:end] for x in (q, k, v)]
    oo, ll = fmha.attention(*one, causal=True, return_lse=True)
    for g, a in zip(gradients, fmha.attention_backward(grad[None, begin:end], *one, oo, ll, causal=True)):
        assert np.allclose(g[begin:end], a[0], atol=1e-4)
assert all((g[100:] == 0).all() for g in gradients)
print("each sequence's gradients as if it were alone")
