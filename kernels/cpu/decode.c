/* SPDX-License-Identifier: MIT */
/*
 * decode.c: attention forward for few rows and many keys ("cpu_decode"), compiled once a level.
 *
 * With one or a few rows a key head, every element of K and V is used a handful of times: reading
 * them is the work. So nothing is packed. Each key is read where it lies, once, for all rows of all
 * query heads that share it, and converted in registers:
 *
 *   phase 0, a task a chunk of keys:    S = Q K^T by dot products along the head, four keys at a
 *                                       time; P, its sum, and O = P V; partial results to the
 *                                       workspace
 *   phase 1, a task a group of heads:   the chunks are put together
 *
 * Memory is fast only when it is read in order. Where the heads of one key lie side by side, a task
 * takes all of them, a few keys at a time, and asks for the next keys in the order in which they
 * lie.
 */
#include <stdlib.h>

#define OPERAND_FLOAT
#include "pack.h"
#include "partials.h"
#include "tile.h"

#define HEAD_ROWS CPU_DECODE_ROWS /* of one key head, at most */
#define ROWS      64              /* rows of a task, at most */
#define CHUNK     CPU_DECODE_KEYS /* keys a task */
#define STEP      16              /* keys that all heads go through before the next ones */
#define KEYS      4               /* keys side by side in a dot product */
#define DIMS      4               /* vectors of O held in registers */
#define S_STRIDE  (CHUNK + 16)

struct scratch {
	float *q;       /* [ROWS, hdim_q], scaled */
	float *s;       /* [ROWS, S_STRIDE] */
	float *temp;    /* [S_STRIDE] */
	const char **k; /* [CHUNK + 2 STEP] where keys begin, first head of the task */
	const char **v;
	int64_t *page; /* [CHUNK] */
};

struct decode {
	const struct abi_fwd_args *a;
	struct view_sequence s;
	struct score_ops ops;
	struct scratch scratch;
	int32_t head, n_heads; /* of K and V */
	int32_t head_rows;     /* rows of each of them */
	struct score_row row[ROWS];
	int32_t begin, end;                 /* columns that some row sees */
	int same;                           /* all rows see the same */
	int64_t k_head_bytes, v_head_bytes; /* from a head to the next */
};

static int32_t group_size(const struct abi_fwd_args *a)
{
	return a->nhead_q / a->nhead_k;
}

/* Key heads of a task: all that its rows allow where heads lie closer together than keys, else one.
 */
static int32_t heads_per_task(const struct abi_fwd_args *a)
{
	int64_t rows = max_head_rows(a), most = rows > 0 ? ROWS / rows : ROWS;

	if (llabs(a->k.stride_head) > llabs(a->k.stride_seq))
		return 1;
	return most < a->nhead_k ? (int32_t)most : a->nhead_k;
}

static int64_t head_groups(const struct abi_fwd_args *a)
{
	return (a->nhead_k + heads_per_task(a) - 1) / heads_per_task(a);
}

static int32_t n_splits(const struct abi_fwd_args *a)
{
	return a->n_splits > 0 ? a->n_splits : 1;
}

/* Keys of one split. */
static int64_t split_keys(const struct abi_fwd_args *a)
{
	return a->n_splits > 0 ? a->split_size : a->sequences.seqlen_k_max;
}

static int64_t chunks_per_split(const struct abi_fwd_args *a)
{
	int64_t chunks = (split_keys(a) + CHUNK - 1) / CHUNK;

	return chunks > 0 ? chunks : 1;
}

static size_t align_bytes(size_t bytes)
{
	return (bytes + 63) / 64 * 64;
}

