/* SPDX-License-Identifier: MIT */
/*
 * test_cpu_latent.c: values that are part of keys, latents of fp8, and keys that indices name: every kernel of
 * every level that accepts a case against the reference.
 */
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

static void *allocate(size_t bytes, int byte)
{
	void *memory = malloc(bytes + 64);

	if (!memory)
		abort();
	return memset(memory, byte, bytes + 64);
}

static int check(struct forward_case *c, uint64_t seed, int *n_latent)
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
			*n_latent += strcmp(kernels[i]->pipeline, "cpu_latent") == 0;
			failures += forward_case_check(c, kernels[i], 1) != 0;
		}
	}
	if (failures) {
		fprintf(stderr, "seed %llu: ", (unsigned long long)seed);
		forward_options_print(&c->options);
	}
	assert_true(n_run > 0);
	return failures;
}

/* Values are the first elements of keys, with their factors. */
static void share(struct forward_case *c)
{
	c->args.v_in_k = 1;
	c->args.v = c->args.k;
	c->args.v_descale = c->args.k_descale;
}

static struct forward_options shared_options(struct random *r)
{
	struct forward_options o;

	forward_options_random(&o, r, families[random_int(r, 0, 3)],
			       random_int(r, ABI_F32, ABI_E5M2));
	o.v_columns = o.vectorized = 0;
	o.hdim_v = o.hdim_v < o.hdim_q ? o.hdim_v : o.hdim_q;
	if (random_chance(r, 4)) { /* as many heads as models have, and some that fill no tile */
		static const int groups[] = {8, 20, 65, 128};

		o.nhead_k = 1;
		o.group = groups[random_int(r, 0, 3)];
		o.seqlen_q = o.seqlen_q < 3 ? o.seqlen_q : 3;
	}
	return o;
}

static void values_within_keys(void **state)
{
	int failures = 0, n_latent = 0;

	(void)state;
	for (uint64_t seed = 1; seed <= share_of(150); seed++) {
		struct random r = {seed};
		struct forward_options o = shared_options(&r);
		struct forward_case c;

		forward_case_init(&c, &o, &r);
		share(&c);
		failures += check(&c, seed, &n_latent);
		forward_case_deinit(&c);
	}
	assert_int_equal(failures, 0);
	assert_true((uint64_t)n_latent > share_of(50));
}

/* Numbers in all of a latent that a sequence has; 0xff, which is NaN everywhere, in the others. */
static void *latents_new(struct forward_case *c, struct random *r)
{
	struct abi_fwd_args *a = &c->args;
	bool paged = a->cache.page_size > 0;
	int64_t outer = paged ? a->cache.n_pages : a->sequences.seqstart_k ? 1 : a->sequences.batch;
	int64_t length = paged                     ? a->cache.page_size
			 : a->sequences.seqstart_k ? a->sequences.total_k
						   : a->sequences.seqlen_k_max;
	uint8_t *data = allocate((size_t)(outer * length) * ABI_LATENT_BYTES, 0xff);

	if (a->cache.cache_batch_idx)
		abort();
	a->cache.layout = ABI_KV_LATENT_FP8;
	a->k = (struct abi_tensor){.data = data,
				   .stride_batch = length * ABI_LATENT_BYTES,
				   .stride_seq = ABI_LATENT_BYTES,
				   .stride_head = ABI_LATENT_BYTES,
				   .stride_dim = 1};
	for (int32_t b = 0; b < a->sequences.batch; b++) {
		struct view_sequence s = view_sequence(&a->sequences, &a->cache, b);

		for (int32_t p = s.leftpad; p < s.leftpad + s.k_len; p++) {
			uint8_t *key = data + view_cache_offset(&a->cache, &a->k, &s, p, 0, 0, 1,
								576, 16, false);

			for (int d = 0; d < ABI_LATENT_CODES; d++)
				reference_store(key, ABI_E4M3, d, 30 * (double)random_normal(r));
			for (int i = 0; i < ABI_LATENT_CODES / ABI_LATENT_BLOCK; i++)
				reference_store(key + ABI_LATENT_FACTORS, ABI_F32, i,
						(double)random_uniform(r, 0.01f, 0.05f));
			for (int d = 0; d < 576 - ABI_LATENT_CODES; d++)
				reference_store(key + ABI_LATENT_REST, ABI_BF16, d,
						(double)random_normal(r));
		}
	}
	return data;
}

static struct forward_options latent_options(struct random *r)
{
	struct forward_options o = shared_options(r);

