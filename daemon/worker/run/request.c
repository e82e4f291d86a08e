/* SPDX-License-Identifier: MIT */
/* request.c: the memory of requests, and the end of a run: what is answered, counted and kept of it. */
#include "request.h"

#include <stdlib.h>
#include <string.h>

#include <base/clock.h>
#include <proto/error.h>

#include "session/worker_registry.h"
#include "tuner.h"

#define TINY_NS             50000
#define SLOW_UNTIL_NOT_TINY 4
#define KEEP_FREE_REQUESTS  64

struct request *request_new(struct worker *worker)
{
	struct list *node = list_pop(&worker->runs.free_requests);
	struct request *request;

	if (node) {
		worker->runs.n_free_requests--;
		return container_of(node, struct request, in_worker);
	}
	request = calloc(1, sizeof(*request));
	if (!request)
		return NULL;
	request->launch = device_launch_new(worker->device);
	if (!request->launch) {
		free(request);
		return NULL;
	}
	request->launch->owner = request;
	list_init(&request->in_worker);
	list_init(&request->in_session);
	return request;
}

static void request_free(struct worker *worker, struct request *request)
{
	list_remove(&request->in_worker);
	list_remove(&request->in_session);
	request->plan = session_plan_unref(request->plan);
	if (worker->runs.n_free_requests < KEEP_FREE_REQUESTS) {
		list_prepend(&worker->runs.free_requests, &request->in_worker); /* still warm */
		worker->runs.n_free_requests++;
		return;
	}
	device_launch_free(worker->device, request->launch);
	free(request);
}

void request_retire(struct request *request)
{
	struct session *session = request->session;
	struct worker *worker = session->worker;

	bind_release(request);
	if (request->fenced && --session->n_fenced == 0)
		account_release(session->account, ACCOUNT_FENCED, 1);
	request->fenced = false;
	if (request->state == REQUEST_RUNNING)
		session->n_running--;
	else
		session->n_waiting--;
	request_free(worker, request);
	if (--worker->runs.n_pending == 0) {
		uv_timer_stop(&worker->runs.tick);
		worker_trim_soon(worker);
		tuner_resume(worker->tuner);
	}
}

static void mark_lost(struct request *request, uint64_t address)
{
	for (uint32_t i = 0; i < request->n_buffers; i++) {
		struct device_memory *memory = &request->buffers[i]->memory;
		uint64_t start = (uint64_t)(uintptr_t)memory->map;

		if (address >= start && address - start < memory->map_bytes)
			request->buffers[i]->lost = true;
	}
}

/*
 * How much work of this plan's kernels may take the loop thread, and how long work takes. One slow
 * run says little: the first touches new pages, any may have been interrupted. Runs of a plan can
 * differ by their sequences' lengths: what was tiny once allows no more work than that.
 */
static void judge_size(const struct request *request, uint64_t kernel_ns)
{
	struct session_plan *plan = request->plan;
	double per_work = (double)kernel_ns / (request->work + 1);

	plan->ns_per_work = plan->ns_per_work > 0 ? (3 * plan->ns_per_work + per_work) / 4
						  : per_work;
	plan->n_slow = kernel_ns < TINY_NS ? 0 : plan->n_slow + 1;
	if (plan->n_slow == 0 && request->work > plan->tiny_work)
		plan->tiny_work = request->work;
	else if (plan->n_slow >= SLOW_UNTIL_NOT_TINY && request->work <= plan->tiny_work)
		plan->tiny_work = request->work / 2;
}

static void answer_error(struct request *request, const struct fmha_error *error)
{
	struct session *session = request->session;

	if (error->code == FMHA_ECANCELED)
		session->worker->runs.n_cancelled++;
	else
		session->worker->runs.n_failed++;
	if (request->answered)
		session->late_error = *error;
	else
		connection_answer_error(&session->connection, request->id, error);
}

