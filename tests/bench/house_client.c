/* SPDX-License-Identifier: MIT */
/*
 * house_client.c SOCKET: a client with a device and a buffer, ready to plan. Says "ready", plans once it is
 * told to by a line, says "planned", ends at the end of its stdin: house.py looks in between.
 */
#include <stdio.h>
#include <stdlib.h>

#include <fmha/fmha.h>

enum { ROWS = 1024, HEADS = 32, KV_HEADS = 8, HDIM = 128 };

static void check(int r, const char *what, const struct fmha_error *err)
{
	if (r >= 0)
		return;
	(void)fprintf(stderr, "%s: %s %s\n", what, fmha_error_name(err->code), err->msg);
	exit(1);
}

static void say(const char *word)
{
	(void)puts(word);
	(void)fflush(stdout);
	while (getchar() != '\n')
		if (feof(stdin))
			return;
}

int main(int argc, char **argv)
{
	const uint64_t bytes = (uint64_t)ROWS * HEADS * HDIM * 2;
	struct fmha_client_options options = {.struct_size = sizeof(options), .path = argv[1]};
	struct fmha_error err = {0};
	struct fmha_client *client;
	struct fmha_device *device;
	struct fmha_buffer *buffer;
	struct fmha_problem p;
	struct fmha_plan *plan;

	if (argc != 2)
		return 2;
	check(fmha_connect(&options, &client, &err), "connect", &err);
	check(fmha_device_open(client, 0, &device, &err), "device", &err);
	check(fmha_buffer_new(device, 4 * bytes, &buffer, &err), "buffer", &err);
	fmha_problem_init(&p);
	p.batch = 1, p.seqlen_q = p.seqlen_k = ROWS, p.hdim_q = p.hdim_v = HDIM;
	p.nhead_q = HEADS, p.nhead_k = KV_HEADS;
	p.mask = FMHA_MASK_TOP_LEFT, p.window_right = 0; /* causal */
	p.q.dtype = p.k.dtype = p.v.dtype = p.o.dtype = FMHA_BF16;
	p.q.buffer = p.k.buffer = p.v.buffer = p.o.buffer = fmha_buffer_id(buffer);
	p.k.offset = bytes, p.v.offset = 2 * bytes, p.o.offset = 3 * bytes;
	say("ready");
	check(fmha_plan_new(device, &p, NULL, &plan, &err), "plan", &err);
	say("planned");
	(void)fmha_plan_free(plan);
	(void)fmha_buffer_free(buffer);
	(void)fmha_device_free(device);
	(void)fmha_client_free(client);
	return 0;
}
