/* SPDX-License-Identifier: MIT */
/*
 * backend.h: the kernels that a backend of this build has, as the backend itself says. A backend is
 * a table in C beside its kernels: its archs, its pipelines (main loops) and its rows, each a tile
 * of a pipeline with what it can take. Whoever links a backend hands it to spec_catalog_load(), and
 * its rows become the kernel space that the archs have by default: the product of a row, the data
 * types, the head dims and the traits of a family.
 *
 * This is what fmhad's own kernels are described by. The spaces of rules/ (AMD's) are data instead:
 * see specs/README.md.
 */
#ifndef SPECS_BACKEND_H
#define SPECS_BACKEND_H

#include <kernels/traits.h>
#include <specs/space.h>

#define SPEC_BIT(value) (1u << (value))

enum spec_pipeline_flags {
	SPEC_PACKS_HEADS = 1, /* the query heads of a group lie side by side in a tile's rows */
	SPEC_NO_MATRIX = 2,   /* without matrix instructions */
	SPEC_IN_MEMORY = 4, /* accumulators are in memory, as on a CPU: a large tile cannot spill */
	SPEC_WRITES_DQ = 8, /* backward needs no buffer for partial sums of dQ, or says which */
	SPEC_PACKS_KEYS = 16, /* K and V are copied in another order first */
	SPEC_WARPGROUPS =
		32,        /* products of four waves at once, from LDS that a copy engine fills */
	SPEC_STREAMS = 64, /* few rows at the speed of memory: several tiles of keys under way */
	SPEC_STAGED = 128, /* operands as the matrix units of AMD want them, a tile ahead */
	SPEC_MASK_DATA = 256,     /* reads masks that are tensors: intervals, bits */
	SPEC_SPLITS_DQ = 512,     /* writes dQ, or a sum of it for each part of the keys */
	SPEC_V_IN_K = 1024,       /* values may be part of keys */
	SPEC_CHOSEN = 2048,       /* reads keys by indices */
	SPEC_LATENT_FP8 = 4096,   /* reads latents of fp8 */
	SPEC_LATENTS_ONLY = 8192, /* keys with values of their own are for others, unless chosen */
	SPEC_WIDENED = 16384,     /* 16 bits take scales: those of keys widened for them */
	SPEC_UNSPLIT = 32768,     /* family fwd_splitkv takes problems that are not split */
};

struct kernel_spec;

struct spec_pipeline {
	const char *name;
	uint32_t flags;
	/* The rows and floats of tiles of its own in which a dq_dk_dv kernel sums dQ. NULL: none does. */
	void (*dq_tile)(const struct kernel_spec *spec, int32_t *ret_rows, int32_t *ret_floats);
	/* spec_kv_parts() of such a kernel. NULL: none cuts heads. */
	int32_t (*kv_parts)(const struct kernel_spec *spec, uint32_t units,
			    const struct abi_bwd_args *args, double ret_us[2]);
	/* spec_order_words() of such a kernel. NULL: none reads an order. */
	int32_t (*order_words)(const struct kernel_spec *spec, const struct abi_bwd_args *args);
};

struct spec_backend_arch {
	const char *name, *vendor, *family; /* "sm_90a", "nvidia", "hopper" */
	uint32_t cores;                     /* bits, the backend's: which rows it can run */
	uint16_t data_types;                /* bits of enum spec_dtype */
	uint16_t wave;                      /* lanes of a wave; 1: a CPU */
	uint16_t units;                     /* of the card that people mean by the name */
	uint32_t lds_bytes;                 /* that a block may take; 0: a CPU */
	uint16_t warp_m, warp_n, warp_k;    /* what one matrix instruction, or its like, makes */
	uint16_t memory_gbs;                /* of that card, by its data sheet; a CPU: 0 */
};

