/* SPDX-License-Identifier: MIT */
#include <device/guard.h>

#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/mman.h>
#include <unistd.h>

static _Thread_local volatile bool guarded;
static _Thread_local volatile uintptr_t vanished;
static atomic_uint_fast64_t hits;
static void (*crash_callback)(int signal);
static atomic_flag crashing = ATOMIC_FLAG_INIT;

static void end_by(int signal)
{
	struct sigaction standard = {.sa_handler = SIG_DFL};

	sigaction(signal, &standard, NULL);
	/* Blocked until the handler returns. A fault would come again by itself, what abort() and
	 * kill() have sent would not. */
	raise(signal);
}

/* A kernel's threads often fail at the same moment. The default would end the process while the first
 * of them still notes what it did: the others wait here for that end. */
static void on_crash(int signal, siginfo_t *info, void *context)
{
	(void)info;
	(void)context;
	while (atomic_flag_test_and_set(&crashing))
		pause();
	if (crash_callback)
		crash_callback(signal);
	end_by(signal);
}

static void on_sigbus(int signal, siginfo_t *info, void *context)
{
	uintptr_t page_bytes = 4096;
	uintptr_t page = (uintptr_t)info->si_addr & ~(page_bytes - 1);

	/* si_code > 0: raised by the kernel for an access, not sent by a process. mmap() is a bare
	 * system call; it is as safe here as the ones that POSIX lists. */
	if (guarded && info->si_code > 0 && page &&
	    mmap((void *)page, page_bytes, PROT_READ | PROT_WRITE,
		 MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != MAP_FAILED) {
		atomic_fetch_add(&hits, 1);
		if (!vanished)
			vanished = page;
		return;
	}
	on_crash(signal, info, context);
}

void guard_install(void (*callback)(int signal))
{
	static const int fatal[] = {SIGSEGV, SIGABRT, SIGFPE, SIGILL, SIGBUS};
	struct sigaction action = {.sa_sigaction = on_crash, .sa_flags = SA_SIGINFO};

	crash_callback = callback;
	/* A fault of the handler's own meets a blocked signal, which ends the process. */
	sigemptyset(&action.sa_mask);
	for (size_t i = 0; i < sizeof(fatal) / sizeof(fatal[0]); i++)
		sigaddset(&action.sa_mask, fatal[i]);
	for (size_t i = 0; i < sizeof(fatal) / sizeof(fatal[0]); i++) {
		action.sa_sigaction = fatal[i] == SIGBUS ? on_sigbus : on_crash;
		sigaction(fatal[i], &action, NULL);
	}
}

void guard_begin(void)
{
	vanished = 0;
	guarded = true;
}

uintptr_t guard_end(void)
{
	guarded = false;
	return vanished;
}

uint64_t guard_hits(void)
{
	return atomic_load(&hits);
}
