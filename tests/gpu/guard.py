#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Random problems on an NVIDIA GPU: no byte outside a tensor is read or written.

    python3 tests/gpu/guard.py [--problems 500] [--seed 1] [--no-memcheck]

Draws problems and builds their kernels on all cores; runs them with canaries, inputs compared and
the sound ones judged; then again under compute-sanitizer's memcheck, with one allocation a tensor.
What fails is printed and passed over. The table comes last. Exit status: 1 for any finding, 77
without a GPU. Needs guard_gpu (of the build that FMHA_BUILD names), NVRTC and compute-sanitizer.
"""
import argparse
import concurrent.futures
import glob
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, HERE)
from sanitizer import find_sanitizer  # noqa: E402

SKIP = 77
FINDINGS = 5  # of one process, then it is given up
DONE = re.compile(r"done: (\d+) ran, (\d+) judged, (\d+) refused, (\d+) without room, (\d+) kernels")


def nvrtc_folder():
    """Where the compile helper finds NVRTC, if the linker does not know."""
    found = glob.glob("/usr/local/cuda*/lib64/libnvrtc.so*") + glob.glob(
        "/opt/*/.venv/lib/python3*/site-packages/nvidia/*/lib/libnvrtc.so*")
    return os.path.dirname(found[0]) if found else "/usr/lib"


class Campaign:
    def __init__(self, options, folder):
        self.options, self.folder = options, folder
        build = os.environ.get("FMHA_BUILD", os.path.join(ROOT, "build", "release"))
        self.program = os.path.join(build, "daemon", "front", "guard_gpu")
        self.list = os.path.join(folder, "list")
        self.files = ["--list", self.list, "--cache", os.path.join(folder, "cache"),
                      "--sources", os.path.join(ROOT, "kernels", "gpu"),
                      "--libraries", nvrtc_folder() + ":" + os.path.join(build, "lib"),
                      "--most-mib", str(options.most_mib)]
        if options.helper:
            self.files += ["--helper", options.helper]
        self.environment = {"FMHA_SPECS_DIR": os.path.join(ROOT, "specs"), **os.environ}

    def run(self, command, log, seconds):
        """The exit status; None when it had to be killed."""
        with open(log, "wb") as file:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                                       env=self.environment, start_new_session=True)
            try:
                return process.wait(max(1, seconds))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # its own session: nobody else is in it
                process.wait()
                return None

    def choose(self):
        o = self.options
        log = os.path.join(self.folder, "choose.log")
        status = self.run([self.program, "choose", *self.files, "--problems", str(o.problems),
                           "--kernels", str(o.kernels), "--jobs", str(o.build_jobs),
                           "--seed", str(o.seed)], log, o.seconds)
        with open(log, encoding="utf-8", errors="replace") as file:
            text = file.read()
        if status:
            print(text[-4000:])
        chosen = re.search(r"chosen: (\d+) to run, (\d+) to refuse, (\d+) kernels", text)
        return status, [int(n) for n in chosen.groups()] if chosen else [0, 0, 0]


class Part:
    """Every n-th problem, in one process at a time: after a finding another one goes on."""

    def __init__(self, campaign, name, prefix, options, number, step):
        self.campaign, self.name, self.prefix, self.options = campaign, name, prefix, options
        self.first, self.step = number, step
        self.counts, self.findings = [0] * 5, []

    def run(self, end):
        for attempt in range(FINDINGS):
            log = os.path.join(self.campaign.folder, f"{self.name}-{self.first}-{attempt}.log")
            command = [*self.prefix, self.campaign.program, "run", *self.campaign.files,
                       *self.options, "--first", str(self.first), "--step", str(self.step)]
            status = self.campaign.run(command, log, end - time.monotonic())
            with open(log, encoding="utf-8", errors="replace") as file:
                lines = file.read().splitlines()
            last = self.count(lines)
            if status == 0 and self.is_clean(lines):
                return self
            self.findings.append(self.describe(status, lines))
            if status in (None, 0) or last is None:
                return self
            self.first = last + self.step
        return self

    def is_clean(self, lines):
        """What a sanitizer says; one that says nothing has not looked."""
        summaries = [s for s in lines if "SUMMARY" in s]
        return all(" 0 errors" in s for s in summaries) and (bool(summaries) or not self.prefix)

    def count(self, lines):
        """Adds up what was done; the number of the last case, or None."""
        cases = [int(s.split()[1]) for s in lines if re.fullmatch(r"case \d+", s)]
        done = next(filter(None, map(DONE.search, lines)), None)
        found = [int(n) for n in done.groups()] if done else [max(0, len(cases) - 1), 0, 0, 0, 0]
        self.counts = [a + b for a, b in zip(self.counts, found)]
        return cases[-1] if cases else None

    def describe(self, status, lines):
        lines = [s for s in lines if not re.match(r"case \d+|\[|\s*\d+ FAILED|=+ +Host Frame", s)]
        head = f"{self.name}: " + ("killed at its deadline" if status is None else f"exit {status}")
        kept = lines if len(lines) <= 40 else lines[:15] + ["..."] + lines[-24:]
        return "\n".join([head] + ["    | " + s for s in kept])


def run_parts(campaign, name, prefix, options, jobs, seconds):
    """One line of the table, and the findings."""
    start = time.monotonic()
    parts = [Part(campaign, name, prefix, options, i, jobs) for i in range(jobs)]
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        parts = list(pool.map(lambda part: part.run(start + seconds), parts))
    counts = [sum(column) for column in zip(*(part.counts for part in parts))]
    findings = [f for part in parts for f in part.findings]
    for text in findings:
        print(text, flush=True)
    return (name, *counts, len(findings), time.monotonic() - start)


def read_arguments():
    cores = os.cpu_count() or 1
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=500, help="that run; refused ones come on top")
    parser.add_argument("--kernels", type=int, default=400, help="most that are built")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--most-mib", type=int, default=6144, help="of one problem's tensors")
    parser.add_argument("--seconds", type=float, default=240, help="most that one step may take")
    parser.add_argument("--build-jobs", type=int, default=cores)
    parser.add_argument("--jobs", type=int, default=max(1, min(10, cores - 2)), help="processes on the GPU")
    parser.add_argument("--no-memcheck", action="store_true")
    parser.add_argument("--no-judge", action="store_true", help="on the stub: its kernels do nothing")
    parser.add_argument("--helper", help="fmhad-compile, or what stands for it")
    return parser.parse_args()


def main():
    options = read_arguments()
    sanitizer = None if options.no_memcheck else find_sanitizer()
    if not sanitizer and not options.no_memcheck:
        sys.exit("no compute-sanitizer on this machine")
    start, folder = time.monotonic(), tempfile.mkdtemp(prefix="fmha-guard-")
    try:
        campaign = Campaign(options, folder)
        status, (to_run, to_refuse, kernels) = campaign.choose()
        table = [("build", to_run, 0, to_refuse, 0, kernels, int(status != 0), time.monotonic() - start)]
        if status == SKIP:
            return SKIP
        if to_run:
            native = ["--canaries"] + ["--no-judge"] * options.no_judge
            table.append(run_parts(campaign, "canaries", [], native, options.jobs, options.seconds))
        if to_run and sanitizer:
            prefix = [sanitizer, "--tool", "memcheck", "--target-processes", "application-only",
                      "--padding", "4096", "--report-api-errors", "no", "--print-limit", "3"]
            table.append(run_parts(campaign, "memcheck", prefix, [], options.jobs, options.seconds))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{'step':10} {'problems':>8} {'judged':>7} {'refused':>8} {'no room':>8} {'kernels':>8}"
          f" {'findings':>9} {'seconds':>8}")
    for name, ran, judged, refused, no_room, loaded, findings, seconds in table:
        print(f"{name:10} {ran:8} {judged:7} {refused:8} {no_room:8} {loaded:8} {findings:9} {seconds:8.0f}")
    return 1 if any(row[6] for row in table) else 0


if __name__ == "__main__":
    sys.exit(main())
