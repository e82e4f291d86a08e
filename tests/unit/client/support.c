/* SPDX-License-Identifier: MIT */
#include "support.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

int open_fds(void)
{
	DIR *directory = opendir("/proc/self/fd");
	int n = 0;

	while (readdir(directory))
		n++;
	closedir(directory);
	return n;
}

int mappings(void)
{
	FILE *file = fopen("/proc/self/maps", "r");
	int c, n = 0;

	while ((c = fgetc(file)) != EOF)
		n += c == '\n';
	fclose(file);
	return n;
}

double now_seconds(void)
{
	struct timespec now;

	(void)clock_gettime(CLOCK_MONOTONIC, &now);
	return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

int fixture_setup(void **state)
{
	struct fixture *f = calloc(1, sizeof(*f));

	f->fds_before = open_fds();
	f->server = fake_start();
	f->client = connect_with_timeout(f, 10000);
	assert_ok(fmha_device_open(f->client, 0, &f->device, &err));
	*state = f;
	return 0;
}

int fixture_teardown(void **state)
{
	struct fixture *f = *state;

	f->device = fmha_device_free(f->device);
	f->client = fmha_client_free(f->client);
	f->server = fake_stop(f->server);
	assert_int_equal(open_fds(), f->fds_before);
	free(f);
	return 0;
}

struct fmha_client *connect_with_timeout(const struct fixture *f, uint32_t timeout_ms)
{
	const struct fmha_client_options options = {.struct_size = sizeof(options),
						    .timeout_ms = timeout_ms,
						    .path = fake_path(f->server),
						    .name = "test"};
	struct fmha_client *client = NULL;

	assert_ok(fmha_connect(&options, &client, &err));
	return client;
}

void make_problem(struct fmha_problem *problem, int32_t seqlen, int32_t nhead, int32_t hdim)
{
	fmha_problem_init(problem);
	problem->batch = 1;
	problem->nhead_q = problem->nhead_k = nhead;
	problem->seqlen_q = problem->seqlen_k = seqlen;
	problem->hdim_q = problem->hdim_v = hdim;
}

size_t tensor_bytes(const struct fmha_problem *problem)
{
	return (size_t)problem->seqlen_q * (size_t)problem->nhead_q * (size_t)problem->hdim_q * 4;
}

void fill(void *data, size_t bytes, uint32_t seed)
{
	for (size_t i = 0; i < bytes; i += 4) {
		seed = seed * 1664525 + 1013904223;
		memcpy((uint8_t *)data + i, &seed, 4);
	}
}

struct fmha_buffer *make_tensors(struct fmha_device *device, struct fmha_problem *problem,
				 uint32_t seed)
{
	size_t bytes = tensor_bytes(problem);
	struct fmha_buffer *buffer = NULL;

	assert_ok(fmha_buffer_new(device, 4 * bytes, &buffer, &err));
	problem->q.buffer = problem->k.buffer = problem->v.buffer = problem->o.buffer =
		fmha_buffer_id(buffer);
	problem->k.offset = bytes;
	problem->v.offset = 2 * bytes;
	problem->o.offset = 3 * bytes;
	fill(fmha_buffer_data(buffer), bytes, seed);
	return buffer;
}

void check_tensors(const struct fmha_buffer *buffer, const struct fmha_problem *problem)
{
	uint8_t *data = fmha_buffer_data(buffer);
	size_t bytes = tensor_bytes(problem);

	assert_memory_equal(data, data + problem->o.offset, bytes);
	memset(data + problem->o.offset, 0, bytes);
}
