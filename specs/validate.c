// SPDX-License-Identifier: MIT
/* validate.c: is a spec a kernel of this build? Its rows say so; of others their rules do. */
#include <stdio.h>

#include <specs/validate.h>

#include "catalog_impl.h"
#include "fields.h"

/* Appends the value of the field named by @name, as CSV would print it. */
static size_t write_field(const struct spec_catalog *catalog, const struct kernel_spec *spec,
			  const char *name, size_t length, char *text, size_t size)
{
	int field = field_find(name, length);
	const char *word;
	int n;

	if (field < 0)
		return 0;
	if (spec_fields[field].kind == FIELD_WORD) {
		word = spec_word(catalog, field, spec_get(spec, field));
		n = snprintf(text, size, "%s", word ? word : "?");
	} else {
		n = snprintf(text, size, "%lld", (long long)spec_get(spec, field));
	}
	return (size_t)n < size ? (size_t)n : size - 1;
}

/* "hdim_q {hdim_q}: not a multiple of 8" -> "hdim_q 63: not a multiple of 8" */
void findings_write(const struct spec_catalog *catalog, const struct kernel_spec *spec,
		    const char *message, char *text, size_t size)
{
	size_t used = 0;

	while (*message && used + 1 < size) {
		size_t length = *message == '{' ? strcspn(message + 1, "}") : 0;

		if (length && message[1 + length] == '}') {
			used += write_field(catalog, spec, message + 1, length, text + used,
					    size - used);
			message += length + 2;
		} else {
			text[used++] = *message++;
		}
	}
	text[used] = '\0';
}

void findings_add(struct spec_findings *findings, int is_warning, const char *field,
		  struct spec_finding **ret)
{
	*ret = NULL;
	findings->n_warnings += is_warning;
	findings->n_errors += !is_warning;
	if (findings->n == SPEC_MAX_FINDINGS)
		return;
	*ret = &findings->finding[findings->n++];
	(*ret)->is_warning = is_warning;
	(void)snprintf((*ret)->field, sizeof((*ret)->field), "%s", field);
}

/* A spec that no rules can judge: its arch or family is not one. */
static int unknown(struct spec_findings *findings, const char *field, int value)
{
	struct spec_finding *finding;

	if (findings) {
		findings_add(findings, 0, field, &finding);
		(void)snprintf(finding->msg, sizeof(finding->msg), "%s %d: there is none", field,
			       value);
	}
	return 1;
}

/* A spec of this build's own kernels; the first fault is enough. */
static int validate_own(const struct spec_catalog *catalog, const struct own_space *own,
			const struct kernel_spec *spec, struct spec_findings *findings)
{
	enum spec_field field = SPEC_FIELD_pipeline;
	const char *why = own->backend ? backend_judge(catalog, spec, &field)
				       : "not one of arch {gfx_arch}";
	struct spec_finding *finding;
	char message[160];

	if (!why || !findings)
		return why != NULL;
	findings_add(findings, 0, spec_field_name(field), &finding);
	if (field == SPEC_FIELD_tile_m0)
		(void)snprintf(message, sizeof(message), "tile {tile_m0}x{tile_n0}: %s", why);
	else
		(void)snprintf(message, sizeof(message), "%s {%s}: %s", spec_field_name(field),
			       spec_field_name(field), why);
	findings_write(catalog, spec, message, finding->msg, sizeof(finding->msg));
	return 1;
}

/* A pipeline tells whose kernel a spec is; AMD's rules judge those of nobody else, where they are loaded. */
static int is_own(const struct spec_catalog *catalog, const struct kernel_spec *spec)
{
	return spec_pipeline_flags(catalog, spec->pipeline) >= 0 ||
	       catalog->archs[spec->gfx_arch].n_spaces == 0;
}

int spec_validate(const struct spec_catalog *catalog, const struct kernel_spec *spec,
		  struct spec_findings *ret_findings)
{
	if (ret_findings)
		ret_findings->n_errors = ret_findings->n_warnings = ret_findings->n = 0;
	if (spec->gfx_arch >= catalog->n_archs)
		return unknown(ret_findings, "gfx_arch", spec->gfx_arch);
	if (spec->signature.family >= SPEC_N_FAMILIES)
		return unknown(ret_findings, "family", spec->signature.family);
	if (is_own(catalog, spec) || !catalog->foreign)
		return validate_own(catalog, &catalog->archs[spec->gfx_arch].own, spec,
				    ret_findings);
	return catalog->foreign->judge(catalog, spec, ret_findings);
}
