/* SPDX-License-Identifier: MIT */
/*
 * prepare.h: the tables of a problem out of integer tensors that nobody has judged. What kernels
 * get is what the host would have copied had it looked at the tensors (daemon/dispatch/indices.c);
 * where that refuses, here numbers are cut to what the problem allows: the result is undefined, but
 * every start, length and page lies inside of the tensors.
 *
 * Plain functions that C and device C++ both read, in steps with a barrier between them: threads of
 * one block own runs of sequences, of one each while that is enough, since what a thread does in
 * turn is loads that wait for memory. Running maxima and sums over the runs before theirs come out
 * of what each has left in memory of the block.
 */
#ifndef FMHA_GPU_PREPARE_H
#define FMHA_GPU_PREPARE_H

#include <kernels/dq_acc.h>

#ifdef __cplusplus
#define PREPARE_FN DEV
#else
#define PREPARE_FN static inline
#endif

#define PREPARE_THREADS 256
#define PREPARE_SQUAD   16 /* threads whose runs are looked at as one by those behind them */
#define PREPARE_SQUADS  (PREPARE_THREADS / PREPARE_SQUAD)

/* Where the next sequence starts at the earliest. */
struct prepare_starts {
	abi_i32 q, k, pages;
};

/* What the threads of a block tell each other: of their run, and of a squad's, the largest start
 * and dq_acc. */
struct prepare_shared {
	struct prepare_starts starts[PREPARE_THREADS], squads[PREPARE_SQUADS];
	abi_i64 dq_acc[PREPARE_THREADS], dq_acc_squads[PREPARE_SQUADS]; /* elements */
};

struct prepare_run {
	abi_i32 begin, end; /* sequences */
};

/* One sequence, as kernels are to see it. */
struct prepare_sequence {
	struct prepare_starts starts;
	abi_i32 rows; /* that it occupies */
	abi_i32 seqlen_q, before, after, leftpad, last_page_len;
	abi_i64 dq_acc; /* elements */
	abi_i32 nsplits;
};

/* Where nothing lies between the two it is @low. */
PREPARE_FN abi_i32 prepare_clamp(abi_i64 x, abi_i64 low, abi_i64 high)
{
	x = x > high ? high : x;
	return (abi_i32)(x < low ? low : x);
}

PREPARE_FN abi_i32 prepare_word(struct abi_words words, abi_i64 i)
{
	return words.data[i * words.stride];
}

/* A start on an axis of @total, which leaves room for @room behind it. */
PREPARE_FN abi_i32 prepare_start(struct abi_words words, abi_i32 b, abi_i32 total, abi_i32 room)
{
	return words.data
		       ? prepare_clamp(prepare_word(words, b), 0, total > room ? total - room : 0)
		       : 0;
}

PREPARE_FN abi_i32 prepare_later(abi_i32 a, abi_i32 b)
{
	return a > b ? a : b;
}

PREPARE_FN struct prepare_run prepare_run_of(const struct abi_prepare_args *a, abi_i32 thread)
{
	abi_i32 batch = a->sequences.batch, n = (batch + PREPARE_THREADS - 1) / PREPARE_THREADS;
	struct prepare_run run;

	n = n > 1 ? n : 1;
	run.begin = thread < batch / n + 1 ? thread * n : batch;
	run.end = batch - run.begin > n ? run.begin + n : batch;
	return run;
}

/* The starts of sequence @b, which come no earlier than @from. */
PREPARE_FN struct prepare_starts prepare_starts_of(const struct abi_prepare_args *a, abi_i32 b,
						   struct prepare_starts from)
{
	abi_i32 last = b == a->sequences.batch;

	from.q = prepare_later(from.q, prepare_start(a->seqstart_q, b, a->sequences.total_q, 0));
	from.k = prepare_later(from.k, prepare_start(a->seqstart_k, b, a->sequences.total_k,
						     last ? 0 : a->seqlen_new));
	from.pages = prepare_later(from.pages,
				   prepare_start(a->kv_indptr, b, a->cache.n_page_indices, 0));
	return from;
}

