/* SPDX-License-Identifier: MIT */
/*
 * guard_code.h: kernels for the plans of a device that this program has opened itself, compiled
 * with the daemon's queue and cache as its front does for a worker.
 */
#ifndef TESTS_GPU_GUARD_CODE_H
#define TESTS_GPU_GUARD_CODE_H

#include <device/device.h>

struct guard_code;

/* Kept; NULL: where they are by default. */
struct guard_files {
	const char *cache, *sources; /* folders */
	const char *helper;          /* fmhad-compile */
	const char *libraries; /* its LD_LIBRARY_PATH: this program's may have another libcuda */
};

/* Becomes the device's builder. @most: kernels that are built, the next ones are refused with
 * FMHA_EQUOTA. */
struct guard_code *guard_code_new(struct device *device, const struct guard_files *files, int jobs,
				  uint32_t most);
struct guard_code *guard_code_free(struct guard_code *code);

/*
 * Asks for the code of every stage. Return: 0, FMHA_EQUOTA for more kernels than wanted, or another
 * error. guard_code_wait() before it is used.
 */
int guard_code_prepare(struct guard_code *code, const struct plan *plan, struct fmha_error *err);

/* Until everything that was asked for is built and loaded; each failure is printed. Return: how
 * many kernels failed, of all since the beginning. */
uint32_t guard_code_wait(struct guard_code *code);
/* Kernels that were asked for. */
uint32_t guard_code_kernels(const struct guard_code *code);

#endif
