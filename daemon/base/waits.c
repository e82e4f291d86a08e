/* SPDX-License-Identifier: MIT */
/*
 * waits.c: what a connection waits for: a turn, room for one more request or descriptor, its socket, the timer; and the
 * descriptors that it has. The hub, which is above, is called by what it has named in hub->calls.
 */
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <base/clock.h>
#include <base/list.h>
#include <base/socket.h>
#include <base/spinner.h>
#include <proto/error.h>

#include "connection_impl.h"

/* ---- spinner ---- */

/* At half a microsecond each the others wait for 4 us at most. */
#define LOOKS_A_TURN 8

/* Reading the load takes 2 us: this often that is nothing. */
#define LOAD_READ_NS (10 * NS_PER_MS)

/* Once a turn, before the loop looks at its sockets. */
static void on_turn(uv_idle_t *turn)
{
	struct spin *spin = container_of(turn, struct spin, turn);

	for (int i = 0; i < LOOKS_A_TURN; i++) {
		/* First of all: the peer may be waiting for this core. */
		(void)sched_yield();
		if (spin->look(spin))
			return;
		if (spin->goes_on(spin, clock_ns()))
			continue;
		uv_idle_stop(turn);
		if (spin->on_end)
			spin->on_end(spin);
		return;
	}
}

void spin_start(struct spin *spin)
{
	uv_idle_start(&spin->turn, on_turn);
}

/* ---- for requests ---- */

/* Whether more threads want to run now than there are cores, us and the peer included. */
static bool is_crowded(struct spinner *spinner, uint64_t now)
{
	char text[96];
	const char *at = text;
	ssize_t n;

	if (spinner->load_fd < 0 || now - spinner->load_read_ns < LOAD_READ_NS)
		return spinner->crowded;
	spinner->load_read_ns = now;
	n = pread(spinner->load_fd, text, sizeof(text) - 1, 0);
	text[n > 0 ? n : 0] = '\0';
	/* "0.20 0.18 0.12 RUNNING/ALL LAST" */
	for (int i = 0; i < 3 && at; i++) {
		at = strchr(at, ' ');
		at = at ? at + 1 : NULL;
	}
	spinner->crowded = at && strtol(at, NULL, 10) > spinner->n_cores;
	return spinner->crowded;
}

bool spinner_is_crowded(struct spinner *spinner)
{
	return spinner->rules.window_ns == 0 || is_crowded(spinner, clock_ns());
}

static bool is_free(const struct spinner *spinner)
{
	return !spinner->is_free || spinner->is_free(spinner->owner);
}

static bool goes_on(struct spin *spin, uint64_t now)
{
	struct spinner *spinner = container_of(spin, struct spinner, spin);

	return is_free(spinner) && proto_spin_go_on(&spinner->rules, spinner->quiet_since_ns, now);
}

void spinner_init(struct spinner *spinner, uv_loop_t *loop, uint64_t window_us,
		  bool (*look)(struct spin *spin))
{
	*spinner = (struct spinner){.spin = {.look = look, .goes_on = goes_on}, .load_fd = -1};
	spinner->n_cores = sysconf(_SC_NPROCESSORS_ONLN);
	proto_spin_init(&spinner->rules, window_us, spinner->n_cores);
	if (spinner->rules.window_ns > 0)
		spinner->load_fd = open("/proc/loadavg", O_RDONLY | O_CLOEXEC);
	uv_idle_init(loop, &spinner->spin.turn);
}

void spinner_deinit(struct spinner *spinner)
{
	uv_close((uv_handle_t *)&spinner->spin.turn, NULL);
	if (spinner->load_fd >= 0)
		(void)close(spinner->load_fd);
}

void spinner_arrival(struct spinner *spinner, uint64_t now)
{
	if (spinner->quiet_since_ns)
		proto_spin_waited(&spinner->rules, now - spinner->quiet_since_ns);
}

void spinner_rest(struct spinner *spinner)
{
	spinner->quiet_since_ns = clock_ns();
	if (proto_spin_begin(&spinner->rules, spinner->quiet_since_ns) && is_free(spinner) &&
	    !is_crowded(spinner, spinner->quiet_since_ns))
		spin_start(&spinner->spin);
	else
		uv_idle_stop(&spinner->spin.turn);
}

/* ---- turns and room ---- */

