/* SPDX-License-Identifier: MIT */
/*
 * tuner.c: one job at a time: a problem and the options that it has (dispatch/plan_options.c). For each
 * option the plan is built, its kernels are prepared, and it is run a few times. A job goes on when
 * something that it waits for has come: a kernel, a launch, the end of clients' runs, or its time.
 */
#include "tuner.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cjson/cJSON.h>

#include <base/clock.h>
#include <base/log.h>
#include <proto/error.h>

#include "session/worker_registry.h"

#define MOST_JOBS       16
#define FAR_TOO_SLOW    2.0 /* times the best, estimated: not even one */
#define LEAST_TRIED     4   /* options, whatever is estimated */
#define WATCH_MS        250
#define CLIENTS_QUIET_S 90 /* after what clients have told of launches of their own */

enum step { STEP_BEGIN, STEP_FILL, STEP_NEXT, STEP_PREPARING, STEP_BIND, STEP_MEASURE };

struct job {
	struct list in_tuner;
	struct session *session; /* NULL: of our own accord, or its client has gone */
	uint32_t id;             /* of its request */
	bool own, stopped;
	bool interrupted; /* by a client: what is left is for another time */
	bool again, thorough;
	uint32_t uid; /* of its census entry, or who asked */
	struct fmha_problem problem;
	uint64_t budget_ns, spent_ns; /* budget 0: none */
	struct proto_tune_result result;
	struct plan_option *options;
	uint32_t n_options, next;
	double factor; /* microseconds for an expected time of 1, from what was measured */
	struct trial_tensors tensors;
	struct fmha_error error;
};

struct tuner {
	struct worker *worker;
	struct device_stream *stream;
	struct device_launch *launch;
	struct list jobs; /* the first is under way */
	uint32_t n_jobs;
	uv_timer_t timer; /* to go on, or to begin */
	enum step step;
	bool launched; /* the device has the launch */
	bool filling;  /* it only copies */
	bool stepping;
	uint64_t pause_ns;  /* that are owed, of an own job */
	uint64_t active_ns; /* when a client's run last ended */
	uint32_t last_uid;  /* whose shape was measured last by itself */
	/* Of the option under way. */
	struct trial_run run;
	struct device_waiter waiters[PLAN_MAX_STAGES];
	uint32_t n_left; /* kernels that are waited for */
	struct samples samples;
	bool warm;
	uint64_t n_measured, n_jobs_done, device_ns;
};

static void go_on(struct tuner *tuner);
static void tuner_on_timer(uv_timer_t *timer);

static struct job *current(struct tuner *tuner)
{
	return list_is_empty(&tuner->jobs) ? NULL
					   : container_of(tuner->jobs.next, struct job, in_tuner);
}

static const struct config_tuning *config_of(const struct tuner *tuner)
{
	return &tuner->worker->settings.tuning;
}

static bool clients_wait(const struct tuner *tuner)
{
	return tuner->worker->runs.n_pending > 0 || tuner->worker->draining;
}

/* ---- the end of things ---- */

static void drop_option(struct tuner *tuner)
{
	for (uint32_t i = PLAN_MAX_STAGES; i-- > 0;)
		device_forget(tuner->worker->device, &tuner->waiters[i]);
	tuner->n_left = 0;
	trial_run_deinit(tuner->worker, &tuner->run);
	tuner->samples = (struct samples){0};
	tuner->warm = false;
}

static void tuner_answer(struct job *job)
{
	struct connection *connection = &job->session->connection;

	if (job->error.code != FMHA_OK && job->result.n_measured == 0 && !*job->result.kernel)
		connection_answer_error(connection, job->id, &job->error);
	else
		connection_answer(connection, job->id, PROTO_TUNE, &job->result, -1);
}

static void tuner_settle(struct tuner *tuner, const struct job *job)
{
	struct census_entry *entry = census_find(&tuner->worker->plans.census, job->uid,
						 job->result.shape);

	if (entry && !job->interrupted && (job->own || job->next == job->n_options))
		entry->settled = true;
	if (job->result.n_measured > 0)
		log_info("tuned %s: %s, %d splits, %.1f us (%u of %u measured)", job->result.shape,
			 job->result.kernel, job->result.n_splits, job->result.us,
			 job->result.n_measured, job->result.n_candidates);
}

