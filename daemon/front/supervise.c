/* SPDX-License-Identifier: MIT */
/*
 * supervise.c: one worker process a device, always.
 *
 * A worker that dies is replaced at once; one that dies while starting, after a pause that doubles: up to
 * ten seconds at first, since a driver may be reloaded, and up to minutes when it goes on, since a card
 * that is lost for good should cost the others nothing.
 * While clients are attached it is asked for a sign of life, and killed when none comes: nothing
 * else tells a worker that hangs in a driver call from one that is busy. Without clients there are
 * no heartbeats, so an idle daemon sleeps. When this process itself stood still, the silence of a
 * worker says nothing. Every death is held against the kernel that was running and the user who had
 * asked for it (quarantine.h).
 */
#include "process.h"
#include "tuned.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include <proto/cleanup.h>

#include <base/clock.h>
#include <proto/error.h>

#define LONGEST_PAUSE_MS  10000
#define STARTS_UNTIL_LOST 20
#define LOST_PAUSE_MS     300000 /* of a device that no start has found for long */
#define EXIT_GRACE_MS     200    /* from a worker's closing its socket to its end */

#define log_slot(slot, level, ...)                                                                 \
	log_write_about(&(struct log_about){.fields = LOG_DEVICE, .device = (slot)->index}, level, \
			__VA_ARGS__)

static void supervise_on_timer(uv_timer_t *timer);

static void set_state(struct worker_slot *slot, enum worker_state state)
{
	slot->state = state;
	snprintf(slot->device.state, sizeof(slot->device.state), "%s", worker_state_name(state));
	front_announce(slot->front);
}

static void start_timer(struct worker_slot *slot, uint64_t after_ms)
{
	slot->timer_due_ns = clock_ns() + after_ms * NS_PER_MS;
	uv_timer_start(&slot->timer, supervise_on_timer, after_ms, 0);
}

static void start_heartbeats(struct worker_slot *slot)
{
	uint32_t interval = slot->front->config.supervision.heartbeat_ms;

	if (slot->beating)
		return;
	slot->beating = true;
	slot->process->control.heard_ns = clock_ns();
	start_timer(slot, interval);
}

/* A client is about to be attached to its worker, or none. */
static void attach_all(struct worker_slot *slot)
{
	if (open_request_attach_all(slot))
		start_heartbeats(slot);
}

int worker_slot_open(struct worker_slot *slot, struct client *client, uint32_t id,
		     struct fmha_error *err)
{
	int r;

	if (slot->state == WORKER_FAILED || slot->state == WORKER_STOPPED)
		return fmha_error_set_field(
			err, slot->state == WORKER_FAILED ? FMHA_EDEVICE : FMHA_EBUSY, "device",
			"device %u is %s: %.180s", slot->index, worker_state_name(slot->state),
			slot->reason);
	r = open_request_new(slot, client, id, err);
	if (r == 0 && slot->state == WORKER_READY)
		attach_all(slot);
	return r;
}

/* ---- the control socket ---- */

static void on_ready(struct worker_slot *slot, const struct proto_worker_ready_params *params)
{
	slot->device = params->device;
	slot->device.device = slot->index;
	log_slot(slot, LOG_LEVEL_INFO, "device %u: %s (%s, %s) is ready, worker %u", slot->index,
		 slot->device.name, slot->device.backend, slot->device.arch, worker_slot_pid(slot));
}

static void on_compile_cancel(struct worker_process *process, uint32_t request)
{
	struct fmha_error err;

	if (!builder_forget(&process->compiles, request))
		return; /* it has been answered meanwhile */
	fmha_error_set(&err, FMHA_ECANCELED, "compile: cancelled");
	connection_answer_error(&process->control, request, &err);
}

/* A tuned_restored. */
static void on_restored(struct worker_slot *slot, uint32_t id, int fd)
{
	struct proto_json_result result = {0};
	struct stat st;

	if (fd >= 0 && fstat(fd, &st) == 0)
		result.size = (uint64_t)st.st_size;
	uv_timer_stop(&slot->timer);
	slot->beating = false;
	slot->n_failed_starts = 0;
	connection_answer(&slot->process->control, id, PROTO_WORKER_READY, &result, fd);
	set_state(slot, WORKER_READY);
	worker_process_configure(slot->process);
	attach_all(slot);
	slot->front->device_ready(slot);
}

static void on_compiled(void *owner, uint32_t id, const struct proto_compile_result *result, int fd,
			const struct fmha_error *error)
{
	struct worker_process *process = owner;

	if (error->code == FMHA_OK)
		connection_answer(&process->control, id, PROTO_COMPILE, result, fd);
	else
		connection_answer_error(&process->control, id, error);
}

