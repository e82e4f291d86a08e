/* SPDX-License-Identifier: MIT */
/* set_impl.h: a kernel set on its way from its file to kernels. */
#ifndef SPECS_SET_IMPL_H
#define SPECS_SET_IMPL_H

#include <specs/set.h>

#include "tiles.h"

#define SET_MAX_VALUES 64
#define SET_MAX_SPACES 16

/* A declaration's word on a field. */
struct choice {
	int n; /* 0: nothing, or any */
	int32_t value[SET_MAX_VALUES];
};

struct declaration {
	struct at at;
	field_set said, any; /* any: "*" */
	int profile;         /* -1: none */
	int receipt;
	int n_pairs; /* of "hdim"; 0: hdim_q and hdim_v stand for themselves */
	struct spec_head_dims pairs[SET_MAX_VALUES];
	struct choice choices[SPEC_N_FIELDS];
};

/* The space that "*" looks into, made when it is first needed. */
struct set_space {
	int arch, family, receipt;
	struct spec_space *space;
};

struct spec_set {
	const struct spec_catalog *catalog;
	struct kernel_spec *kernels;
	size_t n, n_allocated;
	uint32_t *slots; /* a hash table of index + 1, a power of two in size */
	size_t n_slots;
};

/* set_read.c: fills @ret, whose `at` is set, from the JSON there. */
int declaration_read(const struct spec_catalog *catalog, struct declaration *ret,
		     struct fmha_error *err);

/* One file being added. */
struct expansion {
	struct spec_set *set;
	const struct declaration *declaration;
	const char *rules; /* NULL: AMD's where an arch has them, else the arch's own */
	int arch;          /* -1: any */
	int n_fields;      /* before the tile's, in the order in which they are given values */
	uint8_t fields[SPEC_N_FIELDS];
	uint64_t n_steps; /* combinations looked at: a bound of the work */
	uint64_t n_kept;  /* of this declaration */
	struct fmha_error first_fault;
	int autofill_arch; /* -1: none is loaded */
	struct autofill *autofill;
	int n_spaces;
	struct set_space spaces[SET_MAX_SPACES];
	struct fmha_error *err;
};

/* set_expand.c: adds the kernels of one declaration. */
int expansion_run(struct expansion *x, const struct declaration *declaration);
void expansion_deinit(struct expansion *x);
int set_add(struct spec_set *set, const struct kernel_spec *spec, struct fmha_error *err);

/* autofill.c: section "autofill" of the rules, compiled for an arch. */
struct autofill;
int autofill_new(const struct spec_catalog *catalog, int arch, int arch_space,
		 struct autofill **ret, struct fmha_error *err);
struct autofill *autofill_free(struct autofill *autofill);
/* Gives the fields that are not in @said their values. */
void autofill_apply(const struct autofill *autofill, field_set said, struct kernel_spec *spec);
/* Finds mistakes in the section at load time. */
int autofill_check(const struct spec_catalog *catalog, int arch, int arch_space,
		   struct fmha_error *err);

#endif
