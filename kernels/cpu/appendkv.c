/* SPDX-License-Identifier: MIT */
/*
 * appendkv.c: new keys and values into a contiguous or paged cache, with rotary embedding, and the
 * rotation of Q. Bit-equal to reference/appendkv.c, which states the formula: double, then one
 * rounding.
 */
#include <kernels/view.h>

#include "level.h"
#include "tile.h"

#include "convert.h"

enum { ROWS_PER_TASK = CPU_ROWS };

/* The rows of a launch on one axis: those of K, then of V, then of Q. */
struct row_counts {
	int64_t k, v, q;
};

static struct row_counts row_counts(const struct abi_appendkv_args *a)
{
	int64_t new_rows = (int64_t)a->sequences.batch * a->seqlen_new * a->nhead_k;
	int64_t q_rows = (int64_t)a->sequences.batch * a->sequences.seqlen_q_max * a->nhead_q;

	return (struct row_counts){
		.k = new_rows,
		.v = new_rows,
		.q = a->q_rotated.data ? q_rows : 0,
	};
}

/* First position that is new. */
static int32_t length_before(const struct abi_appendkv_args *a, int32_t b)
{
	int32_t length = view_k_length(&a->sequences, &a->cache, b);

	if (!a->sequences.seqlen_k)
		length -= a->seqlen_new;
	return length > 0 ? length : 0;
}

/*
 * double -> 16 bits with a single rounding, by way of a float that is rounded to odd: its last bit
 * remembers that something was cut off, so the second rounding cannot meet a false tie.
 */
static float round_to_odd(double x)
{
	float f = (float)x;
	uint32_t bits = float_to_bits(f);

	if ((double)f == x || x != x)
		return f;
	if ((f > 0 && (double)f > x) || (f < 0 && (double)f < x))
		bits--; /* towards zero */
	/* A result that underflowed to 0 stays on its side of it. */
	return bits_to_float(bits | 1);
}

static void store_double(void *data, int32_t dtype, int64_t index, double x)
{
	if (dtype == ABI_F32)
		((float *)data)[index] = (float)x;
	else
		store_one(data, dtype, index, round_to_odd(x));
}

/* Element d of the row written lies at to + offset(d): linear, or in groups of x. */
struct target {
	char *data;
	int64_t base, stride; /* elements */
	int32_t group;        /* 0: at base + d * stride; x: at base + d / x * stride + d % x */
};

static inline int64_t target_offset(const struct target *t, int32_t d)
{
	if (!t->group)
		return t->base + d * t->stride;
	return t->base + d / t->group * t->stride + d % t->group;
}

static struct target cache_target(const struct abi_appendkv_args *a, const struct view_sequence *v,
				  int32_t position, int32_t head, bool is_v)
{
	const struct abi_tensor *t = is_v ? &a->v : &a->k;
	int32_t hdim = is_v ? a->hdim_v : a->hdim_q, x = 16 / dtype_bytes(a->dtype);
	struct target to = {
		.data = t->data,
		.base = view_cache_offset(&a->cache, t, v, position, head, 0, a->nhead_k, hdim, x,
					  is_v),
		.stride = t->stride_dim,
	};

	if (!a->cache.page_size || a->cache.layout == ABI_KV_LINEAR)
		return to;
	if (is_v) { /* [slot / x][hdim][x]: dims are x apart */
		to.stride = x;
	} else { /* [hdim / x][page_size][x] */
		to.stride = (int64_t)a->cache.page_size * x;
		to.group = x;
	}
	return to;
}

static void copy_row(const struct abi_appendkv_args *a, const struct abi_tensor *from,
		     int64_t offset, const struct target *to, int32_t begin, int32_t end)
{
	int32_t bytes = dtype_bytes(a->dtype);
	const char *source = from->data;

	if (from->stride_dim == 1 && to->stride == 1 && !to->group) {
		memcpy(to->data + (to->base + begin) * bytes, source + (offset + begin) * bytes,
		       (size_t)(end - begin) * bytes);
		return;
	}
	for (int32_t d = begin; d < end; d++)
		memcpy(to->data + target_offset(to, d) * bytes,
		       source + (offset + d * from->stride_dim) * bytes, bytes);
}

/* Half as many elements as a vf holds, as floats and as doubles. */
#define HALF (LANES / 2)
typedef float half_vector __attribute__((vector_size(4 * HALF)));
typedef int32_t half_bits __attribute__((vector_size(4 * HALF)));
typedef double double_vector __attribute__((vector_size(8 * HALF)));

static inline double_vector to_double(vf x, int upper)
{
	half_vector h;

	memcpy(&h, (char *)&x + sizeof(h) * (size_t)upper, sizeof(h));
	return __builtin_convertvector(h, double_vector);
}

