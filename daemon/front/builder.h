/* SPDX-License-Identifier: MIT */
/*
 * builder.h: the front compiles kernels for its workers: the queue of daemon/compile, with answers
 * that come back on the loop. Each request is charged to the user on whose behalf it is made.
 *
 * Opened by the first request: a machine that never compiles needs neither cache nor compiler.
 */
#ifndef FMHAD_FRONT_BUILDER_H
#define FMHAD_FRONT_BUILDER_H

#include <cjson/cJSON.h>
#include <uv.h>

#include <base/account.h>
#include <base/config.h>
#include <base/list.h>
#include <proto/messages.h>

struct builder;
struct builder_request;

/*
 * On the loop, for the owner of request @id.
 * @fd:     memfd with the code object, taken; -1 on failure
 * @error:  borrowed; code FMHA_OK when there is a result
 */
typedef void (*builder_done)(void *owner, uint32_t id, const struct proto_compile_result *result,
			     int fd, const struct fmha_error *error);

/* Who asks, and what for. */
struct builder_asker {
	builder_done done;
	void *owner;
	struct list requests; /* struct builder_request, in the order of asking */
};

/* @config and @accounts are kept. Return: 0, FMHA_ENOMEM. */
int builder_new(uv_loop_t *loop, const struct config_compile *config, struct accounts *accounts,
		struct builder **ret_builder, struct fmha_error *err);

/* Ends what runs; no callback comes any more. The memory is freed when the loop has closed the
 * builder's handle. Takes NULL. */
struct builder *builder_free(struct builder *builder);

/*
 * Asks for a kernel. @id: the asker's, to tell its requests apart
 * Return: 0 (the callback will come), FMHA_EQUOTA (the user has asked for enough), FMHA_EINVAL,
 * FMHA_ENOMEM, FMHA_EIO, and no callback.
 */
int builder_submit(struct builder *builder, struct builder_asker *asker, uint32_t id,
		   const struct proto_compile_params *params, struct fmha_error *err);

/* Nobody waits for it: no callback comes, and what nobody else has asked for is not built. Return:
 * whether anybody did. */
bool builder_forget(struct builder_asker *asker, uint32_t id);
/* The asker is gone. */
void builder_forget_all(struct builder_asker *asker);

/* Makes builder_describe() possible. */
void builder_open(struct builder *builder);
/* Which compiler, and which sources, code for @arch comes from; empty where there is no compiler. Runs
 * a helper: not on the loop. */
void builder_describe(const struct builder *builder, const char *arch, char *compiler,
		      size_t n_compiler, char *sources, size_t n_sources);

/* Says what is queued, running, built, and how the cache stands: one object, given. */
cJSON *builder_status_json(struct builder *builder);

#endif
