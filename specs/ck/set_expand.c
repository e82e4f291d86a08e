// SPDX-License-Identifier: MIT
/*
 * set_expand.c: from a declaration to kernels. The fields beside the tile are given their values one after
 * the other, arch, family, data type and head dims first, since what "*" means for the others depends on
 * them. Then the tile: the one that was said, completed, or those that the arch's kernels have.
 */
#include <stdio.h>

#include <proto/error.h>

#include "set_impl.h"

#define MAX_STEPS 4000000

/* Whose kernels those of an arch are. */
struct owner {
	int is_own;
	int arch_space; /* of AMD's */
};

/* Returns 0 when the arch has none by the rules that are asked for. */
static int find_owner(const struct expansion *x, int arch, struct owner *ret)
{
	const struct arch *of = &x->set->catalog->archs[arch];

	for (int i = 0; i < of->n_spaces; i++)
		if (!x->rules || strcmp(of->spaces[i].rules->name, x->rules) == 0) {
			*ret = (struct owner){0, i};
			return 1;
		}
	*ret = (struct owner){.is_own = 1};
	return of->own.backend && (!x->rules || strcmp(of->own.backend->name, x->rules) == 0);
}

static struct owner owner_of(const struct expansion *x, const struct kernel_spec *spec)
{
	struct owner owner;

	(void)find_owner(x, spec->gfx_arch, &owner);
	return owner;
}

/* The variant of the rules whose blocks are of @family, NULL: there is none. */
static const char *variant_of(const struct spec_catalog *catalog, const struct arch_space *space,
			      int family)
{
	const char *word = spec_word(catalog, SPEC_FIELD_family, family);
	const cJSON *variants = cJSON_GetObjectItemCaseSensitive(space->rules->document,
								 "variants");
	const cJSON *variant, *block;

	cJSON_ArrayForEach(variant, variants)
	{
		cJSON_ArrayForEach(block, variant)
		{
			const cJSON *of = cJSON_GetObjectItemCaseSensitive(block, "family");

			if (cJSON_IsString(of) && strcmp(of->valuestring, word) == 0)
				return variant->string;
		}
	}
	return NULL;
}

static int make_space(struct expansion *x, const struct set_space *wanted, struct owner owner,
		      struct spec_space **ret)
{
	const struct spec_catalog *catalog = x->set->catalog;
	struct spec_space_options options = {.arch = spec_arch_name(catalog, wanted->arch),
					     .receipt = wanted->receipt};
	const struct arch *arch = &catalog->archs[wanted->arch];
	const char *variant;
	char config[96];

	if (owner.is_own) {
		options.rules = arch->own.backend->name;
		return spec_space_new(catalog, &options, ret, x->err);
	}
	/* Without the lists that the shipped sweeps thin out by: fp32 and bf8, too. */
	variant = variant_of(catalog, &arch->spaces[owner.arch_space], wanted->family);
	(void)snprintf(config, sizeof(config), "{\"variant\": \"%s\"}", variant ? variant : "");
	options.rules = arch->spaces[owner.arch_space].rules->name;
	options.config_json = config;
	return spec_space_new(catalog, &options, ret, x->err);
}

/* The space that "*" is looked up in; kept for what comes next. */
static int find_space(struct expansion *x, const struct kernel_spec *spec,
		      const struct spec_space **ret)
{
	const struct owner owner = owner_of(x, spec);
	const struct declaration *d = x->declaration;
	/* fp32 is in the lists of its own receipts alone. */
	int receipt = d->profile >= 0                          ? d->receipt
		      : spec->signature.data_type == SPEC_FP32 ? 800
							       : 0;
	struct set_space wanted = {.arch = spec->gfx_arch,
				   .family = owner.is_own ? 0 : spec->signature.family,
				   .receipt = owner.is_own ? 0 : receipt};
	int r;

	for (int i = 0; i < x->n_spaces; i++)
		if (x->spaces[i].arch == wanted.arch && x->spaces[i].family == wanted.family &&
		    x->spaces[i].receipt == wanted.receipt) {
			*ret = x->spaces[i].space;
			return 0;
		}
	r = make_space(x, &wanted, owner, &wanted.space);
	if (r < 0)
		return r;
	if (x->n_spaces == SET_MAX_SPACES)
		spec_space_free(x->spaces[--x->n_spaces].space);
	x->spaces[x->n_spaces++] = wanted;
	*ret = wanted.space;
	return 0;
}

/* ---- one kernel ---- */

