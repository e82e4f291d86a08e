/* SPDX-License-Identifier: MIT */
/*
 * connection.c: see connection.h. Turns, deadlines, and how long a connection lives.
 *
 * Nothing here closes a connection while its owner may be in the middle of using it, except when
 * the owner asks: a failed send only marks the connection broken and queues it for the next turn.
 */
#include "connection_impl.h"

#include <stdlib.h>
#include <unistd.h>

#include <proto/error.h>

#include <base/clock.h>

#define WATCH_MS 100
#define PAUSE_MS 500 /* a timer that comes so late says that the process stood still */

static void hub_turn(uv_idle_t *handle);
static void hub_on_iteration(uv_prepare_t *handle);
static void hub_on_timer(uv_timer_t *timer);
static void hub_on_reread(uv_timer_t *timer);
static bool hub_look(struct spin *spin);

int connection_hub_init(struct connection_hub *hub, uv_loop_t *loop, struct limits *limits,
			struct fmha_error *err)
{
	*hub = (struct connection_hub){
		.loop = loop, .limits = limits, .spare_fds = 1, .n_processes = 1, .iteration = 1};
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

/* ---- what the parts of a connection share ---- */

void connection_enter_backlog(struct connection *connection)
{
	struct connection_hub *hub = connection->hub;
	struct account *account = connection->account;

	list_remove(&connection->in_backlog);
	list_append(account ? &account->backlog : &hub->backlog, &connection->in_backlog);
	if (account && list_is_empty(&account->in_users))
		list_append(&hub->users, &account->in_users);
	uv_idle_start(&hub->turn, hub_turn);
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
	uv_timer_start(&hub->timer, hub_on_timer, WATCH_MS, WATCH_MS);
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

/* Somebody has given something back: whoever stopped reading for want of it may go on. @account:
 * whose; NULL: anybody's */
static void wake_stalled(struct connection_hub *hub, const struct account *account)
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
		wake_stalled(hub, others_wait ? NULL : account);
}

void connection_answered(struct connection *connection)
{
	if (connection->n_in_flight == 0)
		return;
	connection->n_in_flight--;
	if (connection->account)
		connection_release(connection->hub, connection->account, ACCOUNT_IN_FLIGHT, 1);
}

static void on_poll(uv_poll_t *poll, int status, int events);

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
	connection->unpolled = uv_poll_start(&connection->poll, wanted, on_poll) < 0;
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
		uv_timer_start(&hub->reread, hub_on_reread, hub->reread_ms, 0);
	}
}

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
	wake_stalled(hub, NULL);
	hub->reread_ms = news ? 1 : 2 * hub->reread_ms;
	if (hub->reread_ms > WATCH_MS)
		hub->reread_ms = WATCH_MS;
	uv_timer_start(timer, hub_on_reread, hub->reread_ms, 0);
}

struct log_about connection_about(const struct connection *connection)
{
	const struct account *account = connection->account;

	return (struct log_about){.fields = (account ? LOG_UID : 0) |
					    (connection->peer_pid ? LOG_PID : 0),
				  .uid = account ? account->uid : 0,
				  .pid = connection->peer_pid};
}

static void drop(struct connection *connection, enum limit limit, enum log_level level,
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
		drop(connection, LIMIT_HELLO_MS, LOG_LEVEL_INFO,
		     "closing a connection without hello");
		return false;
	}
	if (connection->output_since_ns && now >= connection->output_since_ns + soft_ns) {
		drop(connection, LIMIT_OUTPUT_SOFT_BYTES, LOG_LEVEL_WARNING,
		     "dropping a client that reads too slowly");
		return false;
	}
	if (connection->wants_fd && connection->n_unread > 0 &&
	    now >= connection->unread_since_ns + soft_ns) {
		drop(connection, LIMIT_FDS_PER_CONNECTION, LOG_LEVEL_WARNING,
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

/* What a control socket needs to take a message in. */
static int reserve_input(struct connection *connection, struct fmha_error *err)
{
	const struct connection_hub *hub = connection->hub;

	connection->input = malloc(hub->receive_bytes);
	connection->fds = malloc(hub->limits->value[LIMIT_FDS_PER_CONNECTION] * sizeof(int));
	if (connection->input && connection->fds)
		return 0;
	free(connection->input);
	free(connection->fds);
	connection->input = NULL;
	connection->fds = NULL;
	return fmha_error_set(err, FMHA_ENOMEM, "a control socket: out of memory");
}

int connection_open(struct connection *connection, struct connection_hub *hub, int fd,
		    struct account *account, bool before_hello, const struct connection_ops *ops,
		    struct fmha_error *err)
{
	int r;

	*connection = (struct connection){
		.hub = hub, .ops = ops, .account = account, .fd = fd, .before_hello = before_hello};
	list_init(&connection->in_backlog);
	list_init(&connection->in_watched);
	list_init(&connection->awaited);
	output_init(connection);
	r = account ? descriptors_init(connection, err) : reserve_input(connection, err);
	if (r < 0) {
		(void)close(fd);
		return r;
	}
	r = uv_poll_init(hub->loop, &connection->poll, fd);
	if (r < 0) {
		free(connection->input);
		free(connection->fds);
		descriptors_deinit(connection);
		return fmha_error_set(err, FMHA_EIO, "polling a socket: %s", uv_strerror(r));
	}
	if (before_hello) {
		connection->deadline_ns = clock_ns() +
					  hub->limits->value[LIMIT_HELLO_MS] * NS_PER_MS;
		connection_watch(connection);
	}
	connection_update_poll(connection);
	return 0;
}

void connection_greeted(struct connection *connection)
{
	connection->before_hello = false;
	connection->deadline_ns = 0; /* the timer sees that there is nothing to watch for */
}

static void on_poll_closed(uv_handle_t *handle)
{
	struct connection *connection = container_of(handle, struct connection, poll);

	descriptors_deinit(connection);
	connection->ops->on_closed(connection);
}

void connection_close(struct connection *connection)
{
	struct account *account = connection->account;
	struct doing *doing = connection->hub->doing;
	struct doing_before before;

	if (connection->closing)
		return;
	/* What was answered before the end still goes out, as far as the socket takes it. */
	if (connection->hub->corked == connection)
		output_uncork(connection->hub);
	connection->closing = true;
	if (connection->hub->last == connection)
		connection->hub->last = NULL;
	list_remove(&connection->in_backlog);
	list_remove(&connection->in_watched);
	output_deinit(connection);
	descriptors_close(connection);
	free(connection->input);
	connection->input = NULL;
	if (account)
		connection_release(connection->hub, account, ACCOUNT_IN_FLIGHT,
				   connection->n_in_flight);
	connection->n_in_flight = 0;
	uv_close((uv_handle_t *)&connection->poll, on_poll_closed);
	before = doing_begin(doing, DOING_HANGUP, account ? account->uid : DOING_NOBODY);
	connection->ops->on_hangup(connection);
	doing_end(doing, before);
	request_end_all(connection);
}

void connection_fail(struct connection *connection, const struct fmha_error *error)
{
	const struct log_about about = connection_about(connection);

	connection->hub->n_violations++;
	log_limited_about(&connection->hub->log, &about, LOG_LEVEL_NOTICE,
			  "closing a connection: %s", error->msg);
	connection_close(connection);
}
