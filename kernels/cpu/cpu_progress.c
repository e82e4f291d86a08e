/* SPDX-License-Identifier: MIT */
/* cpu_progress.c: where a thread says how far its kernel is, and reads that it is to stop. */
#include <kernels/cpu_progress.h>

_Thread_local struct cpu_progress *cpu_progress;
