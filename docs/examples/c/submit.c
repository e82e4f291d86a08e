/* SPDX-License-Identifier: MIT */
/* Several runs under way at once, from one thread that waits in poll() and has other things to do. */
#include <fmha/fmha.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>

enum { ROWS = 128, HEADS = 4, HDIM = 64, N = ROWS * HEADS * HDIM, RUNS = 3 };

static void run(int r, const struct fmha_error *err)
{
	if (r == 0)
		return;
	fprintf(stderr, "%s, field '%s': %s\n", fmha_error_name(err->code), err->field, err->msg);
	exit(1);
}

int main(void)
{
	struct fmha_client *client;
	struct fmha_device *device;
	struct fmha_buffer *buffer;
	struct fmha_plan *plan;
	struct fmha_request *requests[RUNS];
	struct pollfd files[RUNS];
	struct fmha_problem p;
	struct fmha_error err;
	int n_left = RUNS, n_waits = 0, failed = 0;
	float *data;

	run(fmha_connect(NULL, &client, &err), &err);
	run(fmha_device_open(client, FMHA_ANY_DEVICE, &device, &err), &err);
	run(fmha_buffer_new(device, (3 + RUNS) * N * sizeof(float), &buffer, &err), &err);
	data = fmha_buffer_data(buffer);
	for (int i = 0; i < 3 * N; i++)
		data[i] = 1;
	fmha_problem_init(&p);
	p.batch = 1, p.seqlen_q = p.seqlen_k = ROWS, p.nhead_q = p.nhead_k = HEADS,
	p.hdim_q = p.hdim_v = HDIM;
	p.q.buffer = p.k.buffer = p.v.buffer = p.o.buffer = fmha_buffer_id(buffer);
	p.k.offset = N * sizeof(float), p.v.offset = 2 * p.k.offset, p.o.offset = 3 * p.k.offset;
	run(fmha_plan_new(device, &p, NULL, &plan, &err), &err);

	for (int i = 0; i < RUNS; i++) { /* one plan, each run with an O of its own */
		const struct fmha_rebind place = {.role = FMHA_T_O,
						  .buffer = fmha_buffer_id(buffer),
						  .offset = (uint64_t)(3 + i) * N * sizeof(float)};
		const struct fmha_run_options options = {
			.struct_size = sizeof(options), .n_rebinds = 1, .rebinds = &place};

		run(fmha_plan_submit(plan, &options, &requests[i], &err), &err);
		files[i].events = POLLIN;
		run(fmha_request_fd(requests[i], &files[i].fd, &err), &err);
	}
	while (n_left > 0 && poll(files, RUNS, 10000) > 0) {
		n_waits++;
		for (int i = 0; i < RUNS; i++) {
			int r = files[i].fd >= 0 ? fmha_request_wait(requests[i], 0, NULL, &err)
						 : FMHA_ETIMEDOUT;

			if (r == FMHA_ETIMEDOUT)
				continue; /* not yet */
			run(r, &err);
			requests[i] = fmha_request_free(requests[i]);
			files[i].fd = -1;
			n_left--;
		}
	}
	for (int i = 3 * N; i < (3 + RUNS) * N; i++)
		failed |= data[i] < 0.999f || data[i] > 1.001f;
	printf("%d runs ended, poll() returned %d times\n", RUNS - n_left, n_waits);
	fmha_plan_free(plan);
	fmha_buffer_free(buffer);
	fmha_device_free(device);
	fmha_client_free(client);
	return failed || n_left;
}
