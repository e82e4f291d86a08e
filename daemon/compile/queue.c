/* SPDX-License-Identifier: MIT */
#include <compile/queue.h>

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>

#include <compile/build_identity.h>
#include <proto/error.h>

#include "cleanup.h"
#include "now.h"

/* ---- turns ---- */

/*
 * Whose turn it is: that of the user for whom least time was spent.
 *
 * A user who comes back is put level with the others at most: having asked for nothing is no
 * credit. What was spent stays a debt while anybody else is there, so that leaving and coming back
 * does not help.
 *
 * Not base/fair.h, which hands out one turn after the other and is told afterwards what each took:
 * a compile takes seconds, and costs its user while it runs, as others are chosen meanwhile; and
 * the choice is among what may run now, by class first, for any of those who wait for it.
 */

struct turns_user {
	struct turns_user *next;
	uint32_t uid;
	uint32_t n_references; /* what waits or runs for the user */
	uint32_t n_running;
	int64_t spent_ms;       /* of what has ended, and what a newcomer is put level with */
	int64_t started_sum_ms; /* of what runs: the sum of the times when it began */
};

struct turns {
	struct turns_user *users;
};

static void turns_deinit(struct turns *turns)
{
	while (turns->users) {
		struct turns_user *next = turns->users->next;

		free(turns->users);
		turns->users = next;
	}
}

/* What was spent for the user up to now. */
static int64_t turns_spent(const struct turns_user *user, int64_t now_ms)
{
	return user->spent_ms + user->n_running * now_ms - user->started_sum_ms;
}

/* The least that was spent for anybody who is there. Return: false: nobody is. */
static bool least_spent(const struct turns *turns, int64_t now_ms, int64_t *ret_least)
{
	bool found = false;

	for (const struct turns_user *user = turns->users; user; user = user->next) {
		int64_t spent = turns_spent(user, now_ms);

		if (user->n_references == 0)
			continue;
		*ret_least = found && *ret_least < spent ? *ret_least : spent;
		found = true;
	}
	return found;
}

/* Forgets who is gone and would be put level anyway. */
static void prune(struct turns *turns, int64_t least)
{
	struct turns_user **at = &turns->users;

	while (*at) {
		struct turns_user *user = *at;

		if (user->n_references > 0 || user->spent_ms > least) {
			at = &user->next;
			continue;
		}
		*at = user->next;
		free(user);
	}
}

/* The user with one more reference; NULL: out of memory. */
static struct turns_user *turns_get(struct turns *turns, uint32_t uid, int64_t now_ms)
{
	struct turns_user *user;
	int64_t least = 0;

	/* Alone: turns_put() has forgotten everybody. */
	if (least_spent(turns, now_ms, &least))
		prune(turns, least);
	for (user = turns->users; user; user = user->next)
		if (user->uid == uid) {
			user->n_references++;
			return user;
		}
	user = calloc(1, sizeof(*user));
	if (!user)
		return NULL;
	user->uid = uid;
	user->n_references = 1;
	user->spent_ms = least;
	user->next = turns->users;
	turns->users = user;
	return user;
}

static void turns_put(struct turns *turns, struct turns_user *user)
{
	int64_t least = 0;

	user->n_references--;
	if (!least_spent(turns, 0, &least))
		turns_deinit(turns);
}

/* Something begins, or ends, that runs for the user. */
static void turns_begin(struct turns_user *user, int64_t now_ms)
{
	user->n_running++;
	user->started_sum_ms += now_ms;
}

static void turns_end(struct turns_user *user, int64_t began_ms, int64_t now_ms)
{
	user->n_running--;
	user->started_sum_ms -= began_ms;
	user->spent_ms += now_ms - began_ms;
}

#define LOCK_AGAIN_MS   20
#define LOCK_WAIT_MS    10000
#define BACKGROUND_NICE 10
#define FOREGROUND_NICE                                                                            \
	5 /* of a shared queue: runs of the CPU go before builds, which take all cores */

enum job_step {
	JOB_LOOKUP, /* is it in the cache? */
	JOB_BUILD,  /* it was not */
};

/* One code object that somebody waits for. */
struct compile_job {
	struct compile_job *next;
	struct compile_waiter *waiters; /* in the order of asking */
	enum job_step step;
	struct compile_request request;
	struct build_identity identity;
	struct compile_target target; /* JOB_BUILD */
	int64_t not_before_ms;        /* JOB_BUILD: another process builds it; look again then */
	int64_t lock_deadline_ms;     /* ... and build it regardless then; 0: it was not locked */

