/* SPDX-License-Identifier: MIT */
/*
 * core_amd.h: AMD matrix cores: MFMA 16x16x16 (CDNA, wave64), WMMA 16x16x16 (RDNA3 and RDNA4,
 * wave32). Builtins only: the compiler then knows which waits the hardware needs.
 *
 * Products are computed transposed, S^T = K Q^T: the streamed tile is the hardware's A operand, the
 * stationary rows its B operand, so that lane l holds row l % 16 alone, with
 *   MFMA     columns 4 (l / 16) + e, e < 4
 *   RDNA3    columns 2 e + l / 16,   e < 8
 *   RDNA4    columns 8 (l / 16) + e, e < 8
 * A row's statistics are one number a lane, and P is already the B operand of O^T = V^T P^T, except
 * on RDNA3, whose operands want all 16 columns in both half waves.
 *
 * Rows in LDS are padded by 16 bytes, so that 16 rows do not start in the same bank. A tile that is
 * read by columns is stored transposed, 4 rows at a time.
 */
#ifndef FMHA_GPU_CORE_AMD_H
#define FMHA_GPU_CORE_AMD_H

#include "load.h"

#if FMHA_CORE == FMHA_CORE_MFMA
#define FMHA_AMD_OPERAND_WORDS 2
#define FMHA_AMD_ELEMENTS      4
#elif FMHA_CORE == FMHA_CORE_WMMA11
#define FMHA_AMD_OPERAND_WORDS 8
#define FMHA_AMD_ELEMENTS      8
#else
#define FMHA_AMD_OPERAND_WORDS 4
#define FMHA_AMD_ELEMENTS      8
#endif

struct AmdOperand {
	u32 r[FMHA_AMD_OPERAND_WORDS];
};
struct AmdAcc {
	float x[FMHA_AMD_ELEMENTS];
};
typedef short AmdShorts __attribute__((ext_vector_type(2 * FMHA_AMD_OPERAND_WORDS)));
typedef _Float16 AmdHalfs __attribute__((ext_vector_type(2 * FMHA_AMD_OPERAND_WORDS)));
typedef float AmdFloats __attribute__((ext_vector_type(FMHA_AMD_ELEMENTS)));

DEV AmdFloats amd_multiply(F16, AmdOperand x, AmdOperand y, AmdFloats c)
{
	AmdHalfs a = __builtin_bit_cast(AmdHalfs, x), b = __builtin_bit_cast(AmdHalfs, y);
#if FMHA_CORE == FMHA_CORE_MFMA
	return __builtin_amdgcn_mfma_f32_16x16x16f16(a, b, c, 0, 0, 0);
#elif FMHA_CORE == FMHA_CORE_WMMA11
	return __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(a, b, c);
#else
	return __builtin_amdgcn_wmma_f32_16x16x16_f16_w32_gfx12(a, b, c);
#endif
}
DEV AmdFloats amd_multiply(BF16, AmdOperand x, AmdOperand y, AmdFloats c)
{
	AmdShorts a = __builtin_bit_cast(AmdShorts, x), b = __builtin_bit_cast(AmdShorts, y);
#if FMHA_CORE == FMHA_CORE_MFMA
	return __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(a, b, c, 0, 0, 0);
#elif FMHA_CORE == FMHA_CORE_WMMA11
	return __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(a, b, c);
#else
	return __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32_gfx12(a, b, c);
#endif
}

/*
 * 16 bytes of a row, zero before row `begin` and from row `end` or dimension hdim on. What does not
 * exist is read from where something does: a straight line of loads, where branches would have each
 * wait for the one before.
 */
template <class View>
DEV chunk16 load_or_zero(const View &view, i32 row, i32 dim, i32 end, i32 begin = FROM_THE_FIRST)
{
	i32 until = end;

	if constexpr (Chooses<View>::value)
		until = view.end_of(row, end);
	bool valid = row < until && row >= begin && dim < view.hdim;
	chunk16 c = load16(view.at(min_of(row, end - 1), dim < view.hdim ? dim : 0));

	UNROLL
	for (int i = 0; i < 4; i++)
		c.w[i] = valid ? c.w[i] : 0;
	return c;
}

