# SPDX-License-Identifier: MIT
"""What a plan chooses on Hopper for the shapes of today's models: a loop made for it, or a reason that stands here. Offline, by
the catalogue and the model of times, so that a row, a rule or a fit that loses one of them is seen without a card.

Shapes are those of the models' published configurations: heads, heads of keys, head dimension(s)."""
import importlib
import json
import re
import subprocess
import sys

import pytest

import fmhad

CAUSAL = "--causal"


def window(left):
    return f"--mask bottom_right --window {left},0"


# name: heads, heads of keys, head dims, then what a layer has beside them
LAYERS = {
    "Llama 2 7B": (32, 32, 128, CAUSAL), "Llama 2 13B": (40, 40, 128, CAUSAL),
    "Llama 3 8B": (32, 8, 128, CAUSAL), "Llama 3 70B": (64, 8, 128, CAUSAL), "Llama 3.1 405B": (128, 8, 128, CAUSAL),
    "Llama 3.2 1B": (32, 8, 64, CAUSAL), "Llama 3.2 3B": (24, 8, 128, CAUSAL), "Llama 4 Scout": (40, 8, 128, CAUSAL),
    "Qwen 2.5 0.5B": (14, 2, 64, CAUSAL), "Qwen 2.5 7B": (28, 4, 128, CAUSAL), "Qwen 2.5 32B": (40, 8, 128, CAUSAL),
    "Qwen 3 0.6B": (16, 8, 128, CAUSAL), "Qwen 3 30B-A3B": (32, 4, 128, CAUSAL), "Qwen 3 235B-A22B": (64, 4, 128, CAUSAL),
    "Qwen 3 Next": (16, 2, 256, CAUSAL),
    "Gemma 2 2B": (8, 4, 256, f"{CAUSAL} --softcap 50"), "Gemma 2 2B, local": (8, 4, 256, f"{window(4095)} --softcap 50"),
    "Gemma 2 9B": (16, 8, 256, f"{CAUSAL} --softcap 50"), "Gemma 2 9B, local": (16, 8, 256, f"{window(4095)} --softcap 50"),
    "Gemma 2 27B": (32, 16, 128, f"{CAUSAL} --softcap 50"), "Gemma 2 27B, local": (32, 16, 128, f"{window(4095)} --softcap 50"),
    "Gemma 3 1B": (4, 1, 256, CAUSAL), "Gemma 3 4B, local": (8, 4, 256, window(1023)), "Gemma 3 12B": (16, 8, 256, CAUSAL),
    "Gemma 3 27B": (32, 16, 128, CAUSAL), "Gemma 3 27B, local": (32, 16, 128, window(1023)),
    "Mistral 7B": (32, 8, 128, window(4095)), "Mistral Small": (32, 8, 128, CAUSAL), "Mistral Large": (96, 8, 128, CAUSAL),
    "Mixtral 8x22B": (48, 8, 128, CAUSAL),
    "GPT-OSS": (64, 8, 64, f"{CAUSAL} --sink"), "GPT-OSS, local": (64, 8, 64, f"{window(127)} --sink"),
    "DeepSeek V3": (128, 128, (192, 128), CAUSAL),
    "Phi 3 mini": (32, 32, 96, CAUSAL), "Phi 4": (40, 10, 128, CAUSAL), "Falcon 7B": (71, 1, 64, CAUSAL),
    "Command R": (64, 8, 128, CAUSAL), "StarCoder 2 3B": (24, 2, 128, CAUSAL), "Grok 1": (48, 8, 128, f"{CAUSAL} --softcap 30"),
    "MPT 7B": (32, 32, 128, f"{CAUSAL} --alibi"), "BLOOM 7B": (32, 32, 128, f"{CAUSAL} --alibi"),
    "T5 large": (16, 16, 64, "--bias e:1"), "GPT-J, dropped": (16, 16, 256, f"{CAUSAL} --dropout 0.1"),
}
# name: heads, head dim, rows, keys
VISION = {
    "Whisper large, encoder": (20, 64, 1500, 1500), "Whisper large, cross": (20, 64, 448, 1500), "Whisper tiny, encoder": (6, 64, 1500, 1500),
    "ViT B/16": (12, 64, 197, 197), "ViT L/14": (16, 64, 257, 257), "ViT H/14": (16, 80, 257, 257), "SigLIP so400m": (16, 72, 729, 729),
    "DINOv2 g": (24, 64, 1370, 1370), "EVA g": (16, 88, 257, 257), "Stable Diffusion 3": (24, 64, 4250, 4250), "Flux": (24, 128, 4608, 4608),
}
# Layers that train: their backward, with the reason where no loop of Hopper's has it.
WIDE_BACKWARD = "no warpgroup of the wide loop has a raw product and its dP at once, which a soft cap and dropout need"
TRAINED = {
    "Llama 3 8B": None, "Llama 3.2 1B": None, "Qwen 3 Next": None, "Gemma 2 9B": WIDE_BACKWARD, "Gemma 2 27B": None, "Gemma 3 12B": None,
    "GPT-OSS": None, "DeepSeek V3": None, "Phi 3 mini": None, "MPT 7B": None, "T5 large": None, "GPT-J, dropped": WIDE_BACKWARD,
}


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


