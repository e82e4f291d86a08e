/* SPDX-License-Identifier: MIT */
/*
 * prelude.h: the little that NVRTC, nvcc, hipRTC and plain clang do not agree on, and nothing else:
 * keywords, who am I, barriers, shuffles, a few arithmetic instructions. No header of any vendor is
 * included, so that one compiler option line is enough everywhere.
 *
 * Widths: a "wave" is 32 lanes (NVIDIA, RDNA) or 64 (CDNA).
 */
#ifndef FMHA_GPU_PRELUDE_H
#define FMHA_GPU_PRELUDE_H

#include <kernels/abi.h>

#if defined(__CUDA_ARCH__) || defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define FMHA_NVIDIA 1
#else
#define FMHA_NVIDIA 0
#ifndef __global__
#define __global__ __attribute__((global))
#endif
#ifndef __device__
#define __device__ __attribute__((device))
#endif
#ifndef __shared__
#define __shared__ __attribute__((shared))
#endif
#endif

#include "lds.h"

#if FMHA_NVIDIA
#define FMHA_INLINE        __forceinline__
#define FMHA_BOUNDS(n, m) __launch_bounds__(n, m)
#else
#define FMHA_INLINE inline __attribute__((always_inline))
/* The second number of the attribute is waves per SIMD, not blocks: leave it to the compiler. */
#define FMHA_BOUNDS(n, m) __attribute__((amdgpu_flat_work_group_size(n, n)))
#endif

#define DEV    static __device__ FMHA_INLINE /* a function of this translation unit */
#define METHOD __device__ FMHA_INLINE        /* a member function */
#define UNROLL    _Pragma("unroll")
#define NO_UNROLL _Pragma("unroll 1")

typedef unsigned char u8;
typedef unsigned short u16;
typedef abi_i32 i32;
typedef abi_u32 u32;
typedef abi_i64 i64;
typedef abi_u64 u64;

#include "grid.h"

/* 16 bytes moved at once. */
struct alignas(16) chunk16 {
	u32 w[4];
};
struct alignas(8) chunk8 {
	u32 w[2];
};

/* One 16-byte load. clang loses track of a struct that is loaded whole in one branch and by parts
 * in another, and puts it into scratch memory; of a vector it does not. */
DEV chunk16 load16(const void *p)
{
#if defined(__clang__)
	typedef u32 Vector __attribute__((ext_vector_type(4)));
	Vector v = *(const Vector *)p;

	return chunk16{{v.x, v.y, v.z, v.w}};
#else
	return *(const chunk16 *)p;
#endif
}

#define FMHA_LOG2_E 1.44269504088896340736f
#define FMHA_LN_2   0.69314718055994530942f

/* A load from memory proper. Where clang cannot see what kind of memory a pointer names it uses
 * flat instructions, which are slower and count as LDS accesses too. */
template <class T> DEV T load_memory(const T *p)
{
#if FMHA_NVIDIA
	return *p;
#else
	typedef const T __attribute__((address_space(1))) Global;
	return *(Global *)p;
#endif
}

/* Reads memory that nobody writes while the kernel runs; where all lanes want the same of it, AMD's
 * scalar unit reads it. */
template <class T> DEV T load_constant(const T *p)
{
#if FMHA_NVIDIA
	return *p;
#else
	typedef const T __attribute__((address_space(4))) Constant;
	return *(Constant *)p;
#endif
}

DEV float bits_to_float(u32 x)
{
	union {
		u32 u;
		float f;
	} v;
	v.u = x;
	return v.f;
}

DEV u32 float_to_bits(float x)
{
	union {
		float f;
		u32 u;
	} v;
	v.f = x;
	return v.u;
}

DEV float minus_infinity() { return bits_to_float(0xff800000u); }

template <class T> DEV T min_of(T a, T b) { return a < b ? a : b; }
template <class T> DEV T max_of(T a, T b) { return a > b ? a : b; }
template <class T> DEV T clamp(T x, T low, T high) { return x < low ? low : x > high ? high : x; }
static __device__ constexpr int power_of_2_from(int n)
{
	int p = 1;

	while (p < n)
		p *= 2;
	return p;
}
DEV i32 ceil_div(i32 a, i32 b) { return grid_ceil(a, b); }

#if FMHA_NVIDIA

