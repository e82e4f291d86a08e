/* SPDX-License-Identifier: MIT */
/*
 * tma.h: Hopper's copy engine and the barriers in shared memory that it reports to. A tile in
 * shared memory is slabs of 128 bytes' columns, each rows x 128 bytes with the 128-byte swizzle:
 * what a box of a tensor map brings and what WGMMA's descriptors (wgmma.h) name.
 */
#ifndef FMHA_GPU_TMA_H
#define FMHA_GPU_TMA_H

#include "core/core_mma.h"

/* CUtensorMap: made by the driver, read by the copy engine. */
struct alignas(64) TensorMap {
	u64 w[16];
};

static const int SLAB_WIDTH = 128, SLAB_COLUMNS = SLAB_WIDTH / 2; /* in bytes; in 16-bit elements */

/* Columns beyond the tensor's come as zeros. */
static __device__ constexpr int slabs_of(int columns, int element_bytes = 2)
{
	return (columns * element_bytes + SLAB_WIDTH - 1) / SLAB_WIDTH;
}
static __device__ constexpr int slab_bytes(int rows) { return rows * SLAB_WIDTH; }

DEV void barrier_init(u32 at, i32 arrivals)
{
	asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
}
/* The copy engine sees the barriers that this thread made. */
DEV void barrier_publish() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEV void barrier_arrive(u32 at)
{
	asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}
DEV void barrier_expect(u32 at, i32 bytes)
{
	asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes)
		     : "memory");
}
/* Once all that this thread copied by copy_async has come: an arrival that the barrier counts. */
DEV void barrier_arrive_copied(u32 at)
{
	asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(at) : "memory");
}
/*
 * Until the phase of this parity is over. It ends: memory of the block is nobody else's, every role
 * of a loop goes through the same steps in the same order, waits for arrivals of steps before its
 * own alone, and arrives where others wait whatever its data; of a copy, the bytes that are
 * expected are those of the boxes asked for beside it, whole even where the tensor ends, and
 * gpu_maps.c makes the boxes of the kernel's own tile (test_gpu_maps.c: a row of the catalogue has
 * the boxes that its loop counts on). A copy that faults ends the launch.
 */
DEV void barrier_wait(u32 at, u32 parity)
{
	asm volatile("{\n\t"
		     ".reg .pred over;\n\t"
		     "again:\n\t"
		     "mbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\n\t"
		     "@!over bra again;\n\t"
		     "}" ::"r"(at),
		     "r"(parity)
		     : "memory");
}

/* One box of columns column .., rows row ..; what lies outside of the tensor becomes zero. */
DEV void load_box(u32 to, const TensorMap &map, u32 barrier, i32 column, i32 row, i32 head,
		  i32 batch)
{
	asm volatile(
		"cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
		"[%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
		"l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch)
		: "memory");
}

/*
 * Blocks of a cluster, which have the same addresses in shared memory. What one asks for all of
 * them may get, and it asks once all have released the place: their warps arrive at its barrier. A
 * block must not end while others may still arrive at its barriers or wait for what it asked for:
 * it waits for the last release, too.
 */
DEV u32 cluster_rank()
{
	u32 rank;

	asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
	return rank;
}
/* All threads of all blocks; barriers that were published before are seen, and nothing else. */
DEV void cluster_sync()
{
	asm volatile("barrier.cluster.arrive.relaxed;\n\t"
		     "barrier.cluster.wait.acquire;" ::
			     : "memory");
}
/* At the barrier of another block, or the own one. It says that this warp's products have read what
 * they read, not what it wrote: a wider release would wait for memory. */
DEV void barrier_arrive_at(u32 at, u32 rank)
{
	asm volatile("{\n\t"
		     ".reg .b32 there;\n\t"
		     "mapa.shared::cluster.u32 there, %0, %1;\n\t"
		     "mbarrier.arrive.shared::cluster.b64 _, [there];\n\t"
		     "}" ::"r"(at),
		     "r"(rank)
		     : "memory");
}
/* load_box() for the blocks of @ranks, a bit each: to the same address in each of them, which its
 * own barrier at that address counts. */
DEV void load_box_for(u32 ranks, u32 to, const TensorMap &map, u32 barrier, i32 column, i32 row,
		      i32 head, i32 batch)
{
	asm volatile(
		"cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
		".multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
		"l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch),
		"h"((u16)ranks)
		: "memory");
}
/* How far from the own block's shared memory that of @rank is. */
DEV u32 cluster_distance(u32 at, u32 rank)
{
	u32 there;

	asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
	return there - at;
}
/* 16 bytes into another block's shared memory, which the barrier there counts when they have come;
 * both by addresses of the cluster. */
