/* SPDX-License-Identifier: MIT */
/*
 * buffer.h: memory by way of AMD's buffer descriptors: the hardware adds a lane's offset to the
 * base and gives zero for what lies behind the end, so that a loop needs neither 64-bit addresses
 * nor comparisons.
 */
#ifndef FMHA_GPU_BUFFER_H
#define FMHA_GPU_BUFFER_H

#include "core/types.h"

struct chunk4 {
	u32 w[1];
};

/* Behind the end of every buffer. */
static const u32 BUFFER_NOWHERE = 0x80000000u;

/* Word 3: an untyped buffer, whose bounds are checked by the byte. */
#if defined(__GFX9__)
#define FMHA_BUFFER_FLAGS 0x00027000
#else
#define FMHA_BUFFER_FLAGS 0x31004000
#endif

struct Buffer {
#if __has_builtin(__builtin_amdgcn_make_buffer_rsrc)
	__amdgpu_buffer_rsrc_t descriptor;

	/* The same for all lanes, which the compiler cannot always see. */
	METHOD static Buffer make(const void *base, u32 bytes)
	{
		u32 low = __builtin_amdgcn_readfirstlane((u32)(u64)base);
		u64 high = __builtin_amdgcn_readfirstlane((u32)((u64)base >> 32));

		return Buffer{__builtin_amdgcn_make_buffer_rsrc(
			(void *)(high << 32 | low), 0, __builtin_amdgcn_readfirstlane(bytes),
			FMHA_BUFFER_FLAGS)};
	}
	/* @more: the same for all lanes; what is behind the end is so by @at alone. */
	METHOD u32 load2(u32 at, u32 more = 0) const
	{
		return __builtin_amdgcn_raw_buffer_load_b16(descriptor, (i32)at, (i32)more, 0);
	}
	METHOD chunk4 load4(u32 at, u32 more = 0) const
	{
		return chunk4{
			{__builtin_amdgcn_raw_buffer_load_b32(descriptor, (i32)at, (i32)more, 0)}};
	}
	METHOD void store2(u16 x, u32 at, u32 more = 0) const
	{
		__builtin_amdgcn_raw_buffer_store_b16(x, descriptor, (i32)at, (i32)more, 0);
	}
	METHOD void store4(u32 x, u32 at, u32 more = 0) const
	{
		__builtin_amdgcn_raw_buffer_store_b32(x, descriptor, (i32)at, (i32)more, 0);
	}
	METHOD chunk16 load16(u32 at) const
	{
		return __builtin_bit_cast(
			chunk16, __builtin_amdgcn_raw_buffer_load_b128(descriptor, (i32)at, 0, 0));
	}
	METHOD chunk8 load8(u32 at) const
	{
		return __builtin_bit_cast(
			chunk8, __builtin_amdgcn_raw_buffer_load_b64(descriptor, (i32)at, 0, 0));
	}
#else /* an older clang */
	const char *base;
	u32 bytes;

	METHOD static Buffer make(const void *base, u32 bytes)
	{
		return Buffer{(const char *)base, bytes};
	}
	METHOD u32 load2(u32 at, u32 more = 0) const
	{
		return at < bytes ? *(const u16 *)(base + at + more) : 0;
	}
	METHOD chunk4 load4(u32 at, u32 more = 0) const
	{
		return at < bytes ? *(const chunk4 *)(base + at + more) : chunk4{};
	}
	METHOD void store2(u16 x, u32 at, u32 more = 0) const
	{
		if (at < bytes)
			*(u16 *)(base + at + more) = x;
	}
	METHOD void store4(u32 x, u32 at, u32 more = 0) const
	{
		if (at < bytes)
			*(u32 *)(base + at + more) = x;
	}
	METHOD chunk16 load16(u32 at) const
	{
		return at < bytes ? *(const chunk16 *)(base + at) : chunk16{};
	}
	METHOD chunk8 load8(u32 at) const
	{
		return at < bytes ? *(const chunk8 *)(base + at) : chunk8{};
	}
#endif

	/* As many words. */
	template <int WORDS> METHOD auto load(u32 at) const
	{
		static_assert(WORDS == 1 || WORDS == 2 || WORDS == 4, "4, 8 or 16 bytes");
		if constexpr (WORDS == 4)
			return load16(at);
		else if constexpr (WORDS == 2)
			return load8(at);
		else
			return load4(at);
	}

	/* n_rows rows of `width` bytes, at most `most`, of which gpu_maps.c has made sure that they
	 * take less than 2 GiB. Of one row the distance to the next may be anything. */
	METHOD static Buffer rows(const void *base, i32 n_rows, i32 most, u32 row_bytes, u32 width)
	{
		i32 n = min_of(n_rows, most);

		return make(base, n > 0 ? (u32)(n - 1) * row_bytes + width : 0);
	}
};

#endif
