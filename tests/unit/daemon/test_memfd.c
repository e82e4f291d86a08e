/* SPDX-License-Identifier: MIT */
/* Shared memory: what a client may hand in, what it gets (RELIABILITY 4.C). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <errno.h>
#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "host_memory.h"

#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)

static int make(uint64_t size, int seals, unsigned int flags)
{
	int fd = memfd_create("client", MFD_CLOEXEC | MFD_ALLOW_SEALING | flags);

	if (fd < 0)
		return -1;
	assert_int_equal(ftruncate(fd, (off_t)size), 0);
	assert_int_equal(fcntl(fd, F_ADD_SEALS, seals), 0);
	return fd;
}

static int import(int fd, uint64_t offset, uint64_t size, struct device_memory *memory,
		  struct fmha_error *err)
{
	struct device_memory_source source = {
		.kind = PROTO_MEMFD, .fd = fd, .base_offset = offset, .size = size};

	return host_memory_import(&source, memory, err);
}

static void assert_refused(int fd, uint64_t offset, uint64_t size, const char *field)
{
	struct device_memory memory;
	struct fmha_error err = {0};

	assert_int_equal(import(fd, offset, size, &memory, &err), FMHA_EINVAL);
	assert_string_equal(err.field, field);
}

static unsigned int count_maps(void)
{
	FILE *file = fopen("/proc/self/maps", "r");
	unsigned int n = 0;
	int c;

	assert_non_null(file);
	while ((c = fgetc(file)) != EOF)
		n += c == '\n';
	fclose(file);
	return n;
}

static void own_memory_is_zero_sealed_and_shared(void **state)
{
	struct device_memory memory;
	struct fmha_error err;
	char *theirs;
	int fd;

	(void)state;
	assert_int_equal(host_memory_create(10000, &memory, &fd, &err), 0);
	assert_int_equal(memory.bytes, 10000);
	assert_int_equal(memory.map_bytes, host_memory_cost(0, 10000));
	assert_int_equal(host_memory_cost(0, 10000), 12288);
	assert_int_equal(host_memory_cost(4095, 2), 8192);
	assert_int_equal(fcntl(fd, F_GET_SEALS) & SEALS, SEALS);
	assert_int_equal(ftruncate(fd, 4096), -1);
	assert_int_equal(ftruncate(fd, 1 << 20), -1);
	theirs = mmap(NULL, 10000, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	assert_ptr_not_equal(theirs, MAP_FAILED);
	for (int i = 0; i < 10000; i++)
		assert_int_equal(theirs[i], 0);
	theirs[9999] = 42;
	assert_int_equal(((char *)memory.host)[9999], 42);
	munmap(theirs, 10000);
	host_memory_free(&memory);
	assert_null(memory.host);
	close(fd);
}

static void sizes_out_of_range_are_refused(void **state)
{
	static const uint64_t sizes[] = {0, (1ull << 46) + 1, 1ull << 62, UINT64_MAX};
	struct device_memory memory;
	struct fmha_error err = {0};
	int fd = make(4096, SEALS, 0), created;

	(void)state;
	for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
		assert_int_equal(host_memory_create(sizes[i], &memory, &created, &err),
				 FMHA_EINVAL);
		assert_string_equal(err.field, "size");
		assert_refused(fd, 0, sizes[i], "size");
	}
	close(fd);
}

static void good_memfds_are_imported(void **state)
{
	int fd = make(3 * 4096, SEALS, 0);
	struct device_memory memory;
	struct fmha_error err;

	(void)state;
	assert_int_equal(pwrite(fd, "x", 1, 5000), 1);
	assert_int_equal(import(fd, 0, 3 * 4096, &memory, &err), 0);
	assert_int_equal(((char *)memory.host)[5000], 'x');
	host_memory_free(&memory);
	assert_int_equal(import(fd, 5000, 7288, &memory, &err), 0); /* an extent of it */
	assert_int_equal(((char *)memory.host)[0], 'x');
	assert_int_equal(memory.bytes, 7288);
	host_memory_free(&memory);
	close(fd);
}

static void extents_beyond_the_end_are_refused(void **state)
{
	int fd = make(8192, SEALS, 0);

	(void)state;
	assert_refused(fd, 0, 8193, "size");
	assert_refused(fd, 1, 8192, "size");
	assert_refused(fd, 8192, 1, "size");
	assert_refused(fd, 8193, 1, "base_offset");
	assert_refused(fd, UINT64_MAX, 4096, "base_offset");
	assert_refused(fd, UINT64_MAX - 4095, 4096, "base_offset");
	close(fd);
}

static void every_missing_seal_is_refused(void **state)
{
	static const int incomplete[] = {0,
					 F_SEAL_SHRINK,
					 F_SEAL_SHRINK | F_SEAL_GROW,
					 F_SEAL_SHRINK | F_SEAL_SEAL,
					 F_SEAL_GROW | F_SEAL_SEAL,
					 F_SEAL_SEAL};

	(void)state;
	for (size_t i = 0; i < sizeof(incomplete) / sizeof(incomplete[0]); i++) {
		int fd = make(4096, incomplete[i], 0);

		assert_refused(fd, 0, 4096, "fd");
		close(fd);
	}
}