static void tuner_finish(struct tuner *tuner)
{
	struct job *job = current(tuner);

	drop_option(tuner);
	trial_tensors_deinit(tuner->worker, &job->tensors);
	tuner_settle(tuner, job);
	if (job->session)
		tuner_answer(job);
	list_remove(&job->in_tuner);
	tuner->n_jobs--;
	tuner->n_jobs_done++;
	free(job->options);
	free(job);
	tuner->step = STEP_BEGIN;
	/* Its tensors and scratch are the largest of an idle machine's. */
	worker_trim_soon(tuner->worker);
}

/* ---- results ---- */

static void tuner_keep(struct tuner *tuner, struct job *job, const struct plan_option *option,
		       double us)
{
	struct worker *worker = tuner->worker;
	struct proto_measured row = {
		.n_splits = option->n_splits, .us = us, .when_s = (uint64_t)time(NULL)};

	memcpy(row.shape, job->result.shape, sizeof(row.shape));
	memcpy(row.kernel, option->kernel, sizeof(row.kernel));
	(void)registry_set_tuned(worker->plans.registry, &row, TIMES_OWN, NULL);
	(void)connection_request(&worker->control, PROTO_TUNED_RESULT, &row, -1, NULL, NULL, NULL);
	if (*job->result.kernel && job->result.us <= us)
		return;
	memcpy(job->result.kernel, option->kernel, sizeof(job->result.kernel));
	job->result.n_splits = option->n_splits;
	job->result.us = us;
}

static void end_option(struct tuner *tuner, double us)
{
	struct job *job = current(tuner);
	const struct plan_option *option = &job->options[job->next];

	if (us > 0) {
		if (option->time > 0 && (job->factor == 0 || us / option->time < job->factor))
			job->factor = us / option->time;
		tuner_keep(tuner, job, option, us);
		job->result.n_measured++;
		tuner->n_measured++;
	} else {
		job->result.n_failed++;
	}
	drop_option(tuner);
	job->next++;
	tuner->step = STEP_NEXT;
}

static void fail_option(struct tuner *tuner, const struct fmha_error *error)
{
	struct job *job = current(tuner);

	job->error = *error;
	log_debug("tuning: %.200s: %s", job->options[job->next].kernel, error->msg);
	end_option(tuner, 0);
}

/* ---- steps ---- */

static void tuner_begin(struct tuner *tuner)
{
	struct worker *worker = tuner->worker;
	struct job *job = current(tuner);
	struct plan *plan = NULL;
	int n;

	worker->plans.acting_uid = (uint32_t)geteuid();
	worker->plans.device.tensors = NULL;
	job->options = calloc(PLAN_MAX_OPTIONS, sizeof(*job->options));
	plan = calloc(1, sizeof(*plan));
	n = job->options && plan
		    ? plan_options(&job->problem, &worker->plans.device, job->options, &job->error)
		    : fmha_error_set(&job->error, FMHA_ENOMEM, "tuning: out of memory");
	if (n == 0)
		n = fmha_error_set(&job->error, FMHA_ENOKERNEL,
				   "tuning: no kernel of this device runs that");
	if (n > 0)
		job->n_options = job->result.n_candidates = (uint32_t)n;
	if (n > 0)
		n = plan_build_option(&job->problem, &job->options[0], &worker->plans.device, plan,
				      &job->error);
	if (n >= 0)
		n = trial_tensors_init(worker, plan, config_of(tuner)->memory_bytes, &job->tensors,
				       &job->error);
	free(plan);
	if (n < 0)
		tuner_finish(tuner);
	else
		tuner->step = STEP_FILL;
}

static bool is_worth_it(const struct tuner *tuner, const struct job *job)
{
	const struct plan_option *option = &job->options[job->next];
	struct kernel_spec spec;
	double us;

	if (registry_find(tuner->worker->plans.registry, option->kernel, &spec, NULL, NULL) < 0)
		return false;
	if (!job->again && registry_get_tuned(tuner->worker->plans.registry, &spec,
					      job->result.shape, option->n_splits, &us))
		return false;
	return job->thorough || job->result.n_measured < LEAST_TRIED || job->factor == 0 ||
	       option->time * job->factor < FAR_TOO_SLOW * job->result.us;
}

static void on_prepared(void *owner, const struct fmha_error *error)
{
	struct tuner *tuner = owner;

	if (error->code != FMHA_OK)
		current(tuner)->error = *error;
	if (--tuner->n_left > 0)
		return;
	if (current(tuner)->error.code != FMHA_OK)
		end_option(tuner, 0);
	else
		tuner->step = STEP_BIND;
	uv_timer_start(&tuner->timer, tuner_on_timer, 0, 0);
}