template <class T> struct CoreAmd {
	typedef T Type;
	typedef AmdAcc Acc;
	typedef AmdOperand Operand;
	static const int E = FMHA_AMD_ELEMENTS, STATS = 1;
	static const bool OWNS_PATCH = false, SHARES_PATCH = true; /* see DropoutTile */
	static const bool VIEWS_IN_LDS = false;
	static const bool FETCH_NEEDS_LDS = false;
	static const int WORDS = FMHA_AMD_OPERAND_WORDS;

	/* That a tile takes on its way from memory to LDS. */
	template <class Tile> METHOD static constexpr int held_registers()
	{
		return Tile::PER_THREAD * 16;
	}

	METHOD static i32 line() { return lane_id() % 16; }
	/* First of the k elements of a lane's operand. */
	METHOD static i32 first_k() { return WORDS == 8 ? 0 : lane_id() / 16 * (WORDS * 2); }

	METHOD static constexpr int stat(int) { return 0; }
	METHOD static i32 stat_row(int) { return line(); }
	METHOD static i32 row(int) { return line(); }
	METHOD static i32 column(int e)
	{
		i32 half = lane_id() / 16;

		return WORDS == 8 ? 2 * e + half : half * E + e;
	}

	METHOD static float row_max(float x)
	{
		x = larger(x, shuffle_xor(x, 16));
		return FMHA_WAVE == 64 ? larger(x, shuffle_xor(x, 32)) : x;
	}
	METHOD static float row_sum(float x)
	{
		x += shuffle_xor(x, 16);
		return FMHA_WAVE == 64 ? x + shuffle_xor(x, 32) : x;
	}

	METHOD static Operand to_operand(const Acc &c)
	{
		Operand p;
#if FMHA_CORE == FMHA_CORE_WMMA11
		/* Even columns are in the lower half wave, odd ones in the upper: fetch the others. */
		bool lower = lane_id() < 16;

		UNROLL
		for (int i = 0; i < 4; i++) {
			u32 own = T::pack2(c.x[2 * i], c.x[2 * i + 1]);
			u32 other = (u32)__builtin_amdgcn_permlanex16(
				(i32)own, (i32)own, 0x76543210, (i32)0xfedcba98, true, false);
			u32 even = lower ? own : other, odd = lower ? other : own;

			p.r[2 * i] = (even & 0xffff) | odd << 16;
			p.r[2 * i + 1] = even >> 16 | (odd & 0xffff0000u);
		}
#else
		UNROLL
		for (int i = 0; i < WORDS; i++)
			p.r[i] = T::pack2(c.x[2 * i], c.x[2 * i + 1]);
#endif
		return p;
	}

	/* C[16 x 16] += A[16 x 16 of k] B[16 x 16 of k]^T */
	METHOD static void multiply(Acc &c, const Operand &a, const Operand &b)
	{
		c = __builtin_bit_cast(Acc,
				       amd_multiply(T(), b, a, __builtin_bit_cast(AmdFloats, c)));
	}

	METHOD static i32 patch_row() { return 0; }

	/* Between steps of a product: keeps the scheduler from loading every operand first, which
	 * RDNA has no registers for. */
	METHOD static void step()
	{
		if (FMHA_CORE != FMHA_CORE_MFMA)
			scheduling_barrier();
	}

	/* What follows from a row is computed in every tile, and not kept for the whole loop. */
	METHOD static i32 anew(i32 row) { return hidden_lane(row); }

	/* A product is done here and not where its result is used: clang moves the instructions
	 * there, past barriers and loads, and then all operands live until then. */
	METHOD static void settle(Acc &c)
	{
#if FMHA_CORE != FMHA_CORE_MFMA
		AmdFloats v = __builtin_bit_cast(AmdFloats, c);

		asm volatile("" : "+v"(v));
		c = __builtin_bit_cast(Acc, v);
#endif
	}

	METHOD static Operand read(const char *at)
	{
		Operand x;

		if (WORDS == 2) {
			chunk8 c = *(const chunk8 *)at;

			x.r[0] = c.w[0], x.r[1] = c.w[1];
			return x;
		}
		UNROLL
		for (int i = 0; i < WORDS / 4; i++) {
			chunk16 c = ((const chunk16 *)at)[i];

			UNROLL
			for (int w = 0; w < 4; w++)
				x.r[i * 4 + w] = c.w[w];
		}
		return x;
	}

	template <int ROWS, int COLS, int THREADS, bool BY_ROWS, bool BY_COLUMNS> struct Tile {
		static const int ROW_STRIDE = COLS * 2 + 16, COLUMN_STRIDE = ROWS * 2 + 16;
		static const int COLUMNS_AT = BY_ROWS ? ROWS * ROW_STRIDE : 0;
		static const int BYTES = lds_tile(FMHA_CORE, ROWS, COLS, BY_ROWS, BY_COLUMNS);
		/* A thread's unit: 4 rows of one chunk. */
		static const int CHUNKS = COLS / 8, UNITS = ROWS / 4 * CHUNKS;
		static const int PER_THREAD = (UNITS + THREADS - 1) / THREADS;

		char *lds;
		chunk16 held[PER_THREAD * 4]; /* on the way from memory to LDS */

		METHOD void place(char *at) { lds = at; }

		/* Rows first .. first + ROWS - 1 of the view; zero before `begin` and from `end`
		 * on, which is above 0. */
		template <class From, class View>
		METHOD void fetch(const View &view, i32 first, i32 end, i32 begin = FROM_THE_FIRST)
		{
			if (!SameType<T, From>::value || !view.vector) {
				fetch_slowly<From>(view, first, end, begin);
				return;
			}
			/* Hidden, so that addresses are made anew each time instead of kept. */
			i32 thread = hidden_lane(thread_id());

			UNROLL
			for (int n = 0; n < PER_THREAD; n++) {
				i32 unit = unit_of(thread, n), r = first + unit / CHUNKS * 4,
				    dim = unit % CHUNKS * 8;

				UNROLL
				for (int i = 0; i < 4; i++)
					held[n * 4 + i] = load_or_zero(view, r + i, dim, end,
								       begin);
			}
		}

		/* fetch() leaves nothing to do late, see core_mma.h. */
		template <class From, class View>
		METHOD void fetch_ahead(const View &view, i32 first, i32 end)
		{
			fetch<From>(view, first, end);
		}
		template <class From, class View> METHOD void fetch_late(const View &, i32, i32) {}

		/* fetch() and arrive() in one, a unit at a time: few registers, and a wait for
		 * each. */
		template <class From, class View>
		METHOD void copy(const View &view, i32 first, i32 end, i32 begin = FROM_THE_FIRST)
		{
			i32 thread = hidden_lane(thread_id());

			NO_UNROLL
			for (int n = 0; n < PER_THREAD; n++) {
				i32 unit = unit_of(thread, n), r = unit / CHUNKS * 4,
				    c = unit % CHUNKS;
				chunk16 x[4];

				if (SameType<T, From>::value && view.vector) {
					UNROLL
					for (int i = 0; i < 4; i++)
						x[i] = load_or_zero(view, first + r + i, c * 8, end,
								    begin);
				} else {
					NO_UNROLL
					for (int i = 0; i < 4; i++) {
						i32 row = first + r + i, until = end;

						if constexpr (Chooses<View>::value)
							until = view.end_of(row, end);
						keep(x, i,
						     load_chunk<T, From>(view, row, c * 8,
									 row < until &&
										 row >= begin));
					}
				}
				put(x, r, c);
			}
			step();
		}

		/* x[n] = c. An array that is indexed at run time would go to memory. */
		template <int COUNT>
		METHOD static void keep(chunk16 (&x)[COUNT], int n, const chunk16 &c)
		{
			UNROLL
			for (int m = 0; m < COUNT; m++)
				UNROLL
				for (int w = 0; w < 4; w++)
					x[m].w[w] = m == n ? c.w[w] : x[m].w[w];
		}

		/* Threads without a unit of their own repeat one that exists. */
		METHOD static i32 unit_of(i32 thread, int n)
		{
			i32 unit = thread + n * THREADS;

			return UNITS % THREADS == 0 ? unit : min_of(unit, UNITS - 1);
		}

		/* Any strides, any type: a loop that is small rather than fast. */
		template <class From, class View>
		METHOD void fetch_slowly(const View &view, i32 first, i32 end, i32 begin)
		{
			i32 thread = hidden_lane(thread_id());

			NO_UNROLL
			for (int n = 0; n < PER_THREAD * 4; n++) {
				i32 unit = unit_of(thread, n / 4),
				    row = first + unit / CHUNKS * 4 + n % 4, until = end;

				if constexpr (Chooses<View>::value)
					until = view.end_of(row, end);
				keep(held, n, load_chunk<T, From>(view, row, unit % CHUNKS * 8,
								  row < until && row >= begin));
			}
		}

		METHOD void arrive()
		{
			i32 thread = hidden_lane(thread_id());

			UNROLL
			for (int n = 0; n < PER_THREAD; n++) {
				i32 unit = thread + n * THREADS;

				if (UNITS % THREADS != 0 && unit >= UNITS)
					break;
				put(held + n * 4, unit / CHUNKS * 4, unit % CHUNKS);
			}
			step();
		}

		METHOD void put(const chunk16 *x, i32 r, i32 c)
		{
			UNROLL
			for (int i = 0; i < 4 && BY_ROWS; i++)
				*(chunk16 *)(lds + (r + i) * ROW_STRIDE + c * 16) = x[i];
			UNROLL
			for (int w = 0; w < 4 && BY_COLUMNS; w++) {
				char *to = lds + COLUMNS_AT + (c * 8 + 2 * w) * COLUMN_STRIDE +
					   r * 2;
				u32 a = x[0].w[w], b = x[1].w[w], d = x[2].w[w], e = x[3].w[w];

				*(chunk8 *)to = chunk8{
					{(a & 0xffff) | b << 16, (d & 0xffff) | e << 16}};
				*(chunk8 *)(to + COLUMN_STRIDE) = chunk8{
					{a >> 16 | (b & 0xffff0000u), d >> 16 | (e & 0xffff0000u)}};
			}
		}

		struct RowReader {
			const char *at;

			METHOD RowReader(const Tile &t, i32 row)
			{
				at = t.lds + (row + line()) * ROW_STRIDE + first_k() * 2;
			}
			METHOD Operand operator()(int tile, int k) const
			{
				return read(at + tile * 16 * ROW_STRIDE + k * 32);
			}
		};
		struct ColumnReader {
			const char *at;

			METHOD ColumnReader(const Tile &t, i32 row)
			{
				at = t.lds + COLUMNS_AT + line() * COLUMN_STRIDE +
				     (row + first_k()) * 2;
			}
			METHOD Operand operator()(int tile, int d) const
			{
				return read(at + tile * 32 + d * 16 * COLUMN_STRIDE);
			}
		};
	};

#if FMHA_CORE == FMHA_CORE_MFMA
	/* The stationary operand: in registers, straight from memory. */
	template <int TILES, int WAVE_ROWS, int COLS, int THREADS> struct Stationary {
		static const int BYTES = 0, STEPS = COLS / 16;
		Operand held[TILES][STEPS];
		i32 wave_row;

		METHOD void place(char *, i32 wave) { wave_row = wave * TILES * 16; }

		template <class From, class View>
		METHOD void fetch(const View &view, i32 first, i32 end)
		{
			i32 row = first + wave_row + line();

			if (!SameType<T, From>::value || !view.vector) {
				fetch_slowly<From>(view, row, end);
				return;
			}
			UNROLL
			for (int n = 0; n < TILES * STEPS; n++) {
				i32 dim = n % STEPS * 16 + first_k();
				chunk16 c = load_or_zero(view, row + n / STEPS * 16, dim & ~7, end);

				held[n / STEPS][n % STEPS] = half_of(c, dim);
			}
		}

		METHOD static Operand half_of(const chunk16 &c, i32 dim)
		{
			return Operand{{dim & 4 ? c.w[2] : c.w[0], dim & 4 ? c.w[3] : c.w[1]}};
		}

		template <class From, class View>
		METHOD void fetch_slowly(const View &view, i32 row, i32 end)
		{
			NO_UNROLL
			for (int n = 0; n < TILES * STEPS; n++) {
				i32 r = row + n / STEPS * 16, dim = n % STEPS * 16 + first_k();
				Operand x = half_of(load_chunk<T, From>(view, r, dim & ~7, r < end),
						    dim);

				UNROLL
				for (int m = 0; m < TILES * STEPS; m++)
					UNROLL
					for (int w = 0; w < WORDS; w++)
						held[m / STEPS][m % STEPS].r[w] =
							m == n ? x.r[w]
							       : held[m / STEPS][m % STEPS].r[w];
			}
		}
		METHOD void arrive() {}

		struct Reader {
			const Stationary &s;

			METHOD Reader(const Stationary &from) : s(from) {}
			METHOD Operand operator()(int m, int k) const { return s.held[m][k]; }
		};
	};
#else
	/* In LDS: with one register file for everything, operands of 32 lanes would take too much. */
	template <int TILES, int WAVE_ROWS, int COLS, int THREADS>
	struct Stationary
		: StationaryInLds<Tile<WAVE_ROWS * TILES * 16, COLS, THREADS, true, false>, TILES> {
		typedef Tile<WAVE_ROWS * TILES * 16, COLS, THREADS, true, false> Store;

		template <class From, class View>
		METHOD void fetch(const View &view, i32 first, i32 end)
		{
			this->tile.template copy<From>(view, first, end);
		}
		METHOD void arrive() {}

		struct Reader : Store::RowReader {
			METHOD Reader(const Stationary &s) : Store::RowReader(s.tile, s.wave_row) {}
		};
	};
#endif
};

