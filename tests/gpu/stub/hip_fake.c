/* SPDX-License-Identifier: MIT */
/* hip_fake.c: what the fake was told to do, what it counts, and the device. See hip_fake.h. */
#include "hip_fake.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MOST_NAMES 64

pthread_mutex_t fake_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t fake_changed = PTHREAD_COND_INITIALIZER;

/* ---- what it was told ---- */

struct use {
	const char *name;
	long n;
};

static pthread_mutex_t told_lock = PTHREAD_MUTEX_INITIALIZER;
static struct use uses[MOST_NAMES], firsts[MOST_NAMES];
static long n_calls, n_kernels;
static bool faulted;

static const char *told(const char *variable)
{
	const char *text = getenv(variable);

	return text ? text : "";
}

long fake_number(const char *variable)
{
	return atol(told(variable));
}

/* Tests in this process: what was counted for the last setting starts anew. */
EXPORT void hip_fake_set(const char *variable, const char *value);
EXPORT void hip_fake_set(const char *variable, const char *value)
{
	(void)pthread_mutex_lock(&told_lock);
	(void)setenv(variable, value, 1);
	memset(uses, 0, sizeof(uses));
	n_calls = n_kernels = 0;
	(void)pthread_mutex_unlock(&told_lock);
}

/* Counts the use of a name; with the lock held. */
static long count_use(struct use *table, const char *name)
{
	for (int i = 0; i < MOST_NAMES; i++) {
		if (!table[i].name)
			table[i].name = name;
		if (strcmp(table[i].name, name) == 0)
			return ++table[i].n;
	}
	abort();
}

/* What "CALL:N:CODE,..." says of this use of the call; 0: nothing. A CODE that is missing is 1. */
static int told_of(const char *text, const char *call, long use, long any)
{
	while (*text) {
		size_t bytes = strcspn(text, ":,");
		bool all = bytes == 1 && *text == '*';
		char *end = (char *)text + bytes;
		long n = *end == ':' ? strtol(end + 1, &end, 10) : 1, at = all ? any : use;
		bool on = *end == '+';
		int code = 1;

		end += on;
		if (*end == ':')
			code = (int)strtol(end + 1, &end, 10);
		if ((all || (strlen(call) == bytes && strncmp(text, call, bytes) == 0)) &&
		    (on ? at >= n : at == n))
			return code;
		text = *end == ',' ? end + 1 : end;
	}
	return 0;
}

hipError_t fake_enter(const char *call)
{
	bool query = strstr(call, "Query") != NULL;
	int code, blocks;
	long use;

	fake_add(COUNT_CALLS, !query);
	(void)pthread_mutex_lock(&told_lock);
	use = count_use(uses, call);
	n_calls += !query;
	code = told_of(told("HIP_FAKE_FAIL"), call, use, query ? 0 : n_calls);
	blocks = told_of(told("HIP_FAKE_BLOCK"), call, use, query ? 0 : n_calls);
	if (faulted && !code)
		code = hipErrorLaunchFailure;
	(void)pthread_mutex_unlock(&told_lock);
	if (blocks)
		for (;;)
			(void)pause();
	return (hipError_t)code;
}

void fake_first(const char *what)
{
	bool first;

	(void)pthread_mutex_lock(&told_lock);
	first = count_use(firsts, what) == 1;
	(void)pthread_mutex_unlock(&told_lock);
	if (first)
		(void)usleep((useconds_t)fake_number("HIP_FAKE_FIRST_MS") * 1000);
}

void fake_kernel_begins(void)
{
	const char *text = told("HIP_FAKE_FAULT"), *kind = strchr(text, ':');
	bool now;

	fake_add(COUNT_LAUNCHES, 1);
	(void)pthread_mutex_lock(&told_lock);
	now = kind && ++n_kernels == atol(text);
	faulted |= now && strcmp(kind, ":late") == 0;
	(void)pthread_mutex_unlock(&told_lock);
	if (now && strcmp(kind, ":abort") == 0) {
		(void)fprintf(stderr, "Memory access fault by GPU node-1 on address (nil)\n");
		abort();
	}
	(void)usleep((useconds_t)fake_number("HIP_FAKE_KERNEL_US"));
}

bool fake_hangs(void)
{
	const char *file = told("HIP_FAKE_HANG");

	return *file && access(file, F_OK) == 0;
}

/* ---- what it counts ---- */

struct record {
	char name[24];
	int64_t value;
};

