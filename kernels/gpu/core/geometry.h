/* SPDX-License-Identifier: MIT */
/*
 * geometry.h: where sequences lie, what a row may see, where keys are stored. The device twin of
 * kernels/view.h, except that everything read from integer tensors is clamped here: those tensors
 * are client memory, and whatever they hold must not make a kernel fault.
 */
#ifndef FMHA_GPU_GEOMETRY_H
#define FMHA_GPU_GEOMETRY_H

#include "types.h"

#include "block_order.h"

#include <kernels/dq_acc.h>

/* One sequence. Rows and columns count from its first query and its first real key. */
struct Sequence {
	i32 batch;
	i32 q_start, k_start; /* on the packed axes; 0 in batch mode */
	i32 n_q, n_k;         /* rows; columns without left padding */
	i32 leftpad;          /* cache position of column 0 */
	bool packed_q, packed_k;
};

/* A row of queries. */
struct RowPlace {
	i32 row, head; /* of the sequence; of the problem */
};

DEV i32 pages_of(const abi_kv_cache &c, i32 b, i32 *ret_first)
{
	i32 first = c.kv_indptr[b], last = c.kv_indptr[b + 1];

	if (c.n_page_indices > 0) {
		first = clamp(first, 0, c.n_page_indices);
		last = clamp(last, first, c.n_page_indices);
	}
	*ret_first = first;
	return max_of(last - first, 0);
}

/* Keys of sequence b, left padding included, never more than there is room for. */
DEV i32 keys_of(const abi_sequences &s, const abi_kv_cache *cache, i32 b, i32 start)
{
	i32 n = s.seqlen_k_max, room = s.seqlen_k_max;

	if (s.seqstart_k) {
		n = s.seqstart_k[b + 1] - s.seqstart_k[b];
		if (s.total_k > 0)
			room = min_of(room, s.total_k - start);
	} else if (cache && cache->kv_indptr) {
		i32 first, pages = pages_of(*cache, b, &first);

		n = pages ? (pages - 1) * cache->page_size + cache->kv_last_page_len[b] : 0;
		room = min_of(room, pages * cache->page_size);
	} else if (cache && cache->block_table && cache->max_blocks > 0) {
		room = min_of(room, cache->max_blocks * cache->page_size);
	}
	if (s.seqlen_k)
		n = s.seqlen_k[b];
	return clamp(n, 0, max_of(room, 0));
}

DEV Sequence find_sequence(const abi_sequences &s, const abi_kv_cache *cache, i32 b)
{
	Sequence v;
	i32 n = s.seqlen_q_max;

	v.batch = b;
	v.packed_q = s.seqstart_q != 0;
	v.packed_k = s.seqstart_k != 0;
	v.q_start = v.k_start = v.leftpad = 0;
	if (s.seqstart_q) {
		v.q_start = clamp(s.seqstart_q[b], 0, s.total_q);
		n = clamp(s.seqstart_q[b + 1] - v.q_start, 0, s.total_q - v.q_start);
	}
	v.n_q = s.seqlen_q ? clamp(s.seqlen_q[b], 0, n) : n;
	if (s.seqstart_k)
		v.k_start = max_of(
			s.total_k > 0 ? min_of(s.seqstart_k[b], s.total_k) : s.seqstart_k[b], 0);
	v.n_k = keys_of(s, cache, b, v.k_start);
	if (s.leftpad_k) {
		v.leftpad = clamp(s.leftpad_k[b], 0, v.n_k);
		v.n_k -= v.leftpad;
	}
	return v;
}

/* Element 0 of row `row` of a tensor along the query axis: q, o, d_o, bias, randval, ... */
DEV i64 q_offset(const abi_tensor &t, const Sequence &v, i32 row, i32 head)
{
	return (v.packed_q ? 0 : v.batch * t.stride_batch) + ((i64)v.q_start + row) * t.stride_seq +
	       head * t.stride_head;
}

