/* SPDX-License-Identifier: MIT */
/*
 * The device layer on a libamdhip64 that fails: fmhad-hip.so on tests/gpu/stub/hip_fake.h, as a worker uses it.
 * Each call of the runtime fails in turn; an error has to come of it that says something, nothing may be left,
 * and nobody may wait for ever.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <dlfcn.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <base/clock.h>
#include <device/device.h>

#define BYTES    65536u
#define PATIENCE (20 * NS_PER_S)
#define PEER     "--peer"

/* ---- the fake ---- */

static void (*fake_set)(const char *variable, const char *value);
static long (*fake_count)(const char *name);

static void find_fake(void)
{
	void *module = dlopen("libamdhip64.so", RTLD_NOW | RTLD_NOLOAD);

	if (!module)
		module = dlopen(HIP_FAKE, RTLD_NOW);
	assert_non_null(module);
	*(void **)&fake_set = dlsym(module, "hip_fake_set");
	*(void **)&fake_count = dlsym(module, "hip_fake_count");
}

static void tell_nothing(void)
{
	static const char *const variables[] = {"HIP_FAKE_FAIL",     "HIP_FAKE_BLOCK",
						"HIP_FAKE_FAULT",    "HIP_FAKE_FIRST_MS",
						"HIP_FAKE_TOUCH_MS", "HIP_FAKE_KERNEL_US"};

	for (size_t i = 0; i < sizeof(variables) / sizeof(variables[0]); i++)
		fake_set(variables[i], "");
}

static void assert_nothing_is_left(const char *when)
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

struct peer {
	pid_t pid;
	int to, from;
};

struct shared {
	uint8_t handle[64];
	uint64_t address;
};

/* What it does for each byte that it reads: 'a' allocates, 'f' frees the last, and tells the handle. */
static void be_peer(int in, int out)
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
static struct peer start_peer(void)
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

static struct shared ask_peer(const struct peer *peer, char what)
{
	struct shared told;

	assert_int_equal(write(peer->to, &what, 1), 1);
	assert_int_equal(read(peer->from, &told, sizeof(told)), sizeof(told));
	return told;
}

static void end_peer(const struct peer *peer)
{
	(void)close(peer->to);
	(void)close(peer->from);
	assert_int_equal(waitpid(peer->pid, NULL, 0), peer->pid);
}

/* ---- a worker's use of a device ---- */

struct use {
	struct device *device;
	struct device_build *build;
	struct device_waiter waiter;
	const struct device_kernel *kernel;
	struct device_memory memfd, imported, workspace, staging;
	struct device_stream *stream;
	struct device_launch *launch;
	struct launch_record record;
	union abi_args args;
	bool ready, done;
	struct fmha_error error; /* the first */
};

static void on_wake(void *owner)
{
	(void)owner;
}

static void note(struct use *use, const struct fmha_error *error)
{
	if (use->error.code == FMHA_OK)
		use->error = *error;
}

/* Ends the attempt at the first failure. */
#define TRY(use, call)                                                                             \
	do {                                                                                       \
		struct fmha_error err = {0};                                                       \
                                                                                                   \
		if ((call) < 0) {                                                                  \
			note(use, &err);                                                           \
			return;                                                                    \
		}                                                                                  \
	} while (0)

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
static bool collect(struct use *use)
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

static void submit(struct use *use)
{
	use->done = false;
	device_submit(use->device, use->launch);
}

static int memfd_of(size_t bytes)
{
	int fd = memfd_create("client", MFD_CLOEXEC | MFD_ALLOW_SEALING);

	assert_int_equal(ftruncate(fd, (off_t)bytes), 0);
	assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL), 0);
	return fd;
}

static int import(struct use *use, uint32_t kind, int fd, const uint8_t *handle, uint64_t size,
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
	const struct config_device config = {.backend = "hip", .stall_ms = 5000};

	TRY(use, device_open(&config, on_wake, use, &use->device, &err));
	device_set_builder(use->device, take_build, NULL, NULL, use);
}

