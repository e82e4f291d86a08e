# SPDX-License-Identifier: MIT
"""What the pages show compiles, and README shows the program that the tests build."""
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "client" / "docs").glob("*.md"))
BLOCK = re.compile(r"```c\n(.*?)```", re.S)

PRELUDE = """
#include <fmha/fmha.h>
extern struct fmha_device *device;
extern struct fmha_buffer *buffer;
extern void *q, *k, *v, *o, *lse, *d_o, *dq, *dk, *dv, *starts, *table, *lengths, *indptr, *pages,
    *last, *cosines, *sines;
extern uint64_t bytes;
"""
SETUP = "struct fmha_error err; struct fmha_problem p; int r = 0; fmha_problem_init(&p); (void)r;\n"


def compiles(text):
    return subprocess.run(
        ["gcc", "-std=c17", "-Wall", "-Werror", "-Wno-unused-variable", "-Wno-unused-but-set-variable", "-fsyntax-only",
         "-x", "c", "-I", ROOT / "proto/include", "-I", ROOT / "client/include", "-"],
        input=text, text=True, capture_output=True, check=False,
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_fragments_compile(page):
    blocks = BLOCK.findall(page.read_text())
    assert blocks, f"{page} shows no C"
    setup = "" if page.stem == "README" else SETUP
    functions = "".join(
        f"void fragment_{i}(void);\nvoid fragment_{i}(void)\n{{\n{setup}{block}}}\n"
        for i, block in enumerate(blocks)
    )
    result = compiles(PRELUDE + functions.replace(
        "struct fmha_buffer *buffer;\nstruct fmha_plan", "struct fmha_plan"))
    assert result.returncode == 0, result.stderr


def test_readme_shows_the_tested_program():
    readme = (ROOT / "README.md").read_text()
    program = (ROOT / "tests/consumer/forward.c").read_text()
    assert program.strip() in readme


def test_every_page_is_listed():
    index = (ROOT / "client/docs/README.md").read_text()
    for page in PAGES:
        assert page.stem == "README" or f"({page.name})" in index
