# SPDX-License-Identifier: MIT
"""fmhactl bench: rows, documents, filters, resuming, the gate, the page; registries offline."""
import csv
import html.parser
import json
import os
import re
import subprocess

import pytest

import fmhad

OK, FAILED, USAGE, _, _, IO = range(6)
SWEEP = {
    "shapes": "own",
    "groups": [
        {
            "name": "lengths",
            "set": {"nhead_q": 4, "nhead_k": 2, "hdim_q": 64, "data_type": "fp16"},  # of which every CPU has two kernels
            "for": [{"seqlen_q": [32, 100, 256], "mask,window_right": [["no", -1], ["bottom_right", 0]]}],
        },
        {"name": "packed", "set": {"mode": "group", "batch": 3, "seqlen_q": 90, "lengths": "mixed", "data_type": "bf16"}},
        {"name": "back", "set": {"op": "backward", "seqlen_q": 64, "nhead_q": 2, "hdim_q": 32}},
    ],
}
QUICK = ["--warmup", 1, "--repeat", 3, "--no-roofs"]


@pytest.fixture(scope="module", name="daemon")
def fixture_daemon():
    with fmhad.Daemon() as daemon:
        yield daemon


@pytest.fixture(name="bench")
def fixture_bench(daemon, tmp_path):
    def run(*arguments, expect=OK):
        done = subprocess.run(
            [fmhad.find_program("fmhactl"), "bench", *map(str, arguments)],
            capture_output=True, text=True, check=False, timeout=120, cwd=tmp_path,
            env={**os.environ, "FMHAD_SOCKET": daemon.socket},
        )
        assert done.returncode == expect, done.stdout + done.stderr
        return done.stdout if expect in (OK, FAILED) else done.stderr

    (tmp_path / "own.json").write_text(json.dumps(SWEEP))
    return run


def rows_of(path):
    return json.loads(path.read_text())["devices"][0]["rows"]


def visible_pairs(rows, keys, causal):
    return sum(min(keys, keys - rows + i + 1) if causal else keys for i in range(rows))


def test_a_sweep_of_all_kernels_is_measured_and_checked(bench, tmp_path):
    text = bench("--tier", "./own.json", "--kernels", "all", "--check", *QUICK, "--out", "o.json", "--csv", "o.csv")
    document = json.loads((tmp_path / "o.json").read_text())
    device = document["devices"][0]
    assert document["format"] == "fmhad-bench" and document["version"] == 1
    assert device["backend"] == "cpu" and device["compiler"] and device["driver"] and document["server"]
    rows = device["rows"]
    by_shape = {}
    for row in rows:
        assert "failure" not in row and 0 <= row["error"] <= row["allowed"]
        assert 0 < row["min_us"] <= row["median_us"] and row["runs"] == 3
        by_shape.setdefault(row["shape"], []).append(row)
    assert len(by_shape) == 8 and "8 shapes" in text and "0 wrong" in text
    assert all(sum(row["chosen"] for row in shape) == 1 for shape in by_shape.values())
    assert any(len(shape) > 1 for shape in by_shape.values())
    assert all(len({row["kernel"] for row in shape}) == len(shape) for shape in by_shape.values())
    times = [(min(r["median_us"] for r in s) / next(r["median_us"] for r in s if r["chosen"]))
             for s in by_shape.values() if len(s) > 1]
    choice = device["summary"]["choice"]
    assert choice["shapes"] == len(times) and choice["worst"] == pytest.approx(min(times))
    assert choice["mean"] == pytest.approx(sum(times) / len(times))
    # The rates follow from the time and the problem.
    for row in rows:
        size = row["sizes"]
        if size["op"] != "forward" or size["mode"] != "batch":
            continue
        n, heads, d = size["seqlen_q"], size["nhead_q"], size["hdim_q"]
        flops = 4 * visible_pairs(n, n, size["mask"] != "no") * heads * d
        traffic = 2 * n * d * (2 * heads + 2 * size["nhead_k"])
        assert row["tflops"] == pytest.approx(flops / row["median_us"] / 1e6)
        assert row["gbs"] == pytest.approx(traffic / row["median_us"] / 1e3)
        assert row["intensity"] == pytest.approx(flops / traffic)
    lines = list(csv.DictReader((tmp_path / "o.csv").open()))
    assert [(line["shape"], line["kernel"]) for line in lines] == [(row["shape"], row["kernel"]) for row in rows]
    assert float(lines[0]["median_us"]) == pytest.approx(rows[0]["median_us"])
    assert choice["worst"] <= choice["tenth_percentile"] <= choice["median"] <= 1 and document["seconds"] > 0
    # Behind them what the kernel's name says, so that rows can be grouped by tile.
    for line in lines:
        family, tile, arch = line["kernel"].split("-")[0], re.search(r"-t([\dx]+)", line["kernel"])[1].split("x"), line["kernel"].split("-")[-1]
        names = ["tile_m0", "tile_n0", "tile_k0", "tile_n1", "tile_k1", "tile_k0max", "tile_bwd6", "tile_bwd7", "tile_bwd8"]
        assert [line[name] for name in names[:len(tile)]] == tile and (line["family"], line["gfx_arch"]) == (family, arch)
        assert line["pipeline"] in line["kernel"] and line["warp_m0"] and line["wave_k2"] and line["block_per_cu"]


