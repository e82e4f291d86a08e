# SPDX-License-Identifier: MIT
"""What an emulator forgives, looked for in the assembly of the AMD kernels. No GPU, no emulator.

    python3 tests/emulator/assembly.py [--arch gfx942] [--quick] [--match REGEX] [--jobs N] [--verbose]

Of every kernel: no scratch memory, registers and LDS within the limits; no instruction that a person
wrote, whose hazards the compiler would not know; inside each basic block a wait of the right counter
between a load and the first instruction that touches its destination, and nothing of LDS under way at
a barrier; and what hazards.py follows. Waits that were taken out must be missed: that is tried on the first kernel of each arch.
The kernels are those of the emulator's cases; sweep.py has all of a profile.
"""
import argparse
import collections
import concurrent.futures
import os
import re
import resource
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(HERE, "..", "gpu"), os.path.join(HERE, "..", "lib")]

import abi  # noqa: E402
import clangs  # noqa: E402
import hazards  # noqa: E402
import progress  # noqa: E402
import spill_check  # noqa: E402
import suite  # noqa: E402

GPU = os.path.join(abi.ROOT, "kernels", "gpu")
FORWARD = (abi.FWD, abi.FWD_SPLITKV, abi.FWD_PAGEDKV, abi.BATCH_PREFILL)  # one source for all, see fmha.hip
ARCHS = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
REGISTERS = re.compile(r"\b([vas])(?:(\d+)|\[(\d+):(\d+)\])(?![\w.])")
# Which counters a load, store or atomic is counted by: (prefix, counters of gfx9, gfx11, gfx12).
# In-order counters come back in the order of issue; scalar loads in any.
KINDS = (("s_load", ("lgkm",), ("lgkm",), ("km",)), ("s_buffer_load", ("lgkm",), ("lgkm",), ("km",)),
         ("ds_", ("lgkm",), ("lgkm",), ("ds",)),
         ("flat_", ("vm", "lgkm"), ("vm", "lgkm"), ("load", "ds")),
         ("global_", ("vm",), ("vm",), ("load",)), ("buffer_", ("vm",), ("vm",), ("load",)),
         ("scratch_", ("vm",), ("vm",), ("load",)))
NOT_MEMORY = ("buffer_gl", "buffer_wb", "buffer_inv", "global_wb", "global_inv", "ds_nop")
WIDE_SPILLS = 128  # registers that a kernel of heads above 256 may spill
NO_COUNTER = ("s_wait_idle", "s_wait_alu", "s_wait_event")
STORES = ("store", "write", "atomic_add", "atomic_pk_add")


class Job:
    """What a process that compiles needs to know of a kernel."""

    def __init__(self, arch, name, kernel, try_checker):
        self.arch, self.name, self.try_checker = arch, name, try_checker
        self.source, self.options = kernel.source.decode(), abi.kernel_options(kernel)
        self.lds_bytes = kernel.lds_bytes
        self.is_wide = max(kernel.tile.hdim_q, kernel.tile.hdim_v) > 256


def assemble(arch, source, options):
    return clangs.compile_text(arch, os.path.join(GPU, source), options)


def registers(text):
    found = set()
    for bank, one, first, last in REGISTERS.findall(text):
        for n in range(int(one or first), int(one or last) + 1):
            found.add((bank, n))
    return found


def generation(arch):
    return 0 if arch.startswith("gfx9") else 1 if arch.startswith("gfx11") else 2


class Block:
    """What is under way: of every counter, oldest first, (destination registers, what kind, line)."""

    def __init__(self, arch):
        self.column = 1 + generation(arch)
        self.clear()

    def clear(self):
        self.queues = collections.defaultdict(list)

    def wait(self, counter, most):
        queue = self.queues[counter]
        if most == 0:
            queue.clear()
        elif not any(kind.startswith("s_") for _, kind, _ in queue):
            del queue[:max(0, len(queue) - most)]

    def touched(self, wanted, ignore=()):
        return [(kind, line) for counter, queue in self.queues.items() if counter not in ignore
                for regs, kind, line in queue if regs & wanted]

    def issue(self, name, operands, line):
        """A memory instruction: returns what its sources touch."""
        counters = next((k[self.column] for k in KINDS if name.startswith(k[0])), ())
        is_store = any(word in name for word in STORES) and "_rtn" not in name
        first, _, rest = operands.partition(",")
        # Loads into the same register come back in order; other counters do not know that.
        wrong = self.touched(registers(operands)) if is_store else (
            self.touched(registers(rest)) + self.touched(registers(first), counters))
        if is_store and self.column > 1 and not name.startswith("ds_"):
            counters = ()  # stores have a counter of their own, which no register depends on
        for counter in counters:
            self.queues[counter].append((set() if is_store else registers(first), name, line))
        return wrong

    def under_way(self, prefix):
        """LDS memory, that is: permutations go through its wires only."""
        return [(kind, line) for queue in self.queues.values() for _, kind, line in queue
                if kind.startswith(prefix) and not kind.endswith(("permute_b32", "swizzle_b32"))]


