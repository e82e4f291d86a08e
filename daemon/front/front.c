/* SPDX-License-Identifier: MIT */
/* front.c: start, accepting clients, and the end. */
#include "builder.h"
#include "pools.h"
#include "tuned.h"

#include <errno.h>
#include <malloc.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <base/clock.h>
#include <base/log.h>
#include <base/loop.h>
#include <base/notify.h>
#include <proto/error.h>

#define ACCEPTS_A_WAKE  32
#define ACCEPT_AGAIN_MS 200
#define FINISH_MS       1000 /* from closing the workers' sockets to killing them */

/* ---- accepting ---- */

/* The two ends of the socket to a worker: a client that was let in can always open a device. */
#define SPARE_FDS 2

/* The rest, LIMIT_RESERVED_FDS, is for workers, their control sockets and the listener. */
static bool has_fds_for_a_client(const struct front *front)
{
	return front->accounts.used[ACCOUNT_DESCRIPTORS] + 1 + SPARE_FDS <=
	       front->limits.value[LIMIT_FDS];
}

static void start_accepting(struct front *front);
static void on_connect(uv_poll_t *poll, int status, int events);

static void on_accept_again(uv_timer_t *timer)
{
	start_accepting(timer->data);
}

/* Clients wait in the backlog meanwhile; polling the socket without accepting would spin. */
static void stop_accepting(struct front *front, const char *reason)
{
	front->accepting = false;
	uv_poll_stop(&front->listener);
	uv_timer_start(&front->accept_again, on_accept_again, ACCEPT_AGAIN_MS, 0);
	log_limited(&front->log, LOG_LEVEL_WARNING, "not accepting for a moment: %s", reason);
}

static void start_accepting(struct front *front)
{
	int r;

	if (front->accepting || front->draining)
		return;
	front->accepting = true;
	uv_timer_stop(&front->accept_again);
	r = uv_poll_start(&front->listener, UV_READABLE, on_connect);
	if (r < 0)
		stop_accepting(front, uv_strerror(r));
}

static void on_left(struct front *front)
{
	if (!front->accepting && uv_is_active((uv_handle_t *)&front->accept_again))
		start_accepting(front);
}

static void on_connect(uv_poll_t *poll, int status, int events)
{
	struct front *front = container_of(poll, struct front, listener);

	(void)status;
	(void)events;
	for (int i = 0; i < ACCEPTS_A_WAKE && front->accepting; i++) {
		int fd;

		if (!has_fds_for_a_client(front)) {
			front->limits.hits[LIMIT_RESERVED_FDS]++;
			stop_accepting(front, "too few file descriptors");
			return;
		}
		fd = accept4(front->listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
		if (fd >= 0) {
			client_new(front, fd);
			continue;
		}
		if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS)
			stop_accepting(front, strerror(errno));
		return; /* nobody is waiting any more, or a client left while it was */
	}
}

/* ---- the service manager ---- */

static void on_watchdog(uv_timer_t *timer)
{
	(void)timer;
	notify_send("WATCHDOG=1");
}

/* ---- the end ---- */

static void stop_workers(struct front *front, bool now)
{
	for (uint32_t i = 0; i < front->n_slots; i++)
		worker_slot_stop(&front->slots[i], now);
}

static void front_finish(struct front *front)
{
	for (uint32_t i = 0; i < front->n_slots; i++)
		if (!worker_slot_is_over(&front->slots[i]))
			return;
	uv_stop(&front->loop);
}

static void on_drain_timer(uv_timer_t *timer)
{
	struct front *front = timer->data;

	if (front->finishing) {
		stop_workers(front, true);
		uv_stop(&front->loop);
		return;
	}
	front->finishing = true;
	uv_timer_start(&front->drain, on_drain_timer, FINISH_MS, 0);
	stop_workers(front, false);
	front_finish(front);
}

static void on_drained(struct front *front)
{
	bool all = true;

	if (!front->draining)
		return;
	for (uint32_t i = 0; i < front->n_slots; i++)
		all &= front->slots[i].drained;
	if (front->finishing)
		front_finish(front);
	else if (all)
		on_drain_timer(&front->drain);
}

static void on_stop_signal(uv_signal_t *handle, int number)
{
	struct front *front = handle->data;

	if (front->draining) { /* asked twice: at once */
		stop_workers(front, true);
		uv_stop(&front->loop);
		return;
	}
	log_info("stopping: %s", strsignal(number));
	notify_send("STOPPING=1\nSTATUS=finishing what is in flight");
	front->draining = true;
	front->accepting = false;
	uv_timer_stop(&front->accept_again);
	uv_close((uv_handle_t *)&front->listener, NULL);
	listen_close(front);
	http_close(front);
	uv_timer_start(&front->drain, on_drain_timer, front->config.supervision.drain_ms, 0);
	for (uint32_t i = 0; i < front->n_slots; i++)
		worker_slot_drain(&front->slots[i]);
	on_drained(front);
}

/* The hangup of a terminal means that it is gone; without one, that there is something to read. */
static void on_hangup_signal(uv_signal_t *handle, int number)
{
	struct front *front = handle->data;

	if (front->on_terminal && !isatty(STDERR_FILENO))
		on_stop_signal(&front->on_term, number);
	else if (!front->draining)
		front_reload(front);
}

