/* SPDX-License-Identifier: MIT */
/* recipe_flags.c: a recipe's options, by CK's names and by plain ones, and back to text. */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "recipe.h"

/* OPTION(name, ID, value, help), in the order of --help; ALSO(name, ID, value): another name of it. */
#define RECIPE_OPTIONS(OPTION, ALSO)                                                               \
	OPTION("b", BATCH, "N", "sequences (default 1)")                                           \
	ALSO("batch", BATCH, "N")                                                                  \
	OPTION("h", HEADS_Q, "N", "heads of Q, and of K and V unless -h_k says else (default 8)")  \
	ALSO("heads", HEADS_Q, "N")                                                                \
	ALSO("heads-q", HEADS_Q, "N")                                                              \
	OPTION("h_k", HEADS_K, "N", "heads of K and V")                                            \
	ALSO("heads-k", HEADS_K, "N")                                                              \
	OPTION("s", SEQLEN_Q, "N,...",                                                             \
	       "rows a sequence (default 1024); a number a sequence: packed (varlen)")             \
	ALSO("seqlen", SEQLEN_Q, "N,...")                                                          \
	ALSO("seqlen-q", SEQLEN_Q, "N,...")                                                        \
	OPTION("s_k", SEQLEN_K, "N,...", "keys a sequence (default: as rows)")                     \
	ALSO("seqlen-k", SEQLEN_K, "N,...")                                                        \
	OPTION("s_qpad", Q_ROOM, "N,...", "rows that sequences take in memory")                    \
	OPTION("s_kpad", K_ROOM, "N,...", "keys that sequences take in memory")                    \
	OPTION("q_eff_lens", Q_REAL, "N,...", "rows in use of -s")                                 \
	OPTION("kv_eff_lens", K_REAL, "N,...", "keys in use of -s_k")                              \
	OPTION("lengths", LENGTHS, "equal|mixed|ramp|one_long|with_empty|padded",                  \
	       "how long the sequences are, -s being the longest")                                 \
	OPTION("d", HDIM_Q, "N",                                                                   \
	       "head dim of Q and K, and of V unless -d_v says else (default 128)")                \
	ALSO("hdim", HDIM_Q, "N")                                                                  \
	OPTION("d_v", HDIM_V, "N", "head dim of V")                                                \
	ALSO("hdim-v", HDIM_V, "N")                                                                \
	OPTION("prec", PREC, "T",                                                                  \
	       "fp32, fp16, bf16 (default), fp8, bf8; fp8fp16, fp8fp32: and the output's type")    \
	OPTION("dtype", DTYPE, "f32|f16|bf16|e4m3|e5m2", "the same")                               \
	OPTION("out-type", DTYPE_O, "fp32|fp16|bf16", "what fp8 gives (default bf16)")             \
	OPTION("kv-type", DTYPE_KV, "e4m3|e5m2|int8", "of K and V under a Q of f16 or bf16")       \
	OPTION("mode", MODE, "0|1", "1: packed sequences (varlen)")                                \
	OPTION("group", GROUP, NULL, "the same as -mode 1")                                        \
	OPTION("lse", LSE, "[0|1]", "there is an LSE")                                             \
	OPTION("bias", BIAS, "[n|e|e:0|e:1|e:2|a|a:1]",                                            \
	       "none; elements, one plane (e, e:0), one a head (e:1), one a sequence and head "    \
	       "(e:2, or no value); ALiBi")                                                        \
	OPTION("alibi", ALIBI, "[0|1]", "ALiBi's slopes")                                          \
	OPTION("sink", SINK, "[0|1]", "a sink logit a head")                                       \
	ALSO("init_sink", SINK, "[0|1]")                                                           \
	OPTION("dbias", DBIAS, "[0|1]", "backward: the bias's gradient")                           \
	OPTION("dsink", DSINK, "[0|1]", "backward: the sinks' gradient")                           \
	ALSO("sink_grad", DSINK, "[0|1]")                                                          \
	OPTION("s_randval", RANDVAL, "[0|1]",                                                      \
	       "the bytes of dropout are stored, and backward reads them")                         \
	OPTION("new", NEW, "N", "forward, append: N new keys are written to the cache first")      \
	ALSO("s_knew", NEW, "N")                                                                   \
	OPTION("parts", PARTS, "N", "merge: N partial results (default 4)")                        \
	OPTION("iperm", IPERM, "0|1", "1: heads before rows in Q, K, V and their gradients")       \
	OPTION("operm", OPERM, "0|1", "1: heads before rows in O")                                 \
	OPTION("vlayout", VLAYOUT, "r|c", "c: the keys of V lie next to each other")               \
	OPTION("kv-lookup", LOOKUP, "block_table|indptr", "how pages are found")                   \
	OPTION("slots", SLOTS, "[0|1]",                                                            \
	       "append: rows go to slots of the pages in any order, some nowhere; --topk: keys "   \
	       "are such")                                                                         \
	OPTION("cache_batch_idx", CACHE_ROWS, "[0|1]",                                             \
	       "sequences lie in the cache in another order")                                      \
	OPTION("leftpad", LEFTPAD, "N", "up to N keys are skipped at the left")                    \
	OPTION("descale", DESCALE, "n|pt|bs|page|slot",                                            \
	       "fp8: scale factors a tensor, a block, a page (or, by --descale-block-k, so many "  \
	       "slots); slot: append finds them")                                                  \
	ALSO("qscale", DESCALE, "n|pt|bs|page|slot")                                               \
	OPTION("descale-block-q", DESCALE_Q, "N", "rows that share a factor (default 128)")        \
	OPTION("descale-block-k", DESCALE_K, "N", "keys that share a factor (default 128)")        \
	OPTION("min-seqlen-q", MIN_SEQLEN_Q, "N", "packed: sequences with fewer rows are skipped") \
	ALSO("min_seqlen_q", MIN_SEQLEN_Q, "N")                                                    \
	OPTION("rotary_dim", ROTARY_DIM, "N", "leading elements that --rope turns (default: all)") \
	OPTION("rotary_interleaved", ROTARY_INTERLEAVED, "0|1", "--rope interleaved, or half")     \
	OPTION("init", CONTENTS, "nf|uf|ri|tf",                                                    \
	       "contents: normal (default), uniform, small integers, waves")                       \
	OPTION("data-seed", DATA_SEED, "N", "of the contents (default 1)")

