#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""16-bit queries over caches of fp8 and int8, and few rows over long ones, as a caller has them, beside the same over a cache of 16 bits,
and FlashAttention-3 over that, on one card and in one process; and new rows on their way into such caches, beside a plain copy.

    FMHA_BIN=... [FMHA_PEERS=...] python3 tests/gpu/caches.py [--match TEXT] [--short]
    FMHA_BIN=... python3 tests/gpu/caches.py --batches 40 [--seed N]     random batches of decodes and chunks, in graphs whose lengths change

FlashAttention-3 is that of libraries.py. Of each result some rows are compared with float64 of the values that the cache stands for, and with twice what
the same formula is off by in Q's type. Scales are powers of two; where a problem's kernel has the tile that the one of 16 bits has, results are bit for bit
those over the widened cache, and it is said. By token: each key has factors of its own in each head, of K and of V, which bring its largest element to the
type's largest, as caches of servers have them.
Times are of CUDA graphs, taken in turns, us. Decode's time per key is the slope between 16,384 and 65,536 keys. append: what moves (new rows, codes, slots,
positions and the tables' rows) by time, as a share of what a copy of as many bytes as the new rows have moves; and one token of each of 128
sequences, less a kernel that does nothing. --short: a shape or two of each kind, every type of 8 bits. A table of what was measured comes last. Heads of
512 have a program of their own, hopper_wide.py.
"""
import argparse
import dataclasses
import math
import random
import sys

import torch

import fmha
import fmha.torch  # noqa: F401: tensors on a GPU
import libraries
from gpu_timer import compare_graphs

NARROW = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}
SCALES = {"e4m3": (0.5, 2.0), "e5m2": (0.5, 2.0), "int8": (2.0 ** -5, 2.0 ** -5)}  # of K and V: normal numbers take most of the range
MOST = {"e4m3": 448.0, "e5m2": 57344.0, "int8": 127.0}
BY_TOKEN = ("e4m3", "int8")


@dataclasses.dataclass
class Shape:
    """rows of each of `batch` sequences over `keys` keys; page 0: not in pages. ones: so many sequences of one row are in front, packed, and
    all have between half of the keys and all."""
    batch: int
    heads: int
    heads_k: int
    rows: int
    keys: int
    hdim: int = 128
    hdim_v: int = 0
    page: int = 0
    causal: bool = True
    softcap: float = 0.0
    ones: int = 0
    dtype: torch.dtype = torch.bfloat16
    kinds: tuple = ("e4m3", "int8")

    def __str__(self):
        dim = f"{self.hdim}/{self.hdim_v}" if self.hdim_v else str(self.hdim)
        return ((f"{self.ones} x 1 and " if self.ones else "") + f"{self.batch} x {self.heads}/{self.heads_k} x {self.rows} over {self.keys} d{dim}"
                + (f" pages {self.page}" if self.page else "") + (" causal" if self.causal and self.rows > 1 else "")
                + (" soft cap" if self.softcap else "") + (" f16" if self.dtype == torch.float16 else ""))


ALL = ("e4m3", "e5m2", "int8")
SHAPES = {
    "prefill": [Shape(1, 32, 8, 8192, 8192, kinds=ALL), Shape(1, 32, 8, 8192, 8192, causal=False, kinds=ALL),
                Shape(1, 32, 8, 8192, 8192, dtype=torch.float16), Shape(2, 32, 8, 4096, 4096, 64), Shape(1, 16, 8, 8192, 8192, 256),
                Shape(1, 16, 16, 8192, 8192, 192, 128), Shape(8, 32, 8, 1024, 1024),
                Shape(1, 16, 8, 8192, 8192, softcap=2.0)],
    "chunk": [Shape(4, 32, 8, 512, 16384, page=16, kinds=ALL), Shape(4, 32, 8, 512, 16384, page=64), Shape(1, 64, 8, 2048, 16384, page=16),
              Shape(2, 16, 8, 1024, 8192, 256, page=64)],
    "few": [Shape(1, 32, 8, rows, 16384, page=16) for rows in (65, 128, 192, 256)] +
           [Shape(1, 8, 8, 640, 8192), Shape(1, 8, 8, 1024, 8192), Shape(2, 16, 4, 300, 6000, 64, page=64),
            Shape(1, 16, 8, 128, 32768, 256, page=64), Shape(1, 16, 16, 200, 8192, 192, 128), Shape(4, 32, 8, 160, 4096, page=16),
            Shape(1, 16, 8, 128, 8192, page=16, softcap=2.0), Shape(8, 64, 8, 24, 4096, page=64)],
    "mixed": [Shape(1, 32, 8, 512, 8192, page=16, ones=32), Shape(1, 32, 8, 2048, 8192, page=16, ones=64),
              Shape(2, 64, 8, 256, 4096, page=64, ones=128), Shape(4, 32, 8, 512, 4096, page=16, ones=4), Shape(1, 28, 4, 1000, 6000, page=16, ones=16)],
    "decode": [Shape(batch, heads, 8, 1, keys, hdim, page=page, kinds=kinds)
               for batch, heads, hdim, page, kinds in ((16, 32, 128, 64, ALL), (16, 64, 128, 16, ("e4m3", "int8")), (8, 16, 256, 64, ("e4m3", "int8")),
                                                       (16, 64, 64, 64, ("e4m3", "int8")))
               for keys in (16384, 65536)] + [Shape(1, 32, 8, 1, 4096, page=64), Shape(128, 32, 8, 1, 1500, page=64),
                                              Shape(16, 32, 8, 4, 8192, page=64)],
}

SHORT = {
    "prefill": [Shape(1, 32, 8, 8192, 8192, kinds=ALL), Shape(1, 32, 8, 8192, 8192, causal=False, kinds=ALL), Shape(1, 16, 8, 8192, 8192, 256, kinds=ALL)],
    "chunk": [Shape(4, 32, 8, 512, 16384, page=16, kinds=ALL), Shape(1, 64, 8, 2048, 16384, page=16, kinds=ALL)],
    "decode": [Shape(16, heads, 8, 1, keys, hdim, page=64, kinds=ALL) for heads, hdim in ((32, 128), (16, 256), (64, 64)) for keys in (16384, 65536)],
}


def coded(x, kind):
    return x.round().clamp(-127, 127).to(torch.int8) if kind == "int8" else x.to(NARROW[kind])


def attend(rows, k, v, s, seen, dtype=None):
    """(O, LSE) in float64, or as the formula gives them whose operands, scores and weights are of a type."""
    to = (lambda x: x.to(dtype).double()) if dtype else lambda x: x  # noqa: E731
    scores = to(rows.double() @ to(k).T / math.sqrt(rows.shape[-1]))
    if s.softcap:
        scores = to(s.softcap * torch.tanh(scores / s.softcap))
    scores.masked_fill_(~seen, -math.inf)
    lse = scores.logsumexp(-1)
    high = scores.amax(-1, keepdim=True).clamp(min=-1e30)
    return to(to((scores - high).exp()) @ to(v) * (high - lse[:, None]).exp()), lse


class Off:
    """How far results are from float64, O in parts of its largest element, and how far they may be: twice as far as the formula in Q's type."""

    def __init__(self):
        self.o = self.lse = self.most_o = self.most_lse = self.largest = 0.0

    def take(self, o, lse, rows, k, v, s, seen):
        exact, plain = attend(rows, k, v, s, seen), attend(rows, k, v, s, seen, rows.dtype)
        far = [[(x.double() - y)[y.isfinite()].abs().max().item() if y.isfinite().any() else 0.0 for x, y in zip(found, exact)]
               for found in ((o, exact[1] if lse is None else lse), plain)]
        self.o, self.lse = max(self.o, far[0][0]), max(self.lse, far[0][1])
        self.most_o, self.most_lse = max(self.most_o, far[1][0]), max(self.most_lse, far[1][1])
        self.largest = max(self.largest, exact[0].abs().max().item())

    def is_wrong(self):
        return not (self.o <= 2 * self.most_o + 2 ** -9 * self.largest and self.lse <= 2 * self.most_lse + 1e-4)

    def __str__(self):
        return f"off by {self.o / (self.largest or 1):.1e} of {self.most_o / (self.largest or 1):.1e}" + (
            f", LSE {self.lse:.1e} of {self.most_lse:.1e}" if self.most_lse else "")


