/* SPDX-License-Identifier: MIT */
/*
 * encode.h: msgpack-c's packing routines over a proto_buffer. Its template is instantiated here
 * because its usual packer calls a function pointer for every few bytes, which is most of what
 * encoding a small message would cost: write_uint64(), write_map(), write_str(), ...
 */
#ifndef PROTO_ENCODE_H
#define PROTO_ENCODE_H

#include <stdbool.h>
#include <string.h>

#include <msgpack/object.h>
#include <msgpack/pack_define.h>
#include <msgpack/timestamp.h>

#include <proto/buffer.h>

struct writer {
	struct proto_buffer *out;
	bool failed; /* out of memory: nothing is written any more */
};

static inline int writer_append(struct writer *writer, const void *bytes, size_t n)
{
	struct proto_buffer *out = writer->out;

	if (n > out->capacity - out->size && proto_buffer_reserve(out, n) < 0)
		writer->failed = true;
	if (writer->failed)
		return -1;
	memcpy(out->data + out->size, bytes, n);
	out->size += n;
	return 0;
}

#define msgpack_pack_inline_func(name)               static inline int write##name
#define msgpack_pack_user                            struct writer *
#define msgpack_pack_append_buffer(writer, bytes, n) return writer_append(writer, bytes, n)
#define msgpack_pack_ext                             write_ext /* the template calls one of its own by this name */
#include <msgpack/pack_template.h>
#undef msgpack_pack_ext

static inline void write_string(struct writer *writer, const char *text, size_t n)
{
	write_str(writer, n);
	write_str_body(writer, text, n);
}

#endif
