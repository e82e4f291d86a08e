/* SPDX-License-Identifier: MIT */
/* plan.c: validated problems and their runs. */
#include "client.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <proto/problem.h>

#define WAIT_WORTH_SLEEPING_NS 50000

/* ---- registration ---- */

/* Our buffer ids become the worker's. */
static int translate(struct fmha_device *device, struct fmha_problem *problem, struct connection *c,
		     uint64_t generation, int64_t deadline, struct fmha_error *err)
{
	for (uint32_t role = 0; role < FMHA_N_TENSORS; role++) {
		struct fmha_tensor *tensor = &problem->tensor[role];
		int r;

		if (tensor->buffer == 0)
			continue;
		r = buffer_bind(device, tensor->buffer, c, generation, deadline, &tensor->buffer,
				err);
		if (r == FMHA_ENOENT && err && !err->field[0])
			(void)snprintf(err->field, sizeof(err->field), "tensor.%s.buffer",
				       proto_roles[role].name);
		if (r < 0)
			return r;
	}
	return 0;
}

static void info_from(const struct proto_plan_result *from, struct fmha_plan_info *ret_info)
{
	_Static_assert(FMHA_MAX_STAGES == PROTO_MAX_STAGES &&
			       FMHA_KERNEL_BYTES == PROTO_KERNEL_BYTES,
		       "stages are copied as they are");

	memset(ret_info, 0, sizeof(*ret_info));
	ret_info->workspace_bytes = from->workspace_bytes;
	ret_info->flops = from->flops;
	ret_info->n_stages = from->n_stages;
	for (uint32_t i = 0; i < from->n_stages && i < FMHA_MAX_STAGES; i++) {
		struct fmha_stage_info *stage = &ret_info->stages[i];

		memcpy(stage->family, from->stages[i].family, sizeof(stage->family));
		memcpy(stage->kernel, from->stages[i].kernel, sizeof(stage->kernel));
		stage->workspace_offset = from->stages[i].workspace_offset;
		stage->workspace_bytes = from->stages[i].workspace_bytes;
	}
}

/* Inside the plan's lock. */
static int register_plan(void *object, struct connection *c, uint64_t generation, int64_t deadline,
			 uint64_t *ret_worker_id, struct fmha_error *err)
{
	struct fmha_plan *plan = object;
	struct proto_plan_params *params = malloc(sizeof(*params));
	struct proto_plan_result result = {0};
	int r;

	if (!params)
		return fmha_error_set(err, FMHA_ENOMEM, "plan: out of memory");
	params->problem = plan->problem;
	params->n_kernels = plan->n_kernels;
	memcpy(params->kernels, plan->kernels, sizeof(params->kernels));
	r = translate(plan->device, &params->problem, c, generation, deadline, err);
	if (r == 0)
		r = connection_call(c, PROTO_PLAN, params, -1, deadline, &result, NULL, err);
	free(params);
	if (r < 0)
		return r;
	info_from(&result, &plan->info);
	*ret_worker_id = result.plan;
	return 0;
}

/* ---- life ---- */

int plan_names(const struct fmha_plan_options *options,
	       struct proto_kernel ret_kernels[PROTO_MAX_STAGES], uint32_t *ret_n,
	       struct fmha_error *err)
{
	int r = options ? check_struct_size(options->struct_size, sizeof(*options),
					    "fmha_plan_options", err)
			: 0;

	*ret_n = options && r == 0 ? options->n_kernels : 0;
	if (*ret_n > PROTO_MAX_STAGES)
		return fmha_error_set_field(err, FMHA_EINVAL, "kernels", "%u kernels: at most %d",
					    *ret_n, PROTO_MAX_STAGES);
	for (uint32_t i = 0; i < *ret_n; i++) {
		const char *name = options->kernels ? options->kernels[i] : NULL;

		if (!name || strlen(name) >= sizeof(ret_kernels[i].kernel))
			return fmha_error_set_field(err, FMHA_EINVAL, "kernels",
						    "kernels[%u]: no name, or longer than %zu", i,
						    sizeof(ret_kernels[i].kernel) - 1);
		(void)snprintf(ret_kernels[i].kernel, sizeof(ret_kernels[i].kernel), "%s", name);
	}
	return r;
}

