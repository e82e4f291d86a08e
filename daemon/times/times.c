/* SPDX-License-Identifier: MIT */
#include <times/times.h>

#include <fnmatch.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <json/json.h>
#include <proto/clamp.h>
#include <proto/error.h>
#include <proto/fnv.h>

#define MOST_US 1e12

/* ---- the table ---- */

/* From the same start, so that the rows of a shape share a slot. */
static uint64_t hash_row(const char *kernel, const char *shape, int32_t n_splits)
{
	return fnv_text(fnv_text(FNV_START, shape) ^ (uint32_t)n_splits, kernel);
}

static size_t slot_of(const char *shape)
{
	return fnv_text(FNV_START, shape) % TIMES_SLOTS;
}

static struct times_row *times_find(const struct times *times, const char *kernel,
				    const char *shape, int32_t n_splits)
{
	uint64_t hash = hash_row(kernel, shape, n_splits);
	struct times_row *row = times->slots[slot_of(shape)];

	while (row && (row->hash != hash || row->n_splits != n_splits ||
		       strcmp(row->kernel, kernel) != 0 || strcmp(row->shape, shape) != 0))
		row = row->next;
	return row;
}

double times_us(const struct times *times, const char *kernel, const char *shape, int32_t n_splits)
{
	const struct times_row *row = times_find(times, kernel, shape, n_splits);

	return row ? row->us : 0;
}

int times_each(const struct times *times, const char *shape, times_visit visit, void *owner)
{
	size_t i = shape ? slot_of(shape) : 0, end = shape ? i + 1 : TIMES_SLOTS;
	int r = 0;

	for (; i < end && r == 0; i++)
		for (const struct times_row *row = times->slots[i]; row && r == 0; row = row->next)
			if (!shape || strcmp(row->shape, shape) == 0)
				r = visit(owner, row);
	return r;
}

/* @at: what points to the row. */
static void times_drop(struct times *times, struct times_row **at)
{
	struct times_row *row = *at;

	*at = row->next;
	times->n--;
	if (row->n_of_kernel)
		--*row->n_of_kernel;
	free(row);
}

static bool matches(const struct times_row *row, const char *pattern, const char *shape)
{
	return (!*shape || strcmp(row->shape, shape) == 0) &&
	       fnmatch(pattern, row->kernel, FNM_NOESCAPE) == 0;
}

uint64_t times_forget(struct times *times, const char *pattern, const char *shape)
{
	uint32_t before = times->n;

	for (size_t i = 0; i < TIMES_SLOTS; i++)
		for (struct times_row **at = &times->slots[i]; *at;)
			if (matches(*at, pattern, shape))
				times_drop(times, at);
			else
				at = &(*at)->next;
	return before - times->n;
}

void times_clear(struct times *times)
{
	for (size_t i = 0; i < TIMES_SLOTS; i++)
		while (times->slots[i])
			times_drop(times, &times->slots[i]);
}

static void drop_oldest(struct times *times)
{
	uint64_t now_s = (uint64_t)time(NULL);
	struct times_row **oldest = NULL;

	for (size_t i = 0; i < TIMES_SLOTS; i++)
		for (struct times_row **at = &times->slots[i]; *at; at = &(*at)->next)
			if (!oldest ||
			    clamp_past((*at)->when_s, now_s) < clamp_past((*oldest)->when_s, now_s))
				oldest = at;
	times_drop(times, oldest);
}

static int times_check(const struct proto_measured *row, struct fmha_error *err)
{
	if (!*row->kernel)
		return fmha_error_refuse(err, "kernel", "is empty");
	if (!*row->shape)
		return fmha_error_refuse(err, "shape", "is empty");
	if (row->n_splits < 0)
		return fmha_error_refuse(err, "splits", "not a number of splits");
	if (!(row->us > 0 && row->us < MOST_US))
		return fmha_error_refuse(err, "us", "not a duration");
	return 0;
}

/* The one rule. A stamp that is the same says that it is the same measurement. */
static bool gives_way(const struct times_row *known, const struct proto_measured *row,
		      enum times_source source)
{
	bool own = source != TIMES_SYSTEM;
	uint64_t known_s = clamp_past(known->when_s, (uint64_t)time(NULL));

	if (known->twin || source == TIMES_TWIN)
		return source != TIMES_TWIN || (known->twin && row->us < known->us);
	if (known->own && !own)
		return false;
	if (source == TIMES_IMPORTED || known->own != own)
		return known->when_s != row->when_s && known_s < row->when_s;
	return known_s <= row->when_s;
}

static struct times_row *make_row(const struct proto_measured *row)
{
	size_t n_kernel = strlen(row->kernel) + 1, n_shape = strlen(row->shape) + 1;
	struct times_row *made = malloc(sizeof(*made) + n_kernel + n_shape);

