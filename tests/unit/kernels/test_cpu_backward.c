/* SPDX-License-Identifier: MIT */
/* Backward on the CPU against the reference in double: every feature, edges, determinism. */
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <kernels/reference.h>
#include <kernels/view.h>

#include "../share.h"
#include "backward_case.h"
#include "launch.h"

/* Runs @c on every level of this machine. */
static void check(struct backward_case c)
{
	struct backward_problem *p = backward_problem_new(&c, 1);

	for (int level = CPU_PORTABLE; level < CPU_N_LEVELS && launch_has_level(level);
	     level = launch_next_level(level)) {
		backward_problem_poison(p);
		backward_problem_run(p, level, 1 + level);
		backward_problem_check(p, backward_tolerance(c.dtype));
	}
	backward_problem_free(p);
}

/* The smallest of everything; tests change what they are about. */
static struct backward_case plain(uint32_t dtype)
{
	return (struct backward_case){.dtype = dtype,
				      .batch = 2,
				      .nhead_q = 2,
				      .nhead_k = 2,
				      .seqlen_q = 70,
				      .seqlen_k = 90,
				      .hdim_q = 32,
				      .hdim_v = 32,
				      .window_left = -1,
				      .window_right = -1};
}

static void plain_in_every_type(void **state)
{
	(void)state;
	for (uint32_t dtype = ABI_F32; dtype <= ABI_BF16; dtype++)
		check(plain(dtype));
}

static void masks_and_windows(void **state)
{
	static const int32_t windows[][2] = {{-1, 0}, {-1, -1}, {20, 0}, {0, 0},
					     {7, 9},  {-1, 30}, {30, -1}};

	(void)state;
	for (uint32_t mask = ABI_MASK_TOP_LEFT; mask <= ABI_MASK_BOTTOM_RIGHT; mask++)
		for (size_t i = 0; i < sizeof(windows) / sizeof(windows[0]); i++) {
			struct backward_case c = plain(ABI_F32);

			c.mask = mask;
			c.window_left = windows[i][0];
			c.window_right = windows[i][1];
			check(c);
			c.sink_tokens = 5;
			check(c);
		}
}

/* More rows than keys: the first rows of a bottom-right causal mask see nothing. */
static void rows_without_keys(void **state)
{
	struct backward_case c = plain(ABI_F32);

	(void)state;
	c.seqlen_q = 150;
	c.seqlen_k = 40;
	c.mask = ABI_MASK_BOTTOM_RIGHT;
	c.window_right = 0;
	check(c);
	c.sink = true;
	check(c);
	c.window_left = 3;
	check(c);
	c.mask = ABI_MASK_TOP_LEFT; /* rows beyond the keys see nothing through the window */
	check(c);
}

static void lengths(void **state)
{
	static const int32_t sizes[][2] = {{1, 1}, {1, 90},   {90, 1},  {3, 0},
					   {0, 3}, {64, 256}, {65, 257}};

	(void)state;
	for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
		struct backward_case c = plain(ABI_F32);

		c.seqlen_q = sizes[i][0];
		c.seqlen_k = sizes[i][1];
		check(c);
		c.bias = true;
		check(c);
		c.dtype = ABI_BF16;
		check(c);
	}
}

static void head_dims(void **state)
{
	static const int32_t dims[][2] = {{8, 8},     {16, 40},  {72, 24},  {128, 128}, {64, 256},
					  {192, 128}, {256, 8},  {1, 1},    {3, 127},   {7, 100},
					  {12, 12},   {17, 163}, {59, 59},  {63, 255},  {100, 3},
					  {111, 64},  {129, 17}, {255, 59}, {163, 1}};

	(void)state;
	for (size_t i = 0; i < sizeof(dims) / sizeof(dims[0]); i++)
		for (uint32_t dtype = ABI_F32; dtype <= ABI_BF16; dtype++) {
			struct backward_case c = plain(dtype);

			c.batch = 1;
			c.hdim_q = dims[i][0];
			c.hdim_v = dims[i][1];
			check(c);
		}
}

