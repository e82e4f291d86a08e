/* SPDX-License-Identifier: MIT */
/*
 * A connection over a socketpair: frames however they arrive, fds bound to their messages, bounded
 * input, output and time, and nothing left open (RELIABILITY 4.B).
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <base/clock.h>
#include <base/config.h>
#include <base/connection.h>
#include <base/log.h>
#include <proto/error.h>
#include <proto/frame.h>

/* One side is a connection that answers ping at once and holds run until told; the other a bare
 * socket. */
struct fixture {
	uv_loop_t loop;
	struct limits limits;
	struct accounts accounts;
	struct connection_hub hub;
	struct connection connection;
	struct account *account;
	int peer;
	uint32_t n_pings, n_held, held[256];
	uint32_t n_fds_taken, n_hangups, n_closed;
	int n_fds_before;
};

static int count_fds(void)
{
	DIR *directory = opendir("/proc/self/fd");
	int n = -1; /* the directory's own */

	while (readdir(directory))
		n++;
	closedir(directory);
	return n;
}

static int handle(struct connection *connection, uint32_t id, enum proto_method method,
		  const union proto_any_params *params, int *fd, struct fmha_error *err)
{
	struct fixture *fixture = container_of(connection, struct fixture, connection);
	struct proto_json_result result = {.size = id};

	(void)params, (void)err;
	if (*fd >= 0)
		fixture->n_fds_taken++;
	switch (method) {
	case PROTO_RUN:
		fixture->held[fixture->n_held++] = id;
		return 0;
	case PROTO_STATUS: /* an answer with a descriptor */
		connection_answer(connection, id, method, &result,
				  open("/dev/null", O_RDONLY | O_CLOEXEC));
		return 0;
	default:
		fixture->n_pings++;
		connection_answer(connection, id, PROTO_PING, &(struct proto_empty){0}, -1);
		return 0;
	}
}

static void on_hangup(struct connection *connection)
{
	container_of(connection, struct fixture, connection)->n_hangups++;
}

static void on_closed(struct connection *connection)
{
	container_of(connection, struct fixture, connection)->n_closed++;
}

static const struct connection_ops ops = {
	.handle = handle, .on_closed = on_closed, .on_hangup = on_hangup};

#define ALWAYS_CHARGED 2 /* the socket, and a descriptor to spare */

static struct fixture *setup(enum limit limit, uint64_t value, bool before_hello)
{
	struct fixture *fixture = calloc(1, sizeof(*fixture));
	struct config config;
	struct fmha_error err;
	int pair[2];

	log_init("test", LOG_LEVEL_ERROR);
	fixture->n_fds_before = count_fds();
	config_init(&config);
	memcpy(fixture->limits.value, config.limits, sizeof(config.limits));
	if (limit != N_LIMITS)
		fixture->limits.value[limit] = value;
	uv_loop_init(&fixture->loop);
	limits_resolve(&fixture->limits, UINT64_C(1) << 30, false);
	accounts_init(&fixture->accounts, &fixture->limits);
	fixture->account = account_get(&fixture->accounts, 1000);
	assert_int_equal(connection_hub_init(&fixture->hub, &fixture->loop, &fixture->limits, &err),
			 0);
	assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair),
			 0);
	fixture->peer = pair[1];
	assert_int_equal(connection_open(&fixture->connection, &fixture->hub, pair[0],
					 fixture->account, before_hello, &ops, &err),
			 0);
	return fixture;
}

/* Everything that is ready now, and what that leads to. */
static void turn(struct fixture *fixture)
{
	for (int i = 0; i < 40; i++)
		uv_run(&fixture->loop, UV_RUN_NOWAIT);
}

/* Everything that is due within @ms. */
static void turn_for(struct fixture *fixture, uint64_t ms)
{
	uint64_t end = clock_ns() + ms * NS_PER_MS;

	while (clock_ns() < end) {
		turn(fixture);
		usleep(1000);
	}
}

static void teardown(struct fixture *fixture)
{
	if (fixture->peer >= 0)
		close(fixture->peer);
	connection_close(&fixture->connection);
	turn(fixture);
	if (fixture->account->used[ACCOUNT_DESCRIPTORS] > 0) /* of a socket that lingers */
		turn_for(fixture, 250);
	assert_int_equal(fixture->n_hangups, 1);
	assert_int_equal(fixture->n_closed, 1);
	assert_int_equal(fixture->account->used[ACCOUNT_DESCRIPTORS], 0);
	assert_int_equal(fixture->account->used[ACCOUNT_IN_FLIGHT], 0);
	account_put(fixture->account);
	connection_hub_deinit(&fixture->hub);
	uv_run(&fixture->loop, UV_RUN_DEFAULT); /* returns when no handle is left */
	assert_int_equal(uv_loop_close(&fixture->loop), 0);
	assert_int_equal(count_fds(), fixture->n_fds_before);
	free(fixture);
}

static void request(struct proto_buffer *out, uint32_t id, enum proto_method method)
{
	union proto_any_params params;
	struct fmha_error err;

	memset(&params, 0, sizeof(params));
	if (method == PROTO_BUFFER_IMPORT)
		params.BUFFER_IMPORT.size = 4096;
	if (method == PROTO_RUN)
		params.RUN.plan = 1;
	assert_int_equal(proto_encode_request(out, id, method, &params, &err), 0);
}

