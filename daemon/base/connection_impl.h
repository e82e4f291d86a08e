/* SPDX-License-Identifier: MIT */
/*
 * connection_impl.h: what the files of a connection tell each other, each using only those after it: hub.c (turns,
 * deadlines), connection.c (life; frames and requests; answers; requests of our own, until they are answered), waits.c
 * (what one waits for, and who holds how many descriptors).
 */
#ifndef FMHAD_BASE_CONNECTION_IMPL_H
#define FMHAD_BASE_CONNECTION_IMPL_H

#include <base/connection.h>

struct msghdr;

#define WATCH_MS 100 /* between looks at those that are watched */

/* The hub's functions that the loop calls. */
struct connection_calls {
	uv_poll_cb poll;
	uv_idle_cb turn;
	uv_timer_cb timer, reread;
};

/* ---- waits.c ---- */

/* The connection gets a turn in the next iteration of the loop. */
void connection_enter_backlog(struct connection *connection);
/* Closes it, though not while its owner may be in the middle of using it. */
void connection_mark_broken(struct connection *connection);
/* Has the hub's timer look at it until it needs no watching any more. */
void connection_watch(struct connection *connection);
/* Runs the timer, which stops when there is nothing left to look at. */
void connection_start_timer(struct connection_hub *hub);
/* Tells epoll what we wait for now; the usual request changes nothing and costs no system call. */
void connection_update_poll(struct connection *connection);
/* Gives back @n of the user's @resource. There may be room now for whoever had stopped reading. */
void connection_release(struct connection_hub *hub, struct account *account,
			enum account_resource resource, uint64_t n);
/* A request has its answer. */
void connection_answered(struct connection *connection);

/* In flight as many requests as allowed: the next frame waits where it is. */
bool connection_is_stalled(const struct connection *connection);
/* The events that a connection which reads no more waits for. */
enum stall {
	STALL_IN_FLIGHT,  /* fewer requests without an answer */
	STALL_DESCRIPTOR, /* room for the descriptor of the next request's answer */
	STALL_MEMORY,     /* to take the next message apart with */
};

/* Reads no more until that has changed. */
void connection_stall(struct connection *connection, enum stall stall);
/* Somebody has given something back: whoever stopped reading for want of it may go on. @account:
 * whose; NULL: anybody's */
void connection_wake_stalled(struct connection_hub *hub, const struct account *account);

/* Whose connection it is, for the log. */
struct log_about connection_about(const struct connection *connection);

/* Descriptors. */

/* Charges the socket itself and the spare descriptors. On failure nothing is charged. */
int descriptors_init(struct connection *connection, struct fmha_error *err);
/* Whether request @method may be dealt with now: there is room for the descriptor of its answer. */
bool descriptors_have_room(struct connection *connection, int method);
/* Reserves what request @id will answer with; there is room. */
void descriptors_reserve(struct connection *connection, uint32_t id, int method);
/* Ends the reservation of request @id if it has one. Return: whether it had. */
bool descriptors_unreserve(struct connection *connection, uint32_t id);
/* For an answer that is about to carry one: that of its reservation, else a new one. */
int descriptors_take(struct connection *connection, uint32_t id, struct fmha_error *err);
/* An answer's descriptor lies in the socket; or is gone without that. */
void descriptors_sent(struct connection *connection);
void descriptors_dropped(struct connection *connection);
/* Moves what recvmsg() brought into the queue. Return: 0 or FMHA_EPROTO; then none is left open. */
int descriptors_collect(struct connection *connection, const struct msghdr *message,
			struct fmha_error *err);
/* Looks whether the peer has read what it was sent. Return: whether there was any news. */
bool descriptors_look(struct connection *connection);
/* The connection is over: gives back everything but its socket and what the peer has not read. */
void descriptors_close(struct connection *connection);
/* Closes the socket, now or when the peer has read or closed its end. */
void descriptors_deinit(struct connection *connection);
/* Closes the sockets of the dead whose peers are done with them; all of them if @now. */
void descriptors_end_lingering(struct connection_hub *hub, bool now);

/* ---- connection.c ---- */

/* In a turn of the connection's. Return: whether there was any, be it the end. */
bool input_read(struct connection *connection);
/* With what was left of the last turn. */
void input_go_on(struct connection *connection);
void output_flush(struct connection *connection);
/* Sends what was encoded for the hub's corked connection. */
void output_uncork(struct connection_hub *hub);

#endif
