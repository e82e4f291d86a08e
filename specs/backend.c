// SPDX-License-Identifier: MIT
/*
 * backend.c: the kernel space of a backend of this build, made of its rows: see specs/backend.h.
 * Every backend's kernels take the traits of the problem freely, so the axes belong to the family
 * and stand here once.
 */
#include <stdio.h>
#include <stdlib.h>

#include <proto/error.h>

#include "space_impl.h"

#define MAX_VALUES 4

/* One or two fields that go together, and their values. */
struct trait_axis {
	uint8_t n_fields, n_values;
	uint8_t field[2];
	uint8_t value[MAX_VALUES][2];
};

#define FLAG_AXIS(name)                                                                            \
	{                                                                                          \
		1, 2, {SPEC_FIELD_##name},                                                         \
		{                                                                                  \
			{0},                                                                       \
			{                                                                          \
				1                                                                  \
			}                                                                          \
		}                                                                                  \
	}
static const struct trait_axis axis_mode = {
	1, 2, {SPEC_FIELD_mode}, {{SPEC_MODE_BATCH}, {SPEC_MODE_GROUP}}};
static const struct trait_axis axis_mask = {
	1, 3, {SPEC_FIELD_mask}, {{SPEC_MASK_NO}, {SPEC_MASK_TOP_LEFT}, {SPEC_MASK_GENERIC}}};
static const struct trait_axis axis_bias = {
	1, 3, {SPEC_FIELD_bias}, {{SPEC_BIAS_NO}, {SPEC_BIAS_BIAS}, {SPEC_BIAS_ALIBI}}};
/* Only a bias tensor has a gradient. */
static const struct trait_axis axis_bias_dbias = {
	2,
	4,
	{SPEC_FIELD_bias, SPEC_FIELD_dbias},
	{{SPEC_BIAS_NO, 0}, {SPEC_BIAS_ALIBI, 0}, {SPEC_BIAS_BIAS, 0}, {SPEC_BIAS_BIAS, 1}}};
static const struct trait_axis axis_qscale = {1,
					      4,
					      {SPEC_FIELD_qscale},
					      {{SPEC_QSCALE_NO},
					       {SPEC_QSCALE_PERTENSOR},
					       {SPEC_QSCALE_BLOCKSCALE},
					       {SPEC_QSCALE_KV_BLOCKSCALE}}};
static const struct trait_axis axis_rope = {
	1,
	3,
	{SPEC_FIELD_rope},
	{{SPEC_ROPE_NONE}, {SPEC_ROPE_INTERLEAVED}, {SPEC_ROPE_HALF_ROTATED}}};
static const struct trait_axis axis_logits = FLAG_AXIS(logits), axis_lse = FLAG_AXIS(lse),
			       axis_dropout = FLAG_AXIS(dropout), axis_sink = FLAG_AXIS(sink),
			       axis_skip = FLAG_AXIS(skip_min_seqlen_q),
			       axis_paged = FLAG_AXIS(paged_kv),
			       axis_deterministic = FLAG_AXIS(deterministic);

/* What a family's kernels are specialised on, and what all of them have. */
struct family {
	const char *variant;
	field_set dims;   /* the head dims that it reads */
	field_set always; /* flags that are 1 */
	const struct trait_axis *axes[10];
};

#define BOTH_DIMS (FIELD_BIT(hdim_q) | FIELD_BIT(hdim_v))
#define SCORES    &axis_mode, &axis_mask, &axis_bias, &axis_logits, &axis_qscale
#define FORWARD                                                                                    \
	{                                                                                          \
		SCORES, &axis_lse, &axis_dropout, &axis_sink, &axis_skip                           \
	}

static const struct family families[SPEC_N_FAMILIES] = {
	[SPEC_FWD] = {"fwd", BOTH_DIMS, 0, FORWARD},
	[SPEC_FWD_SPLITKV] = {"splitkv",
			      BOTH_DIMS,
			      FIELD_BIT(lse),
			      {SCORES, &axis_paged, &axis_dropout, &axis_skip}},
	[SPEC_FWD_SPLITKV_COMBINE] = {"splitkv",
				      FIELD_BIT(hdim_v),
				      0,
				      {&axis_mode, &axis_lse, &axis_sink}},
	[SPEC_FWD_PAGEDKV] = {"pagedkv", BOTH_DIMS, FIELD_BIT(paged_kv), FORWARD},
	[SPEC_FWD_APPENDKV] = {"appendkv", BOTH_DIMS, 0, {&axis_mode, &axis_paged, &axis_rope}},
	[SPEC_BATCH_PREFILL] = {"batch_prefill", BOTH_DIMS, FIELD_BIT(paged_kv), FORWARD},
	[SPEC_BWD_DOT_DO_O] = {"bwd", FIELD_BIT(hdim_v), 0, {&axis_mode, &axis_sink}},
	[SPEC_BWD_DQ_DK_DV] = {"bwd",
			       BOTH_DIMS,
			       0,
			       {&axis_mode, &axis_mask, &axis_bias_dbias, &axis_logits,
				&axis_dropout, &axis_deterministic}},
	[SPEC_BWD_CONVERT_DQ] = {"bwd", FIELD_BIT(hdim_q), 0, {&axis_mode}},
};

static int is_fp8(int data_type)
{
	return data_type == SPEC_FP8FP16 || data_type == SPEC_FP8BF16 ||
	       data_type == SPEC_FP8FP32 || data_type == SPEC_BF8;
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

void backend_describe_families(struct spec_space *space)
{
	for (int f = 0; f < SPEC_N_FAMILIES; f++) {
		field_set used = families[f].dims;

		for (int i = 0; families[f].axes[i]; i++)
			for (int j = 0; j < families[f].axes[i]->n_fields; j++)
				used |= (field_set)1 << families[f].axes[i]->field[j];
		space->families[f].used = used;
	}
}

void backend_reduce(struct kernel_spec *spec)
{
	const struct family *family = &families[spec->signature.family];

	set_always(family, spec);
	if (!(family->dims & FIELD_BIT(hdim_q)))
		spec->signature.hdim_q = spec->signature.hdim_v;
	if (!(family->dims & FIELD_BIT(hdim_v)))
		spec->signature.hdim_v = spec->signature.hdim_q;
}

/* ---- the space ---- */

/* Absent traits have their first value only: none. */
static int make_axis(const struct trait_axis *from, field_set absent, struct axis *axis)
{
	int32_t *value = malloc(sizeof(*value) * from->n_fields * from->n_values);

	if (!value)
		return FMHA_ENOMEM;
	*axis = (struct axis){
		.n_fields = from->n_fields, .n_values = from->n_values, .value = value};
	for (int i = 0; i < from->n_fields; i++) {
		axis->field[i] = from->field[i];
		axis->bits |= (field_set)1 << from->field[i];
	}
	for (int row = 0; row < from->n_values; row++)
		for (int i = 0; i < from->n_fields; i++)
			*value++ = from->value[row][i];
	if (axis->bits & absent)
		axis->n_values = 1;
	return 0;
}

static int make_template(struct spec_space *space, int family, field_set absent,
			 const struct template **ret_template, struct fmha_error *err)
{
	struct template *t = calloc(1, sizeof(*t));
	int r = space_keep_template(space, t, err);

	for (int i = 0; r == 0 && families[family].axes[i]; i++) {
		r = make_axis(families[family].axes[i], absent, &t->axis[i]);
		t->axis_fields |= t->axis[i].bits;
		t->n_axes += r == 0;
	}
	if (r < 0)
		return no_memory(err);
	template_note_signature(t);
	*ret_template = t;
	return 0;
}

static int find_template(struct spec_space *space, int family, field_set absent,
			 const struct template **ret_template, struct fmha_error *err)
{
	for (size_t i = 0; i < space->n_templates; i++)
		if (space->templates[i]->family == family &&
		    space->templates[i]->absent == absent) {
			*ret_template = space->templates[i];
			return 0;
		}
	if (make_template(space, family, absent, ret_template, err) < 0)
		return FMHA_ENOMEM;
	space->templates[space->n_templates - 1]->family = family;
	space->templates[space->n_templates - 1]->absent = absent;
	return 0;
}

/* Rows side by side that differ in their tiles alone make one block. */
static size_t same_kind(const struct spec_backend *backend, size_t first)
{
	const struct spec_row *a = &backend->rows[first], *end = backend->rows + backend->n_rows;
	const struct spec_row *b = a;

	while (b < end && b->pipeline == a->pipeline && b->families == a->families &&
	       b->cores == a->cores && b->data_types == a->data_types && b->without == a->without)
		b++;
	return (size_t)(b - a);
}

/* Two rows may say the same of a small head dim. */
static void add_tile(struct tile_list *list, const struct kernel_spec *cut)
{
	const struct tile_choice choice = {cut->tile, cut->block_per_cu};

	for (size_t i = 0; i < list->n; i++)
		if (memcmp(&list->tile[i], &choice, sizeof(choice)) == 0)
			return;
	list->tile[list->n++] = choice;
}

/* @spec: has all but the tile. The tiles of @n rows from @row on that fit. */
static int add_block(struct spec_space *space, const struct spec_row *row, size_t n,
		     const struct kernel_spec *spec, const struct template *template,
		     struct fmha_error *err)
{
	const struct spec_backend *backend = space->backend;
	int larger = spec->signature.hdim_q > spec->signature.hdim_v ? spec->signature.hdim_q
								     : spec->signature.hdim_v;
	struct tile_list *list = space_new_tile_list(space, n, err);
	struct block block = {.template = template, .base = *spec};

	if (!list)
		return FMHA_ENOMEM;
	for (size_t i = 0; i < n; i++) {
		struct kernel_spec cut = *spec;
		enum spec_field ignored;

		if (row[i].hdim_most < larger)
			continue;
		backend->cut(space->model, &row[i], &cut);
		if (!backend->misfit(space->model, row->pipeline, &cut, &ignored))
			add_tile(list, &cut);
	}
	block.tile = list->tile;
	block.n_tiles = list->n;
	return list->n ? space_add_block(space, &block, err) : 0;
}

static int add_family(struct spec_space *space, const struct space_request *request, int family,
		      size_t first, size_t n, struct fmha_error *err)
{
	const struct spec_backend *backend = space->backend;
	const struct spec_row *row = &backend->rows[first];
	const struct template *template = NULL;
	int r = 0;

	for (int dtype = 0; dtype < SPEC_N_DTYPES && r == 0; dtype++) {
		struct kernel_spec spec;

		if (!row_has(row, space->model, family, dtype) ||
		    !(space->model->data_types >> dtype & 1))
			continue;
		r = find_template(space, family, absent_traits(row, dtype), &template, err);
		spec_init(&spec);
		spec.signature.family = (uint8_t)family;
		spec.signature.data_type = (uint8_t)dtype;
		spec.gfx_arch = (uint8_t)space->arch;
		spec.pipeline = (uint8_t)(space->first_pipeline + row->pipeline);
		set_always(&families[family], &spec);
		for (size_t i = 0; i < backend->n_head_dims && r == 0; i++) {
			spec.signature.hdim_q = backend->head_dims[i].hdim_q;
			spec.signature.hdim_v = backend->head_dims[i].hdim_v;
			/* A family that reads one head dim has each once. */
			if (families[family].dims != BOTH_DIMS &&
			    spec.signature.hdim_q != spec.signature.hdim_v)
				continue;
			if (!space_is_restricted(request, spec.signature.hdim_q,
						 spec.signature.hdim_v))
				r = add_block(space, row, n, &spec, template, err);
		}
	}
	return r;
}

int backend_fill(struct spec_space *space, const struct space_request *request, const char *variant,
		 struct fmha_error *err)
{
	const struct spec_backend *backend = space->backend;
	int r = 0, found = 0;

	for (int family = 0; family < SPEC_N_FAMILIES && r == 0; family++) {
		if (variant && strcmp(variant, families[family].variant) != 0)
			continue;
		found = 1;
		for (size_t i = 0, n; i < backend->n_rows && r == 0; i += n) {
			n = same_kind(backend, i);
			r = add_family(space, request, family, i, n, err);
		}
	}
	if (r == 0 && !found)
		r = fmha_error_set_field(err, FMHA_EINVAL, "variant",
					 "variant '%s': the rules '%s' have none of that name",
					 variant, backend->name);
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

const char *backend_judge(const struct own_space *own, const struct kernel_spec *spec,
			  enum spec_field *ret_field)
{
	int pipeline = spec->pipeline - own->first_pipeline;
	int family = spec->signature.family, data_type = spec->signature.data_type;
	const struct spec_row *row = find_row(own, pipeline, family, data_type);
	field_set absent;
	const char *why;
	int has;

	*ret_field = SPEC_FIELD_data_type;
	if (!(own->model->data_types >> data_type & 1))
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
	has = has_tile(own, pipeline, spec, &absent);
	why = own->backend->misfit(own->model, pipeline, spec, ret_field);
	if (!why)
		why = judge_traits(absent, spec, ret_field);
	if (why)
		return why;
	*ret_field = SPEC_FIELD_tile_m0;
	return has ? NULL : "no tile of {pipeline} is cut like this for {family}";
}