static ssize_t send_with_fds(int socket, const uint8_t *data, size_t n, int n_fds)
{
	struct iovec vec = {.iov_base = (void *)data, .iov_len = n};
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE(sizeof(int) * 253)];
	} control;
	struct msghdr message = {.msg_iov = &vec, .msg_iovlen = 1};

	if (n_fds > 0) {
		memset(&control, 0, sizeof(control));
		message.msg_control = &control;
		message.msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)n_fds);
		control.header.cmsg_level = SOL_SOCKET;
		control.header.cmsg_type = SCM_RIGHTS;
		control.header.cmsg_len = CMSG_LEN(sizeof(int) * (size_t)n_fds);
		for (int i = 0; i < n_fds; i++)
			((int *)CMSG_DATA(&control.header))[i] = STDERR_FILENO;
	}
	return sendmsg(socket, &message, MSG_NOSIGNAL);
}

static void send_buffer(struct fixture *fixture, struct proto_buffer *buffer, int n_fds)
{
	assert_int_equal(send_with_fds(fixture->peer, buffer->data, buffer->size, n_fds),
			 buffer->size);
	buffer->size = 0;
}

/* Reads answers. Return: how many; @ret_fds descriptors came along and were closed. */
static uint32_t receive(struct fixture *fixture, uint32_t *ret_fds)
{
	static uint8_t data[1 << 20];
	size_t size = 0, used = 0;
	uint32_t n = 0;

	*ret_fds = 0;
	for (;;) {
		struct iovec vec = {.iov_base = data + size, .iov_len = sizeof(data) - size};
		union {
			struct cmsghdr header;
			char space[CMSG_SPACE(sizeof(int) * 16)];
		} control;
		struct msghdr message = {.msg_iov = &vec,
					 .msg_iovlen = 1,
					 .msg_control = &control,
					 .msg_controllen = sizeof(control)};
		ssize_t got = recvmsg(fixture->peer, &message, MSG_DONTWAIT);

		if (got <= 0)
			break;
		size += (size_t)got;
		for (struct cmsghdr *header = CMSG_FIRSTHDR(&message); header;
		     header = CMSG_NXTHDR(&message, header)) {
			size_t n_fds = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);

			for (size_t i = 0; i < n_fds; i++)
				close(((int *)CMSG_DATA(header))[i]);
			*ret_fds += (uint32_t)n_fds;
		}
	}
	while (used < size) {
		struct proto_frame frame;

		assert_int_equal(proto_frame_parse(data + used, size - used, 65536, &frame, NULL),
				 0);
		used += frame.header_bytes + frame.payload_bytes;
		n++;
	}
	assert_int_equal(used, size);
	return n;
}

static uint32_t answers(struct fixture *fixture)
{
	uint32_t n_fds;

	return receive(fixture, &n_fds);
}

static bool is_over(struct fixture *fixture)
{
	return fixture->n_hangups > 0;
}

/* ---- requests of our own ---- */

struct reply {
	uint32_t n, size, n_fds;
	int code;
};

static void on_reply(void *owner, const union proto_any_result *result, int fd,
		     const struct fmha_error *error)
{
	struct reply *reply = owner;

	assert_true((result == NULL) == (error->code != FMHA_OK));
	reply->n++;
	reply->n_fds += fd >= 0;
	reply->code = error->code;
	reply->size = result ? (uint32_t)result->WORKER_STATUS.size : 0;
}

static void ask(struct fixture *fixture, struct reply *reply)
{
	struct fmha_error err;

	assert_int_equal(connection_request(&fixture->connection, PROTO_WORKER_STATUS,
					    &(struct proto_empty){0}, -1, on_reply, reply, &err),
			 0);
}

/* The peer's answer to request @id, with one descriptor. */
static void answer_status(struct fixture *fixture, uint32_t id, uint64_t size)
{
	struct proto_json_result result = {.size = size};
	struct proto_buffer out = {0};
	struct fmha_error err;

	assert_int_equal(proto_encode_result(&out, id, PROTO_WORKER_STATUS, &result, &err), 0);
	send_buffer(fixture, &out, 1);
	proto_buffer_deinit(&out);
	turn(fixture);
}

static void answers_find_who_has_asked(void **state)
{
	struct fixture *fixture = setup(N_LIMITS, 0, false);
	struct reply first = {0}, second = {0}, third = {0};
	struct proto_buffer out = {0};
	struct fmha_error error, err;

	(void)state;
	ask(fixture, &first);
	ask(fixture, &second);
	ask(fixture, &third);
	assert_int_equal(answers(fixture), 3); /* requests, in fact */
	answer_status(fixture, 2, 22);
	answer_status(fixture, 1, 11);
	assert_int_equal(first.size, 11);
	assert_int_equal(second.size, 22);
	assert_int_equal(first.n_fds + second.n_fds, 2);
	(void)fmha_error_set(&error, FMHA_EQUOTA, "no");
	assert_int_equal(proto_encode_error(&out, 3, &error, &err), 0);
	send_buffer(fixture, &out, 0); /* an error brings none */
	turn(fixture);
	assert_int_equal(third.code, FMHA_EQUOTA);
	assert_int_equal(first.n + second.n + third.n, 3);
	assert_false(is_over(fixture));
	proto_buffer_deinit(&out);
	teardown(fixture);
}

static void the_descriptor_of_a_forgotten_answer_is_taken(void **state)
{
	struct fixture *fixture = setup(N_LIMITS, 0, false);
	struct reply gone = {0}, waits = {0};

	(void)state;
	ask(fixture, &gone);
	ask(fixture, &waits);
	assert_int_equal(connection_forget(&fixture->connection, &gone), 1);
	assert_int_equal(connection_forget(&fixture->connection, &gone), 0);
	answer_status(fixture, 1, 11);
	assert_int_equal(fixture->connection.n_fds, 0);
	answer_status(fixture, 2, 22);
	assert_int_equal(gone.n, 0);
	assert_int_equal(waits.size, 22);
	assert_false(is_over(fixture));
	teardown(fixture);
}

