/* SPDX-License-Identifier: MIT */
/* The deaths of workers: whom they are held against, and for how long. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <base/clock.h>
#include <base/log.h>
#include <quarantine.h>

#define SECOND NS_PER_S

static struct worker_quarantine listed;

/* Three deaths within 100 s make a quarantine. */
static struct quarantine *setup(void)
{
	static struct quarantine quarantine;
	static const struct config_supervision rules = {.quarantine_deaths = 3,
							.quarantine_s = 100};

	log_init("test", LOG_LEVEL_ERROR);
	quarantine_init(&quarantine, &rules);
	return &quarantine;
}

static void add(struct quarantine *quarantine, const char *kernel, uint32_t uid, uint64_t second)
{
	const struct worker_death death = {.kernel = kernel,
					   .uid = uid,
					   .trusted = uid == 0 || uid == WORKER_NO_USER,
					   .problem = 7};

	quarantine_add(quarantine, &death, second * SECOND);
}

static void add_code(struct quarantine *quarantine, const char *kernel, uint64_t code,
		     uint64_t second)
{
	const struct worker_death death = {
		.kernel = kernel, .code = code, .uid = 1000, .problem = 7};

	quarantine_add(quarantine, &death, second * SECOND);
}

static uint32_t n_listed(const struct quarantine *quarantine, uint64_t second)
{
	quarantine_list(quarantine, 0, second * SECOND, &listed);
	return listed.n;
}

static void one_users_deaths_are_that_users(void **state)
{
	struct quarantine *quarantine = setup();

	(void)state;
	add(quarantine, "k", 1000, 1000);
	add(quarantine, "k", 1000, 1010);
	assert_int_equal(n_listed(quarantine, 1015), 0);
	add(quarantine, "k", 1000, 1020);
	assert_int_equal(n_listed(quarantine, 1020), 1);
	assert_string_equal(listed.list[0].kernel, "k");
	assert_false(listed.list[0].everybody);
	assert_int_equal(listed.list[0].uid, 1000);
	assert_int_equal(listed.list[0].until_ns, 1120 * SECOND);
	quarantine_list(quarantine, 1, 1020 * SECOND, &listed);
	assert_int_equal(listed.n, 0);
}

static void two_users_deaths_concern_everybody(void **state)
{
	struct quarantine *quarantine = setup();

	(void)state;
	add(quarantine, "k", 1000, 1000);
	add(quarantine, "other", 1001, 1000);
	add(quarantine, "k", 1000, 1010);
	add(quarantine, "k", 1001, 1020);
	assert_int_equal(n_listed(quarantine, 1020), 1);
	assert_true(listed.list[0].everybody);
	assert_string_equal(listed.list[0].kernel, "k");
}

static void trusted_and_unknown_users_speak_for_everybody(void **state)
{
	static const uint32_t users[] = {0, WORKER_NO_USER};

	(void)state;
	for (int i = 0; i < 2; i++) {
		struct quarantine *quarantine = setup();

		for (uint64_t n = 0; n < 10; n++)
			add(quarantine, "k", users[i], 1000 + n);
		assert_int_equal(n_listed(quarantine, 1010), 1);
		assert_true(listed.list[0].everybody);
		assert_int_equal(quarantine_ban_s(quarantine, users[i], 1010 * SECOND), 0);
	}
}

/* One code under several names of the registry, and several codes under one. */
static void deaths_are_the_codes(void **state)
{
	struct quarantine *quarantine = setup();

	(void)state;
	add_code(quarantine, "k_lse", 5, 1000);
	add_code(quarantine, "k_nlse", 5, 1001);
	add_code(quarantine, "k_lse", 6, 1002);
	assert_int_equal(n_listed(quarantine, 1003), 0);
	add_code(quarantine, "k_sink", 5, 1003);
	assert_int_equal(n_listed(quarantine, 1003), 1);
	assert_string_equal(listed.list[0].kernel, "k_sink");
	assert_int_equal(listed.list[0].code, 5);
	assert_int_equal(quarantine_lift(quarantine, 0, "k_lse"), 0);
	assert_int_equal(quarantine_lift(quarantine, 1, "k_sink"), 0);
	assert_int_equal(quarantine_lift(quarantine, 0, "k_sink"), 1);
	assert_int_equal(n_listed(quarantine, 1003), 0);
	/* What was counted is gone for the one that was lifted. */
	add_code(quarantine, "k_lse", 5, 1004);
	assert_int_equal(n_listed(quarantine, 1004), 0);
}

/* An entry of a file that an older daemon wrote has no code. */
static void what_is_restored_without_a_code_goes_by_its_name(void **state)
{
	struct quarantine *quarantine = setup();
	const struct worker_quarantined old = {
		.kernel = "k", .uid = 1000, .until_ns = 1100 * SECOND};

	(void)state;
	quarantine_restore(quarantine, 0, &old, 1000 * SECOND);
	quarantine_restore(quarantine, 0, &old, 1000 * SECOND);
	assert_int_equal(n_listed(quarantine, 1001), 1);
	assert_int_equal(listed.list[0].code, 0);
	assert_int_equal(quarantine_lift(quarantine, 0, "k"), 1);
	assert_int_equal(quarantine_lift(quarantine, 0, "k"), 0);
}

static void old_deaths_do_not_count(void **state)
{
	struct quarantine *quarantine = setup();

	(void)state;
	for (uint64_t n = 0; n < 10; n++)
		add(quarantine, "k", 1000, 1000 + 60 * n);
	assert_int_equal(n_listed(quarantine, 1600), 0);
}

