/* SPDX-License-Identifier: MIT */
/*
 * recipe.h: a problem without files. Sizes and features come from options, or from a shape of
 * specs/shapes; recipe_make() turns them into a struct fmha_problem with its tensors, lists of
 * lengths and page tables, and recipe_fill() gives every input its contents. Both follow from the
 * recipe alone: the same options give the same problem and the same numbers.
 *
 * A size that nobody has said is RECIPE_UNSAID: nhead_k, seqlen_k and hdim_v are as nhead_q, seqlen_q
 * and hdim_q then, and these 8, 1024 and 128. 0 is a size.
 */
#ifndef CTL_RECIPE_H
#define CTL_RECIPE_H

#include <specs/shapes.h>

#include "ctl.h"
#include "problem.h"
#include "tensors.h"

#define RECIPE_MAX_LIST   1024
#define RECIPE_UNSAID     (-1)
#define RECIPE_TEXT_BYTES 512
#define RECIPE_FILL_BLOCK ((int64_t)1 << 20) /* elements that differ before they repeat */

/* How long the sequences are, when no list says so: the words of spec_shape's `lengths`. */
enum recipe_lengths {
	RECIPE_EQUAL,
	RECIPE_MIXED,      /* anything up to the longest, which is the first */
	RECIPE_RAMP,       /* evenly growing */
	RECIPE_ONE_LONG,   /* the first; the others are a sixteenth of it */
	RECIPE_WITH_EMPTY, /* as mixed, every other one empty */
	RECIPE_PADDED,     /* at least half of their room, which is that of the longest */
};

enum recipe_descale {
	RECIPE_NO_DESCALE,
	RECIPE_PER_TENSOR,
	RECIPE_PER_BLOCK,
	RECIPE_PER_PAGE, /* with descale_block_k: a block of its slots */
	RECIPE_PER_SLOT, /* append: found by it */
};
enum recipe_contents { RECIPE_NORMAL, RECIPE_UNIFORM, RECIPE_INTEGERS, RECIPE_WAVES };

/* One number a sequence; the last one counts for the sequences that follow. */
struct recipe_list {
	int32_t n, values[RECIPE_MAX_LIST];
};

struct recipe {
	struct fmha_problem problem; /* sizes and options; recipe_make() completes it */
	bool batch_given, mode_given, dtype_given;
	uint32_t dtype, dtype_o; /* of q, k and v, and of what fp8 gives (FMHA_N_DTYPES: bf16) */
	uint32_t dtype_kv;       /* of a cache of 8 bits under a q of 16; FMHA_N_DTYPES: dtype */
	bool want[FMHA_N_TENSORS];

	uint32_t lengths;                  /* enum recipe_lengths */
	int32_t longest_q, longest_k;      /* of the sequences, as recipe_make() found it said */
	struct recipe_list q, k;           /* lengths of sequences; n 0: by `lengths` */
	struct recipe_list q_room, k_room; /* what they take in memory; n 0: no more than that */
	bool indptr;                       /* a paged cache is looked up as SGLang does */
	bool slots;                        /* append: rows go to slots in any order */
	bool cache_rows;                   /* sequences lie in a cache's rows in another order */
	int32_t leftpad; /* keys to skip at the left of sequence b: b % (leftpad + 1) */

	uint32_t descale;  /* enum recipe_descale */
	int32_t bias_rank; /* which axes the bias has: 0: none, 1: heads, 2: batch too */
	bool alibi_per_batch;
	bool heads_first_in, heads_first_out, v_column_major;
	uint32_t contents; /* enum recipe_contents */
	uint64_t seed;

	/* recipe_make() adds what its sequences have together, */
	double rows, keys, pairs; /* pairs of a row and a key that it sees */
	/* and tables: a role's integers are indices[role][0 .. n_indices[role] - 1]. */
	int32_t *indices[FMHA_N_TENSORS];
	int64_t n_indices[FMHA_N_TENSORS];
};

/* bf16, nothing else said. */
void recipe_init(struct recipe *recipe, uint32_t op);
void recipe_from_shape(struct recipe *recipe, const struct spec_shape *shape);
/* The recipe as a shape: what filters over shapes see. Lists are shown by their longest. */
void recipe_shape(const struct recipe *recipe, struct spec_shape *ret_shape);
void recipe_deinit(struct recipe *recipe);

/*
 * Completes the problem and marks its tensors by a data that is not NULL, for tensors_new().
 * Whether such a problem can be is for problem_check() to say. Return: 0, FMHA_EINVAL (lists),
 * FMHA_ENOMEM.
 */
int recipe_make(struct recipe *recipe, struct fmha_error *err);

/*
 * Once made: multiplies and adds that the problem cannot do without, counted apart, and the least
 * traffic: every input read once, every output written once. By the sequences' own lengths.
 */
double recipe_flops(const struct recipe *recipe);
double recipe_bytes(const struct recipe *recipe);

/* What contents of @role are multiplied by: codes of i8 that have factors take all of their range, and the
 * factors, of @role too, bring them back. */
double recipe_spread(const struct fmha_problem *problem, uint32_t role);

/* @bytes of latents of fp8, with factors. */
void recipe_fill_latents(uint8_t *data, uint64_t bytes, uint64_t *state);

/* Contents for every input. */
void recipe_fill(const struct recipe *recipe, const struct tensors *tensors);

/* Whether the operation leaves its results in @role. */
bool recipe_is_result(const struct fmha_problem *problem, uint32_t role);

/* Lengths, tables and their tensors: recipe_tables.c, for recipe_make(). */
int recipe_make_tables(struct recipe *recipe, struct fmha_error *err);
/* The role gets a place. */
void recipe_mark(struct recipe *recipe, uint32_t role, uint32_t dtype);

/* The options, by CK's names and by plain ones. */
#define RECIPE_OPTION_BASE 5000
extern const struct cli_option recipe_options[];

bool recipe_is_option(int option);
/* Return: 0, or CTL_USAGE (a line is printed). */
int recipe_option(struct recipe *recipe, int option, const char *value);
/* The number of the option called @name, or -1. */
int recipe_option_named(const char *name);

const char *recipe_option_name(int option); /* the first one of that number, without dashes */
/* The problem's options; its sizes are 0, for files to say. */
void recipe_options_alone(const struct recipe *recipe, struct fmha_problem *ret_problem);
/* Whether files, which say their own sizes and types, leave the option a meaning. */
bool recipe_option_fits_files(int option);
/*
 * Whether the sizes and the type that options gave are those of @problem, as files made it. Return: 0,
 * or CTL_USAGE (a line is printed).
 */
int recipe_compare_sizes(const struct recipe *recipe, const struct fmha_problem *problem);

/* For explanations, which read nothing: each tensor gets a buffer of its own. */
void recipe_pretend_buffers(struct fmha_problem *problem);

/* Once made: the options that give this recipe, its operation first: "forward -prec=bf16 -b=2 -h=16 ...".
 * Bytes beyond @n are cut off. */
void recipe_text(const struct recipe *recipe, char *text, size_t n);

#endif