static void the_end_answers_what_is_open(void **state)
{
	struct fixture *fixture = setup(N_LIMITS, 0, false);
	struct reply forgotten = {0}, open = {0};
	struct fmha_error err;

	(void)state;
	ask(fixture, &forgotten);
	ask(fixture, &open);
	(void)connection_forget(&fixture->connection, &forgotten);
	connection_close(&fixture->connection);
	assert_int_equal(open.code, FMHA_ECONN);
	assert_int_equal(open.n, 1);
	assert_int_equal(forgotten.n, 0);
	assert_int_equal(connection_request(&fixture->connection, PROTO_PING,
					    &(struct proto_empty){0}, -1, on_reply, &open, &err),
			 FMHA_ECONN);
	assert_int_equal(open.n, 1);
	teardown(fixture);
}

static void an_answer_that_nobody_asked_for_ends_the_connection(void **state)
{
	struct fixture *fixture = setup(N_LIMITS, 0, false);
	struct reply reply = {0};

	(void)state;
	ask(fixture, &reply);
	answer_status(fixture, 7, 1);
	assert_true(is_over(fixture));
	assert_int_equal(reply.code, FMHA_ECONN);
	assert_int_equal(fixture->hub.n_violations, 1);
	teardown(fixture);
}

/* ---- frames ---- */

static void pipelined_requests_are_all_answered(void **state)
{
	struct fixture *fixture = setup(N_LIMITS, 0, false);
	struct proto_buffer out = {0};

	(void)state;
	for (uint32_t id = 0; id < 500; id++)
		request(&out, id, PROTO_PING);
	send_buffer(fixture, &out, 0);
	turn(fixture);
	assert_int_equal(answers(fixture), 500);
	assert_int_equal(fixture->n_pings, 500);
	assert_null(fixture->connection.input); /* nothing is kept of what is done */
	proto_buffer_deinit(&out);
	teardown(fixture);
}

static void frames_may_come_byte_by_byte(void **state)
{
	struct fixture *fixture = setup(N_LIMITS, 0, false);
	struct proto_buffer out = {0};

	(void)state;
	for (uint32_t id = 0; id < 3; id++)
		request(&out, id, PROTO_PING);
	for (size_t i = 0; i < out.size; i++) {
		assert_int_equal(send(fixture->peer, out.data + i, 1, 0), 1);
		turn(fixture);
	}
	assert_int_equal(answers(fixture), 3);
	proto_buffer_deinit(&out);
	teardown(fixture);
}

static void one_turn_handles_a_bounded_number_of_frames(void **state)
{
	struct fixture *fixture = setup(LIMIT_FRAMES_PER_WAKE, 4, false);
	struct proto_buffer out = {0};

	(void)state;
	fixture->limits.value[LIMIT_WAKE_US] = 1000000;
	for (uint32_t id = 0; id < 10; id++)
		request(&out, id, PROTO_PING);
	send_buffer(fixture, &out, 0);
	uv_run(&fixture->loop, UV_RUN_NOWAIT);
	assert_int_equal(fixture->n_pings, 4);
	uv_run(&fixture->loop, UV_RUN_NOWAIT);
	assert_int_equal(fixture->n_pings, 8);
	turn(fixture);
	assert_int_equal(fixture->n_pings, 10);
	proto_buffer_deinit(&out);
	teardown(fixture);
}

static void garbage_ends_the_connection(void **state)
{
#define BYTES(text)                                                                                \
	{                                                                                          \
		text, sizeof(text) - 1                                                             \
	}
	static const struct {
		const char *bytes;
		size_t n;
	} garbage[] = {BYTES("GET / HTTP/1.1\r\n"),
		       BYTES("\xc4\x01\xc1"),
		       BYTES("\xc4\x01\x93"),
		       BYTES("\xc6\xff\xff\xff\xff"),
		       BYTES("\xc5\x00\x05"
			     "hello"),
		       BYTES("\xdd\x20\x01\x01\x01")};
#undef BYTES

	(void)state;
	for (size_t i = 0; i < sizeof(garbage) / sizeof(garbage[0]); i++) {
		struct fixture *fixture = setup(N_LIMITS, 0, false);

		assert_true(send(fixture->peer, garbage[i].bytes, garbage[i].n, 0) > 0);
		turn(fixture);
		assert_true(is_over(fixture));
		assert_int_equal(fixture->hub.n_violations, 1);
		teardown(fixture);
	}
}

static void the_frame_limit_is_small_before_hello(void **state)
{
	static const uint8_t header[] = {0xc5, 0x10, 0x00}; /* 4096 and its header: too much */
	struct fixture *fixture = setup(N_LIMITS, 0, true);

	(void)state;
	assert_int_equal(send(fixture->peer, header, sizeof(header), 0), sizeof(header));
	turn(fixture);
	assert_true(is_over(fixture));
	teardown(fixture);
	fixture = setup(N_LIMITS, 0, true);
	connection_greeted(&fixture->connection);
	assert_int_equal(send(fixture->peer, header, sizeof(header), 0), sizeof(header));
	turn(fixture);
	assert_false(is_over(fixture));
	teardown(fixture);
}

static void answers_before_the_end_still_arrive(void **state)
{
	struct fixture *fixture = setup(N_LIMITS, 0, false);
	struct proto_buffer out = {0};

	(void)state;
	request(&out, 1, PROTO_PING);
	request(&out, 2, PROTO_PING);
	assert_int_equal(proto_buffer_append(&out, "garbage", 7), 0);
	send_buffer(fixture, &out, 0);
	turn(fixture);
	assert_true(is_over(fixture));
	assert_int_equal(answers(fixture), 2);
	proto_buffer_deinit(&out);
	teardown(fixture);
}

