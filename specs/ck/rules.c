// SPDX-License-Identifier: MIT
/* rules.c: the checks of a rules file, and profiles. */
#include "catalog_impl.h"

int rules_judge(const struct spec_catalog *catalog, const struct kernel_spec *spec,
		struct spec_findings *ret_findings)
{
	const struct arch_space *space = &catalog->archs[spec->gfx_arch].spaces[0];
	int n_errors = 0;

	for (int i = 0; i < space->n_checks; i++) {
		const struct check *check = &space->checks[i];
		struct spec_finding *finding;

		if (!(check->families >> spec->signature.family & 1) ||
		    !expr_holds(&check->when, spec) || expr_holds(&check->require, spec))
			continue;
		n_errors += !check->is_warning;
		if (!ret_findings)
			continue;
		findings_add(ret_findings, check->is_warning, check->field, &finding);
		if (finding)
			findings_write(catalog, spec, check->message, finding->msg,
				       sizeof(finding->msg));
	}
	return n_errors;
}

int spec_profile_count(const struct spec_catalog *catalog)
{
	return catalog->n_profiles;
}

const char *spec_profile_name(const struct spec_catalog *catalog, int profile)
{
	return catalog->profiles[profile].name;
}

int spec_profile_find(const struct spec_catalog *catalog, const char *name)
{
	for (int i = 0; i < catalog->n_profiles; i++)
		if (strcmp(catalog->profiles[i].name, name) == 0)
			return i;
	return -1;
}

int spec_profile_receipt(const struct spec_catalog *catalog, int profile)
{
	return catalog->profiles[profile].receipt;
}

const char *spec_profile_text(const struct spec_catalog *catalog, int profile)
{
	return catalog->profiles[profile].text;
}

int spec_profile_keeps(const struct spec_catalog *catalog, int profile,
		       const struct kernel_spec *spec)
{
	return expr_holds(&catalog->profiles[profile].keep, spec);
}
