/* SPDX-License-Identifier: MIT */
#include <proto/frame.h>

#include <proto/error.h>

enum { BIN8 = 0xc4, BIN16 = 0xc5, BIN32 = 0xc6 };

int proto_frame_parse(const uint8_t *data, size_t n, size_t limit, struct proto_frame *ret_frame,
		      struct fmha_error *err)
{
	size_t header, shortest, payload = 0;

	if (n == 0)
		return PROTO_FRAME_MORE;
	switch (data[0]) {
	case BIN8:
		header = 2;
		shortest = 0;
		break;
	case BIN16:
		header = 3;
		shortest = 0x100;
		break;
	case BIN32:
		header = 5;
		shortest = 0x10000;
		break;
	default:
		return fmha_error_set(err, FMHA_EPROTO, "frame: byte 0x%02x does not start one",
				      data[0]);
	}
	if (n < header)
		return PROTO_FRAME_MORE;
	for (size_t i = 1; i < header; i++)
		payload = payload << 8 | data[i];
	if (payload == 0)
		return fmha_error_set(err, FMHA_EPROTO, "frame: empty");
	if (header > limit || payload > limit - header)
		return fmha_error_set(err, FMHA_EPROTO, "frame of %zu bytes: more than %zu",
				      payload + header, limit);
	if (payload < shortest)
		return fmha_error_set(err, FMHA_EPROTO,
				      "frame: length is not in its shortest form");
	ret_frame->header_bytes = header;
	ret_frame->payload_bytes = payload;
	return 0;
}

size_t proto_frame_header(size_t payload_bytes, uint8_t ret_header[PROTO_FRAME_HEADER_MAX])
{
	size_t header = payload_bytes < 0x100 ? 2 : payload_bytes < 0x10000 ? 3 : 5;

	ret_header[0] = header == 2 ? BIN8 : header == 3 ? BIN16 : BIN32;
	for (size_t i = header - 1; i > 0; i--) {
		ret_header[i] = (uint8_t)payload_bytes;
		payload_bytes >>= 8;
	}
	return header;
}
