/* SPDX-License-Identifier: MIT */
#include <tree/tree.h>

#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define MOST_LEVELS 5 /* build/PRESET/tests/unit/LAYER/PROGRAM */

static const char *const folders[] = {[TREE_PROGRAMS] = TREE_BIN_DIR,
				      [TREE_DATA] = TREE_DATA_DIR,
				      [TREE_HELPERS] = TREE_LIBEXEC_DIR,
				      [TREE_MODULES] = TREE_LIB_DIR};

/* Writes the nearest folder above the program that has data; "" when there is none, which makes
 * paths that exist nowhere, or at the root as people expect them. */
static void find_root(char root[PATH_MAX])
{
	ssize_t n = readlink("/proc/self/exe", root, PATH_MAX - 1);

	root[n > 0 ? n : 0] = '\0';
	for (int level = 0; level < MOST_LEVELS && strrchr(root, '/'); level++) {
		char data[PATH_MAX + sizeof(TREE_DATA_DIR)];

		*strrchr(root, '/') = '\0';
		(void)snprintf(data, sizeof(data), "%s/%s", root, TREE_DATA_DIR);
		if (access(data, F_OK) == 0)
			return;
	}
	root[0] = '\0';
}

const char *tree_path(enum tree_folder folder, const char *name, char *path, size_t size)
{
	char root[PATH_MAX];

	find_root(root);
	(void)snprintf(path, size, "%s/%s/%s", root, folders[folder], name);
	return path;
}
