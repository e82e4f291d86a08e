/* SPDX-License-Identifier: MIT */
/* pool.c: a cache of the daemon's that outlives its users, as one of them has it open. */
#include "client.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <proto/page_numbers.h>

struct fmha_pool {
	struct fmha_client *client;
	uint64_t generation; /* of the connection that has it open */
	uint32_t id;
	int fd;
	void *data;
	bool on_gpu;
	uint32_t device; /* then: which */
	struct fmha_pool_info info;
};

static uint64_t pool_bytes(const struct fmha_pool *pool)
{
	return pool->info.page_bytes * pool->info.n_pages;
}

/* Maps what the daemon has answered, which is believed as far as the file is that large; of a GPU's memory its driver says so. */
static int map_pool(struct fmha_pool *pool, struct fmha_error *err)
{
	struct stat st;

	if (pool->fd < 0 || pool->info.n_pages == 0 || pool->info.page_bytes == 0 ||
	    pool->info.page_bytes > INT64_MAX / pool->info.n_pages)
		return fmha_error_set(err, FMHA_EPROTO, "pool: no memory came, or no pages");
	if (pool->on_gpu)
		return 0;
	if (fstat(pool->fd, &st) < 0 || (uint64_t)st.st_size != pool_bytes(pool))
		return fmha_error_set(err, FMHA_EPROTO, "pool: the file is not of the size said");
	pool->data = mmap(NULL, pool_bytes(pool),
			  PROT_READ | (pool->info.read_only ? 0 : PROT_WRITE), MAP_SHARED, pool->fd,
			  0);
	if (pool->data == MAP_FAILED) {
		pool->data = NULL;
		return fmha_error_set(err, FMHA_EIO, "pool: mmap: %s", strerror(errno));
	}
	/* When this process ends nobody writes its pages any more: no child of its goes on with them. */
	(void)madvise(pool->data, pool_bytes(pool), MADV_DONTFORK);
	return 0;
}

static int pool_ask(struct fmha_pool *pool, const struct proto_pool_open_params *params,
		    struct fmha_error *err)
{
	int64_t deadline = client_deadline(pool->client);
	struct proto_pool_open_result result;
	struct connection *c;
	int r = link_get(&pool->client->front, deadline, &c, &pool->generation, err);

	if (r < 0)
		return r;
	r = connection_call(c, PROTO_POOL_OPEN, params, -1, deadline, &result, &pool->fd, err);
	c = connection_unref(c);
	if (r < 0)
		return r;
	pool->id = result.pool;
	pool->info.page_bytes = result.page_bytes;
	pool->info.n_pages = result.n_pages;
	pool->info.created = result.created;
	pool->info.read_only = result.read_only;
	return 0;
}

int fmha_pool_open(struct fmha_client *client, const struct fmha_pool_options *options,
		   struct fmha_pool **ret_pool, struct fmha_error *err)
{
	struct proto_pool_open_params params = {0};
	struct fmha_device_info info = {0};
	struct fmha_pool *pool;
	int r = client_check(options && options->name && ret_pool ? client : NULL, __func__, err);

	if (r == 0)
		r = check_struct_size(options->struct_size, sizeof(*options), "fmha_pool_options",
				      err);
	if (r == 0)
		r = client_copy_name(params.name, sizeof(params.name), options->name, "name", err);
	if (r == 0)
		r = client_copy_name(params.layout, sizeof(params.layout),
				     options->layout ? options->layout : "", "layout", err);
	if (r == 0 && options->device && options->device->client != client)
		r = fmha_error_set_field(err, FMHA_EINVAL, "device",
					 "the device was opened by another client");
	if (r == 0 && options->device)
		r = fmha_device_info(options->device, &info, err);
	if (r < 0)
		return r;
	params.on_device = options->device ? info.device + 1 : 0;
	params.page_bytes = options->page_bytes;
	params.n_pages = options->n_pages;
	params.n_spill = options->n_spill;
	if (options->share) {
		memcpy(params.share, options->share, sizeof(params.share));
		params.share_bytes = sizeof(params.share);
	}
	pool = calloc(1, sizeof(*pool));
	if (!pool)
		return fmha_error_set(err, FMHA_ENOMEM, "out of memory");
	pool->client = client_ref(client);
	pool->fd = -1;
	pool->on_gpu = options->device != NULL;
	pool->device = info.device;
	r = pool_ask(pool, &params, err);
	if (r == 0)
		r = map_pool(pool, err);
	if (r < 0) {
		(void)fmha_pool_close(pool);
		return r;
	}
	*ret_pool = pool;
	return 0;
}

/* A call on the connection that has the pool open, once: on another one the daemon knows none of its pages. */
static int call(struct fmha_pool *pool, const char *caller, enum proto_method method,
		const void *params, void *ret_result, struct fmha_error *err)
{
	struct connection *c;
	int r = client_check(pool ? pool->client : NULL, caller, err);

	if (r < 0)
		return r;
	c = link_get_if(&pool->client->front, pool->generation);
	if (!c)
		return fmha_error_set(err, FMHA_ECONN,
				      "the connection that had the pool open was lost: what was "
				      "leased and pinned is not any more; open it again");
	r = connection_call(c, method, params, -1, client_deadline(pool->client), ret_result, NULL,
			    err);
	c = connection_unref(c);
	return r;
}

