# SPDX-License-Identifier: MIT
"""What LDS costs in the main loops of AMD kernels where lanes want other words of one bank: density.py with the addresses that
the emulator sees.

    TINYGRAD=/path/to/tinygrad python3 tests/emulator/banks.py [--update] [--arch gfx942] [--match REGEX] [--jobs N]

A bank gives one word a clock. Lanes come in groups that could have a word of every bank if they wanted different ones: 32 lanes for
words, 16 for two words, 8 for four. The groups of four words that are read on CDNA are not neighbours: those that AMD's Composable
Kernel names, as it does the eights of writes; the others are taken to be neighbours. A group costs as many clocks as the
most words that it wants of one bank; the same word is given to all who want it at once. Every LDS instruction of a loop is counted
each time that a wave comes by, and what it costs is set against what density.py has for it. One block runs, of a problem that fills it.

A line a loop and kernel: cycles of LDS without conflicts and with them, and density with them. Compared with tests/emulator/banks.csv: what
costs more by 3 % fails, what has no line there is only shown. Of gfx950 the groups are not known, so it is not counted.
"""
import argparse
import collections
import concurrent.futures
import csv
import ctypes
import io
import os
import re
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "..", "gpu"), os.path.join(HERE, "..", "lib")]

from elftools.elf.elffile import ELFFile  # noqa: E402

import abi  # noqa: E402
import assembly  # noqa: E402
import clangs  # noqa: E402
import coverage  # noqa: E402
import density  # noqa: E402
import progress  # noqa: E402
import run  # noqa: E402
import suite  # noqa: E402
from matrix import is_cdna  # noqa: E402

TABLE = os.path.join(HERE, "banks.csv")
ARCHS = ("gfx90a", "gfx942", "gfx1100", "gfx1201")
COLUMNS = ("kernel", "loop", "lds", "conflicts", "density")
BANKS = 32
EXEC = 126
APART = [[*range(a, a + 4), *range(b, b + 4)] for a, b in ((0, 20), (4, 16), (8, 28), (12, 24))]
READ_FOUR = [*APART, *([lane + 32 for lane in group] for group in APART)]
NO_BANKS = re.compile(r"ds_(?:\w*permute|swizzle|nop)")
Access = collections.namedtuple("Access", "words at is_read")  # of a lane: how many, and where from, in bytes


