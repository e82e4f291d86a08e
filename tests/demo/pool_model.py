# SPDX-License-Identifier: MIT
"""A small language model that serves from a pool: two layers with random weights, attention by fmhad, greedy tokens.

    pool_model.py POOL PROMPT_TOKENS NEW_TOKENS [--pause SECONDS]

Keys and values of both layers lie in pages of 16 tokens. What the pool has of the prompt is read, the rest is computed and sealed, a page
at a time; so are pages that fill up while tokens are generated. Prints "ready", waits for a line, then prints a line of JSON for the prompt and
one for each token. The prompt is a function of its length alone: its beginning is that of every longer one.
"""
import argparse
import json
import os
import sys
import time

import numpy as np

LAYERS, HEADS, KV_HEADS, HDIM, PAGE, VOCABULARY = 2, 8, 2, 64, 16, 512
WIDTH, CAUSE, CHUNK = HEADS * HDIM, "tests/demo/pool_model.py, seed 7", 512


def prompt_of(n):
    return [int(t) for t in np.random.default_rng(5).integers(0, VOCABULARY, n)]


class Model:
    def __init__(self):
        rng = np.random.default_rng(7)

        def weights(*shape):
            return (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)

        self.embedding = weights(VOCABULARY, WIDTH) * np.float32(np.sqrt(VOCABULARY))
        self.layers = [{name: weights(WIDTH, width) for name, width in
                        (("q", WIDTH), ("k", KV_HEADS * HDIM), ("v", KV_HEADS * HDIM), ("o", WIDTH), ("up", 4 * WIDTH))}
                       | {"down": weights(4 * WIDTH, WIDTH)} for _ in range(LAYERS)]

    @staticmethod
    def norm(x):
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(1e-6))

    @staticmethod
    def times(x, weights):
        """Row by row, so that a token's numbers do not depend on how many are computed beside it."""
        return np.stack([row @ weights for row in x])

    def forward(self, tokens, start, pages, numbers):
        """Writes the tokens' keys and values, reads all before them; the next token after the last."""
        import fmha

        at = np.arange(start, start + len(tokens))
        page, row = np.asarray(numbers, dtype=np.int32)[at // PAGE], at % PAGE
        # A position's mark in place of rotations: what matters here is that a token depends on where it stands.
        x = self.embedding[tokens] + np.sin(at[:, None] / 1e4 ** (np.arange(WIDTH) / WIDTH)).astype(np.float32)
        table = np.asarray([numbers], dtype=np.int32)
        for number, w in enumerate(self.layers):
            h = self.norm(x)
            q = self.times(h, w["q"]).reshape(1, len(tokens), HEADS, HDIM)
            pages[page, number, 0, row] = self.times(h, w["k"]).reshape(-1, KV_HEADS, HDIM)
            pages[page, number, 1, row] = self.times(h, w["v"]).reshape(-1, KV_HEADS, HDIM)
            o = fmha.attention(q, pages[:, number, 0], pages[:, number, 1], causal=True, block_table=table, n_splits=1,
                               seqlens_k=np.asarray([start + len(tokens)], dtype=np.int32), max_seqlen_k=len(numbers) * PAGE)
            x = x + self.times(o[0].reshape(len(tokens), WIDTH), w["o"])
            x = x + self.times(np.maximum(self.times(self.norm(x), w["up"]), 0), w["down"])
        return int((self.norm(x[-1:]) @ self.embedding.T).argmax())


class Sequence:
    """Tokens with their pages: those found in the pool, then leased ones, which are sealed when they are full."""

    def __init__(self, pool, tokens):
        from fmha.pool import chain_keys

        self.pool, self.tokens, self.keys_of = pool, list(tokens), chain_keys
        # The last token is always computed: what comes after it is asked for.
        self.pages = pool.find(self.keys()[:(len(tokens) - 1) // PAGE])
        self.hits = self.sealed = len(self.pages)
        self.spare = []

    def keys(self):
        return self.keys_of(self.tokens, PAGE, CAUSE)

    def make_room(self, n_tokens):
        while len(self.pages) * PAGE < n_tokens:
            if not self.spare:
                self.spare = self.pool.lease(32)  # many at once: most tokens ask the daemon nothing
                if not self.spare:
                    raise SystemExit("the pool is full")
            self.pages.append(self.spare.pop(0))

    def seal(self, n_tokens):
        full = n_tokens // PAGE
        if full > self.sealed:
            fresh = self.pages[self.sealed:full]
            published = self.pool.seal(fresh, self.keys()[self.sealed:full])
            mine = [page for page, other in zip(fresh, published) if page != other]
            self.pages[self.sealed:full] = published  # where somebody was faster, theirs is read from now on
            self.pool.give_back(mine)
            self.sealed = full


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("pool")
    parser.add_argument("prompt", type=int)
    parser.add_argument("new", type=int)
    parser.add_argument("--pages", type=int, default=2048)
    parser.add_argument("--pause", type=float, default=0)
    o = parser.parse_args()
    import fmha
    from fmha.pool import Pool

    model = Model()
    pool = Pool(o.pool, (LAYERS, 2, PAGE, KV_HEADS, HDIM), pages=o.pages, layout=CAUSE)
    print(json.dumps({"ready": os.getpid(), "created": pool.created}), flush=True)
    sys.stdin.readline()
    begin = time.perf_counter()
    sequence = Sequence(pool, prompt_of(o.prompt))
    done, token = sequence.hits * PAGE, None
    while done < o.prompt:
        some = min(CHUNK, o.prompt - done)
        sequence.make_room(done + some)
        token = model.forward(sequence.tokens[done:done + some], done, pool.pages, sequence.pages)
        done += some
        sequence.seal(done)
    print(json.dumps({"token": token, "hits": sequence.hits, "first_token_s": time.perf_counter() - begin}), flush=True)
    for _ in range(o.new - 1):
        sequence.tokens.append(token)
        sequence.make_room(done + 1)
        token = model.forward([token], done, pool.pages, sequence.pages)
        done += 1
        sequence.seal(done)
        print(json.dumps({"token": token}), flush=True)
        if o.pause:
            time.sleep(o.pause)
    pool.close()


if __name__ == "__main__":
    main()
