/* SPDX-License-Identifier: MIT */
/*
 * slot.h: torch's operators for flash attention as functions of C, for calls that were seen before.
 *
 * torch calls what is registered for an operator. A function of Python's there costs the interpreter's lock, a wrapper a
 * tensor and a tuple; this one costs none of them. It knows problems by their tensors' extents, strides, types and places:
 * one that it has met it launches by itself, another it hands to the operator of Python's that @python names, which computes
 * it and, where it was a local launch of these tensors alone, says by fmha_slot_learn() how it goes.
 *
 * It is written against torch's C shim (symbols named aoti_torch_ and torch_, found in the libraries that the process has
 * loaded) and no header of torch's: one build serves every version that has them.
 */
#ifndef FMHA_SLOT_H
#define FMHA_SLOT_H

#include <stddef.h>
#include <stdint.h>

#include <fmha/base.h>

struct fmha_local_plan; /* fmha_local.h's */
struct fmha_local_run;
struct fmha_local_keys;

#ifdef __cplusplus
extern "C" {
#endif

struct fmha_slot_options {
	const char *
		key; /* torch's dispatch key: "CUDA"; "CPU" in tests, whose tensors a GPU's driver of tests takes */
	const char *
		forward; /* operators of Python's, of the same arguments and results as aten's two */
	const char *backward;
	int (*run)(struct fmha_local_plan *plan, const struct fmha_local_run *run,
		   struct fmha_error *err); /* fmha_local_plan_run() */
};

struct fmha_slot_counts {
	uint64_t forward, backward; /* calls that were launched here */
	uint64_t asked;             /* calls that went on to Python */
	uint64_t known;             /* problems */
};

/* Registers both operators, once a process. @options: kept. Return: NULL, or why not, for people. */
FMHA_API const char *fmha_slot_open(const struct fmha_slot_options *options);
/* Takes them out again. */
FMHA_API void fmha_slot_close(void);

/*
 * In the call that this thread hands to Python: it is one launch of @plan on the call's tensors and results. @keys: NULL, or
 * borrowed. @captured: set to 1 by each run in a capture. @plan and @captured are kept until fmha_slot_forget().
 * Return: 1, or 0 where no call can be remembered.
 */
FMHA_API int fmha_slot_learn(struct fmha_local_plan *plan, uint64_t workspace_bytes,
			     const struct fmha_local_keys *keys, uint8_t *captured);
/* Forgets all problems; returns when no thread launches one. */
FMHA_API void fmha_slot_forget(void);
/* In the call that this thread hands to Python: it ends by this exception (three PyObject *, referenced here). */
FMHA_API void fmha_slot_raise(uintptr_t type, uintptr_t value, uintptr_t traceback);
FMHA_API void fmha_slot_count(struct fmha_slot_counts *ret_counts);

#ifdef __cplusplus
}
#endif

#endif
