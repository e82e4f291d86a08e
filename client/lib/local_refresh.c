/* SPDX-License-Identifier: MIT */
/*
 * local_refresh.c: what a plan and its daemon still have to say to each other: how often it was run, and
 * that something faster is known. There is no thread: a run that comes late enough after the last exchange
 * takes one step, which sends, or looks whether an answer is there, and never waits for one. Only the code of
 * a better version is fetched and loaded in one go.
 */
#include "local.h"

#include <pthread.h>
#include <stdlib.h>

#include <proto/error.h>

#include "internal.h"

#define PERIOD_MS    60000
#define LOOK_NS      1000000 /* between two looks for an answer */
#define FETCH_MS     250     /* a daemon that takes longer is asked again later */
#define MAX_VERSIONS 16      /* kept until the plan is freed, since graphs may hold them */
#define MODE_RELAXED 2       /* CU_STREAM_CAPTURE_MODE_RELAXED: of others' captures */

struct local_refresh {
	struct fmha_device *device;
	int64_t due_ns;       /* atomic: of the next step */
	pthread_mutex_t lock; /* of the rest; only tried */
	int64_t period_ns;
	bool pinned;
	struct proto_local_runs_params told; /* what was told last, but for its runs */
	uint64_t n_told;                     /* of the plan's runs */
	uint64_t refused; /* the version that does not fit, or cannot be loaded; 0: none */
	uint32_t n_versions;
	/* What is under way. */
	struct connection *connection;
	struct pending *pending; /* NULL: nothing; its method says what */
};

