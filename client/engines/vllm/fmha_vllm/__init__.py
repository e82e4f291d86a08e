# SPDX-License-Identifier: MIT
"""fmhad as an attention backend of vLLM, which finds this by itself once it is installed.

    vllm serve MODEL --attention-backend FMHA               # on a GPU; vLLM 0.31 has no place for new names: CUSTOM there
    vllm serve MODEL --attention-backend FMHA_MLA           # a model of latents, on a GPU, from vLLM 0.32 on
    FMHA_VLLM_CPU=1 python -m vllm.entrypoints.openai.api_server --model MODEL      # on a CPU, where vLLM knows one name only: that is taken

vLLM's interfaces move with every minor version: those of SUPPORTED are known, with another one the backend says so when it is
chosen, and everything else of vLLM goes on.
"""
from __future__ import annotations

import os

SUPPORTED = ("0.31", "0.32")
NAME, MLA_NAME = "FMHA", "FMHA_MLA"


def is_supported(version: str) -> bool:
    return ".".join(version.split("+")[0].split(".")[:2]) in SUPPORTED


def name() -> str:
    """What this vLLM can call it."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return NAME if hasattr(AttentionBackendEnum, "register") else "CUSTOM"


def register() -> None:
    """What vLLM calls in each of its processes, maybe more than once."""
    import vllm
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    def put(word: str, path: str) -> None:
        register_backend(AttentionBackendEnum[word] if word in AttentionBackendEnum.__members__ else word, path)

    path = "fmha_vllm.backend.FmhaBackend" if is_supported(vllm.__version__) else "fmha_vllm.unsupported.FmhaBackend"
    put(name(), path)
    if name() == NAME and is_supported(vllm.__version__):
        put(MLA_NAME, "fmha_vllm.mla.FmhaMlaBackend")
    if os.environ.get("FMHA_VLLM_CPU", "") not in ("", "0"):
        register_backend(AttentionBackendEnum.CPU_ATTN, path)
