# SPDX-License-Identifier: MIT
"""Random problems for run.py --random, over every tile that takes them, judged by the formulas of DESIGN.md and fmha/base.h
in float64: an oracle that shares no code with the kernels or their reference, and reads argument structs for itself. A problem
is a function of arch, seed and number alone.
"""
import ctypes
import math

import numpy as np

import abi
import suite
from backward_cases import Backward
from cases import Forward, decode, encode, fp8_values, unwritten, NP_STORAGE

HALF_UNIT = {abi.F32: 2.0 ** -24, abi.F16: 2.0 ** -11, abi.BF16: 2.0 ** -8, abi.E4M3: 2.0 ** -4}
# Weights, in units of a row's largest, that may be taken for 0: MI200 and the emulator have no subnormal operands.
LEAST = {abi.F32: 0, abi.F16: 2.0 ** -13, abi.BF16: 0, abi.E4M3: 2.0 ** -12}
HUGE = 2.0 ** 100  # a score beside which another is nothing in float32
HEAD_DIMS = (8, 32, 40, 64, 64, 72, 80, 96, 104, 128, 128, 160, 192, 232, 256, 320, 512)
TILES = ((32, 32), (64, 64), (96, 96), (128, 128), (160, 160), (192, 128), (192, 192), (256, 256), (384, 384),
         (512, 512), (576, 512))  # what kernels are cut for


def draw_length(rng, most):
    """Often next to a tile's edge."""
    near = int(rng.choice([16, 32, 64, 96, 128, 160, 192, 256, 320])) + int(rng.integers(-1, 2))
    return min(int(rng.choice([rng.integers(1, 4), near, rng.integers(1, most + 1)], p=[.15, .4, .45])), most)