static void hello_has_a_deadline(void **state)
{
	struct fixture *fixture = setup(LIMIT_HELLO_MS, 50, true);
	uint64_t start = clock_ns();

	(void)state;
	while (!is_over(fixture) && clock_ns() - start < 5 * NS_PER_S)
		uv_run(&fixture->loop, UV_RUN_ONCE);
	assert_true(is_over(fixture));
	assert_true(clock_ns() - start >= 50 * NS_PER_MS);
	assert_int_equal(fixture->limits.hits[LIMIT_HELLO_MS], 1);
	teardown(fixture);
}

/* ---- descriptors ---- */

static void fds_go_to_the_message_that_declares_them(void **state)
{
	struct fixture *fixture = setup(N_LIMITS, 0, false);
	struct proto_buffer out = {0};

	(void)state;
	/* Bytes without fds that were sent earlier arrive together with those that have some. */
	request(&out, 1, PROTO_PING);
	send_buffer(fixture, &out, 0);
	request(&out, 2, PROTO_BUFFER_IMPORT);
	send_buffer(fixture, &out, 1);
	request(&out, 3, PROTO_PING);
	request(&out, 4, PROTO_BUFFER_IMPORT);
	send_buffer(fixture, &out, 1);
	turn(fixture);
	assert_false(is_over(fixture));
	assert_int_equal(fixture->n_fds_taken, 2);
	assert_int_equal(answers(fixture), 4);
	proto_buffer_deinit(&out);
	teardown(fixture);
}

static void fds_that_come_with_half_a_frame_wait_for_the_rest(void **state)
{
	struct fixture *fixture = setup(N_LIMITS, 0, false);
	struct proto_buffer out = {0};

	(void)state;
	request(&out, 1, PROTO_BUFFER_IMPORT);
	assert_int_equal(send_with_fds(fixture->peer, out.data, 5, 1), 5);
	turn(fixture);
	assert_int_equal(fixture->connection.n_fds, 1);
	assert_int_equal(fixture->account->used[ACCOUNT_DESCRIPTORS], ALWAYS_CHARGED);
	assert_int_equal(send(fixture->peer, out.data + 5, out.size - 5, 0), out.size - 5);
	turn(fixture);
	assert_int_equal(fixture->n_fds_taken, 1);
	assert_int_equal(fixture->connection.n_fds, 0);
	proto_buffer_deinit(&out);
	teardown(fixture);
}

static void fds_that_nobody_declared_end_the_connection(void **state)
{
	static const int counts[] = {1, 4, 5, 16, 253};

	(void)state;
	for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
		struct fixture *fixture = setup(N_LIMITS, 0, false);
		struct proto_buffer out = {0};

		request(&out, 1, PROTO_PING);
		send_buffer(fixture, &out, counts[i]);
		turn(fixture);
		assert_true(is_over(fixture));
		proto_buffer_deinit(&out);
		teardown(fixture);
	}
}

static void a_missing_fd_ends_the_connection(void **state)
{
	struct fixture *fixture = setup(N_LIMITS, 0, false);
	struct proto_buffer out = {0};

	(void)state;
	request(&out, 1, PROTO_BUFFER_IMPORT);
	send_buffer(fixture, &out, 0);
	turn(fixture);
	assert_true(is_over(fixture));
	proto_buffer_deinit(&out);
	teardown(fixture);
}

static void waiting_fds_are_limited(void **state)
{
	static const uint8_t announce[] = {0xc5, 0x80, 0x00}; /* a frame that never ends */
	struct fixture *fixture = setup(LIMIT_FDS_PER_CONNECTION, 8, false);

	(void)state;
	assert_int_equal(send(fixture->peer, announce, sizeof(announce), 0), sizeof(announce));
	for (int i = 0; i < 2; i++) {
		assert_int_equal(send_with_fds(fixture->peer, announce, 1, 4), 1);
		turn(fixture);
		assert_false(is_over(fixture));
	}
	assert_int_equal(send_with_fds(fixture->peer, announce, 1, 1), 1);
	turn(fixture);
	assert_true(is_over(fixture));
	assert_int_equal(fixture->limits.hits[LIMIT_FDS_PER_CONNECTION], 1);
	teardown(fixture);
}

static void answers_carry_their_fds(void **state)
{
	struct fixture *fixture = setup(N_LIMITS, 0, false);
	struct proto_buffer out = {0};
	uint32_t n_fds;

	(void)state;
	request(&out, 1, PROTO_PING);
	request(&out, 2, PROTO_STATUS);
	request(&out, 3, PROTO_PING);
	request(&out, 4, PROTO_STATUS);
	send_buffer(fixture, &out, 0);
	turn(fixture);
	assert_int_equal(receive(fixture, &n_fds), 4);
	assert_int_equal(n_fds, 2);
	proto_buffer_deinit(&out);
	teardown(fixture);
}

static void request_status(struct fixture *fixture, uint32_t n)
{
	struct proto_buffer out = {0};

	for (uint32_t id = 0; id < n; id++)
		request(&out, id, PROTO_STATUS);
	send_buffer(fixture, &out, 0);
	proto_buffer_deinit(&out);
}

