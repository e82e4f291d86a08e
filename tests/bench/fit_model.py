#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Fits the model of a device's times (daemon/dispatch/predict.h) to measured ones.

    tests/bench/fit_model.py MEASURED.json... --units 132 --out specs/models/sm_90a.json

A developer's tool. MEASURED.json is what tests/bench/selection.py has measured; only problems on the
fitting side of its rule (selection_shapes.is_held_out) are looked at, and none of a fresh draw. The target is log2 of microseconds
over the cost formula, so that the trees have to know only where the formula is wrong; problems weigh
alike however many candidates they have, and candidates near the best more than those that are far too
slow, since only their order matters. Backward, paged, decode and other forward problems are fitted each
by themselves: together, those with many candidates take the leaves. Needs numpy and LightGBM (pip).
"""
import argparse
import json
import math
import pathlib
import sys

import numpy

import selection
import selection_shapes


def rows_of(document, fmhactl, units):
    """Features, targets, weights, and the problem of each row, of what is not held out."""
    features, targets, weights, groups = [], [], [], []
    for group, entry in enumerate(document["problems"]):
        if selection_shapes.is_held_out(entry["shape"]) or entry.get("fresh"):
            continue
        offline = selection.offline_candidates(fmhactl, document["arch"], units, entry)
        times = {name: math.sqrt(us * entry["second"][name]) for name, us in entry["times"].items()
                 if name in entry["second"]}
        best = min(times.values())
        for name, us in times.items():
            if name not in offline:
                continue
            values, cost = offline[name]
            features.append(values)
            targets.append(math.log2(us / cost))
            weights.append((best / us) ** 2)
            groups.append(group)
    counts = numpy.bincount(groups, weights)
    weights = numpy.array(weights) / counts[groups]
    weights *= len(weights) / weights.sum()
    return numpy.array(features), numpy.array(targets), weights


def flatten(node, nodes):
    """A LightGBM tree as [feature, threshold, left, right, value] rows, parents first."""
    at = len(nodes)
    nodes.append(None)
    if "leaf_value" in node:
        nodes[at] = [-1, 0, 0, 0, round(node["leaf_value"], 6)]
        return at
    left = flatten(node["left_child"], nodes)
    right = flatten(node["right_child"], nodes)
    threshold = float(str(numpy.float32(node["threshold"])))  # as read: of its digits no more than a float has
    nodes[at] = [node["split_feature"], threshold, left, right, 0]
    return at


# What tells kinds of problems apart, asked in turn: those above the threshold are one, and the last is
# what is left: backward (enum abi_family), paged, more queries than decode has. Drawn are up to 8, and from 64 on.
QUESTIONS = [("family", 5.5), ("page", -0.5), ("queries", 4.5)]


def kinds_of(features, x):
    """For each row the kind of its problem: a number up to len(QUESTIONS)."""
    kinds = numpy.full(len(x), len(QUESTIONS))
    for i, (name, threshold) in reversed(list(enumerate(QUESTIONS))):
        kinds[x[:, features.index(name)] > threshold] = i
    return kinds


def join(features, trees):
    """One tree of those of each kind, in the form of flatten()."""
    nodes = list(trees[-1])
    for (name, threshold), tree in reversed(list(zip(QUESTIONS, trees))):
        root = [features.index(name), threshold, 1, 1 + len(nodes), 0]
        nodes = [root, *moved(nodes, 1), *moved(tree, 1 + len(nodes))]
    return nodes


def moved(nodes, by):
    return [[feature, value, left + by, right + by, leaf] if feature >= 0 else [feature, value, left, right, leaf]
            for feature, value, left, right, leaf in nodes]


def seen(features, x):
    """How many features a model has: without the traits at the end that no problem had, so that it says nothing of those that have them."""
    n = len(features)
    while features[n - 1].startswith("trait_") and not x[:, n - 1].any():
        n -= 1
    return n


KINDS = ["family", "element", "mode"]
RANGES = ["hdim", "group", "page"]


def known(features, rows):
    """What problems there were: see daemon/dispatch/include/dispatch/model.h."""
    columns = {name: sorted({float(row[features.index(name)]) for row in rows}) for name in KINDS + RANGES}
    return {"kinds": {name: columns[name] for name in KINDS},
            "ranges": {name: [columns[name][0], columns[name][-1]] for name in RANGES}}


def model_text(arch, measured, features, rows, trees):
    return json.dumps({"format": "fmhad-model", "version": 2, "arch": arch, "measured": measured, "features": features,
                       **known(features, rows), "base": 0, "trees": trees}, separators=(",", ":")) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("measured", type=pathlib.Path, nargs="+")
    parser.add_argument("--units", type=int, required=True)
    parser.add_argument("--trees", type=int, default=200)
    parser.add_argument("--leaves", type=int, default=31)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--release", type=pathlib.Path, default=selection.ROOT / "build/release-files",
                        help="folder for the file of what it was fitted to")
    options = parser.parse_args()
    import lightgbm  # pylint: disable=import-outside-toplevel

    document = selection.read_measured(options.measured)
    fmhactl = selection.find_fmhactl()
    x, y, w = rows_of(document, fmhactl, options.units)
    parameters = {"objective": "regression", "learning_rate": 0.06, "num_leaves": options.leaves,
                  "min_data_in_leaf": 20, "feature_fraction": 0.7, "bagging_fraction": 0.8,
                  "bagging_freq": 1, "lambda_l2": 1.0, "seed": 1, "deterministic": True,
                  "num_threads": 1, "verbose": -1}
    features = selection.feature_names(fmhactl, document["arch"])
    n = seen(features, x)
    features, x = features[:n], x[:, :n]
    kinds, error, trees = kinds_of(features, x), numpy.zeros(len(y)), []
    for kind in range(len(QUESTIONS) + 1):
        of = kinds == kind
        booster = lightgbm.train(parameters, lightgbm.Dataset(x[of], y[of], weight=w[of] / w[of].mean()),
                                 num_boost_round=options.trees)
        error[of] = booster.predict(x[of]) - y[of]
        trees.append([])
        for tree in booster.dump_model()["tree_info"]:
            nodes = []
            flatten(tree["tree_structure"], nodes)
            trees[-1].append(nodes)
    joined = [join(features, together) for together in zip(*trees)]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(model_text(document["arch"], selection.release(options.measured, options.release), features, x, joined))
    print(f"{len(y)} times, {len(joined)} trees, residual {numpy.sqrt((error ** 2).mean()):.3f} "
          f"of {y.std():.3f} (log2)", file=sys.stderr)


if __name__ == "__main__":
    main()
