/* SPDX-License-Identifier: MIT */
/*
 * schedule.c: which run is next on the device.
 *
 * A device that shares the host's memory takes turns between its streams itself (device/pool.c): it
 * gets a few runs of every session. Any other runs what it is given, so it is given little: so many
 * launches at a time as fill it queue_depth times, of whichever user has had least of it
 * (base/fair.h), so that a run has at most so much of others' before it.
 *
 * Runs with fences are with the device while they wait, on one of its few hardware queues: those of
 * one user are limited, and further while others want the device, since what waits is started by
 * its client and not by turns.
 *
 * A tiny run is done on the loop thread itself while the device is idle: handing it to another
 * thread and back would take longer than the run.
 */
#include "request.h"

#include <string.h>

#include <base/clock.h>
#include <proto/clamp.h>
#include <proto/error.h>

#define TINY_WORKSPACE      (1u << 20)        /* bytes: touching more takes its time */
#define FIRST_GUESS_NS      100000            /* of device time, for a plan that has never run */
#define MOST_ESTIMATE_NS    (3600 * NS_PER_S) /* of one run: no work is worth more turns */
#define FENCED_DEPTH        16                /* of one session */
#define FENCED_AMONG_OTHERS 2                 /* of one user, while others want the device */

static struct request *first_waiting(struct session *session)
{
	return list_is_empty(&session->waiting)
		       ? NULL
		       : container_of(session->waiting.next, struct request, in_session);
}

static bool takes_turns(const struct worker *worker)
{
	return device_shares_memory(worker->device);
}

/* ---- on the device ---- */

/* The page names who is to blame while this thread is with the device, in case it does not come
 * back. */
static void enter_device(struct worker *worker, const struct request *request)
{
	struct worker_page *page = worker->page;
	const struct culprit *culprit = &request->plan->culprits[0];

	if (worker->runs.loop_serial != request->plan->serial) {
		memcpy(page->loop_kernel, culprit->kernel, sizeof(page->loop_kernel));
		page->loop_code = culprit->code;
		page->loop_uid = culprit->uid;
		page->loop_problem = culprit->problem;
	}
	worker->runs.loop_serial = request->plan->serial;
	atomic_store_explicit(&page->loop_busy, 1, memory_order_release);
}

static void leave_device(struct worker *worker)
{
	atomic_store_explicit(&worker->page->loop_busy, 0, memory_order_release);
}

static bool is_tiny(const struct request *request)
{
	return request->plan->plan.workspace_bytes <= TINY_WORKSPACE &&
	       request->work <= request->plan->tiny_work && !request_has_fences(request);
}

static void charge_estimate(struct request *request)
{
	double guess = request->plan->ns_per_work * request->work;

	request->estimate_ns = guess > 0 ? clamp_u64(guess) : FIRST_GUESS_NS;
	if (request->estimate_ns > MOST_ESTIMATE_NS)
		request->estimate_ns = MOST_ESTIMATE_NS;
	fair_charge(&request->session->turn, (int64_t)request->estimate_ns);
}

static void submit(struct request *request, void (*on_done)(struct device_launch *launch))
{
	struct worker *worker = request->session->worker;
	struct device_launch *launch = request->launch;

	launch->on_done = on_done;
	launch->bus_address = 0;
	launch->error.code = FMHA_OK;
	worker->idle.untrimmed = true;
	enter_device(worker, request);
	device_submit(worker->device, launch);
	leave_device(worker);
}

/* Return: whether it was run to its end. */
static bool run_here(struct request *request)
{
	struct worker *worker = request->session->worker;
	struct device_launch *launch = request->launch;
	bool done;

	launch->bus_address = 0;
	launch->error.code = FMHA_OK;
	enter_device(worker, request);
	done = device_run_here(worker->device, launch);
	leave_device(worker);
	return done;
}

static void on_done(struct device_launch *launch);

/* The request has its launch, for better or worse: it leaves the queue. */
static void start_bound(struct request *request)
{
	struct session *session = request->session;
	struct worker *worker = session->worker;

	list_remove(&request->in_session);
	list_append(&session->running, &request->in_session);
	session->n_waiting--;
	session->n_running++;
	request->state = REQUEST_RUNNING;
	request->launch->stream = session->stream;
	request->launch->expected_ns = clamp_u64(request->plan->ns_per_work * (request->work + 1));
	if (is_tiny(request) && session->n_running == 1 && run_here(request)) {
		request_complete(request, request->launch->ended_ns);
		return;
	}
	request->submitted_ns = clock_ns();
	if (!request_has_fences(request))
		worker->runs.device_load += request->plan->load;
	if (!takes_turns(worker))
		charge_estimate(request);
	submit(request, on_done);
	if (request_has_fences(request))
		request_answer_queued(request);
}