static void heads_share_keys(void **state)
{
	static const int32_t heads[][2] = {{4, 2}, {4, 1}, {6, 2}, {8, 1}};

	(void)state;
	for (size_t i = 0; i < sizeof(heads) / sizeof(heads[0]); i++) {
		struct backward_case c = plain(ABI_F32);

		c.nhead_q = heads[i][0];
		c.nhead_k = heads[i][1];
		c.head_major = i % 2;
		c.mask = ABI_MASK_BOTTOM_RIGHT;
		c.window_right = 0;
		check(c);
	}
}

/* More than one chunk of either kind, so that the latin square has several phases. */
static void many_chunks(void **state)
{
	static const int32_t sizes[][2] = {{600, 300}, {300, 700}, {513, 520}};

	(void)state;
	for (size_t i = 0; i < 3; i++) {
		struct backward_case c = plain(ABI_F32);

		c.batch = 1;
		c.nhead_k = 1;
		c.seqlen_q = sizes[i][0];
		c.seqlen_k = sizes[i][1];
		c.mask = i ? ABI_MASK_BOTTOM_RIGHT : ABI_MASK_NONE;
		c.window_right = 0;
		c.sink_tokens = 2;
		c.window_left = i == 2 ? 300 : -1;
		check(c);
		c.split_keys = 192; /* a square for each chunk of keys */
		check(c);
		c.split_keys = 80; /* and splits that no chunk adds to */
		c.dtype = ABI_BF16;
		check(c);
		c.split_keys = 0;
		check(c);
	}
}

/* Heads enough that one chunk holds all queries; float rows too far apart to be read in place. */
static void many_heads(void **state)
{
	struct backward_case c = plain(ABI_F32);

	(void)state;
	c.batch = 1;
	c.nhead_q = c.nhead_k = 32;
	c.seqlen_q = 400;
	c.seqlen_k = 200;
	c.hdim_q = c.hdim_v = 16;
	check(c);
	c.mask = ABI_MASK_TOP_LEFT;
	c.window_left = 60;
	c.window_right = 0;
	c.sink_tokens = 3;
	check(c);
}

static void soft_cap_and_alibi(void **state)
{
	(void)state;
	for (uint32_t dtype = ABI_F32; dtype <= ABI_BF16; dtype++)
		for (int i = 1; i < 4; i++) {
			struct backward_case c = plain(dtype);

			c.soft_cap = i & 1 ? 2 : 0;
			c.alibi = i & 2;
			c.scale = 0.7f;
			check(c);
			c.mask = ABI_MASK_BOTTOM_RIGHT;
			c.window_right = 0;
			check(c);
		}
}

static void bias_of_every_shape(void **state)
{
	(void)state;
	for (int i = 0; i < 16; i++) {
		struct backward_case c = plain(i & 8 ? ABI_BF16 : ABI_F32);

		c.bias = true;
		c.bias_batch = i & 1;
		c.bias_head = i & 2;
		c.bias_row = i & 4;
		c.bias_narrow = i & 8;
		check(c);
		c.nhead_k = 1;
		c.soft_cap = 3;
		c.mask = ABI_MASK_TOP_LEFT;
		c.window_left = 40;
		c.window_right = 2;
		check(c);
		c.group = true;
		check(c);
	}
}

static void dropout_regenerated_and_stored(void **state)
{
	(void)state;
	for (int i = 0; i < 8; i++) {
		struct backward_case c = plain(i & 1 ? ABI_F16 : ABI_F32);

		c.p_drop = 0.2f;
		c.randval = i & 2;
		c.group = i & 4;
		c.nhead_k = 1;
		check(c);
		c.bias = true;
		c.mask = ABI_MASK_BOTTOM_RIGHT;
		c.window_right = 0;
		c.window_left = 37;
		check(c);
	}
}

