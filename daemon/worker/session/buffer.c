/* SPDX-License-Identifier: MIT */
/*
 * buffer.c: memory that clients have registered: created here or imported, charged before it is
 * made, and given back once its last run has ended.
 */
#include "worker.h"

#include <stdlib.h>

#include <proto/cleanup.h>
#include <base/clock.h>
#include <proto/error.h>

#define RELEASE_ELSEWHERE_BYTES (256u << 10) /* unmapping more takes long: 0.2 us a page */
#define REFILL_AFTER_MS         20
#define OPEN_HANDLE_NS          (2 * NS_PER_S)

/* ---- the end of one ---- */

static struct buffer *buffer_of_release(struct offload *offload)
{
	return container_of(offload, struct buffer, release);
}

static void release_run(struct offload *offload)
{
	struct buffer *buffer = buffer_of_release(offload);

	device_memory_free(buffer->worker->device, &buffer->memory);
}

static void release_done(struct offload *offload)
{
	free(buffer_of_release(offload));
}

static void release_memory(struct buffer *buffer)
{
	struct worker *worker = buffer->worker;
	bool here = device_shares_memory(worker->device) &&
		    buffer->memory.bytes < RELEASE_ELSEWHERE_BYTES;

	/* In its owner's order: what is created next may need the memory. */
	buffer->release = (struct offload){.owner = buffer->owner,
					   .user = buffer->account,
					   .timeout_ns = DEVICE_CALL_NS,
					   .run = release_run,
					   .done = release_done,
					   .undo = release_done};
	if (!here && offload_start(&worker->offloads, &buffer->release, NULL) == 0)
		return;
	release_run(&buffer->release);
	release_done(&buffer->release);
}

static void give_back(struct account *account, uint64_t bytes)
{
	account_release(account, ACCOUNT_BUFFERS, 1);
	account_release(account, ACCOUNT_MEMORY, bytes);
	(void)account_put(account);
}

struct buffer *buffer_unref(struct buffer *buffer)
{
	if (!buffer || --buffer->n_references > 0)
		return NULL;
	give_back(buffer->account, buffer->charged_bytes);
	release_memory(buffer);
	return NULL;
}

/* A new buffer of @bytes, charged before it is made; give_back() ends it. */
static int charge_buffer(struct session *session, uint64_t bytes, struct fmha_error *err)
{
	struct account *account = session->account;
	int r = session_has_room(session, LIMIT_BUFFERS_PER_CONNECTION, &session->buffers,
				 "buffers", err);

	if (r == 0)
		r = account_charge(account, ACCOUNT_BUFFERS, 1, err);
	if (r < 0)
		return r;
	r = account_charge(account, ACCOUNT_MEMORY, bytes, err);
	if (r < 0) {
		account_release(account, ACCOUNT_BUFFERS, 1);
		return r;
	}
	account->n_references++;
	return 0;
}

/* Makes the mapped memory, for which @bytes are charged, a buffer of the session, which takes both
 * over. On failure the memory is freed. */
static int add_buffer(struct session *session, struct device_memory *memory, uint64_t bytes,
		      uint64_t *ret_id, struct fmha_error *err)
{
	struct buffer *buffer = calloc(1, sizeof(*buffer));
	uint64_t id = buffer ? table_add(&session->buffers, buffer) : 0;

	if (!id) {
		free(buffer);
		device_memory_free(session->worker->device, memory);
		return fmha_error_set(err, FMHA_ENOMEM, "buffer: out of memory");
	}
	buffer->n_references = 1;
	buffer->worker = session->worker;
	buffer->owner = session;
	buffer->account = session->account;
	buffer->memory = *memory;
	buffer->charged_bytes = bytes;
	session->memory_bytes += bytes;
	*ret_id = id;
	return 0;
}

/* ---- in the making ---- */

/* A buffer in the making: created here or imported. On a GPU either is a call of the driver's that
 * can take long. */
