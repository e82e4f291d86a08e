/* SPDX-License-Identifier: MIT */
/*
 * doctor_device.c: what the first owner of a card wants to know: does every family compute what the reference does, in
 * that device's worker; do fences order, is memory shared both ways, do runs beside each other give the same bits.
 *
 * Each trial has a connection of its own: a device that ends its worker fails that trial, and the next one finds the
 * worker that was started instead.
 */
#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <proto/error.h>
#include <proto/problem.h>

#include "doctor.h"
#include "judge.h"
#include "local_gpu.h"
#include "problem.h"
#include "recipe.h"
#include "tensors.h"

#define TRIAL_TIMEOUT_MS 300000 /* a first plan may wait for a compiler */
#define FENCE_TIMEOUT_MS 20000
#define HELD_MS          100 /* how long a run is seen to wait */
#define RACERS           4
#define ROUND_MS         500 /* of one problem in a race */

struct trial {
	const char *what, *problem; /* as fmhactl run has it, words divided by spaces */
};

/* Every family in every type, what is odd around tiles, and sums that do not cancel. */
static const struct trial trials[] = {
	{"forward f32", "forward dtype=f32 b=2 h=4 h_k=2 s=130 s_k=200 d=64 lse=1"},
	{"forward f16", "forward dtype=f16 b=2 h=4 h_k=2 s=300 d=64 causal=1 lse=1"},
	{"forward bf16", "forward b=1 h=8 h_k=2 s=600 d=128 causal=1 lse=1"},
	{"forward wide", "forward b=1 h=2 s=300 d=256 causal=1"},
	{"head dims", "forward dtype=f16 b=1 h=2 s=300 d=192 d_v=128"},
	{"tails", "forward b=2 h=3 h_k=1 s=77 s_k=333 d=72 d_v=40 causal=1 lse=1"},
	{"odd tails", "forward dtype=f16 b=2 h=2 s=65 s_k=129 d=53 d_v=29 lse=1"},
	{"window, sink", "forward b=1 h=4 s=300 d=64 mask=bottom_right window=40,3 sink=1"},
	{"bias", "forward b=2 h=2 s=130 s_k=190 d=64 bias=e:2"},
	{"ALiBi, cap", "forward dtype=f16 b=1 h=4 s=200 d=64 alibi=1 softcap=20 causal=1"},
	{"dropout", "forward b=1 h=2 s=200 d=64 dropout=0.2 seed=3 s_randval=1"},
	{"packed", "forward b=4 h=4 h_k=2 s=200 d=64 group=1 lengths=with_empty causal=1 lse=1"},
	{"decode", "forward b=2 h=16 h_k=2 s=1 s_k=3000 d=128 splits=1"},
	{"splits", "forward b=1 h=8 h_k=1 s=3 s_k=5000 d=128 splits=5 lse=1"},
	{"pages", "forward b=2 h=8 h_k=2 s=1 s_k=700 d=128 page-size=16 splits=1"},
	{"pages, rows", "forward b=2 h=4 h_k=2 s=150 s_k=700 d=64 page-size=16 causal=1"},
	{"page indices", "forward b=2 h=4 h_k=2 s=70 s_k=500 d=64 page-size=16 kv-lookup=indptr"},
	{"append", "append b=2 h=4 h_k=2 s_k=300 d=64 new=5"},
	{"append, pages", "append b=2 h=4 h_k=2 s_k=300 d=64 new=5 page-size=16 rope=half"},
	{"merge", "merge b=2 h=4 s=100 d=64 parts=4"},
	{"backward f32", "backward dtype=f32 b=1 h=2 s=130 s_k=90 d=64"},
	{"backward f16", "backward dtype=f16 b=2 h=4 h_k=2 s=200 d=64 causal=1"},
	{"backward bf16", "backward b=1 h=4 h_k=2 s=300 d=128 causal=1"},
	{"backward wide", "backward b=1 h=1 s=130 d=256"},
	{"backward tails", "backward b=2 h=2 s=77 s_k=150 d=72 d_v=40 causal=1"},
	{"backward bias", "backward b=1 h=2 s=130 d=64 bias=e:2 dbias=1"},
	{"backward dropout", "backward b=1 h=2 s=130 d=64 dropout=0.2 seed=3"},
	{"backward packed", "backward b=4 h=2 s=150 d=64 group=1 lengths=with_empty causal=1"},
	{"backward, same bits", "backward b=1 h=4 h_k=2 s=300 d=128 causal=1 deterministic=1"},
	{"e4m3", "forward dtype=e4m3 b=2 h=4 h_k=2 s=300 d=128 descale=pt causal=1"},
	{"e4m3 decode", "forward dtype=e4m3 b=2 h=8 h_k=2 s=2 s_k=1500 d=128 descale=pt splits=1"},
	{"e4m3 pages",
	 "forward dtype=e4m3 b=2 h=4 h_k=2 s=40 s_k=700 d=64 page-size=16 descale=pt"},
	{"e4m3, one sign", "forward dtype=e4m3 b=1 h=2 h_k=1 s=16 s_k=9000 d=64 init=uf splits=1"},
	{"e4m3 prefill, one sign", "forward dtype=e4m3 b=1 h=1 s=200 s_k=4000 d=128 init=uf"},
	{"bf16, one sign", "forward b=1 h=2 h_k=1 s=16 s_k=9000 d=128 init=uf"},
};

