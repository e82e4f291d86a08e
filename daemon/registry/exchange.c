/* SPDX-License-Identifier: MIT */
/*
 * exchange.c: a registry as JSON; import.c reads it.
 *
 *   {"format": "fmhad-registry", "version": 1, "device": "...",
 *    "environment": "...", "archs": [...],
 *    "sets": {"default": ["*"]}, "filter": "...",
 *    "kernels": [{"name": "...", "flags": ["quarantined"], "priority": 1, "offered": true, "runs": 7,
 *                 "run_ns": 8, "tuned": [{"shape": "...", "splits": 0, "us": 9.5,
 *                                              "when": 1700000000}]}, ...],
 *    "statistics": {"kernels": 1, "families": {"fwd": 1}, "data_types": {...}, "pipelines": {...},
 *                   "states": {"offered": 1, ...}}}
 *
 * A kernel has only the members that differ from the default. The statistics count what the list
 * holds, so they come last and the whole is written in one walk, a kernel a piece.
 */
#include "impl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <json/json.h>
#include <proto/error.h>

#define MAX_WORDS 256

struct exporter {
	struct registry *registry;
	FILE *file;
	uint64_t bytes, most_bytes;
	bool known_only; /* kernels that nothing is known about are left out */
	bool all;        /* also what tells of users: shapes, times and counts */
	int failed;      /* FMHA_ENOMEM, FMHA_EQUOTA */
	uint64_t n_kernels;
	uint64_t families[SPEC_N_FAMILIES], data_types[SPEC_N_DTYPES], pipelines[MAX_WORDS];
	uint64_t n_quarantined, n_offered, n_tuned;
};

/* Bytes of users' strings that are not ASCII are escaped, each by itself, so that the document is valid
 * UTF-8 whatever they are. */
static void exporter_put(struct exporter *e, const char *text, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		unsigned char c = (unsigned char)text[i];

		if (c < 0x7f)
			(void)putc_unlocked(c, e->file);
		else
			(void)fprintf(e->file, "\\u%04x", c);
		e->bytes += c < 0x7f ? 1 : 6;
	}
	if (e->bytes > e->most_bytes)
		e->failed = FMHA_EQUOTA;
	else if (ferror(e->file))
		e->failed = FMHA_ENOMEM;
}

/* @root: taken, of the document that json_begin() began. Its first and last byte may be left out. */
static void put_json(struct exporter *e, cJSON *root, bool without_start, bool without_end)
{
	char *text = json_end(root, false);

	if (!text)
		e->failed = FMHA_ENOMEM;
	else
		exporter_put(e, text + without_start, strlen(text) - without_start - without_end);
	free(text);
}

static void put_head(struct exporter *e, const char *filter)
{
	struct registry *registry = e->registry;
	cJSON *root, *list;

	json_begin();
	root = cJSON_CreateObject();
	cJSON_AddStringToObject(root, "format", "fmhad-registry");
	cJSON_AddNumberToObject(root, "version", 1);
	cJSON_AddStringToObject(root, "device", registry->device);
	list = cJSON_AddArrayToObject(root, "archs");
	for (size_t i = 0; i < registry->n_archs; i++)
		cJSON_AddItemToArray(list, cJSON_CreateString(registry_arch_name(registry, i)));
	cJSON_AddStringToObject(root, "filter", filter ? filter : "");
	list = cJSON_AddObjectToObject(root, "sets");
	pthread_mutex_lock(&registry->mutex);
	cJSON_AddStringToObject(root, "environment", registry->environment);
	for (size_t i = 0; i < registry->n_sets; i++) {
		const struct registry_set *set = &registry->sets[i];

		cJSON_AddItemToObject(list, set->name,
				      cJSON_CreateStringArray((const char *const *)set->patterns,
							      (int)set->n_patterns));
	}
	pthread_mutex_unlock(&registry->mutex);
	put_json(e, root, false, true);
	exporter_put(e, ",\n\"kernels\":[", 13);
}

struct own_times {
	const uint32_t *n_of_kernel; /* whose rows */
	cJSON *list;
};

static int add_own(void *owner, const struct times_row *row)
{
	struct own_times *own = owner;

	if (row->n_of_kernel == own->n_of_kernel)
		times_write(own->list, row, false);
	return 0;
}

static void add_tuned(cJSON *item, struct registry *registry, const struct kernel_spec *spec)
{
	struct own_times own = {.list = cJSON_AddArrayToObject(item, "tuned")};
	const struct registry_entry *entry;

	pthread_mutex_lock(&registry->mutex);
	entry = registry_entry_find(registry, spec, false);
	own.n_of_kernel = entry ? &entry->n_tuned : NULL;
	(void)times_each(&registry->times, NULL, add_own, &own);
	pthread_mutex_unlock(&registry->mutex);
}

static cJSON *kernel_json(struct registry *registry, const struct kernel_spec *spec,
			  const char *name, const struct registry_info *info, bool all)
{
	cJSON *item = cJSON_CreateObject();

	cJSON_AddStringToObject(item, "name", name);
	if (info->quarantined)
		cJSON_AddItemToArray(cJSON_AddArrayToObject(item, "flags"),
				     cJSON_CreateString("quarantined"));
	if (info->priority)
		cJSON_AddNumberToObject(item, "priority", info->priority);
	if (!info->offered)
		cJSON_AddFalseToObject(item, "offered");
	if (info->n_runs && all) {
		cJSON_AddNumberToObject(item, "runs", (double)info->n_runs);
		cJSON_AddNumberToObject(item, "run_ns", (double)info->run_ns);
	}
	if (info->n_tuned && all)
		add_tuned(item, registry, spec);
	return item;
}

