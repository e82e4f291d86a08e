/* SPDX-License-Identifier: MIT */
/*
 * test_cpu_forward.c: every forward kernel of every level that this machine has, against the
 * reference.
 *
 * FMHA_TEST_SEED and FMHA_TEST_CASES change the random cases; a failing case prints the seed that
 * repeats it alone with FMHA_TEST_CASES=1.
 */
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <cmocka.h>

#include <kernels/reference.h>
#include <kernels/view.h>

#include "../share.h"
#include "forward_case.h"
#include "launch.h"

static const uint32_t families[] = {ABI_FWD, ABI_FWD_SPLITKV, ABI_FWD_PAGEDKV, ABI_BATCH_PREFILL};

static uint64_t env_number(const char *name, uint64_t fallback)
{
	const char *text = getenv(name);

	return text ? strtoull(text, NULL, 0) : fallback;
}

/* Checks a case on every kernel of every level that accepts it; @tolerance 0: only that nothing outside
 * of its rows was written. */
static int check_case(struct forward_case *c, float tolerance)
{
	int failures = 0, n_run = 0;

	for (int level = 0; level <= (int)cpu_level_detect(); level = launch_next_level(level)) {
		size_t n;
		const struct cpu_kernel *const *kernels = cpu_kernels((enum cpu_level)level, &n);

		for (size_t i = 0; i < n; i++) {
			if (kernels[i]->family != c->options.family ||
			    kernels[i]->dtype != (uint32_t)c->options.dtype ||
			    !kernels[i]->accepts(&c->args))
				continue;
			n_run++;
			failures += (tolerance > 0
					     ? forward_case_check(c, kernels[i], tolerance)
					     : forward_case_check_untouched(c, kernels[i])) < 0;
		}
	}
	assert_true(n_run > 0);
	return failures;
}

static int check_everywhere(const struct forward_options *o, uint64_t seed, float tolerance)
{
	struct random r = {seed};
	struct forward_case c;
	int failures;

	forward_case_init(&c, o, &r);
	failures = check_case(&c, tolerance);
	forward_case_deinit(&c);
	return failures;
}

/* Masks that are data, of every family, with everything else at random. FMHA_MASK_CASES: how many. */
static void masks_as_data(void **state)
{
	uint64_t seed = env_number("FMHA_TEST_SEED", 5000),
		 n = env_number("FMHA_MASK_CASES", share_of(150));
	int failures = 0;

	(void)state;
	for (uint64_t i = 0; i < n; i++) {
		struct random r = {seed + i};
		struct forward_options o;

		forward_options_random(&o, &r, families[random_int(&r, 0, 3)],
				       random_int(&r, ABI_F32, ABI_E5M2));
		o.mask_data = random_chance(&r, 3) ? MASK_BITS : MASK_INTERVALS;
		o.n_endpoints = random_chance(&r, 6) ? 63 : 1 + 2 * random_int(&r, 0, 4);
		if (random_chance(&r, 4))
			o.seqlen_q = random_int(&r, 90, 300);
		if (check_everywhere(&o, seed + i, 1) > 0) {
			fprintf(stderr, "FMHA_TEST_SEED=%llu: ", (unsigned long long)(seed + i));
			forward_options_print(&o);
			failures++;
		}
	}
	assert_int_equal(failures, 0);
}

struct scribbler {
	struct forward_case *c;
	atomic_bool stop;
};

static void *scribble(void *arg)
{
	struct scribbler *s = arg;

	for (uint64_t seed = 1; !atomic_load(&s->stop); seed++)
		mask_case_scribble(&s->c->args.mask_data, &s->c->mask_shape, seed);
	return NULL;
}

/* An owner that writes its mask meanwhile gets what it gets, and O and LSE keep to their rows. */
static void a_racing_owner_spoils_its_own(void **state)
{
	(void)state;
	for (uint64_t i = 0; i < 24; i++) {
		struct random r = {i};
		struct forward_options o;
		struct forward_case c;
		struct scribbler s = {.c = &c};
		pthread_t thread;

		forward_options_random(&o, &r, families[i % 4], ABI_F32 + (int32_t)(i % 3));
		o.mask_data = i % 2 ? MASK_INTERVALS : MASK_BITS;
		o.n_endpoints = 5;
		forward_case_init(&c, &o, &r);
		assert_int_equal(pthread_create(&thread, NULL, scribble, &s), 0);
		assert_int_equal(check_case(&c, 0), 0);
		atomic_store(&s.stop, true);
		assert_int_equal(pthread_join(thread, NULL), 0);
		forward_case_deinit(&c);
	}
}