/* Those that race, which are to give the same bits whatever runs beside them. */
static const char *const racing[] = {
	"forward b=2 h=8 h_k=2 s=300 s_k=400 d=64 causal=1 lse=1",
	"forward b=1 h=8 h_k=2 s=600 d=128 causal=1",
	"forward b=4 h=16 h_k=2 s=1 s_k=2000 d=128 splits=8 lse=1",
	"forward b=2 h=4 h_k=2 s=40 s_k=700 d=64 page-size=16 causal=1",
	"forward dtype=f16 b=1 h=2 s=300 d=256",
	"forward dtype=e4m3 b=2 h=4 h_k=2 s=300 d=128 causal=1",
	"backward b=1 h=4 h_k=2 s=300 d=64 causal=1 deterministic=1",
	"backward b=1 h=2 s=300 d=128 deterministic=1",
};

#define COUNT(x) (sizeof(x) / sizeof((x)[0]))

/* ---- a problem on a connection of its own ---- */

struct bench {
	struct fmha_client *client;
	struct fmha_device *device;
	struct recipe recipe;
	struct fmha_problem placed;
	struct tensors tensors;
	struct fmha_plan *plan;
};

static void bench_deinit(struct bench *b)
{
	b->plan = fmha_plan_free(b->plan);
	tensors_deinit(&b->tensors);
	recipe_deinit(&b->recipe);
	b->device = fmha_device_free(b->device);
	b->client = fmha_client_free(b->client);
}

static int find_option(const struct cli_option *table, const char *name)
{
	for (; table->name; table++)
		if (!strcmp(table->name, name))
			return table->id;
	return -1;
}

/* One word: name=value. */
static int read_word(struct recipe *recipe, char *word, struct fmha_error *err)
{
	char *value = strchr(word, '=');
	int option, r;

	if (value)
		*value++ = '\0';
	option = recipe_option_named(word);
	r = value && option >= 0 ? recipe_option(recipe, option, value) : CTL_USAGE;
	if (value && option < 0 && (option = find_option(problem_options, word)) >= 0)
		r = problem_option(&recipe->problem, option, value);
	return r == 0 ? 0 : fmha_error_set(err, FMHA_EINVAL, "a trial's word '%s'", word);
}

static int read_recipe(const char *text, struct recipe *recipe, struct fmha_error *err)
{
	char words[256], *rest = words, *word;
	uint32_t op = FMHA_FORWARD;
	int r = 0;

	(void)snprintf(words, sizeof(words), "%s", text);
	word = strsep(&rest, " ");
	if (problem_parse_op(word, &op) < 0)
		r = fmha_error_set(err, FMHA_EINVAL, "a trial's word '%s'", word);
	recipe_init(recipe, op);
	while (r == 0 && (word = strsep(&rest, " ")))
		r = read_word(recipe, word, err);
	return r == 0 ? recipe_make(recipe, err) : r;
}

static int connect_to(const struct ctl_target *target, struct bench *b, struct fmha_error *err)
{
	const struct fmha_client_options options = {.struct_size = sizeof(options),
						    .timeout_ms = TRIAL_TIMEOUT_MS,
						    .path = target->socket,
						    .name = "fmhactl doctor"};
	int r = fmha_connect(&options, &b->client, err);

	return r < 0 ? r : fmha_device_open(b->client, target->device, &b->device, err);
}

