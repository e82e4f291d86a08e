/* SPDX-License-Identifier: MIT */
/*
 * hip_fake.h: a libamdhip64 without a GPU, for tests of the device layer, by the headers that the daemon's
 * module is built with. It does what HIP's documentation says and what the runtime's public sources do where
 * that is less kind:
 *
 * - Streams share GPU_MAX_HW_QUEUES hardware queues a priority, four unless it is said, each of which does one
 *   thing after the other: who waits for a word holds up every stream of its queue. A new stream gets the queue with the fewest.
 * - hipFree(), hipHostUnregister() and hipIpcCloseMemHandle() wait until all streams are through, and
 *   hipStreamDestroy() until that one is.
 * - Copies from and to memory that is not registered wait on the host.
 * - Addresses are given again at once, the lowest first, one allocation right behind the other. An IPC handle is
 *   the address and the process, so that the handle of memory that was freed opens what lies there now; the
 *   size of an import is what the handle says.
 * - A module reads the image that it was loaded from until it is unloaded.
 * - An event of another process is done as soon as it is recorded.
 * - The first use of whatever there is takes its time on the host, the first touch of memory on the device.
 *
 * Memory is shared with other processes for real. Environment variables, or hip_fake_set() in the process:
 *
 *   HIP_FAKE_FAIL=CALL:N:CODE,...  the N-th use of CALL returns CODE; "N+": from then on; CALL "*": of any but
 *                                  those that ask again and again
 *   HIP_FAKE_BLOCK=CALL:N          the N-th use of CALL does not come back
 *   HIP_FAKE_FAULT=N:abort         the N-th kernel ends the process, as ROCr does; N:late: it fails, and
 *                                  every later call says so
 *   HIP_FAKE_FIRST_MS, HIP_FAKE_TOUCH_MS, HIP_FAKE_KERNEL_US   how long those take
 *   HIP_FAKE_LAX=1                 streams do not wait for words; 2: neither do kernels that are to
 *   HIP_FAKE_DEAF=1                what streams write to words does not arrive
 *   HIP_FAKE_DMABUF=WHAT           no: there are none; range: only HIP 7's call makes them; block: one is of more than
 *                                  was asked for; zeros: who opens one sees other memory; deaf: ... sees what was there and
 *                                  writes for itself; lost: hipFree() takes it from whoever has opened it; closes: the
 *                                  runtime closes the descriptor; aborts, hangs: so does who opens it
 *   HIP_FAKE_IPC=WHAT              zeros, deaf, aborts, hangs: the same of handles
 *   HIP_FAKE_HANG=FILE             while it exists kernels do not end
 *   HIP_FAKE_COUNTS=FOLDER         what the process has is counted in a file there, named by its number: records
 *                                  of a name of 24 bytes and an int64
 *   HIP_FAKE_ARCH, HIP_FAKE_LDS    gfx942:sramecc+:xnack- and 65536 bytes unless said otherwise
 *   HIP_FAKE_RUNNER=PROGRAM        executes code objects; without it a module is the text "stub code", and
 *                                  its kernels are those of stub_kernels.h
 */
#ifndef FMHA_TESTS_HIP_FAKE_H
#define FMHA_TESTS_HIP_FAKE_H

#define __HIP_PLATFORM_AMD__ 1
#include <hip/hip_runtime_api.h>

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include <kernels/abi.h>

#define EXPORT __attribute__((visibility("default")))

/* In front of every call that may fail or block. What gives something back does so whatever it was told to say. */
#define ENTER(name)                                                                                \
	do {                                                                                       \
		hipError_t told_ = fake_enter(name);                                               \
                                                                                                   \
		if (told_ != hipSuccess)                                                           \
			return told_;                                                              \
	} while (0)

enum fake_count {
	COUNT_CALLS,
	COUNT_ALLOCATIONS,
	COUNT_BYTES,
	COUNT_PINNED,
	COUNT_IMPORTS,
	COUNT_STREAMS,
	COUNT_EVENTS,
	COUNT_MODULES,
	COUNT_LAUNCHES,
	COUNT_UNPINNED_COPIES,
	N_COUNTS
};

struct fake_module;

/* ---- hip_fake.c ---- */

extern pthread_mutex_t
	fake_lock; /* of all that is shared; never held while something is done on a queue */
extern pthread_cond_t fake_changed;

hipError_t fake_enter(const char *call);
void fake_add(enum fake_count count, int64_t n);
long fake_number(const char *variable);
/* Once for each @what: takes HIP_FAKE_FIRST_MS. */
void fake_first(const char *what);
/* On a queue: the next kernel begins. */
void fake_kernel_begins(void);
bool fake_hangs(void);

/* ---- hip_fake_memory.c ---- */

/* On a queue: ends the process where [@at, @at + @bytes) is no memory of the device's, or the host's; the first
 * touch takes its time. */
void fake_touch(const void *at, size_t bytes);
/* Whether the environment variable says this. */
bool fake_is(const char *variable, const char *what);
bool fake_is_pinned(const void *at, size_t bytes);
bool fake_is_known(const void *at);
/* "[[address, bytes, path], ...]" of all memory; free() it. */
char *fake_memory_list(void);

/* ---- hip_fake_queue.c ---- */

/* What a stream does. Members that a kind does not use are zero. */
struct fake_packet {
	struct fake_packet *next;
	enum {
		PACKET_COPY,
		PACKET_SET,
		PACKET_KERNEL,
		PACKET_WAIT,
		PACKET_WRITE,
		PACKET_MARK,
		PACKET_AWAIT
	} kind;
	struct fake_stream *stream;
	uint64_t number;
	void *to;
	const void *from;
	size_t bytes;
	uint32_t value; /* the byte, the word */
	struct fake_mark *mark;
	const struct fake_function *function;
	uint32_t grid[3], block[3], lds_bytes;
	union abi_args args;
};

hipError_t fake_put(hipStream_t stream, const struct fake_packet *what);
/* Until everything that streams have got by now is done. */
void fake_wait_for_all(void);

/* ---- hip_fake_module.c ---- */

struct fake_function {
	struct fake_function *next;
	const struct fake_module *module;
	bool launched;
	char name[64];
};

void fake_run(const struct fake_packet *kernel);

#endif
