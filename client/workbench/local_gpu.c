/* SPDX-License-Identifier: MIT */
/*
 * local_gpu.c: fmhactl links no GPU runtime: it loads the device's, of which it needs a context and memory. The rest is
 * the library's.
 */
#include "local_gpu.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <fmha/fmha_local.h>
#include <proto/error.h>
#include <proto/problem.h>

#define MOST_DEVICES 64
#define NAN_BYTE     0xff /* four of them are a NaN, and so are two */

/* What is used of either runtime; all have the same signatures but for the context's. */
struct local_gpu {
	struct fmha_device *device;
	bool is_cuda;
	int ordinal;
	void *context; /* CUDA's */
	int (*init)(unsigned flags);
	int (*get)(int *ret_device, int ordinal); /* CUDA */
	int (*retain)(void **ret_context, int device);
	int (*set_context)(void *context);
	int (*set_device)(int ordinal); /* HIP */
	int (*alloc)(uintptr_t *ret_address, size_t bytes);
	int (*free)(uintptr_t address);
	int (*to_device)(uintptr_t to, const void *from, size_t bytes, void *stream);
	int (*to_host)(void *to, uintptr_t from, size_t bytes, void *stream);
	int (*fill)(uintptr_t at, unsigned char value, size_t bytes, void *stream);
	int (*synchronize)(void *stream);
};

static int load_runtime(struct local_gpu *gpu, struct fmha_error *err)
{
	static const char *const libraries[2][4] = {
		{"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5", "libamdhip64.so"},
		{"libcuda.so.1"}};
	const struct {
		void **at;
		const char *hip, *cuda; /* NULL: not needed */
	} symbols[] = {
		{(void **)&gpu->init, "hipInit", "cuInit"},
		{(void **)&gpu->get, NULL, "cuDeviceGet"},
		{(void **)&gpu->retain, NULL, "cuDevicePrimaryCtxRetain"},
		{(void **)&gpu->set_context, NULL, "cuCtxSetCurrent"},
		{(void **)&gpu->set_device, "hipSetDevice", NULL},
		{(void **)&gpu->alloc, "hipMalloc", "cuMemAlloc_v2"},
		{(void **)&gpu->free, "hipFree", "cuMemFree_v2"},
		{(void **)&gpu->to_device, "hipMemcpyHtoDAsync", "cuMemcpyHtoDAsync_v2"},
		{(void **)&gpu->to_host, "hipMemcpyDtoHAsync", "cuMemcpyDtoHAsync_v2"},
		{(void **)&gpu->fill, "hipMemsetD8Async", "cuMemsetD8Async"},
		{(void **)&gpu->synchronize, "hipStreamSynchronize", "cuStreamSynchronize"},
	};
	void *library = NULL;

	for (int i = 0; i < 4 && !library && libraries[gpu->is_cuda][i]; i++)
		library = dlopen(libraries[gpu->is_cuda][i], RTLD_NOW | RTLD_GLOBAL);
	if (!library)
		return fmha_error_set(err, FMHA_ENOTSUP, "no local launch: %s", dlerror());
	for (size_t i = 0; i < sizeof(symbols) / sizeof(symbols[0]); i++) {
		const char *name = gpu->is_cuda ? symbols[i].cuda : symbols[i].hip;

		if (!name)
			continue;
		*symbols[i].at = dlsym(library, name);
		if (!*symbols[i].at)
			return fmha_error_set(err, FMHA_ENOTSUP,
					      "no local launch: the runtime has no %s", name);
	}
	return 0;
}

static int check(int status, const char *what, struct fmha_error *err)
{
	return status == 0 ? 0
			   : fmha_error_set(err, FMHA_EIO, "%s: the GPU's runtime says %d", what,
					    status);
}

/* A context belongs to a thread. */
static int enter(const struct local_gpu *gpu, struct fmha_error *err)
{
	return check(gpu->is_cuda ? gpu->set_context(gpu->context) : gpu->set_device(gpu->ordinal),
		     "entering the GPU's context", err);
}

/* The daemon's devices of one runtime are in the runtime's order. */
static int find_ordinal(struct local_gpu *gpu, struct fmha_client *client,
			const struct fmha_device_info *info, struct fmha_error *err)
{
	struct fmha_device_info devices[MOST_DEVICES];
	size_t n = 0;
	int r = fmha_client_devices(client, devices, MOST_DEVICES, &n, err);

	for (size_t i = 0; r == 0 && i < n && i < MOST_DEVICES && devices[i].device != info->device;
	     i++)
		gpu->ordinal += strcmp(devices[i].backend, info->backend) == 0;
	return r;
}