/* A kernel that cannot be: an error, unless "*" meant only those that can. */
static int reject(struct expansion *x, const char *reason)
{
	const struct declaration *d = x->declaration;

	if (!d->any)
		return at_error(&d->at, x->err, "%s", reason);
	if (!x->first_fault.code)
		(void)fmha_error_set(&x->first_fault, FMHA_EINVAL, "%s", reason);
	return 0;
}

static int keep(struct expansion *x, const struct kernel_spec *spec)
{
	const struct spec_catalog *catalog = x->set->catalog;
	const struct declaration *d = x->declaration;
	struct spec_findings findings;
	char reason[96];

	if (spec_validate(catalog, spec, &findings) > 0)
		for (int i = 0; i < findings.n; i++)
			if (!findings.finding[i].is_warning)
				return reject(x, findings.finding[i].msg);
	if (d->profile >= 0 && !spec_profile_keeps(catalog, d->profile, spec)) {
		(void)snprintf(reason, sizeof(reason), "profile %s: it keeps no such kernel",
			       spec_profile_name(catalog, d->profile));
		return reject(x, reason);
	}
	x->n_kept++;
	return set_add(x->set, spec, x->err);
}

static int is_chosen(const struct declaration *d, int field, int32_t value)
{
	const struct choice *choice = &d->choices[field];

	for (int i = 0; i < choice->n; i++)
		if (choice->value[i] == value)
			return 1;
	return choice->n == 0;
}

/* Does a kernel of the space agree with what was said of its algorithm? */
static int agrees(const struct expansion *x, const struct kernel_spec *wanted,
		  const struct kernel_spec *found, int is_own)
{
	const struct declaration *d = x->declaration;

	for (int f = 0; f < SPEC_N_FIELDS; f++) {
		field_set bit = (field_set)1 << f;
		int32_t value = field_load(&spec_fields[f], found);

		if (bit & (spec_signature_fields | FIELD_BIT(gfx_arch)))
			continue;
		if (bit & spec_tile_fields) {
			if (!is_chosen(d, f, value))
				return 0;
		} else if ((!is_own || d->said & bit) &&
			   field_load(&spec_fields[f], wanted) != value) {
			return 0;
		}
	}
	return 1;
}

static int search(struct expansion *x, const struct kernel_spec *wanted)
{
	int is_own = owner_of(x, wanted).is_own;
	const struct spec_space *space;
	const struct kernel_spec *found;
	struct kernel_signature signature = wanted->signature;
	struct spec_iter *iter;
	int r = find_space(x, wanted, &space);

	if (r < 0)
		return r;
	spec_signature_reduce(space, &signature);
	iter = spec_iter_new_signature(space, &signature);
	if (!iter)
		return no_memory(x->err);
	while (r == 0 && (found = spec_iter_next(iter)))
		if (agrees(x, wanted, found, is_own))
			r = keep(x, found);
	spec_iter_free(iter);
	return r;
}

static const struct autofill *autofill_of(struct expansion *x, const struct kernel_spec *spec)
{
	if (x->autofill_arch == spec->gfx_arch)
		return x->autofill;
	x->autofill = autofill_free(x->autofill);
	x->autofill_arch = -1;
	if (autofill_new(x->set->catalog, spec->gfx_arch, owner_of(x, spec).arch_space,
			 &x->autofill, x->err) < 0)
		return NULL;
	x->autofill_arch = spec->gfx_arch;
	return x->autofill;
}

/* The numbers of the tile that were said, from field @field on, and then the kernel. */
static int expand_tile(struct expansion *x, uint32_t field, const struct kernel_spec *so_far)
{
	const struct declaration *d = x->declaration;
	struct kernel_spec spec = *so_far;
	int r = 0;

	while (field < SPEC_N_FIELDS && !(spec_tile_fields & d->said & (field_set)1 << field))
		field++;
	if (field == SPEC_N_FIELDS) {
		autofill_apply(x->autofill, d->said, &spec);
		return keep(x, &spec);
	}
	for (int i = 0; i < d->choices[field].n && r == 0; i++) {
		field_store(&spec_fields[field], &spec, d->choices[field].value[i]);
		r = expand_tile(x, field + 1, &spec);
	}
	return r;
}

/* A trait that the family's kernels have one value of only, and another was said. */
static int find_conflict(const struct declaration *d, const struct kernel_spec *said,
			 const struct kernel_spec *spec)
{
	for (int f = 0; f < SPEC_N_FIELDS; f++)
		if ((spec_signature_fields & d->said & ~d->any) >> f & 1 &&
		    field_load(&spec_fields[f], said) != field_load(&spec_fields[f], spec))
			return f;
	return -1;
}

