/* SPDX-License-Identifier: MIT */
/*
 * plans.c: the plans of a session: made, charged, explained, made ready. On a device whose kernels are compiled, the
 * first plan that needs one has to wait for the front's compiler; its answer comes when the code is loaded, and
 * nobody else's request waits with it.
 */
#include "session/worker_registry.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <base/clock.h>
#include <proto/cleanup.h>
#include <proto/error.h>
#include <proto/problem.h>

#define MAX_CODE_BYTES (64u << 20)

/* A kernel that a plan needs. Once it is ready its user has it, and pays. */
struct needed {
	struct device_waiter waiter;
	const struct device_kernel *kernel;
	bool held;
};

/* A plan that waits for its kernels. */
struct preparing {
	struct list in_session;
	struct session *session;
	uint32_t id;     /* of the plan request */
	bool renews;     /* next takes the place of result.plan; nobody waits for an answer */
	uint32_t n_left; /* stages that are not ready */
	struct fmha_error error;
	struct proto_plan_result result;
	struct session_plan *local; /* NULL: the plan is in the session's table */
	struct needed tables;
	/* Those that are ready, while better ones are waited for, and those: @side's. */
	struct needed stages[2][PLAN_MAX_STAGES];
	uint32_t side;
	const struct device_kernel *ready[PLAN_MAX_STAGES];
	bool has_ready;       /* those that the session's plan needs */
	bool next_is_awaited; /* the session's plan has what it needs, next would be better */
	struct plan next;
};

/* ---- asking the front ---- */

/* The code object, to be unmapped; NULL: @err says why there is none. */
static void *map_code(const struct proto_compile_result *result, int fd, struct fmha_error *err)
{
	void *code;

	if (fd < 0 || result->size == 0 || result->size > MAX_CODE_BYTES ||
	    result->hash_bytes != sizeof(result->hash)) {
		(void)fmha_error_set(err, FMHA_EINTERNAL, "compile: an answer without code");
		return NULL;
	}
	/* The clients that get the same file could cut it off under whoever reads the mapping. */
	if (!memfd_is_sealed(fd, result->size)) {
		(void)fmha_error_set(
			err, FMHA_EIO,
			"compile: code that can still change, or that cannot be looked at");
		return NULL;
	}
	code = mmap(NULL, result->size, PROT_READ, MAP_PRIVATE, fd, 0);
	if (code != MAP_FAILED)
		return code;
	(void)fmha_error_set(err, FMHA_ENOMEM, "compile: no memory for the code");
	return NULL;
}

static void on_compiled(void *owner, const union proto_any_result *result, int fd,
			const struct fmha_error *error)
{
	struct device_build *build = owner;
	struct worker *worker = build->worker;
	struct doing_before before;
	struct fmha_error err = *error;
	void *data = result ? map_code(&result->COMPILE, fd, &err) : NULL;
	struct device_code code = {.data = data, .fd = fd};

	if (data) {
		code.bytes = result->COMPILE.size;
		code.spills = result->COMPILE.spills;
		memcpy(code.hash, result->COMPILE.hash, sizeof(code.hash));
	}
	if (worker->trace)
		trace_build(worker, build, data);
	before = doing_begin(&worker->page->doing, PROTO_PLAN, build->uid);
	build->done(build, data ? &code : NULL, &err);
	doing_end(&worker->page->doing, before);
	if (data)
		munmap(data, result->COMPILE.size);
}

int prepare_build(void *worker_pointer, struct device_build *build, struct fmha_error *err)
{
	struct worker *worker = worker_pointer;
	struct proto_compile_params params = {.uid = build->uid,
					      .urgency = build->background ? PROTO_BACKGROUND
									   : PROTO_URGENT,
					      .build = *build->build};

	build->worker = worker;
	build->asked_ns = clock_ns();
	return connection_request(&worker->control, PROTO_COMPILE, &params, -1, on_compiled, build,
				  err);
}

void prepare_cancel_build(void *worker_pointer, struct device_build *build)
{
	struct connection *control = &((struct worker *)worker_pointer)->control;
	const struct proto_compile_cancel_params params = {
		.request = connection_forget(control, build)};

	if (params.request)
		(void)connection_request(control, PROTO_COMPILE_CANCEL, &params, -1, NULL, NULL,
					 NULL);
}

/* ---- waiting for kernels ---- */

static void give_up(struct session *session, struct needed *needed)
{
	if (needed->held)
		held_drop(session->worker->device, session->account, needed->kernel);
	device_forget(session->worker->device, &needed->waiter);
	*needed = (struct needed){0};
}

static void forget_side(struct preparing *preparing, uint32_t side)
{
	for (uint32_t i = PLAN_MAX_STAGES; i-- > 0;)
		give_up(preparing->session, &preparing->stages[side][i]);
}

/* Nobody waits for the plan any more. */
static void preparing_free(struct preparing *preparing)
{
	give_up(preparing->session, &preparing->tables);
	forget_side(preparing, 1);
	forget_side(preparing, 0);
	list_remove(&preparing->in_session);
	session_plan_unref(preparing->local);
	free(preparing);
}

