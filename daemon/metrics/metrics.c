/* SPDX-License-Identifier: MIT */
#include <metrics/metrics.h>

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum kind { COUNTER, GAUGE, HISTOGRAM, INFO };

struct page {
	FILE *out;
	enum metrics_format format;
};

static const cJSON *metrics_find(const cJSON *object, const char *key)
{
	return cJSON_GetObjectItemCaseSensitive(object, key);
}

/* @path: "runs.done". Return: 0 where there is no such number. */
static double number(const cJSON *object, const char *path)
{
	char key[64];

	while (object && *path) {
		size_t n = strcspn(path, ".");

		(void)snprintf(key, sizeof(key), "%.*s", (int)n, path);
		object = metrics_find(object, key);
		path += n + (path[n] == '.');
	}
	return object && cJSON_IsNumber(object) ? object->valuedouble : 0;
}

static const char *text_of(const cJSON *object, const char *key)
{
	const cJSON *item = metrics_find(object, key);

	return cJSON_IsString(item) ? item->valuestring : "";
}

/* A label's value; names of devices come from configurations and drivers. */
static void print_label(struct page *page, const char *value)
{
	for (; *value; value++) {
		if (*value == '"' || *value == '\\')
			(void)fputc('\\', page->out);
		(void)fputc((unsigned char)*value < ' ' ? '?' : *value, page->out);
	}
}

/*
 * @name: of the family. OpenMetrics names it without the suffix that counters' samples have; the classic
 * text has no families, so it is told of the samples, and knows no info.
 */
static void head(struct page *page, const char *name, enum kind kind, const char *help)
{
	static const char *const words[] = {"counter", "gauge", "histogram", "info"};
	const char *suffix = "";

	if (page->format == METRICS_CLASSIC && kind == COUNTER)
		suffix = "_total";
	if (page->format == METRICS_CLASSIC && kind == INFO)
		suffix = "_info", kind = GAUGE;
	(void)fprintf(page->out, "# HELP fmhad_%s%s %s\n# TYPE fmhad_%s%s %s\n", name, suffix, help,
		      name, suffix, words[kind]);
}

/* ---- one number a device ---- */

enum part { PART_SLOT, PART_WORKER };

static const struct {
	const char *name;
	enum kind kind;
	const char *help;
	enum part part;
	const char *path;
	double scale;
} of_devices[] = {
	{"worker_starts", COUNTER, "Worker processes started", PART_SLOT, "starts", 1},
	{"worker_deaths", COUNTER, "Worker processes that ended unasked", PART_SLOT, "deaths", 1},
	{"runs", COUNTER, "Runs that were computed", PART_WORKER, "runs.done", 1},
	{"runs_failed", COUNTER, "Runs that failed", PART_WORKER, "runs.failed", 1},
	{"runs_cancelled", COUNTER, "Runs that were cancelled", PART_WORKER, "runs.cancelled", 1},
	{"runs_pending", GAUGE, "Runs that wait or are computed", PART_WORKER, "runs.pending", 1},
	{"buffers", GAUGE, "Buffers of all sessions", PART_WORKER, "memory.buffers", 1},
	{"buffer_bytes", GAUGE, "Memory charged to sessions", PART_WORKER, "memory.bytes", 1},
	{"kernels_loaded", GAUGE, "Compiled kernels that are loaded", PART_WORKER, "code.kernels",
	 1},
	{"kernels_idle", GAUGE, "Those that no plan has", PART_WORKER, "code.idle", 1},
	{"kernel_code_bytes", GAUGE, "Code of loaded kernels", PART_WORKER, "code.bytes", 1},
	{"kernels_unloaded", COUNTER, "Kernels that were unloaded", PART_WORKER, "code.unloaded",
	 1},
	{"tuned_problems", COUNTER, "Problems whose kernels were measured", PART_WORKER,
	 "tuning.problems", 1},
	{"tuned_times", COUNTER, "Times of kernels that were measured", PART_WORKER,
	 "tuning.measured", 1},
	{"tuning_seconds", COUNTER, "Device time that measuring kernels took", PART_WORKER,
	 "tuning.device_ns", 1e-9},
	{"worker_resident_bytes", GAUGE, "Private memory of the worker", PART_WORKER,
	 "resident_bytes", 1},
};

