/* SPDX-License-Identifier: MIT */
/* Extents, strides and sizes of tensors, and every rule of problem_check(), from both sides. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include <proto/error.h>
#include <proto/problem.h>

#include "problems.h"

static void accept_at(const struct fmha_problem *p, int line)
{
	struct fmha_error err = {0};

	if (problem_check(p, &err) != 0)
		fail_msg("line %d: refused: %s", line, err.msg);
}

static void refuse_at(const struct fmha_problem *p, const char *field, const char *msg, int line)
{
	struct fmha_error err = {0};

	if (problem_check(p, &err) != FMHA_EINVAL)
		fail_msg("line %d: accepted, expected: %s", line, msg);
	if (strcmp(err.field, field) != 0 || strcmp(err.msg, msg) != 0)
		fail_msg("line %d: got field '%s', '%s', expected '%s', '%s'", line, err.field,
			 err.msg, field, msg);
}

#define ACCEPTS(base, ...)                                                                         \
	do {                                                                                       \
		struct fmha_problem p = base##_problem();                                          \
		__VA_ARGS__;                                                                       \
		accept_at(&p, __LINE__);                                                           \
	} while (0)

#define REFUSES(base, field, msg, ...)                                                             \
	do {                                                                                       \
		struct fmha_problem p = base##_problem();                                          \
		__VA_ARGS__;                                                                       \
		refuse_at(&p, field, msg, __LINE__);                                               \
	} while (0)

static void plain_problems_are_accepted(void **state)
{
	(void)state;
	ACCEPTS(forward);
	ACCEPTS(group);
	ACCEPTS(paged);
	ACCEPTS(indptr);
	ACCEPTS(backward);
	ACCEPTS(append);
	ACCEPTS(merge);
	ACCEPTS(fp8);
}

static void numbers_out_of_range(void **state)
{
	(void)state;
	_Static_assert(sizeof(struct fmha_problem) == 4896, "the sentence below tells it");
	REFUSES(forward, "struct_size", "struct_size 8: this build's is 4896", p.struct_size = 8);
	REFUSES(forward, "op", "op 4: above 3, the last one defined", p.op = 4);
	REFUSES(forward, "mode", "mode 2: above 1, the last one defined", p.mode = 2);
	REFUSES(forward, "mask", "mask 3: above 2, the last one defined", p.mask = 3);
	REFUSES(forward, "rope", "rope 3: above 2, the last one defined", p.rope = 3);
	REFUSES(forward, "kv_layout", "kv_layout 3: above 2, the last one defined",
		p.kv_layout = 3);
	REFUSES(forward, "deterministic", "deterministic 2: above 1, the last one defined",
		p.deterministic = 2);
	REFUSES(forward, "descale_per_page", "descale_per_page 2: above 1, the last one defined",
		p.descale_per_page = 2);
	REFUSES(forward, "batch", "batch -1: below 0", p.batch = -1);
	ACCEPTS(forward, p.batch = 0);
	REFUSES(forward, "batch", "batch 1048577: above 1048576", p.batch = 1048577);
	REFUSES(forward, "nhead_q", "nhead_q 0: below 1", p.nhead_q = 0);
	REFUSES(forward, "nhead_q", "nhead_q 65537: above 65536", p.nhead_q = 65537);
	REFUSES(forward, "nhead_k", "nhead_k -1: below 1", p.nhead_k = -1);
	REFUSES(forward, "seqlen_q", "seqlen_q -1: below 0", p.seqlen_q = -1);
	REFUSES(forward, "seqlen_k", "seqlen_k -2147483648: below 0", p.seqlen_k = INT32_MIN);
	REFUSES(forward, "hdim_q", "hdim_q 0: below 1", p.hdim_q = 0);
	REFUSES(forward, "hdim_q", "hdim_q 577: above 576", p.hdim_q = 577);
	REFUSES(forward, "hdim_v", "hdim_v 0: below 1", p.hdim_v = 0);
	REFUSES(forward, "hdim_v", "hdim_v 2147483647: above 512", p.hdim_v = INT32_MAX);
	REFUSES(forward, "window_left", "window_left -2: below -1", p.window_left = -2);
	REFUSES(forward, "window_right", "window_right -2: below -1", p.window_right = -2);
	REFUSES(forward, "sink_tokens", "sink_tokens -1: below 0", p.sink_tokens = -1);
	REFUSES(forward, "n_splits", "n_splits 1025: above 1024", p.n_splits = 1025);
	REFUSES(forward, "split_size", "split_size -1: below 0", p.split_size = -1);
	REFUSES(forward, "page_size", "page_size 1025: above 1024", p.page_size = 1025);
	REFUSES(group, "total_q", "total_q -1: below 0", p.total_q = -1);
	REFUSES(group, "total_k", "total_k -1: below 0", p.total_k = -1);
	REFUSES(merge, "n_parts", "n_parts 1025: above 1024", p.n_parts = 1025);
	REFUSES(append, "rotary_dim", "rotary_dim 520: above 512", p.rotary_dim = 520);
	ACCEPTS(forward, p.seqlen_q = 0);
	ACCEPTS(forward, p.seqlen_k = 0);
	ACCEPTS(forward, p.hdim_q = 256, p.hdim_v = 8);
	ACCEPTS(forward, p.hdim_q = 1, p.hdim_v = 255);
	ACCEPTS(merge, p.hdim_v = 59);
	ACCEPTS(forward, p.batch = 1048576);
}

static void floats_out_of_range(void **state)
{
	(void)state;
	ACCEPTS(forward, p.scale = 0);
	ACCEPTS(forward, p.scale = -2.5f);
	ACCEPTS(forward, p.logits_soft_cap = 30, p.dropout_p = 0.999f);
	REFUSES(forward, "scale", "scale: infinite", p.scale = -INFINITY);
	REFUSES(forward, "logits_soft_cap", "logits_soft_cap -1: neither 0 nor a positive number",
		p.logits_soft_cap = -1);
	REFUSES(forward, "logits_soft_cap", "logits_soft_cap nan: neither 0 nor a positive number",
		p.logits_soft_cap = NAN);
	REFUSES(forward, "dropout_p", "dropout_p 1: not in [0, 1)", p.dropout_p = 1);
	REFUSES(forward, "dropout_p", "dropout_p -0.5: not in [0, 1)", p.dropout_p = -0.5f);
	REFUSES(forward, "dropout_p", "dropout_p nan: not in [0, 1)", p.dropout_p = NAN);
	ACCEPTS(forward, p.dropout_p = 0.5f, p.dropout_row = 48, p.dropout_column = 1 << 20);
	REFUSES(forward, "dropout_row", "dropout_row 8: not a multiple of 16", p.dropout_row = 8);
	REFUSES(forward, "dropout_column", "dropout_column 48: not a multiple of 32",
		p.dropout_column = 48);
	REFUSES(forward, "dropout_row", "dropout_row -16: below 0", p.dropout_row = -16);
	REFUSES(forward, "dropout_row",
		"dropout_row 2147483632: the last row would be beyond 2^31 - 1",
		p.dropout_row = INT32_MAX - 15);
	REFUSES(forward, "dropout_column",
		"dropout_column 2147483616: the last key would be beyond 2^31 - 1",
		p.dropout_column = INT32_MAX - 31);
}

static void heads_and_lengths(void **state)
{
	(void)state;
	REFUSES(forward, "nhead_q", "nhead_q 9: not a multiple of nhead_k 2", p.nhead_q = 9);
	REFUSES(append, "nhead_q", "nhead_q 0: below 1", p.nhead_q = 0);
	REFUSES(forward, "total_q", "total_q 5: only group mode has one", p.total_q = 5);
	REFUSES(forward, "total_k", "total_k 5: only group mode has one", p.total_k = 5);
	REFUSES(forward, "min_seqlen_q", "min_seqlen_q 5: needs group mode", p.min_seqlen_q = 5);
	REFUSES(forward, "seqlen_q",
		"seqlen_q 1073741824: batch times seqlen_q exceeds 2^31 - 1 rows",
		p.seqlen_q = 1 << 30);
	REFUSES(group, "seqlen_q", "seqlen_q 51: above total_q 50", p.seqlen_q = 51);
	REFUSES(group, "seqlen_k", "seqlen_k 71: above total_k 70", p.seqlen_k = 71);
	REFUSES(group, "total_k", "total_k 70: a paged or indexed cache is not packed",
		p.cache_batch_idx = tensor(9, FMHA_I32));
	ACCEPTS(group, p.min_seqlen_q = 4);
	ACCEPTS(group, p.cache_batch_idx = tensor(9, FMHA_I32), p.cache_batch = 5, p.total_k = 0,
		p.seqstart_k = (struct fmha_tensor){0});
}

static void masks(void **state)
{
	(void)state;
	ACCEPTS(forward, p.mask = FMHA_MASK_BOTTOM_RIGHT, p.window_right = 0);
	ACCEPTS(forward, p.mask = FMHA_MASK_TOP_LEFT, p.window_left = 7, p.sink_tokens = 4);
	REFUSES(forward, "window_left",
		"window_left 3: of mask top_left or bottom_right, and mask is none",
		p.window_left = 3);
	REFUSES(forward, "window_right",
		"window_right 0: of mask top_left or bottom_right, and mask is none",
		p.window_right = 0);
	REFUSES(forward, "sink_tokens",
		"sink_tokens 2: of mask top_left or bottom_right, and mask is none",
		p.sink_tokens = 2);
}

static void options_of_other_operations(void **state)
{
	(void)state;
	REFUSES(merge, "mask", "mask: merge_states has no such option",
		p.mask = FMHA_MASK_TOP_LEFT);
	REFUSES(append, "sink_tokens", "sink_tokens: append_kv has no such option",
		p.mask = FMHA_MASK_TOP_LEFT, p.sink_tokens = 1);
	REFUSES(append, "logits_soft_cap", "logits_soft_cap: append_kv has no such option",
		p.logits_soft_cap = 1);
	REFUSES(merge, "dropout_p", "dropout_p: merge_states has no such option",
		p.dropout_p = 0.5f);
	REFUSES(merge, "n_splits", "n_splits: merge_states has no such option", p.n_splits = 2);
	REFUSES(backward, "split_size", "split_size: backward has no such option",
		p.split_size = 2);
	REFUSES(backward, "page_size", "page_size: backward has no such option", p.page_size = 2);
	REFUSES(backward, "cache_batch", "cache_batch: backward has no such option",
		p.cache_batch = 2);
	REFUSES(backward, "descale_block_q", "descale_block_q: backward has no such option",
		p.descale_block_q = 2);
	REFUSES(backward, "descale_block_k", "descale_block_k: backward has no such option",
		p.descale_block_k = 2);
	REFUSES(backward, "descale_per_page", "descale_per_page: backward has no such option",
		p.descale_per_page = 1);
	REFUSES(backward, "rope", "rope: backward has no such option", p.rope = 1);
	REFUSES(backward, "seqlen_new", "seqlen_new: backward has no such option",
		p.seqlen_new = 1);
	REFUSES(forward, "n_parts", "n_parts: forward has no such option", p.n_parts = 1);
	REFUSES(merge, "n_parts", "n_parts 0: below 1", p.n_parts = 0);
	REFUSES(forward, "split_size", "split_size 8: n_splits is given as well", p.n_splits = 2,
		p.split_size = 8);
	REFUSES(backward, "min_seqlen_q", "min_seqlen_q: backward has no such option",
		p.mode = FMHA_GROUP, p.total_q = 40, p.total_k = 60, p.min_seqlen_q = 1);
}

static void pages(void **state)
{
	(void)state;
	REFUSES(forward, "n_pages", "n_pages 3: needs page_size", p.n_pages = 3);
	REFUSES(forward, "max_blocks", "max_blocks 3: needs page_size", p.max_blocks = 3);
	REFUSES(forward, "n_page_indices", "n_page_indices 3: needs page_size",
		p.n_page_indices = 3);
	REFUSES(forward, "kv_layout", "kv_layout: vectorized needs page_size", p.kv_layout = 1);
	REFUSES(forward, "cache_batch", "cache_batch 3: needs tensor.cache_batch_idx",
		p.cache_batch = 3);
	REFUSES(paged, "n_pages", "n_pages 0: below 1", p.n_pages = 0);
	REFUSES(paged, "cache_batch", "cache_batch 3: a paged cache has no rows",
		p.cache_batch = 3);
	REFUSES(paged, "n_page_indices", "n_page_indices 3: needs tensor.kv_page_indices",
		p.n_page_indices = 3);
	REFUSES(paged, "max_blocks", "max_blocks 2: max_blocks times page_size is below seqlen_k",
		p.max_blocks = 2);
	REFUSES(indptr, "max_blocks", "max_blocks 2: needs tensor.block_table", p.max_blocks = 2);
	ACCEPTS(paged, p.kv_layout = FMHA_KV_VECTORIZED);
	REFUSES(paged, "page_size", "page_size 12: a vectorized cache needs a multiple of 8",
		p.kv_layout = FMHA_KV_VECTORIZED, p.page_size = 12, p.max_blocks = 4);
	REFUSES(fp8, "hdim_q", "hdim_q 72: a vectorized cache needs a multiple of 16",
		p.kv_layout = FMHA_KV_VECTORIZED, p.page_size = 16, p.max_blocks = 4, p.n_pages = 8,
		p.hdim_q = 72, p.block_table = tensor(7, FMHA_I32));
	REFUSES(paged, "tensor.k.stride[3]",
		"tensor.k.stride[3]: a vectorized cache is packed: must be 0",
		p.kv_layout = FMHA_KV_VECTORIZED, p.k.stride[3] = 1);
	REFUSES(forward, "tensor.block_table", "tensor.block_table: needs page_size",
		p.block_table = tensor(7, FMHA_I32));
	REFUSES(forward, "tensor.kv_indptr", "tensor.kv_indptr: needs page_size",
		p.kv_indptr = tensor(7, FMHA_I32));
	REFUSES(forward, "tensor.kv_page_indices", "tensor.kv_page_indices: needs page_size",
		p.kv_page_indices = tensor(7, FMHA_I32));
	REFUSES(forward, "tensor.kv_last_page_len", "tensor.kv_last_page_len: needs page_size",
		p.kv_last_page_len = tensor(7, FMHA_I32));
	REFUSES(paged, "tensor.block_table",
		"tensor.block_table: a paged cache needs it, or kv_indptr",
		p.block_table.buffer = 0, p.max_blocks = 0);
	REFUSES(paged, "tensor.kv_indptr", "tensor.kv_indptr: block_table is given as well",
		p.kv_indptr = tensor(8, FMHA_I32));
	REFUSES(indptr, "tensor.kv_page_indices", "tensor.kv_page_indices: kv_indptr needs it",
		p.kv_page_indices.buffer = 0);
	REFUSES(paged, "tensor.kv_last_page_len", "tensor.kv_last_page_len: needs kv_indptr",
		p.kv_last_page_len = tensor(8, FMHA_I32));
	REFUSES(indptr, "tensor.kv_last_page_len", "tensor.kv_last_page_len: kv_indptr needs it",
		p.kv_last_page_len.buffer = 0);
	REFUSES(paged, "tensor.cache_batch_idx",
		"tensor.cache_batch_idx: a paged cache has no rows",
		p.cache_batch_idx = tensor(8, FMHA_I32));
}

static void appending_and_rotating(void **state)
{
	(void)state;
	REFUSES(append, "seqlen_new", "seqlen_new 0: append_kv needs at least 1", p.seqlen_new = 0);
	REFUSES(append, "seqlen_new", "seqlen_new 49: above seqlen_k 48, which counts it",
		p.seqlen_new = 49);
	REFUSES(group, "seqlen_new",
		"seqlen_new 4: packed keys have no room: needs pages, cache_batch_idx or batch "
		"mode",
		p.seqlen_new = 4);
	REFUSES(forward, "rotary_dim", "rotary_dim 16: needs rope", p.rotary_dim = 16);
	REFUSES(forward, "rotary_max_pos", "rotary_max_pos 16: needs rope", p.rotary_max_pos = 16);
	REFUSES(forward, "rope", "rope: rotates what is appended, but seqlen_new is 0", p.rope = 1);
	REFUSES(append, "rotary_dim", "rotary_dim 24: not a positive multiple of 16",
		p.rotary_dim = 24);
	REFUSES(append, "rotary_dim", "rotary_dim 0: not a positive multiple of 16",
		p.rotary_dim = 0);
	REFUSES(append, "rotary_dim", "rotary_dim 80: above hdim_q 64", p.rotary_dim = 80);
	REFUSES(append, "rotary_max_pos", "rotary_max_pos 47: below seqlen_k 48",
		p.rotary_max_pos = 47);
	REFUSES(append, "tensor.k_new", "tensor.k_new: append_kv needs it", p.k_new.buffer = 0);
	REFUSES(paged, "tensor.v_new", "tensor.v_new: seqlen_new needs it", p.seqlen_new = 1,
		p.k_new = tensor(8, FMHA_BF16));
	REFUSES(paged, "tensor.k_new", "tensor.k_new: needs seqlen_new",
		p.k_new = tensor(8, FMHA_BF16));
	REFUSES(append, "tensor.rotary_cos", "tensor.rotary_cos: rope needs it",
		p.rotary_cos.buffer = 0);
	REFUSES(append, "tensor.rotary_sin", "tensor.rotary_sin: rope needs it",
		p.rotary_sin.buffer = 0);
	REFUSES(forward, "tensor.rotary_cos", "tensor.rotary_cos: needs rope",
		p.rotary_cos = tensor(8, FMHA_F32));
	REFUSES(append, "tensor.q_rotated", "tensor.q_rotated: needs q", p.q.buffer = 0);
	REFUSES(append, "tensor.q",
		"tensor.q: append_kv only rotates it, but there is no q_rotated",
		p.q_rotated.buffer = 0);
	ACCEPTS(append, p.q_rotated.buffer = 0, p.q.buffer = 0, p.nhead_q = 0);
	ACCEPTS(append, p.mode = FMHA_GROUP, p.total_q = 40, p.seqstart_q = tensor(27, FMHA_I32));
	/* Fused in front of attention. */
	ACCEPTS(append, p.op = FMHA_FORWARD, p.q_rotated.buffer = 0, p.o = tensor(27, FMHA_BF16));
}

