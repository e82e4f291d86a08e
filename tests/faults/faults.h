/* SPDX-License-Identifier: MIT */
/*
 * faults.h: the page that a campaign shares with the processes whose calls it fails. The shim
 * (shim.c) counts the calls of each class there and fails the one that was asked for; campaign.py has
 * the same structures in ctypes. Nothing in it is ever waited for: both sides use plain atomics.
 */
#ifndef FAULTS_H
#define FAULTS_H

#include <stdatomic.h>
#include <stdint.h>

#define FAULTS_MAGIC  0x46415531u
#define FAULTS_FRAMES 24

/* What may be failed, one class at a time. */
#define FAULT_CLASSES(X)                                                                           \
	X(MEMORY, "memory")   /* malloc and its kin */                                             \
	X(MAP, "map")         /* mmap */                                                           \
	X(FILE, "file")       /* files and memfds: opened, read, written, renamed, locked */       \
	X(SOCKET, "socket")   /* sockets and pipes */                                              \
	X(EVENT, "event")     /* epoll, eventfd, timerfd, poll */                                  \
	X(PROCESS, "process") /* fork, posix_spawn, threads */                                     \
	X(UV, "uv")           /* libuv's public functions that can fail */                         \
	X(MSGPACK, "msgpack") /* msgpack-c's */                                                    \
	X(CJSON, "cjson")     /* cJSON's */

enum fault_class {
#define FAULT_CLASS_ENUM(ID, name) FAULT_##ID,
	FAULT_CLASSES(FAULT_CLASS_ENUM)
#undef FAULT_CLASS_ENUM
		FAULT_N_CLASSES
};

enum fault_kind { KIND_FRONT, KIND_WORKER, KIND_HELPER, KIND_CLIENT, N_KINDS };

enum fault_mode { MODE_OFF, MODE_ONCE, MODE_ALWAYS };

struct fault_frame {
	char module[24];
	uint64_t offset;
};

/* One kind of process; a campaign has one process of each at a time. */
struct fault_side {
	_Atomic uint32_t mode, class; /* armed last, disarmed first */
	_Atomic int64_t left;         /* calls until it fails: 1 is the next one */
	_Atomic uint32_t variant;     /* which of a call's errors */
	_Atomic uint32_t pid;         /* of the latest process that began */
	_Atomic uint64_t calls[16];   /* of each class, since the campaign set it to 0 */
	_Atomic uint64_t delivered;   /* calls that were failed */
	_Atomic int64_t blocks;       /* of memory that are allocated */
	_Atomic uint64_t aborts;
	char aborted_in[24]; /* the module that called abort() */
	char function[32];   /* that was failed first, */
	uint32_t error;      /* with this errno */
	uint32_t n_frames;
	struct fault_frame frames[FAULTS_FRAMES];
};

struct faults_page {
	uint32_t magic, bytes;
	struct fault_side sides[N_KINDS];
};

/* ---- shim.c, for its other files ---- */

/*
 * Whether this call of @function is to fail; errno is set then, to one of @errors (two, the second of
 * which may be 0: as the first).
 */
int fault_now(enum fault_class class, const char *function, const int errors[2]);

#define FAULT(class, function, ...) fault_now(FAULT_##class, function, (const int[2]){__VA_ARGS__})

/* Between the two, this thread is given no memory. */
void fault_starve(void);
void fault_feed(void);

/* The next definition of a function, in the library that has it. */
void *fault_next(const char *name);

#define NEXT(function)        ((__typeof__(&function))next_of(&next_##function, #function))
#define DEFINE_NEXT(function) static void *_Atomic next_##function

static inline void *next_of(void *_Atomic *known, const char *name)
{
	void *function = atomic_load_explicit(known, memory_order_relaxed);

	if (!function) {
		function = fault_next(name);
		atomic_store_explicit(known, function, memory_order_relaxed);
	}
	return function;
}

#endif
