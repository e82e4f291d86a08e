// SPDX-License-Identifier: MIT
/* Filters: what they mean, and what they say when they mean nothing. */
#include "specs_test.h"

static struct kernel_spec sample(void)
{
	struct kernel_spec spec;

	spec_init(&spec);
	spec.signature.mask = SPEC_MASK_TOP_LEFT;
	spec.signature.lse = 1;
	spec.pad_d = SPEC_PAD_8;
	spec.pipeline = (uint8_t)spec_word_find(catalog, SPEC_FIELD_pipeline, "qr_async");
	return spec;
}

static int matches(const char *text)
{
	struct kernel_spec spec = sample();
	struct spec_filter *filter;
	struct fmha_error err = {0};
	int result;

	if (spec_filter_compile(catalog, text, &filter, NULL, &err) < 0)
		fail_msg("%s: %s", text, err.msg);
	result = spec_filter_match(filter, &spec);
	spec_filter_free(filter);
	return result;
}

static void says_yes(void **state)
{
	static const char *const texts[] = {
		"true",
		"hdim_q == 128",
		"128 == hdim_q",
		"hdim_q == 128 and pipeline == 'qr_async'",
		"c.hdim_q == 128 and c.pipeline == \"qr_async\"",
		"'qr_async' == pipeline",
		"pipeline != 'qr' and not dropout",
		"not lse or mask == 'top_left'",
		"mask == 'causal' and mask in ('no_mask', 't')",
		"bias not in ('elementwise', 'elementwise_bias') and bias == 'no_bias'",
		"qscale == 'no_scale' and rope == 'no' and vlayout == 'row_major'",
		"lse and not (dropout or logits)",
		"mask in ('no', 'top_left')",
		"mask in ['top_left']",
		"mask in ('top_left',)",
		"mask not in ('no', 'generic')",
		"hdim_q in (64, 128)",
		"block_per_cu in (-1, 2)",
		"block_per_cu == -1",
		"block_per_cu < 0",
		"64 <= hdim_q <= 128",
		"64 < hdim_q <= 128 < 129",
		"tile_m0 * tile_n0 > 128 * 127",
		"tile_m0 + tile_n0 - 1 == 255",
		"tile_m0 % 48 == 32",
		"-7 // 2 == -4",
		"-7 % 2 == 1",
		"tile_m0 // 0 == 0",
		"tile_m0 % 0 == tile_m0",
		"pad_d == 8",
		"lse == true and dropout == False",
		"(hdim_q if lse else 0) == 128",
		"0 == (0 if lse else hdim_q)",
		"1 if dropout else 2 if lse else 0",
		"(1 if lse else hdim_q) == 1",
		"lse == 1 or pipeline == 'qr'",
		"not not lse",
		"- - 1 == 1",
		" \t\nlse ",
		"mask == mask",
		"2 + 3 * 4 == 14",
		"(2 + 3) * 4 == 20",
		"hdim_q == 128 == 128",
		"lse or dropout and logits",
	};

	(void)state;
	for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++)
		if (!matches(texts[i]))
			fail_msg("%s: no", texts[i]);
}

static void says_no(void **state)
{
	static const char *const texts[] = {
		"false",
		"hdim_q != 128",
		"hdim_q == 128 and pipeline == 'qr'",
		"(lse or dropout) and logits",
		"mask in ()",
		"64 <= hdim_q < 128",
		"128 < hdim_q < 1 // 0",
		"not lse",
		"0",
		"hdim_q in (64, 96)",
		"lse == false",
		"0 if lse else 1",
		"mask not in ('top_left', 'no')",
	};

	(void)state;
	for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++)
		if (matches(texts[i]))
			fail_msg("%s: yes", texts[i]);
}

