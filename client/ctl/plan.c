/* SPDX-License-Identifier: MIT */
/*
 * plan.c: which kernels a problem gets, and why. Asks the daemon, or with --arch explains for any
 * arch that specs/ knows, without a daemon and without such a device.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cjson/cJSON.h>
#include <dispatch/plan_offline.h>
#include <proto/problem.h>

#include "ctl.h"
#include "recipe.h"
#include "json.h"

struct request {
	struct ctl_target target;
	struct recipe recipe;
	struct cli_texts kernels;
	const char *arch, *rules;
	int64_t units, n_candidates;
	bool features;
};

static const struct cli_option own_options[] = {
	{"arch", 0, "ARCH", "explain for this arch, with no daemon (see `fmhactl archs`)",
	 CLI_TO(TEXT, struct request, arch)},
	{"rules", 0, "gpu|cpu|ck",
	 "with --arch: ck for AMD's kernels (default: those of this build)",
	 CLI_TO(TEXT, struct request, rules)},
	{"units", 0, "N", "with --arch: cores, CUs or SMs (default: typical of the arch)",
	 CLI_RANGE(INT, struct request, units, 1, 100000)},
	{"candidates", 0, "N", "list at most N candidates of each selection (default 6)",
	 CLI_RANGE(INT, struct request, n_candidates, 0, 1000000)},
	{"features", 0, NULL,
	 "with --arch and --json: what the model of times sees of each candidate",
	 CLI_TO(FLAG, struct request, features)},
	{"kernel", 0, "NAME", problem_kernel_help,
	 CLI_RANGE(TEXTS, struct request, kernels, 0, FMHA_MAX_STAGES)},
	CLI_END};

static int plan_take_option(void *owner, int option, const char *value)
{
	struct request *request = owner;

	if (problem_is_option(option))
		return problem_option(&request->recipe.problem, option, value);
	return recipe_option(&request->recipe, option, value);
}

/* The problem's tensors: only their presence, types and strides matter. */
static int make_problem(struct request *request)
{
	struct fmha_error err = {0};

	if (recipe_make(&request->recipe, &err) < 0)
		return ctl_error(&err);
	recipe_pretend_buffers(&request->recipe.problem);
	return 0;
}

/* ---- printing ---- */

static void print_stages(const cJSON *plan)
{
	const cJSON *stage;
	int i = 1;

	cJSON_ArrayForEach(stage, ctl_member(plan, "stages"))
	{
		(void)printf("stage %d    %s\n", i++, ctl_text(stage, "kernel"));
		(void)printf("           %s on %s, workspace %.0f bytes at %.0f\n",
			     ctl_text(stage, "pipeline"), ctl_text(stage, "arch"),
			     ctl_number(stage, "workspace_bytes"),
			     ctl_number(stage, "workspace_offset"));
		if (cJSON_IsTrue(ctl_member(stage, "general")))
			(void)printf("           a loop for every arch: where one that is made for "
				     "this one is missing, the candidates below say why\n");
	}
	if (cJSON_IsTrue(ctl_member(plan, "widens")))
		(void)printf("keys       widened into the workspace before attention\n");
	if (ctl_number(plan, "few_rows") > 0)
		(void)printf("rows       sequences of up to %.0f by themselves, over keys as they "
			     "are; of longer ones the keys of %.0f at most are widened\n",
			     ctl_number(plan, "few_rows"), ctl_number(plan, "wide_places"));
	(void)printf("workspace  %.0f bytes", ctl_number(plan, "workspace_bytes"));
	if (ctl_number(plan, "workspace_head_bytes") > 0)
		(void)printf(", of which the host prepares %.0f",
			     ctl_number(plan, "workspace_head_bytes"));
	if (ctl_number(plan, "run_workspace_bytes") > 0)
		(void)printf("; %.0f for these lengths", ctl_number(plan, "run_workspace_bytes"));
	(void)printf("\nwork       %.6g GFLOP, at least %.6g MB of traffic\n",
		     ctl_number(plan, "flops") / 1e9, ctl_number(plan, "bytes") / 1e6);
	if (ctl_number(plan, "n_splits") > 0)
		(void)printf("splits     %.0f of %.0f keys: %s\n", ctl_number(plan, "n_splits"),
			     ctl_number(plan, "split_size"), ctl_text(plan, "split_why"));
	else if (ctl_number(plan, "dq_split_keys") > 0)
		(void)printf("splits     %.0f of %.0f keys: %s\n", ctl_number(plan, "dq_splits"),
			     ctl_number(plan, "dq_split_keys"), ctl_text(plan, "split_why"));
	else if (ctl_number(plan, "kv_parts") > 0 && ctl_text(plan, "split_why")[0])
		(void)printf("parts      %.0f of the heads that share keys: %s\n",
			     ctl_number(plan, "kv_parts"), ctl_text(plan, "split_why"));
	else if (ctl_text(plan, "split_why")[0])
		(void)printf("splits     none: %s\n", ctl_text(plan, "split_why"));
}

static void print_time(const cJSON *candidate, const char *key, const char *what)
{
	if (ctl_number(candidate, key) > 0)
		(void)printf("  %s %.2f us", what, ctl_number(candidate, key));
}

/* What is known and guessed of a candidate's time, and which of it counts. */
static void print_times(const cJSON *candidate)
{
	if (!ctl_text(candidate, "time_from")[0])
		return;
	(void)printf("              by %s:", ctl_text(candidate, "time_from"));
	print_time(candidate, "tuned_us", "measured");
	print_time(candidate, "nearby_us", "measured nearby");
	print_time(candidate, "predicted_us", "predicted");
	(void)printf("  cost %.4g\n", ctl_number(candidate, "cost"));
}