static void drop_plan(struct session *session, uint64_t id)
{
	struct session_plan *plan = table_remove(&session->plans, id);

	if (!plan)
		return;
	session_plan_unref(plan);
}

/* NULL: the client has dropped it meanwhile. */
static struct session_plan *plan_of(struct preparing *preparing)
{
	if (preparing->local)
		return preparing->local;
	return table_get(&preparing->session->plans, preparing->result.plan);
}

/* From here on the plan can run. */
static void prepare_finish(struct preparing *preparing)
{
	struct session *session = preparing->session;
	struct session_plan *plan = plan_of(preparing);

	if (preparing->local) {
		local_answer(session, preparing->id, &plan->plan, preparing->ready,
			     preparing->tables.kernel);
		return;
	}
	if (plan) { /* else the client has dropped it meanwhile */
		struct fmha_error err;

		if (session_plan_take_kernels(plan, preparing->ready, &err) < 0) {
			drop_plan(session, preparing->result.plan);
			connection_answer_error(&session->connection, preparing->id, &err);
			return;
		}
		plan->ready = true;
	}
	connection_answer(&session->connection, preparing->id, PROTO_PLAN, &preparing->result, -1);
}

static void on_prepared(void *owner, const struct fmha_error *error);

static void init_needed(struct preparing *preparing, struct needed *needed)
{
	*needed = (struct needed){.waiter = {.uid = preparing->session->uid,
					     .pid = preparing->session->pid,
					     .background = preparing->renews,
					     .done = on_prepared,
					     .owner = preparing}};
}

/* Of a kernel that may be ready. What the user may not have goes at once, whatever else is waited for. */
static int hold(struct preparing *preparing, struct needed *needed, struct fmha_error *err)
{
	struct session *session = preparing->session;
	int r;

	if (needed->held || !needed->waiter.kernel || needed->waiter.waits)
		return 0;
	r = held_take(session->worker->device, session->account, needed->kernel, err);
	if (r < 0)
		give_up(session, needed);
	else
		needed->held = true;
	return r;
}

static int hold_all(struct preparing *preparing, struct fmha_error *err)
{
	int r = hold(preparing, &preparing->tables, err);

	for (uint32_t i = 0; i < PLAN_MAX_STAGES && r == 0; i++)
		r = hold(preparing, &preparing->stages[preparing->side][i], err);
	return r;
}

/* Return: 0 (all its kernels are ready), DEVICE_PREPARING, or FMHA_E*; then some may be waited for.
 */
static int prepare_stages(struct preparing *preparing, const struct plan *plan,
			  struct fmha_error *err)
{
	struct session *session = preparing->session;
	union abi_args args[PLAN_MAX_STAGES];
	int r = 0;

	plan_placeholder_args(plan, args);
	for (uint32_t i = 0; i < plan->n_stages && r >= 0; i++) {
		struct needed *needed = &preparing->stages[preparing->side][i];

		init_needed(preparing, needed);
		r = device_prepare(session->worker->device, &plan->stages[i], &args[i],
				   &needed->waiter, &needed->kernel, err);
		preparing->n_left += r == DEVICE_PREPARING;
		if (r == 0)
			r = hold(preparing, needed, err);
	}
	return r < 0 ? r : preparing->n_left > 0 ? DEVICE_PREPARING : 0;
}

/* The kernels that were waited for are there: they serve, whatever comes of better ones. */
static void take_ready(struct preparing *preparing, struct session_plan *plan)
{
	for (uint32_t i = 0; i < PLAN_MAX_STAGES; i++)
		preparing->ready[i] = preparing->stages[preparing->side][i].kernel;
	preparing->has_ready = true;
	if (!preparing->next_is_awaited || !plan)
		return;
	plan->plan = preparing->next;
	if (!plan->local)
		session_plan_settle(preparing->session, plan, &preparing->result);
}

/* Whether the plan was made before the code of its kernels was seen, and that spills. */
static bool spills_anew(const struct preparing *preparing, const struct plan *plan)
{
	const struct device *device = preparing->session->worker->device;

	for (uint32_t i = 0; i < plan->n_stages; i++) {
		const struct device_code *code = device_kernel_code(device, preparing->ready[i]);

		if (code && code->spills != plan->stages[i].spills)
			return true;
	}
	return false;
}

/*
 * The code of the chosen kernels has been seen: where it spills, dispatch may prefer others now, and
 * nothing else is news. Each is asked for once, so this ends. Return: true: others are waited for.
 */
