/* SPDX-License-Identifier: MIT */
/*
 * gpu_maps.c: what main loops ask of tensors. Hopper's take tensor maps, fwd_wgmma.h of Q, K, V and
 * a bias, fwd_latent.h of K, fwd_wide.h of K and V, bwd_wgmma.h of Q, K, V and dO, and store
 * results by whole chunks; AMD's, *_amd.h and fwd_amd_decode.h, fetch whole chunks through
 * descriptors of a tile's rows. In group mode the packed axis is the sequence axis, and kernels add
 * where a sequence starts; rows of its neighbours that a box brings along are masked.
 */
#include <kernels/gpu_kernel.h>
#include <kernels/view.h>

#include <stddef.h>
#include <string.h>

#include "core/grid.h"
#include "core/lds.h"

#define SWIZZLE       128 /* bytes: also the width of a box */
#define MOST_STRIDE   ((int64_t)1 << 40)
#define MOST_SOFT_CAP 1024 /* scores are taken from it in float32 */

/* A tensor, dense along the head dimension (a bias: along the keys). */
struct operand {
	const struct abi_tensor *tensor;
	int64_t hdim, rows, heads, batch;
	int32_t dtype;
};

static int64_t element_bytes(int32_t dtype)
{
	return dtype == ABI_F32                                            ? 4
	       : dtype == ABI_E4M3 || dtype == ABI_E5M2 || dtype == ABI_I8 ? 1
									   : 2;
}

/* Bytes between neighbours of dimensions 1 to 3; NULL, or why the engine cannot follow. */
static const char *find_strides(const struct operand *o, uint64_t ret_strides[3])
{
	const struct abi_tensor *t = o->tensor;
	const int64_t strides[] = {t->stride_seq, t->stride_head, t->stride_batch};
	const int64_t extents[] = {o->rows, o->heads, o->batch};

	if (t->stride_dim != 1)
		return "the elements of a row have gaps between them";
	if ((uintptr_t)t->data % LAUNCH_ALIGNMENT)
		return "a tensor does not begin at a multiple of 16 bytes";
	for (int i = 0; i < 3; i++) {
		/* The stride of an axis of one element may be anything, but not for the engine. */
		int64_t stride = extents[i] == 1 ? LAUNCH_ALIGNMENT
						 : strides[i] * element_bytes(o->dtype);

		if (stride <= 0 || stride % LAUNCH_ALIGNMENT || stride >= MOST_STRIDE)
			return "a stride is no multiple of 16 bytes";
		ret_strides[i] = (uint64_t)stride;
	}
	return NULL;
}

static const char *add_map(const struct operand *o, const void *args, int box_rows,
			   struct launch_record *record)
{
	struct launch_map *map = &record->maps[record->n_maps++];

	if (o->hdim <= 0 || o->rows <= 0 || o->heads <= 0 || o->batch <= 0)
		return "a tensor is empty";
	*map = (struct launch_map){
		.offset = (uint16_t)((const char *)&o->tensor->data - (const char *)args),
		.dtype = (uint16_t)o->dtype,
		.swizzle = SWIZZLE,
		.box = {(uint32_t)(SWIZZLE / element_bytes(o->dtype)), (uint32_t)box_rows, 1, 1},
		.extents = {(uint64_t)o->hdim, (uint64_t)o->rows, (uint64_t)o->heads,
			    (uint64_t)o->batch}};
	record->aligned[record->n_aligned++] = map->offset;
	return find_strides(o, map->strides);
}

/* Q of splits: (dim, head, row, batch), since a box may have rows of several heads. */
static const char *add_grouped_queries(const struct operand *q, const struct abi_fwd_args *a,
				       int tile_m, struct launch_record *record)
{
	const int heads = grid_heads_of_tile(a, tile_m);
	const char *why = add_map(q, a, tile_m / heads, record);
	struct launch_map *map = &record->maps[record->n_maps - 1];
	const uint64_t stride = map->strides[0];

	map->box[1] = (uint32_t)heads;
	map->box[2] = (uint32_t)(tile_m / heads);
	map->extents[1] = (uint64_t)q->heads;
	map->extents[2] = (uint64_t)q->rows;
	map->strides[0] = map->strides[1];
	map->strides[1] = stride;
	return why;
}

