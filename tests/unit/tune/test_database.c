/* SPDX-License-Identifier: MIT */
/* The tuned database: what wins, what is dropped, what is refused, and its files. */
#include <catalogue/backends.h>
#include <specs/catalog.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include <json/json.h>
#include <proto/error.h>
#include <tune/store.h>

static const struct proto_worker_ready_params identity = {.model = "A Card, 8 GB",
							  .device.arch = "x",
							  .driver = "1",
							  .compiler = "cc 1",
							  .sources = "abc"};

static long n_before = -1; /* allocations before one fails; -1: none does */

void *__real_malloc(size_t size);
void *__wrap_malloc(size_t size);

void *__wrap_malloc(size_t size)
{
	if (n_before < 0 || n_before-- > 0)
		return __real_malloc(size);
	return NULL;
}

static int add(struct tune_database *database, const char *kernel, const char *shape, double us,
	       uint64_t when_s, bool own)
{
	struct proto_measured r = {.us = us, .when_s = when_s};
	struct fmha_error err;

	(void)snprintf(r.kernel, sizeof(r.kernel), "%s", kernel);
	(void)snprintf(r.shape, sizeof(r.shape), "%s", shape);
	return times_add(tune_database_times(database), &r, own ? TIMES_OWN : TIMES_SYSTEM, NULL,
			 &err);
}

static bool says(const struct tune_database *database, const char *part)
{
	char *text;
	bool found;

	json_begin();
	text = json_end(tune_database_worker_json(database), false);
	found = strstr(text, part) != NULL;
	free(text);
	return found;
}

static void the_newer_wins_and_the_machines_own(void **state)
{
	struct tune_database *database = tune_database_new(&identity);

	(void)state;
	assert_int_equal(add(database, "k", "s", 5, 10, true), 0);
	assert_int_equal(add(database, "k", "s", 4, 9, true), 1);
	assert_true(says(database, "\"us\":5"));
	assert_int_equal(add(database, "k", "s", 3, 11, true), 0);
	assert_true(says(database, "\"us\":3"));
	/* The system's never goes before one of this machine's, and is replaced by it. */
	assert_int_equal(add(database, "k", "s", 2, 99, false), 1);
	assert_int_equal(add(database, "k", "t", 7, 5, false), 0);
	assert_int_equal(add(database, "k", "t", 7, 5, true), 1); /* the same, come back */
	assert_int_equal(add(database, "k", "t", 6, 6, true), 0);
	assert_int_equal(tune_database_times(database)->n, 2);
	assert_int_equal(times_forget(tune_database_times(database), "k*", "t"), 1);
	assert_int_equal(times_forget(tune_database_times(database), "nobody", ""), 0);
	assert_int_equal(times_forget(tune_database_times(database), "*", ""), 1);
	tune_database_free(database);
}

/* The clock was years ahead when the first was written: what is measured now is newer. */
static void a_stamp_of_the_future_is_past(void **state)
{
	struct tune_database *database = tune_database_new(&identity);
	uint64_t now = (uint64_t)time(NULL);

	(void)state;
	assert_int_equal(add(database, "a", "s", 9, now + 315360000, true), 0);
	assert_int_equal(add(database, "a", "s", 5, now, true), 0);
	tune_database_free(database);
}

static void of_too_many_the_oldest_goes(void **state)
{
	struct tune_database *database = tune_database_new(&identity);
	char shape[32];

	(void)state;
	for (int i = 0; i < TIMES_MOST + 3; i++) {
		(void)snprintf(shape, sizeof(shape), "s%d", i);
		assert_int_equal(add(database, "k", shape, 1, 100 + i, true), 0);
	}
	assert_int_equal(tune_database_times(database)->n, TIMES_MOST);
	assert_false(says(database, "\"s0\"") || says(database, "\"s2\""));
	assert_true(says(database, "\"s3\""));
	tune_database_free(database);
}

static void nonsense_is_refused(void **state)
{
	struct tune_database *database = tune_database_new(&identity);

	(void)state;
	assert_int_equal(add(database, "", "s", 1, 1, true), FMHA_EINVAL);
	assert_int_equal(add(database, "k", "", 1, 1, true), FMHA_EINVAL);
	assert_int_equal(add(database, "k", "s", 0, 1, true), FMHA_EINVAL);
	assert_int_equal(add(database, "k", "s", -1, 1, true), FMHA_EINVAL);
	assert_int_equal(add(database, "k", "s", 0.0 / 0.0, 1, true), FMHA_EINVAL);
	assert_int_equal(tune_database_times(database)->n, 0);
	tune_database_free(database);
}

