/* SPDX-License-Identifier: MIT */
/* prepare.hip: the kernel that makes a problem's tables where no host looks at them: see prepare.h. */
#include "core/prelude.h"

#include "general/prepare.h"

extern "C" __global__ void FMHA_BOUNDS(PREPARE_THREADS, 1) fmha_prepare(const abi_prepare_args args)
{
	__shared__ prepare_shared shared;
	i32 thread = thread_id();

	let_next_stage_begin();
	if (block_id_x() != 0) {
		prepare_pages(&args, (i32)block_id_x(), thread);
		return;
	}
	UNROLL
	for (int step = 0; step < PREPARE_STEPS; step++) {
		prepare_step(&args, step, thread, &shared);
		block_sync();
	}
}
