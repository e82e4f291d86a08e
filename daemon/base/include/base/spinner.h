/* SPDX-License-Identifier: MIT */
/*
 * spinner.h: a loop that looks for the next request for a moment before it sleeps, by the rules of
 * proto/spin.h. While it looks, the loop turns without blocking: every connection, timer and
 * wake-up from another thread is served as always, so nobody waits for somebody else's window. It
 * looks where the last request came from a few times as often as everywhere.
 *
 * On a crowded machine it sleeps at once. Client and daemon that hand each other one core, one
 * asleep while the other works, are rarely interrupted there; two that want a core each are moved
 * apart, and each time that the other one sleeps somebody else has its core when it wakes up (seen:
 * 285 us a round trip in place of 20).
 */
#ifndef FMHAD_BASE_SPINNER_H
#define FMHAD_BASE_SPINNER_H

#include <stdbool.h>
#include <stdint.h>

#include <uv.h>

#include <proto/spin.h>

/* A thing that a loop looks for, again and again, a few times a turn. */
struct spin {
	uv_idle_t turn; /* the owner's to init and stop; while it runs the loop does not block */
	/* Return: whether there was something. */
	bool (*look)(struct spin *spin);
	/* After a look in vain: whether to look again. */
	bool (*goes_on)(struct spin *spin, uint64_t now);
	/* It has not gone on; may be NULL. */
	void (*on_end)(struct spin *spin);
};

void spin_start(struct spin *spin);

/* The spin for requests; it looks at the connection that was served last. */
struct spinner {
	struct spin spin;
	struct proto_spin rules;
	int load_fd; /* /proc/loadavg, or -1 */
	long n_cores;
	bool crowded; /* when it was last looked at: more threads want a core than there are */
	uint64_t load_read_ns;
	uint64_t
		quiet_since_ns; /* when everything that had arrived was done with; 0: nothing yet */
	/* Whether this process has nothing under way on other threads that wants the core;
	 * NULL: it never has. */
	bool (*is_free)(void *owner);
	void *owner;
};

void spinner_init(struct spinner *spinner, uv_loop_t *loop, uint64_t window_us,
		  bool (*look)(struct spin *spin));
void spinner_deinit(struct spinner *spinner);

/* Whether nobody should look for anything without sleeping now. */
bool spinner_is_crowded(struct spinner *spinner);

/* Input has arrived, at @now. */
void spinner_arrival(struct spinner *spinner, uint64_t now);

/* The work that had arrived is done, or an answer that took longer has left. */
void spinner_rest(struct spinner *spinner);

#endif
