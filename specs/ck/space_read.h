/* SPDX-License-Identifier: MIT */
/* space_read.h: the pieces that blocks and tile generators are made of, as they are read. */
#ifndef SPECS_SPACE_READ_H
#define SPECS_SPACE_READ_H

#include "catalog_impl.h"

#define SPACE_MAX_AXES        24
#define SPACE_MAX_AXIS_FIELDS 24
#define SPACE_MAX_RULES       24

struct axis {
	field_set bits;
	int n_fields;
	int n_values;
	uint8_t field[SPACE_MAX_AXIS_FIELDS];
	int32_t *value; /* n_values rows of n_fields */
};

/* Rules and the level at which each is judged: -1 before the first axis, n after axis n. */
struct rule_list {
	int n;
	int8_t level[SPACE_MAX_RULES];
	struct expr rule[SPACE_MAX_RULES];
};

/* Assignments, in order: a constant or an expression. */
struct set_list {
	int n;
	uint8_t field[SPACE_MAX_AXIS_FIELDS];
	int32_t constant[SPACE_MAX_AXIS_FIELDS];
	struct expr value[SPACE_MAX_AXIS_FIELDS]; /* without code: the constant */
};

/* An allow-list of a sweep; `present` with n 0 lets nothing through. */
#define SWEEP_MAX_VALUES 32
struct allow_list {
	int present;
	int n;
	int32_t value[SWEEP_MAX_VALUES];
};

struct sweep {
	char variant[32];
	struct allow_list allow[SPEC_N_FIELDS]; /* by field; only some fields have lists */
};

int read_axes(const struct spec_catalog *catalog, const struct at *list, const struct at *named,
	      const struct sweep *sweep, struct axis *axes, int *n_axes, struct fmha_error *err);
int read_axis_rows(const struct spec_catalog *catalog, const struct at *values, struct axis *axis,
		   struct fmha_error *err);
int axis_fields(const struct at *at, const char *key, struct axis *axis, struct fmha_error *err);
int read_rules(const struct at *list, const struct expr_scope *scope, struct rule_list *rules,
	       struct fmha_error *err);
int read_set(const struct at *object, const struct expr_scope *scope, struct set_list *set,
	     struct fmha_error *err);
int read_value(const struct spec_catalog *catalog, const struct at *at, int field, int32_t *ret,
	       struct fmha_error *err);
void set_apply(const struct set_list *set, struct kernel_spec *spec);
void axis_deinit(struct axis *axis);
void rules_deinit(struct rule_list *rules);
void set_deinit(struct set_list *set);
/* Gives each rule its level, from the level at which each field is known. */
void rules_set_levels(struct rule_list *rules, const int8_t level_of_field[SPEC_N_FIELDS]);

static inline int rules_hold(const struct rule_list *rules, int level,
			     const struct kernel_spec *spec)
{
	for (int i = 0; i < rules->n; i++)
		if (rules->level[i] == level && !expr_holds(&rules->rule[i], spec))
			return 0;
	return 1;
}

static inline void axis_assign(const struct axis *axis, int row, struct kernel_spec *spec)
{
	const int32_t *value = axis->value + (size_t)row * (size_t)axis->n_fields;

	for (int i = 0; i < axis->n_fields; i++)
		field_store(&spec_fields[axis->field[i]], spec, value[i]);
}

#endif
