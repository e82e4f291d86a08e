/* SPDX-License-Identifier: MIT */
#include "guard_code.h"

#include <pthread.h>

#include <fixture.h>

#include <compile/config.h>
#include <compile/queue.h>

#define MOST_KERNELS 4096

struct guard_build {
	struct guard_code *code;
	struct compile_waiter waiter;
	struct device_build *wanted;
	struct fmha_error error;
	void *image; /* NULL: the error says why */
};

struct guard_code {
	struct device *device;
	struct compile_paths paths;
	struct compile_config config;
	struct cache *cache;
	struct compile_queue *queue;
	uint32_t most, n_asked, n_delivered, n_failed;
	struct fmha_error error; /* of the kernel that is being delivered */
	struct guard_build builds[MOST_KERNELS];
	/* The queue's threads count what they have built. */
	pthread_mutex_t lock;
	pthread_cond_t changed;
	uint32_t n_built;
};

/* On a thread of the queue. */
static void on_built(void *owner, int result, const struct cache_entry *entry,
		     const struct fmha_error *err)
{
	struct guard_build *build = owner;
	struct guard_code *code = build->code;

	if (result < 0)
		build->error = *err;
	else
		build->image = malloc(entry->code_bytes + 1);
	if (build->image)
		memcpy(build->image, entry->code, entry->code_bytes);
	(void)pthread_mutex_lock(&code->lock);
	code->n_built++;
	(void)pthread_cond_signal(&code->changed);
	(void)pthread_mutex_unlock(&code->lock);
}

/* The device's builder. */
static int request(void *owner, struct device_build *wanted, struct fmha_error *err)
{
	struct guard_code *code = owner;
	struct guard_build *build = &code->builds[code->n_asked];
	const struct compile_request request = {.build = *wanted->build};
	int r;

	if (code->n_asked == code->most)
		return fmha_error_set(err, FMHA_EQUOTA, "more than %u kernels", code->most);
	*build = (struct guard_build){.code = code, .wanted = wanted};
	r = compile_queue_submit(code->queue, &request, COMPILE_URGENT, on_built, build,
				 &build->waiter, err);
	code->n_asked += r == 0;
	return r;
}

static const char *or_default(const char *given, const char *fallback)
{
	return given ? given : fallback;
}

static void must(const char *what, int r, const struct fmha_error *err)
{
	if (r < 0)
		fail_msg("%s: %s", what, err->msg);
}

static void wake(void *owner)
{
	(void)owner; /* who waits looks by itself */
}

static const struct device_calls calls = {.wake = wake, .build = request};

struct guard_code *guard_code_new(struct device *device, const struct guard_files *files, int jobs,
				  uint32_t most)
{
	struct guard_code *code = calloc(1, sizeof(*code));
	struct cache_config cache = {0};
	struct fmha_error err = {0};

	assert_non_null(code);
	assert_true(most <= MOST_KERNELS);
	code->device = device;
	code->most = most;
	(void)pthread_mutex_init(&code->lock, NULL);
	(void)pthread_cond_init(&code->changed, NULL);
	compile_paths_default(&code->paths);
	code->config = (struct compile_config){
		.helper = or_default(files->helper, code->paths.helper),
		.source_dir = or_default(files->sources, code->paths.sources),
		.library_path = files->libraries,
	};
	cache.writable = or_default(files->cache, code->paths.cache);
	must("cache", cache_new(&cache, &code->cache, &err), &err);
	must("compilers",
	     compile_queue_new(&code->config, code->cache, jobs, false, &code->queue, &err), &err);
	device->calls = &calls;
	device->owner = code;
	return code;
}

struct guard_code *guard_code_free(struct guard_code *code)
{
	code->queue = compile_queue_free(code->queue);
	code->cache = cache_free(code->cache);
	for (uint32_t i = code->n_delivered; i < code->n_asked; i++)
		free(code->builds[i].image);
	(void)pthread_cond_destroy(&code->changed);
	(void)pthread_mutex_destroy(&code->lock);
	free(code);
	return NULL;
}

struct guard_wait {
	struct guard_code *code;
	struct device_waiter waiter;
};

/* A kernel is loaded, or could not be. */
static void on_prepared(void *owner, const struct fmha_error *error)
{
	struct guard_wait *wait = owner;

	wait->code->error = *error;
	free(wait);
}

int guard_code_prepare(struct guard_code *code, const struct plan *plan, struct fmha_error *err)
{
	union abi_args args[PLAN_MAX_STAGES];

	plan_placeholder_args(plan, args);
	for (uint32_t i = 0; i < plan->n_stages; i++) {
		const struct device_kernel *kernel;
		struct guard_wait *wait = malloc(sizeof(*wait));
		int r;

		assert_non_null(wait);
		*wait = (struct guard_wait){code, {.done = on_prepared, .owner = wait}};
		r = device_prepare(code->device, &plan->stages[i], &args[i], &wait->waiter, &kernel,
				   err);
		if (r != DEVICE_PREPARING)
			free(wait);
		if (r < 0)
			return r;
	}
	return 0;
}

static void deliver(struct guard_code *code, struct guard_build *build)
{
	const struct device_code image = {.data = build->image, .fd = -1};

	code->error = (struct fmha_error){0};
	build->wanted->done(build->wanted, build->image ? &image : NULL, &build->error);
	if (code->error.code != FMHA_OK) {
		print_message("kernel: %s\n", code->error.msg);
		code->n_failed++;
	}
	free(build->image);
}

uint32_t guard_code_wait(struct guard_code *code)
{
	(void)pthread_mutex_lock(&code->lock);
	while (code->n_built < code->n_asked)
		(void)pthread_cond_wait(&code->changed, &code->lock);
	(void)pthread_mutex_unlock(&code->lock);
	while (code->n_delivered < code->n_asked)
		deliver(code, &code->builds[code->n_delivered++]);
	return code->n_failed;
}

uint32_t guard_code_kernels(const struct guard_code *code)
{
	return code->n_asked;
}