def groups_of(access, lanes, cdna):
    if cdna and access.words == 4 and access.is_read:
        return READ_FOUR
    size = max(BANKS // access.words, 1)
    return [list(range(first, first + size)) for first in range(0, lanes, size)]


def clocks(access, addresses, active, cdna):
    """Of one access by a wave's lanes."""
    total = 0
    for group in groups_of(access, len(addresses), cdna):
        wanted = collections.defaultdict(set)
        for lane in group:
            if active >> lane & 1:
                first = (addresses[lane] + access.at) // 4
                for word in range(first, first + access.words):
                    wanted[word % BANKS].add(word)
        total += max(map(len, wanted.values()), default=0)
    return total


def accesses_of(name, offset0, offset1):
    """What an LDS instruction does."""
    bits = int(re.findall(r"(?:b|u|i)(8|16|32|64|96|128)", name)[0] if re.search(r"[bui](?:8|16|32|64|96|128)", name) else 32)
    words, is_read = max(bits // 32, 1), bool(re.match(r"ds_(?:read|load)", name))
    if "2addr" in name or re.match(r"ds_(?:read|write)2", name):
        step = words * 4 * (64 if "st64" in name or "stride64" in name else 1)
        return [Access(words, offset * step, is_read) for offset in (offset0, offset1)]
    return [Access(words, offset0 | offset1 << 8, is_read)]


class Recorder:
    """Stands where the emulator decodes; counts the clocks of each LDS instruction by its place in the code."""

    def __init__(self, emu, arch):
        self.emu, self.arch, self.decode = emu, arch, emu._decode_at
        self.spent, self.times, self.lanes = collections.Counter(), collections.Counter(), 64 if is_cdna(arch) else 32
        emu._decode_at = self.decode_at

    def decode_at(self, pc, arch):
        (program, runtime), inst = self.decode(pc, arch)
        name = self.emu._op_name(inst).lower()
        if name.startswith("ds_"):
            runtime = self.recording(pc, name, program, runtime)
        return (program, runtime), inst

    def recording(self, pc, name, program, runtime):
        raw = bytes((ctypes.c_char * 8).from_address(pc).raw)
        accesses, register, used = accesses_of(name, raw[0], raw[1]), raw[4], list(program.arg.globals)
        self.times[pc] += 0  # every instruction that is there has a place
        if NO_BANKS.match(name) or 0 not in used or 1 not in used:
            return runtime

        def call(*buffers):
            scalars, vectors = (buffers[used.index(n)].value for n in (0, 1))
            active = int.from_bytes(ctypes.string_at(scalars + 4 * EXEC, self.lanes // 8), "little")
            addresses = list((ctypes.c_uint32 * self.lanes).from_address(vectors + 4 * register * self.lanes))
            self.spent[pc] += sum(clocks(access, addresses, active, is_cdna(self.arch)) for access in accesses)
            self.times[pc] += 1
            return runtime.fxn(*buffers)

        return type("Recording", (), {"fxn": staticmethod(call)})

    def end(self):
        self.emu._decode_at = self.decode


def places_in(path, entry, machine):
    """Of the LDS instructions of a code object, in their order: bytes from its first; all of it is decoded, run or not."""
    import emulator
    emu, found = emulator.load_emulator(), []
    with open(path, "rb") as f:
        elf = ELFFile(io.BytesIO(f.read()))
        symbol = elf.get_section_by_name(".symtab").get_symbol_by_name(entry)[0]
        text = elf.get_section_by_name(".text")
        code = text.data()[symbol["st_value"] - text["sh_addr"]:][:symbol["st_size"]]
    at = 0
    while at < len(code):
        inst = emu.decode_inst(code[at:at + 16].ljust(16, b"\0"), machine)
        found += [at] if emu._op_name(inst).lower().startswith("ds_") else []
        at += inst.size()
    return [place - found[0] for place in found]


def start_of(recorded_at, places):
    """Where the first LDS instruction lies, so that all that were seen are such."""
    known = set(places)
    return next(start for start in (min(recorded_at) - place for place in places) if all(pc - start in known for pc in recorded_at))


def problem_of(name):
    """One that fills a block, and no more."""
    options, tile = coverage.options_of(name), coverage.spill_check.tile_of(name)
    packed, backward = "_pack" in name, "_bwd_" in name
    options.update(hq=2 if packed else 1, hk=1, dq=tile.hdim_q, dv=tile.hdim_v)
    options.update(sq=3 * tile.tile_m if backward else tile.tile_m // 2 if packed else tile.tile_m,
                   sk=tile.tile_n if backward else 4 * tile.tile_n)
    if "mask" in options:
        options.update(mask=abi.MASK_BOTTOM_RIGHT, right=0, left=-1)
    if "splits" in options:
        options.update(splits=1, split_size=options["sk"])
    return options


def recorded(arch, name):
    """{number of an LDS instruction in the code: clocks a time}, and the kernel."""
    import emulator
    emu, lib = emulator.load_emulator(), run.library()
    case = suite.Case("backward" if "_bwd_" in name else "forward", coverage.spill_check.tile_of(name), **problem_of(name))
    clocks_of, kernels = {}, []

    class Device(run.EmulatedDevice):
        def run(self, kernel, args, problem):
            if kernel.name.decode() != name:
                return super().run(kernel, args, problem)
            recorder = Recorder(emu, arch)
            try:
                super().run(kernel, args, problem)
            finally:
                recorder.end()
            path = run.compile_kernel(kernel, arch, self.folder)
            places = places_in(path, kernel.entry.decode(), emulator.CodeObject(path, arch).machine)
            number, start = {place: n for n, place in enumerate(places)}, start_of(recorder.times, places) if recorder.times else 0
            for pc, times in recorder.times.items():
                if times:
                    clocks_of[number[pc - start]] = recorder.spent[pc] / times
            kernels.append((kernel, len(places)))
            return None

    suite.run(case, lib, Device(lib, arch, run.kernel_folder(), False), arch, case.pipeline)
    assert kernels, f"{name}: the problem does not make it"
    return clocks_of, *kernels[0]


def rows_of(task):
    """A row for each main loop."""
    arch, name = task
    clocks_of, kernel, n_ds = recorded(arch, name)
    job = density.Job(arch, name, kernel)
    text = assembly.assemble(arch, job.source, job.options)
    blocks, number, rows = density.blocks_of(arch, text), 0, []
    for block in blocks:
        block.numbers = []
        for instruction, _ in block.code:
            block.numbers.append(number if instruction.startswith("ds_") else None)
            number += instruction.startswith("ds_")
    assert number == n_ds, f"{name}: {number} LDS instructions in the text, {n_ds} in the code"
    per_clock = 4 if is_cdna(arch) else 2  # SIMDs that share LDS; a clock of all is that share of a SIMD's issue cycle
    for loop, way in enumerate(density.main_loops(arch, text, blocks)):
        pipes = {pipe: sum(block.pipes[pipe] * often for block, often in way) for pipe in density.PIPES}
        dear = dict(pipes)
        for block, often in way:
            for (instruction, _), n in zip(block.code, block.numbers):
                if n is not None and n in clocks_of:
                    plain = density.cost(arch, instruction)[1]
                    counted = clocks_of[n] * per_clock / (4 if is_cdna(arch) else 1)
                    dear["lds"] += often * max(counted - plain, 0)
        rows.append({"kernel": name, "loop": str(loop), "lds": f"{pipes['lds'] / job.scores:.2f}",
                     "conflicts": f"{dear['lds'] / job.scores:.2f}",
                     "density": f"{pipes['matrix'] / density.busiest(arch, dear):.3f}"})
    return rows


# Of 64 lanes: bytes between neighbours, the access, clocks on CDNA.
KNOWN = ((4, Access(1, 0, True), 2), (8, Access(2, 0, True), 4), (16, Access(4, 0, True), 8), (16, Access(4, 0, False), 8),
         (128, Access(1, 0, True), 64), (0, Access(1, 0, True), 2), (8, Access(1, 0, True), 4), (64, Access(4, 0, False), 32),
         (132, Access(1, 0, True), 2), (144, Access(4, 0, False), 8))


def check_model():
    return [f"lanes {step} bytes apart, {access}: {clocks(access, [step * n for n in range(64)], (1 << 64) - 1, True)} clocks, not {want}"
            for step, access, want in KNOWN
            if clocks(access, [step * n for n in range(64)], (1 << 64) - 1, True) != want]


def names_of(arch):
    """Those of density.py's kernels that are one block's work."""
    return [name for name in density.short_names(arch) if "_gpu_amd_" in name]


def read_table():
    with open(TABLE, encoding="ascii", newline="") as f:
        return {(row["kernel"], row["loop"]): row for row in csv.DictReader(f)}


def write_table(rows):
    with open(TABLE, "w", encoding="ascii", newline="") as f:
        writer = csv.DictWriter(f, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[key] for key in sorted(rows))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--update", action="store_true", help="write the table")
    parser.add_argument("--arch", action="append")
    parser.add_argument("--match", default="", help="a regular expression")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    if not os.environ.get("TINYGRAD"):
        print("banks: skipped, TINYGRAD is not set (a checkout of github:tinygrad/tinygrad)")
        return 77
    wrong = check_model()
    print("".join(f"FAIL {sentence}\n" for sentence in wrong), end="")
    tasks = [(arch, name) for arch in clangs.known(options.arch or ARCHS, "banks") for name in names_of(arch)
             if re.search(options.match, name)]
    table, found, failed = read_table() if os.path.exists(TABLE) else {}, {}, len(wrong)
    with concurrent.futures.ProcessPoolExecutor(options.jobs) as pool:
        for (_, name), rows in progress.told(zip(tasks, pool.map(rows_of, tasks)), len(tasks), "banks"):
            for row in rows:
                key = (name, row["loop"])
                found[key] = row
                old = table.get(key)
                print(f"{name} loop {row['loop']}: LDS {row['lds']}, with conflicts {row['conflicts']}, density {row['density']}", flush=True)
                if not options.update and old and float(row["conflicts"]) > float(old["conflicts"]) * density.SLACK:
                    print(f"FAIL {name} loop {row['loop']}: {old['conflicts']} -> {row['conflicts']}", flush=True)
                    failed += 1
            if options.update:
                write_table(table | found)
    print(f"banks: {len(found)} loops of {len(tasks)} kernels, {failed} dearer than their lines")
    return 1 if failed or not tasks else 0


if __name__ == "__main__":
    sys.exit(main())
