/* SPDX-License-Identifier: MIT */
/* client.c: finding the daemon, saying hello, and what the front answers. */
#include "client.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <proto/cleanup.h>

#define SYSTEM_SOCKET "/run/fmhad/fmhad.sock"

static const char front_name[] = "the daemon";

const char *fmha_version(void)
{
	return FMHA_VERSION;
}

int client_copy_name(char *to, size_t capacity, const char *from, const char *field,
		     struct fmha_error *err)
{
	if (strlen(from) >= capacity)
		return fmha_error_set_field(err, FMHA_EINVAL, field, "%s: at most %zu bytes", field,
					    capacity - 1);
	memcpy(to, from, strlen(from) + 1);
	return 0;
}

/* ---- connecting ---- */

static void sleep_ms(uint32_t ms)
{
	const struct timespec pause = deadline_timespec((int64_t)ms * 1000000);

	(void)nanosleep(&pause, NULL);
}

/* A connected socket, blocking. */
static int connect_path(const char *path, int64_t deadline, int *ret_fd, struct fmha_error *err)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	_cleanup_(closep) int fd = -1;
	int r, flags;

	if (strlen(path) >= sizeof(address.sun_path))
		return fmha_error_set_field(err, FMHA_EINVAL, "path",
					    "a socket's path has at most %zu bytes: %.80s...",
					    sizeof(address.sun_path) - 1, path);
	memcpy(address.sun_path, path, strlen(path) + 1);
	fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		return fmha_error_set(err, FMHA_EIO, "socket: %s", strerror(errno));
	for (;;) {
		r = connect(fd, (const struct sockaddr *)&address, sizeof(address));
		/* EAGAIN: the listener's backlog is full. */
		if (r == 0 || (errno != EAGAIN && errno != EINTR) ||
		    deadline_left_ns(deadline) == 0)
			break;
		sleep_ms(2);
	}
	if (r < 0 && (errno == EACCES || errno == EPERM))
		return fmha_error_set(err, FMHA_EPERM,
				      "%.108s: %s: it is for members of its group (sudo "
				      "usermod -aG fmha $USER, and log in again)",
				      path, strerror(errno));
	if (r < 0 && errno == EAGAIN)
		return fmha_error_set(err, FMHA_ETIMEDOUT, "%s: nobody accepts", path);
	if (r < 0)
		return fmha_error_set(err, FMHA_ECONN, "%s: %s", path, strerror(errno));
	flags = fcntl(fd, F_GETFL);
	if (flags < 0 || fcntl(fd, F_SETFL, flags & ~O_NONBLOCK) < 0)
		return fmha_error_set(err, FMHA_EIO, "fcntl: %s", strerror(errno));
	*ret_fd = take_fd(&fd);
	return 0;
}

static int try_path(const char *path, int64_t deadline, int *ret_fd, char ret_path[FMHA_PATH_BYTES],
		    struct fmha_error *err)
{
	int r = connect_path(path, deadline, ret_fd, err);

	if (r == 0)
		memcpy(ret_path, path,
		       strlen(path) + 1); /* it was short enough for a sockaddr_un */
	return r;
}

/* @tried: which sockets, each with its reason. */
static int not_running(struct fmha_error *err, const char *tried, const char *also)
{
	return fmha_error_set(err, FMHA_ECONN,
			      "fmhad does not run (start it with `fmhad` or `systemctl start "
			      "fmhad.socket`); tried %s%s%s",
			      tried, also ? "; " : "", also ? also : "");
}

/* A path that the caller or $FMHAD_SOCKET names is final. */
static int connect_fixed(const char *path, int64_t deadline, int *ret_fd,
			 char ret_path[FMHA_PATH_BYTES], struct fmha_error *err)
{
	struct fmha_error why = {0};
	int r = try_path(path, deadline, ret_fd, ret_path, &why);

	if (r == FMHA_ECONN)
		return not_running(err, why.msg, NULL);
	if (r < 0 && err)
		*err = why;
	return r;
}

/* The user's own daemon, then the machine's. */
static int connect_default(int64_t deadline, int *ret_fd, char ret_path[FMHA_PATH_BYTES],
			   struct fmha_error *err)
{
	const char *runtime = secure_getenv("XDG_RUNTIME_DIR");
	struct fmha_error own = {0}, system = {0};
	char path[FMHA_PATH_BYTES];
	int r = FMHA_ECONN;

	if (runtime && runtime[0] &&
	    snprintf(path, sizeof(path), "%s/fmhad.sock", runtime) < (int)sizeof(path))
		r = try_path(path, deadline, ret_fd, ret_path, &own);
	if (r != FMHA_ECONN) {
		if (r < 0 && err)
			*err = own;
		return r;
	}
	r = try_path(SYSTEM_SOCKET, deadline, ret_fd, ret_path, &system);
	if (r == FMHA_ECONN)
		return own.msg[0] ? not_running(err, own.msg, system.msg)
				  : not_running(err, system.msg, NULL);
	if (r < 0 && err)
		*err = system;
	return r;
}

