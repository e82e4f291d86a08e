/* SPDX-License-Identifier: MIT */
/*
 * exchange.c: a registry as JSON, out and in.
 *
 *   {"format": "fmhad-registry", "version": 1, "device": "...", "archs": [...],
 *    "sets": {"default": ["*"]}, "filter": "...",
 *    "kernels": [{"name": "...", "flags": ["loaded"], "priority": 1, "offered": true, "runs": 7,
 *                 "run_ns": 8, "tuned": [{"shape": "...", "us": 9.5}]}, ...],
 *    "statistics": {"kernels": 1, "families": {"fwd": 1}, "data_types": {...}, "pipelines": {...},
 *                   "states": {"compiled": 0, ...}}}
 *
 * A kernel has only the members that differ from the default. The statistics count what the list
 * holds, so they come last and the whole is written in one walk.
 */
#include "impl.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cjson/cJSON.h>

#include <proto/error.h>

#define PIECE_BYTES 65536
#define MAX_WORDS   256

struct exporter {
	struct registry *registry;
	registry_write write;
	void *owner;
	char *piece;
	size_t used;
	int failed; /* what write() returned */
	uint64_t n_kernels;
	uint64_t families[SPEC_N_FAMILIES], data_types[SPEC_N_DTYPES], pipelines[MAX_WORDS];
	uint64_t compiled, loaded, quarantined, tuned, offered;
};

static void flush(struct exporter *e)
{
	if (e->failed == 0 && e->used > 0)
		e->failed = e->write(e->owner, e->piece, e->used);
	e->used = 0;
}

static void put_bytes(struct exporter *e, const char *text, size_t n)
{
	if (e->used + n > PIECE_BYTES)
		flush(e);
	memcpy(e->piece + e->used, text, n);
	e->used += n;
}

__attribute__((format(printf, 2, 3))) static void put(struct exporter *e, const char *fmt, ...)
{
	char text[1024];
	va_list args;
	int n;

	va_start(args, fmt);
	n = vsnprintf(text, sizeof(text), fmt, args);
	va_end(args);
	put_bytes(e, text, (size_t)n < sizeof(text) ? (size_t)n : sizeof(text) - 1);
}

/* A string of any bytes: what is not printable ASCII is escaped, so the document is valid UTF-8. */
static void put_string(struct exporter *e, const char *text)
{
	put_bytes(e, "\"", 1);
	for (; *text; text++) {
		unsigned char c = (unsigned char)*text;

		if (c == '"' || c == '\\')
			put(e, "\\%c", c);
		else if (c < 0x20 || c >= 0x7f)
			put(e, "\\u%04x", c);
		else
			put_bytes(e, text, 1);
	}
	put_bytes(e, "\"", 1);
}

static void put_head(struct exporter *e, const char *filter)
{
	struct registry *registry = e->registry;

	put(e, "{\"format\": \"fmhad-registry\", \"version\": 1, \"device\": ");
	put_string(e, registry->device);
	put(e, ", \"archs\": [");
	for (size_t i = 0; i < registry->n_archs; i++)
		put(e, "%s\"%s\"", i ? ", " : "", registry_arch_name(registry, i));
	put(e, "], \"sets\": {");
	pthread_mutex_lock(&registry->mutex);
	for (size_t i = 0; i < registry->n_sets; i++) {
		const struct registry_set *set = &registry->sets[i];

		put(e, "%s", i ? ", " : "");
		put_string(e, set->name);
		put(e, ": [");
		for (size_t k = 0; k < set->n_patterns; k++) {
			put(e, "%s", k ? ", " : "");
			put_string(e, set->patterns[k]);
		}
		put(e, "]");
	}
	pthread_mutex_unlock(&registry->mutex);
	put(e, "}, \"filter\": ");
	put_string(e, filter ? filter : "");
	put(e, ",\n\"kernels\": [");
}

static void put_flags(struct exporter *e, uint32_t flags)
{
	static const char *const words[] = {"compiled", "loaded", "quarantined"};
	const char *comma = "";

	if (!flags)
		return;
	put(e, ", \"flags\": [");
	for (int i = 0; i < 3; i++)
		if (flags & (1U << i)) {
			put(e, "%s\"%s\"", comma, words[i]);
			comma = ", ";
		}
	put(e, "]");
}

static void put_tuned(struct exporter *e, const struct kernel_spec *spec)
{
	const struct registry_entry *entry;

	pthread_mutex_lock(&e->registry->mutex);
	entry = registry_entry_find(e->registry, spec, false);
	if (entry && entry->n_tuned > 0) {
		put(e, ", \"tuned\": [");
		for (uint32_t i = 0; i < entry->n_tuned; i++) {
			put(e, "%s{\"shape\": ", i ? ", " : "");
			put_string(e, entry->tuned[i].shape);
			put(e, ", \"us\": %.6g}", entry->tuned[i].us);
		}
		put(e, "]");
	}
	pthread_mutex_unlock(&e->registry->mutex);
}

