/* SPDX-License-Identifier: MIT */
/* client.c: a connection to the front: who it is, what it may ask. */
#include "pools.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <proto/cleanup.h>
#include <base/clock.h>
#include <proto/error.h>

static struct client *client_of(struct connection *connection)
{
	return container_of(connection, struct client, connection);
}

static int on_hello(struct client *client, uint32_t id, const struct proto_hello_params *params,
		    struct fmha_error *err)
{
	const struct front *front = client->front;
	struct proto_hello_result result = {.pid = (uint32_t)getpid()};

	if (client->greeted)
		return fmha_error_set_field(err, FMHA_EINVAL, "method", "hello was said already");
	if (params->version < PROTO_VERSION_OLD) /* it names the highest that it speaks */
		return fmha_error_set_field(err, FMHA_EVERSION, "version",
					    "version %u: this daemon speaks %u to %u",
					    params->version, PROTO_VERSION_OLD, PROTO_VERSION);
	result.version = params->version < PROTO_VERSION ? params->version : PROTO_VERSION;
	memcpy(client->name, params->client, sizeof(client->name));
	client->greeted = true;
	connection_greeted(&client->connection);
	snprintf(result.server, sizeof(result.server), "fmhad/%s", FMHA_VERSION);
	result.max_frame_bytes = (uint32_t)front->limits.value[LIMIT_FRAME_BYTES];
	result.max_in_flight = (uint32_t)front->limits.value[LIMIT_IN_FLIGHT_PER_CONNECTION];
	result.n_devices = front->n_slots;
	connection_answer(&client->connection, id, PROTO_HELLO, &result, -1);
	return 0;
}

static void on_devices(struct client *client, uint32_t id)
{
	const struct front *front = client->front;
	struct proto_devices_result result = {.n_devices = front->n_slots};

	for (uint32_t i = 0; i < front->n_slots; i++)
		result.devices[i] = front->slots[i].device;
	connection_answer(&client->connection, id, PROTO_DEVICES, &result, -1);
}

static int on_open_device(struct client *client, uint32_t id,
			  const struct proto_open_device_params *params, struct fmha_error *err)
{
	struct front *front = client->front;
	uint32_t banned_s = quarantine_ban_s(&front->quarantine, client->uid, clock_ns());

	if (params->device >= front->n_slots)
		return fmha_error_set_field(err, FMHA_ENOENT, "device",
					    "device %u: there are %u, counted from 0",
					    params->device, front->n_slots);
	if (front->draining)
		return fmha_error_set(err, FMHA_EBUSY, "the daemon is stopping");
	if (banned_s > 0)
		return fmha_error_set_field(err, FMHA_EQUOTA, "device",
					    "requests of user %u have ended too many workers: no "
					    "device can be opened for %u s",
					    client->uid, banned_s);
	return worker_slot_open(&front->slots[params->device], client, id, err);
}

static int client_handle(struct connection *connection, uint32_t id, enum proto_method method,
			 const union proto_any_params *params, int *fd, struct fmha_error *err)
{
	struct client *client = client_of(connection);

	(void)fd; /* no request to the front brings any */
	if (!client->greeted && method != PROTO_HELLO)
		return fmha_error_set_field(err, FMHA_EPERM, "method", "hello comes first");
	switch (method) {
	case PROTO_PING:
		connection_answer(&client->connection, id, PROTO_PING, &(struct proto_empty){0},
				  -1);
		return 0;
	case PROTO_HELLO:
		return on_hello(client, id, &params->HELLO, err);
	case PROTO_STATUS:
		status_request(client, id);
		return 0;
	case PROTO_DEVICES:
		on_devices(client, id);
		return 0;
	case PROTO_OPEN_DEVICE:
		return on_open_device(client, id, &params->OPEN_DEVICE, err);
	case PROTO_POOL_OPEN:
	case PROTO_POOL_CLOSE:
	case PROTO_POOL_LEASE:
	case PROTO_POOL_SEAL:
	case PROTO_POOL_FIND:
	case PROTO_POOL_GIVE_BACK:
	case PROTO_POOL_DROP:
	case PROTO_POOL_SHARE:
		return pools_handle(client, id, method, params, err);
	default:
		return fmha_error_set_field(err, FMHA_EINVAL, "method",
					    "%s is answered by workers: open a device",
					    proto_methods[method].name);
	}
}

static void on_hangup(struct connection *connection)
{
	struct client *client = client_of(connection);

	while (!list_is_empty(&client->opens))
		open_request_forget(
			container_of(client->opens.next, struct open_request, in_client));
	status_forget(client);
	pools_forget(client);
	list_remove(&client->in_clients);
	client->front->n_clients--;
	account_release(client->account, ACCOUNT_CONNECTIONS, 1);
}

static void on_closed(struct connection *connection)
{
	struct client *client = client_of(connection);

	account_put(client->account);
	client->front->on_left(client->front);
	free(client);
}

static const struct connection_ops client_ops = {
	.handle = client_handle, .on_closed = on_closed, .on_hangup = on_hangup};

/* Of one that never had a connection. */
static void client_freep(struct client **client)
{
	if (*client && (*client)->account) {
		account_release((*client)->account, ACCOUNT_CONNECTIONS, 1);
		account_put((*client)->account);
	}
	free(*client);
}

static bool client_charge(struct client *client)
{
	struct account *account = account_get(&client->front->accounts, client->uid);

	if (!account)
		return false;
	if (account_charge(account, ACCOUNT_CONNECTIONS, 1, NULL) == 0)
		client->account = account;
	else
		account_put(account);
	return client->account;
}

/* Return: false: there is no room for it. */
static bool admit(struct front *front, int *fd, const struct ucred *peer)
{
	_cleanup_(client_freep) struct client *client = calloc(1, sizeof(*client));

	if (!client)
		return false;
	client->front = front;
	client->uid = peer->uid;
	client->gid = peer->gid;
	client->pid = (uint32_t)peer->pid;
	list_init(&client->opens);
	list_init(&client->pools);
	list_init(&client->pool_openings);
	if (!client_charge(client) || connection_open(&client->connection, &front->hub, take_fd(fd),
						      client->account, true, &client_ops, NULL) < 0)
		return false;
	client->connection.peer_pid = client->pid;
	list_append(&front->clients, &client->in_clients);
	client = NULL; /* its connection's from now on */
	return true;
}

void client_new(struct front *front, int fd)
{
	_cleanup_(closep) int socket = fd;
	struct ucred peer;
	socklen_t size = sizeof(peer);

	if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) < 0)
		peer = (struct ucred){.uid = (uid_t)-1};
	else if (admit(front, &socket, &peer)) {
		front->n_clients++;
		front->n_accepted++;
		return;
	}
	front->n_refused++;
	log_limited_about(&front->log,
			  &(struct log_about){.fields = LOG_UID | LOG_PID,
					      .uid = peer.uid,
					      .pid = (uint32_t)peer.pid},
			  LOG_LEVEL_NOTICE, "refusing a connection of user %u", peer.uid);
}
