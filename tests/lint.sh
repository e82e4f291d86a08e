#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# clang-format, clang-tidy and cppcheck over every C source. Called by ./dev lint, which has installed
# them. Of device code only long lines are looked at: the other tools do not read it.
#
#   tests/lint.sh              all of it
#   tests/lint.sh --changed    clang-tidy and cppcheck, the slow ones, only over what the last commits and
#                              the working tree changed, and a sixteenth of the rest: another one after
#                              each commit, or where there is no clone each day
#
# What they have passed is not looked at again while it is as it was: build/tidied and build/cppcheck know.
set -uo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."
build=build/clang
jobs=${JOBS:-$(nproc)}
failed=0

. tests/lib/say.sh

# By find, since a source tree need not be a clone; what pip has built is no source.
mapfile -t sources < <(find cli proto specs kernels daemon client tests -name build -prune -o -name '*.[ch]' -print | grep -v '^kernels/gpu/' | sort)
mapfile -t units < <(printf '%s\n' "${sources[@]}" | grep '\.c$' | grep -v '^tests/')

looked_at=("${units[@]}")
if [ "${1:-}" = --changed ]; then
    changed=$({ git log -4 --format= --name-only && git diff --name-only HEAD; } 2>/dev/null)
    turn=$(git rev-list --count HEAD 2>/dev/null || echo $(($(date +%s) / 86400)))
    looked_at=()
    for n in "${!units[@]}"; do
        if ((n % 16 == turn % 16)) || grep -qxF "${units[n]}" <<<"$changed"; then
            looked_at+=("${units[n]}")
        fi
    done
fi

layout() {
    clang-format --dry-run -Werror "${sources[@]}" && /usr/bin/python3 tests/lib/device_layout.py --check
}

tidy() {
    [ -f $build/build.ninja ] || cmake --preset clang >/dev/null || return 1
    JOBS=$jobs /usr/bin/python3 tests/lib/tidied.py $build "${looked_at[@]}"
}

check() {
    mapfile -t includes < <(find cli proto specs kernels daemon client -type d -name include -printf '-I%p\n')
    mkdir -p build/cppcheck
    # Its own progress ("3/40 files checked 7% done") is what quietly shows.
    quietly cppcheck cppcheck --error-exitcode=1 --inline-suppr --std=c11 -j "$jobs" \
        --cppcheck-build-dir=build/cppcheck --enable=warning,performance,portability \
        --suppressions-list=tests/cppcheck.suppressions \
        "${includes[@]}" -D_GNU_SOURCE "${looked_at[@]}"
}

say "clang-format"
timed "lint: clang-format" layout || failed=1
say "clang-tidy, ${#looked_at[@]} of ${#units[@]} sources"
timed "lint: clang-tidy" tidy || failed=1
say "cppcheck, ${#looked_at[@]} of ${#units[@]} sources"
timed "lint: cppcheck" check || failed=1

exit $failed
