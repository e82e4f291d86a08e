/* SPDX-License-Identifier: MIT */
/*
 * What a user who calls now and then notices of another one who takes all it can get: p50 and p99
 * of tiny and medium runs, quiet and under each attack, side by side in one run.
 *
 *   bench_fair SOCKET [WORDS]   a running fmhad whose first device is the CPU; only attacks whose
 *                               names hold these words
 *
 * As root the attackers are somebody else (uid 65534, whom the socket must admit); otherwise all is
 * one user, and figures say only what sessions of one user do to each other.
 *
 * The bar: p99 at most three times the quiet one plus a tile batch, the time after which a thread
 * can turn to another request: one task of the attackers' large runs. The clients of an attack need
 * processor time, too; "spinning" shows what as many processes cost that never call fmhad.
 */
#include <errno.h>
#include <grp.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <fmha/fmha.h>

#define NOBODY       65534
#define MAX_SESSIONS 120
#define MAX_TIMES    200000
#define MEASURE_S    1.7
#define IN_FLIGHT    2  /* runs of each of an attacker's sessions */
#define TILE_ROWS    96 /* of a task, kernels/cpu/flash.c */

struct size {
	uint32_t heads, rows;
};

static const struct size TINY = {2, 16}, SMALL = {2, 128}, MEDIUM = {4, 512}, LARGE = {2, 2048};

static const char *socket_path;
static atomic_uint_fast64_t *n_attacks; /* calls that attackers have completed; shared */

static void die(const char *what, const struct fmha_error *err)
{
	(void)fprintf(stderr, "bench_fair: %s: %s\n", what, err ? err->msg : strerror(errno));
	exit(1);
}

static double now_s(void)
{
	struct timespec ts;

	(void)clock_gettime(CLOCK_MONOTONIC, &ts);
	return (double)ts.tv_sec + (double)ts.tv_nsec / 1e9;
}

/* ---- a client ---- */

static struct fmha_client *connect_client(void)
{
	struct fmha_client_options options = {.struct_size = sizeof(options), .path = socket_path};
	struct fmha_client *client;
	struct fmha_error err;

	if (fmha_connect(&options, &client, &err) < 0)
		die("connect", &err);
	return client;
}

struct session {
	struct fmha_device *device;
	struct fmha_buffer *buffer;
	struct fmha_problem problem;
	struct fmha_plan *plan;
	struct fmha_request *requests[IN_FLIGHT];
};

static void describe(const struct size *size, struct fmha_problem *ret_problem)
{
	fmha_problem_init(ret_problem);
	ret_problem->batch = 1;
	ret_problem->nhead_q = ret_problem->nhead_k = size->heads;
	ret_problem->seqlen_q = ret_problem->seqlen_k = size->rows;
	ret_problem->hdim_q = ret_problem->hdim_v = 64;
}

/* A connection to the device and a plan whose four tensors lie in one buffer. */
static void open_session(struct fmha_client *client, const struct size *size,
			 struct session *session)
{
	struct fmha_problem *problem = &session->problem;
	struct fmha_tensor *const tensors[] = {&problem->q, &problem->k, &problem->v, &problem->o};
	uint64_t n = (uint64_t)size->heads * size->rows * 64;
	struct fmha_error err;
	float *data;

	*session = (struct session){0};
	describe(size, problem);
	if (fmha_device_open(client, 0, &session->device, &err) < 0 ||
	    fmha_buffer_new(session->device, 4 * n * sizeof(float), &session->buffer, &err) < 0)
		die("open a device", &err);
	data = fmha_buffer_data(session->buffer);
	for (uint64_t i = 0; i < 3 * n; i++)
		data[i] = (float)(i % 17) / 17 - 0.5f;
	for (uint64_t i = 0; i < 4; i++) {
		tensors[i]->buffer = fmha_buffer_id(session->buffer);
		tensors[i]->offset = i * n * sizeof(float);
	}
	if (fmha_plan_new(session->device, problem, NULL, &session->plan, &err) < 0)
		die("plan", &err);
}

