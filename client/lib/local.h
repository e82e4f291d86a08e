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

/* What is used of either runtime; HIP's functions have the signatures of CUDA's. 0 is success. */
struct local_runtime {
	const char *name; /* "CUDA", "HIP" */
	int (*load)(void **ret_module, const void *image);
	int (*unload)(void *module);
	int (*function)(void **ret_function, void *module, const char *name);
	int (*launch)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
		      unsigned block_x, unsigned block_y, unsigned block_z, unsigned lds_bytes,
		      void *stream, void **parameters, void **extra);
	int (*clear)(uintptr_t at, unsigned char value, size_t bytes, void *stream);
	/* CUDA only; the last two may be missing there, too. */
	int (*allow_lds)(void *function, int attribute, int value);
	int (*push)(void *context);
	int (*pop)(void **ret_context);
	launch_encoder encode;
	int (*load_function)(void *function);
	const char *(*text)(int status); /* a static string, or NULL */
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

/* Puts bound arguments on a stream. */
int local_launch(const struct local_runtime *runtime, const struct launch_record *record,
		 void *function, union abi_args *args, void *stream, struct fmha_error *err);

/* ---- local.c ---- */

struct fmha_local_plan {
	uint64_t process; /* process_token() when it was made */
	const struct local_runtime *runtime;
	uint64_t workspace_bytes, workspace_alignment;
	double flops;
	uint64_t n_runs; /* atomic */
	uint32_t n_tensors, n_launches;
	struct proto_local_tensor tensors[FMHA_N_TENSORS];
	struct {
		struct launch_record record;
		void *function;
		struct local_code *code;
		char family[FMHA_NAME_BYTES], kernel[FMHA_KERNEL_BYTES];
	} launches[PROTO_MAX_LAUNCHES];
};

/* @result: borrowed. @fetch: for the code that it names. */
int local_plan_make(const char *backend, const struct proto_local_plan_result *result,
		    local_fetch fetch, void *owner, struct fmha_local_plan **ret_plan,
		    struct fmha_error *err);
/* What asks a daemon, and until when. */
struct local_asking {
	struct fmha_device *device;
	int64_t deadline;
};
int local_asking_begin(struct fmha_device *device, const struct fmha_local_options *options,
		       struct local_asking *ret_asking, struct fmha_error *err);
int local_ask_daemon(const struct local_asking *asking, const struct fmha_problem *problem,
		     struct proto_local_plan_result *ret_result, struct fmha_error *err);
/* A local_fetch; @owner: struct local_asking. */
int local_fetch_from_daemon(void *owner, const uint8_t hash[LAUNCH_HASH_BYTES], void **ret_data,
			    size_t *ret_bytes, struct fmha_error *err);

/* The problem as it is sent: addresses become what is left of them modulo 16. */
int local_problem(const struct fmha_problem *problem, struct proto_plan_params *ret_params,
		  struct fmha_error *err);

#endif
