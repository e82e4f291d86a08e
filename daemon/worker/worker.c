/* SPDX-License-Identifier: MIT */
/* worker.c: start, the control connection to the front, and the end. */
#include "worker.h"

#include <malloc.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <proto/cleanup.h>
#include <base/clock.h>
#include <base/log.h>
#include <base/loop.h>
#include <proto/error.h>
#include <worker/main.h>

#include "session/worker_registry.h"
#include "tuner.h"

static struct worker *worker_of(struct connection *connection)
{
	return container_of(connection, struct worker, control);
}

/* ---- the device ---- */

static void wake(void *owner)
{
	uv_async_send(&((struct worker *)owner)->ends.async);
}

static void on_device_async(uv_async_t *async)
{
	struct worker *worker = container_of(async, struct worker, ends.async);
	struct fmha_error err;

	if (device_has_failed(worker->device, &err))
		worker_fail(worker, NULL, &err);
	device_collect(worker->device);
	/* The answers went out while their runs were still pending: the next request may come at once. */
	if (worker->runs.n_pending == 0)
		spinner_rest(&worker->hub.spinner);
}

/* ---- a launch that is about to end ---- */

#define LATE_MOST_NS 300000 /* later than that was something else */

static void set_alarm(const struct worker *worker, uint64_t ns)
{
	const struct itimerspec at = {
		.it_value = {.tv_sec = (time_t)(ns / NS_PER_S), .tv_nsec = (long)(ns % NS_PER_S)}};

	(void)timerfd_settime(worker->ends.alarm_fd, TFD_TIMER_ABSTIME, &at, NULL);
}

/* On the device's thread: the loop, which sleeps, is woken by the kernel, not by us. */
static void soon(void *owner, uint64_t from_ns, uint64_t until_ns)
{
	struct worker *worker = owner;
	uint64_t alarm_ns = from_ns - atomic_load(&worker->ends.alarm_late_ns);

	atomic_store(&worker->ends.soon_until_ns, until_ns);
	atomic_store(&worker->ends.alarm_ns, alarm_ns);
	set_alarm(worker, alarm_ns);
}

static bool look_for_end(struct spin *spin)
{
	struct worker *worker = container_of(spin, struct worker, ends.soon);

	if (!device_has_ended(worker->device))
		return false;
	uv_idle_stop(&spin->turn);
	on_device_async(&worker->ends.async);
	return true;
}

static bool end_may_come(struct spin *spin, uint64_t now)
{
	return now < atomic_load(&container_of(spin, struct worker, ends.soon)->ends.soon_until_ns);
}

static void on_alarm(uv_poll_t *poll, int status, int events)
{
	struct worker *worker = container_of(poll, struct worker, ends.alarm_poll);
	uint64_t n, late = clock_ns() - atomic_load(&worker->ends.alarm_ns);

	(void)status, (void)events;
	if (read(worker->ends.alarm_fd, &n, sizeof(n)) != sizeof(n))
		return;
	if (late < LATE_MOST_NS)
		atomic_store(&worker->ends.alarm_late_ns,
			     (3 * atomic_load(&worker->ends.alarm_late_ns) + late) / 4);
	if (worker->runs.n_pending > 0 && !spinner_is_crowded(&worker->hub.spinner))
		spin_start(&worker->ends.soon);
}

/* Without it runs end as well, only later. */
static void open_alarm(struct worker *worker)
{
	worker->ends.soon = (struct spin){.look = look_for_end, .goes_on = end_may_come};
	uv_idle_init(&worker->loop, &worker->ends.soon.turn);
	worker->ends.alarm_fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
	if (worker->ends.alarm_fd < 0 ||
	    uv_poll_init(&worker->loop, &worker->ends.alarm_poll, worker->ends.alarm_fd) < 0)
		return;
	uv_poll_start(&worker->ends.alarm_poll, UV_READABLE, on_alarm);
}

/* ---- the control connection ---- */

static void finish_drain(struct worker *worker)
{
	/* Answers that a client has not read yet are in its socket; the rest has had its time. */
	log_debug("drained");
	connection_answer(&worker->control, worker->drain_id, PROTO_WORKER_DRAIN,
			  &(struct proto_empty){0}, -1);
}

static void on_drained(uv_check_t *check)
{
	struct worker *worker = check->data;

	if (worker->runs.n_pending > 0)
		return;
	uv_check_stop(check);
	finish_drain(worker);
}

