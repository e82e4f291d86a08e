/* SPDX-License-Identifier: MIT */
#include "cache.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <nettle/sha2.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <proto/error.h>

#include "cleanup.h"
#include "entry.h"

#define PACK_MAGIC "FMHAPK1\n"

struct pack_header {
	char magic[8];
	uint64_t n_entries;
	uint8_t digest[SHA256_DIGEST_SIZE]; /* of the index; entries carry their own */
};

/* Sorted by key. */
struct pack_index {
	uint8_t key[CACHE_KEY_BYTES];
	uint64_t offset, size;
};

struct layer {
	int dir;             /* a directory, or -1 */
	const uint8_t *pack; /* a mapped pack file, or NULL */
	size_t pack_bytes;
};

struct cache {
	bool writable; /* layers[0] is the writable directory */
	size_t n_layers;
	struct layer layers[CACHE_MAX_LAYERS + 1];
};

struct cache_key cache_key_of(const struct cache_key_part *parts, size_t n_parts)
{
	struct sha256_ctx sha;
	struct cache_key key;

	sha256_init(&sha);
	for (size_t i = 0; i < n_parts; i++) {
		uint64_t size = parts[i].size;

		sha256_update(&sha, sizeof(size), (const uint8_t *)&size);
		sha256_update(&sha, parts[i].size, parts[i].data);
	}
	sha256_digest(&sha, sizeof(key.bytes), key.bytes);
	return key;
}

void cache_key_hex(const struct cache_key *key, char ret_hex[CACHE_HEX_BYTES])
{
	for (size_t i = 0; i < CACHE_KEY_BYTES; i++)
		(void)snprintf(ret_hex + 2 * i, 3, "%02x", key->bytes[i]);
}

/* Opens a name below @dir without following links out of it or anywhere. */
static int open_beneath(int dir, const char *name, int flags, mode_t mode)
{
	struct open_how how = {
		.flags = (uint64_t)(flags | O_CLOEXEC | O_NOFOLLOW),
		.mode = flags & O_CREAT ? mode : 0,
		.resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS,
	};

	return (int)syscall(SYS_openat2, dir, name, &how, sizeof(how));
}

/* A file that only we or root could have written. */
static bool trusted_file(const struct stat *st)
{
	return S_ISREG(st->st_mode) && st->st_nlink == 1 && !(st->st_mode & 022) &&
	       (st->st_uid == geteuid() || st->st_uid == 0);
}

static int read_all(int fd, void *data, size_t size)
{
	size_t done = 0;

	while (done < size) {
		ssize_t n = pread(fd, (char *)data + done, size - done, (off_t)done);

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return -1; /* shrunk under us, or an I/O error */
		done += (size_t)n;
	}
	return 0;
}

static int write_all(int fd, const void *data, size_t size)
{
	size_t done = 0;

	while (done < size) {
		ssize_t n = write(fd, (const char *)data + done, size - done);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return -1;
		done += (size_t)n;
	}
	return 0;
}

static int directory_load(int dir, const struct cache_key *key, struct cache_entry **ret_entry)
{
	_cleanup_(closep) int fd = -1;
	_cleanup_(freep) void *data = NULL;
	char name[CACHE_HEX_BYTES];
	struct stat st;

	cache_key_hex(key, name);
	fd = open_beneath(dir, name, O_RDONLY | O_NONBLOCK, 0);
	if (fd < 0 || fstat(fd, &st) < 0 || !trusted_file(&st) || st.st_size <= 0 ||
	    (uint64_t)st.st_size > CACHE_MAX_ENTRY_BYTES)
		return CACHE_MISS;
	data = malloc((size_t)st.st_size);
	if (!data || read_all(fd, data, (size_t)st.st_size) < 0)
		return CACHE_MISS;
	return entry_parse(data, (size_t)st.st_size, key, ret_entry);
}

/* The key comes first in struct pack_index: this compares keys and index rows alike. */
static int key_compare(const void *a, const void *b)
{
	return memcmp(a, b, CACHE_KEY_BYTES);
}

static int pack_load(const struct layer *layer, const struct cache_key *key,
		     struct cache_entry **ret_entry)
{
	const uint8_t *index = layer->pack + sizeof(struct pack_header);
	struct pack_header header;
	struct pack_index row;
	const void *found;