enum {
	OPTION_BEFORE = RECIPE_OPTION_BASE - 1,
#define OPTION_ID(name, ID, argument, help) OPTION_##ID,
#define NO_ID(name, ID, argument)
	RECIPE_OPTIONS(OPTION_ID, NO_ID)
#undef OPTION_ID
#undef NO_ID
		OPTION_LAST
};

const struct cli_option recipe_options[] = {
#define OPTION_ROW(name, ID, argument, help) {name, OPTION_##ID, argument, help, CLI_OWN},
#define ALSO_ROW(name, ID, argument)         {name, OPTION_##ID, argument, "the same", CLI_OWN},
	RECIPE_OPTIONS(OPTION_ROW, ALSO_ROW)
#undef OPTION_ROW
#undef ALSO_ROW
		CLI_END};

bool recipe_is_option(int option)
{
	return option >= RECIPE_OPTION_BASE && option < OPTION_LAST;
}

int recipe_option_named(const char *name)
{
	for (const struct cli_option *option = recipe_options; option->name; option++)
		if (!strcmp(option->name, name))
			return option->id;
	return -1;
}

const char *recipe_option_name(int option)
{
	for (const struct cli_option *o = recipe_options; o->name; o++)
		if (o->id == option)
			return o->name;
	return NULL;
}

/* ---- values ---- */

