/* SPDX-License-Identifier: MIT */
/* set_read.c: one declaration of a kernel set, from JSON. What it may say is told in specs/set.h. */
#include <stdio.h>
#include <stdlib.h>

#include <proto/error.h>

#include "set_impl.h"

/* ---- set file ---- */

/* A kernel set as a file declares it. */

static int add_declaration(struct expansion *x, const struct at *at)
{
	struct declaration *declaration = calloc(1, sizeof(*declaration));
	int r;

	if (!declaration)
		return no_memory(x->err);
	declaration->at = *at;
	r = declaration_read(x->set->catalog, declaration, x->err);
	if (r == 0)
		r = expansion_run(x, declaration);
	free(declaration);
	return r;
}

static int add_document(struct expansion *x, const struct at *document)
{
	static const char *const keys[] = {"set", "rules", "kernels", NULL};
	struct at name = at_key(document, "set"), rules = at_key(document, "rules"),
		  kernels = at_key(document, "kernels");
	const char *text;
	int index = 0;
	int r = at_object(document, keys, x->err);

	if (r < 0)
		return r;
	r = at_string(&name, &text, x->err);
	if (r < 0)
		return r;
	if (rules.item) {
		r = at_string(&rules, &text, x->err);
		if (r == 0 && !x->rules)
			x->rules = text;
	}
	if (r < 0)
		return r;
	r = at_want_array(&kernels, x->err);
	for (const cJSON *item = r == 0 ? kernels.item->child : NULL; item && r == 0;
	     item = item->next) {
		struct at here = at_item(&kernels, item, index++);

		r = add_declaration(x, &here);
	}
	return r;
}

int spec_set_add_file(struct spec_set *set, const char *path, const char *arch, const char *rules,
		      struct fmha_error *err)
{
	struct expansion *x;
	struct at at;
	cJSON *document;
	int number = arch ? spec_arch_find(set->catalog, arch) : -1;
	int r;

	if (arch && number < 0)
		return fmha_error_set_field(err, FMHA_EINVAL, "arch", "arch '%s': there is none",
					    arch);
	r = json_read(path, &document, err);
	if (r < 0)
		return r;
	x = calloc(1, sizeof(*x));
	if (!x) {
		cJSON_Delete(document);
		return no_memory(err);
	}
	x->set = set;
	x->rules = rules;
	x->arch = number;
	x->autofill_arch = -1;
	x->err = err;
	at = at_document(document, path);
	r = add_document(x, &at);
	expansion_deinit(x);
	free(x);
	cJSON_Delete(document);
	return r;
}

static int add_value(const struct at *at, struct choice *choice, int32_t value,
		     struct fmha_error *err)
{
	if (choice->n == SET_MAX_VALUES)
		return at_error(at, err, "more than %d values", SET_MAX_VALUES);
	choice->value[choice->n++] = value;
	return 0;
}

static int is_any(const struct at *at)
{
	return cJSON_IsString(at->item) && strcmp(at->item->valuestring, "*") == 0;
}

static int claim(const struct at *at, struct declaration *d, field_set bits, struct fmha_error *err)
{
	if (d->said & bits)
		return at_error(at, err, "is said twice");
	d->said |= bits;
	return 0;
}

/* 0 is no size: such a field is not said. */
static int is_number_of_tile(int field)
{
	return field >= SPEC_FIELD_tile_m0 && field <= SPEC_FIELD_warp_k2;
}

/* One value, a list, or "*". */
static int read_choice(const struct spec_catalog *catalog, const struct at *at, int field,
		       struct declaration *d, struct fmha_error *err)
{
	struct choice *choice = &d->choices[field];
	int32_t value;
	int index = 0;
	int r = claim(at, d, (field_set)1 << field, err);

	if (r < 0)
		return r;
	if (is_any(at)) {
		d->any |= (field_set)1 << field;
		return 0;
	}
	if (!cJSON_IsArray(at->item)) {
		r = read_value(catalog, at, field, &value, err);
		if (r == 0 && value == 0 && is_number_of_tile(field))
			d->said &= ~((field_set)1 << field);
		else if (r == 0)
			r = add_value(at, choice, value, err);
		return r;
	}
	if (cJSON_GetArraySize(at->item) == 0)
		return at_error(at, err, "an empty list means no kernel");
	for (const cJSON *item = at->item->child; item && r == 0; item = item->next) {
		struct at here = at_item(at, item, index++);

		r = read_value(catalog, &here, field, &value, err);
		if (r == 0)
			r = add_value(&here, choice, value, err);
	}
	return r;
}

/* 128, or "192x128". */
static int read_pair(const struct at *at, struct declaration *d, struct fmha_error *err)
{
	struct spec_head_dims pair;
	int64_t number = 0;
	int r;

	if (d->n_pairs == SET_MAX_VALUES)
		return at_error(at, err, "more than %d values", SET_MAX_VALUES);
	if (cJSON_IsString(at->item)) {
		unsigned q, v;
		int n = 0;

		if (sscanf(at->item->valuestring, "%5ux%5u%n", &q, &v, &n) != 2 ||
		    at->item->valuestring[n] || !q || !v || q > UINT16_MAX || v > UINT16_MAX)
			return at_error(at, err, "must be a number, or such as 192x128");
		pair = (struct spec_head_dims){(uint16_t)q, (uint16_t)v};
	} else {
		r = at_int(at, 1, UINT16_MAX, &number, err);
		if (r < 0)
			return r;
		pair = (struct spec_head_dims){(uint16_t)number, (uint16_t)number};
	}
	d->pairs[d->n_pairs++] = pair;
	return 0;
}

