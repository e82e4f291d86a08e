/* SPDX-License-Identifier: MIT */
#include "connection.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <fmha/fmha.h>
#include <proto/cleanup.h>
#include <proto/frame.h>
#include <proto/limits.h>

#include "deadline.h"

/* How long a wait must have been to conclude anything from a frame that made no progress in it. */
#define STALLED_FRAME_NS 50000000
#define TIMER_SLACK_NS   1000
#define LATE_NS          10000  /* by how much a sleep lasts longer than it should, to begin with */
#define LATE_MOST_NS     300000 /* later than that was something else */
#define DUE_EARLY_NS     15000  /* how that varies */
#define DUE_PART         100    /* of the time that an answer should take: how it varies */

struct expected {
	int64_t due, lasts_ns; /* lasts_ns 0: nobody knows */
	bool overslept;        /* the answer came first */
};

/* ---- birth and death ---- */

/* Conditions with timeouts on the monotonic clock. */
static int cond_init(pthread_cond_t *cond)
{
	pthread_condattr_t attr;
	int r;

	if (pthread_condattr_init(&attr) != 0)
		return -1;
	r = pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	if (r == 0)
		r = pthread_cond_init(cond, &attr);
	(void)pthread_condattr_destroy(&attr);
	return r == 0 ? 0 : -1;
}

static bool is_unix_stream(int fd)
{
	int domain = 0, type = 0;
	socklen_t n = sizeof(domain);

	errno = ENOTSOCK;
	if (getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &n) < 0)
		return false;
	n = sizeof(type);
	if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &n) < 0)
		return false;
	return domain == AF_UNIX && type == SOCK_STREAM;
}

int connection_new(int fd, int lost_code, const char *peer, uint32_t spin_us,
		   struct connection **ret_connection, struct fmha_error *err)
{
	_cleanup_(closep) int socket = fd;
	_cleanup_(freep) uint8_t *in = malloc(PROTO_MAX_FRAME);
	_cleanup_(freep) struct connection *c = calloc(1, sizeof(*c));

	bool is_socket = is_unix_stream(fd);

	if (!is_socket && errno != ENOTSOCK)
		return fmha_error_set(err, FMHA_EIO, "%s: its socket cannot be looked at: %s", peer,
				      strerror(errno));
	if (!is_socket)
		return fmha_error_set(err, FMHA_EPROTO,
				      "%s handed out a file descriptor that is no socket", peer);
	if (!in || !c || pthread_mutex_init(&c->lock, NULL) != 0)
		return fmha_error_set(err, FMHA_ENOMEM, "connection: out of memory");
	if (cond_init(&c->changed) < 0) {
		(void)pthread_mutex_destroy(&c->lock);
		return fmha_error_set(err, FMHA_ENOMEM, "connection: out of memory");
	}
	c->refs = 1;
	c->fd = take_fd(&socket);
	c->in = in;
	c->in_capacity = PROTO_MAX_FRAME;
	c->late_ns = LATE_NS;
	proto_spin_init(&c->spin, spin_us, sysconf(_SC_NPROCESSORS_ONLN));
	c->lost_code = lost_code;
	c->peer = peer;
	c->frame_limit = PROTO_MAX_FRAME;
	c->max_in_flight = 1; /* until hello says more */
	c->next_id = 1;
	*ret_connection = c; /* now the caller's */
	in = NULL;
	c = NULL;
	return 0;
}

struct connection *connection_ref(struct connection *c)
{
	(void)__atomic_add_fetch(&c->refs, 1, __ATOMIC_RELAXED);
	return c;
}

static struct pending *pending_free(struct pending *pending)
{
	if (pending->fd >= 0)
		(void)close(pending->fd);
	(void)pthread_cond_destroy(&pending->cond);
	free(pending);
	return NULL;
}