static void sinks(void **state)
{
	(void)state;
	for (uint32_t dtype = ABI_F32; dtype <= ABI_BF16; dtype++) {
		struct backward_case c = plain(dtype);

		c.sink = true;
		check(c);
		c.p_drop = 0.3f;
		c.group = c.padded = true;
		check(c);
	}
}

static void packed_sequences(void **state)
{
	(void)state;
	for (int i = 0; i < 8; i++) {
		struct backward_case c = plain(ABI_F32);

		c.batch = 5;
		c.group = true;
		c.padded = i & 1;
		c.mask = i & 2 ? ABI_MASK_BOTTOM_RIGHT : ABI_MASK_NONE;
		c.window_right = 0;
		c.nhead_k = i & 4 ? 1 : 2;
		c.lengths_q[1] = 1;
		c.lengths_k[3] = 1;
		check(c);
	}
}

/* A bias that all rows share has a gradient even where there are no rows: 0. */
static void bias_of_no_rows(void **state)
{
	struct backward_case c = plain(ABI_F32);

	(void)state;
	c.seqlen_q = 0;
	c.bias = c.bias_row = true;
	check(c);
	c.bias_batch = c.bias_head = true;
	check(c);
	c.group = true;
	check(c);
	c.bias_head = false;
	check(c);
}

static void padded_batches(void **state)
{
	struct backward_case c = plain(ABI_F32);

	(void)state;
	c.padded = true;
	c.bias = true;
	check(c);
	c.bias_batch = true;
	check(c);
}

static void scales(void **state)
{
	struct backward_case c = plain(ABI_F32);

	(void)state;
	c.zero_scale = true;
	check(c);
	c.mask = ABI_MASK_BOTTOM_RIGHT;
	c.window_right = 0;
	check(c);
	c.zero_scale = false;
	c.scale = -0.3f;
	check(c);
}

/* Logits of +-1e4 leave one key a row; float itself resolves them to about 1e-3. */
static void large_logits(void **state)
{
	struct backward_case c = plain(ABI_F32);
	struct backward_problem *p;

	(void)state;
	c.magnitude = 100;
	c.scale = 0.1f;
	p = backward_problem_new(&c, 3);
	backward_problem_poison(p);
	backward_problem_run(p, cpu_level_detect(), 1);
	backward_problem_check(p, 1e-2);
	backward_problem_free(p);
}

/*
 * Logits of about +-80, whose rounding errors are some 1e-5: they cancel in S - LSE when backward
 * makes S as forward made it. Then the worst of all is 1.05e-5, 1.4e-5 where nothing is fused for
 * lack of optimisation, as the formula in plain float has; with an S of its own it is 2e-5.
 */
static void logits_of_eighty(void **state)
{
	struct backward_case c = plain(ABI_F32);

	(void)state;
	c.seqlen_q = c.seqlen_k = 128;
	c.hdim_q = c.hdim_v = 64;
	c.magnitude = 8.7f;
	for (int level = CPU_X86_64_V3; level < CPU_N_LEVELS && launch_has_level(level);
	     level = launch_next_level(level))
		for (uint64_t seed = 1; seed < 9; seed++) {
			struct backward_problem *p;

			c.forward_level = level;
			p = backward_problem_new(&c, seed);
			backward_problem_poison(p);
			backward_problem_run(p, level, 1);
			backward_problem_check(p, 1.6e-5);
			backward_problem_free(p);
		}
}

/*
 * Adds row @i of one head to gradients: the formula with P and dS in bf16 and sums in float. Rows
 * of q, k and of d_o, v are a->hdim_q and a->hdim_v long.
 */
