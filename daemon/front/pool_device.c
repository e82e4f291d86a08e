/* SPDX-License-Identifier: MIT */
/*
 * pool_device.c: pools of a GPU's memory. A worker makes it and clears what a dead process has left, each time by the
 * descriptor that the front has: no worker knows a pool, and one that starts anew finds nothing missing.
 */
#include "pool_impl.h"

#include <fcntl.h>
#include <stdlib.h>

#include <proto/error.h>
#include <proto/page_numbers.h>

int pool_device_check(struct front *front, const struct proto_pool_open_params *params,
		      struct worker_slot **ret_slot, struct fmha_error *err)
{
	const uint32_t index = params->on_device - 1;
	struct worker_slot *slot = index < front->n_slots ? &front->slots[index] : NULL;

	if (!slot)
		return fmha_error_set_field(err, FMHA_ENOENT, "on_device", "there is no device %u",
					    index);
	if (slot->state != WORKER_READY)
		return fmha_error_set_field(err, FMHA_EBUSY, "on_device",
					    "device %u is not ready: ask again", index);
	if (!slot->device.descriptors)
		return fmha_error_set_field(err, FMHA_ENOTSUP, "on_device",
					    "device %u (%s) has no memory that a descriptor keeps",
					    index, slot->device.backend);
	if (params->n_spill)
		return fmha_error_set_field(err, FMHA_ENOTSUP, "n_spill",
					    "a pool of a GPU's memory has no file");
	if (params->n_pages * params->page_bytes > slot->device.memory_bytes)
		return fmha_error_set_field(err, FMHA_ENOMEM, "n_pages", "device %u has %llu bytes",
					    index, (unsigned long long)slot->device.memory_bytes);
	*ret_slot = slot;
	return 0;
}

static void on_made(void *owner, const union proto_any_result *result, int fd,
		    const struct fmha_error *error)
{
	struct pool *pool = owner;
	struct fmha_error failed = {.code = FMHA_EDEVICE,
				    .msg = "the worker died while it made the pool's memory"};

	if (result && fd >= 0)
		pool->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
	if (result && pool->fd < 0)
		fmha_error_set(&failed, FMHA_EBUSY, "no file descriptors left");
	else if (!result && error->code != FMHA_ECONN)
		failed = *error;
	pool->pools->made(pool, pool->fd < 0 ? &failed : NULL);
}

int pool_device_make(struct pool *pool, uint64_t bytes, struct fmha_error *err)
{
	const struct proto_worker_memory_params params = {.uid = pool->account->uid, .size = bytes};

	if (worker_slot_request(pool->slot, PROTO_WORKER_MEMORY, &params, -1, on_made, pool))
		return 0;
	return fmha_error_set_field(err, FMHA_EBUSY, "on_device",
				    "device %u is not ready: ask again", pool->slot->index);
}

bool pool_device_clear(const struct pool *pool, const uint32_t *pages, uint32_t n,
		       connection_reply reply, void *owner)
{
	struct proto_worker_clear_params params = {
		.uid = pool->account->uid,
		.size = proto_device_bytes(pool->page_bytes * pool->n_pages),
		.page_bytes = pool->page_bytes};
	int fd = fcntl(pool->fd, F_DUPFD_CLOEXEC, 0);

	params.pages_bytes = proto_put_pages(params.pages, pages, n);
	return fd >= 0 &&
	       worker_slot_request(pool->slot, PROTO_WORKER_CLEAR, &params, fd, reply, owner);
}

int pool_opening_new(struct client *client, uint32_t id, struct pool *pool, bool created,
		     struct fmha_error *err)
{
	struct pool_opening *opening = calloc(1, sizeof(*opening));

	if (!opening)
		return fmha_error_set(err, FMHA_ENOMEM, "pool: out of memory");
	opening->client = client;
	opening->pool = pool;
	opening->id = id;
	opening->created = created;
	list_append(&client->pool_openings, &opening->in_client);
	list_append(&pool->openings, &opening->in_pool);
	return 0;
}

void pool_opening_free(struct pool_opening *opening)
{
	list_remove(&opening->in_client);
	list_remove(&opening->in_pool);
	free(opening);
}
