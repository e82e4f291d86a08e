/* SPDX-License-Identifier: MIT */
/* sets.c: named kernel sets, lists of wildcard patterns over canonical names. */
#include "impl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <json/json.h>
#include <proto/error.h>

/*
 * Does @text match @pattern, where * is any run of characters and ? any one? Linear in practice and
 * never exponential: after a mismatch only the last * is retried, since an earlier one could not do
 * better.
 */
static bool wildcard_match(const char *pattern, const char *text)
{
	const char *star = NULL, *retry = NULL;

	while (*text) {
		if (*pattern == '*') {
			star = pattern++;
			retry = text;
		} else if (*pattern == *text || *pattern == '?') {
			pattern++;
			text++;
		} else if (star) {
			pattern = star + 1;
			text = ++retry;
		} else {
			return false;
		}
	}
	while (*pattern == '*')
		pattern++;
	return *pattern == '\0';
}

static bool is_named(const struct registry_set *set, const char *name)
{
	bool named = false;

	for (size_t i = 0; i < set->n_patterns; i++) {
		const char *pattern = set->patterns[i];
		bool away = *pattern == '!';

		if (named == away && wildcard_match(pattern + away, name))
			named = !away;
	}
	return named;
}

static bool is_old(const struct registry *registry, const char *pattern)
{
	for (size_t i = 0; !registry->source && i < registry->n_archs; i++)
		if (spec_is_old_pattern(registry->catalog, registry->archs[i], pattern))
			return true;
	return false;
}

/*
 * Is an old name of the kernel in the set? A pattern that takes away only some of the names leaves the kernel:
 * those that have words of old names do.
 */
static bool judge_old_names(const struct registry *registry, const struct registry_set *set,
			    const struct kernel_spec *spec)
{
	char name[SPEC_NAME_BYTES];
	bool named = false;

	(void)spec_name_format(registry->catalog, spec, name);
	for (size_t i = 0; i < set->n_patterns; i++) {
		const char *pattern = set->patterns[i];

		if (*pattern != '!')
			named |= spec_old_names_match(registry->catalog, spec, pattern);
		else if (!is_old(registry, pattern))
			named &= !wildcard_match(pattern + 1, name);
	}
	return named;
}

/* The answer is kept, since there may be a thousand patterns. */
static bool names_by_old(const struct registry *registry, struct registry_set *set,
			 const struct kernel_spec *spec)
{
	uint64_t hash = spec_hash(spec);
	struct registry_verdict *verdict = &set->verdicts[hash % REGISTRY_VERDICTS];

	if (verdict->hash != hash)
		*verdict = (struct registry_verdict){hash, judge_old_names(registry, set, spec)};
	return verdict->named;
}

bool registry_set_names(const struct registry *registry, struct registry_set *set,
			const struct kernel_spec *spec, const char *name)
{
	return set->everything || is_named(set, name) ||
	       (set->verdicts && names_by_old(registry, set, spec));
}

void registry_sets_judge(struct registry *registry, const struct kernel_spec *spec,
			 const char *name, struct registry_info *ret_info)
{
	char text[SPEC_NAME_BYTES] = "";

	for (size_t i = 0; i < registry->n_sets; i++) {
		struct registry_set *set = &registry->sets[i];
		bool is_default = strcmp(set->name, "default") == 0;

		if (!set->everything && !name) {
			(void)spec_name_format(registry->catalog, spec, text);
			name = text;
		}
		if (!registry_set_names(registry, set, spec, name))
			continue;
		ret_info->offered = 1;
		ret_info->preferred |= !is_default;
	}
}

void registry_set_deinit(struct registry_set *set)
{
	for (size_t i = 0; i < set->n_patterns; i++)
		free(set->patterns[i]);
	free(set->patterns);
	free(set->verdicts);
	*set = (struct registry_set){0};
}

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
		old |= is_old(registry, set->patterns[i]);
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
