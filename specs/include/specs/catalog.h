/* SPDX-License-Identifier: MIT */
/*
 * catalog.h: this build's kernels and, for programs that link ck/, everything that specs/ (the JSON folder)
 * says, loaded once. A catalog is read-only
 * after loading and may be shared by threads. A new arch, pipeline, profile or sweep is a new line
 * or file there, never code here.
 */
#ifndef SPECS_CATALOG_H
#define SPECS_CATALOG_H

#include <limits.h>

#include <specs/spec.h>

struct spec_catalog;

struct spec_backend;

/* Where the JSON files are: $FMHA_SPECS_DIR, else share/fmhad/specs of the tree that the program lies in. */
const char *specs_find_dir(char path[PATH_MAX]);

/* This build's own kernels and nothing else, without a file. @backends: as below. */
int spec_catalog_own(const struct spec_backend *const *backends, struct spec_catalog **ret_catalog,
		     struct fmha_error *err);

/*
 * Loads arch/, rules/ and sweeps/ below @dir, and adds what this build can run.
 * @backends: specs/backend.h, NULL at the end, kept; NULL: none
 * @dir:      NULL: as specs_find_dir() says
 * Return: 0; FMHA_EIO; FMHA_ENOMEM; FMHA_EINVAL when a file is broken: the message has file, path
 * in the document and reason.
 */
int spec_catalog_load(const char *dir, const struct spec_backend *const *backends,
		      struct spec_catalog **ret_catalog, struct fmha_error *err);
struct spec_catalog *spec_catalog_free(struct spec_catalog *catalog);

/* Archs in the order of their names; the number is the word of the field gfx_arch. */
int spec_arch_count(const struct spec_catalog *catalog);
const char *spec_arch_name(const struct spec_catalog *catalog, int arch);
int spec_arch_find(const struct spec_catalog *catalog, const char *name); /* -1: none */
/* As its backend says; an arch that only rules/ knows is AMD's, of a family "". */
const char *spec_arch_vendor(const struct spec_catalog *catalog, int arch);
const char *spec_arch_family(const struct spec_catalog *catalog, int arch);
/*
 * An arch has one or more kernel spaces. The first is what this build can run: "gpu" or "cpu", by
 * the rows of a backend. The others are made by a file of rules/: "ck" (AMD's Composable Kernel).
 * The @index-th, NULL beyond the last.
 */
const char *spec_arch_rules(const struct spec_catalog *catalog, int arch, int index);
int spec_arch_has_dtype(const struct spec_catalog *catalog, int arch, enum spec_dtype dtype);
int spec_arch_has_pipeline(const struct spec_catalog *catalog, int arch, int pipeline);
/* Finds what its backend knows of an arch: NULL for one that this build has no kernels for. */
const struct spec_backend_arch *spec_arch_model(const struct spec_catalog *catalog, int arch);
/* Enum spec_pipeline_flags of one of this build's pipelines; -1: it is not one. */
int spec_pipeline_flags(const struct spec_catalog *catalog, int pipeline);
/* The tiles that a dq_dk_dv kernel sums dQ in: see struct abi_bwd_args; 0: it does not. */
void spec_dq_tile(const struct spec_catalog *catalog, const struct kernel_spec *spec,
		  int32_t *ret_rows, int32_t *ret_floats);
/*
 * Into how many parts a dq_dk_dv kernel is to cut the heads that share keys: see struct abi_bwd_args.
 * @ret_us: about how long it takes with one part, and with so many; 0: nothing to weigh up
 */
int32_t spec_kv_parts(const struct spec_catalog *catalog, const struct kernel_spec *spec,
		      uint32_t units, const struct abi_bwd_args *args, double ret_us[2]);
/* Of the order in which a dq_dk_dv kernel takes blocks of keys: see struct abi_bwd_args; 0: its own. */
int32_t spec_order_words(const struct spec_catalog *catalog, const struct kernel_spec *spec,
			 const struct abi_bwd_args *args);

/* The profiles of ck/, each a predicate on the record with the receipt of the same name. */
int spec_profile_count(const struct spec_catalog *catalog);
const char *spec_profile_name(const struct spec_catalog *catalog, int profile);
int spec_profile_find(const struct spec_catalog *catalog, const char *name); /* -1: none */
/* By its name, or by its receipt as a number. -1: none */
int spec_profile_parse(const struct spec_catalog *catalog, const char *text);
int spec_profile_receipt(const struct spec_catalog *catalog, int profile); /* -1: none */
/* The receipt whose kernels it keeps some of: its own, but for a few; -1: the default one. */
int spec_profile_kernels_of(const struct spec_catalog *catalog, int profile);
/* 1: it is about data types that the shipped sweeps have not. */
int spec_profile_all_types(const struct spec_catalog *catalog, int profile);
const char *spec_profile_text(const struct spec_catalog *catalog, int profile);
int spec_profile_keeps(const struct spec_catalog *catalog, int profile,
		       const struct kernel_spec *spec);

#endif
