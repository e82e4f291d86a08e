/* SPDX-License-Identifier: MIT */
/*
 * hub.c: all connections of a process: whose turn it is on the loop, and who is late.
 *
 * Nothing here closes a connection while its owner may be in the middle of using it, except when
 * the owner asks: a failed send only marks the connection broken and queues it for the next turn.
 */
#include "connection_impl.h"

#include <stdlib.h>

#include <proto/error.h>

#include <base/clock.h>

#define PAUSE_MS 500 /* a timer that comes so late says that the process stood still */

static bool may_read(const struct connection *connection)
{
	return !connection->broken && !connection->stalled &&
	       list_is_empty(&connection->in_backlog);
}

/* ---- turns ---- */

static void hub_on_iteration(uv_prepare_t *handle)
{
	container_of(handle, struct connection_hub, iterate)->iteration++;
}

/* What the user has had of this iteration of the loop, of all of its connections. */
static uint64_t had_ns(const struct connection_hub *hub, const struct account *account)
{
	return account && account->iteration == hub->iteration ? account->iteration_ns : 0;
}

static bool has_had_its_share(const struct connection_hub *hub, const struct account *account)
{
	return account && had_ns(hub, account) >= hub->limits->value[LIMIT_WAKE_US] * NS_PER_US;
}

/* What came earlier, on any of the user's connections, is waiting still. */
static bool has_to_wait(const struct connection *connection)
{
	const struct account *account = connection->account;

	return has_had_its_share(connection->hub, account) ||
	       (account && !list_is_empty(&account->backlog));
}

static void begin_turn(struct connection *connection)
{
	struct connection_hub *hub = connection->hub;
	const uint64_t most_ns = hub->limits->value[LIMIT_WAKE_US] * NS_PER_US;
	uint64_t had = had_ns(hub, connection->account);

	hub->turn_ns = clock_ns();
	hub->turn_until_ns = hub->turn_ns + (had < most_ns ? most_ns - had : 0);
	hub->corked = connection;
}

/* What was answered since the turn began leaves together, and the user has had the time. */
static void end_turn(struct connection *connection)
{
	struct connection_hub *hub = connection->hub;
	struct account *account = connection->account;
	uint64_t now, spent;

	output_uncork(hub);
	hub->corked = NULL;
	spinner_rest(&hub->spinner);
	now = hub->spinner.quiet_since_ns;
	spent = now - hub->turn_ns;
	if (!account)
		return;
	account_add_loop_ns(account, now, spent);
	account->iteration_ns = spent + had_ns(hub, account);
	account->iteration = hub->iteration;
}

static void on_poll(uv_poll_t *poll, int status, int events)
{
	struct connection *connection = container_of(poll, struct connection, poll);
	bool readable = (events & UV_READABLE) && may_read(connection);

	if (connection->closing)
		return;
	if (status < 0 || connection->broken ||
	    (!(events & (UV_READABLE | UV_WRITABLE)) && (events & UV_DISCONNECT))) {
		connection_close(connection);
		return;
	}
	if (readable && has_to_wait(connection)) {
		connection->deferred = true;
		connection_enter_backlog(connection);
		readable = false;
	}
	if (!readable && !(events & UV_WRITABLE))
		return;
	begin_turn(connection);
	if (events & UV_WRITABLE)
		output_flush(connection);
	if (readable && !connection->broken)
		(void)input_read(connection);
	end_turn(connection);
}

static bool hub_look(struct spin *spin)
{
	struct connection_hub *hub = container_of(spin, struct connection_hub, spinner.spin);
	struct connection *last = hub->last;
	bool found;

	if (!last || !may_read(last) || has_to_wait(last))
		return false;
	begin_turn(last);
	found = input_read(last);
	if (found)
		end_turn(last);
	hub->corked = NULL;
	return found;
}

/* Of the users that wait, and have not had their share, the one that has had the least time lately; NULL: nobody. */
static struct account *next_user(struct connection_hub *hub)
{
	struct account *next = NULL;
	uint64_t now = clock_ns(), least = 0;

