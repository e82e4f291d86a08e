/* SPDX-License-Identifier: MIT */
/* bench_svg.h: the drawings of a report, each a heading, a sentence and an <svg>; nothing where
 * there is nothing to draw. */
#ifndef CTL_BENCH_SVG_H
#define CTL_BENCH_SVG_H

#include <stdio.h>

#include "bench.h"

/* Escaped. */
void html_text(FILE *out, const char *text);

/* TFLOP/s of the planner's choice over the number of keys, a line for each kind of problem. */
void svg_speed(FILE *out, const struct bench_device *device);
/* TFLOP/s over operations a byte, under the device's roofs. */
void svg_roofline(FILE *out, const struct bench_device *device);
/* The share of shapes whose chosen kernel has at most so much of the best one's speed. */
void svg_selection(FILE *out, const struct bench_device *device);

#endif
