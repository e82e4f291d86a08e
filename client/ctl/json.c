/* SPDX-License-Identifier: MIT */
#include "json.h"

#include <stdio.h>

cJSON *ctl_member(const cJSON *object, const char *key)
{
	return cJSON_GetObjectItemCaseSensitive(object, key);
}

double ctl_number(const cJSON *object, const char *key)
{
	const cJSON *item = ctl_member(object, key);

	return cJSON_IsNumber(item) ? item->valuedouble : 0;
}

const char *ctl_text(const cJSON *object, const char *key)
{
	const cJSON *item = ctl_member(object, key);

	return cJSON_IsString(item) ? item->valuestring : "";
}

cJSON *ctl_add_item(cJSON *list)
{
	cJSON *item = cJSON_CreateObject();

	cJSON_AddItemToArray(list, item);
	return item;
}

const char *ctl_share(const cJSON *object, const char *key, char text[SHARE_BYTES])
{
	const cJSON *item = ctl_member(object, key);

	if (!cJSON_IsNumber(item))
		return "-";
	(void)snprintf(text, SHARE_BYTES, "%.1f%%", 100 * item->valuedouble);
	return text;
}