def test_a_sweep_of_the_dispatcher_thins_out(bench, tmp_path):
    """--variant by families, --config by the traits that shapes have and by pipelines of this build."""
    def measured(*arguments):
        bench("--tier", "./own.json", *arguments, *QUICK, "--out", "o.json")
        return rows_of(tmp_path / "o.json")

    every = measured()
    backward = measured("--variant", "bwd")
    assert 0 < len(backward) < len(every) and {row["sizes"]["op"] for row in backward} == {"backward"}
    sweep = tmp_path / "sweep.json"
    sweep.write_text(json.dumps({"variant": "fwd", "trait_config": {
        "data_type": {"values": ["fp16"]}, "mask": {"values": ["causal"]}, "lse": {"values": [False]}}}))
    causal = measured("--config", "./sweep.json")
    assert {(row["sizes"]["op"], row["sizes"]["data_type"], row["sizes"]["mask"]) for row in causal} == {("forward", "fp16", "bottom_right")}
    assert {row["sizes"]["seqlen_q"] for row in causal} == {32, 100, 256}
    assert len(causal) > 3, "a sweep is about kernels: all that fit"
    sweep.write_text(json.dumps({"variant": "fwd", "trait_config": {"pipeline": {"values": ["cpu_flash"]}, "mode": {"values": ["group"]}}}))
    packed = measured("--config", "./sweep.json", "--variant", "fwd")
    assert {row["sizes"]["mode"] for row in packed} == {"group"} and all("-cpu_flash-" in row["kernel"] for row in packed)
    for arguments, reason in [
        (("--config", "fwd"), "its pipelines are AMD's"), (("--variant", "nonesuch"), "there is none"), (("--config", "nonesuch"), "nonesuch.json"),
        (("--config", "./sweep.json", "--variant", "bwd"), "the sweep is of fwd"), (("--variant", "batch_prefill"), "no shape is left"),
    ]:
        said = bench("--tier", "./own.json", *arguments, *QUICK, expect=IO if "nonesuch.json" in reason else USAGE)
        assert reason in said, said


@pytest.mark.parametrize("shape", [
    "forward -b=2 -h=4 -h_k=2 -s=70 -s_k=90 -d=64 -lse=1 -mask=b:20,3,2",
    "backward -b=1 -h=2 -s=65 -s_k=33 -d=32 -d_v=64 -mask=t:-1,0",
    "merge -b=2 -h=3 -s=20 -d=64 --parts=3",
])
def test_work_is_counted_as_the_planner_counts_it(bench, daemon, tmp_path, shape):
    """Two derivations: the planner's closed formula, and every row of every sequence."""
    bench(*shape.split(), *QUICK, "--out", "o.json")
    (row,) = rows_of(tmp_path / "o.json")
    plan = json.loads(subprocess.run(
        [fmhad.find_program("fmhactl"), "plan", *shape.split(), "--json"], capture_output=True, text=True, check=True,
        timeout=20, env={**os.environ, "FMHAD_SOCKET": daemon.socket}).stdout)["plan"]
    assert row["tflops"] * row["median_us"] * 1e6 == pytest.approx(plan["flops"])
    assert row["gbs"] * row["median_us"] * 1e3 == pytest.approx(plan["bytes"])