static size_t scratch_init(struct scratch *s, const struct abi_fwd_args *a, void *base)
{
	const size_t bytes[] = {
		ROWS * (size_t)a->hdim_q * sizeof(float),
		ROWS * S_STRIDE * sizeof(float),
		S_STRIDE * sizeof(float),
		(CHUNK + 2 * STEP) * sizeof(char *),
		(CHUNK + 2 * STEP) * sizeof(char *),
		CHUNK * sizeof(int64_t),
	};
	uintptr_t at[7] = {(uintptr_t)base};

	for (int i = 0; i < 6; i++)
		at[i + 1] = at[i] + align_bytes(bytes[i]);
	s->q = (float *)at[0];
	s->s = (float *)at[1];
	s->temp = (float *)at[2];
	s->k = (const char **)at[3];
	s->v = (const char **)at[4];
	s->page = (int64_t *)at[5];
	return at[6] - at[0];
}

static struct partials partials_at(const struct abi_fwd_args *a, void *workspace, int64_t unit)
{
	struct partials p = {.row_floats = a->hdim_v + PARTIALS_NUMBERS};

	p.chunk_floats = p.row_floats * max_head_rows(a) * heads_per_task(a);
	p.at = (float *)workspace + unit * p.chunk_floats;
	return p;
}

static int32_t n_rows(const struct decode *t)
{
	return t->n_heads * t->head_rows;
}

/* The rows of the task, head by head, and what they see of [begin, end). */
static void decode_rows(struct decode *t, int64_t begin, int64_t end)
{
	const struct abi_fwd_args *a = t->a;
	int32_t group = group_size(a);

	begin = begin < t->s.k_len ? begin : t->s.k_len;
	end = end < t->s.k_len ? end : t->s.k_len;
	t->begin = INT32_MAX;
	t->end = 0;
	t->same = 1;
	t->head_rows = t->s.q_len * group;
	for (int32_t r = 0; r < n_rows(t); r++) {
		struct score_row *row = &t->row[r];
		int32_t head = t->head + r / t->head_rows, i = r % t->head_rows;

		*row = score_row_at(&a->band, &t->s, head * group + i % group, i / group,
				    (int32_t)begin, (int32_t)end);
		t->same &= row->lo == t->row[0].lo && row->hi == t->row[0].hi &&
			   row->sink_hi == t->row[0].sink_hi;
		if (score_row_empty(row))
			continue;
		if (score_row_first(row) < t->begin)
			t->begin = score_row_first(row);
		t->end = row->hi > t->end ? row->hi : t->end;
		t->end = row->sink_hi > t->end ? row->sink_hi : t->end;
	}
}

/* Where the keys and values of [begin, end) lie; beyond the end the last one, so that nobody asks
 * whether there is a next one. */
static void decode_addresses(struct decode *t)
{
	const struct abi_fwd_args *a = t->a;
	int32_t n = t->end - t->begin, bytes = dtype_bytes(view_kv_dtype(a)), x = 16 / bytes;
	const char **k = t->scratch.k, **v = t->scratch.v;

	t->k_head_bytes = a->k.stride_head * bytes;
	t->v_head_bytes = a->v.stride_head * bytes;
	for (int32_t j = 0; j < n; j++) {
		int32_t position = t->s.leftpad + t->begin + j;

		k[j] = (const char *)a->k.data +
		       bytes * view_cache_offset(&a->cache, &a->k, &t->s, position, t->head, 0,
						 a->nhead_k, a->hdim_q, x, false);
		v[j] = (const char *)a->v.data +
		       bytes * view_cache_offset(&a->cache, &a->v, &t->s, position, t->head, 0,
						 a->nhead_k, a->hdim_v, x, true);
		if (a->k_descale.per_page || a->v_descale.per_page)
			t->scratch.page[j] = view_page(&a->cache, &t->s, position);
	}
	for (int32_t j = n; j < n + 2 * STEP; j++) {
		k[j] = k[n - 1];
		v[j] = v[n - 1];
	}
}

