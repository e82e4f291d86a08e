/* SPDX-License-Identifier: MIT */
/*
 * spin.h: when to wait for the other side of a socket without going to sleep.
 *
 * To sleep and be woken costs 5 to 20 us where an idle core has to be woken up, several times what
 * a small request takes. A side that has reason to expect the next message within a short window
 * therefore looks for it again and again instead, giving the core to whoever wants it after each
 * look (sched_yield). Both sides use the same rules, so that what is spent is bounded by what was
 * saved:
 *
 *  - Only after PROTO_SPIN_STREAK waits in a row that ended within the window. A client that calls
 *    once a millisecond never makes anybody spin, and silence after a burst costs one window.
 *  - The window is of the order of what sleeping costs: waiting longer than that could at best
 *    halve the latency, while the core is lost to everybody else.
 *  - A look that comes late means that somebody else had work for this core. Then sleeping is
 *    right: the kernel wakes a sleeper before it resumes a busy thread, but makes one that yields
 *    wait. Spinning pauses, twice as long each time that this happens again, so that on a busy
 *    machine it costs below a percent.
 *  - Never on one core, where the other side cannot run meanwhile.
 *
 * Pure bookkeeping: the caller brings the time (ns, monotonic), looks and yields.
 */
#ifndef PROTO_SPIN_H
#define PROTO_SPIN_H

#include <stdbool.h>
#include <stdint.h>

#define PROTO_SPIN_WINDOW_US     50 /* the default; the kernel's advice for busy_poll is the same */
#define PROTO_SPIN_WINDOW_MAX_US 1000
#define PROTO_SPIN_STREAK        4
#define PROTO_SPIN_LATE_NS       200000
#define PROTO_SPIN_PAUSE_NS      10000000 /* the first one */
#define PROTO_SPIN_PAUSE_MAX_NS  1000000000

struct proto_spin {
	uint64_t window_ns; /* 0: never */
	uint32_t n_short;   /* waits in a row that fitted the window, as far as they are counted */
	uint64_t looked_ns; /* the last look */
	uint64_t pause_ns;  /* how long the last pause was meant to be */
	uint64_t paused_until_ns;
};

/* @n_cores: of the machine; that this process is bound to one says nothing about the other side */
static inline void proto_spin_init(struct proto_spin *spin, uint64_t window_us, long n_cores)
{
	*spin = (struct proto_spin){.window_ns = n_cores > 1 ? window_us * 1000 : 0};
}

/* A wait, spinning or asleep, has ended after @ns. */
static inline void proto_spin_waited(struct proto_spin *spin, uint64_t ns)
{
	if (ns > spin->window_ns)
		spin->n_short = 0;
	else if (spin->n_short < PROTO_SPIN_STREAK)
		spin->n_short++;
}

/* Whether the wait that begins now is to be spun. */
static inline bool proto_spin_begin(struct proto_spin *spin, uint64_t now)
{
	spin->looked_ns = now;
	return spin->window_ns > 0 && spin->n_short == PROTO_SPIN_STREAK &&
	       now >= spin->paused_until_ns;
}

/* After a look in vain: whether to look again. @began: as given to proto_spin_begin() */
static inline bool proto_spin_go_on(struct proto_spin *spin, uint64_t began, uint64_t now)
{
	uint64_t since_look = now - spin->looked_ns;

	spin->looked_ns = now;
	if (since_look > PROTO_SPIN_LATE_NS) {
		bool again = now - spin->paused_until_ns < PROTO_SPIN_PAUSE_MAX_NS;
		uint64_t pause_ns = again ? 2 * spin->pause_ns : 0;

		if (pause_ns < PROTO_SPIN_PAUSE_NS)
			pause_ns = PROTO_SPIN_PAUSE_NS;
		if (pause_ns > PROTO_SPIN_PAUSE_MAX_NS)
			pause_ns = PROTO_SPIN_PAUSE_MAX_NS;
		spin->pause_ns = pause_ns;
		spin->paused_until_ns = now + pause_ns;
		return false;
	}
	return now - began < spin->window_ns;
}

#endif
