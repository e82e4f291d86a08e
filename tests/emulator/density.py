# SPDX-License-Identifier: MIT
"""What the main loops of the AMD kernels cost by the cycle, counted in the assembly. No GPU, no emulator.

    python3 tests/emulator/density.py [--update] [--arch gfx942] [--match REGEX] [--jobs N]

One line a loop and kernel: issue cycles a score that a lane owns, of the matrix, vector, scalar, LDS and memory pipes;
density, the matrix cycles divided by those of the busiest pipe, so what is left of the matrix units' speed when the
waves of a compute unit overlap perfectly; cycles of one wave by itself as llvm-mca has them, where it is installed
(LDS and memory arrive at once there); registers, waves a SIMD, bytes fetched from memory divided by the least
possible; flight, the KiB that the waves of a compute unit have under way, by wide loads, whenever one comes to wait for
what it has asked for since the last time. The way round a loop is the cheapest one with all its matrix instructions: no
mask where a branch goes round it. It is compared with tests/emulator/density.csv: what is worse by more than 3 % than
its line there fails, and so does a kernel without a line. --update writes the lines of what was counted. These are some
of the loops, in bf16 and e4m3; sweep.py has all of a profile.

Not counted: waits, clocks, caches, and bank conflicts, which banks.py counts. The speed of AMD GPUs is unmeasured.

An issue cycle is what a plain vector instruction takes: 4 clocks for the 64 lanes of CDNA, 1 for the 32 of RDNA, where
matrix instructions go through the vector pipe and so add to it. Transcendentals and 32-bit multiplications take 4.
LDS moves 128 bytes a clock and the first cache 64 (RDNA 128), for the SIMDs of a compute unit together: an access
takes that share of a SIMD's time which it would if all SIMDs did the same.
"""
import argparse
import collections
import concurrent.futures
import csv
import os
import re
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(HERE, "..", "gpu"), os.path.join(HERE, "..", "lib")]

import abi  # noqa: E402
import assembly  # noqa: E402
import clangs  # noqa: E402
import progress  # noqa: E402
import spill_check  # noqa: E402
import suite  # noqa: E402
from matrix import MATRIX, is_cdna, matrix_cycles  # noqa: E402

TABLE = os.path.join(HERE, "density.csv")
ARCHS = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
MCA = os.environ.get("FMHA_MCA", "llvm-mca-19")
SLACK = 1.03
PIPES = ("matrix", "vector", "scalar", "lds", "memory")
COLUMNS = ("kernel", "loop", *PIPES, "density", "mca", "registers", "waves", "spills", "fetched", "flight")
INNER = 16  # how often a loop inside the main loop is taken to run

