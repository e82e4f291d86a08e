/* SPDX-License-Identifier: MIT */
/*
 * prepare.c: plans that wait for their kernels. On a device whose kernels are compiled, the first
 * plan that needs one has to wait for the front's compiler; its answer comes when the code is
 * loaded, and nobody else's request waits with it.
 */
#include "session/worker_registry.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <base/clock.h>
#include <proto/error.h>

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

/* ---- plans ---- */

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

void prepare_renewal(struct session *session, uint64_t id, const struct plan *next)
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

int prepare_plan(struct session *session, uint32_t id, struct session_plan *plan,
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
