/* SPDX-License-Identifier: MIT */
/*
 * json.h: reading a JSON document so that every complaint says where. A `struct at` is a place in a
 * document: it lives on the stack and points to the place it was reached from, so the path is only
 * spelled out when something is wrong:
 *
 *   specs/rules/ck.json: /variants/fwd/0/for: must be a list
 *
 * cJSON accepts duplicate keys and finds keys without regard to case; these helpers do neither.
 */
#ifndef SPECS_JSON_H
#define SPECS_JSON_H

#include <cjson/cJSON.h>
#include <stdint.h>

#include <fmha/base.h>

struct at {
	const struct at *up; /* NULL: the document itself */
	const char *key;     /* or NULL: */
	int index;
	const cJSON *item;
	const char *file; /* only in the document itself */
};

#define JSON_MAX_BYTES (1 << 20)

/* Reads and parses; no duplicate keys, nothing after the document. JSON has no comments, so members
 * called "about" are allowed everywhere and dropped here. @ret is given (cJSON_Delete). */
int json_read(const char *path, cJSON **ret, struct fmha_error *err);
int json_parse(const char *text, const char *file, cJSON **ret, struct fmha_error *err);

static inline struct at at_document(const cJSON *item, const char *file)
{
	return (struct at){.item = item, .file = file};
}

static inline struct at at_item(const struct at *up, const cJSON *item, int index)
{
	return (struct at){.up = up, .item = item, .index = index};
}

static inline struct at at_member(const struct at *up, const cJSON *item)
{
	return (struct at){.up = up, .item = item, .key = item->string};
}

/* The member @key; its item is NULL when it is missing. */
struct at at_key(const struct at *up, const char *key);

/* Fills @err with file, path and reason; returns FMHA_EINVAL. */
int at_error(const struct at *at, struct fmha_error *err, const char *fmt, ...)
	__attribute__((format(printf, 3, 4)));

/* Each returns 0, or FMHA_EINVAL when the place is missing or of another type. */
int at_want_object(const struct at *at, struct fmha_error *err);
int at_want_array(const struct at *at, struct fmha_error *err);
int at_string(const struct at *at, const char **ret, struct fmha_error *err);
int at_int(const struct at *at, int64_t min, int64_t max, int64_t *ret, struct fmha_error *err);

/* Complains about a member whose key is not in @keys (NULL-terminated). */
int at_only_keys(const struct at *at, const char *const *keys, struct fmha_error *err);
/* Both: an object of no other keys. */
int at_object(const struct at *at, const char *const *keys, struct fmha_error *err);

#endif
