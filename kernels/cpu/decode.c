/* SPDX-License-Identifier: MIT */
/*
 * decode.c: attention forward for few rows and many keys ("cpu_decode"), compiled once a level.
 *
 * With one or a few rows a key head, every element of K and V is used a handful of times: reading
 * them is the work. So nothing is packed. Each key is read where it lies, once, for all rows of all
 * query heads that share it (up to ROWS), and converted in registers:
 *
 *   phase 0, a task a chunk of keys:  S = Q K^T by dot products along the head, four keys at a
 * time; P, its sum, and O = P V; partial results to the workspace phase 1, a task a key head: the
 * chunks are put together
 *
 * Rows of one head lie far apart and pages anywhere, so the kernel asks for them some keys ahead.
 */
#include "output.h"
#include "pack.h"

#define ROWS       16   /* at most, of one key head */
#define CHUNK      1024 /* keys a task */
#define KEYS       4    /* keys side by side in a dot product */
#define AHEAD      12   /* keys between asking for one and using it */
#define DIMS       4    /* vectors of O held in registers */
#define VALUE_KEYS 64   /* values that stay in the first-level cache while O is made */
#define S_STRIDE   (CHUNK + 16)

struct scratch {
	float *q;       /* [ROWS, hdim_q], scaled */
	float *s;       /* [ROWS, S_STRIDE] */
	float *factors; /* [2, CHUNK]: fp8 factors of K, V */
	float *temp;    /* [S_STRIDE] */
	const char **k; /* [CHUNK + AHEAD + KEYS] where keys begin */
	const char **v;
};

/* Partial results, f32: for every chunk of every key head, per row O [hdim_v], the maximum, the
 * sum. */
struct partials {
	float *at;
	int64_t row_floats, chunk_floats;
};

struct decode {
	const struct abi_fwd_args *a;
	struct view_sequence s;
	struct score_ops ops;
	struct scratch scratch;
	int32_t head; /* of K and V */
	int32_t n_rows;
	struct score_row row[ROWS];
	int32_t begin, end; /* columns that some row sees */
	int same;           /* all rows see the same */
};

static int32_t group_size(const struct abi_fwd_args *a)
{
	return a->nhead_q / a->nhead_k;
}

static int64_t max_rows(const struct abi_fwd_args *a)
{
	return (int64_t)a->sequences.seqlen_q_max * group_size(a);
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
	uintptr_t at = (uintptr_t)base;

	s->q = (float *)at;
	at += align_bytes(ROWS * (size_t)a->hdim_q * sizeof(float));
	s->s = (float *)at;
	at += align_bytes(ROWS * S_STRIDE * sizeof(float));
	s->factors = (float *)at;
	at += align_bytes(2 * CHUNK * sizeof(float));
	s->temp = (float *)at;
	at += align_bytes(S_STRIDE * sizeof(float));
	s->k = (const char **)at;
	at += align_bytes((CHUNK + AHEAD + KEYS) * sizeof(char *));
	s->v = (const char **)at;
	at += align_bytes((CHUNK + AHEAD + KEYS) * sizeof(char *));
	return at - (uintptr_t)base;
}

static struct partials partials_at(const struct abi_fwd_args *a, void *workspace, int64_t unit)
{
	struct partials p = {.row_floats = a->hdim_v + 16}; /* a cache line for the two numbers */

	p.chunk_floats = p.row_floats * max_rows(a);
	p.at = (float *)workspace + unit * p.chunk_floats;
	return p;
}