struct connection *connection_unref(struct connection *c)
{
	if (!c || __atomic_sub_fetch(&c->refs, 1, __ATOMIC_ACQ_REL) != 0)
		return NULL;
	/* Whoever waits holds a reference, so only forgotten requests are left. */
	for (uint32_t i = 0; i < CONNECTION_BUCKETS; i++) {
		while (c->buckets[i]) {
			struct pending *pending = c->buckets[i];

			c->buckets[i] = pending->next;
			if (pending->on_answer)
				pending->on_answer(pending->userdata);
			(void)pending_free(pending);
		}
	}
	for (uint32_t i = 0; i < c->n_fds; i++)
		(void)close(c->fds[i]);
	if (c->fd >= 0)
		(void)close(c->fd);
	proto_message_deinit(&c->message);
	proto_buffer_deinit(&c->out);
	(void)pthread_cond_destroy(&c->changed);
	(void)pthread_mutex_destroy(&c->lock);
	free(c->in);
	free(c);
	return NULL;
}

void connection_drop_in_child(struct connection *c)
{
	/* Another thread of the parent may have held the lock: the memory is given up. */
	if (c->fd >= 0)
		(void)close(c->fd);
	c->fd = -1;
}

bool connection_is_dead(struct connection *c)
{
	bool dead;

	(void)pthread_mutex_lock(&c->lock);
	dead = c->dead;
	(void)pthread_mutex_unlock(&c->lock);
	return dead;
}

/* ---- answers ---- */

static void event_write(int fd)
{
	const uint64_t one = 1;

	(void)!write(fd, &one, sizeof(one));
}

/* Under the lock. @pending has left its bucket and has its error, or its result. */
static void pending_answer(struct connection *c, struct pending *pending)
{
	c->n_in_flight--;
	pending->answered = true;
	if (pending->on_answer)
		pending->on_answer(pending->userdata);
	if (pending->event_fd >= 0)
		event_write(pending->event_fd);
	if (pending->forgotten)
		(void)pending_free(pending);
	else if (pending->waiting)
		(void)pthread_cond_signal(&pending->cond);
	if (c->n_sleepers > 0)
		(void)pthread_cond_broadcast(&c->changed);
}

static struct pending **pending_find(struct connection *c, uint32_t id)
{
	struct pending **p = &c->buckets[id % CONNECTION_BUCKETS];

	while (*p && (*p)->id != id)
		p = &(*p)->next;
	return p;
}

static void fail_locked(struct connection *c, const struct fmha_error *reason)
{
	if (c->dead)
		return;
	c->dead = true;
	c->error = *reason;
	/* Wakes the reader and the sender, wherever they are. */
	(void)shutdown(c->fd, SHUT_RDWR);
	for (uint32_t i = 0; i < CONNECTION_BUCKETS; i++) {
		while (c->buckets[i]) {
			struct pending *pending = c->buckets[i];

			c->buckets[i] = pending->next;
			pending->error = *reason;
			pending_answer(c, pending);
		}
	}
	(void)pthread_cond_broadcast(&c->changed);
}

/* The first fd of the queue: they arrive in the order of the answers that carry them. */
static int next_fd(struct connection *c)
{
	int fd = c->fds[0];

	c->n_fds--;
	memmove(&c->fds[0], &c->fds[1], c->n_fds * sizeof(c->fds[0]));
	return fd;
}

/* One payload, under the lock. Return: 0, or why the connection must die. */
static int handle_payload(struct connection *c, const uint8_t *payload, size_t n,
			  struct fmha_error *err)
{
	struct pending *pending, **place;
	int r;

	r = proto_message_decode(&c->message, payload, n, err);
	if (r < 0)
		return r;
	if (c->message.type != PROTO_ANSWER)
		return fmha_error_set(err, FMHA_EPROTO, "%s sent something that is no answer",
				      c->peer);
	place = pending_find(c, c->message.id);
	pending = *place;
	if (!pending)
		return fmha_error_set(err, FMHA_EPROTO,
				      "%s answered request %u, which nobody asked", c->peer,
				      c->message.id);
	if (c->message.error.code != FMHA_OK) {
		pending->error = c->message.error;
	} else {
		r = proto_decode_result(&c->message, pending->method, pending->result, err);
		if (r < 0 && err)
			err->code = FMHA_EPROTO;
		if (r < 0)
			return FMHA_EPROTO;
		if (proto_methods[pending->method].fds_out > 0) {
			if (c->n_fds == 0)
				return fmha_error_set(err, FMHA_EPROTO,
						      "%s answered %s without its file descriptor",
						      c->peer, proto_methods[pending->method].name);
			pending->fd = next_fd(c);
		}
	}
	*place = pending->next;
	pending_answer(c, pending);
	return 0;
}

