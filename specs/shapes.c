// SPDX-License-Identifier: MIT
/*
 * shapes.c: expands shape matrices.
 *
 *   {"shapes": "full", "includes": ["smoke"],
 *    "axes": {"ratios": {"nhead_q,nhead_k": [[8, 8], [32, 4]]}},
 *    "groups": [{"name": "decode", "set": {"seqlen_q": 1}, "for": ["ratios", {"batch": [1, 16]}],
 *                "limits": {"work": 2000000000}}]}
 *
 * A group's shapes are the product of its axes over what "set" fixes. Limits drop shapes that would
 * take too long: "work" is the number of multiply-adds of Q K^T, "elements" those of Q, K, V, O.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <proto/error.h>
#include <specs/shapes.h>

#include "catalog_impl.h"

#define MAX_AXES   24
#define MAX_FIELDS 8 /* of one axis */
#define MAX_DEPTH  4 /* of tiers that include others */

struct shape_field {
	const char *name;
	size_t offset;
	int32_t value;
	const char *words;
};

static const struct shape_field fields[] = {
#define FIELD_ROW(name, value, words) {#name, offsetof(struct spec_shape, name), value, words},
	SPEC_SHAPE_FIELDS(FIELD_ROW)
#undef FIELD_ROW
};
#define N_FIELDS (sizeof(fields) / sizeof(fields[0]))

struct shape_axis {
	int n_fields;
	const struct shape_field *field[MAX_FIELDS];
	struct at values;
};

struct reader {
	const char *dir;
	spec_shape_each each;
	void *owner;
	struct fmha_error *err;
};

struct group {
	struct reader *reader;
	int n_axes;
	struct shape_axis axes[MAX_AXES];
	int64_t max_work, max_elements;
};

static const struct shape_field *find_field(const char *name, size_t length)
{
	for (size_t i = 0; i < N_FIELDS; i++)
		if (strlen(fields[i].name) == length && memcmp(fields[i].name, name, length) == 0)
			return &fields[i];
	return NULL;
}

static int32_t *field_of(struct spec_shape *shape, const struct shape_field *field)
{
	return (int32_t *)(void *)((char *)shape + field->offset);
}

/* The number of @word in a list of words separated by spaces, or -1. */
static int32_t word_number(const char *words, const char *word)
{
	size_t length = strlen(word);

	for (int32_t i = 0; *words; i++) {
		size_t n = strcspn(words, " ");

		if (n == length && memcmp(words, word, n) == 0)
			return i;
		words += n + (words[n] == ' ');
	}
	return -1;
}

const char *spec_shape_word(const char *name, int32_t value)
{
	static _Thread_local char word[32];
	const struct shape_field *field = find_field(name, strlen(name));
	const char *words = field ? field->words : "";

	while (*words && value-- > 0) {
		words += strcspn(words, " ");
		words += *words == ' ';
	}
	if (!*words)
		return NULL;
	(void)snprintf(word, sizeof(word), "%.*s", (int)strcspn(words, " "), words);
	return word;
}

static int read_value(const struct at *at, const struct shape_field *field,
		      struct spec_shape *shape, struct fmha_error *err)
{
	int64_t number = 0;
	const char *word;
	int r;

	if (*field->words) {
		r = at_string(at, &word, err);
		if (r < 0)
			return r;
		number = word_number(field->words, word);
		if (number < 0)
			return at_error(at, err, "'%s' is not a %s: %s", word, field->name,
					field->words);
	} else {
		r = at_int(at, -1, INT32_MAX, &number, err);
		if (r < 0)
			return r;
	}
	*field_of(shape, field) = (int32_t)number;
	return 0;
}

/* Fills in what 0 stands for and judges the shape as a whole. */
static int complete(const struct at *at, struct spec_shape *shape, struct fmha_error *err)
{
	shape->nhead_k = shape->nhead_k ? shape->nhead_k : shape->nhead_q;
	shape->seqlen_k = shape->seqlen_k ? shape->seqlen_k : shape->seqlen_q;
	shape->hdim_v = shape->hdim_v ? shape->hdim_v : shape->hdim_q;
	if (shape->nhead_k <= 0 || shape->nhead_q % shape->nhead_k)
		return at_error(at, err, "nhead_q %d is not a multiple of nhead_k %d",
				shape->nhead_q, shape->nhead_k);
	if (shape->hdim_q < 1 || shape->hdim_v < 1 || shape->hdim_q > 576 || shape->hdim_v > 512)
		return at_error(at, err, "head dims %d, %d: not 1 to 576 and 512", shape->hdim_q,
				shape->hdim_v);
	return 0;
}

