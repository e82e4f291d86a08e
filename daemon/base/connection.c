/* SPDX-License-Identifier: MIT */
/*
 * connection.c: see connection.h. Reading is one recvmsg a wake-up, then as many frames as the turn
 * allows; what is left waits in the connection's own buffer, and the connection in the hub's
 * backlog.
 *
 * Nothing here closes a connection while its owner may be in the middle of using it, except when
 * the owner asks: a failed send only marks the connection broken and queues it for the next turn.
 */
#include <base/connection.h>

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <proto/error.h>
#include <proto/frame.h>

#include <base/clock.h>
#include <base/socket.h>

#define WATCH_MS          100
#define MAX_FDS_A_MESSAGE 64 /* the most that LIMIT_FDS_PER_MESSAGE can be */

struct output_chunk {
	struct list in_output;
	size_t size, sent;
	int fd; /* goes with the first byte; -1: none */
	uint8_t data[];
};

static void hub_turn(uv_idle_t *handle);
static void hub_on_timer(uv_timer_t *timer);
static bool hub_look(struct spinner *spinner);

int connection_hub_init(struct connection_hub *hub, uv_loop_t *loop, struct limits *limits,
			struct fmha_error *err)
{
	*hub = (struct connection_hub){.loop = loop, .limits = limits};
	list_init(&hub->backlog);
	list_init(&hub->stalled);
	list_init(&hub->watched);
	hub->receive_bytes = limits->value[LIMIT_FRAME_BYTES];
	hub->receive = malloc(hub->receive_bytes);
	if (!hub->receive)
		return fmha_error_set(err, FMHA_ENOMEM, "connections: out of memory");
	uv_idle_init(loop, &hub->turn);
	uv_timer_init(loop, &hub->timer);
	spinner_init(&hub->spinner, loop, limits->value[LIMIT_SPIN_US], hub_look);
	return 0;
}

void connection_hub_deinit(struct connection_hub *hub)
{
	if (!hub->loop)
		return;
	uv_close((uv_handle_t *)&hub->turn, NULL);
	uv_close((uv_handle_t *)&hub->timer, NULL);
	spinner_deinit(&hub->spinner);
	proto_buffer_deinit(&hub->send);
	proto_buffer_deinit(&hub->direct);
	proto_message_deinit(&hub->message);
	free(hub->receive);
	hub->receive = NULL;
	hub->loop = NULL;
}

/* The connection gets a turn in the next iteration of the loop. */
static void enter_backlog(struct connection *connection)
{
	list_remove(&connection->in_backlog);
	list_append(&connection->hub->backlog, &connection->in_backlog);
	uv_idle_start(&connection->hub->turn, hub_turn);
}

static void mark_broken(struct connection *connection)
{
	if (connection->broken || connection->closing)
		return;
	connection->broken = true;
	enter_backlog(connection);
}

static void watch(struct connection *connection)
{
	struct connection_hub *hub = connection->hub;

	if (list_is_empty(&hub->watched))
		uv_timer_start(&hub->timer, hub_on_timer, WATCH_MS, WATCH_MS);
	list_remove(&connection->in_watched);
	list_append(&hub->watched, &connection->in_watched);
}

static void unwatch(struct connection *connection)
{
	list_remove(&connection->in_watched);
	if (list_is_empty(&connection->hub->watched))
		uv_timer_stop(&connection->hub->timer);
}

/* In flight as many requests as allowed: the next frame waits where it is. */
static bool is_stalled(struct connection *connection)
{
	struct limits *limits = connection->hub->limits;
	struct account *account = connection->account;

	if (!account)
		return false;
	return connection->n_in_flight >= limits->value[LIMIT_IN_FLIGHT_PER_CONNECTION] ||
	       !account_has_room(account, ACCOUNT_IN_FLIGHT, 1);
}

static void on_poll(uv_poll_t *poll, int status, int events);

