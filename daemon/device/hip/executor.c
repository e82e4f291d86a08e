/* SPDX-License-Identifier: MIT */
/*
 * executor.c: launches on a GPU. A launch is: copies of what the host prepared, the kernels of its
 * stages, an event. Everything is put on the connection's own stream at once, by whoever submits
 * it; the executor thread only watches events, so that a launch costs one wake-up, not two.
 *
 * How long a launch will run is known once its plan has run: until shortly before its end the executor
 * sleeps, then it looks without pause, and has the loop look, too.
 *
 * Tiny launches on an idle device are watched by the submitting thread itself (gpu_run_here).
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

#include <base/clock.h>
#include <proto/error.h>

#include "gpu.h"

#define SPIN_NS          50000 /* watch an event so long before sleeping between looks */
#define PAUSE_NS         20000
#define BEGIN_NS         8000   /* from the driver's call to the first kernel */
#define EARLY_NS         15000  /* how that and sleeps vary */
#define EARLY_PART       100    /* of the time that a launch should take: how it varies */
#define LATE_MOST_NS     300000 /* later than that was something else */
#define LOOK_AHEAD       16     /* launches whose end is reckoned with */
#define TIMER_SLACK_NS   1000
#define HERE_LIMIT_NS    2000000
#define HERE_BLOCKS_MOST 16384 /* also those that find nothing to do take their time */

#define KEEP_STREAMS 16

struct device_stream {
	struct device_stream *next; /* among the free ones */
	hipStream_t stream;
	hipStream_t gate; /* see gpu.h; NULL: none */
};

struct gpu_launch {
	struct device_launch base;
	struct gpu_launch *next;
	hipEvent_t begin, end;
	struct gpu_pass pass;
	hipError_t issued; /* not hipSuccess: a part of it is on the stream */
	atomic_bool cancelled;
	_Atomic uint64_t issued_ns; /* 0: not yet */
	_Atomic uint64_t begun_ns;  /* when it was first seen past its fences; 0: not yet */
};

static struct gpu_launch *launch_of(struct device_launch *launch)
{
	return (struct gpu_launch *)launch;
}

int gpu_error(hipError_t status, const char *what, struct fmha_error *err)
{
	int code = FMHA_EDEVICE;

	if (status == hipErrorOutOfMemory)
		code = FMHA_ENOMEM;
	else if (status == hipErrorInvalidValue)
		code = FMHA_EINVAL;
	else if (status == hipErrorNotSupported)
		code = FMHA_ENOTSUP;
	return fmha_error_set(err, code, "%s: %s (%s)", what, hipGetErrorName(status),
			      hipGetErrorString(status));
}

/* The driver says of these that the process has to be started anew; of anything that is neither
 * retryable nor a plain refusal we assume it. */
bool gpu_error_is_fatal(hipError_t status)
{
	switch (status) {
	case hipSuccess:
	case hipErrorNotReady:
	case hipErrorOutOfMemory:
	case hipErrorInvalidValue:
	case hipErrorNotSupported:
	case hipErrorInvalidConfiguration:
	case hipErrorInvalidHandle: /* a client's event that is none any more */
	case hipErrorLaunchOutOfResources:
		return false;
	default:
		return true;
	}
}

int gpu_failure(struct gpu_device *gpu, hipError_t status, const char *what, struct fmha_error *err)
{
	struct fmha_error error;

	(void)gpu_error(status, what, &error);
	if (gpu_error_is_fatal(status)) {
		error.code = FMHA_EDEVICE;
		device_fail(&gpu->device, &error);
	}
	if (err)
		*err = error;
	return error.code;
}

/* Making a stream takes the driver long enough to be felt in a client's first call, so that a few
 * are kept. */
struct device_stream *gpu_stream_new(struct device *device, uint32_t uid, uint32_t weight)
{
	struct gpu_device *gpu = gpu_device_of(device);
	struct device_stream *stream = gpu->free_streams;
	hipError_t status;

	(void)uid, (void)weight; /* the hardware's queues know no users */
	if (stream) {
		gpu->free_streams = stream->next;
		gpu->n_free_streams--;
		return stream;
	}
	stream = calloc(1, sizeof(*stream));
	if (!stream)
		return NULL;
	status = hipStreamCreateWithFlags(&stream->stream, hipStreamNonBlocking);
	if (status == hipSuccess)
		return stream;
	(void)gpu_failure(gpu, status, "making a stream", NULL);
	free(stream);
	return NULL;
}