def waits_of(name, operands):
    """(counter, most) pairs of a wait instruction."""
    if name == "s_waitcnt":
        return [(c, int(n)) for c, n in re.findall(r"(vm|lgkm|exp)cnt\((\d+)\)", operands)]
    if name == "s_waitcnt_vscnt":  # stores
        return []
    value = int(operands.strip(), 0)
    if name == "s_wait_loadcnt_dscnt":
        return [("load", value >> 8 & 63), ("ds", value & 63)]
    if name == "s_wait_storecnt_dscnt":
        return [("ds", value & 63)]
    found = re.fullmatch(r"s_wait_(load|ds|km)cnt", name)
    return [(found.group(1), value)] if found else []


def check_waits(arch, text):
    """Returns sentences about what is wrong."""
    block, wrong = Block(arch), []
    for number, line in enumerate(text.splitlines(), 1):
        code = line.split(";")[0].rstrip()
        if re.match(r"[.\w$]+:", code):  # a label: other ways lead here
            block.clear()
            continue
        found = re.match(r"\t([a-z]\w+)\s*(.*)", code)
        if not found:
            continue
        name, operands = found.groups()
        if name.startswith(("s_branch", "s_cbranch", "s_endpgm", "s_setpc")):
            block.clear()
        elif name.startswith("s_wait"):
            for counter, most in waits_of(name, operands) if name not in NO_COUNTER else ():
                block.wait(counter, most)
        elif name in ("s_barrier", "s_barrier_signal"):
            wrong += [f"line {number}: {name} while {kind} of line {at} is under way"
                      for kind, at in block.under_way("ds_")]
        elif name.startswith(tuple(k[0] for k in KINDS)) and not name.startswith(NOT_MEMORY):
            wrong += [f"line {number}: {name} touches what {kind} of line {at} loads"
                      for kind, at in block.issue(name, operands, number)]
        else:
            wrong += [f"line {number}: {name} touches what {kind} of line {at} loads"
                      for kind, at in block.touched(registers(operands))]
    return wrong


# Scratch memory is reached by these; kernels have no other use for them.
SCRATCH = re.compile(r"^\t(?:scratch|buffer)_(?:load|store)", re.M)


def check_resources(arch, lds_bytes, text):
    """What was spilled to lanes of other registers in the end may leave its bytes of scratch behind, unused. A kernel
    that spills to memory is the caller's matter, see spilled()."""
    number = {key: int(value) for key, value in re.findall(r"\.(\w+):\s+(\d+)$", text, re.M)}
    limit = 512 if arch.startswith("gfx9") else 256
    rules = [("vgpr_count", limit), ("group_segment_fixed_size", 0)]
    if not spilled(number):
        rules.append(("private_segment_fixed_size", 0 if SCRATCH.search(text) else 64))
    wrong = [f"{key} is {number[key]}, at most {most} is allowed" for key, most in rules if number[key] > most]
    if lds_bytes > (163840 if arch == "gfx950" else 65536):
        wrong.append(f"{lds_bytes} bytes of LDS")
    return wrong, number


def spilled(number):
    """How many registers are kept in memory, as fmhad counts them: CDNA's accumulation registers are none."""
    return number["vgpr_spill_count"] if number["private_segment_fixed_size"] else 0


def check_written(text):
    """Statements of inline assembly may hold values in place, but no instruction, except for one that only waits."""
    inside = re.findall(r"#ASMSTART\n(.*?);;#ASMEND", text, re.S)
    said = (re.sub(r";.*", "", t).split() for t in inside)
    return [f"inline assembly: {words[0]}" for words in said if words and words != ["s_wait_dscnt", "0x0"]]


def without(text, names):
    return re.sub(rf"^\t(?:{names})\b.*\n", "", text, flags=re.M)


def check_checker(arch, text):
    """Assembly without its waits must be found wrong."""
    waits = "s_waitcnt|s_wait_loadcnt|s_wait_dscnt|s_wait_kmcnt|s_wait_loadcnt_dscnt"
    wrong = hazards.check_checkers()
    wrong += [] if len(check_waits(arch, without(text, waits))) > 20 else ["waits that are missing are not missed"]
    if arch.startswith("gfx12") and len(hazards.scalar_reads(arch, without(text, "s_wait_alu"))) <= 20:
        wrong.append("waits for scalar registers that are missing are not missed")
    return wrong


def code_of(kernel, every_type):
    """Equal where the code is, but for the name of the entry."""
    alike = () if every_type else (f"-DFMHA_DTYPE={abi.F16}", f"-DFMHA_DTYPE={abi.BF16}")
    ignored = ("-DFMHA_ENTRY=", "-DFMHA_FAMILY=", *alike)
    return ((FORWARD if kernel.family in FORWARD else kernel.family),
            *(option for option in abi.kernel_options(kernel) if not option.startswith(ignored)))


def of_profile(lib, arch, profile, every_type):
    found = {}
    for name in sorted(spill_check.listed(arch, profile), key=lambda name: "_bf16_" not in name):
        kernel = spill_check.kernel_of(lib, name)
        assert kernel is not None, f"no problem makes {name}"
        found.setdefault(code_of(kernel, every_type), (name, kernel))
    return dict(found.values())


