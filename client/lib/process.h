/* SPDX-License-Identifier: MIT */
/*
 * process.h: has this process been forked off the one that made an object? Asked by every call, so
 * it must cost no system call: a page that the kernel hands to children as zeros keeps a number.
 */
#ifndef CLIENT_PROCESS_H
#define CLIENT_PROCESS_H

#include <stdint.h>

/* Differs between a process and its children, however they were made; never 0. */
uint64_t process_token(void);

#endif
