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
#include "problem.h"

#define MANY UINT32_MAX

enum {
	OPTION_BATCH = 4000,
	OPTION_HEADS,
	OPTION_HEADS_Q,
	OPTION_HEADS_K,
	OPTION_SEQLEN,
	OPTION_SEQLEN_Q,
	OPTION_SEQLEN_K,
	OPTION_HDIM,
	OPTION_HDIM_V,
	OPTION_DTYPE,
	OPTION_GROUP,
	OPTION_LSE,
	OPTION_BIAS,
	OPTION_ALIBI,
	OPTION_SINK,
	OPTION_DBIAS,
	OPTION_DSINK,
	OPTION_NEW,
	OPTION_PARTS,
	OPTION_ARCH,
	OPTION_RULES,
	OPTION_UNITS,
	OPTION_CANDIDATES,
	OPTION_KERNEL,
};

static const struct cli_option own_options[] = {
	{"batch", OPTION_BATCH, "N", "sequences (default 1)"},
	{"heads", OPTION_HEADS, "N", "both of the next two"},
	{"heads-q", OPTION_HEADS_Q, "N", "query heads (default 8)"},
	{"heads-k", OPTION_HEADS_K, "N", "KV heads (default 8)"},
	{"seqlen", OPTION_SEQLEN, "N", "both of the next two"},
	{"seqlen-q", OPTION_SEQLEN_Q, "N", "rows of Q a sequence (default 1024)"},
	{"seqlen-k", OPTION_SEQLEN_K, "N", "keys a sequence (default 1024)"},
	{"hdim", OPTION_HDIM, "N", "head dim of Q, K and V (default 128)"},
	{"hdim-v", OPTION_HDIM_V, "N", "another one for V"},
	{"dtype", OPTION_DTYPE, "f32|f16|bf16|e4m3|e5m2", "default: bf16"},
	{"group", OPTION_GROUP, NULL, "packed sequences of these lengths (varlen)"},
	{"lse", OPTION_LSE, NULL, "there is such a tensor; the same for the next five"},
	{"bias", OPTION_BIAS, NULL, "a bias on the scores"},
	{"alibi", OPTION_ALIBI, NULL, "ALiBi's slopes"},
	{"sink", OPTION_SINK, NULL, "a sink logit a head"},
	{"dbias", OPTION_DBIAS, NULL, "backward: the bias's gradient"},
	{"dsink", OPTION_DSINK, NULL, "backward: the sinks' gradient"},
	{"new", OPTION_NEW, "N", "forward, append: N new keys are written to the cache first"},
	{"parts", OPTION_PARTS, "N", "merge: N partial results"},
	{"arch", OPTION_ARCH, "ARCH",
	 "explain for this arch, with no daemon (see `fmhactl archs`)"},
	{"rules", OPTION_RULES, "gpu|cpu|ck",
	 "with --arch: ck for AMD's kernels (default: those of this build)"},
	{"units", OPTION_UNITS, "N",
	 "with --arch: cores, CUs or SMs (default: typical of the arch)"},
	{"candidates", OPTION_CANDIDATES, "N",
	 "list at most N candidates of each selection (default 6)"},
	{"kernel", OPTION_KERNEL, "NAME", problem_kernel_help},
	CLI_END};

struct request {
	struct ctl_target target;
	struct fmha_problem problem;
	uint32_t dtype;
	bool present[FMHA_N_TENSORS]; /* what the options name */
	struct problem_kernels kernels;
	const char *arch, *rules;
	uint32_t units;
	int64_t n_candidates;
	bool json;
};

static int set_size(const char *name, const char *text, int32_t *a, int32_t *b)
{
	int64_t value = 0;
	int r = ctl_parse_int(name, text, 0, INT32_MAX, &value);

	if (r == 0) {
		*a = (int32_t)value;
		if (b)
			*b = (int32_t)value;
	}
	return r;
}