/* Multiplies a row's columns by the scale factors of head @head. */
static void apply_descale(const struct decode *t, const struct abi_descale *d, int32_t head,
			  float *s)
{
	for (int32_t j = 0; d->data && j < t->end - t->begin; j++)
		s[j] *= view_descale(d, t->s.batch, head, t->s.leftpad + t->begin + j,
				     d->per_page ? t->scratch.page[j] : 0, t->a->cache.page_size);
}

/* The sums of four vectors, side by side. */
static inline __attribute__((always_inline)) void sum_four(float *to, vf a, vf b, vf c, vf d)
{
#if defined(__AVX512F__)
	__m512 ab = _mm512_add_ps(_mm512_unpacklo_ps((__m512)a, (__m512)b),
				  _mm512_unpackhi_ps((__m512)a, (__m512)b));
	__m512 cd = _mm512_add_ps(_mm512_unpacklo_ps((__m512)c, (__m512)d),
				  _mm512_unpackhi_ps((__m512)c, (__m512)d));
	__m512 all = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44),
				   _mm512_shuffle_ps(ab, cd, 0xee));
	__m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));

	_mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#elif defined(__AVX2__)
	__m256 ab = _mm256_add_ps(_mm256_unpacklo_ps((__m256)a, (__m256)b),
				  _mm256_unpackhi_ps((__m256)a, (__m256)b));
	__m256 cd = _mm256_add_ps(_mm256_unpacklo_ps((__m256)c, (__m256)d),
				  _mm256_unpackhi_ps((__m256)c, (__m256)d));
	__m256 all = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44),
				   _mm256_shuffle_ps(ab, cd, 0xee));

	_mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
#else
	to[0] = vf_reduce_add(a);
	to[1] = vf_reduce_add(b);
	to[2] = vf_reduce_add(c);
	to[3] = vf_reduce_add(d);
#endif
}

/*
 * What to ask memory for while head @i works on its STEP keys: as many rows of the next step,
 * counted through all heads of a key before the next key, which is the order in which they lie.
 * @row: where the next step's keys begin.
 */
static inline void next_rows(const char *ask[STEP], const char *const *row, int32_t i,
			     int32_t n_heads, int64_t head_bytes)
{
	int32_t key = i * STEP / n_heads, head = i * STEP % n_heads;

	for (int32_t j = 0; j < STEP; j++) {
		ask[j] = row[key] + head * head_bytes;
		if (++head == n_heads) {
			head = 0;
			key++;
		}
	}
}

/* The lines of @ask that stand for elements [d, d + n): a little at a time, as only a dozen lines
 * can be on their way at once and everything behind them waits. */
static inline __attribute__((always_inline)) void ask_for(const char *ask, int32_t d, int32_t n,
							  const int32_t dtype)
{
	int32_t bytes = dtype_bytes(dtype), at = d * bytes;

	for (int32_t line = (at + 63) / 64 * 64; line < at + n * bytes; line += 64)
		__builtin_prefetch(ask + line);
}

#ifdef __AVX512F__

/* What e4m3's exponent lacks when it is read as f16's: see float_from_e4m3(). */
#define E4M3_FACTOR 256.0f

/*
 * A line of 8 bits: 64 elements as four vectors, e4m3 divided by E4M3_FACTOR, which belongs to the
 * sums. f16 has no NaN where e4m3 has its two: @most collects the largest bytes, and whoever finds
 * a NaN among them puts it where it belongs.
 */
