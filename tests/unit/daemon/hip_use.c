/* SPDX-License-Identifier: MIT */
#include "hip_use.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <dlfcn.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- the fake ---- */

void (*fake_set)(const char *variable, const char *value);
long (*fake_count)(const char *name);

void find_fake(void)
{
	void *module = dlopen("libamdhip64.so", RTLD_NOW | RTLD_NOLOAD);

	if (!module)
		module = dlopen(HIP_FAKE, RTLD_NOW);
	assert_non_null(module);
	*(void **)&fake_set = dlsym(module, "hip_fake_set");
	*(void **)&fake_count = dlsym(module, "hip_fake_count");
}

void tell_nothing(void)
{
	static const char *const variables[] = {
		"HIP_FAKE_FAIL",     "HIP_FAKE_BLOCK",     "HIP_FAKE_FAULT",  "HIP_FAKE_FIRST_MS",
		"HIP_FAKE_TOUCH_MS", "HIP_FAKE_KERNEL_US", "HIP_FAKE_DMABUF", "HIP_FAKE_IPC"};

	for (size_t i = 0; i < sizeof(variables) / sizeof(variables[0]); i++)
		fake_set(variables[i], "");
}

void assert_nothing_is_left(const char *when)
{
	static const char *const names[] = {"allocations", "pinned", "imports",
					    "streams",     "events", "modules"};

	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
		if (fake_count(names[i]) != 0)
			fail_msg("%s: %ld %s are left", when, fake_count(names[i]), names[i]);
	if (fake_count("unpinned copies") != 0)
		fail_msg("%s: a copy made its thread wait", when);
}

/* ---- another process, which shares memory ---- */

/* What it does for each byte that it reads: 'a' allocates, 'f' frees the last, and tells the handle. */
void be_peer(int in, int out)
{
	void *hip = dlopen(HIP_FAKE, RTLD_NOW);
	int (*allocate)(void **, size_t), (*release)(void *), (*get)(void *, void *);
	struct shared told = {0};
	void *memory = NULL;
	char what;

	*(void **)&allocate = dlsym(hip, "hipMalloc");
	*(void **)&release = dlsym(hip, "hipFree");
	*(void **)&get = dlsym(hip, "hipIpcGetMemHandle");
	while (read(in, &what, 1) == 1) {
		if (what == 'f')
			(void)release(memory);
		else if (allocate(&memory, BYTES) == 0)
			(void)get(told.handle, memory);
		told.address = (uint64_t)(uintptr_t)memory;
		if (what == 'a')
			memset(memory, 0, BYTES);
		if (write(out, &told, sizeof(told)) != sizeof(told))
			break;
	}
	_exit(0);
}

/* A process of its own: this program, told to be a peer. */
struct peer start_peer(void)
{
	struct peer peer;
	char in[16], out[16];
	int to[2], from[2];

	assert_int_equal(pipe(to), 0);
	assert_int_equal(pipe(from), 0);
	assert_int_equal(fcntl(to[1], F_SETFD, FD_CLOEXEC), 0);
	assert_int_equal(fcntl(from[0], F_SETFD, FD_CLOEXEC), 0);
	(void)snprintf(in, sizeof(in), "%d", to[0]);
	(void)snprintf(out, sizeof(out), "%d", from[1]);
	char *argv[] = {"test_hip_device", PEER, in, out, NULL};

	assert_int_equal(posix_spawn(&peer.pid, "/proc/self/exe", NULL, NULL, argv, environ), 0);
	(void)close(to[0]);
	(void)close(from[1]);
	peer.to = to[1];
	peer.from = from[0];
	return peer;
}

struct shared ask_peer(const struct peer *peer, char what)
{
	struct shared told;

	assert_int_equal(write(peer->to, &what, 1), 1);
	assert_int_equal(read(peer->from, &told, sizeof(told)), sizeof(told));
	return told;
}

void end_peer(const struct peer *peer)
{
	(void)close(peer->to);
	(void)close(peer->from);
	assert_int_equal(waitpid(peer->pid, NULL, 0), peer->pid);
}

/* ---- a worker's use of a device ---- */

static void on_wake(void *owner)
{
	(void)owner;
}

static void note(struct use *use, const struct fmha_error *error)
{
	if (use->error.code == FMHA_OK)
		use->error = *error;
}

static int take_build(void *owner, struct device_build *build, struct fmha_error *err)
{
	(void)err;
	((struct use *)owner)->build = build;
	return 0;
}

static void on_ready(void *owner, const struct fmha_error *error)
{
	struct use *use = owner;

	use->ready = error->code == FMHA_OK;
	if (!use->ready)
		note(use, error);
}

static void on_done(struct device_launch *launch)
{
	((struct use *)launch->owner)->done = true;
}

/* Whether the launch ended well. */
bool collect(struct use *use)
{
	uint64_t end = clock_ns() + PATIENCE;

	while (!use->done) {
		device_collect(use->device);
		assert_true(clock_ns() < end);
		(void)usleep(100);
	}
	note(use, &use->launch->error);
	return use->launch->error.code == FMHA_OK;
}

void submit(struct use *use)
{
	use->done = false;
	device_submit(use->device, use->launch);
}

int memfd_of(size_t bytes)
{
	int fd = memfd_create("client", MFD_CLOEXEC | MFD_ALLOW_SEALING);

	assert_int_equal(ftruncate(fd, (off_t)bytes), 0);
	assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL), 0);
	return fd;
}

