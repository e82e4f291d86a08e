/* SPDX-License-Identifier: MIT */
/*
 * limits.h: what one client, one user and all of them together may take. Every limit is a key of
 * the configuration's "limits" and has a counter of the times it was hit in `fmhactl status`.
 */
#ifndef FMHAD_BASE_LIMITS_H
#define FMHAD_BASE_LIMITS_H

#include <stdint.h>

/*
 * X(ID, key, default, least, most). A default of 0 becomes what the machine offers: memory_bytes
 * and memory_bytes_per_uid parts of the device's memory, fds what RLIMIT_NOFILE leaves beside
 * reserved_fds, buffers half of vm.max_map_count. One user never has more than half of all fds.
 *
 * spin_us: how long a process looks for the next request before it sleeps; 0: not at all
 * (proto/spin.h). fence_ms: the longest that a run may wait for its fences. fenced_sessions: with
 * runs on the device that wait for fences, each on one of its few hardware queues (32 on NVIDIA).
 * loop_entries: elements of index tensors that are judged on the loop itself; a run with more is
 * judged on another thread. cache_bytes: of compiled code on disk; what was not used for longest
 * goes first.
 */
#define LIMITS(X)                                                                                  \
	X(CONNECTIONS, connections, 1024, 1, 1 << 20)                                              \
	X(CONNECTIONS_PER_UID, connections_per_uid, 64, 1, 1 << 20)                                \
	X(SESSIONS, sessions, 4096, 1, 1 << 20)                                                    \
	X(SESSIONS_PER_UID, sessions_per_uid, 128, 1, 1 << 20)                                     \
	X(HELLO_MS, hello_ms, 5000, 10, 3600000)                                                   \
	X(FRAME_BYTES, frame_bytes, 65536, 4096, 65536)                                            \
	X(FRAME_BYTES_BEFORE_HELLO, frame_bytes_before_hello, 4096, 64, 65536)                     \
	X(FDS_PER_MESSAGE, fds_per_message, 4, 1, 64)                                              \
	X(FDS_PER_CONNECTION, fds_per_connection, 64, 1, 4096)                                     \
	X(FDS, fds, 0, 0, 1 << 20)                                                                 \
	X(FDS_PER_UID, fds_per_uid, 512, 1, 1 << 20)                                               \
	X(RESERVED_FDS, reserved_fds, 64, 16, 1 << 16)                                             \
	X(IN_FLIGHT_PER_CONNECTION, in_flight_per_connection, 64, 1, 1 << 16)                      \
	X(IN_FLIGHT, in_flight, 65536, 1, 1 << 24)                                                 \
	X(IN_FLIGHT_PER_UID, in_flight_per_uid, 256, 1, 1 << 20)                                   \
	X(FRAMES_PER_WAKE, frames_per_wake, 64, 1, 65536)                                          \
	X(WAKE_US, wake_us, 1000, 10, 1000000)                                                     \
	X(SPIN_US, spin_us, 50, 0, 1000)                                                           \
	X(OUTPUT_HARD_BYTES, output_hard_bytes, 4 << 20, 65536, 1 << 30)                           \
	X(OUTPUT_SOFT_BYTES, output_soft_bytes, 1 << 20, 4096, 1 << 30)                            \
	X(OUTPUT_SOFT_MS, output_soft_ms, 10000, 10, 3600000)                                      \
	X(OUTPUT_BYTES_BEFORE_HELLO, output_bytes_before_hello, 16384, 1024, 1 << 20)              \
	X(BUFFERS_PER_CONNECTION, buffers_per_connection, 4096, 1, 1 << 20)                        \
	X(BUFFERS, buffers, 0, 0, 1 << 22)                                                         \
	X(BUFFERS_PER_UID, buffers_per_uid, 8192, 1, 1 << 22)                                      \
	X(EVENTS_PER_CONNECTION, events_per_connection, 256, 1, 1 << 20)                           \
	X(EVENTS, events, 4096, 1, 1 << 22)                                                        \
	X(EVENTS_PER_UID, events_per_uid, 1024, 1, 1 << 22)                                        \
	X(PLANS_PER_CONNECTION, plans_per_connection, 4096, 1, 1 << 20)                            \
	X(PLANS, plans, 65536, 1, 1 << 24)                                                         \
	X(PLANS_PER_UID, plans_per_uid, 16384, 1, 1 << 22)                                         \
	X(MEMORY_BYTES, memory_bytes, 0, 0, 1ll << 50)                                             \
	X(MEMORY_BYTES_PER_UID, memory_bytes_per_uid, 0, 0, 1ll << 50)                             \
	X(COMPILES, compiles, 4096, 1, 1 << 20)                                                    \
	X(COMPILES_PER_UID, compiles_per_uid, 1024, 1, 1 << 20)                                    \
	X(CACHE_BYTES, cache_bytes, 4ll << 30, 0, 1ll << 50)                                       \
	X(CACHE_BYTES_PER_UID, cache_bytes_per_uid, 1ll << 30, 0, 1ll << 50)                       \
	X(FENCE_MS, fence_ms, 30000, 1, 3600000)                                                   \
	X(FENCED_SESSIONS, fenced_sessions, 24, 1, 1024)                                           \
	X(FENCED_SESSIONS_PER_UID, fenced_sessions_per_uid, 8, 1, 1024)                            \
	X(LOOP_ENTRIES, loop_entries, 4096, 0, 1 << 24)

enum limit {
#define LIMIT_ENUM(ID, key, value, least, most) LIMIT_##ID,
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
 * of the device that buffers lie on */
void limits_resolve(struct limits *limits, uint64_t memory_bytes);

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