/* "1024" or "1024,77,512". */
static int parse_list(const char *name, const char *text, struct recipe_list *ret)
{
	ret->n = 0;
	for (const char *at = text;; at++) {
		long long value;
		char *end;

		errno = 0;
		value = strtoll(at, &end, 10);
		if (end == at || (*end && *end != ','))
			return ctl_usage_error("%s '%s': a number, or several with commas", name,
					       text);
		if (errno || value < 0 || value > INT32_MAX)
			return ctl_usage_error("%s '%s': %.*s is not in 0..%d", name, text,
					       (int)(end - at), at, INT32_MAX);
		if (ret->n == RECIPE_MAX_LIST)
			return ctl_usage_error("%s: at most %d numbers", name, RECIPE_MAX_LIST);
		ret->values[ret->n++] = (int32_t)value;
		if (!*end)
			return 0;
		at = end;
	}
}

/* By -1 CK's examples mean what holds when nothing is said. */
static bool says_nothing(const char *text, struct recipe_list *list)
{
	if (strcmp(text, "-1") != 0)
		return false;
	list->n = 0;
	return true;
}

/* One number is the length of all, by whatever pattern. */
static int parse_lengths(const char *name, const char *text, struct recipe_list *list,
			 int32_t *longest)
{
	int r = parse_list(name, text, list);

	if (r != 0)
		return r;
	*longest = 0;
	for (int32_t i = 0; i < list->n; i++)
		*longest = list->values[i] > *longest ? list->values[i] : *longest;
	if (list->n == 1)
		list->n = 0;
	return 0;
}

/* Effective lengths: what was a length is the room. */
static int parse_real(const char *name, const char *text, struct recipe_list *list,
		      struct recipe_list *room, int32_t longest)
{
	if (says_nothing(text, room))
		return 0;
	if (list->n == 0 && longest == RECIPE_UNSAID)
		return ctl_usage_error("%s: -s, what the sequences take in memory, comes before it",
				       name);
	if (list->n > 0) {
		*room = *list;
	} else {
		room->n = 1;
		room->values[0] = longest;
	}
	return parse_list(name, text, list);
}

static int parse_switch(const char *name, const char *text, bool *ret)
{
	int32_t value = 1;
	int r = text ? ctl_parse_int32(name, text, 0, 1, &value) : 0;

	if (r == 0)
		*ret = value != 0;
	return r;
}

static const struct ctl_word dtype_words[] = {
	{"f32", FMHA_F32},   {"f16", FMHA_F16},  {"bf16", FMHA_BF16}, {"e4m3", FMHA_E4M3},
	{"e5m2", FMHA_E5M2}, {"fp32", FMHA_F32}, {"fp16", FMHA_F16},  {"fp8", FMHA_E4M3},
	{"bf8", FMHA_E5M2},  {NULL, 0}};
static const struct ctl_word kv_words[] = {
	{"f32", FMHA_F32},   {"f16", FMHA_F16},  {"bf16", FMHA_BF16}, {"e4m3", FMHA_E4M3},
	{"e5m2", FMHA_E5M2}, {"int8", FMHA_I8},  {"i8", FMHA_I8},     {"fp32", FMHA_F32},
	{"fp16", FMHA_F16},  {"fp8", FMHA_E4M3}, {"bf8", FMHA_E5M2},  {NULL, 0}};
static const struct ctl_word length_words[] = {{"equal", RECIPE_EQUAL},
					       {"mixed", RECIPE_MIXED},
					       {"ramp", RECIPE_RAMP},
					       {"one_long", RECIPE_ONE_LONG},
					       {"with_empty", RECIPE_WITH_EMPTY},
					       {"padded", RECIPE_PADDED},
					       {NULL, 0}};
static const struct ctl_word descale_words[] = {
	{"n", RECIPE_NO_DESCALE},         {"pt", RECIPE_PER_TENSOR},
	{"bs", RECIPE_PER_BLOCK},         {"page", RECIPE_PER_PAGE},
	{"slot", RECIPE_PER_SLOT},        {"0", RECIPE_NO_DESCALE},
	{"1", RECIPE_PER_TENSOR},         {"2", RECIPE_PER_BLOCK},
	{"no", RECIPE_NO_DESCALE},        {"pertensor", RECIPE_PER_TENSOR},
	{"blockscale", RECIPE_PER_BLOCK}, {NULL, 0}};
