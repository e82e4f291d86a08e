/* SPDX-License-Identifier: MIT */
/*
 * lasting_memory.c: memory of the device that outlives this process. The front asks for it, for a pool, and has the only
 * descriptor of it: here it is known only while it is made or cleared, so a worker that starts anew has nothing to find again.
 * One call of a user's is under way at a time, and a driver that ends the process in it is held against that user.
 */
#include "worker.h"

#include <stdlib.h>

#include <proto/cleanup.h>
#include <proto/error.h>
#include <proto/page_numbers.h>

struct lasting {
	struct offload offload;
	struct worker *worker;
	struct account *account;
	uint32_t id; /* of the front's request */
	enum proto_method method;
	struct proto_worker_clear_params what; /* of WORKER_MEMORY the size alone */
	int fd; /* in: of what is cleared; out: of what was made; -1: none */
	int result;
	struct fmha_error error;
};

static struct lasting *lasting_of(struct offload *offload)
{
	return container_of(offload, struct lasting, offload);
}

static void lasting_free(struct lasting *lasting)
{
	closep(&lasting->fd);
	free(lasting);
}

static int clear(struct device *device, struct lasting *lasting)
{
	const struct proto_worker_clear_params *pages = &lasting->what;
	const struct device_memory_source source = {
		.kind = PROTO_VMM_FD, .fd = lasting->fd, .size = pages->size};
	struct device_memory memory;
	int r = device_memory_import(device, &source, &memory, &lasting->error);

	if (r < 0)
		return r;
	for (uint32_t i = 0; i < pages->pages_bytes / PROTO_PAGE_NUMBER_BYTES && r == 0; i++)
		r = device_memory_clear(device, &memory,
					proto_get_page(pages->pages, i) * pages->page_bytes,
					pages->page_bytes, &lasting->error);
	device_memory_free(device, &memory);
	return r;
}

static void lasting_run(struct offload *offload)
{
	struct lasting *lasting = lasting_of(offload);
	struct device *device = lasting->worker->device;
	struct device_memory memory;

	if (lasting->method == PROTO_WORKER_CLEAR) {
		lasting->result = clear(device, lasting);
		return;
	}
	lasting->result = device_memory_create(device, lasting->what.size, &memory, &lasting->fd,
					       &lasting->error);
	/* The descriptor keeps it. */
	if (lasting->result == 0)
		device_memory_free(device, &memory);
}

static void lasting_done(struct offload *offload)
{
	struct lasting *lasting = lasting_of(offload);
	struct connection *control = &lasting->worker->control;

	if (lasting->result < 0) {
		connection_answer_error(control, lasting->id, &lasting->error);
	} else {
		const bool made = lasting->method == PROTO_WORKER_MEMORY;

		connection_answer(control, lasting->id, lasting->method, &(struct proto_empty){0},
				  made ? lasting->fd : -1);
		if (made)
			lasting->fd = -1;
	}
	(void)account_put(lasting->account);
	lasting_free(lasting);
}

static void lasting_late(struct offload *offload)
{
	struct lasting *lasting = lasting_of(offload);
	struct fmha_error err;

	fmha_error_set(&err, FMHA_ETIMEDOUT, "the driver has not answered in time");
	connection_answer_error(&lasting->worker->control, lasting->id, &err);
	(void)account_put(lasting->account);
}

static void lasting_undo(struct offload *offload)
{
	lasting_free(lasting_of(offload));
}

static int lasting_start(struct worker *worker, uint32_t uid, const struct lasting *wanted,
			 struct fmha_error *err)
{
	struct lasting *lasting = malloc(sizeof(*lasting));
	struct account *account = lasting ? account_get(&worker->accounts, uid) : NULL;
	struct doing_before before;
	int r;

	if (!account) {
		free(lasting);
		return fmha_error_set(err, FMHA_ENOMEM, "out of memory");
	}
	*lasting = *wanted;
	lasting->worker = worker;
	lasting->account = account;
	lasting->offload = (struct offload){.owner = account,
					    .user = account,
					    .timeout_ns = DEVICE_CALL_NS,
					    .run = lasting_run,
					    .done = lasting_done,
					    .late = lasting_late,
					    .undo = lasting_undo};
	before = doing_begin(&worker->page->doing, wanted->method, uid);
	r = offload_start(&worker->offloads, &lasting->offload, err);
	doing_end(&worker->page->doing, before);
	if (r < 0) {
		(void)account_put(account);
		free(lasting);
	}
	return r;
}

int lasting_memory_make(struct worker *worker, uint32_t id,
			const struct proto_worker_memory_params *params, struct fmha_error *err)
{
	const struct lasting wanted = {
		.id = id, .method = PROTO_WORKER_MEMORY, .what = {.size = params->size}, .fd = -1};

	return lasting_start(worker, params->uid, &wanted, err);
}

int lasting_memory_clear(struct worker *worker, uint32_t id,
			 const struct proto_worker_clear_params *params, int *fd,
			 struct fmha_error *err)
{
	struct lasting wanted = {
		.id = id, .method = PROTO_WORKER_CLEAR, .what = *params, .fd = *fd};
	int r;

	if (*fd < 0 || params->pages_bytes % PROTO_PAGE_NUMBER_BYTES != 0)
		return fmha_error_set(err, FMHA_EINVAL, "no descriptor, or %u bytes of pages",
				      params->pages_bytes);
	r = lasting_start(worker, params->uid, &wanted, err);
	if (r == 0)
		*fd = -1;
	return r;
}