/* The documented order. */
static int connect_any(const struct fmha_client *client, int64_t deadline, int *ret_fd,
		       char ret_path[FMHA_PATH_BYTES], struct fmha_error *err)
{
	const char *fixed = client->path ? client->path : secure_getenv("FMHAD_SOCKET");

	_Static_assert(sizeof(((struct sockaddr_un *)0)->sun_path) == FMHA_PATH_BYTES,
		       "FMHA_PATH_BYTES is the kernel's limit");
	if (fixed && fixed[0])
		return connect_fixed(fixed, deadline, ret_fd, ret_path, err);
	return connect_default(deadline, ret_fd, ret_path, err);
}

static int say_hello(struct fmha_client *client, struct connection *c, int64_t deadline,
		     struct fmha_client_info *ret_info, struct fmha_error *err)
{
	struct proto_hello_params params = {.version = PROTO_VERSION};
	struct proto_hello_result hello;
	int r;

	(void)snprintf(params.client, sizeof(params.client), "%s", client->name);
	r = connection_call(c, PROTO_HELLO, &params, -1, deadline, &hello, NULL, err);
	if (r < 0)
		return r;
	if (hello.version != PROTO_VERSION)
		return fmha_error_set(err, FMHA_EVERSION,
				      "the daemon speaks protocol version %u, this library %u",
				      hello.version, PROTO_VERSION);
	if (hello.max_in_flight == 0)
		return fmha_error_set(err, FMHA_EPROTO, "the daemon allows no requests");
	(void)snprintf(ret_info->server, sizeof(ret_info->server), "%s", hello.server);
	ret_info->protocol = hello.version;
	ret_info->daemon_pid = hello.pid;
	ret_info->n_devices = hello.n_devices;
	ret_info->max_in_flight = hello.max_in_flight;
	c->max_in_flight = hello.max_in_flight;
	return 0;
}

static int open_front(void *owner, int64_t deadline, struct connection **ret_connection,
		      struct fmha_error *err)
{
	struct fmha_client *client = owner;
	struct fmha_client_info info = {0};
	_cleanup_(connection_unrefp) struct connection *c = NULL;
	int fd, r;

	r = connect_any(client, deadline, &fd, info.path, err);
	if (r < 0)
		return r;
	r = connection_new(fd, FMHA_ECONN, front_name, client->spin_us, &c, err);
	if (r < 0)
		return r;
	r = say_hello(client, c, deadline, &info, err);
	if (r < 0)
		return r;
	client->info = info;
	*ret_connection = c;
	c = NULL;
	return 0;
}

/* ---- life ---- */

struct fmha_client *client_ref(struct fmha_client *client)
{
	(void)__atomic_add_fetch(&client->refs, 1, __ATOMIC_RELAXED);
	return client;
}

struct fmha_client *client_unref(struct fmha_client *client)
{
	if (!client || __atomic_sub_fetch(&client->refs, 1, __ATOMIC_ACQ_REL) != 0)
		return NULL;
	link_deinit(&client->front);
	free(client->path);
	free(client);
	return NULL;
}

static void client_unrefp(struct fmha_client **client)
{
	(void)client_unref(*client);
}

static uint32_t spin_window(const struct fmha_client_options *options)
{
	if (!options || options->spin_us == 0)
		return PROTO_SPIN_WINDOW_US;
	if (options->spin_us == FMHA_NO_SPIN)
		return 0;
	return options->spin_us < PROTO_SPIN_WINDOW_MAX_US ? options->spin_us
							   : PROTO_SPIN_WINDOW_MAX_US;
}

int fmha_connect(const struct fmha_client_options *options, struct fmha_client **ret_client,
		 struct fmha_error *err)
{
	_cleanup_(client_unrefp) struct fmha_client *made = NULL;
	_cleanup_(connection_unrefp) struct connection *c = NULL;
	struct fmha_client *client;
	uint64_t generation;
	int r;

	if (!ret_client)
		return fmha_error_set(err, FMHA_EINVAL, "fmha_connect: ret_client is NULL");
	if (options) {
		r = check_struct_size(options->struct_size, sizeof(*options), "fmha_client_options",
				      err);
		if (r < 0)
			return r;
	}
	client = calloc(1, sizeof(*client));
	if (!client)
		return fmha_error_set(err, FMHA_ENOMEM, "client: out of memory");
	r = link_init(&client->front, open_front, client, FMHA_ECONN, err);
	if (r < 0) {
		free(client);
		return r;
	}
	made = client;
	client->refs = 1;
	client->pid = getpid();
	client->process = process_token();
	client->timeout_ms = options && options->timeout_ms ? options->timeout_ms
							    : FMHA_DEFAULT_TIMEOUT_MS;
	client->spin_us = spin_window(options);
	(void)snprintf(client->name, sizeof(client->name), "%s",
		       options && options->name ? options->name : program_invocation_short_name);
	if (options && options->path) {
		client->path = strdup(options->path);
		if (!client->path)
			return fmha_error_set(err, FMHA_ENOMEM, "client: out of memory");
	}
	r = link_get(&client->front, client_deadline(client), &c, &generation, err);
	if (r < 0)
		return r;
	*ret_client = client;
	made = NULL;
	return 0;
}

