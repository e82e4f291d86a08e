/* SPDX-License-Identifier: MIT */
/* fmhactl archs, fmhactl profiles: what the JSON folder knows. */
#include "ctl.h"

#include <stdio.h>

#include <kernels/backends.h>
#include <specs/catalog.h>

static int load(const struct ctl_command *command, int argc, char **argv,
		struct spec_catalog **ret_catalog)
{
	struct fmha_error err = {0};

	if (cli_next(&command->usage, argc, argv) != -1 || optind < argc)
		return optind < argc ? ctl_usage_error("what is '%s'?", argv[optind]) : CTL_USAGE;
	return spec_catalog_load(NULL, fmha_backends, ret_catalog, &err) < 0 ? ctl_error(&err)
									     : CTL_OK;
}

static int archs(int argc, char **argv)
{
	struct spec_catalog *catalog = NULL;
	int r = load(&ctl_archs, argc, argv, &catalog);

	if (r != CTL_OK)
		return r;
	for (int arch = 0; arch < spec_arch_count(catalog); arch++) {
		const char *rules;

		(void)printf("%-15s %-7s %-22s", spec_arch_name(catalog, arch),
			     spec_arch_vendor(catalog, arch), spec_arch_family(catalog, arch));
		for (int i = 0; (rules = spec_arch_rules(catalog, arch, i)); i++)
			(void)printf("%s%s", i ? "," : "", rules);
		(void)printf("%*s", spec_arch_rules(catalog, arch, 1) ? 2 : 5, "");
		for (int dtype = 0; dtype < SPEC_N_DTYPES; dtype++)
			if (spec_arch_has_dtype(catalog, arch, (enum spec_dtype)dtype))
				(void)printf(" %s",
					     spec_word(catalog, SPEC_FIELD_data_type, dtype));
		(void)putchar('\n');
	}
	spec_catalog_free(catalog);
	return CTL_OK;
}

static int profiles(int argc, char **argv)
{
	struct spec_catalog *catalog = NULL;
	int r = load(&ctl_profiles, argc, argv, &catalog);

	if (r != CTL_OK)
		return r;
	for (int i = 0; i < spec_profile_count(catalog); i++) {
		int receipt = spec_profile_receipt(catalog, i);

		(void)printf("%-16s", spec_profile_name(catalog, i));
		if (receipt >= 0)
			(void)printf("%4d", receipt);
		else
			(void)printf("   -");
		(void)printf("  %s\n", spec_profile_text(catalog, i));
	}
	spec_catalog_free(catalog);
	return CTL_OK;
}

const struct ctl_command ctl_archs = {
	.usage =
		{.name = "fmhactl archs",
		 .brief = "the archs that kernels are known for (no daemon)",
		 .synopsis = "",
		 .text = "Prints each arch with its vendor, family, kernel spaces (rules) and data "
			 "types."},
	.run = archs,
};

const struct ctl_command ctl_profiles = {
	.usage = {.name = "fmhactl profiles",
		  .brief = "named subsets of kernels (no daemon)",
		  .synopsis = "",
		  .text = "Prints each profile with its receipt and the filter that it keeps "
			  "kernels by."},
	.run = profiles,
};
