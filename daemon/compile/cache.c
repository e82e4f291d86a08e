/* SPDX-License-Identifier: MIT */
#include <compile/cache.h>

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#include <files/files.h>
#include <proto/error.h>

#include "cleanup.h"
#include "directory.h"
#include "now.h"
#include "pack.h"

/* ---- recent ---- */

/*
 * Entries that the disk did not take, so that a machine without a usable cache does not
 * build one kernel twice in a row. Bounded; what was used last stays.
 */

struct recent_entry;

struct recent {
	struct recent_entry *first; /* used last */
	uint64_t bytes, max_bytes;
	size_t n;
};

struct recent_entry {
	struct recent_entry *next;
	struct cache_key key;
	struct cache_entry *entry;
};

static uint64_t size_of(const struct cache_entry *entry)
{
	return sizeof(struct recent_entry) + sizeof(*entry) + entry->code_bytes +
	       (entry->log ? strlen(entry->log) + 1 : 0);
}

static struct cache_entry *copy_entry(const struct cache_entry *entry)
{
	_cleanup_(cache_entry_freep) struct cache_entry *copy = malloc(sizeof(*copy));
	struct cache_entry *given;

	if (!copy)
		return NULL;
	*copy = *entry;
	copy->log = strdup(entry->log ? entry->log : "");
	copy->code = malloc(entry->code_bytes ? entry->code_bytes : 1);
	if (!copy->log || !copy->code)
		return NULL;
	memcpy(copy->code, entry->code, entry->code_bytes);
	given = copy;
	copy = NULL;
	return given;
}

static void recent_drop(struct recent *recent, struct recent_entry **at)
{
	struct recent_entry *item = *at;

	*at = item->next;
	recent->n--;
	recent->bytes -= size_of(item->entry);
	(void)cache_entry_free(item->entry);
	free(item);
}

static void recent_deinit(struct recent *recent)
{
	while (recent->first)
		recent_drop(recent, &recent->first);
}

static struct recent_entry **recent_find_at(struct recent *recent, const struct cache_key *key)
{
	struct recent_entry **at = &recent->first;

	while (*at && memcmp(&(*at)->key, key, sizeof(*key)) != 0)
		at = &(*at)->next;
	return at;
}

static void recent_remove(struct recent *recent, const struct cache_key *key)
{
	struct recent_entry **at = recent_find_at(recent, key);

	if (*at)
		recent_drop(recent, at);
}

static void drop_last(struct recent *recent)
{
	struct recent_entry **at = &recent->first;

	while ((*at)->next)
		at = &(*at)->next;
	recent_drop(recent, at);
}

/* Keeps a copy, if there is memory for it. */
static void recent_put(struct recent *recent, const struct cache_key *key,
		       const struct cache_entry *entry)
{
	uint64_t bytes = size_of(entry);
	struct recent_entry *item;

	recent_remove(recent, key);
	if (bytes > recent->max_bytes)
		return;
	while (recent->bytes + bytes > recent->max_bytes)
		drop_last(recent);
	item = malloc(sizeof(*item));
	if (!item)
		return;
	*item = (struct recent_entry){.key = *key, .entry = copy_entry(entry)};
	if (!item->entry) {
		free(item);
		return;
	}
	item->next = recent->first;
	recent->first = item;
	recent->n++;
	recent->bytes += size_of(item->entry);
}

/* Return: 0 and an entry (given), or CACHE_MISS. */
static int recent_load(struct recent *recent, const struct cache_key *key,
		       struct cache_entry **ret_entry)
{
	struct recent_entry **at = recent_find_at(recent, key), *item = *at;

	if (!item)
		return CACHE_MISS;
	*at = item->next;
	item->next = recent->first;
	recent->first = item;
	*ret_entry = copy_entry(item->entry);
	return *ret_entry ? 0 : CACHE_MISS;
}

#define RETRY_MS             60000
#define DEFAULT_MEMORY_BYTES (64u << 20)

struct layer {
	char *path;
	int dir; /* a directory, or -1 */
	struct pack pack;
};

