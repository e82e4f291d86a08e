/* SPDX-License-Identifier: MIT */
/* Models of times: which files are read, what they predict, and what that changes. */
#include "fixture.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include <dispatch/model.h>
#include <catalogue/backends.h>

#include "predict.h"

#define TEXT_BYTES 4096

#define KNOWN                                                                                      \
	"\"kinds\": {\"family\": [0], \"element\": [2], \"mode\": [0]}, "                          \
	"\"ranges\": {\"hdim\": [128, 256], \"group\": [1, 4], \"page\": [-1, -1]}"

/* A model of @trees for @arch, with the features of this build but for the first, which is @first. */
static char *model_text(char text[TEXT_BYTES], const char *arch, const char *first,
			const char *trees)
{
	int n = snprintf(text, TEXT_BYTES,
			 "{\"format\": \"fmhad-model\", \"version\": 2, \"arch\": \"%s\", " KNOWN
			 ", \"base\": 1, \"trees\": %s, \"features\": [\"%s\"",
			 arch, trees, first);

	for (int i = 1; i < PREDICT_FEATURES; i++)
		n += snprintf(text + n, TEXT_BYTES - (size_t)n, ", \"%s\"",
			      predict_feature_name(i));
	(void)snprintf(text + n, TEXT_BYTES - (size_t)n, "]}");
	return text;
}

static int parse(const char *text, struct predict_model **ret_model, struct fmha_error *err)
{
	*ret_model = NULL;
	return predict_model_parse(text, strlen(text), "sm_90a", ret_model, err);
}

/* Of a problem that KNOWN speaks of. */
static void known_features(double features[PREDICT_FEATURES])
{
	memset(features, 0, PREDICT_FEATURES * sizeof(*features));
	features[PREDICT_family] = ABI_FWD;
	features[PREDICT_element] = 2;
	features[PREDICT_hdim] = 256;
	features[PREDICT_group] = 2;
	features[PREDICT_page] = -1;
}

static void trees_are_summed(void **state)
{
	double features[PREDICT_FEATURES];
	struct predict_model *model;
	struct fmha_error err = {0};
	char text[TEXT_BYTES], trees[256];

	(void)state;
	(void)snprintf(
		trees, sizeof(trees),
		"[[[%d, 64, 1, 2, 0], [-1, 0, 0, 0, 2], [-1, 0, 0, 0, 3]], [[-1, 0, 0, 0, 1]]]",
		PREDICT_m0);
	assert_int_equal(parse(model_text(text, "sm_90a", "flops", trees), &model, &err), 0);
	known_features(features);
	features[PREDICT_m0] = 64; /* at most the threshold: left */
	assert_true(fabs(predict_us(model, features, 5) - 5 * 16) < 1e-9);
	features[PREDICT_m0] = 65;
	assert_true(fabs(predict_us(model, features, 5) - 5 * 32) < 1e-9);
	predict_model_free(model);
}

static void of_problems_like_none_measured_nothing_is_said(void **state)
{
	static const struct {
		enum predict_feature feature;
		double value;
	} unknown[] = {{PREDICT_family, ABI_BWD_DQ_DK_DV},
		       {PREDICT_element, 1},
		       {PREDICT_mode, 1},
		       {PREDICT_hdim, 512},
		       {PREDICT_hdim, 64},
		       {PREDICT_group, 8},
		       {PREDICT_page, 4}};
	double features[PREDICT_FEATURES];
	struct predict_model *model;
	struct fmha_error err = {0};
	char text[TEXT_BYTES];

	(void)state;
	assert_int_equal(parse(model_text(text, "sm_90a", "flops", "[]"), &model, &err), 0);
	known_features(features);
	features[PREDICT_pipeline] = 1e6; /* a kernel may be newer than the model */
	assert_true(fabs(predict_us(model, features, 5) - 10) < 1e-9);
	for (size_t i = 0; i < sizeof(unknown) / sizeof(unknown[0]); i++) {
		known_features(features);
		features[unknown[i].feature] = unknown[i].value;
		assert_true(predict_us(model, features, 5) == 0);
	}
	predict_model_free(model);
}