/*
 * e4m3 as it is, where matrix units multiply it: accumulators as above, and eight values of an
 * operand a lane. A product sums 32 of them on CDNA, two tiles' columns, and 16 on RDNA4. In words
 * of gfx942's own e4m3: slab.h.
 */
struct AmdBytes {
	u32 r[2];
};
template <> struct CoreAmd<E4M3> : CoreAmd<BF16> {
	typedef E4M3 Type;
	typedef AmdBytes Operand;

	METHOD static void multiply(Acc &c, const Operand &a, const Operand &b)
	{
		c = __builtin_bit_cast(Acc, multiply_words(b, a, __builtin_bit_cast(AmdFloats, c)));
	}

	/* C += A factor. As vectors, or clang leaves wide accumulators in memory, in pieces that it
	 * found itself. */
	METHOD static void add_scaled(Acc &c, const Acc &a, float factor)
	{
		c = __builtin_bit_cast(Acc, __builtin_bit_cast(AmdFloats, c) +
						    __builtin_bit_cast(AmdFloats, a) * factor);
	}

	/* A template, since not every arch has the instruction. */
	template <class Words>
	METHOD static AmdFloats multiply_words(const Words &x, const Words &y, AmdFloats c)
	{
#if FMHA_CORE == FMHA_CORE_MFMA
		return __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(
			__builtin_bit_cast(long, x), __builtin_bit_cast(long, y), c, 0, 0, 0);
#elif FMHA_CORE == FMHA_CORE_WMMA12
		typedef int Pair __attribute__((ext_vector_type(2)));

		return __builtin_amdgcn_wmma_f32_16x16x16_fp8_fp8_w32_gfx12(
			__builtin_bit_cast(Pair, x), __builtin_bit_cast(Pair, y), c);
#endif
	}
};

#endif
