/* SPDX-License-Identifier: MIT */
/* config_keys.c: one table of keys an object. */
#include "config_keys.h"

#define END                                                                                        \
	{                                                                                          \
		NULL, 0, 0, 0, 0, 0, NULL, NULL                                                    \
	}

#define DEVICE(member) offsetof(struct config_device, member)
static const struct key device_keys[] = {
	{"backend", KEY_STRING, RESTART, DEVICE(backend), 1,
	 sizeof(((struct config_device *)0)->backend), NULL,
	 "cpu, cuda (NVIDIA), hip (AMD) or fake (for tests)"},
	{"name", KEY_STRING, RESTART, DEVICE(name), 1, PROTO_NAME_BYTES, NULL,
	 "what people call it; without it the backend's own name"},
	{"cpu_level", KEY_STRING, RESTART, DEVICE(cpu_level), 1, 32, NULL,
	 "cpu: the best level to use, as fmhactl archs names them; without it the machine's best"},
	{"index", KEY_U32, RESTART, DEVICE(index), 0, 255, NULL,
	 "cuda, hip: the driver's number of the device"},
	{"pci", KEY_STRING, RESTART, DEVICE(pci), 1, PCI_BYTES, NULL,
	 "cuda, hip: the device's address on the PCI bus, such as 0000:1b:00.0; goes before index"},
	{"threads", KEY_U32, RESTART, DEVICE(threads), 0, 4096, NULL,
	 "cpu: threads that compute; 0: one a core that fmhad may use"},
	{"allow_faults", KEY_BOOL, RESTART, DEVICE(allow_faults), 0, 1, NULL,
	 "fake: clients may ask for faults"},
	{"stall_ms", KEY_U32, RESTART, DEVICE(stall_ms), 50, 3600000, NULL,
	 "ms in which no task of a launch ends until the device counts as hanging"},
	{"queue_depth", KEY_U32, RESTART, DEVICE(queue_depth), 1, 64, NULL,
	 "launches of one connection that the device has at a time"},
	{"roof_gbs", KEY_U32, RESTART, DEVICE(roof_gbs), 0, UINT32_MAX, NULL,
	 "10^9 bytes a second of its memory that shares of the roof are of, as fmhactl bench "
	 "measures them; 0: by clock and width of the bus where the driver tells them"},
	{"roof_gflops_f32", KEY_U32, RESTART, DEVICE(roof_gflops_f32), 0, UINT32_MAX, NULL,
	 "10^9 operations a second on float32, likewise; 0: by clock and arch"},
	{"roof_gflops_f16", KEY_U32, RESTART, DEVICE(roof_gflops_f16), 0, UINT32_MAX, NULL,
	 "likewise on float16 and bfloat16"},
	{"roof_gflops_fp8", KEY_U32, RESTART, DEVICE(roof_gflops_fp8), 0, UINT32_MAX, NULL,
	 "likewise on fp8"},
	END,
};

#define PRIORITY(member) offsetof(struct config_priority, member)
static const struct key priority_keys[] = {
	{"uid", KEY_U32, RELOAD, PRIORITY(uid), 0, NO_UID - 1, NULL, "the user's number"},
	{"weight", KEY_U32, RELOAD, PRIORITY(weight), 1, 100, NULL,
	 "the user's share of a busy device in proportion to the others'; who is not named has 1; "
	 "a "
	 "reload counts from the next device that the user opens"},
	END,
};