/* Every whole frame in the input, under the lock. */
static int handle_input(struct connection *c, struct fmha_error *err)
{
	size_t done = 0;

	for (;;) {
		struct proto_frame frame;
		int r;

		r = proto_frame_parse(c->in + done, c->in_size - done, c->frame_limit, &frame, err);
		if (r < 0)
			return r;
		if (r == PROTO_FRAME_MORE ||
		    c->in_size - done < frame.header_bytes + frame.payload_bytes)
			break;
		r = handle_payload(c, c->in + done + frame.header_bytes, frame.payload_bytes, err);
		if (r < 0)
			return r;
		done += frame.header_bytes + frame.payload_bytes;
	}
	c->in_size -= done;
	memmove(c->in, c->in + done, c->in_size);
	if (c->in_size == 0)
		c->partial_since = 0;
	else if (done > 0 || c->partial_since == 0)
		c->partial_since = deadline_now();
	return 0;
}

/* ---- reading ---- */

static int lost(struct connection *c, struct fmha_error *err)
{
	return fmha_error_set(err, c->lost_code, "%s went away", c->peer);
}

/* Collects the fds of one recvmsg(). Return: 0 or -1 when the peer sent more than it may. */
static int collect_fds(struct connection *c, struct msghdr *message)
{
	int r = message->msg_flags & MSG_CTRUNC ? -1 : 0;

	for (struct cmsghdr *h = CMSG_FIRSTHDR(message); h; h = CMSG_NXTHDR(message, h)) {
		size_t n;

		if (h->cmsg_level != SOL_SOCKET || h->cmsg_type != SCM_RIGHTS)
			continue;
		n = (h->cmsg_len - CMSG_LEN(0)) / sizeof(int);
		for (size_t i = 0; i < n; i++) {
			int fd;

			memcpy(&fd, CMSG_DATA(h) + i * sizeof(int), sizeof(fd));
			if (c->n_fds < CONNECTION_MAX_FDS) {
				c->fds[c->n_fds++] = fd;
			} else {
				(void)close(fd);
				r = -1;
			}
		}
	}
	return r;
}

/* Whether the kernel had no memory just now: what is in the socket stays there, and the end of the
 * connection would cost more than a moment. */
static bool lacks_memory(void)
{
	const struct timespec moment = {.tv_nsec = 1000000};

	if (errno != ENOMEM && errno != ENOBUFS)
		return false;
	(void)nanosleep(&moment, NULL);
	return true;
}

/* Return: bytes read into the input, 0 when there are none now, or why the connection must die. */
static ssize_t receive(struct connection *c, struct fmha_error *err)
{
	_Alignas(struct cmsghdr) char control[CMSG_SPACE(CONNECTION_MAX_FDS * sizeof(int))];
	struct iovec iov = {.iov_base = c->in + c->in_size, .iov_len = c->in_capacity - c->in_size};
	struct msghdr message = {.msg_iov = &iov,
				 .msg_iovlen = 1,
				 .msg_control = control,
				 .msg_controllen = sizeof(control)};
	ssize_t n = recvmsg(c->fd, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);

	if (n < 0 && (errno == EAGAIN || errno == EINTR || lacks_memory()))
		return 0;
	if (n <= 0)
		return lost(c, err);
	c->in_size += (size_t)n;
	if (collect_fds(c, &message) < 0)
		return fmha_error_set(err, FMHA_EPROTO, "%s sent too many file descriptors",
				      c->peer);
	return n;
}

/*
 * Sleeps until there is something to read, and says whether there is. Never in a blocking recvmsg(): the kernel wakes that one
 * also when the peer has taken our request out of its socket, which costs two switches for nothing
 * just when the peer begins its work.
 */
