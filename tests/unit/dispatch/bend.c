/* SPDX-License-Identifier: MIT */
#include "bend.h"

#include <limits.h>
#include <math.h>

#define N(array) (sizeof(array) / sizeof((array)[0]))

/* ---- fields ---- */

struct field {
	const char *name;
	size_t offset;
	int last; /* of an enum; 0: a number */
};

#define BENT_CHOICE(field, most) {#field, offsetof(struct fmha_problem, field), most},
#define BENT_FLAG(field, most)   BENT_CHOICE(field, most)
#define BENT_SIZE(field, most)   {#field, offsetof(struct fmha_problem, field), 0},
#define BENT_NUMBER(field, most) BENT_SIZE(field, most)
#define BENT_COUNTER(field, most)
#define BENT_REAL(field, most)
#define BENT_ABSENT_REAL(field, most)
#define BENT(type, field, neutral, least, most, ...) BENT_##type(field, most)

static const struct field fields[] = {FMHA_PROBLEM_FIELDS(BENT)};

static int32_t *field_at(struct fmha_problem *p, const struct field *field)
{
	return (int32_t *)((char *)p + field->offset);
}

static int32_t pick_number(struct runner *r, int32_t old)
{
	static const int32_t small[] = {0, 1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 48};
	static const int32_t medium[] = {63, 64, 65, 96, 127, 128, 129, 255, 256, 257, 512, 1024};
	static const int32_t extreme[] = {-1,      INT_MIN, 4096,    65535,       65536,
					  1 << 20, 1 << 24, 1 << 30, INT_MAX - 1, INT_MAX};
	int kind = random_pick(r, 20);

	if (kind < 10)
		return small[random_pick(r, N(small))];
	if (kind < 13)
		return medium[random_pick(r, N(medium))];
	if (kind < 15)
		return extreme[random_pick(r, N(extreme))];
	if (old > INT_MAX / 2 || old < INT_MIN / 2)
		return old;
	return kind < 17 ? old + 1 : kind < 19 ? old - (old > INT_MIN) : old * 2;
}

static void bend_field(struct runner *r)
{
	const struct field *field = &fields[random_pick(r, N(fields))];
	int32_t *value = field_at(&r->f.problem, field);

	*value = field->last ? random_pick(r, field->last + 2) : pick_number(r, *value);
}

static void bend_float(struct runner *r)
{
	static const float values[] = {0, 1, -1, 0.5F, 1e-30F, 1e30F, NAN, INFINITY};
	struct fmha_problem *p = &r->f.problem;
	float *const floats[] = {&p->scale, &p->logits_soft_cap, &p->dropout_p};

	*floats[random_pick(r, N(floats))] = values[random_pick(r, N(values))];
	p->dropout_seed = random_chance(r, 50) ? UINT64_MAX : 1;
	p->dropout_offset = random_chance(r, 20) ? UINT64_MAX : 0;
}

/* ---- tensors ---- */

static bool is_statistic(enum fmha_tensor_role role)
{
	switch (role) {
	case FMHA_T_LSE:
	case FMHA_T_ALIBI_SLOPES:
	case FMHA_T_SINK:
	case FMHA_T_DSINK:
	case FMHA_T_DLSE:
	case FMHA_T_LSE_PARTS:
	case FMHA_T_Q_DESCALE:
	case FMHA_T_K_DESCALE:
	case FMHA_T_V_DESCALE:
		return true;
	default:
		return false;
	}
}

static uint32_t likely_dtype(const struct fmha_problem *p, enum fmha_tensor_role role)
{
	uint32_t type = p->op == FMHA_MERGE_STATES ? p->o_parts.dtype : p->k.dtype;

	if (fmha_role_is_index(role))
		return FMHA_I32;
	if (is_statistic(role))
		return FMHA_F32;
	if (role == FMHA_T_RANDVAL || role == FMHA_T_WORKSPACE)
		return FMHA_U8;
	if (role == FMHA_T_O && type >= FMHA_E4M3)
		return FMHA_F32;
	return type < FMHA_I32 || type == FMHA_I8 ? type : FMHA_F32;
}