def test_filters_and_limits_choose_shapes_and_kernels(bench, tmp_path):
    bench("--tier", "./own.json", *QUICK, "--out", "a.json", "--shapes", "op == 'forward' and seqlen_k >= 100 and mask != 'no'")
    assert [row["sizes"]["seqlen_q"] for row in rows_of(tmp_path / "a.json")] == [100, 256]
    bench("--tier", "./own.json", *QUICK, "--out", "b.json", "--filter", "tile_m0 == 48", "--max-shapes", 2)
    assert all("-t48x" in row["kernel"] for row in rows_of(tmp_path / "b.json"))
    # A file of --filter-file holds together with it.
    (tmp_path / "own.filter").write_text("tile_n0 != 64  # no word\n")
    bench("--tier", "./own.json", *QUICK, "--out", "d.json", "--filter", "tile_m0 == 48", "--filter-file", "own.filter", "--max-shapes", 2)
    both = {row["kernel"] for row in rows_of(tmp_path / "d.json")}
    assert both == {row["kernel"] for row in rows_of(tmp_path / "b.json") if "-t48x64x" not in row["kernel"]}
    bench("-s", 64, *QUICK, "--kernels", "all", "--max-kernels", 1, "--out", "c.json")
    assert len(rows_of(tmp_path / "c.json")) == 1
    assert "^" in bench("--tier", "./own.json", "--shapes", "op == 'sideways'", expect=USAGE)
    assert "there is no field 'tile_q'" in bench("-s", 64, "--filter", "tile_q > 1", expect=USAGE)
    (tmp_path / "own.filter").write_text("tile_m0 == 48 and\ntile_q > 1\n")
    assert "own.filter: " in bench("-s", 64, "--filter-file", "own.filter", expect=USAGE)
    assert "No such file" in bench("-s", 64, "--filter-file", "none", expect=IO)
    assert "not one of chosen all" in bench("--kernels", "most", expect=USAGE)


def test_a_shape_that_nothing_runs_is_a_row_with_the_reason(bench, tmp_path):
    bench("-s", 64, "-prec", "bf16", "-d", 584, *QUICK, "--out", "o.json")
    (row,) = rows_of(tmp_path / "o.json")
    assert "hdim_q 584" in row["failure"] and row["kernel"] == ""


@pytest.mark.parametrize("cache", ["rotate", "flush"])
def test_caches_can_be_cold(bench, tmp_path, cache):
    bench("-s", 200, "-h", 2, *QUICK, "--cache", cache, "--cache-mib", 8, "--check", "--out", "o.json")
    (row,) = rows_of(tmp_path / "o.json")
    assert row["error"] <= row["allowed"] and row["median_us"] > 0


def test_rates_are_told_by_roofs_that_are_given_or_measured(bench, tmp_path):
    bench("-s", 512, "-d", 64, "--warmup", 1, "--repeat", 3, "--roof-tflops", 100, "--roof-gbs", 1000, "--out", "o.json")
    (row,) = rows_of(tmp_path / "o.json")
    assert row["roof"] == pytest.approx(row["tflops"] / min(100, row["intensity"]))
    bench("-s", 64, "-h", 1, "--warmup", 1, "--repeat", 3, "--out", "o.json")
    roofs = json.loads((tmp_path / "o.json").read_text())["devices"][0]["roofs"]
    (row,) = rows_of(tmp_path / "o.json")
    assert roofs["gbs"] > 0 and roofs["tflops"]["bf16"] > 0
    assert row["roof"] == pytest.approx(row["tflops"] / min(roofs["tflops"]["bf16"], roofs["gbs"] * row["intensity"] / 1e3))