struct cache {
	char *writable; /* NULL: none */
	size_t n_layers;
	struct layer layers[CACHE_MAX_LAYERS];
	/* Held while something is opened, which may take seconds; taken before @lock. The layers
	 * do not change once @status.opened is set. */
	pthread_mutex_t opening;
	pthread_mutex_t lock; /* of what follows; never held over work on the disk */
	int dir;              /* the writable directory; -1: not open */
	int64_t retry_ms;     /* of CLOCK_MONOTONIC: when to try again what failed */
	struct ledger ledger;
	struct recent recent;
	struct cache_status status;
};

/* ---- making and opening ---- */

int cache_new(const struct cache_config *config, struct cache **ret_cache, struct fmha_error *err)
{
	_cleanup_(cache_freep) struct cache *cache = NULL;
	uint64_t memory = config->memory_bytes ? config->memory_bytes : DEFAULT_MEMORY_BYTES;

	if (config->n_layers > CACHE_MAX_LAYERS)
		return fmha_error_set(err, FMHA_EINVAL, "cache: %zu layers, at most %d",
				      config->n_layers, CACHE_MAX_LAYERS);
	cache = calloc(1, sizeof(*cache));
	if (!cache)
		return fmha_error_set(err, FMHA_ENOMEM, "cache: out of memory");
	cache->dir = -1;
	(void)pthread_mutex_init(&cache->opening, NULL);
	(void)pthread_mutex_init(&cache->lock, NULL);
	ledger_init(&cache->ledger, config->max_bytes, config->max_bytes_per_uid);
	cache->recent.max_bytes = memory;
	if (config->writable && !(cache->writable = strdup(config->writable)))
		return fmha_error_set(err, FMHA_ENOMEM, "cache: out of memory");
	for (size_t i = 0; i < config->n_layers; i++, cache->n_layers++) {
		cache->layers[i] = (struct layer){.path = strdup(config->layers[i]), .dir = -1};
		if (!cache->layers[i].path)
			return fmha_error_set(err, FMHA_ENOMEM, "cache: out of memory");
	}
	*ret_cache = cache;
	cache = NULL;
	return 0;
}

struct cache *cache_free(struct cache *cache)
{
	if (!cache)
		return NULL;
	for (size_t i = 0; i < cache->n_layers; i++) {
		pack_close(&cache->layers[i].pack);
		closep(&cache->layers[i].dir);
		free(cache->layers[i].path);
	}
	closep(&cache->dir);
	ledger_deinit(&cache->ledger);
	recent_deinit(&cache->recent);
	(void)pthread_mutex_destroy(&cache->opening);
	(void)pthread_mutex_destroy(&cache->lock);
	free(cache->writable);
	free(cache);
	return NULL;
}

static int layer_open(struct layer *layer, struct fmha_error *err)
{
	_cleanup_(closep) int fd = directory_open(layer->path, false, err);
	struct stat st;

	if (fd < 0)
		return fd;
	if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode))
		return pack_open(&fd, layer->path, st.st_size, &layer->pack, err);
	if (!S_ISDIR(st.st_mode))
		return fmha_error_set(err, FMHA_EINVAL, "cache %s: not a directory", layer->path);
	layer->dir = fd;
	fd = -1;
	return 0;
}

static bool enter_row(void *owner, const struct cache_key *key, const struct directory_file *file,
		      uint32_t uid)
{
	const struct ledger_row row = {*key, file->bytes, file->used_s, uid};

	return ledger_put(owner, &row);
}

/* How the writable directory stands: @err NULL: well. */
static void set_state(struct cache *cache, const struct fmha_error *err)
{
	cache->status.usable = !err;
	cache->retry_ms = now_ms() + RETRY_MS;
	(void)snprintf(cache->status.reason, sizeof(cache->status.reason), "%.199s",
		       err ? err->msg : "");
}

/* Takes over what was opened, or why nothing was. */
static void set_directory(struct cache *cache, int dir, struct ledger *ledger,
			  const struct fmha_error *err)
{
	(void)pthread_mutex_lock(&cache->lock);
	if (dir >= 0) {
		closep(&cache->dir);
		cache->dir = dir;
		ledger_deinit(&cache->ledger);
		cache->ledger = *ledger;
	}
	set_state(cache, dir < 0 ? err : NULL);
	(void)pthread_mutex_unlock(&cache->lock);
}

