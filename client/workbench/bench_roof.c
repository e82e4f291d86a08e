/* SPDX-License-Identifier: MIT */
/*
 * bench_roof.c: what the device can do at best, measured through the same service as everything
 * else: bytes a second of a copy, or of one row's attention, that is larger than the caches, and for
 * each data type operations a second of attention without a mask, long enough that nothing but
 * multiplying takes time. These are roofs of what kernels here reach, not of the silicon;
 * --roof-tflops and --roof-gbs put others in their place.
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

/* The planner's kernel for one shape, added to the run's report; NULL: there is none, or @err. */
static const struct bench_row *measure_shape(struct bench_run *run, const struct spec_shape *shape,
					     struct fmha_error *err)
{
	struct bench_shape one = {.shape = *shape, .group = "", .text = ""};
	struct bench_shapes shapes = {.list = &one, .n = 1};
	struct bench_items items = {0};
	const struct bench_lister lister = {.options = run->options, .device = run->device};
	const struct bench_row *row = NULL;

	if (bench_list_kernels(&lister, &shapes, 0, &items, err) == 0 && items.n > 0 &&
	    bench_measure(run, &shapes, &items, 0, items.n) == 0)
		row = &run->report->rows[run->report->n_rows - 1];
	bench_items_deinit(&items);
	return row && !row->failure ? row : NULL;
}

static struct spec_shape plain_shape(int32_t data_type, int32_t hdim)
{
	return (struct spec_shape){.data_type = data_type,
				   .batch = 1,
				   .nhead_q = 16,
				   .nhead_k = 16,
				   .hdim_q = hdim,
				   .hdim_v = hdim,
				   .window_left = -1,
				   .window_right = -1,
				   .n_splits = 1};
}

/* Few rows over many keys: no more than reading them once. */
static void measure_reading(struct bench_run *run, double *gbs, struct fmha_error *err)
{
	struct spec_shape shape = plain_shape(FMHA_BF16, 128);
	const struct bench_row *row;

	shape.seqlen_q = 1;
	shape.seqlen_k = COPY_MIB * 128; /* 16 heads' K and V: 8 KiB a key */
	shape.n_splits = 0;
	row = measure_shape(run, &shape, err);
	if (row && row->gbs > *gbs)
		*gbs = row->gbs;
}

/* Attention of more and more rows, until it takes its time. */
static void measure_attention(struct bench_run *run, struct spec_shape shape, double *tflops,
			      struct fmha_error *err)
{
	const struct bench_row *row;

	for (shape.seqlen_q = 1024; shape.seqlen_q <= LONGEST; shape.seqlen_q *= 2) {
		shape.seqlen_k = shape.seqlen_q;
		row = measure_shape(run, &shape, err);
		if (row && row->tflops > *tflops)
			*tflops = row->tflops;
		if (!row || row->median_us > LONG_ENOUGH_US)
			break;
	}
}

static struct bench_roof *roof_of(struct bench_device *report, uint32_t dtype)
{
	for (size_t i = 0; i < report->n_roofs; i++)
		if (report->roofs[i].dtype == dtype)
			return &report->roofs[i];
	return NULL;
}

/* What the device was asked for to find its roofs, and what came of it; not part of a report. */
struct scratch {
	struct bench_options options;
	struct bench_device *rows;
	struct bench_report report; /* whose only device it is */
	struct bench_run run;
};

static bool scratch_init(struct scratch *s, struct fmha_device *device,
			 const struct bench_options *given)
{
	*s = (struct scratch){.options = *given, .rows = calloc(1, sizeof(*s->rows))};
	s->options.all_kernels = s->options.check = false;
	s->options.cache = BENCH_WARM;
	s->options.warmup = 1;
	s->options.repeat = 5;
	s->report = (struct bench_report){.devices = s->rows, .n_devices = s->rows != NULL};
	s->run = (struct bench_run){.options = &s->options, .device = device, .report = s->rows};
	return s->rows;
}

/* @data_type: the shape's number of it. */
static void measure_type(struct bench_device *report, struct scratch *scratch, int32_t data_type,
			 struct fmha_error *err)
{
	struct bench_roof *roof = &report->roofs[report->n_roofs];

	*roof = (struct bench_roof){.dtype = (uint32_t)data_type};
	measure_attention(&scratch->run, plain_shape(data_type, 64), &roof->tflops, err);
	measure_attention(&scratch->run, plain_shape(data_type, 128), &roof->tflops, err);
	report->n_roofs += roof->tflops > 0;
}

/* A roof that cannot be measured is left out. */
static void measure_roofs(struct bench_device *report, struct scratch *scratch,
			  const struct bench_shapes *shapes)
{
	const struct bench_options *options = &scratch->options;
	struct fmha_error err;

	report->gbs = options->roof_gbs;
	if (!options->no_roofs && report->gbs == 0) {
		(void)measure_copy(report, scratch->run.device, &err);
		measure_reading(&scratch->run, &report->gbs, &err);
	}
	for (size_t i = 0; i < shapes->n; i++) {
		int32_t type = shapes->list[i].shape.data_type;

		if (roof_of(report, (uint32_t)type))
			continue;
		if (options->roof_tflops > 0)
			report->roofs[report->n_roofs++] = (struct bench_roof){
				(uint32_t)type, options->roof_tflops};
		else if (!options->no_roofs)
			measure_type(report, scratch, type, &err);
	}
}

void bench_measure_roofs(struct bench_device *report, struct fmha_device *device,
			 const struct bench_options *options, const struct bench_shapes *shapes)
{
	struct scratch scratch;

	if (!scratch_init(&scratch, device, options))
		return;
	measure_roofs(report, &scratch, shapes);
	bench_report_deinit(&scratch.report);
}

void bench_apply_roofs(struct bench_device *report)
{
	for (size_t i = 0; i < report->n_rows; i++) {
		const struct bench_row *row = &report->rows[i];
		struct bench_roof *roof = roof_of(report, (uint32_t)row->sizes.data_type);

		if (roof && row->tflops > roof->tflops)
			roof->tflops = row->tflops;
		/* Smaller tensors may have come from the caches. */
		if (report->gbs > 0 && row->gbs > report->gbs &&
		    row->gbs * row->median_us * 1e3 > (double)(COPY_MIB << 20))
			report->gbs = row->gbs;
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
