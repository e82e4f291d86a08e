/* SPDX-License-Identifier: MIT */
/*
 * fmhactl build: hands over to fmhad-build, which belongs to the daemon: compilers and the cache
 * are its business.
 */
#include "ctl.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <compile/build_usage.h>
#include <tree/tree.h>

static int build(int argc, char **argv)
{
	char path[PATH_MAX];

	(void)argc;
	(void)execv(tree_path(TREE_HELPERS, "fmhad-build", path, sizeof(path)), argv);
	return ctl_file_error(path);
}

const struct ctl_command ctl_build = {.usage = BUILD_USAGE, .run = build};
