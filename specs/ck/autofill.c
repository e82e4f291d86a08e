// SPDX-License-Identifier: MIT
/*
 * autofill.c: what a kernel has where its declaration is silent. Section "autofill" of a rules file is a
 * list, of which every member that is of the kernel's family is applied:
 *
 *   {"families": ["fwd"], "set": {"tile_n1": "hdim_v", "wave_m0": "warps_m"}, "lookup": "backward_waves"}
 *
 * "set" and then "lookup", as in a tile generator; but nothing that was said is changed. "when" is an
 * expression that has to hold.
 */
#include <stdlib.h>

#include "set_impl.h"
#include "space_build.h"

struct filling {
	uint64_t families;
	struct expr when; /* empty: always */
	struct set_list set;
	int has_lookup;
	struct lookup lookup;
};

static void filling_deinit(struct filling *filling)
{
	expr_deinit(&filling->when);
	set_deinit(&filling->set);
	lookup_deinit(&filling->lookup);
}

static int read_families(const struct spec_catalog *catalog, const struct at *list, uint64_t *ret,
			 struct fmha_error *err)
{
	struct axis axis = {.n_fields = 1, .field = {SPEC_FIELD_family}};
	int r = read_axis_rows(catalog, list, &axis, err);

	for (int i = 0; i < axis.n_values; i++)
		*ret |= (uint64_t)1 << axis.value[i];
	axis_deinit(&axis);
	return r;
}

static int read_filling(const struct at *at, const struct at *document,
			const struct expr_scope *scope, struct filling *filling,
			struct fmha_error *err)
{
	static const char *const keys[] = {"families", "when", "set", "lookup", NULL};
	struct at families = at_key(at, "families"), when = at_key(at, "when"),
		  set = at_key(at, "set"), name = at_key(at, "lookup"),
		  lookups = at_key(document, "lookups"), lookup;
	const char *word;
	int r = at_object(at, keys, err);

	if (r == 0)
		r = read_families(scope->catalog, &families, &filling->families, err);
	if (r == 0 && when.item)
		r = at_expr(&when, scope, &filling->when, err);
	if (r == 0)
		r = read_set(&set, scope, &filling->set, err);
	if (r < 0 || !name.item)
		return r;
	r = at_string(&name, &word, err);
	if (r < 0)
		return r;
	lookup = at_key(&lookups, word);
	filling->has_lookup = 1;
	return lookup_read(&filling->lookup, &lookup, scope, err);
}

/* What was said, as it was before. */
static void restore(field_set said, const struct kernel_spec *before, struct kernel_spec *spec)
{
	for (int f = 0; f < SPEC_N_FIELDS; f++)
		if (said >> f & 1)
			field_store(&spec_fields[f], spec, field_load(&spec_fields[f], before));
}

static void fill(const struct filling *filling, field_set said, struct kernel_spec *spec)
{
	const struct kernel_spec before = *spec;

	/* One at a time: what comes later may read what was said of an earlier one. */
	for (int i = 0; i < filling->set.n; i++) {
		int field = filling->set.field[i];
		int64_t value = filling->set.value[i].code ? expr_eval(&filling->set.value[i], spec)
							   : filling->set.constant[i];

		if (!(said >> field & 1) && field_fits(&spec_fields[field], value))
			field_store(&spec_fields[field], spec, (int32_t)value);
	}
	if (filling->has_lookup) {
		lookup_apply(&filling->lookup, spec);
		restore(said, &before, spec);
	}
}

struct autofill {
	int n;
	struct filling fillings[];
};

struct autofill *autofill_free(struct autofill *autofill)
{
	for (int i = 0; autofill && i < autofill->n; i++)
		filling_deinit(&autofill->fillings[i]);
	free(autofill);
	return NULL;
}

int autofill_new(const struct spec_catalog *catalog, int arch, int arch_space,
		 struct autofill **ret, struct fmha_error *err)
{
	const struct rules *rules = catalog->archs[arch].spaces[arch_space].rules;
	const struct expr_scope scope = space_scope(catalog, arch, arch_space);
	struct at document = at_document(rules->document, rules->path);
	struct at list = at_key(&document, "autofill");
	size_t n = (size_t)cJSON_GetArraySize(list.item);
	struct autofill *autofill = calloc(1, sizeof(*autofill) + n * sizeof(struct filling));
	int r = list.item ? at_want_array(&list, err) : 0;

	if (!autofill)
		return no_memory(err);
	for (const cJSON *item = r == 0 && list.item ? list.item->child : NULL; item && r == 0;
	     item = item->next) {
		struct at here = at_item(&list, item, autofill->n);

		r = read_filling(&here, &document, &scope, &autofill->fillings[autofill->n++], err);
	}
	if (r < 0)
		autofill = autofill_free(autofill);
	*ret = autofill;
	return r;
}

void autofill_apply(const struct autofill *autofill, field_set said, struct kernel_spec *spec)
{
	for (int i = 0; i < autofill->n; i++) {
		const struct filling *filling = &autofill->fillings[i];

		if (filling->families >> spec->signature.family & 1 &&
		    expr_holds(&filling->when, spec))
			fill(filling, said, spec);
	}
}

int autofill_check(const struct spec_catalog *catalog, int arch, int arch_space,
		   struct fmha_error *err)
{
	struct autofill *autofill = NULL;
	int r = autofill_new(catalog, arch, arch_space, &autofill, err);

	(void)autofill_free(autofill);
	return r;
}
