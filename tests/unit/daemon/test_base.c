/* SPDX-License-Identifier: MIT */
/* Small things of daemon/base and daemon/worker: histogram, accounts, id tables. */
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include <base/account.h>
#include <base/cgroup.h>
#include <base/memfd.h>
#include <base/histogram.h>
#include <base/limits.h>

#include "session/table.h"

/* ---- cgroup ---- */

static void write_text(const char *path, const char *text)
{
	FILE *file = fopen(path, "we");

	assert_non_null(file);
	assert_true(fputs(text, file) >= 0);
	assert_int_equal(fclose(file), 0);
}

static void oom_kills_are_read_where_the_kernel_counts_them(void **state)
{
	char root[] = "/tmp/fmhad-cgroup-XXXXXX", command[64];

	(void)state;
	assert_non_null(mkdtemp(root));
	assert_int_equal(chdir(root), 0);
	assert_int_equal(cgroup_oom_kills("proc", "sys"), 0);
	assert_int_equal(mkdir("proc", 0700), 0);
	assert_int_equal(mkdir("proc/self", 0700), 0);
	write_text("proc/self/cgroup", "1:name=systemd:/old\n0::/system.slice\n");
	assert_int_equal(cgroup_oom_kills("proc", "sys"), 0);
	assert_int_equal(mkdir("sys", 0700), 0);
	assert_int_equal(mkdir("sys/fs", 0700), 0);
	assert_int_equal(mkdir("sys/fs/cgroup", 0700), 0);
	assert_int_equal(mkdir("sys/fs/cgroup/system.slice", 0700), 0);
	write_text("sys/fs/cgroup/system.slice/memory.events",
		   "low 1\nhigh 2\nmax 3\noom 5\noom_kill 4\noom_group_kill 9\n");
	assert_int_equal(cgroup_oom_kills("proc", "sys"), 4);
	assert_int_equal(chdir("/"), 0);
	(void)snprintf(command, sizeof(command), "rm -r %s", root);
	assert_int_equal(system(command), 0);
}

/* ---- histogram ---- */

static void empty_histogram_says_zero(void **state)
{
	static const struct histogram histogram;

	(void)state;
	assert_int_equal(histogram_quantile(&histogram, 500), 0);
	assert_int_equal(histogram_quantile(&histogram, 1000), 0);
}

static void quantiles_are_at_most_an_eighth_too_high(void **state)
{
	static const uint64_t values[] = {1,    7,       8,         9,          15,        16,
					  1000, 1000000, 123456789, 1ull << 31, 1ull << 41};

	(void)state;
	for (size_t i = 0; i < sizeof(values) / sizeof(values[0]); i++) {
		static struct histogram histogram;
		uint64_t p50;

		histogram = (struct histogram){0};
		for (int n = 0; n < 10; n++)
			histogram_add(&histogram, values[i]);
		histogram_add(&histogram, UINT64_MAX); /* so that max does not cut it */
		p50 = histogram_quantile(&histogram, 500);
		assert_true(p50 >= values[i]);
		assert_true(p50 <= values[i] + values[i] / 8);
	}
}

static void quantiles_of_a_ramp(void **state)
{
	static struct histogram histogram;

	(void)state;
	histogram = (struct histogram){0};
	for (uint64_t value = 1; value <= 100000; value++)
		histogram_add(&histogram, value);
	assert_in_range(histogram_quantile(&histogram, 500), 50000, 56250);
	assert_in_range(histogram_quantile(&histogram, 990), 99000, 100000);
	assert_int_equal(histogram_quantile(&histogram, 1000), 100000);
	assert_int_equal(histogram_quantile(&histogram, 1), 103); /* the end of 96..103 */
	assert_int_equal(histogram.n, 100000);
}

/* ---- accounts ---- */

