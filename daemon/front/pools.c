/* SPDX-License-Identifier: MIT */
#include "pool_impl.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/pidfd.h>
#include <sys/random.h>
#include <unistd.h>

#include <kvpool/kvpool.h>
#include <proto/cleanup.h>
#include <proto/error.h>
#include <proto/page_numbers.h>

#include <base/clock.h>
#include <json/json.h>

#define PAGE_UNIT        4096
#define PLACES_MOST      (1u << 18) /* of a file */
#define PAGES_MOST       (1u << 16) /* the book-keeping of more is not made in one turn of the loop */
#define OPEN_MOST        64         /* pools that one connection has open */
#define ABANDON_PER_STEP 2048
#define EMPTY_PER_WORK   256

/* A connection that has a pool open, and afterwards what is left of it. */
struct pool_user {
	struct list in_client; /* client.pools; then pool.waiting */
	struct list in_open;   /* pool.open */
	struct pool *pool;
	struct account *account; /* the pool's own user's, or another's whom that one lets in */
	bool reads_only;
	uint32_t id;
	struct kvpool_holder holder;
	int process;   /* a descriptor of the client's process; -1: it cannot be had */
	uv_poll_t end; /* of it */
	bool closed;   /* by itself, so that nobody has to wait for the process */
	struct chore chore;
	uv_work_t work;
	uint32_t pages[EMPTY_PER_WORK], n_pages; /* being emptied */
	uint32_t next_page;                      /* where the next of these are looked for */
	bool failed;                             /* they could not be */
	bool waits_for_device; /* in pool.waiting, for a worker that empties them */
};

/* ---- pools ---- */

static void on_idle_timer(uv_timer_t *timer);

static struct pool *find_pool(const struct pools *pools, uint32_t uid, const char *name)
{
	list_for_each_entry(struct pool, pool, &pools->list, in_pools) {
		if (pool->account->uid == uid && strcmp(pool->name, name) == 0)
			return pool;
	}
	return NULL;
}

/* What charge_pool() has charged. */
static void release_pool(struct account *account, uint64_t bytes, uint64_t file_bytes)
{
	account_release(account, ACCOUNT_POOL_SPILL, file_bytes);
	account_release(account, ACCOUNT_POOL_BYTES, bytes);
	account_release(account, ACCOUNT_DESCRIPTORS, 1);
	account_release(account, ACCOUNT_POOLS, 1);
}

static void pool_free(struct pool *pool)
{
	list_remove(&pool->in_pools);
	(void)pool_file_free(pool->file);
	(void)kvpool_free(pool->pages);
	if (pool->fd >= 0)
		(void)close(pool->fd);
	release_pool(pool->account, pool->charged, pool->charged_file);
	(void)account_put(pool->account);
	free(pool);
}

/* Drops what nobody has had open for long, and looks again when the next one is due. */
static void drop_idle(struct pools *pools)
{
	uint64_t most_ms = pools->front->limits.value[LIMIT_POOL_IDLE_S] * 1000,
		 next_ms = UINT64_MAX;
	uint64_t now = clock_ns();

	if (most_ms == 0)
		return;
	list_for_each_entry(struct pool, pool, &pools->list, in_pools) {
		uint64_t idle_ms = (now - pool->idle_since_ns) / NS_PER_MS;

		if (pool->n_users > 0)
			continue;
		if (idle_ms < most_ms) {
			if (most_ms - idle_ms < next_ms)
				next_ms = most_ms - idle_ms;
			continue;
		}
		pool_file_remove(pool->file);
		pool_free(pool);
	}
	if (next_ms != UINT64_MAX)
		uv_timer_start(&pools->timer, on_idle_timer, next_ms, 0);
}

static void on_idle_timer(uv_timer_t *timer)
{
	drop_idle(container_of(timer, struct pools, timer));
}

static void pool_end_use(struct pool *pool)
{
	pool->idle_since_ns = clock_ns();
	if (--pool->n_users > 0)
		return;
	if (pool->dropped)
		pool_free(pool);
	else
		drop_idle(pool->pools);
}

/* Charges all that a pool takes. Return: 0, FMHA_EQUOTA. */
static int charge_pool(struct account *account, uint64_t bytes, uint64_t file_bytes,
		       struct fmha_error *err)
{
	int r = account_charge(account, ACCOUNT_POOLS, 1, err);