/* The charge of the connection when it has @more descriptors than now. */
static uint64_t descriptors_cost(const struct connection *connection, uint64_t more)
{
	uint64_t n = (uint64_t)connection->n_fds + connection->n_answer_fds + connection->n_held +
		     more;

	if (!connection->closing && n < connection->hub->spare_fds)
		n = connection->hub->spare_fds;
	return n + 1; /* the socket */
}

static bool has_room(const struct connection *connection, uint64_t n)
{
	uint64_t wanted = descriptors_cost(connection, n);

	return wanted <= connection->charged_fds ||
	       account_has_room(connection->account, ACCOUNT_DESCRIPTORS,
				wanted - connection->charged_fds);
}

/* Whether there is room for the descriptor of one more answer, by what is known already. */
static bool descriptors_fit(const struct connection *connection)
{
	const struct connection_hub *hub = connection->hub;
	const uint64_t *limit = hub->limits->value;

	/* The kernel counts what all of the daemon's processes have sent. */
	return connection->n_answer_fds < limit[LIMIT_FDS_PER_CONNECTION] &&
	       hub->n_answer_fds < limit[LIMIT_FDS] / hub->n_processes && has_room(connection, 1);
}

void connection_enter_backlog(struct connection *connection)
{
	struct connection_hub *hub = connection->hub;
	struct account *account = connection->account;

	list_remove(&connection->in_backlog);
	list_append(account ? &account->backlog : &hub->backlog, &connection->in_backlog);
	if (account && list_is_empty(&account->in_users))
		list_append(&hub->users, &account->in_users);
	uv_idle_start(&hub->turn, hub->calls->turn);
}

void connection_mark_broken(struct connection *connection)
{
	if (connection->broken || connection->closing)
		return;
	connection->broken = true;
	connection_enter_backlog(connection);
}

void connection_start_timer(struct connection_hub *hub)
{
	if (uv_is_active((uv_handle_t *)&hub->timer))
		return;
	hub->ticked_ns = clock_ns();
	uv_timer_start(&hub->timer, hub->calls->timer, WATCH_MS, WATCH_MS);
}

void connection_watch(struct connection *connection)
{
	if (!list_is_empty(&connection->in_watched))
		return;
	list_append(&connection->hub->watched, &connection->in_watched);
	connection_start_timer(connection->hub);
}

static bool is_at_limit(const struct connection *connection)
{
	const uint64_t *limit = connection->hub->limits->value;

	return connection->n_in_flight >= limit[LIMIT_IN_FLIGHT_PER_CONNECTION] ||
	       !account_has_room(connection->account, ACCOUNT_IN_FLIGHT, 1);
}

bool connection_is_stalled(const struct connection *connection)
{
	return connection->account && is_at_limit(connection);
}

void connection_wake_stalled(struct connection_hub *hub, const struct account *account)
{
	list_for_each_entry(struct connection, connection, &hub->stalled, in_backlog) {
		if ((account && connection->account != account) ||
		    connection_is_stalled(connection) ||
		    (connection->wants_fd && !descriptors_fit(connection)))
			continue;
		connection->stalled = connection->wants_fd = connection->wants_memory = false;
		connection_enter_backlog(connection);
	}
}

void connection_release(struct connection_hub *hub, struct account *account,
			enum account_resource resource, uint64_t n)
{
	bool others_wait = account_all_full(account->accounts, resource);

	account_release(account, resource, n);
	if (!list_is_empty(&hub->stalled))
		connection_wake_stalled(hub, others_wait ? NULL : account);
}

void connection_answered(struct connection *connection)
{
	if (connection->n_in_flight == 0)
		return;
	connection->n_in_flight--;
	if (connection->account)
		connection_release(connection->hub, connection->account, ACCOUNT_IN_FLIGHT, 1);
}

void connection_update_poll(struct connection *connection)
{
	int wanted = UV_DISCONNECT;

	if (connection->closing)
		return;
	if (!connection->stalled)
		wanted |= UV_READABLE;
	if (!list_is_empty(&connection->output) && !connection->send_later)
		wanted |= UV_WRITABLE;
	if (wanted == connection->polled && !connection->unpolled)
		return;
	connection->polled = wanted;
	connection->unpolled = uv_poll_start(&connection->poll, wanted,
					     connection->hub->calls->poll) < 0;
	if (connection->unpolled)
		connection_watch(connection); /* else nobody would ever hear from it */
}

