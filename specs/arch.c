// SPDX-License-Identifier: MIT
/* arch.c: what a loaded catalog says about archs, data types and profiles. */
#include <string.h>

#include "catalog_impl.h"

int spec_arch_count(const struct spec_catalog *catalog)
{
	return catalog->n_archs;
}

const char *spec_arch_name(const struct spec_catalog *catalog, int arch)
{
	return spec_word(catalog, SPEC_FIELD_gfx_arch, arch);
}

int spec_arch_find(const struct spec_catalog *catalog, const char *name)
{
	return spec_word_find(catalog, SPEC_FIELD_gfx_arch, name);
}

static const char *arch_string(const struct spec_catalog *catalog, int arch, const char *key)
{
	return cJSON_GetObjectItemCaseSensitive(catalog->archs[arch].document, key)->valuestring;
}

const char *spec_arch_vendor(const struct spec_catalog *catalog, int arch)
{
	return arch_string(catalog, arch, "vendor");
}

const char *spec_arch_family(const struct spec_catalog *catalog, int arch)
{
	return arch_string(catalog, arch, "family");
}

const char *spec_arch_rules(const struct spec_catalog *catalog, int arch, int index)
{
	const struct arch *of = &catalog->archs[arch];

	return index >= 0 && index < of->n_spaces ? of->spaces[index].rules->name : NULL;
}

int spec_arch_has_dtype(const struct spec_catalog *catalog, int arch, enum spec_dtype dtype)
{
	const struct arch *of = &catalog->archs[arch];
	int found = 0;

	for (int i = 0; i < of->n_spaces; i++)
		found |= of->spaces[i].dtypes >> dtype & 1;
	return found;
}

int spec_arch_has_pipeline(const struct spec_catalog *catalog, int arch, int pipeline)
{
	const struct arch *of = &catalog->archs[arch];
	int found = 0;

	for (int i = 0; i < of->n_spaces; i++)
		found |= (int)(of->spaces[i].pipelines >> pipeline & 1);
	return found;
}

int64_t spec_arch_constant(const struct spec_catalog *catalog, int arch, const char *name,
			   int64_t fallback)
{
	const struct arch *of = &catalog->archs[arch];

	for (int i = 0; i < of->n_spaces; i++) {
		const cJSON *constant = cJSON_GetObjectItemCaseSensitive(
			cJSON_GetObjectItemCaseSensitive(of->spaces[i].item, "constants"), name);

		if (constant)
			return constant->valueint;
	}
	return fallback;
}

int spec_dtype_bytes(const struct spec_catalog *catalog, enum spec_dtype dtype)
{
	return catalog->dtype_bytes[dtype];
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
