/* SPDX-License-Identifier: MIT */
/* The registry: names, signatures, filters, states, sets, export and import. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include <cjson/cJSON.h>

#include <catalogue/backends.h>
#include <registry/registry.h>
#include <specs/catalog.h>

static struct spec_catalog *catalog;

static int load_catalog(void **state)
{
	struct fmha_error err;

	(void)state;
	return spec_catalog_own(fmha_backends, &catalog, &err);
}

static int free_catalog(void **state)
{
	(void)state;
	catalog = spec_catalog_free(catalog);
	return 0;
}

static struct registry *registry_for(const char *arch)
{
	struct registry_device device = {.name = "a card", .environment = "a driver"};
	struct registry *registry;
	struct fmha_error err;

	registry_device_archs(&device, arch);
	if (registry_new(catalog, &device, &registry, &err) != 0)
		fail_msg("%s: %s", arch, err.msg);
	return registry;
}

/* The first kernel that @filter lets through. */
static int take_first(void *owner, const struct kernel_spec *spec, const char *name,
		      const struct registry_info *info)
{
	(void)spec;
	(void)info;
	strcpy(owner, name);
	return 1;
}

static void first_name(struct registry *registry, const char *filter, char name[SPEC_NAME_BYTES])
{
	struct fmha_error err;

	assert_int_equal(registry_each(registry, filter, take_first, name, &err), 1);
}

static int count_one(void *owner, const struct kernel_spec *spec, const char *name,
		     const struct registry_info *info)
{
	(void)spec;
	(void)name;
	(void)info;
	++*(uint64_t *)owner;
	return 0;
}

static void a_cpu_runs_all_levels_below(void **state)
{
	struct registry *registry = registry_for("x86_64_v4");
	uint64_t sum = 0, n = 0;

	(void)state;
	assert_int_equal(registry_each(registry, NULL, count_one, &sum, NULL), 0);
	assert_int_equal(registry_n_archs(registry), 3);
	assert_string_equal(registry_arch_name(registry, 0), "x86_64_v4");
	assert_string_equal(registry_arch_name(registry, 1), "x86_64_v3");
	assert_string_equal(registry_arch_name(registry, 2), "portable");
	assert_int_equal(registry_count(registry), sum);
	assert_int_equal(registry_each(registry, "family == 'bwd_dot_do_o'", count_one, &n, NULL),
			 0);
	assert_true(n > 0 && n < sum);
	registry_free(registry);
}

static void unknown_archs_are_named(void **state)
{
	struct registry_device device = {.name = "x"};
	struct registry *registry;
	struct fmha_error err;

	(void)state;
	registry_device_archs(&device, "gfx7");
	assert_int_equal(registry_new(catalog, &device, &registry, &err), FMHA_ENOENT);
	assert_string_equal(err.field, "arch");
	assert_non_null(strstr(err.msg, "gfx7"));
}

static void names_are_found_or_explained(void **state)
{
	struct registry *registry = registry_for("gfx942");
	char name[SPEC_NAME_BYTES], other[SPEC_NAME_BYTES];
	struct kernel_spec spec;
	struct registry_info info;
	struct fmha_error err;

	(void)state;
	first_name(registry, "family == 'fwd' and hdim_q == 128", name);
	assert_int_equal(registry_find(registry, name, &spec, &info, &err), 0);
	assert_int_equal(spec.signature.hdim_q, 128);
	assert_false(info.quarantined);
	assert_int_equal(info.offered, 1);
	assert_int_equal(info.preferred, 0);
	(void)spec_name_format(catalog, &spec, other);
	assert_string_equal(name, other);
	assert_int_equal(registry_find(registry, "nonsense", NULL, NULL, &err), FMHA_ENOENT);
	assert_string_equal(err.field, "kernel");
	assert_int_equal(registry_find(registry, "", NULL, NULL, &err), FMHA_ENOENT);
	/* A sound name of another device. */
	memcpy(strstr(name, "gfx942"), "gfx950", 6);
	assert_int_equal(registry_find(registry, name, NULL, NULL, &err), FMHA_ENOENT);
	/* A sound name that the rules do not make. */
	spec.tile.tile_m0 = 48;
	(void)spec_name_format(catalog, &spec, name);
	assert_int_equal(registry_find(registry, name, NULL, NULL, &err), FMHA_ENOENT);
	assert_non_null(strstr(err.msg, "not a kernel of this device"));
	registry_free(registry);
}

