/* SPDX-License-Identifier: MIT */
/*
 * local_plan.c: what clients need to launch in contexts of their own: plans as data, and code by its hash. A
 * descriptor of code that was not read yet is its user's, as any answer's.
 */
#include "session/worker_registry.h"
#include "tuner.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <base/clock.h>
#include <proto/fnv.h>
#include <kernels/launch_wire.h>
#include <proto/clamp.h>
#include <proto/error.h>

/* A device does a second of work a second: no more is believed of one user's clients, and no more
 * than this at once. */
#define MOST_TOLD_NS (120 * NS_PER_S)
#define MOST_RUN_NS  (2 * MOST_TOLD_NS) /* of one run: none that takes longer is believed */

/* ---- plans ---- */

/* Of what makes two plans of a problem differ; never 0. */
static uint64_t version_of(const struct plan *plan)
{
	uint64_t hash = FNV_START;

	for (uint32_t i = 0; i < plan->n_stages; i++)
		hash = fnv_text(hash, plan->stages[i].kernel);
	hash = fnv_add(hash, (uint32_t)plan->n_splits);
	hash = fnv_add(hash, (uint32_t)plan->split_size);
	hash = fnv_add(hash, plan->shares);
	return hash ? hash : 1;
}

static int describe_launch(struct session *session, const struct launch_record *record,
			   const char *family, const struct device_kernel *kernel,
			   struct proto_launch *ret_launch, struct fmha_error *err)
{
	const struct device *device = session->worker->device;
	const struct device_code *code = device_kernel_code(device, kernel);
	struct launch_record with_code = *record;

	if (!code)
		return fmha_error_set(err, FMHA_ENOTSUP, "%s: its code is not one to send", family);
	memcpy(with_code.code, code->hash, sizeof(with_code.code));
	snprintf(ret_launch->family, sizeof(ret_launch->family), "%s", family);
	snprintf(ret_launch->kernel, sizeof(ret_launch->kernel), "%s",
		 device_kernel_name(device, kernel));
	return launch_to_wire(&with_code, ret_launch, err);
}

static void describe_tensors(const struct plan *plan, struct proto_local_plan_result *result)
{
	for (uint32_t i = 0; i < plan->n_views; i++) {
		const struct plan_view *view = &plan->views[i];

		if (view->role == FMHA_T_WORKSPACE)
			continue;
		result->tensors[result->n_tensors++] = (struct proto_local_tensor){
			.role = view->role,
			.bytes = view->span_bytes,
			.alignment = view->alignment};
	}
}

static int describe(struct session *session, const struct plan *plan,
		    const struct device_kernel *const kernels[PLAN_MAX_STAGES],
		    const struct device_kernel *tables, struct proto_local_plan_result *result,
		    struct fmha_error *err)
{
	struct plan_local local;
	uint32_t first;
	int r = plan_local(plan, &local, err);

	if (r < 0)
		return r;
	first = local.prepares ? 1 : 0;
	*result = (struct proto_local_plan_result){.workspace_bytes = local.workspace_bytes,
						   .workspace_alignment = PLAN_ALIGNMENT,
						   .flops = plan->flops,
						   .version = version_of(plan),
						   .seqlen_k_least = plan->keys.least,
						   .seqlen_k_most = plan->keys.most,
						   .key_stride_unit = plan->keys.stride_unit,
						   .n_launches = local.n_launches};
	describe_tensors(plan, result);
	if (local.prepares) {
		device_place_tables(session->worker->device, &local.launches[0]);
		r = describe_launch(session, &local.launches[0], "prepare", tables,
				    &result->launches[0], err);
	}
	for (uint32_t i = 0; i < plan->n_stages && r == 0; i++) {
		const struct plan_stage *stage = &plan->stages[i];
		struct proto_launch *launch = &result->launches[first + i];

		r = describe_launch(session, &local.launches[first + i],
				    plan_family_name(stage->family), kernels[i], launch, err);
		snprintf(launch->kernel, sizeof(launch->kernel), "%s", stage->kernel);
	}
	return r;
}

