/* SPDX-License-Identifier: MIT */
/*
 * Extents that callers say: every role of every kind of problem, every axis, every fault. What may
 * be is written down here a second time, by the role's words in FMHA_TENSORS and nothing else; and
 * whatever is accepted is never read beyond the memory that extents and strides describe.
 * EXTENTS_TABLE in the environment: print how many of which fault each role was given, and refused.
 */
#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <proto/error.h>

#include "problems.h"

/* Everything at once that a backward takes. */
static struct fmha_problem rich_problem(void)
{
	struct fmha_problem p = backward_problem();

	p.bias = tensor(30, FMHA_BF16);
	p.dbias = tensor(31, FMHA_BF16);
	p.sink = tensor(32, FMHA_F32);
	p.dsink = tensor(33, FMHA_F32);
	p.dropout_p = 0.5F;
	p.randval = tensor(34, FMHA_U8);
	p.dlse = tensor(43, FMHA_F32);
	p.seqlen_q_per_batch = tensor(35, FMHA_I32);
	p.seqlen_k_per_batch = tensor(36, FMHA_I32);
	p.mask_bits = tensor(44, FMHA_U8);
	return p;
}

static struct fmha_problem indexed_problem(void)
{
	struct fmha_problem p = forward_problem();

	p.cache_batch_idx = tensor(37, FMHA_I32);
	p.cache_batch = 5;
	p.leftpad_k = tensor(38, FMHA_I32);
	p.alibi_slopes = tensor(39, FMHA_F32);
	p.lse = tensor(40, FMHA_F32);
	p.mask_intervals = tensor(45, FMHA_I32);
	p.mask_endpoints = 5;
	return p;
}

static struct fmha_problem packed_problem(void)
{
	struct fmha_problem p = group_problem();

	p.lse = tensor(41, FMHA_F32);
	p.bias = tensor(42, FMHA_F32);
	p.mask_intervals = tensor(46, FMHA_I32);
	p.mask_endpoints = 3;
	return p;
}

static struct fmha_problem (*const kinds[])(void) = {
	forward_problem, group_problem, paged_problem,  indptr_problem, backward_problem,
	append_problem,  merge_problem, fp8_problem,    rich_problem,   indexed_problem,
	packed_problem,  slots_problem, latent_problem, chosen_problem};

#define N_KINDS (sizeof(kinds) / sizeof(kinds[0]))

enum fault { ONE, LESS, MORE, NOTHING, RANK_MORE, RANK_LESS, EXPANDED, NEGATIVE, SCALAR, N_FAULTS };
static const char *const fault_names[N_FAULTS] = {"1",      "-1",       "+1",       "0",  "rank+1",
						  "rank-1", "expanded", "negative", "[1]"};

static struct tally {
	int tried, refused;
} tallies[FMHA_N_TENSORS][N_FAULTS];

/* As a library of arrays would: the extents that it has, in C order. */
static void say(struct fmha_tensor *t, const int64_t *extent, int n)
{
	int64_t step = 1;

	memset(t->extent, 0, sizeof(t->extent));
	memset(t->stride, 0, sizeof(t->stride));
	t->n_dims = (uint32_t)n;
	for (int i = n - 1; i >= 0; i--) {
		t->extent[i] = extent[i];
		t->stride[i] = step;
		step *= extent[i] > 0 ? extent[i] : 1;
	}
}

static void say_all(struct fmha_problem *p)
{
	for (uint32_t role = 0; role < FMHA_N_TENSORS; role++) {
		int64_t dims[5];

		if (!fmha_tensor_present(&p->tensor[role]))
			continue;
		problem_extents(p, role, dims);
		say(&p->tensor[role], dims, proto_roles[role].n_dims);
	}
}

/* By FMHA_TENSORS: "each may be 1", "batch may be 1"; one number or [batch, heads] for descales. */
static bool may_be_one(const struct fmha_problem *p, enum fmha_tensor_role role, int axis)
{
	if (role == FMHA_T_BIAS)
		return true;
	if (role == FMHA_T_ALIBI_SLOPES)
		return axis == 0;
	if (role == FMHA_T_MASK_INTERVALS || role == FMHA_T_MASK_BITS)
		return axis < (role == FMHA_T_MASK_BITS ? 3 : 2);
	return (role == FMHA_T_Q_DESCALE || role == FMHA_T_K_DESCALE || role == FMHA_T_V_DESCALE) &&
	       axis < 2 && !p->descale_computed;
}