	if (r < 0)
		return r;
	r = account_charge(account, ACCOUNT_DESCRIPTORS, 1, err);
	if (r == 0) {
		r = account_charge(account, ACCOUNT_POOL_BYTES, bytes, err);
		if (r == 0) {
			r = account_charge(account, ACCOUNT_POOL_SPILL, file_bytes, err);
			if (r < 0)
				account_release(account, ACCOUNT_POOL_BYTES, bytes);
		}
		if (r < 0)
			account_release(account, ACCOUNT_DESCRIPTORS, 1);
	}
	if (r < 0)
		account_release(account, ACCOUNT_POOLS, 1);
	return r;
}

/* A file of so many zeros, whose size nobody can change. */
static int make_file(uint64_t bytes)
{
	_cleanup_(closep) int fd = memfd_create("fmhad pool", MFD_CLOEXEC | MFD_ALLOW_SEALING);

	/* The mode: whoever gets a descriptor to read opens no other one to write. */
	if (fd < 0 || ftruncate(fd, (off_t)bytes) < 0 || fchmod(fd, 0600) < 0 ||
	    fcntl(fd, F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL) < 0)
		return -1;
	return take_fd(&fd);
}

static int check_file(const struct front *front, const struct proto_pool_open_params *params,
		      struct fmha_error *err)
{
	if (!*front->config.pool_spill)
		return fmha_error_set_field(err, FMHA_ENOTSUP, "n_spill",
					    "this daemon's configuration names no folder for "
					    "pools' files (pool_spill)");
	if (params->n_spill > PLACES_MOST)
		return fmha_error_set_field(err, FMHA_EINVAL, "n_spill",
					    "%u pages: a pool's file has %u at most",
					    params->n_spill, PLACES_MOST);
	if (params->page_bytes > POOL_FILE_PAGE_MOST)
		return fmha_error_set_field(err, FMHA_EINVAL, "n_spill",
					    "pages of more than %u bytes are not kept in files",
					    POOL_FILE_PAGE_MOST);
	return 0;
}

static int check_new(struct front *front, const struct proto_pool_open_params *params,
		     struct worker_slot **ret_slot, struct fmha_error *err)
{
	if (params->n_pages == 0)
		return fmha_error_set_field(err, FMHA_ENOENT, "name",
					    "this user has no pool \"%s\"", params->name);
	if (params->n_pages > PAGES_MOST)
		return fmha_error_set_field(err, FMHA_EINVAL, "n_pages",
					    "%u pages: a pool has %u at most", params->n_pages,
					    PAGES_MOST);
	if (params->page_bytes == 0 || params->page_bytes % PAGE_UNIT != 0 ||
	    params->page_bytes > INT64_MAX / PAGES_MOST)
		return fmha_error_set_field(err, FMHA_EINVAL, "page_bytes",
					    "%llu is no multiple of %d",
					    (unsigned long long)params->page_bytes, PAGE_UNIT);
	if (params->on_device)
		return pool_device_check(front, params, ret_slot, err);
	return params->n_spill ? check_file(front, params, err) : 0;
}

static int pool_new(struct client *client, const struct proto_pool_open_params *params,
		    struct pool **ret_pool, struct fmha_error *err)
{
	struct pools *pools = client->front->pools;
	uint64_t bytes, charged, file_bytes = 0, secret;
	struct worker_slot *slot = NULL;
	struct pool *pool;
	int r = check_new(client->front, params, &slot, err);

	if (r < 0)
		return r;
	bytes = params->n_pages * params->page_bytes;
	if (slot)
		bytes = proto_device_bytes(bytes);
	charged = bytes + kvpool_cost(params->n_pages);
	if (params->n_spill > 0) {
		charged += pool_file_cost(params->n_pages, params->n_spill);
		file_bytes = pool_file_bytes(params->page_bytes, params->n_spill);
	}
	r = charge_pool(client->account, charged, file_bytes, err);
	if (r < 0)
		return r;
	pool = calloc(1, sizeof(*pool));
	if (!pool) {
		release_pool(client->account, charged, file_bytes);
		return fmha_error_set(err, FMHA_ENOMEM, "pool: out of memory");
	}
	pool->pools = pools;
	pool->account = client->account;
	pool->account->n_references++;
	pool->charged = charged;
	pool->charged_file = file_bytes;
	pool->page_bytes = params->page_bytes;
	pool->n_pages = params->n_pages;
	memcpy(pool->name, params->name, sizeof(pool->name));
	memcpy(pool->layout, params->layout, sizeof(pool->layout));
	list_init(&pool->waiting);
	list_init(&pool->open);
	list_init(&pool->openings);
	list_append(&pools->list, &pool->in_pools);
	pool->slot = slot;
	pool->fd = slot ? -1 : make_file(bytes);
	if ((slot || pool->fd >= 0) && getrandom(&secret, sizeof(secret), 0) == sizeof(secret))
		pool->pages = kvpool_new(params->n_pages, secret);
	if (pool->pages && params->n_spill > 0)
		pool->file = pool_file_new(pool, params->n_spill, secret);
	if (!pool->pages || (params->n_spill > 0 && !pool->file)) {
		pool_free(pool);
		return fmha_error_set(err, FMHA_ENOMEM, "pool: out of memory or descriptors");
	}
	r = slot ? pool_device_make(pool, bytes, err) : 0;
	if (r < 0) {
		pool_free(pool);
		return r;
	}
	pool->n_users += slot != NULL; /* the worker */
	*ret_pool = pool;
	return 0;
}