int plan_new(struct fmha_device *device, const struct fmha_problem *problem,
	     const struct fmha_plan_options *options, bool internal, int64_t deadline,
	     struct fmha_plan **ret_plan, struct fmha_error *err)
{
	struct fmha_plan *plan = calloc(1, sizeof(*plan));
	int r;

	if (!plan)
		return fmha_error_set(err, FMHA_ENOMEM, "plan: out of memory");
	r = plan_names(options, plan->kernels, &plan->n_kernels, err);
	if (r == 0)
		r = timed_lock_init(&plan->at_worker.lock, err);
	if (r < 0) {
		free(plan);
		return r;
	}
	plan->refs = 1;
	plan->device = internal ? device : device_ref(device);
	plan->internal = internal;
	plan->problem = *problem;
	r = registration_begin(&plan->at_worker, register_plan, plan, device, deadline, err);
	if (r < 0) {
		plan = plan_unref(plan);
		return r;
	}
	*ret_plan = plan;
	return 0;
}

struct fmha_plan *plan_ref(struct fmha_plan *plan)
{
	(void)__atomic_add_fetch(&plan->refs, 1, __ATOMIC_RELAXED);
	return plan;
}

struct fmha_plan *plan_unref(struct fmha_plan *plan)
{
	struct proto_plan_release_params params;

	if (!plan || __atomic_sub_fetch(&plan->refs, 1, __ATOMIC_ACQ_REL) != 0)
		return NULL;
	/* A run that is in flight ends first. */
	params.plan = plan->at_worker.worker_id;
	registration_end(&plan->at_worker, plan->device, PROTO_PLAN_RELEASE, &params);
	timed_lock_deinit(&plan->at_worker.lock);
	if (!plan->internal)
		(void)device_unref(plan->device);
	free(plan);
	return NULL;
}

int fmha_plan_new(struct fmha_device *device, const struct fmha_problem *problem,
		  const struct fmha_plan_options *options, struct fmha_plan **ret_plan,
		  struct fmha_error *err)
{
	struct fmha_problem settled;
	int r;

	r = client_check(device && problem && ret_plan ? device->client : NULL, __func__, err);
	if (r < 0)
		return r;
	r = check_struct_size(problem->struct_size, sizeof(*problem), "fmha_problem", err);
	if (r < 0)
		return r;
	for (uint32_t role = 0; role < FMHA_N_TENSORS; role++) {
		if (problem->tensor[role].data && problem->tensor[role].buffer == 0) {
			char field[48];

			(void)snprintf(field, sizeof(field), "tensor.%s.data",
				       proto_roles[role].name);
			return fmha_error_set_field(err, FMHA_EINVAL, field,
						    "%s: a plan's tensors lie in buffers", field);
		}
	}
	settled = *problem;
	r = problem_settle(&settled, err);
	if (r == 0)
		r = problem_check(&settled, err);
	if (r < 0)
		return r;
	return plan_new(device, &settled, options, false, client_deadline(device->client), ret_plan,
			err);
}

struct fmha_plan *fmha_plan_free(struct fmha_plan *plan)
{
	return plan_unref(plan);
}

int fmha_plan_info(struct fmha_plan *plan, struct fmha_plan_info *ret_info, struct fmha_error *err)
{
	int r;

	r = client_check(plan && ret_info ? plan->device->client : NULL, __func__, err);
	if (r < 0)
		return r;
	r = timed_lock_take(&plan->at_worker.lock, client_deadline(plan->device->client), err);
	if (r < 0)
		return r;
	*ret_info = plan->info;
	timed_lock_give(&plan->at_worker.lock);
	return 0;
}

/* ---- runs ---- */

