# SPDX-License-Identifier: MIT
"""Writes fmha/_abi.py: the C headers as cffi's parsed form, so that no struct is written down twice.

    python3 make_abi.py --cc CC --include DIR... --out FILE [--header NAME...]

The compiler's preprocessor expands the headers; what comes from system headers is left out.
"""
import argparse
import os
import pathlib
import re
import subprocess

import cffi

HEADERS = ("fmha/base.h", "fmha/fmha.h", "fmha/fmha_local.h")


def run(cc, include, flags, text):
    command = [cc, *flags, *(f"-I{i}" for i in include), "-x", "c", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


def declarations(cc, include, headers):
    """What the headers declare, without directives, attributes and what other headers say."""
    text = run(cc, include, ["-E"], "".join(f"#include <{h}>\n" for h in headers))
    kept, ours = [], False
    for line in text.splitlines():
        marker = re.match(r'# \d+ "([^"]*)"', line)
        if marker:
            ours = marker.group(1).endswith(tuple(headers))
        elif ours:
            kept.append(line)
    return re.sub(r'__attribute__\s*\(\(visibility\("default"\)\)\)', "", "\n".join(kept))


def constants(cc, include, headers):
    """The macros that are plain integers, as cffi's #define lines."""
    found = []
    for line in run(cc, include, ["-E", "-dM"], "".join(f"#include <{h}>\n" for h in headers)).splitlines():
        plain = re.match(r"#define (FMHA_\w+) (\d+U?|UINT32_MAX)$", line)
        if plain:
            found.append(f"#define {plain.group(1)} {plain.group(2).rstrip('U').replace('UINT32_MAX', str(2**32 - 1))}")
    return "\n".join(sorted(found))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cc", default="cc")
    parser.add_argument("--include", action="append", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--header", action="append", help="instead of libfmha_client's: of another library, in a file of its own")
    options = parser.parse_args()
    headers = [h for h in options.header or HEADERS if any(os.path.exists(os.path.join(i, h)) for i in options.include)]
    builder = cffi.FFI()
    builder.cdef(declarations(options.cc, options.include, headers))
    builder.cdef(constants(options.cc, options.include, headers))
    builder.set_source(f"fmha.{pathlib.Path(options.out).stem}", None)
    builder.emit_python_code(options.out)


if __name__ == "__main__":
    main()