static int count_masked(void *owner, const struct kernel_spec *spec,
			const struct registry_info *info)
{
	assert_int_equal(spec->signature.mask, SPEC_MASK_GENERIC);
	assert_int_equal(info->offered, 1);
	++*(uint64_t *)owner;
	return 0;
}

/* Candidates for traits are exactly what a filter that spells it out finds. */
static void traits_find_what_filters_find(void **state)
{
	static const char filter[] =
		"family == 'fwd' and data_type == 'bf16' and hdim_q == 128 and hdim_v == 128 and "
		"mask == 'generic' and bias == 'no' and not dropout and not logits "
		"and qscale == 'no'"
#define NOR(name, NAME, word, kind, families, asked) " and not " #name
		FMHA_OWN_TRAITS(NOR);
#undef NOR
	struct registry *registry = registry_for("gfx942");
	/* What names do not say must not matter. */
	struct traits traits = {.op = ABI_FWD, .dtype = ABI_BF16, .mask = 1, .tails = 1};
	struct spec_head_dims dims = {128, 128};
	uint64_t by_filter = 0, found = 0;
	const char *why;

	(void)state;
	assert_int_equal(registry_each(registry, filter, count_one, &by_filter, NULL), 0);
	assert_int_equal(
		registry_candidates(registry, 0, &traits, dims, count_masked, &found, &why), 0);
	assert_int_equal(found, by_filter);
	assert_true(found > 0);
	dims.hdim_q = 17;
	assert_int_equal(
		registry_candidates(registry, 0, &traits, dims, count_masked, &found, &why), 0);
	assert_int_equal(found, by_filter);
	assert_non_null(strstr(why, "multiple"));
	registry_free(registry);
}

static void bad_filters_say_where(void **state)
{
	struct registry *registry = registry_for("gfx90a");
	struct fmha_error err;
	uint64_t n = 0;

	(void)state;
	assert_int_equal(registry_each(registry, "hdim_q ==", count_one, &n, &err), FMHA_EINVAL);
	assert_true(err.msg[0] != '\0');
	assert_int_equal(registry_each(registry, "colour == 'red'", count_one, &n, &err),
			 FMHA_EINVAL);
	registry_free(registry);
}

static int measure(struct registry *registry, const char *kernel, const char *shape, double us,
		   uint64_t when_s)
{
	struct proto_measured row = {.us = us, .when_s = when_s};
	struct fmha_error err;

	(void)snprintf(row.kernel, sizeof(row.kernel), "%s", kernel);
	(void)snprintf(row.shape, sizeof(row.shape), "%s", shape);
	return registry_set_tuned(registry, &row, TIMES_OWN, &err);
}

static void states_are_kept_for_the_few(void **state)
{
	struct registry *registry = registry_for("gfx942");
	struct registry_entry *entry = NULL;
	char name[SPEC_NAME_BYTES];
	struct kernel_spec spec;
	struct registry_info info;
	struct fmha_error err;
	double us = 0;

	(void)state;
	first_name(registry, "family == 'bwd_dq_dk_dv'", name);
	assert_int_equal(registry_quarantine(registry, name, &err), 0);
	assert_int_equal(registry_set_priority(registry, name, -3, &err), 0);
	assert_int_equal(registry_find(registry, name, &spec, NULL, &err), 0);
	registry_add_run(registry, &spec, 100, NULL); /* 150 ns in three runs */
	registry_add_run(registry, &spec, 25, &entry);
	assert_non_null(entry);
	registry_add_run(registry, &spec, 25, &entry);
	assert_false(registry_get_tuned(registry, &spec, "b1", 0, &us));
	assert_int_equal(measure(registry, name, "b1", 7.5, 1), 0);
	assert_int_equal(measure(registry, name, "b1", 6.5, 1), 0); /* the last counts */
	assert_true(registry_get_tuned(registry, &spec, "b1", 0, &us));
	assert_true(us == 6.5);
	assert_false(registry_get_tuned(registry, &spec, "b2", 0, &us));
	registry_get_info(registry, &spec, &info);
	assert_true(info.quarantined);
	assert_int_equal(info.priority, -3);
	assert_int_equal(info.n_runs, 3);
	assert_int_equal(info.run_ns, 150);
	assert_int_equal(info.n_tuned, 1);
	/* Another kernel of the same signature is as it was. */
	spec.pad_d = spec.pad_d ? 0 : 1;
	registry_get_info(registry, &spec, &info);
	assert_false(info.quarantined);
	assert_int_equal(registry_quarantine(registry, "nobody", &err), FMHA_ENOENT);
	registry_clear_quarantine(registry);
	assert_int_equal(registry_find(registry, name, NULL, &info, &err), 0);
	assert_false(info.quarantined);
	assert_int_equal(measure(registry, name, "b1", -1, 1), FMHA_EINVAL);
	assert_int_equal(measure(registry, name, "b1", 0.0 / 0.0, 1), FMHA_EINVAL);
	registry_free(registry);
}

