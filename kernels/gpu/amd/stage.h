/* SPDX-License-Identifier: MIT */
/*
 * stage.h: what AMD's own loops, fwd_amd.h and bwd_amd.h, are made of: how a tile gets from memory
 * by way of registers into LDS, by rows, transposed, or both; products of such tiles with operands
 * that a wave keeps; the way out.
 */
#ifndef FMHA_GPU_STAGE_H
#define FMHA_GPU_STAGE_H

#include "buffer.h"
#include "slab.h"

/* Values of 8 bits are multiplied as they are; their factors, one a head, are the scores' and the
 * result's. */
template <class C, class OwnCore = SlabCore<typename C::Element>> struct AmdConfig : C {
	typedef OwnCore Core;
	static const bool FACTORS = C::DESCALE, DESCALE = false;
};

/* With two waves a SIMD or more matrix instructions take the plain registers, and nothing has to be
 * moved. */
#define FMHA_OWN_ENTRY
#define FMHA_STAGED_ENTRY(Arguments, call)                                                                   \
	extern "C" __global__ __attribute__((amdgpu_flat_work_group_size(Config::THREADS, Config::THREADS), \
					     amdgpu_waves_per_eu(Config::BLOCKS_PER_CU *Config::THREADS / FMHA_WAVE / 4))) void \
	FMHA_ENTRY(const Arguments args)                                                                     \
	{                                                                                                    \
		FMHA_LDS;                                                                                    \
		call;                                                                                        \
	}

/* A kernel's only argument, read from memory where it is used: what a loop seldom needs is not kept
 * for it. */
template <class Arguments> DEV const Arguments &arguments_anew()
{
	typedef const Arguments __attribute__((address_space(4))) Constant;
	Constant *p = (Constant *)__builtin_amdgcn_kernarg_segment_ptr();

	asm volatile("" : "+s"(p));
	return *(const Arguments *)p;
}

/*
 * Where rows of a tile come from: a buffer, which may begin `skip` bytes later than they do: what
 * lies before it is not there, either. A tile in pages has one for each run of RUN rows, within
 * which the rows lie that a wave fetches at once.
 */
struct Piece {
	Buffer buffer;
	u32 skip;
};
template <int THREADS, int PER_ROW> DEV i32 first_row_of_wave(int n)
{
	return (wave_id() * FMHA_WAVE + n * THREADS) / PER_ROW;
}

/* By rows: chunks of 16 bytes. */
template <int ROWS, int COLS, int THREADS, int RUN = ROWS> struct RowStage {
	typedef SlabStore<ROWS, COLS> Store;
	static const int BYTES = Store::BYTES;
	static const int CHUNKS = Store::UNITS, COUNT = (ROWS * CHUNKS + THREADS - 1) / THREADS;
	u32 from[COUNT], to[COUNT];
	chunk16 held[COUNT];

	METHOD static bool is_there(int n)
	{
		return ROWS * CHUNKS % THREADS == 0 || index(n) < ROWS * CHUNKS;
	}
	METHOD static i32 index(int n) { return thread_id() + n * THREADS; }

	METHOD void begin(u32 row_bytes, i32 hdim)
	{
		UNROLL
		for (int n = 0; n < COUNT; n++) {
			i32 row = index(n) / CHUNKS, chunk = index(n) % CHUNKS;

			from[n] = is_there(n) && chunk * 16 < hdim * SLAB_ELEMENT
					  ? row % RUN * row_bytes + chunk * 16
					  : BUFFER_NOWHERE;
			to[n] = Store::at(row, chunk);
		}
	}

	/* First row of the run that a wave's n-th rows lie in. */
	METHOD static i32 run_of(int n)
	{
		return RUN == ROWS ? 0 : first_row_of_wave<THREADS, CHUNKS>(n) / RUN * RUN;
	}

	/* piece(n): of the wave's n-th rows. */
	template <class Pieces> METHOD void fetch(const Pieces &piece)
	{
		UNROLL
		for (int n = 0; n < COUNT; n++)
			held[n] = piece(n).buffer.load16(from[n]);
	}

	METHOD void arrive(char *lds)
	{
		UNROLL
		for (int n = 0; n < COUNT; n++)
			to_slab_words(held[n].w);
		UNROLL
		for (int n = 0; n < COUNT; n++)
			if (is_there(n))
				*(chunk16 *)(lds + to[n]) = held[n];
	}
};

