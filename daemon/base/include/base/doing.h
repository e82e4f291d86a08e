/* SPDX-License-Identifier: MIT */
/*
 * doing.h: what a process's loop does now, and for whom, as one word of memory that survives it: a
 * method of a client's, or the end of one. The front reads a dead worker's (worker_page.h) and knows
 * whose request it was. One store at the beginning of every request and one at its end.
 *
 * The same two places know what a method costs the loop in one piece: with loop_times in the
 * configuration that is measured, in CPU time, so that neither a busy machine nor a thread that was
 * interrupted counts.
 */
#ifndef FMHAD_BASE_DOING_H
#define FMHAD_BASE_DOING_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include <proto/methods.h>

/* Besides the methods: what belongs to none. */
enum doing_what {
	DOING_HANGUP = PROTO_N_METHODS, /* giving back what a client had */
	DOING_COMPLETION,               /* what another thread or the device has ended */
	N_DOING
};

/* The time that the loop has spent on it: every piece, a request, a slice of it or its completion, by itself. */
struct doing_cost {
	uint64_t n, cpu_ns, longest_ns;
};

#define DOING_NOBODY UINT32_MAX /* instead of a user */

struct doing {
	_Atomic uint64_t word; /* 0: nothing, or nobody's */
	bool measures;         /* two system calls a piece */
	struct doing_cost costs[N_DOING];
};

/* Kept for doing_end(): what was there before. */
struct doing_before {
	uint64_t word, cpu_ns;
};

static inline uint64_t doing_word(uint32_t what, uint32_t uid)
{
	return (uint64_t)(what + 1) << 32 | uid;
}

/* The CPU time of the calling thread. */
uint64_t doing_cpu_ns(void);
void doing_count(struct doing *doing, const struct doing_before *before);

/* @doing: may be NULL. */
static inline struct doing_before doing_begin_word(struct doing *doing, uint64_t word)
{
	struct doing_before before = {0};

	if (!doing)
		return before;
	before.word = atomic_load_explicit(&doing->word, memory_order_relaxed);
	atomic_store_explicit(&doing->word, word, memory_order_release);
	if (doing->measures)
		before.cpu_ns = doing_cpu_ns();
	return before;
}

static inline struct doing_before doing_begin(struct doing *doing, uint32_t what, uint32_t uid)
{
	return doing_begin_word(doing, doing_word(what, uid));
}

static inline void doing_end(struct doing *doing, struct doing_before before)
{
	if (!doing)
		return;
	if (doing->measures)
		doing_count(doing, &before);
	atomic_store_explicit(&doing->word, before.word, memory_order_release);
}

/* Return: a name for people, or NULL: nothing. */
const char *doing_name(uint64_t word);

#endif
