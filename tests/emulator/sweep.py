# SPDX-License-Identifier: MIT
"""All AMD kernels of a profile, in every type, each compiled once: what assembly.py, sinking.py, hazards.py and
density.py have to say of them. No GPU, no emulator; 90 minutes of two cores.

    python3 tests/emulator/sweep.py [--update] [--profile pytorch] [--arch gfx942] [--match REGEX] [--rows FILE] [--cells FILE]
                                    [--against FILE] [--jobs N]

None may keep registers in memory, and what its main loops cost is compared with tests/emulator/sweep.csv: a line a loop and head dims
with a column an arch, of all its tiles, features and 16-bit types. A cell has the number of kernels, the issue cycles a score of their
main loops' busiest pipes, the most of a kernel and the mean, and behind the slash the waves a SIMD, all kernels' together. Other numbers
of kernels, a most that is more by over 3 % or a mean by over 0.5 %, and fewer waves fail. --update writes what was found. With --match,
only groups of which all kernels are looked at are compared.

Which kernel it was: --cells writes a line a kernel, of the tree as it was before, and --against compares each with such a file, by 3 %.
--rows writes a file with all that density.py counts. What has no matrix instructions has no cell. A table of least and median densities
comes last.
"""
import argparse
import collections
import concurrent.futures
import csv
import itertools
import os
import re
import statistics
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "gpu"))

import abi  # noqa: E402
import assembly  # noqa: E402
import clangs  # noqa: E402
import density  # noqa: E402
import hazards  # noqa: E402
import sinking  # noqa: E402
import spill_check  # noqa: E402

TABLE = os.path.join(HERE, "sweep.csv")
MEAN_SLACK = 1.005  # many kernels do not become dearer by as much as one may
NAME = re.compile(r"fmha_(?P<family>\w+?)_(?P<dtype>f32|f16|bf16)_(?P<arch>gfx\w+?)_gpu_(?P<rest>\w+)")
SUMMING = re.compile(r"_bwd_dq_dk_dv_\w+_split(?:_|$)")
DEAR = ("bias", "bias2", "cap", "drop")
ROUNDED = 0.05  # what one decimal may hide
# Cells before and after, and whether that is worse.
KNOWN = (("8.0/2", "8.2/2", False), ("8.0/2", "8.4/2", True), ("48.0 64.0/2", "48.0 67.0/2", True),
         ("8.0/3", "8.0/2", True), ("8.0/2", "7.0/3", False), ("8.0/2", "8.0 1.0/2", True), ("8.0/2", "", True), ("", "8.0/2", True))
KNOWN_GROUPS = (("4 9.0 8.00/2", "4 9.2 8.02/2", False), ("4 9.0 8.00/2", "4 9.4 8.02/2", True), ("4 9.0 8.00/2", "4 9.0 8.20/2", True),
                ("4 9.0 8.00/2", "5 9.0 8.00/2", True), ("4 9.0 8.00/2", "4 9.0 8.00/1", True), ("4 9.0 8.00/2", "4 8.0 7.00/3", False),
                ("4 9.0 8.00/2", "", True))

Finding = collections.namedtuple("Finding", "wrong spills rows seconds")


def look(job):
    before = os.times()
    try:
        source = os.path.join(assembly.GPU, job.source)
        text, dumps = clangs.compile_with_notes(job.arch, source, [*job.options, *sinking.SHOW])
    except RuntimeError as error:
        return Finding([str(error)], 0, [], 0)
    after = os.times()
    counted = not SUMMING.search(job.name)
    wrong, number = assembly.check_resources(job.arch, job.lds_bytes, text)
    wrong += assembly.check_written(text) + assembly.check_waits(job.arch, text)[:3]
    wrong += sinking.moved(dumps)[0]
    wrong += hazards.scalar_reads(job.arch, text)[:3] + hazards.lds_at_barriers(text)[:3]
    wrong += hazards.matrix_results(job.arch, text)[:3]
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    rows = density.rows_of(job, text, mca=False) if counted else []
    return Finding(wrong, assembly.spilled(number), rows, seconds)


