# SPDX-License-Identifier: MIT
"""What ./dev bench gpu writes, from numbers that nobody measured; its problems are ones that plans are made for."""
import csv
import json
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as xml

import fmhad
import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tests", "bench"))
import gpu_problems  # noqa: E402
import gpu_report  # noqa: E402


def line(table, name, work, us, **more):
    return dict(table=table, name=name, work=work, us=us, plain="", plot="", keys=1024) | more


@pytest.fixture
def result():
    return dict(card="Card", driver="1.2", torch="3", date="2026-01-02", copy=4e12, lines=[
        line("forward", "a", 1e12, {"fmhad": 2000, "cuDNN": 4000, "FlashAttention-2": 5000}, plot="full"),
        line("forward", "b", 2e12, {"fmhad": 4000, "cuDNN": 2500}, plot="full", keys=2048),
        line("features", "full", 1e12, {"fmhad": 2000}),
        line("features", "bias", 1e12, {"fmhad": 8000}, plain="full"),
        line("decode", "c", 38e6, {"fmhad": 28.0}),
        dict(table="fp8", name="d", error="no kernel"),
        line("models", "g", 1e12, {"fmhad": 2000, "cuDNN": 2500}, kernels=["fwd-bf16-h128-gpu_wgmma-t128x96x128x128x96x128-r8x1x1"]),
        dict(table="local", name="e", us={"local": 3.0, "other": 2.0}),
        dict(table="served", name="f", us={"kernel": 60.0, "on top": 15.0, "9 of 10": 20.5, "busy": 50.0})])


def test_shares_are_of_what_the_table_says(result):
    shares = [gpu_report.share(x, result) for x in result["lines"]]
    assert shares[0] == pytest.approx(2)      # of the better library
    assert shares[1] == pytest.approx(0.625)
    assert shares[2] is None
    assert shares[3] == pytest.approx(0.25)   # of the plain row
    assert shares[4] == pytest.approx(2)      # 38 MB at 3.8 TB/s are 10 us, and 4
    text = gpu_report.tables(result)
    assert "| a | 500 | 250 | 200 | 2.00 |" in text and "| d | no kernel |" in text and "2026-01-02" in text
    assert "| g: wgmma 128x96 | 500 | 400 | 1.25 |" in text
    assert "| e | 3.00 | 2.00 | 1.500 |" in text and "| f | 60.00 | 15.00 | 20.50 | 50.00 |" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    tables = text.count("|--|")
    assert len(rows) == len(result["lines"]) + 2 * tables and tables == 7


def test_files_hold_every_line(result, tmp_path):
    gpu_report.write(result, tmp_path)
    assert json.loads((tmp_path / "gpu.json").read_text()) == result
    rows = list(csv.reader((tmp_path / "gpu.csv").open()))
    assert [r[1] for r in rows[1:]] == ["a", "b", "full", "bias", "c", "d", "g", "e", "f"] and {len(r) for r in rows} == {16}
    picture = xml.parse(tmp_path / "gpu.svg").getroot()
    lines = [x for x in picture.iter() if x.tag.endswith("polyline")]
    assert [len(x.get("points").split()) for x in lines] == [2, 2, 1]


def test_later_results_replace_earlier_ones(result):
    again = dict(result, lines=[line("decode", "c", 38e6, {"fmhad": 14.0})])
    merged = gpu_report.merge([result, again])
    assert len(merged["lines"]) == 9
    assert next(x for x in merged["lines"] if x["name"] == "c")["us"] == {"fmhad": 14.0}


def test_pages_take_what_was_measured(result, tmp_path):
    """Of copies of the real pages, so that a page without a place for it fails; README's figures are rows that are measured."""
    for page in ("README.md", gpu_report.PAGE):
        (tmp_path / page).parent.mkdir(exist_ok=True)
        shutil.copy(os.path.join(ROOT, page), tmp_path / page)
    (tmp_path / gpu_report.PICTURE).parent.mkdir(parents=True)
    old = {page: (tmp_path / page).read_text() for page in ("README.md", gpu_report.PAGE)}
    table, name, title, _ = gpu_report.FIGURES[0]
    result["lines"].append(line(table, name, 1e12, {"fmhad": 2000, "cuDNN": 4000, "FlashAttention-2": 5000}))
    gpu_report.write_pages(result, str(tmp_path))
    for page, text in old.items():
        new = (tmp_path / page).read_text()
        assert new.split(gpu_report.BEGIN)[0] == text.split(gpu_report.BEGIN)[0] and "2026-01-02" in new
        assert new.split(gpu_report.END)[1] == text.split(gpu_report.END)[1] and new.count(gpu_report.BEGIN) == 1
    assert f"| {title} | 500 | 250 | TFLOP/s |" in (tmp_path / "README.md").read_text()
    assert "| f | 60.00 | 15.00 |" in (tmp_path / gpu_report.PAGE).read_text()
    measured = {(row.table, row.name) for row in gpu_problems.rows(("forward", "backward", "decode"), "")}
    assert all((table, name) in measured for table, name, *_ in gpu_report.FIGURES if table != "local")


