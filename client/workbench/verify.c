/* SPDX-License-Identifier: MIT */
/*
 * verify.c: random problems through the daemon, judged by the double-precision reference. Several cases are on
 * their way at once, so that the daemon compiles for the next ones while others run; their outcomes are
 * told in the order of their numbers, whichever came first.
 */
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <cjson/cJSON.h>

#include <proto/error.h>
#include <proto/problem.h>

#include "judge.h"
#include "local_gpu.h"
#include "problem.h"
#include "verify_case.h"

#define MOST_JOBS    256
#define DEFAULT_JOBS 32
#define AHEAD        1024 /* cases that may be judged while an earlier one is not */

/* What a case came to. */
struct outcome {
	enum { OUTCOME_NONE, OUTCOME_OK, OUTCOME_UNSUPPORTED, OUTCOME_FAILED } kind;
	char *text; /* to be printed, or NULL */
};

struct verify {
	struct ctl_target target;
	int64_t cases, only; /* only: -1: all of them */
	int64_t first, end;  /* of the cases' numbers */
	int64_t jobs, seed;
	uint32_t features;
	const char *feature_words; /* as they were given, or NULL */
	bool verbose, details, local, is_long;
	cJSON *failures; /* numbers of cases, for --json; NULL without */
	struct fmha_device *device;
	struct local_gpu *gpu;   /* that cases are launched on here, or NULL */
	pthread_rwlock_t others; /* held for writing by a case that is to be alone */

	int changed_fd;       /* readable when a case was judged, or none will be any more */
	pthread_mutex_t lock; /* of the rest */
	pthread_cond_t room;  /* told changed */
	int64_t begun, told;  /* the next case to begin, and the first that was not told */
	struct outcome outcomes[AHEAD];
	bool ended;             /* no further case begins */
	struct fmha_error lost; /* why, when the daemon does not answer */
	uint64_t n_judged[OUTCOME_FAILED + 1];
	struct fmha_error refusal; /* one of those not supported */
};

#define MOST_CASES (INT64_C(1) << 61) /* a double holds it: as a range does */

static const struct cli_option own_options[] = {
	{"cases", 'n', "N", "how many (default 200)",
	 CLI_RANGE(INT, struct verify, cases, 1, MOST_CASES)},
	{"from", 'F', "N", "number of the first one (default 0)",
	 CLI_RANGE(INT, struct verify, first, 0, MOST_CASES)},
	{"seed", 's', "S", "which ones (default 1)",
	 CLI_RANGE(INT, struct verify, seed, 0, INT64_MAX)},
	{"only", 'o', "N", "case N alone, with all details",
	 CLI_RANGE(INT, struct verify, only, 0, MOST_CASES)},
	{"jobs", 'j', "N", "on their way at once (default: as many as there are cores, at most 32)",
	 CLI_RANGE(INT, struct verify, jobs, 1, MOST_JOBS)},
	{"features", 'f', "LIST",
	 "what cases may have, separated by commas; a leading ! takes away from all: backward "
	 "append "
	 "merge mask window lse bias alibi sink softcap dropout scale group lengths paged split "
	 "strides rope intervals bits f32 f16 bf16 fp8 narrow slots wide latent chosen",
	 CLI_OWN},
	{"local", 'l', NULL, "this process launches, as fmha_local.h has it, instead of the worker",
	 CLI_TO(FLAG, struct verify, local)},
	{"long", 'L', NULL,
	 "several tiles, blocks and splits: forward and backward alone, half of it packed",
	 CLI_TO(FLAG, struct verify, is_long)},
	{"verbose", 'v', NULL, "a line for each case", CLI_TO(FLAG, struct verify, verbose)},
	CLI_END};

static int parse_feature(const char *word, size_t n, uint32_t *ret_bit)
{
	for (int i = 0; i < VERIFY_N_FEATURES; i++) {
		if (strlen(verify_feature_names[i]) == n &&
		    !memcmp(verify_feature_names[i], word, n)) {
			*ret_bit = 1u << i;
			return 0;
		}
	}
	return ctl_usage_error("--features: no feature '%.*s'", (int)n, word);
}