/* Names from when a kernel was of a problem: of batches and of packed sequences, they had times of their own. */
static void old_names_share_the_least_time(void **state)
{
	struct registry *registry = registry_for("x86_64_v4");
	char name[SPEC_NAME_BYTES], old[2][SPEC_NAME_BYTES];
	struct kernel_spec spec;
	struct registry_info info;
	struct fmha_error err;
	double us = 0;

	(void)state;
	first_name(registry, "family == 'fwd' and data_type == 'bf16' and hdim_q == 64", name);
	assert_int_equal(registry_find(registry, name, &spec, NULL, &err), 0);
	assert_memory_equal(name, "fwd-bf16-", 9);
	for (int i = 0; i < 2; i++)
		assert_in_range(snprintf(old[i], sizeof(old[i]), "fwd-bf16-%s-%s",
					 i ? "group" : "batch", name + 9),
				1, sizeof(old[i]) - 1);
	assert_int_equal(measure(registry, old[0], "s", 7, 20), 0);
	assert_int_equal(measure(registry, old[1], "s", 5, 10), 0);
	assert_int_equal(measure(registry, old[0], "s", 6, 30), 1);
	assert_true(registry_get_tuned(registry, &spec, "s", 0, &us) && us == 5);
	registry_get_info(registry, &spec, &info);
	assert_int_equal(info.n_tuned, 1);
	assert_int_equal(measure(registry, name, "s", 9, 1), 0); /* the kernel's own */
	assert_int_equal(measure(registry, old[1], "s", 1, 99), 1);
	assert_true(registry_get_tuned(registry, &spec, "s", 0, &us) && us == 9);
	registry_free(registry);
}

static int quarantine(void *owner, const struct kernel_spec *spec, const char *name,
		      const struct registry_info *info)
{
	struct fmha_error err;

	(void)spec;
	(void)info;
	return registry_quarantine(owner, name, &err);
}

static int check_quarantined(void *owner, const struct kernel_spec *spec, const char *name,
			     const struct registry_info *info)
{
	(void)name;
	assert_int_equal(info->quarantined, spec->signature.family == SPEC_BWD_DQ_DK_DV);
	++*(uint64_t *)owner;
	return 0;
}

/* The table of states grows; nothing gets lost or mixed up. */
static void thousands_of_states_fit(void **state)
{
	struct registry *registry = registry_for("gfx90a");
	uint64_t n = 0;

	(void)state;
	assert_int_equal(
		registry_each(registry, "family == 'bwd_dq_dk_dv'", quarantine, registry, NULL), 0);
	assert_int_equal(registry_each(registry,
				       "family in ('bwd_dq_dk_dv', 'bwd_dot_do_o', 'fwd_pagedkv')",
				       check_quarantined, &n, NULL),
			 0);
	assert_true(n > 3000);
	registry_free(registry);
}

static void load(struct registry *registry, const char *set, const char *json, uint64_t *n)
{
	struct fmha_error err;

	if (registry_load_set(registry, set, json, strlen(json), n, &err) != 0)
		fail_msg("%s: %s", json, err.msg);
}

static int count_offered(void *owner, const struct kernel_spec *spec, const char *name,
			 const struct registry_info *info)
{
	(void)spec;
	(void)name;
	*(uint64_t *)owner += info->offered;
	return 0;
}

/* Of the small families, which a filter finds quickly. */
#define SMALL "family in ('bwd_dot_do_o', 'bwd_convert_dq', 'fwd_appendkv')"

static uint64_t n_offered(struct registry *registry)
{
	uint64_t n = 0;

	assert_int_equal(registry_each(registry, SMALL, count_offered, &n, NULL), 0);
	return n;
}

static uint64_t n_small(struct registry *registry, const char *filter)
{
	uint64_t n = 0;

	assert_int_equal(registry_each(registry, filter, count_one, &n, NULL), 0);
	return n;
}