static void count_stall(const struct connection *connection, enum stall stall)
{
	struct limits *limits = connection->hub->limits;

	if (stall == STALL_MEMORY)
		return;
	if (stall == STALL_DESCRIPTOR)
		limits->hits[connection->n_answer_fds >= limits->value[LIMIT_FDS_PER_CONNECTION]
				     ? LIMIT_FDS_PER_CONNECTION
				     : LIMIT_FDS_PER_UID]++;
	else if (connection->n_in_flight >= limits->value[LIMIT_IN_FLIGHT_PER_CONNECTION])
		limits->hits[LIMIT_IN_FLIGHT_PER_CONNECTION]++;
	else
		limits->hits[LIMIT_IN_FLIGHT_PER_UID]++;
}

void connection_stall(struct connection *connection, enum stall stall)
{
	struct connection_hub *hub = connection->hub;

	count_stall(connection, stall);
	connection->stalled = true;
	connection->wants_fd = stall == STALL_DESCRIPTOR;
	connection->wants_memory = stall == STALL_MEMORY;
	list_remove(&connection->in_backlog);
	list_append(&hub->stalled, &connection->in_backlog);
	connection_update_poll(connection);
	if (stall == STALL_DESCRIPTOR ||
	    (stall == STALL_MEMORY && !uv_is_active((uv_handle_t *)&hub->reread))) {
		hub->reread_ms = 1;
		uv_timer_start(&hub->reread, hub->calls->reread, hub->reread_ms, 0);
	}
}

struct log_about connection_about(const struct connection *connection)
{
	const struct account *account = connection->account;

	return (struct log_about){.fields = (account ? LOG_UID : 0) |
					    (connection->peer_pid ? LOG_PID : 0),
				  .uid = account ? account->uid : 0,
				  .pid = connection->peer_pid};
}

/* ---- descriptors ---- */

/*
 * The descriptors of a connection: its socket, those that came in and that no
 * message has taken, those of answers from the moment that the request comes in until the peer has
 * read them, and those that the owner holds for it. All are charged to its user.
 *
 * A descriptor that was sent lies in the kernel until it is read, and counts there against the user
 * that this process runs as: when too many are unread, no process of this user can send any. So it
 * stays charged until the socket is empty, even after the connection's end: a peer that leaves its
 * descriptors unread keeps the socket of a closed connection, and pays for it.
 *
 * The first few of a connection, hub->spare_fds, are charged as long as it lives. Whoever was let
 * in can therefore always get an answer, however much its user has taken elsewhere.
 */

static ssize_t send_with_fd(int socket, const uint8_t *data, size_t n, int fd)
{
	struct iovec vec = {.iov_base = (void *)data, .iov_len = n};
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE(sizeof(int))];
	} control;
	struct msghdr message = {.msg_iov = &vec,
				 .msg_iovlen = 1,
				 .msg_control = &control,
				 .msg_controllen = sizeof(control.space)};

	memset(&control, 0, sizeof(control));
	control.header.cmsg_level = SOL_SOCKET;
	control.header.cmsg_type = SCM_RIGHTS;
	control.header.cmsg_len = CMSG_LEN(sizeof(int));
	memcpy(CMSG_DATA(&control.header), &fd, sizeof(int));
	return sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
}

ssize_t socket_send(int socket, const uint8_t *data, size_t n, int fd)
{
	ssize_t sent;

	do
		sent = fd < 0 ? send(socket, data, n, MSG_DONTWAIT | MSG_NOSIGNAL)
			      : send_with_fd(socket, data, n, fd);
	while (sent < 0 && errno == EINTR);
	if (sent < 0 && errno == ETOOMANYREFS)
		return SOCKET_TOO_MANY_FDS;
	if (sent < 0 && (errno == ENOBUFS || errno == ENOMEM))
		return SOCKET_NO_MEMORY;
	if (sent < 0 && errno == EAGAIN)
		return 0;
	return sent;
}

/* A measure of what was sent and not read yet; 0: nothing, or the peer is gone. */
static uint32_t socket_unread(int socket)
{
	int left = 0;

	return ioctl(socket, SIOCOUTQ, &left) < 0 || left < 0 ? 0 : (uint32_t)left;
}

#define MAX_FDS_A_MESSAGE 64 /* the most that LIMIT_FDS_PER_MESSAGE can be */

/* The socket of a connection that is over, with descriptors in it. */
struct lingering {
	struct list in_hub;
	int fd;
	struct account *account;
	uint32_t n;
};

/* ---- charging ---- */

