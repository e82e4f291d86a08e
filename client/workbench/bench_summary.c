/* SPDX-License-Identifier: MIT */
/* bench_summary.c: the best kernel of each shape, and how far the planner's choice is from it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"

#define WORST 10 /* shapes that are named */

static void take(struct bench_best *best, const struct bench_row *row)
{
	if (row->failure) {
		best->n_failed++;
		return;
	}
	best->n_measured++;
	if (row->chosen)
		best->chosen = row;
	if (!best->best || row->median_us < best->best->median_us)
		best->best = row;
}

struct bench_best *bench_best_of(const struct bench_device *device, size_t *ret_n)
{
	struct bench_best *list = calloc(device->n_rows + 1, sizeof(*list));
	const struct bench_row **first = calloc(device->n_rows + 1, sizeof(struct bench_row *));
	size_t n = 0;

	for (size_t i = 0; list && first && i < device->n_rows; i++) {
		const struct bench_row *row = &device->rows[i];
		size_t at = n;

		/* Rows of a shape follow each other, unless a run was resumed. */
		while (at > 0 && strcmp(first[at - 1]->shape, row->shape) != 0)
			at--;
		if (at == 0) {
			first[n++] = row;
			at = n;
		}
		take(&list[at - 1], row);
	}
	free(first);
	*ret_n = n;
	return list;
}

static int compare(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

void bench_judge(const struct bench_device *device, struct bench_verdict *ret_verdict)
{
	struct bench_verdict v = {0};
	struct bench_best *best = bench_best_of(device, &v.n_shapes);

	v.shares = calloc(v.n_shapes + 1, sizeof(*v.shares));
	for (size_t i = 0; best && v.shares && i < v.n_shapes; i++)
		if (best[i].chosen && best[i].n_measured > 1)
			v.shares[v.n_shares++] = best[i].best->median_us /
						 best[i].chosen->median_us;
	for (size_t i = 0; i < device->n_rows; i++) {
		const struct bench_row *row = &device->rows[i];

		v.n_failed += row->failure != NULL;
		v.n_wrong += row->allowed > 0 && row->error > row->allowed;
	}
	if (v.n_shares > 0) {
		qsort(v.shares, v.n_shares, sizeof(*v.shares), compare);
		for (size_t i = 0; i < v.n_shares; i++)
			v.mean += v.shares[i] / (double)v.n_shares;
		v.median = stats_quantile(v.shares, v.n_shares, 0.5);
		v.tenth = stats_quantile(v.shares, v.n_shares, 0.1);
		v.worst = v.shares[0];
	}
	free(best);
	*ret_verdict = v;
}

static void print_row(const struct bench_row *row)
{
	(void)printf("  %s %-10s %10.2f us  min %10.2f  +-%4.1f %%  %8.3f TFLOP/s %8.2f GB/s",
		     row->chosen ? "*" : " ", row->failure ? "FAILED" : "", row->median_us,
		     row->min_us, 50 * row->spread, row->tflops, row->gbs);
	if (row->roof > 0)
		(void)printf("  %3.0f %% of roof", 100 * row->roof);
	if (row->allowed > 0)
		(void)printf("  %s", row->error <= row->allowed ? "ok" : "WRONG");
	(void)printf("\n      %s\n", row->kernel);
	if (row->failure)
		(void)printf("      %s\n", row->failure);
}

static int compare_gap(const void *a, const void *b)
{
	const struct bench_best *x = a, *y = b;
	double gap_x = x->chosen && x->best ? x->chosen->median_us / x->best->median_us : 0;
	double gap_y = y->chosen && y->best ? y->chosen->median_us / y->best->median_us : 0;

	return (gap_y > gap_x) - (gap_y < gap_x);
}

static void print_selection(const struct bench_verdict *v, struct bench_best *best)
{
	if (v->n_shares == 0)
		return;
	(void)printf(
		"choice: %.1f %% of the best kernel's speed on average, median %.1f %%, %.1f %% at "
		"the tenth percentile, %.1f %% at worst, over %zu shapes\n",
		100 * v->mean, 100 * v->median, 100 * v->tenth, 100 * v->worst, v->n_shares);
	qsort(best, v->n_shapes, sizeof(*best), compare_gap);
	for (size_t i = 0; i < v->n_shapes && i < WORST; i++) {
		const struct bench_best *b = &best[i];

		if (!b->chosen || b->best == b->chosen)
			break;
		(void)printf("  %.2f of the best: %s\n      chosen %s\n      best   %s\n",
			     b->best->median_us / b->chosen->median_us, b->chosen->shape,
			     b->chosen->kernel, b->best->kernel);
	}
}

static void print_device(const struct bench_device *device, bool every_row)
{
	size_t n_shapes;
	struct bench_best *best = bench_best_of(device, &n_shapes);
	struct bench_verdict v;
	const char *shape = "";

	for (size_t i = 0; every_row && i < device->n_rows; i++) {
		const struct bench_row *row = &device->rows[i];

		if (strcmp(shape, row->shape) != 0)
			(void)printf("%s\n", row->shape);
		shape = row->shape;
		print_row(row);
	}
	bench_judge(device, &v);
	(void)printf("device %u: %s (%s), %zu shapes, %zu rows, %zu failed, %zu wrong\n",
		     device->info.device, device->info.name, device->info.arch, v.n_shapes,
		     device->n_rows, v.n_failed, v.n_wrong);
	for (size_t i = 0; i < device->n_roofs; i++)
		(void)printf("roof: %s %.3f TFLOP/s, %.1f GB/s\n",
			     bench_dtype_word((int32_t)device->roofs[i].dtype),
			     device->roofs[i].tflops, device->gbs);
	if (best)
		print_selection(&v, best);
	free(v.shares);
	free(best);
}

void bench_print_summary(const struct bench_report *report, bool every_row)
{
	for (size_t i = 0; i < report->n_devices; i++)
		print_device(&report->devices[i], every_row);
	if (report->seconds > 0)
		(void)printf("measured in %.0f s\n", report->seconds);
}