/* A document is taken whole or not at all, whatever is cut off or changed. */
static void reading_is_all_or_nothing(void **state)
{
	struct tune_database *from = tune_database_new(&identity), *to;
	struct fmha_error err;
	char *text, *damaged;
	size_t n;

	(void)state;
	add(from, "k", "s", 5, 10, true);
	add(from, "k", "t", 5, 10, true);
	text = tune_database_results_text(from);
	n = strlen(text);
	damaged = malloc(n + 1);
	for (size_t i = 0; i < n; i++) {
		to = tune_database_new(&identity);
		assert_int_equal(tune_database_read_results(to, text, i, true, &err), FMHA_EINVAL);
		assert_int_equal(tune_database_times(to)->n, 0);
		/* A byte that is no JSON anywhere outside a string; inside, it is another string. */
		memcpy(damaged, text, n + 1);
		damaged[i] = '\x01';
		if (tune_database_read_results(to, damaged, n, true, &err) < 0)
			assert_int_equal(tune_database_times(to)->n, 0);
		else
			assert_int_equal(tune_database_times(to)->n, 2);
		tune_database_free(to);
	}
	to = tune_database_new(&identity);
	assert_int_equal(tune_database_read_results(to, text, n, true, &err), 0);
	assert_int_equal(tune_database_times(to)->n, 2);
	tune_database_free(to);
	free(damaged);
	free(text);
	tune_database_free(from);
}

static void another_environment_is_refused(void **state)
{
	struct tune_database *from = tune_database_new(&identity);
	struct proto_worker_ready_params others[5] = {identity, identity, identity, identity,
						      identity};
	static const char *const fields[] = {"model", "arch", "driver", "compiler", "sources"};
	char *text = tune_database_results_text(from), name[TUNE_NAME_BYTES],
	     other[TUNE_NAME_BYTES];

	(void)state;
	strcpy(others[0].model, "another");
	strcpy(others[1].device.arch, "another");
	strcpy(others[2].driver, "another");
	strcpy(others[3].compiler, "another");
	strcpy(others[4].sources, "another");
	tune_results_file(&identity, name);
	assert_int_equal(strncmp(name, "a-card-8-gb-", 12), 0);
	for (int i = 0; i < 5; i++) {
		struct tune_database *to = tune_database_new(&others[i]);
		struct fmha_error err = {0};

		assert_int_equal(tune_database_read_results(to, text, strlen(text), true, &err),
				 FMHA_EINVAL);
		assert_string_equal(err.field, fields[i]);
		tune_results_file(&others[i], other);
		assert_string_not_equal(name, other);
		tune_database_free(to);
	}
	free(text);
	tune_database_free(from);
}

static void settings_come_back(void **state)
{
	struct tune_database *from = tune_database_new(&identity),
			     *to = tune_database_new(&identity);
	const struct tune_quarantined quarantined = {.kernel = "bad",
						     .code = 0xfedcba9876543210,
						     .uid = 7,
						     .until_s = 123},
				      *list;
	struct fmha_error err;
	char *text;

	(void)state;
	assert_int_equal(tune_database_set_priority(from, "k", 3, &err), 0);
	assert_int_equal(tune_database_set_priority(from, "l", 3, &err), 0);
	assert_int_equal(tune_database_set_priority(from, "l", 0, &err), 0);
	assert_int_equal(tune_database_load_set(from, "mine", "[\"a*\"]", 6, &err), 0);
	assert_int_equal(tune_database_load_set(from, "bad", "[1]", 3, &err), FMHA_EINVAL);
	assert_int_equal(tune_database_unload_set(from, "default", &err), 0);
	assert_int_equal(tune_database_unload_set(from, "default", &err), FMHA_ENOENT);
	assert_int_equal(tune_database_set_quarantine(from, &quarantined, 1, &err), 0);
	text = tune_database_settings_text(from);
	assert_int_equal(tune_database_read_settings(to, text, strlen(text), &err), 0);
	free(text);
	assert_true(says(to, "\"sets\":{\"mine\":[\"a*\"]}"));
	assert_true(says(to, "\"priorities\":{\"k\":3}"));
	assert_int_equal(tune_database_quarantine(to, &list), 1);
	assert_string_equal(list[0].kernel, "bad");
	assert_true(list[0].code == 0xfedcba9876543210);
	assert_int_equal(list[0].uid, 7);
	assert_false(list[0].everybody);
	tune_database_free(from);
	tune_database_free(to);
}