void schedule_give_up(struct request *request, const struct fmha_error *error)
{
	if (request->params.n_signals == 0) {
		request_fail(request, error);
		return;
	}
	request->bind_error = *error;
	bind_signals_only(request);
	start_bound(request);
}

/* ---- before the device ---- */

/* The request's integers are checked. */
static void schedule_settle(struct request *request)
{
	struct fmha_error err;

	if (request->cancelled) {
		(void)fmha_error_set(&err, FMHA_ECANCELED, "the run was cancelled");
		schedule_give_up(request, &err);
	} else if (request->timed_out && !request_has_fences(request)) {
		(void)fmha_error_set(&err, FMHA_ETIMEDOUT, "not started before its deadline");
		schedule_give_up(request, &err);
	} else if (bind_launch(request, &err) < 0) {
		schedule_give_up(request, &err);
	} else {
		request->state = REQUEST_BOUND;
	}
}

/* Its client has gone while it was being prepared. */
static void forget(struct request *request)
{
	struct fmha_error err;

	(void)fmha_error_set(&err, FMHA_ECANCELED, "the client is gone");
	request_fail(request, &err);
}

/* What was done elsewhere is: on with the request by @go_on. */
static void resume(struct request *request, void (*go_on)(struct request *request))
{
	struct session *session = request->session;

	if (session->hung_up) {
		forget(request);
	} else {
		go_on(request);
		schedule_session(session);
	}
	session_offload_ended(session);
}

static struct request *request_of_bind(struct offload *offload)
{
	return container_of(offload, struct request, bind);
}

static void bind_run(struct offload *offload)
{
	bind_arguments(request_of_bind(offload));
}

static void bind_done(struct offload *offload)
{
	resume(request_of_bind(offload), schedule_settle);
}

/* Checks many integers on another thread. It reads memory only: it cannot be late for long. */
static void bind_elsewhere(struct request *request)
{
	struct session *session = request->session;
	struct fmha_error err;

	request->state = REQUEST_BINDING;
	request->bind = (struct offload){.owner = session,
					 .user = session->account,
					 .run = bind_run,
					 .done = bind_done,
					 .undo = bind_done};
	if (offload_start(&session->worker->offloads, &request->bind, &err) < 0)
		schedule_give_up(request, &err);
	else
		session->n_offloads++;
}

static void bind_fetched(struct request *request)
{
	const struct fmha_error *error = &request->launch->error;

	if (error->code != FMHA_OK && error->code != FMHA_ECANCELED) {
		schedule_give_up(request, error);
	} else if (bind_is_large(request) && !request->cancelled) {
		bind_elsewhere(request);
	} else {
		bind_arguments(request);
		schedule_settle(request);
	}
}

static void on_fetched(struct device_launch *launch)
{
	resume(launch->owner, bind_fetched);
}

/*
 * The session's runs before it do not concern what a fetch reads, unless one waits for a fence, by which its client may
 * say that the words are there, or writes them itself: then it need not wait for their ends, and the device
 * finds the next run when it is through with the last.
 */
static struct device_stream *stream_to_fetch(struct request *request)
{
	struct session *session = request->session;
	bool behind = session->n_running == 0 || session->n_fenced > 0;
	struct fmha_error ignored;

	list_for_each_entry(struct request, before, &session->running, in_session) {
		behind |= bind_writes_what_is_fetched(before, request);
	}
	if (!behind && !session->fetches)
		(void)device_stream_new(session->worker->device, session->uid, 1, &session->fetches,
					&ignored);
	return behind || !session->fetches ? session->stream : session->fetches;
}

static void fetch(struct request *request)
{
	struct session *session = request->session;

	request->state = REQUEST_FETCHING;
	bind_fetch(request);
	request->launch->stream = stream_to_fetch(request);
	request->launch->expected_ns = 0; /* soon */
	if (!request_has_fences(request) && !bind_is_large(request) && run_here(request)) {
		bind_fetched(request);
		return;
	}
	session->n_offloads++;
	submit(request, on_fetched);
}

/* Takes the memory for the session's first request, and binds it or begins to. @now: it is its
 * turn, or needs none. */
static void prepare(struct request *request, bool now)
{
	struct fmha_error err;
	int r = bind_memory(request, &err);

	if (r < 0)
		schedule_give_up(request, &err);
	else if (r > 0)
		fetch(request);
	else if (bind_is_large(request))
		bind_elsewhere(request);
	else if (bind_now(request, &err) < 0)
		schedule_give_up(request, &err);
	else if (now)
		start_bound(request);
	else
		request->state = REQUEST_BOUND;
}

