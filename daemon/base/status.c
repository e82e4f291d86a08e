/* SPDX-License-Identifier: MIT */
#include <base/status.h>

#include <stdio.h>
#include <unistd.h>

uint64_t status_resident_bytes(void)
{
	unsigned long long size, resident, shared;
	FILE *file = fopen("/proc/self/statm", "re");
	int n;

	if (!file)
		return 0;
	n = fscanf(file, "%llu %llu %llu", &size, &resident, &shared);
	(void)fclose(file);
	return n == 3 ? (resident - shared) * (uint64_t)sysconf(_SC_PAGESIZE) : 0;
}

void status_add_histogram(cJSON *object, const char *name, const struct histogram *histogram)
{
	cJSON *item = cJSON_AddObjectToObject(object, name);

	cJSON_AddNumberToObject(item, "n", (double)histogram->n);
	cJSON_AddNumberToObject(item, "p50", (double)histogram_quantile(histogram, 500));
	cJSON_AddNumberToObject(item, "p99", (double)histogram_quantile(histogram, 990));
	cJSON_AddNumberToObject(item, "max", (double)histogram->max);
}

cJSON *status_limits(const struct limits *limits)
{
	cJSON *object = cJSON_CreateObject();

	for (int i = 0; i < N_LIMITS; i++) {
		cJSON *item = cJSON_AddObjectToObject(object, limit_name((enum limit)i));

		cJSON_AddNumberToObject(item, "value", (double)limits->value[i]);
		cJSON_AddNumberToObject(item, "hits", (double)limits->hits[i]);
	}
	return object;
}