static void sets_are_unions_of_patterns(void **state)
{
	struct registry *registry = registry_for("portable");
	uint64_t all = registry_count(registry), n;
	uint64_t small = n_small(registry, SMALL);
	uint64_t dots = n_small(registry, "family == 'bwd_dot_do_o'");
	uint64_t converts = n_small(registry, "family == 'bwd_convert_dq'");
	struct fmha_error err;

	(void)state;
	assert_int_equal(n_offered(registry), small);
	load(registry, "mine", "[\"bwd_dot_do_o-*\"]", NULL);
	assert_int_equal(n_offered(registry), small); /* the default set offers the rest */
	assert_int_equal(registry_unload_set(registry, "default", &n, &err), 0);
	assert_int_equal(n, all - dots);
	assert_int_equal(n_offered(registry), dots);
	load(registry, "more", "[\"bwd_*\", \"!bwd_d*\", \"*-nothing-*\"]", &n);
	assert_int_equal(n, converts);
	assert_int_equal(n_offered(registry), dots + converts);
	/* Loading replaces a set of the same name. */
	load(registry, "more", "[\"bwd_dot?do?o-*\"]", NULL);
	assert_int_equal(n_offered(registry), dots);
	assert_int_equal(registry_unload_set(registry, "mine", &n, &err), 0);
	assert_int_equal(n, 0); /* "more" still names them */
	assert_int_equal(registry_unload_set(registry, "mine", &n, &err), FMHA_ENOENT);
	assert_int_equal(registry_unload_set(registry, "more", NULL, &err), 0);
	assert_int_equal(n_offered(registry), 0);
	load(registry, "default", "[\"*\"]", &n);
	assert_int_equal(n, all);
	registry_free(registry);
}

/* A pattern that makes naive matchers exponential. */
static void wildcards_are_matched_in_linear_time(void **state)
{
	struct registry *registry = registry_for("portable");
	uint64_t n;

	(void)state;
	load(registry, "slow", "[\"*1*1*1*1*1*1*1*1*1*1*1*1*1*1*1*1*1*1*1*1*1*1*no such*\"]", &n);
	assert_int_equal(n, 0);
	registry_free(registry);
}

static void broken_sets_are_refused(void **state)
{
	static const char *const broken[] = {
		"", "{", "{}", "\"*\"", "[1]", "[\"a\", null]", "[\"\"]", "[[\"*\"]]"};
	struct registry *registry = registry_for("portable");
	uint64_t all = n_offered(registry);
	char many[8 * 1100] = "[\"a\"";
	struct fmha_error err;

	(void)state;
	for (size_t i = 0; i < sizeof(broken) / sizeof(broken[0]); i++) {
		err = (struct fmha_error){0};
		assert_int_equal(
			registry_load_set(registry, "x", broken[i], strlen(broken[i]), NULL, &err),
			FMHA_EINVAL);
		assert_string_equal(err.field, "set");
	}
	for (int i = 0; i < REGISTRY_MAX_PATTERNS; i++)
		strcat(many, ",\"a\"");
	strcat(many, "]");
	assert_int_equal(registry_load_set(registry, "x", many, strlen(many), NULL, &err),
			 FMHA_EINVAL);
	assert_int_equal(registry_load_set(registry, "", "[]", 2, NULL, &err), FMHA_EINVAL);
	for (int i = 1; i < REGISTRY_MAX_SETS; i++) {
		char name[16];

		(void)snprintf(name, sizeof(name), "s%d", i);
		assert_int_equal(registry_load_set(registry, name, "[]", 2, NULL, &err), 0);
	}
	assert_int_equal(registry_load_set(registry, "x", "[]", 2, NULL, &err), FMHA_EQUOTA);
	assert_int_equal(n_offered(registry), all);
	registry_free(registry);
}

static void export_text(struct registry *registry, const char *filter, char **text, size_t *size)
{
	FILE *file = open_memstream(text, size);
	struct fmha_error err;

	if (registry_export(registry, filter, true, UINT64_MAX, file, &err) != 0)
		fail_msg("%s", err.msg);
	assert_int_equal(fclose(file), 0);
}

static cJSON *export(struct registry *registry, const char *filter)
{
	char *text;
	size_t size;
	cJSON *root;

	export_text(registry, filter, &text, &size);
	root = cJSON_Parse(text);
	assert_non_null(root);
	free(text);
	return root;
}

