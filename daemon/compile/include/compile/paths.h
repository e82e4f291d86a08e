/* SPDX-License-Identifier: MIT */
/*
 * paths.h: where the compile helper, the device sources and the cache are when nobody says
 * otherwise.
 */
#ifndef FMHAD_COMPILE_PATHS_H
#define FMHAD_COMPILE_PATHS_H

#include <limits.h>

struct compile_paths {
	char helper[PATH_MAX];  /* fmhad-compile: of this program's build tree, else installed */
	char sources[PATH_MAX]; /* installed, else of the source tree */
	char cache[PATH_MAX];   /* systemd's for the service, a user's own, else the machine's */
};

void compile_paths_default(struct compile_paths *paths);

#endif
