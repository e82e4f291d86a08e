/* SPDX-License-Identifier: MIT */
/*
 * append.h: new keys and values into the cache, with rotary embedding. A wave a row. Bit for bit
 * the formula of kernels/reference/appendkv.c: products exact in double, one rounding to the type.
 * And the way back: what a cache of 8 bits has, in a type of 16, for loops that are faster over
 * that.
 */
#ifndef FMHA_GPU_APPEND_H
#define FMHA_GPU_APPEND_H

#include "combine.h"

/*
 * Rounds a double once, although the conversions start from float: the float is truncated and its
 * last bit tells whether anything was lost ("round to odd"), which no narrower rounding mistakes.
 */
template <class E> DEV typename E::Storage round_once(double x)
{
	float f = (float)x;

	if (SameType<E, F32>::value)
		return E::from_float(f);
	if ((double)f != x && x == x) {
		u32 bits = float_to_bits(f);
		double below = f < 0 ? -(double)f : (double)f, exact = x < 0 ? -x : x;

		if (below > exact)
			bits -= 1;
		f = bits_to_float(bits | 1);
	}
	return E::from_float(f);
}

/* A row on its way: k_new's, v_new's or q's. */
struct NewRow {
	const void *data;
	i64 first, stride; /* elements */
	i64 turn;          /* the rotary tables' row */
	bool turns;
};

/* Where it goes: a page's slot, or a position of the sequence. */
struct NewPlace {
	i32 page, slot, position;
	bool exists;
};

