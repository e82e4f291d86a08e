# SPDX-License-Identifier: MIT
"""Problems on which the choice of kernels is judged, and the rule by which some are held out.

The rule, written down before anything was measured: problems are drawn from the distributions below by
a generator with a fixed seed; a problem is held out, never measured for the database or shown to the
model, when the first byte of the SHA-256 of its shape's word (daemon/dispatch/shape.c) is odd. Problems
that share a word share its side.
"""
import hashlib
import random

HEADS = [(8, 8), (16, 16), (32, 32), (16, 4), (32, 8), (64, 8), (32, 4), (16, 2), (28, 4), (8, 1)]
WIDTHS = [(64, 64), (64, 64), (96, 96), (128, 128), (128, 128), (128, 128), (192, 128), (256, 256)]


def is_held_out(shape):
    return hashlib.sha256(shape.encode()).digest()[0] % 2 == 1


def length(rng, least, most):
    """Log-uniform; two thirds are multiples of 64."""
    n = int(round(least * (most / least) ** rng.random()))
    return max(least, n // 64 * 64) if rng.random() < 2 / 3 else n


def problem(heads, dtype, roles, **options):
    tensors = {role: {"buffer": i + 1, "dtype": "bf16" if role == "o" and dtype == "e4m3" else dtype} for i, role in enumerate(roles)}
    return {"nhead_q": heads[0], "nhead_k": heads[1], **options, "tensors": tensors}


def causal(rng):
    return {"mask": "bottom_right", "window_right": 0} if rng.random() < 0.5 else {}


def packed(p):
    """The same problem as sequences behind each other."""
    roles = ("seqstart_q", "seqstart_k")
    tensors = p["tensors"] | {role: {"buffer": 12 + i, "dtype": "i32"} for i, role in enumerate(roles)}
    return p | {"mode": "group", "total_q": p["batch"] * p["seqlen_q"], "total_k": p["batch"] * p["seqlen_k"], "tensors": tensors}


def widths(rng):
    hdim_q, hdim_v = rng.choice(WIDTHS)
    return {"hdim_q": hdim_q, "hdim_v": hdim_v}


def forward(rng, dtype, most):
    rows = length(rng, 64, most)
    keys = rows if rng.random() < 0.7 else length(rng, 64, most)
    mask = causal(rng) if keys >= rows else {}
    cap = {"logits_soft_cap": 30.0} if rng.random() < 0.15 else {}
    p = problem(rng.choice(HEADS), dtype, "qkvo", batch=rng.choice([1, 2, 4, 8]), seqlen_q=rows, seqlen_k=keys,
                **widths(rng), **mask, **cap)
    return packed(p) if rng.random() < 0.25 else p


def decode(rng, dtype, most):
    return problem(rng.choice(HEADS), dtype, "qkvo", batch=rng.choice([1, 2, 3, 4, 8, 16, 32, 64]),
                   seqlen_q=rng.choice([1, 1, 1, 2, 4, 8]), seqlen_k=length(rng, 256, 8 * most), **widths(rng))


def paged(rng, dtype, most):
    """Decode, or a chunk of a prompt behind what the cache has."""
    batch, keys = rng.choice([1, 2, 4, 8, 16, 32]), length(rng, 256, 4 * most)
    page = rng.choice([16, 64, 128])
    rows = rng.choice([1, 1, length(rng, 8, 2048)])
    columns = -(-keys // page)
    hdim = rng.choice([64, 128, 128, 256])
    mask = {"mask": "bottom_right", "window_right": 0} if rows > 1 else {}
    p = problem(rng.choice(HEADS), dtype, "qkvo", batch=batch, seqlen_q=min(rows, keys), seqlen_k=keys, hdim_q=hdim,
                hdim_v=hdim, page_size=page, n_pages=batch * columns, max_blocks=columns, **mask)
    p["tensors"]["block_table"] = {"buffer": 10, "dtype": "i32"}
    p["tensors"]["seqlen_k_per_batch"] = {"buffer": 11, "dtype": "i32"}
    return p


def backward(rng, dtype, most):
    rows = length(rng, 64, most)
    p = problem(rng.choice(HEADS), dtype, ["q", "k", "v", "o", "d_o", "dq", "dk", "dv"], op="backward",
                batch=rng.choice([1, 2, 4]), seqlen_q=rows, seqlen_k=rows, **widths(rng), **causal(rng))
    p["tensors"]["lse"] = {"buffer": 9, "dtype": "f32"}
    return packed(p) if rng.random() < 0.15 else p


def work(p):
    """About the operations of a run."""
    pairs = p["batch"] * p["nhead_q"] * p["seqlen_q"] * p["seqlen_k"]
    return pairs * p["hdim_q"] * (10 if p.get("op") else 4) / (2 if "mask" in p else 1)


def bytes_of(p):
    rows = p["batch"] * (p["seqlen_q"] * p["nhead_q"] + p["seqlen_k"] * p["nhead_k"])
    return rows * p["hdim_q"] * 2 * (4 if p.get("op") else 2)


def draw(n, seed=20261122, dtype="bf16", longest=8192, most_work=4e12, most_bytes=600e6):
    """n problems: 45 % forward, 20 % decode, 15 % over pages, 20 % backward, which e4m3 has not."""
    rng = random.Random(seed)
    kinds = [forward] * 9 + [decode] * 4 + [paged] * 3 + [backward] * (0 if dtype == "e4m3" else 4)
    problems = []
    while len(problems) < n:
        p = rng.choice(kinds)(rng, dtype, longest)
        if work(p) <= most_work and bytes_of(p) <= most_bytes:
            problems.append(p)
    return problems


# What a few cores can do in a minute or two.
CPU = {"dtype": "f32", "longest": 1024, "most_work": 2e10, "most_bytes": 100e6}
