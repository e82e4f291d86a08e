# SPDX-License-Identifier: MIT
"""The suite's problems (suite.py), which are arguments of kernels, as problems that plans are made of.

What only a kernel's arguments can say is left out: forced pipelines, sums of dQ in parts, pages that miss a vector's
start. Contents are made anew (local.py): whoever compares two ways of running a problem needs no more.
"""
import math

import numpy as np

import abi
import suite
from backward_cases import Append, Backward
from cases import Forward, Merge

MASKS = ["none", "top_left", "bottom_right"]
ROPES = ["none", "interleaved", "half_rotated"]
LAYOUTS = ["linear", "vectorized"]


NUMPY = {"f32": np.float32, "f16": np.uint16, "bf16": np.uint16, "i32": np.int32, "u8": np.uint8, "e4m3": np.uint8,
         "e5m2": np.uint8, "i8": np.int8}


class Problem:
    """The wire's map without tensors; tensors: role -> (dtype, shape), strides where they are not packed."""

    def __init__(self, name, **options):
        self.name, self.options, self.tensors, self.integers, self.strides = name, options, {}, {}, {}
        self.outputs = set()

    def problem(self):
        tensors = {role: {"dtype": dtype} for role, (dtype, _) in self.tensors.items()}
        for role, strides in self.strides.items():
            tensors[role]["stride"] = strides
        return {**self.options, "tensors": tensors}

    def contents(self, seed=1):
        """What the tensors hold, as stored: the same for the same seed."""
        rng, found = np.random.default_rng(seed), {}
        for role, (dtype, shape) in self.tensors.items():
            x = rng.standard_normal(shape).astype(np.float32)
            if role in self.integers:
                x = self.integers[role]
            elif role in self.outputs and not (role in "kv" and self.options.get("op") != "backward"):
                x = np.full(shape, 3, NUMPY[dtype])  # zeros are results, too
            elif role == "lse":
                x = np.abs(x) + 5
            if x.dtype == np.float32 and dtype == "f16":
                x = x.astype(np.float16).view(np.uint16)
            elif x.dtype == np.float32 and dtype == "bf16":
                x = (x.view(np.uint32) >> 16).astype(np.uint16)
            elif x.dtype == np.float32 and NUMPY[dtype] == np.uint8:
                x = rng.integers(0, 0x60, shape).astype(np.uint8)
            elif x.dtype == np.float32 and dtype == "i8":
                x = rng.integers(-128, 128, shape).astype(np.int8)
            found[role] = np.ascontiguousarray(x)
        return found

    def add(self, role, dtype, shape, strided=False):
        """strided: the rows of heads are 3 elements longer than they have to be."""
        if strided:
            b, s, h, d = shape
            w = d + 3
            self.strides[role] = [s * h * w, h * w, w, 1]
            shape = (b, s, h, w)
        self.tensors[role] = (dtype if isinstance(dtype, str) else abi.DTYPE_NAMES[dtype], tuple(shape))

    def add_output(self, role, dtype, shape, **options):
        self.add(role, dtype, shape, **options)
        self.outputs.add(role)

    def add_integers(self, role, values):
        self.integers[role] = np.array(values, np.int32)
        self.tensors[role] = ("i32", self.integers[role].shape)


def attention(name, o):
    """What forward and backward share. @o: options of Forward or Backward, all of them."""
    lens_q = [g[0] for g in o["group"]] if o["group"] else [o["sq"]] * o["batch"]
    lens_k = [g[1] for g in o["group"]] if o["group"] else [o["sk"]] * o["batch"]
    packed = bool(o["group"]) or o["table"] == "sglang" and o["page"] > 0
    p = Problem(name, batch=len(lens_q), nhead_q=o["hq"], nhead_k=o["hk"], seqlen_q=max(lens_q), seqlen_k=max(lens_k),
                hdim_q=o["dq"], hdim_v=o["dv"], mask=MASKS[o["mask"]], window_left=o["left"], window_right=o["right"],
                sink_tokens=o["sinks"], logits_soft_cap=o["cap"])
    if packed:
        p.options |= {"mode": "group", "total_q": sum(lens_q), "min_seqlen_q": o["min_sq"]}
        p.add_integers("seqstart_q", np.cumsum([0] + lens_q))
    if o["group"] and not o["page"]:
        p.options["total_k"] = sum(lens_k)
        p.add_integers("seqstart_k", np.cumsum([0] + lens_k))
    if o["scale"] is not None:
        p.options["scale"] = o["scale"]
    if o["dropout"]:
        p.options |= {"dropout_p": o["dropout"], "dropout_seed": 0x123456789abcdef, "dropout_offset": 77}
    p.rows = (1, sum(lens_q)) if packed else (len(lens_q), o["sq"])
    p.keys = (1, sum(lens_k)) if o["group"] else (len(lens_k), o["sk"])
    add_features(p, o)
    return p