static const char *const count_names[N_COUNTS] = {
	[COUNT_CALLS] = "calls",       [COUNT_ALLOCATIONS] = "allocations",
	[COUNT_BYTES] = "bytes",       [COUNT_PINNED] = "pinned",
	[COUNT_IMPORTS] = "imports",   [COUNT_STREAMS] = "streams",
	[COUNT_EVENTS] = "events",     [COUNT_MODULES] = "modules",
	[COUNT_LAUNCHES] = "launches", [COUNT_UNPINNED_COPIES] = "unpinned copies",
};
static struct record own_records[N_COUNTS], *records = own_records;
static pthread_once_t opened = PTHREAD_ONCE_INIT;

static void open_records(void)
{
	const char *folder = told("HIP_FAKE_COUNTS");
	void *map = MAP_FAILED;
	char path[4096];
	int fd = -1;

	(void)snprintf(path, sizeof(path), "%s/%d", folder, getpid());
	if (*folder)
		fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
	if (fd >= 0 && ftruncate(fd, sizeof(own_records)) == 0)
		map = mmap(NULL, sizeof(own_records), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (map != MAP_FAILED)
		records = map;
	if (fd >= 0)
		(void)close(fd);
	for (int i = 0; i < N_COUNTS; i++)
		(void)snprintf(records[i].name, sizeof(records[i].name), "%s", count_names[i]);
}

void fake_add(enum fake_count count, int64_t n)
{
	(void)pthread_once(&opened, open_records);
	(void)__atomic_add_fetch(&records[count].value, n, __ATOMIC_RELAXED);
}

/* How many there are, by the names above; -1: no such name. */
EXPORT long hip_fake_count(const char *name);
EXPORT long hip_fake_count(const char *name)
{
	for (int i = 0; i < N_COUNTS; i++)
		if (strcmp(count_names[i], name) == 0)
			return (long)__atomic_load_n(&records[i].value, __ATOMIC_RELAXED);
	return -1;
}

/* ---- the device ---- */

hipError_t hipInit(unsigned flags)
{
	(void)flags;
	ENTER("hipInit");
	return hipSuccess;
}

hipError_t hipGetDeviceCount(int *count)
{
	ENTER("hipGetDeviceCount");
	*count = 1;
	return hipSuccess;
}

hipError_t hipSetDevice(int device)
{
	ENTER("hipSetDevice");
	return device == 0 ? hipSuccess : hipErrorInvalidDevice;
}

hipError_t hipGetDevice(int *device)
{
	ENTER("hipGetDevice");
	*device = 0;
	return hipSuccess;
}

hipError_t hipDriverGetVersion(int *version)
{
	ENTER("hipDriverGetVersion");
	*version = HIP_VERSION;
	return hipSuccess;
}

hipError_t hipGetDeviceProperties(hipDeviceProp_t *properties, int device)
{
	const char *arch = told("HIP_FAKE_ARCH");

	ENTER("hipGetDeviceProperties");
	if (device != 0)
		return hipErrorInvalidDevice;
	memset(properties, 0, sizeof(*properties));
	(void)snprintf(properties->name, sizeof(properties->name), "Fake Instinct");
	(void)snprintf(properties->gcnArchName, sizeof(properties->gcnArchName), "%s",
		       *arch ? arch : "gfx942:sramecc+:xnack-");
	properties->totalGlobalMem = (size_t)4 << 30;
	properties->sharedMemPerBlock = 64 << 10;
	properties->multiProcessorCount = 304;
	properties->warpSize = 64;
	return hipSuccess;
}

hipError_t hipDeviceGetStreamPriorityRange(int *least, int *greatest)
{
	ENTER("hipDeviceGetStreamPriorityRange");
	*least = 1;
	*greatest = -1;
	return hipSuccess;
}

const char *hipGetErrorName(hipError_t error)
{
	switch ((int)error) {
#define NAME(name)                                                                                 \
	case name:                                                                                 \
		return #name
		NAME(hipSuccess);
		NAME(hipErrorInvalidValue);
		NAME(hipErrorOutOfMemory);
		NAME(hipErrorInvalidConfiguration);
		NAME(hipErrorInvalidDevicePointer);
		NAME(hipErrorInvalidImage);
		NAME(hipErrorInvalidContext);
		NAME(hipErrorNoBinaryForGpu);
		NAME(hipErrorInvalidHandle);
		NAME(hipErrorNotFound);
		NAME(hipErrorNotReady);
		NAME(hipErrorIllegalAddress);
		NAME(hipErrorHostMemoryAlreadyRegistered);
		NAME(hipErrorHostMemoryNotRegistered);
		NAME(hipErrorLaunchFailure);
		NAME(hipErrorNotSupported);
#undef NAME
	default:
		return "hipErrorUnknown";
	}
}

const char *hipGetErrorString(hipError_t error)
{
	(void)error;
	return "of the fake";
}
