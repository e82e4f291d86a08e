/* SPDX-License-Identifier: MIT */
/*
 * Encoding allocates for the output buffer's growth only. Each one fails once, and once all that
 * follow it: an error, what was in the buffer before is still there, and the next try succeeds.
 * (Linked with --wrap=realloc.)
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <proto/message.h>
#include <proto/problem.h>

static int n_calls, fail_from, fail_until;

void *__real_realloc(void *old, size_t n);
void *__wrap_realloc(void *old, size_t n);
void *__wrap_realloc(void *old, size_t n)
{
	n_calls++;
	return n_calls >= fail_from && n_calls < fail_until ? NULL : __real_realloc(old, n);
}

/* A frame of several KiB: the buffer grows more than once. */
static int encode_much(struct proto_buffer *buffer, struct fmha_error *err)
{
	struct proto_devices_result devices = {.n_devices = PROTO_MAX_DEVICES};

	for (int i = 0; i < PROTO_MAX_DEVICES; i++) {
		memset(devices.devices[i].name, 'x', PROTO_NAME_BYTES - 1);
		memset(devices.devices[i].arch, 'y', PROTO_NAME_BYTES - 1);
	}
	n_calls = 0;
	return proto_encode_result(buffer, 1, PROTO_DEVICES, &devices, err);
}

static void each_allocation_fails(bool for_good)
{
	int n_failures = 0;

	for (int nth = 1;; nth++) {
		struct proto_buffer buffer = {0};
		struct fmha_error err = {0};
		int r;

		fail_from = fail_until = 0;
		assert_int_equal(proto_buffer_append(&buffer, "before", 6), 0);
		fail_from = nth;
		fail_until = for_good ? INT32_MAX : nth + 1;
		r = encode_much(&buffer, &err);
		fail_from = fail_until = 0;
		if (r == 0) {
			proto_buffer_deinit(&buffer);
			break;
		}
		assert_int_equal(r, FMHA_ENOMEM);
		assert_int_equal(err.code, FMHA_ENOMEM);
		assert_int_equal(buffer.size, 6);
		assert_memory_equal(buffer.data, "before", 6);
		assert_int_equal(encode_much(&buffer, &err), 0);
		assert_true(buffer.size > 2000);
		proto_buffer_deinit(&buffer);
		n_failures++;
	}
	assert_true(n_failures >= 3);
}

static void each_allocation_fails_once(void **state)
{
	(void)state;
	each_allocation_fails(false);
}

static void each_allocation_fails_from_then_on(void **state)
{
	(void)state;
	each_allocation_fails(true);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(each_allocation_fails_once),
		cmocka_unit_test(each_allocation_fails_from_then_on),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
