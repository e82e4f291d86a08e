/* SPDX-License-Identifier: MIT */
#include <kernels/gpu_kernel.h>

#include <stdio.h>

#include "../general/words.h"

_Static_assert(WORD_THREADS == GPU_WORD_THREADS, "the kernel's block is the launch's");

void gpu_kernel_make_word(const char *arch, struct gpu_kernel *ret_kernel)
{
	*ret_kernel = (struct gpu_kernel){.build = {.source = "words.hip"},
					  .entry = "fmha_word",
					  .block = {WORD_THREADS, 1, 1}};
	(void)snprintf(ret_kernel->build.arch, BUILD_WORD_BYTES, "%s", arch);
	(void)snprintf(ret_kernel->build.name, BUILD_NAME_BYTES, "fmha_word_%s", arch);
}
