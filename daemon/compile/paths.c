/* SPDX-License-Identifier: MIT */
#include <compile/config.h>

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <tree/tree.h>

/* The machine's: root's, and that of a service's user whom an administrator gave the folder. */
static bool is_ours(const char *path)
{
	struct stat st;

	return geteuid() == 0 ||
	       (stat(path, &st) == 0 && S_ISDIR(st.st_mode) && st.st_uid == geteuid());
}

static void find_cache(char *path, size_t size)
{
	const char *service = getenv("CACHE_DIRECTORY"); /* from systemd */
	const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");

	if (service && service[0] == '/')
		(void)snprintf(path, size, "%s", service);
	else if (is_ours("/var/cache/fmhad"))
		(void)snprintf(path, size, "/var/cache/fmhad");
	else if (cache && cache[0] == '/')
		(void)snprintf(path, size, "%s/fmhad", cache);
	else if (home && home[0] == '/')
		(void)snprintf(path, size, "%s/.cache/fmhad", home);
	else
		(void)snprintf(path, size, "/var/cache/fmhad");
}

void compile_paths_default(struct compile_paths *paths)
{
	(void)tree_path(TREE_DATA, "kernels/gpu", paths->sources, sizeof(paths->sources));
	(void)tree_path(TREE_HELPERS, "fmhad-compile", paths->helper, sizeof(paths->helper));
	find_cache(paths->cache, sizeof(paths->cache));
}
