# SPDX-License-Identifier: MIT
"""What a card does and an emulator does not, followed along every way through a kernel's assembly.

Scalar registers on GFX12: a scalar register that a vector instruction has ever read lies in a cache of the vector unit's from
then on. What writes it later, a scalar instruction or a comparison, is only sure to be seen by a reader behind an s_wait_alu
of the right field, a scalar load or a buffer instruction, all of which wait for it. A scalar instruction that reads a
register waits for what vector ones have written to any, which clang counts on where the register may lie in that cache. VCC
is one register, as clang has it, though its halves are used apart. clang puts the waits there since version 20.

LDS at barriers: s_barrier waits for no counter, so that whatever a wave has written to LDS has to be waited for on every way
to it. assembly.py looks into basic blocks only.

Results of matrix instructions on CDNA: who reads or overwrites one has to come so many wait states later, which nothing but
code provides: the manual's table has 3 more than an instruction's passes for vector instructions, memory and operands A and B, on
gfx950 one more than that (LLVM #126132), and 1 more, or 2, for an accumulator that is only part of one. A whole accumulator may follow at once, but only
into an instruction of the same kind (LLVM #218363). clang before 23 looks back 19 wait states where gfx950 wants 20 (LLVM #222040).

What each rests on. That a barrier waits for nothing and how s_waitcnt counts is in the manuals of all archs, as is the table of
wait states in CDNA's. The scalar cache of GFX12 is not in what the manual of RDNA4 says of s_wait_alu: those rules are clang's
(LLVM #100067, #118750), and what AMD's engineers say there: scalar instructions wait for VA_SDST where they read or write a
register (#127212, #145728), and masks in EXEC and M0 are kept apart (#138663).

All are tried on made-up sequences, with and without their waits, before anything is judged by them.
"""
import collections
import functools
import re

import matrix

NUMBERED = re.compile(r"(?<![\w.])(?:s(?:(\d+)|\[(\d+):(\d+)\])|(vcc)(_lo|_hi)?|ttmp(?:(\d+)|\[(\d+):(\d+)\]))(?![\w\[])")
VCC, TTMP = 106, 108  # by the numbers that instructions have
BRANCH = re.compile(r"s_c?branch\w*$")
ENDS = ("s_endpgm", "s_setpc", "s_trap")
# Scalar instructions whose first operand is read, or read and written.
NO_RESULT = ("s_cmp", "s_bitcmp", "s_setreg", "s_sendmsg", "s_barrier", "s_setprio", "s_sleep", "s_nop", "s_delay", "s_clause",
             "s_wait", "s_branch", "s_cbranch", "s_endpgm", "s_code_end", "s_icache_inv", "s_sethalt", "s_trap", "s_version")
IN_PLACE = ("s_addk", "s_mulk", "s_cmov", "s_bitset", "s_fmac")
TO_SCALARS = ("v_readfirstlane", "v_readlane", "v_s_")
CARRIES = re.compile(r"v_(?:add|sub|subrev)_co_|v_div_scale_|v_mad_co_|v_mad_[iu]64_")  # a second result
READS_VCC = re.compile(r"v_div_fmas_|v_dual_cndmask_")
SCALAR_MEMORY = ("s_load", "s_buffer_load", "s_dcache", "s_prefetch", "s_atc")
FIELD = {"sa_sdst": "scalar", "va_sdst": "vector", "va_vcc": "vcc"}


def numbers(text):
    """The scalar registers that operands name."""
    found = set()
    for one, first, last, vcc, _, trap, trap_first, trap_last in NUMBERED.findall(text):
        if vcc:
            found |= {VCC, VCC + 1}  # one register: the last who wrote either half counts
        elif trap or trap_first:
            found |= {TTMP + n for n in range(int(trap or trap_first), int(trap or trap_last) + 1)}
        else:
            found |= set(range(int(one or first), int(one or last) + 1))
    return found