	/* While it runs. */
	bool running;
	bool background;         /* of a shared queue: for nobody who waits */
	bool cancelled;          /* nobody waits any more: nobody may join either */
	int stop_fd;             /* an eventfd that ends it */
	struct turns_user *user; /* whom it runs for: one more reference */
	int64_t began_ms;        /* ... since when */
};

struct slot {
	struct compile_queue *queue;
	struct compile_config config; /* with a stop_fd of its own */
	pthread_t thread;
};

struct compile_queue {
	struct compile_versions versions;
	struct cache *cache;
	int n_jobs, n_background_jobs;
	bool shared;
	pthread_mutex_t lock; /* of all below */
	pthread_cond_t work, idle;
	struct compile_job *jobs; /* waiting and running */
	struct turns turns;
	int n_building, n_building_background;
	uint64_t n_asked;
	bool stopping;
	struct compile_queue_status status;
	int n_threads;
	struct slot *slots; /* one more than builds: somebody can always look into the cache */
};

/* A job that can run now, and for whom. */
struct choice {
	struct compile_job *job;
	struct compile_waiter *waiter;
	int64_t spent_ms;
};

/* ---- asking ---- */

static void remove_job(struct compile_queue *queue, struct compile_job *job)
{
	struct compile_job **at = &queue->jobs;

	while (*at != job)
		at = &(*at)->next;
	*at = job->next;
}

/* That others who ask for the same may join. */
static struct compile_job *find_job(struct compile_queue *queue, const struct compile_job *same)
{
	const char *compiler = same->request.compiler;

	for (struct compile_job *job = queue->jobs; job; job = job->next)
		if (!job->cancelled &&
		    memcmp(&job->identity, &same->identity, sizeof(job->identity)) == 0 &&
		    strcmp(job->request.compiler ? job->request.compiler : "",
			   compiler ? compiler : "") == 0)
			return job;
	return NULL;
}

static void add_waiter(struct compile_job *job, struct compile_waiter *waiter)
{
	struct compile_waiter **end = &job->waiters;

	while (*end)
		end = &(*end)->next;
	*end = waiter;
	waiter->job = job;
}

int compile_queue_submit(struct compile_queue *queue, const struct compile_request *request,
			 enum compile_priority priority, compile_done done, void *owner,
			 struct compile_waiter *waiter, struct fmha_error *err)
{
	_cleanup_(freep) struct compile_job *job = calloc(1, sizeof(*job));
	struct compile_job *joined;

	if (!job)
		return fmha_error_set(err, FMHA_ENOMEM, "compile queue: out of memory");
	job->request = *request;
	job->identity = build_identity(&request->build);
	*waiter = (struct compile_waiter){.priority = priority, .done = done, .owner = owner};
	(void)pthread_mutex_lock(&queue->lock);
	waiter->user = turns_get(&queue->turns, request->uid, now_ms());
	if (!waiter->user) {
		(void)pthread_mutex_unlock(&queue->lock);
		return fmha_error_set(err, FMHA_ENOMEM, "compile queue: out of memory");
	}
	waiter->number = queue->n_asked++;
	joined = find_job(queue, job);
	if (!joined) {
		joined = job;
		job = NULL;
		joined->next = queue->jobs;
		queue->jobs = joined;
		queue->status.queued++;
	}
	add_waiter(joined, waiter);
	(void)pthread_cond_broadcast(&queue->work);
	(void)pthread_mutex_unlock(&queue->lock);
	return 0;
}

/* ---- whose turn it is ---- */

/* Whether the job may run for this user now. */
static bool can_run(const struct compile_queue *queue, const struct compile_job *job,
		    const struct compile_waiter *waiter, int64_t now)
{
	/* Nobody waits for the end of another user's builds. */
	int n_jobs = queue->n_jobs + (queue->shared && waiter->user->n_running == 0);

	if (job->step == JOB_LOOKUP)
		return true;
	if (waiter->priority == COMPILE_BACKGROUND &&
	    queue->n_building_background >= queue->n_background_jobs)
		return false;
	return queue->n_building < n_jobs && now >= job->not_before_ms;
}

static bool goes_first(const struct choice *one, const struct choice *other)
{
	if (one->waiter->priority != other->waiter->priority)
		return one->waiter->priority < other->waiter->priority;
	if (one->spent_ms != other->spent_ms)
		return one->spent_ms < other->spent_ms;
	return one->waiter->number < other->waiter->number;
}

