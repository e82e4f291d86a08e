// SPDX-License-Identifier: MIT
/*
 * backend.c: the kernels of a backend of this build, made of its rows: see specs/backend.h.
 * Every backend's kernels take the traits of the problem freely, so the axes belong to the family
 * and stand here once.
 */
#include <stdio.h>
#include <stdbool.h>
#include <stdlib.h>

#include <proto/error.h>

#include "catalog_impl.h"
#include "fields.h"

#define MAX_VALUES 4

/* A trait that code has, compiled in or at run time, and its values where it is compiled in: none first. */
struct trait_axis {
	uint8_t field, n_values;
	uint8_t value[MAX_VALUES];
};

static const struct trait_axis axis_mask = {SPEC_FIELD_mask, 2, {SPEC_MASK_NO, SPEC_MASK_GENERIC}},
			       axis_bias = {SPEC_FIELD_bias,
					    3,
					    {SPEC_BIAS_NO, SPEC_BIAS_BIAS, SPEC_BIAS_ALIBI}},
			       axis_qscale = {SPEC_FIELD_qscale,
					      2,
					      {SPEC_QSCALE_NO, SPEC_QSCALE_PERTENSOR}},
			       axis_logits = {SPEC_FIELD_logits, 2, {0, 1}},
			       axis_dropout = {SPEC_FIELD_dropout, 2, {0, 1}},
			       axis_paged = {SPEC_FIELD_paged_kv, 2, {0, 1}},
			       axis_rope = {SPEC_FIELD_rope, 1, {0}};

/* What a family's kernels may be asked for, and what all of them have. */
struct family {
	const char *variant;
	field_set dims;   /* the head dims that it reads */
	field_set always; /* flags that are 1 */
	const struct trait_axis *axes[7];
};

#define BOTH_DIMS (FIELD_BIT(hdim_q) | FIELD_BIT(hdim_v))
#define SCORES    &axis_mask, &axis_bias, &axis_logits, &axis_qscale, &axis_dropout

static const struct family families[SPEC_N_FAMILIES] = {
	[SPEC_FWD] = {"fwd", BOTH_DIMS, 0, {SCORES}},
	[SPEC_FWD_SPLITKV] = {"splitkv", BOTH_DIMS, 0, {SCORES, &axis_paged}},
	[SPEC_FWD_SPLITKV_COMBINE] = {"splitkv", FIELD_BIT(hdim_v), 0, {NULL}},
	[SPEC_FWD_PAGEDKV] = {"pagedkv", BOTH_DIMS, FIELD_BIT(paged_kv), {SCORES}},
	[SPEC_FWD_APPENDKV] = {"appendkv", BOTH_DIMS, 0, {&axis_paged, &axis_rope}},
	[SPEC_BATCH_PREFILL] = {"batch_prefill", BOTH_DIMS, FIELD_BIT(paged_kv), {SCORES}},
	[SPEC_BWD_DOT_DO_O] = {"bwd", FIELD_BIT(hdim_v), 0, {NULL}},
	[SPEC_BWD_DQ_DK_DV] = {"bwd",
			       BOTH_DIMS,
			       0,
			       {&axis_mask, &axis_bias, &axis_logits, &axis_dropout}},
	[SPEC_BWD_CONVERT_DQ] = {"bwd", FIELD_BIT(hdim_q), 0, {NULL}},
};

static int is_fp8(int data_type)
{
	return data_type == SPEC_FP8 || data_type == SPEC_BF8;
}

/* Traits that kernels of a data type have not: scales are for 8-bit types, which nobody rotates. */
static field_set absent_traits(const struct spec_row *row, int data_type)
{
	return row->without | (is_fp8(data_type) ? FIELD_BIT(rope) : FIELD_BIT(qscale));
}

static int runs_on(const struct spec_row *row, const struct spec_backend_arch *arch)
{
	return (row->cores & arch->cores) != 0;
}

static int row_has(const struct spec_row *row, const struct spec_backend_arch *arch, int family,
		   int data_type)
{
	return runs_on(row, arch) && row->families >> family & 1 &&
	       row->data_types >> data_type & 1;
}

static void set_always(const struct family *family, struct kernel_spec *spec)
{
	for (int f = 0; f < SPEC_N_FIELDS; f++)
		if (family->always >> f & 1)
			field_store(&spec_fields[f], spec, 1);
}

static int compiles_in(const struct spec_backend *backend, const struct trait_axis *axis)
{
	return backend->compiled >> axis->field & 1;
}

