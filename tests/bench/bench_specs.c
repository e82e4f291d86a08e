// SPDX-License-Identifier: MIT
/*
 * bench_specs: how fast kernel spaces are enumerated, searched and judged. Each line gives the
 * figure, the limit that it is held to, and says when it is missed; the exit code is the number of
 * misses.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include <catalogue/backends.h>
#include <specs/row.h>
#include <specs/space.h>
#include <specs/validate.h>

#define N_LOOKUPS 20000

static int misses;

/* This process's own time: it is one thread, and others may be busy. */
static double now(void)
{
	struct timespec time;

	(void)clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
	return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void report(const char *what, double value, const char *unit, double limit)
{
	int missed = value > limit;

	(void)printf("%-52s %10.3f %-3s (limit %g)%s\n", what, value, unit, limit,
		     missed ? "  MISSED" : "");
	misses += missed;
}

static double peak_mib(void)
{
	struct rusage usage;

	(void)getrusage(RUSAGE_SELF, &usage);
	return (double)usage.ru_maxrss / 1024;
}

static struct spec_space *space_of(const struct spec_catalog *catalog, const char *config)
{
	struct spec_space_options options = {.arch = "gfx950", .config = config};
	struct spec_space *space;
	struct fmha_error err = {0};

	if (spec_space_new(catalog, &options, &space, &err) < 0) {
		(void)fprintf(stderr, "%s\n", err.msg);
		exit(1);
	}
	return space;
}

static void bench_count(const struct spec_catalog *catalog)
{
	double start = now();
	struct spec_space *space = space_of(catalog, "batch_prefill");
	struct spec_iter *iter = spec_iter_new(space, NULL);
	uint64_t n = 0;

	while (spec_iter_next(iter))
		n++;
	report("enumerate and count gfx950 batch_prefill", now() - start, "s", 1);
	if (n != spec_space_count(space) || n != 1055120)
		misses++;
	spec_iter_free(iter);
	spec_space_free(space);
}

static void bench_csv(const struct spec_catalog *catalog)
{
	double start = now();
	struct spec_space *space = space_of(catalog, "batch_prefill");
	struct spec_iter *iter = spec_iter_new(space, NULL);
	const struct kernel_spec *spec;
	char row[SPEC_ROW_BYTES];
	FILE *out = fopen("/dev/null", "w");

	while (out && (spec = spec_iter_next(iter)))
		(void)fwrite(row, 1, spec_csv_row(catalog, spec, row), out);
	if (!out || fclose(out) != 0)
		misses++;
	report("write its CSV (to /dev/null)", now() - start, "s", 3);
	spec_iter_free(iter);
	spec_space_free(space);
}

static void bench_validate(const struct spec_catalog *catalog)
{
	struct spec_space *space = space_of(catalog, "batch_prefill");
	struct spec_iter *iter = spec_iter_new(space, NULL);
	const struct kernel_spec *spec;
	struct spec_findings findings;
	char row[SPEC_ROW_BYTES];
	struct kernel_spec read;
	double start = now(), write_only;
	uint64_t n = 0;

	while ((spec = spec_iter_next(iter)) && n < 1000000)
		n += spec_csv_row(catalog, spec, row) > 0;
	write_only = now() - start;
	spec_iter_free(iter);
	iter = spec_iter_new(space, NULL);
	start = now();
	n = 0;
	while ((spec = spec_iter_next(iter)) && n < 1000000) {
		(void)spec_csv_row(catalog, spec, row);
		misses += spec_csv_parse(catalog, row, &read, NULL) < 0;
		misses += spec_validate(catalog, &read, &findings) > 0;
		n++;
	}
	report("read and validate a million CSV rows", now() - start - write_only, "s", 2);
	spec_iter_free(iter);
	spec_space_free(space);
}

static int compare_double(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

/* Signatures of specs drawn evenly from the whole space. */
static void bench_lookup(const struct spec_catalog *catalog)
{
	static struct kernel_signature signatures[N_LOOKUPS];
	static double took[N_LOOKUPS];
	double start = now();
	struct spec_space *space = space_of(catalog, NULL);
	uint64_t stride = spec_space_count(space) / N_LOOKUPS, i = 0, n = 0, candidates = 0;
	struct spec_iter *iter = spec_iter_new(space, NULL);
	const struct kernel_spec *spec;

	report("compile the whole gfx950 space", 1e3 * (now() - start), "ms", 1000);
	while ((spec = spec_iter_next(iter)) && n < N_LOOKUPS)
		if (i++ % stride == 0)
			signatures[n++] = spec->signature;
	/* In an order that no cache can guess. */
	for (uint64_t j = n - 1; j > 0; j--) {
		uint64_t other = (j * 2654435761u) % (j + 1);
		struct kernel_signature swap = signatures[j];

		signatures[j] = signatures[other];
		signatures[other] = swap;
	}
	for (uint64_t j = 0; j < n; j++) {
		start = now();
		spec_iter_restart_signature(iter, &signatures[j]);
		while (spec_iter_next(iter))
			candidates++;
		took[j] = now() - start;
	}
	qsort(took, n, sizeof(*took), compare_double);
	(void)printf("%-52s %10llu specs, %.0f candidates a lookup\n", "the whole gfx950 space",
		     (unsigned long long)spec_space_count(space), (double)candidates / (double)n);
	report("all candidates of a signature, median", 1e6 * took[n / 2], "us", 20);
	report("the same, 99th percentile", 1e6 * took[n * 99 / 100], "us", 100);
	spec_iter_free(iter);
	spec_space_free(space);
}

int main(void)
{
	struct spec_catalog *catalog;
	struct fmha_error err = {0};
	double start = now();

	if (spec_catalog_load(NULL, fmha_backends, &catalog, &err) < 0) {
		(void)fprintf(stderr, "%s\n", err.msg);
		return 1;
	}
	report("load the catalog", 1e3 * (now() - start), "ms", 100);
	bench_count(catalog);
	bench_csv(catalog);
	bench_lookup(catalog);
	bench_validate(catalog);
	report("peak memory of all this", peak_mib(), "MiB", 64);
	spec_catalog_free(catalog);
	return misses > 0;
}
