#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""A random model served by vLLM on the CPU: tokens and log-probabilities as JSON. Run by vllm_check.py, with and without fmhad.

    vllm_serve.py MODEL SCENARIO OUT
"""
import json
import os
import subprocess
import sys
import tempfile
import time

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine's counters are this process' then
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # workers are asked by a function
os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")

import torch  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402

N_TOKENS = 24


def prompts(seed, lengths, vocabulary, prefix=0):
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randint(3, vocabulary, (prefix,), generator=generator).tolist()
    return [{"prompt_token_ids": shared + torch.randint(3, vocabulary, (n,), generator=generator).tolist()} for n in lengths]


def told(outputs):
    return [{"tokens": list(o.outputs[0].token_ids),
             "logprobs": [{str(t): p.logprob for t, p in step.items()} for step in o.outputs[0].logprobs]} for o in outputs]


SCENARIOS = {
    "plain": dict(enable_prefix_caching=False),
    # Long prompts in parts of 64 tokens, a prefix that three of them share, asked twice; blocks for two of the sequences at a time.
    "crowded": dict(enable_prefix_caching=True, enable_chunked_prefill=True, max_num_batched_tokens=64, num_gpu_blocks_override=8, block_size=32),
    "compiled": dict(enable_prefix_caching=False, enforce_eager=False),
    # Two workers, spawned: each has half of the heads, and a connection of its own.
    "workers": dict(enable_prefix_caching=False, tensor_parallel_size=2, distributed_executor_backend="mp"),
    # The daemon is killed and started again between two batches.
    "restart": dict(enable_prefix_caching=False),
}


class Daemon:
    """One that can be killed."""

    def __init__(self):
        from fmha import _start

        self.folder = tempfile.TemporaryDirectory(prefix="fmha-")
        os.environ["FMHAD_SOCKET"] = self.socket = f"{self.folder.name}/fmhad.sock"
        config = f"{self.folder.name}/fmhad.json"
        with open(config, "w") as file:
            json.dump({"socket": self.socket, "devices": [{"backend": "cpu", "threads": 1}]}, file)
        self.command = [_start.program("fmhad"), "--config", config]
        self.start()

    def start(self):
        import fmha

        self.process = subprocess.Popen(self.command, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 20
        while True:
            try:
                return fmha.Client(self.socket).close()
            except fmha.UnreachableError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)

    def kill(self):
        self.process.kill()
        self.process.wait()


def asked_of_fmhad(_):
    """In a worker: what its fmhad was asked."""
    return dict(sys.modules["fmha_vllm.backend"].calls) if "fmha_vllm.backend" in sys.modules else {}


def preemptions(llm):
    return sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")


def hits(llm):
    return sum(m.value for m in llm.get_metrics() if m.name == "vllm:prefix_cache_hits")


def main():
    model, scenario, out = sys.argv[1:]
    options = dict(SCENARIOS[scenario])
    options.setdefault("enforce_eager", True)
    daemon = Daemon() if scenario == "restart" else None
    llm = LLM(model=model, dtype="float32", seed=0, max_model_len=128, max_num_seqs=4, disable_log_stats=False, **options)
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    sampling = SamplingParams(temperature=0.0, max_tokens=N_TOKENS, logprobs=5, ignore_eos=True, detokenize=False)
    found = {"scenario": scenario}
    if scenario == "crowded":
        asked = prompts(1, (7, 21, 3, 40), vocabulary, prefix=50)
        found["first"] = told(llm.generate(asked, sampling, use_tqdm=False))
        found["again"] = told(llm.generate(asked, sampling, use_tqdm=False))
        found["preemptions"], found["hits"] = preemptions(llm), hits(llm)
    else:
        asked = prompts(0, (5, 33, 17, 64), vocabulary)
        found["first"] = told(llm.generate(asked, sampling, use_tqdm=False))
    if daemon is not None:
        daemon.kill()
        daemon.start()
        found["again"] = told(llm.generate(prompts(2, (9, 40), vocabulary), sampling, use_tqdm=False))
        daemon.kill()
    if scenario == "plain":
        from vllm.sampling_params import BeamSearchParams

        beams = llm.beam_search(asked[:2], BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True))
        found["beams"] = [[{"tokens": list(s.tokens), "logprob": s.cum_logprob} for s in b.sequences] for b in beams]
    if scenario == "workers":
        each = llm.collective_rpc(asked_of_fmhad)
        found["calls"] = {"cache": min(calls.get("cache", 0) for calls in each)}
    elif "fmha_vllm.backend" in sys.modules:
        found["calls"] = dict(sys.modules["fmha_vllm.backend"].calls)
    with open(out, "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
