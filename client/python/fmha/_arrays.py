# SPDX-License-Identifier: MIT
"""What attention is computed on, whoever made it: numpy arrays, torch tensors, anything that speaks DLPack.

A View names memory without owning it; the array that it came from has to live as long.
"""
from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np

from ._lib import invalid, lib, not_supported

F32, F16, BF16, E4M3, E5M2, I32, U8, I64, I8 = (
    lib.FMHA_F32, lib.FMHA_F16, lib.FMHA_BF16, lib.FMHA_E4M3, lib.FMHA_E5M2, lib.FMHA_I32, lib.FMHA_U8, lib.FMHA_I64, lib.FMHA_I8,
)
ELEMENT_BYTES = {F32: 4, F16: 2, BF16: 2, E4M3: 1, E5M2: 1, I32: 4, U8: 1, I64: 8, I8: 1}
NAMES = {F32: "float32", F16: "float16", BF16: "bfloat16", E4M3: "float8_e4m3fn", E5M2: "float8_e5m2",
         I32: "int32", U8: "uint8", I64: "int64", I8: "int8"}
CODES = {name: code for code, name in NAMES.items()}


class View(NamedTuple):
    """One array: address, extents, strides in elements, type (FMHA_*), and where it lies."""

    pointer: int
    shape: tuple
    strides: tuple
    dtype: int
    place: Any  # None: memory that the CPU sees; else ("cuda" or "hip", index)


_numpy_codes: dict = {}
_torch_codes: dict = {}


def _unknown(dtype, name):
    return invalid(f"{name} has elements of type {dtype}; attention knows {', '.join(CODES)}", f"tensor.{name}")


def _numpy_view(array, name):
    code = _numpy_codes.get(array.dtype)
    if code is None:
        code = CODES.get(array.dtype.name)
        if code is None or not array.dtype.isnative:
            raise _unknown(array.dtype, name)
        _numpy_codes[array.dtype] = code
    size = array.itemsize
    if any(s % size for s in array.strides):
        raise invalid(f"{name}'s strides {array.strides} are no multiples of its element's {size} bytes", f"tensor.{name}")
    strides = tuple(s // size for s in array.strides)
    return View(array.__array_interface__["data"][0], array.shape, strides, code, None)


def _torch_view(tensor, name):
    code = _torch_codes.get(tensor.dtype)
    if code is None:
        code = CODES.get(str(tensor.dtype).removeprefix("torch."))
        if code is None:
            raise _unknown(tensor.dtype, name)
        _torch_codes[tensor.dtype] = code
    if tensor.is_cuda:
        place = (_torch_runtime(), tensor.get_device())
    elif tensor.device.type == "cpu":
        place = None
    else:
        raise invalid(f"{name} is a tensor on {tensor.device}: the CPU, CUDA and HIP are known", f"tensor.{name}")
    return View(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), code, place)


def _torch_runtime():
    return "hip" if sys.modules["torch"].version.hip else "cuda"


def is_torch(array) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def adopt(array, name: str):
    """@array itself when it is numpy's or torch's, else one of those that shares its memory, by DLPack."""
    if isinstance(array, np.ndarray):
        return np.ascontiguousarray(array) if _runs_backwards(array) else array
    if is_torch(array):
        return array
    if not hasattr(array, "__dlpack__"):
        raise invalid(f"{name} is a {type(array).__name__}, not an array", f"tensor.{name}")
    if array.__dlpack_device__()[0] == 1:
        return np.from_dlpack(array)
    try:
        import torch
    except ImportError:
        raise not_supported(f"{name} lies on a GPU: launching there needs torch's streams, and torch is not installed",
                            f"tensor.{name}") from None
    return torch.from_dlpack(array)


def _runs_backwards(array: np.ndarray) -> bool:
    return any(stride < 0 for stride in array.strides)