static int export_visit(void *owner, const struct kernel_spec *spec, const char *name,
			const struct registry_info *info)
{
	struct exporter *e = owner;
	bool known = info->quarantined || info->priority || info->n_runs || info->n_tuned;
	char plain[SPEC_NAME_BYTES + 16];

	if (e->known_only && !known)
		return 0;
	exporter_put(e, e->n_kernels ? ",\n" : "\n", e->n_kernels ? 2 : 1);
	if (known || !info->offered) {
		json_begin();
		put_json(e, kernel_json(e->registry, spec, name, info, e->all), false, false);
	} else { /* most of millions; a name has no escapes */
		exporter_put(e, plain,
			     (size_t)snprintf(plain, sizeof(plain), "{\"name\":\"%s\"}", name));
	}
	e->n_kernels++;
	e->families[spec->signature.family]++;
	e->data_types[spec->signature.data_type]++;
	e->pipelines[spec->pipeline]++;
	e->n_quarantined += info->quarantined;
	e->n_offered += info->offered;
	e->n_tuned += info->n_tuned > 0;
	return e->failed;
}

static void add_counts(cJSON *root, const struct exporter *e, const char *title,
		       enum spec_field field, const uint64_t *counts, int n)
{
	cJSON *object = cJSON_AddObjectToObject(root, title);

	for (int i = 0; i < n; i++)
		if (counts[i] > 0)
			cJSON_AddNumberToObject(object, spec_word(e->registry->catalog, field, i),
						(double)counts[i]);
}

static void put_statistics(struct exporter *e)
{
	cJSON *root, *statistics, *states;

	json_begin();
	root = cJSON_CreateObject();
	statistics = cJSON_AddObjectToObject(root, "statistics");
	cJSON_AddNumberToObject(statistics, "kernels", (double)e->n_kernels);
	add_counts(statistics, e, "families", SPEC_FIELD_family, e->families, SPEC_N_FAMILIES);
	add_counts(statistics, e, "data_types", SPEC_FIELD_data_type, e->data_types, SPEC_N_DTYPES);
	add_counts(statistics, e, "pipelines", SPEC_FIELD_pipeline, e->pipelines, MAX_WORDS);
	states = cJSON_AddObjectToObject(statistics, "states");
	cJSON_AddNumberToObject(states, "quarantined", (double)e->n_quarantined);
	cJSON_AddNumberToObject(states, "offered", (double)e->n_offered);
	cJSON_AddNumberToObject(states, "tuned", (double)e->n_tuned);
	exporter_put(e, "],\n", 3);
	put_json(e, root, true, false);
	exporter_put(e, "\n", 1);
}

int registry_export(struct registry *registry, const char *filter, bool all, uint64_t most_bytes,
		    FILE *file, struct fmha_error *err)
{
	struct exporter *e = calloc(1, sizeof(*e));
	int r;

	if (!e)
		return fmha_error_set(err, FMHA_ENOMEM, "export: out of memory");
	e->registry = registry;
	e->all = all;
	e->most_bytes = most_bytes;
	e->file = file;
	e->known_only = !filter || !*filter;
	put_head(e, filter);
	r = e->known_only ? registry_each_known(registry, export_visit, e, err)
			  : registry_each(registry, filter, export_visit, e, err);
	if (r == 0)
		put_statistics(e);
	if (r == 0 && e->failed == 0 && fflush(file) != 0)
		e->failed = FMHA_ENOMEM;
	if (e->failed == FMHA_EQUOTA)
		r = fmha_error_set_field(err, FMHA_EQUOTA, "filter",
					 "filter: the result exceeds %llu bytes: ask for less",
					 (unsigned long long)most_bytes);
	else if (e->failed < 0)
		r = fmha_error_set(err, e->failed, "export: out of memory");
	free(e);
	return r;
}

static int end_text(cJSON *root, bool spaced, char **ret_text, struct fmha_error *err)
{
	char *text = json_end(root, spaced);

	if (!text)
		return fmha_error_set(err, FMHA_ENOMEM, "registry: out of memory");
	*ret_text = text;
	return 0;
}

int registry_kernel_text(struct registry *registry, const char *name, bool all, char **ret_text,
			 struct fmha_error *err)
{
	char own_name[SPEC_NAME_BYTES];
	struct registry_info info;
	struct kernel_spec spec;
	cJSON *item, *sets;
	int r = registry_find(registry, name, &spec, &info, err);

	if (r < 0)
		return r;
	(void)spec_name_format(registry->catalog, &spec, own_name);
	json_begin();
	item = kernel_json(registry, &spec, own_name, &info, all);
	sets = cJSON_AddArrayToObject(item, "sets");
	pthread_mutex_lock(&registry->mutex);
	for (size_t i = 0; i < registry->n_sets; i++)
		if (registry_set_names(registry, &registry->sets[i], &spec, own_name))
			cJSON_AddItemToArray(sets, cJSON_CreateString(registry->sets[i].name));
	pthread_mutex_unlock(&registry->mutex);
	return end_text(item, true, ret_text, err);
}

int registry_state_text(struct registry *registry, char **ret_text, struct fmha_error *err)
{
	cJSON *root, *priorities;

	json_begin();
	root = cJSON_CreateObject();
	priorities = cJSON_AddObjectToObject(root, "priorities");
	pthread_mutex_lock(&registry->mutex);
	for (size_t i = 0; i < registry->table_size; i++) {
		const struct registry_entry *entry = registry->table[i];
		char name[SPEC_NAME_BYTES];

		if (!entry || !entry->priority)
			continue;
		(void)spec_name_format(registry->catalog, &entry->spec, name);
		cJSON_AddNumberToObject(priorities, name, entry->priority);
	}
	times_write_all(root, &registry->times, false);
	pthread_mutex_unlock(&registry->mutex);
	return end_text(root, false, ret_text, err);
}
