/* SPDX-License-Identifier: MIT */
/* prepare.hip: the kernel that makes a problem's tables where no host looks at them: see prepare.h. */
#include "core/prelude.h"

#include "general/prepare.h"

extern "C" __global__ void FMHA_BOUNDS(PREPARE_THREADS, 1) fmha_prepare(const abi_prepare_args args)
{
	__shared__ prepare_shared shared;
	i32 thread = thread_id();

	let_next_stage_begin();
	prepare_pages(&args, (i64)block_id_x() * PREPARE_THREADS + thread,
		      (i64)args.grid * PREPARE_THREADS);
	if (block_id_x() != 0)
		return;
	prepare_first_step(&args, thread, &shared);
	block_sync();
	prepare_second_step(&args, thread, &shared);
	block_sync();
	prepare_third_step(&args, thread, &shared);
}