# What the short table holds: family, pipeline (of tiles: the arch's), head dims, tile, waves, features.
STAGED = {
    "gfx9": ("fwd decode_h64x64_t16x128_w1x4_b2_pack", "fwd_splitkv decode_h128x128_t16x128_w1x4_b2_pack_split_paged",
             "fwd_splitkv decode_h256x256_t16x64_w1x4_b2_pack_split_paged",
             "fwd_splitkv decode_h96x96_t16x128_w1x4_b2_pack_split_paged",
             "fwd_splitkv decode_h128x128_t32x128_w1x4_b2_pack_split_mask_paged",
             "fwd_splitkv decode_h128x128_t64x64_w1x4_b2_pack_split_mask_paged",
             "fwd_pagedkv h128x128_t256x64_w8x1_b1_mask_paged", "fwd_pagedkv h64x64_t128x64_w4x1_b2_mask_paged",
             "fwd h64x64_t256x128_w8x1_b1", "fwd h64x64_t128x64_w4x1_b2_mask", "fwd h128x128_t256x64_w8x1_b1",
             "fwd h128x128_t256x64_w8x1_b1_mask", "bwd_dq_dk_dv h64x64_t32x128_w4x1_b2_mask_buffers",
             "bwd_dq_dk_dv h128x128_t32x128_w4x1_b1_buffers", "bwd_dq_dk_dv h128x128_t32x128_w4x1_b1_mask_buffers",
             "bwd_dq_dk_dv h128x128_t32x128_w4x1_b1_mask_bias_logits_buffers"),
    "gfx11": ("fwd decode_h64x64_t16x64_w1x4_b2_pack", "fwd_splitkv decode_h128x128_t16x64_w1x4_b2_pack_split_paged",
              "fwd_splitkv decode_h256x256_t16x64_w1x4_b2_pack_split_paged",
              "fwd_splitkv decode_h192x128_t16x64_w1x4_b2_pack_split_paged",
              "fwd_splitkv decode_h96x96_t16x64_w1x4_b2_pack_split_paged",
              "fwd_splitkv decode_h128x128_t32x64_w1x4_b2_pack_split_mask_paged",
              "fwd_splitkv decode_h64x64_t64x64_w1x4_b2_pack_split_mask_paged", "fwd_splitkv h64x64_t128x64_w8x1_b1_split_mask",
              "fwd_pagedkv h128x128_t128x32_w8x1_b1_mask_paged", "fwd_pagedkv h64x64_t128x64_w8x1_b1_mask_paged",
              "fwd h64x64_t128x64_w8x1_b1", "fwd h64x64_t128x64_w8x1_b1_mask", "fwd h128x128_t128x32_w8x1_b1",
              "fwd h128x128_t128x32_w8x1_b1_mask", "bwd_dq_dk_dv h64x64_t32x128_w8x1_b1_mask_buffers",
              "bwd_dq_dk_dv h128x128_t16x64_w4x1_b1_buffers", "bwd_dq_dk_dv h128x128_t16x64_w4x1_b1_mask_buffers",
              "bwd_dq_dk_dv h128x128_t16x64_w4x1_b1_mask_bias_logits_buffers"),
    "gfx12": ("fwd decode_h64x64_t16x64_w1x4_b2_pack", "fwd_splitkv decode_h128x128_t16x64_w1x4_b2_pack_split_paged",
              "fwd_splitkv decode_h256x256_t16x64_w1x4_b2_pack_split_paged",
              "fwd_splitkv decode_h192x128_t16x64_w1x4_b2_pack_split_paged",
              "fwd_splitkv decode_h96x96_t16x64_w1x4_b2_pack_split_paged",
              "fwd_splitkv decode_h128x128_t32x64_w1x4_b2_pack_split_mask_paged",
              "fwd_splitkv decode_h64x64_t64x64_w1x4_b2_pack_split_mask_paged", "fwd_splitkv h64x64_t128x64_w8x1_b1_split_mask",
              "fwd_pagedkv h128x128_t256x64_w16x1_b2_mask_paged", "fwd_pagedkv h64x64_t256x128_w16x1_b2_mask_paged",
              "fwd h64x64_t256x128_w16x1_b2", "fwd h64x64_t256x128_w16x1_b2_mask", "fwd h128x128_t256x64_w16x1_b2",
              "fwd h128x128_t256x64_w16x1_b2_mask", "fwd h128x128_t128x32_w8x1_b1_mask",
              "bwd_dq_dk_dv h64x64_t32x128_w8x1_b1_mask_buffers",
              "bwd_dq_dk_dv h128x128_t16x128_w8x1_b1_buffers", "bwd_dq_dk_dv h128x128_t16x128_w8x1_b1_mask_buffers",
              "bwd_dq_dk_dv h128x128_t16x128_w8x1_b1_mask_bias_logits_buffers"),
}
STAGED_BYTES = {  # the same of e4m3, where matrix units multiply it
    "gfx9": ("fwd decode_h64x64_t16x128_w1x4_b2_pack", "fwd_splitkv decode_h128x128_t16x128_w1x4_b2_pack_split_mask_paged_descale",
             "fwd h64x64_t256x128_w8x1_b1", "fwd h64x64_t128x64_w4x1_b2_mask_descale", "fwd h128x128_t256x64_w8x1_b1",
             "fwd h128x128_t256x64_w8x1_b1_mask_descale", "fwd h256x256_t128x64_w4x1_b1_mask",
             "fwd_pagedkv h128x128_t256x64_w8x1_b1_mask_paged_descale"),
    "gfx12": ("fwd decode_h64x64_t16x128_w1x4_b2_pack", "fwd_splitkv decode_h128x128_t16x128_w1x4_b2_pack_split_mask_paged_descale",
              "fwd h64x64_t256x128_w16x1_b1", "fwd h64x64_t128x64_w8x1_b1_mask_descale", "fwd h128x128_t256x64_w16x1_b1",
              "fwd h128x128_t128x64_w8x1_b1_mask_descale", "fwd h256x256_t128x32_w8x1_b1_mask",
              "fwd_pagedkv h128x128_t256x64_w16x1_b1_mask_paged_descale"),
}
TILES = {
    "mfma": ("fwd_splitkv {}_pack_h128x128_t16x64_w1x4_b1_pack_split_paged",
             "bwd_dq_dk_dv {}_h128x128_t16x64_w4x1_b1_drop_buffers"),
    "wmma": ("fwd_splitkv {}_pack_h128x128_t16x32_w1x2_b1_pack_split_paged",
             "bwd_dq_dk_dv {}_h128x128_t16x64_w4x1_b1_mask_buffers"),
}

