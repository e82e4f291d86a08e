/* SPDX-License-Identifier: MIT */
#include "builder.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <proto/error.h>

#include <base/list.h>
#include <paths.h> /* daemon/compile */
#include <queue.h> /* daemon/compile */

#define MAX_OPTIONS 64

struct pending {
	struct list in_builder;
	struct builder *builder;
	builder_done done;
	void *owner; /* NULL: forgotten */
	bool ended;  /* the rest is filled in */
	struct proto_compile_result result;
	struct fmha_error error;
	int fd;
};

struct builder {
	uv_async_t async;
	const struct config_compile *config;
	struct compile_paths paths;
	struct compile_config compile;
	struct cache *cache;
	struct compile_queue *queue;
	uv_mutex_t lock;      /* of ended */
	struct list requests; /* loop thread only */
};

static void finish(struct pending *pending)
{
	if (pending->owner)
		pending->done(pending->owner, &pending->result, pending->fd, &pending->error);
	else if (pending->fd >= 0)
		(void)close(pending->fd);
	list_remove(&pending->in_builder);
	free(pending);
}

static void on_async(uv_async_t *async)
{
	struct builder *builder = container_of(async, struct builder, async);
	struct list *node = builder->requests.next;

	while (node != &builder->requests) {
		struct pending *pending = container_of(node, struct pending, in_builder);
		bool ended;

		node = node->next;
		uv_mutex_lock(&builder->lock);
		ended = pending->ended;
		uv_mutex_unlock(&builder->lock);
		if (ended)
			finish(pending);
	}
}

/* The code in a memfd that the worker can map; -1: no memory. */
static int share_code(const struct cache_entry *entry)
{
	int fd = memfd_create("fmhad-code", MFD_CLOEXEC);

	if (fd >= 0 && write(fd, entry->code, entry->code_bytes) != (ssize_t)entry->code_bytes) {
		(void)close(fd);
		return -1;
	}
	return fd;
}

/* On a thread of the queue. */
static void on_built(void *owner, int result, const struct cache_entry *entry,
		     const struct fmha_error *err)
{
	struct pending *pending = owner;
	struct builder *builder = pending->builder;
	struct fmha_error error = *err;
	int fd = -1;

	if (result == 0) {
		fd = share_code(entry);
		if (fd < 0)
			(void)fmha_error_set(&error, FMHA_ENOMEM, "%.150s: no memory for the code",
					     entry->info.kernel);
	}
	uv_mutex_lock(&builder->lock);
	if (fd >= 0)
		pending->result = (struct proto_compile_result){
			.size = entry->code_bytes,
			.registers = entry->info.registers,
			.spills = entry->info.spills,
			.lds_bytes = entry->info.lds_bytes,
			.compile_ms = entry->info.compile_ms,
		};
	pending->fd = fd;
	pending->error = error;
	pending->ended = true;
	uv_mutex_unlock(&builder->lock);
	(void)uv_async_send(&builder->async);
}

static const char *or_default(const char *configured, const char *fallback)
{
	return configured[0] ? configured : fallback;
}

static int open_queue(struct builder *builder, struct fmha_error *err)
{
	const struct config_compile *config = builder->config;
	const char *layers[] = {config->layer};
	long cores = sysconf(_SC_NPROCESSORS_ONLN);
	int jobs, r;

	if (builder->queue)
		return 0;
	compile_paths_default(&builder->paths);
	r = cache_new(or_default(config->cache, builder->paths.cache), layers,
		      config->layer[0] ? 1 : 0, &builder->cache, err);
	if (r < 0)
		return r;
	builder->compile = (struct compile_config){
		.helper = or_default(config->helper, builder->paths.helper),
		.source_dir = or_default(config->sources, builder->paths.sources),
		.clang = config->clang[0] ? config->clang : NULL,
		.library_path = config->library_path[0] ? config->library_path : NULL,
		.deadline_ms = config->deadline_ms,
	};
	jobs = config->jobs ? (int)config->jobs : (int)(cores > 3 ? cores / 2 : 1);
	r = compile_queue_new(&builder->compile, builder->cache, jobs, &builder->queue, err);
	if (r < 0)
		builder->cache = cache_free(builder->cache);
	return r;
}

