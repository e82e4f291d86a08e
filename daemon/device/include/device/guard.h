/* SPDX-License-Identifier: MIT */
/*
 * guard.h: the last line against shared memory that vanishes under a kernel. Imports are checked so
 * that it should never be needed (host_memory.h); if a mapped page cannot be read after all (SIGBUS), the
 * thread gets a page of zeros in its place, the launch ends with an error, and the hit is counted.
 */
#ifndef FMHAD_DEVICE_GUARD_H
#define FMHAD_DEVICE_GUARD_H

#include <stdint.h>

/* Process-wide: the SIGBUS handler, and @on_crash for the signals that end the process. */
void guard_install(void (*on_crash)(int signal));

/* Around every access to client memory, on the accessing thread; guards do not nest. */
void guard_begin(void);
/* Return: the address of the first page that vanished, 0: none. */
uintptr_t guard_end(void);

/* Hits since the process started. */
uint64_t guard_hits(void);

#endif