static int check_fences(const struct fmha_fence *fences, uint32_t n, const char *field,
			struct fmha_error *err)
{
	for (uint32_t i = 0; i < n; i++) {
		if (fences[i].event && (fences[i].buffer || fences[i].offset || fences[i].value))
			return fmha_error_set_field(err, FMHA_EINVAL, field,
						    "%s[%u]: an event has no buffer, offset or "
						    "value",
						    field, i);
	}
	return 0;
}

int check_run_options(const struct fmha_run_options *options, struct fmha_error *err)
{
	int r;

	if (!options)
		return 0;
	r = check_struct_size(options->struct_size, sizeof(*options), "fmha_run_options", err);
	if (r < 0)
		return r;
	if (options->n_rebinds > FMHA_MAX_REBINDS)
		return fmha_error_set_field(err, FMHA_EINVAL, "n_rebinds",
					    "n_rebinds %u: at most %u", options->n_rebinds,
					    FMHA_MAX_REBINDS);
	if (options->n_waits > FMHA_MAX_FENCES || options->n_signals > FMHA_MAX_FENCES)
		return fmha_error_set_field(err, FMHA_EINVAL, "n_waits",
					    "%u waits and %u signals: at most %d each",
					    options->n_waits, options->n_signals, FMHA_MAX_FENCES);
	if ((options->n_waits > 0 && !options->waits) ||
	    (options->n_signals > 0 && !options->signals))
		return fmha_error_set_field(err, FMHA_EINVAL, "waits", "waits or signals is NULL");
	if (options->n_rebinds > 0 && !options->rebinds)
		return fmha_error_set_field(err, FMHA_EINVAL, "rebinds", "rebinds is NULL");
	for (uint32_t i = 0; i < options->n_rebinds; i++) {
		if (options->rebinds[i].role >= FMHA_N_TENSORS)
			return fmha_error_set_field(err, FMHA_EINVAL, "rebinds",
						    "rebinds[%u].role %u: no such role", i,
						    options->rebinds[i].role);
	}
	r = check_fences(options->waits, options->n_waits, "waits", err);
	return r < 0 ? r : check_fences(options->signals, options->n_signals, "signals", err);
}

int64_t run_deadline(const struct fmha_device *device, const struct fmha_run_options *options)
{
	if (options && options->timeout_ms)
		return deadline_after_ms(options->timeout_ms);
	return client_deadline(device->client);
}

static int fill_fences(struct fmha_device *device, const struct fmha_fence *fences, uint32_t n,
		       struct connection *c, uint64_t generation, int64_t deadline,
		       struct proto_fence *ret_fences, struct fmha_error *err)
{
	int r = 0;

	for (uint32_t i = 0; i < n && r == 0; i++) {
		const struct fmha_fence *fence = &fences[i];

		ret_fences[i] = (struct proto_fence){.offset = fence->offset,
						     .value = fence->value};
		if (fence->event)
			r = event_bind(device, fence->event, c, generation, deadline,
				       &ret_fences[i].event, err);
		else
			r = buffer_bind(device, fence->buffer, c, generation, deadline,
					&ret_fences[i].buffer, err);
	}
	return r;
}

static int fill_run(struct fmha_plan *plan, const struct fmha_run_options *options,
		    struct connection *c, uint64_t generation, int64_t deadline,
		    struct proto_run_params *params, struct fmha_error *err)
{
	_Static_assert(FMHA_MAX_REBINDS == PROTO_MAX_REBINDS, "rebinds are copied as they are");
	int r;

	memset(params, 0, sizeof(*params));
	r = registration_bind(&plan->at_worker, register_plan, plan, c, generation, deadline,
			      &params->plan, err);
	if (r < 0)
		return r;
	params->timeout_ms = deadline_left_ms(deadline);
	if (!options)
		return 0;
	params->has_dropout_state = options->has_dropout_state != 0;
	params->dropout_seed = options->dropout_seed;
	params->dropout_offset = options->dropout_offset;
	params->n_rebinds = options->n_rebinds;
	for (uint32_t i = 0; i < options->n_rebinds; i++) {
		params->rebinds[i].role = options->rebinds[i].role;
		params->rebinds[i].offset = options->rebinds[i].offset;
		r = buffer_bind(plan->device, options->rebinds[i].buffer, c, generation, deadline,
				&params->rebinds[i].buffer, err);
		if (r < 0)
			return r;
	}
	params->n_waits = options->n_waits;
	params->n_signals = options->n_signals;
	r = fill_fences(plan->device, options->waits, options->n_waits, c, generation, deadline,
			params->waits, err);
	if (r == 0)
		r = fill_fences(plan->device, options->signals, options->n_signals, c, generation,
				deadline, params->signals, err);
	return r;
}