static void sequences(void **state)
{
	(void)state;
	REFUSES(group, "tensor.seqstart_q", "tensor.seqstart_q: group mode needs it",
		p.seqstart_q.buffer = 0);
	/* For every operation that has rows: without it the kernel would take batch x seqlen_q. */
	REFUSES(merge, "tensor.seqstart_q", "tensor.seqstart_q: group mode needs it",
		p.mode = FMHA_GROUP, p.total_q = 40);
	REFUSES(append, "tensor.seqstart_q", "tensor.seqstart_q: group mode needs it",
		p.mode = FMHA_GROUP, p.total_q = 40);
	REFUSES(append, "tensor.seqstart_q", "tensor.seqstart_q: needs q", p.mode = FMHA_GROUP,
		p.total_q = 40, p.q.buffer = 0, p.q_rotated.buffer = 0,
		p.seqstart_q = tensor(27, FMHA_I32));
	REFUSES(append, "tensor.seqlen_q_per_batch", "tensor.seqlen_q_per_batch: needs q",
		p.q.buffer = 0, p.q_rotated.buffer = 0,
		p.seqlen_q_per_batch = tensor(27, FMHA_I32));
	ACCEPTS(merge, p.mode = FMHA_GROUP, p.total_q = 40, p.seqstart_q = tensor(27, FMHA_I32));
	ACCEPTS(append, p.mode = FMHA_GROUP, p.total_q = 40, p.q.buffer = 0,
		p.q_rotated.buffer = 0);
	REFUSES(group, "tensor.seqstart_k", "tensor.seqstart_k: group mode needs it",
		p.seqstart_k.buffer = 0);
	REFUSES(forward, "tensor.seqstart_q", "tensor.seqstart_q: batch mode takes none",
		p.seqstart_q = tensor(9, FMHA_I32));
	REFUSES(forward, "tensor.seqstart_k", "tensor.seqstart_k: batch mode takes none",
		p.seqstart_k = tensor(9, FMHA_I32));
	REFUSES(group, "tensor.seqstart_k",
		"tensor.seqstart_k: a paged or indexed cache takes none", p.total_k = 0,
		p.cache_batch_idx = tensor(9, FMHA_I32));
	ACCEPTS(group, p.seqlen_q_per_batch = tensor(9, FMHA_I32),
		p.seqlen_k_per_batch = tensor(10, FMHA_I32), p.leftpad_k = tensor(11, FMHA_I32));
}