static void on_drain(struct worker *worker, uint32_t id)
{
	worker->draining = true;
	worker->drain_id = id;
	uv_check_start(&worker->drained, on_drained);
	on_drained(&worker->drained);
}

static int handle(struct connection *control, uint32_t id, enum proto_method method,
		  const union proto_any_params *params, int *fd, struct fmha_error *err)
{
	struct worker *worker = worker_of(control);
	int r = 0;

	switch (method) {
	case PROTO_WORKER_ATTACH:
		if (*fd < 0)
			return fmha_error_set(err, FMHA_EBUSY,
					      "no file descriptor left for a connection");
		r = session_new(worker, fd, &params->WORKER_ATTACH, err);
		break;
	case PROTO_PING:
		break;
	case PROTO_WORKER_STATUS:
		return worker_status(worker, id, err);
	case PROTO_WORKER_DRAIN:
		on_drain(worker, id);
		return 0;
	case PROTO_WORKER_RESTORE:
		r = kernels_restore(worker, *fd, err);
		break;
	case PROTO_WORKER_MEMORY:
		return lasting_memory_make(worker, id, &params->WORKER_MEMORY, err);
	case PROTO_WORKER_CLEAR:
		return lasting_memory_clear(worker, id, &params->WORKER_CLEAR, fd, err);
	case PROTO_TUNED_RESULT:
		if (worker->plans.registry)
			(void)registry_set_tuned(worker->plans.registry, &params->TUNED_RESULT,
						 TIMES_OWN, NULL);
		break;
	default:
		return fmha_error_set(err, FMHA_EINVAL,
				      "not a method of a worker's control socket");
	}
	if (r == 0)
		connection_answer(control, id, method, &(struct proto_empty){0}, -1);
	return r;
}

/* Without a front nobody would ever end this process. */
static void on_control_hangup(struct connection *connection)
{
	struct worker *worker = worker_of(connection);
	struct fmha_error err;

	fmha_error_set(&err, FMHA_ECANCELED, "the daemon is stopping");
	worker_answer_all(worker, &err);
	_exit(0);
}

static void on_control_closed(struct connection *connection)
{
	(void)connection;
}

static const struct connection_ops control_ops = {
	.handle = handle, .on_closed = on_control_closed, .on_hangup = on_control_hangup};

/* What is remembered of this model. No client is attached before. */
static void on_restored(void *owner, const union proto_any_result *result, int fd,
			const struct fmha_error *error)
{
	struct fmha_error err;

	/* Without what the others remember it would choose other kernels, and of one that was refused the front knows
	 * nothing: a new worker tries again. */
	if (result && kernels_restore(owner, fd, &err) < 0)
		worker_fail(owner, NULL, &err);
	else if (!result && error->code != FMHA_ECONN)
		worker_fail(owner, NULL, error);
}

static int announce(struct worker *worker, struct fmha_error *err)
{
	const struct device_info *info = device_get_info(worker->device);
	struct proto_worker_ready_params params = {
		.device = {.device = worker->page->device,
			   .compute_units = info->compute_units,
			   .memory_bytes = info->memory_bytes,
			   .fences = device_has_fences(worker->device),
			   .events = device_has_events(worker->device),
			   .descriptors = info->descriptors}};

	memcpy(params.device.name, info->name, sizeof(info->name));
	memcpy(params.device.arch, info->arch, sizeof(info->arch));
	memcpy(params.device.backend, info->backend, sizeof(info->backend));
	memcpy(params.device.pci, info->pci, sizeof(info->pci));
	memcpy(params.model, info->model, sizeof(info->model));
	memcpy(params.driver, info->driver, sizeof(info->driver));
	memcpy(params.compiler, info->compiler, sizeof(info->compiler));
	memcpy(params.sources, info->sources, sizeof(info->sources));
	snprintf(params.device.state, sizeof(params.device.state), "ready");
	return connection_request(&worker->control, PROTO_WORKER_READY, &params, -1, on_restored,
				  worker, err);
}

/* A worker without them serves, too. */
static void no_words(struct worker *worker, const struct fmha_error *why)
{
	log_warning("device %s: runs with counters are refused: %s (%s)",
		    device_get_info(worker->device)->name,
		    device_get_info(worker->device)->no_fences, why->msg);
}

static void try_words(struct worker *worker, const struct device_kernel *kernel)
{
	const struct device_info *info = device_get_info(worker->device);
	struct fmha_error err = {0};
	char trouble[sizeof(info->no_fences)];

	memcpy(trouble, info->no_fences, sizeof(trouble));
	if (device_try_words(worker->device, kernel, &err) < 0)
		no_words(worker, &err);
	else
		log_info("device %s: a kernel waits for counters: %s", info->name, trouble);
}