/* The fault is at the column of the first difference from what would have been right. */
static void says_where_it_is_wrong(void **state)
{
	static const struct {
		const char *text;
		int column; /* from 0 */
		const char *reason;
	} wrong[] = {
		{"", 0, "expected a field"},
		{"hdim_q ==", 9, "expected a field"},
		{"hdim_q = 128", 7, "expected an operator"},
		{"hdim_q == 128 and pipline == 'qr'", 18, "no field 'pipline'"},
		{"hdim_q == 128 and pipeline == 'qq'", 30, "pipeline is never 'qq'"},
		{"pipeline == qr", 12, "no field 'qr'"},
		{"pipeline == 3", 12, "pipeline is a word"},
		{"hdim_q == 'qr'", 10, "field that has words"},
		{"hdim_q < 'qr'", 9, "no order"},
		{"pipeline < 'qr'", 0, "no order"},
		{"pipeline", 0, "pipeline is a word: compare it"},
		{"lse and mask", 8, "mask is a word"},
		{"not mask", 4, "mask is a word"},
		{"mask + 1", 0, "mask is a word"},
		{"'no'", 0, "a word stands only beside"},
		{"mask == bias", 8, "different words"},
		{"'a' == 'b'", 0, "field that has words"},
		{"(lse", 4, "expected ')'"},
		{"lse)", 3, "expected an operator"},
		{"lse lse", 4, "expected an operator"},
		{"mask in 'no'", 8, "expected a list"},
		{"mask in ('no' 'top_left')", 14, "expected ','"},
		{"mask in ('no', 3)", 15, "mask is a word"},
		{"mask in ('no', 'nonesuch')", 15, "never 'nonesuch'"},
		{"hdim_q in (64, 'x')", 15, "field that has words"},
		{"hdim_q in (64, hdim_v)", 15, "expected a number"},
		{"'no' in mask", 0, "expected a field before 'in'"},
		{"mask not 'no'", 9, "expected 'in'"},
		{"mask == 'no", 8, "not closed"},
		{"hdim_q == 99999999999999999999", 10, "not a number"},
		{"hdim_q == 12x", 10, "not a number"},
		{"hdim_q == 0x10", 10, "not a number"},
		{"hdim_q & 1", 7, "expected an operator"},
		{"1 if lse", 8, "expected 'else'"},
		{"and lse", 0, "expected a field"},
		{"arch.lds_bytes > 0", 0, "no field"},
		{"dtype.bytes == 2", 0, "no field"},
		{"c. == 1", 0, "no field"},
		{"hdim_q == 128 \x01", 14, "expected an operator"},
	};

	(void)state;
	for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
		struct spec_filter *filter;
		char explain[SPEC_EXPLAIN_BYTES];
		struct fmha_error err = {0};
		const char *caret;
		int r = spec_filter_compile(catalog, wrong[i].text, &filter, explain, &err);

		if (r != FMHA_EINVAL)
			fail_msg("%s: was accepted", wrong[i].text);
		assert_string_equal(err.field, "filter");
		if (!strstr(err.msg, wrong[i].reason))
			fail_msg("%s: %s", wrong[i].text, err.msg);
		caret = strrchr(explain, '\n');
		assert_non_null(caret);
		if ((int)strlen(caret) - 1 - 3 != wrong[i].column)
			fail_msg("%s:\n%s", wrong[i].text, explain);
	}
}

static void long_texts_keep_the_caret_in_sight(void **state)
{
	char text[1000], explain[SPEC_EXPLAIN_BYTES];
	struct spec_filter *filter;
	const char *line, *caret;

	(void)state;
	memset(text, ' ', sizeof(text));
	memcpy(text + 500, "nonesuch", 8);
	text[999] = '\0';
	assert_int_equal(spec_filter_compile(catalog, text, &filter, explain, NULL), FMHA_EINVAL);
	line = strchr(explain, '\n') + 1;
	caret = strchr(line, '\n') + 1;
	assert_memory_equal(line + (strlen(caret) - 1), "nonesuch", 8);
}

static void limits(void **state)
{
	static char text[SPEC_FILTER_MAX_BYTES + 2];
	struct spec_filter *filter;
	struct fmha_error err = {0};

	(void)state;
	memset(text, ' ', SPEC_FILTER_MAX_BYTES);
	text[0] = '1';
	assert_int_equal(spec_filter_compile(catalog, text, &filter, NULL, &err), 0);
	spec_filter_free(filter);
	text[SPEC_FILTER_MAX_BYTES] = ' ';
	assert_int_equal(spec_filter_compile(catalog, text, &filter, NULL, &err), FMHA_EINVAL);
	/* Depth, in every way that there is. */
	for (int way = 0; way < 5; way++) {
		static const char *const parts[] = {"(", "- ", "not ", "1 if 1 else ", "1+("};
		size_t used = 0, n = strlen(parts[way]);

		memset(text, 0, sizeof(text));
		while (used + n < SPEC_FILTER_MAX_BYTES - 8) {
			memcpy(text + used, parts[way], n);
			used += n;
		}
		assert_int_equal(spec_filter_compile(catalog, text, &filter, NULL, &err),
				 FMHA_EINVAL);
		assert_non_null(strstr(err.msg, "nested too deeply"));
	}
	/* Wherever the code ends, also at a jump of a chain of comparisons. */
	for (int i = 2000; i < 2060; i++) {
		int r;

		memset(text, 0, sizeof(text));
		if (i % 2)
			strcat(text, "- ");
		for (int j = 0; j < i / 2; j++)
			strcat(text, "1+");
		strcat(text, "1 < 2 < 3");
		r = spec_filter_compile(catalog, text, &filter, NULL, &err);
		if (r == 0)
			spec_filter_free(filter);
		else
			assert_non_null(strstr(err.msg, "too long"));
		assert_int_equal(r, i < 2040 ? 0 : i > 2050 ? FMHA_EINVAL : r);
	}
	/* A long chain is not deep. */
	memset(text, 0, sizeof(text));
	for (int i = 0; i < 300; i++)
		strcat(text, "lse and ");
	strcat(text, "lse");
	assert_int_equal(spec_filter_compile(catalog, text, &filter, NULL, &err), 0);
	spec_filter_free(filter);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(says_yes),
		cmocka_unit_test(says_no),
		cmocka_unit_test(says_where_it_is_wrong),
		cmocka_unit_test(long_texts_keep_the_caret_in_sight),
		cmocka_unit_test(limits),
	};

	return cmocka_run_group_tests(tests, load_catalog, free_catalog);
}
