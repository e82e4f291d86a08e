/* SPDX-License-Identifier: MIT */
/*
 * workspace.c: the backward workspace, one block for all three stages.
 *
 *   head  nsplits        int32 [batch] in group mode where it is deterministic or split by keys, else
 *                        [1]; rounded up to 16 bytes
 *         dq_acc_offsets int64 [batch + 1], group mode only, in elements; rounded up to 16 bytes
 *         neither where dQ is written directly: nobody asks then
 *   data  order          order_words int32: the order in which dq_dk_dv takes keys
 *         d              f32, one a row of queries: rowsum(dO * O)
 *         kv_acc         f32 [nhead_k, kv_parts, total_k, hdim_q], then with hdim_v: dK and dV, where heads that
 *                        share keys are in parts
 *         stages' shares
 *         dq_acc         f32, per sequence [nhead_q, nsplits_i, seqlen_q_i, hdim_q], compact; or
 *                        [nhead_q, tiles_i], tiles of dq_tile_rows rows as a pipeline lays them out:
 *                        dq_acc.h has the sizes, which kernels go by, too
 *
 * The host, or in a local launch the prepare stage, writes the head, so convert_dq learns from it
 * how many partial sums to add and where they lie, and one convert_dq serves every dq_dk_dv tile.
 * seqlen_q_i counts padding rows.
 *
 * dq_acc comes last, so that in group mode a run's workspace ends where its own sequences do: the
 * plan says the most, total_q rows with the splits of the longest sequence.
 */
#include <string.h>

#include <kernels/dq_acc.h>

#include "internal.h"

/*
 * Batch mode, deterministic: `workers` persistent workgroups take equal runs of the batch * nhead *
 * tiles list, where tiles = ceil(seqlen_k / tile_n0) a head. Every worker that touches a head sums
 * into a buffer of its own, so a head needs as many as runs can meet it.
 * Worked: seqlen_k 1024, tile_n0 128: 8 tiles a head; batch 2, 4 heads: 64 tiles.
 *   16 workers: 4 tiles a run, 8 % 4 == 0: runs start on head borders: 8 / 4 = 2.
 *    8 workers: 8 tiles a run: one head a run: 1. 4 workers: 16 a run, two heads a run: 1.
 *   22 workers: 3 tiles a run: a head's 8 tiles start anywhere in one: at most 1 + ceil(7 / 3) = 4.
 */
int32_t bwd_persistent_splits(const struct fmha_problem *problem, int64_t tile_n0, int64_t workers)
{
	int64_t tiles = ceil_div(problem->seqlen_k, tile_n0);
	int64_t run = ceil_div((int64_t)problem->batch * problem->nhead_q * tiles, workers);

	if (tiles == 0 || run == 0)
		return 1;
	if (tiles % run == 0)
		return (int32_t)(tiles / run);
	if (run % tiles == 0)
		return 1;
	return (int32_t)(1 + ceil_div(tiles - 1, run));
}

static struct dq_acc_layout layout_of(const struct plan *plan)
{
	return (struct dq_acc_layout){.nhead_q = plan->problem.nhead_q,
				      .hdim_q = plan->problem.hdim_q,
				      .tile_rows = plan->dq_tile_rows,
				      .tile_floats = plan->dq_tile_floats};
}

static int64_t tiles_of(const struct plan *plan, int32_t rows)
{
	struct dq_acc_layout layout = layout_of(plan);

	return (int64_t)dq_acc_tiles(&layout, rows) * plan->problem.nhead_q;
}

int64_t bwd_workspace_tiles(const struct plan *plan)
{
	int64_t batch = plan->problem.batch;

	int64_t rows = plan->dq_tile_rows;

	if (!plan_packed_q(plan))
		return batch * tiles_of(plan, plan->problem.seqlen_q);
	/* Sequences of rows n_i that add up to total_q, of which each may leave all but one row of its last
	 * tile empty: the sum of ceil(n_i / rows) is at most floor((total_q + batch * (rows - 1)) / rows),
	 * and there are such lengths. The longest one's says no more: who has only promised it to a launch of
	 * his own has to stay inside, too. */
	return (plan->problem.total_q + batch * (rows - 1)) / rows * plan->problem.nhead_q;
}

int bwd_workspace_size(const struct plan *plan, enum dq_mode mode, int64_t tile_n0, int64_t workers,
		       struct bwd_workspace *ret_workspace, struct fmha_error *err)
{
	const struct fmha_problem *problem = &plan->problem;
	bool group = plan_packed_q(plan);
	struct bwd_workspace w = {0};
	int64_t total_q = plan_total_q(plan);
	uint64_t batch = (uint64_t)problem->batch, d_bytes = 0, kv_bytes = 0, order;
	bool per_sequence = group && (problem->deterministic || mode == DQ_PER_TILE);
	uint64_t entries = mode == DQ_DIRECT ? 0 : per_sequence ? batch : 1;
	int r;

