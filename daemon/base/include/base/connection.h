/* SPDX-License-Identifier: MIT */
/*
 * connection.h: one Unix stream socket with frames and file descriptors on it, the same code for
 * clients of the front, clients of a worker, and the control socket between the two.
 *
 * A hub is what the connections of one loop share. A connection hands each complete frame to its
 * owner and sends what the owner encodes. It bounds everything that the peer can grow: the size of
 * a frame, the fds that wait for their message, the requests without an answer, the answers that
 * the peer does not read, the loop time spent on one peer before the next one has a turn.
 *
 * The usual request costs one epoll_wait, one recvmsg and one sendmsg and allocates nothing: frames
 * are parsed in the hub's receive buffer, answers given during a wake-up are gathered in the hub's
 * send buffer and leave together. Only an incomplete frame, or an answer that the socket does not
 * take at once, is copied to memory of the connection's own.
 *
 * fds arrive in order and wait in a queue; a message takes as many as its params declare. fds that
 * no message has taken when the input ends with a complete frame belong to nothing: a violation.
 *
 * Turns go by user first: each has at most LIMIT_WAKE_US of an iteration of the loop for all of its
 * connections, and what does not fit waits in a backlog, from which the user is served first that
 * the loop has spent the least time on lately.
 */
#ifndef FMHAD_BASE_CONNECTION_H
#define FMHAD_BASE_CONNECTION_H

#include <stdbool.h>
#include <stdint.h>

#include <uv.h>

#include <proto/message.h>

#include <base/account.h>
#include <base/doing.h>
#include <base/limits.h>
#include <base/list.h>
#include <base/log.h>
#include <base/spinner.h>

struct connection;

struct connection_ops {
	/*
	 * One request. @fd: the descriptor that it brought along, borrowed unless it is taken and
	 * left -1; -1: none, which without an account may also mean that it could not be received.
	 * Return: 0: it is answered, now or later, and in flight until then; a negative FMHA_E*:
	 * that is the answer.
	 */
	int (*handle)(struct connection *connection, uint32_t id, enum proto_method method,
		      const union proto_any_params *params, int *fd, struct fmha_error *err);
	/* The socket is closed; frees the struct that holds the connection. Called from the loop,
	 * never from inside another call. */
	void (*on_closed)(struct connection *connection);
	/* Once, as soon as the connection is known to be over; nothing can be sent any more. */
	void (*on_hangup)(struct connection *connection);
};

#define CONNECTION_ERRORS 32 /* more than there are codes */

struct connection_calls;

struct connection_hub {
	uv_loop_t *loop;
	const struct connection_calls *calls; /* what the loop calls */
	struct limits *limits;
	uint8_t *receive; /* LIMIT_FRAME_BYTES */
	size_t receive_bytes;
	struct proto_buffer send;   /* answers of the current wake-up, for @corked */
	struct proto_buffer direct; /* a message outside of one; empty between calls */
	struct proto_message message;
	struct connection *corked; /* whose wake-up it is */
	uint64_t turn_ns;          /* when it began */
	uint64_t turn_until_ns;    /* when its user has had its share of this iteration */
	struct connection *last;   /* that had input; NULL: it is closed */
	struct list users;         /* struct account: those with connections that wait for a turn */
	struct list backlog;       /* the same of connections without an account */
	struct list stalled;       /* with as much under way as they may have */
	uv_idle_t turn;            /* runs while somebody waits for a turn */
	uv_prepare_t iterate;      /* counts the loop's iterations */
	uint64_t iteration;
	struct spinner spinner; /* its is_free is for the hub's owner to set */
	struct list watched;    /* connections with a deadline, or with something unread */
	struct list lingering;  /* sockets of the dead with descriptors in them (waits.c) */
	uv_timer_t timer;       /* runs while there is something to look at */
	uint64_t ticked_ns;     /* when it did last */
	uv_timer_t reread; /* looks sooner whether those that stopped for want of a descriptor have
			    * read some */
	uint32_t reread_ms;
	/* For the hub's owner to set: descriptors that are charged for each connection as long as
	 * it lives; processes that send descriptors as the same user. */
	uint32_t spare_fds, n_processes;
	struct doing *doing;   /* the same: where it says what the loop does; NULL: nowhere */
	uint64_t n_answer_fds; /* of all connections */
	struct log_limit log;
	uint64_t n_frames, n_violations;
	uint64_t n_errors[CONNECTION_ERRORS]; /* answers, by minus the code */
};

int connection_hub_init(struct connection_hub *hub, uv_loop_t *loop, struct limits *limits,
			struct fmha_error *err);
void connection_hub_deinit(struct connection_hub *hub);