DEV i64 rows_offset(const abi_rows &r, const Sequence &v, i32 row, i32 head)
{
	return (v.packed_q ? 0 : v.batch * r.stride_batch) + ((i64)v.q_start + row) * r.stride_seq +
	       head * r.stride_head;
}

/* How many partial sums of dQ a sequence has. */
DEV i32 splits_of(const abi_bwd_args &a, i32 batch)
{
	return a.nsplits[a.sequences.seqstart_q && a.deterministic ? batch : 0];
}

DEV dq_acc_layout dq_layout_of(const abi_bwd_args &a)
{
	return dq_acc_layout{a.nhead_q, a.hdim_q, a.dq_tile_rows, a.dq_tile_floats};
}

/* A sequence's partial sums of dQ, and the rows that it occupies there, padding included. */
DEV float *dq_acc_of(const abi_bwd_args &a, const Sequence &v, i32 *ret_physical)
{
	const abi_sequences &s = a.sequences;
	dq_acc_layout layout = dq_layout_of(a);

	if (s.seqstart_q) {
		*ret_physical = clamp(s.seqstart_q[v.batch + 1] - v.q_start, 0,
				      s.total_q - v.q_start);
		return a.dq_acc + a.dq_acc_offsets[v.batch];
	}
	*ret_physical = s.seqlen_q_max;
	return a.dq_acc + v.batch * dq_acc_sequence(&layout, s.seqlen_q_max, a.nsplits[0]);
}

/* Element 0 of column `column` of a contiguous tensor along the key axis. */
DEV i64 k_offset(const abi_tensor &t, const Sequence &v, i32 column, i32 head)
{
	return (v.packed_k ? 0 : v.batch * t.stride_batch) +
	       ((i64)v.k_start + v.leftpad + column) * t.stride_seq + head * t.stride_head;
}

/* Row i sees the columns first(i) .. last(i), and below sink_tokens the ones up to last(i). */
struct Band {
	i32 anchor_left, anchor_right; /* window edges of row 0; far away when unlimited */
	i32 sinks;
	i32 begin, end; /* columns that this kernel may use at all: a split, the sequence */

	/* !MASKED: the kernel was compiled for problems without a mask. */
	template <bool MASKED>
	METHOD static Band make(const abi_band &a, const Sequence &v, i32 begin, i32 end)
	{
		const i32 far = 1 << 29;
		Band b = {-far, far, 0, begin, min_of(end, v.n_k)};

		if (MASKED && a.mask != ABI_MASK_NONE) {
			i32 anchor = a.mask == ABI_MASK_BOTTOM_RIGHT ? v.n_k - v.n_q : 0;

			if (a.window_left >= 0)
				b.anchor_left = anchor - min_of(a.window_left, far);
			if (a.window_right >= 0)
				b.anchor_right = anchor + min_of(a.window_right, far);
			b.sinks = a.sink_tokens;
		}
		return b;
	}

	METHOD i32 first(i32 row) const { return max_of(row + anchor_left, begin); }
	METHOD i32 last(i32 row) const { return min_of(row + anchor_right, end - 1); }

	METHOD bool sees(i32 row, i32 column) const
	{
		return column >= begin && column <= last(row) &&
		       (column >= first(row) || column < sinks);
	}

	/* Whether all rows first_row .. last_row see all of the n columns from `column` on. */
	METHOD bool sees_all(i32 first_row, i32 last_row, i32 column, i32 n) const
	{
		return column + n - 1 <= last(first_row) && column >= first(last_row);
	}
};

/*
 * The column tiles that rows first_row .. last_row need, in order: those with sink tokens, a gap,
 * the band itself. Tiles start at multiples of `width` whatever the split, so that masks that
 * depend on the column (dropout) never straddle, or `lead` columns before those.
 */
struct ColumnTiles {
	i32 width;
	i32 sink_first, n_sink; /* tiles */
	i32 first, count;       /* count: both parts together */
	i32 lead;