def test_an_interrupted_run_goes_on(bench, tmp_path):
    bench("--tier", "./own.json", *QUICK, "--out", "o.json", "--max-shapes", 3)
    first = rows_of(tmp_path / "o.json")
    bench("--tier", "./own.json", *QUICK, "--out", "o.json", "--resume")
    rows = rows_of(tmp_path / "o.json")
    assert rows[:3] == first and len(rows) == 8


def test_compare_is_a_gate(bench, tmp_path):
    bench("--tier", "./own.json", *QUICK, "--check", "--out", "a.json")
    document = json.loads((tmp_path / "a.json").read_text())

    def changed(change):
        copy = json.loads(json.dumps(document))
        change(copy["devices"][0]["rows"])
        (tmp_path / "b.json").write_text(json.dumps(copy))
        return ["--compare", "a.json", "b.json"]

    def scale(row, factor):
        row.update(median_us=row["median_us"] * factor, min_us=row["min_us"] * factor)

    for row in document["devices"][0]["rows"]:
        row.update(spread=0.02, min_us=0.99 * row["median_us"])
    (tmp_path / "a.json").write_text(json.dumps(document))
    assert "8 rows compared: 0 slower, 0 faster" in bench(*changed(lambda rows: None))
    text = bench(*changed(lambda rows: scale(rows[1], 1.2)), expect=FAILED)
    assert "1 slower" in text and "+20.0 %" in text
    assert "1 slower" in bench(*changed(lambda rows: scale(rows[1], 1.07)), expect=FAILED)
    assert "0 slower" in bench(*changed(lambda rows: scale(rows[1], 1.07)), "--tolerance", 10)
    assert "1 faster" in bench(*changed(lambda rows: scale(rows[1], 0.5)))
    # Noise is no regression, a missing, a failing and a wrong row are.
    assert "0 slower" in bench(*changed(lambda rows: rows[1].update(median_us=rows[1]["median_us"] * 1.2, spread=0.5)))
    assert "1 missing" in bench(*changed(lambda rows: rows.pop()), expect=FAILED)
    assert "1 failed or wrong" in bench(*changed(lambda rows: rows[0].update(failure="no")), expect=FAILED)
    assert "1 failed or wrong" in bench(*changed(lambda rows: rows[0].update(error=9.0)), expect=FAILED)
    # The planner may choose another kernel: then it is its choices that are compared.
    assert "0 missing" in bench(*changed(lambda rows: rows[0].update(kernel="fwd-another")))
    (tmp_path / "b.json").write_text("{}")
    assert "no fmhad-bench document" in bench("--compare", "a.json", "b.json", expect=IO)