/* ---- who has one open ---- */

static int charge_user(struct account *account, const struct pool *pool, struct fmha_error *err)
{
	int r = account_charge(account, ACCOUNT_DESCRIPTORS, 1, err);

	if (r == 0) {
		r = account_charge(account, ACCOUNT_POOL_BYTES, kvpool_holder_cost(pool->n_pages),
				   err);
		if (r < 0)
			account_release(account, ACCOUNT_DESCRIPTORS, 1);
	}
	return r;
}

static void release_user(struct account *account, const struct pool *pool)
{
	account_release(account, ACCOUNT_POOL_BYTES, kvpool_holder_cost(pool->n_pages));
	account_release(account, ACCOUNT_DESCRIPTORS, 1);
}

static void user_free(struct pool_user *user)
{
	struct pool *pool = user->pool;

	if (user->process >= 0)
		(void)close(user->process);
	kvpool_holder_deinit(&user->holder);
	release_user(user->account, pool);
	(void)account_put(user->account);
	pool_end_use(pool);
	free(user);
}

static void on_poll_closed(uv_handle_t *handle)
{
	user_free(container_of(handle, struct pool_user, end));
}

static void user_close(struct pool_user *user)
{
	if (user->process >= 0)
		uv_close((uv_handle_t *)&user->end, on_poll_closed);
	else
		user_free(user);
}

static void empty_more(struct pool_user *user);

/* On another thread: holes read as zeros, and the machine has the memory back meanwhile. */
static void do_empty(uv_work_t *work)
{
	struct pool_user *user = container_of(work, struct pool_user, work);
	uint64_t bytes = user->pool->page_bytes;

	for (uint32_t i = 0; i < user->n_pages && !user->failed; i++)
		user->failed = fallocate(user->pool->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
					 (off_t)(user->pages[i] * bytes), (off_t)bytes) < 0;
}

static void have_emptied(struct pool_user *user)
{
	struct doing *doing = &user->pool->pools->front->doing;
	struct doing_before before = doing_begin(doing, DOING_COMPLETION, user->account->uid);

	for (uint32_t i = 0; i < user->n_pages && !user->failed; i++)
		kvpool_reclaim(user->pool->pages, &user->holder, user->pages[i]);
	empty_more(user);
	doing_end(doing, before);
}

static void on_emptied(uv_work_t *work, int status)
{
	(void)status; /* it is never cancelled */
	have_emptied(container_of(work, struct pool_user, work));
}

/* The next worker empties the same pages. Nobody gets those of a pool that was dropped. */
static void wait_for_device(struct pool_user *user)
{
	if (user->pool->dropped) {
		user_close(user);
		return;
	}
	user->waits_for_device = true;
	list_append(&user->pool->waiting, &user->in_client);
}

static void on_cleared(void *owner, const union proto_any_result *result, int fd,
		       const struct fmha_error *error)
{
	struct pool_user *user = owner;

	(void)fd;
	user->failed = !result;
	if (!result && error->code == FMHA_ECONN) {
		user->failed = false;
		wait_for_device(user);
	} else {
		have_emptied(user);
	}
}

static void clear_on_device(struct pool_user *user)
{
	user->waits_for_device = false;
	if (!pool_device_clear(user->pool, user->pages, user->n_pages, on_cleared, user))
		wait_for_device(user);
}

/* A worker that can clear pages is there (again). */
static void on_device_ready(const struct worker_slot *slot)
{
	const struct pools *pools = slot->front->pools;
	struct list again;

	list_init(&again);
	list_for_each_entry(struct pool, pool, &pools->list, in_pools) {
		list_for_each_entry(struct pool_user, user, &pool->waiting, in_client) {
			if (pool->slot != slot || !user->waits_for_device)
				continue;
			list_remove(&user->in_client);
			list_append(&again, &user->in_client);
		}
	}
	/* Who has to wait once more is in the pool's list by then. */
	list_for_each_entry(struct pool_user, user, &again, in_client) {
		list_remove(&user->in_client);
		clear_on_device(user);
	}
}