static void random_problems(void **state)
{
	uint64_t seed = env_number("FMHA_TEST_SEED", 1),
		 n = env_number("FMHA_TEST_CASES", share_of(300));
	int failures = 0;

	(void)state;
	for (uint64_t i = 0; i < n; i++) {
		struct random r = {seed + i};
		struct forward_options o;

		forward_options_random(&o, &r, families[random_int(&r, 0, 3)],
				       random_int(&r, ABI_F32, ABI_E5M2));
		if (check_everywhere(&o, seed + i, 1) > 0) {
			fprintf(stderr, "FMHA_TEST_SEED=%llu: ", (unsigned long long)(seed + i));
			forward_options_print(&o);
			failures++;
		}
	}
	assert_int_equal(failures, 0);
}

/* A small f32 problem with nothing special: the starting point of the cases below. */
static struct forward_options plain(int seqlen_q, int seqlen_k)
{
	struct forward_options o = {.family = ABI_FWD};

	o.dtype = ABI_F32;
	o.o_dtype = ABI_F32;
	o.batch = 2;
	o.seqlen_q = seqlen_q;
	o.seqlen_k = seqlen_k;
	o.nhead_k = 2;
	o.group = 2;
	o.hdim_q = 64;
	o.hdim_v = 64;
	o.window_left = -1;
	o.window_right = -1;
	o.scale = 0.125f;
	return o;
}

static void causal_rows_before_the_first_key(void **state)
{
	(void)state;
	for (int mask = ABI_MASK_TOP_LEFT; mask <= ABI_MASK_BOTTOM_RIGHT; mask++)
		for (int sink = 0; sink < 2; sink++) {
			struct forward_options o = plain(150, 40);

			o.mask = mask;
			o.window_right = 0;
			o.sink = sink;
			assert_int_equal(check_everywhere(&o, 7, 1), 0);
			o.seqlen_q = 6; /* decode */
			o.seqlen_k = 3;
			assert_int_equal(check_everywhere(&o, 8, 1), 0);
		}
}

/* Enough keys for smaller tiles, several blocks and, in decode, several chunks. */
static void thousands_of_keys(void **state)
{
	(void)state;
	for (int rows = 3; rows <= 60; rows += 57) {
		struct forward_options o = plain(rows, 4200);

		o.batch = o.nhead_k = 1;
		o.hdim_q = o.hdim_v = 16;
		assert_int_equal(check_everywhere(&o, 4, 1), 0);
		o.mask = ABI_MASK_BOTTOM_RIGHT;
		o.window_right = 0;
		o.window_left = 1500;
		o.sink_tokens = 5;
		assert_int_equal(check_everywhere(&o, 5, 1), 0);
	}
}

static void no_keys_at_all(void **state)
{
	(void)state;
	for (int rows = 1; rows <= 70; rows += 69) {
		struct forward_options o = plain(rows, 0);

		assert_int_equal(check_everywhere(&o, 1, 1), 0);
		o.sink = 1;
		assert_int_equal(check_everywhere(&o, 1, 1), 0);
	}
}

/* Rounding of a logit of 1e4 is 1e-3: the bar moves with it, and nothing overflows. */
static void enormous_logits(void **state)
{
	(void)state;
	for (int rows = 1; rows <= 70; rows += 69) {
		struct forward_options o = plain(rows, 300);

		o.magnitude = 40;
		o.scale = 1;
		assert_int_equal(check_everywhere(&o, 3, 1000), 0);
		o.scale = -1;
		assert_int_equal(check_everywhere(&o, 3, 1000), 0);
	}
}

static void scale_zero_averages(void **state)
{
	struct forward_options o = plain(33, 65);

	(void)state;
	o.scale = 0;
	o.mask = ABI_MASK_BOTTOM_RIGHT;
	o.window_right = 0;
	assert_int_equal(check_everywhere(&o, 3, 1), 0);
}

/* Stores @value into element 3 of key @column of every head and sequence, in K or V. */
static void poison_key(struct forward_case *c, int is_v, int column, double value)
{
	struct abi_fwd_args *a = &c->args;
	const struct abi_tensor *t = is_v ? &a->v : &a->k;

	for (int b = 0; b < a->sequences.batch; b++) {
		struct view_sequence s = view_sequence(&a->sequences, &a->cache, b);

		for (int h = 0; h < a->nhead_k; h++)
			reference_store(t->data, (uint32_t)a->dtype,
					view_cache_offset(&a->cache, t, &s, column, h, 3,
							  a->nhead_k, is_v ? a->hdim_v : a->hdim_q,
							  16 / (a->dtype == ABI_F32 ? 4 : 2), is_v),
					value);
	}
}

