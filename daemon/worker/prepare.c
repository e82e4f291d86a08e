/* SPDX-License-Identifier: MIT */
/*
 * prepare.c: plans that wait for their kernels. On a device whose kernels are compiled, the first
 * plan that needs one has to wait for the front's compiler; its answer comes when the code is
 * loaded, and nobody else's request waits with it.
 */
#include "worker.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <proto/error.h>

#define MAX_CODE_BYTES (64u << 20)

/* A kernel that the front was asked for. */
struct compile {
	struct list in_worker;
	uint32_t id;
	device_built done; /* NULL: cancelled; its answer comes all the same, maybe with code */
	void *owner;
};

struct preparing {
	struct list in_session;
	struct session *session;
	uint32_t id;     /* of the plan request */
	uint32_t n_left; /* stages that are not ready */
	struct fmha_error error;
	struct proto_plan_result result;
	const struct device_kernel *kernels[PLAN_MAX_STAGES];
};

/* ---- asking the front ---- */

/* Id 0 is worker_ready's. */
static uint32_t new_id(struct worker *worker)
{
	if (++worker->next_compile == 0)
		worker->next_compile = 1;
	return worker->next_compile;
}

int prepare_build(void *worker_pointer, const struct device_build *build, device_built done,
		  void *owner, struct fmha_error *err)
{
	struct worker *worker = worker_pointer;
	struct compile *compile = malloc(sizeof(*compile));
	struct proto_compile_params params = {.uid = build->uid, .urgency = PROTO_URGENT};
	int r;

	if (!compile)
		return fmha_error_set(err, FMHA_ENOMEM, "compile: out of memory");
	snprintf(params.kernel, sizeof(params.kernel), "%s", build->kernel);
	snprintf(params.arch, sizeof(params.arch), "%s", build->arch);
	snprintf(params.source, sizeof(params.source), "%s", build->source);
	snprintf(params.options, sizeof(params.options), "%s", build->options);
	compile->id = new_id(worker);
	compile->done = done;
	compile->owner = owner;
	r = connection_request(&worker->control, compile->id, PROTO_COMPILE, &params, -1, err);
	if (r < 0) {
		free(compile);
		return r;
	}
	list_append(&worker->compiles, &compile->in_worker);
	return 0;
}

void prepare_cancel_build(void *worker_pointer, void *owner)
{
	struct worker *worker = worker_pointer;

	list_for_each(node, &worker->compiles)
	{
		struct compile *compile = container_of(node, struct compile, in_worker);
		const struct proto_compile_cancel_params params = {.request = compile->id};

		if (compile->owner != owner || !compile->done)
			continue;
		compile->done = NULL;
		(void)connection_request(&worker->control, new_id(worker), PROTO_COMPILE_CANCEL,
					 &params, -1, NULL);
		return;
	}
}

static struct compile *find_compile(struct worker *worker, uint32_t id)
{
	list_for_each(node, &worker->compiles)
	{
		struct compile *compile = container_of(node, struct compile, in_worker);

		if (compile->id == id)
			return compile;
	}
	return NULL;
}

/* Maps the code object for as long as @done takes. */
static int deliver(struct compile *compile, const struct proto_message *message, int fd,
		   struct fmha_error *err)
{
	struct proto_compile_result result;
	struct device_code code;
	void *data;
	int r = proto_decode_result(message, PROTO_COMPILE, &result, err);

	if (r < 0)
		return r;
	if (fd < 0 || result.size == 0 || result.size > MAX_CODE_BYTES)
		return fmha_error_set(err, FMHA_EINTERNAL, "compile: an answer without code");
	data = mmap(NULL, result.size, PROT_READ, MAP_PRIVATE, fd, 0);
	if (data == MAP_FAILED)
		return fmha_error_set(err, FMHA_ENOMEM, "compile: no memory for the code");
	code = (struct device_code){data, result.spills};
	if (compile->done)
		compile->done(compile->owner, &code, NULL);
	munmap(data, result.size);
	return 0;
}

void prepare_on_answer(struct worker *worker, const struct proto_message *message)
{
	struct compile *compile = find_compile(worker, message->id);
	struct fmha_error err = message->error;
	int fd = -1;

	if (!compile)
		return;
	list_remove(&compile->in_worker);
	if (err.code == FMHA_OK) {
		fd = connection_take_fd(&worker->control);
		(void)deliver(compile, message, fd, &err);
	}
	if (err.code != FMHA_OK && compile->done)
		compile->done(compile->owner, NULL, &err);
	if (fd >= 0)
		(void)close(fd);
	free(compile);
}

