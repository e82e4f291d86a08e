/* SPDX-License-Identifier: MIT */
/*
 * The code objects of three archs, all of them, by a number: a change of host code that is meant to leave
 * device code as it is changes no name, no option, no block and no LDS of any.
 *
 * `test_specs_objects ARCH` writes what the number is made of, a line for each object, to be compared
 * with what another build writes. Numbers are changed by hand, in the commit that means to.
 */
#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <proto/fnv.h>
#include <catalogue/backends.h>
#include <catalogue/gpu_catalogue.h>
#include <specs/filter.h>
#include <specs/space.h>

/* That n_plain is what `fmhactl build --list` counts (less the kernel that makes tables, which has no spec)
 * shows that nothing is left out. */
static const struct golden {
	const char *arch;
	uint32_t n_plain; /* for problems that ask for nothing special */
	uint32_t n;       /* with those that do */
	uint64_t sum;     /* over all, in any order */
} goldens[] = {
	{"sm_90a", 227081, 495558, 0xf19c4b179f37b5f4},
	{"gfx942", 107833, 238608, 0xfd9ffe304ef4ec3f},
	{"gfx1100", 126281, 281912, 0x6092fc8d7fa0bf3d},
};

#define MOST_OBJECTS (1u << 20)

struct objects {
	const char *arch;
	FILE *out; /* NULL: nobody reads them */
	uint32_t n_plain, n;
	uint64_t sum;
	uint64_t *seen; /* hashes, open addressing */
};

/* False: it was there. */
static int see(struct objects *objects, uint64_t hash)
{
	size_t mask = 2 * MOST_OBJECTS - 1, at = hash & mask;

	while (objects->seen[at] && objects->seen[at] != hash)
		at = (at + 1) & mask;
	if (objects->seen[at])
		return 0;
	if (objects->n == MOST_OBJECTS)
		fail_msg("more than %u objects", MOST_OBJECTS);
	objects->seen[at] = hash;
	return 1;
}

static void add(struct objects *objects, const struct gpu_kernel *kernel, int is_plain)
{
	char line[BUILD_NAME_BYTES + BUILD_OPTIONS * (BUILD_WORD_BYTES + 1) + 128];
	size_t n = (size_t)snprintf(line, sizeof(line), "%s %s %s block=%u lds=%u",
				    kernel->build.name, kernel->build.source, kernel->entry,
				    kernel->block[0], kernel->lds_bytes);
	uint64_t hash;

	for (uint32_t i = 0; i < kernel->build.n_options; i++)
		n += (size_t)snprintf(line + n, sizeof(line) - n, " %s", kernel->build.options[i]);
	assert_true(n < sizeof(line));
	hash = fnv_text(FNV_START, line);
	if (!see(objects, hash))
		return;
	objects->n++;
	objects->n_plain += is_plain != 0;
	objects->sum += hash;
	if (objects->out)
		(void)fprintf(objects->out, "%s\n", line);
}

/* What tells code apart besides its name. */
#define VARIANT_ANY_SCALE 1
#define VARIANT_TAILS     2
#define VARIANT_DBIAS_SUM 4
#define VARIANT_SPLIT     8 /* sums of dQ by parts of the keys: AMD's alone are planned so */
#define VARIANTS          16

static struct traits traits_of(const struct kernel_spec *spec, int variant)
{
	int family = spec->signature.family;
	struct traits traits;

	spec_traits(&spec->signature, &traits);
	if (family == SPEC_FWD_APPENDKV)
		return traits;
	if (family != SPEC_FWD_SPLITKV_COMBINE)
		traits.any_scale = (variant & VARIANT_ANY_SCALE) != 0;
	traits.tails = (variant & VARIANT_TAILS) != 0;
	if (family == SPEC_BWD_DQ_DK_DV)
		traits.dbias_sum = (variant & VARIANT_DBIAS_SUM) != 0;
	traits.dq_acc = (variant & VARIANT_SPLIT) != 0;
	return traits;
}

static void add_variants(struct objects *objects, const struct spec_catalog *catalog,
			 const struct kernel_spec *spec)
{
	const char *pipeline = spec_word(catalog, SPEC_FIELD_pipeline, spec->pipeline);
	struct gpu_kernel kernel;

	for (int variant = 0; variant < VARIANTS; variant++) {
		struct traits traits = traits_of(spec, variant);

		if (variant & VARIANT_DBIAS_SUM && spec->signature.bias != SPEC_BIAS_BIAS)
			continue;
		if (variant & VARIANT_SPLIT &&
		    (spec->signature.family != SPEC_BWD_DQ_DK_DV || objects->arch[0] != 'g'))
			continue;
		if (!gpu_kernel_of_spec(objects->arch, pipeline, spec, &traits, &kernel))
			add(objects, &kernel, variant == 0);
	}
}

static void walk(struct objects *objects)
{
	struct spec_space_options options = SPEC_SPACE_OPTIONS(objects->arch);
	struct spec_catalog *catalog = NULL;
	struct spec_space *space = NULL;
	struct fmha_error err = {0};
	const struct kernel_spec *spec;
	struct spec_iter *iter;

	objects->seen = calloc(2 * MOST_OBJECTS, sizeof(*objects->seen));
	assert_non_null(objects->seen);
	if (spec_catalog_load(NULL, fmha_backends, &catalog, &err) < 0 ||
	    spec_space_new(catalog, &options, &space, &err) < 0)
		fail_msg("%s", err.msg);
	iter = spec_iter_new(space, NULL);
	assert_non_null(iter);
	while ((spec = spec_iter_next(iter)))
		add_variants(objects, catalog, spec);
	spec_iter_free(iter);
	spec_space_free(space);
	spec_catalog_free(catalog);
	free(objects->seen);
}

static void objects_are_what_they_were(void **state)
{
	int n_other = 0;

	(void)state;
	for (size_t i = 0; i < sizeof(goldens) / sizeof(goldens[0]); i++) {
		const struct golden *golden = &goldens[i];
		struct objects objects = {.arch = golden->arch};

		walk(&objects);
		if (objects.n_plain == golden->n_plain && objects.n == golden->n &&
		    objects.sum == golden->sum)
			continue;
		n_other++;
		print_error("%s: %u, %u, 0x%016" PRIx64 "\n", golden->arch, objects.n_plain,
			    objects.n, objects.sum);
	}
	assert_int_equal(n_other, 0);
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(objects_are_what_they_were),
	};

	if (argc > 1 && gpu_arch_find(argv[1])) {
		struct objects objects = {.arch = argv[1], .out = stdout};

		walk(&objects);
		return 0;
	}
	return cmocka_run_group_tests(tests, NULL, NULL);
}