/* Tells epoll what we wait for now; the usual request changes nothing and costs no system call. */
static void update_poll(struct connection *connection)
{
	int wanted = UV_DISCONNECT;

	if (connection->closing)
		return;
	if (!connection->stalled)
		wanted |= UV_READABLE;
	if (!list_is_empty(&connection->output))
		wanted |= UV_WRITABLE;
	if (wanted == connection->polled)
		return;
	connection->polled = wanted;
	uv_poll_start(&connection->poll, wanted, on_poll);
}

static void stall(struct connection *connection)
{
	struct connection_hub *hub = connection->hub;
	struct limits *limits = hub->limits;

	if (connection->n_in_flight >= limits->value[LIMIT_IN_FLIGHT_PER_CONNECTION])
		limits->hits[LIMIT_IN_FLIGHT_PER_CONNECTION]++;
	else
		limits->hits[LIMIT_IN_FLIGHT_PER_UID]++;
	connection->stalled = true;
	list_remove(&connection->in_backlog);
	list_append(&hub->stalled, &connection->in_backlog);
	update_poll(connection);
}

/* An answer made room: whoever of this user had stopped reading may go on. */
static void wake_stalled(struct connection_hub *hub, struct account *account)
{
	list_for_each(node, &hub->stalled)
	{
		struct connection *connection = container_of(node, struct connection, in_backlog);

		if (connection->account != account || is_stalled(connection))
			continue;
		connection->stalled = false;
		enter_backlog(connection);
	}
}

/* ---- output ---- */

static void free_chunk(struct output_chunk *chunk)
{
	list_remove(&chunk->in_output);
	if (chunk->fd >= 0)
		(void)close(chunk->fd);
	free(chunk);
}

/* Return: as socket_send(). */
static ssize_t send_bytes(struct connection *connection, const uint8_t *data, size_t n, int fd)
{
	ssize_t sent = socket_send(connection->fd, data, n, fd);

	if (sent > 0)
		connection->bytes_out += (uint64_t)sent;
	return sent;
}

static void check_output_limits(struct connection *connection)
{
	struct limits *limits = connection->hub->limits;
	uint64_t hard = limits->value[LIMIT_OUTPUT_HARD_BYTES];

	if (connection->before_hello &&
	    limit_exceeded(limits, LIMIT_OUTPUT_BYTES_BEFORE_HELLO, connection->output_bytes)) {
		mark_broken(connection);
	} else if (connection->output_bytes > hard) {
		limits->hits[LIMIT_OUTPUT_HARD_BYTES]++;
		log_limited(&connection->log, LOG_LEVEL_WARNING,
			    "dropping a client that does not read: %zu bytes of answers wait",
			    connection->output_bytes);
		mark_broken(connection);
	} else if (connection->output_bytes > limits->value[LIMIT_OUTPUT_SOFT_BYTES]) {
		if (!connection->output_since_ns) {
			connection->output_since_ns = clock_ns();
			watch(connection);
		}
	} else {
		connection->output_since_ns = 0;
	}
}

static void queue_output(struct connection *connection, const uint8_t *data, size_t n, int fd)
{
	struct output_chunk *chunk = malloc(sizeof(*chunk) + n);

	if (!chunk) {
		if (fd >= 0)
			(void)close(fd);
		mark_broken(connection);
		return;
	}
	chunk->size = n;
	chunk->sent = 0;
	chunk->fd = fd;
	memcpy(chunk->data, data, n);
	list_append(&connection->output, &chunk->in_output);
	connection->output_bytes += n;
	check_output_limits(connection);
	update_poll(connection);
}

/* Sends or queues. @fd: -1 or taken. */
static void transmit(struct connection *connection, const uint8_t *data, size_t n, int fd)
{
	ssize_t sent = 0;

	if (connection->closing || connection->broken || n == 0)
		goto done;
	if (list_is_empty(&connection->output)) {
		sent = send_bytes(connection, data, n, fd);
		if (sent < 0) {
			mark_broken(connection);
			goto done;
		}
	}
	if ((size_t)sent < n) {
		queue_output(connection, data + sent, n - (size_t)sent, sent == 0 ? fd : -1);
		if (sent == 0)
			fd = -1;
	}
done:
	if (fd >= 0)
		(void)close(fd);
}

