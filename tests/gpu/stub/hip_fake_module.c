/* SPDX-License-Identifier: MIT */
/*
 * hip_fake_module.c: code and launches. A module is the text "stub code", or a code object for the device's arch,
 * which the runner executes: a program that is told of each launch by a line and answers "ok" when it is done,
 * having mapped the memory that it is told of.
 */
#include "hip_fake.h"

#include <elf.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "stub_kernels.h"

#define AMDGPU        224 /* EM_AMDGPU */
#define LDS_PER_BLOCK (64 << 10)
#define MOST_THREADS  1024

struct fake_module {
	const char *image; /* the caller's, which has to stay */
	char head[9];
	int code; /* a file with the code object; -1: the stub's */
	struct fake_function *functions;
};

/* The number by which a code object says its arch. */
static unsigned machine_of(const char *arch)
{
	static const struct {
		const char *arch;
		unsigned machine;
	} machines[] = {{"gfx90a", 0x3f},
			{"gfx1100", 0x41},
			{"gfx942", 0x4c},
			{"gfx1201", 0x4e},
			{"gfx950", 0x4f}};

	for (size_t i = 0; i < sizeof(machines) / sizeof(machines[0]); i++)
		if (strcmp(machines[i].arch, arch) == 0)
			return machines[i].machine;
	return 0;
}

/* How the code object wants a feature, against what "gfx942:sramecc+:xnack-" has. */
static bool feature_fits(const char *name, const char *feature, unsigned wanted)
{
	const char *at = strstr(name, feature);
	char sign = at ? at[strlen(feature)] : '\0';

	return wanted == 0 || wanted == 1 || (wanted == 2 && sign == '-') ||
	       (wanted == 3 && sign == '+');
}

static hipError_t check_code(const Elf64_Ehdr *code)
{
	hipDeviceProp_t properties;
	char arch[64];

	if (memcmp(code->e_ident, ELFMAG, SELFMAG) != 0)
		return hipErrorInvalidImage;
	if (hipGetDeviceProperties(&properties, 0) != hipSuccess)
		return hipErrorInvalidImage;
	(void)snprintf(arch, sizeof(arch), "%.*s", (int)strcspn(properties.gcnArchName, ":"),
		       properties.gcnArchName);
	if (code->e_machine != AMDGPU || (code->e_flags & 0xff) != machine_of(arch) ||
	    !feature_fits(properties.gcnArchName, ":xnack", code->e_flags >> 8 & 3) ||
	    !feature_fits(properties.gcnArchName, ":sramecc", code->e_flags >> 10 & 3))
		return hipErrorNoBinaryForGpu;
	return hipSuccess;
}

static size_t size_of(const Elf64_Ehdr *code)
{
	return code->e_shoff + (size_t)code->e_shentsize * code->e_shnum;
}

hipError_t hipModuleLoadData(hipModule_t *module, const void *image)
{
	struct fake_module *made;
	hipError_t status;

	ENTER("hipModuleLoadData");
	fake_first("module");
	made = calloc(1, sizeof(*made));
	if (!made)
		return hipErrorOutOfMemory;
	made->code = -1;
	made->image = image;
	memcpy(made->head, image, sizeof(made->head));
	if (strncmp(image, "stub code", 9) != 0) {
		status = check_code(image);
		if (status != hipSuccess) {
			free(made);
			return status;
		}
		made->code = memfd_create("code", MFD_CLOEXEC);
		if (write(made->code, image, size_of(image)) < 0) {
			free(made);
			return hipErrorOutOfMemory;
		}
	}
	fake_add(COUNT_MODULES, 1);
	*module = (hipModule_t)made;
	return hipSuccess;
}

/* As if something of it were read. */
static void read_image(const struct fake_module *module)
{
	if (memcmp(module->image, module->head, sizeof(module->head)) == 0)
		return;
	(void)fprintf(stderr, "the image of a module is gone\n");
	abort();
}

hipError_t hipModuleUnload(hipModule_t module)
{
	hipError_t told = fake_enter("hipModuleUnload");
	struct fake_module *gone = (struct fake_module *)module;

	fake_wait_for_all();
	while (gone->functions) {
		struct fake_function *function = gone->functions;

		gone->functions = function->next;
		free(function);
	}
	if (gone->code >= 0)
		(void)close(gone->code);
	free(gone);
	fake_add(COUNT_MODULES, -1);
	return told;
}

hipError_t hipModuleGetFunction(hipFunction_t *function, hipModule_t module, const char *name)
{
	struct fake_module *in = (struct fake_module *)module;
	struct fake_function *made;

	ENTER("hipModuleGetFunction");
	read_image(in);
	if (strncmp(name, "fmha_", 5) != 0)
		return hipErrorNotFound;
	made = calloc(1, sizeof(*made));
	if (!made)
		return hipErrorOutOfMemory;
	made->module = in;
	(void)snprintf(made->name, sizeof(made->name), "%s", name);
	made->next = in->functions;
	in->functions = made;
	*function = (hipFunction_t)made;
	return hipSuccess;
}

