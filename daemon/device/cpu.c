/* SPDX-License-Identifier: MIT */
/*
 * cpu.c: the CPU as a device. Kernels come from kernels/cpu at the best level of the machine (or
 * the one that the configuration names), launches become jobs of a thread pool, memory is memfds.
 */
#include <kernels/cpu_kernels.h>

#include "cpu_device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <proto/fnv.h>
#include <proto/error.h>
#include <proto/problem.h>

#include "host_memory.h"

#define PAGE_BYTES        4096ull
#define WORKSPACE_LEAST   65536ull
#define WORKSPACE_KEEP    (256ull << 20) /* bytes kept for the next launch */
#define HERE_SCRATCH_MOST (1u << 20)
#define HERE_TASKS_MOST   1024         /* also tasks that find nothing to do take their time */
#define CLEAR_BYTES       (4ull << 20) /* of a workspace, a task */

struct cpu_workspace {
	struct list in_free;
	uint64_t bytes;
	void *data;
};

static struct cpu_device *cpu_device(struct device *device)
{
	return container_of(device, struct cpu_device, base);
}

static const struct cpu_kernel *as_cpu(const struct device_kernel *kernel)
{
	return (const struct cpu_kernel *)(const void *)kernel;
}

/* ---- kernels ---- */

/* The name of a kernel that no spec has named. */
static void kernel_name(const struct cpu_kernel *kernel, char ret_name[PLAN_KERNEL_BYTES])
{
	snprintf(ret_name, PLAN_KERNEL_BYTES, "%s_%s_%s_%s", plan_family_name(kernel->family),
		 fmha_dtype_name(kernel->dtype), kernel->pipeline, cpu_level_name(kernel->level));
}

/* By words, which the next worker and the next version have, too. */
static uint64_t code_of(const struct cpu_kernel *kernel)
{
	uint64_t code = fnv_text(FNV_START, plan_family_name(kernel->family));

	code = fnv_text(code, fmha_dtype_name(kernel->dtype));
	code = fnv_text(code, kernel->pipeline);
	code = fnv_text(code, cpu_level_name(kernel->level));
	return fnv_add(code, (uint32_t)kernel->tile_m);
}

/* The pipeline and the rows of its tile are the spec's, where there is one. */
static bool is_of_stage(const struct cpu_kernel *kernel, const struct plan_stage *stage)
{
	if (*stage->pipeline && strcmp(kernel->pipeline, stage->pipeline) != 0)
		return false;
	return !stage->has_spec || !kernel->tile_m || kernel->tile_m == stage->spec.tile.tile_m0;
}

/* The first kernel of exactly @level. */
static const struct cpu_kernel *find_at_level(struct cpu_device *cpu, enum cpu_level level,
					      enum abi_family family, uint32_t dtype,
					      const struct plan_stage *stage,
					      const union abi_args *args, const char **ret_why)
{
	size_t n;
	const struct cpu_kernel *const *kernels = cpu_kernels(level, &n);

	for (size_t i = 0; i < n; i++) {
		if (kernels[i]->family != family || kernels[i]->dtype != dtype ||
		    !is_of_stage(kernels[i], stage) || !kernels[i]->accepts(args))
			continue;
		if (!device_is_quarantined(&cpu->base, stage->kernel, code_of(kernels[i])))
			return kernels[i];
		*ret_why = DEVICE_QUARANTINED;
	}
	return NULL;
}

static const struct cpu_kernel *find_kernel(struct cpu_device *cpu, enum abi_family family,
					    uint32_t dtype, const union abi_args *args,
					    const struct plan_stage *stage, const char **ret_why)
{
	const struct cpu_kernel *kernel = NULL;
	enum cpu_level level;

	if (*stage->pipeline) {
		if (cpu_level_from_name(stage->arch, &level) < 0 || level > cpu->level)
			return NULL;
		return find_at_level(cpu, level, family, dtype, stage, args, ret_why);
	}
	for (int i = (int)cpu->level; i >= 0 && !kernel; i--)
		kernel = find_at_level(cpu, (enum cpu_level)i, family, dtype, stage, args, ret_why);
	return kernel;
}