/* The problem with its contents, and its plan. */
static int bench_init(const struct ctl_target *target, const char *problem, struct bench *b,
		      struct fmha_error *err)
{
	int r;

	memset(b, 0, sizeof(*b));
	r = connect_to(target, b, err);
	if (r == 0)
		r = read_recipe(problem, &b->recipe, err);
	b->placed = b->recipe.problem;
	if (r == 0)
		r = tensors_new(b->device, &b->placed, &b->tensors, err);
	if (r == 0)
		recipe_fill(&b->recipe, &b->tensors);
	if (r == 0 && b->placed.op == FMHA_BACKWARD)
		r = problem_run_forward(b->device, &b->placed, err);
	if (r == 0)
		r = fmha_plan_new(b->device, &b->placed, NULL, &b->plan, err);
	return r;
}

/* Where the results are to come, bytes that are no number. */
static void poison(const struct bench *b)
{
	for (uint32_t role = 0; role < FMHA_N_TENSORS; role++) {
		uint64_t bytes;

		if (b->tensors.present[role] && recipe_is_result(&b->placed, role) &&
		    problem_span_bytes(&b->recipe.problem, role, &bytes, NULL) == 0)
			memset(tensors_data(&b->tensors, role), 0xff, bytes);
	}
}

/* ---- against the reference ---- */

struct outcome {
	int n;
	struct judge_verdict verdicts[JUDGE_MAX_OUTPUTS];
	struct fmha_run_result time;
	char kernel[FMHA_KERNEL_BYTES]; /* of the main stage */
};

static int judge_on(struct bench *b,
		    int (*run)(struct bench *, struct outcome *, struct fmha_error *),
		    struct outcome *ret, struct fmha_error *err)
{
	struct fmha_problem pointed;
	struct fmha_plan_info info;
	struct judge *judge = NULL;
	uint32_t main_stage;
	int r = fmha_plan_info(b->plan, &info, err);

	memset(ret, 0, sizeof(*ret));
	if (r < 0)
		return r;
	main_stage = info.n_stages > 1 && b->placed.op == FMHA_BACKWARD;
	memcpy(ret->kernel, info.stages[main_stage].kernel, sizeof(ret->kernel));
	tensors_point(&b->tensors, &b->placed, &pointed);
	r = judge_new(&pointed, &judge, err);
	if (r == 0 && b->placed.op == FMHA_FORWARD && b->placed.seqlen_new == 0)
		poison(b);
	if (r == 0)
		r = run(b, ret, err);
	if (r == 0)
		ret->n = judge_compare(judge, &pointed, ret->verdicts);
	judge = judge_free(judge);
	return r;
}

static int run_in_worker(struct bench *b, struct outcome *ret, struct fmha_error *err)
{
	int r = fmha_plan_run(b->plan, NULL, &ret->time, err);

	/* Once more: the first run of a kernel may have other things to wait for. */
	if (r == 0 && b->placed.op != FMHA_APPEND_KV)
		r = fmha_plan_run(b->plan, NULL, &ret->time, err);
	return r;
}

static void report_outcome(struct doctor *doctor, const char *what, const struct outcome *o)
{
	const struct judge_verdict *worst = NULL;
	double most = 0;

	for (int i = 0; i < o->n; i++) {
		const struct judge_verdict *v = &o->verdicts[i];
		double share = v->bar > 0 ? v->max_error / v->bar : v->ok ? 0 : INFINITY;

		if (!worst || !v->ok || (share > most && worst->ok)) {
			worst = v;
			most = share;
		}
	}
	if (!worst)
		doctor_report(doctor, DOCTOR_WRONG, what, "report it: nothing was compared",
			      "no result, %s", o->kernel);
	else if (worst->ok)
		doctor_report(doctor, DOCTOR_GOOD, what, NULL,
			      "%.2f of what is allowed, %.3f ms, %s", most,
			      (double)o->time.kernel_ns / 1e6, o->kernel);
	else
		doctor_report(doctor, DOCTOR_WRONG, what,
			      "do not use this device; send this table with the kernel's name",
			      "%s element %" PRId64 " is %g, expected %g (allowed %.3g), %s",
			      proto_roles[worst->role].name, worst->at, worst->got, worst->expected,
			      worst->bar, o->kernel);
}