	switch (mode) {
	case DQ_DIRECT:
		break;
	case DQ_ATOMIC:
		w.dq_splits = 1;
		w.zero = true; /* the adds need something to add to */
		break;
	case DQ_PER_TILE:
		w.dq_splits = (int32_t)ceil_div(problem->seqlen_k, tile_n0);
		/* AMD's own skip a masked tile and leave its buffer as it was; ours write all of each. */
		w.zero = problem->mask != FMHA_MASK_NONE && plan->dq_split_keys == 0;
		break;
	case DQ_PERSISTENT:
		w.dq_splits = bwd_persistent_splits(problem, tile_n0, workers);
		w.zero = true; /* not every worker of a head meets every row */
		break;
	case DQ_SINGLE:
		w.dq_splits = 1;
		break;
	case DQ_TILES:
		w.dq_splits = 1;
		w.zero = true;
		break;
	}
	if (mode == DQ_TILES)
		r = workspace_product(&w.dq_acc_bytes, err, 3,
				      (const int64_t[]){bwd_workspace_tiles(plan),
							plan->dq_tile_floats,
							(int64_t)sizeof(float)});
	else
		r = workspace_product(&w.dq_acc_bytes, err, 5,
				      (const int64_t[]){total_q, problem->nhead_q, w.dq_splits,
							problem->hdim_q, (int64_t)sizeof(float)});
	if (r < 0)
		return r;
	r = workspace_product(&d_bytes, err, 3,
			      (const int64_t[]){total_q, problem->nhead_q, (int64_t)sizeof(float)});
	if (r < 0)
		return r;
	if (plan->kv_parts > 1)
		r = workspace_product(&kv_bytes, err, 5,
				      (const int64_t[]){plan->kv_parts, problem->nhead_k,
							plan_total_k(plan),
							(int64_t)problem->hdim_q + problem->hdim_v,
							(int64_t)sizeof(float)});
	if (r < 0)
		return r;
	if (!workspace_add(&w.bytes, 16, entries * sizeof(int32_t), &w.nsplits) ||
	    (group && mode != DQ_DIRECT &&
	     !workspace_add(&w.bytes, 16, (batch + 1) * sizeof(int64_t), &w.dq_acc_offsets)) ||
	    !workspace_add(&w.bytes, 16, 0, &w.head_bytes) ||
	    !workspace_add(&w.bytes, 16, (uint64_t)plan->order_words * sizeof(int32_t), &order) ||
	    !workspace_add(&w.bytes, 16, d_bytes, &w.d) ||
	    !workspace_add(&w.bytes, 16, kv_bytes, &w.kv_acc))
		return fmha_error_refuse(err, "workspace", "its size does not fit in 62 bits");
	*ret_workspace = w;
	return 0;
}

/* Keys of sequence @b as the kernels see them. */
static int64_t keys_of(const struct plan *plan, const struct index_tables *tables, int32_t b)
{
	if (tables->seqlen_k)
		return tables->seqlen_k[b];
	if (tables->seqstart_k)
		return tables->seqstart_k[b + 1] - tables->seqstart_k[b];
	return plan->problem.seqlen_k;
}

static int32_t splits_of(const struct plan *plan, const struct index_tables *tables, int32_t b)
{
	if (!plan->dq_per_sequence)
		return plan->dq_splits;
	return (int32_t)ceil_div(keys_of(plan, tables, b), plan->dq_tile_n0);
}

/* Elements of sequence @b in dq_acc. */
static int64_t dq_acc_elements(const struct plan *plan, const struct index_tables *tables,
			       int32_t b)
{
	struct dq_acc_layout layout = layout_of(plan);

	return dq_acc_sequence(&layout, tables->seqstart_q[b + 1] - tables->seqstart_q[b],
			       splits_of(plan, tables, b));
}

uint64_t bwd_workspace_dq_acc(const struct plan *plan, const struct index_tables *tables)
{
	int64_t elements = 0;

	for (int32_t b = 0; b < plan->problem.batch; b++)
		elements += dq_acc_elements(plan, tables, b);
	return (uint64_t)elements * sizeof(float);
}

void bwd_workspace_head(const struct plan *plan, const struct index_tables *tables, void *head)
{
	int32_t *nsplits = (int32_t *)((char *)head + plan->layout.nsplits);
	int64_t *offsets = (int64_t *)((char *)head + plan->layout.dq_acc_offsets);
	bool group = plan_packed_q(plan);

	if (plan->workspace_head_bytes == 0)
		return;
	memset(head, 0, plan->workspace_head_bytes);
	nsplits[0] = plan->dq_splits;
	for (int32_t b = 0; group && b < plan->problem.batch; b++) {
		if (plan->problem.deterministic || plan->dq_per_sequence)
			nsplits[b] = splits_of(plan, tables, b);
		offsets[b + 1] = offsets[b] + dq_acc_elements(plan, tables, b);
	}
}