static int is_within(const struct group *group, const struct spec_shape *shape)
{
	int64_t rows = (int64_t)shape->batch * shape->nhead_q * shape->seqlen_q;
	int64_t keys = (int64_t)shape->batch * shape->nhead_k * shape->seqlen_k;

	return rows * shape->seqlen_k * shape->hdim_q <= group->max_work &&
	       rows * (shape->hdim_q + shape->hdim_v) + keys * (shape->hdim_q + shape->hdim_v) <=
		       group->max_elements;
}

static int read_row(const struct at *at, const struct shape_axis *axis, struct spec_shape *shape,
		    struct fmha_error *err)
{
	int column = 0;
	int r;

	if (axis->n_fields == 1)
		return read_value(at, axis->field[0], shape, err);
	r = at_want_array(at, err);
	if (r == 0 && cJSON_GetArraySize(at->item) != axis->n_fields)
		r = at_error(at, err, "must have %d values", axis->n_fields);
	for (const cJSON *cell = r == 0 ? at->item->child : NULL; cell && r == 0;
	     cell = cell->next, column++) {
		struct at here = at_item(at, cell, column);

		r = read_value(&here, axis->field[column], shape, err);
	}
	return r;
}

static int group_walk(const struct group *group, const struct at *at, int level,
		      const struct spec_shape *so_far)
{
	const struct shape_axis *axis = &group->axes[level];
	struct spec_shape shape = *so_far;
	int index = 0, r = 0;

	if (level == group->n_axes) {
		r = complete(at, &shape, group->reader->err);
		if (r == 0 && is_within(group, &shape))
			r = group->reader->each(group->reader->owner, &shape);
		return r;
	}
	for (const cJSON *item = axis->values.item->child; item && r == 0; item = item->next) {
		struct at here = at_item(&axis->values, item, index++);

		r = read_row(&here, axis, &shape, group->reader->err);
		if (r == 0)
			r = group_walk(group, at, level + 1, &shape);
	}
	return r;
}

static int read_axis(const struct at *at, struct shape_axis *axis, struct fmha_error *err)
{
	const char *key = at->key;

	while (*key) {
		size_t length = strcspn(key, ",");

		if (axis->n_fields == MAX_FIELDS)
			return at_error(at, err, "more than %d fields", MAX_FIELDS);
		axis->field[axis->n_fields] = find_field(key, length);
		if (!axis->field[axis->n_fields++])
			return at_error(at, err, "there is no field '%.*s'", (int)length, key);
		key += length;
		key += *key == ',';
	}
	axis->values = *at;
	return at_want_array(at, err);
}

/* The places of axes must outlive the walk; each points to the one it was reached from, so the
 * chain of the two levels above an axis lives in the caller's arrays. */
struct places {
	int n;
	struct at list[MAX_AXES], object[MAX_AXES];
};

static int read_axes(struct group *group, const struct at *list, const struct at *named,
		     struct places *places, struct fmha_error *err)
{
	int index = 0;
	int r = list->item ? at_want_array(list, err) : 0;

	for (const cJSON *item = r == 0 && list->item ? list->item->child : NULL; item && r == 0;
	     item = item->next, index++) {
		struct at *here, *object;

		if (places->n == MAX_AXES)
			return at_error(list, err, "more than %d members", MAX_AXES);
		here = &places->list[places->n];
		object = &places->object[places->n++];
		*here = *object = at_item(list, item, index);
		if (cJSON_IsString(item)) {
			*object = at_key(named, item->valuestring);
			if (!object->item)
				return at_error(here, err, "there is no set of axes '%s'",
						item->valuestring);
		}
		r = at_want_object(object, err);
		for (const cJSON *axis = r == 0 ? object->item->child : NULL; axis && r == 0;
		     axis = axis->next) {
			struct at at = at_member(object, axis);

			if (group->n_axes == MAX_AXES)
				return at_error(&at, err, "more than %d axes", MAX_AXES);
			group->axes[group->n_axes] = (struct shape_axis){0};
			r = read_axis(&at, &group->axes[group->n_axes++], err);
		}
	}
	return r;
}

static int read_limits(struct group *group, const struct at *at, struct fmha_error *err)
{
	struct at work = at_key(at, "work"), elements = at_key(at, "elements");
	int r = 0;

	group->max_work = group->max_elements = INT64_MAX;
	if (!at->item)
		return 0;
	r = at_object(at, (const char *const[]){"work", "elements", NULL}, err);
	if (r == 0 && work.item)
		r = at_int(&work, 1, (int64_t)1 << 53, &group->max_work, err);
	if (r == 0 && elements.item)
		r = at_int(&elements, 1, (int64_t)1 << 53, &group->max_elements, err);
	return r;
}

