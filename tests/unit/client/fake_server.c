/* SPDX-License-Identifier: MIT */
#include "fake_server.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <proto/error.h>
#include <proto/frame.h>
#include <proto/limits.h>
#include <proto/message.h>
#include <proto/problem.h>

/* An assert() that release builds keep: most of these have side effects. */
#define must(condition)                                                                            \
	do {                                                                                       \
		if (!(condition)) {                                                                \
			(void)fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);      \
			abort();                                                                   \
		}                                                                                  \
	} while (0)

#define MAX_OBJECTS   4096
#define MAX_HELD      64
#define MAX_IN_FLIGHT 16

struct object {
	uint64_t size;
	uint8_t *data;                /* a buffer's */
	struct fmha_problem *problem; /* a plan's */
	bool is_event;
};

struct peer {
	struct fake_server *server;
	struct peer *next;
	bool is_worker, killed, done;
	int fd;
	pthread_t thread;
	struct object objects[MAX_OBJECTS]; /* id - 1 is the index; ids are never used again */
	uint64_t n_objects;
	struct {
		uint32_t id;
		struct proto_run_params params;
	} held[MAX_HELD];
	int n_held;
	int fds[8], n_fds; /* received, not yet claimed by a request */
	struct proto_buffer out;
};

struct fake_server {
	char directory[64], path[96];
	int listener;
	pthread_t thread;
	pthread_mutex_t lock;
	bool stopping, hold;
	struct peer *peers;
	struct {
		enum fake_fault fault;
		uint32_t at;
		int times;
		size_t answer_bytes;
	} methods[PROTO_N_METHODS];
	struct fake_counters counters;
};

static void count(struct fake_server *server, int *counter, int by)
{
	pthread_mutex_lock(&server->lock);
	*counter += by;
	pthread_mutex_unlock(&server->lock);
}

/* ---- sending ---- */

static bool send_bytes(int fd, const uint8_t *data, size_t n, const int *fds, int n_fds)
{
	char control[CMSG_SPACE(253 * sizeof(int))] = {0};

	while (n > 0) {
		struct iovec iov = {.iov_base = (void *)(uintptr_t)data, .iov_len = n};
		struct msghdr message = {.msg_iov = &iov, .msg_iovlen = 1};
		ssize_t r;

		if (n_fds > 0) {
			struct cmsghdr *h;

			message.msg_control = control;
			message.msg_controllen = CMSG_SPACE((size_t)n_fds * sizeof(int));
			h = CMSG_FIRSTHDR(&message);
			h->cmsg_level = SOL_SOCKET;
			h->cmsg_type = SCM_RIGHTS;
			h->cmsg_len = CMSG_LEN((size_t)n_fds * sizeof(int));
			memcpy(CMSG_DATA(h), fds, (size_t)n_fds * sizeof(int));
		}
		r = sendmsg(fd, &message, MSG_NOSIGNAL);
		if (r < 0)
			return false;
		data += r;
		n -= (size_t)r;
		n_fds = 0;
	}
	return true;
}

static void send_garbage(int fd, uint32_t seed)
{
	uint8_t bytes[512];

	for (size_t i = 0; i < sizeof(bytes); i++) {
		seed = seed * 1664525 + 1013904223;
		bytes[i] = (uint8_t)(seed >> 24);
	}
	(void)send_bytes(fd, bytes, sizeof(bytes), NULL, 0);
}

static void send_flood(int fd)
{
	/* bin 8 of [2, "ping", {}]: a notification, which no client asks for */
	static const uint8_t frame[] = {0xc4, 8, 0x93, 2, 0xa4, 'p', 'i', 'n', 'g', 0x80};

	for (int i = 0; i < 10000; i++) {
		if (send(fd, frame, sizeof(frame), MSG_NOSIGNAL | MSG_DONTWAIT) < 0)
			return;
	}
}

static bool send_many_fds(struct peer *peer, const uint8_t *data, size_t n)
{
	int fds[200];

	for (int i = 0; i < 200; i++)
		fds[i] = peer->fd;
	return send_bytes(peer->fd, data, n, fds, 200);
}

