/* SPDX-License-Identifier: MIT */
/* Frame headers, with lengths on both sides of every limit. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <proto/frame.h>
#include <proto/limits.h>

static void headers_round_trip_at_every_boundary(void **state)
{
	static const struct {
		size_t payload, header;
	} cases[] = {{1, 2}, {255, 2}, {256, 3}, {65535, 3}, {65536, 5}, {UINT32_MAX, 5}};
	uint8_t header[PROTO_FRAME_HEADER_MAX];
	struct proto_frame frame;

	(void)state;
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		assert_int_equal(proto_frame_header(cases[i].payload, header), cases[i].header);
		for (size_t n = 0; n < cases[i].header; n++)
			assert_int_equal(proto_frame_parse(header, n, SIZE_MAX, &frame, NULL),
					 PROTO_FRAME_MORE);
		assert_int_equal(proto_frame_parse(header, cases[i].header, SIZE_MAX, &frame, NULL),
				 0);
		assert_int_equal(frame.header_bytes, cases[i].header);
		assert_int_equal(frame.payload_bytes, cases[i].payload);
	}
}

static void lengths_around_the_limit(void **state)
{
	static const size_t limits[] = {PROTO_MAX_FRAME, PROTO_MAX_FRAME_BEFORE_HELLO};

	(void)state;
	for (size_t i = 0; i < 2; i++) {
		/* Sizes of whole frames; the header takes 3 of these bytes. */
		const size_t sizes[] = {limits[i] - 1, limits[i], limits[i] + 1};

		for (size_t j = 0; j < 3; j++) {
			uint8_t header[PROTO_FRAME_HEADER_MAX];
			size_t n = proto_frame_header(sizes[j] - 3, header);
			struct fmha_error err = {0};
			struct proto_frame frame;
			int r = proto_frame_parse(header, n, limits[i], &frame, &err);

			assert_int_equal(n, 3);
			assert_int_equal(r, sizes[j] <= limits[i] ? 0 : FMHA_EPROTO);
			if (r < 0)
				assert_int_equal(err.code, FMHA_EPROTO);
		}
	}
}

static void forged_and_odd_headers_are_refused(void **state)
{
	static const struct {
		uint8_t bytes[5];
		size_t n;
		const char *msg;
	} cases[] = {
		{{0xc4, 0}, 2, "frame: empty"},
		{{0xc5, 0, 0}, 3, "frame: empty"},
		{{0xc6, 0, 0, 0, 0}, 5, "frame: empty"},
		{{0xc5, 0, 1}, 3, "frame: length is not in its shortest form"},
		{{0xc5, 0, 255}, 3, "frame: length is not in its shortest form"},
		{{0xc6, 0, 0, 0xff, 0xfb}, 5, "frame: length is not in its shortest form"},
		{{0xc6, 0, 1, 0, 0}, 5, "frame of 65541 bytes: more than 65536"},
		{{0xc6, 0x80, 0, 0, 0}, 5, "frame of 2147483653 bytes: more than 65536"},
		{{0xc6, 0xff, 0xff, 0xff, 0xff}, 5, "frame of 4294967300 bytes: more than 65536"},
	};

	(void)state;
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		struct fmha_error err = {0};
		struct proto_frame frame;

		assert_int_equal(proto_frame_parse(cases[i].bytes, cases[i].n, PROTO_MAX_FRAME,
						   &frame, &err),
				 FMHA_EPROTO);
		assert_string_equal(err.msg, cases[i].msg);
	}
}

static void only_bin_starts_a_frame(void **state)
{
	(void)state;
	for (unsigned int byte = 0; byte < 256; byte++) {
		uint8_t data[5] = {(uint8_t)byte, 1, 0, 0, 0};
		struct proto_frame frame;
		int r = proto_frame_parse(data, sizeof(data), SIZE_MAX, &frame, NULL);

		assert_int_equal(r, byte >= 0xc4 && byte <= 0xc6 ? 0 : FMHA_EPROTO);
		/* The first byte alone is enough to refuse. */
		r = proto_frame_parse(data, 1, SIZE_MAX, &frame, NULL);
		assert_int_equal(r, byte >= 0xc4 && byte <= 0xc6 ? PROTO_FRAME_MORE : FMHA_EPROTO);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(headers_round_trip_at_every_boundary),
		cmocka_unit_test(lengths_around_the_limit),
		cmocka_unit_test(forged_and_odd_headers_are_refused),
		cmocka_unit_test(only_bin_starts_a_frame),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
