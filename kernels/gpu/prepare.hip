/* SPDX-License-Identifier: MIT */
/* prepare.hip: the kernel that makes a problem's tables where no host looks at them: see prepare.h. */
#include "core/prelude.h"

#include "general/prepare.h"

extern "C" __global__ void FMHA_BOUNDS(PREPARE_THREADS, 1) fmha_prepare(const abi_prepare_args args)
{
	__shared__ prepare_shared shared;
	i32 thread = thread_id();

	/* what arguments alone say, while the stage before ends */
	const abi_i64 room = prepare_room(&args);

	let_next_stage_begin();
	wait_for_stage_before();
	if (block_id_x() != 0) {
		prepare_pages(&args, (i32)block_id_x(), thread);
		return;
	}
	if (args.keys_alone) {
		prepare_keys(&args, room, thread);
		return;
	}
	UNROLL
	for (int step = 0; step < PREPARE_STEPS; step++) {
		prepare_step(&args, step, thread, &shared);
		block_sync();
	}
}