static void flush_output(struct connection *connection)
{
	while (!list_is_empty(&connection->output)) {
		struct output_chunk *chunk = container_of(connection->output.next,
							  struct output_chunk, in_output);
		ssize_t sent = send_bytes(connection, chunk->data + chunk->sent,
					  chunk->size - chunk->sent, chunk->fd);

		if (sent < 0) {
			mark_broken(connection);
			return;
		}
		if (sent == 0)
			break;
		if (chunk->fd >= 0)
			(void)close(chunk->fd);
		chunk->fd = -1;
		chunk->sent += (size_t)sent;
		connection->output_bytes -= (size_t)sent;
		if (chunk->sent == chunk->size)
			free_chunk(chunk);
	}
	check_output_limits(connection);
	update_poll(connection);
}

static void uncork(struct connection_hub *hub)
{
	struct connection *connection = hub->corked;

	if (connection && hub->send.size > 0)
		transmit(connection, hub->send.data, hub->send.size, -1);
	hub->send.size = 0;
}

/* Where to encode the next message, and sending it from there. */
static struct proto_buffer *begin_send(struct connection *connection)
{
	struct connection_hub *hub = connection->hub;

	return hub->corked == connection ? &hub->send : &hub->direct;
}

static void end_send(struct connection *connection, size_t start, int fd)
{
	struct connection_hub *hub = connection->hub;

	if (hub->corked != connection) {
		transmit(connection, hub->direct.data, hub->direct.size, fd);
		hub->direct.size = 0;
		if (!hub->corked)
			spinner_rest(&hub->spinner);
	} else if (fd >= 0) {
		/* The fd must travel with the first byte of its own frame. */
		transmit(connection, hub->send.data, start, -1);
		transmit(connection, hub->send.data + start, hub->send.size - start, fd);
		hub->send.size = 0;
	}
}

static void answered(struct connection *connection)
{
	struct account *account = connection->account;

	if (connection->n_in_flight == 0)
		return;
	connection->n_in_flight--;
	if (!account)
		return;
	account_release(account, ACCOUNT_IN_FLIGHT, 1);
	if (!list_is_empty(&connection->hub->stalled))
		wake_stalled(connection->hub, account);
}

void connection_answer_error(struct connection *connection, uint32_t id,
			     const struct fmha_error *error)
{
	struct proto_buffer *buffer = begin_send(connection);
	struct fmha_error err;
	size_t start = buffer->size;

	if (connection->closing)
		return;
	if (proto_encode_error(buffer, id, error, &err) < 0)
		mark_broken(connection);
	else
		end_send(connection, start, -1);
	answered(connection);
}

void connection_answer(struct connection *connection, uint32_t id, enum proto_method method,
		       const void *result, int fd)
{
	struct proto_buffer *buffer = begin_send(connection);
	struct fmha_error err;
	size_t start = buffer->size;
	int r;

	if (connection->closing) {
		if (fd >= 0)
			(void)close(fd);
		return;
	}
	r = proto_encode_result(buffer, id, method, result, &err);
	if (r < 0) {
		if (fd >= 0)
			(void)close(fd);
		err.code = FMHA_EINTERNAL;
		log_error("%s: answer cannot be encoded: %s", proto_methods[method].name, err.msg);
		connection_answer_error(connection, id, &err);
		return;
	}
	end_send(connection, start, fd);
	answered(connection);
}