static int take_features(void *owner, int option, const char *text)
{
	struct verify *v = owner;
	const uint32_t types = 1u << VERIFY_F32 | 1u << VERIFY_F16 | 1u << VERIFY_BF16 |
			       1u << VERIFY_FP8;
	uint32_t features = text[0] == '!' ? VERIFY_ALL : 0;

	(void)option;
	v->feature_words = text;
	while (*text) {
		bool away = *text == '!';
		size_t n;
		uint32_t bit = 0;
		int r;

		text += away;
		n = strcspn(text, ",");
		r = parse_feature(text, n, &bit);
		if (r != 0)
			return r;
		features = away ? features & ~bit : features | bit;
		text += n;
		text += *text == ',';
	}
	if ((features & types) == 0)
		features |= 1u << VERIFY_F32 | 1u << VERIFY_F16 | 1u << VERIFY_BF16;
	v->features = features;
	return 0;
}

static int verify_parse(struct verify *v, int argc, char **argv)
{
	int r = ctl_options(&ctl_verify, argc, argv, &v->target, take_features, v);

	if (r == 0 && v->target.json && !(v->failures = cJSON_CreateArray()))
		return ctl_usage_error("verify: out of memory");
	if (v->is_long) /* whatever the order of the options */
		v->features |= VERIFY_LONG;
	v->details = v->only >= 0;
	if (v->details)
		v->first = v->only;
	v->end = v->first + (v->details ? 1 : v->cases);
	v->begun = v->told = v->first;
	return r;
}

/* ---- one case ---- */

/* @kernel: FMHA_KERNEL_BYTES: of the main stage. */
static int run_problem(struct fmha_device *device, const struct fmha_problem *problem, char *kernel,
		       struct fmha_error *err)
{
	struct fmha_plan_info info;
	struct fmha_plan *plan;
	int r = fmha_plan_new(device, problem, NULL, &plan, err);

	if (r < 0)
		return r;
	r = fmha_plan_info(plan, &info, err);
	if (r == 0)
		(void)snprintf(
			kernel, FMHA_KERNEL_BYTES, "%s",
			info.stages[info.n_stages > 1 && problem->op == FMHA_BACKWARD].kernel);
	if (r == 0)
		r = fmha_plan_run(plan, NULL, NULL, err);
	plan = fmha_plan_free(plan);
	return r;
}

static int execute(const struct verify *v, struct verify_case *c,
		   struct judge_verdict verdicts[JUDGE_MAX_OUTPUTS], int *ret_n, char *kernel,
		   struct fmha_error *err)
{
	struct fmha_problem placed = c->problem, pointed;
	struct judge *judge = NULL;
	struct tensors tensors;
	int r = tensors_new(v->device, &placed, &tensors, err);

	if (r < 0)
		return r;
	verify_case_fill(c, &tensors);
	tensors_point(&tensors, &placed, &pointed);
	if (placed.op == FMHA_BACKWARD)
		r = problem_run_forward(v->device, &placed, err);
	if (r == 0)
		r = judge_new(&pointed, &judge, err);
	if (r == 0)
		r = v->gpu ? local_gpu_run(v->gpu, &placed, &tensors, kernel, err)
			   : run_problem(v->device, &placed, kernel, err);
	if (r == 0)
		*ret_n = judge_compare(judge, &pointed, verdicts);
	judge = judge_free(judge);
	tensors_deinit(&tensors);
	return r;
}

static void print_case(FILE *to, const struct verify_case *c, int64_t number, const char *outcome)
{
	char text[256], words[256];

	problem_describe(&c->problem, text, sizeof(text));
	verify_case_words(c, words, sizeof(words));
	(void)fprintf(to, "case %" PRId64 ": %s\n  %s\n  with %s\n", number, outcome, text, words);
}