static void accounts_are_found_by_uid_and_end_with_their_last_user(void **state)
{
	struct limits limits = {0};
	struct accounts accounts;
	struct account *first, *second;

	(void)state;
	accounts_init(&accounts, &limits);
	first = account_get(&accounts, 1001);
	second = account_get(&accounts, 1002);
	assert_ptr_not_equal(first, second);
	assert_ptr_equal(account_get(&accounts, 1001), first);
	account_put(first);
	assert_ptr_equal(account_get(&accounts, 1001), first);
	account_put(first);
	account_put(first);
	account_put(second);
	assert_true(list_is_empty(&accounts.list));
	assert_null(account_put(NULL));
}

static void a_charge_respects_the_user_and_everybody(void **state)
{
	struct limits limits = {
		.value = {[LIMIT_MEMORY_BYTES_PER_UID] = 10, [LIMIT_MEMORY_BYTES] = 15}};
	struct accounts accounts;
	struct account *first, *second;
	struct fmha_error err;

	(void)state;
	accounts_init(&accounts, &limits);
	first = account_get(&accounts, 1001);
	second = account_get(&accounts, 1002);
	assert_int_equal(account_charge(first, ACCOUNT_MEMORY, 10, &err), 0);
	assert_int_equal(account_charge(first, ACCOUNT_MEMORY, 1, &err), FMHA_EQUOTA);
	assert_non_null(strstr(err.msg, "more than 10 bytes of memory of one user: "));
	assert_non_null(strstr(err.msg, " (limits.memory_bytes_per_uid)"));
	assert_string_equal(err.field, "size");
	assert_false(account_has_room(second, ACCOUNT_MEMORY, 6));
	assert_int_equal(account_charge(second, ACCOUNT_MEMORY, 6, &err), FMHA_EQUOTA);
	assert_non_null(strstr(err.msg, "more than 15 bytes of memory of all users: "));
	assert_non_null(strstr(err.msg, " (limits.memory_bytes)"));
	assert_int_equal(account_charge(second, ACCOUNT_MEMORY, UINT64_MAX, &err), FMHA_EQUOTA);
	assert_int_equal(account_charge(second, ACCOUNT_MEMORY, 5, &err), 0);
	assert_int_equal(limits.hits[LIMIT_MEMORY_BYTES], 1);
	assert_int_equal(limits.hits[LIMIT_MEMORY_BYTES_PER_UID], 2);
	account_release(first, ACCOUNT_MEMORY, 10);
	account_release(second, ACCOUNT_MEMORY, 5);
	assert_int_equal(accounts.used[ACCOUNT_MEMORY], 0);
	account_put(first);
	account_put(second);
}

static void zeros_become_what_the_machine_offers(void **state)
{
	struct limits limits = {.value = {[LIMIT_RESERVED_FDS] = 64, [LIMIT_EVENTS] = 7}};

	(void)state;
	limits_resolve(&limits, 1000, false);
	assert_int_equal(limits.value[LIMIT_MEMORY_BYTES], 750);
	assert_int_equal(limits.value[LIMIT_MEMORY_BYTES_PER_UID], 500);
	assert_true(limits.value[LIMIT_FDS] >= 16);
	assert_true(limits.value[LIMIT_BUFFERS] > 1000);
	assert_int_equal(limits.value[LIMIT_EVENTS], 7);
	assert_true(limits_host_memory() > 1 << 20);
}