	template <bool MASKED>
	METHOD static ColumnTiles make(const Band &b, i32 first_row, i32 last_row, i32 width,
				       i32 lead = 0)
	{
		ColumnTiles t;
		i32 low = max_of(b.first(first_row), 0) + lead, high = b.last(last_row) + lead;
		i32 sink_end = ceil_div(min_of(b.sinks > 0 ? b.sinks + lead : b.sinks, high + 1),
					width);

		t.width = width;
		t.lead = lead;
		t.first = low / width;
		t.sink_first = (b.begin + lead) / width;
		if (high >= low) /* the band's own tiles come once */
			sink_end = min_of(sink_end, t.first);
		t.n_sink = MASKED ? max_of(sink_end - t.sink_first, 0) : 0;
		t.count = t.n_sink + (high >= low ? high / width + 1 - t.first : 0);
		return t;
	}

	/* The other way about: the tiles of n_rows rows that may look at columns first .. last. */
	METHOD static ColumnTiles of_rows(const Band &b, bool masked, i32 first, i32 last,
					  i32 n_rows, i32 height)
	{
		i32 low = 0, high = n_rows - 1;

		if (masked) {
			low = max_of(first - b.anchor_right, 0);
			if (first >= b.sinks)
				high = min_of(high, last - b.anchor_left);
		}
		return ColumnTiles{height,
				   0,
				   0,
				   low / height,
				   high >= low ? high / height + 1 - low / height : 0,
				   0};
	}

	/* Keeps, of tiles without sinks, those that hold some of [low, high). */
	METHOD void narrow(i32 low, i32 high)
	{
		i32 end = min_of(first + count, high > low ? ceil_div(high, width) : 0);

		first = max_of(first, low > 0 ? min_of(low, high) / width : 0);
		count = max_of(end - first, 0);
	}

	/* The same, but for one tile where that is none. */
	METHOD void narrow_to_some(i32 low, i32 high)
	{
		const i32 whole = first;

		narrow(low, high);
		if (count == 0)
			first = whole, count = 1;
	}

	/* First column of the n-th tile. */
	METHOD i32 column(i32 n) const
	{
		return (n < n_sink ? sink_first + n : first + n - n_sink) * width - lead;
	}
};

/* Whether rows of 16-bit elements, `strides` apart, are pairs that lie in aligned words. */
template <class Storage>
DEV bool whole_words(const Storage *base, u64 strides, i64 stride_dim, i32 hdim)
{
	return sizeof(Storage) == 2 && stride_dim == 1 && ((u64)base & 3) == 0 &&
	       ((strides | (u64)hdim) & 1) == 0;
}

template <bool CONDITION, class A, class B> struct Either {
	typedef B Type;
};
template <class A, class B> struct Either<true, A, B> {
	typedef A Type;
};