static bool sleep_readable(struct connection *c, int64_t left_ns)
{
	struct pollfd poll_fd = {.fd = c->fd, .events = POLLIN};
	struct timespec timeout = deadline_timespec(left_ns);

	return ppoll(&poll_fd, 1, &timeout, NULL) != 0;
}

/* The same without the 50 us by which the kernel may let a thread's sleeps last longer. */
static bool sleep_exactly(struct connection *c, int64_t left_ns)
{
	int slack = prctl(PR_GET_TIMERSLACK);
	bool readable;

	(void)prctl(PR_SET_TIMERSLACK, TIMER_SLACK_NS, 0, 0, 0);
	readable = sleep_readable(c, left_ns);
	if (slack > 0)
		(void)prctl(PR_SET_TIMERSLACK, slack, 0, 0, 0);
	return readable;
}

static int64_t early_ns(int64_t lasts_ns)
{
	return DUE_EARLY_NS + lasts_ns / DUE_PART;
}

/*
 * The answer is expected at @due, known within a part of @lasts: sleeps until shortly before. Return: when to
 * go to sleep again; 0: it is no use to look for it. Sleeps no longer than until @deadline.
 */
static int64_t sleep_towards(struct connection *c, struct expected *expected, int64_t deadline)
{
	int64_t early = early_ns(expected->lasts_ns), now = deadline_now(), until;

	if (!expected->lasts_ns || c->spin.window_ns == 0 ||
	    (uint64_t)now < c->spin.paused_until_ns || now > expected->due)
		return 0;
	until = expected->due - early - c->late_ns;
	if (until > deadline) {
		expected->overslept = sleep_readable(c, deadline > now ? deadline - now : 0);
	} else if (until > now) {
		int64_t late;

		expected->overslept = sleep_exactly(c, until - now);
		late = deadline_now() - until;
		if (!expected->overslept && late < LATE_MOST_NS)
			c->late_ns = (3 * c->late_ns + late) / 4;
	}
	return expected->due + early;
}

/* The reader's: waits for input until @deadline, then reads once. Return: bytes read into the
 * input, 0 when there was nothing, or why the connection must die. */
static ssize_t read_some(struct connection *c, int64_t deadline, struct expected *expected,
			 struct fmha_error *err)
{
	int64_t looks_until = sleep_towards(c, expected, deadline), began = deadline_now(),
		now = began;
	bool spinning = proto_spin_begin(&c->spin, (uint64_t)began) || looks_until > 0;

	for (;;) {
		ssize_t n;

		if (!spinning)
			(void)sleep_readable(c, deadline > now ? deadline - now : 0);
		n = receive(c, err);
		now = deadline_now();
		if (n > 0)
			proto_spin_waited(&c->spin, (uint64_t)(now - began));
		if (n != 0 || now >= deadline)
			return n;
		spinning = spinning &&
			   (proto_spin_go_on(&c->spin, (uint64_t)began, (uint64_t)now) ||
			    (now < looks_until && (uint64_t)now >= c->spin.paused_until_ns));
		if (spinning)
			(void)sched_yield();
	}
}

/* Somebody who waits should read now. Under the lock. */
static void pass_reading_on(struct connection *c)
{
	for (uint32_t i = 0; i < CONNECTION_BUCKETS; i++) {
		for (struct pending *p = c->buckets[i]; p; p = p->next) {
			if (p->waiting) {
				(void)pthread_cond_signal(&p->cond);
				return;
			}
		}
	}
	if (c->n_sleepers > 0)
		(void)pthread_cond_broadcast(&c->changed);
}

/* Under the lock, which it gives up while reading. The role must be free. */
static void read_and_handle(struct connection *c, int64_t deadline, struct expected *expected)
{
	struct fmha_error error = {0};
	ssize_t n;
	int r = 0;

	c->reading = true;
	(void)pthread_mutex_unlock(&c->lock);
	n = read_some(c, deadline, expected, &error);
	(void)pthread_mutex_lock(&c->lock);
	c->reading = false;
	if (n > 0 && !c->dead)
		r = handle_input(c, &error);
	if (n < 0 || r < 0)
		fail_locked(c, &error);
}

