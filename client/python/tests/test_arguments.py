# SPDX-License-Identifier: MIT
"""Every argument of every public function, given what it cannot be: an error of the package, a TypeError or a ValueError, that names it."""
import inspect

import fmha
import numpy as np
import pytest

try:
    import fmha.flash_attn as fa
    import fmha.torch as ft
    import torch
except ImportError:
    torch = None


class Thing:
    def __repr__(self):
        return "Thing"


ARRAYS = (5, 2.5, "word", Thing(), {"a": 1}, object)
INTEGER_ARRAYS = (2.5, "word", Thing(), {"a": 1})
MASKS = (5, 2.5, "word", Thing(), {"a": 1}, np.ones((6, 6), np.float32), np.ones((2, 6), np.int32), np.ones((3, 7), np.int32))
FLAGS = ("yes", 7, 2.5, Thing(), [True])
NUMBERS = ("word", Thing(), [1.0], {}, float("nan"), float("inf"), 1j)
RATES = (*NUMBERS, -0.1, 1.0, 3)
COUNTS = ("word", Thing(), 2.5, [1], -1, 2**31)
WHOLES = ("word", Thing(), 2.5, [1])
WINDOWS = (5, "word", Thing(), (1,), (1, 2, 3), (1.5, 0), ("a", 0), 2.5)
WORDS = (5, "word", Thing(), ["bshd"])
PATHS = (5.5, Thing(), {})

KINDS = {
    **dict.fromkeys("q k v bias alibi_slopes sink q_descale k_descale v_descale out grad o lse dlse randval dq dk dv k_new v_new rotary_cos "
                    "rotary_sin o_parts lse_parts query key value attn_mask qkv kv k_cache v_cache x hidden_states attention_mask "
                    "kv_cache kv_new qv".split(), ARRAYS),
    **dict.fromkeys("cu_seqlens_q cu_seqlens_k seqlens_q seqlens_k seqused_q seqused_k leftpad_k cache_batch_idx block_table kv_indptr kv_page_indices "
                    "kv_last_page_len cu_seqlens cache_leftpad cache_seqlens slot_mapping positions indices".split(), INTEGER_ARRAYS),
    **dict.fromkeys("causal is_causal enable_gqa return_lse return_randval deterministic want_dbias return_attn_probs rotary_interleaved "
                    "return_softmax_lse descale_per_page find_descales slots softcap_approx".split(), FLAGS),
    **dict.fromkeys("scale softmax_scale softcap".split(), NUMBERS), "dropout_p": RATES,
    **dict.fromkeys("sink_tokens n_splits split_size num_splits descale_block_q descale_block_k hdim_v".split(), COUNTS),
    **dict.fromkeys("max_seqlen_q max_seqlen_k max_seqlen".split(), COUNTS[:-1]),  # flash-attn takes more than there is
    **dict.fromkeys("seed offset".split(), WHOLES), **dict.fromkeys("window window_size".split(), WINDOWS),
    **dict.fromkeys("align layout rotary".split(), WORDS), "lse_base": (5, "word", Thing(), None), "device": (5, "cpu", Thing()),
    "shape": ("word", Thing(), -1, (2, -1), (2.5,), None), "dtype": (5.5, "word", Thing()), "config": (5, "word", Thing()),
    "timeout": ("word", Thing()), "mask": MASKS, "path": PATHS, "index": ("word", 2.5, Thing(), -1), "name": (),
}
REQUIRED = "q k v query key value qkv kv grad o lse k_new v_new seqlens_k o_parts lse_parts k_cache v_cache kv_cache kv_new".split()


def told(value):
    return "an array" if isinstance(value, np.ndarray) else repr(value)


def rows(*shape, kind=np):
    return np.ones(shape, np.float32) if kind is np else torch.ones(shape)


