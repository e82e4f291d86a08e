#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# Every benchmark, each printing ratios to something measured beside it in the same run.
#
#   tests/bench/run.sh [cpu|specs|rpc|idle|pool|watch|fair|plan|selection|tuning|gpu|coldstart|house ...]
#                                             default: cpu specs rpc idle
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/../.."
. tests/lib/say.sh
bin=build/release/tests/bench
fmhad=$(find build/release/daemon -name fmhad -type f -perm -u+x | head -1)
folder=
pid=

stop_daemon() {
    if [ -n "$pid" ]; then
        kill -TERM "$pid" 2>/dev/null || true
        wait "$pid" 2>/dev/null || true
        pid=
    fi
    [ -z "$folder" ] || rm -rf "$folder"
    folder=
}
trap stop_daemon EXIT

start_daemon() { # devices JSON
    folder=$(mktemp -d)
    printf '{"socket": "%s/fmhad.sock", "devices": %s, "compile": {"cache": "%s/cache",
        "sources": "%s/kernels/gpu", "library_path": "%s"}}\n' \
        "$folder" "$1" "$folder" "$PWD" "${LD_LIBRARY_PATH:-/usr/lib}" >"$folder/fmhad.json"
    "$fmhad" --config "$folder/fmhad.json" 2>"$folder/log" &
    pid=$!
    for _ in $(seq 100); do
        [ -S "$folder/fmhad.sock" ] && return
        sleep 0.05
    done
    cat "$folder/log" >&2
    return 1
}

title() {
    echo
    bold 1 "$*"
}

bench_cpu() {
    title "CPU kernels, $(sed -n 's/^model name\s*: //p' /proc/cpuinfo | head -1), $(nproc) cores"
    "$bin/bench_cpu"
}

bench_specs() {
    title "Kernel space"
    "$bin/bench_specs"
}

bench_rpc() {
    title "Calls"
    start_daemon '[{"backend": "cpu"}]'
    "$bin/bench_rpc" "$folder/fmhad.sock"
    stop_daemon
}

bench_pool() {
    title "Asking a pool"
    start_daemon '[{"backend": "cpu"}]'
    "$bin/bench_pool" "$folder/fmhad.sock"
    stop_daemon
    FMHA_BUILD=$PWD/build/release /usr/bin/python3 tests/bench/pool_disk.py
}

# What being watched costs a tiny request.
bench_watch() {
    title "Watching"
    start_daemon '[{"backend": "cpu"}]'
    "$bin/bench_watch" "$folder/fmhad.sock"
    stop_daemon
}

# Two minutes. As root, the attackers are another user.
bench_fair() {
    title "A light user beside a heavy one"
    start_daemon '[{"backend": "cpu"}]'
    chmod 755 "$folder"
    chmod 666 "$folder/fmhad.sock"
    "$bin/bench_fair" "$folder/fmhad.sock"
    stop_daemon
    title "64 sessions of one method"
    FMHA_BUILD=$PWD/build/release python3 tests/bench/fair_methods.py || true
}

# Resident memory and wake-ups of a daemon that nobody uses, each of its processes.
bench_idle() {
    title "An idle daemon"
    start_daemon '[{"backend": "cpu"}]'
    sleep 2
    local p before after rss seconds=10
    declare -A switches
    local processes="$pid $(cat "/proc/$pid/task/$pid/children")"
    for p in $processes; do
        switches[$p]=$(cat /proc/"$p"/task/*/status | awk '/ctxt_switches/ {n += $2} END {print n}')
    done
    sleep $seconds
    printf '%-10s %14s %20s\n' process "resident MiB" "wake-ups a second"
    for p in $processes; do
        before=${switches[$p]}
        after=$(cat /proc/"$p"/task/*/status | awk '/ctxt_switches/ {n += $2} END {print n}')
        rss=$(awk '/^VmRSS/ {print $2}' "/proc/$p/status")
        printf '%-10s %14s %20s\n' "$([ "$p" = "$pid" ] && echo front || echo worker)" \
            "$(awk "BEGIN {printf \"%.1f\", $rss / 1024}")" \
            "$(awk "BEGIN {printf \"%.2f\", ($after - $before) / $seconds}")"
    done
    stop_daemon
}

# Minutes of compiling; needs NVRTC, no GPU.
bench_coldstart() {
    title "A cold machine"
    /usr/bin/python3 tests/bench/coldstart.py
}

# The choice of kernels against the best of all candidates, on this machine's CPU.
bench_selection() {
    title "The choice of kernels"
    FMHA_BUILD=$PWD/build/release /usr/bin/python3 tests/bench/selection.py
}

bench_plan() {
    title "New plans, by the formula and by a model of times"
    "$bin/bench_plan"
}

# A client's latency while candidates are measured; a minute and a half.
bench_tuning() {
    title "A client beside automatic tuning"
    FMHA_BUILD=$PWD/build/release /usr/bin/python3 tests/bench/tuning.py
}

# Needs an NVIDIA GPU and PyTorch.
bench_gpu() {
    title "Calls, on a GPU"
    start_daemon '[{"backend": "cuda"}]'
    "$bin/bench_rpc" --device 0 "$folder/fmhad.sock"
    stop_daemon
    title "Local launch, served runs, and kernels beside cuDNN and FlashAttention-2: build/bench/gpu.{json,csv,svg}"
    FMHA_BUILD=$PWD/build/release python3 tests/bench/bench_gpu.py --out build/bench
}

# No times but sizes: of the sources, and of a first plan's way through them.
bench_house() {
    title "The house"
    /usr/bin/python3 tests/bench/house.py
}

for part in "${@:-cpu specs rpc idle}"; do
    for name in $part; do
        "bench_$name"
    done
done