static int supervise_handle(struct connection *control, uint32_t id, enum proto_method method,
			    const union proto_any_params *params, int *fd, struct fmha_error *err)
{
	struct worker_process *process = container_of(control, struct worker_process, control);
	struct worker_slot *slot = process->slot;

	switch (method) {
	case PROTO_COMPILE:
		return builder_submit(process->front->builder, &process->compiles, id,
				      &params->COMPILE, err);
	case PROTO_COMPILE_CANCEL:
		on_compile_cancel(process, params->COMPILE_CANCEL.request);
		break;
	case PROTO_WORKER_READY:
		if (slot->state != WORKER_STARTING)
			return fmha_error_set(err, FMHA_EINVAL, "it was ready already");
		on_ready(slot, &params->WORKER_READY);
		return tuned_attach(slot, id, &params->WORKER_READY, on_restored, err);
	case PROTO_TUNED_RESULT:
		if (tuned_add(slot, &params->TUNED_RESULT, err) < 0)
			return err->code;
		break;
	case PROTO_REGISTRY_CHANGE:
		return tuned_change(slot, id, &params->REGISTRY_CHANGE, *fd, err);
	default:
		return fmha_error_set(err, FMHA_EINVAL, "not a method of a front's control socket");
	}
	connection_answer(control, id, method, &(struct proto_empty){0}, -1);
	return 0;
}

static void on_hangup(struct connection *control)
{
	struct worker_process *process = container_of(control, struct worker_process, control);

	struct worker_slot *slot = process->slot;

	builder_forget_all(&process->compiles);
	process->hung_up = true;
	/* It is over, though not blamed yet: nobody is told that it is ready, or attached to it. */
	if (!process->leaving && slot && slot->state == WORKER_READY) {
		process->was_ready = true;
		set_state(slot, WORKER_RESTARTING);
	}
	/* Usually the process is dead already and its exit is reported next. */
	if (!process->leaving && process->slot)
		start_timer(process->slot, EXIT_GRACE_MS);
}

static const struct connection_ops control_ops = {
	.handle = supervise_handle,
	.on_closed = worker_process_on_control_closed,
	.on_hangup = on_hangup,
};

bool worker_slot_request(struct worker_slot *slot, enum proto_method method, const void *params,
			 int fd, connection_reply reply, void *owner)
{
	if (slot->state == WORKER_READY)
		return connection_request(&slot->process->control, method, params, fd, reply, owner,
					  NULL) == 0;
	closep(&fd);
	return false;
}

/* ---- deaths ---- */

static void schedule_start(struct worker_slot *slot, bool was_ready)
{
	uint64_t pause = slot->front->config.supervision.restart_ms;
	uint64_t longest = slot->n_failed_starts < STARTS_UNTIL_LOST ? LONGEST_PAUSE_MS
								     : LOST_PAUSE_MS;

	if (was_ready) {
		set_state(slot, WORKER_RESTARTING);
		worker_slot_start(slot);
		return;
	}
	slot->n_failed_starts++;
	for (uint32_t i = 1; i < slot->n_failed_starts && pause < longest; i++)
		pause *= 2;
	if (pause > longest)
		pause = longest;
	set_state(slot, worker_slot_has_failed(slot) ? WORKER_FAILED : WORKER_RESTARTING);
	if (slot->state == WORKER_FAILED)
		open_request_refuse_all(slot, FMHA_EDEVICE, slot->reason);
	start_timer(slot, pause);
}

static void set_drained(struct worker_slot *slot)
{
	slot->drained = true;
	slot->front->on_drained(slot->front);
}

static void on_process_exit(uv_process_t *handle, int64_t status, int signal)
{
	struct worker_process *process = container_of(handle, struct worker_process, process);
	struct worker_slot *slot = process->slot;
	struct worker_death death;
	char before[sizeof(slot->reason)];
	bool was_ready, again;

	worker_process_close(process);
	if (!slot)
		return;
	death = worker_process_culprit(process, signal);
	process->slot = NULL;
	slot->process = NULL;
	slot->beating = false;
	uv_timer_stop(&slot->timer);
	was_ready = slot->state == WORKER_READY || process->was_ready;
	if (slot->front->draining || slot->state == WORKER_STOPPED) {
		tuned_detach(slot);
		set_state(slot, WORKER_STOPPED);
		open_request_refuse_all(slot, FMHA_EBUSY, "the daemon is stopping");
		set_drained(slot);
		return;
	}
	slot->n_deaths++;
	if (quarantine_add(&slot->front->quarantine, &death, clock_ns()))
		tuned_keep_quarantine(slot);
	tuned_detach(slot);
	snprintf(before, sizeof(before), "%s", slot->reason);
	worker_process_describe_death(process, status, signal, slot->reason, sizeof(slot->reason));
	/* A start that fails for the same reason time and again is one line. */
	again = !was_ready && slot->n_failed_starts > 0 && !strcmp(before, slot->reason);
	log_slot(slot, again ? LOG_LEVEL_DEBUG : LOG_LEVEL_WARNING, "device %u: %s", slot->index,
		 slot->reason);
	schedule_start(slot, was_ready);
}

