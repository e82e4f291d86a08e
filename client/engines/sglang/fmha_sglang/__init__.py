# SPDX-License-Identifier: MIT
"""fmhad as an attention backend of SGLang, which finds this by itself once it is installed.

    python -m sglang.launch_server --model-path MODEL --attention-backend fmha
"""
from __future__ import annotations

NAME = "fmha"


def register() -> None:
    """What SGLang calls in each of its processes."""
    from sglang.srt.arg_groups.choices import add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend

    if NAME in ATTENTION_BACKENDS:
        return
    add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(make)


def make(runner):
    from .backend import FmhaAttnBackend

    return FmhaAttnBackend(runner)
