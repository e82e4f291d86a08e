/* SPDX-License-Identifier: MIT */
/* device_impl.h: what a backend implements. See device.h for what each function promises. */
#ifndef FMHAD_DEVICE_IMPL_H
#define FMHAD_DEVICE_IMPL_H

#include <pthread.h>
#include <stdatomic.h>

#include <device/device.h>

/* Of a device that loads the code of its kernels, and may unload it. */
struct device_code_ops {
	int (*prepare_tables)(struct device *device, struct device_waiter *waiter,
			      const struct device_kernel **ret_kernel, struct fmha_error *err);
	void (*place_tables)(const struct device *device, struct launch_record *record);
	const char *(*kernel_name)(const struct device_kernel *kernel);
	void (*forget)(struct device *device, struct device_waiter *waiter);
	int (*hold)(struct device *device, struct device_kernel *kernel, uint32_t uid,
		    bool *ret_first, struct fmha_error *err);
	bool (*drop)(struct device *device, struct device_kernel *kernel, uint32_t uid);
	const struct device_code *(*kernel_code)(const struct device_kernel *kernel);
	const struct device_code *(*find_code)(const struct device *device, const uint8_t *hash);
	void (*set_idle)(struct device *device, uint64_t most, uint64_t most_bytes);
	void (*unload_idle)(struct device *device);
	struct device_code_status (*status)(const struct device *device);
};

/* Of a device with memory of its own: what the host has goes there by copies. */
struct device_staging_ops {
	uint64_t (*cost)(const struct device *device, uint64_t bytes);
	int (*create)(struct device *device, uint64_t bytes, struct device_memory *ret_memory,
		      struct fmha_error *err);
	void (*free)(struct device *device, struct device_memory *memory);
	bool (*make_room)(struct device *device, uint64_t bytes);
};

struct device_ops {
	const char *backend;
	const struct device_code_ops *code;       /* NULL: its kernels are built in */
	const struct device_staging_ops *staging; /* NULL: it computes in the host's memory */
	/* Sets ops and info; device_open() fills in the rest of struct device. */
	int (*open)(const struct config_device *config, struct device **ret_device,
		    struct fmha_error *err);
	int (*trial)(uint32_t device,
		     const char *role); /* see device_trial(); NULL: it starts no processes */
	/* NULL: only opening shows what is wrong. */
	int (*check)(const struct config_device *config, struct fmha_error *err);
	void (*close)(struct device *device);
	void (*enter_thread)(struct device *device); /* NULL: nothing to do */
	/* Both may count on sizes far below 2^63. */
	uint64_t (*memory_cost)(const struct device *device,
				const struct device_memory_source *source, bool created);
	uint64_t (*workspace_cost)(const struct device *device, uint64_t bytes);
	int (*memory_create)(struct device *device, uint64_t size, struct device_memory *ret_memory,
			     int *ret_fd, struct fmha_error *err);
	/* NULL: it keeps no spare memory. */
	bool (*memory_take)(struct device *device, uint64_t size, struct device_memory *ret_memory,
			    int *ret_fd);
	void (*memory_refill)(struct device *device);
	int (*memory_import)(struct device *device, const struct device_memory_source *source,
			     struct device_memory *ret_memory, struct fmha_error *err);
	void (*memory_free)(struct device *device, struct device_memory *memory);
	/* NULL: none of it outlives the process. */
	int (*memory_clear)(struct device *device, struct device_memory *memory, uint64_t offset,
			    uint64_t bytes, struct fmha_error *err);
	int (*workspace_new)(struct device *device, uint64_t bytes,
			     struct device_memory *ret_memory, struct fmha_error *err);
	void (*workspace_free)(struct device *device, struct device_memory *memory);
	int (*find_kernel)(struct device *device, enum abi_family family, uint32_t dtype,
			   const union abi_args *args, struct plan_stage *stage,
			   const char **ret_why);
	int (*prepare)(struct device *device, const struct plan_stage *stage,
		       const union abi_args *args, struct device_waiter *waiter,
		       const struct device_kernel **ret_kernel, struct fmha_error *err);
	/* Both NULL: its fences need no code. */
	int (*prepare_words)(struct device *device, struct device_waiter *waiter,
			     const struct device_kernel **ret_kernel, struct fmha_error *err);
	int (*try_words)(struct device *device, const struct device_kernel *kernel,
			 struct fmha_error *err);
	/* NULL: it cannot use other processes' events. */
	int (*event_import)(struct device *device, const uint8_t *handle, uint32_t handle_bytes,
			    struct device_event **ret_event, struct fmha_error *err);
	void (*event_free)(struct device *device, struct device_event *event);
	/* NULL: no fences. */
	bool (*release_fences)(struct device *device, struct device_launch *launch);
	struct device_stream *(*stream_new)(struct device *device, uint32_t uid, uint32_t weight);
	void (*stream_free)(struct device *device, struct device_stream *stream);
	struct device_launch *(*launch_new)(struct device *device);
	void (*launch_free)(struct device *device, struct device_launch *launch);
	void (*submit)(struct device *device, struct device_launch *launch);
	bool (*run_here)(struct device *device, struct device_launch *launch);
	void (*cancel)(struct device *device, struct device_launch *launch);
	uint64_t (*stalled_ns)(struct device *device, struct device_launch *launch,
			       const char **ret_kernel);
	void (*trim)(struct device *device);
	/* On any thread, what takes long; NULL: nothing does. */
	void (*trim_memory)(struct device *device);
	/* NULL: the backend has no faults. */
	int (*inject)(struct device *device, const char *fault, uint32_t after,
		      struct fmha_error *err);
};

/* The head of every backend's own device struct. */
struct device {
	const struct device_ops *ops;
	struct device_info info;
	void (*wake)(void *owner);
	void (*soon)(void *owner, uint64_t from_ns,
		     uint64_t until_ns); /* NULL: nobody wants to know */
	void *owner;
	device_builder builder;
	device_unbuilder unbuilder;
	void *builder_worker;
	pthread_mutex_t mutex; /* done, error */
	struct device_launch *done, **done_tail;
	struct fmha_error error;
	atomic_bool failed;
	device_quarantine is_quarantined; /* NULL: nothing is */
	void *quarantine_worker;
};

/* Any thread: the launch has ended. */
void device_launch_done(struct device *device, struct device_launch *launch);

/* Any thread: the first error stays; see device_has_failed(). */
void device_fail(struct device *device, const struct fmha_error *error);

#define DEVICE_QUARANTINED "quarantined" /* why a device does not run a kernel */

/* @code: of a struct plan_stage. */
bool device_is_quarantined(const struct device *device, const char *kernel, uint64_t code);

/* Asks the worker's front for code; see device_builder. */
int device_request_build(struct device *device, struct device_build *build, struct fmha_error *err);
/* Takes the request back; see device_unbuilder. */
void device_cancel_build(struct device *device, struct device_build *build);

/* The name under which a module offers its struct device_ops. */
#define DEVICE_MODULE_SYMBOL "fmhad_device_ops"

extern const struct device_ops cpu_device_ops;
extern const struct device_ops fake_device_ops;

#endif