/* Whatever a file says, reading it ends, and so does every walk through its trees. */
static void what_is_no_model_is_refused(void **state)
{
	static const struct {
		const char *arch, *first, *trees, *field;
	} wrong[] = {
		{"sm_80", "flops", "[]", "arch"},
		{"sm_90a", "flips", "[]", "features"},
		{"sm_90a", "flops", "[[]]", "trees"},
		{"sm_90a", "flops", "[[[0, 1, 0, 1, 0], [-1, 0, 0, 0, 1]]]", "trees"},
		{"sm_90a", "flops", "[[[0, 1, 1, 2, 0], [-1, 0, 0, 0, 1]]]", "trees"},
		{"sm_90a", "flops", "[[[99, 1, 1, 2, 0], [-1, 0, 0, 0, 1], [-1, 0, 0, 0, 1]]]",
		 "trees"},
		{"sm_90a", "flops", "[[[-2, 0, 0, 0, 1]]]", "trees"},
		{"sm_90a", "flops", "[[[-1, 0, 0, 0, 1e99]]]", "trees"},
		{"sm_90a", "flops", "[[[-1, 0, 0, 0]]]", "trees"},
		{"sm_90a", "flops", "[[7]]", "trees"},
	};
	struct predict_model *model;
	char text[TEXT_BYTES];

	(void)state;
	for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
		struct fmha_error err = {0};

		model_text(text, wrong[i].arch, wrong[i].first, wrong[i].trees);
		assert_int_equal(parse(text, &model, &err), FMHA_EINVAL);
		assert_string_equal(err.field, wrong[i].field);
		assert_null(model);
	}
	model_text(text, "sm_90a", "flops", "[]");
	for (size_t n = 0; n < strlen(text); n++)
		assert_int_equal(predict_model_parse(text, n, "sm_90a", &model, NULL), FMHA_EINVAL);
}

/* Of an sm_90a. The caller frees both. */
static struct registry *registry_of_card(struct spec_catalog **ret_catalog)
{
	struct registry_device device = {.name = "sm_90a"};
	struct registry *registry;
	struct fmha_error err = {0};

	assert_int_equal(spec_catalog_own(fmha_backends, ret_catalog, &err), 0);
	registry_device_archs(&device, "sm_90a");
	assert_int_equal(registry_new(*ret_catalog, &device, &registry, &err), 0);
	return registry;
}

/* bf16, 2 x 16 heads, 4096 x 4096, hdim 128, on an sm_90a of 132 units. */
static void plan_with(struct fixture *f, struct registry *registry,
		      const struct predict_model *model)
{
	struct fmha_problem *p = &f->problem;

	fixture_init(f, FMHA_FORWARD, FMHA_BATCH);
	p->batch = 2;
	p->nhead_q = p->nhead_k = 16;
	p->seqlen_q = p->seqlen_k = 4096;
	p->hdim_q = p->hdim_v = 128;
	for (uint32_t role = FMHA_T_Q; role <= FMHA_T_V; role++)
		fixture_add(f, role, FMHA_BF16);
	fixture_add(f, FMHA_T_O, FMHA_BF16);
	f->decree.device = (struct plan_device){.arch = "sm_90a",
						.registry = registry,
						.compute_units = 132,
						.lds_bytes = 232448,
						.model = model};
	assert_works(f, fixture_build(f));
}

static void set_sizes(struct fixture *f, int i)
{
	static const int32_t queries[] = {1, 16, 512, 4096}, keys[] = {8192, 65536, 4096, 1000};

	f->problem.batch = 1 + i % 3;
	f->problem.nhead_q = 8;
	f->problem.nhead_k = i % 2 ? 1 : 8;
	f->problem.seqlen_q = queries[i % 4];
	f->problem.seqlen_k = keys[i / 4 % 4];
	f->problem.mask = i % 2 ? FMHA_MASK_TOP_LEFT : FMHA_MASK_NONE;
}

