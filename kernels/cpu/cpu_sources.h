/* SPDX-License-Identifier: MIT */
/*
 * cpu_sources.h: which leveled source exists at which level. X(name, suffix, level) stands for the
 * array name_kernels_<suffix> and its length name_n_kernels_<suffix>. Within a level, and for equal
 * family and type, an earlier line is preferred.
 */
#ifndef FMHA_CPU_SOURCES_H
#define FMHA_CPU_SOURCES_H

#ifdef __x86_64__
#define CPU_SOURCES(X)                                                                             \
	X(cpu_flash, portable, CPU_PORTABLE)                                                       \
	X(cpu_flash, v3, CPU_X86_64_V3)                                                            \
	X(cpu_flash, v4, CPU_X86_64_V4)
#else
#define CPU_SOURCES(X) X(cpu_flash, portable, CPU_PORTABLE)
#endif

#endif
