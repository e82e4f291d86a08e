/* SPDX-License-Identifier: MIT */
/*
 * restore.c: the state that outlives a worker, as the front keeps it (tune/database.h):
 *
 *   {"sets": {"default": ["*"]}, "priorities": {"fwd-...": 3}, "results": [{"kernel", "shape",
 *    "splits", "us", "when"}, ...]}
 *
 * It comes from the front, which has judged it; what does not fit this build is skipped.
 */
#include "impl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cjson/cJSON.h>

#include <proto/clamp.h>
#include <proto/error.h>

static void restore_environment(struct registry *registry, const char *environment)
{
	if (!environment)
		return;
	pthread_mutex_lock(&registry->mutex);
	(void)snprintf(registry->environment, sizeof(registry->environment), "%s", environment);
	pthread_mutex_unlock(&registry->mutex);
}

static void restore_sets(struct registry *registry, const cJSON *sets)
{
	const cJSON *set;

	if (!cJSON_IsObject(sets))
		return;
	pthread_mutex_lock(&registry->mutex);
	while (registry->n_sets > 0)
		registry_set_deinit(&registry->sets[--registry->n_sets]);
	pthread_mutex_unlock(&registry->mutex);
	cJSON_ArrayForEach(set, sets)
	{
		char *text = cJSON_PrintUnformatted(set);

		if (text)
			(void)registry_load_set(registry, set->string, text, strlen(text), NULL,
						NULL);
		cJSON_free(text);
	}
}

static void restore_priorities(struct registry *registry, const cJSON *priorities)
{
	const cJSON *priority;

	pthread_mutex_lock(&registry->mutex);
	for (size_t i = 0; i < registry->table_size; i++)
		if (registry->table[i])
			registry->table[i]->priority = 0;
	pthread_mutex_unlock(&registry->mutex);
	cJSON_ArrayForEach(priority, priorities)
	{
		(void)registry_set_priority(registry, priority->string, priority->valueint, NULL);
	}
}

static void restore_results(struct registry *registry, const cJSON *results)
{
	const cJSON *item;

	pthread_mutex_lock(&registry->mutex);
	registry_clear_results(registry);
	pthread_mutex_unlock(&registry->mutex);
	cJSON_ArrayForEach(item, results)
	{
		const char *kernel = cJSON_GetStringValue(
			cJSON_GetObjectItemCaseSensitive(item, "kernel"));
		const char *shape = cJSON_GetStringValue(
			cJSON_GetObjectItemCaseSensitive(item, "shape"));
		const cJSON *splits = cJSON_GetObjectItemCaseSensitive(item, "splits");
		const cJSON *us = cJSON_GetObjectItemCaseSensitive(item, "us");
		const cJSON *when = cJSON_GetObjectItemCaseSensitive(item, "when");
		struct registry_result result = {.n_splits = splits ? splits->valueint : 0,
						 .us = us ? us->valuedouble : 0,
						 .when_s = when ? clamp_i64(when->valuedouble) : 0};

		if (!kernel || !shape || strlen(shape) >= sizeof(result.shape))
			continue;
		(void)snprintf(result.shape, sizeof(result.shape), "%s", shape);
		(void)registry_set_tuned(registry, kernel, &result, NULL);
	}
}

int registry_restore(struct registry *registry, const char *json, size_t size,
		     struct fmha_error *err)
{
	cJSON *root = cJSON_ParseWithLength(json, size);

	if (!cJSON_IsObject(root)) {
		cJSON_Delete(root);
		return fmha_error_set(err, FMHA_EINVAL, "the kept state is not a JSON object");
	}
	restore_environment(registry, cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(
					      root, "environment")));
	restore_sets(registry, cJSON_GetObjectItemCaseSensitive(root, "sets"));
	restore_priorities(registry, cJSON_GetObjectItemCaseSensitive(root, "priorities"));
	restore_results(registry, cJSON_GetObjectItemCaseSensitive(root, "results"));
	cJSON_Delete(root);
	return 0;
}
