/* SPDX-License-Identifier: MIT */
/* json.h: members of documents that may lack them. */
#ifndef CTL_JSON_H
#define CTL_JSON_H

#include <cjson/cJSON.h>

/* NULL where @object is NULL or has none of that name. */
cJSON *ctl_member(const cJSON *object, const char *key);
/* 0 where @object is NULL or has no number there. */
double ctl_number(const cJSON *object, const char *key);
/* "" where @object is NULL or has no string there; lives as long as @object. */
const char *ctl_text(const cJSON *object, const char *key);

/* A new object, the last of @list. */
cJSON *ctl_add_item(cJSON *list);

/* "12.3%" of a number like 0.123, or "-" where there is none. */
#define SHARE_BYTES 16
const char *ctl_share(const cJSON *object, const char *key, char text[SHARE_BYTES]);

#endif