static int parse_sizes(struct fmha_problem *p, int option, const char *value)
{
	switch (option) {
	case OPTION_BATCH:
		return set_size("--batch", value, &p->batch, NULL);
	case OPTION_HEADS:
		return set_size("--heads", value, &p->nhead_q, &p->nhead_k);
	case OPTION_HEADS_Q:
		return set_size("--heads-q", value, &p->nhead_q, NULL);
	case OPTION_HEADS_K:
		return set_size("--heads-k", value, &p->nhead_k, NULL);
	case OPTION_SEQLEN:
		return set_size("--seqlen", value, &p->seqlen_q, &p->seqlen_k);
	case OPTION_SEQLEN_Q:
		return set_size("--seqlen-q", value, &p->seqlen_q, NULL);
	case OPTION_SEQLEN_K:
		return set_size("--seqlen-k", value, &p->seqlen_k, NULL);
	case OPTION_HDIM:
		return set_size("--hdim", value, &p->hdim_q, &p->hdim_v);
	case OPTION_HDIM_V:
		return set_size("--hdim-v", value, &p->hdim_v, NULL);
	case OPTION_NEW:
		return set_size("--new", value, &p->seqlen_new, NULL);
	default:
		return set_size("--parts", value, &p->n_parts, NULL);
	}
}

static int parse_option(struct request *request, int option, const char *value)
{
	int64_t number = 0;
	int r;

	if (problem_is_option(option))
		return problem_option(&request->problem, option, value);
	switch (option) {
	case OPTION_DTYPE:
		return problem_parse_dtype("--dtype", value, &request->dtype);
	case OPTION_GROUP:
		request->problem.mode = FMHA_GROUP;
		return 0;
	case OPTION_LSE:
		request->present[FMHA_T_LSE] = true;
		return 0;
	case OPTION_BIAS:
		request->present[FMHA_T_BIAS] = true;
		return 0;
	case OPTION_ALIBI:
		request->present[FMHA_T_ALIBI_SLOPES] = true;
		return 0;
	case OPTION_SINK:
		request->present[FMHA_T_SINK] = true;
		return 0;
	case OPTION_DBIAS:
		request->present[FMHA_T_BIAS] = request->present[FMHA_T_DBIAS] = true;
		return 0;
	case OPTION_DSINK:
		request->present[FMHA_T_SINK] = request->present[FMHA_T_DSINK] = true;
		return 0;
	case OPTION_ARCH:
		request->arch = value;
		return 0;
	case OPTION_RULES:
		request->rules = value;
		return 0;
	case OPTION_UNITS:
		r = ctl_parse_int("--units", value, 1, 100000, &number);
		request->units = (uint32_t)number;
		return r;
	case OPTION_CANDIDATES:
		return ctl_parse_int("--candidates", value, 0, 1000000, &request->n_candidates);
	case OPTION_KERNEL:
		return problem_add_kernel(&request->kernels, value);
	case CTL_OPT_JSON:
		request->json = true;
		return 0;
	default:
		if (option >= OPTION_BATCH && option <= OPTION_CANDIDATES)
			return parse_sizes(&request->problem, option, value);
		return ctl_target_option(&request->target, option, value);
	}
}

/* ---- the problem's tensors: only their presence, types and packed strides matter ---- */

static void want(struct request *request, uint32_t role)
{
	request->present[role] = true;
}

/* Sizes are judged later, by problem_check(): here they only must not overflow. */
static int32_t product(int32_t a, int32_t b)
{
	int64_t value = (int64_t)a * b;

	return value < INT32_MAX ? (int32_t)value : INT32_MAX;
}

static void choose_tensors(struct request *request)
{
	static const uint32_t attention[] = {FMHA_T_Q, FMHA_T_K, FMHA_T_V, FMHA_T_O};
	static const uint32_t gradients[] = {FMHA_T_LSE, FMHA_T_DO, FMHA_T_DQ, FMHA_T_DK,
					     FMHA_T_DV};
	struct fmha_problem *p = &request->problem;

	if (p->op == FMHA_MERGE_STATES) {
		want(request, FMHA_T_O_PARTS);
		want(request, FMHA_T_LSE_PARTS);
		want(request, FMHA_T_O);
		return;
	}
	for (int i = 0; i < 4; i++) {
		if (p->op != FMHA_APPEND_KV || i == 1 || i == 2)
			want(request, attention[i]);
	}
	for (int i = 0; i < 5 && p->op == FMHA_BACKWARD; i++)
		want(request, gradients[i]);
	if (p->seqlen_new > 0) {
		want(request, FMHA_T_K_NEW);
		want(request, FMHA_T_V_NEW);
		want(request, FMHA_T_SEQLEN_K);
	}
	if (p->rope != FMHA_ROPE_NONE) {
		want(request, FMHA_T_ROTARY_COS);
		want(request, FMHA_T_ROTARY_SIN);
		if (p->rotary_dim == 0)
			p->rotary_dim = p->hdim_q / 16 * 16;
		if (p->rotary_max_pos == 0)
			p->rotary_max_pos = p->seqlen_k;
	}
	if (p->page_size > 0) {
		want(request, FMHA_T_BLOCK_TABLE);
		want(request, FMHA_T_SEQLEN_K);
		p->max_blocks = p->seqlen_k / p->page_size + (p->seqlen_k % p->page_size != 0);
		p->n_pages = product(p->max_blocks, p->batch > 0 ? p->batch : 1);
	}
}