static int read_set(const struct at *set, struct spec_shape *shape, struct fmha_error *err)
{
	int r = set->item ? at_want_object(set, err) : 0;

	for (const cJSON *item = r == 0 && set->item ? set->item->child : NULL; item && r == 0;
	     item = item->next) {
		struct at here = at_member(set, item);
		const struct shape_field *field = find_field(item->string, strlen(item->string));

		r = field ? read_value(&here, field, shape, err)
			  : at_error(&here, err, "there is no field '%s'", item->string);
	}
	return r;
}

/* @group, @places: empty. */
static int read_group_into(struct reader *reader, const struct at *at, const struct at *named,
			   struct group *group, struct places *places)
{
	static const char *const keys[] = {"name", "set", "for", "limits", NULL};
	struct at name = at_key(at, "name"), set = at_key(at, "set"), axes = at_key(at, "for"),
		  limits = at_key(at, "limits");
	struct spec_shape shape = {0};
	int r = at_object(at, keys, reader->err);

	if (r < 0)
		return r;
	for (size_t i = 0; i < N_FIELDS; i++)
		*field_of(&shape, &fields[i]) = fields[i].value;
	r = at_string(&name, &shape.group, reader->err);
	if (r < 0)
		return r;
	r = read_set(&set, &shape, reader->err);
	if (r < 0)
		return r;
	r = read_limits(group, &limits, reader->err);
	if (r < 0)
		return r;
	r = read_axes(group, &axes, named, places, reader->err);
	if (r < 0)
		return r;
	group->reader = reader;
	return group_walk(group, at, 0, &shape);
}

static int read_group(struct reader *reader, const struct at *at, const struct at *named)
{
	struct group *group = calloc(1, sizeof(*group));
	struct places *places = calloc(1, sizeof(*places));
	int r = group && places ? read_group_into(reader, at, named, group, places)
				: fmha_error_set(reader->err, FMHA_ENOMEM, "specs: out of memory");

	free(group);
	free(places);
	return r;
}

static int read_tier(struct reader *reader, const char *tier, int depth);

static int read_document(struct reader *reader, const struct at *document, int depth)
{
	static const char *const keys[] = {"shapes", "includes", "axes", "groups", NULL};
	struct at includes = at_key(document, "includes"), groups = at_key(document, "groups"),
		  named = at_key(document, "axes");
	int index = 0;
	int r = at_object(document, keys, reader->err);

	if (r < 0)
		return r;
	if (includes.item)
		r = at_want_array(&includes, reader->err);
	for (const cJSON *item = r == 0 && includes.item ? includes.item->child : NULL;
	     item && r == 0; item = item->next) {
		struct at here = at_item(&includes, item, index++);
		const char *tier;

		r = at_string(&here, &tier, reader->err);
		if (r == 0 && depth == MAX_DEPTH)
			r = at_error(&here, reader->err, "tiers include each other");
		if (r == 0)
			r = read_tier(reader, tier, depth + 1);
	}
	if (r != 0)
		return r; /* positive: the callback has seen enough */
	index = 0;
	r = at_want_array(&groups, reader->err);
	for (const cJSON *item = r == 0 ? groups.item->child : NULL; item && r == 0;
	     item = item->next) {
		struct at here = at_item(&groups, item, index++);

		r = read_group(reader, &here, &named);
	}
	return r;
}

static int read_tier(struct reader *reader, const char *tier, int depth)
{
	struct at document;
	char *path = NULL;
	cJSON *root;
	int n = strchr(tier, '/') ? asprintf(&path, "%s", tier)
				  : asprintf(&path, "%s/shapes/%s.json", reader->dir, tier);
	int r;

	if (n < 0)
		return fmha_error_set(reader->err, FMHA_ENOMEM, "specs: out of memory");
	if (!strchr(tier, '/') && access(path, F_OK) < 0) {
		free(path);
		return fmha_error_set_field(
			reader->err, FMHA_ENOENT, "tier",
			"no tier '%s': smoke, full and nightly come with fmhad, a "
			"file is written with its folder (./%s)",
			tier, tier);
	}
	r = json_read(path, &root, reader->err);
	if (r == 0) {
		document = at_document(root, path);
		r = read_document(reader, &document, depth);
		cJSON_Delete(root);
	}
	free(path);
	return r;
}

int spec_shapes_read(const char *dir, const char *tier, spec_shape_each each, void *owner,
		     struct fmha_error *err)
{
	char found[PATH_MAX];
	struct reader reader = {
		.dir = dir ? dir : specs_find_dir(found), .each = each, .owner = owner, .err = err};

	return read_tier(&reader, tier, 0);
}