/* ---- plans ---- */

static void preparing_free(struct preparing *preparing)
{
	list_remove(&preparing->in_session);
	free(preparing);
}

static void drop_plan(struct session *session, uint64_t id)
{
	struct session_plan *plan = table_remove(&session->plans, id);

	if (!plan)
		return;
	session_plan_unref(plan);
}

/* From here on the plan can run. */
static void finish(struct preparing *preparing)
{
	struct session *session = preparing->session;
	struct session_plan *plan = table_get(&session->plans, preparing->result.plan);

	if (plan) /* else the client has dropped it meanwhile */
		memcpy(plan->kernels, preparing->kernels, sizeof(plan->kernels));
	connection_answer(&session->connection, preparing->id, PROTO_PLAN, &preparing->result, -1);
}

static void on_prepared(void *owner, const struct fmha_error *error);

/* Return: 0 (all its kernels are ready), DEVICE_PREPARING, or FMHA_E*, and nobody waits. */
static int prepare_stages(struct preparing *preparing, const struct plan *plan,
			  struct fmha_error *err)
{
	struct session *session = preparing->session;
	struct device *device = session->worker->device;
	union abi_args args[PLAN_MAX_STAGES];
	int r = 0;

	plan_placeholder_args(plan, args);
	for (uint32_t i = 0; i < plan->n_stages && r >= 0; i++) {
		r = device_prepare(device, &plan->stages[i], &args[i], session->uid, on_prepared,
				   preparing, &preparing->kernels[i], err);
		preparing->n_left += r == DEVICE_PREPARING;
	}
	if (r < 0)
		device_forget(device, preparing);
	return r < 0 ? r : preparing->n_left > 0 ? DEVICE_PREPARING : 0;
}

/*
 * The code of the chosen kernels has been seen: where it spills, dispatch may prefer others now.
 * Each is asked for once, so this ends. Return: as prepare_stages().
 */
static int choose_again(struct preparing *preparing, struct fmha_error *err)
{
	struct session *session = preparing->session;
	struct session_plan *plan = table_get(&session->plans, preparing->result.plan);
	struct plan next;
	bool same;

	if (!plan) /* the client has dropped it meanwhile */
		return 0;
	session->worker->acting_uid = session->uid;
	if (plan_build(&plan->plan.problem, &session->worker->plan_device, &next, err) < 0)
		return 0; /* what is ready runs */
	same = next.n_stages == plan->plan.n_stages;
	for (uint32_t i = 0; same && i < next.n_stages; i++)
		same = strcmp(next.stages[i].kernel, plan->plan.stages[i].kernel) == 0;
	if (same)
		return 0;
	plan->plan = next;
	session_settle_plan(session, plan, &preparing->result);
	return prepare_stages(preparing, &plan->plan, err);
}

static void on_prepared(void *owner, const struct fmha_error *error)
{
	struct preparing *preparing = owner;
	struct session *session = preparing->session;
	struct fmha_error err;
	int r;

	if (error->code != FMHA_OK)
		preparing->error = *error;
	if (--preparing->n_left > 0)
		return;
	err = preparing->error;
	r = err.code == FMHA_OK ? choose_again(preparing, &err) : err.code;
	if (r == DEVICE_PREPARING)
		return;
	if (r >= 0) {
		finish(preparing);
	} else {
		drop_plan(session, preparing->result.plan);
		/* The client's request was sound: a build that fails is this machine's fault. */
		if (err.code == FMHA_EINVAL)
			err.code = FMHA_ENOKERNEL;
		connection_answer_error(&session->connection, preparing->id, &err);
	}
	preparing_free(preparing);
}

int prepare_plan(struct session *session, uint32_t id, struct session_plan *plan,
		 const struct proto_plan_result *result, struct fmha_error *err)
{
	struct preparing *preparing = calloc(1, sizeof(*preparing));
	int r;

	if (!preparing) {
		drop_plan(session, result->plan);
		return fmha_error_set(err, FMHA_ENOMEM, "plan: out of memory");
	}
	preparing->session = session;
	preparing->id = id;
	preparing->result = *result;
	list_init(&preparing->in_session);
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
	finish(preparing);
	preparing_free(preparing);
	return 0;
}

void prepare_forget(struct session *session)
{
	/* The last one first: the front would begin with the next when the first one is gone. */
	while (!list_is_empty(&session->preparing)) {
		struct preparing *preparing = container_of(session->preparing.prev,
							   struct preparing, in_session);

		device_forget(session->worker->device, preparing);
		preparing_free(preparing);
	}
}
