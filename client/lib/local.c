/* SPDX-License-Identifier: MIT */
/*
 * local.c: plans that this process launches. A plan is launch records and functions; a run copies each
 * record's arguments, fills in addresses and calls the runtime. Nothing of a version changes after it was
 * made, and a plan keeps all that it had, so that any number of threads may run it.
 */
#include "local.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <proto/error.h>
#include <proto/problem.h>

#include "client.h"

_Static_assert(FMHA_MAX_LAUNCHES == PROTO_MAX_LAUNCHES, "a plan's launches are all shown");

#define LOOK_EVERY 8 /* runs: the others do not even ask for the time */

/* ---- making ---- */

static int check_result(const struct proto_local_plan_result *result, struct fmha_error *err)
{
	uint64_t alignment = result->workspace_alignment;
	bool varies = result->seqlen_k_most != 0;

	if (alignment == 0 || alignment > 4096 || (alignment & (alignment - 1)) != 0)
		return fmha_error_set(err, FMHA_EPROTO, "a plan whose workspace has no alignment");
	if (varies && (result->seqlen_k_least < 1 || result->key_stride_unit == 0 ||
		       result->seqlen_k_most < result->seqlen_k_least))
		return fmha_error_set(err, FMHA_EPROTO, "a plan of no number of keys");
	for (uint32_t i = 0; i < result->n_launches; i++)
		if (varies && result->launches[i].sequences_offset == 0)
			return fmha_error_set(
				err, FMHA_EPROTO,
				"a launch whose keys cannot be told how many they are");
	for (uint32_t i = 0; i < result->n_tensors; i++) {
		alignment = result->tensors[i].alignment;
		if (alignment == 0 || alignment > 4096 || (alignment & (alignment - 1)) != 0)
			return fmha_error_set(err, FMHA_EPROTO, "a tensor without an alignment");
	}
	return 0;
}

int local_plan_make(const char *backend, const struct proto_local_plan_result *result,
		    local_fetch fetch, void *owner, struct fmha_local_plan **ret_plan,
		    struct fmha_error *err)
{
	struct fmha_local_plan *plan = calloc(1, sizeof(*plan));
	int r;

	if (!plan)
		return fmha_error_set(err, FMHA_ENOMEM, "plan: out of memory");
	plan->process = process_token();
	plan->workspace_bytes = result->workspace_bytes;
	plan->workspace_alignment = result->workspace_alignment;
	plan->flops = result->flops;
	plan->seqlen_k_least = result->seqlen_k_least;
	plan->seqlen_k_most = result->seqlen_k_most;
	plan->key_stride_unit = result->key_stride_unit;
	plan->n_tensors = result->n_tensors;
	memcpy(plan->tensors, result->tensors, sizeof(plan->tensors));
	r = check_result(result, err);
	if (r == 0)
		r = local_runtime_find(backend, &plan->runtime, err);
	if (r == 0)
		r = local_version_make(plan, result, fetch, owner, &plan->current, err);
	if (r < 0)
		plan = fmha_local_plan_free(plan);
	else
		*ret_plan = plan;
	return r;
}

struct fmha_local_plan *fmha_local_plan_free(struct fmha_local_plan *plan)
{
	if (!plan)
		return NULL;
	/* A child has no context, and perhaps the lock of a thread that it has not. */
	if (plan->process == process_token()) {
		plan->refresh = local_refresh_free(plan->refresh, plan);
		while (plan->current)
			plan->current = local_version_free(plan->current);
	}
	free(plan);
	return NULL;
}

/* ---- out of a daemon ---- */

int local_problem(const struct fmha_problem *problem, struct proto_plan_params *ret_params,
		  struct fmha_error *err)
{
	int r = check_struct_size(problem->struct_size, sizeof(*problem), "fmha_problem", err);