/* Return: false: nothing can run now. */
static bool choose(const struct compile_queue *queue, int64_t now, struct choice *ret_choice)
{
	struct choice best = {0};

	for (struct compile_job *job = queue->jobs; job; job = job->next) {
		for (struct compile_waiter *w = job->running ? NULL : job->waiters; w;
		     w = w->next) {
			struct choice choice = {job, w, turns_spent(w->user, now)};

			if (can_run(queue, job, w, now) &&
			    (!best.job || goes_first(&choice, &best)))
				best = choice;
		}
	}
	*ret_choice = best;
	return best.job;
}

/* Until something is submitted or ends, or a locked key is looked at again. */
static void wait_for_work(struct compile_queue *queue, int64_t now)
{
	int64_t until = INT64_MAX;
	struct timespec ts;

	for (const struct compile_job *job = queue->jobs; job; job = job->next)
		if (!job->running && job->not_before_ms > now && job->not_before_ms < until)
			until = job->not_before_ms;
	if (until == INT64_MAX) {
		(void)pthread_cond_wait(&queue->work, &queue->lock);
		return;
	}
	ts = (struct timespec){until / 1000, until % 1000 * 1000000};
	(void)pthread_cond_timedwait(&queue->work, &queue->lock, &ts);
}

/* ---- running ---- */

/* From now on it runs at the cost of @user. */
static void charge_to(struct compile_queue *queue, struct compile_job *job, struct turns_user *user,
		      int64_t now)
{
	struct turns_user *before = job->user;

	if (user) {
		user->n_references++;
		turns_begin(user, now);
	}
	job->user = user;
	if (before) {
		turns_end(before, job->began_ms, now);
		turns_put(&queue->turns, before);
	}
	job->began_ms = now;
}

static void begin_job(struct compile_queue *queue, struct slot *slot, const struct choice *choice,
		      int64_t now)
{
	struct compile_job *job = choice->job;
	eventfd_t stale;

	(void)eventfd_read(slot->config.stop_fd, &stale); /* of the job before */
	job->running = true;
	job->stop_fd = slot->config.stop_fd;
	job->request.uid = choice->waiter->user->uid;
	charge_to(queue, job, choice->waiter->user, now);
	job->background = queue->shared && choice->waiter->priority == COMPILE_BACKGROUND;
	slot->config.nice = job->background ? BACKGROUND_NICE : queue->shared ? FOREGROUND_NICE : 0;
	queue->n_building += job->step == JOB_BUILD;
	queue->n_building_background += job->step == JOB_BUILD && job->background;
	queue->status.queued--;
	queue->status.running++;
}

static void end_job(struct compile_queue *queue, struct compile_job *job)
{
	job->running = false;
	queue->n_building -= job->step == JOB_BUILD;
	queue->n_building_background -= job->step == JOB_BUILD && job->background;
	queue->status.running--;
	charge_to(queue, job, NULL, now_ms());
	(void)pthread_cond_broadcast(&queue->work); /* a slot is free */
}

/* Takes the job off the list, so that nobody joins or is forgotten any more, and tells its waiters.
 */
static void finish_job(struct compile_queue *queue, struct compile_job *job, int result,
		       const struct cache_entry *entry, const struct fmha_error *err)
{
	struct compile_waiter *next;

	remove_job(queue, job);
	for (struct compile_waiter *waiter = job->waiters; waiter; waiter = waiter->next) {
		waiter->job = NULL;
		turns_put(&queue->turns, waiter->user);
	}
	(void)pthread_mutex_unlock(&queue->lock);
	for (struct compile_waiter *waiter = job->waiters; waiter; waiter = next) {
		next = waiter->next; /* the waiter is gone after its call */
		waiter->done(waiter->owner, result, entry, err);
	}
	free(job);
	(void)pthread_mutex_lock(&queue->lock);
	(void)pthread_cond_broadcast(&queue->idle);
}

/* Back into the queue, for the next step. */
static void requeue_job(struct compile_queue *queue, struct compile_job *job)
{
	queue->status.queued++;
	if (job->step == JOB_LOOKUP) {
		job->step = JOB_BUILD;
		return;
	}
	job->not_before_ms = now_ms() + LOCK_AGAIN_MS;
}

static void count_result(struct compile_queue_status *status, int r, bool cancelled, bool hit)
{
	if (cancelled)
		status->cancelled++;
	else if (r < 0)
		status->failed++;
	else if (hit)
		status->hits++;
	else
		status->built++;
}