def test_loops_are_those_of_names_of_kernels():
    """The one that a row's time goes into, of backward and of splits, too."""
    backward = ["bwd_dot_do_o-bf16-h576-gpu_dot-t16x16x32", "bwd_dq_dk_dv-bf16-h64-gpu_mma-t64x64x64", "bwd_convert_dq-bf16-h576-gpu_convert-t16x16"]
    splits = ["fwd_splitkv-bf16-h128-gpu_decode-t16x64x128", "fwd_splitkv_combine-bf16-h576-gpu_combine-t16x16x32"]
    assert [gpu_report.loop_of({"kernels": names}) for names in (backward, splits, [])] == ["mma 64x64", "decode 16x64", ""]


def test_layers_are_drawn_as_plans_are_asked_for_them():
    """Each option of a layer is in its row; pairs are those that the mask leaves."""
    rows = {row.name: row for row in gpu_problems.rows(("models",), "")}
    assert len(rows) >= 60 and {x for row in rows.values() for x in row.extra} == {"sink", "alibi_slopes", "bias"}
    local = rows["Gemma 2 27B, local"]
    assert local.fields["window_left"] == 4095 and local.fields["logits_soft_cap"] == 50 and rows["GPT-J, dropped"].fields["dropout_p"] == 0.1
    assert local.work == 4 * 32 * 128 * (4096 * 4097 // 2 + 4096 * 4096)
    assert rows["Llama 3 8B"].work == 4 * 32 * 128 * (8192 * 8193 // 2)
    assert [name for name, row in rows.items() if row.general] == ["ViT B/16", "Gemma 2 9B, backward", "GPT-J, dropped, backward"]


def test_problems_get_kernels_with_matrix_instructions():
    names = {"batch": "--batch", "nhead_q": "--heads-q", "nhead_k": "--heads-k", "seqlen_q": "--seqlen-q",
             "seqlen_k": "--seqlen-k", "hdim_q": "--hdim", "page_size": "--page-size"}
    rows = gpu_problems.rows(("forward", "decode"), "")
    assert len(rows) > 40 and len({(r.table, r.name) for r in rows}) == len(rows)
    for row in rows[::7]:
        f = row.fields
        if f["hdim_q"] != f["hdim_v"] or row.dtype == "e4m3":
            continue
        options = [str(x) for key, word in names.items() if key in f for x in (word, f[key])]
        text = subprocess.run([fmhad.find_program("fmhactl"), "plan", "--arch", "sm_90a", "--dtype", "bf16",
                               *options, "--json"], capture_output=True, text=True, check=True).stdout
        kernel = json.loads(text)["plan"]["stages"][0]["kernel"]
        assert ("gpu_decode" if row.table == "decode" else "gpu_wgmma") in kernel, row.name


def test_lines_of_the_programs_that_measure_local_launch():
    """What bench_local and tests/gpu/local.py print is read by patterns: one that finds nothing would leave a table out."""
    bench_gpu = pytest.importorskip("bench_gpu")
    with open(os.path.join(ROOT, "tests", "bench", "bench_local.c"), encoding="ascii") as file:
        source = file.read()
    assert 'local %.2f us, the driver\'s own call %.2f us' in source and "on top %6.1f us (9 of 10 below %6.1f), busy" in source
    assert bench_gpu.LAUNCHED.findall("one of 1000 in a row: local 3.01 us, the driver's own call 3.00 us, 1.001 times")
    assert bench_gpu.GRAPH.findall("ok   graph of 50, bf16 forward       replay 101.0 us a layer, without 101.5 us")
    assert bench_gpu.SERVED.findall("served,   512 keys: kernel     20.1 us, on top   31.0 us (9 of 10 below   35.0), busy  49.0 us")
