# SPDX-License-Identifier: MIT
"""`./dev demo`: one private fmhad, three client processes at the same time, every result checked.

Starts a daemon in a temporary directory, makes Q, K, V as .npy files (float32, and bfloat16 carried
as uint16), lets a C program, fmhactl and a Python script compute the same attention through the
daemon at once, compares each result with the double-precision reference, prints a table, stops the
daemon, and looks whether anything is left. Programs do not start equally fast: what counts is the
time in which all three ran.
"""
import json
import os
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

import numpy

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "lib"))
import fmhad

BATCH, HEADS, KV_HEADS, SEQLEN, HDIM = 2, 16, 4, 1024, 128
RUNS = 8  # of each client, while the others run too
SECONDS = 4  # how long each goes on at first
CLIENTS = ("C program (libfmha_client)", "fmhactl run forward", "Python (stock msgpack)")


def say(text):
    print(text, flush=True)


def bfloat16(array):
    """The nearest bfloat16 of each float32, as uint16; ties to even."""
    bits = array.view(numpy.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(numpy.uint16)


def make_inputs(directory):
    """{type name: (Q, K, V) paths}"""
    rng = numpy.random.default_rng(2024)
    shapes = {"q": (BATCH, SEQLEN, HEADS, HDIM), "k": (BATCH, SEQLEN, KV_HEADS, HDIM)}
    shapes["v"] = shapes["k"]
    paths = {"float32": [], "bfloat16": []}
    for name, shape in shapes.items():
        array = rng.standard_normal(shape, dtype=numpy.float32)
        for dtype, values in (("float32", array), ("bfloat16", bfloat16(array))):
            path = directory / f"{name}_{dtype}.npy"
            numpy.save(path, values)
            paths[dtype].append(str(path))
    return paths


def commands(inputs, outputs, seconds):
    q, k, v = inputs
    fmhactl = [fmhad.find_program("fmhactl"), "run", "forward", "--json", "--seconds", seconds]
    return [
        [fmhad.find_program("fmha_demo_client"), q, k, v, outputs[0], seconds],
        [*fmhactl, "--q", q, "--k", k, "--v", v, "--out", outputs[1]],
        [sys.executable, str(HERE / "wire_client.py"), q, k, v, outputs[2], seconds],
    ]


def overlap(reports):
    """Of each report the times of those runs that began and ended while all clients were running."""
    begun = [[run["end_ns"] - run["kernel_ms"] * 1e6 for run in report["runs"]] for report in reports]
    first = max(starts[0] for starts in begun)
    last = min(report["runs"][-1]["end_ns"] for report in reports)
    return [
        [run["kernel_ms"] for run, start in zip(report["runs"], starts) if first <= start and run["end_ns"] <= last]
        for report, starts in zip(reports, begun)
    ]


def measure(inputs, outputs, environment):
    """What each client reports, with the median "ms" of its runs; again, longer, when these are few."""
    seconds = SECONDS
    while True:
        reports = run_at_once(inputs, outputs, environment, seconds)
        times = overlap(reports)
        if min(len(ms) for ms in times) >= RUNS or seconds > 16 * SECONDS:
            break
        seconds *= 2
    for report, ms in zip(reports, times):
        report["n"] = len(ms)
        report["ms"] = statistics.median(ms) if ms else float("nan")
    return reports


def run_at_once(inputs, outputs, environment, seconds):
    """What each client reports: kernel, flops, and its runs."""
    processes = [
        subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, env=environment)
        for command in commands(inputs, outputs, seconds)
    ]
    reports = []
    try:
        for name, process in zip(CLIENTS, processes):
            text, _ = process.communicate(timeout=300)
            if process.returncode != 0:
                raise RuntimeError(f"{name} failed with exit status {process.returncode}")
            report = json.loads(text)
            if "kernels" in report:  # fmhactl's own words
                report["kernel"] = report["kernels"][0]
            reports.append(report)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
    return reports


def judge(inputs, outputs):
    """(max error, allowed, verdict) of each output, against one reference."""
    result = subprocess.run(
        [fmhad.find_program("fmha_demo_judge"), *inputs, *outputs],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    rows = [line.split() for line in result.stdout.splitlines()]
    return [(float(error), float(allowed), verdict) for error, allowed, verdict in rows]


def print_table(dtype, reports, verdicts):
    say("")
    say(
        f"{dtype}: batch {BATCH}, {HEADS} query heads, {KV_HEADS} KV heads, "
        f"seqlen {SEQLEN}, hdim {HDIM}"
    )
    header = f"  {'client':<28}{'runs':>6}{'ms':>9}{'GFLOP/s':>10}{'max error':>12}{'allowed':>11}  verdict"
    kernels = {report["kernel"] for report in reports}
    for kernel in sorted(kernels):
        say(f"  kernel {kernel}")
    say(header)
    say("  " + "-" * (len(header) - 2))
    for name, report, (error, allowed, verdict) in zip(CLIENTS, reports, verdicts):
        rate = report["flops"] / report["ms"] / 1e6
        say(
            f"  {name:<28}{report['n']:>6}{report['ms']:>9.2f}{rate:>10.1f}{error:>12.2e}{allowed:>11.2e}"
            f"  {verdict}"
        )


def leftovers(daemon, children, directory):
    """What should not be there any more."""
    left = [f"process {pid}" for pid in (daemon.pid, *children) if os.path.exists(f"/proc/{pid}")]
    left += [str(path) for path in (daemon.socket, daemon.directory, directory) if os.path.exists(path)]
    return left


def demo(directory):
    good = True
    with fmhad.Daemon({"devices": [{"backend": "cpu"}]}) as daemon:
        environment = {**os.environ, "FMHAD_SOCKET": daemon.socket}
        children = daemon.children()
        say(f"fmhad runs as process {daemon.pid}, its worker as {children[0]}; socket {daemon.socket}")
        paths = make_inputs(directory)
        for dtype, inputs in paths.items():
            outputs = [str(directory / f"out{i}_{dtype}.npy") for i in range(len(CLIENTS))]
            reports = measure(inputs, outputs, environment)
            verdicts = judge(inputs, outputs)
            print_table(dtype, reports, verdicts)
            good = good and all(verdict == "ok" for _, _, verdict in verdicts)
    status = daemon.process.returncode
    return daemon, children, good and status == 0, status


def main():
    # A terminated demo cleans up like an interrupted one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    started = time.monotonic()
    directory = pathlib.Path(tempfile.mkdtemp(prefix="fmhad-demo-"))
    try:
        daemon, children, good, status = demo(directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    left = leftovers(daemon, children, directory)
    say("")
    say("ms: in the kernel, the median of the runs that fell into the time in which all three clients ran.")
    say("max error: against attention computed in double precision from the same inputs.")
    say(
        f"The daemon ended with status {status}; left behind: {', '.join(left) or 'nothing'}; "
        f"{time.monotonic() - started:.0f} s in all."
    )
    return 0 if good and not left else 1


if __name__ == "__main__":
    sys.exit(main())