static const struct ctl_word content_words[] = {{"nf", RECIPE_NORMAL},   {"uf", RECIPE_UNIFORM},
						{"ri", RECIPE_INTEGERS}, {"ui", RECIPE_INTEGERS},
						{"tf", RECIPE_WAVES},    {NULL, 0}};
static const struct ctl_word lookup_words[] = {
	{"block_table", 0}, {"vllm", 0}, {"indptr", 1}, {"sglang", 1}, {NULL, 0}};
static const struct ctl_word layout_words[] = {{"r", 0}, {"c", 1}, {NULL, 0}};

/* "bf16", or "fp8fp32": what goes in and what comes out. */
static int parse_types(const char *name, const char *text, struct recipe *recipe)
{
	size_t n = strlen(text);

	/* Known by name, so that nobody looks for another way to spell them. */
	if (strcmp(text, "mxfp8") == 0 || strcmp(text, "mxfp4") == 0)
		return ctl_usage_error("%s '%s': not supported: no kernel has types with a scale a "
				       "block of 32",
				       name, text);
	for (size_t inner = 3; n > 4 && inner < n; inner += 1) {
		uint32_t in = 0, out = 0;
		bool has_in = false, has_out = false;

		for (const struct ctl_word *w = dtype_words; w->text; w++) {
			if (strlen(w->text) == inner && !memcmp(w->text, text, inner))
				has_in = true, in = w->value;
			if (!strcmp(w->text, text + inner))
				has_out = true, out = w->value;
		}
		if (has_in && has_out) {
			recipe->dtype = in;
			recipe->dtype_o = out;
			return 0;
		}
	}
	return ctl_parse_word(name, text, dtype_words, &recipe->dtype);
}

static int parse_bias(const char *text, struct recipe *recipe)
{
	const char *rank = text ? strchr(text, ':') : NULL;
	int32_t number = text ? 0 : 2;
	int r = rank ? ctl_parse_int32("-bias", rank + 1, 0, 2, &number) : 0;

	if (r != 0)
		return r;
	recipe->want[FMHA_T_BIAS] = !text || text[0] == 'e';
	recipe->want[FMHA_T_ALIBI_SLOPES] = text && text[0] == 'a';
	recipe->bias_rank = number;
	recipe->alibi_per_batch = number > 0;
	if (text && !strchr("nea", text[0]))
		return ctl_usage_error("-bias '%s': n, e[:0|1|2] or a[:1]", text);
	return 0;
}

/* ---- options ---- */

static int parse_length_option(struct recipe *recipe, int option, const char *value)
{
	struct fmha_problem *p = &recipe->problem;

	switch (option) {
	case OPTION_SEQLEN_Q:
		return parse_lengths("-s", value, &recipe->q, &p->seqlen_q);
	case OPTION_SEQLEN_K:
		p->seqlen_k = RECIPE_UNSAID;
		return says_nothing(value, &recipe->k)
			       ? 0
			       : parse_lengths("-s_k", value, &recipe->k, &p->seqlen_k);
	case OPTION_Q_ROOM:
		return says_nothing(value, &recipe->q_room)
			       ? 0
			       : parse_list("-s_qpad", value, &recipe->q_room);
	case OPTION_K_ROOM:
		return says_nothing(value, &recipe->k_room)
			       ? 0
			       : parse_list("-s_kpad", value, &recipe->k_room);
	case OPTION_Q_REAL:
		return parse_real("-q_eff_lens", value, &recipe->q, &recipe->q_room, p->seqlen_q);
	case OPTION_K_REAL:
		return parse_real("-kv_eff_lens", value, &recipe->k, &recipe->k_room,
				  p->seqlen_k == RECIPE_UNSAID ? p->seqlen_q : p->seqlen_k);
	default:
		return ctl_parse_word("--lengths", value, length_words, &recipe->lengths);
	}
}

