/* SPDX-License-Identifier: MIT */
/* spec.c: the field table, default values, order and hash of kernel specs. */
#include <assert.h>
#include <stddef.h>
#include <string.h>

#include "catalog_impl.h"
#include "fields.h"

/* ---- synonym ---- */

/*
 * Other words for values of fields, as people know them from AMD's dispatcher and its
 * command lines. They are understood wherever a word is read (filters, rows, JSON, sweeps, kernel
 * sets) and never written: a value has one name. Canonical names of kernels do not take them.
 */

struct synonym {
	uint8_t field;
	const char *said, *word;
};

static const struct synonym synonyms[] = {
	{SPEC_FIELD_mask, "no_mask", "no"},
	{SPEC_FIELD_mask, "causal", "top_left"},
	{SPEC_FIELD_mask, "t", "top_left"},
	{SPEC_FIELD_mask, "b", "bottom_right"},
	{SPEC_FIELD_mask, "window_generic", "generic"},
	{SPEC_FIELD_mask, "g", "generic"},
	{SPEC_FIELD_bias, "no_bias", "no"},
	{SPEC_FIELD_bias, "elementwise", "bias"},
	{SPEC_FIELD_bias, "elementwise_bias", "bias"},
	{SPEC_FIELD_qscale, "no_scale", "no"},
	{SPEC_FIELD_rope, "no", "none"},
	{SPEC_FIELD_rope, "inter", "interleaved"},
	{SPEC_FIELD_rope, "half", "half_rotated"},
	{SPEC_FIELD_vlayout, "row", "r"},
	{SPEC_FIELD_vlayout, "row_major", "r"},
	{SPEC_FIELD_vlayout, "col", "c"},
	{SPEC_FIELD_vlayout, "col_major", "c"},
};

const char *spec_synonym(int field, const char *said, size_t length)
{
	for (size_t i = 0; i < sizeof(synonyms) / sizeof(synonyms[0]); i++)
		if (synonyms[i].field == field && strlen(synonyms[i].said) == length &&
		    memcmp(synonyms[i].said, said, length) == 0)
			return synonyms[i].word;
	return NULL;
}

/* ---- arch ---- */

/* What a loaded catalog says about archs and data types. */

int spec_arch_count(const struct spec_catalog *catalog)
{
	return catalog->n_archs;
}

const char *spec_arch_name(const struct spec_catalog *catalog, int arch)
{
	return spec_word(catalog, SPEC_FIELD_gfx_arch, arch);
}

int spec_arch_find(const struct spec_catalog *catalog, const char *name)
{
	return spec_word_find(catalog, SPEC_FIELD_gfx_arch, name);
}

const char *spec_arch_vendor(const struct spec_catalog *catalog, int arch)
{
	const struct spec_backend_arch *model = spec_arch_model(catalog, arch);

	return model ? model->vendor : "amd";
}

const char *spec_arch_family(const struct spec_catalog *catalog, int arch)
{
	const struct spec_backend_arch *model = spec_arch_model(catalog, arch);

	return model ? model->family : "";
}

const char *spec_arch_rules(const struct spec_catalog *catalog, int arch, int index)
{
	const struct arch *of = &catalog->archs[arch];

	if (of->own.backend && index-- == 0)
		return of->own.backend->name;
	return index >= 0 && index < of->n_spaces ? of->spaces[index].rules->name : NULL;
}

int spec_arch_has_dtype(const struct spec_catalog *catalog, int arch, enum spec_dtype dtype)
{
	const struct arch *of = &catalog->archs[arch];
	int found = of->own.model ? of->own.model->data_types >> dtype & 1 : 0;

	for (int i = 0; i < of->n_spaces; i++)
		found |= of->spaces[i].dtypes >> dtype & 1;
	return found;
}

int spec_arch_has_pipeline(const struct spec_catalog *catalog, int arch, int pipeline)
{
	const struct arch *of = &catalog->archs[arch];
	int found = of->own.pipelines >> pipeline & 1;

	for (int i = 0; i < of->n_spaces; i++)
		found |= (int)(of->spaces[i].pipelines >> pipeline & 1);
	return found;
}