# What the ISA manuals say of some, in issue cycles.
KNOWN = (("gfx90a", "v_mfma_f32_32x32x8_bf16_1k", 16), ("gfx942", "v_mfma_f32_16x16x16_bf16", 4),
         ("gfx942", "v_mfma_f32_32x32x16_fp8_fp8", 8), ("gfx942", "v_mfma_f32_16x16x32_bf8_fp8", 4),
         ("gfx950", "v_mfma_f32_32x32x8_f16", 8), ("gfx950", "v_mfma_f32_32x32x16_bf16", 8),
         ("gfx950", "v_mfma_f32_16x16x32_f16", 4), ("gfx950", "v_mfma_f32_32x32x16_fp8_fp8", 8),
         ("gfx950", "v_mfma_f32_16x16x32_fp8_fp8", 4), ("gfx950", "v_mfma_f32_32x32x64_f8f6f4", 16),
         ("gfx950", "v_mfma_scale_f32_16x16x128_f8f6f4", 8), ("gfx1100", "v_wmma_f32_16x16x16_bf16", 32),
         ("gfx1201", "v_wmma_f32_16x16x16_f16", 16), ("gfx1201", "v_wmma_f32_16x16x16_fp8_bf8", 8))
TRANSCENDENTAL = re.compile(r"v_(?:exp|log|rcp|rsq|sqrt|sin|cos)_|v_mul_(?:lo|hi)_[iu]32|v_mad_(?:co_)?[iu]64_[iu]32")
NOT_ISSUED = ("s_waitcnt", "s_wait_", "s_nop", "s_barrier", "s_delay_alu", "s_setprio", "s_clause", "s_code_end")
MEMORY = ("buffer_", "global_", "flat_", "scratch_")
VMCNT = re.compile(r"s_waitcnt .*vmcnt\((\d+)\)|s_wait_loadcnt(_dscnt)? (\w+)")
BRANCH = re.compile(r"s_c?branch\w*$")


