// SPDX-License-Identifier: MIT
/*
 * alias.c: the names that kernels of this build had when a name said what a problem asks for. Since then it
 * says what code has compiled in, so that one kernel has one name; people's patterns may still be about the
 * old ones, up to a thousand a kernel.
 *
 * So they are not written out: a name is a row of parts, each of which has a few spellings, and a pattern
 * is matched against all of them at once, as an automaton whose states are places in the pattern.
 */
#include <string.h>

#include "catalog_impl.h"
#include "fields.h"

#define MOST_VALUES    4
#define MOST_SPELLINGS (1 + SPEC_MAX_HEAD_DIMS)
#define WORDS          (SPEC_NAME_BYTES / 64 + 1)

/* A field that old names told apart, in which families, and its values. The words are those of names by which a
 * pattern is known to be about it. */
struct old_field {
	uint8_t field, n_values;
	uint8_t value[MOST_VALUES];
	uint16_t families;
	const char *words[4];
};

#define FORWARD  (SPEC_BIT(SPEC_FWD) | SPEC_BIT(SPEC_FWD_PAGEDKV) | SPEC_BIT(SPEC_BATCH_PREFILL))
#define SPLIT    SPEC_BIT(SPEC_FWD_SPLITKV)
#define BACKWARD SPEC_BIT(SPEC_BWD_DQ_DK_DV)
#define COMBINE  SPEC_BIT(SPEC_FWD_SPLITKV_COMBINE)
#define APPEND   SPEC_BIT(SPEC_FWD_APPENDKV)
#define SCORES   (FORWARD | SPLIT | BACKWARD)
#define EVERY    ((1u << SPEC_N_FAMILIES) - 1)
#define FLAG                                                                                       \
	2,                                                                                         \
	{                                                                                          \
		0, 1                                                                               \
	}

static const struct old_field old_fields[] = {
	{SPEC_FIELD_mode,
	 2,
	 {SPEC_MODE_BATCH, SPEC_MODE_GROUP},
	 EVERY,
	 {"-batch-", "-group-", "-*-h"}},
	{SPEC_FIELD_data_type,
	 4,
	 {SPEC_FP8, SPEC_FP8FP16, SPEC_FP8BF16, SPEC_FP8FP32},
	 EVERY,
	 {"fp8fp16", "fp8bf16", "fp8fp32"}},
	{SPEC_FIELD_mask,
	 3,
	 {SPEC_MASK_NO, SPEC_MASK_TOP_LEFT, SPEC_MASK_GENERIC},
	 SCORES,
	 {"top_left", "generic"}},
	{SPEC_FIELD_bias,
	 3,
	 {SPEC_BIAS_NO, SPEC_BIAS_BIAS, SPEC_BIAS_ALIBI},
	 SCORES,
	 {"alibi", "-bias"}},
	{SPEC_FIELD_logits, FLAG, SCORES, {"-cap"}},
	{SPEC_FIELD_dropout, FLAG, SCORES, {"-drop"}},
	{SPEC_FIELD_qscale,
	 4,
	 {SPEC_QSCALE_NO, SPEC_QSCALE_PERTENSOR, SPEC_QSCALE_BLOCKSCALE, SPEC_QSCALE_KV_BLOCKSCALE},
	 FORWARD | SPLIT,
	 {"blockscale", "-qs."}},
	{SPEC_FIELD_paged_kv, FLAG, SPLIT | APPEND, {"-paged"}},
	{SPEC_FIELD_lse, FLAG, FORWARD | SPLIT | COMBINE, {"-lse"}},
	{SPEC_FIELD_sink, FLAG, FORWARD | COMBINE | SPEC_BIT(SPEC_BWD_DOT_DO_O), {"-sink"}},
	{SPEC_FIELD_skip_min_seqlen_q, FLAG, FORWARD | SPLIT, {"-skip"}},
	{SPEC_FIELD_rope,
	 3,
	 {SPEC_ROPE_NONE, SPEC_ROPE_INTERLEAVED, SPEC_ROPE_HALF_ROTATED},
	 APPEND,
	 {"-rope"}},
	{SPEC_FIELD_deterministic, FLAG, BACKWARD, {"-det"}},
	{SPEC_FIELD_dbias, FLAG, BACKWARD, {"-dbias"}},
};
#define N_OLD (sizeof(old_fields) / sizeof(old_fields[0]))

static const struct old_field *old_field_of(enum spec_field field)
{
	for (size_t i = 0; i < N_OLD; i++)
		if (old_fields[i].field == field)
			return &old_fields[i];
	return NULL;
}

/* Kinds of these were told apart where it is compiled in that there is one; the first of its words tells. */
static int has_kinds(int field)
{
	return field == SPEC_FIELD_mask || field == SPEC_FIELD_qscale ||
	       field == SPEC_FIELD_data_type;
}

int spec_is_old_pattern(const struct spec_catalog *catalog, int arch, const char *pattern)
{
	const struct spec_backend *backend = catalog->archs[arch].own.backend;

	for (size_t i = 0; backend && i < N_OLD; i++) {
		const struct old_field *old = &old_fields[i];
		int is_compiled = fields_of_traits(backend->compiled) >> old->field & 1;

		for (int k = 0; k < MOST_VALUES && old->words[k]; k++)
			if ((!is_compiled || (k == 0 && has_kinds(old->field))) &&
			    strstr(pattern, old->words[k]))
				return 1;
	}
	return 0;
}

