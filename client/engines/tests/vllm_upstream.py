#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""vLLM's own tests/v1/attention/test_attention_backends.py, its cases run on FMHA, on the CPU or a GPU.

    vllm_upstream.py [FOLDER] [option of pytest ...]      # -k "not large" by default: the others are long on a CPU

FOLDER, or $VLLM_TESTS, is vLLM's source, with that file in it (PyPI's sdist has it); nothing of it is kept here. Each case makes
a paged cache, has a backend's builder, cache update and forward work on it, and judges by FlexAttention. Here the backend is FMHA
whatever the case names, and models, of which only the configurations matter, are local ones of the same kind: nothing is fetched.
fp8 caches are left out: FMHA has none.
"""
import os
import pathlib
import sys
import tempfile

import pytest
import torch

TESTS = "causal_backend_correctness or sliding_window or non_causal_backend"


def _models(folder):
    """What the file calls models -> a folder with a configuration."""
    from transformers import Gemma3TextConfig, LlamaConfig, MistralConfig

    configs = {
        "meta-llama/Meta-Llama-3-8B": LlamaConfig(
            hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, num_hidden_layers=1, vocab_size=64, max_position_embeddings=8192,
            architectures=["LlamaForCausalLM"], dtype="bfloat16"),
        "microsoft/Phi-tiny-MoE-instruct": MistralConfig(
            hidden_size=2048, num_attention_heads=16, num_key_value_heads=4, num_hidden_layers=1, vocab_size=64, sliding_window=500,
            max_position_embeddings=8192, architectures=["MistralForCausalLM"], dtype="bfloat16"),
        "google/embeddinggemma-300m": Gemma3TextConfig(
            hidden_size=768, num_attention_heads=3, num_key_value_heads=1, head_dim=256, num_hidden_layers=1, vocab_size=64, sliding_window=128,
            max_position_embeddings=2048, use_bidirectional_attention=True, architectures=["Gemma3TextModel"], dtype="bfloat16"),
    }
    found = {}
    for name, config in configs.items():
        found[name] = str(pathlib.Path(folder, name.split("/")[1]))
        config.save_pretrained(found[name])
    return found


class Plugin:
    def __init__(self, models):
        self.models, self.done = models, 0

    @pytest.fixture
    def default_vllm_config(self):
        from vllm.config import VllmConfig, set_current_vllm_config

        config = VllmConfig()
        with set_current_vllm_config(config):
            yield config

    def pytest_collection_modifyitems(self, items):
        for module in {item.module for item in items}:
            self._turn(module)

    def _turn(self, module):
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        own, config, plugin, seen = module._test_backend_correctness, module.ModelConfig, self, set()

        def correctness(batch_spec, model, backend_to_test, mask_mod, **words):
            if words.get("kv_cache_dtype", "auto") != "auto":
                pytest.skip("FMHA has no fp8 cache")
            key = os.environ.get("PYTEST_CURRENT_TEST")
            if key in seen:
                return  # the file gives each block size its own backends: the same again
            seen.add(key)
            from fmha_vllm import backend

            before = sum(backend.calls.values())
            own(batch_spec, plugin.models.get(model, model), [AttentionBackendEnum["FMHA"]], mask_mod, **words)
            assert sum(backend.calls.values()) > before, "fmhad was not asked"
            plugin.done += 1

        module._test_backend_correctness = correctness
        module.ModelConfig = lambda model, **words: config(model=plugin.models.get(model, model), **words)


def main():
    arguments = sys.argv[1:]
    folder = arguments.pop(0) if arguments and not arguments[0].startswith("-") else os.environ.get("VLLM_TESTS")
    if not folder:
        sys.exit("which tests? Give vLLM's source, or set VLLM_TESTS")
    folder = pathlib.Path(folder).resolve()
    sys.path.insert(0, str(folder))
    import fmha
    import fmha_vllm

    fmha_vllm.register()
    if "FMHAD_SOCKET" not in os.environ:
        fmha.start(config={"devices": [{"backend": "cpu", "threads": 2}]} if not torch.cuda.is_available() else {})
    chosen = f"({TESTS})" + ("" if torch.cuda.is_available() else " and not large and not medium_encoder")
    with tempfile.TemporaryDirectory() as models:
        plugin = Plugin(_models(models))
        code = pytest.main([str(folder / "tests/v1/attention/test_attention_backends.py"), "--noconftest", "-q", "-rs", "-p", "no:cacheprovider",
                            "-k", chosen, "-W", "ignore", "--show-capture=no", "--tb=short", *arguments], plugins=[plugin])
    print(f"{plugin.done} cases by fmhad")
    return code or (0 if plugin.done else 1)


if __name__ == "__main__":
    sys.exit(main())
