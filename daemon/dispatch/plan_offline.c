/* SPDX-License-Identifier: MIT */
#include <dispatch/plan_offline.h>

#include <stdio.h>
#include <string.h>

#include <dispatch/ck.h>
#include <dispatch/model.h>
#include <dispatch/plan.h>
#include <catalogue/backends.h>
#include <catalogue/gpu_catalogue.h>
#include <registry/registry.h>

/* What people mean by an arch's name. */
static void arch_describe(const struct spec_catalog *catalog, const char *name,
			  struct plan_device *device)
{
	int arch = spec_arch_find(catalog, name);
	const struct spec_backend_arch *model = arch < 0 ? NULL : spec_arch_model(catalog, arch);

	/* One that only AMD's rules know is taken for an MI. */
	if (!device->compute_units)
		device->compute_units = model ? model->units : 64;
	device->lds_bytes = model ? model->lds_bytes : 65536;
	device->wave = model ? model->wave : 64;
}

/* Is it about kernels that are not this build's? */
static bool is_foreign(const struct spec_catalog *catalog,
		       const struct plan_offline_options *options)
{
	int arch = spec_arch_find(catalog, options->arch);
	const char *own = arch < 0 ? NULL : spec_arch_rules(catalog, arch, 0);

	if (arch < 0)
		return false;
	return !spec_arch_model(catalog, arch) ||
	       (options->rules && own && strcmp(options->rules, own) != 0);
}

/* What a GPU of that arch would say of a candidate, but for what it has seen or set aside. */
static int find_on_gpu(void *owner, enum abi_family family, uint32_t dtype,
		       const union abi_args *args, struct plan_stage *stage, const char **ret_why)
{
	const struct plan_device *device = owner;
	struct gpu_kernel kernel;
	const char *why;

	(void)family;
	(void)dtype;
	if (!stage->has_spec)
		return 1;
	why = gpu_kernel_of_spec(device->arch, stage->pipeline, &stage->spec, &stage->traits,
				 &kernel);
	if (!why)
		why = gpu_kernel_launch(&kernel, device->compute_units, args, &stage->launch);
	if (why) {
		*ret_why = why;
		return 1;
	}
	stage->tile_n0 = (uint32_t)kernel.tile.tile_n;
	return 0;
}

int plan_explain_offline(const struct plan_offline_options *options,
			 const struct fmha_problem *problem, char **ret_json,
			 struct fmha_error *err)
{
	struct registry_device model = {0};
	struct registry_source *foreign = NULL;
	struct spec_catalog *catalog = NULL;
	struct registry *registry = NULL;
	struct predict_model *model_of_times = NULL;
	struct plan_device device = {
		.arch = options->arch,
		.compute_units = options->compute_units,
		.explain_features = options->features,
		.explain_integers = options->integers,
	};
	struct plan_choice choice = {0};
	int r = spec_catalog_load(NULL, fmha_backends, &catalog, err);

	(void)snprintf(model.name, sizeof(model.name), "%s", options->arch);
	registry_device_archs(&model, options->arch);
	if (r == 0 && is_foreign(catalog, options))
		r = ck_source_new(catalog, &model, options->rules, &foreign, err);
	model.source = foreign;
	device.foreign = ck_foreign(foreign);
	if (r == 0)
		r = registry_new(catalog, &model, &registry, err);
	device.registry = registry;
	if (r == 0 && !options->rules)
		(void)predict_model_load(options->arch, &model_of_times, NULL);
	device.model = model_of_times;
	for (uint32_t i = 0; i < options->n_kernels && i < PLAN_MAX_STAGES; i++)
		(void)snprintf(choice.kernel[choice.n++], PLAN_KERNEL_BYTES, "%s",
			       options->kernels[i]);
	if (r == 0)
		arch_describe(catalog, options->arch, &device);
	if (r == 0 && !foreign && gpu_arch_find(options->arch)) {
		device.find = find_on_gpu;
		device.owner = &device;
	}
	if (r == 0)
		r = plan_explain(problem, &choice, &device, ret_json, err);
	predict_model_free(model_of_times);
	registry_free(registry);
	ck_source_free(foreign);
	spec_catalog_free(catalog);
	return r;
}