/* Sends peer->out, an answer to @method, with @fd; return: whether the connection goes on. */
static bool send_answer(struct peer *peer, enum proto_method method, int fd)
{
	struct fake_server *server = peer->server;
	enum fake_fault fault = FAKE_SOUND;
	uint8_t *data = peer->out.data;
	size_t n = peer->out.size;
	uint32_t at = 0;
	int n_fds = fd >= 0;

	pthread_mutex_lock(&server->lock);
	server->methods[method].answer_bytes = n;
	if (server->methods[method].times > 0) {
		server->methods[method].times--;
		fault = server->methods[method].fault;
		at = server->methods[method].at;
	}
	pthread_mutex_unlock(&server->lock);

	switch (fault) {
	case FAKE_CUT:
		(void)send_bytes(peer->fd, data, at < n ? at : n, &fd, at > 0 ? n_fds : 0);
		return false;
	case FAKE_GARBAGE:
		send_garbage(peer->fd, at);
		return true;
	case FAKE_FLIP:
		data[at / 8 % n] ^= (uint8_t)(1 << at % 8);
		break;
	case FAKE_SILENT:
		return true;
	case FAKE_NO_FD:
		n_fds = 0;
		break;
	case FAKE_MANY_FDS:
		return send_many_fds(peer, data, n);
	case FAKE_FLOOD:
		send_flood(peer->fd);
		return true;
	case FAKE_BYTEWISE:
		for (size_t i = 0; i < n; i++) {
			if (!send_bytes(peer->fd, data + i, 1, &fd, i == 0 ? n_fds : 0))
				return false;
		}
		return true;
	default:
		break;
	}
	return send_bytes(peer->fd, data, n, &fd, n_fds);
}

static enum fake_fault fault_of(struct fake_server *server, enum proto_method method)
{
	enum fake_fault fault;

	pthread_mutex_lock(&server->lock);
	fault = server->methods[method].times > 0 ? server->methods[method].fault : FAKE_SOUND;
	pthread_mutex_unlock(&server->lock);
	return fault;
}

static bool answer(struct peer *peer, uint32_t id, enum proto_method method, const void *result,
		   int fd)
{
	peer->out.size = 0;
	if (fault_of(peer->server, method) == FAKE_WRONG_ID)
		id += 1000;
	must(proto_encode_result(&peer->out, id, method, result, NULL) == 0);
	return send_answer(peer, method, fd);
}

static bool answer_error(struct peer *peer, uint32_t id, enum proto_method method, int code,
			 const char *field)
{
	struct fmha_error error = {0};

	(void)fmha_error_set_field(&error, code, field, "the fake says %s", fmha_error_name(code));
	peer->out.size = 0;
	must(proto_encode_error(&peer->out, id, &error, NULL) == 0);
	return send_answer(peer, method, -1);
}

/* ---- methods ---- */

