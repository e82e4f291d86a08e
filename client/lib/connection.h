/* SPDX-License-Identifier: MIT */
/*
 * connection.h: one stream socket to the daemon, shared by any number of threads.
 *
 * There is no reader thread. Of the threads that wait for an answer, one reads the socket and
 * hands out whatever arrives; when its own answer has come it passes the role on. Likewise one
 * thread at a time writes. So a lone caller pays no switch to another thread of its own, and a
 * forked child inherits no thread that it would miss.
 *
 * A connection dies once and stays dead: everything unanswered fails with the reason, and the owner
 * (client.c, device.c) makes a new one.
 */
#ifndef CLIENT_CONNECTION_H
#define CLIENT_CONNECTION_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include <proto/buffer.h>
#include <proto/error.h>
#include <proto/message.h>
#include <proto/spin.h>

#define CONNECTION_MAX_FDS 16 /* received and not yet claimed by an answer */
#define CONNECTION_BUCKETS 64

/* One request, from its sending to its answer. Lives until it is answered and forgotten. */
struct pending {
	struct pending *next; /* in its bucket */
	uint32_t id;
	enum proto_method method;
	bool answered;
	bool forgotten; /* nobody waits any more: the answer frees it */
	bool waiting;   /* a thread sleeps on cond */
	int event_fd;   /* written when answered; -1: none; the requester's */
	pthread_cond_t cond;
	struct fmha_error error;           /* code FMHA_OK: result and fd are valid */
	int fd;                            /* came with the answer, or -1; freed with this */
	void (*on_answer)(void *userdata); /* of a forgotten one: connection_forget() */
	void *userdata;
	_Alignas(8) uint8_t result[]; /* proto_methods[method].result_size bytes */
};

struct connection {
	unsigned int refs; /* atomic */
	int fd;
	int lost_code;      /* FMHA_ECONN or FMHA_EDEVICE: what an end of the stream means */
	const char *peer;   /* "the daemon", for sentences; static */
	size_t frame_limit; /* of frames received */
	uint32_t max_in_flight;
	bool takes_descriptors; /* a worker: of memory of a GPU's */

	pthread_mutex_t lock;   /* of everything below; never held in a system call that blocks */
	pthread_cond_t changed; /* a role or a slot is free, or the connection died */
	uint32_t n_sleepers;    /* on changed */
	bool reading, sending;  /* the roles are taken */
	bool dead;
	struct fmha_error error; /* why */
	uint32_t next_id;
	uint32_t n_in_flight;
	struct pending *buckets[CONNECTION_BUCKETS];

	/* The sender's. */
	struct proto_buffer out;

	/* The reader's while it reads, the lock's otherwise. */
	uint8_t *in;
	size_t in_size, in_capacity;
	int64_t partial_since; /* when a frame began to arrive whose end has not; 0: none */
	int fds[CONNECTION_MAX_FDS];
	uint32_t n_fds;
	struct proto_message message;
	struct proto_spin spin;
	int64_t late_ns; /* by how much sleeps towards an answer last longer than they should, about */
};

/*
 * @fd:      a connected AF_UNIX stream socket, taken, also on failure
 * @spin_us: see proto/spin.h; 0: never
 * Return: 0, FMHA_ENOMEM, FMHA_EPROTO (not such a socket).
 */
int connection_new(int fd, int lost_code, const char *peer, uint32_t spin_us,
		   struct connection **ret_connection, struct fmha_error *err);
struct connection *connection_ref(struct connection *connection);

/* The last reference closes the socket. */
struct connection *connection_unref(struct connection *connection);
static inline void connection_unrefp(struct connection **connection)
{
	(void)connection_unref(*connection);
}

/* After a fork, in the child: closes the child's copy of the socket and touches nothing else. */
void connection_drop_in_child(struct connection *connection);

bool connection_is_dead(struct connection *connection);

/*
 * Sends a request. Waits for a free slot.
 * @fd:          sent along, borrowed; -1: none
 * @ret_pending: given: connection_forget()
 * @ret_unsent:  set on failure: true when not one byte of the request left, so that it may be sent
 *               again whatever it does; NULL: not wanted
 */
int connection_submit(struct connection *connection, enum proto_method method, const void *params,
		      int fd, int64_t deadline, struct pending **ret_pending, bool *ret_unsent,
		      struct fmha_error *err);

/* Return: 0 once answered (with an error or without), FMHA_ETIMEDOUT. A deadline that has passed
 * only looks. */
int connection_wait(struct connection *connection, struct pending *pending, int64_t deadline,
		    struct fmha_error *err);

/* The same for an answer that should take *@lasts_ns from now on; 0: nobody knows. It sleeps until shortly
 * before, and then looks for it. Once answered, *@lasts_ns is what to expect of the next one. */
int connection_wait_expecting(struct connection *connection, struct pending *pending,
			      int64_t *lasts_ns, int64_t deadline, struct fmha_error *err);

/* @fd becomes readable (an eventfd) when @pending is answered, at once if it is; borrowed until
 * connection_forget(). */
void connection_set_event(struct connection *connection, struct pending *pending, int fd);

/*
 * From now on nobody waits for @pending. @on_answer (may be NULL) is called once, when the answer
 * is there or the connection is gone, with the connection's lock held: it may only note the fact.
 */
void connection_forget(struct connection *connection, struct pending *pending,
		       void (*on_answer)(void *userdata), void *userdata);

/*
 * Submit, wait, copy, forget. A result of the wrong form is FMHA_EPROTO.
 * @ret_result: NULL: not wanted
 * @ret_fd:     given; NULL for methods whose answer carries none
 */
int connection_call(struct connection *connection, enum proto_method method, const void *params,
		    int fd, int64_t deadline, void *ret_result, int *ret_fd,
		    struct fmha_error *err);

#endif
