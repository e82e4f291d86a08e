#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""How large the house is, and how far a first plan walks through it.

    tests/bench/house.py [lines|plan] [--files]     default: both

lines: lines of tracked sources (.c .h .def .py .hip) outside tests/, by top folder.
plan:  what a first plan on a GPU calls, in client, front, worker and compile helper together: the .c files that
       it passes (--files: which), and calls of those functions that find one fact or choose one thing. Of a
       build tree of its own, build/house, whose functions count their calls, with the stub of CUDA's driver for a
       card and a helper that is ended by the lack of its compiler.
"""
import argparse
import collections
import mmap
import os
import pathlib
import struct
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = ROOT / "build/house"
os.environ["FMHA_BUILD"] = str(BUILD)
sys.path.insert(0, str(ROOT / "tests" / "lib"))
import fmhad  # noqa: E402

SOURCES = (".c", ".h", ".def", ".py", ".hip")
TARGETS = ("fmhad", "fmhad-cuda", "fmhad-compile", "fmha_client", "cuda_stub")
QUIET_S = 0.5
ROW = struct.Struct("=QQQ232s")  # house_calls.c
CALLED = {  # what is printed: the functions that do it
    "plan_build": ("plan_build_reported",),
    "select_kernel": ("select_kernel",),
    "args_fill": ("args_fill",),
    "problem_extents": ("problem_extents",),
    "conversions of a spec": ("spec_traits",),
    "orders of a compile": ("gpu_kernel_make",),
    "shape words": ("shape_near",),
}


def count_lines():
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    lines = collections.Counter()
    for name in names:
        if name.endswith(SOURCES) and not name.startswith("tests/") and (ROOT / name).is_file():
            lines["specs/catalogue" if name.startswith("specs/catalogue/") else name.split("/")[0]] += (ROOT / name).read_bytes().count(b"\n")
    for folder, n in sorted(lines.items()):
        print(f"{folder:24}{n:8}")
    print(f"{'in all':24}{lines.total():8}")
    print(f"{'outside these':24}{lines.total() - lines['kernels'] - lines['specs/catalogue']:8}  (kernels/ and their catalogue)")


def build(folder):
    """The counting tree, the library that counts, the client."""
    if not (BUILD / "build.ninja").exists():
        subprocess.run(["cmake", "-S", ROOT, "-B", BUILD, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=None",
                        "-DFMHA_WERROR=OFF", f"-DCMAKE_C_FLAGS=-O1 -g -w -finstrument-functions -ffile-prefix-map={ROOT}=."], stdout=subprocess.DEVNULL, check=True)
    subprocess.run(["cmake", "--build", BUILD, "--target", *TARGETS, "-j", os.environ.get("JOBS", str(os.cpu_count()))],
                   stdout=subprocess.DEVNULL, check=True)
    here = pathlib.Path(__file__).parent
    subprocess.run(["cc", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-D_GNU_SOURCE", "-o", folder / "calls.so",
                    here / "house_calls.c"], check=True)
    library = next(BUILD.rglob("libfmha_client.so"))
    subprocess.run(["cc", "-O1", "-Wall", "-Werror", f"-I{ROOT}/client/include", f"-I{ROOT}/proto/include", "-o",
                    folder / "client", here / "house_client.c", library, f"-Wl,-rpath,{library.parent}"], check=True)


def look(folder):
    """Calls so far of each function: (object, offset) to a number."""
    calls = collections.Counter()
    for path in (folder / "calls").iterdir():
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as table:
            for function, n, offset, name in ROW.iter_unpack(table[:]):
                if function:
                    calls[name.rstrip(b"\0").decode(), offset] += n
    return calls


def places(functions):
    """(file, name) of each function, for those that are this project's."""
    found, of_object = {}, collections.defaultdict(list)
    for name, offset in functions:
        of_object[name].append(offset)
    for name, offsets in of_object.items():
        words = subprocess.run(["addr2line", "-f", "-e", name, *map(hex, offsets)], capture_output=True, text=True,
                               check=True).stdout.split("\n")
        for offset, function, place in zip(offsets, words[::2], words[1::2]):
            # From the root, also of an object that a cache has from another tree, or whose place is the build tree's.
            path = os.path.normpath(place.rsplit(":", 1)[0]).removeprefix("build/house/")
            if path[0].isalpha() and not path.startswith("tests/"):
                found[name, offset] = path, function
    return found


def first_plan(folder):
    """Calls of each function by a first plan."""
    (folder / "calls").mkdir()
    counted = {"LD_PRELOAD": str(folder / "calls.so"), "HOUSE_CALLS": str(folder / "calls")}
    helper, stub = folder / "helper", next(BUILD.rglob("libcuda.so.1")).parent
    helper.write_text("#!/bin/sh\n[ \"$1\" = --version ] && echo 'nvrtc 0.0' && exit\n"
                      f"LD_PRELOAD={counted['LD_PRELOAD']} HOUSE_CALLS={counted['HOUSE_CALLS']} "
                      f"'{fmhad.find_program('fmhad-compile')}' \"$1\" \"$2\" /nowhere \"$4\" \"$5\" \"$6\" >/dev/null 2>&1\n"
                      "printf 'stub code' >\"$5\"\n")
    helper.chmod(0o755)
    config = {"devices": [{"backend": "cuda"}], "tuning": {"automatic": False},
              "supervision": {"heartbeat_ms": 60000, "heartbeat_timeout_ms": 120000},
              "compile": {"helper": str(helper), "cache": str(folder / "cache"), "sources": str(ROOT / "kernels/gpu")}}
    with fmhad.Daemon(config, env={**counted, "LD_LIBRARY_PATH": str(stub)}) as daemon, subprocess.Popen(
            [folder / "client", daemon.socket], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **counted}) as client:
        assert client.stdout.readline() == "ready\n", "the client did not get that far"
        time.sleep(QUIET_S)
        idle = look(folder)
        time.sleep(QUIET_S)
        before = look(folder)
        client.stdin.write("\n")
        client.stdin.flush()
        assert client.stdout.readline() == "planned\n", "the plan was not made"
        after = look(folder)
        client.stdin.close()
    return (after - before) - (before - idle)


def count_calls(tell_files):
    with tempfile.TemporaryDirectory(prefix="fmhad-house-") as name:
        folder = pathlib.Path(name)
        build(folder)
        calls = first_plan(folder)
        where = places(calls)
    files, functions = set(), collections.Counter()
    for key, (file, function) in where.items():
        files.add(file)
        functions[function] += calls[key]
    if tell_files:
        print(*sorted(file for file in files if file.endswith(".c")), sep="\n")
    print(f"{'.c files':24}{sum(file.endswith('.c') for file in files):8}")
    for title, names in CALLED.items():
        print(f"{title:24}{sum(functions[name] for name in names):8}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", nargs="?", choices=("lines", "plan"))
    parser.add_argument("--files", action="store_true", help="which .c files a plan passes")
    options = parser.parse_args()
    if options.part != "plan":
        count_lines()
    if options.part != "lines":
        count_calls(options.files)
    return 0


if __name__ == "__main__":
    sys.exit(main())
