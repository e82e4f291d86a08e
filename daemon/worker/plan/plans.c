/* SPDX-License-Identifier: MIT */
/* plans.c: the plans of a session: made, charged, explained, released. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <proto/cleanup.h>
#include <proto/error.h>
#include <proto/problem.h>

#include "session/worker_registry.h"

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

static void session_plan_unrefp(struct session_plan **plan)
{
	(void)session_plan_unref(*plan);
}

/* The kernels that a request names. */
static void plan_params_choice(const struct proto_plan_params *params,
			       struct plan_choice *ret_choice)
{
	_Static_assert(PROTO_MAX_STAGES == PLAN_MAX_STAGES &&
			       PROTO_KERNEL_BYTES == PLAN_KERNEL_BYTES,
		       "names are copied as they are");

	ret_choice->n = params->n_kernels;
	for (uint32_t i = 0; i < params->n_kernels; i++)
		memcpy(ret_choice->kernel[i], params->kernels[i].kernel, PLAN_KERNEL_BYTES);
}

/* A charged plan without an id. On failure NULL: @err says why. */
static struct session_plan *make_plan(struct session *session,
				      const struct proto_plan_params *params, bool local,
				      struct fmha_error *err)
{
	_cleanup_(session_plan_unrefp) struct session_plan *plan = session_plan_allocate(session);
	struct worker *worker = session->worker;
	struct session_plan *made;
	struct plan_choice choice;

	if (!plan) {
		(void)fmha_error_set(err, FMHA_ENOMEM, "plan: out of memory");
		return NULL;
	}
	plan->local = local;
	plan->generation = worker->plans.registry ? registry_generation(worker->plans.registry) : 0;
	if (account_charge(session->account, ACCOUNT_PLANS, 1, err) < 0)
		return NULL;
	plan->counted = true;
	plan->account = session->account;
	plan->account->n_references++;
	kernels_act_for(session, local);
	plan_params_choice(params, &choice);
	if (plan_build(&params->problem, &choice, &worker->plans.device, &plan->plan, err) < 0 ||
	    (!local && check_plan_buffers(session, &plan->plan, err) < 0))
		return NULL;
	session_plan_count(worker, &plan->plan);
	made = plan;
	plan = NULL;
	return made;
}

/* These answer request @id, now or later. Return: 0, or a negative FMHA_E* and no answer. */
static int session_plan_new(struct session *session, uint32_t id,
			    const struct proto_plan_params *params, struct fmha_error *err)
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
	plan->serial = ++worker->plans.n;
	session_plan_settle(session, plan, &result);
	return prepare_plan(session, id, plan, &result, err);
}

/* A plan that the client launches itself; the worker keeps nothing of it. */
static int session_plan_local(struct session *session, uint32_t id,
			      const struct proto_plan_params *params, struct fmha_error *err)
{
	struct proto_plan_result unused = {0};
	struct session_plan *plan = make_plan(session, params, true, err);

	return plan ? prepare_plan(session, id, plan, &unused, err) : err->code;
}

/* ---- another version ---- */

static bool fits_what_was_told(const struct session_plan *plan, const struct plan *next)
{
	if (next->workspace_bytes > plan->told_bytes)
		return false;
	for (uint32_t i = 0; i < next->n_views; i++)
		if (next->views[i].alignment >> plan->told_alignment[next->views[i].role] > 1)
			return false;
	return true;
}

/* Chooses it again. */
static void session_plan_renew(struct session *session, uint64_t id, struct session_plan *plan)
{
	struct plan *next = malloc(sizeof(*next));

	if (!next)
		return;
	kernels_act_for(session, false);
	if (plan_build(&plan->plan.problem, NULL, &session->worker->plans.device, next, NULL) ==
		    0 &&
	    !plan_has_same_kernels(next, &plan->plan) && fits_what_was_told(plan, next)) {
		plan->renewing = true;
		prepare_renewal(session, id, next);
	}
	free(next);
}

static int session_explain(struct session *session, uint32_t id,
			   const struct proto_plan_params *params, struct fmha_error *err)
{
	struct proto_json_result result;
	struct plan_choice choice;
	char *json;
	int fd = -1, r;

	kernels_act_for(session, false);
	plan_params_choice(params, &choice);
	r = plan_explain(&params->problem, &choice, &session->worker->plans.device, &json, err);
	if (r < 0)
		return r;
	result.size = strlen(json);
	r = memfd_text(&session->worker->memfds, session->account, json, result.size, &fd, err);
	free(json);
	if (r < 0)
		return r;
	connection_answer(&session->connection, id, PROTO_EXPLAIN, &result, fd);
	return 0;
}

/* ---- planning ---- */

/* A request of which something is looked at first. */
struct planning {
	struct chore chore;
	struct session *session;
	uint32_t id;
	enum proto_method method;
	struct plan_looking *looking;
	union {
		struct proto_plan_params plan;
		struct proto_local_runs_params runs;
	} params;
};

/* Of a plan that something faster has become known for. */
struct renewal {
	struct chore chore;
	struct session *session;
	uint64_t id, serial; /* a plan of that id may be another one by then */
	struct plan_looking *looking;
};

static bool is_local(enum proto_method method)
{
	return method == PROTO_LOCAL_PLAN || method == PROTO_LOCAL_RUNS;
}

