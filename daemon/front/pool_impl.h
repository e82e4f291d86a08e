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

struct pool {
	struct list in_pools;
	struct pools *pools;
	struct account *account;
	char name[PROTO_NAME_BYTES], layout[PROTO_LAYOUT_BYTES];
	uint64_t page_bytes, charged, charged_file;
	uint32_t n_pages;
	int fd;
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

/* pool_share.c. Return: NULL: @uid has none with that @key. */
const struct pool_share *pool_share_find(const struct pool *pool, uint32_t uid,
					 const uint8_t key[PROTO_SHARE_BYTES]);
/* For a user who has none. Return: 0, FMHA_EQUOTA, FMHA_EIO. */
int pool_share_new(struct pool *pool, uint32_t uid, bool writes, uint8_t ret_key[PROTO_SHARE_BYTES],
		   struct fmha_error *err);
void pool_share_end(struct pool *pool, uint32_t uid);

#endif
