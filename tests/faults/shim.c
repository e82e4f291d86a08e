/* SPDX-License-Identifier: MIT */
/*
 * shim.c: preloaded into fmhad, its workers and helpers, or a client: counts calls that can fail and
 * fails the N-th of a class, once or from then on, as the page says that $FMHA_FAULTS names.
 *
 * Which process it is decides which side of the page is meant: a worker has --worker as its first
 * argument, fmhad-compile is a helper, and $FMHA_FAULTS_KIND says so of any other program. What is
 * neither (a shell, a compiler) goes unharmed.
 *
 * glibc's own names of malloc are used underneath: dlsym() allocates, so that malloc cannot be looked
 * up by it.
 */
#include "faults.h"

#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <fcntl.h>
#include <malloc.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SHOWN __attribute__((visibility("default")))

extern void *__libc_malloc(size_t size);
extern void *__libc_calloc(size_t n, size_t size);
extern void *__libc_realloc(void *block, size_t size);
extern void *__libc_memalign(size_t alignment, size_t size);
extern void __libc_free(void *block);

static struct fault_side unused; /* until the page is there, and in programs that are not meant */
static struct fault_side *side = &unused;
static _Thread_local bool inside; /* what the shim itself calls does not count */

void *fault_next(const char *name)
{
	bool was_inside = inside;
	void *function;

	inside = true;
	function = dlsym(RTLD_NEXT, name);
	inside = was_inside;
	if (!function)
		_exit(99); /* a program calls what no library has */
	return function;
}

/* ---- the page ---- */

static bool is_named(const char *path, const char *name)
{
	const char *slash = strrchr(path, '/');

	return strcmp(slash ? slash + 1 : path, name) == 0;
}

/* -1: not meant. */
static int kind_of_this(void)
{
	static const char *const names[N_KINDS] = {"front", "worker", "helper", "client"};
	const char *word = getenv("FMHA_FAULTS_KIND");
	char path[256], line[512], *second;
	ssize_t n = readlink("/proc/self/exe", path, sizeof(path) - 1);
	int fd;

	if (n < 0)
		return -1;
	path[n] = '\0';
	if (is_named(path, "fmhad-compile"))
		return KIND_HELPER;
	if (is_named(path, "fmhad")) {
		fd = (int)syscall(SYS_openat, AT_FDCWD, "/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
		n = syscall(SYS_read, fd, line, sizeof(line) - 1);
		(void)syscall(SYS_close, fd);
		line[n > 0 ? n : 0] = '\0';
		second = line + strlen(line) + 1;
		return second < line + n && strcmp(second, "--worker") == 0 ? KIND_WORKER
									    : KIND_FRONT;
	}
	for (int i = 0; word && i < N_KINDS; i++)
		if (strcmp(word, names[i]) == 0)
			return i;
	return -1;
}

__attribute__((constructor)) static void open_page(void)
{
	const char *path = getenv("FMHA_FAULTS");
	int kind = path ? kind_of_this() : -1;
	struct faults_page *page;
	void *frames[4];
	int fd;

	if (kind < 0)
		return;
	inside = true;
	(void)backtrace(frames, 4); /* loads what it needs: not in the middle of a fault */
	fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC);
	page = (void *)syscall(SYS_mmap, NULL, sizeof(*page), PROT_READ | PROT_WRITE, MAP_SHARED,
			       fd, 0);
	(void)syscall(SYS_close, fd);
	inside = false;
	if ((uintptr_t)page > UINTPTR_MAX - 4096 || page->magic != FAULTS_MAGIC ||
	    page->bytes != sizeof(*page)) {
		(void)fprintf(stderr, "faults: %s is no page of this shim's\n", path);
		_exit(99);
	}
	atomic_store(&page->sides[kind].blocks, atomic_load(&unused.blocks));
	atomic_store(&page->sides[kind].pid, (uint32_t)getpid());
	side = &page->sides[kind];
}

/* Who called: the frames above the shim's own. */
static void remember(const char *function, int error)
{
	void *frames[FAULTS_FRAMES + 4];
	int n = backtrace(frames, FAULTS_FRAMES + 4);
	Dl_info info;

	(void)snprintf(side->function, sizeof(side->function), "%s", function);
	side->error = (uint32_t)error;
	side->n_frames = 0;
	for (int i = 0; i < n && side->n_frames < FAULTS_FRAMES; i++) {
		struct fault_frame *frame = &side->frames[side->n_frames];
		const char *slash;

		if (!dladdr(frames[i], &info) || !info.dli_fname)
			continue;
		slash = strrchr(info.dli_fname, '/');
		slash = slash ? slash + 1 : info.dli_fname;
		if (strncmp(slash, "libfmha_faults", 14) == 0)
			continue;
		(void)snprintf(frame->module, sizeof(frame->module), "%s", slash);
		frame->offset = (uint64_t)frames[i] - (uint64_t)info.dli_fbase;
		side->n_frames++;
	}
}