	if (!made)
		return NULL;
	made->hash = hash_row(row->kernel, row->shape, row->n_splits);
	made->n_splits = row->n_splits;
	made->shape = memcpy(made->kernel + n_kernel, row->shape, n_shape);
	memcpy(made->kernel, row->kernel, n_kernel);
	return made;
}

static struct times_row *add_row(struct times *times, const struct proto_measured *row,
				 uint32_t *n_of_kernel)
{
	struct times_row **slot = &times->slots[slot_of(row->shape)];
	struct times_row *made = make_row(row);

	if (!made)
		return NULL;
	if (times->n >= TIMES_MOST)
		drop_oldest(times);
	while (*slot) /* behind the others: equal ones stay in the order in which they came */
		slot = &(*slot)->next;
	made->next = NULL;
	*slot = made;
	times->n++;
	made->n_of_kernel = n_of_kernel;
	if (n_of_kernel)
		++*n_of_kernel;
	return made;
}

int times_add(struct times *times, const struct proto_measured *row, enum times_source source,
	      uint32_t *n_of_kernel, struct fmha_error *err)
{
	struct times_row *known;
	int r = times_check(row, err);

	if (r < 0)
		return r;
	known = times_find(times, row->kernel, row->shape, row->n_splits);
	if (known && !gives_way(known, row, source))
		return 1;
	if (!known)
		known = add_row(times, row, n_of_kernel);
	if (!known)
		return fmha_error_set(err, FMHA_ENOMEM, "measured times: out of memory");
	known->own = source != TIMES_SYSTEM;
	known->twin = source == TIMES_TWIN;
	known->us = row->us;
	known->when_s = row->when_s;
	return 0;
}

/* ---- as JSON ---- */

void times_write(cJSON *list, const struct times_row *row, bool named)
{
	cJSON *item = json_add_item(list);

	if (named)
		cJSON_AddStringToObject(item, "kernel", row->kernel);
	cJSON_AddStringToObject(item, "shape", row->shape);
	cJSON_AddNumberToObject(item, "splits", row->n_splits);
	cJSON_AddNumberToObject(item, "us", row->us);
	cJSON_AddNumberToObject(item, "when", (double)row->when_s);
}

static int write_any(void *list, const struct times_row *row)
{
	times_write(list, row, true);
	return 0;
}

static int write_own(void *list, const struct times_row *row)
{
	if (row->own)
		times_write(list, row, true);
	return 0;
}

void times_write_all(cJSON *root, const struct times *times, bool own_only)
{
	(void)times_each(times, NULL, own_only ? write_own : write_any,
			 cJSON_AddArrayToObject(root, "results"));
}

static bool copy(const char *text, char *to, size_t n)
{
	if (!text || strlen(text) >= n)
		return false;
	memcpy(to, text, strlen(text) + 1);
	return true;
}

static int times_read_row(const cJSON *item, const char *kernel, struct proto_measured *ret_row,
			  struct fmha_error *err)
{
	const cJSON *us = json_member(item, "us"), *splits = json_member(item, "splits");
	const cJSON *when = json_member(item, "when");

	if (!copy(kernel ? kernel : cJSON_GetStringValue(json_member(item, "kernel")),
		  ret_row->kernel, sizeof(ret_row->kernel)))
		return fmha_error_refuse(err, "kernel", "missing or too long");
	if (!copy(cJSON_GetStringValue(json_member(item, "shape")), ret_row->shape,
		  sizeof(ret_row->shape)))
		return fmha_error_refuse(err, "shape", "missing or too long");
	if ((splits && !cJSON_IsNumber(splits)) || (when && !cJSON_IsNumber(when)))
		return fmha_error_refuse(err, when && !cJSON_IsNumber(when) ? "when" : "splits",
					 "not a number");
	ret_row->us = cJSON_IsNumber(us) ? us->valuedouble : 0;
	ret_row->n_splits = splits ? splits->valueint : 0;
	ret_row->when_s = when ? clamp_u64(when->valuedouble) : 0;
	return times_check(ret_row, err);
}

int times_read(const cJSON *list, const char *kernel, times_take take, void *owner,
	       struct fmha_error *err)
{
	struct proto_measured row = {0};
	const cJSON *item;
	int r = cJSON_IsArray(list)
			? 0
			: fmha_error_refuse(err, kernel ? "tuned" : "results", "not a list");

	cJSON_ArrayForEach(item, list)
	{
		r = r < 0 ? r : times_read_row(item, kernel, &row, err);
	}
	cJSON_ArrayForEach(item, list)
	{
		if (!take || r < 0)
			break;
		r = times_read_row(item, kernel, &row, err);
		r = r < 0 ? r : take(owner, &row, err);
	}
	return r < 0 ? r : 0;
}
