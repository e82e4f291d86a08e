// SPDX-License-Identifier: MIT
/* row.c: see specs/row.h. */

#include <proto/error.h>
#include <specs/row.h>

#include "catalog_impl.h"
#include "fields.h"

/* Rows are written by the million: numbers by hand, words by their vocabulary. */
static char *put_number(char *at, int32_t value)
{
	char digits[12];
	int n = 0;
	uint32_t left = value < 0 ? 0u - (uint32_t)value : (uint32_t)value;

	if (left < 10 && value >= 0) {
		*at = (char)('0' + left);
		return at + 1;
	}
	if (value < 0)
		*at++ = '-';
	do
		digits[n++] = (char)('0' + left % 10);
	while (left /= 10);
	while (n)
		*at++ = digits[--n];
	return at;
}

static char *put_field(const struct spec_catalog *catalog, const struct kernel_spec *spec, int i,
		       char *at)
{
	int32_t value = field_load(&spec_fields[i], spec);
	const char *word;

	if (spec_fields[i].kind != FIELD_WORD)
		return put_number(at, value);
	word = spec_word(catalog, i, value);
	return stpcpy(at, word ? word : "?");
}

/* Of AMD's kernels there are no others. */
static int fields_of(const struct spec_catalog *catalog, const struct kernel_spec *spec)
{
	return spec_pipeline_flags(catalog, spec->pipeline) < 0 ? SPEC_N_COLUMNS : SPEC_N_FIELDS;
}

size_t spec_csv_header(int is_own, char line[SPEC_ROW_BYTES])
{
	int n = is_own ? SPEC_N_FIELDS : SPEC_N_COLUMNS;
	char *at = line;

	for (int i = 0; i < n; i++) {
		at = stpcpy(at, spec_fields[i].name);
		*at++ = i + 1 < n ? ',' : '\n';
	}
	*at = '\0';
	return (size_t)(at - line);
}

size_t spec_csv_row(const struct spec_catalog *catalog, const struct kernel_spec *spec,
		    char line[SPEC_ROW_BYTES])
{
	int n = fields_of(catalog, spec);
	char *at = line;

	for (int i = 0; i < n; i++) {
		at = put_field(catalog, spec, i, at);
		*at++ = i + 1 < n ? ',' : '\n';
	}
	*at = '\0';
	return (size_t)(at - line);
}

static inline int is_cell_end(char byte)
{
	return byte == ',' || byte == '\0' || byte == '\n' || byte == '\r';
}

/* A word that rows are not written with, or none at all. */
static const char *parse_synonym(const struct spec_catalog *catalog, int field, const char *cell,
				 struct kernel_spec *spec)
{
	size_t length = strcspn(cell, ",\r\n");
	int value = spec_word_find_n(catalog, field, cell, length);

	if (value < 0)
		return NULL;
	field_store(&spec_fields[field], spec, value);
	return cell + length;
}

/*
 * Reads one cell in one pass, without looking for its end first: rows come by the million too.
 * Returns the place after it, NULL when the field has no such value.
 */
static const char *parse_word(const struct spec_catalog *catalog, int field, const char *cell,
			      struct kernel_spec *spec)
{
	int n;
	const char *const *words = spec_words(catalog, field, &n);

	for (int i = 0; i < n; i++) {
		const char *word = words[i], *at = cell;

		while (*word && *word == *at) {
			word++;
			at++;
		}
		if (*word == '\0' && is_cell_end(*at)) {
			field_store(&spec_fields[field], spec, i);
			return at;
		}
	}
	return parse_synonym(catalog, field, cell, spec);
}

static const char *parse_number(const struct field *field, const char *cell,
				struct kernel_spec *spec)
{
	const char *at = cell + (*cell == '-'), *first = at;
	int32_t value = *cell - '0';

	/* Most cells are a single digit. */
	if (cell[0] >= '0' && cell[0] <= '9' && cell[1] == ',' && field_fits(field, value)) {
		field_store(field, spec, value);
		return cell + 1;
	}
	value = 0;
	while (*at >= '0' && *at <= '9' && at - first < 6)
		value = value * 10 + (*at++ - '0');
	if (at == first || !is_cell_end(*at))
		return NULL;
	if (*cell == '-')
		value = -value;
	if (!field_fits(field, value))
		return NULL;
	field_store(field, spec, value);
	return at;
}

static int bad_cell(const char *name, const char *cell, struct fmha_error *err)
{
	size_t length = strcspn(cell, ",\r\n");

	return fmha_error_set_field(err, FMHA_EINVAL, name, "%s '%.*s': no such value", name,
				    (int)(length > 60 ? 60 : length), cell);
}

int spec_csv_parse(const struct spec_catalog *catalog, const char *line,
		   struct kernel_spec *ret_spec, struct fmha_error *err)
{
	struct kernel_spec spec = {0};
	int n = SPEC_N_FIELDS;

	for (int i = 0; i < n; i++) {
		const struct field *field = &spec_fields[i];
		const char *end = field->kind == FIELD_WORD ? parse_word(catalog, i, line, &spec)
							    : parse_number(field, line, &spec);

		if (!end)
			return bad_cell(field->name, line, err);
		if (i + 1 == SPEC_N_COLUMNS && *end != ',')
			n = SPEC_N_COLUMNS; /* AMD's, or written before there were more */
		if ((*end == ',') != (i + 1 < n))
			return fmha_error_set_field(err, FMHA_EINVAL, field->name,
						    "the row must have %d columns", SPEC_N_FIELDS);
		line = end + 1;
	}
	*ret_spec = spec;
	return 0;
}