static int cpu_find_kernel(struct device *device, enum abi_family family, uint32_t dtype,
			   const union abi_args *args, struct plan_stage *stage,
			   const char **ret_why)
{
	struct cpu_device *cpu = cpu_device(device);
	const struct cpu_kernel *kernel = find_kernel(cpu, family, dtype, args, stage, ret_why);

	if (!kernel)
		return 1;
	if (!*stage->pipeline) {
		kernel_name(kernel, stage->kernel);
		snprintf(stage->pipeline, sizeof(stage->pipeline), "%s", kernel->pipeline);
		snprintf(stage->arch, sizeof(stage->arch), "%s", cpu_level_name(kernel->level));
	}
	stage->code = code_of(kernel);
	stage->workspace_bytes = kernel->workspace_bytes(args, (int)pool_n_threads(cpu->pool));
	return 0;
}

/* Built in: ready at once. */
static int cpu_prepare(struct device *device, const struct plan_stage *stage,
		       const union abi_args *args, struct device_waiter *waiter,
		       const struct device_kernel **ret_kernel, struct fmha_error *err)
{
	const char *why = "not on this device";
	const struct cpu_kernel *kernel = find_kernel(cpu_device(device), stage->family,
						      stage->dtype, args, stage, &why);

	(void)waiter;
	if (!kernel)
		return fmha_error_set(err, FMHA_ENOKERNEL, "kernel %.200s: %s", stage->kernel, why);
	*ret_kernel = (const struct device_kernel *)(const void *)kernel;
	return 0;
}

/* ---- memory ---- */

static uint64_t cpu_memory_cost(const struct device *device,
				const struct device_memory_source *source, bool created)
{
	(void)device;
	return host_memory_cost(created ? 0 : source->base_offset, source->size);
}

static int cpu_memory_create(struct device *device, uint64_t size, struct device_memory *ret_memory,
			     int *ret_fd, struct fmha_error *err)
{
	(void)device;
	return host_memory_create(size, ret_memory, ret_fd, err);
}

static int cpu_memory_import(struct device *device, const struct device_memory_source *source,
			     struct device_memory *ret_memory, struct fmha_error *err)
{
	(void)device;
	if (source->kind != PROTO_MEMFD)
		return fmha_error_set_field(err, FMHA_ENOTSUP, "kind",
					    "this device imports memfds only");
	return host_memory_import(source, ret_memory, err);
}

static void cpu_memory_free(struct device *device, struct device_memory *memory)
{
	(void)device;
	host_memory_free(memory);
}

/* Sizes are powers of two so that a kept workspace fits the next launch. */
static uint64_t workspace_size(uint64_t bytes)
{
	uint64_t size = WORKSPACE_LEAST;

	while (size < bytes)
		size *= 2;
	return size;
}

static uint64_t cpu_workspace_cost(const struct device *device, uint64_t bytes)
{
	(void)device;
	return workspace_size(bytes);
}

static struct cpu_workspace *take_free_workspace(struct cpu_device *cpu, uint64_t size)
{
	struct cpu_workspace *found = NULL;

	(void)pthread_mutex_lock(&cpu->workspaces_lock);
	list_for_each_entry(struct cpu_workspace, workspace, &cpu->free_workspaces, in_free) {
		if (found || workspace->bytes != size)
			continue;
		found = workspace;
		list_remove(&found->in_free);
		cpu->free_bytes -= size;
	}
	(void)pthread_mutex_unlock(&cpu->workspaces_lock);
	return found;
}

static struct cpu_workspace *map_workspace(uint64_t size)
{
	struct cpu_workspace *workspace = malloc(sizeof(*workspace));

	if (!workspace)
		return NULL;
	workspace->bytes = size;
	workspace->data = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
			       0);
	if (workspace->data == MAP_FAILED) {
		free(workspace);
		return NULL;
	}
	list_init(&workspace->in_free);
	return workspace;
}

