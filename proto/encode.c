/* SPDX-License-Identifier: MIT */
/*
 * encode.c: structs to bytes, and the header of a frame, both ways. It depends on its payload's length, so the
 * payload is written behind room for a small one and moved up when it turns out to need a larger one.
 */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <fmha/base.h>
#include <proto/buffer.h>
#include <proto/error.h>
#include <proto/frame.h>
#include <proto/message.h>
#include <proto/problem.h>

#include "field.h"
#include "encode.h"

/* ---- field ---- */

/* The decoder's, too. */

/* "tensor.k.stride[2]", cut off when longer than @size. */
static void field_path_print(const struct field_path *path, char *out, size_t size)
{
	size_t used;

	out[0] = '\0';
	if (!path)
		return;
	field_path_print(path->parent, out, size);
	used = strlen(out);
	if (path->name)
		(void)snprintf(out + used, size - used, "%s%s", used ? "." : "", path->name);
	else
		(void)snprintf(out + used, size - used, "[%u]", path->index);
}

int field_error(struct fmha_error *err, int code, const struct field_path *path, const char *fmt,
		...)
{
	char sentence[sizeof(err->msg)], field[sizeof(err->field)];
	va_list args;

	if (!err)
		return code;
	va_start(args, fmt);
	(void)vsnprintf(sentence, sizeof(sentence), fmt, args);
	va_end(args);
	field_path_print(path, field, sizeof(field));
	return fmha_error_set_field(err, code, field, "%s: %s", field[0] ? field : "message",
				    sentence);
}

/* Bytes of the UTF-8 sequence at @text, 0 when it is none: no overlong forms, no surrogates. */
static size_t utf8_sequence(const uint8_t *text, size_t n)
{
	uint32_t code;
	size_t length;

	if (text[0] < 0x80)
		return 1;
	if (text[0] < 0xc2 || text[0] > 0xf4)
		return 0;
	length = text[0] < 0xe0 ? 2 : text[0] < 0xf0 ? 3 : 4;
	if (length > n)
		return 0;
	code = text[0] & (0x7f >> length);
	for (size_t i = 1; i < length; i++) {
		if ((text[i] & 0xc0) != 0x80)
			return 0;
		code = code << 6 | (text[i] & 0x3f);
	}
	if (length == 3 && (code < 0x800 || (code >= 0xd800 && code < 0xe000)))
		return 0;
	if (length == 4 && (code < 0x10000 || code > 0x10ffff))
		return 0;
	if (code < 0xa0) /* C1 controls */
		return 0;
	return length;
}

bool field_string_valid(const char *text, size_t n)
{
	const uint8_t *bytes = (const uint8_t *)text;

	for (size_t i = 0, step; i < n; i += step) {
		if (bytes[i] < 0x20 || bytes[i] == 0x7f)
			return false;
		step = utf8_sequence(bytes + i, n - i);
		if (step == 0)
			return false;
	}
	return true;
}

/* ---- buffer ---- */

int proto_buffer_reserve(struct proto_buffer *buffer, size_t n)
{
	size_t capacity = buffer->capacity ? buffer->capacity : 256;
	uint8_t *data;

	if (n <= buffer->capacity - buffer->size)
		return 0;
	if (n > SIZE_MAX / 2 - buffer->size)
		return FMHA_ENOMEM;
	while (capacity < buffer->size + n)
		capacity *= 2;
	data = realloc(buffer->data, capacity);
	if (!data)
		return FMHA_ENOMEM;
	buffer->data = data;
	buffer->capacity = capacity;
	return 0;
}

int proto_buffer_append(struct proto_buffer *buffer, const void *data, size_t n)
{
	int r = proto_buffer_reserve(buffer, n);

	if (r < 0)
		return r;
	if (n)
		memcpy(buffer->data + buffer->size, data, n);
	buffer->size += n;
	return 0;
}

void proto_buffer_deinit(struct proto_buffer *buffer)
{
	free(buffer->data);
	*buffer = (struct proto_buffer){0};
}

