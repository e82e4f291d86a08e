/* SPDX-License-Identifier: MIT */
/*
 * limits.h: what one client, one user and all of them together may take. Every limit is a key of
 * the configuration's "limits" and has a counter of the times it was hit in `fmhactl status`.
 */
#ifndef FMHAD_BASE_LIMITS_H
#define FMHAD_BASE_LIMITS_H

#include <stdbool.h>
#include <stdint.h>

#include <proto/limits.h>

/*
 * X(ID, key, when, default, least, most, help). when: a change is taken over when the configuration is
 * read again, or when the daemon starts. A default of 0 becomes what the machine offers. What each
 * means is its help, which fmhad.json(5) is made of.
 */
#define LIMITS(X)                                                                                  \
	X(CONNECTIONS, connections, RELOAD, 1024, 1, 1 << 20, "connections to the front")          \
	X(CONNECTIONS_PER_UID, connections_per_uid, RELOAD, 64, 1, 1 << 20,                        \
	  "one user's connections to the front")                                                   \
	X(SESSIONS, sessions, RELOAD, 4096, 1, 1 << 20, "open devices: connections to one worker") \
	X(SESSIONS_PER_UID, sessions_per_uid, RELOAD, 128, 1, 1 << 20,                             \
	  "one user's connections to one worker")                                                  \
	X(HELLO_MS, hello_ms, RELOAD, 5000, 10, 3600000,                                           \
	  "ms from connecting to hello, then the connection is closed")                            \
	X(FRAME_BYTES, frame_bytes, RESTART, PROTO_MAX_FRAME, 4096, PROTO_MAX_FRAME,               \
	  "bytes of a frame")                                                                      \
	X(FRAME_BYTES_BEFORE_HELLO, frame_bytes_before_hello, RESTART,                             \
	  PROTO_MAX_FRAME_BEFORE_HELLO, 64, PROTO_MAX_FRAME,                                       \
	  "bytes of a frame of a connection that has not said hello")                              \
	X(FDS_PER_MESSAGE, fds_per_message, RESTART, PROTO_MAX_FDS, 1, 64,                         \
	  "descriptors that one message may bring")                                                \
	X(FDS_PER_CONNECTION, fds_per_connection, RESTART, 64, 1, 4096,                            \
	  "descriptors of one connection")                                                         \
	X(FDS, fds, RESTART, 0, 0, 1 << 20,                                                        \
	  "descriptors of a process, never more than what 0 stands for: what RLIMIT_NOFILE "       \
	  "leaves beside reserved_fds and a worker's kernels")                                     \
	X(FDS_PER_UID, fds_per_uid, RESTART, 512, 1, 1 << 20,                                      \
	  "one user's descriptors; never more than half of all")                                   \
	X(RESERVED_FDS, reserved_fds, RESTART, 64, 16, 1 << 16,                                    \
	  "descriptors kept for workers, their control sockets and the listener")                  \
	X(IN_FLIGHT_PER_CONNECTION, in_flight_per_connection, RESTART, 64, 1, 1 << 16,             \
	  "unanswered requests of one connection")                                                 \
	X(IN_FLIGHT, in_flight, RELOAD, 65536, 1, 1 << 24, "unanswered requests of a process")     \
	X(IN_FLIGHT_PER_UID, in_flight_per_uid, RELOAD, 256, 1, 1 << 20,                           \
	  "one user's unanswered requests")                                                        \
	X(FRAMES_PER_WAKE, frames_per_wake, RELOAD, 64, 1, 65536,                                  \
	  "frames that one connection gets answered before the others have a turn")                \
	X(WAKE_US, wake_us, RELOAD, 50, 10, 1000000,                                               \
	  "us of a loop's time that one user gets before the others have a turn: what one "        \
	  "request "                                                                               \
	  "or slice of work begun before then costs comes on top (SECURITY.md)")                   \
	X(SPIN_US, spin_us, RESTART, 50, 0, 1000,                                                  \
	  "us for which a process looks for the next request before it sleeps; 0: not at all")     \
	X(OUTPUT_HARD_BYTES, output_hard_bytes, RELOAD, 4 << 20, 65536, 1 << 30,                   \
	  "bytes of answers that a connection has not read; above it the connection is closed")    \
	X(OUTPUT_SOFT_BYTES, output_soft_bytes, RELOAD, 1 << 20, 4096, 1 << 30,                    \
	  "the same, for output_soft_ms at most")                                                  \
	X(OUTPUT_SOFT_MS, output_soft_ms, RELOAD, 10000, 10, 3600000,                              \
	  "ms for which a connection may stay above output_soft_bytes")                            \
	X(OUTPUT_BYTES_BEFORE_HELLO, output_bytes_before_hello, RELOAD, 16384, 1024, 1 << 20,      \
	  "bytes of answers not read, of a connection that has not said hello")                    \
	X(BUFFERS_PER_CONNECTION, buffers_per_connection, RELOAD, 4096, 1, 1 << 20,                \
	  "buffers of one connection")                                                             \
	X(BUFFERS, buffers, RELOAD, 0, 0, 1 << 22,                                                 \
	  "buffers of one worker; 0: half of vm.max_map_count")                                    \
	X(BUFFERS_PER_UID, buffers_per_uid, RELOAD, 8192, 1, 1 << 22, "one user's buffers")        \
	X(EVENTS_PER_CONNECTION, events_per_connection, RELOAD, 256, 1, 1 << 20,                   \
	  "imported events of one connection")                                                     \
	X(EVENTS, events, RELOAD, 4096, 1, 1 << 22, "imported events of one worker")               \
	X(EVENTS_PER_UID, events_per_uid, RELOAD, 1024, 1, 1 << 22, "one user's imported events")  \
	X(PLANS_PER_CONNECTION, plans_per_connection, RELOAD, 4096, 1, 1 << 20,                    \
	  "plans of one connection")                                                               \
	X(PLANS, plans, RELOAD, 65536, 1, 1 << 24, "plans of one worker")                          \
	X(PLANS_PER_UID, plans_per_uid, RELOAD, 16384, 1, 1 << 22, "one user's plans")             \
	X(KERNELS, kernels, RELOAD, 0, 0, 1 << 16,                                                 \
	  "compiled kernels that plans of one worker have loaded, local ones while they are "      \
	  "made; 0: a quarter of its descriptors, at most 4096; never more than half of them")     \
	X(KERNELS_PER_UID, kernels_per_uid, RELOAD, 1024, 1, 1 << 16,                              \
	  "one user's such kernels; never more than half of all")                                  \
	X(KERNELS_IDLE, kernels_idle, RELOAD, 0, 0, 1 << 16,                                       \
	  "kernels that stay loaded though no plan has them; 0: an eighth of kernels")             \
	X(KERNELS_IDLE_BYTES, kernels_idle_bytes, RELOAD, 256 << 20, 0, 1ll << 50,                 \
	  "bytes of such kernels' code")                                                           \
	X(MEMORY_BYTES, memory_bytes, RELOAD, 0, 0, 1ll << 50,                                     \
	  "bytes of buffers, workspaces and code on one device; 0: three quarters of the "         \
	  "device's "                                                                              \
	  "memory")                                                                                \
	X(MEMORY_BYTES_PER_UID, memory_bytes_per_uid, RELOAD, 0, 0, 1ll << 50,                     \
	  "one user's share of that; 0: half of the device's memory")                              \
	X(COMPILES, compiles, RELOAD, 4096, 1, 1 << 20, "queued builds of kernels")                \
	X(COMPILES_PER_UID, compiles_per_uid, RELOAD, 1024, 1, 1 << 20,                            \
	  "one user's queued builds")                                                              \
	X(POOLS, pools, RELOAD, 256, 0, 1 << 16, "pools of pages that outlive their users")        \
	X(POOLS_PER_UID, pools_per_uid, RELOAD, 16, 0, 1 << 16, "one user's pools")                \
	X(POOL_BYTES, pool_bytes, RELOAD, 0, 0, 1ll << 50,                                         \
	  "bytes of all pools' pages; 0: half of the machine's memory")                            \
	X(POOL_BYTES_PER_UID, pool_bytes_per_uid, RELOAD, 0, 0, 1ll << 50,                         \
	  "one user's share of that; 0: a quarter of the machine's memory")                        \
	X(POOL_SPILL_BYTES, pool_spill_bytes, RELOAD, 64ll << 30, 0, 1ll << 50,                    \
	  "bytes of all pools' files (pool_spill)")                                                \
	X(POOL_SPILL_BYTES_PER_UID, pool_spill_bytes_per_uid, RELOAD, 16ll << 30, 0, 1ll << 50,    \
	  "one user's such bytes")                                                                 \
	X(POOL_IDLE_S, pool_idle_s, RELOAD, 3600, 0, 1 << 30,                                      \
	  "s until a pool that nobody has open is dropped; 0: never")                              \
	X(CACHE_BYTES, cache_bytes, RESTART, 4ll << 30, 0, 1ll << 50,                              \
	  "bytes of compiled code on disk; what was not used for longest goes first")              \
	X(CACHE_BYTES_PER_UID, cache_bytes_per_uid, RESTART, 1ll << 30, 0, 1ll << 50,              \
	  "bytes of compiled code that one user was the first to ask for")                         \
	X(FENCE_MS, fence_ms, RELOAD, 30000, 1, 3600000,                                           \
	  "ms, the longest that a run may wait for its fences")                                    \
	X(FENCED_SESSIONS, fenced_sessions, RELOAD, 24, 1, 1024,                                   \
	  "sessions with runs that wait for fences on the device, each on one of its few "         \
	  "hardware queues (32 on NVIDIA)")                                                        \
	X(FENCED_SESSIONS_PER_UID, fenced_sessions_per_uid, RELOAD, 8, 1, 1024,                    \
	  "one user's such sessions")                                                              \
	X(LOOP_ENTRIES, loop_entries, RELOAD, 4096, 0, 1 << 24,                                    \
	  "elements of index tensors that are checked on the loop itself; a run with more is "     \
	  "checked on another thread")

enum limit_when { RELOAD, RESTART };

enum limit {
#define LIMIT_ENUM(ID, key, when, value, least, most, help) LIMIT_##ID,
	LIMITS(LIMIT_ENUM)
#undef LIMIT_ENUM
		N_LIMITS
};

struct limits {
	uint64_t value[N_LIMITS];
	uint64_t hits[N_LIMITS];
};

/* The configuration's key. */
const char *limit_name(enum limit limit);

/* Writes out the defaults that are 0, for a process whose RLIMIT_NOFILE is settled. @memory_bytes:
 * of the device that buffers lie on. @keeps_code: it has a descriptor of every kernel that is loaded */
void limits_resolve(struct limits *limits, uint64_t memory_bytes, bool keeps_code);

/* RAM, bytes. */
uint64_t limits_host_memory(void);

/* 1 when @used exceeds the limit, and counts the hit. */
static inline int limit_exceeded(struct limits *limits, enum limit limit, uint64_t used)
{
	if (used <= limits->value[limit])
		return 0;
	limits->hits[limit]++;
	return 1;
}

#endif
