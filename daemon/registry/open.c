/* SPDX-License-Identifier: MIT */
/* open.c: a registry's beginning, with the set of all kernels, and its end. */
#include "impl.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>

#include <proto/error.h>

int registry_new(const struct spec_catalog *catalog, const struct registry_device *device,
		 struct registry **ret_registry, struct fmha_error *err)
{
	struct registry *registry = calloc(1, sizeof(*registry));
	int r = 0;

	if (!registry)
		return fmha_error_set(err, FMHA_ENOMEM, "registry: out of memory");
	registry->catalog = catalog;
	pthread_mutex_init(&registry->mutex, NULL);
	(void)snprintf(registry->device, sizeof(registry->device), "%s", device->name);
	(void)snprintf(registry->environment, sizeof(registry->environment), "%s",
		       device->environment);
	registry->source = device->source;
	assert(device->n_archs <= REGISTRY_MAX_ARCHS);
	for (size_t i = 0; i < device->n_archs; i++) {
		int arch = spec_arch_find(catalog, device->archs[i]);

		if (arch >= 0 && (device->source || spec_arch_model(catalog, arch)))
			registry->archs[registry->n_archs++] = arch;
	}
	if (registry->n_archs == 0)
		r = fmha_error_set_field(err, FMHA_ENOENT, "arch",
					 "arch %s: there is none; `fmhactl archs` lists them",
					 device->n_archs ? device->archs[0] : "(none)");
	if (r == 0)
		r = registry_load_set(registry, "default", "[\"*\"]", 5, NULL, err);
	if (r < 0) {
		registry_free(registry);
		return r;
	}
	*ret_registry = registry;
	return 0;
}

struct registry *registry_free(struct registry *registry)
{
	if (!registry)
		return NULL;
	registry_clear_results(registry);
	for (size_t i = 0; i < registry->table_size; i++)
		free(registry->table[i]);
	free(registry->table);
	for (size_t i = 0; i < registry->n_sets; i++)
		registry_set_deinit(&registry->sets[i]);
	pthread_mutex_destroy(&registry->mutex);
	free(registry);
	return NULL;
}