/* Along the axes that it repeats over a bias has one element. */
static const char *add_bias(const struct operand *q, const struct abi_fwd_args *a, int tile_m,
			    struct launch_record *record)
{
	const struct abi_tensor *t = &a->bias;
	struct operand bias = *q;

	if (a->bias_dtype != a->dtype)
		return "the bias has not the type of Q";
	bias.tensor = t;
	bias.hdim = a->sequences.seqlen_k_max;
	if (!t->stride_seq)
		bias.rows = 1;
	if (!t->stride_head)
		bias.heads = 1;
	if (!t->stride_batch)
		bias.batch = 1;
	return add_map(&bias, a, t->stride_seq ? tile_m : 1, record);
}

/* Eight neighbours go out from the registers at once. */
static const char *check_output(const struct operand *o, const void *args,
				struct launch_record *record)
{
	uint64_t ignored[3];

	record->aligned[record->n_aligned++] = (uint16_t)((const char *)&o->tensor->data -
							  (const char *)args);
	return find_strides(o, ignored);
}

/* Values of 8 bits have their factors once a head. */
static const char *check_factors(const struct abi_fwd_args *a)
{
	const struct abi_descale *factors[] = {&a->q_descale, &a->k_descale, &a->v_descale};

	for (int i = 0; i < 3; i++)
		if (factors[i]->data && (factors[i]->block || factors[i]->per_page))
			return "a head has more than one descale";
	return NULL;
}

static const char *check_scores(const struct abi_fwd_args *a)
{
	const char *why = check_factors(a);

	if (why)
		return why;
	if (a->logits_soft_cap > MOST_SOFT_CAP)
		return "a soft cap above 1024";
	return NULL;
}

/* A descriptor's offsets are 32 bits, of which one says that a row is not there. */
static const char *check_rows(const struct operand *o, const void *args, int tile_rows,
			      struct launch_record *record)
{
	uint64_t strides[3];
	const char *why = find_strides(o, strides);

	record->aligned[record->n_aligned++] = (uint16_t)((const char *)&o->tensor->data -
							  (const char *)args);
	if (!why && o->rows > 1 && strides[0] < (uint64_t)(o->hdim * element_bytes(o->dtype)))
		return "rows overlap";
	if (!why && strides[0] * (uint64_t)tile_rows > INT32_MAX)
		return "the rows of a tile lie further apart than 2 GiB";
	return why;
}

#define PAGE_RUN 16 /* keys that AMD's loops find one page for */
static const char *maps_check_pages(const struct gpu_kernel *kernel, const struct abi_fwd_args *a)
{
	const struct abi_kv_cache *c = &a->cache;
	int by_boxes = kernel->tile.pipeline == GPU_WGMMA || kernel->tile.pipeline == GPU_LATENT ||
		       kernel->tile.pipeline == GPU_WIDE,
	    by_rows = kernel->tile.pipeline == GPU_AMD;

	if (by_boxes && kernel->family != ABI_FWD_SPLITKV &&
	    (kernel->family == ABI_FWD) != (c->page_size == 0))
		return c->page_size ? "the cache lies in pages" : "the cache does not lie in pages";
	if (!c->page_size)
		return NULL;
	if (c->layout == ABI_KV_VECTORIZED)
		return "the rows of a page are not whole";
	if (by_rows && c->page_size & (c->page_size - 1))
		return "pages are no power of two";
	if (a->sequences.leftpad_k && (by_boxes || by_rows || a->bias.data))
		return "left padding in pages";
	if (by_boxes && (a->chosen.n > 0 || c->layout == ABI_KV_LATENT_FP8))
		return NULL;
	if (by_boxes)
		return lds_wgmma_box(kernel->tile.tile_n, c->page_size) % 8
			       ? "pages are not whole runs of 8 keys"
			       : NULL;
	return c->page_size % PAGE_RUN ? "pages are not whole runs of 16 keys" : NULL;
}

/* Whether so many steps of @stride elements, and of @other, are an offset of 32 bits. */
static int is_near(int64_t stride, int64_t other, int64_t bytes, int tile_rows)
{
	int64_t most = INT32_MAX / (bytes * tile_rows);

	return stride >= 0 && stride <= most && other >= 0 && other <= most - stride;
}

