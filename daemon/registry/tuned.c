/* SPDX-License-Identifier: MIT */
/*
 * tuned.c: the registry's table of measured times, under the names of its own kernels. A row counts itself
 * in its kernel's entry, and so tells whose it is without its name.
 */
#include "impl.h"

#include <stdio.h>
#include <string.h>

static struct registry_entry *entry_of(const struct times_row *row)
{
	return (struct registry_entry *)((char *)row->n_of_kernel -
					 offsetof(struct registry_entry, n_tuned));
}

int registry_set_tuned(struct registry *registry, const struct proto_measured *row,
		       enum times_source source, struct fmha_error *err)
{
	struct proto_measured own = *row;
	struct registry_entry *entry;
	int r = registry_entry_lock(registry, row->kernel, &entry, err);

	if (r < 0)
		return r;
	_Static_assert(sizeof(own.kernel) == SPEC_NAME_BYTES, "it holds any name");
	(void)spec_name_format(registry->catalog, &entry->spec, own.kernel);
	if (strcmp(own.kernel, row->kernel) != 0)
		source = TIMES_TWIN;
	r = times_add(&registry->times, &own, source, &entry->n_tuned, err);
	registry->generation += r == 0;
	pthread_mutex_unlock(&registry->mutex);
	return r;
}

bool registry_get_tuned(struct registry *registry, const struct kernel_spec *spec,
			const char *shape, int32_t n_splits, double *ret_us)
{
	char name[SPEC_NAME_BYTES];
	double us;

	(void)spec_name_format(registry->catalog, spec, name);
	pthread_mutex_lock(&registry->mutex);
	us = times_us(&registry->times, name, shape, n_splits);
	pthread_mutex_unlock(&registry->mutex);
	if (us > 0)
		*ret_us = us;
	return us > 0;
}

struct fastest {
	struct registry_measured *list;
	size_t n, most;
};

/* In order, and no more than there is room for: then the slowest goes. */
static int insert(void *owner, const struct times_row *row)
{
	struct fastest *fastest = owner;
	struct registry_measured *list = fastest->list;
	size_t i = fastest->n;

	if (i == fastest->most && (i == 0 || list[i - 1].us <= row->us))
		return 0;
	if (i == fastest->most)
		i--;
	else
		fastest->n++;
	for (; i > 0 && list[i - 1].us > row->us; i--)
		list[i] = list[i - 1];
	list[i] = (struct registry_measured){
		.spec = entry_of(row)->spec, .n_splits = row->n_splits, .us = row->us};
	return 0;
}

size_t registry_measured_at(struct registry *registry, const char *shape,
			    struct registry_measured *ret_measured, size_t most)
{
	struct fastest fastest = {.list = ret_measured, .most = most};

	pthread_mutex_lock(&registry->mutex);
	(void)times_each(&registry->times, shape, insert, &fastest);
	pthread_mutex_unlock(&registry->mutex);
	return fastest.n;
}

uint64_t registry_generation(struct registry *registry)
{
	uint64_t generation;

	pthread_mutex_lock(&registry->mutex);
	generation = registry->generation;
	pthread_mutex_unlock(&registry->mutex);
	return generation;
}

void registry_clear_results(struct registry *registry)
{
	times_clear(&registry->times);
	registry->generation++;
}