static void report_error(struct doctor *doctor, const char *what, const struct fmha_error *err)
{
	if (err->code == FMHA_ENOTSUP || err->code == FMHA_ENOKERNEL)
		doctor_report(doctor, DOCTOR_NOTE, what, "nothing: such problems are refused",
			      "not supported: %s", err->msg);
	else
		doctor_report(doctor, DOCTOR_WRONG, what, "the log has more: journalctl -u fmhad",
			      "%s: %s", fmha_error_name(err->code), err->msg);
}

static void try_problem(struct doctor *doctor, const char *what, const char *problem,
			int (*run)(struct bench *, struct outcome *, struct fmha_error *))
{
	struct fmha_error err = {0};
	struct outcome outcome;
	struct bench b;
	int r = bench_init(&doctor->target, problem, &b, &err);

	if (r == 0)
		r = judge_on(&b, run, &outcome, &err);
	if (r == 0)
		report_outcome(doctor, what, &outcome);
	else
		report_error(doctor, what, &err);
	bench_deinit(&b);
}

/* ---- memory that this process has ---- */

/* The same problem in memory of the GPU's that this process allocates: what the worker reads there was written here, and
 * what it writes is read here. */
static int run_in_shared(struct bench *b, struct outcome *ret, struct fmha_error *err)
{
	struct local_gpu *gpu = NULL;
	int r = local_gpu_open(b->client, b->device, &gpu, err);

	if (r == 0)
		r = local_gpu_share(gpu, &b->placed, &b->tensors, ret->kernel, err);
	gpu = local_gpu_free(gpu);
	return r;
}

/* ---- fences ---- */

/* Two connections to one worker. */
struct fence_trial {
	struct bench waiter, writer;
	struct local_gpu *gpu;
};

static int try_fence(const struct ctl_target *target, struct fence_trial *t, struct fmha_error *err)
{
	static const char problem[] = "forward b=1 h=2 s=64 d=64";
	struct local_gpu_fence fence;
	int r = bench_init(target, problem, &t->waiter, err);

	if (r == 0)
		r = bench_init(target, problem, &t->writer, err);
	if (r == 0)
		r = local_gpu_open(t->waiter.client, t->waiter.device, &t->gpu, err);
	fence = (struct local_gpu_fence){.problem = &t->waiter.placed,
					 .tensors = &t->waiter.tensors,
					 .behind = t->waiter.plan,
					 .writer = t->writer.device,
					 .writes = t->writer.plan,
					 .held_ms = HELD_MS,
					 .timeout_ms = FENCE_TIMEOUT_MS};
	if (r == 0)
		r = local_gpu_fence(t->gpu, &fence, err);
	return r;
}

static void try_fences(struct doctor *doctor, const struct fmha_device_info *info)
{
	struct fence_trial t = {0};
	struct fmha_error err = {0};
	int r;

	if (!info->fences) {
		bool is_hip = !strcmp(info->backend, "hip");

		doctor_report(doctor, is_hip ? DOCTOR_NOTE : DOCTOR_GOOD, "fences",
			      is_hip ? "see above what its worker found" : NULL,
			      is_hip ? "refused" : "none on this kind of device");
		return;
	}
	r = try_fence(&doctor->target, &t, &err);
	if (r == 0)
		doctor_report(doctor, DOCTOR_GOOD, "fences", NULL,
			      "a run waited for another connection's, and saw what it was to see");
	else
		report_error(doctor, "fences", &err);
	t.gpu = local_gpu_free(t.gpu);
	bench_deinit(&t.waiter);
	bench_deinit(&t.writer);
}

/* ---- races ---- */

struct racer {
	pthread_t thread;
	const struct ctl_target *target;
	int number;
	int64_t until_ns;
	uint64_t runs, differing;
	const char *differs; /* a problem whose bits did */
	struct fmha_error err;
};

