/* SPDX-License-Identifier: MIT */
/* Measured times: which row stays, who counts them, and their documents, with and without memory. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include <json/json.h>
#include <times/times.h>

#include "../scarce.h"

static int add(struct times *times, const char *kernel, const char *shape, double us,
	       uint64_t when_s, enum times_source source, uint32_t *n_of_kernel)
{
	struct proto_measured row = {.us = us, .when_s = when_s};
	struct fmha_error err;

	(void)snprintf(row.kernel, sizeof(row.kernel), "%s", kernel);
	(void)snprintf(row.shape, sizeof(row.shape), "%s", shape);
	return times_add(times, &row, source, n_of_kernel, &err);
}

static void one_rule_says_which_row_stays(void **state)
{
	const uint64_t now = (uint64_t)time(NULL), later = now + 315360000;
	const struct {
		enum times_source known;
		uint64_t known_s;
		enum times_source source;
		uint64_t when_s;
		int r;
	} cases[] = {
		{TIMES_OWN, 10, TIMES_OWN, 9, 1},
		{TIMES_OWN, 10, TIMES_OWN, 10, 0}, /* the last counts */
		{TIMES_OWN, 10, TIMES_OWN, 11, 0},
		{TIMES_OWN, 10, TIMES_IMPORTED, 10, 1}, /* it is the same, come back */
		{TIMES_OWN, 10, TIMES_IMPORTED, 11, 0},
		{TIMES_IMPORTED, 10, TIMES_IMPORTED, 10, 1},
		{TIMES_IMPORTED, 10, TIMES_OWN, 10, 0},
		{TIMES_OWN, 10, TIMES_SYSTEM, 99, 1},
		{TIMES_IMPORTED, 10, TIMES_SYSTEM, 99, 1},
		{TIMES_SYSTEM, 10, TIMES_SYSTEM, 10, 0},
		{TIMES_SYSTEM, 10, TIMES_SYSTEM, 9, 1},
		{TIMES_SYSTEM, 10, TIMES_OWN, 10, 1},
		{TIMES_SYSTEM, 10, TIMES_OWN, 11, 0},
		/* A stamp of the future is past. */
		{TIMES_OWN, later, TIMES_OWN, now, 0},
		{TIMES_OWN, later, TIMES_IMPORTED, now, 0},
		{TIMES_OWN, later, TIMES_IMPORTED, later, 1},
		{TIMES_SYSTEM, later, TIMES_OWN, now, 0},
		/* Of older names: not before the kernel's own, whenever; among themselves the least. */
		{TIMES_OWN, 10, TIMES_TWIN, 99, 1},
		{TIMES_SYSTEM, 10, TIMES_TWIN, 99, 1},
		{TIMES_TWIN, 99, TIMES_OWN, 10, 0},
		{TIMES_TWIN, 99, TIMES_SYSTEM, 10, 0},
		{TIMES_TWIN, 10, TIMES_TWIN, 99, 1}, /* it is slower */
	};

	(void)state;
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		struct times times = {0};

		assert_int_equal(add(&times, "k", "s", 5, cases[i].known_s, cases[i].known, NULL),
				 0);
		if (add(&times, "k", "s", 7, cases[i].when_s, cases[i].source, NULL) != cases[i].r)
			fail_msg("case %zu", i);
		assert_true(times_us(&times, "k", "s", 0) == (cases[i].r ? 5 : 7));
		assert_int_equal(times.n, 1);
		times_clear(&times);
	}
}