const struct spec_backend_arch *spec_arch_model(const struct spec_catalog *catalog, int arch)
{
	return catalog->archs[arch].own.model;
}

static const struct spec_pipeline *own_pipeline(const struct spec_catalog *catalog, int pipeline)
{
	return pipeline >= 0 && pipeline < catalog->pipelines.n ? catalog->own_pipelines[pipeline]
								: NULL;
}

int spec_pipeline_flags(const struct spec_catalog *catalog, int pipeline)
{
	const struct spec_pipeline *own = own_pipeline(catalog, pipeline);

	return own ? (int)own->flags : -1;
}

void spec_dq_tile(const struct spec_catalog *catalog, const struct kernel_spec *spec,
		  int32_t *ret_rows, int32_t *ret_floats)
{
	const struct spec_pipeline *own = own_pipeline(catalog, spec->pipeline);

	*ret_rows = *ret_floats = 0;
	if (own && own->dq_tile)
		own->dq_tile(spec, ret_rows, ret_floats);
}

int32_t spec_kv_parts(const struct spec_catalog *catalog, const struct kernel_spec *spec,
		      uint32_t units, const struct abi_bwd_args *args, double ret_us[2])
{
	const struct spec_pipeline *own = own_pipeline(catalog, spec->pipeline);

	ret_us[0] = ret_us[1] = 0;
	return own && own->kv_parts ? own->kv_parts(spec, units, args, ret_us) : 1;
}

int32_t spec_order_words(const struct spec_catalog *catalog, const struct kernel_spec *spec,
			 const struct abi_bwd_args *args)
{
	const struct spec_pipeline *own = own_pipeline(catalog, spec->pipeline);

	return own && own->order_words ? own->order_words(spec, args) : 0;
}

/* ---- traits ---- */

/*
 * Traits as specs have them. Where AMD's kernels have a column for one, it is told there, by the
 * value that stands for this build's code; the others have columns of their own.
 */

static const struct column {
	uint8_t field;
	uint8_t one; /* what a 1 is there; other values are themselves */
} columns[N_TRAITS] = {[TRAIT_mask] = {SPEC_FIELD_mask, SPEC_MASK_GENERIC},
		       [TRAIT_bias] = {SPEC_FIELD_bias, SPEC_BIAS_BIAS},
		       [TRAIT_softcap] = {SPEC_FIELD_logits, 1},
		       [TRAIT_dropout] = {SPEC_FIELD_dropout, 1},
		       [TRAIT_paged] = {SPEC_FIELD_paged_kv, 1},
		       [TRAIT_descale] = {SPEC_FIELD_qscale, SPEC_QSCALE_PERTENSOR},
#define OWN(name, NAME, word, kind, families, asked) [TRAIT_##name] = {SPEC_FIELD_##name, 1},
		       FMHA_OWN_TRAITS(OWN)
#undef OWN
};

const struct trait_info trait_infos[N_TRAITS] = {
#define FLAG  2
#define KIND  3
#define KIND4 4
#define INFO(name, NAME, word, kind, families, asked)                                              \
	{families, kind, offsetof(struct traits, name)},
	FMHA_TRAITS(INFO)
#undef INFO
#undef FLAG
#undef KIND
#undef KIND4
};

static const uint8_t data_types[] = {
	[ABI_F32] = SPEC_FP32,    [ABI_F16] = SPEC_FP16,     [ABI_BF16] = SPEC_BF16,
	[ABI_E4M3] = SPEC_FP8,    [ABI_E5M2] = SPEC_BF8,     [ABI_I32] = SPEC_N_DTYPES,
	[ABI_U8] = SPEC_N_DTYPES, [ABI_I64] = SPEC_N_DTYPES, [ABI_I8] = SPEC_INT8};
#define N_TYPES (sizeof(data_types) / sizeof(data_types[0]))

int spec_dtype_of(uint32_t dtype)
{
	return dtype < N_TYPES && data_types[dtype] < SPEC_N_DTYPES ? data_types[dtype] : -1;
}