static void sleep_until(struct connection *c, pthread_cond_t *cond, int64_t deadline)
{
	struct timespec until = deadline_timespec(deadline);

	(void)pthread_cond_timedwait(cond, &c->lock, &until);
}

/*
 * A frame whose end did not come during a whole wait never will: its length was wrong, or its
 * sender stopped. Nothing that could follow it would be understood. Under the lock, after a
 * timeout.
 */
static void check_progress(struct connection *c, int64_t wait_began)
{
	struct fmha_error error = {0};

	if (c->reading || c->partial_since == 0 || c->partial_since > wait_began ||
	    deadline_now() - wait_began < STALLED_FRAME_NS)
		return;
	(void)fmha_error_set(&error, FMHA_EPROTO, "%s left a frame unfinished", c->peer);
	fail_locked(c, &error);
}

/* ---- interrupt ---- */

/* A thread's own reason to stop waiting. */

#define ASKED_EVERY_NS INT64_C(50000000)

static _Thread_local struct {
	int (*asked)(void *userdata);
	void *userdata;
} interrupt;

void fmha_set_interrupt(int (*asked)(void *userdata), void *userdata)
{
	interrupt.asked = asked;
	interrupt.userdata = userdata;
}

/* Until when a wait may last before it asks: at most @deadline. */
static int64_t interrupt_slice(int64_t deadline)
{
	int64_t slice;

	if (!interrupt.asked)
		return deadline;
	slice = deadline_now() + ASKED_EVERY_NS;
	return slice < deadline ? slice : deadline;
}

/* Whether the thread is to stop waiting. Runs the caller's code: with no lock held. */
static bool interrupt_is_wanted(void)
{
	return interrupt.asked && interrupt.asked(interrupt.userdata) != 0;
}

int connection_wait(struct connection *c, struct pending *pending, int64_t deadline,
		    struct fmha_error *err)
{
	int64_t lasts_ns = 0;

	return connection_wait_expecting(c, pending, &lasts_ns, deadline, err);
}

/* What is known after a wait of @took. An answer that woke us was there earlier than we saw it, nobody knows by
 * how much: next time we look so much earlier that we see it come. */
static int64_t learnt(const struct expected *expected, int64_t took)
{
	if (expected->overslept)
		return took - 2 * early_ns(took);
	return expected->lasts_ns > 0 ? (3 * expected->lasts_ns + took) / 4 : took;
}

int connection_wait_expecting(struct connection *c, struct pending *pending, int64_t *lasts_ns,
			      int64_t deadline, struct fmha_error *err)
{
	int64_t began = deadline_now();
	struct expected expected = {.due = began + *lasts_ns, .lasts_ns = *lasts_ns};
	bool looked = false, interrupted = false;
	bool answered;

	(void)pthread_mutex_lock(&c->lock);
	while (!pending->answered && !interrupted) {
		bool late = deadline_left_ns(deadline) == 0;
		int64_t slice = interrupt_slice(deadline);

		/* A caller that only looks still reads once what has already arrived. */
		if (late && (looked || c->reading))
			break;
		looked = late;
		if (!c->reading) {
			read_and_handle(c, slice, &expected);
		} else {
			pending->waiting = true;
			sleep_until(c, &pending->cond, slice);
			pending->waiting = false;
		}
		if (!pending->answered && slice < deadline && deadline_left_ns(slice) == 0) {
			if (!c->reading)
				pass_reading_on(c);
			(void)pthread_mutex_unlock(&c->lock);
			interrupted = interrupt_is_wanted();
			(void)pthread_mutex_lock(&c->lock);
		}
	}
	if (!pending->answered)
		check_progress(c, began);
	if (!c->reading)
		pass_reading_on(c);
	answered = pending->answered;
	(void)pthread_mutex_unlock(&c->lock);
	if (!answered && interrupted)
		return fmha_error_set(err, FMHA_ECANCELED, "%s: interrupted",
				      proto_methods[pending->method].name);
	if (!answered)
		return fmha_error_set(err, FMHA_ETIMEDOUT, "%s: no answer from %s in time",
				      proto_methods[pending->method].name, c->peer);
	*lasts_ns = learnt(&expected, deadline_now() - began);
	return 0;
}

