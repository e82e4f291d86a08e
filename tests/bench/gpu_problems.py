# SPDX-License-Identifier: MIT
"""What bench_gpu.py measures: the rows of its tables."""
import dataclasses

from model_shapes import LAYERS, TRAINED, VISION

TABLES = ("forward", "backward", "features", "decode", "fp8", "models", "local")


@dataclasses.dataclass
class Extra:
    """A tensor beside Q, K, V and O. fill: a function of torch and the shape."""
    dtype: str
    shape: tuple
    fill: object

    def make(self, torch):
        kind = {"f32": torch.float32, "bf16": torch.bfloat16, "i32": torch.int32}[self.dtype]
        return self.fill(torch, self.shape).to("cuda", kind)


@dataclasses.dataclass
class Row:
    """
    One problem. fields: of the wire's problem, but for tensors. work: FLOP, or bytes of keys and values where
    those decide (decode). libraries: of PyTorch, that can do the same. plain: the row that a feature is compared with.
    general: why a loop that every arch has runs it, where none that is made for the card does.
    """
    table: str
    name: str
    fields: dict
    work: float
    dtype: str = "bf16"
    libraries: tuple = ("cuDNN", "FlashAttention-2")
    extra: dict = dataclasses.field(default_factory=dict)  # role: Extra
    shapes: dict = dataclasses.field(default_factory=dict)  # role: shape, where it is not what fields say
    plain: str = ""
    plot: str = ""  # the line of the plot that it is a point of
    general: str = ""

    def is_causal(self):
        return self.fields.get("mask", "none") != "none" and "window_left" not in self.fields

    def shape(self, role):
        f = self.fields
        if role in self.shapes:
            return self.shapes[role]
        batch = f["batch"]
        rows, keys = (batch, f["seqlen_q"]), (batch, f["seqlen_k"])
        if f.get("page_size"):
            keys = (f["n_pages"], f["page_size"])
        return {"q": (*rows, f["nhead_q"], f["hdim_q"]), "o": (*rows, f["nhead_q"], f["hdim_v"]),
                "k": (*keys, f["nhead_k"], f["hdim_q"]), "v": (*keys, f["nhead_k"], f["hdim_v"]),
                "lse": (batch, f["nhead_q"], f["seqlen_q"])}[role]

    def tensors(self):
        """Of each role its type and shape."""
        found = {role: ("bf16" if role == "o" and self.dtype == "e4m3" else self.dtype, self.shape(role)) for role in "qkvo"}
        if self.fields.get("op") == "backward":
            found["lse"] = ("f32", self.shape("lse"))
            found |= {"d_o": found["o"], "dq": found["q"], "dk": found["k"], "dv": found["v"]}
        return found | {role: (x.dtype, x.shape) for role, x in self.extra.items()}


def problem(batch, heads, heads_k, rows, keys, hdim, hdim_v=0, **more):
    return dict(batch=batch, nhead_q=heads, nhead_k=heads_k, seqlen_q=rows, seqlen_k=keys, hdim_q=hdim,
                hdim_v=hdim_v or hdim, **more)


CAUSAL = dict(mask="bottom_right", window_right=0)
SHAPES = [  # batch, heads, heads of keys, length, head dims
    (4, 16, 16, 2048, 128, 128), (2, 16, 16, 8192, 128, 128), (1, 16, 16, 16384, 128, 128), (1, 32, 8, 8192, 128, 128),
    (4, 32, 32, 4096, 64, 64), (2, 8, 8, 4096, 256, 256), (16, 16, 16, 512, 128, 128)]
MORE_SHAPES = [(4, 16, 16, 4096, 96, 96), (2, 16, 16, 4096, 192, 128)]


def flops(f, causal):
    return f["batch"] * f["nhead_q"] * f["seqlen_q"] * f["seqlen_k"] * 2 * (f["hdim_q"] + f["hdim_v"]) * (0.5 if causal else 1)


def dense(table, shapes, factor, **more):
    for b, hq, hk, n, d, dv in shapes:
        for causal in (False, True):
            f = problem(b, hq, hk, n, n, d, dv, **(CAUSAL if causal else {}), **more)
            name = f"{b}, {hq}/{hk}, {n}, {d if d == dv else f'{d}/{dv}'} {'causal' if causal else 'full'}"
            yield Row(table, name, f, factor * flops(f, causal))