static const char *check_bias(const struct abi_tensor *bias, int dtype, int tile_rows)
{
	if (!bias->data ||
	    is_near(bias->stride_seq, bias->stride_dim, element_bytes(dtype), tile_rows))
		return NULL;
	return "a tile's part of the bias is wider than 2 GiB";
}

static const char *amd_maps(const struct gpu_kernel *kernel, const struct abi_fwd_args *a,
			    const struct operand *q, const struct operand *k,
			    const struct operand *v, struct launch_record *record)
{
	const struct gpu_tile *tile = &kernel->tile;
	const char *why = maps_check_pages(kernel, a);

	if (tile->pipeline == GPU_AMD_DECODE && a->hdim_q <= tile->hdim_q - LDS_AMD_TAIL)
		return "rows end before the tile's last 32 columns";
	if (!why)
		why = check_factors(a);
	if (!why && a->hdim_q * element_bytes(a->dtype) % LAUNCH_ALIGNMENT)
		why = "the rows of Q are no whole chunks of 16 bytes";
	if (!why && tile->pipeline == GPU_AMD)
		why = check_bias(&a->bias, a->bias_dtype,
				 tile->tile_m > tile->tile_n ? tile->tile_m : tile->tile_n);
	if (!why)
		why = check_rows(q, a, tile->tile_m, record);
	if (!why)
		why = check_rows(k, a, tile->tile_n, record);
	return why ? why : check_rows(v, a, tile->tile_n, record);
}

/* Places of latents of fp8 are counted in chunks of 16 bytes, by a word. */
static const char *check_places(const struct operand *k)
{
	const struct abi_tensor *t = k->tensor;
	uint64_t most = (uint64_t)LAUNCH_ALIGNMENT << 32;

	return (uint64_t)k->batch * (uint64_t)(t->stride_batch > 0 ? t->stride_batch : 0) +
			       (uint64_t)k->rows * (uint64_t)t->stride_seq >=
		       most
		       ? "the latents take more than 64 GiB"
		       : NULL;
}

/* Values are where keys are; Q goes through registers, by chunks, and so do keys that a row has
 * chosen and latents of fp8. */
static const char *latent_maps(const struct gpu_kernel *kernel, const struct abi_fwd_args *a,
			       const struct operand *q, const struct operand *k,
			       const struct operand *o, struct launch_record *record)
{
	const struct gpu_tile *tile = &kernel->tile;
	const int coded = a->cache.layout == ABI_KV_LATENT_FP8;
	const char *why = maps_check_pages(kernel, a);

	if (!a->v_in_k)
		return "the values do not lie in the keys";
	if (!why && a->o_dtype != a->dtype)
		why = "O has not the type of Q";
	if (!why)
		why = a->chosen.n > 0 || coded
			      ? check_output(k, a, record)
			      : add_map(k, a,
					lds_wgmma_box(tile->tile_n /
							      (kernel->paired ? GRID_CLUSTER : 1),
						      a->cache.page_size),
					record);
	if (!why && coded)
		why = check_places(k);
	if (!why)
		why = check_output(q, a, record);
	return why ? why : check_output(o, a, record);
}

/* Q goes through registers, by chunks; of a tile each block of a cluster brings its share. */
static const char *wide_maps(const struct gpu_kernel *kernel, const struct abi_fwd_args *a,
			     const struct operand *q, const struct operand *k,
			     const struct operand *v, const struct operand *o,
			     struct launch_record *record)
{
	const int blocks = kernel->family == ABI_FWD_SPLITKV ? 1 : GRID_CLUSTER;
	const int box_rows = lds_wgmma_box(kernel->tile.tile_n / blocks, a->cache.page_size);
	const char *why = maps_check_pages(kernel, a);

	if (!why && a->o_dtype != a->dtype)
		why = "O has not the type of Q";
	if (!why)
		why = add_map(k, a, box_rows, record);
	if (!why)
		why = add_map(v, a, box_rows, record);
	if (!why)
		why = check_output(q, a, record);
	return why ? why : check_output(o, a, record);
}

