/* SPDX-License-Identifier: MIT */
/* ck.h: the kernels of AMD's Composable Kernel as a registry and dispatch take them, offline. */
#ifndef FMHAD_DISPATCH_CK_H
#define FMHAD_DISPATCH_CK_H

#include <dispatch/plan.h>
#include <registry/registry.h>

/*
 * The kernels that @rules make for @device's archs; NULL: the only rules that an arch has. @catalog: with rules
 * (spec_catalog_load()), kept.
 * Return: 0 and a source, given; FMHA_EINVAL naming "rules", FMHA_ENOMEM.
 */
int ck_source_new(const struct spec_catalog *catalog, const struct registry_device *device,
		  const char *rules, struct registry_source **ret_source, struct fmha_error *err);
struct registry_source *ck_source_free(struct registry_source *source);

/* For struct plan_device. NULL for NULL. */
const struct select_foreign *ck_foreign(const struct registry_source *source);

#endif