/* Transposed, and BY_ROWS behind that: four rows of four columns a thread and turn. FEW_OFFSETS:
 * where registers are dear, of their offsets the first is kept. */
template <int ROWS, int COLS, int THREADS, bool BY_ROWS, int RUN = ROWS, bool FEW_OFFSETS = false>
struct ColumnStage {
	typedef SlabStore<COLS, ROWS> Columns;
	typedef SlabStore<ROWS, COLS> Rows;
	static const int ROWS_AT = Columns::BYTES,
			 BYTES = Columns::BYTES + (BY_ROWS ? Rows::BYTES : 0);
	static const int GROUPS = COLS / 4, UNITS = ROWS / 4 * GROUPS,
			 COUNT = (UNITS + THREADS - 1) / THREADS;
	/* Eight lanes of sixteen write the odd one of two columns first, so that the others' banks
	 * are left to them. */
	static const bool BY_TURNS = FMHA_CORE == FMHA_CORE_MFMA && Columns::SPAN == 4 &&
				     GROUPS % 16 == 0 && THREADS % GROUPS == 0;
	u32 from[COUNT][FEW_OFFSETS ? 1 : 4], to[COUNT][4], to_rows[COUNT][4];
	u32 step;	/* FEW_OFFSETS: bytes of a row */
	u32 halves[2]; /* of words that a column's even and odd turn take */
	chunk8 held[COUNT][4];

	METHOD static i32 index(int n) { return thread_id() + n * THREADS; }
	METHOD static bool is_there(int n) { return UNITS % THREADS == 0 || index(n) < UNITS; }
	/* Whether the lane begins with the odd ones. */
	METHOD static i32 odd() { return BY_TURNS ? thread_id() / 8 % 2 : 0; }

	METHOD void begin(u32 row_bytes, i32 hdim)
	{
		const u32 LOW = 0x05040100, HIGH = 0x07060302;

		step = row_bytes;
		halves[0] = odd() ? HIGH : LOW;
		halves[1] = odd() ? LOW : HIGH;
		UNROLL
		for (int n = 0; n < COUNT; n++) {
			i32 dim = index(n) % GROUPS * 4, quad = index(n) / GROUPS;

			UNROLL
			for (int i = 0; i < 4; i++) {
				i32 row = slab_key(quad, i);

				if (!FEW_OFFSETS || i == 0)
					from[n][i] = is_there(n) && dim < hdim
							     ? row % RUN * row_bytes + dim * 2
							     : BUFFER_NOWHERE;
				to[n][i] = Columns::at(dim + (i ^ odd()), quad / 2) + quad % 2 * 8;
				if (BY_ROWS)
					to_rows[n][i] = ROWS_AT + Rows::at(row, dim / 8) +
							dim % 8 * 2;
			}
		}
	}

	METHOD static i32 run_of(int n)
	{
		return RUN == ROWS ? 0 : first_row_of_wave<THREADS, GROUPS>(n) * 4 / RUN * RUN;
	}

	template <class Pieces> METHOD void fetch(const Pieces &piece)
	{
		UNROLL
		for (int n = 0; n < COUNT; n++) {
			const Piece p = piece(n);
			u32 first = FEW_OFFSETS ? (u32)hidden_lane((i32)from[n][0]) : 0;

			UNROLL
			for (int i = 0; i < 4; i++)
				held[n][i] = p.buffer.load8(
					(FEW_OFFSETS ? first + slab_key(0, i) * step : from[n][i]) -
					p.skip);
		}
	}

