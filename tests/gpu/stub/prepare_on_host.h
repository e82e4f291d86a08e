/* SPDX-License-Identifier: MIT */
/* prepare_on_host.h: the text of fmha_prepare, thread by thread. By who has kernels/gpu among its folders. */
#ifndef FMHA_TESTS_PREPARE_ON_HOST_H
#define FMHA_TESTS_PREPARE_ON_HOST_H

#include <general/prepare.h>

static inline void prepare_on_host(const struct abi_prepare_args *args)
{
	struct prepare_shared shared;

	for (abi_i64 i = 0; i < (abi_i64)args->grid * PREPARE_THREADS; i++)
		prepare_pages(args, i, (abi_i64)args->grid * PREPARE_THREADS);
	for (abi_i32 i = 0; i < PREPARE_THREADS; i++)
		prepare_first_step(args, i, &shared);
	for (abi_i32 i = 0; i < PREPARE_THREADS; i++)
		prepare_second_step(args, i, &shared);
	for (abi_i32 i = 0; i < PREPARE_THREADS; i++)
		prepare_third_step(args, i, &shared);
}

#endif
