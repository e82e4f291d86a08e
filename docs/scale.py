#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The curves of scale.md: TFLOP/s a rank by schedule, computed by client/python/fmha/torch/cp/model.py; nothing here was measured.

    docs/scale.py --check | --update      scale.md's table and scale.svg
"""
import argparse
import dataclasses
import importlib.util
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
BEGIN, END = "<!-- computed by docs/scale.py -->\n", "<!-- end of what was computed -->\n"
RANKS = [8 << i for i in range(10)]
KINDS = ("all_gather", "a2a", "p2p", "a2a+all_gather", "a2a+p2p")
COLOURS = ("#1b6ca8", "#c4452f", "#7a7a7a", "#2f8f4e", "#8a4fa3")


def load_model():
    """By its file: the package around it wants torch."""
    spec = importlib.util.spec_from_file_location("model", HERE.parent / "client/python/fmha/torch/cp/model.py")
    model = importlib.util.module_from_spec(spec)
    sys.modules["model"] = model
    spec.loader.exec_module(model)
    return model


def jobs(model):
    return [("one sequence of 1,048,576 rows", lambda n: model.Job(1 << 20)),
            ("16,384 rows a rank, one sequence", lambda n: model.Job(16384 * n)),
            ("16,384 rows a rank in documents of 131,072", lambda n: model.Job(16384 * n, document=131072)),
            ("16,384 rows a rank in documents of 2,048", lambda n: model.Job(16384 * n, document=2048))]


def rates(model, job_of):
    """kind -> TFLOP/s a rank for each of RANKS, None where it cannot be; and the fastest choice of each."""
    found, best = {k: [] for k in KINDS}, []
    for n in RANKS:
        machine, job = dataclasses.replace(model.H200, ranks_a_host=8), job_of(n)
        choices = model.choices(machine, job, n)
        for kind in KINDS:
            rate = max((c.rate(job, n) for c in choices if c.kind == kind), default=None)
            found[kind].append(rate)
        best.append(choices[0])
    return found, best


def text_of(model):
    lines = []
    for title, job_of in jobs(model):
        found, best = rates(model, job_of)
        lines += [f"{title[0].upper() + title[1:]}:", "", "| ranks | " + " | ".join(f"`{k}`" for k in KINDS) + " | fastest |",
                  "|--:|" + "--:|" * len(KINDS) + "--|"]
        for i, n in enumerate(RANKS):
            cells = [f"{found[k][i]:.0f}" if found[k][i] is not None else "" for k in KINDS]
            c = best[i]
            lines.append(f"| {n:,} | " + " | ".join(cells) + f" | `{c.kind}`{f', heads over {c.inner}' if c.inner > 1 else ''} |")
        lines.append("")
    return "\n".join(lines)


def svg_of(model):
    """The first two of jobs(), side by side."""
    width, height, left, top, most = 330, 220, 44, 30, 700
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * (width + left) + 20}" height="{height + top + 60}" '
           'font-family="sans-serif" font-size="11">', '<rect width="100%" height="100%" fill="white"/>']
    for panel, (title, job_of) in enumerate(jobs(model)[:2]):
        x0 = left + panel * (width + left)
        found, _ = rates(model, job_of)
        out.append(f'<text x="{x0}" y="18">TFLOP/s a rank: {title}</text>')
        for rate in range(0, most + 1, 100):
            y = top + height * (1 - rate / most)
            out.append(f'<path d="M{x0} {y:.1f}h{width - 20}" stroke="#ddd"/><text x="{x0 - 6}" y="{y + 4:.1f}" text-anchor="end">{rate}</text>')
        for i, n in enumerate(RANKS):
            out.append(f'<text x="{x0 + i * (width - 20) / 9:.1f}" y="{top + height + 16}" text-anchor="middle">{n}</text>')
        for kind, colour in zip(KINDS, COLOURS):
            points = " ".join(f"{x0 + i * (width - 20) / 9:.1f},{top + height * (1 - r / most):.1f}" for i, r in enumerate(found[kind]) if r)
            out.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
    for i, (kind, colour) in enumerate(zip(KINDS, COLOURS)):
        x = left + i * 130
        out.append(f'<path d="M{x} {top + height + 38}h20" stroke="{colour}" stroke-width="2"/>'
                   f'<text x="{x + 26}" y="{top + height + 42}">{kind}</text>')
    return "\n".join(out) + "\n</svg>\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", action="store_true")
    what.add_argument("--update", action="store_true")
    o = parser.parse_args()
    model, page, picture = load_model(), HERE / "scale.md", HERE / "scale.svg"
    old = page.read_text()
    new = old[: old.index(BEGIN) + len(BEGIN)] + text_of(model) + old[old.index(END):]
    svg = svg_of(model)
    if o.update:
        page.write_text(new)
        picture.write_text(svg)
    elif new != old or not picture.exists() or picture.read_text() != svg:
        print("scale.md or scale.svg is not what the model computes: docs/scale.py --update", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