struct spec_row {
	uint8_t pipeline;    /* index into the backend's */
	uint16_t families;   /* bits of enum spec_family */
	uint32_t cores;      /* archs that have one of these run it */
	uint16_t data_types; /* bits of enum spec_dtype */
	uint16_t hdim_most;  /* the larger head dim is at most this */
	uint16_t tile_m, tile_n;
	uint8_t waves_m, waves_n;
	int8_t blocks_per_cu; /* -1: the compiler decides */
	uint32_t without;     /* bits of enum trait: those that it has not, such as dropout */
};

struct spec_backend {
	const char *name; /* "gpu": what option rules calls it */
	const struct spec_pipeline *pipelines;
	size_t n_pipelines;
	const struct spec_backend_arch *archs;
	size_t n_archs;
	const struct spec_row *rows; /* those of one pipeline and family best first */
	size_t n_rows;
	const struct spec_head_dims *head_dims; /* the largest last, both the same */
	size_t n_head_dims;
	/* Bits of enum trait: those that code is specialised on. All others are arguments, so that they are not
	 * in the names of kernels: one kernel is one piece of code. */
	uint32_t compiled;
	/* Writes the tile of @row for @spec, which has all but the tile and its traits. */
	void (*cut)(const struct spec_backend_arch *arch, const struct spec_row *row,
		    struct kernel_spec *spec);
	/*
	 * Can this tile run? Judges what rows do not say: what has to be divisible, and what fits.
	 * @pipeline: index into the backend's
	 * @traits: those of @spec
	 * Return: NULL, or why not, a sentence of which @ret_field is the subject.
	 */
	const char *(*misfit)(const struct spec_backend_arch *arch, int pipeline,
			      const struct kernel_spec *spec, const struct traits *traits,
			      enum spec_field *ret_field);
};

/* Finds what a spec of this build's own kernels has compiled in; what it says of a problem besides is left out. */
void spec_traits(const struct kernel_signature *signature, struct traits *ret_traits);
/* enum spec_dtype of an enum abi_dtype; -1: kernels have no such type. */
int spec_dtype_of(uint32_t dtype);

/*
 * Of a spec of this build's own kernels: drops what is no matter to the code, so that what is left is the
 * kernel's own spec. Others are left as they are.
 */
void spec_reduce(const struct spec_catalog *catalog, struct kernel_spec *spec);

/* The signature of the kernels that have @traits and @dims, on an arch that this build has kernels for. */
void spec_own_signature(const struct spec_catalog *catalog, int arch, const struct traits *traits,
			struct spec_head_dims dims, struct kernel_signature *ret_signature);

/*
 * Does @pattern (with * and ?) match one of the names that a kernel of this build had when names were of
 * problems? And whether a pattern, of kernels of an arch, has words that only those have.
 */
int spec_old_names_match(const struct spec_catalog *catalog, const struct kernel_spec *kernel,
			 const char *pattern);
int spec_is_old_pattern(const struct spec_catalog *catalog, int arch, const char *pattern);

#define SPEC_MAX_CANDIDATES 192 /* the rows of a backend */
#define SPEC_MAX_HEAD_DIMS  32

/*
 * The kernels of an arch that this build has some for, with these head dims and all of @traits.
 * @ret_why: what the first of those lacks that would have been one more; NULL: nothing.
 * Return: how many.
 */
size_t spec_candidates(const struct spec_catalog *catalog, int arch, const struct traits *traits,
		       struct spec_head_dims dims,
		       struct kernel_spec ret_specs[SPEC_MAX_CANDIDATES], const char **ret_why);
/* The pairs of head dims that kernels of @family are made for. Return: how many. */
size_t spec_own_head_dims(const struct spec_catalog *catalog, int arch, enum spec_family family,
			  struct spec_head_dims ret_pairs[SPEC_MAX_HEAD_DIMS]);
/* All of them, each once, until @visit returns other than 0, which is returned. @variant: NULL: of all. */
typedef int (*spec_visit)(void *owner, const struct kernel_spec *spec);
int spec_own_each(const struct spec_catalog *catalog, int arch, const char *variant,
		  spec_visit visit, void *owner);

#endif
