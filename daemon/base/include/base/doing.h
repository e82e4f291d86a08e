/* SPDX-License-Identifier: MIT */
/*
 * doing.h: what a process's loop does now, and for whom, as one word of memory that survives it: a
 * method of a client's, or the end of one. The front reads a dead worker's (worker_page.h) and knows
 * whose request it was. One store at the beginning of every request and one at its end.
 */
#ifndef FMHAD_BASE_DOING_H
#define FMHAD_BASE_DOING_H

#include <stdatomic.h>
#include <stdint.h>

#include <proto/methods.h>

/* Besides the methods: what belongs to none. */
enum doing_what {
	DOING_HANGUP = PROTO_N_METHODS, /* giving back what a client had */
	DOING_CHORE,                    /* what is done in slices (chores.h) */
	DOING_COMPLETION,               /* what another thread or the device has ended */
	N_DOING
};

struct doing {
	_Atomic uint64_t word; /* 0: nothing, or nobody's */
};

static inline uint64_t doing_word(uint32_t what, uint32_t uid)
{
	return (uint64_t)(what + 1) << 32 | uid;
}

/* @doing: may be NULL. Return: what was there before, for doing_end(). */
static inline uint64_t doing_begin(struct doing *doing, uint32_t what, uint32_t uid)
{
	uint64_t before;

	if (!doing)
		return 0;
	before = atomic_load_explicit(&doing->word, memory_order_relaxed);
	atomic_store_explicit(&doing->word, doing_word(what, uid), memory_order_release);
	return before;
}

static inline void doing_end(struct doing *doing, uint64_t before)
{
	if (doing)
		atomic_store_explicit(&doing->word, before, memory_order_release);
}

/* Return: a name for people, or NULL: nothing. */
const char *doing_name(uint64_t word);

#endif