static int parse_size_option(struct recipe *recipe, int option, const char *value)
{
	struct fmha_problem *p = &recipe->problem;
	const struct {
		int option;
		const char *name;
		int32_t least; /* RECIPE_UNSAID: by -1 CK says "as the query's" */
		int32_t *field;
	} sizes[] = {{OPTION_BATCH, "-b", 0, &p->batch},
		     {OPTION_HEADS_Q, "-h", 1, &p->nhead_q},
		     {OPTION_HEADS_K, "-h_k", RECIPE_UNSAID, &p->nhead_k},
		     {OPTION_HDIM_Q, "-d", 1, &p->hdim_q},
		     {OPTION_HDIM_V, "-d_v", RECIPE_UNSAID, &p->hdim_v},
		     {OPTION_NEW, "-s_knew", 0, &p->seqlen_new},
		     {OPTION_PARTS, "--parts", 1, &p->n_parts},
		     {OPTION_LEFTPAD, "--leftpad", 0, &recipe->leftpad},
		     {OPTION_DESCALE_Q, "--descale-block-q", 1, &p->descale_block_q},
		     {OPTION_DESCALE_K, "--descale-block-k", 1, &p->descale_block_k},
		     {OPTION_MIN_SEQLEN_Q, "--min-seqlen-q", 0, &p->min_seqlen_q},
		     {OPTION_ROTARY_DIM, "-rotary_dim", 0, &p->rotary_dim}};

	recipe->batch_given |= option == OPTION_BATCH;
	for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++)
		if (sizes[i].option == option)
			return ctl_parse_int32(sizes[i].name, value, sizes[i].least, INT32_MAX,
					       sizes[i].field);
	return CTL_USAGE;
}

static int parse_tensor_option(struct recipe *recipe, int option, const char *value)
{
	static const struct {
		int option;
		const char *name;
		uint32_t role;
	} switches[] = {{OPTION_LSE, "-lse", FMHA_T_LSE},
			{OPTION_SINK, "-sink", FMHA_T_SINK},
			{OPTION_DBIAS, "-dbias", FMHA_T_DBIAS},
			{OPTION_DSINK, "-dsink", FMHA_T_DSINK},
			{OPTION_ALIBI, "--alibi", FMHA_T_ALIBI_SLOPES},
			{OPTION_RANDVAL, "-s_randval", FMHA_T_RANDVAL}};

	if (option == OPTION_BIAS)
		return parse_bias(value, recipe);
	for (size_t i = 0; i < sizeof(switches) / sizeof(switches[0]); i++)
		if (switches[i].option == option)
			return parse_switch(switches[i].name, value,
					    &recipe->want[switches[i].role]);
	return parse_size_option(recipe, option, value);
}

static int parse_layout_option(struct recipe *recipe, int option, const char *value)
{
	uint32_t word = 0;
	int r;

	switch (option) {
	case OPTION_IPERM:
		return parse_switch("-iperm", value, &recipe->heads_first_in);
	case OPTION_OPERM:
		return parse_switch("-operm", value, &recipe->heads_first_out);
	case OPTION_SLOTS:
		return parse_switch("--slots", value, &recipe->slots);
	case OPTION_CACHE_ROWS:
		return parse_switch("-cache_batch_idx", value, &recipe->cache_rows);
	case OPTION_VLAYOUT:
		r = ctl_parse_word("-vlayout", value, layout_words, &word);
		recipe->v_column_major = word != 0;
		return r;
	case OPTION_LOOKUP:
		r = ctl_parse_word("--kv-lookup", value, lookup_words, &word);
		recipe->indptr = word != 0;
		return r;
	default:
		return parse_tensor_option(recipe, option, value);
	}
}