static enum fmha_tensor_role pick_present(struct runner *r)
{
	int first = random_pick(r, FMHA_N_TENSORS);

	for (int i = 0; i < FMHA_N_TENSORS; i++) {
		int role = (first + i) % FMHA_N_TENSORS;

		if (fmha_tensor_present(&r->f.problem.tensor[role]))
			return (enum fmha_tensor_role)role;
	}
	return FMHA_T_Q; /* all have been dropped */
}

static void drop_tensor(struct runner *r)
{
	r->f.problem.tensor[pick_present(r)] = (struct fmha_tensor){0};
}

static void add_tensor(struct runner *r)
{
	enum fmha_tensor_role role = (enum fmha_tensor_role)random_pick(r, FMHA_N_TENSORS);

	fixture_add(&r->f, role, likely_dtype(&r->f.problem, role));
}

static int64_t pick_stride(struct runner *r, int64_t old)
{
	static const int64_t strides[] = {
		1,         2,         8,         1000,      65536, (1LL << 31) - 1, 1LL << 31,
		1LL << 32, 1LL << 45, 1LL << 61, INT64_MAX, -1,    INT64_MIN};
	int kind = random_pick(r, 10);

	if (kind < 4)
		return 0;
	if (kind < 7 && (old < 0 || old > INT64_MAX / 4))
		return old;
	if (kind < 6)
		return old + 1 + random_pick(r, 16);
	if (kind < 7)
		return old * 3;
	return strides[random_pick(r, N(strides))];
}

/* One axis of a tensor; the others keep the strides that they have or would have. */
static void bend_stride(struct runner *r)
{
	enum fmha_tensor_role role = pick_present(r);
	struct fmha_tensor *tensor = &r->f.problem.tensor[role];
	int axis = random_pick(r, proto_roles[role].n_dims);
	int64_t stride[5];

	problem_strides(&r->f.problem, role, stride);
	memcpy(tensor->stride, stride, sizeof(stride));
	tensor->stride[axis] = pick_stride(r, stride[axis]);
}

static void bend_dtype(struct runner *r)
{
	struct fmha_problem *p = &r->f.problem;
	uint32_t dtype = (uint32_t)random_pick(r, FMHA_N_DTYPES + 1);

	if (random_chance(r, 50)) {
		p->tensor[pick_present(r)].dtype = dtype;
		return;
	}
	for (int role = 0; role < FMHA_N_TENSORS; role++) /* all that share one */
		if (!fmha_role_is_index(role) && !is_statistic(role) && role != FMHA_T_RANDVAL)
			p->tensor[role].dtype = dtype;
}

static void bend_offset(struct runner *r)
{
	static const uint64_t offsets[] = {1, 2, 4, 64, 1ULL << 40, UINT64_MAX - 3, UINT64_MAX};

	r->f.problem.tensor[pick_present(r)].offset = offsets[random_pick(r, N(offsets))];
}

static void begin(struct runner *r, unsigned seed)
{
	memset(r, 0, sizeof(*r));
	r->first_seed = seed;
	r->seed = seed * 2654435761U;
	r->tiny = rand_r(&r->seed) % 4 != 0;
	fixture_init(&r->f, (uint32_t)random_pick(r, FMHA_MERGE_STATES + 1), FMHA_BATCH);
}

void bend_begin_on(struct runner *r, unsigned seed, const struct plan_device *device)
{
	begin(r, seed);
	r->f.decree.device = *device;
}

void bend_begin(struct runner *r, unsigned seed, enum cpu_level most)
{
	begin(r, seed);
	r->cpu.n_threads = 1 + random_pick(r, 4);
	r->cpu.level = (enum cpu_level)random_pick(r, (int)most + 1);
	r->f.decree.device = cpu_runner_device(&r->cpu);
}