void local_answer(struct session *session, uint32_t id, const struct plan *plan,
		  const struct device_kernel *const kernels[PLAN_MAX_STAGES],
		  const struct device_kernel *tables)
{
	struct proto_local_plan_result result;
	struct fmha_error err;

	_Static_assert(1 + PLAN_MAX_STAGES <= PROTO_MAX_LAUNCHES, "every plan fits");
	if (describe(session, plan, kernels, tables, &result, &err) < 0)
		connection_answer_error(&session->connection, id, &err);
	else
		connection_answer(&session->connection, id, PROTO_LOCAL_PLAN, &result, -1);
}

/* ---- runs ---- */

/* What a run takes: as measured, or at least; never 0, and no more than is ever believed. */
static uint64_t run_ns(const struct worker *worker, const struct plan *plan,
		       const struct registry_measured *measured)
{
	const double launch_ns = 5000;
	uint64_t ns = measured ? clamp_u64(measured->us * NS_PER_US)
			       : clamp_u64(launch_ns + roof_ns(&worker->plans.roof, plan));

	if (ns == 0)
		return 1;
	return ns < MOST_RUN_NS ? ns : MOST_RUN_NS;
}

/* @ns: of a run, @timed: which is more than a guess. */
static void count_runs(struct session *session, const struct plan *plan, uint64_t n, uint64_t ns,
		       bool timed)
{
	struct worker *worker = session->worker;
	struct census_handle handle = {0};
	struct census_runs runs;
	uint64_t now = clock_ns(), *told = &session->account->told_ns, room;

	if (now - *told > MOST_TOLD_NS)
		*told = now - MOST_TOLD_NS;
	room = (now - *told) / ns;
	if (n > room)
		n = room;
	if (n == 0)
		return;
	*told += n * ns;
	runs = (struct census_runs){n, n * ns,
				    timed ? (double)n * roof_ns(&worker->plans.roof, plan) : 0};
	census_count(&worker->plans.census, session->uid, plan, &runs, &handle);
	tuner_used_by_clients(worker->tuner);
}

int local_runs(struct session *session, uint32_t id, const struct proto_local_runs_params *params,
	       struct fmha_error *err)
{
	struct worker *worker = session->worker;
	struct proto_local_runs_result result = {.version = params->version};
	struct plan *plan = malloc(sizeof(*plan));
	struct registry_measured measured;
	char shape[PLAN_SHAPE_BYTES];
	bool has_measured;
	int r;

	if (!plan)
		return fmha_error_set(err, FMHA_ENOMEM, "plan: out of memory");
	kernels_act_for(session, true);
	r = plan_build(&params->problem, NULL, &worker->plans.device, plan, err);
	if (r == 0) {
		plan_shape(&plan->problem, shape);
		has_measured = worker->plans.registry &&
			       registry_measured_at(worker->plans.registry, shape, &measured, 1) >
				       0;
		count_runs(session, plan, params->runs,
			   run_ns(worker, plan, has_measured ? &measured : NULL), has_measured);
		if (has_measured && plan_may_change(plan))
			result.version = version_of(plan);
		connection_answer(&session->connection, id, PROTO_LOCAL_RUNS, &result, -1);
	}
	free(plan);
	return r;
}

/* ---- code ---- */

int local_code(struct session *session, uint32_t id, const struct proto_code_params *params,
	       struct fmha_error *err)
{
	struct proto_code_result result;
	const struct device_code *code;
	int fd;

	if (params->hash_bytes != LAUNCH_HASH_BYTES)
		return fmha_error_set_field(err, FMHA_EINVAL, "hash", "hash: %u bytes, not %d",
					    params->hash_bytes, LAUNCH_HASH_BYTES);
	code = device_find_code(session->worker->device, params->hash);
	if (!code)
		return fmha_error_set_field(
			err, FMHA_ENOENT, "hash",
			"hash: no such code; the worker may be a new one, which "
			"has what it has planned with");
	fd = memfd_again(code->fd);
	if (fd < 0)
		return fmha_error_set(err, FMHA_ENOMEM, "no descriptor for the code");
	result.size = code->bytes;
	connection_answer(&session->connection, id, PROTO_CODE, &result, fd);
	return 0;
}