static void print_verdicts(FILE *to, const char *kernel, const struct judge_verdict *verdicts,
			   int n)
{
	(void)fprintf(to, "  kernel %s\n", kernel);
	for (int i = 0; i < n; i++) {
		(void)fprintf(to, "  %-10s max error %.3g, allowed %.3g: %s",
			      proto_roles[verdicts[i].role].name, verdicts[i].max_error,
			      verdicts[i].bar, verdicts[i].ok ? "ok" : "WRONG");
		if (!verdicts[i].ok)
			(void)fprintf(to, " (element %" PRId64 " is %g, expected %g)",
				      verdicts[i].at, verdicts[i].got, verdicts[i].expected);
		(void)fputc('\n', to);
	}
}

static bool is_unsupported(int code)
{
	return code == FMHA_ENOTSUP || code == FMHA_ENOKERNEL;
}

static bool is_lost(int code)
{
	return code == FMHA_ECONN || code == FMHA_ETIMEDOUT;
}

/* What comes of the case, and what is to be said of it to @to. Return: 0; when nothing did, a negative FMHA_E* code. */
static int attempt(struct verify *v, int64_t number, FILE *to, int *ret_kind,
		   struct fmha_error *err)
{
	struct judge_verdict verdicts[JUDGE_MAX_OUTPUTS];
	char kernel[FMHA_KERNEL_BYTES] = "";
	bool ok = true, details = v->verbose || v->details;
	struct verify_case c;
	int n = 0, r;

	if (verify_case_init(&c, (uint64_t)v->seed, (uint64_t)number, v->features) < 0)
		r = fmha_error_set(err, FMHA_ENOMEM, "case %" PRId64 ": out of memory", number);
	else
		r = execute(v, &c, verdicts, &n, kernel, err);
	for (int i = 0; i < n; i++)
		ok = ok && verdicts[i].ok;
	*ret_kind = r == 0              ? (ok ? OUTCOME_OK : OUTCOME_FAILED)
		    : is_unsupported(r) ? OUTCOME_UNSUPPORTED
					: OUTCOME_FAILED;
	if (r == 0 && (!ok || details)) {
		print_case(to, &c, number, ok ? "ok" : "FAILED");
		print_verdicts(to, kernel, verdicts, n);
	} else if (r < 0 && !is_lost(r) && (!is_unsupported(r) || details)) {
		print_case(to, &c, number,
			   is_unsupported(r) ? "not supported" : fmha_error_name(r));
		(void)fprintf(to, "  %s\n", err->msg);
	}
	verify_case_deinit(&c);
	return r;
}

/*
 * A case whose worker went away is not to blame as long as others are on their way: it is tried again alone, unless the
 * daemon is gone or about to go. Return: 0; FMHA_ECONN, FMHA_ETIMEDOUT, FMHA_ENOMEM: not judged.
 */
static int verify_one(struct verify *v, int64_t number, struct outcome *ret, struct fmha_error *err)
{
	int kind = OUTCOME_NONE, r = FMHA_EDEVICE;

	for (int i = 0; i < 2 && (r == FMHA_EDEVICE || r == FMHA_EBUSY); i++) {
		struct fmha_error gone = {0};
		size_t bytes = 0;
		FILE *to;

		free(ret->text);
		ret->text = NULL;
		to = open_memstream(&ret->text, &bytes);
		if (!to)
			return fmha_error_set(err, FMHA_ENOMEM, "verify: out of memory");
		(void)(i == 0 ? pthread_rwlock_rdlock(&v->others)
			      : pthread_rwlock_wrlock(&v->others));
		r = attempt(v, number, to, &kind, err);
		(void)pthread_rwlock_unlock(&v->others);
		(void)fclose(to);
		if ((r == FMHA_EDEVICE || r == FMHA_EBUSY) &&
		    is_lost(fmha_device_ping(v->device, &gone))) {
			*err = gone;
			r = gone.code;
		}
	}
	if (is_lost(r))
		return r;
	ret->kind = kind;
	return 0;
}

