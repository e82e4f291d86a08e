/* SPDX-License-Identifier: MIT */
#include "pack.h"

#include <errno.h>
#include <nettle/sha2.h>
#include <stdbool.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <proto/error.h>

#include "cleanup.h"
#include "directory.h"
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

/* The key comes first in struct pack_index: this compares keys and index rows alike. */
static int key_compare(const void *a, const void *b)
{
	return memcmp(a, b, CACHE_KEY_BYTES);
}

int pack_load(const struct pack *pack, const struct cache_key *key, struct cache_entry **ret_entry)
{
	const uint8_t *index = pack->map + sizeof(struct pack_header);
	struct pack_header header;
	struct pack_index row;
	const void *found;

	memcpy(&header, pack->map, sizeof(header));
	found = bsearch(key->bytes, index, header.n_entries, sizeof(row), key_compare);
	if (!found)
		return CACHE_MISS;
	memcpy(&row, found, sizeof(row));
	if (row.offset > pack->bytes || row.size > pack->bytes - row.offset)
		return CACHE_MISS;
	return entry_parse(pack->map + row.offset, row.size, key, ret_entry);
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

int pack_open(int fd, const char *path, off_t size, struct pack *ret_pack, struct fmha_error *err)
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
	*ret_pack = (struct pack){.map = map, .bytes = (size_t)size};
	return 0;
}

void pack_close(struct pack *pack)
{
	if (pack->map)
		(void)munmap((void *)pack->map, pack->bytes);
}

int pack_write(int dir, const struct cache_key *keys, size_t n, FILE *out)
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

		if (directory_load(dir, &keys[i], &entry, NULL) != 0)
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