	list_for_each_entry(struct account, account, &hub->users, in_users) {
		uint64_t loop_ns = account_loop_ns(account, now);

		if (list_is_empty(&account->backlog))
			list_remove(&account->in_users);
		else if (!has_had_its_share(hub, account) && (!next || loop_ns < least)) {
			next = account;
			least = loop_ns;
		}
	}
	return next;
}

static struct connection *next_in_backlog(struct connection_hub *hub)
{
	struct list *node = list_pop(&hub->backlog);
	struct account *account;

	if (!node) {
		account = next_user(hub);
		node = account ? list_pop(&account->backlog) : NULL;
	}
	return node ? container_of(node, struct connection, in_backlog) : NULL;
}

static void take_turn(struct connection *connection)
{
	bool deferred = connection->deferred;

	connection->deferred = false;
	if (connection->broken) {
		connection_close(connection);
		return;
	}
	begin_turn(connection);
	if (deferred)
		(void)input_read(connection);
	else
		input_go_on(connection);
	end_turn(connection);
	connection_update_poll(connection);
}

/* As much of the backlog as one connection may have of a turn; then the sockets are looked at again, and
 * those who have had their share of this iteration begin another. */
static void hub_turn(uv_idle_t *handle)
{
	struct connection_hub *hub = container_of(handle, struct connection_hub, turn);
	const uint64_t *limit = hub->limits->value;
	uint64_t start_ns = clock_ns(), first_frame = hub->n_frames;
	struct connection *connection;

	do {
		connection = next_in_backlog(hub);
		if (!connection) {
			if (list_is_empty(&hub->users))
				uv_idle_stop(&hub->turn);
			return;
		}
		take_turn(connection);
	} while (hub->n_frames - first_frame < limit[LIMIT_FRAMES_PER_WAKE] &&
		 clock_ns() - start_ns < limit[LIMIT_WAKE_US] * 1000);
}

/* ---- deadlines ---- */

/* Those that stopped reading for want of a descriptor go on as soon as some were read, those without
 * memory when there is some. */
static void hub_on_reread(uv_timer_t *timer)
{
	struct connection_hub *hub = container_of(timer, struct connection_hub, reread);
	bool waits = false, news = false;

	list_for_each(node, &hub->watched)
		news |= descriptors_look(container_of(node, struct connection, in_watched));
	list_for_each_entry(struct connection, connection, &hub->stalled, in_backlog) {
		waits |= connection->wants_fd || connection->wants_memory;
	}
	if (!waits)
		return;
	connection_wake_stalled(hub, NULL);
	hub->reread_ms = news ? 1 : 2 * hub->reread_ms;
	if (hub->reread_ms > WATCH_MS)
		hub->reread_ms = WATCH_MS;
	uv_timer_start(timer, hub_on_reread, hub->reread_ms, 0);
}

static void hub_drop(struct connection *connection, enum limit limit, enum log_level level,
		     const char *reason)
{
	const struct log_about about = connection_about(connection);

	connection->hub->limits->hits[limit]++;
	log_limited_about(&connection->hub->log, &about, level, "%s", reason);
	connection_close(connection);
}

