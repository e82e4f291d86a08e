/* SPDX-License-Identifier: MIT */
/* doctor.h: what doctor.c and doctor_device.c find, and how doctor_report.c says it. */
#ifndef CTL_DOCTOR_H
#define CTL_DOCTOR_H

#include <cjson/cJSON.h>

#include "ctl.h"

enum doctor_verdict { DOCTOR_GOOD, DOCTOR_NOTE, DOCTOR_WRONG };

struct doctor {
	struct ctl_target target;
	double seconds;  /* of races */
	cJSON *findings; /* NULL: for people, at once */
	int n_wrong;
};

/* @advice: what to do; NULL when all is well */
void doctor_report(struct doctor *doctor, enum doctor_verdict verdict, const char *what,
		   const char *advice, const char *fmt, ...) __attribute__((format(printf, 5, 6)));

/* Tries the device of the target in its worker: every family, fences, shared memory, races. */
void doctor_try_device(struct doctor *doctor);

#endif
