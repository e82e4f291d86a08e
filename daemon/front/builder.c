/* SPDX-License-Identifier: MIT */
#include "builder.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <nettle/sha2.h>

#include <compile/config.h>
#include <compile/queue.h>
#include <proto/error.h>

#include <base/memfd.h>
#include <base/list.h>
#include <base/log.h>

static const enum compile_priority priorities[] = {
	[PROTO_URGENT] = COMPILE_URGENT,
	[PROTO_SOON] = COMPILE_SOON,
	[PROTO_BACKGROUND] = COMPILE_BACKGROUND,
};

/* One kernel for one asker, from the message to the answer. */
struct builder_request {
	struct list in_builder, in_asker;
	struct builder *builder;
	struct account *account;
	struct builder_asker *asker; /* NULL: forgotten */
	uint32_t id;
	struct compile_waiter waiter; /* its place in the queue */
	bool ended;                   /* the rest is filled in */
	struct proto_compile_result result;
	struct fmha_error error;
	int fd;
};

#define FAILURES 16

struct builder {
	uv_async_t async;
	const struct config_compile *config;
	struct accounts *accounts;
	struct compile_paths paths;
	struct compile_config compile;
	struct cache *cache;
	struct compile_queue *queue;
	bool cache_unusable, layer_unusable;                            /* as the log has it */
	char failures[FAILURES][sizeof(((struct fmha_error *)0)->msg)]; /* the last that it has */
	uint32_t n_failures;
	uv_mutex_t lock;      /* of ended */
	struct list requests; /* loop thread only */
};

/* ---- answers ---- */

static void request_free(struct builder_request *request)
{
	account_release(request->account, ACCOUNT_COMPILES, 1);
	(void)account_put(request->account);
	list_remove(&request->in_builder);
	list_remove(&request->in_asker);
	if (request->fd >= 0)
		(void)close(request->fd);
	free(request);
}

/* Source of ours that does not compile, which the one who asked may take for a fault of his own, and nobody else hears of.
 * Once: whoever plans it again and again would fill the log. */
static void warn_of_failure(struct builder *builder, const struct fmha_error *error)
{
	if (error->code != FMHA_EINVAL)
		return;
	for (uint32_t i = 0; i < FAILURES; i++)
		if (strcmp(builder->failures[i], error->msg) == 0)
			return;
	memcpy(builder->failures[builder->n_failures++ % FAILURES], error->msg, sizeof(error->msg));
	log_warning("a kernel does not compile: %s", error->msg);
}

static void builder_finish(struct builder_request *request)
{
	struct builder_asker *asker = request->asker;
	int fd = request->fd;

	warn_of_failure(request->builder, &request->error);
	list_remove(&request->in_asker); /* a hangup while answering forgets those that are left */
	if (asker) {
		request->fd = -1; /* taken */
		asker->done(asker->owner, request->id, &request->result, fd, &request->error);
	}
	request_free(request);
}

/* Says once that the service goes on without a cache, and once that it has one again. */
static void watch_cache(struct builder *builder)
{
	struct cache_status status;

	cache_get_status(builder->cache, &status);
	if (status.layer[0] && !builder->layer_unusable)
		log_warning("a layer of the cache of compiled kernels is left out: %s",
			    status.layer);
	builder->layer_unusable = status.layer[0];
	if (!status.opened || status.usable != builder->cache_unusable)
		return;
	builder->cache_unusable = !status.usable;
	if (status.usable)
		log_notice("the cache of compiled kernels is in use again");
	else
		log_warning("no cache of compiled kernels, going on from memory: %s",
			    status.reason);
}

static void on_async(uv_async_t *async)
{
	struct builder *builder = container_of(async, struct builder, async);
	struct list ended, *node;

	/* Apart first: an answer that finds its worker gone has others forgotten. */
	list_init(&ended);
	uv_mutex_lock(&builder->lock);
	list_for_each_entry(struct builder_request, request, &builder->requests, in_builder) {
		if (request->ended) {
			list_remove(&request->in_builder);
			list_append(&ended, &request->in_builder);
		}
	}
	uv_mutex_unlock(&builder->lock);
	while ((node = list_pop(&ended)))
		builder_finish(container_of(node, struct builder_request, in_builder));
	watch_cache(builder);
}

static void hash_code(const struct cache_entry *entry, struct proto_compile_result *result)
{
	struct sha256_ctx sha;

	_Static_assert(sizeof(result->hash) == SHA256_DIGEST_SIZE, "a digest is a hash");
	sha256_init(&sha);
	sha256_update(&sha, entry->code_bytes, entry->code);
	sha256_digest(&sha, sizeof(result->hash), result->hash);
	result->hash_bytes = sizeof(result->hash);
}