static void open_directory(struct cache *cache)
{
	struct fmha_error err = {0};
	struct ledger ledger;
	int dir = directory_open(cache->writable, true, &err);

	ledger_init(&ledger, cache->ledger.max_bytes, cache->ledger.max_bytes_per_uid);
	if (dir >= 0 && directory_scan(dir, enter_row, &ledger, &err) < 0) {
		(void)close(dir);
		dir = -1;
	}
	if (dir < 0)
		ledger_deinit(&ledger);
	set_directory(cache, dir, &ledger, &err);
}

/* A layer that cannot be read is left out, and said once. */
static void open_layers(struct cache *cache)
{
	struct fmha_error err = {0};

	for (size_t i = 0; i < cache->n_layers; i++)
		(void)layer_open(&cache->layers[i], &err);
	(void)pthread_mutex_lock(&cache->lock);
	cache->status.opened = true;
	(void)snprintf(cache->status.layer, sizeof(cache->status.layer), "%.199s", err.msg);
	(void)pthread_mutex_unlock(&cache->lock);
}

/* A descriptor of the writable directory, given, which stays right while the cache is opened anew;
 * -1: there is none. */
static int get_directory(struct cache *cache)
{
	int dir;

	(void)pthread_mutex_lock(&cache->lock);
	dir = cache->dir < 0 ? -1 : fcntl(cache->dir, F_DUPFD_CLOEXEC, 3);
	(void)pthread_mutex_unlock(&cache->lock);
	return dir;
}

/* Whether there is something to open: never tried, or @now or tried long enough ago. A directory
 * that was removed under us is made again. */
static bool wants_opening(struct cache *cache, bool now)
{
	_cleanup_(closep) int dir = get_directory(cache);
	struct stat st;
	bool gone = dir < 0 || (fstat(dir, &st) == 0 && st.st_nlink == 0);
	bool opened, due;

	(void)pthread_mutex_lock(&cache->lock);
	opened = cache->status.opened;
	due = now || now_ms() >= cache->retry_ms;
	(void)pthread_mutex_unlock(&cache->lock);
	return !opened || (cache->writable && gone && due);
}

static void ensure_open(struct cache *cache, bool now)
{
	bool opened;

	if (!wants_opening(cache, now))
		return;
	(void)pthread_mutex_lock(&cache->opening);
	if (wants_opening(cache, now)) { /* nobody else has, meanwhile */
		(void)pthread_mutex_lock(&cache->lock);
		opened = cache->status.opened;
		(void)pthread_mutex_unlock(&cache->lock);
		if (cache->writable)
			open_directory(cache);
		if (!opened)
			open_layers(cache);
	}
	(void)pthread_mutex_unlock(&cache->opening);
}

/* Says why there is no directory. */
static int no_directory(struct cache *cache, struct fmha_error *err)
{
	(void)pthread_mutex_lock(&cache->lock);
	(void)fmha_error_set(err, FMHA_EIO, "%s",
			     cache->status.usable ? "cache: no file descriptor left"
						  : cache->status.reason);
	(void)pthread_mutex_unlock(&cache->lock);
	return FMHA_EIO;
}

int cache_check(struct cache *cache, struct fmha_error *err)
{
	_cleanup_(closep) int dir = -1;

	ensure_open(cache, true);
	dir = get_directory(cache);
	return cache->writable && dir < 0 ? no_directory(cache, err) : 0;
}

void cache_get_status(struct cache *cache, struct cache_status *ret_status)
{
	(void)pthread_mutex_lock(&cache->lock);
	*ret_status = cache->status;
	ret_status->bytes = cache->ledger.bytes;
	ret_status->entries = cache->ledger.n;
	ret_status->memory_bytes = cache->recent.bytes;
	ret_status->memory_entries = cache->recent.n;
	(void)pthread_mutex_unlock(&cache->lock);
}