static const struct fmha_tensor *tensor_at(const void *member, uint32_t role)
{
	return (const struct fmha_tensor *)member + role;
}

/* A member, which lies where its type may. */
#define LOAD(type, at) (*(const type *)(const void *)(at))

/* Whether an optional field may be left out because the receiver restores its value. */
static bool field_is_fallback(const struct field *field, const char *object, const void *at)
{
	static const int64_t no_stride[5];

	switch (field->type) {
	case FIELD_U32:
	case FIELD_BOOL:
	case FIELD_ENUM:
		return LOAD(uint32_t, at) == (uint32_t)field->fallback;
	case FIELD_I32:
		return LOAD(int32_t, at) == field->fallback;
	case FIELD_U64:
		return LOAD(uint64_t, at) == (uint64_t)field->fallback;
	case FIELD_F32:
		return field->fallback ? isnan(LOAD(float, at)) : LOAD(float, at) == 0;
	case FIELD_F64:
		return LOAD(double, at) == 0;
	case FIELD_STRING:
		return *(const char *)at == '\0';
	case FIELD_BYTES:
	case FIELD_ARRAY:
	case FIELD_EXTENT:
		return LOAD(uint32_t, object + field->count_offset) == 0;
	case FIELD_STRIDE:
		return memcmp(at, no_stride, sizeof(no_stride)) == 0;
	case FIELD_TENSORS:
		for (uint32_t role = 0; role < FMHA_N_TENSORS; role++)
			if (fmha_tensor_present(tensor_at(at, role)))
				return false;
		return true;
	case FIELD_STRUCT:
	case FIELD_NUMBERS:
		return false;
	}
	return false;
}

static int encode_number(struct writer *writer, const struct field *field, const void *at,
			 const struct field_path *path, struct fmha_error *err)
{
	bool is_signed = field->type == FIELD_I32;
	bool is_wide = field->type == FIELD_U64 || field->type == FIELD_NUMBERS;
	uint64_t value = is_wide ? LOAD(uint64_t, at) : LOAD(uint32_t, at);

	if (is_signed) {
		int32_t number = (int32_t)value;

		if (number < field->min || number > (int64_t)field->max)
			return field_error(err, FMHA_EINVAL, path, "%d is out of range", number);
		write_int64(writer, number);
		return 0;
	}
	if (value < (uint64_t)field->min || value > field->max)
		return field_error(err, FMHA_EINVAL, path, "%llu is out of range",
				   (unsigned long long)value);
	write_uint64(writer, value);
	return 0;
}

static int encode_float(struct writer *writer, const struct field *field, const void *at,
			const struct field_path *path, struct fmha_error *err)
{
	double value = field->type == FIELD_F32 ? (double)LOAD(float, at) : LOAD(double, at);

	if (!isfinite(value))
		return field_error(err, FMHA_EINVAL, path, "not a finite number");
	if (field->type == FIELD_F32)
		write_float(writer, (float)value);
	else
		write_double(writer, value);
	return 0;
}

static int encode_string(struct writer *writer, const struct field *field, const char *text,
			 const struct field_path *path, struct fmha_error *err)
{
	size_t n = strnlen(text, field->size);

	if (n == field->size)
		return field_error(err, FMHA_EINVAL, path, "not terminated within %zu bytes",
				   field->size);
	if (!field_string_valid(text, n))
		return field_error(err, FMHA_EINVAL, path, "not printable UTF-8");
	write_str(writer, n);
	write_str_body(writer, text, n);
	return 0;
}

static int encode_array(struct writer *writer, const struct field *field, const char *at,
			uint32_t n, const struct field_path *path, struct fmha_error *err)
{
	int r;

	if (n > field->capacity)
		return field_error(err, FMHA_EINVAL, path, "%u elements, more than %u", n,
				   field->capacity);
	write_array(writer, n);
	for (uint32_t i = 0; i < n; i++) {
		struct field_path element = {.parent = path, .index = i};

		r = field_encode(writer, field->table, at + i * field->table->size, &element, err);
		if (r < 0)
			return r;
	}
	return 0;
}