/* What cannot be emptied stays out of use, and its user's account shows it. */
static void empty_more(struct pool_user *user)
{
	struct pool *pool = user->pool;

	user->n_pages = 0;
	if (!user->failed)
		user->n_pages = kvpool_lost(pool->pages, &user->holder, user->next_page,
					    EMPTY_PER_WORK, user->pages);
	if (user->n_pages > 0)
		user->next_page = user->pages[user->n_pages - 1] + 1;
	if (user->n_pages > 0 && pool->slot)
		clear_on_device(user);
	else if (user->n_pages == 0 ||
		 uv_queue_work(&pool->pools->front->loop, &user->work, do_empty, on_emptied) < 0)
		user_close(user);
}

static void on_process_end(uv_poll_t *poll, int status, int events)
{
	struct pool_user *user = container_of(poll, struct pool_user, end);
	struct doing *doing = &user->pool->pools->front->doing;
	struct doing_before before = doing_begin(doing, DOING_COMPLETION, user->account->uid);

	(void)status, (void)events;
	uv_poll_stop(poll);
	list_remove(&user->in_client);
	empty_more(user);
	doing_end(doing, before);
}

/* Its pages of which nobody can tell when they are written last are out until the pool is dropped. */
static bool abandon_step(struct chore *chore)
{
	struct pool_user *user = container_of(chore, struct pool_user, chore);

	if (!kvpool_abandon(user->pool->pages, &user->holder, ABANDON_PER_STEP))
		return true;
	if (user->pool->dropped)
		user_close(user);
	else if (user->holder.n_leased == 0 || user->closed)
		empty_more(user);
	else if (user->process < 0 || uv_poll_start(&user->end, UV_READABLE, on_process_end) < 0)
		user_close(user);
	else
		list_append(&user->pool->waiting, &user->in_client);
	return false;
}

static void user_end(struct pool_user *user)
{
	struct pool *pool = user->pool;

	list_remove(&user->in_client);
	list_remove(&user->in_open);
	pool->n_open -= user->account == pool->account;
	user->account->n_references++; /* the chore's */
	chore_start(&pool->pools->chores, &user->chore, user->account, abandon_step);
}

/* Nobody opens it any more; it is gone with the last of its users. */
static void pool_end(struct pool *pool)
{
	pool->dropped = true;
	list_remove(&pool->in_pools);
	list_append(&pool->pools->ended, &pool->in_pools);
	pool_file_remove(pool->file);
	/* Those whom its user lets in. */
	list_for_each_entry(struct pool_user, user, &pool->open, in_open)
		user_end(user);
	/* Nobody gets these pages: no need to know when they are written last. */
	list_for_each_entry(struct pool_user, user, &pool->waiting, in_client) {
		list_remove(&user->in_client);
		user_close(user);
	}
	if (pool->n_users == 0)
		pool_free(pool);
}

void pools_forget(struct client *client)
{
	list_for_each_entry(struct pool_opening, opening, &client->pool_openings, in_client)
		pool_opening_free(opening);
	list_for_each_entry(struct pool_user, user, &client->pools, in_client)
		user_end(user);
}

static struct pool_user *find_user(const struct client *client, uint32_t id, struct fmha_error *err)
{
	list_for_each_entry(struct pool_user, user, &client->pools, in_client) {
		if (user->id == id)
			return user;
	}
	fmha_error_set_field(err, FMHA_ENOENT, "pool", "this connection has no pool %u open", id);
	return NULL;
}

/* A descriptor of the client's process, with a handle that tells its end; -1: there is none to be had, of a process
 * that this one does not see (in a container) for example. */
static int watch_process(const struct client *client, uv_poll_t *ret_end)
{
	int fd = client->pid ? pidfd_open((pid_t)client->pid, 0) : -1;

	if (fd < 0 || uv_poll_init(&client->front->loop, ret_end, fd) == 0)
		return fd;
	(void)close(fd);
	return -1;
}

static int user_new(struct client *client, struct pool *pool, bool reads_only,
		    struct pool_user **ret_user, struct fmha_error *err)
{
	struct pool_user *user;
	int r = charge_user(client->account, pool, err);

	if (r < 0)
		return r;
	user = calloc(1, sizeof(*user));
	if (!user || !kvpool_holder_init(pool->pages, &user->holder)) {
		free(user);
		release_user(client->account, pool);
		return fmha_error_set(err, FMHA_ENOMEM, "pool: out of memory");
	}
	pool->n_open += client->account == pool->account;
	pool->n_users++;
	user->pool = pool;
	user->account = client->account;
	user->account->n_references++;
	user->reads_only = reads_only;
	list_append(&pool->open, &user->in_open);
	user->id = ++client->last_pool;
	user->process = watch_process(client, &user->end);
	list_append(&client->pools, &user->in_client);
	*ret_user = user;
	return 0;
}

