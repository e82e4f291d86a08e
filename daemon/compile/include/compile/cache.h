/* SPDX-License-Identifier: MIT */
/*
 * cache.h: compiled code objects on disk, found by the hash of everything that made them.
 *
 * A cache is one writable directory over any number of read-only layers, each a directory of the
 * same form or one pack file. An entry carries its own key and digest: whatever a crash, a full
 * disk or a curious hand left behind is a miss, never an error, and is built again. The digest
 * protects against accident; against attack the directory's owner and mode do, and a directory that
 * others can write is not used.
 *
 * File names are the key in hexadecimal and nothing else. Entries are published by write to a
 * temporary file, fsync, rename, fsync of the directory: a reader sees all of one or none.
 *
 * A directory that is missing, somebody else's, read-only or full costs speed and nothing else:
 * what it does not take is kept in memory, as much as fits, and it is tried again by the next store
 * and once a minute. cache_get_status() says how it stands.
 *
 * The directory's size is limited, in all and for each user; what was not used for longest goes. An
 * entry is charged to whoever asked for it first. Layers are not counted and never changed.
 *
 * Every function may be called from any thread. All but cache_new() and cache_get_status() touch
 * the disk.
 */
#ifndef FMHAD_COMPILE_CACHE_H
#define FMHAD_COMPILE_CACHE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <fmha/base.h>

/* ---- cache key ---- */

/* What a code object is found by: the hash of everything that made it. */

#define CACHE_KEY_BYTES 32
#define CACHE_HEX_BYTES (2 * CACHE_KEY_BYTES + 1)

struct cache_key {
	uint8_t bytes[CACHE_KEY_BYTES];
};

/* Hash of parts, each with its length, so that no two lists collide. */
struct cache_key_part {
	const void *data;
	size_t size;
};
struct cache_key cache_key_of(const struct cache_key_part *parts, size_t n_parts);
void cache_key_hex(const struct cache_key *key, char ret_hex[CACHE_HEX_BYTES]);

/* ---- cache entry ---- */

/* A code object, and what its compiler said of it. */

#define CACHE_MAX_ENTRY_BYTES (64u << 20)
/* Positive: expected answers of those who look for one. */
#define CACHE_MISS 1
#define CACHE_BUSY 2 /* somebody else holds the lock */

/* What the compiler said of a kernel. Zero where a compiler does not tell. */
struct compile_info {
	char kernel[256]; /* canonical name, for messages */
	char arch[32];
	char compiler[96];         /* name and version, as in "nvrtc 13.0" */
	uint32_t registers;        /* per thread: registers (NVIDIA), VGPRs (AMD) */
	uint32_t scalar_registers; /* SGPRs */
	uint32_t accumulators;     /* AGPRs */
	uint32_t spills;           /* bytes of registers per thread that go to memory */
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
	uint32_t uid; /* who asked for it first: its room on disk is charged to them */
};

struct cache_entry *cache_entry_free(struct cache_entry *entry);

/* ---- cache ---- */

#define CACHE_MAX_LAYERS 8

struct cache_config {
	const char *writable;      /* directory for new entries, made with mode 0700 when missing;
				      NULL: read-only cache */
	const char *const *layers; /* directories or pack files looked at after it, in order */
	size_t n_layers;
	uint64_t max_bytes, max_bytes_per_uid; /* of the writable directory; 0: no limit */
	uint64_t memory_bytes;                 /* of entries that it did not take; 0: 64 MiB */
};

struct cache_status {
	bool opened;      /* somebody has asked for something */
	bool usable;      /* the last that was heard of the writable directory, if there is one */
	char reason[200]; /* why it is not usable */
	char layer[200];  /* which layer is left out, and why */
	uint64_t bytes, entries;               /* in the writable directory */
	uint64_t memory_bytes, memory_entries; /* kept because it did not take them */
	uint64_t evicted, unstored;            /* entries so far */
};

struct cache;

/* Copies @config; opens nothing yet. Return: 0, FMHA_EINVAL (too many layers), FMHA_ENOMEM. */
int cache_new(const struct cache_config *config, struct cache **ret_cache, struct fmha_error *err);
struct cache *cache_free(struct cache *cache);

/*
 * Opens the cache if it is not open, for those who have no use for one that they cannot fill.
 * Return: 0, FMHA_EIO.
 */
int cache_check(struct cache *cache, struct fmha_error *err);

void cache_get_status(struct cache *cache, struct cache_status *ret_status);

/* Return: 0 and an entry (given), or CACHE_MISS: absent, damaged, or of another key. */
int cache_load(struct cache *cache, const struct cache_key *key, struct cache_entry **ret_entry);

/*
 * Stores an entry, in memory when the directory does not take it.
 * Return: 0 (on disk), FMHA_EPERM (read-only cache), FMHA_EIO, FMHA_ENOMEM.
 */
int cache_store(struct cache *cache, const struct cache_key *key, const struct cache_entry *entry,
		struct fmha_error *err);

/*
 * One build per key, also among processes. Never waits; the kernel releases a lock when its holder
 * dies. Look again with cache_load() after taking it.
 * Return: 0 and a lock to hand to cache_unlock(), CACHE_BUSY, or FMHA_E*: there is no lock to have.
 */
int cache_try_lock(struct cache *cache, const struct cache_key *key, int *ret_lock,
		   struct fmha_error *err);
void cache_unlock(struct cache *cache, const struct cache_key *key, int lock);

/*
 * Writes every sound entry of the writable directory into one pack file, published by rename.
 * Return: number of entries, or a negative FMHA_E*.
 */
int64_t cache_pack(struct cache *cache, const char *path, struct fmha_error *err);

#endif
