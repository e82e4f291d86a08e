/* SPDX-License-Identifier: MIT */
/* prepare_on_host.h: the text of fmha_prepare, thread by thread. By who has kernels/gpu among its folders. */
#ifndef FMHA_TESTS_PREPARE_ON_HOST_H
#define FMHA_TESTS_PREPARE_ON_HOST_H

#include <general/prepare.h>

static inline void prepare_on_host(const struct abi_prepare_args *args)
{
	struct prepare_shared shared;

	for (abi_i32 block = 1; block < args->grid; block++)
		for (abi_i32 i = 0; i < PREPARE_THREADS; i++)
			prepare_pages(args, block, i);
	for (abi_i32 i = 0; args->keys_alone && i < PREPARE_THREADS; i++)
		prepare_keys(args, prepare_room(args), i);
	for (int step = 0; step < PREPARE_STEPS && !args->keys_alone; step++)
		for (abi_i32 i = 0; i < PREPARE_THREADS; i++)
			prepare_step(args, step, i, &shared);
}

#endif
