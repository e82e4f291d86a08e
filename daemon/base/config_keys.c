/* SPDX-License-Identifier: MIT */
/*
 * config_keys.c: one table of keys an object. A key is called as its member of @owner, and a text may
 * have as many bytes as there is room in it.
 */
#include "config_keys.h"

#define ROOM(owner, member) sizeof(((struct owner *)NULL)->member)
#define KEY(owner, member, kind, when, least, most, keys, help)                                    \
	{                                                                                          \
		.name = #member, kind, when, offsetof(struct owner, member), least, most, keys,    \
		help                                                                               \
	}
#define TEXT(owner, member, when, help)                                                            \
	KEY(owner, member, KEY_STRING, when, 1, ROOM(owner, member), NULL, help)
#define NUMBER(owner, member, when, least, most, help)                                             \
	KEY(owner, member, ROOM(owner, member) == sizeof(uint64_t) ? KEY_U64 : KEY_U32, when,      \
	    least, most, NULL, help)
#define SWITCH(owner, member, when, help) KEY(owner, member, KEY_BOOL, when, 0, 1, NULL, help)
#define OBJECT(owner, member, when, keys, help)                                                    \
	KEY(owner, member, KEY_OBJECT, when, 0, 0, keys, help)
#define END                                                                                        \
	{                                                                                          \
		NULL, 0, 0, 0, 0, 0, NULL, NULL                                                    \
	}

static const struct key device_keys[] = {
	TEXT(config_device, backend, RESTART, "cpu, cuda (NVIDIA), hip (AMD) or fake (for tests)"),
	TEXT(config_device, name, RESTART,
	     "what people call it; without it the backend's own name"),
	TEXT(config_device, cpu_level, RESTART,
	     "cpu: the best level to use, as fmhactl archs names them; without it the machine's "
	     "best"),
	NUMBER(config_device, index, RESTART, 0, 255,
	       "cuda, hip: the driver's number of the device"),
	TEXT(config_device, pci, RESTART,
	     "cuda, hip: the device's address on the PCI bus, such as 0000:1b:00.0; goes before "
	     "index"),
	NUMBER(config_device, threads, RESTART, 0, 4096,
	       "cpu: threads that compute; 0: one a core that fmhad may use"),
	SWITCH(config_device, allow_faults, RESTART, "fake: clients may ask for faults"),
	NUMBER(config_device, stall_ms, RESTART, 50, 3600000,
	       "ms in which no task of a launch ends until the device counts as hanging"),
	NUMBER(config_device, queue_depth, RESTART, 1, 64,
	       "launches of one connection that the device has at a time"),
	NUMBER(config_device, roof_gbs, RESTART, 0, UINT32_MAX,
	       "10^9 bytes a second of its memory that shares of the roof are of, as fmhactl bench "
	       "measures them; 0: by clock and width of the bus where the driver tells them"),
	NUMBER(config_device, roof_gflops_f32, RESTART, 0, UINT32_MAX,
	       "10^9 operations a second on float32, likewise; 0: by clock and arch"),
	NUMBER(config_device, roof_gflops_f16, RESTART, 0, UINT32_MAX,
	       "likewise on float16 and bfloat16"),
	NUMBER(config_device, roof_gflops_fp8, RESTART, 0, UINT32_MAX, "likewise on fp8"),
	END,
};

static const struct key priority_keys[] = {
	NUMBER(config_priority, uid, RELOAD, 0, NO_UID - 1, "the user's number"),
	NUMBER(config_priority, weight, RELOAD, 1, 100,
	       "the user's share of a busy device in proportion to the others'; who is not named "
	       "has 1; a reload counts from the next device that the user opens"),
	END,
};

static const struct key supervision_keys[] = {
	NUMBER(config_supervision, heartbeat_ms, RELOAD, 10, 3600000,
	       "ms between two questions to a worker that has clients"),
	NUMBER(config_supervision, heartbeat_timeout_ms, RELOAD, 50, 3600000,
	       "ms of silence after which a worker is killed; not less than heartbeat_ms"),
	NUMBER(config_supervision, start_timeout_ms, RELOAD, 100, 3600000,
	       "ms from a worker's start until it is ready"),
	NUMBER(config_supervision, restart_ms, RELOAD, 1, 60000,
	       "ms of pause after a start that failed; doubles up to 10 s, and up to 5 minutes "
	       "after 20 in a row"),
	NUMBER(config_supervision, quarantine_deaths, RESTART, 1, 1000,
	       "workers that one kernel may end within quarantine_s before it is no longer used"),
	NUMBER(config_supervision, quarantine_s, RESTART, 1, 86400,
	       "seconds for which those deaths are counted, and for which the kernel is not used"),
	NUMBER(config_supervision, drain_ms, RELOAD, 0, 600000,
	       "ms that what is in flight gets after SIGTERM"),
	NUMBER(config_supervision, status_ms, RELOAD, 10, 60000,
	       "ms for which an answer to fmhactl status waits for a worker"),
	END,
};