/* ---- attacks: each in a process of its own until it is killed ---- */

struct attack {
	const char *name;
	void (*run)(const struct attack *attack, int ready);
	int n_processes, n_sessions;
	const struct size *size;
};

static void be_nobody(void)
{
	if (geteuid() != 0)
		return;
	if (setgroups(0, NULL) < 0 || setgid(NOBODY) < 0 || setuid(NOBODY) < 0)
		die("become somebody else", NULL);
}

static void say_ready(int ready)
{
	if (write(ready, "", 1) != 1)
		die("ready", NULL);
}

static void submit(struct session *session, struct fmha_request **request)
{
	struct fmha_error err;

	if (fmha_plan_submit(session->plan, NULL, request, &err) < 0)
		die("submit", &err);
}

/* Every session always has IN_FLIGHT runs with the daemon. */
static void attack_with_runs(const struct attack *attack, int ready)
{
	static struct session sessions[MAX_SESSIONS];
	static struct pollfd fds[MAX_SESSIONS * IN_FLIGHT];
	struct fmha_client *client = connect_client();
	const int n = attack->n_sessions * IN_FLIGHT;
	struct fmha_error err;

	for (int i = 0; i < attack->n_sessions; i++)
		open_session(client, attack->size, &sessions[i]);
	for (int i = 0; i < n; i++)
		submit(&sessions[i / IN_FLIGHT], &sessions[i / IN_FLIGHT].requests[i % IN_FLIGHT]);
	say_ready(ready);
	for (;;) {
		for (int i = 0; i < n; i++) {
			fds[i].events = POLLIN;
			(void)fmha_request_fd(sessions[i / IN_FLIGHT].requests[i % IN_FLIGHT],
					      &fds[i].fd, NULL);
		}
		(void)poll(fds, (nfds_t)n, -1);
		for (int i = 0; i < n; i++) {
			struct session *session = &sessions[i / IN_FLIGHT];
			struct fmha_request **request = &session->requests[i % IN_FLIGHT];
			int r;

			if (!fds[i].revents)
				continue;
			r = fmha_request_wait(*request, 0, NULL, &err);
			if (r == FMHA_ETIMEDOUT)
				continue;
			if (r < 0)
				die("run", &err);
			atomic_fetch_add(n_attacks, 1);
			*request = fmha_request_free(*request);
			submit(session, request);
		}
	}
}

static void attack_with_pings(const struct attack *attack, int ready)
{
	struct fmha_client *client = connect_client();
	struct session session;
	struct fmha_error err;

	open_session(client, attack->size, &session);
	say_ready(ready);
	while (fmha_device_ping(session.device, &err) == 0)
		atomic_fetch_add(n_attacks, 1);
	die("ping", &err);
}

static void attack_with_plans(const struct attack *attack, int ready)
{
	struct fmha_client *client = connect_client();
	struct session session;
	struct fmha_plan *plan;
	struct fmha_error err;

	open_session(client, attack->size, &session);
	say_ready(ready);
	while (fmha_plan_new(session.device, &session.problem, NULL, &plan, &err) == 0) {
		(void)fmha_plan_free(plan);
		atomic_fetch_add(n_attacks, 1);
	}
	die("plan", &err);
}

static void attack_with_explains(const struct attack *attack, int ready)
{
	struct fmha_client *client = connect_client();
	struct session session;
	struct fmha_error err;
	char *json;

	open_session(client, attack->size, &session);
	say_ready(ready);
	while (fmha_explain(session.device, &session.problem, NULL, &json, &err) == 0) {
		free(json);
		atomic_fetch_add(n_attacks, 1);
	}
	die("explain", &err);
}

/* What is killed: a client with runs in flight. */
static void be_victim(const struct attack *attack, int ready)
{
	struct fmha_client *client = connect_client();
	struct session session;

	open_session(client, attack->size, &session);
	for (int i = 0; i < IN_FLIGHT; i++)
		submit(&session, &session.requests[i]);
	say_ready(ready);
	for (;;)
		(void)pause();
}

