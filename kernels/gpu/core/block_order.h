/* SPDX-License-Identifier: MIT */
/*
 * block_order.h: in which order the blocks of a launch take what there is to do, for kernels, and
 * for the planner, who foretells how long all of them take. Plain functions that C and device C++
 * both read.
 *
 * Blocks start in the order of their numbers, as many at once as there are units. x counts what a
 * head is cut into, y heads.
 */
#ifndef FMHA_KERNELS_BLOCK_ORDER_H
#define FMHA_KERNELS_BLOCK_ORDER_H

#include <kernels/abi.h>

#ifdef __cplusplus
#define ORDER_FN DEV
#else
#define ORDER_FN static inline
#endif

ORDER_FN abi_i32 order_ceil(abi_i32 a, abi_i32 b)
{
	return (a + b - 1) / b;
}

/* Heads whose rows of `row_bytes` stay in the L2 cache together. */
ORDER_FN abi_i32 heads_at_once(abi_i32 rows, abi_i32 row_bytes, abi_i32 n_heads)
{
	const float L2_BYTES = 32 << 20; /* less than any large GPU has */
	abi_i32 n = (abi_i32)(L2_BYTES / ((float)(rows > 1 ? rows : 1) * (float)row_bytes));

	return n < 1 ? 1 : n > n_heads ? n_heads : n;
}

/*
 * Under a causal mask some blocks of a head, those with a small x, take much longer than others.
 * Blocks start in the order of x, then y: here the long ones of `heads` heads come first, and what
 * is left at the end is short.
 */
ORDER_FN void longest_first(abi_i32 n_x, abi_i32 n_y, abi_i32 heads, abi_i32 *x, abi_i32 *y)
{
	abi_i32 first = *y / heads * heads, index = (*y - first) * n_x + *x;

	heads = heads < n_y - first ? heads : n_y - first;
	*x = index / heads;
	*y = first + index % heads;
}

/*
 * Heads whose blocks come before all others, where `fit` of them have what they read at a time in
 * the cache. What is left behind full sections would begin with long blocks last: sections are
 * alike, and only one where the cache nearly has room.
 */
ORDER_FN abi_i32 order_section(abi_i32 n_heads, abi_i32 fit)
{
	return 5 * n_heads <= 8 * fit ? n_heads
				      : order_ceil(n_heads, order_ceil(n_heads, fit));
}

/*
 * Longest first, units that had long blocks get the shorter ones of the second round, and all are
 * equally far; the third, where it is the last, leaves them as far apart as its blocks are. So the
 * second round has every other block first, and the sums of two differ by as much as what comes to
 * them.
 */
ORDER_FN abi_i32 order_balanced(abi_i32 number, abi_i32 n_blocks, abi_i32 n_units)
{
	abi_i32 rounds = n_blocks / n_units, place = number - n_units,
		half = order_ceil(n_units, 2);

	if (rounds < 2 || rounds % 2 || 2 * (n_blocks % n_units) < n_units || place < 0 ||
	    place >= n_units)
		return number;
	return n_units + (place < half ? 2 * place : 2 * (place - half) + 1);
}

/* `run` blocks of each head after those of another, and so on: blocks beside each other are of few
 * heads. Where they go by work, those of all heads that take long still come first. */
ORDER_FN void order_in_runs(abi_i32 n_x, abi_i32 n_y, abi_i32 run, abi_i32 number, abi_i32 *ret_x,
			    abi_i32 *ret_y)
{
	abi_i32 first = number / (run * n_y) * run, place = number - first * n_y;

	run = run < n_x - first ? run : n_x - first;
	*ret_y = place / run;
	*ret_x = first + place - *ret_y * run;
}

/* Of blocks that own keys. */
struct block_order {
	abi_i32 n_x, n_y;
	/* as order_section(); 0: blocks of a head are alike, one head after the other */
	abi_i32 section;
	abi_i32 units; /* compute units, for the second round's order; 0: it has none of its own */
};

ORDER_FN void order_place(struct block_order o, abi_i32 number, abi_i32 *ret_x, abi_i32 *ret_y)
{
	if (o.units > 0)
		number = order_balanced(number, o.n_x * o.n_y, o.units);
	*ret_y = number / o.n_x;
	*ret_x = number - *ret_y * o.n_x;
	if (o.section > 0)
		longest_first(o.n_x, o.n_y, o.section, ret_x, ret_y);
}

#endif
