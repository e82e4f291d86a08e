# SPDX-License-Identifier: MIT
"""What single instructions do on the emulator: the ones that the kernels lean on and that it gets, or got,
wrong. A wrong kernel is the kernel's fault when all of these hold.

    TINYGRAD=/path/to/tinygrad python3 tests/emulator/instructions.py [--arch gfx942] [--plain]

--plain: without tests/emulator/corrections.py, to see what they are for (on CDNA the emulator then reads
an address that is none, and the process ends).
"""
import argparse
import ctypes
import os
import sys
import tempfile

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "..", "gpu")]

import clangs  # noqa: E402

WORDS = 1024
PRELUDE = """
#define KERNEL extern "C" __attribute__((global, amdgpu_flat_work_group_size(%(wave)d, %(wave)d)))
typedef unsigned u32;
typedef float float4v __attribute__((ext_vector_type(4)));
typedef float float16v __attribute__((ext_vector_type(16)));
typedef float float8v __attribute__((ext_vector_type(8)));
typedef short short4v __attribute__((ext_vector_type(4)));
typedef short short8v __attribute__((ext_vector_type(8)));
typedef short short16v __attribute__((ext_vector_type(16)));
typedef _Float16 half2v __attribute__((ext_vector_type(2)));
typedef _Float16 half4v __attribute__((ext_vector_type(4)));
typedef _Float16 half8v __attribute__((ext_vector_type(8)));
typedef _Float16 half16v __attribute__((ext_vector_type(16)));
typedef __bf16 bf8v __attribute__((ext_vector_type(8)));
typedef u32 word4v __attribute__((ext_vector_type(4)));
typedef u32 word2v __attribute__((ext_vector_type(2)));
typedef int int2v __attribute__((ext_vector_type(2)));
typedef int int8v __attribute__((ext_vector_type(8)));
typedef float float2v __attribute__((ext_vector_type(2)));
struct Args { u32 *in, *out; };
"""

GFX9, GFX11, GFX12 = ("gfx90a", "gfx942", "gfx950"), ("gfx1100",), ("gfx1201",)
ALL = GFX9 + GFX11 + GFX12
TESTS = []


def test(archs, body, inputs=None):
    """Declares a kernel; the function turns its input into the output that the hardware gives."""
    def add(expect):
        TESTS.append((expect.__name__, archs, body, expect, inputs))
        return expect
    return add


def floats(words):
    return words.view(np.float32)


