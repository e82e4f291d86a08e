# SPDX-License-Identifier: MIT
"""What test_cp.py's ranks compute: attention of shared rows by each schedule, against the whole in one process.

    torchrun --nproc-per-node 2 cp_cases.py OUT [LIST] -- each rank leaves what it found in OUT/RANK.json
"""
from __future__ import annotations

import datetime
import json
import os
import pathlib
import sys

BUILD = pathlib.Path(os.environ.get("FMHA_BUILD", pathlib.Path(__file__).resolve().parents[3] / "build/release"))
sys.path.insert(0, str(BUILD / "client/python"))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import fmha  # noqa: E402
import fmha.torch  # noqa: E402
from fmha.torch import cp  # noqa: E402

DOCUMENTS = (0, 70, 70, 300, 333, 640)


def case(name, *, dtype=torch.float32, batch=2, rows=256, heads=8, kv_heads=2, hdim=32, hdim_v=None, documents=None, make="head_tail",
         kinds=cp.COMM_TYPES, layout="bshd", sink=False, dlse=False, chunks=None, equal=False, **options):
    return dict(name=name, dtype=dtype, batch=batch, rows=rows, heads=heads, kv_heads=kv_heads, hdim=hdim, hdim_v=hdim_v or hdim,
                documents=documents, make=make, kinds=kinds, layout=layout, sink=sink, dlse=dlse, chunks=chunks, equal=equal,
                options=options)


CASES = [
    case("full", make="contiguous"),
    case("causal", causal=True),
    case("causal, contiguous, lengths that ranks do not divide", rows=251, make="contiguous", causal=True, hdim_v=64),
    case("causal, head and tail, lengths that ranks do not divide", rows=203, causal=True, layout="bhsd"),
    case("mqa", kv_heads=1, causal=True, batch=1),
    case("mha, every KV head by itself", kv_heads=8, causal=True, chunks="each", layout="sbhd"),
    case("bfloat16", dtype=torch.bfloat16, hdim=64, causal=True),
    case("float16, soft cap", dtype=torch.float16, hdim=64, causal=True, softcap=5.0),
    case("scale", causal=True, scale=0.5),
    case("window, causal", causal=True, window=(40, 0)),
    case("window, both sides", make="contiguous", window=(33, 50)),
    case("window, to the right", window=(-1, 20), rows=260),
    case("window shorter than a share", rows=512, batch=1, causal=True, window=(3, 0)),
    case("sink", causal=True, sink=True, window=(100, 0)),
    case("lse in the loss", causal=True, sink=True, dlse=True),
    case("dropout", causal=True, dropout_p=0.3, seed=5, rows=768, batch=2, kinds=("all_gather", "p2p", "a2a", "a2a+p2p")),
    case("dropout, gqa, full", make="contiguous", dropout_p=0.2, seed=(7, 640), rows=384),
    case("packed", documents=DOCUMENTS, causal=True),
    case("packed, full", documents=DOCUMENTS, make="contiguous"),
    case("packed, balanced", documents=DOCUMENTS, make="balanced", causal=True, kv_heads=1),
    case("packed, balanced, as many rows each", documents=DOCUMENTS, make="balanced", equal=True, causal=True, dtype=torch.bfloat16),
    case("packed, window, sink", documents=DOCUMENTS, causal=True, window=(50, 0), sink=True, dlse=True),
    case("packed, window, both sides", documents=DOCUMENTS, window=(20, 30), make="head_tail"),
    case("packed, no key travels", documents=tuple(range(0, 641, 40)), causal=True, make="balanced", sink=True, dlse=True),
    case("packed, ranks without rows", documents=(0, 40), causal=True, make="balanced"),
    case("packed, dropout", documents=(0, 384, 768, 960), causal=True, dropout_p=0.25, seed=11, make="balanced"),
]


def whole(c):
    """(inputs, sink, gradients of the loss, what one process gets): of all rows."""
    torch.manual_seed(len(c["name"]))
    rows = c["documents"][-1] if c["documents"] else c["rows"]
    lead = (rows,) if c["documents"] else (c["batch"], rows)
    q, k, v, g = (torch.randn(*lead, heads, hdim).to(c["dtype"]) for heads, hdim in (
        (c["heads"], c["hdim"]), (c["kv_heads"], c["hdim"]), (c["kv_heads"], c["hdim_v"]), (c["heads"], c["hdim_v"])))
    sink = torch.randn(c["heads"]) if c["sink"] else None
    heads_rows = (c["heads"], rows)
    g_lse = torch.randn(heads_rows if c["documents"] else (c["batch"], *heads_rows)) if c["dlse"] else None
    return (q, k, v), sink, (g, g_lse)


