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

#include <json/json.h>
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

/* Those that are not among @sets. */
static void drop_sets(struct registry *registry, const cJSON *sets)
{
	pthread_mutex_lock(&registry->mutex);
	for (size_t i = registry->n_sets; i-- > 0;) {
		if (cJSON_GetObjectItemCaseSensitive(sets, registry->sets[i].name))
			continue;
		registry_set_deinit(&registry->sets[i]);
		registry->sets[i] = registry->sets[--registry->n_sets];
	}
	pthread_mutex_unlock(&registry->mutex);
}

/* Each replaces the one of its name, so that there is no moment without kernels. */
static int restore_sets(struct registry *registry, const cJSON *sets)
{
	const cJSON *set;
	int r = 0;

	if (!cJSON_IsObject(sets))
		return 0;
	drop_sets(registry, sets);
	cJSON_ArrayForEach(set, sets)
	{
		char *text = cJSON_PrintUnformatted(set);

		if (!text || registry_load_set(registry, set->string, text, strlen(text), NULL,
					       NULL) == FMHA_ENOMEM)
			r = FMHA_ENOMEM;
		cJSON_free(text);
	}
	return r;
}

static int restore_priorities(struct registry *registry, const cJSON *priorities)
{
	const cJSON *priority;
	int r = 0;

	pthread_mutex_lock(&registry->mutex);
	for (size_t i = 0; i < registry->table_size; i++)
		if (registry->table[i])
			registry->table[i]->priority = 0;
	pthread_mutex_unlock(&registry->mutex);
	cJSON_ArrayForEach(priority, priorities)
	{
		if (registry_set_priority(registry, priority->string, priority->valueint, NULL) ==
		    FMHA_ENOMEM)
			r = FMHA_ENOMEM;
	}
	return r;
}

static int restore_results(struct registry *registry, const cJSON *results)
{
	const cJSON *item;
	int r = 0;

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
		if (registry_set_tuned(registry, kernel, &result, NULL) == FMHA_ENOMEM)
			r = FMHA_ENOMEM;
	}
	return r;
}

int registry_restore(struct registry *registry, const char *json, size_t size,
		     struct fmha_error *err)
{
	int r[3];
	cJSON *root;

	if (json_from_text(json, size, NULL, &root) < 0)
		return fmha_error_set(err, FMHA_ENOMEM, "the kept state: out of memory");
	if (!cJSON_IsObject(root)) {
		cJSON_Delete(root);
		return fmha_error_set(err, FMHA_EINVAL, "the kept state is not a JSON object");
	}
	restore_environment(registry, cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(
					      root, "environment")));
	r[0] = restore_sets(registry, cJSON_GetObjectItemCaseSensitive(root, "sets"));
	r[1] = restore_priorities(registry, cJSON_GetObjectItemCaseSensitive(root, "priorities"));
	r[2] = restore_results(registry, cJSON_GetObjectItemCaseSensitive(root, "results"));
	cJSON_Delete(root);
	if (r[0] < 0 || r[1] < 0 || r[2] < 0)
		return fmha_error_set(err, FMHA_ENOMEM, "the kept state: out of memory");
	return 0;
}