/* The kernels of run->plan. Return: false: one cannot be had. */
static bool prepare(struct tuner *tuner)
{
	struct trial_run *run = &tuner->run;
	struct job *job = current(tuner);
	union abi_args args[PLAN_MAX_STAGES];
	int r = 0;

	job->error.code = FMHA_OK;
	plan_placeholder_args(&run->plan, args);
	for (uint32_t i = 0; i < run->plan.n_stages && r >= 0; i++) {
		tuner->waiters[i] = (struct device_waiter){.uid = (uint32_t)geteuid(),
							   .background = true,
							   .done = on_prepared,
							   .owner = tuner};
		r = device_prepare(tuner->worker->device, &run->plan.stages[i], &args[i],
				   &tuner->waiters[i], &run->kernels[i], &job->error);
		tuner->n_left += r == DEVICE_PREPARING;
	}
	if (r < 0)
		return false;
	tuner->step = tuner->n_left > 0 ? STEP_PREPARING : STEP_BIND;
	return true;
}

static bool is_over(const struct job *job)
{
	return job->stopped || job->next == job->n_options ||
	       (job->budget_ns && job->spent_ns >= job->budget_ns);
}

static void next(struct tuner *tuner)
{
	struct worker *worker = tuner->worker;
	struct job *job = current(tuner);
	struct fmha_error err;

	while (!is_over(job) && !is_worth_it(tuner, job))
		job->next++;
	if (is_over(job)) {
		tuner_finish(tuner);
		return;
	}
	worker->plans.acting_uid = (uint32_t)geteuid();
	worker->plans.device.tensors = NULL;
	if (plan_build_option(&job->problem, &job->options[job->next], &worker->plans.device,
			      &tuner->run.plan, &err) < 0)
		fail_option(tuner, &err);
	else if (!prepare(tuner))
		fail_option(tuner, &job->error);
}

static void on_done(struct device_launch *launch);

static void submit(struct tuner *tuner)
{
	struct device_launch *launch = tuner->launch;

	launch->stream = tuner->stream;
	launch->on_done = on_done;
	launch->owner = tuner;
	launch->bus_address = 0;
	launch->error.code = FMHA_OK;
	tuner->launched = true;
	tuner->worker->idle.untrimmed = true;
	device_submit(tuner->worker->device, launch);
	uv_timer_start(&tuner->timer, tuner_on_timer, WATCH_MS, WATCH_MS);
}

static void tuner_fill(struct tuner *tuner)
{
	struct job *job = current(tuner);

	if (!trial_tensors_fill(tuner->worker, &job->tensors, tuner->launch)) {
		tuner->step = STEP_NEXT;
	} else if (!device_shares_memory(tuner->worker->device)) {
		tuner->filling = true;
		submit(tuner);
	}
}

static void bind_option(struct tuner *tuner)
{
	struct job *job = current(tuner);
	struct fmha_error err;

	if (trial_run_bind(tuner->worker, &tuner->run, &job->tensors, tuner->launch, &err) < 0)
		fail_option(tuner, &err);
	else
		tuner->step = STEP_MEASURE;
}

/* ---- measuring ---- */

static void take_sample(struct tuner *tuner, uint64_t took)
{
	struct job *job = current(tuner);

	if (!tuner->warm) { /* the first touches new pages, and finds the code cold */
		tuner->warm = true;
		if (job->own && took > config_of(tuner)->launch_ms * NS_PER_MS)
			job->stopped = true;
		return;
	}
	samples_add(&tuner->samples, took);
	if (samples_are_enough(&tuner->samples, job->result.us))
		end_option(tuner, samples_time(&tuner->samples));
}

static void on_done(struct device_launch *launch)
{
	struct tuner *tuner = launch->owner;
	struct job *job = current(tuner);
	uint64_t took = launch->ended_ns - launch->started_ns;

	tuner->launched = false;
	job->spent_ns += took;
	tuner->device_ns += took;
	if (job->own && !job->stopped)
		tuner->pause_ns += took * (100 - config_of(tuner)->share) / config_of(tuner)->share;
	if (launch->error.code == FMHA_ECANCELED) {
		/* a client came: once more, later */
	} else if (launch->error.code != FMHA_OK) {
		fail_option(tuner, &launch->error);
	} else if (!tuner->filling) {
		take_sample(tuner, took);
	}
	tuner->filling = false;
	uv_timer_start(&tuner->timer, tuner_on_timer, tuner->pause_ns / NS_PER_MS, 0);
	if (tuner->pause_ns >= NS_PER_MS)
		tuner->pause_ns = 0;
	else
		go_on(tuner);
}