int builder_request(struct builder *builder, const struct proto_compile_params *params,
		    builder_done done, void *owner, struct fmha_error *err)
{
	char text[sizeof(params->options)], *save = NULL;
	const char *options[MAX_OPTIONS];
	struct compile_request request = {.kernel = params->kernel,
					  .arch = params->arch,
					  .source = params->source,
					  .options = options};
	struct pending *pending;
	int r;

	if (strchr(params->source, '/'))
		return fmha_error_set_field(err, FMHA_EINVAL, "source",
					    "source %s: a file name, not a path", params->source);
	r = open_queue(builder, err);
	if (r < 0)
		return r;
	(void)strcpy(text, params->options);
	for (char *word = strtok_r(text, " ", &save); word; word = strtok_r(NULL, " ", &save)) {
		if (request.n_options == MAX_OPTIONS)
			return fmha_error_set_field(err, FMHA_EINVAL, "options",
						    "options: more than %d", MAX_OPTIONS);
		options[request.n_options++] = word;
	}
	pending = calloc(1, sizeof(*pending));
	if (!pending)
		return fmha_error_set(err, FMHA_ENOMEM, "compile: out of memory");
	pending->builder = builder;
	pending->done = done;
	pending->owner = owner;
	pending->fd = -1;
	list_append(&builder->requests, &pending->in_builder);
	r = compile_queue_submit(builder->queue, &request, COMPILE_URGENT, on_built, pending, err);
	if (r < 0) {
		list_remove(&pending->in_builder);
		free(pending);
	}
	return r;
}

void builder_forget(struct builder *builder, void *owner)
{
	for (struct list *node = builder->requests.next; node != &builder->requests;
	     node = node->next) {
		struct pending *pending = container_of(node, struct pending, in_builder);

		if (pending->owner == owner)
			pending->owner = NULL;
	}
}

int builder_new(uv_loop_t *loop, const struct config_compile *config, struct builder **ret_builder,
		struct fmha_error *err)
{
	struct builder *builder = calloc(1, sizeof(*builder));

	if (!builder)
		return fmha_error_set(err, FMHA_ENOMEM, "builder: out of memory");
	builder->config = config;
	list_init(&builder->requests);
	if (uv_mutex_init(&builder->lock) < 0) {
		free(builder);
		return fmha_error_set(err, FMHA_ENOMEM, "builder: no mutex");
	}
	if (uv_async_init(loop, &builder->async, on_async) < 0) {
		uv_mutex_destroy(&builder->lock);
		free(builder);
		return fmha_error_set(err, FMHA_ENOMEM, "builder: no async handle");
	}
	*ret_builder = builder;
	return 0;
}

static void on_closed(uv_handle_t *handle)
{
	struct builder *builder = container_of(handle, struct builder, async);

	uv_mutex_destroy(&builder->lock);
	free(builder);
}

struct builder *builder_free(struct builder *builder)
{
	if (!builder)
		return NULL;
	builder->queue = compile_queue_free(builder->queue);
	builder->cache = cache_free(builder->cache);
	while (!list_is_empty(&builder->requests)) {
		struct pending *pending = container_of(builder->requests.next, struct pending,
						       in_builder);

		pending->owner = NULL;
		finish(pending);
	}
	uv_close((uv_handle_t *)&builder->async, on_closed);
	return NULL;
}

cJSON *builder_status_json(struct builder *builder)
{
	struct compile_queue_status status = {0};
	cJSON *json = cJSON_CreateObject(), *current;

	if (builder->queue)
		compile_queue_status(builder->queue, &status);
	cJSON_AddNumberToObject(json, "queued", status.queued);
	cJSON_AddNumberToObject(json, "running", status.running);
	cJSON_AddNumberToObject(json, "built", (double)status.built);
	cJSON_AddNumberToObject(json, "hits", (double)status.hits);
	cJSON_AddNumberToObject(json, "failed", (double)status.failed);
	current = cJSON_AddArrayToObject(json, "current");
	for (uint32_t i = 0; i < status.n_current; i++)
		cJSON_AddItemToArray(current, cJSON_CreateString(status.current[i]));
	return json;
}