/* Return: whether the connection needs to be looked at again; otherwise it may be closed. */
static bool check_deadlines(struct connection *connection, uint64_t now)
{
	uint64_t soft_ns = connection->hub->limits->value[LIMIT_OUTPUT_SOFT_MS] * NS_PER_MS;

	(void)descriptors_look(connection);
	if (connection->send_later) {
		connection->send_later = false;
		output_flush(connection);
	}
	if (connection->unpolled)
		connection_update_poll(connection);
	if (connection->deadline_ns && now >= connection->deadline_ns) {
		hub_drop(connection, LIMIT_HELLO_MS, LOG_LEVEL_INFO,
			 "closing a connection without hello");
		return false;
	}
	if (connection->output_since_ns && now >= connection->output_since_ns + soft_ns) {
		hub_drop(connection, LIMIT_OUTPUT_SOFT_BYTES, LOG_LEVEL_WARNING,
			 "dropping a client that reads too slowly");
		return false;
	}
	if (connection->wants_fd && connection->n_unread > 0 &&
	    now >= connection->unread_since_ns + soft_ns) {
		hub_drop(connection, LIMIT_FDS_PER_CONNECTION, LOG_LEVEL_WARNING,
			 "dropping a client that does not read its file descriptors");
		return false;
	}
	return connection->deadline_ns || connection->output_since_ns || connection->n_unread > 0 ||
	       connection->send_later || connection->unpolled;
}

/* The time that the process stood still is nobody's fault. */
static void forgive(struct connection *connection, uint64_t pause_ns)
{
	if (connection->deadline_ns)
		connection->deadline_ns += pause_ns;
	if (connection->output_since_ns)
		connection->output_since_ns += pause_ns;
	if (connection->unread_since_ns)
		connection->unread_since_ns += pause_ns;
}

static void hub_on_timer(uv_timer_t *timer)
{
	struct connection_hub *hub = container_of(timer, struct connection_hub, timer);
	uint64_t now = clock_ns(), since_ns = now - hub->ticked_ns;
	uint64_t pause_ns = since_ns > PAUSE_MS * NS_PER_MS ? since_ns : 0;

	hub->ticked_ns = now;
	list_for_each_entry(struct connection, connection, &hub->watched, in_watched) {
		if (pause_ns > 0)
			forgive(connection, pause_ns);
		if (!check_deadlines(connection, now))
			list_remove(&connection->in_watched);
	}
	descriptors_end_lingering(hub, false);
	if (list_is_empty(&hub->watched) && list_is_empty(&hub->lingering))
		uv_timer_stop(&hub->timer);
}

/* ---- life ---- */

static const struct connection_calls calls = {
	.poll = on_poll, .turn = hub_turn, .timer = hub_on_timer, .reread = hub_on_reread};

int connection_hub_init(struct connection_hub *hub, uv_loop_t *loop, struct limits *limits,
			struct fmha_error *err)
{
	*hub = (struct connection_hub){.calls = &calls,
				       .loop = loop,
				       .limits = limits,
				       .spare_fds = 1,
				       .n_processes = 1,
				       .iteration = 1};
	list_init(&hub->users);
	list_init(&hub->backlog);
	list_init(&hub->stalled);
	list_init(&hub->watched);
	list_init(&hub->lingering);
	hub->receive_bytes = limits->value[LIMIT_FRAME_BYTES];
	hub->receive = malloc(hub->receive_bytes);
	if (!hub->receive)
		return fmha_error_set(err, FMHA_ENOMEM, "connections: out of memory");
	uv_idle_init(loop, &hub->turn);
	uv_timer_init(loop, &hub->timer);
	uv_timer_init(loop, &hub->reread);
	uv_prepare_init(loop, &hub->iterate);
	uv_prepare_start(&hub->iterate, hub_on_iteration);
	spinner_init(&hub->spinner, loop, limits->value[LIMIT_SPIN_US], hub_look);
	return 0;
}

void connection_hub_deinit(struct connection_hub *hub)
{
	if (!hub->loop)
		return;
	uv_close((uv_handle_t *)&hub->turn, NULL);
	uv_close((uv_handle_t *)&hub->timer, NULL);
	uv_close((uv_handle_t *)&hub->reread, NULL);
	uv_close((uv_handle_t *)&hub->iterate, NULL);
	descriptors_end_lingering(hub, true);
	spinner_deinit(&hub->spinner);
	proto_buffer_deinit(&hub->send);
	proto_buffer_deinit(&hub->direct);
	proto_message_deinit(&hub->message);
	free(hub->receive);
	hub->receive = NULL;
	hub->loop = NULL;
}