	if (r < 0)
		return r;
	ret_params->problem = *problem;
	for (uint32_t role = 0; role < FMHA_N_TENSORS; role++) {
		struct fmha_tensor *tensor = &ret_params->problem.tensor[role];
		char field[48];

		if (tensor->buffer != 0 || tensor->offset != 0) {
			(void)snprintf(field, sizeof(field), "tensor.%s.buffer",
				       proto_roles[role].name);
			return fmha_error_set_field(err, FMHA_EINVAL, field,
						    "%s: a local plan's tensors lie in no buffer",
						    field);
		}
		if (!tensor->data)
			continue;
		tensor->buffer = role + 1; /* no two in one buffer: they overlap nowhere */
		tensor->offset = (uintptr_t)tensor->data % LAUNCH_ALIGNMENT;
		tensor->data = NULL;
	}
	r = problem_settle(&ret_params->problem, err);
	return r == 0 ? problem_check(&ret_params->problem, err) : r;
}

int local_asking_new(struct fmha_device *device, const struct fmha_local_options *options,
		     struct local_asking **ret_asking, struct fmha_error *err)
{
	int r = options ? check_struct_size(options->struct_size, sizeof(*options),
					    "fmha_local_options", err)
			: 0;
	struct local_asking *asking = r == 0 ? calloc(1, sizeof(*asking)) : NULL;

	if (r < 0)
		return r;
	if (!asking)
		return fmha_error_set(err, FMHA_ENOMEM, "plan: out of memory");
	asking->from.device = device;
	asking->from.deadline = options && options->timeout_ms
					? deadline_after_ms(options->timeout_ms)
					: client_deadline(device->client);
	*ret_asking = asking;
	return 0;
}

int local_ask_daemon(struct local_asking *asking, const struct fmha_problem *problem,
		     struct fmha_error *err)
{
	int r = local_problem(problem, &asking->params, err);

	if (r < 0)
		return r;
	return link_call(&asking->from.device->worker, PROTO_LOCAL_PLAN, &asking->params, -1,
			 asking->from.deadline, &asking->result, NULL, err);
}

static int make_plan(struct local_asking *asking, const struct fmha_problem *problem,
		     struct fmha_local_plan **ret_plan, struct fmha_error *err)
{
	struct fmha_device_info info;
	int r = FMHA_ENOENT;

	/* A worker that died between the plan and its code has a successor that has planned nothing. */
	for (int i = 0; i < 2 && r == FMHA_ENOENT; i++) {
		r = local_ask_daemon(asking, problem, err);
		if (r == 0)
			r = fmha_device_info(asking->from.device, &info, err);
		if (r == 0)
			r = local_plan_make(info.backend, &asking->result, local_fetch_from_daemon,
					    &asking->from, ret_plan, err);
	}
	return r;
}

int fmha_local_plan_new(struct fmha_device *device, const struct fmha_problem *problem,
			const struct fmha_local_options *options, struct fmha_local_plan **ret_plan,
			struct fmha_error *err)
{
	struct local_asking *asking = NULL;
	struct fmha_local_plan *plan = NULL;
	int r;

	r = client_check(device && problem && ret_plan ? device->client : NULL, __func__, err);
	if (r == 0)
		r = local_asking_new(device, options, &asking, err);
	if (r == 0)
		r = make_plan(asking, problem, &plan, err);
	if (r == 0)
		r = local_refresh_new(plan, device, &asking->params, options, err);
	if (r < 0)
		plan = fmha_local_plan_free(plan);
	else
		*ret_plan = plan;
	free(asking);
	return r;
}

int fmha_local_warm(struct fmha_device *device, const struct fmha_problem *problem,
		    const struct fmha_local_options *options, struct fmha_error *err)
{
	struct local_asking *asking = NULL;
	int r;

	r = client_check(device && problem ? device->client : NULL, __func__, err);
	if (r == 0)
		r = local_asking_new(device, options, &asking, err);
	if (r == 0)
		r = local_ask_daemon(asking, problem, err);
	free(asking);
	return r;
}

/* ---- what it is ---- */

int fmha_local_plan_info(const struct fmha_local_plan *plan, struct fmha_local_plan_info *ret_info,
			 struct fmha_error *err)
{
	const struct local_version *version;