static int export_visit(void *owner, const struct kernel_spec *spec, const char *name,
			const struct registry_info *info)
{
	struct exporter *e = owner;

	put(e, "%s\n{\"name\": \"%s\"", e->n_kernels ? "," : "", name);
	put_flags(e, info->flags);
	if (info->priority)
		put(e, ", \"priority\": %d", info->priority);
	if (!info->offered)
		put(e, ", \"offered\": false");
	if (info->n_runs)
		put(e, ", \"runs\": %llu, \"run_ns\": %llu", (unsigned long long)info->n_runs,
		    (unsigned long long)info->run_ns);
	if (info->n_tuned)
		put_tuned(e, spec);
	put(e, "}");
	e->n_kernels++;
	e->families[spec->signature.family]++;
	e->data_types[spec->signature.data_type]++;
	e->pipelines[spec->pipeline]++;
	e->compiled += (info->flags & REGISTRY_COMPILED) != 0;
	e->loaded += (info->flags & REGISTRY_LOADED) != 0;
	e->quarantined += (info->flags & REGISTRY_QUARANTINED) != 0;
	e->tuned += info->n_tuned > 0;
	e->offered += info->offered;
	return e->failed;
}

static void put_counts(struct exporter *e, const char *title, enum spec_field field,
		       const uint64_t *counts, int n)
{
	const char *comma = "";

	put(e, ", \"%s\": {", title);
	for (int i = 0; i < n; i++)
		if (counts[i] > 0) {
			put(e, "%s\"%s\": %llu", comma, spec_word(e->registry->catalog, field, i),
			    (unsigned long long)counts[i]);
			comma = ", ";
		}
	put(e, "}");
}

static void put_statistics(struct exporter *e)
{
	put(e, "],\n\"statistics\": {\"kernels\": %llu", (unsigned long long)e->n_kernels);
	put_counts(e, "families", SPEC_FIELD_family, e->families, SPEC_N_FAMILIES);
	put_counts(e, "data_types", SPEC_FIELD_data_type, e->data_types, SPEC_N_DTYPES);
	put_counts(e, "pipelines", SPEC_FIELD_pipeline, e->pipelines, MAX_WORDS);
	put(e,
	    ", \"states\": {\"offered\": %llu, \"compiled\": %llu, \"loaded\": %llu, "
	    "\"quarantined\": %llu, \"tuned\": %llu}}}\n",
	    (unsigned long long)e->offered, (unsigned long long)e->compiled,
	    (unsigned long long)e->loaded, (unsigned long long)e->quarantined,
	    (unsigned long long)e->tuned);
}

int registry_export(struct registry *registry, const char *filter, registry_write write,
		    void *owner, struct fmha_error *err)
{
	struct exporter *e = calloc(1, sizeof(*e));
	int r;

	if (e)
		e->piece = malloc(PIECE_BYTES);
	if (!e || !e->piece) {
		free(e);
		return fmha_error_set(err, FMHA_ENOMEM, "export: out of memory");
	}
	e->registry = registry;
	e->write = write;
	e->owner = owner;
	put_head(e, filter);
	r = registry_each(registry, filter, export_visit, e, err);
	if (r == 0) {
		put_statistics(e);
		flush(e);
	}
	if (e->failed < 0)
		r = fmha_error_set(err, e->failed, "export: writing failed");
	free(e->piece);
	free(e);
	return r;
}

struct text {
	char *data;
	size_t size, capacity;
};

static int text_write(void *owner, const char *piece, size_t n)
{
	struct text *text = owner;

	if (text->size + n > text->capacity) {
		size_t capacity = (text->size + n) * 2;
		char *data = realloc(text->data, capacity);

		if (!data)
			return FMHA_ENOMEM;
		text->data = data;
		text->capacity = capacity;
	}
	memcpy(text->data + text->size, piece, n);
	text->size += n;
	return 0;
}

int registry_export_text(struct registry *registry, const char *filter, char **ret_text,
			 size_t *ret_size, struct fmha_error *err)
{
	struct text text = {0};
	int r = registry_export(registry, filter, text_write, &text, err);

	if (r == 0)
		r = text_write(&text, "", 1); /* a NUL for those who want a string */
	if (r < 0) {
		free(text.data);
		return r;
	}
	*ret_text = text.data;
	*ret_size = text.size - 1;
	return 0;
}

/* ---- import ---- */

static int refuse(struct fmha_error *err, const char *field, const char *why)
{
	return fmha_error_set_field(err, FMHA_EINVAL, field, "%s: %s", field, why);
}

