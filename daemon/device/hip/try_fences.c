/* SPDX-License-Identifier: MIT */
/*
 * try_fences.c: whether a stream of AMD's runtime waits for a word in plain memory as its documents say, tried when
 * the device is opened. Runtimes differ in how they wait (HIP.md), and one that goes on at once would have clients
 * read what is not written yet: then a kernel does it (words.hip), tried in the same way once it is compiled, or runs with
 * counters are refused.
 */
#include "hip_api.h"

#include <stdbool.h>
#include <stdio.h>
#include <sys/mman.h>
#include <time.h>

#include <kernels/abi.h>
#include <kernels/gpu_kernel.h>

#define BYTES    4096
#define HELD_MS  20   /* how long it is seen to wait */
#define ENDED_MS 5000 /* how long it may take to see the word */

/*
 * The word lies in memory of the host's that the device sees: whatever else fails, a store lets the stream go; nothing
 * could be given back while it waits.
 */
struct trial {
	hipFunction_t kernel; /* what does it; NULL: the runtime */
	hipStream_t held, other;
	uint32_t *word;   /* host */
	uint32_t *landed; /* host: what lay behind the word, as it was read last */
	uint32_t *behind; /* device: written by the stream that waits */
};

static hipError_t launch(hipFunction_t kernel, hipStream_t stream, void *word, uint32_t value,
			 int32_t writes)
{
	union abi_args args = {.word = {.word = word, .value = value, .writes = writes}};
	void *parameters[] = {&args};

	return hipModuleLaunchKernel(kernel, 1, 1, 1, GPU_WORD_THREADS, 1, 1, 0, stream, parameters,
				     NULL);
}

static void sleep_ms(int ms)
{
	const struct timespec pause = {.tv_nsec = ms * 1000000L};

	(void)nanosleep(&pause, NULL);
}

static hipError_t read_behind(struct trial *t)
{
	hipError_t status = hipMemcpyDtoHAsync(t->landed, (hipDeviceptr_t)t->behind,
					       sizeof(*t->landed), t->other);

	return status == hipSuccess ? hipStreamSynchronize(t->other) : status;
}

static hipError_t begin(struct trial *t)
{
	hipError_t status = hipMemsetD8Async((hipDeviceptr_t)t->behind, 0, BYTES, t->other);

	if (status == hipSuccess)
		status = hipStreamSynchronize(t->other);
	if (status == hipSuccess)
		status = gpu_word_wait(t->kernel, t->held, t->word, 1);
	return status == hipSuccess ? gpu_word_write(t->kernel, t->held, t->behind, 1) : status;
}

/* Return: hipErrorNotReady: it has not ended. */
static hipError_t wait_for_end(struct trial *t)
{
	hipError_t status = hipErrorNotReady;

	for (int ms = 0; status == hipErrorNotReady && ms < ENDED_MS; ms++) {
		status = hipStreamQuery(t->held);
		if (status == hipErrorNotReady)
			sleep_ms(1);
	}
	return status;
}

static hipError_t trial_judge(struct trial *t, const char **ret_trouble)
{
	hipError_t status = begin(t), held = hipErrorNotReady;
	bool early = false;

	sleep_ms(HELD_MS);
	if (status == hipSuccess)
		status = read_behind(t);
	if (status == hipSuccess)
		held = hipStreamQuery(t->held);
	if (held != hipErrorNotReady && held != hipSuccess)
		return held;
	if (status == hipErrorNotSupported || status == hipErrorInvalidValue) {
		*ret_trouble = "the runtime refuses to wait for a word in memory";
		return hipSuccess;
	}
	early = status == hipSuccess && (*t->landed != 0 || held == hipSuccess);
	if (status == hipSuccess)
		status = gpu_word_write(t->kernel, t->other, t->word, 1);
	if (status == hipSuccess)
		status = hipStreamSynchronize(t->other);
	if (status == hipSuccess)
		status = wait_for_end(t);
	if (status == hipErrorNotReady) {
		*ret_trouble = "a stream does not see a word that another one writes";
		return hipSuccess;
	}
	if (status == hipSuccess)
		status = read_behind(t);
	if (early)
		*ret_trouble = "a stream does not wait for a word in memory";
	else if (status == hipSuccess && *t->landed != 1)
		*ret_trouble = "a stream does not write what is behind a word";
	return status;
}

/* Return: hipErrorNotReady: the stream is held up for good, and nothing of it can be given back. */
static hipError_t run(struct trial *t, const char **ret_trouble)
{
	hipError_t status = hipMalloc((void **)&t->behind, BYTES);

	if (status != hipSuccess)
		return status;
	status = trial_judge(t, ret_trouble);
	__atomic_store_n(t->word, 1, __ATOMIC_RELEASE);
	if (wait_for_end(t) == hipErrorNotReady)
		return hipErrorNotReady;
	(void)hipFree(t->behind);
	return status;
}

hipError_t gpu_word_wait(hipFunction_t kernel, hipStream_t stream, void *word, uint32_t value)
{
	return kernel ? launch(kernel, stream, word, value, 0)
		      : hipStreamWaitValue32(stream, word, value, hipStreamWaitValueGte,
					     0xffffffffu);
}

hipError_t gpu_word_write(hipFunction_t kernel, hipStream_t stream, void *word, uint32_t value)
{
	return kernel ? launch(kernel, stream, word, value, 1)
		      : hipStreamWriteValue32(stream, word, value, 0);
}

hipError_t gpu_try_fences(hipFunction_t kernel, hipStream_t other, char *trouble, size_t size)
{
	uint32_t *host = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
			      0);
	struct trial t = {.kernel = kernel, .other = other};
	const char *found = "";
	hipError_t status;

	if (host == MAP_FAILED)
		return hipErrorOutOfMemory;
	t.word = host;
	t.landed = host + BYTES / sizeof(*host) / 2;
	status = hipHostRegister(host, BYTES, 0);
	if (status == hipSuccess) {
		status = hipStreamCreateWithFlags(&t.held, hipStreamNonBlocking);
		if (status == hipSuccess) {
			status = run(&t, &found);
			if (status == hipErrorNotReady)
				return status;
			(void)hipStreamDestroy(t.held);
		}
		(void)hipHostUnregister(host);
	}
	(void)munmap(host, BYTES);
	(void)snprintf(trouble, size, "%s", found);
	return status;
}
