/* SPDX-License-Identifier: MIT */
/*
 * oracle.h: attention evaluated straight from struct fmha_problem, in double. It shares nothing
 * with dispatch or the kernels: element addresses come from the roles' dimensions as base.h states
 * them, so a mistake in the mapping problem -> arguments shows as a wrong result.
 */
#ifndef TESTS_DISPATCH_ORACLE_H
#define TESTS_DISPATCH_ORACLE_H

#include "fixture.h"

struct oracle {
	const struct fixture *f;
	const struct fmha_problem *p; /* strides filled in */
	/* Copies of the inputs that a run overwrites. */
	void *k, *v;
};

/* One sequence. */
struct oracle_sequence {
	int64_t b;
	int64_t q_start, k_start; /* on the packed axes, else 0 */
	int rows, keys;           /* keys: real ones, after an append, without padding */
	int before;               /* keys before an append, padding included */
	int pad;
};

struct oracle_sequence oracle_sequence(const struct oracle *o, int64_t b);
/* Element (i0, ..., i4) of @role. */
double oracle_load(const struct oracle *o, enum fmha_tensor_role role, const int64_t i[5]);
void oracle_store(const struct oracle *o, enum fmha_tensor_role role, const int64_t i[5],
		  double value);
#define AT(...) ((const int64_t[5]){__VA_ARGS__})

/* Address in elements of dimension @d of the key at @position in the cache. */
int64_t oracle_cache_index(const struct oracle *o, bool is_v, const struct oracle_sequence *s,
			   int64_t position, int h, int d);

/* Row @i of head @h: its output and LSE; p, kept and seen of every column (may be NULL). */
double oracle_row(const struct oracle *o, const struct oracle_sequence *s, int h, int i,
		  double *row_o, double *p, double *keep, double *cap_slope);

/* K_NEW and V_NEW written into the private copies, rotated. */
void oracle_append(const struct oracle *o);
/* Q after rotation at (row, head, d) of a sequence. */
double oracle_q(const struct oracle *o, const struct oracle_sequence *s, int i, int h, int d);

#endif
