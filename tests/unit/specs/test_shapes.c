// SPDX-License-Identifier: MIT
/* The shape matrices: sizes of the tiers, what they cover, and what broken ones say. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include <specs/shapes.h>

struct tally {
	int n, n_group_mode, n_backward, n_paged, n_fp8, n_asymmetric, n_decode, n_cross, n_window;
	int max_ratio, max_seqlen;
};

static int tally_shape(void *owner, const struct spec_shape *shape)
{
	struct tally *t = (struct tally *)owner;
	int ratio = shape->nhead_q / shape->nhead_k;

	assert_true(shape->batch > 0 && shape->nhead_k > 0 && shape->seqlen_q > 0);
	assert_true(shape->seqlen_k > 0 && shape->hdim_q > 0 && shape->hdim_v > 0);
	assert_int_equal(shape->nhead_q % shape->nhead_k, 0);
	assert_non_null(shape->group);
	t->n++;
	t->n_group_mode += shape->mode;
	t->n_backward += shape->op == 1;
	t->n_paged += shape->page_size > 0;
	t->n_fp8 += shape->data_type >= 3;
	t->n_asymmetric += shape->hdim_q != shape->hdim_v;
	t->n_decode += shape->seqlen_q == 1 && shape->seqlen_k > 100;
	t->n_cross += shape->seqlen_q != shape->seqlen_k;
	t->n_window += shape->window_left >= 0;
	t->max_ratio = ratio > t->max_ratio ? ratio : t->max_ratio;
	t->max_seqlen = shape->seqlen_k > t->max_seqlen ? shape->seqlen_k : t->max_seqlen;
	return 0;
}

static struct tally read_tier(const char *tier)
{
	struct tally t = {0};
	struct fmha_error err = {0};

	if (spec_shapes_read(NULL, tier, tally_shape, &t, &err) != 0)
		fail_msg("%s", err.msg);
	return t;
}

static void tiers_have_their_sizes(void **state)
{
	struct tally smoke = read_tier("smoke"), full = read_tier("full"),
		     nightly = read_tier("nightly");

	(void)state;
	assert_in_range(smoke.n, 350, 380);
	assert_in_range(full.n - smoke.n, 1400, 1600);
	assert_true(nightly.n > full.n + 1000);
}

static void smoke_touches_everything(void **state)
{
	struct tally t = read_tier("smoke");

	(void)state;
	assert_true(t.n_group_mode && t.n_backward && t.n_paged && t.n_fp8 && t.n_asymmetric);
	assert_true(t.n_decode && t.n_cross && t.n_window);
	assert_int_equal(t.max_ratio, 16); /* 128 heads on 8 */
	assert_true(read_tier("nightly").max_seqlen >= 131072);
}

static int stop_at_third(void *owner, const struct spec_shape *shape)
{
	(void)shape;
	return ++*(int *)owner == 3 ? 42 : 0;
}

static void the_callback_can_stop(void **state)
{
	struct fmha_error err = {0};
	int n = 0;

	(void)state;
	assert_int_equal(spec_shapes_read(NULL, "nightly", stop_at_third, &n, &err), 42);
	assert_int_equal(n, 3);
}

struct counted {
	const struct spec_filter *filter;
	int n, n_matched;
};

static int count_matches(void *owner, const struct spec_shape *shape)
{
	struct counted *c = owner;
	int wanted = shape->op == 0 && shape->data_type == FMHA_BF16 &&
		     shape->seqlen_k >= 4 * shape->seqlen_q &&
		     (shape->window_left == -1 || shape->hdim_q / 2 == 32);

	c->n++;
	c->n_matched += wanted;
	assert_int_equal(spec_shape_filter_match(c->filter, shape) != 0, wanted);
	return 0;
}