	memcpy(&header, layer->pack, sizeof(header));
	found = bsearch(key->bytes, index, header.n_entries, sizeof(row), key_compare);
	if (!found)
		return CACHE_MISS;
	memcpy(&row, found, sizeof(row));
	if (row.offset > layer->pack_bytes || row.size > layer->pack_bytes - row.offset)
		return CACHE_MISS;
	return entry_parse(layer->pack + row.offset, row.size, key, ret_entry);
}

int cache_load(struct cache *cache, const struct cache_key *key, struct cache_entry **ret_entry)
{
	for (size_t i = 0; i < cache->n_layers; i++) {
		const struct layer *layer = &cache->layers[i];
		int r = layer->pack ? pack_load(layer, key, ret_entry)
				    : directory_load(layer->dir, key, ret_entry);

		if (r == 0)
			return 0;
	}
	return CACHE_MISS;
}

static bool pack_sound(const uint8_t *map, size_t size)
{
	uint8_t digest[SHA256_DIGEST_SIZE];
	struct pack_header header;
	struct sha256_ctx sha;

	memcpy(&header, map, sizeof(header));
	if (memcmp(header.magic, PACK_MAGIC, sizeof(header.magic)) != 0 ||
	    header.n_entries > (size - sizeof(header)) / sizeof(struct pack_index))
		return false;
	sha256_init(&sha);
	sha256_update(&sha, header.n_entries * sizeof(struct pack_index), map + sizeof(header));
	sha256_digest(&sha, sizeof(digest), digest);
	return memcmp(digest, header.digest, sizeof(digest)) == 0;
}

static int pack_open(int fd, const char *path, off_t size, struct layer *ret_layer,
		     struct fmha_error *err)
{
	void *map;

	if ((size_t)size < sizeof(struct pack_header))
		return fmha_error_set(err, FMHA_EIO, "%s: not a cache pack", path);
	map = mmap(NULL, (size_t)size, PROT_READ, MAP_PRIVATE, fd, 0);
	if (map == MAP_FAILED)
		return fmha_error_set(err, FMHA_EIO, "%s: %s", path, strerror(errno));
	if (!pack_sound(map, (size_t)size)) {
		(void)munmap(map, (size_t)size);
		return fmha_error_set(err, FMHA_EIO, "%s: not a cache pack, or damaged", path);
	}
	*ret_layer = (struct layer){.dir = -1, .pack = map, .pack_bytes = (size_t)size};
	return 0;
}

static int layer_open(const char *path, bool writable, struct layer *ret_layer,
		      struct fmha_error *err)
{
	_cleanup_(closep) int fd = -1;
	struct stat st;

	if (writable && mkdir(path, 0700) < 0 && errno != EEXIST)
		return fmha_error_set(err, FMHA_EIO, "cache %s: %s", path, strerror(errno));
	fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
	if (fd < 0 || fstat(fd, &st) < 0)
		return fmha_error_set(err, FMHA_EIO, "cache %s: %s", path, strerror(errno));
	if ((st.st_uid != geteuid() && (writable || st.st_uid != 0)) || (st.st_mode & 022))
		return fmha_error_set(err, FMHA_EPERM,
				      "cache %s: owner %u, mode %04o: others could write there",
				      path, (unsigned)st.st_uid, (unsigned)(st.st_mode & 07777));
	if (!writable && S_ISREG(st.st_mode))
		return pack_open(fd, path, st.st_size, ret_layer, err);
	if (!S_ISDIR(st.st_mode))
		return fmha_error_set(err, FMHA_EINVAL, "cache %s: not a directory", path);
	*ret_layer = (struct layer){.dir = fd};
	fd = -1;
	return 0;
}

int cache_new(const char *writable, const char *const *layers, size_t n_layers,
	      struct cache **ret_cache, struct fmha_error *err)
{
	_cleanup_(cache_freep) struct cache *cache = NULL;
	int r;

	if (n_layers > CACHE_MAX_LAYERS)
		return fmha_error_set(err, FMHA_EINVAL, "cache: %zu layers, at most %d", n_layers,
				      CACHE_MAX_LAYERS);
	cache = calloc(1, sizeof(*cache));
	if (!cache)
		return fmha_error_set(err, FMHA_ENOMEM, "cache: out of memory");
	if (writable) {
		r = layer_open(writable, true, &cache->layers[0], err);
		if (r < 0)
			return r;
		cache->writable = true;
		cache->n_layers = 1;
	}
	for (size_t i = 0; i < n_layers; i++) {
		r = layer_open(layers[i], false, &cache->layers[cache->n_layers], err);
		if (r < 0)
			return r;
		cache->n_layers++;
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
		if (cache->layers[i].pack)
			(void)munmap((void *)cache->layers[i].pack, cache->layers[i].pack_bytes);
		else
			(void)close(cache->layers[i].dir);
	}
	free(cache);
	return NULL;
}

