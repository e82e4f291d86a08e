# SPDX-License-Identifier: MIT
"""What the pages show compiles, what they and <fmha/base.h> promise holds, and README shows the program that
the tests build."""
import pathlib
import re
import subprocess
import sys

import numpy
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Python's programs are run by client/python/tests.
ALL_PAGES = sorted((ROOT / "client" / "docs").glob("*.md"))
PAGES = [p for p in ALL_PAGES if not p.stem.startswith("python")]
BLOCK = re.compile(r"```c\n(.*?)```", re.S)

PRELUDE = """
#include <string.h>
#include <fmha/fmha_local.h>
extern void *workspace, *stream;
extern struct fmha_client *client;
extern struct fmha_device *device;
extern struct fmha_buffer *buffer;
extern void *q, *k, *v, *o, *lse, *d_o, *dq, *dk, *dv, *starts, *table, *lengths, *indptr, *pages,
    *last, *cosines, *sines, *intervals;
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


def test_curves_are_the_models():
    """docs/scale.md and its picture, as the model of schedules computes them now."""
    result = subprocess.run([sys.executable, ROOT / "docs/scale.py", "--check"], text=True, capture_output=True, check=False)
    assert result.returncode == 0, result.stderr


def test_every_page_is_listed():
    index = (ROOT / "client/docs/README.md").read_text()
    for page in ALL_PAGES:
        assert page.stem == "README" or f"({page.name})" in index


def test_pages_name_tests_that_exist():
    tests = {path: path.read_text() for path in [*ROOT.glob("tests/integration/*.py"), *ROOT.glob("tests/unit/*/*.c")]}
    named = set(re.findall(r"`(test_\w+(?:\.c)?)`", (ROOT / "docs/seeds.md").read_text()))
    assert len(named) > 15
    for name in named:
        assert any(name == path.name or f"def {name}(" in text for path, text in tests.items()), name


def test_contributing_names_files_that_exist():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`((?:\w+/)+[\w.]+)`", page)
    assert len(named) > 20
    missing = [name for name in named if "NAME" not in name and not (ROOT / name).exists()]
    assert not missing
    assert "(CONTRIBUTING.md)" in (ROOT / "README.md").read_text()


# ---- what base.h says of several fields together ----

BATCH, ROWS, KEYS, HEADS, KV_HEADS, HDIM = 2, 8, 10, 4, 2, 16
SHAPES = {
    "q": (ROWS, HEADS, HDIM), "k": (KEYS, KV_HEADS, HDIM), "v": (KEYS, KV_HEADS, HDIM), "o": (ROWS, HEADS, HDIM),
    "d_o": (ROWS, HEADS, HDIM), "dq": (ROWS, HEADS, HDIM), "dk": (KEYS, KV_HEADS, HDIM), "dv": (KEYS, KV_HEADS, HDIM),
    "lse": (HEADS, ROWS), "bias": (HEADS, ROWS, KEYS), "dbias": (HEADS, ROWS, KEYS), "randval": (HEADS, ROWS, KEYS),
}  # fmt: skip


class Problem:
    """Arrays in one buffer, and the problem's tensors that name them."""

    def __init__(self, device, **fields):
        self.device, self.buffer, self.end = device, device.buffer_create(1 << 20), 0
        self.tensors, self.arrays = {}, {}
        self.problem = {
            "batch": BATCH, "nhead_q": HEADS, "nhead_k": KV_HEADS, "seqlen_q": ROWS, "seqlen_k": KEYS,
            "hdim_q": HDIM, "hdim_v": HDIM, **fields,
        }  # fmt: skip

    def add(self, role, values=None, dtype="f32"):
        """An array of the role's shape, or of the values given; it begins as 777."""
        shape = (BATCH, *SHAPES[role]) if values is None else numpy.shape(values)
        array = self.buffer.array(dtype, shape, self.end)
        array[...] = (777 if dtype == "f32" else 77) if values is None else values
        self.tensors[role] = {"buffer": self.buffer.id, "offset": self.end, "dtype": dtype}
        self.end += -(-array.nbytes // 256) * 256
        self.arrays[role] = array
        return array

    def random(self, *roles):
        rng = numpy.random.default_rng(1)
        for role in roles:
            self.add(role)[...] = rng.standard_normal((BATCH, *SHAPES[role]))

    def run(self, **fields):
        plan = self.device.plan({**self.problem, **fields, "tensors": self.tensors})
        self.device.run(plan["plan"])
        self.device.call("plan_release", {"plan": plan["plan"]})


@pytest.fixture(name="device")
def fixture_device(daemon):
    with daemon.device() as device:
        yield device


def test_padding_is_not_written(device):
    p = Problem(device)
    p.random("q", "k", "v", "bias")
    p.add("seqlen_q_per_batch", numpy.array([5, ROWS], "int32"), "i32")
    p.add("seqlen_k_per_batch", numpy.array([7, KEYS], "int32"), "i32")
    for padded in ("q", "k", "v"):
        p.arrays[padded][0, 5 if padded == "q" else 7 :] = numpy.nan
    o, lse = p.add("o"), p.add("lse")
    p.run()
    p.random("d_o")
    dq, dk, dv, dbias = p.add("dq"), p.add("dk"), p.add("dv"), p.add("dbias")
    p.run(op="backward")
    for padding in (o[0, 5:], lse[0, :, 5:], dq[0, 5:], dk[0, 7:], dv[0, 7:], dbias[0, :, 5:]):
        assert (padding == 777).all()
    for written in (o[0, :5], lse[0, :, :5], dq[0, :5], dk[0, :7], dv[0, :7], dbias[0, :, :5, :7], dq[1], dk[1]):
        assert numpy.isfinite(written).all() and (written != 777).all()
    assert (dbias[0, :, :5, 7:] == 0).all()


def test_lse_counts_the_sink(device):
    p = Problem(device, mask="top_left", window_left=-1, window_right=-1)
    p.random("q", "k", "v")
    p.add("seqlen_k_per_batch", numpy.array([0, KEYS], "int32"), "i32")
    p.add("o")
    lse = p.add("lse")
    p.run()
    plain = lse.copy()
    sink = p.add("sink", numpy.array([0.5, -1, 2, 0], "float32"))
    p.run()
    assert (plain[0] == -numpy.inf).all() and (lse[0] == sink[:, None]).all()
    assert numpy.allclose(lse[1], numpy.logaddexp(plain[1], sink[:, None]), atol=1e-5)
    assert (p.arrays["o"][0] == 0).all()


def test_dropout_has_256_steps_and_uses_32_counters_a_head(device):
    p = Problem(device, dropout_p=0.1, dropout_seed=3)
    p.random("q", "k")
    p.add("v")[...] = 1
    o, randval = p.add("o"), p.add("randval", dtype="u8")
    p.run()
    first, first_o = randval.copy(), o.copy()
    kept = first <= int(255 * 0.9)
    assert kept.mean() == pytest.approx(230 / 256, abs=0.05)
    # With V of ones a row of which nothing is dropped sums to the scale of what is kept.
    assert numpy.allclose(first_o.transpose(0, 2, 1, 3)[kept.all(axis=3)], 1 / 0.9, atol=1e-4)
    # One sequence's counters further, the second has become the first; a call's further, all is new.
    p.run(dropout_offset=32 * HEADS)
    assert (randval[0] == first[1]).all() and (randval[1] != first[0]).any()
    p.run(dropout_offset=32 * HEADS * BATCH)
    assert not any((randval[a] == first[b]).all() for a in range(BATCH) for b in range(BATCH))


def test_alibi_lies_on_the_last_column(device):
    p = Problem(device)
    p.add("q")[...] = 0
    p.random("k", "v")
    p.add("alibi_slopes", numpy.full((BATCH, HEADS), 0.25, "float32"))
    p.add("o")
    lse = p.add("lse")
    p.run()
    rows, columns = numpy.indices((ROWS, KEYS))
    expected = numpy.log(numpy.exp(-0.25 * abs(rows + KEYS - ROWS - columns)).sum(axis=1))
    assert numpy.allclose(lse, expected, atol=1e-5)


def test_the_map_and_the_build_are_told():
    index = (ROOT / "client/docs/README.md").read_text()
    readme = (ROOT / "README.md").read_text()
    for words in ("find_package(fmha_client", "fmha::client", "ldconfig"):
        assert words in index and words in readme
    for path in re.findall(r"^    (?:client|worker|front|helper|) +((?:client|daemon)/\S+\.c) ", readme, re.MULTILINE):
        assert (ROOT / path).is_file(), path


def test_the_map_has_the_daemons_folders_in_order():
    """Each of them once, behind all whose headers it includes."""
    text = (ROOT / "README.md").read_text()
    text = text[text.index("## Reading the sources") : text.index("The way of a first plan")]
    order = re.findall(r"`daemon/(\w+)/`", text)
    assert sorted(order) == sorted(p.name for p in (ROOT / "daemon").iterdir() if any(p.rglob("*.c")))
    folder_of = {f"{p.parent.name}/{p.name}": p.parents[2].name for p in (ROOT / "daemon").glob("*/include/*/*.h")}
    for path in (ROOT / "daemon").rglob("*.[ch]"):
        own = path.relative_to(ROOT / "daemon").parts[0]
        used = {folder_of.get(header, own) for header in re.findall(r"#include <([\w/]+\.h)>", path.read_text())}
        assert all(order.index(folder) <= order.index(own) for folder in used), (str(path), used)


# ---- SECURITY.md: what it says holds a promise is there ----

NO_TESTS = {"loop_times", "implicit-conversion", "./dev bench fair", "proto/methods.h",
            "-fsanitize=float-cast-overflow,integer-divide-by-zero"}


def promises():
    """(promise, what it says holds it) of each row of the tables that have such a column."""
    found = []
    for table in re.split(r"\n\n", (ROOT / "SECURITY.md").read_text()):
        rows = [line.strip("|").split(" | ") for line in table.splitlines() if line.startswith("|")]
        if rows and rows[0][-1].strip() == "held by":
            found += [(row[0].strip(), row[-1]) for row in rows[2:]]
    return found


def unit_tests():
    """Names of programs, with their layer's and without it, and of the tests in them."""
    found = set()
    for path in (ROOT / "tests/unit").rglob("test_*.c"):
        found |= {path.stem, path.stem.replace("test_", f"test_{path.parent.name}_", 1)}
        found |= set(re.findall(r"^static void (\w+)\(void \*\*state\)", path.read_text(), re.M))
    return found


def is_there(word, file):
    """Whether what is named exists, and the file that what follows may be in."""
    path, _, name = word.rpartition("::") if "::" in word else (word, "", "")
    if path.endswith(".py") or path.startswith("tests/"):
        places = [ROOT / path, ROOT / "tests/integration" / path, *([file.parent / path] if file else [])]
        file = next((place for place in places if place.exists()), None)
        return bool(file) and (not name or f"def {name}(" in file.read_text()), file
    if path.startswith("..."):
        return bool(re.search(rf"def test_\w+{path[3:]}\(", file.read_text())), file
    if not path:
        return f"def {name}(" in file.read_text(), file
    return word in unit_tests() | NO_TESTS, file


@pytest.mark.parametrize("promise, held_by", promises(), ids=[promise[:40] for promise, _ in promises()])
def test_what_holds_a_promise_is_there(promise, held_by):
    named = re.findall(r"`([^`]+)`", held_by)
    file = None
    for word in named:
        there, file = is_there(word, file)
        assert there, f"{word}, which is said to hold: {promise}"
    assert set(named) - NO_TESTS, promise


def test_there_are_promises():
    assert len(promises()) > 20
    assert not is_there("test_bounds.py::test_nothing", None)[0] and not is_there("test_bones", None)[0]


NOT_OURS = {"stdio.h", "stdlib.h", "msgpack.h", "cuda.h", "cpuid.h", "consumer.c", "ranks.c", "fwd_x.h", "bwd_x.h"}
SOURCE = re.compile(r"(?<![\w./<\"*-])((?:\.\./)*(?:[a-z_0-9]+/)*[a-z_0-9]+\.(?:c|h|def|hip))(?![\w/.(\[])")
COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.S)


