# SPDX-License-Identifier: MIT
"""kernels/abi.h as ctypes structures, read from the header itself, and the shared object of driver.c."""
import ctypes
import os
import pathlib
import re

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]

F32, F16, BF16, E4M3, E5M2, I32, U8, I64, I8 = range(9)
NAMES = ["f32", "f16", "bf16", "e4m3", "e5m2", "i32", "u8", "i64", "i8"]
STORAGE = [np.float32, np.float16, np.uint16, np.uint8, np.uint8, np.int32, np.uint8, np.int64, np.int8]
(FWD, FWD_SPLITKV, FWD_SPLITKV_COMBINE, FWD_PAGEDKV, FWD_APPENDKV, BATCH_PREFILL, BWD_DOT_DO_O,
 BWD_DQ_DK_DV, BWD_CONVERT_DQ) = range(9)


def parse_structs(text):
    """{name: ctypes.Structure} of every struct in a header of plain structs."""
    scalars = {"abi_i32": ctypes.c_int32, "abi_i64": ctypes.c_int64, "abi_u32": ctypes.c_uint32,
               "abi_u64": ctypes.c_uint64, "float": ctypes.c_float}
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.S)
    structs = {}
    for name, body in re.findall(r"struct (\w+) \{(.*?)\};", text, flags=re.S):
        fields = []
        for statement in filter(None, (s.strip() for s in body.split(";"))):
            base, members = re.match(r"(?:const )?((?:struct )?\w+)\s+(.*)", statement, re.S).groups()
            base = base.replace("struct ", "")
            for member in members.split(","):
                member = member.strip()
                pointer = member.startswith("*")
                kind = ctypes.c_void_p if pointer else scalars.get(base) or structs[base]
                fields.append((member.lstrip("*"), kind))
        structs[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return structs


STRUCTS = parse_structs((ROOT / "kernels/include/kernels/abi.h").read_text())
Tensor, Rows, Descale = (STRUCTS["abi_" + n] for n in ("tensor", "rows", "descale"))
FwdArgs, BwdArgs, CombineArgs, AppendArgs = (
    STRUCTS[f"abi_{n}_args"] for n in ("fwd", "bwd", "combine", "appendkv"))


def load_driver():
    build = pathlib.Path(os.environ.get("FMHA_BUILD", ROOT / "build" / "release"))
    library = ctypes.CDLL(str(build / "tests" / "oracle" / "libfmha_oracle.so"))
    library.oracle_sizeof.restype = ctypes.c_size_t
    for which, struct in enumerate((FwdArgs, BwdArgs, CombineArgs, AppendArgs)):
        assert library.oracle_sizeof(which) == ctypes.sizeof(struct), struct.__name__
    return library


# --- numbers ------------------------------------------------------------------------------------


def _fp8_table(exponent_bits, mantissa_bits, bias, has_infinity):
    byte = np.arange(256)
    sign = np.where(byte & 0x80, -1.0, 1.0)
    exponent = (byte >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = (byte & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    value = np.where(exponent == 0, mantissa * 2.0 ** (1 - bias),
                     (1 + mantissa) * 2.0 ** (exponent - bias))
    if has_infinity:
        top = exponent == (1 << exponent_bits) - 1
        value = np.where(top, np.where(mantissa == 0, np.inf, np.nan), value)
    else:
        value = np.where((byte & 0x7F) == 0x7F, np.nan, value)
    return sign * value


FP8 = {E4M3: _fp8_table(4, 3, 7, False), E5M2: _fp8_table(5, 2, 15, True)}


def decode(array, dtype):
    """Stored elements -> float64."""
    if dtype in FP8:
        return FP8[dtype][array]
    if dtype == BF16:
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return array.astype(np.float64)


def encode(values, dtype):
    """float64 -> stored elements, to nearest even."""
    values = np.asarray(values, np.float64)
    if dtype in FP8:
        table = FP8[dtype]
        finite = np.flatnonzero(np.isfinite(table) & ~((table == 0) & (np.arange(256) > 0)))
        order = finite[np.argsort(table[finite], kind="stable")]
        middle = (table[order][1:] + table[order][:-1]) / 2
        return order[np.searchsorted(middle, values)].astype(np.uint8)
    if dtype == BF16:
        # 8 significant bits: scale the mantissa, let rint round to even, scale back.
        mantissa, exponent = np.frexp(values)
        rounded = np.ldexp(np.rint(mantissa * 256), exponent - 8).astype(np.float32)
        return (rounded.view(np.uint32) >> 16).astype(np.uint16)
    if dtype == I8:
        return np.rint(values).clip(-128, 127).astype(np.int8)
    with np.errstate(over="ignore"):
        return values.astype(STORAGE[dtype])


def pointer(array):
    return None if array is None else array.ctypes.data


def tensor(array, order="bshd"):
    """A 4-dimensional numpy array, of any strides, as an abi_tensor; order names its axes."""
    stride = {axis: s // array.itemsize for axis, s in zip(order, array.strides)}
    return Tensor(pointer(array), *(stride.get(axis, 0) for axis in "bshd"))


def rows(array):
    """[batch, head, row] float32."""
    batch, head, row = (s // 4 for s in array.strides)
    return Rows(pointer(array), batch, head, row)