	METHOD void arrive(char *lds) const
	{
		UNROLL
		for (int n = 0; n < COUNT; n++)
			UNROLL
			for (int i = 0; i < 4; i++) {
				if (!is_there(n))
					continue;
				*(chunk8 *)(lds +
					    to[n][i]) = chunk8{{column(n, 0, i), column(n, 2, i)}};
				if (BY_ROWS)
					*(chunk8 *)(lds + to_rows[n][i]) = held[n][i];
			}
	}

	/* The lane's i-th column of two rows from `row` on. */
	METHOD u32 column(int n, int row, int i) const
	{
		return __builtin_amdgcn_perm(held[n][row + 1].w[i / 2], held[n][row].w[i / 2],
					     halves[i % 2]);
	}
};

/* Word i becomes bytes i of all four. */
DEV void turn_bytes(u32 (&x)[4])
{
	const u32 EVEN = 0x06020400, ODD = 0x07030501, LOW = 0x05040100, HIGH = 0x07060302;
	u32 even0 = __builtin_amdgcn_perm(x[1], x[0], EVEN),
	    odd0 = __builtin_amdgcn_perm(x[1], x[0], ODD);
	u32 even2 = __builtin_amdgcn_perm(x[3], x[2], EVEN),
	    odd2 = __builtin_amdgcn_perm(x[3], x[2], ODD);

	x[0] = __builtin_amdgcn_perm(even2, even0, LOW);
	x[1] = __builtin_amdgcn_perm(odd2, odd0, LOW);
	x[2] = __builtin_amdgcn_perm(even2, even0, HIGH);
	x[3] = __builtin_amdgcn_perm(odd2, odd0, HIGH);
}

/*
 * 8-bit values, transposed: four rows of WIDTH columns a thread and turn, as wide as leaves work
 * for all threads. Bytes change places in blocks of 4 x 4. Lanes side by side have ACROSS columns
 * of 16 rows, as pages have them: they store to most banks.
 */
template <int ROWS, int COLS, int THREADS, int RUN = ROWS> struct ByteColumnStage {
	typedef SlabStore<COLS, ROWS> Columns;
	static const int BYTES = Columns::BYTES;
	static const int SHARE = ROWS * COLS / 4 / THREADS,
			 MOST = RUN == ROWS ? 16 : 4 * COLS / FMHA_WAVE;
	static const int WIDTH = SHARE >= 16 && MOST >= 16 ? 16
				 : SHARE >= 8 && MOST >= 8 ? 8
							   : 4,
			 WORDS = WIDTH / 4;
	static const int GROUPS = COLS / WIDTH, UNITS = ROWS / 4 * GROUPS,
			 COUNT = (UNITS + THREADS - 1) / THREADS;
	static const int ACROSS = RUN != ROWS	    ? FMHA_WAVE / 4
				  : GROUPS % 8 == 0 ? 8
				  : GROUPS % 4 == 0 ? 4
						    : 2;
	static_assert(GROUPS % ACROSS == 0, "rows of a run");
	u32 from[COUNT][4], to[COUNT][WIDTH];
	u32 held[COUNT][4 * WORDS]; /* row by row */

	METHOD static i32 index(int n) { return thread_id() + n * THREADS; }
	METHOD static bool is_there(int n) { return UNITS % THREADS == 0 || index(n) < UNITS; }

	METHOD void begin(u32 row_bytes, i32 hdim)
	{
		UNROLL
		for (int n = 0; n < COUNT; n++) {
			i32 block = index(n) / (ACROSS * 4), i = index(n) / ACROSS % 4,
			    run = block / (GROUPS / ACROSS);
			i32 dim = (block % (GROUPS / ACROSS) * ACROSS + index(n) % ACROSS) * WIDTH;
			i32 quad = run / 2 * 8 + i / 2 * 4 + run % 2 * 2 + i % 2; /* slab_key()'s */

			UNROLL
			for (int i = 0; i < 4; i++)
				from[n][i] = is_there(n) && dim < hdim
						     ? slab_key(quad, i) % RUN * row_bytes + dim
						     : BUFFER_NOWHERE;
			UNROLL
			for (int i = 0; i < WIDTH; i++)
				to[n][i] = Columns::at(dim + i, quad / 4) + quad % 4 * 4;
		}
	}

	template <class Pieces> METHOD void fetch(const Pieces &piece)
	{
		UNROLL
		for (int n = 0; n < COUNT; n++) {
			const Piece p = piece(n);

			UNROLL
			for (int i = 0; i < 4; i++) {
				const auto c = p.buffer.template load<WORDS>(from[n][i] - p.skip);

				UNROLL
				for (int w = 0; w < WORDS; w++)
					held[n][i * WORDS + w] = c.w[w];
			}
		}
	}

	METHOD void arrive(char *lds)
	{
		UNROLL
		for (int n = 0; n < COUNT; n++)
			to_slab_words(held[n]);
		UNROLL
		for (int n = 0; n < COUNT; n++)
			UNROLL
			for (int w = 0; w < WORDS; w++) {
				u32 x[4] = {held[n][w], held[n][WORDS + w], held[n][2 * WORDS + w],
					    held[n][3 * WORDS + w]};

				turn_bytes(x);
				UNROLL
				for (int i = 0; i < 4 && is_there(n); i++)
					*(u32 *)(lds + to[n][w * 4 + i]) = x[i];
			}
	}

	METHOD static i32 run_of(int n)
	{
		return RUN == ROWS ? 0 : first_row_of_wave<THREADS, GROUPS>(n) * 4 / RUN * RUN;
	}
};

