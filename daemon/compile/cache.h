/* SPDX-License-Identifier: MIT */
/*
 * cache.h: compiled code objects on disk, found by the hash of everything that made them.
 *
 * A cache is one writable directory over any number of read-only layers, each a directory of the
 * same form or one pack file. An entry carries its own key and digest: whatever a crash, a full
 * disk or a curious hand left behind is a miss, never an error, and is built again. The digest
 * protects against accident; against attack the directory's owner and mode do, and a directory that
 * others can write is refused when the cache is opened.
 *
 * File names are the key in hexadecimal and nothing else. Entries are published by write to a
 * temporary file, fsync, rename, fsync of the directory: a reader sees all of one or none.
 */
#ifndef FMHAD_COMPILE_CACHE_H
#define FMHAD_COMPILE_CACHE_H

#include <stddef.h>
#include <stdint.h>

#include <fmha/base.h>

#define CACHE_KEY_BYTES       32
#define CACHE_HEX_BYTES       (2 * CACHE_KEY_BYTES + 1)
#define CACHE_MAX_LAYERS      8
#define CACHE_MAX_ENTRY_BYTES (64u << 20)
#define CACHE_MISS            1 /* positive: an expected answer */

struct cache_key {
	uint8_t bytes[CACHE_KEY_BYTES];
};

/* What the compiler said of a kernel. Zero where a compiler does not tell. */
struct compile_info {
	char kernel[256]; /* canonical name, for messages */
	char arch[32];
	char compiler[96];         /* name and version, as in "nvrtc 13.0" */
	uint32_t registers;        /* per thread: registers (NVIDIA), VGPRs (AMD) */
	uint32_t scalar_registers; /* SGPRs */
	uint32_t accumulators;     /* AGPRs */
	uint32_t spills;           /* bytes per thread (NVIDIA), registers (AMD) */
	uint32_t scratch_bytes;    /* per thread: stack frame, private segment */
	uint32_t lds_bytes;        /* static shared memory or LDS per workgroup */
	uint32_t occupancy;        /* waves per SIMD or warps per SM by registers alone */
	uint32_t compile_ms;
};

struct cache_entry {
	struct compile_info info;
	char *log; /* NUL-terminated, may be empty */
	void *code;
	size_t code_bytes;
};

struct cache;

/*
 * @writable: directory for new entries, made with mode 0700 when missing; NULL: read-only cache
 * @layers:   directories or pack files looked at after it, in order; borrowed
 * Return: 0, FMHA_EPERM (somebody else can write there), FMHA_EIO, FMHA_EINVAL, FMHA_ENOMEM.
 */
int cache_new(const char *writable, const char *const *layers, size_t n_layers,
	      struct cache **ret_cache, struct fmha_error *err);
struct cache *cache_free(struct cache *cache);

/* Return: 0 and an entry (given), or CACHE_MISS: absent, damaged, or of another key. */
int cache_load(struct cache *cache, const struct cache_key *key, struct cache_entry **ret_entry);
struct cache_entry *cache_entry_free(struct cache_entry *entry);

/* Return: 0, FMHA_EPERM (read-only cache), FMHA_EIO, FMHA_ENOMEM. */
int cache_store(struct cache *cache, const struct cache_key *key, const struct cache_entry *entry,
		struct fmha_error *err);

/*
 * One build per key, also among processes: blocks until this process holds the key's lock. The
 * kernel releases it when the holder dies. Look again with cache_load() after taking it. Return: a
 * descriptor to hand to cache_unlock(), or a negative FMHA_E*.
 */
int cache_lock(struct cache *cache, const struct cache_key *key, struct fmha_error *err);
void cache_unlock(struct cache *cache, const struct cache_key *key, int lock);

/*
 * Writes every sound entry of the writable directory into one pack file, published by rename.
 * Return: number of entries, or a negative FMHA_E*.
 */
int64_t cache_pack(struct cache *cache, const char *path, struct fmha_error *err);

/* Hash of parts, each with its length, so that no two lists collide. */
struct cache_key_part {
	const void *data;
	size_t size;
};
struct cache_key cache_key_of(const struct cache_key_part *parts, size_t n_parts);
void cache_key_hex(const struct cache_key *key, char ret_hex[CACHE_HEX_BYTES]);

#endif