/* A tick of the kernel is as good. */
static int64_t coarse_now(void)
{
	struct timespec now;

	(void)clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
	return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

int local_refresh_new(struct fmha_local_plan *plan, struct fmha_device *device,
		      const struct proto_plan_params *params,
		      const struct fmha_local_options *options, struct fmha_error *err)
{
	struct local_refresh *refresh = calloc(1, sizeof(*refresh));
	uint32_t period_ms = options && options->refresh_ms ? options->refresh_ms : PERIOD_MS;

	if (!refresh || pthread_mutex_init(&refresh->lock, NULL) != 0) {
		free(refresh);
		return fmha_error_set(err, FMHA_ENOMEM, "plan: out of memory");
	}
	refresh->device = device_ref(device);
	refresh->period_ns = (int64_t)period_ms * 1000000;
	refresh->due_ns = coarse_now() + refresh->period_ns;
	refresh->pinned = options && options->pinned;
	refresh->told.problem = params->problem;
	refresh->told.version = plan->current->version;
	refresh->n_versions = 1;
	plan->refresh = refresh;
	return 0;
}

/* ---- one step ---- */

static void forget(struct local_refresh *refresh)
{
	if (refresh->pending)
		connection_forget(refresh->connection, refresh->pending, NULL, NULL);
	refresh->pending = NULL;
	refresh->connection = connection_unref(refresh->connection);
}

/* Nothing is waited for: what cannot be sent now is not sent. */
static void refresh_ask(struct local_refresh *refresh, enum proto_method method, const void *params)
{
	if (!refresh->connection)
		refresh->connection = link_get_open(&refresh->device->worker);
	if (refresh->connection && connection_submit(refresh->connection, method, params, -1, 0,
						     &refresh->pending, NULL, NULL) < 0)
		forget(refresh);
}

static void tell_runs(struct local_refresh *refresh, const struct fmha_local_plan *plan)
{
	uint64_t n_runs = __atomic_load_n(&plan->n_runs, __ATOMIC_RELAXED);

	refresh->told.runs = n_runs - refresh->n_told;
	refresh_ask(refresh, PROTO_LOCAL_RUNS, &refresh->told);
	if (refresh->pending)
		refresh->n_told = n_runs;
}

static void ask_for_plan(struct local_refresh *refresh)
{
	struct proto_plan_params *params = calloc(1, sizeof(*params));

	if (params) {
		params->problem = refresh->told.problem;
		refresh_ask(refresh, PROTO_LOCAL_PLAN, params);
	}
	free(params);
}

static const struct proto_local_tensor *find_tensor(const struct fmha_local_plan *plan,
						    uint32_t role)
{
	for (uint32_t i = 0; i < plan->n_tensors; i++)
		if (plan->tensors[i].role == role)
			return &plan->tensors[i];
	return NULL;
}

static bool local_refresh_fits(const struct fmha_local_plan *plan,
			       const struct proto_local_plan_result *next)
{
	if (next->workspace_bytes > plan->workspace_bytes ||
	    next->workspace_alignment > plan->workspace_alignment ||
	    next->n_tensors != plan->n_tensors)
		return false;
	/* Any number of keys is right for what takes another number at all. */
	if (plan->seqlen_k_most > 0 &&
	    (next->seqlen_k_most == 0 || next->key_stride_unit != plan->key_stride_unit))
		return false;
	for (uint32_t i = 0; i < next->n_tensors; i++) {
		const struct proto_local_tensor *told = find_tensor(plan, next->tensors[i].role);

		if (!told || next->tensors[i].bytes > told->bytes ||
		    next->tensors[i].alignment > told->alignment)
			return false;
	}
	return true;
}

static bool local_refresh_take(struct fmha_local_plan *plan,
			       const struct proto_local_plan_result *next)
{
	struct local_refresh *refresh = plan->refresh;
	struct local_source from = {.device = refresh->device,
				    .deadline = deadline_after_ms(FETCH_MS)};
	struct local_version *version;
	int mode = MODE_RELAXED, r;

	if (!local_refresh_fits(plan, next))
		return false;
	if (plan->runtime->exchange_capture_mode)
		(void)plan->runtime->exchange_capture_mode(&mode);
	r = local_version_make(plan, next, local_fetch_from_daemon, &from, &version, NULL);
	if (plan->runtime->exchange_capture_mode)
		(void)plan->runtime->exchange_capture_mode(&mode);
	if (r < 0)
		return false;
	version->older = plan->current;
	refresh->told.version = version->version;
	refresh->n_versions++;
	__atomic_store_n(&plan->current, version, __ATOMIC_RELEASE);
	return true;
}

/* The answer is there. */
static void go_on(struct fmha_local_plan *plan)
{
	struct local_refresh *refresh = plan->refresh;
	struct pending *pending = refresh->pending;
	const void *result = pending->error.code == FMHA_OK ? pending->result : NULL;
	const struct proto_local_runs_result *runs = result;
	const struct proto_local_plan_result *next = result;

	refresh->pending = NULL;
	if (result && pending->method == PROTO_LOCAL_RUNS) {
		if (!refresh->pinned && runs->version != refresh->told.version &&
		    runs->version != refresh->refused && refresh->n_versions < MAX_VERSIONS)
			ask_for_plan(refresh);
	} else if (result && next->version != refresh->told.version &&
		   !local_refresh_take(plan, next)) {
		refresh->refused = next->version;
	}
	connection_forget(refresh->connection, pending, NULL, NULL);
	if (!refresh->pending)
		refresh->connection = connection_unref(refresh->connection);
}

static void local_refresh_step(struct fmha_local_plan *plan)
{
	struct local_refresh *refresh = plan->refresh;

	if (!refresh->pending)
		tell_runs(refresh, plan);
	else if (connection_wait(refresh->connection, refresh->pending, 0, NULL) == 0)
		go_on(plan);
}

void local_refresh_look(struct fmha_local_plan *plan, void *stream)
{
	struct local_refresh *refresh = plan->refresh;
	int64_t now = coarse_now();
	int capturing = 1;

	if (now < __atomic_load_n(&refresh->due_ns, __ATOMIC_RELAXED) ||
	    !plan->runtime->is_capturing || pthread_mutex_trylock(&refresh->lock) != 0)
		return;
	if (plan->runtime->is_capturing(stream, &capturing) == 0 && !capturing) {
		local_refresh_step(plan);
		__atomic_store_n(&refresh->due_ns,
				 now + (refresh->pending ? LOOK_NS : refresh->period_ns),
				 __ATOMIC_RELAXED);
	}
	(void)pthread_mutex_unlock(&refresh->lock);
}

struct local_refresh *local_refresh_free(struct local_refresh *refresh,
					 const struct fmha_local_plan *plan)
{
	if (!refresh)
		return NULL;
	forget(refresh);
	if (plan->n_runs != refresh->n_told)
		tell_runs(refresh, plan);
	forget(refresh);
	(void)pthread_mutex_destroy(&refresh->lock);
	(void)device_unref(refresh->device);
	free(refresh);
	return NULL;
}
