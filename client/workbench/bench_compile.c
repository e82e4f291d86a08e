/* SPDX-License-Identifier: MIT */
/*
 * bench_compile.c: code ahead of time. A plan waits for its kernels' code; making plans in several
 * threads, each on a connection of its own, lets the daemon compile as many at once. Tensors have
 * room but no contents here. What cannot be planned says so when it is measured.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"

#define MAX_WORKERS 64

struct pool {
	const struct bench_options *options;
	const struct bench_shapes *shapes;
	const struct bench_items *items;
	const size_t *wanted; /* items, one for each kernel */
	size_t n, next;       /* under the lock */
	struct ctl_progress progress;
	pthread_mutex_t lock;
};

/* A plan of the item, and its end. */
static void plan_once(struct fmha_device *device, const struct pool *pool, size_t i)
{
	const struct bench_item *item = &pool->items->list[i];
	const char *kernel = item->kernel;
	const struct fmha_plan_options options = {
		.struct_size = sizeof(options), .n_kernels = 1, .kernels = &kernel};
	struct fmha_plan *plan = NULL;
	struct tensors tensors;
	struct recipe recipe;

	if (bench_recipe(pool->shapes, item->shape, &recipe, NULL) < 0)
		return;
	if (tensors_new(device, &recipe.problem, &tensors, NULL) == 0) {
		if (fmha_plan_new(device, &recipe.problem, &options, &plan, NULL) == 0)
			plan = fmha_plan_free(plan);
		tensors_deinit(&tensors);
	}
	recipe_deinit(&recipe);
}

static void *work(void *owner)
{
	_cleanup_(ctl_client_freep) struct fmha_client *client = NULL;
	_cleanup_(ctl_device_freep) struct fmha_device *device = NULL;
	struct pool *pool = owner;

	if (ctl_open(&pool->options->target, &client, &device) != 0)
		return NULL;
	for (;;) {
		size_t at;

		(void)pthread_mutex_lock(&pool->lock);
		at = pool->next < pool->n ? pool->next++ : pool->n;
		ctl_progress(&pool->progress, at, pool->n);
		(void)pthread_mutex_unlock(&pool->lock);
		if (at == pool->n)
			break;
		plan_once(device, pool, pool->wanted[at]);
	}
	return NULL;
}

struct named {
	const char *kernel;
	size_t item;
};

static int compare_named(const void *a, const void *b)
{
	return strcmp(((const struct named *)a)->kernel, ((const struct named *)b)->kernel);
}

/* One item for each kernel. Return: how many. */
static size_t distinct(const struct bench_items *items, size_t *ret_wanted)
{
	struct named *named = calloc(items->n + 1, sizeof(*named));
	size_t n = 0;

	if (!named)
		return 0;
	for (size_t i = 0; i < items->n; i++)
		named[i] = (struct named){items->list[i].kernel, i};
	qsort(named, items->n, sizeof(*named), compare_named);
	for (size_t i = 0; i < items->n; i++)
		if (i == 0 || strcmp(named[i].kernel, named[i - 1].kernel) != 0)
			ret_wanted[n++] = named[i].item;
	free(named);
	return n;
}

void bench_compile(const struct bench_options *options, const struct bench_shapes *shapes,
		   const struct bench_items *items)
{
	size_t *wanted = calloc(items->n + 1, sizeof(*wanted));
	struct pool pool = {.options = options,
			    .shapes = shapes,
			    .items = items,
			    .wanted = wanted,
			    .progress = {.title = "kernels made ready"}};
	pthread_t threads[MAX_WORKERS];
	int n = 0;

	if (!wanted)
		return;
	pool.n = distinct(items, wanted);
	(void)pthread_mutex_init(&pool.lock, NULL);
	while (n < MAX_WORKERS && n < options->workers &&
	       pthread_create(&threads[n], NULL, work, &pool) == 0)
		n++;
	while (n-- > 0)
		(void)pthread_join(threads[n], NULL);
	ctl_progress_end(&pool.progress);
	(void)pthread_mutex_destroy(&pool.lock);
	free(wanted);
}