def add_bias(p, o, role, add):
    """A bias, or its gradient: along an axis over which it is one it steps nowhere."""
    axes = "bh" if o["bias_broadcast"] is True else o["bias_broadcast"] or ""
    full = (p.rows[0], o["hq"], p.rows[1], p.options["seqlen_k"])
    shape = tuple(1 if axis in axes else n for axis, n in zip("bhr", full)) + full[3:]
    add(role, o["bias"], shape)
    if axes:
        p.strides[role] = [math.prod(shape[i + 1:]) if shape[i] == n else 0 for i, n in enumerate(full)]


def add_features(p, o):
    batch, hq, hk = p.options["batch"], o["hq"], o["hk"]
    if o["bias"] is not None:
        add_bias(p, o, "bias", p.add)
    if o["alibi"]:
        p.add("alibi_slopes", abi.F32, (batch, hq))
    if o["sink"]:
        p.add("sink", abi.F32, (hq,))
    if o["randval"]:
        p.add_output("randval", "u8", (p.rows[0], hq, p.rows[1], p.options["seqlen_k"]))
    if o["used_q"]:
        p.add_integers("seqlen_q_per_batch", o["used_q"])
    if o["leftpad"] is not None:
        p.add_integers("leftpad_k", o["leftpad"])
    if o["descale"]:
        block = 16 if o["descale"] == "block" else 0
        p.options |= {"descale_block_q": block, "descale_block_k": block,
                      "descale_per_page": o["descale"] == "page"}
        for role, heads, n in (("q", hq, p.options["seqlen_q"]), ("k", hk, p.options["seqlen_k"]), ("v", hk, p.options["seqlen_k"])):
            p.add(role + "_descale", abi.F32, (batch, heads, math.ceil(n / block) if block else 1))


def add_pages(p, o):
    lens = o["lens_k"] or [o["sk"]] * o["batch"]
    blocks = [max(1, math.ceil(n / o["page"])) for n in lens]
    n_pages = sum(blocks) + 3
    order = np.random.default_rng(o["seed"]).permutation(n_pages)
    p.options |= {"page_size": o["page"], "n_pages": n_pages, "kv_layout": LAYOUTS[o["layout"]]}
    if o["table"] == "block":
        width = math.ceil(max(o["sk"], *lens) / o["page"])
        table = np.zeros((len(lens), width), np.int32)
        for b, n in enumerate(blocks):
            table[b, :n] = order[sum(blocks[:b]):][:n]
        p.options["max_blocks"] = width
        p.add_integers("block_table", table)
        p.add_integers("seqlen_k_per_batch", lens)
    else:
        p.options["n_page_indices"] = sum(blocks)
        p.add_integers("kv_indptr", np.cumsum([0] + blocks))
        p.add_integers("kv_page_indices", order[:sum(blocks)])
        p.add_integers("kv_last_page_len", [n - (m - 1) * o["page"] for n, m in zip(lens, blocks)])
    if o["descale"] == "page":
        for role in ("k_descale", "v_descale"):
            p.add(role, abi.F32, (n_pages, o["hk"], 1))
    for role, d in (("k", o["dq"]), ("v", o["dv"])):
        p.add(role, o["dtype"], (n_pages, o["page"], o["hk"], d))


def forward(name, options):
    o = Forward.OPTIONS | options
    p = attention(name, o)
    o_dtype = o["o_dtype"] if o["o_dtype"] is not None else o["dtype"] if o["dtype"] <= abi.BF16 else abi.BF16
    p.add("q", o["dtype"], (*p.rows, o["hq"], o["dq"]), strided=o["strided"])
    p.add_output("o", o_dtype, (*p.rows, o["hq"], o["dv"]), strided=o["strided"])
    p.add_output("lse", abi.F32, (p.rows[0], o["hq"], p.rows[1]))
    if o["splits"]:
        p.options["n_splits"] = o["splits"]
    if o["page"]:
        add_pages(p, o)
        return p
    keys = p.keys
    if o["cache_idx"]:
        keys = (keys[0] + 2, keys[1])
        p.options["cache_batch"] = keys[0]
        p.add_integers("cache_batch_idx", np.random.default_rng(o["seed"]).permutation(keys[0])[:o["batch"]])
    if o["lens_k"] is not None:
        p.add_integers("seqlen_k_per_batch", o["lens_k"])
    for role, d in (("k", o["dq"]), ("v", o["dv"])):
        p.add(role, o["dtype"], (*keys, o["hk"], d), strided=o["strided"])
    return p