/* Files that were written when a kernel had many names: the least time and the highest priority are its own. */
static void older_names_become_the_kernels_own(void **state)
{
	static const char now[] =
		"fwd-fp32-h64-cpu_flash-t96x512x64x64x512x64-r1x1x1-w6x16x1-p1111-"
		"no-no-x86_64_v3";
	static const char *const old[] = {
		"fwd-fp32-batch-h64-cpu_flash-t96x512x64x64x512x64-r1x1x1-w6x16x1-p1111-no-no-lse-"
		"x86_64_v3",
		"fwd-fp32-group-h64-cpu_flash-t96x512x64x64x512x64-r1x1x1-w6x16x1-p1111-top_left-"
		"no-"
		"x86_64_v3"};
	struct tune_database *from = tune_database_new(&identity),
			     *to = tune_database_new(&identity);
	struct spec_catalog *catalog;
	struct fmha_error err;
	char *text;

	(void)state;
	assert_int_equal(spec_catalog_own(fmha_backends, &catalog, &err), 0);
	tune_database_set_catalog(to, catalog);
	for (int i = 0; i < 2; i++) {
		struct proto_measured row = {.us = 5 + i, .when_s = 1000};

		(void)snprintf(row.kernel, sizeof(row.kernel), "%s", old[i]);
		(void)snprintf(row.shape, sizeof(row.shape), "s");
		assert_int_equal(times_add(tune_database_times(from), &row, TIMES_OWN, NULL, &err),
				 0);
		assert_int_equal(tune_database_set_priority(from, old[i], 3 + i, &err), 0);
	}
	assert_int_equal(tune_database_set_priority(from, "nonsense", 1, &err), 0);
	text = tune_database_results_text(from);
	assert_int_equal(tune_database_read_results(to, text, strlen(text), true, &err), 0);
	free(text);
	assert_int_equal(tune_database_times(to)->n, 1);
	assert_true(times_us(tune_database_times(to), now, "s", 0) == 5);
	text = tune_database_settings_text(from);
	assert_int_equal(tune_database_read_settings(to, text, strlen(text), &err), 0);
	free(text);
	assert_string_equal(tune_database_conflict(to), now);
	text = tune_database_settings_text(to);
	assert_non_null(strstr(text, "x86_64_v3\":4"));
	assert_non_null(strstr(text, "\"nonsense\":1"));
	assert_null(strstr(text, old[0]));
	free(text);
	tune_database_free(from);
	tune_database_free(to);
	spec_catalog_free(catalog);
}

static void a_set_that_cannot_be_replaced_stays(void **state)
{
	struct tune_database *database = tune_database_new(&identity);
	int r = FMHA_ENOMEM;

	(void)state;
	for (long i = 0; r == FMHA_ENOMEM; i++) {
		n_before = i;
		r = tune_database_load_set(database, "default", "[\"a*\"]", 6, NULL);
		n_before = -1;
		assert_true(
			says(database, r < 0 ? "{\"default\":[\"*\"]}" : "{\"default\":[\"a*\"]}"));
	}
	assert_int_equal(r, 0);
	tune_database_free(database);
}