int recipe_option(struct recipe *recipe, int option, const char *value)
{
	struct fmha_problem *p = &recipe->problem;
	bool on = false;
	int64_t number = 0;
	int r;

	if (option >= OPTION_SEQLEN_Q && option <= OPTION_LENGTHS)
		return parse_length_option(recipe, option, value);
	switch (option) {
	case OPTION_DTYPE:
	case OPTION_PREC:
		recipe->dtype_given = true;
		return parse_types(option == OPTION_PREC ? "-prec" : "--dtype", value, recipe);
	case OPTION_DTYPE_O:
		return ctl_parse_word("--out-type", value, dtype_words, &recipe->dtype_o);
	case OPTION_DTYPE_KV:
		return ctl_parse_word("--kv-type", value, kv_words, &recipe->dtype_kv);
	case OPTION_MODE:
		r = parse_switch("-mode", value, &on);
		p->mode = on ? FMHA_GROUP : FMHA_BATCH;
		recipe->mode_given = true;
		return r;
	case OPTION_GROUP:
		p->mode = FMHA_GROUP;
		recipe->mode_given = true;
		return 0;
	case OPTION_DESCALE:
		return ctl_parse_word("-qscale", value, descale_words, &recipe->descale);
	case OPTION_ROTARY_INTERLEAVED:
		r = parse_switch("-rotary_interleaved", value, &on);
		p->rope = on ? FMHA_ROPE_INTERLEAVED : FMHA_ROPE_HALF_ROTATED;
		return r;
	case OPTION_CONTENTS:
		return ctl_parse_word("-init", value, content_words, &recipe->contents);
	case OPTION_DATA_SEED:
		r = ctl_parse_int("--data-seed", value, 0, INT64_MAX, &number);
		recipe->seed = (uint64_t)number;
		return r;
	default:
		return parse_layout_option(recipe, option, value);
	}
}

/* ---- beside files ---- */

bool recipe_option_fits_files(int option)
{
	switch (option) {
	case OPTION_BATCH:
	case OPTION_HEADS_Q:
	case OPTION_HEADS_K:
	case OPTION_SEQLEN_Q:
	case OPTION_SEQLEN_K:
	case OPTION_HDIM_Q:
	case OPTION_HDIM_V:
	case OPTION_DTYPE:
	case OPTION_PREC:
	case OPTION_DTYPE_KV: /* compared */
	case OPTION_MIN_SEQLEN_Q:
	case OPTION_DESCALE_Q:
	case OPTION_DESCALE_K:
	case OPTION_ROTARY_INTERLEAVED: /* of the problem itself */
		return true;
	default:
		return false;
	}
}

int recipe_compare_sizes(const struct recipe *recipe, const struct fmha_problem *problem)
{
	const struct fmha_problem *said = &recipe->problem, *p = problem;
	const struct {
		const char *option;
		int32_t said, is;
	} sizes[] = {{"-b", said->batch, p->batch},         {"-h", said->nhead_q, p->nhead_q},
		     {"-h_k", said->nhead_k, p->nhead_k},   {"-s", said->seqlen_q, p->seqlen_q},
		     {"-s_k", said->seqlen_k, p->seqlen_k}, {"-d", said->hdim_q, p->hdim_q},
		     {"-d_v", said->hdim_v, p->hdim_v}};

	if (recipe->q.n > 0 || recipe->k.n > 0)
		return ctl_usage_error("several lengths: the files say how long sequences are");
	for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++)
		if (sizes[i].said != RECIPE_UNSAID && sizes[i].said != sizes[i].is)
			return ctl_usage_error("%s %d: the files have %d", sizes[i].option,
					       sizes[i].said, sizes[i].is);
	if (recipe->dtype_given &&
	    recipe->dtype != (p->op == FMHA_FORWARD ? p->q.dtype : p->k.dtype))
		return ctl_usage_error("-prec %s: the files have %s",
				       fmha_dtype_name(recipe->dtype), fmha_dtype_name(p->k.dtype));
	if (recipe->dtype_kv < FMHA_N_DTYPES && recipe->dtype_kv != p->k.dtype)
		return ctl_usage_error("--kv-type %s: the files have %s",
				       fmha_dtype_name(recipe->dtype_kv),
				       fmha_dtype_name(p->k.dtype));
	return 0;
}