static int encode_numbers(struct writer *writer, const struct field *field, const char *at,
			  const struct field_path *path, struct fmha_error *err)
{
	int r = 0;

	write_array(writer, field->capacity);
	for (uint32_t i = 0; i < field->capacity && r == 0; i++) {
		struct field_path element = {.parent = path, .index = i};

		r = encode_number(writer, field, at + i * sizeof(uint64_t), &element, err);
	}
	return r;
}

static int encode_stride(struct writer *writer, const int64_t *stride, uint32_t role,
			 const struct field_path *path, struct fmha_error *err)
{
	int n_dims = proto_roles[role].n_dims;

	for (int i = n_dims; i < 5; i++) {
		struct field_path element = {.parent = path, .index = (uint32_t)i};

		if (stride[i] != 0)
			return field_error(err, FMHA_EINVAL, &element,
					   "%lld, but the tensor has %d dimensions",
					   (long long)stride[i], n_dims);
	}
	write_array(writer, (size_t)n_dims);
	for (int i = 0; i < n_dims; i++)
		write_int64(writer, stride[i]);
	return 0;
}

/* Of settled problems: as many as the role has. */
static int encode_extent(struct writer *writer, const int64_t *extent, uint32_t n, uint32_t role,
			 const struct field_path *path, struct fmha_error *err)
{
	if (n != (uint32_t)proto_roles[role].n_dims)
		return field_error(err, FMHA_EINVAL, path, "%u elements, not %d", n,
				   proto_roles[role].n_dims);
	return encode_stride(writer, extent, role, path, err);
}

static int encode_object(struct writer *writer, const struct field_table *table, const void *object,
			 uint32_t role, const struct field_path *path, struct fmha_error *err);

static int encode_tensors(struct writer *writer, const struct field *field, const void *at,
			  struct fmha_error *err)
{
	struct field_path tensor = {.name = "tensor"};
	uint32_t n = 0;
	int r;

	for (uint32_t role = 0; role < FMHA_N_TENSORS; role++)
		n += fmha_tensor_present(tensor_at(at, role));
	write_map(writer, n);
	for (uint32_t role = 0; role < FMHA_N_TENSORS; role++) {
		struct field_path path = {.parent = &tensor, .name = proto_roles[role].name};

		if (!fmha_tensor_present(tensor_at(at, role)))
			continue;
		write_string(writer, proto_roles[role].name, strlen(proto_roles[role].name));
		r = encode_object(writer, field->table, tensor_at(at, role), role, &path, err);
		if (r < 0)
			return r;
	}
	return 0;
}

static int encode_value(struct writer *writer, const struct field *field, const char *object,
			uint32_t role, const struct field_path *path, struct fmha_error *err)
{
	const char *at = object + field->offset;
	uint32_t n;

	switch (field->type) {
	case FIELD_U32:
	case FIELD_U64:
	case FIELD_I32:
		return encode_number(writer, field, at, path, err);
	case FIELD_F32:
	case FIELD_F64:
		return encode_float(writer, field, at, path, err);
	case FIELD_STRING:
		return encode_string(writer, field, at, path, err);
	case FIELD_BOOL:
		if (LOAD(uint32_t, at))
			write_true(writer);
		else
			write_false(writer);
		return 0;
	case FIELD_BYTES:
		n = LOAD(uint32_t, object + field->count_offset);
		if (n > field->size)
			return field_error(err, FMHA_EINVAL, path, "%u bytes, more than %zu", n,
					   field->size);
		write_bin(writer, n);
		write_bin_body(writer, at, n);
		return 0;
	case FIELD_ENUM:
		n = LOAD(uint32_t, at);
		if (n >= field->names->n)
			return field_error(err, FMHA_EINVAL, path, "%u is none of its values", n);
		write_string(writer, field->names->names[n], strlen(field->names->names[n]));
		return 0;
	case FIELD_STRUCT:
		return field_encode(writer, field->table, at, field->anonymous ? NULL : path, err);
	case FIELD_ARRAY:
		n = LOAD(uint32_t, object + field->count_offset);
		return encode_array(writer, field, at, n, path, err);
	case FIELD_TENSORS:
		return encode_tensors(writer, field, at, err);
	case FIELD_STRIDE:
		return encode_stride(writer, (const int64_t *)at, role, path, err);
	case FIELD_EXTENT:
		return encode_extent(writer, (const int64_t *)at,
				     LOAD(uint32_t, object + field->count_offset), role, path, err);
	case FIELD_NUMBERS:
		return encode_numbers(writer, field, at, path, err);
	}
	return 0;
}

