/* SPDX-License-Identifier: MIT */
/*
 * bwd_tiles.h: dq_acc as bwd_wgmma.h fills it. A head's rows are tiles of `rows` queries, the last
 * one padded; a tile is what two warpgroups hold of dQ^T, as they hold it: chunks of 64 of the head
 * dimension by `queries`, stored in fours, [query / 8][thread]: two neighbouring queries of head
 * dimension 16 (thread / 32) + thread / 4 % 8, then of the one 8 further. Warpgroups share the head
 * dimension or, if it is one slab of 64, the queries. Of a slab and a half (lds_bwd_dq_by_rows()) a
 * tile is what one warpgroup holds of dQ, in fours [column / 8][thread]: two neighbouring columns
 * of query 16 (thread / 32) + thread / 4 % 8, then of the query 8 further.
 *
 * Behind a warpgroup's chunks lies a counter: how many blocks of keys have been added.
 */
#ifndef FMHA_GPU_BWD_TILES_H
#define FMHA_GPU_BWD_TILES_H

#include "core/geometry.h"

#define DQ_FN METHOD constexpr

struct DqCut {
	i32 rows, slabs;

	METHOD static DqCut make(const abi_bwd_args &a)
	{
		return DqCut{a.dq_tile_rows, grid_dq_slabs(&a)};
	}
	DQ_FN bool by_queries() const { return slabs == 1; }
	/* No whole slabs: then cut is by halves of the queries, as of one slab. */
	METHOD static bool are_rows(const abi_bwd_args &a)
	{
		return (a.dq_tile_floats - 2 * LDS_DQ_COUNTER) % (64 * a.dq_tile_rows) != 0;
	}
	/* Chunks of a warpgroup: of an odd number the second has more, as the first one's steps
	 * take longer. */
	DQ_FN i32 blocks(i32 part) const { return by_queries() ? 1 : (slabs + part) / 2; }
	DQ_FN i32 queries() const { return by_queries() ? rows / 2 : rows; }
	DQ_FN i32 chunk_floats() const { return 64 * queries(); }
	DQ_FN i32 part_floats(i32 part) const
	{
		return blocks(part) * chunk_floats() + LDS_DQ_COUNTER;
	}
	DQ_FN i32 part_at(i32 part) const { return part * part_floats(0); }
	DQ_FN i32 first_query(i32 part) const { return by_queries() ? part * queries() : 0; }
	DQ_FN i32 slab(i32 part, i32 block) const
	{
		return by_queries() ? block : part * blocks(0) + block;
	}
};
#undef DQ_FN

/* Sums of dK and dV: every part of the heads is as a head of a dense tensor. */
DEV abi_tensor kv_sums_of(const abi_bwd_args &a, float *from, i32 hdim)
{
	return abi_tensor{from, (i64)a.sequences.seqlen_k_max * hdim, hdim,
			  (i64)a.sequences.total_k * hdim, 1};
}
DEV abi_tensor dk_sums_of(const abi_bwd_args &a) { return kv_sums_of(a, a.kv_acc, a.hdim_q); }
DEV abi_tensor dv_sums_of(const abi_bwd_args &a)
{
	i64 rows = (i64)grid_kv_parts(&a) * a.sequences.total_k;

	return kv_sums_of(a, a.kv_acc + rows * a.hdim_q, a.hdim_v);
}

/* The tiles of a head: where the first of them lies, and floats of all of them. */
DEV float *dq_head_of(const abi_bwd_args &a, const Sequence &v, i32 head, i64 *ret_floats)
{
	dq_acc_layout layout = dq_layout_of(a);
	i32 rows;
	float *sequence = dq_acc_of(a, v, &rows);

	*ret_floats = dq_acc_head(&layout, rows, 1);
	return sequence + head * *ret_floats;
}

#endif
