// SPDX-License-Identifier: MIT
/* arch.c: what a loaded catalog says about archs and data types. */
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

const char *spec_arch_vendor(const struct spec_catalog *catalog, int arch)
{
	const struct spec_backend_arch *model = spec_arch_model(catalog, arch);

	return model ? model->vendor : "amd";
}

const char *spec_arch_family(const struct spec_catalog *catalog, int arch)
{
	const struct spec_backend_arch *model = spec_arch_model(catalog, arch);

	return model ? model->family : "";
}

const char *spec_arch_rules(const struct spec_catalog *catalog, int arch, int index)
{
	const struct arch *of = &catalog->archs[arch];

	if (of->own.backend && index-- == 0)
		return of->own.backend->name;
	return index >= 0 && index < of->n_spaces ? of->spaces[index].rules->name : NULL;
}

int spec_arch_has_dtype(const struct spec_catalog *catalog, int arch, enum spec_dtype dtype)
{
	const struct arch *of = &catalog->archs[arch];
	int found = of->own.model ? of->own.model->data_types >> dtype & 1 : 0;

	for (int i = 0; i < of->n_spaces; i++)
		found |= of->spaces[i].dtypes >> dtype & 1;
	return found;
}

int spec_arch_has_pipeline(const struct spec_catalog *catalog, int arch, int pipeline)
{
	const struct arch *of = &catalog->archs[arch];
	int found = of->own.pipelines >> pipeline & 1;

	for (int i = 0; i < of->n_spaces; i++)
		found |= (int)(of->spaces[i].pipelines >> pipeline & 1);
	return found;
}

const struct spec_backend_arch *spec_arch_model(const struct spec_catalog *catalog, int arch)
{
	return catalog->archs[arch].own.model;
}

static const struct spec_pipeline *own_pipeline(const struct spec_catalog *catalog, int pipeline)
{
	return pipeline >= 0 && pipeline < catalog->pipelines.n ? catalog->own_pipelines[pipeline]
								: NULL;
}

int spec_pipeline_flags(const struct spec_catalog *catalog, int pipeline)
{
	const struct spec_pipeline *own = own_pipeline(catalog, pipeline);

	return own ? (int)own->flags : -1;
}

void spec_dq_tile(const struct spec_catalog *catalog, const struct kernel_spec *spec,
		  int32_t *ret_rows, int32_t *ret_floats)
{
	const struct spec_pipeline *own = own_pipeline(catalog, spec->pipeline);

	*ret_rows = *ret_floats = 0;
	if (own && own->dq_tile)
		own->dq_tile(spec, ret_rows, ret_floats);
}
