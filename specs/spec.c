// SPDX-License-Identifier: MIT
/* spec.c: the field table, default values, order and hash of kernel specs. */
#include <assert.h>

#include "catalog_impl.h"
#include "fields.h"

/* Padding bytes would make memcmp() and hashing see garbage. */
static_assert(sizeof(struct kernel_signature) == 26, "kernel_signature has padding");
static_assert(sizeof(struct kernel_tile) == 48, "kernel_tile has padding");
static_assert(sizeof(struct kernel_spec) == 84, "kernel_spec has padding");

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
	SPEC_FIELDS(FIELD_ROW)
#undef FIELD_ROW
};

#define IN_STRUCT(type, outer, member)                                                             \
	(offsetof(struct kernel_spec, member) >= offsetof(struct kernel_spec, outer) &&            \
	 offsetof(struct kernel_spec, member) <                                                    \
		 offsetof(struct kernel_spec, outer) + sizeof(struct type))

#define SIGNATURE_BIT(name, member, kind)                                                          \
	| (IN_STRUCT(kernel_signature, signature, member) ? FIELD_BIT(name) : 0)
#define TILE_BIT(name, member, kind) | (IN_STRUCT(kernel_tile, tile, member) ? FIELD_BIT(name) : 0)
const field_set spec_signature_fields = 0 SPEC_FIELDS(SIGNATURE_BIT);
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
static const char *const words_family[] = {SPEC_FAMILIES(WORD)};
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

	for (int i = 0; i < n; i++) {
		size_t same = 0;

		while (same < length && words[i][same] == word[same])
			same++;
		if (same == length && words[i][same] == '\0')
			return i;
	}
	return -1;
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