static void unread_fds_end_the_reading(void **state)
{
	struct fixture *fixture = setup(LIMIT_FDS_PER_CONNECTION, 8, false);
	uint32_t n = 0, n_fds = 0;

	(void)state;
	request_status(fixture, 100);
	turn(fixture);
	assert_int_equal(fixture->connection.n_unread, 8);
	assert_int_equal(fixture->account->used[ACCOUNT_DESCRIPTORS], 9);
	assert_int_equal(fixture->limits.hits[LIMIT_FDS_PER_CONNECTION], 1);
	turn_for(fixture, 20);
	assert_int_equal(fixture->connection.n_unread, 8);
	for (int i = 0; i < 100 && n < 100; i++) {
		uint32_t n_more;

		n += receive(fixture, &n_more);
		n_fds += n_more;
		turn_for(fixture, 3);
	}
	assert_int_equal(n, 100);
	assert_int_equal(n_fds, 100);
	turn_for(fixture, 150); /* also those that nothing waits for are noticed */
	assert_int_equal(fixture->account->used[ACCOUNT_DESCRIPTORS], ALWAYS_CHARGED);
	teardown(fixture);
}

static void a_user_without_descriptors_still_gets_one_at_a_time(void **state)
{
	struct fixture *fixture = setup(LIMIT_FDS_PER_UID, 100, false);
	uint32_t n_fds;

	(void)state;
	assert_int_equal(account_charge(fixture->account, ACCOUNT_DESCRIPTORS, 98, NULL), 0);
	request_status(fixture, 3);
	for (int i = 0; i < 3; i++) {
		uint32_t n = 0;

		for (int j = 0; j < 100 && n == 0; j++) {
			turn_for(fixture, 5);
			n = receive(fixture, &n_fds);
		}
		assert_int_equal(n, 1);
		assert_int_equal(n_fds, 1);
	}
	account_release(fixture->account, ACCOUNT_DESCRIPTORS, 98);
	teardown(fixture);
}

static void who_never_reads_fds_is_dropped_and_pays_on(void **state)
{
	struct fixture *fixture = setup(LIMIT_FDS_PER_CONNECTION, 8, false);
	uint64_t start = clock_ns();
	uint32_t n_fds;

	(void)state;
	fixture->limits.value[LIMIT_OUTPUT_SOFT_MS] = 150;
	request_status(fixture, 9);
	while (!is_over(fixture) && clock_ns() - start < 5 * NS_PER_S)
		uv_run(&fixture->loop, UV_RUN_ONCE);
	assert_true(is_over(fixture));
	turn_for(fixture, 250);
	/* They lie in its socket, and the kernel counts them against us. */
	assert_int_equal(fixture->account->used[ACCOUNT_DESCRIPTORS], 9);
	assert_int_equal(receive(fixture, &n_fds), 8);
	turn_for(fixture, 250);
	assert_int_equal(fixture->account->used[ACCOUNT_DESCRIPTORS], 0);
	teardown(fixture);
}

static void held_fds_are_charged_until_the_end(void **state)
{
	struct fixture *fixture = setup(LIMIT_FDS_PER_UID, 4, false);
	struct connection *connection = &fixture->connection;
	struct fmha_error err;

	(void)state;
	assert_int_equal(connection_hold_fds(connection, 3, &err), 0);
	assert_int_equal(connection_hold_fds(connection, 1, &err), FMHA_EQUOTA);
	connection_release_fds(connection, 1);
	assert_int_equal(fixture->account->used[ACCOUNT_DESCRIPTORS], 3);
	teardown(fixture);
}

/* Gives the connection's end of the socket to our own other process. */
static void trust(struct fixture *fixture)
{
	account_release(fixture->account, ACCOUNT_DESCRIPTORS, ALWAYS_CHARGED);
	fixture->connection.account = NULL;
	fixture->connection.charged_fds = 0;
}

static int set_fd_limit(rlim_t n)
{
	struct rlimit limit;
	int before;

	assert_int_equal(getrlimit(RLIMIT_NOFILE, &limit), 0);
	before = (int)limit.rlim_cur;
	limit.rlim_cur = n;
	assert_int_equal(setrlimit(RLIMIT_NOFILE, &limit), 0);
	return before;
}

static void a_descriptor_that_cannot_be_received_keeps_its_place(void **state)
{
	struct fixture *fixture = setup(N_LIMITS, 0, false);
	struct proto_buffer out = {0};
	int spare, before;

	(void)state;
	trust(fixture);
	/* Unfinished, so that nothing takes the descriptors. */
	request(&out, 1, PROTO_BUFFER_IMPORT);
	spare = open("/dev/null", O_RDONLY | O_CLOEXEC);
	before = set_fd_limit((rlim_t)spare);
	assert_int_equal(send_with_fds(fixture->peer, out.data, 1, 1), 1);
	turn(fixture);
	(void)set_fd_limit((rlim_t)before);
	assert_int_equal(send_with_fds(fixture->peer, out.data + 1, 1, 1), 1);
	turn(fixture);
	assert_false(is_over(fixture));
	assert_int_equal(fixture->connection.n_fds, 2);
	assert_int_equal(connection_take_fd(&fixture->connection), -1);
	close(connection_take_fd(&fixture->connection));
	assert_int_equal(connection_take_fd(&fixture->connection), -1);
	close(spare);
	proto_buffer_deinit(&out);
	teardown(fixture);
}

/* In a process whose user may have few descriptors on their way, and has them. Return: exit
 * status. */
static int answer_while_the_kernel_is_full(bool trusted)
{
	struct fixture *fixture = setup(N_LIMITS, 0, false);
	int pair[2], n = 0;
	uint32_t n_fds = 0, n_answers;

	if (trusted)
		trust(fixture);
	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair) < 0)
		return 2;
	(void)set_fd_limit(64);
	while (n < 200 && send_with_fds(pair[0], (const uint8_t *)"x", 1, 1) == 1)
		n++;
	if (n == 200 || errno != ETOOMANYREFS)
		return 77;
	request_status(fixture, 1);
	turn(fixture);
	n_answers = receive(fixture, &n_fds);
	/* A client gets an error, our own process its answer when there is room again. */
	if (n_answers != (trusted ? 0 : 1) || n_fds != 0 || is_over(fixture))
		return 3;
	close(pair[0]);
	close(pair[1]);
	turn_for(fixture, 250);
	request_status(fixture, 1);
	turn(fixture);
	n_answers = receive(fixture, &n_fds);
	return n_answers == (trusted ? 2 : 1) && n_fds == n_answers && !is_over(fixture) ? 0 : 4;
}

