/* SPDX-License-Identifier: MIT */
/*
 * What a call costs beyond its kernel, as ratios to the bare sockets of the same machine in the
 * same run: round trips against a ping-pong between two processes, pipelining against an epoll
 * echo.
 *
 *   bench_rpc [--device N] SOCKET        a running fmhad; default: its first device that works
 *
 * On a GPU, where a launch takes longer than the messages, a run is compared with a launch in this
 * process. What a program pays once, importing memory and its first call, is shown as it is.
 *
 * Baselines and measurements take turns, round after round, and each figure is the best of its
 * rounds: on a shared machine noise only ever adds.
 */
#include <errno.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <fmha/fmha.h>
#include <proto/message.h>

#include "bench_rpc_own.h"

#define N_ROUNDS   7
#define N_IMPORTS  15
#define N_PROGRAMS 9
#define N_TRIPS    2000
#define N_PIPELINE 100000
#define IN_FLIGHT  64
#define PATIENCE_S 10 /* with a peer that owes an answer */

static void die(const char *what, const struct fmha_error *err)
{
	(void)fprintf(stderr, "bench_rpc: %s: %s\n", what, err ? err->msg : strerror(errno));
	exit(1);
}

static double now_us(void)
{
	struct timespec ts;

	(void)clock_gettime(CLOCK_MONOTONIC, &ts);
	return (double)ts.tv_sec * 1e6 + (double)ts.tv_nsec / 1e3;
}

static int compare_doubles(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

static double median(double *values, size_t n)
{
	qsort(values, n, sizeof(*values), compare_doubles);
	return values[n / 2];
}

static void read_full(int fd, void *data, size_t n)
{
	for (size_t done = 0; done < n;) {
		ssize_t r = read(fd, (char *)data + done, n - done);

		if (r <= 0)
			_exit(0);
		done += (size_t)r;
	}
}

/* ---- the bare sockets ---- */

struct echo {
	int fd;
	pid_t pid;
	size_t request_bytes, answer_bytes;
};

/* A child that answers every @request_bytes with @answer_bytes, one blocking read and write each.
 */
static struct echo echo_start(size_t request_bytes, size_t answer_bytes)
{
	struct echo echo = {.request_bytes = request_bytes, .answer_bytes = answer_bytes};
	char buffer[4096] = {0};
	int pair[2];

	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) < 0)
		die("socketpair", NULL);
	echo.pid = fork();
	if (echo.pid == 0) {
		(void)prctl(PR_SET_PDEATHSIG, SIGKILL);
		(void)close(pair[0]);
		for (;;) {
			read_full(pair[1], buffer, request_bytes);
			if (write(pair[1], buffer, answer_bytes) != (ssize_t)answer_bytes)
				_exit(0);
		}
	}
	(void)close(pair[1]);
	echo.fd = pair[0];
	return echo;
}

/* The same with epoll, as a server of many clients has to: wait, read what is there, write it back.
 */
static struct echo epoll_echo_start(void)
{
	struct epoll_event event = {.events = EPOLLIN};
	struct echo echo = {0};
	char buffer[65536];
	int pair[2], loop;

	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) < 0)
		die("socketpair", NULL);
	echo.pid = fork();
	if (echo.pid == 0) {
		(void)prctl(PR_SET_PDEATHSIG, SIGKILL);
		(void)close(pair[0]);
		loop = epoll_create1(0);
		(void)epoll_ctl(loop, EPOLL_CTL_ADD, pair[1], &event);
		for (;;) {
			ssize_t n;

			(void)epoll_wait(loop, &event, 1, -1);
			n = read(pair[1], buffer, sizeof(buffer));
			if (n == 0 || (n > 0 && write(pair[1], buffer, (size_t)n) != n))
				_exit(0);
		}
	}
	(void)close(pair[1]);
	echo.fd = pair[0];
	return echo;
}

static void echo_stop(struct echo *echo)
{
	/* Another child may hold a copy of this end: closing ours is not enough. */
	(void)shutdown(echo->fd, SHUT_RDWR);
	(void)close(echo->fd);
	(void)waitpid(echo->pid, NULL, 0);
}

