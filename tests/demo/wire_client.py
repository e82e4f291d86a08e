# SPDX-License-Identifier: MIT
"""The demo's Python client: speaks the protocol with the stock msgpack package.

    wire_client.py Q.npy K.npy V.npy OUT.npy SECONDS

Runs for so long, and prints one JSON line for demo.py, with the end and the time of each run.
"""
import json
import pathlib
import sys
import time

import numpy

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "lib"))
import fmha_wire


def main():
    q, k, v = (numpy.load(path) for path in sys.argv[1:4])
    dtype = {"float32": "f32", "uint16": "bf16"}[q.dtype.name]
    runs = []
    with fmha_wire.Client.connect() as client, client.open_device(0) as device:
        until = time.monotonic_ns() + float(sys.argv[5]) * 1e9
        while not runs or runs[-1]["end_ns"] < until:
            o = device.forward(q, k, v, dtype=dtype)
            runs.append({"end_ns": time.monotonic_ns(), "kernel_ms": device.last_run["kernel_ns"] / 1e6})
        numpy.save(sys.argv[4], o)
        plan = device.last_plan
    print(json.dumps({"kernel": plan["stages"][0]["kernel"], "flops": plan["flops"], "runs": runs}))


if __name__ == "__main__":
    main()