struct making {
	struct offload offload;
	struct worker *worker;
	struct session *session; /* not to be touched by run() and undo() */
	uint32_t id;
	uint32_t uid, pid;        /* the client's, who imports */
	enum proto_method method; /* PROTO_BUFFER_CREATE or PROTO_BUFFER_IMPORT */
	struct proto_buffer_import_params params;
	int fd; /* in: the client's; out of a creation: what goes to it; -1: none */
	uint64_t charged_bytes;
	struct device_memory memory;
	struct fmha_error error;
	int result;
	bool is_second; /* after what was only kept for later has made room */
};

static struct making *making_of(struct offload *offload)
{
	return container_of(offload, struct making, offload);
}

static struct device_memory_source source_of(const struct making *making)
{
	const struct proto_buffer_import_params *params = &making->params;

	return (struct device_memory_source){.kind = params->kind,
					     .fd = making->fd,
					     .handle = params->handle,
					     .handle_bytes = params->handle_bytes,
					     .base_offset = params->base_offset,
					     .size = params->size,
					     .uid = making->uid,
					     .pid = making->pid};
}

static int charge_making(struct making *making, struct fmha_error *err)
{
	struct device_memory_source source = source_of(making);

	making->charged_bytes = device_memory_cost(making->worker->device, &source,
						   making->method == PROTO_BUFFER_CREATE);
	return charge_buffer(making->session, making->charged_bytes, err);
}

static void making_run(struct offload *offload)
{
	struct making *making = making_of(offload);
	const struct proto_buffer_import_params *params = &making->params;
	struct device_memory_source source = source_of(making);
	struct device *device = making->worker->device;

	if (making->method == PROTO_BUFFER_CREATE)
		making->result = device_memory_create(device, params->size, &making->memory,
						      &making->fd, &making->error);
	else
		making->result = device_memory_import(device, &source, &making->memory,
						      &making->error);
}

/* Puts the memory into the session's table and answers. */
static void making_finish(struct making *making)
{
	struct session *session = making->session;
	const bool created = making->method == PROTO_BUFFER_CREATE;
	struct proto_buffer_result result = {.size = making->params.size};
	int r = making->result;

	result.kind = created ? making->memory.kind : making->params.kind;
	result.allocation_bytes = created ? making->memory.allocation_bytes : 0;
	if (r == 0)
		r = add_buffer(session, &making->memory, making->charged_bytes, &result.buffer,
			       &making->error);
	if (r < 0) {
		give_back(session->account, making->charged_bytes);
		connection_answer_error(&session->connection, making->id, &making->error);
		return;
	}
	connection_answer(&session->connection, making->id, making->method, &result,
			  created ? making->fd : -1);
	if (created)
		making->fd = -1; /* the answer has taken it */
}

static void making_deinit(struct making *making)
{
	closep(&making->fd);
}

static void making_free(struct making *making)
{
	making_deinit(making);
	free(making);
}

static void making_throw_away(struct offload *offload)
{
	struct making *making = making_of(offload);

	if (making->result == 0)
		device_memory_free(making->worker->device, &making->memory);
	making->result = FMHA_ECANCELED;
}

static void making_end(struct offload *offload)
{
	making_free(making_of(offload));
}

static void making_undo(struct offload *offload)
{
	making_throw_away(offload);
	making_end(offload);
}

/* The client has gone meanwhile. */
static void making_discard(struct making *making)
{
	making->offload = (struct offload){.timeout_ns = DEVICE_CALL_NS,
					   .run = making_throw_away,
					   .done = making_end,
					   .undo = making_end};
	offload_start_or_run(&making->worker->offloads, &making->offload);
}

static void making_done(struct offload *offload);
static void making_late(struct offload *offload);

static int making_start(struct making *making, struct fmha_error *err)
{
	making->offload = (struct offload){
		.owner = making->session,
		.user = making->session->account,
		.timeout_ns = making->params.handle_bytes ? OPEN_HANDLE_NS : DEVICE_CALL_NS,
		.urgent = true,
		.run = making_run,
		.done = making_done,
		.late = making_late,
		.undo = making_undo};
	return offload_start(&making->worker->offloads, &making->offload, err);
}

