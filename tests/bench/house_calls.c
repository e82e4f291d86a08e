/* SPDX-License-Identifier: MIT */
/*
 * house_calls.c: counts the calls of each function of programs built with -finstrument-functions, for
 * house.py. Preloaded; each process keeps a table in a file of its own, which can be read at any time and
 * is there after whatever end.
 */
#include <dlfcn.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum { ROWS = 1 << 14 }; /* a power of two, several times the number of functions */

struct row {
	_Atomic(void *) function;
	_Atomic uint64_t calls;
	uint64_t offset; /* in its object */
	char object[232];
};

static char program[232]; /* its path: it may call itself anything */
static struct row *rows;  /* NULL: nobody asked, or before the beginning */

__attribute__((constructor)) static void begin(void)
{
	const char *folder = getenv("HOUSE_CALLS");
	char path[4096];
	void *map;
	int fd;

	if (!folder || readlink("/proc/self/exe", program, sizeof(program) - 1) < 0)
		return;
	(void)snprintf(path, sizeof(path), "%s/%d", folder, (int)getpid());
	fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	if (fd < 0 || ftruncate(fd, ROWS * sizeof(struct row)) < 0)
		abort();
	map = mmap(NULL, ROWS * sizeof(struct row), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	(void)close(fd);
	if (map == MAP_FAILED)
		abort();
	rows = map;
}

void __cyg_profile_func_enter(void *function, void *from);
void __cyg_profile_func_exit(void *function, void *from);

void __cyg_profile_func_enter(void *function, void *from)
{
	uint32_t at = (uint32_t)((uintptr_t)function * 2654435761u >> 7) & (ROWS - 1);
	void *seen = NULL;
	Dl_info info;

	(void)from;
	if (!rows)
		return;
	while (!atomic_compare_exchange_strong(&rows[at].function, &seen, function) &&
	       seen != function) {
		at = (at + 1) & (ROWS - 1);
		seen = NULL;
	}
	if (!seen && dladdr(function, &info)) {
		rows[at].offset = (uintptr_t)function - (uintptr_t)info.dli_fbase;
		(void)snprintf(rows[at].object, sizeof(rows[at].object), "%s",
			       info.dli_fname[0] == '/' ? info.dli_fname : program);
	}
	atomic_fetch_add(&rows[at].calls, 1);
}

void __cyg_profile_func_exit(void *function, void *from)
{
	(void)function;
	(void)from;
}
