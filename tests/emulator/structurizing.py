# SPDX-License-Identifier: MIT
"""Values that clang's making of structured control flow may carry into paths that never compute them. No GPU, no emulator.

    python3 tests/emulator/structurizing.py [--profile pytorch] [--arch gfx942] [--match REGEX] [--quick] [--share N] [--jobs N]

StructurizeCFG of LLVM 22 moves what costs nothing (part of a vector, a cast) out of an else-block, up to where the branch is,
and gives it to phis of other paths, too: right only where the block's other half goes to the same place and nothing else
does (llvm/llvm-project#183792, mended in 23). Backward under intervals lost the -inf of what they hide by it, on every arch.
Here the code before the pass is searched for such blocks, as PyPI's clang makes it where that is there. What costs nothing
is LLVM's to say, so the words here are a few too many. Always, the checker has to find the fault in a text that has one.
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

SHOW = ["-mllvm", "-print-after=unify-loop-exits", "-mllvm", "-stop-before=amdgpu-isel"]  # what comes next is the pass
FREE = {"addrspacecast", "bitcast", "extractelement", "fneg", "freeze", "getelementptr", "insertelement", "inttoptr", "ptrtoint",
        "shufflevector", "trunc", "zext"}
VALUE = re.compile(r"\s*(%[\w.]+) = (\w+)(.*)")
LANES = re.compile(r"workitem\.id|mbcnt|asm .*=v|bpermute|permlane|dpp|swizzle|atomicrmw|cmpxchg|addrspace\(5\)|load [^%]*, ptr %")
ONE = re.compile(r"readfirstlane|readlane|ballot")  # the same in all lanes, whatever it is made of
INCOMING = re.compile(r"\[ ([^,\[]+), (%[\w.]+) \]")
# Of hide_turned() what matters: a row of no intervals, or of some of which none was met, hides.
WRONG = """define void @f() {
  %9 = tail call i32 asm sideeffect "", "=v"()
  br i1 %1, label %2, label %4
2:                                                ; preds = %0
  %3 = icmp eq i32 %9, 0
  br i1 %3, label %4, label %6
4:                                                ; preds = %0, %2
  %5 = insertelement <4 x float> %8, float 0xFFF0000000000000, i64 0
  br label %6
6:                                                ; preds = %4, %2
  %7 = phi <4 x float> [ %5, %4 ], [ %8, %2 ]
  ret void
}
"""
RIGHT = (WRONG.replace("br i1 %3, label %4, label %6", "br label %6").replace("preds = %0, %2", "preds = %0"),  # if and else
         WRONG.replace("preds = %0, %2", "preds = %2, %0"))  # the branch comes too late to be taken for that of an else

Made = collections.namedtuple("Made", "word operands text")
# {name: Made}, {block: names from it}, successors, predecessors as the pass comes upon them, what a branch asks
Block = collections.namedtuple("Block", "values phis after before asked")


def functions(text):
    """For each: {block: Block}, the first one first."""
    for body in re.findall(r"^define [^\n]*\{\n(.*?)^\}", text, re.M | re.S):
        blocks = {}
        here = blocks["entry"] = Block({}, collections.defaultdict(set), [], [], [])
        for line in body.splitlines():
            if head := re.match(r"([\w.]+): *(?:; preds = (.*))?", line):
                here = blocks["%" + head[1]] = Block({}, collections.defaultdict(set), [], (head[2] or "").split(", "), [])
            elif made := VALUE.match(line):
                here.values[made[1]] = Made(made[2], re.findall(r"%[\w.]+", made[3]), made[3])
                if made[2] == "phi":
                    for value, block in INCOMING.findall(line):
                        here.phis[block].add(value)
            elif re.match(r"\s*(br|switch) ", line):
                here.after.extend(re.findall(r"label (%[\w.]+)", line))
                here.asked.extend(re.findall(r"br i1 (%[\w.]+)", line))
        for block in blocks.values():  # the first block's number is not said at its head
            block.before[:] = [name if name in blocks else "entry" for name in block.before if name]
        yield blocks


def without_loops(blocks):
    """{block: its successors}, less the edges that go back."""
    forward, state = {name: set() for name in blocks}, {}
    stack = [("entry", iter(blocks["entry"].after))]
    state["entry"] = "open"
    while stack:
        name, rest = stack[-1]
        for after in rest:
            if state.get(after) != "open":
                forward[name].add(after)
            if after not in state:
                state[after] = "open"
                stack.append((after, iter(blocks[after].after)))
                break
        else:
            state[name] = "done"
            stack.pop()
    return forward


def reach(edges, begin):
    """Blocks that one can come to from @begin, itself, too."""
    seen, left = {begin}, [begin]
    while left:
        for after in set(edges[left.pop()]) - seen:
            seen.add(after)
            left.append(after)
    return seen


def dominators(before, first):
    """{block: those on every way to it from @first, itself, too}, by {block: those before it}."""
    found, changed = {name: set(before) for name in before} | {first: {first}}, True
    while changed:
        changed = False
        for name, blocks in before.items():
            if blocks and name != first:
                new = set.intersection(*(found[b] for b in blocks)) | {name}
                changed, found[name] = changed or new != found[name], new
    return found


def parting(blocks, forward):
    """Blocks at whose end lanes may part; a few more than those where they can."""
    edges = {name: block.after for name, block in blocks.items()}
    below = dominators({name: after or ["end"] for name, after in edges.items()} | {"end": []}, "end")
    ahead, around = ({name: reach(e, name) for name in blocks} for e in (forward, edges))
    values = {value: made for block in blocks.values() for value, made in block.values.items()}
    users, asking = collections.defaultdict(list), collections.defaultdict(list)
    for value, made in values.items():
        for x in made.operands if not ONE.search(made.text) else ():
            users[x].append(value)
    for name, block in blocks.items():
        for x in block.asked:
            asking[x].append(name)
    left, several, found = [value for value, made in values.items() if LANES.search(made.word + made.text)], set(), set()
    while left:
        value = left.pop()
        if value in several:
            continue
        several.add(value)
        left += users[value]
        for name in asking[value]:
            found.add(name)
            one, other = blocks[name].after
            meet = ahead[one] & ahead[other]
            for later in below[name] - {name, "end"}:  # all of them have met again there
                meet -= ahead[later] - {later}
            loop = {n for n in around[name] if name in around[n]}
            if loop and not {one, other} <= loop:  # which they leave one after the other
                meet |= loop
            left += [v for n in meet for v, made in blocks[n].values.items() if made.word == "phi"]
    return found


def halves(blocks, forward, name):
    """(branch, its other half) where the pass takes block @name for an else."""
    conditions = set()
    for branch in blocks[name].before:
        for other in set(blocks[branch].after) - {name}:
            if not conditions & {branch, other} and other not in reach(forward, name):
                conditions.add(other)
                yield branch, other
        conditions.add(branch)


def carried(text):
    """Sentences about what may be carried into other paths."""
    found = []
    for blocks in functions(text):
        forward, above = without_loops(blocks), dominators({name: block.before for name, block in blocks.items()}, "entry")
        home, parts = {value: name for name, block in blocks.items() for value in block.values}, None
        for name, block in blocks.items():
            if len(set(block.after)) != 1 or len(set(block.before)) == 1:  # alone behind its branch it is an else
                continue
            to = block.after[0]
            if len({x for x in blocks[to].before if to in forward[x]}) == 1:  # a loop's head, which no other path comes to
                continue
            free = {value for value in blocks[to].phis[name] if value in block.values and block.values[value].word in FREE}
            for branch, other in halves(blocks, forward, name) if free else ():
                there = above[name] & above[other]
                movable = [v for v in sorted(free) if all(home.get(x, "entry") in there for x in block.values[v].operands)]
                if not movable or set(blocks[other].after) == {to} and len(set(blocks[to].before)) == 2:
                    continue
                parts = parting(blocks, forward) if parts is None else parts
                top = max(there, key=lambda x: len(above[x]))
                if parts & {x for x in reach(forward, top) if to in reach(forward, x)} - {to}:  # else the pass leaves it alone
                    found.append(f"{movable[0]} of block {name}, a {block.values[movable[0]].word}, beside {other} from {branch}")
    return found


def check(task):
    arch, source, options = task
    try:
        _, dump = clangs.compile_with_notes(arch, os.path.join(assembly.GPU, source), [*options, *SHOW])
    except RuntimeError as error:
        return [str(error)]
    return carried(dump) if "define " in dump else ["nothing to look at"]


def main():
    parser = assembly.arguments(profiles=True)
    parser.add_argument("--quick", **assembly.QUICK)
    parser.add_argument("--share", type=int, default=1, help="every Nth of these only")
    options = parser.parse_args()
    if os.access(clangs.ZIG, os.X_OK):  # for every arch: other compilers bring other blocks before the pass
        os.environ.setdefault("FMHA_CLANG", clangs.zig_as_clang())
    archs = clangs.known(options.arch or assembly.ARCHS, "structurizing")
    if not archs:
        return 77
    if len(carried(WRONG)) != 1 or any(carried(text) for text in RIGHT):
        print("FAIL the checker does not find the fault, or finds one where there is none")
        return 1
    tasks = dict(list(assembly.tasks(abi.load_library(), archs, options, options.quick).items())[::options.share])
    wrong = 0
    with concurrent.futures.ProcessPoolExecutor(options.jobs) as pool:
        for name, said in zip(tasks, pool.map(check, tasks.values())):
            wrong += bool(said)
            if said:
                print(f"FAIL {name}: {len(said)}, as {said[0]}", flush=True)
    print(f"structurizing: of {len(tasks)} kernels {wrong} have values that clang 22 may carry into other paths")
    return 1 if wrong or not tasks else 0


if __name__ == "__main__":
    sys.exit(main())
