/* SPDX-License-Identifier: MIT */
/* hip_fake_memory.h: memory, for what shares it between processes. */
#ifndef FMHA_TESTS_HIP_FAKE_MEMORY_H
#define FMHA_TESTS_HIP_FAKE_MEMORY_H

#include "hip_fake.h"

/* A piece of the range; an import of another process's memory; memory of the host that is registered. */
struct memory {
	struct memory *next; /* by address */
	char *at;
	size_t bytes;  /* as it is described: an import's are what its handle said */
	size_t mapped; /* bytes in fact, whole pages; 0: registered host memory */
	int fd;
	unsigned uses; /* of an import; 0: it is none */
	bool touched;
	bool external; /* opened by hipImportExternalMemory() */
};

extern struct memory *memories; /* under fake_lock */

size_t fake_pages(size_t bytes);
/* The last that begins at or in front of @at, if it reaches so far. */
struct memory *fake_find(const void *at);
/* Maps @mapped bytes of the file, described as @bytes. Takes the descriptor. With the lock held. */
struct memory *fake_place(int fd, size_t mapped, size_t bytes, int sharing);
void fake_unplace(struct memory *memory);

#endif
