/* SPDX-License-Identifier: MIT */
/*
 * bench_sweep.c: sweeps of AMD's dispatcher on this build's kernels. A sweep is about traits that code is
 * specialised on there. Here most of them are arguments, which no kernel's name has: so its lists choose
 * among shapes, and of kernels its variant, pipelines and blocks a compute unit.
 */
#include "bench.h"

#include <stdlib.h>
#include <string.h>

#include <catalogue/backends.h>
#include <proto/error.h>
#include <specs/backend.h>
#include <specs/space.h>

#define FAMILY(name) (1u << SPEC_##name)

struct variant {
	const char *name;
	uint32_t op, families;
};

static const struct variant variants[] = {
	{"fwd", FMHA_FORWARD, FAMILY(FWD)},
	{"splitkv", FMHA_FORWARD, FAMILY(FWD_SPLITKV)},
	{"pagedkv", FMHA_FORWARD, FAMILY(FWD_PAGEDKV)},
	{"batch_prefill", FMHA_FORWARD, FAMILY(BATCH_PREFILL)},
	{"appendkv", FMHA_APPEND_KV, FAMILY(FWD_APPENDKV)},
	{"bwd", FMHA_BACKWARD, FAMILY(BWD_DQ_DK_DV)},
};

struct bench_sweep {
	struct spec_catalog *catalog;
	struct spec_sweep *sweep; /* NULL: the variant alone */
	const struct variant *variant;
};

static const struct variant *find_variant(const char *name)
{
	for (size_t i = 0; i < sizeof(variants) / sizeof(variants[0]); i++)
		if (strcmp(variants[i].name, name) == 0)
			return &variants[i];
	return NULL;
}

/* Pipelines of the dispatcher are none of this build's: a list of those alone would mean nothing at all. */
static int check_pipelines(const struct bench_sweep *sweep)
{
	const char *word;

	if (!spec_sweep_lists(sweep->sweep, SPEC_FIELD_pipeline))
		return 0;
	for (int i = 0; (word = spec_word(sweep->catalog, SPEC_FIELD_pipeline, i)); i++)
		if (spec_pipeline_flags(sweep->catalog, i) >= 0 &&
		    spec_sweep_allows(sweep->sweep, SPEC_FIELD_pipeline, i))
			return 0;
	return ctl_usage_error(
		"--config: its pipelines are AMD's, whose kernels this build does not "
		"have; name this build's (`fmhactl enumerate --arch ARCH`), or none");
}

static int sweep_load(struct bench_sweep *sweep, const struct bench_options *options)
{
	struct fmha_error err = {0};

	if (spec_catalog_load(NULL, fmha_backends, &sweep->catalog, &err) < 0)
		return ctl_error(&err);
	if (options->sweep &&
	    spec_sweep_load(sweep->catalog, options->sweep, &sweep->sweep, &err) < 0)
		return err.code == FMHA_EINVAL ? ctl_usage_error("%s", err.msg) : ctl_error(&err);
	sweep->variant = find_variant(options->variant ? options->variant
						       : spec_sweep_variant(sweep->sweep));
	if (!sweep->variant)
		return ctl_usage_error("bench: variant '%s': there is none",
				       options->variant ? options->variant
							: spec_sweep_variant(sweep->sweep));
	if (options->variant && sweep->sweep &&
	    strcmp(options->variant, spec_sweep_variant(sweep->sweep)) != 0)
		return ctl_usage_error("bench: --variant %s, and the sweep is of %s",
				       options->variant, spec_sweep_variant(sweep->sweep));
	return sweep->sweep ? check_pipelines(sweep) : 0;
}

int bench_sweep_new(const struct bench_options *options, struct bench_sweep **ret_sweep)
{
	struct bench_sweep *sweep;
	int r;

	*ret_sweep = NULL;
	if (!options->sweep && !options->variant)
		return 0;
	sweep = calloc(1, sizeof(*sweep));
	if (!sweep)
		return ctl_usage_error("out of memory");
	r = sweep_load(sweep, options);
	*ret_sweep = r == 0 ? sweep : bench_sweep_free(sweep);
	return r;
}

