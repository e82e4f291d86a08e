/* SPDX-License-Identifier: MIT */
/*
 * cuda_stub.c: a libcuda.so.1 without a GPU, for tests of the device layer. Memory is the host's,
 * exportable memory is a memfd, streams run at once. A module is the text "stub code"; its
 * functions do what stub_kernels.h says. CUDA_STUB_FAIL="name" makes the call of that name fail with error 700 (illegal
 * address), as a fault in a kernel does, from its CUDA_STUB_AFTER-th use on. With
 * CUDA_STUB_KERNEL_US a kernel takes so long, one after the other on the whole device. With
 * CUDA_STUB_IDLE any code is a module, and kernels do nothing, but if that is "stray" they write
 * the byte in front of their first tensor. CUDA_STUB_MODULES is how many modules there is memory for,
 * CUDA_STUB_GRANULES how much there is for modules, which take a granule of 2 MiB each, and all else together.
 * CUDA_STUB_CARDS is a file of the cards' PCI buses, a number each; without it there is one card that does not say.
 *
 * A process that has loaded it may ask what it has seen: cuda_stub_modules() are loaded,
 * cuda_stub_arguments() were those of the last launch. Between cuStreamBeginCapture() and
 * cuStreamEndCapture() launches and clears are kept for cuGraphLaunch(), and what a capture forbids
 * fails.
 */
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <kernels/abi.h>

#include "stub_kernels.h"

#define EXPORT      __attribute__((visibility("default")))
#define GRANULARITY (2u << 20)
#define INVALID     1
#define NOT_FOUND   500
#define ILLEGAL     700
#define CAPTURING   900 /* CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED */

typedef unsigned long long pointer;

/* Counts the uses of the call that is to fail. */
static int fails(const char *name)
{
	static int uses;
	const char *wanted = getenv("CUDA_STUB_FAIL"), *after = getenv("CUDA_STUB_AFTER");

	if (!wanted || strcmp(wanted, name) != 0)
		return 0;
	return uses++ >= (after ? atoi(after) : 0);
}

#define CALL(name, ...)                                                                            \
	EXPORT int name(__VA_ARGS__);                                                              \
	EXPORT int name(__VA_ARGS__)
#define MAY_FAIL(name)                                                                             \
	do {                                                                                       \
		if (fails(name))                                                                   \
			return ILLEGAL;                                                            \
	} while (0)

CALL(cuInit, unsigned flags)
{
	(void)flags;
	MAY_FAIL("cuInit");
	return 0;
}

#define MAX_CARDS 8

/* The cards of the machine as they are now, by their PCI buses. Return: how many. */
static int cards(int buses[MAX_CARDS])
{
	const char *path = getenv("CUDA_STUB_CARDS");
	FILE *file = path ? fopen(path, "re") : NULL;
	int n = 0;

	if (!file) {
		buses[0] = 0;
		return 1;
	}
	while (n < MAX_CARDS && fscanf(file, "%d", &buses[n]) == 1)
		n++;
	(void)fclose(file);
	return n;
}

CALL(cuDeviceGetCount, int *count)
{
	int buses[MAX_CARDS];

	*count = cards(buses);
	return 0;
}

CALL(cuDeviceGet, int *device, int index)
{
	int buses[MAX_CARDS];

	*device = index;
	return index >= 0 && index < cards(buses) ? 0 : 101;
}

CALL(cuDeviceGetName, char *name, int size, int device)
{
	(void)device;
	(void)snprintf(name, (size_t)size, "Stub GPU");
	return 0;
}

CALL(cuDeviceTotalMem_v2, size_t *bytes, int device)
{
	(void)device;
	*bytes = (size_t)4 << 30;
	return 0;
}

CALL(cuDeviceGetAttribute, int *value, int attribute, int device)
{
	static const int values[][2] = {{97, 232448},  {10, 32},      {16, 132},  {75, 9},
					{13, 1980000}, {36, 3201000}, {37, 6144}, {76, 0},
					{102, 1},      {103, 1}};
	int buses[MAX_CARDS];

	*value = 0;
	if (attribute == 33 && device < cards(buses)) /* PCI_BUS_ID */
		*value = buses[device];
	for (size_t i = 0; i < sizeof(values) / sizeof(values[0]); i++)
		if (values[i][0] == attribute)
			*value = values[i][1];
	return 0;
}

CALL(cuDevicePrimaryCtxRetain, void **context, int device)
{
	*context = (void *)(uintptr_t)(device + 1);
	return 0;
}