/* ---- going on ---- */

static void do_step(struct tuner *tuner)
{
	struct job *job = current(tuner);

	if (job->stopped && tuner->step != STEP_PREPARING) {
		tuner_finish(tuner);
		return;
	}
	switch (tuner->step) {
	case STEP_BEGIN:
		tuner_begin(tuner);
		break;
	case STEP_FILL:
		tuner_fill(tuner);
		break;
	case STEP_NEXT:
		next(tuner);
		break;
	case STEP_BIND:
		bind_option(tuner);
		break;
	case STEP_MEASURE:
		submit(tuner);
		break;
	case STEP_PREPARING:
		break;
	}
}

static struct job *job_new(struct tuner *tuner, const struct fmha_problem *problem, uint32_t uid)
{
	struct job *job = calloc(1, sizeof(*job));

	if (!job)
		return NULL;
	job->problem = *problem;
	job->uid = uid;
	list_append(&tuner->jobs, &job->in_tuner);
	tuner->n_jobs++;
	return job;
}

/* The next shape of the census. Return: false: there is none. */
static bool add_own_job(struct tuner *tuner)
{
	const uint64_t most_ns = config_of(tuner)->launch_ms * NS_PER_MS;
	struct census_entry *entry;
	struct job *job;

	while ((entry = census_next(&tuner->worker->plans.census, &tuner->last_uid)) &&
	       entry->ns / entry->n_runs > most_ns)
		entry->settled = true; /* it would hold up a client for too long */
	job = entry ? job_new(tuner, &entry->problem, entry->uid) : NULL;
	if (!job)
		return false;
	job->own = true;
	memcpy(job->result.shape, entry->shape, sizeof(job->result.shape));
	return true;
}

static bool may_begin_by_itself(const struct tuner *tuner)
{
	return config_of(tuner)->automatic && tuner->worker->plans.registry &&
	       clock_ns() >= tuner->active_ns + config_of(tuner)->idle_s * NS_PER_S;
}

/* One step, and another by and by: clients' messages come first. */
static void go_on(struct tuner *tuner)
{
	if (tuner->launched || clients_wait(tuner) || tuner->step == STEP_PREPARING ||
	    tuner->stepping)
		return;
	if (!current(tuner) && !(may_begin_by_itself(tuner) && add_own_job(tuner)))
		return;
	tuner->stepping = true;
	do_step(tuner);
	tuner->stepping = false;
	if (!tuner->launched && tuner->step != STEP_PREPARING && !clients_wait(tuner))
		uv_timer_start(&tuner->timer, tuner_on_timer, 0, 0);
}

/* A launch that does not end: as with a client's run, the device is given up. */
static void check_stall(struct tuner *tuner)
{
	struct worker *worker = tuner->worker;
	const char *kernel = "";
	struct fmha_error err;
	uint64_t stalled = device_stalled_ns(worker->device, tuner->launch, &kernel);

	if (stalled < worker->config->stall_ms * NS_PER_MS)
		return;
	(void)fmha_error_set(&err, FMHA_EDEVICE, "the device hangs: nothing got ahead for %u ms",
			     worker->config->stall_ms);
	worker_fail(worker, kernel, &err);
}

/* To go on with a job, or to begin one once the device has been idle for long enough. */
static void start_timer(struct tuner *tuner)
{
	uint64_t due_ns = tuner->active_ns + config_of(tuner)->idle_s * NS_PER_S, now = clock_ns();

	if (current(tuner))
		uv_timer_start(&tuner->timer, tuner_on_timer, 1, 0);
	else if (config_of(tuner)->automatic && tuner->worker->plans.census.n_used > 0)
		uv_timer_start(&tuner->timer, tuner_on_timer,
			       due_ns > now ? (due_ns - now) / NS_PER_MS + 1 : 1, 0);
}

static void tuner_on_timer(uv_timer_t *timer)
{
	struct tuner *tuner = timer->data;

	if (tuner->launched)
		check_stall(tuner);
	else if (!current(tuner) && !clients_wait(tuner) && !may_begin_by_itself(tuner))
		start_timer(tuner); /* clients have come meanwhile */
	else
		go_on(tuner);
}

/* Measuring waits until the device is idle again for as long as it takes to begin it. What it has on
 * the device is given back meanwhile; what was measured is kept, and not measured again. */