/* When to stop waiting for whoever holds the lock of this job's key. */
static int64_t lock_deadline(const struct compile_config *config)
{
	int64_t wait = compile_deadline_ms(config);

	return now_ms() + (wait < LOCK_WAIT_MS ? wait : LOCK_WAIT_MS);
}

/* One step, without the queue's lock. Return: 0, CACHE_MISS of a lookup, COMPILE_BUSY of a build,
 * or a negative FMHA_E*. */
static int step_job(struct slot *slot, struct compile_job *job, struct cache_entry **ret_entry,
		    bool *ret_hit, struct fmha_error *err)
{
	struct cache *cache = slot->queue->cache;
	int r;

	*ret_hit = true;
	if (job->step == JOB_LOOKUP) {
		r = compile_identify(&slot->config, &job->request, &job->target, err);
		return r < 0 ? r : cache_load(cache, &job->target.key, ret_entry);
	}
	r = compile_build(&slot->config, cache, &job->request, &job->target,
			  job->lock_deadline_ms && now_ms() >= job->lock_deadline_ms
				  ? COMPILE_IMPATIENT
				  : COMPILE_PATIENT,
			  ret_entry, ret_hit, err);
	if (r == COMPILE_BUSY && !job->lock_deadline_ms)
		job->lock_deadline_ms = lock_deadline(&slot->config);
	return r;
}

static void run_job(struct compile_queue *queue, struct slot *slot, const struct choice *choice,
		    int64_t now)
{
	_cleanup_(cache_entry_freep) struct cache_entry *entry = NULL;
	struct compile_job *job = choice->job;
	struct fmha_error err = {0};
	bool hit;
	int r;

	begin_job(queue, slot, choice, now);
	(void)pthread_mutex_unlock(&queue->lock);
	r = step_job(slot, job, &entry, &hit, &err);
	(void)pthread_mutex_lock(&queue->lock);
	end_job(queue, job);
	if (r > 0 && !job->cancelled) {
		requeue_job(queue, job);
		return;
	}
	count_result(&queue->status, r, job->cancelled, hit);
	finish_job(queue, job, r, entry, &err);
}

static void *queue_thread(void *argument)
{
	struct slot *slot = argument;
	struct compile_queue *queue = slot->queue;
	struct choice choice;

	(void)pthread_mutex_lock(&queue->lock);
	while (!queue->stopping) {
		int64_t now = now_ms();

		if (choose(queue, now, &choice))
			run_job(queue, slot, &choice, now);
		else
			wait_for_work(queue, now);
	}
	(void)pthread_mutex_unlock(&queue->lock);
	return NULL;
}

/* ---- forgetting ---- */

static void unlink_waiter(struct compile_waiter *waiter)
{
	struct compile_waiter **at = &waiter->job->waiters;

	while (*at != waiter)
		at = &(*at)->next;
	*at = waiter->next;
	waiter->job = NULL;
}

static bool somebody_of(const struct compile_job *job, const struct turns_user *user)
{
	for (const struct compile_waiter *waiter = job->waiters; waiter; waiter = waiter->next)
		if (waiter->user == user)
			return true;
	return false;
}

/* One waiter of the job is gone. */
static void reconsider_job(struct compile_queue *queue, struct compile_job *job)
{
	if (job->running && !job->waiters) {
		job->cancelled = true;
		(void)eventfd_write(job->stop_fd, 1);
	} else if (job->running && !somebody_of(job, job->user)) {
		/* The rest is for those who are still there, and paid by them. */
		charge_to(queue, job, job->waiters->user, now_ms());
	} else if (!job->waiters) {
		queue->status.queued--;
		queue->status.cancelled++;
		remove_job(queue, job);
		free(job);
		(void)pthread_cond_broadcast(&queue->idle);
	}
}

bool compile_queue_forget(struct compile_queue *queue, struct compile_waiter *waiter)
{
	struct compile_job *job;

	(void)pthread_mutex_lock(&queue->lock);
	job = waiter->job;
	if (job) {
		unlink_waiter(waiter);
		reconsider_job(queue, job);
		turns_put(&queue->turns, waiter->user);
	}
	(void)pthread_mutex_unlock(&queue->lock);
	return job;
}

/* ---- beginning and end ---- */

static void init_locks(struct compile_queue *queue)
{
	pthread_condattr_t monotonic;

	(void)pthread_mutex_init(&queue->versions.asking, NULL);
	(void)pthread_mutex_init(&queue->versions.lock, NULL);
	(void)pthread_mutex_init(&queue->lock, NULL);
	(void)pthread_condattr_init(&monotonic);
	(void)pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
	(void)pthread_cond_init(&queue->work, &monotonic);
	(void)pthread_cond_init(&queue->idle, NULL);
	(void)pthread_condattr_destroy(&monotonic);
}

