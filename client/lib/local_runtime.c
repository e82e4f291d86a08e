/* SPDX-License-Identifier: MIT */
/*
 * local_runtime.c: code and launches through the runtime that this process has loaded.
 *
 * Code objects are kept by (context, hash) for as long as a plan has them. The table's lock is held
 * while one is fetched and loaded, so that each is loaded once; no run ever takes it. A forked child
 * never gets as far: its parent may have held the lock.
 */
#include "local.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <dlfcn.h>

#include <proto/error.h>

#include "internal.h"

#define MOST_STATIC_LDS (48 * 1024) /* above, CUDA wants to be asked */
#define MAX_DYNAMIC_LDS 8           /* CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES */

struct local_code {
	struct local_code *next;
	unsigned refs;
	const struct local_runtime *runtime;
	void *context; /* CUDA's context; of HIP the device's number */
	void *module;
	void *image; /* of the module, where it needs that to stay */
	size_t image_bytes;
	uint8_t hash[LAUNCH_HASH_BYTES];
};

static pthread_mutex_t codes_lock = PTHREAD_MUTEX_INITIALIZER;
static struct local_code *codes;

/* ---- the runtimes ---- */

static struct {
	struct local_runtime runtime;
	int (*current)(void **ret_context);
	int (*error_name)(int status, const char **ret_name);
} cuda;
static struct {
	struct local_runtime runtime;
	int (*current)(int *ret_device);
	const char *(*error_name)(int status);
} hip;

static const char *cuda_text(int status)
{
	const char *text = NULL;

	return cuda.error_name && cuda.error_name(status, &text) == 0 ? text : NULL;
}

static const char *hip_text(int status)
{
	return hip.error_name ? hip.error_name(status) : NULL;
}

struct symbol {
	void **at;
	const char *name;
	bool optional;
};

/* @library: NULL: the process has not loaded @file. */
static int find_symbols(struct local_runtime *runtime, const char *name, const char *file,
			void *library, const struct symbol *symbols, size_t n,
			struct fmha_error *err)
{
	runtime->name = name;
	if (!library)
		return fmha_error_set(err, FMHA_ENOTSUP, "this process has not loaded %s", file);
	for (size_t i = 0; i < n; i++) {
		*symbols[i].at = dlsym(library, symbols[i].name);
		if (!*symbols[i].at && !symbols[i].optional)
			return fmha_error_set(
				err, FMHA_ENOTSUP,
				"the %s runtime of this process is too old: it has no %s", name,
				symbols[i].name);
	}
	return 0;
}

static int find_cuda(struct fmha_error *err)
{
	struct local_runtime *r = &cuda.runtime;
	const struct symbol symbols[] = {
		{(void **)&cuda.current, "cuCtxGetCurrent", false},
		{(void **)&cuda.error_name, "cuGetErrorName", true},
		{(void **)&r->load, "cuModuleLoadData", false},
		{(void **)&r->unload, "cuModuleUnload", false},
		{(void **)&r->function, "cuModuleGetFunction", false},
		{(void **)&r->clear, "cuMemsetD8Async", false},
		{(void **)&r->allow_lds, "cuFuncSetAttribute", false},
		{(void **)&r->push, "cuCtxPushCurrent_v2", false},
		{(void **)&r->pop, "cuCtxPopCurrent_v2", false},
		{(void **)&r->encode, "cuTensorMapEncodeTiled", true},
		{(void **)&r->load_function, "cuFuncLoad", true},
		{(void **)&r->launch_with, "cuLaunchKernelEx", true},
		{(void **)&r->is_capturing, "cuStreamIsCapturing", true},
		{(void **)&r->exchange_capture_mode, "cuThreadExchangeStreamCaptureMode", true},
		{(void **)&r->launch, "cuLaunchKernel", false},
	};

	r->text = cuda_text;
	return find_symbols(r, "CUDA", "CUDA's driver (libcuda.so.1)", gpu_loaded_cuda(), symbols,
			    sizeof(symbols) / sizeof(symbols[0]), err);
}