template <int ROWS, int COLS, int THREADS, int RUN, int ELEMENT> struct ValueStage {
	typedef ColumnStage<ROWS, COLS, THREADS, false, RUN> Type;
};
template <int ROWS, int COLS, int THREADS, int RUN> struct ValueStage<ROWS, COLS, THREADS, RUN, 1> {
	typedef ByteColumnStage<ROWS, COLS, THREADS, RUN> Type;
};

/* SIDE rows from `row` on as the operand that a wave keeps; zero from `end` on. */
template <int STEPS, class View>
DEV void fetch_operand(Slab (&to)[STEPS], const View &view, i32 row, i32 end)
{
	typedef SlabPlace Place;
	u32 row_bytes = (u32)view.stride_seq * SLAB_ELEMENT, width = view.hdim * SLAB_ELEMENT;
	Buffer b = Buffer::rows(view.base + row * view.stride_seq, end - row, Place::SIDE,
				row_bytes, width);

	UNROLL
	for (int s = 0; s < STEPS; s++)
		UNROLL
		for (int i = 0; i < SLAB_READS; i++) {
			u32 at = (s * SLAB_UNITS + Place::unit_of(i) + Place::unit()) * 16;
			chunk16 c = b.load16(at < width ? Place::line() * row_bytes + at
							: BUFFER_NOWHERE);

			UNROLL
			for (int w = 0; w < 4; w++)
				to[s].w[i * 4 + w] = c.w[w];
		}
}

/* What a wave owns of a tensor of COLS columns, read as operands: registers, or PARKED, its rows in
 * LDS. */
template <int COLS, bool PARKED> struct Owned {
	static const int BYTES = 0;
	Slab x[COLS / 16];

	template <class View> METHOD void fetch(char *, const View &view, i32 row, i32 end)
	{
		fetch_operand(x, view, row, end);
	}
	METHOD const Slab &operator[](int d) const { return x[d]; }
};
template <int COLS> struct Owned<COLS, true> {
	typedef SlabPlace Place;
	typedef SlabStore<Place::SIDE, COLS> Store;
	static const int BYTES = Store::BYTES;
	const char *lds;

	/* @at: of this wave alone. */
	template <class View> METHOD void fetch(char *at, const View &view, i32 row, i32 end)
	{
		Slab x[COLS / 16];

		lds = at;
		fetch_operand(x, view, row, end);
		UNROLL
		for (int s = 0; s < COLS / 16; s++)
			UNROLL
			for (int i = 0; i < SLAB_READS; i++)
				*(chunk16 *)(at + Store::at(Place::line(),
							    s * SLAB_UNITS + Place::unit_of(i) +
								    Place::unit())) = chunk16{
					{x[s].w[i * 4], x[s].w[i * 4 + 1], x[s].w[i * 4 + 2],
					 x[s].w[i * 4 + 3]}};
		wave_sync();
	}
	METHOD Slab operator[](int d) const { return typename Store::Reader(lds)(0, d); }
};

