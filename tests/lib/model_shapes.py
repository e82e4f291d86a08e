# SPDX-License-Identifier: MIT
"""Layers of today's models, by the published configurations: heads, heads of keys, head dimension(s), and what a layer has beside
them, as options of fmhactl. Plans for them are looked at offline (test_models.py); bench_gpu.py says what ran on a card."""

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
    "Gemma 4, global": (32, 4, 512, CAUSAL),
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


def words_of(layer):
    """Its options but for lengths."""
    heads, heads_k, dims, more = LAYERS[layer]
    dq, dv = dims if isinstance(dims, tuple) else (dims, dims)
    return f"-h {heads} -h_k {heads_k} -d {dq} -d_v {dv} {more}"
