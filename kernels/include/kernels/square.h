/* SPDX-License-Identifier: MIT */
/*
 * square.h: how the CPU's backward (cpu/bwd_tile.c) cuts queries and keys into chunks, for the kernel and for the
 * planner, who says whether key chunks are grouped (abi.h: dq_split_keys): a plain function of both.
 */
#ifndef FMHA_KERNELS_SQUARE_H
#define FMHA_KERNELS_SQUARE_H

#include <kernels/abi.h>

#define SQUARE_CHUNKS 128 /* at most; longer sequences get longer chunks */

struct square {
	abi_i32 chunk_q, chunk_k; /* rows, keys */
	abi_i32 n_q, n_k;         /* chunks */
	abi_i32 group;            /* key chunks that share a split of dq_acc */
	abi_i32 turns;            /* until each of a group has met each query chunk */
};

static inline abi_i32 square_chunk(abi_i32 length, abi_i32 unit)
{
	while ((length + unit - 1) / unit > SQUARE_CHUNKS)
		unit *= 2;
	return unit;
}

/*
 * Rows of a query chunk. The longer it is, the less often keys are packed and dK and dV touched
 * for the same work; but tasks of a phase are no more than there are chunks. A kv head's task does
 * the work of its whole group: shorter query chunks for larger groups.
 * Worked, tiles of 96 rows: 1 sequence of 2 heads, 1024 rows: 384, three chunks a head, 6 tasks at a
 * time; 4 sequences of 16 heads: 1536, one chunk a head, 64 tasks.
 */
static inline abi_i32 square_rows(const struct abi_bwd_args *a, abi_i32 tile_rows)
{
	enum { ENOUGH_TASKS = 32 };
	abi_i32 heads_a_key = a->nhead_q / a->nhead_k, rows = a->sequences.seqlen_q_max;
	abi_i32 unit = heads_a_key == 1   ? 4 * tile_rows
		       : heads_a_key == 2 ? 2 * tile_rows
					  : tile_rows;
	abi_i64 heads = (abi_i64)a->sequences.batch * a->nhead_k;

	while (unit < rows && heads * ((rows + 2 * unit - 1) / (2 * unit)) >= ENOUGH_TASKS)
		unit *= 2;
	return unit;
}

/* Of a sequence of so many rows and keys. Chunks are cut by the longest one's lengths, so that task numbers mean
 * the same for all. */
static inline struct square square_of(const struct abi_bwd_args *a, abi_i32 tile_rows,
				      abi_i32 tile_keys, abi_i32 rows, abi_i32 keys)
{
	const struct abi_sequences *s = &a->sequences;
	struct square x = {.chunk_q = square_chunk(s->seqlen_q_max, square_rows(a, tile_rows)),
			   .chunk_k = square_chunk(s->seqlen_k_max, tile_keys)};
	abi_i32 wide;

	x.n_q = (rows + x.chunk_q - 1) / x.chunk_q;
	x.n_k = (keys + x.chunk_k - 1) / x.chunk_k;
	x.group = x.n_k;
	if (a->dq_split_keys > 0) /* no more groups than splits: ceil(ceil(keys / chunk) / group) */
		x.group = (a->dq_split_keys - 1) / x.chunk_k + 1;
	wide = x.group < x.n_k ? x.group : x.n_k;
	x.turns = x.n_q > wide ? x.n_q : wide;
	return x;
}

#endif