/* A configuration that promises more descriptors than there are is held to what there are. */
static void kernels_keep_their_descriptors(void **state)
{
	struct limits limits = {.value = {[LIMIT_RESERVED_FDS] = 64}}, wide = limits,
		      greedy = limits;
	uint64_t all;

	(void)state;
	limits_resolve(&limits, 1000, true);
	all = limits.value[LIMIT_FDS] + 64 + limits.value[LIMIT_KERNELS] +
	      limits.value[LIMIT_KERNELS_IDLE];
	wide.value[LIMIT_FDS] = 1 << 20;
	limits_resolve(&wide, 1000, true);
	assert_int_equal(wide.value[LIMIT_FDS], limits.value[LIMIT_FDS]);
	greedy.value[LIMIT_KERNELS] = greedy.value[LIMIT_KERNELS_IDLE] = 1 << 16;
	limits_resolve(&greedy, 1000, true);
	assert_true(greedy.value[LIMIT_KERNELS] <= all / 2);
	assert_true(64 + greedy.value[LIMIT_KERNELS] + greedy.value[LIMIT_KERNELS_IDLE] +
			    greedy.value[LIMIT_FDS] <=
		    all);
	wide.value[LIMIT_FDS] = 20;
	limits_resolve(&wide, 1000, true);
	assert_int_equal(wide.value[LIMIT_FDS], 20);
}

static void limits_count_their_hits(void **state)
{
	struct limits limits = {.value = {[LIMIT_CONNECTIONS] = 3}};

	(void)state;
	assert_false(limit_exceeded(&limits, LIMIT_CONNECTIONS, 3));
	assert_int_equal(limits.hits[LIMIT_CONNECTIONS], 0);
	assert_true(limit_exceeded(&limits, LIMIT_CONNECTIONS, 4));
	assert_true(limit_exceeded(&limits, LIMIT_CONNECTIONS, UINT64_MAX));
	assert_int_equal(limits.hits[LIMIT_CONNECTIONS], 2);
}

/* ---- tables ---- */

static void ids_are_never_given_twice(void **state)
{
	struct table table = {0};
	int object;
	uint64_t first = table_add(&table, &object), again;

	(void)state;
	assert_int_not_equal(first, 0);
	assert_ptr_equal(table_get(&table, first), &object);
	assert_ptr_equal(table_remove(&table, first), &object);
	assert_null(table_get(&table, first));
	assert_null(table_remove(&table, first));
	again = table_add(&table, &object);
	assert_int_not_equal(again, first);
	assert_null(table_get(&table, first));
	assert_ptr_equal(table_get(&table, again), &object);
	table_deinit(&table);
}

static void guessed_ids_name_nothing(void **state)
{
	struct table table = {0};
	int object;
	uint64_t id = table_add(&table, &object);

	(void)state;
	assert_null(table_get(&table, 0));
	assert_null(table_get(&table, UINT64_MAX));
	for (uint64_t i = 0; i < 100000; i++)
		if (i != id)
			assert_null(table_get(&table, i));
	for (int bit = 0; bit < 64; bit++)
		assert_null(table_get(&table, id ^ (1ull << bit)));
	table_deinit(&table);
}

static void what_can_still_change_is_not_sealed(void **state)
{
	const char text[] = "code";
	int plain = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING), part, sealed;
	char path[] = "/tmp/fmhad-sealed-XXXXXX";
	int file = mkstemp(path);

	(void)state;
	assert_true(plain >= 0 && file >= 0);
	assert_int_equal(write(plain, text, sizeof(text)), sizeof(text));
	assert_int_equal(write(file, text, sizeof(text)), sizeof(text));
	assert_false(memfd_is_sealed(plain, sizeof(text)));
	assert_false(memfd_is_sealed(file, sizeof(text)));
	assert_false(memfd_is_sealed(-1, 1));
	/* One that may be written to, one that may shrink. */
	assert_int_equal(fcntl(plain, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW), 0);
	assert_false(memfd_is_sealed(plain, sizeof(text)));
	part = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	assert_int_equal(write(part, text, sizeof(text)), sizeof(text));
	assert_int_equal(fcntl(part, F_ADD_SEALS, F_SEAL_WRITE), 0);
	assert_false(memfd_is_sealed(part, sizeof(text)));
	sealed = memfd_file(text, sizeof(text));
	assert_true(memfd_is_sealed(sealed, sizeof(text)));
	assert_false(memfd_is_sealed(sealed, sizeof(text) + 1));
	assert_int_equal(unlink(path), 0);
	assert_int_equal(close(plain) | close(part) | close(sealed) | close(file), 0);
}