int import(struct use *use, uint32_t kind, int fd, const uint8_t *handle, uint64_t size,
	   struct device_memory *ret_memory, struct fmha_error *err)
{
	const struct device_memory_source source = {.kind = kind,
						    .fd = fd,
						    .handle = handle,
						    .handle_bytes = handle ? 64 : 0,
						    .size = size,
						    .uid = getuid(),
						    .pid = (uint32_t)getpid()};

	return device_memory_import(use->device, &source, ret_memory, err);
}

static void open_device(struct use *use)
{
	static const struct device_calls calls = {.wake = on_wake, .build = take_build};
	const struct config_device config = {.backend = "hip", .stall_ms = 5000};

	TRY(use, device_open(&config, &calls, use, &use->device, &err));
}

void load_kernel(struct use *use)
{
	char image[] = "stub code"; /* which is gone when this returns */
	const struct device_code code = {.data = image, .bytes = sizeof(image), .fd = -1};
	struct fmha_error err = {0};
	int r;

	use->waiter = (struct device_waiter){.done = on_ready, .owner = use};
	r = device_prepare_tables(use->device, &use->waiter, &use->kernel, &err);
	if (r < 0)
		note(use, &err);
	if (r != DEVICE_PREPARING)
		return;
	use->build->done(use->build, &code, &err);
	memset(image, 0, sizeof(image));
}

void get_memory(struct use *use, const uint8_t *handle)
{
	int fd = memfd_of(BYTES);

	struct fmha_error err = {0};
	int r = import(use, PROTO_MEMFD, fd, NULL, BYTES, &use->memfd, &err);

	(void)close(fd);
	if (r == 0)
		r = import(use, PROTO_IPC_HANDLE, -1, handle, BYTES, &use->imported, &err);
	if (r == 0)
		r = device_workspace_new(use->device, BYTES, &use->workspace, &err);
	if (r == 0)
		r = device_staging_new(use->device, BYTES, &use->staging, &err);
	if (r == 0)
		r = device_stream_new(use->device, getuid(), 1, &use->stream, &err);
	if (r < 0)
		note(use, &err);
	if (r < 0)
		return;
	use->launch = device_launch_new(use->device);
	if (!use->launch)
		(void)device_has_failed(use->device, &use->error);
	if (!use->launch && use->error.code == FMHA_OK)
		use->error = (struct fmha_error){.code = FMHA_ENOMEM, .msg = "no launch"};
}

/* A launch with everything that one can have: copies both ways, a clear, a kernel, a fence each way. */
void fill_launch(struct use *use)
{
	struct device_launch *launch = use->launch;
	char *counters = use->imported.device;

	use->record.args.prepare = (struct abi_prepare_args){.grid = 1};
	device_place_tables(use->device, &use->record);
	launch->stream = use->stream;
	launch->n_stages = 1;
	launch->kernels[0] = use->kernel;
	launch->records[0] = &use->record;
	launch->names[0] = "tables";
	launch->args[0].prepare = (struct abi_prepare_args){.grid = 1};
	launch->on_done = on_done;
	launch->owner = use;
	launch->n_uploads = launch->n_downloads = 1;
	launch->uploads[0] = (struct device_copy){use->memfd.host, use->memfd.device, BYTES};
	launch->downloads[0] = launch->uploads[0];
	launch->zero = use->workspace.device;
	launch->zero_bytes = BYTES;
	launch->n_waits = launch->n_signals = 1;
	launch->waits[0] = (struct device_fence){counters, 0};
	launch->signals[0] = (struct device_fence){counters + 4, 7};
}

/* A launch; one by this thread; one whose fence nobody signals, until it is released. */
static void launch_all(struct use *use)
{
	struct device_launch *launch = use->launch;

	fill_launch(use);
	submit(use);
	if (!collect(use))
		return;
	launch->n_waits = 0;
	if (!device_run_here(use->device, launch)) {
		note(use, &(struct fmha_error){.code = FMHA_EBUSY, .msg = "was not run here"});
		return;
	}
	note(use, &launch->error);
	if (launch->error.code != FMHA_OK)
		return;
	launch->n_waits = 1;
	launch->waits[0].value = 1;
	submit(use);
	(void)device_release_fences(use->device, launch);
	if (!collect(use))
		return;
	launch->waits[0].value = 0;
	submit(use);
	(void)collect(use);
}

void give_back(struct use *use)
{
	if (!use->device)
		return;
	use->launch = device_launch_free(use->device, use->launch);
	use->stream = device_stream_free(use->device, use->stream);
	if (use->staging.map)
		device_staging_free(use->device, &use->staging);
	if (use->workspace.map)
		device_workspace_free(use->device, &use->workspace);
	if (use->imported.map)
		device_memory_free(use->device, &use->imported);
	if (use->memfd.map)
		device_memory_free(use->device, &use->memfd);
	device_trim(use->device);
	use->device = device_close(use->device);
}

/* All of it. Return: how the first failure was told; code FMHA_OK: there was none. */
struct fmha_error use_device(const uint8_t *handle)
{
	struct use use = {0};

	open_device(&use);
	if (use.error.code == FMHA_OK)
		load_kernel(&use);
	if (use.error.code == FMHA_OK)
		get_memory(&use, handle);
	if (use.error.code == FMHA_OK)
		launch_all(&use);
	give_back(&use);
	return use.error;
}

struct use *opened(void)
{
	static struct use use;

	use = (struct use){0};
	open_device(&use);
	assert_int_equal(use.error.code, FMHA_OK);
	return &use;
}