/* ---- start ---- */

static void raise_fd_limit(void)
{
	struct rlimit limit;

	if (getrlimit(RLIMIT_NOFILE, &limit) < 0)
		return;
	limit.rlim_cur = limit.rlim_max;
	(void)setrlimit(RLIMIT_NOFILE, &limit);
}

/* Return: 0 or libuv's error. */
static int init_handles(struct front *front)
{
	int r;

	uv_timer_init(&front->loop, &front->accept_again);
	uv_timer_init(&front->loop, &front->watchdog);
	uv_timer_init(&front->loop, &front->drain);
	memfds_init(&front->memfds, &front->loop);
	r = uv_signal_init(&front->loop, &front->on_term);
	if (r == 0)
		r = uv_signal_init(&front->loop, &front->on_int);
	if (r == 0)
		r = uv_signal_init(&front->loop, &front->on_hangup);
	if (r < 0)
		return r;
	front->accept_again.data = front->watchdog.data = front->drain.data = front;
	front->on_term.data = front->on_int.data = front->on_hangup.data = front;
	r = uv_signal_start(&front->on_term, on_stop_signal, SIGTERM);
	if (r == 0)
		r = uv_signal_start(&front->on_int, on_stop_signal, SIGINT);
	return r == 0 ? uv_signal_start(&front->on_hangup, on_hangup_signal, SIGHUP) : r;
}

static int front_init(struct front *front, const struct config *config,
		      const struct config_source *source, struct fmha_error *err)
{
	int r;

	front->config = *config;
	front->source = source;
	front->on_terminal = isatty(STDERR_FILENO);
	front->on_drained = on_drained;
	front->on_left = on_left;
	front->started_ns = clock_ns();
	front->listen_fd = -1;
	front->n_slots = config->n_devices;
	memcpy(front->limits.value, config->limits, sizeof(front->limits.value));
	raise_fd_limit();
	limits_resolve(&front->limits, limits_host_memory(), false);
	accounts_init(&front->accounts, &front->limits);
	quarantine_init(&front->quarantine, &config->supervision);
	list_init(&front->clients);
	r = loop_init(&front->loop);
	if (r == 0)
		r = init_handles(front);
	if (r < 0)
		return fmha_error_set(err, FMHA_ENOMEM, "the loop: %s", uv_strerror(r));
	r = connection_hub_init(&front->hub, &front->loop, &front->limits, err);
	front->hub.spare_fds = SPARE_FDS;
	front->hub.doing = &front->doing;
	front->doing.measures = front->config.loop_times;
	front->hub.n_processes = front->n_slots + 1;
	if (r == 0)
		r = builder_new(&front->loop, &front->config.compile, &front->accounts,
				&front->builder, err);
	front->pools = calloc(1, sizeof(*front->pools));
	if (r == 0 && !front->pools)
		r = fmha_error_set(err, FMHA_ENOMEM, "pools: out of memory");
	if (r == 0)
		pools_init(front->pools, front);
	front->tuned = tuned_new(front);
	if (r == 0 && !front->tuned)
		r = fmha_error_set(err, FMHA_ENOMEM, "tuned database: out of memory");
	if (r == 0)
		r = listen_open(front, err);
	if (r < 0)
		return r;
	r = uv_poll_init(&front->loop, &front->listener, front->listen_fd);
	if (r < 0)
		return fmha_error_set(err, FMHA_EIO, "listener: %s", uv_strerror(r));
	return http_open(front, err);
}

int front_run(const struct config *config, const struct config_source *source)
{
	struct front *front = calloc(1, sizeof(*front));
	uint64_t watchdog_us = notify_watchdog_us();
	struct fmha_error err;

	if (!front) {
		log_error("out of memory");
		return 1;
	}
	prctl(PR_SET_NAME, "fmhad-front");
	signal(SIGPIPE, SIG_IGN);
	signal(SIGXFSZ, SIG_IGN); /* a file that may not grow is a full disk */
	signal(SIGIO, SIG_IGN);   /* somebody wants a file that memfd.c has a lease on */
	mallopt(M_ARENA_MAX, 2);
	if (front_init(front, config, source, &err) < 0) {
		log_error("%s", err.msg);
		http_close(front);
		listen_close(front);
		free(front);
		return 1;
	}
	for (uint32_t i = 0; i < front->n_slots; i++) {
		worker_slot_init(front, i);
		worker_slot_start(&front->slots[i]);
	}
	/* Clients are accepted at once; those that open a device wait until its worker is ready. */
	start_accepting(front);
	if (watchdog_us)
		uv_timer_start(&front->watchdog, on_watchdog, 0, watchdog_us / 2000 + 1);
	uv_run(&front->loop, UV_RUN_DEFAULT);
	listen_close(front);
	(void)tuned_free(front->tuned);
	front->builder = builder_free(front->builder); /* compilers end with us */
	log_info("stopped");
	/* The process ends: the kernel closes every socket and frees everything at once. */
	return front->exit_status;
}
