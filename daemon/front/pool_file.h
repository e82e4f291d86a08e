/* SPDX-License-Identifier: MIT */
/*
 * pool_file.h: copies of a pool's sealed pages in a file, made and read back on other threads.
 *
 * A file is one pool's: a block that says whose and what, an entry for each place, and the places. Pages are copied as
 * they are sealed; what a look-up misses and the file has is read back, and found by the next one. A daemon that
 * starts finds the file of the one before and believes of it what has its checksum: that covers key, place and
 * contents, so that whatever a crash, a full disk or somebody else has made of it is not there. Nothing waits for
 * a file: what fails costs a copy.
 */
#ifndef FMHAD_FRONT_POOL_FILE_H
#define FMHAD_FRONT_POOL_FILE_H

#include <stdbool.h>
#include <stdint.h>

#include <cjson/cJSON.h>
#include <kvpool/kvspill.h>

struct pool;
struct pool_file;

#define POOL_FILE_PAGE_MOST (64u << 20) /* larger pages are not copied */

/* What a file of so many places takes on disk, and in memory. */
uint64_t pool_file_bytes(uint64_t page_bytes, uint32_t n_places);
uint64_t pool_file_cost(uint32_t n_pages, uint32_t n_places);

/* Of a new pool. Return: given, or NULL: out of memory. */
struct pool_file *pool_file_new(struct pool *pool, uint32_t n_places, uint64_t secret);
/* Its pool ends, and with it the file, whose name is free at once. Takes NULL. */
void pool_file_remove(struct pool_file *file);
/* Takes NULL; when no work of it is under way (it is among the pool's users meanwhile). Return: NULL. */
struct pool_file *pool_file_free(struct pool_file *file);

/* As kvspill.h, and begins with it. Takes NULL. */
void pool_file_sealed(struct pool_file *file, uint32_t page);
uint32_t pool_file_want(struct pool_file *file, const uint8_t (*keys)[KVPOOL_KEY_BYTES],
			uint32_t n);

/* Adds what people see. Takes NULL. */
void pool_file_json(const struct pool_file *file, cJSON *item);

struct pools;
/* Ends the file that a daemon before this one has left of a pool. Return: whether there was one. */
bool pool_file_drop(struct pools *pools, uint32_t uid, const char *name);
/* Before there are pools: of the files that there are the oldest end beyond limits.pool_spill_bytes, after limits.pool_idle_s
 * those that no pool has. */
void pool_file_init(struct pools *pools);

#endif