static int add_kernels(struct expansion *x, const struct kernel_spec *said)
{
	const struct spec_catalog *catalog = x->set->catalog;
	const struct declaration *d = x->declaration;
	const struct autofill *autofill;
	const struct spec_space *space;
	struct kernel_spec spec = *said;
	char reason[160], text[120];
	int conflict, r;

	if (owner_of(x, said).is_own)
		return search(x, said);
	autofill = autofill_of(x, said);
	if (!autofill)
		return x->err->code;
	r = find_space(x, said, &space);
	if (r < 0)
		return r;
	spec_signature_reduce(space, &spec.signature);
	autofill_apply(autofill, d->said, &spec);
	spec_signature_reduce(space, &spec.signature);
	conflict = find_conflict(d, said, &spec);
	if (conflict >= 0) {
		(void)snprintf(text, sizeof(text), "%s: {family} kernels have {%s} only",
			       spec_fields[conflict].name, spec_fields[conflict].name);
		findings_write(catalog, &spec, text, reason, sizeof(reason));
		return reject(x, reason);
	}
	return d->any & spec_tile_fields ? search(x, &spec) : expand_tile(x, 0, &spec);
}

/* ---- the values of a field ---- */

static void add_bits(struct choice *choice, uint64_t bits)
{
	for (int i = 0; i < SET_MAX_VALUES; i++)
		if (bits >> i & 1)
			choice->value[choice->n++] = i;
}

/* What "*" means for a field, where the ones before it are known. */
static int any_value(const struct expansion *x, const struct kernel_spec *spec, int field,
		     struct choice *ret)
{
	static const char *const message = "'*': it has no list of values; say which";
	const struct spec_catalog *catalog = x->set->catalog;
	const struct arch *arch = &catalog->archs[spec->gfx_arch];
	const struct owner owner = owner_of(x, spec);
	struct owner other;
	struct at at;
	int n = 0;

	*ret = (struct choice){0};
	if (field == SPEC_FIELD_gfx_arch) {
		for (int i = 0; i < catalog->n_archs; i++)
			if (find_owner(x, i, &other))
				ret->value[ret->n++] = i;
	} else if (field == SPEC_FIELD_data_type) {
		add_bits(ret, owner.is_own ? arch->own.model->data_types
					   : arch->spaces[owner.arch_space].dtypes);
	} else if (field == SPEC_FIELD_pipeline) {
		add_bits(ret, owner.is_own ? arch->own.pipelines
					   : arch->spaces[owner.arch_space].pipelines);
	} else if (spec_fields[field].kind == FIELD_WORD) {
		(void)spec_words(catalog, field, &n);
		add_bits(ret, ((uint64_t)1 << n) - 1);
	} else if (spec_fields[field].kind == FIELD_FLAG) {
		add_bits(ret, 3);
	} else if (spec_fields[field].kind == FIELD_PAD) {
		add_bits(ret, 3 | 1 << SPEC_PAD_8);
	} else {
		at = at_key(&x->declaration->at, spec_fields[field].name);
		return at_error(&at, x->err, "%s", message);
	}
	return 0;
}

static int expand(struct expansion *x, int level, const struct kernel_spec *so_far);

/* Head dims are given together: few pairs of them exist. */
static int expand_head_dims(struct expansion *x, int level, const struct kernel_spec *so_far)
{
	const struct declaration *d = x->declaration;
	const struct choice *q = &d->choices[SPEC_FIELD_hdim_q],
			    *v = &d->choices[SPEC_FIELD_hdim_v];
	struct spec_head_dims pairs[SET_MAX_VALUES];
	struct kernel_spec spec = *so_far;
	const struct spec_space *space;
	size_t n = (size_t)d->n_pairs;
	int r = 0;

	memcpy(pairs, d->pairs, sizeof(pairs));
	if (d->any & (FIELD_BIT(hdim_q) | FIELD_BIT(hdim_v))) {
		r = find_space(x, so_far, &space);
		if (r < 0)
			return r;
		n = spec_space_head_dims(space, so_far->signature.family,
					 so_far->signature.data_type, pairs, SET_MAX_VALUES);
		n = n < SET_MAX_VALUES ? n : SET_MAX_VALUES;
	}
	for (size_t i = 0; i < n && r == 0; i++) {
		if (!is_chosen(d, SPEC_FIELD_hdim_q, pairs[i].hdim_q) ||
		    !is_chosen(d, SPEC_FIELD_hdim_v, pairs[i].hdim_v))
			continue;
		spec.signature.hdim_q = pairs[i].hdim_q;
		spec.signature.hdim_v = pairs[i].hdim_v;
		r = expand(x, level + 1, &spec);
	}
	if (d->n_pairs || d->any & (FIELD_BIT(hdim_q) | FIELD_BIT(hdim_v)))
		return r;
	for (int i = 0; i < (q->n ? q->n : 1) && r == 0; i++)
		for (int j = 0; j < (v->n ? v->n : 1) && r == 0; j++) {
			if (q->n)
				spec.signature.hdim_q = (uint16_t)q->value[i];
			/* One of them alone stands for both. */
			spec.signature.hdim_v = v->n ? (uint16_t)v->value[j]
						     : spec.signature.hdim_q;
			r = expand(x, level + 1, &spec);
		}
	return r;
}