class Problem:
    def __init__(self, s):
        generator = torch.Generator("cuda").manual_seed(s.rows + s.keys)
        self.s = s
        hdim_v = s.hdim_v or s.hdim

        def normal(*shape):
            return torch.randn(shape, device="cuda", generator=generator, dtype=torch.float32).to(s.dtype)

        n = s.batch + s.ones
        self.q = normal(s.batch, s.rows, s.heads, s.hdim) if not s.ones else normal(s.ones + s.batch * s.rows, s.heads, s.hdim)
        store = (-(-s.keys // s.page) * n, s.page) if s.page else (s.batch, s.keys)
        self.k, self.v = normal(*store, s.heads_k, s.hdim), normal(*store, s.heads_k, hdim_v)
        self.options = dict(causal=s.causal, softcap=s.softcap)
        self.table = self.used = None
        if s.page:
            self.table = torch.randperm(store[0], device="cuda", generator=generator).int().view(n, -1)
            self.used = torch.full((n,), s.keys, device="cuda", dtype=torch.int32)
            self.options.update(block_table=self.table, seqlens_k=self.used, max_seqlen_k=s.keys)
        self.starts = torch.tensor([*range(s.ones), *range(s.ones, s.ones + s.batch * s.rows + 1, s.rows)], device="cuda", dtype=torch.int32)
        if s.ones:
            self.used[:] = torch.randint(max(s.keys // 2, s.rows), s.keys + 1, (n,), device="cuda", generator=generator).int()
            self.options.update(cu_seqlens_q=self.starts, max_seqlen_q=s.rows)

    def narrow(self, kind):
        """A cache of 8 bits, and what it stands for."""
        k, v = (coded(x / scale, kind) for x, scale in zip((self.k, self.v), SCALES[kind]))
        return k, v, *(x.to(self.s.dtype) * scale for x, scale in zip((k, v), SCALES[kind]))

    def narrow_by_token(self, kind, powers):
        """The same with factors of keys: codes and factors of K and of V, and what they stand for."""
        found = []
        for x in (self.k, self.v):
            factors = x.float().abs().amax(-1) / MOST[kind]
            if powers:
                factors = 2.0 ** factors.log2().ceil()
            codes = coded(x.float() / factors[..., None], kind)
            found.append((codes, factors.transpose(1, 2).contiguous(), codes.double() * factors[..., None].double()))
        return found

    def off(self, o, k, v):
        """Of the last rows of the first and last head of the last sequence, and of the first."""
        s, off = self.s, Off()
        q, o = (x if s.ones else x.flatten(0, 1) for x in (self.q, o))
        for b in {0, s.ones + s.batch - 1}:
            begin, end = self.starts[b].item(), self.starts[b + 1].item()
            begin, n = max(begin, end - 64), int(self.used[b]) if s.page else s.keys
            kb, vb = (x[self.table[b].long()].flatten(0, 1)[:n] if s.page else x[b] for x in (k, v))
            for head in (0, s.heads - 1):
                rows, h = q[begin:end, head], head // (s.heads // s.heads_k)
                last = (n - len(rows) if s.causal else n) + torch.arange(len(rows), device="cuda")
                seen = torch.arange(n, device="cuda") <= last[:, None]
                off.take(o[begin:end, head], None, rows, kb[:, h].double(), vb[:, h].double(), s, seen)
        return off

    def flop(self):
        s = self.s
        lengths = self.used.tolist() if s.page else [s.keys] * s.batch
        pairs = sum(lengths[:s.ones]) + sum(s.rows * n - (s.rows * (s.rows - 1) // 2 if s.causal else 0) for n in lengths[s.ones:])
        return 2 * s.heads * pairs * (s.hdim + (s.hdim_v or s.hdim))


def flash_attention_3(p):
    attend, s = libraries.find_flash_attention_3(), p.s
    if attend is None:
        return None
    q, k, v = p.q if s.ones else p.q.flatten(0, 1), p.k, p.v
    options = (dict(block_table=p.table, seqused_k=p.used) if s.page
               else dict(cu_seqlens_k=torch.arange(s.batch + 1, device="cuda", dtype=torch.int32) * s.keys))
    if not s.page:
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    return lambda: attend(q=q, k=k, v=v, max_seqlen_q=s.rows, cu_seqlens_q=p.starts, max_seqlen_k=s.keys, causal=s.causal,
                          softcap=s.softcap, fa_version=3, **options)


def measure_by_token(p, kind, notes):
    """(the call, how many were wrong)"""
    failed, options = 0, dict(p.options, descale_block_k=1, **(dict(descale_per_page=True) if p.s.page else {}))
    for powers in (True, False):
        (k, factors_k, wide_k), (v, factors_v, wide_v) = p.narrow_by_token(kind, powers)
        attend = lambda i, k=k, v=v, f=factors_k, g=factors_v: fmha.attention(p.q, k, v, k_descale=f, v_descale=g, **options)  # noqa: E731
        o = attend(0)
        off = p.off(o, wide_k, wide_v)
        same = powers and torch.equal(o, fmha.attention(p.q, wide_k.to(p.s.dtype), wide_v.to(p.s.dtype), **p.options))
        notes.append(f"{kind} by token{', powers of two,' if powers else ''} {off}{', bit for bit' if same else ''}")
        failed += off.is_wrong()
        del wide_k, wide_v
    return attend, failed


def measure(p):
    """{way: us}, and how many were wrong."""
    functions, notes, failed = {"16 bits": lambda i: fmha.attention(p.q, p.k, p.v, **p.options)}, [], 0
    for kind in p.s.kinds:
        factors = {f"{n}_descale": torch.tensor([scale], device="cuda") for n, scale in zip("kv", SCALES[kind])}
        k, v, wide_k, wide_v = p.narrow(kind)
        attend = lambda i, k=k, v=v, factors=factors: fmha.attention(p.q, k, v, **factors, **p.options)  # noqa: E731
        o = attend(0)
        off, same = p.off(o, wide_k, wide_v), torch.equal(o, fmha.attention(p.q, wide_k, wide_v, **p.options))
        notes.append(f"{kind} {off}{', bit for bit' if same else ''}")
        failed += off.is_wrong()
        functions[kind] = attend
        if kind in BY_TOKEN and p.s.dtype == torch.bfloat16:
            functions[f"{kind} by token"], wrong = measure_by_token(p, kind, notes)
            failed += wrong
    peer = flash_attention_3(p)
    if peer:
        functions["FA3"] = lambda i: peer()
    times = compare_graphs(torch, functions, max(1, min(10, int(3e12 / p.flop()))))
    base = times["16 bits"]
    print(f"{p.s}: " + ", ".join(f"{name} {t:.1f} us ({p.flop() / t / 1e6:.0f} TFLOP/s, {base / t:.2f})" for name, t in times.items())
          + "; " + "; ".join(notes), flush=True)
    return times, failed


class Batch:
    """Sequences of few rows and of many over one cache of 8 or 16 bits in pages. Their lengths are drawn anew, in place, for each replay of a graph."""

    def __init__(self, rng):
        self.rng = rng
        self.heads_k = rng.choice((1, 2, 4))
        self.heads = self.heads_k * rng.choice((1, 1, 3, 4, 7, 8))
        self.hdim, self.hdim_v = rng.choice(((64, 64), (128, 128), (128, 128), (96, 96), (192, 128), (256, 256)))
        self.n, self.page = rng.randint(2, 70), rng.choice((16, 16, 64))
        self.most_keys = rng.choice((700, 2048, 5000))
        self.longest = min(rng.choice((70, 130, 300, 600)), self.most_keys)
        self.rows = sum(self.draw_rows())
        self.promised = min(self.longest * rng.choice((1, 1, 2)), self.rows)
        self.dtype = rng.choice((torch.bfloat16, torch.bfloat16, torch.float16))
        kind = rng.choice(("e4m3", "e5m2", "int8", None))
        spread = 1 / SCALES[kind][0] if kind == "int8" else 1
        generator = torch.Generator("cuda").manual_seed(rng.randint(0, 1 << 30))
        pages = -(-self.most_keys // self.page)

        def normal(*shape):
            return torch.randn(shape, device="cuda", generator=generator, dtype=torch.float32)

        self.q = normal(self.rows, self.heads, self.hdim).to(self.dtype)
        self.k, self.v = (normal(pages * self.n, self.page, self.heads_k, d) * spread for d in (self.hdim, self.hdim_v))
        self.k, self.v = (coded(x, kind) if kind else x.to(self.dtype) for x in (self.k, self.v))
        self.table = torch.randperm(pages * self.n, device="cuda", generator=generator).int().view(self.n, -1)
        self.starts = torch.zeros(self.n + 1, device="cuda", dtype=torch.int32)
        self.used = torch.zeros(self.n, device="cuda", dtype=torch.int32)
        self.softcap = rng.choice((0.0, 0.0, 3.0))
        self.options = dict(causal=rng.random() < 0.8, softcap=self.softcap)
        if self.options["causal"] and rng.random() < 0.3:
            self.options["window"] = (rng.choice((40, 300)), 0)
        self.by_token = self.dtype == torch.bfloat16 and kind is not None and rng.random() < 0.4
        of = (pages * self.n, self.heads_k, self.page) if self.by_token else (self.n, self.heads_k)
        self.factors = [(torch.rand(of, device="cuda", generator=generator) + 0.5) / spread if kind else torch.ones(of, device="cuda") for _ in "kv"]
        if kind:
            self.options.update(k_descale=self.factors[0], v_descale=self.factors[1])
        if self.by_token:
            self.options.update(descale_per_page=True, descale_block_k=1)

    def draw_rows(self):
        """One of the longest, a few chunks, else few rows; the next draw has as many of all."""
        rows = [self.longest] + [self.rng.choice((1, 1, 1, 1, 1, 1, 1, 2, 4, 0, self.rng.randint(1, self.longest))) for _ in range(self.n - 1)]
        self.rng.shuffle(rows)
        return rows

    def draw(self):
        rows, left = self.draw_rows(), self.rows
        for i, n in enumerate(rows):
            rows[i] = min(n, left)
            left -= rows[i]
        starts = [sum(rows[:i]) for i in range(self.n + 1)]
        self.starts.copy_(torch.tensor(starts, dtype=torch.int32))
        self.used.copy_(torch.tensor([self.rng.randint(n, self.most_keys) for n in rows], dtype=torch.int32))
        self.drawn = starts, self.used.tolist()

    def attend(self):
        return fmha.attention(self.q, self.k, self.v, cu_seqlens_q=self.starts, max_seqlen_q=self.promised, block_table=self.table,
                              seqlens_k=self.used, max_seqlen_k=self.most_keys, return_lse=True, **self.options)

    def off(self, o, lse):
        """Of some heads of all sequences."""
        off, (starts, used) = Off(), self.drawn
        for b in range(self.n):
            rows, n = slice(starts[b], starts[b + 1]), used[b]
            for head in {0, self.heads - 1}:
                h = head // (self.heads // self.heads_k)
                pages = self.table[b].long()
                k, v = (x[pages].flatten(0, 1)[:n, h].double() * (f[pages, h].flatten()[:n, None] if self.by_token else f[b, h]).double()
                        for x, f in zip((self.k, self.v), self.factors))
                q = self.q[rows, head]
                last = n - len(q) + torch.arange(len(q), device="cuda")[:, None]
                keys = torch.arange(n, device="cuda")
                seen = keys <= last if self.options["causal"] else (keys >= 0).expand(len(q), -1)
                if "window" in self.options:
                    seen = seen & (keys >= last - self.options["window"][0])
                if len(q):
                    off.take(o[rows, head], lse[head, rows], q, k, v, self, seen)
        return off

    def __str__(self):
        options = " ".join(f"{k}={v}" for k, v in self.options.items() if not k.endswith("_descale"))
        return (f"{self.n} sequences, {self.rows} rows, up to {self.longest} (promised {self.promised}), {self.heads}/{self.heads_k} of "
                f"{self.hdim}/{self.hdim_v}, {self.most_keys} keys, pages {self.page}, {self.k.dtype} under {self.dtype}, {options}")


def check_batches(count, seed):
    """Return: how many were wrong."""
    failed = 0
    for case in range(count):
        batch = Batch(random.Random(seed * 1000 + case))
        batch.draw()
        try:
            batch.attend()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                o, lse = batch.attend()
            found = []
            for _ in range(3):
                batch.draw()
                graph.replay()
                found.append(batch.off(o, lse))
            wrong = any(off.is_wrong() for off in found)
        except fmha.FmhaError as error:
            found, wrong = [error], True
        failed += wrong
        if wrong:
            print(f"case {case} of seed {seed}: {batch}: {', '.join(map(str, found))}", flush=True)
    print(f"{count} batches, each thrice: {failed} wrong")
    return failed


# ---- new rows ----

HEADS_K, HDIM, PAGE = 8, 128, 16
SHARE_BAR, TOKEN_BAR = 0.95, 3.0  # of a copy's rate; us


class Append:
    """Rows of bf16 by slots into pages of K and V apart, or of both side by side in one row; kind None: of a cache of bf16."""

    def __init__(self, tokens, kind, shared, rope, apart=False):
        generator = torch.Generator("cuda").manual_seed(tokens)
        pages = tokens if apart else -(-tokens // PAGE)
        self.kind, self.new = kind, [torch.randn(tokens, HEADS_K, HDIM, device="cuda", generator=generator).bfloat16() for _ in range(2)]
        store = torch.zeros(pages, PAGE, HEADS_K, 2 * HDIM, device="cuda", dtype=NARROW[kind] if kind else torch.bfloat16)
        self.cache = store.split(HDIM, -1) if shared else [x.contiguous() for x in store.split(HDIM, -1)]
        order = torch.randperm(pages, device="cuda", generator=generator)
        at = torch.arange(tokens, device="cuda")
        self.slots = order * PAGE + order % PAGE if apart else order[at // PAGE] * PAGE + at % PAGE
        self.options = {}
        if kind:
            self.options.update({f"{n}_descale": torch.tensor([scale], device="cuda") for n, scale in zip("kv", SCALES[kind])})
        if rope:
            angles = at[:, None] / 10000 ** (torch.arange(HDIM // 2, device="cuda")[None] / (HDIM // 2))
            self.options.update(positions=at, rotary_cos=angles.cos(), rotary_sin=angles.sin())
        self.moved = tokens * (2 * HEADS_K * HDIM * (2 + store.element_size()) + 8 + (8 + 2 * HDIM // 2 * 4 if rope else 0))

    def __call__(self, i=0):
        fmha.append_kv(*self.cache, *self.new, slot_mapping=self.slots, **self.options)

    def is_wrong(self):
        """V, and K where it does not turn, are these codes; turned, K's squares add up to what they did."""
        self()
        wrong = False
        for n, x, c in zip("kv", self.new, self.cache):
            got, scale = c.flatten(0, 1)[self.slots], SCALES[self.kind]["kv".index(n)] if self.kind else 1
            if n == "k" and "positions" in self.options:
                norms = [(y.float() ** 2).sum(-1) for y in (got.float() * scale, x)]
                wrong |= not torch.allclose(*norms, rtol=0.1)
            else:
                want = coded(x.float() / scale, self.kind) if self.kind else x
                wrong |= not torch.equal(got.view(torch.uint8), want.view(torch.uint8))
        return wrong


WAYS = ("16 bits", "FA3", *ALL, *(f"{kind} by token" for kind in BY_TOKEN))


def print_table(lines):
    """[(what, unit, {way: a number})]"""
    print("| | unit | " + " | ".join(WAYS) + " |\n|--|--|" + "--:|" * len(WAYS))
    for what, unit, numbers in lines:
        print(f"| {what} | {unit} | " + " | ".join(f"{numbers[way]:.2f}" if way in numbers else "" for way in WAYS) + " |", flush=True)


def kinds_of_append(kinds, *words):
    return {kind or "16 bits": Append(words[0], kind, *words[1:]) for kind in (None, *kinds)}


def measure_append(short, lines):
    """How many were wrong; those below their bars are said."""
    failed, kinds = 0, ALL if short else ("e4m3", "int8")
    cases = [(shared, rope) for shared in (False, True) for rope in (False, True)][:2 if short else 4]
    for mib in (64,) if short else (64, 256):
        tokens = (mib << 20) // (2 * HEADS_K * HDIM * 2)
        source = torch.empty(mib << 20, device="cuda", dtype=torch.uint8)
        target = torch.empty_like(source)
        for shared, rope in cases:
            sides = kinds_of_append(kinds, tokens, shared, rope)
            failed += sum(side.is_wrong() for side in sides.values())
            times = compare_graphs(torch, {"copy": lambda i: target.copy_(source), **sides}, 5)
            rate = 2 * source.numel() / times["copy"]
            shares = {name: side.moved / times[name] / rate for name, side in sides.items()}
            what = f"append {mib} MiB of rows, pages of {PAGE} {'interleaved' if shared else 'NHD'}{', RoPE' if rope else ''}"
            print(f"{what}: copy {times['copy']:.1f} us ({rate / 1e3:.0f} GB/s), " + ", ".join(
                f"{name} {times[name]:.1f} us ({share:.2f}{'' if share >= SHARE_BAR else ', below'})" for name, share in shares.items()), flush=True)
            lines.append((what, "of a copy's rate", shares))
    for shared, rope in cases:
        sides = kinds_of_append(kinds, 128, shared, rope, True)
        failed += sum(side.is_wrong() for side in sides.values())
        times = compare_graphs(torch, {"nothing": lambda i: torch.cuda._sleep(0), **sides}, 100)
        more = {name: t - times["nothing"] for name, t in times.items() if name != "nothing"}
        what = f"append 128 tokens, pages of {PAGE} {'interleaved' if shared else 'NHD'}{', RoPE' if rope else ''}"
        print(f"{what}: nothing {times['nothing']:.2f} us, " + ", ".join(
            f"{name} {us:.2f} us more{'' if us <= TOKEN_BAR else ' (above 3)'}" for name, us in more.items()), flush=True)
        lines.append((what, "us more than nothing", more))
    return failed


def measure_shape(s, before, args, lines):
    """(times, how many were wrong)"""
    try:
        times, wrong = measure(Problem(s))
    except Exception as error:  # noqa: BLE001: the other shapes are measured all the same
        print(f"{s}: {type(error).__name__}: {str(error).splitlines()[0][:200]}", flush=True)
        return None, 1
    base = times["16 bits"]
    lines.append((str(s), "of 16 bits' speed", {name: base / t for name, t in times.items()}))
    if before and s.keys == 65536:
        slopes = {name: t - before[name] for name, t in times.items()}
        slopes = {name: x / slopes["16 bits"] for name, x in slopes.items()}
        print("    a key's time, of 16 bits: " + ", ".join(f"{n} {x:.2f}" for n, x in slopes.items()), flush=True)
        lines.append((f"{s.heads}/{s.heads_k} d{s.hdim}, 16,384 to {s.keys:,} keys", "of 16 bits' time a key", slopes))
    return times, wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--match", default="", help="prefill, chunk, few, mixed, decode or append alone")
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--batches", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.batches:
        return check_batches(args.batches, args.seed) > 0
    failed, lines = 0, []
    for kind, shapes in (SHORT if args.short else SHAPES).items():
        if args.match not in kind:
            continue
        before = None
        for s in shapes:
            times, wrong = measure_shape(s, before, args, lines)
            failed += wrong
            before = times if s.keys == 16384 else None
            torch.cuda.empty_cache()
    if args.match in "append":
        failed += measure_append(args.short, lines)
    print_table(lines)
    print(f"{failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