int connection_request(struct connection *connection, uint32_t id, enum proto_method method,
		       const void *params, int fd, struct fmha_error *err)
{
	struct proto_buffer *buffer = begin_send(connection);
	size_t start = buffer->size;
	int r = connection->closing ? fmha_error_set(err, FMHA_ECONN, "connection is closed") : 0;

	if (r == 0)
		r = proto_encode_request(buffer, id, method, params, err);
	if (r < 0) {
		if (fd >= 0)
			(void)close(fd);
		return r;
	}
	end_send(connection, start, fd);
	return 0;
}

/* ---- input ---- */

/* Moves received fds into the queue. Return: 0 or FMHA_EPROTO; then none is left open. */
static int collect_fds(struct connection *connection, struct msghdr *message,
		       struct fmha_error *err)
{
	struct limits *limits = connection->hub->limits;
	struct account *account = connection->account;
	int received[MAX_FDS_A_MESSAGE + 1];
	uint32_t n = 0;
	bool refuse = message->msg_flags & MSG_CTRUNC;

	for (struct cmsghdr *header = CMSG_FIRSTHDR(message); header;
	     header = CMSG_NXTHDR(message, header)) {
		uint32_t n_here;

		if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS)
			continue;
		n_here = (uint32_t)((header->cmsg_len - CMSG_LEN(0)) / sizeof(int));
		assert(n + n_here <= MAX_FDS_A_MESSAGE + 1); /* the control buffer's size */
		memcpy(received + n, CMSG_DATA(header), n_here * sizeof(int));
		n += n_here;
	}
	if (n == 0 && !refuse)
		return 0;
	if (refuse || limit_exceeded(limits, LIMIT_FDS_PER_MESSAGE, n) ||
	    limit_exceeded(limits, LIMIT_FDS_PER_CONNECTION, (uint64_t)connection->n_fds + n) ||
	    (account && account_charge(account, ACCOUNT_DESCRIPTORS, n, NULL) < 0))
		goto fail;
	if (!connection->fds)
		connection->fds = malloc(limits->value[LIMIT_FDS_PER_CONNECTION] * sizeof(int));
	if (!connection->fds) {
		if (account)
			account_release(account, ACCOUNT_DESCRIPTORS, n);
		goto fail;
	}
	memcpy(connection->fds + connection->n_fds, received, n * sizeof(int));
	connection->n_fds += n;
	return 0;
fail:
	if (refuse)
		limits->hits[LIMIT_FDS_PER_MESSAGE]++;
	for (uint32_t i = 0; i < n; i++)
		(void)close(received[i]);
	return fmha_error_set(err, FMHA_EPROTO, "too many file descriptors");
}

int connection_take_fd(struct connection *connection)
{
	int fd;

	if (connection->n_fds == 0)
		return -1;
	fd = connection->fds[0];
	connection->n_fds--;
	memmove(connection->fds, connection->fds + 1, connection->n_fds * sizeof(int));
	if (connection->account)
		account_release(connection->account, ACCOUNT_DESCRIPTORS, 1);
	return fd;
}

/*
 * The request's fd, as far as it declares one. @params: NULL when they could not be decoded; then
 * an fd is taken out of the way if there is one. Return: 0 with the fd (given) or -1; FMHA_EPROTO:
 * it is missing.
 */
static int take_request_fd(struct connection *connection, const struct proto_message *message,
			   const void *params, int *ret_fd, struct fmha_error *err)
{
	enum proto_method method = (enum proto_method)message->method;
	int n_fds = 0;

	if (message->method >= 0 && proto_methods[method].fds_in > 0)
		n_fds = params ? proto_request_fds(method, params) : proto_methods[method].fds_in;
	*ret_fd = n_fds > 0 ? connection_take_fd(connection) : -1;
	if (n_fds > 0 && *ret_fd < 0 && params)
		return fmha_error_set(err, FMHA_EPROTO, "%s: its file descriptor is missing",
				      proto_methods[method].name);
	return 0;
}

