#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""fmhad serves AMD's GPUs, end to end, where there is none: plans, compiles, loads and launches real code objects on a
libamdhip64 (tests/gpu/stub/hip_fake.h) that has them executed by the emulator.

    TINYGRAD=/path/to/tinygrad python3 tests/emulator/service.py [--arch gfx942] [--match TEXT]

Each problem is run by the daemon's CPU, by its GPU, and by local launch in this process: the GPU's results are near the
CPU's, and local launch has the GPU's bits. Skipped (exit 77), saying so, when TINYGRAD is unset.
"""
import argparse
import ctypes
import os
import pathlib
import sys
import time

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "tests" / "lib"), str(ROOT / "tests" / "gpu")]

import clangs  # noqa: E402
import fmha_local  # noqa: E402
import fmhad  # noqa: E402
from local import CAUSAL, attention, backward, by_service  # noqa: E402
from service import HostDevice, from_bf16  # noqa: E402

NAMES = {"gfx90a": "gfx90a:sramecc+:xnack-", "gfx942": "gfx942:sramecc+:xnack-", "gfx950": "gfx950:sramecc+:xnack-"}
LDS = {"gfx950": "163840"}
ALLOWED = {"f32": 2e-5, "f16": 8e-3, "bf16": 4e-2}
STARTS = {"seqstart_q": [0, 5, 5, 24], "seqstart_k": [0, 30, 38, 90]}
PACKED = {"mode": "group", "total_q": 24, "total_k": 90}
TABLE = np.random.default_rng(7).permutation(16).reshape(2, 8)


WIDE_TABLE = np.random.default_rng(8).permutation(80).reshape(2, 40)


def over_fp8(case):
    for role in "kv":
        case.tensors[role] = ("e4m3", case.tensors[role][1])
    return case


def cases():
    yield attention("f32", "f32", 1, 20, 40, 2, 1, 32)
    yield attention("causal", "bf16", 1, 40, 70, 2, 1, 64, **CAUSAL)
    yield attention("wide", "f16", 1, 20, 70, 2, 2, 128)
    yield attention("packed", "bf16", 3, 19, 52, 2, 1, 64, rows=24, kv=(1, 90, 1, 64), integers=STARTS, **PACKED, **CAUSAL)
    yield attention("split", "bf16", 1, 1, 150, 4, 1, 64, lse=False, n_splits=3)
    yield attention("paged", "f16", 2, 1, 100, 4, 1, 64, lse=False, kv=(16, 16, 1, 64), page_size=16, n_pages=16,
                    max_blocks=8, integers={"block_table": TABLE, "seqlen_k_per_batch": [100, 33]})
    yield attention("append", "bf16", 2, 1, 64, 2, 1, 64, lse=False, seqlen_new=1, inout=("k", "v"),
                    extra={"k_new": ("bf16", (2, 1, 1, 64)), "v_new": ("bf16", (2, 1, 1, 64))},
                    integers={"seqlen_k_per_batch": [20, 63]}, **CAUSAL)
    # Few rows over many keys of fp8: widened, split, merged.
    yield over_fp8(attention("widened", "bf16", 1, 70, 620, 4, 1, 64, **CAUSAL))
    yield over_fp8(attention("widened pages", "f16", 2, 40, 620, 4, 1, 64, kv=(80, 16, 1, 64), page_size=16, n_pages=80, max_blocks=40,
                             extra={"k_descale": ("f32", (2, 1, 1)), "v_descale": ("f32", (2, 1, 1))},
                             integers={"block_table": WIDE_TABLE, "seqlen_k_per_batch": [620, 77]}))
    yield attention("cap, bias", "f16", 1, 30, 40, 2, 2, 32, logits_soft_cap=20.0, extra={"bias": ("f16", (1, 2, 30, 40))})
    yield attention("dropout", "bf16", 1, 30, 40, 2, 2, 32, dropout_p=0.2, dropout_seed=3, dropout_offset=5)
    yield backward("backward", "bf16", 1, 30, 50, 2, 1, 64, **CAUSAL)
    yield backward("backward f32", "f32", 1, 20, 30, 1, 1, 32)
    yield backward("backward, split", "bf16", 1, 30, 150, 2, 1, 64, n_splits=3, **CAUSAL)
    yield backward("backward, split, packed", "f16", 3, 19, 140, 2, 1, 64, packed=(24, 178), n_splits=3, mode="group", total_q=24,
                   total_k=178, integers={"seqstart_q": [0, 5, 5, 24], "seqstart_k": [0, 30, 38, 178]}, **CAUSAL)


def numbers(case, role, raw):
    dtype, shape = case.tensors[role]
    stored = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}[dtype]
    x = np.frombuffer(raw, stored).reshape(shape)
    return from_bf16(x) if dtype == "bf16" else x.astype(np.float32)


def far(case, want, got):
    """Outputs that are not what the CPU found."""
    wrong = []
    for role in sorted(case.outputs & set(case.tensors)):
        a, b = numbers(case, role, want[role]), numbers(case, role, got[role])
        bar = ALLOWED[case.tensors["q"][0]]
        if not np.allclose(a, b, rtol=bar, atol=bar * max(1, np.abs(a[np.isfinite(a)]).max(initial=0))):
            wrong.append(f"{role} is off by {np.nanmax(np.abs(a - b)):.1e}")
    return ", ".join(wrong)


class Memory:
    """Contents in device memory of this process."""

    def __init__(self, hip, contents):
        self.hip, self.contents, self.at = hip, contents, {}
        for role, x in contents.items():
            self.at[role] = self.allocate(x.nbytes)
            ctypes.memmove(self.at[role], x.ctypes.data, x.nbytes)

    def allocate(self, size):
        pointer = ctypes.c_void_p()
        if self.hip.hipMalloc(ctypes.byref(pointer), ctypes.c_size_t(size)) != 0:
            raise MemoryError(size)
        return pointer.value

    def bytes_of(self, role):
        return ctypes.string_at(self.at[role], self.contents[role].nbytes)

    def free(self):
        for pointer in self.at.values():
            self.hip.hipFree(ctypes.c_void_p(pointer))


def by_local_launch(hip, device, case, contents):
    memory = Memory(hip, contents)
    plan = device.plan(case.problem(), memory.at)
    memory.at["workspace"] = memory.allocate(max(plan.info.workspace_bytes, 1))
    plan.run(memory.at, memory.at["workspace"])
    assert hip.hipStreamSynchronize(None) == 0
    found = {role: memory.bytes_of(role) for role in contents}
    plan.free()
    memory.free()
    return found


def judge(cpu, gpu, hip, local, case):
    """What is wrong, "" when nothing is."""
    contents = case.contents()
    want, got = by_service(cpu, case, contents), by_service(gpu, case, contents)
    if all(got[role] == contents[role].tobytes() for role in case.outputs & set(contents)):
        return "nothing was written"
    wrong = far(case, want, got)
    here = by_local_launch(hip, local, case, contents)
    differ = [role for role in case.outputs & set(contents) if here[role] != got[role]]
    return wrong + (f" local launch differs: {' '.join(differ)}" if differ else "")


def run_arch(arch, match, library_path):
    clang = clangs.find(arch)
    told = {"HIP_FAKE_ARCH": NAMES.get(arch, arch), "HIP_FAKE_LDS": LDS.get(arch, "65536"),
            "HIP_FAKE_RUNNER": str(HERE / "runner.py"), "LD_LIBRARY_PATH": str(library_path.parent)}
    os.environ.update({key: value for key, value in told.items() if key != "LD_LIBRARY_PATH"})
    config = {
        "devices": [{"backend": "cpu"}, {"backend": "hip", "stall_ms": 600000}],
        "compile": {"cache": os.path.join(clangs.build_folder(), "emulator", "service"), "clang": clang.command,
                    "deadline_ms": 600000, **({"linker": clang.linker} if clang.linker else {})},
        "supervision": {"heartbeat_timeout_ms": 600000},
    }
    hip, failed, done = ctypes.CDLL(str(library_path)), 0, 0
    library = fmha_local.Library(next(fmhad.build_dir().rglob("libfmha_client.so.1")))
    with fmhad.Daemon(config, env=told) as daemon, daemon.device(0) as cpu, daemon.device(1) as gpu:
        local = library.open(daemon.socket, 1, 600000)
        assert gpu.info["arch"] == arch, gpu.info
        HostDevice(gpu)
        cpu.timeout = gpu.timeout = 600
        for case in cases():
            if match not in case.name:
                continue
            start, wrong = time.monotonic(), judge(cpu, gpu, hip, local, case)
            failed, done = failed + bool(wrong), done + 1
            print(f"{'FAIL' if wrong else 'ok  '} {arch} {case.name:12} {time.monotonic() - start:6.1f} s {wrong}", flush=True)
        local.close()
    return failed, done


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", action="append", help="gfx942 unless said otherwise")
    parser.add_argument("--match", default="", help="only problems whose name holds this")
    options = parser.parse_args()
    library_path = next(fmhad.build_dir().rglob("hip/libamdhip64.so"), None)
    if not os.environ.get("TINYGRAD") or not library_path:
        print("service: skipped, TINYGRAD is not set or the build has no fake of libamdhip64")
        return 77
    counts = [run_arch(arch, options.match, library_path) for arch in clangs.known(options.arch or ("gfx942",), "service")]
    failed, done = (sum(column) for column in zip((0, 0), *counts))
    print(f"service: {done - failed} of {done} problems were served as the CPU does, and launched alike by their client")
    return 1 if failed or not done else 0


if __name__ == "__main__":
    sys.exit(main())