/* Numbers of splits that were judged one at a time make the plan that it would have been. */
static void looking_first_makes_the_same_plan(void **state)
{
	struct plan_looking *looking;
	struct predict_model *model;
	struct spec_catalog *catalog;
	struct registry *registry;
	struct fmha_error err = {0};
	uint32_t n_steps = 0, n_split = 0;
	struct fixture f;
	struct plan at_once;

	(void)state;
	registry = registry_of_card(&catalog);
	assert_int_equal(predict_model_load("sm_90a", &model, &err), 0);
	plan_with(&f, registry, model);
	for (int i = 0; i < 16; i++) {
		set_sizes(&f, i);
		assert_works(&f, fixture_build(&f));
		at_once = f.plan;
		looking = plan_looking_new(&f.problem, &f.choice, &f.decree.device);
		if (!looking) /* split.c knows the loop better */
			continue;
		while (plan_look(looking))
			n_steps++;
		f.decree.device.looking = looking;
		assert_works(&f, fixture_build(&f));
		assert_memory_equal(&f.plan, &at_once, sizeof(at_once));
		f.decree.device.looking = plan_looking_free(looking);
		n_split += at_once.n_splits > 1;
	}
	assert_true(n_steps > 32 && n_split > 2);
	fixture_deinit(&f);
	predict_model_free(model);
	registry_free(registry);
	spec_catalog_free(catalog);
}

/* The first time of all, which comes between two steps, counts for the plan. */
static void a_time_that_comes_while_looking_counts(void **state)
{
	struct proto_measured row = {.us = 1, .when_s = 1};
	struct plan_looking *looking = NULL;
	struct predict_model *model;
	struct spec_catalog *catalog;
	struct registry *registry;
	struct fmha_error err = {0};
	struct fixture f;
	int32_t by_formula = 0;

	(void)state;
	registry = registry_of_card(&catalog);
	assert_int_equal(predict_model_load("sm_90a", &model, &err), 0);
	plan_with(&f, registry, model);
	for (int i = 0; i < 16 && !looking; i++) {
		set_sizes(&f, i);
		f.decree.device.model = NULL;
		assert_works(&f, fixture_build(&f));
		by_formula = f.plan.n_splits;
		(void)snprintf(row.kernel, sizeof(row.kernel), "%s",
			       plan_main_stage(&f.plan)->kernel);
		f.decree.device.model = model;
		assert_works(&f, fixture_build(&f));
		looking = plan_looking_new(&f.problem, &f.choice, &f.decree.device);
		if (f.plan.n_splits == by_formula) /* no time would tell them apart */
			looking = plan_looking_free(looking);
	}
	assert_non_null(looking);
	(void)plan_look(looking);
	plan_shape(&f.problem, row.shape);
	row.n_splits = by_formula;
	assert_int_equal(registry_set_tuned(registry, &row, TIMES_OWN, &err), 0);
	while (plan_look(looking))
		;
	f.decree.device.looking = looking;
	assert_works(&f, fixture_build(&f));
	assert_int_equal(f.plan.n_splits, by_formula);
	assert_string_equal(plan_main_stage(&f.plan)->kernel, row.kernel);
	f.decree.device.looking = plan_looking_free(looking);
	fixture_deinit(&f);
	predict_model_free(model);
	registry_free(registry);
	spec_catalog_free(catalog);
}

static void a_model_goes_before_the_formula(void **state)
{
	struct predict_model *model;
	struct spec_catalog *catalog;
	struct registry *registry;
	struct fmha_error err = {0};
	struct fixture f;
	char text[TEXT_BYTES], trees[256];

	(void)state;
	registry = registry_of_card(&catalog);
	plan_with(&f, registry, NULL);
	assert_int_equal(f.plan.stages[0].spec.tile.tile_m0, 128);
	fixture_deinit(&f);
	(void)snprintf(trees, sizeof(trees),
		       "[[[%d, 64, 1, 2, 0], [-1, 0, 0, 0, -9], [-1, 0, 0, 0, 9]]]", PREDICT_m0);
	assert_int_equal(parse(model_text(text, "sm_90a", "flops", trees), &model, &err), 0);
	plan_with(&f, registry, model);
	assert_true(f.plan.stages[0].spec.tile.tile_m0 <= 64);
	fixture_deinit(&f);
	predict_model_free(model);
	registry_free(registry);
	spec_catalog_free(catalog);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(trees_are_summed),
		cmocka_unit_test(of_problems_like_none_measured_nothing_is_said),
		cmocka_unit_test(what_is_no_model_is_refused),
		cmocka_unit_test(looking_first_makes_the_same_plan),
		cmocka_unit_test(a_time_that_comes_while_looking_counts),
		cmocka_unit_test(a_model_goes_before_the_formula),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
