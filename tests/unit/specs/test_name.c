// SPDX-License-Identifier: MIT
/*
 * Names and rows. name -> spec -> name being the identity makes names unique: two specs of one name
 * would read back as the same spec. $FMHA_SPECS_FULL=1 walks every spec instead of some.
 */
#include <ctype.h>

#include <specs/row.h>

#include "specs_test.h"

static void round_trip(const char *arch, const char *rules, int exhaustive, uint64_t stride)
{
	struct spec_space_options options = {
		.arch = arch, .rules = rules, .exhaustive = exhaustive};
	struct spec_space *space;
	struct spec_iter *iter;
	const struct kernel_spec *spec;
	uint64_t left = 1, n = 0;

	/* Exhaustive products run to hundreds of millions; one variant is enough of them. */
	if (exhaustive)
		options.variant = "bwd";
	if (getenv("FMHA_SPECS_FULL"))
		stride = 1;
	space = make_space(&options);
	iter = spec_iter_new(space, NULL);
	while ((spec = spec_iter_next(iter))) {
		char name[SPEC_NAME_BYTES], again[SPEC_NAME_BYTES], row[SPEC_ROW_BYTES];
		struct fmha_error err = {0};
		struct kernel_spec read;

		if (--left)
			continue;
		left = stride;
		n++;
		if (spec_name_format(catalog, spec, name) == 0)
			fail_msg("%s: a name is too long", arch);
		if (spec_name_parse(catalog, name, &read, &err) < 0)
			fail_msg("%s: %s", name, err.msg);
		assert_memory_equal(&read, spec, sizeof(read));
		assert_int_equal(spec_hash(&read), spec_hash(spec));
		(void)spec_name_format(catalog, &read, again);
		assert_string_equal(name, again);
		(void)spec_csv_row(catalog, spec, row);
		if (spec_csv_parse(catalog, row, &read, &err) < 0)
			fail_msg("%s: %s", row, err.msg);
		assert_memory_equal(&read, spec, sizeof(read));
	}
	assert_true(n > 0);
	spec_iter_free(iter);
	spec_space_free(space);
}

static void everything_reads_back(void **state)
{
	(void)state;
	for (int arch = 0; arch < spec_arch_count(catalog); arch++)
		for (int i = 0; spec_arch_rules(catalog, arch, i); i++) {
			if (!is_walked(arch, spec_arch_rules(catalog, arch, i)))
				continue;
			round_trip(spec_arch_name(catalog, arch), spec_arch_rules(catalog, arch, i),
				   0, 211);
		}
	round_trip("gfx950", "ck", 1, 31);
}

static void names_look_as_documented(void **state)
{
	struct kernel_spec spec;
	char name[SPEC_NAME_BYTES];
	size_t length;

	(void)state;
	spec_init(&spec);
	spec.signature.data_type = SPEC_BF16;
	spec.signature.mode = SPEC_MODE_GROUP;
	spec.signature.hdim_q = 192;
	spec.signature.mask = SPEC_MASK_TOP_LEFT;
	spec.signature.lse = 1;
	spec.tile.tile_k0max = 256;
	spec.pipeline = (uint8_t)spec_word_find(catalog, SPEC_FIELD_pipeline, "qr_async");
	spec.gfx_arch = (uint8_t)spec_arch_find(catalog, "gfx950");
	length = spec_name_format(catalog, &spec, name);
	assert_int_equal(length, strlen(name));
	assert_string_equal(name, "fwd-bf16-group-h192x128-qr_async-t128x128x32x128x32x256-r4x1x1-"
				  "w32x32x16-p1111-top_left-no-lse-gfx950");
	for (const char *c = name; *c; c++) /* fit for a file name and a shell */
		assert_true(isalnum((unsigned char)*c) || strchr("-_.", *c));
}