def bf16(words):
    return (words.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def half(words):
    return words.view(np.float16).astype(np.float32)


def product(words, decode, rows=16):
    """C[m][n] = sum over k of A[m][k] B[n][k], matrices row by row in the input."""
    a, b = (decode(words[n:n + 128]).reshape(rows, -1) for n in (0, 128))
    return (a @ b.T).astype(np.float32).reshape(-1).view(np.uint32)


def matrices(dtype):
    """Small integers, and subnormal numbers of half precision in one row."""
    def make(rng):
        x = rng.integers(-8, 9, 1024).astype(np.float32)
        return x.astype(np.float16).view(np.uint32) if dtype == "f16" else (
            (x.view(np.uint32) >> 16).astype(np.uint16).view(np.uint32))
    return make


MFMA = """
	int l = __builtin_amdgcn_workitem_id_x();
	%(type)s a, b;
	float4v c = {};
	for (int i = 0; i < 4; i++) {
		a[i] = ((%(element)s *)args.in)[l %% 16 * 16 + l / 16 * 4 + i];
		b[i] = ((%(element)s *)args.in)[256 + l %% 16 * 16 + l / 16 * 4 + i];
	}
	%(hide)s
	c = %(builtin)s(a, b, c, 0, 0, 0);
	for (int i = 0; i < 4; i++)
		((float *)args.out)[(l / 16 * 4 + i) * 16 + l %% 16] = c[i];
"""


def mfma(element, hide=""):
    names = dict(f16=("half4v", "_Float16", "__builtin_amdgcn_mfma_f32_16x16x16f16"),
                 bf16=("short4v", "short", "__builtin_amdgcn_mfma_f32_16x16x16bf16_1k"))
    return MFMA % dict(zip(("type", "element", "builtin"), names[element]), hide=hide)


@test(GFX9, mfma("f16"))
def mfma_f16(words):
    return product(words, half)


@test(GFX9, mfma("bf16"))
def mfma_bf16(words):
    return product(words, bf16)


@test(GFX9, mfma("bf16", 'asm volatile("" : "+a"(a), "+a"(b));'))
def mfma_operands_in_accumulation_registers(words):
    return product(words, bf16)


@test(GFX9, """
	int l = __builtin_amdgcn_workitem_id_x();
	/* Operands in v200, and in v72, whose upper half it was taken for. */
	register u32 low __asm__("v72") = args.in[l] | 0xffff0000u, high __asm__("v200") = args.in[l] & 0xffff;
	u32 other = args.in[64 + l] & 0xffff;
	unsigned long long smaller;

	__asm__ volatile("v_cmp_lt_u16_e32 vcc, %%1, %%2\\n\\ts_nop 1\\n\\ts_mov_b64 %%0, vcc"
			 : "=s"(smaller) : "v"(other), "v"(high), "v"(low) : "vcc");
	args.out[l] = smaller >> l & 1;
""")
def comparison_of_16_bits_from_register_128_on(words):
    return ((words[64:128] & 0xffff) < (words[:64] & 0xffff)).astype(np.uint32)


MFMA32 = """
	int l = __builtin_amdgcn_workitem_id_x();
	%(type)s a, b;
	float16v c = {};
	for (int i = 0; i < 4; i++) {
		a[i] = ((%(element)s *)args.in)[l %% 32 * 8 + l / 32 * 4 + i];
		b[i] = ((%(element)s *)args.in)[256 + l %% 32 * 8 + l / 32 * 4 + i];
	}
	c = %(builtin)s(a, b, c, 0, 0, 0);
	for (int i = 0; i < 16; i++)
		((float *)args.out)[(i / 4 * 8 + l / 32 * 4 + i %% 4) * 32 + l %% 32] = c[i];
"""


@test(GFX9, MFMA32 % dict(type="half4v", element="_Float16", builtin="__builtin_amdgcn_mfma_f32_32x32x8f16"))
def mfma_32_rows_f16(words):
    return product(words, half, 32)


@test(GFX9, MFMA32 % dict(type="short4v", element="short", builtin="__builtin_amdgcn_mfma_f32_32x32x8bf16_1k"))
def mfma_32_rows_bf16(words):
    return product(words, bf16, 32)


@test(ALL, """
	int l = __builtin_amdgcn_workitem_id_x();
	__amdgpu_buffer_rsrc_t b = __builtin_amdgcn_make_buffer_rsrc(args.in, 0, 100 * 4,
								     %(wave)d == 64 ? 0x27000 : 0x31004000);
	/* Lanes from 24 on read behind the end, lane 3 before the beginning, and so do the last ones below. */
	((word4v *)args.out)[l] = __builtin_amdgcn_raw_buffer_load_b128(b, l == 3 ? -16 : 16 + l * 16, 0, 0);
	((word2v *)args.out)[128 + l] = __builtin_amdgcn_raw_buffer_load_b64(b, 392 - 16 * l, 0, 0);
""")
def buffer_loads_within_bounds(words, wave):
    out, inside = np.zeros(2 * (128 + wave), np.uint32), words[:100]
    for l in range(wave):
        if l != 3 and 4 + 4 * l < 100:
            out[4 * l:4 * l + 4] = inside[4 + 4 * l:8 + 4 * l]
        if 98 - 4 * l >= 0:
            out[256 + 2 * l:258 + 2 * l] = inside[98 - 4 * l:100 - 4 * l]
    return out


@test(ALL, """
	int l = __builtin_amdgcn_workitem_id_x(), more = 6;
	asm("" : "+s"(more));
	__amdgpu_buffer_rsrc_t b = __builtin_amdgcn_make_buffer_rsrc(args.in, 0, 44, %(wave)d == 64 ? 0x27000 : 0x31004000);
	__amdgpu_buffer_rsrc_t to = __builtin_amdgcn_make_buffer_rsrc(args.out + 256, 0, 44,
								      %(wave)d == 64 ? 0x27000 : 0x31004000);
	/* Odd halves, and beyond the bounds what all lanes add, which those are not compared with. */
	args.out[l] = __builtin_amdgcn_raw_buffer_load_b16(b, 2 * l, 0, 0);
	args.out[64 + l] = __builtin_amdgcn_raw_buffer_load_b16(b, 2 * l, more, 0);
	args.out[128 + l] = __builtin_amdgcn_raw_buffer_load_b32(b, 4 * l, more + 2, 0);
	__builtin_amdgcn_raw_buffer_store_b16((unsigned short)args.in[100 + l], to, 6 * l, more, 0);
	__builtin_amdgcn_raw_buffer_store_b32(args.in[100 + l], to, 8 * l, more + 58, 0);
""")
def buffer_halves_and_stores(words, wave):
    out, halves = np.zeros(512, np.uint32), words.view(np.uint16)
    to = out[256:].view(np.uint16)
    for l in range(wave):
        out[l] = halves[l] if 2 * l < 44 else 0
        out[64 + l] = halves[l + 3] if 2 * l < 44 else 0
        out[128 + l] = words[l + 2] if 4 * l < 44 else 0
        if 6 * l < 44:
            to[3 * l + 3] = words[100 + l] & 0xffff
        if 8 * l < 44:
            out[256 + 2 * l + 16] = words[100 + l]
    return out


MFMA32_WIDE = """
	int l = __builtin_amdgcn_workitem_id_x();
	%(type)s a, b;
	float16v c = {};
	for (int i = 0; i < 8; i++) {
		a[i] = ((%(element)s *)args.in)[l %% 32 * 16 + l / 32 * 8 + i];
		b[i] = ((%(element)s *)args.in)[512 + l %% 32 * 16 + l / 32 * 8 + i];
	}
	c = %(builtin)s(a, b, c, 0, 0, 0);
	for (int i = 0; i < 16; i++)
		((float *)args.out)[(i / 4 * 8 + l / 32 * 4 + i %% 4) * 32 + l %% 32] = c[i];
"""


def wide_product(words, decode):
    a, b = (decode(words[n:n + 256]).reshape(32, 16) for n in (0, 256))
    return (a @ b.T).astype(np.float32).reshape(-1).view(np.uint32)


@test(("gfx950",), MFMA32_WIDE % dict(type="half8v", element="_Float16", builtin="__builtin_amdgcn_mfma_f32_32x32x16_f16"))
def mfma_32_rows_16_deep_f16(words):
    return wide_product(words, half)


@test(("gfx950",), MFMA32_WIDE % dict(type="bf8v", element="__bf16", builtin="__builtin_amdgcn_mfma_f32_32x32x16_bf16"))
def mfma_32_rows_16_deep_bf16(words):
    return wide_product(words, bf16)


@test(("gfx950",), """
	int l = __builtin_amdgcn_workitem_id_x();
	float *x = (float *)args.in;
	asm volatile("v_cvt_pk_bf16_f32 %%0, %%1, %%2" : "=v"(args.out[l]) : "v"(x[l]), "v"(x[64 + l]));
""")
def half_pairs_in_bf16(words):
    bits = words[:128].astype(np.uint64)
    rounded = ((bits + 0x7fff + (bits >> 16 & 1)) >> 16).astype(np.uint32)  # to nearest, ties to even
    return rounded[:64] | rounded[64:] << 16


WMMA11 = """
	int l = __builtin_amdgcn_workitem_id_x();
	%(type)s a, b;
	float8v c = {};
	for (int i = 0; i < 16; i++) {
		a[i] = ((%(element)s *)args.in)[l %% 16 * 16 + i];
		b[i] = ((%(element)s *)args.in)[256 + l %% 16 * 16 + i];
	}
	c = %(builtin)s(a, b, c);
	for (int i = 0; i < 8; i++)
		((float *)args.out)[(2 * i + l / 16) * 16 + l %% 16] = c[i];
"""


@test(GFX11, WMMA11 % dict(type="half16v", element="_Float16", builtin="__builtin_amdgcn_wmma_f32_16x16x16_f16_w32"))
def wmma11_f16(words):
    return product(words, half)


@test(GFX11, WMMA11 % dict(type="short16v", element="short", builtin="__builtin_amdgcn_wmma_f32_16x16x16_bf16_w32"))
def wmma11_bf16(words):
    return product(words, bf16)


WMMA12 = """
	int l = __builtin_amdgcn_workitem_id_x();
	%(type)s a, b;
	float8v c = {};
	for (int i = 0; i < 8; i++) {
		a[i] = ((%(element)s *)args.in)[l %% 16 * 16 + l / 16 * 8 + i];
		b[i] = ((%(element)s *)args.in)[256 + l %% 16 * 16 + l / 16 * 8 + i];
	}
	c = %(builtin)s(a, b, c);
	for (int i = 0; i < 8; i++)
		((float *)args.out)[(l / 16 * 8 + i) * 16 + l %% 16] = c[i];
"""


@test(GFX12, WMMA12 % dict(type="half8v", element="_Float16",
                           builtin="__builtin_amdgcn_wmma_f32_16x16x16_f16_w32_gfx12"))
def wmma12_f16(words):
    return product(words, half)


@test(GFX12, WMMA12 % dict(type="short8v", element="short",
                           builtin="__builtin_amdgcn_wmma_f32_16x16x16_bf16_w32_gfx12"))
def wmma12_bf16(words):
    return product(words, bf16)


@test(GFX11 + GFX12, """
	int l = __builtin_amdgcn_workitem_id_x(), x = args.in[l];
	args.out[l] = __builtin_amdgcn_permlanex16(x, x, 0x76543210, 0xfedcba98, true, false);
""")
def permlanex16(words):
    return np.concatenate([words[16:32], words[:16]])


@test(ALL, """
	int l = __builtin_amdgcn_workitem_id_x(), n = %(wave)d;
	args.out[l] = __builtin_amdgcn_ds_bpermute((n - 1 - l) * 4, args.in[l]);
	args.out[n + l] = __builtin_amdgcn_ds_bpermute((l ^ 16) * 4, args.in[l]);
	args.out[2 * n + l] = __builtin_amdgcn_ds_bpermute((l ^ n / 2) * 4, args.in[l]);
""")
def bpermute(words, wave):
    x, lane = words[:wave], np.arange(wave)
    return np.concatenate([x[::-1], x[lane ^ 16], x[lane ^ wave // 2]])


@test(ALL, """
	__attribute__((shared)) static word4v lds[64];
	int l = __builtin_amdgcn_workitem_id_x(), n = %(wave)d;
	word4v x = ((word4v *)args.in)[l];
	asm volatile("" : "+%(acc)s"(x));
	lds[l] = x;
	__builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "workgroup", "local");
	__builtin_amdgcn_s_barrier();
	((word4v *)args.out)[l] = lds[l ^ 1];
""")
def lds_store_from_accumulation_registers(words, wave):
    return words[:4 * wave].reshape(-1, 2, 4)[:, ::-1].reshape(-1)


@test(GFX9, """
	int l = __builtin_amdgcn_workitem_id_x();
	u32 *p = args.in + l, x;
	asm volatile("flat_load_dword %%0, %%1\\n\\ts_waitcnt vmcnt(0) lgkmcnt(0)" : "=&v"(x) : "v"(p));
	args.out[l] = x;
""")
def flat_load_has_no_scalar_base(words, wave):
    return words[:wave]


@test(GFX11 + GFX12, """
	int l = __builtin_amdgcn_workitem_id_x();
	u32 x = args.in[l], y = args.in[32 + l];
	asm volatile("v_mov_b32 v10, %%0\\n\\tv_mov_b32 v11, %%1\\n\\t"
		     "v_dual_mov_b32 v10, v11 :: v_dual_mov_b32 v11, v10\\n\\t"
		     "v_mov_b32 %%0, v10\\n\\tv_mov_b32 %%1, v11" : "+v"(x), "+v"(y) :: "v10", "v11");
	args.out[l] = x, args.out[32 + l] = y;
""")
def dual_issue_reads_before_it_writes(words):
    return np.concatenate([words[32:64], words[:32]])


@test(ALL, """
	int l = __builtin_amdgcn_workitem_id_x(), n = %(wave)d;
	u32 x = args.in[l], y = args.in[n + l];
	args.out[l] = __builtin_amdgcn_perm(x, y, 0x05040100);
	args.out[n + l] = __builtin_amdgcn_perm(x, y, 0x07060302);
	args.out[2 * n + l] = __builtin_amdgcn_perm(x, y, 0x0c020c06);
""")
def byte_permute(words, wave):
    x, y = words[:wave], words[wave:2 * wave]
    return np.concatenate([x << 16 | y & 0xffff, x & 0xffff0000 | y >> 16, (y >> 16 & 255) << 16 | x >> 16 & 255])


@test(ALL, """
	int l = __builtin_amdgcn_workitem_id_x(), n = %(wave)d;
	float x = ((float *)args.in)[l], y = ((float *)args.in)[n + l];
	half2v p = {(_Float16)x, (_Float16)y};
	args.out[l] = __builtin_bit_cast(u32, p);
	u32 h;
	asm volatile("v_cvt_f16_f32 %%0, %%1" : "=v"(h) : "v"(x));
	args.out[n + l] = h & 0xffff;
""")
def round_to_half(words, wave):
    x = words[:2 * wave].view(np.float32).astype(np.float16).view(np.uint16).astype(np.uint32)
    return np.concatenate([x[:wave] | x[wave:] << 16, x[:wave]])


@test(GFX9, """
	int l = __builtin_amdgcn_workitem_id_x();
	float x = ((float *)args.in)[l], y;
	u32 h, low = 0;
	asm volatile("v_mov_b32 v3, 0\\n\\tv_mov_b32 v132, %%2\\n\\tv_cvt_f16_f32 v131, v132\\n\\tv_add_f16 v133, v131, v131\\n\\t"
		     "v_cvt_f32_f16 %%1, v133\\n\\tv_mov_b32 %%0, v131\\n\\tv_mov_b32 %%3, v3"
		     : "=&v"(h), "=&v"(y), "+v"(x), "=&v"(low) :: "v3", "v131", "v132", "v133");
	args.out[l] = h & 0xffff, ((float *)args.out)[64 + l] = y, args.out[128 + l] = low;
""")
def half_instructions_in_high_registers(words, wave):
    h = words[:wave].view(np.float32).astype(np.float16)
    return np.concatenate([h.view(np.uint16).astype(np.uint32), (h + h).astype(np.float32).view(np.uint32),
                           np.zeros(wave, np.uint32)])


@test(ALL, """
	int l = __builtin_amdgcn_workitem_id_x(), n = %(wave)d;
	u32 x = args.in[l];
	args.out[l] = (u32)(((unsigned long long)x * 0xD2511F53u) >> 32);
	args.out[n + l] = x * 0xD2511F53u;
	unsigned long long y = (unsigned long long)x * args.in[n + l] + args.in[2 * n + l];
	args.out[2 * n + l] = (u32)y, args.out[3 * n + l] = (u32)(y >> 32);
""")
def wide_products(words, wave):
    x, y, z = (words[n * wave:(n + 1) * wave].astype(np.uint64) for n in range(3))
    p, q = x * np.uint64(0xD2511F53), x * y + z
    return np.concatenate([p >> 32, p & 0xffffffff, q & 0xffffffff, q >> 32]).astype(np.uint32)


@test(GFX9, """
	int l = __builtin_amdgcn_workitem_id_x();
	u32 x = args.in[l] | 0xffffff80u, y = args.in[64 + l], sum, carry;
	asm volatile("v_add_co_u32_sdwa %%0, vcc, %%2, %%3 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:BYTE_0"
		     "\\n\\tv_addc_co_u32_e32 %%1, vcc, 0, %%4, vcc" : "=&v"(sum), "=&v"(carry) : "v"(x), "v"(y), "v"(y) : "vcc");
	args.out[l] = sum, args.out[64 + l] = carry;
""")
def sum_with_a_byte_and_its_carry(words, wave):
    x, y = (words[:64] | np.uint32(0xffffff80)).astype(np.uint64), words[64:128].astype(np.uint64)
    total = x + (y & np.uint64(255))
    return np.concatenate([total & 0xffffffff, (y + (total >> np.uint64(32))) & 0xffffffff]).astype(np.uint32)


@test(ALL, """
	int l = __builtin_amdgcn_workitem_id_x();
	u32 x = args.in[l];
	asm volatile("v_nop" : "+v"(x));
	args.out[l] = x + 1;
""")
def no_operation(words, wave):
    return words[:wave] + np.uint32(1)


class Eight:
    """An 8-bit float by its definition: values of all its bits, and bits of the nearest value."""

    def __init__(self, exponent_bits, fraction_bits, bias, largest, beyond, nan):
        self.beyond, self.nan, codes = beyond, nan, range(largest + 2)  # with the one after the last, for what rounds to it
        one = 1 << fraction_bits
        sizes = [c * 2.0 ** (1 - bias - fraction_bits) if c < one else (1 + c % one / one) * 2.0 ** (c // one - bias)
                 for c in codes]
        self.sizes, self.unsigned_zero = np.array(sizes), nan == 0x80
        self.values = np.full(256, np.nan, np.float32)
        for c in codes[:-1]:
            self.values[[c, 128 + c]] = sizes[c], -sizes[c]
        if exponent_bits == 5 and not self.unsigned_zero:
            self.values[[0x7c, 0xfc]] = np.inf, -np.inf
        if self.unsigned_zero:
            self.values[0x80] = np.nan

    def widened(self, codes):
        bits = self.values[codes].view(np.uint32)
        return np.where(np.isnan(self.values[codes]), np.uint32(0x7fc00000), bits)

    def nearest(self, x):
        if np.isnan(x):
            return self.nan
        away = np.abs(self.sizes - min(abs(float(x)), 2 * self.sizes[-1]))
        code = min(np.flatnonzero(away == away.min()), key=lambda c: c & 1)
        sign = 128 if np.signbit(x) else 0
        if code == len(self.sizes) - 1:
            return self.beyond if self.unsigned_zero else sign | self.beyond
        return code if self.unsigned_zero and not code else sign | code

    def factors(self, rng, n, integers):
        """Bytes whose products can be summed without rounding."""
        fit = np.flatnonzero(np.isin(self.values, np.arange(-2, 3)) if integers else
                             np.abs(self.values) <= 2.0 ** 15 * self.sizes[1])
        return rng.choice(fit, n).astype(np.uint8)

    def to_round(self, rng):
        """Every value, every middle between two, and what is next to them; others, infinities and NaNs."""
        middles = (self.sizes[1:] + self.sizes[:-1]) / 2
        exact = np.concatenate([self.sizes, middles]).astype(np.float32)
        others = (rng.standard_normal(100) * 10.0 ** rng.integers(-6, 7, 100)).astype(np.float32)
        x = np.concatenate([exact, np.nextafter(exact, np.float32(0)), np.nextafter(exact, np.float32(1e9)), others,
                            np.array([np.inf, np.nan, 3e38, 1e-44], np.float32)])
        x = np.resize(rng.permutation(x), WORDS)
        return np.where(rng.integers(0, 2, WORDS), x, -x).astype(np.float32).view(np.uint32)


OCP = dict(fp8=Eight(4, 3, 7, 0x7e, 0x7f, 0xff), bf8=Eight(5, 2, 15, 0x7b, 0x7c, 0xfe))
FNUZ = dict(fp8=Eight(4, 3, 8, 0x7f, 0x80, 0x80), bf8=Eight(5, 2, 16, 0x7f, 0x80, 0x80))

# A lane holds neighbours along what is summed: both operands in one order, so that no other order would show.
PRODUCT8 = """
	int l = __builtin_amdgcn_workitem_id_x();
	%(vector)s a = ((%(vector)s *)args.in)[l %% %(rows)d * (%(wave)d / %(rows)d) + l / %(rows)d];
	%(vector)s b = ((%(vector)s *)(args.in + 512))[l %% %(rows)d * (%(wave)d / %(rows)d) + l / %(rows)d];
	%(sums)s c = {};
	for (int i = 0; i < %(times)d; i++)
		c = %(builtin)s(a, b, c%(more)s);
	for (int i = 0; i < %(rows)d * %(rows)d / %(wave)d; i++)
		((float *)args.out)[(%(row)s) * %(rows)d + l %% %(rows)d] = c[i];
"""
ROW = {(64, 16): "l / 16 * 4 + i", (64, 32): "i / 4 * 8 + l / 32 * 4 + i % 4", (32, 16): "l / 16 * 8 + i"}


def product8(arch, name, builtin, shape, kinds, more="", factor=1, times=1):
    """Declares the test of a matrix instruction, or of as many side by side."""
    (rows, deep), wave = shape, 32 if arch in GFX12 else 64
    first, second = ((FNUZ if arch == "gfx942" else OCP)[kind] for kind in kinds)
    n, sums = rows * deep, rows * rows // wave
    vector = {(64, 8): "long", (64, 32): "int8v", (32, 8): "int2v"}[wave, deep * rows // wave]

    def inputs(rng):
        words = np.zeros(4 * WORDS, np.uint8)
        words[:n], words[2048:2048 + n] = first.factors(rng, n, False), second.factors(rng, n, True)
        return words.view(np.uint32)

    def expect(words):
        bytes_of = words.view(np.uint8)
        a, b = (eight.values[bytes_of[at:at + n]].reshape(rows, deep) for eight, at in ((first, 0), (second, 2048)))
        return (a @ b.T * factor * times).astype(np.float32).reshape(-1).view(np.uint32)

    body = PRODUCT8 % dict(vector=vector, rows=rows, wave=wave, sums=f"float{sums}v", builtin=builtin, more=more,
                           row=ROW[wave, rows], times=times)
    expect.__name__ = name
    test((arch,), body, inputs)(expect)


SCALES = (("", "0, 0, 0, 0", 1), ("scale_", "0, 0x7f7f7f7f, 0, 0x7f7f7f7f", 1), ("scaled_by_8_", "1, 0x8100, 2, 0x800000", 8))


def products8():
    """Every instruction for fp8, and one of each kind where the operands differ."""
    for kinds in (("fp8", "fp8"), ("fp8", "bf8"), ("bf8", "fp8"), ("bf8", "bf8")):
        pair, every = "_".join(kinds), kinds == ("fp8", "fp8")
        product8("gfx1201", f"wmma12_{pair}", f"__builtin_amdgcn_wmma_f32_16x16x16_{pair}_w32_gfx12", (16, 16), kinds)
        for arch in ("gfx942", "gfx950"):
            for rows, deep in ((16, 32), (32, 16))[:2 if every else 1]:
                product8(arch, f"mfma_{rows}_{pair}_{arch}", f"__builtin_amdgcn_mfma_f32_{rows}x{rows}x{deep}_{pair}",
                         (rows, deep), kinds, ", 0, 0, 0")
        formats = ", ".join("1" if kind == "bf8" else "0" for kind in kinds)
        for rows, deep in ((16, 128), (32, 64))[:2 if every else 1]:
            for label, scales, factor in SCALES[:3 if every else 1]:
                product8("gfx950", f"mfma_{label}{rows}_{deep}_deep_{pair}",
                         f"__builtin_amdgcn_mfma_scale_f32_{rows}x{rows}x{deep}_f8f6f4", (rows, deep), kinds,
                         f", {formats}, {scales}", factor)
    product8("gfx950", "mfma_in_front_of_one_without_scales", "__builtin_amdgcn_mfma_scale_f32_32x32x64_f8f6f4", (32, 64),
             ("fp8", "fp8"), ", 0, 0, 0, 0, 0, 0", times=2)


WIDEN8 = """
	for (int i = __builtin_amdgcn_workitem_id_x(); i < 64; i += %(wave)d) {
		u32 x = 0x03020100 + 0x04040404 * i;
		float *single = (float *)args.out + 4 * i;
		float2v *pair = (float2v *)args.out + 128 + 2 * i;
		single[0] = __builtin_amdgcn_cvt_f32_%(kind)s(x, 0), single[1] = __builtin_amdgcn_cvt_f32_%(kind)s(x, 1);
		single[2] = __builtin_amdgcn_cvt_f32_%(kind)s(x, 2), single[3] = __builtin_amdgcn_cvt_f32_%(kind)s(x, 3);
		pair[0] = __builtin_amdgcn_cvt_pk_f32_%(kind)s(x, false), pair[1] = __builtin_amdgcn_cvt_pk_f32_%(kind)s(x, true);
	}
"""
NARROW8 = """
	float2v *in = (float2v *)args.in;
	for (int i = __builtin_amdgcn_workitem_id_x(); i < 512; i += %(wave)d) {
		args.out[i] = __builtin_amdgcn_cvt_pk_%(kind)s_f32(in[i].x, in[i].y, 0x12345678, false);
		args.out[512 + i] = __builtin_amdgcn_cvt_pk_%(kind)s_f32(in[i].x, in[i].y, 0x12345678, true);
	}
"""


def conversions8(archs, eights, suffix):
    for kind, eight in eights.items():
        def widen(words, *, eight=eight):
            return np.tile(eight.widened(np.arange(256)), 2)

        def narrow(words, *, eight=eight):
            code = np.array([eight.nearest(x) for x in floats(words)], np.uint32)
            pair = code[0::2] | code[1::2] << 8
            return np.concatenate([pair | 0x12340000, pair << 16 | 0x5678])

        for function, body, inputs in ((widen, WIDEN8, any_words), (narrow, NARROW8, eight.to_round)):
            function.__name__ = f"{function.__name__}_{kind}{suffix}"
            test(archs, body.replace("%(kind)s", kind), inputs)(function)


def any_words(rng):
    return rng.integers(0, 1 << 32, WORDS, dtype=np.uint64).astype(np.uint32)


products8()
conversions8(("gfx942",), FNUZ, "_fnuz")
conversions8(("gfx950", "gfx1201"), OCP, "")


def input_for(name, rng):
    if "mfma" in name or "wmma" in name:
        return np.concatenate([matrices("f16" if "f16" in name and "bf16" not in name else "bf16")(rng),
                               np.zeros(WORDS - 512, np.uint32)])
    if "half" in name:
        return (rng.standard_normal(WORDS) * 10.0 ** rng.integers(-8, 4, WORDS)).astype(np.float32).view(np.uint32)
    return any_words(rng)


class Args(ctypes.Structure):
    _fields_ = [("input", ctypes.c_void_p), ("output", ctypes.c_void_p)]


def run_arch(arch, folder):
    import emulator
    wave = 64 if arch in GFX9 else 32
    constants = dict(wave=wave, acc="a" if arch in GFX9 else "v")
    mine = [t for t in TESTS if arch in t[1]]
    source, code = os.path.join(folder, "t.hip"), os.path.join(folder, f"{arch}.co")
    with open(source, "w", encoding="ascii") as f:
        f.write(PRELUDE % constants)
        for name, _, body, _, _ in mine:
            # Bodies made with % once already have no more of them.
            text = body % constants if "%(" in body or "%%" in body else body
            f.write(f"KERNEL void {name}(Args args)\n{{{text}}}\n")
    clangs.compile_object(arch, source, [], code)
    loaded, rng, failed = emulator.CodeObject(code, arch), np.random.default_rng(1), 0
    for name, _, _, expect, inputs in mine:
        given, got = inputs(rng) if inputs else input_for(name, rng), np.zeros(WORDS, np.uint32)
        want = expect(given, wave) if expect.__code__.co_argcount > 1 else expect(given)
        try:
            loaded.launch(name, (1, 1, 1), wave, Args(given.ctypes.data, got.ctypes.data), 0)
            wrong = int((got[:len(want)] != want).sum())
            text = f"{wrong} of {len(want)} words are wrong" if wrong else ""
        except (RuntimeError, ValueError) as error:
            text = str(error)[:200]
        failed += bool(text)
        print(f"{'FAIL' if text else 'ok  '} {arch} {name} {text}".rstrip(), flush=True)
    return failed, len(mine)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--arch", action="append")
    parser.add_argument("--plain", action="store_true")
    options = parser.parse_args()
    if not os.environ.get("TINYGRAD"):
        print("instructions: skipped, TINYGRAD is not set (a checkout of github:tinygrad/tinygrad)")
        return 77
    if options.plain:
        import corrections
        for name in [name for name in vars(corrections) if name.startswith(("correct_", "choose_"))]:
            setattr(corrections, name, lambda *_: None)
    archs = clangs.known(options.arch or ALL, "instructions")
    if not archs:
        return 77
    failed = done = 0
    with tempfile.TemporaryDirectory() as folder:
        for arch in archs:
            f, n = run_arch(arch, folder)
            failed, done = failed + f, done + n
    print(f"instructions: {done - failed} of {done} right")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
