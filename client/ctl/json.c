/* SPDX-License-Identifier: MIT */
#include "json.h"

#include <stdio.h>

double ctl_number(const cJSON *object, const char *key)
{
	const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, key);

	return cJSON_IsNumber(item) ? item->valuedouble : 0;
}

const char *ctl_text(const cJSON *object, const char *key)
{
	const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, key);

	return cJSON_IsString(item) ? item->valuestring : "";
}

const char *ctl_share(const cJSON *object, const char *key, char text[SHARE_BYTES])
{
	const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, key);

	if (!cJSON_IsNumber(item))
		return "-";
	(void)snprintf(text, SHARE_BYTES, "%.1f%%", 100 * item->valuedouble);
	return text;
}