/* Kinds of a trait for which code is the same. */
static void fold(struct kernel_signature *s)
{
	if (s->data_type == SPEC_FP8FP16 || s->data_type == SPEC_FP8BF16 ||
	    s->data_type == SPEC_FP8FP32)
		s->data_type = SPEC_FP8; /* what O is written as is an argument */
	if (s->mask != SPEC_MASK_NO)
		s->mask = SPEC_MASK_GENERIC;
	if (s->qscale != SPEC_QSCALE_NO)
		s->qscale = SPEC_QSCALE_PERTENSOR;
}

static uint16_t most_dim(const struct spec_backend *backend)
{
	return backend->head_dims[backend->n_head_dims - 1].hdim_q;
}

void backend_reduce(const struct spec_backend *backend, struct kernel_signature *signature)
{
	const struct family *family = &families[signature->family];
	struct kernel_spec full, reduced;

	spec_init(&full);
	spec_init(&reduced);
	full.signature = *signature;
	fold(&full.signature);
	reduced.signature.family = full.signature.family;
	reduced.signature.data_type = full.signature.data_type;
	reduced.signature.hdim_q = family->dims & FIELD_BIT(hdim_q) ? signature->hdim_q
								    : signature->hdim_v;
	reduced.signature.hdim_v = family->dims & FIELD_BIT(hdim_v) ? signature->hdim_v
								    : signature->hdim_q;
	if (backend->any_dims >> signature->family & 1)
		reduced.signature.hdim_q = reduced.signature.hdim_v = most_dim(backend);
	for (int i = 0; family->axes[i]; i++)
		if (compiles_in(backend, family->axes[i])) {
			const struct field *field = &spec_fields[family->axes[i]->field];

			field_store(field, &reduced, field_load(field, &full));
		}
	set_always(family, &reduced);
	*signature = reduced.signature;
}

void spec_own_reduce(const struct spec_catalog *catalog, int arch,
		     struct kernel_signature *signature)
{
	backend_reduce(catalog->archs[arch].own.backend, signature);
}

/* ---- kernels ---- */

/* Has @row all traits of @wanted that its family may be asked for? */
static int covers(const struct spec_row *row, const struct kernel_signature *wanted)
{
	field_set absent = absent_traits(row, wanted->data_type);
	struct kernel_spec spec;

	spec_init(&spec);
	spec.signature = *wanted;
	for (const struct trait_axis *const *axis = families[wanted->family].axes; *axis; axis++)
		if (absent >> (*axis)->field & 1 && field_load(&spec_fields[(*axis)->field], &spec))
			return 0;
	return 1;
}

/* The kernel of @row with a signature of what is compiled in. Return: 0: it cannot be. */
static int make_kernel(const struct own_space *own, const struct spec_row *row, int arch,
		       const struct kernel_signature *signature, struct kernel_spec *ret_spec)
{
	enum spec_field ignored;

	if (row->hdim_most < signature->hdim_q || row->hdim_most < signature->hdim_v)
		return 0;
	spec_init(ret_spec);
	ret_spec->signature = *signature;
	ret_spec->gfx_arch = (uint8_t)arch;
	ret_spec->pipeline = (uint8_t)(own->first_pipeline + row->pipeline);
	own->backend->cut(own->model, row, ret_spec);
	return !own->backend->misfit(own->model, row->pipeline, ret_spec, &ignored);
}

static int has_type(const struct own_space *own, int data_type)
{
	return own->model->data_types >> data_type & 1;
}

size_t spec_candidates(const struct spec_catalog *catalog, int arch,
		       const struct kernel_signature *wanted,
		       struct kernel_spec ret_specs[SPEC_MAX_CANDIDATES])
{
	const struct own_space *own = &catalog->archs[arch].own;
	struct kernel_signature reduced = *wanted, folded = *wanted;
	size_t n = 0;

	backend_reduce(own->backend, &reduced);
	folded.data_type = reduced.data_type;
	if (!has_type(own, reduced.data_type))
		return 0;
	for (size_t i = 0; i < own->backend->n_rows && n < SPEC_MAX_CANDIDATES; i++) {
		const struct spec_row *row = &own->backend->rows[i];
		size_t k = 0;

		if (!row_has(row, own->model, reduced.family, reduced.data_type) ||
		    !covers(row, &folded) || !make_kernel(own, row, arch, &reduced, &ret_specs[n]))
			continue;
		/* Two rows may say the same of a small head dim. */
		while (memcmp(&ret_specs[k], &ret_specs[n], sizeof(*ret_specs)) != 0)
			k++;
		n += k == n;
	}
	return n;
}

size_t spec_own_head_dims(const struct spec_catalog *catalog, int arch, enum spec_family family,
			  struct spec_head_dims ret_pairs[SPEC_MAX_HEAD_DIMS])
{
	const struct spec_backend *backend = catalog->archs[arch].own.backend;
	bool any = backend->any_dims >> family & 1;
	size_t n = 0;