def by_one(c, inputs, sink, grads, dtype):
    """O, LSE and gradients of fmha.attention(), which the other tests hold against formulas; in @dtype, or float32."""
    q, k, v = (t.to(dtype) for t in inputs)
    said = dict(c["options"])
    seed = said.pop("seed", None)
    if seed is not None:
        said["seed"], said["offset"] = seed if isinstance(seed, tuple) else (seed, 0)
    if c["documents"]:
        cu = torch.tensor(c["documents"], dtype=torch.int32)
        said |= dict(cu_seqlens_q=cu, cu_seqlens_k=cu)
    o, lse = fmha.attention(q, k, v, sink=sink, return_lse=True, **said)
    found = fmha.attention_backward(grads[0].to(dtype), q, k, v, o, lse, dlse=grads[1], sink=sink, **said)
    return dict(zip(("o", "lse", "dq", "dk", "dv", "dsink"), (o, lse, *found)))


def to_layout(t, layout):
    return t.permute({"bshd": (0, 1, 2, 3), "bhsd": (0, 2, 1, 3), "sbhd": (1, 0, 2, 3)}[layout])


def shared(c, kind, groups, rank, size, inputs, sink, grads):
    """What this rank gets, as the whole has it there."""
    rows = c["documents"] or c["rows"]
    said = {"causal": c["options"].get("causal", False), "window": c["options"].get("window", (-1, -1))}
    shares = cp.balanced(rows, size, equal=c["equal"], **said) if c["make"] == "balanced" else getattr(cp, c["make"])(rows, size)
    packed = bool(c["documents"])
    mine = [shares.take(t, rank) for t in inputs]
    if not packed:
        mine = [to_layout(t, c["layout"]) for t in mine]
    mine = [t.requires_grad_() for t in mine]
    own_sink = None if sink is None else sink.clone().requires_grad_()
    chunks = None if c["chunks"] is None or "a2a" in kind else c["kv_heads"]
    o, lse = cp.attention(*mine, group=groups if "+" in kind else None, cp_comm_type=kind, shares=shares, sink=own_sink,
                          return_lse=True, layout=c["layout"], chunks=chunks, **c["options"])
    g = shares.take(grads[0], rank)
    outputs, weights = [o], [g if packed else to_layout(g, c["layout"])]
    if grads[1] is not None:
        outputs.append(lse)
        weights.append(shares.take(grads[1], rank, grads[1].dim() - 1))
    found = torch.autograd.grad(outputs, mine + ([own_sink] if sink is not None else []), weights)
    back = (lambda t: t) if packed else lambda t: to_layout(t, c["layout"])  # each of the three is its own inverse
    got = {"o": back(o.detach()), "lse": lse.detach(), "dq": back(found[0]), "dk": back(found[1]), "dv": back(found[2])}
    if sink is not None:
        total = found[3].clone()
        dist.all_reduce(total)
        got["dsink"] = total
    return shares, got


def compare(c, shares, rank, got, want, plain):
    """Largest error of each output against float32 from the same inputs, and what is allowed: twice what one process has, and a floor."""
    errors = {}
    for name, g in got.items():
        w, p = want[name], plain[name]
        if name == "lse":
            w, p = (shares.take(t, rank, t.dim() - 1) for t in (w, p))
        elif name != "dsink":
            w, p = (shares.take(t, rank) for t in (w, p))
        assert g.shape == w.shape, (name, g.shape, w.shape)
        seen = torch.isfinite(w)
        assert torch.equal(torch.isfinite(g), seen), f"{name}: not finite elsewhere"
        largest = float(w[seen].abs().max()) if seen.any() else 0.0
        error = float((g.float() - w.float())[seen].abs().max()) if seen.any() else 0.0
        own = float((p.float() - w.float())[seen].abs().max()) if seen.any() else 0.0
        floor = {torch.float32: 2e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}[c["dtype"]]
        errors[name] = (error, 2 * own + floor * max(1.0, largest))
    return errors


def main():
    out, wanted = pathlib.Path(sys.argv[1]), sys.argv[2:]
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = cp.two_level(2) if size == 4 else None
    found = []
    for c in CASES:
        if wanted and c["name"] not in wanted:
            continue
        inputs, sink, grads = whole(c)
        want, plain = by_one(c, inputs, sink, grads, torch.float32), by_one(c, inputs, sink, grads, c["dtype"])
        for kind in c["kinds"]:
            if ("+" in kind and groups is None) or (kind == "a2a" and c["heads"] % size):
                continue
            if kind == "a2a" and max(c["kv_heads"], size) % min(c["kv_heads"], size):
                continue
            shares, got = shared(c, kind, groups, rank, size, inputs, sink, grads)
            errors = compare(c, shares, rank, got, want, plain)
            found.append({"case": c["name"], "kind": kind, "errors": errors})
    (out / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