static __thread void *current_context;

CALL(cuCtxSetCurrent, void *context)
{
	current_context = context;
	return 0;
}

CALL(cuCtxGetDevice, int *device)
{
	*device = current_context ? (int)(uintptr_t)current_context - 1 : 0;
	return 0;
}

CALL(cuCtxGetCurrent, void **context)
{
	*context = current_context ? current_context : (void *)(uintptr_t)1;
	return 0;
}

CALL(cuCtxPushCurrent_v2, void *context)
{
	current_context = context;
	return 0;
}

CALL(cuCtxPopCurrent_v2, void **context)
{
	*context = current_context;
	current_context = NULL;
	return 0;
}

CALL(cuDriverGetVersion, int *version)
{
	*version = 13000;
	return 0;
}

CALL(cuMemGetInfo_v2, size_t *free_bytes, size_t *total)
{
	*free_bytes = *total = (size_t)4 << 30;
	return 0;
}

CALL(cuGetErrorName, int error, const char **name)
{
	*name = error == ILLEGAL ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_STUB";
	return 0;
}

CALL(cuGetErrorString, int error, const char **text)
{
	(void)error;
	*text = "an error that the stub was told to make";
	return 0;
}

struct graph;
static struct graph *capturing; /* one at a time, of any stream */

static _Atomic long long used_bytes;

/* Takes so much of the device's memory. Return: whether there is. */
static int take(size_t bytes)
{
	const char *text = getenv("CUDA_STUB_GRANULES");

	used_bytes += (long long)bytes;
	if (!text || used_bytes <= atoll(text) * GRANULARITY)
		return 1;
	used_bytes -= (long long)bytes;
	return 0;
}

CALL(cuMemAlloc_v2, pointer *ret, size_t bytes)
{
	void *memory;

	MAY_FAIL("cuMemAlloc");
	if (capturing)
		return CAPTURING;
	if (bytes > (size_t)4 << 30)
		return 2;
	if (posix_memalign(&memory, 256, bytes) != 0) /* as the driver's */
		return 2;
	if (!take(malloc_usable_size(memory))) {
		free(memory);
		return 2;
	}
	memset(memory, 0xa5, bytes); /* real memory is not clear either */
	*ret = (pointer)(uintptr_t)memory;
	return 0;
}

CALL(cuMemFree_v2, pointer memory)
{
	used_bytes -= (long long)malloc_usable_size((void *)(uintptr_t)memory);
	free((void *)(uintptr_t)memory);
	return 0;
}

CALL(cuMemHostRegister_v2, void *memory, size_t bytes, unsigned flags)
{
	(void)memory, (void)bytes, (void)flags;
	return 0;
}

CALL(cuMemHostUnregister, void *memory)
{
	(void)memory;
	return 0;
}

CALL(cuMemGetAddressRange_v2, pointer *base, size_t *bytes, pointer memory)
{
	*base = memory;
	*bytes = GRANULARITY;
	return 0;
}

CALL(cuMemcpyHtoDAsync_v2, pointer to, const void *from, size_t bytes, void *stream)
{
	(void)stream;
	MAY_FAIL("cuMemcpyHtoDAsync");
	memcpy((void *)(uintptr_t)to, from, bytes);
	return 0;
}

/* ---- graphs: what was put on a stream between two calls ---- */

struct node {
	struct node *next;
	const char *function; /* NULL: a clear */
	union abi_args args;
	pointer to;
	size_t bytes;
	unsigned char value;
};

struct graph {
	struct node *first, **last;
};

static int keep_node(const struct node *node)
{
	struct node *copy = malloc(sizeof(*copy));

	if (!copy)
		return 2;
	*copy = *node;
	copy->next = NULL;
	*capturing->last = copy;
	capturing->last = &copy->next;
	return 0;
}

CALL(cuStreamBeginCapture_v2, void *stream, int mode)
{
	(void)stream, (void)mode;
	capturing = calloc(1, sizeof(*capturing));
	if (!capturing)
		return 2;
	capturing->last = &capturing->first;
	return 0;
}

CALL(cuStreamEndCapture, void *stream, struct graph **graph)
{
	(void)stream;
	*graph = capturing;
	capturing = NULL;
	return 0;
}

CALL(cuStreamIsCapturing, void *stream, int *status)
{
	(void)stream;
	*status = capturing != NULL;
	return 0;
}