static inline __attribute__((always_inline)) void load_line(vf value[4], const char *p,
							    const int32_t dtype, __m512i *most)
{
	const __m512i no_copy = _mm512_set1_epi16((short)0xbfff);

#pragma GCC unroll 4
	for (int i = 0; i < 4 && dtype == ABI_I8; i++)
		value[i] = vf_load_as(p + 16 * i, ABI_I8);
	if (dtype == ABI_I8)
		return;
	if (dtype == ABI_E4M3)
		*most = _mm512_max_epu8(*most, _mm512_or_si512(_mm512_loadu_si512(p),
							       _mm512_set1_epi8((char)0x80)));
#pragma GCC unroll 2
	for (int i = 0; i < 2; i++) {
		__m256i bytes = _mm256_loadu_si256((const __m256i *)(p + 32 * i));
		__m512i half;

		if (dtype == ABI_E4M3)
			half = _mm512_and_si512(_mm512_slli_epi16(_mm512_cvtepi8_epi16(bytes), 7),
						no_copy);
		else
			half = _mm512_slli_epi16(_mm512_cvtepu8_epi16(bytes), 8);
		value[2 * i] = (vf)_mm512_cvtph_ps(_mm512_castsi512_si256(half));
		value[2 * i + 1] = (vf)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1));
	}
}

static inline int has_nan(__m512i most)
{
	return _mm512_cmpeq_epi8_mask(most, _mm512_set1_epi8((char)0xff)) != 0;
}

static inline int is_fast(int32_t dtype, int32_t hdim)
{
	return (dtype == ABI_E4M3 || dtype == ABI_E5M2 || dtype == ABI_I8) && hdim % 64 == 0;
}

