/* SPDX-License-Identifier: MIT */
/*
 * registry.c: spaces, states and lookups. The states live in a hash table keyed by the spec itself,
 * which is a flat value; a kernel without an entry is in its default state.
 */
#include <stdlib.h>
#include <string.h>

#include <proto/error.h>
#include <specs/filter.h>
#include <specs/validate.h>

#include "impl.h"

/* ---- set ---- */

/* A named kernel set, a list of wildcard patterns over canonical names: which kernels it names. */

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

bool registry_is_old_pattern(const struct registry *registry, const char *pattern)
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
		else if (!registry_is_old_pattern(registry, pattern))
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

static void registry_sets_judge(struct registry *registry, const struct kernel_spec *spec,
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

#define FIRST_TABLE_SIZE 64

void registry_device_archs(struct registry_device *device, const char *arch)
{
	static const char *const levels[] = {"x86_64_amx", "x86_64_v4_bf16", "x86_64_v4",
					     "x86_64_v3", "portable"};
	size_t n = sizeof(levels) / sizeof(levels[0]), i = 0;

	device->n_archs = 0;
	while (i < n && strcmp(levels[i], arch) != 0)
		i++;
	if (i == n)
		device->archs[device->n_archs++] = arch;
	for (; i < n; i++)
		device->archs[device->n_archs++] = levels[i];
}

const struct spec_catalog *registry_catalog(const struct registry *registry)
{
	return registry->catalog;
}

size_t registry_n_archs(const struct registry *registry)
{
	return registry->n_archs;
}

const char *registry_arch_name(const struct registry *registry, size_t arch)
{
	return spec_arch_name(registry->catalog, registry->archs[arch]);
}

static int count_one(void *owner, const struct kernel_spec *spec)
{
	uint64_t *n = owner;

	(void)spec;
	++*n;
	return 0;
}

/* All kernels of an arch. */
static int each_kernel(const struct registry *registry, size_t arch, spec_visit visit, void *owner)
{
	if (registry->source)
		return registry->source->each(registry->source, arch, visit, owner);
	return spec_own_each(registry->catalog, registry->archs[arch], NULL, visit, owner);
}

uint64_t registry_count(struct registry *registry)
{
	uint64_t n = registry->n_kernels;

	for (size_t i = 0; !registry->n_kernels && i < registry->n_archs; i++)
		(void)each_kernel(registry, i, count_one, &n);
	registry->n_kernels = n;
	return n;
}

/* ---- states ---- */

static size_t slot_of(const struct registry *registry, const struct kernel_spec *spec,
		      uint64_t hash)
{
	size_t mask = registry->table_size - 1, i = hash & mask;

	while (registry->table[i] && (registry->table[i]->hash != hash ||
				      spec_compare(&registry->table[i]->spec, spec) != 0))
		i = (i + 1) & mask;
	return i;
}

static bool table_grow(struct registry *registry)
{
	struct registry_entry **old = registry->table;
	size_t old_size = registry->table_size;
	size_t size = old_size ? old_size * 2 : FIRST_TABLE_SIZE;
	struct registry_entry **table = calloc(size, sizeof(struct registry_entry *));

	if (!table)
		return false;
	registry->table = table;
	registry->table_size = size;
	for (size_t i = 0; i < old_size; i++)
		if (old[i])
			table[slot_of(registry, &old[i]->spec, old[i]->hash)] = old[i];
	free(old);
	return true;
}

struct registry_entry *registry_entry_find(struct registry *registry,
					   const struct kernel_spec *spec, bool create)
{
	struct registry_entry *entry;
	uint64_t hash;
	size_t slot;

	if (!create && registry->n_entries == 0)
		return NULL; /* what most lookups meet */
	hash = spec_hash(spec);
	if (create && registry->n_entries * 2 >= registry->table_size && !table_grow(registry))
		return NULL;
	slot = slot_of(registry, spec, hash);
	if (registry->table[slot] || !create)
		return registry->table[slot];
	if (registry->n_entries >= REGISTRY_MAX_KERNELS)
		return NULL;
	entry = calloc(1, sizeof(*entry));
	if (!entry)
		return NULL;
	entry->spec = *spec;
	entry->hash = hash;
	registry->table[slot] = entry;
	registry->n_entries++;
	hash = spec_signature_hash(&spec->signature) % REGISTRY_SIGNATURE_BITS;
	registry->signatures[hash / 64] |= 1ULL << (hash % 64);
	return entry;
}

/* The caller holds the mutex. @name: NULL to have it formatted when a set needs it. */
static void registry_fill_info(struct registry *registry, const struct kernel_spec *spec,
			       const char *name, struct registry_info *ret_info)
{
	const struct registry_entry *entry = registry_entry_find(registry, spec, false);

	*ret_info = (struct registry_info){0};
	if (entry) {
		ret_info->quarantined = entry->quarantined;
		ret_info->priority = entry->priority;
		ret_info->n_tuned = entry->n_tuned;
		ret_info->n_runs = entry->n_runs;
		ret_info->run_ns = entry->run_ns;
	}
	registry_sets_judge(registry, spec, name, ret_info);
}

void registry_get_info(struct registry *registry, const struct kernel_spec *spec,
		       struct registry_info *ret_info)
{
	pthread_mutex_lock(&registry->mutex);
	registry_fill_info(registry, spec, NULL, ret_info);
	pthread_mutex_unlock(&registry->mutex);
}

/* Names that are older than one kernel's being one piece of code say more than the code's own. */
static bool has_kernel(const struct registry *registry, size_t arch, struct kernel_spec *spec)
{
	if (spec->gfx_arch != registry->archs[arch])
		return false;
	if (registry->source)
		return registry->source->has(registry->source, arch, spec);
	if (spec_pipeline_flags(registry->catalog, spec->pipeline) < 0 ||
	    spec_validate(registry->catalog, spec, NULL) != 0)
		return false;
	spec_reduce(registry->catalog, spec);
	return true;
}

int registry_find(struct registry *registry, const char *name, struct kernel_spec *ret_spec,
		  struct registry_info *ret_info, struct fmha_error *err)
{
	struct fmha_error why = {0};
	struct kernel_spec spec;
	bool known = false;

	if (spec_name_parse(registry->catalog, name, &spec, &why) < 0)
		return fmha_error_set_field(err, FMHA_ENOENT, "kernel", "%.120s: no kernel: %.100s",
					    name, why.msg);
	for (size_t i = 0; i < registry->n_archs && !known; i++)
		known = has_kernel(registry, i, &spec);
	if (!known)
		return fmha_error_set_field(err, FMHA_ENOENT, "kernel",
					    "%.180s: not a kernel of this device", name);
	if (ret_spec)
		*ret_spec = spec;
	if (ret_info)
		registry_get_info(registry, &spec, ret_info);
	return 0;
}

/* An entry with the mutex held, on success; made if there is none. */
static int registry_entry_lock(struct registry *registry, const char *name,
			       struct registry_entry **ret_entry, struct fmha_error *err)
{
	struct kernel_spec spec;
	int r = registry_find(registry, name, &spec, NULL, err);

	if (r < 0)
		return r;
	pthread_mutex_lock(&registry->mutex);
	*ret_entry = registry_entry_find(registry, &spec, true);
	if (*ret_entry)
		return 0;
	pthread_mutex_unlock(&registry->mutex);
	return fmha_error_set(err, FMHA_ENOMEM, "registry: out of memory");
}

int registry_quarantine(struct registry *registry, const char *name, struct fmha_error *err)
{
	struct registry_entry *entry;
	int r = registry_entry_lock(registry, name, &entry, err);

	if (r < 0)
		return r;
	entry->quarantined = true;
	registry->generation++;
	pthread_mutex_unlock(&registry->mutex);
	return 0;
}

void registry_clear_quarantine(struct registry *registry)
{
	pthread_mutex_lock(&registry->mutex);
	for (size_t i = 0; i < registry->table_size; i++)
		if (registry->table[i])
			registry->table[i]->quarantined = false;
	registry->generation++;
	pthread_mutex_unlock(&registry->mutex);
}

int registry_set_priority(struct registry *registry, const char *name, int32_t priority,
			  struct fmha_error *err)
{
	struct registry_entry *entry;
	int r = registry_entry_lock(registry, name, &entry, err);

	if (r < 0)
		return r;
	entry->priority = priority;
	registry->generation++;
	pthread_mutex_unlock(&registry->mutex);
	return 0;
}

void registry_add_run(struct registry *registry, const struct kernel_spec *spec, uint64_t ns,
		      struct registry_entry **entry)
{
	struct registry_entry *found = NULL;

	if (!entry)
		entry = &found;
	pthread_mutex_lock(&registry->mutex);
	if (!*entry)
		*entry = registry_entry_find(registry, spec, true);
	if (*entry) { /* else out of memory: a statistic is lost */
		(*entry)->n_runs++;
		(*entry)->run_ns += ns;
	}
	pthread_mutex_unlock(&registry->mutex);
}

/* ---- lookups ---- */

/* Is one state known to hold for all kernels of the signature? */
static bool judge_signature(struct registry *registry, const struct kernel_signature *signature,
			    struct registry_info *ret_info)
{
	uint64_t bit = spec_signature_hash(signature) % REGISTRY_SIGNATURE_BITS;
	bool plain;

	pthread_mutex_lock(&registry->mutex);
	plain = !(registry->signatures[bit / 64] >> (bit % 64) & 1);
	for (size_t i = 0; i < registry->n_sets; i++)
		plain &= registry->sets[i].everything;
	*ret_info = (struct registry_info){0};
	if (plain) /* no set asks for the name, so none is needed */
		registry_sets_judge(registry, NULL, NULL, ret_info);
	pthread_mutex_unlock(&registry->mutex);
	return plain;
}

int registry_arch(const struct registry *registry, size_t arch)
{
	return registry->archs[arch];
}

int registry_candidates(struct registry *registry, size_t arch, const struct traits *traits,
			struct spec_head_dims dims, registry_candidate each, void *owner,
			const char **ret_why)
{
	struct kernel_spec specs[SPEC_MAX_CANDIDATES];
	struct registry_info plain, info;
	bool is_plain;
	size_t n = spec_candidates(registry->catalog, registry->archs[arch], traits, dims, specs,
				   ret_why);
	int r = 0;

	if (n == 0)
		return 0;
	is_plain = judge_signature(registry, &specs[0].signature, &plain);
	for (size_t i = 0; i < n && r == 0; i++) {
		if (!is_plain)
			registry_get_info(registry, &specs[i], &info);
		r = each(owner, &specs[i], is_plain ? &plain : &info);
	}
	return r;
}

/* ---- walks ---- */

static int compare_specs(const void *x, const void *y)
{
	return spec_compare(x, y);
}

static int visit_one(struct registry *registry, const struct kernel_spec *spec,
		     registry_visit visit, void *owner)
{
	char name[SPEC_NAME_BYTES];
	struct registry_info info;

	(void)spec_name_format(registry->catalog, spec, name);
	pthread_mutex_lock(&registry->mutex);
	registry_fill_info(registry, spec, name, &info);
	pthread_mutex_unlock(&registry->mutex);
	return visit(owner, spec, name, &info);
}

int registry_each_known(struct registry *registry, registry_visit visit, void *owner,
			struct fmha_error *err)
{
	struct kernel_spec *specs;
	size_t n = 0;
	int r = 0;

	pthread_mutex_lock(&registry->mutex);
	specs = calloc(registry->n_entries + 1, sizeof(*specs));
	for (size_t i = 0; specs && i < registry->table_size; i++)
		if (registry->table[i])
			specs[n++] = registry->table[i]->spec;
	pthread_mutex_unlock(&registry->mutex);
	if (!specs)
		return fmha_error_set(err, FMHA_ENOMEM, "registry: out of memory");
	qsort(specs, n, sizeof(*specs), compare_specs);
	for (size_t i = 0; i < n && r == 0; i++)
		r = visit_one(registry, &specs[i], visit, owner);
	free(specs);
	return r;
}

struct visiting {
	struct registry *registry;
	const struct spec_filter *filter;
	registry_visit visit;
	void *owner;
};

static int visit_kernel(void *owner, const struct kernel_spec *spec)
{
	const struct visiting *v = owner;

	if (v->filter && !spec_filter_match(v->filter, spec))
		return 0;
	return visit_one(v->registry, spec, v->visit, v->owner);
}

int registry_each(struct registry *registry, const char *filter_text, registry_visit visit,
		  void *owner, struct fmha_error *err)
{
	struct spec_filter *filter = NULL;
	struct visiting v = {.registry = registry, .visit = visit, .owner = owner};
	int r = 0;

	if (filter_text && *filter_text)
		r = spec_filter_compile(registry->catalog, filter_text, &filter, NULL, err);
	v.filter = filter;
	for (size_t i = 0; r == 0 && i < registry->n_archs; i++)
		r = each_kernel(registry, i, visit_kernel, &v);
	spec_filter_free(filter);
	return r == FMHA_ENOMEM ? fmha_error_set(err, r, "registry: out of memory") : r;
}

/* ---- tuned ---- */

/*
 * The registry's table of measured times, under the names of its own kernels. A row counts itself
 * in its kernel's entry, and so tells whose it is without its name.
 */

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
	if (registry->times.n > 0)
		(void)times_each(&registry->times, shape, insert, &fastest);
	pthread_mutex_unlock(&registry->mutex);
	return fastest.n;
}

bool registry_has_measured(struct registry *registry)
{
	bool has;

	pthread_mutex_lock(&registry->mutex);
	has = registry->times.n > 0;
	pthread_mutex_unlock(&registry->mutex);
	return has;
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
