/* SPDX-License-Identifier: MIT */
#include <base/limits.h>

#include <stdio.h>
#include <sys/resource.h>
#include <unistd.h>

#define LEAST_FDS       16
#define USUAL_MAP_COUNT 65530
#define MOST_KERNELS    4096

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

static uint64_t least_of(uint64_t a, uint64_t b)
{
	return a < b ? a : b;
}

void limits_resolve(struct limits *limits, uint64_t memory_bytes, bool keeps_code)
{
	uint64_t *value = limits->value, fds = most_fds(), reserved = value[LIMIT_RESERVED_FDS];
	uint64_t left;

	if (value[LIMIT_MEMORY_BYTES] == 0)
		value[LIMIT_MEMORY_BYTES] = memory_bytes / 4 * 3;
	if (value[LIMIT_MEMORY_BYTES_PER_UID] == 0)
		value[LIMIT_MEMORY_BYTES_PER_UID] = memory_bytes / 2;
	if (value[LIMIT_POOL_BYTES] == 0)
		value[LIMIT_POOL_BYTES] = limits_host_memory() / 2;
	if (value[LIMIT_POOL_BYTES_PER_UID] == 0)
		value[LIMIT_POOL_BYTES_PER_UID] = limits_host_memory() / 4;
	if (value[LIMIT_KERNELS] == 0)
		value[LIMIT_KERNELS] = least_of(fds / 4, MOST_KERNELS);
	if (value[LIMIT_KERNELS_IDLE] == 0)
		value[LIMIT_KERNELS_IDLE] = (value[LIMIT_KERNELS] + 7) / 8;
	if (keeps_code) {
		value[LIMIT_KERNELS] = least_of(value[LIMIT_KERNELS], fds / 2);
		value[LIMIT_KERNELS_IDLE] = least_of(value[LIMIT_KERNELS_IDLE], fds / 8);
		reserved += value[LIMIT_KERNELS] + value[LIMIT_KERNELS_IDLE];
	}
	left = fds > reserved + LEAST_FDS ? fds - reserved : LEAST_FDS;
	if (value[LIMIT_FDS] == 0 || value[LIMIT_FDS] > left)
		value[LIMIT_FDS] = left;
	value[LIMIT_KERNELS_PER_UID] = least_of(value[LIMIT_KERNELS_PER_UID],
						(value[LIMIT_KERNELS] + 1) / 2);
	if (value[LIMIT_FDS_PER_UID] > value[LIMIT_FDS] / 2)
		value[LIMIT_FDS_PER_UID] = value[LIMIT_FDS] / 2;
	if (value[LIMIT_BUFFERS] == 0)
		value[LIMIT_BUFFERS] = most_mappings() / 2;
}