/* Where keys or values of one head lie: contiguous rows or pages. E: the element type. */
template <class E, bool PAGED> struct KeyView {
	typedef typename E::Storage Storage;
	static const bool CONTIGUOUS = !PAGED; /* rows are stride_seq apart */
	const Storage *base; /* contiguous: column 0 of this head */
	i64 stride_seq, stride_dim;
	i32 hdim;
	bool vector; /* 8 neighbours along the head dimension are one aligned load */
	bool pairs;  /* TAILS, 16-bit elements: rows are whole words, aligned */

	const abi_i32 *table; /* page numbers of this sequence */
	i64 stride_page;
	i32 n_table, n_pages, page_size, leftpad;
	bool packed_layout, is_v;

	METHOD static KeyView make(const abi_tensor &t, const Sequence &v, const abi_kv_cache &c,
				   i32 head, i32 nhead_k, i32 hdim, bool is_v)
	{
		KeyView k;
		Sequence row = v;

		k.stride_seq = t.stride_seq;
		k.stride_dim = t.stride_dim;
		k.hdim = hdim;
		k.is_v = is_v;
		if (!PAGED || !c.page_size) {
			if (c.cache_batch_idx) {
				row.batch = max_of(c.cache_batch_idx[v.batch], 0);
				if (c.cache_batch > 0)
					row.batch = min_of(row.batch, c.cache_batch - 1);
			}
			k.base = (const Storage *)t.data + k_offset(t, row, 0, head);
			k.page_size = 0;
			k.packed_layout = false;
		} else {
			k.set_pages(t, v, c, head, nhead_k);
		}
		k.vector = !(k.packed_layout && is_v) && !(TAILS && hdim % 8) &&
			   aligned(k, t.stride_batch);
		k.pairs = TAILS && !k.packed_layout && in_pairs(k, t.stride_batch);
		return k;
	}

	METHOD void set_pages(const abi_tensor &t, const Sequence &v, const abi_kv_cache &c,
			      i32 head, i32 nhead_k)
	{
		if (c.kv_indptr) {
			i32 start;

			n_table = pages_of(c, v.batch, &start);
			table = c.kv_page_indices + start;
		} else {
			table = c.block_table + v.batch * c.block_table_stride;
			n_table = c.max_blocks > 0 ? c.max_blocks : 1 << 30;
		}
		n_pages = c.n_pages;
		page_size = c.page_size;
		leftpad = v.leftpad;
		packed_layout = c.layout == ABI_KV_VECTORIZED;
		stride_page = packed_layout ? (i64)nhead_k * hdim * page_size : t.stride_batch;
		base = (const Storage *)t.data +
		       (packed_layout ? (i64)head * hdim * page_size : head * t.stride_head);
	}

	METHOD static bool aligned(const KeyView &k, i64 stride_page)
	{
		const u64 mask = (sizeof(Storage) == 1 ? 8 : 16) - 1;

		if (((u64)k.base & mask) != 0)
			return false;
		return k.packed_layout ||
		       (k.stride_dim == 1 && ((u64)(k.stride_seq * sizeof(Storage)) & mask) == 0 &&
			(!k.page_size || ((u64)(stride_page * sizeof(Storage)) & mask) == 0));
	}

	METHOD static bool in_pairs(const KeyView &k, i64 stride_page)
	{
		const u64 strides = (u64)k.stride_seq | (k.page_size ? (u64)stride_page : 0);

		return whole_words<Storage>(k.base, strides, k.stride_dim, k.hdim);
	}

	METHOD i32 page_of(i32 position) const { return page_at(entry_of(position)); }

	/* Its two halves: a load, and what uses it. */
	METHOD i32 entry_of(i32 position) const
	{
		return entry_of_number(position / page_size);
	}
	METHOD i32 entry_of_number(i32 page) const
	{
		return load_memory(table + min_of(page, n_table - 1));
	}
	/* The same by the number of a page, one for all lanes: AMD's kernels find it in a scalar
	 * register. */
	METHOD i32 entry_of_page(i32 page) const
	{
		return load_constant(table + min_of(page, n_table - 1));
	}
	/* A contiguous cache is one page, as long as can be, whatever its table says: the first
	 * keys. */
	METHOD void see_pages()
	{
		if (!page_size)
			page_size = 1 << 30, n_pages = n_table = 1, table = (const abi_i32 *)base,
			leftpad = 0;
	}
	METHOD i32 page_at(i32 entry) const { return clamp(entry, 0, n_pages - 1); }
	/* For whoever looks ahead, of a position, or -1: the page table's word, and with that where
	 * the row begins. */
	METHOD i32 word_of(i32 x) const
	{
		return PAGED && page_size && x >= 0 ? entry_of(x) : 0;
	}
	METHOD const Storage *begin_of(i32 x, i32 word) const
	{
		if (x < 0)
			return base;
		if (!PAGED || !page_size)
			return base + x * stride_seq;
		return in_page(page_at(word), x % page_size, 0);
	}

	/* Positions that the page table has room for. */
	METHOD i32 capacity() const
	{
		return n_table >= (1 << 30) / page_size ? 1 << 30 : n_table * page_size;
	}

	/* Address of (column, dim); column < n_k. */
	METHOD const Storage *at(i32 column, i32 dim) const
	{
		if (!PAGED || !page_size)
			return base + column * stride_seq + dim * stride_dim;
		i32 position = column + leftpad;

		return in_page(page_of(position), position % page_size, dim);
	}

	/* The same by page and slot, which the cache has. */
	METHOD const Storage *in_page(i32 page, i32 slot, i32 dim) const
	{
		const i32 x = 16 / sizeof(Storage);
		const Storage *p = base + page * stride_page;

		if (!packed_layout)
			return p + slot * stride_seq + dim * stride_dim;
		if (is_v)
			return p + ((i64)(slot / x) * hdim + dim) * x + slot % x;
		return p + ((i64)(dim / x) * page_size + slot) * x + dim % x;
	}
};

