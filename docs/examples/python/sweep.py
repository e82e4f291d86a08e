# SPDX-License-Identifier: MIT
"""One size at a time: rows, batch, heads and head dim, as CSV. `fmhactl bench` does this with more care."""
import csv
import sys
import time

import numpy as np

import fmha

fmha.start()
base = dict(batch=1, rows=128, heads=4, hdim=64)
sweeps = {"rows": (64, 128, 256), "batch": (1, 2, 4), "heads": (1, 4, 8), "hdim": (32, 64, 128)}
out = csv.writer(sys.stdout)
out.writerow(["swept", *base, "ms", "gflops"])
for swept, values in sweeps.items():
    for value in values:
        p = {**base, swept: value}
        q, k, v, o = (fmha.empty((p["batch"], p["rows"], p["heads"], p["hdim"]), np.float32) for _ in range(4))
        for x in (q, k, v):
            x[...] = 1
        times = []
        for _ in range(5):
            start = time.perf_counter()
            fmha.attention(q, k, v, out=o)
            times.append(time.perf_counter() - start)
        seconds = sorted(times)[2]
        gflops = 4e-9 * p["batch"] * p["heads"] * p["rows"] ** 2 * p["hdim"] / seconds
        out.writerow([swept, *p.values(), f"{1e3 * seconds:.3f}", f"{gflops:.2f}"])
        assert (o == 1).all()