static double ping_pong(const struct echo *echo)
{
	static double times[N_TRIPS];
	char buffer[4096] = {0};

	for (int i = 0; i < N_TRIPS; i++) {
		double start = now_us();

		if (write(echo->fd, buffer, echo->request_bytes) != (ssize_t)echo->request_bytes)
			die("write", NULL);
		read_full(echo->fd, buffer, echo->answer_bytes);
		times[i] = now_us() - start;
	}
	return median(times, N_TRIPS);
}

/*
 * Messages per second with IN_FLIGHT requests outstanding on a non-blocking socket. @window is
 * IN_FLIGHT requests back to back; answers are counted by bytes.
 */
static double pipeline(int fd, const uint8_t *window, size_t request_bytes, size_t answer_bytes)
{
	struct epoll_event event = {.events = EPOLLIN};
	int loop = epoll_create1(EPOLL_CLOEXEC);
	uint64_t sent = 0, answered_bytes = 0;
	static char buffer[65536];
	double start;

	(void)epoll_ctl(loop, EPOLL_CTL_ADD, fd, &event);
	start = now_us();
	while (answered_bytes < (uint64_t)N_PIPELINE * answer_bytes) {
		uint64_t answered = answered_bytes / answer_bytes;
		uint64_t room = IN_FLIGHT - (sent - answered), left = N_PIPELINE - sent;
		uint64_t n = room < left ? room : left;
		ssize_t r;

		if (n > 0) {
			/* A few hundred bytes always fit an empty socket: a partial write is a
			 * fault. */
			if (send(fd, window, n * request_bytes, MSG_NOSIGNAL) !=
			    (ssize_t)(n * request_bytes))
				die("send", NULL);
			sent += n;
		}
		if (epoll_wait(loop, &event, 1, PATIENCE_S * 1000) == 0)
			die("the peer does not answer", NULL);
		r = read(fd, buffer, sizeof(buffer));
		if (r == 0 || (r < 0 && errno != EAGAIN))
			die("the peer hung up", NULL);
		if (r > 0)
			answered_bytes += (uint64_t)r;
	}
	(void)close(loop);
	return N_PIPELINE / (now_us() - start) * 1e6;
}

/* ---- the daemon ---- */

/* A connection of our own, since the client library has no pipelined ping: hello, then pings. */
static int raw_connect(const char *path, struct proto_buffer *ping, size_t *ret_answer_bytes)
{
	struct proto_hello_params hello = {.version = PROTO_VERSION, .client = "bench_rpc"};
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	struct proto_buffer frame = {0};
	struct proto_empty empty = {0};
	struct fmha_error err = {0};
	const struct timeval patience = {.tv_sec = PATIENCE_S};
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	char answer[4096];
	ssize_t n;

	(void)snprintf(address.sun_path, sizeof(address.sun_path), "%s", path);
	if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof(address)) < 0 ||
	    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience)) < 0)
		die(path, NULL);
	if (proto_encode_request(&frame, 1, PROTO_HELLO, &hello, &err) < 0 ||
	    proto_encode_request(ping, 7, PROTO_PING, &empty, &err) < 0)
		die("encode", &err);
	if (write(fd, frame.data, frame.size) != (ssize_t)frame.size ||
	    read(fd, answer, sizeof(answer)) <= 0)
		die("hello", NULL);
	proto_buffer_deinit(&frame);
	if (write(fd, ping->data, ping->size) != (ssize_t)ping->size)
		die("ping", NULL);
	n = read(fd, answer, sizeof(answer));
	if (n <= 0)
		die("ping", NULL);
	*ret_answer_bytes = (size_t)n;
	return fd;
}

static double client_ping(struct fmha_client *client, struct fmha_device *device)
{
	static double times[N_TRIPS];
	struct fmha_error err;

	for (int i = 0; i < N_TRIPS; i++) {
		double start = now_us();
		int r = device ? fmha_device_ping(device, &err) : fmha_client_ping(client, &err);

		if (r < 0)
			die("ping", &err);
		times[i] = now_us() - start;
	}
	return median(times, N_TRIPS);
}

