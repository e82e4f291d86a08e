/* SPDX-License-Identifier: MIT */
#include "problem.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const struct cli_option problem_options[] = {
	{"causal", PROBLEM_CAUSAL, NULL, "the same as --mask bottom_right --window -1,0"},
	{"mask", PROBLEM_MASK, "none|top_left|bottom_right|MASK",
	 "the corner that the band is tied to; MASK as CK says it: 1 2 "
	 "t:L,R b:L,R xt:W xb:W g:Y,X"},
	{"window", PROBLEM_WINDOW, "L,R",
	 "columns visible left and right of the diagonal, -1: all"},
	{"sink-tokens", PROBLEM_SINK_TOKENS, "N", "leading keys visible left of any window"},
	{"scale", PROBLEM_SCALE, "S", "factor on Q K^T (default 1/sqrt(hdim_q))"},
	{"scale_s", PROBLEM_SCALE_S, "S", "the same, 0 being the default"},
	{"softcap", PROBLEM_SOFTCAP, "C", "C * tanh(S / C)"},
	{"logits_soft_cap", PROBLEM_SOFTCAP, "C", "the same"},
	{"dropout", PROBLEM_DROPOUT, "P", "probability of dropping"},
	{"p_drop", PROBLEM_DROPOUT, "P", "the same"},
	{"seed", PROBLEM_SEED, "N", "of the dropout"},
	{"drop_seed", PROBLEM_SEED, "N", "the same"},
	{"offset", PROBLEM_OFFSET, "N", "of the dropout: where its random numbers begin"},
	{"drop_offset", PROBLEM_OFFSET, "N", "the same"},
	{"deterministic", PROBLEM_DETERMINISTIC, NULL, "backward: the same bits on every run"},
	{"splits", PROBLEM_SPLITS, "N", "split-KV into exactly N parts (1: never)"},
	{"num_splits", PROBLEM_SPLITS, "N", "the same"},
	{"split-size", PROBLEM_SPLIT_SIZE, "KEYS", "split-KV into parts of so many keys"},
	{"page-size", PROBLEM_PAGE_SIZE, "N", "the cache is paged"},
	{"page_block_size", PROBLEM_PAGE_SIZE, "N", "the same"},
	{"kv-layout", PROBLEM_KV_LAYOUT, "linear|vectorized", "of a page (default: linear)"},
	{"rope", PROBLEM_ROPE, "none|interleaved|half", "rotary embedding of what is appended"},
	CLI_END};

static int parse_int32(const char *option, const char *text, int32_t min, int32_t *ret)
{
	int64_t value = 0;
	int r = ctl_parse_int(option, text, min, INT32_MAX, &value);

	if (r == 0)
		*ret = (int32_t)value;
	return r;
}

static int parse_float(const char *option, const char *text, float *ret)
{
	double value = 0;
	int r = ctl_parse_double(option, text, &value);

	if (r == 0)
		*ret = (float)value;
	return r;
}

static int parse_u64(const char *option, const char *text, uint64_t *ret)
{
	char *end;

	*ret = strtoull(text, &end, 0);
	if (end == text || *end || text[0] == '-')
		return ctl_usage_error("%s '%s': not a whole number", option, text);
	return 0;
}

static int parse_window(const char *text, struct fmha_problem *problem)
{
	char left[32];
	const char *comma = strchr(text, ',');
	int r;

	if (!comma || (size_t)(comma - text) >= sizeof(left))
		return ctl_usage_error("--window '%s': two numbers, as in 128,0", text);
	memcpy(left, text, (size_t)(comma - text));
	left[comma - text] = '\0';
	r = parse_int32("--window", left, -1, &problem->window_left);
	if (r == 0)
		r = parse_int32("--window", comma + 1, -1, &problem->window_right);
	if (r == 0 && problem->mask == FMHA_MASK_NONE)
		problem->mask = FMHA_MASK_BOTTOM_RIGHT;
	return r;
}

/*
 * CK's ways to say a mask: 0 (none), 1 or t, 2 or b (causal at either corner), t:L,R and b:L,R (a
 * window, with a third number of sink tokens), xt:W and xb:W (W columns, half of them on each side;
 * not positive: causal), g:Y,X (from the top left corner, Y - 1 columns left and X - 1 right).
 * Return: 0, 1 (none of them), or CTL_USAGE.
 */
