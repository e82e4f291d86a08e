/* SPDX-License-Identifier: MIT */
/*
 * words.hip: what a stream does with a word that other processes' streams see, too, where the
 * runtime's own operations on words fail: a kernel of one wave waits for it or writes it
 * (abi_word_args). AMD only.
 */
#include "core/prelude.h"

#include "general/words.h"

extern "C" __global__ void FMHA_BOUNDS(WORD_THREADS, 1) fmha_word(const abi_word_args args)
{
	if (thread_id() != 0)
		return;
	/* Of the whole system: neither another process nor another device may see an older one. */
	if (args.writes) {
		__atomic_store_n(args.word, args.value, __ATOMIC_RELEASE);
		return;
	}
	while ((i32)(__atomic_load_n(args.word, __ATOMIC_ACQUIRE) - args.value) < 0)
		__builtin_amdgcn_s_sleep(8);
}
