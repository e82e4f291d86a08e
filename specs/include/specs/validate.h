/* SPDX-License-Identifier: MIT */
/* validate.h: is this spec one that its arch can have? This build's own kernels are those of their
 * backend's rows; for AMD's the rules are data, in specs/rules/. */
#ifndef SPECS_VALIDATE_H
#define SPECS_VALIDATE_H

#include <specs/catalog.h>

#define SPEC_MAX_FINDINGS 24

struct spec_finding {
	int is_warning;
	char field[32];
	char msg[160]; /* "hdim_q 63: not a multiple of 8" */
};

struct spec_findings {
	int n_errors, n_warnings; /* counted even beyond SPEC_MAX_FINDINGS */
	int n;
	struct spec_finding finding[SPEC_MAX_FINDINGS];
};

/* Returns the number of errors. @ret_findings may be NULL, which is faster. */
int spec_validate(const struct spec_catalog *catalog, const struct kernel_spec *spec,
		  struct spec_findings *ret_findings);

#endif