#define SUPERVISION(member) offsetof(struct config_supervision, member)
static const struct key supervision_keys[] = {
	{"heartbeat_ms", KEY_U32, RELOAD, SUPERVISION(heartbeat_ms), 10, 3600000, NULL,
	 "ms between two questions to a worker that has clients"},
	{"heartbeat_timeout_ms", KEY_U32, RELOAD, SUPERVISION(heartbeat_timeout_ms), 50, 3600000,
	 NULL, "ms of silence after which a worker is killed; not less than heartbeat_ms"},
	{"start_timeout_ms", KEY_U32, RELOAD, SUPERVISION(start_timeout_ms), 100, 3600000, NULL,
	 "ms from a worker's start until it is ready"},
	{"restart_ms", KEY_U32, RELOAD, SUPERVISION(restart_ms), 1, 60000, NULL,
	 "ms of pause after a start that failed; doubles up to 10 s, and up to 5 minutes after 20 "
	 "in a row"},
	{"quarantine_deaths", KEY_U32, RESTART, SUPERVISION(quarantine_deaths), 1, 1000, NULL,
	 "workers that one kernel may end within quarantine_s before it is no longer used"},
	{"quarantine_s", KEY_U32, RESTART, SUPERVISION(quarantine_s), 1, 86400, NULL,
	 "seconds for which those deaths are counted, and for which the kernel is not used"},
	{"drain_ms", KEY_U32, RELOAD, SUPERVISION(drain_ms), 0, 600000, NULL,
	 "ms that what is in flight gets after SIGTERM"},
	{"status_ms", KEY_U32, RELOAD, SUPERVISION(status_ms), 10, 60000, NULL,
	 "ms for which an answer to fmhactl status waits for a worker"},
	END,
};

#define COMPILE(member) offsetof(struct config_compile, member)
static const struct key compile_keys[] = {
	{"cache", KEY_STRING, RESTART, COMPILE(cache), 1, CONFIG_FILE_BYTES, NULL,
	 "folder of compiled code; without it systemd's CacheDirectory, /var/cache/fmhad, or a "
	 "user's $XDG_CACHE_HOME/fmhad"},
	{"layer", KEY_STRING, RESTART, COMPILE(layer), 1, CONFIG_FILE_BYTES, NULL,
	 "a second cache below it that is only read: a folder, or a pack of fmhactl build"},
	{"sources", KEY_STRING, RESTART, COMPILE(sources), 1, CONFIG_FILE_BYTES, NULL,
	 "folder of the kernel sources; without it where they are installed"},
	{"helper", KEY_STRING, RESTART, COMPILE(helper), 1, CONFIG_FILE_BYTES, NULL,
	 "the program that compiles; without it the installed fmhad-compile"},
	{"clang", KEY_STRING, RESTART, COMPILE(clang), 1, CONFIG_FILE_BYTES, NULL,
	 "the clang that compiles for AMD GPUs; without it the first found"},
	{"linker", KEY_STRING, RESTART, COMPILE(linker), 1, CONFIG_FILE_BYTES, NULL,
	 "the ld.lld that links what that clang has compiled, for a clang without one that knows "
	 "AMD GPUs; without it clang links"},
	{"library_path", KEY_STRING, RESTART, COMPILE(library_path), 1, CONFIG_FILE_BYTES, NULL,
	 "LD_LIBRARY_PATH of the helper, where NVRTC or hipRTC is not where the linker looks"},
	{"jobs", KEY_U32, RESTART, COMPILE(jobs), 0, 256, NULL,
	 "builds at a time, and one more for a user who has none running; 0: as many as cores"},
	{"deadline_ms", KEY_U32, RESTART, COMPILE(deadline_ms), 100, 3600000, NULL,
	 "ms that one build may take"},
	END,
};

#define TUNING(member) offsetof(struct config_tuning, member)
static const struct key tuning_keys[] = {
	{"state", KEY_STRING, RESTART, TUNING(state), 1, CONFIG_FILE_BYTES, NULL,
	 "folder of measured times and what administrators changed; without it systemd's "
	 "StateDirectory, /var/lib/fmhad, or a user's $XDG_STATE_HOME/fmhad, and tuned in it"},
	{"system", KEY_STRING, RESTART, TUNING(system), 1, CONFIG_FILE_BYTES, NULL,
	 "a second such folder below it that is only read; without it the installed one"},
	{"automatic", KEY_BOOL, RELOAD, TUNING(automatic), 0, 1, NULL,
	 "measure what clients use, while a device is idle"},
	{"idle_s", KEY_U32, RELOAD, TUNING(idle_s), 0, 86400, NULL,
	 "seconds for which a device is idle before that begins"},
	{"share", KEY_U32, RELOAD, TUNING(share), 1, 100, NULL,
	 "percent of the time that is spent on it then, at most"},
	{"launch_ms", KEY_U32, RELOAD, TUNING(launch_ms), 1, 10000, NULL,
	 "ms; what is estimated or seen to take longer is not measured by itself"},
	{"memory_bytes", KEY_U64, RESTART, TUNING(memory_bytes), 1 << 20, (int64_t)1 << 40, NULL,
	 "bytes of the device, for a problem that is measured, at most"},
	END,
};

