/* SPDX-License-Identifier: MIT */
/* fields.h: the field list as a table, for code that treats all fields alike. */
#ifndef SPECS_FIELDS_H
#define SPECS_FIELDS_H

#include <string.h>

#include <specs/spec.h>

enum field_kind { FIELD_WORD, FIELD_FLAG, FIELD_PAD, FIELD_INT };
enum field_type { FIELD_U8, FIELD_U16, FIELD_I16, FIELD_I32 }; /* the last: of shapes only */

struct field {
	const char *name;
	uint16_t offset; /* into struct kernel_spec */
	uint8_t kind;    /* enum field_kind */
	uint8_t type;    /* enum field_type */
	int32_t min, max;
};

extern const struct field spec_fields[SPEC_N_FIELDS];

typedef uint64_t field_set; /* bit n: field n */
#define FIELD_BIT(name) ((field_set)1 << SPEC_FIELD_##name)

/* The fields of struct kernel_signature and of struct kernel_tile. */
extern const field_set spec_signature_fields;
extern const field_set spec_tile_fields;

static inline int32_t field_load(const struct field *field, const void *spec)
{
	const uint8_t *at = (const uint8_t *)spec + field->offset;
	uint16_t wide;

	if (field->type == FIELD_U8)
		return *at;
	memcpy(&wide, at, sizeof(wide));
	return field->type == FIELD_I16 ? (int16_t)wide : wide;
}

static inline void field_store(const struct field *field, void *spec, int32_t value)
{
	uint8_t *at = (uint8_t *)spec + field->offset;
	uint16_t wide = (uint16_t)value;

	if (field->type == FIELD_U8)
		*at = (uint8_t)value;
	else
		memcpy(at, &wide, sizeof(wide));
}

/* Returns the field's number, or -1. @name need not end with NUL. */
int field_find(const char *name, size_t length);

/* 1 when @value can be stored in the field; word numbers are not judged. */
static inline int field_fits(const struct field *field, int64_t value)
{
	return value >= field->min && value <= field->max &&
	       (field->kind != FIELD_PAD || value <= 1 || value == SPEC_PAD_8);
}

#endif
