/* SPDX-License-Identifier: MIT */
#include "tensors.h"

#include <string.h>
#include <unistd.h>

#include <proto/error.h>
#include <proto/problem.h>

#define ALIGNMENT 256

/* Memory that we see too: what the worker allocates, or on a GPU, whose memory we do not see or which cannot even share it, a
 * memfd of ours. */
static int new_buffer(struct fmha_device *device, uint64_t size, struct fmha_buffer **ret_buffer,
		      struct fmha_error *err)
{
	struct fmha_memory memory = {.struct_size = sizeof(memory), .size = size};
	int r = fmha_buffer_new(device, size, ret_buffer, err);

	if (r == 0 && fmha_buffer_data(*ret_buffer))
		return 0;
	if (r < 0 && r != FMHA_ENOTSUP)
		return r;
	if (r == 0)
		(void)fmha_buffer_free(*ret_buffer);
	r = fmha_memfd_new(size, &memory.fd, err);
	if (r < 0)
		return r;
	r = fmha_buffer_import(device, &memory, ret_buffer, err);
	(void)close(memory.fd);
	return r;
}

int tensors_new(struct fmha_device *device, struct fmha_problem *problem, struct tensors *ret,
		struct fmha_error *err)
{
	struct tensors t = {.device = device};
	int r;

	for (uint32_t role = 0; role < FMHA_N_TENSORS; role++) {
		uint64_t bytes;

		if (!problem->tensor[role].data)
			continue;
		r = problem_span_bytes(problem, role, &bytes, err);
		if (r < 0)
			return r;
		t.present[role] = true;
		t.offset[role] = t.bytes;
		if (bytes > INT64_MAX / 2 - t.bytes)
			return fmha_error_set(err, FMHA_EINVAL, "the tensors exceed 2^62 bytes");
		t.bytes += (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
	}
	if (t.bytes == 0)
		t.bytes = ALIGNMENT; /* empty tensors still lie somewhere */
	r = new_buffer(device, t.bytes, &t.buffer, err);
	if (r < 0)
		return r;
	for (uint32_t role = 0; role < FMHA_N_TENSORS; role++) {
		if (!t.present[role])
			continue;
		problem->tensor[role].buffer = fmha_buffer_id(t.buffer);
		problem->tensor[role].offset = t.offset[role];
		problem->tensor[role].data = NULL;
	}
	*ret = t;
	return 0;
}

void *tensors_data(const struct tensors *tensors, uint32_t role)
{
	if (!tensors->present[role])
		return NULL;
	return (uint8_t *)fmha_buffer_data(tensors->buffer) + tensors->offset[role];
}

void tensors_point(const struct tensors *tensors, const struct fmha_problem *problem,
		   struct fmha_problem *ret)
{
	*ret = *problem;
	for (uint32_t role = 0; role < FMHA_N_TENSORS; role++) {
		ret->tensor[role].data = tensors_data(tensors, role);
		ret->tensor[role].buffer = ret->tensor[role].offset = 0;
	}
}

void tensors_put_integers(void *data, uint32_t dtype, const int32_t *from, int64_t n)
{
	int64_t *wide = data;

	if (dtype != FMHA_I64)
		memcpy(data, from, (size_t)n * sizeof(*from));
	for (int64_t i = 0; dtype == FMHA_I64 && i < n; i++)
		wide[i] = from[i];
}

void tensors_deinit(struct tensors *tensors)
{
	tensors->buffer = fmha_buffer_free(tensors->buffer);
}
