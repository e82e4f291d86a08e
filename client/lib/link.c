/* SPDX-License-Identifier: MIT */
/*
 * link.c: a connection that is opened again when it was lost, and what the peer of each knows our objects by
 * (internal.h).
 */
#include <sys/mman.h>
#include <unistd.h>

#include <proto/error.h>

#include "client.h"

/* ---- timed lock ---- */

int timed_lock_init(struct timed_lock *lock, struct fmha_error *err)
{
	pthread_condattr_t attr;
	int r;

	lock->busy = false;
	if (pthread_mutex_init(&lock->mutex, NULL) != 0)
		return fmha_error_set(err, FMHA_ENOMEM, "mutex: out of memory");
	r = pthread_condattr_init(&attr);
	if (r == 0) {
		r = pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
		if (r == 0)
			r = pthread_cond_init(&lock->left, &attr);
		(void)pthread_condattr_destroy(&attr);
	}
	if (r != 0) {
		(void)pthread_mutex_destroy(&lock->mutex);
		return fmha_error_set(err, FMHA_ENOMEM, "condition: out of memory");
	}
	return 0;
}

void timed_lock_deinit(struct timed_lock *lock)
{
	(void)pthread_cond_destroy(&lock->left);
	(void)pthread_mutex_destroy(&lock->mutex);
}

int timed_lock_take(struct timed_lock *lock, int64_t deadline, struct fmha_error *err)
{
	const struct timespec until = deadline_timespec(deadline);

	(void)pthread_mutex_lock(&lock->mutex);
	while (lock->busy) {
		if (deadline_left_ns(deadline) == 0) {
			(void)pthread_mutex_unlock(&lock->mutex);
			return fmha_error_set(err, FMHA_ETIMEDOUT,
					      "another thread was still connecting or registering");
		}
		(void)pthread_cond_timedwait(&lock->left, &lock->mutex, &until);
	}
	return 0;
}

void timed_lock_give(struct timed_lock *lock)
{
	(void)pthread_mutex_unlock(&lock->mutex);
}

void timed_lock_begin_slow(struct timed_lock *lock)
{
	lock->busy = true;
	(void)pthread_mutex_unlock(&lock->mutex);
}

void timed_lock_end_slow(struct timed_lock *lock)
{
	(void)pthread_mutex_lock(&lock->mutex);
	lock->busy = false;
	(void)pthread_cond_broadcast(&lock->left);
}

int link_init(struct link *link, link_open open, void *owner, int lost_code, struct fmha_error *err)
{
	*link = (struct link){.open = open, .owner = owner, .lost_code = lost_code};
	return timed_lock_init(&link->lock, err);
}

void link_deinit(struct link *link)
{
	link->connection = connection_unref(link->connection);
	timed_lock_deinit(&link->lock);
}

int link_get(struct link *link, int64_t deadline, struct connection **ret_connection,
	     uint64_t *ret_generation, struct fmha_error *err)
{
	int r = timed_lock_take(&link->lock, deadline, err);

	if (r < 0)
		return r;
	if (!link->connection || connection_is_dead(link->connection)) {
		struct connection *fresh;

		link->connection = connection_unref(link->connection);
		timed_lock_begin_slow(&link->lock);
		r = link->open(link->owner, deadline, &fresh, err);
		timed_lock_end_slow(&link->lock);
		if (r == 0) {
			link->connection = fresh;
			link->generation++;
		}
	}
	if (r >= 0) {
		*ret_connection = connection_ref(link->connection);
		*ret_generation = link->generation;
	}
	timed_lock_give(&link->lock);
	return r;
}

/* @generation: 0: any */
static struct connection *get_live(struct link *link, uint64_t generation, int64_t deadline)
{
	struct connection *c = NULL;

	if (timed_lock_take(&link->lock, deadline, NULL) < 0)
		return NULL;
	if (link->connection && (generation == 0 || link->generation == generation) &&
	    !connection_is_dead(link->connection))
		c = connection_ref(link->connection);
	timed_lock_give(&link->lock);
	return c;
}

struct connection *link_get_if(struct link *link, uint64_t generation)
{
	return get_live(link, generation, deadline_after_ms(RELEASE_TIMEOUT_MS));
}