/* On a thread of the queue, as the hash is: the loops of front and worker have better things to do. */
static void on_built(void *owner, int result, const struct cache_entry *entry,
		     const struct fmha_error *err)
{
	struct builder_request *request = owner;
	struct builder *builder = request->builder;
	struct proto_compile_result made = {0};
	struct fmha_error error = *err;
	int fd = -1;

	if (result == 0) {
		fd = memfd_file(entry->code, entry->code_bytes);
		if (fd < 0)
			(void)fmha_error_set(&error, FMHA_ENOMEM, "%.150s: no memory for the code",
					     entry->info.kernel);
	}
	if (fd >= 0) {
		made = (struct proto_compile_result){
			.size = entry->code_bytes,
			.registers = entry->info.registers,
			.spills = entry->info.spills,
			.lds_bytes = entry->info.lds_bytes,
			.compile_ms = entry->info.compile_ms,
		};
		hash_code(entry, &made);
	}
	uv_mutex_lock(&builder->lock);
	request->result = made;
	request->fd = fd;
	request->error = error;
	request->ended = true;
	/* Under the lock: once it is seen to have ended, the request is gone, and the builder may
	 * be. */
	(void)uv_async_send(&builder->async);
	uv_mutex_unlock(&builder->lock);
}

/* ---- requests ---- */

static const char *or_default(const char *configured, const char *fallback)
{
	return configured[0] ? configured : fallback;
}

static int default_jobs(void)
{
	long cores = sysconf(_SC_NPROCESSORS_ONLN);

	return cores > 1 ? (int)cores : 1;
}

static int open_queue(struct builder *builder, struct fmha_error *err)
{
	const struct config_compile *config = builder->config;
	const uint64_t *limits = builder->accounts->limits->value;
	const char *layers[] = {config->layer};
	struct cache_config cache = {.layers = layers,
				     .n_layers = config->layer[0] ? 1 : 0,
				     .max_bytes = limits[LIMIT_CACHE_BYTES],
				     .max_bytes_per_uid = limits[LIMIT_CACHE_BYTES_PER_UID]};
	int r;

	if (builder->queue)
		return 0;
	compile_paths_default(&builder->paths);
	cache.writable = or_default(config->cache, builder->paths.cache);
	r = cache_new(&cache, &builder->cache, err);
	if (r < 0)
		return r;
	builder->compile = (struct compile_config){
		.helper = or_default(config->helper, builder->paths.helper),
		.source_dir = or_default(config->sources, builder->paths.sources),
		.clang = config->clang[0] ? config->clang : NULL,
		.linker = config->linker[0] ? config->linker : NULL,
		.library_path = config->library_path[0] ? config->library_path : NULL,
		.deadline_ms = config->deadline_ms,
	};
	r = compile_queue_new(&builder->compile, builder->cache,
			      config->jobs ? (int)config->jobs : default_jobs(), true,
			      &builder->queue, err);
	if (r < 0)
		builder->cache = cache_free(builder->cache);
	return r;
}

void builder_open(struct builder *builder)
{
	struct fmha_error err;

	if (open_queue(builder, &err) < 0)
		log_warning("no compiler: %s", err.msg);
}

void builder_describe(const struct builder *builder, const char *arch, char *compiler,
		      size_t n_compiler, char *sources, size_t n_sources)
{
	struct compile_request request = {.build = {.name = "all", .source = "fmha.hip"}};
	char hex[CACHE_HEX_BYTES] = "";
	struct compile_target target = {0};

	(void)snprintf(request.build.arch, sizeof(request.build.arch), "%s", arch);
	if (builder->compile.helper &&
	    compile_identify(&builder->compile, &request, &target, NULL) == 0)
		cache_key_hex(&target.key, hex);
	(void)snprintf(compiler, n_compiler, "%s", *hex ? target.version : "");
	(void)snprintf(sources, n_sources, "%s", hex);
}

/* A worker talks to drivers and clients: it names a source and sets macros, nothing else reaches a
 * compiler. */
static int check_build(const struct kernel_build *build, struct fmha_error *err)
{
	if (strchr(build->source, '/'))
		return fmha_error_set_field(err, FMHA_EINVAL, "source",
					    "source %s: a file name, not a path", build->source);
	for (uint32_t i = 0; i < build->n_options; i++)
		if (strncmp(build->options[i], "-D", 2) != 0 || strchr(build->options[i], ' '))
			return fmha_error_set_field(err, FMHA_EINVAL, "options",
						    "option %s: not a macro, -DNAME=VALUE",
						    build->options[i]);
	return 0;
}

