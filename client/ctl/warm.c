/* SPDX-License-Identifier: MIT */
/*
 * warm.c: kernels compiled before anybody waits for them, through the daemon and into its cache, from a
 * list of problems or a model's config.json. With --arch, for machines that are elsewhere, fmhad-build
 * compiles the kernels that dispatch would choose there.
 */
#include "warm.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cjson/cJSON.h>
#include <dispatch/plan_offline.h>
#include <fmha/fmha_local.h>
#include <proto/problem.h>

#include "ctl.h"
#include "problem.h"
#include "json.h"

#define MOST_WORDS   64
#define MOST_THREADS 32
#define TIMEOUT_MS   600000

static int add_file(struct warm_list *list, const char *path)
{
	bool is_stdin = strcmp(path, "-") == 0;
	FILE *file = is_stdin ? stdin : fopen(path, "r");
	char line[4096];
	int r = 0;

	if (!file)
		return ctl_file_error(path);
	while (r == 0 && fgets(line, sizeof(line), file)) {
		line[strcspn(line, "#\r\n")] = '\0';
		if (line[strspn(line, " \t")])
			r = warm_add(list, "%s", line);
	}
	if (!is_stdin)
		(void)fclose(file);
	return r;
}

/* Return: 0 or CTL_USAGE. */
static int read_line(const char *line, struct fmha_problem *ret_problem)
{
	char copy[WARM_LINE], title[] = "fmhactl warm", *words[MOST_WORDS + 1] = {title},
			      *rest = copy;
	int n = 1, r;

	(void)snprintf(copy, sizeof(copy), "%s", line);
	for (char *word; n < MOST_WORDS && (word = strtok_r(rest, " \t", &rest));)
		words[n++] = word;
	r = plan_read_problem(n, words, ret_problem);
	if (r != 0)
		(void)fprintf(stderr, "fmhactl: in the line '%s'\n", line);
	return r;
}

struct request {
	struct ctl_target target;
	struct warm_list list;
	const char *arch, *pack; /* NULL: the daemon's; only warm */
	bool print;
};

enum { OPTION_LIST = 1, OPTION_MODEL };

static const struct cli_option own_options[] = {
	{"list", OPTION_LIST, "FILE",
	 "problems, a line each: the words of `fmhactl plan`; # begins a comment; - is stdin",
	 CLI_OWN},
	{"model", OPTION_MODEL, "FILE", "a model's Hugging Face config.json", CLI_OWN},
	{"print", 0, NULL, "print the problems as such a list, compile nothing",
	 CLI_TO(FLAG, struct request, print)},
	{"pack", 0, "FILE",
	 "write the plans and their code to a file, for processes without a daemon",
	 CLI_TO(TEXT, struct request, pack)},
	{"arch", 0, "ARCH",
	 "print which kernels `fmhactl build --arch ARCH --kernel ...` is to compile, no daemon",
	 CLI_TO(TEXT, struct request, arch)},
	CLI_END};

/* ---- through the daemon ---- */

struct work {
	const struct warm_list *list;
	struct fmha_problem *problems;
	struct fmha_device *device;
	struct fmha_local_options options;
	bool json;
	atomic_size_t next, n_done;
	atomic_int n_failed;
	pthread_mutex_t lock; /* of what follows, and stderr */
	struct ctl_progress progress;
	char failure[sizeof(((struct fmha_error *)NULL)->msg)]; /* told last */
	size_t n_same;                                          /* that failed by it, too */
};

static void tell_same(struct work *work)
{
	if (work->n_same > 0)
		(void)fprintf(stderr, "fmhactl: the same for %zu more\n", work->n_same);
	work->n_same = 0;
}

