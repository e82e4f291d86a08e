// SPDX-License-Identifier: MIT
/*
 * name.c: canonical names. The format is told in specs/spec.h. Formatting and parsing are one list
 * of parts read in two directions, and the parser ends by formatting what it understood: a name is
 * good exactly when that gives the same text, so no second spelling of a kernel can slip in.
 */
#include <stdio.h>

#include <proto/error.h>

#include "catalog_impl.h"
#include "fields.h"

/* Parts that are left out when the field has its default value. */
struct option {
	const char *prefix;
	uint8_t field;
	char kind; /* 'f': a flag, 'w': prefix and word, 'n': prefix and number */
};

static const struct option options[] = {{"lse", SPEC_FIELD_lse, 'f'},
					{"drop", SPEC_FIELD_dropout, 'f'},
					{"cap", SPEC_FIELD_logits, 'f'},
					{"sink", SPEC_FIELD_sink, 'f'},
					{"skip", SPEC_FIELD_skip_min_seqlen_q, 'f'},
					{"qs.", SPEC_FIELD_qscale, 'w'},
					{"paged", SPEC_FIELD_paged_kv, 'f'},
					{"rope.", SPEC_FIELD_rope, 'w'},
					{"ps", SPEC_FIELD_page_size, 'n'},
					{"kvl.", SPEC_FIELD_kv_memory_layout, 'w'},
					{"kvt.", SPEC_FIELD_kv_lookup_table, 'w'},
					{"det", SPEC_FIELD_deterministic, 'f'},
					{"dbias", SPEC_FIELD_dbias, 'f'},
					{"drv.", SPEC_FIELD_dropout_variant, 'w'},
					{"trload", SPEC_FIELD_use_trload, 'f'},
					{"bpc", SPEC_FIELD_block_per_cu, 'n'},
					{"nwg", SPEC_FIELD_num_wave_groups, 'n'},
					{"v.", SPEC_FIELD_vlayout, 'w'},
#define OPTION_FLAG  'f'
#define OPTION_KIND  'n'
#define OPTION_KIND4 'n'
#define OWN_OPTION(name, NAME, word, kind, families, asked)                                        \
	{word, SPEC_FIELD_##name, OPTION_##kind},
					FMHA_OWN_TRAITS(OWN_OPTION)
#undef OWN_OPTION
};
#define N_OPTIONS (sizeof(options) / sizeof(options[0]))

struct writer {
	char *at;
	char *end; /* of the buffer, NUL included */
};

static void put_bytes(struct writer *w, const char *text, size_t n)
{
	if (w->at && (size_t)(w->end - w->at) > n) {
		memcpy(w->at, text, n);
		w->at += n;
	} else {
		w->at = NULL; /* too long: everything after is dropped too */
	}
}

static void writer_put(struct writer *w, const char *text)
{
	put_bytes(w, text, strlen(text));
}

static void put_number(struct writer *w, int value)
{
	char digits[12];
	char *at = digits + sizeof(digits);
	unsigned left = value < 0 ? 0u - (unsigned)value : (unsigned)value;

	do
		*--at = (char)('0' + left % 10);
	while (left /= 10);
	if (value < 0)
		*--at = '-';
	put_bytes(w, at, (size_t)(digits + sizeof(digits) - at));
}

static int is_stage(const int *stage, int m, int n, int k)
{
	return stage[0] == m && stage[1] == n && stage[2] == k;
}

/* "4x1x1", "4x1x1.2x2x1", ...: @stages are three triples; @rest is stage 2's default. */
static void put_stages(struct writer *w, const char *prefix, const int stages[9], int rest)
{
	int n = 3;

	if (is_stage(stages + 6, rest, rest, rest))
		n = memcmp(stages, stages + 3, 3 * sizeof(int)) == 0 ? 1 : 2;
	writer_put(w, prefix);
	for (int i = 0; i < 3 * n; i++) {
		if (i > 0)
			writer_put(w, i % 3 == 0 ? "." : "x");
		put_number(w, stages[i]);
	}
}

static void put_tile(struct writer *w, const struct spec_catalog *catalog,
		     const struct kernel_tile *t)
{
	const int waves[9] = {t->wave_m0, t->wave_n0, t->wave_k0, t->wave_m1, t->wave_n1,
			      t->wave_k1, t->wave_m2, t->wave_n2, t->wave_k2};
	const int warps[9] = {t->warp_m0, t->warp_n0, t->warp_k0, t->warp_m1, t->warp_n1,
			      t->warp_k1, t->warp_m2, t->warp_n2, t->warp_k2};
	const int tile[9] = {t->tile_m0,    t->tile_n0,   t->tile_k0,   t->tile_n1,  t->tile_k1,
			     t->tile_k0max, t->tile_bwd6, t->tile_bwd7, t->tile_bwd8};
	int n = tile[6] || tile[7] || tile[8] ? 9 : 6;

	writer_put(w, "-t");
	for (int i = 0; i < n; i++) {
		if (i > 0)
			writer_put(w, "x");
		put_number(w, tile[i]);
	}
	if (t->tile_tag) {
		writer_put(w, ".");
		writer_put(w, catalog->tile_tags.word[t->tile_tag]);
	}
	put_stages(w, "-r", waves, 1);
	put_stages(w, "-w", warps, 16);
}

static void put_word(struct writer *w, const struct spec_catalog *catalog,
		     const struct kernel_spec *spec, enum spec_field field)
{
	const char *word = spec_word(catalog, field, spec_get(spec, field));

	writer_put(w, word ? word : "?");
}

static void put_option(struct writer *w, const struct spec_catalog *catalog,
		       const struct kernel_spec *spec, const struct option *option)
{
	const struct field *field = &spec_fields[option->field];
	int32_t value = field_load(field, spec);
	struct kernel_spec defaults;

	spec_init(&defaults);
	if (value == field_load(field, &defaults))
		return;
	writer_put(w, "-");
	writer_put(w, option->prefix);
	if (option->kind == 'n')
		put_number(w, value);
	else if (option->kind == 'w')
		put_word(w, catalog, spec, option->field);
}

static void put_shape(struct writer *w, const struct spec_catalog *catalog,
		      const struct kernel_spec *spec)
{
	writer_put(w, "-h");
	put_number(w, spec->signature.hdim_q);
	if (spec->signature.hdim_q != spec->signature.hdim_v) {
		writer_put(w, "x");
		put_number(w, spec->signature.hdim_v);
	}
	writer_put(w, "-");
	put_word(w, catalog, spec, SPEC_FIELD_pipeline);
	put_tile(w, catalog, &spec->tile);
	writer_put(w, "-p");
	put_number(w, spec->pad_s);
	put_number(w, spec->pad_sk);
	put_number(w, spec->pad_d);
	put_number(w, spec->pad_dv);
}

/* Names are made in parts: words of one field each, but for the shape; options; the arch. */
enum { PART_FAMILY, PART_DTYPE, PART_MODE, PART_SHAPE, PART_MASK, PART_BIAS, PART_OPTIONS };
#define N_PARTS (PART_OPTIONS + (int)N_OPTIONS + 1)

static int field_of_part(int part)
{
	static const int fields[PART_OPTIONS] = {
		[PART_FAMILY] = SPEC_FIELD_family, [PART_DTYPE] = SPEC_FIELD_data_type,
		[PART_MODE] = SPEC_FIELD_mode,     [PART_SHAPE] = -1,
		[PART_MASK] = SPEC_FIELD_mask,     [PART_BIAS] = SPEC_FIELD_bias,
	};

	if (part < PART_OPTIONS)
		return fields[part];
	return part < N_PARTS - 1 ? options[part - PART_OPTIONS].field : SPEC_FIELD_gfx_arch;
}

static void put_part(struct writer *w, const struct spec_catalog *catalog,
		     const struct kernel_spec *spec, int part)
{
	if (part == PART_SHAPE) {
		put_shape(w, catalog, spec);
	} else if (part >= PART_OPTIONS && part < N_PARTS - 1) {
		put_option(w, catalog, spec, &options[part - PART_OPTIONS]);
	} else {
		writer_put(w, part == PART_FAMILY ? "" : "-");
		put_word(w, catalog, spec, (enum spec_field)field_of_part(part));
	}
}

int name_parts(int ret_fields[NAME_MOST_PARTS])
{
	_Static_assert(N_PARTS <= NAME_MOST_PARTS, "there is room for all of them");
	for (int i = 0; i < N_PARTS; i++)
		ret_fields[i] = field_of_part(i);
	return N_PARTS;
}

void name_part(const struct spec_catalog *catalog, const struct kernel_spec *spec, int part,
	       char text[SPEC_NAME_BYTES])
{
	struct writer w = {.at = text, .end = text + SPEC_NAME_BYTES};

	*text = '\0';
	put_part(&w, catalog, spec, part);
	*(w.at ? w.at : text) = '\0';
}

static int is_own(const struct spec_catalog *catalog, const struct kernel_spec *spec)
{
	return spec_pipeline_flags(catalog, spec->pipeline) >= 0;
}

static size_t name_format(const struct spec_catalog *catalog, const struct kernel_spec *spec,
			  int with_mode, char name[SPEC_NAME_BYTES])
{
	struct writer w = {.at = name, .end = name + SPEC_NAME_BYTES};

	for (int part = 0; part < N_PARTS; part++)
		if (part != PART_MODE || with_mode)
			put_part(&w, catalog, spec, part);
	if (!w.at) {
		name[0] = '\0';
		return 0;
	}
	*w.at = '\0';
	return (size_t)(w.at - name);
}

size_t spec_name_format(const struct spec_catalog *catalog, const struct kernel_spec *spec,
			char name[SPEC_NAME_BYTES])
{
	return name_format(catalog, spec, !is_own(catalog, spec), name);
}

/* Reading: one part, up to the next '-'. */
struct reader {
	const struct spec_catalog *catalog;
	struct fmha_error *err;
	const char *part;
	size_t length;
};

static int fail(const struct reader *r, const char *what)
{
	return fmha_error_set_field(r->err, FMHA_EINVAL, "kernel", "kernel name: '%.*s': %s",
				    (int)(r->length > 80 ? 80 : r->length), r->part, what);
}

/* "qr-t..." -> "qr"; a "-1" after a prefix belongs to its part: bpc-1 is never canonical, so no
 * part needs it. */
static void next_part(struct reader *r)
{
	r->part += r->length;
	r->part += *r->part == '-';
	r->length = strcspn(r->part, "-");
}

static int read_word(struct reader *r, const char *text, size_t length, enum spec_field field,
		     struct kernel_spec *spec)
{
	int value = spec_word_find_n(r->catalog, field, text, length);
	char what[64];

	if (value < 0) {
		(void)snprintf(what, sizeof(what), "no such %s", spec_field_name(field));
		return fail(r, what);
	}
	spec_set(spec, field, value);
	return 0;
}

static int read_word_part(struct reader *r, enum spec_field field, struct kernel_spec *spec)
{
	int result = read_word(r, r->part, r->length, field, spec);

	if (result == 0)
		next_part(r);
	return result;
}

/* A number of at most five digits at @text; returns its length, 0 when there is none. */
static size_t read_number(const char *text, const char *end, int32_t *ret)
{
	size_t n = 0;

	*ret = 0;
	while (text + n < end && n < 6 && text[n] >= '0' && text[n] <= '9')
		*ret = *ret * 10 + (text[n++] - '0');
	return n;
}

/*
 * Numbers of the fields @first, @first + 1, ...: between @min and @max of them, joined by 'x', a
 * '.' after each @group. Returns how many, or FMHA_EINVAL; @ret_rest is where it stopped.
 */
static int read_numbers(struct reader *r, const char *text, enum spec_field first, int max,
			int group, struct kernel_spec *spec, const char **ret_rest)
{
	const char *end = r->part + r->length;
	int n = 0;

	for (;;) {
		int32_t value;
		size_t length = read_number(text, end, &value);

		if (length == 0)
			return fail(r, "expected a number");
		if (!field_fits(&spec_fields[first + n], value))
			return fail(r, "a number is too large");
		spec_set(spec, first + n, value);
		text += length;
		n++;
		if (n == max || text == end || *text != (n % group == 0 ? '.' : 'x'))
			break;
		text++;
	}
	*ret_rest = text;
	return n;
}

static int read_head_dims(struct reader *r, struct kernel_spec *spec)
{
	const char *rest = r->part;
	int n = r->length && *r->part == 'h'
			? read_numbers(r, r->part + 1, SPEC_FIELD_hdim_q, 2, 3, spec, &rest)
			: fail(r, "expected h and the head dims");

	if (n < 0)
		return n;
	if (n == 1)
		spec->signature.hdim_v = spec->signature.hdim_q;
	if (rest != r->part + r->length)
		return fail(r, "expected h and the head dims");
	next_part(r);
	return 0;
}

static int read_tile(struct reader *r, struct kernel_spec *spec)
{
	const char *end = r->part + r->length;
	const char *rest = r->part;
	int n = r->length && *r->part == 't'
			? read_numbers(r, r->part + 1, SPEC_FIELD_tile_m0, 9, 99, spec, &rest)
			: fail(r, "expected t and the block tile");

	if (n < 0)
		return n;
	if (n != 6 && n != 9)
		return fail(r, "a tile has 6 numbers, or 9 for bwd_dq_dk_dv");
	if (rest < end && *rest == '.') {
		n = read_word(r, rest + 1, (size_t)(end - rest) - 1, SPEC_FIELD_tile_tag, spec);
		if (n < 0)
			return n;
		rest = end;
	}
	if (rest != end)
		return fail(r, "expected t and the block tile");
	next_part(r);
	return 0;
}

/* The inverse of put_stages(). */
static int read_stages(struct reader *r, char prefix, enum spec_field first, int stage2,
		       struct kernel_spec *spec)
{
	const char *rest = r->part;
	int n = r->length && *r->part == prefix
			? read_numbers(r, r->part + 1, first, 9, 3, spec, &rest)
			: fail(r, prefix == 'r' ? "expected r and the waves"
						: "expected w and the warp tiles");

	if (n < 0)
		return n;
	if (n % 3 != 0 || rest != r->part + r->length)
		return fail(r, "a stage has 3 numbers");
	for (int i = n; i < 9; i++)
		spec_set(spec, first + i, i < 6 ? spec_get(spec, first + i - 3) : stage2);
	next_part(r);
	return 0;
}

static int read_pads(struct reader *r, struct kernel_spec *spec)
{
	if (r->length != 5 || *r->part != 'p')
		return fail(r, "expected p and four pads");
	for (int i = 0; i < 4; i++) {
		char pad = r->part[1 + i];

		if (pad != '0' && pad != '1' && pad != '8')
			return fail(r, "a pad is 0, 1 or 8");
		spec_set(spec, SPEC_FIELD_pad_s + i, pad - '0');
	}
	next_part(r);
	return 0;
}

/* The option that the part is. Returns 0, 1 when it is none, FMHA_EINVAL. */
static int read_option(struct reader *r, struct kernel_spec *spec)
{
	const char *end = r->part + r->length;

	for (size_t i = 0; i < N_OPTIONS; i++) {
		const struct option *option = &options[i];
		size_t length = strlen(option->prefix);
		int32_t value = 1;

		if (r->length < length || memcmp(r->part, option->prefix, length) != 0)
			continue;
		if (option->kind == 'w')
			return read_word(r, r->part + length, r->length - length, option->field,
					 spec);
		if (option->kind == 'n')
			length += read_number(r->part + length, end, &value);
		if (length != r->length)
			continue;
		if (!field_fits(&spec_fields[option->field], value))
			return fail(r, "the number is too large");
		spec_set(spec, option->field, value);
		return 0;
	}
	return 1;
}

/* Every mode starts with a letter that no head dims do. *@ret_has: whether there is one. */
static int read_mode(struct reader *r, struct kernel_spec *spec, int *ret_has)
{
	*ret_has = r->length == 0 || *r->part != 'h';
	return *ret_has ? read_word_part(r, SPEC_FIELD_mode, spec) : 0;
}

static int read_name(struct reader *r, struct kernel_spec *spec, int *ret_has_mode)
{
	int n = read_word_part(r, SPEC_FIELD_family, spec);

	if (n == 0)
		n = read_word_part(r, SPEC_FIELD_data_type, spec);
	if (n == 0)
		n = read_mode(r, spec, ret_has_mode);
	if (n == 0)
		n = read_head_dims(r, spec);
	if (n == 0)
		n = read_word_part(r, SPEC_FIELD_pipeline, spec);
	if (n == 0)
		n = read_tile(r, spec);
	if (n == 0)
		n = read_stages(r, 'r', SPEC_FIELD_wave_m0, 1, spec);
	if (n == 0)
		n = read_stages(r, 'w', SPEC_FIELD_warp_m0, 16, spec);
	if (n == 0)
		n = read_pads(r, spec);
	if (n == 0)
		n = read_word_part(r, SPEC_FIELD_mask, spec);
	if (n == 0)
		n = read_word_part(r, SPEC_FIELD_bias, spec);
	while (n == 0 && r->part[r->length] == '-') {
		n = read_option(r, spec);
		if (n == 0)
			next_part(r);
		else if (n == 1)
			return fail(r, "no such option");
	}
	return n < 0 ? n : read_word(r, r->part, r->length, SPEC_FIELD_gfx_arch, spec);
}

int spec_name_parse(const struct spec_catalog *catalog, const char *name,
		    struct kernel_spec *ret_spec, struct fmha_error *err)
{
	struct reader r = {.catalog = catalog, .err = err, .part = name};
	char canonical[SPEC_NAME_BYTES];
	struct kernel_spec spec;
	int n, has_mode = 0;

	spec_init(&spec);
	r.length = strcspn(name, "-");
	n = read_name(&r, &spec, &has_mode);
	if (n < 0)
		return n;
	/* This build's own names had a mode when they were of problems, not of code. */
	if (name_format(catalog, &spec, has_mode || !is_own(catalog, &spec), canonical) == 0 ||
	    strcmp(canonical, name) != 0)
		return fmha_error_set_field(err, FMHA_EINVAL, "kernel",
					    "kernel name: not canonical, which would be %s",
					    canonical);
	*ret_spec = spec;
	return 0;
}