void connection_serve(struct connection *connection, const struct proto_message *message,
		      connection_handler handle)
{
	union proto_any_params params;
	struct fmha_error err, violation;
	int fd, r;

	if (message->type == PROTO_NOTIFICATION)
		return; /* version 1 has none that means anything */
	if (message->type != PROTO_REQUEST) {
		fmha_error_set(&err, FMHA_EPROTO, "a client sends requests only");
		connection_fail(connection, &err);
		return;
	}
	r = proto_decode_params(message, &params, &err);
	if (take_request_fd(connection, message, r == 0 ? &params : NULL, &fd, &violation) < 0) {
		connection_fail(connection, &violation);
		return;
	}
	if (r == 0)
		r = handle(connection, message->id, (enum proto_method)message->method, &params, fd,
			   &err);
	if (r < 0)
		connection_answer_error(connection, message->id, &err);
	if (fd >= 0)
		(void)close(fd);
}

static int handle_frame(struct connection *connection, const uint8_t *payload, size_t n,
			struct fmha_error *err)
{
	struct connection_hub *hub = connection->hub;
	int r;

	r = proto_message_decode(&hub->message, payload, n, err);
	if (r < 0)
		return r;
	hub->n_frames++;
	connection->n_frames++;
	if (hub->message.type == PROTO_REQUEST) {
		/* is_stalled() has seen that there is room. */
		if (connection->account &&
		    account_charge(connection->account, ACCOUNT_IN_FLIGHT, 1, err) < 0)
			return FMHA_EQUOTA;
		connection->n_in_flight++;
	}
	connection->ops->on_message(connection, &hub->message);
	return 0;
}

static bool turn_is_over(struct connection *connection, uint32_t n_frames, uint64_t start_ns)
{
	const uint64_t *limit = connection->hub->limits->value;

	/* Reading the clock costs half a small frame: not for every one. */
	return n_frames >= limit[LIMIT_FRAMES_PER_WAKE] ||
	       (n_frames > 0 && n_frames % 8 == 0 &&
		clock_ns() - start_ns > limit[LIMIT_WAKE_US] * 1000);
}

/* Hands out the frames in @data. Return: bytes used up. */
static size_t handle_frames(struct connection *connection, const uint8_t *data, size_t n)
{
	const uint64_t *limit = connection->hub->limits->value;
	uint64_t start_ns = connection->hub->turn_ns;
	uint32_t n_frames = 0;
	size_t used = 0;

	while (used < n && !connection->closing && !connection->broken) {
		struct proto_frame frame;
		struct fmha_error err;
		int r = proto_frame_parse(
			data + used, n - used,
			limit[connection->before_hello ? LIMIT_FRAME_BYTES_BEFORE_HELLO
						       : LIMIT_FRAME_BYTES],
			&frame, &err);

		if (r == PROTO_FRAME_MORE)
			break;
		if (r == 0 && n - used < frame.header_bytes + frame.payload_bytes)
			break;
		if (r == 0 && is_stalled(connection)) {
			stall(connection);
			break;
		}
		if (r == 0 && turn_is_over(connection, n_frames, start_ns)) {
			enter_backlog(connection);
			break;
		}
		if (r == 0)
			r = handle_frame(connection, data + used + frame.header_bytes,
					 frame.payload_bytes, &err);
		if (r < 0) {
			connection_fail(connection, &err);
			break;
		}
		used += frame.header_bytes + frame.payload_bytes;
		n_frames++;
	}
	return used;
}

/* Parses @n bytes at @data, which is the connection's own buffer or the hub's, and keeps the rest.
 */
static void process_input(struct connection *connection, uint8_t *data, size_t n)
{
	size_t used = handle_frames(connection, data, n), left = n - used;

	if (connection->closing)
		return;
	if (left == 0) {
		free(connection->input);
		connection->input = NULL;
		connection->input_bytes = 0;
		if (connection->n_fds > 0) {
			struct fmha_error err;

			fmha_error_set(&err, FMHA_EPROTO,
				       "file descriptors that no message has declared");
			connection_fail(connection, &err);
		}
		return;
	}
	if (!connection->input)
		connection->input = malloc(connection->hub->receive_bytes);
	if (!connection->input) {
		mark_broken(connection);
		return;
	}
	memmove(connection->input, data + used, left);
	connection->input_bytes = left;
}

