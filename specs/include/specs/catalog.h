/* SPDX-License-Identifier: MIT */
/*
 * catalog.h: everything that specs/ (the JSON folder) says, loaded once. A catalog is read-only
 * after loading and may be shared by threads. A new arch, pipeline, profile or sweep is a new line
 * or file there, never code here.
 */
#ifndef SPECS_CATALOG_H
#define SPECS_CATALOG_H

#include <specs/spec.h>

struct spec_catalog;

/*
 * Loads arch/, rules/ and sweeps/ below @dir.
 * @dir: NULL: $FMHA_SPECS_DIR, else the installed folder, else the source tree's that this was
 * built in Return: 0; FMHA_EIO; FMHA_ENOMEM; FMHA_EINVAL when a file is broken: the message has
 * file, path in the document and reason.
 */
int spec_catalog_load(const char *dir, struct spec_catalog **ret_catalog, struct fmha_error *err);
struct spec_catalog *spec_catalog_free(struct spec_catalog *catalog);

/* Archs in the order of their names; the number is the word of the field gfx_arch. */
int spec_arch_count(const struct spec_catalog *catalog);
const char *spec_arch_name(const struct spec_catalog *catalog, int arch);
int spec_arch_find(const struct spec_catalog *catalog, const char *name); /* -1: none */
const char *spec_arch_vendor(const struct spec_catalog *catalog, int arch);
const char *spec_arch_family(const struct spec_catalog *catalog, int arch);
/*
 * An arch has one or more kernel spaces, each made by the rules of one file of rules/: "ck" (AMD's
 * Composable Kernel), "gpu" and "cpu" (fmhad's own kernels). The @index-th, NULL beyond the last.
 */
const char *spec_arch_rules(const struct spec_catalog *catalog, int arch, int index);
int spec_arch_has_dtype(const struct spec_catalog *catalog, int arch, enum spec_dtype dtype);
int spec_arch_has_pipeline(const struct spec_catalog *catalog, int arch, int pipeline);
/* A constant of the arch's spaces, such as "lds_bytes"; @fallback when it has none of that name. */
int64_t spec_arch_constant(const struct spec_catalog *catalog, int arch, const char *name,
			   int64_t fallback);

/* Bytes of one element of @dtype in memory. */
int spec_dtype_bytes(const struct spec_catalog *catalog, enum spec_dtype dtype);

/* Profiles, each a predicate on the record with the receipt of the same name. */
int spec_profile_count(const struct spec_catalog *catalog);
const char *spec_profile_name(const struct spec_catalog *catalog, int profile);
int spec_profile_find(const struct spec_catalog *catalog, const char *name); /* -1: none */
int spec_profile_receipt(const struct spec_catalog *catalog, int profile);   /* -1: none */
const char *spec_profile_text(const struct spec_catalog *catalog, int profile);
int spec_profile_keeps(const struct spec_catalog *catalog, int profile,
		       const struct kernel_spec *spec);

#endif