	if (!plan || !ret_info)
		return fmha_error_set(err, FMHA_EINVAL, "%s: an argument is NULL", __func__);
	version = __atomic_load_n(&plan->current, __ATOMIC_ACQUIRE);
	memset(ret_info, 0, sizeof(*ret_info));
	ret_info->workspace_bytes = plan->workspace_bytes;
	ret_info->workspace_alignment = (uint32_t)plan->workspace_alignment;
	ret_info->flops = plan->flops;
	ret_info->seqlen_k_least = plan->seqlen_k_least;
	ret_info->seqlen_k_most = plan->seqlen_k_most;
	ret_info->key_stride_unit = plan->key_stride_unit;
	ret_info->n_runs = __atomic_load_n(&plan->n_runs, __ATOMIC_RELAXED);
	ret_info->n_launches = version->n_launches;
	for (uint32_t i = 0; i < version->n_launches; i++) {
		const struct launch_record *record = &version->launches[i].record;
		struct fmha_local_launch_info *launch = &ret_info->launches[i];

		memcpy(launch->family, version->launches[i].family, sizeof(launch->family));
		memcpy(launch->kernel, version->launches[i].kernel, sizeof(launch->kernel));
		memcpy(launch->code, record->code, sizeof(launch->code));
		memcpy(launch->grid, record->grid, sizeof(launch->grid));
		memcpy(launch->block, record->block, sizeof(launch->block));
		launch->lds_bytes = record->lds_bytes;
	}
	return 0;
}

int fmha_local_plan_tensor(const struct fmha_local_plan *plan, uint32_t role,
			   struct fmha_local_tensor *ret_tensor, struct fmha_error *err)
{
	if (!plan || !ret_tensor || role >= FMHA_N_TENSORS)
		return fmha_error_set(err, FMHA_EINVAL, "%s: an argument is NULL, or no role",
				      __func__);
	for (uint32_t i = 0; i < plan->n_tensors; i++) {
		if (plan->tensors[i].role != role)
			continue;
		*ret_tensor = (struct fmha_local_tensor){.bytes = plan->tensors[i].bytes,
							 .alignment = plan->tensors[i].alignment};
		return 0;
	}
	return fmha_error_set(err, FMHA_ENOENT, "the plan has no tensor.%s",
			      proto_roles[role].name);
}

/* ---- runs ---- */

static int refuse_tensor(struct fmha_error *err, uint32_t role, const char *why, uint32_t alignment)
{
	char field[48];

	(void)snprintf(field, sizeof(field), "tensor.%s", proto_roles[role].name);
	return fmha_error_set_field(err, FMHA_EINVAL, field, "%s: %s%.0u", field, why, alignment);
}

static int bind_tensors(const struct fmha_local_plan *plan, const struct fmha_local_run *run,
			struct launch_bases *bases, struct fmha_error *err)
{
	for (uint32_t i = 0; i < plan->n_tensors; i++) {
		const struct proto_local_tensor *tensor = &plan->tensors[i];
		uint64_t at = tensor->role < run->n_tensors ? (uintptr_t)run->tensors[tensor->role]
							    : 0;

		if (at == 0 && tensor->bytes > 0)
			return refuse_tensor(err, tensor->role, "no address", 0);
		if (at & (tensor->alignment - 1))
			return refuse_tensor(err, tensor->role, "its address is no multiple of ",
					     tensor->alignment);
		/* An empty tensor is there all the same, for kernels that ask. */
		bases->at[tensor->role] = at ? at : plan->workspace_alignment;
	}
	bases->at[LAUNCH_WORKSPACE] = (uintptr_t)run->workspace;
	if (plan->workspace_bytes > 0 &&
	    (!run->workspace || bases->at[LAUNCH_WORKSPACE] & (plan->workspace_alignment - 1)))
		return fmha_error_set_field(
			err, FMHA_EINVAL, "workspace",
			"workspace: %llu bytes at a multiple of %llu are needed",
			(unsigned long long)plan->workspace_bytes,
			(unsigned long long)plan->workspace_alignment);
	return 0;
}

/* The kernels were chosen for steps like these. */
static int check_keys(const struct fmha_local_plan *plan, const struct fmha_local_keys *keys,
		      struct fmha_error *err)
{
	const int64_t most = (int64_t)1
			     << 36; /* elements: an engine's steps are below 2^40 bytes */
	const int64_t steps[] = {keys->k_stride_batch, keys->k_stride_head, keys->v_stride_batch,
				 keys->v_stride_head};

