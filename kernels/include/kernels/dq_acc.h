/* SPDX-License-Identifier: MIT */
/*
 * dq_acc.h: how much room the partial sums of dQ take (abi.h), for the host that asks for it, for whoever says where a
 * sequence's lie, and for the kernels that find their way there. Plain functions that C and device C++ both read.
 */
#ifndef FMHA_KERNELS_DQ_ACC_H
#define FMHA_KERNELS_DQ_ACC_H

#include <kernels/abi.h>

#ifdef __cplusplus
#define DQ_ACC_FN DEV
#else
#define DQ_ACC_FN static inline
#endif

struct dq_acc_layout {
	abi_i32 nhead_q, hdim_q;
	abi_i32 tile_rows, tile_floats; /* 0: row by row */
};

/* Tiles of a head of a sequence that occupies @rows: each sequence has a last one of its own. */
DQ_ACC_FN abi_i32 dq_acc_tiles(const struct dq_acc_layout *layout, abi_i32 rows)
{
	return rows / layout->tile_rows + (rows % layout->tile_rows != 0);
}

/* Elements of one head of such a sequence. Tiles are not split: blocks add to them. */
DQ_ACC_FN abi_i64 dq_acc_head(const struct dq_acc_layout *layout, abi_i32 rows, abi_i32 n_splits)
{
	if (layout->tile_rows > 0)
		return (abi_i64)dq_acc_tiles(layout, rows) * layout->tile_floats;
	return (abi_i64)n_splits * rows * layout->hdim_q;
}

/* Elements of all heads of one: as far as the next sequence's are from its own. */
DQ_ACC_FN abi_i64 dq_acc_sequence(const struct dq_acc_layout *layout, abi_i32 rows,
				  abi_i32 n_splits)
{
	return layout->nhead_q * dq_acc_head(layout, rows, n_splits);
}

#endif
