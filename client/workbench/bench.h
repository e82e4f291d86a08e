/* SPDX-License-Identifier: MIT */
/*
 * bench.h: what the parts of `fmhactl bench` share.
 *
 * Shapes become items (a shape and one kernel that can run it), items become rows (what was
 * measured). A report is the rows of some devices; it is what is written, read again, compared and
 * drawn. client/docs/bench.md describes the document.
 */
#ifndef CTL_BENCH_H
#define CTL_BENCH_H

#include <cjson/cJSON.h>

#include "judge.h"
#include "recipe.h"
#include "stats.h"

#define BENCH_FORMAT  "fmhad-bench"
#define BENCH_VERSION 1

/* ---- reports ---- */

struct bench_row {
	char *shape, *group, *kernel, *failure; /* given; failure NULL: it was measured */
	struct spec_shape sizes;                /* but for its group */
	bool chosen;                            /* what the planner takes by itself */
	uint32_t runs;
	double median_us, min_us, spread; /* of the kernels, by the device's clock */
	double tflops, gbs;               /* by the median */
	double intensity;                 /* operations a byte of the least traffic */
	double roof;                      /* share of what the device's roofs allow there */
	double error, allowed;            /* of the worst output; allowed 0: not checked */
};

/* The best rates that this device was seen to reach: see bench_roof.c. */
struct bench_roof {
	uint32_t dtype;
	double tflops;
};

struct bench_device {
	struct fmha_device_info info;
	char *driver, *compiler; /* given; "" where unknown */
	double gbs;
	struct bench_roof roofs[FMHA_N_DTYPES];
	size_t n_roofs, n_rows, capacity;
	struct bench_row *rows;
};

struct bench_report {
	double seconds; /* that measuring took, compiles too; 0: not said */
	char *created, *command, *server, *host; /* given */
	cJSON *settings;                         /* an object; given */
	struct bench_device *devices;            /* given */
	size_t n_devices;
};

/* bench_report.c. The row, zeroed, or NULL when out of memory. Pointers to rows are good until the next. */
struct bench_row *bench_add_row(struct bench_device *device);
/* NULL: there is none. */
const struct bench_row *bench_find_row(const struct bench_device *device, const char *shape,
				       const char *kernel);
void bench_report_deinit(struct bench_report *report);
/* The word of a number of a type; NULL: it is none. */
const char *bench_dtype_word(int32_t data_type);

/* bench_document.c. Files are written beside and renamed. Return: 0 or an exit code. */
cJSON *bench_to_json(const struct bench_report *report);
int bench_write(const struct bench_report *report, const char *path);
int bench_write_csv(const struct bench_report *report, const char *path);
int bench_read(const char *path, struct bench_report *ret_report);

/* bench_html.c */
int bench_write_html(const struct bench_report *report, const char *path);

/* ---- what follows from a report: bench_summary.c ---- */

/* One shape: its best row and the one that the planner takes; either may be NULL. */
struct bench_best {
	const struct bench_row *best, *chosen;
	size_t n_measured, n_failed;
};

/* One a shape, in their order. @ret_n: how many. Given; NULL when there are none. */
struct bench_best *bench_best_of(const struct bench_device *device, size_t *ret_n);
/* A device's rows, summed up; shares are the best's time by the chosen one's. */
struct bench_verdict {
	size_t n_shapes, n_failed, n_wrong; /* the last two: rows */
	double *shares;                     /* of shapes with at least two kernels; sorted, given */
	size_t n_shares;
	double mean, median, tenth, worst; /* of the shares; tenth: the tenth percentile */
};
void bench_judge(const struct bench_device *device, struct bench_verdict *ret_verdict);
void bench_print_summary(const struct bench_report *report, bool every_row);

/* ---- comparing: bench_compare.c. Return: CTL_OK, CTL_FAILED (the second one is worse). ---- */

int bench_compare(const struct bench_report *before, const struct bench_report *after,
		  double tolerance);

/* ---- measuring ---- */

#define BENCH_MAX_FILTERS 16
enum bench_cache { BENCH_WARM, BENCH_ROTATE, BENCH_FLUSH };

struct bench_options {
	struct ctl_target target;
	const char *tier; /* or a file; NULL: the recipe alone */
	const char *kernel_filter, *shape_filter;
	const char *sweep, *variant; /* NULL: all */
	struct cli_texts filter_files;
	uint32_t all_kernels;
	bool all_devices, check, resume, no_roofs, verbose;
	int64_t warmup, repeat, limit_ms, max_kernels, max_shapes, workers, cache_mib;
	uint32_t cache; /* enum bench_cache */
	const char *out, *csv, *html;
	double roof_tflops, roof_gbs; /* 0: measured */
};

/* A shape that is to be measured: bench_list.c. */
struct bench_shape {
	struct spec_shape shape;
	char *group, *text; /* given */
};