/* Each of these changes the spec and nothing else of the name's parts. */
static void every_field_is_in_the_name(void **state)
{
	struct kernel_spec spec = find_spec("gfx950", "tile_tag == 'trload' and pad_d == 8");
	char name[SPEC_NAME_BYTES], other[SPEC_NAME_BYTES];

	(void)state;
	(void)spec_name_format(catalog, &spec, name);
	for (int field = 0; field < SPEC_N_FIELDS; field++) {
		struct kernel_spec changed = spec;
		int64_t value = spec_get(&spec, (enum spec_field)field) ? 0 : 1;

		if (field == SPEC_FIELD_block_per_cu || field == SPEC_FIELD_num_wave_groups)
			value = 2;
		if (field == SPEC_FIELD_vlayout)
			value = SPEC_VLAYOUT_C;
		spec_set(&changed, (enum spec_field)field, value);
		(void)spec_name_format(catalog, &changed, other);
		if (strcmp(name, other) == 0)
			fail_msg("%s is not in the name", spec_field_name((enum spec_field)field));
		assert_int_not_equal(spec_compare(&spec, &changed), 0);
		assert_int_equal(spec_compare(&spec, &changed), -spec_compare(&changed, &spec));
	}
}

static void broken_names_are_refused(void **state)
{
	static const struct {
		const char *name, *reason;
	} broken[] = {
		{"", "no such family"},
		{"fwd", "no such data_type"},
		{"nonesuch-bf16", "no such family"},
		{"fwd-bf17-group", "no such data_type"},
		{"fwd-bf16-group-128", "expected h"},
		{"fwd-bf16-group-h", "expected a number"},
		{"fwd-bf16-group-h70000", "too large"},
		{"fwd-bf16-group-h64x-qr", "expected a number"},
		{"fwd-bf16-group-h64x64x64-qr", "expected h"},
		{"fwd-bf16-group-h64-nonesuch-", "no such pipeline"},
		{"fwd-bf16-group-h64-qr-t1x2x3", "6 numbers"},
		{"fwd-bf16-group-h64-qr-t1x2x3x4x5x6.nonesuch-r1x1x1", "no such tile_tag"},
		{"fwd-bf16-group-h64-qr-t1x2x3x4x5x6-r1x1-w1x1x1", "3 numbers"},
		{"fwd-bf16-group-h64-qr-t1x2x3x4x5x6-r1x1x999-w1x1x1", "too large"},
		{"fwd-bf16-group-h64-qr-t1x2x3x4x5x6-r1x1x1-w1x1x1-p12", "four pads"},
		{"fwd-bf16-group-h64-qr-t1x2x3x4x5x6-r1x1x1-w1x1x1-p0123-no-no-gfx950",
		 "0, 1 or 8"},
		{"fwd-bf16-group-h64-qr-t1x2x3x4x5x6-r1x1x1-w1x1x1-p0000-no-no-lsd-gfx950",
		 "no such option"},
		{"fwd-bf16-group-h64-qr-t1x2x3x4x5x6-r1x1x1-w1x1x1-p0000-no-no",
		 "no such gfx_arch"},
		{"fwd-bf16-group-h64-qr-t1x2x3x4x5x6-r1x1x1-w1x1x1-p0000-no-no-gfx950-",
		 "no such option"},
		/* A second spelling of a good name. */
		{"fwd-bf16-group-h64x64-qr-t1x2x3x4x5x6-r1x1x1-w1x1x1-p0000-no-no-gfx950",
		 "not canonical"},
		{"fwd-bf16-group-h064-qr-t1x2x3x4x5x6-r1x1x1-w1x1x1-p0000-no-no-gfx950",
		 "not canonical"},
		{"fwd-bf16-group-h64-qr-t1x2x3x4x5x6-r1x1x1-w1x1x1-p0000-no-no-lse-lse-gfx950",
		 "not canonical"},
		{"fwd-bf16-group-h64-qr-t1x2x3x4x5x6-r1x1x1-w1x1x1-p0000-no-no-drop-lse-gfx950",
		 "not canonical"},
		{"fwd-bf16-group-h64-qr-t1x2x3x4x5x6-r1x1x1-w1x1x1-p0000-no-no-ps1-gfx950",
		 "not canonical"},
		{"fwd-bf16-group-h64-qr-t1x2x3x4x5x6-r1x1x1.1x1x1.1x1x1-w1x1x1-p0000-no-no-gfx950",
		 "not canonical"},
	};

	(void)state;
	for (size_t i = 0; i < sizeof(broken) / sizeof(broken[0]); i++) {
		struct fmha_error err = {0};
		struct kernel_spec spec;

		if (spec_name_parse(catalog, broken[i].name, &spec, &err) != FMHA_EINVAL)
			fail_msg("%s: was accepted", broken[i].name);
		if (!strstr(err.msg, broken[i].reason))
			fail_msg("%s: %s", broken[i].name, err.msg);
		assert_string_equal(err.field, "kernel");
	}
}