/* A device that compiles nothing fails all problems alike: that is one line, not one for each. */
static void tell_failure(struct work *work, const char *line, const struct fmha_error *err)
{
	atomic_fetch_add(&work->n_failed, 1);
	if (!strcmp(err->msg, work->failure)) {
		work->n_same++;
		return;
	}
	ctl_progress_end(&work->progress);
	tell_same(work);
	(void)fprintf(stderr, "fmhactl: %s: %s\n", line, err->msg);
	(void)snprintf(work->failure, sizeof(work->failure), "%s", err->msg);
}

static void *warm_some(void *argument)
{
	struct work *work = argument;
	size_t i;

	while ((i = atomic_fetch_add(&work->next, 1)) < work->list->n) {
		struct fmha_error err = {0};
		int r = fmha_local_warm(work->device, &work->problems[i], &work->options, &err);

		(void)pthread_mutex_lock(&work->lock);
		if (r < 0)
			tell_failure(work, work->list->lines[i], &err);
		ctl_progress(&work->progress, atomic_fetch_add(&work->n_done, 1) + 1,
			     work->list->n);
		(void)pthread_mutex_unlock(&work->lock);
	}
	return NULL;
}

/* Buffers that `plan` invents become addresses, which is what local plans take. */
static void place(struct fmha_problem *problem)
{
	for (uint32_t role = 0; role < FMHA_N_TENSORS; role++) {
		struct fmha_tensor *tensor = &problem->tensor[role];

		if (tensor->buffer)
			tensor->data =
				(void *)(uintptr_t)4096; // NOLINT: aligned, and never followed
		tensor->buffer = 0;
	}
}

static void print_outcome(struct work *work, double seconds)
{
	int n_failed = atomic_load(&work->n_failed);

	if (work->json) {
		cJSON *root = cJSON_CreateObject();

		cJSON_AddNumberToObject(root, "problems", (double)work->list->n);
		cJSON_AddNumberToObject(root, "failed", n_failed);
		cJSON_AddNumberToObject(root, "seconds", seconds);
		(void)ctl_print_json(root);
		return;
	}
	(void)printf("%zu problems, %d failed, %.1f s\n", work->list->n, n_failed, seconds);
}

static int warm_all(struct work *work)
{
	pthread_t threads[MOST_THREADS];
	int n = 0, n_threads = work->list->n < MOST_THREADS ? (int)work->list->n : MOST_THREADS;
	int64_t start = ctl_now_ns();

	for (size_t i = 0; i < work->list->n; i++)
		place(&work->problems[i]);
	(void)pthread_mutex_init(&work->lock, NULL);
	while (n < n_threads && pthread_create(&threads[n], NULL, warm_some, work) == 0)
		n++;
	if (n == 0)
		(void)warm_some(work);
	while (n > 0)
		(void)pthread_join(threads[--n], NULL);
	ctl_progress_end(&work->progress);
	tell_same(work);
	(void)pthread_mutex_destroy(&work->lock);
	print_outcome(work, (double)(ctl_now_ns() - start) * 1e-9);
	return atomic_load(&work->n_failed) ? CTL_FAILED : CTL_OK;
}

static int by_daemon(const struct request *request, struct fmha_problem *problems)
{
	const struct ctl_target *target = &request->target;
	const struct warm_list *list = &request->list;
	const char *pack = request->pack;
	struct fmha_error err = {0};
	struct work work = {.list = list,
			    .problems = problems,
			    .json = request->target.json,
			    .progress = {.title = "warm"}};
	_cleanup_(ctl_client_freep) struct fmha_client *client = NULL;
	_cleanup_(ctl_device_freep) struct fmha_device *device = NULL;
	int r = ctl_open(target, &client, &device);

	if (r != 0)
		return r;
	work.device = device;
	work.options = (struct fmha_local_options){
		.struct_size = sizeof(work.options),
		.timeout_ms = target->timeout_ms ? target->timeout_ms : TIMEOUT_MS};
	r = warm_all(&work);
	if (r == CTL_OK && pack &&
	    fmha_local_pack_write(work.device, problems, list->n, &work.options, pack, &err) < 0)
		r = ctl_error(&err);
	return r;
}

/* ---- for an arch that is elsewhere ---- */

