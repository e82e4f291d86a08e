/* SPDX-License-Identifier: MIT */
/*
 * A control socket whose calls fail for want of memory, once or for a while: what came is dealt with
 * and what was answered arrives as soon as there is some. Its end would be that of a worker, and so
 * of everybody's work on a device. The calls are those of this program, by --wrap.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <errno.h>
#include <fcntl.h>
#include <msgpack.h>
#include <sys/socket.h>
#include <unistd.h>

#include <base/clock.h>
#include <base/config.h>
#include <base/connection.h>
#include <base/log.h>
#include <proto/error.h>

/* Calls of each that fail, from now on. */
static struct {
	int recvmsg, send, sendmsg, msgpack_unpack, uv_poll_start, malloc;
} fails;

#define FAILS(name) (fails.name > 0 && fails.name--)

ssize_t __real_recvmsg(int fd, struct msghdr *message, int flags);
ssize_t __wrap_recvmsg(int fd, struct msghdr *message, int flags);
ssize_t __wrap_recvmsg(int fd, struct msghdr *message, int flags)
{
	if (!FAILS(recvmsg))
		return __real_recvmsg(fd, message, flags);
	errno = fails.recvmsg & 1 ? ENOBUFS : ENOMEM;
	return -1;
}

ssize_t __real_send(int fd, const void *data, size_t n, int flags);
ssize_t __wrap_send(int fd, const void *data, size_t n, int flags);
ssize_t __wrap_send(int fd, const void *data, size_t n, int flags)
{
	if (!FAILS(send))
		return __real_send(fd, data, n, flags);
	errno = fails.send & 1 ? ENOBUFS : ENOMEM;
	return -1;
}

ssize_t __real_sendmsg(int fd, const struct msghdr *message, int flags);
ssize_t __wrap_sendmsg(int fd, const struct msghdr *message, int flags);
ssize_t __wrap_sendmsg(int fd, const struct msghdr *message, int flags)
{
	if (!FAILS(sendmsg))
		return __real_sendmsg(fd, message, flags);
	errno = fails.sendmsg & 1 ? ENOBUFS : ENOMEM;
	return -1;
}

msgpack_unpack_return __real_msgpack_unpack(const char *data, size_t n, size_t *at,
					    msgpack_zone *zone, msgpack_object *result);
msgpack_unpack_return __wrap_msgpack_unpack(const char *data, size_t n, size_t *at,
					    msgpack_zone *zone, msgpack_object *result);
msgpack_unpack_return __wrap_msgpack_unpack(const char *data, size_t n, size_t *at,
					    msgpack_zone *zone, msgpack_object *result)
{
	return FAILS(msgpack_unpack) ? MSGPACK_UNPACK_NOMEM_ERROR
				     : __real_msgpack_unpack(data, n, at, zone, result);
}

int __real_uv_poll_start(uv_poll_t *poll, int events, uv_poll_cb done);
int __wrap_uv_poll_start(uv_poll_t *poll, int events, uv_poll_cb done);
int __wrap_uv_poll_start(uv_poll_t *poll, int events, uv_poll_cb done)
{
	return FAILS(uv_poll_start) ? UV_ENOMEM : __real_uv_poll_start(poll, events, done);
}

void *__real_malloc(size_t size);
void *__wrap_malloc(size_t size);
void *__wrap_malloc(size_t size)
{
	return FAILS(malloc) ? NULL : __real_malloc(size);
}

/* ---- a control socket that answers at once, status with a descriptor ---- */

struct fixture {
	uv_loop_t loop;
	struct limits limits;
	struct connection_hub hub;
	struct connection connection;
	int peer;
	uint32_t n_handled, n_fds_taken, n_hangups;
};