/* Writes @data under a temporary name in @dir, syncs, and renames it to @name. */
static int publish(int dir, const char *name, const void *data, size_t size, struct fmha_error *err)
{
	char temporary[CACHE_HEX_BYTES + 32];
	int fd, saved;

	(void)snprintf(temporary, sizeof(temporary), ".%s.%d", name, (int)gettid());
	(void)unlinkat(dir, temporary, 0); /* left by a crash under the same thread id */
	fd = open_beneath(dir, temporary, O_WRONLY | O_CREAT | O_EXCL, 0600);
	if (fd < 0)
		return fmha_error_set(err, FMHA_EIO, "cache: cannot create a file: %s",
				      strerror(errno));
	if (write_all(fd, data, size) == 0 && fsync(fd) == 0 &&
	    renameat(dir, temporary, dir, name) == 0 && fsync(dir) == 0) {
		(void)close(fd);
		return 0;
	}
	saved = errno;
	(void)close(fd);
	(void)unlinkat(dir, temporary, 0);
	return fmha_error_set(err, FMHA_EIO, "cache: cannot write an entry: %s", strerror(saved));
}

int cache_store(struct cache *cache, const struct cache_key *key, const struct cache_entry *entry,
		struct fmha_error *err)
{
	_cleanup_(freep) void *data = NULL;
	char name[CACHE_HEX_BYTES];
	size_t size;

	if (!cache->writable)
		return fmha_error_set(err, FMHA_EPERM, "cache: read-only");
	data = entry_print(key, entry, &size);
	if (!data)
		return fmha_error_set(err, FMHA_ENOMEM, "cache: out of memory");
	if (size > CACHE_MAX_ENTRY_BYTES)
		return fmha_error_set(err, FMHA_EIO, "cache: %s has %zu bytes, more than %u",
				      entry->info.kernel, size, CACHE_MAX_ENTRY_BYTES);
	cache_key_hex(key, name);
	return publish(cache->layers[0].dir, name, data, size, err);
}

static void lock_name(const struct cache_key *key, char ret_name[CACHE_HEX_BYTES + 8])
{
	cache_key_hex(key, ret_name);
	(void)strcat(ret_name, ".lock");
}

int cache_lock(struct cache *cache, const struct cache_key *key, struct fmha_error *err)
{
	struct flock whole = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
	char name[CACHE_HEX_BYTES + 8];

	if (!cache->writable)
		return fmha_error_set(err, FMHA_EPERM, "cache: read-only");
	lock_name(key, name);
	for (;;) {
		int dir = cache->layers[0].dir, r;
		int fd = open_beneath(dir, name, O_RDWR | O_CREAT, 0600);
		struct stat held, linked;

		if (fd < 0)
			return fmha_error_set(err, FMHA_EIO, "cache: lock: %s", strerror(errno));
		do
			r = fcntl(fd, F_OFD_SETLKW, &whole);
		while (r < 0 && errno == EINTR);
		/* A holder unlinks the file when it is done: ours may guard a name that is gone. */
		if (r == 0 && fstat(fd, &held) == 0 &&
		    fstatat(dir, name, &linked, AT_SYMLINK_NOFOLLOW) == 0 &&
		    held.st_ino == linked.st_ino)
			return fd;
		(void)close(fd);
		if (r < 0)
			return fmha_error_set(err, FMHA_EIO, "cache: lock: %s", strerror(errno));
	}
}

void cache_unlock(struct cache *cache, const struct cache_key *key, int lock)
{
	char name[CACHE_HEX_BYTES + 8];

	lock_name(key, name);
	(void)unlinkat(cache->layers[0].dir, name, 0);
	(void)close(lock);
}

static bool key_from_hex(const char *hex, struct cache_key *ret_key)
{
	if (strlen(hex) != 2 * CACHE_KEY_BYTES ||
	    strspn(hex, "0123456789abcdef") != 2 * CACHE_KEY_BYTES)
		return false;
	for (size_t i = 0; i < CACHE_KEY_BYTES; i++) {
		unsigned byte = 0;

		(void)sscanf(hex + 2 * i, "%2x", &byte);
		ret_key->bytes[i] = (uint8_t)byte;
	}
	return true;
}

