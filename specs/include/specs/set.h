/* SPDX-License-Identifier: MIT */
/*
 * set.h: kernel sets: kernels as people declare them, in a JSON file:
 *
 *   {"set": "prefill", "kernels": [
 *     {"family": "fwd", "data_type": ["fp16", "bf16"], "hdim": 128, "mask": "causal", "gfx_arch": "*",
 *      "pipeline": "qr_async", "tile": [128, 128, 32], "pads": "tttt"},
 *     {"family": "fwd", "data_type": "bf16", "hdim": "*", "tile": "*", "profile": "pytorch"}]}
 *
 * A member is a field of the record, or short for several: "hdim" (128, or "192x128"), "tile" (up to 9
 * numbers), "wave" (9), "warp" (9), "pads" (four of f, t, 8 and *). Its value is one value, a list of
 * them, or "*": all that the arch has. What is not said, or is 0 in a tile, is filled in: of AMD's
 * kernels by section "autofill" of the rules, and else with the record's default. Where a part of the
 * tile is "*", and for this build's own kernels, the tiles are those that the arch's kernels have.
 *
 * A declaration without "*" has to be valid, every kernel of it; one with "*" means those that are, and
 * has to mean one at least.
 */
#ifndef SPECS_SET_H
#define SPECS_SET_H

#include <specs/catalog.h>

struct spec_set;

#define SPEC_SET_MAX_KERNELS 1000000

/* @catalog: kept. NULL: out of memory. */
struct spec_set *spec_set_new(const struct spec_catalog *catalog);
struct spec_set *spec_set_free(struct spec_set *set);

/*
 * Adds the kernels of a file to those that the set has; a kernel is in it once.
 * @arch:  NULL: all that the file names; else its kernels on other archs are left out, and a declaration
 *         that names none is of this one
 * @rules: "ck", "gpu", "cpu": whose kernels; NULL: as the file says, else AMD's
 * Return: 0, FMHA_EINVAL naming the place in the file, FMHA_EIO, FMHA_ENOMEM; what had been added stays.
 */
int spec_set_add_file(struct spec_set *set, const char *path, const char *arch, const char *rules,
		      struct fmha_error *err);

/* In the order of the files. */
size_t spec_set_size(const struct spec_set *set);
const struct kernel_spec *spec_set_at(const struct spec_set *set, size_t index);

#endif