static void an_answer_that_the_kernel_does_not_take_fails_alone(void **state)
{
	(void)state;
	for (int trusted = 0; trusted < 2; trusted++) {
		pid_t child = fork();
		int status;

		if (child == 0) {
			/* Without privileges, and as somebody who has nothing on the way. */
			if (geteuid() == 0 && setresuid(39871, 39871, 39871) < 0)
				_exit(77);
			_exit(answer_while_the_kernel_is_full(trusted));
		}
		assert_int_equal(waitpid(child, &status, 0), child);
		assert_true(WIFEXITED(status));
		if (WEXITSTATUS(status) != 77)
			assert_int_equal(WEXITSTATUS(status), 0);
	}
}

/* ---- backpressure ---- */

static void as_many_in_flight_as_allowed_then_no_more_reading(void **state)
{
	struct fixture *fixture = setup(LIMIT_IN_FLIGHT_PER_CONNECTION, 4, false);
	struct proto_buffer out = {0};

	(void)state;
	for (uint32_t id = 0; id < 10; id++)
		request(&out, id, PROTO_RUN);
	send_buffer(fixture, &out, 0);
	turn(fixture);
	assert_int_equal(fixture->n_held, 4);
	assert_int_equal(fixture->account->used[ACCOUNT_IN_FLIGHT], 4);
	assert_true(fixture->limits.hits[LIMIT_IN_FLIGHT_PER_CONNECTION] > 0);
	for (uint32_t i = 0; i < 10; i++) {
		assert_true(fixture->n_held > i);
		connection_answer(&fixture->connection, fixture->held[i], PROTO_RUN,
				  &(struct proto_run_result){0}, -1);
		turn(fixture);
	}
	assert_int_equal(fixture->n_held, 10);
	assert_int_equal(answers(fixture), 10);
	proto_buffer_deinit(&out);
	teardown(fixture);
}

static void a_user_at_the_limit_waits_for_his_other_connections(void **state)
{
	struct fixture *fixture = setup(LIMIT_IN_FLIGHT_PER_UID, 2, false);
	struct proto_buffer out = {0};

	(void)state;
	assert_int_equal(account_charge(fixture->account, ACCOUNT_IN_FLIGHT, 2, NULL),
			 0); /* of connections elsewhere */
	request(&out, 1, PROTO_PING);
	send_buffer(fixture, &out, 0);
	turn(fixture);
	assert_int_equal(answers(fixture), 0);
	account_release(fixture->account, ACCOUNT_IN_FLIGHT, 1);
	/* Any answer to this user gives the others a turn. */
	fixture->connection.n_in_flight++;
	assert_int_equal(account_charge(fixture->account, ACCOUNT_IN_FLIGHT, 1, NULL), 0);
	connection_answer(&fixture->connection, 9, PROTO_PING, &(struct proto_empty){0}, -1);
	turn(fixture);
	assert_int_equal(answers(fixture), 2);
	account_release(fixture->account, ACCOUNT_IN_FLIGHT, 1);
	proto_buffer_deinit(&out);
	teardown(fixture);
}

static void the_dead_are_noticed_while_not_being_read(void **state)
{
	struct fixture *fixture = setup(LIMIT_IN_FLIGHT_PER_CONNECTION, 1, false);
	struct proto_buffer out = {0};

	(void)state;
	request(&out, 1, PROTO_RUN);
	request(&out, 2, PROTO_RUN);
	send_buffer(fixture, &out, 0);
	turn(fixture);
	assert_int_equal(fixture->n_held, 1);
	close(fixture->peer);
	fixture->peer = -1;
	turn(fixture);
	assert_true(is_over(fixture));
	proto_buffer_deinit(&out);
	teardown(fixture);
}

static void a_peer_that_never_reads_is_dropped(void **state)
{
	struct fixture *fixture = setup(LIMIT_OUTPUT_HARD_BYTES, 65536, false);
	struct proto_buffer out = {0};
	uint32_t id = 0;

	(void)state;
	for (int round = 0; round < 20000 && !is_over(fixture); round++) {
		for (int i = 0; i < 100; i++)
			request(&out, id++, PROTO_PING);
		if (send(fixture->peer, out.data, out.size, MSG_NOSIGNAL) < 0)
			break;
		out.size = 0;
		turn(fixture);
		assert_true(fixture->connection.output_bytes < 65536 + 70000);
	}
	turn(fixture);
	assert_true(is_over(fixture));
	assert_int_equal(fixture->limits.hits[LIMIT_OUTPUT_HARD_BYTES], 1);
	proto_buffer_deinit(&out);
	teardown(fixture);
}

static void a_peer_that_reads_late_gets_everything(void **state)
{
	struct fixture *fixture = setup(N_LIMITS, 0, false);
	struct proto_buffer out = {0};
	uint32_t n_sent = 0, n_received = 0;

	(void)state;
	while (fixture->connection.output_bytes < 100000) {
		for (int i = 0; i < 100; i++)
			request(&out, n_sent++, PROTO_PING);
		send_buffer(fixture, &out, 0);
		turn(fixture);
	}
	assert_true(fixture->connection.polled & UV_WRITABLE);
	for (int i = 0; i < 1000 && n_received < n_sent; i++) {
		n_received += answers(fixture);
		turn(fixture);
	}
	assert_int_equal(n_received, n_sent);
	assert_false(is_over(fixture));
	assert_int_equal(fixture->connection.output_bytes, 0);
	assert_false(fixture->connection.polled & UV_WRITABLE);
	proto_buffer_deinit(&out);
	teardown(fixture);
}