/* The rows of a key head and what they see of [begin, end). */
static void decode_rows(struct decode *t, int64_t begin, int64_t end)
{
	const struct abi_fwd_args *a = t->a;
	int32_t group = group_size(a);

	begin = begin < t->s.k_len ? begin : t->s.k_len;
	end = end < t->s.k_len ? end : t->s.k_len;
	t->begin = INT32_MAX;
	t->end = 0;
	t->same = 1;
	t->n_rows = t->s.q_len * group;
	for (int32_t r = 0; r < t->n_rows; r++) {
		struct score_row *row = &t->row[r];

		*row = score_row_at(&a->band, &t->s, t->head * group + r % group, r / group,
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
	int32_t n = t->end - t->begin, bytes = dtype_bytes(a->dtype), x = 16 / bytes;
	const char **k = t->scratch.k, **v = t->scratch.v;

	for (int32_t j = 0; j < n; j++) {
		int32_t position = t->s.leftpad + t->begin + j;

		k[j] = (const char *)a->k.data +
		       bytes * view_cache_offset(&a->cache, &a->k, &t->s, position, t->head, 0,
						 a->nhead_k, a->hdim_q, x, false);
		v[j] = (const char *)a->v.data +
		       bytes * view_cache_offset(&a->cache, &a->v, &t->s, position, t->head, 0,
						 a->nhead_k, a->hdim_v, x, true);
		if (a->k_descale.data || a->v_descale.data) {
			int64_t page = a->cache.page_size ? view_page(&a->cache, &t->s, position)
							  : 0;

			t->scratch.factors[j] = descale_at(&a->k_descale, t->s.batch, t->head,
							   position, page);
			t->scratch.factors[CHUNK + j] = descale_at(&a->v_descale, t->s.batch,
								   t->head, position, page);
		}
	}
	for (int32_t j = n; j < n + AHEAD + KEYS; j++) {
		k[j] = k[n - 1];
		v[j] = v[n - 1];
	}
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

static inline __attribute__((always_inline)) void prefetch_row(const char *p, int32_t bytes)
{
	for (int32_t i = 0; i < bytes; i += 64)
		__builtin_prefetch(p + i);
}

/* S of @rows rows and KEYS keys. */
static inline __attribute__((always_inline)) void dot_keys(float *s, const float *q, int32_t hdim,
							   const char *const *k, const int rows,
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
			key[j] = vf_load_as(k[j] + d * dtype_bytes(dtype), dtype);
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

/* S = Q K^T for all rows and columns of the chunk. */
static inline __attribute__((always_inline)) void scores_as(struct decode *t, const int32_t dtype)
{
	const float *q = t->scratch.q;
	int32_t n = t->end - t->begin, hdim = t->a->hdim_q;

	for (int32_t j = 0; j < n; j += KEYS) {
		const char *const *k = t->scratch.k + j;
		float *s = t->scratch.s + j;
		int32_t r = 0;

		for (int i = 0; i < KEYS; i++)
			prefetch_row(k[i + AHEAD], hdim * dtype_bytes(dtype));
		for (; r + 4 <= t->n_rows; r += 4)
			dot_keys(s + r * S_STRIDE, q + r * hdim, hdim, k, 4, dtype);
		for (; r + 2 <= t->n_rows; r += 2)
			dot_keys(s + r * S_STRIDE, q + r * hdim, hdim, k, 2, dtype);
		if (r < t->n_rows)
			dot_keys(s + r * S_STRIDE, q + r * hdim, hdim, k, 1, dtype);
	}
}

/* O += P V for @rows rows, @vectors vectors of the head, @n keys. */
static inline __attribute__((always_inline)) void add_values(float *o, int64_t o_row,
							     const float *p, const char *const *v,
							     int32_t d, int32_t n, const int rows,
							     const int vectors, const int32_t dtype)
{
	vf sum[4][DIMS];

#pragma GCC unroll 4
	for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
		for (int i = 0; i < vectors; i++)
			sum[r][i] = vf_load(o + r * o_row + d + i * LANES);
	for (int32_t j = 0; j < n; j++) {
		vf value[DIMS];

#pragma GCC unroll 4
		for (int i = 0; i < vectors; i++)
			value[i] = vf_load_as(v[j] + (d + i * LANES) * dtype_bytes(dtype), dtype);
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
}

static inline __attribute__((always_inline)) void
add_values_rows(float *o, int64_t o_row, const float *p, const char *const *v, int32_t n,
		int32_t hdim, const int rows, const int32_t dtype)
{
	int32_t d = 0;

	for (; d + DIMS * LANES <= hdim; d += DIMS * LANES)
		add_values(o, o_row, p, v, d, n, rows, DIMS, dtype);
	for (; d < hdim; d += LANES)
		add_values(o, o_row, p, v, d, n, rows, 1, dtype);
}

/* O += P V for rows [first, first + n_rows) over columns [lo, hi) of the chunk. */
static inline __attribute__((always_inline)) void values_as(struct decode *t, struct partials out,
							    int32_t first, int32_t n_rows,
							    int32_t lo, int32_t hi,
							    const int32_t dtype)
{
	int32_t hdim = t->a->hdim_v;

	for (int32_t j = lo; j < hi; j += VALUE_KEYS) {
		int32_t n = hi - j < VALUE_KEYS ? hi - j : VALUE_KEYS, r = first;
		const char *const *v = t->scratch.v + j;

		for (int32_t i = 0; i < n; i++)
			prefetch_row(v[i], hdim * dtype_bytes(dtype));
		for (; r + 4 <= first + n_rows; r += 4)
			add_values_rows(out.at + r * out.row_floats, out.row_floats,
					t->scratch.s + r * S_STRIDE + j, v, n, hdim, 4, dtype);
		for (; r + 2 <= first + n_rows; r += 2)
			add_values_rows(out.at + r * out.row_floats, out.row_floats,
					t->scratch.s + r * S_STRIDE + j, v, n, hdim, 2, dtype);
		if (r < first + n_rows)
			add_values_rows(out.at + r * out.row_floats, out.row_floats,
					t->scratch.s + r * S_STRIDE + j, v, n, hdim, 1, dtype);
	}
}

static void decode_scores(struct decode *t)
{
	switch (t->a->dtype) {
	case ABI_F32:
		scores_as(t, ABI_F32);
		break;
	case ABI_F16:
		scores_as(t, ABI_F16);
		break;
	case ABI_BF16:
		scores_as(t, ABI_BF16);
		break;
	case ABI_E4M3:
		scores_as(t, ABI_E4M3);
		break;
	default:
		scores_as(t, ABI_E5M2);
		break;
	}
}

static void values_range(struct decode *t, struct partials out, int32_t first, int32_t n_rows,
			 int32_t lo, int32_t hi)
{
	lo -= t->begin;
	hi -= t->begin;
	switch (t->a->dtype) {
	case ABI_F32:
		values_as(t, out, first, n_rows, lo, hi, ABI_F32);
		break;
	case ABI_F16:
		values_as(t, out, first, n_rows, lo, hi, ABI_F16);
		break;
	case ABI_BF16:
		values_as(t, out, first, n_rows, lo, hi, ABI_BF16);
		break;
	case ABI_E4M3:
		values_as(t, out, first, n_rows, lo, hi, ABI_E4M3);
		break;
	default:
		values_as(t, out, first, n_rows, lo, hi, ABI_E5M2);
		break;
	}
}

/* Each row over exactly the columns it sees: a value that is not finite stays where it belongs. */
static void decode_values(struct decode *t, struct partials out)
{
	int32_t step = t->same ? t->n_rows : 1;

	for (int32_t r = 0; r < t->n_rows; r++)
		for (int32_t d = 0; d < t->a->hdim_v; d += LANES)
			vf_store(out.at + r * out.row_floats + d, (vf){0});
	for (int32_t r = 0; r < t->n_rows; r += step) {
		const struct score_row *row = &t->row[r];

		values_range(t, out, r, step, row->sink_lo, row->sink_hi);
		values_range(t, out, r, step, row->lo, row->hi);
	}
}

/* S becomes P; the row's maximum and sum go to its partial result. */
static void decode_softmax(struct decode *t, struct partials out)
{
	const struct abi_fwd_args *a = t->a;
	int32_t columns = t->end - t->begin, n = (int32_t)round_up(columns, LANES);

	for (int32_t r = 0; r < t->n_rows; r++) {
		const struct score_row *row = &t->row[r];
		float *s = t->scratch.s + r * S_STRIDE, sum[LANES] = {0}, max;
		float *numbers = out.at + r * out.row_floats + a->hdim_v;

		if (a->k_descale.data)
			for (int32_t j = 0; j < columns; j++)
				s[j] *= t->scratch.factors[j];
		if (t->ops.modifies)
			score_modify(s, n, t->begin, &t->ops, &t->s, row, t->scratch.temp);
		score_mask(s, n, t->begin, row);
		max = score_max(s, n);
		score_exponentials(s, n, max == -INFINITY ? 0 : max, sum);
		numbers[0] = max;
		numbers[1] = vf_reduce_add(vf_load(sum));
		if (a->v_descale.data)
			for (int32_t j = 0; j < columns; j++)
				s[j] *= t->scratch.factors[CHUNK + j];
	}
}

static void chunk_task(const struct abi_fwd_args *a, int64_t task, void *workspace, void *scratch)
{
	int64_t chunks = chunks_per_split(a);
	struct decode t = {.a = a, .ops = score_ops_init(a)};
	struct partials out = partials_at(a, workspace, task);
	int64_t chunk = task % chunks, split = task / chunks % n_splits(a);
	int64_t rest = task / chunks / n_splits(a), begin, end;

	t.head = (int32_t)(rest % a->nhead_k);
	t.s = view_sequence(&a->sequences, &a->cache, (int32_t)(rest / a->nhead_k));
	if (t.s.q_len < a->min_seqlen_q)
		return;
	begin = split * split_keys(a) + chunk * CHUNK;
	end = begin + CHUNK;
	if (end > (split + 1) * split_keys(a))
		end = (split + 1) * split_keys(a);
	decode_rows(&t, begin, end);
	if (t.begin >= t.end) {
		for (int32_t r = 0; r < t.n_rows; r++) {
			out.at[r * out.row_floats + a->hdim_v] = -INFINITY;
			out.at[r * out.row_floats + a->hdim_v + 1] = 0;
		}
		return;
	}
	(void)scratch_init(&t.scratch, a, scratch);
	for (int32_t r = 0; r < t.n_rows; r++)
		fetch_query(t.scratch.q + r * a->hdim_q, a, &t.s, t.row[r].head, t.row[r].i,
			    t.ops.q_factor);
	decode_addresses(&t);
	decode_scores(&t);
	decode_softmax(&t, out);
	decode_values(&t, out);
}

/* Adds up row @r's chunks in the first one's place; an empty chunk's O was never written. */
static struct row_state merge_chunks(struct partials first, int64_t chunks, int32_t r, int32_t hdim)
{
	struct row_state state = {.max = -INFINITY};
	const float *part;

	for (int64_t c = 0; c < chunks; c++) {
		part = first.at + c * first.chunk_floats + r * first.row_floats;
		state.max = part[hdim] > state.max ? part[hdim] : state.max;
	}
	state.o = first.at + r * first.row_floats;
	for (int64_t c = 0, begun = 0; c < chunks; c++) {
		float weight;

		part = first.at + c * first.chunk_floats + r * first.row_floats;
		if (part[hdim + 1] == 0)
			continue;
		weight = state.max == -INFINITY ? 1 : exp2f(part[hdim] - state.max);
		state.sum += weight * part[hdim + 1];
		for (int32_t d = 0; d < hdim; d += LANES) {
			vf sum = vf_load(part + d) * weight;

			vf_store(state.o + d, begun ? vf_load(state.o + d) + sum : sum);
		}
		begun = 1;
	}
	return state;
}

static void merge_task(const struct abi_fwd_args *a, int64_t task, void *workspace)
{
	int64_t chunks = chunks_per_split(a), rest = task / n_splits(a);
	struct partials first = partials_at(a, workspace, task * chunks);
	struct decode t = {.a = a, .head = (int32_t)(rest % a->nhead_k)};

	t.s = view_sequence(&a->sequences, &a->cache, (int32_t)(rest / a->nhead_k));
	if (t.s.q_len < a->min_seqlen_q)
		return;
	decode_rows(&t, 0, 0);
	for (int32_t r = 0; r < t.n_rows; r++)
		output_row(a, &t.s, &t.row[r], (int32_t)(task % n_splits(a)),
			   merge_chunks(first, chunks, r, a->hdim_v));
}

/* The kernel. */

static int decode_accepts(const void *args)
{
	const struct abi_fwd_args *a = args;

	return max_rows(a) <= ROWS && a->dropout.p_drop == 0 && a->hdim_q % LANES == 0 &&
	       a->hdim_v % LANES == 0 && a->k.stride_dim == 1 && a->v.stride_dim == 1 &&
	       (!a->cache.page_size || a->cache.layout == ABI_KV_LINEAR) &&
	       (a->o_dtype == ABI_F32 || a->o_dtype == ABI_F16 || a->o_dtype == ABI_BF16);
}

static size_t decode_workspace_bytes(const void *args, int n_threads)
{
	const struct abi_fwd_args *a = args;
	int64_t units = a->sequences.batch * a->nhead_k * n_splits(a) * chunks_per_split(a);

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
	int64_t heads = (int64_t)a->sequences.batch * a->nhead_k * n_splits(a);

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

#define DECODE_KERNEL(family_, dtype_)                                                             \
	{                                                                                          \
		.family = family_, .dtype = dtype_, .level = CPU_LEVEL, .pipeline = "cpu_decode",  \
		.accepts = decode_accepts, .workspace_bytes = decode_workspace_bytes,              \
		.scratch_bytes = decode_scratch_bytes, .n_phases = 2, .n_tasks = decode_n_tasks,   \
		.run = decode_run,                                                                 \
	}
#define DECODE_FAMILIES(dtype)                                                                     \
	DECODE_KERNEL(ABI_FWD, dtype), DECODE_KERNEL(ABI_FWD_SPLITKV, dtype),                      \
		DECODE_KERNEL(ABI_FWD_PAGEDKV, dtype), DECODE_KERNEL(ABI_BATCH_PREFILL, dtype)

extern const struct cpu_kernel CPU_NAME(cpu_decode_kernels)[];
extern const size_t CPU_NAME(cpu_decode_n_kernels);

const struct cpu_kernel CPU_NAME(cpu_decode_kernels)[] = {
	DECODE_FAMILIES(ABI_F32),  DECODE_FAMILIES(ABI_F16),  DECODE_FAMILIES(ABI_BF16),
	DECODE_FAMILIES(ABI_E4M3), DECODE_FAMILIES(ABI_E5M2),
};
const size_t CPU_NAME(cpu_decode_n_kernels) = sizeof(CPU_NAME(cpu_decode_kernels)) /
					      sizeof(CPU_NAME(cpu_decode_kernels)[0]);
