# SPDX-License-Identifier: MIT
"""Attention and its gradients in float64 numpy, straight from the definition; knows nothing of the package."""
import numpy as np


def visible(rows, keys, left=-1, right=-1, corner="bottom_right", sink_tokens=0):
    i, j = np.arange(rows)[:, None], np.arange(keys)[None, :]
    anchor = keys - rows if corner == "bottom_right" else 0
    seen = np.ones((rows, keys), bool)
    if left >= 0:
        seen &= (j >= anchor + i - left) | (j < sink_tokens)
    if right >= 0:
        seen &= j <= anchor + i + right
    return seen


def attention(q, k, v, *, seen=None, scale=None, softcap=0.0, bias=None, slopes=None, sink=None):
    """q [rows, heads, hdim], k, v [keys, kv heads, hdim] of one sequence -> O, LSE, P [heads, rows, keys]."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    s = np.einsum("ihd,jhd->hij", q, k) * (q.shape[2] ** -0.5 if scale is None else scale)
    if softcap:
        s = softcap * np.tanh(s / softcap)
    if bias is not None:
        s = s + bias
    if slopes is not None:
        rows, keys = s.shape[1:]
        distance = np.abs(np.arange(rows)[:, None] + keys - rows - np.arange(keys)[None])
        s = s - np.asarray(slopes, np.float64)[:, None, None] * distance
    if seen is not None:
        s = np.where(seen, s, -np.inf)
    columns = s
    if sink is not None:
        columns = np.concatenate([s, np.broadcast_to(np.asarray(sink, np.float64)[:, None, None], (*s.shape[:2], 1))], -1)
    top = columns.max(-1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0)
    total = np.exp(columns - top).sum(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        p = np.where(total > 0, np.exp(s - top) / total, 0)
        lse = (top + np.log(total))[..., 0]
    return np.einsum("hij,jhd->ihd", p, v), lse, p


def gradients(grad, q, k, v, *, seen=None, scale=None):
    """dQ, dK, dV of one sequence."""
    o, _, p = attention(q, k, v, seen=seen, scale=scale)
    q, k, v, grad = (np.asarray(x, np.float64) for x in (q, k, v, grad))
    group, kv_heads = q.shape[1] // k.shape[1], k.shape[1]
    factor = q.shape[2] ** -0.5 if scale is None else scale
    wide_k, wide_v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    dv = np.einsum("hij,ihd->jhd", p, grad)
    dp = np.einsum("ihd,jhd->hij", grad, wide_v)
    ds = p * (dp - np.einsum("ihd,ihd->hi", grad, o)[..., None]) * factor
    dq, dk = np.einsum("hij,jhd->ihd", ds, wide_k), np.einsum("hij,ihd->jhd", ds, q)
    return dq, *(x.reshape(len(x), kv_heads, group, -1).sum(2) for x in (dk, dv))