/* batch 1, 2 heads, 16 rows and keys, hdim 64; the type that a device is made for. */
static void tiny_problem(const struct own_device *own, struct fmha_problem *ret_problem,
			 uint64_t *ret_tensor_bytes)
{
	bool gpu = own_device_is_gpu(own);

	fmha_problem_init(ret_problem);
	ret_problem->batch = 1;
	ret_problem->nhead_q = ret_problem->nhead_k = 2;
	ret_problem->seqlen_q = ret_problem->seqlen_k = 16;
	ret_problem->hdim_q = ret_problem->hdim_v = 64;
	ret_problem->q.dtype = ret_problem->k.dtype = gpu ? FMHA_BF16 : FMHA_F32;
	ret_problem->v.dtype = ret_problem->o.dtype = ret_problem->q.dtype;
	*ret_tensor_bytes = 2 * 16 * 64 * (gpu ? 2 : sizeof(float));
}

/* All four tensors in one buffer of the worker's, which starts as zeros: what they hold changes no
 * time as long as it is neither NaN nor denormal. */
static struct fmha_plan *tiny_plan(const struct own_device *own, struct fmha_device *device,
				   struct fmha_buffer **ret_buffer)
{
	struct fmha_problem problem;
	struct fmha_plan *plan = NULL;
	struct fmha_error err;
	uint64_t bytes;

	tiny_problem(own, &problem, &bytes);
	if (fmha_buffer_new(device, 4 * bytes, ret_buffer, &err) < 0)
		die("buffer", &err);
	struct fmha_tensor *const tensors[] = {&problem.q, &problem.k, &problem.v, &problem.o};
	for (uint64_t i = 0; i < 4; i++) {
		tensors[i]->buffer = fmha_buffer_id(*ret_buffer);
		tensors[i]->offset = i * bytes;
	}
	float *data = fmha_buffer_data(*ret_buffer);
	for (uint64_t i = 0; data && i < 3 * bytes / sizeof(float); i++)
		data[i] = (float)(i % 17) / 17 - 0.5f;
	if (fmha_plan_new(device, &problem, NULL, &plan, &err) < 0)
		die("plan", &err);
	return plan;
}

/* Client-observed time; less the kernel's own when @less_kernel. */
static double tiny_run(struct fmha_plan *plan, bool less_kernel)
{
	static double times[N_TRIPS];
	struct fmha_run_result result;
	struct fmha_error err;

	for (int i = 0; i < N_TRIPS; i++) {
		double start = now_us();

		if (fmha_plan_run(plan, NULL, &result, &err) < 0)
			die("run", &err);
		times[i] = now_us() - start - (less_kernel ? (double)result.kernel_ns / 1e3 : 0);
	}
	return median(times, N_TRIPS);
}

static double local_launch(struct own_device *own)
{
	static double times[N_TRIPS];

	for (int i = 0; i < N_TRIPS; i++) {
		double start = now_us();

		own_launch(own);
		times[i] = now_us() - start;
	}
	return median(times, N_TRIPS);
}

/* Each of an allocation that the daemon has not seen. */
static double import_buffer(struct own_device *own, struct fmha_device *device)
{
	double times[N_IMPORTS];
	struct fmha_error err;

	for (int i = 0; i < N_IMPORTS; i++) {
		struct fmha_buffer *buffer;
		struct fmha_memory memory;
		double start;

		own_memory(own, 1 << 20, &memory);
		start = now_us();
		if (fmha_buffer_import(device, &memory, &buffer, &err) < 0)
			die("import", &err);
		times[i] = now_us() - start;
		(void)fmha_buffer_free(buffer);
		if (memory.fd >= 0)
			(void)close(memory.fd);
	}
	return median(times, N_IMPORTS);
}

/* ---- a new program ---- */

/* The steps of a new program's first call, each from the end of the one before. */
enum step { CONNECT, OPEN, IMPORT_1, IMPORT_2, IMPORT_3, BUFFER, PLAN, RUN, N_STEPS };

static const char *const step_names[N_STEPS] = {
	"connect, hello", "open the device",        "import q", "import k",
	"import v",       "a buffer of fmhad's, o", "plan",     "run",
};

static void end_step(double steps[N_STEPS], enum step step, double *from)
{
	double now = now_us();

	steps[step] = now - *from;
	*from = now;
}

/* What this process does when it is started for that: prints how long each step to its first result
 * took. Its own driver is up and its tensors lie there, as in any program with tensors. */
