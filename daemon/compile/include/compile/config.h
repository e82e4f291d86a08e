/* SPDX-License-Identifier: MIT */
/* config.h: what every build on this machine is made with. */
#ifndef FMHAD_COMPILE_CONFIG_H
#define FMHAD_COMPILE_CONFIG_H

#include <limits.h>
#include <stdint.h>

struct compile_versions; /* compile.h */

struct compile_config {
	const char *helper;       /* path of fmhad-compile */
	const char *source_dir;   /* folder of the device sources; abi.h in ../include/kernels */
	const char *clang;        /* command, NULL: the first of a list found in PATH */
	const char *linker;       /* of what clang compiled: an ld.lld, NULL: clang's own */
	const char *library_path; /* LD_LIBRARY_PATH of the helper, NULL: none */
	uint32_t deadline_ms;     /* per build; 0: 60,000 */
	int stop_fd;              /* readable: end the helper, FMHA_ECANCELED; <= 0: none */
	int nice;                 /* of the helper, above the caller's */
	uint64_t memory_bytes;    /* address space of the helper; 0: 8 GiB */
	struct compile_versions *versions; /* NULL: a helper is asked every time */
};

/* deadline_ms with the default in place. */
uint32_t compile_deadline_ms(const struct compile_config *config);

/* ---- paths ---- */

/*
 * Where the compile helper, the device sources and the cache are when nobody says
 * otherwise.
 */

struct compile_paths {
	char helper[PATH_MAX];  /* fmhad-compile: of this program's build tree, else installed */
	char sources[PATH_MAX]; /* installed, else of the source tree */
	char cache[PATH_MAX];   /* systemd's for the service, a user's own, else the machine's */
};

void compile_paths_default(struct compile_paths *paths);

#endif
