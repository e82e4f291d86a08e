// SPDX-License-Identifier: MIT
/*
 * space_read.c: axes, rules and assignments, from JSON. Blocks and tile generators are both made of
 * these three:
 *
 *   "for":   [{"mode": ["batch", "group"], "tile_m0,tile_n0": [[128, 64], [64, 128]]},
 *             "name of a set"]
 *   "rules": ["mode != 'group' or pad_s and pad_sk", "name_of_a_definition"]
 *   "set":   {"tile_n1": "hdim_v", "pipeline": "qr", "lse": 1}
 */
#include <stdlib.h>

#include <proto/error.h>

#include "space_read.h"

int at_expr(const struct at *at, const struct expr_scope *scope, struct expr *ret,
	    struct fmha_error *err)
{
	struct fmha_error inner;
	const char *text;
	int r = at_string(at, &text, err);

	if (r < 0)
		return r;
	r = expr_compile(scope, text, ret, NULL, &inner);
	return r == FMHA_EINVAL ? at_error(at, err, "%s", inner.msg) : r < 0 ? no_memory(err) : 0;
}

void axis_deinit(struct axis *axis)
{
	free(axis->value);
	axis->value = NULL;
}

void rules_deinit(struct rule_list *rules)
{
	for (int i = 0; i < rules->n; i++)
		expr_deinit(&rules->rule[i]);
	rules->n = 0;
}

void set_deinit(struct set_list *set)
{
	for (int i = 0; i < set->n; i++)
		expr_deinit(&set->value[i]);
	set->n = 0;
}

/* One value of a field: a word, a number or a boolean. */
int read_value(const struct spec_catalog *catalog, const struct at *at, int field, int32_t *ret,
	       struct fmha_error *err)
{
	const struct field *of = &spec_fields[field];
	int64_t number = 0;
	const char *word;
	int r;

	if (of->kind == FIELD_WORD) {
		r = at_string(at, &word, err);
		if (r < 0)
			return r;
		*ret = spec_word_find(catalog, field, word);
		return *ret < 0 ? at_error(at, err, "'%s' is not a %s", word, of->name) : 0;
	}
	if (at->item && cJSON_IsBool(at->item)) {
		*ret = cJSON_IsTrue(at->item);
		return 0;
	}
	r = at_int(at, INT16_MIN, UINT16_MAX, &number, err);
	if (r == 0 && !field_fits(of, number))
		r = at_error(at, err, "%lld is no value of %s", (long long)number, of->name);
	*ret = (int32_t)number;
	return r;
}

/* "hdim_q,hdim_v" -> the two fields; "pads" is short for the four pads. */
int axis_fields(const struct at *at, const char *key, struct axis *axis, struct fmha_error *err)
{
	if (strcmp(key, "pads") == 0)
		key = "pad_s,pad_sk,pad_d,pad_dv";
	while (*key) {
		size_t length = strcspn(key, ",");
		int field = field_find(key, length);

		if (field < 0)
			return at_error(at, err, "there is no field '%.*s'", (int)length, key);
		if (axis->n_fields == SPACE_MAX_AXIS_FIELDS)
			return at_error(at, err, "more than %d fields", SPACE_MAX_AXIS_FIELDS);
		if (axis->bits >> field & 1)
			return at_error(at, err, "the field %.*s appears twice", (int)length, key);
		axis->field[axis->n_fields++] = (uint8_t)field;
		axis->bits |= (field_set)1 << field;
		key += length;
		key += *key == ',';
	}
	return 0;
}

/* "tft8" */
static int read_pads(const struct at *at, int32_t *row, struct fmha_error *err)
{
	const char *text = at->item->valuestring;

	if (strlen(text) != 4)
		return at_error(at, err, "must be four of f, t and 8");
	for (int i = 0; i < 4; i++) {
		if (!strchr("ft8", text[i]))
			return at_error(at, err, "must be four of f, t and 8");
		row[i] = text[i] == '8' ? SPEC_PAD_8 : text[i] == 't';
	}
	return 0;
}

