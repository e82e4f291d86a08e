# SPDX-License-Identifier: MIT
"""Problems as a client poses them, with the results that they must have: numpy in float64."""
import os
import sys

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(os.path.dirname(HERE), "lib"), os.path.join(os.path.dirname(HERE), "oracle")]
import attention  # noqa: E402

UNITS = {"f32": 1e-5, "f16": 2**-9, "bf16": 2**-6}  # of the largest result; see backward_cases.py
MASKS = {"none": 0, "top_left": 1, "bottom_right": 2}


def encode(x, dtype):
    """Stored bits, to nearest even."""
    x = np.ascontiguousarray(x, np.float32)
    if dtype != "bf16":
        return x.astype({"f32": np.float32, "f16": np.float16}[dtype])
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def decode(x, dtype):
    return (x.astype(np.uint32) << 16).view(np.float32) if dtype == "bf16" else x.astype(np.float32)


class Problem:
    """fields: of the wire's problem; inputs: {role: (dtype, bits)}; want: {role: (dtype, float64)}."""

    def __init__(self, name, fields, dtype, rng, page=0, backward=False):
        self.name, self.dtype = name, dtype
        self.fields = {"op": "backward" if backward else "forward", **fields}
        f = self.fields
        shape = {
            "q": (f["batch"], f["seqlen_q"], f["nhead_q"], f["hdim_q"]),
            "k": (f["batch"], f["seqlen_k"], f["nhead_k"], f["hdim_q"]),
            "v": (f["batch"], f["seqlen_k"], f["nhead_k"], f["hdim_v"]),
            "d_o": (f["batch"], f["seqlen_q"], f["nhead_q"], f["hdim_v"]),
        }
        bits = {r: encode(rng.standard_normal(shape[r]), dtype) for r in ("q", "k", "v", "d_o")}
        value = {r: decode(x, dtype).astype(float) for r, x in bits.items()}
        self.inputs = {r: (dtype, bits[r]) for r in ("q", "k", "v")}
        heads = [[self.head(value, b, h) for h in range(f["nhead_q"])] for b in range(f["batch"])]
        o = np.stack([np.stack([h.o for h in row], 1) for row in heads])
        lse = np.array([[h.lse for h in row] for row in heads])
        if backward:
            stored = encode(o, dtype)
            self.inputs.update(d_o=(dtype, bits["d_o"]), o=(dtype, stored),
                               lse=("f32", lse.astype(np.float32)))
            self.want = self.gradients(heads, value["d_o"], decode(stored, dtype).astype(float), shape)
        else:
            self.want = {"o": (dtype, o), "lse": ("f32", lse)}
        if page:
            self.put_into_pages(page, rng)

    def head(self, value, b, h):
        f = self.fields
        group = f["nhead_q"] // f["nhead_k"]
        seen = attention.visible(f["seqlen_q"], f["seqlen_k"], MASKS[f.get("mask", "none")],
                                 f.get("window_left", -1), f.get("window_right", -1), 0)
        return attention.Head(value["q"][b, :, h], value["k"][b, :, h // group],
                              value["v"][b, :, h // group], f["hdim_q"] ** -0.5,
                              f.get("logits_soft_cap", 0.0), seen=seen)

    def gradients(self, heads, d_o, o, shape):
        want = {"d" + r: np.zeros(shape[r]) for r in ("q", "k", "v")}
        group = self.fields["nhead_q"] // self.fields["nhead_k"]
        for b, row in enumerate(heads):
            for h, head in enumerate(row):
                dq, dk, dv, _, _ = head.backward(d_o[b, :, h], o[b, :, h])
                want["dq"][b, :, h] = dq
                want["dk"][b, :, h // group] += dk
                want["dv"][b, :, h // group] += dv
        return {r: (self.dtype, x) for r, x in want.items()}

    def put_into_pages(self, page, rng):
        batch, n_k = self.fields["batch"], self.fields["seqlen_k"]
        blocks = -(-n_k // page)
        order = rng.permutation(batch * blocks + 2)
        table = order[: batch * blocks].reshape(batch, blocks)
        self.fields.update(page_size=page, n_pages=len(order), max_blocks=blocks)
        for role in ("k", "v"):
            dtype, old = self.inputs[role]
            new = np.zeros((len(order), page) + old.shape[2:], old.dtype)
            for b in range(batch):
                for i in range(n_k):
                    new[table[b, i // page], i % page] = old[b, i]
            self.inputs[role] = (dtype, new)
        self.inputs["block_table"] = ("i32", table.astype(np.int32))
        self.inputs["seqlen_k_per_batch"] = ("i32", np.full(batch, n_k, np.int32))

    def layout(self):
        """({role: (offset, dtype, shape)}, bytes) of one buffer that holds everything."""
        places, size = {}, 0
        sizes = {"f32": 4, "i32": 4, "f16": 2, "bf16": 2}
        for role, (dtype, x) in {**self.inputs, **self.want}.items():
            places[role] = (size, dtype, x.shape)
            size += -(-x.size * sizes[dtype] // 256) * 256
        return places, size

    def image(self):
        """The buffer's content before a run: outputs are poisoned."""
        places, size = self.layout()
        image = np.full(size, 0xFF, np.uint8)
        for role, (_, x) in self.inputs.items():
            raw = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
            image[places[role][0] : places[role][0] + raw.size] = raw
        return image

    def posed(self, buffer):
        """The problem for a plan, its tensors in the buffer of that id."""
        places, _ = self.layout()
        return {**self.fields, "tensors": {role: {"buffer": buffer, "offset": at, "dtype": dtype}
                                           for role, (at, dtype, _) in places.items()}}

    def wrong(self, image):
        """What is wrong with the outputs, or None."""
        places, _ = self.layout()
        for role, (dtype, want) in self.want.items():
            kind = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}[dtype]
            at = places[role][0]
            got = decode(image[at : at + want.size * np.dtype(kind).itemsize].view(kind), dtype)
            with np.errstate(invalid="ignore"):
                error = np.abs(got.reshape(want.shape) - want)[np.isfinite(want)].max(initial=0)
            bar = 2e-3 if role == "lse" else UNITS[self.dtype] * max(1, np.abs(want).max(initial=0))
            if not error <= bar:
                return f"{self.name}: {role} is off by {error:.3g}, {bar:.3g} is allowed"
        return None


def copies(rng):
    """For the stub, whose kernel copies q to o: one problem."""
    fields = {"batch": 1, "nhead_q": 2, "nhead_k": 2, "seqlen_q": 64, "seqlen_k": 64, "hdim_q": 64,
              "hdim_v": 64}
    p = Problem("stub", fields, "f32", rng)
    p.want = {"o": ("f32", p.inputs["q"][1].astype(float))}
    return [p]


def pool(seed=1):
    """Every family that clients reach, small enough that a run is all overhead."""
    rng, made = np.random.default_rng(seed), []

    def add(name, dtype, batch, rows, keys, heads, heads_k, hdim, causal=False, page=0, backward=False,
            **fields):
        if causal:
            fields.update(mask="bottom_right", window_right=0)
        sizes = dict(batch=batch, seqlen_q=rows, seqlen_k=keys, nhead_q=heads, nhead_k=heads_k,
                     hdim_q=hdim, hdim_v=hdim)
        made.append(Problem(f"{name} {dtype} {batch}x{rows}x{keys} {heads}/{heads_k} d{hdim}",
                            {**sizes, **fields}, dtype, rng, page, backward))

    add("forward", "bf16", 2, 100, 300, 8, 2, 128, causal=True)
    add("forward", "bf16", 1, 200, 200, 4, 4, 64, causal=True)
    add("forward", "f16", 2, 128, 128, 4, 2, 64)
    add("forward", "f16", 1, 77, 77, 3, 3, 96, causal=True)
    add("forward", "f32", 2, 65, 127, 4, 2, 40, causal=True)
    add("forward", "bf16", 1, 130, 190, 2, 2, 256)
    add("window", "bf16", 2, 150, 150, 4, 2, 64, mask="bottom_right", window_left=40, window_right=3)
    add("soft cap", "f16", 1, 90, 110, 4, 4, 128, logits_soft_cap=20.0)
    add("decode", "bf16", 4, 1, 1000, 8, 2, 128)
    add("split", "bf16", 2, 1, 900, 8, 2, 128, n_splits=4)
    add("split", "f16", 1, 3, 700, 4, 1, 64, n_splits=3)
    add("paged", "bf16", 3, 1, 200, 8, 2, 128, page=16)
    add("paged", "f16", 2, 70, 150, 4, 2, 64, page=32, causal=True)
    add("backward", "bf16", 1, 100, 130, 4, 2, 64, causal=True, backward=True)
    add("backward", "f16", 2, 70, 70, 2, 2, 128, backward=True)
    return made
