/* SPDX-License-Identifier: MIT */
#include "doctor.h"
#include "json.h"

#include <stdarg.h>
#include <stdio.h>

void doctor_report(struct doctor *doctor, enum doctor_verdict verdict, const char *what,
		   const char *advice, const char *fmt, ...)
{
	static const char *const words[] = {"ok", "note", "WRONG"};
	char text[512];
	va_list args;

	va_start(args, fmt);
	(void)vsnprintf(text, sizeof(text), fmt, args);
	va_end(args);
	doctor->n_wrong += verdict == DOCTOR_WRONG;
	if (doctor->findings) {
		cJSON *item = ctl_add_item(doctor->findings);

		cJSON_AddStringToObject(item, "check", what);
		cJSON_AddStringToObject(item, "verdict", words[verdict]);
		cJSON_AddStringToObject(item, "found", text);
		if (advice)
			cJSON_AddStringToObject(item, "advice", advice);
		return;
	}
	(void)printf("%-5s  %-14s %s\n", words[verdict], what, text);
	if (advice)
		(void)printf("%23s-> %s\n", "", advice);
}
