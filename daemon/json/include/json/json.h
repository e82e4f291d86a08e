/* SPDX-License-Identifier: MIT */
/*
 * json.h: documents that are whole or not there. cJSON's functions that add something say by their
 * result that memory has run out; a document of a hundred additions is readable only when none is
 * looked at. Between json_begin() and json_end() a thread's allocations by cJSON come from one arena,
 * which remembers whether it ever lacked memory, and which is freed as one: what could not be attached
 * to the document is not lost.
 */
#ifndef JSON_JSON_H
#define JSON_JSON_H

#include <stddef.h>
#include <stdbool.h>
#include <stdint.h>

#include <cjson/cJSON.h>

/* From here on this thread builds one document. What it makes of cJSON ends with the document. */
void json_begin(void);

/*
 * The text of @root (taken; it may hold items that were made before json_begin()), without spaces
 * unless @spaced.
 *
 * Return: given; NULL: memory has run out, now or before.
 */
char *json_end(cJSON *root, bool spaced);

/*
 * The document that a text of @size bytes is, for whoever has judged it before or says himself what is
 * wrong with it. @ret_end: NULL: nothing may follow; else set to what follows.
 *
 * Return: 0, *ret_root is given, or NULL: the text is no JSON; FMHA_ENOMEM.
 */
int json_from_text(const char *text, size_t size, const char **ret_end, cJSON **ret_root);

/*
 * Goes through a document that is too long for one tree: an object, of whose member @list, if that is a list, each item is
 * given to @visit by itself, which returns a negative number to end. @ret_rest: the other members, and @list
 * as an empty list; given, also on failure.
 *
 * Return: 0; 1: the text is no JSON object; FMHA_ENOMEM; what @visit returned.
 */
typedef int (*json_visit)(void *owner, const cJSON *item);
int json_walk(const char *text, size_t size, const char *list, json_visit visit, void *owner,
	      cJSON **ret_rest);

/* NULL where @object is NULL or has none of that name. */
cJSON *json_member(const cJSON *object, const char *name);
/* "" where @object has no text of that name. */
const char *json_text(const cJSON *object, const char *name);
/* A new object, the last of @list. */
cJSON *json_add_item(cJSON *list);

/* A number of 64 bits as text, since a JSON number keeps 53 of them. 0 and what is no such text are
 * left out, and read as 0. */
void json_add_hex(cJSON *object, const char *name, uint64_t value);
uint64_t json_hex(const cJSON *object, const char *name);

#endif
