// SPDX-License-Identifier: MIT
/*
 * sweep.c: sweep configurations, which ask for one variant of an arch's space and thin it out:
 *
 *   {"variant": "fwd", "trait_config": {"data_type": {"values": ["fp16"]},
 *                                       "lse": {"values": [false]}}}
 */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "sweep.h"

static const uint8_t list_fields[] = {SPEC_FIELD_data_type, SPEC_FIELD_pipeline,    SPEC_FIELD_mask,
				      SPEC_FIELD_bias,      SPEC_FIELD_mode,        SPEC_FIELD_lse,
				      SPEC_FIELD_dropout,   SPEC_FIELD_logits,      SPEC_FIELD_sink,
				      SPEC_FIELD_paged_kv,  SPEC_FIELD_block_per_cu};

static int compare_int32(const void *a, const void *b)
{
	int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;

	return (x > y) - (x < y);
}

/* Sorted, each once: a value that is listed twice does not make two kernels of one name. */
static void sort_values(struct allow_list *list)
{
	int n = 0;

	qsort(list->value, (size_t)list->n, sizeof(list->value[0]), compare_int32);
	for (int i = 0; i < list->n; i++)
		if (n == 0 || list->value[n - 1] != list->value[i])
			list->value[n++] = list->value[i];
	list->n = n;
}

/* {"values": [...]}; block_per_cu may be the list alone or one number. */
static int read_list(const struct spec_catalog *catalog, const struct at *at, int field,
		     struct allow_list *list, struct fmha_error *err)
{
	struct at values = cJSON_IsObject(at->item) ? at_key(at, "values") : *at;
	int index = 0, r = 0;

	if (cJSON_IsObject(at->item))
		r = at_only_keys(at, (const char *const[]){"values", NULL}, err);
	else if (field != SPEC_FIELD_block_per_cu)
		r = at_want_object(at, err);
	if (r < 0)
		return r;
	list->present = 1;
	if (field == SPEC_FIELD_block_per_cu && cJSON_IsNumber(values.item)) {
		list->n = 1;
		return read_value(catalog, &values, field, list->value, err);
	}
	r = at_want_array(&values, err);
	for (const cJSON *item = r == 0 ? values.item->child : NULL; item && r == 0;
	     item = item->next) {
		struct at here = at_item(&values, item, index++);

		if (list->n == SWEEP_MAX_VALUES)
			return at_error(&here, err, "more than %d values", SWEEP_MAX_VALUES);
		r = read_value(catalog, &here, field, &list->value[list->n], err);
		list->n += r == 0;
	}
	sort_values(list);
	return r;
}

int sweep_read(const struct spec_catalog *catalog, const struct at *document, struct sweep *ret,
	       struct fmha_error *err)
{
	struct at variant = at_key(document, "variant"), traits = at_key(document, "trait_config");
	const char *name = "fwd";
	int r = at_object(document, (const char *const[]){"variant", "trait_config", NULL}, err);

	if (r < 0)
		return r;
	if (variant.item)
		r = at_string(&variant, &name, err);
	if (r < 0)
		return r;
	if (strlen(name) >= sizeof(ret->variant))
		return at_error(&variant, err, "there is no such variant");
	if (traits.item)
		r = at_want_object(&traits, err);
	if (r < 0)
		return r;
	*ret = (struct sweep){0};
	(void)snprintf(ret->variant, sizeof(ret->variant), "%s", name);
	for (const cJSON *item = traits.item ? traits.item->child : NULL; item && r == 0;
	     item = item->next) {
		struct at here = at_member(&traits, item);
		int field = field_find(item->string, strlen(item->string));
		int known = 0;

		for (size_t i = 0; i < sizeof(list_fields); i++)
			known |= list_fields[i] == field;
		if (!known)
			return at_error(&here, err, "unknown key");
		r = read_list(catalog, &here, field, &ret->allow[field], err);
	}
	return r;
}

int sweep_find_file(const struct spec_catalog *catalog, const char *name, char **ret_path,
		    struct fmha_error *err)
{
	char *shipped = NULL;

	*ret_path = NULL;
	if (!strchr(name, '/') && !strchr(name, '.')) {
		if (asprintf(&shipped, "%s/sweeps/%s.json", catalog->dir, name) < 0)
			return no_memory(err);
		/* Of two the shipped one; of none it is the one that is missed. */
		if (access(shipped, F_OK) == 0 || access(name, F_OK) < 0) {
			*ret_path = shipped;
			return 0;
		}
		free(shipped);
	}
	*ret_path = strdup(name);
	return *ret_path ? 0 : no_memory(err);
}

struct spec_sweep {
	struct sweep sweep;
};

int spec_sweep_load(const struct spec_catalog *catalog, const char *name,
		    struct spec_sweep **ret_sweep, struct fmha_error *err)
{
	struct spec_sweep *sweep = calloc(1, sizeof(*sweep));
	cJSON *document = NULL;
	char *path = NULL;
	struct at at;
	int r = sweep ? sweep_find_file(catalog, name, &path, err) : no_memory(err);

	if (r == 0)
		r = json_read(path, &document, err);
	if (r == 0) {
		at = at_document(document, path);
		r = sweep_read(catalog, &at, &sweep->sweep, err);
	}
	cJSON_Delete(document);
	free(path);
	if (r < 0)
		sweep = spec_sweep_free(sweep);
	*ret_sweep = sweep;
	return r;
}

struct spec_sweep *spec_sweep_free(struct spec_sweep *sweep)
{
	free(sweep);
	return NULL;
}

const char *spec_sweep_variant(const struct spec_sweep *sweep)
{
	return sweep->sweep.variant;
}

int spec_sweep_lists(const struct spec_sweep *sweep, enum spec_field field)
{
	const struct allow_list *list = &sweep->sweep.allow[field];

	return list->present && (list->n > 0 || field != SPEC_FIELD_data_type);
}

int spec_sweep_allows(const struct spec_sweep *sweep, enum spec_field field, int64_t value)
{
	const struct allow_list *list = &sweep->sweep.allow[field];

	for (int i = 0; i < list->n; i++)
		if (list->value[i] == value)
			return 1;
	return !spec_sweep_lists(sweep, field);
}
