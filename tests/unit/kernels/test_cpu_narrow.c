/* SPDX-License-Identifier: MIT */
/*
 * test_cpu_narrow.c: queries of 16 bits over keys and values of 8. With factors that are powers of two
 * a kernel gives the bits that it gives on the cache that they stand for, and in any case what the
 * reference says.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <kernels/cpu_kernels.h>
#include <kernels/reference.h>
#include <kernels/view.h>

#include "../share.h"
#include "forward_case.h"
#include "launch.h"

static const uint32_t families[] = {ABI_FWD, ABI_FWD_SPLITKV, ABI_FWD_PAGEDKV, ABI_BATCH_PREFILL};

/* Bytes of the case's allocation that begins at @data. */
static size_t bytes_at(const struct forward_case *c, const void *data)
{
	for (int i = 0; i < c->n_allocations; i++)
		if (c->allocations[i] == data)
			return c->sizes[i];
	abort();
}

/* K or V of @c in its queries' type: what the numbers and their factors stand for. */
static void *widened(const struct forward_case *c, bool is_v)
{
	const struct abi_fwd_args *a = &c->args;
	const struct abi_tensor *t = is_v ? &a->v : &a->k;
	const struct abi_descale *descale = is_v ? &a->v_descale : &a->k_descale;
	int32_t hdim = is_v ? a->hdim_v : a->hdim_q;
	size_t bytes = 2 * bytes_at(c, t->data);
	uint8_t *wide = malloc(bytes + 64);

	if (!wide)
		abort();
	memset(wide, 0xff, bytes + 64);
	for (int32_t b = 0; b < a->sequences.batch; b++) {
		struct view_sequence s = view_sequence(&a->sequences, &a->cache, b);

		for (int32_t p = s.leftpad; p < s.leftpad + s.k_len; p++) {
			int64_t page = a->cache.page_size ? view_page(&a->cache, &s, p) : 0;

			for (int32_t i = 0; i < a->nhead_k * hdim; i++) {
				int64_t at = view_cache_offset(&a->cache, t, &s, p, i / hdim,
							       i % hdim, a->nhead_k, hdim, 16,
							       is_v);
				double kept,
					x = reference_load(t->data, (uint32_t)a->kv_dtype, at) *
					    (double)view_descale(descale, b, i / hdim, p, page,
								 a->cache.page_size);

				reference_store(wide, (uint32_t)a->dtype, at, x);
				kept = reference_load(wide, (uint32_t)a->dtype, at);
				assert_true(x == kept || (isnan(x) && isnan(kept)));
			}
		}
	}
	return wide;
}

static void clear(const struct forward_case *c)
{
	memset(c->args.o.data, 0xff, c->o_bytes);
	memset(c->args.lse.data, 0xff, c->lse_bytes);
	if (c->args.n_splits)
		memset(c->args.o_acc, 0xff, c->o_acc_bytes);
}

/* A NaN may carry any bits: all become one. */
static void unify_nans(const struct forward_case *c, uint8_t *o)
{
	uint16_t bits, infinity = c->args.dtype == ABI_F16 ? 0x7c00 : 0x7f80;

	for (size_t i = 0; !c->args.n_splits && i < c->o_bytes; i += sizeof(bits)) {
		memcpy(&bits, o + i, sizeof(bits));
		if ((bits & 0x7fff) > infinity)
			memset(o + i, 0xff, sizeof(bits));
	}
}

/* O and LSE, or their parts, one behind the other. */
static size_t results(const struct forward_case *c, uint8_t *to)
{
	size_t n = c->args.n_splits ? c->o_acc_bytes : c->o_bytes + c->lse_bytes;

	if (to && c->args.n_splits) {
		memcpy(to, c->args.o_acc, n);
	} else if (to) {
		memcpy(to, c->args.o.data, c->o_bytes);
		memcpy(to + c->o_bytes, c->args.lse.data, c->lse_bytes);
		unify_nans(c, to);
	}
	return n;
}

static int compare_kernel(struct forward_case *c, const struct cpu_kernel *kernel,
			  const struct abi_fwd_args *wide)
{
	size_t n = results(c, NULL);
	uint8_t *got = malloc(n + 1), *want = malloc(n + 1);
	int differs;

	if (!got || !want)
		abort();
	clear(c);
	kernel_run(kernel, &c->args, 2);
	(void)results(c, got);
	clear(c);
	kernel_run(kernel, wide, 2);
	(void)results(c, want);
	differs = memcmp(got, want, n) != 0;
	if (differs)
		fprintf(stderr, "%s %s: not the bits of the 16-bit cache\n",
			cpu_level_name(kernel->level), kernel->pipeline);
	free(got);
	free(want);
	return differs;
}

