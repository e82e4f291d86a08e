/* SPDX-License-Identifier: MIT */
/* The code-object cache: what it gives back, and everything it must not give back. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "cache.h"

struct fixture {
	char root[64], dir[96], entry_path[256];
	struct cache *cache;
	struct cache_key key;
	struct cache_entry entry;
};

static int setup(void **state)
{
	struct fixture *f = calloc(1, sizeof(*f));
	struct cache_key_part part = {"key", 3};
	char hex[CACHE_HEX_BYTES];

	/* In memory where that is possible: damaging a file thousands of times is slow on a disk.
	 */
	strcpy(f->root, access("/dev/shm", W_OK) == 0 ? "/dev/shm/fmhad-cache-XXXXXX"
						      : "/tmp/fmhad-cache-XXXXXX");
	if (!mkdtemp(f->root))
		return -1;
	(void)snprintf(f->dir, sizeof(f->dir), "%s/cache", f->root);
	if (cache_new(f->dir, NULL, 0, &f->cache, NULL) != 0)
		return -1;
	f->key = cache_key_of(&part, 1);
	cache_key_hex(&f->key, hex);
	(void)snprintf(f->entry_path, sizeof(f->entry_path), "%s/%s", f->dir, hex);
	strcpy(f->entry.info.kernel, "fwd_test");
	strcpy(f->entry.info.arch, "gfx942");
	strcpy(f->entry.info.compiler, "clang 19");
	f->entry.info.registers = 128;
	f->entry.info.compile_ms = 17;
	f->entry.log = "a remark";
	f->entry.code = "code object";
	f->entry.code_bytes = 11;
	*state = f;
	return 0;
}

static int teardown(void **state)
{
	struct fixture *f = *state;
	char command[128];

	(void)cache_free(f->cache);
	(void)snprintf(command, sizeof(command), "rm -rf '%s'", f->root);
	if (system(command) != 0)
		return -1;
	free(f);
	return 0;
}

static void store(struct fixture *f)
{
	struct fmha_error err = {0};

	assert_int_equal(cache_store(f->cache, &f->key, &f->entry, &err), 0);
}

static int load_result(struct fixture *f)
{
	struct cache_entry *entry = NULL;
	int r = cache_load(f->cache, &f->key, &entry);

	(void)cache_entry_free(entry);
	return r;
}

static void check_same(const struct fixture *f, const struct cache_entry *entry)
{
	assert_memory_equal(&entry->info, &f->entry.info, sizeof(entry->info));
	assert_string_equal(entry->log, f->entry.log);
	assert_int_equal(entry->code_bytes, f->entry.code_bytes);
	assert_memory_equal(entry->code, f->entry.code, entry->code_bytes);
}

static void loads_what_was_stored(void **state)
{
	struct fixture *f = *state;
	struct cache_entry *entry = NULL;
	struct stat st;

	assert_int_equal(load_result(f), CACHE_MISS);
	store(f);
	assert_int_equal(cache_load(f->cache, &f->key, &entry), 0);
	check_same(f, entry);
	(void)cache_entry_free(entry);
	assert_int_equal(stat(f->entry_path, &st), 0);
	assert_int_equal(st.st_mode & 07777, 0600);
	assert_int_equal(stat(f->dir, &st), 0);
	assert_int_equal(st.st_mode & 07777, 0700);
}

static char *slurp(const char *path, size_t *ret_size)
{
	FILE *file = fopen(path, "r");
	char *data = malloc(1 << 16);

	assert_non_null(file);
	*ret_size = fread(data, 1, 1 << 16, file);
	(void)fclose(file);
	return data;
}

static void spill(const char *path, const char *data, size_t size)
{
	FILE *file = fopen(path, "w");

	assert_non_null(file);
	assert_int_equal(fwrite(data, 1, size, file), size);
	(void)fclose(file);
}

static void misses_a_truncated_entry_at_every_length(void **state)
{
	struct fixture *f = *state;
	size_t size;

	store(f);
	char *data = slurp(f->entry_path, &size);
	for (size_t n = 0; n < size; n++) {
		spill(f->entry_path, data, n);
		assert_int_equal(load_result(f), CACHE_MISS);
	}
	spill(f->entry_path, data, size);
	assert_int_equal(load_result(f), 0);
	free(data);
}

