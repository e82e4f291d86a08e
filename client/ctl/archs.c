/* SPDX-License-Identifier: MIT */
/* fmhactl archs, fmhactl profiles: what the JSON folder knows. */
#include "ctl.h"
#include "json.h"

#include <stdio.h>

#include <cjson/cJSON.h>

#include <catalogue/backends.h>
#include <specs/catalog.h>

static int archs_load(const struct ctl_command *command, int argc, char **argv,
		      struct spec_catalog **ret_catalog, bool *ret_json)
{
	struct ctl_target unused = CTL_TARGET_INIT;
	struct fmha_error err = {0};
	int r = ctl_options(command, argc, argv, &unused, NULL, NULL);

	*ret_json = unused.json;
	if (r != 0)
		return r;
	return spec_catalog_load(NULL, fmha_backends, ret_catalog, &err) < 0 ? ctl_error(&err)
									     : CTL_OK;
}

static int print_archs_json(const struct spec_catalog *catalog)
{
	cJSON *list = cJSON_CreateArray();

	for (int arch = 0; arch < spec_arch_count(catalog); arch++) {
		cJSON *item = ctl_add_item(list), *all_rules, *dtypes;
		const char *rules;

		cJSON_AddStringToObject(item, "arch", spec_arch_name(catalog, arch));
		cJSON_AddStringToObject(item, "vendor", spec_arch_vendor(catalog, arch));
		cJSON_AddStringToObject(item, "family", spec_arch_family(catalog, arch));
		all_rules = cJSON_AddArrayToObject(item, "rules");
		for (int i = 0; (rules = spec_arch_rules(catalog, arch, i)); i++)
			cJSON_AddItemToArray(all_rules, cJSON_CreateString(rules));
		dtypes = cJSON_AddArrayToObject(item, "data_types");
		for (int dtype = 0; dtype < SPEC_N_DTYPES; dtype++)
			if (spec_arch_has_dtype(catalog, arch, (enum spec_dtype)dtype))
				cJSON_AddItemToArray(
					dtypes, cJSON_CreateString(spec_word(
							catalog, SPEC_FIELD_data_type, dtype)));
	}
	return ctl_print_json(list);
}

static int print_profiles_json(const struct spec_catalog *catalog)
{
	cJSON *list = cJSON_CreateArray();

	for (int i = 0; i < spec_profile_count(catalog); i++) {
		cJSON *item = ctl_add_item(list);
		int receipt = spec_profile_receipt(catalog, i);

		cJSON_AddStringToObject(item, "profile", spec_profile_name(catalog, i));
		cJSON_AddItemToObject(item, "receipt",
				      receipt >= 0 ? cJSON_CreateNumber(receipt)
						   : cJSON_CreateNull());
		cJSON_AddStringToObject(item, "filter", spec_profile_text(catalog, i));
	}
	return ctl_print_json(list);
}

static int archs(int argc, char **argv)
{
	struct spec_catalog *catalog = NULL;
	bool json;
	int r = archs_load(&ctl_archs, argc, argv, &catalog, &json);

	if (r != CTL_OK)
		return r;
	if (json)
		r = print_archs_json(catalog);
	for (int arch = 0; !json && arch < spec_arch_count(catalog); arch++) {
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
	return r;
}

static int profiles(int argc, char **argv)
{
	struct spec_catalog *catalog = NULL;
	bool json;
	int r = archs_load(&ctl_profiles, argc, argv, &catalog, &json);

	if (r != CTL_OK)
		return r;
	if (json)
		r = print_profiles_json(catalog);
	for (int i = 0; !json && i < spec_profile_count(catalog); i++) {
		int receipt = spec_profile_receipt(catalog, i);

		(void)printf("%-16s", spec_profile_name(catalog, i));
		if (receipt >= 0)
			(void)printf("%4d", receipt);
		else
			(void)printf("   -");
		(void)printf("  %s\n", spec_profile_text(catalog, i));
	}
	spec_catalog_free(catalog);
	return r;
}

const struct ctl_command ctl_archs = {
	.usage =
		{.name = "fmhactl archs",
		 .brief = "the archs that kernels are known for (no daemon)",
		 .synopsis = "",
		 .text = "Prints each arch with its vendor, family, kernel spaces (rules) and data "
			 "types.",
		 .tables = {ctl_json_option}},
	.run = archs,
};

const struct ctl_command ctl_profiles = {
	.usage = {.name = "fmhactl profiles",
		  .brief = "named subsets of kernels (no daemon)",
		  .synopsis = "",
		  .text = "Prints each profile with its receipt and the filter that it keeps "
			  "kernels by.",
		  .tables = {ctl_json_option}},
	.run = profiles,
};
