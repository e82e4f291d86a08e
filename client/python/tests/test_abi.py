# SPDX-License-Identifier: MIT
"""What cffi takes the headers' structs to be is what the compiler makes of them."""
import os
import pathlib
import re
import subprocess

import pytest

from fmha._abi import ffi

ROOT = pathlib.Path(__file__).resolve().parents[3]
HEADERS = [h for h in ("fmha/fmha.h", "fmha/fmha_local.h") if (ROOT / "client/include" / h).exists()]


def structs():
    text = "".join((ROOT / folder / h).read_text() for h in ["fmha/base.h", *HEADERS]
                   for folder in ("client/include", "proto/include") if (ROOT / folder / h).exists())
    return re.findall(r"^struct (fmha_\w+) \{", text, re.M)


def fields(name):
    """(path, offset, size) of every named member, those of anonymous unions included."""
    def walk(kind, prefix, base):
        for member, field in kind.fields or ():
            if member:
                yield prefix + member, base + field.offset, ffi.sizeof(field.type)
            else:
                yield from walk(field.type, prefix, base + field.offset)
    return list(walk(ffi.typeof(f"struct {name}"), "", 0))


def test_every_offset_is_the_compilers(tmp_path):
    names = structs()
    assert "fmha_problem" in names and "fmha_run_options" in names
    lines = [f"#include <{h}>" for h in HEADERS] + ["#include <stdio.h>", "int main(void) {"]
    for name in names:
        lines.append(f'printf("{name} %zu\\n", sizeof(struct {name}));')
        for path, *_ in fields(name):
            lines.append(f'printf("{name} {path} %zu %zu\\n", offsetof(struct {name}, {path}), '
                         f"sizeof(((struct {name} *)0)->{path}));")
    source, program = tmp_path / "offsets.c", tmp_path / "offsets"
    source.write_text("\n".join([*lines, "return 0; }"]))
    include = [f"-I{ROOT / d}" for d in ("client/include", "proto/include")]
    subprocess.run([os.environ.get("CC", "cc"), *include, str(source), "-o", str(program)], check=True)
    said = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout.splitlines()
    mine = []
    for name in names:
        mine.append(f"{name} {ffi.sizeof(f'struct {name}')}")
        mine += [f"{name} {path} {offset} {size}" for path, offset, size in fields(name)]
    assert said == mine and len(said) > 150


@pytest.mark.parametrize("name, value", [("FMHA_ENOTSUP", -4), ("FMHA_BF16", 2), ("FMHA_MAX_STAGES", 5)])
def test_constants(name, value):
    from fmha._lib import lib

    assert getattr(lib, name) == value


def test_every_function_that_is_declared_is_there():
    """Whoever looks at all of a module's objects, as vLLM does, has cffi load all of a library's."""
    from fmha._lib import lib

    assert {"fmha_connect", "fmha_local_plan_run"} < set(vars(lib))