/* round_to_odd() of each element, or the nearest float where that is the result. */
static inline half_vector from_double(double_vector x, int is_result)
{
	half_vector f = __builtin_convertvector(x, half_vector);
	double_vector back = __builtin_convertvector(f, double_vector);
	/* NOLINTNEXTLINE(misc-redundant-expression): a NaN is not equal to itself */
	half_bits inexact = __builtin_convertvector((back != x) & (x == x), half_bits);
	half_bits away = __builtin_convertvector(((x > 0) & (back > x)) | ((x < 0) & (back < x)),
						 half_bits);

	if (is_result)
		return f;
	return (half_vector)(((half_bits)f + away) | (inexact & 1));
}

/* round(x c + y s), all in double until the end. */
static inline __attribute__((always_inline)) void store_rotated(char *to, vf x, vf c, vf y, vf s,
								const int32_t dtype)
{
	half_vector sum[2];
	vf whole;

#pragma GCC unroll 2
	for (int i = 0; i < 2; i++)
		sum[i] = from_double(to_double(x, i) * to_double(c, i) +
					     to_double(y, i) * to_double(s, i),
				     dtype == ABI_F32);
	memcpy(&whole, sum, sizeof(whole));
	vf_store_as(to, whole, dtype);
}

/* The rotation of a row whose elements, tables and target lie side by side; returns how many pairs
 * it did. */
static inline __attribute__((always_inline)) int32_t
rotate_pairs(char *to, const char *from, const char *cos, const char *sin, int32_t half,
	     int interleaved, const int32_t dtype, const int32_t table_dtype)
{
	const int32_t bytes = dtype_bytes(dtype), table_bytes = dtype_bytes(table_dtype);
	vi twice[2], swapped;
	vf sign;
	int32_t i = 0;

	for (int j = 0; j < LANES; j++) {
		twice[0][j] = j / 2;
		twice[1][j] = j / 2 + LANES / 2;
		swapped[j] = j ^ 1;
		sign[j] = j % 2 ? 1.0f : -1.0f;
	}
	for (; i + LANES <= half; i += LANES) {
		vf c = vf_load_as(cos + i * table_bytes, table_dtype);
		vf s = vf_load_as(sin + i * table_bytes, table_dtype);
		const char *low = from + i * bytes, *high = low + half * bytes;
		vf x, y;

		if (!interleaved) {
			x = vf_load_as(low, dtype);
			y = vf_load_as(high, dtype);
			store_rotated(to + i * bytes, x, c, y, -s, dtype);
			store_rotated(to + (i + half) * bytes, x, s, y, c, dtype);
			continue;
		}
		for (int k = 0; k < 2; k++) { /* x y x y ... */
			int32_t at = (2 * i + k * LANES) * bytes;

			x = vf_load_as(from + at, dtype);
			y = vf_permute(x, swapped);
			store_rotated(to + at, x, vf_permute(c, twice[k]), y,
				      vf_permute(s, twice[k]) * sign, dtype);
		}
	}
	return i;
}

static inline __attribute__((always_inline)) int32_t
rotate_vectors(char *to, const char *from, const char *cos, const char *sin, int32_t half,
	       int interleaved, const int32_t dtype, int32_t table_dtype)
{
	switch (table_dtype) {
	case ABI_F32:
		return rotate_pairs(to, from, cos, sin, half, interleaved, dtype, ABI_F32);
	case ABI_F16:
		return rotate_pairs(to, from, cos, sin, half, interleaved, dtype, ABI_F16);
	default:
		return rotate_pairs(to, from, cos, sin, half, interleaved, dtype, ABI_BF16);
	}
}

static void rotate_row(const struct abi_appendkv_args *a, const struct abi_tensor *from,
		       int64_t offset, const struct target *to, int32_t position)
{
	const struct abi_tensor *cos = &a->rotary_cos, *sin = &a->rotary_sin;
	int32_t half = a->rotary_dim / 2, bytes = dtype_bytes(a->dtype), i = 0;
	bool interleaved = a->rope == ABI_ROPE_INTERLEAVED;

	if (position >= a->rotary_max_pos)
		position = a->rotary_max_pos - 1;
	if (from->stride_dim == 1 && cos->stride_dim == 1 && sin->stride_dim == 1 &&
	    to->stride == 1 && !to->group) {
		char *target = to->data + to->base * bytes;
		const char *source = (const char *)from->data + offset * bytes;
		int32_t table_bytes = dtype_bytes(a->rotary_dtype);
		const char *c = (const char *)cos->data + position * cos->stride_seq * table_bytes;
		const char *s = (const char *)sin->data + position * sin->stride_seq * table_bytes;

		if (a->dtype == ABI_F32)
			i = rotate_vectors(target, source, c, s, half, interleaved, ABI_F32,
					   a->rotary_dtype);
		else if (a->dtype == ABI_F16)
			i = rotate_vectors(target, source, c, s, half, interleaved, ABI_F16,
					   a->rotary_dtype);
		else
			i = rotate_vectors(target, source, c, s, half, interleaved, ABI_BF16,
					   a->rotary_dtype);
	}
	for (; i < half; i++) {
		int32_t dim_x = interleaved ? 2 * i : i, dim_y = interleaved ? dim_x + 1 : i + half;
		double x = load_one(from->data, a->dtype, offset + dim_x * from->stride_dim);
		double y = load_one(from->data, a->dtype, offset + dim_y * from->stride_dim);
		double c = load_one(cos->data, a->rotary_dtype,
				    position * cos->stride_seq + i * cos->stride_dim);
		double s = load_one(sin->data, a->rotary_dtype,
				    position * sin->stride_seq + i * sin->stride_dim);

		store_double(to->data, a->dtype, target_offset(to, dim_x), x * c - y * s);
		store_double(to->data, a->dtype, target_offset(to, dim_y), x * s + y * c);
	}
}