@functools.lru_cache(maxsize=65536)
def split_operands(name, operands):
    """(what it reads, what it writes) of scalar registers."""
    words = [word for word in operands.split(",")]
    if "::" in operands:  # two instructions in one: neither writes a scalar register
        results = 0
    elif name.startswith("v_cmpx") or name.startswith(NO_RESULT):
        results = 0
    elif CARRIES.match(name):
        results = 2
    else:
        results = 1
    writes = numbers(",".join(words[:results]))
    reads = numbers(",".join(words[results:]))
    if name.startswith(IN_PLACE):
        reads |= writes
    if READS_VCC.search(f"{name} {operands}") or name.startswith(("s_cbranch_vcc",)):
        reads |= {VCC, VCC + 1}
    return frozenset(reads), frozenset(writes)


def lines_of(text):
    """(number, label or None, name, operands) of the first function."""
    for number, line in enumerate(text.split("\t.section\t.rodata")[0].splitlines(), 1):
        code = line.split(";")[0].rstrip()
        label = re.match(r"(\.LBB\w+):", code)
        found = re.match(r"\t([a-z]\w+)\s*(.*)", code)
        if label:
            yield number, label[1], "", ""
        elif found:
            yield number, None, *found.groups()


class Block:
    def __init__(self, label):
        self.label, self.code, self.next = label, [], []


def blocks_of(text):
    """Basic blocks with every way that there is between them."""
    blocks = [Block("")]
    for number, label, name, operands in lines_of(text):
        if label:
            blocks.append(Block(label))
            continue
        blocks[-1].code.append((number, name, operands))
        if BRANCH.match(name) or name.startswith(ENDS):
            blocks.append(Block(""))
    at = {block.label: i for i, block in enumerate(blocks) if block.label}
    for i, block in enumerate(blocks):
        _, name, target = block.code[-1] if block.code else (0, "", "")
        if BRANCH.match(name):
            block.next.append(at[target.strip()])
        if name != "s_branch" and not name.startswith(ENDS) and i + 1 < len(blocks):
            block.next.append(i + 1)
    return blocks


def follow(blocks, start, step, merge):
    """What holds where each block begins: @step takes it through an instruction, @merge joins ways."""
    before, waiting = {0: start}, collections.deque([0])
    while waiting:
        i = waiting.popleft()
        state = before[i]
        for line in blocks[i].code:
            state = step(state, line)[0]
        for n in blocks[i].next:
            joined = merge(before[n], state) if n in before else state
            if n not in before or joined != before[n]:
                before[n] = joined
                waiting.append(n)
    return before


def findings(blocks, start, step, merge):
    """What @step says, once everything that can hold is known."""
    said = []
    for i, state in sorted(follow(blocks, start, step, merge).items()):
        for line in blocks[i].code:
            state, sentence = step(state, line)
            said += [sentence] if sentence else []
    return said


# ---- scalar registers of GFX12 ----

# Pairs of registers that a vector instruction has read; what scalar and vector instructions have written of those since the
# last wait. VCC's vector writes have a field of their own.
Scalars = collections.namedtuple("Scalars", "known scalar vector vcc")
NOTHING = Scalars(*[frozenset()] * 4)


def join_scalars(a, b):
    return Scalars(*(x | y for x, y in zip(a, b)))


def concerns_scalars(name, operands):
    if name.startswith((*SCALAR_MEMORY, "buffer_")) or name == "s_wait_alu":
        return True
    return name.startswith(("v_", "s_")) and any(split_operands(name, operands))


