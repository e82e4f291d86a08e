# SPDX-License-Identifier: MIT
"""Forward problems as plain data: build tensors and argument structs, ask the reference, judge.

A device is anything with run(kernel, args): the emulator runs on the same memory, a GPU copies.
"""
import ctypes
import math

import numpy as np

import abi

NP_STORAGE = {abi.F32: np.float32, abi.F16: np.uint16, abi.BF16: np.uint16, abi.E4M3: np.uint8,
              abi.E5M2: np.uint8, abi.I8: np.int8}
NAN_WORD = {1: 0x7f, 2: 0x7fff, 4: np.nan}  # by the bytes of an element
LATENT_FP8 = 2  # enum abi_kv_layout
I8_SPREAD = 32  # what numbers are multiplied by to take all of i8's range, and its factors divided
LOWEST = {abi.F32: np.finfo(np.float32).min, abi.F16: 0xfbff, abi.BF16: 0xff7f}


def unwritten(storage):
    """What no result can be: a NaN, or in float32, where it has to be found again, less than any."""
    return {np.float32: np.float32(-3e38), np.uint16: np.uint16(0xffff), np.uint8: np.uint8(0xff), np.int8: np.int8(-1)}[storage]


def aligned(shape, dtype, fill=None):
    """An array at a multiple of 256 bytes: what allocators give, and vector loads hope for."""
    n = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.full(n + 512, 0xff, np.uint8)
    start = -raw.ctypes.data % 256
    array = raw[start:start + n].view(dtype).reshape(shape)
    if fill is not None:
        array[...] = fill
    return array


def encode(x, dtype):
    """float32 -> stored bits, to nearest; even, but for fp8."""
    out = aligned(x.shape, NP_STORAGE[dtype])
    if dtype == abi.F32:
        out[...] = x
    elif dtype == abi.F16:
        out[...] = x.astype(np.float16).view(np.uint16)
    elif dtype == abi.BF16:
        bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
        out[...] = ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    elif dtype == abi.I8:
        out[...] = np.rint(x).clip(-128, 127)
    else:
        values = fp8_values(dtype)
        nearest = np.searchsorted((values[1:] + values[:-1]) / 2, np.abs(x)).astype(np.uint8)
        out[...] = np.where(x < 0, nearest | 0x80, nearest)
    return out


def fp8_values(dtype):
    """What the codes from 0 on stand for, as far as they are finite."""
    mantissa, bias, codes = (3, 7, 0x7f) if dtype == abi.E4M3 else (2, 15, 0x7c)
    code = np.arange(codes)
    exponent, fraction = code >> mantissa, (code & ((1 << mantissa) - 1)) / (1 << mantissa)
    return np.where(exponent, (1 + fraction) * 2.0 ** (exponent - bias), fraction * 2.0 ** (1 - bias))


def decode(bits, dtype):
    if dtype == abi.F32:
        return bits.astype(np.float64)
    if dtype == abi.F16:
        return bits.view(np.float16).astype(np.float64)
    if dtype == abi.BF16:
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype == abi.I8:
        return bits.astype(np.float64)
    values = fp8_values(dtype)
    return values[bits & 0x7f] * np.where(bits & 0x80, -1.0, 1.0)


def pointer(array):
    return array.ctypes.data if array is not None else None


def tensor(array, strides):
    """strides: (batch, seq, head, dim) in elements."""
    return abi.STRUCTS["abi_tensor"](pointer(array), *strides)


def rows(array, strides):
    return abi.STRUCTS["abi_rows"](pointer(array), *strides)


