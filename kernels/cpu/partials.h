/* SPDX-License-Identifier: MIT */
/* partials.h: results of chunks of keys, and how those of a row are put together. */
#ifndef FMHA_CPU_PARTIALS_H
#define FMHA_CPU_PARTIALS_H

#include "output.h"

#define PARTIALS_NUMBERS 16  /* floats behind a row's O: a cache line for two numbers */
#define MERGE_STEP       256 /* chunks put together between two signs of life */

/* f32: for every chunk, per row O [hdim_v], then at row_floats - PARTIALS_NUMBERS the maximum and the sum. */
struct partials {
	float *at;
	int64_t row_floats, chunk_floats;
};

static inline float *partials_numbers(struct partials p, int32_t row)
{
	return p.at + (row + 1) * p.row_floats - PARTIALS_NUMBERS;
}

/* Adds up row @r's chunks in the first one's place; an empty chunk's O was never written. */
static inline struct row_state merge_chunks(struct partials first, int64_t chunks, int32_t r,
					    int32_t hdim)
{
	struct row_state state = {.max = -INFINITY, .o = first.at + r * first.row_floats};
	struct partials part = first;

	for (int64_t c = 0; c < chunks; c++, part.at += first.chunk_floats) {
		float max = partials_numbers(part, r)[0];

		state.max = max > state.max ? max : state.max;
	}
	part = first;
	for (int64_t c = 0, begun = 0; c < chunks; c++, part.at += first.chunk_floats) {
		const float *numbers = partials_numbers(part, r),
			    *o = part.at + r * part.row_floats;
		float weight;

		if (c % MERGE_STEP == MERGE_STEP - 1 && !cpu_goes_on())
			break;
		if (numbers[1] == 0)
			continue;
		weight = state.max == -INFINITY ? 1 : exp2f(numbers[0] - state.max);
		state.sum += weight * numbers[1];
		for (int32_t d = 0; d < hdim; d += LANES) {
			vf sum = vf_load(o + d) * weight;

			vf_store(state.o + d, begun ? vf_load(state.o + d) + sum : sum);
		}
		begun = 1;
	}
	return state;
}

/*
 * The table of a loop whose tasks are chunks, and then merges of what those left: @name's functions, for every
 * family of forward and every type of the level. Above AVX512-BF16's, flash.c has bf16 alone, and these come
 * before it.
 */
#define CPU_CHUNKED_KERNEL(name, family_, dtype_)                                                  \
	{                                                                                          \
		.family = family_, .dtype = dtype_, .level = CPU_LEVEL, .pipeline = "cpu_" #name,  \
		.accepts = name##_accepts, .workspace_bytes = name##_workspace_bytes,              \
		.scratch_bytes = name##_scratch_bytes, .n_phases = 2, .n_tasks = name##_n_tasks,   \
		.run = name##_run,                                                                 \
	}
#define CPU_CHUNKED_FAMILIES(name, dtype)                                                          \
	CPU_CHUNKED_KERNEL(name, ABI_FWD, dtype),                                                  \
		CPU_CHUNKED_KERNEL(name, ABI_FWD_SPLITKV, dtype),                                  \
		CPU_CHUNKED_KERNEL(name, ABI_FWD_PAGEDKV, dtype),                                  \
		CPU_CHUNKED_KERNEL(name, ABI_BATCH_PREFILL, dtype)
#ifdef __AVX512BF16__
#define CPU_CHUNKED_TYPES(name) CPU_CHUNKED_FAMILIES(name, ABI_BF16)
#else
#define CPU_CHUNKED_TYPES(name)                                                                    \
	CPU_CHUNKED_FAMILIES(name, ABI_BF16), CPU_CHUNKED_FAMILIES(name, ABI_F32),                 \
		CPU_CHUNKED_FAMILIES(name, ABI_F16), CPU_CHUNKED_FAMILIES(name, ABI_E4M3),         \
		CPU_CHUNKED_FAMILIES(name, ABI_E5M2)
#endif
#define CPU_CHUNKED_KERNELS(name)                                                                  \
	extern const struct cpu_kernel CPU_NAME(cpu_##name##_kernels)[];                           \
	extern const size_t CPU_NAME(cpu_##name##_n_kernels);                                      \
	const struct cpu_kernel CPU_NAME(cpu_##name##_kernels)[] = {CPU_CHUNKED_TYPES(name)};      \
	const size_t CPU_NAME(cpu_##name##_n_kernels) = sizeof(CPU_NAME(cpu_##name##_kernels)) /   \
							sizeof(CPU_NAME(cpu_##name##_kernels)[0]);

#endif
