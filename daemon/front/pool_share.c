/* SPDX-License-Identifier: MIT */
/* pool_share.c: whom a pool's user lets in. */
#include "pool_impl.h"

#include <string.h>
#include <sys/random.h>

#include <proto/error.h>

const struct pool_share *pool_share_find(const struct pool *pool, uint32_t uid,
					 const uint8_t key[PROTO_SHARE_BYTES])
{
	for (uint32_t i = 0; i < pool->n_shares; i++) {
		const struct pool_share *share = &pool->shares[i];

		if (share->uid == uid && memcmp(share->key, key, sizeof(share->key)) == 0)
			return share;
	}
	return NULL;
}

void pool_share_end(struct pool *pool, uint32_t uid)
{
	for (uint32_t i = pool->n_shares; i-- > 0;)
		if (pool->shares[i].uid == uid)
			pool->shares[i] = pool->shares[--pool->n_shares];
}

int pool_share_new(struct pool *pool, uint32_t uid, bool writes, uint8_t ret_key[PROTO_SHARE_BYTES],
		   struct fmha_error *err)
{
	struct pool_share *share = &pool->shares[pool->n_shares];

	if (pool->n_shares == SHARES_MOST)
		return fmha_error_set_field(err, FMHA_EQUOTA, "uid",
					    "a pool is shared with %d users at most", SHARES_MOST);
	if (getrandom(share->key, sizeof(share->key), 0) != sizeof(share->key))
		return fmha_error_set(err, FMHA_EIO, "pool: there are no random numbers");
	share->uid = uid;
	share->writes = writes;
	pool->n_shares++;
	memcpy(ret_key, share->key, sizeof(share->key));
	return 0;
}
