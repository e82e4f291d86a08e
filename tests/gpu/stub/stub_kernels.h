/* SPDX-License-Identifier: MIT */
/*
 * stub_kernels.h: what kernels do on a GPU that is none. fmha_prepare and fmha_word do what they do on a GPU; those that take q
 * copy it to `o` of a plain problem, so that a test sees which bytes a launch read and wrote.
 */
#ifndef FMHA_TESTS_STUB_KERNELS_H
#define FMHA_TESTS_STUB_KERNELS_H

#include <kernels/abi.h>

void stub_kernel_run(const char *function, const union abi_args *args);
/* Of the last launch of another kernel than fmha_prepare. */
const void *stub_kernel_arguments(void);

#endif
