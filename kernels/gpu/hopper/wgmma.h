/* SPDX-License-Identifier: MIT */
/*
 * wgmma.h: Hopper's matrix products of a warpgroup. The accumulators of 64 rows x 16 TILES columns
 * are, warp by warp, the row of 16 x 16 tiles that core_mma.h describes, so that everything about
 * scores works on them; P, in 16 bits, is an A operand likewise.
 *
 * Products run on their own: from begin() to wait<N>(), which leaves the last N batches under way,
 * neither accumulators nor operands may be touched. settle() tells the compiler that they changed.
 */
#ifndef FMHA_GPU_WGMMA_H
#define FMHA_GPU_WGMMA_H

#include "tma.h"

DEV void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEV void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> DEV void wgmma_wait()
{
	asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

template <class Acc, int N> DEV void settle(Acc (&x)[N])
{
	UNROLL
	for (int n = 0; n < N; n++)
		UNROLL
		for (int e = 0; e < 8; e++)
			asm volatile("" : "+f"(x[n].x[e])::"memory");
}

/*
 * Descriptors of operands in shared memory: address, distances and swizzle. Read along the rows (Q,
 * K) the 8-row groups lie 1024 bytes apart and a step along them is 32 bytes; read across them (V)
 * slabs lie `slab` bytes apart and a step of 16 rows is 2048.
 */
DEV u64 wgmma_descriptor(u32 address, i32 slab)
{
	const u32 GROUP = 1024 >> 4, SWIZZLE_128 = 1u << 30;

	return (u64)(SWIZZLE_128 | GROUP) << 32 | (u32)(slab >> 4) << 16 | (address & 0x3ffff) >> 4;
}
/* in units of a descriptor's address */
static const int STEP_ALONG = 32 >> 4, STEP_ACROSS = 2048 >> 4;

template <class T, int TILES> struct Wgmma;

#define WGMMA_D1 "%0, %1, %2, %3, %4, %5, %6, %7"
#define WGMMA_D2 WGMMA_D1 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_D3 WGMMA_D2 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define WGMMA_D4 WGMMA_D3 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_D5 WGMMA_D4 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define WGMMA_D6 WGMMA_D5 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_D7 WGMMA_D6 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define WGMMA_D8 WGMMA_D7 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_D9 WGMMA_D8 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define WGMMA_D10 WGMMA_D9 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define WGMMA_D11 WGMMA_D10 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define WGMMA_D12 WGMMA_D11 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_D13 WGMMA_D12 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define WGMMA_D14 WGMMA_D13 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define WGMMA_D15 WGMMA_D14 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define WGMMA_D16 WGMMA_D15 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define WGMMA_TILE(d)                                                                                \
	"+f"(d.x[0]), "+f"(d.x[1]), "+f"(d.x[2]), "+f"(d.x[3]), "+f"(d.x[4]), "+f"(d.x[5]), "+f"(d.x[6]),      \
		"+f"(d.x[7])
#define WGMMA_X1 WGMMA_TILE(d[0])
#define WGMMA_X2 WGMMA_X1, WGMMA_TILE(d[1])
#define WGMMA_X3 WGMMA_X2, WGMMA_TILE(d[2])
#define WGMMA_X4 WGMMA_X3, WGMMA_TILE(d[3])
#define WGMMA_X5 WGMMA_X4, WGMMA_TILE(d[4])
#define WGMMA_X6 WGMMA_X5, WGMMA_TILE(d[5])
#define WGMMA_X7 WGMMA_X6, WGMMA_TILE(d[6])
#define WGMMA_X8 WGMMA_X7, WGMMA_TILE(d[7])
#define WGMMA_X9 WGMMA_X8, WGMMA_TILE(d[8])
#define WGMMA_X10 WGMMA_X9, WGMMA_TILE(d[9])
#define WGMMA_X11 WGMMA_X10, WGMMA_TILE(d[10])
#define WGMMA_X12 WGMMA_X11, WGMMA_TILE(d[11])
#define WGMMA_X13 WGMMA_X12, WGMMA_TILE(d[12])
#define WGMMA_X14 WGMMA_X13, WGMMA_TILE(d[13])
#define WGMMA_X15 WGMMA_X14, WGMMA_TILE(d[14])
#define WGMMA_X16 WGMMA_X15, WGMMA_TILE(d[15])

/*
 * along(): D = A B^T or, with add, D += A B^T, B read along its rows, A likewise or, of 16-bit
 * types, in registers; turned(): the same of A^T, A read across its rows, of 16-bit types;
 * crossed(): D += A^T B, both read across their rows, of 16-bit types; mixed(): D = A B or, with
 * add, D += A B, B alone read across its rows, of 16-bit types;
 * across(): D += A B, or D = A B without add, A in registers, of 16-bit types: of 8-bit ones B is
 * always read along its rows.
 */
#define WGMMA(T, NAME, K, ALONG, ACROSS, TILES, N, P0, P1, P2, P3, P4, P5)                           \
	template <> struct Wgmma<T, TILES> {                                                            \
		template <class Acc> METHOD static void along(Acc (&d)[TILES], u64 a, u64 b, i32 add)       \
		{                                                                                           \
			asm volatile("{\n\t.reg .pred add;\n\tsetp.ne.s32 add, " P2 ", 0;\n\t"                   \
				     "wgmma.mma_async.sync.aligned.m64n" N "k" K ".f32." NAME "." NAME                \
				     " {" WGMMA_D##TILES "}, " P0 ", " P1 ", add, 1, 1" ALONG ";\n\t}"             \
				     : WGMMA_X##TILES                                                                \
				     : "l"(a), "l"(b), "r"(add));                                                    \
		}                                                                                           \
		template <class Acc> METHOD static void along(Acc (&d)[TILES], const u32 (&a)[4], u64 b, i32 add) \
		{                                                                                           \
			asm volatile("{\n\t.reg .pred add;\n\tsetp.ne.s32 add, " P5 ", 0;\n\t"                   \
				     "wgmma.mma_async.sync.aligned.m64n" N "k" K ".f32." NAME "." NAME                \
				     " {" WGMMA_D##TILES "}, {" P0 ", " P1 ", " P2 ", " P3 "}, " P4                    \
				     ", add, 1, 1, 0;\n\t}"                                                         \
				     : WGMMA_X##TILES                                                                \
				     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                 \
		}                                                                                           \
		template <class Acc> METHOD static void turned(Acc (&d)[TILES], u64 a, u64 b, i32 add)      \
		{                                                                                           \
			asm volatile("{\n\t.reg .pred add;\n\tsetp.ne.s32 add, " P2 ", 0;\n\t"                   \
				     "wgmma.mma_async.sync.aligned.m64n" N "k" K ".f32." NAME "." NAME                \
				     " {" WGMMA_D##TILES "}, " P0 ", " P1 ", add, 1, 1, 1, 0;\n\t}"                 \
				     : WGMMA_X##TILES                                                                \
				     : "l"(a), "l"(b), "r"(add));                                                    \
		}                                                                                           \
		template <class Acc> METHOD static void mixed(Acc (&d)[TILES], u64 a, u64 b, i32 add)       \
		{                                                                                           \
			asm volatile("{\n\t.reg .pred add;\n\tsetp.ne.s32 add, " P2 ", 0;\n\t"                   \
				     "wgmma.mma_async.sync.aligned.m64n" N "k" K ".f32." NAME "." NAME                \
				     " {" WGMMA_D##TILES "}, " P0 ", " P1 ", add, 1, 1, 0, 1;\n\t}"                 \
				     : WGMMA_X##TILES                                                                \
				     : "l"(a), "l"(b), "r"(add));                                                     \
		}                                                                                           \
		template <class Acc> METHOD static void crossed(Acc (&d)[TILES], u64 a, u64 b)              \
		{                                                                                           \
			asm volatile("{\n\t.reg .pred add;\n\tsetp.eq.s32 add, 0, 0;\n\t"                        \
				     "wgmma.mma_async.sync.aligned.m64n" N "k" K ".f32." NAME "." NAME                \
				     " {" WGMMA_D##TILES "}, " P0 ", " P1 ", add, 1, 1, 1, 1;\n\t}"                 \
				     : WGMMA_X##TILES                                                                \
				     : "l"(a), "l"(b));                                                               \
		}                                                                                           \
		template <class Acc> METHOD static void across(Acc (&d)[TILES], const u32 (&a)[4], u64 b, i32 add) \
		{                                                                                           \
			asm volatile("{\n\t.reg .pred add;\n\tsetp.ne.s32 add, " P5 ", 0;\n\t"                   \
				     "wgmma.mma_async.sync.aligned.m64n" N "k" K ".f32." NAME "." NAME                \
				     " {" WGMMA_D##TILES "}, {" P0 ", " P1 ", " P2 ", " P3 "}, " P4                    \
				     ", add, 1, 1" ACROSS ";\n\t}"                                                 \
				     : WGMMA_X##TILES                                                                \
				     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                 \
		}                                                                                           \
		template <class Acc> METHOD static void across(Acc (&d)[TILES], const u32 (&a)[4], u64 b)   \
		{                                                                                           \
			asm volatile("{\n\t.reg .pred add;\n\tsetp.eq.s32 add, 0, 0;\n\t"                        \
				     "wgmma.mma_async.sync.aligned.m64n" N "k" K ".f32." NAME "." NAME                \
				     " {" WGMMA_D##TILES "}, {" P0 ", " P1 ", " P2 ", " P3 "}, " P4                    \
				     ", add, 1, 1" ACROSS ";\n\t}"                                                 \
				     : WGMMA_X##TILES                                                                \
				     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                           \
		}                                                                                           \
	};
#define WGMMA_ALL(...)                                                                               \
	WGMMA(BF16, "bf16", "16", ", 0, 0", ", 1", __VA_ARGS__)                                         \
	WGMMA(F16, "f16", "16", ", 0, 0", ", 1", __VA_ARGS__)                                           \
	WGMMA(E4M3, "e4m3", "32", "", "", __VA_ARGS__)
WGMMA_ALL(2, "32", "%16", "%17", "%18", "%19", "%20", "%21")
WGMMA_ALL(4, "64", "%32", "%33", "%34", "%35", "%36", "%37")
WGMMA_ALL(5, "80", "%40", "%41", "%42", "%43", "%44", "%45")
WGMMA_ALL(6, "96", "%48", "%49", "%50", "%51", "%52", "%53")
WGMMA_ALL(7, "112", "%56", "%57", "%58", "%59", "%60", "%61")
WGMMA_ALL(8, "128", "%64", "%65", "%66", "%67", "%68", "%69")
WGMMA_ALL(9, "144", "%72", "%73", "%74", "%75", "%76", "%77")
WGMMA_ALL(10, "160", "%80", "%81", "%82", "%83", "%84", "%85")
WGMMA_ALL(11, "176", "%88", "%89", "%90", "%91", "%92", "%93")
WGMMA_ALL(12, "192", "%96", "%97", "%98", "%99", "%100", "%101")
WGMMA_ALL(16, "256", "%128", "%129", "%130", "%131", "%132", "%133")
#undef WGMMA_ALL
#undef WGMMA

/* D = A B^T, of the warpgroup's 64 rows of A, in STEPS of 32 bytes along the rows of both; slabs of
 * A and of B are so many bytes. Under way when this returns. */
template <class T, int STEPS, int A_SLAB, int B_SLAB, class Acc, int TILES>
DEV void start_along(Acc (&d)[TILES], u64 a, u64 b)
{
	const int IN_SLAB = SLAB_WIDTH / 32;

	settle(d);
	wgmma_begin();
	UNROLL
	for (int i = 0; i < STEPS; i++)
		Wgmma<T, TILES>::along(
			d, a + i / IN_SLAB * (A_SLAB >> 4) + i % IN_SLAB * STEP_ALONG,
			b + i / IN_SLAB * (B_SLAB >> 4) + i % IN_SLAB * STEP_ALONG, i > 0);
	wgmma_commit();
}

/* Four words of four neighbouring lanes, turned: lane c has what word c of each was. */
DEV void turn_words(u32 (&x)[4], i32 lane)
{
	UNROLL
	for (int step = 1; step <= 2; step *= 2)
		UNROLL
		for (int i = 0; i < 2; i++) {
			u32 &low = x[step == 1 ? 2 * i : i],
			    &high = x[step == 1 ? 2 * i + 1 : i + 2];
			u32 sent = shuffle_word(lane & step ? low : high, lane ^ step);

			if (lane & step)
				low = sent;
			else
				high = sent;
		}
}

#endif