def test_named_files_are_there():
    """What pages and comments name, by as much of its path as they say; what links lead to; folders between backticks."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, text=True, capture_output=True, check=False).stdout.split()
    if not tracked:
        pytest.skip("not a checkout")
    ends = {"/".join(pathlib.Path(f).parts[i:]) for f in tracked for i in range(f.count("/") + 1)}
    folders = {str(p) for f in tracked for p in pathlib.Path(f).parents}
    tops = "|".join(sorted(f for f in folders if "/" not in f and f[0] != "."))
    lost = []
    for name in (f for f in tracked if f.endswith((".md", ".c", ".h", ".hip")) and f != "CHANGELOG.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        page = name.endswith(".md")
        said = text if page else "\n".join(COMMENT.findall(text))
        lost += [(name, p) for p in SOURCE.findall(said) if re.sub(r"^(\.\./)+", "", p) not in ends and p.split("/")[-1] not in NOT_OURS]
        if page:
            lost += [(name, p) for p in re.findall(rf"`((?:{tops})/[\w/.-]*)`", text)
                     if p.rstrip("/") not in folders and p not in ends and not re.search("[A-Z]{4}", p)]
            lost += [(name, p) for p in re.findall(r"\]\(([^)#:\s]+)[^)]*\)", text) if not (ROOT / name).parent.joinpath(p).exists()]
    assert not lost
