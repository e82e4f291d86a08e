/* SPDX-License-Identifier: MIT */
/* interrupt.h: what fmha_set_interrupt() said in this thread. */
#ifndef CLIENT_INTERRUPT_H
#define CLIENT_INTERRUPT_H

#include <stdbool.h>
#include <stdint.h>

/* Until when a wait may last before it asks: at most @deadline. */
int64_t interrupt_slice(int64_t deadline);

/* Whether the thread is to stop waiting. Runs the caller's code: with no lock held. */
bool interrupt_is_wanted(void);

#endif
