/* SPDX-License-Identifier: MIT */
/* problems.h: one sound problem of each kind; the tests bend them. */
#ifndef TESTS_PROTO_PROBLEMS_H
#define TESTS_PROTO_PROBLEMS_H

#include <proto/problem.h>

static struct fmha_tensor tensor(uint64_t buffer, uint32_t dtype)
{
	return (struct fmha_tensor){.buffer = buffer, .dtype = dtype};
}

/* One buffer a tensor, so that nothing aliases. */
static struct fmha_problem forward_problem(void)
{
	struct fmha_problem p;

	fmha_problem_init(&p);
	p.batch = 2;
	p.nhead_q = 8;
	p.nhead_k = 2;
	p.seqlen_q = 32;
	p.seqlen_k = 48;
	p.hdim_q = 64;
	p.hdim_v = 32;
	p.q = tensor(1, FMHA_BF16);
	p.k = tensor(2, FMHA_BF16);
	p.v = tensor(3, FMHA_BF16);
	p.o = tensor(4, FMHA_BF16);
	return p;
}

static struct fmha_problem group_problem(void)
{
	struct fmha_problem p = forward_problem();

	p.mode = FMHA_GROUP;
	p.total_q = 50;
	p.total_k = 70;
	p.seqstart_q = tensor(5, FMHA_I32);
	p.seqstart_k = tensor(6, FMHA_I32);
	return p;
}

static struct fmha_problem paged_problem(void)
{
	struct fmha_problem p = forward_problem();

	p.page_size = 16;
	p.n_pages = 9;
	p.max_blocks = 3;
	p.block_table = tensor(7, FMHA_I32);
	return p;
}

static struct fmha_problem indptr_problem(void)
{
	struct fmha_problem p = forward_problem();

	p.page_size = 16;
	p.n_pages = 9;
	p.n_page_indices = 5;
	p.kv_indptr = tensor(7, FMHA_I32);
	p.kv_page_indices = tensor(8, FMHA_I32);
	p.kv_last_page_len = tensor(9, FMHA_I32);
	return p;
}

static struct fmha_problem backward_problem(void)
{
	struct fmha_problem p = forward_problem();

	p.op = FMHA_BACKWARD;
	p.lse = tensor(10, FMHA_F32);
	p.d_o = tensor(11, FMHA_BF16);
	p.dq = tensor(12, FMHA_BF16);
	p.dk = tensor(13, FMHA_BF16);
	p.dv = tensor(14, FMHA_BF16);
	return p;
}

static struct fmha_problem append_problem(void)
{
	struct fmha_problem p = paged_problem();

	p.op = FMHA_APPEND_KV;
	p.seqlen_new = 4;
	p.k_new = tensor(15, FMHA_BF16);
	p.v_new = tensor(16, FMHA_BF16);
	p.rope = FMHA_ROPE_INTERLEAVED;
	p.rotary_dim = 32;
	p.rotary_max_pos = 48;
	p.rotary_cos = tensor(17, FMHA_F32);
	p.rotary_sin = tensor(18, FMHA_F32);
	p.q_rotated = tensor(19, FMHA_BF16);
	p.o = (struct fmha_tensor){0};
	return p;
}

static struct fmha_problem merge_problem(void)
{
	struct fmha_problem p;

	fmha_problem_init(&p);
	p.op = FMHA_MERGE_STATES;
	p.batch = 2;
	p.nhead_q = 8;
	p.seqlen_q = 32;
	p.hdim_v = 32;
	p.n_parts = 3;
	p.o_parts = tensor(20, FMHA_F32);
	p.lse_parts = tensor(21, FMHA_F32);
	p.o = tensor(22, FMHA_BF16);
	p.lse = tensor(23, FMHA_F32);
	return p;
}

/* Rows of 16 bits into pages of fp8, by slots, each divided by a factor that is found. */
static struct fmha_problem slots_problem(void)
{
	struct fmha_problem p;

	fmha_problem_init(&p);
	p.op = FMHA_APPEND_KV;
	p.batch = 2;
	p.nhead_q = 4;
	p.nhead_k = 2;
	p.hdim_q = p.hdim_v = 64;
	p.seqlen_q = p.seqlen_new = 3;
	p.page_size = 16;
	p.n_pages = 5;
	p.rope = FMHA_ROPE_INTERLEAVED;
	p.rotary_dim = 32;
	p.rotary_max_pos = 100;
	p.descale_computed = p.descale_per_page = 1;
	p.descale_block_k = 1;
	p.k = tensor(1, FMHA_E4M3);
	p.v = tensor(2, FMHA_E4M3);
	p.k_new = tensor(3, FMHA_BF16);
	p.v_new = tensor(4, FMHA_BF16);
	p.q = tensor(5, FMHA_BF16);
	p.q_rotated = tensor(6, FMHA_BF16);
	p.rotary_cos = tensor(7, FMHA_F32);
	p.rotary_sin = tensor(8, FMHA_F32);
	p.slot_mapping = tensor(9, FMHA_I64);
	p.positions = tensor(10, FMHA_I64);
	p.k_descale = tensor(11, FMHA_F32);
	p.v_descale = tensor(12, FMHA_F32);
	return p;
}

/* Queries of 16 bits over pages of latents of fp8. */
static struct fmha_problem latent_problem(void)
{
	struct fmha_problem p;

	fmha_problem_init(&p);
	p.batch = 2;
	p.nhead_q = 16;
	p.nhead_k = 1;
	p.seqlen_q = 3;
	p.seqlen_k = 100;
	p.hdim_q = 576;
	p.hdim_v = 512;
	p.v_in_k = 1;
	p.kv_layout = FMHA_KV_LATENT_FP8;
	p.page_size = 64;
	p.n_pages = 5;
	p.max_blocks = 2;
	p.q = tensor(1, FMHA_BF16);
	p.k = tensor(2, FMHA_E4M3);
	p.o = tensor(3, FMHA_BF16);
	p.block_table = tensor(4, FMHA_I32);
	p.seqlen_k_per_batch = tensor(5, FMHA_I32);
	return p;
}

/* The same pages without a table: rows have slots. */
static struct fmha_problem chosen_problem(void)
{
	struct fmha_problem p = latent_problem();

	p.topk = 40;
	p.seqlen_k = p.max_blocks = 0;
	p.block_table = p.seqlen_k_per_batch = (struct fmha_tensor){0};
	p.indices = tensor(6, FMHA_I32);
	return p;
}

static struct fmha_problem fp8_problem(void)
{
	struct fmha_problem p = forward_problem();

	p.q.dtype = p.k.dtype = p.v.dtype = FMHA_E4M3;
	p.q_descale = tensor(24, FMHA_F32);
	p.k_descale = tensor(25, FMHA_F32);
	p.v_descale = tensor(26, FMHA_F32);
	return p;
}

#endif
