/* SPDX-License-Identifier: MIT */
/* Connecting: the path's order, hello, what the front answers, forks, timeouts, restarts. */
#include "support.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <proto/messages.h>

static void hello_says_who_answers(void **state)
{
	struct fixture *f = *state;
	struct fmha_client_info info;

	assert_ok(fmha_client_info(f->client, &info, &err));
	assert_int_equal(info.protocol, PROTO_VERSION);
	assert_int_equal(info.daemon_pid, getpid());
	assert_int_equal(info.n_devices, 1);
	assert_string_equal(info.server, "fake/1");
	assert_string_equal(info.path, fake_path(f->server));
	assert_ok(fmha_client_ping(f->client, &err));
	assert_ok(fmha_device_ping(f->device, &err));
}

static void devices_and_status_are_copied(void **state)
{
	struct fixture *f = *state;
	struct fmha_device_info devices[2] = {0};
	char *json = NULL;
	size_t n = 0;

	assert_ok(fmha_client_devices(f->client, devices, 2, &n, &err));
	assert_int_equal(n, 1);
	assert_string_equal(devices[0].arch, "x86_64_v3");
	assert_string_equal(devices[0].state, "ready");
	assert_ok(fmha_client_devices(f->client, NULL, 0, &n, &err));
	assert_int_equal(n, 1);
	assert_ok(fmha_client_status(f->client, &json, &err));
	assert_string_equal(json, "{\"sessions\": [], \"fake\": true}");
	free(json);
}

static void any_device_is_the_ready_one(void **state)
{
	struct fixture *f = *state;
	struct fmha_device *device;
	struct fmha_device_info info;

	assert_ok(fmha_device_open(f->client, FMHA_ANY_DEVICE, &device, &err));
	assert_ok(fmha_device_info(device, &info, &err));
	assert_int_equal(info.device, 0);
	device = fmha_device_free(device);
	assert_error(fmha_device_open(f->client, 7, &device, &err), FMHA_ENOENT);
}

static void arguments_are_checked(void **state)
{
	struct fixture *f = *state;
	struct fmha_client_options options = {.struct_size = 4};
	struct fmha_client *client;
	char path[200];

	assert_error(fmha_connect(&options, &client, &err), FMHA_EINVAL);
	options.struct_size = sizeof(options);
	memset(path, 'a', sizeof(path) - 1);
	path[sizeof(path) - 1] = '\0';
	options.path = path;
	assert_error(fmha_connect(&options, &client, &err), FMHA_EINVAL);
	options.path = "/nonexistent/socket";
	assert_error(fmha_connect(&options, &client, &err), FMHA_ECONN);
	assert_error(fmha_connect(NULL, NULL, &err), FMHA_EINVAL);
	assert_error(fmha_client_ping(NULL, &err), FMHA_EINVAL);
	assert_error(fmha_client_status(f->client, NULL, &err), FMHA_EINVAL);
	assert_error(fmha_client_devices(f->client, NULL, 1, NULL, &err), FMHA_EINVAL);
	assert_error(fmha_device_open(f->client, 0, NULL, &err), FMHA_EINVAL);
	assert_null(fmha_client_free(NULL));
	assert_null(fmha_device_free(NULL));
}

static void path_order_is_environment_then_runtime_directory(void **state)
{
	struct fixture *f = *state;
	struct fmha_client *client;
	struct fmha_client_info info;
	char link_path[128], directory[] = "/tmp/fmha_xdg_XXXXXX";

	assert_int_equal(setenv("FMHAD_SOCKET", fake_path(f->server), 1), 0);
	assert_int_equal(setenv("XDG_RUNTIME_DIR", "/nonexistent", 1), 0);
	assert_ok(fmha_connect(NULL, &client, &err));
	client = fmha_client_free(client);

	/* What $FMHAD_SOCKET names is final. */
	assert_non_null(mkdtemp(directory));
	(void)snprintf(link_path, sizeof(link_path), "%s/fmhad.sock", directory);
	assert_int_equal(symlink(fake_path(f->server), link_path), 0);
	assert_int_equal(setenv("XDG_RUNTIME_DIR", directory, 1), 0);
	assert_int_equal(setenv("FMHAD_SOCKET", "/nonexistent/socket", 1), 0);
	assert_error(fmha_connect(NULL, &client, &err), FMHA_ECONN);

	assert_int_equal(unsetenv("FMHAD_SOCKET"), 0);
	assert_ok(fmha_connect(NULL, &client, &err));
	assert_ok(fmha_client_info(client, &info, &err));
	assert_string_equal(info.path, link_path);
	client = fmha_client_free(client);
	assert_int_equal(unsetenv("XDG_RUNTIME_DIR"), 0);
	unlink(link_path);
	rmdir(directory);
}

static void silence_ends_at_the_deadline(void **state)
{
	struct fixture *f = *state;
	struct fmha_client *client = connect_with_timeout(f, 150);
	double start = now_seconds();

	fake_misbehave(f->server, PROTO_PING, FAKE_SILENT, 0, 1);
	assert_error(fmha_client_ping(client, &err), FMHA_ETIMEDOUT);
	assert_in_range((unsigned)((now_seconds() - start) * 1000), 100, 1000);
	/* Nothing else suffers. */
	assert_ok(fmha_client_ping(client, &err));
	client = fmha_client_free(client);
}