void connection_set_event(struct connection *c, struct pending *pending, int fd)
{
	(void)pthread_mutex_lock(&c->lock);
	pending->event_fd = fd;
	if (pending->answered)
		event_write(fd);
	(void)pthread_mutex_unlock(&c->lock);
}

void connection_forget(struct connection *c, struct pending *pending,
		       void (*on_answer)(void *userdata), void *userdata)
{
	(void)pthread_mutex_lock(&c->lock);
	pending->event_fd = -1;
	if (pending->answered) {
		if (on_answer)
			on_answer(userdata);
		(void)pending_free(pending);
	} else {
		pending->forgotten = true;
		pending->on_answer = on_answer;
		pending->userdata = userdata;
	}
	(void)pthread_mutex_unlock(&c->lock);
}

/* ---- sending ---- */

static ssize_t send_once(struct connection *c, const uint8_t *data, size_t n, int fd)
{
	_Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {0};
	struct iovec iov = {.iov_base = (void *)(uintptr_t)data, .iov_len = n};
	struct msghdr message = {.msg_iov = &iov,
				 .msg_iovlen = 1,
				 .msg_control = control,
				 .msg_controllen = sizeof(control)};
	struct cmsghdr *h = CMSG_FIRSTHDR(&message);

	if (fd < 0)
		return send(c->fd, data, n, MSG_NOSIGNAL | MSG_DONTWAIT);
	h->cmsg_level = SOL_SOCKET;
	h->cmsg_type = SCM_RIGHTS;
	h->cmsg_len = CMSG_LEN(sizeof(int));
	memcpy(CMSG_DATA(h), &fd, sizeof(fd));
	return sendmsg(c->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

/* The peer does not take more. It may be waiting for us to read its answers, so read while waiting.
 */
static void wait_writable(struct connection *c, int64_t deadline)
{
	struct pollfd poll_fd = {.fd = c->fd, .events = POLLOUT};
	struct timespec timeout = deadline_timespec(deadline_left_ns(deadline));

	(void)pthread_mutex_lock(&c->lock);
	if (!c->reading)
		poll_fd.events |= POLLIN;
	(void)pthread_mutex_unlock(&c->lock);
	(void)ppoll(&poll_fd, 1, &timeout, NULL);
	if (!(poll_fd.revents & POLLIN))
		return;
	(void)pthread_mutex_lock(&c->lock);
	if (!c->reading && !c->dead) {
		read_and_handle(c, 0, &(struct expected){0});
		pass_reading_on(c);
	}
	(void)pthread_mutex_unlock(&c->lock);
}

/* The sender's: the whole of c->out. @ret_sent: whether anything left. */
static int send_out(struct connection *c, int fd, int64_t deadline, bool *ret_sent,
		    struct fmha_error *err)
{
	size_t done = 0;

	*ret_sent = false;
	while (done < c->out.size) {
		ssize_t n = send_once(c, c->out.data + done, c->out.size - done, fd);

		if (n > 0) {
			*ret_sent = true;
			done += (size_t)n;
			fd = -1; /* went with the first byte */
			continue;
		}
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 && errno == ETOOMANYREFS)
			return fmha_error_set(err, FMHA_EBUSY,
					      "too many file descriptors are in flight: %s",
					      strerror(errno));
		if (n < 0 && errno != EAGAIN && !lacks_memory())
			return lost(c, err);
		if (deadline_left_ns(deadline) == 0)
			return fmha_error_set(err, FMHA_ETIMEDOUT, "%s does not read its socket",
					      c->peer);
		wait_writable(c, deadline);
	}
	return 0;
}

/* Under the lock: waits for the sender's role and a free slot. */
static int begin_sending(struct connection *c, int64_t deadline, struct fmha_error *err)
{
	while (!c->dead && (c->sending || c->n_in_flight >= c->max_in_flight)) {
		if (deadline_left_ns(deadline) == 0)
			return fmha_error_set(
				err, FMHA_ETIMEDOUT,
				"%u requests to %s are unanswered, as many as it takes",
				c->n_in_flight, c->peer);
		if (!c->sending && !c->reading) {
			read_and_handle(c, deadline, &(struct expected){0});
			pass_reading_on(c);
		} else {
			c->n_sleepers++;
			sleep_until(c, &c->changed, deadline);
			c->n_sleepers--;
		}
	}
	if (c->dead) {
		if (err)
			*err = c->error;
		return c->error.code;
	}
	c->sending = true;
	c->n_in_flight++;
	return 0;
}

static struct pending *pending_new(enum proto_method method)
{
	struct pending *pending = calloc(1, sizeof(*pending) + proto_methods[method].result_size);

	if (!pending)
		return NULL;
	if (cond_init(&pending->cond) < 0) {
		free(pending);
		return NULL;
	}
	pending->method = method;
	pending->event_fd = -1;
	pending->fd = -1;
	return pending;
}

/* Under the lock: takes @pending back, unless the connection's death has already answered it. */
static void withdraw(struct connection *c, struct pending *pending)
{
	if (!pending->answered) {
		struct pending **place = pending_find(c, pending->id);

		*place = pending->next;
		c->n_in_flight--;
	}
	(void)pending_free(pending);
}

int connection_submit(struct connection *c, enum proto_method method, const void *params, int fd,
		      int64_t deadline, struct pending **ret_pending, bool *ret_unsent,
		      struct fmha_error *err)
{
	struct fmha_error error = {0};
	struct pending *pending = pending_new(method);
	bool sent = false, encoded;
	int r;

	if (ret_unsent)
		*ret_unsent = true;
	if (!pending)
		return fmha_error_set(err, FMHA_ENOMEM, "%s: out of memory",
				      proto_methods[method].name);

	(void)pthread_mutex_lock(&c->lock);
	r = begin_sending(c, deadline, err);
	if (r < 0) {
		(void)pthread_mutex_unlock(&c->lock);
		(void)pending_free(pending);
		return r;
	}
	do
		pending->id = c->next_id++;
	while (*pending_find(c, pending->id));
	pending->next = c->buckets[pending->id % CONNECTION_BUCKETS];
	c->buckets[pending->id % CONNECTION_BUCKETS] = pending;
	(void)pthread_mutex_unlock(&c->lock);

	c->out.size = 0;
	r = proto_encode_request(&c->out, pending->id, method, params, &error);
	encoded = r == 0;
	if (encoded)
		r = send_out(c, fd, deadline, &sent, &error);

	(void)pthread_mutex_lock(&c->lock);
	c->sending = false;
	if (c->n_sleepers > 0)
		(void)pthread_cond_broadcast(&c->changed);
	if (r < 0) {
		withdraw(c, pending);
		/* Half a frame leaves nothing that could follow it, and a lost peer stays lost. */
		if (sent || error.code == c->lost_code)
			fail_locked(c, &error);
	}
	(void)pthread_mutex_unlock(&c->lock);
	if (r < 0) {
		if (ret_unsent)
			*ret_unsent = !sent;
		if (err)
			*err = error;
		return r;
	}
	*ret_pending = pending;
	return 0;
}

int connection_call(struct connection *c, enum proto_method method, const void *params, int fd,
		    int64_t deadline, void *ret_result, int *ret_fd, struct fmha_error *err)
{
	struct pending *pending = NULL;
	int r;

	r = connection_submit(c, method, params, fd, deadline, &pending, NULL, err);
	if (r < 0)
		return r;
	r = connection_wait(c, pending, deadline, err);
	if (r == 0 && pending->error.code != FMHA_OK) {
		r = pending->error.code;
		if (err)
			*err = pending->error;
	} else if (r == 0) {
		if (ret_result)
			memcpy(ret_result, pending->result, proto_methods[method].result_size);
		if (ret_fd) {
			*ret_fd = pending->fd;
			pending->fd = -1;
		}
	}
	connection_forget(c, pending, NULL, NULL);
	return r;
}
