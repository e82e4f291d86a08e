/* SPDX-License-Identifier: MIT */
/*
 * limits.h: what one client, one user and all of them together may take. Every limit is a key of
 * the configuration's "limits" and has a counter of the times it was hit in `fmhactl status`.
 */
#ifndef FMHAD_BASE_LIMITS_H
#define FMHAD_BASE_LIMITS_H

#include <stdint.h>

/*
 * X(ID, key, default, least, most). "memory" defaults of 0 become parts of the machine's memory.
 * spin_us: how long a process looks for the next request before it sleeps; 0: not at all
 * (proto/spin.h).
 */
#define LIMITS(X)                                                                                  \
	X(CONNECTIONS, connections, 1024, 1, 1 << 20)                                              \
	X(CONNECTIONS_PER_UID, connections_per_uid, 64, 1, 1 << 20)                                \
	X(SESSIONS_PER_UID, sessions_per_uid, 128, 1, 1 << 20)                                     \
	X(HELLO_MS, hello_ms, 5000, 10, 3600000)                                                   \
	X(FRAME_BYTES, frame_bytes, 65536, 4096, 65536)                                            \
	X(FRAME_BYTES_BEFORE_HELLO, frame_bytes_before_hello, 4096, 64, 65536)                     \
	X(FDS_PER_MESSAGE, fds_per_message, 4, 1, 64)                                              \
	X(FDS_PER_CONNECTION, fds_per_connection, 64, 1, 4096)                                     \
	X(FDS_PER_UID, fds_per_uid, 256, 1, 1 << 20)                                               \
	X(RESERVED_FDS, reserved_fds, 64, 16, 1 << 16)                                             \
	X(IN_FLIGHT_PER_CONNECTION, in_flight_per_connection, 64, 1, 1 << 16)                      \
	X(IN_FLIGHT_PER_UID, in_flight_per_uid, 256, 1, 1 << 20)                                   \
	X(FRAMES_PER_WAKE, frames_per_wake, 64, 1, 65536)                                          \
	X(WAKE_US, wake_us, 1000, 10, 1000000)                                                     \
	X(SPIN_US, spin_us, 50, 0, 1000)                                                           \
	X(OUTPUT_HARD_BYTES, output_hard_bytes, 4 << 20, 65536, 1 << 30)                           \
	X(OUTPUT_SOFT_BYTES, output_soft_bytes, 1 << 20, 4096, 1 << 30)                            \
	X(OUTPUT_SOFT_MS, output_soft_ms, 10000, 10, 3600000)                                      \
	X(OUTPUT_BYTES_BEFORE_HELLO, output_bytes_before_hello, 16384, 1024, 1 << 20)              \
	X(BUFFERS_PER_CONNECTION, buffers_per_connection, 4096, 1, 1 << 20)                        \
	X(BUFFERS_PER_UID, buffers_per_uid, 16384, 1, 1 << 22)                                     \
	X(EVENTS_PER_CONNECTION, events_per_connection, 256, 1, 1 << 20)                           \
	X(EVENTS_PER_UID, events_per_uid, 1024, 1, 1 << 22)                                        \
	X(PLANS_PER_CONNECTION, plans_per_connection, 4096, 1, 1 << 20)                            \
	X(PLANS_PER_UID, plans_per_uid, 16384, 1, 1 << 22)                                         \
	X(MEMORY_BYTES, memory_bytes, 0, 0, 1ll << 50)                                             \
	X(MEMORY_BYTES_PER_UID, memory_bytes_per_uid, 0, 0, 1ll << 50)

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

/* 1 when @used exceeds the limit, and counts the hit. */
static inline int limit_exceeded(struct limits *limits, enum limit limit, uint64_t used)
{
	if (used <= limits->value[limit])
		return 0;
	limits->hits[limit]++;
	return 1;
}

#endif