static bool is_written_to(const struct fmha_problem *p, enum fmha_tensor_role role)
{
	if (p->op == FMHA_BACKWARD &&
	    (role == FMHA_T_O || role == FMHA_T_LSE || role == FMHA_T_RANDVAL))
		return false;
	return proto_roles[role].output ||
	       (p->seqlen_new > 0 && (role == FMHA_T_K || role == FMHA_T_V)) ||
	       (p->descale_computed && (role == FMHA_T_K_DESCALE || role == FMHA_T_V_DESCALE));
}

/* Elements from the first to one past the last that the caller's tensor has. */
static int64_t reach_of(const struct fmha_tensor *t)
{
	int64_t last = 0;

	for (uint32_t i = 0; i < t->n_dims; i++) {
		if (t->extent[i] == 0)
			return 0;
		last += (t->extent[i] - 1) * t->stride[i];
	}
	return last + 1;
}

/* Return: 0 or FMHA_EINVAL, which names the role, and its extents when @shape is at fault. */
static int judge(const struct fmha_problem *said, enum fmha_tensor_role role, enum fault fault)
{
	struct fmha_problem p = *said;
	struct fmha_error err = {0};
	char field[48], has[96];
	uint64_t bytes = 0;
	int r = problem_settle(&p, &err), used;

	if (r == 0)
		r = problem_check(&p, &err);
	tallies[role][fault].tried++;
	tallies[role][fault].refused += r < 0;
	if (r == 0) {
		assert_int_equal(problem_span_bytes(&p, role, &bytes, &err), 0);
		assert_true(bytes <= (uint64_t)reach_of(&said->tensor[role]) *
					     fmha_dtype_bytes(p.tensor[role].dtype));
		return 0;
	}
	assert_int_equal(r, FMHA_EINVAL);
	(void)snprintf(field, sizeof(field), "tensor.%s", proto_roles[role].name);
	if (strncmp(err.field, field, strlen(field)) != 0)
		fail_msg("%s, fault %s: field '%s': %s", field, fault_names[fault], err.field,
			 err.msg);
	if (fault == EXPANDED || fault == NEGATIVE)
		return r;
	used = snprintf(has, sizeof(has), "is [");
	for (uint32_t i = 0; i < said->tensor[role].n_dims; i++)
		used += snprintf(has + used, sizeof(has) - (size_t)used, "%s%" PRId64,
				 i ? ", " : "", said->tensor[role].extent[i]);
	if (!strstr(err.msg, has) || !strstr(err.msg, " is wanted ("))
		fail_msg("%s, fault %s: '%s' says not '%s'", field, fault_names[fault], err.msg,
			 has);
	return r;
}

static void bend_extents(const struct fmha_problem *base, enum fmha_tensor_role role)
{
	int n = proto_roles[role].n_dims;
	int64_t dims[5], bent[6] = {0};

	problem_extents(base, role, dims);
	for (int axis = 0; axis < n; axis++) {
		const int64_t values[] = {
			[ONE] = 1, [LESS] = dims[axis] - 1, [MORE] = dims[axis] + 1, [NOTHING] = 0};

		for (enum fault fault = ONE; fault <= NOTHING; fault++) {
			struct fmha_problem p = *base;
			bool fine = values[fault] == dims[axis] ||
				    (values[fault] == 1 && may_be_one(base, role, axis));

			/* A gradient is as its bias: bent alone it is wrong, bent with it right. */
			if (role == FMHA_T_BIAS && fmha_tensor_present(&p.dbias))
				continue;
			if (values[fault] < 0)
				continue;
			memcpy(bent, dims, sizeof(dims));
			bent[axis] = values[fault];
			say(&p.tensor[role], bent, n);
			if ((judge(&p, role, fault) == 0) != fine)
				fail_msg("%s, axis %d of %" PRId64 ": %" PRId64 " is %s",
					 proto_roles[role].name, axis, dims[axis], values[fault],
					 fine ? "refused" : "accepted");
		}
	}
}