template <class C> struct Append {
	typedef typename C::Element Element;
	typedef typename Element::Storage Storage;
	static const bool NARROW = sizeof(Storage) == 1; /* new rows may be of 16 bits */
	typedef KeyView<Element, true> Cache;
	const abi_appendkv_args &a;
	Sequence seq;
	i32 before; /* keys in the cache so far */

	METHOD Append(const abi_appendkv_args &args) : a(args) {}

	METHOD bool divides() const { return NARROW && a.new_dtype; }

	METHOD float table(const abi_tensor &t, i64 position, i32 i) const
	{
		position = position < a.rotary_max_pos ? position : a.rotary_max_pos - 1;
		position = position > 0 ? position : 0;
		return load_as_float(t.data, a.rotary_dtype,
				     position * t.stride_seq + i * t.stride_dim);
	}

	METHOD float number(const NewRow &row, i32 dim) const
	{
		const i64 index = row.first + dim * row.stride;

		if (divides())
			return load_as_float(row.data, a.new_dtype, index);
		return Element::to_float(((const Storage *)row.data)[index]);
	}

	METHOD bool is_turned(const NewRow &row, i32 dim) const
	{
		return a.rope != ABI_ROPE_NONE && row.turns && dim < a.rotary_dim;
	}

	/* A turned element; both products are exact. */
	METHOD double turned(const NewRow &row, i32 dim) const
	{
		i32 half = a.rotary_dim / 2;
		bool neighbours = a.rope == ABI_ROPE_INTERLEAVED;
		i32 i = neighbours ? dim / 2 : dim % half;
		i32 dim_x = neighbours ? dim & ~1 : i, dim_y = neighbours ? dim | 1 : i + half;
		double x = number(row, dim_x), y = number(row, dim_y);
		double c = table(a.rotary_cos, row.turn, i), s = table(a.rotary_sin, row.turn, i);

		return dim == dim_x ? x * c - y * s : x * s + y * c;
	}

	/* As a float: what fp8 is made of. */
	METHOD float rounded(const NewRow &row, i32 dim) const
	{
		return is_turned(row, dim) ? (float)turned(row, dim) : number(row, dim);
	}

	/* In the row's own type. */
	template <class E> METHOD typename E::Storage stored(const NewRow &row, i32 dim) const
	{
		if (is_turned(row, dim))
			return round_once<E>(turned(row, dim));
		return ((const typename E::Storage *)row.data)[row.first + dim * row.stride];
	}

	METHOD i64 turn_of(i32 i) const
	{
		if (!a.slots)
			return before + (i64)i;
		return a.positions
			       ? load_memory(a.positions + seq.batch * a.positions_stride_batch +
					     i * a.positions_stride_seq)
			       : 0;
	}

	/* Slots are a client's memory, and so are the lengths behind a position: what they say that
	 * the cache has not is left out. */
	METHOD NewPlace place_of(i32 i, const Cache &cache) const
	{
		NewPlace p = {0, 0, before + i, true};

		if (a.slots) {
			i64 slot = load_memory(a.slots + seq.batch * a.slots_stride_batch +
					       i * a.slots_stride_seq);

			p.exists = slot >= 0 && slot < (i64)a.cache.n_pages * a.cache.page_size;
			slot = p.exists ? slot : 0;
			p.page = (i32)(slot / a.cache.page_size),
			p.slot = (i32)(slot % a.cache.page_size);
			return p;
		}
		p.exists = p.position <
			   (cache.page_size ? min_of(a.sequences.seqlen_k_max, cache.capacity())
					    : a.sequences.seqlen_k_max);
		if (cache.page_size && p.exists)
			p.page = cache.page_of(p.position), p.slot = p.position % cache.page_size;
		return p;
	}

	METHOD float *factor_at(const abi_descale &d, const NewPlace &p, i32 head) const
	{
		const i32 i = d.per_page ? p.slot : p.position;

		return (float *)d.data + (d.per_page ? p.page : seq.batch) * d.stride_batch +
		       head * d.stride_head + (d.block ? i / d.block * d.stride_block : 0);
	}

	/* What elements from `from` to `end` are divided by, of which the largest becomes the
	 * type's largest; all lanes have it. */
	METHOD float found_factor(const NewRow &row, i32 from, i32 end) const
	{
		float most = 0.0f, of_type = (float)type_most();

		for (i32 dim = from + lane_id(); dim < end; dim += FMHA_WAVE) {
			float x = rounded(row, dim);

			x = x < 0.0f ? -x : x;
			most = x > most ? x : most; /* a NaN is not */
		}
		UNROLL
		for (i32 mask = 1; mask < FMHA_WAVE; mask *= 2)
			most = larger(most, shuffle_xor(most, mask));
		return most > 0.0f && most < bits_to_float(0x7f800000u)
			       ? larger((float)((double)most / of_type),
					bits_to_float((127u - 100u) << 23))
			       : 1.0f;
	}

	/* What a row is divided by. */
	METHOD float factor_of(const NewRow &row, const abi_descale &d, const NewPlace &p, i32 head,
			       i32 hdim) const
	{
		float factor;

		if (!a.computes_descale)
			return d.data ? *factor_at(d, p, head) : 1.0f;
		factor = found_factor(row, 0, hdim);
		if (lane_id() == 0)
			*factor_at(d, p, head) = factor;
		return factor;
	}

	/* By doubles, whose quotient rounded to float is the floats' own, whatever division a
	 * compiler takes for those. */
	METHOD Storage code(const NewRow &row, i32 dim, float factor) const
	{
		return code_of<Element>((float)((double)rounded(row, dim) / (double)factor));
	}

	/* A key as a latent of fp8: codes, the factors of blocks of them, and the rest as bf16. */
	METHOD void write_latent(const NewRow &row, char *key) const
	{
		NO_UNROLL
		for (i32 from = 0; from < ABI_LATENT_CODES; from += ABI_LATENT_BLOCK) {
			float factor = found_factor(row, from, from + ABI_LATENT_BLOCK);

			if (lane_id() == 0)
				((float *)(key +
					   ABI_LATENT_FACTORS))[from / ABI_LATENT_BLOCK] = factor;
			for (i32 i = lane_id(); i < ABI_LATENT_BLOCK; i += FMHA_WAVE)
				key[from + i] = (char)code(row, from + i, factor);
		}
		for (i32 dim = ABI_LATENT_CODES + lane_id(); dim < a.hdim_q; dim += FMHA_WAVE)
			((u16 *)(key + ABI_LATENT_REST))[dim - ABI_LATENT_CODES] =
				BF16::from_float(rounded(row, dim));
	}

	METHOD static constexpr float type_most()
	{
		if constexpr (NARROW)
			return Element::most();
		return 1.0f;
	}

	METHOD Storage *address(const Cache &cache, const NewPlace &p, i32 dim) const
	{
		return (Storage *)(cache.page_size ? cache.in_page(p.page, p.slot, dim)
						   : cache.at(p.position, dim));
	}

	/* Row i of k_new or v_new. */
	METHOD void write_key(const abi_tensor &from, const abi_tensor &to, bool is_v, i32 i,
			      i32 head) const
	{
		i32 hdim = is_v ? a.hdim_v : a.hdim_q;
		Cache cache = Cache::make(to, seq, a.cache, head, a.nhead_k, hdim, is_v);
		NewPlace place = place_of(i, cache);
		NewRow row = {from.data,
			      seq.batch * from.stride_batch + i * from.stride_seq +
				      head * from.stride_head,
			      from.stride_dim, is_v ? 0 : turn_of(i), !is_v};

		if (!place.exists)
			return;
		if constexpr (NARROW) {
			if (a.cache.layout == ABI_KV_LATENT_FP8)
				return write_latent(row, (char *)address(cache, place, 0));
			if (divides()) {
				float factor = factor_of(row, is_v ? a.v_descale : a.k_descale,
							 place, head, hdim);

				for (i32 dim = lane_id(); dim < hdim; dim += FMHA_WAVE)
					*address(cache, place, dim) = code(row, dim, factor);
				return;
			}
		}
		for (i32 dim = lane_id(); dim < hdim; dim += FMHA_WAVE)
			*address(cache, place, dim) = stored<Element>(row, dim);
	}

	template <class E> METHOD void write_query_as(const NewRow &row, i64 to) const
	{
		for (i32 dim = lane_id(); dim < a.hdim_q; dim += FMHA_WAVE)
			((typename E::Storage *)a.q_rotated
				 .data)[to + dim * a.q_rotated.stride_dim] = stored<E>(row, dim);
	}

	METHOD void write_query(i32 i, i32 head) const
	{
		const NewRow row = {a.q.data, q_offset(a.q, seq, i, head), a.q.stride_dim,
				    turn_of(!a.slots && a.q_rows_same_position ? 0 : i), true};
		const i64 to = q_offset(a.q_rotated, seq, i, head);

		if (!divides())
			write_query_as<Element>(row, to);
		else if (a.new_dtype == ABI_F16)
			write_query_as<F16>(row, to);
		else
			write_query_as<BF16>(row, to);
	}

	/* Sixteen elements of a key, as two chunks of the wider type. */
	template <class E> METHOD void widen_chunk(chunk16 codes, typename E::Storage *to) const
	{
		chunk16 low, high;

		UNROLL
		for (int i = 0; i < 2; i++) {
			Widening<E, Element>::widen(codes.w[i], &low.w[2 * i], &low.w[2 * i + 1]);
			Widening<E, Element>::widen(codes.w[2 + i], &high.w[2 * i],
						    &high.w[2 * i + 1]);
		}
		((chunk16 *)to)[0] = low;
		((chunk16 *)to)[1] = high;
	}

	/* Whole chunks, as many at once as hide how far away they are. */
	template <class E>
	METHOD void widen_chunks(const Cache &cache, i32 first, i32 n_keys, i32 hdim,
				 typename E::Storage *to, i64 stride) const
	{
		const int AT_ONCE = 4;
		const i32 of_key = hdim / 16, n = n_keys * of_key;

		NO_UNROLL
		for (i32 begin = lane_id(); begin < n; begin += AT_ONCE * FMHA_WAVE) {
			chunk16 codes[AT_ONCE];
			i64 places[AT_ONCE];

			UNROLL
			for (int i = 0; i < AT_ONCE; i++) {
				/* One that is not there is the last one, once more. */
				const i32 chunk = min_of(begin + i * FMHA_WAVE, n - 1);
				const i32 key = chunk / of_key, dim = chunk % of_key * 16;

				places[i] = key * stride + dim;
				codes[i] = load16(cache.at(first + key, dim));
			}
			UNROLL
			for (int i = 0; i < AT_ONCE; i++)
				if (begin + i * FMHA_WAVE < n)
					widen_chunk<E>(codes[i], to + places[i]);
		}
	}

	template <class E>
	METHOD void widen_run(const abi_tensor &from, const abi_tensor &to, i32 place, bool is_v,
			      i32 first, i32 head) const
	{
		const i32 hdim = is_v ? a.hdim_v : a.hdim_q,
			  n_keys = min_of(seq.n_k - first, GRID_WIDEN_KEYS);
		const Cache cache = Cache::make(from, seq, a.cache, head, a.nhead_k, hdim, is_v);
		Sequence there = seq;
		there.batch = place;
		typename E::Storage *const out =
			(typename E::Storage *)to.data + k_offset(to, there, first, head);
		const u64 strides = (u64)cache.base | (u64)cache.stride_seq |
				    (u64)cache.stride_page;

		if (!cache.packed_layout && cache.stride_dim == 1 && hdim % 16 == 0 &&
		    strides % 16 == 0) {
			widen_chunks<E>(cache, first, n_keys, hdim, out, to.stride_seq);
			return;
		}
		NO_UNROLL
		for (i32 i = lane_id(); i < n_keys * hdim; i += FMHA_WAVE) {
			const i32 key = i / hdim, dim = i % hdim;

			out[key * to.stride_seq + dim] =
				E::from_float(Element::to_float(*cache.at(first + key, dim)));
		}
	}

	METHOD bool has_many_rows(i32 b, i32 few) const
	{
		return b < a.sequences.batch &&
		       find_sequence(a.sequences, &a.cache, b).n_q > few;
	}

	/* As many rows as leave no more sequences with more than there are places. */
	METHOD i32 most_few_rows() const
	{
		i32 few = a.few_rows, n;

		NO_UNROLL
		for (;; few *= 2) {
			n = 0;
			NO_UNROLL
			for (i32 b = lane_id(); b < a.sequences.batch; b += FMHA_WAVE)
				n += has_many_rows(b, few);
			UNROLL
			for (i32 i = 1; i < FMHA_WAVE; i *= 2)
				n += (i32)shuffle_word((u32)n, lane_id() ^ i);
			if (n <= a.n_places || few > a.sequences.seqlen_q_max)
				return few;
		}
	}

	/* Places are given in the order of sequences. Every wave of a block looks for its place's,
	 * and those of one block write down all. Return: the sequence; below 0: there is none. */
	METHOD i32 sequence_of(i32 place) const
	{
		const bool writes = block_id_x() == 0 && place == 0 && wave_id() == 0;
		const i32 few = most_few_rows();
		i32 before = 0, found = -1;

		NO_UNROLL
		for (i32 first = 0; first < a.sequences.batch && (writes || before <= place);
		     first += FMHA_WAVE) {
			const i32 b = first + lane_id(), goes = has_many_rows(b, few);
			i32 up_to = goes;

			UNROLL
			for (i32 i = 1; i < FMHA_WAVE; i *= 2) {
				i32 other = (i32)shuffle_word((u32)up_to, max_of(lane_id() - i, 0));

				up_to += lane_id() >= i ? other : 0;
			}
			const i32 mine = before + up_to - 1;
			i32 here = goes && mine == place ? b : -1;

			UNROLL
			for (i32 i = 1; i < FMHA_WAVE; i *= 2)
				here = max_of(here, (i32)shuffle_word((u32)here, lane_id() ^ i));
			found = max_of(found, here);
			before += (i32)shuffle_word((u32)up_to, FMHA_WAVE - 1);
			if (writes && b < a.sequences.batch)
				write_rows(b, goes && mine < a.n_places, mine);
		}
		return found;
	}
	METHOD void write_rows(i32 b, bool goes, i32 place) const
	{
		const i32 rows = find_sequence(a.sequences, &a.cache, b).n_q;

		a.rows_kept[b] = goes ? 0 : rows;
		a.rows_widened[b] = goes ? rows : 0;
		a.places[b] = goes ? place : 0;
	}

	template <class E> METHOD void widen(i32 place) const
	{
		const i32 n_runs = grid_widen_runs(&a);
		i32 n = grid_row(block_id_x(), C::THREADS / FMHA_WAVE, wave_id());
		const bool is_v = n >= n_runs;
		i32 first;

		n -= is_v ? n_runs : 0;
		first = n / a.nhead_k * GRID_WIDEN_KEYS;
		if (n < n_runs && first < seq.n_k)
			widen_run<E>(is_v ? a.v : a.k, is_v ? a.v_new : a.k_new, place, is_v, first,
				     n % a.nhead_k);
	}

	METHOD void run()
	{
		i32 n = grid_row(block_id_x(), C::THREADS / FMHA_WAVE, wave_id());
		i32 n_keys = grid_append_keys(&a);

		if (a.widens) /* attention follows, and waits */
			let_next_stage_begin();
		i32 place = block_id_z(), b = place;

		if constexpr (NARROW)
			if (a.widens && a.few_rows && (b = sequence_of(place)) < 0)
				return;
		seq = find_sequence(a.sequences, &a.cache, b);
		seq.n_k += seq.leftpad;
		seq.leftpad = 0; /* positions count the padding */
		if constexpr (NARROW) {
			if (a.widens && a.new_dtype == ABI_F16)
				return widen<F16>(place);
			if (a.widens)
				return widen<BF16>(place);
		}
		before = max_of(a.sequences.seqlen_k ? seq.n_k : seq.n_k - a.seqlen_new, 0);
		if (n < n_keys) {
			write_key(a.k_new, a.k, false, n / a.nhead_k, n % a.nhead_k);
		} else if (n < 2 * n_keys) {
			n -= n_keys;
			if (a.v_new.data) /* else values are part of keys */
				write_key(a.v_new, a.v, true, n / a.nhead_k, n % a.nhead_k);
		} else if (a.q_rotated.data) {
			n -= 2 * n_keys;
			if (n / a.nhead_q < seq.n_q)
				write_query(n / a.nhead_q, n % a.nhead_q);
		}
	}
};

#endif