static int cpu_workspace_new(struct device *device, uint64_t bytes,
			     struct device_memory *ret_memory, struct fmha_error *err)
{
	struct cpu_device *cpu = cpu_device(device);
	struct cpu_workspace *workspace = NULL;

	if (bytes <= 1ull << 46) {
		workspace = take_free_workspace(cpu, workspace_size(bytes));
		if (!workspace)
			workspace = map_workspace(workspace_size(bytes));
	}
	if (!workspace)
		return fmha_error_set(err, FMHA_ENOMEM, "a workspace of %llu bytes",
				      (unsigned long long)bytes);
	*ret_memory = (struct device_memory){.host = workspace->data,
					     .device = workspace->data,
					     .bytes = bytes,
					     .map = workspace};
	return 0;
}

static void free_workspace(struct cpu_workspace *workspace)
{
	munmap(workspace->data, workspace->bytes);
	free(workspace);
}

static void cpu_workspace_free(struct device *device, struct device_memory *memory)
{
	struct cpu_device *cpu = cpu_device(device);
	struct cpu_workspace *workspace = memory->map;
	bool kept;

	if (!workspace)
		return;
	*memory = (struct device_memory){0};
	(void)pthread_mutex_lock(&cpu->workspaces_lock);
	kept = cpu->free_bytes + workspace->bytes <= WORKSPACE_KEEP;
	if (kept) {
		list_append(&cpu->free_workspaces, &workspace->in_free);
		cpu->free_bytes += workspace->bytes;
	}
	(void)pthread_mutex_unlock(&cpu->workspaces_lock);
	if (!kept)
		free_workspace(workspace);
}

static void cpu_trim_memory(struct device *device)
{
	struct cpu_device *cpu = cpu_device(device);
	struct list *node;

	do {
		(void)pthread_mutex_lock(&cpu->workspaces_lock);
		node = list_pop(&cpu->free_workspaces);
		if (node)
			cpu->free_bytes -= container_of(node, struct cpu_workspace, in_free)->bytes;
		(void)pthread_mutex_unlock(&cpu->workspaces_lock);
		if (node)
			free_workspace(container_of(node, struct cpu_workspace, in_free));
	} while (node);
}

static void cpu_trim(struct device *device)
{
	struct cpu_device *cpu = cpu_device(device);

	if (cpu->scratch)
		munmap(cpu->scratch, cpu->scratch_bytes);
	cpu->scratch = NULL;
	cpu->scratch_bytes = 0;
	pool_trim(cpu->pool);
}

/* ---- launches ---- */

static struct device_stream *cpu_stream_new(struct device *device, uint32_t uid, uint32_t weight)
{
	struct pool_queue *queue = malloc(sizeof(*queue));

	if (queue && pool_queue_init(cpu_device(device)->pool, queue, uid, weight) < 0) {
		free(queue);
		queue = NULL;
	}
	return (struct device_stream *)(void *)queue;
}

static void cpu_stream_free(struct device *device, struct device_stream *stream)
{
	struct pool_queue *queue = (struct pool_queue *)(void *)stream;

	pool_queue_deinit(cpu_device(device)->pool, queue);
	free(queue);
}

static void run_step(const struct pool_step *step, uint64_t task, void *scratch)
{
	const struct cpu_kernel *kernel = step->kernel;

	kernel->run(step->args, step->phase, (int64_t)task, step->n_threads, step->workspace,
		    scratch);
}

static void clear_piece(const struct pool_step *step, uint64_t task, void *scratch)
{
	const struct device_launch *launch = step->args;
	uint64_t from = task * CLEAR_BYTES, left = launch->zero_bytes - from;

	(void)scratch;
	memset((char *)launch->zero + from, 0, left < CLEAR_BYTES ? left : CLEAR_BYTES);
}

static uint64_t n_tasks_of(const struct pool_job *job)
{
	uint64_t n = 0;

	for (uint32_t i = 0; i < job->n_steps; i++)
		n += job->steps[i].n_tasks;
	return n;
}