/* Before @n more are counted. */
static int descriptors_charge(struct connection *connection, uint64_t n, struct fmha_error *err)
{
	uint64_t wanted = descriptors_cost(connection, n);
	int r;

	if (!connection->account || wanted <= connection->charged_fds)
		return 0;
	r = account_charge(connection->account, ACCOUNT_DESCRIPTORS,
			   wanted - connection->charged_fds, err);
	if (r == 0)
		connection->charged_fds = wanted;
	return r;
}

/* After fewer are counted. */
static void descriptors_settle(struct connection *connection)
{
	uint64_t now = descriptors_cost(connection, 0), before = connection->charged_fds;

	if (!connection->account || now >= before)
		return;
	connection->charged_fds = now;
	connection_release(connection->hub, connection->account, ACCOUNT_DESCRIPTORS, before - now);
}

static void add_answer_fds(struct connection *connection, int32_t n)
{
	connection->n_answer_fds += (uint32_t)n;
	connection->hub->n_answer_fds += (uint64_t)(int64_t)n;
	if (n < 0)
		descriptors_settle(connection);
}

/* What the user's other connections have read meanwhile makes room, too. */
static void look_at_user(struct connection_hub *hub, const struct account *account)
{
	list_for_each_entry(struct connection, connection, &hub->watched, in_watched) {
		if (connection->account == account)
			(void)descriptors_look(connection);
	}
	descriptors_end_lingering(hub, false);
}

int descriptors_init(struct connection *connection, struct fmha_error *err)
{
	return descriptors_charge(connection, 0, err);
}

int connection_hold_fds(struct connection *connection, uint32_t n, struct fmha_error *err)
{
	int r = descriptors_charge(connection, n, err);

	if (r == 0)
		connection->n_held += n;
	return r;
}

void connection_release_fds(struct connection *connection, uint32_t n)
{
	if (connection->closing)
		return; /* settled with everything else */
	assert(connection->n_held >= n);
	connection->n_held -= n;
	descriptors_settle(connection);
}

/* ---- those of answers ---- */

bool descriptors_have_room(struct connection *connection, int method)
{
	if (!connection->account || method < 0 || proto_methods[method].fds_out == 0 ||
	    descriptors_fit(connection))
		return true;
	look_at_user(connection->hub, connection->account);
	return descriptors_fit(connection);
}

void descriptors_reserve(struct connection *connection, uint32_t id, int method)
{
	const uint64_t *limit = connection->hub->limits->value;

	if (!connection->account || method < 0 || proto_methods[method].fds_out == 0)
		return;
	if (!connection->reserved)
		connection->reserved = malloc(limit[LIMIT_FDS_PER_CONNECTION] * sizeof(uint32_t));
	/* Without a reservation it is charged when it is answered. */
	if (!connection->reserved || descriptors_charge(connection, 1, NULL) < 0)
		return;
	connection->reserved[connection->n_reserved++] = id;
	add_answer_fds(connection, 1);
}

static bool forget_reservation(struct connection *connection, uint32_t id)
{
	for (uint32_t i = 0; i < connection->n_reserved; i++) {
		if (connection->reserved[i] != id)
			continue;
		connection->reserved[i] = connection->reserved[--connection->n_reserved];
		return true;
	}
	return false;
}

bool descriptors_unreserve(struct connection *connection, uint32_t id)
{
	if (!forget_reservation(connection, id))
		return false;
	add_answer_fds(connection, -1);
	return true;
}

int descriptors_take(struct connection *connection, uint32_t id, struct fmha_error *err)
{
	int r;

	if (!connection->account || forget_reservation(connection, id))
		return 0;
	r = descriptors_charge(connection, 1, err);
	if (r == 0)
		add_answer_fds(connection, 1);
	return r;
}

void descriptors_sent(struct connection *connection)
{
	if (!connection->account)
		return;
	connection->n_unread++;
	connection_watch(connection);
}

void descriptors_dropped(struct connection *connection)
{
	if (connection->account)
		add_answer_fds(connection, -1);
}

bool descriptors_look(struct connection *connection)
{
	uint32_t n = connection->n_unread, left;

	if (n == 0)
		return false;
	left = socket_unread(connection->fd);
	if (left < connection->unread_left || !connection->unread_since_ns)
		connection->unread_since_ns = clock_ns();
	connection->unread_left = left;
	if (left > 0)
		return false;
	connection->n_unread = 0;
	connection->unread_since_ns = 0;
	add_answer_fds(connection, -(int32_t)n);
	return true;
}

/* ---- those that come in ---- */