/* Leading axes may be missing where they are, or broadcast, 1; a further one never fits. */
static void bend_rank(const struct fmha_problem *base, enum fmha_tensor_role role)
{
	bool trailing = role == FMHA_T_Q_DESCALE || role == FMHA_T_K_DESCALE ||
			role == FMHA_T_V_DESCALE;
	int n = proto_roles[role].n_dims;
	struct fmha_problem p = *base;
	int64_t dims[5], bent[5];
	bool fine;

	problem_extents(base, role, dims);
	if (n < 5) {
		bent[0] = 1;
		memcpy(bent + 1, dims, (size_t)n * sizeof(*dims));
		say(&p.tensor[role], bent, n + 1);
		assert_int_equal(judge(&p, role, RANK_MORE), FMHA_EINVAL);
	}
	if (n == 1)
		return;
	p = *base;
	say(&p.tensor[role], trailing ? dims : dims + 1, n - 1);
	fine = trailing ? dims[n - 1] == 1 : dims[0] == 1 || may_be_one(base, role, 0);
	if (role == FMHA_T_BIAS && fmha_tensor_present(&p.dbias))
		return; /* which has not changed with it */
	if ((judge(&p, role, RANK_LESS) == 0) != fine)
		fail_msg("%s without an axis is %s", proto_roles[role].name,
			 fine ? "refused" : "accepted");
	p = *base;
	bent[0] = 1;
	say(&p.tensor[role], bent, 1);
	fine = (trailing && !(is_written_to(base, role) && dims[0] * dims[1] * dims[2] > 1)) ||
	       (role == FMHA_T_BIAS && n == 4);
	if ((judge(&p, role, SCALAR) == 0) != fine)
		fail_msg("%s of one number is %s", proto_roles[role].name,
			 fine ? "refused" : "accepted");
}

static void bend_strides(const struct fmha_problem *base, enum fmha_tensor_role role)
{
	int n = proto_roles[role].n_dims;
	int64_t dims[5];

	problem_extents(base, role, dims);
	for (int axis = 0; axis < n; axis++) {
		struct fmha_problem p = *base;
		bool bytes = role == FMHA_T_K && p.kv_layout == FMHA_KV_LATENT_FP8 && axis == 3;

		if (dims[axis] < 2)
			continue;
		p.tensor[role].stride[axis] = 0;
		/* Inputs may lie on themselves; what a kernel wants dense, dispatch says. */
		assert_int_equal(judge(&p, role, EXPANDED),
				 is_written_to(base, role) || bytes ? FMHA_EINVAL : 0);
		p.tensor[role].stride[axis] = -1;
		assert_int_equal(judge(&p, role, NEGATIVE), FMHA_EINVAL);
	}
}

static void every_role_every_axis_every_fault(void **state)
{
	(void)state;
	for (size_t kind = 0; kind < N_KINDS; kind++) {
		struct fmha_problem base = kinds[kind](), settled;
		struct fmha_error err = {0};

		say_all(&base);
		settled = base;
		assert_int_equal(problem_settle(&settled, &err), 0);
		if (problem_check(&settled, &err) != 0)
			fail_msg("kind %zu: %s", kind, err.msg);
		for (uint32_t role = 0; role < FMHA_N_TENSORS; role++) {
			if (!fmha_tensor_present(&base.tensor[role]))
				continue;
			bend_extents(&base, role);
			bend_rank(&base, role);
			bend_strides(&base, role);
		}
	}
	for (uint32_t role = 0; role < FMHA_N_TENSORS; role++)
		if (role != FMHA_T_WORKSPACE && !tallies[role][MORE].tried && role != FMHA_T_BIAS)
			fail_msg("no problem has a %s", proto_roles[role].name);
	if (!getenv("EXTENTS_TABLE"))
		return;
	for (int fault = 0; fault < N_FAULTS; fault++)
		print_message("%s%9s", fault ? "" : "                  ", fault_names[fault]);
	for (uint32_t role = 0; role < FMHA_N_TENSORS; role++) {
		print_message("\n%-18s", proto_roles[role].name);
		for (int fault = 0; fault < N_FAULTS; fault++)
			print_message(" %3d of %-2d", tallies[role][fault].refused,
				      tallies[role][fault].tried);
	}
	print_message("\n");
}

