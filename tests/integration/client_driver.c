/* SPDX-License-Identifier: MIT */
/*
 * client_driver.c: libfmha_client against a running daemon, driven by test_client.py.
 *
 *   client_driver cycles N     connect, run, disconnect, N times; what is left afterwards
 *   client_driver threads T N  T threads share a client, N calls each; results must not differ
 *   client_driver restart N    N times: run, print "ran", wait for a line, meanwhile something dies
 *   client_driver flight       submit slow runs, print "flying", report how each one ended
 *
 * Prints "name value" lines; exits with 1 and a sentence when something is wrong.
 */
#include <dirent.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <fmha/fmha.h>

enum { SEQ = 64, HEADS = 4, KV_HEADS = 2, DIM = 32 };

static void die(const char *what, const struct fmha_error *err)
{
	(void)fprintf(stderr, "%s: %s %s\n", what, fmha_error_name(err->code), err->msg);
	exit(1);
}

static int count_fds(void)
{
	DIR *directory = opendir("/proc/self/fd");
	int n = 0;

	while (directory && readdir(directory))
		n++;
	(void)closedir(directory);
	return n;
}

static int count_maps(void)
{
	FILE *file = fopen("/proc/self/maps", "re");
	int c, n = 0;

	while (file && (c = fgetc(file)) != EOF)
		n += c == '\n';
	(void)fclose(file);
	return n;
}

/* The same everywhere, so that results can be compared. */
static void fill(float *values, size_t n, uint32_t seed)
{
	for (size_t i = 0; i < n; i++) {
		seed = seed * 1664525 + 1013904223;
		values[i] = (float)(seed >> 8) * 0x1p-23f - 1;
	}
}

struct tensors {
	float q[SEQ * HEADS * DIM], k[SEQ * KV_HEADS * DIM], v[SEQ * KV_HEADS * DIM];
	float o[SEQ * HEADS * DIM];
};

static void describe(struct fmha_problem *p)
{
	fmha_problem_init(p);
	p->batch = 1;
	p->nhead_q = HEADS;
	p->nhead_k = KV_HEADS;
	p->seqlen_q = p->seqlen_k = SEQ;
	p->hdim_q = p->hdim_v = DIM;
	p->mask = FMHA_MASK_TOP_LEFT;
	p->window_right = 0;
}

static void use_memory(struct fmha_problem *p, struct tensors *t)
{
	fill(t->q, sizeof(t->q) / sizeof(float), 1);
	fill(t->k, sizeof(t->k) / sizeof(float), 2);
	fill(t->v, sizeof(t->v) / sizeof(float), 3);
	p->q.data = t->q;
	p->k.data = t->k;
	p->v.data = t->v;
	p->o.data = t->o;
}

static void use_buffer(struct fmha_problem *p, struct fmha_buffer *buffer)
{
	struct tensors *t = fmha_buffer_data(buffer);

	use_memory(p, t);
	p->q.data = p->k.data = p->v.data = p->o.data = NULL;
	p->q.buffer = p->k.buffer = p->v.buffer = p->o.buffer = fmha_buffer_id(buffer);
	p->q.offset = offsetof(struct tensors, q);
	p->k.offset = offsetof(struct tensors, k);
	p->v.offset = offsetof(struct tensors, v);
	p->o.offset = offsetof(struct tensors, o);
}

static void open_all(struct fmha_client **client, struct fmha_device **device)
{
	struct fmha_error err = {0};

	if (fmha_connect(NULL, client, &err) ||
	    fmha_device_open(*client, FMHA_ANY_DEVICE, device, &err))
		die("connect", &err);
}

/* ---- cycles ---- */