/* Keys of the sound entries of a directory, sorted as a pack's index needs them; -1: failed. */
static int64_t list_keys(int dir, struct cache_key **ret_keys)
{
	_cleanup_(closedirp) DIR *stream = NULL;
	_cleanup_(freep) struct cache_key *keys = NULL;
	size_t n = 0, capacity = 0;
	struct dirent *item;
	struct cache_key key;
	int copy = openat(dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);

	stream = copy < 0 ? NULL : fdopendir(copy);
	if (!stream) {
		closep(&copy);
		return -1;
	}
	while ((item = readdir(stream))) {
		_cleanup_(cache_entry_freep) struct cache_entry *entry = NULL;

		if (!key_from_hex(item->d_name, &key) || directory_load(dir, &key, &entry) != 0)
			continue;
		if (n == capacity) {
			struct cache_key *grown;

			capacity = capacity ? 2 * capacity : 64;
			grown = reallocarray(keys, capacity, sizeof(*keys));
			if (!grown)
				return -1;
			keys = grown;
		}
		keys[n++] = key;
	}
	if (n > 1)
		qsort(keys, n, sizeof(*keys), key_compare);
	*ret_keys = keys;
	keys = NULL;
	return (int64_t)n;
}

/* Writes header, index and entries to @out. */
static int pack_print(int dir, const struct cache_key *keys, size_t n, FILE *out)
{
	_cleanup_(freep) struct pack_index *index = calloc(n ? n : 1, sizeof(*index));
	uint64_t offset = sizeof(struct pack_header) + n * sizeof(*index);
	struct pack_header header = {.n_entries = n};
	struct sha256_ctx sha;

	if (!index || fseek(out, (long)offset, SEEK_SET) < 0)
		return -1;
	for (size_t i = 0; i < n; i++) {
		_cleanup_(cache_entry_freep) struct cache_entry *entry = NULL;
		_cleanup_(freep) void *data = NULL;
		size_t size;

		if (directory_load(dir, &keys[i], &entry) != 0)
			return -1; /* vanished since it was listed */
		data = entry_print(&keys[i], entry, &size);
		if (!data || fwrite(data, 1, size, out) != size)
			return -1;
		memcpy(index[i].key, keys[i].bytes, CACHE_KEY_BYTES);
		index[i].offset = offset;
		index[i].size = size;
		offset += size;
	}
	memcpy(header.magic, PACK_MAGIC, sizeof(header.magic));
	sha256_init(&sha);
	sha256_update(&sha, n * sizeof(*index), (const uint8_t *)index);
	sha256_digest(&sha, sizeof(header.digest), header.digest);
	if (fseek(out, 0, SEEK_SET) < 0 || fwrite(&header, sizeof(header), 1, out) != 1 ||
	    fwrite(index, sizeof(*index), n, out) != n || fflush(out) != 0)
		return -1;
	return fsync(fileno(out));
}

int64_t cache_pack(struct cache *cache, const char *path, struct fmha_error *err)
{
	_cleanup_(freep) struct cache_key *keys = NULL;
	char temporary[4096];
	FILE *out;
	int64_t n;
	int r;

	if (!cache->writable)
		return fmha_error_set(err, FMHA_EPERM, "cache: read-only, nothing to pack");
	n = list_keys(cache->layers[0].dir, &keys);
	if (n < 0)
		return fmha_error_set(err, FMHA_EIO, "cache: cannot list the entries");
	if ((size_t)snprintf(temporary, sizeof(temporary), "%s.part", path) >= sizeof(temporary))
		return fmha_error_set(err, FMHA_EINVAL, "pack: the path is too long");
	out = fopen(temporary, "we");
	if (!out)
		return fmha_error_set(err, FMHA_EIO, "%s: %s", temporary, strerror(errno));
	r = pack_print(cache->layers[0].dir, keys, (size_t)n, out);
	if (fclose(out) != 0 || r < 0 || rename(temporary, path) < 0) {
		r = errno;
		(void)unlink(temporary);
		return fmha_error_set(err, FMHA_EIO, "%s: cannot write: %s", path, strerror(r));
	}
	return n;
}
