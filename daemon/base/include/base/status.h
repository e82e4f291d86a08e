/* SPDX-License-Identifier: MIT */
/* status.h: the pieces of `fmhactl status` that front and worker have in common. */
#ifndef FMHAD_BASE_STATUS_H
#define FMHAD_BASE_STATUS_H

#include <stddef.h>
#include <stdint.h>

#include <cjson/cJSON.h>

#include <base/histogram.h>
#include <base/limits.h>

/* Memory of this process that is in RAM and not shared with clients; 0: unknown. */
uint64_t status_resident_bytes(void);

/* Adds {"n", "p50", "p99", "max"} under @name. */
void status_add_histogram(cJSON *object, const char *name, const struct histogram *histogram);

/* {"<limit>": {"value", "hits"}, ...}; given. */
cJSON *status_limits(const struct limits *limits);

#endif