static int start_slot(struct compile_queue *queue, const struct compile_config *config,
		      struct fmha_error *err)
{
	struct slot *slot = &queue->slots[queue->n_threads];

	slot->queue = queue;
	slot->config = *config;
	slot->config.versions = &queue->versions;
	slot->config.stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (slot->config.stop_fd < 0)
		return fmha_error_set(err, FMHA_EIO, "compile queue: %s", strerror(errno));
	if (pthread_create(&slot->thread, NULL, queue_thread, slot) != 0) {
		(void)close(slot->config.stop_fd);
		return fmha_error_set(err, FMHA_EIO, "compile queue: no more threads");
	}
	queue->n_threads++;
	return 0;
}

/* Half of the cores. */
static int background_jobs(void)
{
	long cores = sysconf(_SC_NPROCESSORS_ONLN);

	return cores > 3 ? (int)(cores / 2) : 1;
}

int compile_queue_new(const struct compile_config *config, struct cache *cache, int n_jobs,
		      bool shared, struct compile_queue **ret_queue, struct fmha_error *err)
{
	struct compile_queue *queue = calloc(1, sizeof(*queue));
	int n_slots = n_jobs + shared + 1;
	struct slot *slots = calloc((size_t)n_slots, sizeof(*slots));

	if (!queue || !slots) {
		free(queue);
		free(slots);
		return fmha_error_set(err, FMHA_ENOMEM, "compile queue: out of memory");
	}
	queue->slots = slots;
	queue->cache = cache;
	queue->n_jobs = n_jobs;
	queue->shared = shared;
	queue->n_background_jobs = shared ? background_jobs() : n_jobs;
	init_locks(queue);
	for (int i = 0; i < n_slots; i++) {
		int r = start_slot(queue, config, err);

		if (r < 0) {
			(void)compile_queue_free(queue);
			return r;
		}
	}
	*ret_queue = queue;
	return 0;
}

/* Nothing begins any more, what runs ends. */
static void stop(struct compile_queue *queue)
{
	(void)pthread_mutex_lock(&queue->lock);
	queue->stopping = true;
	for (int i = 0; i < queue->n_threads; i++)
		(void)eventfd_write(queue->slots[i].config.stop_fd, 1);
	(void)pthread_cond_broadcast(&queue->work);
	(void)pthread_mutex_unlock(&queue->lock);
	for (int i = 0; i < queue->n_threads; i++)
		(void)pthread_join(queue->slots[i].thread, NULL);
}

struct compile_queue *compile_queue_free(struct compile_queue *queue)
{
	struct fmha_error err;

	if (!queue)
		return NULL;
	(void)fmha_error_set(&err, FMHA_ECANCELED, "the compile queue is closing");
	stop(queue);
	(void)pthread_mutex_lock(&queue->lock);
	while (queue->jobs)
		finish_job(queue, queue->jobs, FMHA_ECANCELED, NULL, &err);
	(void)pthread_mutex_unlock(&queue->lock);
	for (int i = 0; i < queue->n_threads; i++)
		(void)close(queue->slots[i].config.stop_fd);
	turns_deinit(&queue->turns);
	(void)pthread_mutex_destroy(&queue->versions.asking);
	(void)pthread_mutex_destroy(&queue->versions.lock);
	(void)pthread_mutex_destroy(&queue->lock);
	(void)pthread_cond_destroy(&queue->work);
	(void)pthread_cond_destroy(&queue->idle);
	free(queue->slots);
	free(queue);
	return NULL;
}

void compile_queue_drain(struct compile_queue *queue)
{
	(void)pthread_mutex_lock(&queue->lock);
	while (queue->jobs)
		(void)pthread_cond_wait(&queue->idle, &queue->lock);
	(void)pthread_mutex_unlock(&queue->lock);
}

void compile_queue_status(struct compile_queue *queue, struct compile_queue_status *ret_status)
{
	(void)pthread_mutex_lock(&queue->lock);
	*ret_status = queue->status;
	ret_status->n_current = 0;
	for (struct compile_job *job = queue->jobs; job && ret_status->n_current < 8;
	     job = job->next)
		if (job->running)
			(void)snprintf(ret_status->current[ret_status->n_current++],
				       sizeof(ret_status->current[0]), "%s",
				       job->request.build.name);
	(void)pthread_mutex_unlock(&queue->lock);
}
