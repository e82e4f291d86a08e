#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""A pool of a card's memory: a process fills it, is killed with SIGKILL in the middle of a step, the worker too, and its successor goes on.

    FMHA_BIN=... python3 tests/gpu/pool.py [--tokens 8192]

A model of drawn weights and the extents of one of 6 billion (32 layers, width 4,096, 32 heads on 8, bf16) generates from a prompt of so many tokens. Said are the times from a
process being ready (weights drawn, kernels loaded by a prompt of its own) to its first token: cold, beside a living process that has
the prefix, and after both deaths; tokens have to be the same ones, and what the dead had leased free again.
"""
import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "lib"))
os.environ["FMHA_BUILD"] = os.environ.get("FMHA_BIN") or os.environ.get("FMHA_BUILD", "build/release")

LAYERS, WIDTH, HEADS, KV_HEADS, HDIM, PAGE, WORDS, CHUNK = 32, 4096, 32, 8, 128, 16, 32000, 2048
GENERATED = 16


class Model:
    def __init__(self):
        import torch

        self.torch = torch
        generator = torch.Generator("cuda").manual_seed(7)

        def drawn(*shape):
            return torch.randn(shape, device="cuda", generator=generator, dtype=torch.bfloat16) * shape[-1] ** -0.5

        self.words = drawn(WORDS, WIDTH) * WIDTH**0.5
        self.layers = [(drawn((HEADS + 2 * KV_HEADS) * HDIM, WIDTH), drawn(WIDTH, HEADS * HDIM), drawn(4 * WIDTH, WIDTH), drawn(WIDTH, 4 * WIDTH))
                       for _ in range(LAYERS)]
        turns = torch.arange(WIDTH // 2, device="cuda") / (WIDTH // 2)
        self.turns = 10000.0**-turns

    def step(self, tokens, start, pages, table):
        """The next token behind @tokens, whose first has the position @start; their keys and values go to the table's pages."""
        torch = self.torch
        from fmha.flash_attn import flash_attn_with_kvcache

        at = torch.arange(start, start + len(tokens), device="cuda")
        angles = at[:, None] * self.turns
        x = self.words[torch.tensor(tokens, device="cuda")] + torch.cat([angles.sin(), angles.cos()], -1).to(torch.bfloat16)
        slots, used = (table[at // PAGE], at % PAGE), torch.tensor([start + len(tokens)], device="cuda", dtype=torch.int32)
        for i, (qkv, out, up, down) in enumerate(self.layers):
            q, k, v = (torch.nn.functional.rms_norm(x, (WIDTH,)) @ qkv.T).split([HEADS * HDIM, KV_HEADS * HDIM, KV_HEADS * HDIM], -1)
            pages[:, i, 0][slots], pages[:, i, 1][slots] = k.unflatten(-1, (KV_HEADS, HDIM)), v.unflatten(-1, (KV_HEADS, HDIM))
            o = flash_attn_with_kvcache(q.view(1, -1, HEADS, HDIM), pages[:, i, 0], pages[:, i, 1], cache_seqlens=used,
                                        block_table=table[None].int(), causal=True)
            x = x + o.view(len(tokens), -1) @ out.T
            x = x + torch.nn.functional.silu(torch.nn.functional.rms_norm(x, (WIDTH,)) @ up.T) @ down.T
        return int((x[-1] @ self.words.T).argmax())


class Server:
    def __init__(self):
        from fmha.pool import Pool

        self.model = Model()
        self.pool = Pool("served", (LAYERS, 2, PAGE, KV_HEADS, HDIM), "bfloat16", pages=2048, layout="drawn, 32 layers", device="cuda:0")

    def generate(self, prompt, seal=True):
        """(tokens, seconds to the first, pages that were there). Whole pages are computed by chunks, and the rest always by itself."""
        from fmha.pool import chain_keys

        start, torch = time.perf_counter(), self.model.torch
        keys = chain_keys(prompt[:-1], PAGE, cause="drawn weights, 7")
        table = self.pool.find(keys)
        found = len(table)
        spare = self.pool.lease(len(keys) - found + 1 + -(-GENERATED // PAGE) + 1)
        numbers = torch.tensor(table + spare, device="cuda")
        for at in range(found * PAGE, len(keys) * PAGE, CHUNK):
            self.model.step(prompt[at:min(at + CHUNK, len(keys) * PAGE)], at, self.pool.pages, numbers)
        tokens = [self.model.step(prompt[len(keys) * PAGE:], len(keys) * PAGE, self.pool.pages, numbers)]
        first = time.perf_counter() - start
        fresh = len(keys) - found
        if seal:
            sealed = self.pool.seal(spare[:fresh], keys[found:])
            assert sealed == spare[:fresh]
        for _ in range(GENERATED - 1):
            tokens.append(self.model.step(tokens[-1:], len(prompt) + len(tokens) - 1, self.pool.pages, numbers))
        self.pool.give_back(table + spare)
        return tokens, first, found


def serve(n):
    """Answers each line, a seed, by what came of the prompt of that seed; "on" makes it write without an end."""
    import random

    def prompt(seed):
        draw = random.Random(seed)
        return [draw.randrange(WORDS) for _ in range(n)]

    server = Server()
    server.generate(prompt("its own " + str(os.getpid())), seal=False)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        if line.strip() == "on":
            print(json.dumps({"on": True}), flush=True)
            while True:
                server.generate(prompt(time.time()), seal=False)
        tokens, first, found = server.generate(prompt(line.strip()))
        print(json.dumps({"tokens": tokens, "first_s": first, "found": found}), flush=True)


class Process:
    def __init__(self, socket, n):
        self.child = subprocess.Popen([sys.executable, __file__, "--serve", "--tokens", str(n)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                      text=True, env={**os.environ, "FMHAD_SOCKET": socket})
        start = time.time()
        self.hear()
        self.ready_s = time.time() - start

    def hear(self):
        line = self.child.stdout.readline()
        if not line:
            raise RuntimeError("the process ended")
        return json.loads(line)

    def ask(self, word):
        self.child.stdin.write(word + "\n")
        self.child.stdin.flush()
        return self.hear()

    def kill(self):
        self.child.send_signal(signal.SIGKILL)
        self.child.wait()

    def end(self):
        self.child.stdin.close()
        self.child.wait(60)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.tokens)
    import fmhad

    config, failed = fmhad.gpu_config("cuda"), 0

    def said(what, holds, shown):
        nonlocal failed
        failed += not holds
        print(f"{what:<60} {'ok' if holds else 'FAILED':<7} {shown}", flush=True)

    with fmhad.Daemon({**config, "limits": {"pool_bytes_per_uid": 8 << 30}}) as daemon:
        first = Process(daemon.socket, args.tokens)
        cold = first.ask("prompt")
        beside = Process(daemon.socket, args.tokens)
        warm = beside.ask("prompt")
        whole = (args.tokens - 1) // PAGE
        said("a second process finds the whole prefix, tokens the same", warm["found"] == whole and warm["tokens"] == cold["tokens"],
             f"first token {warm['first_s'] * 1e3:.1f} ms, cold {cold['first_s'] * 1e3:.1f}: {warm['first_s'] / cold['first_s']:.2f}")
        beside.end()
        first.ask("on")
        time.sleep(0.3)
        first.kill()
        os.kill(daemon.worker_pid(), signal.SIGKILL)
        start = time.time()
        after = Process(daemon.socket, args.tokens)
        again = after.ask("prompt")
        said("after SIGKILL of it and of the worker", again["found"] == whole and again["tokens"] == cold["tokens"],
             f"first token {again['first_s'] * 1e3:.1f} ms after being ready, which took {after.ready_s:.1f} s")
        pools = [pool for pool in daemon.status()["front"]["pools"] if pool["name"] == "served"]
        held = pools[0]["leased"] + pools[0]["lost"]
        said("what the dead had leased is free again", held == 0, f"{held} pages, {time.time() - start:.1f} s after")
        after.end()
    return failed


if __name__ == "__main__":
    sys.exit(main())