/* Keys that each sequence has room for, where they have no lists of their own. */
PREPARE_FN abi_i64 prepare_room(const struct abi_prepare_args *a)
{
	const struct abi_kv_cache *cache = &a->cache;
	abi_i64 most = a->sequences.seqlen_k_max, room = most;

	if (a->block_table.data)
		room = (abi_i64)cache->max_blocks * cache->page_size;
	if (cache->page_size > 0 && cache->n_pages == 0)
		room = 0;
	return room < most ? room : most;
}

/* Keys that sequence @b has room for. */
PREPARE_FN abi_i64 prepare_capacity(const struct abi_prepare_args *a, abi_i32 b,
				    struct prepare_starts from, struct prepare_starts to,
				    abi_i32 *ret_last_page_len)
{
	const struct abi_kv_cache *cache = &a->cache;
	abi_i64 room = prepare_room(a), capacity = room;

	*ret_last_page_len = cache->page_size;
	if (a->kv_indptr.data) {
		abi_i64 pages = (abi_i64)to.pages - from.pages;

		if (pages > 0)
			*ret_last_page_len = prepare_clamp(prepare_word(a->kv_last_page_len, b), 1,
							   cache->page_size);
		capacity = pages > 0 ? (pages - 1) * cache->page_size + *ret_last_page_len : 0;
	} else if (a->seqstart_k.data) {
		capacity = to.k - from.k;
	}
	return capacity < room ? capacity : room;
}

PREPARE_FN struct dq_acc_layout prepare_dq_acc(const struct abi_prepare_args *a)
{
	struct dq_acc_layout layout = {a->nhead_q, a->hdim_q, a->dq_tile_rows, a->dq_tile_floats};

	return layout;
}

/* @from: where it starts. */
PREPARE_FN struct prepare_sequence prepare_sequence_of(const struct abi_prepare_args *a, abi_i32 b,
						       struct prepare_starts from)
{
	struct prepare_starts to = prepare_starts_of(a, b + 1, from);
	struct dq_acc_layout dq_acc = prepare_dq_acc(a);
	struct prepare_sequence s;
	abi_i64 capacity = prepare_capacity(a, b, from, to, &s.last_page_len);

	s.starts = from;
	s.rows = a->seqstart_q.data ? to.q - from.q : a->sequences.seqlen_q_max;
	s.seqlen_q = a->seqlen_q.data ? prepare_clamp(prepare_word(a->seqlen_q, b), 0, s.rows)
				      : s.rows;
	s.before = prepare_clamp(capacity - a->seqlen_new, 0, capacity);
	if (a->seqlen_k.data)
		s.before = prepare_clamp(prepare_word(a->seqlen_k, b), 0, s.before);
	s.after = prepare_clamp((abi_i64)s.before + a->seqlen_new, 0, capacity);
	s.leftpad = a->leftpad_k.data ? prepare_clamp(prepare_word(a->leftpad_k, b), 0, s.after)
				      : 0;
	s.nsplits = a->dq_splits;
	if (a->dq_tile_n0 > 0)
		s.nsplits = (s.after + a->dq_tile_n0 - 1) / a->dq_tile_n0;
	s.dq_acc = dq_acc_sequence(&dq_acc, s.rows, s.nsplits);
	return s;
}

/* The tensors' own lists are const for kernels. */
PREPARE_FN void prepare_put(const abi_i32 *list, abi_i32 i, abi_i32 value)
{
	if (list)
		((abi_i32 *)list)[i] = value;
}

PREPARE_FN void prepare_put_starts(const struct abi_prepare_args *a, abi_i32 b,
				   struct prepare_starts starts)
{
	prepare_put(a->sequences.seqstart_q, b, starts.q);
	prepare_put(a->sequences.seqstart_k, b, starts.k);
	prepare_put(a->cache.kv_indptr, b, starts.pages);
}

PREPARE_FN void prepare_put_sequence(const struct abi_prepare_args *a, abi_i32 b,
				     const struct prepare_sequence *s)
{
	prepare_put_starts(a, b, s->starts);
	prepare_put(a->sequences.seqlen_q, b, s->seqlen_q);
	prepare_put(a->sequences.seqlen_k, b, s->after);
	prepare_put(a->sequences.leftpad_k, b, s->leftpad);
	prepare_put(a->seqlen_k_before, b, s->before);
	prepare_put(a->cache.kv_last_page_len, b, s->last_page_len);
	if (a->cache.cache_batch_idx)
		prepare_put(a->cache.cache_batch_idx, b,
			    prepare_clamp(prepare_word(a->cache_batch_idx, b), 0,
					  a->cache.cache_batch - 1));
	if (a->nsplits && b < a->nsplits_entries)
		a->nsplits[b] = s->nsplits;
}

