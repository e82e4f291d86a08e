# SPDX-License-Identifier: MIT
"""Matrix instructions of AMD's, by their names."""
import re

MATRIX = re.compile(r"v_(?:mfma|wmma)(?:_scale)?_f32_(\d+)x(\d+)x(\d+)_?(\w*)")
# Multiply-adds of 16-bit types a clock and SIMD. f8f6f4 is taken to have an operand of 8 bits: it is twice as fast without.
RATE = {"gfx90a": 128, "gfx942": 256, "gfx950": 256, "gfx1100": 128, "gfx1201": 256}


def is_cdna(arch):
    return arch.startswith("gfx9")


def matrix_cycles(arch, shape):
    m, n, k, kind = int(shape[1]), int(shape[2]), int(shape[3]), shape[4]
    eight = kind.startswith(("fp8", "bf8", "f8"))
    rate = RATE[arch] * (2 if eight else 1)
    if arch == "gfx950" and m * k >= (2048 if eight else 512):  # what it brought; others go at gfx942's speed
        rate *= 2
    return m * n * k / rate / (4 if is_cdna(arch) else 1)
