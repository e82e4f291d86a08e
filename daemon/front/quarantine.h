/* SPDX-License-Identifier: MIT */
/*
 * quarantine.h: whom the deaths of workers are held against. Each is recorded with the kernel that
 * ran, the user who had asked for it, and that request's problem.
 *
 * Code that ends as many workers as quarantine_deaths within quarantine_s is put in quarantine, under
 * whichever names of kernels it ran:
 * for the user whose requests did it, as there may be something special about those; for everybody
 * when several users had a part in it, or a user that may be trusted to mean well. A user who ends
 * twice as many, with whatever kernels, may not open a device for a while. Nor may one whose requests
 * end as many without a kernel, whatever their methods: there is nothing else to keep from that user.
 *
 * Every quarantine ends after quarantine_s; each repetition doubles it, up to a day.
 */
#ifndef FMHAD_QUARANTINE_H
#define FMHAD_QUARANTINE_H

#include <stdbool.h>
#include <stdint.h>

#include <base/worker_page.h>

#define QUARANTINE_DEATHS  2000 /* twice the most that quarantine_deaths can be */
#define QUARANTINE_ENTRIES 128

struct worker_death {
	uint32_t device;
	const char *kernel; /* "": none was running; borrowed */
	uint64_t code;      /* as worker_quarantined's */
	const char *during; /* what the worker did then; NULL: nothing for anybody */
	uint32_t uid;       /* WORKER_NO_USER: unknown */
	bool trusted;       /* the user is an administrator, or unknown */
	uint64_t problem;   /* fingerprint; 0: unknown */
};

/* Kept when it is over, to know a repetition. An empty kernel: the user may open no device. */
struct quarantine_entry {
	uint32_t device;
	struct worker_quarantined what;
	uint64_t problem; /* of the last death */
	uint32_t n_times; /* 0: the entry is free */
};

struct quarantine_death {
	uint64_t when_ns, code, problem; /* code: 0: free */
	uint32_t device, uid;
};

struct quarantine {
	uint32_t n_deaths;                                 /* as many as make one */
	uint64_t period_ns;                                /* within which, and for how long */
	uint32_t next;                                     /* in deaths */
	struct quarantine_death deaths[QUARANTINE_DEATHS]; /* a ring */
	struct quarantine_entry entries[QUARANTINE_ENTRIES];
};

void quarantine_init(struct quarantine *quarantine, const struct config_supervision *rules);

/* A worker has died at @now; what follows from it is logged. Return: whether anything does. */
bool quarantine_add(struct quarantine *quarantine, const struct worker_death *death, uint64_t now);

/* An entry that was in force when the daemon ended. */
void quarantine_restore(struct quarantine *quarantine, uint32_t device,
			const struct worker_quarantined *what, uint64_t now);
/* Ends those of the code that is in quarantine as @kernel on @device, whomever they are for; what
 * was counted against it is forgotten.
 * Return: how many. */
uint32_t quarantine_lift(struct quarantine *quarantine, uint32_t device, const char *kernel);

/* Seconds for which the user may still open no device; 0: it may. */
uint32_t quarantine_ban_s(const struct quarantine *quarantine, uint32_t uid, uint64_t now);

/* Lists what a worker of @device has to know. */
void quarantine_list(const struct quarantine *quarantine, uint32_t device, uint64_t now,
		     struct worker_quarantine *ret_what);

/* Whether an entry is in force. */
bool quarantine_is_active(const struct quarantine_entry *entry, uint64_t now);

#endif