/* As in AMD's runtime, a module's function is none: only those that a program has registered are found. */
hipError_t hipFuncSetAttribute(const void *function, hipFuncAttribute attribute, int value)
{
	(void)function, (void)attribute, (void)value;
	ENTER("hipFuncSetAttribute");
	return hipErrorInvalidDeviceFunction;
}

hipError_t hipModuleLaunchKernel(hipFunction_t function, unsigned grid_x, unsigned grid_y,
				 unsigned grid_z, unsigned block_x, unsigned block_y,
				 unsigned block_z, unsigned lds_bytes, hipStream_t stream,
				 void **parameters, void **extra)
{
	struct fake_function *launched = (struct fake_function *)function;
	struct fake_packet kernel = {.kind = PACKET_KERNEL,
				     .function = launched,
				     .grid = {grid_x, grid_y, grid_z},
				     .block = {block_x, block_y, block_z},
				     .lds_bytes = lds_bytes};
	unsigned lds = (unsigned)fake_number("HIP_FAKE_LDS");

	(void)extra;
	ENTER("hipModuleLaunchKernel");
	read_image(launched->module);
	if (grid_x > INT32_MAX || grid_y > 65536 || grid_z > 65536 || !grid_x || !grid_y || !grid_z)
		return hipErrorInvalidValue;
	if ((uint64_t)grid_x * block_x > UINT32_MAX || !block_x || !block_y || !block_z)
		return hipErrorInvalidConfiguration;
	if (lds_bytes > (lds ? lds : LDS_PER_BLOCK) || block_x * block_y * block_z > MOST_THREADS)
		return hipErrorInvalidValue;
	if (!launched->launched)
		(void)usleep((useconds_t)fake_number("HIP_FAKE_FIRST_MS") * 1000);
	launched->launched = true;
	memcpy(&kernel.args, parameters[0], sizeof(kernel.args));
	if (strcmp(launched->name, "fmha_word") == 0 && fake_number("HIP_FAKE_LAX") == 2)
		return hipSuccess;
	return fake_put(stream, &kernel);
}

EXPORT const void *hip_fake_arguments(void);
EXPORT const void *hip_fake_arguments(void)
{
	return stub_kernel_arguments();
}

/* ---- code objects ---- */

static FILE *to_runner, *from_runner;

static void start_runner(void)
{
	char *program = getenv("HIP_FAKE_RUNNER"), *argv[] = {program, NULL};
	posix_spawn_file_actions_t actions;
	int to[2], from[2];
	pid_t pid;

	if (!program || pipe2(to, O_CLOEXEC) < 0 || pipe2(from, O_CLOEXEC) < 0)
		return;
	(void)posix_spawn_file_actions_init(&actions);
	(void)posix_spawn_file_actions_adddup2(&actions, to[0], 0);
	(void)posix_spawn_file_actions_adddup2(&actions, from[1], 1);
	if (posix_spawn(&pid, program, &actions, NULL, argv, environ) == 0) {
		to_runner = fdopen(to[1], "w");
		from_runner = fdopen(from[0], "r");
	}
	(void)posix_spawn_file_actions_destroy(&actions);
	(void)close(to[0]);
	(void)close(from[1]);
}

static void write_launch(const struct fake_packet *kernel, const char *memory)
{
	const uint32_t *grid = kernel->grid;
	const uint8_t *bytes = (const uint8_t *)&kernel->args;
	hipDeviceProp_t properties = {0};

	(void)hipGetDeviceProperties(&properties, 0);
	(void)fprintf(to_runner,
		      "{\"arch\": \"%s\", \"code\": \"/proc/%d/fd/%d\", \"entry\": \"%s\", "
		      "\"grid\": [%u, %u, %u], "
		      "\"threads\": %u, \"lds\": %u, \"memory\": %s, \"args\": \"",
		      properties.gcnArchName, getpid(), kernel->function->module->code,
		      kernel->function->name, grid[0], grid[1], grid[2], kernel->block[0],
		      kernel->lds_bytes, memory);
	for (size_t i = 0; i < sizeof(kernel->args); i++)
		(void)fprintf(to_runner, "%02x", bytes[i]);
	(void)fprintf(to_runner, "\"}\n");
	(void)fflush(to_runner);
}

/* Kernels of all queues take turns. */
static void run_code(const struct fake_packet *kernel)
{
	static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;
	char line[512] = "the runner cannot be started\n", *memory;

	(void)pthread_mutex_lock(&turn);
	if (!to_runner)
		start_runner();
	memory = fake_memory_list();
	if (to_runner && memory) {
		write_launch(kernel, memory);
		if (!fgets(line, sizeof(line), from_runner))
			(void)snprintf(line, sizeof(line), "the runner is gone\n");
	}
	free(memory);
	(void)pthread_mutex_unlock(&turn);
	if (strcmp(line, "ok\n") == 0)
		return;
	(void)fprintf(stderr, "%s: %s", kernel->function->name, line);
	abort();
}

void fake_run(const struct fake_packet *kernel)
{
	if (kernel->function->module->code >= 0)
		run_code(kernel);
	else
		stub_kernel_run(kernel->function->name, &kernel->args);
}
