/* SPDX-License-Identifier: MIT */
/*
 * cpu_sources.h: which leveled source exists at which level. X(name, suffix, level) stands for the
 * array name_kernels_<suffix> and its length name_n_kernels_<suffix>. Within a level, and for equal
 * family and type, an earlier line is preferred.
 */
#ifndef FMHA_CPU_SOURCES_H
#define FMHA_CPU_SOURCES_H

#define CPU_SOURCES_EVERYWHERE(X, suffix, level)                                                   \
	X(cpu_latent, suffix, level)                                                               \
	X(cpu_decode, suffix, level)                                                               \
	X(cpu_flash, suffix, level)                                                                \
	X(cpu_bwd_rows, suffix, level)                                                             \
	X(cpu_bwd_tile, suffix, level)                                                             \
	X(cpu_combine, suffix, level)                                                              \
	X(cpu_appendkv, suffix, level)

#ifdef __x86_64__
#define CPU_SOURCES(X)                                                                             \
	CPU_SOURCES_EVERYWHERE(X, portable, CPU_PORTABLE)                                          \
	CPU_SOURCES_EVERYWHERE(X, v3, CPU_X86_64_V3)                                               \
	CPU_SOURCES_EVERYWHERE(X, v4, CPU_X86_64_V4)                                               \
	X(cpu_latent, v4_bf16, CPU_X86_64_V4_BF16)                                                 \
	X(cpu_decode, v4_bf16, CPU_X86_64_V4_BF16)                                                 \
	X(cpu_flash, v4_bf16, CPU_X86_64_V4_BF16)                                                  \
	X(cpu_bwd_tile, v4_bf16, CPU_X86_64_V4_BF16)                                               \
	X(cpu_latent, amx, CPU_X86_64_AMX)                                                         \
	X(cpu_decode, amx, CPU_X86_64_AMX)                                                         \
	X(cpu_flash, amx, CPU_X86_64_AMX)                                                          \
	X(cpu_bwd_tile, amx, CPU_X86_64_AMX)
#else
#define CPU_SOURCES(X) CPU_SOURCES_EVERYWHERE(X, portable, CPU_PORTABLE)
#endif

#endif
