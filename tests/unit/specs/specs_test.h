/* SPDX-License-Identifier: MIT */
/* specs_test.h: what the tests of libfmha_specs share. */
#ifndef SPECS_TEST_H
#define SPECS_TEST_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <catalogue/backends.h>
#include <specs/space.h>

/* The catalog of the source tree, loaded once a program. */
static struct spec_catalog *catalog;

static inline int load_catalog(void **state)
{
	struct fmha_error err = {0};

	(void)state;
	if (spec_catalog_load(NULL, fmha_backends, &catalog, &err) < 0) {
		print_error("%s\n", err.msg);
		return -1;
	}
	return 0;
}

static inline int free_catalog(void **state)
{
	(void)state;
	catalog = spec_catalog_free(catalog);
	return 0;
}

static inline struct spec_space *make_space(const struct spec_space_options *options)
{
	struct spec_space *space = NULL;
	struct fmha_error err = {0};

	if (spec_space_new(catalog, options, &space, &err) < 0)
		fail_msg("%s", err.msg);
	return space;
}

static inline uint64_t count_space(const struct spec_space_options *options)
{
	struct spec_space *space = make_space(options);
	uint64_t n = spec_space_count(space);

	spec_space_free(space);
	return n;
}

/*
 * Is this space one that walks of everything look at? Those of one rules file differ by constants,
 * so some archs stand for all; $FMHA_SPECS_FULL=1 means all.
 */
static inline int is_walked(int arch, const char *rules)
{
	static const char *const walked[] = {"gfx950 ck",   "gfx1201 ck",    "gfx942 gpu",
					     "sm_120a gpu", "x86_64_v4 cpu", "x86_64_amx cpu"};
	char space[64];

	(void)snprintf(space, sizeof(space), "%s %s", spec_arch_name(catalog, arch), rules);
	for (size_t i = 0; i < sizeof(walked) / sizeof(walked[0]); i++)
		if (strcmp(space, walked[i]) == 0)
			return 1;
	return getenv("FMHA_SPECS_FULL") != NULL;
}

/* AMD's space, of an arch that has it; else what this build can run. */
static inline struct spec_space_options amd_space(const char *arch)
{
	struct spec_space_options options = SPEC_SPACE_OPTIONS(arch);

	options.rules = strncmp(arch, "gfx", 3) == 0 ? "ck" : NULL;
	return options;
}

/* The first spec of an arch that a filter lets through. */
static inline struct kernel_spec find_spec(const char *arch, const char *filter_text)
{
	struct spec_space_options options = amd_space(arch);
	struct spec_space *space = make_space(&options);
	struct spec_filter *filter;
	const struct kernel_spec *found;
	struct kernel_spec spec;
	struct spec_iter *iter;

	assert_int_equal(spec_filter_compile(catalog, filter_text, &filter, NULL, NULL), 0);
	iter = spec_iter_new(space, filter);
	assert_non_null(iter);
	found = spec_iter_next(iter);
	if (!found)
		fail_msg("%s: nothing for %s", arch, filter_text);
	spec = *found;
	spec_iter_free(iter);
	spec_filter_free(filter);
	spec_space_free(space);
	return spec;
}

#endif