static void misses_an_entry_with_any_bit_flipped(void **state)
{
	struct fixture *f = *state;
	size_t size;

	store(f);
	char *data = slurp(f->entry_path, &size);
	for (size_t bit = 0; bit < 8 * size; bit++) {
		data[bit / 8] ^= (char)(1 << bit % 8);
		spill(f->entry_path, data, size);
		if (load_result(f) != CACHE_MISS)
			fail_msg("bit %zu of %zu flipped: still a hit", bit, 8 * size);
		data[bit / 8] ^= (char)(1 << bit % 8);
	}
	free(data);
}

static void misses_an_entry_under_another_key(void **state)
{
	struct fixture *f = *state;
	struct cache_key_part part = {"other", 5};
	struct cache_key other = cache_key_of(&part, 1);
	struct cache_entry *entry = NULL;
	char hex[CACHE_HEX_BYTES], path[256];

	store(f);
	cache_key_hex(&other, hex);
	(void)snprintf(path, sizeof(path), "%s/%s", f->dir, hex);
	assert_int_equal(rename(f->entry_path, path), 0);
	assert_int_equal(cache_load(f->cache, &other, &entry), CACHE_MISS);
}

static void misses_what_is_no_plain_private_file(void **state)
{
	struct fixture *f = *state;
	char aside[300];

	store(f);
	(void)snprintf(aside, sizeof(aside), "%s/aside", f->root);
	assert_int_equal(chmod(f->entry_path, 0666), 0);
	assert_int_equal(load_result(f), CACHE_MISS);
	assert_int_equal(chmod(f->entry_path, 0600), 0);
	assert_int_equal(load_result(f), 0);
	assert_int_equal(link(f->entry_path, aside), 0);
	assert_int_equal(load_result(f), CACHE_MISS);
	assert_int_equal(unlink(f->entry_path), 0);
	assert_int_equal(symlink(aside, f->entry_path), 0);
	assert_int_equal(load_result(f), CACHE_MISS);
	assert_int_equal(unlink(f->entry_path), 0);
	assert_int_equal(mkfifo(f->entry_path, 0600), 0);
	assert_int_equal(load_result(f), CACHE_MISS);
	assert_int_equal(unlink(f->entry_path), 0);
	assert_int_equal(mkdir(f->entry_path, 0700), 0);
	assert_int_equal(load_result(f), CACHE_MISS);
}

static void refuses_a_directory_that_others_can_write(void **state)
{
	struct fixture *f = *state;
	struct cache *cache = NULL;
	struct fmha_error err = {0};

	assert_int_equal(chmod(f->dir, 0777), 0);
	assert_int_equal(cache_new(f->dir, NULL, 0, &cache, &err), FMHA_EPERM);
	assert_non_null(strstr(err.msg, "others could write"));
}

static void reads_layers_and_packs(void **state)
{
	struct fixture *f = *state;
	struct cache_key_part part = {"second", 6};
	struct cache_key second = cache_key_of(&part, 1);
	struct cache *above = NULL;
	struct cache_entry *entry = NULL;
	struct fmha_error err = {0};
	char pack[128], writable[128];
	const char *layers[] = {pack};

	store(f);
	assert_int_equal(cache_store(f->cache, &second, &f->entry, &err), 0);
	(void)snprintf(pack, sizeof(pack), "%s/shipped.pack", f->root);
	(void)snprintf(writable, sizeof(writable), "%s/writable", f->root);
	assert_int_equal(cache_pack(f->cache, pack, &err), 2);
	assert_int_equal(cache_new(writable, layers, 1, &above, &err), 0);
	assert_int_equal(cache_load(above, &f->key, &entry), 0);
	check_same(f, entry);
	entry = cache_entry_free(entry);
	assert_int_equal(cache_load(above, &second, &entry), 0);
	entry = cache_entry_free(entry);
	above = cache_free(above);

	/* Read-only: no writable directory. */
	assert_int_equal(cache_new(NULL, layers, 1, &above, &err), 0);
	assert_int_equal(cache_store(above, &f->key, &f->entry, &err), FMHA_EPERM);
	above = cache_free(above);
}