static int handle(struct connection *connection, uint32_t id, enum proto_method method,
		  const union proto_any_params *params, int *fd, struct fmha_error *err)
{
	struct fixture *fixture = container_of(connection, struct fixture, connection);
	struct proto_json_result result = {.size = id};
	int answered = method == PROTO_STATUS ? open("/dev/null", O_RDONLY | O_CLOEXEC) : -1;

	(void)params, (void)err;
	fixture->n_handled++;
	fixture->n_fds_taken += *fd >= 0;
	connection_answer(connection, id, method == PROTO_STATUS ? PROTO_STATUS : PROTO_PING,
			  method == PROTO_STATUS ? (void *)&result : &(struct proto_empty){0},
			  answered);
	return 0;
}

static void on_hangup(struct connection *connection)
{
	container_of(connection, struct fixture, connection)->n_hangups++;
}

static void on_closed(struct connection *connection)
{
	(void)connection;
}

static const struct connection_ops ops = {
	.handle = handle, .on_closed = on_closed, .on_hangup = on_hangup};

static struct fixture *setup(void)
{
	struct fixture *fixture = calloc(1, sizeof(*fixture));
	struct fmha_error err;
	struct config config;
	int pair[2];

	memset(&fails, 0, sizeof(fails));
	log_init("test", LOG_LEVEL_ERROR);
	config_init(&config);
	memcpy(fixture->limits.value, config.limits, sizeof(config.limits));
	limits_resolve(&fixture->limits, UINT64_C(1) << 30, false);
	uv_loop_init(&fixture->loop);
	assert_int_equal(connection_hub_init(&fixture->hub, &fixture->loop, &fixture->limits, &err),
			 0);
	assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair),
			 0);
	fixture->peer = pair[1];
	assert_int_equal(connection_open(&fixture->connection, &fixture->hub, pair[0], NULL, false,
					 &ops, &err),
			 0);
	return fixture;
}

static void teardown(struct fixture *fixture)
{
	close(fixture->peer);
	connection_close(&fixture->connection);
	connection_hub_deinit(&fixture->hub);
	uv_run(&fixture->loop, UV_RUN_DEFAULT);
	assert_int_equal(uv_loop_close(&fixture->loop), 0);
	assert_int_equal(fixture->n_hangups, 1);
	free(fixture);
}

/* Asks for it, @fd with it unless -1. */
static void ask(struct fixture *fixture, uint32_t id, enum proto_method method, int fd)
{
	struct proto_buffer out = {0};
	union proto_any_params params;
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE(sizeof(int))];
	} control = {0};
	struct iovec vec;
	struct msghdr message = {.msg_iov = &vec, .msg_iovlen = 1};

	memset(&params, 0, sizeof(params));
	if (method == PROTO_WORKER_ATTACH)
		snprintf(params.WORKER_ATTACH.client, sizeof(params.WORKER_ATTACH.client), "test");
	assert_int_equal(proto_encode_request(&out, id, method, &params, NULL), 0);
	vec = (struct iovec){.iov_base = out.data, .iov_len = out.size};
	if (fd >= 0) {
		message.msg_control = &control;
		message.msg_controllen = sizeof(control);
		control.header.cmsg_level = SOL_SOCKET;
		control.header.cmsg_type = SCM_RIGHTS;
		control.header.cmsg_len = CMSG_LEN(sizeof(int));
		memcpy(CMSG_DATA(&control.header), &fd, sizeof(fd));
	}
	assert_int_equal(__real_sendmsg(fixture->peer, &message, 0), out.size);
	proto_buffer_deinit(&out);
}

