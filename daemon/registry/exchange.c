/* SPDX-License-Identifier: MIT */
/*
 * exchange.c: a registry as JSON; import.c reads it.
 *
 *   {"format": "fmhad-registry", "version": 1, "device": "...",
 *    "environment": "...", "archs": [...],
 *    "sets": {"default": ["*"]}, "filter": "...",
 *    "kernels": [{"name": "...", "flags": ["loaded"], "priority": 1, "offered": true, "runs": 7,
 *                 "run_ns": 8, "tuned": [{"shape": "...", "splits": 0, "us": 9.5,
 *                                              "when": 1700000000}]}, ...],
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

#include <proto/error.h>

#define PIECE_BYTES 65536
#define MAX_WORDS   256

struct exporter {
	struct registry *registry;
	registry_write write;
	void *owner;
	char *piece;
	size_t used;
	bool known_only; /* kernels that nothing is known about are left out */
	int failed;      /* what write() returned */
	uint64_t n_kernels;
	uint64_t families[SPEC_N_FAMILIES], data_types[SPEC_N_DTYPES], pipelines[MAX_WORDS];
	bool all; /* also what tells of users: shapes, times and counts */
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
	put(e, ", \"environment\": ");
	put_string(e, registry->environment);
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
			const struct registry_tuned *tuned = &entry->tuned[i];

			put(e, "%s{\"shape\": ", i ? ", " : "");
			put_string(e, tuned->shape->key);
			put(e, ", \"splits\": %d, \"us\": %.6g, \"when\": %lld}", tuned->n_splits,
			    tuned->us, (long long)tuned->when_s);
		}
		put(e, "]");
	}
	pthread_mutex_unlock(&e->registry->mutex);
}

/* But for the closing brace. */
static void put_kernel(struct exporter *e, const struct kernel_spec *spec, const char *name,
		       const struct registry_info *info)
{
	put(e, "{\"name\": \"%s\"", name);
	put_flags(e, info->flags);
	if (info->priority)
		put(e, ", \"priority\": %d", info->priority);
	if (!info->offered)
		put(e, ", \"offered\": false");
	if (info->n_runs && e->all)
		put(e, ", \"runs\": %llu, \"run_ns\": %llu", (unsigned long long)info->n_runs,
		    (unsigned long long)info->run_ns);
	if (info->n_tuned && e->all)
		put_tuned(e, spec);
}

static int export_visit(void *owner, const struct kernel_spec *spec, const char *name,
			const struct registry_info *info)
{
	struct exporter *e = owner;

	if (e->known_only && !info->flags && !info->priority && !info->n_runs && !info->n_tuned)
		return 0;
	put(e, "%s\n", e->n_kernels ? "," : "");
	put_kernel(e, spec, name, info);
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

int registry_export(struct registry *registry, const char *filter, bool all, registry_write write,
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
	e->all = all;
	e->write = write;
	e->owner = owner;
	e->known_only = !filter || !*filter;
	put_head(e, filter);
	r = e->known_only ? registry_each_known(registry, export_visit, e, err)
			  : registry_each(registry, filter, export_visit, e, err);
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
	int r = registry_export(registry, filter, true, text_write, &text, err);

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

static void put_sets_of(struct exporter *e, const struct kernel_spec *spec, const char *name)
{
	const char *comma = "";

	put(e, ", \"sets\": [");
	pthread_mutex_lock(&e->registry->mutex);
	for (size_t i = 0; i < e->registry->n_sets; i++) {
		if (!registry_set_names(e->registry, &e->registry->sets[i], spec, name))
			continue;
		put(e, "%s", comma);
		put_string(e, e->registry->sets[i].name);
		comma = ", ";
	}
	pthread_mutex_unlock(&e->registry->mutex);
	put(e, "]}\n");
}

static int finish_text(struct exporter *e, struct text *text, char **ret_text, size_t *ret_size,
		       struct fmha_error *err)
{
	flush(e);
	if (e->failed == 0)
		e->failed = text_write(text, "", 1);
	free(e->piece);
	if (e->failed < 0) {
		free(text->data);
		return fmha_error_set(err, FMHA_ENOMEM, "registry: out of memory");
	}
	*ret_text = text->data;
	*ret_size = text->size - 1;
	return 0;
}

static bool begin_text(struct exporter *e, struct registry *registry, struct text *text)
{
	*e = (struct exporter){.registry = registry,
			       .write = text_write,
			       .owner = text,
			       .piece = malloc(PIECE_BYTES)};
	return e->piece;
}

int registry_kernel_text(struct registry *registry, const char *name, bool all, char **ret_text,
			 size_t *ret_size, struct fmha_error *err)
{
	char own_name[SPEC_NAME_BYTES];
	struct registry_info info;
	struct kernel_spec spec;
	struct text text = {0};
	struct exporter e;
	int r = registry_find(registry, name, &spec, &info, err);

	if (r < 0)
		return r;
	if (!begin_text(&e, registry, &text))
		return fmha_error_set(err, FMHA_ENOMEM, "registry: out of memory");
	e.all = all;
	(void)spec_name_format(registry->catalog, &spec, own_name);
	put_kernel(&e, &spec, own_name, &info);
	put_sets_of(&e, &spec, own_name);
	return finish_text(&e, &text, ret_text, ret_size, err);
}

static int put_result(void *owner, const char *name, const struct registry_result *result)
{
	struct exporter *e = owner;

	put(e, "%s\n{\"kernel\": \"%s\", \"shape\": ", e->n_kernels++ ? "," : "", name);
	put_string(e, result->shape);
	put(e, ", \"splits\": %d, \"us\": %.6g, \"when\": %lld}", result->n_splits, result->us,
	    (long long)result->when_s);
	return e->failed;
}

static void put_priorities(struct exporter *e)
{
	struct registry *registry = e->registry;
	const char *comma = "";

	pthread_mutex_lock(&registry->mutex);
	for (size_t i = 0; i < registry->table_size; i++) {
		const struct registry_entry *entry = registry->table[i];
		char name[SPEC_NAME_BYTES];

		if (!entry || !entry->priority)
			continue;
		(void)spec_name_format(registry->catalog, &entry->spec, name);
		put(e, "%s\"%s\": %d", comma, name, entry->priority);
		comma = ", ";
	}
	pthread_mutex_unlock(&registry->mutex);
}

int registry_state_text(struct registry *registry, char **ret_text, size_t *ret_size,
			struct fmha_error *err)
{
	struct text text = {0};
	struct exporter e;

	if (!begin_text(&e, registry, &text))
		return fmha_error_set(err, FMHA_ENOMEM, "registry: out of memory");
	put(&e, "{\"priorities\": {");
	put_priorities(&e);
	put(&e, "}, \"results\": [");
	(void)registry_each_result(registry, put_result, &e);
	put(&e, "]}\n");
	return finish_text(&e, &text, ret_text, ret_size, err);
}
