/* SPDX-License-Identifier: MIT */
/*
 * tune.c: has a device measure its kernels: for one problem, for a tier of the shape matrix, or for
 * what the machine has been asked for.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cjson/cJSON.h>
#include <specs/shapes.h>

#include "ctl.h"
#include "recipe.h"
#include "json.h"

struct request {
	struct ctl_target target;
	struct recipe recipe;
	bool shaped; /* options of the recipe were given */
	bool census, again, thorough;
	const char *tier;
	double budget_s; /* 0: none */
};

static const struct cli_option own_options[] = {
	{"census", 0, NULL, "what the device has been asked for, what took most time first",
	 CLI_TO(FLAG, struct request, census)},
	{"tier", 0, "smoke|full|nightly", "the shapes of a tier",
	 CLI_TO(TEXT, struct request, tier)},
	{"budget", 0, "SECS", "of device time, for all together (default: none)",
	 CLI_RANGE(REAL, struct request, budget_s, 0.001, 1e6)},
	{"again", 0, NULL, "also what was measured before", CLI_TO(FLAG, struct request, again)},
	{"thorough", 0, NULL, "also what is estimated to be far too slow",
	 CLI_TO(FLAG, struct request, thorough)},
	CLI_END};

struct tuning {
	struct fmha_device *device;
	const struct request *request;
	struct ctl_progress progress;
	int64_t started_ns;
	uint64_t n_done, n_total;
	uint64_t n_measured, n_refused;
	cJSON *list; /* of results, for --json */
};

/* ---- one problem ---- */

static void print_result(struct tuning *tuning, const struct fmha_tune_result *result)
{
	if (tuning->list) {
		cJSON *item = ctl_add_item(tuning->list);

		cJSON_AddStringToObject(item, "shape", result->shape);
		cJSON_AddStringToObject(item, "kernel", result->kernel);
		cJSON_AddNumberToObject(item, "n_splits", result->n_splits);
		cJSON_AddNumberToObject(item, "us", result->us);
		cJSON_AddNumberToObject(item, "n_candidates", result->n_candidates);
		cJSON_AddNumberToObject(item, "n_measured", result->n_measured);
		cJSON_AddNumberToObject(item, "n_failed", result->n_failed);
		return;
	}
	ctl_progress_end(&tuning->progress);
	(void)printf("%s\n", result->shape);
	if (result->kernel[0])
		(void)printf("  %.2f us  %s%s", result->us, result->kernel,
			     result->n_splits > 1 ? "" : "\n");
	if (result->kernel[0] && result->n_splits > 1)
		(void)printf(", %d splits\n", result->n_splits);
	(void)printf("  %u of %u measured%s\n", result->n_measured, result->n_candidates,
		     result->n_measured ? "" : ", the others were before");
}

static bool is_spent(const struct tuning *tuning)
{
	return tuning->request->budget_s > 0 &&
	       (double)(ctl_now_ns() - tuning->started_ns) > tuning->request->budget_s * 1e9;
}

/* @problem: NULL: @shape of the census. Return: 0 or an exit code that ends it all. */
static int tune_one(struct tuning *tuning, const struct fmha_problem *problem, const char *shape)
{
	struct fmha_tune_options options = {.struct_size = sizeof(options),
					    .again = tuning->request->again,
					    .thorough = tuning->request->thorough,
					    .shape = shape};
	struct fmha_tune_result result;
	struct fmha_error err = {0};
	int r;

	if (tuning->request->budget_s > 0) {
		double left = tuning->request->budget_s -
			      (double)(ctl_now_ns() - tuning->started_ns) / 1e9;

		options.budget_ms = left > 0.001 ? (uint32_t)(left * 1000) : 1;
	}
	r = fmha_tune(tuning->device, problem, &options, &result, &err);
	ctl_progress(&tuning->progress, ++tuning->n_done, tuning->n_total);
	if (r == 0) {
		tuning->n_measured += result.n_measured;
		print_result(tuning, &result);
		return 0;
	}
	/* Of many, some are not for this device. */
	if (tuning->n_total > 1 && (r == FMHA_ENOTSUP || r == FMHA_ENOKERNEL || r == FMHA_EQUOTA ||
				    r == FMHA_EINVAL || r == FMHA_ENOENT)) {
		tuning->n_refused++;
		return 0;
	}
	ctl_progress_end(&tuning->progress);
	return ctl_error(&err);
}

static int tune_recipe(struct tuning *tuning, struct recipe *recipe)
{
	struct fmha_error err = {0};

	if (recipe_make(recipe, &err) < 0)
		return ctl_error(&err);
	recipe_pretend_buffers(&recipe->problem);
	return tune_one(tuning, &recipe->problem, NULL);
}

/* ---- many ---- */

static int tune_census(struct tuning *tuning)
{
	struct fmha_error err = {0};
	const cJSON *item;
	cJSON *root;
	char *json;
	int r = 0;

	if (fmha_census(tuning->device, &json, &err) < 0)
		return ctl_error(&err);
	root = cJSON_Parse(json);
	free(json);
	tuning->n_total = (uint64_t)cJSON_GetArraySize(ctl_member(root, "shapes"));
	cJSON_ArrayForEach(item, ctl_member(root, "shapes"))
	{
		if (r != 0 || is_spent(tuning))
			break;
		r = tune_one(tuning, NULL, ctl_text(item, "shape"));
	}
	if (tuning->n_total == 0 && !tuning->list)
		(void)puts("nobody has run anything on this device since its worker started");
	cJSON_Delete(root);
	return r;
}

static int count_shape(void *owner, const struct spec_shape *shape)
{
	(void)shape;
	((struct tuning *)owner)->n_total++;
	return 0;
}