/* The values that @field had in names of @kernel's code. */
static int values_of(const struct spec_catalog *catalog, const struct kernel_spec *kernel,
		     field_set absent, enum spec_field field, int32_t ret_values[MOST_VALUES])
{
	const struct old_field *old = old_field_of(field);
	int32_t own = field_load(&spec_fields[field], kernel);
	int n = 0;

	for (int k = 0; old && k < old->n_values; k++) {
		struct kernel_spec spec = *kernel, code;

		field_store(&spec_fields[field], &spec, old->value[k]);
		code = spec;
		spec_reduce(catalog, &code);
		if (old->value[k] == own ||
		    (old->families >> kernel->signature.family & 1 && !(absent >> field & 1) &&
		     spec_compare(&code, kernel) == 0))
			ret_values[n++] = old->value[k];
	}
	if (n == 0)
		ret_values[n++] = own;
	return n;
}

/* One part of a name, in all its spellings. */
struct part {
	int n;
	char text[MOST_SPELLINGS][SPEC_NAME_BYTES];
};

static void spell_field(const struct spec_catalog *catalog, const struct kernel_spec *kernel,
			field_set absent, enum spec_field field, int at, struct part *part)
{
	int32_t values[MOST_VALUES];
	struct kernel_spec spec = *kernel;
	int n = values_of(catalog, kernel, absent, field, values);

	part->n = n;
	for (int k = 0; k < n; k++) {
		field_store(&spec_fields[field], &spec, values[k]);
		name_part(catalog, &spec, at, part->text[k]);
	}
}

/* Kernels that take any head dim had a name for each. */
static void spell_shape(const struct spec_catalog *catalog, const struct own_space *own,
			const struct kernel_spec *kernel, int at, struct part *part)
{
	part->n = 1;
	name_part(catalog, kernel, at, part->text[0]);
	if (!family_takes_any_dims(kernel->signature.family))
		return;
	for (size_t i = 0; i < own->backend->n_head_dims; i++) {
		struct kernel_signature old = kernel->signature;
		struct kernel_spec spec = *kernel;

		old.hdim_q = own->backend->head_dims[i].hdim_q;
		old.hdim_v = own->backend->head_dims[i].hdim_v;
		(void)backend_recut(own, &spec, &old);
		name_part(catalog, &spec, at, part->text[part->n++]);
	}
}

/* Matching: which places of the pattern the text so far may have led to. */
struct places {
	uint64_t bit[WORDS];
};

struct automaton {
	struct places stars;
	struct places accepts[256]; /* places that this character leads on from */
	size_t length;
};

static void set_place(struct places *places, size_t i)
{
	places->bit[i / 64] |= (uint64_t)1 << (i % 64);
}

static void compile(struct automaton *a, const char *pattern)
{
	memset(a, 0, sizeof(*a));
	a->length = strlen(pattern);
	for (size_t i = 0; i < a->length; i++) {
		if (pattern[i] == '*')
			set_place(&a->stars, i);
		for (int c = 0; c < 256 && pattern[i] == '?'; c++)
			set_place(&a->accepts[c], i);
		if (pattern[i] != '*' && pattern[i] != '?')
			set_place(&a->accepts[(uint8_t)pattern[i]], i);
	}
}

/* A star may be nothing: its place leads on without a character. */
static void skip_stars(const struct automaton *a, struct places *at)
{
	uint64_t carry = 0;

	for (int i = 0; i < WORDS; i++) {
		uint64_t now = at->bit[i] | carry, before;

		do {
			before = now;
			now |= (now & a->stars.bit[i]) << 1;
		} while (now != before);
		carry = (now & a->stars.bit[i]) >> 63;
		at->bit[i] = now;
	}
}

static void take(const struct automaton *a, struct places *at, const char *text)
{
	for (; *text; text++) {
		const struct places *accepts = &a->accepts[(uint8_t)*text];
		uint64_t carry = 0;

		for (int i = 0; i < WORDS; i++) {
			uint64_t led = at->bit[i] & accepts->bit[i];

			at->bit[i] = led << 1 | carry | (at->bit[i] & a->stars.bit[i]);
			carry = led >> 63;
		}
		skip_stars(a, at);
	}
}

static void take_part(const struct automaton *a, struct places *at, const struct part *part)
{
	struct places next = {{0}};

	for (int k = 0; k < part->n; k++) {
		struct places here = *at;

		take(a, &here, part->text[k]);
		for (int i = 0; i < WORDS; i++)
			next.bit[i] |= here.bit[i];
	}
	*at = next;
}

int spec_old_names_match(const struct spec_catalog *catalog, const struct kernel_spec *kernel,
			 const char *pattern)
{
	const struct own_space *own = &catalog->archs[kernel->gfx_arch].own;
	field_set absent = backend_absent(own, kernel);
	struct automaton a;
	struct places at = {{1}};
	struct part part;
	int fields[NAME_MOST_PARTS];
	int n = name_parts(fields);

	if (strlen(pattern) >= SPEC_NAME_BYTES)
		return 0;
	compile(&a, pattern);
	skip_stars(&a, &at);
	for (int i = 0; i < n; i++) {
		if (fields[i] < 0)
			spell_shape(catalog, own, kernel, i, &part);
		else
			spell_field(catalog, kernel, absent, (enum spec_field)fields[i], i, &part);
		take_part(&a, &at, &part);
	}
	return at.bit[a.length / 64] >> (a.length % 64) & 1;
}
