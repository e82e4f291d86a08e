#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Tables, CSV and plot of what bench_gpu.py measured.

    tests/bench/gpu_report.py gpu.json... [--out FOLDER] [--pages]

Of several files later lines replace earlier ones of the same name. --pages: writes tables and plot into docs/speed.md, and
README's few figures.
"""
import argparse
import csv
import json
import os
import re

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
COLOURS = {"fmhad": "#0b6e4f", "cuDNN": "#c1440e", "FlashAttention-2": "#3d5a98", "FlashAttention-3": "#8a4fbf", "FlashAttention-4": "#b58900"}
SIDES = tuple(COLOURS)
LOOP = re.compile(r"^(?:fwd|bwd_dq)\S*-gpu_(?!combine|append)(\w+)-t(\d+x\d+)")
START_US = 4  # that decode may take beside 0.95 of the copy bandwidth
TITLES = {
    "forward": "Forward, bf16, TFLOP/s (batch, heads of Q / of K, length, head dim)",
    "backward": "Backward, bf16, TFLOP/s",
    "features": "Features, bf16: batch 2, 16 heads, 4,096, 128; TFLOP/s, and share of the plain rate",
    "decode": "Decode, bf16 but where it says e4m3 (batch x KV heads x keys, head dim): us, all stages with their events, and by "
              f"what keys and values take at 0.95 of the copy's rate and {START_US} us. Page tables and lengths are uploaded when "
              "they change; here they do not",
    "fp8": "fp8 (e4m3), forward, TFLOP/s",
    "models": "Layers of today's models, bf16, TFLOP/s, and the loop that ran once its code had been seen, with its tile: 8,192 rows of "
              "prefill, pictures and sound in batches of 8, and gradients of 4,096 rows",
    "local": "Launched by the client (fmha_local.h), us, beside the driver's own call of the same function or the same launches "
             "without a graph; medians",
    "served": "Run by the worker, us: what the client waits for on top of the kernel, and the time that its processor is busy",
}
COLUMNS = {  # of us, where the sides are others
    "local": ("local", "other"),
    "served": ("kernel", "on top", "9 of 10", "busy"),
}


def driver_version():
    try:
        with open("/proc/driver/nvidia/version", encoding="ascii", errors="replace") as file:
            return re.search(r"\d+\.\d+(\.\d+)?", file.readline()).group()
    except (OSError, AttributeError):
        return "unknown"


def rate(line, side):
    """TFLOP/s, or for decode microseconds; None: not measured."""
    us = line.get("us", {}).get(side)
    return us and (us if line["table"] == "decode" else line["work"] / us / 1e6)


def share(line, result):
    """Of the best library; features: of the plain rate; decode: of the time that it may take."""
    if line["table"] == "local" and "us" in line:
        return line["us"]["local"] / line["us"]["other"]
    ours = rate(line, "fmhad")
    if not ours:
        return None
    if line["table"] == "decode":
        return ours / (line["work"] / (0.95 * result["copy"]) * 1e6 + START_US)
    if line["table"] == "features":
        plain = next((x for x in result["lines"] if x["table"] == "features" and x["name"] == line["plain"]), None)
        return ours / rate(plain, "fmhad") if plain and rate(plain, "fmhad") else None
    best = max((rate(line, side) or 0 for side in SIDES[1:]), default=0)
    return ours / best if best else None


def columns_of(table, result):
    """Those that have numbers."""
    lines = [x for x in result["lines"] if x["table"] == table]
    return COLUMNS.get(table) or [side for side in SIDES if side == "fmhad" or any(side in x.get("us", {}) for x in lines)]


def loop_of(line):
    """What ran of a row's kernels takes its time, and its tile: "wgmma 128x128"."""
    names = [LOOP.search(kernel) for kernel in line.get("kernels", [])]
    return next((" ".join(name.groups()) for name in names if name), "")


def cells(line, result, columns):
    if "error" in line:
        return [line["name"], line["error"], *[""] * len(columns)]
    if line["table"] == "models":
        return [f"{line['name']}: {loop_of(line)}", *(f"{rate(line, side):.0f}" if rate(line, side) else "" for side in columns),
                f"{share(line, result):.2f}" if share(line, result) else ""]
    part = share(line, result)
    if line["table"] in COLUMNS:
        return [line["name"], *(f"{line['us'][x]:.2f}" for x in columns), f"{part:.3f}" if part else ""]
    return [line["name"], *(f"{rate(line, side):.{1 if line['table'] == 'decode' else 0}f}" if rate(line, side) else ""
                            for side in columns), f"{part:.2f}" if part else ""]