/* @most: pages that were asked for. */
static int get_pages(const struct fmha_pool *pool, const struct proto_pool_pages *result,
		     uint32_t most, uint32_t *ret_pages, uint32_t *ret_n, struct fmha_error *err)
{
	uint32_t n = result->pages_bytes / PROTO_PAGE_NUMBER_BYTES;

	if (result->pages_bytes % PROTO_PAGE_NUMBER_BYTES != 0 || n > most)
		return fmha_error_set(err, FMHA_EPROTO, "pool: %u bytes of pages answered",
				      result->pages_bytes);
	for (uint32_t i = 0; i < n; i++) {
		ret_pages[i] = proto_get_page(result->pages, i);
		if (ret_pages[i] >= pool->info.n_pages)
			return fmha_error_set(err, FMHA_EPROTO, "pool: there is no page %u",
					      ret_pages[i]);
	}
	*ret_n = n;
	return 0;
}

static uint32_t batch(uint32_t left)
{
	return left < PROTO_POOL_BATCH ? left : PROTO_POOL_BATCH;
}

int fmha_pool_lease(struct fmha_pool *pool, uint32_t n, uint32_t *ret_pages, uint32_t *ret_n,
		    struct fmha_error *err)
{
	uint32_t got = 0, most;

	for (*ret_n = 0; *ret_n < n; *ret_n += got) {
		struct proto_pool_lease_params params = {.n = batch(n - *ret_n)};
		struct proto_pool_pages result;
		int r;

		params.pool = pool ? pool->id : 0;
		most = params.n;
		r = call(pool, __func__, PROTO_POOL_LEASE, &params, &result, err);
		if (r == 0)
			r = get_pages(pool, &result, most, ret_pages + *ret_n, &got, err);
		if (r < 0)
			return r;
		if (got < most) {
			*ret_n += got;
			break;
		}
	}
	return 0;
}

int fmha_pool_seal(struct fmha_pool *pool, uint32_t n, const uint32_t *pages,
		   const uint8_t (*keys)[FMHA_POOL_KEY_BYTES], uint32_t *ret_pages,
		   struct fmha_error *err)
{
	struct proto_pool_seal_params params;
	struct proto_pool_pages result;
	uint32_t some, got = 0;

	for (uint32_t done = 0; done < n; done += some) {
		int r;

		some = batch(n - done);
		params.pool = pool ? pool->id : 0;
		params.pages_bytes = proto_put_pages(params.pages, pages + done, some);
		params.keys_bytes = some * FMHA_POOL_KEY_BYTES;
		memcpy(params.keys, keys[done], params.keys_bytes);
		r = call(pool, __func__, PROTO_POOL_SEAL, &params, &result, err);
		if (r == 0)
			r = get_pages(pool, &result, some, ret_pages + done, &got, err);
		if (r == 0 && got != some)
			r = fmha_error_set(err, FMHA_EPROTO, "pool: %u of %u pages answered", got,
					   some);
		if (r < 0)
			return r;
	}
	return 0;
}

int fmha_pool_find(struct fmha_pool *pool, uint32_t n, const uint8_t (*keys)[FMHA_POOL_KEY_BYTES],
		   uint32_t *ret_pages, uint32_t *ret_n, struct fmha_error *err)
{
	struct proto_pool_find_params params;
	struct proto_pool_pages result;
	uint32_t some, got = 0;

	for (*ret_n = 0; *ret_n < n;) {
		int r;

		some = batch(n - *ret_n);
		params.pool = pool ? pool->id : 0;
		params.keys_bytes = some * FMHA_POOL_KEY_BYTES;
		memcpy(params.keys, keys[*ret_n], params.keys_bytes);
		r = call(pool, __func__, PROTO_POOL_FIND, &params, &result, err);
		if (r == 0)
			r = get_pages(pool, &result, some, ret_pages + *ret_n, &got, err);
		if (r < 0)
			return r;
		*ret_n += got;
		pool->info.coming = result.coming;
		if (got < some)
			break;
	}
	return 0;
}

int fmha_pool_give_back(struct fmha_pool *pool, uint32_t n, const uint32_t *pages,
			struct fmha_error *err)
{
	struct proto_pool_give_back_params params;
	uint32_t some;

	for (uint32_t done = 0; done < n; done += some) {
		int r;

		some = batch(n - done);
		params.pool = pool ? pool->id : 0;
		params.pages_bytes = proto_put_pages(params.pages, pages + done, some);
		r = call(pool, __func__, PROTO_POOL_GIVE_BACK, &params, NULL, err);
		if (r < 0)
			return r;
	}
	return 0;
}

void *fmha_pool_data(const struct fmha_pool *pool)
{
	return pool ? pool->data : NULL;
}

