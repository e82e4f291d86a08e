/* SPDX-License-Identifier: MIT */
#include "gpu.h"

#include <stdlib.h>

#include <proto/error.h>

#define WORDS 1024 /* in one allocation */

/*
 * Gates that wait for what may never come. Each keeps one of the few queues that a GPU has busy, so
 * too many of them hold up everybody; only a new worker gets rid of them.
 */
#define MOST_ABANDONED 8

struct gpu_gate {
	struct gpu_gate *next;
	hipStream_t stream;
};

struct gpu_words {
	struct gpu_words *next;
	uint32_t *words;
	uint32_t n_used;
};

/* A word belongs to its launch for good; an abandoned one to nobody, because its gate may still
 * write it. */
static hipError_t new_word(struct gpu_device *gpu, uint32_t **ret_word)
{
	struct gpu_words *words = gpu->words;
	hipError_t status;
	void *memory = NULL;

	if (!words || words->n_used == WORDS) {
		words = calloc(1, sizeof(*words));
		if (!words)
			return hipErrorOutOfMemory;
		status = hipMalloc(&memory, WORDS * sizeof(*words->words));
		if (status == hipSuccess)
			status = hipMemsetD8Async((hipDeviceptr_t)memory, 0,
						  WORDS * sizeof(*words->words), gpu->rescue);
		if (status == hipSuccess)
			status = hipStreamSynchronize(gpu->rescue);
		if (status != hipSuccess) {
			if (memory)
				(void)hipFree(memory);
			free(words);
			return status;
		}
		words->words = memory;
		words->next = gpu->words;
		gpu->words = words;
	}
	*ret_word = &words->words[words->n_used++];
	return hipSuccess;
}

/* Drops the abandoned gates that are through. Return: how many are left. */
static uint32_t sweep(struct gpu_device *gpu)
{
	struct gpu_gate **at = &gpu->abandoned;
	uint32_t n = 0;

	while (*at) {
		struct gpu_gate *gate = *at;

		if (hipStreamQuery(gate->stream) == hipErrorNotReady) {
			at = &gate->next;
			n++;
			continue;
		}
		*at = gate->next;
		(void)hipStreamDestroy(gate->stream);
		free(gate);
	}
	return n;
}

hipError_t gpu_gate_wait(struct gpu_device *gpu, hipStream_t *gate, hipStream_t stream,
			 struct device_event *const *events, uint32_t n, struct gpu_pass *pass)
{
	hipError_t status = hipSuccess;

	if (!*gate)
		status = hipStreamCreateWithFlags(gate, hipStreamNonBlocking);
	if (status == hipSuccess && !pass->word) {
		pass->value = 0;
		status = new_word(gpu, &pass->word);
	}
	for (uint32_t i = 0; i < n && status == hipSuccess; i++)
		status = hipStreamWaitEvent(*gate, gpu_event_of(events[i]), 0);
	if (status == hipSuccess)
		status = gpu_word_write(gpu->word_kernel, *gate, pass->word, ++pass->value);
	if (status == hipSuccess)
		status = gpu_word_wait(gpu->word_kernel, stream, pass->word, pass->value);
	return status;
}

void gpu_gate_give_up(struct gpu_device *gpu, hipStream_t *gate, struct gpu_pass *pass)
{
	struct gpu_gate *abandoned;
	struct fmha_error err;

	if (!pass->word)
		return; /* it has been let go before */
	(void)gpu_word_write(gpu->word_kernel, gpu->rescue, pass->word, pass->value);
	pass->word = NULL;
	if (!*gate)
		return; /* an earlier launch has given it up */
	abandoned = calloc(1, sizeof(*abandoned));
	if (!abandoned)
		return; /* the next launch will be stuck, too */
	abandoned->stream = *gate;
	*gate = NULL;
	abandoned->next = gpu->abandoned;
	gpu->abandoned = abandoned;
	if (sweep(gpu) <= MOST_ABANDONED)
		return;
	(void)fmha_error_set(&err, FMHA_EDEVICE,
			     "more than %d waits for events of clients never ended",
			     MOST_ABANDONED);
	device_fail(&gpu->device, &err);
}

void gpu_gate_free(struct gpu_device *gpu, hipStream_t gate)
{
	(void)sweep(gpu);
	if (gate)
		(void)hipStreamDestroy(gate);
}

void gpu_gates_deinit(struct gpu_device *gpu)
{
	(void)sweep(gpu);
	while (gpu->words) {
		struct gpu_words *words = gpu->words;

		gpu->words = words->next;
		(void)hipFree(words->words);
		free(words);
	}
}