static int read_row(const struct spec_catalog *catalog, const struct at *at,
		    const struct axis *axis, int32_t *row, struct fmha_error *err)
{
	int column = 0;
	int r;

	if (axis->n_fields == 1)
		return read_value(catalog, at, axis->field[0], row, err);
	if (axis->field[0] == SPEC_FIELD_pad_s && axis->n_fields == 4 && cJSON_IsString(at->item))
		return read_pads(at, row, err);
	r = at_want_array(at, err);
	for (const cJSON *cell = at->item->child; cell && r == 0; cell = cell->next) {
		struct at here = at_item(at, cell, column);

		if (column == axis->n_fields)
			return at_error(&here, err, "the row is too long");
		r = read_value(catalog, &here, axis->field[column], &row[column], err);
		column++;
	}
	if (r == 0 && column != axis->n_fields)
		r = at_error(at, err, "must have %d values", axis->n_fields);
	return r;
}

/* Appends the rows of @values to the axis. */
int read_axis_rows(const struct spec_catalog *catalog, const struct at *values, struct axis *axis,
		   struct fmha_error *err)
{
	int n, index = 0;
	int32_t *grown;
	int r = at_want_array(values, err);

	if (r < 0)
		return r;
	n = axis->n_values + cJSON_GetArraySize(values->item);
	grown = realloc(axis->value,
			((size_t)n * (size_t)axis->n_fields + 1) * sizeof(axis->value[0]));
	if (!grown)
		return no_memory(err);
	axis->value = grown;
	for (const cJSON *item = values->item->child; item && r == 0; item = item->next) {
		struct at here = at_item(values, item, index++);

		r = read_row(catalog, &here, axis,
			     axis->value + (size_t)axis->n_values * (size_t)axis->n_fields, err);
		axis->n_values += r == 0;
	}
	return r;
}

/* {"config": true, "else": [...], "if_empty": [...]}: the sweep's own list, taken as it is. */
static int read_config_axis(const struct spec_catalog *catalog, const struct at *at,
			    const struct sweep *sweep, struct axis *axis, struct fmha_error *err)
{
	static const char *const keys[] = {"config", "else", "if_empty", NULL};
	struct at otherwise = at_key(at, "else"), if_empty = at_key(at, "if_empty");
	const struct allow_list *list = sweep ? &sweep->allow[axis->field[0]] : NULL;
	int r = at_only_keys(at, keys, err);

	if (r < 0)
		return r;
	if (axis->n_fields != 1)
		return at_error(at, err, "a sweep has lists of one field");
	if (!list || !list->present)
		return read_axis_rows(catalog, &otherwise, axis, err);
	if (list->n == 0 && if_empty.item)
		return read_axis_rows(catalog, &if_empty, axis, err);
	axis->value = malloc(sizeof(list->value));
	if (!axis->value)
		return no_memory(err);
	memcpy(axis->value, list->value, sizeof(list->value));
	axis->n_values = list->n;
	return 0;
}

static int read_axis(const struct spec_catalog *catalog, const struct at *at,
		     const struct sweep *sweep, struct axis *axis, struct fmha_error *err)
{
	int r = axis_fields(at, at->key, axis, err);

	if (r < 0)
		return r;
	if (cJSON_IsObject(at->item))
		return read_config_axis(catalog, at, sweep, axis, err);
	return read_axis_rows(catalog, at, axis, err);
}

/* The members of @object, each an axis. "warp_tiles" as a value is left to the tile generator,
 * which knows the data type: such an axis has fields and no values yet. */
static int read_axis_object(const struct spec_catalog *catalog, const struct at *object,
			    const struct sweep *sweep, struct axis *axes, int *n_axes,
			    struct fmha_error *err)
{
	int r = at_want_object(object, err);