static const struct key compile_keys[] = {
	TEXT(config_compile, cache, RESTART,
	     "folder of compiled code; without it systemd's CacheDirectory, /var/cache/fmhad, or a "
	     "user's $XDG_CACHE_HOME/fmhad"),
	TEXT(config_compile, layer, RESTART,
	     "a second cache below it that is only read: a folder, or a pack of fmhactl build"),
	TEXT(config_compile, sources, RESTART,
	     "folder of the kernel sources; without it where they are installed"),
	TEXT(config_compile, helper, RESTART,
	     "the program that compiles; without it the installed fmhad-compile"),
	TEXT(config_compile, clang, RESTART,
	     "the clang that compiles for AMD GPUs; without it the first found"),
	TEXT(config_compile, linker, RESTART,
	     "the ld.lld that links what that clang has compiled, for a clang without one that "
	     "knows AMD GPUs; without it clang links"),
	TEXT(config_compile, library_path, RESTART,
	     "LD_LIBRARY_PATH of the helper, where NVRTC or hipRTC is not where the linker looks"),
	NUMBER(config_compile, jobs, RESTART, 0, 256,
	       "builds at a time, and one more for a user who has none running; 0: as many as "
	       "cores"),
	NUMBER(config_compile, deadline_ms, RESTART, 100, 3600000, "ms that one build may take"),
	END,
};

static const struct key tuning_keys[] = {
	TEXT(config_tuning, state, RESTART,
	     "folder of measured times and what administrators changed; without it systemd's "
	     "StateDirectory, /var/lib/fmhad, or a user's $XDG_STATE_HOME/fmhad, and tuned in it"),
	TEXT(config_tuning, system, RESTART,
	     "a second such folder below it that is only read; without it the installed one"),
	SWITCH(config_tuning, automatic, RELOAD,
	       "measure what clients use, while a device is idle"),
	NUMBER(config_tuning, idle_s, RELOAD, 0, 86400,
	       "seconds for which a device is idle before that begins"),
	NUMBER(config_tuning, share, RELOAD, 1, 100,
	       "percent of the time that is spent on it then, at most"),
	NUMBER(config_tuning, launch_ms, RELOAD, 1, 10000,
	       "ms; what is estimated or seen to take longer is not measured by itself"),
	NUMBER(config_tuning, memory_bytes, RESTART, 1 << 20, (int64_t)1 << 40,
	       "bytes of the device, for a problem that is measured, at most"),
	END,
};

static const struct key limit_keys[] = {
#define LIMIT_KEY(ID, key, when, value, least, most, help)                                         \
	{#key, KEY_U64, when, sizeof(uint64_t) * LIMIT_##ID, least, most, NULL, help},
	LIMITS(LIMIT_KEY)
#undef LIMIT_KEY
		END,
};

const struct key config_keys[] = {
	TEXT(config, socket, RESTART,
	     "path of the socket, unless systemd hands one over; without it /run/fmhad/fmhad.sock, "
	     "or $XDG_RUNTIME_DIR/fmhad.sock for a user's own daemon"),
	KEY(config, socket_mode, KEY_MODE, RESTART, 0, 0777, NULL,
	    "its mode, octal; without it 0660 with a socket_group, else 0600"),
	TEXT(config, socket_group, RESTART, "its group; without it the process's own"),
	TEXT(config, metrics_socket, RESTART,
	     "path of a Unix socket at which GET /metrics is answered over HTTP, with socket_mode "
	     "and socket_group; without it there is none"),
	TEXT(config, pool_spill, RESTART,
	     "folder, the daemon's alone, for copies of pools' pages, which outlive the daemon; "
	     "without it there are none"),
	KEY(config, log_level, KEY_LEVEL, RELOAD, 0, 0, NULL, "what is logged"),
	SWITCH(config, loop_times, RESTART,
	       "measure the CPU time that each method takes of a loop, shown by fmhactl status "
	       "--json as \"loop\"; costs two system calls a request"),
	KEY(config, admin_uids, KEY_UIDS, RELOAD, 0, NO_UID - 1, NULL,
	    "users who see everybody's sessions and may change kernels, besides root and the "
	    "daemon's own"),
	KEY(config, priorities, KEY_PRIORITIES, RELOAD, 0, 0, priority_keys,
	    "shares of a busy device, by user; each element has both keys"),
	OBJECT(config, supervision, RELOAD, supervision_keys, "how workers are watched"),
	OBJECT(config, compile, RESTART, compile_keys, "how kernels for GPUs are compiled"),
	OBJECT(config, tuning, RELOAD, tuning_keys,
	       "how kernels are measured, and where that is remembered"),
	OBJECT(config, limits, RELOAD, limit_keys,
	       "what one connection, one user and all of them together may take; fmhactl status "
	       "--limits shows the times that each was hit"),
	KEY(config, devices, KEY_DEVICES, RESTART, 0, 0, device_keys,
	    "the devices to serve, 1 to 16; without it the CPU and every GPU whose driver shows "
	    "itself"),
	END,
};

const char *limit_name(enum limit limit)
{
	return limit_keys[limit].name;
}