/* What O is written as is an argument. */
uint8_t data_type_of_code(uint8_t data_type)
{
	return data_type == SPEC_FP8FP16 || data_type == SPEC_FP8BF16 || data_type == SPEC_FP8FP32
		       ? SPEC_FP8
		       : data_type;
}

field_set fields_of_traits(uint32_t set)
{
	field_set fields = 0;

	for (int i = 0; i < N_TRAITS; i++)
		if (set >> i & 1)
			fields |= (field_set)1 << columns[i].field;
	return fields;
}

void signature_set_traits(struct kernel_signature *signature, uint32_t set,
			  const struct traits *traits)
{
	struct kernel_spec spec;

	spec_init(&spec);
	spec.signature = *signature;
	for (int i = 0; i < N_TRAITS; i++) {
		uint8_t value = set >> i & 1 ? trait_get(traits, i) : 0;

		if (value)
			field_store(&spec_fields[columns[i].field], &spec,
				    value == 1 ? columns[i].one : value);
	}
	*signature = spec.signature;
}

void spec_traits(const struct kernel_signature *signature, struct traits *ret_traits)
{
	uint8_t data_type = data_type_of_code(signature->data_type);
	struct kernel_spec spec;

	spec_init(&spec);
	spec.signature = *signature;
	*ret_traits = (struct traits){.op = signature->family};
	while (ret_traits->dtype + 1u < N_TYPES && data_types[ret_traits->dtype] != data_type)
		ret_traits->dtype++;
	for (int i = 0; i < N_TRAITS; i++) {
		int32_t value = field_load(&spec_fields[columns[i].field], &spec);

		if (trait_infos[i].families >> signature->family & 1)
			trait_set(ret_traits, i,
				  value == columns[i].one || trait_infos[i].n_values == 2
					  ? value != 0
					  : (uint8_t)value);
	}
}

/* Padding bytes would make memcmp() and hashing see garbage. */
#define OWN_BYTES (N_OWN_TRAITS + N_OWN_TRAITS % 2)
static_assert(sizeof(struct kernel_signature) == 26 + OWN_BYTES, "kernel_signature has padding");
static_assert(sizeof(struct kernel_tile) == 48, "kernel_tile has padding");
static_assert(sizeof(struct kernel_spec) == 84 + OWN_BYTES, "kernel_spec has padding");
static_assert(SPEC_N_FIELDS <= 64, "a field_set holds all of them");

#define MEMBER_TYPE(member)                                                                        \
	_Generic(((struct kernel_spec *)0)->member, uint8_t                                        \
		 : FIELD_U8, uint16_t                                                              \
		 : FIELD_U16, int16_t                                                              \
		 : FIELD_I16)

#define MEMBER_MIN(member)                                                                         \
	_Generic(((struct kernel_spec *)0)->member, uint8_t : 0, uint16_t : 0, int16_t : INT16_MIN)
#define MEMBER_MAX(member)                                                                         \
	_Generic(((struct kernel_spec *)0)->member, uint8_t                                        \
		 : UINT8_MAX, uint16_t                                                             \
		 : UINT16_MAX, int16_t                                                             \
		 : INT16_MAX)