class Forward:
    """One forward problem. Every option has a neutral default; see OPTIONS. descale: True, a factor a
    head; "signed", those of k below 0; "block", one for every 16 rows too; "page", for k and v one for every page. used_q: rows
    that count, the others are padding. shift: elements by which pages miss the start of a vector. heavy: the share of keys that
    are four times as long as others, so that scores far above all before them come late, and sums so far are scaled down.
    ones: V is 1, and so is O, if weights are right on average. turned: a bias, and dBias, lies key by key, NaN behind each.
    lowest: the share of a bias' elements, and of its rows, that are the lowest number of its type.
    data: endpoints a row of a mask of intervals, or "bits"; data_broadcast: "b", "h", "bh". kv_dtype: of K and V under a Q of 16
    bits; descale "key" and "slot" then, too; powers: factors are powers of two, True: 2^-3 to 4, or so much further each way; one_sign: K and V are positive. v_in_k: values are the
    first dv elements of keys. topk: keys that each row chooses, some of them twice or none at all; slots: of slots, which no table leads to.
    latent_fp8: keys are such, of 656 bytes, and hold values."""

    OPTIONS = dict(
        dtype=abi.BF16, batch=1, hq=1, hk=1, sq=16, sk=16, dq=32, dv=32, mask=abi.MASK_NONE,
        left=-1, right=-1, sinks=0, bias=None, alibi=False, cap=0.0, sink=False, dropout=0.0,
        group=None, lens_k=None, leftpad=None, page=0, table="block", layout=0, splits=0,
        split_size=0, scale=None, descale=False, strided=False, lse=True, min_sq=0, randval=False,
        o_dtype=None, seed=1, bias_broadcast=False, turned=False, cache_idx=False,
        poison=None, used_q=None, shift=0, heavy=0.0, ones=False, lowest=0.0, data=0, data_broadcast="", kv_dtype=None, powers=False,
        one_sign=False, v_in_k=False, topk=0, slots=False, latent_fp8=False)

    def __init__(self, **options):
        unknown = set(options) - set(self.OPTIONS)
        if unknown:
            raise TypeError(f"unknown options {unknown}")
        self.__dict__.update(self.OPTIONS)
        self.__dict__.update(options)
        self.options = options
        self.keep = []  # arrays that the args point to
        self.outputs, self.factors = {}, {}
        self.rng = np.random.default_rng(self.seed)
        self.build()

    def __str__(self):
        return " ".join(f"{k}={v}" for k, v in self.options.items())

    # ---- building -------------------------------------------------------------------------
    def normal(self, shape, dtype, scale=1.0):
        scale = scale * (I8_SPREAD if dtype == abi.I8 and self.descale else 1)
        a = encode((self.rng.standard_normal(shape) * scale).astype(np.float32), dtype)
        self.keep.append(a)
        return a

    def ints(self, values):
        a = aligned((len(values),), np.int32)
        a[...] = values
        self.keep.append(a)
        return a

    def floats(self, array):
        a = aligned(np.shape(array), np.float32)
        a[...] = array
        self.keep.append(a)
        return a

    def keys(self, b, s):
        """Those of a tensor, and their strides."""
        if not self.latent_fp8:
            return self.bshd(b, s, self.hk, self.dq, self.of_keys, heavy=self.heavy)
        k, st = self.bshd(b, s, 1, 656, abi.E4M3)
        k[..., 512:528] = (self.rng.random((b, s, 1, 4)).astype(np.float32) + 0.5).view(np.uint8)
        k[..., 528:] = encode(self.rng.standard_normal((b, s, 1, 64)).astype(np.float32), abi.BF16).view(np.uint8)
        return k, st

    def bshd(self, b, s, h, d, dtype, fill=None, heavy=0.0):
        """A (batch, seq, head, dim) tensor: packed, or with odd strides that forbid vectors."""
        pad = 3 if self.strided else 0
        if fill is None:
            lengths = np.where(self.rng.random((b, s, h, 1)) < heavy, 4, 1) if heavy else 1.0
            a = self.normal((b, s, h, d + pad), dtype, lengths)
            if self.one_sign:
                a &= np.asarray((1 << (8 * a.itemsize - 1)) - 1, a.dtype)
        else:
            a = aligned((b, s, h, d + pad), NP_STORAGE[dtype], fill)
            self.keep.append(a)
        w = d + pad
        return a, (s * h * w, h * w, w, 1)

    def build(self):
        a = self.args = abi.FwdArgs()
        if self.latent_fp8:
            self.dq, self.dv, self.hk, self.v_in_k, self.kv_dtype, self.layout = 576, 512, 1, True, abi.E4M3, LATENT_FP8
        self.of_keys = self.dtype if self.kv_dtype is None else self.kv_dtype
        a.kv_dtype = self.kv_dtype or 0
        self.o_dtype = self.o_dtype if self.o_dtype is not None else (
            self.dtype if self.dtype <= abi.BF16 else abi.BF16)
        self.lens_q = [self.sq] * self.batch
        if self.group:  # list of (physical q, physical k)
            self.batch = len(self.group)
            self.lens_q = [g[0] for g in self.group]
            self.sq, self.sk = max(self.lens_q), max(g[1] for g in self.group)
        s = a.sequences
        s.batch, s.seqlen_q_max, s.seqlen_k_max = self.batch, self.sq, self.sk
        s.total_q = sum(self.lens_q)
        s.total_k = self.batch * self.sk
        qb, qs = (1, s.total_q) if self.group else (self.batch, self.sq)
        q, st = self.bshd(qb, qs, self.hq, self.dq, self.dtype)
        a.q = tensor(q, st)
        self.build_keys(a)
        o, st = self.bshd(qb, qs, self.hq, self.dv, self.o_dtype, unwritten(NP_STORAGE[self.o_dtype]))
        a.o = tensor(o, st)
        self.o, self.o_shape = o, (qb, qs, self.hq, self.dv)
        self.outputs["o"] = o
        self.lse_array = aligned((qb, self.hq, qs), np.float32, 7.0)
        self.keep.append(self.lse_array)
        if self.lse:
            a.lse = rows(self.lse_array, (self.hq * qs, qs, 1))
            self.outputs["lse"] = self.lse_array
        if self.group:
            s.seqstart_q = pointer(self.ints(np.cumsum([0] + self.lens_q)))
        if self.used_q:
            s.seqlen_q = pointer(self.ints(self.used_q))
        self.build_options(a, qb, qs)

    def build_keys(self, a):
        s, lens = a.sequences, self.lens_k
        if self.page:
            self.build_pages(a)
        elif self.group:
            total = sum(g[1] for g in self.group)
            s.total_k = total
            s.seqstart_k = pointer(self.ints(np.cumsum([0] + [g[1] for g in self.group])))
            k, st = self.keys(1, total)
            v, sv = self.bshd(1, total, self.hk, self.dv, self.of_keys)
            a.k, a.v = tensor(k, st), tensor(v, sv)
        else:
            n = self.batch + 2 if self.cache_idx else self.batch
            k, st = self.keys(n, self.sk)
            one = encode(np.ones(1, np.float32), self.of_keys)[0] if self.ones else None
            v, sv = self.bshd(n, self.sk, self.hk, self.dv, self.of_keys, one)
            a.k, a.v = tensor(k, st), tensor(v, sv)
            self.stored = k, v
            if self.poison:  # keys that nobody sees: NaN in 16-bit types
                k[:, slice(*self.poison)] = v[:, slice(*self.poison)] = NAN_WORD[k.itemsize]
            if self.cache_idx:
                a.cache.cache_batch_idx = pointer(self.ints(self.rng.permutation(n)[:self.batch]))
                a.cache.cache_batch = n
        if self.latent_fp8 and not self.page:
            a.cache.layout = self.layout
        if self.v_in_k:
            a.v, a.v_in_k = a.k, 1
        if lens is not None:
            s.seqlen_k = pointer(self.ints(lens))
        if self.leftpad is not None:
            s.leftpad_k = pointer(self.ints(self.leftpad))

    def build_pages(self, a):
        c, lens = a.cache, self.lens_k or [self.sk] * self.batch
        blocks = [max(1, math.ceil(n / self.page)) for n in lens]
        n_pages = sum(blocks) + 3
        order = self.rng.permutation(n_pages)
        c.page_size, c.n_pages, c.layout = self.page, n_pages, self.layout
        width = max(blocks)
        c.max_blocks = width
        if self.table == "block":
            # Entries past the end hold garbage: kernels must not follow them.
            t = np.full((self.batch, width), 1 << 28, np.int64)
            at = 0
            for b, n in enumerate(blocks):
                t[b, :n] = order[at:at + n]
                at += n
            c.block_table = pointer(self.ints(t.reshape(-1)))
            c.block_table_stride = width
            if self.lens_k is None:
                self.lens_k = lens
        else:
            c.kv_indptr = pointer(self.ints(np.cumsum([0] + blocks)))
            c.kv_page_indices = pointer(self.ints(order[:sum(blocks)]))
            c.n_page_indices = sum(blocks)
            c.kv_last_page_len = pointer(
                self.ints([n - (m - 1) * self.page for n, m in zip(lens, blocks)]))
            self.lens_k = None
        n = n_pages + (self.shift > 0)
        k, st = self.keys(n, self.page)
        v, sv = self.bshd(n, self.page, self.hk, self.dv, self.of_keys)
        self.stored = k, v
        firsts = np.cumsum([0] + blocks[:-1])
        for position in range(*self.poison or (0,)):  # of every sequence, left padding included
            pages = [order[first + position // self.page] for first, m in zip(firsts, blocks) if position < m * self.page]
            k[pages, position % self.page] = v[pages, position % self.page] = NAN_WORD[k.itemsize]
        a.k, a.v = tensor(k.reshape(-1)[self.shift:], st), tensor(v.reshape(-1)[self.shift:], sv)

    def build_options(self, a, qb, qs):
        a.nhead_q, a.nhead_k, a.hdim_q, a.hdim_v = self.hq, self.hk, self.dq, self.dv
        a.dtype, a.o_dtype, a.bias_dtype = self.dtype, self.o_dtype, abi.F32
        a.scale = self.scale if self.scale is not None else 1 / math.sqrt(self.dq)
        a.logits_soft_cap, a.min_seqlen_q = self.cap, self.min_sq
        a.band.mask, a.band.window_left, a.band.window_right = self.mask, self.left, self.right
        a.band.sink_tokens = self.sinks
        if self.bias is not None:
            bias = self.normal(self.bias_storage(qb, qs), self.bias)
            if self.lowest:
                rows = bias.swapaxes(2, 3) if self.turned else bias
                rows[self.rng.random(rows.shape) < self.lowest] = LOWEST[self.bias]
                rows[self.rng.random(rows.shape[:3]) < self.lowest] = LOWEST[self.bias]
            if self.turned:
                bias[..., -self.TURNED_GAP:] = NAN_WORD[bias.itemsize]
            a.bias, a.bias_dtype = tensor(bias, self.bias_strides(qb, qs)), self.bias
        if self.topk:
            self.build_chosen(a, qb, qs)
        if self.data:
            self.build_mask_data(a.mask_data, qb, qs)
        if self.alibi:
            a.alibi_slopes = pointer(self.floats(self.rng.random((self.batch, self.hq))))
            a.alibi_stride_batch = self.hq
        if self.sink:
            a.sink = pointer(self.floats(self.rng.standard_normal(self.hq)))
        if self.descale:
            for name, heads in (("q", self.hq), ("k", self.hk), ("v", self.hk))[self.kv_dtype is not None:]:
                self.build_descale(getattr(a, name + "_descale"), heads, self.descale in ("page", "slot") and name != "q",
                                   -1 if self.descale == "signed" and name == "k" else 1)
            if self.v_in_k:
                a.v_descale = a.k_descale
        if self.dropout:
            p = a.dropout
            p.seed, p.offset, p.p_drop = 0x123456789abcdef, 77, self.dropout
            p.p_keep_inverse = 1 / (1 - self.dropout)
            p.keep_at_most = int(math.floor(255 * (1 - self.dropout)))
            if self.randval:
                r = aligned((qb, self.hq, qs, self.sk), np.uint8, 0)
                self.keep.append(r)
                p.randval = tensor(r, (self.hq * qs * self.sk, self.sk, qs * self.sk, 1))
                self.outputs["randval"] = r
        if self.splits:
            a.n_splits, a.split_size = self.splits, self.split_size
            self.o_acc = aligned((self.splits, self.hq, a.sequences.total_q, self.dv), np.float32, 7.0)
            self.lse_acc = aligned((self.splits, self.hq, a.sequences.total_q), np.float32, 7.0)
            self.keep += [self.o_acc, self.lse_acc]
            a.o_acc, a.lse_acc = pointer(self.o_acc), pointer(self.lse_acc)
            self.outputs.update(o_acc=self.o_acc, lse_acc=self.lse_acc)

    def build_chosen(self, a, qb, qs):
        most = a.cache.n_pages * self.page if self.slots else self.sk
        chosen = self.rng.integers(0, most, (qb, qs, self.topk))
        wild = self.rng.random(chosen.shape) < 0.2
        chosen[wild] = self.rng.choice([-1, -2 ** 31, 2 ** 31 - 1, most], wild.sum())
        chosen[:, qs // 2, self.topk // 3:] = -1
        chosen[:, qs - 1] = -1
        if self.poison:  # nobody chooses what is NaN
            first, end = self.poison
            chosen[(chosen >= first) & (chosen < end)] = -1
        c = a.chosen
        c.data, c.n, c.are_slots = pointer(self.ints(chosen.reshape(-1)).reshape(chosen.shape)), self.topk, self.slots
        c.stride_batch, c.stride_seq, c.stride_entry = qs * self.topk, self.topk, 1
        if self.slots:
            a.cache.block_table = None
            a.sequences.seqlen_k = None

    def build_mask_data(self, m, qb, qs):
        """Rows in stretches see nothing, everything, one document, borders of tiles, any union, or what no endpoint should be."""
        b, h = (1 if n in self.data_broadcast else size for n, size in (("b", qb), ("h", self.hq)))
        kinds = self.rng.integers(0, 6, -(-qs // 24)).repeat(24)[:qs]
        if self.data == "bits":
            bits = self.rng.integers(0, 256, (b, h, qs, -(-self.sk // 8))).astype(np.uint8)
            bits[:, :, kinds == 0], bits[:, :, kinds == 1] = 0, 255
            bits[:, :, kinds == 2, ::2] = 0
            self.keep.append(bits)
            n = bits.shape[-1]
            m.bits = tensor(bits, (0 if b == 1 else h * qs * n, n, 0 if h == 1 else qs * n, 1))
            return
        f = self.rng.integers(0, self.sk + 1, (b, h, self.data, qs))
        f.sort(2)
        f[..., kinds == 0] = 0
        f[:, :, 0, kinds == 1] = self.sk
        f[..., kinds == 2] = f[..., :1]
        f[..., kinds == 3] = f[..., kinds == 3] // 32 * 32
        wild = (self.rng.random(f.shape) < 0.3) & (kinds == 5)
        f[wild] = self.rng.choice([-2 ** 31, -1, 2 ** 31 - 1, self.sk + 5], wild.sum())
        f = f.astype(np.int32)
        self.keep.append(f)
        n = self.data
        m.n_endpoints, m.intervals = n, tensor(f, (0 if b == 1 else h * n * qs, 1, 0 if h == 1 else n * qs, qs))

    def build_descale(self, d, heads, per_page, sign):
        block = {"block": 16, "key": 1, "slot": 1}.get(self.descale, 0)
        length = self.page if self.descale == "slot" else max(self.sq, self.sk)
        n = math.ceil(length / block) if block else 1
        entries = self.args.cache.n_pages if per_page else self.batch
        factors = self.rng.random((entries, heads, n)) + 0.5
        if self.powers:
            reach = 3 * self.powers
            factors = 2.0 ** self.rng.integers(-reach, reach, factors.shape)
        array = self.floats(sign * factors / (I8_SPREAD if self.of_keys == abi.I8 else 1))
        self.factors[ctypes.addressof(d)] = array, block
        d.data = pointer(array)
        d.stride_batch, d.stride_head, d.stride_block = heads * n, n, 1
        d.block, d.per_page = block, per_page

    def widened(self):
        """K and V in Q's type: what they and their factors, of sequences or of pages, stand for."""
        found = []
        for store, d in zip(self.stored, (self.args.k_descale, self.args.v_descale)):
            x = decode(store, self.of_keys)
            if ctypes.addressof(d) in self.factors:
                factors, block = self.factors[ctypes.addressof(d)]
                x = x * factors.astype(np.float64).transpose(0, 2, 1)[:, np.arange(x.shape[1]) // block if block else [0], :, None]
            found.append(encode(x.astype(np.float32), self.dtype))
        self.keep += found
        return found

    # bias_broadcast: over which of b(atch), h(ead), r(ow) one bias serves; True: "bh".
    def bias_shape(self, qb, qs):
        axes = "bh" if self.bias_broadcast is True else self.bias_broadcast or ""
        return tuple(1 if name in axes else n for name, n in zip("bhr", (qb, self.hq, qs))) + (self.sk,)

    TURNED_GAP = 3

    def bias_storage(self, qb, qs):
        b, h, r, c = self.bias_shape(qb, qs)
        return (b, h, c, r + self.TURNED_GAP) if self.turned else (b, h, r, c)

    def bias_strides(self, qb, qs):
        """(batch, seq, head, dim); 0 along an axis that the bias repeats over."""
        b, h, r, _ = self.bias_shape(qb, qs)
        _, _, m, n = self.bias_storage(qb, qs)
        row, column = (1, n) if self.turned else (n, 1)
        return (0 if b == 1 < qb else h * m * n, 0 if r == 1 != qs else row, 0 if h == 1 < self.hq else m * n, column)

    # ---- what to run ----------------------------------------------------------------------
    @property
    def family(self):
        if self.splits:
            return abi.FWD_SPLITKV
        if self.page and self.table == "sglang":
            return abi.BATCH_PREFILL
        return abi.FWD_PAGEDKV if self.page else abi.FWD

    def combine_args(self):
        """Arguments of the stage that follows a split forward."""
        a, c = self.args, abi.CombineArgs()
        total = a.sequences.total_q
        per_batch = 0 if self.group else self.sq
        c.o_parts = tensor(self.o_acc, (per_batch * self.dv, self.dv, total * self.dv, 1))
        c.o_parts_stride_split = self.hq * total * self.dv
        c.lse_parts = rows(self.lse_acc, (per_batch, total, 1))
        c.lse_parts_stride_split = self.hq * total
        c.o, c.lse, c.sink, c.sequences = a.o, a.lse, a.sink, a.sequences
        c.n_splits, c.nhead_q, c.hdim_v = self.splits, self.hq, self.dv
        c.min_seqlen_q, c.o_parts_dtype, c.o_dtype = self.min_sq, abi.F32, self.o_dtype
        return c

    # ---- judging --------------------------------------------------------------------------
    def judge(self, lib, weights):
        """weights: the type of P. Returns (error, allowed error, LSE error) or raises AssertionError with a sentence."""
        qb, qs, h, d = self.o_shape
        want = np.zeros(self.o_shape)
        plain = np.zeros(self.o_shape)
        want_lse = np.full((qb, h, qs), 7.0)
        plain_lse = want_lse.copy()
        randval = np.zeros((qb, h, qs, self.sk), np.uint8) if self.randval else None

        def p(x):
            return ctypes.c_void_p(pointer(x))

        if lib.reference_forward(ctypes.byref(self.args), p(want), p(want_lse), p(randval)):
            raise MemoryError
        yardstick = self.dtype if self.dtype <= abi.BF16 else abi.BF16
        lib.reference_forward_rounded(ctypes.byref(self.args), ctypes.c_uint32(yardstick), ctypes.c_uint32(weights),
                                      p(plain), p(plain_lse))
        got = decode(self.o[..., :d], self.o_dtype)
        touched = np.zeros((qb, qs), bool)
        at = 0
        for b, physical in enumerate(self.lens_q):
            n = self.used_q[b] if self.used_q else physical
            if n >= self.min_sq:
                if self.group:
                    touched[0, at:at + n] = True
                else:
                    touched[b, :n] = True
            at += physical
        untouched = self.o[~touched].reshape(-1)
        assert (untouched == unwritten(NP_STORAGE[self.o_dtype])).all() if not self.strided else True, "rows of no sequence were written"
        got, want, plain = got[touched], want[touched], plain[touched]
        assert np.isfinite(got).all(), "O is not finite"
        error, bar = np.abs(got - want).max(initial=0), np.abs(plain - want).max(initial=0)
        floor = (1e-5 if self.dtype == abi.F32 else 2e-3) * max(1e-3, np.abs(want).max(initial=0))
        allowed = 2 * bar + floor
        assert error <= allowed, f"O is off by {error:.3g}, {allowed:.3g} is allowed"
        lse_error = 0.0
        if self.lse:
            mask = np.broadcast_to(touched[:, None, :], want_lse.shape)
            g, w = self.lse_array[mask].astype(np.float64), want_lse[mask]
            assert ((g == -np.inf) == (w == -np.inf)).all(), "LSE of an empty row is not -inf"
            finite = w != -np.inf
            lse_error = np.abs(g[finite] - w[finite]).max(initial=0)
            lse_bar = 1e-5 if self.dtype == abi.F32 else 1e-3
            if self.latent_fp8:  # whose elements become numbers of the queries' type
                lse_bar = 2 * np.abs(plain_lse[mask][finite] - w[finite]).max(initial=0)
            assert lse_error <= lse_bar + 1e-5 * np.abs(w[finite]).max(initial=0), \
                f"LSE is off by {lse_error:.3g}"
        if self.randval:
            assert (self.outputs["randval"] == randval).all(), "dropout bytes differ"
        return error, allowed, lse_error


class Merge:
    """Partial results of any type become one: the combine stage on its own. One part of every row is empty. few: rows of a sequence that
    blocks are launched for."""

    OPTIONS = dict(dtype=abi.BF16, o_dtype=abi.BF16, batch=2, hq=2, sq=5, dv=40, parts=3, sink=False, seed=9, few=0)

    def __init__(self, **options):
        self.__dict__.update(self.OPTIONS)
        self.__dict__.update(options)
        rng = np.random.default_rng(self.seed)
        b, h, s, d, n = self.batch, self.hq, self.sq, self.dv, self.parts
        parts = encode(rng.standard_normal((n, b, s, h, d)).astype(np.float32), self.dtype)
        lse = aligned((n, b, h, s), np.float32)
        lse[...] = rng.standard_normal(lse.shape) * 3
        empty = rng.integers(0, n, (b, h, s))
        for i in range(n):
            lse[i][empty == i] = -np.inf
            parts[i][(empty == i).transpose(0, 2, 1)] = np.array(-1).astype(parts.dtype)  # NaN, or nearly
        storage = NP_STORAGE[self.o_dtype]
        self.o, self.lse = aligned((b, s, h, d), storage, unwritten(storage)), aligned((b, h, s), np.float32, 7.0)
        sink = aligned((h,), np.float32)
        sink[...] = rng.standard_normal(h)
        self.keep, self.outputs = [parts, lse, sink, self.o, self.lse], {"o": self.o, "lse": self.lse}
        c = self.args = abi.CombineArgs()
        c.o_parts, c.o_parts_stride_split = tensor(parts, (s * h * d, h * d, d, 1)), b * s * h * d
        c.lse_parts, c.lse_parts_stride_split = rows(lse, (h * s, s, 1)), b * h * s
        c.o, c.lse = tensor(self.o, (s * h * d, h * d, d, 1)), rows(self.lse, (h * s, s, 1))
        c.sink = pointer(sink) if self.sink else None
        c.sequences.batch, c.sequences.seqlen_q_max, c.sequences.total_q = b, s, b * s
        c.n_splits, c.nhead_q, c.hdim_v = n, h, d
        c.o_parts_dtype, c.o_dtype, c.few_rows = self.dtype, self.o_dtype, self.few

    def judge(self, lib):
        want, want_lse = np.zeros(self.o.shape), np.zeros(self.lse.shape)
        lib.reference_combine(ctypes.byref(self.args), ctypes.c_void_p(pointer(want)), ctypes.c_void_p(pointer(want_lse)))
        got = decode(self.o, self.o_dtype)
        assert np.isfinite(got).all(), "O is not finite"
        # Half a unit in the last place of the largest number, and the rounding of the sums in float.
        unit = {abi.F32: 2 ** -22, abi.F16: 2 ** -11, abi.BF16: 2 ** -8}[self.o_dtype]
        error, allowed = np.abs(got - want).max(), unit * np.abs(want).max() + 2e-6
        lse_error = np.abs(self.lse - want_lse).max()
        assert error <= allowed, f"O is off by {error:.3g}, {allowed:.3g} is allowed"
        assert lse_error <= 1e-5, f"LSE is off by {lse_error:.3g}"
        return f"O {error:.2g} of {allowed:.2g}, LSE {lse_error:.2g}"