static void choose_groups(struct request *request)
{
	struct fmha_problem *p = &request->problem;

	if (p->mode != FMHA_GROUP)
		return;
	want(request, FMHA_T_SEQSTART_Q);
	p->total_q = product(p->batch, p->seqlen_q);
	if (p->page_size == 0) {
		want(request, FMHA_T_SEQSTART_K);
		p->total_k = product(p->batch, p->seqlen_k);
	}
}

static uint32_t type_of_role(const struct request *request, uint32_t role)
{
	bool fp8 = request->dtype == FMHA_E4M3 || request->dtype == FMHA_E5M2;

	switch (role) {
	case FMHA_T_LSE:
	case FMHA_T_ALIBI_SLOPES:
	case FMHA_T_SINK:
	case FMHA_T_DSINK:
	case FMHA_T_LSE_PARTS:
	case FMHA_T_ROTARY_COS:
	case FMHA_T_ROTARY_SIN:
		return FMHA_F32;
	case FMHA_T_SEQSTART_Q:
	case FMHA_T_SEQSTART_K:
	case FMHA_T_SEQLEN_K:
	case FMHA_T_BLOCK_TABLE:
		return FMHA_I32;
	case FMHA_T_O:
	case FMHA_T_BIAS:
	case FMHA_T_DBIAS:
		return fp8 ? FMHA_BF16 : request->dtype;
	default:
		return request->dtype;
	}
}

static void fill_problem(struct request *request)
{
	choose_tensors(request);
	choose_groups(request);
	for (uint32_t role = 0; role < FMHA_N_TENSORS; role++) {
		struct fmha_tensor *tensor = &request->problem.tensor[role];

		if (!request->present[role])
			continue;
		tensor->buffer = role + 1; /* each its own, so that none overlaps another */
		tensor->dtype = type_of_role(request, role);
	}
}

/* ---- printing ---- */

static const char *text_of(const cJSON *object, const char *key)
{
	const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, key);

	return cJSON_IsString(item) ? item->valuestring : "";
}

static double number_of(const cJSON *object, const char *key)
{
	const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, key);

	return cJSON_IsNumber(item) ? item->valuedouble : 0;
}

static void print_stages(const cJSON *plan)
{
	const cJSON *stage;
	int i = 1;

	cJSON_ArrayForEach(stage, cJSON_GetObjectItemCaseSensitive(plan, "stages"))
	{
		(void)printf("stage %d    %s\n", i++, text_of(stage, "kernel"));
		(void)printf("           %s on %s, workspace %.0f bytes at %.0f\n",
			     text_of(stage, "pipeline"), text_of(stage, "arch"),
			     number_of(stage, "workspace_bytes"),
			     number_of(stage, "workspace_offset"));
	}
	(void)printf("workspace  %.0f bytes", number_of(plan, "workspace_bytes"));
	if (number_of(plan, "workspace_head_bytes") > 0)
		(void)printf(", of which the host prepares %.0f",
			     number_of(plan, "workspace_head_bytes"));
	(void)printf("\nwork       %.6g GFLOP, at least %.6g MB of traffic\n",
		     number_of(plan, "flops") / 1e9, number_of(plan, "bytes") / 1e6);
	if (number_of(plan, "n_splits") > 0)
		(void)printf("splits     %.0f of %.0f keys\n", number_of(plan, "n_splits"),
			     number_of(plan, "split_size"));
}