	o.dtype = random_int(r, ABI_F16, ABI_BF16);
	o.o_dtype = o.dtype;
	o.kv_dtype = ABI_E4M3;
	o.nhead_k = 1;
	o.hdim_q = 576;
	o.hdim_v = 512;
	o.seqlen_q = o.seqlen_q < 4 ? o.seqlen_q : 4;
	o.seqlen_k = o.seqlen_k < 300 ? o.seqlen_k : 300;
	o.p_drop = 0;
	o.store_bytes = o.descale = o.batch_index = 0;
	o.mask_data = MASK_NO_DATA;
	o.min_seqlen_q = 0;
	return o;
}

static void latents_of_fp8(void **state)
{
	int failures = 0, n_latent = 0;

	(void)state;
	for (uint64_t seed = 1; seed <= share_of(60); seed++) {
		struct random r = {seed};
		struct forward_options o = latent_options(&r);
		struct forward_case c;
		void *latents;

		forward_case_init(&c, &o, &r);
		latents = latents_new(&c, &r);
		share(&c);
		failures += check(&c, seed, &n_latent);
		free(latents);
		forward_case_deinit(&c);
	}
	assert_int_equal(failures, 0);
	assert_true((uint64_t)n_latent >= share_of(60));
}

/* A key of any sequence, as a slot. */
static int32_t any_slot(const struct abi_fwd_args *a, struct random *r)
{
	struct view_sequence s = view_sequence(&a->sequences, &a->cache,
					       random_int(r, 0, a->sequences.batch - 1));
	int32_t position = s.k_len > 0 ? random_int(r, 0, s.k_len - 1) : -1;

	return position < 0 ? -1
			    : (int32_t)view_page(&a->cache, &s, position) * a->cache.page_size +
				      position % a->cache.page_size;
}

static int32_t *choose(struct forward_case *c, struct random *r, bool slots)
{
	static const int32_t hostile[] = {INT32_MIN, INT32_MAX, -1, -2};
	struct abi_fwd_args *a = &c->args;
	int64_t rows = a->sequences.total_q, at = 0;
	int32_t n = random_int(r, 1, 130), *list = allocate((size_t)rows * (size_t)n * 4, 0xff);

	a->chosen = (struct abi_chosen){.data = list,
					.stride_batch = (int64_t)a->sequences.seqlen_q_max * n,
					.stride_seq = n,
					.stride_entry = 1,
					.n = n,
					.are_slots = slots};
	for (int32_t b = 0; b < a->sequences.batch; b++) {
		struct view_sequence s = view_sequence(&a->sequences, &a->cache, b);

		at = (s.packed_q ? s.q_start : (int64_t)b * a->sequences.seqlen_q_max) * n;
		for (int64_t e = 0; e < (int64_t)s.q_len * n; e++)
			list[at + e] = random_chance(r, 8) ? hostile[random_int(r, 0, 3)]
				       : slots             ? any_slot(a, r)
				       : random_chance(r, 8)
					       ? s.k_len
					       : random_int(r, 0, s.k_len > 0 ? s.k_len - 1 : 0);
	}
	if (slots) { /* nothing else finds a page, or says how many keys there are */
		a->cache.block_table = a->cache.kv_indptr = a->cache.kv_page_indices = NULL;
		a->cache.kv_last_page_len = a->sequences.seqlen_k = NULL;
		a->sequences.seqlen_k_max = 0;
	}
	return list;
}

static void chosen_keys(void **state)
{
	int failures = 0, n_latent = 0;

	(void)state;
	for (uint64_t seed = 1; seed <= share_of(150); seed++) {
		struct random r = {seed};
		bool fp8 = random_chance(&r, 3);
		struct forward_options o = fp8 ? latent_options(&r) : shared_options(&r);
		struct forward_case c;
		void *list, *latents = NULL;

		o.mask = ABI_MASK_NONE;
		o.window_left = o.window_right = -1;
		o.family = o.family == ABI_FWD_SPLITKV ? ABI_FWD : o.family;
		o.sink_tokens = o.bias = o.alibi = o.leftpad = o.n_splits = o.split_size = 0;
		o.store_bytes = 0;
		o.p_drop = 0;
		o.mask_data = MASK_NO_DATA;
		if (o.page_size && o.descale && o.descale < 5)
			o.descale = 1; /* a slot belongs to no sequence */
		forward_case_init(&c, &o, &r);
		if (fp8)
			latents = latents_new(&c, &r);
		if (fp8 || random_chance(&r, 2))
			share(&c);
		list = choose(&c, &r, o.page_size && random_chance(&r, 2));
		failures += check(&c, seed, &n_latent);
		free(list);
		free(latents);
		forward_case_deinit(&c);
	}
	assert_int_equal(failures, 0);
	assert_true((uint64_t)n_latent >= share_of(150));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(values_within_keys),
		cmocka_unit_test(latents_of_fp8),
		cmocka_unit_test(chosen_keys),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
