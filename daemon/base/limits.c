/* SPDX-License-Identifier: MIT */
#include <base/limits.h>

#include <stdio.h>
#include <sys/resource.h>
#include <unistd.h>

#define LEAST_FDS       16
#define USUAL_MAP_COUNT 65530

static uint64_t most_fds(void)
{
	struct rlimit limit;

	if (getrlimit(RLIMIT_NOFILE, &limit) < 0)
		return 1024;
	return limit.rlim_cur == RLIM_INFINITY ? 1 << 20 : limit.rlim_cur;
}

static uint64_t most_mappings(void)
{
	unsigned long long n = USUAL_MAP_COUNT;
	FILE *file = fopen("/proc/sys/vm/max_map_count", "re");

	if (file) {
		if (fscanf(file, "%llu", &n) != 1)
			n = USUAL_MAP_COUNT;
		(void)fclose(file);
	}
	return n;
}

uint64_t limits_host_memory(void)
{
	return (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
}

void limits_resolve(struct limits *limits, uint64_t memory_bytes)
{
	uint64_t *value = limits->value, fds = most_fds();

	if (value[LIMIT_MEMORY_BYTES] == 0)
		value[LIMIT_MEMORY_BYTES] = memory_bytes / 4 * 3;
	if (value[LIMIT_MEMORY_BYTES_PER_UID] == 0)
		value[LIMIT_MEMORY_BYTES_PER_UID] = memory_bytes / 2;
	if (value[LIMIT_FDS] == 0)
		value[LIMIT_FDS] = fds > value[LIMIT_RESERVED_FDS] + LEAST_FDS
					   ? fds - value[LIMIT_RESERVED_FDS]
					   : LEAST_FDS;
	if (value[LIMIT_FDS_PER_UID] > value[LIMIT_FDS] / 2)
		value[LIMIT_FDS_PER_UID] = value[LIMIT_FDS] / 2;
	if (value[LIMIT_BUFFERS] == 0)
		value[LIMIT_BUFFERS] = most_mappings() / 2;
}