/* Whether no sequence begins, or has anything, behind the others: a run need not wait for those
 * before it. */
PREPARE_FN int prepare_stands_alone(const struct abi_prepare_args *a)
{
	return !a->seqstart_q.data && !a->seqstart_k.data && !a->kv_indptr.data &&
	       !a->dq_acc_offsets;
}

/*
 * What prepare_sequence_of() makes where lengths of keys are all that is wanted (abi.h): the most
 * usual tables of a decode. In few instructions: they are fetched anew behind each other kernel,
 * and nothing of the steps below is.
 */
PREPARE_FN void prepare_keys(const struct abi_prepare_args *a, abi_i64 room, abi_i32 thread)
{
	for (abi_i32 b = thread; b < a->sequences.batch; b += PREPARE_THREADS) {
		abi_i32 before = prepare_clamp(room - a->seqlen_new, 0, room);

		if (a->seqlen_k.data)
			before = prepare_clamp(prepare_word(a->seqlen_k, b), 0, before);
		prepare_put(a->seqlen_k_before, b, before);
		prepare_put(a->sequences.seqlen_k, b,
			    prepare_clamp((abi_i64)before + a->seqlen_new, 0, room));
	}
}

/* ---- the steps of one block ---- */

PREPARE_FN void prepare_first_step(const struct abi_prepare_args *a, abi_i32 thread,
				   struct prepare_shared *shared)
{
	struct prepare_run run = prepare_run_of(a, thread);
	struct prepare_starts most = {0, 0, 0};

	if (prepare_stands_alone(a))
		return;
	for (abi_i32 b = run.begin; b < run.end; b++)
		most = prepare_starts_of(a, b, most);
	shared->starts[thread] = most;
}

PREPARE_FN struct prepare_starts prepare_latest(const struct prepare_starts *list, abi_i32 begin,
						abi_i32 end, struct prepare_starts most)
{
	for (abi_i32 i = begin; i < end; i++) {
		most.q = prepare_later(most.q, list[i].q);
		most.k = prepare_later(most.k, list[i].k);
		most.pages = prepare_later(most.pages, list[i].pages);
	}
	return most;
}

PREPARE_FN void prepare_second_step(const struct abi_prepare_args *a, abi_i32 thread,
				    struct prepare_shared *shared)
{
	struct prepare_starts none = {0, 0, 0};
	abi_i32 begin = thread * PREPARE_SQUAD;

	if (thread < PREPARE_SQUADS && !prepare_stands_alone(a))
		shared->squads[thread] = prepare_latest(shared->starts, begin,
							begin + PREPARE_SQUAD, none);
}

/* Where the run of @thread starts. */
PREPARE_FN struct prepare_starts prepare_starts_before(const struct abi_prepare_args *a,
						       abi_i32 thread,
						       const struct prepare_shared *shared)
{
	struct prepare_starts most = {0, 0, 0};
	abi_i32 squad = thread / PREPARE_SQUAD;

	if (prepare_stands_alone(a) || prepare_run_of(a, thread).begin == a->sequences.batch)
		return most;
	most = prepare_latest(shared->squads, 0, squad, most);
	return prepare_latest(shared->starts, squad * PREPARE_SQUAD, thread, most);
}

PREPARE_FN void prepare_third_step(const struct abi_prepare_args *a, abi_i32 thread,
				   struct prepare_shared *shared)
{
	struct prepare_run run = prepare_run_of(a, thread);
	struct prepare_starts from = prepare_starts_before(a, thread, shared);

	shared->dq_acc[thread] = 0;
	for (abi_i32 b = run.begin; b < run.end; b++) {
		struct prepare_sequence s;

		from = prepare_starts_of(a, b, from);
		s = prepare_sequence_of(a, b, from);
		prepare_put_sequence(a, b, &s);
		shared->dq_acc[thread] += s.dq_acc;
	}
	if (run.begin < run.end && run.end == a->sequences.batch)
		prepare_put_starts(a, run.end, prepare_starts_of(a, run.end, from));
}