static int make_memfd(struct fake_server *server, enum proto_method method, uint64_t size)
{
	enum fake_fault fault = fault_of(server, method);
	int fd;

	if (fault == FAKE_PIPE) {
		int ends[2];

		must(pipe2(ends, O_CLOEXEC) == 0);
		close(ends[1]);
		return ends[0];
	}
	fd = memfd_create("fake", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	must(fd >= 0 && ftruncate(fd, (off_t)(fault == FAKE_SHORT ? size / 2 : size)) == 0);
	if (fault != FAKE_UNSEALED)
		must(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0);
	return fd;
}

static void device_describe(struct proto_device *device)
{
	memset(device, 0, sizeof(*device));
	(void)snprintf(device->name, sizeof(device->name), "fake processor");
	(void)snprintf(device->arch, sizeof(device->arch), "x86_64_v3");
	(void)snprintf(device->backend, sizeof(device->backend), "fake");
	(void)snprintf(device->state, sizeof(device->state), "ready");
	device->compute_units = 2;
	device->memory_bytes = 1 << 30;
}

static void start_peer(struct fake_server *server, int fd, bool is_worker);

static bool handle_json(struct peer *peer, uint32_t id, enum proto_method method)
{
	static const char json[] = "{\"sessions\": [], \"fake\": true}";
	const struct proto_json_result result = {.size = sizeof(json) - 1};
	int fd = make_memfd(peer->server, method, result.size);
	bool more;

	(void)!pwrite(fd, json, result.size, 0);
	more = answer(peer, id, method, &result, fd);
	close(fd);
	return more;
}

static bool handle_front(struct peer *peer, const struct proto_message *message, const void *params)
{
	enum proto_method method = (enum proto_method)message->method;

	if (fault_of(peer->server, method) == FAKE_BUSY)
		return answer_error(peer, message->id, method, FMHA_EBUSY, "");
	if (method == PROTO_HELLO) {
		struct proto_hello_result result = {.version = PROTO_VERSION,
						    .server = "fake/1",
						    .pid = (uint32_t)getpid(),
						    .max_frame_bytes = PROTO_MAX_FRAME,
						    .max_in_flight = MAX_IN_FLIGHT,
						    .n_devices = 1};

		count(peer->server, &peer->server->counters.hellos, 1);
		return answer(peer, message->id, method, &result, -1);
	}
	if (method == PROTO_DEVICES) {
		struct proto_devices_result result = {.n_devices = 1};

		device_describe(&result.devices[0]);
		return answer(peer, message->id, method, &result, -1);
	}
	if (method == PROTO_OPEN_DEVICE) {
		struct proto_open_device_result result = {.worker_pid = (uint32_t)getpid()};
		int pair[2];
		bool more;

		if (((const struct proto_open_device_params *)params)->device != 0)
			return answer_error(peer, message->id, method, FMHA_ENOENT, "device");
		device_describe(&result.device);
		if (fault_of(peer->server, method) == FAKE_PIPE) {
			must(pipe2(pair, O_CLOEXEC) == 0);
			close(pair[1]);
			more = answer(peer, message->id, method, &result, pair[0]);
			close(pair[0]);
			return more;
		}
		must(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
		start_peer(peer->server, pair[0], true);
		more = answer(peer, message->id, method, &result, pair[1]);
		close(pair[1]);
		return more;
	}
	if (method == PROTO_STATUS)
		return handle_json(peer, message->id, method);
	return answer_error(peer, message->id, method, FMHA_ENOTSUP, "method");
}

static struct object *object_find(struct peer *peer, uint64_t id, bool plan)
{
	struct object *object;

	if (id == 0 || id > peer->n_objects)
		return NULL;
	object = &peer->objects[id - 1];
	return (plan ? object->problem != NULL : object->data != NULL) ? object : NULL;
}

static void object_release(struct peer *peer, struct object *object)
{
	if (object->data) {
		munmap(object->data, object->size);
		count(peer->server, &peer->server->counters.buffers, -1);
	}
	if (object->is_event)
		count(peer->server, &peer->server->counters.events, -1);
	if (object->problem) {
		free(object->problem);
		count(peer->server, &peer->server->counters.plans, -1);
	}
	memset(object, 0, sizeof(*object));
}

static bool add_buffer(struct peer *peer, uint32_t id, enum proto_method method, int fd,
		       uint64_t size, bool send_fd)
{
	struct proto_buffer_result result = {.size = size};
	struct object *object = &peer->objects[peer->n_objects];
	bool more;

	must(peer->n_objects < MAX_OBJECTS);
	result.buffer = ++peer->n_objects;
	object->size = size;
	object->data = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (object->data == MAP_FAILED)
		object->data = NULL; /* a pipe, by way of a fault */
	else
		count(peer->server, &peer->server->counters.buffers, 1);
	more = answer(peer, id, method, &result, send_fd ? fd : -1);
	close(fd);
	return more;
}

static bool add_event(struct peer *peer, uint32_t id,
		      const struct proto_event_import_params *params)
{
	struct proto_event_result result;

	if (params->handle_bytes != sizeof(params->handle) || params->handle[0] != 'e')
		return answer_error(peer, id, PROTO_EVENT_IMPORT, FMHA_EINVAL, "handle");
	must(peer->n_objects < MAX_OBJECTS);
	peer->objects[peer->n_objects].is_event = true;
	result.event = ++peer->n_objects;
	count(peer->server, &peer->server->counters.events, 1);
	return answer(peer, id, PROTO_EVENT_IMPORT, &result, -1);
}

static bool release_event(struct peer *peer, uint32_t id, uint64_t event)
{
	const struct proto_empty empty = {0};

	if (event == 0 || event > peer->n_objects || !peer->objects[event - 1].is_event)
		return answer_error(peer, id, PROTO_EVENT_RELEASE, FMHA_ENOENT, "event");
	object_release(peer, &peer->objects[event - 1]);
	return answer(peer, id, PROTO_EVENT_RELEASE, &empty, -1);
}

/* Whether all of them are there; counters are not looked at. */
static bool check_events(struct peer *peer, const struct proto_fence *fences, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++) {
		uint64_t event = fences[i].event;

		if (event == 0)
			continue;
		if (event > peer->n_objects || !peer->objects[event - 1].is_event)
			return false;
		count(peer->server, &peer->server->counters.ordered, 1);
	}
	return true;
}

/* O = Q. Return: 0 or an error code. */
static int execute(struct peer *peer, const struct proto_run_params *params)
{
	struct object *plan = object_find(peer, params->plan, true);
	struct fmha_problem problem;
	int64_t dims[5], q[5], o[5];
	struct object *from, *to;

	if (!plan)
		return FMHA_ENOENT;
	problem = *plan->problem;
	for (uint32_t i = 0; i < params->n_rebinds; i++) {
		problem.tensor[params->rebinds[i].role].buffer = params->rebinds[i].buffer;
		problem.tensor[params->rebinds[i].role].offset = params->rebinds[i].offset;
		count(peer->server, &peer->server->counters.rebinds, 1);
	}
	from = object_find(peer, problem.q.buffer, false);
	to = object_find(peer, problem.o.buffer, false);
	if (!from || !to)
		return FMHA_ENOENT;
	problem_extents(&problem, FMHA_T_O, dims);
	problem_strides(&problem, FMHA_T_Q, q);
	problem_strides(&problem, FMHA_T_O, o);
	for (int64_t i = 0; i < dims[0] * dims[1] * dims[2] * dims[3]; i++) {
		int64_t index[4] = {i / (dims[1] * dims[2] * dims[3]),
				    i / (dims[2] * dims[3]) % dims[1], i / dims[3] % dims[2],
				    i % dims[3]};
		int64_t a = 0, b = 0;

		for (int n = 0; n < 4; n++) {
			a += index[n] * q[n];
			b += index[n] * o[n];
		}
		memcpy(to->data + problem.o.offset + b * 4, from->data + problem.q.offset + a * 4,
		       4);
	}
	return 0;
}

static bool finish_run(struct peer *peer, uint32_t id, const struct proto_run_params *params)
{
	const struct proto_run_result result = {.queued_ns = 1, .kernel_ns = 2};
	int r = execute(peer, params);

	if (r < 0)
		return answer_error(peer, id, PROTO_RUN, r, "plan");
	if (!check_events(peer, params->waits, params->n_waits) ||
	    !check_events(peer, params->signals, params->n_signals))
		return answer_error(peer, id, PROTO_RUN, FMHA_ENOENT, "waits");
	count(peer->server, &peer->server->counters.runs, 1);
	return answer(peer, id, PROTO_RUN, &result, -1);
}

static bool handle_run(struct peer *peer, uint32_t id, const struct proto_run_params *params)
{
	bool hold;

	pthread_mutex_lock(&peer->server->lock);
	hold = peer->server->hold;
	pthread_mutex_unlock(&peer->server->lock);
	if (!hold)
		return finish_run(peer, id, params);
	must(peer->n_held < MAX_HELD);
	peer->held[peer->n_held].id = id;
	peer->held[peer->n_held++].params = *params;
	return true;
}

static bool handle_cancel(struct peer *peer, uint32_t id, uint32_t run)
{
	const struct proto_empty empty = {0};

	count(peer->server, &peer->server->counters.cancels, 1);
	for (int i = 0; i < peer->n_held; i++) {
		if (peer->held[i].id != run)
			continue;
		peer->held[i] = peer->held[--peer->n_held];
		return answer_error(peer, run, PROTO_RUN, FMHA_ECANCELED, "") &&
		       answer(peer, id, PROTO_CANCEL, &empty, -1);
	}
	return answer_error(peer, id, PROTO_CANCEL, FMHA_ENOENT, "request");
}

static bool release_held(struct peer *peer)
{
	bool hold, more = true;

	pthread_mutex_lock(&peer->server->lock);
	hold = peer->server->hold;
	pthread_mutex_unlock(&peer->server->lock);
	/* Last first: answers need not come in the order of their requests. */
	while (!hold && more && peer->n_held > 0) {
		peer->n_held--;
		more = finish_run(peer, peer->held[peer->n_held].id,
				  &peer->held[peer->n_held].params);
	}
	return more;
}

static bool handle_plan(struct peer *peer, uint32_t id, const struct proto_plan_params *params)
{
	struct proto_plan_result *result = calloc(1, sizeof(*result));
	struct object *object = &peer->objects[peer->n_objects];
	struct fmha_error error = {0};
	bool more;

	if (problem_check(&params->problem, &error) < 0) {
		free(result);
		return answer_error(peer, id, PROTO_PLAN, error.code, error.field);
	}
	must(peer->n_objects < MAX_OBJECTS);
	object->problem = malloc(sizeof(*object->problem));
	*object->problem = params->problem;
	count(peer->server, &peer->server->counters.plans, 1);
	count(peer->server, &peer->server->counters.batches, params->problem.batch);
	result->plan = ++peer->n_objects;
	result->flops = 42;
	result->n_stages = 1;
	(void)snprintf(result->stages[0].family, sizeof(result->stages[0].family), "fwd");
	(void)snprintf(result->stages[0].kernel, sizeof(result->stages[0].kernel), "%s",
		       params->n_kernels ? params->kernels[params->n_kernels - 1].kernel
					 : "fwd_fake_copy");
	more = answer(peer, id, PROTO_PLAN, result, -1);
	free(result);
	return more;
}

static bool handle_worker(struct peer *peer, const struct proto_message *message,
			  const void *params, int fd)
{
	const struct proto_empty empty = {0};
	enum proto_method method = (enum proto_method)message->method;
	struct object *object;

	if (fault_of(peer->server, method) == FAKE_BUSY) {
		if (fd >= 0)
			close(fd);
		return answer_error(peer, message->id, method, FMHA_EBUSY, "");
	}
	if (method == PROTO_RUN && fault_of(peer->server, method) == FAKE_REFUSE)
		return answer_error(peer, message->id, method, FMHA_EINVAL, "tensor.k.offset");
	switch (method) {
	case PROTO_BUFFER_CREATE: {
		uint64_t size = ((const struct proto_buffer_create_params *)params)->size;

		return add_buffer(peer, message->id, method, make_memfd(peer->server, method, size),
				  size, true);
	}
	case PROTO_BUFFER_IMPORT:
		must(fd >= 0);
		count(peer->server, &peer->server->counters.imports, 1);
		return add_buffer(peer, message->id, method, fd,
				  ((const struct proto_buffer_import_params *)params)->size, false);
	case PROTO_BUFFER_RELEASE:
		object = object_find(
			peer, ((const struct proto_buffer_release_params *)params)->buffer, false);
		if (!object)
			return answer_error(peer, message->id, method, FMHA_ENOENT, "buffer");
		object_release(peer, object);
		return answer(peer, message->id, method, &empty, -1);
	case PROTO_EVENT_IMPORT:
		return add_event(peer, message->id, params);
	case PROTO_EVENT_RELEASE:
		return release_event(peer, message->id,
				     ((const struct proto_event_release_params *)params)->event);
	case PROTO_PLAN:
		return handle_plan(peer, message->id, params);
	case PROTO_PLAN_RELEASE:
		object = object_find(peer, ((const struct proto_plan_release_params *)params)->plan,
				     true);
		if (!object)
			return answer_error(peer, message->id, method, FMHA_ENOENT, "plan");
		object_release(peer, object);
		return answer(peer, message->id, method, &empty, -1);
	case PROTO_RUN:
		return handle_run(peer, message->id, params);
	case PROTO_CANCEL:
		return handle_cancel(peer, message->id,
				     ((const struct proto_cancel_params *)params)->request);
	case PROTO_EXPLAIN:
	case PROTO_REGISTRY_EXPORT:
		return handle_json(peer, message->id, method);
	default:
		if (fd >= 0)
			close(fd);
		return answer_error(peer, message->id, method, FMHA_ENOTSUP, "method");
	}
}

static int claim_fd(struct peer *peer)
{
	int fd = peer->fds[0];

	must(peer->n_fds > 0);
	memmove(&peer->fds[0], &peer->fds[1], (size_t)--peer->n_fds * sizeof(int));
	return fd;
}

static bool handle_payload(struct peer *peer, struct proto_message *message, const uint8_t *payload,
			   size_t n)
{
	const struct proto_empty empty = {0};
	struct fmha_error err = {0};
	void *params;
	int fd = -1;
	bool more;

	must(proto_message_decode(message, payload, n, &err) == 0);
	must(message->type == PROTO_REQUEST && message->method >= 0);
	params = calloc(1, proto_methods[message->method].params_size + 1);
	must(proto_decode_params(message, params, &err) == 0);
	if (proto_request_fds((enum proto_method)message->method, params) > 0)
		fd = claim_fd(peer);
	if (message->method == PROTO_PING)
		more = answer(peer, message->id, PROTO_PING, &empty, -1);
	else if (peer->is_worker)
		more = handle_worker(peer, message, params, fd);
	else
		more = handle_front(peer, message, params);
	free(params);
	return more;
}

/* ---- connections ---- */

static ssize_t receive(struct peer *peer, uint8_t *data, size_t n)
{
	char control[CMSG_SPACE(sizeof(int))];
	struct iovec iov = {.iov_base = data, .iov_len = n};
	struct msghdr message = {.msg_iov = &iov,
				 .msg_iovlen = 1,
				 .msg_control = control,
				 .msg_controllen = sizeof(control)};
	ssize_t r = recvmsg(peer->fd, &message, MSG_CMSG_CLOEXEC);
	struct cmsghdr *h = r > 0 ? CMSG_FIRSTHDR(&message) : NULL;

	if (h && h->cmsg_type == SCM_RIGHTS) {
		must(peer->n_fds < 8);
		memcpy(&peer->fds[peer->n_fds++], CMSG_DATA(h), sizeof(int));
	}
	return r;
}

static void *serve(void *arg)
{
	struct peer *peer = arg;
	uint8_t *in = malloc(2 * PROTO_MAX_FRAME);
	struct proto_message message = {0};
	bool more = true;
	size_t size = 0;

	while (more) {
		struct pollfd poll_fd = {.fd = peer->fd, .events = POLLIN};
		struct proto_frame frame;
		ssize_t n;

		if (poll(&poll_fd, 1, 2) == 0) {
			more = release_held(peer);
			continue;
		}
		n = receive(peer, in + size, PROTO_MAX_FRAME);
		if (n <= 0)
			break;
		size += (size_t)n;
		while (more && proto_frame_parse(in, size, PROTO_MAX_FRAME, &frame, NULL) == 0 &&
		       size >= frame.header_bytes + frame.payload_bytes) {
			size_t whole = frame.header_bytes + frame.payload_bytes;

			more = handle_payload(peer, &message, in + frame.header_bytes,
					      frame.payload_bytes);
			memmove(in, in + whole, size - whole);
			size -= whole;
		}
	}
	for (uint64_t i = 0; i < peer->n_objects; i++)
		object_release(peer, &peer->objects[i]);
	while (peer->n_fds > 0)
		close(claim_fd(peer));
	proto_message_deinit(&message);
	proto_buffer_deinit(&peer->out);
	free(in);
	(void)shutdown(peer->fd, SHUT_RDWR);
	count(peer->server, &peer->server->counters.connections, -1);
	if (peer->is_worker)
		count(peer->server, &peer->server->counters.workers, -1);
	pthread_mutex_lock(&peer->server->lock);
	peer->done = true;
	pthread_mutex_unlock(&peer->server->lock);
	return NULL;
}

/* Joins those that have ended. */
static void reap(struct fake_server *server, bool all)
{
	struct peer **place, *ended = NULL;

	pthread_mutex_lock(&server->lock);
	place = &server->peers;
	while (*place) {
		struct peer *peer = *place;

		if (peer->done || all) {
			*place = peer->next;
			peer->next = ended;
			ended = peer;
		} else {
			place = &peer->next;
		}
	}
	pthread_mutex_unlock(&server->lock);
	while (ended) {
		struct peer *peer = ended;

		ended = peer->next;
		(void)shutdown(peer->fd, SHUT_RDWR);
		pthread_join(peer->thread, NULL);
		close(peer->fd);
		free(peer);
	}
}

static void start_peer(struct fake_server *server, int fd, bool is_worker)
{
	struct peer *peer = calloc(1, sizeof(*peer));

	peer->server = server;
	peer->fd = fd;
	peer->is_worker = is_worker;
	count(server, &server->counters.connections, 1);
	if (is_worker)
		count(server, &server->counters.workers, 1);
	pthread_mutex_lock(&server->lock);
	must(pthread_create(&peer->thread, NULL, serve, peer) == 0);
	peer->next = server->peers;
	server->peers = peer;
	pthread_mutex_unlock(&server->lock);
}

static void *accept_all(void *arg)
{
	struct fake_server *server = arg;

	for (;;) {
		struct pollfd poll_fd = {.fd = server->listener, .events = POLLIN};
		bool stopping;
		int fd;

		(void)poll(&poll_fd, 1, 10);
		pthread_mutex_lock(&server->lock);
		stopping = server->stopping;
		pthread_mutex_unlock(&server->lock);
		if (stopping)
			return NULL;
		reap(server, false);
		if (!(poll_fd.revents & POLLIN))
			continue;
		fd = accept4(server->listener, NULL, NULL, SOCK_CLOEXEC);
		if (fd >= 0)
			start_peer(server, fd, false);
	}
}

void fake_resume(struct fake_server *server)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};

	server->stopping = false;
	server->listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	(void)snprintf(address.sun_path, sizeof(address.sun_path), "%s", server->path);
	must(bind(server->listener, (struct sockaddr *)&address, sizeof(address)) == 0);
	must(listen(server->listener, 16) == 0);
	must(pthread_create(&server->thread, NULL, accept_all, server) == 0);
}