static const struct key limit_keys[] = {
#define LIMIT_KEY(ID, key, when, value, least, most, help)                                         \
	{#key, KEY_U64, when, sizeof(uint64_t) * LIMIT_##ID, least, most, NULL, help},
	LIMITS(LIMIT_KEY)
#undef LIMIT_KEY
		END,
};

#define CONFIG(member) offsetof(struct config, member)
const struct key config_keys[] = {
	{"socket", KEY_STRING, RESTART, CONFIG(socket), 1, CONFIG_PATH_BYTES, NULL,
	 "path of the socket, unless systemd hands one over; without it /run/fmhad/fmhad.sock, or "
	 "$XDG_RUNTIME_DIR/fmhad.sock for a user's own daemon"},
	{"socket_mode", KEY_MODE, RESTART, CONFIG(socket_mode), 0, 0777, NULL,
	 "its mode, octal; without it 0660 with a socket_group, else 0600"},
	{"socket_group", KEY_STRING, RESTART, CONFIG(socket_group), 1, 32, NULL,
	 "its group; without it the process's own"},
	{"metrics_socket", KEY_STRING, RESTART, CONFIG(metrics_socket), 1, CONFIG_PATH_BYTES, NULL,
	 "path of a Unix socket at which GET /metrics is answered over HTTP, with socket_mode and "
	 "socket_group; without it there is none"},
	{"pool_spill", KEY_STRING, RESTART, CONFIG(pool_spill), 1, CONFIG_FILE_BYTES, NULL,
	 "folder, the daemon's alone, for copies of pools' pages, which outlive the daemon; "
	 "without it "
	 "there are none"},
	{"log_level", KEY_LEVEL, RELOAD, CONFIG(log_level), 0, 0, NULL, "what is logged"},
	{"loop_times", KEY_BOOL, RESTART, CONFIG(loop_times), 0, 1, NULL,
	 "measure the CPU time that each method takes of a loop, shown by fmhactl status --json as "
	 "\"loop\"; costs two system calls a request"},
	{"admin_uids", KEY_UIDS, RELOAD, 0, 0, NO_UID - 1, NULL,
	 "users who see everybody's sessions and may change kernels, besides root and the daemon's "
	 "own"},
	{"priorities", KEY_PRIORITIES, RELOAD, 0, 0, 0, priority_keys,
	 "shares of a busy device, by user; each element has both keys"},
	{"supervision", KEY_OBJECT, RELOAD, CONFIG(supervision), 0, 0, supervision_keys,
	 "how workers are watched"},
	{"compile", KEY_OBJECT, RESTART, CONFIG(compile), 0, 0, compile_keys,
	 "how kernels for GPUs are compiled"},
	{"tuning", KEY_OBJECT, RELOAD, CONFIG(tuning), 0, 0, tuning_keys,
	 "how kernels are measured, and where that is remembered"},
	{"limits", KEY_OBJECT, RELOAD, CONFIG(limits), 0, 0, limit_keys,
	 "what one connection, one user and all of them together may take; fmhactl status --limits "
	 "shows the times that each was hit"},
	{"devices", KEY_DEVICES, RESTART, 0, 0, 0, device_keys,
	 "the devices to serve, 1 to 16; without it the CPU and every GPU whose driver shows "
	 "itself"},
	END,
};

const char *limit_name(enum limit limit)
{
	return limit_keys[limit].name;
}
