/* SPDX-License-Identifier: MIT */
/*
 * mirror.h: what a run needs on a device whose memory the host does not see. Integer tensors are
 * fetched before they are judged, and the judged copies are uploaded; so is the head of a backward
 * workspace. Tensors in host memory (a client's memfd) have a copy on the device, which is brought
 * up to date before the run and copied back after it. On a device that shares the host's memory
 * nothing of this happens.
 */
#ifndef FMHAD_WORKER_MIRROR_H
#define FMHAD_WORKER_MIRROR_H

#include <device.h>
#include <plan.h>

struct mirror {
	uint64_t in_host; /* bit role: the tensor lies in host memory */
	void *integers;   /* of the client's integer tensors, as fetched */
	void *head;       /* of the workspace, as prepared */
};

/* Bytes that uploads need behind the plan's workspace; 0 on a device that shares memory. */
uint64_t mirror_extra_bytes(const struct device *device, const struct plan *plan);

/* Whether every run of the plan on the same buffers and workspace has the same arguments and
 * copies, because nothing of them depends on what lies in a buffer. */
bool mirror_is_constant(const struct device *device, const struct plan *plan);

/*
 * Before plan_bind(): fetches integer tensors, so that bindings[].host can be read, and makes room
 * for the head: @ret_head, for plan_bind().
 */
int mirror_fetch(struct device *device, const struct plan *plan,
		 struct plan_binding bindings[FMHA_N_TENSORS], struct mirror *mirror,
		 void **ret_head, struct fmha_error *err);

/* After plan_bind(): says what to copy and moves the arguments to the copies. */
void mirror_upload(struct device *device, const struct plan *plan,
		   const struct plan_binding bindings[FMHA_N_TENSORS],
		   const struct plan_indices *indices, const struct mirror *mirror,
		   const struct device_memory *workspace, struct device_launch *launch);

void mirror_deinit(struct mirror *mirror);

#endif
