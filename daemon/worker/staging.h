/* SPDX-License-Identifier: MIT */
/*
 * staging.h: what a run needs on a device whose memory the host does not see. Its integer tensors
 * are copied to the host behind whatever the run waits for, judged there, and the judged copies are
 * uploaded, unless they lie on the device already (judged.h); so is the head of a backward
 * workspace. All of that lies in one block that the device copies from and to by itself, so that no
 * thread waits for a copy. Tensors in host memory (a client's memfd) have a copy on the device,
 * which is brought up to date before the run and copied back after it. On a device that shares the
 * host's memory there is only the judged copy.
 */
#ifndef FMHAD_WORKER_STAGING_H
#define FMHAD_WORKER_STAGING_H

#include <device/device.h>
#include <dispatch/plan.h>

/* All zero: none. */
struct staging {
	struct device_memory block;
	void *head;       /* of the workspace, as prepared; in the block */
	void *tables;     /* judged copies, for the upload; in the block */
	uint64_t fetched; /* bit role: bindings[].host lies in the block */
};

/* Bytes that judged integers need behind a workspace, where they have no place of their own; 0 on a
 * device that shares memory. */
uint64_t staging_device_bytes(const struct device *device, const struct plan *plan,
			      uint64_t workspace_bytes);

/* Bytes of the host's memory that a run takes: the block, and the judged copies. */
uint64_t staging_host_bytes(const struct device *device, const struct plan *plan);

/* Whether a run of the plan has integer tensors that have to be copied to the host first. */
bool staging_fetches(const struct device *device, const struct plan *plan);

/* Whether every run of the plan on the same buffers and workspace has the same arguments and
 * copies, because nothing of them depends on what lies in a buffer. */
bool staging_is_constant(const struct device *device, const struct plan *plan);

/*
 * Makes the block and points bindings[].host of integer tensors into it. Return: 1: staging_fetch()
 * has something to copy before plan_read(), 0: it has not, FMHA_ENOMEM,
 * FMHA_ENOTSUP.
 */
int staging_init(struct device *device, const struct plan *plan,
		 struct plan_binding bindings[FMHA_N_TENSORS], struct staging *staging,
		 struct fmha_error *err);
void staging_deinit(struct device *device, struct staging *staging);

bool staging_is_fetched(const struct staging *staging, uint32_t role);

/* Makes @launch one that only copies the integer tensors to the host. */
void staging_fetch(const struct plan *plan, const struct plan_binding bindings[FMHA_N_TENSORS],
		   const struct staging *staging, struct device_launch *launch);

/* Where that place is. */
void *staging_indices(const struct plan *plan, const struct plan_indices *indices,
		      const struct device_memory *workspace);

/* After plan_place(): says what to copy and clear. @tables: where judged integers go; NULL: they are there. */
void staging_upload(struct device *device, const struct plan *plan,
		    const struct plan_binding bindings[FMHA_N_TENSORS],
		    const struct plan_indices *indices, const struct staging *staging,
		    const struct device_memory *workspace, void *tables,
		    struct device_launch *launch);

#endif
