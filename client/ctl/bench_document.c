/* SPDX-License-Identifier: MIT */
/* bench_document.c: reports as JSON, there and back, and as CSV. client/docs/bench.md is the schema. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bench.h"
#include "json.h"

/* The numbers of a shape that rows carry, in the order of columns. */
#define SIZES(X)                                                                                   \
	X(op)                                                                                      \
	X(data_type)                                                                               \
	X(mode)                                                                                    \
	X(batch)                                                                                   \
	X(nhead_q)                                                                                 \
	X(nhead_k)                                                                                 \
	X(seqlen_q) X(seqlen_k) X(hdim_q) X(hdim_v) X(lengths) X(mask) X(page_size) X(n_splits)

const char *bench_dtype_word(int32_t data_type)
{
	return spec_shape_word("data_type", data_type);
}

/* ---- rows and reports ---- */

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

/* ---- to JSON ---- */

static void add_sizes(cJSON *to, const struct spec_shape *sizes)
{
	const char *word;

#define ADD_SIZE(name)                                                                             \
	word = spec_shape_word(#name, sizes->name);                                                \
	if (word)                                                                                  \
		cJSON_AddStringToObject(to, #name, word);                                          \
	else                                                                                       \
		cJSON_AddNumberToObject(to, #name, sizes->name);
	SIZES(ADD_SIZE)
#undef ADD_SIZE
}

static cJSON *row_to_json(const struct bench_row *row)
{
	cJSON *object = cJSON_CreateObject();

	cJSON_AddStringToObject(object, "shape", row->shape);
	cJSON_AddStringToObject(object, "group", row->group);
	cJSON_AddStringToObject(object, "kernel", row->kernel);
	cJSON_AddBoolToObject(object, "chosen", row->chosen);
	add_sizes(cJSON_AddObjectToObject(object, "sizes"), &row->sizes);
	if (row->failure) {
		cJSON_AddStringToObject(object, "failure", row->failure);
		return object;
	}
	cJSON_AddNumberToObject(object, "runs", row->runs);
	cJSON_AddNumberToObject(object, "median_us", row->median_us);
	cJSON_AddNumberToObject(object, "min_us", row->min_us);
	cJSON_AddNumberToObject(object, "spread", row->spread);
	cJSON_AddNumberToObject(object, "tflops", row->tflops);
	cJSON_AddNumberToObject(object, "gbs", row->gbs);
	cJSON_AddNumberToObject(object, "intensity", row->intensity);
	if (row->roof > 0)
		cJSON_AddNumberToObject(object, "roof", row->roof);
	if (row->allowed > 0) {
		cJSON_AddNumberToObject(object, "error", row->error);
		cJSON_AddNumberToObject(object, "allowed", row->allowed);
	}
	return object;
}

static void add_summary(cJSON *to, const struct bench_device *device)
{
	cJSON *object = cJSON_AddObjectToObject(to, "summary"), *choice;
	struct bench_verdict v;

	bench_judge(device, &v);
	cJSON_AddNumberToObject(object, "shapes", (double)v.n_shapes);
	cJSON_AddNumberToObject(object, "rows", (double)device->n_rows);
	cJSON_AddNumberToObject(object, "failed", (double)v.n_failed);
	cJSON_AddNumberToObject(object, "wrong", (double)v.n_wrong);
	choice = cJSON_AddObjectToObject(object, "choice");
	cJSON_AddNumberToObject(choice, "shapes", (double)v.n_shares);
	cJSON_AddNumberToObject(choice, "mean", v.mean);
	cJSON_AddNumberToObject(choice, "tenth_percentile", v.tenth);
	cJSON_AddNumberToObject(choice, "worst", v.worst);
	free(v.shares);
}

static cJSON *device_to_json(const struct bench_device *device)
{
	const struct fmha_device_info *info = &device->info;
	cJSON *object = cJSON_CreateObject(), *roofs, *list;

	cJSON_AddNumberToObject(object, "device", info->device);
	cJSON_AddStringToObject(object, "name", info->name);
	cJSON_AddStringToObject(object, "arch", info->arch);
	cJSON_AddStringToObject(object, "backend", info->backend);
	cJSON_AddNumberToObject(object, "compute_units", info->compute_units);
	cJSON_AddNumberToObject(object, "memory_bytes", (double)info->memory_bytes);
	cJSON_AddStringToObject(object, "driver", device->driver);
	cJSON_AddStringToObject(object, "compiler", device->compiler);
	roofs = cJSON_AddObjectToObject(object, "roofs");
	cJSON_AddNumberToObject(roofs, "gbs", device->gbs);
	list = cJSON_AddObjectToObject(roofs, "tflops");
	for (size_t i = 0; i < device->n_roofs; i++)
		cJSON_AddNumberToObject(list, bench_dtype_word((int32_t)device->roofs[i].dtype),
					device->roofs[i].tflops);
	add_summary(object, device);
	list = cJSON_AddArrayToObject(object, "rows");
	for (size_t i = 0; i < device->n_rows; i++)
		cJSON_AddItemToArray(list, row_to_json(&device->rows[i]));
	return object;
}

cJSON *bench_to_json(const struct bench_report *report)
{
	cJSON *root = cJSON_CreateObject(), *list;

	cJSON_AddStringToObject(root, "format", BENCH_FORMAT);
	cJSON_AddNumberToObject(root, "version", BENCH_VERSION);
	cJSON_AddStringToObject(root, "created", report->created);
	cJSON_AddStringToObject(root, "command", report->command);
	cJSON_AddStringToObject(root, "fmhactl", fmha_version());
	cJSON_AddStringToObject(root, "server", report->server);
	cJSON_AddStringToObject(root, "host", report->host);
	cJSON_AddItemToObject(root, "settings", cJSON_Duplicate(report->settings, true));
	list = cJSON_AddArrayToObject(root, "devices");
	for (size_t i = 0; i < report->n_devices; i++)
		cJSON_AddItemToArray(list, device_to_json(&report->devices[i]));
	return root;
}

int bench_write_file(const char *path, void (*print)(FILE *out, const void *what), const void *what)
{
	char *beside = NULL;
	FILE *file = NULL;
	bool written = false;

	if (asprintf(&beside, "%s.%d", path, (int)getpid()) < 0)
		return ctl_usage_error("out of memory");
	file = fopen(beside, "we");
	if (file) {
		print(file, what);
		written = !ferror(file);
		written = fclose(file) == 0 && written && rename(beside, path) == 0;
	}
	if (!written) {
		(void)fprintf(stderr, "fmhactl: %s: %s\n", path, strerror(errno));
		(void)unlink(beside);
	}
	free(beside);
	return written ? 0 : CTL_IO;
}

static void print_json(FILE *out, const void *what)
{
	cJSON *root = bench_to_json(what);
	char *text = cJSON_Print(root);

	if (!text || fputs(text, out) < 0 || fputc('\n', out) == EOF)
		(void)fputs("", out);
	cJSON_free(text);
	cJSON_Delete(root);
}

int bench_write(const struct bench_report *report, const char *path)
{
	return bench_write_file(path, print_json, report);
}

/* ---- CSV ---- */

/* Quotes are doubled, so that any text is one cell. */
static void put_cell(FILE *out, const char *text)
{
	(void)fputc('"', out);
	for (; text && *text; text++) {
		if (*text == '"')
			(void)fputc('"', out);
		(void)fputc(*text, out);
	}
	(void)fputc('"', out);
}

static void put_row(FILE *out, const struct bench_device *device, const struct bench_row *row)
{
	const char *word;

	(void)fprintf(out, "%u,", device->info.device);
	put_cell(out, device->info.name);
	(void)fputc(',', out);
	put_cell(out, row->group);
	(void)fputc(',', out);
	put_cell(out, row->shape);
#define PUT_SIZE(name)                                                                             \
	word = spec_shape_word(#name, row->sizes.name);                                            \
	if (word)                                                                                  \
		(void)fprintf(out, ",%s", word);                                                   \
	else                                                                                       \
		(void)fprintf(out, ",%d", row->sizes.name);
	SIZES(PUT_SIZE)
#undef PUT_SIZE
	(void)fputc(',', out);
	put_cell(out, row->kernel);
	(void)fprintf(out, ",%d,%u,%.9g,%.9g,%.4g,%.9g,%.9g,%.6g,%.6g,%.6g,%.6g,", row->chosen,
		      row->runs, row->median_us, row->min_us, row->spread, row->tflops, row->gbs,
		      row->intensity, row->roof, row->error, row->allowed);
	put_cell(out, row->failure);
	(void)fputc('\n', out);
}

static void print_csv(FILE *out, const void *what)
{
	const struct bench_report *report = what;

	(void)fputs("device,name,group,shape", out);
#define PUT_NAME(name) (void)fputs("," #name, out);
	SIZES(PUT_NAME)
#undef PUT_NAME
	(void)fputs(",kernel,chosen,runs,median_us,min_us,spread,tflops,gbs,intensity,roof,error,"
		    "allowed,failure\n",
		    out);
	for (size_t d = 0; d < report->n_devices; d++)
		for (size_t i = 0; i < report->devices[d].n_rows; i++)
			put_row(out, &report->devices[d], &report->devices[d].rows[i]);
}

int bench_write_csv(const struct bench_report *report, const char *path)
{
	return bench_write_file(path, print_csv, report);
}

/* ---- from JSON ---- */

static int32_t size_of(const cJSON *sizes, const char *name)
{
	const cJSON *item = cJSON_GetObjectItemCaseSensitive(sizes, name);
	const char *word;

	if (!cJSON_IsString(item))
		return (int32_t)number_of(sizes, name);
	for (int32_t i = 0; (word = spec_shape_word(name, i)); i++)
		if (!strcmp(word, item->valuestring))
			return i;
	return 0;
}

static void read_row(const cJSON *object, struct bench_row *row)
{
	const cJSON *sizes = cJSON_GetObjectItemCaseSensitive(object, "sizes");

	row->shape = strdup(text_of(object, "shape"));
	row->group = strdup(text_of(object, "group"));
	row->kernel = strdup(text_of(object, "kernel"));
	if (text_of(object, "failure")[0])
		row->failure = strdup(text_of(object, "failure"));
	row->chosen = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(object, "chosen"));
#define READ_SIZE(name) row->sizes.name = size_of(sizes, #name);
	SIZES(READ_SIZE)
#undef READ_SIZE
	row->runs = (uint32_t)number_of(object, "runs");
	row->median_us = number_of(object, "median_us");
	row->min_us = number_of(object, "min_us");
	row->spread = number_of(object, "spread");
	row->tflops = number_of(object, "tflops");
	row->gbs = number_of(object, "gbs");
	row->intensity = number_of(object, "intensity");
	row->roof = number_of(object, "roof");
	row->error = number_of(object, "error");
	row->allowed = number_of(object, "allowed");
}

static void read_device(const cJSON *object, struct bench_device *device)
{
	const cJSON *roofs = cJSON_GetObjectItemCaseSensitive(object, "roofs"), *item;
	struct fmha_device_info *info = &device->info;
	struct bench_row *row;

	info->device = (uint32_t)number_of(object, "device");
	info->compute_units = (uint32_t)number_of(object, "compute_units");
	info->memory_bytes = (uint64_t)number_of(object, "memory_bytes");
	(void)snprintf(info->name, sizeof(info->name), "%s", text_of(object, "name"));
	(void)snprintf(info->arch, sizeof(info->arch), "%s", text_of(object, "arch"));
	(void)snprintf(info->backend, sizeof(info->backend), "%s", text_of(object, "backend"));
	device->driver = strdup(text_of(object, "driver"));
	device->compiler = strdup(text_of(object, "compiler"));
	device->gbs = number_of(roofs, "gbs");
	cJSON_ArrayForEach(item, cJSON_GetObjectItemCaseSensitive(roofs, "tflops"))
	{
		for (int32_t i = 0; bench_dtype_word(i) && device->n_roofs < FMHA_N_DTYPES; i++)
			if (!strcmp(bench_dtype_word(i), item->string))
				device->roofs[device->n_roofs++] = (struct bench_roof){
					(uint32_t)i, item->valuedouble};
	}
	cJSON_ArrayForEach(item, cJSON_GetObjectItemCaseSensitive(object, "rows"))
	{
		row = bench_add_row(device);
		if (row)
			read_row(item, row);
	}
}

static int read_report(const cJSON *root, const char *path, struct bench_report *report)
{
	const cJSON *devices = cJSON_GetObjectItemCaseSensitive(root, "devices"), *item;

	if (strcmp(text_of(root, "format"), BENCH_FORMAT) != 0 ||
	    number_of(root, "version") != BENCH_VERSION || !cJSON_IsArray(devices)) {
		(void)fprintf(stderr, "fmhactl: %s: no %s document of version %d\n", path,
			      BENCH_FORMAT, BENCH_VERSION);
		return CTL_IO;
	}
	report->created = strdup(text_of(root, "created"));
	report->command = strdup(text_of(root, "command"));
	report->server = strdup(text_of(root, "server"));
	report->host = strdup(text_of(root, "host"));
	report->settings = cJSON_Duplicate(cJSON_GetObjectItemCaseSensitive(root, "settings"),
					   true);
	report->devices = calloc((size_t)cJSON_GetArraySize(devices) + 1, sizeof(*report->devices));
	cJSON_ArrayForEach(item, devices)
	{
		if (report->devices)
			read_device(item, &report->devices[report->n_devices++]);
	}
	return 0;
}

int bench_read(const char *path, struct bench_report *ret_report)
{
	cJSON *root = ctl_read_json(path);
	int r = root ? 0 : CTL_IO;

	*ret_report = (struct bench_report){0};
	if (r == 0)
		r = read_report(root, path, ret_report);
	cJSON_Delete(root);
	return r;
}
