/* SPDX-License-Identifier: MIT */
#include "field.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <proto/error.h>

void field_path_print(const struct field_path *path, char *out, size_t size)
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
