// SPDX-License-Identifier: MIT
/* json.c: see json.h. */
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <proto/error.h>

#include "json.h"

/* Line of @at in @text, from 1. */
static int line_of(const char *text, const char *at)
{
	int line = 1;

	for (; text < at; text++)
		line += *text == '\n';
	return line;
}

/* "about" is a comment wherever it stands. */
static void drop_comments(cJSON *item)
{
	if (cJSON_IsObject(item))
		cJSON_DeleteItemFromObjectCaseSensitive(item, "about");
	for (cJSON *child = item->child; child; child = child->next)
		drop_comments(child);
}

static int refuse_duplicates(const struct at *at, struct fmha_error *err)
{
	int index = 0;

	for (const cJSON *child = at->item->child; child; child = child->next, index++) {
		struct at here = cJSON_IsObject(at->item) ? at_member(at, child)
							  : at_item(at, child, index);
		int r;

		if (here.key)
			for (const cJSON *other = at->item->child; other != child;
			     other = other->next)
				if (strcmp(other->string, child->string) == 0)
					return at_error(&here, err, "the key appears twice");
		r = refuse_duplicates(&here, err);
		if (r < 0)
			return r;
	}
	return 0;
}

int json_parse(const char *text, const char *file, cJSON **ret, struct fmha_error *err)
{
	const char *end = NULL;
	cJSON *item = cJSON_ParseWithOpts(text, &end, 1);
	struct at document = at_document(item, file);
	int r;

	if (!item)
		return fmha_error_set(err, FMHA_EINVAL, "%s: line %d: not JSON", file,
				      end ? line_of(text, end) : 1);
	r = refuse_duplicates(&document, err);
	if (r < 0) {
		cJSON_Delete(item);
		return r;
	}
	drop_comments(item);
	*ret = item;
	return 0;
}

static int read_file(const char *path, char **ret_text, struct fmha_error *err)
{
	FILE *file = fopen(path, "re");
	char *text = NULL;
	size_t n;

	if (!file)
		return fmha_error_set(err, FMHA_EIO, "%s: %s", path, strerror(errno));
	text = malloc(JSON_MAX_BYTES + 1);
	if (!text) {
		(void)fclose(file);
		return fmha_error_set(err, FMHA_ENOMEM, "%s: out of memory", path);
	}
	n = fread(text, 1, JSON_MAX_BYTES + 1, file);
	if (ferror(file) || n > JSON_MAX_BYTES) {
		int failed = ferror(file);

		(void)fclose(file);
		free(text);
		if (failed)
			return fmha_error_set(err, FMHA_EIO, "%s: cannot be read", path);
		return fmha_error_set(err, FMHA_EINVAL, "%s: more than %d bytes", path,
				      JSON_MAX_BYTES);
	}
	(void)fclose(file);
	text[n] = '\0';
	*ret_text = text;
	return 0;
}

int json_read(const char *path, cJSON **ret, struct fmha_error *err)
{
	char *text = NULL;
	int r = read_file(path, &text, err);

	if (r < 0)
		return r;
	r = text ? json_parse(text, path, ret, err) : FMHA_EINTERNAL;
	free(text);
	return r;
}

struct at at_key(const struct at *up, const char *key)
{
	struct at at = {.up = up, .key = key};

	if (cJSON_IsObject(up->item))
		at.item = cJSON_GetObjectItemCaseSensitive(up->item, key);
	return at;
}

/* Writes the path of @at, ancestors first; returns the document it is in. */
static const struct at *write_path(const struct at *at, char *path, size_t size)
{
	const struct at *document = at;
	size_t used;

	if (!at->up)
		return at;
	document = write_path(at->up, path, size);
	used = strlen(path);
	if (at->key)
		(void)snprintf(path + used, size - used, "/%s", at->key);
	else
		(void)snprintf(path + used, size - used, "/%d", at->index);
	return document;
}

int at_error(const struct at *at, struct fmha_error *err, const char *fmt, ...)
{
	char path[160] = "", reason[200];
	const struct at *document = write_path(at, path, sizeof(path));
	va_list args;

	va_start(args, fmt);
	(void)vsnprintf(reason, sizeof(reason), fmt, args);
	va_end(args);
	return fmha_error_set(err, FMHA_EINVAL, "%s: %s: %s", document->file, path[0] ? path : "/",
			      reason);
}

static int want(const struct at *at, int is_type, const char *type, struct fmha_error *err)
{
	if (!at->item)
		return at_error(at, err, "is missing");
	if (!is_type)
		return at_error(at, err, "must be %s", type);
	return 0;
}

int at_want_object(const struct at *at, struct fmha_error *err)
{
	return want(at, cJSON_IsObject(at->item), "an object", err);
}

int at_want_array(const struct at *at, struct fmha_error *err)
{
	return want(at, cJSON_IsArray(at->item), "a list", err);
}

int at_string(const struct at *at, const char **ret, struct fmha_error *err)
{
	int r = want(at, cJSON_IsString(at->item), "a string", err);

	if (r == 0)
		*ret = at->item->valuestring;
	return r;
}

int at_int(const struct at *at, int64_t min, int64_t max, int64_t *ret, struct fmha_error *err)
{
	int r = want(at, cJSON_IsNumber(at->item), "a number", err);
	double value;

	if (r < 0)
		return r;
	value = at->item->valuedouble;
	if (value != floor(value) || value < (double)min || value > (double)max)
		return at_error(at, err, "%g: must be a whole number from %lld to %lld", value,
				(long long)min, (long long)max);
	*ret = (int64_t)value;
	return 0;
}

int at_only_keys(const struct at *at, const char *const *keys, struct fmha_error *err)
{
	for (const cJSON *child = at->item->child; child; child = child->next) {
		struct at here = at_member(at, child);
		int known = 0;

		for (int i = 0; keys[i] && !known; i++)
			known = strcmp(child->string, keys[i]) == 0;
		if (!known)
			return at_error(&here, err, "unknown key");
	}
	return 0;
}

int at_object(const struct at *at, const char *const *keys, struct fmha_error *err)
{
	int r = at_want_object(at, err);

	return r < 0 ? r : at_only_keys(at, keys, err);
}