static void features_and_their_tensors(void **state)
{
	(void)state;
	ACCEPTS(forward, p.lse = tensor(9, FMHA_F32), p.bias = tensor(10, FMHA_F32),
		p.sink = tensor(11, FMHA_F32), p.dropout_p = 0.1f, p.randval = tensor(12, FMHA_U8),
		p.workspace = tensor(13, FMHA_U8));
	ACCEPTS(backward, p.bias = tensor(20, FMHA_BF16), p.dbias = tensor(21, FMHA_BF16),
		p.sink = tensor(22, FMHA_F32), p.dsink = tensor(23, FMHA_F32),
		p.dlse = tensor(24, FMHA_F32));
	REFUSES(forward, "tensor.dlse", "tensor.dlse: forward takes none",
		p.dlse = tensor(9, FMHA_F32));
	REFUSES(backward, "tensor.dlse.dtype", "tensor.dlse.dtype: bf16, must be f32",
		p.dlse = tensor(9, FMHA_BF16));
	REFUSES(forward, "tensor.q", "tensor.q: forward needs it", p.q.buffer = 0);
	REFUSES(forward, "tensor.o", "tensor.o: forward needs it", p.o.buffer = 0);
	REFUSES(forward, "tensor.dq", "tensor.dq: forward takes none", p.dq = tensor(9, FMHA_BF16));
	REFUSES(backward, "tensor.lse", "tensor.lse: backward needs it", p.lse.buffer = 0);
	REFUSES(backward, "tensor.d_o", "tensor.d_o: backward needs it", p.d_o.buffer = 0);
	REFUSES(merge, "tensor.o_parts", "tensor.o_parts: merge_states needs it",
		p.o_parts.buffer = 0);
	REFUSES(merge, "tensor.q", "tensor.q: merge_states takes none", p.q = tensor(9, FMHA_F32));
	REFUSES(forward, "tensor.alibi_slopes", "tensor.alibi_slopes: bias is given as well",
		p.alibi_slopes = tensor(9, FMHA_F32), p.bias = tensor(10, FMHA_F32));
	ACCEPTS(forward, p.mask_intervals = tensor(9, FMHA_I32), p.mask_endpoints = 63);
	ACCEPTS(backward, p.mask_bits = tensor(20, FMHA_U8));
	REFUSES(forward, "mask_endpoints", "mask_endpoints 4: even, must be odd",
		p.mask_intervals = tensor(9, FMHA_I32), p.mask_endpoints = 4);
	REFUSES(forward, "mask_endpoints", "mask_endpoints 65: above 63",
		p.mask_intervals = tensor(9, FMHA_I32), p.mask_endpoints = 65);
	REFUSES(forward, "mask_endpoints", "mask_endpoints 3: needs tensor.mask_intervals",
		p.mask_endpoints = 3);
	REFUSES(forward, "tensor.mask_intervals", "tensor.mask_intervals: needs mask_endpoints",
		p.mask_intervals = tensor(9, FMHA_I32));
	REFUSES(forward, "tensor.mask_intervals.dtype",
		"tensor.mask_intervals.dtype: f32, must be i32",
		p.mask_intervals = tensor(9, FMHA_F32), p.mask_endpoints = 3);
	REFUSES(forward, "tensor.mask_bits", "tensor.mask_bits: mask_intervals is given as well",
		p.mask_intervals = tensor(9, FMHA_I32), p.mask_endpoints = 3,
		p.mask_bits = tensor(10, FMHA_U8));
	REFUSES(merge, "tensor.mask_bits", "tensor.mask_bits: merge_states takes none",
		p.mask_bits = tensor(9, FMHA_U8));
	REFUSES(forward, "tensor.randval", "tensor.randval: needs dropout_p",
		p.randval = tensor(9, FMHA_U8));
	REFUSES(backward, "tensor.dbias", "tensor.dbias: needs bias",
		p.dbias = tensor(9, FMHA_F32));
	REFUSES(backward, "tensor.dsink", "tensor.dsink: needs sink",
		p.dsink = tensor(9, FMHA_F32));
	REFUSES(forward, "descale_block_q", "descale_block_q 16: needs tensor.q_descale",
		p.descale_block_q = 16);
	REFUSES(forward, "descale_block_k",
		"descale_block_k 16: needs tensor.k_descale or tensor.v_descale",
		p.descale_block_k = 16);
	REFUSES(fp8, "descale_per_page", "descale_per_page: needs page_size",
		p.descale_per_page = 1);
	REFUSES(fp8, "descale_block_k",
		"descale_block_k 17: above page_size, and descale_per_page counts slots of a page",
		p.descale_per_page = 1, p.descale_block_k = 17, p.page_size = 16, p.n_pages = 4,
		p.max_blocks = 3, p.block_table = tensor(9, FMHA_I32));
}

