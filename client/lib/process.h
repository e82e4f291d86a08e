/* SPDX-License-Identifier: MIT */
/*
 * process.h: has this process been forked off the one that made an object? Asked by every call, so
 * it must cost no system call: a page that the kernel hands to children as zeros keeps a number.
 */
#ifndef CLIENT_PROCESS_H
#define CLIENT_PROCESS_H

#include <stdbool.h>
#include <stdint.h>

/* Differs between a process and its children, however they were made; never 0. */
uint64_t process_token(void);

/* ---- interrupt ---- */

/* All go by what fmha_set_interrupt() said in this thread. */

/* Until when a wait may last before it asks: at most @deadline. */
int64_t interrupt_slice(int64_t deadline);

/* Whether the thread is to stop waiting. Runs the caller's code: with no lock held. */
bool interrupt_is_wanted(void);

#endif