/* @role: which tensor this is; only a FIELD_STRIDE looks at it. */
static int encode_object(struct writer *writer, const struct field_table *table, const void *object,
			 uint32_t role, const struct field_path *path, struct fmha_error *err)
{
	uint64_t left_out = 0;
	uint32_t n = 0;
	int r;

	for (uint32_t i = 0; i < table->n_fields; i++) {
		const struct field *field = &table->fields[i];

		if (field->optional &&
		    field_is_fallback(field, object, (const char *)object + field->offset))
			left_out |= UINT64_C(1) << i;
		else
			n++;
	}
	write_map(writer, n);
	for (uint32_t i = 0; i < table->n_fields; i++) {
		const struct field *field = &table->fields[i];
		struct field_path child = {.parent = path, .name = field->name};

		if (left_out >> i & 1)
			continue;
		write_string(writer, field->name, field->name_bytes);
		r = encode_value(writer, field, object, role, &child, err);
		if (r < 0)
			return r;
	}
	return 0;
}

int field_encode(struct writer *writer, const struct field_table *table, const void *object,
		 const struct field_path *path, struct fmha_error *err)
{
	return encode_object(writer, table, object, 0, path, err);
}

/* ---- frames ---- */

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

struct frame {
	struct writer writer;
	size_t start, room; /* where it begins in the writer's buffer; bytes left for its header */
};

/* The header of a frame with up to 255 bytes of payload: what most frames turn out to be. */
enum { SMALL_HEADER_BYTES = 2 };
/* The next larger, for structs that have arrays of bytes: moving those by one byte costs as much as writing them. */
enum { MIDDLE_HEADER_BYTES = 3, LARGE_STRUCT = 4096 };

static void frame_begin(struct frame *frame, struct proto_buffer *out, uint32_t n,
			const struct field_table *table)
{
	*frame = (struct frame){.writer = {.out = out}, .start = out->size};
	frame->room = table->size < LARGE_STRUCT ? SMALL_HEADER_BYTES : MIDDLE_HEADER_BYTES;
	(void)writer_append(&frame->writer, (const char[MIDDLE_HEADER_BYTES]){0}, frame->room);
	write_array(&frame->writer, n);
}

/* @r: what encoding the payload returned. */
static int frame_end(struct frame *frame, int r, struct fmha_error *err)
{
	struct writer *writer = &frame->writer;
	struct proto_buffer *out = writer->out;
	size_t payload = out->size - frame->start - frame->room, header_bytes;
	uint8_t header[PROTO_FRAME_HEADER_MAX] = {0};

	if (r < 0)
		goto fail;
	header_bytes = proto_frame_header(payload, header);
	if (!writer->failed && header_bytes + payload > PROTO_MAX_FRAME) {
		r = fmha_error_set(err, FMHA_EINVAL, "message of %zu bytes: a frame holds %d",
				   header_bytes + payload, PROTO_MAX_FRAME);
		goto fail;
	}
	if (header_bytes > frame->room)
		(void)writer_append(writer, header, header_bytes - frame->room);
	if (writer->failed) {
		r = fmha_error_set(err, FMHA_ENOMEM, "message: out of memory");
		goto fail;
	}
	if (header_bytes != frame->room)
		memmove(out->data + frame->start + header_bytes,
			out->data + frame->start + frame->room, payload);
	out->size = frame->start + header_bytes + payload;
	memcpy(out->data + frame->start, header, header_bytes);
	return 0;
fail:
	out->size = frame->start;
	return r;
}

