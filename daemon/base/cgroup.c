/* SPDX-License-Identifier: MIT */
#include <base/cgroup.h>

#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

/* Of version 2: the one line that begins with "0::". */
static bool find_group(const char *proc, char group[PATH_MAX])
{
	char path[PATH_MAX], line[PATH_MAX];
	bool found = false;
	FILE *file;

	(void)snprintf(path, sizeof(path), "%s/self/cgroup", proc);
	file = fopen(path, "re");
	if (!file)
		return false;
	while (!found && fgets(line, sizeof(line), file)) {
		found = strncmp(line, "0::", 3) == 0;
		line[strcspn(line, "\n")] = '\0';
		(void)snprintf(group, PATH_MAX, "%s", line + 3);
	}
	(void)fclose(file);
	return found;
}

uint64_t cgroup_oom_kills(const char *proc, const char *sys)
{
	char group[PATH_MAX], path[PATH_MAX + 128], line[128];
	unsigned long long n = 0;
	FILE *file;

	if (!find_group(proc, group))
		return 0;
	(void)snprintf(path, sizeof(path), "%.64s/fs/cgroup%s/memory.events", sys, group);
	file = fopen(path, "re");
	if (!file)
		return 0;
	while (fgets(line, sizeof(line), file))
		if (sscanf(line, "oom_kill %llu", &n) == 1)
			break;
	(void)fclose(file);
	return n;
}