def summing(lib, kernels):
    """The bf16 backward kernels of general loops once more, as they are where dQ is summed in splits. No profile lists them."""
    for name in kernels:
        if "_bwd_dq_dk_dv_bf16_" in name and "_gpu_amd_" not in name:
            split = re.sub(r"(_b\d+)(?=_|$)", r"\1_split", name, count=1)
            kernel = spill_check.kernel_of(lib, split)
            assert kernel is not None, f"no problem makes {split}"
            yield split, kernel


def cell_of(arch, rows):
    cycles = [density.busiest(arch, {pipe: float(row[pipe]) for pipe in density.PIPES}) for row in rows]
    return f"{' '.join(f'{c:.1f}' for c in cycles)}/{rows[0]['waves']}" if rows else ""


def is_worse(old, new):
    if not old or not new:
        return old != new
    (old_cycles, old_waves), (new_cycles, new_waves) = old.split("/"), new.split("/")
    pairs = list(itertools.zip_longest(map(float, old_cycles.split()), map(float, new_cycles.split())))
    return int(new_waves) < int(old_waves) or any(None in pair or pair[1] > pair[0] * density.SLACK + ROUNDED for pair in pairs)


def split_name(name):
    """A kernel's place in the table: line, arch."""
    found = NAME.fullmatch(name)
    return f"{found['family']} {found['rest'].split('_t')[0]}", found["arch"]


def grouped(names):
    """{(line, arch): names}"""
    groups = collections.defaultdict(list)
    for name in names:
        groups[split_name(name)].append(name)
    return groups


def group_cell(cells):
    cycles = [sum(map(float, cell.split("/")[0].split())) for cell in cells]
    return f"{len(cells)} {max(cycles):.1f} {statistics.mean(cycles):.2f}/{sum(int(cell.split('/')[1]) for cell in cells)}"


def group_is_worse(old, new):
    if not old or not new:
        return old != new
    (n, most, mean), (n_now, most_now, mean_now) = (map(float, cell.split("/")[0].split()) for cell in (old, new))
    return (n != n_now or most_now > most * density.SLACK + ROUNDED or mean_now > mean * MEAN_SLACK + ROUNDED / 10
            or int(new.split("/")[1]) < int(old.split("/")[1]))


def read_table(path=TABLE):
    """{(line, arch): its cell}"""
    with open(path, encoding="ascii", newline="") as f:
        return {(row["loop"], arch): row[arch] for row in csv.DictReader(f) for arch in density.ARCHS if row[arch]}


def write_table(cells):
    with open(TABLE, "w", encoding="ascii", newline="") as f:
        writer = csv.DictWriter(f, ("loop", *density.ARCHS), lineterminator="\n")
        writer.writeheader()
        for line in sorted({line for line, _ in cells}):
            writer.writerow({"loop": line} | {arch: cells.get((line, arch), "") for arch in density.ARCHS})


def compare(old, new, worse):
    """Says what is worse, missing or new; returns how much is."""
    failed = [place for place in sorted(old.keys() | new.keys()) if worse(old.get(place, ""), new.get(place, ""))]
    for place in failed:
        name = place if isinstance(place, str) else " ".join(place)
        print(f"FAIL {name}: cycles and waves {old.get(place, 'without a cell')} -> {new.get(place, 'nothing')}", flush=True)
    return len(failed)


def show_densities(found):
    """Of every loop, by what dearest a score goes through, an arch a column: the least and the median, and of how many."""
    groups = collections.defaultdict(list)
    for name, finding in found.items():
        arch = split_name(name)[1]
        if finding.rows:
            family, rest = NAME.fullmatch(name).group("family", "rest")
            words = [family[:3], rest.split("_h")[0], *(word for word in rest.split("_") if word in DEAR)]
            groups[" ".join(words), arch].append(min(float(row["density"]) for row in finding.rows))
    archs = [arch for arch in density.ARCHS if any(arch == other for _, other in groups)]
    print("\n".join(["", f"| density | {' | '.join(archs)} |", "|---" * (1 + len(archs)) + "|"]))
    for group in sorted({group for group, _ in groups}):
        cells = [sorted(groups[group, arch]) for arch in archs]
        cells = [f"{c[0]:.2f} / {statistics.median(c):.2f} of {len(c)}" if c else "" for c in cells]
        print(f"| {group} | {' | '.join(cells)} |")


