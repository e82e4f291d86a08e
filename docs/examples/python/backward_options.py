# SPDX-License-Identifier: MIT
"""Backward with what forward had: bias and its gradient, ALiBi, dropout, masks; and the same bits every time."""
import numpy as np

import fmha

fmha.start()
rng = np.random.default_rng(0)
q, k, v, grad = (rng.standard_normal((2, 48, 4, 32), dtype=np.float32) for _ in range(4))
bias = rng.standard_normal((1, 4, 48, 48), dtype=np.float32)
slopes = (2.0 ** -np.arange(1, 5)).astype(np.float32)
cases = {
    "window": dict(causal=True, window=(10, 0)),
    "bias": dict(bias=bias),
    "alibi": dict(alibi_slopes=slopes, causal=True),
    "soft cap": dict(softcap=3.0),
    "dropout": dict(dropout_p=0.3, seed=11, offset=64),
}
for name, options in cases.items():
    o, lse = fmha.attention(q, k, v, return_lse=True, **options)
    more = dict(options, want_dbias=True) if "bias" in options else options
    dq, dk, dv, *rest = fmha.attention_backward(grad, q, k, v, o, lse, **more)
    again = fmha.attention_backward(grad, q, k, v, o, lse, deterministic=True, **more)
    twice = fmha.attention_backward(grad, q, k, v, o, lse, deterministic=True, **more)
    assert all((a == b).all() for a, b in zip(again, twice)), name
    assert all(np.allclose(a, b, atol=1e-4) for a, b in zip((dq, dk, dv, *rest), again)), name
    # Scaling V scales O, so that V's gradient times V is the loss itself.
    assert np.isclose((dv * v).sum(), (o * grad).sum(), rtol=1e-3), name
    if rest:  # moving every score of a row by the same changes nothing
        assert rest[0].shape == bias.shape and np.abs(rest[0].sum(-1)).max() < 1e-3
    print(f"{name}: ok")