static bool choose_again(struct preparing *preparing)
{
	struct session *session = preparing->session;
	struct session_plan *plan = plan_of(preparing);
	struct plan_choice choice;
	struct fmha_error ignored;
	int r;

	take_ready(preparing, plan);
	if (!plan || !spills_anew(preparing, &plan->plan)) /* no plan: the client has dropped it */
		return false;
	kernels_act_for(session, plan->local);
	plan_chosen(&plan->plan, &choice);
	if (plan_build(&plan->plan.problem, &choice, &session->worker->plans.device,
		       &preparing->next, &ignored) < 0 ||
	    plan_has_same_kernels(&preparing->next, &plan->plan))
		return false;
	preparing->next_is_awaited = true;
	preparing->side ^= 1;
	forget_side(preparing, preparing->side);
	r = prepare_stages(preparing, &preparing->next, &ignored);
	if (r == 0)
		take_ready(preparing, plan);
	return r == DEVICE_PREPARING;
}

static void end_renewal(struct preparing *preparing, bool succeeded)
{
	struct session *session = preparing->session;
	struct session_plan *plan = table_get(&session->plans, preparing->result.plan);

	if (plan)
		plan->renewing = false;
	if (plan && succeeded) {
		take_ready(preparing, NULL);
		session_plan_replace(session, preparing->result.plan, &preparing->next,
				     preparing->ready);
	}
	preparing_free(preparing);
}

/* Makes @next ready in the background; then it takes the place of plan @id, if that is still there. */
static void prepare_renewal(struct session *session, uint64_t id, const struct plan *next)
{
	struct preparing *preparing = calloc(1, sizeof(*preparing));
	struct session_plan *plan = table_get(&session->plans, id);
	struct fmha_error ignored;
	int r;

	if (!preparing) {
		plan->renewing = false;
		return;
	}
	preparing->session = session;
	preparing->renews = true;
	preparing->result.plan = id;
	preparing->next = *next;
	list_init(&preparing->in_session);
	list_append(&session->preparing, &preparing->in_session);
	r = prepare_stages(preparing, &preparing->next, &ignored);
	if (r != DEVICE_PREPARING)
		end_renewal(preparing, r == 0);
}

static void on_prepared(void *owner, const struct fmha_error *error)
{
	struct preparing *preparing = owner;
	struct session *session = preparing->session;
	struct fmha_error *err = &preparing->error, refusal;

	if (error->code != FMHA_OK)
		*err = *error;
	else if (hold_all(preparing, &refusal) < 0)
		*err = refusal;
	if (--preparing->n_left > 0)
		return;
	if (preparing->renews) {
		end_renewal(preparing, err->code == FMHA_OK);
		return;
	}
	if (err->code == FMHA_OK && choose_again(preparing))
		return;
	if (preparing->has_ready) {
		prepare_finish(preparing);
	} else {
		drop_plan(session, preparing->result.plan);
		/* The client's request was sound: a build that fails is this machine's fault. */
		if (err->code == FMHA_EINVAL)
			err->code = FMHA_ENOKERNEL;
		connection_answer_error(&session->connection, preparing->id, err);
	}
	preparing_free(preparing);
}

/* What a local plan needs besides its stages. Return: as prepare_stages(). */
static int prepare_tables(struct preparing *preparing, struct fmha_error *err)
{
	int r;

	init_needed(preparing, &preparing->tables);
	r = device_prepare_tables(preparing->session->worker->device, &preparing->tables.waiter,
				  &preparing->tables.kernel, err);
	preparing->n_left += r == DEVICE_PREPARING;
	return r == 0 ? hold(preparing, &preparing->tables, err) : r;
}

/*
 * Makes the plan's kernels ready, then answers request @id with @result, or a local one's with its launches. On
 * failure the plan leaves the session's table and the answer is the error. Of a local plan the reference is taken.
 * Return: 0 (answered, now or later), FMHA_E*.
 */
static int prepare_plan(struct session *session, uint32_t id, struct session_plan *plan,
			const struct proto_plan_result *result, struct fmha_error *err)
{
	struct preparing *preparing = calloc(1, sizeof(*preparing));
	int r = 0;

	if (!preparing) {
		if (plan->local)
			session_plan_unref(plan);
		drop_plan(session, result->plan);
		return fmha_error_set(err, FMHA_ENOMEM, "plan: out of memory");
	}
	preparing->session = session;
	preparing->id = id;
	preparing->result = *result;
	preparing->local = plan->local ? plan : NULL;
	list_init(&preparing->in_session);
	if (plan->local)
		r = prepare_tables(preparing, err);
	if (r >= 0)
		r = prepare_stages(preparing, &plan->plan, err);
	if (r < 0) {
		drop_plan(session, result->plan);
		preparing_free(preparing);
		return r;
	}
	if (r == DEVICE_PREPARING) {
		list_append(&session->preparing, &preparing->in_session);
		return 0;
	}
	take_ready(preparing, plan);
	prepare_finish(preparing);
	preparing_free(preparing);
	return 0;
}

void prepare_forget(struct session *session)
{
	/* The last one first: the front would begin with the next when the first one is gone. */
	while (!list_is_empty(&session->preparing))
		preparing_free(container_of(session->preparing.prev, struct preparing, in_session));
}

/* ---- making ---- */

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