static void tuner_interrupt(struct tuner *tuner)
{
	struct job *job = current(tuner);

	if (!job || !job->own || config_of(tuner)->idle_s == 0)
		return;
	job->stopped = job->interrupted = true;
	if (!tuner->launched) /* nor has it to wait for its share of the time */
		uv_timer_start(&tuner->timer, tuner_on_timer, 0, 0);
}

void tuner_yield(struct tuner *tuner)
{
	tuner_interrupt(tuner);
	if (tuner->launched && device_shares_memory(tuner->worker->device))
		device_cancel(tuner->worker->device, tuner->launch);
}

static void begin_later(struct tuner *tuner, uint64_t active_ns)
{
	if (active_ns > tuner->active_ns)
		tuner->active_ns = active_ns;
	if (!tuner->launched && tuner->step != STEP_PREPARING &&
	    !uv_is_active((uv_handle_t *)&tuner->timer))
		start_timer(tuner);
}

void tuner_resume(struct tuner *tuner)
{
	begin_later(tuner, clock_ns());
}

void tuner_used_by_clients(struct tuner *tuner)
{
	begin_later(tuner, clock_ns() + CLIENTS_QUIET_S * NS_PER_S);
}

/* ---- requests ---- */

int tuner_request(struct session *session, uint32_t id, const struct proto_tune_params *params,
		  struct fmha_error *err)
{
	struct worker *worker = session->worker;
	struct tuner *tuner = worker->tuner;
	const struct fmha_problem *problem = &params->problem;
	const struct census_entry *entry = NULL;
	struct job *job;

	if (!config_is_privileged(&worker->page->config, session->uid))
		return fmha_error_set_field(err, FMHA_EPERM, "method",
					    "tune is for administrators");
	if (!worker->plans.registry)
		return fmha_error_set_field(err, FMHA_ENOTSUP, "method",
					    "tune: this device has no kernel specs");
	if (tuner->n_jobs >= MOST_JOBS)
		return fmha_error_set(err, FMHA_EBUSY, "%u problems wait to be measured already",
				      tuner->n_jobs);
	if (*params->shape) {
		entry = census_any(&worker->plans.census, params->shape);
		if (!entry)
			return fmha_error_set_field(err, FMHA_ENOENT, "shape",
						    "shape: nobody has used it lately");
		problem = &entry->problem;
	}
	job = job_new(tuner, problem, entry ? entry->uid : session->uid);
	if (!job)
		return fmha_error_set(err, FMHA_ENOMEM, "tune: out of memory");
	census_forget_places(&job->problem);
	job->session = session;
	job->id = id;
	job->again = params->again;
	job->thorough = params->thorough;
	job->budget_ns = params->budget_ms * NS_PER_MS;
	plan_shape(&job->problem, job->result.shape);
	go_on(tuner);
	return 0;
}

void tuner_forget(struct session *session)
{
	list_for_each_entry(struct job, job, &session->worker->tuner->jobs, in_tuner) {
		if (job->session != session)
			continue;
		job->session = NULL;
		job->stopped = true;
	}
}

/* ---- life ---- */

int tuner_new(struct worker *worker, struct tuner **ret_tuner, struct fmha_error *err)
{
	struct tuner *tuner = calloc(1, sizeof(*tuner));

	if (!tuner)
		return fmha_error_set(err, FMHA_ENOMEM, "tuning: out of memory");
	tuner->worker = worker;
	list_init(&tuner->jobs);
	uv_timer_init(&worker->loop, &tuner->timer);
	tuner->timer.data = tuner;
	tuner->launch = device_launch_new(worker->device);
	*ret_tuner = tuner;
	if (!tuner->launch)
		return fmha_error_set(err, FMHA_ENOMEM, "tuning: out of memory");
	return device_stream_new(worker->device, (uint32_t)geteuid(), 1, &tuner->stream, err);
}

cJSON *tuner_status_json(const struct tuner *tuner)
{
	cJSON *json = cJSON_CreateObject();

	cJSON_AddBoolToObject(json, "busy", tuner->n_jobs > 0);
	cJSON_AddNumberToObject(json, "waiting", tuner->n_jobs);
	cJSON_AddNumberToObject(json, "problems", (double)tuner->n_jobs_done);
	cJSON_AddNumberToObject(json, "measured", (double)tuner->n_measured);
	cJSON_AddNumberToObject(json, "device_ns", (double)tuner->device_ns);
	cJSON_AddNumberToObject(json, "census", tuner->worker->plans.census.n_used);
	return json;
}