/* Return: whether it is under way once more. */
static bool try_again(struct making *making)
{
	if (making->result != FMHA_ENOMEM || making->is_second ||
	    !device_make_room(making->worker->device, making->params.size))
		return false;
	making->is_second = true;
	return making_start(making, NULL) == 0;
}

static void making_done(struct offload *offload)
{
	struct making *making = making_of(offload);
	struct session *session = making->session;

	if (!session->hung_up && try_again(making))
		return;
	if (session->hung_up) {
		give_back(session->account, making->charged_bytes);
		making_discard(making);
	} else {
		making_finish(making);
		making_free(making);
	}
	session_offload_ended(session);
}

static void making_late(struct offload *offload)
{
	struct making *making = making_of(offload);
	struct session *session = making->session;
	struct fmha_error err;

	fmha_error_set_field(&err, FMHA_ETIMEDOUT, making->params.handle_bytes ? "handle" : "size",
			     "the driver did not %s within %llu s",
			     making->params.handle_bytes ? "open the IPC handle"
							 : "provide the memory",
			     (unsigned long long)(offload->timeout_ns / NS_PER_S));
	give_back(session->account, making->charged_bytes);
	session_offload_late(session, making->id, &err);
}

/* Of what is charged. On a device that shares the host's memory these are a few quick calls: done
 * at once. */
static int make_buffer(struct making *now, struct fmha_error *err)
{
	struct session *session = now->session;
	struct making *making;
	int r;

	if (device_shares_memory(session->worker->device)) {
		making_run(&now->offload);
		making_finish(now);
		return 0;
	}
	making = malloc(sizeof(*making));
	if (!making) {
		give_back(session->account, now->charged_bytes);
		return fmha_error_set(err, FMHA_ENOMEM, "buffer: out of memory");
	}
	*making = *now;
	now->fd = -1;
	r = making_start(making, err);
	if (r < 0) {
		give_back(session->account, making->charged_bytes);
		making_free(making);
	} else {
		session->n_offloads++;
	}
	return r;
}

int buffer_create(struct session *session, uint32_t id,
		  const struct proto_buffer_create_params *params, struct fmha_error *err)
{
	_cleanup_(making_deinit) struct making making = {.worker = session->worker,
							 .session = session,
							 .id = id,
							 .method = PROTO_BUFFER_CREATE,
							 .params = {.size = params->size},
							 .fd = -1};
	int r = charge_making(&making, err);

	if (r < 0)
		return r;
	/* In either case: what was spare may have been taken during a refill. */
	worker_refill(session->worker, REFILL_AFTER_MS);
	if (!device_memory_take(session->worker->device, params->size, &making.memory, &making.fd))
		return make_buffer(&making, err);
	making_finish(&making);
	return 0;
}

int buffer_import(struct session *session, uint32_t id,
		  const struct proto_buffer_import_params *params, int *fd, struct fmha_error *err)
{
	_cleanup_(making_deinit) struct making making = {.worker = session->worker,
							 .session = session,
							 .id = id,
							 .uid = session->uid,
							 .pid = session->pid,
							 .method = PROTO_BUFFER_IMPORT,
							 .params = *params,
							 .fd = take_fd(fd)};
	int r = charge_making(&making, err);

	return r < 0 ? r : make_buffer(&making, err);
}

int buffer_release(struct session *session, uint64_t id, struct fmha_error *err)
{
	struct buffer *buffer = table_remove(&session->buffers, id);

	if (!buffer)
		return fmha_error_set_field(err, FMHA_ENOENT, "buffer", "buffer %llu: no such",
					    (unsigned long long)id);
	session->memory_bytes -= buffer->charged_bytes;
	buffer_unref(buffer);
	return 0;
}
