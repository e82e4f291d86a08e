/* SPDX-License-Identifier: MIT */
/* Buffers: who allocates, who sees what, and what survives a restart. */
#include "support.h"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static void new_buffer_is_mapped_and_released(void **state)
{
	struct fixture *f = *state;
	struct fmha_buffer *buffer, *other;

	assert_ok(fmha_buffer_new(f->device, 10000, &buffer, &err));
	assert_ok(fmha_buffer_new(f->device, 1, &other, &err));
	assert_int_equal(fmha_buffer_size(buffer), 10000);
	assert_int_not_equal(fmha_buffer_id(buffer), 0);
	assert_int_not_equal(fmha_buffer_id(buffer), fmha_buffer_id(other));
	assert_true(fmha_buffer_fd(buffer) >= 0);
	assert_true(fcntl(fmha_buffer_fd(buffer), F_GETFD) & FD_CLOEXEC);
	for (int i = 0; i < 10000; i++)
		assert_int_equal(((uint8_t *)fmha_buffer_data(buffer))[i], 0);
	assert_int_equal(fake_counters(f->server).buffers, 2);
	assert_null(fmha_buffer_free(buffer));
	assert_null(fmha_buffer_free(other));
	assert_int_equal(fake_counters(f->server).buffers, 0);
	assert_null(fmha_buffer_free(NULL));
	assert_int_equal(fmha_buffer_id(NULL), 0);
	assert_null(fmha_buffer_data(NULL));
	assert_error(fmha_buffer_new(f->device, 0, &buffer, &err), FMHA_EINVAL);
}

static void own_memfd_is_shared_without_a_copy(void **state)
{
	struct fixture *f = *state;
	struct fmha_memory memory = {.struct_size = sizeof(memory), .size = 8192};
	struct fmha_buffer *buffer;
	uint8_t *mine;

	assert_ok(fmha_memfd_new(8192, &memory.fd, &err));
	mine = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, memory.fd, 0);
	assert_ptr_not_equal(mine, MAP_FAILED);
	assert_ok(fmha_buffer_import(f->device, &memory, &buffer, &err));
	close(memory.fd); /* borrowed */
	mine[5000] = 7;
	assert_int_equal(((uint8_t *)fmha_buffer_data(buffer))[5000], 7);
	munmap(mine, 8192);
	assert_int_equal(fake_counters(f->server).imports, 1);
	buffer = fmha_buffer_free(buffer);
}

static void import_checks_what_it_gets(void **state)
{
	struct fixture *f = *state;
	struct fmha_memory memory = {.struct_size = sizeof(memory), .size = 4096};
	struct fmha_buffer *buffer;
	int ends[2];

	memory.fd = memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	assert_int_equal(ftruncate(memory.fd, 4096), 0);
	assert_error(fmha_buffer_import(f->device, &memory, &buffer, &err), FMHA_EINVAL);
	close(memory.fd);

	assert_ok(fmha_memfd_new(4096, &memory.fd, &err));
	memory.size = 4097;
	assert_error(fmha_buffer_import(f->device, &memory, &buffer, &err), FMHA_EINVAL);
	memory.size = 4096;
	memory.base_offset = 4096;
	assert_error(fmha_buffer_import(f->device, &memory, &buffer, &err), FMHA_EINVAL);
	memory.base_offset = 1;
	assert_error(fmha_buffer_import(f->device, &memory, &buffer, &err), FMHA_EINVAL);
	memory.base_offset = UINT64_MAX;
	assert_error(fmha_buffer_import(f->device, &memory, &buffer, &err), FMHA_EINVAL);
	memory.base_offset = 0;
	memory.size = 0;
	assert_error(fmha_buffer_import(f->device, &memory, &buffer, &err), FMHA_EINVAL);
	memory.size = 4096;
	memory.kind = 9;
	assert_error(fmha_buffer_import(f->device, &memory, &buffer, &err), FMHA_EINVAL);
	memory.kind = FMHA_MEMORY_IPC_HANDLE;
	assert_error(fmha_buffer_import(f->device, &memory, &buffer, &err), FMHA_EINVAL);
	memory.kind = FMHA_MEMORY_FD;
	memory.struct_size--;
	assert_error(fmha_buffer_import(f->device, &memory, &buffer, &err), FMHA_EINVAL);
	memory.struct_size++;
	close(memory.fd);

	assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
	memory.fd = ends[0];
	assert_error(fmha_buffer_import(f->device, &memory, &buffer, &err), FMHA_EINVAL);
	close(ends[0]);
	close(ends[1]);
	memory.fd = -1;
	assert_error(fmha_buffer_import(f->device, &memory, &buffer, &err), FMHA_EINVAL);
	assert_int_equal(fake_counters(f->server).imports, 0);
	assert_error(fmha_memfd_new(0, &memory.fd, &err), FMHA_EINVAL);
	assert_error(fmha_memfd_new(UINT64_MAX, &memory.fd, &err), FMHA_EINVAL);
}

static void own_memfd_cannot_be_resized(void **state)
{
	int fd;

	(void)state;
	assert_ok(fmha_memfd_new(4096, &fd, &err));
	assert_int_equal(ftruncate(fd, 0), -1);
	assert_int_equal(ftruncate(fd, 8192), -1);
	assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE), -1);
	close(fd);
}

static void contents_survive_the_workers_death(void **state)
{
	struct fixture *f = *state;
	struct fmha_problem problem;
	struct fmha_buffer *buffer;
	uint64_t id;
	void *data;

	make_problem(&problem, 4, 2, 8);
	buffer = make_tensors(f->device, &problem, 3);
	id = fmha_buffer_id(buffer);
	data = fmha_buffer_data(buffer);
	fake_kill_workers(f->server);
	assert_int_equal(fake_counters(f->server).buffers, 0);

	assert_ok(fmha_forward(f->device, &problem, NULL, NULL, &err));
	assert_int_equal(fake_counters(f->server).imports, 1);
	assert_int_equal(fmha_buffer_id(buffer), id);
	assert_ptr_equal(fmha_buffer_data(buffer), data);
	check_tensors(buffer, &problem);
	buffer = fmha_buffer_free(buffer);
	assert_int_equal(fake_counters(f->server).buffers, 0);
}

static void worker_memory_that_may_shrink_is_refused(void **state)
{
	struct fixture *f = *state;
	static const enum fake_fault faults[] = {FAKE_UNSEALED, FAKE_SHORT, FAKE_PIPE};
	struct fmha_buffer *buffer;

	for (size_t i = 0; i < sizeof(faults) / sizeof(faults[0]); i++) {
		fake_misbehave(f->server, PROTO_BUFFER_CREATE, faults[i], 0, 1);
		assert_error(fmha_buffer_new(f->device, 1 << 16, &buffer, &err), FMHA_EPROTO);
	}
	assert_ok(fmha_buffer_new(f->device, 1 << 16, &buffer, &err));
	buffer = fmha_buffer_free(buffer);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, fixture_setup, fixture_teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(new_buffer_is_mapped_and_released),
		TEST(own_memfd_is_shared_without_a_copy),
		TEST(import_checks_what_it_gets),
		cmocka_unit_test(own_memfd_cannot_be_resized),
		TEST(contents_survive_the_workers_death),
		TEST(worker_memory_that_may_shrink_is_refused),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