CALL(cuThreadExchangeStreamCaptureMode, int *mode)
{
	static _Thread_local int current;
	int before = current;

	current = *mode;
	*mode = before;
	return 0;
}

CALL(cuGraphDestroy, struct graph *graph)
{
	while (graph->first) {
		struct node *node = graph->first;

		graph->first = node->next;
		free(node);
	}
	free(graph);
	return 0;
}

CALL(cuMemsetD8Async, pointer to, unsigned char value, size_t bytes, void *stream)
{
	(void)stream;
	if (capturing)
		return keep_node(&(struct node){.to = to, .value = value, .bytes = bytes});
	memset((void *)(uintptr_t)to, value, bytes);
	return 0;
}

/* An IPC handle of the stub: "ipc", then the bytes of a pointer in this process. Another one that
 * opens it gets memory of its own, as for "good": nothing is shared. */
CALL(cuIpcGetMemHandle, void *handle, pointer memory)
{
	memset(handle, 0, 64);
	memcpy(handle, "ipc", 4);
	memcpy((char *)handle + 8, &memory, sizeof(memory));
	return 0;
}

struct ipc_handle {
	char bytes[64];
};

CALL(cuIpcOpenMemHandle_v2, pointer *memory, struct ipc_handle handle, unsigned flags)
{
	(void)flags;
	MAY_FAIL("cuIpcOpenMemHandle");
	if (memcmp(handle.bytes, "hang", 4) == 0)
		(void)sleep(60);
	if (memcmp(handle.bytes, "good", 4) != 0 && memcmp(handle.bytes, "ipc", 4) != 0)
		return INVALID;
	return cuMemAlloc_v2(memory, GRANULARITY);
}

CALL(cuIpcCloseMemHandle, pointer memory)
{
	return cuMemFree_v2(memory);
}

/* While the file exists, kernels never end. */
static int hangs(void)
{
	const char *file = getenv("CUDA_STUB_HANG");

	return file && access(file, F_OK) == 0;
}

/*
 * An interprocess event: two counters in memory that its processes share. Its handle is "event",
 * the process and the descriptor of a memfd there, which starts with this.
 */
struct shared_event {
	volatile uint32_t n_recorded, n_done;
};

/* What has to be reached before a stream goes on. */
struct barrier {
	const volatile uint32_t *word; /* NULL: nothing */
	uint32_t value;
};

/* A stream remembers the last two things that it waits for: what is recorded, written or copied to
 * the host behind them is put off until both have been reached. (Kernels were done at once.) */
struct stream {
	struct barrier barriers[2];
	int stuck;         /* a kernel was launched while launches were to hang */
	double busy_until; /* its last kernel ends then */
};

