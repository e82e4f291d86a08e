/* SPDX-License-Identifier: MIT */
/* bench_list.c: which shapes, and which kernels for each. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <proto/error.h>
#include <specs/filter.h>

#include "bench.h"
#include "json.h"

/* Room for one more element of @bytes; NULL when out of memory. */
static void *list_grow(void *list, size_t n, size_t *capacity, size_t bytes)
{
	if (n < *capacity)
		return list;
	*capacity = *capacity ? 2 * *capacity : 64;
	return realloc(list, *capacity * bytes);
}

/* ---- shapes ---- */

struct collector {
	struct bench_shapes *shapes;
	const struct spec_filter *filter;
	const struct bench_sweep *sweep;
	int64_t most;
};

static int add_shape(void *owner, const struct spec_shape *shape)
{
	struct collector *c = owner;
	struct bench_shapes *shapes = c->shapes;
	struct bench_shape *list, *added;
	char text[RECIPE_TEXT_BYTES];
	struct fmha_error err;
	struct recipe recipe;

	if (c->filter && !spec_shape_filter_match(c->filter, shape))
		return 0;
	if (!bench_sweep_has_shape(c->sweep, shape))
		return 0;
	if (c->most > 0 && (int64_t)shapes->n >= c->most)
		return 0;
	list = list_grow(shapes->list, shapes->n, &shapes->capacity, sizeof(*list));
	if (!list)
		return FMHA_ENOMEM;
	shapes->list = list;
	added = &list[shapes->n];
	*added = (struct bench_shape){.shape = *shape, .group = strdup(shape->group)};
	added->shape.group = NULL;
	shapes->n++;
	if (bench_recipe(shapes, shapes->n - 1, &recipe, &err) < 0)
		return err.code;
	recipe_text(&recipe, text, sizeof(text));
	recipe_deinit(&recipe);
	added->text = strdup(text);
	return added->text && added->group ? 0 : FMHA_ENOMEM;
}

int bench_list_shapes(const struct bench_options *options, const struct bench_sweep *sweep,
		      const struct recipe *recipe, struct bench_shapes *ret_shapes)
{
	struct spec_filter *filter = NULL;
	char explain[SPEC_EXPLAIN_BYTES];
	struct collector c = {.shapes = ret_shapes, .sweep = sweep, .most = options->max_shapes};
	struct spec_shape shape;
	struct fmha_error err = {0};
	int r = 0;

	*ret_shapes = (struct bench_shapes){.recipe = options->tier ? NULL : recipe};
	if (options->shape_filter &&
	    spec_shape_filter_compile(options->shape_filter, &filter, explain, &err) < 0) {
		(void)fprintf(stderr, "fmhactl: --shapes: %s\n", explain);
		return CTL_USAGE;
	}
	c.filter = filter;
	if (options->tier) {
		r = spec_shapes_read(NULL, options->tier, add_shape, &c, &err);
	} else {
		recipe_shape(recipe, &shape);
		r = add_shape(&c, &shape);
	}
	spec_filter_free(filter);
	if (r < 0 && !err.msg[0])
		(void)fmha_error_set(&err, r, "the shapes: %s", fmha_error_sentence(r));
	return r < 0 ? ctl_error(&err) : 0;
}

void bench_shapes_deinit(struct bench_shapes *shapes)
{
	for (size_t i = 0; i < shapes->n; i++) {
		free(shapes->list[i].group);
		free(shapes->list[i].text);
	}
	free(shapes->list);
}

int bench_recipe(const struct bench_shapes *shapes, size_t i, struct recipe *ret_recipe,
		 struct fmha_error *err)
{
	int r;

	if (shapes->recipe)
		*ret_recipe = *shapes->recipe;
	else
		recipe_from_shape(ret_recipe, &shapes->list[i].shape);
	r = recipe_make(ret_recipe, err);
	if (r < 0)
		recipe_deinit(ret_recipe);
	return r;
}

/* ---- kernels ---- */

void bench_items_deinit(struct bench_items *items)
{
	for (size_t i = 0; i < items->n; i++)
		free(items->list[i].kernel);
	free(items->list);
}

static int add_item(struct bench_items *items, size_t shape, const char *kernel, bool chosen)
{
	struct bench_item *list = list_grow(items->list, items->n, &items->capacity, sizeof(*list));

	if (!list)
		return FMHA_ENOMEM;
	items->list = list;
	list[items->n] = (struct bench_item){shape, strdup(kernel), chosen};
	return list[items->n++].kernel ? 0 : FMHA_ENOMEM;
}