static void load_kernel(struct use *use)
{
	char image[] = "stub code"; /* which is gone when this returns */
	const struct device_code code = {.data = image, .bytes = sizeof(image)};
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

static void get_memory(struct use *use, const uint8_t *handle)
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
static void fill_launch(struct use *use)
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

static void give_back(struct use *use)
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
static struct fmha_error use_device(const uint8_t *handle)
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

/* ---- the tests ---- */

static void all_of_it_works(void **state)
{
	struct peer peer = start_peer();
	struct shared shared = ask_peer(&peer, 'a');
	struct fmha_error error;

	(void)state;
	error = use_device(shared.handle);
	if (error.code != FMHA_OK)
		fail_msg("%d: %s", error.code, error.msg);
	assert_nothing_is_left("after all that works");
	end_peer(&peer);
}

/* Return: whether the failure was told. */
static bool fail_at(const struct shared *shared, const char *what)
{
	struct fmha_error error;

	fake_set("HIP_FAKE_FAIL", what);
	error = use_device(shared->handle);
	fake_set("HIP_FAKE_FAIL", "");
	assert_nothing_is_left(what);
	if (error.code != FMHA_OK && (error.code > 0 || !*error.msg))
		fail_msg("%s: error %d, '%s'", what, error.code, error.msg);
	return error.code != FMHA_OK;
}

/* @code of the runtime, at each call in turn, once or ("+") from then on. */
static void fail_in_turn(const char *code, const char *lasting)
{
	struct peer peer = start_peer();
	struct shared shared = ask_peer(&peer, 'a');
	long before = fake_count("calls"), calls, told = 0;
	char what[64];

	assert_int_equal(use_device(shared.handle).code, FMHA_OK);
	calls = fake_count("calls") - before;
	for (long n = 1; n <= calls; n++) {
		(void)snprintf(what, sizeof(what), "*:%ld%s:%s", n, lasting, code);
		told += fail_at(&shared, what);
	}
	/* The others give something back, or ask what nothing depends on. */
	if (told < calls / 2)
		fail_msg("%ld of %ld failures were told", told, calls);
	(void)snprintf(what, sizeof(what), "hipEventQuery:1%s:%s", lasting, code);
	assert_true(fail_at(&shared, what));
	(void)snprintf(what, sizeof(what), "hipStreamQuery:1%s:%s", lasting, code);
	assert_true(fail_at(&shared, what));
	end_peer(&peer);
}

static void any_call_may_fail_once(void **state)
{
	(void)state;
	fail_in_turn("999", ""); /* hipErrorUnknown */
}

static void any_call_may_fail_from_then_on(void **state)
{
	(void)state;
	fail_in_turn("719", "+"); /* hipErrorLaunchFailure: what a fault leaves behind */
}

static void any_call_may_be_out_of_memory(void **state)
{
	(void)state;
	fail_in_turn("2", ""); /* hipErrorOutOfMemory */
}

static void any_call_may_be_refused(void **state)
{
	(void)state;
	fail_in_turn("1", ""); /* hipErrorInvalidValue */
}

static void a_kernel_that_fails_is_told_by_a_later_call(void **state)
{
	struct peer peer = start_peer();
	struct shared shared = ask_peer(&peer, 'a');
	struct fmha_error error;

	(void)state;
	fake_set("HIP_FAKE_FAULT", "2:late");
	error = use_device(shared.handle);
	assert_int_equal(error.code, FMHA_EDEVICE);
	assert_non_null(strstr(error.msg, "hipErrorLaunchFailure"));
	assert_nothing_is_left("after a fault");
	end_peer(&peer);
}

/* ---- memory ---- */

static struct use *opened(void)
{
	static struct use use;

	use = (struct use){0};
	open_device(&use);
	assert_int_equal(use.error.code, FMHA_OK);
	return &use;
}

static void word_at(struct use *use, const struct device_memory *memory, uint32_t set,
		    uint32_t *get)
{
	(void)use;
	if (get)
		*get = *(volatile uint32_t *)memory->device;
	else
		*(volatile uint32_t *)memory->device = set;
}

/* The handle of memory that was freed is the same as of what lies there next: each import opens what is there. */
static void a_handle_given_again_opens_the_new_memory(void **state)
{
	struct peer peer = start_peer();
	struct shared first = ask_peer(&peer, 'a'), second;
	struct use *use = opened();
	struct fmha_error err;
	uint32_t word;

	(void)state;
	assert_int_equal(
		import(use, PROTO_IPC_HANDLE, -1, first.handle, BYTES, &use->imported, &err), 0);
	word_at(use, &use->imported, 77, NULL);
	device_memory_free(use->device, &use->imported);
	(void)ask_peer(&peer, 'f');
	second = ask_peer(&peer, 'a');
	assert_memory_equal(first.handle, second.handle, sizeof(first.handle));
	assert_int_equal(
		import(use, PROTO_IPC_HANDLE, -1, second.handle, BYTES, &use->imported, &err), 0);
	word_at(use, &use->imported, 0, &word);
	assert_int_equal(word, 0);
	give_back(use);
	assert_nothing_is_left("after a handle was given again");
	end_peer(&peer);
}

/* Nobody but the memory's own runtime knows how much a handle may open, and that one is not asked. */
static void a_handle_that_claims_more_is_refused(void **state)
{
	struct peer peer = start_peer();
	struct shared shared = ask_peer(&peer, 'a');
	struct use *use = opened();
	struct device_memory behind;
	uint64_t forged[8];
	struct fmha_error err;

	(void)state;
	memcpy(forged, shared.handle, sizeof(forged));
	assert_int_equal(forged[4], BYTES);
	forged[4] = 4 * BYTES;
	assert_int_equal(
		import(use, PROTO_IPC_HANDLE, -1, (uint8_t *)forged, BYTES, &use->imported, &err),
		FMHA_EINVAL);
	assert_string_equal(err.field, "handle");
	/* Somebody else's memory right behind it changes nothing. */
	assert_int_equal(
		import(use, PROTO_IPC_HANDLE, -1, shared.handle, BYTES, &use->imported, &err), 0);
	assert_int_equal(device_workspace_new(use->device, 4 * BYTES, &behind, &err), 0);
	device_memory_free(use->device, &use->imported);
	while (fake_count("imports") > 0)
		(void)usleep(100);
	/* Now it would lie where the first one did. */
	assert_int_equal(import(use, PROTO_IPC_HANDLE, -1, (uint8_t *)forged, 2 * BYTES,
				&use->imported, &err),
			 FMHA_EINVAL);
	device_workspace_free(use->device, &behind);
	give_back(use);
	assert_nothing_is_left("after a forged handle");
	end_peer(&peer);
}

/* A handle is an address and a process: everybody can make one of everybody's memory. */
static void a_handle_of_another_users_memory_is_refused(void **state)
{
	struct peer peer = start_peer();
	struct shared shared = ask_peer(&peer, 'a');
	struct use *use = opened();
	struct device_memory_source source = {.kind = PROTO_IPC_HANDLE,
					      .fd = -1,
					      .handle = shared.handle,
					      .handle_bytes = 64,
					      .size = BYTES,
					      .uid = getuid() + 1,
					      .pid = (uint32_t)getpid()};
	struct fmha_error err;

	(void)state;
	assert_int_equal(device_memory_import(use->device, &source, &use->imported, &err),
			 FMHA_EPERM);
	assert_string_equal(err.field, "handle");
	source.pid = (uint32_t)peer.pid; /* a client in another user namespace, say */
	assert_int_equal(device_memory_import(use->device, &source, &use->imported, &err), 0);
	give_back(use);
	end_peer(&peer);
}

/* Giving memory back waits for all streams: for one that waits for a client's word as long as the client likes. */
static void giving_memory_back_waits_for_nobody(void **state)
{
	struct peer peer = start_peer();
	struct shared shared = ask_peer(&peer, 'a');
	struct use *use = opened();
	uint64_t began;
	int fd = memfd_of(BYTES);
	struct fmha_error err;
	struct device_memory other;

	(void)state;
	load_kernel(use);
	get_memory(use, shared.handle);
	assert_int_equal(use->error.code, FMHA_OK);
	fill_launch(use);
	use->launch->waits[0].value = 1;
	submit(use);
	assert_int_equal(import(use, PROTO_MEMFD, fd, NULL, BYTES, &other, &err), 0);
	began = clock_ns();
	device_memory_free(use->device, &other);
	device_trim(use->device);
	assert_true(clock_ns() - began < PATIENCE);
	assert_true(device_release_fences(use->device, use->launch));
	assert_true(collect(use));
	(void)close(fd);
	give_back(use);
	assert_nothing_is_left("after memory was given back during a wait");
	end_peer(&peer);
}

/* What is on the stream when a later part is refused still runs, in memory that the launch must keep. */
static void a_launch_that_is_refused_half_way_ends_when_its_first_half_has(void **state)
{
	struct peer peer = start_peer();
	struct shared shared = ask_peer(&peer, 'a');
	struct use *use = opened();
	uint64_t began;

	(void)state;
	load_kernel(use);
	get_memory(use, shared.handle);
	fill_launch(use);
	fake_set("HIP_FAKE_KERNEL_US", "300000");
	fake_set("HIP_FAKE_FAIL", "hipMemcpyDtoHAsync:1:2");
	began = clock_ns();
	submit(use);
	assert_false(collect(use));
	assert_int_equal(use->error.code, FMHA_ENOMEM);
	assert_true(clock_ns() - began >= 300 * NS_PER_MS);
	use->launch->n_waits = 0;
	fake_set("HIP_FAKE_FAIL", "hipMemcpyDtoHAsync:1:2");
	began = clock_ns();
	assert_true(device_run_here(use->device, use->launch));
	assert_int_equal(use->launch->error.code, FMHA_ENOMEM);
	assert_true(clock_ns() - began >= 300 * NS_PER_MS);
	assert_false(device_has_failed(use->device, NULL));
	give_back(use);
	end_peer(&peer);
}

/* More sessions than the device has queues, all waiting: the words that let them go are on a queue of their own. */
static void fences_of_many_streams_can_be_released(void **state)
{
	enum { STREAMS = 40 };
	struct peer peer = start_peer();
	struct shared shared = ask_peer(&peer, 'a');
	struct use *use = opened(), each[STREAMS];
	struct fmha_error err;

	(void)state;
	load_kernel(use);
	get_memory(use, shared.handle);
	for (int i = 0; i < STREAMS; i++) {
		each[i] = *use;
		assert_int_equal(device_stream_new(use->device, getuid(), 1, &each[i].stream, &err),
				 0);
		each[i].launch = device_launch_new(use->device);
		fill_launch(&each[i]);
		each[i].launch->n_uploads = each[i].launch->n_downloads =
			0; /* all have the same memory */
		each[i].launch->zero_bytes = 0;
		each[i].launch->waits[0].value = 1;
		submit(&each[i]);
	}
	for (int i = 0; i < STREAMS; i++)
		(void)device_release_fences(use->device, each[i].launch);
	for (int i = 0; i < STREAMS; i++) {
		assert_true(collect(&each[i]));
		(void)device_launch_free(use->device, each[i].launch);
		(void)device_stream_free(use->device, each[i].stream);
	}
	give_back(use);
	assert_nothing_is_left("after many fences");
	end_peer(&peer);
}

/* What takes long when it is done first is done before the device is there; what a loop does then is quick. */
static void first_uses_are_over_when_the_device_is_open(void **state)
{
	struct peer peer = start_peer();
	struct shared shared = ask_peer(&peer, 'a');
	struct use *use;
	uint64_t began;

	(void)state;
	fake_set("HIP_FAKE_FIRST_MS", "1000");
	use = opened();
	load_kernel(use);
	get_memory(use, shared.handle);
	fill_launch(use);
	began = clock_ns();
	submit(use); /* a kernel's first launch is all that is left */
	assert_true(clock_ns() - began < 1900 * NS_PER_MS);
	assert_true(collect(use));
	fake_set("HIP_FAKE_FIRST_MS", "");
	give_back(use);
	end_peer(&peer);
}

/* Memory that is on its way back is not missing. */
static void memory_is_not_out_while_some_comes_back(void **state)
{
	struct use *use = opened();
	struct device_memory all, again;
	struct fmha_error err;

	(void)state;
	for (int i = 0; i < 5; i++) {
		assert_int_equal(device_workspace_new(use->device, 3ull << 30, &all, &err), 0);
		device_workspace_free(use->device, &all);
		assert_int_equal(device_workspace_new(use->device, 2ull << 30, &again, &err), 0);
		device_workspace_free(use->device, &again);
	}
	give_back(use);
	assert_nothing_is_left("after large workspaces");
}

static int set_up(void **state)
{
	(void)state;
	find_fake();
	tell_nothing();
	return 0;
}

#define TEST(name) cmocka_unit_test_setup(name, set_up)

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		TEST(first_uses_are_over_when_the_device_is_open),
		TEST(all_of_it_works),
		TEST(any_call_may_fail_once),
		TEST(any_call_may_fail_from_then_on),
		TEST(any_call_may_be_out_of_memory),
		TEST(any_call_may_be_refused),
		TEST(a_handle_given_again_opens_the_new_memory),
		TEST(a_handle_that_claims_more_is_refused),
		TEST(a_handle_of_another_users_memory_is_refused),
		TEST(giving_memory_back_waits_for_nobody),
		TEST(a_launch_that_is_refused_half_way_ends_when_its_first_half_has),
		TEST(fences_of_many_streams_can_be_released),
		TEST(memory_is_not_out_while_some_comes_back),
		TEST(a_kernel_that_fails_is_told_by_a_later_call), /* and the fake stays so */
	};

	if (argc == 4 && strcmp(argv[1], PEER) == 0)
		be_peer(atoi(argv[2]), atoi(argv[3]));
	if (argc > 1)
		cmocka_set_test_filter(argv[1]);
	return cmocka_run_group_tests(tests, NULL, NULL);
}