static void add_row_in_type(const struct abi_bwd_args *a, const float *q, const float *k,
			    const float *v, const float *d_o, float lse, float delta, float *dq,
			    float *dk, float *dv)
{
	for (int32_t j = 0; j < a->sequences.seqlen_k_max; j++) {
		const float *kj = k + j * a->hdim_q, *vj = v + j * a->hdim_v;
		float s = 0, dp = 0, p;
		uint16_t rounded[2];

		for (int32_t d = 0; d < a->hdim_q; d++)
			s += q[d] * kj[d];
		for (int32_t d = 0; d < a->hdim_v; d++)
			dp += d_o[d] * vj[d];
		p = expf(s * a->scale - lse);
		reference_store(rounded, ABI_BF16, 0, p);
		reference_store(rounded, ABI_BF16, 1, p * (dp - delta));
		for (int32_t d = 0; d < a->hdim_v; d++)
			dv[j * a->hdim_v + d] += (float)reference_load(rounded, ABI_BF16, 0) *
						 d_o[d];
		for (int32_t d = 0; d < a->hdim_q; d++) {
			dk[j * a->hdim_q + d] += (float)reference_load(rounded, ABI_BF16, 1) * q[d];
			dq[d] += (float)reference_load(rounded, ABI_BF16, 1) * kj[d];
		}
	}
}

static float *floats_of(const struct abi_tensor *t, int64_t n)
{
	float *x = calloc((size_t)n, sizeof(*x));

	assert_non_null(x);
	for (int64_t i = 0; t && i < n; i++)
		x[i] = (float)reference_load(t->data, ABI_BF16, i);
	return x;
}

/* The largest error of @n bf16 elements at @data, or of @x * @factor rounded where there is an @x.
 */
static double worst_error(const double *expected, const void *data, const float *x, float factor,
			  int64_t n)
{
	double worst = 0;
	uint16_t one;

	for (int64_t i = 0; i < n; i++) {
		if (x)
			reference_store(&one, ABI_BF16, 0, x[i] * factor);
		worst = fmax(worst, fabs(expected[i] - (x ? reference_load(&one, ABI_BF16, 0)
							  : reference_load(data, ABI_BF16, i))));
	}
	return worst;
}

/* DESIGN section 7: at most twice the error of the formula in the type, of every gradient. */
static void check_bar(struct backward_problem *p, float *const in_type[3])
{
	const struct abi_bwd_args *a = &p->args;
	const double *expected[3] = {p->dq, p->dk, p->dv};
	const void *got[3] = {a->dq.data, a->dk.data, a->dv.data};
	const int64_t n[3] = {p->n_q, p->n_k, p->n_v};

	for (int level = CPU_PORTABLE; level < CPU_N_LEVELS && launch_has_level(level);
	     level = launch_next_level(level)) {
		backward_problem_poison(p);
		backward_problem_run(p, level, 1);
		for (int i = 0; i < 3; i++) {
			double bar = worst_error(expected[i], NULL, in_type[i],
						 i == 2 ? 1 : a->scale, n[i]);
			double error = worst_error(expected[i], got[i], NULL, 1, n[i]);

			if (!(error <= 2 * bar))
				fail_msg("%s: d%c differs by %g, the formula in bf16 by %g",
					 cpu_level_name(level), "qkv"[i], error, bar);
		}
	}
}

static void bf16_keeps_the_bar(void **state)
{
	struct backward_case c = plain(ABI_BF16);

	(void)state;
	c.batch = c.nhead_q = c.nhead_k = 1;
	c.seqlen_q = 200;
	c.seqlen_k = 270;
	for (uint64_t seed = 1; seed < 9; seed++) {
		struct backward_problem *p;
		float *q, *k, *v, *d_o, *o, *in_type[3];

		c.hdim_q = c.hdim_v = seed & 1 ? 64 : 128;
		c.magnitude = seed & 2 ? 1 : 3;
		p = backward_problem_new(&c, seed);
		q = floats_of(&p->args.q, p->n_q);
		k = floats_of(&p->args.k, p->n_k);
		v = floats_of(&p->args.v, p->n_v);
		o = floats_of(&p->args.o, p->n_o);
		d_o = floats_of(&p->args.d_o, p->n_o);
		in_type[0] = floats_of(NULL, p->n_q);
		in_type[1] = floats_of(NULL, p->n_k);
		in_type[2] = floats_of(NULL, p->n_v);
		for (int32_t i = 0; i < c.seqlen_q; i++) {
			float delta = 0;

			for (int32_t d = i * c.hdim_v; d < (i + 1) * c.hdim_v; d++)
				delta += d_o[d] * o[d];
			add_row_in_type(&p->args, q + i * c.hdim_q, k, v, d_o + i * c.hdim_v,
					p->args.lse.data[i], delta, in_type[0] + i * c.hdim_q,
					in_type[1], in_type[2]);
		}
		check_bar(p, in_type);
		free(q), free(k), free(v), free(o), free(d_o);
		free(in_type[0]), free(in_type[1]), free(in_type[2]);
		backward_problem_free(p);
	}
}

