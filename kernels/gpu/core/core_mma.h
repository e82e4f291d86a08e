/* SPDX-License-Identifier: MIT */
/*
 * core_mma.h: NVIDIA tensor cores through mma.sync m16n8k16 (sm_80 and up).
 *
 * A 16 x 16 tile of scores is two n8 accumulators: lane l holds rows l/4 and l/4 + 8, columns
 * 2(l%4), 2(l%4) + 1 and the same + 8. Two neighbouring n8 accumulators, rounded to 16 bits, are
 * exactly the A operand of the next product, so P never leaves the registers.
 *
 * Tiles lie in shared memory row by row; 16-byte chunks are permuted within a row by an XOR with
 * the row number so that ldmatrix (8 rows, one chunk column) touches each bank once.
 */
#ifndef FMHA_GPU_CORE_MMA_H
#define FMHA_GPU_CORE_MMA_H

#include "load.h"

DEV u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

/* What is there comes into L1, and nobody waits for it. */
DEV void prefetch_memory(const void *at)
{
	asm volatile("prefetch.global.L1 [%0];" ::"l"(at));
}

DEV void copy_async_16(u32 to, const void *from, bool valid)
{
	i32 bytes = valid ? 16 : 0; /* the rest of the 16 is filled with zeros */

	asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
		     "r"(bytes));
}

DEV void copy_async_4(u32 to, const void *from, bool valid)
{
	i32 bytes = valid ? 4 : 0; /* else it is filled with zeros */

	asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
		     "r"(bytes));
}

/* TAILS: elements dim .. dim + 7 of a row that lies in words, zero from the row's end on. */
template <class View>
DEV void copy_async_pairs(u32 to, const View &view, i32 row, i32 dim, bool valid)
{
	const typename View::Storage *from = valid && dim < view.hdim ? view.at(row, dim)
								      : view.base;

	UNROLL
	for (int i = 0; i < 4; i++)
		copy_async_4(to + i * 4, from + i * 2, valid && dim + i * 2 < view.hdim);
}

DEV void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
DEV void copy_async_wait() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

struct MmaOperand {
	u32 r[4];
};

DEV MmaOperand load_matrix(u32 address)
{
	MmaOperand x;
	asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
		     : "=r"(x.r[0]), "=r"(x.r[1]), "=r"(x.r[2]), "=r"(x.r[3])
		     : "r"(address));
	return x;
}

DEV MmaOperand load_matrix_transposed(u32 address)
{
	MmaOperand x;
	asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
		     : "=r"(x.r[0]), "=r"(x.r[1]), "=r"(x.r[2]), "=r"(x.r[3])
		     : "r"(address));
	return x;
}

/* Byte offset of a chunk in a tile with rows of COLS 16-bit elements. */
template <int COLS> struct Swizzle {
	static_assert(COLS % 32 == 0, "rows are padded to multiples of 32 elements");
	static const int MASK = COLS % 64 == 0 ? 7 : 3;

	/* Rows this far apart are permuted alike. */
	static const int PERIOD = 8;
	METHOD static i32 key(i32 row) { return COLS % 64 == 0 ? row & 7 : row >> 1 & 3; }
	METHOD static i32 offset(i32 row, i32 chunk)
	{
		return row * (COLS * 2) + ((chunk ^ key(row)) * 16);
	}
};