/* ---- requests ---- */

static bool is_name(const char *name)
{
	static const char allowed[] =
		"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";

	return name[0] && strspn(name, allowed) == strlen(name);
}

static int check_same(const struct pool *pool, const struct proto_pool_open_params *params,
		      struct fmha_error *err)
{
	const uint32_t on_device = pool->slot ? pool->slot->index + 1 : 0;

	if (params->on_device != on_device && on_device)
		return fmha_error_set_field(err, FMHA_EINVAL, "on_device",
					    "pool \"%s\" lies in the memory of device %u",
					    pool->name, on_device - 1);
	if (params->on_device != on_device)
		return fmha_error_set_field(err, FMHA_EINVAL, "on_device",
					    "pool \"%s\" lies in the machine's memory", pool->name);
	if (params->layout[0] && strcmp(params->layout, pool->layout) != 0)
		return fmha_error_set_field(err, FMHA_EINVAL, "layout", "pool \"%s\" holds \"%s\"",
					    pool->name, pool->layout);
	if (params->n_pages && params->n_pages != pool->n_pages)
		return fmha_error_set_field(err, FMHA_EINVAL, "n_pages", "pool \"%s\" has %u pages",
					    pool->name, pool->n_pages);
	if (params->n_pages && params->page_bytes != pool->page_bytes)
		return fmha_error_set_field(err, FMHA_EINVAL, "page_bytes",
					    "pool \"%s\" has pages of %llu bytes", pool->name,
					    (unsigned long long)pool->page_bytes);
	return 0;
}

static struct pool *find_shared(const struct pools *pools, const struct client *client,
				const struct proto_pool_open_params *params, bool *ret_reads_only)
{
	list_for_each_entry(struct pool, pool, &pools->list, in_pools) {
		const struct pool_share *share = pool_share_find(pool, client->uid, params->share);

		*ret_reads_only = share && !share->writes;
		if (share)
			return pool;
	}
	return NULL;
}

/* The pool that is asked for, made where there is none. Return: 0, or why not. */
static int get_pool(struct client *client, const struct proto_pool_open_params *params,
		    struct pool **ret_pool, struct proto_pool_open_result *ret_result,
		    struct fmha_error *err)
{
	bool reads_only = false;

	if (params->share_bytes > 0) {
		if (params->share_bytes == PROTO_SHARE_BYTES)
			*ret_pool = find_shared(client->front->pools, client, params, &reads_only);
		ret_result->read_only = reads_only;
		if (!*ret_pool)
			return fmha_error_set_field(err, FMHA_ENOENT, "share",
						    "no pool is shared with this user by that");
		return check_same(*ret_pool, params, err);
	}
	if (!is_name(params->name))
		return fmha_error_set_field(err, FMHA_EINVAL, "name",
					    "a name has letters, digits, '.', '_' and '-'");
	*ret_pool = find_pool(client->front->pools, client->uid, params->name);
	if (*ret_pool)
		return check_same(*ret_pool, params, err);
	ret_result->created = true;
	return pool_new(client, params, ret_pool, err);
}

/* The pool's memory, or one more descriptor to read it. */
static int dup_memory(const struct pool *pool, bool reads_only)
{
	char path[32];

	if (!reads_only)
		return fcntl(pool->fd, F_DUPFD_CLOEXEC, 0);
	(void)snprintf(path, sizeof(path), "/proc/self/fd/%d", pool->fd);
	return open(path, O_RDONLY | O_CLOEXEC);
}

/* The pool's memory is there. @result: created and read_only are said. */
static int open_for(struct client *client, uint32_t id, struct pool *pool,
		    struct proto_pool_open_result *result, struct fmha_error *err)
{
	struct pool_user *user = NULL;
	int r = user_new(client, pool, result->read_only, &user, err), fd;

	if (r < 0)
		return r;
	fd = dup_memory(pool, result->read_only);
	if (fd < 0) {
		user_end(user);
		return fmha_error_set(err, FMHA_EIO, "pool: %s", strerror(errno));
	}
	result->pool = user->id;
	result->page_bytes = pool->page_bytes;
	result->n_pages = pool->n_pages;
	connection_answer(&client->connection, id, PROTO_POOL_OPEN, result, fd);
	return 0;
}

