/* SPDX-License-Identifier: MIT */
/*
 * builder.h: the front compiles kernels for its workers: the queue of daemon/compile, with answers
 * that come back on the loop.
 *
 * Opened by the first request: a machine that never compiles needs neither cache nor compiler.
 */
#ifndef FMHAD_FRONT_BUILDER_H
#define FMHAD_FRONT_BUILDER_H

#include <cjson/cJSON.h>
#include <uv.h>

#include <base/config.h>
#include <proto/messages.h>

struct builder;

/*
 * On the loop.
 * @fd:     memfd with the code object, taken; -1 on failure
 * @error:  borrowed; code FMHA_OK when there is a result
 */
typedef void (*builder_done)(void *owner, const struct proto_compile_result *result, int fd,
			     const struct fmha_error *error);

/* @config is kept. Return: 0, FMHA_ENOMEM. */
int builder_new(uv_loop_t *loop, const struct config_compile *config, struct builder **ret_builder,
		struct fmha_error *err);

/* Ends what runs; no callback comes any more. The memory is freed when the loop has closed the
 * builder's handle. Takes NULL. */
struct builder *builder_free(struct builder *builder);

/* Return: 0 (the callback will come), or a negative FMHA_E* and no callback. */
int builder_request(struct builder *builder, const struct proto_compile_params *params,
		    builder_done done, void *owner, struct fmha_error *err);

/* @owner is gone: its callbacks are dropped, builds go on for the cache. */
void builder_forget(struct builder *builder, void *owner);

/* What is queued, running, built: one object, given. */
cJSON *builder_status_json(struct builder *builder);

#endif