static void kernels_count_their_rows(void **state)
{
	struct times times = {0};
	uint32_t a = 0, b = 0;
	char shape[32];

	(void)state;
	assert_int_equal(add(&times, "a", "old", 1, 1, TIMES_OWN, &a), 0);
	assert_int_equal(add(&times, "a", "old", 2, 1, TIMES_OWN, &a), 0);
	assert_int_equal(a, 1);
	for (int i = 1; i < TIMES_MOST; i++) {
		(void)snprintf(shape, sizeof(shape), "s%d", i);
		assert_int_equal(add(&times, "b", shape, 1, 5, TIMES_OWN, &b), 0);
	}
	assert_int_equal(times.n, TIMES_MOST);
	assert_int_equal(add(&times, "a", "new", 1, 9, TIMES_OWN, &a), 0);
	assert_int_equal(a, 1); /* the oldest has gone */
	assert_int_equal(b, TIMES_MOST - 1);
	assert_true(times_us(&times, "a", "old", 0) == 0);
	assert_int_equal(times_forget(&times, "?", "s7"), 1);
	assert_int_equal(times_forget(&times, "nobody", ""), 0);
	assert_int_equal(b, TIMES_MOST - 2);
	assert_int_equal(times_forget(&times, "b*", ""), TIMES_MOST - 2);
	assert_int_equal(b, 0);
	times_clear(&times);
	assert_int_equal(a + times.n, 0);
}

static int put_name(void *owner, const struct times_row *row)
{
	return strlen(strcat(owner, row->kernel)) == 3;
}

static void a_shape_has_its_rows_in_order(void **state)
{
	static const char *const names[] = {"d", "a", "c", "b"};
	struct times times = {0};
	char seen[8] = "";

	(void)state;
	for (int i = 0; i < 4; i++) {
		assert_int_equal(add(&times, names[i], "s", 1, 1, TIMES_OWN, NULL), 0);
		assert_int_equal(add(&times, "x", names[i], 1, 1, TIMES_OWN, NULL), 0);
	}
	assert_int_equal(times_each(&times, "s", put_name, seen), 1); /* which ends it */
	assert_string_equal(seen, "dac");
	assert_int_equal(times_each(&times, "none", put_name, seen), 0);
	times_clear(&times);
}

static char *text_of(const struct times *times, bool own_only)
{
	cJSON *root;

	json_begin();
	root = cJSON_CreateObject();
	times_write_all(root, times, own_only);
	return json_end(root, false);
}

static int take(void *owner, const struct proto_measured *row, struct fmha_error *err)
{
	return times_add(owner, row, TIMES_OWN, NULL, err);
}

static int read_text(struct times *times, const char *text, const char *kernel,
		     struct fmha_error *err)
{
	cJSON *root = NULL;
	int r = json_from_text(text, strlen(text), NULL, &root);

	if (r == 0)
		r = times_read(cJSON_GetObjectItem(root, "results"), kernel, take, times, err);
	cJSON_Delete(root);
	return r;
}

static void rows_come_back_as_they_were(void **state)
{
	struct times from = {0}, to = {0};
	struct fmha_error err;
	char *text, *again;

	(void)state;
	assert_int_equal(add(&from, "k\"\\", "s", 1.0 / 3, 1700000000, TIMES_OWN, NULL), 0);
	assert_int_equal(add(&from, "l", "s", 1e-9, 0, TIMES_SYSTEM, NULL), 0);
	text = text_of(&from, false);
	assert_int_equal(read_text(&to, text, NULL, &err), 0);
	assert_int_equal(to.n, 2);
	assert_true(times_us(&to, "k\"\\", "s", 0) == 1.0 / 3);
	again = text_of(&to, false);
	assert_string_equal(text, again);
	free(text);
	free(again);
	text = text_of(&from, true);
	assert_null(strstr(text, "\"l\""));
	free(text);
	times_clear(&from);
	times_clear(&to);
}

#define GOOD "{\"kernel\":\"k\",\"shape\":\"s\",\"us\":1}"