/* ---- all of them ---- */

/* Return: false when there is none to begin any more. */
static bool begin_case(struct verify *v, int64_t *ret_number)
{
	bool begins;

	(void)pthread_mutex_lock(&v->lock);
	while (!v->ended && v->begun < v->end && v->begun >= v->told + AHEAD)
		(void)pthread_cond_wait(&v->room, &v->lock);
	begins = !v->ended && v->begun < v->end;
	if (begins)
		*ret_number = v->begun++;
	(void)pthread_mutex_unlock(&v->lock);
	return begins;
}

static void *verify_some(void *argument)
{
	const uint64_t one = 1;
	struct verify *v = argument;
	int64_t number;

	while (begin_case(v, &number)) {
		struct outcome outcome = {0};
		struct fmha_error err = {0};
		int r = verify_one(v, number, &outcome, &err);

		(void)pthread_mutex_lock(&v->lock);
		v->outcomes[number % AHEAD] = outcome;
		if (outcome.kind == OUTCOME_UNSUPPORTED)
			v->refusal = err;
		if (r < 0 && !v->ended) {
			v->ended = true;
			v->lost = err;
			(void)pthread_cond_broadcast(&v->room);
		}
		(void)pthread_mutex_unlock(&v->lock);
		(void)!write(v->changed_fd, &one, sizeof(one));
	}
	return NULL;
}

/* Tells what has been judged: up to the first case that was not, or with @all what lies behind as well. */
static void tell(struct verify *v, struct ctl_progress *progress, bool all)
{
	bool unbroken = true;

	(void)pthread_mutex_lock(&v->lock);
	for (int64_t i = v->told; i < v->begun; i++) {
		struct outcome *outcome = &v->outcomes[i % AHEAD];

		unbroken = unbroken && outcome->kind != OUTCOME_NONE;
		if (!unbroken && !all)
			break;
		v->told += unbroken;
		v->n_judged[outcome->kind]++;
		if (outcome->kind != OUTCOME_NONE && outcome->text[0]) {
			ctl_progress_end(progress);
			(void)fputs(outcome->text, v->failures ? stderr : stdout);
			(void)fflush(stdout);
		}
		if (outcome->kind == OUTCOME_FAILED && v->failures)
			cJSON_AddItemToArray(v->failures, cJSON_CreateNumber((double)i));
		free(outcome->text);
		*outcome = (struct outcome){0};
	}
	(void)pthread_cond_broadcast(&v->room);
	(void)pthread_mutex_unlock(&v->lock);
}

static uint64_t count_judged(const struct verify *v)
{
	return v->n_judged[OUTCOME_OK] + v->n_judged[OUTCOME_UNSUPPORTED] +
	       v->n_judged[OUTCOME_FAILED];
}

/* Those that would end us: what is ignored, as by nohup, stays ignored. */
static void add_stops(sigset_t *stops)
{
	static const int signals[] = {SIGINT, SIGTERM, SIGHUP};

	(void)sigemptyset(stops);
	for (size_t i = 0; i < sizeof(signals) / sizeof(signals[0]); i++) {
		struct sigaction present;

		if (sigaction(signals[i], NULL, &present) == 0 && present.sa_handler != SIG_IGN)
			(void)sigaddset(stops, signals[i]);
	}
}

/* Return: 0 when all were judged or nobody answers, or the signal that says to stop. */
static int tell_until_ended(struct verify *v, int signal_fd)
{
	struct ctl_progress progress = {.shows_time_left = true};
	struct pollfd fds[] = {{.fd = signal_fd, .events = POLLIN},
			       {.fd = v->changed_fd, .events = POLLIN}};
	struct signalfd_siginfo said = {0};
	bool ended = false;
	uint64_t count;

	while (!ended && said.ssi_signo == 0) {
		char title[64];

		if (poll(fds, 2, -1) < 0)
			continue; /* EINTR: nothing of fds was written */
		if (fds[0].revents & POLLIN)
			(void)!read(signal_fd, &said, sizeof(said));
		if (fds[1].revents & POLLIN)
			(void)!read(v->changed_fd, &count, sizeof(count));
		(void)pthread_mutex_lock(&v->lock);
		ended = v->ended;
		(void)pthread_mutex_unlock(&v->lock);
		tell(v, &progress, ended || said.ssi_signo);
		ended = ended || v->told == v->end;
		(void)snprintf(title, sizeof(title), "cases, %" PRIu64 " failed",
			       v->n_judged[OUTCOME_FAILED]);
		progress.title = title;
		ctl_progress(&progress, count_judged(v), (uint64_t)(v->end - v->first));
	}
	ctl_progress_end(&progress);
	return (int)said.ssi_signo;
}