static void cycle(float *ret_o)
{
	struct fmha_client *client;
	struct fmha_device *device;
	struct fmha_buffer *buffer;
	struct fmha_problem p;
	struct fmha_error err = {0};

	open_all(&client, &device);
	if (fmha_buffer_new(device, sizeof(struct tensors), &buffer, &err))
		die("buffer", &err);
	describe(&p);
	use_buffer(&p, buffer);
	if (fmha_forward(device, &p, NULL, NULL, &err))
		die("forward", &err);
	memcpy(ret_o, ((struct tensors *)fmha_buffer_data(buffer))->o, sizeof(float) * 16);
	buffer = fmha_buffer_free(buffer);
	device = fmha_device_free(device);
	client = fmha_client_free(client);
}

static int cycles(int n)
{
	float first[16], o[16];
	int fds, maps;

	cycle(first); /* what the allocator keeps is not counted */
	fds = count_fds();
	maps = count_maps();
	for (int i = 0; i < n; i++) {
		cycle(o);
		if (memcmp(first, o, sizeof(o)) != 0) {
			(void)fprintf(stderr, "cycle %d: another result\n", i);
			return 1;
		}
	}
	(void)printf("fds %d\nmaps %d\n", count_fds() - fds, count_maps() - maps);
	return 0;
}

/* ---- threads ---- */

struct worker {
	struct fmha_device *device;
	struct fmha_plan *plan;
	const float *expected;
	int n, failures;
};

static void complain(struct worker *w, const char *call, const char *reason)
{
	(void)fprintf(stderr, "%s: %s\n", call, reason);
	w->failures++;
}

static void *work(void *arg)
{
	struct worker *w = arg;
	struct tensors *t = malloc(sizeof(*t));
	struct fmha_problem p;

	describe(&p);
	use_memory(&p, t);
	for (int i = 0; i < w->n; i++) {
		struct fmha_error err = {0};
		struct fmha_request *request;

		memset(t->o, 0, sizeof(t->o));
		if (fmha_forward(w->device, &p, NULL, NULL, &err))
			complain(w, "forward", err.msg);
		else if (memcmp(t->o, w->expected, sizeof(t->o)) != 0)
			complain(w, "forward", "another result");
		if (fmha_plan_submit(w->plan, NULL, &request, &err)) {
			complain(w, "submit", err.msg);
			continue;
		}
		if (fmha_request_wait(request, 20000, NULL, &err))
			complain(w, "wait", err.msg);
		request = fmha_request_free(request);
	}
	free(t);
	return NULL;
}

static int threads(int n_threads, int n_calls)
{
	struct worker *workers = calloc((size_t)n_threads, sizeof(*workers));
	pthread_t *ids = calloc((size_t)n_threads, sizeof(*ids));
	struct fmha_client *client;
	struct fmha_device *device;
	struct fmha_buffer *buffer;
	struct fmha_plan *plan;
	struct fmha_problem p;
	struct fmha_error err = {0};
	float expected[SEQ * HEADS * DIM]; /* the buffer's own is written again and again */
	int failures = 0;

	open_all(&client, &device);
	if (fmha_buffer_new(device, sizeof(struct tensors), &buffer, &err))
		die("buffer", &err);
	describe(&p);
	use_buffer(&p, buffer);
	if (fmha_plan_new(device, &p, NULL, &plan, &err) || fmha_plan_run(plan, NULL, NULL, &err))
		die("plan", &err);
	memcpy(expected, ((struct tensors *)fmha_buffer_data(buffer))->o, sizeof(expected));
	for (int i = 0; i < n_threads; i++) {
		workers[i] = (struct worker){device, plan, expected, n_calls, 0};
		if (pthread_create(&ids[i], NULL, work, &workers[i]) != 0)
			return 1;
	}
	for (int i = 0; i < n_threads; i++) {
		(void)pthread_join(ids[i], NULL);
		failures += workers[i].failures;
	}
	plan = fmha_plan_free(plan);
	buffer = fmha_buffer_free(buffer);
	device = fmha_device_free(device);
	client = fmha_client_free(client);
	free(workers);
	free(ids);
	(void)printf("failures %d\n", failures);
	return 0;
}

/* ---- restarts ---- */

