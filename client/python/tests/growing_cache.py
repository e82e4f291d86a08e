# SPDX-License-Identifier: MIT
"""Generation: one row over a cache that grows by one key a token, fmha beside torch's own attention, in one process.

    python3 client/python/tests/growing_cache.py            on the GPU where there is one, else on the CPU
    python3 client/python/tests/growing_cache.py --cpu
    python3 client/python/tests/growing_cache.py --generate    and a Llama of 8 layers, of transformers: 64 tokens after 1,000

Each line: milliseconds for 64 tokens of 8 layers. "grows": each token's keys are a new tensor, one longer, as transformers' dynamic
cache makes them; "stays": the same tensors' number, all as long as the first. Their difference is what new lengths cost. The bar is
torch's time, on a CPU plus one ping a call.
"""
import contextlib
import os
import statistics
import sys
import time

import fmha
import fmha.torch
import torch
from fmha._lib import check, lib, new_error

LAYERS, TOKENS, ROUNDS = 8, 64, 5
SHAPES = [(1, 32, 8, 128, 1000), (1, 8, 8, 64, 64), (1, 12, 12, 64, 1000), (8, 32, 8, 128, 250)]  # batch, heads, kv heads, hdim, keys
sdpa = torch.nn.functional.scaled_dot_product_attention


def ping_ms(n=200):
    client, error, times = fmha.default_client(), new_error(), []
    for _ in range(n):
        start = time.perf_counter()
        check(lib.fmha_client_ping(client.handle, error), error)
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def generation_ms(attend, batch, heads, kv_heads, hdim, first, step, device, dtype):
    """One generation: @step more keys with each token."""
    q = torch.randn(batch, heads, 1, hdim, device=device, dtype=dtype)
    longest = torch.randn(2, batch, kv_heads, first + TOKENS * abs(step), hdim, device=device, dtype=dtype)
    total = 0.0
    for token in range(TOKENS):
        caches = [longest[:, :, :, : first + token * step].contiguous() for _ in range(LAYERS)]
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for k, v in caches:
            attend(q, k, v, enable_gqa=heads != kv_heads)
        if device == "cuda":
            torch.cuda.synchronize()
        total += (time.perf_counter() - start) * 1e3
    return total


def generate(device, dtype):
    """Seconds of 64 tokens after 1,000: torch's attention, fmha's in its place, fmha as transformers' own."""
    import transformers

    hidden = 2048 if device == "cuda" else 256
    config = transformers.LlamaConfig(vocab_size=1000, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=LAYERS,
                                      num_attention_heads=hidden // 64, num_key_value_heads=hidden // 256,
                                      max_position_embeddings=4096, eos_token_id=None)
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config).to(dtype).eval()
    fmha.torch.enable_transformers()
    found = {"sdpa": [], "sdpa replaced": [], "fmhad": []}
    for turn in range(ROUNDS + 1):
        # Prompts of other lengths, as another request's.
        prompt = torch.randint(0, 1000, (1, 1000 + turn), device=device)
        for way, times in found.items():
            model.set_attn_implementation(way.split()[0])
            with fmha.torch.replace_sdpa() if "replaced" in way else contextlib.nullcontext():
                start = time.perf_counter()
                model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
                if device == "cuda":
                    torch.cuda.synchronize()
                if turn > 0:
                    times.append(time.perf_counter() - start)
    medians = {way: statistics.median(times) for way, times in found.items()}
    print("Llama, seconds: " + ", ".join(f"{way} {s:.3f} ({s / medians['sdpa']:.2f} of sdpa)" for way, s in medians.items()), flush=True)


def main():
    device = "cpu" if "--cpu" in sys.argv or not torch.cuda.is_available() else "cuda"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if "FMHAD_SOCKET" not in os.environ:
        fmha.start()
    if "--generate" in sys.argv:
        generate(device, dtype)
    ping = ping_ms() * LAYERS * TOKENS if device == "cpu" else 0.0
    ways = {"fmha grows": (fmha.torch.scaled_dot_product_attention, 1), "fmha stays": (fmha.torch.scaled_dot_product_attention, 0),
            "torch grows": (sdpa, 1), "torch stays": (sdpa, 0)}
    print(f"{device}, {dtype}, pings of as many calls {ping:.1f} ms\n{'batch, heads, kv, hdim, keys':32}" + "".join(f"{w:>14}" for w in ways)
          + f"{'of the bar':>14}")
    for shape in SHAPES:
        found = {way: [] for way in ways}
        for turn in range(ROUNDS + 1):
            for way, (attend, step) in ways.items():
                # Lengths that no generation before had: what is kept of those does not count.
                first = shape[4] + (0 if step == 0 else turn * TOKENS)
                with torch.no_grad():
                    ms = generation_ms(attend, *shape[:4], first, step, device, dtype)
                if turn > 0:
                    found[way].append(ms)
        medians = {way: statistics.median(times) for way, times in found.items()}
        print(f"{str(shape):32}" + "".join(f"{ms:14.1f}" for ms in medians.values())
              + f"{medians['fmha grows'] / (medians['torch grows'] + ping):14.2f}", flush=True)

    if device == "cuda":
        from fmha import _local

        print(f"plans made: {len(_local._plans)}")


if __name__ == "__main__":
    main()
