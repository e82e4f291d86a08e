/* SPDX-License-Identifier: MIT */
/*
 * fmhactl build: hands over to fmhad-build, which belongs to the daemon: compilers and the cache
 * are its business.
 */
#include "ctl.h"

#include <compile/build_usage.h>

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static int build(int argc, char **argv)
{
	char self[PATH_MAX], path[PATH_MAX + 64];
	ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);

	(void)argc;
	self[n > 0 ? n : 0] = '\0';
	if (strrchr(self, '/'))
		*strrchr(self, '/') = '\0';
	/* A build tree's, or the installed one. */
	(void)snprintf(path, sizeof(path), "%s/../../daemon/compile/fmhad-build", self);
	if (access(path, X_OK) == 0)
		(void)execv(path, argv);
	(void)execv(FMHAD_LIBEXEC_DIR "/fmhad-build", argv);
	(void)fprintf(stderr, "fmhactl: %s/fmhad-build: %s\n", FMHAD_LIBEXEC_DIR, strerror(errno));
	return CTL_IO;
}

const struct ctl_command ctl_build = {.usage = BUILD_USAGE, .run = build};
