/* SPDX-License-Identifier: MIT */
/*
 * append.h: new keys and values into the cache, with rotary embedding. A wave a row. Bit for bit the
 * formula of kernels/reference/appendkv.c: products exact in double, one rounding to the type.
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

template <class C> struct Append {
	typedef typename C::Element Element;
	typedef typename Element::Storage Storage;
	const abi_appendkv_args &a;
	Sequence seq;
	i32 before; /* keys in the cache so far */

	METHOD Append(const abi_appendkv_args &args) : a(args) {}

	METHOD float table(const abi_tensor &t, i32 position, i32 i) const
	{
		position = clamp(position, 0, a.rotary_max_pos - 1);
		return load_as_float(t.data, a.rotary_dtype, position * t.stride_seq + i * t.stride_dim);
	}

	/* Element dim of a row at `position` (< 0: not rotated), from `from`. */
	METHOD Storage element(const Storage *from, i64 stride, i32 position, i32 dim) const
	{
		if (a.rope == ABI_ROPE_NONE || position < 0 || dim >= a.rotary_dim)
			return from[dim * stride];
		i32 half = a.rotary_dim / 2;
		bool neighbours = a.rope == ABI_ROPE_INTERLEAVED;
		i32 i = neighbours ? dim / 2 : dim % half;
		i32 dim_x = neighbours ? dim & ~1 : i, dim_y = neighbours ? dim | 1 : i + half;
		double x = Element::to_float(from[dim_x * stride]);
		double y = Element::to_float(from[dim_y * stride]);
		double c = table(a.rotary_cos, position, i), s = table(a.rotary_sin, position, i);

		return round_once<Element>(dim == dim_x ? x * c - y * s : x * s + y * c);
	}

	/* Row i of k_new or v_new. */
	METHOD void write_key(const abi_tensor &from, const abi_tensor &to, bool is_v, i32 i, i32 head) const
	{
		i32 hdim = is_v ? a.hdim_v : a.hdim_q, position = before + i;
		KeyView<Element, true> cache =
			KeyView<Element, true>::make(to, seq, a.cache, head, a.nhead_k, hdim, is_v);
		const Storage *row = (const Storage *)from.data + seq.batch * from.stride_batch +
				     i * from.stride_seq + head * from.stride_head;
		i32 room = cache.page_size ? min_of(a.sequences.seqlen_k_max, cache.capacity())
					   : a.sequences.seqlen_k_max;

		if (position >= room)
			return; /* lengths that lie: nothing may be written past the cache */
		for (i32 dim = lane_id(); dim < hdim; dim += FMHA_WAVE)
			*(Storage *)cache.at(position, dim) =
				element(row, from.stride_dim, is_v ? -1 : position, dim);
	}

	METHOD void write_query(i32 i, i32 head) const
	{
		const Storage *from = (const Storage *)a.q.data + q_offset(a.q, seq, i, head);
		Storage *to = (Storage *)a.q_rotated.data + q_offset(a.q_rotated, seq, i, head);
		i32 position = before + (a.q_rows_same_position ? 0 : i);

		for (i32 dim = lane_id(); dim < a.hdim_q; dim += FMHA_WAVE)
			to[dim * a.q_rotated.stride_dim] =
				element(from, a.q.stride_dim, position, dim);
	}

	METHOD void run()
	{
		i32 n = grid_row(block_id_x(), C::THREADS / FMHA_WAVE, wave_id());
		i32 n_keys = grid_append_keys(&a);

		seq = find_sequence(a.sequences, &a.cache, block_id_z());
		seq.n_k += seq.leftpad;
		seq.leftpad = 0; /* positions count the padding */
		before = max_of(a.sequences.seqlen_k ? seq.n_k : seq.n_k - a.seqlen_new, 0);
		if (n < n_keys) {
			write_key(a.k_new, a.k, false, n / a.nhead_k, n % a.nhead_k);
		} else if (n < 2 * n_keys) {
			n -= n_keys;
			write_key(a.v_new, a.v, true, n / a.nhead_k, n % a.nhead_k);
		} else if (a.q_rotated.data) {
			n -= 2 * n_keys;
			if (n / a.nhead_q < seq.n_q)
				write_query(n / a.nhead_q, n % a.nhead_q);
		}
	}
};

#endif
