/* SPDX-License-Identifier: MIT */
/*
 * shape.c: the word under which a problem's times are kept.
 *
 *   f.b.bf16.h128x128.b2h16x4.q1024ak1024a.br-x,0+lse
 *
 * operation, mode, types of q and o (and k where it differs), head dims, batch and heads, rows and
 * keys in steps with whether they are multiples of 128 (a), of 8 (e) or not (o), mask with its
 * window, and what else there is. A window of a few keys and a causal mask do not share a word, nor
 * do page sizes, padding, or numbers of splits that were asked for.
 */
#include <stdarg.h>
#include <stdio.h>

#include "select.h"

_Static_assert(PLAN_SHAPE_BYTES == PROTO_SHAPE_BYTES, "one word");

#define EXACT 16 /* lengths up to here count themselves: decode */

struct word {
	char *text;
	size_t n;
};

__attribute__((format(printf, 2, 3))) static void put(struct word *word, const char *fmt, ...)
{
	size_t room = PROTO_SHAPE_BYTES - word->n;
	va_list args;
	int n;

	va_start(args, fmt);
	n = vsnprintf(word->text + word->n, room, fmt, args);
	va_end(args);
	word->n += (size_t)n < room ? (size_t)n : room - 1;
}

/* Four steps a power of two, upwards. @step: so many steps more or fewer. */
static int64_t round_length(int64_t n, int step)
{
	int64_t power = 1, quarter;

	if (n <= EXACT && step == 0)
		return n;
	if (n <= 1)
		return n + step < 1 ? 1 : n + step;
	while (power * 2 < n)
		power *= 2;
	quarter = power / 4 > 0 ? power / 4 : 1;
	n = power + ceil_div(n - power, quarter) * quarter;
	return n + step * (step > 0 && n == 2 * power ? 2 * quarter : quarter);
}

static char parity(int64_t n)
{
	return n % 128 == 0 ? 'a' : n % 8 == 0 ? 'e' : 'o';
}

static int64_t power_of_two(int64_t n)
{
	int64_t power = 1;

	while (power < n)
		power *= 2;
	return n > 0 ? power : 0;
}

static void put_lengths(struct word *word, const struct fmha_problem *p, int rows, int keys)
{
	if (p->mode == FMHA_GROUP) {
		put(word, ".b%lldh%dx%d.t%lldq%lldk%lld", (long long)power_of_two(p->batch),
		    p->nhead_q, p->nhead_k, (long long)round_length(p->total_q, rows),
		    (long long)round_length(p->seqlen_q, rows),
		    (long long)round_length(p->seqlen_k, keys));
		return;
	}
	put(word, ".b%dh%dx%d.q%lld%ck%lld%c", p->batch, p->nhead_q, p->nhead_k,
	    (long long)round_length(p->seqlen_q, rows), parity(p->seqlen_q),
	    (long long)round_length(p->seqlen_k, keys), parity(p->seqlen_k));
}

static void put_side(struct word *word, int32_t window)
{
	if (window < 0)
		put(word, "x");
	else
		put(word, "%lld", (long long)round_length(window, 0));
}

static void put_mask(struct word *word, const struct fmha_problem *p)
{
	static const char *const words[] = {"no", "tl", "br"};

	/* As normalise() has it: a band that hides nothing is none. */
	if (p->mask == FMHA_MASK_NONE || (p->window_left < 0 && p->window_right < 0)) {
		put(word, ".no");
		return;
	}
	put(word, ".%s-", words[p->mask <= FMHA_MASK_BOTTOM_RIGHT ? p->mask : 0]);
	put_side(word, p->window_left);
	put(word, ",");
	put_side(word, p->window_right);
	if (p->sink_tokens > 0)
		put(word, ",%lld", (long long)round_length(p->sink_tokens, 0));
}

static void put_number(struct word *word, const char *name, int64_t value)
{
	if (value != 0)
		put(word, "+%s%lld", name, (long long)value);
}

/* Tensors whose mere presence changes what a kernel does. */
static void put_tensors(struct word *word, const struct fmha_problem *p)
{
	static const struct {
		enum fmha_tensor_role role;
		const char *name;
	} tensors[] = {
		{FMHA_T_BIAS, "bias"},     {FMHA_T_ALIBI_SLOPES, "alibi"},
		{FMHA_T_SINK, "sink"},     {FMHA_T_RANDVAL, "rand"},
		{FMHA_T_DBIAS, "db"},      {FMHA_T_DSINK, "ds"},
		{FMHA_T_SEQLEN_Q, "lq"},   {FMHA_T_SEQLEN_K, "lk"},
		{FMHA_T_SEQSTART_K, "sk"}, {FMHA_T_BLOCK_TABLE, "bt"},
		{FMHA_T_KV_INDPTR, "ip"},  {FMHA_T_CACHE_BATCH_IDX, "ci"},
		{FMHA_T_LEFTPAD_K, "lp"},  {FMHA_T_Q_DESCALE, "dq"},
		{FMHA_T_K_DESCALE, "dk"},  {FMHA_T_V_DESCALE, "dv"},
		{FMHA_T_K_NEW, "new"},     {FMHA_T_MASK_BITS, "mb"},
	};
	int64_t stride[5];

	if (p->op != FMHA_BACKWARD && plan_present(p, FMHA_T_LSE))
		put(word, "+lse");
	for (size_t i = 0; i < sizeof(tensors) / sizeof(tensors[0]); i++)
		if (plan_present(p, tensors[i].role))
			put(word, "+%s", tensors[i].name);
	if (plan_present(p, FMHA_T_V) && p->kv_layout == FMHA_KV_LINEAR) {
		problem_strides(p, FMHA_T_V, stride);
		if (stride[3] > 1)
			put(word, "+vc");
	}
	if (plan_present(p, FMHA_T_BIAS)) {
		problem_strides(p, FMHA_T_BIAS, stride);
		if (stride[2] == 0)
			put(word, "+b1"); /* one row for all */
	}
}

