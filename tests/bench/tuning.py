#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""What automatic tuning costs a client: its 99th percentile with tuning over without.

    tests/bench/tuning.py [--backend cuda] [--bursts 24] [--idle-s 1]

One daemon; the client's runs come in bursts with a pause between them, in which the device is idle and,
before every other burst, measures candidates, forgotten before and so all to be measured again. Before
each pause a problem of another kind is run once: on a GPU its candidates have to be compiled, which goes
on while the burst runs. Tuning is switched by reloading the configuration, so bursts with and without
take turns. With --idle-s 0 the daemon does not wait for idleness but goes on in every gap: the burst
then has pauses, too.
"""
import argparse
import gc
import itertools
import json
import os
import pathlib
import signal
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "tests/lib"))
import fmhad  # noqa: E402

# A problem of the client's, and the lengths of others by which there is always something to measure.
SIZES = {"cpu": (1, 4, 256, 64, "f32"), "cuda": (2, 16, 2048, 128, "bf16")}
GAP_S = 0.002  # with --idle-s 0
BUFFER_BYTES = 1 << 26


def problem_of(batch, heads, length, hdim, dtype, buffer, **options):
    tensors = {role: {"buffer": buffer, "offset": i * (BUFFER_BYTES // 4), "dtype": dtype}
               for i, role in enumerate("qkvo")}
    return {"batch": batch, "nhead_q": heads, "nhead_k": heads, "seqlen_q": length, "seqlen_k": length,
            "hdim_q": hdim, "hdim_v": hdim, "tensors": tensors, **options}


def kinds(buffer, cpu):
    """Problems whose kernels differ."""
    masks = [{}, {"mask": "bottom_right", "window_right": 0}]
    dtypes = ["f32"] if cpu else ["bf16", "f16"]
    for length in itertools.count(96, 8):
        for dtype, hdim, mask in itertools.product(dtypes, [64, 128, 32, 256], masks):
            yield problem_of(1, 4, length, hdim, dtype, buffer, **mask)


def switch(daemon, device, automatic):
    device.call("registry_forget", {})
    daemon.config["tuning"]["automatic"] = automatic
    (daemon.directory / "fmhad.json").write_text(json.dumps(daemon.config))
    daemon.process.send_signal(signal.SIGHUP)


def burst(device, plan, runs, gap_s):
    latencies = []
    for _ in range(runs):
        begin = time.perf_counter()
        device.run(plan)
        latencies.append(time.perf_counter() - begin)
        if gap_s:
            time.sleep(gap_s)
    return latencies


def at(latencies, share):
    return sorted(latencies)[int(len(latencies) * share)] * 1e6


def compare(daemon, device, options):
    cpu = options.backend == "cpu"
    buffer = device.call("buffer_create", {"size": BUFFER_BYTES})["buffer"]
    plan = device.plan(problem_of(*SIZES[options.backend], buffer))["plan"]
    latencies, counts = {True: [], False: []}, {True: 0, False: 0}
    others = kinds(buffer, cpu)
    burst(device, plan, 200, 0)
    gc.disable()
    for i in range(options.bursts):
        automatic = i % 4 in (0, 3)  # neither is always the one that comes after the other
        other = device.plan(next(others))
        device.run(other["plan"])
        switch(daemon, device, automatic)
        time.sleep(options.idle_s + options.pause_s)
        latencies[automatic] += burst(device, plan, options.runs, 0 if options.idle_s else GAP_S)
        device.call("plan_release", {"plan": other["plan"]})
        known = json.loads(device.call_json("registry_export", {}))["kernels"]
        counts[automatic] += sum(len(kernel.get("tuned", [])) for kernel in known)
    return latencies, counts


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--bursts", type=int, default=24)
    parser.add_argument("--runs", type=int, default=500, help="of a burst")
    parser.add_argument("--idle-s", type=int, default=1)
    parser.add_argument("--pause-s", type=float, default=0.4, help="longer than that")
    parser.add_argument("--threads", type=int, help="of a CPU")
    options = parser.parse_args()
    config = {"devices": [{"backend": options.backend, **({"threads": options.threads} if options.threads else {})}],
              "tuning": {"automatic": False, "idle_s": options.idle_s}}
    with tempfile.TemporaryDirectory() as cache:
        if options.backend != "cpu":
            config["compile"] = {"sources": str(ROOT / "kernels/gpu"), "jobs": os.cpu_count(), "cache": cache,
                                 "library_path": os.environ.get("LD_LIBRARY_PATH") or "/usr/lib"}
        with fmhad.Daemon(config) as daemon, daemon.device() as device:
            latencies, counts = compare(daemon, device, options)
            builds = daemon.status()["front"]["compile"]["built"]
    print(f"{'tuning':8} {'runs':>6} {'measured':>9} {'median us':>10} {'99 % us':>10} {'worst us':>10}")
    for automatic, name in ((False, "off"), (True, "on")):
        values = latencies[automatic]
        print(f"{name:8} {len(values):6} {counts[automatic]:9} {at(values, 0.5):10.1f} "
              f"{at(values, 0.99):10.1f} {max(values) * 1e6:10.1f}")
    ratios = [at(latencies[True], share) / at(latencies[False], share) for share in (0.5, 0.99)]
    print(f"with tuning over without: median {ratios[0]:.3f}, 99 % {ratios[1]:.3f}; {builds} kernels compiled")


if __name__ == "__main__":
    main()
