#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""A nightly run: random problems at every CPU level that this machine has, each level a device of
one private daemon, each result compared with the reference in double precision by `fmhactl verify`.
Then the long forms of the memory campaigns (tests/unit/dispatch): guard pages at every level, bent
problems, scribbled indices. And every fault of tests/faults, one after another, in --jobs shards, losses of power,
and twenty minutes of mixed load with kills.

    tests/nightly.py [--cases 20000] [--seed S] [--level LEVEL ...] [--jobs N] [--asan build/asan]
                     [--guard-problems 50000] [--bend-seconds 3600] [--scribble-seconds 600]

Prints what is wrong at once, with the command that repeats it, and a table last. Exits with 1 when
anything failed, or when a level did not answer for all of its cases.
"""
import argparse
import concurrent.futures
import os
import pathlib
import re
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "lib"))
from fmhad import Daemon, find_program  # noqa: E402

LEVELS = ["portable", "x86_64_v3", "x86_64_v4", "x86_64_v4_bf16", "x86_64_amx"]
CHUNK = 500  # cases of one process: short enough to spread evenly, long enough to hide the start
SUMMARY = re.compile(r"(\d+) ok, (\d+) not supported, (\d+) failed")


def verify(daemon, device, cases, seed):
    """One fmhactl: (ok, not supported, failed), and what it said when not all was well."""
    command = [find_program("fmhactl"), "verify", "--socket", daemon.socket, "--device", str(device),
               "--cases", str(cases), "--seed", str(seed), "--timeout", "120"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = SUMMARY.search(done.stdout)
    counts = tuple(map(int, found.groups())) if found else (0, 0, cases)
    well = done.returncode == 0 and counts[2] == 0 and sum(counts) == cases
    return counts, "" if well else done.stdout + done.stderr


def campaign(build, name, arguments=(), **environment):
    """One memory campaign: what it was, whether it passed, what it said."""
    program = pathlib.Path(build).resolve() / "tests/unit/dispatch" / f"test_dispatch_{name}"
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=False,
                          env=os.environ | {key: str(value) for key, value in environment.items()})
    settings = " ".join(f"{key}={value}" for key, value in environment.items())
    command = " ".join([settings, str(program), *map(str, arguments)]).strip()
    return command, done.returncode == 0, done.stdout + done.stderr


def memory_campaigns(options, levels):
    """All of them, --jobs at a time; False when one found something."""
    build = os.environ.get("FMHA_BUILD", "build/release")
    bend = {"FMHA_BEND_SECONDS": options.bend_seconds}
    scribble = {"FMHA_SCRIBBLE_SECONDS": options.scribble_seconds, "FMHA_SCRIBBLE_THREADS": 8}
    tasks = [(build, "guard", (options.seed, options.guard_problems), {"FMHA_GUARD_LEVEL": level})
             for level in levels]
    tasks.append((build, "bend", (), bend | {"FMHA_BEND_SEED": options.seed}))
    if options.asan:
        tasks.append((options.asan, "bend", (), bend | {"FMHA_BEND_SEED": options.seed + 1_000_000_000}))
    tasks.append((options.asan or build, "scribble", (), scribble))
    clean = True
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for command, passed, said in pool.map(
                lambda task: campaign(task[0], task[1], task[2], **task[3]), tasks):
            counts = [line for line in said.splitlines() if "problems" in line or "threads:" in line]
            print(f"{command}: {'clean' if passed else 'FAILED'}", *(counts if passed else [said]),
                  sep="\n  ", flush=True)
            clean &= passed
    return clean


def fault_campaign(jobs):
    """Each failed call of front, worker, compile helper and client, once and for good, losses of power, and a soak; False
    when one was answered wrongly."""
    folder = pathlib.Path(__file__).resolve().parent / "faults"

    def run(command):
        return subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)

    commands = [[folder / "campaign.py", "--shard", f"{i}/{jobs}"] for i in range(jobs)]
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        done = list(pool.map(run, [*commands, [folder / "programs.py"], [folder / "power.py", "--random", "100"],
                              [folder / "soak.py", "--seconds", "1200"]]))
    for one in done:
        print(one.stdout, one.stderr, sep="", flush=True)
    return all(one.returncode == 0 for one in done)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=20000, help="of each level")
    parser.add_argument("--seed", type=int, default=1, help="of the first %d cases" % CHUNK)
    parser.add_argument("--level", choices=LEVELS, action="append", help="only these")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
    parser.add_argument("--asan", help="a build with AddressSanitizer for the memory campaigns")
    parser.add_argument("--guard-problems", type=int, default=50000, help="of each level")
    parser.add_argument("--bend-seconds", type=int, default=3600)
    parser.add_argument("--scribble-seconds", type=int, default=600)
    options = parser.parse_args()

    wanted = options.level or LEVELS
    devices = [{"backend": "cpu", "cpu_level": level} for level in wanted]
    bad = False
    with Daemon(config={"devices": devices}) as daemon:
        ready = [d["device"] for d in daemon.status()["devices"] if d["state"] == "ready"]
        tasks = [(device, min(CHUNK, options.cases - start), options.seed + start // CHUNK)
                 for start in range(0, options.cases, CHUNK) for device in ready]
        totals = {device: [0, 0, 0] for device in ready}
        start = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            results = pool.map(lambda task: verify(daemon, *task), tasks)
            for (device, cases, seed), (counts, said) in zip(tasks, results):
                totals[device] = [a + b for a, b in zip(totals[device], counts)]
                if said:
                    print(f"{wanted[device]}, {cases} cases of seed {seed}:\n{said}", flush=True)
        seconds = time.monotonic() - start

    print(f"{'level':16}{'ok':>8}{'not supported':>16}{'failed':>8}")
    for device, level in enumerate(wanted):
        if device not in totals:
            print(f"{level:16}  not on this machine")
            continue
        ok, unsupported, failed = totals[device]
        print(f"{level:16}{ok:8}{unsupported:16}{failed:8}")
        bad |= failed > 0 or ok + unsupported < options.cases
    print(f"seeds from {options.seed}, {seconds:.0f} s")
    clean = memory_campaigns(options, [wanted[device] for device in ready])
    clean &= fault_campaign(options.jobs)
    return 1 if bad or not ready or not clean else 0


if __name__ == "__main__":
    sys.exit(main())