def check_writable(array, name: str) -> None:
    """Refuses an output that nobody may write to, or only through a copy."""
    if not isinstance(array, np.ndarray):
        return
    if not array.flags.writeable:
        raise invalid(f"{name} is read-only", f"tensor.{name}")
    if _runs_backwards(array):
        raise invalid(f"{name} has negative strides: an output is written where it lies", f"tensor.{name}")


def view(array, name: str) -> View:
    return _numpy_view(array, name) if isinstance(array, np.ndarray) else _torch_view(array, name)


def int32(array, name: str):
    """Lengths, prefix sums, tables: as they are when int32, converted where that needs no GPU."""
    if isinstance(array, np.ndarray) or isinstance(array, (list, tuple)):
        found = np.asarray(array)
        if found.dtype == np.int32:
            return found
        if not np.issubdtype(found.dtype, np.integer):
            raise invalid(f"{name} holds {found.dtype}, not integers", f"tensor.{name}")
        if found.size and (found.max() > 2**31 - 1 or found.min() < -(2**31)):
            raise invalid(f"{name} holds numbers beyond 32 bits", f"tensor.{name}")
        return found.astype(np.int32)
    array = adopt(array, name)
    if isinstance(array, np.ndarray):
        return int32(array, name)
    torch = sys.modules["torch"]
    if array.dtype == torch.int32:
        return array
    if array.dtype != torch.int64:
        raise invalid(f"{name} holds {array.dtype}, not integers", f"tensor.{name}")
    limits = torch.iinfo(torch.int32)
    return array.clamp(limits.min, limits.max).to(torch.int32)  # wrapped, what names nothing would name a key


def int64(array, name: str):
    """Slots and positions: likewise as int64."""
    if isinstance(array, (np.ndarray, list, tuple)):
        found = np.asarray(array)
        if not np.issubdtype(found.dtype, np.integer) or found.dtype == np.uint64:
            raise invalid(f"{name} holds {found.dtype}, not integers", f"tensor.{name}")
        return found.astype(np.int64, copy=False)
    array = adopt(array, name)
    if isinstance(array, np.ndarray):
        return int64(array, name)
    torch = sys.modules["torch"]
    if array.dtype not in (torch.int64, torch.int32):
        raise invalid(f"{name} holds {array.dtype}, not integers", f"tensor.{name}")
    return array.to(torch.int64)


def output_like(array, shape, ragged: bool):
    """A new array for a result of @array's kind and type. @ragged: lengths may leave rows that no sequence has: those are 0."""
    if not ragged:
        return empty_like(array, shape)
    return np.zeros(shape, array.dtype) if isinstance(array, np.ndarray) else array.new_zeros(shape)


def empty_like(array, shape, dtype: int | None = None):
    """A new array of the kind that @array is, on the device that it is on; of its type unless @dtype (FMHA_*) says else."""
    if isinstance(array, np.ndarray):
        return np.empty(shape, array.dtype if dtype is None else numpy_dtype(dtype))
    torch = sys.modules["torch"]
    if dtype is None:
        return torch.empty_like(array) if shape == array.shape and array.is_contiguous() else array.new_empty(shape)
    return torch.empty(shape, dtype=getattr(torch, NAMES[dtype]), device=array.device)


def numpy_dtype(dtype: int) -> np.dtype:
    name = NAMES[dtype]
    if dtype in (BF16, E4M3, E5M2):
        try:
            import ml_dtypes
        except ImportError:
            raise invalid(f"numpy has no {name} of its own: pip install ml_dtypes") from None
        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)


def dtype_code(dtype) -> int:
    """FMHA_* of "bfloat16", numpy.float16, torch.float8_e4m3fn, ..."""
    name = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", None) or str(dtype).removeprefix("torch.")
    code = CODES.get(name)
    if code is None:
        try:
            code = CODES.get(np.dtype(dtype).name)
        except TypeError:
            pass
    if code is None:
        raise invalid(f"dtype {dtype} is none that attention knows: {', '.join(CODES)}", "dtype")
    return code