/* The cases that were not judged, and how to go on with them. */
static void print_rest(const struct verify *v)
{
	(void)printf("to go on: fmhactl verify --seed %" PRIu64 " --from %" PRId64
		     " --cases %" PRId64 " --jobs %" PRId64,
		     v->seed, v->told, v->end - v->told, v->jobs);
	if (v->feature_words)
		(void)printf(" --features '%s'", v->feature_words);
	if (v->features & VERIFY_LONG)
		(void)printf(" --long");
	if (v->local)
		(void)printf(" --local");
	if (v->target.socket)
		(void)printf(" --socket '%s'", v->target.socket);
	if (v->target.device != FMHA_ANY_DEVICE)
		(void)printf(" --device %" PRIu32, v->target.device);
	if (v->target.timeout_ms)
		(void)printf(" --timeout %g", v->target.timeout_ms / 1000.0);
	(void)putchar('\n');
}

static int print_json(struct verify *v, uint64_t left)
{
	cJSON *object = cJSON_CreateObject();

	cJSON_AddNumberToObject(object, "seed", (double)v->seed);
	cJSON_AddNumberToObject(object, "from", (double)v->first);
	cJSON_AddNumberToObject(object, "cases", (double)(v->end - v->first));
	cJSON_AddNumberToObject(object, "ok", (double)v->n_judged[OUTCOME_OK]);
	cJSON_AddNumberToObject(object, "not_supported", (double)v->n_judged[OUTCOME_UNSUPPORTED]);
	cJSON_AddNumberToObject(object, "failed", (double)v->n_judged[OUTCOME_FAILED]);
	cJSON_AddNumberToObject(object, "not_judged", (double)left);
	cJSON_AddItemToObject(object, "failures", v->failures);
	v->failures = NULL;
	if (left > 0) /* to go on with --from */
		cJSON_AddNumberToObject(object, "next", (double)v->told);
	return ctl_print_json(object);
}

static void print_text(const struct verify *v, uint64_t left)
{
	(void)printf("seed %" PRIu64 ": %" PRIu64 " ok, %" PRIu64 " not supported, %" PRIu64
		     " failed",
		     v->seed, v->n_judged[OUTCOME_OK], v->n_judged[OUTCOME_UNSUPPORTED],
		     v->n_judged[OUTCOME_FAILED]);
	if (left > 0)
		(void)printf(", %" PRIu64 " not judged", left);
	(void)putchar('\n');
	if (left > 0)
		print_rest(v);
	(void)fflush(stdout);
}

static int conclude(struct verify *v)
{
	uint64_t left = (uint64_t)(v->end - v->first) - count_judged(v);
	int r = CTL_OK;

	if (v->failures)
		r = print_json(v, left);
	else
		print_text(v, left);
	if (r != CTL_OK)
		return r;
	if (v->lost.code)
		return ctl_error(&v->lost);
	if (v->n_judged[OUTCOME_UNSUPPORTED] == count_judged(v) && left == 0) {
		(void)fprintf(stderr, "fmhactl: nothing was verified; one of the answers: %s\n",
			      v->refusal.msg);
		return CTL_FAILED;
	}
	return v->n_judged[OUTCOME_FAILED] > 0 ? CTL_FAILED : CTL_OK;
}

