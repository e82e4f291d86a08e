/* SPDX-License-Identifier: MIT */
/* forward.c: one call from problem to result. */
#include "client.h"

#include <stdlib.h>

#include <proto/cleanup.h>
#include <proto/problem.h>

/* Stands for the arena in a staged problem until one is chosen; no buffer has this id. */
#define ARENA_ID UINT64_MAX

/* Where @problem's tensors differ from the plan's. Return: how many, or -1 for too many. */
static int make_rebinds(const struct fmha_problem *problem, const struct fmha_plan *plan,
			struct fmha_rebind rebinds[FMHA_MAX_REBINDS])
{
	int n = 0;

	for (uint32_t role = 0; role < FMHA_N_TENSORS; role++) {
		const struct fmha_tensor *want = &problem->tensor[role];
		const struct fmha_tensor *have = &plan->problem.tensor[role];

		if (want->buffer == have->buffer && want->offset == have->offset)
			continue;
		if (n == FMHA_MAX_REBINDS)
			return -1;
		rebinds[n++] = (struct fmha_rebind){
			.role = role, .buffer = want->buffer, .offset = want->offset};
	}
	return n;
}

/* The plan for @problem, whose tensors all lie in buffers, and the rebinds that make it fit. @fresh:
 * not the one that is kept, which then is this one. */
static int plan_for(struct fmha_device *device, const struct fmha_problem *problem, bool checked,
		    bool fresh, int64_t deadline, struct fmha_plan **ret_plan,
		    struct fmha_rebind rebinds[FMHA_MAX_REBINDS], uint32_t *ret_n_rebinds,
		    struct fmha_error *err)
{
	struct cache_key key;
	struct fmha_plan *plan;
	bool replace = fresh;
	int r;

	cache_key_of(problem, &key);
	plan = fresh ? NULL : cache_find(device, &key);
	if (plan) {
		r = make_rebinds(problem, plan, rebinds);
		if (r >= 0) {
			*ret_n_rebinds = (uint32_t)r;
			*ret_plan = plan;
			return 0;
		}
		plan = plan_unref(plan);
		replace = true; /* too many rebinds */
	}
	if (!checked) {
		r = problem_check(problem, err);
		if (r < 0)
			return r;
	}
	r = plan_new(device, problem, NULL, true, deadline, &plan, err);
	if (r < 0)
		return r;
	cache_put(device, &key, plan, replace);
	*ret_n_rebinds = 0;
	*ret_plan = plan;
	return 0;
}

/* One attempt. @arena: NULL when nothing is staged; *@ret_arena_held is set when the run keeps it. */
static int run_once(struct fmha_device *device, const struct fmha_problem *problem, bool checked,
		    bool fresh, const struct fmha_run_options *options, int64_t deadline,
		    struct arena *arena, bool *ret_arena_held, struct fmha_run_result *ret_result,
		    struct fmha_error *err)
{
	struct fmha_rebind rebinds[FMHA_MAX_REBINDS];
	struct fmha_run_options run = {.struct_size = sizeof(run), .rebinds = rebinds};
	struct connection *c;
	struct pending *pending;
	struct fmha_plan *plan;
	int r;

	*ret_arena_held = false;
	r = plan_for(device, problem, checked, fresh, deadline, &plan, rebinds, &run.n_rebinds,
		     err);
	if (r < 0)
		return r;
	if (options && options->has_dropout_state) {
		run.has_dropout_state = 1;
		run.dropout_seed = options->dropout_seed;
		run.dropout_offset = options->dropout_offset;
	} else if (problem->dropout_p > 0) {
		run.has_dropout_state = 1;
		run.dropout_seed = problem->dropout_seed;
		run.dropout_offset = problem->dropout_offset;
	}
	r = plan_start(plan, &run, deadline, &c, &pending, err);
	if (r < 0) {
		plan = plan_unref(plan);
		return r;
	}
	r = plan_wait(plan, &run, c, pending, deadline, err);
	plan = plan_unref(plan);
	if (r == 0) {
		r = plan_outcome(pending, ret_result, err);
		connection_forget(c, pending, NULL, NULL);
	} else {
		plan_cancel(c, pending->id, deadline_after_ms(0));
		*ret_arena_held = arena != NULL;
		connection_forget(c, pending, arena ? arena_on_answer : NULL, arena);
	}
	c = connection_unref(c);
	/* The kernels of a plan that was kept may want more of where tensors begin than these keep, which
	 * memory that was imported at an odd offset does not tell here. */
	if (r == FMHA_EINVAL && run.n_rebinds > 0)
		return run_once(device, problem, true, true, options, deadline, arena,
				ret_arena_held, ret_result, err);
	return r;
}

/*
 * An arena in memory that the worker of now has. A worker empties what it has made when the connection
 * ends that asked for it, unless a later one has it too: so what is staged must be staged after that.
 */
static int take_attached(struct fmha_device *device, uint64_t bytes, int64_t deadline,
			 struct arena **ret_arena, uint64_t *ret_generation, struct fmha_error *err)
{
	int r;

	do {
		r = arena_take(device, bytes, deadline, ret_arena, err);
		if (r < 0)
			return r;
		r = buffer_attach((*ret_arena)->buffer, deadline, ret_generation, err);
		if (r == FMHA_ENOENT)
			arena_discard(*ret_arena);
		else if (r < 0)
			arena_give_back(*ret_arena);
	} while (r == FMHA_ENOENT);
	return r;
}