static double number(const cJSON *root, const char *a, const char *b)
{
	const cJSON *item = cJSON_GetObjectItem(cJSON_GetObjectItem(root, a), b);

	return item ? item->valuedouble : -1;
}

static void exports_count_what_they_list(void **state)
{
	struct registry *registry = registry_for("gfx942");
	cJSON *root = export(registry, "family in ('bwd_dot_do_o', 'bwd_convert_dq')");
	const cJSON *statistics = cJSON_GetObjectItem(root, "statistics");

	(void)state;
	assert_string_equal(cJSON_GetObjectItem(root, "device")->valuestring, "a card");
	assert_string_equal(cJSON_GetArrayItem(cJSON_GetObjectItem(root, "archs"), 0)->valuestring,
			    "gfx942");
	assert_int_equal(cJSON_GetArraySize(cJSON_GetObjectItem(root, "kernels")), 6);
	/* Three types of each, for any head dims. */
	assert_true(number(statistics, "families", "bwd_dot_do_o") == 3);
	assert_true(number(statistics, "families", "bwd_convert_dq") == 3);
	assert_true(number(statistics, "data_types", "bf16") == 2);
	assert_true(number(statistics, "pipelines", "gpu_dot") == 3);
	assert_true(number(statistics, "states", "offered") == 6);
	assert_true(number(statistics, "states", "tuned") == 0);
	cJSON_Delete(root);
	registry_free(registry);
}

/* Strings of users are escaped: the document stays JSON. */
static void exports_escape(void **state)
{
	struct registry *registry = registry_for("portable");
	static const char set[] = "[\"a\\\"b\\\\c\\nd\\u00e9\"]";
	cJSON *root;
	const cJSON *patterns;

	(void)state;
	load(registry, "quo\"te", set, NULL);
	root = export(registry, "hdim_q == 17 or pipeline == 'cpu_rows' and hdim_q == 17");
	patterns = cJSON_GetObjectItem(cJSON_GetObjectItem(root, "sets"), "quo\"te");
	assert_non_null(patterns);
	assert_memory_equal(cJSON_GetArrayItem(patterns, 0)->valuestring, "a\"b\\c\nd", 7);
	cJSON_Delete(root);
	registry_free(registry);
}

static void imports_merge(void **state)
{
	struct registry *here = registry_for("gfx942"), *there = registry_for("gfx942");
	char name[SPEC_NAME_BYTES], mine[SPEC_NAME_BYTES];
	struct kernel_spec spec;
	struct registry_info info;
	struct fmha_error err;
	uint64_t n = 99;
	size_t size;
	double us;
	char *text;

	(void)state;
	first_name(there, "family == 'fwd' and hdim_q == 32", name);
	first_name(there, "family == 'fwd_appendkv'", mine);
	assert_int_equal(measure(there, name, "s1", 10, 1), 0);
	assert_int_equal(measure(there, name, "s2", 20, 1), 0);
	assert_int_equal(registry_set_priority(there, name, 4, &err), 0);
	assert_int_equal(registry_quarantine(there, name, &err), 0);
	assert_int_equal(registry_set_priority(there, mine, 4, &err), 0);
	assert_int_equal(registry_set_priority(here, mine, 9, &err), 0);
	assert_int_equal(measure(here, name, "s1", 11, 2), 0);
	export_text(there, "family in ('fwd', 'fwd_appendkv') and hdim_q in (32, 64)", &text,
		    &size);
	assert_int_equal(registry_import(here, text, size, &n, &err), 0);
	assert_int_equal(n, 1);
	assert_int_equal(registry_find(here, name, &spec, &info, &err), 0);
	assert_int_equal(info.priority, 4);
	assert_int_equal(info.n_tuned, 2);
	assert_false(info.quarantined); /* of the other machine's files and processes */
	assert_true(registry_get_tuned(here, &spec, "s1", 0, &us));
	assert_true(us == 11); /* the newer result wins */
	assert_true(registry_get_tuned(here, &spec, "s2", 0, &us));
	assert_true(us == 20);
	assert_int_equal(registry_find(here, mine, NULL, &info, &err), 0);
	assert_int_equal(info.priority, 9);
	/* Twice changes nothing. */
	assert_int_equal(registry_import(here, text, size, &n, &err), 0);
	assert_int_equal(n, 0);
	free(text);
	registry_free(here);
	registry_free(there);
}

#define HEAD(device, arch)                                                                         \
	"{\"format\":\"fmhad-registry\",\"version\":1,\"device\":\"" device                        \
	"\",\"environment\":\"a driver\",\"archs\":[\"" arch "\"],\"kernels\":"