/* ---- back to text ---- */

struct writer {
	char *text;
	size_t n, used;
};

__attribute__((format(printf, 2, 3))) static void put(struct writer *w, const char *format, ...)
{
	va_list args;
	int n;

	va_start(args, format);
	n = vsnprintf(w->text + w->used, w->n - w->used, format, args);
	va_end(args);
	w->used += n > 0 ? (size_t)n : 0;
	if (w->used >= w->n)
		w->used = w->n - 1;
}

static const char *word_of(const struct ctl_word *words, uint32_t value)
{
	while (words->text && words->value != value)
		words++;
	return words->text ? words->text : "?";
}

static void put_list(struct writer *w, const char *name, const struct recipe_list *list,
		     int32_t otherwise)
{
	if (list->n == 0) {
		if (otherwise != RECIPE_UNSAID)
			put(w, " %s=%d", name, otherwise);
		return;
	}
	put(w, " %s=", name);
	for (int32_t i = 0; i < list->n; i++)
		put(w, "%s%d", i ? "," : "", list->values[i]);
}

static void put_mask(struct writer *w, const struct fmha_problem *p)
{
	if (p->mask == FMHA_MASK_NONE)
		return;
	put(w, " -mask=%c:%d,%d", p->mask == FMHA_MASK_TOP_LEFT ? 't' : 'b', p->window_left,
	    p->window_right);
	if (p->sink_tokens > 0)
		put(w, ",%d", p->sink_tokens);
}

static void put_cache(struct writer *w, const struct recipe *recipe)
{
	static const char *const ropes[] = {"none", "interleaved", "half"};
	const struct fmha_problem *p = &recipe->problem;

	if (p->page_size > 0)
		put(w, " --page-size=%d%s", p->page_size,
		    recipe->indptr ? " --kv-lookup=indptr" : "");
	if (p->kv_layout != FMHA_KV_LINEAR)
		put(w, " --kv-layout=%s", proto_kv_layout_words.names[p->kv_layout]);
	if (p->seqlen_new > 0)
		put(w, " -s_knew=%d", p->seqlen_new);
	if (p->rope != FMHA_ROPE_NONE)
		put(w, " --rope=%s -rotary_dim=%d", ropes[p->rope], p->rotary_dim);
	if (recipe->cache_rows)
		put(w, " -cache_batch_idx=1");
	if (recipe->slots)
		put(w, " --slots=1");
	if (recipe->leftpad > 0)
		put(w, " --leftpad=%d", recipe->leftpad);
	if (p->n_splits > 0)
		put(w, " --splits=%d", p->n_splits);
	if (p->split_size > 0)
		put(w, " --split-size=%d", p->split_size);
}

static void put_tensors(struct writer *w, const struct recipe *recipe)
{
	const bool *want = recipe->want;

	if (want[FMHA_T_BIAS])
		put(w, " -bias=e:%d", recipe->bias_rank);
	if (want[FMHA_T_ALIBI_SLOPES])
		put(w, " -bias=a%s", recipe->alibi_per_batch ? ":1" : "");
	if (want[FMHA_T_LSE] && recipe->problem.op != FMHA_BACKWARD)
		put(w, " -lse=1");
	if (want[FMHA_T_SINK])
		put(w, " -sink=1");
	if (want[FMHA_T_DBIAS])
		put(w, " -dbias=1");
	if (want[FMHA_T_DSINK])
		put(w, " -dsink=1");
	if (want[FMHA_T_RANDVAL])
		put(w, " -s_randval=1");
	if (recipe->descale != RECIPE_NO_DESCALE)
		put(w, " -qscale=%s", word_of(descale_words, recipe->descale));
	if (recipe->heads_first_in)
		put(w, " -iperm=1");
	if (recipe->heads_first_out)
		put(w, " -operm=1");
	if (recipe->v_column_major)
		put(w, " -vlayout=c");
}