static int make_context(struct local_gpu *gpu, struct fmha_error *err)
{
	int device, r = check(gpu->init(0), "starting the GPU's runtime", err);

	if (r == 0 && gpu->is_cuda)
		r = check(gpu->get(&device, gpu->ordinal), "finding the GPU", err);
	if (r == 0 && gpu->is_cuda)
		r = check(gpu->retain(&gpu->context, device), "making a context", err);
	return r == 0 ? enter(gpu, err) : r;
}

int local_gpu_open(struct fmha_client *client, struct fmha_device *device,
		   struct local_gpu **ret_gpu, struct fmha_error *err)
{
	struct fmha_device_info info;
	struct local_gpu *gpu;
	int r = fmha_device_info(device, &info, err);

	if (r < 0)
		return r;
	if (strcmp(info.backend, "cuda") != 0 && strcmp(info.backend, "hip") != 0)
		return fmha_error_set(err, FMHA_ENOTSUP,
				      "device %u (%s): local launch is not supported, it is no GPU",
				      info.device, info.backend);
	gpu = calloc(1, sizeof(*gpu));
	if (!gpu)
		return fmha_error_set(err, FMHA_ENOMEM, "verify: out of memory");
	gpu->device = device;
	gpu->is_cuda = strcmp(info.backend, "cuda") == 0;
	r = find_ordinal(gpu, client, &info, err);
	if (r == 0)
		r = load_runtime(gpu, err);
	if (r == 0)
		r = make_context(gpu, err);
	if (r < 0)
		gpu = local_gpu_free(gpu);
	else
		*ret_gpu = gpu;
	return r;
}

struct local_gpu *local_gpu_free(struct local_gpu *gpu)
{
	free(gpu);
	return NULL;
}

static void note_kernel(const struct fmha_local_plan_info *info, uint32_t op, char *kernel)
{
	uint32_t main = strcmp(info->launches[0].family, "prepare") ==
			0; /* of tables, before all */

	main += op == FMHA_BACKWARD; /* dot_do_o is before it */
	if (main < info->n_launches)
		memcpy(kernel, info->launches[main].kernel, FMHA_KERNEL_BYTES);
}

static int copy_in(struct local_gpu *gpu, uintptr_t memory, const struct tensors *tensors,
		   struct fmha_error *err)
{
	void *host = fmha_buffer_data(tensors->buffer);
	int r = check(gpu->to_device(memory, host, tensors->bytes, NULL), "a copy", err);

	return r == 0 ? check(gpu->synchronize(NULL), "a copy", err) : r;
}

static int copy_out(struct local_gpu *gpu, uintptr_t memory, const struct tensors *tensors,
		    struct fmha_error *err)
{
	void *host = fmha_buffer_data(tensors->buffer);
	int r = check(gpu->to_host(host, memory, tensors->bytes, NULL), "a copy", err);

	return r == 0 ? check(gpu->synchronize(NULL), "a copy", err) : r;
}

static int run_at(struct local_gpu *gpu, const struct fmha_problem *problem,
		  const struct tensors *tensors, uintptr_t memory, uintptr_t *ret_workspace,
		  char *kernel, struct fmha_error *err)
{
	const void *at[FMHA_N_TENSORS] = {0};
	struct fmha_local_run run = {
		.struct_size = sizeof(run), .n_tensors = FMHA_N_TENSORS, .tensors = at};
	struct fmha_problem here = *problem;
	struct fmha_local_plan_info info;
	struct fmha_local_plan *plan;
	int r;

	for (uint32_t role = 0; role < FMHA_N_TENSORS; role++) {
		if (!tensors->present[role])
			continue;
		/* NOLINTNEXTLINE: the runtime's addresses are numbers */
		here.tensor[role].data = (void *)(memory + tensors->offset[role]);
		here.tensor[role].buffer = here.tensor[role].offset = 0;
		at[role] = here.tensor[role].data;
	}
	r = fmha_local_plan_new(gpu->device, &here, NULL, &plan, err);
	if (r < 0)
		return r;
	r = fmha_local_plan_info(plan, &info, err);
	if (r == 0 && info.workspace_bytes > 0)
		r = check(gpu->alloc(ret_workspace, info.workspace_bytes), "workspace", err);
	if (r == 0 && info.workspace_bytes > 0)
		r = check(gpu->fill(*ret_workspace, NAN_BYTE, info.workspace_bytes, NULL),
			  "filling the workspace", err);
	run.workspace = (void *)*ret_workspace; /* NOLINT: likewise */
	if (r == 0 && info.n_launches > 0)
		note_kernel(&info, problem->op, kernel);
	if (r == 0)
		r = fmha_local_plan_run(plan, &run, err);
	if (r == 0)
		r = check(gpu->synchronize(NULL), "the run", err);
	plan = fmha_local_plan_free(plan);
	return r;
}