/* The cutting of the document, which knows strings and brackets only. */
static void imports_read_any_layout(void **state)
{
	static const char text[] =
		" { \"extra\": {\"a\": [1, \"]}\\\"\", {}]}, \"kernels\" : [ ] ,\n"
		"\"archs\":[ \"portable\" ,\"more\"],\"version\":1.0,"
		"\"device\" :\"a card\", \"format\":\"fmhad-registry\"}\n ";
	static const char *const broken[] = {
		"{\"format\"", "{\"format\":", "{\"format\": \"x",
		"{\"a\": [}",  "{\"a\": [1}",  "{\"a\": ]}",
		"{\"a\" 1}",   "{\"a\": 1} x", "{\"a\": {\"b\": [1, 2}"};
	struct registry *registry = registry_for("portable");
	struct fmha_error err = {0};
	uint64_t n = 7;

	(void)state;
	if (registry_import(registry, text, sizeof(text) - 1, &n, &err) != 0)
		fail_msg("%s: %s", err.field, err.msg);
	assert_int_equal(n, 0);
	for (size_t i = 0; i < sizeof(broken) / sizeof(broken[0]); i++)
		assert_int_equal(registry_import(registry, broken[i], strlen(broken[i]), &n, &err),
				 FMHA_EINVAL);
	/* No prefix of a sound document is one. */
	for (size_t i = 0; i < sizeof(text) - 3; i++)
		assert_int_equal(registry_import(registry, text, i, &n, &err), FMHA_EINVAL);
	registry_free(registry);
}

static void foreign_imports_are_refused(void **state)
{
	static const struct {
		const char *text, *field;
	} cases[] = {
		{"", "format"},
		{"[]", "format"},
		{"{}", "format"},
		{"{\"format\":\"fmhad-registry\"}", "version"},
		{HEAD("another card", "portable") "[]}", "device"},
		{HEAD("a card", "gfx942") "[]}", "archs"},
		{HEAD("a card", "portable") "{}}", "kernels"},
		{HEAD("a card", "portable") "[{}]}", "kernels"},
		{HEAD("a card", "portable") "[{\"name\":\"x\",\"tuned\":7}]}", "tuned"},
		{"{\"format\":\"fmhad-registry\",\"version\":1,\"device\":\"a card\",\"archs\":"
		 "[\"portable\"],\"environment\":\"another driver\",\"kernels\":[{\"name\":\"x\","
		 "\"tuned\":[{\"shape\":\"s\",\"us\":1}]}]}",
		 "environment"},
		{HEAD("a card", "portable") "[{\"name\":\"x\",\"tuned\":[{}]}]}", "shape"},
		{HEAD("a card", "portable") "[{\"name\":\"x\",\"tuned\":[{\"shape\":\"s\"}]}]}",
		 "us"},
		{HEAD("a card",
		      "portable") "[{\"name\":\"x\",\"tuned\":[{\"shape\":\"s\",\"us\":0}]}]}",
		 "us"},
	};
	struct registry *registry = registry_for("portable");
	struct fmha_error err;

	(void)state;
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		err = (struct fmha_error){0};
		assert_int_equal(
			registry_import(registry, cases[i].text, strlen(cases[i].text), NULL, &err),
			FMHA_EINVAL);
		assert_string_equal(err.field, cases[i].field);
	}
	registry_free(registry);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_cpu_runs_all_levels_below),
		cmocka_unit_test(unknown_archs_are_named),
		cmocka_unit_test(names_are_found_or_explained),
		cmocka_unit_test(traits_find_what_filters_find),
		cmocka_unit_test(bad_filters_say_where),
		cmocka_unit_test(states_are_kept_for_the_few),
		cmocka_unit_test(old_names_share_the_least_time),
		cmocka_unit_test(thousands_of_states_fit),
		cmocka_unit_test(sets_are_unions_of_patterns),
		cmocka_unit_test(wildcards_are_matched_in_linear_time),
		cmocka_unit_test(broken_sets_are_refused),
		cmocka_unit_test(exports_count_what_they_list),
		cmocka_unit_test(exports_escape),
		cmocka_unit_test(imports_merge),
		cmocka_unit_test(foreign_imports_are_refused),
		cmocka_unit_test(imports_read_any_layout),
	};

	return cmocka_run_group_tests(tests, load_catalog, free_catalog);
}