static int first_call(const char *path, uint32_t index, const char *backend)
{
	struct fmha_client_options options = {.struct_size = sizeof(options), .path = path};
	struct fmha_buffer *buffers[4];
	struct fmha_memory memories[3];
	struct fmha_problem problem;
	struct fmha_client *client;
	struct fmha_device *device;
	struct own_device own;
	struct fmha_plan *plan;
	struct fmha_error err;
	double steps[N_STEPS], at;
	uint64_t bytes;

	own_device_open(&own, backend);
	tiny_problem(&own, &problem, &bytes);
	for (int i = 0; i < 3; i++)
		own_memory(&own, bytes, &memories[i]);
	at = now_us();
	if (fmha_connect(&options, &client, &err) < 0)
		die("connect", &err);
	end_step(steps, CONNECT, &at);
	if (fmha_device_open(client, index, &device, &err) < 0)
		die("open the device", &err);
	end_step(steps, OPEN, &at);
	for (int i = 0; i < 3; i++) {
		if (fmha_buffer_import(device, &memories[i], &buffers[i], &err) < 0)
			die("import", &err);
		end_step(steps, IMPORT_1 + (enum step)i, &at);
	}
	if (fmha_buffer_new(device, bytes, &buffers[3], &err) < 0)
		die("buffer", &err);
	end_step(steps, BUFFER, &at);
	problem.q.buffer = fmha_buffer_id(buffers[0]);
	problem.k.buffer = fmha_buffer_id(buffers[1]);
	problem.v.buffer = fmha_buffer_id(buffers[2]);
	problem.o.buffer = fmha_buffer_id(buffers[3]);
	if (fmha_plan_new(device, &problem, NULL, &plan, &err) < 0)
		die("plan", &err);
	end_step(steps, PLAN, &at);
	if (fmha_plan_run(plan, NULL, NULL, &err) < 0)
		die("run", &err);
	end_step(steps, RUN, &at);
	for (int i = 0; i < N_STEPS; i++)
		(void)printf("%.1f ", steps[i]);
	(void)printf("\n");
	return 0;
}

/* Medians of the steps and, returned, of their sum. */
static double new_program(const char *program, const char *path,
			  const struct fmha_device_info *info, double ret_steps[N_STEPS])
{
	double times[N_STEPS + 1][N_PROGRAMS] = {0};

	for (int i = 0; i < N_PROGRAMS; i++) {
		char command[1024];
		FILE *child;

		(void)snprintf(command, sizeof(command), "'%s' --first-call '%s' %u %s", program,
			       path, info->device, info->backend);
		child = popen(command, "r"); // NOLINT: our own words
		for (int j = 0; j < N_STEPS; j++) {
			if (!child || fscanf(child, "%lf", &times[j][i]) != 1)
				die("a new program", NULL);
			times[N_STEPS][i] += times[j][i];
		}
		if (pclose(child) != 0)
			die("a new program", NULL);
	}
	for (int j = 0; j < N_STEPS; j++)
		ret_steps[j] = median(times[j], N_PROGRAMS);
	return median(times[N_STEPS], N_PROGRAMS);
}

/* ---- the table ---- */

static void keep_best(double *best, double value, bool smaller)
{
	if (*best == 0 || (smaller ? value < *best : value > *best))
		*best = value;
}

static void row(const char *what, double measured, double bare, const char *unit, double ratio,
		const char *limit, bool good)
{
	(void)printf("%-44s %10.1f %10.1f %-6s %6.2f  %-8s %s\n", what, measured, bare, unit, ratio,
		     limit, good ? "ok" : "MISSED");
}

/* What has no baseline but a limit. */
static void row_once(const char *what, double measured, const char *unit, double limit)
{
	(void)printf("%-44s %10.1f %10s %-6s %6s  <= %-5.0f %s\n", what, measured, "", unit, "",
		     limit, measured <= limit ? "ok" : "MISSED");
}

struct figures {
	double raw, front, worker, tiny, launch, echo_rate, rate;
};