static int expand(struct expansion *x, int level, const struct kernel_spec *so_far)
{
	const struct declaration *d = x->declaration;
	struct kernel_spec spec = *so_far;
	struct choice choice;
	int field, r = 0;

	if (++x->n_steps > MAX_STEPS)
		return at_error(&d->at, x->err, "means more than %d combinations", MAX_STEPS);
	if (level == x->n_fields)
		return add_kernels(x, so_far);
	field = x->fields[level];
	if (field == SPEC_FIELD_hdim_q)
		return expand_head_dims(x, level, so_far);
	choice = d->choices[field];
	if (d->any >> field & 1)
		r = any_value(x, so_far, field, &choice);
	for (int i = 0; i < choice.n && r == 0; i++) {
		struct owner owner;

		field_store(&spec_fields[field], &spec, choice.value[i]);
		if (field == SPEC_FIELD_gfx_arch && x->arch >= 0 && spec.gfx_arch != x->arch)
			continue;
		if (field == SPEC_FIELD_gfx_arch && !find_owner(x, spec.gfx_arch, &owner))
			r = at_error(&d->at, x->err, "arch %s has no kernels by the rules '%s'",
				     spec_arch_name(x->set->catalog, spec.gfx_arch), x->rules);
		if (r == 0)
			r = expand(x, level + 1, &spec);
	}
	return r;
}

/* The order in which fields are given values: those that others depend on come first. */
static void order_fields(struct expansion *x)
{
	static const uint8_t first[] = {SPEC_FIELD_gfx_arch, SPEC_FIELD_family,
					SPEC_FIELD_data_type, SPEC_FIELD_hdim_q,
					SPEC_FIELD_pipeline};
	const struct declaration *d = x->declaration;
	field_set taken = spec_tile_fields | FIELD_BIT(hdim_v);

	x->n_fields = 0;
	for (size_t i = 0; i < sizeof(first); i++) {
		field_set bit = (field_set)1 << first[i];

		taken |= bit;
		if (d->said & bit || first[i] == SPEC_FIELD_hdim_q)
			x->fields[x->n_fields++] = first[i];
	}
	for (int f = 0; f < SPEC_N_FIELDS; f++)
		if (d->said & ~taken & (field_set)1 << f)
			x->fields[x->n_fields++] = (uint8_t)f;
}

int expansion_run(struct expansion *x, const struct declaration *declaration)
{
	const struct declaration *d = declaration;
	struct kernel_spec start;
	struct owner owner;
	int r;

	x->declaration = d;
	x->n_steps = x->n_kept = 0;
	x->first_fault = (struct fmha_error){0};
	order_fields(x);
	spec_init(&start);
	if (!(d->said & FIELD_BIT(gfx_arch))) {
		if (x->arch < 0)
			return at_error(&d->at, x->err,
					"gfx_arch is missing, and no arch is asked for");
		start.gfx_arch = (uint8_t)x->arch;
		if (!find_owner(x, x->arch, &owner))
			return at_error(&d->at, x->err, "arch %s has no kernels by the rules '%s'",
					spec_arch_name(x->set->catalog, x->arch), x->rules);
	}
	r = expand(x, 0, &start);
	if (r < 0 || x->n_kept)
		return r;
	/* Kernels of other archs than the one that is asked for are no fault. */
	if (x->arch >= 0 && !is_chosen(d, SPEC_FIELD_gfx_arch, x->arch))
		return 0;
	return at_error(&d->at, x->err, "means no kernel that there is%s%s",
			x->first_fault.code ? "; the first: " : "", x->first_fault.msg);
}

void expansion_deinit(struct expansion *x)
{
	for (int i = 0; i < x->n_spaces; i++)
		spec_space_free(x->spaces[i].space);
	x->n_spaces = 0;
	x->autofill = autofill_free(x->autofill);
}
