# SPDX-License-Identifier: MIT
"""Masks: causal from either corner, sliding windows, sink tokens. What a row sees is read off an identity as V."""
import numpy as np

import fmha

fmha.start()
rows, keys = 6, 9
rng = np.random.default_rng(0)
q = rng.standard_normal((1, rows, 1, 16), dtype=np.float32)
k = rng.standard_normal((1, keys, 1, 16), dtype=np.float32)
v = np.eye(keys, 16, dtype=np.float32).reshape(1, keys, 1, 16)  # so that O is P


def sees(**options):
    return fmha.attention(q, k, v, **options)[0, :, 0, :keys] > 0


i, j = np.arange(rows)[:, None], np.arange(keys)[None, :]
last = keys - rows  # the bottom right corner: the last row sees the last key
for name, options, expected in (
    ("none", {}, np.ones((rows, keys), bool)),
    ("causal, bottom right", {"causal": True}, j <= i + last),
    ("causal, top left", {"causal": True, "align": "top_left"}, j <= i),
    ("window 2 left, 1 right", {"window": (2, 1), "align": "top_left"}, (j >= i - 2) & (j <= i + 1)),
    ("window 3 left, causal", {"causal": True, "window": (3, 0)}, (j >= i + last - 3) & (j <= i + last)),
    ("and 2 sink tokens", {"causal": True, "window": (3, 0), "sink_tokens": 2},
     ((j >= i + last - 3) | (j < 2)) & (j <= i + last)),
):
    seen = sees(**options)
    print(name, *("".join(".#"[int(x)] for x in row) for row in seen), sep="\n  ")
    assert (seen == expected).all(), name