static void a_slow_reader_has_some_time(void **state)
{
	struct fixture *fixture = setup(LIMIT_OUTPUT_SOFT_BYTES, 4096, false);
	struct proto_buffer out = {0};
	uint32_t id = 0;
	uint64_t start;

	(void)state;
	fixture->limits.value[LIMIT_OUTPUT_SOFT_MS] = 150;
	while (fixture->connection.output_bytes <= 4096) {
		for (int i = 0; i < 100; i++)
			request(&out, id++, PROTO_PING);
		send_buffer(fixture, &out, 0);
		turn(fixture);
	}
	assert_false(is_over(fixture));
	start = clock_ns();
	while (!is_over(fixture) && clock_ns() - start < 5 * NS_PER_S)
		uv_run(&fixture->loop, UV_RUN_ONCE);
	assert_true(is_over(fixture));
	assert_true(clock_ns() - start >= 100 * NS_PER_MS);
	assert_int_equal(fixture->limits.hits[LIMIT_OUTPUT_SOFT_BYTES], 1);
	proto_buffer_deinit(&out);
	teardown(fixture);
}

static void answers_after_the_end_go_nowhere(void **state)
{
	struct fixture *fixture = setup(N_LIMITS, 0, false);
	struct proto_buffer out = {0};
	struct fmha_error err;

	(void)state;
	request(&out, 1, PROTO_RUN);
	send_buffer(fixture, &out, 0);
	turn(fixture);
	close(fixture->peer);
	fixture->peer = -1;
	turn(fixture);
	assert_true(is_over(fixture));
	fmha_error_set(&err, FMHA_ECANCELED, "late");
	connection_answer(&fixture->connection, 1, PROTO_STATUS, &(struct proto_json_result){0},
			  open("/dev/null", O_RDONLY | O_CLOEXEC));
	connection_answer_error(&fixture->connection, 1, &err);
	proto_buffer_deinit(&out);
	teardown(fixture);
}

/* 20,000 random pieces of a random mixture of good and broken requests, with fds strewn in. */
/* Answers @n pings, each at once. */
static void ping_often(struct fixture *fixture, int n)
{
	struct proto_buffer buffer = {0};
	uint8_t answer[64];

	for (int i = 0; i < n; i++) {
		uint32_t before = fixture->n_pings;

		request(&buffer, 1, PROTO_PING);
		assert_int_equal(write(fixture->peer, buffer.data, buffer.size), buffer.size);
		while (fixture->n_pings == before)
			uv_run(&fixture->loop, UV_RUN_NOWAIT);
		assert_true(read(fixture->peer, answer, sizeof(answer)) > 0);
		buffer.size = 0;
	}
	proto_buffer_deinit(&buffer);
}

static bool spins(const struct fixture *fixture)
{
	return uv_is_active((const uv_handle_t *)&fixture->hub.spinner.spin.turn);
}

/* On a busy machine some pings are answered too late to count. */
static void ping_until_it_spins(struct fixture *fixture)
{
	uint64_t began = clock_ns();

	while (!spins(fixture)) {
		assert_true(clock_ns() - began < 20 * NS_PER_S);
		ping_often(fixture, 2);
	}
}

/* The longest window, so that a busy machine does not end it before it is looked at. */
static struct fixture *setup_spinning(void)
{
	struct fixture *fixture = setup(LIMIT_SPIN_US, 1000000, false);
	struct spinner *spinner = &fixture->hub.spinner;

	/* Also where there is only one core, and whatever else the machine does. */
	proto_spin_init(&spinner->rules, 1000000, 2);
	if (spinner->load_fd >= 0)
		close(spinner->load_fd);
	spinner->load_fd = -1;
	spinner->n_cores = 2;
	return fixture;
}

static void a_busy_peer_is_looked_for_until_it_falls_silent(void **state)
{
	struct fixture *fixture = setup_spinning();
	uint64_t began;

	(void)state;
	assert_false(spins(fixture));
	ping_often(fixture, 3);
	assert_false(spins(fixture));
	ping_until_it_spins(fixture);
	began = clock_ns();
	/* With a shorter window from here on, so that silence is soon long enough. */
	fixture->hub.spinner.rules.window_ns = 20 * NS_PER_MS;
	while (spins(fixture)) {
		assert_true(clock_ns() - began < 10 * NS_PER_S);
		uv_run(&fixture->loop, UV_RUN_NOWAIT);
	}
	/* Nothing keeps the loop from blocking now. */
	turn(fixture);
	assert_false(spins(fixture));
	assert_int_equal(uv_backend_timeout(&fixture->loop), -1);
	teardown(fixture);
}

static bool never_free(void *owner)
{
	(void)owner;
	return false;
}

static void nobody_is_looked_for_while_the_core_is_wanted(void **state)
{
	struct fixture *fixture = setup_spinning();

	(void)state;
	fixture->hub.spinner.is_free = never_free;
	ping_often(fixture, 20);
	assert_false(spins(fixture));
	fixture->hub.spinner.is_free = NULL;
	ping_until_it_spins(fixture);
	fixture->hub.spinner.is_free = never_free; /* a run was handed to other threads */
	uv_run(&fixture->loop, UV_RUN_NOWAIT);
	assert_false(spins(fixture));
	teardown(fixture);
}

