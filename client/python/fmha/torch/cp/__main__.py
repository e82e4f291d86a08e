# SPDX-License-Identifier: MIT
"""python -m fmha.torch.cp plan: which schedule, by how many ranks, from measured times. measure: those times, of this machine."""
from __future__ import annotations

import argparse
import sys

from . import measure, model


def _count(text: str) -> int:
    return int(float(text))


def _plan(o) -> int:
    machine = model.Machine.read(o.machine) if o.machine else model.H200
    if o.ranks % o.hosts:
        sys.exit(f"plan: {o.ranks} ranks are no multiple of {o.hosts} hosts")
    import dataclasses

    machine = dataclasses.replace(machine, ranks_a_host=o.ranks // o.hosts)
    job = model.Job(o.seqlen, o.heads, o.kv_heads, o.hdim, o.batch, not o.full, o.document, o.element)
    one = model.choices(dataclasses.replace(machine, ranks_a_host=1), job, 1)[0]
    found = model.choices(machine, job, o.ranks, o.cp_comm_type)
    if not found:
        sys.exit("plan: no schedule has this many ranks: heads, KV heads and ranks have to divide each other for a2a")
    print(f"{machine.name}{'' if o.machine else ' (--machine: your own)'}")
    print(f"{o.ranks} ranks on {o.hosts} hosts, {o.seqlen} rows{f' in documents of {o.document}' if o.document else ''}, {o.heads} heads on "
          f"{o.kv_heads}, hdim {o.hdim}; one rank would take {one.total:.3g} s")
    print(f"{'cp_comm_type':16}{'a2a ranks':>10}{'chunks':>8}{'forward ms':>12}{'backward ms':>13}{'TFLOP/s':>9}{'of one':>8}{'GiB more':>10}")
    for c in found[: o.lines]:
        print(f"{c.kind:16}{c.inner:>10}{c.chunks:>8}{c.forward * 1e3:>12.2f}{c.backward * 1e3:>13.2f}{c.rate(job, o.ranks):>9.0f}"
              f"{one.total / o.ranks / c.total:>8.2f}{c.memory / 2**30:>10.2f}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fmha.torch.cp", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser("plan", help="estimate all schedules, the fastest first")
    plan.add_argument("--ranks", type=_count, required=True)
    plan.add_argument("--hosts", type=_count, default=1)
    plan.add_argument("--seqlen", type=_count, required=True, help="rows of all ranks, as in 1e6")
    plan.add_argument("--document", type=_count, default=0, help="length of packed documents; 0: one sequence")
    plan.add_argument("--batch", type=_count, default=1)
    plan.add_argument("--heads", type=_count, default=64)
    plan.add_argument("--kv-heads", type=_count, default=8)
    plan.add_argument("--hdim", type=_count, default=128)
    plan.add_argument("--element", type=_count, default=2, help="bytes: 2 of bfloat16")
    plan.add_argument("--full", action="store_true", help="no causal mask")
    plan.add_argument("--cp-comm-type", action="append", help="only this one; may be repeated")
    plan.add_argument("--machine", help="what `measure` wrote; else an H200's")
    plan.add_argument("--lines", type=_count, default=8)
    times = commands.add_parser("measure", help="under torchrun, with at least two ranks: latency, bandwidth and kernel times")
    times.add_argument("--out", required=True)
    times.add_argument("--far", nargs=2, type=float, metavar=("ALPHA", "BETA"), help="between hosts; else as within this one")
    times.add_argument("--name", default="this machine")
    times.add_argument("--most", type=_count, default=0, help="rows of the longest kernel; 0: 16384 on a GPU, 1024 on a CPU")
    o = parser.parse_args()
    return _plan(o) if o.command == "plan" else measure.main(o)


if __name__ == "__main__":
    sys.exit(main())