static void print_of_devices(struct page *page, const cJSON *devices)
{
	for (size_t i = 0; i < sizeof(of_devices) / sizeof(of_devices[0]); i++) {
		bool counts = of_devices[i].kind == COUNTER;
		const cJSON *device;

		head(page, of_devices[i].name, of_devices[i].kind, of_devices[i].help);
		cJSON_ArrayForEach(device, devices)
		{
			const cJSON *part = of_devices[i].part == PART_SLOT
						    ? device
						    : metrics_find(device, "worker");

			if (!cJSON_IsObject(part))
				continue; /* it did not answer: no number is not zero */
			(void)fprintf(page->out, "fmhad_%s%s{device=\"%.0f\"} %.17g\n",
				      of_devices[i].name, counts ? "_total" : "",
				      number(device, "device"),
				      number(part, of_devices[i].path) * of_devices[i].scale);
		}
	}
}

/* ---- several numbers a device ---- */

static void print_info(struct page *page, const cJSON *devices)
{
	const cJSON *device;

	head(page, "device_up", GAUGE, "1 when the device serves");
	cJSON_ArrayForEach(device, devices)
	{
		(void)fprintf(page->out, "fmhad_device_up{device=\"%.0f\",backend=\"",
			      number(device, "device"));
		print_label(page, text_of(device, "backend"));
		(void)fputs("\",arch=\"", page->out);
		print_label(page, text_of(device, "arch"));
		(void)fputs("\",name=\"", page->out);
		print_label(page, text_of(device, "name"));
		(void)fprintf(page->out, "\"} %d\n",
			      strcmp(text_of(device, "state"), "ready") == 0);
	}
}

static void print_quarantine(struct page *page, const cJSON *devices)
{
	const cJSON *device;

	head(page, "quarantined_kernels", GAUGE,
	     "Kernels that somebody is not given at the moment");
	cJSON_ArrayForEach(device, devices)(void)
		fprintf(page->out, "fmhad_quarantined_kernels{device=\"%.0f\"} %.0f\n",
			number(device, "device"), number(device, "n_quarantined"));
}

static void print_families(struct page *page, const cJSON *devices)
{
	static const struct {
		const char *name, *help, *path;
		double scale;
	} columns[] = {
		{"family_runs", "Runs by family of kernels", "runs", 1},
		{"flops", "Floating point operations of runs that were computed", "flops", 1},
		{"bytes", "Least memory traffic of runs that were computed", "bytes", 1},
		{"kernel_seconds", "Time that runs had a device", "kernel_ns", 1e-9},
		{"roof_seconds", "Time that the device's roof allows for them", "roof_ns", 1e-9},
	};

	for (size_t i = 0; i < sizeof(columns) / sizeof(columns[0]); i++) {
		const cJSON *device, *family;

		head(page, columns[i].name, COUNTER, columns[i].help);
		cJSON_ArrayForEach(device, devices)
		{
			cJSON_ArrayForEach(family,
					   metrics_find(metrics_find(device, "worker"), "families"))
			{
				if (!metrics_find(family, columns[i].path))
					continue;
				(void)fprintf(page->out,
					      "fmhad_%s_total{device=\"%.0f\",family=\"%s\"} "
					      "%.17g\n",
					      columns[i].name, number(device, "device"),
					      text_of(family, "family"),
					      number(family, columns[i].path) * columns[i].scale);
			}
		}
	}
}

/* Where the device has told how fast it could be, or its configuration does. */
static void print_roofs(struct page *page, const cJSON *devices)
{
	const cJSON *device, *rate;

	head(page, "roof_flops", GAUGE, "Operations a second that count as all a device can do");
	cJSON_ArrayForEach(device, devices)
	{
		const cJSON *roof = metrics_find(metrics_find(device, "worker"), "roof");

		cJSON_ArrayForEach(rate, metrics_find(roof, "tflops"))(void) fprintf(
			page->out,
			"fmhad_roof_flops{device=\"%.0f\",dtype=\"%s\",source=\"%s\"} "
			"%.9g\n",
			number(device, "device"), rate->string,
			text_of(metrics_find(roof, "source"), "tflops"), rate->valuedouble * 1e12);
	}
	head(page, "roof_bytes", GAUGE, "Bytes a second that count as all its memory can move");
	cJSON_ArrayForEach(device, devices)
	{
		const cJSON *roof = metrics_find(metrics_find(device, "worker"), "roof");

		if (metrics_find(roof, "gbs"))
			(void)fprintf(page->out,
				      "fmhad_roof_bytes{device=\"%.0f\",source=\"%s\"} %.9g\n",
				      number(device, "device"),
				      text_of(metrics_find(roof, "source"), "gbs"),
				      number(roof, "gbs") * 1e9);
	}
}

static void print_plans(struct page *page, const cJSON *devices)
{
	const cJSON *device, *basis;

	head(page, "plans", COUNTER, "Plans made, by what was known of the main kernel's time");
	cJSON_ArrayForEach(device, devices)
	{
		cJSON_ArrayForEach(basis,
				   metrics_find(metrics_find(device, "worker"), "plans_by"))(void)
			fprintf(page->out, "fmhad_plans_total{device=\"%.0f\",by=\"%s\"} %.0f\n",
				number(device, "device"), basis->string, basis->valuedouble);
	}
}