def functions():
    """{name: (function, arguments that are right)}."""
    x, small = rows(2, 6, 4, 16), rows(2, 1, 4, 16)
    lse, lengths = rows(2, 4, 6), np.array([3, 4], np.int32)
    found = {
        "attention": (fmha.attention, dict(q=x, k=x, v=x)),
        "attention_backward": (fmha.attention_backward, dict(grad=x, q=x, k=x, v=x, o=x, lse=lse)),
        "append_kv": (fmha.append_kv, dict(k=x.copy(), v=x.copy(), k_new=small, v_new=small, seqlens_k=lengths)),
        "merge_states": (fmha.merge_states, dict(o_parts=rows(2, 2, 6, 4, 16), lse_parts=rows(2, 2, 4, 6))),
        "mla_decode": (fmha.mla_decode, dict(q=small, kv_cache=rows(2, 6, 16), hdim_v=8)),
        "mla_append": (fmha.mla_append, dict(kv_cache=rows(2, 6, 16), kv_new=rows(2, 1, 16), seqlens_k=lengths)),
        "empty": (fmha.empty, dict(shape=(2, 3))),
        "Device.empty": (fmha.default_client().device().empty, dict(shape=(2, 3))),
        "Client": (fmha.Client, {}), "Client.device": (fmha.default_client().device, dict(index=0)),
    }
    if torch is not None:
        x, small, flat = torch.ones(2, 6, 4, 16), torch.ones(2, 1, 4, 16), torch.ones(12, 4, 16)
        lengths, cu = torch.tensor([3, 4], dtype=torch.int32), torch.tensor([0, 6, 12], dtype=torch.int32)
        found |= {
            "torch.attention": (ft.attention, dict(q=x, k=x, v=x)),
            "sdpa": (ft.scaled_dot_product_attention, dict(query=x, key=x, value=x)),
            "flash_attn_func": (fa.flash_attn_func, dict(q=x, k=x, v=x)),
            "flash_attn_qkvpacked_func": (fa.flash_attn_qkvpacked_func, dict(qkv=torch.ones(2, 6, 3, 4, 16))),
            "flash_attn_kvpacked_func": (fa.flash_attn_kvpacked_func, dict(q=x, kv=torch.ones(2, 6, 2, 4, 16))),
            "flash_attn_varlen_func": (fa.flash_attn_varlen_func, dict(
                q=flat, k=flat, v=flat, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=6, max_seqlen_k=6)),
            "flash_attn_varlen_qkvpacked_func": (fa.flash_attn_varlen_qkvpacked_func, dict(
                qkv=torch.ones(12, 3, 4, 16), cu_seqlens=cu, max_seqlen=6)),
            "flash_attn_varlen_kvpacked_func": (fa.flash_attn_varlen_kvpacked_func, dict(
                q=flat, kv=torch.ones(12, 2, 4, 16), cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=6, max_seqlen_k=6)),
            "flash_attn_with_kvcache": (fa.flash_attn_with_kvcache, dict(q=small, k_cache=x, v_cache=x, cache_seqlens=lengths)),
        }
    return found


NAMES = ["attention", "attention_backward", "append_kv", "merge_states", "mla_decode", "mla_append", "empty", "Device.empty", "Client", "Client.device"]
if torch is not None:
    NAMES += ["torch.attention", "sdpa", *(n for n in fa.__all__ if n.startswith("flash_attn"))]


def test_every_public_function_is_here():
    public = {n for n in fmha.__all__ if inspect.isfunction(getattr(fmha, n))} - {"default_client", "start", "stop"}
    assert public <= set(functions())
    assert set(NAMES) == set(functions())


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_argument_is_named(name):
    function, right = functions()[name]
    result = function(**right)
    del result
    wrong = []
    for parameter in inspect.signature(function).parameters:
        if parameter not in KINDS:
            wrong.append(f"{parameter}: what it is is not known to this test")
        values = list(KINDS.get(parameter, ()))
        if parameter in REQUIRED and parameter in right:
            values.append(None)
        if torch is not None and function.__module__ in ("fmha.torch._functions", "fmha.flash_attn") and KINDS.get(parameter) is ARRAYS:
            values.append(np.ones((2, 6, 4, 16), np.float32))
        for value in values:
            try:
                function(**{**right, parameter: value})
                wrong.append(f"{parameter}={told(value)}: taken")
            except (fmha.FmhaError, TypeError, ValueError) as error:
                # Those that unpack something are told of by what they unpack.
                if parameter not in str(error) and parameter not in getattr(error, "field", ""):
                    wrong.append(f"{parameter}={told(value)}: {type(error).__name__}: {error}")
            except Exception as error:
                wrong.append(f"{parameter}={told(value)}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)


def test_types_that_differ_are_named():
    x = rows(2, 6, 4, 16)
    with pytest.raises(fmha.InvalidError, match=r"tensor\.[qk]"):
        fmha.attention(x, x.astype(np.float16), x)
    if torch is None:
        return
    x = torch.ones(2, 4, 6, 16)
    with pytest.raises(fmha.InvalidError, match="query holds torch.float32 and key torch.float16"):
        ft.scaled_dot_product_attention(x, x.half(), x)
    with pytest.raises(fmha.InvalidError, match="q holds torch.float32 and v torch.bfloat16"):
        fa.flash_attn_func(x, x, x.bfloat16())
    with pytest.raises(fmha.FmhaError, match="complex"):
        fa.flash_attn_func(*[x.to(torch.complex64)] * 3)


def test_sizes_beyond_32_bits_are_refused():
    q = np.zeros((1, 1, 1, 16), np.float32)
    keys = np.broadcast_to(q, (1, 2**31 + 5, 1, 16))
    with pytest.raises(fmha.InvalidError, match="a size of the problem"):
        fmha.attention(q, keys, keys)
