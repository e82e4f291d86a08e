/* SPDX-License-Identifier: MIT */
/* json.h: members of documents that may lack them. */
#ifndef CTL_JSON_H
#define CTL_JSON_H

#include <cjson/cJSON.h>

/* 0 where @object is NULL or has no number there. */
double number_of(const cJSON *object, const char *key);
/* "" where @object is NULL or has no string there; lives as long as @object. */
const char *text_of(const cJSON *object, const char *key);

#endif