const struct field spec_fields[SPEC_N_FIELDS] = {
#define FIELD_ROW(name, member, kind)                                                              \
	{#name,                                                                                    \
	 offsetof(struct kernel_spec, member),                                                     \
	 FIELD_##kind,                                                                             \
	 MEMBER_TYPE(member),                                                                      \
	 MEMBER_MIN(member),                                                                       \
	 FIELD_##kind == FIELD_FLAG  ? 1                                                           \
	 : FIELD_##kind == FIELD_PAD ? SPEC_PAD_8                                                  \
				     : MEMBER_MAX(member)},
#define FIELD_OWN(name, NAME, word, kind, families, asked)                                         \
	FIELD_ROW(name, signature.name, OWN_##kind)
#define FIELD_OWN_FLAG  FIELD_FLAG
#define FIELD_OWN_KIND  FIELD_INT
#define FIELD_OWN_KIND4 FIELD_INT
	SPEC_FIELDS(FIELD_ROW) FMHA_OWN_TRAITS(FIELD_OWN)
#undef FIELD_ROW
};

#define IN_STRUCT(type, outer, member)                                                             \
	(offsetof(struct kernel_spec, member) >= offsetof(struct kernel_spec, outer) &&            \
	 offsetof(struct kernel_spec, member) <                                                    \
		 offsetof(struct kernel_spec, outer) + sizeof(struct type))

#define SIGNATURE_BIT(name, member, kind)                                                          \
	| (IN_STRUCT(kernel_signature, signature, member) ? FIELD_BIT(name) : 0)
#define TILE_BIT(name, member, kind)                     | (IN_STRUCT(kernel_tile, tile, member) ? FIELD_BIT(name) : 0)
#define OWN_BIT(name, NAME, word, kind, families, asked) | FIELD_BIT(name)
const field_set spec_signature_fields = 0 SPEC_FIELDS(SIGNATURE_BIT) FMHA_OWN_TRAITS(OWN_BIT);
const field_set spec_tile_fields = 0 SPEC_FIELDS(TILE_BIT);

int field_find(const char *name, size_t length)
{
	for (int i = 0; i < SPEC_N_FIELDS; i++)
		if (strlen(spec_fields[i].name) == length &&
		    memcmp(spec_fields[i].name, name, length) == 0)
			return i;
	return -1;
}

void spec_signature_init(struct kernel_signature *signature)
{
	*signature = (struct kernel_signature){
		.hdim_q = 128,
		.hdim_v = 128,
		.page_size = 1,
	};
}

void spec_init(struct kernel_spec *spec)
{
	*spec = (struct kernel_spec){
		.tile = {.tile_m0 = 128,
			 .tile_n0 = 128,
			 .tile_k0 = 32,
			 .tile_n1 = 128,
			 .tile_k1 = 32,
			 .tile_k0max = 128,
			 .warp_m0 = 32,
			 .warp_n0 = 32,
			 .warp_k0 = 16,
			 .warp_m1 = 32,
			 .warp_n1 = 32,
			 .warp_k1 = 16,
			 .warp_m2 = 16,
			 .warp_n2 = 16,
			 .warp_k2 = 16,
			 .wave_m0 = 4,
			 .wave_n0 = 1,
			 .wave_k0 = 1,
			 .wave_m1 = 4,
			 .wave_n1 = 1,
			 .wave_k1 = 1,
			 .wave_m2 = 1,
			 .wave_n2 = 1,
			 .wave_k2 = 1},
		.block_per_cu = -1,
		.num_wave_groups = 1,
		.pad_s = 1,
		.pad_sk = 1,
		.pad_d = 1,
		.pad_dv = 1,
	};
	spec_signature_init(&spec->signature);
}

const char *spec_field_name(enum spec_field field)
{
	return (unsigned)field < SPEC_N_FIELDS ? spec_fields[field].name : NULL;
}

int spec_field_is_trait(enum spec_field field)
{
	return spec_signature_fields >> field & 1;
}

int64_t spec_get(const struct kernel_spec *spec, enum spec_field field)
{
	assert((unsigned)field < SPEC_N_FIELDS);
	return field_load(&spec_fields[field], spec);
}

void spec_set(struct kernel_spec *spec, enum spec_field field, int64_t value)
{
	assert((unsigned)field < SPEC_N_FIELDS);
	assert(field_fits(&spec_fields[field], value));
	field_store(&spec_fields[field], spec, (int32_t)value);
}

#define WORD(ID, word) #word,
static const char *const words_family[] = {ABI_FAMILIES(ABI_FAMILY_WORD)};
static const char *const words_data_type[] = {SPEC_DTYPES(WORD)};
static const char *const words_mode[] = {SPEC_MODES(WORD)};
static const char *const words_vlayout[] = {SPEC_VLAYOUTS(WORD)};
static const char *const words_mask[] = {SPEC_MASKS(WORD)};
static const char *const words_bias[] = {SPEC_BIASES(WORD)};
static const char *const words_qscale[] = {SPEC_QSCALES(WORD)};
static const char *const words_rope[] = {SPEC_ROPES(WORD)};
static const char *const words_kv_memory_layout[] = {SPEC_KV_LAYOUTS(WORD)};
static const char *const words_kv_lookup_table[] = {SPEC_KV_LOOKUPS(WORD)};
static const char *const words_dropout_variant[] = {SPEC_DROPOUTS(WORD)};

#define WORDS(name)                                                                                \
	case SPEC_FIELD_##name:                                                                    \
		*ret_n = (int)(sizeof(words_##name) / sizeof(words_##name[0]));                    \
		return words_##name

const char *const *spec_words(const struct spec_catalog *catalog, enum spec_field field, int *ret_n)
{
	switch ((int)field) {
		WORDS(family);
		WORDS(data_type);
		WORDS(mode);
		WORDS(vlayout);
		WORDS(mask);
		WORDS(bias);
		WORDS(qscale);
		WORDS(rope);
		WORDS(kv_memory_layout);
		WORDS(kv_lookup_table);
		WORDS(dropout_variant);
	case SPEC_FIELD_gfx_arch:
		*ret_n = catalog->n_archs;
		return catalog->arch_names;
	case SPEC_FIELD_pipeline:
		*ret_n = catalog->pipelines.n;
		return (const char *const *)catalog->pipelines.word;
	case SPEC_FIELD_tile_tag:
		*ret_n = catalog->tile_tags.n;
		return (const char *const *)catalog->tile_tags.word;
	default:
		*ret_n = 0;
		return NULL;
	}
}

const char *spec_word(const struct spec_catalog *catalog, enum spec_field field, int64_t value)
{
	int n;
	const char *const *words = spec_words(catalog, field, &n);

	return value >= 0 && value < n ? words[value] : NULL;
}

int spec_word_find_n(const struct spec_catalog *catalog, enum spec_field field, const char *word,
		     size_t length)
{
	int n;
	const char *const *words = spec_words(catalog, field, &n);
	const char *meant;

	for (int i = 0; i < n; i++) {
		size_t same = 0;

		while (same < length && words[i][same] == word[same])
			same++;
		if (same == length && words[i][same] == '\0')
			return i;
	}
	meant = spec_synonym(field, word, length);
	return meant ? spec_word_find_n(catalog, field, meant, strlen(meant)) : -1;
}

int spec_word_find(const struct spec_catalog *catalog, enum spec_field field, const char *word)
{
	return spec_word_find_n(catalog, field, word, strlen(word));
}

int spec_compare(const struct kernel_spec *a, const struct kernel_spec *b)
{
	for (int i = 0; i < SPEC_N_FIELDS; i++) {
		int32_t x = field_load(&spec_fields[i], a);
		int32_t y = field_load(&spec_fields[i], b);

		if (x != y)
			return x < y ? -1 : 1;
	}
	return 0;
}

/* Eight bytes at a time with a multiply and a fold (the wyhash idea): every input bit reaches all
 * output bits, and a lookup's hash costs a few nanoseconds. */
static uint64_t hash_bytes(const void *data, size_t size, uint64_t seed)
{
	const uint8_t *at = data;
	uint64_t hash = seed ^ 0x9e3779b97f4a7c15u;

	while (size) {
		size_t n = size < 8 ? size : 8;
		uint64_t chunk = 0;
		unsigned __int128 product;

		memcpy(&chunk, at, n);
		product = (unsigned __int128)(hash ^ chunk) * 0xd6e8feb86659fd93u;
		hash = (uint64_t)product ^ (uint64_t)(product >> 64) ^ (chunk << 1 | 1);
		at += n;
		size -= n;
	}
	hash ^= hash >> 32;
	hash *= 0xd6e8feb86659fd93u;
	return hash ^ (hash >> 29);
}

uint64_t spec_hash(const struct kernel_spec *spec)
{
	return hash_bytes(spec, sizeof(*spec), 0);
}

uint64_t spec_signature_hash(const struct kernel_signature *signature)
{
	return hash_bytes(signature, sizeof(*signature), 0);
}

int spec_signature_equal(const struct kernel_signature *a, const struct kernel_signature *b)
{
	return memcmp(a, b, sizeof(*a)) == 0;
}
