# SPDX-License-Identifier: MIT
"""What callers say, judged by itself before it is put together: a wrong argument is a sentence that names it."""
from __future__ import annotations

import math
import numbers
import operator

import numpy as np

from . import _arrays
from ._lib import invalid


def _told(value) -> str:
    if isinstance(value, (str, numbers.Number)) or (isinstance(value, (tuple, list)) and len(value) < 4):
        said = repr(value)
        return f"{said if len(said) <= 60 else said[:57] + '...'}"
    return f"a {type(value).__name__}"


def flag(value, name: str) -> None:
    if not isinstance(value, (bool, np.bool_)) and not (isinstance(value, int) and value in (0, 1)):
        raise invalid(f"{name} is {_told(value)}: True or False", name)


def number(value, name: str) -> None:
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise invalid(f"{name} is {_told(value)}: a finite number", name)


def number_or_none(value, name: str) -> None:
    if value is not None and (not isinstance(value, numbers.Real) or not math.isfinite(value)):
        raise invalid(f"{name} is {_told(value)}: a finite number, or None", name)


def probability(value, name: str) -> None:
    if not isinstance(value, numbers.Real) or isinstance(value, bool) or not 0 <= value < 1:
        raise invalid(f"{name} is {_told(value)}: a number from 0 to below 1", name)


def _is_whole(value) -> bool:
    if type(value) is int:  # nearly always, and what follows costs a microsecond
        return True
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool) and np.ndim(value) == 0


def count(value, name: str) -> None:
    if not _is_whole(value) or not 0 <= operator.index(value) < 2**31:
        raise invalid(f"{name} is {_told(value)}: a whole number, 0 or more", name)


def count_or_none(value, name: str) -> None:
    if value is not None:
        count(value, name)


def whole(value, name: str) -> None:
    if not _is_whole(value):
        raise invalid(f"{name} is {_told(value)}: a whole number", name)


def whole_or_none(value, name: str) -> None:
    if value is not None:
        whole(value, name)


def window(value, name: str) -> None:
    if not isinstance(value, (tuple, list)) or len(value) != 2 or not all(w is None or _is_whole(w) for w in value):
        raise invalid(f"{name} is {_told(value)}: two whole numbers, (left, right), each -1 for all", name)


def layout(value, name: str) -> None:
    if value not in ("bshd", "bhsd", "sbhd"):
        raise invalid(f"{name} is {_told(value)}: bshd, bhsd or sbhd", name)


def align(value, name: str) -> None:
    if value not in ("bottom_right", "top_left"):
        raise invalid(f"{name} is {_told(value)}: bottom_right or top_left", "mask")


def extents(value, name: str) -> tuple:
    """@value, one number or several, as a tuple."""
    found = (value,) if _is_whole(value) else value
    if not isinstance(found, (tuple, list)) or not all(_is_whole(n) and operator.index(n) >= 0 for n in found):
        raise invalid(f"{name} is {_told(value)}: whole numbers, 0 or more", name)
    return tuple(map(operator.index, found))


def is_a(value, kind: type, name: str, how: str) -> None:
    if value is not None and not isinstance(value, kind):
        raise invalid(f"{name} is {_told(value)}: {how}, or None", name)


WORDS = {
    "causal": flag, "is_causal": flag, "enable_gqa": flag, "deterministic": flag, "softcap_approx": flag, "return_lse": flag, "return_randval": flag,
    "return_attn_probs": flag, "return_softmax_lse": flag, "want_dbias": flag, "rotary_interleaved": flag,
    "descale_per_page": flag, "find_descales": flag, "descale_block_q": count, "descale_block_k": count,
    "window": window, "window_size": window, "align": align, "layout": layout,
    "scale": number_or_none, "softmax_scale": number_or_none, "softcap": number, "dropout_p": probability,
    "sink_tokens": count, "n_splits": count, "num_splits": count, "split_size": count,
    "max_seqlen_q": count_or_none, "max_seqlen_k": count_or_none, "max_seqlen": count, "batch": count, "seqlen": count,
    "seed": whole_or_none, "offset": whole, "slots": flag, "hdim_v": count,
}


def words(**said) -> None:
    """Options, by the names that callers know them by."""
    for name, value in said.items():
        WORDS[name](value, name)


def array(value, name: str, integers: bool = False, written: bool = False):
    """@value where it is an array that attention can work on; None stays None. @integers: lengths and tables, lists too."""
    if value is None:
        return None
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in ("iu" if integers else "fiuV"):
            raise invalid(f"{name} holds {value.dtype}, not {'integers' if integers else 'numbers'}", f"tensor.{name}")
        return value
    if _arrays.is_torch(value):
        from . import _tensors

        return _tensors.alone(value, name, written)
    if integers and isinstance(value, (list, tuple)):
        found = np.asarray(value) if all(map(_is_whole, value)) else None
        if found is None:
            raise invalid(f"{name} is {_told(value)}: whole numbers", f"tensor.{name}")
        return found
    if not hasattr(value, "__dlpack__"):
        raise invalid(f"{name} is a {type(value).__name__}, not an array", f"tensor.{name}")
    return value


def arrays(needed: tuple, written: tuple, **given) -> dict:
    """Those of @given that are not None, as array() has them. @needed, @written: the names of those that cannot be None, that are written to."""
    for name in needed:
        if given[name] is None:
            raise invalid(f"{name} is None: an array is needed", f"tensor.{name}")
    return {name: array(value, name, name in INTEGERS, name in written) for name, value in given.items() if value is not None}


INTEGERS = frozenset(("cu_seqlens_q", "cu_seqlens_k", "seqlens_q", "seqlens_k", "leftpad_k", "cache_batch_idx", "block_table",
                      "kv_indptr", "kv_page_indices", "kv_last_page_len", "slot_mapping", "positions", "indices"))