void bend_problem(struct runner *r, int most_bends)
{
	int n = random_pick(r, most_bends + 1);

	random_problem(r);
	for (int i = 0; i < n; i++) {
		int kind = random_pick(r, 20);

		if (kind < 9)
			bend_field(r);
		else if (kind < 10)
			bend_float(r);
		else if (kind < 12)
			drop_tensor(r);
		else if (kind < 14)
			add_tensor(r);
		else if (kind < 18)
			bend_stride(r);
		else if (kind < 19)
			bend_dtype(r);
		else
			bend_offset(r);
	}
}

/* ---- mending ---- */

/* "tensor.k.stride[1]": a missing tensor comes, a superfluous or wrong one goes or gets simple. */
static void mend_tensor(struct runner *r, const char *field)
{
	for (int role = 0; role < FMHA_N_TENSORS; role++) {
		struct fmha_tensor *tensor = &r->f.problem.tensor[role];
		size_t n = strlen(proto_roles[role].name);
		const char *part = field + n;

		if (strncmp(field, proto_roles[role].name, n) != 0 || (*part && *part != '.'))
			continue;
		if (!fmha_tensor_present(tensor))
			fixture_add(&r->f, (enum fmha_tensor_role)role,
				    likely_dtype(&r->f.problem, (enum fmha_tensor_role)role));
		else if (!*part)
			*tensor = (struct fmha_tensor){0};
		else if (strncmp(part, ".stride", 7) == 0)
			memset(tensor->stride, 0, sizeof(tensor->stride));
		else if (strcmp(part, ".dtype") == 0)
			tensor->dtype = likely_dtype(&r->f.problem, (enum fmha_tensor_role)role);
		else
			tensor->offset = 0;
	}
}

static void mend_number(struct runner *r, const char *name)
{
	struct fmha_problem *p = &r->f.problem;
	struct problem_axes axes;

	problem_axes(p, &axes);
	if (strcmp(name, "total_q") == 0 || strcmp(name, "seqlen_q") == 0)
		p->total_q = p->mode == FMHA_GROUP ? p->seqlen_q : 0;
	else if (strcmp(name, "total_k") == 0 || strcmp(name, "seqlen_k") == 0)
		p->total_k = axes.k.storage == STORED_PACKED ? p->seqlen_k : 0;
	else if (strcmp(name, "nhead_q") == 0)
		p->nhead_q = p->nhead_k < 1 << 16 ? p->nhead_k * (1 + random_pick(r, 3)) : 1;
	else if (strcmp(name, "hdim_q") == 0)
		p->hdim_q = 1 + random_pick(r, 256);
	else if (strcmp(name, "hdim_v") == 0)
		p->hdim_v = 1 + random_pick(r, 256);
	else if (strcmp(name, "rotary_max_pos") == 0)
		p->rotary_max_pos = p->rope ? p->seqlen_k : 0;
	else
		for (size_t i = 0; i < N(fields); i++)
			if (strcmp(fields[i].name, name) == 0)
				*field_at(p, &fields[i]) =
					random_pick(r, fields[i].last ? fields[i].last + 1 : 5) -
					(strncmp(name, "window", 6) == 0);
}

bool bend_mend(struct runner *r)
{
	for (int i = 0; i < 6; i++) {
		struct fmha_error err = {0};

		if (problem_check(&r->f.problem, &err) == 0)
			return true;
		if (strncmp(err.field, "tensor.", 7) == 0)
			mend_tensor(r, err.field + 7);
		else
			mend_number(r, err.field);
	}
	return problem_check(&r->f.problem, NULL) == 0;
}

/* ---- integers ---- */

static volatile int32_t *word(struct runner *r, enum fmha_tensor_role role, int64_t i, int64_t j)
{
	const int64_t *stride = r->f.plan.problem.tensor[role].stride;

	return (volatile int32_t *)r->f.bindings[role].host + i * stride[0] + j * stride[1];
}

