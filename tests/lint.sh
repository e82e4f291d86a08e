#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# clang-format, clang-tidy and cppcheck over every C source. Called by ./dev lint, which has installed
# them. Device code is left out: these tools do not read it.
#
#   tests/lint.sh              all of it
#   tests/lint.sh --changed    clang-tidy, the slow one, only over what the last commits and the
#                              working tree changed, and an eighth of the rest: another eighth
#                              after each commit
set -uo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."
build=build/clang
jobs=${JOBS:-$(nproc)}
failed=0

. tests/lib/say.sh

# By find, since a source tree need not be a clone.
mapfile -t sources < <(find cli proto specs kernels daemon client tests -name '*.[ch]' | grep -v '^kernels/gpu/' | sort)
mapfile -t units < <(printf '%s\n' "${sources[@]}" | grep '\.c$' | grep -v '^tests/')

tidied=("${units[@]}")
if [ "${1:-}" = --changed ]; then
    changed=$({ git log -8 --format= --name-only && git diff --name-only HEAD; } 2>/dev/null)
    turn=$(git rev-list --count HEAD 2>/dev/null || date +%s)
    tidied=()
    for n in "${!units[@]}"; do
        if ((n % 8 == turn % 8)) || grep -qxF "${units[n]}" <<<"$changed"; then
            tidied+=("${units[n]}")
        fi
    done
fi

say "clang-format"
clang-format --dry-run -Werror "${sources[@]}" || failed=1

say "clang-tidy, ${#tidied[@]} of ${#units[@]} sources"
[ -f $build/build.ninja ] || cmake --preset clang >/dev/null || exit 1
printf '%s\n' "${tidied[@]}" |
    xargs -P "$jobs" -n 4 clang-tidy -p $build --quiet 2>/dev/null || failed=1

say "cppcheck"
mapfile -t includes < <(find cli proto specs kernels daemon client -type d -name include -printf '-I%p\n')
cppcheck --quiet --error-exitcode=1 --inline-suppr --std=c11 -j "$jobs" \
    --enable=warning,performance,portability \
    --suppressions-list=tests/cppcheck.suppressions \
    "${includes[@]}" -D_GNU_SOURCE "${units[@]}" || failed=1

exit $failed
