/* SPDX-License-Identifier: MIT */
/* verify.c: random problems through the daemon, judged by the double-precision reference. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <proto/problem.h>

#include "judge.h"
#include "problem.h"
#include "verify_case.h"

static const struct cli_option own_options[] = {
	{"cases", 'n', "N", "how many (default 200)"},
	{"seed", 's', "S", "which ones (default 1)"},
	{"only", 'o', "N", "case N alone, with all details"},
	{"features", 'f', "LIST",
	 "what cases may have, separated by commas; a leading ! takes away from all: backward "
	 "append "
	 "merge mask window lse bias alibi sink softcap dropout scale group lengths paged split "
	 "strides rope f32 f16 bf16 fp8"},
	{"verbose", 'v', NULL, "a line for each case"},
	CLI_END};

struct totals {
	uint64_t ok, unsupported, failed;
	struct fmha_error refusal; /* the first of those not supported */
};

struct verify {
	struct ctl_target target;
	int64_t cases, only; /* only: -1: all */
	uint64_t seed;
	uint32_t features;
	bool verbose;
	struct totals totals;
	char kernel[FMHA_KERNEL_BYTES]; /* of the last case: its main stage */
};

static int parse_feature(const char *word, size_t n, uint32_t *ret_bit)
{
	for (int i = 0; i < VERIFY_N_FEATURES; i++) {
		if (strlen(verify_feature_names[i]) == n &&
		    !memcmp(verify_feature_names[i], word, n)) {
			*ret_bit = 1u << i;
			return 0;
		}
	}
	return ctl_usage_error("--features: no feature '%.*s'", (int)n, word);
}

static int parse_features(const char *text, uint32_t *ret_features)
{
	const uint32_t types = 1u << VERIFY_F32 | 1u << VERIFY_F16 | 1u << VERIFY_BF16 |
			       1u << VERIFY_FP8;
	uint32_t features = text[0] == '!' ? VERIFY_ALL : 0;

	while (*text) {
		bool away = *text == '!';
		size_t n;
		uint32_t bit = 0;
		int r;

		text += away;
		n = strcspn(text, ",");
		r = parse_feature(text, n, &bit);
		if (r != 0)
			return r;
		features = away ? features & ~bit : features | bit;
		text += n;
		text += *text == ',';
	}
	if ((features & types) == 0)
		features |= 1u << VERIFY_F32 | 1u << VERIFY_F16 | 1u << VERIFY_BF16;
	*ret_features = features;
	return 0;
}

static int parse(struct verify *v, int argc, char **argv)
{
	int64_t seed = 1;
	int option, r = 0;

	while ((option = cli_next(&ctl_verify.usage, argc, argv)) != -1 && r == 0) {
		switch (option) {
		case 'n':
			r = ctl_parse_int("--cases", optarg, 1, INT64_MAX, &v->cases);
			break;
		case 's':
			r = ctl_parse_int("--seed", optarg, 0, INT64_MAX, &seed);
			break;
		case 'o':
			r = ctl_parse_int("--only", optarg, 0, INT64_MAX, &v->only);
			break;
		case 'f':
			r = parse_features(optarg, &v->features);
			break;
		case 'v':
			v->verbose = true;
			break;
		default:
			r = ctl_target_option(&v->target, option, optarg);
		}
	}
	if (r == 0 && optind < argc)
		return ctl_usage_error("verify: what is '%s'?", argv[optind]);
	v->seed = (uint64_t)seed;
	return r;
}

/* ---- one case ---- */

static int run_problem(struct verify *v, struct fmha_device *device,
		       const struct fmha_problem *problem, struct fmha_error *err)
{
	struct fmha_plan_info info;
	struct fmha_plan *plan;
	int r = fmha_plan_new(device, problem, NULL, &plan, err);

	if (r < 0)
		return r;
	r = fmha_plan_info(plan, &info, err);
	if (r == 0)
		(void)snprintf(
			v->kernel, sizeof(v->kernel), "%s",
			info.stages[info.n_stages > 1 && problem->op == FMHA_BACKWARD].kernel);
	if (r == 0)
		r = fmha_plan_run(plan, NULL, NULL, err);
	plan = fmha_plan_free(plan);
	return r;
}

static int execute(struct verify *v, struct fmha_device *device, struct verify_case *c,
		   struct judge_verdict verdicts[JUDGE_MAX_OUTPUTS], int *ret_n,
		   struct fmha_error *err)
{
	struct fmha_problem placed = c->problem, pointed;
	struct judge *judge = NULL;
	struct tensors tensors;
	int r = tensors_new(device, &placed, &tensors, err);

	if (r < 0)
		return r;
	verify_case_fill(c, &tensors);
	tensors_point(&tensors, &placed, &pointed);
	if (placed.op == FMHA_BACKWARD)
		r = problem_run_forward(device, &placed, err);
	if (r == 0)
		r = judge_new(&pointed, &judge, err);
	if (r == 0)
		r = run_problem(v, device, &placed, err);
	if (r == 0)
		*ret_n = judge_compare(judge, &pointed, verdicts);
	judge = judge_free(judge);
	tensors_deinit(&tensors);
	return r;
}