static void silent_hello_ends_at_the_deadline(void **state)
{
	struct fixture *f = *state;
	const struct fmha_client_options options = {
		.struct_size = sizeof(options), .timeout_ms = 100, .path = fake_path(f->server)};
	struct fmha_client *client;

	fake_misbehave(f->server, PROTO_HELLO, FAKE_SILENT, 0, 1);
	assert_error(fmha_connect(&options, &client, &err), FMHA_ETIMEDOUT);
}

static void restart_of_the_daemon_is_survived(void **state)
{
	struct fixture *f = *state;

	fake_pause(f->server);
	assert_error(fmha_client_ping(f->client, &err), FMHA_ECONN);
	assert_error(fmha_device_ping(f->device, &err), FMHA_ECONN);
	fake_resume(f->server);
	assert_ok(fmha_client_ping(f->client, &err));
	assert_ok(fmha_device_ping(f->device, &err));
	assert_int_equal(fake_counters(f->server).hellos, 2);
}

static void busy_worker_is_waited_for(void **state)
{
	struct fixture *f = *state;
	struct fmha_device *device;

	fake_misbehave(f->server, PROTO_OPEN_DEVICE, FAKE_BUSY, 0, 3);
	assert_ok(fmha_device_open(f->client, 0, &device, &err));
	device = fmha_device_free(device);
}

static void objects_are_freed_in_any_order(void **state)
{
	struct fixture *f = *state;
	struct fmha_client *client = connect_with_timeout(f, 1000);
	struct fmha_device *device;
	struct fmha_buffer *buffer;

	assert_ok(fmha_device_open(client, 0, &device, &err));
	assert_ok(fmha_buffer_new(device, 4096, &buffer, &err));
	client = fmha_client_free(client);
	device = fmha_device_free(device);
	memset(fmha_buffer_data(buffer), 1, 4096);
	buffer = fmha_buffer_free(buffer);
	assert_int_equal(fake_counters(f->server).buffers, 0);
}

static int child(struct fixture *f, struct fmha_buffer *buffer)
{
	struct fmha_error err = {0};
	struct fmha_buffer *other;

	if (fmha_client_ping(f->client, &err) != FMHA_ECONN || !strstr(err.msg, "fork"))
		return 1;
	if (fmha_device_ping(f->device, &err) != FMHA_ECONN)
		return 2;
	if (fmha_buffer_new(f->device, 4096, &other, &err) != FMHA_ECONN)
		return 3;
	if (fmha_buffer_free(buffer) || fmha_device_free(f->device) || fmha_client_free(f->client))
		return 4;
	return 0;
}

static void forked_child_leaves_the_parent_alone(void **state)
{
	struct fixture *f = *state;
	struct fmha_buffer *buffer;
	int status;
	pid_t pid;

	assert_ok(fmha_buffer_new(f->device, 4096, &buffer, &err));
	memset(fmha_buffer_data(buffer), 42, 4096);
	pid = fork();
	if (pid == 0)
		_exit(child(f, buffer));
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_true(WIFEXITED(status));
	assert_int_equal(WEXITSTATUS(status), 0);
	assert_int_equal(fake_counters(f->server).buffers, 1);
	assert_int_equal(((uint8_t *)fmha_buffer_data(buffer))[4095], 42);
	assert_ok(fmha_client_ping(f->client, &err));
	assert_ok(fmha_device_ping(f->device, &err));
	buffer = fmha_buffer_free(buffer);
}

/* AddressSanitizer keeps what it mapped for a thread's signals, which is large where a CPU's state is
 * (AMX): a mapping each. */
#ifdef __SANITIZE_ADDRESS__
#define SANITIZED true
#else
#define SANITIZED false
#endif

static void cycles_leave_nothing(void **state)
{
	struct fixture *f = *state;
	int fds = 0, maps = 0;

	for (int i = 0; i < 200; i++) {
		struct fmha_client *client = connect_with_timeout(f, 5000);
		struct fmha_device *device;
		struct fmha_buffer *buffer;
		struct fmha_problem problem;

		make_problem(&problem, 8, 2, 16);
		assert_ok(fmha_device_open(client, 0, &device, &err));
		buffer = make_tensors(device, &problem, (uint32_t)i);
		assert_ok(fmha_forward(device, &problem, NULL, NULL, &err));
		check_tensors(buffer, &problem);
		buffer = fmha_buffer_free(buffer);
		device = fmha_device_free(device);
		client = fmha_client_free(client);
		/* The server's own descriptors and stacks are part of this process. */
		while (fake_counters(f->server).connections > 2)
			usleep(100);
		if (i == 20) {
			usleep(50000);
			fds = open_fds();
			maps = mappings();
		}
	}
	usleep(50000); /* the server joins what has ended */
	assert_in_range(open_fds(), fds - 4, fds + 4);
	if (!SANITIZED)
		assert_in_range(mappings(), maps - 40, maps + 40);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, fixture_setup, fixture_teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(hello_says_who_answers),
		TEST(devices_and_status_are_copied),
		TEST(any_device_is_the_ready_one),
		TEST(arguments_are_checked),
		TEST(path_order_is_environment_then_runtime_directory),
		TEST(silence_ends_at_the_deadline),
		TEST(silent_hello_ends_at_the_deadline),
		TEST(restart_of_the_daemon_is_survived),
		TEST(busy_worker_is_waited_for),
		TEST(objects_are_freed_in_any_order),
		TEST(forked_child_leaves_the_parent_alone),
		TEST(cycles_leave_nothing),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