static void attack_by_dying(const struct attack *attack, int ready)
{
	int pair[2];
	char byte;

	if (pipe(pair) < 0)
		die("pipe", NULL);
	say_ready(ready);
	for (;;) {
		pid_t pid = fork();

		if (pid == 0) {
			(void)prctl(PR_SET_PDEATHSIG, SIGKILL);
			be_victim(attack, pair[1]);
		}
		if (pid < 0 || read(pair[0], &byte, 1) != 1)
			die("a client to be killed", NULL);
		(void)kill(pid, SIGKILL);
		(void)waitpid(pid, NULL, 0);
		atomic_fetch_add(n_attacks, 1);
	}
}

static void spin(const struct attack *attack, int ready)
{
	(void)attack;
	say_ready(ready);
	for (;;)
		atomic_fetch_add(n_attacks, 1);
}

static const struct attack attacks[] = {
	{"1 session, large runs", attack_with_runs, 1, 1, &LARGE},
	{"60 sessions, large runs", attack_with_runs, 1, 60, &LARGE},
	{"120 sessions, large runs", attack_with_runs, 1, 120, &LARGE},
	{"1 session, small runs", attack_with_runs, 1, 1, &SMALL},
	{"60 sessions, small runs", attack_with_runs, 1, 60, &SMALL},
	{"120 sessions, small runs", attack_with_runs, 1, 120, &SMALL},
	{"4 clients, pings", attack_with_pings, 4, 1, &TINY},
	{"4 clients, plans", attack_with_plans, 4, 1, &TINY},
	{"4 clients, explains", attack_with_explains, 4, 1, &TINY},
	{"clients killed in large runs", attack_by_dying, 1, 1, &LARGE},
	{"4 processes spinning, no fmhad", spin, 4, 0, NULL},
};

static void attack_start(const struct attack *attack, pid_t *pids)
{
	int ready[2];
	char byte;

	if (pipe(ready) < 0)
		die("pipe", NULL);
	for (int i = 0; i < attack->n_processes; i++) {
		pids[i] = fork();
		if (pids[i] == 0) {
			be_nobody();
			(void)prctl(PR_SET_PDEATHSIG, SIGKILL);
			attack->run(attack, ready[1]);
		}
		if (pids[i] < 0)
			die("fork", NULL);
	}
	(void)close(ready[1]);
	for (int i = 0; i < attack->n_processes; i++)
		if (read(ready[0], &byte, 1) != 1)
			die("an attacker did not start", NULL);
	(void)close(ready[0]);
}

static void attack_stop(const struct attack *attack, const pid_t *pids)
{
	const struct timespec settle = {.tv_nsec = 300000000};

	for (int i = 0; i < attack->n_processes; i++)
		(void)kill(pids[i], SIGKILL);
	for (int i = 0; i < attack->n_processes; i++)
		(void)waitpid(pids[i], NULL, 0);
	(void)nanosleep(&settle, NULL); /* fmhad puts its sessions away */
}

/* ---- the light user ---- */

struct figures {
	double p50_ms, p99_ms, attacks_s;
};