void fake_pause(struct fake_server *server)
{
	pthread_mutex_lock(&server->lock);
	server->stopping = true;
	pthread_mutex_unlock(&server->lock);
	pthread_join(server->thread, NULL);
	close(server->listener);
	(void)unlink(server->path);
	reap(server, true);
	reap(server, true); /* a front's thread may have started one more worker */
}

struct fake_server *fake_start(void)
{
	struct fake_server *server = calloc(1, sizeof(*server));

	(void)snprintf(server->directory, sizeof(server->directory), "/tmp/fmha_fake_XXXXXX");
	must(mkdtemp(server->directory));
	(void)snprintf(server->path, sizeof(server->path), "%s/socket", server->directory);
	pthread_mutex_init(&server->lock, NULL);
	fake_resume(server);
	return server;
}

struct fake_server *fake_stop(struct fake_server *server)
{
	fake_pause(server);
	(void)rmdir(server->directory);
	pthread_mutex_destroy(&server->lock);
	free(server);
	return NULL;
}

const char *fake_path(const struct fake_server *server)
{
	return server->path;
}

/* Those that clients have opened meanwhile live on. */
static bool killed_one_is_left(struct fake_server *server)
{
	bool left = false;

	pthread_mutex_lock(&server->lock);
	for (struct peer *peer = server->peers; peer; peer = peer->next)
		left = left || (peer->killed && !peer->done);
	pthread_mutex_unlock(&server->lock);
	return left;
}