static double now(void)
{
	struct timespec time;

	(void)clock_gettime(CLOCK_MONOTONIC, &time);
	return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

struct event {
	double time; /* when it was or will be reached */
	struct stream behind;
	struct shared_event *shared; /* NULL: this process's own */
};

static int is_blocked(const struct stream *stream)
{
	for (int i = 0; i < 2; i++) {
		const struct barrier *barrier = &stream->barriers[i];

		if (barrier->word && (int32_t)(*barrier->word - barrier->value) < 0)
			return 1;
	}
	return (stream->stuck && hangs()) || now() < stream->busy_until;
}

static void add_barrier(struct stream *stream, const volatile uint32_t *word, uint32_t value)
{
	stream->barriers[0] = stream->barriers[1];
	stream->barriers[1] = (struct barrier){word, value};
}

/* Bytes that are to be written once their stream is not blocked any more. */
struct deferred {
	struct deferred *next;
	struct stream behind;
	void *to;
	const void *from; /* NULL: the value */
	size_t bytes;
	uint32_t value;
};

static struct deferred *deferred;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Does what has become possible; called whenever somebody looks. */
static void settle(void)
{
	(void)pthread_mutex_lock(&lock);
	for (struct deferred **at = &deferred; *at;) {
		struct deferred *write = *at;

		if (is_blocked(&write->behind)) {
			at = &write->next;
			continue;
		}
		memcpy(write->to, write->from ? write->from : &write->value, write->bytes);
		*at = write->next;
		free(write);
		at = &deferred; /* another one may have waited for these */
	}
	(void)pthread_mutex_unlock(&lock);
}

static int write_later(const struct stream *stream, const struct deferred *what)
{
	struct deferred *write = malloc(sizeof(*write));
	struct deferred **at = &deferred;

	if (!write)
		return 2;
	*write = *what;
	if (stream)
		write->behind = *stream;
	(void)pthread_mutex_lock(&lock);
	while (*at)
		at = &(*at)->next;
	*at = write;
	(void)pthread_mutex_unlock(&lock);
	settle();
	return 0;
}

CALL(cuMemcpyDtoHAsync_v2, void *to, pointer from, size_t bytes, const struct stream *stream)
{
	MAY_FAIL("cuMemcpyDtoHAsync");
	return write_later(stream, &(struct deferred){.to = to,
						      .from = (const void *)(uintptr_t)from,
						      .bytes = bytes});
}

CALL(cuStreamCreate, struct stream **stream, unsigned flags)
{
	(void)flags;
	MAY_FAIL("cuStreamCreate");
	*stream = calloc(1, sizeof(**stream));
	return *stream ? 0 : 2;
}

CALL(cuStreamDestroy_v2, void *stream)
{
	free(stream);
	return 0;
}

CALL(cuStreamQuery, const struct stream *stream)
{
	MAY_FAIL("cuStreamQuery");
	if (capturing)
		return CAPTURING;
	settle();
	return stream && is_blocked(stream) ? 600 : 0;
}

CALL(cuStreamSynchronize, const struct stream *stream)
{
	MAY_FAIL("cuStreamSynchronize");
	while (cuStreamQuery(stream) == 600)
		(void)usleep(1000);
	return 0;
}

CALL(cuStreamWaitEvent, struct stream *stream, const struct event *event, unsigned flags)
{
	(void)flags;
	MAY_FAIL("cuStreamWaitEvent");
	if (event->shared)
		add_barrier(stream, &event->shared->n_done, event->shared->n_recorded);
	return 0;
}

CALL(cuStreamWaitValue32_v2, struct stream *stream, pointer at, uint32_t value, unsigned flags)
{
	(void)flags;
	add_barrier(stream, (const volatile uint32_t *)(uintptr_t)at, value);
	return 0;
}

CALL(cuStreamWriteValue32_v2, const struct stream *stream, pointer at, uint32_t value,
     unsigned flags)
{
	(void)flags;
	return write_later(stream, &(struct deferred){.to = (void *)(uintptr_t)at,
						      .bytes = sizeof(value),
						      .value = value});
}

CALL(cuEventCreate, struct event **event, unsigned flags)
{
	(void)flags;
	*event = calloc(1, sizeof(**event));
	return *event ? 0 : 2;
}

CALL(cuIpcOpenEventHandle, struct event **event, struct ipc_handle handle)
{
	struct shared_event *shared = MAP_FAILED;
	char path[64];
	int pid, fd;

	MAY_FAIL("cuIpcOpenEventHandle");
	if (memcmp(handle.bytes, "hang", 4) == 0)
		(void)sleep(60);
	handle.bytes[63] = '\0';
	if (sscanf(handle.bytes, "event %d %d", &pid, &fd) != 2)
		return INVALID;
	if (pid == getpid())
		return 201; /* as the driver: CUDA_ERROR_INVALID_CONTEXT */
	(void)snprintf(path, sizeof(path), "/proc/%d/fd/%d", pid, fd);
	fd = open(path, O_RDWR | O_CLOEXEC);
	if (fd >= 0) {
		shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
		(void)close(fd);
	}
	if (shared == MAP_FAILED)
		return errno == ENOENT || errno == ESRCH ? INVALID : 2;
	*event = calloc(1, sizeof(**event));
	if (*event)
		(*event)->shared = shared;
	return *event ? 0 : 2;
}

CALL(cuEventDestroy_v2, struct event *event)
{
	if (event->shared)
		(void)munmap(event->shared, sizeof(*event->shared));
	free(event);
	return 0;
}

CALL(cuEventRecord, struct event *event, const struct stream *stream)
{
	event->time = now();
	memset(&event->behind, 0, sizeof(event->behind));
	if (stream)
		event->behind = *stream;
	if (event->time < event->behind.busy_until)
		event->time = event->behind.busy_until;
	if (!event->shared)
		return 0;
	return write_later(stream,
			   &(struct deferred){.to = (void *)(uintptr_t)&event->shared->n_done,
					      .bytes = sizeof(uint32_t),
					      .value = ++event->shared->n_recorded});
}

CALL(cuEventQuery, const struct event *event)
{
	MAY_FAIL("cuEventQuery");
	settle();
	return is_blocked(&event->behind) ? 600 : 0;
}

CALL(cuEventSynchronize, const struct event *event)
{
	while (cuEventQuery(event) == 600)
		(void)usleep(1000);
	return 0;
}

CALL(cuEventElapsedTime, float *ms, const struct event *a, const struct event *b)
{
	*ms = (float)((b->time - a->time) * 1e3);
	return 0;
}

static _Atomic int n_modules;

static int most_modules(void)
{
	const char *text = getenv("CUDA_STUB_MODULES");

	return text ? atoi(text) : 1 << 20;
}

CALL(cuModuleLoadData, void **module, const void *image)
{
	MAY_FAIL("cuModuleLoadData");
	if (capturing)
		return CAPTURING;
	if (memcmp(image, "stub code", 9) != 0 && !getenv("CUDA_STUB_IDLE"))
		return 200;
	if (n_modules >= most_modules() || !take(GRANULARITY))
		return 2;
	*module = malloc(1);
	n_modules++;
	return 0;
}

CALL(cuModuleUnload, void *module)
{
	n_modules--;
	used_bytes -= GRANULARITY;
	free(module);
	return 0;
}

CALL(cuda_stub_modules, void)
{
	return n_modules;
}

/* A function is its name: "stub code" has them all. */
CALL(cuModuleGetFunction, const char **function, void *module, const char *name)
{
	static char names[16][64];
	int i = 0;

	(void)module;
	if (strncmp(name, "fmha_", 5) != 0)
		return NOT_FOUND;
	while (i < 15 && names[i][0] && strcmp(names[i], name) != 0)
		i++;
	(void)snprintf(names[i], sizeof(names[i]), "%s", name);
	*function = names[i];
	return 0;
}

CALL(cuFuncLoad, void *function)
{
	(void)function;
	MAY_FAIL("cuFuncLoad");
	return 0;
}

CALL(cuFuncSetAttribute, void *function, int attribute, int value)
{
	(void)function, (void)attribute;
	return value <= 232448 ? 0 : INVALID;
}

static void take_device(struct stream *stream)
{
	static double free_from;
	const char *us = getenv("CUDA_STUB_KERNEL_US");

	if (!us)
		return;
	(void)pthread_mutex_lock(&lock);
	free_from = (free_from > now() ? free_from : now()) + atof(us) * 1e-6;
	stream->busy_until = free_from;
	(void)pthread_mutex_unlock(&lock);
}

EXPORT const void *cuda_stub_arguments(void);
EXPORT const void *cuda_stub_arguments(void)
{
	return stub_kernel_arguments();
}

CALL(cuGraphLaunch, const struct graph *graph, void *stream)
{
	for (const struct node *node = graph->first; node; node = node->next) {
		if (node->function)
			stub_kernel_run(node->function, &node->args);
		else
			(void)cuMemsetD8Async(node->to, node->value, node->bytes, stream);
	}
	return 0;
}

CALL(cuLaunchKernel, const char *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
     unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared, struct stream *stream,
     void **parameters, void **extra)
{
	const union abi_args *args = parameters[0];
	const char *idle = getenv("CUDA_STUB_IDLE");

	(void)shared, (void)extra;
	MAY_FAIL("cuLaunchKernel");
	if (!grid_x || !grid_y || !grid_z || !block_x || !block_y || !block_z)
		return INVALID;
	if (capturing)
		return keep_node(&(struct node){.function = function, .args = *args});
	if (stream) {
		stream->stuck |= hangs();
		take_device(stream);
	}
	if (!idle)
		stub_kernel_run(function, args);
	else if (strcmp(idle, "stray") == 0 && args->fwd.q.data)
		((char *)args->fwd.q.data)[-1] ^= 1;
	return 0;
}

/* With one attribute: it may begin before the kernel in front of it is done. */
struct launch_config {
	unsigned grid[3], block[3], shared;
	struct stream *stream;
	const struct {
		int id, padding, value[16];
	} * attributes;
	unsigned n_attributes;
};

CALL(cuLaunchKernelEx, const struct launch_config *config, void *function, void **parameters,
     void **extra)
{
	const unsigned *grid = config->grid, *block = config->block;

	if (config->n_attributes != 1 || config->attributes->id != 6 ||
	    config->attributes->value[0] != 1)
		return INVALID;
	return cuLaunchKernel(function, grid[0], grid[1], grid[2], block[0], block[1], block[2],
			      config->shared, config->stream, parameters, extra);
}

/* As strict as the driver about what the copy engine takes; the map is the address. */
CALL(cuTensorMapEncodeTiled, uint64_t map[16], int type, unsigned rank, pointer address,
     const uint64_t *extents, const uint64_t *strides, const uint32_t *box, const uint32_t *steps,
     int interleave, int swizzle, int promotion, int fill)
{
	(void)type, (void)interleave, (void)promotion, (void)fill;
	MAY_FAIL("cuTensorMapEncodeTiled");
	if (!address || address % 16 || (uintptr_t)map % 64 || rank < 1 || rank > 5 || swizzle > 3)
		return INVALID;
	for (unsigned i = 0; i < rank; i++)
		if (!extents[i] || extents[i] > UINT64_C(1) << 32 || !box[i] || box[i] > 256 ||
		    steps[i] != 1 || (i > 0 && (strides[i - 1] % 16 || strides[i - 1] >> 40)))
			return INVALID;
	map[0] = address;
	return 0;
}

/* ---- exportable memory: the handle is the descriptor plus one ---- */

CALL(cuMemGetAllocationGranularity, size_t *granularity, const void *allocation, int option)
{
	(void)allocation, (void)option;
	*granularity = GRANULARITY;
	return 0;
}

CALL(cuMemCreate, unsigned long long *handle, size_t bytes, const void *allocation,
     unsigned long long flags)
{
	int fd = memfd_create("stub", MFD_CLOEXEC);

	(void)allocation, (void)flags;
	MAY_FAIL("cuMemCreate");
	if (fd < 0 || bytes % GRANULARITY || ftruncate(fd, (off_t)bytes) < 0) {
		(void)close(fd);
		return 2;
	}
	*handle = (unsigned long long)fd + 1;
	return 0;
}

CALL(cuMemRelease, unsigned long long handle)
{
	return close((int)handle - 1) == 0 ? 0 : INVALID;
}

CALL(cuMemExportToShareableHandle, int *fd, unsigned long long handle, int kind,
     unsigned long long flags)
{
	(void)kind, (void)flags;
	*fd = dup((int)handle - 1);
	return *fd < 0 ? INVALID : 0;
}

CALL(cuMemImportFromShareableHandle, unsigned long long *handle, void *fd, int kind)
{
	struct stat st;
	int copy;

	(void)kind;
	MAY_FAIL("cuMemImportFromShareableHandle");
	copy = dup((int)(intptr_t)fd);
	if (copy < 0 || fstat(copy, &st) < 0 || !S_ISREG(st.st_mode)) {
		(void)close(copy);
		return INVALID;
	}
	*handle = (unsigned long long)copy + 1;
	return 0;
}

CALL(cuMemAddressReserve, pointer *at, size_t bytes, size_t alignment, pointer where,
     unsigned long long flags)
{
	void *address;

	(void)alignment, (void)where, (void)flags;
	MAY_FAIL("cuMemAddressReserve");
	address = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	*at = (pointer)(uintptr_t)address;
	return address == MAP_FAILED ? 2 : 0;
}

CALL(cuMemAddressFree, pointer at, size_t bytes)
{
	return munmap((void *)(uintptr_t)at, bytes) == 0 ? 0 : INVALID;
}

CALL(cuMemMap, pointer at, size_t bytes, size_t offset, unsigned long long handle,
     unsigned long long flags)
{
	struct stat st;

	(void)flags;
	MAY_FAIL("cuMemMap");
	if (fstat((int)handle - 1, &st) < 0)
		return 2;
	if (offset + bytes > (size_t)st.st_size)
		return INVALID;
	if (!take(bytes))
		return 2;
	if (mmap((void *)(uintptr_t)at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
		 (int)handle - 1, (off_t)offset) != MAP_FAILED)
		return 0;
	used_bytes -= (long long)bytes;
	return 2;
}

CALL(cuMemUnmap, pointer at, size_t bytes)
{
	void *address = (void *)(uintptr_t)at;

	used_bytes -= (long long)bytes;
	/* Where the system cannot map it anew, nobody reaches it until its addresses are given back. */
	if (mmap(address, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) ==
	    MAP_FAILED)
		(void)mprotect(address, bytes, PROT_NONE);
	return 0;
}

CALL(cuMemSetAccess, pointer at, size_t bytes, const void *access, size_t n)
{
	(void)at, (void)bytes, (void)access, (void)n;
	MAY_FAIL("cuMemSetAccess");
	return 0;
}
