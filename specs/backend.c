// SPDX-License-Identifier: MIT
/*
 * backend.c: the kernels of a backend of this build, made of its rows: see specs/backend.h.
 * Which traits a family's kernels may be asked for, traits.h of kernels/ says; every backend's take them
 * freely but for what a row is without.
 */
#include <stdbool.h>

#include "catalog_impl.h"
#include "fields.h"

/* What a family's kernels may be asked for, and what all of them have. */
struct family {
	const char *variant;
	uint32_t always; /* traits that are 1 */
};

static const struct family families[] = {
	[SPEC_FWD] = {"fwd", 0},
	[SPEC_FWD_SPLITKV] = {"splitkv", 0},
	[SPEC_FWD_SPLITKV_COMBINE] = {"splitkv", 0},
	[SPEC_FWD_PAGEDKV] = {"pagedkv", TRAIT_BIT(paged)},
	[SPEC_FWD_APPENDKV] = {"appendkv", 0},
	[SPEC_BATCH_PREFILL] = {"batch_prefill", TRAIT_BIT(paged)},
	[SPEC_BWD_DOT_DO_O] = {"bwd", 0},
	[SPEC_BWD_DQ_DK_DV] = {"bwd", 0},
	[SPEC_BWD_CONVERT_DQ] = {"bwd", 0},
};
_Static_assert(sizeof(families) / sizeof(families[0]) == SPEC_N_FAMILIES,
	       "every family is of a variant");

static int is_fp8(int data_type)
{
	return data_type == SPEC_FP8 || data_type == SPEC_BF8;
}

/* Scales are for 8-bit types, those under queries of 16 bits too, and for loops that such keys are widened
 * for. */
static uint32_t absent_traits(const struct spec_backend *backend, const struct spec_row *row,
			      int family, int data_type, int narrow)
{
	int is_wide = data_type == SPEC_FP16 || data_type == SPEC_BF16;
	int takes_widened = is_wide && (family == SPEC_FWD || family == SPEC_FWD_SPLITKV) &&
			    backend->pipelines[row->pipeline].flags & SPEC_WIDENED;

	return row->without |
	       (is_fp8(data_type) || narrow || takes_widened ? 0 : TRAIT_BIT(descale)) |
	       (is_wide ? 0 : TRAIT_BIT(narrow));
}