/* The counts are of values below 2^(10 + 2 i) ns, as base/histogram.h cuts them. */
static void print_histogram(struct page *page, const char *name, double device,
			    const cJSON *histogram)
{
	const cJSON *bucket;
	int power = 10;

	cJSON_ArrayForEach(bucket, metrics_find(histogram, "buckets"))
	{
		(void)fprintf(page->out,
			      "fmhad_%s_seconds_bucket{device=\"%.0f\",le=\"%.9g\"} %.0f\n", name,
			      device, (double)(1ull << power) * 1e-9, bucket->valuedouble);
		power += 2;
	}
	(void)fprintf(page->out, "fmhad_%s_seconds_bucket{device=\"%.0f\",le=\"+Inf\"} %.0f\n",
		      name, device, number(histogram, "n"));
	(void)fprintf(page->out, "fmhad_%s_seconds_sum{device=\"%.0f\"} %.17g\n", name, device,
		      number(histogram, "sum") * 1e-9);
	(void)fprintf(page->out, "fmhad_%s_seconds_count{device=\"%.0f\"} %.0f\n", name, device,
		      number(histogram, "n"));
}

static void print_latencies(struct page *page, const cJSON *devices)
{
	static const struct {
		const char *name, *key, *help;
	} latencies[] = {
		{"run_queue", "queued", "From a run's arrival to its start on the device"},
		{"run_kernel", "kernel", "Time of a run on the device"},
		{"run", "total", "From a run's arrival to its answer"},
	};

	for (size_t i = 0; i < sizeof(latencies) / sizeof(latencies[0]); i++) {
		const cJSON *device;
		char name[32];

		(void)snprintf(name, sizeof(name), "%s_seconds", latencies[i].name);
		head(page, name, HISTOGRAM, latencies[i].help);
		cJSON_ArrayForEach(device, devices)
		{
			const cJSON *histogram = metrics_find(
				metrics_find(metrics_find(device, "worker"), "latency_ns"),
				latencies[i].key);

			if (histogram)
				print_histogram(page, latencies[i].name, number(device, "device"),
						histogram);
		}
	}
}

/* ---- front and workers alike ---- */

/* @process: "front" or "0", "1", ... of a device's worker */
static void print_errors_of(struct page *page, const char *process, const cJSON *part)
{
	const cJSON *error;

	cJSON_ArrayForEach(error, metrics_find(part, "errors"))(void)
		fprintf(page->out, "fmhad_errors_total{process=\"%s\",code=\"%s\"} %.0f\n", process,
			error->string, error->valuedouble);
}

static void print_limits_of(struct page *page, const char *process, const cJSON *part)
{
	const cJSON *limit;

	cJSON_ArrayForEach(limit, metrics_find(part, "limits"))(void)
		fprintf(page->out, "fmhad_limit_hits_total{process=\"%s\",limit=\"%s\"} %.0f\n",
			process, limit->string, number(limit, "hits"));
}

static void
print_of_processes(struct page *page, const cJSON *status, const char *name, const char *help,
		   void (*print)(struct page *page, const char *process, const cJSON *part))
{
	const cJSON *device;

	head(page, name, COUNTER, help);
	print(page, "front", metrics_find(status, "front"));
	cJSON_ArrayForEach(device, metrics_find(status, "devices"))
	{
		char process[16];

		(void)snprintf(process, sizeof(process), "%.0f", number(device, "device"));
		print(page, process, metrics_find(device, "worker"));
	}
}

/* ---- the front ---- */

static void print_front(struct page *page, const cJSON *front)
{
	static const struct {
		const char *name;
		enum kind kind;
		const char *help, *path;
	} values[] = {
		{"uptime_seconds", GAUGE, "Since the daemon was started", "uptime_s"},
		{"connections", GAUGE, "Connections to the front", "connections"},
		{"connections_accepted", COUNTER, "Connections accepted", "accepted"},
		{"connections_refused", COUNTER, "Connections refused", "refused"},
		{"requests", COUNTER, "Requests to the front", "frames"},
		{"protocol_violations", COUNTER, "Connections closed for what they sent",
		 "violations"},
		{"resident_bytes", GAUGE, "Private memory of the front", "resident_bytes"},
		{"compiles", COUNTER, "Kernels that were compiled", "compile.built"},
		{"compiles_failed", COUNTER, "Builds that failed", "compile.failed"},
		{"compiles_queued", GAUGE, "Builds that wait", "compile.queued"},
		{"cache_hits", COUNTER, "Kernels that were in the cache", "compile.hits"},
	};

	for (size_t i = 0; i < sizeof(values) / sizeof(values[0]); i++) {
		bool counts = values[i].kind == COUNTER;

		head(page, values[i].name, values[i].kind, values[i].help);
		(void)fprintf(page->out, "fmhad_%s%s %.17g\n", values[i].name,
			      counts ? "_total" : "", number(front, values[i].path));
	}
}

