#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# Gathers what a GPU machine without our libraries needs to run tests/gpu/: programs, modules, shared
# libraries and Python's msgpack, into build/gpu. Run it where fmhad was built.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/../.."
from=${1:-build/release}
to=build/gpu
rm -rf $to
mkdir -p $to/daemon/front $to/libexec/fmhad $to/share/fmhad $to/bin $to/lib/fmhad $to/python $to/tests/gpu
cp "$from"/daemon/front/{fmhad,guard_gpu} $to/daemon/front/
cp "$from"/daemon/front/fmhad-cuda.so $to/lib/fmhad/
cp "$from"/daemon/compile/fmhad-{compile,build} $to/libexec/fmhad/
ln -s ../../../../specs ../../../../kernels $to/share/fmhad/
find "$from" \( -name fmhactl -o -name bench_rpc -o -name bench_local -o -name bench_cpu -o -name "test_cpu_*" \
    -o -name "test_dispatch_*" \) -type f \
    -perm -u+x -exec cp {} $to/bin/ \;
cp -L "$from"/client/libfmha_client.so.1 $to/lib/
cp "$from"/tests/gpu/libfmha_gpu_check.so $to/tests/gpu/
for library in libuv.so.1 libmsgpackc.so.2 libcjson.so.1 libnettle.so.8 libcmocka.so.0; do
    cp -L "/usr/lib/x86_64-linux-gnu/$library" $to/lib/
done
cp -r /usr/lib/python3/dist-packages/msgpack $to/python/
# fmha and what it loads: PYTHONPATH=build/gpu/python, FMHA_CLIENT_LIBRARY=build/gpu/lib/libfmha_client.so.0 and
# FMHA_BIN=build/gpu/daemon/front. cffi's compiled half is that machine's Python's: STAGE_PYTHON=3.12 fetches its wheel.
if [ -e "$from"/client/python/fmha/_abi.py ]; then
    cp -rL --no-preserve=mode "$from"/client/python/fmha $to/python/
    rm -rf $to/python/fmha/_native $to/python/fmha/__pycache__
    mkdir -p $to/python/fmha/_native/lib
    cp "$from"/client/python/libfmha_slot.so $to/python/fmha/_native/lib/
fi
if [ -n "${STAGE_PYTHON:-}" ]; then
    python3 -m pip install --quiet --target $to/python --no-deps --only-binary=:all: --implementation cp --python-version "$STAGE_PYTHON" \
        --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 cffi
fi
# torch's own tests with fmhad in its slot: TORCH_TESTS names its test/test_transformers.py; what that imports from beside it and
# expecttest come along.
if [ -n "${TORCH_TESTS:-}" ]; then
    mkdir -p $to/upstream
    cp "$TORCH_TESTS" $to/upstream/test_transformers.py
    for beside in "$(dirname "$TORCH_TESTS")"/test_cpp_extensions_open_device_registration.py; do
        [ ! -e "$beside" ] || cp "$beside" $to/upstream/
    done
    python3 -m pip install --quiet --target $to/python --no-deps expecttest
fi
strip $to/bin/* $to/daemon/front/* $to/libexec/fmhad/* $to/lib/*.so* $to/lib/fmhad/* 2>/dev/null || true
du -sh $to