static void never_trusts_a_damaged_pack(void **state)
{
	struct fixture *f = *state;
	char pack[128];
	const char *layers[] = {pack};
	size_t size;

	store(f);
	(void)snprintf(pack, sizeof(pack), "%s/shipped.pack", f->root);
	assert_int_equal(cache_pack(f->cache, pack, NULL), 1);
	char *data = slurp(pack, &size);
	for (size_t byte = 0; byte < size; byte++) {
		struct cache_entry *entry = NULL;
		struct cache *cache = NULL;

		data[byte] ^= 0x40;
		spill(pack, data, size);
		data[byte] ^= 0x40;
		if (cache_new(NULL, layers, 1, &cache, NULL) != 0)
			continue; /* refused as a whole */
		assert_int_equal(cache_load(cache, &f->key, &entry), CACHE_MISS);
		(void)cache_free(cache);
	}
	free(data);
}

static int64_t milliseconds(void)
{
	struct timespec ts;

	(void)clock_gettime(CLOCK_MONOTONIC, &ts);
	return (int64_t)ts.tv_sec * 1000 + ts.tv_nsec / 1000000;
}

/* A child takes the lock and dies; the parent, which waits for it, gets it at once. */
static void lock_of_a_dead_holder_is_free(void **state)
{
	struct fixture *f = *state;
	int ready[2], lock;
	int64_t start;
	char byte;
	pid_t pid;

	assert_int_equal(pipe(ready), 0);
	pid = fork();
	if (pid == 0) {
		(void)cache_lock(f->cache, &f->key, NULL);
		(void)!write(ready[1], "x", 1);
		(void)pause();
		_exit(0);
	}
	assert_int_equal(read(ready[0], &byte, 1), 1);
	assert_int_equal(kill(pid, SIGKILL), 0);
	start = milliseconds();
	lock = cache_lock(f->cache, &f->key, NULL);
	assert_true(lock >= 0);
	assert_true(milliseconds() - start < 1000);
	cache_unlock(f->cache, &f->key, lock);
	assert_int_equal(waitpid(pid, NULL, 0), pid);
	(void)close(ready[0]);
	(void)close(ready[1]);
}

/* Eight processes add one to a counter file, 50 times each, under the lock. */
static void lock_excludes_other_processes(void **state)
{
	struct fixture *f = *state;
	char path[128], text[16] = {0};
	size_t size;

	(void)snprintf(path, sizeof(path), "%s/counter", f->root);
	spill(path, "0", 1);
	for (int i = 0; i < 8; i++) {
		if (fork() != 0)
			continue;
		for (int k = 0; k < 50; k++) {
			int lock = cache_lock(f->cache, &f->key, NULL);
			FILE *file = fopen(path, "r+");
			int value = 0;

			if (lock < 0 || !file || fscanf(file, "%d", &value) != 1)
				_exit(1);
			rewind(file);
			(void)fprintf(file, "%d", value + 1);
			(void)fclose(file);
			cache_unlock(f->cache, &f->key, lock);
		}
		_exit(0);
	}
	for (int i = 0; i < 8; i++) {
		int status = -1;

		(void)wait(&status);
		assert_int_equal(status, 0);
	}
	char *data = slurp(path, &size);
	memcpy(text, data, size < 15 ? size : 15);
	assert_string_equal(text, "400");
	free(data);
}

static void keys_depend_on_where_parts_end(void **state)
{
	struct cache_key_part ab_c[] = {{"ab", 2}, {"c", 1}}, a_bc[] = {{"a", 1}, {"bc", 2}};
	struct cache_key one = cache_key_of(ab_c, 2), other = cache_key_of(a_bc, 2);

	(void)state;
	assert_memory_not_equal(one.bytes, other.bytes, CACHE_KEY_BYTES);
}

int main(void)
{
#define CACHE_TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
	const struct CMUnitTest tests[] = {
		CACHE_TEST(loads_what_was_stored),
		CACHE_TEST(misses_a_truncated_entry_at_every_length),
		CACHE_TEST(misses_an_entry_with_any_bit_flipped),
		CACHE_TEST(misses_an_entry_under_another_key),
		CACHE_TEST(misses_what_is_no_plain_private_file),
		CACHE_TEST(refuses_a_directory_that_others_can_write),
		CACHE_TEST(reads_layers_and_packs),
		CACHE_TEST(never_trusts_a_damaged_pack),
		CACHE_TEST(lock_of_a_dead_holder_is_free),
		CACHE_TEST(lock_excludes_other_processes),
		cmocka_unit_test(keys_depend_on_where_parts_end),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