static void on_words(void *owner, const struct fmha_error *error)
{
	struct worker *worker = owner;
	struct fmha_error err;

	if (error->code == FMHA_OK)
		try_words(worker, worker->word_kernel);
	else
		no_words(worker, error);
	if (announce(worker, &err) < 0)
		worker_fail(worker, NULL, &err);
}

/* Where streams do not wait for counters, but a kernel may, that is compiled and tried before the device is announced. */
static int announce_with_words(struct worker *worker, struct fmha_error *err)
{
	int r;

	worker->words = (struct device_waiter){.done = on_words, .owner = worker};
	r = device_prepare_words(worker->device, &worker->words, &worker->word_kernel, err);
	if (r == DEVICE_PREPARING)
		return 0;
	if (r == 0)
		try_words(worker, worker->word_kernel);
	else if (r < 0)
		no_words(worker, err);
	return announce(worker, err);
}

/* ---- start ---- */

static struct worker_page *map_page(struct fmha_error *err)
{
	_cleanup_(closep) int fd = WORKER_PAGE_FD;
	struct stat st;
	struct worker_page *page = MAP_FAILED;

	if (fstat(fd, &st) == 0 && st.st_size == sizeof(*page))
		page = mmap(NULL, sizeof(*page), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (page != MAP_FAILED && page->magic == WORKER_PAGE_MAGIC && page->bytes == sizeof(*page))
		return page;
	fmha_error_set(err, FMHA_EINVAL, "--worker is for fmhad's own use");
	return NULL;
}

static int open_device(struct worker *worker, struct fmha_error *err)
{
	static const struct device_calls calls = {.wake = wake,
						  .soon = soon,
						  .build = prepare_build,
						  .cancel_build = prepare_cancel_build,
						  .is_quarantined = kernels_is_quarantined};
	const struct device_info *info;
	int r = device_open(worker->config, &calls, worker, &worker->device, err);

	if (r < 0)
		return r;
	open_alarm(worker);
	info = device_get_info(worker->device);
	if (info->mps == DEVICE_MPS_ABSENT)
		log_warning(
			"device %s: no CUDA MPS control daemon answers at %s: clients and fmhad "
			"take turns on the GPU, about 150 us a switch; start nvidia-cuda-mps-"
			"control -d before both, or let clients launch themselves "
			"(fmha_local.h)",
			info->name, info->mps_directory);
	if (info->no_descriptors[0])
		log_warning("device %s: memory is shared by IPC handles, not by descriptors: %s",
			    info->name, info->no_descriptors);
	if (info->no_handles[0])
		log_warning("device %s: IPC handles are refused: %s", info->name, info->no_handles);
	roof_init(&worker->plans.roof, worker->config, info);
	r = kernels_open(worker, err);
	if (r < 0)
		return r;
	worker->plans.device = (struct plan_device){.arch = info->arch,
						    .registry = worker->plans.registry,
						    .compute_units = info->compute_units,
						    .lds_bytes = info->lds_bytes,
						    .find = device_find_kernel,
						    .locate = kernels_locate,
						    .owner = worker->device,
						    .model = worker->plans.model};
	return 0;
}

static bool has_no_runs(void *owner)
{
	return ((const struct worker *)owner)->runs.n_pending == 0;
}

static void apply_limits(struct worker *worker)
{
	memcpy(worker->limits.value, worker->settings.limits, sizeof(worker->limits.value));
	limits_resolve(&worker->limits, device_get_info(worker->device)->memory_bytes,
		       device_loads_code(worker->device));
	device_set_idle(worker->device, worker->limits.value[LIMIT_KERNELS_IDLE],
			worker->limits.value[LIMIT_KERNELS_IDLE_BYTES]);
	worker->plans.device.workspace_most = worker->limits.value[LIMIT_MEMORY_BYTES_PER_UID];
}

/* The front has read the configuration again. What needs a restart has not changed. */
static void on_hangup_signal(uv_signal_t *handle, int number)
{
	struct worker *worker = handle->data;

	(void)number;
	worker_page_get_config(worker->page, &worker->settings);
	log_set_level((enum log_level)worker->settings.log_level);
	apply_limits(worker);
	tuner_resume(worker->tuner);
}

static void name_process(uint32_t device)
{
	char name[16]; /* the kernel's limit */

	(void)snprintf(name, sizeof(name), "fmhad-worker/%u", device % 100);
	prctl(PR_SET_NAME, name);
}

static int worker_init(struct worker *worker, struct fmha_error *err)
{
	int r;

	worker->started_ns = clock_ns();
	worker->config = &worker->settings.devices[worker->page->device];
	memcpy(worker->limits.value, worker->settings.limits, sizeof(worker->limits.value));
	accounts_init(&worker->accounts, &worker->limits);
	list_init(&worker->sessions);
	list_init(&worker->runs.requests);
	list_init(&worker->runs.free_requests);
	slabs_init(&worker->plans.slabs, sizeof(struct session_plan));
	fair_init(&worker->runs.turns, 1, 1);
	r = loop_init(&worker->loop);
	if (r == 0)
		r = uv_async_init(&worker->loop, &worker->ends.async, on_device_async);
	if (r == 0)
		r = uv_signal_init(&worker->loop, &worker->on_hangup);
	if (r < 0)
		return fmha_error_set(err, FMHA_ENOMEM, "the loop: %s", uv_strerror(r));
	uv_timer_init(&worker->loop, &worker->runs.tick);
	uv_timer_init(&worker->loop, &worker->idle.trim_timer);
	uv_timer_init(&worker->loop, &worker->idle.refill_timer);
	uv_check_init(&worker->loop, &worker->drained);
	worker->on_hangup.data = worker;
	memfds_init(&worker->memfds, &worker->loop);
	worker->runs.tick.data = worker->idle.trim_timer.data = worker->drained.data = worker;
	worker->idle.refill_timer.data = worker;
	r = connection_hub_init(&worker->hub, &worker->loop, &worker->limits, err);
	worker->hub.doing = &worker->page->doing;
	chores_init(&worker->chores, &worker->loop, &worker->limits, &worker->page->doing);
	worker->page->doing.measures = worker->settings.loop_times;
	worker->hub.n_processes = worker->settings.n_devices + 1;
	worker->hub.spinner.is_free = has_no_runs;
	worker->hub.spinner.owner = worker;
	if (r == 0)
		r = open_device(worker, err);
	if (r == 0) {
		apply_limits(worker);
		r = offloads_open(&worker->offloads, &worker->loop, worker->device,
				  worker->limits.value[LIMIT_SPIN_US], err);
	}
	if (r == 0) {
		worker->offloads.doing = &worker->page->doing;
		worker_refill(worker, 0);
		r = tuner_new(worker, &worker->tuner, err);
	}
	if (r == 0)
		r = connection_open(&worker->control, &worker->hub, WORKER_CONTROL_FD, NULL, false,
				    &control_ops, err);
	if (r == 0 && uv_signal_start(&worker->on_hangup, on_hangup_signal, SIGHUP) < 0)
		r = fmha_error_set(err, FMHA_ENOMEM, "the loop: out of memory");
	return r == 0 ? announce_with_words(worker, err) : r;
}

int worker_main(void)
{
	struct worker *worker = calloc(1, sizeof(*worker));
	struct fmha_error err;

	/* SIGKILL and not a wish: a worker that hangs must not outlive its front. */
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	signal(SIGPIPE, SIG_IGN);
	signal(SIGIO, SIG_IGN);  /* somebody wants a file that memfd.c has a lease on */
	signal(SIGINT, SIG_IGN); /* ^C goes to the whole group; the front drains us */
	signal(SIGTERM, SIG_IGN);
	signal(SIGHUP, SIG_IGN); /* until there is something to read again */
	mallopt(M_ARENA_MAX, 2);
	if (!worker) {
		log_error("out of memory");
		return 1;
	}
	worker->page = map_page(&err);
	if (!worker->page) {
		log_error("%s", err.msg);
		return 64;
	}
	worker_report_crashes(worker->page);
	worker_page_get_config(worker->page, &worker->settings);
	log_init("fmhad-worker", (enum log_level)worker->settings.log_level);
	name_process(worker->page->device);
	log_set_process(&(struct log_about){.fields = LOG_DEVICE, .device = worker->page->device});
	if (worker_init(worker, &err) < 0) {
		snprintf(worker->page->reason, sizeof(worker->page->reason), "%s", err.msg);
		_exit(1); /* a device that is half open may have threads: nothing is freed */
	}
	uv_run(&worker->loop, UV_RUN_DEFAULT);
	return 0;
}