struct connection *link_get_open(struct link *link)
{
	return get_live(link, 0, 0);
}

int link_call(struct link *link, enum proto_method method, const void *params, int fd,
	      int64_t deadline, void *ret_result, int *ret_fd, struct fmha_error *err)
{
	int r = link->lost_code;

	for (int attempt = 0; attempt < 2 && r == link->lost_code; attempt++) {
		struct connection *c;
		uint64_t generation;

		r = link_get(link, deadline, &c, &generation, err);
		if (r < 0)
			return r;
		r = connection_call(c, method, params, fd, deadline, ret_result, ret_fd, err);
		c = connection_unref(c);
	}
	return r;
}

/* ---- registration ---- */

/*
 * Objects of ours that a worker knows by an id of its own, and those of the next
 * worker by another one (internal.h).
 */

int registration_bind(struct registration *registration, registration_tell tell, void *object,
		      struct connection *connection, uint64_t generation, int64_t deadline,
		      uint64_t *ret_worker_id, struct fmha_error *err)
{
	int r = timed_lock_take(&registration->lock, deadline, err);

	if (r < 0)
		return r;
	if (registration->generation != generation) {
		uint64_t worker_id = 0;

		timed_lock_begin_slow(&registration->lock);
		r = tell(object, connection, generation, deadline, &worker_id, err);
		timed_lock_end_slow(&registration->lock);
		if (r == 0) {
			registration->worker_id = worker_id;
			registration->generation = generation;
		}
	}
	if (r == 0)
		*ret_worker_id = registration->worker_id;
	timed_lock_give(&registration->lock);
	return r;
}

int registration_begin(struct registration *registration, registration_tell tell, void *object,
		       struct fmha_device *device, int64_t deadline, struct fmha_error *err)
{
	int r = FMHA_EDEVICE;

	for (int attempt = 0; attempt < 2 && r == FMHA_EDEVICE; attempt++) {
		uint64_t generation, worker_id;
		struct connection *c;

		r = link_get(&device->worker, deadline, &c, &generation, err);
		if (r < 0)
			break;
		r = registration_bind(registration, tell, object, c, generation, deadline,
				      &worker_id, err);
		c = connection_unref(c);
	}
	return r;
}

void registration_end(const struct registration *registration, struct fmha_device *device,
		      enum proto_method method, const void *params)
{
	struct connection *c = NULL;

	if (registration->generation != 0 && !client_in_child(device->client))
		c = link_get_if(&device->worker, registration->generation);
	if (!c)
		return;
	/* A failure is the end of the connection, which releases everything. */
	(void)connection_call(c, method, params, -1, deadline_after_ms(RELEASE_TIMEOUT_MS), NULL,
			      NULL, NULL);
	c = connection_unref(c);
}

/* ---- whose it is ---- */

static pthread_once_t page_once = PTHREAD_ONCE_INIT;
static uint64_t *page;      /* NULL: the kernel has no MADV_WIPEONFORK (before 4.14) */
static uint64_t last_token; /* inherited, so that a child's next token is a new one */

static void make_page(void)
{
	size_t bytes = (size_t)sysconf(_SC_PAGESIZE);
	void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
			    0);

	if (memory == MAP_FAILED)
		return;
	if (madvise(memory, bytes, MADV_WIPEONFORK) == 0)
		page = memory;
	else
		(void)munmap(memory, bytes);
}

uint64_t process_token(void)
{
	uint64_t token;

	(void)pthread_once(&page_once, make_page);
	if (!page)
		return (uint64_t)getpid();
	token = __atomic_load_n(page, __ATOMIC_ACQUIRE);
	if (token == 0) {
		uint64_t fresh = __atomic_add_fetch(&last_token, 1, __ATOMIC_RELAXED);

		/* Of threads that meet here the first one wins. */
		if (__atomic_compare_exchange_n(page, &token, fresh, 0, __ATOMIC_ACQ_REL,
						__ATOMIC_ACQUIRE))
			token = fresh;
	}
	return token;
}

int check_struct_size(uint32_t size, size_t known, const char *name, struct fmha_error *err)
{
	if (size == known)
		return 0;
	return fmha_error_set_field(err, FMHA_EINVAL, "struct_size",
				    "%s.struct_size is %u, this library knows %zu", name, size,
				    known);
}