static int check_head(const struct registry *registry, const cJSON *root, struct fmha_error *err)
{
	const cJSON *format = cJSON_GetObjectItemCaseSensitive(root, "format");
	const cJSON *version = cJSON_GetObjectItemCaseSensitive(root, "version");
	const cJSON *device = cJSON_GetObjectItemCaseSensitive(root, "device");
	const cJSON *archs = cJSON_GetObjectItemCaseSensitive(root, "archs");
	const cJSON *arch = cJSON_GetArrayItem(archs, 0);

	if (!cJSON_IsString(format) || strcmp(format->valuestring, "fmhad-registry") != 0)
		return refuse(err, "format", "not an exported registry");
	if (!cJSON_IsNumber(version) || version->valueint != 1)
		return refuse(err, "version", "not 1");
	if (!cJSON_IsString(device) || strcmp(device->valuestring, registry->device) != 0)
		return fmha_error_set_field(
			err, FMHA_EINVAL, "device", "device: exported from '%.60s', this is '%s'",
			cJSON_IsString(device) ? device->valuestring : "", registry->device);
	if (!cJSON_IsString(arch) ||
	    strcmp(arch->valuestring, registry_arch_name(registry, 0)) != 0)
		return fmha_error_set_field(err, FMHA_EINVAL, "archs",
					    "archs: exported from '%.60s', this is '%s'",
					    cJSON_IsString(arch) ? arch->valuestring : "",
					    registry_arch_name(registry, 0));
	return 0;
}

/* The list's shape, before anything is merged: an import is all or nothing. */
static int check_kernels(const cJSON *kernels, struct fmha_error *err)
{
	const cJSON *item, *result;

	if (!cJSON_IsArray(kernels))
		return refuse(err, "kernels", "not a list");
	cJSON_ArrayForEach(item, kernels)
	{
		const cJSON *tuned = cJSON_GetObjectItemCaseSensitive(item, "tuned");

		if (!cJSON_IsString(cJSON_GetObjectItemCaseSensitive(item, "name")))
			return refuse(err, "kernels", "one has no name");
		if (tuned && !cJSON_IsArray(tuned))
			return refuse(err, "tuned", "not a list");
		cJSON_ArrayForEach(result, tuned)
		{
			const cJSON *shape = cJSON_GetObjectItemCaseSensitive(result, "shape");
			const cJSON *us = cJSON_GetObjectItemCaseSensitive(result, "us");

			if (!cJSON_IsString(shape) ||
			    strlen(shape->valuestring) >= REGISTRY_SHAPE_BYTES)
				return refuse(err, "shape", "missing or too long");
			if (!cJSON_IsNumber(us) || !(us->valuedouble > 0) ||
			    !(us->valuedouble < REGISTRY_MAX_US))
				return refuse(err, "us", "not a duration");
		}
	}
	return 0;
}

/* Takes over what @item knows more than this registry; 1 when that was something. */
static int merge_kernel(struct registry *registry, const cJSON *item, struct fmha_error *err)
{
	const cJSON *name = cJSON_GetObjectItemCaseSensitive(item, "name");
	const cJSON *priority = cJSON_GetObjectItemCaseSensitive(item, "priority");
	const cJSON *tuned = cJSON_GetObjectItemCaseSensitive(item, "tuned"), *result;
	struct registry_entry *entry;
	struct kernel_spec spec;
	int gained = 0;

	if (!cJSON_IsNumber(priority) && cJSON_GetArraySize(tuned) == 0)
		return 0;
	if (registry_find(registry, name->valuestring, &spec, NULL, NULL) < 0)
		return 0; /* of a newer or older build */
	pthread_mutex_lock(&registry->mutex);
	entry = registry_entry_find(registry, &spec, true);
	if (!entry) {
		pthread_mutex_unlock(&registry->mutex);
		return fmha_error_set(err, FMHA_ENOMEM, "import: out of memory");
	}
	if (cJSON_IsNumber(priority) && entry->priority == 0 && priority->valueint != 0) {
		entry->priority = priority->valueint;
		gained = 1;
	}
	cJSON_ArrayForEach(result, tuned)
	{
		const cJSON *shape = cJSON_GetObjectItemCaseSensitive(result, "shape");
		const cJSON *us = cJSON_GetObjectItemCaseSensitive(result, "us");

		/* A kernel that holds its full number of results keeps its own. */
		if (!registry_entry_tuned(entry, shape->valuestring) &&
		    registry_entry_set_tuned(entry, shape->valuestring, us->valuedouble, NULL) == 0)
			gained = 1;
	}
	pthread_mutex_unlock(&registry->mutex);
	return gained;
}

int registry_import(struct registry *registry, const char *json, size_t size,
		    uint64_t *ret_n_merged, struct fmha_error *err)
{
	const cJSON *kernels, *item;
	uint64_t n_merged = 0;
	cJSON *root;
	int r;

	if (size > REGISTRY_MAX_JSON)
		return refuse(err, "size", "larger than 64 MiB");
	root = cJSON_ParseWithLength(json, size);
	if (!cJSON_IsObject(root)) {
		cJSON_Delete(root);
		return refuse(err, "format", "not a JSON object");
	}
	r = check_head(registry, root, err);
	kernels = cJSON_GetObjectItemCaseSensitive(root, "kernels");
	if (r == 0)
		r = check_kernels(kernels, err);
	cJSON_ArrayForEach(item, kernels)
	{
		if (r < 0)
			break;
		r = merge_kernel(registry, item, err);
		n_merged += r > 0;
	}
	cJSON_Delete(root);
	if (r < 0)
		return r;
	if (ret_n_merged)
		*ret_n_merged = n_merged;
	return 0;
}
