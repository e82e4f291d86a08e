#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# run.sh [SECONDS]: the fuzzers, each for so many seconds (default 12), from the golden messages.
# With FMHA_CORPUS=DIR the corpus is kept there from run to run. Fails when a fuzzer finds something;
# the input that did it is then in build/fuzz/found/.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/../.."

seconds=${1:-12}
build=build/fuzz
[ -f $build/build.ninja ] || cmake --preset fuzz >/dev/null
cmake --build $build -j "${JOBS:-$(nproc)}" --target fuzzers

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$scratch/seeds" $build/found
$build/tests/fuzz/fuzz_seeds "$scratch/seeds"

# What fuzz_specs reads is text.
mkdir -p "$scratch/seeds_specs"
n=0
while IFS= read -r line; do
    printf '%b' "$line" >"$scratch/seeds_specs/$((n++))"
done <tests/fuzz/specs.seeds

for fuzzer in precheck message problem specs; do
    corpus=${FMHA_CORPUS:-$scratch}/$fuzzer
    seeds=$scratch/seeds
    [ $fuzzer != specs ] || seeds=$scratch/seeds_specs
    mkdir -p "$corpus"
    log=$scratch/$fuzzer.log
    echo "fuzz_$fuzzer: $seconds s" >&2
    if ! $build/tests/fuzz/fuzz_$fuzzer -max_total_time="$seconds" -max_len=2048 -timeout=5 \
        -rss_limit_mb=512 -malloc_limit_mb=64 -print_final_stats=1 -artifact_prefix=$build/found/ \
        "$corpus" "$seeds" >"$log" 2>&1; then
        tail -n 40 "$log" >&2
        echo "fuzz_$fuzzer: found something, see above and $build/found/" >&2
        exit 1
    fi
    awk -v name="fuzz_$fuzzer" '/number_of_executed_units/ { print name ": " $2 " executions, no fault" }' "$log"
done