/* One attempt including the staging. */
static int attempt(struct fmha_device *device, struct fmha_problem *problem,
		   const struct stage *stage, const struct fmha_run_options *options,
		   int64_t deadline, struct fmha_run_result *ret_result, struct fmha_error *err)
{
	struct arena *arena;
	uint64_t generation;
	bool held;
	int r;

	if (stage->n_tensors == 0)
		return run_once(device, problem, false, false, options, deadline, NULL, &held,
				ret_result, err);

	r = take_attached(device, stage->bytes, deadline, &arena, &generation, err);
	if (r < 0)
		return r;
	for (uint32_t i = 0; i < stage->n_tensors; i++)
		problem->tensor[stage->tensors[i].role].buffer = arena->buffer->id;
	stage_in(stage, arena->buffer->data);
	r = run_once(device, problem, true, false, options, deadline, arena, &held, ret_result,
		     err);
	if (r == 0 && arena->buffer->at_worker.generation != generation)
		r = fmha_error_set(err, FMHA_ECONN, "the connection was lost before the run");
	if (r == 0)
		stage_out(stage, arena->buffer->data);
	if (!held)
		arena_give_back(arena);
	return r;
}

static int has_data(const struct fmha_problem *problem)
{
	for (uint32_t role = 0; role < FMHA_N_TENSORS; role++) {
		if (problem->tensor[role].data && problem->tensor[role].buffer == 0)
			return 1;
	}
	return 0;
}

static int call(struct fmha_device *device, uint32_t op, const struct fmha_problem *problem,
		const struct fmha_run_options *options, struct fmha_run_result *ret_result,
		struct fmha_error *err)
{
	struct fmha_problem staged;
	struct stage stage;
	int64_t deadline;
	int r;

	if (!device || !problem)
		return fmha_error_set(err, FMHA_EINVAL, "device or problem is NULL");
	r = client_check_process(device->client, err);
	if (r < 0)
		return r;
	r = check_struct_size(problem->struct_size, sizeof(*problem), "fmha_problem", err);
	if (r == 0)
		r = check_run_options(options, err);
	if (r < 0)
		return r;
	if (options && options->n_rebinds > 0)
		return fmha_error_refuse(err, "n_rebinds", "only plans are rebound");
	deadline = run_deadline(device, options);
	staged = *problem;
	staged.op = op;
	stage.n_tensors = 0;
	r = problem_settle(&staged, err);
	if (r < 0)
		return r;
	if (has_data(&staged)) {
		r = problem_check(&staged, err);
		if (r == 0)
			r = stage_plan(&staged, ARENA_ID, &stage, err);
		if (r < 0)
			return r;
	}
	r = attempt(device, &staged, &stage, options, deadline, ret_result, err);
	/* ENOENT: a cached plan named a buffer that another thread has freed, and that the plan
	 * needed for its registration at a new worker. */
	if ((r == FMHA_EDEVICE || r == FMHA_ECONN || r == FMHA_EBUSY || r == FMHA_ENOENT) &&
	    deadline_left_ns(deadline) > 0)
		r = attempt(device, &staged, &stage, options, deadline, ret_result, err);
	return r;
}

int fmha_forward(struct fmha_device *device, const struct fmha_problem *problem,
		 const struct fmha_run_options *options, struct fmha_run_result *ret_result,
		 struct fmha_error *err)
{
	return call(device, FMHA_FORWARD, problem, options, ret_result, err);
}

int fmha_backward(struct fmha_device *device, const struct fmha_problem *problem,
		  const struct fmha_run_options *options, struct fmha_run_result *ret_result,
		  struct fmha_error *err)
{
	return call(device, FMHA_BACKWARD, problem, options, ret_result, err);
}

int fmha_append_kv(struct fmha_device *device, const struct fmha_problem *problem,
		   const struct fmha_run_options *options, struct fmha_run_result *ret_result,
		   struct fmha_error *err)
{
	return call(device, FMHA_APPEND_KV, problem, options, ret_result, err);
}

int fmha_merge_states(struct fmha_device *device, const struct fmha_problem *problem,
		      const struct fmha_run_options *options, struct fmha_run_result *ret_result,
		      struct fmha_error *err)
{
	return call(device, FMHA_MERGE_STATES, problem, options, ret_result, err);
}

int fmha_explain(struct fmha_device *device, const struct fmha_problem *problem,
		 const struct fmha_plan_options *options, char **ret_json, struct fmha_error *err)
{
	_cleanup_(freep) struct proto_plan_params *params = NULL;
	int r = client_check(device && problem && ret_json ? device->client : NULL, __func__, err);

	if (r == 0)
		r = check_struct_size(problem->struct_size, sizeof(*problem), "fmha_problem", err);
	if (r < 0)
		return r;
	params = malloc(sizeof(*params));
	if (!params)
		return fmha_error_set(err, FMHA_ENOMEM, "explain: out of memory");
	params->problem = *problem;
	r = problem_settle(&params->problem, err);
	if (r == 0)
		r = problem_check(&params->problem, err);
	if (r == 0)
		r = plan_names(options, params->kernels, &params->n_kernels, err);
	if (r < 0)
		return r;
	/* Nothing is read, so that any id will do, if every tensor has its own. */
	for (uint32_t role = 0; role < FMHA_N_TENSORS; role++) {
		struct fmha_tensor *tensor = &params->problem.tensor[role];

		if (tensor->data && tensor->buffer == 0)
			tensor->buffer = ARENA_ID - role;
		tensor->data = NULL;
	}
	return device_call_json(device, PROTO_EXPLAIN, params, ret_json, err);
}
