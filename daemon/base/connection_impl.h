/* SPDX-License-Identifier: MIT */
/*
 * connection_impl.h: what the files of a connection tell each other: connection.c (turns, life),
 * input.c (frames and requests), output.c (answers and their queue), request.c (requests of our
 * own, until they are answered), descriptors.c (who holds how many).
 */
#ifndef FMHAD_BASE_CONNECTION_IMPL_H
#define FMHAD_BASE_CONNECTION_IMPL_H

#include <base/connection.h>

struct msghdr;

/* ---- connection.c ---- */

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
/* What a connection that reads no more waits for. */
enum stall {
	STALL_IN_FLIGHT,  /* fewer requests without an answer */
	STALL_DESCRIPTOR, /* room for the descriptor of the next request's answer */
	STALL_MEMORY,     /* to take the next message apart with */
};

/* Reads no more until that has changed. */
void connection_stall(struct connection *connection, enum stall stall);

/* ---- input.c ---- */

/* In a turn of the connection's. Return: whether there was any, be it the end. */
bool input_read(struct connection *connection);
/* With what was left of the last turn. */
void input_go_on(struct connection *connection);

/* ---- output.c ---- */

void output_init(struct connection *connection);
void output_deinit(struct connection *connection);
void output_flush(struct connection *connection);
/* Sends what was encoded for the hub's corked connection. */
void output_uncork(struct connection_hub *hub);
/* Where to encode the next message, and sending it from there. @start: where it begins; @fd: -1 or
 * taken; @id: of the answer that carries it. */
struct proto_buffer *output_begin(struct connection *connection);
void output_end(struct connection *connection, size_t start, int fd, uint32_t id);

/* ---- request.c ---- */

/* An answer has come. Return: 0, or FMHA_EPROTO: nobody has asked. */
int request_answered(struct connection *connection, const struct proto_message *message,
		     struct fmha_error *err);
/* The connection is over, and so are all that are open. */
void request_end_all(struct connection *connection);

/* ---- descriptors.c ---- */

/* Charges the socket itself and the spare descriptors. On failure nothing is charged. */
int descriptors_init(struct connection *connection, struct fmha_error *err);
/* Whether request @method may be dealt with now: there is room for the descriptor of its answer. */
bool descriptors_have_room(struct connection *connection, int method);
/* The same for any such answer, by what is known already. */
bool descriptors_fit(const struct connection *connection);
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

/* Whose connection it is, for the log. */
struct log_about connection_about(const struct connection *connection);

#endif
