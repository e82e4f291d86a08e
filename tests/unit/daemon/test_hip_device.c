/* SPDX-License-Identifier: MIT */
/*
 * The device layer on a libamdhip64 that fails: fmhad-hip.so on tests/gpu/stub/hip_fake.h, as a worker uses it.
 * Each call of the runtime fails in turn; an error has to come of it that says something, nothing may be left,
 * and nobody may wait for ever.
 */
#include "hip_use.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

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

/* What a runtime does wrong, by which way, and what is said of it. Nobody uses that way, and the worker lives. */
static void ways_to_share_are_tried_by_others(void **state)
{
	static const struct {
		const char *variable, *what, *descriptors, *handles;
	} cases[] = {
		{"HIP_FAKE_DMABUF", "", "", ""},
		{"HIP_FAKE_DMABUF", "range", "", ""},
		{"HIP_FAKE_DMABUF", "no", "makes none (hipErrorNotSupported)", ""},
		{"HIP_FAKE_DMABUF", "block", "makes none", ""},
		{"HIP_FAKE_DMABUF", "zeros", "does not read what its owner writes", ""},
		{"HIP_FAKE_DMABUF", "deaf", "owner does not read", ""},
		{"HIP_FAKE_DMABUF", "lost", "is lost when its owner", ""},
		{"HIP_FAKE_DMABUF", "closes", "closes descriptors", ""},
		{"HIP_FAKE_DMABUF", "aborts", "ended by signal 6", ""},
		{"HIP_FAKE_IPC", "zeros", "", "does not read what its owner writes"},
		{"HIP_FAKE_IPC", "deaf", "", "owner does not read"},
		{"HIP_FAKE_IPC", "aborts", "", "ended by signal 6"},
		{"HIP_FAKE_FAIL", "hipImportExternalMemory:1+:801", "cannot open it", ""},
		{"HIP_FAKE_FAIL", "hipIpcOpenMemHandle:1+:17", "", "cannot open it"},
		{"HIP_FAKE_FAIL", "hipDestroyExternalMemory:1+:1", "cannot be given back", ""},
	};

	(void)state;
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		const struct device_info *info;
		struct use *use;

		tell_nothing();
		fake_set(cases[i].variable, cases[i].what);
		use = opened();
		info = device_get_info(use->device);
		if (!strstr(info->no_descriptors, cases[i].descriptors) ||
		    !strstr(info->no_handles, cases[i].handles) ||
		    info->descriptors != !cases[i].descriptors[0] ||
		    info->handles != !cases[i].handles[0])
			fail_msg("%s=%s: %d '%s', %d '%s'", cases[i].variable, cases[i].what,
				 info->descriptors, info->no_descriptors, info->handles,
				 info->no_handles);
		give_back(use);
		assert_nothing_is_left(cases[i].what);
	}
}

/* Two processes that hang take eight seconds for what they hang in, and no more. */
static void a_way_that_hangs_is_given_up(void **state)
{
	uint64_t began = clock_ns();
	struct use *use;

	(void)state;
	fake_set("HIP_FAKE_DMABUF", "hangs");
	use = opened();
	assert_in_range(clock_ns() - began, 7 * NS_PER_S, 17 * NS_PER_S);
	assert_non_null(strstr(device_get_info(use->device)->no_descriptors, "longer than 8 s"));
	assert_true(device_get_info(use->device)->handles);
	give_back(use);
}

/* Made here and opened elsewhere, and the other way; what a descriptor does not hold is not mapped. */
static void memory_goes_out_and_comes_in_by_descriptor(void **state)
{
	const uint64_t size = 3 * BYTES + 100, until = clock_ns() + PATIENCE;
	struct use *use = opened();
	struct device_memory made, again;
	struct fmha_error err;
	int fd = -1, other;
	char *view;

	(void)state;
	assert_int_equal(device_memory_create(use->device, size, &made, &fd, &err), 0);
	assert_int_equal(made.kind, PROTO_VMM_FD);
	assert_int_equal(made.allocation_bytes, 2 << 20);
	view = mmap(NULL, made.allocation_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	assert_ptr_not_equal(view, MAP_FAILED);
	for (uint64_t i = 0; i < made.allocation_bytes; i++)
		assert_int_equal(view[i], 0);
	assert_int_equal(import(use, PROTO_VMM_FD, fd, NULL, size, &again, &err), 0);
	((char *)made.device)[size - 1] = 7;
	assert_int_equal(((char *)again.device)[size - 1], 7);
	assert_int_equal(view[size - 1], 7);
	device_memory_free(use->device, &made);
	while (fake_count("allocations") > 0 && clock_ns() < until)
		(void)usleep(1000);
	assert_int_equal(fake_count("allocations"), 0);
	assert_int_equal(((char *)again.device)[size - 1], 7);
	device_memory_free(use->device, &again);
	assert_true(import(use, PROTO_VMM_FD, fd, NULL, (2 << 20) + 1, &again, &err) < 0);
	assert_string_equal(err.field, "fd");
	other = memfd_of(BYTES); /* no memory of a GPU's */
	assert_true(import(use, PROTO_VMM_FD, other, NULL, BYTES, &again, &err) < 0);
	assert_string_equal(err.field, "fd");
	assert_int_equal(fcntl(fd, F_GETFD), FD_CLOEXEC);
	(void)close(other);
	(void)close(fd);
	(void)munmap(view, 2 << 20);
	give_back(use);
	assert_nothing_is_left("after descriptors");
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
		TEST(ways_to_share_are_tried_by_others),
		TEST(a_way_that_hangs_is_given_up),
		TEST(memory_goes_out_and_comes_in_by_descriptor),
		TEST(a_kernel_that_fails_is_told_by_a_later_call), /* and the fake stays so */
	};

	if (argc == 5 && strcmp(argv[1], "--trial") == 0)
		return device_trial(argv[2], argv[3], argv[4]);
	if (argc == 4 && strcmp(argv[1], PEER) == 0)
		be_peer(atoi(argv[2]), atoi(argv[3]));
	if (argc > 1)
		cmocka_set_test_filter(argv[1]);
	return cmocka_run_group_tests(tests, NULL, NULL);
}