struct connection {
	uv_poll_t poll;
	struct connection_hub *hub;
	const struct connection_ops *ops;
	struct account *account; /* borrowed from the owner; NULL: a peer we trust (control) */
	uint32_t peer_pid;       /* the owner's to set, for the log; 0: not known */
	int fd;
	int polled; /* events that @poll waits for now */
	bool closing, broken, before_hello, stalled;
	bool wants_fd;     /* stalled, and its next request is answered with a descriptor */
	bool wants_memory; /* stalled, and there is none to take its next message apart */
	bool deferred;     /* in the backlog, and its socket has input */
	bool send_later; /* the kernel has no memory, or takes no descriptor of this process's user */
	bool unpolled;   /* the loop could not be told what to wait for */
	uint32_t n_in_flight;
	uint8_t *input; /* NULL, or LIMIT_FRAME_BYTES: what is left of the last read */
	size_t input_bytes;
	int *fds; /* NULL, or LIMIT_FDS_PER_CONNECTION: not yet taken by a message. Without an
		   * account both are there from the start: its end would be that of all clients */
	uint32_t n_fds;
	uint32_t n_answer_fds;    /* those of answers, until they are read */
	uint32_t n_unread;        /* of them: in the socket, unless they were read since */
	uint32_t n_held;          /* connection_hold_fds() */
	uint32_t *reserved;       /* NULL, or LIMIT_FDS_PER_CONNECTION: ids of requests */
	uint32_t n_reserved;      /* that will be answered with a descriptor */
	uint64_t charged_fds;     /* with the socket */
	uint32_t unread_left;     /* of what was sent, when it was last looked at; */
	uint64_t unread_since_ns; /* it has not become less since; 0: not looked at */
	struct list output;       /* struct output_chunk: what the socket did not take yet */
	size_t output_bytes;
	uint64_t output_since_ns; /* when the queue last exceeded the soft limit, 0: it does not */
	uint64_t deadline_ns;     /* hello; 0: none */
	uint64_t heard_ns;        /* when the peer last sent anything; the owner's to move on */
	struct list awaited;      /* struct awaited (connection.c): requests of our own, in order */
	uint32_t last_request;    /* the id of the last one */
	struct list in_backlog, in_watched;
	struct log_limit log;
	uint64_t n_frames, bytes_in, bytes_out;
};

/*
 * Starts reading. @fd: taken, also on failure; a non-blocking Unix stream socket. It is charged to
 * @account, with some descriptors to spare.
 * @before_hello: the small limits apply until connection_greeted().
 * Return: 0, FMHA_EQUOTA, FMHA_EIO.
 */
int connection_open(struct connection *connection, struct connection_hub *hub, int fd,
		    struct account *account, bool before_hello, const struct connection_ops *ops,
		    struct fmha_error *err);
void connection_greeted(struct connection *connection);

/* Ends it: what is queued is dropped, on_hangup runs now, on_closed later. May be called twice. */
void connection_close(struct connection *connection);

/* The peer broke the protocol: says so in the log, and closes. */
void connection_fail(struct connection *connection, const struct fmha_error *error);

/* The oldest fd that came in, given to the caller, or -1. On a control socket also -1 in the place
 * of one that could not be received. */
int connection_take_fd(struct connection *connection);

/*
 * Charges the client with @n descriptors that are open on its behalf besides those of its answers.
 * They are given back by the second call, or all at once when the connection ends.
 * Return: 0, FMHA_EQUOTA.
 */
int connection_hold_fds(struct connection *connection, uint32_t n, struct fmha_error *err);
void connection_release_fds(struct connection *connection, uint32_t n);

/*
 * Sends an answer, each for exactly one request. @fd: -1 or taken (also on failure).
 * connection_answer() with a result that cannot be encoded answers FMHA_EINTERNAL, with a
 * descriptor that cannot be sent FMHA_EQUOTA or FMHA_EBUSY.
 */
void connection_answer(struct connection *connection, uint32_t id, enum proto_method method,
		       const void *result, int fd);
void connection_answer_error(struct connection *connection, uint32_t id,
			     const struct fmha_error *error);

/*
 * What came of a request of our own: @result, or NULL and @error. @fd: borrowed; -1: none came, or
 * it could not be received.
 */
typedef void (*connection_reply)(void *owner, const union proto_any_result *result, int fd,
				 const struct fmha_error *error);

/*
 * Sends a request of our own (control sockets). @fd: -1 or taken.
 * @reply: called once for @owner, with FMHA_ECONN when the connection ends first; NULL: nobody
 * waits Return: 0, or a negative FMHA_E* and no call.
 */
int connection_request(struct connection *connection, enum proto_method method, const void *params,
		       int fd, connection_reply reply, void *owner, struct fmha_error *err);

/* @owner does not wait any more for what it has asked for: no call. Return: the request's id, 0: it
 * waits for none. */
uint32_t connection_forget(struct connection *connection, const void *owner);

#endif
