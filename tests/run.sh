#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# Everything `./dev test` runs, in order: the quick parts first. Called by ./dev, which has installed
# the packages.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."

step() { printf '\033[1m== %s\033[0m\n' "$*" >&2; }

step "build (release)"
./dev build release
step "unit tests"
ctest --test-dir build/release --output-on-failure -j "$(nproc)"