/* @position < 0: the row does not rotate. */
static void write_row(const struct abi_appendkv_args *a, const struct abi_tensor *from,
		      int64_t offset, const struct target *to, int32_t hdim, int32_t position)
{
	int32_t n_rotated = 0;

	if (a->rope != ABI_ROPE_NONE && position >= 0) {
		rotate_row(a, from, offset, to, position);
		n_rotated = a->rotary_dim;
	}
	copy_row(a, from, offset, to, n_rotated, hdim);
}

/* Row @index of K or V: batch, then new position, then head. */
static void append_row(const struct abi_appendkv_args *a, int64_t index, bool is_v)
{
	int32_t head = (int32_t)(index % a->nhead_k);
	int32_t row = (int32_t)(index / a->nhead_k % a->seqlen_new);
	int32_t b = (int32_t)(index / a->nhead_k / a->seqlen_new);
	struct view_sequence v = view_sequence(&a->sequences, &a->cache, b);
	const struct abi_tensor *from = is_v ? &a->v_new : &a->k_new;
	int32_t position = length_before(a, b) + row;
	struct target to = cache_target(a, &v, position, head, is_v);
	int64_t offset = b * from->stride_batch + row * from->stride_seq + head * from->stride_head;

	write_row(a, from, offset, &to, is_v ? a->hdim_v : a->hdim_q, is_v ? -1 : position);
}

static void query_row(const struct abi_appendkv_args *a, int64_t index)
{
	int32_t head = (int32_t)(index % a->nhead_q);
	int32_t row = (int32_t)(index / a->nhead_q % a->sequences.seqlen_q_max);
	int32_t b = (int32_t)(index / a->nhead_q / a->sequences.seqlen_q_max);
	struct view_sequence v = view_sequence(&a->sequences, &a->cache, b);
	struct target to = {.data = a->q_rotated.data, .stride = a->q_rotated.stride_dim};

	if (!to.data || row >= v.q_len)
		return;
	to.base = view_q_offset(&a->q_rotated, &v, row, head);
	write_row(a, &a->q, view_q_offset(&a->q, &v, row, head), &to, a->hdim_q,
		  length_before(a, b) + (a->q_rows_same_position ? 0 : row));
}

static void appendkv_run(const void *args, int phase, int64_t task, int n_threads, void *workspace,
			 void *scratch)
{
	const struct abi_appendkv_args *a = args;
	struct row_counts n = row_counts(a);
	int64_t end = (task + 1) * ROWS_PER_TASK;

	(void)phase, (void)n_threads, (void)workspace, (void)scratch;
	if (end > n.k + n.v + n.q)
		end = n.k + n.v + n.q;
	for (int64_t i = task * ROWS_PER_TASK; i < end; i++)
		if (i < n.k)
			append_row(a, i, false);
		else if (i < n.k + n.v)
			append_row(a, i - n.k, true);
		else
			query_row(a, i - n.k - n.v);
}

static int64_t appendkv_tasks(const void *args, int phase, int n_threads)
{
	struct row_counts n = row_counts(args);

	(void)phase, (void)n_threads;
	return (n.k + n.v + n.q + ROWS_PER_TASK - 1) / ROWS_PER_TASK;
}

static int appendkv_accepts(const void *args)
{
	const struct abi_appendkv_args *a = args;

	return a->dtype <= ABI_BF16 || (a->dtype <= ABI_E5M2 && a->rope == ABI_ROPE_NONE);
}

static size_t appendkv_workspace(const void *args, int n_threads)
{
	(void)args, (void)n_threads;
	return 0;
}

static size_t appendkv_scratch(const void *args)
{
	(void)args;
	return 0;
}

#define APPENDKV(type)                                                                             \
	{                                                                                          \
		.family = ABI_FWD_APPENDKV, .dtype = type, .level = CPU_LEVEL,                     \
		.pipeline = "cpu_rows", .accepts = appendkv_accepts,                               \
		.workspace_bytes = appendkv_workspace, .scratch_bytes = appendkv_scratch,          \
		.n_phases = 1, .n_tasks = appendkv_tasks, .run = appendkv_run,                     \
	}

const struct cpu_kernel CPU_NAME(cpu_appendkv_kernels)[] = {
	APPENDKV(ABI_F32),  APPENDKV(ABI_F16),  APPENDKV(ABI_BF16),
	APPENDKV(ABI_E4M3), APPENDKV(ABI_E5M2),
};
const size_t CPU_NAME(cpu_appendkv_n_kernels) = 5;
