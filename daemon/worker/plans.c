/* SPDX-License-Identifier: MIT */
/* plans.c: the plans of a session: made, charged, explained, released. */
#include "held.h"
#include "kernels.h"
#include "planning.h"
#include "staging.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <base/fnv.h>
#include <proto/cleanup.h>
#include <proto/error.h>
#include <proto/problem.h>

static void drop_kernels(struct session_plan *plan)
{
	for (uint32_t i = 0; i < PLAN_MAX_STAGES; i++)
		held_drop(plan->worker->device, plan->account, plan->kernels[i]);
	memset(plan->kernels, 0, sizeof(plan->kernels));
}

int session_plan_take_kernels(struct session_plan *plan,
			      const struct device_kernel *const kernels[PLAN_MAX_STAGES],
			      struct fmha_error *err)
{
	int r = 0;

	for (uint32_t i = 0; i < PLAN_MAX_STAGES && r == 0; i++) {
		r = held_take(plan->worker->device, plan->account, kernels[i], err);
		if (r == 0)
			plan->kernels[i] = kernels[i];
	}
	if (r < 0)
		drop_kernels(plan);
	return r;
}

struct session_plan *session_plan_unref(struct session_plan *plan)
{
	if (!plan || --plan->n_references > 0)
		return NULL;
	if (plan->account) {
		drop_kernels(plan);
		account_release(plan->account, ACCOUNT_PLANS, plan->counted);
		(void)account_put(plan->account);
	}
	slabs_give_back(&plan->worker->plan_slabs, plan);
	return NULL;
}

static struct session_plan *allocate_plan(struct session *session)
{
	struct session_plan *plan = slabs_take(&session->worker->plan_slabs);

	if (!plan)
		return NULL;
	plan->n_references = 1;
	plan->worker = session->worker;
	plan->uid = session->uid;
	return plan;
}

/* Every tensor's last byte must lie in its buffer, so that a plan that is accepted can run. */
static int check_plan_buffers(struct session *session, const struct plan *plan,
			      struct fmha_error *err)
{
	for (uint32_t i = 0; i < plan->n_views; i++) {
		const struct plan_view *view = &plan->views[i];
		const struct fmha_tensor *tensor = &plan->problem.tensor[view->role];
		struct buffer *buffer = table_get(&session->buffers, tensor->buffer);
		const char *name = proto_roles[view->role].name;
		char field[48];

		if (!buffer) {
			snprintf(field, sizeof(field), "tensor.%s.buffer", name);
			return fmha_error_set_field(err, FMHA_ENOENT, field,
						    "tensor %s: buffer %llu: no such", name,
						    (unsigned long long)tensor->buffer);
		}
		if (tensor->offset > buffer->memory.bytes ||
		    view->span_bytes > buffer->memory.bytes - tensor->offset) {
			snprintf(field, sizeof(field), "tensor.%s.offset", name);
			return fmha_error_set_field(
				err, FMHA_EINVAL, field,
				"tensor %s: %llu bytes at %llu do not lie in a buffer of %llu",
				name, (unsigned long long)view->span_bytes,
				(unsigned long long)tensor->offset,
				(unsigned long long)buffer->memory.bytes);
		}
	}
	return 0;
}

static void describe_plan(const struct plan *plan, struct proto_plan_result *result)
{
	result->workspace_bytes = plan->workspace_bytes;
	result->flops = plan->flops;
	result->n_stages = plan->n_stages;
	for (uint32_t i = 0; i < plan->n_stages; i++) {
		const struct plan_stage *stage = &plan->stages[i];
		struct proto_stage *out = &result->stages[i];

		snprintf(out->family, sizeof(out->family), "%s", plan_family_name(stage->family));
		snprintf(out->kernel, sizeof(out->kernel), "%s", stage->kernel);
		out->workspace_offset = stage->workspace_offset;
		out->workspace_bytes = stage->workspace_bytes;
	}
}

/* Of what the problem says, wherever its tensors lie: the same request made again. */
static uint64_t fingerprint(const struct fmha_problem *problem)
{
	struct fmha_problem plain = *problem;

	for (int i = 0; i < FMHA_N_TENSORS; i++) {
		plain.tensor[i].buffer = plain.tensor[i].buffer != 0;
		plain.tensor[i].offset = 0;
	}
	return fnv_bytes(FNV_START, &plain, sizeof(plain));
}

static void name_culprits(const struct session *session, struct session_plan *plan)
{
	uint64_t print = fingerprint(&plan->plan.problem);

	for (uint32_t i = 0; i < PLAN_MAX_STAGES; i++) {
		struct culprit *culprit = &plan->culprits[i];

		memcpy(culprit->kernel, plan->plan.stages[i].kernel, sizeof(culprit->kernel));
		culprit->code = plan->plan.stages[i].code;
		culprit->uid = session->uid;
		culprit->problem = print;
	}
}

