/* SPDX-License-Identifier: MIT */
/* .npy files: what NumPy writes is read, what is written NumPy reads, all else is refused. */
#include <stdarg.h>
#include <setjmp.h>
#include <stddef.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <npy.h>

static size_t make(uint8_t *bytes, int version, const char *dictionary)
{
	size_t n = strlen(dictionary), preamble = version == 1 ? 10 : 12;

	memcpy(bytes, "\x93NUMPY", 6);
	bytes[6] = (uint8_t)version;
	bytes[7] = 0;
	memset(bytes + 8, 0, 4);
	bytes[8] = (uint8_t)(n & 0xff);
	bytes[9] = (uint8_t)(n >> 8);
	memcpy(bytes + preamble, dictionary, n);
	return preamble + n;
}

static int parse(int version, const char *dictionary, struct npy *npy)
{
	uint8_t *bytes = malloc(2048), *exact;
	size_t n = make(bytes, version, dictionary), offset = 0;
	int r;

	/* Exactly as large as it is, so that the sanitizer sees a step beyond. */
	exact = malloc(n);
	memcpy(exact, bytes, n);
	r = npy_parse_header(exact, n, npy, &offset, NULL);
	if (r == 0)
		assert_int_equal(offset, n);
	free(exact);
	free(bytes);
	return r;
}

static void what_numpy_writes_is_understood(void **state)
{
	struct npy npy;

	(void)state;
	for (int version = 1; version <= 2; version++) {
		assert_int_equal(
			parse(version,
			      "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }   \n",
			      &npy),
			0);
		assert_int_equal(npy.type, NPY_F4);
		assert_int_equal(npy.n_dims, 2);
		assert_int_equal(npy.dims[1], 3);
		assert_int_equal(npy.bytes, 24);
	}
	assert_int_equal(
		parse(1, "{'shape': (7,), \"descr\": \"|u1\", 'fortran_order': False}", &npy), 0);
	assert_int_equal(npy.n_dims, 1);
	assert_int_equal(npy.bytes, 7);
	assert_int_equal(parse(1, "{'descr': '<f2', 'fortran_order': False, 'shape': ()}", &npy),
			 0);
	assert_int_equal(npy.bytes, 2);
	assert_int_equal(
		parse(1, "{'descr': '<i4', 'fortran_order': False, 'shape': (0, 5)}", &npy), 0);
	assert_int_equal(npy.bytes, 0);
	assert_int_equal(
		parse(1, "{'descr': '<u2', 'fortran_order': False, 'shape': (1, 2, 3, 4,)}", &npy),
		0);
	assert_int_equal(npy.bytes, 48);
}

static void all_else_is_refused(void **state)
{
	static const char *const bad[] = {
		"",
		"{",
		"{}",
		"[]",
		"{'descr': '<f8', 'fortran_order': False, 'shape': (2,)}",
		"{'descr': '>f4', 'fortran_order': False, 'shape': (2,)}",
		"{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (2,)}",
		"{'descr': '', 'fortran_order': False, 'shape': (2,)}",
		"{'descr': '<f4', 'fortran_order': True, 'shape': (2,)}",
		"{'descr': '<f4', 'fortran_order': 0, 'shape': (2,)}",
		"{'descr': '<f4', 'fortran_order': False, 'shape': (2)}",
		"{'descr': '<f4', 'fortran_order': False, 'shape': [2]}",
		"{'descr': '<f4', 'fortran_order': False, 'shape': (-2,)}",
		"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3}",
		"{'descr': '<f4', 'fortran_order': False, 'shape': (,)}",
		"{'descr': '<f4', 'fortran_order': False, 'shape': (1,1,1,1,1,1,1,1,1)}",
		"{'descr': '<f4', 'fortran_order': False, 'shape': (9223372036854775807,)}",
		"{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999,)}",
		"{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296)}",
		"{'descr': '<f4', 'fortran_order': False}",
		"{'fortran_order': False, 'shape': (2,)}",
		"{'descr': '<f4', 'shape': (2,)}",
		"{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (2,)}",
		"{'descr': '<f4', 'fortran_order': False, 'shape': (2,), 'x': 1}",
		"{'descr': '<f4', 'fortran_order': False, 'shape': (2,)} x",
		"{'descr' '<f4', 'fortran_order': False, 'shape': (2,)}",
		"{'de\\x73cr': '<f4', 'fortran_order': False, 'shape': (2,)}",
		"{'descr': '<f4' 'fortran_order': False, 'shape': (2,)}",
		"{'descr': '<f4', 'fortran_order': Falsehood, 'shape': (2,)}",
	};
	struct npy npy;

	(void)state;
	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
		if (parse(1, bad[i], &npy) != FMHA_EIO)
			fail_msg("accepted: %s", bad[i]);
		assert_int_equal(parse(2, bad[i], &npy), FMHA_EIO);
	}
	assert_int_equal(parse(3, "{'descr': '<f4', 'fortran_order': False, 'shape': (2,)}", &npy),
			 FMHA_EIO);
}

