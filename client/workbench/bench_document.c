/* SPDX-License-Identifier: MIT */
/* bench_document.c: reports as JSON, there and back, and as CSV. client/docs/bench.md is the schema. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <catalogue/backends.h>
#include <specs/backend.h>

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
	cJSON_AddNumberToObject(choice, "median", v.median);
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
	if (report->seconds > 0)
		cJSON_AddNumberToObject(root, "seconds", report->seconds);
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
	return ctl_replace_file(path, print_json, report);
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

/* What the kernel's name says: all that tells it from others, so that a table can be grouped by it. */
static const enum spec_field kernel_columns[] = {
	SPEC_FIELD_family,     SPEC_FIELD_pipeline,  SPEC_FIELD_gfx_arch,    SPEC_FIELD_tile_m0,
	SPEC_FIELD_tile_n0,    SPEC_FIELD_tile_k0,   SPEC_FIELD_tile_n1,     SPEC_FIELD_tile_k1,
	SPEC_FIELD_tile_k0max, SPEC_FIELD_tile_bwd6, SPEC_FIELD_tile_bwd7,   SPEC_FIELD_tile_bwd8,
	SPEC_FIELD_wave_m0,    SPEC_FIELD_wave_n0,   SPEC_FIELD_wave_k0,     SPEC_FIELD_wave_m1,
	SPEC_FIELD_wave_n1,    SPEC_FIELD_wave_k1,   SPEC_FIELD_wave_m2,     SPEC_FIELD_wave_n2,
	SPEC_FIELD_wave_k2,    SPEC_FIELD_warp_m0,   SPEC_FIELD_warp_n0,     SPEC_FIELD_warp_k0,
	SPEC_FIELD_warp_m1,    SPEC_FIELD_warp_n1,   SPEC_FIELD_warp_k1,     SPEC_FIELD_warp_m2,
	SPEC_FIELD_warp_n2,    SPEC_FIELD_warp_k2,   SPEC_FIELD_block_per_cu};
#define N_KERNEL_COLUMNS (sizeof(kernel_columns) / sizeof(kernel_columns[0]))

static void put_kernel(FILE *out, const struct spec_catalog *catalog, const char *kernel)
{
	struct kernel_spec spec;
	bool known = catalog && spec_name_parse(catalog, kernel, &spec, NULL) == 0;

	for (size_t i = 0; i < N_KERNEL_COLUMNS; i++) {
		int64_t value = known ? spec_get(&spec, kernel_columns[i]) : 0;
		const char *word = known ? spec_word(catalog, kernel_columns[i], value) : NULL;

		(void)fputc(',', out);
		if (word)
			(void)fputs(word, out);
		else if (known)
			(void)fprintf(out, "%" PRId64, value);
	}
}

static void put_row(FILE *out, const struct spec_catalog *catalog,
		    const struct bench_device *device, const struct bench_row *row)
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
	put_kernel(out, catalog, row->kernel);
	(void)fputc('\n', out);
}

static void print_csv(FILE *out, const void *what)
{
	const struct bench_report *report = what;
	struct spec_catalog *catalog = NULL;

	/* Names of kernels of another build: their columns stay empty. */
	if (spec_catalog_own(fmha_backends, &catalog, NULL) < 0)
		catalog = NULL;
	(void)fputs("device,name,group,shape", out);
#define PUT_NAME(name) (void)fputs("," #name, out);
	SIZES(PUT_NAME)
#undef PUT_NAME
	(void)fputs(",kernel,chosen,runs,median_us,min_us,spread,tflops,gbs,intensity,roof,error,"
		    "allowed,failure",
		    out);
	for (size_t i = 0; i < N_KERNEL_COLUMNS; i++)
		(void)fprintf(out, ",%s", spec_field_name(kernel_columns[i]));
	(void)fputc('\n', out);
	for (size_t d = 0; d < report->n_devices; d++)
		for (size_t i = 0; i < report->devices[d].n_rows; i++)
			put_row(out, catalog, &report->devices[d], &report->devices[d].rows[i]);
	spec_catalog_free(catalog);
}