def say(found):
    """What is wrong of each by itself; returns how many kernels are, and says how long they compile."""
    failed, times = 0, sorted((finding.seconds, name) for name, finding in found.items())
    for name, finding in found.items():
        keeps = finding.spills and not SUMMING.search(name)  # a daemon sets those aside
        said = finding.wrong + [f"keeps {finding.spills} registers in memory"] * bool(keeps)
        failed += bool(said)
        for sentence in said:
            print(f"FAIL {name}: {sentence}", flush=True)
    for share in (0.5, 0.9, 0.99, 1) if times else ():
        seconds, name = times[int(share * (len(times) - 1))]
        print(f"{share * 100:.0f} % compile within {seconds:.2f} CPU seconds ({name})")
    return failed


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--update", action="store_true", help="write the table")
    parser.add_argument("--profile", default="pytorch", help="of what `fmhactl build --list` names; the table is of pytorch")
    parser.add_argument("--arch", action="append")
    parser.add_argument("--match", default="", help="a regular expression")
    parser.add_argument("--rows", help="a file to write all that is counted to")
    parser.add_argument("--cells", help="a file to write a line a kernel to")
    parser.add_argument("--against", help="such a file: compare kernel by kernel")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    archs = clangs.known(options.arch or density.ARCHS, "sweep")
    if not archs:
        return 77
    for old, new, expected in KNOWN:
        assert is_worse(old, new) == expected, f"{old} and {new}"
    for old, new, expected in KNOWN_GROUPS:
        assert group_is_worse(old, new) == expected, f"{old} and {new}"
    mistaken = hazards.check_checkers()
    if mistaken:
        print("\n".join(f"FAIL {sentence}" for sentence in mistaken))
        return 1
    lib, jobs, found, left_out = abi.load_library(), {}, {}, set()
    for arch in archs:
        kernels = assembly.of_profile(lib, arch, options.profile, True)
        for name, kernel in (*kernels.items(), *summing(lib, kernels)):
            if re.search(options.match, name):
                jobs[name] = density.Job(arch, name, kernel)
            elif NAME.fullmatch(name):
                left_out.add(split_name(name))
    with concurrent.futures.ProcessPoolExecutor(options.jobs) as pool:
        for n, (name, finding) in enumerate(zip(jobs, pool.map(look, jobs.values(), chunksize=8)), 1):
            found[name] = finding
            if n % 1000 == 0:
                print(f"sweep: {n} of {len(jobs)}", flush=True)
    failed = say(found)
    cells = {name: cell_of(jobs[name].arch, finding.rows) for name, finding in found.items()}
    cells = {name: cell for name, cell in cells.items() if cell}
    if options.cells:
        with open(options.cells, "w", encoding="ascii", newline="") as f:
            csv.writer(f, lineterminator="\n").writerows(sorted(cells.items()))
    groups = {place: group_cell([cells[name] for name in names]) for place, names in grouped(cells).items() if place not in left_out}
    known = read_table()
    looked_at = {place for place in known if place[1] in archs and place not in left_out}
    if options.update:
        write_table({place: cell for place, cell in known.items() if place not in looked_at} | groups)
    else:
        failed += compare({place: known[place] for place in looked_at}, groups, group_is_worse)
    if options.against:
        with open(options.against, encoding="ascii", newline="") as f:
            before = {name: cell for name, cell in csv.reader(f) if name in jobs}
        failed += compare(before, cells, is_worse)
    if options.rows:
        with open(options.rows, "w", encoding="ascii", newline="") as f:
            writer = csv.DictWriter(f, density.COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(row for finding in found.values() for row in finding.rows)
    show_densities(found)
    print(f"sweep: {len(jobs)} kernels, {len(cells)} with main loops, {len(groups)} groups of them whole; {failed} failed")
    return 1 if failed or not jobs else 0


if __name__ == "__main__":
    sys.exit(main())
