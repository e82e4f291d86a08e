/* SPDX-License-Identifier: MIT */
/*
 * leftovers.h: the memory of a run that is over. What is large takes long to give back, 0.2 us a page:
 * that is another thread's work. The user's next run may need the memory before that is done, so that of a
 * few runs it counts no more from now on; of more than that it does until it is gone.
 */
#ifndef FMHAD_WORKER_LEFTOVERS_H
#define FMHAD_WORKER_LEFTOVERS_H

#include "worker.h"

#define LEFTOVERS_LEAST (256u << 10) /* bytes; less is freed at once */

/* @indices, of @indices_bytes, and @workspace: taken, each may be NULL or empty. @charged_bytes: of
 * memory, for both. */
void leftovers_free(struct worker *worker, struct account *account, struct plan_indices *indices,
		    uint64_t indices_bytes, struct device_memory *workspace,
		    uint64_t charged_bytes);

#endif