/* Cut off or changed anywhere, a name never reads as something it is not. */
static void damaged_names_are_refused(void **state)
{
	struct kernel_spec spec = find_spec("gfx950", "tile_tag == 'trload' and pad_d == 8"), read;
	char name[SPEC_NAME_BYTES], damaged[SPEC_NAME_BYTES], again[SPEC_NAME_BYTES];
	size_t length = spec_name_format(catalog, &spec, name);

	(void)state;
	for (size_t i = 0; i < length; i++) {
		memcpy(damaged, name, i);
		damaged[i] = '\0';
		assert_int_equal(spec_name_parse(catalog, damaged, &read, NULL), FMHA_EINVAL);
		for (int byte = 1; byte < 256; byte++) {
			memcpy(damaged, name, length + 1);
			damaged[i] = (char)byte;
			if (spec_name_parse(catalog, damaged, &read, NULL) < 0)
				continue;
			(void)spec_name_format(catalog, &read, again);
			assert_string_equal(again, damaged);
		}
	}
}

static int count_columns(const char *row)
{
	int n = 1;

	while ((row = strchr(row, ',')))
		row++, n++;
	return n;
}

static void broken_rows_are_refused(void **state)
{
	struct kernel_spec spec = find_spec("gfx942", "family == 'fwd'"), read;
	char row[SPEC_ROW_BYTES], damaged[SPEC_ROW_BYTES + 8];
	struct fmha_error err = {0};
	size_t length = spec_csv_row(catalog, &spec, row);

	(void)state;
	assert_int_equal(row[length - 1], '\n');
	row[length - 1] = '\0'; /* the newline is optional */
	assert_int_equal(spec_csv_parse(catalog, row, &read, &err), 0);
	for (size_t i = 0; i + 1 < length; i++) {
		memcpy(damaged, row, i);
		damaged[i] = '\0';
		/* Columns of this build's own traits may be missing, as a whole. */
		assert_true(spec_csv_parse(catalog, damaged, &read, &err) < 0 || i + 2 >= length ||
			    count_columns(damaged) >= SPEC_N_COLUMNS);
	}
	(void)snprintf(damaged, sizeof(damaged), "%s", row);
	for (int i = count_columns(row); i <= SPEC_N_FIELDS; i++)
		(void)snprintf(damaged + strlen(damaged), sizeof(damaged) - strlen(damaged), ",0");
	assert_int_equal(spec_csv_parse(catalog, damaged, &read, &err), FMHA_EINVAL);
	assert_non_null(strstr(err.msg, " columns"));
	(void)snprintf(damaged, sizeof(damaged), "fwd,fp17%s", strchr(strchr(row, ',') + 1, ','));
	assert_int_equal(spec_csv_parse(catalog, damaged, &read, &err), FMHA_EINVAL);
	assert_string_equal(err.field, "data_type");
	assert_non_null(strstr(err.msg, "fp17"));
}

static void the_header_names_the_columns(void **state)
{
	char line[SPEC_ROW_BYTES];
	size_t length = spec_csv_header(0, line);
	int n = 1;

	(void)state;
	for (size_t i = 0; i < length; i++)
		n += line[i] == ',';
	assert_int_equal(n, 59);
	assert_memory_equal(line, "family,data_type,mode,vlayout,hdim_q,", 37);
	assert_non_null(strstr(line, ",dropout_variant,tile_tag,use_trload\n"));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(everything_reads_back),
		cmocka_unit_test(names_look_as_documented),
		cmocka_unit_test(every_field_is_in_the_name),
		cmocka_unit_test(broken_names_are_refused),
		cmocka_unit_test(damaged_names_are_refused),
		cmocka_unit_test(broken_rows_are_refused),
		cmocka_unit_test(the_header_names_the_columns),
	};

	return cmocka_run_group_tests(tests, load_catalog, free_catalog);
}
