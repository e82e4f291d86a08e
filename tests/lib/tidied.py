# SPDX-License-Identifier: MIT
"""clang-tidy over sources, except over those that it has passed already as they are.

    tidied.py BUILD SOURCE...

A source is as it was when its preprocessed text is, for each way that BUILD's compile_commands.json compiles it, and
.clang-tidy and the tool are: then a file of that name lies in build/tidied/. What BUILD does not compile, since this machine lacks a
library for it, is left out: nobody knows where its headers are.
"""
import concurrent.futures
import hashlib
import json
import os
import pathlib
import shlex
import subprocess
import sys
import time

import progress

ROOT = pathlib.Path(__file__).resolve().parents[2]
PASSED = ROOT / "build/tidied"


def preprocess(entry):
    """What the compiler sees: b"" where it does not get that far, which clang-tidy then tells better."""
    words = shlex.split(entry["command"])
    if os.path.basename(words[0]) == "ccache":
        words = words[1:]
    words = [word for n, word in enumerate(words) if word not in ("-c", "-o") and (n == 0 or words[n - 1] != "-o")]
    return subprocess.run([*words, "-E"], cwd=entry["directory"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False).stdout


def key_of(source, entries, salt):
    digest = hashlib.sha256(salt + source.encode())
    for entry in entries:
        text = preprocess(entry)
        if not text:
            return None
        digest.update(entry["command"].encode() + text)
    return digest.hexdigest()


def tidy(build, source, entries, salt):
    """(source, what was wrong, whether it was looked at)"""
    key = key_of(source, entries, salt)
    if key and (PASSED / key).exists():
        (PASSED / key).touch()
        return source, "", False
    done = subprocess.run(["clang-tidy", "-p", str(build), "--quiet", source], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return source, done.stdout or done.stderr or f"clang-tidy ended with {done.returncode}", True
    if key:
        (PASSED / key).touch()
    return source, done.stdout, True


def main():
    build, sources = pathlib.Path(sys.argv[1]).resolve(), sys.argv[2:]
    commands = json.loads((build / "compile_commands.json").read_text())
    by_source = {}
    for entry in commands:
        by_source.setdefault(os.path.relpath(entry["file"], ROOT), []).append(entry)
    salt = (ROOT / ".clang-tidy").read_bytes() + subprocess.run(["clang-tidy", "--version"], stdout=subprocess.PIPE, check=True).stdout
    PASSED.mkdir(parents=True, exist_ok=True)
    for path in PASSED.iterdir():  # of sources that are long gone
        if time.time() - path.stat().st_mtime > 30 * 86400:
            path.unlink()
    failed, looked = 0, 0
    strange = [source for source in sources if source not in by_source]
    if strange:
        print(f"clang-tidy: not compiled here, left out: {' '.join(strange)}", file=sys.stderr)
    sources = [source for source in sources if source in by_source]
    with concurrent.futures.ThreadPoolExecutor(int(os.environ.get("JOBS", os.cpu_count() or 1))) as pool:
        running = [pool.submit(tidy, build, source, by_source[source], salt) for source in sources]
        for done in progress.told(concurrent.futures.as_completed(running), len(sources), "clang-tidy"):
            source, wrong, new = done.result()
            looked += new
            failed += bool(wrong)
            if wrong:
                print(f"{source}:\n{wrong}", flush=True)
    print(f"clang-tidy: {looked} sources, {len(sources) - looked} passed before as they are, {failed} are not well", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
