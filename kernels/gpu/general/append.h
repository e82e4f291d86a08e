/* SPDX-License-Identifier: MIT */
/*
 * append.h: new keys and values into the cache, with rotary embedding. Bit for bit the formula of
 * kernels/reference/appendkv.c: products exact in double, one rounding to the type. Rows that lie
 * so that it can be go by 16 bytes a lane, two of them at a time, others element by element, a wave
 * a row. And the way back: what a cache of 8 bits has, in a type of 16, for loops that are faster
 * over that.
 */
#ifndef FMHA_GPU_APPEND_H
#define FMHA_GPU_APPEND_H

#include "append_chunks.h"

/* Rounds a double once, although the conversions start from float. */
template <class E> DEV typename E::Storage round_once(double x)
{
	if (SameType<E, F32>::value)
		return E::from_float((float)x);
	return E::from_float(odd_float(x));
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
	static_assert(C::THREADS == GRID_APPEND_WAVES * FMHA_WAVE, "as the host knows");
	static const bool PAGED = C::PAGED;
	typedef KeyView<Element, PAGED> Cache;
	const abi_appendkv_args &a;
	Sequence seq;
	i32 before; /* keys in the cache so far */

	METHOD Append(const abi_appendkv_args &args) : a(args) {}

	METHOD bool divides() const { return NARROW && a.new_dtype; }
	static const bool TURNS = C::TURNS != ABI_ROPE_NONE,
			  NEIGHBOURS = C::TURNS == ABI_ROPE_INTERLEAVED;

	METHOD i64 table_row(i64 position) const
	{
		position = position < a.rotary_max_pos ? position : a.rotary_max_pos - 1;
		return position > 0 ? position : 0;
	}
	METHOD float table(const abi_tensor &t, i64 position, i32 i) const
	{
		return load_as_float(t.data, a.rotary_dtype,
				     table_row(position) * t.stride_seq + i * t.stride_dim);
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
		return TURNS && row.turns && dim < a.rotary_dim;
	}

	/* A turned element; both products are exact. */
	METHOD double turned(const NewRow &row, i32 dim) const
	{
		i32 half = a.rotary_dim / 2;
		const bool neighbours = NEIGHBOURS;
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
	METHOD NewPlace place_of(i32 i, const Cache &cache, const Divisor &of_page) const
	{
		NewPlace p = {0, 0, before + i, true};

		if (PAGED && a.slots) {
			i64 slot = load_memory(a.slots + seq.batch * a.slots_stride_batch +
					       i * a.slots_stride_seq);

			p.exists = slot >= 0 && slot < (i64)a.cache.n_pages * a.cache.page_size;
			slot = p.exists ? slot : 0;
			p.page = slot < 1u << 31 ? of_page.quotient((i32)slot)
						 : (i32)(slot / a.cache.page_size);
			p.slot = (i32)(slot - (i64)p.page * a.cache.page_size);
			return p;
		}
		p.exists = p.position <
			   (PAGED ? min_of(a.sequences.seqlen_k_max, cache.capacity())
					    : a.sequences.seqlen_k_max);
		if (PAGED && p.exists)
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
		float most = 0.0f;

		for (i32 dim = from + lane_id(); dim < end; dim += FMHA_WAVE) {
			float x = rounded(row, dim);

			x = x < 0.0f ? -x : x;
			most = x > most ? x : most; /* a NaN is not */
		}
		return factor_for(wave_max(most));
	}
	/* For a row whose largest number is that. */
	METHOD static float factor_for(float most)
	{
		return most > 0.0f && most < bits_to_float(0x7f800000u)
			       ? larger(exact_quotient(most, type_most()),
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

	METHOD Storage code(const NewRow &row, i32 dim, float factor) const
	{
		return code_of<Element>(exact_quotient(rounded(row, dim), factor));
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
		return (Storage *)(PAGED ? cache.in_page(p.page, p.slot, dim)
						   : cache.at(p.position, dim));
	}

	/* Row i of k_new or v_new. */
	METHOD void write_key(const abi_tensor &from, const abi_tensor &to, bool is_v, i32 i,
			      i32 head) const
	{
		i32 hdim = is_v ? a.hdim_v : a.hdim_q;
		Cache cache = Cache::make(to, seq, a.cache, head, a.nhead_k, hdim, is_v);
		NewPlace place = place_of(i, cache, Divisor::make(PAGED ? a.cache.page_size : 1));
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

	METHOD i32 query_turn(i32 i) const { return !a.slots && a.q_rows_same_position ? 0 : i; }

	template <class E> METHOD void write_query_as(const NewRow &row, i64 to) const
	{
		for (i32 dim = lane_id(); dim < a.hdim_q; dim += FMHA_WAVE)
			((typename E::Storage *)a.q_rotated
				 .data)[to + dim * a.q_rotated.stride_dim] = stored<E>(row, dim);
	}

	METHOD void write_query(i32 i, i32 head) const
	{
		const NewRow row = {a.q.data, q_offset(a.q, seq, i, head), a.q.stride_dim,
				    turn_of(query_turn(i)), true};
		const i64 to = q_offset(a.q_rotated, seq, i, head);

		if (!divides())
			write_query_as<Element>(row, to);
		else if (a.new_dtype == ABI_F16)
			write_query_as<F16>(row, to);
		else
			write_query_as<BF16>(row, to);
	}

	/* Whether rows lie so that a lane takes or leaves `bytes` of them at once, a power of two
	 * as `size` is. */
	METHOD static bool is_aligned(const abi_tensor &t, u32 size, u32 bytes)
	{
		const u32 strides = (u32)t.stride_batch | (u32)t.stride_seq | (u32)t.stride_head;

		return t.stride_dim == 1 &&
		       (((u32)(u64)t.data | strides * size) & (bytes - 1)) == 0;
	}
	METHOD bool turns_in_chunks() const
	{
		const u32 size = a.rotary_dtype == ABI_F32 ? 4 : 2;
		const i32 apart = NEIGHBOURS ? a.rotary_dim : a.rotary_dim / 2;

		return apart % 8 == 0 && is_aligned(a.rotary_cos, size, 4 * size) &&
		       is_aligned(a.rotary_sin, size, 4 * size);
	}
	/* Of new rows, of which codes are made or not. */
	METHOD i32 new_size() const { return divides() ? 2 : (i32)sizeof(Storage); }
	METHOD bool goes_in_chunks(const abi_tensor &from, const abi_tensor &to, i32 hdim,
				   bool turns, bool codes, bool packed) const
	{
		const i32 size = new_size(), of_chunk = size == 4 ? 4 : size == 2 ? 8 : 16;

		if (hdim % of_chunk != 0 || !is_aligned(from, size, 16) ||
		    (turns && (size != 2 || !turns_in_chunks())))
			return false;
		if (codes && a.computes_descale && hdim > 2 * of_chunk * FMHA_WAVE)
			return false; /* a row is more than a wave takes at once */
		return packed ? ((u64)to.data & 15) == 0
			      : is_aligned(to, codes ? 1 : size, codes ? 8 : 16);
	}

	METHOD void open(chunk16 c, float *x) const
	{
		if constexpr (sizeof(Storage) == 2)
			Chunk<Element>::open(c, x);
		else if (a.new_dtype == ABI_F16)
			Chunk<F16>::open(c, x);
		else
			Chunk<BF16>::open(c, x);
	}
	METHOD chunk16 close(const float *x) const
	{
		if constexpr (sizeof(Storage) == 2)
			return Chunk<Element>::close(x);
		else
			return a.new_dtype == ABI_F16 ? Chunk<F16>::close(x)
						      : Chunk<BF16>::close(x);
	}

	/* What two chunks a lane are divided by, where `lanes` side by side have a row. */
	METHOD float found_by_lanes(const float *x, const float *y, i32 lanes) const
	{
		float most = 0.0f;

		UNROLL
		for (int i = 0; i < 8; i++)
			most = larger(most, larger(magnitude_of(x[i]), magnitude_of(y[i])));
		NO_UNROLL
		for (i32 mask = 1; mask < lanes; mask *= 2)
			most = larger(most, shuffle_xor(most, mask));
		return factor_for(most);
	}

	METHOD void turn(float *x, float *y, i32 angle, i32 dim_x, i32 dim_y, bool codes) const
	{
		UNROLL
		for (int part = 0; part < 2; part++) {
			const i32 at = NEIGHBOURS ? (part ? dim_y : dim_x) / 2 : dim_x + 4 * part;
			Angles cosines, sines;

			if (NEIGHBOURS && part && dim_y >= a.rotary_dim)
				return;
			cosines.load(a.rotary_cos, a.rotary_dtype, angle, at);
			sines.load(a.rotary_sin, a.rotary_dtype, angle, at);
			if (NEIGHBOURS)
				turn_four<true>(part ? y : x, y, cosines, sines, codes);
			else
				turn_four<false>(x + 4 * part, y + 4 * part, cosines, sines, codes);
		}
	}

	METHOD static chunk8 codes_of_chunk(float *x, float factor, float inverse, bool is_power)
	{
		if constexpr (NARROW)
			return ::codes_of_chunk<Element>(x, factor, inverse, is_power);
		return chunk8{};
	}

	/* What a lane knows of a token: where its row of head 0 goes and has its factor, which row
	 * of the tables it turns by. */
	struct Token {
		i64 target; /* bytes from the tensor's first; below 0: nowhere */
		i64 factor; /* elements */
		i32 angle;

		METHOD static i64 shuffle_long(i64 x, i32 lane)
		{
			return (i64)((u64)shuffle_word((u32)((u64)x >> 32), lane) << 32 |
				     shuffle_word((u32)x, lane));
		}
	};

	/* Of a tensor, or of a sequence of it; none is one. */
	METHOD bool has_one_factor(const abi_descale &d) const
	{
		return !a.computes_descale &&
		       (!d.data || !(d.per_page | d.block | (d.stride_head != 0)));
	}

	template <int KIND>
	METHOD Token token_of(const abi_tensor &to, i32 i, i32 hdim) const
	{
		const abi_descale &factors = KIND == GRID_APPEND_V ? a.v_descale : a.k_descale;
		Token t = {0, 0, 0};

		if (KIND != GRID_APPEND_V && TURNS)
			t.angle = (i32)table_row(
				turn_of(KIND == GRID_APPEND_Q ? query_turn(i) : i));
		if constexpr (KIND == GRID_APPEND_Q) {
			t.target = q_offset(to, seq, i, 0) * new_size();
		} else {
			const Cache cache = Cache::make(to, seq, a.cache, 0, a.nhead_k, hdim,
							KIND == GRID_APPEND_V);
			const NewPlace place =
				place_of(i, cache, Divisor::make(PAGED ? a.cache.page_size : 1));

			t.target = place.exists ? (const char *)address(cache, place, 0) -
							  (const char *)to.data
						: -1;
			if (factors.data && place.exists && !has_one_factor(factors))
				t.factor = factor_at(factors, place, 0) - factors.data;
		}
		return t;
	}

	/* Two chunks of a row of K, of V or of Q, which a lane takes: those that turn with each
	 * other, or as far apart as makes whole lines. */
	struct Two {
		i32 token, head, first, second; /* of which the second may be none */
		chunk16 x, y;
	};

	/* How a row's chunks are paired: the first n_pairs turn with as many behind them; others
	 * are neighbours where that makes one store of two. */
	struct Pairing {
		i32 n_chunks, n_pairs, rest, n;
		bool neighbours; /* all of them */

		METHOD static Pairing make(i32 n_chunks, i32 n_pairs, bool neighbours)
		{
			const i32 rest = (n_chunks - 2 * n_pairs + 1) / 2;

			return Pairing{n_chunks, n_pairs, rest, n_pairs + rest, neighbours};
		}
	};

	/* Of a row's byte in its target, where chunks are so far apart. */
	METHOD static i32 offset_of(i32 byte, i32 of_chunk)
	{
		return of_chunk == 16 ? byte : (i32)((u32)byte / 16) * of_chunk + (byte & 15);
	}

	/* Of row n. Those that are not there are the last ones, once more. */
	template <int KIND>
	METHOD Two load_two(const abi_tensor &from, const Divisor &of_token, const Pairing &p,
			    i32 n, i32 two) const
	{
		const i64 size = new_size();
		Two t;

		two = min_of(two, p.n - 1);
		const bool turn = two < p.n_pairs;

		t.token = of_token.quotient(n), t.head = n - t.token * of_token.by;
		t.first = p.neighbours ? 2 * two : two + (turn ? 0 : p.n_pairs);
		t.second = t.first + (p.neighbours ? 1 : turn ? p.n_pairs : p.rest);
		const i64 row = KIND == GRID_APPEND_Q ? q_offset(from, seq, t.token, t.head)
					     : seq.batch * from.stride_batch +
						       t.token * from.stride_seq +
						       t.head * from.stride_head;
		const char *const source = (const char *)from.data + row * size;

		t.x = load16(source + t.first * 16);
		t.y = load16(source + min_of(t.second, p.n_chunks - 1) * 16);
		return t;
	}

	/*
	 * Rows begin to end - 1 of (token, head), as many as a wave has lanes at most. What comes
	 * next is on its way while it is not yet known where this goes. Return: what is not done,
	 * since a factor is none that quotient.h has: a bit for each so many rows as a wave takes
	 * at once.
	 */
	template <int KIND>
	METHOD u32 write_chunks(const abi_tensor &from, const abi_tensor &to, i32 begin, i32 end,
				i32 log2_lanes) const
	{
		const bool is_v = KIND == GRID_APPEND_V, is_q = KIND == GRID_APPEND_Q,
			   codes = divides() && !is_q;
		/* Rows that turn have no registers for the next ones beside them. */
		const bool LATE = TURNS && !is_v;
		const i32 size = new_size(), of_chunk = size == 4 ? 4 : size == 2 ? 8 : 16,
			  hdim = is_v ? a.hdim_v : a.hdim_q;
		const i32 turned = TURNS && !is_v ? a.rotary_dim : 0;
		const bool neighbours = codes && (is_v || !TURNS || NEIGHBOURS) && hdim % 16 == 0 &&
					is_aligned(to, 1, 16);
		const Pairing pairing = Pairing::make(
			hdim / of_chunk, NEIGHBOURS ? 0 : turned / (2 * of_chunk), neighbours);
		const abi_descale &factors = is_v ? a.v_descale : a.k_descale;
		const bool packed = !is_q && PAGED &&
				    a.cache.layout == ABI_KV_VECTORIZED;
		const i64 of_head = packed ? (i64)hdim * a.cache.page_size * (i32)sizeof(Storage)
					   : to.stride_head * (is_q ? size : (i32)sizeof(Storage));
		const i32 of_target = packed ? 16 * a.cache.page_size : 16; /* a chunk: bytes */
		const Divisor of_token = Divisor::make(is_q ? a.nhead_q : a.nhead_k);
		const i32 lanes = 1 << log2_lanes, lane = lane_id() & (lanes - 1),
			  my_row = lane_id() >> log2_lanes, at_once = FMHA_WAVE >> log2_lanes;
		i32 at = begin, two = lane;
		Two next = load_two<KIND>(from, of_token, pairing, min_of(at + my_row, end - 1),
					  two);
		const i32 token = of_token.quotient(begin), last = of_token.quotient(end - 1);
		const Token mine = token_of<KIND>(to, min_of(token + lane_id(), last), hdim);
		const bool one_factor = has_one_factor(factors);
		float factor = one_factor && factors.data
				       ? factors.data[seq.batch * factors.stride_batch]
				       : 1.0f;
		float inverse = exact_reciprocal(factor);
		bool is_power = float_to_bits(factor) << 9 == 0;
		u32 left = 0, step = 1;

		if (codes && !quotient_has(factor))
			return ~0u;

		NO_UNROLL
		while (at < end) {
			Two here = next;
			const bool is_first = two == lane,
				   is_last = two - lane + lanes >= pairing.n;
			const i64 place = Token::shuffle_long(mine.target, here.token - token);
			const bool exists = at + my_row < end && (i32)((u64)place >> 32) >= 0;
			bool goes = exists && two < pairing.n;
			char *const target = (char *)to.data + place + here.head * of_head;
			const i32 dim_x = here.first * of_chunk, dim_y = here.second * of_chunk;

			at += is_last ? at_once : 0;
			two = is_last ? lane : two + lanes;
			if (!LATE && at < end)
				next = load_two<KIND>(from, of_token, pairing,
						      min_of(at + my_row, end - 1), two);
			if constexpr (NARROW || (TURNS && !is_v)) {
				const i32 angle = turned ? (i32)shuffle_word((u32)mine.angle,
									     here.token - token)
							 : 0;
				float x[8], y[8];

				if (codes || dim_x < turned)
					open(here.x, x), open(here.y, y);
				if (TURNS && !is_v && dim_x < turned) {
					turn(x, y, angle, dim_x, dim_y, codes);
					if (!codes)
						here.x = close(x);
					if (!codes && dim_y < turned) /* else its bits stay */
						here.y = close(y);
				}
				if (codes && is_first && !one_factor) {
					float *const at_factor = (float *)factors.data +
								 Token::shuffle_long(
									 mine.factor,
									 here.token - token) +
								 here.head * factors.stride_head;

					factor = 1.0f;
					if (a.computes_descale)
						factor = found_by_lanes(x, y, lanes);
					else if (factors.data && exists)
						factor = *at_factor;
					if (any_of_wave(!quotient_has(factor)))
						left |= step;
					else if (a.computes_descale && goes && lane == 0)
						*at_factor = factor;
					inverse = exact_reciprocal(factor);
					is_power = !any_of_wave(float_to_bits(factor) << 9 != 0);
				}
				if (codes) {
					const chunk8 low = codes_of_chunk(x, factor, inverse,
									  is_power),
						     high = codes_of_chunk(y, factor, inverse,
									   is_power);

					goes = goes && !(left & step);
					if (goes && neighbours)
						*(chunk16 *)(target +
							     offset_of(dim_x, of_target)) = chunk16{
							{low.w[0], low.w[1], high.w[0], high.w[1]}};
					else if (goes)
						*(chunk8 *)(target +
							    offset_of(dim_x, of_target)) = low;
					if (goes && !neighbours && here.second < pairing.n_chunks)
						*(chunk8 *)(target +
							    offset_of(dim_y, of_target)) = high;
					goes = false;
				}
			}
			if (goes)
				*(chunk16 *)(target +
					     offset_of(here.first * 16, of_target)) = here.x;
			if (goes && here.second < pairing.n_chunks)
				*(chunk16 *)(target +
					     offset_of(here.second * 16, of_target)) = here.y;
			step <<= is_last;
			if (LATE && at < end)
				next = load_two<KIND>(from, of_token, pairing,
						      min_of(at + my_row, end - 1), two);
		}
		return left;
	}

	/* Rows of (token, head), and a bit for each so many of them as a wave takes at once: what
	 * is left to go element by element. */
	struct Rows {
		i32 begin, end, log2_lanes;
		u32 left;
	};

	/* A wave's rows of the kind that this block is of. Values may be part of keys. */
	template <int KIND>
	METHOD Rows write_rows(const abi_tensor &from, const abi_tensor &to) const
	{
		const bool is_v = KIND == GRID_APPEND_V, is_q = KIND == GRID_APPEND_Q;
		const i32 hdim = is_v ? a.hdim_v : a.hdim_q, n_heads = is_q ? a.nhead_q : a.nhead_k;
		const i32 log2_lanes = grid_append_lanes(&a, hdim, FMHA_WAVE),
			  log2_rows = grid_append_rows(&a, log2_lanes, FMHA_WAVE);
		const i32 begin = grid_row(block_id_x(), GRID_APPEND_WAVES, wave_id()) << log2_rows,
			  n = is_v && !from.data ? 0 : (is_q ? seq.n_q : a.seqlen_new) * n_heads,
			  end = min_of(begin + (1 << log2_rows), n);
		const bool packed = !is_q && PAGED &&
				    a.cache.layout == ABI_KV_VECTORIZED;
		Rows rows = {begin, end, log2_lanes, ~0u};

		if (begin < end && a.cache.layout != ABI_KV_LATENT_FP8 && !(packed && is_v) &&
		    goes_in_chunks(from, to, hdim, TURNS && !is_v, divides() && !is_q, packed))
			rows.left = write_chunks<KIND>(from, to, begin, end, log2_lanes);
		return rows;
	}

	METHOD void write_left(const Rows &rows, i32 kind) const
	{
		const bool is_v = kind == GRID_APPEND_V, is_q = kind == GRID_APPEND_Q;
		const i32 n_heads = is_q ? a.nhead_q : a.nhead_k;

		if (rows.left == 0)
			return;
		NO_UNROLL
		for (i32 n = rows.begin; n < rows.end; n++) {
			if (!(rows.left >> ((n - rows.begin) << rows.log2_lanes) / FMHA_WAVE & 1))
				continue;
			if (TURNS && is_q)
				write_query(n / n_heads, n % n_heads);
			else
				write_key(is_v ? a.v_new : a.k_new, is_v ? a.v : a.k, is_v,
					  n / n_heads, n % n_heads);
		}
	}

	/* Eight elements of a key in the wider type. TIMES: times a factor, and rounded. */
	template <class E, bool TIMES> METHOD static chunk16 widened(chunk8 codes, float factor)
	{
		typedef typename Either<TIMES, F16, E>::Type To; /* which holds each code exactly */
		chunk16 wide;

		Widening<To, Element>::widen(codes.w[0], &wide.w[0], &wide.w[1]);
		Widening<To, Element>::widen(codes.w[1], &wide.w[2], &wide.w[3]);
		if constexpr (TIMES)
			UNROLL
			for (int i = 0; i < 4; i++)
				wide.w[i] = E::pack2(F16::to_float((u16)wide.w[i]) * factor,
						     F16::to_float((u16)(wide.w[i] >> 16)) *
							     factor);
		return wide;
	}

	/* Keys that are in the cache, some in a row: their page is looked up once where it has all
	 * of them. */
	struct Run {
		const Cache &cache;
		NewPlace first;
		bool together;

		METHOD Run(const Cache &view, i32 position)
			: cache(view), first{0, 0, position, true},
			  together(!PAGED || !cache.page_size ||
				   cache.page_size % GRID_WIDEN_KEYS == 0)
		{
			if (PAGED && cache.page_size)
				first = look_up(position);
		}
		METHOD NewPlace look_up(i32 position) const
		{
			return NewPlace{cache.page_of(position), position % cache.page_size,
					position, true};
		}
		METHOD NewPlace place(i32 key) const
		{
			return together ? NewPlace{first.page, first.slot + key,
						   first.position + key, true}
					: look_up(first.position + key);
		}
	};
	METHOD const Storage *key_address(const Cache &cache, const NewPlace &p, i32 dim) const
	{
		return PAGED && cache.page_size ? cache.in_page(p.page, p.slot, dim)
						: cache.at(p.position, dim);
	}

	/* Eights of codes, of which lanes side by side write whole lines, as many at once as hide
	 * how far away they are. */
	template <class E, bool TIMES>
	METHOD void widen_chunks(const Run &run, const abi_descale &d, i32 n_keys, i32 head,
				 i32 hdim, typename E::Storage *to, i64 stride) const
	{
		const int AT_ONCE = TIMES ? 4 : 8;
		const Divisor of_key = Divisor::make(hdim / 8);
		const i32 n = n_keys * of_key.by;

		NO_UNROLL
		for (i32 begin = lane_id(); begin < n; begin += AT_ONCE * FMHA_WAVE) {
			chunk8 codes[AT_ONCE];
			float factors[AT_ONCE];
			typename E::Storage *places[AT_ONCE];

			UNROLL
			for (int i = 0; i < AT_ONCE; i++) {
				/* One that is not there is the last one, once more. */
				const i32 chunk = min_of(begin + i * FMHA_WAVE, n - 1);
				const i32 key = of_key.quotient(chunk),
					  dim = (chunk - key * of_key.by) * 8;
				const NewPlace p = run.place(key);

				places[i] = to + key * stride + dim;
				codes[i] = *(const chunk8 *)key_address(run.cache, p, dim);
				factors[i] = TIMES && d.data ? *factor_at(d, p, head) : 1.0f;
			}
			UNROLL
			for (int i = 0; i < AT_ONCE; i++)
				if (begin + i * FMHA_WAVE < n)
					*(chunk16 *)places[i] =
						widened<E, TIMES>(codes[i], factors[i]);
		}
	}

	/* TIMES: keys have factors of their own, with which they are multiplied here. */
	template <class E, bool TIMES>
	METHOD void widen_run(const abi_tensor &from, const abi_tensor &to, i32 place, bool is_v,
			      i32 first, i32 head) const
	{
		const i32 hdim = is_v ? a.hdim_v : a.hdim_q,
			  n_keys = min_of(seq.n_k - first, GRID_WIDEN_KEYS);
		const abi_descale &d = is_v ? a.v_descale : a.k_descale;
		const Cache cache = Cache::make(from, seq, a.cache, head, a.nhead_k, hdim, is_v);
		const Run run(cache, first);
		Sequence there = seq;
		there.batch = place;
		typename E::Storage *const out =
			(typename E::Storage *)to.data + k_offset(to, there, first, head);
		const u64 strides = (u64)cache.base | (u64)cache.stride_seq |
				    (PAGED && cache.page_size ? (u64)cache.stride_page : 0);

		if (!cache.packed_layout && cache.stride_dim == 1 && hdim % 8 == 0 &&
		    strides % 8 == 0) {
			widen_chunks<E, TIMES>(run, d, n_keys, head, hdim, out, to.stride_seq);
			return;
		}
		NO_UNROLL
		for (i32 i = lane_id(); i < n_keys * hdim; i += FMHA_WAVE) {
			const i32 key = i / hdim, dim = i % hdim;
			const NewPlace p = run.place(key);
			float x = Element::to_float(*key_address(cache, p, dim));

			if (TIMES && d.data)
				x *= *factor_at(d, p, head);
			out[key * to.stride_seq + dim] = E::from_float(x);
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
			n = wave_sum(n);
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

			found = max_of(found, wave_max(goes && mine == place ? b : -1));
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

	template <class E, bool TIMES> METHOD void widen(i32 place) const
	{
		const i32 n_runs = grid_widen_runs(&a);
		i32 n = grid_row(block_id_x(), C::THREADS / FMHA_WAVE, wave_id());
		const bool is_v = n >= n_runs;
		i32 first;

		n -= is_v ? n_runs : 0;
		first = n / a.nhead_k * GRID_WIDEN_KEYS;
		if (n < n_runs && first < seq.n_k)
			widen_run<E, TIMES>(is_v ? a.v : a.k, is_v ? a.v_new : a.k_new, place, is_v,
					    first, n % a.nhead_k);
	}

	METHOD void run_widening()
	{
		i32 place = block_id_z(), b = place;

		let_next_stage_begin(); /* attention follows, and waits */
		if constexpr (NARROW) {
			if (a.few_rows && (b = sequence_of(place)) < 0)
				return;
			find(b);
			/* Times a factor there may be nothing left of a value in f16: see abi.h. */
			if (a.new_dtype == ABI_F16)
				widen<F16, false>(place);
			else if (a.k_descale.data || a.v_descale.data)
				widen<BF16, true>(place);
			else
				widen<BF16, false>(place);
		}
	}

	METHOD void run()
	{
		const i32 kind = block_id_y();
		Rows rows;

		if (PAGED && a.slots && kind != GRID_APPEND_Q) { /* lengths say nothing of them */
			seq = Sequence{};
			seq.batch = block_id_z();
		} else {
			find(block_id_z());
		}
		before = max_of(a.sequences.seqlen_k ? seq.n_k : seq.n_k - a.seqlen_new, 0);
		if (kind == GRID_APPEND_K)
			rows = write_rows<GRID_APPEND_K>(a.k_new, a.k);
		else if (!TURNS || kind == GRID_APPEND_V)
			rows = write_rows<GRID_APPEND_V>(a.v_new, a.v);
		else
			rows = write_rows<GRID_APPEND_Q>(a.q, a.q_rotated);
		write_left(rows, kind);
	}

	/* Positions count the padding. */
	METHOD void find(i32 b)
	{
		seq = find_sequence(a.sequences, &a.cache, b);
		seq.n_k += seq.leftpad;
		seq.leftpad = 0;
	}
};

#endif