static bool too_many_tasks(struct cpu_launch *launch, uint64_t n_tasks)
{
	if (n_tasks < POOL_MOST_TASKS)
		return false;
	(void)fmha_error_set(&launch->base.error, FMHA_ENOTSUP,
			     "the run has %llu tasks: at most %llu are possible",
			     (unsigned long long)n_tasks, (unsigned long long)POOL_MOST_TASKS);
	return true;
}

bool cpu_launch_prepare(struct cpu_launch *launch)
{
	struct pool_job *job = &launch->job;
	int n_threads = (int)pool_n_threads(launch->device->pool);

	job->n_steps = 0;
	job->scratch_bytes = 0;
	if (launch->base.zero_bytes > 0)
		job->steps[job->n_steps++] = (struct pool_step){
			.n_tasks = (launch->base.zero_bytes + CLEAR_BYTES - 1) / CLEAR_BYTES,
			.run = clear_piece,
			.args = &launch->base,
			.name = launch->base.names[0]};
	for (uint32_t i = 0; i < launch->base.n_stages; i++) {
		const struct cpu_kernel *kernel = as_cpu(launch->base.kernels[i]);
		const void *args = &launch->base.args[i];
		size_t scratch = kernel->scratch_bytes(args);
		uint64_t *opened_ns = launch->base.times_stages ? &launch->base.stage_started_ns[i]
								: NULL;

		if (scratch > job->scratch_bytes)
			job->scratch_bytes = scratch;
		for (int phase = 0; phase < kernel->n_phases; phase++) {
			uint64_t n_tasks = (uint64_t)kernel->n_tasks(args, phase, n_threads);

			if (n_tasks == 0)
				continue;
			if (too_many_tasks(launch, n_tasks))
				return false;
			if (job->n_steps == POOL_MAX_STEPS)
				abort(); /* a kernel with more phases than the pool was built for */
			job->steps[job->n_steps++] = (struct pool_step){
				.n_tasks = n_tasks,
				.run = run_step,
				.kernel = kernel,
				.args = args,
				.name = launch->base.names[i],
				.workspace = launch->base.workspaces[i],
				.phase = phase,
				.n_threads = n_threads,
				.opened_ns = opened_ns};
			opened_ns = NULL; /* only of its first phase */
		}
	}
	return true;
}

static void cpu_finish(struct cpu_launch *launch)
{
	struct device_launch *base = &launch->base;
	struct pool_job *job = &launch->job;

	base->started_ns = job->started_ns;
	base->ended_ns = job->ended_ns;
	base->bus_address = atomic_load(&job->vanished);
	base->error.code = FMHA_OK;
	if (device_has_failed(&launch->device->base, &base->error))
		return;
	if (atomic_load(&job->out_of_memory))
		fmha_error_set(&base->error, FMHA_ENOMEM, "a thread's scratch of %zu bytes",
			       job->scratch_bytes);
	else if (job->cancelled)
		fmha_error_set(&base->error, FMHA_ECANCELED, "the run was cancelled");
	else if (base->bus_address)
		fmha_error_set(&base->error, FMHA_EIO,
			       "a buffer's memory vanished under the kernel");
}

static void on_job_done(struct pool_job *job)
{
	struct cpu_launch *launch = container_of(job, struct cpu_launch, job);

	cpu_finish(launch);
	device_launch_done(&launch->device->base, &launch->base);
}

static struct device_launch *cpu_launch_new(struct device *device)
{
	struct cpu_launch *launch = calloc(1, sizeof(*launch));

	if (!launch)
		return NULL;
	launch->device = cpu_device(device);
	launch->job.on_done = on_job_done;
	list_init(&launch->job.in_queue); /* it may be cancelled without ever having been queued */
	return &launch->base;
}

static void cpu_launch_free(struct device *device, struct device_launch *launch)
{
	(void)device;
	free(container_of(launch, struct cpu_launch, base));
}

static void cpu_submit(struct device *device, struct device_launch *base)
{
	struct cpu_device *cpu = cpu_device(device);
	struct cpu_launch *launch = container_of(base, struct cpu_launch, base);

	if (!cpu_launch_prepare(launch)) {
		device_launch_done(device, base);
		return;
	}
	pool_submit(cpu->pool, (struct pool_queue *)(void *)base->stream, &launch->job);
}