static void destroy_stream(struct gpu_device *gpu, struct device_stream *stream)
{
	gpu_gate_free(gpu, stream->gate);
	(void)hipStreamDestroy(stream->stream);
	free(stream);
}

void gpu_stream_free(struct device *device, struct device_stream *stream)
{
	struct gpu_device *gpu = gpu_device_of(device);

	if (!stream)
		return;
	if (gpu->n_free_streams < KEEP_STREAMS) {
		stream->next = gpu->free_streams;
		gpu->free_streams = stream;
		gpu->n_free_streams++;
		return;
	}
	destroy_stream(gpu, stream);
}

struct device_launch *gpu_launch_new(struct device *device)
{
	struct gpu_launch *launch = calloc(1, sizeof(*launch));
	hipError_t status;

	if (!launch)
		return NULL;
	status = hipEventCreateWithFlags(&launch->begin, 0);
	if (status == hipSuccess) {
		status = hipEventCreateWithFlags(&launch->end, 0);
		if (status == hipSuccess)
			return &launch->base;
		(void)hipEventDestroy(launch->begin);
	}
	(void)gpu_failure(gpu_device_of(device), status, "making an event", NULL);
	free(launch);
	return NULL;
}

void gpu_launch_free(struct device *device, struct device_launch *launch)
{
	(void)device;
	if (!launch)
		return;
	(void)hipEventDestroy(launch_of(launch)->begin);
	(void)hipEventDestroy(launch_of(launch)->end);
	free(launch);
}

static hipError_t issue_stage(struct device_launch *launch, uint32_t i)
{
	const struct launch_record *record = launch->records[i];
	const uint32_t *grid = record->grid;
	struct launch_tensor_map maps[LAUNCH_MAPS];
	void *parameters[1 + LAUNCH_MAPS] = {&launch->args[i]};

	if (grid[0] == 0 || grid[1] == 0 || grid[2] == 0)
		return hipSuccess; /* nothing to do */
	for (uint32_t n = 0; n < record->n_maps; n++) {
		hipError_t status = gpu_tensor_map_encode(&record->maps[n], &launch->args[i],
							  &maps[n]);

		if (status != hipSuccess)
			return status;
		parameters[1 + n] = &maps[n];
	}
	return gpu_launch_kernel(launch->kernels[i]->function, record, launch->stream->stream,
				 parameters);
}

/* Puts everything on the stream. @timed: between the launch's two events. */
static hipError_t issue(struct gpu_device *gpu, struct gpu_launch *launch, bool timed)
{
	struct device_launch *base = &launch->base;
	hipStream_t stream = base->stream->stream;
	hipError_t status = hipSuccess;

	if (base->n_event_waits > 0)
		status = gpu_gate_wait(gpu, &base->stream->gate, stream, base->event_waits,
				       base->n_event_waits, &launch->pass);
	for (uint32_t i = 0; i < base->n_waits && status == hipSuccess; i++)
		status = gpu_word_wait(gpu->word_kernel, stream, base->waits[i].device,
				       base->waits[i].value);
	if (status == hipSuccess && timed)
		status = hipEventRecord(launch->begin, stream);

	for (uint32_t i = 0; i < base->n_uploads && status == hipSuccess; i++)
		status = hipMemcpyHtoDAsync((hipDeviceptr_t)base->uploads[i].device,
					    base->uploads[i].host, base->uploads[i].bytes, stream);
	if (status == hipSuccess && base->zero_bytes > 0)
		status = hipMemsetD8Async((hipDeviceptr_t)base->zero, 0, base->zero_bytes, stream);
	for (uint32_t i = 0; i < base->n_stages && status == hipSuccess; i++)
		status = issue_stage(base, i);
	for (uint32_t i = 0; i < base->n_downloads && status == hipSuccess; i++)
		status = hipMemcpyDtoHAsync(base->downloads[i].host,
					    (hipDeviceptr_t)base->downloads[i].device,
					    base->downloads[i].bytes, stream);
	for (uint32_t i = 0; i < base->n_signals && status == hipSuccess; i++)
		status = gpu_word_write(gpu->word_kernel, stream, base->signals[i].device,
					base->signals[i].value);
	for (uint32_t i = 0; i < base->n_event_signals && status == hipSuccess; i++)
		status = hipEventRecord(gpu_event_of(base->event_signals[i]), stream);
	if (status == hipSuccess && timed)
		status = hipEventRecord(launch->end, stream);
	atomic_store(&launch->begun_ns, 0);
	atomic_store(&launch->issued_ns, clock_ns());
	return status;
}

