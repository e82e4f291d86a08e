#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Two vLLM processes on the CPU and one pool: what the first has computed of a prompt the second copies, also when the first is killed.

    vllm_pool.py [--prompt 8192]

Each server is a process of its own with the connector of fmha_vllm.pool and fmhad as its attention. Judged: the second's time to the first
token of a prompt whose first --prompt tokens the first has seen, at most 0.15 of the first's; after SIGKILL of a server in the middle of
its tokens, its successor's from being ready to the first token, under 1.0 s; and all tokens, which are those of a server without
a pool. Run it by the Python that has vLLM, fmha and fmha-vllm (docs/engines.md).
"""
import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

from vllm_check import make_model

HERE = pathlib.Path(__file__).resolve()
WARM_BAR, RECOVERY_BAR_S = 0.15, 1.0
TOKENS = 24


def prompt_of(seed, n, vocabulary=160):
    import random

    draw = random.Random(seed)
    return [draw.randrange(3, vocabulary) for _ in range(n)]


# ---- a server ----


def serve(model, length, pool):
    """Lines of JSON: {"prompt": [...], "n": ...} in, what came of it out, a line for each token."""
    from vllm import LLM, SamplingParams, TokensPrompt

    transfer = {"kv_connector": "FmhaPoolConnector", "kv_connector_module_path": "fmha_vllm.pool", "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"pool": pool, "pages": 2048}}
    llm = LLM(model=model, dtype="float32", seed=0, max_model_len=length, max_num_seqs=4, enforce_eager=True, block_size=16,
              enable_prefix_caching=True, num_gpu_blocks_override=2 * length // 16, max_num_batched_tokens=1024,
              kv_transfer_config=transfer if pool else None)
    engine = llm.llm_engine
    counts = sys.modules["fmha_vllm.pool"].counts if pool else {}
    # What a server does before it says that it is ready: one request, so that nothing is done for the first time.
    llm.generate([TokensPrompt(prompt_token_ids=prompt_of(99, 40))], SamplingParams(max_tokens=2, detokenize=False), use_tqdm=False)
    say({"ready": os.getpid()})
    for number, line in enumerate(sys.stdin):
        asked, done, before, begin = json.loads(line), 0, dict(counts), time.perf_counter()
        engine.add_request(str(number), TokensPrompt(prompt_token_ids=asked["prompt"]),
                           SamplingParams(temperature=0.0, max_tokens=asked["n"], ignore_eos=True, detokenize=False))
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens = output.outputs[0].token_ids
                for token in tokens[done:]:
                    say({"token": token, "s": time.perf_counter() - begin, "counts": {k: n - before.get(k, 0) for k, n in counts.items()}})
                done = len(tokens)
        say({"end": True})


def say(found):
    out.write(json.dumps(found) + "\n")
    out.flush()


# ---- the check ----


class Server:
    def __init__(self, model, length, pool):
        environment = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                       "VLLM_CPU_KVCACHE_SPACE": "1", **os.environ, "FMHA_VLLM_CPU": "1"}
        self.log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen([sys.executable, str(HERE), "--serve", model, str(length), pool], env=environment,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True)
        self.read()

    def read(self):
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            sys.exit(f"a server ended with {self.process.wait()}:\n{self.log.read()[-3000:]}")
        return json.loads(line)

    def ask(self, prompt, n, until=None):
        """What it said of each token, all or the first @until."""
        self.process.stdin.write(json.dumps({"prompt": prompt, "n": n}) + "\n")
        self.process.stdin.flush()
        found = []
        while until is None or len(found) < until:
            line = self.read()
            if "end" in line:
                break
            found.append(line)
        return found

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def tokens(found):
    return [line["token"] for line in found]


def check(prompt_tokens):
    import fmha

    if "FMHAD_SOCKET" not in os.environ:
        fmha.start(config={"devices": [{"backend": "cpu", "threads": 2}]})
    length = prompt_tokens + 256
    common = prompt_of(1, prompt_tokens)
    first_prompt, second_prompt = common + prompt_of(2, 20), common + prompt_of(3, 24)
    with tempfile.TemporaryDirectory() as model:
        make_model(model, positions=length)
        alone = Server(model, length, "")
        wanted = [tokens(alone.ask(p, TOKENS)) for p in (first_prompt, second_prompt)]
        alone.end()
        first = Server(model, length, "check")
        second = Server(model, length, "check")
        cold = first.ask(first_prompt, TOKENS)
        warm = second.ask(second_prompt, TOKENS)
        second.end()
        again = first.ask(common + prompt_of(4, 30), 200, until=40)  # killed in the middle of these
        successor = Server(model, length, "check")
        first.kill()
        after = successor.ask(first_prompt, TOKENS)
        successor.end()
    ratio, pages = warm[0]["s"] / cold[0]["s"], prompt_tokens // 16
    wrong = []
    if [tokens(cold), tokens(warm)] != wanted or tokens(after) != wanted[0] or len(again) != 40:
        wrong.append(f"other tokens: {tokens(cold)}, {tokens(warm)}, {tokens(after)}; wanted {wanted}")
    if warm[0]["counts"].get("loaded") != pages or after[0]["counts"].get("loaded", 0) < pages:
        wrong.append(f"{pages} pages were to be found: {warm[0]['counts']}, {after[0]['counts']}")
    if ratio > WARM_BAR or after[0]["s"] > RECOVERY_BAR_S:
        wrong.append("too slow")
    print(f"a common prefix of {prompt_tokens} tokens, {pages} pages: first token after {cold[0]['s']:.2f} s cold, {warm[0]['s']:.3f} s in another "
          f"process: {ratio:.3f} of it (at most {WARM_BAR}); after a SIGKILL the successor's after {after[0]['s']:.3f} s "
          f"(under {RECOVERY_BAR_S}): {'; '.join(wrong) or 'all tokens are those of a server without a pool'}")
    return 1 if wrong else 0


def main():
    global out
    if sys.argv[1:2] == ["--serve"]:
        out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # vLLM writes what it likes
        serve(sys.argv[2], int(sys.argv[3]), sys.argv[4])
        return 0
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompt", type=int, default=8192)
    return check(parser.parse_args().prompt)


if __name__ == "__main__":
    sys.exit(main())
