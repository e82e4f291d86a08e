/* SPDX-License-Identifier: MIT */
/* pool_impl.h: a pool as pools.c and pool_file.c know it. */
#ifndef FMHAD_FRONT_POOL_IMPL_H
#define FMHAD_FRONT_POOL_IMPL_H

#include "pool_file.h"
#include "pools.h"

#include <kvpool/kvpool.h>

#define SHARES_MOST 32

/* Another user who may have it open. */
struct pool_share {
	uint32_t uid;
	bool writes;
	uint8_t key[PROTO_SHARE_BYTES];
};

/* A connection that waits for a pool that is being made. */
struct pool_opening {
	struct list in_client, in_pool;
	struct client *client;
	struct pool *pool;
	uint32_t id; /* of its request */
	bool created;
};

struct pool {
	struct list in_pools;
	struct pools *pools;
	struct account *account;
	char name[PROTO_NAME_BYTES], layout[PROTO_LAYOUT_BYTES];
	uint64_t page_bytes, charged, charged_file;
	uint32_t n_pages;
	int fd;                   /* -1: it is being made */
	struct worker_slot *slot; /* of the GPU whose memory it is; NULL: the machine's */
	struct list openings;     /* struct pool_opening */
	struct kvpool *pages;
	struct pool_file *file; /* NULL: it has none */
	struct pool_share shares[SHARES_MOST];
	uint32_t n_shares;
	uint32_t n_open,
		n_users; /* by its own user; by all, with those that are being ended and work on the file */
	bool dropped;        /* it ends with the last of these, and has no name any more */
	struct list open;    /* struct pool_user, by all */
	struct list waiting; /* users whose process has not ended yet */
	uint64_t idle_since_ns;
};

static inline bool pool_is_being_made(const struct pool *pool)
{
	return pool->slot && pool->fd < 0;
}

/* pool_device.c */
int pool_device_check(struct front *front, const struct proto_pool_open_params *params,
		      struct worker_slot **ret_slot, struct fmha_error *err);
/* pools.made() comes. Return: 0, FMHA_EBUSY: it does not. */
int pool_device_make(struct pool *pool, uint64_t bytes, struct fmha_error *err);
/* Return: false: no worker is ready, and no @reply comes. */
bool pool_device_clear(const struct pool *pool, const uint32_t *pages, uint32_t n,
		       connection_reply reply, void *owner);
int pool_opening_new(struct client *client, uint32_t id, struct pool *pool, bool created,
		     struct fmha_error *err);
void pool_opening_free(struct pool_opening *opening);

/* pool_share.c. Return: NULL: @uid has none with that @key. */
const struct pool_share *pool_share_find(const struct pool *pool, uint32_t uid,
					 const uint8_t key[PROTO_SHARE_BYTES]);
/* For a user who has none. Return: 0, FMHA_EQUOTA, FMHA_EIO. */
int pool_share_new(struct pool *pool, uint32_t uid, bool writes, uint8_t ret_key[PROTO_SHARE_BYTES],
		   struct fmha_error *err);
void pool_share_end(struct pool *pool, uint32_t uid);

#endif
