# SPDX-License-Identifier: MIT
"""The shape matrices of specs/shapes/, for tests in Python: load("smoke") is a list of dicts."""
import itertools
import json
import pathlib

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "specs/shapes"

DEFAULTS = dict(
    op="forward", data_type="fp16", mode="batch", batch=1, nhead_q=1, nhead_k=0, seqlen_q=1, seqlen_k=0, hdim_q=128,
    hdim_v=0, lengths="equal", mask="no", window_left=-1, window_right=-1, sink_tokens=0, sink=0, bias="no", lse=0,
    dropout_percent=0, soft_cap=0, descale="no", page_size=0, kv_layout="linear", kv_lookup="block_table", n_splits=1,
    seqlen_new=0, rope="none", rotary_dim=0, deterministic=0, n_parts=0,
)


def expand_group(group, named):
    axes = []
    for member in group.get("for", []):
        for key, values in (named[member] if isinstance(member, str) else member).items():
            fields = key.split(",")
            axes.append([dict(zip(fields, v if len(fields) > 1 else [v])) for v in values])
    limits = group.get("limits", {})
    for choice in itertools.product(*axes):
        shape = dict(DEFAULTS, group=group["name"])
        shape.update(group.get("set", {}))
        for part in choice:
            shape.update(part)
        for field, other in (("nhead_k", "nhead_q"), ("seqlen_k", "seqlen_q"), ("hdim_v", "hdim_q")):
            shape[field] = shape[field] or shape[other]
        rows = shape["batch"] * shape["nhead_q"] * shape["seqlen_q"]
        keys = shape["batch"] * shape["nhead_k"] * shape["seqlen_k"]
        if rows * shape["seqlen_k"] * shape["hdim_q"] > limits.get("work", float("inf")):
            continue
        if (rows + keys) * (shape["hdim_q"] + shape["hdim_v"]) > limits.get("elements", float("inf")):
            continue
        yield shape


def load(tier):
    document = json.loads((FOLDER / f"{tier}.json").read_text())
    shapes = [shape for included in document.get("includes", []) for shape in load(included)]
    for group in document["groups"]:
        shapes += expand_group(group, document.get("axes", {}))
    return shapes