static field_set absent_fields(const struct spec_backend *backend, const struct spec_row *row,
			       const struct kernel_signature *signature)
{
	return fields_of_traits(absent_traits(backend, row, signature->family, signature->data_type,
					      signature->narrow));
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

static void set_always(const struct family *family, struct kernel_signature *signature)
{
	static const struct traits all = {.paged = 1};

	signature_set_traits(signature, family->always, &all);
}

static uint16_t most_dim(const struct spec_backend *backend)
{
	return backend->head_dims[backend->n_head_dims - 1].hdim_q;
}

/* Of a family with any dims there is one kernel. */
static struct spec_head_dims own_dims(const struct spec_backend *backend, int family,
				      struct spec_head_dims dims)
{
	if (family_takes_any_dims(family))
		dims.hdim_q = dims.hdim_v = most_dim(backend);
	return dims;
}

static void signature_of(const struct spec_backend *backend, const struct traits *traits,
			 uint8_t data_type, struct spec_head_dims dims,
			 struct kernel_signature *ret_signature)
{
	uint32_t set = 0;

	for (int i = 0; i < N_TRAITS; i++)
		set |= (uint32_t)(trait_infos[i].families >> traits->op & 1) << i;
	dims = own_dims(backend, traits->op, dims);
	spec_signature_init(ret_signature);
	ret_signature->family = traits->op;
	ret_signature->data_type = data_type;
	ret_signature->hdim_q = dims.hdim_q;
	ret_signature->hdim_v = dims.hdim_v;
	signature_set_traits(ret_signature, set & backend->compiled, traits);
	set_always(&families[traits->op], ret_signature);
}

void backend_reduce(const struct spec_backend *backend, struct kernel_signature *signature)
{
	struct spec_head_dims dims = {signature->hdim_q, signature->hdim_v};
	struct traits traits;

	spec_traits(signature, &traits);
	signature_of(backend, &traits, data_type_of_code(signature->data_type), dims, signature);
}

void spec_own_signature(const struct spec_catalog *catalog, int arch, const struct traits *traits,
			struct spec_head_dims dims, struct kernel_signature *ret_signature)
{
	int data_type = spec_dtype_of(traits->dtype);

	signature_of(catalog->archs[arch].own.backend, traits,
		     data_type < 0 ? SPEC_N_DTYPES : (uint8_t)data_type, dims, ret_signature);
}

/* ---- kernels ---- */

/* Return: NULL: @row has all of the traits; else what it has not. */
static const char *lacks(const struct spec_backend *backend, const struct spec_row *row,
			 int data_type, const struct traits *traits)
{
#define LACK(name, NAME, word, kind, families, asked) "no loop with such heads has " #name,
	static const char *const words[N_TRAITS] = {FMHA_TRAITS(LACK)};
#undef LACK
	uint32_t absent = absent_traits(backend, row, traits->op, data_type, traits->narrow);

	for (int i = 0; i < N_TRAITS; i++)
		if (absent >> i & 1 && trait_infos[i].families >> traits->op & 1 &&
		    !(families[traits->op].always >> i & 1) && trait_get(traits, i))
			return words[i];
	return NULL;
}

/* Is @row for head dims as large? */
static int reaches(const struct spec_row *row, const struct kernel_signature *signature)
{
	return row->hdim_most >= signature->hdim_q && row->hdim_most >= signature->hdim_v;
}

/* The kernel of @row with a signature of what is compiled in. Return: NULL, or why it cannot be. */
static const char *make_kernel(const struct own_space *own, const struct spec_row *row, int arch,
			       const struct kernel_signature *signature,
			       const struct traits *traits, struct kernel_spec *ret_spec)
{
	enum spec_field ignored;

	spec_init(ret_spec);
	ret_spec->signature = *signature;
	ret_spec->gfx_arch = (uint8_t)arch;
	ret_spec->pipeline = (uint8_t)(own->first_pipeline + row->pipeline);
	own->backend->cut(own->model, row, ret_spec);
	/* cppcheck-suppress returnDanglingLifetime ; what is returned are words, never the field */
	return own->backend->misfit(own->model, row->pipeline, ret_spec, traits, &ignored);
}

static int has_type(const struct own_space *own, int data_type)
{
	return own->model->data_types >> data_type & 1;
}

size_t spec_candidates(const struct spec_catalog *catalog, int arch, const struct traits *traits,
		       struct spec_head_dims dims,
		       struct kernel_spec ret_specs[SPEC_MAX_CANDIDATES], const char **ret_why)
{
	const struct own_space *own = &catalog->archs[arch].own;
	struct kernel_signature signature;
	size_t n = 0;

	*ret_why = NULL;
	spec_own_signature(catalog, arch, traits, dims, &signature);
	if (!has_type(own, signature.data_type))
		return 0;
	for (size_t i = 0; i < own->backend->n_rows && n < SPEC_MAX_CANDIDATES; i++) {
		const struct spec_row *row = &own->backend->rows[i];
		const char *why;
		size_t k = 0;

		if (!row_has(row, own->model, traits->op, signature.data_type) ||
		    !reaches(row, &signature))
			continue;
		why = lacks(own->backend, row, signature.data_type, traits);
		if (!why)
			why = make_kernel(own, row, arch, &signature, traits, &ret_specs[n]);
		if (why) {
			*ret_why = *ret_why ? *ret_why : why;
			continue;
		}
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
	size_t n = 0;

	if (family_takes_any_dims(family)) {
		ret_pairs[0] = (struct spec_head_dims){most_dim(backend), most_dim(backend)};
		return 1;
	}
	for (size_t i = 0; i < backend->n_head_dims && n < SPEC_MAX_HEAD_DIMS; i++)
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
static int is_second(const struct walk *walk, const struct kernel_spec *spec,
		     const struct traits *traits)
{
	int data_type = spec->signature.data_type;
	struct kernel_spec made;

	for (const struct spec_row *row = walk->own->backend->rows; row < walk->row; row++)
		if (row->pipeline == walk->row->pipeline && row->tile_m == walk->row->tile_m &&
		    row_has(row, walk->own->model, traits->op, data_type) &&
		    !lacks(walk->own->backend, row, data_type, traits) &&
		    reaches(row, &spec->signature) &&
		    !make_kernel(walk->own, row, walk->arch, &spec->signature, traits, &made) &&
		    memcmp(&made, spec, sizeof(made)) == 0)
			return 1;
	return 0;
}

/* Every value of the traits from @trait on that are compiled in. */
static int walk_traits(const struct walk *walk, int trait, struct traits *traits, uint8_t data_type,
		       struct spec_head_dims dims)
{
	const struct spec_backend *backend = walk->own->backend;
	struct kernel_signature signature;
	struct kernel_spec spec;
	int r = 0;

	while (trait < N_TRAITS &&
	       !(backend->compiled & ~families[traits->op].always & 1u << trait &&
		 trait_infos[trait].families >> traits->op & 1))
		trait++;
	if (trait == N_TRAITS) {
		if (lacks(backend, walk->row, data_type, traits))
			return 0;
		signature_of(backend, traits, data_type, dims, &signature);
		return reaches(walk->row, &signature) &&
				       !make_kernel(walk->own, walk->row, walk->arch, &signature,
						    traits, &spec) &&
				       !is_second(walk, &spec, traits)
			       ? walk->visit(walk->owner, &spec)
			       : 0;
	}
	for (uint8_t value = 0; value < trait_infos[trait].n_values && r == 0; value++) {
		trait_set(traits, trait, value);
		r = walk_traits(walk, trait + 1, traits, data_type, dims);
	}
	trait_set(traits, trait, 0);
	return r;
}

static int walk_family(const struct walk *walk, int family)
{
	struct spec_head_dims pairs[SPEC_MAX_HEAD_DIMS];
	size_t n = spec_own_head_dims(walk->catalog, walk->arch, (enum spec_family)family, pairs);
	int r = 0;

	for (int type = 0; type < SPEC_N_DTYPES; type++) {
		struct kernel_signature plain = {.family = (uint8_t)family,
						 .data_type = (uint8_t)type};
		struct traits traits;

		if (!row_has(walk->row, walk->own->model, family, type) ||
		    !has_type(walk->own, type))
			continue;
		set_always(&families[family], &plain);
		spec_traits(&plain, &traits);
		for (size_t i = 0; i < n && r == 0; i++)
			r = walk_traits(walk, 0, &traits, type, pairs[i]);
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
			absent &= absent_fields(own->backend, row, &spec->signature);
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
	if (!family_takes_any_dims(reduced.family) || !backend_recut(own, spec, &reduced))
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
	struct traits traits;
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
	absent = absent_fields(own->backend, row, &code.signature);
	has = has_tile(own, pipeline, &code, &absent);
	spec_traits(&code.signature, &traits);
	why = own->backend->misfit(own->model, pipeline, &code, &traits, ret_field);
	if (!why)
		why = judge_traits(absent, spec, ret_field);
	if (why)
		return why; /* cppcheck-suppress returnDanglingLifetime ; its words are constants */
	*ret_field = SPEC_FIELD_tile_m0;
	return has ? NULL : "no tile of {pipeline} is cut like this for {family}";
}
