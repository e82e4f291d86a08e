# SPDX-License-Identifier: MIT
"""What a plan chooses on Hopper for the shapes of today's models: a loop made for it, or a reason that stands here. Offline, by
the catalogue and the model of times, so that a row, a rule or a fit that loses one of them is seen without a card."""
import importlib
import json
import re
import subprocess
import sys

import pytest

import fmhad
from model_shapes import LAYERS, TRAINED, VISION, words_of


def plan_of(words):
    done = subprocess.run([fmhad.find_program("fmhactl"), "plan", *words.split(), "--arch", "sm_90a", "--rules", "gpu", "--json"],
                          capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    said = json.loads(done.stdout)
    assert len({x["shape"] for x in said["selections"]}) == 1, f"{words}: a problem has one word"
    return said["plan"]


def stages_of(plan):
    return [(s["family"], s["pipeline"]) for s in plan["stages"]]


def stage_of(words, stage):
    """The pipeline of a plan's stage of that family."""
    plan = plan_of(words)
    found = [pipeline for family, pipeline in stages_of(plan) if family == stage]
    assert len(found) == 1, f"{words}: {plan}"
    return found[0]


WIDE = {"Gemma 4, global": "gpu_wide"}  # heads above 256 have a loop of their own


@pytest.mark.parametrize("layer", LAYERS)
def test_prefill(layer):
    assert stage_of(f"forward -b 1 -s 8192 {words_of(layer)}", "fwd") == WIDE.get(layer, "gpu_wgmma")


@pytest.mark.parametrize("layer", [x for x in LAYERS if "dropped" not in x and "--bias" not in LAYERS[x][3]])
def test_a_chunk_over_pages(layer):
    assert stage_of(f"forward -b 4 -s 2048 -s_k 16384 --page-size 64 {words_of(layer)}", "fwd_pagedkv") == WIDE.get(layer, "gpu_wgmma")


PLAIN = [x for x in LAYERS if re.fullmatch(r"--causal( --s.*)?", LAYERS[x][3]) and LAYERS[x][0] <= 64 and x not in WIDE]  # more fill a GPU with a tile each


@pytest.mark.parametrize("layer", PLAIN)
def test_few_rows_over_many_keys(layer):
    """The end of a prompt whose beginning is in the cache: splits, and no more where there are many sequences."""
    words = f"forward -s 100 -s_k 8192 --page-size 64 {words_of(layer)}"
    one, many = plan_of(f"{words} -b 1"), plan_of(f"{words} -b 64")
    assert stages_of(one) == [("fwd_splitkv", "gpu_wgmma"), ("fwd_splitkv_combine", "gpu_combine")] and one["n_splits"] > 1
    assert [pipeline for _, pipeline in stages_of(many)] == ["gpu_wgmma"] and many["n_splits"] == 0


@pytest.mark.parametrize("layer", PLAIN)
@pytest.mark.parametrize("pages", ["--descale pt", "--page-size 16 --descale pt", "--descale bs --descale-block-k 1",
                                   "--page-size 16 --descale page --descale-block-k 1"])
@pytest.mark.parametrize("kind", ["e4m3", "int8"])
def test_a_cache_of_8_bits_is_widened_for_many_rows(layer, pages, kind):
    """With factors of a tensor, and with a key's own."""
    words = f"forward --kv-type {kind} {words_of(layer)} {pages}"
    widen = ("fwd_appendkv", "gpu_append")
    long, few = plan_of(f"{words} -b 1 -s 8192"), plan_of(f"{words} -b 1 -s 100 -s_k 8192")
    assert long["widens"] and stages_of(long) == [widen, ("fwd", "gpu_wgmma")]
    assert few["widens"] and stages_of(few) == [widen, ("fwd_splitkv", "gpu_wgmma"), ("fwd_splitkv_combine", "gpu_combine")]
    assert not plan_of(f"{words} -b 1 -s 1 -s_k 8192")["widens"]


@pytest.mark.parametrize("kind", ["e4m3", "e5m2", "int8"])
@pytest.mark.parametrize("factors", ["pt", "page", "page --descale-block-k 1"])
def test_few_rows_read_8_bits_as_they_lie(kind, factors):
    words = f"forward --kv-type {kind} --descale {factors} -b 16 -h 32 -h_k 8 -s 1 -s_k 16384 --page-size 64"
    assert stage_of(words, "fwd_splitkv") == "gpu_decode"


@pytest.mark.parametrize("kind", ["e4m3", "int8"])
@pytest.mark.parametrize("layer", PLAIN)
def test_who_decodes_goes_by_itself_over_8_bits(layer, kind):
    """Beside a chunk of a prompt: over the cache as it is, of which the keys of the others alone are widened."""
    words = f"forward --kv-type {kind} --page-size 16 -s_k {','.join(['8192'] * 33)} {words_of(layer)}"
    few = [("fwd_appendkv", "gpu_append"), ("fwd_splitkv", "gpu_decode"), ("fwd_splitkv_combine", "gpu_combine")]
    for rows in (512, 100):
        plan = plan_of(f"{words} -s {','.join(['1'] * 32 + [str(rows)])}")
        assert stages_of(plan)[:3] == few and stages_of(plan)[3][1] == "gpu_wgmma", plan
        assert 1 <= plan["few_rows"] <= 64 and 1 <= plan["wide_places"] <= 33
    even = plan_of(f"forward --kv-type {kind} --page-size 16 -s 600,600,600,600 -s_k 8192,8192,8192,8192 {words_of(layer)}")
    assert even["few_rows"] == 0 and even["widens"], "sequences of like lengths are widened all"


def test_a_plan_says_that_its_loop_is_for_every_arch():
    """float32 has none that is made for Hopper."""
    for words, general in (("-s 2048 -d 128", False), ("-s 2048 -d 128 --dtype f32", True), ("-s 1 -s_k 4096 -d 128", False)):
        assert [s["general"] for s in plan_of(f"forward -b 1 -h 8 {words}")["stages"]][0] == general, words


def test_what_is_not_widened():
    """Where keys have factors of their own under f16, where that took more memory than it is worth, and where another kernel is named."""
    words = "forward -h 32 -h_k 8 -s 2048 --kv-type e4m3 --causal"
    assert plan_of(f"{words} -b 1")["widens"]
    assert plan_of(f"{words} -b 1 --page-size 16 --descale page")["widens"]
    assert not plan_of(f"{words} -b 64 -s_k 65536 --page-size 16")["widens"]
    narrow = "fwd-bf16-h128-gpu_wgmma-t128x64x128x128x64x128-r8x1x1-w16x16x16-p1111-generic-no-bpc1-narrow1-sm_90a"
    wide = "fwd-bf16-h128-gpu_wgmma-t128x64x128x128x64x128-r8x1x1-w16x16x16-p1111-generic-no-bpc1-sm_90a"
    for kernel, widens in ((narrow, False), (wide, True)):
        plan = plan_of(f"{words} -b 1 --kernel {kernel}")
        assert plan["widens"] == widens and plan["stages"][-1]["kernel"] == kernel


@pytest.mark.parametrize("picture", VISION)
def test_vision_and_speech(picture):
    heads, dim, rows, keys = VISION[picture]
    assert stage_of(f"forward -b 8 -h {heads} -d {dim} -s {rows} -s_k {keys}", "fwd") == "gpu_wgmma"


@pytest.mark.parametrize("layer", TRAINED)
def test_training(layer):
    loop = stage_of(f"backward -b 1 -s 4096 {words_of(layer)}", "bwd_dq_dk_dv")
    assert (loop == "gpu_wgmma") == (TRAINED[layer] is None), loop


# ---- how choices are judged, and what models are fitted to ----

def bench_module(name):
    sys.path.insert(0, str(fmhad.ROOT / "tests/bench"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


def test_models_say_what_they_were_fitted_to():
    for path in (fmhad.ROOT / "specs/models").glob("*.json"):
        measured = json.loads(path.read_text())["measured"]
        assert re.fullmatch(r"fmhad-measured-\w+-[0-9a-f]{12}\.json\.xz", measured["file"])
        assert re.fullmatch(r"[0-9a-f]{64}", measured["sha256"]) and measured["problems"] > 0


def test_the_data_of_a_model_is_one_file(tmp_path):
    """Parts of a measurement come to the same file, whatever their keys' order, and read back as what they were."""
    selection = bench_module("selection")
    entries = [{"shape": f"s{i}", "problem": {"batch": i}, "times": {"a@1": 2.0, "b@1": 1.0}, "second": {"b@1": 1.5, "a@1": 2.5}} for i in range(3)]
    parts = [tmp_path / "one.json", tmp_path / "two.json"]
    parts[0].write_text(json.dumps({"arch": "sm_90a", "units": 132, "problems": entries[:2]}))
    parts[1].write_text(json.dumps({"problems": entries[2:], "units": 132, "arch": "sm_90a"}))
    said = selection.release(parts, tmp_path / "a")
    assert said["problems"] == 3 and said["sha256"][:12] in said["file"]
    stored = tmp_path / "a" / said["file"]
    assert selection.release([stored], tmp_path / "b") == said
    assert (tmp_path / "b" / said["file"]).read_bytes() == stored.read_bytes()
    assert selection.read_measured([stored])["problems"] == entries
    parts[1].write_text(json.dumps({"arch": "sm_90a", "units": 78, "problems": []}))
    with pytest.raises(ValueError, match="78 units"):
        selection.read_measured(parts)
    parts[1].write_text(json.dumps({"arch": "sm_90a", "units": 132, "fresh": True, "problems": entries[2:]}))
    assert [e.get("fresh", False) for e in selection.read_measured(parts)["problems"]] == [False, False, True]


def test_what_is_printed_of_choices():
    summary = bench_module("selection").summary
    shares = [1.0] * 5 + [0.9, 0.8, 0.99, 0.5, 0.97]
    mean, median, tenth, least = summary(shares)
    assert (round(mean, 3), median, tenth, least) == (0.916, 0.995, 0.8, 0.5)