static bool reserve_scratch(struct cpu_device *cpu, size_t bytes)
{
	if (bytes <= cpu->scratch_bytes)
		return true;
	if (cpu->scratch)
		munmap(cpu->scratch, cpu->scratch_bytes);
	cpu->scratch_bytes = 0;
	bytes = (bytes + 65535) & ~(size_t)65535;
	cpu->scratch = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
			    0);
	if (cpu->scratch == MAP_FAILED) {
		cpu->scratch = NULL;
		return false;
	}
	cpu->scratch_bytes = bytes;
	return true;
}

static bool cpu_run_here(struct device *device, struct device_launch *base)
{
	struct cpu_device *cpu = cpu_device(device);
	struct cpu_launch *launch = container_of(base, struct cpu_launch, base);

	if (!pool_is_idle(cpu->pool) || device_has_failed(device, NULL))
		return false;
	if (!cpu_launch_prepare(launch) || n_tasks_of(&launch->job) > HERE_TASKS_MOST ||
	    launch->job.scratch_bytes > HERE_SCRATCH_MOST ||
	    !reserve_scratch(cpu, launch->job.scratch_bytes))
		return false;
	pool_run_here(&launch->job, cpu->scratch);
	cpu_finish(launch);
	return true;
}

static void cpu_cancel(struct device *device, struct device_launch *base)
{
	pool_cancel(cpu_device(device)->pool, &container_of(base, struct cpu_launch, base)->job);
}

static uint64_t cpu_stalled_ns(struct device *device, struct device_launch *base,
			       const char **ret_kernel)
{
	struct pool_job *job = &container_of(base, struct cpu_launch, base)->job;
	uint32_t step = (uint32_t)(atomic_load(&job->ticket) >> 40);

	*ret_kernel = job->steps[step < job->n_steps ? step : 0].name;
	return pool_stalled_ns(cpu_device(device)->pool, job);
}

const char *device_current_kernel(void)
{
	return pool_current_name();
}

/* ---- opening ---- */

static int choose_level(const struct config_device *config, enum cpu_level *ret_level,
			struct fmha_error *err)
{
	enum cpu_level best = cpu_level_detect(), wanted;

	*ret_level = best;
	if (!config->cpu_level[0])
		return 0;
	if (cpu_level_from_name(config->cpu_level, &wanted) < 0)
		return fmha_error_set_field(err, FMHA_EINVAL, "cpu_level",
					    "cpu_level %s: no such level", config->cpu_level);
	if (wanted > best)
		return fmha_error_set_field(err, FMHA_ENOTSUP, "cpu_level",
					    "cpu_level %s: this machine offers %s",
					    config->cpu_level, cpu_level_name(best));
	*ret_level = wanted;
	return 0;
}

static int cpu_check(const struct config_device *config, struct fmha_error *err)
{
	enum cpu_level level;

	return choose_level(config, &level, err);
}

/* The first number behind @word in a file, or 0. */
static double number_in(const char *path, const char *word)
{
	FILE *file = fopen(path, "re");
	char line[256];
	double number = 0;

	while (file && number == 0 && fgets(line, sizeof(line), file))
		if (strncmp(line, word, strlen(word)) == 0)
			number = strtod(line + strcspn(line, "0123456789"), NULL);
	if (file)
		(void)fclose(file);
	return number;
}

/* In Hz; 0: not known. Virtual machines say what they were told. */
static double highest_clock(void)
{
	double khz = number_in("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq", "");

	return khz > 0 ? khz * 1e3 : number_in("/proc/cpuinfo", "cpu MHz") * 1e6;
}

/*
 * What its cores could do by their vector units: operations a clock of a core of each level, at the
 * highest clock that is known. How fast the memory is, nothing tells.
 */