template <class T> struct MmaType;
template <> struct MmaType<F16> {
	METHOD static void multiply(float *c, const u32 *a, u32 b0, u32 b1)
	{
		asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
			     "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
			     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
			     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
	}
};
template <> struct MmaType<BF16> {
	METHOD static void multiply(float *c, const u32 *a, u32 b0, u32 b1)
	{
		asm volatile(
			"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
			"{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
			: "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
			: "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
	}
};

template <class T> struct CoreMma {
	typedef T Type;
	static const int E = 8, STATS = 2;
	static const bool OWNS_PATCH = true, SHARES_PATCH = false; /* see DropoutTile */
	static const bool VIEWS_IN_LDS = true;
	static const bool FETCH_NEEDS_LDS = true; /* fetch() writes LDS itself */
	template <class Tile> METHOD static constexpr int held_registers() { return 0; }

	struct Acc {
		float x[E];
	};
	typedef MmaOperand Operand;

	METHOD static constexpr int stat(int e) { return e >> 1 & 1; }
	METHOD static i32 stat_row(int s) { return lane_id() / 4 + 8 * s; }
	METHOD static i32 row(int e) { return stat_row(stat(e)); }
	METHOD static i32 column(int e) { return lane_id() % 4 * 2 + (e & 1) + 8 * (e >> 2); }

	METHOD static float row_max(float x)
	{
		x = larger(x, shuffle_xor(x, 1));
		return larger(x, shuffle_xor(x, 2));
	}
	METHOD static float row_sum(float x)
	{
		x += shuffle_xor(x, 1);
		return x + shuffle_xor(x, 2);
	}

	METHOD static void step() {}
	METHOD static i32 anew(i32 row) { return row; }
	METHOD static void settle(Acc &) {}

	METHOD static Operand to_operand(const Acc &c)
	{
		Operand a;
		UNROLL
		for (int i = 0; i < 4; i++)
			a.r[i] = T::pack2(c.x[2 * i], c.x[2 * i + 1]);
		return a;
	}

	/* One word a thread on its way to LDS; there after a tile's arrive(). 0 when !valid. */
	METHOD static void send_word(float *to, const float *from, bool valid)
	{
		copy_async_4(shared_address(to), from, valid);
	}
	METHOD static void send_done() { copy_async_commit(); }

	/* C[16 x 16] += A[16 x 16 of k] B[16 x 16 of k]^T */
	METHOD static void multiply(Acc &c, const Operand &a, const Operand &b)
	{
		MmaType<T>::multiply(c.x, a.r, b.r[0], b.r[1]);
		MmaType<T>::multiply(c.x + 4, a.r, b.r[2], b.r[3]);
	}

	/* A tile in shared memory that any wave reads, by rows or by columns. */
	template <int ROWS, int COLS, int THREADS, bool BY_ROWS, bool BY_COLUMNS> struct Tile {
		static const int BYTES = lds_tile(FMHA_CORE, ROWS, COLS, BY_ROWS, BY_COLUMNS);
		typedef Swizzle<COLS> S;
		char *lds;

		METHOD void place(char *at) { lds = at; }

		/* Rows first .. first + ROWS - 1 of the view; zero before `begin` and from `end`
		 * on. The LDS must be free; what is fetched is there after arrive() and a barrier. */
		template <class From, class View>
		METHOD void fetch(const View &view, i32 first, i32 end, i32 begin = FROM_THE_FIRST)
		{
			fetch_ahead<From>(view, first, end, begin);
			fetch_late<From>(view, first, end, begin);
		}

		/* The part of fetch() that leaves a copy under way, and the part that does the work
		 * itself: the latter wants registers that a block in the middle of its products has
		 * not. One of the two does nothing. */
		template <class From, class View>
		METHOD void fetch_late(const View &view, i32 first, i32 end,
				       i32 begin = FROM_THE_FIRST)
		{
			if (!SameType<T, From>::value || !(view.vector || (TAILS && view.pairs)))
				fetch_slowly<From>(view, first, end, begin);
		}
		template <class From, class View>
		METHOD void fetch_ahead(const View &view, i32 first, i32 end,
					i32 begin = FROM_THE_FIRST)
		{
			const int CHUNKS = COLS / 8, TOTAL = ROWS * CHUNKS;
			u32 base = shared_address(lds);

			if (TAILS && SameType<T, From>::value && !view.vector && view.pairs)
				return fetch_pairs(view, first, end, begin);
			if (!SameType<T, From>::value || !view.vector)
				return;
			/* Hidden, so that addresses are made anew each time instead of kept. */
			i32 thread = thread_id();
			asm volatile("" : "+r"(thread));
			/* Lanes beyond a row's chunks stay idle, so that a thread keeps its column;
			 * its rows are permuted in PHASES ways. */
			/* rows a pass */
			const int WIDTH = power_of_2_from(CHUNKS), STEP = THREADS / WIDTH;
			const int PHASES = STEP > 0 && STEP < S::PERIOD ? S::PERIOD / STEP : 1;
			if constexpr (STEP > 0 && PHASES * STEP % S::PERIOD == 0 &&
				      View::CONTIGUOUS) {
				i32 r = thread / WIDTH, c = thread % WIDTH;
				const typename From::Storage *from = view.at(first + r, c * 8);
				i32 n_valid = c * 8 < view.hdim ? end - first - r : 0;
				i32 n_skip = begin - first - r;
				u32 to[PHASES];

				UNROLL
				for (int n = 0; n < PHASES; n++)
					to[n] = base + S::offset(r + n * STEP, c);
				UNROLL
				for (int n = 0; n < (ROWS + STEP - 1) / STEP; n++) {
					if ((ROWS % STEP != 0 && r + n * STEP >= ROWS) ||
					    (WIDTH != CHUNKS && c >= CHUNKS))
						break;
					/* Where nothing is copied the address does not matter. */
					copy_async_16(
						to[n % PHASES] +
							n / PHASES * (PHASES * STEP * COLS * 2),
						from,
						n * STEP < n_valid && (begin == FROM_THE_FIRST ||
								       n * STEP >= n_skip));
					from += STEP * view.stride_seq;
				}
			} else {
				UNROLL
				for (int n = 0; n < (TOTAL + THREADS - 1) / THREADS; n++) {
					i32 index = thread + n * THREADS;
					i32 r = index / CHUNKS, c = index % CHUNKS;
					i32 until = end;

					if constexpr (Chooses<View>::value)
						until = view.end_of(first + r, end);
					bool valid = first + r < until && first + r >= begin &&
						     c * 8 < view.hdim;
					const typename From::Storage *from = view.base;

					if (TOTAL % THREADS != 0 && index >= TOTAL)
						break;
					if (valid)
						from = view.at(first + r, c * 8);
					copy_async_16(base + S::offset(r, c), from, valid);
				}
			}
			copy_async_commit();
		}

		/* TAILS: rows that lie in words. */
		template <class View>
		METHOD void fetch_pairs(const View &view, i32 first, i32 end, i32 begin)
		{
			const int CHUNKS = COLS / 8, TOTAL = ROWS * CHUNKS;
			u32 base = shared_address(lds);

			NO_UNROLL
			for (i32 index = thread_id(); index < TOTAL; index += THREADS) {
				i32 r = index / CHUNKS, c = index % CHUNKS, row = first + r;
				i32 until = end;

				if constexpr (Chooses<View>::value)
					until = view.end_of(row, end);
				copy_async_pairs(base + S::offset(r, c), view, row, c * 8,
						 row < until && row >= begin);
			}
			copy_async_commit();
		}

		/* Any strides, any type. */
		template <class From, class View>
		METHOD void fetch_slowly(const View &view, i32 first, i32 end, i32 begin)
		{
			const int CHUNKS = COLS / 8, TOTAL = ROWS * CHUNKS;

			NO_UNROLL
			for (i32 index = thread_id(); index < TOTAL; index += THREADS) {
				i32 r = index / CHUNKS, c = index % CHUNKS;
				i32 until = end;

				if constexpr (Chooses<View>::value)
					until = view.end_of(first + r, end);
				*(chunk16 *)(lds + S::offset(r, c)) = load_chunk<T, From>(
					view, first + r, c * 8,
					first + r < until && first + r >= begin);
			}
		}

		METHOD void arrive() { copy_async_wait(); }

		/*
		 * Readers of 16 x 16 pieces. Row and chunk of a lane's address are fixed but for
		 * constants, and rows start at multiples of the swizzle's span, so that a step
		 * along the row is one XOR and a step across rows an immediate offset. `at` is
		 * hidden from the compiler, which would otherwise keep every address in a register
		 * of its own.
		 */
		struct Reader {
			u32 at;

			METHOD Reader(const char *lds, i32 row, i32 chunk)
			{
				at = shared_address(lds) + S::offset(row, chunk);
				asm volatile("" : "+r"(at));
			}
			METHOD u32 address(int tile, int step) const
			{
				return (at ^ ((2 * step & S::MASK) * 16)) +
				       (2 * step & ~S::MASK) * 16 + tile * (16 * COLS * 2);
			}
		};

		/* The A operand: rows 16 tile .., elements 16k .. */
		struct StationaryReader : Reader {
			METHOD StationaryReader(const Tile &t, i32 row)
			    : Reader(t.lds, row + lane_id() % 16, lane_id() / 16)
			{
			}
			METHOD Operand operator()(int tile, int k) const
			{
				return load_matrix(Reader::address(tile, k));
			}
		};
		/* The B operand: n over rows, k over elements. */
		struct RowReader : Reader {
			METHOD RowReader(const Tile &t, i32 row)
				: Reader(t.lds, row + lane_id() % 8 + lane_id() / 16 * 8,
					 lane_id() / 8 % 2)
			{
			}
			METHOD Operand operator()(int tile, int k) const
			{
				return load_matrix(Reader::address(tile, k));
			}
		};
		/* The B operand: k over rows, n over elements. */
		struct ColumnReader : Reader {
			METHOD ColumnReader(const Tile &t, i32 row)
			    : Reader(t.lds, row + lane_id() % 16, lane_id() / 16)
			{
			}
			METHOD Operand operator()(int tile, int d) const
			{
				return load_matrix_transposed(Reader::address(tile, d));
			}
		};
	};

	/* In shared memory, to spare registers. */
	template <int TILES, int WAVE_ROWS, int COLS, int THREADS>
	struct Stationary
		: StationaryInLds<Tile<WAVE_ROWS * TILES * 16, COLS, THREADS, true, false>, TILES> {
		typedef Tile<WAVE_ROWS * TILES * 16, COLS, THREADS, true, false> Store;

		struct Reader : Store::StationaryReader {
			METHOD Reader(const Stationary &s)
				: Store::StationaryReader(s.tile, s.wave_row)
			{
			}
		};
	};
};

#endif