/* Memory that a worker has made is there, or @failed says why not: answers those who wait. */
static void pool_made(struct pool *pool, const struct fmha_error *failed)
{
	list_for_each_entry(struct pool_opening, opening, &pool->openings, in_pool) {
		struct client *client = opening->client;
		struct proto_pool_open_result result = {.created = opening->created};
		struct fmha_error err;
		uint32_t id = opening->id;

		pool_opening_free(opening);
		if (failed)
			connection_answer_error(&client->connection, id, failed);
		else if (open_for(client, id, pool, &result, &err) < 0)
			connection_answer_error(&client->connection, id, &err);
	}
	if (failed)
		pool_end(pool);
	pool_end_use(pool); /* the worker's */
}

static uint32_t count_open(const struct client *client)
{
	uint32_t n = 0;

	list_for_each_entry(struct pool_user, user, &client->pools, in_client)
		n++;
	list_for_each_entry(struct pool_opening, opening, &client->pool_openings, in_client)
		n++;
	return n;
}

static int on_open(struct client *client, uint32_t id, const struct proto_pool_open_params *params,
		   struct fmha_error *err)
{
	struct proto_pool_open_result result = {0};
	struct pool *pool = NULL;
	int r;

	if (count_open(client) >= OPEN_MOST)
		return fmha_error_set_field(err, FMHA_EQUOTA, "name",
					    "a connection has %d pools open at most", OPEN_MOST);
	r = get_pool(client, params, &pool, &result, err);
	if (r < 0)
		return r;
	if (pool_is_being_made(pool))
		return pool_opening_new(client, id, pool, result.created, err);
	r = open_for(client, id, pool, &result, err);
	if (r < 0 && result.created)
		pool_end(pool);
	return r;
}

static void answer_pages(struct client *client, uint32_t id, enum proto_method method,
			 const uint32_t *pages, uint32_t n, uint32_t coming)
{
	struct proto_pool_pages result;

	result.coming = coming;
	result.pages_bytes = proto_put_pages(result.pages, pages, n);
	connection_answer(&client->connection, id, method, &result, -1);
}

static int check_writes(const struct pool_user *user, struct fmha_error *err)
{
	if (!user->reads_only)
		return 0;
	return fmha_error_set_field(err, FMHA_EPERM, "pool",
				    "pool \"%s\" is another user's, who lets this one read",
				    user->pool->name);
}

static int on_lease(struct client *client, uint32_t id,
		    const struct proto_pool_lease_params *params, struct fmha_error *err)
{
	struct pool_user *user = find_user(client, params->pool, err);
	uint32_t pages[PROTO_POOL_BATCH], n;

	if (!user || check_writes(user, err) < 0)
		return err->code;
	if (params->n == 0 || params->n > PROTO_POOL_BATCH)
		return fmha_error_set_field(err, FMHA_EINVAL, "n", "%u pages: 1 to %d at a time",
					    params->n, PROTO_POOL_BATCH);
	n = kvpool_lease(user->pool->pages, &user->holder, params->n, pages);
	answer_pages(client, id, PROTO_POOL_LEASE, pages, n, 0);
	return 0;
}

static int result_error(enum kvpool_result result, const struct pool *pool, uint32_t i,
			uint32_t page, struct fmha_error *err)
{
	if (result == KVPOOL_NO_PAGE)
		return fmha_error_set_field(err, FMHA_EINVAL, "pages",
					    "entry %u: page %u: pool \"%s\" has %u", i, page,
					    pool->name, pool->n_pages);
	if (result == KVPOOL_MOST_PINS)
		return fmha_error_set_field(err, FMHA_EINVAL, "keys",
					    "entry %u: its page is pinned too often here", i);
	return fmha_error_set_field(err, FMHA_EINVAL, "pages", "entry %u: page %u is not %s here",
				    i, page,
				    result == KVPOOL_NOT_LEASED ? "leased" : "leased or pinned");
}

/* Of the first @n of a seal that is refused: who is not told of pages can give none back. */
static void unpin_others(struct pool_user *user, const uint8_t *leased, const uint32_t *pages,
			 uint32_t n)
{
	for (uint32_t i = 0; i < n; i++)
		if (pages[i] != proto_get_page(leased, i))
			(void)kvpool_give_back(user->pool->pages, &user->holder, pages[i]);
}

static int on_seal(struct client *client, uint32_t id, const struct proto_pool_seal_params *params,
		   struct fmha_error *err)
{
	struct pool_user *user = find_user(client, params->pool, err);
	uint32_t pages[PROTO_POOL_BATCH], n = params->pages_bytes / 4;

