/* SPDX-License-Identifier: MIT */
/*
 * local.h: what is behind fmha_local.h: the runtime that this process has loaded, code objects in its
 * contexts, and plans made of launch records.
 */
#ifndef CLIENT_LOCAL_H
#define CLIENT_LOCAL_H

#include <stdbool.h>
#include <stdint.h>

#include <fmha/fmha_local.h>
#include <kernels/launch.h>
#include <proto/messages.h>

/* ---- local_runtime.c ---- */

/* The functions that are used of either runtime; HIP's functions have the signatures of CUDA's. 0 is success. */
struct local_runtime {
	const char *name; /* "CUDA", "HIP" */
	int (*load)(void **ret_module, const void *image);
	int (*unload)(void *module);
	int (*function)(void **ret_function, void *module, const char *name);
	int (*launch)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
		      unsigned block_x, unsigned block_y, unsigned block_z, unsigned lds_bytes,
		      void *stream, void **parameters, void **extra);
	int (*clear)(uintptr_t at, unsigned char value, size_t bytes, void *stream);
	/* Either may be missing. */
	int (*is_capturing)(void *stream, int *ret_status);
	int (*exchange_capture_mode)(int *mode);
	/* CUDA only; the last three may be missing there, too. */
	int (*allow_lds)(void *function, int attribute, int value);
	int (*push)(void *context);
	int (*pop)(void **ret_context);
	launch_encoder encode;
	int (*load_function)(void *function);
	launch_launcher launch_with;
	const char *(*text)(int status); /* a static string, or NULL */
	bool keeps_image; /* a module reads the image that it was loaded from until it is unloaded */
};

/* @backend: of struct fmha_device_info. Return: 0 or FMHA_ENOTSUP. */
int local_runtime_find(const char *backend, const struct local_runtime **ret_runtime,
		       struct fmha_error *err);
/* The runtime's reason, as FMHA_EIO. */
int local_runtime_error(const struct local_runtime *runtime, int status, const char *what,
			struct fmha_error *err);

/* A code object in one context of this process: one for all plans that name its hash. */
struct local_code;

/* Gets the bytes of a code object, when no plan has them loaded yet. @ret_data: munmap()ed by the caller. */
typedef int (*local_fetch)(void *owner, const uint8_t hash[LAUNCH_HASH_BYTES], void **ret_data,
			   size_t *ret_bytes, struct fmha_error *err);

/* In the current context. @ret_code: given: local_code_put(). Others that want code wait meanwhile. */
int local_code_get(const struct local_runtime *runtime, const uint8_t hash[LAUNCH_HASH_BYTES],
		   local_fetch fetch, void *owner, struct local_code **ret_code,
		   struct fmha_error *err);
void local_code_put(struct local_code *code);
int local_code_function(struct local_code *code, const struct launch_record *record,
			void **ret_function, struct fmha_error *err);

/* Puts bound arguments on a stream. @other_keys: they are not those of the record. */
int local_launch(const struct local_runtime *runtime, const struct launch_record *record,
		 void *function, union abi_args *args, bool other_keys, void *stream,
		 struct fmha_error *err);

/* ---- local_version.c ---- */

/* The launches of a plan: nothing of them changes. */
struct local_version {
	struct local_version *older; /* in graphs, perhaps, and in runs of other threads */
	uint64_t version;
	uint32_t n_launches;
	struct {
		struct launch_record record;
		void *function;
		struct local_code *code;
		char family[FMHA_NAME_BYTES], kernel[FMHA_KERNEL_BYTES];
	} launches[PROTO_MAX_LAUNCHES];
};

struct fmha_local_plan {
	uint64_t process; /* process_token() when it was made */
	const struct local_runtime *runtime;
	/* Its user was told these, which every version fits. */
	uint64_t workspace_bytes, workspace_alignment;
	double flops;
	int32_t seqlen_k_least,
		seqlen_k_most; /* of a run that brings keys of its own; most 0: none may */
	uint32_t key_stride_unit;
	uint32_t n_tensors;
	struct proto_local_tensor tensors[FMHA_N_TENSORS];
	uint64_t n_runs;               /* atomic */
	struct local_version *current; /* atomic */
	struct local_refresh *refresh; /* local_refresh.c; NULL: it has no daemon */
};

/* @plan: whose runtime; @result: borrowed. @fetch: for the code that it names. @ret_version: given. */
int local_version_make(const struct fmha_local_plan *plan,
		       const struct proto_local_plan_result *result, local_fetch fetch, void *owner,
		       struct local_version **ret_version, struct fmha_error *err);
/* Takes NULL. Return: the older one. */
struct local_version *local_version_free(struct local_version *version);

/* Who is asked, and until when. */
struct local_source {
	struct fmha_device *device;
	int64_t deadline;
};
/* A local_fetch; @owner: struct local_source. */
int local_fetch_from_daemon(void *owner, const uint8_t hash[LAUNCH_HASH_BYTES], void **ret_data,
			    size_t *ret_bytes, struct fmha_error *err);

/* ---- local.c ---- */

/* @result: borrowed. @fetch: for the code that it names. */
int local_plan_make(const char *backend, const struct proto_local_plan_result *result,
		    local_fetch fetch, void *owner, struct fmha_local_plan **ret_plan,
		    struct fmha_error *err);
/* A daemon, what it is asked, and its answer. */
struct local_asking {
	struct local_source from;
	struct proto_plan_params params;
	struct proto_local_plan_result result;
};
/* @ret_asking: given: free() */
int local_asking_new(struct fmha_device *device, const struct fmha_local_options *options,
		     struct local_asking **ret_asking, struct fmha_error *err);
/* Fills in params and result. */
int local_ask_daemon(struct local_asking *asking, const struct fmha_problem *problem,
		     struct fmha_error *err);

/* ---- local_refresh.c: counts of runs, and better versions of a plan ---- */

/* @params: borrowed; @options: of its making, or NULL. Return: 0 or FMHA_ENOMEM. */
int local_refresh_new(struct fmha_local_plan *plan, struct fmha_device *device,
		      const struct proto_plan_params *params,
		      const struct fmha_local_options *options, struct fmha_error *err);
/* Tells the runs that were not told yet; waits for nothing. */
struct local_refresh *local_refresh_free(struct local_refresh *refresh,
					 const struct fmha_local_plan *plan);
/* After a run on @stream, now and then. */
void local_refresh_look(struct fmha_local_plan *plan, void *stream);

/* ---- local.c again ---- */

/* The problem as it is sent: addresses become what is left of them modulo 16. */
int local_problem(const struct fmha_problem *problem, struct proto_plan_params *ret_params,
		  struct fmha_error *err);

#endif