	for (const cJSON *item = r == 0 ? object->item->child : NULL; item && r == 0;
	     item = item->next) {
		struct at here = at_member(object, item);

		if (*n_axes == SPACE_MAX_AXES)
			return at_error(&here, err, "more than %d axes", SPACE_MAX_AXES);
		axes[*n_axes] = (struct axis){0};
		(*n_axes)++;
		if (cJSON_IsString(item) && strcmp(item->valuestring, "warp_tiles") == 0)
			r = axis_fields(&here, item->string, &axes[*n_axes - 1], err);
		else
			r = read_axis(catalog, &here, sweep, &axes[*n_axes - 1], err);
	}
	return r;
}

/* @list: "for"; @named: "axes" of the document. On failure the axes read so far are the caller's.
 */
int read_axes(const struct spec_catalog *catalog, const struct at *list, const struct at *named,
	      const struct sweep *sweep, struct axis *axes, int *n_axes, struct fmha_error *err)
{
	int r = at_want_array(list, err);
	int index = 0;

	for (const cJSON *item = r == 0 ? list->item->child : NULL; item && r == 0;
	     item = item->next) {
		struct at here = at_item(list, item, index++);
		struct at object = here;

		if (cJSON_IsString(item)) {
			object = at_key(named, item->valuestring);
			if (!object.item)
				return at_error(&here, err, "there is no set of axes '%s'",
						item->valuestring);
		}
		r = read_axis_object(catalog, &object, sweep, axes, n_axes, err);
	}
	return r;
}

/* Appends to @rules; a missing list is empty. */
int read_rules(const struct at *list, const struct expr_scope *scope, struct rule_list *rules,
	       struct fmha_error *err)
{
	int index = 0;
	int r = list->item ? at_want_array(list, err) : 0;

	for (const cJSON *item = r == 0 && list->item ? list->item->child : NULL; item && r == 0;
	     item = item->next) {
		struct at here = at_item(list, item, index++);

		if (rules->n == SPACE_MAX_RULES)
			return at_error(&here, err, "more than %d rules", SPACE_MAX_RULES);
		r = at_expr(&here, scope, &rules->rule[rules->n], err);
		rules->n += r == 0;
	}
	return r;
}

int read_set(const struct at *object, const struct expr_scope *scope, struct set_list *set,
	     struct fmha_error *err)
{
	int r = object->item ? at_want_object(object, err) : 0;

	for (const cJSON *item = r == 0 && object->item ? object->item->child : NULL;
	     item && r == 0; item = item->next) {
		struct at here = at_member(object, item);
		int field = field_find(item->string, strlen(item->string));

		if (field < 0)
			return at_error(&here, err, "there is no field '%s'", item->string);
		if (set->n == SPACE_MAX_AXIS_FIELDS)
			return at_error(&here, err, "more than %d fields", SPACE_MAX_AXIS_FIELDS);
		set->field[set->n] = (uint8_t)field;
		set->value[set->n] = (struct expr){0};
		if (spec_fields[field].kind != FIELD_WORD && cJSON_IsString(item))
			r = at_expr(&here, scope, &set->value[set->n], err);
		else
			r = read_value(scope->catalog, &here, field, &set->constant[set->n], err);
		set->n += r == 0;
	}
	return r;
}

void set_apply(const struct set_list *set, struct kernel_spec *spec)
{
	for (int i = 0; i < set->n; i++) {
		int64_t value = set->value[i].code ? expr_eval(&set->value[i], spec)
						   : set->constant[i];

		field_store(&spec_fields[set->field[i]], spec, (int32_t)value);
	}
}

void rules_set_levels(struct rule_list *rules, const int8_t level_of_field[SPEC_N_FIELDS])
{
	for (int i = 0; i < rules->n; i++) {
		rules->level[i] = -1;
		for (int field = 0; field < SPEC_N_FIELDS; field++)
			if (rules->rule[i].reads >> field & 1 &&
			    level_of_field[field] > rules->level[i])
				rules->level[i] = level_of_field[field];
	}
}
