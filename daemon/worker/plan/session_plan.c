/* SPDX-License-Identifier: MIT */
/* session_plan.c: a plan that a session has: for whom its kernels are chosen, which it has, what its client was told,
 * another version in its place. */
#include <stdio.h>
#include <string.h>

#include <base/clock.h>
#include <base/log.h>
#include <cjson/cJSON.h>
#include <proto/error.h>
#include <proto/fnv.h>

#include "roof.h"
#include "session/worker_registry.h"

/* ---- for whom ---- */

/* For whom kernels are chosen, and which of them nobody, or not that user, gets. */

/* As the front has it now. */
static const struct worker_quarantine *quarantine_of(struct worker *worker)
{
	struct worker_plans *plans = &worker->plans;

	if (atomic_load(&worker->page->quarantine_version) != plans->quarantine_version)
		plans->quarantine_version = worker_page_get_quarantine(worker->page,
								       &plans->quarantine);
	return &plans->quarantine;
}

void kernels_mark_quarantine(struct worker *worker)
{
	const struct worker_quarantine *what = quarantine_of(worker);
	uint64_t now = clock_ns();

	worker->plans.marked_version = worker->plans.quarantine_version;
	worker->plans.marked_until_ns = UINT64_MAX;
	registry_clear_quarantine(worker->plans.registry);
	for (uint32_t i = 0; i < what->n; i++) {
		const struct worker_quarantined *entry = &what->list[i];

		if (!entry->everybody || now >= entry->until_ns)
			continue;
		if (registry_quarantine(worker->plans.registry, entry->kernel, NULL) < 0)
			log_warning("quarantined kernel %s is not in the registry", entry->kernel);
		if (entry->until_ns < worker->plans.marked_until_ns)
			worker->plans.marked_until_ns = entry->until_ns;
	}
}

uint64_t kernels_locate(void *tensors, const struct fmha_tensor *tensor)
{
	const struct session *session = tensors;
	const struct buffer *buffer = session ? table_get(&session->buffers, tensor->buffer) : NULL;

	return (buffer ? (uintptr_t)buffer->memory.device : 0) + tensor->offset;
}

void kernels_act_for(struct session *session, bool local)
{
	struct worker *worker = session->worker;

	worker->plans.acting_uid = session->uid;
	worker->plans.device.tensors = local ? NULL : session;
	if (worker->plans.registry &&
	    (clock_ns() >= worker->plans.marked_until_ns ||
	     atomic_load(&worker->page->quarantine_version) != worker->plans.marked_version))
		kernels_mark_quarantine(worker);
}

bool kernels_is_quarantined(void *worker_pointer, const char *kernel, uint64_t code)
{
	struct worker *worker = worker_pointer;

	return worker_quarantine_has(quarantine_of(worker), worker->plans.acting_uid, kernel, code,
				     clock_ns());
}

/* ---- held ---- */

static int held_charge(struct account *account, uint64_t bytes, struct fmha_error *err)
{
	int r = account_charge(account, ACCOUNT_KERNELS, 1, err);

	if (r < 0)
		return r;
	r = account_charge(account, ACCOUNT_MEMORY, bytes, err);
	if (r < 0)
		account_release(account, ACCOUNT_KERNELS, 1);
	return r;
}

int held_take(struct device *device, struct account *account, const struct device_kernel *kernel,
	      struct fmha_error *err)
{
	bool is_first;
	int r = device_hold(device, kernel, account->uid, &is_first, err);

	if (r < 0 || !is_first)
		return r;
	r = held_charge(account, device_kernel_code(device, kernel)->bytes, err);
	if (r < 0)
		(void)device_drop(device, kernel, account->uid);
	return r;
}

void held_drop(struct device *device, struct account *account, const struct device_kernel *kernel)
{
	const struct device_code *code = device_kernel_code(device, kernel);
	uint64_t bytes = code ? code->bytes : 0; /* the kernel may be gone once it was dropped */

	if (!device_drop(device, kernel, account->uid))
		return;
	account_release(account, ACCOUNT_KERNELS, 1);
	account_release(account, ACCOUNT_MEMORY, bytes);
}

/* ---- roof ---- */

static void configure(double *rate, uint32_t configured, bool *ret_configured)
{
	if (configured == 0)
		return;
	*rate = configured * 1e9;
	*ret_configured = true;
}

void roof_init(struct roof *roof, const struct config_device *config,
	       const struct device_info *info)
{
	*roof = (struct roof){.peak = info->peak};
	configure(&roof->peak.f32, config->roof_gflops_f32, &roof->configured_flops);
	configure(&roof->peak.f16, config->roof_gflops_f16, &roof->configured_flops);
	configure(&roof->peak.fp8, config->roof_gflops_fp8, &roof->configured_flops);
	configure(&roof->peak.bytes, config->roof_gbs, &roof->configured_bytes);
}

