/* SPDX-License-Identifier: MIT */
/*
 * gate.h: waiting for other processes' events, in a way that can be given up.
 *
 * Nobody can let a stream go that waits for an event: recording the event again changes nothing for
 * it. So a launch's own stream never does. Another stream, its gate, waits and then writes a word
 * that the launch's stream waits for; whoever gives up waiting writes that word from elsewhere. The
 * gate is abandoned then, until the driver is through with it, and the next launch gets a new one.
 *
 * Loop thread only.
 */
#ifndef FMHAD_DEVICE_HIP_GATE_H
#define FMHAD_DEVICE_HIP_GATE_H

#include "gpu.h"

/* A launch's word and the value that says "go on". All zero is one that has none yet. */
struct gpu_pass {
	uint32_t *word; /* in device memory */
	uint32_t value;
};

/* Makes @stream wait for @events. @gate: the stream's, NULL: it has none yet. */
hipError_t gpu_gate_wait(struct gpu_device *gpu, hipStream_t *gate, hipStream_t stream,
			 struct device_event *const *events, uint32_t n, struct gpu_pass *pass);

/* Lets the launch go that waits behind the gate, which is abandoned with the word. */
void gpu_gate_give_up(struct gpu_device *gpu, hipStream_t *gate, struct gpu_pass *pass);

/* The stream is not used any more. */
void gpu_gate_free(struct gpu_device *gpu, hipStream_t gate);

/* All of it, at the end. */
void gpu_gates_deinit(struct gpu_device *gpu);

#endif