/* All of these had all strides 0 and were read as packed. */
static void zero_strides_are_literal_with_extents(void **state)
{
	struct fmha_problem p = forward_problem();
	struct fmha_error err = {0};
	int64_t stride[5];
	uint64_t bytes;

	(void)state;
	p.bias = tensor(50, FMHA_F32);
	p.bias.n_dims = 4;
	for (int i = 0; i < 4; i++)
		p.bias.extent[i] = 1;
	assert_int_equal(problem_settle(&p, &err), 0);
	assert_int_equal(problem_check(&p, &err), 0);
	assert_int_equal(problem_span_bytes(&p, FMHA_T_BIAS, &bytes, &err), 0);
	assert_int_equal(bytes, 4);

	p = forward_problem();
	p.seqlen_k_per_batch = tensor(51, FMHA_I32);
	p.seqlen_k_per_batch.n_dims = 1;
	p.seqlen_k_per_batch.extent[0] = 2; /* torch.tensor(7).expand(2) */
	assert_int_equal(problem_settle(&p, &err), 0);
	assert_int_equal(problem_check(&p, &err), 0);
	problem_strides(&p, FMHA_T_SEQLEN_K, stride);
	assert_int_equal(stride[0], 0);
	assert_int_equal(problem_span_bytes(&p, FMHA_T_SEQLEN_K, &bytes, &err), 0);
	assert_int_equal(bytes, 4);
	/* What nobody has said means what it always did. */
	p.seqlen_k_per_batch = tensor(51, FMHA_I32);
	problem_strides(&p, FMHA_T_SEQLEN_K, stride);
	assert_int_equal(stride[0], 1);
}

/* An expanded bias has a gradient for each of its elements, one of extent 1 the sum. */
static void gradients_have_the_extents_of_the_bias(void **state)
{
	struct fmha_problem base = rich_problem();
	struct fmha_error err = {0};
	int64_t stride[5];

	(void)state;
	say_all(&base);
	for (int axis = 0; axis < 4; axis++) {
		struct fmha_problem p = base;
		int64_t dims[5];

		p.bias.stride[axis] = 0;
		assert_int_equal(problem_settle(&p, &err), 0);
		problem_strides(&p, FMHA_T_DBIAS, stride);
		assert_int_equal(stride[axis], base.dbias.stride[axis]);

		problem_extents(&base, FMHA_T_BIAS, dims);
		dims[axis] = 1;
		p = base;
		say(&p.bias, dims, 4);
		assert_int_equal(problem_settle(&p, &err), FMHA_EINVAL); /* dbias is larger */
		assert_string_equal(err.field, "tensor.dbias");
		p = base;
		say(&p.bias, dims, 4);
		say(&p.dbias, dims, 4);
		assert_int_equal(problem_settle(&p, &err), 0);
		assert_int_equal(problem_check(&p, &err), 0);
		problem_strides(&p, FMHA_T_DBIAS, stride);
		assert_int_equal(stride[axis], 0);
	}
}

/* [total, heads, hdim] as people have them. */
static void packed_tensors_lack_the_batch(void **state)
{
	struct fmha_problem p = packed_problem();
	struct fmha_error err = {0};
	int64_t dims[5];

	(void)state;
	say_all(&p);
	for (uint32_t role = 0; role < FMHA_N_TENSORS; role++) {
		problem_extents(&p, role, dims);
		if (fmha_tensor_present(&p.tensor[role]) && dims[0] == 1 &&
		    proto_roles[role].n_dims > 2)
			say(&p.tensor[role], dims + 1, proto_roles[role].n_dims - 1);
	}
	assert_int_equal(p.q.n_dims, 3);
	assert_int_equal(problem_settle(&p, &err), 0);
	assert_int_equal(problem_check(&p, &err), 0);
}

static void a_vectorized_cache_has_five_dimensions(void **state)
{
	struct fmha_problem base = paged_problem(), p;
	const int64_t k[] = {9, 2, 8, 16, 8}, v[] = {9, 2, 2, 32, 8};
	struct fmha_error err = {0};

	(void)state;
	base.kv_layout = FMHA_KV_VECTORIZED;
	say(&base.k, k, 5);
	say(&base.v, v, 5);
	p = base;
	assert_int_equal(problem_settle(&p, &err), 0);
	assert_int_equal(problem_check(&p, &err), 0);
	for (int axis = 0; axis < 5; axis++) {
		p = base;
		p.k.extent[axis]++;
		assert_int_equal(problem_settle(&p, &err), FMHA_EINVAL);
		assert_string_equal(err.field, "tensor.k");
		p = base;
		p.v.stride[axis]++;
		assert_int_equal(problem_settle(&p, &err), FMHA_EINVAL);
		assert_string_equal(err.field, "tensor.v.stride");
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(every_role_every_axis_every_fault),
		cmocka_unit_test(zero_strides_are_literal_with_extents),
		cmocka_unit_test(gradients_have_the_extents_of_the_bias),
		cmocka_unit_test(packed_tensors_lack_the_batch),
		cmocka_unit_test(a_vectorized_cache_has_five_dimensions),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