static int restart(int n)
{
	struct fmha_client *client;
	struct fmha_device *device;
	struct fmha_buffer *buffer;
	struct fmha_plan *plan;
	struct fmha_problem p;
	struct fmha_error err = {0};
	struct tensors *memory;
	float first[16];
	uint64_t id;
	char line[16];

	open_all(&client, &device);
	if (fmha_buffer_new(device, sizeof(struct tensors), &buffer, &err))
		die("buffer", &err);
	id = fmha_buffer_id(buffer);
	memory = fmha_buffer_data(buffer);
	describe(&p);
	use_buffer(&p, buffer);
	if (fmha_plan_new(device, &p, NULL, &plan, &err))
		die("plan", &err);
	for (int i = 0; i <= n; i++) {
		memset(memory->o, 0, sizeof(memory->o));
		if (fmha_plan_run(plan, NULL, NULL, &err))
			die("run", &err);
		if (i == 0)
			memcpy(first, memory->o, sizeof(first));
		if (memcmp(first, memory->o, sizeof(first)) != 0 || fmha_buffer_id(buffer) != id ||
		    fmha_buffer_data(buffer) != (void *)memory) {
			(void)fprintf(stderr, "after restart %d: something is different\n", i);
			return 1;
		}
		(void)puts("ran");
		(void)fflush(stdout);
		if (i < n && !fgets(line, sizeof(line), stdin))
			return 1;
	}
	plan = fmha_plan_free(plan);
	buffer = fmha_buffer_free(buffer);
	device = fmha_device_free(device);
	client = fmha_client_free(client);
	return 0;
}

static int flight(void)
{
	enum { RUNS = 8, LONG = 2048 };
	struct fmha_client *client;
	struct fmha_device *device;
	struct fmha_buffer *buffer;
	struct fmha_plan *plan;
	struct fmha_problem p;
	struct fmha_error err = {0};
	struct fmha_request *requests[RUNS];
	size_t bytes = sizeof(float) * LONG * HEADS * 128;

	open_all(&client, &device);
	if (fmha_buffer_new(device, 4 * bytes, &buffer, &err))
		die("buffer", &err);
	describe(&p);
	p.seqlen_q = p.seqlen_k = LONG;
	p.hdim_q = p.hdim_v = 128;
	p.q.buffer = p.k.buffer = p.v.buffer = p.o.buffer = fmha_buffer_id(buffer);
	p.k.offset = bytes;
	p.v.offset = 2 * bytes;
	p.o.offset = 3 * bytes;
	if (fmha_plan_new(device, &p, NULL, &plan, &err))
		die("plan", &err);
	for (int i = 0; i < RUNS; i++) {
		if (fmha_plan_submit(plan, NULL, &requests[i], &err))
			die("submit", &err);
	}
	(void)puts("flying");
	(void)fflush(stdout);
	for (int i = 0; i < RUNS; i++) {
		int r = fmha_request_wait(requests[i], 20000, NULL, &err);

		(void)printf("%s\n", fmha_error_name(r));
		requests[i] = fmha_request_free(requests[i]);
	}
	/* One call that retries by itself brings everything back. */
	if (fmha_forward(device, &p, NULL, NULL, &err))
		die("afterwards", &err);
	(void)puts("recovered");
	plan = fmha_plan_free(plan);
	buffer = fmha_buffer_free(buffer);
	device = fmha_device_free(device);
	client = fmha_client_free(client);
	return 0;
}

int main(int argc, char **argv)
{
	const char *name = argc > 1 ? argv[1] : "";

	if (!strcmp(name, "cycles") && argc == 3)
		return cycles(atoi(argv[2]));
	if (!strcmp(name, "threads") && argc == 4)
		return threads(atoi(argv[2]), atoi(argv[3]));
	if (!strcmp(name, "restart") && argc == 3)
		return restart(atoi(argv[2]));
	if (!strcmp(name, "flight"))
		return flight();
	return 2;
}
