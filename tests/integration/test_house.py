# SPDX-License-Identifier: MIT
"""No file of the product is part of a circle of calls, and none includes a header of a layer above its own."""
import importlib.util
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]


def lost():
    spec = importlib.util.spec_from_file_location("lost", ROOT / "tests/bench/lost.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_files_use_each_other_one_way():
    arrows = lost().calls()
    assert len(arrows) > 200, "the objects of the build tree were not found"
    assert not [sorted(map(str, circle)) for circle in lost().circles(arrows)]


def test_a_circle_is_found():
    arrows = {"a": {"b": {"f"}}, "b": {"c": {"g"}}, "c": {"b": {"h"}, "d": {"i"}}, "d": {}}
    assert lost().circles(arrows) == [frozenset("bc")]


# Simplest first; a folder includes what lies in those before it.
FOLDERS = ("tree", "cli", "proto", "kernels", "specs", "daemon", "client")


def test_folders_include_those_below():
    headers = {}
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("include/*/*.h"):
            headers["/".join(path.parts[-2:])] = folder
    assert len(headers) > 60
    up = []
    for i, folder in enumerate(FOLDERS):
        for path in (p for p in (ROOT / folder).rglob("*.[ch]") if "build" not in p.parts):
            for name in re.findall(r'^#include <([^>]+)>', path.read_text(encoding="utf-8"), re.M):
                if FOLDERS.index(headers.get(name, folder)) > i:
                    up.append(f"{path.relative_to(ROOT)}: {name}")
    assert not up


def test_names_of_functions_say_whose_they_are():
    """Those of one file, that is: where four files have one of a name, it is said to whom."""
    assert not lost().namesakes(list(lost().sources()))