int fault_now(enum fault_class class, const char *function, const int errors[2])
{
	uint32_t mode;
	int64_t left;
	int error;

	if (inside)
		return 0;
	atomic_fetch_add_explicit(&side->calls[class], 1, memory_order_relaxed);
	mode = atomic_load(&side->mode);
	if (mode == MODE_OFF || atomic_load(&side->class) != (uint32_t) class)
		return 0;
	left = atomic_fetch_sub(&side->left, 1);
	if (left > 1 || (left < 1 && mode == MODE_ONCE))
		return 0;
	error = errors[atomic_load(&side->variant) & 1];
	error = error ? error : errors[0];
	inside = true;
	if (atomic_fetch_add(&side->delivered, 1) == 0)
		remember(function, error);
	inside = false;
	errno = error;
	return -1;
}

/* ---- memory ---- */

static _Thread_local bool starving;

void fault_starve(void)
{
	starving = true;
}

void fault_feed(void)
{
	starving = false;
}

/* Whether this allocation is to fail; errno is set then. */
static bool is_refused(const char *function)
{
	if (starving && !inside) {
		errno = ENOMEM;
		return true;
	}
	return FAULT(MEMORY, function, ENOMEM);
}

static void *count(void *block)
{
	if (block)
		atomic_fetch_add_explicit(&side->blocks, 1, memory_order_relaxed);
	return block;
}

SHOWN void *malloc(size_t size)
{
	return is_refused("malloc") ? NULL : count(__libc_malloc(size));
}

SHOWN void *calloc(size_t n, size_t size)
{
	return is_refused("calloc") ? NULL : count(__libc_calloc(n, size));
}

SHOWN void *realloc(void *block, size_t size)
{
	void *grown;

	if (is_refused("realloc"))
		return NULL;
	grown = __libc_realloc(block, size);
	if (!block)
		return count(grown);
	if (size == 0 && !grown) /* it was freed */
		atomic_fetch_sub_explicit(&side->blocks, 1, memory_order_relaxed);
	return grown;
}

SHOWN void *reallocarray(void *block, size_t n, size_t size)
{
	size_t bytes;

	if (__builtin_mul_overflow(n, size, &bytes)) {
		errno = ENOMEM;
		return NULL;
	}
	return realloc(block, bytes);
}

SHOWN void *aligned_alloc(size_t alignment, size_t size)
{
	return is_refused("aligned_alloc") ? NULL : count(__libc_memalign(alignment, size));
}

SHOWN void *memalign(size_t alignment, size_t size)
{
	return is_refused("memalign") ? NULL : count(__libc_memalign(alignment, size));
}

SHOWN int posix_memalign(void **ret_block, size_t alignment, size_t size)
{
	void *block = is_refused("posix_memalign") ? NULL : count(__libc_memalign(alignment, size));

	if (!block)
		return ENOMEM;
	*ret_block = block;
	return 0;
}

SHOWN void free(void *block)
{
	if (block)
		atomic_fetch_sub_explicit(&side->blocks, 1, memory_order_relaxed);
	__libc_free(block);
}

/* ---- the end ---- */

/* Whose it was tells whether the product could have done anything about it. */
static void note_abort(const void *caller)
{
	Dl_info info;
	const char *slash;

	inside = true;
	if (dladdr(caller, &info) && info.dli_fname) {
		slash = strrchr(info.dli_fname, '/');
		(void)snprintf(side->aborted_in, sizeof(side->aborted_in), "%s",
			       slash ? slash + 1 : info.dli_fname);
	}
	atomic_fetch_add(&side->aborts, 1);
}

SHOWN void abort(void)
{
	static void *_Atomic next_abort;

	note_abort(__builtin_return_address(0));
	((void (*)(void))next_of(&next_abort, "abort"))();
	__builtin_unreachable();
}

SHOWN void __assert_fail(const char *what, const char *file, unsigned line, const char *function)
{
	static void *_Atomic next_fail;

	note_abort(__builtin_return_address(0));
	((void (*)(const char *, const char *, unsigned, const char *))next_of(
		&next_fail, "__assert_fail"))(what, file, line, function);
	__builtin_unreachable();
}
