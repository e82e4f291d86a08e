/* SPDX-License-Identifier: MIT */
/*
 * bench_compare.c: is the second report worse than the first? A row is slower when its median is
 * by more than the tolerance, and by more than both rows' own spread, and its fastest run is slower
 * than the other's median: noise has to fool three figures at once. A row that fails, is wrong or
 * is missing where it was measured before is worse, too.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "bench.h"

struct tally {
	size_t compared, slower, faster, broken, missing, new_rows;
	double log_ratios;
};

static bool is_broken(const struct bench_row *row)
{
	return row->failure || (row->allowed > 0 && row->error > row->allowed);
}

/* 1: @b is slower than @a; -1: faster; 0: cannot be told. */
static int judge_times(const struct bench_row *a, const struct bench_row *b, double tolerance)
{
	double noise = (a->spread + b->spread) / 2;
	double least = 1 + (noise > tolerance ? noise : tolerance);

	if (b->median_us > a->median_us * least && b->min_us > a->median_us)
		return 1;
	if (a->median_us > b->median_us * least && a->min_us > b->median_us)
		return -1;
	return 0;
}

static void say(const char *what, const struct bench_row *a, const struct bench_row *b)
{
	(void)printf("%-8s %s\n         %s\n", what, a->shape, a->kernel);
	if (b && b->failure)
		(void)printf("         %s\n", b->failure);
	else if (b && !a->failure)
		(void)printf("         %.2f us -> %.2f us (%+.1f %%)\n", a->median_us, b->median_us,
			     100 * (b->median_us / a->median_us - 1));
}

static void compare_row(const struct bench_row *a, const struct bench_row *b, double tolerance,
			struct tally *tally)
{
	int verdict;

	if (is_broken(a))
		return; /* it cannot get worse */
	if (!b) {
		tally->missing++;
		say("missing", a, NULL);
		return;
	}
	if (is_broken(b)) {
		tally->broken++;
		say(b->failure ? "failed" : "wrong", a, b);
		return;
	}
	tally->compared++;
	tally->log_ratios += log(b->median_us / a->median_us);
	verdict = judge_times(a, b, tolerance);
	tally->slower += verdict > 0;
	tally->faster += verdict < 0;
	if (verdict != 0)
		say(verdict > 0 ? "slower" : "faster", a, b);
}

static void warn_of(const char *what, const char *a, const char *b)
{
	if (strcmp(a, b) != 0)
		(void)printf("note: the %s differs: '%s', '%s'\n", what, a, b);
}

/* The device of the same number; the only one, when there is only one. */
static const struct bench_device *partner(const struct bench_report *report,
					  const struct bench_device *device)
{
	for (size_t i = 0; i < report->n_devices; i++)
		if (report->devices[i].info.device == device->info.device)
			return &report->devices[i];
	return report->n_devices == 1 ? &report->devices[0] : NULL;
}

/* The same kernel's row; for the planner's choice what it chooses now, when that is all there is. */
static const struct bench_row *counterpart(const struct bench_device *device,
					   const struct bench_row *row)
{
	const struct bench_row *same = bench_find_row(device, row->shape, row->kernel);

	for (size_t i = 0; !same && row->chosen && i < device->n_rows; i++)
		if (device->rows[i].chosen && !strcmp(device->rows[i].shape, row->shape))
			same = &device->rows[i];
	return same;
}

static void compare_device(const struct bench_device *a, const struct bench_device *b,
			   double tolerance, struct tally *tally)
{
	static const struct bench_device nothing;

	if (b) {
		warn_of("device", a->info.name, b->info.name);
		warn_of("arch", a->info.arch, b->info.arch);
		warn_of("driver", a->driver, b->driver);
		warn_of("compiler", a->compiler, b->compiler);
	}
	for (size_t i = 0; i < a->n_rows; i++)
		compare_row(&a->rows[i], counterpart(b ? b : &nothing, &a->rows[i]), tolerance,
			    tally);
	for (size_t i = 0; b && i < b->n_rows; i++)
		tally->new_rows += !counterpart(a, &b->rows[i]);
}

int bench_compare(const struct bench_report *before, const struct bench_report *after,
		  double tolerance)
{
	struct tally t = {0};

	for (size_t i = 0; i < before->n_devices; i++)
		compare_device(&before->devices[i], partner(after, &before->devices[i]), tolerance,
			       &t);
	(void)printf("%zu rows compared: %zu slower, %zu faster, %zu failed or wrong, %zu missing, "
		     "%zu new\n",
		     t.compared, t.slower, t.faster, t.broken, t.missing, t.new_rows);
	if (t.compared > 0)
		(void)printf("time: %.4f of before (geometric mean)\n",
			     exp(t.log_ratios / (double)t.compared));
	return t.slower + t.broken + t.missing > 0 ? CTL_FAILED : CTL_OK;
}
