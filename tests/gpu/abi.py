# SPDX-License-Identifier: MIT
"""kernels/abi.h as ctypes: the structs are read from the header itself, so that they cannot drift."""
import ctypes
import os
import re

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
INCLUDE = os.path.join(ROOT, "kernels", "include")  # device code says <kernels/abi.h>

_SCALARS = {
    "abi_i32": ctypes.c_int32, "abi_u32": ctypes.c_uint32, "abi_i64": ctypes.c_int64,
    "abi_u64": ctypes.c_uint64, "float": ctypes.c_float, "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32, "uint64_t": ctypes.c_uint64, "int": ctypes.c_int, "char": ctypes.c_char,
    "enum": ctypes.c_uint,
}


def _strip_comments(text):
    return re.sub(r"/\*.*?\*/", " ", text, flags=re.S)


def parse_structs(text, known=None, constants=None):
    """Every struct definition of a header, in order, as {name: ctypes.Structure subclass}."""
    text = _strip_comments(text)
    structs, constants = dict(known or {}), dict(constants or {})
    for name, value in re.findall(r"#define\s+(\w+)\s+(\d+)\b", text):
        constants[name] = int(value)
    for name, body in re.findall(r"struct (\w+) \{(.*?)\n\};", text, flags=re.S):
        fields, flat = [], []
        for declaration in body.split(";"):
            declaration = " ".join(declaration.split())
            if not declaration:
                continue
            declaration = declaration.removeprefix("const ")
            if declaration.startswith(("struct ", "enum ")):
                kind, tag, names = declaration.split(" ", 2)
                base = structs[tag] if kind == "struct" else _SCALARS["enum"]
                flat += [names] if tag == "kernel_build" else []
            else:
                tag, names = declaration.split(" ", 1)
                base = None if tag == "void" else _SCALARS[tag]
            for item in names.split(","):
                item = item.strip()
                if item.startswith("*"):
                    fields.append((item[1:], ctypes.c_void_p))
                    continue
                kind = base
                for length in reversed(re.findall(r"\[(\w+)\]", item)):
                    kind = kind * (int(length) if length.isdigit() else constants[length])
                fields.append((item.split("[")[0], kind))
        structs[name] = type(name, (ctypes.Structure,), {"_anonymous_": flat, "_fields_": fields})
    return structs


def _read(*parts):
    with open(os.path.join(ROOT, *parts), encoding="ascii") as f:
        return f.read()


STRUCTS = parse_structs(_read("kernels", "include", "kernels", "abi.h"))
STRUCTS = parse_structs(_read("proto", "include", "proto", "build.h"), STRUCTS)
STRUCTS = parse_structs(_read("kernels", "gpu", "include", "kernels", "gpu_kernel.h"), STRUCTS)
STRUCTS = parse_structs(_read("tests", "gpu", "check.c"), STRUCTS)
FwdArgs = STRUCTS["abi_fwd_args"]
CombineArgs = STRUCTS["abi_combine_args"]
AppendArgs = STRUCTS["abi_appendkv_args"]
BwdArgs = STRUCTS["abi_bwd_args"]
Tile = STRUCTS["gpu_tile"]
Kernel = STRUCTS["gpu_kernel"]
Launch = STRUCTS["check_launch"]

F32, F16, BF16, E4M3, E5M2, _, _, _, I8 = range(9)
DTYPE_NAMES = ["f32", "f16", "bf16", "e4m3", "e5m2", "i32", "u8", "i64", "i8"]
(FWD, FWD_SPLITKV, FWD_SPLITKV_COMBINE, FWD_PAGEDKV, FWD_APPENDKV, BATCH_PREFILL, BWD_DOT_DO_O,
 BWD_DQ_DK_DV, BWD_CONVERT_DQ) = range(9)
MASK_NONE, MASK_TOP_LEFT, MASK_BOTTOM_RIGHT = range(3)
ROPE_NONE, ROPE_INTERLEAVED, ROPE_HALF_ROTATED = range(3)


PIPELINES = []  # names, in the order of enum gpu_pipeline


def pipeline_of(kernel):
    return PIPELINES[kernel.tile.pipeline]


def load_library(path=None):
    """reference.h, gpu_kernel.h and check.c, built as one shared library by the target fmha_gpu_check."""
    build = os.environ.get("FMHA_BUILD", os.path.join(ROOT, "build", "release"))
    lib = ctypes.CDLL(path or os.path.join(build, "tests", "gpu", "libfmha_gpu_check.so"))
    lib.reference_load.restype = ctypes.c_double
    lib.reference_load.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int64]
    sizes = (ctypes.c_size_t * 7).in_dll(lib, "fmha_gpu_check_sizes")
    assert list(sizes) == [ctypes.sizeof(x) for x in (FwdArgs, CombineArgs, AppendArgs, BwdArgs, Tile, Kernel, Launch)]
    lib.check_pipeline.restype = lib.check_launch.restype = ctypes.c_char_p
    PIPELINES[:] = [name.decode() for name in iter(map(lib.check_pipeline, range(64)).__next__, None)]
    return lib


def make_kernel(lib, arch, family, dtype, args, tile, approximate=False):
    """The kernel of that tile that runs @args, or None. @approximate: soft caps may be."""
    kernel = Kernel()
    refused = lib.check_make(arch.encode(), family, dtype, ctypes.byref(args), ctypes.byref(tile), int(approximate),
                             ctypes.byref(kernel))
    return None if refused else kernel


def choose_kernel(lib, arch, family, dtype, args, candidate=0, pipeline=None):
    """The candidate-th kernel that runs @args (of a pipeline, if named), or None."""
    found = 0
    for n in range(64):
        tile = Tile()
        if lib.check_tile(arch.encode(), family, dtype, ctypes.byref(args), n,
                          ctypes.byref(tile)):
            return None
        if pipeline and PIPELINES[tile.pipeline] != pipeline:
            continue
        kernel = make_kernel(lib, arch, family, dtype, args, tile)
        if kernel is None:
            continue
        if found == candidate:
            return kernel
        found += 1
    return None


def kernel_options(kernel):
    return [bytes(kernel.options[i].value).decode() for i in range(kernel.n_options)]


def kernel_grid(lib, kernel, args, units=132):
    grid = (ctypes.c_uint32 * 3)()
    assert lib.gpu_kernel_grid(ctypes.byref(kernel), ctypes.c_uint32(units), ctypes.byref(args), grid) == 0
    return tuple(grid)