static int check_poisoned(const struct forward_options *o, int is_v, int column, double value)
{
	struct random r = {5};
	struct forward_case c;
	int failures;

	forward_case_init(&c, o, &r);
	poison_key(&c, is_v, column, value);
	failures = check_case(&c, 1);
	forward_case_deinit(&c);
	return failures;
}

/* Every family and type; few rows and a tile of them. */
static void any_head_dim(void **state)
{
	static const int32_t dims[] = {1,  3,  7,   8,   12,  17,  40,  59,
				       63, 72, 100, 111, 127, 257, 384, 512};
	int failures = 0;

	(void)state;
	for (int i = 0; i < 16; i++)
		for (int f = 0; f < 4; f++)
			for (int dtype = ABI_F32; dtype <= ABI_E5M2; dtype++)
				for (int rows = 1; rows <= 20; rows += 19) {
					struct random r = {1};
					struct forward_options o;

					forward_options_random(&o, &r, families[f], dtype);
					o = (struct forward_options){.family = o.family,
								     .dtype = o.dtype,
								     .o_dtype = o.o_dtype,
								     .varlen = o.varlen,
								     .n_splits = o.n_splits,
								     .split_size = o.split_size,
								     .page_size = o.page_size,
								     .indptr = o.indptr,
								     .batch = 2,
								     .seqlen_q = rows,
								     .seqlen_k = o.seqlen_k,
								     .nhead_k = 2,
								     .group = 2,
								     .hdim_q = dims[i],
								     .hdim_v = dims[i * 5 % 16],
								     .layout = i % 2,
								     .scale = 0.2f};
					failures += check_everywhere(&o, (uint64_t)i, 1);
				}
	assert_int_equal(failures, 0);
}

/* An infinity or NaN in one key or value shows in the rows that see it and in no other. */
static void not_finite_only_where_seen(void **state)
{
	static const int dtypes[] = {ABI_F32, ABI_BF16, ABI_E4M3, ABI_E5M2};
	static const int lengths[] = {4, 90};
	/* A NaN may carry any bits. */
	const double values[] = {(double)NAN, nan("0xfffffffffffff"), (double)INFINITY,
				 -(double)INFINITY};

	(void)state;
	for (int d = 0; d < 4; d++)
		for (int l = 0; l < 2; l++)
			for (int window = 0; window < 4; window++)
				for (int is_v = 0; is_v < 2; is_v++)
					for (int kind = 0; kind < 4; kind++) {
						struct forward_options o = plain(lengths[l],
										 lengths[l] + 7);

						o.dtype = dtypes[d];
						o.o_dtype = d == 0 ? ABI_F32 : ABI_BF16;
						o.mask = ABI_MASK_BOTTOM_RIGHT;
						o.window_right = 0;
						o.window_left = window == 1 ? 9 : -1;
						o.sink_tokens = window == 1 ? 2 : 0;
						o.mask_data = window > 1 ? window - 1
									 : MASK_NO_DATA;
						o.n_endpoints = 5;
						assert_int_equal(check_poisoned(&o, is_v,
										lengths[l] / 2,
										values[kind]),
								 0);
					}
}

/* Copies a tensor [seq, heads, dims] of one sequence to @to, where its strides need 64 bits. */
static void spread(struct abi_tensor *t, char *to, int seq, int heads, int dims)
{
	struct abi_tensor far = {.data = to, .stride_dim = 1};
	const float *from = t->data;

	far.stride_head = ((int64_t)1 << 30) + 64;
	far.stride_seq = ((int64_t)1 << 32) + 128;
	for (int i = 0; i < seq; i++)
		for (int h = 0; h < heads; h++)
			for (int d = 0; d < dims; d++)
				((float *)far.data)[i * far.stride_seq + h * far.stride_head + d] =
					from[i * t->stride_seq + h * t->stride_head +
					     d * t->stride_dim];
	*t = far;
}

static void strides_of_64_bits(void **state)
{
	const size_t bytes = (size_t)1 << 38, quarter = bytes / 4;
	struct forward_options o = plain(3, 4);
	struct random r = {11};
	struct forward_case c;
	char *map = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
			 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	(void)state;
	if (map == MAP_FAILED) {
		fprintf(stderr, "no 256 GiB of address space here: skipped\n");
		skip();
	}
	o.batch = 1;
	forward_case_init(&c, &o, &r);
	spread(&c.args.q, map, 3, 4, 64);
	spread(&c.args.k, map + quarter, 4, 2, 64);
	spread(&c.args.v, map + 2 * quarter, 4, 2, 64);
	spread(&c.args.o, map + 3 * quarter, 3, 4, 64);
	c.o_bytes = 0;
	assert_int_equal(check_case(&c, 1), 0);
	forward_case_deinit(&c);
	munmap(map, bytes);
}