	/* A family that reads one head dim has each once. */
	for (size_t i = any ? backend->n_head_dims - 1 : 0;
	     i < backend->n_head_dims && n < SPEC_MAX_HEAD_DIMS; i++)
		if (families[family].dims == BOTH_DIMS ||
		    backend->head_dims[i].hdim_q == backend->head_dims[i].hdim_v)
			ret_pairs[n++] = backend->head_dims[i];
	return n;
}

/* ---- all of them ---- */

struct walk {
	const struct spec_catalog *catalog;
	const struct own_space *own;
	const struct spec_row *row;
	int arch;
	spec_visit visit;
	void *owner;
};

/* Has a row before made this very kernel, of a small head dim? */
static int is_second(const struct walk *walk, const struct kernel_spec *spec)
{
	struct kernel_spec made;

	for (const struct spec_row *row = walk->own->backend->rows; row < walk->row; row++)
		if (row->pipeline == walk->row->pipeline && row->tile_m == walk->row->tile_m &&
		    row_has(row, walk->own->model, spec->signature.family,
			    spec->signature.data_type) &&
		    covers(row, &spec->signature) &&
		    make_kernel(walk->own, row, walk->arch, &spec->signature, &made) &&
		    memcmp(&made, spec, sizeof(made)) == 0)
			return 1;
	return 0;
}

/* Every value of the axes from @axis on. */
static int walk_traits(const struct walk *walk, const struct trait_axis *const *axis,
		       const struct kernel_signature *signature)
{
	struct kernel_spec spec;
	int r = 0;

	while (*axis && !compiles_in(walk->own->backend, *axis))
		axis++;
	if (!*axis)
		return make_kernel(walk->own, walk->row, walk->arch, signature, &spec) &&
				       !is_second(walk, &spec)
			       ? walk->visit(walk->owner, &spec)
			       : 0;
	spec_init(&spec);
	spec.signature = *signature;
	for (int i = 0; i < (*axis)->n_values && r == 0; i++) {
		field_store(&spec_fields[(*axis)->field], &spec, (*axis)->value[i]);
		if (covers(walk->row, &spec.signature))
			r = walk_traits(walk, axis + 1, &spec.signature);
	}
	return r;
}

static int walk_family(const struct walk *walk, int family)
{
	struct spec_head_dims pairs[SPEC_MAX_HEAD_DIMS];
	size_t n = spec_own_head_dims(walk->catalog, walk->arch, (enum spec_family)family, pairs);
	int r = 0;

	for (int type = 0; type < SPEC_N_DTYPES; type++) {
		if (!row_has(walk->row, walk->own->model, family, type) ||
		    !has_type(walk->own, type))
			continue;
		for (size_t i = 0; i < n && r == 0; i++) {
			struct kernel_spec spec;

			spec_init(&spec);
			spec.signature.family = (uint8_t)family;
			spec.signature.data_type = (uint8_t)type;
			spec.signature.hdim_q = pairs[i].hdim_q;
			spec.signature.hdim_v = pairs[i].hdim_v;
			set_always(&families[family], &spec);
			r = walk_traits(walk, families[family].axes, &spec.signature);
		}
	}
	return r;
}

int backend_has_variant(const char *variant)
{
	int family = 0;

	while (family < SPEC_N_FAMILIES && strcmp(variant, families[family].variant) != 0)
		family++;
	return family < SPEC_N_FAMILIES;
}

int spec_own_each(const struct spec_catalog *catalog, int arch, const char *variant,
		  spec_visit visit, void *owner)
{
	const struct own_space *own = &catalog->archs[arch].own;
	struct walk walk = {
		.catalog = catalog, .own = own, .arch = arch, .visit = visit, .owner = owner};
	int r = 0;

	for (size_t i = 0; i < own->backend->n_rows && r == 0; i++) {
		walk.row = &own->backend->rows[i];
		for (int family = 0; family < SPEC_N_FAMILIES && r == 0; family++)
			if (!variant || strcmp(variant, families[family].variant) == 0)
				r = walk_family(&walk, family);
	}
	return r;
}

/* ---- validation ---- */

/* Is there a row of the pipeline with all that @family (-1: any) and @data_type (-1) ask for? */
static const struct spec_row *find_row(const struct own_space *own, int pipeline, int family,
				       int data_type)
{
	for (size_t i = 0; i < own->backend->n_rows; i++) {
		const struct spec_row *row = &own->backend->rows[i];

		if (row->pipeline == pipeline && runs_on(row, own->model) &&
		    (family < 0 || row->families >> family & 1) &&
		    (data_type < 0 || row->data_types >> data_type & 1))
			return row;
	}
	return NULL;
}

/*
 * The rows' own tiles are all that there is: nothing is built for others. *ret_absent, when one is: the traits
 * that no row with this tile has.
 */