/* Runs one problem for a while; all runs are to give the first one's bits. */
static int race_on(struct racer *racer, const char *problem)
{
	int64_t until = ctl_now_ns() + ROUND_MS * 1000000ll;
	uint8_t *first = NULL;
	struct bench b;
	int r = bench_init(racer->target, problem, &b, &racer->err);

	for (uint64_t i = 0; r == 0 && (i < 3 || ctl_now_ns() < until); i++) {
		poison(&b);
		r = fmha_plan_run(b.plan, NULL, NULL, &racer->err);
		if (r == 0 && !first && !(first = malloc(b.tensors.bytes)))
			r = fmha_error_set(&racer->err, FMHA_ENOMEM, "out of memory");
		if (r == 0 && i == 0)
			memcpy(first, fmha_buffer_data(b.tensors.buffer), b.tensors.bytes);
		if (r == 0 &&
		    memcmp(first, fmha_buffer_data(b.tensors.buffer), b.tensors.bytes) != 0) {
			racer->differing++;
			racer->differs = problem;
		}
		racer->runs += r == 0;
	}
	free(first);
	bench_deinit(&b);
	return r == FMHA_ENOTSUP || r == FMHA_ENOKERNEL ? 0 : r;
}

static void *race(void *argument)
{
	struct racer *racer = argument;
	int r = 0;

	for (size_t i = (size_t)racer->number;
	     r == 0 && (racer->runs == 0 || ctl_now_ns() < racer->until_ns); i += 3)
		r = race_on(racer, racing[i % COUNT(racing)]);
	if (r == 0)
		racer->err.code = 0;
	return NULL;
}

static void try_races(struct doctor *doctor)
{
	int64_t began = ctl_now_ns(), until = began + (int64_t)(doctor->seconds * 1e9);
	struct racer racers[RACERS] = {0};
	uint64_t runs = 0, differing = 0;
	const struct fmha_error *lost = NULL;
	const char *differs = "";
	int n = 0;

	for (; n < RACERS; n++) {
		racers[n] = (struct racer){
			.target = &doctor->target, .number = n, .until_ns = until};
		if (pthread_create(&racers[n].thread, NULL, race, &racers[n]) != 0)
			break;
	}
	for (int i = 0; i < n; i++) {
		(void)pthread_join(racers[i].thread, NULL);
		runs += racers[i].runs;
		differing += racers[i].differing;
		differs = racers[i].differs ? racers[i].differs : differs;
		lost = racers[i].err.code ? &racers[i].err : lost;
	}
	if (lost)
		report_error(doctor, "races", lost);
	else if (differing > 0 || runs == 0)
		doctor_report(doctor, DOCTOR_WRONG, "races",
			      "do not use this device; send this table with the problem",
			      "%" PRIu64 " of %" PRIu64 " runs gave other bits: %s", differing,
			      runs, differs);
	else
		doctor_report(doctor, DOCTOR_GOOD, "races", NULL,
			      "%" PRIu64 " runs of %d at once in %.0f s, all with the same bits",
			      runs, n, (double)(ctl_now_ns() - began) / 1e9);
}

/* ---- all of it ---- */

static int describe_device(struct doctor *doctor, struct fmha_device_info *ret_info)
{
	struct fmha_error err = {0};
	struct bench b = {0};
	int r = connect_to(&doctor->target, &b, &err);

	if (r == 0)
		r = fmha_device_info(b.device, ret_info, &err);
	if (r == 0)
		doctor_report(doctor, DOCTOR_GOOD, "tried", NULL,
			      "%s, %s by %s, %u units, fmhad %s", ret_info->name, ret_info->arch,
			      ret_info->backend, ret_info->compute_units, fmha_version());
	else
		report_error(doctor, "tried", &err);
	bench_deinit(&b);
	return r;
}

void doctor_try_device(struct doctor *doctor)
{
	struct fmha_device_info info;
	bool is_gpu;

	if (describe_device(doctor, &info) < 0)
		return;
	is_gpu = !strcmp(info.backend, "cuda") || !strcmp(info.backend, "hip");
	for (size_t i = 0; i < COUNT(trials); i++)
		try_problem(doctor, trials[i].what, trials[i].problem, run_in_worker);
	if (is_gpu)
		try_problem(doctor, "shared memory", "forward b=1 h=4 h_k=2 s=200 d=64 causal=1",
			    run_in_shared);
	else
		doctor_report(doctor, DOCTOR_GOOD, "shared memory", NULL,
			      "all of the above went through it");
	try_fences(doctor, &info);
	try_races(doctor);
}