/* Whether start() would have something to do now but for other users' turns. */
static bool may_start(struct session *session, const struct request *request)
{
	struct worker *worker = session->worker;

	switch (request->state) {
	case REQUEST_BOUND:
		return true;
	case REQUEST_WAITING:
		return !takes_turns(worker) || session->n_running < worker->config->queue_depth;
	default:
		return false;
	}
}

static void start(struct request *request, bool now)
{
	if (request->state == REQUEST_BOUND)
		start_bound(request);
	else
		prepare(request, now);
}

/* ---- turns ---- */

/* Whether the user has as many runs with fences on the device as others may have to wait for. */
static bool crowds_out_others(const struct session *session)
{
	bool others = false;
	uint32_t n_fenced = 0;

	list_for_each_entry(struct session, other, &session->worker->sessions, in_sessions) {
		if (other->account == session->account)
			n_fenced += other->n_fenced;
		else
			others |= other->n_waiting + other->n_running > 0;
	}
	return others && n_fenced >= FENCED_AMONG_OTHERS;
}

/* One more run on the device that waits for fences. */
static bool take_fenced_place(struct request *request)
{
	struct session *session = request->session;

	if (request->fenced)
		return true;
	if (session->n_fenced >= FENCED_DEPTH || crowds_out_others(session))
		return false;
	if (session->n_fenced == 0 && account_charge(session->account, ACCOUNT_FENCED, 1, NULL) < 0)
		return false;
	session->n_fenced++;
	request->fenced = true;
	return true;
}

/* Large tables, and those that lie on the device, are read before it is the run's turn. */
static bool needs_preparing(const struct request *request)
{
	return request->state == REQUEST_WAITING &&
	       (request->plan->fetches || bind_is_large(request));
}

/* Starts what needs no turn. Return: the first request that waits for one, or NULL. */
static struct request *start_without_turn(struct session *session)
{
	struct request *request;

	while ((request = first_waiting(session)) && may_start(session, request)) {
		bool fenced = request_has_fences(request);

		if (fenced && !take_fenced_place(request))
			return NULL;
		if (!fenced && !takes_turns(session->worker) && !needs_preparing(request))
			return request;
		start(request, fenced || takes_turns(session->worker));
	}
	return NULL;
}

static void give_turns(struct worker *worker)
{
	struct fair_session *turn;

	uint64_t most = (uint64_t)worker->config->queue_depth * worker->plans.device.compute_units;

	while (worker->runs.device_load < most && (turn = fair_next(&worker->runs.turns))) {
		struct session *session = container_of(turn, struct session, turn);
		struct request *request = start_without_turn(session);

		fair_deactivate(turn);
		if (request)
			start(request, true);
		if (start_without_turn(session))
			fair_activate(turn);
	}
}

void schedule_session(struct session *session)
{
	struct worker *worker = session->worker;

	if (!session->hung_up && start_without_turn(session))
		fair_activate(&session->turn);
	else
		fair_deactivate(&session->turn);
	if (!worker->runs.giving_turns) {
		worker->runs.giving_turns =
			true; /* completing a run here would come back to this */
		give_turns(worker);
		worker->runs.giving_turns = false;
	}
}

/* One of the user's runs with fences is through: others may have waited for its place. */
static void schedule_fenced(struct session *session)
{
	list_for_each_entry(struct session, other, &session->worker->sessions, in_sessions) {
		if (other->account == session->account && other != session)
			schedule_session(other);
	}
}

/* What is started because something has ended is prepared on the loop, on its user's time. */
static void schedule_timed(struct session *session)
{
	uint64_t start_ns = clock_ns(), now;

	schedule_session(session);
	now = clock_ns();
	account_add_loop_ns(session->account, now, now - start_ns);
}

static void on_done(struct device_launch *launch)
{
	struct request *request = launch->owner;
	struct session *session = request->session;
	struct worker *worker = session->worker;
	uint64_t took = launch->ended_ns - launch->started_ns;
	bool fenced = request->fenced;
	struct doing_before before = doing_begin(&worker->page->doing, DOING_COMPLETION,
						 session->uid);

	if (!request_has_fences(request))
		worker->runs.device_load -= request->plan->load;
	if (!takes_turns(worker) && launch->error.code == FMHA_OK)
		fair_charge(&session->turn, (int64_t)took - (int64_t)request->estimate_ns);
	request_complete(request, clock_ns());
	if (fenced)
		schedule_fenced(session);
	schedule_timed(session);
	session_release(session);
	doing_end(&worker->page->doing, before);
}