static void nothing_is_taken_of_a_list_with_a_fault(void **state)
{
	static const struct {
		const char *item, *field;
	} cases[] = {
		{"7", "kernel"},
		{"{\"kernel\":\"\",\"shape\":\"s\",\"us\":1}", "kernel"},
		{"{\"kernel\":\"k\",\"us\":1}", "shape"},
		{"{\"kernel\":\"k\",\"shape\":\"s\"}", "us"},
		{"{\"kernel\":\"k\",\"shape\":\"s\",\"us\":\"1\"}", "us"},
		{"{\"kernel\":\"k\",\"shape\":\"s\",\"us\":1e12}", "us"},
		{"{\"kernel\":\"k\",\"shape\":\"s\",\"us\":1,\"splits\":-1}", "splits"},
		{"{\"kernel\":\"k\",\"shape\":\"s\",\"us\":1,\"splits\":true}", "splits"},
		{"{\"kernel\":\"k\",\"shape\":\"s\",\"us\":1,\"when\":\"now\"}", "when"},
	};
	struct times times = {0};
	char text[512], name[400];
	struct fmha_error err;

	(void)state;
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		err = (struct fmha_error){0};
		(void)snprintf(text, sizeof(text), "{\"results\":[%s,%s]}", GOOD, cases[i].item);
		assert_int_equal(read_text(&times, text, NULL, &err), FMHA_EINVAL);
		assert_string_equal(err.field, cases[i].field);
		assert_int_equal(times.n, 0);
	}
	memset(name, 'x', sizeof(name) - 1);
	name[sizeof(name) - 1] = '\0';
	assert_int_equal(read_text(&times, "{\"results\":[" GOOD "]}", name, &err), FMHA_EINVAL);
	assert_int_equal(read_text(&times, "{\"results\":{}}", NULL, &err), FMHA_EINVAL);
	assert_string_equal(err.field, "results");
	assert_int_equal(read_text(&times, "{\"results\":[" GOOD "]}", "own", &err), 0);
	assert_true(times_us(&times, "own", "s", 0) == 1);
	times_clear(&times);
}

/* Each allocation fails in its turn: a row is there or not, a text is whole or not there. */
static void without_memory_nothing_is_half_done(void **state)
{
	struct times times = {0};
	char *text, *whole;

	(void)state;
	for (long i = 0; failed || i == 0; i++) {
		failed = false;
		n_before = i;
		if (add(&times, "k", "s", 1, 1, TIMES_OWN, NULL) == FMHA_ENOMEM)
			assert_int_equal(times.n, 0);
		n_before = -1;
	}
	assert_int_equal(times.n, 1);
	whole = text_of(&times, false);
	for (long i = 0; failed || i == 0; i++) {
		failed = false;
		n_before = i;
		text = text_of(&times, false);
		n_before = -1;
		if (text)
			assert_string_equal(text, whole);
		else
			assert_true(failed);
		free(text);
	}
	free(whole);
	times_clear(&times);
}

static int count(void *owner, const cJSON *item)
{
	*(int *)owner += cJSON_IsObject(item);
	return 0;
}

/* A document that lacked memory is not one that is broken. */
static void walking_without_memory_says_so(void **state)
{
	static const char text[] =
		"{\"a\": [1, {\"b\": null}], \"list\": [{\"c\": \"d\"}, {}], \"e\": \"f\"}";

	(void)state;
	for (long i = 0; failed || i == 0; i++) {
		int n = 0, r;
		cJSON *rest;

		failed = false;
		n_before = i;
		r = json_walk(text, sizeof(text) - 1, "list", count, &n, &rest);
		n_before = -1;
		assert_int_equal(r, failed ? FMHA_ENOMEM : 0);
		if (!failed) {
			assert_int_equal(n, 2);
			assert_int_equal(cJSON_GetArraySize(rest), 3);
			assert_int_equal(cJSON_GetArraySize(cJSON_GetObjectItem(rest, "list")), 0);
		}
		cJSON_Delete(rest);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(one_rule_says_which_row_stays),
		cmocka_unit_test(kernels_count_their_rows),
		cmocka_unit_test(a_shape_has_its_rows_in_order),
		cmocka_unit_test(rows_come_back_as_they_were),
		cmocka_unit_test(nothing_is_taken_of_a_list_with_a_fault),
		cmocka_unit_test(without_memory_nothing_is_half_done),
		cmocka_unit_test(walking_without_memory_says_so),
	};

	return cmocka_run_group_tests_name("times", tests, NULL, NULL);
}
