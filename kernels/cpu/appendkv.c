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
		.v = a->v_new.data ? new_rows : 0,
		.q = a->q_rotated.data ? q_rows : 0,
	};
}

/* Of k_new, v_new and q. */
static int32_t new_dtype(const struct abi_appendkv_args *a)
{
	return a->new_dtype ? a->new_dtype : a->dtype;
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
				  const struct view_place *place, int32_t head, bool is_v)
{
	const struct abi_tensor *t = is_v ? &a->v : &a->k;
	int32_t x = 16 / dtype_bytes(a->dtype);
	struct target to = {
		.data = t->data,
		.base = view_place_offset(a, v, place, head, 0, x, is_v),
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
	int32_t bytes = dtype_bytes(new_dtype(a));
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

/* The rotary tables' row for position @turn. */
static int64_t table_row(const struct abi_appendkv_args *a, int64_t turn)
{
	turn = turn < a->rotary_max_pos ? turn : a->rotary_max_pos - 1;
	return turn > 0 ? turn : 0;
}

static void rotate_row(const struct abi_appendkv_args *a, const struct abi_tensor *from,
		       int64_t offset, const struct target *to, int64_t turn)
{
	const struct abi_tensor *cos = &a->rotary_cos, *sin = &a->rotary_sin;
	int32_t dtype = new_dtype(a), half = a->rotary_dim / 2, bytes = dtype_bytes(dtype), i = 0;
	bool interleaved = a->rope == ABI_ROPE_INTERLEAVED;
	int64_t position = table_row(a, turn);

	if (from->stride_dim == 1 && cos->stride_dim == 1 && sin->stride_dim == 1 &&
	    to->stride == 1 && !to->group) {
		char *target = to->data + to->base * bytes;
		const char *source = (const char *)from->data + offset * bytes;
		int32_t table_bytes = dtype_bytes(a->rotary_dtype);
		const char *c = (const char *)cos->data + position * cos->stride_seq * table_bytes;
		const char *s = (const char *)sin->data + position * sin->stride_seq * table_bytes;

		if (dtype == ABI_F32)
			i = rotate_vectors(target, source, c, s, half, interleaved, ABI_F32,
					   a->rotary_dtype);
		else if (dtype == ABI_F16)
			i = rotate_vectors(target, source, c, s, half, interleaved, ABI_F16,
					   a->rotary_dtype);
		else
			i = rotate_vectors(target, source, c, s, half, interleaved, ABI_BF16,
					   a->rotary_dtype);
	}
	for (; i < half; i++) {
		int32_t dim_x = interleaved ? 2 * i : i, dim_y = interleaved ? dim_x + 1 : i + half;
		double x = load_one(from->data, dtype, offset + dim_x * from->stride_dim);
		double y = load_one(from->data, dtype, offset + dim_y * from->stride_dim);
		double c = load_one(cos->data, a->rotary_dtype,
				    position * cos->stride_seq + i * cos->stride_dim);
		double s = load_one(sin->data, a->rotary_dtype,
				    position * sin->stride_seq + i * sin->stride_dim);

		store_double(to->data, dtype, target_offset(to, dim_x), x * c - y * s);
		store_double(to->data, dtype, target_offset(to, dim_y), x * s + y * c);
	}
}

static void write_row(const struct abi_appendkv_args *a, const struct abi_tensor *from,
		      int64_t offset, const struct target *to, int32_t hdim, bool turns,
		      int64_t turn)
{
	int32_t n_rotated = 0;

	if (a->rope != ABI_ROPE_NONE && turns) {
		rotate_row(a, from, offset, to, turn);
		n_rotated = a->rotary_dim;
	}
	copy_row(a, from, offset, to, n_rotated, hdim);
}

/* ---- a cache of 8 bits ---- */

/* The pairs of @x turn, each result rounded to float. */
static void rotate_floats(const struct abi_appendkv_args *a, float *x, int64_t turn)
{
	const struct abi_tensor *cos = &a->rotary_cos, *sin = &a->rotary_sin;
	bool interleaved = a->rope == ABI_ROPE_INTERLEAVED;
	int64_t position = table_row(a, turn);
	int32_t half = a->rotary_dim / 2;

	for (int32_t i = 0; i < half; i++) {
		float *first = x + (interleaved ? 2 * i : i), *second = first;
		double c = load_one(cos->data, a->rotary_dtype,
				    position * cos->stride_seq + i * cos->stride_dim);
		double s = load_one(sin->data, a->rotary_dtype,
				    position * sin->stride_seq + i * sin->stride_dim);
		double p, q;

		second += interleaved ? 1 : half;
		p = *first, q = *second;
		*first = (float)(p * c - q * s);
		*second = (float)(p * s + q * c);
	}
}

/* A row's own factor: its largest number becomes the type's. */
static float find_factor(const float *x, int32_t n, float most_of_type)
{
	uint32_t most = 0;

	for (int32_t i = 0; i < n; i++) {
		uint32_t magnitude = float_to_bits(x[i]) & 0x7fffffff;

		/* Larger bits are larger numbers; a NaN counts as none. */
		if (magnitude <= 0x7f800000 && magnitude > most)
			most = magnitude;
	}
	if (most == 0 || most == 0x7f800000)
		return 1;
	return fmaxf(bits_to_float(most) / most_of_type, 0x1p-100f);
}

static float most_of(int32_t dtype)
{
	return dtype == ABI_E4M3 ? E4M3_MOST : dtype == ABI_E5M2 ? E5M2_MOST : I8_MOST;
}

static void quantize(uint8_t *to, const float *x, int32_t n, float factor, int32_t dtype)
{
	if (dtype == ABI_E4M3)
		for (int32_t i = 0; i < n; i++)
			to[i] = float_to_e4m3(x[i] / factor);
	else if (dtype == ABI_I8)
		for (int32_t i = 0; i < n; i++)
			to[i] = float_to_i8(x[i] / factor);
	else
		for (int32_t i = 0; i < n; i++)
			to[i] = float_to_e5m2(x[i] / factor);
}

static void quantize_row(const struct abi_appendkv_args *a, const struct abi_tensor *from,
			 int64_t offset, const struct target *to, int32_t hdim, bool turns,
			 int64_t turn, const struct abi_descale *descale, int64_t factor_at)
{
	float x[CPU_MAX_HDIM_Q] = {0}, factor = 1;
	uint8_t codes[CPU_MAX_HDIM_Q];

	load_row(x, from->data, a->new_dtype, offset, from->stride_dim, hdim);
	if (a->rope != ABI_ROPE_NONE && turns)
		rotate_floats(a, x, turn);
	if (a->computes_descale) {
		factor = find_factor(x, hdim, most_of(a->dtype));
		/* The one that is written, though others read such tensors. */
		((float *)(uintptr_t)descale->data)[factor_at] = factor;
	} else if (descale->data) {
		factor = descale->data[factor_at];
	}
	quantize(codes, x, hdim, factor, a->dtype);
	if (to->stride == 1 && !to->group) {
		memcpy(to->data + to->base, codes, (size_t)hdim);
		return;
	}
	for (int32_t d = 0; d < hdim; d++)
		to->data[target_offset(to, d)] = (char)codes[d];
}

/* A key as a latent of fp8: codes, their factors, the rest. */
static void latent_row(const struct abi_appendkv_args *a, const struct abi_tensor *from,
		       int64_t offset, const struct view_sequence *v,
		       const struct view_place *place)
{
	char *key = (char *)a->k.data + view_place_offset(a, v, place, 0, 0, 0, false);
	float x[CPU_MAX_HDIM_Q] = {0};

	load_row(x, from->data, a->new_dtype, offset, from->stride_dim, a->hdim_q);
	for (int32_t d = 0; d < ABI_LATENT_CODES; d += ABI_LATENT_BLOCK) {
		float factor = find_factor(x + d, ABI_LATENT_BLOCK, E4M3_MOST);

		memcpy(key + ABI_LATENT_FACTORS + d / ABI_LATENT_BLOCK * (int)sizeof(factor),
		       &factor, sizeof(factor));
		quantize((uint8_t *)key + d, x + d, ABI_LATENT_BLOCK, factor, ABI_E4M3);
	}
	store_row(key + ABI_LATENT_REST, ABI_BF16, 0, 1, x + ABI_LATENT_CODES,
		  a->hdim_q - ABI_LATENT_CODES);
}

/* Row @index of K or V: batch, then new position, then head. */
static void append_row(const struct abi_appendkv_args *a, int64_t index, bool is_v)
{
	int32_t head = (int32_t)(index % a->nhead_k);
	int32_t row = (int32_t)(index / a->nhead_k % a->seqlen_new);
	int32_t b = (int32_t)(index / a->nhead_k / a->seqlen_new);
	struct view_sequence v = view_sequence(&a->sequences, &a->cache, b);
	const struct abi_tensor *from = is_v ? &a->v_new : &a->k_new;
	const struct abi_descale *descale = is_v ? &a->v_descale : &a->k_descale;
	int64_t offset = b * from->stride_batch + row * from->stride_seq + head * from->stride_head;
	int32_t hdim = is_v ? a->hdim_v : a->hdim_q;
	struct view_place place;
	struct target to;

	if (!view_append_place(a, &v, row, &place))
		return;
	if (a->cache.layout == ABI_KV_LATENT_FP8) {
		latent_row(a, from, offset, &v, &place);
		return;
	}
	to = cache_target(a, &v, &place, head, is_v);
	if (a->new_dtype)
		quantize_row(a, from, offset, &to, hdim, !is_v, place.turn, descale,
			     view_place_factor(descale, b, head, &place));
	else
		write_row(a, from, offset, &to, hdim, !is_v, place.turn);
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
	write_row(a, &a->q, view_q_offset(&a->q, &v, row, head), &to, a->hdim_q, true,
		  view_append_turn(a, b, !a->slots && a->q_rows_same_position ? 0 : row));
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

	return a->dtype <= ABI_BF16 || ((a->dtype <= ABI_E5M2 || a->dtype == ABI_I8) &&
					(a->rope == ABI_ROPE_NONE || a->new_dtype));
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
	APPENDKV(ABI_E4M3), APPENDKV(ABI_E5M2), APPENDKV(ABI_I8),
};
const size_t CPU_NAME(cpu_appendkv_n_kernels) = 6;