def step_scalars(state, line):
    number, name, operands = line
    if name.startswith(SCALAR_MEMORY) or name.startswith("buffer_"):
        return state._replace(scalar=frozenset(), vector=frozenset(), vcc=frozenset()), None
    if name == "s_wait_alu":
        zero = re.findall(r"depctr_(\w+)\(0\)", operands)
        return state._replace(**{FIELD[field]: frozenset() for field in zero if field in FIELD}), None
    is_vector = name.startswith("v_")
    if not is_vector and not name.startswith("s_"):
        return state, None
    reads, writes = split_operands(name, operands)
    cached = frozenset(n for n in reads if n // 2 in state.known)
    if not is_vector and reads:  # it waits for the vector unit
        state = state._replace(vcc=frozenset()) if reads & {VCC, VCC + 1} else state
        state = state._replace(vector=frozenset()) if reads - {VCC, VCC + 1} else state
    early = cached & (state.scalar | ((state.vector | state.vcc) if is_vector else frozenset()))
    sentence = f"line {number}: {name} may read {called(early)} before it is written" if early else None
    if is_vector and len(cached) < len(reads):
        state = state._replace(known=state.known | {n // 2 for n in reads})
    written = frozenset(n for n in writes if n // 2 in state.known)
    if written:
        mine = "scalar" if not is_vector else "vcc" if written & {VCC, VCC + 1} else "vector"
        cleared = {field: getattr(state, field) - written for field in ("scalar", "vector", "vcc")}
        state = state._replace(**cleared)
        state = state._replace(**{mine: getattr(state, mine) | written})
    return state, sentence


def called(found):
    return " ".join(f"vcc{('_lo', '_hi')[n - VCC]}" if n in (VCC, VCC + 1) else f"ttmp{n - TTMP}" if n >= TTMP else f"s{n}"
                    for n in sorted(found))


def scalar_reads(arch, text):
    """Sentences about reads that may come too early; none for what is not GFX12."""
    if not arch.startswith("gfx12"):
        return []
    blocks = blocks_of(text)
    for block in blocks:
        block.code = [line for line in block.code if concerns_scalars(*line[1:])]
    return findings(blocks, NOTHING, step_scalars, join_scalars)


# ---- LDS at barriers ----

LDS_WAIT = re.compile(r"s_waitcnt .*lgkmcnt\((\d+)\)|s_wait_dscnt (\w+)|s_wait_(?:load|store)cnt_dscnt (\w+)")
NO_LDS = re.compile(r"ds_(?:\w*permute|swizzle|nop)")


def step_lds(later, line):
    """@later: how many LDS instructions came after the last write that may be under way; None: there is none."""
    number, name, operands = line
    if name.startswith("ds_") and not NO_LDS.match(name):
        is_write = not re.match(r"ds_(?:read|load)", name)
        return 0 if is_write else None if later is None else later + 1, None
    found = LDS_WAIT.match(f"{name} {operands}")
    if found:
        most = int(found[1]) if found[1] else int(found[2] or found[3], 0) & 63
        return None if later is None or most <= later else later, None
    if name in ("s_barrier", "s_barrier_signal") and later is not None:
        return later, f"line {number}: {name} with a write to LDS under way"
    return later, None


def join_lds(a, b):
    return b if a is None else a if b is None else min(a, b)


def lds_at_barriers(text):
    return findings(blocks_of(text), None, step_lds, join_lds)


# ---- results of matrix instructions on CDNA ----

VECTORS = re.compile(r"(?<![\w.])([va])(?:(\d+)|\[(\d+):(\d+)\])")
MEMORY = ("buffer_", "global_", "flat_", "scratch_", "ds_")
GIVES = re.compile(r"(?:buffer|global|flat|scratch)_load|ds_(?:read|load|\w*permute|swizzle)")

# A result under way: its registers' file, first and last; who made it; how many wait states are left for who reads or
# overwrites it, and for who adds to a part of it.
Result = collections.namedtuple("Result", "file first last maker all part")


@functools.lru_cache(maxsize=65536)
def ranges(operands):
    """(file, first, last) of each vector operand, in order; None for others."""
    found = []
    for word in operands.split(","):
        one = VECTORS.search(word)
        found.append((one[1], int(one[2] or one[3]), int(one[2] or one[4])) if one else None)
    return tuple(found)


def overlaps(result, operand):
    return operand is not None and operand[0] == result.file and operand[1] <= result.last and result.first <= operand[2]


def early_use(result, name, operands, is_matrix):
    """Whether an instruction that comes now comes too early for @result."""
    used = ranges(operands)
    if not is_matrix:
        used = used[1:] if GIVES.match(name) else used  # loads come later than any result
        return result.all > 0 and any(overlaps(result, operand) for operand in used)
    if result.all > 0 and any(overlaps(result, operand) for operand in used[1:3]):
        return True
    whole = used[3] == (result.file, result.first, result.last) and name == result.maker
    return result.part > 0 and not whole and overlaps(result, used[3] if len(used) > 3 else None)


def step_matrix(arch, state, line):
    number, name, operands = line
    shape = matrix.MATRIX.match(name)
    sentence = None
    if shape or name.startswith(("v_", *MEMORY)):
        early = [result for result in state if early_use(result, name, operands, shape)]
        if early:
            sentence = f"line {number}: {name} comes {max(r.all for r in early)} wait states too early for what {early[0].maker} writes"
    passed = int(operands, 0) + 1 if name == "s_nop" else 0 if name.startswith("s_delay") else 1
    state = frozenset(r._replace(all=r.all - passed, part=r.part - passed) for r in state if max(r.all, r.part) > passed)
    if shape:
        passes = int(matrix.matrix_cycles(arch, shape))
        more = int(arch == "gfx950" and passes != 2)
        file, first, last = ranges(operands)[0]
        state |= {Result(file, first, last, name, passes + 3 + more, passes + more + (arch != "gfx90a"))}
    return state, sentence


def concerns_matrices(name):
    return name.startswith(("v_", "s_", *MEMORY))


def matrix_results(arch, text):
    """Sentences about uses that may come too early; none where the hardware waits itself."""
    if not matrix.is_cdna(arch):
        return []
    return findings(blocks_of(text), frozenset(), functools.partial(step_matrix, arch), frozenset.union)


# ---- that all find what they are for ----

READ, WRITE, USE = "\tv_add_nc_u32_e32 v1, s27, v1\n", "\ts_add_co_i32 s27, s26, 1\n", "\tv_add_nc_u32_e32 v2, s27, v2\n"
WAIT_SCALAR, WAIT_VECTOR = "\ts_wait_alu depctr_sa_sdst(0)\n", "\ts_wait_alu depctr_va_sdst(0)\n"
COMPARE, SELECT = "\tv_cmp_lt_i32_e64 s27, v3, v4\n", "\tv_cndmask_b32_e64 v5, v6, v7, s27\n"
LOOP = ".LBB0_1:\n{}\ts_cmp_lt_i32 s2, s3\n\ts_cbranch_scc1 .LBB0_1\n\ts_endpgm\n"
WAY = "\ts_cbranch_scc1 .LBB0_2\n{}.LBB0_2:\n"
# A sequence for gfx1201, and whether a read in it may come too early.
EARLY = (
    (READ + WRITE + USE, True), (READ + WRITE + WAIT_SCALAR + USE, False), (WRITE + USE, False), (READ + WRITE, False),
    (READ + WRITE + WAIT_VECTOR + USE, True), (READ + WRITE + "\ts_load_b32 s9, s[4:5], 0x0\n" + USE, False),
    (READ + WRITE + "\tbuffer_load_b32 v9, v8, s[4:7], null offen\n" + USE, False),
    (READ + WRITE + "\tglobal_load_b32 v9, v[8:9], off\n" + USE, True),
    (READ + WRITE + "\ts_add_co_i32 s4, s27, 1\n", True), (READ + WRITE + WAIT_SCALAR + "\ts_add_co_i32 s4, s27, 1\n", False),
    ("\tv_mov_b32_e32 v1, s26\n" + WRITE + USE, True),  # the pair is what is cached
    (READ + COMPARE + SELECT, True), (READ + COMPARE + WAIT_VECTOR + SELECT, False),
    (READ + COMPARE + WAIT_SCALAR + SELECT, True), (READ + COMPARE + "\ts_and_b32 s4, s27, exec_lo\n" + SELECT, False),
    (READ + COMPARE + "\ts_mov_b32 s4, s9\n" + SELECT, False), (READ + COMPARE + "\ts_mov_b32 s4, exec_lo\n" + SELECT, True),
    ("\tv_cndmask_b32_e32 v1, v2, v3, vcc_lo\n\tv_cmp_lt_i32_e32 vcc_lo, v3, v4\n\tv_cndmask_b32_e32 v1, v2, v3, vcc_lo\n", True),
    ("\tv_cndmask_b32_e32 v1, v2, v3, vcc_lo\n\tv_cmp_lt_i32_e32 vcc_lo, v3, v4\n\ts_wait_alu depctr_va_vcc(0)\n"
     "\tv_cndmask_b32_e32 v1, v2, v3, vcc_lo\n", False),
    ("\tv_cndmask_b32_e32 v1, v2, v3, vcc_lo\n\ts_mov_b32 vcc_lo, s3\n\tv_cndmask_b32_e32 v1, v2, v3, vcc_lo\n", True),
    ("\tv_cndmask_b32_e32 v1, v2, v3, vcc_lo\n\tv_cmp_lt_i32_e32 vcc_lo, v3, v4\n\ts_mov_b32 vcc_hi, 16\n" + WAIT_SCALAR +
     "\tv_cndmask_b32_e32 v1, v2, v3, vcc_lo\n", False),
    (READ + "\tv_readfirstlane_b32 s27, v1\n" + USE, True), (READ + "\tv_add_co_u32 v1, s27, v2, v3\n" + SELECT, True),
    (READ + "\ts_mov_b32 s28, 0\n" + "\tv_mov_b32_e32 v1, s28\n", False), (READ + "\ts_mov_b64 s[26:27], 0\n" + USE, True),
    (LOOP.format(USE + WRITE), True), (LOOP.format(USE + WRITE + WAIT_SCALAR), False),  # round a loop
    (READ + WAY.format(WRITE) + USE, True), (READ + WAY.format(WRITE + WAIT_SCALAR) + USE, False),
    (WAY.format(READ) + WRITE + USE, True), (READ + WRITE + WAY.format(WAIT_SCALAR) + USE, True),
)
PUT, FETCH, BARRIER = "\tds_write_b64 v1, v[2:3]\n", "\tds_read_b64 v[4:5], v1\n", "\ts_barrier\n"
# A sequence for gfx942, and whether a write is under way at its barrier.
UNDER_WAY = (
    (PUT + BARRIER, True), (PUT + "\ts_waitcnt lgkmcnt(0)\n" + BARRIER, False), (PUT + "\ts_waitcnt vmcnt(0)\n" + BARRIER, True),
    (FETCH + BARRIER, False), (PUT + FETCH + "\ts_waitcnt lgkmcnt(1)\n" + BARRIER, False),
    (FETCH + PUT + "\ts_waitcnt lgkmcnt(1)\n" + BARRIER, True), (PUT + "\tds_bpermute_b32 v4, v1, v2\n" + BARRIER, True),
    (PUT + "\ts_waitcnt vmcnt(0) lgkmcnt(0)\n" + BARRIER, False), ("\tds_add_f32 v1, v2\n" + BARRIER, True),
    (WAY.format(PUT) + BARRIER, True), (WAY.format(PUT + "\ts_waitcnt lgkmcnt(0)\n") + BARRIER, False),
    (PUT + WAY.format("\ts_waitcnt lgkmcnt(0)\n") + BARRIER, True), (LOOP.format(BARRIER + PUT), True),
    (LOOP.format(BARRIER + PUT + "\ts_waitcnt lgkmcnt(0)\n"), False),
    ("\tds_store_b64 v1, v[2:3]\n\ts_barrier_signal -1\n", True),
    ("\tds_store_b64 v1, v[2:3]\n\ts_wait_dscnt 0x0\n\ts_barrier_signal -1\n", False),
    ("\tds_store_b64 v1, v[2:3]\n\ts_wait_loadcnt_dscnt 0x300\n\ts_barrier_signal -1\n", False),
    ("\tds_store_b64 v1, v[2:3]\n\ts_wait_loadcnt_dscnt 0x3\n\ts_barrier_signal -1\n", True),
)

LONG = "\tv_mfma_f32_32x32x64_f8f6f4 v[0:15], v[16:23], v[24:31], {}\n"
SHORT = "\tv_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], v[0:3]\n"
DEEP = "\tv_mfma_f32_16x16x32_bf16 v[0:3], v[4:7], v[8:11], v[0:3]\n"
PASS, ADD = "\ts_mov_b32 s0, 0\n", "\tv_add_f32_e32 v40, v3, v3\n"
# An arch, a sequence, and whether a result in it may be used too early.
RESULTS = (
    ("gfx950", LONG.format("0") + 19 * PASS + ADD, True), ("gfx950", LONG.format("0") + 20 * PASS + ADD, False),
    ("gfx950", LONG.format("0") + "\ts_nop 7\n\ts_nop 7\n" + 3 * PASS + ADD, True),
    ("gfx950", LONG.format("0") + "\ts_nop 7\n\ts_nop 7\n\ts_nop 3\n" + ADD, False),
    ("gfx950", LONG.format("0") + 19 * PASS + "\tv_mov_b32_e32 v7, 0\n", True),
    ("gfx950", LONG.format("0") + "\tv_mov_b32_e32 v16, 0\n", False),
    ("gfx950", LONG.format("0") + 19 * PASS + "\tds_write_b64 v40, v[0:1]\n", True),
    ("gfx950", LONG.format("0") + "\tds_read_b64 v[50:51], v40\n", False),
    ("gfx950", LONG.format("0") + "\tds_read_b64 v[50:51], v4\n", True), ("gfx950", 2 * LONG.format("v[0:15]"), False),
    ("gfx950", DEEP + SHORT, True), ("gfx950", DEEP + 6 * PASS + SHORT, False), ("gfx950", DEEP + 5 * PASS + SHORT, True),
    ("gfx950", 2 * DEEP, False), ("gfx950", SHORT + 7 * PASS + ADD, True), ("gfx950", SHORT + 8 * PASS + ADD, False),
    ("gfx942", SHORT + 7 * PASS + ADD, False), ("gfx942", SHORT + 6 * PASS + ADD, True), ("gfx942", 2 * SHORT, False),
    ("gfx90a", SHORT + 10 * PASS + ADD, True), ("gfx90a", SHORT + 11 * PASS + ADD, False),
    ("gfx942", SHORT + SHORT.replace("v[4:5]", "v[2:3]"), True),  # its operand A
    ("gfx942", SHORT + 4 * PASS + SHORT.replace("v[0:3]", "v[2:5]").replace("v[4:5]", "v[8:9]"), True),  # a part
    ("gfx942", SHORT + 5 * PASS + SHORT.replace("v[0:3]", "v[2:5]").replace("v[4:5]", "v[8:9]"), False),
    ("gfx942", SHORT.replace("v[0:3]", "a[0:3]") + ADD, False), ("gfx942", "\tv_mov_b32_e32 v0, 0\n" + ADD, False),
    ("gfx942", LOOP.format(ADD + SHORT), True), ("gfx942", LOOP.format(ADD + SHORT + "\ts_nop 7\n"), False),
    ("gfx942", SHORT + WAY.format("\ts_nop 7\n") + ADD, True), ("gfx1201", SHORT + ADD, False),
)


def check_checkers():
    """Made-up sequences that are judged wrongly."""
    wrong = [f"scalar_reads() {'does not find' if bad else 'finds'} a fault in {text!r}"
             for text, bad in EARLY if bool(scalar_reads("gfx1201", text)) != bad]
    wrong += ["scalar_reads() speaks of gfx1100"] if scalar_reads("gfx1100", EARLY[0][0]) else []
    wrong += [f"matrix_results({arch}) {'does not find' if bad else 'finds'} a fault in {text!r}"
              for arch, text, bad in RESULTS if bool(matrix_results(arch, text)) != bad]
    return wrong + [f"lds_at_barriers() {'does not find' if bad else 'finds'} a fault in {text!r}"
                    for text, bad in UNDER_WAY if bool(lds_at_barriers(text)) != bad]