/* The largest grid of its stages, one block a unit; all units where no grid is known. */
static uint32_t load_of(const struct plan *plan, uint32_t compute_units)
{
	uint64_t most = 1;

	for (uint32_t i = 0; i < plan->n_stages; i++) {
		const uint32_t *grid = plan->stages[i].launch.grid;
		uint64_t blocks = (uint64_t)grid[0] * grid[1] * grid[2];

		if (blocks == 0 || blocks >= compute_units)
			return compute_units;
		if (blocks > most)
			most = blocks;
	}
	return (uint32_t)most;
}

/* What its client may count on from now on. */
static void tell(struct session_plan *plan)
{
	plan->told_bytes = plan->plan.workspace_bytes;
	for (uint32_t i = 0; i < plan->plan.n_views; i++) {
		const struct plan_view *view = &plan->plan.views[i];

		plan->told_alignment[view->role] = (uint8_t)__builtin_ctz(view->alignment);
	}
}

void session_plan_settle(struct session *session, struct session_plan *plan,
			 struct proto_plan_result *result)
{
	struct worker *worker = session->worker;

	plan->load = load_of(&plan->plan, worker->plan_device.compute_units);
	plan->roof_ns = roof_ns(&worker->roof, &plan->plan);
	name_culprits(session, plan);
	plan->fixed = staging_is_constant(worker->device, &plan->plan);
	plan->fetches = staging_fetches(worker->device, &plan->plan);
	/* A guess for the first run; later ones know better (run.c). */
	plan->tiny_work = plan->plan.bytes < 1 << 20 ? 2e6 : 0;
	tell(plan);
	describe_plan(&plan->plan, result);
}

static void session_plan_unrefp(struct session_plan **plan)
{
	(void)session_plan_unref(*plan);
}

void plan_params_choice(const struct proto_plan_params *params, struct plan_choice *ret_choice)
{
	_Static_assert(PROTO_MAX_STAGES == PLAN_MAX_STAGES &&
			       PROTO_KERNEL_BYTES == PLAN_KERNEL_BYTES,
		       "names are copied as they are");

	ret_choice->n = params->n_kernels;
	for (uint32_t i = 0; i < params->n_kernels; i++)
		memcpy(ret_choice->kernel[i], params->kernels[i].kernel, PLAN_KERNEL_BYTES);
}

/* Named kernels were not chosen, and a plan without work has none. */
static void count_plan(struct worker *worker, const struct plan *plan)
{
	const struct plan_stage *stage = plan_main_stage(plan);

	if (stage && !plan->named)
		worker->n_plans_by[stage->basis]++;
}

/* A charged plan without an id. On failure NULL: @err says why. */
static struct session_plan *make_plan(struct session *session,
				      const struct proto_plan_params *params, bool local,
				      struct fmha_error *err)
{
	_cleanup_(session_plan_unrefp) struct session_plan *plan = allocate_plan(session);
	struct worker *worker = session->worker;
	struct session_plan *made;
	struct plan_choice choice;

	if (!plan) {
		(void)fmha_error_set(err, FMHA_ENOMEM, "plan: out of memory");
		return NULL;
	}
	plan->local = local;
	plan->generation = worker->registry ? registry_generation(worker->registry) : 0;
	if (account_charge(session->account, ACCOUNT_PLANS, 1, err) < 0)
		return NULL;
	plan->counted = true;
	plan->account = session->account;
	plan->account->n_references++;
	kernels_act_for(session, local);
	plan_params_choice(params, &choice);
	if (plan_build(&params->problem, &choice, &worker->plan_device, &plan->plan, err) < 0 ||
	    (!local && check_plan_buffers(session, &plan->plan, err) < 0))
		return NULL;
	count_plan(worker, &plan->plan);
	made = plan;
	plan = NULL;
	return made;
}

int session_plan_new(struct session *session, uint32_t id, const struct proto_plan_params *params,
		     struct fmha_error *err)
{
	struct worker *worker = session->worker;
	struct proto_plan_result result = {0};
	struct session_plan *plan;

	if (session_has_room(session, LIMIT_PLANS_PER_CONNECTION, &session->plans, "plans", err) <
	    0)
		return FMHA_EQUOTA;
	plan = make_plan(session, params, false, err);
	if (!plan)
		return err->code;
	result.plan = table_add(&session->plans, plan);
	if (!result.plan) {
		session_plan_unref(plan);
		return fmha_error_set(err, FMHA_ENOMEM, "plan: out of memory");
	}
	plan->serial = ++worker->n_plans;
	session_plan_settle(session, plan, &result);
	return prepare_plan(session, id, plan, &result, err);
}