static void filters_know_the_fields_of_shapes(void **state)
{
	static const struct {
		const char *text, *fault;
	} wrong[] = {{"tile_m0 == 1", "there is no field 'tile_m0'"},
		     {"op == 'sideways'", "op is never 'sideways': 'forward', 'backward', "},
		     {"op > 1", "words have no order"},
		     {"op == 1", "op is a word"},
		     {"batch == 'two'", "a word is compared with a field that has words"}};
	struct spec_filter *filter = NULL;
	char explain[SPEC_EXPLAIN_BYTES];
	struct fmha_error err = {0};
	struct counted c = {0};

	(void)state;
	assert_int_equal(spec_shape_filter_compile(
				 "op == 'forward' and data_type in ('bf16',) and seqlen_k "
				 ">= 4 * seqlen_q and (window_left == -1 or hdim_q // 2 == 32)",
				 &filter, explain, &err),
			 0);
	c.filter = filter;
	assert_int_equal(spec_shapes_read(NULL, "smoke", count_matches, &c, &err), 0);
	assert_in_range(c.n_matched, 10, c.n - 100);
	filter = spec_filter_free(filter);
	for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
		assert_int_equal(spec_shape_filter_compile(wrong[i].text, &filter, explain, &err),
				 FMHA_EINVAL);
		if (!strstr(err.msg, wrong[i].fault))
			fail_msg("%s", err.msg);
		assert_non_null(strchr(explain, '^'));
	}
}

static void words_have_names(void **state)
{
	(void)state;
	assert_string_equal(spec_shape_word("data_type", 2), "bf16");
	assert_string_equal(spec_shape_word("lengths", 5), "padded");
	assert_null(spec_shape_word("lengths", 6));
	assert_null(spec_shape_word("batch", 1));
	assert_null(spec_shape_word("nonesuch", 0));
}

static void broken_files_are_explained(void **state)
{
	static const char *const broken[][2] = {
		{"{\"groups\": 1}", "/groups: must be a list"},
		{"{\"group\": []}", "/group: unknown key"},
		{"{\"groups\": [{}]}", "/groups/0/name: is missing"},
		{"{\"groups\": [{\"name\": \"a\", \"set\": {\"bach\": 1}}]}",
		 "/groups/0/set/bach: there is no field 'bach'"},
		{"{\"groups\": [{\"name\": \"a\", \"set\": {\"mask\": \"causal\"}}]}",
		 "/groups/0/set/mask: 'causal' is not a mask"},
		{"{\"groups\": [{\"name\": \"a\", \"for\": [{\"batch\": [1, \"2\"]}]}]}",
		 "/groups/0/for/0/batch/1: must be a number"},
		{"{\"groups\": [{\"name\": \"a\", \"for\": [{\"nhead_q,nhead_k\": [[8]]}]}]}",
		 "/nhead_q,nhead_k/0: must have 2 values"},
		{"{\"groups\": [{\"name\": \"a\", \"for\": [\"heads\"]}]}",
		 "/groups/0/for/0: there is no set of axes 'heads'"},
		{"{\"groups\": [{\"name\": \"a\", \"set\": {\"nhead_q\": 5, \"nhead_k\": 2}}]}",
		 "/groups/0: nhead_q 5 is not a multiple of nhead_k 2"},
		{"{\"groups\": [{\"name\": \"a\", \"set\": {\"hdim_q\": 584}}]}", "not 1 to 576"},
		{"{\"groups\": [{\"name\": \"a\", \"limits\": {\"time\": 1}}]}",
		 "/groups/0/limits/time: unknown key"},
		{"{\"includes\": [\"nonesuch\"], \"groups\": []}", "no tier 'nonesuch'"},
	};
	char path[] = "/tmp/fmha-shapes-XXXXXX";
	int fd = mkstemp(path);

	(void)state;
	assert_true(fd >= 0);
	for (size_t i = 0; i < sizeof(broken) / sizeof(broken[0]); i++) {
		struct fmha_error err = {0};
		int n = 0;

		assert_int_equal(ftruncate(fd, 0), 0);
		assert_int_equal(pwrite(fd, broken[i][0], strlen(broken[i][0]), 0),
				 strlen(broken[i][0]));
		assert_true(spec_shapes_read(NULL, path, stop_at_third, &n, &err) < 0);
		if (!strstr(err.msg, broken[i][1]))
			fail_msg("%s: %s", broken[i][0], err.msg);
	}
	assert_int_equal(close(fd), 0);
	assert_int_equal(unlink(path), 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(tiers_have_their_sizes),
		cmocka_unit_test(smoke_touches_everything),
		cmocka_unit_test(the_callback_can_stop),
		cmocka_unit_test(filters_know_the_fields_of_shapes),
		cmocka_unit_test(words_have_names),
		cmocka_unit_test(broken_files_are_explained),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