def lengths():
    """For the plot: 16,384 rows in all."""
    for causal in (False, True):
        for n in (512, 1024, 2048, 4096, 8192, 16384):
            f = problem(16384 // n, 16, 16, n, n, 128, **(CAUSAL if causal else {}))
            yield Row("forward", f"{16384 // n}, 16/16, {n}, 128 {'causal' if causal else 'full'}", f, flops(f, causal),
                      plot="causal" if causal else "full")


def forward():
    seen = set()
    for row in [*lengths(), *dense("forward", SHAPES + MORE_SHAPES, 1)]:
        if row.name not in seen:
            seen.add(row.name)
            yield row


def backward():
    yield from dense("backward", SHAPES + MORE_SHAPES[1:], 2.5, op="backward")
    for row in dense("backward", SHAPES[1:2], 2.5, op="backward", deterministic=True):
        row.name += " deterministic"
        row.libraries = ("cuDNN",)
        yield row


def features():
    b, h, n, d = 2, 16, 4096, 128
    half, full = 2 * b * h * n * n * d, 4 * b * h * n * n * d
    plain = dict(libraries=("cuDNN", "FlashAttention-2"))

    def row(name, work, of, hk=h, extra=None, libraries=(), shapes=None, **more):
        return Row("features", name, problem(b, h, hk, n, n, d, **more), work, plain=of, extra=extra or {},
                   libraries=libraries, shapes=shapes or {})

    def floats(*shape):
        return Extra("f32", shape, lambda torch, shape: torch.rand(shape))
    starts = Extra("i32", (b + 1,), lambda torch, shape: torch.arange(*shape) * n)
    packed = {"q": (b * n, h, d), "o": (b * n, h, d), "k": (b * n, h, d), "v": (b * n, h, d)}
    yield row("full", full, "", **plain)
    yield row("causal", half, "", **plain, **CAUSAL)
    yield row("GQA 16/2, causal", half, "causal", hk=2, **plain, **CAUSAL)
    yield row("window of 1024", 4 * b * h * d * (n * 1024 - 1024 * 1023 // 2), "causal", mask="bottom_right",
              window_left=1023, window_right=0)
    yield row("packed sequences, causal", half, "causal", mode="group", total_q=b * n, total_k=b * n, shapes=packed,
              extra={"seqstart_q": starts, "seqstart_k": starts}, **CAUSAL)
    yield row("sink, causal", half, "causal", extra={"sink": floats(h)}, **CAUSAL)
    yield row("ALiBi, causal", half, "causal", extra={"alibi_slopes": floats(b, h)}, **CAUSAL)
    yield row("bias", full, "full", extra={
        "bias": Extra("bf16", (b, h, n, n), lambda torch, shape: torch.randn(shape, device="cuda"))})
    yield row("soft cap, causal", half, "causal", logits_soft_cap=20.0, **CAUSAL)


def ones(batch, heads):
    return Extra("f32", (batch, heads, 1), lambda torch, shape: torch.ones(shape))


def decoded(batch, heads_k, keys, group, hdim=128, rows=1, page=0, new=0, dtype="bf16"):
    f = problem(batch, heads_k * group, heads_k, rows, keys, hdim)
    name = f"{batch} x {heads_k} x {keys}, {hdim}, group {group}"
    row = Row("decode", name, f, 2 * 2 * batch * heads_k * keys * hdim)
    if dtype == "e4m3":
        row.dtype, row.work, row.libraries = dtype, row.work / 2, ()
        row.name += ", e4m3"
        row.extra.update(q_descale=ones(batch, heads_k * group), k_descale=ones(batch, heads_k),
                         v_descale=ones(batch, heads_k))
    if rows > 1:
        f.update(CAUSAL)
        row.name += f", {rows} rows"
        row.libraries = ()  # theirs is anchored at the other corner
    if page:
        pages = batch * keys // page
        f.update(page_size=page, n_pages=pages, max_blocks=keys // page)
        row.extra["block_table"] = Extra("i32", (batch, keys // page), lambda torch, shape: torch.randperm(pages).reshape(shape))
        row.name += f", pages of {page}"
        row.libraries = ()
    if new:
        f.update(seqlen_new=new)
        for role in ("k_new", "v_new"):
            row.extra[role] = Extra("bf16", (batch, new, heads_k, hdim), lambda torch, shape: torch.randn(shape))
        row.extra["seqlen_k_per_batch"] = Extra("i32", (batch,), lambda torch, shape: torch.full(shape, keys - new))
        row.name += f", {new} appended"
        row.libraries = ()
    return row


def decode():
    shapes = [(1, 1, 131072), (1, 8, 8192), (1, 8, 131072), (8, 8, 16384), (64, 8, 4096)]
    for shape in shapes:
        for group in (1, 4, 8):
            yield decoded(*shape, group)
    for hdim in (64, 256):
        yield decoded(8, 8, 16384, 4, hdim)
    for shape in (shapes[1], *shapes[3:]):
        yield decoded(*shape, 4, dtype="e4m3")
        yield decoded(*shape, 4, page=16)
        yield decoded(*shape, 4, page=1)
        yield decoded(*shape, 4, new=1)
        yield decoded(*shape, 8, rows=4)
        yield decoded(*shape, 8, rows=8)


def fp8():
    for b, h, n in ((2, 16, 8192), (1, 16, 16384)):
        for causal in (False, True):
            f = problem(b, h, h, n, n, 128, **(CAUSAL if causal else {}))
            yield Row("fp8", f"{b}, {h}/{h}, {n}, 128 {'causal' if causal else 'full'}", f, flops(f, causal), dtype="e4m3",
                      libraries=(), extra={r: ones(b, h) for r in ("q_descale", "k_descale", "v_descale")})


PREFILL, TRAIN = 8192, 4096  # rows
HOPPER = ("wgmma", "wide")  # loops that are made for it, for many rows


def visible(rows, keys, left, causal):
    """Pairs that a mask leaves."""
    if not causal:
        return rows * keys
    return sum(min(i + 1, left + 1 if left >= 0 else i + 1) for i in range(keys - rows, keys))


def of_layer(layer, rows):
    """The fields of a row of table models, the tensors that it has besides, and the pairs that its mask leaves."""
    heads, heads_k, dims, more = LAYERS[layer]
    hdim, hdim_v = dims if isinstance(dims, tuple) else (dims, dims)
    fields, extra, words = problem(1, heads, heads_k, rows, rows, hdim, hdim_v), {}, iter(more.split())
    for word in words:
        if word == "--causal":
            fields |= CAUSAL
        elif word == "--mask":
            fields["mask"] = next(words)
        elif word == "--window":
            fields["window_left"], fields["window_right"] = map(int, next(words).split(","))
        elif word == "--softcap":
            fields["logits_soft_cap"] = float(next(words))
        elif word == "--dropout":
            fields["dropout_p"] = float(next(words))
        elif word == "--sink":
            extra["sink"] = Extra("f32", (heads,), lambda torch, shape: torch.rand(shape))
        elif word == "--alibi":
            extra["alibi_slopes"] = Extra("f32", (1, heads), lambda torch, shape: torch.rand(shape))
        elif word == "--bias":
            next(words)
            extra["bias"] = Extra("bf16", (1, heads, rows, rows), lambda torch, shape: torch.randn(shape, device="cuda"))
        else:
            raise ValueError(f"{layer}: {word}")
    return fields, extra, visible(rows, rows, fields.get("window_left", -1), "mask" in fields)


def models():
    """Layers of today's models (tests/lib/model_shapes.py): prefill, vision and speech, and what trains."""
    def row(name, fields, pairs, factor=1, **more):
        work = factor * 2 * fields["batch"] * fields["nhead_q"] * pairs * (fields["hdim_q"] + fields["hdim_v"])
        plain = not more.get("extra") and not {"window_left", "logits_soft_cap", "dropout_p"} & fields.keys()
        return Row("models", name, fields, work, libraries=("cuDNN",) if plain else (), **more)
    for layer in LAYERS:
        fields, extra, pairs = of_layer(layer, PREFILL)
        yield row(layer, fields, pairs, extra=extra)
    for name, (heads, hdim, rows, keys) in VISION.items():
        yield row(name, problem(8, heads, heads, rows, keys, hdim), rows * keys, general="which is faster, times tell" if rows < 256 else "")
    for layer, why in TRAINED.items():
        fields, extra, pairs = of_layer(layer, TRAIN)
        yield row(f"{layer}, backward", fields | {"op": "backward"}, pairs, 2.5, extra=extra, general=why or "")


def rows(tables, match):
    return [r for t in tables if t != "local" for r in globals()[t]() if match in r.name]
