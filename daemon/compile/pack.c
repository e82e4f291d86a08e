/* SPDX-License-Identifier: MIT */
#include "pack.h"

#include <nettle/sha2.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <files/files.h>
#include <proto/error.h>

#include "cleanup.h"
#include "directory.h"

#define PACK_MAGIC "FMHAPK2\n"

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
	const struct pack_index *row = bsearch(key->bytes, pack->index, pack->n_entries,
					       sizeof(*pack->index), key_compare);
	_cleanup_(freep) void *data = NULL;

	if (!row || row->offset > pack->bytes || row->size > pack->bytes - row->offset)
		return CACHE_MISS;
	data = malloc(row->size ? row->size : 1);
	if (!data || files_read_at(pack->fd, data, row->size, (off_t)row->offset) < 0)
		return CACHE_MISS;
	return entry_parse(data, row->size, key, ret_entry);
}

static bool header_sound(const struct pack_header *header, size_t bytes)
{
	return memcmp(header->magic, PACK_MAGIC, sizeof(header->magic)) == 0 &&
	       header->n_entries <= (bytes - sizeof(*header)) / sizeof(struct pack_index);
}

static bool index_sound(const struct pack_header *header, const struct pack_index *index)
{
	uint8_t digest[SHA256_DIGEST_SIZE];
	struct sha256_ctx sha;

	sha256_init(&sha);
	sha256_update(&sha, header->n_entries * sizeof(*index), (const uint8_t *)index);
	sha256_digest(&sha, sizeof(digest), digest);
	return memcmp(digest, header->digest, sizeof(digest)) == 0;
}

int pack_open(int *fd, const char *path, off_t size, struct pack *ret_pack, struct fmha_error *err)
{
	_cleanup_(freep) struct pack_index *index = NULL;
	struct pack_header header;
	size_t bytes = (size_t)size;

	if (bytes < sizeof(header) || files_read_at(*fd, &header, sizeof(header), 0) < 0 ||
	    !header_sound(&header, bytes))
		return fmha_error_set(err, FMHA_EIO, "%s: not a cache pack", path);
	index = calloc(header.n_entries ? header.n_entries : 1, sizeof(*index));
	if (!index)
		return fmha_error_set(err, FMHA_ENOMEM, "%s: no memory for its index", path);
	if (files_read_at(*fd, index, header.n_entries * sizeof(*index), sizeof(header)) < 0 ||
	    !index_sound(&header, index))
		return fmha_error_set(err, FMHA_EIO, "%s: not a cache pack, or damaged", path);
	*ret_pack = (struct pack){
		.fd = *fd, .index = index, .n_entries = header.n_entries, .bytes = bytes};
	*fd = -1;
	index = NULL;
	return 0;
}

void pack_close(struct pack *pack)
{
	if (!pack->index)
		return;
	(void)close(pack->fd);
	free(pack->index);
	pack->index = NULL;
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