DEV void store_to_block(u32 to, const u32 (&x)[4], u32 barrier)
{
	asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], "
		     "{%1, %2, %3, %4}, [%5];" ::"r"(to),
		     "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(barrier)
		     : "memory");
}
/* What this thread wrote to shared memory is seen by copies and matrix products that follow a
 * barrier. */
DEV void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }


/* Floats in shared memory are added to memory, 16 bytes or a multiple; *_wait: until those of this
 * thread have been read, or are done. */
DEV void add_bulk(float *to, u32 from, i32 bytes)
{
	asm volatile(
		"cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n\t"
		"cp.async.bulk.commit_group;" ::"l"(to),
		"r"(from), "r"(bytes)
		: "memory");
}
DEV void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
DEV void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

/*
 * Turns of blocks at what they add to: by a counter in memory, 0 when the launch begins. Whose turn
 * comes before starts earlier in the grid and waits for nobody behind it, so a turn comes. Unless
 * the counter is not what it should be, as where another launch has the same workspace: past the
 * turn, or for ever before it. What is summed is wrong then, so the launch ends with an error. By
 * looks and not by a clock, which runs on while other processes have the device or a checker slows
 * this one down: each asks L2 and takes 0.6 us or more, so a turn has at least 20 seconds.
 */
static const i32 MOST_LOOKS = 1 << 25;

DEV void wait_for_turn(const u32 *counter, i32 turn)
{
	i32 left = MOST_LOOKS, done;

	do {
		asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
			     : "=r"(done)
			     : "l"(counter)
			     : "memory");
		if (done > turn || --left == 0)
			asm volatile("trap;");
	} while (done != turn);
	asm volatile("fence.proxy.async.global;" ::: "memory");
}
DEV void end_turn(u32 *counter)
{
	bulk_wait();
	asm volatile("fence.proxy.async.global;\n\t"
		     "red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter)
		     : "memory");
}

/*
 * A warp arrives behind what its lanes have stored. Return: whether it is the last of @n at this
 * counter, 0 when the launch begins, and sees what all of them have stored. Nobody waits.
 */
DEV bool arrive_last(u32 *counter, u32 n)
{
	u32 before = 0;

	wave_sync();
	if (lane_id() == 0)
		asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
			     : "=r"(before)
			     : "l"(counter)
			     : "memory");
	before = shuffle_word(before, 0);
	wave_sync();
	return before == n - 1;
}

/* ---- shared memory by address ---- */

DEV void store_zeros(u32 at)
{
	asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
}
DEV void store_shared(u32 at, float x)
{
	asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(x) : "memory");
}
DEV void store_shared_byte(u32 at, u32 x)
{
	asm volatile("st.shared.u8 [%0], %1;" ::"r"(at), "r"(x) : "memory");
}
DEV void store_shared_half(u32 at, u32 x)
{
	asm volatile("st.shared.u16 [%0], %1;" ::"r"(at), "h"((u16)x) : "memory");
}
DEV void store_shared_8(u32 at, chunk8 x)
{
	asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(at), "r"(x.w[0]), "r"(x.w[1])
		     : "memory");
}
DEV void store_shared_16(u32 at, const float *x)
{
	asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(x[0]), "f"(x[1]),
		     "f"(x[2]), "f"(x[3])
		     : "memory");
}
DEV void store_shared_16(u32 at, const u32 (&x)[4])
{
	asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x[0]), "r"(x[1]),
		     "r"(x[2]), "r"(x[3])
		     : "memory");
}
DEV void load_shared_16(u32 at, u32 (&x)[4])
{
	asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
		     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
		     : "r"(at)
		     : "memory");
}
DEV float load_shared(u32 at)
{
	float x;

	asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at) : "memory");
	return x;
}
DEV u32 load_shared_half(u32 at)
{
	u16 x;

	asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(at) : "memory");
	return x;
}

DEV chunk8 load_shared_8(u32 at)
{
	chunk8 x;

	asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
		     : "=r"(x.w[0]), "=r"(x.w[1])
		     : "r"(at)
		     : "memory");
	return x;
}
/* Four 8 x 8 matrices of 16-bit elements, held as products hold them; lane l of matrix l / 8 says
 * where row, or column, l % 8 goes. */
DEV void store_matrix(u32 at, const u32 (&x)[4])
{
	asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at),
		     "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
		     : "memory");
}
DEV void store_matrix_transposed(u32 at, const u32 (&x)[4])
{
	asm volatile(
		"stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at),
		"r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
		: "memory");
}

/* Barriers of the hardware, by number; 0 is block_sync()'s. */
DEV void named_sync(i32 id, i32 threads)
{
	asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
DEV void named_arrive(i32 id, i32 threads)
{
	asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* Registers of a thread, for whole warpgroups. */
template <int N> DEV void take_registers()
{
	asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> DEV void give_registers()
{
	asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

#endif
