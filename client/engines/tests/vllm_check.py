#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""vLLM on the CPU serves a random model of three layers twice, by its own attention and by fmhad: the tokens have to be the same and the
log-probabilities within 1e-4 of each other.

    vllm_check.py [SCENARIO ...]        # all of vllm_serve.py's

Run it by the Python that has vLLM, fmha and fmha-vllm (docs/engines.md). A daemon is started, unless FMHAD_SOCKET names one.
"""
import json
import os
import pathlib
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
BAR = 1e-4
SCENARIOS = ("plain", "crowded", "compiled", "workers", "restart")


def make_model(folder, positions=512):
    """Random weights, and words for numbers: nothing is fetched."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    words = 160
    config = LlamaConfig(hidden_size=128, intermediate_size=192, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2,
                         head_dim=32, vocab_size=words, max_position_embeddings=positions, initializer_range=0.2, bos_token_id=0, eos_token_id=1,
                         pad_token_id=2, tie_word_embeddings=False)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(words)}, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="w0", eos_token="w1", pad_token="w2").save_pretrained(folder)


def serve(model, scenario, fmhad):
    """What vllm_serve.py says, in a process of its own."""
    # vLLM's threads wait by spinning: one, so that they do not fight the daemon's for the cores.
    environment = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", **os.environ, "FMHA_VLLM_CPU": "1" if fmhad else "0"}
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        done = subprocess.run([sys.executable, str(HERE / "vllm_serve.py"), model, scenario, out.name], env=environment,
                              capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{scenario}, {'fmhad' if fmhad else 'vLLM alone'}: it ended with {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-3000:]}")
        return json.load(out)


def differences(own, mine):
    """(what is not the same, the largest difference of a log-probability)."""
    wrong, largest = [], 0.0
    for part in ("first", "again"):
        for i, (a, b) in enumerate(zip(own.get(part, ()), mine.get(part, ()), strict=True)):
            if a["tokens"] != b["tokens"]:
                wrong.append(f"{part}, prompt {i}: {a['tokens']} and {b['tokens']}")
                continue
            for p, q in zip(a["logprobs"], b["logprobs"], strict=True):
                shared = p.keys() & q.keys()
                if len(shared) < len(p) - 1:  # the last of the best may change places with the next
                    wrong.append(f"{part}, prompt {i}: other tokens are likely, {sorted(p)} and {sorted(q)}")
                largest = max([largest, *(abs(p[t] - q[t]) for t in shared)])
    for i, (a, b) in enumerate(zip(own.get("beams", ()), mine.get("beams", ()), strict=True)):
        if [s["tokens"] for s in a] != [s["tokens"] for s in b]:
            wrong.append(f"beams of prompt {i}: {a} and {b}")
        else:
            largest = max([largest, *(abs(s["logprob"] - t["logprob"]) for s, t in zip(a, b))])
    if largest > BAR:
        wrong.append(f"log-probabilities differ by {largest}")
    return wrong, largest


def check(model, scenario):
    own, mine = serve(model, scenario, False), serve(model, scenario, True)
    wrong, largest = differences(own, mine)
    calls = mine.get("calls", {}).get("cache", 0)
    if calls == 0 or own.get("calls", {}).get("cache"):
        wrong.append(f"fmhad was asked {calls} times, and {own.get('calls')} without it")
    if scenario == "crowded" and not (mine["preemptions"] and mine["hits"] and own["preemptions"] and own["hits"]):
        wrong.append(f"nothing was preempted, or no prefix found: {[(x['preemptions'], x['hits']) for x in (own, mine)]}")
    n = sum(len(x["tokens"]) for part in ("first", "again") for x in mine.get(part, ()))
    said = f"{n} tokens, log-probabilities within {largest:.1e}, {calls} layers by fmhad"
    for name in ("preemptions", "hits"):
        if name in mine:
            said += f", {mine[name]:.0f} {name}"
    print(f"{scenario}: {'; '.join(wrong) or said}", flush=True)
    return not wrong


def main():
    scenarios = sys.argv[1:] or SCENARIOS
    import fmha
    import vllm

    print(f"vLLM {vllm.__version__}, fmha {fmha.__version__}")
    if "FMHAD_SOCKET" not in os.environ:
        fmha.start(config={"devices": [{"backend": "cpu", "threads": 2}]})
    with tempfile.TemporaryDirectory() as model:
        make_model(model)
        return 0 if all([check(model, s) for s in scenarios]) else 1


if __name__ == "__main__":
    sys.exit(main())
