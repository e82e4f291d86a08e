# SPDX-License-Identifier: MIT
"""What is chosen as FMHA with a vLLM that this does not know: a sentence."""
import vllm

from . import SUPPORTED

raise ImportError(f"fmha-vllm knows the attention interfaces of vLLM {' and '.join(SUPPORTED)}; this is {vllm.__version__}: "
                  "choose another --attention-backend, or one of those versions")