/* Rows an odd number of elements apart, where pairs of them are no pairs of the tensor's. */
static void rows_lie_anywhere(void **state)
{
	struct backward_case c = plain(ABI_BF16);
	struct backward_problem *p;
	struct abi_tensor *moved[3], dense;

	(void)state;
	c.batch = c.nhead_q = c.nhead_k = 1;
	c.seqlen_q = c.seqlen_k = 128;
	c.hdim_q = c.hdim_v = 64;
	p = backward_problem_new(&c, 9);
	moved[0] = &p->args.q, moved[1] = &p->args.k, moved[2] = &p->args.d_o;
	for (int level = CPU_PORTABLE; level < CPU_N_LEVELS && launch_has_level(level);
	     level = launch_next_level(level)) {
		uint64_t hash;

		backward_problem_poison(p);
		backward_problem_run(p, level, 1);
		hash = backward_problem_hash(p);
		for (int i = 0; i < 3; i++) {
			dense = *moved[i];
			moved[i]->data = malloc(sizeof(uint16_t) * 128 * 65);
			moved[i]->stride_seq = 65;
			assert_non_null(moved[i]->data);
			for (int row = 0; row < 128; row++)
				memcpy((uint16_t *)moved[i]->data + row * 65,
				       (uint16_t *)dense.data + row * 64, sizeof(uint16_t) * 64);
			backward_problem_poison(p);
			backward_problem_run(p, level, 1);
			assert_true(hash == backward_problem_hash(p));
			free(moved[i]->data);
			*moved[i] = dense;
		}
	}
	backward_problem_free(p);
}

static void fill_nan(const struct abi_tensor *t, uint32_t dtype, int64_t offset, int32_t n)
{
	for (int32_t d = 0; d < n; d++)
		reference_store(t->data, dtype, offset + d, NAN);
}

static bool is_nan(const struct abi_tensor *t, uint32_t dtype, int64_t offset)
{
	return isnan(reference_load(t->data, dtype, offset));
}

/* NaN in a key that a causal mask hides from most rows, and in the query that sees the most:
 * gradients are NaN where the formula says so, and nowhere else. */
static void check_nan_stays(uint32_t dtype)
{
	struct backward_case c = plain(dtype);
	struct backward_problem *p;
	const struct abi_bwd_args *a;
	struct view_sequence v;

	c.batch = 1;
	c.seqlen_q = c.seqlen_k = 90;
	c.mask = ABI_MASK_BOTTOM_RIGHT;
	c.window_right = 0;
	p = backward_problem_new(&c, 4);
	a = &p->args;
	v = view_sequence(&a->sequences, NULL, 0);
	for (int level = CPU_PORTABLE; level < CPU_N_LEVELS && launch_has_level(level);
	     level = launch_next_level(level)) {
		fill_nan(&a->k, dtype, view_k_offset(&a->k, &v, 80, 0), c.hdim_q);
		backward_problem_poison(p);
		backward_problem_run(p, level, 1);
		for (int32_t i = 0; i < 90; i++) {
			assert_int_equal(is_nan(&a->dq, dtype, view_q_offset(&a->dq, &v, i, 0)),
					 i >= 80);
			assert_false(is_nan(&a->dq, dtype, view_q_offset(&a->dq, &v, i, 1)));
			/* Only key 80 has P = NaN: LSE is the finite one of the forward pass. */
			assert_int_equal(is_nan(&a->dk, dtype, view_k_offset(&a->dk, &v, i, 0)),
					 i == 80);
		}
	}
	backward_problem_free(p);
}

