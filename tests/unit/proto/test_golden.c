/* SPDX-License-Identifier: MIT */
/*
 * Golden messages whole, cut off at every byte, and with every bit flipped: what is accepted
 * encodes to bytes that decode to the same again, everything else is an error code, nothing
 * crashes.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <proto/frame.h>

#include "golden.h"

static struct golden goldens[GOLDEN_MAX];
static size_t n_goldens;

static int set_up(void **state)
{
	(void)state;
	n_goldens = golden_all(goldens);
	return 0;
}

static int tear_down(void **state)
{
	(void)state;
	golden_free(goldens, n_goldens);
	return 0;
}

static void goldens_come_back_byte_for_byte(void **state)
{
	struct proto_buffer again = {0};
	struct fmha_error err = {0};

	(void)state;
	assert_true(n_goldens > 2 * PROTO_N_METHODS);
	for (size_t i = 0; i < n_goldens; i++) {
		const struct proto_buffer *frame = &goldens[i].frame;

		if (golden_receive(frame->data, frame->size, goldens[i].method, &again, &err) != 0)
			fail_msg("%s: %s", goldens[i].title, err.msg);
		assert_int_equal(again.size, frame->size);
		assert_memory_equal(again.data, frame->data, frame->size);
	}
	proto_buffer_deinit(&again);
}

/* In memory of exactly this size, so that a sanitizer sees a read past the end. */
static int receive_copy(const uint8_t *data, size_t n, int method, struct proto_buffer *again)
{
	struct fmha_error err = {0};
	uint8_t *copy = malloc(n ? n : 1);
	int r;

	assert_non_null(copy);
	memcpy(copy, data, n);
	r = golden_receive(copy, n, method, again, &err);
	free(copy);
	if (r < 0)
		assert_true(err.code == r && err.msg[0] != '\0');
	return r;
}

static void truncated_frames_want_more(void **state)
{
	struct proto_buffer again = {0};

	(void)state;
	for (size_t i = 0; i < n_goldens; i++)
		for (size_t n = 0; n < goldens[i].frame.size; n++)
			assert_int_equal(
				receive_copy(goldens[i].frame.data, n, goldens[i].method, &again),
				PROTO_FRAME_MORE);
	proto_buffer_deinit(&again);
}

/* The frame is whole and announces its shorter length: the message in it is cut off. */
static void truncated_payloads_are_refused(void **state)
{
	struct proto_buffer again = {0};

	(void)state;
	for (size_t i = 0; i < n_goldens; i++) {
		uint8_t frame[PROTO_MAX_FRAME], header[PROTO_FRAME_HEADER_MAX];
		size_t skip = goldens[i].frame.data[0] == 0xc4 ? 2 : 3;

		for (size_t n = 1; n < goldens[i].frame.size - skip; n++) {
			size_t h = proto_frame_header(n, header);

			memcpy(frame, header, h);
			memcpy(frame + h, goldens[i].frame.data + skip, n);
			assert_int_equal(receive_copy(frame, h + n, goldens[i].method, &again),
					 FMHA_EPROTO);
		}
	}
	proto_buffer_deinit(&again);
}

static void flipped_bits_never_crash(void **state)
{
	struct proto_buffer again = {0}, third = {0};
	size_t n_accepted = 0, n_refused = 0;

	(void)state;
	for (size_t i = 0; i < n_goldens; i++) {
		const struct proto_buffer *frame = &goldens[i].frame;

		for (size_t bit = 0; bit < frame->size * 8; bit++) {
			frame->data[bit / 8] ^= (uint8_t)(1 << bit % 8);
			if (receive_copy(frame->data, frame->size, goldens[i].method, &again) ==
			    0) {
				n_accepted++;
				assert_int_equal(receive_copy(again.data, again.size,
							      goldens[i].method, &third),
						 0);
				assert_int_equal(third.size, again.size);
				assert_memory_equal(third.data, again.data, again.size);
			} else {
				n_refused++;
			}
			frame->data[bit / 8] ^= (uint8_t)(1 << bit % 8);
		}
	}
	/* Both happen often: a flipped length or key is refused, a flipped number is another one.
	 */
	assert_true(n_accepted > 1000);
	assert_true(n_refused > 10000);
	proto_buffer_deinit(&again);
	proto_buffer_deinit(&third);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(goldens_come_back_byte_for_byte),
		cmocka_unit_test(truncated_frames_want_more),
		cmocka_unit_test(truncated_payloads_are_refused),
		cmocka_unit_test(flipped_bits_never_crash),
	};

	return cmocka_run_group_tests(tests, set_up, tear_down);
}