static uint32_t received_fds(const struct msghdr *message, int *fds)
{
	uint32_t n = 0;

	for (struct cmsghdr *header = CMSG_FIRSTHDR(message); header;
	     header = CMSG_NXTHDR((struct msghdr *)message, header)) {
		uint32_t n_here;

		if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS)
			continue;
		n_here = (uint32_t)((header->cmsg_len - CMSG_LEN(0)) / sizeof(int));
		assert(n + n_here <= MAX_FDS_A_MESSAGE); /* the control buffer's size */
		memcpy(fds + n, CMSG_DATA(header), n_here * sizeof(int));
		n += n_here;
	}
	return n;
}

static int charge_received(struct connection *connection, uint32_t n)
{
	if (descriptors_charge(connection, n, NULL) == 0)
		return 0;
	look_at_user(connection->hub, connection->account);
	return descriptors_charge(connection, n, NULL);
}

int descriptors_collect(struct connection *connection, const struct msghdr *message,
			struct fmha_error *err)
{
	struct limits *limits = connection->hub->limits;
	bool cut = message->msg_flags & MSG_CTRUNC;
	int received[MAX_FDS_A_MESSAGE];
	uint32_t n = received_fds(message, received);

	if (n == 0 && !cut)
		return 0;
	/* Our own other process sends one at a time. That it could not be received is no fault of
	 * the sender's: the place in the queue is kept, so that one message fails and no other. */
	if (cut && !connection->account && n == 0) {
		received[n++] = -1;
		cut = false;
	}
	if (cut || limit_exceeded(limits, LIMIT_FDS_PER_MESSAGE, n) ||
	    limit_exceeded(limits, LIMIT_FDS_PER_CONNECTION, (uint64_t)connection->n_fds + n))
		goto fail;
	if (!connection->fds)
		connection->fds = malloc(limits->value[LIMIT_FDS_PER_CONNECTION] * sizeof(int));
	if (!connection->fds || charge_received(connection, n) < 0)
		goto fail;
	memcpy(connection->fds + connection->n_fds, received, n * sizeof(int));
	connection->n_fds += n;
	return 0;
fail:
	if (cut)
		limits->hits[LIMIT_FDS_PER_MESSAGE]++;
	for (uint32_t i = 0; i < n; i++)
		if (received[i] >= 0)
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
	descriptors_settle(connection);
	return fd;
}

/* ---- the end ---- */

void descriptors_close(struct connection *connection)
{
	for (uint32_t i = 0; i < connection->n_fds; i++)
		if (connection->fds[i] >= 0)
			(void)close(connection->fds[i]);
	free(connection->fds);
	connection->fds = NULL;
	free(connection->reserved);
	connection->reserved = NULL;
	connection->n_fds = connection->n_held = connection->n_reserved = 0;
	add_answer_fds(connection,
		       (int32_t)connection->n_unread - (int32_t)connection->n_answer_fds);
	(void)descriptors_look(connection);
	descriptors_settle(connection);
}

static bool linger(struct connection *connection)
{
	struct lingering *lingering = malloc(sizeof(*lingering));

	if (!lingering)
		return false;
	/* The peer sees the end, and may still read what came before. */
	(void)shutdown(connection->fd, SHUT_RDWR);
	lingering->fd = connection->fd;
	lingering->account = connection->account;
	lingering->account->n_references++;
	lingering->n = connection->n_unread;
	list_append(&connection->hub->lingering, &lingering->in_hub);
	connection_start_timer(connection->hub);
	return true;
}

void descriptors_deinit(struct connection *connection)
{
	(void)descriptors_look(connection);
	if (connection->n_unread == 0 || !linger(connection)) {
		(void)close(connection->fd);
		connection->hub->n_answer_fds -= connection->n_unread;
		if (connection->account)
			connection_release(connection->hub, connection->account,
					   ACCOUNT_DESCRIPTORS, connection->charged_fds);
	}
	connection->charged_fds = 0;
	connection->fd = -1;
}

void descriptors_end_lingering(struct connection_hub *hub, bool now)
{
	list_for_each_entry(struct lingering, lingering, &hub->lingering, in_hub) {
		if (!now && socket_unread(lingering->fd) > 0)
			continue;
		list_remove(&lingering->in_hub);
		(void)close(lingering->fd);
		hub->n_answer_fds -= lingering->n;
		connection_release(hub, lingering->account, ACCOUNT_DESCRIPTORS, lingering->n + 1);
		(void)account_put(lingering->account);
		free(lingering);
	}
}