/* Fills in the end of a launch, or its error. */
static void finish(struct gpu_device *gpu, struct gpu_launch *launch, hipError_t status)
{
	struct device_launch *base = &launch->base;

	base->ended_ns = clock_ns();
	if (status != hipSuccess)
		(void)gpu_failure(gpu, status, "running kernels", &base->error);
	atomic_fetch_sub(&gpu->n_busy, 1);
}

/* The launch lies behind us: when it began, by its events. */
static void take_time(struct gpu_launch *launch)
{
	struct device_launch *base = &launch->base;
	float ms = 0;

	base->started_ns = base->ended_ns;
	if (hipEventElapsedTime(&ms, launch->begin, launch->end) == hipSuccess)
		base->started_ns -= (uint64_t)((double)ms * 1e6);
}

void gpu_submit(struct device *device, struct device_launch *base)
{
	struct gpu_device *gpu = gpu_device_of(device);
	struct gpu_launch *launch = launch_of(base);
	hipError_t status;

	launch->next = NULL;
	memset(&base->error, 0, sizeof(base->error));
	atomic_store(&launch->cancelled, false);
	atomic_store(&launch->issued_ns, 0);
	atomic_fetch_add(&gpu->n_busy, 1);
	status = launch->issued = issue(gpu, launch, true);
	/* What is on the stream already still uses the launch's memory. */
	if (status != hipSuccess && !gpu_error_is_fatal(status))
		status = hipEventRecord(launch->end, base->stream->stream);
	if (status != hipSuccess) {
		finish(gpu, launch, status);
		device_launch_done(device, base);
		return;
	}
	(void)pthread_mutex_lock(&gpu->lock);
	*gpu->submitted_tail = launch;
	gpu->submitted_tail = &launch->next;
	(void)pthread_cond_signal(&gpu->work);
	(void)pthread_mutex_unlock(&gpu->lock);
}

/*
 * Without events: they cost the host as much as the launch itself. So the time of such a launch is
 * the one that this thread sees, some microseconds more than what the kernel takes.
 *
 * A kernel that hangs here stops the loop, as it would stop a driver call: the front's heartbeat
 * ends such a worker. Kernels are let in by size alone, so what hangs here would have hung
 * anywhere.
 */
static uint64_t blocks_of(const struct device_launch *base)
{
	uint64_t n = 0;

	for (uint32_t i = 0; i < base->n_stages; i++) {
		const uint32_t *grid = base->records[i]->grid;

		n += (uint64_t)grid[0] * grid[1] * grid[2];
	}
	return n;
}

/* After a failure that is none of the device's: what came before it may still run. */
static hipError_t drain(hipStream_t stream, hipError_t failure)
{
	hipError_t status = hipStreamSynchronize(stream);

	return status == hipSuccess ? failure : status;
}

bool gpu_run_here(struct device *device, struct device_launch *base)
{
	struct gpu_device *gpu = gpu_device_of(device);
	struct gpu_launch *launch = launch_of(base);
	hipStream_t stream = base->stream->stream;
	uint64_t began = clock_ns();
	hipError_t status;

	if (atomic_load(&gpu->n_busy) > 0 || blocks_of(base) > HERE_BLOCKS_MOST)
		return false;
	memset(&base->error, 0, sizeof(base->error));
	atomic_fetch_add(&gpu->n_busy, 1);
	status = issue(gpu, launch, false);
	if (status == hipSuccess)
		do
			status = hipStreamQuery(stream);
		while (status == hipErrorNotReady && clock_ns() - began < HERE_LIMIT_NS);
	if (status == hipErrorNotReady)
		status = hipStreamSynchronize(stream);
	else if (status != hipSuccess && !gpu_error_is_fatal(status))
		status = drain(stream, status);
	base->started_ns = began;
	finish(gpu, launch, status);
	return true;
}

void gpu_cancel(struct device *device, struct device_launch *launch)
{
	(void)device;
	/* A kernel cannot be stopped; its launch ends as cancelled when it is through. */
	atomic_store(&launch_of(launch)->cancelled, true);
}