	if (!user || check_writes(user, err) < 0)
		return err->code;
	if (params->pages_bytes % 4 != 0 || params->keys_bytes != n * KVPOOL_KEY_BYTES)
		return fmha_error_set_field(err, FMHA_EINVAL, "keys",
					    "%u bytes of pages, %u of keys: 4 and 32 a page",
					    params->pages_bytes, params->keys_bytes);
	for (uint32_t i = 0; i < n; i++) {
		uint32_t page = proto_get_page(params->pages, i);
		enum kvpool_result result = kvpool_seal(user->pool->pages, &user->holder, page,
							&params->keys[i * KVPOOL_KEY_BYTES],
							&pages[i]);

		if (result != KVPOOL_OK) {
			unpin_others(user, params->pages, pages, i);
			return result_error(result, user->pool, i, page, err);
		}
		if (pages[i] == page)
			pool_file_sealed(user->pool->file, page);
	}
	answer_pages(client, id, PROTO_POOL_SEAL, pages, n, 0);
	return 0;
}

static int on_find(struct client *client, uint32_t id, const struct proto_pool_find_params *params,
		   struct fmha_error *err)
{
	struct pool_user *user = find_user(client, params->pool, err);
	const uint8_t(*keys)[KVPOOL_KEY_BYTES] = (const uint8_t(*)[KVPOOL_KEY_BYTES])params->keys;
	uint32_t pages[PROTO_POOL_BATCH], n, n_keys;

	if (!user)
		return err->code;
	if (params->keys_bytes % KVPOOL_KEY_BYTES != 0)
		return fmha_error_set_field(err, FMHA_EINVAL, "keys", "%u bytes: 32 a key",
					    params->keys_bytes);
	n_keys = params->keys_bytes / KVPOOL_KEY_BYTES;
	n = kvpool_find(user->pool->pages, &user->holder, keys, n_keys, pages);
	answer_pages(client, id, PROTO_POOL_FIND, pages, n,
		     pool_file_want(user->pool->file, keys + n, n_keys - n));
	return 0;
}

static int on_give_back(struct client *client, uint32_t id,
			const struct proto_pool_give_back_params *params, struct fmha_error *err)
{
	struct pool_user *user = find_user(client, params->pool, err);

	if (!user)
		return err->code;
	if (params->pages_bytes % 4 != 0)
		return fmha_error_set_field(err, FMHA_EINVAL, "pages", "%u bytes: 4 a page",
					    params->pages_bytes);
	for (uint32_t i = 0; i < params->pages_bytes / 4; i++) {
		uint32_t page = proto_get_page(params->pages, i);
		enum kvpool_result result = kvpool_give_back(user->pool->pages, &user->holder,
							     page);

		if (result != KVPOOL_OK)
			return result_error(result, user->pool, i, page, err);
	}
	connection_answer(&client->connection, id, PROTO_POOL_GIVE_BACK, &(struct proto_empty){0},
			  -1);
	return 0;
}

static int on_close(struct client *client, uint32_t id, const struct proto_pool_params *params,
		    struct fmha_error *err)
{
	struct pool_user *user = find_user(client, params->pool, err);

	if (!user)
		return err->code;
	user->closed = true;
	user_end(user);
	connection_answer(&client->connection, id, PROTO_POOL_CLOSE, &(struct proto_empty){0}, -1);
	return 0;
}

static int check_made(const struct pool *pool, struct fmha_error *err)
{
	if (!pool_is_being_made(pool))
		return 0;
	return fmha_error_set_field(err, FMHA_EBUSY, "name", "pool \"%s\" is being made",
				    pool->name);
}

static int on_drop(struct client *client, uint32_t id, const struct proto_pool_drop_params *params,
		   struct fmha_error *err)
{
	struct pools *pools = client->front->pools;
	struct pool *pool = find_pool(pools, client->uid, params->name);

	if (!pool && !(is_name(params->name) && pool_file_drop(pools, client->uid, params->name)))
		return fmha_error_set_field(err, FMHA_ENOENT, "name",
					    "this user has no pool \"%s\"", params->name);
	if (pool && check_made(pool, err) < 0)
		return err->code;
	if (pool && pool->n_open > 0)
		return fmha_error_set_field(err, FMHA_EBUSY, "name",
					    "%u connections have pool \"%s\" open", pool->n_open,
					    pool->name);
	if (pool)
		pool_end(pool);
	connection_answer(&client->connection, id, PROTO_POOL_DROP, &(struct proto_empty){0}, -1);
	return 0;
}