size_t spec_json(const struct spec_catalog *catalog, const struct kernel_spec *spec,
		 char text[SPEC_JSON_BYTES])
{
	char name[SPEC_NAME_BYTES];
	char *at = text;

	(void)spec_name_format(catalog, spec, name);
	at = stpcpy(at, "{\"name\":\"");
	at = stpcpy(at, name);
	*at++ = '"';
	for (int i = 0; i < fields_of(catalog, spec); i++) {
		const struct field *field = &spec_fields[i];

		at = stpcpy(at, ",\"");
		at = stpcpy(at, field->name);
		at = stpcpy(at, "\":");
		if (field->kind == FIELD_FLAG) {
			at = stpcpy(at, field_load(field, spec) ? "true" : "false");
		} else if (field->kind == FIELD_WORD) {
			*at++ = '"';
			at = put_field(catalog, spec, i, at);
			*at++ = '"';
		} else {
			at = put_field(catalog, spec, i, at);
		}
	}
	*at++ = '}';
	*at = '\0';
	return (size_t)(at - text);
}

/* "tile": [...] and so on: @n numbers for the fields from @first on. */
static int read_list(const struct at *at, int first, int n, const char *message,
		     struct kernel_spec *spec, struct fmha_error *err)
{
	int index = 0;
	int r = at_want_array(at, err);

	if (r == 0 && cJSON_GetArraySize(at->item) != n)
		r = at_error(at, err, "%s", message);
	for (const cJSON *item = r == 0 ? at->item->child : NULL; item && r == 0;
	     item = item->next, index++) {
		struct at here = at_item(at, item, index);
		int64_t value;

		r = at_int(&here, 0, UINT16_MAX, &value, err);
		if (r == 0 && !field_fits(&spec_fields[first + index], value))
			r = at_error(&here, err, "%lld is no value of %s", (long long)value,
				     spec_fields[first + index].name);
		if (r == 0)
			spec_set(spec, first + index, value);
	}
	return r;
}

static int read_field(const struct spec_catalog *catalog, const struct at *at, int field,
		      struct kernel_spec *spec, struct fmha_error *err)
{
	const struct field *of = &spec_fields[field];
	int64_t value = 0;
	const char *word;
	int r;

	if (of->kind == FIELD_WORD) {
		r = at_string(at, &word, err);
		if (r < 0)
			return r;
		value = spec_word_find(catalog, field, word);
		if (value < 0)
			return at_error(at, err, "'%s' is not a %s", word, of->name);
	} else if (cJSON_IsBool(at->item)) {
		value = cJSON_IsTrue(at->item);
	} else {
		r = at_int(at, INT16_MIN, UINT16_MAX, &value, err);
		if (r < 0)
			return r;
	}
	if (!field_fits(of, value))
		return at_error(at, err, "%lld is no value of %s", (long long)value, of->name);
	spec_set(spec, field, value);
	return 0;
}

static int read_member(const struct spec_catalog *catalog, const struct at *at,
		       struct kernel_spec *spec, struct fmha_error *err)
{
	int is_bwd = spec->signature.family == SPEC_BWD_DQ_DK_DV;
	int field = field_find(at->key, strlen(at->key));

	if (field >= 0)
		return read_field(catalog, at, field, spec, err);
	if (strcmp(at->key, "tile") == 0)
		return read_list(at, SPEC_FIELD_tile_m0, is_bwd ? 9 : 6,
				 is_bwd ? "a tile of bwd_dq_dk_dv must have 9 numbers"
					: "a tile must have 6 numbers",
				 spec, err);
	if (strcmp(at->key, "wave") == 0)
		return read_list(at, SPEC_FIELD_wave_m0, 9, "wave must have 9 numbers", spec, err);
	if (strcmp(at->key, "warp") == 0)
		return read_list(at, SPEC_FIELD_warp_m0, 9, "warp must have 9 numbers", spec, err);
	if (strcmp(at->key, "pads") == 0)
		return read_list(at, SPEC_FIELD_pad_s, 4, "pads must have 4 numbers", spec, err);
	if (strcmp(at->key, "name") == 0) /* as written by spec_json() */
		return 0;
	return at_error(at, err, "there is no field '%s'", at->key);
}

static int read_spec(const struct spec_catalog *catalog, const struct at *at,
		     struct kernel_spec *ret_spec, struct fmha_error *err)
{
	struct at arch = at_key(at, "gfx_arch"), family = at_key(at, "family");
	struct kernel_spec spec;
	int r = at_want_object(at, err);

	spec_init(&spec);
	if (r == 0)
		r = read_field(catalog, &arch, SPEC_FIELD_gfx_arch, &spec, err);
	/* Before the rest: it decides how many numbers a tile has. */
	if (r == 0)
		r = read_field(catalog, &family, SPEC_FIELD_family, &spec, err);
	for (const cJSON *item = r == 0 ? at->item->child : NULL; item && r == 0;
	     item = item->next) {
		struct at here = at_member(at, item);

		r = read_member(catalog, &here, &spec, err);
	}
	if (r == 0)
		*ret_spec = spec;
	return r;
}

int spec_json_read(const struct spec_catalog *catalog, const char *path, spec_json_each each,
		   void *owner, struct fmha_error *err)
{
	struct at document;
	cJSON *root;
	int index = 0;
	int r = json_read(path, &root, err);

	if (r < 0)
		return r;
	document = at_document(root, path);
	for (const cJSON *item = cJSON_IsArray(root) ? root->child : root; item && r == 0;
	     item = item->next) {
		struct at here = cJSON_IsArray(root) ? at_item(&document, item, index) : document;
		struct fmha_error fault = {0};
		struct kernel_spec spec;
		int broken = read_spec(catalog, &here, &spec, &fault) < 0;

		r = each(owner, index++, broken ? NULL : &spec, &fault);
	}
	cJSON_Delete(root);
	return r;
}