struct bench_shapes {
	const struct recipe *recipe; /* NULL: of a tier, whose shapes say it all */
	struct bench_shape *list;
	size_t n, capacity;
};

struct bench_sweep;
int bench_list_shapes(const struct bench_options *options, const struct bench_sweep *sweep,
		      const struct recipe *recipe, struct bench_shapes *ret_shapes);
void bench_shapes_deinit(struct bench_shapes *shapes);
/* The recipe of shape @i, made. Return: 0 or a negative FMHA_E* code. */
int bench_recipe(const struct bench_shapes *shapes, size_t i, struct recipe *ret_recipe,
		 struct fmha_error *err);

/*
 * bench_sweep.c: a sweep of AMD's dispatcher, which thins out what is measured: kernels of its variant and
 * pipelines, shapes that have the traits that it lists.
 */
struct bench_sweep;
struct spec_catalog;
/* NULL with 0: neither is asked for. Return: 0, or an exit code, which has been explained. */
int bench_sweep_new(const struct bench_options *options, struct bench_sweep **ret_sweep);
struct bench_sweep *bench_sweep_free(struct bench_sweep *sweep);
/* @sweep NULL: all. */
bool bench_sweep_has_shape(const struct bench_sweep *sweep, const struct spec_shape *shape);
bool bench_sweep_has_kernel(const struct bench_sweep *sweep, const char *kernel);

/* The kernels of the problem's main stage: bench_list.c. */
struct bench_item {
	size_t shape;
	char *kernel; /* given */
	bool chosen;
};

struct bench_items {
	struct bench_item *list;
	size_t n, capacity;
};

struct spec_filter;
struct bench_lister {
	const struct bench_options *options;
	const struct bench_sweep *sweep;
	struct fmha_device *device;
	struct spec_catalog *catalog;
	/* All of them have to let a kernel through. */
	struct spec_filter *filters[BENCH_MAX_FILTERS + 1];
	int n_filters;
};

/* Adds the kernels for shape @i. Return: 0 or a negative FMHA_E* code: none can run it. */
int bench_list_kernels(const struct bench_lister *lister, const struct bench_shapes *shapes,
		       size_t i, struct bench_items *items, struct fmha_error *err);
void bench_items_deinit(struct bench_items *items);

/*
 * bench_memory.c: a problem's tensors where the device has them: on a GPU its own memory, filled
 * through the device, since the host cannot see it. With rotation, several copies that together are
 * larger than the caches.
 */
#define BENCH_MAX_COPIES 64
struct bench_memory {
	struct fmha_device *device;
	struct tensors image; /* seen by the host */
	struct fmha_buffer *copies[BENCH_MAX_COPIES];
	uint32_t n_copies, next;
	struct fmha_problem problem; /* its tensors lie in the first copy */
	uint32_t n_rebinds;
	struct fmha_rebind rebinds[FMHA_MAX_REBINDS]; /* of the next run, when there are copies */
};

int bench_memory_init(struct bench_memory *memory, struct fmha_device *device,
		      const struct recipe *recipe, const struct bench_options *options,
		      struct fmha_error *err);
void bench_memory_deinit(struct bench_memory *memory);
/* The image to all copies, and back from the first one. */
int bench_upload(struct bench_memory *memory, struct fmha_error *err);
int bench_download(struct bench_memory *memory, struct fmha_error *err);
/* The options of the next run; NULL: what the plan has. */
const struct fmha_run_options *bench_next_copy(struct bench_memory *memory,
					       struct fmha_run_options *options);

/* A plan that reads and writes more than the caches hold: NULL with FMHA_OK never. */
struct bench_flush {
	struct fmha_buffer *buffer;
	struct fmha_plan *plan;
	double bytes; /* that a run moves */
};
int bench_flush_init(struct bench_flush *flush, struct fmha_device *device, int64_t mib,
		     struct fmha_error *err);
void bench_flush_deinit(struct bench_flush *flush);

/* bench_compile.c: code for all items, in so many threads, before anything is measured. */
void bench_compile(const struct bench_options *options, const struct bench_shapes *shapes,
		   const struct bench_items *items);

/* bench_roof.c: the device's roofs for the data types of @shapes, before its rows are measured. */
void bench_measure_roofs(struct bench_device *report, struct fmha_device *device,
			 const struct bench_options *options, const struct bench_shapes *shapes);
/* Shares of the roofs, for all rows; a row that is above a roof is the roof from then on. */
void bench_apply_roofs(struct bench_device *report);

/* bench_measure.c: one shape's items first to end - 1. Adds a row for each. Return: 0, or an exit
 * code when the daemon is gone. */
struct bench_run {
	const struct bench_options *options;
	struct fmha_device *device;
	struct bench_device *report;
	struct bench_flush flush; /* plan NULL: not flushed */
};
int bench_measure(struct bench_run *run, const struct bench_shapes *shapes,
		  const struct bench_items *items, size_t first, size_t end);

#endif
