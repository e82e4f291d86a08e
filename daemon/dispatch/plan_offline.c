/* SPDX-License-Identifier: MIT */
#include "offline/plan_offline.h"

#include <stdio.h>
#include <string.h>

#include <registry.h>

#include "plan.h"

/* Compute units of the card that people mean by an arch's name. */
static uint32_t usual_units(const char *arch)
{
	static const struct {
		const char *arch;
		uint32_t units;
	} cards[] = {
		{"gfx90a", 104},  /* MI250X, one die */
		{"gfx942", 304},  /* MI300X */
		{"gfx950", 256},  /* MI355X */
		{"gfx1100", 96},  /* RX 7900 XTX */
		{"gfx1201", 64},  /* RX 9070 XT */
		{"sm_80", 108},   /* A100 */
		{"sm_89", 142},   /* L40S */
		{"sm_90a", 132},  /* H100, H200 */
		{"sm_100a", 148}, /* B200 */
		{"sm_120a", 188}, /* RTX PRO 6000 */
	};

	for (size_t i = 0; i < sizeof(cards) / sizeof(cards[0]); i++)
		if (strcmp(cards[i].arch, arch) == 0)
			return cards[i].units;
	return 8;
}

int plan_explain_offline(const struct plan_offline_options *options,
			 const struct fmha_problem *problem, char **ret_json,
			 struct fmha_error *err)
{
	struct registry_device model = {.rules = options->rules};
	struct spec_catalog *catalog = NULL;
	struct registry *registry = NULL;
	struct plan_device device = {
		.arch = options->arch,
		.compute_units = options->compute_units ? options->compute_units
							: usual_units(options->arch),
	};
	int r = spec_catalog_load(NULL, &catalog, err);

	(void)snprintf(model.name, sizeof(model.name), "%s", options->arch);
	registry_device_archs(&model, options->arch);
	if (r == 0)
		r = registry_new(catalog, &model, &registry, err);
	device.registry = registry;
	if (r == 0 && spec_arch_find(catalog, options->arch) >= 0)
		device.lds_bytes = (uint64_t)spec_arch_constant(
			catalog, spec_arch_find(catalog, options->arch), "lds_bytes", 0);
	if (r == 0)
		r = plan_explain(problem, &device, ret_json, err);
	registry_free(registry);
	spec_catalog_free(catalog);
	return r;
}
