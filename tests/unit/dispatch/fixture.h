/* SPDX-License-Identifier: MIT */
/*
 * fixture.h: problems with exactly sized memory behind each tensor, and a device that accepts what
 * a test tells it to.
 */
#ifndef TESTS_DISPATCH_FIXTURE_H
#define TESTS_DISPATCH_FIXTURE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include <dispatch/plan.h>
#include <proto/error.h>
#include <proto/problem.h>

/* A device whose kernels exist by decree. */
struct decree {
	struct plan_device device;
	unsigned missing;         /* bit family: no kernel */
	bool needs_dq_acc;        /* dq_dk_dv does not write dQ itself */
	uint64_t workspace_bytes; /* private, of every stage */
	union abi_args seen[ABI_N_FAMILIES];
	uint32_t seen_dtype[ABI_N_FAMILIES];
};

struct fixture {
	struct fmha_problem problem;
	struct plan_binding bindings[FMHA_N_TENSORS];
	struct plan_choice choice;
	struct decree decree;
	struct plan plan;
	struct fmha_error err;
	void *workspace;
	union abi_args args[PLAN_MAX_STAGES];
	struct plan_indices *indices;
};

void decree_init(struct decree *decree, uint32_t compute_units);

void fixture_init(struct fixture *f, uint32_t op, uint32_t mode);
void fixture_deinit(struct fixture *f);
/* The role becomes present, packed. */
void fixture_add(struct fixture *f, enum fmha_tensor_role role, uint32_t dtype);
/* q, k, v, o: batch 2, heads 4 and 2, 5 x 7, hdim 16 and 8, f32. */
void fixture_forward(struct fixture *f, uint32_t mode);
void fixture_backward(struct fixture *f, uint32_t mode);
/* Memory for every present tensor, exactly as large as its span, zeroed. Again after changes. */
void fixture_allocate(struct fixture *f);
int32_t *fixture_ints(struct fixture *f, enum fmha_tensor_role role);
int fixture_build(struct fixture *f);
/* plan_read() and plan_place(): kernels read the judged integers where they are. */
int bind_plan(const struct plan *plan, const struct plan_binding bindings[FMHA_N_TENSORS],
	      void *workspace, void *head, union abi_args args[PLAN_MAX_STAGES],
	      struct plan_indices **ret_indices, struct fmha_error *err);
/* Builds, allocates what is missing, binds. */
int fixture_bind(struct fixture *f);

#define assert_fails(f, call, want_code, want_field)                                               \
	do {                                                                                       \
		(f)->err = (struct fmha_error){0};                                                 \
		assert_int_equal(call, want_code);                                                 \
		assert_string_equal((f)->err.field, want_field);                                   \
		assert_true((f)->err.msg[0] != '\0');                                              \
	} while (0)
#define assert_works(f, call)                                                                      \
	do {                                                                                       \
		int r_ = (call);                                                                   \
		if (r_ < 0)                                                                        \
			fail_msg("%s: %d %s: %s", #call, r_, (f)->err.field, (f)->err.msg);        \
	} while (0)

#endif
