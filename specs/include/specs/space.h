/* SPDX-License-Identifier: MIT */
/*
 * space.h: the kernels that an arch can have, enumerated from the rules without ever building the
 * list. A space is the product of the rules' axes, compiled for one arch: blocks of fixed family,
 * data type, head dims and pipeline, each with the values of its other axes and one shared list of
 * tiles. Compiling takes milliseconds and about a megabyte, and the specs of one signature are
 * found by walking its few blocks with every axis of the signature held fast. gfx950 has 2,797,794
 * specs in receipt 0, and nothing here ever holds them.
 *
 * A space is read-only after spec_space_new() and may be shared by threads, each with its iterator.
 */
#ifndef SPECS_SPACE_H
#define SPECS_SPACE_H

#include <specs/catalog.h>
#include <specs/filter.h>

struct spec_space;
struct spec_iter;

struct spec_head_dims {
	uint16_t hdim_q, hdim_v;
};

struct spec_space_options {
	const char *arch;  /* required */
	const char *rules; /* "gpu", "cpu": what this build can run; "ck": AMD's. NULL: the former,
			    * but for sweeps, receipts and exhaustive mode, which are AMD's */
	const char
		*variant; /* NULL: all of the arch's (its default sweeps), else "fwd", "bwd", ... */
	const char *config; /* NULL, or a sweep: the name of a shipped one, or a file's path; names
			     * its own variant. variant and config are not given together */
	const char *config_json; /* NULL, or the text of such a file */
	int exhaustive;          /* 0: rules mode */
	int all_types;           /* 1: the shipped sweeps, but of every data type of the arch */
	int receipt;             /* 0: ck_default; exhaustive mode ignores it */
	const struct spec_head_dims *restrict_hdims; /* borrowed; NULL: all */
	size_t n_restrict_hdims;
};

/* All variants' shipped configurations, receipt 0: what a registry holds. */
#define SPEC_SPACE_OPTIONS(arch_name) ((struct spec_space_options){.arch = (arch_name)})

/*
 * A sweep by itself: the variant that it asks for, and what its lists let through, for programs that thin
 * out something else than a space. @name: of a shipped one, or a file's path.
 */
struct spec_sweep;
int spec_sweep_load(const struct spec_catalog *catalog, const char *name,
		    struct spec_sweep **ret_sweep, struct fmha_error *err);
struct spec_sweep *spec_sweep_free(struct spec_sweep *sweep);
const char *spec_sweep_variant(const struct spec_sweep *sweep);
/* 1: @value is in the field's list, or there is none; an empty list of data types is none, too. */
int spec_sweep_allows(const struct spec_sweep *sweep, enum spec_field field, int64_t value);
/* 1: the sweep has a list of the field. */
int spec_sweep_lists(const struct spec_sweep *sweep, enum spec_field field);

/* @catalog is kept. Return: 0, FMHA_EINVAL naming the option, FMHA_EIO, FMHA_ENOMEM. */
int spec_space_new(const struct spec_catalog *catalog, const struct spec_space_options *options,
		   struct spec_space **ret_space, struct fmha_error *err);
struct spec_space *spec_space_free(struct spec_space *space);
int spec_space_is_own(const struct spec_space *space); /* of kernels of this build */

/* The number of specs, without walking them. */
uint64_t spec_space_count(const struct spec_space *space);

/*
 * Sets the traits that @signature->family does not use (a combine kernel has no mask, a split-KV
 * kernel always writes LSE) to the one value that its specs have. Call it before looking up.
 */
void spec_signature_reduce(const struct spec_space *space, struct kernel_signature *signature);

/* Walks everything, in a fixed order. @filter: kept, or NULL. NULL: out of memory. */
struct spec_iter *spec_iter_new(const struct spec_space *space, const struct spec_filter *filter);

/*
 * Walks only the specs of @signature (reduced). Restarting one iterator for the next lookup
 * allocates nothing. An unknown family, head dim, ... walks nothing.
 */
struct spec_iter *spec_iter_new_signature(const struct spec_space *space,
					  const struct kernel_signature *signature);
void spec_iter_restart_signature(struct spec_iter *iter, const struct kernel_signature *signature);

/* The next spec, valid until the next call, or NULL at the end. */
const struct kernel_spec *spec_iter_next(struct spec_iter *iter);
struct spec_iter *spec_iter_free(struct spec_iter *iter);

/* 1 when @spec is one of the space's. */
int spec_space_contains(const struct spec_space *space, const struct kernel_spec *spec);

/*
 * The head-dim pairs that (family, dtype) has kernels for, ascending: a smaller problem may use a
 * padded larger kernel. Returns their number, also when it is more than @n_max.
 */
size_t spec_space_head_dims(const struct spec_space *space, enum spec_family family,
			    enum spec_dtype dtype, struct spec_head_dims *ret_pairs, size_t n_max);

#endif