static int compare_doubles(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

/* One run after the other, with a pause of a millisecond between them. */
static struct figures measure(struct session *session)
{
	static double times[MAX_TIMES];
	const struct timespec pause = {.tv_nsec = 1000000};
	uint64_t before = atomic_load(n_attacks);
	double begin = now_s(), end = begin;
	struct fmha_error err;
	size_t n = 0;

	while (n < MAX_TIMES && (end - begin < MEASURE_S || n < 20)) {
		double start = now_s();

		if (fmha_plan_run(session->plan, NULL, NULL, &err) < 0)
			die("run", &err);
		end = now_s();
		times[n++] = (end - start) * 1e3;
		(void)nanosleep(&pause, NULL);
	}
	qsort(times, n, sizeof(times[0]), compare_doubles);
	return (struct figures){times[n / 2], times[n * 99 / 100],
				(double)(atomic_load(n_attacks) - before) / (end - begin)};
}

/* How long a task of a large run takes: see TILE_ROWS. */
static double tile_batch_ms(struct fmha_client *client)
{
	struct fmha_run_result result;
	struct fmha_device_info info;
	struct session session;
	struct fmha_error err;
	double best = 0;

	open_session(client, &LARGE, &session);
	if (fmha_device_info(session.device, &info, &err) < 0)
		die("device", &err);
	for (int i = 0; i < 10; i++) {
		if (fmha_plan_run(session.plan, NULL, &result, &err) < 0)
			die("run", &err);
		if (i == 0 || (double)result.kernel_ns / 1e6 < best)
			best = (double)result.kernel_ns / 1e6;
	}
	(void)fmha_plan_free(session.plan);
	(void)fmha_buffer_free(session.buffer);
	(void)fmha_device_free(session.device);
	return best * info.compute_units * TILE_ROWS / (double)(LARGE.heads * LARGE.rows);
}

static void print_half(const struct figures *f, const struct figures *quiet, double batch_ms)
{
	double limit = 3 * quiet->p99_ms + batch_ms;

	(void)printf(" %8.3f %6.1f %8.3f %6.1f %8.3f %-6s |", f->p50_ms, f->p50_ms / quiet->p50_ms,
		     f->p99_ms, f->p99_ms / quiet->p99_ms, limit,
		     f->p99_ms <= limit ? "ok" : "MISSED");
}

int main(int argc, char **argv)
{
	struct session tiny, medium;
	struct figures quiet[2];
	struct fmha_client *client;
	double batch_ms;

	if (argc < 2 || argc > 3) {
		(void)fputs("usage: bench_fair SOCKET [WORDS]\n", stderr);
		return 2;
	}
	socket_path = argv[1];
	n_attacks = mmap(NULL, sizeof(*n_attacks), PROT_READ | PROT_WRITE,
			 MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (n_attacks == MAP_FAILED)
		die("mmap", NULL);
	client = connect_client();
	batch_ms = tile_batch_ms(client);
	open_session(client, &TINY, &tiny);
	open_session(client, &MEDIUM, &medium);
	(void)measure(&medium);
	quiet[0] = measure(&tiny);
	quiet[1] = measure(&medium);

	(void)printf("a tile batch: %.3f ms; %s\n", batch_ms,
		     geteuid() == 0 ? "the attacker is another user" : "ONE USER ONLY: not root");
	(void)printf("%-31s|%-48s |%-48s |%9s\n", "", " tiny runs, ms and ratio to quiet",
		     " medium runs, ms and ratio to quiet", "attacker");
	(void)printf("%-31s|", "");
	for (int i = 0; i < 2; i++)
		(void)printf(" %8s %6s %8s %6s %8s %-6s |", "p50", "", "p99", "", "bar", "");
	(void)printf("%9s\n%-31s|", "calls/s", "quiet");
	for (int i = 0; i < 2; i++)
		print_half(&quiet[i], &quiet[i], batch_ms);
	(void)printf("\n");
	for (size_t i = 0; i < sizeof(attacks) / sizeof(attacks[0]); i++) {
		struct figures f[2];
		pid_t pids[8];

		if (argc == 3 && !strstr(attacks[i].name, argv[2]))
			continue;
		attack_start(&attacks[i], pids);
		f[0] = measure(&tiny);
		f[1] = measure(&medium);
		attack_stop(&attacks[i], pids);
		(void)printf("%-31s|", attacks[i].name);
		print_half(&f[0], &quiet[0], batch_ms);
		print_half(&f[1], &quiet[1], batch_ms);
		(void)printf("%9.1f\n", (f[0].attacks_s + f[1].attacks_s) / 2);
		(void)fflush(stdout);
	}
	return 0;
}