static void print_figures(const struct figures *f, bool gpu)
{
	const double bare_run = f->raw + f->launch;

	(void)printf("%-44s %10s %10s %-6s %6s  %-8s\n", "best of 7 rounds, medians of 2000",
		     "fmhad", "bare", "", "ratio", "wanted");
	row("ping, front", f->front, f->raw, "us", f->front / f->raw, "<= 1.3",
	    f->front / f->raw <= 1.3);
	row("ping, worker", f->worker, f->raw, "us", f->worker / f->raw, "<= 1.3",
	    f->worker / f->raw <= 1.3);
	if (gpu)
		row("tiny run, against ping-pong and launch", f->tiny, bare_run, "us",
		    f->tiny / bare_run, "<= 1.3", f->tiny / bare_run <= 1.3);
	else
		row("tiny run less its kernel", f->tiny, f->raw, "us", f->tiny / f->raw, "<= 1.5",
		    f->tiny / f->raw <= 1.5);
	row("pings, 64 in flight, against epoll echo", f->rate / 1e3, f->echo_rate / 1e3, "k/s",
	    f->rate / f->echo_rate, ">= 0.5", f->rate / f->echo_rate >= 0.5);
}

static const char usage[] = "usage: bench_rpc [--device N] SOCKET\n";

int main(int argc, char **argv)
{
	struct fmha_client_options options = {.struct_size = sizeof(options)};
	uint32_t index = FMHA_ANY_DEVICE;
	struct fmha_client *client = NULL;
	struct fmha_device *device = NULL;
	struct fmha_buffer *buffer = NULL;
	struct proto_buffer ping = {0};
	struct fmha_device_info info;
	struct own_device own;
	struct figures f = {0};
	struct fmha_error err;
	size_t answer_bytes = 0;
	struct echo bare, bare_epoll;
	struct fmha_plan *plan;
	uint8_t window[IN_FLIGHT * 64];
	double steps[N_STEPS];
	int fd;

	if (argc == 5 && strcmp(argv[1], "--first-call") == 0)
		return first_call(argv[2], (uint32_t)strtoul(argv[3], NULL, 10), argv[4]);
	if (argc == 4 && strcmp(argv[1], "--device") == 0)
		index = (uint32_t)strtoul(argv[2], NULL, 10);
	else if (argc != 2) {
		(void)fputs(usage, stderr);
		return 2;
	}
	options.path = argv[argc - 1];
	(void)signal(SIGPIPE, SIG_IGN);
	/* First of all: a device that does not work says why, and nothing is left waiting. */
	if (fmha_connect(&options, &client, &err) < 0 ||
	    fmha_device_open(client, index, &device, &err) < 0 ||
	    fmha_device_info(device, &info, &err) < 0)
		die("connect", &err);
	fd = raw_connect(options.path, &ping, &answer_bytes);
	if (ping.size > 64)
		die("a ping of more than 64 bytes", NULL);
	for (size_t i = 0; i < IN_FLIGHT; i++)
		memcpy(window + i * ping.size, ping.data, ping.size);
	bare = echo_start(ping.size, answer_bytes);
	bare_epoll = epoll_echo_start();
	own_device_open(&own, info.backend);
	plan = tiny_plan(&own, device, &buffer);

	for (int i = 0; i < N_ROUNDS; i++) {
		keep_best(&f.raw, ping_pong(&bare), true);
		keep_best(&f.front, client_ping(client, NULL), true);
		keep_best(&f.worker, client_ping(NULL, device), true);
		if (own_device_is_gpu(&own))
			keep_best(&f.launch, local_launch(&own), true);
		keep_best(&f.tiny, tiny_run(plan, !own_device_is_gpu(&own)), true);
		keep_best(&f.echo_rate, pipeline(bare_epoll.fd, window, ping.size, ping.size),
			  false);
		keep_best(&f.rate, pipeline(fd, window, ping.size, answer_bytes), false);
	}
	print_figures(&f, own_device_is_gpu(&own));
	row_once("importing a buffer", import_buffer(&own, device), "us", 300);
	row_once("first call of a new program", new_program(argv[0], options.path, &info, steps),
		 "us", 3000);
	for (int i = 0; i < N_STEPS; i++)
		(void)printf("    %-40s %10.1f %10s us\n", step_names[i], steps[i], "");

	(void)fmha_plan_free(plan);
	(void)fmha_buffer_free(buffer);
	(void)fmha_device_free(device);
	(void)fmha_client_free(client);
	(void)close(fd);
	echo_stop(&bare);
	echo_stop(&bare_epoll);
	proto_buffer_deinit(&ping);
	return 0;
}