static void memory_that_cannot_be_written_is_refused(void **state)
{
	int fd = make(4096, F_SEAL_WRITE | SEALS, 0), other;
	char path[64];

	(void)state;
	assert_refused(fd, 0, 4096, "fd");
	close(fd);
	fd = make(4096, SEALS, 0);
	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	other = open(path, O_RDONLY | O_CLOEXEC);
	assert_true(other >= 0);
	assert_refused(other, 0, 4096, "fd");
	close(other);
	close(fd);
}

static void descriptors_of_other_kinds_are_refused(void **state)
{
	int fds[8], pair[2], n = 0;
	char name[] = "/tmp/fmhad-test-XXXXXX";

	(void)state;
	assert_int_equal(pipe(pair), 0);
	fds[n++] = pair[0];
	fds[n++] = pair[1];
	fds[n++] = open("/", O_RDONLY | O_DIRECTORY);
	fds[n++] = open("/", O_PATH);
	fds[n++] = epoll_create1(0);
	fds[n++] = socket(AF_UNIX, SOCK_STREAM, 0);
	fds[n++] = open("/dev/zero", O_RDWR);
	fds[n++] = mkstemp(name);
	unlink(name);
	for (int i = 0; i < n; i++) {
		assert_true(fds[i] >= 0);
		assert_refused(fds[i], 0, 4096, "fd");
		close(fds[i]);
	}
	assert_refused(-1, 0, 4096, "fd");
}

static void huge_pages_are_refused(void **state)
{
	int fd = make(2 << 20, SEALS, MFD_HUGETLB);

	(void)state;
	if (fd < 0)
		skip(); /* this kernel has none */
	assert_refused(fd, 0, 2 << 20, "fd");
	close(fd);
}

/* Sparse memory is mapped without being allocated, and punching holes under it is harmless. */
static void sparse_memory_costs_nothing_and_holes_read_as_zero(void **state)
{
	int fd = make(1ull << 36, SEALS, 0);
	struct device_memory memory;
	struct fmha_error err;
	char *bytes;

	(void)state;
	assert_int_equal(import(fd, 0, 1ull << 36, &memory, &err), 0);
	assert_int_equal(memory.map_bytes, 1ull << 36); /* as if it were all there */
	bytes = memory.host;
	bytes[12345678901] = 1;
	for (int i = 0; i < 1000; i++) {
		bytes[4096 * i] = 7;
		assert_int_equal(
			fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 4096 * i, 4096),
			0);
		assert_int_equal(bytes[4096 * i], 0);
	}
	assert_int_equal(ftruncate(fd, 0), -1);
	host_memory_free(&memory);
	close(fd);
}

static void mapping_and_unmapping_leaves_nothing(void **state)
{
	int fd = make(1 << 20, SEALS, 0);
	struct device_memory memory;
	struct fmha_error err;
	unsigned int before = 0;

	(void)state;
	for (int i = 0; i < 20000; i++) {
		if (i == 1000) /* a sanitizer has made its own by now */
			before = count_maps();
		assert_int_equal(import(fd, (uint64_t)i % 4096, 65536, &memory, &err), 0);
		host_memory_free(&memory);
	}
	assert_int_equal(count_maps(), before);
	close(fd);
}

static long blocks(int fd)
{
	struct stat st;

	assert_int_equal(fstat(fd, &st), 0);
	return (long)st.st_blocks;
}

/* As a client does whose connection was lost: its memory is known to the next one before the first
 * one's end has come. */
static void pages_end_with_their_last_user(void **state)
{
	struct device_memory made, again;
	struct fmha_error err = {0};
	int fd;

	(void)state;
	assert_int_equal(host_memory_create(8192, &made, &fd, &err), 0);
	memset(made.host, 7, 8192);
	assert_int_equal(import(fd, 0, 8192, &again, &err), 0);
	host_memory_free(&made);
	assert_int_equal(((char *)again.host)[8191], 7);
	host_memory_free(&again);
	assert_int_equal(blocks(fd), 0);
	/* Who comes back now would find nothing there, and is told. */
	assert_int_equal(import(fd, 0, 8192, &again, &err), FMHA_ENOENT);
	close(fd);
}

/* It is charged for its part. */
static void a_part_keeps_no_pages(void **state)
{
	struct device_memory made, part;
	struct fmha_error err = {0};
	int fd;

	(void)state;
	assert_int_equal(host_memory_create(8192, &made, &fd, &err), 0);
	memset(made.host, 7, 8192);
	assert_int_equal(import(fd, 0, 4096, &part, &err), 0);
	host_memory_free(&made);
	assert_int_equal(blocks(fd), 0);
	host_memory_free(&part);
	close(fd);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(own_memory_is_zero_sealed_and_shared),
		cmocka_unit_test(sizes_out_of_range_are_refused),
		cmocka_unit_test(good_memfds_are_imported),
		cmocka_unit_test(extents_beyond_the_end_are_refused),
		cmocka_unit_test(every_missing_seal_is_refused),
		cmocka_unit_test(memory_that_cannot_be_written_is_refused),
		cmocka_unit_test(descriptors_of_other_kinds_are_refused),
		cmocka_unit_test(huge_pages_are_refused),
		cmocka_unit_test(sparse_memory_costs_nothing_and_holes_read_as_zero),
		cmocka_unit_test(mapping_and_unmapping_leaves_nothing),
		cmocka_unit_test(pages_end_with_their_last_user),
		cmocka_unit_test(a_part_keeps_no_pages),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