static int parse_ck_mask(const char *text, struct fmha_problem *p)
{
	const char *corner = text[0] == 'x' ? text + 1 : text;
	int left = -1, right = 0, sinks = 0, end = 0;

	if (!strcmp(text, "0") || !strcmp(text, "n")) {
		p->mask = FMHA_MASK_NONE;
		return 0;
	}
	if (!strchr("12tbg", corner[0]) || (corner[1] && corner[1] != ':'))
		return 1;
	p->mask = corner[0] == '2' || corner[0] == 'b' ? FMHA_MASK_BOTTOM_RIGHT
						       : FMHA_MASK_TOP_LEFT;
	if (corner[1] == ':' && text[0] == 'x') {
		if (sscanf(corner + 2, "%d%n", &left, &end) != 1 || corner[2 + end])
			return ctl_usage_error("--mask '%s': a width, as in xt:128", text);
		right = left > 0 ? left - 1 - left / 2 : 0;
		left = left > 0 ? left / 2 : -1;
	} else if (corner[1] == ':') {
		if (sscanf(corner + 2, "%d,%d%n,%d%n", &left, &right, &end, &sinks, &end) < 2 ||
		    corner[2 + end])
			return ctl_usage_error("--mask '%s': two numbers, as in b:128,0", text);
		left -= corner[0] == 'g';
		right -= corner[0] == 'g';
	} else if (text[0] == 'x' || text[0] == 'g') {
		return 1;
	}
	p->window_left = left < 0 ? -1 : left;
	p->window_right = right < 0 ? -1 : right;
	p->sink_tokens = sinks;
	return 0;
}

bool problem_is_option(int option)
{
	return option >= PROBLEM_CAUSAL && option < PROBLEM_LAST;
}

int problem_option(struct fmha_problem *p, int option, const char *value)
{
	static const struct ctl_word masks[] = {{"none", FMHA_MASK_NONE},
						{"top_left", FMHA_MASK_TOP_LEFT},
						{"bottom_right", FMHA_MASK_BOTTOM_RIGHT},
						{NULL, 0}};
	static const struct ctl_word layouts[] = {
		{"linear", FMHA_KV_LINEAR}, {"vectorized", FMHA_KV_VECTORIZED}, {NULL, 0}};
	static const struct ctl_word ropes[] = {{"none", FMHA_ROPE_NONE},
						{"interleaved", FMHA_ROPE_INTERLEAVED},
						{"half", FMHA_ROPE_HALF_ROTATED},
						{NULL, 0}};
	int r;

	switch ((enum problem_option)option) {
	case PROBLEM_CAUSAL:
		if (p->mask == FMHA_MASK_NONE)
			p->mask = FMHA_MASK_BOTTOM_RIGHT;
		p->window_right = 0;
		return 0;
	case PROBLEM_MASK:
		r = parse_ck_mask(value, p);
		if (r == 1)
			r = ctl_parse_word("--mask", value, masks, &p->mask);
		if (r == 0 && p->mask == FMHA_MASK_NONE &&
		    (p->window_left != -1 || p->window_right != -1))
			return ctl_usage_error("--mask %s, but --causal or --window says one",
					       value);
		return r;
	case PROBLEM_WINDOW:
		return parse_window(value, p);
	case PROBLEM_SINK_TOKENS:
		return parse_int32("--sink-tokens", value, 0, &p->sink_tokens);
	case PROBLEM_SCALE:
		return parse_float("--scale", value, &p->scale);
	case PROBLEM_SCALE_S: /* CK's examples mean the default by 0, which is a scale */
		r = parse_float("-scale_s", value, &p->scale);
		if (r == 0 && p->scale == 0)
			p->scale = NAN;
		return r;
	case PROBLEM_SOFTCAP:
		return parse_float("--softcap", value, &p->logits_soft_cap);
	case PROBLEM_DROPOUT:
		return parse_float("--dropout", value, &p->dropout_p);
	case PROBLEM_SEED:
		return parse_u64("--seed", value, &p->dropout_seed);
	case PROBLEM_OFFSET:
		return parse_u64("--offset", value, &p->dropout_offset);
	case PROBLEM_DETERMINISTIC:
		p->deterministic = 1;
		return 0;
	case PROBLEM_SPLITS:
		return parse_int32("--splits", value, 0, &p->n_splits);
	case PROBLEM_SPLIT_SIZE:
		return parse_int32("--split-size", value, 0, &p->split_size);
	case PROBLEM_PAGE_SIZE:
		return parse_int32("--page-size", value, 1, &p->page_size);
	case PROBLEM_KV_LAYOUT:
		return ctl_parse_word("--kv-layout", value, layouts, &p->kv_layout);
	case PROBLEM_ROPE:
		return ctl_parse_word("--rope", value, ropes, &p->rope);
	case PROBLEM_LAST:
		break;
	}
	return CTL_USAGE;
}

