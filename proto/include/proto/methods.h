/* SPDX-License-Identifier: MIT */
/*
 * methods.h: every remote method, once, by what it is about. Dispatch tables, names and PROTOCOL.md's
 * table come from these lists.
 *
 * X(ID, wire name, served by, fds in, fds out, params struct, result struct)
 *
 * served by: FRONT answers on the listening socket's connections, WORKER on the direct socket that
 * open_device hands out, BOTH on either, CONTROL between a front and its worker only.
 */
#ifndef PROTO_METHODS_H
#define PROTO_METHODS_H

/* The daemon and its devices. */
#define PROTO_DEVICE_METHODS(X)                                                                    \
	X(HELLO, "hello", FRONT, 0, 0, hello_params, hello_result)                                 \
	X(PING, "ping", BOTH, 0, 0, empty, empty)                                                  \
	X(STATUS, "status", FRONT, 0, 1, empty, json_result)                                       \
	X(DEVICES, "devices", FRONT, 0, 0, empty, devices_result)                                  \
	X(OPEN_DEVICE, "open_device", FRONT, 0, 1, open_device_params, open_device_result)

/* What runs work on and wait for. */
#define PROTO_MEMORY_METHODS(X)                                                                    \
	X(BUFFER_CREATE, "buffer_create", WORKER, 0, 1, buffer_create_params, buffer_result)       \
	X(BUFFER_IMPORT, "buffer_import", WORKER, 1, 0, buffer_import_params, buffer_result)       \
	X(BUFFER_RELEASE, "buffer_release", WORKER, 0, 0, buffer_release_params, empty)            \
	X(EVENT_IMPORT, "event_import", WORKER, 0, 0, event_import_params, event_result)           \
	X(EVENT_RELEASE, "event_release", WORKER, 0, 0, event_release_params, empty)

#define PROTO_RUN_METHODS(X)                                                                       \
	X(PLAN, "plan", WORKER, 0, 0, plan_params, plan_result)                                    \
	X(PLAN_RELEASE, "plan_release", WORKER, 0, 0, plan_release_params, empty)                  \
	X(EXPLAIN, "explain", WORKER, 0, 1, plan_params, json_result)                              \
	X(RUN, "run", WORKER, 0, 0, run_params, run_result)                                        \
	X(CANCEL, "cancel", WORKER, 0, 0, cancel_params, empty)                                    \
	X(TRACE, "trace", WORKER, 0, 1, empty, json_result)                                        \
	X(INJECT, "inject", WORKER, 0, 0, inject_params, empty)

/* For clients that launch by themselves. */
#define PROTO_LOCAL_METHODS(X)                                                                     \
	X(LOCAL_PLAN, "local_plan", WORKER, 0, 0, plan_params, local_plan_result)                  \
	X(CODE, "code", WORKER, 0, 1, code_params, code_result)                                    \
	X(LOCAL_RUNS, "local_runs", WORKER, 0, 0, local_runs_params, local_runs_result)

/* Which kernels there are, and their times. */
#define PROTO_KERNEL_METHODS(X)                                                                    \
	X(REGISTRY_EXPORT, "registry_export", WORKER, 0, 1, registry_export_params, json_result)   \
	X(REGISTRY_IMPORT, "registry_import", WORKER, 1, 0, empty, registry_result)                \
	X(REGISTRY_LOAD, "registry_load", WORKER, 1, 0, registry_set_params, registry_result)      \
	X(REGISTRY_UNLOAD, "registry_unload", WORKER, 0, 0, registry_set_params, registry_result)  \
	X(REGISTRY_GET, "registry_get", WORKER, 0, 1, registry_kernel_params, json_result)         \
	X(REGISTRY_SET_PRIORITY, "registry_set_priority", WORKER, 0, 0, registry_priority_params,  \
	  registry_result)                                                                         \
	X(REGISTRY_LIFT, "registry_lift", WORKER, 0, 0, registry_kernel_params, registry_result)   \
	X(REGISTRY_FORGET, "registry_forget", WORKER, 0, 0, registry_forget_params,                \
	  registry_result)                                                                         \
	X(TUNE, "tune", WORKER, 0, 0, tune_params, tune_result)                                    \
	X(CENSUS, "census", WORKER, 0, 1, empty, json_result)

/* Pages that outlive their users. */
#define PROTO_POOL_METHODS(X)                                                                      \
	X(POOL_OPEN, "pool_open", FRONT, 0, 1, pool_open_params, pool_open_result)                 \
	X(POOL_CLOSE, "pool_close", FRONT, 0, 0, pool_params, empty)                               \
	X(POOL_LEASE, "pool_lease", FRONT, 0, 0, pool_lease_params, pool_pages)                    \
	X(POOL_SEAL, "pool_seal", FRONT, 0, 0, pool_seal_params, pool_pages)                       \
	X(POOL_FIND, "pool_find", FRONT, 0, 0, pool_find_params, pool_pages)                       \
	X(POOL_GIVE_BACK, "pool_give_back", FRONT, 0, 0, pool_give_back_params, empty)             \
	X(POOL_DROP, "pool_drop", FRONT, 0, 0, pool_drop_params, empty)                            \
	X(POOL_SHARE, "pool_share", FRONT, 0, 0, pool_share_params, pool_share_result)

/* Between a front and its worker. */
#define PROTO_CONTROL_METHODS(X)                                                                   \
	X(WORKER_READY, "worker_ready", CONTROL, 0, 1, worker_ready_params, json_result)           \
	X(WORKER_ATTACH, "worker_attach", CONTROL, 1, 0, worker_attach_params, empty)              \
	X(WORKER_STATUS, "worker_status", CONTROL, 0, 1, empty, json_result)                       \
	X(WORKER_DRAIN, "worker_drain", CONTROL, 0, 0, empty, empty)                               \
	X(WORKER_RESTORE, "worker_restore", CONTROL, 1, 0, empty, empty)                           \
	X(WORKER_MEMORY, "worker_memory", CONTROL, 0, 1, worker_memory_params, empty)              \
	X(WORKER_CLEAR, "worker_clear", CONTROL, 1, 0, worker_clear_params, empty)                 \
	X(COMPILE, "compile", CONTROL, 0, 1, compile_params, compile_result)                       \
	X(COMPILE_CANCEL, "compile_cancel", CONTROL, 0, 0, compile_cancel_params, empty)           \
	X(TUNED_RESULT, "tuned_result", CONTROL, 0, 0, measured, empty)                            \
	X(REGISTRY_CHANGE, "registry_change", CONTROL, 1, 0, registry_change_params,               \
	  registry_result)

#define PROTO_METHODS(X)                                                                           \
	PROTO_DEVICE_METHODS(X)                                                                    \
	PROTO_MEMORY_METHODS(X)                                                                    \
	PROTO_RUN_METHODS(X)                                                                       \
	PROTO_LOCAL_METHODS(X)                                                                     \
	PROTO_KERNEL_METHODS(X)                                                                    \
	PROTO_POOL_METHODS(X)                                                                      \
	PROTO_CONTROL_METHODS(X)

enum proto_server { PROTO_FRONT = 1, PROTO_WORKER = 2, PROTO_BOTH = 3, PROTO_CONTROL = 4 };

enum proto_method {
#define PROTO_METHOD_ENUM(ID, name, server, fds_in, fds_out, params, result) PROTO_##ID,
	PROTO_METHODS(PROTO_METHOD_ENUM)
#undef PROTO_METHOD_ENUM
		PROTO_N_METHODS
};

#endif