struct bench_sweep *bench_sweep_free(struct bench_sweep *sweep)
{
	if (!sweep)
		return NULL;
	spec_sweep_free(sweep->sweep);
	spec_catalog_free(sweep->catalog);
	free(sweep);
	return NULL;
}

/* A trait that kernels of the dispatcher have for such a shape: the sweep lets it through. */
static bool allows(const struct bench_sweep *sweep, enum spec_field field, const char *word)
{
	return spec_sweep_allows(sweep->sweep, field, spec_word_find(sweep->catalog, field, word));
}

static bool allows_type(const struct bench_sweep *sweep, const struct spec_shape *shape)
{
	const char *word = spec_shape_word("data_type", shape->data_type);

	/* Of fp8 a shape's O is bf16. */
	return allows(sweep, SPEC_FIELD_data_type, word) ||
	       (strcmp(word, "fp8") == 0 && allows(sweep, SPEC_FIELD_data_type, "fp8bf16"));
}

/* A band that is causal and no more is one mask there, whichever corner it hangs on. */
static bool allows_mask(const struct bench_sweep *sweep, const struct spec_shape *shape)
{
	if (shape->mask == FMHA_MASK_NONE)
		return allows(sweep, SPEC_FIELD_mask, "no");
	if (shape->window_left == -1 && shape->window_right == 0)
		return allows(sweep, SPEC_FIELD_mask, "top_left") ||
		       (shape->mask == FMHA_MASK_BOTTOM_RIGHT &&
			allows(sweep, SPEC_FIELD_mask, "bottom_right"));
	return allows(sweep, SPEC_FIELD_mask, "generic");
}

/* Does the variant's family run such a shape? */
static bool is_of_variant(const struct variant *variant, const struct spec_shape *shape)
{
	if ((uint32_t)shape->op != variant->op)
		return false;
	switch (variant->families) {
	case FAMILY(FWD):
		return shape->page_size == 0 && shape->seqlen_new == 0;
	case FAMILY(FWD_SPLITKV):
		return shape->n_splits != 1;
	case FAMILY(FWD_PAGEDKV):
		return shape->page_size > 0 && shape->mode == FMHA_BATCH;
	case FAMILY(BATCH_PREFILL):
		return shape->page_size > 0 && shape->mode == FMHA_GROUP;
	default:
		return true;
	}
}

bool bench_sweep_has_shape(const struct bench_sweep *sweep, const struct spec_shape *shape)
{
	if (!sweep)
		return true;
	if (!is_of_variant(sweep->variant, shape))
		return false;
	if (!sweep->sweep)
		return true;
	return allows_type(sweep, shape) && allows_mask(sweep, shape) &&
	       allows(sweep, SPEC_FIELD_mode, spec_shape_word("mode", shape->mode)) &&
	       allows(sweep, SPEC_FIELD_bias, spec_shape_word("bias", shape->bias)) &&
	       spec_sweep_allows(sweep->sweep, SPEC_FIELD_lse, shape->lse != 0) &&
	       spec_sweep_allows(sweep->sweep, SPEC_FIELD_dropout, shape->dropout_percent > 0) &&
	       spec_sweep_allows(sweep->sweep, SPEC_FIELD_logits, shape->soft_cap > 0) &&
	       spec_sweep_allows(sweep->sweep, SPEC_FIELD_sink,
				 shape->sink != 0 || shape->sink_tokens > 0) &&
	       spec_sweep_allows(sweep->sweep, SPEC_FIELD_paged_kv, shape->page_size > 0);
}

bool bench_sweep_has_kernel(const struct bench_sweep *sweep, const char *kernel)
{
	struct kernel_spec spec;

	if (!sweep)
		return true;
	if (spec_name_parse(sweep->catalog, kernel, &spec, NULL) != 0 ||
	    !(sweep->variant->families >> spec.signature.family & 1))
		return false;
	return !sweep->sweep ||
	       (spec_sweep_allows(sweep->sweep, SPEC_FIELD_pipeline, spec.pipeline) &&
		spec_sweep_allows(sweep->sweep, SPEC_FIELD_block_per_cu, spec.block_per_cu));
}