#define ABSENT ((struct fmha_tensor){0})

static void latents(void **state)
{
	(void)state;
	ACCEPTS(latent);
	ACCEPTS(latent, p.q.dtype = p.o.dtype = FMHA_F16, p.mask = FMHA_MASK_BOTTOM_RIGHT,
		p.window_right = 0);
	ACCEPTS(latent, p.kv_layout = FMHA_KV_LINEAR, p.k_descale = tensor(9, FMHA_F32));
	ACCEPTS(latent, p.kv_layout = FMHA_KV_LINEAR, p.k.dtype = FMHA_BF16, p.nhead_k = 4,
		p.hdim_v = 33);
	ACCEPTS(latent, p.seqlen_new = 3, p.k_new = tensor(9, FMHA_BF16));
	REFUSES(latent, "kv_layout", "kv_layout: latent_fp8 needs v_in_k", p.v_in_k = 0);
	REFUSES(latent, "tensor.v", "tensor.v: forward needs it", p.v_in_k = 0,
		p.kv_layout = FMHA_KV_LINEAR);
	REFUSES(latent, "tensor.v", "tensor.v: v_in_k: the values are in k",
		p.v = tensor(9, FMHA_E4M3));
	REFUSES(latent, "tensor.v_new", "tensor.v_new: v_in_k: the values are in k",
		p.seqlen_new = 3, p.k_new = tensor(9, FMHA_BF16), p.v_new = tensor(10, FMHA_BF16));
	REFUSES(latent, "tensor.k_descale", "tensor.k_descale: latent_fp8 has factors of its own",
		p.k_descale = tensor(9, FMHA_F32));
	REFUSES(latent, "tensor.k.dtype", "tensor.k.dtype: latent_fp8 is of e4m3",
		p.k.dtype = FMHA_E5M2);
	REFUSES(latent, "tensor.q.dtype", "tensor.q.dtype: latent_fp8 takes f16 or bf16",
		p.q.dtype = FMHA_E4M3);
	REFUSES(latent, "tensor.q.dtype", "tensor.q.dtype: f32, must be f16 or bf16 or e4m3",
		p.q.dtype = FMHA_F32);
	REFUSES(latent, "hdim_q", "hdim_q 512: latent_fp8 has 576", p.hdim_q = 512);
	REFUSES(latent, "hdim_v", "hdim_v 448: latent_fp8 has 512", p.hdim_v = 448);
	REFUSES(latent, "hdim_v", "hdim_v 512: above hdim_q 500, which holds it (v_in_k)",
		p.hdim_q = 500);
	REFUSES(latent, "nhead_k", "nhead_k 2: latent_fp8 has 1", p.nhead_k = 2);
	REFUSES(latent, "tensor.k.offset", "tensor.k.offset: 8 is not a multiple of 16 bytes",
		p.k.offset = 8);
	REFUSES(latent, "tensor.k.stride[1]",
		"tensor.k.stride[1]: of latents of fp8: not a multiple of 16",
		p.k.stride[0] = 64 * 660, p.k.stride[1] = p.k.stride[2] = 660, p.k.stride[3] = 1);
	/* Kernels read a latent's bytes as they lie. */
	REFUSES(latent, "tensor.k.stride[3]", "tensor.k.stride[3]: of latents of fp8: not 1",
		p.k.stride[0] = 64 * 656, p.k.stride[1] = p.k.stride[2] = 656);
	REFUSES(latent, "rope", "rope: turns first elements, which v_in_k makes values",
		p.seqlen_new = 3, p.k_new = tensor(9, FMHA_BF16), p.rope = FMHA_ROPE_INTERLEAVED,
		p.rotary_dim = 16, p.rotary_max_pos = 200);
	REFUSES(backward, "v_in_k", "v_in_k: backward has no such option", p.v_in_k = 1);
}

