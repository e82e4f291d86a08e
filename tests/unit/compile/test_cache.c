/* SPDX-License-Identifier: MIT */
/* The code-object cache: what it gives back, and everything it must not give back. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <compile/cache.h>

struct fixture {
	char root[64], dir[96], entry_path[256];
	struct cache *cache;
	struct cache_key key;
	struct cache_entry entry;
};

/* A cache of @dir over the layers, opened. */
static int open_cache(const char *dir, const char *const *layers, size_t n_layers,
		      struct cache **ret_cache, struct fmha_error *err)
{
	const struct cache_config config = {
		.writable = dir, .layers = layers, .n_layers = n_layers};
	int r = cache_new(&config, ret_cache, err);

	return r < 0 ? r : cache_check(*ret_cache, err);
}

static struct cache_status status_of(struct cache *cache)
{
	struct cache_status status;

	cache_get_status(cache, &status);
	return status;
}

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
	if (open_cache(f->dir, NULL, 0, &f->cache, NULL) != 0)
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
	f->entry.uid = 1000;
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
	assert_int_equal(entry->uid, f->entry.uid);
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

/* Whole as its digest says, and made by nobody who means well. */
static void misses_an_entry_whose_texts_do_not_end(void **state)
{
	struct fixture *f = *state;

	memset(f->entry.info.arch, 'x', sizeof(f->entry.info.arch));
	store(f);
	assert_int_equal(load_result(f), CACHE_MISS);
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

/* Whatever is wrong with the directory, the cache works from memory. */
static void goes_on_without(struct fixture *f, const char *dir, const char *reason)
{
	struct cache_entry *entry = NULL;
	struct fmha_error err = {0};
	struct cache *cache = NULL;
	int lock;

	assert_int_equal(open_cache(dir, NULL, 0, &cache, &err), FMHA_EIO);
	assert_non_null(strstr(err.msg, reason));
	assert_int_equal(cache_load(cache, &f->key, &entry), CACHE_MISS);
	assert_true(cache_try_lock(cache, &f->key, &lock, NULL) < 0);
	assert_int_equal(cache_store(cache, &f->key, &f->entry, &err), FMHA_EIO);
	assert_non_null(strstr(err.msg, reason));
	assert_int_equal(cache_load(cache, &f->key, &entry), 0);
	check_same(f, entry);
	(void)cache_entry_free(entry);
	assert_false(status_of(cache).usable);
	assert_non_null(strstr(status_of(cache).reason, reason));
	assert_int_equal(status_of(cache).memory_entries, 1);
	assert_int_equal(status_of(cache).unstored, 1);
	(void)cache_free(cache);
}

static void refuses_a_directory_that_others_can_write(void **state)
{
	struct fixture *f = *state;

	store(f);
	assert_int_equal(chmod(f->dir, 0777), 0);
	goes_on_without(f, f->dir, "others could write");
	assert_int_equal(chmod(f->dir, 0700), 0);
	assert_int_equal(load_result(f), 0);
	if (geteuid() == 0) {
		assert_int_equal(chown(f->dir, 12345, 0), 0);
		goes_on_without(f, f->dir, "owner 12345");
	}
}

static void does_without_a_directory(void **state)
{
	struct fixture *f = *state;
	char path[160];

	goes_on_without(f, "/proc/self/nowhere/cache", "No such file");
	(void)snprintf(path, sizeof(path), "%s/file", f->root);
	spill(path, "x", 1);
	goes_on_without(f, path, "not a directory");
	assert_int_equal(unlink(path), 0);
	assert_int_equal(symlink(f->dir, path), 0);
	goes_on_without(f, path, path);
}

/* What memory kept while the directory was away goes to disk by the next store, and a directory
 * that was removed under us is made again. */
static void comes_back_to_the_directory(void **state)
{
	struct fixture *f = *state;
	struct cache_entry *entry = NULL;
	struct cache_key_part part = {"second", 6};
	struct cache_key second = cache_key_of(&part, 1);
	char aside[160];

	(void)snprintf(aside, sizeof(aside), "%s/aside", f->root);
	assert_int_equal(rmdir(f->dir), 0);
	spill(f->dir, "", 0); /* a file in its place */
	assert_true(cache_store(f->cache, &f->key, &f->entry, NULL) < 0);
	assert_false(status_of(f->cache).usable);
	assert_int_equal(load_result(f), 0);
	assert_int_equal(unlink(f->dir), 0);
	assert_int_equal(cache_store(f->cache, &second, &f->entry, NULL), 0);
	assert_true(status_of(f->cache).usable);
	assert_string_equal(status_of(f->cache).reason, "");
	assert_int_equal(status_of(f->cache).entries, 1);
	assert_int_equal(cache_load(f->cache, &second, &entry), 0);
	(void)cache_entry_free(entry);
	assert_int_equal(cache_store(f->cache, &f->key, &f->entry, NULL), 0);
	assert_int_equal(status_of(f->cache).memory_entries, 0);
}

/* No space, a quota, a read-only disk: by way of a tiny tmpfs, where we may mount one. */
static void delivers_what_a_full_disk_does_not_take(void **state)
{
	struct fixture *f = *state;
	struct cache_key_part part = {"large", 5};
	struct cache_key large = cache_key_of(&part, 1);
	struct cache_entry entry = f->entry, *loaded = NULL;
	struct fmha_error err = {0};
	struct cache *cache = NULL;
	char dir[160];
	int r;

	(void)snprintf(dir, sizeof(dir), "%s/tiny", f->root);
	assert_int_equal(mkdir(dir, 0700), 0);
	if (mount("tmpfs", dir, "tmpfs", 0, "size=64k,mode=0700") < 0) {
		print_message("mount: %s: skipped\n", strerror(errno));
		skip();
	}
	assert_int_equal(open_cache(dir, NULL, 0, &cache, NULL), 0);
	entry.code = calloc(1, 1 << 20);
	entry.code_bytes = 1 << 20;
	assert_int_equal(cache_store(cache, &large, &entry, &err), FMHA_EIO);
	assert_non_null(strstr(err.msg, "No space left"));
	assert_non_null(strstr(status_of(cache).reason, "No space left"));
	assert_int_equal(cache_load(cache, &large, &loaded), 0);
	assert_int_equal(loaded->code_bytes, 1 << 20);
	loaded = cache_entry_free(loaded);
	assert_int_equal(cache_store(cache, &f->key, &f->entry, &err), 0); /* this one fits */
	assert_true(status_of(cache).usable);

	r = mount(NULL, dir, NULL, MS_REMOUNT | MS_RDONLY, "size=64k,mode=0700");
	assert_int_equal(r, 0);
	assert_int_equal(cache_load(cache, &f->key, &loaded), 0); /* can still be read */
	loaded = cache_entry_free(loaded);
	f->entry.log = "another";
	assert_int_equal(cache_store(cache, &large, &f->entry, &err), FMHA_EIO);
	assert_non_null(strstr(status_of(cache).reason, "Read-only file system"));
	assert_int_equal(cache_load(cache, &large, &loaded), 0);
	assert_string_equal(loaded->log, "another");
	loaded = cache_entry_free(loaded);
	free(entry.code);
	(void)cache_free(cache);
	assert_int_equal(umount2(dir, MNT_DETACH), 0);
}

/* An entry of some size, named by @name, asked for by @uid. */
static int store_sized(struct cache *cache, const char *name, size_t size, uint32_t uid)
{
	const struct cache_key_part part = {name, strlen(name)};
	struct cache_key key = cache_key_of(&part, 1);
	struct cache_entry entry = {
		.log = "", .code = calloc(1, size), .code_bytes = size, .uid = uid};
	int r = cache_store(cache, &key, &entry, NULL);

	free(entry.code);
	return r;
}

static bool is_on_disk(const struct fixture *f, const char *name)
{
	const struct cache_key_part part = {name, strlen(name)};
	struct cache_key key = cache_key_of(&part, 1);
	char hex[CACHE_HEX_BYTES], path[256];

	cache_key_hex(&key, hex);
	(void)snprintf(path, sizeof(path), "%s/%s", f->dir, hex);
	return access(path, F_OK) == 0;
}

/* Makes an entry look as if it had not been used for so long. */
static void age(const struct fixture *f, const char *name, int seconds)
{
	const struct cache_key_part part = {name, strlen(name)};
	struct cache_key key = cache_key_of(&part, 1);
	struct timespec times[2] = {{.tv_sec = time(NULL) - seconds},
				    {.tv_sec = time(NULL) - seconds}};
	char hex[CACHE_HEX_BYTES], path[256];

	cache_key_hex(&key, hex);
	(void)snprintf(path, sizeof(path), "%s/%s", f->dir, hex);
	assert_int_equal(utimensat(AT_FDCWD, path, times, 0), 0);
}

static void write_magic(const struct fixture *f, const char *name, const char magic[9])
{
	const struct cache_key_part part = {name, strlen(name)};
	struct cache_key key = cache_key_of(&part, 1);
	char hex[CACHE_HEX_BYTES], path[256];
	int fd;

	cache_key_hex(&key, hex);
	(void)snprintf(path, sizeof(path), "%s/%s", f->dir, hex);
	fd = open(path, O_WRONLY | O_CLOEXEC);
	assert_true(fd >= 0);
	assert_int_equal(write(fd, magic, 8), 8);
	assert_int_equal(close(fd), 0);
}

static struct cache *reopen(struct fixture *f, uint64_t max_bytes, uint64_t max_bytes_per_uid)
{
	const struct cache_config config = {
		.writable = f->dir, .max_bytes = max_bytes, .max_bytes_per_uid = max_bytes_per_uid};

	f->cache = cache_free(f->cache);
	assert_int_equal(cache_new(&config, &f->cache, NULL), 0);
	assert_int_equal(cache_check(f->cache, NULL), 0);
	return f->cache;
}

static void evicts_what_was_not_used_for_longest(void **state)
{
	struct fixture *f = *state;
	struct cache *cache = f->cache;
	struct cache_entry *entry = NULL;
	struct cache_key_part part = {"b", 1};
	struct cache_key b = cache_key_of(&part, 1);

	assert_int_equal(store_sized(cache, "a", 10000, 1), 0);
	assert_int_equal(store_sized(cache, "b", 10000, 2), 0);
	assert_int_equal(store_sized(cache, "c", 10000, 3), 0);
	age(f, "a", 9000);
	age(f, "b", 10000);
	age(f, "c", 8000);
	cache = reopen(f, 35000, 0);
	assert_int_equal(status_of(cache).entries, 3);
	assert_true(status_of(cache).bytes > 30000 && status_of(cache).bytes < 35000);
	assert_int_equal(cache_load(cache, &b, &entry), 0); /* the oldest, and now the newest */
	(void)cache_entry_free(entry);
	assert_int_equal(store_sized(cache, "d", 10000, 4), 0);
	assert_false(is_on_disk(f, "a"));
	assert_true(is_on_disk(f, "b") && is_on_disk(f, "c") && is_on_disk(f, "d"));
	assert_int_equal(status_of(cache).evicted, 1);
	/* The use was written down: it holds after a restart, too. */
	cache = reopen(f, 35000, 0);
	assert_int_equal(store_sized(cache, "e", 10000, 5), 0);
	assert_false(is_on_disk(f, "c"));
	assert_true(is_on_disk(f, "b"));
	/* More than everything is allowed to be: kept in memory, and nothing goes for it. */
	assert_true(store_sized(cache, "f", 40000, 6) < 0);
	assert_true(status_of(cache).usable);
	assert_int_equal(status_of(cache).memory_entries, 1);
	assert_true(is_on_disk(f, "b") && is_on_disk(f, "d") && is_on_disk(f, "e"));
}

static void a_user_evicts_their_own_first(void **state)
{
	struct fixture *f = *state;
	struct cache *cache = reopen(f, 100000, 25000);
	char name[16];

	assert_int_equal(store_sized(cache, "theirs", 10000, 2), 0);
	age(f, "theirs", 100000);
	cache = reopen(f, 100000, 25000);
	for (int i = 0; i < 20; i++) {
		(void)snprintf(name, sizeof(name), "%d", i);
		assert_int_equal(store_sized(cache, name, 10000, 1), 0);
		age(f, name, 100 - i);
		cache = reopen(f, 100000, 25000);
	}
	assert_true(is_on_disk(f, "theirs"));
	assert_true(is_on_disk(f, "19") && is_on_disk(f, "18"));
	assert_false(is_on_disk(f, "17") || is_on_disk(f, "0"));
	assert_int_equal(status_of(cache).entries, 3);
}

/* What another version has left has nobody's name on it that this one can read, until it is built anew. */
static void who_builds_an_older_entry_anew_pays_for_it(void **state)
{
	struct fixture *f = *state;
	struct cache *cache = f->cache;
	char name[16];

	for (int i = 0; i < 10; i++) {
		(void)snprintf(name, sizeof(name), "%d", i);
		assert_int_equal(store_sized(cache, name, 10000, 1), 0);
		write_magic(f, name, "FMHACO3\n");
	}
	cache = reopen(f, 1000000, 25000);
	for (int i = 0; i < 10; i++) {
		(void)snprintf(name, sizeof(name), "%d", i);
		assert_int_equal(store_sized(cache, name, 10000, 1), 0);
	}
	assert_int_equal(store_sized(cache, "more", 10000, 1), 0);
	assert_true(status_of(cache).bytes < 25000);
	assert_true(is_on_disk(f, "more"));
}

/* The totals hold over many stores and removals: the table of entries grows and shrinks. */
static void counts_what_is_there(void **state)
{
	struct fixture *f = *state;
	struct cache *cache = reopen(f, 200 * 1300, 0);
	uint64_t bytes, entries;
	char name[16];

	for (int i = 0; i < 1000; i++) {
		(void)snprintf(name, sizeof(name), "%d", i * 7 % 600);
		assert_int_equal(store_sized(cache, name, 1000, (uint32_t)i % 3), 0);
		assert_true(status_of(cache).bytes <= 200 * 1300);
	}
	bytes = status_of(cache).bytes;
	entries = status_of(cache).entries;
	assert_true(entries > 100);
	cache = reopen(f, 200 * 1300, 0);
	assert_int_equal(status_of(cache).bytes, bytes);
	assert_int_equal(status_of(cache).entries, entries);
}

static void sweeps_what_a_crash_has_left(void **state)
{
	struct fixture *f = *state;
	static const char *const left[] = {".%s.123", "%s.lock", ".%s.124", "%s.lock.mine", "mine"};
	struct timespec old[2] = {{.tv_sec = time(NULL) - 7200}, {.tv_sec = time(NULL) - 7200}};
	char hex[CACHE_HEX_BYTES], name[128], path[5][256];

	cache_key_hex(&f->key, hex);
	for (int i = 0; i < 5; i++) {
		(void)snprintf(name, sizeof(name), left[i], hex);
		(void)snprintf(path[i], sizeof(path[i]), "%s/%s", f->dir, name);
		spill(path[i], "x", 1);
		if (i != 2) /* somebody may be writing this one */
			assert_int_equal(utimensat(AT_FDCWD, path[i], old, 0), 0);
	}
	(void)reopen(f, 0, 0);
	for (int i = 0; i < 5; i++)
		assert_int_equal(access(path[i], F_OK), i < 2 ? -1 : 0);
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
	assert_int_equal(open_cache(writable, layers, 1, &above, &err), 0);
	assert_int_equal(cache_load(above, &f->key, &entry), 0);
	check_same(f, entry);
	entry = cache_entry_free(entry);
	assert_int_equal(cache_load(above, &second, &entry), 0);
	entry = cache_entry_free(entry);
	above = cache_free(above);

	/* Read-only: no writable directory. */
	assert_int_equal(open_cache(NULL, layers, 1, &above, &err), 0);
	assert_int_equal(cache_store(above, &f->key, &f->entry, &err), FMHA_EPERM);
	above = cache_free(above);
}

static int64_t milliseconds(void)
{
	struct timespec ts;

	(void)clock_gettime(CLOCK_MONOTONIC, &ts);
	return (int64_t)ts.tv_sec * 1000 + ts.tv_nsec / 1000000;
}

enum { NODES = 64, KERNELS = 40, CODE_BYTES = 16384 };

static struct cache_key kernel_key(int i)
{
	const struct cache_key_part part = {&i, sizeof(i)};

	return cache_key_of(&part, 1);
}

static void fill_code(uint8_t code[CODE_BYTES], int i)
{
	for (int k = 0; k < CODE_BYTES; k++)
		code[k] = (uint8_t)(i * 7 + k);
}

/* A node's daemon: its own cache over the shared layer. Return: exit status, 0: it got everything whole. */
static int read_as_node(const struct fixture *f, int node)
{
	const char *layers[] = {f->dir};
	const int64_t until = milliseconds() + 60000;
	uint8_t want[CODE_BYTES];
	struct cache *cache;
	char own[128];

	(void)snprintf(own, sizeof(own), "%s/node%d", f->root, node);
	if (open_cache(own, layers, 1, &cache, NULL) != 0)
		return 1;
	for (int i = 0; i < KERNELS; i++) {
		const struct cache_key key = kernel_key((i + node) % KERNELS);
		struct cache_entry *entry;

		while (cache_load(cache, &key, &entry) != 0) {
			if (milliseconds() > until)
				return 2;
			(void)usleep(1000);
		}
		fill_code(want, (i + node) % KERNELS);
		if (entry->code_bytes != CODE_BYTES || memcmp(entry->code, want, CODE_BYTES) != 0)
			return 3;
		(void)cache_entry_free(entry);
	}
	(void)cache_free(cache);
	return 0;
}

static void serves_nodes_while_one_fills_it(void **state)
{
	struct fixture *f = *state;
	uint8_t code[CODE_BYTES];
	pid_t nodes[NODES];
	int status;

	for (int i = 0; i < NODES; i++) {
		nodes[i] = fork();
		assert_true(nodes[i] >= 0);
		if (nodes[i] == 0)
			_exit(read_as_node(f, i));
	}
	f->entry.code = code;
	f->entry.code_bytes = CODE_BYTES;
	for (int i = 0; i < KERNELS; i++) {
		const struct cache_key key = kernel_key(i);

		fill_code(code, i);
		assert_int_equal(cache_store(f->cache, &key, &f->entry, NULL), 0);
	}
	for (int i = 0; i < NODES; i++) {
		assert_int_equal(waitpid(nodes[i], &status, 0), nodes[i]);
		assert_int_equal(status, 0);
	}
	assert_int_equal(status_of(f->cache).entries, KERNELS);
	assert_int_equal(status_of(reopen(f, 0, 0)).entries,
			 KERNELS); /* nobody adds or removes one */
}

/* Stores the entry, and makes a pack of it. */
static void ship(struct fixture *f, char pack[128])
{
	store(f);
	(void)snprintf(pack, 128, "%s/shipped.pack", f->root);
	assert_int_equal(cache_pack(f->cache, pack, NULL), 1);
}

static void never_trusts_a_damaged_pack(void **state)
{
	struct fixture *f = *state;
	char pack[128];
	const char *layers[] = {pack};
	size_t size;

	ship(f, pack);
	char *data = slurp(pack, &size);
	for (size_t byte = 0; byte < size; byte++) {
		struct cache_entry *entry = NULL;
		struct cache *cache = NULL;

		data[byte] ^= 0x40;
		spill(pack, data, size);
		data[byte] ^= 0x40;
		assert_int_equal(open_cache(NULL, layers, 1, &cache, NULL), 0);
		/* Left out as a whole, or this entry is. */
		assert_int_equal(cache_load(cache, &f->key, &entry), CACHE_MISS);
		(void)cache_free(cache);
	}
	free(data);
}

/* An administrator's `cp` over a pack that is in use: entries are missing, nobody dies. */
static void outlives_a_pack_cut_in_place(void **state)
{
	struct fixture *f = *state;
	struct cache_entry *entry = NULL;
	struct cache *cache = NULL;
	char pack[128];
	const char *layers[] = {pack};
	size_t size;

	ship(f, pack);
	free(slurp(pack, &size));
	assert_int_equal(open_cache(NULL, layers, 1, &cache, NULL), 0);
	assert_int_equal(cache_load(cache, &f->key, &entry), 0);
	(void)cache_entry_free(entry);
	while (size > 0) {
		size = size * 3 / 4;
		assert_int_equal(truncate(pack, (off_t)size), 0);
		assert_int_equal(cache_load(cache, &f->key, &entry), CACHE_MISS);
	}
	(void)cache_free(cache);
}

static int wait_for_lock(struct fixture *f)
{
	int lock = -1, r;

	while ((r = cache_try_lock(f->cache, &f->key, &lock, NULL)) == CACHE_BUSY)
		(void)usleep(1000);
	return r < 0 ? r : lock;
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
		(void)cache_try_lock(f->cache, &f->key, &lock, NULL);
		(void)!write(ready[1], "x", 1);
		(void)pause();
		_exit(0);
	}
	assert_int_equal(read(ready[0], &byte, 1), 1);
	assert_int_equal(cache_try_lock(f->cache, &f->key, &lock, NULL), CACHE_BUSY);
	assert_int_equal(kill(pid, SIGKILL), 0);
	start = milliseconds();
	lock = wait_for_lock(f);
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
			int lock = wait_for_lock(f);
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
		CACHE_TEST(misses_an_entry_whose_texts_do_not_end),
		CACHE_TEST(misses_an_entry_with_any_bit_flipped),
		CACHE_TEST(misses_an_entry_under_another_key),
		CACHE_TEST(misses_what_is_no_plain_private_file),
		CACHE_TEST(refuses_a_directory_that_others_can_write),
		CACHE_TEST(does_without_a_directory),
		CACHE_TEST(comes_back_to_the_directory),
		CACHE_TEST(delivers_what_a_full_disk_does_not_take),
		CACHE_TEST(evicts_what_was_not_used_for_longest),
		CACHE_TEST(a_user_evicts_their_own_first),
		CACHE_TEST(who_builds_an_older_entry_anew_pays_for_it),
		CACHE_TEST(counts_what_is_there),
		CACHE_TEST(sweeps_what_a_crash_has_left),
		CACHE_TEST(reads_layers_and_packs),
		CACHE_TEST(serves_nodes_while_one_fills_it),
		CACHE_TEST(never_trusts_a_damaged_pack),
		CACHE_TEST(outlives_a_pack_cut_in_place),
		CACHE_TEST(lock_of_a_dead_holder_is_free),
		CACHE_TEST(lock_excludes_other_processes),
		cmocka_unit_test(keys_depend_on_where_parts_end),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
