/* SPDX-License-Identifier: MIT */
/* call.c: what a call asks, before all else and while it waits. */
#include "call.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <fmha/fmha.h>
#include <proto/error.h>

#include "deadline.h"

int check_struct_size(uint32_t size, size_t known, const char *name, struct fmha_error *err)
{
	if (size == known)
		return 0;
	return fmha_error_set_field(err, FMHA_EINVAL, "struct_size",
				    "%s.struct_size is %u, this library knows %zu", name, size,
				    known);
}

/* ---- interrupt ---- */

/* A thread's own reason to stop waiting. */

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

/* ---- process ---- */

static pthread_once_t page_once = PTHREAD_ONCE_INIT;
static uint64_t *page;      /* NULL: the kernel has no MADV_WIPEONFORK (before 4.14) */
static uint64_t last_token; /* inherited, so that a child's next token is a new one */

static void make_page(void)
{
	size_t bytes = (size_t)sysconf(_SC_PAGESIZE);
	void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
			    0);

	if (memory == MAP_FAILED)
		return;
	if (madvise(memory, bytes, MADV_WIPEONFORK) == 0)
		page = memory;
	else
		(void)munmap(memory, bytes);
}

uint64_t process_token(void)
{
	uint64_t token;

	(void)pthread_once(&page_once, make_page);
	if (!page)
		return (uint64_t)getpid();
	token = __atomic_load_n(page, __ATOMIC_ACQUIRE);
	if (token == 0) {
		uint64_t fresh = __atomic_add_fetch(&last_token, 1, __ATOMIC_RELAXED);

		/* Of threads that meet here the first one wins. */
		if (__atomic_compare_exchange_n(page, &token, fresh, 0, __ATOMIC_ACQ_REL,
						__ATOMIC_ACQUIRE))
			token = fresh;
	}
	return token;
}