/* ---- loading ---- */

/* @file: of the entry as it was found. */
static void note_use(struct cache *cache, int dir, const struct cache_key *key,
		     const struct directory_file *file, uint32_t uid)
{
	const struct ledger_row row = {*key, file->bytes, (int64_t)time(NULL), uid};

	directory_touch(dir, key, file);
	(void)pthread_mutex_lock(&cache->lock);
	(void)ledger_put(&cache->ledger, &row);
	(void)pthread_mutex_unlock(&cache->lock);
}

static int load_writable(struct cache *cache, const struct cache_key *key,
			 struct cache_entry **ret_entry)
{
	_cleanup_(closep) int dir = get_directory(cache);
	struct directory_file file;

	if (dir < 0 || directory_load(dir, key, ret_entry, &file) != 0)
		return CACHE_MISS;
	note_use(cache, dir, key, &file, (*ret_entry)->uid);
	return 0;
}

static int load_memory(struct cache *cache, const struct cache_key *key,
		       struct cache_entry **ret_entry)
{
	bool again;
	int r;

	(void)pthread_mutex_lock(&cache->lock);
	r = recent_load(&cache->recent, key, ret_entry);
	again = cache->writable && now_ms() >= cache->retry_ms;
	(void)pthread_mutex_unlock(&cache->lock);
	if (r == 0 && again)
		(void)cache_store(cache, key, *ret_entry, NULL); /* the disk may take it by now */
	return r;
}

int cache_load(struct cache *cache, const struct cache_key *key, struct cache_entry **ret_entry)
{
	ensure_open(cache, false);
	if (load_writable(cache, key, ret_entry) == 0)
		return 0;
	for (size_t i = 0; i < cache->n_layers; i++) {
		const struct layer *layer = &cache->layers[i];

		if (layer->pack.index && pack_load(&layer->pack, key, ret_entry) == 0)
			return 0;
		if (layer->dir >= 0 && directory_load(layer->dir, key, ret_entry, NULL) == 0)
			return 0;
	}
	return load_memory(cache, key, ret_entry);
}

/* ---- storing ---- */

/* Enters the entry before it is written, so that no other store takes the same room, and removes
 * what has to go for it. Return: false: it is larger than the limits. */
static bool make_room(struct cache *cache, int dir, const struct ledger_row *row)
{
	_cleanup_(freep) struct cache_key *victims = NULL;
	size_t n = 0;
	bool fits;

	(void)pthread_mutex_lock(&cache->lock);
	fits = ledger_admits(&cache->ledger, row->bytes);
	if (fits) {
		n = ledger_make_room(&cache->ledger, row->uid, row->bytes, &victims);
		(void)ledger_put(&cache->ledger, row);
	}
	cache->status.evicted += n;
	(void)pthread_mutex_unlock(&cache->lock);
	for (size_t i = 0; i < n; i++)
		directory_remove(dir, &victims[i]);
	return fits;
}

static int store_on_disk(struct cache *cache, const struct cache_key *key,
			 const struct cache_entry *entry, struct fmha_error *err)
{
	_cleanup_(freep) void *data = NULL;
	_cleanup_(closep) int dir = -1;
	struct ledger_row row = {.key = *key, .used_s = LEDGER_NEVER, .uid = entry->uid};
	struct fmha_error failure = {0};
	size_t size;
	int r;

	data = entry_print(key, entry, &size);
	if (!data)
		return fmha_error_set(err, FMHA_ENOMEM, "cache: out of memory");
	ensure_open(cache, true);
	dir = get_directory(cache);
	if (dir < 0)
		return no_directory(cache, err);
	row.bytes = size;
	if (size > CACHE_MAX_ENTRY_BYTES || !make_room(cache, dir, &row))
		return fmha_error_set(err, FMHA_EIO, "cache: %s has %zu bytes, more than is kept",
				      entry->info.kernel, size);
	r = directory_publish(dir, key, data, size, &failure);
	row.used_s = (int64_t)time(NULL);
	(void)pthread_mutex_lock(&cache->lock);
	if (r == 0)
		(void)ledger_put(&cache->ledger, &row);
	else
		ledger_remove(&cache->ledger, key);
	set_state(cache, r < 0 ? &failure : NULL);
	(void)pthread_mutex_unlock(&cache->lock);
	return r < 0 ? fmha_error_set(err, r, "%s", failure.msg) : 0;
}