static int verify_all(struct verify *v)
{
	pthread_t threads[MOST_JOBS];
	sigset_t stops, before;
	int n = 0, signal_fd, said, r;

	add_stops(&stops);
	(void)pthread_sigmask(SIG_BLOCK, &stops, &before);
	signal_fd = signalfd(-1, &stops, SFD_CLOEXEC);
	v->changed_fd = eventfd(0, EFD_CLOEXEC);
	while (n < v->jobs && n < v->end - v->first && signal_fd >= 0 && v->changed_fd >= 0 &&
	       pthread_create(&threads[n], NULL, verify_some, v) == 0)
		n++;
	if (n == 0)
		return ctl_usage_error("verify: no thread: %s", strerror(errno));
	said = tell_until_ended(v, signal_fd);
	r = conclude(v);
	if (said) {
		/* What is on its way may take as long as a compile: it ends with the process, as the signal would
		 * have ended it. */
		(void)pthread_sigmask(SIG_SETMASK, &before, NULL);
		(void)raise(said);
	}
	while (n > 0)
		(void)pthread_join(threads[--n], NULL);
	for (int i = 0; i < AHEAD; i++)
		free(v->outcomes[i].text);
	(void)close(signal_fd);
	(void)close(v->changed_fd);
	return r;
}

static int64_t default_jobs(void)
{
	long cores = sysconf(_SC_NPROCESSORS_ONLN);

	return cores < 1 ? 1 : cores < DEFAULT_JOBS ? cores : DEFAULT_JOBS;
}

static int verify(int argc, char **argv)
{
	struct verify v = {.target = CTL_TARGET_INIT,
			   .jobs = default_jobs(),
			   .features = VERIFY_ALL,
			   .cases = 200,
			   .only = -1,
			   .seed = 1,
			   .others = PTHREAD_RWLOCK_INITIALIZER,
			   .lock = PTHREAD_MUTEX_INITIALIZER,
			   .room = PTHREAD_COND_INITIALIZER};
	_cleanup_(ctl_client_freep) struct fmha_client *client = NULL;
	_cleanup_(ctl_device_freep) struct fmha_device *device = NULL;
	struct fmha_error err = {0};
	int r;

	/* One problem: `run` makes and judges it, by the same options. */
	if (argc > 1 && strcmp(argv[1], "backward") == 0)
		return ctl_run.run(argc, argv);
	r = verify_parse(&v, argc, argv);
	if (r == 0)
		r = ctl_open(&v.target, &client, &device);
	if (r != 0) {
		cJSON_Delete(v.failures);
		return r;
	}
	v.device = device;
	if (v.local)
		r = local_gpu_open(client, v.device, &v.gpu, &err);
	r = r == 0 ? verify_all(&v) : ctl_error(&err);
	v.gpu = local_gpu_free(v.gpu);
	return r;
}

const struct ctl_command ctl_verify = {
	.usage =
		{.name = "fmhactl verify",
		 .brief = "random problems against the double-precision reference",
		 .synopsis = "[--cases N] [--from N] [--seed S] [--features LIST] [OPTION...]\n"
			     "backward SHAPE --check-grad [--eps E]",
		 .text = "Makes random attention problems, computes them on a device and compares "
			 "every element with a reference in double precision. A case depends on "
			 "the seed, its number, the features and --long alone, so a failed one is "
			 "repeated with --only. What the device does not support is counted, and "
			 "is no failure "
			 "unless nothing else was left. Stopped by a signal, or without an answer "
			 "of the daemon's in "
			 "time, it says what was judged until then, and the command that goes on "
			 "from there. With --json the counts and the numbers of failed cases go to "
			 "stdout, what is said of them to stderr.\n\n"
			 "`verify backward SHAPE --check-grad` is `fmhactl run backward` with the "
			 "same "
			 "options: the gradients of one problem, by the reference and by moving "
			 "elements of Q, K and V.",
		 .tables = {own_options, ctl_json_option, ctl_target_options}},
	.run = verify,
};
