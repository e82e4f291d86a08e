/* SPDX-License-Identifier: MIT */
/*
 * gpu_peak.c: rates of vendors' data sheets, divided by units and boost clock. Where 8-bit matrix
 * instructions are missing, such data is multiplied in 16 bits.
 */
#include <kernels/gpu_peak.h>

#include <stddef.h>
#include <string.h>

static const struct gpu_peak peaks[] = {
	{"gfx906", 128, 256, 256}, {"gfx908", 256, 1024, 1024},
	{"gfx90a", 256, 1024, 1024}, {"gfx942", 256, 2048, 4096},
	{"gfx950", 256, 4096, 8192}, {"gfx1030", 128, 256, 256},
	{"gfx1100", 256, 512, 512}, {"gfx1101", 256, 512, 512},
	{"gfx1102", 256, 512, 512}, {"gfx1103", 256, 512, 512},
	{"gfx1150", 256, 512, 512}, {"gfx1151", 256, 512, 512},
	{"gfx1200", 256, 1024, 2048}, {"gfx1201", 256, 1024, 2048},
	{"sm_80", 128, 2048, 2048},
	{"sm_86", 256, 1024, 1024}, {"sm_87", 256, 2048, 2048},
	{"sm_89", 256, 1024, 2048}, {"sm_90a", 256, 4096, 8192},
	{"sm_100a", 256, 8192, 16384}, {"sm_103a", 256, 8192, 16384},
	{"sm_110a", 256, 8192, 16384}, {"sm_120a", 256, 1024, 2048},
	{"sm_121a", 256, 1024, 2048},
};

const struct gpu_peak *gpu_peak_find(const char *arch)
{
	for (size_t i = 0; i < sizeof(peaks) / sizeof(peaks[0]); i++)
		if (strcmp(peaks[i].arch, arch) == 0)
			return &peaks[i];
	return NULL;
}
