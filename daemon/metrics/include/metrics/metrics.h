/* SPDX-License-Identifier: MIT */
/*
 * metrics.h: the answer to method status as OpenMetrics text. Labels are bounded by what the machine
 * and the build have (devices, families, error codes, limits), never by users, processes or shapes.
 */
#ifndef METRICS_METRICS_H
#define METRICS_METRICS_H

#include <cjson/cJSON.h>

/* Return: the text, up to "# EOF"; given: free(). NULL: out of memory. */
char *metrics_text(const cJSON *status);

#endif
