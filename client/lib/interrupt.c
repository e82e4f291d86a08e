/* SPDX-License-Identifier: MIT */
/* interrupt.c: a thread's own reason to stop waiting. */
#include "interrupt.h"

#include <fmha/fmha.h>

#include "deadline.h"

#define ASKED_EVERY_NS INT64_C(50000000)

static _Thread_local struct {
	int (*asked)(void *userdata);
	void *userdata;
} interrupt;

void fmha_set_interrupt(int (*asked)(void *userdata), void *userdata)
{
	interrupt.asked = asked;
	interrupt.userdata = userdata;
}

int64_t interrupt_slice(int64_t deadline)
{
	int64_t slice;

	if (!interrupt.asked)
		return deadline;
	slice = deadline_now() + ASKED_EVERY_NS;
	return slice < deadline ? slice : deadline;
}

bool interrupt_is_wanted(void)
{
	return interrupt.asked && interrupt.asked(interrupt.userdata) != 0;
}
