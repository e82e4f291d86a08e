/* SPDX-License-Identifier: MIT */
/* sets.c: sets as they are loaded and unloaded: what patterns name, and what they are said to lack. */
#include "impl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <json/json.h>
#include <proto/error.h>

static int broken(struct fmha_error *err, const char *name, const char *why)
{
	return fmha_error_set_field(err, FMHA_EINVAL, "set", "set %.63s: %s", name, why);
}

static int set_parse(struct registry_set *set, const char *json, size_t size,
		     struct fmha_error *err)
{
	cJSON *list, *item;
	int r = 0;

	if (size > REGISTRY_MAX_SET)
		return broken(err, set->name, "larger than 1 MiB");
	if (json_from_text(json, size, NULL, &list) < 0)
		return fmha_error_set(err, FMHA_ENOMEM, "set: out of memory");
	if (!cJSON_IsArray(list)) {
		cJSON_Delete(list);
		return broken(err, set->name, "not a JSON list of patterns");
	}
	set->patterns = calloc(REGISTRY_MAX_PATTERNS, sizeof(*set->patterns));
	if (!set->patterns) {
		cJSON_Delete(list);
		return fmha_error_set(err, FMHA_ENOMEM, "set: out of memory");
	}
	cJSON_ArrayForEach(item, list)
	{
		if (r < 0)
			break;
		if (!cJSON_IsString(item) || !*item->valuestring ||
		    strlen(item->valuestring) >= SPEC_NAME_BYTES)
			r = broken(err, set->name, "a pattern is not a string of 1 to 255 bytes");
		else if (set->n_patterns == REGISTRY_MAX_PATTERNS)
			r = broken(err, set->name, "more than 1024 patterns");
		else if (!(set->patterns[set->n_patterns] = strdup(item->valuestring)))
			r = fmha_error_set(err, FMHA_ENOMEM, "set: out of memory");
		else
			set->n_patterns++;
	}
	cJSON_Delete(list);
	/* NOLINTNEXTLINE(clang-analyzer-core.NonNullParamChecker): it began with no patterns */
	set->everything = r == 0 && set->n_patterns == 1 && strcmp(set->patterns[0], "*") == 0;
	return r;
}

static int find_old_patterns(const struct registry *registry, struct registry_set *set,
			     struct fmha_error *err)
{
	bool old = false;

	for (size_t i = 0; i < set->n_patterns; i++)
		old |= registry_is_old_pattern(registry, set->patterns[i]);
	set->verdicts = old ? calloc(REGISTRY_VERDICTS, sizeof(*set->verdicts)) : NULL;
	return old && !set->verdicts ? fmha_error_set(err, FMHA_ENOMEM, "set: out of memory") : 0;
}

struct counting {
	struct registry *registry;
	struct registry_set *set;
	uint64_t n;
};

static int count_visit(void *owner, const struct kernel_spec *spec, const char *name,
		       const struct registry_info *info)
{
	struct counting *counting = owner;

	(void)info;
	counting->n += registry_set_names(counting->registry, counting->set, spec, name);
	return 0;
}

static int put_set(struct registry *registry, struct registry_set *set, struct fmha_error *err)
{
	size_t i = 0;

	while (i < registry->n_sets && strcmp(registry->sets[i].name, set->name) != 0)
		i++;
	if (i == REGISTRY_MAX_SETS)
		return fmha_error_set_field(err, FMHA_EQUOTA, "set", "%d sets are loaded already",
					    REGISTRY_MAX_SETS);
	registry_set_deinit(&registry->sets[i]);
	registry->n_sets += i == registry->n_sets;
	registry->sets[i] = *set;
	registry->generation++;
	return 0;
}

int registry_load_set(struct registry *registry, const char *name, const char *json, size_t size,
		      uint64_t *ret_n_kernels, struct fmha_error *err)
{
	struct registry_set set = {0};
	struct counting counting = {.registry = registry, .set = &set};
	int r;

	if (!*name || strlen(name) >= sizeof(set.name))
		return fmha_error_set_field(err, FMHA_EINVAL, "set",
					    "set: its name has 1 to %zu bytes",
					    sizeof(set.name) - 1);
	(void)snprintf(set.name, sizeof(set.name), "%s", name);
	r = set_parse(&set, json, size, err);
	if (r == 0)
		r = find_old_patterns(registry, &set, err);
	if (r == 0 && ret_n_kernels && set.everything)
		counting.n = registry_count(registry);
	else if (r == 0 && ret_n_kernels)
		r = registry_each(registry, NULL, count_visit, &counting, err);
	if (r == 0) {
		pthread_mutex_lock(&registry->mutex);
		r = put_set(registry, &set, err);
		pthread_mutex_unlock(&registry->mutex);
	}
	if (r < 0) {
		registry_set_deinit(&set);
		return r;
	}
	if (ret_n_kernels)
		*ret_n_kernels = counting.n;
	return 0;
}

static bool take_set(struct registry *registry, const char *name, struct registry_set *ret_set)
{
	bool found = false;

	pthread_mutex_lock(&registry->mutex);
	for (size_t i = 0; i < registry->n_sets && !found; i++) {
		if (strcmp(registry->sets[i].name, name) != 0)
			continue;
		*ret_set = registry->sets[i];
		registry->sets[i] = registry->sets[--registry->n_sets];
		registry->sets[registry->n_sets] = (struct registry_set){0};
		registry->generation++;
		found = true;
	}
	pthread_mutex_unlock(&registry->mutex);
	return found;
}

static int gone_visit(void *owner, const struct kernel_spec *spec, const char *name,
		      const struct registry_info *info)
{
	struct counting *counting = owner;

	counting->n += !info->offered &&
		       registry_set_names(counting->registry, counting->set, spec, name);
	return 0;
}

int registry_unload_set(struct registry *registry, const char *name, uint64_t *ret_n_kernels,
			struct fmha_error *err)
{
	struct registry_set set;
	struct counting counting = {.registry = registry, .set = &set};
	int r = 0;

	if (!take_set(registry, name, &set))
		return fmha_error_set_field(err, FMHA_ENOENT, "set", "set %.63s: not loaded", name);
	if (ret_n_kernels)
		r = registry_each(registry, NULL, gone_visit, &counting, err);
	registry_set_deinit(&set);
	if (r == 0 && ret_n_kernels)
		*ret_n_kernels = counting.n;
	return r;
}