/* Every length and every flipped bit of a good header: an answer, and no step beyond the bytes. */
static void truncated_and_flipped_headers_end_well(void **state)
{
	uint8_t good[256];
	size_t n = make(good, 1, "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }\n");
	struct npy npy;
	size_t offset;

	(void)state;
	for (size_t i = 0; i < n; i++) {
		uint8_t *cut = malloc(i ? i : 1);

		memcpy(cut, good, i);
		assert_int_equal(npy_parse_header(cut, i, &npy, &offset, NULL), FMHA_EIO);
		free(cut);
	}
	for (size_t bit = 0; bit < 8 * n; bit++) {
		uint8_t *flipped = malloc(n);
		int r;

		memcpy(flipped, good, n);
		flipped[bit / 8] ^= (uint8_t)(1 << bit % 8);
		r = npy_parse_header(flipped, n, &npy, &offset, NULL);
		assert_true(r == 0 || r == FMHA_EIO);
		if (r == 0)
			assert_true(offset <= n && npy.n_dims <= NPY_MAX_DIMS);
		free(flipped);
	}
}

static char directory[] = "/tmp/fmha_npy_XXXXXX";
static char path[64];

static int make_directory(void **state)
{
	(void)state;
	if (!mkdtemp(directory))
		return -1;
	(void)snprintf(path, sizeof(path), "%s/a.npy", directory);
	return 0;
}

static int remove_directory(void **state)
{
	(void)state;
	(void)unlink(path);
	return rmdir(directory);
}

static void what_is_written_is_read(void **state)
{
	(void)state;
	for (int type = 0; type < NPY_N_TYPES; type++) {
		for (int n_dims = 0; n_dims <= 5; n_dims++) {
			uint8_t data[4 * 2 * 3 * 4 * 5 * 6];
			struct npy out = {.type = (enum npy_type)type, .n_dims = n_dims}, in;
			struct fmha_error err = {0};

			out.bytes = npy_type_bytes(out.type);
			for (int i = 0; i < n_dims; i++) {
				out.dims[i] = i + 2;
				out.bytes *= (size_t)out.dims[i];
			}
			for (size_t i = 0; i < out.bytes; i++)
				data[i] = (uint8_t)(i * 7);
			out.data = data;
			assert_int_equal(npy_write(path, &out, &err), 0);
			assert_int_equal(npy_read(path, &in, &err), 0);
			assert_int_equal(in.type, type);
			assert_int_equal(in.n_dims, n_dims);
			assert_memory_equal(in.dims, out.dims, (size_t)n_dims * sizeof(in.dims[0]));
			assert_int_equal(in.bytes, out.bytes);
			assert_memory_equal(in.data, data, out.bytes);
			npy_deinit(&in);
		}
	}
}

static void wrong_file_lengths_are_refused(void **state)
{
	uint8_t bytes[256];
	size_t n = make(bytes, 1, "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }\n");
	struct fmha_error err;
	struct npy npy;
	FILE *file;

	(void)state;
	for (int elements = 0; elements <= 12; elements++) {
		file = fopen(path, "wb");
		memset(bytes + n, 0, 16);
		assert_int_equal(fwrite(bytes, 1, n + (size_t)elements, file),
				 n + (size_t)elements);
		fclose(file);
		memset(&err, 0, sizeof(err));
		if (elements == 8) {
			assert_int_equal(npy_read(path, &npy, &err), 0);
			npy_deinit(&npy);
		} else {
			assert_int_equal(npy_read(path, &npy, &err), FMHA_EIO);
			assert_non_null(strstr(err.msg, path));
		}
	}
	unlink(path);
	assert_int_equal(npy_read(path, &npy, &err), FMHA_EIO);
	assert_int_equal(npy_read(directory, &npy, &err), FMHA_EIO);
	assert_int_equal(mkfifo(path, 0600), 0);
	assert_int_equal(npy_read(path, &npy, &err), FMHA_EIO);
	npy = (struct npy){.type = NPY_U1, .n_dims = 1, .dims = {1}, .bytes = 1, .data = bytes};
	assert_int_equal(npy_write("/dev/full", &npy, &err), FMHA_EIO);
	assert_int_equal(npy_write("/nonexistent/a.npy", &npy, &err), FMHA_EIO);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(what_numpy_writes_is_understood),
		cmocka_unit_test(all_else_is_refused),
		cmocka_unit_test(truncated_and_flipped_headers_end_well),
		cmocka_unit_test(what_is_written_is_read),
		cmocka_unit_test(wrong_file_lengths_are_refused),
	};

	return cmocka_run_group_tests(tests, make_directory, remove_directory);
}
