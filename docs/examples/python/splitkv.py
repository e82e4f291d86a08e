# SPDX-License-Identifier: MIT
"""Split-KV: few rows on many keys, cut into parts that are computed side by side and then combined."""
import numpy as np

import fmha

fmha.start()
rng = np.random.default_rng(0)
q = rng.standard_normal((1, 1, 8, 64), dtype=np.float32)  # one new token
k, v = (rng.standard_normal((1, 4096, 2, 64), dtype=np.float32) for _ in range(2))
whole = fmha.attention(q, k, v, n_splits=1)
for n_splits in (0, 2, 4, 7):  # 0: the planner chooses
    assert np.allclose(fmha.attention(q, k, v, n_splits=n_splits), whole, atol=1e-6), n_splits
fixed = fmha.attention(q, k, v, split_size=128)  # the same bits, whatever else is in the batch
batch = fmha.attention(*(np.repeat(x, 3, 0) for x in (q, k, v)), split_size=128)
assert (batch == fixed).all()

# The same by hand: halves that may have been computed anywhere.
halves = [fmha.attention(q, k[:, s], v[:, s], return_lse=True) for s in (slice(0, 2048), slice(2048, None))]
o, lse = fmha.merge_states(np.stack([o for o, _ in halves]), np.stack([lse for _, lse in halves]))
assert np.allclose(o, whole, atol=1e-6)
print("1, 2, 4 and 7 parts, and halves merged by hand: one result")
