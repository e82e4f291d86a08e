#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# clang-format, clang-tidy and cppcheck over every C source. Called by ./dev lint, which has installed
# them. Device code is left out: these tools do not read it.
set -uo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."
build=build/clang
failed=0

step() { printf '\033[1m== %s\033[0m\n' "$*" >&2; }

mapfile -t sources < <(git ls-files '*.c' '*.h' | grep -v '^kernels/gpu/')
mapfile -t units < <(git ls-files '*.c' | grep -v -e '^kernels/gpu/' -e '^tests/')

step "clang-format"
clang-format --dry-run -Werror "${sources[@]}" || failed=1

step "clang-tidy"
[ -f $build/build.ninja ] || cmake --preset clang >/dev/null || exit 1
cmake --build $build >/dev/null || exit 1 # generated headers, if any
printf '%s\n' "${units[@]}" |
    xargs -P "$(nproc)" -n 4 clang-tidy -p $build --quiet 2>/dev/null || failed=1

step "cppcheck"
cppcheck --quiet --error-exitcode=1 --inline-suppr --std=c11 -j "$(nproc)" \
    --enable=warning,performance,portability \
    --suppressions-list=tests/cppcheck.suppressions \
    -Iproto/include -Ikernels -D_GNU_SOURCE "${units[@]}" || failed=1

exit $failed