/* Accumulators of SIDE columns, 16 by 16. */
template <class Core, int N, int M>
DEV void split_wide(RegTile<Core, 1, N> &to, const typename Core::Wide (&from)[M])
{
	UNROLL
	for (int n = 0; n < N; n++)
		UNROLL
		for (int e = 0; e < Core::E; e++)
			to.t[0][n].x[e] = from[n * 16 / Core::SIDE][n * 16 % Core::SIDE / 2 + e];
}

/* S = B A^T: the scores of the wave's rows, kept as slabs, and the rows of a tile. Waves that
 * multiply go first; others of the SIMD do the rest meanwhile. */
template <class Store, int STEPS, class Core, int TN, class Rows>
DEV void multiply_rows(RegTile<Core, 1, TN> &s, const char *tile, const Rows &rows)
{
	const int WIDE = TN * 16 / Core::SIDE;
	const typename Store::Reader read(tile);
	typename Core::Wide t[WIDE];

	UNROLL
	for (int i = 0; i < WIDE; i++)
		t[i] = typename Core::Wide(0.0f);
	__builtin_amdgcn_s_setprio(1);
	UNROLL
	for (int d = 0; d < STEPS; d++) {
		const Slab own = rows[d];

		UNROLL
		for (int i = 0; i < WIDE; i++)
			Core::multiply(t[i], read(i, d), own);
		Core::step();
	}
	UNROLL
	for (int i = 0; i < WIDE; i++)
		Core::settle(t[i]);
	__builtin_amdgcn_s_setprio(0);
	split_wide(s, t);
}

/* O += P V: P, scores of the wave's rows, is rounded here; the tile of V lies transposed. */
template <class Store, class Rounding = RoundToNearest, class Core, int TN, int DT>
DEV void multiply_columns(typename Core::Wide (&o)[DT], const char *tile,
			  const RegTile<Core, 1, TN> &p)
{
	const typename Store::Reader read(tile);

	__builtin_amdgcn_s_setprio(1);
	UNROLL
	for (int n = 0; n < TN / SLAB_ACCS; n++) {
		const Slab x = Core::template to_slab<Rounding>(p.t[0] + n * SLAB_ACCS);

		UNROLL
		for (int d = 0; d < DT; d++) {
			Core::multiply(o[d], read(d, n), x);
			if (d % 2 == 1)
				Core::step();
		}
	}
	__builtin_amdgcn_s_setprio(0);
}

/* The wave's rows times `factor` (0 for zeros, whatever there is), eight dimensions at a time:
 * put(row, dim, floats). */
template <class Core, int N, class Put>
DEV void rows_out(const RegTile<Core, 1, N> &x, float factor, float *lds, i32 wave, const Put &put)
{
	const int STRIDE = LDS_AMD_OUT + 4, CHUNKS = LDS_AMD_OUT / 8;
	float *stage = lds + wave * Core::SIDE * STRIDE;

	UNROLL
	for (int first = 0; first < N * 16; first += LDS_AMD_OUT) {
		wave_sync();
		UNROLL
		for (int d = 0; d < LDS_AMD_OUT / 16; d++)
			UNROLL
			for (int e = 0; e < Core::E; e++)
				stage[Core::line() * STRIDE + d * 16 + Core::column(e)] =
					factor == 0.0f ? 0.0f
						       : x.t[0][first / 16 + d].x[e] * factor;
		wave_sync();
		UNROLL
		for (int n = 0; n < Core::SIDE * CHUNKS / FMHA_WAVE; n++) {
			i32 index = lane_id() + n * FMHA_WAVE, r = index / CHUNKS,
			    dim = index % CHUNKS * 8;

			put(r, first + dim, stage + r * STRIDE + dim);
		}
	}
}

#endif