/* On every kernel of every level. Returns how many differ. */
static int compare(struct forward_case *c)
{
	struct abi_fwd_args wide = c->args;
	int failures = 0, n_run = 0;

	wide.kv_dtype = 0;
	wide.k.data = widened(c, false);
	wide.v.data = widened(c, true);
	wide.k_descale = wide.v_descale = (struct abi_descale){0};
	for (int level = 0; level <= (int)cpu_level_detect(); level = launch_next_level(level)) {
		size_t n;
		const struct cpu_kernel *const *kernels = cpu_kernels((enum cpu_level)level, &n);

		for (size_t i = 0; i < n; i++) {
			if (kernels[i]->family != c->options.family ||
			    kernels[i]->dtype != (uint32_t)c->options.dtype ||
			    !kernels[i]->accepts(&c->args))
				continue;
			n_run++;
			failures += compare_kernel(c, kernels[i], &wide);
		}
	}
	assert_true(n_run > 0);
	free(wide.k.data);
	free(wide.v.data);
	return failures;
}

static void powers_of_two_change_no_bit(void **state)
{
	int failures = 0;

	(void)state;
	for (uint64_t seed = 1; seed <= share_of(120); seed++) {
		struct random r = {seed};
		struct forward_options o;
		struct forward_case c;

		forward_options_random(&o, &r, families[random_int(&r, 0, 3)],
				       random_int(&r, ABI_F16, ABI_BF16));
		o.kv_dtype = random_kv_dtype(&r);
		o.descale = random_int(&r, 1, o.page_size ? 6 : 4);
		o.powers = 1;
		o.vectorized = 0; /* lies in another way in the other type */
		forward_case_init(&c, &o, &r);
		if (compare(&c) > 0) {
			fprintf(stderr, "seed %llu: ", (unsigned long long)seed);
			forward_options_print(&o);
			failures++;
		}
		forward_case_deinit(&c);
	}
	assert_int_equal(failures, 0);
}

static const int32_t kv_types[] = {ABI_E4M3, ABI_E5M2, ABI_I8};

/* Every code as a value that one row sees alone: O is that number, NaN and infinities too. */
static void every_code(void **state)
{
	(void)state;
	for (int dtype = ABI_F16; dtype <= ABI_BF16; dtype++)
		for (int kind = 0; kind < 3; kind++)
			for (int rows = 1; rows <= 20; rows += 19) {
				int32_t kv = kv_types[kind];
				struct random r = {3};
				struct forward_options o = {
					.family = ABI_FWD,
					.dtype = dtype,
					.o_dtype = dtype,
					.kv_dtype = kv,
					.batch = 1,
					.seqlen_q = rows,
					.seqlen_k = 1,
					.nhead_k = 1,
					.group = 1,
					.hdim_q = 64,
					.hdim_v = 256,
					.window_left = -1,
					.window_right = -1,
					.scale = 0.1f,
				};
				struct forward_case c;

				forward_case_init(&c, &o, &r);
				for (int i = 0; i < 256; i++)
					((uint8_t *)c.args.v.data)[i] = (uint8_t)i;
				assert_int_equal(compare(&c), 0);
				for (int i = 0; i < 256; i++) {
					double want = reference_load(c.args.v.data, (uint32_t)kv,
								     i);
					double got = reference_load(c.args.o.data, (uint32_t)dtype,
								    i);

					assert_true(got == want || (isnan(got) && isnan(want)));
				}
				forward_case_deinit(&c);
			}
}

/* Thousands of keys and values of one sign, a factor for each: nothing cancels. */
static void one_sign(void **state)
{
	(void)state;
	for (int dtype = ABI_F16; dtype <= ABI_BF16; dtype++)
		for (int kind = 1; kind <= 6; kind++)
			for (int rows = 2; rows <= 24; rows += 22) {
				struct random r = {(uint64_t)kind};
				struct forward_options o = {
					.family = kind >= 5 ? ABI_FWD_PAGEDKV : ABI_FWD,
					.dtype = dtype,
					.o_dtype = dtype,
					.kv_dtype = kv_types[kind % 3],
					.batch = 1,
					.seqlen_q = rows,
					.seqlen_k = 6000,
					.nhead_k = 1,
					.group = 2,
					.hdim_q = 64,
					.hdim_v = 40,
					.window_left = -1,
					.window_right = -1,
					.scale = 0.125f,
					.page_size = kind >= 5 ? 16 : 0,
					.descale = kind,
					.one_sign = 1,
				};
				struct forward_case c;
				size_t n;
				const struct cpu_kernel *const *kernels = cpu_kernels(
					cpu_level_detect(), &n);

				forward_case_init(&c, &o, &r);
				for (size_t i = 0; i < n; i++)
					if (kernels[i]->family == o.family &&
					    kernels[i]->dtype == (uint32_t)dtype &&
					    kernels[i]->accepts(&c.args))
						assert_int_equal(
							forward_case_check(&c, kernels[i], 1), 0);
				forward_case_deinit(&c);
			}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(powers_of_two_change_no_bit),
		cmocka_unit_test(every_code),
		cmocka_unit_test(one_sign),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
