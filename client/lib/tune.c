/* SPDX-License-Identifier: MIT */
/* tune.c: having a device measure its kernels. */
#include "client.h"

#include <stdio.h>
#include <string.h>

#include <proto/problem.h>

#include "deadline.h"

#define MARGIN_MS 60000
#define HOUR_MS   3600000

static int make_params(const struct fmha_problem *problem, const struct fmha_tune_options *options,
		       struct proto_tune_params *params, struct fmha_error *err)
{
	const char *shape = options && options->shape ? options->shape : "";

	if (!problem && !*shape)
		return fmha_error_set_field(err, FMHA_EINVAL, "problem",
					    "fmha_tune: neither a problem nor a shape");
	if (strlen(shape) >= sizeof(params->shape))
		return fmha_error_set_field(err, FMHA_EINVAL, "shape", "shape: at most %zu bytes",
					    sizeof(params->shape) - 1);
	(void)snprintf(params->shape, sizeof(params->shape), "%s", shape);
	if (problem)
		params->problem = *problem;
	else
		fmha_problem_init(&params->problem);
	if (problem_settle(&params->problem, err) < 0)
		return FMHA_EINVAL;
	if (options) {
		params->budget_ms = options->budget_ms;
		params->again = options->again != 0;
		params->thorough = options->thorough != 0;
	}
	return 0;
}

/* As long as the caller says, or as measuring may take. */
static int64_t deadline_of(const struct fmha_tune_options *options)
{
	if (options && options->timeout_ms)
		return deadline_after_ms(options->timeout_ms);
	return deadline_after_ms(options && options->budget_ms ? options->budget_ms + MARGIN_MS
							       : HOUR_MS);
}

int fmha_tune(struct fmha_device *device, const struct fmha_problem *problem,
	      const struct fmha_tune_options *options, struct fmha_tune_result *ret_result,
	      struct fmha_error *err)
{
	struct proto_tune_params params = {0};
	struct proto_tune_result result;
	int r = client_check(device && ret_result ? device->client : NULL, __func__, err);

	if (r == 0 && options)
		r = check_struct_size(options->struct_size, sizeof(*options), "fmha_tune_options",
				      err);
	if (r == 0 && problem)
		r = check_struct_size(problem->struct_size, sizeof(*problem), "fmha_problem", err);
	if (r == 0)
		r = make_params(problem, options, &params, err);
	if (r == 0)
		r = link_call(&device->worker, PROTO_TUNE, &params, -1, deadline_of(options),
			      &result, NULL, err);
	if (r < 0)
		return r;
	*ret_result = (struct fmha_tune_result){.n_splits = result.n_splits,
						.us = result.us,
						.n_candidates = result.n_candidates,
						.n_measured = result.n_measured,
						.n_failed = result.n_failed};
	_Static_assert(sizeof(ret_result->shape) == sizeof(result.shape) &&
			       sizeof(ret_result->kernel) == sizeof(result.kernel),
		       "copied as they are");
	memcpy(ret_result->shape, result.shape, sizeof(result.shape));
	memcpy(ret_result->kernel, result.kernel, sizeof(result.kernel));
	return 0;
}
