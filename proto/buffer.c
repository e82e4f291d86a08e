/* SPDX-License-Identifier: MIT */
#include <proto/buffer.h>

#include <stdlib.h>
#include <string.h>

#include <fmha/base.h>

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

void proto_buffer_consume(struct proto_buffer *buffer, size_t n)
{
	if (n >= buffer->size) {
		buffer->size = 0;
		return;
	}
	memmove(buffer->data, buffer->data + n, buffer->size - n);
	buffer->size -= n;
}

void proto_buffer_deinit(struct proto_buffer *buffer)
{
	free(buffer->data);
	*buffer = (struct proto_buffer){0};
}