static void add_kernels(const char *json, cJSON *seen)
{
	cJSON *root = cJSON_Parse(json);
	const cJSON *plan = ctl_member(root, "plan"), *stage;

	cJSON_ArrayForEach(stage, ctl_member(plan, "stages"))
	{
		const cJSON *name = ctl_member(stage, "kernel");

		if (!cJSON_IsString(name) || ctl_member(seen, name->valuestring))
			continue;
		(void)cJSON_AddTrueToObject(seen, name->valuestring);
	}
	cJSON_Delete(root);
}

static void print_kernels(const cJSON *seen, bool json)
{
	cJSON *names = cJSON_CreateArray();
	const cJSON *kernel;

	cJSON_ArrayForEach(kernel, seen)
	{
		if (json)
			cJSON_AddItemToArray(names, cJSON_CreateString(kernel->string));
		else
			(void)puts(kernel->string);
	}
	if (json)
		(void)ctl_print_json(names);
	else
		cJSON_Delete(names);
}

static int by_arch(const struct request *request, struct fmha_problem *problems)
{
	const struct plan_offline_options device = {.arch = request->arch};
	const struct warm_list *list = &request->list;
	cJSON *seen = cJSON_CreateObject();
	int r = CTL_OK;

	for (size_t i = 0; i < list->n; i++) {
		struct fmha_error err = {0};
		char *json = NULL;

		if (problem_check(&problems[i], &err) < 0 ||
		    plan_explain_offline(&device, &problems[i], &json, &err) < 0) {
			(void)fprintf(stderr, "fmhactl: %s: %s\n", list->lines[i], err.msg);
			r = CTL_FAILED;
			continue;
		}
		add_kernels(json, seen);
		free(json);
	}
	print_kernels(seen, request->target.json);
	cJSON_Delete(seen);
	return r;
}

/* ---- the command ---- */

static int take_own(void *owner, int option, const char *value)
{
	struct request *request = owner;

	return option == OPTION_LIST ? add_file(&request->list, value)
				     : warm_add_model(&request->list, value);
}

static int warm_parse(struct request *request, int argc, char **argv)
{
	int r = ctl_options(&ctl_warm, argc, argv, &request->target, take_own, request);

	if (r == 0 && request->pack && (request->arch || request->print))
		return ctl_usage_error("warm: --pack is the daemon's, without --arch and --print");
	if (r == 0 && request->list.n == 0)
		return ctl_usage_error("warm: --list or --model says what");
	return r;
}

static int run_request(const struct request *request)
{
	const struct warm_list *list = &request->list;
	struct fmha_problem *problems = calloc(list->n + 1, sizeof(*problems));
	int r = problems ? 0 : ctl_usage_error("warm: out of memory");

	for (size_t i = 0; i < list->n && r == 0; i++)
		r = read_line(list->lines[i], &problems[i]);
	for (size_t i = 0; i < list->n && r == 0 && request->print; i++)
		(void)puts(list->lines[i]);
	if (r == 0 && !request->print)
		r = request->arch ? by_arch(request, problems) : by_daemon(request, problems);
	free(problems);
	return r;
}

static int warm(int argc, char **argv)
{
	struct request request = {.target = CTL_TARGET_INIT};
	int r = warm_parse(&request, argc, argv);

	if (r == 0)
		r = run_request(&request);
	free(request.list.lines);
	return r;
}

const struct ctl_command ctl_warm = {
	.usage =
		{.name = "fmhactl warm",
		 .brief = "compiles kernels before anybody waits for them",
		 .synopsis = "--model FILE | --list FILE [OPTION...]",
		 .text = "Has the daemon compile what problems, or a model's serving, will ask "
			 "for, "
			 "all cores at once: its cache has them from then on, for every process of "
			 "the machine. May be run again at any time; what is there is not compiled "
			 "anew.",
		 .tables = {own_options, ctl_json_option, ctl_target_options}},
	.run = warm,
};