void fake_kill_workers(struct fake_server *server)
{
	const struct timespec pause = {.tv_nsec = 1000000};

	pthread_mutex_lock(&server->lock);
	for (struct peer *peer = server->peers; peer; peer = peer->next) {
		if (peer->is_worker && !peer->done) {
			peer->killed = true;
			(void)shutdown(peer->fd, SHUT_RDWR);
		}
	}
	pthread_mutex_unlock(&server->lock);
	while (killed_one_is_left(server))
		(void)nanosleep(&pause, NULL);
}

void fake_misbehave(struct fake_server *server, enum proto_method method, enum fake_fault fault,
		    uint32_t at, int times)
{
	pthread_mutex_lock(&server->lock);
	server->methods[method].fault = fault;
	server->methods[method].at = at;
	server->methods[method].times = times;
	pthread_mutex_unlock(&server->lock);
}

size_t fake_answer_bytes(struct fake_server *server, enum proto_method method)
{
	size_t n;

	pthread_mutex_lock(&server->lock);
	n = server->methods[method].answer_bytes;
	pthread_mutex_unlock(&server->lock);
	return n;
}

void fake_hold_runs(struct fake_server *server, bool hold)
{
	pthread_mutex_lock(&server->lock);
	server->hold = hold;
	pthread_mutex_unlock(&server->lock);
}

struct fake_counters fake_counters(struct fake_server *server)
{
	struct fake_counters counters;

	pthread_mutex_lock(&server->lock);
	counters = server->counters;
	pthread_mutex_unlock(&server->lock);
	return counters;
}