/* Waiting for a fence or for the launch before it is not stalling. */
uint64_t gpu_stalled_ns(struct device *device, struct device_launch *base, const char **ret_kernel)
{
	struct gpu_launch *launch = launch_of(base);
	uint64_t begun = atomic_load(&launch->begun_ns);

	(void)device;
	*ret_kernel = base->n_stages ? base->names[base->n_stages - 1] : "";
	if (!atomic_load(&launch->issued_ns))
		return 0;
	if (!begun && hipEventQuery(launch->begin) != hipErrorNotReady) {
		begun = clock_ns();
		atomic_store(&launch->begun_ns, begun);
	}
	return begun ? clock_ns() - begun : 0;
}

/* The words are written on a stream of their own: the launch's is the one that waits. */
bool gpu_release_fences(struct device *device, struct device_launch *base)
{
	struct gpu_device *gpu = gpu_device_of(device);
	struct gpu_launch *launch = launch_of(base);

	if (base->n_waits + base->n_event_waits == 0 ||
	    hipEventQuery(launch->begin) != hipErrorNotReady)
		return false;
	if (base->n_event_waits > 0)
		gpu_gate_give_up(gpu, &base->stream->gate, &launch->pass);
	for (uint32_t i = 0; i < base->n_waits; i++)
		(void)gpu_word_write(gpu->word_kernel, gpu->rescue, base->waits[i].device,
				     base->waits[i].value);
	return true;
}

/* Takes ended launches off the list. Returns whether there were any. */
static bool reap(struct gpu_device *gpu, struct gpu_launch **in_flight)
{
	bool any = false;

	while (*in_flight) {
		struct gpu_launch *launch = *in_flight;
		hipError_t status = hipEventQuery(launch->end);

		if (status == hipErrorNotReady) {
			in_flight = &launch->next;
			continue;
		}
		*in_flight = launch->next;
		if (status == hipSuccess)
			status = launch->issued;
		finish(gpu, launch, status);
		if (status == hipSuccess)
			take_time(launch);
		if (status == hipSuccess && atomic_load(&launch->cancelled))
			(void)fmha_error_set(&launch->base.error, FMHA_ECANCELED, "cancelled");
		device_launch_done(&gpu->device, &launch->base);
		any = true;
	}
	return any;
}

static void append(struct gpu_launch **list, struct gpu_launch *more)
{
	while (*list)
		list = &(*list)->next;
	*list = more;
}

/* Whether another launch of the stream is in front of it. */
static bool is_behind(const struct gpu_launch *in_flight, const struct gpu_launch *launch)
{
	while (in_flight != launch && in_flight->base.stream != launch->base.stream)
		in_flight = in_flight->next;
	return in_flight != launch;
}

/* When looking is worth it: from shortly before the first end to come to shortly after. */
struct window {
	uint64_t from, until; /* 0: nobody knows */
};

static struct window next_look(const struct gpu_launch *in_flight, uint64_t last_end)
{
	struct window first = {.from = UINT64_MAX};
	int n = 0;

	for (const struct gpu_launch *l = in_flight; l; l = l->next) {
		uint64_t expected = l->base.expected_ns, issued = atomic_load(&l->issued_ns);
		uint64_t due, early = EARLY_NS + expected / EARLY_PART;

		if (!expected || l->base.n_waits + l->base.n_event_waits > 0 || n++ == LOOK_AHEAD)
			return (struct window){0};
		if (is_behind(in_flight, l))
			continue;
		due = (issued > last_end ? issued : last_end) + BEGIN_NS + expected;
		if (due - early < first.from)
			first = (struct window){due - early, due + early};
	}
	return first;
}

/* Sleeps until then, or until there is more to do. With the lock held. Return: false: there is. */
static bool sleep_until(struct gpu_device *gpu, uint64_t ns)
{
	struct timespec until = {.tv_sec = (time_t)(ns / NS_PER_S),
				 .tv_nsec = (long)(ns % NS_PER_S)};

	return pthread_cond_timedwait(&gpu->work, &gpu->lock, &until) == ETIMEDOUT;
}

struct watch {
	struct gpu_launch *in_flight;
	uint64_t last_end; /* or when more came */
	uint64_t began;    /* looking without pause; 0: not yet */
	uint64_t late_ns;  /* by how much sleeps last longer than they should, about */
};

