/* SPDX-License-Identifier: MIT */
/* The pre-check: each limit from both sides, each kind of MessagePack byte, forged counts. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <proto/limits.h>
#include <proto/frame.h>

/* From memory of exactly this size: a sanitizer sees one byte too many. */
static int check(const void *data, size_t n)
{
	uint8_t *copy = malloc(n ? n : 1);
	struct fmha_error err = {0};
	int r;

	assert_non_null(copy);
	memcpy(copy, data, n);
	r = proto_precheck(copy, n, &err);
	free(copy);
	assert_true(r == 0 || (r == FMHA_EPROTO && err.code == r && err.msg[0] != '\0'));
	return r;
}

#define ACCEPTED(...)                                                                              \
	assert_int_equal(check((const uint8_t[]){__VA_ARGS__}, sizeof((uint8_t[]){__VA_ARGS__})), 0)
#define REFUSED(...)                                                                               \
	assert_int_equal(check((const uint8_t[]){__VA_ARGS__}, sizeof((uint8_t[]){__VA_ARGS__})),  \
			 FMHA_EPROTO)

static void depth_is_limited(void **state)
{
	uint8_t data[PROTO_MAX_DEPTH + 2];

	(void)state;
	memset(data, 0x91, sizeof(data)); /* arrays of one */
	data[PROTO_MAX_DEPTH] = 0xc0;
	assert_int_equal(check(data, PROTO_MAX_DEPTH + 1), 0);
	data[PROTO_MAX_DEPTH] = 0x91;
	data[PROTO_MAX_DEPTH + 1] = 0xc0;
	assert_int_equal(check(data, PROTO_MAX_DEPTH + 2), FMHA_EPROTO);
	data[PROTO_MAX_DEPTH] = 0x90; /* an empty one is one level, too */
	assert_int_equal(check(data, PROTO_MAX_DEPTH + 1), FMHA_EPROTO);
}

static void nodes_are_limited(void **state)
{
	uint8_t data[3 + PROTO_MAX_NODES] = {0xdc};

	(void)state;
	memset(data + 3, 0xc0, PROTO_MAX_NODES);
	for (int n = PROTO_MAX_NODES - 2; n <= PROTO_MAX_NODES; n++) {
		data[1] = (uint8_t)(n >> 8);
		data[2] = (uint8_t)n;
		assert_int_equal(check(data, 3 + (size_t)n),
				 n + 1 <= PROTO_MAX_NODES ? 0 : FMHA_EPROTO);
	}
}

static void strings_are_limited(void **state)
{
	static const struct {
		uint8_t type;
		size_t most;
	} types[] = {{0xda, PROTO_MAX_STRING}, {0xc5, PROTO_MAX_BIN}}; /* str 16, bin 16 */
	static uint8_t data[3 + PROTO_MAX_BIN + 1];

	(void)state;
	for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++) {
		const size_t lengths[] = {0,
					  1,
					  2,
					  PROTO_MAX_STRING,
					  PROTO_MAX_STRING + 1,
					  types[i].most - 1,
					  types[i].most,
					  types[i].most + 1};

		data[0] = types[i].type;
		for (size_t j = 0; j < sizeof(lengths) / sizeof(lengths[0]); j++) {
			data[1] = (uint8_t)(lengths[j] >> 8);
			data[2] = (uint8_t)lengths[j];
			assert_int_equal(check(data, 3 + lengths[j]),
					 lengths[j] <= types[i].most ? 0 : FMHA_EPROTO);
		}
	}
}

static void forged_counts_are_refused(void **state)
{
	/* str, bin, array and map with 32-bit counts */
	static const uint8_t types[] = {0xdb, 0xc6, 0xdd, 0xdf};
	static const uint32_t counts[] = {2,          4095,       4096,       4097,
					  0x20000000, 0x7fffffff, 0x80000000, 0xffffffff};

	(void)state;
	for (size_t i = 0; i < sizeof(types); i++) {
		for (size_t j = 0; j < sizeof(counts) / sizeof(counts[0]); j++) {
			uint8_t data[6] = {types[i], (uint8_t)(counts[j] >> 24),
					   (uint8_t)(counts[j] >> 16), (uint8_t)(counts[j] >> 8),
					   (uint8_t)counts[j]};

			assert_int_equal(check(data, 5), FMHA_EPROTO);
			assert_int_equal(check(data, 6), FMHA_EPROTO);
		}
	}
	/* A map of n needs 2 n values: 1 is not enough for 1. */
	REFUSED(0xdf, 0, 0, 0, 1, 0xc0);
	ACCEPTED(0xdf, 0, 0, 0, 1, 0xc0, 0xc0);
	REFUSED(0xdf, 0x80, 0, 0, 0, 0xc0, 0xc0); /* times 2 is 0 in 32 bits */
	ACCEPTED(0xdd, 0, 0, 0, 0);
	ACCEPTED(0xdb, 0, 0, 0, 0);
}

static void every_first_byte(void **state)
{
	(void)state;
	for (unsigned int byte = 0; byte < 256; byte++) {
		bool never = byte == 0xc1 || (byte >= 0xc7 && byte <= 0xc9) ||
			     (byte >= 0xd4 && byte <= 0xd8);
		uint8_t data[64] = {(uint8_t)byte};
		size_t accepted_at = 0;

		/* Followed by zeros, which are numbers, each other object ends somewhere. */
		for (size_t n = 1; n <= sizeof(data); n++)
			if (check(data, n) == 0) {
				assert_int_equal(accepted_at, 0);
				accepted_at = n;
			}
		assert_int_equal(accepted_at == 0, never);
	}
	assert_int_equal(check("", 0), FMHA_EPROTO);
}

static void nothing_may_follow(void **state)
{
	(void)state;
	ACCEPTED(0x92, 0x01, 0xa1, 'x');
	REFUSED(0x92, 0x01, 0xa1, 'x', 0xc0);
	REFUSED(0xc0, 0xc0);
	ACCEPTED(0x82, 0x01, 0x90, 0x02, 0x80);
	REFUSED(0x82, 0x01, 0x90, 0x02);
}

static void a_budget_can_be_chosen(void **state)
{
	const struct proto_budget budget = {.depth = 32, .nodes = 33, .string_bytes = 0};
	uint8_t data[33];

	(void)state;
	memset(data, 0x91, sizeof(data));
	data[32] = 0xa0;
	assert_int_equal(proto_precheck_budget(data, 33, &budget, NULL), 0);
	assert_int_equal(proto_precheck_budget((const uint8_t *)"\xa1x", 2, &budget, NULL),
			 FMHA_EPROTO);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(depth_is_limited),
		cmocka_unit_test(nodes_are_limited),
		cmocka_unit_test(strings_are_limited),
		cmocka_unit_test(forged_counts_are_refused),
		cmocka_unit_test(every_first_byte),
		cmocka_unit_test(nothing_may_follow),
		cmocka_unit_test(a_budget_can_be_chosen),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
