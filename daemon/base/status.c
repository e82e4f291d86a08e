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
	cJSON *item = cJSON_AddObjectToObject(object, name), *buckets;

	cJSON_AddNumberToObject(item, "n", (double)histogram->n);
	cJSON_AddNumberToObject(item, "p50", (double)histogram_quantile(histogram, 500));
	cJSON_AddNumberToObject(item, "p99", (double)histogram_quantile(histogram, 990));
	cJSON_AddNumberToObject(item, "max", (double)histogram->max);
	cJSON_AddNumberToObject(item, "sum", (double)histogram->sum);
	buckets = cJSON_AddArrayToObject(item, "buckets");
	for (unsigned int power = 10; power <= 36; power += 2)
		cJSON_AddItemToArray(buckets, cJSON_CreateNumber((double)histogram_count_below(
						      histogram, power)));
}

cJSON *status_errors(const uint64_t n_errors[CONNECTION_ERRORS])
{
	cJSON *object = cJSON_CreateObject();

	for (int i = 0; i < CONNECTION_ERRORS; i++)
		if (n_errors[i] > 0)
			cJSON_AddNumberToObject(object, fmha_error_name(-i), (double)n_errors[i]);
	return object;
}

cJSON *status_loop(const struct doing *doing)
{
	cJSON *object = cJSON_CreateObject();

	for (uint32_t i = 0; i < N_DOING; i++) {
		const struct doing_cost *cost = &doing->costs[i];
		cJSON *item;

		if (cost->n == 0)
			continue;
		item = cJSON_AddObjectToObject(object, doing_name(doing_word(i, 0)));
		cJSON_AddNumberToObject(item, "n", (double)cost->n);
		cJSON_AddNumberToObject(item, "cpu_ns", (double)cost->cpu_ns);
		cJSON_AddNumberToObject(item, "longest_ns", (double)cost->longest_ns);
	}
	return object;
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
