/* SPDX-License-Identifier: MIT */
/*
 * open_device.c: clients that wait for a device. Each gets one end of a new socket pair once the worker
 * has taken the other.
 */
#include "front.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <proto/error.h>

#include "process.h"

static void open_request_free(struct open_request *open)
{
	list_remove(&open->in_slot);
	list_remove(&open->in_client);
	if (open->fd >= 0)
		(void)close(open->fd);
	if (open->account) {
		account_release(open->account, ACCOUNT_DESCRIPTORS, 1);
		(void)account_put(open->account);
	} else if (open->sent) {
		connection_release_fds(&open->client->connection, 1);
	}
	free(open);
}

void open_request_forget(struct open_request *open)
{
	struct account *account = open->client->account;

	/* There is room: the connection has just given back as much. */
	if (!open->sent || account_charge(account, ACCOUNT_DESCRIPTORS, 1, NULL) < 0) {
		if (open->sent)
			worker_slot_forget(open->slot, open);
		open_request_free(open);
		return;
	}
	open->account = account;
	account->n_references++;
	open->client = NULL;
	list_remove(&open->in_client);
	if (open->fd >= 0)
		(void)close(open->fd);
	open->fd = -1;
}

static void refuse_open(struct open_request *open, int code, const char *reason)
{
	struct fmha_error err;

	fmha_error_set_field(&err, code, "device", "device %u: %.200s", open->slot->index, reason);
	if (open->client)
		connection_answer_error(&open->client->connection, open->id, &err);
	open_request_free(open);
}

void open_request_refuse_all(struct worker_slot *slot, int code, const char *reason)
{
	while (!list_is_empty(&slot->opens))
		refuse_open(container_of(slot->opens.next, struct open_request, in_slot), code,
			    reason);
}

/* The worker has taken its end, or has not. */
static void on_attached(void *owner, const union proto_any_result *result, int fd,
			const struct fmha_error *error)
{
	struct open_request *open = owner;
	struct worker_slot *slot = open->slot;
	struct proto_open_device_result opened = {.device = slot->device,
						  .worker_pid = worker_slot_pid(slot)};

	(void)fd;
	if (error->code == FMHA_ECONN) {
		refuse_open(open, FMHA_EDEVICE, "the worker died");
		return;
	}
	if (!open->client) {
		/* Its end is closed: the worker's session ends by itself. */
	} else if (!result) {
		connection_answer_error(&open->client->connection, open->id, error);
	} else {
		fd = open->fd;
		open->fd = -1;
		connection_answer(&open->client->connection, open->id, PROTO_OPEN_DEVICE, &opened,
				  fd);
	}
	open_request_free(open);
}

/* Makes the pair of sockets and sends the worker its end. Return: whether it was. */
static bool attach(struct open_request *open)
{
	struct worker_slot *slot = open->slot;
	const struct client *client = open->client;
	struct proto_worker_attach_params params = {.session = ++slot->front->next_session,
						    .uid = client->uid,
						    .gid = client->gid,
						    .pid = client->pid};
	struct fmha_error err;
	int pair[2];

	if (connection_hold_fds(&open->client->connection, 1, &err) < 0) {
		refuse_open(open, err.code, err.msg);
		return false;
	}
	open->sent = true; /* or held, which is given back alike */
	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) < 0) {
		refuse_open(open, FMHA_EBUSY, "no file descriptors left");
		return false;
	}
	/* The client gets an ordinary blocking socket. */
	(void)fcntl(pair[0], F_SETFL, O_RDWR);
	memcpy(params.client, client->name, sizeof(params.client));
	open->fd = pair[0];
	if (connection_request(&slot->process->control, PROTO_WORKER_ATTACH, &params, pair[1],
			       on_attached, open, &err) == 0)
		return true;
	refuse_open(open, FMHA_EDEVICE, err.msg);
	return false;
}

bool open_request_attach_all(struct worker_slot *slot)
{
	bool any = false;

	list_for_each_entry(struct open_request, open, &slot->opens, in_slot) {
		if (!open->sent)
			any |= attach(open);
	}
	return any;
}

int open_request_new(struct worker_slot *slot, struct client *client, uint32_t id,
		     struct fmha_error *err)
{
	struct open_request *open = calloc(1, sizeof(*open));

	if (!open)
		return fmha_error_set(err, FMHA_ENOMEM, "open_device: out of memory");
	open->slot = slot;
	open->client = client;
	open->id = id;
	open->fd = -1;
	list_append(&slot->opens, &open->in_slot);
	list_append(&client->opens, &open->in_client);
	return 0;
}