static void chosen_keys(void **state)
{
	(void)state;
	ACCEPTS(chosen);
	ACCEPTS(forward, p.topk = 7, p.indices = tensor(20, FMHA_I32));
	REFUSES(chosen, "seqlen_k", "seqlen_k 9: tensor.indices says which slots are read",
		p.seqlen_k = 9);
	REFUSES(chosen, "tensor.indices", "tensor.indices: topk needs it", p.indices = ABSENT);
	REFUSES(forward, "tensor.indices", "tensor.indices: needs topk",
		p.indices = tensor(20, FMHA_I32));
	REFUSES(chosen, "tensor.indices.dtype", "tensor.indices.dtype: i64, must be i32",
		p.indices.dtype = FMHA_I64);
	REFUSES(chosen, "tensor.seqlen_k_per_batch", "tensor.seqlen_k_per_batch: indices are slots",
		p.seqlen_k_per_batch = tensor(20, FMHA_I32));
	REFUSES(chosen, "mask", "mask: with topk, indices say what a row sees",
		p.mask = FMHA_MASK_TOP_LEFT);
	REFUSES(chosen, "dropout_p", "dropout_p 0.5: not with topk", p.dropout_p = 0.5F);
	REFUSES(chosen, "n_splits", "n_splits 2: keys that are chosen are not split",
		p.n_splits = 2);
	REFUSES(chosen, "split_size", "split_size 64: keys that are chosen are not split",
		p.split_size = 64);
	REFUSES(chosen, "tensor.alibi_slopes",
		"tensor.alibi_slopes: topk: indices say what a row sees",
		p.alibi_slopes = tensor(20, FMHA_F32));
	/* A slot has no place in a sequence whose factors could be counted. */
	REFUSES(chosen, "descale_block_k", "descale_block_k 16: by slots it needs descale_per_page",
		p.kv_layout = FMHA_KV_LINEAR, p.k_descale = tensor(20, FMHA_F32),
		p.descale_block_k = 16);
}

