/* SPDX-License-Identifier: MIT */
#include "problem.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* FMHA_PROBLEM_FIELDS' column: which options a field has. */
#define AS_NONE              NONE,
#define AS_ONE(...)          ONE, __VA_ARGS__
#define AS_TWO(...)          TWO, __VA_ARGS__
#define ROWS(field, ...)     ROWS_(field, __VA_ARGS__)
#define ROWS_(field, n, ...) ROWS_##n(field, __VA_ARGS__)
#define ROWS_NONE(field, ...)
#define ROWS_ONE(field, name, argument, help)                                                      \
	{name, PROBLEM_OF_FIELD + PROBLEM_FIELD_##field, argument, help, CLI_OWN},
#define ROWS_TWO(field, name, argument, help, alias, alias_help)                                   \
	ROWS_ONE(field, name, argument, help){alias,                                               \
					      PROBLEM_ALIAS_OF_FIELD + PROBLEM_FIELD_##field,      \
					      argument, alias_help, CLI_OWN},
#define FIELD_ROWS(type, field, neutral, least, most, ops, word, option, meaning)                  \
	ROWS(field, AS_##option)

const struct cli_option problem_options[] = {
	{"causal", PROBLEM_CAUSAL, NULL, "the same as --mask bottom_right --window -1,0", CLI_OWN},
	{"mask", PROBLEM_MASK, "none|top_left|bottom_right|MASK",
	 "the corner that the band is tied to; MASK as CK says it: 1 2 "
	 "t:L,R b:L,R xt:W xb:W g:Y,X",
	 CLI_OWN},
	{"window", PROBLEM_WINDOW, "L,R", "columns visible left and right of the diagonal, -1: all",
	 CLI_OWN},
	FMHA_PROBLEM_FIELDS(FIELD_ROWS) CLI_END};

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
	r = ctl_parse_int32("--window", left, -1, INT32_MAX, &problem->window_left);
	if (r == 0)
		r = ctl_parse_int32("--window", comma + 1, -1, INT32_MAX, &problem->window_right);
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

const struct cli_option *problem_option_of(enum problem_field_id field)
{
	for (const struct cli_option *option = problem_options; option->name; option++)
		if (option->id == PROBLEM_OF_FIELD + (int)field)
			return option;
	return NULL;
}

/* One of the words that the option's argument is called by, in the enum's order. */
static int parse_choice(const char *option, const char *words, const char *value, uint32_t *ret)
{
	struct ctl_word list[8] = {{NULL, 0}};
	char text[64], *rest = text;

	(void)snprintf(text, sizeof(text), "%s", words);
	for (uint32_t i = 0; i < 7 && rest; i++)
		list[i] = (struct ctl_word){strsep(&rest, "|"), i};
	return ctl_parse_word(option, value, list, ret);
}

static int parse_field(struct fmha_problem *p, enum problem_field_id id, const char *value)
{
	const struct problem_field *field = &problem_fields[id];
	const struct cli_option *option = problem_option_of(id);
	void *at = (char *)p + field->offset;
	char name[32];

	(void)snprintf(name, sizeof(name), "--%s", option->name);
	switch (field->type) {
	case PROBLEM_CHOICE:
		return parse_choice(name, option->argument, value, at);
	case PROBLEM_FLAG:
		*(uint32_t *)at = 1;
		return 0;
	case PROBLEM_COUNTER:
		return parse_u64(name, value, at);
	case PROBLEM_REAL:
	case PROBLEM_ABSENT_REAL:
		return parse_float(name, value, at);
	default:
		return ctl_parse_int32(name, value, (int32_t)field->least, INT32_MAX, at);
	}
}

static int parse_mask(const char *value, struct fmha_problem *p)
{
	int r = parse_ck_mask(value, p);

	if (r == 1)
		r = parse_choice("--mask", "none|top_left|bottom_right", value, &p->mask);
	if (r == 0 && p->mask == FMHA_MASK_NONE && (p->window_left != -1 || p->window_right != -1))
		return ctl_usage_error("--mask %s, but --causal or --window says one", value);
	return r;
}

int problem_option(struct fmha_problem *p, int option, const char *value)
{
	int r;

	switch (option) {
	case PROBLEM_CAUSAL:
		if (p->mask == FMHA_MASK_NONE)
			p->mask = FMHA_MASK_BOTTOM_RIGHT;
		p->window_right = 0;
		return 0;
	case PROBLEM_MASK:
		return parse_mask(value, p);
	case PROBLEM_WINDOW:
		return parse_window(value, p);
	case PROBLEM_OF_FIELD + PROBLEM_FIELD_page_size:
	case PROBLEM_ALIAS_OF_FIELD + PROBLEM_FIELD_page_size: /* 0 is no size of a page */
		return ctl_parse_int32("--page-size", value, 1, INT32_MAX, &p->page_size);
	case PROBLEM_ALIAS_OF_FIELD + PROBLEM_FIELD_scale:
		/* CK's examples mean the default by 0, which is a scale */
		r = parse_float("-scale_s", value, &p->scale);
		if (r == 0 && p->scale == 0)
			p->scale = NAN;
		return r;
	default:
		option -= option < PROBLEM_ALIAS_OF_FIELD ? PROBLEM_OF_FIELD
							  : PROBLEM_ALIAS_OF_FIELD;
		return parse_field(p, (enum problem_field_id)option, value);
	}
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

struct fmha_plan_options problem_plan_options(const struct cli_texts *kernels)
{
	return (struct fmha_plan_options){.struct_size = sizeof(struct fmha_plan_options),
					  .n_kernels = kernels->n,
					  .kernels = kernels->at};
}

void problem_describe(const struct fmha_problem *p, char *text, size_t n)
{
	static const char *const masks[] = {"", ", top_left", ", bottom_right"};
	const char *dtype = fmha_dtype_name(p->k.dtype), *of_q = fmha_dtype_name(p->q.dtype);
	bool mixed = p->op == FMHA_FORWARD && p->q.dtype != p->k.dtype && of_q;
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
	(void)snprintf(text, n, "batch %d%s, heads %d/%d, seqlen %d/%d, hdim %s, %s%s%s%s",
		       p->batch, p->mode == FMHA_GROUP ? " (packed)" : "", p->nhead_q, p->nhead_k,
		       p->seqlen_q, p->seqlen_k, hdim, mixed ? of_q : "", mixed ? " over " : "",
		       dtype ? dtype : "?", mask);
}