/*
 * Of the keys of a head those that a row of queries has chosen (abi_chosen): row e is the one that
 * entry e names, if there is such a one. Entries are a client's memory: whoever writes them
 * meanwhile gets what some reading said, from within the cache.
 */
template <class E, bool PAGED> struct ChosenView : KeyView<E, PAGED> {
	typedef typename E::Storage Storage;
	typedef KeyView<E, PAGED> Whole;
	static const bool CONTIGUOUS = false;
	const abi_i32 *entries;
	i64 stride_entry;
	i32 end; /* of what entries may name */
	bool are_slots;

	METHOD static ChosenView make(const abi_tensor &t, const Sequence &v, const abi_kv_cache &c,
				      i32 head, i32 nhead_k, i32 hdim, bool is_v)
	{
		ChosenView k;

		static_cast<Whole &>(k) = Whole::make(t, v, c, head, nhead_k, hdim, is_v);
		return k;
	}
	/* Those of a row of the sequence, from the first `most` positions or slots. */
	METHOD void choose(const abi_chosen &c, const Sequence &v, i32 row, i32 most)
	{
		entries = c.data + (v.packed_q ? 0 : v.batch * c.stride_batch) +
			  ((i64)v.q_start + row) * c.stride_seq;
		stride_entry = c.stride_entry;
		are_slots = c.are_slots;
		end = most;
	}
	/* The position or slot of row e; -1: there is none. */
	METHOD i32 named(i32 e) const
	{
		i32 x = load_memory(entries + e * stride_entry);

		return x < end ? max_of(x, -1) : -1;
	}
	/* Its two halves, for whoever looks ahead: a load, and what uses it. */
	METHOD i32 chosen_of(i32 e) const { return load_memory(entries + e * stride_entry); }
	METHOD i32 name_of(i32 x) const { return x < end ? max_of(x, -1) : -1; }
	/* What row e has to be below to be there, of rows below `last`: that, or nothing at all. */
	METHOD i32 end_of(i32 e, i32 last) const
	{
		return e < last && named(e) >= 0 ? last : -0x7fffffff;
	}
	METHOD i32 page_of(i32 x) const
	{
		return are_slots ? x / this->page_size : Whole::page_of(x);
	}
	METHOD const Storage *at(i32 e, i32 dim) const
	{
		i32 x = named(e);

		if (x < 0)
			return this->base; /* nobody uses what is there */
		if (!PAGED || !this->page_size)
			return this->base + x * this->stride_seq + dim * this->stride_dim;
		return this->in_page(page_of(x), x % this->page_size, dim);
	}

	/* For whoever looks ahead, of what named() says: the page table's word, and with that where
	 * the row begins. */
	METHOD i32 word_of(i32 x) const
	{
		return PAGED && this->page_size && !are_slots && x >= 0 ? this->entry_of(x) : 0;
	}
	METHOD const Storage *begin_of(i32 x, i32 word) const
	{
		if (x < 0)
			return this->base;
		if (!PAGED || !this->page_size)
			return this->base + x * this->stride_seq;
		return this->in_page(are_slots ? x / this->page_size : this->page_at(word),
				     x % this->page_size, 0);
	}
};

