/* SPDX-License-Identifier: MIT */
/*
 * waits.c: what a connection waits for: a turn, room for one more request or descriptor, its socket, the timer. The
 * hub, which is above, is called by what it has named in hub->calls.
 */
#include <fcntl.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <base/clock.h>
#include <base/list.h>
#include <base/spinner.h>

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

uint64_t descriptors_cost(const struct connection *connection, uint64_t more)
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

bool descriptors_fit(const struct connection *connection)
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