int session_plan_local(struct session *session, uint32_t id, const struct proto_plan_params *params,
		       struct fmha_error *err)
{
	struct proto_plan_result unused = {0};
	struct session_plan *plan = make_plan(session, params, true, err);

	return plan ? prepare_plan(session, id, plan, &unused, err) : err->code;
}

/* ---- another version ---- */

bool plan_may_change(const struct plan *plan)
{
	const struct fmha_problem *p = &plan->problem;

	return !plan->named && !p->deterministic && p->split_size == 0 && p->n_splits == 0 &&
	       plan->n_stages > 0;
}

static bool fits_what_was_told(const struct session_plan *plan, const struct plan *next)
{
	if (next->workspace_bytes > plan->told_bytes)
		return false;
	for (uint32_t i = 0; i < next->n_views; i++)
		if (next->views[i].alignment >> plan->told_alignment[next->views[i].role] > 1)
			return false;
	return true;
}

/* Has something else been measured as the fastest for it? */
static bool is_outdone(const struct session *session, const struct session_plan *plan)
{
	const struct plan_stage *stage = plan_main_stage(&plan->plan);
	struct registry_measured best;
	char shape[PLAN_SHAPE_BYTES];

	if (!stage || !stage->has_spec)
		return false;
	plan_shape(&plan->plan.problem, shape);
	return registry_measured_at(session->worker->registry, shape, &best, 1) > 0 &&
	       (best.n_splits != plan->plan.n_splits ||
		spec_compare(&best.spec, &stage->spec) != 0);
}

void session_plan_refresh(struct session *session, uint64_t id, struct session_plan *plan)
{
	struct worker *worker = session->worker;
	uint64_t generation = worker->registry ? registry_generation(worker->registry) : 0;

	if (plan->generation == generation || !plan->ready || plan->renewing ||
	    !plan_may_change(&plan->plan))
		return;
	plan->generation = generation;
	if (is_outdone(session, plan) && !planning_renewal(session, id, plan))
		session_plan_renew(session, id, plan);
}

void session_plan_renew(struct session *session, uint64_t id, struct session_plan *plan)
{
	struct plan *next = malloc(sizeof(*next));

	if (!next)
		return;
	kernels_act_for(session, false);
	if (plan_build(&plan->plan.problem, NULL, &session->worker->plan_device, next, NULL) == 0 &&
	    !plan_has_same_kernels(next, &plan->plan) && fits_what_was_told(plan, next)) {
		plan->renewing = true;
		prepare_renewal(session, id, next);
	}
	free(next);
}

void session_plan_replace(struct session *session, uint64_t id, const struct plan *next,
			  const struct device_kernel *const kernels[PLAN_MAX_STAGES])
{
	struct session_plan *old = table_get(&session->plans, id), *plan;
	struct proto_plan_result ignored = {0};
	uint64_t told_bytes;
	uint8_t told_alignment[FMHA_N_TENSORS];

	plan = old ? allocate_plan(session) : NULL;
	if (!plan)
		return;
	told_bytes = old->told_bytes;
	memcpy(told_alignment, old->told_alignment, sizeof(told_alignment));
	plan->account = session->account;
	plan->account->n_references++;
	if (session_plan_take_kernels(plan, kernels, NULL) < 0) {
		(void)session_plan_unref(plan);
		return;
	}
	plan->counted = true; /* in the old one's place */
	old->counted = false;
	plan->plan = *next;
	count_plan(session->worker, next);
	plan->serial = ++session->worker->n_plans;
	plan->generation = old->generation;
	session_plan_settle(session, plan, &ignored);
	plan->told_bytes = told_bytes;
	memcpy(plan->told_alignment, told_alignment, sizeof(told_alignment));
	plan->ready = true;
	(void)table_replace(&session->plans, id, plan);
	(void)session_plan_unref(old); /* runs that have it keep it */
}

int session_plan_release(struct session *session, uint64_t id, struct fmha_error *err)
{
	struct session_plan *plan = table_remove(&session->plans, id);

	if (!plan)
		return fmha_error_set_field(err, FMHA_ENOENT, "plan", "plan %llu: no such",
					    (unsigned long long)id);
	session_plan_unref(plan);
	return 0;
}

int session_explain(struct session *session, uint32_t id, const struct proto_plan_params *params,
		    struct fmha_error *err)
{
	struct proto_json_result result;
	struct plan_choice choice;
	char *json;
	int fd = -1, r;

	kernels_act_for(session, false);
	plan_params_choice(params, &choice);
	r = plan_explain(&params->problem, &choice, &session->worker->plan_device, &json, err);
	if (r < 0)
		return r;
	result.size = strlen(json);
	r = handout_text(&session->worker->handouts, session->account, json, result.size, &fd, err);
	free(json);
	if (r < 0)
		return r;
	connection_answer(&session->connection, id, PROTO_EXPLAIN, &result, fd);
	return 0;
}