static bool has(const struct runner *r, enum fmha_tensor_role role)
{
	return fmha_tensor_present(&r->f.problem.tensor[role]);
}

static void put(struct runner *r, enum fmha_tensor_role role, int64_t i, int64_t j, int64_t value)
{
	if (has(r, role))
		*word(r, role, i, j) = (int32_t)value;
}

static int32_t get(struct runner *r, enum fmha_tensor_role role, int64_t i, int32_t otherwise)
{
	return has(r, role) ? *word(r, role, i, 0) : otherwise;
}

static int64_t at_most(int64_t x, int64_t limit)
{
	return x < limit ? x : limit;
}

/* 0 to @n, both often. */
static int64_t up_to(struct runner *r, int64_t n)
{
	int kind = random_pick(r, 4);

	if (n <= 0 || kind == 0)
		return 0;
	return kind < 3 ? n : random_pick(r, (int)at_most(n, INT_MAX - 1) + 1);
}

static void fill_prefix(struct runner *r, enum fmha_tensor_role role, int64_t longest,
			int64_t total)
{
	int64_t at = random_chance(r, 20) ? up_to(r, total) : 0;

	put(r, role, 0, 0, at);
	for (int64_t b = 0; b < r->f.problem.batch; b++) {
		at += at_most(up_to(r, longest), total - at);
		put(r, role, b + 1, 0, at);
	}
}

/* Page numbers that do not repeat before all have been used. */
static int64_t next_page(struct runner *r, int64_t *used)
{
	int64_t n = r->f.problem.n_pages;

	return n > 0 ? (*used)++ % n : 0;
}

static void fill_page_list(struct runner *r, int64_t b, int64_t *at, int64_t keys, int64_t *used)
{
	const struct fmha_problem *p = &r->f.problem;
	int64_t pages = (keys + p->page_size - 1) / p->page_size;

	pages = at_most(pages, p->n_page_indices - *at);
	for (int64_t i = 0; i < pages; i++)
		put(r, FMHA_T_KV_PAGE_INDICES, *at + i, 0, next_page(r, used));
	*at += pages;
	put(r, FMHA_T_KV_INDPTR, b + 1, 0, *at);
	put(r, FMHA_T_KV_LAST_PAGE_LEN, b, 0, keys > 0 ? (keys - 1) % p->page_size + 1 : 1);
}

static void fill_keys(struct runner *r, int64_t b, int64_t *at, int64_t *used)
{
	const struct fmha_problem *p = &r->f.problem;
	int64_t capacity = p->seqlen_k, before;

	if (has(r, FMHA_T_SEQSTART_K))
		capacity = (int64_t)get(r, FMHA_T_SEQSTART_K, b + 1, 0) -
			   get(r, FMHA_T_SEQSTART_K, b, 0);
	before = up_to(r, capacity - p->seqlen_new);
	put(r, FMHA_T_SEQLEN_K, b, 0, before);
	if (has(r, FMHA_T_KV_INDPTR) && p->page_size > 0)
		fill_page_list(r, b, at, before + p->seqlen_new, used);
	for (int64_t i = 0; i < p->max_blocks; i++)
		put(r, FMHA_T_BLOCK_TABLE, b, i, next_page(r, used));
	put(r, FMHA_T_CACHE_BATCH_IDX, b, 0, p->cache_batch > 0 ? b % p->cache_batch : b);
	put(r, FMHA_T_LEFTPAD_K, b, 0, up_to(r, before));
}

static int32_t hostile_value(struct runner *r)
{
	const struct fmha_problem *p = &r->f.problem;
	const int32_t values[] = {0,           -1,         1,          INT_MIN,
				  INT_MAX,     p->n_pages, p->batch,   p->seqlen_k,
				  p->seqlen_q, p->total_q, p->total_k, p->n_page_indices,
				  p->page_size};
	int32_t value = values[random_pick(r, N(values))];

	return random_chance(r, 30) ? (int32_t)((uint32_t)value + 1) : value;
}