static void nan_stays_where_it_belongs(void **state)
{
	(void)state;
	check_nan_stays(ABI_F32);
	check_nan_stays(ABI_BF16);
}

static void check_padding_unread(uint32_t dtype)
{
	struct backward_case c = plain(dtype);
	struct backward_problem *p;
	const struct abi_bwd_args *a;

	c.group = c.padded = true;
	p = backward_problem_new(&c, 5);
	a = &p->args;
	for (int32_t b = 0; b < c.batch; b++) {
		struct view_sequence v = view_sequence(&a->sequences, NULL, b);

		for (int32_t h = 0; h < 2; h++) {
			for (int32_t i = v.q_len; i < v.q_physical; i++) {
				fill_nan(&a->q, dtype, view_q_offset(&a->q, &v, i, h), c.hdim_q);
				fill_nan(&a->o, dtype, view_q_offset(&a->o, &v, i, h), c.hdim_v);
				fill_nan(&a->d_o, dtype, view_q_offset(&a->d_o, &v, i, h),
					 c.hdim_v);
			}
			for (int32_t j = v.k_len; j < p->seqstart_k[b + 1] - p->seqstart_k[b];
			     j++) {
				fill_nan(&a->k, dtype, view_k_offset(&a->k, &v, j, h), c.hdim_q);
				fill_nan(&a->v, dtype, view_k_offset(&a->v, &v, j, h), c.hdim_v);
			}
		}
	}
	for (int level = CPU_PORTABLE; level < CPU_N_LEVELS && launch_has_level(level);
	     level = launch_next_level(level)) {
		backward_problem_poison(p);
		backward_problem_run(p, level, 1);
		backward_problem_check(p, backward_tolerance(c.dtype));
	}
	backward_problem_free(p);
}

static void nan_in_padding_is_never_read(void **state)
{
	(void)state;
	check_padding_unread(ABI_F32);
	check_padding_unread(ABI_BF16);
}

static void same_bits_every_time(void **state)
{
	struct backward_case c = plain(ABI_BF16);

	(void)state;
	c.seqlen_q = 530;
	c.seqlen_k = 600;
	c.nhead_k = 1;
	c.p_drop = 0.1f;
	c.sink = c.bias = c.bias_head = true;
	c.mask = ABI_MASK_BOTTOM_RIGHT;
	c.window_right = 0;
	for (int variant = 0; variant < 4; variant++) {
		struct backward_problem *p;
		uint64_t hash = 0;

		c.group = variant % 2;
		c.split_keys = variant / 2 * 200;
		p = backward_problem_new(&c, 6);
		for (int run = 0; run < 20; run++) {
			backward_problem_poison(p);
			backward_problem_run(p, cpu_level_detect(), 1 + run % 8);
			if (!run)
				hash = backward_problem_hash(p);
			assert_true(hash == backward_problem_hash(p));
		}
		backward_problem_free(p);
	}
}

/* Masks that are data, over tiles' borders and chunks of the square. FMHA_MASK_CASES: how many. */
static void masks_as_data(void **state)
{
	const char *cases = getenv("FMHA_MASK_CASES");
	uint64_t n = cases ? strtoull(cases, NULL, 0) : share_of(60);

	(void)state;
	for (uint64_t seed = 1000; seed < 1000 + n; seed++) {
		struct backward_case c;

		backward_case_random(&c, seed);
		c.mask_data = seed % 3 ? MASK_INTERVALS : MASK_BITS;
		c.n_endpoints = seed % 7 ? 1 + 2 * (int32_t)(seed % 4) : 63;
		if (seed % 5 == 0)
			c.seqlen_q = 700;
		backward_case_seed = seed;
		check(c);
		backward_case_seed = 0;
	}
}