static int on_share(struct client *client, uint32_t id,
		    const struct proto_pool_share_params *params, struct fmha_error *err)
{
	struct pool *pool = find_pool(client->front->pools, client->uid, params->name);
	struct proto_pool_share_result result = {0};
	int r = 0;

	if (!pool)
		return fmha_error_set_field(err, FMHA_ENOENT, "name",
					    "this user has no pool \"%s\"", params->name);
	if (params->uid == client->uid)
		return fmha_error_set_field(err, FMHA_EINVAL, "uid", "user %u is who has the pool",
					    params->uid);
	if (pool->slot && params->access == PROTO_READS)
		return fmha_error_set_field(err, FMHA_ENOTSUP, "access",
					    "who has a GPU's memory chooses whether it is "
					    "written: nobody can be let in to read only");
	/* So that nobody waits for it whom its owner may put out meanwhile. */
	if (check_made(pool, err) < 0)
		return err->code;
	/* What that user could do until now ends; what is mapped stays mapped. */
	pool_share_end(pool, params->uid);
	list_for_each_entry(struct pool_user, user, &pool->open, in_open) {
		if (user->account->uid == params->uid)
			user_end(user);
	}
	if (params->access != PROTO_NO_ACCESS) {
		r = pool_share_new(pool, params->uid, params->access == PROTO_WRITES, result.share,
				   err);
		result.share_bytes = PROTO_SHARE_BYTES;
	}
	if (r == 0)
		connection_answer(&client->connection, id, PROTO_POOL_SHARE, &result, -1);
	return r;
}

int pools_handle(struct client *client, uint32_t id, enum proto_method method,
		 const union proto_any_params *params, struct fmha_error *err)
{
	switch (method) {
	case PROTO_POOL_OPEN:
		return on_open(client, id, &params->POOL_OPEN, err);
	case PROTO_POOL_CLOSE:
		return on_close(client, id, &params->POOL_CLOSE, err);
	case PROTO_POOL_LEASE:
		return on_lease(client, id, &params->POOL_LEASE, err);
	case PROTO_POOL_SEAL:
		return on_seal(client, id, &params->POOL_SEAL, err);
	case PROTO_POOL_FIND:
		return on_find(client, id, &params->POOL_FIND, err);
	case PROTO_POOL_GIVE_BACK:
		return on_give_back(client, id, &params->POOL_GIVE_BACK, err);
	case PROTO_POOL_SHARE:
		return on_share(client, id, &params->POOL_SHARE, err);
	default:
		return on_drop(client, id, &params->POOL_DROP, err);
	}
}

/* ---- what people see ---- */

cJSON *pools_json(const struct pools *pools, uint32_t uid, bool all)
{
	cJSON *list = cJSON_CreateArray();

	list_for_each_entry(struct pool, pool, &pools->list, in_pools) {
		struct kvpool_counts counts = kvpool_count(pool->pages);
		cJSON *item;

		if (!all && pool->account->uid != uid)
			continue;
		item = json_add_item(list);
		cJSON_AddStringToObject(item, "name", pool->name);
		cJSON_AddNumberToObject(item, "uid", pool->account->uid);
		cJSON_AddStringToObject(item, "layout", pool->layout);
		cJSON_AddNumberToObject(item, "page_bytes", (double)pool->page_bytes);
		cJSON_AddNumberToObject(item, "pages", pool->n_pages);
		cJSON_AddNumberToObject(item, "users", pool->n_users);
		if (pool->slot)
			cJSON_AddNumberToObject(item, "device", pool->slot->index);
		cJSON_AddNumberToObject(item, "free", counts.n_free);
		cJSON_AddNumberToObject(item, "leased", counts.n_leased);
		cJSON_AddNumberToObject(item, "sealed", counts.n_sealed);
		cJSON_AddNumberToObject(item, "pinned", counts.n_pinned);
		cJSON_AddNumberToObject(item, "lost", counts.n_lost);
		cJSON_AddNumberToObject(item, "hits", (double)counts.hits);
		cJSON_AddNumberToObject(item, "misses", (double)counts.misses);
		cJSON_AddNumberToObject(item, "seals", (double)counts.seals);
		cJSON_AddNumberToObject(item, "evictions", (double)counts.evictions);
		cJSON_AddNumberToObject(item, "shares", pool->n_shares);
		pool_file_json(pool->file, item);
	}
	return list;
}

void pools_init(struct pools *pools, struct front *front)
{
	pools->front = front;
	pools->end_use = pool_end_use;
	pools->made = pool_made;
	front->device_ready = on_device_ready;
	list_init(&pools->list);
	list_init(&pools->ended);
	chores_init(&pools->chores, &front->loop, &front->limits, &front->doing);
	uv_timer_init(&front->loop, &pools->timer);
	pool_file_init(pools);
}