	if (plan->seqlen_k_most == 0 || keys->seqlen_k < plan->seqlen_k_least ||
	    keys->seqlen_k > plan->seqlen_k_most)
		return fmha_error_set_field(
			err, FMHA_EINVAL, "keys", "keys: %d, the plan may be run with %d to %d%s",
			keys->seqlen_k, plan->seqlen_k_least, plan->seqlen_k_most,
			plan->seqlen_k_most ? "" : ": its own number only");
	for (size_t i = 0; i < sizeof(steps) / sizeof(steps[0]); i++)
		if (steps[i] <= 0 || steps[i] >= most || steps[i] % plan->key_stride_unit != 0)
			return fmha_error_set_field(
				err, FMHA_EINVAL, "keys",
				"keys: a stride of %lld elements, no positive multiple of %u",
				(long long)steps[i], plan->key_stride_unit);
	return 0;
}

static int check_run(const struct fmha_local_plan *plan, const struct fmha_local_run *run,
		     struct fmha_error *err)
{
	int r;

	if (!plan || !run || !run->tensors)
		return fmha_error_set(err, FMHA_EINVAL, "fmha_local_plan_run: an argument is NULL");
	r = check_struct_size(run->struct_size, sizeof(*run), "fmha_local_run", err);
	if (r < 0)
		return r;
	if (plan->process != process_token())
		return fmha_error_set(
			err, FMHA_ECONN,
			"this plan belongs to the parent process, whose GPU context a "
			"forked child does not have: connect and plan anew");
	if (run->reserved)
		return fmha_error_refuse(err, "reserved", "not 0");
	if (((uintptr_t)run->dropout_seed_at | (uintptr_t)run->dropout_offset_at) %
	    sizeof(uint64_t))
		return fmha_error_set_field(
			err, FMHA_EINVAL, "dropout_seed_at",
			"dropout_seed_at, dropout_offset_at: not multiples of 8");
	return run->keys ? check_keys(plan, run->keys, err) : 0;
}

static int launch(const struct fmha_local_plan *plan, const struct launch_record *record,
		  void *function, const struct fmha_local_run *run,
		  const struct launch_bases *bases, struct fmha_error *err)
{
	union abi_args args;

	for (uint32_t k = 0; k < record->n_zeroes; k++) {
		const struct launch_range *range = &record->zeroes[k];
		int status = range->bytes == 0 ? 0
					       : plan->runtime->clear(bases->at[LAUNCH_WORKSPACE] +
									      range->offset,
								      0, range->bytes, run->stream);

		if (status != 0)
			return local_runtime_error(plan->runtime, status, "clearing workspace",
						   err);
	}
	if (record->grid[0] == 0 || record->grid[1] == 0 || record->grid[2] == 0)
		return 0;
	launch_bind(record, bases, &args);
	if (run->has_dropout_state) {
		const struct launch_dropout state = {
			.seed = run->dropout_seed,
			.offset = run->dropout_offset,
			.seed_at = (uintptr_t)run->dropout_seed_at,
			.offset_at = (uintptr_t)run->dropout_offset_at};

		launch_set_dropout(record, &state, &args);
	}
	if (run->keys) {
		const struct fmha_local_keys *from = run->keys;
		const struct launch_keys keys = {
			.seqlen_k = from->seqlen_k,
			.k_stride = {from->k_stride_batch, from->k_stride_head},
			.v_stride = {from->v_stride_batch, from->v_stride_head}};

		launch_set_keys(record, &keys, &args);
	}
	return local_launch(plan->runtime, record, function, &args, run->keys != NULL, run->stream,
			    err);
}

int fmha_local_plan_run(struct fmha_local_plan *plan, const struct fmha_local_run *run,
			struct fmha_error *err)
{
	const struct local_version *version;
	struct launch_bases bases = {{0}};
	int r = check_run(plan, run, err);

	if (r == 0)
		r = bind_tensors(plan, run, &bases, err);
	if (r < 0)
		return r;
	version = __atomic_load_n(&plan->current, __ATOMIC_ACQUIRE);
	for (uint32_t i = 0; r == 0 && i < version->n_launches; i++)
		r = launch(plan, &version->launches[i].record, version->launches[i].function, run,
			   &bases, err);
	if (r == 0 && __atomic_add_fetch(&plan->n_runs, 1, __ATOMIC_RELAXED) % LOOK_EVERY == 0 &&
	    plan->refresh)
		local_refresh_look(plan, run->stream);
	return r;
}