def words_of(layer):
    heads, heads_k, dims, more = LAYERS[layer]
    dq, dv = dims if isinstance(dims, tuple) else (dims, dims)
    return f"-h {heads} -h_k {heads_k} -d {dq} -d_v {dv} {more}"


@pytest.mark.parametrize("layer", LAYERS)
def test_prefill(layer):
    assert stage_of(f"forward -b 1 -s 8192 {words_of(layer)}", "fwd") == "gpu_wgmma"


@pytest.mark.parametrize("layer", [x for x in LAYERS if "dropped" not in x and "--bias" not in LAYERS[x][3]])
def test_a_chunk_over_pages(layer):
    assert stage_of(f"forward -b 4 -s 2048 -s_k 16384 --page-size 64 {words_of(layer)}", "fwd_pagedkv") == "gpu_wgmma"


PLAIN = [x for x in LAYERS if re.fullmatch(r"--causal( --s.*)?", LAYERS[x][3]) and LAYERS[x][0] <= 64]  # more fill a GPU with a tile each


@pytest.mark.parametrize("layer", PLAIN)
def test_few_rows_over_many_keys(layer):
    """The end of a prompt whose beginning is in the cache: splits, and no more where there are many sequences."""
    words = f"forward -s 100 -s_k 8192 --page-size 64 {words_of(layer)}"
    one, many = plan_of(f"{words} -b 1"), plan_of(f"{words} -b 64")
    assert stages_of(one) == [("fwd_splitkv", "gpu_wgmma"), ("fwd_splitkv_combine", "gpu_combine")] and one["n_splits"] > 1
    assert [pipeline for _, pipeline in stages_of(many)] == ["gpu_wgmma"] and many["n_splits"] == 0


@pytest.mark.parametrize("layer", PLAIN)
@pytest.mark.parametrize("pages", ["", "--page-size 16"])
@pytest.mark.parametrize("kind", ["e4m3", "int8"])
def test_a_cache_of_8_bits_is_widened_for_many_rows(layer, pages, kind):
    words = f"forward --kv-type {kind} --descale pt {words_of(layer)} {pages}"
    widen = ("fwd_appendkv", "gpu_append")
    long, few = plan_of(f"{words} -b 1 -s 8192"), plan_of(f"{words} -b 1 -s 100 -s_k 8192")
    assert long["widens"] and stages_of(long) == [widen, ("fwd", "gpu_wgmma")]
    assert few["widens"] and stages_of(few) == [widen, ("fwd_splitkv", "gpu_wgmma"), ("fwd_splitkv_combine", "gpu_combine")]
    assert not plan_of(f"{words} -b 1 -s 1 -s_k 8192")["widens"]


@pytest.mark.parametrize("kind", ["e4m3", "e5m2", "int8"])
def test_few_rows_read_8_bits_as_they_lie(kind):
    assert stage_of(f"forward --kv-type {kind} --descale pt -b 16 -h 32 -h_k 8 -s 1 -s_k 16384 --page-size 64", "fwd_splitkv") == "gpu_decode"


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
    """Where keys have factors of their own, where that took more memory than it is worth, and where another kernel is named."""
    words = "forward -h 32 -h_k 8 -s 2048 --kv-type e4m3 --causal"
    assert plan_of(f"{words} -b 1")["widens"]
    assert not plan_of(f"{words} -b 1 --page-size 16 --descale page")["widens"]
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

# Fitted before the rule that their data is a file of the release (CONTRIBUTING.md, "A model of a device's times").
WITHOUT_DATA = {"sm_90a"}


def bench_module(name):
    sys.path.insert(0, str(fmhad.ROOT / "tests/bench"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


def test_models_say_what_they_were_fitted_to():
    for path in (fmhad.ROOT / "specs/models").glob("*.json"):
        measured = json.loads(path.read_text()).get("measured")
        if path.stem in WITHOUT_DATA:
            assert measured is None, f"{path.stem} has its data now: take it off the list"
            continue
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