static void print_pool_name(struct page *page, const char *name, const cJSON *pool)
{
	(void)fprintf(page->out, "fmhad_%s{uid=\"%.0f\",pool=\"", name, number(pool, "uid"));
	print_label(page, text_of(pool, "name"));
	(void)fputs("\"", page->out);
}

static void print_pools(struct page *page, const cJSON *pools)
{
	static const char *const states[] = {"free", "leased", "sealed", "lost"};
	static const struct {
		const char *name, *help, *member;
	} gauges[] =
		{
			{"pool_pages_pinned", "Published pages that somebody reads", "pinned"},
			{"pool_pages_filed", "Pages that a pool's file holds", "filed"},
		},
	  counters[] = {
		  {"pool_hits", "Keys that were found", "hits"},
		  {"pool_misses", "Keys that were asked for behind the last one found", "misses"},
		  {"pool_seals", "Pages that were published", "seals"},
		  {"pool_evictions", "Published pages that others needed", "evictions"},
		  {"pool_file_writes", "Pages that were copied to a pool's file", "written"},
		  {"pool_file_reads", "Pages that came back from it", "restored"},
		  {"pool_file_failures", "Pages that could not be copied, or were not whole",
		   "file_failures"},
	  };
	const cJSON *pool;

	head(page, "pool_pages", GAUGE, "Pages of pools by what they are; pinned ones are sealed");
	cJSON_ArrayForEach(pool, pools)
	{
		for (size_t i = 0; i < sizeof(states) / sizeof(states[0]); i++) {
			print_pool_name(page, "pool_pages", pool);
			(void)fprintf(page->out, ",state=\"%s\"} %.17g\n", states[i],
				      number(pool, states[i]));
		}
	}
	for (size_t i = 0; i < sizeof(gauges) / sizeof(gauges[0]); i++) {
		head(page, gauges[i].name, GAUGE, gauges[i].help);
		cJSON_ArrayForEach(pool, pools)
		{
			print_pool_name(page, gauges[i].name, pool);
			(void)fprintf(page->out, "} %.17g\n", number(pool, gauges[i].member));
		}
	}
	for (size_t i = 0; i < sizeof(counters) / sizeof(counters[0]); i++) {
		head(page, counters[i].name, COUNTER, counters[i].help);
		cJSON_ArrayForEach(pool, pools)
		{
			char name[64];

			(void)snprintf(name, sizeof(name), "%s_total", counters[i].name);
			print_pool_name(page, name, pool);
			(void)fprintf(page->out, "} %.17g\n", number(pool, counters[i].member));
		}
	}
}

const char *metrics_type(enum metrics_format format)
{
	return format == METRICS_OPEN ? "application/openmetrics-text; version=1.0.0; charset=utf-8"
				      : "text/plain; version=0.0.4; charset=utf-8";
}

char *metrics_text(const cJSON *status, enum metrics_format format)
{
	const cJSON *devices = metrics_find(status, "devices");
	char *text = NULL;
	size_t n;
	int cut;
	struct page opened = {open_memstream(&text, &n), format}, *page = &opened;

	if (!page->out)
		return NULL;
	head(page, "build", INFO, "The daemon's version");
	(void)fputs("fmhad_build_info{version=\"", page->out);
	print_label(page, text_of(status, "version"));
	(void)fputs("\"} 1\n", page->out);
	head(page, "degraded", GAUGE, "1 when a device is out of order");
	(void)fprintf(page->out, "fmhad_degraded %d\n",
		      strcmp(text_of(status, "state"), "degraded") == 0);
	print_front(page, metrics_find(status, "front"));
	print_pools(page, metrics_find(metrics_find(status, "front"), "pools"));
	print_info(page, devices);
	print_of_devices(page, devices);
	print_quarantine(page, devices);
	print_families(page, devices);
	print_roofs(page, devices);
	print_plans(page, devices);
	print_latencies(page, devices);
	print_of_processes(page, status, "errors", "Requests answered with an error, by its code",
			   print_errors_of);
	print_of_processes(page, status, "limit_hits",
			   "Times that a limit of the configuration was hit", print_limits_of);
	if (format == METRICS_OPEN)
		(void)fputs("# EOF\n", page->out);
	cut = ferror(page->out);
	if (fclose(page->out) != 0 || cut) {
		free(text);
		return NULL;
	}
	return text;
}
