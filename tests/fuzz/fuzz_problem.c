/* SPDX-License-Identifier: MIT */
/*
 * problem_check() on arbitrary problems: a table of (field, value) edits on top of a sound one, so
 * that most inputs get past the first rule. What it accepts must have extents, strides and sizes
 * that fit 64 bits, and must survive encoding.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <proto/problem.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void start_problem(struct fmha_problem *p, uint8_t kind)
{
	fmha_problem_init(p);
	p->op = kind % 4;
	p->mode = kind / 4 % 2;
	p->batch = 2;
	p->nhead_q = 4;
	p->nhead_k = 2;
	p->seqlen_q = 16;
	p->seqlen_k = 32;
	p->hdim_q = p->hdim_v = 64;
	for (uint32_t i = 0; i < FMHA_N_TENSORS; i++)
		p->tensor[i].dtype = proto_roles[i].n_dims == 4 ? FMHA_BF16 : FMHA_F32;
	p->q.buffer = 1;
	p->k.buffer = 2;
	p->v.buffer = 3;
	p->o.buffer = 4;
	if (p->mode == FMHA_GROUP)
		p->total_q = 20;
	if (p->mode == FMHA_GROUP && p->op <= FMHA_BACKWARD) {
		p->total_k = 40;
		p->seqstart_q = (struct fmha_tensor){.buffer = 5, .dtype = FMHA_I32};
		p->seqstart_k = (struct fmha_tensor){.buffer = 6, .dtype = FMHA_I32};
	}
	if (p->op == FMHA_BACKWARD)
		p->lse.buffer = p->d_o.buffer = p->dq.buffer = p->dk.buffer = p->dv.buffer = 0;
	if (p->op == FMHA_MERGE_STATES) {
		p->q.buffer = p->k.buffer = p->v.buffer = 0;
		p->n_parts = 2;
		p->o_parts = (struct fmha_tensor){.buffer = 7, .dtype = FMHA_BF16};
		p->lse_parts = (struct fmha_tensor){.buffer = 8, .dtype = FMHA_F32};
	}
	if (p->op == FMHA_BACKWARD) {
		p->lse.buffer = 9;
		p->d_o.buffer = 10;
		p->dq.buffer = 11;
		p->dk.buffer = 12;
		p->dv.buffer = 13;
	}
	if (p->op == FMHA_APPEND_KV) {
		p->q.buffer = p->o.buffer = 0;
		p->seqlen_new = 4;
		p->k_new.buffer = 14;
		p->v_new.buffer = 15;
	}
}

/* Every 7 bytes: where (2), how many bytes (1), what (4). Misaligned edits are fine, too. */
static void edit_problem(struct fmha_problem *p, const uint8_t *data, size_t size)
{
	for (size_t at = 0; at + 7 <= size; at += 7) {
		size_t offset = (size_t)(data[at] << 8 | data[at + 1]) % (sizeof(*p) - 8);
		uint64_t value = 0;

		memcpy(&value, data + at + 3, 4);
		if (data[at + 2] & 0x80) /* large strides and offsets */
			value <<= 31;
		offset &= ~(size_t)3;
		if (offset + 8 <= sizeof(*p))
			memcpy((char *)p + offset, &value, data[at + 2] & 1 ? 8 : 4);
	}
	/* Nothing here may be followed, but a null pointer and a buffer are the usual case. */
	for (uint32_t i = 0; i < FMHA_N_TENSORS; i++)
		p->tensor[i].data = NULL;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct fmha_problem p;
	struct fmha_error err = {0};
	int64_t dims[5], stride[5];
	uint64_t bytes;
	int r;

	if (size < 1)
		return 0;
	start_problem(&p, data[0]);
	edit_problem(&p, data + 1, size - 1);
	r = problem_check(&p, &err);
	if (r != 0) {
		if (r != err.code || err.msg[0] == '\0' || err.field[0] == '\0')
			abort();
		return 0;
	}
	for (uint32_t i = 0; i < FMHA_N_TENSORS; i++) {
		if (!fmha_tensor_present(&p.tensor[i]))
			continue;
		problem_extents(&p, i, dims);
		problem_strides(&p, i, stride);
		if (problem_span_bytes(&p, i, &bytes, NULL) != 0 ||
		    bytes > UINT64_MAX - p.tensor[i].offset)
			abort();
		for (int j = 0; j < 5; j++)
			if (dims[j] < 0 || stride[j] < 0)
				abort();
	}
	return 0;
}