#define FMHA_WAVE 32
DEV i32 thread_id() { return (i32)threadIdx.x; }
DEV i32 block_id_x() { return (i32)blockIdx.x; }
DEV i32 block_id_y() { return (i32)blockIdx.y; }
DEV i32 block_id_z() { return (i32)blockIdx.z; }
DEV void block_sync() { __syncthreads(); }
DEV void wave_sync() { __syncwarp(); }
DEV float shuffle_xor(float x, i32 mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
DEV float shuffle_from(float x, i32 lane) { return __shfl_sync(0xffffffffu, x, lane); }
DEV u32 shuffle_word(u32 x, i32 lane) { return __shfl_sync(0xffffffffu, x, lane); }
DEV bool any_of_wave(bool x) { return __any_sync(0xffffffffu, x); }
DEV i32 sum_of_wave(i32 x) { return __reduce_add_sync(0xffffffffu, x); }

DEV float exp2_fast(float x)
{
	float y;
	asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
	return y;
}

DEV float log2_fast(float x)
{
	float y;
	asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
	return y;
}

/* To the last bit or so, without the long way round that rounding takes. */
DEV float reciprocal(float x)
{
	float y;
	asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
	return y;
}

/* Off by 2^-11 of itself, NVIDIA says; by 1.1e-5 of it, an H200 does. */
DEV float tanh_fast(float x)
{
	float y;
	asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
	return y;
}

/* Where a launch says so (launch.h: overlaps), a stage's blocks may begin while the stage before
 * it, which let them, still runs; what that writes is there after the wait. */
#if __CUDA_ARCH__ >= 900
DEV void let_next_stage_begin() { asm volatile("griddepcontrol.launch_dependents;"); }
DEV void wait_for_stage_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#else
DEV void let_next_stage_begin() {}
DEV void wait_for_stage_before() {}
#endif
DEV u32 multiply_high(u32 a, u32 b) { return __umulhi(a, b); }
/* no pairs of registers: they spill */
DEV u64 multiply_wide(u32 a, u32 b) { return (u64)__umulhi(a, b) << 32 | a * b; }
DEV float larger(float a, float b) { return fmaxf(a, b); } /* drops a NaN */
DEV float magnitude_of(float x) { return fabsf(x); }
DEV float multiply_add(float x, float y, float z) { return fmaf(x, y, z); }
DEV void atomic_add(float *p, float x) { (void)atomicAdd(p, x); }

#else

#if defined(__GFX9__) || defined(__gfx90a__) || defined(__gfx942__) || defined(__gfx950__)
#define FMHA_WAVE 64
#else
#define FMHA_WAVE 32
#endif
DEV i32 thread_id() { return (i32)__builtin_amdgcn_workitem_id_x(); }
DEV i32 block_id_x() { return (i32)__builtin_amdgcn_workgroup_id_x(); }
DEV i32 block_id_y() { return (i32)__builtin_amdgcn_workgroup_id_y(); }
DEV i32 block_id_z() { return (i32)__builtin_amdgcn_workgroup_id_z(); }

/* Waves of a block exchange data through LDS only: newer compilers can be told so, and then neither
 * wait for memory at every barrier nor write caches back. */
#if __clang_major__ >= 19
#define FMHA_FENCE(order, scope) __builtin_amdgcn_fence(order, scope, "local")
#else
#define FMHA_FENCE(order, scope) __builtin_amdgcn_fence(order, scope)
#endif

/* A barrier waits for no counter. Compilers put the wait of a release fence in front of it, and
 * take it away where one way to the barrier has nothing under way, as the first one into a loop
 * whose rounds end with writes. This one
 * stays: of LDS alone, and nothing where the fence's own has done it. */
DEV void lds_settle()
{
#if defined(__GFX12__)
	asm volatile("s_wait_dscnt 0x0" ::: "memory"); /* there is no builtin */
#elif defined(__GFX11__)
	__builtin_amdgcn_s_waitcnt(0xfc07);
#else
	__builtin_amdgcn_s_waitcnt(0xc07f);
#endif
}

DEV void block_sync()
{
	FMHA_FENCE(__ATOMIC_RELEASE, "workgroup");
	lds_settle();
	__builtin_amdgcn_s_barrier();
	FMHA_FENCE(__ATOMIC_ACQUIRE, "workgroup");
}

DEV void wave_sync()
{
	FMHA_FENCE(__ATOMIC_ACQ_REL, "wavefront");
	__builtin_amdgcn_wave_barrier();
}

DEV i32 lane_of_wave() { return thread_id() % FMHA_WAVE; }

DEV float shuffle_from(float x, i32 lane)
{
	return bits_to_float((u32)__builtin_amdgcn_ds_bpermute(lane * 4, (i32)float_to_bits(x)));
}

DEV u32 shuffle_word(u32 x, i32 lane)
{
	return (u32)__builtin_amdgcn_ds_bpermute(lane * 4, (i32)x);
}

DEV float shuffle_xor(float x, i32 mask) { return shuffle_from(x, lane_of_wave() ^ mask); }

DEV bool any_of_wave(bool x)
{
	const int NOT_EQUAL = 33; /* llvm::CmpInst::ICMP_NE; old compilers have no ballot */

	return __builtin_amdgcn_uicmp((u32)x, 0u, NOT_EQUAL) != 0;
}

/* v_exp_f32 and v_log_f32, both base 2; older compilers have no builtins for the bare instructions. */
#if __has_builtin(__builtin_amdgcn_exp2f) && __has_builtin(__builtin_amdgcn_logf)
DEV float exp2_fast(float x) { return __builtin_amdgcn_exp2f(x); }
DEV float log2_fast(float x) { return __builtin_amdgcn_logf(x); }
#else
DEV float exp2_fast(float x) { return __builtin_exp2f(x); }
DEV float log2_fast(float x) { return __builtin_log2f(x); }
#endif

/* One Newton step on the hardware's estimate: 1 / x to the last bit or so. */
DEV float reciprocal(float x)
{
	float y = __builtin_amdgcn_rcpf(x);
	float z = __builtin_fmaf(__builtin_fmaf(-x, y, 1.0f), y, y);

	return z == z ? z : y; /* 0 and infinity have no Newton step */
}

DEV void let_next_stage_begin() {}
DEV void wait_for_stage_before() {}
/* one instruction, as each half by itself would be */
DEV u64 multiply_wide(u32 a, u32 b) { return (u64)a * b; }
DEV u32 multiply_high(u32 a, u32 b) { return (u32)(multiply_wide(a, b) >> 32); }
DEV float larger(float a, float b) { return __builtin_fmaxf(a, b); }
DEV float magnitude_of(float x) { return __builtin_fabsf(x); }
DEV float multiply_add(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
DEV void atomic_add(float *p, float x)
{
	(void)__atomic_fetch_add(p, x, __ATOMIC_RELAXED);
}

#endif

/* The same number, but the compiler does not know: what follows from it is computed anew instead of
 * being kept in registers across a loop. */
DEV i32 hidden(i32 x)
{
#if FMHA_NVIDIA
	asm volatile("" : "+r"(x));
#endif
	return x;
}

/* The same for numbers that differ between lanes. */
DEV const char *hidden_lane(const char *p)
{
#if FMHA_NVIDIA
	asm volatile("" : "+l"(p));
#else
	asm volatile("" : "+v"(p));
#endif
	return p;
}

DEV i32 hidden_lane(i32 x)
{
#if FMHA_NVIDIA
	asm volatile("" : "+r"(x));
#else
	asm volatile("" : "+v"(x));
#endif
	return x;
}

/* The same number in a vector register of the plain kind: out of the scalar registers, which are
 * few, and out of CDNA's accumulation registers. */
template <class T> DEV T plain_register(T x)
{
#if !FMHA_NVIDIA
	asm("" : "+v"(x));
#endif
	return x;
}

/* clang's scheduler moves nothing past here, so that what follows does not fetch its operands yet;
 * and it does not compare a store with every other of a long row of them, which takes a second. */
DEV void scheduling_barrier()
{
#if !FMHA_NVIDIA
#if __has_builtin(__builtin_amdgcn_sched_barrier)
	__builtin_amdgcn_sched_barrier(0);
#endif
#endif
}

/* Quotients of numbers below 2^31 by one that stays. */
struct Divisor {
	i32 by;
	u32 inverse;

	METHOD static Divisor make(i32 by) { return Divisor{by, 0xffffffffu / (u32)by}; }
	METHOD i32 quotient(i32 n) const
	{
		i32 least = (i32)multiply_high((u32)n, inverse); /* or one more */

		return n - least * by < by ? least : least + 1;
	}
};

static const i32 FROM_THE_FIRST = -(1 << 30);

DEV i32 lane_id() { return thread_id() % FMHA_WAVE; }

/* The same in every lane: tells the compiler that control flow on it is uniform. */
DEV i32 wave_id()
{
	i32 wave = thread_id() / FMHA_WAVE;
#if FMHA_NVIDIA
	return __shfl_sync(0xffffffffu, wave, 0);
#else
	return __builtin_amdgcn_readfirstlane(wave);
#endif
}

/* A word that is the same in every lane, in a scalar register where there are such. NVIDIA's
 * compiler keeps it as it likes. */
DEV u64 uniform(u64 word)
{
#if FMHA_NVIDIA
	return word;
#else
	u32 low = __builtin_amdgcn_readfirstlane((u32)word);

	return (u64)(u32)__builtin_amdgcn_readfirstlane((u32)(word >> 32)) << 32 | low;
#endif
}

/* tanh from exp2: absolute error below 2e-7; a polynomial where that would be a large relative one. */
DEV float tanh_of(float x)
{
	float e = exp2_fast(2 * FMHA_LOG2_E * x);
	float large = 1.0f - 2.0f * reciprocal(1.0f + e);
	float y = x * x;
	float small = x * (1.0f + y * (-1.0f / 3 + y * (2.0f / 15 - y * (17.0f / 315))));

	return y < 0.01f ? small : large;
}

#endif