/* Return: whether there was any, be it the end. */
static bool read_input(struct connection *connection)
{
	struct connection_hub *hub = connection->hub;
	uint8_t *data = connection->input ? connection->input : hub->receive;
	struct iovec vec = {.iov_base = data + connection->input_bytes,
			    .iov_len = hub->receive_bytes - connection->input_bytes};
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE(sizeof(int) * MAX_FDS_A_MESSAGE)];
	} control;
	struct msghdr message = {.msg_iov = &vec, .msg_iovlen = 1};
	struct fmha_error err;
	ssize_t n;

	message.msg_control = &control;
	message.msg_controllen = CMSG_SPACE(sizeof(int) *
					    hub->limits->value[LIMIT_FDS_PER_MESSAGE]);
	do
		n = recvmsg(connection->fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	while (n < 0 && errno == EINTR);
	if (n < 0 && errno == EAGAIN)
		return false; /* libuv may report readiness once too often */
	if (n <= 0) {
		connection_close(connection);
		return true;
	}
	connection->bytes_in += (uint64_t)n;
	hub->turn_ns = clock_ns();
	spinner_arrival(&hub->spinner, hub->turn_ns);
	hub->last = connection;
	if (collect_fds(connection, &message, &err) < 0)
		connection_fail(connection, &err);
	else
		process_input(connection, data, connection->input_bytes + (size_t)n);
	return true;
}

static bool may_read(const struct connection *connection)
{
	return !connection->broken && !connection->stalled &&
	       list_is_empty(&connection->in_backlog);
}

/* What was answered since hub->corked was set leaves together. */
static void end_turn(struct connection_hub *hub)
{
	uncork(hub);
	hub->corked = NULL;
	spinner_rest(&hub->spinner);
}

static void on_poll(uv_poll_t *poll, int status, int events)
{
	struct connection *connection = container_of(poll, struct connection, poll);
	struct connection_hub *hub = connection->hub;

	if (connection->closing)
		return;
	if (status < 0 || connection->broken ||
	    (!(events & (UV_READABLE | UV_WRITABLE)) && (events & UV_DISCONNECT))) {
		connection_close(connection);
		return;
	}
	hub->corked = connection;
	if (events & UV_WRITABLE)
		flush_output(connection);
	if ((events & UV_READABLE) && may_read(connection))
		(void)read_input(connection);
	end_turn(hub);
}

static bool hub_look(struct spinner *spinner)
{
	struct connection_hub *hub = container_of(spinner, struct connection_hub, spinner);
	bool found;

	if (!hub->last || !may_read(hub->last))
		return false;
	hub->corked = hub->last;
	found = read_input(hub->last);
	if (found)
		end_turn(hub);
	hub->corked = NULL;
	return found;
}

/* One turn for each connection that was in the backlog when the iteration began. */
static void hub_turn(uv_idle_t *handle)
{
	struct connection_hub *hub = container_of(handle, struct connection_hub, turn);
	struct list now, *node;

	list_init(&now);
	while ((node = list_pop(&hub->backlog)))
		list_append(&now, node);
	while ((node = list_pop(&now))) {
		struct connection *connection = container_of(node, struct connection, in_backlog);

		if (connection->broken) {
			connection_close(connection);
			continue;
		}
		hub->turn_ns = clock_ns();
		hub->corked = connection;
		if (connection->input && connection->input_bytes > 0)
			process_input(connection, connection->input, connection->input_bytes);
		end_turn(hub);
		update_poll(connection);
	}
	if (list_is_empty(&hub->backlog))
		uv_idle_stop(&hub->turn);
}