/* Elements that are read again and again lie in caches: such times say nothing of other tensors. */
static void put_repeats(struct word *word, const struct fmha_problem *p)
{
	static const struct {
		enum fmha_tensor_role role;
		const char *name;
	} tensors[] = {{FMHA_T_Q, "q"}, {FMHA_T_K, "k"}, {FMHA_T_V, "v"}, {FMHA_T_DO, "do"}};
	struct problem_view view;

	for (size_t i = 0; i < sizeof(tensors) / sizeof(tensors[0]); i++) {
		unsigned axes = 0;

		if (!plan_present(p, tensors[i].role) ||
		    (p->kv_layout == FMHA_KV_VECTORIZED && i > 0))
			continue;
		(void)problem_view(p, tensors[i].role, &view, NULL);
		for (unsigned axis = 0; axis < 5; axis++)
			if (view.stride[axis] == 0 && view.extent[axis] > 1)
				axes |= 1u << axis;
		if (axes)
			put(word, "+0%s%x", tensors[i].name, axes);
	}
}

/* What of it times depend on. */
static int64_t number_of(const struct fmha_problem *p, enum problem_field_id field)
{
	switch (field) {
	case PROBLEM_FIELD_min_seqlen_q:
		return p->min_seqlen_q > 0;
	case PROBLEM_FIELD_rope:
		return p->rope != FMHA_ROPE_NONE ? (int64_t)p->rope * 1000 + p->rotary_dim : 0;
	case PROBLEM_FIELD_seqlen_new:
		return p->seqlen_new > 0 ? round_length(p->seqlen_new, 0) : 0;
	default:
		return problem_field_value(p, &problem_fields[field]);
	}
}

static void put_fields(struct word *word, const struct fmha_problem *p, int first, int end)
{
	for (int i = first; i < end; i++)
		if (problem_fields[i].word)
			put_number(word, problem_fields[i].word,
				   number_of(p, (enum problem_field_id)i));
}

static void put_traits(struct word *word, const struct fmha_problem *p)
{
	const char *name;

	for (int i = 0; i < N_TRAITS; i++) {
		unsigned value = traits_own(p, i, &name);

		if (value)
			put_number(word, name, value);
	}
}

/* In the order of the words that tuned files hold: splits and pages come first. */
static void put_options(struct word *word, const struct fmha_problem *p)
{
	put_fields(word, p, PROBLEM_FIELD_deterministic, PROBLEM_FIELD_cache_batch);
	put_fields(word, p, 0, PROBLEM_FIELD_deterministic);
	put_fields(word, p, PROBLEM_FIELD_cache_batch, PROBLEM_N_FIELDS);
}

static const char *dtype_word(uint32_t dtype)
{
	const char *name = fmha_dtype_name(dtype);

	return name ? name : "none";
}

static void put_types(struct word *word, const struct fmha_problem *p)
{
	put(word, ".%s", dtype_word(p->op == FMHA_APPEND_KV ? p->k.dtype : p->q.dtype));
	if (p->op == FMHA_FORWARD && p->k.dtype != p->q.dtype)
		put(word, "-%s", dtype_word(p->k.dtype));
	if (plan_present(p, FMHA_T_O) && p->o.dtype != p->q.dtype)
		put(word, "-%s", dtype_word(p->o.dtype));
}

/* A problem's word and those of its neighbours differ in their lengths alone. */
struct around {
	char head[PROTO_SHAPE_BYTES], tail[PROTO_SHAPE_BYTES];
};

static void put_around(struct around *around, const struct fmha_problem *p)
{
	static const char operations[] = "fbam";
	struct word head = {.text = around->head}, tail = {.text = around->tail};

	put(&head, "%c.%c", p->op < 4 ? operations[p->op] : '?', p->mode == FMHA_GROUP ? 'g' : 'b');
	put_types(&head, p);
	put(&head, ".h%dx%d", p->hdim_q, p->hdim_v);
	put_mask(&tail, p);
	put_tensors(&tail, p);
	put_repeats(&tail, p);
	put_options(&tail, p);
	put_traits(&tail, p);
}

/* @rows, @keys: so many steps more or fewer. */
static void shape_near(const struct around *around, const struct fmha_problem *p, int rows,
		       int keys, char *shape)
{
	struct word word = {.text = shape};

	put(&word, "%s", around->head);
	put_lengths(&word, p, rows, keys);
	put(&word, "%s", around->tail);
}

void plan_shape(const struct fmha_problem *problem, char shape[PLAN_SHAPE_BYTES])
{
	struct around around;

	put_around(&around, problem);
	shape_near(&around, problem, 0, 0, shape);
}

void shape_words_make(const struct fmha_problem *problem, struct shape_words *ret_words)
{
	static const int8_t steps[][2] = {{0, 0},  {0, 1}, {0, -1}, {1, 0},
					  {-1, 0}, {1, 1}, {-1, -1}};
	struct around around;

	_Static_assert(sizeof(steps) / sizeof(steps[0]) ==
			       sizeof(ret_words->word) / sizeof(ret_words->word[0]),
		       "a word each");
	put_around(&around, problem);
	ret_words->n = sizeof(steps) / sizeof(steps[0]);
	for (size_t i = 0; i < ret_words->n; i++)
		shape_near(&around, problem, problem->seqlen_q > EXACT ? steps[i][0] : 0,
			   steps[i][1], ret_words->word[i]);
}
