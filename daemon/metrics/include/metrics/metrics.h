/* SPDX-License-Identifier: MIT */
/*
 * metrics.h: the answer to method status as text for Prometheus and what reads like it. Labels are bounded by what the machine
 * and the build have (devices, families, error codes, limits), never by users, processes or shapes.
 */
#ifndef METRICS_METRICS_H
#define METRICS_METRICS_H

#include <cjson/cJSON.h>

enum metrics_format {
	METRICS_CLASSIC, /* the older text, version 0.0.4: what collectors of text files read */
	METRICS_OPEN,    /* OpenMetrics 1.0 */
};

/* The media type of it; static. */
const char *metrics_type(enum metrics_format format);

/* Return: the whole text; given: free(). NULL: out of memory. */
char *metrics_text(const cJSON *status, enum metrics_format format);

#endif
