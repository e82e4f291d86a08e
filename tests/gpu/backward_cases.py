# SPDX-License-Identifier: MIT
"""Backward problems: the three stages, judged by the reference in double."""
import ctypes
import math

import numpy as np

import abi
from cases import Forward, aligned, decode, encode, pointer, rows, tensor, unwritten, LATENT_FP8, NP_STORAGE


class Backward(Forward):
    """A forward problem, its O and LSE from the reference, and gradients to be computed. randval: the
    bytes that forward stored are read; those that the seed given here would make are others."""

    OPTIONS = dict(Forward.OPTIONS, dbias=False, dsink=False, acc=0)  # acc: splits of dq_acc

    def __init__(self, lib, **options):
        self.lib = lib
        super().__init__(**options)
        if lib:
            self.finish_forward()
        self.build_backward()

    def p(self, x):
        return ctypes.c_void_p(pointer(x))

    def finish_forward(self):
        want = np.zeros(self.o_shape)
        lse = np.zeros(self.lse_array.shape)
        self.lib.reference_forward(ctypes.byref(self.args), self.p(want), self.p(lse), self.p(self.outputs.get("randval")))
        self.o[..., :self.dv] = encode(want.astype(np.float32), self.dtype)
        self.lse_array[...] = lse

    def gradient(self, t, shape, strides):
        a = aligned(shape, NP_STORAGE[self.dtype], unwritten(NP_STORAGE[self.dtype]))
        self.keep.append(a)
        self.outputs[t] = a
        setattr(self.bwd, t, tensor(a, strides))

    def build_backward(self):
        f, a = self.args, abi.BwdArgs()
        self.bwd = a
        for name in ("q", "k", "v", "o", "bias", "lse", "alibi_slopes", "alibi_stride_batch", "sink",
                     "sequences", "band", "mask_data", "dropout", "nhead_q", "nhead_k", "hdim_q", "hdim_v",
                     "scale", "logits_soft_cap", "dtype", "bias_dtype"):
            setattr(a, name, getattr(f, name))
        a.dropout.seed += self.randval
        qb, qs, h, _ = self.o_shape
        kb, ks = (1, a.sequences.total_k) if self.group else (self.batch, self.sk)
        d_o, st = self.bshd(qb, qs, h, self.dv, self.dtype)
        a.d_o = tensor(d_o, st)
        self.gradient("dq", (qb, qs, h, self.dq), (qs * h * self.dq, h * self.dq, self.dq, 1))
        self.gradient("dk", (kb, ks, self.hk, self.dq), (ks * self.hk * self.dq, self.hk * self.dq, self.dq, 1))
        self.gradient("dv", (kb, ks, self.hk, self.dv), (ks * self.hk * self.dv, self.hk * self.dv, self.dv, 1))
        self.d = aligned((qb, h, qs), np.float32, 7.0)
        a.d = rows(self.d, (h * qs, qs, 1))
        self.keep.append(self.d)
        self.outputs["d"] = self.d
        self.build_dq_acc(a, h, qs)
        if self.dbias:
            g = aligned(self.bias_storage(qb, qs), NP_STORAGE[self.bias], unwritten(NP_STORAGE[self.bias]))
            self.keep.append(g)
            self.outputs["dbias"] = g[..., :-self.TURNED_GAP].swapaxes(2, 3) if self.turned else g
            self.dbias_gap = g[..., -self.TURNED_GAP:] if self.turned else g[..., :0]
            a.dbias = tensor(g, self.bias_strides(qb, qs))
        if self.dsink:
            self.dsink_array = self.floats(np.zeros(h))
            self.outputs["dsink"] = self.dsink_array
            a.dsink = pointer(self.dsink_array)

    def build_dq_acc(self, a, heads, qs):
        """The workspace's head, and poisoned partial sums of dQ if they are asked for."""
        splits = [self.acc + i % 2 for i in range(self.batch)] if self.group else [self.acc or 1]
        a.nsplits = pointer(self.ints([max(n, 1) for n in splits]))
        if not self.acc:
            return
        rows = self.lens_q if self.group else [self.batch * qs]
        sizes = [n * heads * s * self.dq for n, s in zip(rows, splits)]
        a.dq_split_keys = max(-(-a.sequences.seqlen_k_max // max(splits)), 1)  # a split for each block, or a few
        self.dq_acc = aligned((sum(sizes),), np.float32, np.nan)
        self.keep.append(self.dq_acc)
        self.outputs["dq_acc"] = self.dq_acc
        a.dq_acc = pointer(self.dq_acc)
        if self.group:
            a.deterministic = 1  # a number of splits for each sequence
            offsets = aligned((len(sizes) + 1,), np.int64)
            offsets[...] = np.cumsum([0] + sizes)
            self.keep.append(offsets)
            a.dq_acc_offsets = pointer(offsets)

    def stages(self):
        convert = [abi.BWD_CONVERT_DQ] if self.acc else []
        return [abi.BWD_DOT_DO_O, abi.BWD_DQ_DK_DV] + convert

    def own_rows(self, name):
        """Rows of a gradient that belong to a sequence, and so must be written whatever they see."""
        of_queries = name == "dq"
        physical = self.lens_q if of_queries else [g[1] for g in self.group] if self.group else [self.sk] * self.batch
        used = (self.used_q if of_queries else self.lens_k) or physical
        own = np.zeros(self.outputs[name].shape[:2], bool)
        at = 0
        for b, (n, room) in enumerate(zip(used, physical)):
            if self.group:
                own[0, at:at + n] = True
            else:
                own[b, :n] = True
            at += room
        return own

    def own_dbias(self):
        """Rows of dBias (batch, head, row) that must be written, behind the keys too; a sum over sequences is written in full."""
        own = np.ones(self.outputs["dbias"].shape[:3], bool)
        if not set("br") & set(self.bias_broadcast or ""):
            own &= self.own_rows("dq")[:, None]
        return own

    def judge_backward(self):
        a = self.bwd
        want = {n: np.zeros(self.outputs[n].shape) for n in ("dq", "dk", "dv")}
        qb, qs, h, _ = self.o_shape
        want["dbias"] = np.zeros((qb, h, qs, self.sk))
        want["dsink"] = np.zeros(h)
        if self.lib.reference_backward(ctypes.byref(a), self.p(want["dq"]), self.p(want["dk"]),
                                       self.p(want["dv"]), self.p(want["dbias"]) if self.dbias else None,
                                       self.p(want["dsink"]) if self.dsink else None):
            raise MemoryError
        if self.dbias:
            for axis, (n, m) in enumerate(zip(self.outputs["dbias"].shape, want["dbias"].shape)):
                if n != m:
                    want["dbias"] = want["dbias"].sum(axis, keepdims=True)
        assert not self.dbias or (self.dbias_gap == unwritten(self.dbias_gap.dtype.type)).all(), "dBias was written behind its rows"
        text = []
        for name in ("dq", "dk", "dv", "dbias", "dsink"):
            if name not in self.outputs:
                continue
            dtype = self.bias if name == "dbias" else abi.F32 if name == "dsink" else self.dtype
            got, w = decode(self.outputs[name], dtype), want[name]
            fill = self.outputs[name] == unwritten(self.outputs[name].dtype.type)
            if name != "dsink":  # other rows may stay as they were
                own = self.own_dbias() if name == "dbias" else self.own_rows(name)
                assert not fill[own].any(), f"{name} has rows that nobody wrote"
            got = np.where(fill & (w == 0), 0, got)
            assert np.isfinite(got).all(), f"{name} is not finite"
            error = np.abs(got - w).max(initial=0)
            size = np.abs(w).max(initial=0)
            unit = {abi.F32: 2e-6, abi.F16: 2 ** -9, abi.BF16: 2 ** -6}[self.dtype]
            # D = rowsum(dO O) starts from the rounded O, and dSink sums D over all rows.
            allowed = unit * max(size, 0.5 if name == "dsink" else 0.1) + 1e-6
            assert error <= allowed, f"{name} is off by {error:.3g}, {allowed:.3g} is allowed"
            text.append(f"{name} {error:.2g}/{allowed:.2g}")
        return " ".join(text)


class Append:
    """append-KV with rotary embedding: caches must be equal bit by bit. new_dtype: of new rows over a cache of fp8, which are divided
    by `factors`: 1, "heads", "pages", "odd" (of pages, some of them none that a row can be divided by) or "found". odd: rows of any size, with NaN.
    slots: rows go by slots, some nowhere, some outside of the cache; shared: K and V lie in one row. latent: values are in keys, -1: as they are, 1: of 656 bytes. widens: the other way round, keys of fp8 to
    k_new and v_new. rows: of each sequence's queries, packed, of which those of up to `few` stay and the others have `places`."""

    OPTIONS = dict(dtype=abi.BF16, batch=2, hq=2, hk=1, sq=3, new=3, cap=40, dq=32, dv=32, page=0,
                   layout=0, rope=abi.ROPE_NONE, rotary_dim=0, rotary_dtype=abi.F32, same=0, seed=3,
                   new_dtype=None, slots=0, shared=0, factors=None, latent=0, widens=0, rows=(), few=0, places=0, odd=0)

    def __init__(self, **options):
        self.__dict__.update(self.OPTIONS)
        self.__dict__.update(options)
        self.keep, self.outputs = [], {}
        if self.slots:
            self.sq = self.new
        if self.widens:
            self.new = self.cap
        if self.latent > 0:
            self.dq, self.dv = 576, 512
        rng = self.rng = np.random.default_rng(self.seed)
        a = self.args = abi.AppendArgs()
        s = a.sequences
        s.batch, s.seqlen_q_max, s.seqlen_k_max = self.batch, self.sq, self.cap
        s.total_q, s.total_k = self.batch * self.sq, self.batch * self.cap
        lens = rng.integers(0, self.cap + 1 if self.widens else self.cap - self.new + 1, self.batch)
        of_new = self.dtype if self.new_dtype is None else self.new_dtype
        a.new_dtype = 0 if of_new == self.dtype else of_new
        a.k_new = self.random((self.batch, self.new, self.hk, self.dq), "k_new" if self.widens else None, of_new)
        a.v_new = self.random((self.batch, self.new, self.hk, self.dv), "v_new" if self.widens else None, of_new)
        a.widens = self.widens
        if self.rows:
            s.seqstart_q = pointer(self.ints(np.cumsum([0, *self.rows])))
            s.seqlen_q_max, s.total_q = max(self.rows), sum(self.rows)
            a.few_rows, a.n_places = self.few, self.places
            for name in ("rows_kept", "rows_widened", "places"):
                self.outputs[name] = self.ints([-7] * self.batch)
                setattr(a, name, pointer(self.outputs[name]))
        if self.slots:
            n = math.ceil(self.batch * self.new / self.page) + 2
            a.cache.page_size, a.cache.n_pages, a.cache.layout = self.page, n, self.layout
            s.seqlen_k_max = 0
            self.place_rows(n)
            shape = (n, self.page, self.hk)
        elif self.page:
            s.seqlen_k = pointer(self.ints(lens))
            blocks = math.ceil(self.cap / self.page)
            n = self.batch * blocks + 2
            a.cache.page_size, a.cache.n_pages, a.cache.layout = self.page, n, self.layout
            a.cache.max_blocks = a.cache.block_table_stride = blocks
            a.cache.block_table = pointer(self.ints(rng.permutation(n)[:self.batch * blocks]))
            shape = (n, self.page, self.hk)
        else:
            s.seqlen_k = pointer(self.ints(lens))
            shape = (self.batch, self.cap, self.hk)
        if self.latent:
            a.v_new = type(a.v_new)()
            a.k = self.random(shape + (656 if self.latent > 0 else self.dq,), "k")
            a.cache.layout = LATENT_FP8 if self.latent > 0 else self.layout
        elif self.shared:
            a.k = self.random(shape + (self.dq + self.dv,), "k")
            a.v = type(a.k)(a.k.data + self.dq * NP_STORAGE[self.dtype]().itemsize, a.k.stride_batch, a.k.stride_seq, a.k.stride_head, 1)
        else:
            a.k = self.random(shape + (self.dq,), "k")
            a.v = self.random(shape + (self.dv,), "v")
        if self.factors:
            self.divide(n if self.page else 0)
        if self.rope:
            a.q = self.random((self.batch, self.sq, self.hq, self.dq), dtype=of_new)
            a.q_rotated = self.random((self.batch, self.sq, self.hq, self.dq), "q_rotated", of_new)
            half = self.rotary_dim // 2
            angles = np.arange(self.cap)[:, None] * 0.3 ** np.arange(half)[None, :]
            for name, x in (("rotary_cos", np.cos(angles)), ("rotary_sin", np.sin(angles))):
                table = encode(x.astype(np.float32), self.rotary_dtype)
                self.keep.append(table)
                setattr(a, name, tensor(table, (0, half, 0, 1)))
        a.seqlen_new, a.rope, a.rotary_dim, a.rotary_max_pos = self.new, self.rope, self.rotary_dim, self.cap
        a.q_rows_same_position = self.same
        a.nhead_q, a.nhead_k, a.hdim_q, a.hdim_v = self.hq, self.hk, self.dq, self.dv
        a.dtype, a.rotary_dtype = self.dtype, self.rotary_dtype

    def place_rows(self, n_pages):
        a, rng, room = self.args, self.rng, n_pages * self.page
        slots = rng.permutation(room)[:self.batch * self.new].astype(np.int64)
        bad = np.array([-1, room, 2**40, -(2**63), -1, room + 7])
        slots[::3] = bad[np.arange(len(slots[::3])) % len(bad)]
        a.slots, a.slots_stride_batch, a.slots_stride_seq = pointer(self.ints(slots, np.int64)), self.new, 1
        if self.rope:
            positions = rng.integers(-2, self.cap + 3, len(slots))
            a.positions, a.positions_stride_batch, a.positions_stride_seq = pointer(self.ints(positions, np.int64)), self.new, 1

    def divide(self, n_pages):
        a, found = self.args, self.factors == "found" and not self.widens
        of_pages = (n_pages, self.hk, 1)
        shape = {"heads": (self.batch, self.hk, 1), "pages": of_pages, "odd": of_pages, "found": (n_pages, self.hk, self.page)}[self.factors]
        a.computes_descale = int(found)
        for name in ("k_descale", "v_descale"):
            x = aligned(shape, np.float32)
            x[...] = self.rng.uniform(0.01, 2, shape)
            if self.factors == "odd":
                some = x.reshape(-1)[::2]
                some[...] = np.resize(np.array([0, -3, np.nan, 2.0**14, np.inf, 2.0**-70, 2.0**90, -np.inf], np.float32), some.shape)
            self.keep.append(x)
            if found:
                self.outputs[name] = x
            d = getattr(a, name)
            d.data, d.stride_batch, d.stride_head, d.stride_block = pointer(x), shape[1] * shape[2], shape[2], 1
            d.block, d.per_page = int(self.factors == "found"), int(self.factors != "heads")

    def ints(self, values, dtype=np.int32):
        x = aligned((len(values),), dtype)
        x[...] = values
        self.keep.append(x)
        return x

    def random(self, shape, name=None, dtype=None):
        numbers = self.rng.standard_normal(shape).astype(np.float32)
        if self.odd and not name:
            numbers *= 2.0 ** self.rng.integers(-120, 120, shape[:3] + (1,))
            numbers.reshape(-1)[::11] = np.resize(np.array([np.nan, np.inf, 0.125 + 2.0**-13, -0.0, -np.inf, 0], np.float32), numbers.reshape(-1)[::11].shape)
        with np.errstate(over="ignore"):
            x = encode(numbers, self.dtype if dtype is None else dtype)
        self.keep.append(x)
        if name:
            self.outputs[name] = x
        b, s, h, d = shape
        return tensor(x, (s * h * d, h * d, d, 1))

    def run_and_judge(self, lib, run):
        before = {n: x.copy() for n, x in self.outputs.items()}
        run()
        got = {n: x.copy() for n, x in self.outputs.items()}
        for n, x in self.outputs.items():
            x[...] = before[n]
        if lib.reference_appendkv(ctypes.byref(self.args)):
            raise MemoryError
        for n, x in self.outputs.items():
            wrong = int((got[n] != x).sum())
            assert wrong == 0, f"{n}: {wrong} elements differ from the reference"
        return "bit for bit"