def bytes_of(name):
    """That a lane moves."""
    sizes = {"ubyte": 1, "u8": 1, "i8": 1, "byte": 1, "ushort": 2, "short": 2, "u16": 2, "b16": 2, "d16": 2}
    found = re.search(r"(?:dwordx?(\d*)|[bu](32|64|96|128))(?:_|$)", name)
    pair = 2 if re.match(r"ds_(?:read|load|write|store)2", name) else 1
    if found:
        return pair * (int(found[2]) // 8 if found[2] else 4 * int(found[1] or 1))
    return next((size for word, size in sizes.items() if word in name), 4)


def cost(arch, name):
    """(pipe, issue cycles) of an instruction; None for what only waits."""
    shape = MATRIX.match(name)
    lanes, simds, clocks = (64, 4, 4) if is_cdna(arch) else (32, 2, 1)
    if shape:
        return "matrix", matrix_cycles(arch, shape)
    if name.startswith("v_"):
        return "vector", 4 if TRANSCENDENTAL.match(name) else 1
    if name.startswith("ds_"):
        return "lds", max(1, bytes_of(name) * lanes * simds / 128 / clocks)
    if name.startswith(MEMORY):
        rate = 64 if is_cdna(arch) else 128
        return "memory", max(1, bytes_of(name) * lanes * simds / rate / clocks)
    return None if name.startswith(NOT_ISSUED) else ("scalar", 1)


class Block:
    def __init__(self, label):
        self.label, self.code, self.next, self.pipes = label, [], [], collections.Counter()
        self.fetched = 0  # bytes that a lane fetches, 16 at a time or 8

    def count(self, arch):
        for name, _ in self.code:
            found = cost(arch, name)
            if found:
                self.pipes[found[0]] += found[1]
            if name.startswith(("buffer_load", "global_load", "flat_load")) and bytes_of(name) >= 8:
                self.fetched += bytes_of(name)


def blocks_of(arch, text):
    """The first function's basic blocks, and who may follow whom. That no lane is left is taken never to happen."""
    blocks = [Block("")]
    for line in text.split("\t.section\t.rodata")[0].splitlines():
        code = line.split(";")[0].rstrip()
        label = re.match(r"(\.LBB\w+):", code)
        found = re.match(r"\t([a-z]\w+)\s*(.*)", code)
        if label:
            blocks.append(Block(label[1]))
        elif found:
            blocks[-1].code.append(found.groups())
            if BRANCH.match(found[1]) or found[1] == "s_endpgm":
                blocks.append(Block(""))
    at = {block.label: i for i, block in enumerate(blocks) if block.label}
    for i, block in enumerate(blocks):
        block.count(arch)
        name, target = block.code[-1] if block.code else ("", "")
        if BRANCH.match(name) and name != "s_cbranch_execz":
            block.next.append(at[target])
        leaves = name in ("s_branch", "s_endpgm") or (name == "s_cbranch_execnz" and at[target] > i)
        if not leaves and i + 1 < len(blocks):
            block.next.append(i + 1)
    return blocks


def dominators(blocks):
    """Of each block that can be reached: those that every way from the first one passes."""
    before = collections.defaultdict(list)
    order, seen, stack = [], {0}, [(0, iter(blocks[0].next))]
    while stack:
        at, rest = stack[-1]
        following = next((n for n in rest if n not in seen), None)
        if following is None:
            order.append(at)
            stack.pop()
        else:
            seen.add(following)
            stack.append((following, iter(blocks[following].next)))
    order.reverse()
    for i in order:
        for n in blocks[i].next:
            before[n].append(i)
    found = {i: set(order) for i in order}
    found[0] = {0}
    changed = True
    while changed:
        changed = False
        for i in order[1:]:
            new = set.intersection(*(found[p] for p in before[i])) | {i}
            changed |= new != found[i]
            found[i] = new
    return found, before, order


def loops_of(blocks):
    """{header: the blocks of its loop}, and the dominators."""
    dominate, before, order = dominators(blocks)
    loops = collections.defaultdict(set)
    for i in order:
        for head in blocks[i].next:
            if head in dominate[i]:
                body, stack = {head}, [i]
                while stack:
                    n = stack.pop()
                    if n not in body:
                        body.add(n)
                        stack += before[n]
                loops[head] |= body
    return loops, dominate, order


def way_round(blocks, loops, dominate, order, head):
    """Of a loop: the blocks of the way round that has the most matrix instructions, fetches the most by wide loads, and
    is the cheapest of those; with each, how often it runs in one round."""
    body, best = loops[head], {}
    inside = [loops[h] for h in loops if h != head and h in body]
    often = {i: INNER if any(i in inner for inner in inside) else 1 for i in body}
    for i in (i for i in reversed(order) if i in body):
        block, after = blocks[i], [((0, 0, 0), [])] if head in blocks[i].next else []
        after += [best[n] for n in block.next if n in best and n != head and n not in dominate[i]]
        if not after:
            continue  # it only leads back into a loop inside
        mine = (-block.pipes["matrix"], -block.fetched if often[i] == 1 else 0, often[i] * sum(block.pipes.values()))
        rank, way = min(after)
        best[i] = (tuple(x + y for x, y in zip(mine, rank)), [i, *way])
    return [(blocks[i], often[i]) for i in best[head][1]]


def main_loops(arch, text, blocks=None):
    """The innermost loops with matrix instructions. @blocks: of the text."""
    blocks = blocks or blocks_of(arch, text)
    loops, dominate, order = loops_of(blocks)
    matrix = {head for head, body in loops.items() if any(blocks[i].pipes["matrix"] for i in body)}
    return [way_round(blocks, loops, dominate, order, head) for head in sorted(matrix)
            if not any(other != head and other in loops[head] for other in matrix)]


def in_flight(way):
    """Bytes that a lane has under way by wide loads where it begins to wait, at the least; loads come back in order."""
    queue, least, asked = [], None, False
    for name, operands in 3 * [line for block, often in way for line in block.code * (often == 1)]:
        if name.startswith(MEMORY):
            if "load" in name:
                queue.append(bytes_of(name) if bytes_of(name) >= 8 else 0)
                asked = True
            continue
        found = VMCNT.match(f"{name} {operands}")
        left = int(found[1] or found[3], 0) >> (8 if found[2] else 0) if found else len(queue)
        if left < len(queue):
            if asked:
                least = sum(queue) if least is None else min(least, sum(queue))
            queue, asked = queue[len(queue) - left:], False
    return least or 0


def mca_cycles(arch, way):
    """Of one wave by itself; 0 without llvm-mca, or where it does not know an instruction."""
    kept = [f"{name} {operands}" for block, often in way for name, operands in block.code * (often == 1)
            if not name.startswith((*NOT_ISSUED, "buffer_", "global_", "flat_", "s_cbranch", "s_branch"))]
    done = subprocess.run([MCA, "-mtriple=amdgcn-amd-amdhsa", f"-mcpu={arch}", "-iterations=8"],
                          input="\n".join(kept), capture_output=True, text=True, check=False)
    found = re.search(r"Total Cycles:\s+(\d+)", done.stdout)
    return int(found[1]) / 8 if found and not done.returncode else 0


def waves_of(arch, registers, lds_bytes, waves):
    """A SIMD's, as registers and LDS allow: of whole blocks."""
    total, step, most, lds = (512, 8, 8, 65536) if is_cdna(arch) else (1536, 24, 16, 131072)
    if arch == "gfx950":
        lds = 163840
    most = min(total // -(-registers // step) // step, most)
    blocks = min(lds // max(lds_bytes, 1), most * 4 // waves)
    return max(blocks, 1) * waves // 4 or 1


class Job:
    def __init__(self, arch, name, kernel):
        self.arch, self.name, self.lds_bytes = arch, name, kernel.lds_bytes
        self.source, self.options = kernel.source.decode(), abi.kernel_options(kernel)
        tile, self.threads = kernel.tile, kernel.block[0]
        self.scores = tile.tile_m * tile.tile_n / self.threads
        backward = kernel.family == abi.BWD_DQ_DK_DV
        streamed = (tile.tile_m if backward else tile.tile_n) * (tile.hdim_q + tile.hdim_v)
        self.least = streamed * (1 if "_e4m3_" in name else 2)


def measure(job):
    """A row for each main loop."""
    return rows_of(job, assembly.assemble(job.arch, job.source, job.options))


def notices(job):
    """Whether a loop that takes every exponential twice is found worse."""
    text = assembly.assemble(job.arch, job.source, job.options)
    twice = re.sub(r"^(\tv_exp_f32.*\n)", r"\1\1", text, flags=re.M)
    return all(worse(old, new) for old, new in zip(rows_of(job, text), rows_of(job, twice)))


def busiest(arch, pipes):
    """The cycles of the pipe that has the most to do."""
    together = pipes["matrix"] + (0 if is_cdna(arch) else pipes["vector"])
    return max(together, pipes["vector"], pipes["lds"], pipes["memory"])


def rows_of(job, text, mca=True):
    rows = []
    number = {key: int(value) for key, value in re.findall(r"\.(\w+):\s+(\d+)$", text, re.M)}
    wave = 64 if is_cdna(job.arch) else 32
    for loop, way in enumerate(main_loops(job.arch, text)):
        pipes = {pipe: sum(block.pipes[pipe] * often for block, often in way) for pipe in PIPES}
        waves = waves_of(job.arch, number["vgpr_count"], job.lds_bytes, job.threads // wave)
        row = dict(kernel=job.name, loop=loop, density=f"{pipes['matrix'] / busiest(job.arch, pipes):.3f}",
                   mca=f"{mca_cycles(job.arch, way) / job.scores:.1f}" if mca else "",
                   registers=number["vgpr_count"],
                   waves=waves,
                   flight=f"{in_flight(way) * wave * waves * (4 if is_cdna(job.arch) else 2) / 1024:.0f}",
                   spills=number["vgpr_spill_count"],
                   fetched=f"{sum(b.fetched for b, often in way if often == 1) * job.threads / job.least:.2f}")
        row |= {pipe: f"{cycles / job.scores:.2f}" for pipe, cycles in pipes.items()}
        rows.append({column: str(row[column]) for column in COLUMNS})
    return rows


def short_names(arch):
    core = "mfma" if is_cdna(arch) else "wmma"
    for dtype, table in (("bf16", STAGED), ("e4m3", STAGED_BYTES if arch in suite.MULTIPLY_BYTES else {})):
        for prefix, tiles in table.items():
            if arch.startswith(prefix):
                yield from (f"fmha_{family}_{dtype}_{arch}_gpu_amd_{tile}" for family, tile in map(str.split, tiles))
    for family, rest in map(str.split, TILES[core]):
        yield f"fmha_{family}_bf16_{arch}_" + rest.format("gpu_" + core)


def jobs_of(lib, options, archs):
    jobs = []
    for arch in archs:
        for name in short_names(arch):
            if re.search(options.match, name):
                kernel = spill_check.kernel_of(lib, name)
                assert kernel is not None, f"no problem makes {name}"
                jobs.append(Job(arch, name, kernel))
    return jobs


def worse(old, new):
    """Sentences about what became worse."""
    said = []
    for column, sign in (("density", -1), ("vector", 1), ("lds", 1), ("memory", 1), ("fetched", 1), ("waves", -1),
                         ("spills", 1), ("flight", -1)):
        a, b = float(old[column]), float(new[column])
        if (b > a * SLACK if sign > 0 else b * SLACK < a):
            said.append(f"{column} {old[column]} -> {new[column]}")
    return said


def read_table():
    with open(TABLE, encoding="ascii", newline="") as f:
        return {(row["kernel"], row["loop"]): row for row in csv.DictReader(f)}


def write_table(table, found, counted):
    """What was @found, and of kernels that were not @counted what the @table had."""
    place = {name: n for n, name in enumerate(name for arch in ARCHS for name in short_names(arch))}
    rows = found | {key: row for key, row in table.items() if key[0] in place and key[0] not in counted}
    with open(TABLE, "w", encoding="ascii", newline="") as f:
        writer = csv.DictWriter(f, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[key] for key in sorted(rows, key=lambda key: (place[key[0]], key[1])))


def show(row):
    numbers = " ".join(f"{pipe} {row[pipe]}" for pipe in PIPES)
    print(f"{row['kernel']} loop {row['loop']}: {numbers} density {row['density']} mca {row['mca']} registers "
          f"{row['registers']} waves {row['waves']} spills {row['spills']} fetched {row['fetched']} flight {row['flight']}",
          flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--update", action="store_true", help="write the table")
    parser.add_argument("--arch", action="append")
    parser.add_argument("--match", default="", help="a regular expression")
    parser.add_argument("--verbose", action="store_true", help="show loops that are as they were, too")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    archs = clangs.known(options.arch or ARCHS, "density")
    if not archs:
        return 77
    jobs, table, found, failed = jobs_of(abi.load_library(), options, archs), read_table(), {}, 0
    for arch, name, cycles in KNOWN:
        if cost(arch, name) != ("matrix", cycles):
            print(f"FAIL {arch} {name}: {cost(arch, name)}, not {cycles} cycles")
            failed += 1
    if jobs and not notices(jobs[0]):
        print(f"FAIL {jobs[0].name}: twice the exponentials are not found worse")
        failed += 1
    with concurrent.futures.ProcessPoolExecutor(options.jobs) as pool:
        for job, rows in progress.told(zip(jobs, pool.map(measure, jobs)), len(jobs), "density"):
            if not rows:
                print(f"FAIL {job.name}: no loop has matrix instructions")
                failed += 1
            for row in rows:
                key = (row["kernel"], row["loop"])
                found[key] = row
                said = [] if options.update else worse(table[key], row) if key in table else ["no line in density.csv"]
                failed += bool(said)
                if options.verbose or said:
                    show(row)
                for sentence in said:
                    print(f"FAIL {job.name} loop {row['loop']}: {sentence}", flush=True)
    if options.update:
        write_table(table, found, {job.name for job in jobs})
    print(f"density: {len(found)} loops of {len(jobs)} kernels, {failed} worse than their lines")
    return 1 if failed or not jobs else 0


if __name__ == "__main__":
    sys.exit(main())
