# SPDX-License-Identifier: MIT
"""The demo's Python client: speaks the protocol with the stock msgpack package.

    wire_client.py Q.npy K.npy V.npy OUT.npy RUNS

Prints one JSON line for demo.py.
"""
import json
import pathlib
import sys

import numpy

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "lib"))
import fmha_wire


def main():
    q, k, v = (numpy.load(path) for path in sys.argv[1:4])
    dtype = {"float32": "f32", "uint16": "bf16"}[q.dtype.name]
    best = None
    with fmha_wire.Client.connect() as client, client.open_device(0) as device:
        for _ in range(int(sys.argv[5])):
            o = device.forward(q, k, v, dtype=dtype)
            ms = device.last_run["kernel_ns"] / 1e6
            best = ms if best is None else min(best, ms)
        numpy.save(sys.argv[4], o)
        plan = device.last_plan
    print(json.dumps({"kernel": plan["stages"][0]["kernel"], "ms": best, "flops": plan["flops"]}))


if __name__ == "__main__":
    main()
