/* SPDX-License-Identifier: MIT */
/* cpu_level.h: the levels of x86-64 that kernels are compiled for, and which of them this machine has. */
#ifndef FMHA_KERNELS_CPU_LEVEL_H
#define FMHA_KERNELS_CPU_LEVEL_H

enum cpu_level {
	CPU_PORTABLE,       /* plain C, any machine */
	CPU_X86_64_V3,      /* AVX2, FMA, F16C */
	CPU_X86_64_V4,      /* AVX-512 F, BW, DQ, VL */
	CPU_X86_64_V4_BF16, /* and AVX512_BF16 */
	CPU_X86_64_AMX,     /* and AMX-TILE, AMX-BF16, with the kernel's permission */
	CPU_N_LEVELS
};

/* "portable", "x86_64_v3", ...: the arch names of specs/. */
const char *cpu_level_name(enum cpu_level level);

/* Returns 0 and the level, or -1 for an unknown name. */
int cpu_level_from_name(const char *name, enum cpu_level *ret_level);

/* The best level this machine and its kernel offer. Asks the kernel for AMX state when needed. */
enum cpu_level cpu_level_detect(void);

/* The compiler that built these kernels, and a digest of their sources. Static strings. */
const char *cpu_build_compiler(void);
const char *cpu_build_sources(void);

#endif
