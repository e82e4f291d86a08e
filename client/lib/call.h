/* SPDX-License-Identifier: MIT */
/* call.h: what a call asks, before all else and while it waits. */
#ifndef CLIENT_CALL_H
#define CLIENT_CALL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <fmha/fmha.h>

/* Refuses a struct of a newer header. */
int check_struct_size(uint32_t size, size_t known, const char *name, struct fmha_error *err);

/*
 * Has this process been forked off the one that made an object? Asked by every call, so it must cost no system
 * call: a page that the kernel hands to children as zeros keeps a number.
 */
/* Differs between a process and its children, however they were made; never 0. */
uint64_t process_token(void);

/* ---- interrupt ---- */

/* All go by what fmha_set_interrupt() said in this thread. */

/* Until when a wait may last before it asks: at most @deadline. */
int64_t interrupt_slice(int64_t deadline);

/* Whether the thread is to stop waiting. Runs the caller's code: with no lock held. */
bool interrupt_is_wanted(void);

#endif
