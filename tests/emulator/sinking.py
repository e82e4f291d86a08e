# SPDX-License-Identifier: MIT
"""Copies between registers that clang's sinking after register allocation moves past a write of their source: how
clang 19 made dQ = 0 of an f32 backward kernel of gfx942. No GPU, no emulator.

    python3 tests/emulator/sinking.py [--profile pytorch] [--arch gfx942] [--match REGEX] [--careless] [--jobs N]

The machine code before the pass is compared with that after it. fmhad switches the pass off in every clang that lets it:
then there is nothing to compare. --careless leaves it on, which says what that is good for. Always, the checker has to
find the fault in a text that has one.
"""
import collections
import concurrent.futures
import os
import re
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "gpu"))

import abi  # noqa: E402
import assembly  # noqa: E402
import clangs  # noqa: E402

PASS = "postra-machine-sink"
SHOW = [word for when in ("before", "after") for word in ("-mllvm", f"-print-{when}={PASS}")]
DUMP = re.compile(r"^# \*\*\* IR Dump (Before|After) .*$", re.M)
COPY = re.compile(r"(?:renamable )?\$(\w+) = COPY (?:killed )?(?:renamable )?\$(\w+)")
WRITTEN = re.compile(r"implicit-def (?:dead )?(?:early-clobber )?(?:renamable )?\$(\w+)")
# Bodies before and after: sgpr9 is written between where the copy was and where it is.
WRONG = ("bb.0:\n  $sgpr4 = COPY $sgpr9\n  $sgpr8_sgpr9 = S_MOV_B64 0\nbb.1:\n  S_ENDPGM 0\n",
         "bb.0:\n  $sgpr8_sgpr9 = S_MOV_B64 0\nbb.1:\n  $sgpr4 = COPY $sgpr9\n  S_ENDPGM 0\n")


def registers(name):
    """vgpr3_vgpr4 is two of them."""
    return set(name.split("_"))


def writes(line):
    """The registers that an instruction defines."""
    found = set()
    left, equals, _ = line.partition(" = ")
    for name in re.findall(r"\$(\w+)", left if equals else "") + WRITTEN.findall(line):
        found |= registers(name)
    return found


def blocks(text):
    """{block: its instructions}"""
    found, name = {}, None
    for line in text.splitlines():
        head = re.match(r"bb\.(\d+)", line)
        if head:
            name = int(head[1])
            found[name] = []
        elif name is not None and line.startswith("  ") and not line.startswith(("  successors:", "  liveins:")):
            found[name].append(line.strip())
    return found


def copies(lines):
    return collections.Counter(COPY.match(line).groups() for line in lines if COPY.match(line))


def moved_past_writes(before, after):
    """Sentences about copies that left a block and whose source the rest of it writes."""
    wrong, before, after = [], blocks(before), blocks(after)
    for block, lines in before.items():
        for (to, source), times in (copies(lines) - copies(after.get(block, []))).items():
            at = [n for n, line in enumerate(lines) if (found := COPY.match(line)) and found.groups() == (to, source)][-times]
            if any(writes(line) & registers(source) for line in lines[at + 1:]):
                wrong.append(f"${to} = COPY ${source} left block {block}, which writes ${source} below it")
    return wrong


def moved(dumps):
    """Of what SHOW makes clang say: sentences about every function, and how often the pass ran."""
    parts = DUMP.split(dumps)[1:]
    texts = {"Before": [], "After": []}
    for when, text in zip(parts[::2], parts[1::2]):
        texts[when].append(text)
    return [sentence for pair in zip(texts["Before"], texts["After"]) for sentence in moved_past_writes(*pair)], len(parts)


def check(task):
    arch, source, options, careless = task
    try:
        _, dumps = clangs.compile_with_notes(arch, os.path.join(assembly.GPU, source), [*options, *SHOW], careless)
    except RuntimeError as error:
        return [str(error)], 0
    return moved(dumps)


def main():
    parser = assembly.arguments(profiles=True)
    parser.add_argument("--careless", action="store_true", help="the pass stays on; nothing that is found counts as failed")
    options = parser.parse_args()
    archs = clangs.known(options.arch or assembly.ARCHS, "sinking")
    if not archs:
        return 77
    if len(moved_past_writes(*WRONG)) != 1 or moved_past_writes(WRONG[0], WRONG[0]):
        print("FAIL the checker does not find the fault")
        return 1
    tasks = {name: (*task, options.careless) for name, task in assembly.tasks(abi.load_library(), archs, options).items()}
    wrong = ran = 0
    with concurrent.futures.ProcessPoolExecutor(options.jobs) as pool:
        for name, (said, dumps) in zip(tasks, pool.map(check, tasks.values())):
            wrong, ran = wrong + bool(said), ran + bool(dumps)
            for sentence in said:
                print(f"{'found' if options.careless else 'FAIL'} {name}: {sentence}", flush=True)
    print(f"sinking: of {len(tasks)} kernels the pass ran on {ran} and moved a copy past a write of its source in {wrong}")
    return 1 if not tasks or (wrong and not options.careless) else 0


if __name__ == "__main__":
    sys.exit(main())
