/* SPDX-License-Identifier: MIT */
/* Backward on the CPU against the reference in double: every feature, edges, determinism. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "backward_case.h"
#include "launch.h"

/* Runs @c on every level of this machine. */
static void check(struct backward_case c)
{
	struct backward_problem *p = backward_problem_new(&c, 1);

	for (int level = CPU_PORTABLE; level <= CPU_X86_64_V4 && launch_has_level(level); level++) {
		backward_problem_poison(p);
		backward_problem_run(p, level, 1 + level);
		backward_problem_check(p, backward_tolerance(c.dtype));
	}
	backward_problem_free(p);
}

/* The smallest of everything; tests change what they are about. */
static struct backward_case plain(uint32_t dtype)
{
	return (struct backward_case){.dtype = dtype,
				      .batch = 2,
				      .nhead_q = 2,
				      .nhead_k = 2,
				      .seqlen_q = 70,
				      .seqlen_k = 90,
				      .hdim_q = 32,
				      .hdim_v = 32,
				      .window_left = -1,
				      .window_right = -1};
}

static void plain_in_every_type(void **state)
{
	(void)state;
	for (uint32_t dtype = ABI_F32; dtype <= ABI_BF16; dtype++)
		check(plain(dtype));
}

static const struct CMUnitTest tests[] = {
	cmocka_unit_test(plain_in_every_type),
};

int main(void)
{
	return cmocka_run_group_tests(tests, NULL, NULL);
}