/* A request that is charged; NULL: @err says why not. */
static struct builder_request *request_new(struct builder *builder, struct builder_asker *asker,
					   uint32_t id, uint32_t uid, struct fmha_error *err)
{
	struct builder_request *request = calloc(1, sizeof(*request));
	struct account *account = account_get(builder->accounts, uid);

	if (!request || !account)
		(void)fmha_error_set(err, FMHA_ENOMEM, "compile: out of memory");
	else if (account_charge(account, ACCOUNT_COMPILES, 1, err) == 0) {
		request->builder = builder;
		request->account = account;
		request->asker = asker;
		request->id = id;
		request->fd = -1;
		list_append(&builder->requests, &request->in_builder);
		list_append(&asker->requests, &request->in_asker);
		return request;
	}
	(void)account_put(account);
	free(request);
	return NULL;
}

int builder_submit(struct builder *builder, struct builder_asker *asker, uint32_t id,
		   const struct proto_compile_params *params, struct fmha_error *err)
{
	const struct compile_request compile = {.build = params->build, .uid = params->uid};
	struct builder_request *request;
	int r = check_build(&params->build, err);

	if (r == 0)
		r = open_queue(builder, err);
	if (r < 0)
		return r;
	request = request_new(builder, asker, id, params->uid, err);
	if (!request)
		return err->code;
	r = compile_queue_submit(builder->queue, &compile, priorities[params->urgency], on_built,
				 request, &request->waiter, err);
	if (r < 0)
		request_free(request);
	return r;
}

static void forget(struct builder_request *request)
{
	list_remove(&request->in_asker);
	request->asker = NULL;
	/* Else on_built() is under way, or builder_finish() is next. */
	if (compile_queue_forget(request->builder->queue, &request->waiter))
		request_free(request);
}

bool builder_forget(struct builder_asker *asker, uint32_t id)
{
	list_for_each_entry(struct builder_request, request, &asker->requests, in_asker) {
		if (request->id != id)
			continue;
		forget(request);
		return true;
	}
	return false;
}

void builder_forget_all(struct builder_asker *asker)
{
	/* The last one first: the queue would begin with the next when the first one is gone. */
	while (!list_is_empty(&asker->requests))
		forget(container_of(asker->requests.prev, struct builder_request, in_asker));
}

int builder_new(uv_loop_t *loop, const struct config_compile *config, struct accounts *accounts,
		struct builder **ret_builder, struct fmha_error *err)
{
	struct builder *builder = calloc(1, sizeof(*builder));

	if (!builder)
		return fmha_error_set(err, FMHA_ENOMEM, "builder: out of memory");
	builder->config = config;
	builder->accounts = accounts;
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
	list_for_each_entry(struct builder_request, request, &builder->requests, in_builder)
		request_free(request);
	uv_close((uv_handle_t *)&builder->async, on_closed);
	return NULL;
}

static cJSON *cache_json(struct builder *builder)
{
	cJSON *json = cJSON_CreateObject();
	struct cache_status status = {0};

	if (builder->cache)
		cache_get_status(builder->cache, &status);
	cJSON_AddStringToObject(json, "state",
				!status.opened  ? "unopened"
				: status.usable ? "ok"
						: "unusable");
	cJSON_AddStringToObject(json, "reason", status.reason);
	cJSON_AddStringToObject(json, "layer", status.layer);
	cJSON_AddNumberToObject(json, "bytes", (double)status.bytes);
	cJSON_AddNumberToObject(json, "entries", (double)status.entries);
	cJSON_AddNumberToObject(json, "memory_bytes", (double)status.memory_bytes);
	cJSON_AddNumberToObject(json, "memory_entries", (double)status.memory_entries);
	cJSON_AddNumberToObject(json, "evicted", (double)status.evicted);
	cJSON_AddNumberToObject(json, "unstored", (double)status.unstored);
	return json;
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
	cJSON_AddNumberToObject(json, "cancelled", (double)status.cancelled);
	current = cJSON_AddArrayToObject(json, "current");
	for (uint32_t i = 0; i < status.n_current; i++)
		cJSON_AddItemToArray(current, cJSON_CreateString(status.current[i]));
	cJSON_AddStringToObject(json, "clang", builder->config->clang);
	cJSON_AddItemToObject(json, "cache", cache_json(builder));
	return json;
}