class Page(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.outside = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.outside += [v for k, v in attrs if k in ("src", "href")]


def test_the_page_stands_alone_and_draws_what_was_measured(bench, tmp_path):
    bench("--tier", "./own.json", "--kernels", "all", "--warmup", 1, "--repeat", 3, "--out", "o.json",
          "--roof-tflops", 10, "--roof-gbs", 100)
    bench("--from", "o.json", "--html", "o.html")
    text = (tmp_path / "o.html").read_text()
    page = Page()
    page.feed(text)
    assert page.tags.count("svg") == 3 and not page.outside and "http" not in text
    rows = rows_of(tmp_path / "o.json")
    assert text.count("<tr><td>") == len({row["shape"] for row in rows})
    chosen = [row for row in rows if row["chosen"]]
    assert text.count("<title>forward") + text.count("<title>backward") == 2 * len(chosen)
    # Everything is drawn inside the axes.
    assert all(0 <= float(x) <= 1060 and 0 <= float(y) <= 420 for x, y in re.findall(r"cx=([\d.-]+) cy=([\d.-]+)", text))


def export(path, kernels, device="cpu", environment="one", sets=None):
    path.write_text(json.dumps({
        "format": "fmhad-registry", "version": 1, "device": device, "environment": environment, "archs": ["x86_64_v3"],
        "sets": sets or {"default": ["*"]}, "kernels": kernels, "statistics": {"kernels": len(kernels)},
    }))


def test_registries_merge_and_compare_without_a_daemon(tmp_path):
    def registry(*arguments, expect=OK):
        done = subprocess.run(
            [fmhad.find_program("fmhactl"), "registry", *map(str, arguments)],
            capture_output=True, text=True, check=False, timeout=20, cwd=tmp_path,
            env={**os.environ, "FMHAD_SOCKET": "/nowhere"},
        )
        assert done.returncode == expect, done.stdout + done.stderr
        return done.stdout + done.stderr

    def tuned(shape, us, when, splits=0):
        return {"shape": shape, "us": us, "when": when, "splits": splits}

    export(tmp_path / "a.json", [
        {"name": "fwd-a", "runs": 3, "priority": 2, "tuned": [tuned("s", 10, 100), tuned("t", 20, 100)]},
        {"name": "fwd-b", "flags": ["loaded"]},
    ], sets={"default": ["*"], "mine": ["fwd-*"]})
    export(tmp_path / "b.json", [
        {"name": "fwd-a", "runs": 9, "priority": 5, "tuned": [tuned("s", 9, 99), tuned("t", 21, 101), tuned("s", 8, 1, 4)]},
        {"name": "fwd-c", "priority": 1, "tuned": [tuned("s", 30, 5)]},
        {"name": "fwd-d", "flags": ["compiled"], "runs": 4},
    ], sets={"default": ["*"], "mine": ["bwd-*"], "theirs": ["*-h64-*"]})
    said = registry("merge", "a.json", "b.json", "--out", "m.json")
    assert "3 results of the second file taken" in said and "set 'mine' differs" in said
    merged = json.loads((tmp_path / "m.json").read_text())
    kernels = {kernel["name"]: kernel for kernel in merged["kernels"]}
    # The newer time, the first file's priority and set, nothing that only the other machine knows.
    assert sorted(kernels) == ["fwd-a", "fwd-b", "fwd-c"] and kernels["fwd-a"]["priority"] == 2
    assert {(t["shape"], t["splits"]): t["us"] for t in kernels["fwd-a"]["tuned"]} == {
        ("s", 0): 10, ("t", 0): 21, ("s", 4): 8}
    assert kernels["fwd-a"]["runs"] == 3 and "runs" not in kernels["fwd-c"] and kernels["fwd-c"]["priority"] == 1
    assert merged["sets"] == {"default": ["*"], "mine": ["fwd-*"], "theirs": ["*-h64-*"]}
    assert "statistics" not in merged
    text = registry("compare", "a.json", "b.json", expect=FAILED)
    for line in ("priority: 2 -> 5", "s: 10 -> 9", "s, 4 splits: - -> 8", "set mine differs", "set theirs"):
        assert line in text
    assert "both remember the same" in registry("compare", "m.json", "m.json")
    # Another model or environment is refused, and so is what is no export.
    export(tmp_path / "c.json", [], environment="two")
    assert "another environment: 'two', not 'one'" in registry("merge", "a.json", "c.json", expect=FAILED)
    export(tmp_path / "c.json", [], device="gpu")
    assert "another device: 'gpu', not 'cpu'" in registry("merge", "a.json", "c.json", expect=FAILED)
    (tmp_path / "c.json").write_text("[]")
    assert "not a registry's export" in registry("merge", "a.json", "c.json", expect=IO)
    assert "SECOND is missing" in registry("merge", "a.json", expect=USAGE)


def test_a_merged_registry_can_be_imported(daemon, tmp_path):
    environment = {**os.environ, "FMHAD_SOCKET": daemon.socket}

    def fmhactl(*arguments):
        return subprocess.run([fmhad.find_program("fmhactl"), *arguments], capture_output=True, text=True, check=True,
                              timeout=60, cwd=tmp_path, env=environment).stdout

    fmhactl("run", "forward", "-s", "32", "-d", "64")
    fmhactl("registry", "export", "--out", "a.json")
    document = json.loads((tmp_path / "a.json").read_text())
    document["kernels"][0]["priority"] = 4
    (tmp_path / "b.json").write_text(json.dumps(document))
    fmhactl("registry", "merge", "a.json", "b.json", "--out", "m.json")
    assert fmhactl("registry", "import", "m.json") == "1 kernels\n"