struct fmha_client *fmha_client_free(struct fmha_client *client)
{
	if (client && client_in_child(client) && client->front.connection)
		connection_drop_in_child(client->front.connection);
	return client_unref(client);
}

/* ---- what the front answers ---- */

int fmha_client_info(struct fmha_client *client, struct fmha_client_info *ret_info,
		     struct fmha_error *err)
{
	int r;

	r = client_check(client && ret_info ? client : NULL, __func__, err);
	if (r < 0)
		return r;
	r = timed_lock_take(&client->front.lock, client_deadline(client), err);
	if (r < 0)
		return r;
	*ret_info = client->info;
	timed_lock_give(&client->front.lock);
	return 0;
}

int fmha_client_ping(struct fmha_client *client, struct fmha_error *err)
{
	const struct proto_empty params = {0};
	int r;

	r = client_check(client, __func__, err);
	if (r < 0)
		return r;
	return link_call(&client->front, PROTO_PING, &params, -1, client_deadline(client), NULL,
			 NULL, err);
}

void device_info_from(const struct proto_device *from, struct fmha_device_info *ret_info)
{
	_Static_assert(sizeof(ret_info->name) == sizeof(from->name), "names have one length");

	memset(ret_info, 0, sizeof(*ret_info));
	ret_info->device = from->device;
	ret_info->compute_units = from->compute_units;
	ret_info->memory_bytes = from->memory_bytes;
	ret_info->fences = from->fences;
	ret_info->events = from->events;
	memcpy(ret_info->name, from->name, sizeof(ret_info->name));
	memcpy(ret_info->arch, from->arch, sizeof(ret_info->arch));
	memcpy(ret_info->backend, from->backend, sizeof(ret_info->backend));
	memcpy(ret_info->state, from->state, sizeof(ret_info->state));
	memcpy(ret_info->pci, from->pci, sizeof(ret_info->pci));
}

int fmha_client_devices(struct fmha_client *client, struct fmha_device_info *ret_devices,
			size_t capacity, size_t *ret_n, struct fmha_error *err)
{
	const struct proto_empty params = {0};
	struct proto_devices_result devices;
	int r;

	if (!client || !ret_n || (capacity > 0 && !ret_devices))
		return fmha_error_set(err, FMHA_EINVAL, "fmha_client_devices: an argument is NULL");
	r = client_check_process(client, err);
	if (r < 0)
		return r;
	r = link_call(&client->front, PROTO_DEVICES, &params, -1, client_deadline(client), &devices,
		      NULL, err);
	if (r < 0)
		return r;
	for (uint32_t i = 0; i < devices.n_devices && i < capacity; i++)
		device_info_from(&devices.devices[i], &ret_devices[i]);
	*ret_n = devices.n_devices;
	return 0;
}

/* A JSON document out of a memfd, which is taken. It is copied, not mapped: its writer may still change it. */
static int read_json(int fd, uint64_t size, char **ret_json, struct fmha_error *err)
{
	uint64_t done = 0;
	char *json = NULL;
	int r = 0;

	if (fcntl(fd, F_GET_SEALS) < 0 || size > JSON_MAX_BYTES)
		r = fmha_error_set(err, FMHA_EPROTO, "the daemon sent %llu bytes of JSON in %s",
				   (unsigned long long)size,
				   size > JSON_MAX_BYTES ? "one document"
							 : "something else than a memfd");
	if (r == 0) {
		json = malloc(size + 1);
		if (!json)
			r = fmha_error_set(err, FMHA_ENOMEM, "%llu bytes of JSON: out of memory",
					   (unsigned long long)size);
	}
	while (r == 0 && done < size) {
		ssize_t n = pread(fd, json + done, size - done, (off_t)done);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			r = fmha_error_set(err, FMHA_EIO, "the daemon's JSON: %s", strerror(errno));
		else if (n == 0)
			r = fmha_error_set(err, FMHA_EPROTO,
					   "the daemon's JSON ends after %llu of %llu bytes",
					   (unsigned long long)done, (unsigned long long)size);
		else
			done += (uint64_t)n;
	}
	(void)close(fd);
	if (r < 0) {
		free(json);
		return r;
	}
	json[size] = '\0';
	*ret_json = json;
	return 0;
}

int client_call_json(struct fmha_client *client, struct link *link, enum proto_method method,
		     const void *params, char **ret_json, struct fmha_error *err)
{
	struct proto_json_result result;
	int fd, r = link_call(link, method, params, -1, client_deadline(client), &result, &fd, err);

	return r < 0 ? r : read_json(fd, result.size, ret_json, err);
}

int fmha_client_status(struct fmha_client *client, char **ret_json, struct fmha_error *err)
{
	const struct proto_empty params = {0};
	int r = client_check(client && ret_json ? client : NULL, __func__, err);

	return r < 0 ? r
		     : client_call_json(client, &client->front, PROTO_STATUS, &params, ret_json,
					err);
}