#define OBJECTS 100

static uint64_t pages_of_slabs(void)
{
	char line[256];
	uint64_t n = 0;
	FILE *file = fopen("/proc/self/statm", "re");

	assert_non_null(file);
	assert_non_null(fgets(line, sizeof(line), file));
	(void)fclose(file);
	n = strtoull(line, NULL, 10);
	return n;
}

static void slabs_hold_what_was_taken_and_end_one_by_one(void **state)
{
	struct slabs slabs;
	char *objects[OBJECTS];
	const size_t bytes = 18000;
	uint64_t full, spare;

	(void)state;
	slabs_init(&slabs, bytes);
	for (int round = 0; round < 2; round++) {
		for (int i = 0; i < OBJECTS; i++) {
			objects[i] = slabs_take(&slabs);
			assert_non_null(objects[i]);
			assert_int_equal((uintptr_t)objects[i] % 16, 0);
			for (size_t k = 0; k < bytes; k++)
				assert_int_equal(objects[i][k], 0);
			memset(objects[i], i + 1, bytes);
		}
		full = pages_of_slabs();
		for (int i = 0; i < OBJECTS; i += 2) /* none is empty by that */
			slabs_give_back(&slabs, objects[i]);
		for (int i = 1; i < OBJECTS; i += 2) {
			for (size_t k = 0; k < bytes; k++)
				assert_int_equal(objects[i][k], i + 1);
			slabs_give_back(&slabs, objects[i]);
		}
		spare = pages_of_slabs();
		/* All but the last one; ASan keeps what is free. */
#ifndef __SANITIZE_ADDRESS__
		assert_true(full - spare >= (OBJECTS * bytes / SLAB_BYTES - 1) * SLAB_BYTES / 4096);
#else
		(void)full, (void)spare;
#endif
	}
	if (slabs.spare)
		assert_int_equal(munmap(slabs.spare, SLAB_BYTES), 0);
}

static void tables_grow_and_empty(void **state)
{
	enum { N = 1000 };
	static int objects[N];
	struct table table = {0};
	uint64_t ids[N];
	uint32_t n = 0;

	(void)state;
	for (int i = 0; i < N; i++)
		ids[i] = table_add(&table, &objects[i]);
	for (int i = 0; i < N; i += 2)
		assert_ptr_equal(table_remove(&table, ids[i]), &objects[i]);
	for (int i = 1; i < N; i += 2)
		assert_ptr_equal(table_get(&table, ids[i]), &objects[i]);
	assert_int_equal(table.n_used, N / 2);
	for (int i = 0; i < N; i += 2)
		ids[i] = table_add(&table, &objects[i]);
	assert_int_equal(table.n_slots, 1024); /* free slots were used again */
	while (table_pop(&table))
		n++;
	assert_int_equal(n, N);
	assert_null(table_pop(&table));
	table_deinit(&table);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(oom_kills_are_read_where_the_kernel_counts_them),
		cmocka_unit_test(empty_histogram_says_zero),
		cmocka_unit_test(quantiles_are_at_most_an_eighth_too_high),
		cmocka_unit_test(quantiles_of_a_ramp),
		cmocka_unit_test(accounts_are_found_by_uid_and_end_with_their_last_user),
		cmocka_unit_test(a_charge_respects_the_user_and_everybody),
		cmocka_unit_test(zeros_become_what_the_machine_offers),
		cmocka_unit_test(kernels_keep_their_descriptors),
		cmocka_unit_test(limits_count_their_hits),
		cmocka_unit_test(ids_are_never_given_twice),
		cmocka_unit_test(guessed_ids_name_nothing),
		cmocka_unit_test(what_can_still_change_is_not_sealed),
		cmocka_unit_test(slabs_hold_what_was_taken_and_end_one_by_one),
		cmocka_unit_test(tables_grow_and_empty),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