int cache_store(struct cache *cache, const struct cache_key *key, const struct cache_entry *entry,
		struct fmha_error *err)
{
	int r = cache->writable ? store_on_disk(cache, key, entry, err)
				: fmha_error_set(err, FMHA_EPERM, "cache: read-only");

	(void)pthread_mutex_lock(&cache->lock);
	if (r == 0) {
		recent_remove(&cache->recent, key);
	} else {
		cache->status.unstored++;
		recent_put(&cache->recent, key, entry);
	}
	(void)pthread_mutex_unlock(&cache->lock);
	return r;
}

/* ---- locks ---- */

int cache_try_lock(struct cache *cache, const struct cache_key *key, int *ret_lock,
		   struct fmha_error *err)
{
	_cleanup_(closep) int dir = -1;

	ensure_open(cache, false);
	dir = get_directory(cache);
	if (dir < 0)
		return fmha_error_set(err, FMHA_EPERM, "cache: no directory to lock in");
	return directory_try_lock(dir, key, ret_lock, err);
}

void cache_unlock(struct cache *cache, const struct cache_key *key, int lock)
{
	_cleanup_(closep) int dir = get_directory(cache);

	directory_unlock(dir, key, lock);
}

/* ---- packing ---- */

struct keys {
	struct cache_key *keys;
	size_t n, capacity;
	int dir;
};

static bool add_sound_key(void *owner, const struct cache_key *key,
			  const struct directory_file *file, uint32_t uid)
{
	_cleanup_(cache_entry_freep) struct cache_entry *entry = NULL;
	struct keys *list = owner;
	struct cache_key *grown;

	(void)file;
	(void)uid;
	if (directory_load(list->dir, key, &entry, NULL) != 0)
		return true;
	if (list->n == list->capacity) {
		list->capacity = list->capacity ? 2 * list->capacity : 64;
		grown = reallocarray(list->keys, list->capacity, sizeof(*grown));
		if (!grown)
			return false;
		list->keys = grown;
	}
	list->keys[list->n++] = *key;
	return true;
}

static int compare_keys(const void *a, const void *b)
{
	return memcmp(a, b, sizeof(struct cache_key));
}

static int64_t write_pack(const struct keys *list, const char *path, struct fmha_error *err)
{
	char temporary[4096];
	FILE *out;
	int r;

	if ((size_t)snprintf(temporary, sizeof(temporary), "%s.part", path) >= sizeof(temporary))
		return fmha_error_set(err, FMHA_EINVAL, "pack: the path is too long");
	out = fopen(temporary, "we");
	if (!out)
		return fmha_error_set(err, FMHA_EIO, "%s: %s", temporary, strerror(errno));
	r = pack_write(list->dir, list->keys, list->n, out);
	if (fclose(out) != 0 || r < 0 || files_rename(temporary, path) < 0) {
		r = errno;
		(void)unlink(temporary);
		return fmha_error_set(err, FMHA_EIO, "%s: cannot write: %s", path, strerror(r));
	}
	return (int64_t)list->n;
}

int64_t cache_pack(struct cache *cache, const char *path, struct fmha_error *err)
{
	_cleanup_(closep) int dir = -1;
	struct keys list = {0};
	int64_t r;

	if (!cache->writable)
		return fmha_error_set(err, FMHA_EPERM, "cache: read-only, nothing to pack");
	r = cache_check(cache, err);
	if (r < 0)
		return r;
	list.dir = dir = get_directory(cache);
	r = directory_scan(dir, add_sound_key, &list, err);
	if (list.n > 1)
		qsort(list.keys, list.n, sizeof(*list.keys), compare_keys);
	if (r == 0)
		r = write_pack(&list, path, err);
	free(list.keys);
	return r;
}
