/* SPDX-License-Identifier: MIT */
/* Whether the shapes of the tiers are problems that can be: fmhactl bench and tune take them as they are. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include <proto/problem.h>
#include <specs/shapes.h>

#include "recipe.h"

struct tally {
	int n, n_refused;
};

static int check_shape(void *owner, const struct spec_shape *shape)
{
	struct tally *tally = owner;
	struct fmha_error err = {0};
	static struct recipe recipe;
	int r;

	recipe_from_shape(&recipe, shape);
	r = recipe_make(&recipe, &err);
	for (uint32_t role = 0; role < FMHA_N_TENSORS; role++) {
		struct fmha_tensor *tensor = &recipe.problem.tensor[role];

		tensor->buffer = tensor->data ? role + 1 : 0;
		tensor->data = NULL;
	}
	if (r == 0)
		r = problem_check(&recipe.problem, &err);
	recipe_deinit(&recipe);
	tally->n++;
	if (r < 0) {
		tally->n_refused++;
		print_error("%s, shape %d: %s\n", shape->group, tally->n, err.msg);
	}
	return 0;
}

static void every_shape_of_the_tiers_is_a_valid_problem(void **state)
{
	struct fmha_error err = {0};
	struct tally tally = {0};

	(void)state;
	/* It includes the others. */
	assert_int_equal(spec_shapes_read(NULL, "nightly", check_shape, &tally, &err), 0);
	assert_true(tally.n > 4000);
	assert_int_equal(tally.n_refused, 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(every_shape_of_the_tiers_is_a_valid_problem),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
