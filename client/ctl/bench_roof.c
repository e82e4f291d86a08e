/* SPDX-License-Identifier: MIT */
/*
 * bench_roof.c: what the device can do at best, measured through the same service as everything
 * else: bytes a second of a copy that is larger than the caches, and for each data type operations
 * a second of attention without a mask, long enough that nothing but multiplying takes time. These
 * are roofs of what kernels here reach, not of the silicon; --roof-tflops and --roof-gbps put
 * others in their place.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"

#define COPY_MIB       256
#define COPY_RUNS      5
#define LONG_ENOUGH_US 20000.0
#define LONGEST        16384

static int measure_copy(struct bench_device *report, struct fmha_device *device,
			struct fmha_error *err)
{
	struct bench_flush copy = {0};
	int r = bench_flush_init(&copy, device, COPY_MIB, err);

	for (int i = 0; i < COPY_RUNS && r == 0; i++) {
		struct fmha_run_result result;

		r = fmha_plan_run(copy.plan, NULL, &result, err);
		if (r == 0 && i > 0 && result.kernel_ns > 0 &&
		    copy.bytes / (double)result.kernel_ns > report->gbs)
			report->gbs = copy.bytes / (double)result.kernel_ns;
	}
	bench_flush_deinit(&copy);
	return r;
}

/* Attention of @length, and of twice that while it takes no time. */
static int measure_attention(struct bench_run *run, struct spec_shape shape,
			     struct bench_roof *roof, struct fmha_error *err)
{
	double us = 0;
	int r = 0;

	for (shape.seqlen_q = 1024; shape.seqlen_q <= LONGEST && us < LONG_ENOUGH_US && r == 0;
	     shape.seqlen_q *= 2) {
		struct bench_shape one = {.shape = shape, .group = "", .text = ""};
		struct bench_shapes shapes = {.list = &one, .n = 1};
		struct bench_items items = {0};
		const struct bench_lister lister = {.options = run->options, .device = run->device};
		const struct bench_row *row;

		one.shape.seqlen_k = shape.seqlen_q;
		r = bench_list_kernels(&lister, &shapes, 0, &items, err);
		if (r == 0 && items.n > 0)
			r = bench_measure(run, &shapes, &items, 0, items.n);
		bench_items_deinit(&items);
		if (r != 0 || run->report->n_rows == 0)
			break;
		row = &run->report->rows[run->report->n_rows - 1];
		us = row->failure ? LONG_ENOUGH_US : row->median_us;
		if (row->tflops > roof->tflops)
			roof->tflops = row->tflops;
	}
	return r;
}

static struct bench_roof *roof_of(struct bench_device *report, uint32_t dtype)
{
	for (size_t i = 0; i < report->n_roofs; i++)
		if (report->roofs[i].dtype == dtype)
			return &report->roofs[i];
	return NULL;
}

/* By the shape's number of a data type, which is that of the document's word. */
static int measure_type(struct bench_device *report, struct fmha_device *device,
			const struct bench_options *given, int32_t data_type,
			struct fmha_error *err)
{
	static const int32_t hdims[] = {64, 128};
	struct bench_options options = *given;
	struct bench_device scratch = {0};
	struct bench_run run = {.options = &options, .device = device, .report = &scratch};
	struct bench_roof *roof = &report->roofs[report->n_roofs];
	struct bench_report all = {.devices = NULL};
	int r = 0;

	options.all_kernels = options.check = false;
	options.cache = BENCH_WARM;
	options.warmup = 1;
	options.repeat = 5;
	*roof = (struct bench_roof){.dtype = (uint32_t)data_type};
	for (size_t i = 0; i < 2 && r == 0; i++) {
		const struct spec_shape shape = {.data_type = data_type,
						 .batch = 1,
						 .nhead_q = 16,
						 .nhead_k = 16,
						 .hdim_q = hdims[i],
						 .hdim_v = hdims[i],
						 .window_left = -1,
						 .window_right = -1,
						 .n_splits = 1};

		r = measure_attention(&run, shape, roof, err);
	}
	report->n_roofs += roof->tflops > 0;
	all.devices = malloc(sizeof(scratch));
	if (all.devices) {
		*all.devices = scratch;
		all.n_devices = 1;
	}
	bench_report_deinit(&all);
	return r;
}

int bench_measure_roofs(struct bench_device *report, struct fmha_device *device,
			const struct bench_options *options, const struct bench_shapes *shapes,
			struct fmha_error *err)
{
	int r = 0;

	report->gbs = options->roof_gbs;
	if (options->roofs && report->gbs == 0)
		r = measure_copy(report, device, err);
	for (size_t i = 0; i < shapes->n && r == 0; i++) {
		int32_t type = shapes->list[i].shape.data_type;

		if (roof_of(report, (uint32_t)type))
			continue;
		if (options->roof_tflops > 0)
			report->roofs[report->n_roofs++] = (struct bench_roof){
				(uint32_t)type, options->roof_tflops};
		else if (options->roofs)
			r = measure_type(report, device, options, type, err);
	}
	return r;
}

void bench_apply_roofs(struct bench_device *report)
{
	for (size_t i = 0; i < report->n_rows; i++) {
		const struct bench_row *row = &report->rows[i];
		struct bench_roof *roof = roof_of(report, (uint32_t)row->sizes.data_type);

		if (roof && row->tflops > roof->tflops)
			roof->tflops = row->tflops;
	}
	for (size_t i = 0; i < report->n_rows; i++) {
		struct bench_row *row = &report->rows[i];
		const struct bench_roof *roof = roof_of(report, (uint32_t)row->sizes.data_type);
		double attainable, by_bytes = row->intensity * report->gbs / 1e3;

		row->roof = 0;
		if (!roof || report->gbs == 0 || row->failure)
			continue;
		attainable = by_bytes < roof->tflops ? by_bytes : roof->tflops;
		/* What has no operations is judged by its bytes alone. */
		row->roof = row->intensity > 0 ? row->tflops / attainable : row->gbs / report->gbs;
	}
}