static int find_hip(struct fmha_error *err)
{
	struct local_runtime *r = &hip.runtime;
	const struct symbol symbols[] = {
		{(void **)&hip.current, "hipGetDevice", false},
		{(void **)&hip.error_name, "hipGetErrorName", true},
		{(void **)&r->load, "hipModuleLoadData", false},
		{(void **)&r->unload, "hipModuleUnload", false},
		{(void **)&r->function, "hipModuleGetFunction", false},
		{(void **)&r->clear, "hipMemsetD8Async", false},
		{(void **)&r->is_capturing, "hipStreamIsCapturing", true},
		{(void **)&r->exchange_capture_mode, "hipThreadExchangeStreamCaptureMode", true},
		{(void **)&r->launch, "hipModuleLaunchKernel", false},
	};

	r->keeps_image = true;
	r->text = hip_text;
	return find_symbols(r, "HIP", "HIP (libamdhip64.so)", gpu_loaded_hip(), symbols,
			    sizeof(symbols) / sizeof(symbols[0]), err);
}

int local_runtime_find(const char *backend, const struct local_runtime **ret_runtime,
		       struct fmha_error *err)
{
	bool is_cuda = strcmp(backend, "cuda") == 0;
	int r;

	if (!is_cuda && strcmp(backend, "hip") != 0)
		return fmha_error_set_field(err, FMHA_ENOTSUP, "device",
					    "a %s device has no code that clients launch: use "
					    "fmha_plan_new(), its worker shares memory with you",
					    backend);
	/* Symbols found anew are the same ones: whoever reads them meanwhile sees no change. */
	(void)pthread_mutex_lock(&codes_lock);
	r = is_cuda ? find_cuda(err) : find_hip(err);
	(void)pthread_mutex_unlock(&codes_lock);
	*ret_runtime = is_cuda ? &cuda.runtime : &hip.runtime;
	return r;
}

int local_runtime_error(const struct local_runtime *runtime, int status, const char *what,
			struct fmha_error *err)
{
	const char *text = runtime->text(status);

	return fmha_error_set(err, FMHA_EIO, "%s: %s error %d%s%s", what, runtime->name, status,
			      text ? ", " : "", text ? text : "");
}

static int current_context(const struct local_runtime *runtime, void **ret_context,
			   struct fmha_error *err)
{
	int device = 0, status;

	*ret_context = NULL;
	if (runtime == &cuda.runtime) {
		status = cuda.current(ret_context);
		if (status == 0 && !*ret_context)
			return fmha_error_set(err, FMHA_EIO,
					      "no CUDA context is current in this thread");
	} else {
		status = hip.current(&device);
		*ret_context = (void *)((intptr_t)device + 1); // NOLINT: a number
	}
	return status == 0 ? 0 : local_runtime_error(runtime, status, "the current context", err);
}

/* ---- code ---- */

static struct local_code *find_code(const struct local_runtime *runtime, const void *context,
				    const uint8_t hash[LAUNCH_HASH_BYTES])
{
	struct local_code *code = codes;

	while (code && (code->runtime != runtime || code->context != context ||
			memcmp(code->hash, hash, LAUNCH_HASH_BYTES) != 0))
		code = code->next;
	return code;
}

static int load_code(struct local_code *code, local_fetch fetch, void *owner,
		     struct fmha_error *err)
{
	size_t bytes;
	void *data;
	int r = fetch(owner, code->hash, &data, &bytes, err), status;

	if (r < 0)
		return r;
	status = code->runtime->load(&code->module, data);
	if (status == 0 && code->runtime->keeps_image) {
		code->image = data;
		code->image_bytes = bytes;
		return 0;
	}
	(void)munmap(data, bytes);
	if (status == 0)
		return 0;
	return local_runtime_error(code->runtime, status,
				   "loading code (is the current GPU the device's?)", err);
}