static int planning_serve(struct session *session, uint32_t id, enum proto_method method,
			  const struct proto_plan_params *plan,
			  const struct proto_local_runs_params *runs, struct fmha_error *err)
{
	switch (method) {
	case PROTO_PLAN:
		return session_plan_new(session, id, plan, err);
	case PROTO_LOCAL_PLAN:
		return session_plan_local(session, id, plan, err);
	case PROTO_EXPLAIN:
		return session_explain(session, id, plan, err);
	default:
		return local_runs(session, id, runs, err);
	}
}

static bool planning_step(struct chore *chore)
{
	struct planning *planning = container_of(chore, struct planning, chore);
	struct session *session = planning->session;
	struct plan_device *device = &session->worker->plans.device;
	struct fmha_error err;

	if (!session->hung_up) {
		kernels_act_for(session, is_local(planning->method));
		if (plan_look(planning->looking))
			return true;
		device->looking = planning->looking;
		if (planning_serve(session, planning->id, planning->method, &planning->params.plan,
				   &planning->params.runs, &err) < 0)
			connection_answer_error(&session->connection, planning->id, &err);
		device->looking = NULL;
	}
	plan_looking_free(planning->looking);
	free(planning);
	session_offload_ended(session);
	return false;
}

/* What there is to look at first; NULL: nothing, or memory lacks for doing it by and by. */
static struct planning *planning_new(struct session *session, enum proto_method method,
				     const union proto_any_params *params)
{
	const struct plan_device *device = &session->worker->plans.device;
	struct planning *planning = malloc(sizeof(*planning));
	struct plan_choice choice = {0};

	if (!planning)
		return NULL;
	if (method == PROTO_LOCAL_RUNS) {
		planning->params.runs = params->LOCAL_RUNS;
		planning->looking = plan_looking_new(&params->LOCAL_RUNS.problem, NULL, device);
	} else {
		planning->params.plan = params->PLAN;
		plan_params_choice(&params->PLAN, &choice);
		planning->looking = plan_looking_new(&params->PLAN.problem, &choice, device);
	}
	if (planning->looking)
		return planning;
	free(planning);
	return NULL;
}

int planning_request(struct session *session, uint32_t id, enum proto_method method,
		     const union proto_any_params *params, struct fmha_error *err)
{
	struct worker *worker = session->worker;
	struct planning *planning = NULL;

	_Static_assert(sizeof(params->PLAN) == sizeof(params->EXPLAIN) &&
			       sizeof(params->PLAN) == sizeof(params->LOCAL_PLAN),
		       "all three are plan_params");
	kernels_act_for(session, is_local(method));
	if (worker->plans.device.model)
		planning = planning_new(session, method, params);
	if (!planning)
		return planning_serve(session, id, method, &params->PLAN, &params->LOCAL_RUNS, err);
	planning->session = session;
	planning->id = id;
	planning->method = method;
	session->n_offloads++;
	chore_start(&worker->chores, &planning->chore, session->account, planning_step);
	return 0;
}

/* ---- plans that are chosen again ---- */

static bool renewal_step(struct chore *chore)
{
	struct renewal *renewal = container_of(chore, struct renewal, chore);
	struct session *session = renewal->session;
	struct plan_device *device = &session->worker->plans.device;
	struct session_plan *plan = NULL;

	if (!session->hung_up) {
		kernels_act_for(session, false);
		if (plan_look(renewal->looking))
			return true;
		plan = table_get(&session->plans, renewal->id);
	}
	if (plan && plan->serial == renewal->serial) {
		plan->renewing = false;
		device->looking = renewal->looking;
		session_plan_renew(session, renewal->id, plan);
		device->looking = NULL;
	}
	plan_looking_free(renewal->looking);
	free(renewal);
	session_offload_ended(session);
	return false;
}

/* Chooses it again by and by, when there is something to look at first. Return: whether there is. */
static bool renew_by_and_by(struct session *session, uint64_t id, struct session_plan *plan)
{
	struct worker *worker = session->worker;
	struct renewal *renewal = worker->plans.device.model ? malloc(sizeof(*renewal)) : NULL;

	if (!renewal)
		return false;
	kernels_act_for(session, false);
	renewal->looking = plan_looking_new(&plan->plan.problem, NULL, &worker->plans.device);
	if (!renewal->looking) {
		free(renewal);
		return false;
	}
	renewal->session = session;
	renewal->id = id;
	renewal->serial = plan->serial;
	plan->renewing = true;
	session->n_offloads++;
	chore_start(&worker->chores, &renewal->chore, session->account, renewal_step);
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
	return registry_measured_at(session->worker->plans.registry, shape, &best, 1) > 0 &&
	       (best.n_splits != plan->plan.n_splits ||
		spec_compare(&best.spec, &stage->spec) != 0);
}

void session_plan_refresh(struct session *session, uint64_t id, struct session_plan *plan)
{
	struct worker *worker = session->worker;
	uint64_t generation = worker->plans.registry ? registry_generation(worker->plans.registry)
						     : 0;

	if (plan->generation == generation || !plan->ready || plan->renewing ||
	    !plan_may_change(&plan->plan))
		return;
	plan->generation = generation;
	if (is_outdone(session, plan) && !renew_by_and_by(session, id, plan))
		session_plan_renew(session, id, plan);
}