def backward(name, options):
    o = Backward.OPTIONS | options
    p = attention(name, o)
    p.options |= {"op": "backward", "deterministic": True}
    p.outputs.discard("randval")  # it is read
    for role, d in (("q", o["dq"]), ("o", o["dv"]), ("d_o", o["dv"])):
        p.add(role, o["dtype"], (*p.rows, o["hq"], d))
    for role, d in (("k", o["dq"]), ("v", o["dv"])):
        p.add(role, o["dtype"], (*p.keys, o["hk"], d))
        p.add_output("d" + role, o["dtype"], (*p.keys, o["hk"], d))
    p.add_output("dq", o["dtype"], (*p.rows, o["hq"], o["dq"]))
    p.add("lse", abi.F32, (p.rows[0], o["hq"], p.rows[1]))
    if o["lens_k"] is not None:
        p.add_integers("seqlen_k_per_batch", o["lens_k"])
    if o["dbias"]:
        add_bias(p, o, "dbias", p.add_output)
    if o["dsink"]:
        p.add_output("dsink", abi.F32, (o["hq"],))
    return p


def append(name, options):
    o = Append.OPTIONS | options
    p = Problem(name, op="append_kv", batch=o["batch"], nhead_q=o["hq"], nhead_k=o["hk"], seqlen_q=o["sq"], seqlen_k=o["cap"],
                hdim_q=o["dq"], hdim_v=o["dv"], seqlen_new=o["new"], rope=ROPES[o["rope"]], rotary_dim=o["rotary_dim"])
    rng = np.random.default_rng(o["seed"])
    p.add_integers("seqlen_k_per_batch", rng.integers(0, o["cap"] - o["new"] + 1, o["batch"]))
    pages = (o["batch"], o["cap"])
    if o["page"]:
        blocks = math.ceil(o["cap"] / o["page"])
        pages = (o["batch"] * blocks + 2, o["page"])
        p.options |= {"page_size": o["page"], "n_pages": pages[0], "max_blocks": blocks, "kv_layout": LAYOUTS[o["layout"]]}
        p.add_integers("block_table", rng.permutation(pages[0])[:o["batch"] * blocks].reshape(o["batch"], blocks))
    for role, d in (("k", o["dq"]), ("v", o["dv"])):
        p.add_output(role, o["dtype"], (*pages, o["hk"], d))
        p.add(role + "_new", o["dtype"], (o["batch"], o["new"], o["hk"], d))
    if o["rope"]:
        p.options["rotary_max_pos"] = o["cap"]
        p.add("q", o["dtype"], (o["batch"], o["sq"], o["hq"], o["dq"]))
        p.add_output("q_rotated", o["dtype"], (o["batch"], o["sq"], o["hq"], o["dq"]))
        for role in ("rotary_cos", "rotary_sin"):
            p.add(role, o["rotary_dtype"], (o["cap"], o["rotary_dim"] // 2))
    return p


def merge(name, options):
    o = Merge.OPTIONS | options
    b, h, s, d, n = o["batch"], o["hq"], o["sq"], o["dv"], o["parts"]
    p = Problem(name, op="merge_states", batch=b, nhead_q=h, nhead_k=h, seqlen_q=s, hdim_q=d, hdim_v=d, n_parts=n)
    p.add("o_parts", o["dtype"], (n, b, s, h, d))
    p.add("lse_parts", abi.F32, (n, b, h, s))
    if o["sink"]:
        p.add("sink", abi.F32, (h,))
    p.add_output("o", o["o_dtype"], (b, s, h, d))
    p.add_output("lse", abi.F32, (b, h, s))
    return p


MAKERS = {"forward": forward, "backward": backward, "append": append, "merge": merge}


def problems(emulated=False):
    """Of the cases that h200.py runs, or of those of emulators too, those that differ as plans."""
    seen = set()
    for case in [*suite.small(False), *suite.wide(), *(suite.emulated(False) if emulated else [])]:
        if case.kind not in MAKERS or not case.options.keys().isdisjoint(("shift", "slots", "new_dtype")):  # of a kernel alone
            continue
        name = " ".join(f"{k}={v}" for k, v in case.options.items() if k not in ("acc", "poison", "pipeline"))
        p = MAKERS[case.kind](f"{case.kind} {name}", case.options)
        key = repr((p.options, p.tensors, p.strides, {r: x.tolist() for r, x in p.integers.items()}))
        if key not in seen:
            seen.add(key)
            yield p
