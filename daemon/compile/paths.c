/* SPDX-License-Identifier: MIT */
#include <compile/paths.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void find_helper(char *path, size_t size)
{
	static const char *const beside[] = {"", "../compile/"};
	char self[PATH_MAX];
	ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);

	self[n > 0 ? n : 0] = '\0';
	if (strrchr(self, '/'))
		strrchr(self, '/')[1] = '\0';
	for (size_t i = 0; i < sizeof(beside) / sizeof(beside[0]); i++) {
		(void)snprintf(path, size, "%.4000s%sfmhad-compile", self, beside[i]);
		if (access(path, X_OK) == 0)
			return;
	}
	(void)snprintf(path, size, "%s", FMHAD_LIBEXEC_DIR "/fmhad-compile");
}

static void find_cache(char *path, size_t size)
{
	const char *service = getenv("CACHE_DIRECTORY"); /* from systemd */
	const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");

	if (service && service[0] == '/')
		(void)snprintf(path, size, "%s", service);
	else if (geteuid() != 0 && cache && cache[0] == '/')
		(void)snprintf(path, size, "%s/fmhad", cache);
	else if (geteuid() != 0 && home && home[0] == '/')
		(void)snprintf(path, size, "%s/.cache/fmhad", home);
	else
		(void)snprintf(path, size, "/var/cache/fmhad");
}

void compile_paths_default(struct compile_paths *paths)
{
	const char *sources = FMHAD_KERNEL_DIR;

	if (access(FMHAD_KERNEL_DIR "/fmha.hip", R_OK) != 0)
		sources = FMHAD_KERNEL_SOURCE_DIR;
	(void)snprintf(paths->sources, sizeof(paths->sources), "%s", sources);
	find_helper(paths->helper, sizeof(paths->helper));
	find_cache(paths->cache, sizeof(paths->cache));
}