static void print_selection(const cJSON *selection, int64_t n_candidates)
{
	const cJSON *candidate;
	int64_t n = 0;

	(void)printf("\n%s: %.0f candidates, %.0f rejected\n", ctl_text(selection, "family"),
		     ctl_number(selection, "n_candidates"), ctl_number(selection, "n_rejected"));
	if (ctl_text(selection, "chosen")[0])
		(void)printf("  chosen by %s: %s\n", ctl_text(selection, "decided_by"),
			     ctl_text(selection, "why"));
	else
		(void)printf("  nothing chosen: %s\n", ctl_text(selection, "why"));
	cJSON_ArrayForEach(candidate, ctl_member(selection, "candidates"))
	{
		const char *reason = ctl_text(candidate, "reason");

		if (n++ >= n_candidates)
			break;
		(void)printf("  %-11s %s\n", ctl_text(candidate, "verdict"),
			     ctl_text(candidate, "name"));
		print_times(candidate);
		if (reason[0])
			(void)printf("              %s\n", reason);
	}
}

static int print_plan(const struct request *request, const char *json)
{
	cJSON *root = cJSON_Parse(json);
	const cJSON *plan, *selection;
	char text[256];
	int r = CTL_OK;

	if (!root) {
		(void)fputs("fmhactl: the explanation is no JSON\n", stderr);
		return CTL_REFUSED;
	}
	plan = ctl_member(root, "plan");
	problem_describe(&request->recipe.problem, text, sizeof(text));
	(void)printf("problem    %s: %s\n", ctl_text(root, "op"), text);
	(void)printf("device     %s, %.0f units\n", ctl_text(root, "arch"),
		     ctl_number(root, "compute_units"));
	if (cJSON_IsObject(plan)) {
		print_stages(plan);
	} else {
		const cJSON *error = ctl_member(root, "error");

		(void)printf("no plan    %s\n", cJSON_IsString(error) ? error->valuestring
								      : ctl_text(error, "message"));
		r = CTL_FAILED;
	}
	cJSON_ArrayForEach(selection, ctl_member(root, "selections"))
		print_selection(selection, request->n_candidates);
	cJSON_Delete(root);
	return r;
}

/* ---- the command ---- */

static int explain_by_daemon(const struct request *request, char **ret_json)
{
	_cleanup_(ctl_client_freep) struct fmha_client *client = NULL;
	_cleanup_(ctl_device_freep) struct fmha_device *device = NULL;
	const struct fmha_plan_options options = problem_plan_options(&request->kernels);
	struct fmha_error err = {0};
	int r = ctl_open(&request->target, &client, &device);

	if (r == 0 && fmha_explain(device, &request->recipe.problem, &options, ret_json, &err) < 0)
		r = ctl_error(&err);
	return r;
}

static int explain(const struct request *request, char **ret_json)
{
	const struct plan_offline_options device = {.arch = request->arch,
						    .rules = request->rules,
						    .compute_units = (uint32_t)request->units,
						    .features = request->features,
						    .kernels = request->kernels.at,
						    .n_kernels = request->kernels.n,
						    .integers = request->recipe.indices};
	struct fmha_error err = {0};

	if (!request->arch)
		return explain_by_daemon(request, ret_json);
	if (problem_check(&request->recipe.problem, &err) < 0 ||
	    plan_explain_offline(&device, &request->recipe.problem, ret_json, &err) < 0)
		return ctl_error(&err);
	return 0;
}

static int plan_parse(struct request *request, int argc, char **argv)
{
	int r = ctl_options(&ctl_plan, argc, argv, &request->target, plan_take_option, request);

	if (r == 0 && !request->arch && (request->rules || request->units))
		return ctl_usage_error("--rules and --units need --arch");
	return r;
}

static int plan_answer(struct request *request)
{
	char *json = NULL;
	int r = make_problem(request);

	if (r == 0)
		r = explain(request, &json);
	if (r != 0)
		return r;
	if (request->target.json)
		r = puts(json) < 0 ? CTL_IO : CTL_OK;
	else
		r = print_plan(request, json);
	free(json);
	return r;
}

/* @then: with the request, when its words are right. */
static int with_request(int argc, char **argv, struct request *request,
			int (*then)(struct request *request))
{
	const char *verb = ctl_take_verb(&argc, &argv);
	uint32_t op = FMHA_FORWARD;
	int r;

	*request = (struct request){.target = CTL_TARGET_INIT, .n_candidates = 6};
	if (verb[0] && problem_parse_op(verb, &op) < 0)
		return ctl_usage_error("plan: forward, backward, append or merge, not '%s'", verb);
	recipe_init(&request->recipe, op);
	r = plan_parse(request, argc, argv);
	if (r == 0)
		r = then(request);
	recipe_deinit(&request->recipe);
	return r;
}

int plan_read_problem(int argc, char **argv, struct fmha_problem *ret_problem)
{
	struct request request;
	int r;

	optind = 0; /* begin anew */
	r = with_request(argc, argv, &request, make_problem);
	if (r == 0)
		*ret_problem = request.recipe.problem;
	return r;
}

static int plan(int argc, char **argv)
{
	struct request request;

	return with_request(argc, argv, &request, plan_answer);
}

const struct ctl_command ctl_plan = {
	.usage = {.name = "fmhactl plan",
		  .brief = "which kernels a problem gets, and why",
		  .synopsis = "[forward|backward|append|merge] SHAPE [OPTION...]",
		  .text = "Explains a problem: the kernels that could serve it, why others cannot, "
			  "the "
			  "choice, the workspace. With --arch no daemon is asked.",
		  .operands = "forward|backward|append|merge",
		  .tables = {own_options, recipe_options, problem_options, ctl_json_option,
			     ctl_target_options},
		  .long_only = true},
	.run = plan,
};