static void slots(void **state)
{
	(void)state;
	ACCEPTS(slots, p.batch = 2);
	ACCEPTS(slots, p.descale_computed = p.descale_per_page = 0, p.descale_block_k = 0);
	ACCEPTS(slots, p.descale_computed = 0, p.descale_block_k = 0);
	ACCEPTS(slots, p.descale_computed = p.descale_per_page = 0, p.descale_block_k = 0,
		p.k_descale = p.v_descale = ABSENT);
	ACCEPTS(slots, p.rope = FMHA_ROPE_NONE, p.rotary_dim = p.rotary_max_pos = 0,
		p.positions = p.rotary_cos = p.rotary_sin = p.q = p.q_rotated = ABSENT);
	REFUSES(slots, "seqlen_k", "seqlen_k 7: tensor.slot_mapping says where rows go",
		p.seqlen_k = 7);
	REFUSES(slots, "seqlen_q", "seqlen_q 4: q turns with k_new, which has 3 rows",
		p.seqlen_q = 4);
	REFUSES(slots, "n_pages", "n_pages 0: below 1", p.n_pages = 0);
	REFUSES(slots, "tensor.block_table", "tensor.block_table: slot_mapping says where rows go",
		p.block_table = tensor(20, FMHA_I32));
	REFUSES(slots, "tensor.seqlen_k_per_batch",
		"tensor.seqlen_k_per_batch: slot_mapping says where rows go",
		p.seqlen_k_per_batch = tensor(20, FMHA_I32));
	REFUSES(slots, "tensor.positions", "tensor.positions: rope by slots needs it",
		p.positions = ABSENT);
	REFUSES(slots, "tensor.slot_mapping.dtype", "tensor.slot_mapping.dtype: i32, must be i64",
		p.slot_mapping.dtype = FMHA_I32);
	REFUSES(slots, "tensor.v_new.dtype", "tensor.v_new.dtype: f16, must be bf16",
		p.v_new.dtype = FMHA_F16);
	REFUSES(slots, "tensor.k_new.dtype", "tensor.k_new.dtype: f32, must be f16 or bf16 or e4m3",
		p.k_new.dtype = FMHA_F32);
	REFUSES(slots, "tensor.k_new.dtype", "tensor.k_new.dtype: bf16, must be f16",
		p.k.dtype = p.v.dtype = FMHA_F16);
	ACCEPTS(slots, p.k.dtype = p.v.dtype = FMHA_I8);
	REFUSES(slots, "tensor.k_descale",
		"tensor.k_descale: k_new and v_new are of 8 bits already",
		p.k.dtype = p.v.dtype = p.k_new.dtype = p.v_new.dtype = FMHA_I8,
		p.q.dtype = p.q_rotated.dtype = FMHA_I8);
	REFUSES(slots, "tensor.k_new.dtype", "tensor.k_new.dtype: e4m3, must be f16 or bf16 or i8",
		p.k.dtype = p.v.dtype = FMHA_I8, p.k_new.dtype = FMHA_E4M3);
	REFUSES(slots, "tensor.v.dtype", "tensor.v.dtype: e5m2, must be e4m3",
		p.v.dtype = FMHA_E5M2);
	REFUSES(slots, "descale_computed",
		"descale_computed: needs tensor.slot_mapping, descale_per_page and descale_block_k "
		"1",
		p.descale_block_k = 16);
	REFUSES(slots, "descale_block_k", "descale_block_k 4: by slots it needs descale_per_page",
		p.descale_computed = p.descale_per_page = 0, p.descale_block_k = 4);
	REFUSES(slots, "tensor.k_descale", "tensor.k_descale: descale_computed needs it",
		p.k_descale = ABSENT);
	REFUSES(append, "tensor.positions", "tensor.positions: needs slot_mapping",
		p.positions = tensor(20, FMHA_I64));
	REFUSES(forward, "tensor.slot_mapping", "tensor.slot_mapping: forward takes none",
		p.slot_mapping = tensor(20, FMHA_I64));
}

