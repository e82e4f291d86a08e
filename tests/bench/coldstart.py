#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""A cold machine: eight processes ask at once for the kernels of a model, in f16 and bf16.

    tests/bench/coldstart.py [--processes N]

Three times: with an empty cache, with the one that this left, and with a pack of it, as it is shipped, as the layer below
an empty one. Compiling is NVRTC's; without a GPU the stub driver stands in for the card, since nothing is run. What is wanted
follows from the run: the compilers' own processor time divided by the cores, and a second; without compiling 0.2 s.
"""
import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "lib"))
import fmhad  # noqa: E402

SLACK_S, WARM_S = 1.0, 0.2
MODEL = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}


def environment():
    stub = next(fmhad.build_dir().rglob("libcuda.so.1"), None)
    if subprocess.run(["sh", "-c", "nvidia-smi -L"], capture_output=True, check=False).returncode == 0 or not stub:
        return dict(os.environ)
    path = ":".join(filter(None, [str(stub.parent), os.environ.get("LD_LIBRARY_PATH")]))
    return {**os.environ, "LD_LIBRARY_PATH": path, "CUDA_STUB_IDLE": "1"}


def compilers_seconds(pid):
    """Processor time of a process' children that have ended."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")


def ask(folder, compiler, n):
    """Starts a daemon, then the processes: seconds until the last has its answer, of the compilers, kernels built."""
    library_path = os.environ.get("LD_LIBRARY_PATH", "/usr/lib")
    config = {"devices": [{"backend": "cuda"}],
              "compile": {**compiler, "sources": str(ROOT / "kernels/gpu"), "library_path": library_path,
                          "jobs": os.cpu_count(), "deadline_ms": 600000}}
    with fmhad.Daemon(config, env=environment()) as daemon:
        start = time.monotonic()
        command = [fmhad.find_program("fmhactl"), "warm", "--socket", daemon.socket, "--model", folder / "config.json"]
        processes = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(n)]
        failed = sum(process.wait() != 0 for process in processes)
        took = time.monotonic() - start
        compile_state = daemon.status()["front"]["compile"]
        arch = daemon.status()["devices"][0]["arch"]
        return took, compilers_seconds(daemon.pid), compile_state["built"], failed, arch


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=8)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory() as name:
        folder, bad = pathlib.Path(name), 0
        (folder / "config.json").write_text(json.dumps(MODEL))
        cache, pack = str(folder / "cache"), str(folder / "shipped.pack")
        for title, compiler in (
            ("empty", {"cache": cache}),
            ("warm", {"cache": cache}),
            ("pack", {"cache": str(folder / "own"), "layer": pack}),
        ):
            if title == "pack":
                fmhad.write_pack(cache, arch, pack)
            took, cpu, built, failed, arch = ask(folder, compiler, options.processes)
            bad += failed or (built > 0) != (title == "empty")
            wanted = cpu / os.cpu_count() + SLACK_S if built else WARM_S
            print(f"{title:6} {options.processes} processes: {took:6.2f} s, {built} kernels built in {cpu:.1f} s of {os.cpu_count()} "
                  f"cores; wanted {wanted:.2f} s: {'met' if took <= wanted else 'MISSED'}"
                  f"{', FAILED' if failed else ''}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