int proto_encode_request(struct proto_buffer *out, uint32_t id, enum proto_method method,
			 const void *params, struct fmha_error *err)
{
	struct frame frame;
	int r;

	frame_begin(&frame, out, 4, proto_params_tables[method]);
	write_uint8(&frame.writer, PROTO_REQUEST);
	write_uint32(&frame.writer, id);
	write_string(&frame.writer, proto_methods[method].name, proto_methods[method].name_bytes);
	r = field_encode(&frame.writer, proto_params_tables[method], params, NULL, err);
	return frame_end(&frame, r, err);
}

int proto_encode_notification(struct proto_buffer *out, enum proto_method method,
			      const void *params, struct fmha_error *err)
{
	struct frame frame;
	int r;

	frame_begin(&frame, out, 3, proto_params_tables[method]);
	write_uint8(&frame.writer, PROTO_NOTIFICATION);
	write_string(&frame.writer, proto_methods[method].name, proto_methods[method].name_bytes);
	r = field_encode(&frame.writer, proto_params_tables[method], params, NULL, err);
	return frame_end(&frame, r, err);
}

/* An answer that says only that the request was done: the most frequent one, with nothing to look
 * up and no length to wait for. */
static int encode_done(struct proto_buffer *out, uint32_t id, struct fmha_error *err)
{
	enum { FIXED_BYTES = 4, MOST_BYTES = FIXED_BYTES + 5 + 2 };
	struct writer writer = {.out = out};
	size_t start = out->size;

	if (proto_buffer_reserve(out, MOST_BYTES) < 0)
		return fmha_error_set(err, FMHA_ENOMEM, "message: out of memory");
	out->size += FIXED_BYTES;
	write_uint32(&writer, id);
	write_nil(&writer);
	write_map(&writer, 0);
	memcpy(out->data + start,
	       (const uint8_t[FIXED_BYTES]){0xc4, (uint8_t)(out->size - start - SMALL_HEADER_BYTES),
					    0x94, PROTO_ANSWER},
	       FIXED_BYTES);
	return 0;
}

int proto_encode_result(struct proto_buffer *out, uint32_t id, enum proto_method method,
			const void *result, struct fmha_error *err)
{
	struct frame frame;
	int r;

	if (proto_result_tables[method]->n_fields == 0)
		return encode_done(out, id, err);
	frame_begin(&frame, out, 4, proto_result_tables[method]);
	write_uint8(&frame.writer, PROTO_ANSWER);
	write_uint32(&frame.writer, id);
	write_nil(&frame.writer);
	r = field_encode(&frame.writer, proto_result_tables[method], result, NULL, err);
	return frame_end(&frame, r, err);
}

/* Sentences may quote what a peer sent; the other side shall not have to decode that. */
static void make_printable(char *text)
{
	for (; *text; text++)
		if (*text < 0x20 || *text > 0x7e)
			*text = '?';
}

int proto_encode_error(struct proto_buffer *out, uint32_t id, const struct fmha_error *error,
		       struct fmha_error *err)
{
	struct wire_error wire = {.code = error->code};
	struct frame frame;
	int r;

	(void)snprintf(wire.name, sizeof(wire.name), "%s", fmha_error_name(error->code));
	memcpy(wire.field, error->field, sizeof(wire.field) - 1);
	memcpy(wire.message, error->msg, sizeof(wire.message) - 1);
	make_printable(wire.field);
	make_printable(wire.message);
	frame_begin(&frame, out, 4, &proto_error_table);
	write_uint8(&frame.writer, PROTO_ANSWER);
	write_uint32(&frame.writer, id);
	r = field_encode(&frame.writer, &proto_error_table, &wire, NULL, err);
	write_nil(&frame.writer);
	return frame_end(&frame, r, err);
}
