/* SPDX-License-Identifier: MIT */
/* support.h: what the client tests share: a fake daemon, a client on it, and accounts of what is
 * left. */
#ifndef TEST_CLIENT_SUPPORT_H
#define TEST_CLIENT_SUPPORT_H

#include <stdarg.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <fmha/fmha.h>

#include "fake_server.h"

struct fixture {
	struct fake_server *server;
	struct fmha_client *client;
	struct fmha_device *device;
	int fds_before;
};

/* For cmocka_unit_test_setup_teardown(): starts a server and opens its device; afterwards checks
 * that the worker holds nothing, and that no file descriptor is left. */
int fixture_setup(void **state);
int fixture_teardown(void **state);

int open_fds(void);
int mappings(void);
double now_seconds(void);

/* A connection with its own deadline; fails the test when it does not come about. */
struct fmha_client *connect_with_timeout(const struct fixture *f, uint32_t timeout_ms);

/* A forward problem of f32 with batch 1; tensors are left absent. */
void make_problem(struct fmha_problem *problem, int32_t seqlen, int32_t nhead, int32_t hdim);

/* One buffer that holds Q, K, V and O of the problem one after the other, each of
 * tensor_bytes(problem); q is filled with a pattern that depends on @seed. */
struct fmha_buffer *make_tensors(struct fmha_device *device, struct fmha_problem *problem,
				 uint32_t seed);
size_t tensor_bytes(const struct fmha_problem *problem);
void check_tensors(const struct fmha_buffer *buffer, const struct fmha_problem *problem);
void fill(void *data, size_t bytes, uint32_t seed);

#define assert_ok(expression)                                                                      \
	do {                                                                                       \
		struct fmha_error err = {0};                                                       \
		int assert_ok_r = (expression);                                                    \
		if (assert_ok_r != 0)                                                              \
			fail_msg("%s: %s (%s %s)", #expression, err.msg,                           \
				 fmha_error_name(assert_ok_r), err.field);                         \
	} while (0)

/* The call fails with this code, and says why in a sentence. */
#define assert_error(expression, expected)                                                         \
	do {                                                                                       \
		struct fmha_error err = {0};                                                       \
		int assert_error_r = (expression);                                                 \
		if (assert_error_r != (expected))                                                  \
			fail_msg("%s: %s instead of %s: %s", #expression,                          \
				 fmha_error_name(assert_error_r), fmha_error_name(expected),       \
				 err.msg);                                                         \
		assert_int_equal(err.code, (expected));                                            \
		assert_true(err.msg[0] != '\0');                                                   \
	} while (0)

#endif