static void every_quarantine_ends_and_the_next_is_longer(void **state)
{
	struct quarantine *quarantine = setup();
	uint64_t second = 1000, period = 100;

	(void)state;
	for (int round = 0; round < 12; round++) {
		for (int n = 0; n < 3; n++)
			add(quarantine, "k", 0, second);
		assert_int_equal(n_listed(quarantine, second + period - 1), 1);
		assert_int_equal(n_listed(quarantine, second + period), 0);
		second += period + 200;
		period = period * 2 < 86400 ? period * 2 : 86400;
	}
	assert_int_equal(period, 86400);
}

static void who_ends_workers_with_many_kernels_may_open_none(void **state)
{
	struct quarantine *quarantine = setup();
	char kernel[] = "k0";

	(void)state;
	for (uint64_t n = 0; n < 5; n++) {
		kernel[1] = (char)('0' + n);
		add(quarantine, kernel, 1000, 1000 + n);
	}
	assert_int_equal(quarantine_ban_s(quarantine, 1000, 1005 * SECOND), 0);
	add(quarantine, "k6", 1000, 1005);
	assert_int_equal(n_listed(quarantine, 1005), 0); /* no kernel is to blame */
	assert_true(quarantine_ban_s(quarantine, 1000, 1005 * SECOND) > 99);
	assert_int_equal(quarantine_ban_s(quarantine, 1001, 1005 * SECOND), 0);
	assert_int_equal(quarantine_ban_s(quarantine, 1000, 1105 * SECOND), 0);
}

static void too_many_entries_keep_what_concerns_everybody(void **state)
{
	struct quarantine *quarantine = setup();

	(void)state;
	for (int n = 0; n < 3; n++)
		add(quarantine, "everybody", 0, 1000);
	for (uint32_t uid = 1; uid < 2 * QUARANTINE_ENTRIES; uid++)
		for (int n = 0; n < 3; n++)
			add(quarantine, "k", uid, 1000);
	assert_int_equal(n_listed(quarantine, 1001), 3); /* k: for its first user, then for all */
	assert_true(listed.list[0].everybody && listed.list[1].everybody);
	setup();
	for (int n = 0; n < 3; n++)
		add(quarantine, "everybody", 0, 1000);
	for (uint32_t uid = 1; uid < 2 * QUARANTINE_ENTRIES; uid++) {
		char kernel[16];

		snprintf(kernel, sizeof(kernel), "k%u", uid);
		for (int n = 0; n < 3; n++)
			add(quarantine, kernel, uid, 1000);
	}
	assert_int_equal(n_listed(quarantine, 1001), WORKER_MAX_QUARANTINED);
	assert_string_equal(listed.list[0].kernel, "everybody");
	assert_false(listed.list[1].everybody);
}

static void deaths_without_a_kernel_blame_nobody(void **state)
{
	struct quarantine *quarantine = setup();

	(void)state;
	for (uint64_t n = 0; n < 20; n++)
		add(quarantine, "", 1000, 1000);
	assert_int_equal(n_listed(quarantine, 1000), 0);
	assert_int_equal(quarantine_ban_s(quarantine, 1000, 1000 * SECOND), 0);
}

static bool is_shown(const struct worker_page *page, uint32_t uid, const char *kernel,
		     uint64_t code, uint64_t now)
{
	static struct worker_quarantine what;

	(void)worker_page_get_quarantine(page, &what);
	return worker_quarantine_has(&what, uid, kernel, code, now);
}

/* What the front shows, the worker of the page finds: at once, for whom it is for and until it ends. */
static void a_page_holds_what_was_shown_last(void **state)
{
	static struct worker_page page;
	struct worker_quarantine what = {
		.n = 3,
		.list = {{.kernel = "a", .code = 5, .everybody = true, .until_ns = 10},
			 {.kernel = "b", .code = 6, .uid = 1000, .until_ns = 20},
			 {.kernel = "c", .everybody = true, .until_ns = 20}}};
	uint32_t version = worker_page_get_quarantine(&page, &listed);

	(void)state;
	assert_int_equal(listed.n, 0);
	assert_false(is_shown(&page, 1000, "a", 5, 0));
	worker_page_set_quarantine(&page, &what);
	assert_int_not_equal(worker_page_get_quarantine(&page, &listed), version);
	assert_memory_equal(&listed, &what, sizeof(what));
	assert_true(is_shown(&page, 7, "twin of a", 5, 9));
	assert_false(is_shown(&page, 7, "a", 4, 9));
	assert_false(is_shown(&page, 7, "a", 5, 10));
	assert_true(is_shown(&page, 1000, "b", 6, 10));
	assert_false(is_shown(&page, 1001, "b", 6, 10));
	assert_true(is_shown(&page, 1001, "c", 4, 10));
	what.n = 1;
	worker_page_set_quarantine(&page, &what);
	assert_false(is_shown(&page, 1000, "b", 6, 10));
	assert_true(is_shown(&page, 7, "a", 5, 9));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_page_holds_what_was_shown_last),
		cmocka_unit_test(one_users_deaths_are_that_users),
		cmocka_unit_test(two_users_deaths_concern_everybody),
		cmocka_unit_test(trusted_and_unknown_users_speak_for_everybody),
		cmocka_unit_test(deaths_are_the_codes),
		cmocka_unit_test(what_is_restored_without_a_code_goes_by_its_name),
		cmocka_unit_test(old_deaths_do_not_count),
		cmocka_unit_test(every_quarantine_ends_and_the_next_is_longer),
		cmocka_unit_test(who_ends_workers_with_many_kernels_may_open_none),
		cmocka_unit_test(too_many_entries_keep_what_concerns_everybody),
		cmocka_unit_test(deaths_without_a_kernel_blame_nobody),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
