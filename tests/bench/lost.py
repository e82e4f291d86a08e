#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Where a newcomer is lost: what the names and the files of this tree make hard.

    tests/bench/lost.py [--circles] [--all]

words:    private ones, in how many files and how often; docs/words.md says what each means
names:    static functions that stand in four files or more
files:    of one name in several product folders
folders:  with more than 40 sources
circles:  .c files of one library that call each other in a loop, by the symbols of their objects in the build tree
          ($FMHA_BUILD, build/release); --all: by which functions
"""
import argparse
import collections
import os
import pathlib
import re
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("FMHA_BUILD", ROOT / "build/release")).resolve()
FOLDERS = ("cli", "client", "daemon", "kernels", "proto", "specs", "tree")
WORDS = ("turnstile", "handout", "judged", "census", "recipe", "settle", "tell", "bring", "park")
STATIC = re.compile(r"^static (?:inline )?[a-z][^;{}()=]*?\**\b([a-z_0-9]+)\(", re.M)


def sources():
    """Every .c and .h of the product, and its text."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.[ch]")):
            if "build" not in path.relative_to(ROOT).parts:
                yield path.relative_to(ROOT), path.read_text(encoding="utf-8")


def words(texts):
    for word in WORDS:
        found = {path: len(re.findall(rf"(?<![a-z]){word}", text, re.I)) for path, text in texts}
        yield word, sum(n > 0 for n in found.values()), sum(found.values())


def namesakes(texts):
    where = collections.defaultdict(set)
    for path, text in texts:
        if path.suffix == ".c":
            for name in STATIC.findall(text):
                where[name].add(path)
    return {name: paths for name, paths in where.items() if len(paths) >= 4}


def files(texts):
    where = collections.defaultdict(set)
    for path, _ in texts:
        if path.suffix == ".c":
            where[path.name].add(path.parent)
    return {name: folders for name, folders in where.items() if len(folders) > 1}


def source_of(thing):
    """Which .c of this tree an object of the build tree was made of, or None."""
    base, _, inside = str(thing.relative_to(BUILD)).partition("CMakeFiles/")
    path = pathlib.Path(os.path.normpath(base + "/" + inside.partition("/")[2].replace("__", "..")[:-len(".o")]))
    return path if path.suffix == ".c" and (ROOT / path).exists() and path.parts[0] in FOLDERS else None


def calls():
    """What each .c takes from each other: names that one file alone defines."""
    defines, takes = collections.defaultdict(set), collections.defaultdict(set)
    of = {str(thing): path for thing in BUILD.rglob("*.c.o") if (path := source_of(thing))}
    for line in subprocess.run(["nm", "-PA", *of], capture_output=True, text=True, check=True).stdout.splitlines() if of else ():
        thing, name, kind = line.split()[:3]
        path = of[thing[:-1]]
        if kind == "U":
            takes[path].add(name)
        elif kind in "TDBRVW":
            defines[name].add(path)
    arrows = {path: collections.defaultdict(set) for path in takes}
    for path, names in takes.items():
        for name in names:
            if len(defines[name]) == 1 and path not in defines[name]:
                arrows[path][next(iter(defines[name]))].add(name)
    return arrows


def circles(arrows):
    """Sets of files each of which reaches all others: by who is reached, which is small enough a house for."""
    reached = {}
    for path in arrows:
        seen, todo = set(), [path]
        while todo:
            for other in arrows.get(todo.pop(), ()):
                if other not in seen:
                    seen.add(other)
                    todo.append(other)
        reached[path] = seen
    found = {frozenset(b for b in seen if path in reached.get(b, ())) for path, seen in reached.items() if path in seen}
    return sorted(found, key=lambda circle: sorted(circle))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--circles", action="store_true", help="only these")
    parser.add_argument("--all", action="store_true")
    options = parser.parse_args()
    if not options.circles:
        texts = list(sources())
        for word, n_files, n in words(texts):
            print(f"word     {word:12} {n:5} times in {n_files:3} files")
        for name, paths in sorted(namesakes(texts).items(), key=lambda item: -len(item[1])):
            print(f"name     {name:12} {' '.join(map(str, sorted(paths)))}")
        for name, folders in sorted(files(texts).items()):
            print(f"file     {name:12} {' '.join(map(str, sorted(folders)))}")
        for folder, n in sorted(collections.Counter(path.parent for path, _ in texts).items()):
            if n > 40:
                print(f"folder   {folder} {n} sources")
    arrows = calls()
    for circle in circles(arrows):
        print(f"circle   {' '.join(map(str, sorted(circle)))}")
        for a in sorted(circle) if options.all else ():
            for b in sorted(circle & set(arrows[a])):
                print(f"           {a} -> {b}: {' '.join(sorted(arrows[a][b]))}")


if __name__ == "__main__":
    main()
