/* SPDX-License-Identifier: MIT */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <base/clock.h>
#include <proto/error.h>

#include "tuner.h"

/* ---- samples ---- */

#define ENOUGH_NS (3 * NS_PER_MS) /* of one option, from its third sample on */
#define HOPELESS  1.5             /* times the best: two samples tell, or a long one */

static int compare_doubles(const void *x, const void *y)
{
	const double *a = x, *b = y;

	return (*a > *b) - (*a < *b);
}

static double least(const struct samples *samples)
{
	double value = samples->us[0];

	for (uint32_t i = 1; i < samples->n; i++)
		value = samples->us[i] < value ? samples->us[i] : value;
	return value;
}

void samples_add(struct samples *samples, uint64_t took_ns)
{
	samples->us[samples->n++] = (double)took_ns / 1000;
	samples->spent_ns += took_ns;
}

bool samples_are_enough(const struct samples *samples, double best_us)
{
	bool long_enough = samples->spent_ns >= ENOUGH_NS;

	if (samples->n == SAMPLES_MOST || (samples->n >= 3 && long_enough))
		return true;
	return best_us > 0 && samples->n > 0 && (samples->n >= 2 || long_enough) &&
	       least(samples) > HOPELESS * best_us;
}

double samples_time(struct samples *samples)
{
	qsort(samples->us, samples->n, sizeof(samples->us[0]), compare_doubles);
	return samples->us[(samples->n - 1) / 2];
}

#define PATTERN_BYTES (UINT64_C(4) << 20)
#define FILL_BYTES    (UINT64_C(512) << 10) /* at a time, on the loop */

static uint64_t trial_align(uint64_t bytes)
{
	return (bytes + PLAN_ALIGNMENT - 1) / PLAN_ALIGNMENT * PLAN_ALIGNMENT;
}

/* ---- numbers ---- */

/* Pairs of bytes that are fp16 and bf16 numbers of moderate size, and fp32 and fp8 ones with them: a
 * kernel's speed depends a little on the numbers, and not at all on which they are. */
static void make_numbers(uint8_t *to, uint64_t bytes, uint64_t seed)
{
	uint64_t state = seed * UINT64_C(0x9e3779b97f4a7c15) + 1;

	for (uint64_t i = 0; i + 1 < bytes; i += 2) {
		state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
		to[i] = (uint8_t)(state >> 33);
		/* sign, and an exponent around 1: 0x38..0x3f in both 16-bit types */
		to[i + 1] = (uint8_t)(0x38 | (state >> 41 & 0x87));
	}
}

/* ---- integers ---- */

struct tables {
	const struct fmha_problem *p;
	int32_t *at;
	uint64_t n;
};

/* The first sequence is the longest, the others share the rest evenly. */
static void fill_prefix(const struct tables *t, int64_t total, int64_t longest)
{
	int64_t batch = t->p->batch, first = longest < total ? longest : total, sum = 0;

	for (uint64_t i = 0; i < t->n; i++) {
		int64_t rest = batch > 1 ? (total - first) / (batch - 1) : 0;
		int64_t more = batch > 1 ? (total - first) % (batch - 1) : 0;

		t->at[i] = (int32_t)sum;
		sum += i == 0 ? first : rest + ((int64_t)i <= more);
	}
}

static void fill_cycle(const struct tables *t, int64_t n)
{
	for (uint64_t i = 0; i < t->n; i++)
		t->at[i] = n > 0 ? (int32_t)((int64_t)i % n) : 0;
}

static void fill_all(const struct tables *t, int64_t value)
{
	for (uint64_t i = 0; i < t->n; i++)
		t->at[i] = (int32_t)value;
}

/* Lengths as long as the sequences are; in group mode those of the prefix sums. */
static void fill_lengths(const struct tables *t, int64_t total, int64_t longest, bool packed,
			 int64_t less)
{
	int64_t batch = t->p->batch, first = longest < total ? longest : total;

	for (uint64_t i = 0; i < t->n; i++) {
		int64_t rest = batch > 1 ? (total - first) / (batch - 1) : 0;
		int64_t length = !packed || i == 0 ? (packed ? first : longest) : rest;

		t->at[i] = (int32_t)(length > less ? length - less : 0);
	}
}