static void hub_on_timer(uv_timer_t *timer)
{
	struct connection_hub *hub = container_of(timer, struct connection_hub, timer);
	uint64_t now = clock_ns();
	uint64_t soft_ns = hub->limits->value[LIMIT_OUTPUT_SOFT_MS] * NS_PER_MS;

	list_for_each(node, &hub->watched)
	{
		struct connection *connection = container_of(node, struct connection, in_watched);

		if (connection->deadline_ns && now >= connection->deadline_ns) {
			hub->limits->hits[LIMIT_HELLO_MS]++;
			log_limited(&hub->log, LOG_LEVEL_INFO,
				    "closing a connection without hello");
			connection_close(connection);
		} else if (connection->output_since_ns &&
			   now - connection->output_since_ns >= soft_ns) {
			hub->limits->hits[LIMIT_OUTPUT_SOFT_BYTES]++;
			log_limited(&hub->log, LOG_LEVEL_WARNING,
				    "dropping a client that reads too slowly: %zu bytes wait",
				    connection->output_bytes);
			connection_close(connection);
		} else if (!connection->deadline_ns && !connection->output_since_ns) {
			unwatch(connection);
		}
	}
}

/* ---- life ---- */

int connection_open(struct connection *connection, struct connection_hub *hub, int fd,
		    struct account *account, bool before_hello, const struct connection_ops *ops,
		    struct fmha_error *err)
{
	int r;

	*connection = (struct connection){
		.hub = hub, .ops = ops, .account = account, .fd = fd, .before_hello = before_hello};
	list_init(&connection->output);
	list_init(&connection->in_backlog);
	list_init(&connection->in_watched);
	r = uv_poll_init(hub->loop, &connection->poll, fd);
	if (r < 0) {
		(void)close(fd);
		return fmha_error_set(err, FMHA_EIO, "polling a socket: %s", uv_strerror(r));
	}
	if (before_hello) {
		connection->deadline_ns = clock_ns() +
					  hub->limits->value[LIMIT_HELLO_MS] * NS_PER_MS;
		watch(connection);
	}
	update_poll(connection);
	return 0;
}

void connection_greeted(struct connection *connection)
{
	connection->before_hello = false;
	connection->deadline_ns = 0;
	if (!connection->output_since_ns)
		unwatch(connection);
}

static void on_poll_closed(uv_handle_t *handle)
{
	struct connection *connection = container_of(handle, struct connection, poll);

	(void)close(connection->fd);
	connection->fd = -1;
	connection->ops->on_closed(connection);
}

void connection_close(struct connection *connection)
{
	struct account *account = connection->account;

	if (connection->closing)
		return;
	/* What was answered before the end still goes out, as far as the socket takes it. */
	if (connection->hub->corked == connection)
		uncork(connection->hub);
	connection->closing = true;
	if (connection->hub->last == connection)
		connection->hub->last = NULL;
	list_remove(&connection->in_backlog);
	unwatch(connection);
	while (!list_is_empty(&connection->output))
		free_chunk(container_of(connection->output.next, struct output_chunk, in_output));
	while (connection->n_fds > 0)
		(void)close(connection_take_fd(connection));
	free(connection->fds);
	connection->fds = NULL;
	free(connection->input);
	connection->input = NULL;
	if (account) {
		account_release(account, ACCOUNT_IN_FLIGHT, connection->n_in_flight);
		if (!list_is_empty(&connection->hub->stalled))
			wake_stalled(connection->hub, account);
	}
	connection->n_in_flight = 0;
	uv_close((uv_handle_t *)&connection->poll, on_poll_closed);
	connection->ops->on_hangup(connection);
}

void connection_fail(struct connection *connection, const struct fmha_error *error)
{
	connection->hub->n_violations++;
	log_limited(&connection->hub->log, LOG_LEVEL_NOTICE, "closing a connection: %s",
		    error->msg);
	connection_close(connection);
}