def widest(kernels):
    """Where registers are dearest: of every pipeline the widest heads with the most features."""
    found = {}
    for name, kernel in kernels.items():
        if kernel.family in (abi.FWD_SPLITKV, abi.BWD_DQ_DK_DV):
            rank = (kernel.tile.hdim_q + kernel.tile.hdim_v, name.count("_"), name)
            key = (kernel.family, kernel.tile.pipeline)
            found[key] = max(found.get(key, rank), rank)
    return {name: kernels[name] for _, _, name in found.values()}


def wanted(lib, arch, quick):
    """Of the emulator's cases: one kernel of every name."""
    found = {}
    for case in suite.emulated(False):
        for kernel in suite.kernels(case, lib, arch, case.pipeline):
            if kernel is not None:
                found.setdefault(kernel.name.decode(), kernel)
    if not quick:
        return found
    families = {}
    for name, kernel in found.items():
        if kernel.family in (abi.FWD, abi.FWD_PAGEDKV, abi.BWD_DQ_DK_DV) and "scalar" not in name:
            families[kernel.family] = name
    return {name: found[name] for name in families.values()} | widest(of_profile(lib, arch, "pytorch", False))


def check(job):
    """Returns (sentences about what is wrong, the compiler's numbers, its CPU seconds)."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        text = assemble(job.arch, job.source, job.options)
    except RuntimeError as error:
        return [str(error)], {}, 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    wrong, number = check_resources(job.arch, job.lds_bytes, text)
    wrong += check_written(text) + check_waits(job.arch, text)[:3]
    wrong += hazards.scalar_reads(job.arch, text)[:3] + hazards.lds_at_barriers(text)[:3] + hazards.matrix_results(job.arch, text)[:3]
    wrong += check_checker(job.arch, text) if job.try_checker else []
    return wrong, number, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


QUICK = dict(action="store_true", help="a few kernels, and those with the fewest registers left")


def arguments(profiles=False):
    """A parser for those who look at kernels: which, and how many at once."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--arch", action="append")
    if profiles:
        parser.add_argument("--profile", help="of what `fmhactl build --list` names; else the emulator's cases")
    parser.add_argument("--match", default="", help="a regular expression")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    return parser


def tasks(lib, archs, options, quick=False):
    """{name: (arch, source, compile options)} of the kernels that arguments(profiles=True) named."""
    found = {}
    for arch in archs:
        kernels = of_profile(lib, arch, options.profile, False) if options.profile else wanted(lib, arch, quick)
        for name, kernel in kernels.items():
            if re.search(options.match, name):
                found[name] = (arch, kernel.source.decode(), abi.kernel_options(kernel))
    return found


def main():
    parser = arguments()
    parser.add_argument("--quick", **QUICK)
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    archs = clangs.known(options.arch or ARCHS, "assembly")
    if not archs:
        return 77
    lib, failed, jobs, times, spilling, sound, wide = abi.load_library(), 0, [], [], {}, set(), set()
    for arch in archs:
        kernels = wanted(lib, arch, options.quick)
        mine = [(name, kernel) for name, kernel in kernels.items() if re.search(options.match, name)]
        jobs += [Job(arch, name, kernel, n == 0) for n, (name, kernel) in enumerate(mine)]
    with concurrent.futures.ProcessPoolExecutor(options.jobs) as pool:
        for job, (wrong, number, seconds) in progress.told(zip(jobs, pool.map(check, jobs)), len(jobs), "assembly"):
            failed += bool(wrong)
            times.append((seconds, job.name))
            if number and spilled(number):
                spilling[job.name] = spilled(number)
                # Half of such a row's sums are 128 registers a lane; the scalar loop serves them, too, and dispatch weighs both.
                if job.is_wide and spilled(number) <= WIDE_SPILLS:
                    wide.add(job.name)
            else:
                sound.add(spill_check.kind_of(job.name))
            if options.verbose and number:
                print(f"{job.name}: {number['vgpr_count']} registers, {number['private_segment_fixed_size']} bytes of "
                      f"scratch, {number['sgpr_spill_count']} scalar registers in vector ones, {job.lds_bytes} LDS, "
                      f"{seconds:.2f} s")
            for sentence in wrong:
                print(f"FAIL {job.name}: {sentence}", flush=True)
    for name, count in spilling.items():  # a daemon sets it aside where another tile serves the same problems
        alone = spill_check.kind_of(name) not in sound and name not in wide
        failed += alone
        print(f"{'FAIL' if alone else 'set aside'} {name}: spills {count} registers", flush=True)
    times.sort()
    for share in (0.5, 0.9, 0.99, 1) if times else ():
        seconds, name = times[int(share * (len(times) - 1))]
        print(f"{share * 100:.0f} % compile within {seconds:.2f} CPU seconds ({name})")
    print(f"assembly: {len(jobs) - failed} of {len(jobs)} kernels as they should be")
    return 1 if failed or not jobs else 0


if __name__ == "__main__":
    sys.exit(main())