static void data_types(void **state)
{
	(void)state;
	ACCEPTS(fp8, p.o.dtype = FMHA_F32);
	ACCEPTS(fp8, p.q.dtype = p.k.dtype = p.v.dtype = FMHA_E5M2, p.o.dtype = FMHA_F16);
	ACCEPTS(fp8, p.q.dtype = p.o.dtype = FMHA_BF16, p.q_descale = (struct fmha_tensor){0});
	ACCEPTS(fp8, p.q.dtype = p.o.dtype = FMHA_F16, p.q_descale = (struct fmha_tensor){0},
		p.k.dtype = p.v.dtype = FMHA_E5M2);
	REFUSES(fp8, "tensor.q.dtype", "tensor.q.dtype: f32, must be f16 or bf16 or e4m3",
		p.q.dtype = FMHA_F32);
	REFUSES(fp8, "tensor.v.dtype", "tensor.v.dtype: e5m2, must be e4m3",
		p.q.dtype = p.o.dtype = FMHA_BF16, p.v.dtype = FMHA_E5M2);
	REFUSES(fp8, "tensor.o.dtype", "tensor.o.dtype: f32, must be bf16", p.q.dtype = FMHA_BF16,
		p.o.dtype = FMHA_F32);
	REFUSES(fp8, "tensor.q_descale",
		"tensor.q_descale: only inputs of 8 bits have scale factors",
		p.q.dtype = p.o.dtype = FMHA_BF16);
	/* Integers are a cache's alone. */
	ACCEPTS(fp8, p.k.dtype = p.v.dtype = FMHA_I8, p.q.dtype = p.o.dtype = FMHA_F16,
		p.q_descale = ABSENT);
	ACCEPTS(fp8, p.k.dtype = p.v.dtype = FMHA_I8, p.q.dtype = p.o.dtype = FMHA_BF16,
		p.q_descale = p.k_descale = p.v_descale = ABSENT, p.descale_block_k = 0);
	REFUSES(fp8, "tensor.q.dtype", "tensor.q.dtype: i8, must be f16 or bf16",
		p.q.dtype = p.k.dtype = p.v.dtype = FMHA_I8, p.o.dtype = FMHA_BF16);
	REFUSES(fp8, "tensor.q.dtype", "tensor.q.dtype: f32, must be f16 or bf16",
		p.q.dtype = FMHA_F32, p.k.dtype = p.v.dtype = FMHA_I8);
	REFUSES(fp8, "tensor.q.dtype", "tensor.q.dtype: e4m3, must be f16 or bf16",
		p.k.dtype = p.v.dtype = FMHA_I8);
	REFUSES(forward, "tensor.q.dtype", "tensor.q.dtype: i8, must be bf16", p.q.dtype = FMHA_I8);
	REFUSES(fp8, "tensor.v.dtype", "tensor.v.dtype: e4m3, must be i8",
		p.q.dtype = p.o.dtype = FMHA_BF16, p.k.dtype = FMHA_I8);
	REFUSES(fp8, "tensor.o.dtype", "tensor.o.dtype: i8, must be bf16", p.q.dtype = FMHA_BF16,
		p.k.dtype = p.v.dtype = p.o.dtype = FMHA_I8);
	REFUSES(fp8, "tensor.q_descale",
		"tensor.q_descale: only inputs of 8 bits have scale factors",
		p.q.dtype = p.o.dtype = FMHA_BF16, p.k.dtype = p.v.dtype = FMHA_I8);
	REFUSES(backward, "tensor.k.dtype", "tensor.k.dtype: i8, must be f32 or f16 or bf16",
		p.k.dtype = FMHA_I8);
	REFUSES(merge, "tensor.o_parts.dtype",
		"tensor.o_parts.dtype: i8, must be f32 or f16 or bf16", p.o_parts.dtype = FMHA_I8);
	ACCEPTS(merge, p.o_parts.dtype = p.o.dtype = FMHA_BF16);
	ACCEPTS(append, p.rotary_cos.dtype = p.rotary_sin.dtype = FMHA_BF16);
	REFUSES(forward, "tensor.q.dtype", "tensor.q.dtype: 9 is no data type", p.q.dtype = 9);
	/* What may lie over fp8 is asked of q: it has to be a type by then. */
	REFUSES(forward, "tensor.q.dtype", "tensor.q.dtype: 2147483648 is no data type",
		p.k.dtype = FMHA_E4M3, p.q.dtype = 0x80000000U);
	REFUSES(forward, "tensor.k.dtype", "tensor.k.dtype: 4294967295 is no data type",
		p.k.dtype = UINT32_MAX);
	REFUSES(forward, "tensor.k.dtype",
		"tensor.k.dtype: i32, must be f32 or f16 or bf16 or e4m3 or e5m2 or i8",
		p.k.dtype = FMHA_I32);
	REFUSES(forward, "tensor.q.dtype", "tensor.q.dtype: f16, must be bf16",
		p.q.dtype = FMHA_F16);
	REFUSES(forward, "tensor.v.dtype", "tensor.v.dtype: f32, must be bf16",
		p.v.dtype = FMHA_F32);
	REFUSES(forward, "tensor.o.dtype", "tensor.o.dtype: f32, must be bf16",
		p.o.dtype = FMHA_F32);
	REFUSES(fp8, "tensor.o.dtype", "tensor.o.dtype: e4m3, must be f32 or f16 or bf16",
		p.o.dtype = FMHA_E4M3);
	REFUSES(merge, "tensor.o.dtype", "tensor.o.dtype: f16, must be bf16",
		p.o_parts.dtype = FMHA_BF16, p.o.dtype = FMHA_F16);
	REFUSES(backward, "tensor.k.dtype", "tensor.k.dtype: e4m3, must be f32 or f16 or bf16",
		p.k.dtype = FMHA_E4M3);
	REFUSES(forward, "tensor.lse.dtype", "tensor.lse.dtype: bf16, must be f32",
		p.lse = tensor(9, FMHA_BF16));
	REFUSES(forward, "tensor.bias.dtype", "tensor.bias.dtype: f16, must be f32 or bf16",
		p.bias = tensor(9, FMHA_F16));
	REFUSES(group, "tensor.seqstart_q.dtype", "tensor.seqstart_q.dtype: f32, must be i32",
		p.seqstart_q.dtype = FMHA_F32);
	REFUSES(forward, "tensor.workspace.dtype", "tensor.workspace.dtype: f32, must be u8",
		p.workspace = tensor(9, FMHA_F32));
	REFUSES(append, "tensor.rotary_sin.dtype",
		"tensor.rotary_sin.dtype: differs from that of rotary_cos",
		p.rotary_cos.dtype = FMHA_BF16);
	REFUSES(append, "tensor.rotary_cos.dtype",
		"tensor.rotary_cos.dtype: f16, must be f32 or bf16",
		p.rotary_cos.dtype = p.rotary_sin.dtype = FMHA_F16);
	REFUSES(forward, "tensor.q_descale",
		"tensor.q_descale: only inputs of 8 bits have scale factors",
		p.q_descale = tensor(9, FMHA_F32));
	REFUSES(backward, "tensor.dbias.dtype", "tensor.dbias.dtype: differs from that of bias",
		p.bias = tensor(20, FMHA_BF16), p.dbias = tensor(21, FMHA_F32));
}

static void set_stride(struct fmha_tensor *t, int64_t a, int64_t b, int64_t c, int64_t d)
{
	t->stride[0] = a;
	t->stride[1] = b;
	t->stride[2] = c;
	t->stride[3] = d;
}

static void views(void **state)
{
	(void)state;
	/* BHSD instead of BSHD; a broadcast batch of keys. */
	ACCEPTS(forward, set_stride(&p.o, 8 * 32 * 32, 32, 32 * 32, 1));
	ACCEPTS(forward, set_stride(&p.k, 0, 128, 64, 1));
	ACCEPTS(forward, p.q.offset = 2);
	REFUSES(forward, "tensor.q.offset", "tensor.q.offset: 3 is not a multiple of 2 bytes",
		p.q.offset = 3);
	REFUSES(forward, "tensor.workspace.offset",
		"tensor.workspace.offset: 128 is not a multiple of 256 bytes",
		p.workspace = tensor(9, FMHA_U8), p.workspace.offset = 128);
	REFUSES(forward, "tensor.q.stride[4]",
		"tensor.q.stride[4]: not 0, but the tensor has no such dimension",
		p.q.stride[4] = 1);
	REFUSES(forward, "tensor.k.stride[1]", "tensor.k.stride[1]: negative",
		set_stride(&p.k, 6144, -128, 64, 1));
	REFUSES(forward, "tensor.k", "tensor.k: its extent overflows 64 bits",
		set_stride(&p.k, INT64_MAX, 128, 64, 1));
	REFUSES(forward, "tensor.k", "tensor.k: its extent overflows 64 bits",
		set_stride(&p.k, 1, INT64_MAX / 47 + 1, 64, 1));
	REFUSES(forward, "tensor.q.offset", "tensor.q.offset: offset and extent overflow 64 bits",
		p.q.offset = UINT64_MAX - 1);
	REFUSES(forward, "tensor.o.stride", "tensor.o.stride: elements of an output overlap",
		set_stride(&p.o, 0, 256, 32, 1));
	REFUSES(forward, "tensor.o.stride", "tensor.o.stride: elements of an output overlap",
		set_stride(&p.o, 8192, 256, 31, 1));
	REFUSES(append, "tensor.k.stride", "tensor.k.stride: elements of an output overlap",
		set_stride(&p.k, 0, 128, 64, 1));
	REFUSES(forward, "tensor.q.data", "tensor.q.data: a buffer is given as well",
		p.q.data = &state);
	/* A stride that needs more than 32 bits is fine. */
	ACCEPTS(forward, set_stride(&p.k, INT64_C(1) << 40, 128, 64, 1));
	/* dbias is as small as what it sums over. */
	ACCEPTS(backward, p.bias = tensor(20, FMHA_F32), p.dbias = tensor(21, FMHA_F32),
		set_stride(&p.bias, 0, 0, 48, 1));
}