static void files_are_replaced_whole(void **state)
{
	char folder[] = "/tmp/fmhad-tune-XXXXXX", path[PATH_MAX], system[PATH_MAX];
	struct tune_store store, second;
	struct tune_store_report report;
	struct tune_database *database;
	struct fmha_error err;
	struct stat st;

	(void)state;
	assert_non_null(mkdtemp(folder));
	(void)snprintf(path, sizeof(path), "%s/state/tuned", folder);
	(void)snprintf(system, sizeof(system), "%s/none", folder);
	tune_store_init(&store, path, system);
	tune_store_init(&second, path, system);
	assert_int_equal(tune_store_write(&store, "f.json", "one", &err), 0);
	assert_int_equal(tune_store_write(&store, "f.json", "two", &err), 0);
	assert_int_equal(tune_store_write(&second, "f.json", "three", &err), FMHA_EBUSY);
	assert_non_null(strstr(err.msg, "another fmhad, process"));
	/* Once it may, it has to read first what the other one has written. */
	tune_store_deinit(&store);
	for (int i = 0; i < 2; i++)
		assert_int_equal(tune_store_write(&second, "f.json", "three", &err), FMHA_EBUSY);
	assert_true(second.was_anothers && second.fd >= 0);
	database = tune_database_new(&identity);
	tune_store_load(&second, database, &report);
	database = tune_database_free(database);
	assert_int_equal(tune_store_write(&second, "f.json", "new", &err), 0);
	(void)snprintf(path, sizeof(path), "%s/state/tuned/f.json", folder);
	assert_int_equal(stat(path, &st), 0);
	assert_int_equal(st.st_size, 3);
	assert_int_equal(st.st_mode & 0777, 0600);
	assert_int_equal(unlink(path), 0);
	(void)snprintf(path, sizeof(path), "%s/state/tuned/.owner", folder);
	assert_int_equal(unlink(path), 0);
	/* A directory that others may write to is not read. */
	(void)snprintf(path, sizeof(path), "%s/state/tuned", folder);
	assert_int_equal(chmod(path, 0777), 0);
	database = tune_database_new(&identity);
	tune_store_load(&second, database, &report);
	assert_false(report.results_readable);
	assert_non_null(strstr(report.results, "others could write there"));
	tune_database_free(database);
	tune_store_deinit(&store);
	tune_store_deinit(&second);
	assert_int_equal(rmdir(path), 0);
	(void)snprintf(path, sizeof(path), "%s/state", folder);
	assert_int_equal(rmdir(path), 0);
	assert_int_equal(rmdir(folder), 0);
}

/* A file size limit cuts a write as a full disk does, in the middle. */
static void a_write_that_fails_changes_nothing(void **state)
{
	char folder[] = "/tmp/fmhad-tune-XXXXXX", path[PATH_MAX], text[4096], read_back[16] = "";
	struct rlimit before, limit;
	struct tune_store store;
	struct fmha_error err = {0};
	FILE *file;

	(void)state;
	assert_non_null(mkdtemp(folder));
	memset(text, 'x', sizeof(text) - 1);
	text[sizeof(text) - 1] = '\0';
	tune_store_init(&store, folder, "");
	assert_int_equal(tune_store_write(&store, "f.json", "one", &err), 0);
	assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
	limit = (struct rlimit){1024, before.rlim_max};
	(void)signal(SIGXFSZ, SIG_IGN);
	assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
	assert_int_equal(tune_store_write(&store, "f.json", text, &err), FMHA_EIO);
	assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
	assert_non_null(strstr(err.msg, "File too large"));
	(void)snprintf(path, sizeof(path), "%s/f.json", folder);
	file = fopen(path, "re");
	assert_non_null(file);
	assert_int_equal(fread(read_back, 1, sizeof(read_back) - 1, file), 3);
	assert_string_equal(read_back, "one");
	(void)fclose(file);
	assert_int_equal(unlink(path), 0);
	(void)snprintf(path, sizeof(path), "%s/.owner", folder);
	assert_int_equal(unlink(path), 0);
	tune_store_deinit(&store);
	assert_int_equal(rmdir(folder), 0); /* the half written file is gone, too */
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(the_newer_wins_and_the_machines_own),
		cmocka_unit_test(a_stamp_of_the_future_is_past),
		cmocka_unit_test(of_too_many_the_oldest_goes),
		cmocka_unit_test(nonsense_is_refused),
		cmocka_unit_test(reading_is_all_or_nothing),
		cmocka_unit_test(another_environment_is_refused),
		cmocka_unit_test(settings_come_back),
		cmocka_unit_test(older_names_become_the_kernels_own),
		cmocka_unit_test(a_set_that_cannot_be_replaced_stays),
		cmocka_unit_test(files_are_replaced_whole),
		cmocka_unit_test(a_write_that_fails_changes_nothing),
	};

	return cmocka_run_group_tests_name("tune", tests, NULL, NULL);
}