int bench_write_csv(const struct bench_report *report, const char *path)
{
	return ctl_replace_file(path, print_csv, report);
}

/* ---- from JSON ---- */

static int32_t size_of(const cJSON *sizes, const char *name)
{
	const cJSON *item = ctl_member(sizes, name);
	const char *word;

	if (!cJSON_IsString(item))
		return (int32_t)ctl_number(sizes, name);
	for (int32_t i = 0; (word = spec_shape_word(name, i)); i++)
		if (!strcmp(word, item->valuestring))
			return i;
	return 0;
}

static void read_row(const cJSON *object, struct bench_row *row)
{
	const cJSON *sizes = ctl_member(object, "sizes");

	row->shape = strdup(ctl_text(object, "shape"));
	row->group = strdup(ctl_text(object, "group"));
	row->kernel = strdup(ctl_text(object, "kernel"));
	if (ctl_text(object, "failure")[0])
		row->failure = strdup(ctl_text(object, "failure"));
	row->chosen = cJSON_IsTrue(ctl_member(object, "chosen"));
#define READ_SIZE(name) row->sizes.name = size_of(sizes, #name);
	SIZES(READ_SIZE)
#undef READ_SIZE
	row->runs = (uint32_t)ctl_number(object, "runs");
	row->median_us = ctl_number(object, "median_us");
	row->min_us = ctl_number(object, "min_us");
	row->spread = ctl_number(object, "spread");
	row->tflops = ctl_number(object, "tflops");
	row->gbs = ctl_number(object, "gbs");
	row->intensity = ctl_number(object, "intensity");
	row->roof = ctl_number(object, "roof");
	row->error = ctl_number(object, "error");
	row->allowed = ctl_number(object, "allowed");
}

static void read_device(const cJSON *object, struct bench_device *device)
{
	const cJSON *roofs = ctl_member(object, "roofs"), *item;
	struct fmha_device_info *info = &device->info;
	struct bench_row *row;

	info->device = (uint32_t)ctl_number(object, "device");
	info->compute_units = (uint32_t)ctl_number(object, "compute_units");
	info->memory_bytes = (uint64_t)ctl_number(object, "memory_bytes");
	(void)snprintf(info->name, sizeof(info->name), "%s", ctl_text(object, "name"));
	(void)snprintf(info->arch, sizeof(info->arch), "%s", ctl_text(object, "arch"));
	(void)snprintf(info->backend, sizeof(info->backend), "%s", ctl_text(object, "backend"));
	device->driver = strdup(ctl_text(object, "driver"));
	device->compiler = strdup(ctl_text(object, "compiler"));
	device->gbs = ctl_number(roofs, "gbs");
	cJSON_ArrayForEach(item, ctl_member(roofs, "tflops"))
	{
		for (int32_t i = 0; bench_dtype_word(i) && device->n_roofs < FMHA_N_DTYPES; i++)
			if (!strcmp(bench_dtype_word(i), item->string))
				device->roofs[device->n_roofs++] = (struct bench_roof){
					(uint32_t)i, item->valuedouble};
	}
	cJSON_ArrayForEach(item, ctl_member(object, "rows"))
	{
		row = bench_add_row(device);
		if (row)
			read_row(item, row);
	}
}

static int read_report(const cJSON *root, const char *path, struct bench_report *report)
{
	const cJSON *devices = ctl_member(root, "devices"), *item;

	if (strcmp(ctl_text(root, "format"), BENCH_FORMAT) != 0 ||
	    ctl_number(root, "version") != BENCH_VERSION || !cJSON_IsArray(devices)) {
		(void)fprintf(stderr, "fmhactl: %s: no %s document of version %d\n", path,
			      BENCH_FORMAT, BENCH_VERSION);
		return CTL_IO;
	}
	report->seconds = ctl_number(root, "seconds");
	report->created = strdup(ctl_text(root, "created"));
	report->command = strdup(ctl_text(root, "command"));
	report->server = strdup(ctl_text(root, "server"));
	report->host = strdup(ctl_text(root, "host"));
	report->settings = cJSON_Duplicate(ctl_member(root, "settings"), true);
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