static void fill_table(const struct tables *t, uint32_t role)
{
	const struct fmha_problem *p = t->p;
	int64_t page = p->page_size > 0 ? p->page_size : 1;
	int64_t pages = (p->seqlen_k + page - 1) / page;
	bool group = p->mode == FMHA_GROUP, packed_k = group && fmha_tensor_present(&p->seqstart_k);

	if (p->batch > 0 && pages * p->batch > p->n_page_indices)
		pages = p->n_page_indices / p->batch;
	switch (role) {
	case FMHA_T_SEQSTART_Q:
		fill_prefix(t, p->total_q, p->seqlen_q);
		break;
	case FMHA_T_SEQSTART_K:
		fill_prefix(t, p->total_k, p->seqlen_k);
		break;
	case FMHA_T_SEQLEN_Q:
		fill_lengths(t, p->total_q, p->seqlen_q, group, 0);
		break;
	case FMHA_T_SEQLEN_K:
		fill_lengths(t, p->total_k, p->seqlen_k, packed_k, p->seqlen_new);
		break;
	case FMHA_T_BLOCK_TABLE:
	case FMHA_T_KV_PAGE_INDICES:
		fill_cycle(t, p->n_pages);
		break;
	case FMHA_T_KV_INDPTR:
		for (uint64_t i = 0; i < t->n; i++)
			t->at[i] = (int32_t)((int64_t)i * pages);
		break;
	case FMHA_T_KV_LAST_PAGE_LEN:
		fill_all(t, p->seqlen_k - (pages - 1) * page <= page && pages > 0
				    ? p->seqlen_k - (pages - 1) * page
				    : page);
		break;
	case FMHA_T_CACHE_BATCH_IDX:
		fill_cycle(t, p->cache_batch);
		break;
	case FMHA_T_MASK_INTERVALS: /* no mask takes longer than one that hides nothing */
		fill_all(t, p->seqlen_k);
		break;
	default:
		fill_all(t, 0); /* leftpad_k */
	}
}

/* ---- tensors ---- */

static bool is_table(const struct plan *plan, const struct plan_view *view)
{
	return plan->problem.tensor[view->role].dtype == FMHA_I32;
}

static int make_tables(const struct plan *plan, struct trial_tensors *tensors,
		       struct fmha_error *err)
{
	uint64_t bytes = 0;

	for (uint32_t i = 0; i < plan->n_views; i++) {
		const struct plan_view *view = &plan->views[i];

		if (!is_table(plan, view))
			continue;
		tensors->table_offsets[view->role] = bytes;
		bytes += trial_align(view->span_bytes);
	}
	tensors->tables = calloc(1, bytes ? bytes : 1);
	if (!tensors->tables)
		return fmha_error_set(err, FMHA_ENOMEM, "tuning: out of memory");
	for (uint32_t i = 0; i < plan->n_views; i++) {
		const struct plan_view *view = &plan->views[i];
		struct tables t = {.p = &plan->problem, .n = view->span_bytes / sizeof(int32_t)};

		if (!is_table(plan, view))
			continue;
		t.at = (int32_t *)(void *)((char *)tensors->tables +
					   tensors->table_offsets[view->role]);
		fill_table(&t, view->role);
	}
	return 0;
}

int trial_tensors_init(struct worker *worker, const struct plan *plan, uint64_t most,
		       struct trial_tensors *tensors, struct fmha_error *err)
{
	int r;

	for (uint32_t i = 0; i < plan->n_views; i++) {
		tensors->offsets[plan->views[i].role] = tensors->bytes;
		if (plan->views[i].span_bytes > most ||
		    tensors->bytes + trial_align(plan->views[i].span_bytes) > most)
			return fmha_error_set_field(err, FMHA_EQUOTA, "tensors",
						    "tuning: its tensors take more than %llu bytes",
						    (unsigned long long)most);
		tensors->bytes += trial_align(plan->views[i].span_bytes);
	}
	r = make_tables(plan, tensors, err);
	if (r == 0 && tensors->bytes > 0)
		r = device_workspace_new(worker->device, tensors->bytes, &tensors->memory, err);
	if (r == 0 && !device_shares_memory(worker->device)) {
		r = device_staging_new(worker->device, PATTERN_BYTES, &tensors->pattern, err);
		if (r == 0)
			make_numbers(tensors->pattern.host, PATTERN_BYTES, 1);
	}
	return r;
}

void trial_tensors_deinit(struct worker *worker, struct trial_tensors *tensors)
{
	if (tensors->memory.map)
		device_workspace_free(worker->device, &tensors->memory);
	if (tensors->pattern.map)
		device_staging_free(worker->device, &tensors->pattern);
	free(tensors->tables);
	*tensors = (struct trial_tensors){0};
}

bool trial_tensors_fill(struct worker *worker, struct trial_tensors *tensors,
			struct device_launch *launch)
{
	uint64_t left = tensors->bytes - tensors->filled,
		 part = left < FILL_BYTES ? left : FILL_BYTES;