const char *const problem_op_words[4] = {"forward", "backward", "append", "merge"};

int problem_parse_op(const char *word, uint32_t *ret_op)
{
	for (uint32_t op = 0; op < 4; op++) {
		if (!strcmp(word, problem_op_words[op])) {
			*ret_op = op;
			return 0;
		}
	}
	return -1;
}

int problem_run_forward(struct fmha_device *device, const struct fmha_problem *backward,
			struct fmha_error *err)
{
	static const uint32_t not_forward[] = {FMHA_T_DO,    FMHA_T_DQ,    FMHA_T_DK,  FMHA_T_DV,
					       FMHA_T_DBIAS, FMHA_T_DSINK, FMHA_T_DLSE};
	struct fmha_problem forward = *backward;
	struct fmha_plan *plan;
	int r;

	forward.op = FMHA_FORWARD;
	forward.deterministic = 0;
	for (size_t i = 0; i < sizeof(not_forward) / sizeof(not_forward[0]); i++)
		memset(&forward.tensor[not_forward[i]], 0, sizeof(forward.tensor[0]));
	r = fmha_plan_new(device, &forward, NULL, &plan, err);
	if (r < 0)
		return r;
	r = fmha_plan_run(plan, NULL, NULL, err);
	plan = fmha_plan_free(plan);
	return r;
}

const char problem_kernel_help[] = "the kernel of this name and no other; once for each stage";

int problem_add_kernel(struct problem_kernels *kernels, const char *name)
{
	if (kernels->n == FMHA_MAX_STAGES)
		return ctl_usage_error("--kernel: a plan has at most %d stages", FMHA_MAX_STAGES);
	kernels->names[kernels->n++] = name;
	return 0;
}

struct fmha_plan_options problem_plan_options(const struct problem_kernels *kernels)
{
	return (struct fmha_plan_options){.struct_size = sizeof(struct fmha_plan_options),
					  .n_kernels = kernels->n,
					  .kernels = kernels->names};
}

void problem_describe(const struct fmha_problem *p, char *text, size_t n)
{
	static const char *const masks[] = {"", ", top_left", ", bottom_right"};
	const char *dtype = fmha_dtype_name(p->k.dtype);
	char hdim[32], mask[64] = "";

	if (p->hdim_q == p->hdim_v)
		(void)snprintf(hdim, sizeof(hdim), "%d", p->hdim_q);
	else
		(void)snprintf(hdim, sizeof(hdim), "%d/%d", p->hdim_q, p->hdim_v);
	if (p->mask != FMHA_MASK_NONE && p->mask <= FMHA_MASK_BOTTOM_RIGHT) {
		if (p->window_left == -1 && p->window_right == 0)
			(void)snprintf(mask, sizeof(mask), "%s causal", masks[p->mask]);
		else
			(void)snprintf(mask, sizeof(mask), "%s window %d,%d", masks[p->mask],
				       p->window_left, p->window_right);
	}
	(void)snprintf(text, n, "batch %d%s, heads %d/%d, seqlen %d/%d, hdim %s, %s%s", p->batch,
		       p->mode == FMHA_GROUP ? " (packed)" : "", p->nhead_q, p->nhead_k,
		       p->seqlen_q, p->seqlen_k, hdim, dtype ? dtype : "?", mask);
}