def draw_cache(rng, o, maybe):
    """Where forward's keys are, and into how many parts they go."""
    if maybe(.4):
        o["page"], o["table"] = int(rng.choice([16, 16, 32, 48, 64, 80, 128, 256, 1, 17])), ["block", "sglang"][maybe(.3)]
    elif not o.get("group") and maybe(.15):
        o["cache_idx"] = True
    if not o.get("group") and o.get("table") != "sglang" and maybe(.4):
        o["leftpad"] = [int(n) for n in rng.choice([0, 1, 7, 16, 37, 64], o["batch"])]
        o["lens_k"] = [n + m for n, m in zip(o.get("lens_k") or [o["sk"]] * o["batch"], o["leftpad"])]
        o["sk"] = max(o["lens_k"])
    if o.get("table") == "sglang":
        o["lens_k"] = [max(n, 1) for n in o.get("lens_k") or [o["sk"]] * o["batch"]]
    if maybe(.3):
        most = o["sk"] if not o.get("group") else max(n for _, n in o["group"])
        o["split_size"] = max(int(rng.choice([16, 64, 80, 96, 128, 7, 33, 250])), -(-most // 24))
        o["splits"] = -(-max(most, 1) // o["split_size"])
        o.pop("lowest", None)  # the LSE of a part has nothing of how many keys it saw


def draw_latents(rng, o, maybe):
    """Values within keys, keys that each row chooses: what neither goes with is left out."""
    if o["dtype"] != abi.E4M3 and maybe(.12):
        o |= dict(dq=576, dv=512, hk=1, hq=int(rng.choice([1, 3, 8, 16, 20])), v_in_k=True, sq=min(o["sq"], 20), sk=min(o["sk"], 200))
        for name in ("bias", "turned", "bias_broadcast", "lowest", "alibi", "dropout", "randval", "data", "data_broadcast", "group", "used_q",
                     "min_sq", "lens_k"):
            o.pop(name, None)
    if "group" in o or not maybe(.12):
        return
    for name in ("mask", "left", "right", "sinks", "bias", "turned", "bias_broadcast", "lowest", "alibi", "dropout", "randval", "data",
                 "data_broadcast", "descale"):
        o.pop(name, None)
    o["sq"], o["topk"] = min(o["sq"], 20), int(rng.choice([1, 16, 33, 64, 100]))


def draw_problem(rng, arch):
    """Options of a Forward or a Backward."""
    def maybe(p):
        return bool(rng.random() < p)

    backward, bytes_too = maybe(.35), arch in ("gfx942", "gfx950", "gfx1201")
    few = not backward and maybe(.4)
    dtype = int(rng.choice([abi.F16, abi.BF16, abi.F32, abi.E4M3],
                           p=[.46, .46, .08, 0] if backward else [.3, .3, .05, .35] if bytes_too else [.45, .45, .05, .05]))
    wide, hk, batch = dtype == abi.E4M3, int(rng.choice([1, 1, 2, 3])), int(rng.choice([1, 1, 2, 3]))
    unit = 16 if wide else 8  # whole chunks of 16 bytes
    dq, dv = (-(-int(rng.choice(HEAD_DIMS)) // unit) * unit for _ in "qv")
    dq, dv = [(dq, dq), (dq, dq), (192, 128), (dq, dv)][rng.integers(4)]
    if maybe(.15):  # rows that end anywhere
        n = int(rng.integers(1, 257))
        dq, dv = [(n, n), (n, dv), (dq, n)][rng.integers(3)]
    o = dict(dtype=dtype, dq=dq, dv=dv, hk=hk, hq=hk * int(rng.choice([1, 2, 3, 8] if few else [1, 1, 2])), batch=batch,
             sq=draw_length(rng, 24 if few else 300), sk=draw_length(rng, 500 if few else 300), seed=int(rng.integers(1 << 31)))
    if maybe(.35):
        o["group"] = [(draw_length(rng, 24 if few else 200) * (not maybe(.15)), draw_length(rng, 300) * (not maybe(.15)))
                      for _ in range(batch)]
        o["group"][0] = (o["sq"], o["sk"])
        if maybe(.3):  # padding behind sequences
            o["used_q"], o["lens_k"] = ([int(rng.integers(n + 1)) for n in side] for side in zip(*o["group"]))
        elif not backward and maybe(.2):
            o["min_sq"] = int(rng.integers(1, 9))
    elif maybe(.5):
        o["lens_k"] = [draw_length(rng, o["sk"]) * (not maybe(.1)) for _ in range(batch)]
    if maybe(.6):
        left, right = (-1, 0) if maybe(.5) else (int(rng.choice([-1, 0, 7, 31, 60, 150])), int(rng.choice([-1, 0, 1, 4, 33])))
        o |= dict(mask=int(rng.integers(1, 3)), left=left, right=right, sinks=int(rng.choice([0, 1, 9, 70])) if left >= 0 else 0)
    if maybe(.25):
        o |= dict(data=[1, 3, 3, 5, 63, "bits"][rng.integers(6)], data_broadcast="".join(c for c in "bh" if maybe(.5)))
    extra = rng.random()
    if extra < .3:
        o |= dict(bias=int(rng.choice([abi.F32, abi.BF16 if wide else dtype])), turned=maybe(.3),
                  bias_broadcast="".join(c for c in "bhr" if maybe(.25)))
        o |= dict(lowest=.2) if not backward and maybe(.3) else {}
    elif extra < .45:
        o["alibi"] = True
    o |= dict(cap=float(rng.choice([2, 5, 30]))) if maybe(.15) else {}
    o |= dict(dropout=float(rng.choice([.1, .25, .5, .9, .003])), randval=maybe(.3)) if maybe(.1 if few else .3) else {}
    o |= dict(sink=True) if maybe(.25) else {}
    o |= dict(strided=True) if maybe(.08) else {}
    o |= dict(scale=dq ** -.5 * float(rng.choice([-1, 0, 4, -3, .1]))) if maybe(.1) else {}
    o |= dict(heavy=float(rng.choice([.02, .3]))) if maybe(.3) else {}
    if backward:
        return o | dict(dbias="bias" in o and maybe(.7), dsink="sink" in o, acc=int(rng.integers(1, 6)) if maybe(.25) else 0)
    o |= dict(descale=["signed", "block", True, True][rng.integers(4)]) if wide and maybe(.7) else {}
    o |= dict(o_dtype=int(rng.integers(3))) if wide else {}
    draw_latents(rng, o, maybe)
    draw_cache(rng, o, maybe)
    if "topk" in o:
        o.pop("leftpad", None)
        o["slots"] = "page" in o and maybe(.5)
        if o["slots"]:
            o["table"] = "block"
        if o.get("splits"):
            o["split_size"] = max(o["topk"] // 3, 1)
            o["splits"] = -(-o["topk"] // o["split_size"])
    if not o.get("group") and not o.get("sinks") and o.get("left", -1) >= 0:  # NaN left of every window, and in padding
        pads, ends = o.get("leftpad") or [0] * batch, o.get("lens_k") or [o["sk"]] * batch
        anchors = [(end - pad - o["sq"]) * (o["mask"] == abi.MASK_BOTTOM_RIGHT) for pad, end in zip(pads, ends)]
        o["poison"] = (0, min(pad + max(anchor - o["left"], 0) for pad, anchor in zip(pads, anchors)))
    return o


# ---- reading arguments ----

def numbers(bits, dtype):
    """What stored bits mean, in float64."""
    if dtype != abi.E4M3:
        return decode(bits.copy(), dtype)
    finite = fp8_values(dtype)
    return np.where(bits & 0x80, -1, 1) * np.append(finite, [np.nan] * (128 - len(finite)))[bits & 0x7f]


def look(address, storage, shape, strides):
    """Memory as an array, and writable: strides in elements."""
    storage = np.dtype(storage)
    first = np.frombuffer((ctypes.c_char * storage.itemsize).from_address(address), storage)
    return np.lib.stride_tricks.as_strided(first, shape, [s * storage.itemsize for s in strides])


def tensor(t, dtype, shape):
    """Its bits over (batch, seq, head, dim)."""
    return look(t.data, NP_STORAGE[dtype], shape, (t.stride_batch, t.stride_seq, t.stride_head, t.stride_dim))


def ints(address, n):
    return look(address, np.int32, (n,), (1,)).tolist() if address else None


class Sequence:
    """Number b: n_q rows, at `rows` of tensors over (batch, seq); n_k keys without padding, at `keys` of those of keys."""

    def __init__(self, a, b):
        s, c = a.sequences, getattr(a, "cache", None)
        starts, starts_k = ints(s.seqstart_q, s.batch + 1), ints(s.seqstart_k, s.batch + 1)
        paged = c is not None and c.page_size > 0
        room = starts[b + 1] - starts[b] if starts else s.seqlen_q_max
        first = starts[b] if starts else 0
        self.number, self.n_q = b, ints(s.seqlen_q, s.batch)[b] if s.seqlen_q else room
        self.rows = (0 if starts else b, slice(first, first + self.n_q))
        end = s.seqlen_k_max if not starts_k else starts_k[b + 1] - starts_k[b]
        if paged and c.kv_indptr:
            pages = ints(c.kv_indptr, s.batch + 1)
            table = ints(c.kv_page_indices, c.n_page_indices)[pages[b]:pages[b + 1]]
            end = (len(table) - 1) * c.page_size + ints(c.kv_last_page_len, s.batch)[b] if table else 0
        elif paged:
            # By slots there is none, and nobody asks.
            table = ints(c.block_table + 4 * b * c.block_table_stride, c.max_blocks) if c.block_table else [0] * (end + 1)
        if s.seqlen_k:
            end = ints(s.seqlen_k, s.batch)[b]
        self.pad = min(ints(s.leftpad_k, s.batch)[b], end) if s.leftpad_k else 0
        self.n_k, at = end - self.pad, np.arange(self.pad, end)
        if paged:
            self.keys = np.array(table)[at // c.page_size], at % c.page_size
        elif starts_k:
            self.keys = np.zeros_like(at), starts_k[b] + at
        else:
            self.keys = np.full_like(at, ints(c.cache_batch_idx, s.batch)[b] if c is not None and c.cache_batch_idx else b), at

    def in_mask(self, m, head):
        """By a mask that is data: intervals, or bits."""
        b, at = self.rows
        i, j = np.arange(at.start, at.start + self.n_q), np.arange(self.n_k)
        t = m.bits if m.bits.data else m.intervals
        if not t.data:
            return True
        n = -(-self.n_k // 8) if m.bits.data else m.n_endpoints
        shape, strides = (b + 1, at.start + self.n_q, head + 1, n), (t.stride_batch, t.stride_seq, t.stride_head, t.stride_dim)
        if m.bits.data:
            return np.unpackbits(look(t.data, np.uint8, shape, strides)[b, i, head], axis=-1, bitorder="little", count=self.n_k).astype(bool)
        f = look(t.data, np.int32, shape, strides)[b, i, head].astype(np.int64)
        seen = j < f[:, :1]
        for e in range(1, n, 2):
            seen = seen | ((j >= f[:, e, None]) & (j < f[:, e + 1, None]))
        return seen

    def sees(self, band):
        i, j = np.arange(self.n_q)[:, None], np.arange(self.n_k)[None, :]
        distance = j - i - (self.n_k - self.n_q if band.mask == abi.MASK_BOTTOM_RIGHT else 0)
        seen = np.ones((self.n_q, self.n_k), bool)
        if band.mask and band.window_right >= 0:
            seen &= distance <= band.window_right
        if band.mask and band.window_left >= 0:
            seen &= (distance >= -band.window_left) | (j < band.sink_tokens)
        return seen


def dropout_bytes(d, matrix, n_q, n_k):
    """Philox 4x32-7: one call makes a lane's 16 bytes of a patch of 16 rows and 32 columns; @matrix: of all batches and heads."""
    r, c = np.arange(n_q)[:, None], np.arange(n_k)[None, :]
    lane, byte = r % 8 * 4 + c % 8 // 2, c % 32 // 16 * 8 + c // 8 % 2 * 4 + c % 2 + 2 * (r % 16 // 8)
    u64, low = np.uint64, np.uint64(0xffffffff)
    counter = u64(d.offset + matrix * 32) + lane.astype(u64)
    x = [counter & low, counter >> u64(32), *(np.broadcast_to(n, lane.shape).astype(u64) for n in (r // 16, c // 32))]
    key = [d.seed & 0xffffffff, d.seed >> 32]
    for _ in range(7):
        m, n = x[0] * u64(0xD2511F53), x[2] * u64(0xCD9E8D57)
        x = [n >> u64(32) ^ x[1] ^ u64(key[0]), n & low, m >> u64(32) ^ x[3] ^ u64(key[1]), m & low]
        key = [key[0] + 0x9E3779B9 & 0xffffffff, key[1] + 0xBB67AE85 & 0xffffffff]
    return (np.choose(byte // 4, x) >> (byte % 4 * 8).astype(u64) & u64(255)).astype(np.uint8)


# ---- what is right ----

class Oracle:
    def __init__(self, a, group, backward):
        s, c = a.sequences, getattr(a, "cache", None)
        self.a, self.backward, self.least_q = a, backward, 0 if backward else a.min_seqlen_q
        self.q_shape = (1, s.total_q) if group else (s.batch, s.seqlen_q_max)
        self.k_shape = (1, s.total_k) if s.seqstart_k else (s.batch, s.seqlen_k_max)
        if c is not None and (c.page_size or c.cache_batch_idx):
            self.k_shape = (c.n_pages, c.page_size) if c.page_size else (c.cache_batch, s.seqlen_k_max)
        self.sequences = [Sequence(a, b) for b in range(s.batch)]
        self.q = numbers(tensor(a.q, a.dtype, (*self.q_shape, a.nhead_q, a.hdim_q)), a.dtype)
        self.k = numbers(tensor(a.k, a.dtype, (*self.k_shape, a.nhead_k, a.hdim_q)), a.dtype)
        self.v = numbers(tensor(a.v, a.dtype, (*self.k_shape, a.nhead_k, a.hdim_v)), a.dtype)
        self.sink = look(a.sink, np.float32, (a.nhead_q,), (1,)) if a.sink else np.full(a.nhead_q, -np.inf)
        t = a.lse
        self.lse = look(t.data, np.float32, (*self.q_shape, a.nhead_q), (t.stride_batch, t.stride_seq, t.stride_head))

    def heads(self):
        """Sequence, head of Q, head of K: of what is computed."""
        group = self.a.nhead_q // self.a.nhead_k
        return [(s, h, h // group) for s in self.sequences for h in range(self.a.nhead_q) if s.n_q >= self.least_q]

    def matrix(self, t, dtype, s, h):
        """A bias, or random bytes, over (row, column) of a sequence and head."""
        return tensor(t, dtype, (*self.q_shape, self.a.nhead_q, self.a.sequences.seqlen_k_max))[s.rows][:, h, :s.n_k]

    def factor(self, name, s, head, n):
        f = getattr(self.a, name + "_descale", None)
        if not f or not f.data:
            return 1.0
        at = [f.stride_batch * s.number + head * f.stride_head + (i + (name != "q") * s.pad) // f.block * f.stride_block if f.block
              else f.stride_batch * s.number + head * f.stride_head for i in range(n)]
        return look(f.data, np.float32, (max(at, default=0) + 1,), (1,))[at].astype(np.float64)[:, None]

    def scores(self, s, h, g):
        """Q, K and V; scores, -inf where nobody sees; the soft cap's derivative; by how much scores may be off."""
        a, keys, times = self.a, s.keys, 1.0
        if not self.backward and a.chosen.data:
            times, keys = self.chosen(s)
            seen = times > 0
        else:
            seen = s.sees(a.band) & s.in_mask(a.mask_data, h)
        q, k = self.q[s.rows][:, h] * self.factor("q", s, h, s.n_q), self.k[keys][:, g] * self.factor("k", s, g, s.n_k)
        used = seen.any(0)[:, None]
        k, v = np.where(used, k, 0), np.where(used, self.v[keys][:, g], 0) * self.factor("v", s, g, s.n_k)
        x, size, slope = a.scale * (q @ k.T), abs(a.scale) * (np.abs(q) @ np.abs(k).T), 1.0
        if a.logits_soft_cap:
            t = np.tanh(x / a.logits_soft_cap)
            x, slope = a.logits_soft_cap * t, 1 - t * t
        if a.bias.data:
            x = x + numbers(self.matrix(a.bias, a.bias_dtype, s, h), a.bias_dtype)
        if a.alibi_slopes:
            i, j = np.arange(s.n_q)[:, None], np.arange(s.n_k)[None, :]
            m = look(a.alibi_slopes + 4 * (s.number * a.alibi_stride_batch + h), np.float32, (), ())
            x = x - float(m) * np.abs(i + s.n_k - s.n_q - j)
        x, counts = np.where(seen, x + np.log(np.maximum(times, 1)), -np.inf), seen & (np.abs(x) < HUGE)
        return q, k, v, x, slope, 2.0 ** -20 * (1 + np.where(counts, size + np.abs(x), 0).max(1, initial=0))[:, None]

    def chosen(self, s):
        """How often each row has chosen each key; where the keys are."""
        c = self.a.chosen
        keys = tuple(n.reshape(-1) for n in np.indices(self.k_shape)) if c.are_slots else s.keys
        entries = look(c.data, np.int32, (*self.q_shape, c.n), (c.stride_batch, c.stride_seq, c.stride_entry))[s.rows]
        times = np.zeros((s.n_q, len(keys[0])))
        for i, row in enumerate(entries):
            np.add.at(times[i], row[(row >= 0) & (row < len(keys[0]))], 1)
        return times, keys

    def keep(self, s, h):
        """By what weights are multiplied."""
        d = self.a.dropout
        if not d.p_drop:
            return 1.0
        if self.backward and d.randval.data:
            x = self.matrix(d.randval, abi.E4M3, s, h)
        else:
            x = dropout_bytes(d, s.number * self.a.nhead_q + h, s.n_q, s.n_k)
        keep = 1 - float(np.float32(d.p_drop))
        return (x <= math.floor(255 * keep)) / keep

    def forward(self, s, h, g, weights):
        """O and LSE of a head, and by how much each may be off; @weights: the type that P has beside V."""
        _, _, v, x, _, noise = self.scores(s, h, g)
        top = np.maximum(x.max(1, initial=-np.inf), self.sink[h])[:, None]
        top = np.where(np.isfinite(top), top, 0)
        w = np.exp(x - top)
        total = w.sum(1, keepdims=True) + np.exp(self.sink[h] - top)
        with np.errstate(divide="ignore"):
            lse = np.log(total) + top
        w /= np.where(total > 0, total, 1)
        kept = w * self.keep(s, h)
        small = np.where(w < w.max(1, initial=0, keepdims=True) * LEAST[weights], kept, 0)
        allowed = 5 * HALF_UNIT[weights] * np.sqrt(kept ** 2 @ v ** 2) + (noise * kept + small) @ np.abs(v) + 1e-6
        return kept @ v, lse[:, 0], allowed, noise[:, 0] + np.where(lse[:, 0] > -HUGE, 2e-7, 1) * np.abs(lse[:, 0]) + 2e-6

    def judge_forward(self):
        a, worst = self.a, [0]
        out = tensor(a.o, a.o_dtype, (*self.q_shape, a.nhead_q, a.hdim_v))
        own = np.zeros(self.q_shape, bool)
        for s, h, g in self.heads():
            own[s.rows] = True
            want, lse, allowed, lse_allowed = self.forward(s, h, g, a.dtype)
            got, where = numbers(out[s.rows][:, h], a.o_dtype), f"of sequence {s.number}, head {h}"
            worst.append(share(f"O {where}", got, want, allowed + 1.01 * HALF_UNIT[a.o_dtype] * np.abs(want)))
            got = self.lse[s.rows][:, h].astype(np.float64)
            assert np.array_equal(got == -np.inf, lse == -np.inf), f"LSE {where}: -inf is elsewhere"
            worst.append(share(f"LSE {where}", *(n[np.isfinite(lse)] for n in (got, lse, lse_allowed))))
            if a.dropout.p_drop and a.dropout.randval.data:
                x = self.matrix(a.dropout.randval, abi.E4M3, s, h)
                assert np.array_equal(x, dropout_bytes(a.dropout, s.number * a.nhead_q + h, s.n_q, s.n_k)), f"randval {where}"
        assert (out[~own] == unwritten(NP_STORAGE[a.o_dtype])).all(), "O: rows of no sequence were written"
        return max(worst)

    def give_forward(self):
        """O and LSE, as forward would have left them."""
        a = self.a
        for s, h, g in self.heads():
            want, lse, _, _ = self.forward(s, h, g, abi.F32)
            tensor(a.o, a.dtype, (*self.q_shape, a.nhead_q, a.hdim_v))[s.rows][:, h] = encode(want.astype(np.float32), a.dtype)
            self.lse[s.rows][:, h] = lse

    def gradients(self, s, h, g, d_o, out):
        """(name, where it is added, what, the sum of its terms' squares, by how much it may be off besides)"""
        a, least = self.a, LEAST[self.a.dtype]
        q, k, v, x, slope, noise = self.scores(s, h, g)
        keep, d_o, out = self.keep(s, h), d_o[s.rows][:, h], out[s.rows][:, h]
        lse = self.lse[s.rows][:, h].astype(np.float64)[:, None]
        w = np.where(np.isfinite(lse), np.exp(x - np.where(np.isfinite(lse), lse, 0)), 0)
        d, size = (d_o * out).sum(1, keepdims=True), np.abs(d_o * out).sum(1, keepdims=True)
        ds = w * (d_o @ v.T * keep - d)
        off = noise * w * (np.abs(d_o) @ np.abs(v).T * keep + size)
        kept, raw, keys = w * keep, a.scale * ds * slope, (*s.keys, np.full(s.n_k, g))
        raw_off = abs(a.scale) * off + np.where(np.abs(ds * slope) < least, np.abs(raw), 0)
        yield "dv", keys, kept.T @ d_o, kept.T ** 2 @ d_o ** 2, (noise * kept + np.where(w < least, kept, 0)).T @ np.abs(d_o)
        yield "dk", keys, raw.T @ q, raw.T ** 2 @ q ** 2, raw_off.T @ np.abs(q)
        yield "dq", (*s.rows, h), raw @ k, raw ** 2 @ k ** 2, raw_off @ np.abs(k)
        yield "dbias", (*s.rows, h, slice(0, s.n_k)), ds, 0 * ds, off
        if a.dsink:
            p = np.exp(self.sink[h] - lse)
            yield "dsink", h, -(p * d).sum(), 0, 1e-5 * (p * size).sum()

    def judge_backward(self):
        a, heads, most = self.a, (self.a.nhead_q,), self.a.sequences.seqlen_k_max
        shapes = dict(dq=(*self.q_shape, *heads, a.hdim_q), dk=(*self.k_shape, a.nhead_k, a.hdim_q),
                      dv=(*self.k_shape, a.nhead_k, a.hdim_v), dbias=(*self.q_shape, *heads, most), dsink=heads)
        want, squares, off = ({n: np.zeros(shape) for n, shape in shapes.items()} for _ in range(3))
        own = {n: np.zeros(shape, bool) for n, shape in shapes.items()}
        d_o, out = (numbers(tensor(t, a.dtype, (*self.q_shape, *heads, a.hdim_v)), a.dtype) for t in (a.d_o, a.o))
        for s, h, g in self.heads():
            for name, at, *terms in self.gradients(s, h, g, d_o, out):
                own[name][at] = True
                for to, term in zip((want, squares, off), terms):
                    to[name][at] += term
            own["dbias"][(*s.rows, h)] = True  # 0 at columns without a key
        worst = 0
        for name in ["dq", "dk", "dv"] + ["dbias"] * bool(a.dbias.data) + ["dsink"] * bool(a.dsink):
            dtype = dict(dbias=a.bias_dtype, dsink=abi.F32).get(name, a.dtype)
            got = look(a.dsink, np.float32, heads, (1,)) if name == "dsink" else tensor(getattr(a, name), dtype, shapes[name])
            sums = [want[name], squares[name], off[name]]
            if name == "dbias":
                axes = tuple(n for n, stride in enumerate(got.strides[:3]) if not stride and got.shape[n] > 1)
                sums = [np.broadcast_to(x.sum(axes, keepdims=True), x.shape) for x in sums]
            if name != "dsink" and not (name == "dbias" and axes):
                assert (got[~own[name]] == unwritten(NP_STORAGE[dtype])).all(), f"{name}: padding was written"
            x, square, more = (n[own[name]] for n in sums)
            allowed = 5 * HALF_UNIT[a.dtype] * np.sqrt(square) + more + 1.01 * HALF_UNIT[dtype] * np.abs(x) + 1e-6
            worst = max(worst, share(name, numbers(got[own[name]], dtype), x, allowed))
        return worst


def share(name, got, want, allowed):
    """What the worst element is off, of what it may be."""
    ratio = np.nan_to_num(np.abs(got - want) / allowed, nan=np.inf)
    if not ratio.size:
        return 0.0
    at = np.unravel_index(np.argmax(ratio), ratio.shape)
    assert ratio[at] <= 1, f"{name}: {got[at]:.5g} at {[int(n) for n in at]} instead of {want[at]:.5g} +- {allowed[at]:.2g}, " \
                           f"{(ratio > 1).sum()} of {ratio.size} wrong"
    return float(ratio[at])


def kernels(lib, arch, family, dtype, args):
    """Every kernel that takes them, in tiles as narrow as can be and in those of a profile."""
    found, tile = {}, abi.Tile()
    pair = next((m, n) for m, n in TILES if m >= args.hdim_q and n >= args.hdim_v)
    for n in range(64):
        if lib.check_tile(arch.encode(), family, dtype, ctypes.byref(args), n, ctypes.byref(tile)):
            return list(found.values())
        for tile.hdim_q, tile.hdim_v in ((tile.hdim_q, tile.hdim_v), pair):
            kernel = abi.make_kernel(lib, arch, family, dtype, args, tile)
            if kernel:
                found[bytes(kernel.name)] = kernel
    return list(found.values())


class Drawn(suite.Case):
    """A random problem, in one tile of those that take it; pipeline: of that name only."""

    def __init__(self, lib, arch, seed, number, pipeline):
        rng, found = np.random.default_rng([seed, number, *arch.encode()]), None
        while not found:
            options = draw_problem(rng, arch)
            super().__init__("backward" if "dbias" in options else "forward", **options)
            p, args, _ = self.build()
            found = [k for k in kernels(lib, arch, self.family(p), p.dtype, args) if pipeline in (None, abi.pipeline_of(k))]
        weights = np.array([(4 if "amd" in abi.pipeline_of(k) else 1) * k.tile.tile_m ** .5 for k in found])
        kernel = found[rng.choice(len(found), p=weights / weights.sum())]
        self.number, self.name, self.pipeline = number, kernel.name.decode(), bytes(kernel.tile)

    def __str__(self):
        return f"random {self.number} {super().__str__()} {self.name}"

    def build(self):
        """A problem, its arguments and its oracle."""
        backward, o = self.kind == "backward", self.options
        p = Backward(None, **o) if backward else Forward(**o)
        args = p.bwd if backward else p.args
        for x in p.keep if p.dtype == abi.F16 else ():  # no subnormal inputs, for the same reason as LEAST
            if x.dtype == np.uint16:
                x[x & 0x7c00 == 0] = 0
        args.dropout.seed, args.dropout.offset = o["seed"] * 0x9E3779B97F4A7C15 & (1 << 64) - 1, o["seed"] << 7
        oracle = Oracle(args, p.group, backward)
        if backward:
            oracle.give_forward()
        return p, args, oracle

    def family(self, p):
        return abi.BWD_DQ_DK_DV if self.kind == "backward" else p.family

    def run(self, lib, device, arch, _):
        p, args, oracle = self.build()
        kernel = abi.make_kernel(lib, arch, self.family(p), p.dtype, args, abi.Tile.from_buffer_copy(self.pipeline))
        backward = self.kind == "backward"
        (suite.launch_backward if backward else suite.launch_forward)(p, kernel, lib, device, arch)
        return f"{oracle.judge_backward() if backward else oracle.judge_forward():.2f} of what is allowed"