def text_of(line, result):
    name, *numbers = cells(line, result, COLUMNS.get(line["table"], SIDES))
    notes = [f"{k}: {v:.1e}" if isinstance(v, float) else f"{k}: {v}" for k, v in line.items() if k.startswith(("differs", "no "))]
    return f"{line['table']:9} {name:42} " + " ".join(f"{x:>8}" for x in numbers) + "  " + "; ".join(notes)


LAST_COLUMN = {"features": "of plain", "decode": "of allowed", "local": "local / other", "served": ""}


def tables(result):
    """Markdown."""
    text = [f"{result['card']}, driver {result['driver']}, PyTorch {result['torch']}, {result['date']}; a large copy "
            f"moves {result['copy'] / 1e12:.2f} TB/s."]
    for table, title in TITLES.items():
        lines = [x for x in result["lines"] if x["table"] == table]
        if not lines:
            continue
        columns = columns_of(table, result)
        text += ["", f"{title}:", "", f"| | {' | '.join(columns)} | {LAST_COLUMN.get(table, 'of the best')} |",
                 "|--|" + "--:|" * (len(columns) + 1)]
        text += ["| " + " | ".join(cells(x, result, columns)) + " |" for x in lines]
    return "\n".join(text)


def points(result, side, kind):
    found = [(x["keys"], rate(x, side)) for x in result["lines"] if x.get("plot") == kind and rate(x, side)]
    return sorted(found)


def plot(result, width=720, height=400):
    """TFLOP/s over the length of a sequence, as SVG; dashed: causal."""
    left, right, top, bottom = 56, 150, 36, 48
    series = {(side, kind): points(result, side, kind) for side in SIDES for kind in ("full", "causal")}
    series = {k: v for k, v in series.items() if v}
    lengths = sorted({x for v in series.values() for x, _ in v})
    if not lengths:
        return None
    most = max(y for v in series.values() for _, y in v)
    step = 100
    ceiling = (int(most / step) + 1) * step

    def x_of(n):
        return left + (width - left - right) * lengths.index(n) / max(len(lengths) - 1, 1)

    def y_of(y):
        return height - bottom - (height - top - bottom) * y / ceiling
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
           'font-family="sans-serif" font-size="12">', f'<rect width="{width}" height="{height}" fill="white"/>',
           f'<text x="{left}" y="20" font-size="14">Forward, bf16, head dim 128, 16 heads, 16,384 rows in all: TFLOP/s, '
           f'{result["card"]}</text>']
    for y in range(0, ceiling + 1, step):
        out += [f'<line x1="{left}" x2="{width - right}" y1="{y_of(y):.1f}" y2="{y_of(y):.1f}" stroke="#ddd"/>',
                f'<text x="{left - 8}" y="{y_of(y) + 4:.1f}" text-anchor="end">{y}</text>']
    out += [f'<text x="{x_of(n):.1f}" y="{height - bottom + 20}" text-anchor="middle">{n}</text>' for n in lengths]
    out.append(f'<text x="{(left + width - right) / 2}" y="{height - 8}" text-anchor="middle">length of a sequence</text>')
    for i, ((side, kind), values) in enumerate(series.items()):
        dash = ' stroke-dasharray="6 4"' if kind == "causal" else ""
        path = " ".join(f"{x_of(n):.1f},{y_of(y):.1f}" for n, y in values)
        out.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[side]}" stroke-width="2"{dash}/>')
        out += [f'<circle cx="{x_of(n):.1f}" cy="{y_of(y):.1f}" r="3" fill="{COLOURS[side]}"/>' for n, y in values]
        y = top + 10 + 18 * i
        out += [f'<line x1="{width - right + 10}" x2="{width - right + 34}" y1="{y}" y2="{y}" stroke="{COLOURS[side]}" '
                f'stroke-width="2"{dash}/>', f'<text x="{width - right + 40}" y="{y + 4}">{side}, {kind}</text>']
    return "\n".join(out + ["</svg>", ""])


