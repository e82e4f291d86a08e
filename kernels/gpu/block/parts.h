/* SPDX-License-Identifier: MIT */
/*
 * parts.h: heads of more than 256 columns, whose tiles LDS has no room for and whose sums no
 * registers: halves of the columns (lds_part()) come one after the other. A product along the
 * columns adds them up; one whose columns are results has a half of them, and whoever wants both
 * goes through the keys or queries once more.
 */
#ifndef FMHA_GPU_PARTS_H
#define FMHA_GPU_PARTS_H

#include "core/config.h"

/* A view's columns from `from` on, which is one of them. */
template <class View> struct PartOf {
	typedef typename View::Storage Storage;
	static const bool CONTIGUOUS = View::CONTIGUOUS;
	const View &whole;
	i32 from;
	const Storage *base;
	i64 stride_seq;
	i32 hdim;
	bool vector, pairs;

	METHOD PartOf(const View &view, i32 column)
		: whole(view), from(column), base(view.base), stride_seq(view.stride_seq),
		  hdim(view.hdim - column), vector(view.vector), pairs(view.pairs)
	{
	}
	METHOD const Storage *at(i32 row, i32 dim) const { return whole.at(row, from + dim); }
	METHOD i32 end_of(i32 row, i32 last) const { return whole.end_of(row, last); }
};
template <class View> struct Chooses<PartOf<View>> : Chooses<View> {
};

/* What is no array of elements knows its parts by itself. */
template <class From, class View>
DEV chunk32 load_floats(const PartOf<LatentView<View>> &part, i32 row, i32 dim, bool valid)
{
	return load_floats<From>(part.whole, row, part.from + dim, valid);
}
template <class To, class From, class View>
DEV chunk16 load_chunk(const PartOf<LatentView<View>> &part, i32 row, i32 dim, bool valid)
{
	return load_chunk<To, From>(part.whole, row, part.from + dim, valid);
}

template <bool PARTED, class View> DEV auto part_of(const View &view, i32 from)
{
	if constexpr (PARTED)
		return PartOf<View>(view, from);
	else
		return view;
}

/* A tile that is known by where it lies: products bring its parts of COLUMNS, of which Store is
 * one. Has the words of tiles that travel, and does nothing at them. */
template <class Core, class Store, class From, class View, int COLUMNS, bool STATIONARY>
struct PartedTile {
	typedef Store Part;
	static const int BYTES = Store::BYTES, PART = COLUMNS;
	View view;
	char *lds;
	i32 wave, first, end;

	METHOD void place(char *at, i32 of_wave = 0) { lds = at, wave = of_wave; }
	template <class> METHOD void fetch(const View &of, i32 row, i32 rows_end)
	{
		view = of, first = row, end = rows_end;
	}
	template <class> METHOD void copy(const View &of, i32 row, i32 rows_end)
	{
		fetch<From>(of, row, rows_end);
	}
	template <class> METHOD void fetch_ahead(const View &of, i32 row, i32 rows_end)
	{
		fetch<From>(of, row, rows_end);
	}
	template <class> METHOD void fetch_late(const View &, i32, i32) {}
	METHOD void arrive() const {}

	/* Into LDS, where nobody reads the last one any more. */
	METHOD void bring(Store &to, i32 column) const
	{
		const PartOf<View> part(view, column);

		if constexpr (STATIONARY)
			to.place(lds, wave);
		else
			to.place(lds);
		if constexpr (STATIONARY || Core::FETCH_NEEDS_LDS) {
			to.template fetch<From>(part, first, end);
			to.arrive();
		} else {
			to.template copy<From>(part, first, end);
		}
	}
};

/* S += A B^T; B: rows column .. column + 16 TN - 1 of the tile. */
template <class Core, int TM, int TN, class A, class B>
DEV void multiply_parts(RegTile<Core, TM, TN> &s, const A &a, const B &b, i32 column)
{
	NO_UNROLL
	for (i32 from = 0; from < a.view.hdim; from += A::PART) {
		typename A::Part x;
		typename B::Part y;

		block_sync();
		a.bring(x, from);
		b.bring(y, from);
		block_sync();
		multiply_abt<A::PART>(s, x, y, column, Core());
	}
}

/* O += P V, of V's columns from `from` on. */
template <class Core, int TM, int TN, int TD, class B>
DEV void multiply_part(RegTile<Core, TM, TD> &o, const OperandTile<Core, TM, TN> &p, const B &b,
		       i32 from)
{
	typename B::Part y;

	block_sync();
	b.bring(y, from);
	block_sync();
	multiply_ab(o, p, y, 0, Core());
}

#endif
