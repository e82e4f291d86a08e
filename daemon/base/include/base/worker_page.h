/* SPDX-License-Identifier: MIT */
/*
 * worker_page.h: the memory that a front and one of its workers share. The front fills in the first
 * part before it starts the worker, and changes it while that runs; the worker writes the second
 * while it lives, and the front reads it after the worker's death to learn which kernel and whose
 * request was at fault. Both are the same executable, so the layout agrees by itself.
 */
#ifndef FMHAD_BASE_WORKER_PAGE_H
#define FMHAD_BASE_WORKER_PAGE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include <base/config.h>
#include <base/doing.h>

/* The worker inherits these besides the standard streams. */
#define WORKER_CONTROL_FD 3
#define WORKER_PAGE_FD    4

#define WORKER_EXIT_DEVICE 70 /* the device failed; the page says why */

#define WORKER_MAX_QUARANTINED 32
#define WORKER_PAGE_MAGIC      0x66776f726b657231u

#define WORKER_NO_USER DOING_NOBODY

/* Code that is not used until then: by nobody, or not for one user. */
struct worker_quarantined {
	char kernel[PROTO_KERNEL_BYTES]; /* under which name it was last seen */
	uint64_t code;                   /* of a struct plan_stage; 0: not known, the name tells */
	bool everybody;
	uint32_t uid;
	uint64_t until_ns; /* CLOCK_MONOTONIC */
};

/* The quarantine of one device. */
struct worker_quarantine {
	uint32_t n;
	struct worker_quarantined list[WORKER_MAX_QUARANTINED];
};

struct worker_page {
	uint64_t magic, bytes;
	uint32_t device; /* index into config.devices */
	/* Odd while the front is writing it, greater afterwards. */
	atomic_uint config_version;
	struct config config;
	/* The list of the version's last bit is good, the other one is written next. */
	atomic_uint quarantine_version;
	struct worker_quarantine quarantine[2];

	/* The worker's: the kernel that it dies of, whose request that was, a fingerprint of its
	 * problem (0: unknown), and why. */
	char culprit[PROTO_KERNEL_BYTES];
	uint64_t culprit_code; /* as worker_quarantined's */
	uint32_t culprit_uid;  /* WORKER_NO_USER: unknown; the front's to initialise */
	uint64_t culprit_problem;
	/* The loop thread writes what it does and for whom (doing.h). A crash that is no kernel's copies that of
	 * its own thread, if there is any, and says so. */
	struct doing doing;
	uint64_t crashed_doing;
	atomic_uint crashed;
	char reason[256];
	atomic_uint n_sessions; /* clients attached */
	/* The kernel that the loop thread itself is running or launching while loop_busy is set:
	 * who is to blame when the loop does not answer any more. */
	atomic_uint loop_busy;
	char loop_kernel[PROTO_KERNEL_BYTES];
	uint64_t loop_code;
	uint32_t loop_uid; /* as culprit_uid */
	uint64_t loop_problem;
};

/* The front's side and the worker's, which may happen at the same time. */
void worker_page_set_config(struct worker_page *page, const struct config *config);
void worker_page_get_config(struct worker_page *page, struct config *ret_config);

void worker_page_set_quarantine(struct worker_page *page, const struct worker_quarantine *what);
/* Return: its version. */
uint32_t worker_page_get_quarantine(const struct worker_page *page,
				    struct worker_quarantine *ret_what);
/* For the user. */
static inline bool worker_quarantine_has(const struct worker_quarantine *what, uint32_t uid,
					 const char *kernel, uint64_t code, uint64_t now)
{
	for (uint32_t i = 0; i < what->n && i < WORKER_MAX_QUARANTINED; i++) {
		const struct worker_quarantined *entry = &what->list[i];

		if ((entry->everybody || entry->uid == uid) && now < entry->until_ns &&
		    (entry->code ? entry->code == code
				 : strncmp(entry->kernel, kernel, sizeof(entry->kernel)) == 0))
			return true;
	}
	return false;
}

#endif