static void outputs_must_not_alias(void **state)
{
	(void)state;
	REFUSES(forward, "tensor.o", "tensor.o: an output, overlaps tensor.q", p.o.buffer = 1);
	REFUSES(forward, "tensor.o", "tensor.o: an output, overlaps tensor.v", p.o.buffer = 3,
		p.o.offset = 2 * 48 * 2 * 32 * 2 - 2);
	ACCEPTS(forward, p.o.buffer = 3, p.o.offset = 2 * 48 * 2 * 32 * 2);
	REFUSES(forward, "tensor.lse", "tensor.lse: an output, overlaps tensor.k",
		p.lse = tensor(2, FMHA_F32));
	/* Inputs may share memory with each other. */
	ACCEPTS(forward, p.k.buffer = p.v.buffer = p.q.buffer);
	/* The same addresses in two buffers are not the same memory. */
	ACCEPTS(forward, p.o.offset = 0, p.q.offset = 0);
}

/* dQ, dK and dV as thirds of one packed [batch, seqlen, 3, heads, hdim] tensor, in three layouts.
 */
static void interleaved_outputs_are_apart(void **state)
{
	static const int64_t layouts[][5] = {
		/* stride of batch, row, head, element; offset between the thirds */
		{32 * 3 * 8 * 64, 3 * 8 * 64, 64, 1, 8 * 64},
		{3 * 8 * 32 * 64, 64, 32 * 64, 1, 8 * 32 * 64},
		{8 * 32 * 3 * 64, 3 * 64, 32 * 3 * 64, 1, 64},
	};

	(void)state;
	for (size_t i = 0; i < sizeof(layouts) / sizeof(layouts[0]); i++) {
		struct fmha_problem p = backward_problem();
		struct fmha_tensor *thirds[] = {&p.dq, &p.dk, &p.dv};
		const int64_t *l = layouts[i];

		p.nhead_k = 8;
		p.seqlen_k = 32;
		p.hdim_v = 64;
		for (int64_t j = 0; j < 3; j++) {
			set_stride(thirds[j], l[0], l[1], l[2], l[3]);
			thirds[j]->buffer = 50;
			thirds[j]->offset = (uint64_t)(j * l[4] * 2);
		}
		accept_at(&p, (int)i);
		p.dk.offset -= 2;
		refuse_at(&p, "tensor.dq", "tensor.dq: an output, overlaps tensor.dk", (int)i);
		p.dk.offset += 4;
		refuse_at(&p, "tensor.dk", "tensor.dk: an output, overlaps tensor.dv", (int)i);
	}
}

static void extents_follow_the_mode(void **state)
{
	struct fmha_problem p = group_problem();
	int64_t dims[5], stride[5];
	uint64_t bytes;

	(void)state;
	problem_extents(&p, FMHA_T_Q, dims);
	assert_memory_equal(dims, ((int64_t[]){1, 50, 8, 64, 1}), sizeof(dims));
	problem_extents(&p, FMHA_T_V, dims);
	assert_memory_equal(dims, ((int64_t[]){1, 70, 2, 32, 1}), sizeof(dims));
	problem_extents(&p, FMHA_T_LSE, dims);
	assert_memory_equal(dims, ((int64_t[]){1, 8, 50, 1, 1}), sizeof(dims));
	problem_extents(&p, FMHA_T_BIAS, dims);
	assert_memory_equal(dims, ((int64_t[]){1, 8, 50, 48, 1}), sizeof(dims));
	p.descale_block_k = 20;
	problem_extents(&p, FMHA_T_K_DESCALE, dims);
	assert_memory_equal(dims, ((int64_t[]){2, 2, 3, 1, 1}), sizeof(dims));
	p = paged_problem();
	problem_extents(&p, FMHA_T_K, dims);
	assert_memory_equal(dims, ((int64_t[]){9, 16, 2, 64, 1}), sizeof(dims));
	p = merge_problem();
	problem_strides(&p, FMHA_T_O_PARTS, stride);
	assert_memory_equal(stride, ((int64_t[]){16384, 8192, 256, 32, 1}), sizeof(stride));
	assert_int_equal(problem_span_bytes(&p, FMHA_T_O_PARTS, &bytes, NULL), 0);
	assert_int_equal(bytes, 3 * 16384 * 4);
	assert_int_equal(problem_span_bytes(&p, FMHA_T_WORKSPACE, &bytes, NULL), 0);
	assert_int_equal(bytes, 0);
	p = forward_problem();
	set_stride(&p.q, 1 << 20, 1024, 100, 1);
	assert_int_equal(problem_span_bytes(&p, FMHA_T_Q, &bytes, NULL), 0);
	assert_int_equal(bytes, ((1 << 20) + 31 * 1024 + 7 * 100 + 63 + 1) * 2);
	p.seqlen_q = 0;
	assert_int_equal(problem_span_bytes(&p, FMHA_T_Q, &bytes, NULL), 0);
	assert_int_equal(bytes, 0);
}

static void dtypes_have_sizes_and_names(void **state)
{
	static const uint32_t bytes[FMHA_N_DTYPES] = {4, 2, 2, 1, 1, 4, 1, 8, 1};

	(void)state;
	for (uint32_t i = 0; i < FMHA_N_DTYPES; i++)
		assert_int_equal(fmha_dtype_bytes(i), bytes[i]);
	assert_int_equal(fmha_dtype_bytes(FMHA_N_DTYPES), 0);
	assert_string_equal(fmha_dtype_name(FMHA_E5M2), "e5m2");
	assert_null(fmha_dtype_name(FMHA_N_DTYPES));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(plain_problems_are_accepted),
		cmocka_unit_test(numbers_out_of_range),
		cmocka_unit_test(floats_out_of_range),
		cmocka_unit_test(heads_and_lengths),
		cmocka_unit_test(masks),
		cmocka_unit_test(options_of_other_operations),
		cmocka_unit_test(pages),
		cmocka_unit_test(appending_and_rotating),
		cmocka_unit_test(sequences),
		cmocka_unit_test(features_and_their_tensors),
		cmocka_unit_test(slots),
		cmocka_unit_test(data_types),
		cmocka_unit_test(latents),
		cmocka_unit_test(chosen_keys),
		cmocka_unit_test(views),
		cmocka_unit_test(outputs_must_not_alias),
		cmocka_unit_test(interleaved_outputs_are_apart),
		cmocka_unit_test(extents_follow_the_mode),
		cmocka_unit_test(dtypes_have_sizes_and_names),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