static void nobody_is_looked_for_on_a_crowded_machine(void **state)
{
	const char crowded[] = "0.10 0.05 0.01 3/99 1\n", quiet[] = "9.10 8.05 7.01 2/99 1\n";
	struct fixture *fixture = setup_spinning();
	struct spinner *spinner = &fixture->hub.spinner;

	(void)state;
	spinner->load_fd = memfd_create("loadavg", MFD_CLOEXEC);
	assert_int_equal(pwrite(spinner->load_fd, crowded, sizeof(crowded) - 1, 0),
			 sizeof(crowded) - 1);
	ping_often(fixture, 20);
	assert_false(spins(fixture));
	assert_int_equal(pwrite(spinner->load_fd, quiet, sizeof(quiet) - 1, 0), sizeof(quiet) - 1);
	ping_until_it_spins(fixture);
	/* What cannot be read says nothing. */
	assert_int_equal(ftruncate(spinner->load_fd, 0), 0);
	spinner->load_read_ns = 0;
	ping_often(fixture, 20);
	assert_false(spinner->crowded);
	teardown(fixture);
}

static void looking_can_be_turned_off(void **state)
{
	struct fixture *fixture = setup(LIMIT_SPIN_US, 0, false);

	(void)state;
	ping_often(fixture, 20);
	assert_false(spins(fixture));
	teardown(fixture);
}

static void a_peer_that_leaves_while_looked_for_is_closed(void **state)
{
	struct fixture *fixture = setup_spinning();

	(void)state;
	ping_until_it_spins(fixture);
	close(fixture->peer);
	fixture->peer = -1;
	turn(fixture);
	assert_int_equal(fixture->n_closed, 1);
	assert_null(fixture->hub.last);
	teardown(fixture);
}

static void random_streams_leave_nothing_behind(void **state)
{
	uint64_t seed = 88172645463325252ull;

	(void)state;
	for (int session = 0; session < 400; session++) {
		struct fixture *fixture = setup(N_LIMITS, 0, false);
		struct proto_buffer out = {0};

		for (int piece = 0; piece < 50 && !is_over(fixture); piece++) {
			size_t n;
			int n_fds;

			seed ^= seed << 13;
			seed ^= seed >> 7;
			seed ^= seed << 17;
			request(&out, piece, seed % 5 == 0 ? PROTO_BUFFER_IMPORT : PROTO_PING);
			if (seed % 97 == 0)
				out.data[seed % out.size] ^= (uint8_t)(1 << (seed >> 40) % 8);
			n = seed % 3 ? out.size : 1 + (seed >> 20) % out.size;
			n_fds = seed % 5 == 0 ? 1 : seed % 89 == 0 ? 3 : 0;
			if (send_with_fds(fixture->peer, out.data, n, n_fds) != (ssize_t)n)
				break;
			out.size -= n;
			memmove(out.data, out.data + n, out.size);
			turn(fixture);
		}
		proto_buffer_deinit(&out);
		answers(fixture);
		teardown(fixture);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(answers_find_who_has_asked),
		cmocka_unit_test(the_descriptor_of_a_forgotten_answer_is_taken),
		cmocka_unit_test(the_end_answers_what_is_open),
		cmocka_unit_test(an_answer_that_nobody_asked_for_ends_the_connection),
		cmocka_unit_test(pipelined_requests_are_all_answered),
		cmocka_unit_test(frames_may_come_byte_by_byte),
		cmocka_unit_test(one_turn_handles_a_bounded_number_of_frames),
		cmocka_unit_test(garbage_ends_the_connection),
		cmocka_unit_test(the_frame_limit_is_small_before_hello),
		cmocka_unit_test(answers_before_the_end_still_arrive),
		cmocka_unit_test(hello_has_a_deadline),
		cmocka_unit_test(fds_go_to_the_message_that_declares_them),
		cmocka_unit_test(fds_that_come_with_half_a_frame_wait_for_the_rest),
		cmocka_unit_test(fds_that_nobody_declared_end_the_connection),
		cmocka_unit_test(a_missing_fd_ends_the_connection),
		cmocka_unit_test(waiting_fds_are_limited),
		cmocka_unit_test(answers_carry_their_fds),
		cmocka_unit_test(unread_fds_end_the_reading),
		cmocka_unit_test(a_user_without_descriptors_still_gets_one_at_a_time),
		cmocka_unit_test(who_never_reads_fds_is_dropped_and_pays_on),
		cmocka_unit_test(held_fds_are_charged_until_the_end),
		cmocka_unit_test(a_descriptor_that_cannot_be_received_keeps_its_place),
		cmocka_unit_test(an_answer_that_the_kernel_does_not_take_fails_alone),
		cmocka_unit_test(as_many_in_flight_as_allowed_then_no_more_reading),
		cmocka_unit_test(a_user_at_the_limit_waits_for_his_other_connections),
		cmocka_unit_test(the_dead_are_noticed_while_not_being_read),
		cmocka_unit_test(a_peer_that_never_reads_is_dropped),
		cmocka_unit_test(a_peer_that_reads_late_gets_everything),
		cmocka_unit_test(a_slow_reader_has_some_time),
		cmocka_unit_test(answers_after_the_end_go_nowhere),
		cmocka_unit_test(a_busy_peer_is_looked_for_until_it_falls_silent),
		cmocka_unit_test(nobody_is_looked_for_while_the_core_is_wanted),
		cmocka_unit_test(nobody_is_looked_for_on_a_crowded_machine),
		cmocka_unit_test(looking_can_be_turned_off),
		cmocka_unit_test(a_peer_that_leaves_while_looked_for_is_closed),
		cmocka_unit_test(random_streams_leave_nothing_behind),
	};
	uv_loop_t loop;

	/* libuv opens a pipe of its own with the first loop and keeps it. */
	uv_loop_init(&loop);
	uv_loop_close(&loop);
	return cmocka_run_group_tests(tests, NULL, NULL);
}
