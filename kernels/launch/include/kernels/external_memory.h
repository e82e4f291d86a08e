/* SPDX-License-Identifier: MIT */
/*
 * external_memory.h: how a runtime is told of memory that another process or driver has made. HIP's structs, which
 * are CUDA's, with what later versions have behind them: neither the client nor the worker is compiled with both.
 */
#ifndef FMHA_KERNELS_EXTERNAL_MEMORY_H
#define FMHA_KERNELS_EXTERNAL_MEMORY_H

/* hipExternalMemoryHandleDesc. */
struct external_handle {
	int type;
	union {
		int fd;
		struct {
			void *handle;
			const void *name;
		} win32;
	} handle;
	unsigned long long size;
	unsigned flags, reserved[16];
};

/* hipExternalMemoryBufferDesc. */
struct external_range {
	unsigned long long offset, size;
	unsigned flags, reserved[16];
};

#endif