/* Until so many were handled and their answers are there, or @fds descriptors, or half a minute. */
static void expect(struct fixture *fixture, uint32_t n_handled, uint32_t n_fds)
{
	uint64_t end = clock_ns() + 30 * NS_PER_S;
	uint32_t got_fds = 0;
	size_t got = 0;

	while (clock_ns() < end &&
	       (fixture->n_handled < n_handled || got == 0 || got_fds < n_fds)) {
		union {
			struct cmsghdr header;
			char space[CMSG_SPACE(sizeof(int) * 4)];
		} control;
		char data[4096];
		struct iovec vec = {.iov_base = data, .iov_len = sizeof(data)};
		struct msghdr message = {.msg_iov = &vec,
					 .msg_iovlen = 1,
					 .msg_control = &control,
					 .msg_controllen = sizeof(control)};
		ssize_t n;

		for (int i = 0; i < 10; i++)
			uv_run(&fixture->loop, UV_RUN_NOWAIT);
		n = __real_recvmsg(fixture->peer, &message, MSG_DONTWAIT);
		got += n > 0 ? (size_t)n : 0;
		if (n > 0 && CMSG_FIRSTHDR(&message)) {
			close(*(int *)CMSG_DATA(CMSG_FIRSTHDR(&message)));
			got_fds++;
		}
		usleep(1000);
	}
	assert_int_equal(fixture->n_hangups, 0);
	assert_int_equal(fixture->n_handled, n_handled);
	assert_int_equal(got_fds, n_fds);
	assert_true(got > 0);
}

static void what_cannot_be_received_stays(void **state)
{
	struct fixture *fixture = setup();

	(void)state;
	fails.recvmsg = 5;
	ask(fixture, 1, PROTO_PING, -1);
	expect(fixture, 1, 0);
	assert_int_equal(fails.recvmsg, 0);
	teardown(fixture);
}

static void what_cannot_be_sent_waits(void **state)
{
	struct fixture *fixture = setup();

	(void)state;
	fails.send = 3;
	ask(fixture, 1, PROTO_PING, -1);
	expect(fixture, 1, 0);
	fails.sendmsg = 3;
	ask(fixture, 2, PROTO_STATUS, -1);
	expect(fixture, 2, 1);
	assert_int_equal(fails.send + fails.sendmsg, 0);
	teardown(fixture);
}

/* Two at once, the first with a descriptor: it stays with its own message. */
static void what_cannot_be_taken_apart_waits(void **state)
{
	struct fixture *fixture = setup();
	int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);

	(void)state;
	fails.msgpack_unpack = 6;
	ask(fixture, 1, PROTO_WORKER_ATTACH, fd);
	ask(fixture, 2, PROTO_PING, -1);
	expect(fixture, 2, 0);
	assert_int_equal(fixture->n_fds_taken, 1);
	assert_int_equal(fails.msgpack_unpack, 0);
	close(fd);
	teardown(fixture);
}

static void a_message_is_taken_in_without_memory(void **state)
{
	struct fixture *fixture = setup();
	int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);

	(void)state;
	ask(fixture, 1, PROTO_PING, -1);
	expect(fixture, 1, 0); /* what is made once is made */
	fails.msgpack_unpack = 1;
	fails.malloc = 1000;
	ask(fixture, 2, PROTO_WORKER_ATTACH, fd);
	for (int i = 0; i < 10; i++)
		uv_run(&fixture->loop, UV_RUN_NOWAIT);
	fails.malloc = 0;
	expect(fixture, 2, 0);
	assert_int_equal(fixture->n_fds_taken, 1);
	close(fd);
	teardown(fixture);
}

static void what_the_loop_does_not_wait_for_is_tried_again(void **state)
{
	struct fixture *fixture = setup();

	(void)state;
	fails.uv_poll_start = 3;
	fails.sendmsg = 1; /* so that it has to wait for another event */
	ask(fixture, 1, PROTO_STATUS, -1);
	expect(fixture, 1, 1);
	ask(fixture, 2, PROTO_PING, -1);
	expect(fixture, 2, 0);
	teardown(fixture);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(what_cannot_be_received_stays),
		cmocka_unit_test(what_cannot_be_sent_waits),
		cmocka_unit_test(what_cannot_be_taken_apart_waits),
		cmocka_unit_test(a_message_is_taken_in_without_memory),
		cmocka_unit_test(what_the_loop_does_not_wait_for_is_tried_again),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