static void print_case(const struct verify_case *c, int64_t number, const char *outcome)
{
	char text[256], words[256];

	problem_describe(&c->problem, text, sizeof(text));
	verify_case_words(c, words, sizeof(words));
	(void)printf("case %" PRId64 ": %s\n  %s\n  with %s\n", number, outcome, text, words);
}

static void print_verdicts(const struct verify *v, const struct judge_verdict *verdicts, int n)
{
	(void)printf("  kernel %s\n", v->kernel);
	for (int i = 0; i < n; i++) {
		(void)printf("  %-10s max error %.3g, allowed %.3g: %s",
			     proto_roles[verdicts[i].role].name, verdicts[i].max_error,
			     verdicts[i].bar, verdicts[i].ok ? "ok" : "WRONG");
		if (!verdicts[i].ok)
			(void)printf(" (element %" PRId64 " is %g, expected %g)", verdicts[i].at,
				     verdicts[i].got, verdicts[i].expected);
		(void)putchar('\n');
	}
}

/* Return: 0 to go on, or an exit code when the daemon is gone. */
static int verify_one(struct verify *v, struct fmha_device *device, int64_t number,
		      struct ctl_progress *progress)
{
	struct judge_verdict verdicts[JUDGE_MAX_OUTPUTS];
	struct fmha_error err = {0};
	struct verify_case c;
	bool ok = true, details = v->only >= 0;
	int n = 0, r;

	if (verify_case_init(&c, v->seed, (uint64_t)number, v->features) < 0) {
		verify_case_deinit(&c);
		return ctl_usage_error("out of memory");
	}
	r = execute(v, device, &c, verdicts, &n, &err);
	for (int i = 0; i < n; i++)
		ok = ok && verdicts[i].ok;
	if (v->verbose || details || !ok || r < 0)
		ctl_progress_end(progress);
	if (r == FMHA_ENOTSUP || r == FMHA_ENOKERNEL) {
		if (v->totals.unsupported++ == 0)
			v->totals.refusal = err;
		if (v->verbose || details) {
			print_case(&c, number, "not supported");
			(void)printf("  %s\n", err.msg);
		}
		r = 0;
	} else if (r < 0) {
		v->totals.failed++;
		print_case(&c, number, fmha_error_name(r));
		(void)printf("  %s\n", err.msg);
		r = r == FMHA_ECONN ? CTL_UNREACHABLE : 0;
	} else {
		v->totals.ok += ok;
		v->totals.failed += !ok;
		if (!ok || v->verbose || details) {
			print_case(&c, number, ok ? "ok" : "FAILED");
			print_verdicts(v, verdicts, n);
		}
	}
	verify_case_deinit(&c);
	return r;
}

static int verify_all(struct verify *v, struct fmha_device *device)
{
	struct ctl_progress progress = {.title = "cases"};
	int64_t first = v->only >= 0 ? v->only : 0;
	int64_t end = v->only >= 0 ? v->only + 1 : v->cases;
	int r = 0;

	for (int64_t i = first; i < end && r == 0; i++) {
		ctl_progress(&progress, (uint64_t)(i - first), (uint64_t)(end - first));
		r = verify_one(v, device, i, &progress);
	}
	ctl_progress_end(&progress);
	(void)printf("seed %" PRIu64 ": %" PRIu64 " ok, %" PRIu64 " not supported, %" PRIu64
		     " failed\n",
		     v->seed, v->totals.ok, v->totals.unsupported, v->totals.failed);
	if (r != 0)
		return r;
	if (v->totals.ok + v->totals.failed == 0 && v->totals.unsupported > 0) {
		(void)fprintf(stderr, "fmhactl: nothing was verified; the first answer: %s\n",
			      v->totals.refusal.msg);
		return CTL_FAILED;
	}
	return v->totals.failed > 0 ? CTL_FAILED : CTL_OK;
}

static int verify(int argc, char **argv)
{
	struct verify v = {
		.target = CTL_TARGET_INIT, .cases = 200, .only = -1, .features = VERIFY_ALL};
	struct fmha_client *client;
	struct fmha_device *device;
	int r = parse(&v, argc, argv);

	if (r != 0)
		return r;
	r = ctl_open(&v.target, &client, &device);
	if (r != 0)
		return r;
	r = verify_all(&v, device);
	device = fmha_device_free(device);
	client = fmha_client_free(client);
	return r;
}

const struct ctl_command ctl_verify = {
	.usage = {.name = "fmhactl verify",
		  .brief = "random problems against the double-precision reference",
		  .synopsis = "[--cases N] [--seed S] [--features LIST] [OPTION...]",
		  .text = "Makes random attention problems, computes them on a device and compares "
			  "every element with a reference in double precision. A case depends on "
			  "the "
			  "seed, its number and the features alone, so a failed one is repeated "
			  "with "
			  "--only. What the device does not support is counted, and is no failure "
			  "unless nothing else was left.",
		  .tables = {own_options, ctl_target_options}},
	.run = verify,
};
