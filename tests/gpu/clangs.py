# SPDX-License-Identifier: MIT
"""Which clang compiles for an arch of AMD's: Debian's, whose code the tables of tests/emulator count, or one that knows
what that does not. gfx950 and gfx12, for which fmhad refuses clang 19 (daemon/compile/fit.h), have PyPI's, which has no linker
for AMD GPUs:

    python3 -m pip install --target build/ziglang ziglang

$FMHA_CLANG names another one for every arch, and $FMHA_LINKER its linker.
"""
import collections
import functools
import os
import subprocess
import tempfile

import abi

DEBIAN = "clang-19"
OTHERS = ("amdclang++", "/opt/rocm/llvm/bin/clang++", "clang-22", "clang-21", "clang-20")
ZIG = os.path.join(abi.ROOT, "build", "ziglang", "ziglang", "zig")
DIALECT = ["-w", "-x", "hip", "--cuda-device-only", "--no-gpu-bundle-output", "-nogpulib", "-nogpuinc", "-std=c++17", "-O3"]
LIMITS = f"{16 << 30},600"  # bytes and seconds of one compile

Clang = collections.namedtuple("Clang", "command linker")


def build_folder():
    return os.environ.get("FMHA_BUILD", os.path.join(abi.ROOT, "build", "release"))


def zig_as_clang():
    """A command of one word."""
    folder = os.path.join(build_folder(), "emulator")
    path = os.path.join(folder, "zig-clang")
    os.makedirs(folder, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False, encoding="ascii") as f:
        f.write(f'#!/bin/sh\nexec "{ZIG}" clang "$@"\n')
    os.chmod(f.name, 0o755)
    os.rename(f.name, path)
    return path


def candidates():
    if os.environ.get("FMHA_CLANG"):
        yield Clang(os.environ["FMHA_CLANG"], os.environ.get("FMHA_LINKER", ""))
        return
    yield Clang(DEBIAN, "")
    if os.access(ZIG, os.X_OK):
        yield Clang(zig_as_clang(), "ld.lld-19")
    for command in OTHERS:
        yield Clang(command, "")


def knows(command, arch):
    """And fmhad has it compile for that arch."""
    try:
        done = subprocess.run([command, *DIALECT, f"--offload-arch={arch}", "-S", "-o", "-", "/dev/null"],
                              capture_output=True, check=False)
    except OSError:
        return False
    fits = subprocess.run([helper(), "--version", "clang", command, arch], capture_output=True, check=False)
    return done.returncode == fits.returncode == 0


@functools.cache
def find(arch):
    """The first that knows it, or None."""
    return next((clang for clang in candidates() if knows(clang.command, arch)), None)


def known(archs, who):
    """Those of @archs that some clang here knows; @who says which ones are skipped."""
    missing = [arch for arch in archs if not find(arch)]
    for arch in missing:
        print(f"{who}: {arch} skipped, no clang here will do for it (tests/gpu/clangs.py says which one does)")
    return [arch for arch in archs if arch not in missing]


@functools.cache
def standing_options(command):
    """What fmhad gives every build by this compiler, as its helper says it."""
    version = subprocess.run([helper(), "--version", "clang", command], capture_output=True, text=True, check=True)
    return tuple(version.stdout.split()[2:])


def helper():
    return os.path.join(build_folder(), "daemon", "compile", "fmhad-compile")


def compile_object(arch, source, options, out):
    """The way fmhad builds: by its helper, which puts the folder of @source in front of what is included."""
    clang = find(arch)
    open(out, "wb").close()
    done = subprocess.run([helper(), "clang", arch, os.path.dirname(source), os.path.basename(source), out, LIMITS, *clang,
                           *standing_options(clang.command), "-w", *options], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{clang.command}: {done.stderr[:300]}")


def compile_with_notes(arch, source, options, careless=False):
    """The assembly that it comes to, and what clang says besides. @careless leaves out what fmhad gives every build."""
    clang = find(arch)
    standing = () if careless else standing_options(clang.command)
    done = subprocess.run([clang.command, *DIALECT, "-S", f"--offload-arch={arch}", "-I" + os.path.dirname(source),
                           "-I" + abi.INCLUDE, *standing, *options, "-o", "-", source],
                          capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-300:])
    return done.stdout, done.stderr


def compile_text(arch, source, options):
    return compile_with_notes(arch, source, options)[0]