int local_code_get(const struct local_runtime *runtime, const uint8_t hash[LAUNCH_HASH_BYTES],
		   local_fetch fetch, void *owner, struct local_code **ret_code,
		   struct fmha_error *err)
{
	struct local_code *code;
	void *context;
	int r = current_context(runtime, &context, err);

	if (r < 0)
		return r;
	(void)pthread_mutex_lock(&codes_lock);
	code = find_code(runtime, context, hash);
	if (!code) {
		code = calloc(1, sizeof(*code));
		r = code ? 0 : fmha_error_set(err, FMHA_ENOMEM, "code: out of memory");
		if (r == 0) {
			code->runtime = runtime;
			code->context = context;
			memcpy(code->hash, hash, sizeof(code->hash));
			r = load_code(code, fetch, owner, err);
		}
		if (r == 0) {
			code->next = codes;
			codes = code;
		} else {
			free(code);
		}
	}
	if (r == 0) {
		code->refs++;
		*ret_code = code;
	}
	(void)pthread_mutex_unlock(&codes_lock);
	return r;
}

/* The context may be gone, and then so is the module: what the runtime says of it is no matter. */
static void unload(struct local_code *code)
{
	const struct local_runtime *runtime = code->runtime;
	void *ignored;

	if (!runtime->push) {
		(void)runtime->unload(code->module);
	} else if (runtime->push(code->context) == 0) {
		(void)runtime->unload(code->module);
		(void)runtime->pop(&ignored);
	}
	if (code->image)
		(void)munmap(code->image, code->image_bytes);
}

void local_code_put(struct local_code *code)
{
	struct local_code **at = &codes;

	if (!code)
		return;
	(void)pthread_mutex_lock(&codes_lock);
	if (--code->refs == 0) {
		while (*at != code)
			at = &(*at)->next;
		*at = code->next;
		unload(code);
		free(code);
	}
	(void)pthread_mutex_unlock(&codes_lock);
}

int local_code_function(struct local_code *code, const struct launch_record *record,
			void **ret_function, struct fmha_error *err)
{
	const struct local_runtime *runtime = code->runtime;
	int status = runtime->function(ret_function, code->module, record->entry);

	/* Now and not at the first launch, which may be in a capture. */
	if (status == 0 && runtime->load_function)
		status = runtime->load_function(*ret_function);
	if (status == 0 && runtime->allow_lds && record->lds_bytes > MOST_STATIC_LDS)
		status = runtime->allow_lds(*ret_function, MAX_DYNAMIC_LDS, (int)record->lds_bytes);
	if (status != 0)
		return local_runtime_error(runtime, status, record->entry, err);
	if (record->n_maps > 0 && !runtime->encode)
		return fmha_error_set(err, FMHA_ENOTSUP,
				      "the %s runtime of this process is too old for tensor maps",
				      runtime->name);
	return 0;
}

/* ---- launches ---- */

int local_launch(const struct local_runtime *runtime, const struct launch_record *record,
		 void *function, union abi_args *args, bool other_keys, void *stream,
		 struct fmha_error *err)
{
	const uint32_t *grid = record->grid, *block = record->block;
	struct launch_tensor_map maps[LAUNCH_MAPS];
	void *parameters[1 + LAUNCH_MAPS] = {args};
	int status = 0;

	for (uint32_t i = 0; i < record->n_maps && status == 0; i++) {
		struct launch_map map = record->maps[i];

		if (other_keys)
			launch_set_map_keys(record, args, &map);
		status = launch_encode_map(runtime->encode, &map, args, &maps[i]);
		parameters[1 + i] = &maps[i];
	}
	if (status != 0)
		return local_runtime_error(runtime, status, "a tensor map", err);
	if (record->overlaps && runtime->launch_with)
		status = launch_overlapping(runtime->launch_with, function, record, stream,
					    parameters);
	else
		status = runtime->launch(function, grid[0], grid[1], grid[2], block[0], block[1],
					 block[2], record->lds_bytes, stream, parameters, NULL);
	return status == 0 ? 0 : local_runtime_error(runtime, status, record->entry, err);
}