/* S of @rows rows and KEYS keys of 8 bits. */
static inline __attribute__((always_inline)) void dot_lines(float *s, const float *q, int32_t hdim,
							    const char *const *k, int64_t offset,
							    const char *const *ask, const int rows,
							    const int32_t dtype, __m512i *most)
{
	vf sum[4][KEYS];

#pragma GCC unroll 4
	for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
		for (int j = 0; j < KEYS; j++)
			sum[r][j] = (vf){0};
	for (int32_t d = 0; d < hdim; d += 64) {
#pragma GCC unroll 4
		for (int j = 0; j < KEYS; j++) {
			vf key[4];

			load_line(key, k[j] + offset + d, dtype, most);
			__builtin_prefetch(ask[j] + d);
#pragma GCC unroll 4
			for (int i = 0; i < 4; i++)
#pragma GCC unroll 4
				for (int r = 0; r < rows; r++)
					sum[r][j] += vf_load(q + r * hdim + d + i * LANES) * key[i];
		}
	}
#pragma GCC unroll 4
	for (int r = 0; r < rows; r++)
		sum_four(s + r * S_STRIDE, sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
}

/* The scores of a key that holds a NaN. */
static void nan_scores(float *s, int32_t n_rows, const char *key, int32_t hdim)
{
	for (int32_t d = 0; d < hdim; d++)
		for (int32_t r = 0; (key[d] & 0x7f) == 0x7f && r < n_rows; r++)
			s[r * S_STRIDE] = NAN;
}

/* The output of rows that see a value with a NaN. */
static void nan_values(float *o, int64_t o_row, int32_t n_rows, const char *value, int32_t hdim)
{
	for (int32_t d = 0; d < hdim; d++)
		for (int32_t r = 0; (value[d] & 0x7f) == 0x7f && r < n_rows; r++)
			o[r * o_row + d] = NAN;
}

#else
#define E4M3_FACTOR 1.0f

static inline int is_fast(int32_t dtype, int32_t hdim)
{
	(void)dtype, (void)hdim;
	return 0;
}
#endif

/* S of @rows rows and KEYS keys. */
static inline __attribute__((always_inline)) void dot_keys(float *s, const float *q, int32_t hdim,
							   const char *const *k, int64_t offset,
							   const char *const *ask, const int rows,
							   const int32_t dtype)
{
	vf sum[4][KEYS];

#pragma GCC unroll 4
	for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
		for (int j = 0; j < KEYS; j++)
			sum[r][j] = (vf){0};
	for (int32_t d = 0; d < hdim; d += LANES) {
		vf key[KEYS];

#pragma GCC unroll 4
		for (int j = 0; j < KEYS; j++)
			key[j] = vf_load_as(k[j] + offset + d * dtype_bytes(dtype), dtype);
#pragma GCC unroll 4
		for (int j = 0; j < KEYS; j++)
			ask_for(ask[j], d, LANES, dtype);
#pragma GCC unroll 4
		for (int r = 0; r < rows; r++) {
			vf x = vf_load(q + r * hdim + d);

#pragma GCC unroll 4
			for (int j = 0; j < KEYS; j++)
				sum[r][j] += x * key[j];
		}
	}
#pragma GCC unroll 4
	for (int r = 0; r < rows; r++)
		sum_four(s + r * S_STRIDE, sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
}

/* S = Q K^T for one head and columns [j, j + STEP) of the chunk. */
static inline __attribute__((always_inline)) void
head_scores(struct decode *t, int32_t i, int32_t j, const int32_t dtype, const int fast)
{
	int32_t hdim = t->a->hdim_q, n = t->head_rows;
	const float *q = t->scratch.q + i * n * hdim;
	float *s = t->scratch.s + i * n * S_STRIDE + j;
	const char *const *k = t->scratch.k + j;
	int64_t offset = i * t->k_head_bytes;
	const char *ask[STEP];
#ifdef __AVX512F__
	__m512i most = _mm512_setzero_si512();
#define DOT(rows)                                                                                  \
	(fast ? dot_lines(s + r * S_STRIDE + step, q + r * hdim, hdim, k + step, offset,           \
			  ask + step, rows, dtype, &most)                                          \
	      : dot_keys(s + r * S_STRIDE + step, q + r * hdim, hdim, k + step, offset,            \
			 ask + step, rows, dtype))
#else
#define DOT(rows)                                                                                  \
	dot_keys(s + r * S_STRIDE + step, q + r * hdim, hdim, k + step, offset, ask + step, rows,  \
		 dtype)
#endif

	next_rows(ask, k + STEP, i, t->n_heads, t->k_head_bytes);
	for (int32_t step = 0; step < STEP; step += KEYS) {
		int32_t r = 0;

		for (; r + 4 <= n; r += 4)
			DOT(4);
		for (; r + 2 <= n; r += 2)
			DOT(2);
		if (r < n)
			DOT(1);
	}
#undef DOT
#ifdef __AVX512F__
	for (int32_t step = 0; fast && has_nan(most) && step < STEP; step++)
		nan_scores(s + step, n, k[step] + offset, hdim);
#else
	(void)fast;
#endif
}

static inline __attribute__((always_inline)) void scores_as(struct decode *t, const int32_t dtype,
							    const int fast)
{
	for (int32_t j = 0; j < t->end - t->begin; j += STEP)
		for (int32_t i = 0; i < t->n_heads; i++)
			head_scores(t, i, j, dtype, fast);
}

/* O += P V for @rows rows, @vectors vectors of the head, @n keys. */
static inline __attribute__((always_inline)) void
add_values(float *o, int64_t o_row, const float *p, const char *const *v, int64_t offset,
	   const char *const *ask, int32_t d, int32_t n, const int rows, const int vectors,
	   const int32_t dtype, const int fast)
{
	vf sum[4][DIMS];
#ifdef __AVX512F__
	__m512i most = _mm512_setzero_si512();
#endif

#pragma GCC unroll 4
	for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
		for (int i = 0; i < vectors; i++)
			sum[r][i] = vf_load(o + r * o_row + d + i * LANES);
	for (int32_t j = 0; j < n; j++) {
		vf value[DIMS];

#ifdef __AVX512F__
		if (fast)
			load_line(value, v[j] + offset + d, dtype, &most);
#endif
#pragma GCC unroll 4
		for (int i = 0; i < vectors && !fast; i++)
			value[i] = vf_load_as(v[j] + offset + (d + i * LANES) * dtype_bytes(dtype),
					      dtype);
		ask_for(ask[j], d, vectors * LANES, dtype);
#pragma GCC unroll 4
		for (int r = 0; r < rows; r++) {
			vf x = vf_set1(p[r * S_STRIDE + j]);

#pragma GCC unroll 4
			for (int i = 0; i < vectors; i++)
				sum[r][i] += x * value[i];
		}
	}
#pragma GCC unroll 4
	for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
		for (int i = 0; i < vectors; i++)
			vf_store(o + r * o_row + d + i * LANES, sum[r][i]);
#ifdef __AVX512F__
	for (int32_t j = 0; fast && has_nan(most) && j < n; j++)
		nan_values(o + d, o_row, rows, v[j] + offset + d, vectors * LANES);
#endif
}

static inline __attribute__((always_inline)) void
add_values_rows(float *o, int64_t o_row, const float *p, const char *const *v, int64_t offset,
		const char *const *ask, int32_t n, int32_t hdim, const int rows,
		const int32_t dtype, const int fast)
{
	int32_t d = 0;

	for (; d + DIMS * LANES <= hdim; d += DIMS * LANES)
		add_values(o, o_row, p, v, offset, ask, d, n, rows, DIMS, dtype, fast);
	for (; d < hdim; d += LANES)
		add_values(o, o_row, p, v, offset, ask, d, n, rows, 1, dtype, 0);
}

/* O += P V for rows [first, first + n_rows) of head @i over columns [lo, hi) of the chunk. */
static inline __attribute__((always_inline)) void
head_values(struct decode *t, struct partials out, int32_t i, int32_t first, int32_t n, int32_t lo,
	    int32_t hi, const char *const *ask, const int32_t dtype, const int fast)
{
	const char *const *v = t->scratch.v + lo;
	int64_t offset = i * t->v_head_bytes;
	int32_t r = first + i * t->head_rows, end = r + n, hdim = t->a->hdim_v;
	float *o = out.at + r * out.row_floats, *p = t->scratch.s + r * S_STRIDE + lo;

	for (; r + 4 <= end; r += 4, o += 4 * out.row_floats, p += 4 * S_STRIDE)
		add_values_rows(o, out.row_floats, p, v, offset, ask, hi - lo, hdim, 4, dtype,
				fast);
	for (; r + 2 <= end; r += 2, o += 2 * out.row_floats, p += 2 * S_STRIDE)
		add_values_rows(o, out.row_floats, p, v, offset, ask, hi - lo, hdim, 2, dtype,
				fast);
	if (r < end)
		add_values_rows(o, out.row_floats, p, v, offset, ask, hi - lo, hdim, 1, dtype,
				fast);
}

/* Row @r of every head (all rows when they see the same) over exactly the columns it sees within
 * [j, j + STEP): a value that is not finite stays where it belongs. */
static inline __attribute__((always_inline)) void step_values(struct decode *t, struct partials out,
							      int32_t i, int32_t j,
							      const int32_t dtype, const int fast)
{
	int32_t n = t->same ? t->head_rows : 1;
	const char *ask[STEP];

	next_rows(ask, t->scratch.v + j + STEP, i, t->n_heads, t->v_head_bytes);
	for (int32_t r = 0; r < t->head_rows; r += n) {
		const struct score_row *row = &t->row[i * t->head_rows + r];
		const int32_t ranges[2][2] = {{row->sink_lo, row->sink_hi}, {row->lo, row->hi}};

		for (int k = 0; k < 2; k++) {
			int32_t lo = clamp_i64(ranges[k][0] - (int64_t)t->begin, j, j + STEP);
			int32_t hi = clamp_i64(ranges[k][1] - (int64_t)t->begin, j, j + STEP);

			if (lo < hi)
				head_values(t, out, i, r, n, lo, hi, ask + lo - j, dtype, fast);
		}
	}
}

static inline __attribute__((always_inline)) void values_as(struct decode *t, struct partials out,
							    const int32_t dtype, const int fast)
{
	for (int32_t r = 0; r < n_rows(t); r++)
		for (int32_t d = 0; d < t->a->hdim_v; d += LANES)
			vf_store(out.at + r * out.row_floats + d, (vf){0});
	for (int32_t j = 0; j < t->end - t->begin; j += STEP)
		for (int32_t i = 0; i < t->n_heads; i++)
			step_values(t, out, i, j, dtype, fast);
	for (int32_t r = 0; fast && dtype == ABI_E4M3 && r < n_rows(t); r++)
		scale_row(out.at + r * out.row_floats, t->a->hdim_v, E4M3_FACTOR);
}

static void decode_scores(struct decode *t)
{
	int32_t dtype = view_kv_dtype(t->a);

	switch (dtype) {
	case ABI_F32:
		scores_as(t, ABI_F32, 0);
		break;
	case ABI_F16:
		scores_as(t, ABI_F16, 0);
		break;
	case ABI_BF16:
		scores_as(t, ABI_BF16, 0);
		break;
	case ABI_E4M3:
		if (is_fast(dtype, t->a->hdim_q))
			scores_as(t, ABI_E4M3, 1);
		else
			scores_as(t, ABI_E4M3, 0);
		break;
	case ABI_I8:
		if (is_fast(dtype, t->a->hdim_q))
			scores_as(t, ABI_I8, 1);
		else
			scores_as(t, ABI_I8, 0);
		break;
	default:
		if (is_fast(dtype, t->a->hdim_q))
			scores_as(t, ABI_E5M2, 1);
		else
			scores_as(t, ABI_E5M2, 0);
		break;
	}
}

static void decode_values(struct decode *t, struct partials out)
{
	int32_t dtype = view_kv_dtype(t->a);

	switch (dtype) {
	case ABI_F32:
		values_as(t, out, ABI_F32, 0);
		break;
	case ABI_F16:
		values_as(t, out, ABI_F16, 0);
		break;
	case ABI_BF16:
		values_as(t, out, ABI_BF16, 0);
		break;
	case ABI_E4M3:
		if (is_fast(dtype, t->a->hdim_v))
			values_as(t, out, ABI_E4M3, 1);
		else
			values_as(t, out, ABI_E4M3, 0);
		break;
	case ABI_I8:
		if (is_fast(dtype, t->a->hdim_v))
			values_as(t, out, ABI_I8, 1);
		else
			values_as(t, out, ABI_I8, 0);
		break;
	default:
		if (is_fast(dtype, t->a->hdim_v))
			values_as(t, out, ABI_E5M2, 1);
		else
			values_as(t, out, ABI_E5M2, 0);
		break;
	}
}

/* S becomes P; the row's maximum and sum go to its partial result. */
static void decode_softmax(struct decode *t, struct partials out)
{
	const struct abi_fwd_args *a = t->a;
	int32_t n = (int32_t)round_up(t->end - t->begin, LANES);

	for (int32_t r = 0; r < n_rows(t); r++) {
		const struct score_row *row = &t->row[r];
		float *s = t->scratch.s + r * S_STRIDE, sum[LANES] = {0}, max;
		float *numbers = partials_numbers(out, r);

		apply_descale(t, &a->k_descale, t->head + r / t->head_rows, s);
		if (t->ops.modifies)
			score_modify(s, n, t->begin, &t->ops, &t->s, row, t->scratch.temp);
		score_mask(s, n, t->begin, row);
		max = score_max(s, n);
		score_exponentials(s, s, n, 1, max == -INFINITY ? 0 : max, sum);
		numbers[0] = max;
		numbers[1] = vf_reduce_add(vf_load(sum));
		apply_descale(t, &a->v_descale, t->head + r / t->head_rows, s);
	}
}

/* The sequence and heads of the @unit'th group of heads; 0 when there is nothing to do. */
static int decode_heads(struct decode *t, int64_t unit)
{
	const struct abi_fwd_args *a = t->a;
	int64_t groups = head_groups(a);
	int32_t heads = heads_per_task(a);

	t->head = (int32_t)(unit % groups) * heads;
	t->n_heads = a->nhead_k - t->head < heads ? a->nhead_k - t->head : heads;
	t->s = view_sequence(&a->sequences, &a->cache, (int32_t)(unit / groups));
	return t->s.q_len > 0 && t->s.q_len >= a->min_seqlen_q;
}

static void chunk_task(const struct abi_fwd_args *a, int64_t task, void *workspace, void *scratch)
{
	int64_t chunks = chunks_per_split(a);
	struct decode t = {.a = a, .ops = score_ops_init(a)};
	struct partials out = partials_at(a, workspace, task);
	int64_t chunk = task % chunks, split = task / chunks % n_splits(a), begin, end;

	if (!decode_heads(&t, task / chunks / n_splits(a)))
		return;
	begin = split * split_keys(a) + chunk * CHUNK;
	end = begin + CHUNK;
	if (end > (split + 1) * split_keys(a))
		end = (split + 1) * split_keys(a);
	decode_rows(&t, begin, end);
	if (t.begin >= t.end) {
		for (int32_t r = 0; r < n_rows(&t); r++) {
			partials_numbers(out, r)[0] = -INFINITY;
			partials_numbers(out, r)[1] = 0;
		}
		return;
	}
	(void)scratch_init(&t.scratch, a, scratch);
	decode_addresses(&t);
	if (view_kv_dtype(a) == ABI_E4M3 && is_fast(ABI_E4M3, a->hdim_q))
		t.ops.q_factor *= E4M3_FACTOR;
	for (int32_t r = 0; r < n_rows(&t); r++)
		fetch_query(t.scratch.q + r * a->hdim_q, a, &t.s, t.row[r].head, t.row[r].i,
			    t.ops.q_factor);
	decode_scores(&t);
	decode_softmax(&t, out);
	decode_values(&t, out);
}

static void merge_task(const struct abi_fwd_args *a, int64_t task, void *workspace)
{
	int64_t chunks = chunks_per_split(a);
	struct partials first = partials_at(a, workspace, task * chunks);
	struct decode t = {.a = a};

	if (!decode_heads(&t, task / n_splits(a)))
		return;
	decode_rows(&t, 0, 0);
	for (int32_t r = 0; r < n_rows(&t) && cpu_goes_on(); r++)
		output_row(a, &t.s, &t.row[r], (int32_t)(task % n_splits(a)),
			   merge_chunks(first, chunks, r, a->hdim_v));
}

/* The kernel. */

static int decode_accepts(const void *args)
{
	return decode_reads(args, LANES);
}

static size_t decode_workspace_bytes(const void *args, int n_threads)
{
	const struct abi_fwd_args *a = args;
	int64_t units = a->sequences.batch * head_groups(a) * n_splits(a) * chunks_per_split(a);

	(void)n_threads;
	return (size_t)(units * partials_at(a, NULL, 0).chunk_floats) * sizeof(float);
}

static size_t decode_scratch_bytes(const void *args)
{
	struct scratch s;

	return scratch_init(&s, args, NULL);
}

static int64_t decode_n_tasks(const void *args, int phase, int n_threads)
{
	const struct abi_fwd_args *a = args;
	int64_t heads = a->sequences.batch * head_groups(a) * n_splits(a);

	(void)n_threads;
	return phase == 0 ? heads * chunks_per_split(a) : heads;
}

static void decode_run(const void *args, int phase, int64_t task, int n_threads, void *workspace,
		       void *scratch)
{
	uint32_t mode = subnormals_off();

	(void)n_threads;
	if (phase == 0)
		chunk_task(args, task, workspace, scratch);
	else
		merge_task(args, task, workspace);
	subnormals_restore(mode);
}

CPU_CHUNKED_KERNELS(decode)