int fmha_pool_memory(const struct fmha_pool *pool, struct fmha_memory *ret_memory,
		     struct fmha_error *err)
{
	int r = client_check(pool && ret_memory ? pool->client : NULL, __func__, err);

	if (r < 0)
		return r;
	if (!pool->on_gpu)
		return fmha_error_set_field(err, FMHA_ENOTSUP, "pool",
					    "the pool lies in the machine's memory");
	*ret_memory = (struct fmha_memory){.struct_size = sizeof(*ret_memory),
					   .kind = FMHA_MEMORY_VMM_FD,
					   .fd = pool->fd,
					   .size = proto_device_bytes(pool_bytes(pool))};
	return 0;
}

/* Whether @device computes on what the pool has. */
static int check_reaches(const struct fmha_pool *pool, const struct fmha_device_info *info,
			 struct fmha_error *err)
{
	if (pool->on_gpu && info->device != pool->device)
		return fmha_error_set_field(err, FMHA_ENOTSUP, "device",
					    "the pool lies in the memory of device %u",
					    pool->device);
	if (!pool->on_gpu && strcmp(info->backend, "cpu") != 0)
		return fmha_error_set_field(
			err, FMHA_ENOTSUP, "device",
			"a pool's pages lie in the machine's memory, which device %u (%s) does "
			"not compute on: open one of that device's memory",
			info->device, info->backend);
	if (pool->info.read_only)
		return fmha_error_set_field(err, FMHA_EPERM, "pool",
					    "a device may write what it has, and this user reads "
					    "the pool only");
	return 0;
}

int fmha_pool_buffer(struct fmha_pool *pool, struct fmha_device *device,
		     struct fmha_buffer **ret_buffer, struct fmha_error *err)
{
	struct fmha_memory memory = {.struct_size = sizeof(memory), .kind = FMHA_MEMORY_FD};
	struct fmha_device_info info = {0};
	void *data;
	int r = client_check(pool && device && ret_buffer ? pool->client : NULL, __func__, err);

	if (r == 0)
		r = fmha_device_info(device, &info, err);
	if (r < 0)
		return r;
	r = check_reaches(pool, &info, err);
	if (r < 0)
		return r;
	if (pool->on_gpu)
		memory.kind = FMHA_MEMORY_VMM_FD;
	memory.fd = pool->fd;
	memory.size = pool_bytes(pool);
	r = fmha_buffer_import(device, &memory, ret_buffer, err);
	data = r < 0 ? NULL : fmha_buffer_data(*ret_buffer);
	if (data)
		(void)madvise(data, memory.size, MADV_DONTFORK); /* as map_pool() */
	return r;
}

void fmha_pool_get_info(const struct fmha_pool *pool, struct fmha_pool_info *ret_info)
{
	*ret_info = pool->info;
}

struct fmha_pool *fmha_pool_close(struct fmha_pool *pool)
{
	struct connection *c;

	if (!pool)
		return NULL;
	if (pool->data)
		(void)munmap(pool->data, pool_bytes(pool));
	if (pool->fd >= 0)
		(void)close(pool->fd);
	/* A child has a copy of the handle, which is its parent's to close at the daemon. */
	if (pool->id && client_check_process(pool->client, NULL) == 0) {
		c = link_get_if(&pool->client->front, pool->generation);
		if (c) {
			(void)connection_call(
				c, PROTO_POOL_CLOSE, &(struct proto_pool_params){.pool = pool->id},
				-1, deadline_after_ms(RELEASE_TIMEOUT_MS), NULL, NULL, NULL);
			c = connection_unref(c);
		}
	}
	(void)client_unref(pool->client);
	free(pool);
	return NULL;
}

int fmha_pool_share(struct fmha_client *client, const char *name, uint32_t uid,
		    enum fmha_pool_access access, uint8_t ret_share[FMHA_POOL_SHARE_BYTES],
		    struct fmha_error *err)
{
	struct proto_pool_share_params params = {.uid = uid};
	struct proto_pool_share_result result;
	int r = client_check(name && ret_share ? client : NULL, __func__, err);

	if (r == 0 && access > FMHA_POOL_WRITES)
		r = fmha_error_set_field(err, FMHA_EINVAL, "access", "access %u: there is none",
					 (unsigned)access);
	if (r == 0)
		r = client_copy_name(params.name, sizeof(params.name), name, "name", err);
	if (r < 0)
		return r;
	params.access = (enum proto_access)access;
	r = link_call(&client->front, PROTO_POOL_SHARE, &params, -1, client_deadline(client),
		      &result, NULL, err);
	if (r == 0)
		memcpy(ret_share, result.share, sizeof(result.share));
	return r;
}

int fmha_pool_drop(struct fmha_client *client, const char *name, struct fmha_error *err)
{
	struct proto_pool_drop_params params = {0};
	int r = client_check(name ? client : NULL, __func__, err);

	if (r == 0)
		r = client_copy_name(params.name, sizeof(params.name), name, "name", err);
	if (r < 0)
		return r;
	return link_call(&client->front, PROTO_POOL_DROP, &params, -1, client_deadline(client),
			 NULL, NULL, err);
}