/* Until the window, for which the loop prepares as well. */
static void sleep_towards(struct gpu_device *gpu, struct watch *watch, const struct window *look)
{
	uint64_t until = look->from - watch->late_ns, now;

	if (gpu->device.calls->soon)
		gpu->device.calls->soon(gpu->device.owner, look->from, look->until);
	if (!sleep_until(gpu, until))
		return;
	now = clock_ns();
	if (now - until < LATE_MOST_NS)
		watch->late_ns = (3 * watch->late_ns + (now - until)) / 4;
}

/* Between two looks: goes on at once, or after a sleep. With the lock held. */
static void pause_between(struct gpu_device *gpu, struct watch *watch)
{
	struct window look = next_look(watch->in_flight, watch->last_end);
	uint64_t now = clock_ns();

	if (look.from > now + watch->late_ns) {
		sleep_towards(gpu, watch, &look);
		return;
	}
	if (!watch->began)
		watch->began = now;
	/* It takes longer than it should: the longer, the less a moment matters. */
	if (now >= look.until && now - watch->began > SPIN_NS)
		(void)sleep_until(gpu, now + PAUSE_NS + (now - watch->last_end) / EARLY_PART);
}

static void *executor(void *argument)
{
	struct gpu_device *gpu = argument;
	struct watch watch = {.last_end = clock_ns()};

	(void)hipSetDevice(gpu->index);
	(void)prctl(PR_SET_TIMERSLACK, TIMER_SLACK_NS, 0, 0, 0);
	(void)pthread_mutex_lock(&gpu->lock);
	for (;;) {
		while (!gpu->submitted && !watch.in_flight && !gpu->stopping)
			(void)pthread_cond_wait(&gpu->work, &gpu->lock);
		if (gpu->submitted) {
			append(&watch.in_flight, gpu->submitted);
			gpu->submitted = NULL;
			gpu->submitted_tail = &gpu->submitted;
			watch.began = 0;
		}
		if (gpu->stopping && !watch.in_flight)
			break;
		(void)pthread_mutex_unlock(&gpu->lock);
		if (reap(gpu, &watch.in_flight)) {
			watch.last_end = clock_ns();
			watch.began = 0;
		}
		(void)pthread_mutex_lock(&gpu->lock);
		if (watch.in_flight && !gpu->submitted)
			pause_between(gpu, &watch);
	}
	(void)pthread_mutex_unlock(&gpu->lock);
	return NULL;
}

int gpu_executor_start(struct gpu_device *gpu, struct fmha_error *err)
{
	pthread_condattr_t clock;
	hipError_t status;

	(void)pthread_mutex_init(&gpu->lock, NULL);
	(void)pthread_condattr_init(&clock);
	(void)pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
	(void)pthread_cond_init(&gpu->work, &clock);
	(void)pthread_condattr_destroy(&clock);
	gpu->submitted_tail = &gpu->submitted;
	status = gpu_stream_apart(&gpu->rescue);
	if (status == hipSuccess)
		status = gpu_stream_apart(&gpu->scrub);
	if (status != hipSuccess)
		return gpu_error(status, "making a stream", err);
	status = gpu_first_uses(gpu->scrub);
	if (status != hipSuccess)
		return gpu_error(status, "using the device for the first time", err);
	status = gpu_try_fences(NULL, gpu->rescue, gpu->device.info.no_fences,
				sizeof(gpu->device.info.no_fences));
	if (status != hipSuccess)
		return gpu_error(status, "trying whether streams wait for words", err);
	if (pthread_create(&gpu->thread, NULL, executor, gpu) != 0)
		return fmha_error_set(err, FMHA_EIO, "no more threads");
	(void)pthread_setname_np(gpu->thread, "fmhad-gpu");
	gpu->thread_started = true;
	return 0;
}

void gpu_executor_stop(struct gpu_device *gpu)
{
	if (gpu->thread_started) {
		(void)pthread_mutex_lock(&gpu->lock);
		gpu->stopping = true;
		(void)pthread_cond_signal(&gpu->work);
		(void)pthread_mutex_unlock(&gpu->lock);
		(void)pthread_join(gpu->thread, NULL);
	}
	while (gpu->free_streams) {
		struct device_stream *stream = gpu->free_streams;

		gpu->free_streams = stream->next;
		destroy_stream(gpu, stream);
	}
	gpu_gates_deinit(gpu);
	if (gpu->rescue)
		(void)hipStreamDestroy(gpu->rescue);
	if (gpu->scrub)
		(void)hipStreamDestroy(gpu->scrub);
	(void)pthread_mutex_destroy(&gpu->lock);
	(void)pthread_cond_destroy(&gpu->work);
}
