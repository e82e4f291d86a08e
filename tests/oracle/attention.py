# SPDX-License-Identifier: MIT
"""Attention in numpy float64, whole matrices at a time, straight from the formulas.

This is the second opinion on the C reference: written from the text of the contract alone, with
matrix algebra where C has loops. One function call is one head of one sequence.
"""
import numpy as np


def visible(rows, columns, mask, left, right, sink_tokens):
    """The band as a boolean matrix. mask: 0 none, 1 anchored top-left, 2 bottom-right."""
    i, j = np.arange(rows)[:, None], np.arange(columns)[None, :]
    seen = np.ones((rows, columns), bool)
    if mask == 0:
        return seen
    offset = j - i - (columns - rows if mask == 2 else 0)
    if left >= 0:
        seen &= (offset >= -left) | (j < sink_tokens)
    if right >= 0:
        seen &= offset <= right
    return seen


def alibi(rows, columns, slope):
    i, j = np.arange(rows)[:, None], np.arange(columns)[None, :]
    return -slope * np.abs(i + columns - rows - j)


def philox4x32(key, counter, rounds):
    """counter: uint64 array [..., 4] holding 32-bit words; the same shape comes back."""
    word = counter.astype(np.uint64).copy()
    low32 = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    key = [np.uint64(key & 0xFFFFFFFF), np.uint64(key >> 32)]
    for _ in range(rounds):
        a = word[..., 0] * np.uint64(0xD2511F53)
        b = word[..., 2] * np.uint64(0xCD9E8D57)
        word = np.stack([(b >> shift) ^ word[..., 1] ^ key[0], b & low32,
                         (a >> shift) ^ word[..., 3] ^ key[1], a & low32], axis=-1)
        key = [(key[0] + np.uint64(0x9E3779B9)) & low32, (key[1] + np.uint64(0xBB67AE85)) & low32]
    return word


def dropout_bytes(seed, offset, call, rows, columns):
    """FlashAttention-2's random bytes. call: batch index * heads + head."""
    if rows == 0 or columns == 0:
        return np.zeros((rows, columns), np.uint8)
    i, j = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    r, c = i % 16, j % 32
    lane = (r % 8) * 4 + (c % 8) // 2
    byte = (c // 16) * 8 + (c // 8 % 2) * 4 + c % 2 + 2 * (r // 8)
    subsequence = [(offset + call * 32 + n) % 2**64 for n in range(32)]
    low = np.array([s & 0xFFFFFFFF for s in subsequence], np.uint64)[lane]
    high = np.array([s >> 32 for s in subsequence], np.uint64)[lane]
    counter = np.stack([low, high, (i // 16).astype(np.uint64), (j // 32).astype(np.uint64)], -1)
    words = philox4x32(seed, counter, 7)
    word = np.take_along_axis(words, (byte // 4)[..., None], -1)[..., 0]
    return ((word >> (8 * (byte % 4)).astype(np.uint64)) & np.uint64(0xFF)).astype(np.uint8)


class Head:
    """Forward of one head; keeps what backward needs.

    q [m, d], k [n, d], v [n, dv]; bias and seen [m, n]; keep [m, n] is 0 or 1 / p_keep.
    """

    def __init__(self, q, k, v, scale, soft_cap=0.0, bias=None, seen=None, sink=None, keep=None):
        self.q, self.k, self.v, self.scale, self.soft_cap = q, k, v, scale, soft_cap
        m, n = len(q), len(k)
        seen = np.ones((m, n), bool) if seen is None else seen
        self.keep = np.ones((m, n)) if keep is None else keep
        with np.errstate(all="ignore"):
            s = scale * (q @ k.T)
            self.tanh = np.tanh(s / soft_cap) if soft_cap > 0 else None
            z = soft_cap * self.tanh if soft_cap > 0 else s
            z = z if bias is None else z + bias
            z = np.where(seen, z, -np.inf)
            logits = z if sink is None else np.concatenate([z, np.full((m, 1), sink)], 1)
            top = logits.max(1, initial=-np.inf)
            shift = np.where(np.isfinite(top), top, 0.0)
            total = np.exp(logits - shift[:, None]).sum(1)
            self.lse = np.where(total > 0, shift + np.log(total), -np.inf)
            safe = np.where(np.isfinite(self.lse), self.lse, 0.0)
            self.p = np.exp(z - safe[:, None])
            self.p_sink = None if sink is None else np.exp(sink - safe)
            self.o = (self.p * self.keep) @ v

    def backward(self, d_o, o=None):
        """dq, dk, dv, dbias [m, n], dsink. o: what forward stored, if it was rounded."""
        dp = (d_o @ self.v.T) * self.keep
        delta = (d_o * (self.o if o is None else o)).sum(1, keepdims=True)
        dz = self.p * (dp - delta)
        ds = dz if self.tanh is None else dz * (1 - self.tanh**2)
        dsink = None if self.p_sink is None else -(self.p_sink * delta[:, 0]).sum()
        return (self.scale * ds @ self.k, self.scale * ds.T @ self.q,
                (self.p * self.keep).T @ d_o, dz, dsink)


def merge(o_parts, lse_parts, sink=None):
    """o_parts [parts, m, dv], lse_parts [parts, m] -> o, lse."""
    lse = lse_parts if sink is None else np.concatenate(
        [lse_parts, np.full((1, lse_parts.shape[1]), sink)])
    top = lse.max(0)
    shift = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):
        total = shift + np.log(np.exp(lse - shift).sum(0))
    weight = np.where(np.isfinite(lse_parts), np.exp(lse_parts - np.where(
        np.isfinite(total), total, 0.0)), 0.0)
    return (weight[..., None] * np.where(weight[..., None] > 0, o_parts, 0.0)).sum(0), total


def rotate(x, position, cos, sin, interleaved):
    """x [..., rows, d] at positions [rows]; the first 2 * cos.shape[1] elements turn."""
    half = cos.shape[1]
    angle = np.minimum(position, len(cos) - 1)
    c, s = cos[angle], sin[angle]
    first = np.arange(half) * 2 if interleaved else np.arange(half)
    second = first + 1 if interleaved else first + half
    out = x.copy()
    out[..., first] = x[..., first] * c - x[..., second] * s
    out[..., second] = x[..., first] * s + x[..., second] * c
    return out
