// SPDX-License-Identifier: MIT
/*
 * fuzz_specs: filters, kernel names, CSV rows and sweeps from anybody. The first byte picks which.
 * Beyond not crashing: a name that is accepted is canonical, and a row that is accepted reads back.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <catalogue/backends.h>
#include <specs/row.h>
#include <specs/space.h>
#include <specs/validate.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static struct spec_catalog *catalog;

static void load(void)
{
	struct fmha_error err = {0};

	if (spec_catalog_load(NULL, fmha_backends, &catalog, &err) == 0)
		return;
	(void)fprintf(stderr, "%s\n", err.msg);
	abort();
}

static void try_filter(const char *text)
{
	char explain[SPEC_EXPLAIN_BYTES];
	struct fmha_error err = {0};
	struct spec_filter *filter;
	struct kernel_spec spec;

	if (spec_filter_compile(catalog, text, &filter, explain, &err) < 0) {
		if (err.code >= 0 || !err.msg[0] || !strchr(explain, '^'))
			abort();
		return;
	}
	spec_init(&spec);
	(void)spec_filter_match(filter, &spec);
	memset(&spec, 1, sizeof(spec));
	(void)spec_filter_match(filter, &spec);
	spec_filter_free(filter);
}

static void try_name(const char *text)
{
	char name[SPEC_NAME_BYTES];
	struct spec_findings findings;
	struct fmha_error err = {0};
	struct kernel_spec spec;

	if (spec_name_parse(catalog, text, &spec, &err) < 0)
		return;
	if (spec_name_format(catalog, &spec, name) == 0 || strcmp(name, text) != 0)
		abort();
	(void)spec_validate(catalog, &spec, &findings);
}

static void try_row(const char *text)
{
	char row[SPEC_ROW_BYTES];
	struct kernel_spec spec, again;
	struct fmha_error err = {0};

	if (spec_csv_parse(catalog, text, &spec, &err) < 0)
		return;
	(void)spec_csv_row(catalog, &spec, row);
	if (spec_csv_parse(catalog, row, &again, &err) < 0 || spec_compare(&spec, &again) != 0)
		abort();
	(void)spec_validate(catalog, &spec, NULL);
}

static void try_sweep(const char *text, int exhaustive)
{
	struct spec_space_options options = {
		.arch = "gfx90a", .config_json = text, .exhaustive = exhaustive};
	struct fmha_error err = {0};
	struct spec_space *space;

	if (spec_space_new(catalog, &options, &space, &err) < 0)
		return;
	(void)spec_space_count(space);
	spec_space_free(space);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	char *text;

	if (!catalog)
		load();
	if (size == 0)
		return 0;
	text = strndup((const char *)data + 1, size - 1);
	if (!text)
		return 0;
	switch (data[0] % 8) {
	case 0:
	case 1:
	case 2:
	case 3:
		try_filter(text);
		break;
	case 4:
		try_name(text);
		break;
	case 5:
		try_row(text);
		break;
	case 6:
	case 7:
		try_sweep(text, data[0] % 2);
		break;
	}
	free(text);
	return 0;
}
