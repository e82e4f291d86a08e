/* SPDX-License-Identifier: MIT */
#include "bench.h"

#include <stdlib.h>
#include <string.h>

#define COPY_HDIM 32 /* floats in a row of a copy: 2 rows are a step of the image's layout */

static void place(struct fmha_problem *p, uint32_t role, const struct fmha_buffer *buffer,
		  uint64_t offset)
{
	p->tensor[role].buffer = fmha_buffer_id(buffer);
	p->tensor[role].offset = offset;
	p->tensor[role].dtype = FMHA_F32;
}

/* An append_kv that copies @bytes as they are: without rope its kernel only moves. */
static int copy_plan(struct fmha_device *device, const struct fmha_buffer *from,
		     const struct fmha_buffer *to, uint64_t to_offset, uint64_t bytes,
		     struct fmha_plan **ret_plan, struct fmha_error *err)
{
	uint64_t half = bytes / 2;
	struct fmha_problem p;

	fmha_problem_init(&p);
	p.op = FMHA_APPEND_KV;
	p.batch = p.nhead_q = p.nhead_k = 1;
	p.hdim_q = p.hdim_v = COPY_HDIM;
	p.seqlen_k = p.seqlen_new = (int32_t)(half / (COPY_HDIM * sizeof(float)));
	place(&p, FMHA_T_K_NEW, from, 0);
	place(&p, FMHA_T_V_NEW, from, half);
	place(&p, FMHA_T_K, to, to_offset);
	place(&p, FMHA_T_V, to, to_offset + half);
	return fmha_plan_new(device, &p, NULL, ret_plan, err);
}

static int move(struct fmha_device *device, const struct fmha_buffer *from, struct fmha_buffer *to,
		uint64_t bytes, struct fmha_error *err)
{
	struct fmha_plan *plan;
	int r;

	if (from == to)
		return 0;
	if (fmha_buffer_data(from) && fmha_buffer_data(to)) {
		memcpy(fmha_buffer_data(to), fmha_buffer_data(from), bytes);
		return 0;
	}
	r = copy_plan(device, from, to, 0, bytes, &plan, err);
	if (r < 0)
		return r;
	r = fmha_plan_run(plan, NULL, NULL, err);
	plan = fmha_plan_free(plan);
	return r;
}

int bench_upload(struct bench_memory *memory, struct fmha_error *err)
{
	int r = 0;

	for (uint32_t i = 0; i < memory->n_copies && r == 0; i++)
		r = move(memory->device, memory->image.buffer, memory->copies[i],
			 memory->image.bytes, err);
	return r;
}

int bench_download(struct bench_memory *memory, struct fmha_error *err)
{
	return move(memory->device, memory->copies[0], memory->image.buffer, memory->image.bytes,
		    err);
}

/* How many copies of the image exceed what is to be rotated through. */
static uint32_t copies_wanted(const struct bench_memory *memory,
			      const struct bench_options *options)
{
	uint64_t most = (uint64_t)options->cache_mib << 20;
	uint64_t n = 1 + most / memory->image.bytes;

	if (options->cache != BENCH_ROTATE)
		return 1;
	return n < BENCH_MAX_COPIES ? (uint32_t)n : BENCH_MAX_COPIES;
}

static int make_copies(struct bench_memory *memory, uint32_t n, struct fmha_error *err)
{
	bool host_is_device = true;

	for (uint32_t i = 0; i < n; i++) {
		struct fmha_buffer *copy;
		int r = fmha_buffer_new(memory->device, memory->image.bytes, &copy, err);

		if (r < 0)
			return r;
		memory->copies[memory->n_copies++] = copy;
		host_is_device = fmha_buffer_data(copy) != NULL;
	}
	/* The image itself is as good as a copy where the device computes in it. */
	if (n == 1 && host_is_device) {
		(void)fmha_buffer_free(memory->copies[0]);
		memory->copies[0] = memory->image.buffer;
	}
	return 0;
}

static void note_rebinds(struct bench_memory *memory)
{
	for (uint32_t role = 0; role < FMHA_N_TENSORS; role++) {
		struct fmha_tensor *tensor = &memory->problem.tensor[role];

		if (!memory->image.present[role])
			continue;
		tensor->buffer = fmha_buffer_id(memory->copies[0]);
		if (memory->n_rebinds < FMHA_MAX_REBINDS)
			memory->rebinds[memory->n_rebinds] = (struct fmha_rebind){
				.role = role, .offset = tensor->offset};
		memory->n_rebinds++;
	}
}

int bench_memory_init(struct bench_memory *memory, struct fmha_device *device,
		      const struct recipe *recipe, const struct bench_options *options,
		      struct fmha_error *err)
{
	int r;

	*memory = (struct bench_memory){.device = device, .problem = recipe->problem};
	r = tensors_new(device, &memory->problem, &memory->image, err);
	if (r < 0)
		return r;
	recipe_fill(recipe, &memory->image);
	r = make_copies(memory, copies_wanted(memory, options), err);
	if (r == 0)
		note_rebinds(memory);
	if (r == 0)
		r = bench_upload(memory, err);
	if (r < 0)
		bench_memory_deinit(memory);
	return r;
}

void bench_memory_deinit(struct bench_memory *memory)
{
	for (uint32_t i = 0; i < memory->n_copies; i++)
		if (memory->copies[i] != memory->image.buffer)
			(void)fmha_buffer_free(memory->copies[i]);
	tensors_deinit(&memory->image);
	*memory = (struct bench_memory){0};
}

const struct fmha_run_options *bench_next_copy(struct bench_memory *memory,
					       struct fmha_run_options *options)
{
	if (memory->n_copies < 2 || memory->n_rebinds > FMHA_MAX_REBINDS)
		return NULL;
	memory->next = (memory->next + 1) % memory->n_copies;
	for (uint32_t i = 0; i < memory->n_rebinds; i++)
		memory->rebinds[i].buffer = fmha_buffer_id(memory->copies[memory->next]);
	*options = (struct fmha_run_options){.struct_size = sizeof(*options),
					     .n_rebinds = memory->n_rebinds,
					     .rebinds = memory->rebinds};
	return options;
}

int bench_flush_init(struct bench_flush *flush, struct fmha_device *device, int64_t mib,
		     struct fmha_error *err)
{
	uint64_t bytes = (uint64_t)mib << 20;
	int r = fmha_buffer_new(device, 2 * bytes, &flush->buffer, err);

	if (r < 0)
		return r;
	r = copy_plan(device, flush->buffer, flush->buffer, bytes, bytes, &flush->plan, err);
	if (r < 0) {
		flush->buffer = fmha_buffer_free(flush->buffer);
		return r;
	}
	flush->bytes = 2.0 * (double)bytes;
	return 0;
}

void bench_flush_deinit(struct bench_flush *flush)
{
	flush->plan = fmha_plan_free(flush->plan);
	flush->buffer = fmha_buffer_free(flush->buffer);
}