PREPARE_FN abi_i64 prepare_sum(const abi_i64 *list, abi_i32 begin, abi_i32 end)
{
	abi_i64 sum = 0;

	for (abi_i32 i = begin; i < end; i++)
		sum += list[i];
	return sum;
}

PREPARE_FN void prepare_fourth_step(const struct abi_prepare_args *a, abi_i32 thread,
				    struct prepare_shared *shared)
{
	abi_i32 begin = thread * PREPARE_SQUAD;

	if (a->dq_acc_offsets && thread < PREPARE_SQUADS)
		shared->dq_acc_squads[thread] =
			prepare_sum(shared->dq_acc, begin, begin + PREPARE_SQUAD);
}

PREPARE_FN void prepare_last_step(const struct abi_prepare_args *a, abi_i32 thread,
				  const struct prepare_shared *shared)
{
	struct prepare_run run = prepare_run_of(a, thread);
	struct prepare_starts from;
	abi_i32 squad = thread / PREPARE_SQUAD;
	abi_i64 offset;

	if (thread == 0 && a->nsplits && a->sequences.batch == 0)
		a->nsplits[0] = a->dq_splits;
	if (!a->dq_acc_offsets)
		return;
	if (thread == 0)
		a->dq_acc_offsets[0] = 0;
	if (run.begin >= run.end)
		return;
	from = prepare_starts_before(a, thread, shared);
	offset = prepare_sum(shared->dq_acc_squads, 0, squad) +
		 prepare_sum(shared->dq_acc, squad * PREPARE_SQUAD, thread);
	for (abi_i32 b = run.begin; b < run.end; b++) {
		from = prepare_starts_of(a, b, from);
		offset += prepare_sequence_of(a, b, from).dq_acc;
		a->dq_acc_offsets[b + 1] = offset;
	}
}

/* One of PREPARE_STEPS, between which all threads of the block wait for each other. */
#define PREPARE_STEPS 5
PREPARE_FN void prepare_step(const struct abi_prepare_args *a, int step, abi_i32 thread,
			     struct prepare_shared *shared)
{
	switch (step) {
	case 0:
		prepare_first_step(a, thread, shared);
		break;
	case 1:
		prepare_second_step(a, thread, shared);
		break;
	case 2:
		prepare_third_step(a, thread, shared);
		break;
	case 3:
		prepare_fourth_step(a, thread, shared);
		break;
	default:
		prepare_last_step(a, thread, shared);
	}
}

/* ---- page numbers: every thread of the other blocks takes its share ---- */

/* @block: above 0. */
PREPARE_FN void prepare_pages(const struct abi_prepare_args *a, abi_i32 block,
			      abi_i32 thread_of_block)
{
	const struct abi_kv_cache *cache = &a->cache;
	abi_i64 thread = (abi_i64)(block - 1) * PREPARE_THREADS + thread_of_block;
	abi_i64 n_threads = (abi_i64)(a->grid - 1) * PREPARE_THREADS;
	abi_i64 n_blocks = (abi_i64)a->table_rows * cache->max_blocks;

	for (abi_i64 i = thread; cache->kv_page_indices && i < cache->n_page_indices;
	     i += n_threads)
		prepare_put(
			cache->kv_page_indices, (abi_i32)i,
			prepare_clamp(prepare_word(a->kv_page_indices, i), 0, cache->n_pages - 1));
	for (abi_i64 i = thread; cache->block_table && i < n_blocks; i += n_threads) {
		/* a division of 64 bits takes longer than all else */
		abi_i64 row = i <= 0x7fffffff ? (abi_u32)i / (abi_u32)cache->max_blocks
					      : i / cache->max_blocks,
			column = i - row * cache->max_blocks;
		abi_i32 page = a->block_table.data[row * a->block_table_stride_row +
						   column * a->block_table.stride];

		((abi_i32 *)cache->block_table)[i] = prepare_clamp(page, 0, cache->n_pages - 1);
	}
}

#endif