static const char *forward_maps(const struct gpu_kernel *kernel, const struct abi_fwd_args *a,
				struct launch_record *record)
{
	const struct gpu_tile *tile = &kernel->tile;
	const struct abi_sequences *s = &a->sequences;
	int64_t batch_k = a->cache.cache_batch_idx ? a->cache.cache_batch : s->batch;
	struct operand q = {&a->q, a->hdim_q, s->seqlen_q_max, a->nhead_q, s->batch, a->dtype};
	struct operand k = {&a->k,      a->hdim_q, s->seqlen_k_max,
			    a->nhead_k, batch_k,   view_kv_dtype(a)};
	struct operand v, o;
	int box_rows = lds_wgmma_box(tile->tile_n, a->cache.page_size);
	int splits = kernel->family == ABI_FWD_SPLITKV, parts = splits && a->o_acc;
	const char *why;

	if (s->seqstart_q)
		q.rows = s->total_q, q.batch = 1;
	if (s->seqstart_k)
		k.rows = s->total_k, k.batch = 1;
	if (a->cache.page_size)
		k.rows = a->cache.page_size, k.batch = a->cache.n_pages;
	v = k, v.tensor = &a->v, v.hdim = a->hdim_v;
	o = q, o.tensor = &a->o, o.hdim = a->hdim_v, o.dtype = a->o_dtype;
	if (tile->pipeline == GPU_LATENT)
		return latent_maps(kernel, a, &q, &k, &o, record);
	if (tile->pipeline == GPU_WIDE)
		return wide_maps(kernel, a, &q, &k, &v, &o, record);
	if (tile->pipeline != GPU_WGMMA)
		return amd_maps(kernel, a, &q, &k, &v, record);
	why = check_scores(a);
	if (!why)
		why = maps_check_pages(kernel, a);
	if (!why && !parts && a->dtype != ABI_E4M3 && a->o_dtype != a->dtype)
		why = "O has not the type of Q";
	if (!why)
		why = splits ? add_grouped_queries(&q, a, tile->tile_m, record)
			     : add_map(&q, a, tile->tile_m, record);
	if (!why)
		why = add_map(&k, a, box_rows, record);
	if (!why)
		why = add_map(&v, a, box_rows, record);
	if (!why && a->bias.data)
		why = add_bias(&q, a, tile->tile_m, record);
	return why || parts ? why : check_output(&o, a, record);
}

/* A thread's number is multiplied by it, as 24 bits. */
static int is_short(int64_t stride)
{
	return stride >= 0 && stride < (1 << 24) / (int64_t)sizeof(float);
}

/* AMD's: each of them is streamed in one pass, and owned in the other. */
static const char *backward_rows(const struct operand *operands[4], const struct abi_bwd_args *a,
				 int tile_rows, struct launch_record *record)
{
	const char *why = NULL;

	for (int i = 0; i < 4 && !why; i++)
		why = check_rows(operands[i], a, tile_rows, record);
	if (!is_short(a->lse.stride_seq) || !is_short(a->d.stride_seq))
		why = "LSE, or D, of two rows lie further apart than 16 MiB";
	if (!why)
		why = check_bias(&a->bias, a->bias_dtype, tile_rows);
	return why ? why : check_bias(&a->dbias, a->bias_dtype, tile_rows);
}

static const char *backward_maps(const struct gpu_tile *tile, const struct abi_bwd_args *a,
				 struct launch_record *record)
{
	const struct abi_sequences *s = &a->sequences;
	struct operand q = {&a->q, a->hdim_q, s->seqlen_q_max, a->nhead_q, s->batch, a->dtype};
	struct operand k = {&a->k, a->hdim_q, s->seqlen_k_max, a->nhead_k, s->batch, a->dtype};
	struct operand d_o, v, dk, dv;
	const char *why;

	if (s->seqstart_q)
		q.rows = s->total_q, q.batch = 1;
	if (s->seqstart_k)
		k.rows = s->total_k, k.batch = 1;
	d_o = q, d_o.tensor = &a->d_o, d_o.hdim = a->hdim_v;
	v = k, v.tensor = &a->v, v.hdim = a->hdim_v;
	if (tile->pipeline == GPU_AMD)
		return backward_rows((const struct operand *[]){&q, &d_o, &k, &v}, a, tile->tile_n,
				     record);
	dk = k, dk.tensor = &a->dk;
	dv = v, dv.tensor = &a->dv;
	if (a->dbias.data)
		return "dBias is not found here";
	why = add_map(&q, a, tile->tile_m, record);
	if (!why)
		why = add_map(&k, a, tile->tile_n, record);
	if (!why)
		why = add_map(&v, a, tile->tile_n, record);
	if (!why)
		why = add_map(&d_o, a, tile->tile_m, record);
	if (!why)
		why = check_output(&dk, a, record);
	return why ? why : check_output(&dv, a, record);
}