/* The family of a plan's main stage: "fwd" of "fwd-bf16-...". NULL: there is no room for another. */
static struct family_work *find_family(struct worker *worker, const struct plan *plan)
{
	bool backward = plan->problem.op == FMHA_BACKWARD && plan->n_stages > 1;
	const char *name = plan->stages[backward].kernel;
	size_t n = strcspn(name, "-");

	for (int i = 0; i < WORKER_FAMILIES; i++) {
		struct family_work *family = &worker->runs.families[i];

		if (!family->name[0] && n < sizeof(family->name))
			memcpy(family->name, name, n);
		if (strncmp(family->name, name, n) == 0 && !family->name[n])
			return family;
	}
	return NULL;
}

static void count_work(struct request *request, uint64_t kernel_ns)
{
	struct session_plan *plan = request->plan;
	struct session *session = request->session;

	session->flops += plan->plan.flops;
	session->bytes += plan->plan.bytes;
	session->kernel_ns += kernel_ns;
	session->roof_ns += plan->roof_ns;
	session->census = plan->census;
	if (!plan->family)
		plan->family = find_family(request->session->worker, &plan->plan);
	if (!plan->family)
		return;
	plan->family->n_runs++;
	plan->family->flops += plan->plan.flops;
	plan->family->bytes += plan->plan.bytes;
	plan->family->kernel_ns += kernel_ns;
	plan->family->roof_ns += plan->roof_ns;
}

static void answer_success(struct request *request, uint64_t now)
{
	struct session *session = request->session;
	struct worker *worker = session->worker;
	const struct device_launch *launch = request->launch;
	struct proto_run_result result = {.queued_ns = launch->started_ns - request->arrived_ns,
					  .kernel_ns = launch->ended_ns - launch->started_ns};

	/* The client goes on while its run is counted. */
	if (!request->answered)
		connection_answer(&session->connection, request->id, PROTO_RUN, &result, -1);
	worker->runs.n++;
	session->n_runs++;
	histogram_add(&worker->runs.queued, result.queued_ns);
	histogram_add(&worker->runs.kernel, result.kernel_ns);
	histogram_add(&worker->runs.total, now - request->arrived_ns);
	if (worker->trace)
		trace_run(request, now);
	judge_size(request, result.kernel_ns);
	kernels_count_run(worker, request->plan, result.kernel_ns);
	census_count(&worker->plans.census, request->plan->uid, &request->plan->plan,
		     &(struct census_runs){1, result.kernel_ns, request->plan->roof_ns},
		     &request->plan->census);
	count_work(request, result.kernel_ns);
}

/* Its integers lie on the device now. */
static void keep_tables(struct request *request)
{
	if (!request->fresh || request->is_known || !request->indices)
		return;
	checked_keep(request->fresh, request->indices);
	request->indices = NULL;
}

void request_complete(struct request *request, uint64_t now)
{
	struct device_launch *launch = request->launch;
	struct fmha_error *error = &launch->error;

	if (launch->bus_address)
		mark_lost(request, launch->bus_address);
	if (error->code == FMHA_OK && request->bind_error.code != FMHA_OK)
		*error = request->bind_error; /* only its signals were given */
	if (request->timed_out && error->code == FMHA_ECANCELED)
		(void)fmha_error_set(error, FMHA_ETIMEDOUT, "not done within %u ms",
				     request->params.timeout_ms);
	if (error->code == FMHA_OK) {
		keep_tables(request);
		answer_success(request, now);
	} else {
		answer_error(request, error);
	}
	request_retire(request);
}

void request_fail(struct request *request, const struct fmha_error *error)
{
	answer_error(request, error);
	request_retire(request);
}

void request_answer_queued(struct request *request)
{
	struct proto_run_result result = {.queued_ns = clock_ns() - request->arrived_ns};

	if (request->answered)
		return;
	request->answered = true;
	connection_answer(&request->session->connection, request->id, PROTO_RUN, &result, -1);
}