/* Keys that are latents of fp8 (ABI_KV_LATENT_FP8), and values that are their first elements:
 * at(row, 0) is where a key's bytes begin. */
template <class View> struct LatentView : View {
	typedef typename View::Storage Storage;
	static const bool CONTIGUOUS = false;

	METHOD static LatentView make(const abi_tensor &t, const Sequence &v, const abi_kv_cache &c,
				      i32 head, i32 nhead_k, i32 hdim, bool is_v)
	{
		LatentView k;

		static_cast<View &>(k) = View::make(t, v, c, head, nhead_k, hdim, is_v);
		return k;
	}
	METHOD const char *key(i32 row) const { return (const char *)this->at(row, 0); }
	/* Of 8 elements from `dim` on: their codes, or as bf16 what has none, and their factor. */
	METHOD static bool is_coded(i32 dim) { return dim < ABI_LATENT_CODES; }
	METHOD static float factor(const char *key, i32 dim)
	{
		return ((const float *)(key + ABI_LATENT_FACTORS))[dim / ABI_LATENT_BLOCK];
	}
	METHOD static const u16 *rest(const char *key, i32 dim)
	{
		return (const u16 *)(key + ABI_LATENT_REST) + dim - ABI_LATENT_CODES;
	}
};

/*
 * Whether rows of a view may be missing, so that end_of() is to be asked. Loads ask it where this
 * says so and nowhere else: a call that returns what it was given is gone from the code, and yet
 * ptxas takes eight registers more for gpu_mma's loops.
 */
template <class View> struct Chooses {
	static const bool value = false;
};
template <class E, bool PAGED> struct Chooses<ChosenView<E, PAGED>> {
	static const bool value = true;
};
template <class View> struct Chooses<LatentView<View>> : Chooses<View> {
};

/* Rows of queries: contiguous, or with the heads that share keys side by side (PACKED): row r of
 * the pack is row r / q_per_k of head head0 + r % q_per_k. */
template <class E, bool PACKED> struct QueryView {
	typedef typename E::Storage Storage;
	static const bool CONTIGUOUS = !PACKED;
	const Storage *base;
	i64 stride_seq, stride_head, stride_dim;
	i32 hdim, q_per_k;
	bool vector, pairs; /* as a KeyView's */

	METHOD static QueryView make(const abi_tensor &t, const Sequence &v, i32 head, i32 q_per_k,
				     i32 hdim)
	{
		const u64 mask = (sizeof(Storage) == 1 ? 8 : 16) - 1;
		QueryView q;

		q.base = (const Storage *)t.data + q_offset(t, v, 0, head);
		q.stride_seq = t.stride_seq;
		q.stride_head = t.stride_head;
		q.stride_dim = t.stride_dim;
		q.hdim = hdim;
		q.q_per_k = q_per_k;
		q.pairs = TAILS && whole_words<Storage>(q.base,
							(u64)t.stride_seq |
								(PACKED ? (u64)t.stride_head : 0),
							t.stride_dim, hdim);
		q.vector = !(TAILS && hdim % 8) && t.stride_dim == 1 &&
			   ((u64)(t.stride_seq * sizeof(Storage)) & mask) == 0 &&
			   (!PACKED || ((u64)(t.stride_head * sizeof(Storage)) & mask) == 0) &&
			   ((u64)q.base & mask) == 0;
		return q;
	}

	METHOD const Storage *at(i32 row, i32 dim) const
	{
		if (PACKED)
			return base + row / q_per_k * stride_seq + row % q_per_k * stride_head +
			       dim * stride_dim;
		return base + row * stride_seq + dim * stride_dim;
	}
};

#endif
