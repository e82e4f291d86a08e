#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""How good is the choice of kernels? Chosen against the best of all candidates, on problems drawn by a
rule (selection_shapes.py).

    tests/bench/selection.py kernels --arch sm_90a --units 132 --problems 460 [--dtype e4m3] [--more 7]
    tests/bench/selection.py measure --backend cuda --problems 460 [--part 1/3] --out MEASURED.json
    tests/bench/selection.py measure --backend cuda --more 7 --problems 2000 --out MORE.json
    tests/bench/selection.py measure --backend cuda --fresh 11 --dtype f16 --problems 60 --out FRESH.json
    tests/bench/selection.py judge MEASURED.json... [--units N]
    tests/bench/selection.py release MEASURED.json... --out FOLDER
    tests/bench/selection.py             # measures on the CPU, a few problems, and judges

kernels: names what will be measured, to compile it ahead (fmhactl build --kernel).
measure: a private daemon measures every candidate, kernels and numbers of splits, twice; what there is of it is written as it comes.
Scalar kernels are left out of the kernel set: they are known to be slower. judge: fmhactl says what would be chosen by the formula
and by the model, if there is one, for a device that has never measured anything; what a tuned database chooses is the best of the
first measurement. Each choice counts with its time in the second one, against the least of that. Problems of a fresh draw, by
another seed and of any data type, are judged all, beside those that were held out. release: what a model was fitted to, as a file
of the release, whose name and sum the model names: see CONTRIBUTING.md.
"""
import argparse
import hashlib
import json
import lzma
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "tests/lib"), str(HERE)]
import fmha_wire  # noqa: E402
import fmhad  # noqa: E402
import selection_shapes  # noqa: E402

CANDIDATES = ["*", "!*scalar*"]


def find_fmhactl():
    return str(fmhad.find_program("fmhactl"))


# ---- measuring ----


def candidates_of(documents):
    """Names of the kernels that CANDIDATES leaves in what fmhactl plan has printed."""
    return {c["name"] for document in documents for stage in document["selections"]
            for c in stage["candidates"]
            if c["verdict"] != "rejected" and "scalar" not in c["name"]}


def kernels(fmhactl, arch, units, problems):
    """Candidates of the plan without splits are others than those of the plan that a problem has, where its last tiles are cut."""
    names = set()
    for problem in problems:
        splits = [None] if problem.get("op") else [None, 1, 4]
        names |= candidates_of(explain(fmhactl, arch, units, problem, n) for n in splits)
    return sorted(names)


def all_times(device):
    """shape -> {kernel@splits: microseconds}, and forgets them."""
    times = {}
    document = json.loads(device.call_json("registry_export", {}))
    for kernel in document["kernels"]:
        for result in kernel.get("tuned", []):
            name = f"{kernel['name']}@{result['splits']}"
            times.setdefault(result["shape"], {})[name] = result["us"]
    device.call("registry_forget", {})
    return times


def word_of(device, problem):
    return json.loads(device.explain(problem))["selections"][-1]["shape"]


def measure_some(device, problems, deadline, for_fitting):
    """Twice, everything before anything again. Problems that share a word count once."""
    shapes = {}
    for problem in problems:
        if time.monotonic() >= deadline:
            break
        try:
            if for_fitting and selection_shapes.is_held_out(word_of(device, problem)):
                continue
            answer = device.call("tune", {"problem": problem, "thorough": True}, timeout=120)
        except fmha_wire.WireError as error:
            if error.name != "ENOKERNEL":  # of the kernels that are left
                print(f"{kind_of(problem)} {problem}: {error}", file=sys.stderr)
        else:
            shapes.setdefault(answer["shape"], problem)
    first = all_times(device)
    for problem in {} if for_fitting else shapes.values():
        if time.monotonic() < deadline:
            device.call("tune", {"problem": problem, "thorough": True}, timeout=120)
    second = first if for_fitting else all_times(device)
    return [{"shape": shape, "problem": problem, "times": first[shape], "second": second[shape]}
            for shape, problem in shapes.items() if shape in first and shape in second]


def measure(daemon, index, problems, seconds, keep, for_fitting=False, at_a_time=20):
    """keep: is given all that there is whenever there is more."""
    deadline, entries = time.monotonic() + seconds, []
    with daemon.client() as client:
        description = client.devices()[index]
    with daemon.device(index) as device:
        device.call_with_text("registry_load", json.dumps(CANDIDATES), set="measured")
        device.call("registry_unload", {"set": "default"})
        for i in range(0, len(problems), at_a_time):
            if time.monotonic() < deadline:
                entries += measure_some(device, problems[i:i + at_a_time], deadline, for_fitting)
                keep({"arch": description["arch"], "units": description["compute_units"], "problems": entries})


# ---- what would be chosen ----


def flags_of(problem, splits=None):
    """The options of fmhactl plan for a problem of selection_shapes."""
    flags = (["backward"] if problem.get("op") == "backward" else ["forward"])
    flags += [f"--batch={problem['batch']}", f"--heads-q={problem['nhead_q']}",
              f"--heads-k={problem['nhead_k']}", f"--seqlen-q={problem['seqlen_q']}",
              f"--seqlen-k={problem['seqlen_k']}", f"--hdim={problem['hdim_q']}", f"--hdim-v={problem['hdim_v']}",
              f"--dtype={problem['tensors']['q']['dtype']}"]
    if "mask" in problem:
        flags.append("--causal")
    if problem.get("mode") == "group":
        flags += ["--group", "--lengths=equal"]
    if "logits_soft_cap" in problem:
        flags.append(f"--softcap={problem['logits_soft_cap']}")
    if problem.get("page_size"):
        flags.append(f"--page-size={problem['page_size']}")
    if splits is not None and problem.get("op") != "backward":
        flags.append(f"--splits={max(splits, 1)}")
    return flags


MAIN = {"fwd", "fwd_splitkv", "fwd_pagedkv", "batch_prefill", "bwd_dq_dk_dv"}


def explain(fmhactl, arch, units, problem, splits=None, specs=None):
    environment = {**os.environ, **({"FMHA_SPECS_DIR": str(specs)} if specs else {})}
    result = subprocess.run([fmhactl, "plan", *flags_of(problem, splits), f"--arch={arch}",
                             f"--units={units}", "--json", "--features"],
                            capture_output=True, text=True, check=False, env=environment)
    if result.returncode != 0:
        raise RuntimeError(result.stderr)
    return json.loads(result.stdout)


def feature_names(fmhactl, arch):
    document = explain(fmhactl, arch, 1, selection_shapes.draw(1)[0])
    return document["selections"][0]["features"]


def offline_candidates(fmhactl, arch, units, entry):
    """kernel@splits -> (features, cost)"""
    found, numbers = {}, {int(name.rsplit("@", 1)[1]) for name in entry["times"]}
    asked = [(splits, explain(fmhactl, arch, units, entry["problem"], splits)) for splits in numbers]
    if 0 in numbers:  # unsplit but for the last tiles, which who asks for one split does not get
        free = explain(fmhactl, arch, units, entry["problem"])
        asked += [(0, free)] if free["plan"]["n_splits"] == 0 else []
    for splits, document in asked:
        for stage in document["selections"]:
            if stage["family"] in MAIN:
                for c in stage["candidates"]:
                    if "features" in c:
                        found[f"{c['name']}@{splits}"] = (c["features"], c["cost"])
    return found


def choice(fmhactl, arch, units, problem, specs=None):
    document = explain(fmhactl, arch, units, problem, specs=specs)["plan"]
    kernel = next(s["kernel"] for s in document["stages"] if s["family"] in MAIN)
    return f"{kernel}@{document['n_splits']}"


def read_one(path):
    """A measured document, or the file of a release that has it."""
    data = path.read_bytes()
    document = json.loads(lzma.decompress(data) if path.suffix == ".xz" else data)
    if document.pop("fresh", False):
        for entry in document["problems"]:
            entry["fresh"] = True
    return document


def read_measured(paths):
    """Several parts as one."""
    document = read_one(paths[0])
    for path in paths[1:]:
        other = read_one(path)
        if (other["arch"], other["units"]) != (document["arch"], document["units"]):
            raise ValueError(f"{path}: of {other['arch']} with {other['units']} units, the first of {document['arch']}, {document['units']}")
        document["problems"] += other["problems"]
    return document


# ---- what a model was fitted to ----


def release(paths, folder):
    """One file of all that was measured, the same bytes for the same measurements. Returns what a model says of it."""
    document = read_measured(paths)
    text = json.dumps(document, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    digest = hashlib.sha256(text).hexdigest()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"fmhad-measured-{document['arch']}-{digest[:12]}.json.xz"
    path.write_bytes(lzma.compress(text, preset=9))
    return {"file": path.name, "sha256": digest, "problems": len(document["problems"]), "units": document["units"]}


def kind_of(problem):
    if problem.get("op") == "backward":
        return "backward"
    return "paged" if problem.get("page_size") else "decode" if problem["seqlen_q"] <= 8 else "forward"


def summary(values):
    """Mean, median, tenth percentile and least of shares of the best."""
    values = sorted(values)
    return sum(values) / len(values), statistics.median(values), values[len(values) // 10], values[0]


def judge(document, units=None):
    """Prints the table: what was held out, by kind and together, and what was not."""
    fmhactl, arch = find_fmhactl(), document["arch"]
    units = units or document["units"]
    sides = ["forward", "decode", "paged", "backward", "held out", "fitted", "fresh"]
    table = {side: {"formula": [], "model": [], "tuned": []} for side in sides}
    has_model = (ROOT / "specs/models" / f"{arch}.json").exists()
    with tempfile.TemporaryDirectory() as bare:
        fmhad.bare_specs(pathlib.Path(bare))
        missing = 0
        for entry in document["problems"]:
            second = entry["second"]
            best = min(second.values())
            held_out = selection_shapes.is_held_out(entry["shape"])
            at = ["held out", kind_of(entry["problem"])] if held_out else ["fitted"]
            if entry.get("fresh"):
                at = ["fresh", kind_of(entry["problem"])]
            chosen = {"formula": choice(fmhactl, arch, units, entry["problem"], bare),
                      "tuned": min(entry["times"], key=entry["times"].get)}
            if has_model:
                chosen["model"] = choice(fmhactl, arch, units, entry["problem"])
            for how, name in chosen.items():
                if name not in second:
                    missing += 1
                for side in at if name in second else []:
                    table[side][how].append(best / second[name])
    print(f"{arch}, {units} units: chosen / best of all candidates, median of candidates "
          f"{sorted(len(e['second']) for e in document['problems'])[len(document['problems']) // 2]}")
    print(f"{'side':10} {'chosen by':10} {'problems':>8} {'mean':>7} {'median':>7} {'10 %':>7} {'least':>7}")
    for side, hows in table.items():
        for how, values in hows.items():
            if values:
                print(f"{side:10} {how:10} {len(values):8} " + " ".join(f"{value:7.2%}" for value in summary(values)))
    if missing:
        print(f"{missing} choices were not among what was measured")


# ---- the command ----


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("what", nargs="?", choices=["kernels", "measure", "judge", "release"])
    parser.add_argument("files", nargs="*", type=pathlib.Path)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--problems", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=120, help="to measure for; what is under way then is left")
    parser.add_argument("--arch")
    parser.add_argument("--units", type=int)
    parser.add_argument("--part", default="1/1", help="K/N: every N-th problem from the K-th on")
    parser.add_argument("--more", type=int, metavar="SEED", help="other problems, to fit to and not to judge by: "
                        "none that is held out, each measured once")
    parser.add_argument("--fresh", type=int, metavar="SEED", help="other problems, of which all are judged")
    parser.add_argument("--dtype", help="of the problems (default: bf16, on a CPU f32)")
    parser.add_argument("--cache", help="of compiled kernels")
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    if options.what == "judge":
        judge(read_measured(options.files), options.units)
        return
    if options.what == "release":
        print(json.dumps(release(options.files, options.out)))
        return
    cpu = options.backend == "cpu" and options.what != "kernels"
    if options.more and options.fresh:
        parser.error("--more is to fit to, --fresh to judge by")
    seed = options.more or options.fresh
    other = {**(selection_shapes.CPU if cpu else {}), **({"seed": seed} if seed else {}),
             **({"dtype": options.dtype} if options.dtype else {})}
    drawn = selection_shapes.draw(options.problems, **other)
    if options.what == "kernels":
        print("\n".join(kernels(find_fmhactl(), options.arch, options.units, drawn)))
        return
    part, parts = map(int, options.part.split("/"))
    config = {"devices": [{"backend": options.backend}],
              "tuning": {"automatic": False, "memory_bytes": 4 << 30}}
    if not cpu:
        config["compile"] = {"sources": str(ROOT / "kernels/gpu"), "jobs": os.cpu_count(),
                             "library_path": os.environ.get("LD_LIBRARY_PATH") or "/usr/lib",
                             **({"cache": options.cache} if options.cache else {})}
    document = {}

    def keep(measured):
        document.update(measured, **({"fresh": True} if options.fresh else {}))
        if options.out:
            written = options.out.with_suffix(".part")
            written.write_text(json.dumps(document) + "\n")
            written.replace(options.out)

    with fmhad.Daemon(config) as daemon:
        measure(daemon, 0, drawn[part - 1::parts], options.seconds, keep, bool(options.more))
    if not options.what:
        for entry in document["problems"]:
            entry["fresh"] = document.get("fresh", False)
        judge(document)


if __name__ == "__main__":
    main()