static int has_tile(const struct own_space *own, int pipeline, const struct kernel_spec *spec,
		    field_set *ret_absent)
{
	field_set absent = ~(field_set)0;
	int found = 0;

	for (size_t i = 0; i < own->backend->n_rows; i++) {
		const struct spec_row *row = &own->backend->rows[i];
		struct kernel_spec cut = *spec;

		if (row->pipeline != pipeline ||
		    !row_has(row, own->model, spec->signature.family, spec->signature.data_type) ||
		    row->hdim_most < spec->signature.hdim_q ||
		    row->hdim_most < spec->signature.hdim_v)
			continue;
		own->backend->cut(own->model, row, &cut);
		if (memcmp(&cut, spec, sizeof(cut)) == 0) {
			absent &= absent_traits(row, spec->signature.data_type);
			found = 1;
		}
	}
	if (found)
		*ret_absent = absent;
	return found;
}

field_set backend_absent(const struct own_space *own, const struct kernel_spec *spec)
{
	field_set absent = 0;

	(void)has_tile(own, spec->pipeline - own->first_pipeline, spec, &absent);
	return absent;
}

int backend_recut(const struct own_space *own, struct kernel_spec *spec,
		  const struct kernel_signature *signature)
{
	struct kernel_spec cut = *spec;

	for (size_t i = 0; i < own->backend->n_rows; i++) {
		const struct spec_row *row = &own->backend->rows[i];

		if (row->pipeline != spec->pipeline - own->first_pipeline ||
		    !(row->families >> spec->signature.family & 1))
			continue;
		own->backend->cut(own->model, row, &cut);
		if (memcmp(&cut, spec, sizeof(cut)) != 0)
			continue;
		spec->signature = *signature;
		own->backend->cut(own->model, row, spec);
		return 1;
	}
	return 0;
}

void spec_reduce(const struct spec_catalog *catalog, struct kernel_spec *spec)
{
	const struct own_space *own = &catalog->archs[spec->gfx_arch].own;
	struct kernel_signature reduced = spec->signature;

	if (!own->backend || spec_pipeline_flags(catalog, spec->pipeline) < 0)
		return;
	backend_reduce(own->backend, &reduced);
	if (!(own->backend->any_dims >> reduced.family & 1) || !backend_recut(own, spec, &reduced))
		spec->signature = reduced;
}

static const char *judge_traits(field_set absent, const struct kernel_spec *spec,
				enum spec_field *ret_field)
{
	for (int f = 0; f < SPEC_N_FIELDS; f++)
		if (absent >> f & 1 && field_load(&spec_fields[f], spec)) {
			*ret_field = f;
			return f == SPEC_FIELD_dropout ? "not with pipeline {pipeline}"
						       : "not with data_type {data_type}";
		}
	*ret_field = SPEC_FIELD_dbias;
	if (spec->signature.dbias && spec->signature.bias != SPEC_BIAS_BIAS)
		return "bias {bias} has no gradient";
	*ret_field = SPEC_FIELD_pad_s;
	if (spec->pad_s != 1 || spec->pad_sk != 1 || spec->pad_d != 1 || spec->pad_dv != 1)
		return "every kernel of this build takes lengths that its tile does not divide: 1 "
		       "1 1 1";
	return NULL;
}

const char *backend_judge(const struct spec_catalog *catalog, const struct kernel_spec *spec,
			  enum spec_field *ret_field)
{
	const struct own_space *own = &catalog->archs[spec->gfx_arch].own;
	int pipeline = spec->pipeline - own->first_pipeline;
	/* A name may say of a problem what is no matter to the code. */
	struct kernel_spec code = *spec;
	int family = spec->signature.family, data_type;
	const struct spec_row *row;
	field_set absent;
	const char *why;
	int has;

	spec_reduce(catalog, &code);
	data_type = code.signature.data_type;
	row = find_row(own, pipeline, family, data_type);
	*ret_field = SPEC_FIELD_data_type;
	if (!has_type(own, data_type))
		return "not one of arch {gfx_arch}";
	*ret_field = SPEC_FIELD_pipeline;
	if (!find_row(own, pipeline, -1, -1))
		return "not one of arch {gfx_arch}";
	if (!find_row(own, pipeline, family, -1))
		return "{family} is not made by it";
	*ret_field = SPEC_FIELD_data_type;
	if (!row)
		return "pipeline {pipeline} has no such type";
	absent = absent_traits(row, data_type);
	has = has_tile(own, pipeline, &code, &absent);
	why = own->backend->misfit(own->model, pipeline, &code, ret_field);
	if (!why)
		why = judge_traits(absent, spec, ret_field);
	if (why)
		return why;
	*ret_field = SPEC_FIELD_tile_m0;
	return has ? NULL : "no tile of {pipeline} is cut like this for {family}";
}