	if (left == 0)
		return false;
	if (device_shares_memory(worker->device)) {
		make_numbers((uint8_t *)tensors->memory.host + tensors->filled, part,
			     tensors->filled + 1);
		tensors->filled += part;
		return true;
	}
	launch->n_stages = launch->n_uploads = launch->n_downloads = 0;
	launch->zero_bytes = 0;
	while (tensors->filled < tensors->bytes && launch->n_uploads < DEVICE_UPLOADS) {
		left = tensors->bytes - tensors->filled;
		part = left < PATTERN_BYTES ? left : PATTERN_BYTES;
		launch->uploads[launch->n_uploads++] = (struct device_copy){
			.host = tensors->pattern.host,
			.device = (char *)tensors->memory.device + tensors->filled,
			.bytes = part};
		tensors->filled += part;
	}
	return true;
}

/* ---- runs ---- */

static void make_bindings(const struct plan *plan, const struct trial_tensors *tensors,
			  struct plan_binding *bindings)
{
	for (uint32_t i = 0; i < plan->n_views; i++) {
		const struct plan_view *view = &plan->views[i];
		char *device = tensors->memory.device, *tables = tensors->tables;
		/* A tensor without elements lies nowhere in particular. */
		struct plan_binding *binding = &bindings[view->role];

		*binding = (struct plan_binding){.device = device + tensors->offsets[view->role],
						 .bytes = trial_align(view->span_bytes)};
		if (is_table(plan, view))
			binding->host = tables + tensors->table_offsets[view->role];
	}
}

static int bind_workspace(struct worker *worker, struct trial_run *run, struct fmha_error *err)
{
	uint64_t bytes = plan_workspace_bytes(&run->plan, run->indices);

	bytes += staging_device_bytes(worker->device, &run->plan, bytes);
	if (bytes > worker->settings.tuning.memory_bytes)
		return fmha_error_set_field(err, FMHA_EQUOTA, "workspace",
					    "tuning: its workspace takes %llu bytes",
					    (unsigned long long)bytes);
	return bytes ? device_workspace_new(worker->device, bytes, &run->workspace, err) : 0;
}

static void name_stages(struct trial_run *run, struct device_launch *launch)
{
	launch->n_stages = run->plan.n_stages;
	for (uint32_t i = 0; i < run->plan.n_stages; i++) {
		const struct plan_stage *stage = &run->plan.stages[i];

		memcpy(run->culprits[i].kernel, stage->kernel, sizeof(stage->kernel));
		run->culprits[i].code = stage->code;
		run->culprits[i].uid = (uint32_t)geteuid(); /* nobody else's doing */
		launch->kernels[i] = run->kernels[i];
		launch->records[i] = &stage->launch;
		launch->names[i] = run->culprits[i].kernel;
		launch->workspaces[i] = run->workspace.device ? (char *)run->workspace.device +
									stage->workspace_offset
							      : NULL;
	}
}

int trial_run_bind(struct worker *worker, struct trial_run *run,
		   const struct trial_tensors *tensors, struct device_launch *launch,
		   struct fmha_error *err)
{
	struct plan_binding *bindings = run->bindings;
	struct plan_memory memory = {0};
	int r;

	make_bindings(&run->plan, tensors, bindings);
	r = plan_read(&run->plan, bindings, &run->indices, err);
	if (r == 0)
		r = bind_workspace(worker, run, err);
	/* From here on nothing is to be copied out of the host's tables: they are read. */
	for (int i = 0; i < FMHA_N_TENSORS; i++)
		bindings[i].host = NULL;
	if (r == 0)
		r = staging_init(worker->device, &run->plan, bindings, &run->staging, err);
	if (r < 0)
		return r;
	run->staging.fetched = UINT64_MAX;
	memory.workspace = run->workspace.device;
	memory.head = run->staging.head;
	if (device_shares_memory(worker->device))
		memory.head = run->workspace.host;
	else if (run->indices)
		memory.indices = staging_indices(&run->plan, run->indices, &run->workspace);
	r = plan_place(&run->plan, bindings, run->indices, &memory, launch->args, err);
	if (r < 0)
		return r;
	launch->n_waits = launch->n_signals = launch->n_event_waits = launch->n_event_signals = 0;
	staging_upload(worker->device, &run->plan, bindings, run->indices, &run->staging,
		       &run->workspace, (void *)(uintptr_t)memory.indices, launch);
	name_stages(run, launch);
	return 0;
}

void trial_run_deinit(struct worker *worker, struct trial_run *run)
{
	run->indices = plan_indices_free(run->indices);
	staging_deinit(worker->device, &run->staging);
	if (run->workspace.map)
		device_workspace_free(worker->device, &run->workspace);
	*run = (struct trial_run){0};
}