/* Bytes of the host there, a run, and back. */
static int run_copied(struct local_gpu *gpu, const struct fmha_problem *problem,
		      const struct tensors *tensors, uintptr_t memory, char *kernel,
		      struct fmha_error *err)
{
	uintptr_t workspace = 0;
	int r = copy_in(gpu, memory, tensors, err);

	if (r < 0)
		return r;
	r = run_at(gpu, problem, tensors, memory, &workspace, kernel, err);
	if (r == 0)
		r = copy_out(gpu, memory, tensors, err);
	if (workspace)
		(void)gpu->free(workspace);
	return r;
}

int local_gpu_run(struct local_gpu *gpu, const struct fmha_problem *problem,
		  const struct tensors *tensors, char *kernel, struct fmha_error *err)
{
	uintptr_t memory = 0;
	int r = enter(gpu, err);

	if (r < 0)
		return r;
	r = check(gpu->alloc(&memory, tensors->bytes), "memory for the tensors", err);
	if (r < 0)
		return r;
	r = run_copied(gpu, problem, tensors, memory, kernel, err);
	(void)gpu->free(memory);
	return r;
}

/* ---- memory of this process that a worker runs on ---- */

#define WORD_BYTES 256 /* behind the tensors: the word of a fence */

/* Tensors in memory that is the worker's as well. */
struct shared {
	uintptr_t memory;
	struct fmha_buffer *buffer;
	struct fmha_problem problem;
	struct fmha_plan *plan;
	uint32_t kind;
};

static int share(struct local_gpu *gpu, struct fmha_device *device,
		 const struct fmha_problem *problem, const struct tensors *tensors,
		 struct shared *ret, struct fmha_error *err)
{
	uint64_t bytes = tensors->bytes + WORD_BYTES;
	struct fmha_memory memory = {.fd = -1};
	int r = enter(gpu, err);

	if (r == 0)
		r = check(gpu->alloc(&ret->memory, bytes), "memory for the tensors", err);
	if (r == 0)
		r = check(gpu->fill(ret->memory, 0, bytes, NULL), "clearing it", err);
	if (r == 0)
		r = copy_in(gpu, ret->memory, tensors, err);
	if (r == 0) /* NOLINTNEXTLINE: the runtime's addresses are numbers */
		r = fmha_memory_from_gpu((void *)ret->memory, bytes, &memory, err);
	/* Of both ways the device's, so that it can be said which one that is. */
	if (r == 0 && memory.kind == FMHA_MEMORY_FD_OR_HANDLE) {
		memory.kind = FMHA_MEMORY_VMM_FD;
		r = fmha_buffer_import(device, &memory, &ret->buffer, err);
		if (r == FMHA_ENOTSUP)
			memory.kind = FMHA_MEMORY_IPC_HANDLE;
		if (r == FMHA_ENOTSUP)
			r = 0;
	}
	ret->kind = memory.kind;
	if (r == 0 && !ret->buffer)
		r = fmha_buffer_import(device, &memory, &ret->buffer, err);
	if (memory.fd >= 0)
		(void)close(memory.fd);
	ret->problem = *problem;
	for (uint32_t role = 0; r == 0 && role < FMHA_N_TENSORS; role++)
		if (tensors->present[role])
			ret->problem.tensor[role].buffer = fmha_buffer_id(ret->buffer);
	return r == 0 ? fmha_plan_new(device, &ret->problem, NULL, &ret->plan, err) : r;
}

static void unshare(struct local_gpu *gpu, struct shared *shared)
{
	shared->plan = fmha_plan_free(shared->plan);
	shared->buffer = fmha_buffer_free(shared->buffer);
	if (shared->memory)
		(void)gpu->free(shared->memory);
}

int local_gpu_share(struct local_gpu *gpu, const struct fmha_problem *problem,
		    const struct tensors *tensors, char *how, struct fmha_error *err)
{
	struct shared shared = {0};
	size_t n = strlen(how);
	int r = share(gpu, gpu->device, problem, tensors, &shared, err);

	if (r == 0)
		r = fmha_plan_run(shared.plan, NULL, NULL, err);
	if (r == 0)
		r = copy_out(gpu, shared.memory, tensors, err);
	(void)snprintf(how + n, FMHA_KERNEL_BYTES - n, "%s%s", n ? ", by " : "",
		       shared.kind == FMHA_MEMORY_VMM_FD ? "descriptor" : "IPC handle");
	unshare(gpu, &shared);
	return r;
}

static void sleep_ms(int ms)
{
	const struct timespec pause = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000L};

	(void)nanosleep(&pause, NULL);
}