static int tune_shape(void *owner, const struct spec_shape *shape)
{
	struct tuning *tuning = owner;
	struct recipe *recipe = calloc(1, sizeof(*recipe));
	int r;

	if (!recipe)
		return CTL_FAILED;
	if (is_spent(tuning)) {
		free(recipe);
		return -1; /* positive codes are errors: this is the end */
	}
	recipe_init(recipe, (uint32_t)shape->op);
	recipe_from_shape(recipe, shape);
	r = tune_recipe(tuning, recipe);
	recipe_deinit(recipe);
	free(recipe);
	return r;
}

static int tune_tier(struct tuning *tuning)
{
	struct fmha_error err = {0};
	int r = spec_shapes_read(NULL, tuning->request->tier, count_shape, tuning, &err);

	if (r == 0)
		r = spec_shapes_read(NULL, tuning->request->tier, tune_shape, tuning, &err);
	if (r < -1)
		return ctl_error(&err);
	return r == -1 ? 0 : r;
}

/* ---- the command ---- */

static int tune_take_option(void *owner, int option, const char *value)
{
	struct request *request = owner;

	request->shaped = true;
	if (problem_is_option(option))
		return problem_option(&request->recipe.problem, option, value);
	return recipe_option(&request->recipe, option, value);
}

static int tune_parse(struct request *request, int argc, char **argv)
{
	int r = ctl_options(&ctl_tune, argc, argv, &request->target, tune_take_option, request);

	if (r == 0 && request->census + (request->tier != NULL) + request->shaped != 1)
		return ctl_usage_error("tune: a shape, --tier or --census, and one of them");
	return r;
}

static void print_end(const struct tuning *tuning)
{
	char *text;

	if (tuning->list) {
		text = cJSON_Print(tuning->list);
		(void)puts(text ? text : "[]");
		cJSON_free(text);
		return;
	}
	if (tuning->n_total > 1)
		(void)printf("%llu of %llu problems, %llu of them not for this device; %llu times "
			     "measured\n",
			     (unsigned long long)tuning->n_done,
			     (unsigned long long)tuning->n_total,
			     (unsigned long long)tuning->n_refused,
			     (unsigned long long)tuning->n_measured);
}

/*
 * Whoever measured for an hour wants to know that a restart forgets it. The daemon writes a moment after
 * it has measured: what is told is what it knew before, or knows by now.
 */
static void warn_unless_kept(struct fmha_client *client)
{
	struct fmha_error err;
	const cJSON *device, *tuned;
	cJSON *status;
	char *json;

	if (fmha_client_status(client, &json, &err) < 0)
		return;
	status = cJSON_Parse(json);
	cJSON_ArrayForEach(device, ctl_member(status, "devices"))
	{
		tuned = ctl_member(device, "tuned");
		if (*ctl_text(tuned, "reason"))
			(void)fprintf(
				stderr,
				"fmhactl tune: a restart of the daemon forgets this (%s): %s\n",
				ctl_text(tuned, "state"), ctl_text(tuned, "reason"));
	}
	cJSON_Delete(status);
	free(json);
}

static int tune_all(struct request *request)
{
	struct tuning tuning = {
		.request = request, .progress = {.title = "tuning"}, .started_ns = ctl_now_ns()};
	_cleanup_(ctl_client_freep) struct fmha_client *client = NULL;
	_cleanup_(ctl_device_freep) struct fmha_device *device = NULL;
	int r = ctl_open(&request->target, &client, &device);

	if (r != 0)
		return r;
	tuning.device = device;
	if (request->target.json)
		tuning.list = cJSON_CreateArray();
	if (request->census) {
		r = tune_census(&tuning);
	} else if (request->tier) {
		r = tune_tier(&tuning);
	} else {
		tuning.n_total = 1;
		r = tune_recipe(&tuning, &request->recipe);
	}
	ctl_progress_end(&tuning.progress);
	if (r == 0) {
		print_end(&tuning);
		warn_unless_kept(client);
	}
	cJSON_Delete(tuning.list);
	return r;
}

static int tune(int argc, char **argv)
{
	struct request request = {.target = CTL_TARGET_INIT};
	const char *verb = ctl_take_verb(&argc, &argv);
	uint32_t op = FMHA_FORWARD;
	int r;

	if (verb[0] && problem_parse_op(verb, &op) < 0)
		return ctl_usage_error("tune: forward, backward, append or merge, not '%s'", verb);
	recipe_init(&request.recipe, op);
	request.shaped = verb[0];
	r = tune_parse(&request, argc, argv);
	if (r == 0)
		r = tune_all(&request);
	recipe_deinit(&request.recipe);
	return r;
}

const struct ctl_command ctl_tune = {
	.usage =
		{.name = "fmhactl tune",
		 .brief = "measure kernels, and remember which are fastest",
		 .synopsis = "[forward|backward|append|merge] SHAPE [OPTION...]\n"
			     "--tier smoke|full|nightly [OPTION...]\n"
			     "--census [OPTION...]",
		 .text = "The device measures what can run a problem, kernels and numbers of "
			 "splits, on memory of its own and only while no client's run is pending. "
			 "The daemon remembers the times for all devices of this model; plans take "
			 "what was fastest, those that were made before at their next run if it "
			 "fits what they were told. For administrators.\n\n"
			 "--census takes the shapes that the device has been asked for. The daemon "
			 "does the same by itself when a device has been idle for a while (key "
			 "tuning.automatic).",
		 .operands = "forward|backward|append|merge",
		 .tables = {own_options, recipe_options, problem_options, ctl_json_option,
			    ctl_target_options},
		 .long_only = true},
	.run = tune,
};
