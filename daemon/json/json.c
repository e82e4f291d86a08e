/* SPDX-License-Identifier: MIT */
#include <json/json.h>

#include <stdalign.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <proto/error.h>

#define CHUNK_BYTES (16u << 10) /* the first; each later one is twice as large */

struct chunk {
	struct chunk *next;
	size_t size, used;
	alignas(max_align_t) char data[];
};

struct arena {
	struct chunk *chunks; /* the newest first */
	bool building;
	bool failed; /* an allocation has, since json_begin() or json_from_text() */
};

static _Thread_local struct arena arena;

static struct chunk *add_chunk(size_t at_least)
{
	size_t size = arena.chunks ? 2 * arena.chunks->size : CHUNK_BYTES;
	struct chunk *chunk;

	if (size < at_least)
		size = at_least;
	chunk = malloc(sizeof(*chunk) + size);
	if (!chunk)
		return NULL;
	chunk->next = arena.chunks;
	chunk->size = size;
	chunk->used = 0;
	arena.chunks = chunk;
	return chunk;
}

static void *json_take(size_t size)
{
	size_t rounded = (size + alignof(max_align_t) - 1) & ~(alignof(max_align_t) - 1);
	struct chunk *chunk = arena.chunks;
	void *block;

	if (rounded < size)
		return NULL;
	if (!chunk || chunk->size - chunk->used < rounded)
		chunk = add_chunk(rounded);
	if (!chunk)
		return NULL;
	block = chunk->data + chunk->used;
	chunk->used += rounded;
	return block;
}

static void *allocate(size_t size)
{
	void *block = arena.building ? json_take(size) : malloc(size);

	arena.failed |= !block;
	return block;
}

static void json_release(void *block)
{
	for (const struct chunk *chunk = arena.chunks; chunk; chunk = chunk->next)
		if ((uintptr_t)block - (uintptr_t)chunk->data < chunk->size)
			return; /* ends with the document */
	free(block);
}

/* Before main(): no document has been made with other functions. */
__attribute__((constructor)) static void install(void)
{
	cJSON_InitHooks(&(cJSON_Hooks){.malloc_fn = allocate, .free_fn = json_release});
}

void json_begin(void)
{
	arena.building = true;
	arena.failed = false;
}

char *json_end(cJSON *root, bool spaced)
{
	char *text = spaced ? cJSON_Print(root) : cJSON_PrintUnformatted(root), *given = NULL;
	struct chunk *chunk;

	if (text && !arena.failed)
		given = strdup(text);
	cJSON_Delete(root);
	while ((chunk = arena.chunks)) {
		arena.chunks = chunk->next;
		free(chunk);
	}
	arena.building = false;
	return given;
}

int json_from_text(const char *text, size_t size, const char **ret_end, cJSON **ret_root)
{
	bool before = arena.failed;

	arena.failed = false;
	*ret_root = cJSON_ParseWithLengthOpts(text, size, ret_end, 0);
	if (!*ret_root && arena.failed)
		return FMHA_ENOMEM;
	arena.failed = before;
	return 0;
}

cJSON *json_member(const cJSON *object, const char *name)
{
	return cJSON_GetObjectItemCaseSensitive(object, name);
}

const char *json_text(const cJSON *object, const char *name)
{
	const char *text = cJSON_GetStringValue(json_member(object, name));

	return text ? text : "";
}

cJSON *json_add_item(cJSON *list)
{
	cJSON *item = cJSON_CreateObject();

	cJSON_AddItemToArray(list, item);
	return item;
}

void json_add_hex(cJSON *object, const char *name, uint64_t value)
{
	char text[17];

	(void)snprintf(text, sizeof(text), "%016llx", (unsigned long long)value);
	if (value)
		cJSON_AddStringToObject(object, name, text);
}

uint64_t json_hex(const cJSON *object, const char *name)
{
	const char *text = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(object, name));

	if (!text || strlen(text) != 16 || strspn(text, "0123456789abcdef") != 16)
		return 0;
	return strtoull(text, NULL, 16);
}

/* ---- walking ---- */

struct cursor {
	const char *at, *end;
};

static bool is_at(struct cursor *cursor, char what)
{
	while (cursor->at < cursor->end && (unsigned char)*cursor->at <= ' ')
		cursor->at++;
	return cursor->at < cursor->end && *cursor->at == what;
}

static bool skip(struct cursor *cursor, char what)
{
	bool found = is_at(cursor, what);

	cursor->at += found;
	return found;
}

/* Return: 0, 1, FMHA_ENOMEM as json_walk(). */
static int take_value(struct cursor *cursor, cJSON **ret_value)
{
	int r = json_from_text(cursor->at, (size_t)(cursor->end - cursor->at), &cursor->at,
			       ret_value);

	return r < 0 ? r : !*ret_value;
}

static int walk_list(struct cursor *cursor, json_visit visit, void *owner)
{
	int r = 0;

	while (r == 0 && !skip(cursor, ']')) {
		cJSON *item = NULL;

		r = take_value(cursor, &item);
		if (r == 0)
			r = visit(owner, item);
		if (r == 0 && !skip(cursor, ',') && !is_at(cursor, ']'))
			r = 1;
		cJSON_Delete(item);
	}
	return r;
}

static int walk_member(struct cursor *cursor, const char *list, json_visit visit, void *owner,
		       cJSON *rest)
{
	cJSON *key = NULL, *value = NULL;
	int r = take_value(cursor, &key);

	if (r == 0 && (!cJSON_IsString(key) || !skip(cursor, ':')))
		r = 1;
	if (r == 0 && strcmp(key->valuestring, list) == 0 && skip(cursor, '[')) {
		r = walk_list(cursor, visit, owner);
		value = cJSON_CreateArray();
	} else if (r == 0) {
		r = take_value(cursor, &value);
	}
	if (r == 0 && !cJSON_AddItemToObject(rest, key->valuestring, value))
		r = FMHA_ENOMEM;
	if (r != 0)
		cJSON_Delete(value);
	cJSON_Delete(key);
	if (r == 0 && !skip(cursor, ',') && !is_at(cursor, '}'))
		r = 1;
	return r;
}

int json_walk(const char *text, size_t size, const char *list, json_visit visit, void *owner,
	      cJSON **ret_rest)
{
	struct cursor cursor = {text, text + size};
	cJSON *rest = cJSON_CreateObject();
	int r = rest ? !skip(&cursor, '{') : FMHA_ENOMEM;

	while (r == 0 && !skip(&cursor, '}'))
		r = walk_member(&cursor, list, visit, owner, rest);
	if (r == 0 && (is_at(&cursor, '\0') || cursor.at < cursor.end))
		r = 1; /* something follows */
	*ret_rest = rest;
	return r;
}