static bool passes(const struct bench_lister *lister, const char *kernel)
{
	struct kernel_spec spec;

	if (!bench_sweep_has_kernel(lister->sweep, kernel))
		return false;
	if (lister->n_filters == 0)
		return true;
	if (spec_name_parse(lister->catalog, kernel, &spec, NULL) != 0)
		return false;
	for (int i = 0; i < lister->n_filters; i++)
		if (!spec_filter_match(lister->filters[i], &spec))
			return false;
	return true;
}

/* The stage whose kernels are compared; those beside it follow from it. */
static bool is_main(const struct bench_lister *lister, uint32_t op, const char *word)
{
	static const uint32_t families[] = {
		[FMHA_FORWARD] = TRAITS_FORWARD,
		[FMHA_BACKWARD] = TRAITS_IN(BWD_DQ_DK_DV),
		[FMHA_APPEND_KV] = TRAITS_IN(FWD_APPENDKV),
		[FMHA_MERGE_STATES] = TRAITS_IN(FWD_SPLITKV_COMBINE),
	};
	int family = spec_word_find(lister->catalog, SPEC_FIELD_family, word);

	return family >= 0 && families[op] >> family & 1;
}

/* @first: this is the planner's own plan, whose choice is to be marked. */
static int add_selections(const struct bench_lister *lister, const cJSON *root, uint32_t op,
			  size_t shape, bool first, struct bench_items *items)
{
	const struct bench_options *options = lister->options;
	const cJSON *selection, *candidate;
	size_t before = items->n;
	int r = 0;

	cJSON_ArrayForEach(selection, ctl_member(root, "selections"))
	{
		const char *chosen = ctl_text(selection, "chosen");

		if (!chosen[0] || !is_main(lister, op, ctl_text(selection, "family")))
			continue;
		cJSON_ArrayForEach(candidate, ctl_member(selection, "candidates"))
		{
			const char *kernel = ctl_text(candidate, "name");
			bool is_chosen = first && !strcmp(kernel, chosen);

			if (!(options->all_kernels || is_chosen) ||
			    !strcmp(ctl_text(candidate, "verdict"), "rejected") ||
			    !passes(lister, kernel) ||
			    (options->max_kernels > 0 &&
			     (int64_t)(items->n - before) >= options->max_kernels))
				continue;
			r = add_item(items, shape, kernel, is_chosen);
			if (r < 0)
				return r;
		}
	}
	return 0;
}

/* The explanation, parsed; NULL: @err says why. */
static cJSON *explain(struct fmha_device *device, const struct fmha_problem *problem,
		      struct fmha_error *err)
{
	cJSON *root, *error;
	char *json;

	if (fmha_explain(device, problem, NULL, &json, err) < 0)
		return NULL;
	root = cJSON_Parse(json);
	free(json);
	error = ctl_member(root, "error");
	if (!root || error) {
		(void)fmha_error_set(err, FMHA_ENOKERNEL, "%s", ctl_text(error, "message"));
		cJSON_Delete(root);
		return NULL;
	}
	return root;
}

int bench_list_kernels(const struct bench_lister *lister, const struct bench_shapes *shapes,
		       size_t i, struct bench_items *items, struct fmha_error *err)
{
	bool split;
	struct recipe recipe;
	struct fmha_problem *p = &recipe.problem;
	cJSON *root;
	int r = bench_recipe(shapes, i, &recipe, err);

	if (r < 0)
		return r;
	recipe_pretend_buffers(p);
	root = explain(lister->device, p, err);
	r = root ? add_selections(lister, root, p->op, i, true, items) : err->code;
	split = cJSON_GetNumberValue(ctl_member(ctl_member(root, "plan"), "n_splits")) > 0;
	cJSON_Delete(root);
	/* Where splitting is left open, kernels that do not split compete. */
	if (r == 0 && split && p->n_splits == 0 && p->split_size == 0) {
		struct fmha_error ignored;

		p->n_splits = 1;
		root = explain(lister->device, p, &ignored);
		if (root)
			r = add_selections(lister, root, p->op, i, false, items);
		cJSON_Delete(root);
	}
	recipe_deinit(&recipe);
	return r;
}
