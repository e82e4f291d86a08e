/* SPDX-License-Identifier: MIT */
#include "queue.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>

#include <proto/error.h>

#include "cleanup.h"

/* Somebody who waits for a job. */
struct waiter {
	struct waiter *next;
	compile_done done;
	void *owner;
};

struct job {
	struct job *next;
	struct cache_key identity; /* of the request: requests that are equal join */
	enum compile_priority priority;
	struct waiter *waiters; /* in the order of asking */
	bool running;
	struct compile_request request; /* its strings belong to the job */
	char **options;
};

struct compile_queue {
	struct compile_config config;
	struct compile_versions versions;
	struct cache *cache;
	pthread_mutex_t lock;
	pthread_cond_t work, idle;
	struct job *jobs; /* waiting and running, in the order of priority */
	bool stopping;
	struct compile_queue_status status;
	int n_threads;
	pthread_t *threads;
};

static struct job *job_free(struct job *job)
{
	if (!job)
		return NULL;
	while (job->waiters) {
		struct waiter *next = job->waiters->next;

		free(job->waiters);
		job->waiters = next;
	}
	for (size_t i = 0; job->options && i < job->request.n_options; i++)
		free(job->options[i]);
	free(job->options);
	free((char *)job->request.kernel);
	free((char *)job->request.arch);
	free((char *)job->request.compiler);
	free((char *)job->request.source);
	free(job);
	return NULL;
}

static void job_freep(struct job **job)
{
	(void)job_free(*job);
}

static struct cache_key identity_of(const struct compile_request *request)
{
	struct cache_key_part parts[3 + 256];
	const char *compiler = request->compiler ? request->compiler : "";
	size_t n = 0;

	parts[n++] = (struct cache_key_part){request->arch, strlen(request->arch)};
	parts[n++] = (struct cache_key_part){compiler, strlen(compiler)};
	parts[n++] = (struct cache_key_part){request->source, strlen(request->source)};
	for (size_t i = 0; i < request->n_options && n < sizeof(parts) / sizeof(parts[0]); i++)
		parts[n++] = (struct cache_key_part){request->options[i],
						     strlen(request->options[i])};
	return cache_key_of(parts, n);
}

static struct job *job_new(const struct compile_request *request, enum compile_priority priority)
{
	_cleanup_(job_freep) struct job *job = calloc(1, sizeof(*job));
	struct job *made;

	if (!job)
		return NULL;
	job->identity = identity_of(request);
	job->priority = priority;
	job->options = calloc(request->n_options + 1, sizeof(*job->options));
	job->request.kernel = strdup(request->kernel);
	job->request.arch = strdup(request->arch);
	job->request.source = strdup(request->source);
	if (!job->options || !job->request.kernel || !job->request.arch || !job->request.source)
		return NULL;
	if (request->compiler && !(job->request.compiler = strdup(request->compiler)))
		return NULL;
	for (size_t i = 0; i < request->n_options; i++, job->request.n_options++)
		if (!(job->options[i] = strdup(request->options[i])))
			return NULL;
	job->request.options = (const char *const *)job->options;
	made = job;
	job = NULL;
	return made;
}

/* Behind every job that is as urgent or more. */
static void insert_job(struct compile_queue *queue, struct job *job)
{
	struct job **at = &queue->jobs;

	while (*at && (*at)->priority <= job->priority)
		at = &(*at)->next;
	job->next = *at;
	*at = job;
}

static void remove_job(struct compile_queue *queue, struct job *job)
{
	struct job **at = &queue->jobs;

	while (*at != job)
		at = &(*at)->next;
	*at = job->next;
}

static struct job *find_job(struct compile_queue *queue, const struct cache_key *identity)
{
	for (struct job *job = queue->jobs; job; job = job->next)
		if (memcmp(&job->identity, identity, sizeof(*identity)) == 0)
			return job;
	return NULL;
}

static struct job *next_job(struct compile_queue *queue)
{
	for (struct job *job = queue->jobs; job; job = job->next)
		if (!job->running)
			return job;
	return NULL;
}

int compile_queue_submit(struct compile_queue *queue, const struct compile_request *request,
			 enum compile_priority priority, compile_done done, void *owner,
			 struct fmha_error *err)
{
	_cleanup_(job_freep) struct job *job = job_new(request, priority);
	struct waiter *waiter = calloc(1, sizeof(*waiter)), **end;
	struct job *joined;

	if (!job || !waiter) {
		free(waiter);
		return fmha_error_set(err, FMHA_ENOMEM, "compile queue: out of memory");
	}
	*waiter = (struct waiter){.done = done, .owner = owner};
	(void)pthread_mutex_lock(&queue->lock);
	joined = find_job(queue, &job->identity);
	if (!joined) {
		joined = job;
		job = NULL;
		insert_job(queue, joined);
		queue->status.queued++;
	} else if (priority < joined->priority) {
		remove_job(queue, joined);
		joined->priority = priority;
		insert_job(queue, joined);
	}
	for (end = &joined->waiters; *end; end = &(*end)->next)
		;
	*end = waiter;
	(void)pthread_cond_signal(&queue->work);
	(void)pthread_mutex_unlock(&queue->lock);
	return 0;
}