struct scribbler {
	struct backward_problem *p;
	atomic_bool stop;
};

static void *scribble(void *arg)
{
	struct scribbler *s = arg;

	for (uint64_t seed = 1; !atomic_load(&s->stop); seed++)
		mask_case_scribble(&s->p->args.mask_data, &s->p->mask_shape, seed);
	return NULL;
}

/* An owner that writes its mask meanwhile gets what it gets; a second task of the same launch, and
 * what lies around the gradients, stay whole. The sanitizers see the rest. */
static void a_racing_owner_spoils_its_own(void **state)
{
	(void)state;
	for (uint64_t seed = 2000; seed < 2012; seed++) {
		struct backward_case c;
		struct scribbler s = {0};
		pthread_t thread;

		backward_case_random(&c, seed);
		c.mask_data = seed % 2 ? MASK_INTERVALS : MASK_BITS;
		c.n_endpoints = 5;
		s.p = backward_problem_new(&c, seed);
		assert_int_equal(pthread_create(&thread, NULL, scribble, &s), 0);
		for (int level = CPU_PORTABLE; level < CPU_N_LEVELS && launch_has_level(level);
		     level = launch_next_level(level)) {
			backward_problem_poison(s.p);
			backward_problem_run(s.p, level, 2);
		}
		atomic_store(&s.stop, true);
		assert_int_equal(pthread_join(thread, NULL), 0);
		backward_problem_check_padding(s.p);
		backward_problem_free(s.p);
	}
}

/* Everything at once, at random; the seed is printed, and FMHA_TEST_SEED repeats one. */
static void random_problems(void **state)
{
	const char *only = getenv("FMHA_TEST_SEED");
	uint64_t first = only ? strtoull(only, NULL, 0) : 1, n = only ? 1 : share_of(60);

	(void)state;
	for (uint64_t seed = first; seed < first + n; seed++) {
		struct backward_case c;

		backward_case_random(&c, seed);
		if (getenv("FMHA_TEST_VERBOSE"))
			printf("seed %llu\n", (unsigned long long)seed);
		backward_case_seed = seed;
		check(c);
		backward_case_seed = 0;
	}
}

static const struct CMUnitTest tests[] = {
	cmocka_unit_test(plain_in_every_type),
	cmocka_unit_test(masks_and_windows),
	cmocka_unit_test(rows_without_keys),
	cmocka_unit_test(lengths),
	cmocka_unit_test(head_dims),
	cmocka_unit_test(heads_share_keys),
	cmocka_unit_test(many_chunks),
	cmocka_unit_test(many_heads),
	cmocka_unit_test(soft_cap_and_alibi),
	cmocka_unit_test(bias_of_every_shape),
	cmocka_unit_test(dropout_regenerated_and_stored),
	cmocka_unit_test(sinks),
	cmocka_unit_test(packed_sequences),
	cmocka_unit_test(bias_of_no_rows),
	cmocka_unit_test(padded_batches),
	cmocka_unit_test(scales),
	cmocka_unit_test(large_logits),
	cmocka_unit_test(logits_of_eighty),
	cmocka_unit_test(bf16_keeps_the_bar),
	cmocka_unit_test(rows_lie_anywhere),
	cmocka_unit_test(nan_stays_where_it_belongs),
	cmocka_unit_test(nan_in_padding_is_never_read),
	cmocka_unit_test(same_bits_every_time),
	cmocka_unit_test(masks_as_data),
	cmocka_unit_test(a_racing_owner_spoils_its_own),
	cmocka_unit_test(random_problems),
};

int main(void)
{
	return cmocka_run_group_tests(tests, NULL, NULL);
}
