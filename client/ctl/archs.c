/* SPDX-License-Identifier: MIT */
/* fmhactl archs, fmhactl profiles: what the JSON folder knows. */
#include "ctl.h"

#include <getopt.h>
#include <stdio.h>

#include <kernels/backends.h>
#include <specs/catalog.h>

static int load(int argc, char **argv, const char *help, struct spec_catalog **ret_catalog)
{
	static const struct option options[] = {{"help", no_argument, NULL, CTL_OPT_HELP}, {0}};
	struct fmha_error err = {0};
	int option = getopt_long(argc, argv, "", options, NULL);

	if (option == CTL_OPT_HELP) {
		(void)fputs(help, stdout);
		return -1;
	}
	if (option != -1 || optind < argc)
		return optind < argc ? ctl_usage_error("what is '%s'?", argv[optind]) : CTL_USAGE;
	return spec_catalog_load(NULL, fmha_backends, ret_catalog, &err) < 0 ? ctl_error(&err)
									     : CTL_OK;
}

int ctl_archs(int argc, char **argv)
{
	static const char help[] =
		"usage: fmhactl archs\n\n"
		"Prints each arch with its vendor, family, kernel spaces (rules) and data types.\n";
	struct spec_catalog *catalog = NULL;
	int r = load(argc, argv, help, &catalog);

	if (r != CTL_OK)
		return r < 0 ? CTL_OK : r;
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

int ctl_profiles(int argc, char **argv)
{
	static const char help[] =
		"usage: fmhactl profiles\n\n"
		"Prints each profile with its receipt and the filter that it keeps kernels by.\n";
	struct spec_catalog *catalog = NULL;
	int r = load(argc, argv, help, &catalog);

	if (r != CTL_OK)
		return r < 0 ? CTL_OK : r;
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