/* @ret: given: O as it lies there. */
static int read_output(struct local_gpu *gpu, const struct shared *shared,
		       const struct tensors *tensors, uint64_t bytes, uint8_t **ret,
		       struct fmha_error *err)
{
	int r;

	*ret = malloc(bytes);
	if (!*ret)
		return fmha_error_set(err, FMHA_ENOMEM, "out of memory");
	r = check(gpu->to_host(*ret, shared->memory + tensors->offset[FMHA_T_O], bytes, NULL),
		  "a copy", err);
	return r == 0 ? check(gpu->synchronize(NULL), "a copy", err) : r;
}

/* No results yet, and inputs that would give others: a run that did not wait shows. */
static int clear_all(struct local_gpu *gpu, const struct shared *shared,
		     const struct tensors *tensors, uint64_t bytes, struct fmha_error *err)
{
	int r = check(gpu->fill(shared->memory, 0, tensors->bytes + WORD_BYTES, NULL), "clearing",
		      err);

	if (r == 0)
		r = check(gpu->fill(shared->memory + tensors->offset[FMHA_T_O], NAN_BYTE, bytes,
				    NULL),
			  "clearing", err);
	return r == 0 ? check(gpu->synchronize(NULL), "clearing", err) : r;
}

/* Queues the run that waits. Return: FMHA_EIO when it has written before it may. */
static int hold(struct local_gpu *gpu, const struct local_gpu_fence *f, struct shared *shared,
		uint64_t bytes, struct fmha_error *err)
{
	const struct fmha_fence word = {
		.buffer = fmha_buffer_id(shared->buffer), .offset = f->tensors->bytes, .value = 1};
	const struct fmha_run_options held = {.struct_size = sizeof(held),
					      .timeout_ms = f->timeout_ms,
					      .n_waits = 1,
					      .waits = &word};
	uint8_t *output = NULL;
	int r = clear_all(gpu, shared, f->tensors, bytes, err);

	if (r == 0)
		r = fmha_plan_run(shared->plan, &held, NULL, err);
	sleep_ms(f->held_ms);
	if (r == 0)
		r = read_output(gpu, shared, f->tensors, bytes, &output, err);
	for (uint64_t i = 0; r == 0 && i < bytes; i++)
		if (output[i] != NAN_BYTE)
			r = fmha_error_set(err, FMHA_EIO, "a run did not wait for its fence");
	free(output);
	return r;
}

/* The other connection's run writes the word. */
static int release(struct local_gpu *gpu, const struct local_gpu_fence *f, struct shared *shared,
		   struct fmha_error *err)
{
	struct fmha_memory memory = {.fd = -1};
	struct fmha_fence word = {.offset = f->tensors->bytes, .value = 1};
	const struct fmha_run_options ends = {.struct_size = sizeof(ends),
					      .timeout_ms = f->timeout_ms,
					      .n_signals = 1,
					      .signals = &word};
	struct fmha_buffer *buffer = NULL;
	int r = copy_in(gpu, shared->memory, f->tensors, err); /* what the other is to read */

	if (r == 0) /* NOLINTNEXTLINE: the runtime's addresses are numbers */
		r = fmha_memory_from_gpu((void *)shared->memory, f->tensors->bytes + WORD_BYTES,
					 &memory, err);
	if (r == 0)
		r = fmha_buffer_import(f->writer, &memory, &buffer, err);
	if (memory.fd >= 0)
		(void)close(memory.fd);
	word.buffer = r == 0 ? fmha_buffer_id(buffer) : 0;
	if (r == 0)
		r = fmha_plan_run(f->writes, &ends, NULL, err);
	if (r == 0) /* behind the one that waited, on its stream */
		r = fmha_plan_run(f->behind, NULL, NULL, err);
	buffer = fmha_buffer_free(buffer);
	return r;
}

int local_gpu_fence(struct local_gpu *gpu, const struct local_gpu_fence *f, struct fmha_error *err)
{
	struct shared shared = {0};
	uint8_t *output = NULL;
	uint64_t bytes = 0;
	int r = problem_span_bytes(f->problem, FMHA_T_O, &bytes, err);

	if (r == 0)
		r = share(gpu, gpu->device, f->problem, f->tensors, &shared, err);
	if (r == 0)
		r = hold(gpu, f, &shared, bytes, err);
	if (r == 0)
		r = release(gpu, f, &shared, err);
	if (r == 0)
		r = read_output(gpu, &shared, f->tensors, bytes, &output, err);
	/* The run behind it was of the same problem, in other memory. */
	if (r == 0 && memcmp(output, tensors_data(f->tensors, FMHA_T_O), bytes) != 0)
		r = fmha_error_set(err, FMHA_EIO,
				   "a run that waited for its fence gave other results");
	free(output);
	unshare(gpu, &shared);
	return r;
}