static int read_head_dims(const struct at *at, struct declaration *d, struct fmha_error *err)
{
	const field_set both = FIELD_BIT(hdim_q) | FIELD_BIT(hdim_v);
	int index = 0;
	int r = claim(at, d, both, err);

	if (r == 0 && is_any(at)) {
		d->any |= both;
		return 0;
	}
	if (r == 0 && !cJSON_IsArray(at->item))
		return read_pair(at, d, err);
	if (r == 0 && cJSON_GetArraySize(at->item) == 0)
		r = at_error(at, err, "an empty list means no kernel");
	for (const cJSON *item = r == 0 ? at->item->child : NULL; item && r == 0;
	     item = item->next) {
		struct at here = at_item(at, item, index++);

		r = read_pair(&here, d, err);
	}
	return r;
}

/* "tile": [128, 64, 32, 0, 32]: up to 9 numbers for the fields from @first on; 0: not said. */
static int read_numbers(const struct at *at, int first, struct declaration *d,
			struct fmha_error *err)
{
	int index = 0;
	int r = 0;

	for (int f = first; f < first + 9 && is_any(at) && r == 0; f++) {
		r = claim(at, d, (field_set)1 << f, err);
		d->any |= (field_set)1 << f;
	}
	if (is_any(at))
		return r;
	r = at_want_array(at, err);
	if (r == 0 && cJSON_GetArraySize(at->item) > 9)
		r = at_error(at, err, "must have 9 numbers at most");
	for (const cJSON *item = r == 0 ? at->item->child : NULL; item && r == 0;
	     item = item->next, index++) {
		struct at here = at_item(at, item, index);
		field_set bit = (field_set)1 << (first + index);
		int32_t value = 0;

		if (is_any(&here)) {
			r = claim(&here, d, bit, err);
			d->any |= bit;
			continue;
		}
		r = read_value(NULL, &here, first + index, &value, err);
		if (r < 0 || value == 0)
			continue;
		r = claim(&here, d, bit, err);
		if (r == 0)
			r = add_value(&here, &d->choices[first + index], value, err);
	}
	return r;
}

/* "tft*" */
static int read_pads(const struct at *at, struct declaration *d, struct fmha_error *err)
{
	const char *text;
	int r = at_string(at, &text, err);

	if (r == 0 && is_any(at))
		text = "****";
	if (r == 0 && (strlen(text) != 4 || strspn(text, "ft8*") != 4))
		r = at_error(at, err, "must be four of f, t, 8 and *");
	for (int i = 0; i < 4 && r == 0; i++) {
		int field = SPEC_FIELD_pad_s + i;

		r = claim(at, d, (field_set)1 << field, err);
		if (text[i] == '*')
			d->any |= (field_set)1 << field;
		else if (r == 0)
			r = add_value(at, &d->choices[field],
				      text[i] == '8' ? SPEC_PAD_8 : text[i] == 't', err);
	}
	return r;
}

/* A profile or a receipt, by name or number: they are the same list. */
static int read_profile(const struct spec_catalog *catalog, const struct at *at,
			struct declaration *d, struct fmha_error *err)
{
	const char *text = at->item->valuestring;
	char number[16];

	if (cJSON_IsNumber(at->item)) {
		(void)snprintf(number, sizeof(number), "%d", at->item->valueint);
		text = number;
	} else if (!cJSON_IsString(at->item)) {
		return at_error(at, err, "must be a profile's name or number");
	}
	if (d->profile >= 0)
		return at_error(at, err, "profile and receipt exclude each other");
	d->profile = spec_profile_parse(catalog, text);
	if (d->profile < 0)
		return at_error(at, err, "'%s': there is no such profile", text);
	d->receipt = spec_profile_kernels_of(catalog, d->profile);
	if (d->receipt < 0)
		d->receipt = 0;
	return 0;
}

static int read_member(const struct spec_catalog *catalog, const struct at *at,
		       struct declaration *d, struct fmha_error *err)
{
	int field = field_find(at->key, strlen(at->key));

	if (field >= 0)
		return read_choice(catalog, at, field, d, err);
	if (strcmp(at->key, "hdim") == 0)
		return read_head_dims(at, d, err);
	if (strcmp(at->key, "tile") == 0)
		return read_numbers(at, SPEC_FIELD_tile_m0, d, err);
	if (strcmp(at->key, "wave") == 0)
		return read_numbers(at, SPEC_FIELD_wave_m0, d, err);
	if (strcmp(at->key, "warp") == 0)
		return read_numbers(at, SPEC_FIELD_warp_m0, d, err);
	if (strcmp(at->key, "pads") == 0)
		return read_pads(at, d, err);
	if (strcmp(at->key, "profile") == 0 || strcmp(at->key, "receipt") == 0)
		return read_profile(catalog, at, d, err);
	return at_error(at, err, "there is no field '%s'", at->key);
}

int declaration_read(const struct spec_catalog *catalog, struct declaration *d,
		     struct fmha_error *err)
{
	int r = at_want_object(&d->at, err);

	d->profile = -1;
	for (const cJSON *item = r == 0 ? d->at.item->child : NULL; item && r == 0;
	     item = item->next) {
		struct at here = at_member(&d->at, item);

		r = read_member(catalog, &here, d, err);
	}
	if (r == 0 && !(d->said & FIELD_BIT(family)))
		r = at_error(&d->at, err, "family is missing");
	return r;
}
