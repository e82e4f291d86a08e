/* SPDX-License-Identifier: MIT */
#include "census.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <proto/problem.h>

static bool is_used(const struct census_entry *entry)
{
	return entry && entry->n_runs > 0;
}

struct census_entry *census_find(struct census *census, uint32_t uid, const char *shape)
{
	for (uint32_t i = 0; i < CENSUS_SHAPES; i++) {
		struct census_entry *entry = census->entries[i];

		if (is_used(entry) && entry->uid == uid && strcmp(entry->shape, shape) == 0)
			return entry;
	}
	return NULL;
}

struct census_entry *census_any(struct census *census, const char *shape)
{
	for (uint32_t i = 0; i < CENSUS_SHAPES; i++)
		if (is_used(census->entries[i]) && strcmp(census->entries[i]->shape, shape) == 0)
			return census->entries[i];
	return NULL;
}

static uint32_t count_of(const struct census *census, uint32_t uid)
{
	uint32_t n = 0;

	for (uint32_t i = 0; i < CENSUS_SHAPES; i++)
		n += is_used(census->entries[i]) && census->entries[i]->uid == uid;
	return n;
}

static int compare_uids(const void *x, const void *y)
{
	const uint32_t *a = x, *b = y;

	return (*a > *b) - (*a < *b);
}

/* Of a full census. */
static uint32_t largest_user(const struct census *census)
{
	uint32_t uids[CENSUS_SHAPES], n = 0, most = 0, uid = 0;

	for (uint32_t i = 0; i < CENSUS_SHAPES; i++)
		uids[i] = census->entries[i]->uid;
	qsort(uids, CENSUS_SHAPES, sizeof(*uids), compare_uids);
	for (uint32_t i = 0; i < CENSUS_SHAPES; i++) {
		n = i > 0 && uids[i] == uids[i - 1] ? n + 1 : 1;
		if (n > most) {
			most = n;
			uid = uids[i];
		}
	}
	return uid;
}

/* The place of the user's shape that took least time. */
static uint32_t least_of(const struct census *census, uint32_t uid)
{
	uint32_t least = CENSUS_SHAPES;

	for (uint32_t i = 0; i < CENSUS_SHAPES; i++)
		if (is_used(census->entries[i]) && census->entries[i]->uid == uid &&
		    (least == CENSUS_SHAPES || census->entries[i]->ns < census->entries[least]->ns))
			least = i;
	return least;
}

static void evict(struct census *census, uint32_t place)
{
	census->entries[place]->n_runs = 0;
	census->n_used--;
	census->n_evicted++;
}

/* A free place with its memory; CENSUS_SHAPES: out of memory. */
static uint32_t take_place(struct census *census, uint32_t uid)
{
	uint32_t i = 0;

	if (count_of(census, uid) >= CENSUS_PER_USER)
		evict(census, least_of(census, uid));
	else if (census->n_used == CENSUS_SHAPES)
		evict(census, least_of(census, largest_user(census)));
	while (is_used(census->entries[i]))
		i++;
	if (!census->entries[i])
		census->entries[i] = calloc(1, sizeof(*census->entries[i]));
	return census->entries[i] ? i : CENSUS_SHAPES;
}

void census_forget_places(struct fmha_problem *problem)
{
	for (unsigned int i = 0; i < FMHA_N_TENSORS; i++) {
		problem->tensor[i].buffer = fmha_tensor_present(&problem->tensor[i]) ? i + 1 : 0;
		problem->tensor[i].data = NULL;
		problem->tensor[i].offset = 0;
	}
}

static struct census_entry *look_up(struct census *census, uint32_t uid, const struct plan *plan,
				    struct census_handle *handle)
{
	const struct plan_stage *main_stage = plan_main_stage(plan);
	struct census_entry *entry;
	char shape[PLAN_SHAPE_BYTES];
	uint32_t place = 0;

	plan_shape(&plan->problem, shape);
	entry = census_find(census, uid, shape);
	if (entry) {
		while (census->entries[place] != entry)
			place++;
	} else {
		place = take_place(census, uid);
		if (place == CENSUS_SHAPES)
			return NULL;
		entry = census->entries[place];
		entry->generation++;
		entry->uid = uid;
		memcpy(entry->shape, shape, sizeof(shape));
		entry->problem = plan->problem;
		census_forget_places(&entry->problem);
		entry->n_runs = entry->ns = entry->timed_ns = 0;
		entry->roof_ns = 0;
		entry->settled = false;
		census->n_used++;
	}
	(void)snprintf(entry->kernel, sizeof(entry->kernel), "%s",
		       main_stage ? main_stage->kernel : "");
	entry->n_splits = plan->n_splits;
	entry->is_general = main_stage && main_stage->is_general;
	*handle = (struct census_handle){.place = place, .generation = entry->generation};
	return entry;
}

static struct census_entry *entry_of(const struct census *census,
				     const struct census_handle *handle)
{
	struct census_entry *entry = census->entries[handle->place];

	return handle->generation > 0 && is_used(entry) && entry->generation == handle->generation
		       ? entry
		       : NULL;
}

const struct census_entry *census_get(const struct census *census,
				      const struct census_handle *handle)
{
	return entry_of(census, handle);
}

void census_count(struct census *census, uint32_t uid, const struct plan *plan,
		  const struct census_runs *runs, struct census_handle *handle)
{
	struct census_entry *entry = entry_of(census, handle);

	if (!entry)
		entry = look_up(census, uid, plan, handle);
	if (!entry)
		return; /* out of memory: a count is lost */
	entry->n_runs += runs->n;
	entry->ns += runs->ns;
	entry->timed_ns += runs->roof_ns > 0 ? runs->ns : 0;
	entry->roof_ns += runs->roof_ns;
}

void census_unsettle(struct census *census)
{
	for (uint32_t i = 0; i < CENSUS_SHAPES; i++)
		if (census->entries[i])
			census->entries[i]->settled = false;
}

struct census_entry *census_next(struct census *census, uint32_t *uid)
{
	uint32_t after = *uid;
	bool found = false;
	struct census_entry *next = NULL;

	/* The next user in the order of numbers, round and round. */
	for (uint32_t i = 0; i < CENSUS_SHAPES; i++) {
		const struct census_entry *entry = census->entries[i];

		if (!is_used(entry) || entry->settled)
			continue;
		if (!found || entry->uid - after - 1 < *uid - after - 1)
			*uid = entry->uid;
		found = true;
	}
	for (uint32_t i = 0; found && i < CENSUS_SHAPES; i++) {
		struct census_entry *entry = census->entries[i];

		if (is_used(entry) && !entry->settled && entry->uid == *uid &&
		    (!next || entry->ns > next->ns))
			next = entry;
	}
	return next;
}

static int compare_entries(const void *x, const void *y)
{
	const struct census_entry *const *a = x, *const *b = y;

	return ((*a)->ns < (*b)->ns) - ((*a)->ns > (*b)->ns);
}

uint32_t census_list(const struct census *census, uint32_t uid, bool all,
		     const struct census_entry *ret_entries[CENSUS_SHAPES])
{
	uint32_t n = 0;

	for (uint32_t i = 0; i < CENSUS_SHAPES; i++)
		if (is_used(census->entries[i]) && (all || census->entries[i]->uid == uid))
			ret_entries[n++] = census->entries[i];
	if (n > 0) /* NOLINTNEXTLINE(bugprone-sizeof-expression): a list of pointers */
		qsort(ret_entries, n, sizeof(*ret_entries), compare_entries);
	return n;
}
