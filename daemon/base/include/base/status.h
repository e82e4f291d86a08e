/* SPDX-License-Identifier: MIT */
/* status.h: the pieces of `fmhactl status` that front and worker have in common. */
#ifndef FMHAD_BASE_STATUS_H
#define FMHAD_BASE_STATUS_H

#include <stdint.h>

#include <cjson/cJSON.h>

#include <base/connection.h>
#include <base/doing.h>
#include <base/histogram.h>
#include <base/limits.h>

/* Memory of this process that is in RAM and not shared with clients; 0: unknown. */
uint64_t status_resident_bytes(void);

/*
 * Adds {"n", "p50", "p99", "max", "sum", "buckets"} under @name; buckets: how many values are below
 * 2^10, 2^12, ... 2^36.
 */
void status_add_histogram(cJSON *object, const char *name, const struct histogram *histogram);

/* {"<code's name>": how often, ...} of those that were answered; given. */
cJSON *status_errors(const uint64_t n_errors[CONNECTION_ERRORS]);

/* {"<method>": {"n", "cpu_ns", "longest_ns"}, ...} of what the loop has done; given. */
cJSON *status_loop(const struct doing *doing);

/* {"<limit>": {"value", "hits"}, ...}; given. */
cJSON *status_limits(const struct limits *limits);

#endif
