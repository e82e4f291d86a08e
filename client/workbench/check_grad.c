/* SPDX-License-Identifier: MIT */
/* check_grad.c: see check_grad.h. */
#include "check_grad.h"

#include <math.h>
#include <stdlib.h>

#include <kernels/reference.h>
#include <proto/error.h>
#include <proto/problem.h>

#include "judge_args.h"
#include "random.h"

/* The loss, from the definition. */
struct loss {
	const struct fmha_problem *problem;
	struct abi_fwd_args args;
	double *o;
	int64_t n;
};

/* Where element @index of the packed tensor lies, in elements. */
static int64_t place(const struct fmha_problem *p, uint32_t role, int64_t index)
{
	int64_t dims[5], stride[5], at = 0;

	problem_extents(p, role, dims);
	problem_strides(p, role, stride);
	for (int i = proto_roles[role].n_dims - 1; i >= 0; i--) {
		at += index % dims[i] * stride[i];
		index /= dims[i];
	}
	return at;
}

static double value_at(const struct fmha_problem *p, uint32_t role, int64_t index)
{
	return reference_load(p->tensor[role].data, p->tensor[role].dtype, place(p, role, index));
}

static int loss_of(const struct loss *loss, double *ret)
{
	double sum = 0;

	for (int64_t i = 0; i < loss->n; i++)
		loss->o[i] = 0; /* rows of nobody are left as they are */
	if (reference_forward(&loss->args, loss->o, NULL, NULL) != 0)
		return -1;
	for (int64_t i = 0; i < loss->n; i++)
		if (loss->o[i] != 0)
			sum += loss->o[i] * value_at(loss->problem, FMHA_T_DO, i);
	*ret = sum;
	return 0;
}

/* The slope of the loss where element @at of @data is moved by @eps both ways, as far as its type lets it.
 * Return: 0, -1 out of memory, 1: the type has no value that near. */
static int slope(const struct loss *loss, const struct fmha_tensor *tensor, int64_t at, double eps,
		 double *ret)
{
	const double value = reference_load(tensor->data, tensor->dtype, at);
	double up, down, above = 0, below = 0;
	int r;

	reference_store(tensor->data, tensor->dtype, at, value + eps);
	up = reference_load(tensor->data, tensor->dtype, at);
	r = loss_of(loss, &above);
	reference_store(tensor->data, tensor->dtype, at, value - eps);
	down = reference_load(tensor->data, tensor->dtype, at);
	if (r == 0)
		r = loss_of(loss, &below);
	reference_store(tensor->data, tensor->dtype, at, value);
	if (r == 0 && up == down)
		return 1;
	*ret = (above - below) / (up - down);
	return r;
}

/* One tensor: elements drawn without looking at them. */
static int compare(const struct loss *loss, const struct fmha_problem *outputs, uint32_t role,
		   double eps, uint64_t *random, struct check_grad *ret, struct fmha_error *err)
{
	static const uint32_t gradients[][2] = {
		{FMHA_T_Q, FMHA_T_DQ}, {FMHA_T_K, FMHA_T_DK}, {FMHA_T_V, FMHA_T_DV}};
	const struct fmha_problem *p = loss->problem;
	const uint32_t input = gradients[role][0], gradient = gradients[role][1];
	const int64_t n = judge_elements(p, input);
	double squares = 0, expected = 0, sum = 0;

	*ret = (struct check_grad){.role = gradient};
	for (int64_t i = 0; i < n && i < CHECK_GRAD_ELEMENTS; i++) {
		int64_t index = n <= CHECK_GRAD_ELEMENTS
					? i
					: (int64_t)(random_next(random) % (uint64_t)n);
		int64_t at = place(p, input, index);
		double whole, half, error;
		int r = slope(loss, &p->tensor[input], at, eps, &whole);

		if (r == 0)
			r = slope(loss, &p->tensor[input], at, eps / 2, &half);
		if (r > 0)
			return fmha_error_set_field(err, FMHA_EINVAL, "eps",
						    "eps %g: %s has no values that near", eps,
						    fmha_dtype_name(p->tensor[input].dtype));
		if (r < 0)
			return fmha_error_set(err, FMHA_ENOMEM, "the loss: out of memory");
		error = fabs(value_at(outputs, gradient, index) - half);
		squares += error * error;
		expected += half * half;
		sum += error;
		ret->max = fmax(ret->max, isnan(error) ? INFINITY : error);
		ret->open = fmax(ret->open, fabs(whole - half));
		ret->n++;
	}
	ret->l2 = expected > 0 ? sqrt(squares / expected) : sqrt(squares);
	ret->mean = ret->n ? sum / (double)ret->n : 0;
	return 0;
}

static double bar_of(const struct judge_verdict *bars, int n, uint32_t role)
{
	for (int i = 0; i < n; i++)
		if (bars[i].role == role)
			return bars[i].bar;
	return 0;
}

int check_grad(const struct fmha_problem *inputs, const struct fmha_problem *outputs,
	       const struct judge_verdict *bars, int n_bars, double eps, uint64_t seed,
	       struct check_grad ret[3], struct fmha_error *err)
{
	struct loss loss = {.problem = inputs};
	struct fmha_problem forward = *inputs;
	uint64_t random = seed;
	int r = 0;

	if (!(eps > 0) || eps > 1)
		return fmha_error_set_field(err, FMHA_EINVAL, "eps", "eps %g: above 0, 1 at most",
					    eps);
	if (inputs->dlse.data)
		return fmha_error_set_field(err, FMHA_ENOTSUP, "tensor.dlse",
					    "the loss that gradients are checked by is of O alone");
	loss.n = judge_elements(inputs, FMHA_T_DO);
	loss.o = malloc(((size_t)loss.n + 1) * sizeof(*loss.o));
	if (!loss.o)
		return fmha_error_set(err, FMHA_ENOMEM, "the loss: out of memory");
	forward.op = FMHA_FORWARD;
	forward.randval.data = NULL; /* drawn again, from the seed */
	judge_fwd_args(&forward, &loss.args);
	for (uint32_t i = 0; i < 3 && r == 0; i++) {
		r = compare(&loss, outputs, i, eps, &random, &ret[i], err);
		/* What moving leaves open goes with eps squared: of half as much, a third of the difference. */
		ret[i].allowed = bar_of(bars, n_bars, ret[i].role) + ret[i].open;
		ret[i].ok = ret[i].max <= ret[i].allowed;
	}
	free(loss.o);
	return r;
}
