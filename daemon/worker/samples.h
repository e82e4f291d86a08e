/* SPDX-License-Identifier: MIT */
/*
 * samples.h: how often an option is run until its time is known: seldom, and never on the word of one
 * short run, which may have been disturbed.
 */
#ifndef FMHAD_WORKER_SAMPLES_H
#define FMHAD_WORKER_SAMPLES_H

#include <stdbool.h>
#include <stdint.h>

#define SAMPLES_MOST 15

/* All zero: none yet. */
struct samples {
	double us[SAMPLES_MOST];
	uint32_t n;
	uint64_t spent_ns;
};

void samples_add(struct samples *samples, uint64_t took_ns);

/* Whether another sample would change nothing. @best_us: of another option; 0: there is none */
bool samples_are_enough(const struct samples *samples, double best_us);

/* Their median, the lower one of two; there has to be a sample. */
double samples_time(struct samples *samples);

#endif