/* ---- starting ---- */

void worker_slot_start(struct worker_slot *slot)
{
	struct fmha_error err;

	slot->n_starts++;
	if (worker_process_start(slot, &control_ops, on_compiled, on_process_exit, &err) < 0) {
		snprintf(slot->reason, sizeof(slot->reason), "%s", err.msg);
		log_slot(slot, LOG_LEVEL_ERROR, "device %u: %s", slot->index, err.msg);
		if (!slot->process)
			schedule_start(slot, false);
		return;
	}
	set_state(slot, WORKER_STARTING);
	start_timer(slot, slot->front->config.supervision.start_timeout_ms);
}

/* The timer has come so late that this process must have stood still (SIGSTOP, a suspended machine,
 * no core): what others have sent meanwhile has not been read. */
static bool has_stood_still(const struct worker_slot *slot)
{
	uint64_t timeout = slot->front->config.supervision.heartbeat_timeout_ms * NS_PER_MS;

	return clock_ns() - slot->timer_due_ns > timeout / 2;
}

static void beat(struct worker_slot *slot)
{
	uint32_t interval = slot->front->config.supervision.heartbeat_ms;
	uint64_t timeout = slot->front->config.supervision.heartbeat_timeout_ms * NS_PER_MS;
	struct worker_process *process = slot->process;

	if (!process)
		return;
	if (has_stood_still(slot))
		process->control.heard_ns = clock_ns();
	start_timer(slot, interval);
	if (clock_ns() - process->control.heard_ns > timeout) {
		log_slot(slot, LOG_LEVEL_ERROR, "device %u: worker %u does not answer", slot->index,
			 worker_slot_pid(slot));
		worker_process_kill(process, KILL_SILENT);
	} else if (atomic_load(&process->page->n_sessions) == 0 && list_is_empty(&slot->opens)) {
		slot->beating = false;
		uv_timer_stop(&slot->timer);
	} else {
		(void)worker_slot_request(slot, PROTO_PING, &(struct proto_empty){0}, -1, NULL,
					  NULL);
	}
}

static void supervise_on_timer(uv_timer_t *timer)
{
	struct worker_slot *slot = container_of(timer, struct worker_slot, timer);

	if (slot->process && slot->process->hung_up) {
		worker_process_kill(slot->process, KILL_SOCKET_CLOSED);
		return;
	}
	switch (slot->state) {
	case WORKER_STARTING:
		if (has_stood_still(slot)) {
			start_timer(slot, slot->front->config.supervision.start_timeout_ms);
			break;
		}
		log_slot(slot, LOG_LEVEL_ERROR, "device %u: worker %u is not ready in time",
			 slot->index, worker_slot_pid(slot));
		worker_process_kill(slot->process, KILL_NOT_READY);
		break;
	case WORKER_READY:
		beat(slot);
		break;
	case WORKER_RESTARTING:
	case WORKER_FAILED:
		worker_slot_start(slot);
		break;
	case WORKER_STOPPED:
		break;
	}
}

void worker_slot_init(struct front *front, uint32_t index)
{
	struct worker_slot *slot = &front->slots[index];
	const struct config_device *config = &front->config.devices[index];

	slot->front = front;
	slot->index = index;
	list_init(&slot->opens);
	uv_timer_init(&front->loop, &slot->timer);
	slot->device.device = index;
	/* Until the worker describes it. */
	memcpy(slot->device.backend, config->backend, sizeof(config->backend));
	if (config->name[0])
		memcpy(slot->device.name, config->name, sizeof(config->name));
	else
		memcpy(slot->device.name, config->backend, sizeof(config->backend));
}

/* ---- the end ---- */

static void on_drained(void *owner, const union proto_any_result *result, int fd,
		       const struct fmha_error *error)
{
	(void)result, (void)fd;
	if (error->code != FMHA_ECONN) /* else its end says so */
		set_drained(owner);
}

void worker_slot_drain(struct worker_slot *slot)
{
	if (worker_slot_request(slot, PROTO_WORKER_DRAIN, &(struct proto_empty){0}, -1, on_drained,
				slot))
		return;
	worker_slot_stop(slot, true); /* it is not ready: nothing is in flight */
	slot->drained = worker_slot_is_over(slot);
}

void worker_slot_stop(struct worker_slot *slot, bool now)
{
	bool was_over = worker_slot_is_over(slot);

	slot->state = WORKER_STOPPED;
	uv_timer_stop(&slot->timer);
	if (was_over)
		return;
	/* Without its control socket the worker answers what is pending and exits. */
	slot->process->leaving = true;
	if (now)
		worker_process_kill(slot->process, KILL_STOPPING);
	else
		connection_close(&slot->process->control);
}

bool worker_slot_is_over(const struct worker_slot *slot)
{
	return !slot->process;
}