/* What a kernel needs must not depend on what lies behind pointers: plans are made before data. */
static void sizes_need_no_data(void **state)
{
	struct forward_options o = plain(40, 90);
	struct random r = {2};
	struct forward_case c;
	size_t n;

	(void)state;
	o.varlen = 1;
	o.bias = 1;
	forward_case_init(&c, &o, &r);
	for (int level = 0; level <= (int)cpu_level_detect(); level = launch_next_level(level)) {
		const struct cpu_kernel *const *kernels = cpu_kernels((enum cpu_level)level, &n);

		for (size_t i = 0; i < n; i++) {
			struct abi_fwd_args a = c.args;
			size_t workspace, scratch;

			if (kernels[i]->family != ABI_FWD || kernels[i]->dtype != ABI_F32 ||
			    !kernels[i]->accepts(&a))
				continue;
			workspace = kernels[i]->workspace_bytes(&a, 2);
			scratch = kernels[i]->scratch_bytes(&a);
			a.q.data = a.k.data = a.v.data = a.o.data = a.bias.data = (void *)64;
			a.sequences.seqstart_q = a.sequences.seqstart_k = (const int32_t *)64;
			assert_true(kernels[i]->accepts(&a));
			assert_int_equal(kernels[i]->workspace_bytes(&a, 2), workspace);
			assert_int_equal(kernels[i]->scratch_bytes(&a), scratch);
		}
	}
	forward_case_deinit(&c);
}

/* Rows of eight elements are no whole vectors of AVX-512: AVX2 reads them rather than packing all
 * keys for a single row. */
static void few_rows_read_keys_as_they_are(void **state)
{
	(void)state;
	for (int hdim = 8; hdim <= 16; hdim += 8)
		for (int level = CPU_X86_64_V3; level < CPU_N_LEVELS; level++) {
			struct abi_fwd_args a = {
				.k = {.stride_dim = 1},
				.v = {.stride_dim = 1},
				.sequences = {.batch = 9, .seqlen_q_max = 1, .seqlen_k_max = 4096},
				.nhead_q = 1,
				.nhead_k = 1,
				.hdim_q = hdim,
				.hdim_v = hdim,
				.dtype = ABI_BF16,
				.o_dtype = ABI_BF16,
			};
			const struct cpu_kernel *kernel = cpu_kernel_find(level, ABI_FWD, ABI_BF16,
									  &a);

			assert_string_equal(kernel->pipeline, "cpu_decode");
			assert_int_equal(kernel->level, hdim == 8 ? CPU_X86_64_V3 : level);
			a.sequences.seqlen_q_max = 17;
			kernel = cpu_kernel_find(level, ABI_FWD, ABI_BF16, &a);
			assert_string_equal(kernel->pipeline, "cpu_flash");
			assert_int_equal(kernel->level, level);
		}
}

static void levels_have_names(void **state)
{
	enum cpu_level level;

	(void)state;
	for (int i = 0; i < CPU_N_LEVELS; i++) {
		assert_int_equal(cpu_level_from_name(cpu_level_name((enum cpu_level)i), &level), 0);
		assert_int_equal(level, i);
	}
	assert_int_equal(cpu_level_from_name("x86_64_v5", &level), -1);
	assert_true(cpu_level_detect() < CPU_N_LEVELS);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(levels_have_names),
		cmocka_unit_test(sizes_need_no_data),
		cmocka_unit_test(few_rows_read_keys_as_they_are),
		cmocka_unit_test(causal_rows_before_the_first_key),
		cmocka_unit_test(thousands_of_keys),
		cmocka_unit_test(no_keys_at_all),
		cmocka_unit_test(enormous_logits),
		cmocka_unit_test(scale_zero_averages),
		cmocka_unit_test(any_head_dim),
		cmocka_unit_test(not_finite_only_where_seen),
		cmocka_unit_test(strides_of_64_bits),
		cmocka_unit_test(masks_as_data),
		cmocka_unit_test(a_racing_owner_spoils_its_own),
		cmocka_unit_test(random_problems),
	};

	fprintf(stderr, "levels up to %s; levels above are not on this machine: skipped\n",
		cpu_level_name(cpu_level_detect()));
	return cmocka_run_group_tests(tests, NULL, NULL);
}