void bend_scribble(struct runner *r)
{
	int role = FMHA_T_SEQSTART_Q + random_pick(r, FMHA_T_LEFTPAD_K - FMHA_T_SEQSTART_Q + 1);
	int64_t words = (int64_t)(r->f.bindings[role].bytes / sizeof(int32_t));
	volatile int32_t *from = r->f.bindings[role].host;

	if (has(r, (enum fmha_tensor_role)role) && words > 0)
		from[random_pick(r, (int)at_most(words, INT_MAX))] = hostile_value(r);
}

void bend_indices(struct runner *r)
{
	const struct fmha_problem *p = &r->f.problem;
	int64_t at = random_chance(r, 20) ? up_to(r, p->n_page_indices) : 0, used = 0;

	if (has(r, FMHA_T_SEQSTART_Q))
		fill_prefix(r, FMHA_T_SEQSTART_Q, p->seqlen_q, p->total_q);
	if (has(r, FMHA_T_SEQSTART_K))
		fill_prefix(r, FMHA_T_SEQSTART_K, p->seqlen_k, p->total_k);
	put(r, FMHA_T_KV_INDPTR, 0, 0, at);
	for (int64_t b = 0; b < p->batch; b++) {
		int64_t rows = p->seqlen_q;

		if (has(r, FMHA_T_SEQSTART_Q))
			rows = (int64_t)get(r, FMHA_T_SEQSTART_Q, b + 1, 0) -
			       get(r, FMHA_T_SEQSTART_Q, b, 0);
		put(r, FMHA_T_SEQLEN_Q, b, 0, up_to(r, rows));
		fill_keys(r, b, &at, &used);
	}
	if (random_chance(r, 30))
		for (int i = random_pick(r, 4); i >= 0; i--)
			bend_scribble(r);
}

/* ---- for people ---- */

static void print_tensor(const struct runner *r, enum fmha_tensor_role role, FILE *file)
{
	const struct fmha_tensor *tensor = &r->f.problem.tensor[role];
	const char *dtype = fmha_dtype_name(tensor->dtype);
	uint64_t bytes = 0;
	int64_t dims[5];

	problem_extents(&r->f.problem, role, dims);
	(void)problem_span_bytes(&r->f.problem, role, &bytes, NULL);
	(void)fprintf(file, "  %s: %s", proto_roles[role].name, dtype ? dtype : "?");
	for (int i = 0; i < proto_roles[role].n_dims; i++)
		(void)fprintf(file, "%s%lld", i ? " x " : " ", (long long)dims[i]);
	(void)fprintf(file, ", strides");
	for (int i = 0; i < proto_roles[role].n_dims; i++)
		(void)fprintf(file, " %lld", (long long)tensor->stride[i]);
	(void)fprintf(file, ", offset %llu, %llu bytes\n", (unsigned long long)tensor->offset,
		      (unsigned long long)bytes);
}

void bend_print(const struct runner *r, FILE *file)
{
	struct fmha_problem p = r->f.problem;

	(void)fprintf(file, "seed %u, %s", r->first_seed, r->f.decree.device.arch);
	if (r->cpu.n_threads > 0)
		(void)fprintf(file, ", %d threads", r->cpu.n_threads);
	(void)fputc(':', file);
	for (size_t i = 0; i < N(fields); i++)
		if (*field_at(&p, &fields[i]) != 0)
			(void)fprintf(file, " %s %d", fields[i].name, *field_at(&p, &fields[i]));
	(void)fprintf(file, " scale %g soft cap %g dropout %g\n", (double)p.scale,
		      (double)p.logits_soft_cap, (double)p.dropout_p);
	for (int role = 0; role < FMHA_N_TENSORS; role++)
		if (fmha_tensor_present(&p.tensor[role]))
			print_tensor(r, (enum fmha_tensor_role)role, file);
	(void)fflush(file);
}