/* Fields that are not put by hand, nor left out because results alone depend on them. */
static bool is_put_here(enum problem_field_id id)
{
	switch (id) {
	case PROBLEM_FIELD_sink_tokens:
	case PROBLEM_FIELD_scale:
	case PROBLEM_FIELD_dropout_seed:
	case PROBLEM_FIELD_dropout_offset:
	case PROBLEM_FIELD_dropout_row:
	case PROBLEM_FIELD_dropout_column:
	case PROBLEM_FIELD_n_splits:
	case PROBLEM_FIELD_split_size:
	case PROBLEM_FIELD_page_size:
	case PROBLEM_FIELD_kv_layout:
	case PROBLEM_FIELD_rope:
		return false;
	default:
		return problem_option_of(id) != NULL;
	}
}

static void put_fields(struct writer *w, const struct fmha_problem *p, int first, int end)
{
	for (int i = first; i < end; i++) {
		const struct problem_field *field = &problem_fields[i];
		int64_t value = problem_field_value(p, field);

		if (value == field->neutral || !is_put_here((enum problem_field_id)i))
			continue;
		put(w, " --%s", problem_option_of((enum problem_field_id)i)->name);
		if (field->type == PROBLEM_REAL)
			put(w, "=%g", (double)*(const float *)((const char *)p + field->offset));
		else if (field->type != PROBLEM_FLAG)
			put(w, "=%lld", (long long)value);
	}
}

void recipe_text(const struct recipe *recipe, char *text, size_t n)
{
	const struct fmha_problem *p = &recipe->problem;
	struct writer w = {.text = text, .n = n};

	put(&w, "%s -prec=%s", problem_op_words[p->op], word_of(dtype_words, recipe->dtype));
	if (recipe->dtype_o < FMHA_N_DTYPES)
		put(&w, " --out-type=%s", word_of(dtype_words, recipe->dtype_o));
	if (recipe->dtype_kv < FMHA_N_DTYPES)
		put(&w, " --kv-type=%s", word_of(kv_words, recipe->dtype_kv));
	if (p->mode == FMHA_GROUP)
		put(&w, " -mode=1");
	if (recipe->lengths != RECIPE_EQUAL)
		put(&w, " --lengths=%s", word_of(length_words, recipe->lengths));
	put(&w, " -b=%d -h=%d", p->batch, p->nhead_q);
	if (p->nhead_k > 0 && p->nhead_k != p->nhead_q)
		put(&w, " -h_k=%d", p->nhead_k);
	put_list(&w, "-s", &recipe->q, recipe->longest_q);
	if (p->op != FMHA_MERGE_STATES)
		put_list(&w, "-s_k", &recipe->k, recipe->longest_k);
	put_list(&w, "-s_qpad", &recipe->q_room, RECIPE_UNSAID);
	put_list(&w, "-s_kpad", &recipe->k_room, RECIPE_UNSAID);
	if (p->hdim_q > 0)
		put(&w, " -d=%d", p->hdim_q);
	if (p->hdim_v > 0 && p->hdim_v != p->hdim_q)
		put(&w, " -d_v=%d", p->hdim_v);
	put_mask(&w, p);
	put_tensors(&w, recipe);
	put_cache(&w, recipe);
	put_fields(&w, p, 0, PROBLEM_FIELD_deterministic);
	if (p->min_seqlen_q > 0)
		put(&w, " --min-seqlen-q=%d", p->min_seqlen_q);
	put_fields(&w, p, PROBLEM_FIELD_deterministic, PROBLEM_N_FIELDS);
	if (p->n_parts > 0)
		put(&w, " --parts=%d", p->n_parts);
}