static void describe_peak(struct device_info *info, enum cpu_level level)
{
	static const struct {
		double f32, f16;
	} rates[CPU_N_LEVELS] = {[CPU_PORTABLE] = {8, 8},
				 [CPU_X86_64_V3] = {32, 32},
				 [CPU_X86_64_V4] = {64, 64},
				 [CPU_X86_64_V4_BF16] = {64, 128},
				 [CPU_X86_64_AMX] = {64, 2048}};
	double clocks = highest_clock() * info->compute_units;

	info->peak.f32 = rates[level].f32 * clocks;
	info->peak.f16 = info->peak.fp8 = rates[level].f16 * clocks;
}

/* The processor as the kernel calls it, with what is used of it. */
static void describe_model(struct device_info *info)
{
	FILE *file = fopen("/proc/cpuinfo", "re");
	char line[256], name[40] = "CPU";

	while (file && fgets(line, sizeof(line), file)) {
		const char *colon = strchr(line, ':');

		if (strncmp(line, "model name", 10) != 0 || !colon)
			continue;
		(void)snprintf(name, sizeof(name), "%.*s", (int)strcspn(colon + 2, "\n"),
			       colon + 2);
		break;
	}
	if (file)
		(void)fclose(file);
	(void)snprintf(info->model, sizeof(info->model), "%s %u", name, info->compute_units);
	(void)snprintf(info->compiler, sizeof(info->compiler), "%s", cpu_build_compiler());
	(void)snprintf(info->sources, sizeof(info->sources), "%s", cpu_build_sources());
}

int cpu_device_open(const struct config_device *config, struct device **ret_device,
		    struct fmha_error *err)
{
	struct cpu_device *cpu = calloc(1, sizeof(*cpu));
	struct device_info *info;
	int r;

	if (!cpu)
		return fmha_error_set(err, FMHA_ENOMEM, "device: out of memory");
	(void)pthread_mutex_init(&cpu->workspaces_lock, NULL);
	list_init(&cpu->free_workspaces);
	r = choose_level(config, &cpu->level, err);
	if (r == 0) {
		cpu->pool = pool_new(config->threads);
		if (!cpu->pool)
			r = fmha_error_set(err, FMHA_ENOMEM, "device: cannot start its threads");
	}
	if (r < 0) {
		free(cpu);
		return r;
	}
	cpu->base.ops = &cpu_device_ops;
	info = &cpu->base.info;
	snprintf(info->name, sizeof(info->name), "%s",
		 config->name[0] ? config->name : config->backend);
	snprintf(info->backend, sizeof(info->backend), "%s", config->backend);
	snprintf(info->arch, sizeof(info->arch), "%s", cpu_level_name(cpu->level));
	info->compute_units = pool_n_threads(cpu->pool);
	describe_model(info);
	describe_peak(info, cpu->level);
	info->memory_bytes = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
	*ret_device = &cpu->base;
	return 0;
}

static void cpu_close(struct device *device)
{
	struct cpu_device *cpu = cpu_device(device);

	cpu_trim_memory(device);
	cpu_trim(device);
	pool_free(cpu->pool);
	pthread_mutex_destroy(&device->mutex);
	free(cpu);
}

const struct device_ops cpu_device_ops = {.backend = "cpu",
					  .open = cpu_device_open,
					  .check = cpu_check,
					  .close = cpu_close,
					  .memory_cost = cpu_memory_cost,
					  .workspace_cost = cpu_workspace_cost,
					  .memory_create = cpu_memory_create,
					  .memory_import = cpu_memory_import,
					  .memory_free = cpu_memory_free,
					  .workspace_new = cpu_workspace_new,
					  .workspace_free = cpu_workspace_free,
					  .find_kernel = cpu_find_kernel,
					  .prepare = cpu_prepare,
					  .stream_new = cpu_stream_new,
					  .stream_free = cpu_stream_free,
					  .launch_new = cpu_launch_new,
					  .launch_free = cpu_launch_free,
					  .submit = cpu_submit,
					  .run_here = cpu_run_here,
					  .cancel = cpu_cancel,
					  .stalled_ns = cpu_stalled_ns,
					  .trim = cpu_trim,
					  .trim_memory = cpu_trim_memory};