static void print_selection(const cJSON *selection, int64_t n_candidates)
{
	const cJSON *candidate;
	int64_t n = 0;

	(void)printf("\n%s: %.0f candidates, %.0f rejected\n", text_of(selection, "family"),
		     number_of(selection, "n_candidates"), number_of(selection, "n_rejected"));
	if (text_of(selection, "chosen")[0])
		(void)printf("  chosen by %s: %s\n", text_of(selection, "decided_by"),
			     text_of(selection, "why"));
	else
		(void)printf("  nothing chosen: %s\n", text_of(selection, "why"));
	cJSON_ArrayForEach(candidate, cJSON_GetObjectItemCaseSensitive(selection, "candidates"))
	{
		const char *reason = text_of(candidate, "reason");

		if (n++ >= n_candidates)
			break;
		(void)printf("  %-11s %s\n", text_of(candidate, "verdict"),
			     text_of(candidate, "name"));
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
	plan = cJSON_GetObjectItemCaseSensitive(root, "plan");
	problem_describe(&request->problem, text, sizeof(text));
	(void)printf("problem    %s: %s\n", text_of(root, "op"), text);
	(void)printf("device     %s, %.0f units\n", text_of(root, "arch"),
		     number_of(root, "compute_units"));
	if (cJSON_IsObject(plan)) {
		print_stages(plan);
	} else {
		const cJSON *error = cJSON_GetObjectItemCaseSensitive(root, "error");

		(void)printf("no plan    %s\n", cJSON_IsString(error) ? error->valuestring
								      : text_of(error, "message"));
		r = CTL_FAILED;
	}
	cJSON_ArrayForEach(selection, cJSON_GetObjectItemCaseSensitive(root, "selections"))
		print_selection(selection, request->n_candidates);
	cJSON_Delete(root);
	return r;
}

/* ---- the command ---- */

static int explain_by_daemon(const struct request *request, char **ret_json)
{
	struct fmha_client *client;
	struct fmha_device *device;
	const struct fmha_plan_options options = problem_plan_options(&request->kernels);
	struct fmha_error err = {0};
	int r = ctl_open(&request->target, &client, &device);

	if (r != 0)
		return r;
	if (fmha_explain(device, &request->problem, &options, ret_json, &err) < 0)
		r = ctl_error(&err);
	device = fmha_device_free(device);
	client = fmha_client_free(client);
	return r;
}

static int explain(const struct request *request, char **ret_json)
{
	const struct plan_offline_options device = {.arch = request->arch,
						    .rules = request->rules,
						    .compute_units = request->units,
						    .kernels = request->kernels.names,
						    .n_kernels = request->kernels.n};
	struct fmha_error err = {0};

	if (!request->arch)
		return explain_by_daemon(request, ret_json);
	if (problem_check(&request->problem, &err) < 0 ||
	    plan_explain_offline(&device, &request->problem, ret_json, &err) < 0)
		return ctl_error(&err);
	return 0;
}

static int parse(struct request *request, int argc, char **argv)
{
	int option, r;

	while ((option = cli_next(&ctl_plan.usage, argc, argv)) != -1) {
		r = parse_option(request, option, optarg);
		if (r != 0)
			return r;
	}
	if (optind < argc)
		return ctl_usage_error("plan: what is '%s'?", argv[optind]);
	if (!request->arch && (request->rules || request->units))
		return ctl_usage_error("--rules and --units need --arch");
	return 0;
}

static int plan(int argc, char **argv)
{
	static const char *const operations[] = {"forward", "backward", "append", "merge"};
	struct request request = {.target = CTL_TARGET_INIT, .dtype = FMHA_BF16, .n_candidates = 6};
	struct fmha_problem *p = &request.problem;
	const char *verb = ctl_take_verb(&argc, &argv);
	char *json = NULL;
	int r;

	fmha_problem_init(p);
	p->batch = 1;
	p->nhead_q = p->nhead_k = 8;
	p->seqlen_q = p->seqlen_k = 1024;
	p->hdim_q = p->hdim_v = 128;
	if (verb[0]) {
		p->op = MANY;
		for (uint32_t i = 0; i < 4; i++) {
			if (!strcmp(verb, operations[i]))
				p->op = i;
		}
		if (p->op == MANY)
			return ctl_usage_error("plan: forward, backward, append or merge, not '%s'",
					       verb);
	}
	r = parse(&request, argc, argv);
	if (r != 0)
		return r;
	fill_problem(&request);
	r = explain(&request, &json);
	if (r != 0)
		return r;
	if (request.json)
		r = puts(json) < 0 ? CTL_IO : CTL_OK;
	else
		r = print_plan(&request, json);
	free(json);
	return r;
}

const struct ctl_command ctl_plan = {
	.usage = {.name = "fmhactl plan",
		  .brief = "which kernels a problem gets, and why",
		  .synopsis = "[forward|backward|append|merge] SHAPE [OPTION...]",
		  .text = "Explains a problem: the kernels that could serve it, why others cannot, "
			  "the "
			  "choice, the workspace. With --arch no daemon is asked.",
		  .operands = "forward|backward|append|merge",
		  .tables = {own_options, problem_options, ctl_json_option, ctl_target_options}},
	.run = plan,
};
