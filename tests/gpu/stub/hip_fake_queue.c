/* SPDX-License-Identifier: MIT */
/* hip_fake_queue.c: streams, events and the hardware queues behind them, each a thread. See hip_fake.h. */
#include "hip_fake.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MOST_QUEUES 32

struct queue {
	pthread_t thread;
	pthread_cond_t work;
	unsigned n_streams;
	bool started;
	struct fake_packet *first, **last;
};

struct fake_stream {
	struct fake_stream *next;
	struct queue *queue;
	unsigned uses; /* by its owner, and by who waits for it */
	uint64_t n_put, n_done;
};

/* The point of a stream that an event was recorded at. */
struct fake_mark {
	unsigned uses;
	bool done;
	double time;
};

struct fake_event {
	struct fake_mark *mark; /* NULL: never recorded */
	bool foreign;
};

/* Under fake_lock. */
static struct queue queues[3][MOST_QUEUES]; /* of high, normal and low priority */
static struct fake_stream *streams, *null_stream;

static double now(void)
{
	struct timespec time;

	(void)clock_gettime(CLOCK_MONOTONIC, &time);
	return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

/* With the lock held. */
static void put_mark(struct fake_mark *mark)
{
	if (mark && --mark->uses == 0)
		free(mark);
}

static bool mark_is_done(struct fake_mark *mark)
{
	bool done;

	(void)pthread_mutex_lock(&fake_lock);
	done = mark->done;
	(void)pthread_mutex_unlock(&fake_lock);
	return done;
}

/* ---- on a queue's thread ---- */

static void look_again(void)
{
	(void)usleep(200);
}

static void do_packet(struct fake_packet *packet)
{
	switch (packet->kind) {
	case PACKET_COPY:
		fake_touch(packet->to, packet->bytes);
		memcpy(packet->to, packet->from, packet->bytes);
		break;
	case PACKET_SET:
		fake_touch(packet->to, packet->bytes);
		memset(packet->to, (int)packet->value, packet->bytes);
		break;
	case PACKET_KERNEL:
		fake_kernel_begins();
		while (fake_hangs())
			look_again();
		fake_run(packet);
		break;
	case PACKET_WAIT:
		while ((int32_t)(__atomic_load_n((uint32_t *)packet->to, __ATOMIC_ACQUIRE) -
				 packet->value) < 0)
			look_again();
		break;
	case PACKET_WRITE:
		if (fake_number("HIP_FAKE_DEAF") > 0)
			break;
		__atomic_store_n((uint32_t *)packet->to, packet->value, __ATOMIC_RELEASE);
		break;
	case PACKET_MARK:
		break;
	case PACKET_AWAIT:
		while (!mark_is_done(packet->mark))
			look_again();
		break;
	}
}

static void *run_queue(void *argument)
{
	struct queue *queue = argument;

	(void)pthread_mutex_lock(&fake_lock);
	for (;;) {
		struct fake_packet *packet = queue->first;

		if (!packet) {
			(void)pthread_cond_wait(&queue->work, &fake_lock);
			continue;
		}
		(void)pthread_mutex_unlock(&fake_lock);
		do_packet(packet);
		(void)pthread_mutex_lock(&fake_lock);
		queue->first = packet->next;
		if (!queue->first)
			queue->last = &queue->first;
		packet->stream->n_done = packet->number;
		if (packet->kind == PACKET_MARK) {
			packet->mark->done = true;
			packet->mark->time = now();
		}
		put_mark(packet->mark);
		free(packet);
		(void)pthread_cond_broadcast(&fake_changed);
	}
	return NULL;
}

/* ---- streams ---- */

/* The first that nobody has, else the one that the fewest have. */
static struct queue *pick_queue(int priority)
{
	struct queue *best = &queues[priority][0];
	long n = fake_number("GPU_MAX_HW_QUEUES");

	n = n == 0 ? 4 : n > MOST_QUEUES ? MOST_QUEUES : n;
	for (long i = 1; i < n; i++)
		if (queues[priority][i].n_streams < best->n_streams)
			best = &queues[priority][i];
	return best;
}

/* With the lock held. */
static struct fake_stream *new_stream(int priority)
{
	struct fake_stream *stream = calloc(1, sizeof(*stream));

	if (!stream)
		return NULL;
	stream->uses = 1;
	stream->queue = pick_queue(priority);
	stream->queue->n_streams++;
	if (!stream->queue->started) {
		stream->queue->last = &stream->queue->first;
		(void)pthread_cond_init(&stream->queue->work, NULL);
		stream->queue->started = pthread_create(&stream->queue->thread, NULL, run_queue,
							stream->queue) == 0;
	}
	stream->next = streams;
	streams = stream;
	return stream;
}

static struct fake_stream *stream_of(hipStream_t stream)
{
	if (stream)
		return (struct fake_stream *)stream;
	if (!null_stream)
		null_stream = new_stream(1);
	return null_stream;
}

hipError_t hipStreamCreateWithPriority(hipStream_t *stream, unsigned flags, int priority)
{
	struct fake_stream *made;

	(void)flags;
	ENTER("hipStreamCreateWithPriority");
	fake_first("stream");
	(void)pthread_mutex_lock(&fake_lock);
	made = new_stream(priority < 0 ? 0 : priority == 0 ? 1 : 2);
	(void)pthread_mutex_unlock(&fake_lock);
	if (!made)
		return hipErrorOutOfMemory;
	fake_add(COUNT_STREAMS, 1);
	*stream = (hipStream_t)made;
	return hipSuccess;
}

hipError_t hipStreamCreateWithFlags(hipStream_t *stream, unsigned flags)
{
	ENTER("hipStreamCreateWithFlags");
	return hipStreamCreateWithPriority(stream, flags, 0);
}

hipError_t fake_put(hipStream_t on, const struct fake_packet *what)
{
	struct fake_packet *packet = malloc(sizeof(*packet));
	struct fake_stream *stream;

	if (!packet)
		return hipErrorOutOfMemory;
	*packet = *what;
	packet->next = NULL;
	(void)pthread_mutex_lock(&fake_lock);
	stream = stream_of(on);
	packet->stream = stream;
	packet->number = ++stream->n_put;
	*stream->queue->last = packet;
	stream->queue->last = &packet->next;
	(void)pthread_cond_signal(&stream->queue->work);
	(void)pthread_mutex_unlock(&fake_lock);
	return hipSuccess;
}

static void put_stream(struct fake_stream *stream)
{
	if (--stream->uses == 0)
		free(stream);
}

/* With the lock held: until the stream has done what it had got. */
static void wait_for(struct fake_stream *stream, uint64_t number)
{
	while (stream->n_done < number)
		(void)pthread_cond_wait(&fake_changed, &fake_lock);
}

void fake_wait_for_all(void)
{
	struct {
		struct fake_stream *stream;
		uint64_t number;
	} all[256];
	int n = 0;

	(void)pthread_mutex_lock(&fake_lock);
	for (struct fake_stream *stream = streams; stream && n < 256; stream = stream->next) {
		stream->uses++;
		all[n].stream = stream;
		all[n++].number = stream->n_put;
	}
	while (n-- > 0) {
		wait_for(all[n].stream, all[n].number);
		put_stream(all[n].stream);
	}
	(void)pthread_mutex_unlock(&fake_lock);
}

hipError_t hipStreamDestroy(hipStream_t stream)
{
	hipError_t told = fake_enter("hipStreamDestroy");
	struct fake_stream **at = &streams, *gone = (struct fake_stream *)stream;

	if (!stream)
		return hipErrorInvalidHandle;
	(void)pthread_mutex_lock(&fake_lock);
	wait_for(gone, gone->n_put);
	while (*at != gone)
		at = &(*at)->next;
	*at = gone->next;
	gone->queue->n_streams--;
	put_stream(gone);
	(void)pthread_mutex_unlock(&fake_lock);
	fake_add(COUNT_STREAMS, -1);
	return told;
}

hipError_t hipStreamQuery(hipStream_t stream)
{
	bool done;

	ENTER("hipStreamQuery");
	(void)pthread_mutex_lock(&fake_lock);
	done = stream_of(stream)->n_done == stream_of(stream)->n_put;
	(void)pthread_mutex_unlock(&fake_lock);
	return done ? hipSuccess : hipErrorNotReady;
}

hipError_t hipStreamSynchronize(hipStream_t stream)
{
	ENTER("hipStreamSynchronize");
	(void)pthread_mutex_lock(&fake_lock);
	wait_for(stream_of(stream), stream_of(stream)->n_put);
	(void)pthread_mutex_unlock(&fake_lock);
	return hipSuccess;
}

/* No stream of the fake captures. */
hipError_t hipStreamIsCapturing(hipStream_t stream, hipStreamCaptureStatus *status)
{
	(void)stream;
	ENTER("hipStreamIsCapturing");
	*status = hipStreamCaptureStatusNone;
	return hipSuccess;
}

/* ---- what is put on them ---- */

#if HIP_VERSION_MAJOR >= 7
typedef const void *copied;
#else
typedef void *copied;
#endif

/* A copy from or to @host's memory is waited for where that is not pinned. */
static hipError_t put_copy(void *to, const void *from, size_t bytes, const void *host,
			   hipStream_t stream)
{
	hipError_t status = fake_put(
		stream,
		&(struct fake_packet){.kind = PACKET_COPY, .to = to, .from = from, .bytes = bytes});

	if (status != hipSuccess || fake_is_pinned(host, bytes))
		return status;
	fake_add(COUNT_UNPINNED_COPIES, 1);
	return hipStreamSynchronize(stream);
}

hipError_t hipMemcpyHtoDAsync(hipDeviceptr_t to, copied from, size_t bytes, hipStream_t stream)
{
	ENTER("hipMemcpyHtoDAsync");
	fake_first("copy to the device");
	return put_copy(to, from, bytes, from, stream);
}

hipError_t hipMemcpyDtoHAsync(void *to, hipDeviceptr_t from, size_t bytes, hipStream_t stream)
{
	ENTER("hipMemcpyDtoHAsync");
	fake_first("copy from the device");
	return put_copy(to, from, bytes, to, stream);
}

hipError_t hipMemsetD8Async(hipDeviceptr_t to, unsigned char value, size_t bytes,
			    hipStream_t stream)
{
	ENTER("hipMemsetD8Async");
	fake_first("clear");
	return fake_put(stream,
			&(struct fake_packet){
				.kind = PACKET_SET, .to = to, .value = value, .bytes = bytes});
}

static bool is_word(const void *at)
{
	return (uintptr_t)at % sizeof(uint32_t) == 0 && fake_is_known(at);
}

hipError_t hipStreamWaitValue32(hipStream_t stream, void *at, uint32_t value, unsigned flags,
				uint32_t mask)
{
	ENTER("hipStreamWaitValue32");
	fake_first("wait for a word");
	if (!is_word(at) || flags != hipStreamWaitValueGte || mask != 0xffffffffu)
		return hipErrorInvalidValue;
	if (fake_number("HIP_FAKE_LAX") > 0) /* a runtime that goes on at once */
		value = __atomic_load_n((uint32_t *)at, __ATOMIC_ACQUIRE);
	return fake_put(stream,
			&(struct fake_packet){.kind = PACKET_WAIT, .to = at, .value = value});
}

hipError_t hipStreamWriteValue32(hipStream_t stream, void *at, uint32_t value, unsigned flags)
{
	ENTER("hipStreamWriteValue32");
	fake_first("write a word");
	if (!is_word(at) || flags != 0)
		return hipErrorInvalidValue;
	return fake_put(stream,
			&(struct fake_packet){.kind = PACKET_WRITE, .to = at, .value = value});
}

/* ---- events ---- */

hipError_t hipEventCreateWithFlags(hipEvent_t *event, unsigned flags)
{
	struct fake_event *made;

	(void)flags;
	ENTER("hipEventCreateWithFlags");
	made = calloc(1, sizeof(*made));
	if (!made)
		return hipErrorOutOfMemory;
	*event = (hipEvent_t)made;
	fake_add(COUNT_EVENTS, 1);
	return hipSuccess;
}

hipError_t hipIpcOpenEventHandle(hipEvent_t *event, hipIpcEventHandle_t handle)
{
	hipError_t status;

	(void)handle;
	ENTER("hipIpcOpenEventHandle");
	status = hipEventCreateWithFlags(event, hipEventInterprocess);
	if (status == hipSuccess)
		((struct fake_event *)*event)->foreign = true;
	return status;
}

hipError_t hipEventDestroy(hipEvent_t event)
{
	hipError_t told = fake_enter("hipEventDestroy");
	struct fake_event *gone = (struct fake_event *)event;

	if (!event)
		return hipErrorInvalidHandle;
	(void)pthread_mutex_lock(&fake_lock);
	put_mark(gone->mark);
	(void)pthread_mutex_unlock(&fake_lock);
	free(gone);
	fake_add(COUNT_EVENTS, -1);
	return told;
}

hipError_t hipEventRecord(hipEvent_t event, hipStream_t stream)
{
	struct fake_event *recorded = (struct fake_event *)event;
	struct fake_mark *mark;
	hipError_t status;

	ENTER("hipEventRecord");
	mark = calloc(1, sizeof(*mark));
	if (!mark)
		return hipErrorOutOfMemory;
	mark->uses = 2;
	(void)pthread_mutex_lock(&fake_lock);
	put_mark(recorded->mark);
	recorded->mark = mark;
	(void)pthread_mutex_unlock(&fake_lock);
	status = fake_put(stream, &(struct fake_packet){.kind = PACKET_MARK, .mark = mark});
	if (status != hipSuccess) {
		(void)pthread_mutex_lock(&fake_lock);
		put_mark(mark);
		(void)pthread_mutex_unlock(&fake_lock);
	}
	return status;
}

hipError_t hipEventQuery(hipEvent_t event)
{
	const struct fake_event *asked = (const struct fake_event *)event;

	ENTER("hipEventQuery");
	return !asked->mark || asked->foreign || mark_is_done(asked->mark) ? hipSuccess
									   : hipErrorNotReady;
}

hipError_t hipEventSynchronize(hipEvent_t event)
{
	ENTER("hipEventSynchronize");
	while (hipEventQuery(event) == hipErrorNotReady)
		look_again();
	return hipSuccess;
}

hipError_t hipStreamWaitEvent(hipStream_t stream, hipEvent_t event, unsigned flags)
{
	struct fake_mark *mark = ((struct fake_event *)event)->mark;

	(void)flags;
	ENTER("hipStreamWaitEvent");
	if (!mark)
		return hipSuccess;
	(void)pthread_mutex_lock(&fake_lock);
	mark->uses++;
	(void)pthread_mutex_unlock(&fake_lock);
	return fake_put(stream, &(struct fake_packet){.kind = PACKET_AWAIT, .mark = mark});
}

hipError_t hipEventElapsedTime(float *ms, hipEvent_t start, hipEvent_t stop)
{
	const struct fake_event *a = (const struct fake_event *)start,
				*b = (const struct fake_event *)stop;

	ENTER("hipEventElapsedTime");
	if (!a->mark || !b->mark)
		return hipErrorInvalidHandle;
	if (!mark_is_done(a->mark) || !mark_is_done(b->mark))
		return hipErrorNotReady;
	*ms = (float)((b->mark->time - a->mark->time) * 1e3);
	return hipSuccess;
}
