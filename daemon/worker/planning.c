/* SPDX-License-Identifier: MIT */
#include "planning.h"

#include <stdlib.h>
#include <string.h>

#include "kernels.h"

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

static int serve(struct session *session, uint32_t id, enum proto_method method,
		 const struct proto_plan_params *plan, const struct proto_local_runs_params *runs,
		 struct fmha_error *err)
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

static bool step(struct chore *chore)
{
	struct planning *planning = container_of(chore, struct planning, chore);
	struct session *session = planning->session;
	struct plan_device *device = &session->worker->plan_device;
	struct fmha_error err;

	if (!session->hung_up) {
		kernels_act_for(session, is_local(planning->method));
		if (plan_look(planning->looking))
			return true;
		device->looking = planning->looking;
		if (serve(session, planning->id, planning->method, &planning->params.plan,
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
	const struct plan_device *device = &session->worker->plan_device;
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
	if (worker->plan_device.model)
		planning = planning_new(session, method, params);
	if (!planning)
		return serve(session, id, method, &params->PLAN, &params->LOCAL_RUNS, err);
	planning->session = session;
	planning->id = id;
	planning->method = method;
	session->n_offloads++;
	chore_start(&worker->chores, &planning->chore, session->account, step);
	return 0;
}

/* ---- plans that are chosen again ---- */

static bool renewal_step(struct chore *chore)
{
	struct renewal *renewal = container_of(chore, struct renewal, chore);
	struct session *session = renewal->session;
	struct plan_device *device = &session->worker->plan_device;
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

bool planning_renewal(struct session *session, uint64_t id, struct session_plan *plan)
{
	struct worker *worker = session->worker;
	struct renewal *renewal = worker->plan_device.model ? malloc(sizeof(*renewal)) : NULL;

	if (!renewal)
		return false;
	kernels_act_for(session, false);
	renewal->looking = plan_looking_new(&plan->plan.problem, NULL, &worker->plan_device);
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