/*
 * A connection that turns out to be dead before a byte of the run has left it is replaced: the
 * worker restarted while nothing was in flight, which is nobody's failure.
 */
int plan_start(struct fmha_plan *plan, const struct fmha_run_options *options, int64_t deadline,
	       struct connection **ret_connection, struct pending **ret_pending,
	       struct fmha_error *err)
{
	int r = FMHA_EDEVICE;
	bool again = true;

	for (int attempt = 0; attempt < 3 && r == FMHA_EDEVICE && again; attempt++) {
		struct proto_run_params params;
		struct connection *c;
		uint64_t generation;

		r = link_get(&plan->device->worker, deadline, &c, &generation, err);
		if (r < 0)
			return r;
		r = fill_run(plan, options, c, generation, deadline, &params, err);
		if (r >= 0)
			r = connection_submit(c, PROTO_RUN, &params, -1, deadline, ret_pending,
					      &again, err);
		if (r >= 0) {
			*ret_connection = c;
			return 0;
		}
		c = connection_unref(c);
	}
	return r;
}

int plan_wait(struct fmha_plan *plan, const struct fmha_run_options *options, struct connection *c,
	      struct pending *pending, int64_t deadline, struct fmha_error *err)
{
	bool fenced = options && options->n_waits + options->n_signals > 0;
	int64_t lasts = fenced ? 0 : __atomic_load_n(&plan->lasts_ns, __ATOMIC_RELAXED);
	int r = connection_wait_expecting(c, pending, &lasts, deadline, err);

	/* Shorter waits spin by a rule of their own: proto/spin.h. */
	if (r == 0 && !fenced)
		__atomic_store_n(&plan->lasts_ns, lasts < WAIT_WORTH_SLEEPING_NS ? 0 : lasts,
				 __ATOMIC_RELAXED);
	return r;
}

int plan_outcome(const struct pending *pending, struct fmha_run_result *ret_result,
		 struct fmha_error *err)
{
	struct proto_run_result result;

	if (pending->error.code != FMHA_OK) {
		if (err)
			*err = pending->error;
		return pending->error.code;
	}
	memcpy(&result, pending->result, sizeof(result));
	if (ret_result) {
		ret_result->queued_ns = result.queued_ns;
		ret_result->kernel_ns = result.kernel_ns;
	}
	return 0;
}

void plan_cancel(struct connection *connection, uint32_t request, int64_t deadline)
{
	const struct proto_cancel_params params = {.request = request};
	struct pending *pending;

	if (connection_submit(connection, PROTO_CANCEL, &params, -1, deadline, &pending, NULL,
			      NULL) == 0)
		connection_forget(connection, pending, NULL, NULL);
}

int fmha_plan_run(struct fmha_plan *plan, const struct fmha_run_options *options,
		  struct fmha_run_result *ret_result, struct fmha_error *err)
{
	struct connection *c;
	struct pending *pending;
	int64_t deadline;
	int r;

	r = client_check(plan ? plan->device->client : NULL, __func__, err);
	if (r < 0)
		return r;
	r = check_run_options(options, err);
	if (r < 0)
		return r;
	deadline = run_deadline(plan->device, options);
	r = plan_start(plan, options, deadline, &c, &pending, err);
	if (r < 0)
		return r;
	r = plan_wait(plan, options, c, pending, deadline, err);
	if (r == 0)
		r = plan_outcome(pending, ret_result, err);
	else
		plan_cancel(c, pending->id, deadline_after_ms(0));
	connection_forget(c, pending, NULL, NULL);
	c = connection_unref(c);
	return r;
}
