# SPDX-License-Identifier: MIT
"""Which kernel runs, of how many and why, without a device: the plan of a problem on an arch, as JSON."""
import json
import os
import shutil
import subprocess
import sys

fmhactl = shutil.which("fmhactl", path=os.environ.get("FMHA_BIN")) or shutil.which("fmhactl")
if not fmhactl:
    print("needs fmhactl, on PATH or in FMHA_BIN")
    sys.exit(77)


def plan(arch, **problem):
    words = [word for name, value in problem.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    done = subprocess.run([fmhactl, "plan", "--arch", arch, "--json", *words], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


for arch in ("sm_90a", "gfx942", "x86_64_v4"):
    for name, problem in (("prompt", dict(seqlen_q=4096, seqlen_k=4096)), ("decode", dict(seqlen_q=1, seqlen_k=8192))):
        document = plan(arch, batch=1, heads_q=32, heads_k=8, hdim=128, dtype="bf16", **problem)
        kernels = [stage["kernel"] for stage in document["plan"]["stages"]]
        print(f"{arch}, {name}: {len(kernels)} stages: {', '.join(kernels)}")
        assert kernels and all(arch in kernel for kernel in kernels)