def write(result, folder):
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "gpu.json"), "w", encoding="ascii") as file:
        json.dump(result, file, indent=1)
    with open(os.path.join(folder, "gpu.csv"), "w", encoding="ascii", newline="") as file:
        writer = csv.writer(file)
        others = [column for columns in COLUMNS.values() for column in columns]
        writer.writerow(["table", "problem", "work", *(f"{x} us" for x in (*SIDES, *others)), "share", "kernels"])
        for x in result["lines"]:
            writer.writerow([x["table"], x["name"], x.get("work", ""), *(x.get("us", {}).get(side, "") for side in (*SIDES, *others)),
                             share(x, result) or "", " ".join(x.get("kernels", [x.get("error", "")]))])
    picture = plot(result)
    if picture:
        with open(os.path.join(folder, "gpu.svg"), "w", encoding="ascii") as file:
            file.write(picture)


BEGIN, END = "<!-- measured by ./dev bench gpu -->", "<!-- end of what was measured -->"
PICTURE = "kernels/gpu/speed.svg"
PAGE = "docs/speed.md"
FIGURES = [  # README's: table, row, how the page calls it, its unit
    ("forward", "2, 16/16, 8192, 128 causal", "forward, 8,192 keys, causal", "TFLOP/s"),
    ("backward", "2, 16/16, 8192, 128 causal", "backward, 8,192 keys, causal", "TFLOP/s"),
    ("forward", "2, 16/16, 4096, 192/128 causal", "forward, head dims 192 and 128, causal", "TFLOP/s"),
    ("decode", "64 x 8 x 4096, 128, group 8", "decode, 64 sequences of 4,096 keys, 64 heads on 8", "us"),
    ("local", "a launch and its end", "a launch in the client's stream, and its end; the driver's own", "us"),
]


def figures(result):
    """Markdown: FIGURES, each beside the best library."""
    rows = {(x["table"], x["name"]): x for x in result["lines"] if "us" in x}
    sides = [side for side in SIDES[1:] if any(side in x["us"] for x in rows.values())]
    text = [f"{result['card']}, bf16, {result['date']}, beside the best of {', '.join(sides)}:", "",
            "| | fmhad | other | |", "|--|--:|--:|--|"]
    for table, name, title, unit in FIGURES:
        line = rows.get((table, name))
        if line is None:
            continue
        if table == "local":
            ours, other = line["us"]["local"], line["us"]["other"]
        else:
            best = min if table == "decode" else max
            ours, other = rate(line, "fmhad"), best((r for r in (rate(line, side) for side in SIDES[1:]) if r), default=None)
        digits = 0 if unit == "TFLOP/s" else 1
        text.append(f"| {title} | {ours:.{digits}f} | {other:.{digits}f} | {unit} |" if other else
                    f"| {title} | {ours:.{digits}f} | | {unit} |")
    return "\n".join(text)


def replace_between(path, measured):
    """What stands between BEGIN and END in a page gives way to what was measured."""
    with open(path, encoding="utf-8") as file:
        text = file.read()
    before, rest = text.split(BEGIN)
    with open(path, "w", encoding="utf-8") as file:
        file.write("\n".join([before + BEGIN, measured, END + rest.split(END)[1]]))


def write_pages(result, root=ROOT):
    picture = plot(result)
    shown = f"![TFLOP/s over the length of a sequence](../{PICTURE})\n\n" if picture else ""
    replace_between(os.path.join(root, PAGE), shown + tables(result))
    replace_between(os.path.join(root, "README.md"), figures(result))
    if picture:
        with open(os.path.join(root, PICTURE), "w", encoding="ascii") as file:
            file.write(picture)


def merge(results):
    """One result: what was measured last of each row."""
    merged = dict(results[-1])
    lines = {(x["table"], x["name"]): x for r in results for x in r["lines"]}
    merged["lines"] = list(lines.values())
    return merged


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+")
    parser.add_argument("--out")
    parser.add_argument("--pages", action="store_true")
    a = parser.parse_args()
    results = []
    for name in a.files:
        with open(name, encoding="ascii") as file:
            results.append(json.load(file))
    result = merge(results)
    if a.out:
        write(result, a.out)
    if a.pages:
        write_pages(result)
    print(tables(result))


if __name__ == "__main__":
    main()