/* Takes the job off the list, so that nobody joins any more, and tells its waiters. */
static void finish_job(struct compile_queue *queue, struct job *job, int result,
		       const struct cache_entry *entry, const struct fmha_error *err)
{
	remove_job(queue, job);
	(void)pthread_mutex_unlock(&queue->lock);
	for (struct waiter *waiter = job->waiters; waiter; waiter = waiter->next)
		waiter->done(waiter->owner, result, entry, err);
	(void)job_free(job);
	(void)pthread_mutex_lock(&queue->lock);
}

static void run_job(struct compile_queue *queue, struct job *job)
{
	_cleanup_(cache_entry_freep) struct cache_entry *entry = NULL;
	struct fmha_error err = {0};
	bool hit = false;
	int r;

	job->running = true;
	queue->status.queued--;
	queue->status.running++;
	(void)pthread_mutex_unlock(&queue->lock);
	r = compile_cached(&queue->config, queue->cache, &job->request, &entry, &hit, &err);
	(void)pthread_mutex_lock(&queue->lock);
	queue->status.running--;
	if (r < 0)
		queue->status.failed++;
	else if (hit)
		queue->status.hits++;
	else
		queue->status.built++;
	finish_job(queue, job, r, entry, &err);
}

static void *queue_thread(void *argument)
{
	struct compile_queue *queue = argument;
	struct job *job;

	(void)pthread_mutex_lock(&queue->lock);
	for (;;) {
		job = next_job(queue);
		if (queue->stopping)
			break;
		if (job) {
			run_job(queue, job);
			(void)pthread_cond_broadcast(&queue->idle);
		} else {
			(void)pthread_cond_wait(&queue->work, &queue->lock);
		}
	}
	(void)pthread_mutex_unlock(&queue->lock);
	return NULL;
}

int compile_queue_new(const struct compile_config *config, struct cache *cache, int n_threads,
		      struct compile_queue **ret_queue, struct fmha_error *err)
{
	struct compile_queue *queue = calloc(1, sizeof(*queue));

	if (!queue)
		return fmha_error_set(err, FMHA_ENOMEM, "compile queue: out of memory");
	queue->config = *config;
	(void)pthread_mutex_init(&queue->versions.lock, NULL);
	queue->config.versions = &queue->versions;
	queue->cache = cache;
	(void)pthread_mutex_init(&queue->lock, NULL);
	(void)pthread_cond_init(&queue->work, NULL);
	(void)pthread_cond_init(&queue->idle, NULL);
	queue->config.stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	queue->threads = calloc((size_t)n_threads, sizeof(*queue->threads));
	if (queue->config.stop_fd < 0 || !queue->threads) {
		(void)compile_queue_free(queue);
		return fmha_error_set(err, FMHA_ENOMEM, "compile queue: out of memory");
	}
	for (; queue->n_threads < n_threads; queue->n_threads++)
		if (pthread_create(&queue->threads[queue->n_threads], NULL, queue_thread, queue)) {
			(void)compile_queue_free(queue);
			return fmha_error_set(err, FMHA_EIO, "compile queue: no more threads");
		}
	*ret_queue = queue;
	return 0;
}

struct compile_queue *compile_queue_free(struct compile_queue *queue)
{
	struct fmha_error err;

	if (!queue)
		return NULL;
	(void)fmha_error_set(&err, FMHA_ECANCELED, "the compile queue is closing");
	(void)pthread_mutex_lock(&queue->lock);
	queue->stopping = true;
	if (queue->config.stop_fd >= 0)
		(void)eventfd_write(queue->config.stop_fd, 1);
	(void)pthread_cond_broadcast(&queue->work);
	(void)pthread_mutex_unlock(&queue->lock);
	for (int i = 0; i < queue->n_threads; i++)
		(void)pthread_join(queue->threads[i], NULL);
	(void)pthread_mutex_lock(&queue->lock);
	while (queue->jobs)
		finish_job(queue, queue->jobs, FMHA_ECANCELED, NULL, &err);
	(void)pthread_mutex_unlock(&queue->lock);
	closep(&queue->config.stop_fd);
	(void)pthread_mutex_destroy(&queue->versions.lock);
	(void)pthread_mutex_destroy(&queue->lock);
	(void)pthread_cond_destroy(&queue->work);
	(void)pthread_cond_destroy(&queue->idle);
	free(queue->threads);
	free(queue);
	return NULL;
}

void compile_queue_drain(struct compile_queue *queue)
{
	(void)pthread_mutex_lock(&queue->lock);
	while (queue->jobs || queue->status.running)
		(void)pthread_cond_wait(&queue->idle, &queue->lock);
	(void)pthread_mutex_unlock(&queue->lock);
}

void compile_queue_status(struct compile_queue *queue, struct compile_queue_status *ret_status)
{
	(void)pthread_mutex_lock(&queue->lock);
	*ret_status = queue->status;
	ret_status->n_current = 0;
	for (struct job *job = queue->jobs; job && ret_status->n_current < 8; job = job->next)
		if (job->running)
			(void)snprintf(ret_status->current[ret_status->n_current++],
				       sizeof(ret_status->current[0]), "%s", job->request.kernel);
	(void)pthread_mutex_unlock(&queue->lock);
}
