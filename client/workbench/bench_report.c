/* SPDX-License-Identifier: MIT */
/* bench_report.c: a report in memory: its rows, and the words of its numbers. */
#include <stdlib.h>
#include <string.h>

#include "bench.h"

const char *bench_dtype_word(int32_t data_type)
{
	return spec_shape_word("data_type", data_type);
}

struct bench_row *bench_add_row(struct bench_device *device)
{
	struct bench_row *rows = device->rows;

	if (device->n_rows == device->capacity) {
		size_t capacity = device->capacity ? 2 * device->capacity : 256;

		rows = realloc(rows, capacity * sizeof(*rows));
		if (!rows)
			return NULL;
		device->rows = rows;
		device->capacity = capacity;
	}
	rows[device->n_rows] = (struct bench_row){0};
	return &rows[device->n_rows++];
}

const struct bench_row *bench_find_row(const struct bench_device *device, const char *shape,
				       const char *kernel)
{
	for (size_t i = 0; i < device->n_rows; i++)
		if (!strcmp(device->rows[i].shape, shape) &&
		    !strcmp(device->rows[i].kernel, kernel))
			return &device->rows[i];
	return NULL;
}

void bench_report_deinit(struct bench_report *report)
{
	for (size_t d = 0; d < report->n_devices; d++) {
		struct bench_device *device = &report->devices[d];

		for (size_t i = 0; i < device->n_rows; i++) {
			free(device->rows[i].shape);
			free(device->rows[i].group);
			free(device->rows[i].kernel);
			free(device->rows[i].failure);
		}
		free(device->rows);
		free(device->driver);
		free(device->compiler);
	}
	free(report->devices);
	free(report->created);
	free(report->command);
	free(report->server);
	free(report->host);
	cJSON_Delete(report->settings);
	*report = (struct bench_report){0};
}