static int has_tails(int32_t hdim_q, int32_t hdim_v)
{
	return hdim_q % 8 || hdim_v % 8;
}

/* dQ is written in a second pass, by parts of the keys into sums row by row, or summed in tiles
 * that are made for it. A bias may repeat over batches, heads and rows, never over columns. */
static const char *backward_refuses(const struct gpu_tile *tile, const struct abi_bwd_args *a)
{
	int is_long = a->logits_soft_cap > 0 || a->dropout.p_drop > 0;

	if (a->dq_acc &&
	    (tile->pipeline == GPU_WGMMA
		     ? a->dq_tile_rows != tile->tile_m ||
			       a->dq_tile_floats != lds_dq_tile(tile->tile_m, tile->hdim_q, is_long)
		     : a->dq_tile_rows || !a->dq_split_keys))
		return "sums of dQ do not lie in its tiles";
	return a->dbias.data && !a->dbias.stride_dim && a->sequences.seqlen_k_max > 1
		       ? "a dBias of one column for all keys"
		       : NULL;
}

static int is_byte_decode(const struct gpu_kernel *kernel, const struct abi_fwd_args *a)
{
	return kernel->tile.pipeline == GPU_DECODE && element_bytes(view_kv_dtype(a)) == 1 &&
	       !kernel->by_key;
}

/* Whether keys of a head have several. */
static int varies(const struct abi_descale *factors)
{
	return factors->data && (factors->block || factors->per_page);
}

static const char *factors_refuse(const struct abi_fwd_args *a)
{
	return varies(&a->k_descale) || varies(&a->v_descale) ? "keys of a head have several scales"
							      : NULL;
}

const char *gpu_kernel_maps(const struct gpu_kernel *kernel, const void *args,
			    struct launch_record *ret_record)
{
	const struct gpu_tile *tile = &kernel->tile;
	const struct abi_fwd_args *fwd = args;
	const struct abi_bwd_args *bwd = args;
	const char *why;

	ret_record->n_maps = ret_record->n_aligned = 0;
	why = kernel->family == ABI_BWD_DQ_DK_DV ? backward_refuses(tile, bwd)
	      : is_byte_decode(kernel, fwd)      ? factors_refuse(fwd)
						 : NULL;
	if (why)
		return why;
	if (tile->pipeline != GPU_WGMMA && tile->pipeline != GPU_LATENT &&
	    tile->pipeline != GPU_WIDE && tile->pipeline != GPU_AMD &&
	    tile->pipeline != GPU_AMD_DECODE)
		return NULL;
	if (kernel->family == ABI_BWD_DQ_DK_DV ? has_tails(bwd->hdim_q, bwd->hdim_v)
					       : has_tails(fwd->hdim_q, fwd->hdim_v))
		return "a head dimension is no multiple of 8";
	return kernel->family == ABI_BWD_DQ_DK_DV ? backward_maps(tile, args, ret_record)
						  : forward_maps(kernel, args, ret_record);
}

const char *gpu_kernel_launch(const struct gpu_kernel *kernel, uint32_t units, const void *args,
			      struct launch_record *ret_record)
{
	const char *why = gpu_kernel_maps(kernel, args, ret_record);

	if (!why && gpu_kernel_grid(kernel, units, args, ret_record->grid) != 0)
		why = "its blocks are more than a launch takes";
	if (why)
		return why;
	memcpy(ret_record->block, kernel->block, sizeof(ret_record->block));
	ret_record->lds_bytes = kernel->lds_bytes;
	_Static_assert(sizeof(kernel->entry) == sizeof(ret_record->entry),
		       "one name of a function");
	memcpy(ret_record->entry, kernel->entry, sizeof(kernel->entry));
	ret_record->overlaps = (uint32_t)kernel->overlaps;
	return NULL;
}