static double rate_of(const struct device_peak *peak, uint32_t dtype)
{
	switch (dtype) {
	case ABI_F32:
		return peak->f32;
	case ABI_F16:
	case ABI_BF16:
		return peak->f16;
	default:
		return peak->fp8;
	}
}

double roof_ns(const struct roof *roof, const struct plan *plan)
{
	const struct plan_stage *stage = plan_main_stage(plan);
	double rate = stage ? rate_of(&roof->peak, stage->dtype) : 0;
	double by_flops = rate > 0 ? plan->flops / rate : 0;
	double by_bytes = stage && roof->peak.bytes > 0 ? (double)plan->bytes / roof->peak.bytes
							: 0;

	return 1e9 * (by_flops > by_bytes ? by_flops : by_bytes);
}

static void add_rate(cJSON *object, const char *name, double rate, double unit)
{
	if (rate > 0)
		cJSON_AddNumberToObject(object, name, rate / unit);
}

cJSON *roof_json(const struct roof *roof)
{
	cJSON *root = cJSON_CreateObject(), *flops, *source;

	add_rate(root, "gbs", roof->peak.bytes, 1e9);
	flops = cJSON_AddObjectToObject(root, "tflops");
	add_rate(flops, "f32", roof->peak.f32, 1e12);
	add_rate(flops, "f16", roof->peak.f16, 1e12);
	add_rate(flops, "fp8", roof->peak.fp8, 1e12);
	source = cJSON_AddObjectToObject(root, "source");
	cJSON_AddStringToObject(source, "gbs", roof->configured_bytes ? "configured" : "device");
	cJSON_AddStringToObject(source, "tflops", roof->configured_flops ? "configured" : "device");
	return root;
}

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
	slabs_give_back(&plan->worker->plans.slabs, plan);
	return NULL;
}

struct session_plan *session_plan_allocate(struct session *session)
{
	struct session_plan *plan = slabs_take(&session->worker->plans.slabs);

	if (!plan)
		return NULL;
	plan->n_references = 1;
	plan->worker = session->worker;
	plan->uid = session->uid;
	return plan;
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
static void session_plan_tell(struct session_plan *plan)
{
	plan->told_bytes = plan->plan.workspace_bytes;
	for (uint32_t i = 0; i < plan->plan.n_views; i++) {
		const struct plan_view *view = &plan->plan.views[i];

		plan->told_alignment[view->role] = (uint8_t)__builtin_ctz(view->alignment);
	}
}

static bool has_integers(const struct plan *plan)
{
	for (uint32_t i = 0; i < plan->n_views; i++)
		if (plan_view_is_integer(plan, &plan->views[i]))
			return true;
	return false;
}

void session_plan_settle(struct session *session, struct session_plan *plan,
			 struct proto_plan_result *result)
{
	struct worker *worker = session->worker;

	plan->load = load_of(&plan->plan, worker->plans.device.compute_units);
	plan->roof_ns = roof_ns(&worker->plans.roof, &plan->plan);
	name_culprits(session, plan);
	plan->fetches = !device_shares_memory(worker->device) && has_integers(&plan->plan);
	plan->fixed = !plan->fetches && plan_indices_bytes(&plan->plan) == 0 &&
		      plan->plan.workspace_head_bytes == 0 && plan_row_entries(&plan->plan) == 0;
	/* A guess for the first run; later ones know better (run.c). */
	plan->tiny_work = plan->plan.bytes < 1 << 20 ? 2e6 : 0;
	session_plan_tell(plan);
	describe_plan(&plan->plan, result);
}

void session_plan_count(struct worker *worker, const struct plan *plan)
{
	const struct plan_stage *stage = plan_main_stage(plan);

	if (stage && !plan->named)
		worker->plans.n_by[stage->basis]++;
}

bool plan_may_change(const struct plan *plan)
{
	const struct fmha_problem *p = &plan->problem;

	return !plan->named && !p->deterministic && p->split_size == 0 && p->n_splits == 0 &&
	       plan->n_stages > 0;
}

void session_plan_replace(struct session *session, uint64_t id, const struct plan *next,
			  const struct device_kernel *const kernels[PLAN_MAX_STAGES])
{
	struct session_plan *old = table_get(&session->plans, id), *plan;
	struct proto_plan_result ignored = {0};
	uint64_t told_bytes;
	uint8_t told_alignment[FMHA_N_TENSORS];

	plan = old ? session_plan_allocate(session) : NULL;
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
	session_plan_count(session->worker, next);
	plan->serial = ++session->worker->plans.n;
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
