/* SPDX-License-Identifier: MIT */
/*
 * gpu_tensor_map.c: tensor maps from recipes. In group mode the packed axis is the sequence axis, and kernels add
 * where a sequence starts; rows of its neighbours that a box brings along are masked.
 */
#include "gpu_tensor_map.h"

#define ELEMENT_BYTES 2
#define ALIGNMENT     16 /* of the base and of every stride */
#define MOST_STRIDE   ((int64_t)1 << 40)

void gpu_tensor_map_recipes(const struct gpu_tile *tile,
			    struct gpu_tensor_map_recipe ret_recipes[GPU_TENSOR_MAPS])
{
	for (int role = GPU_TENSOR_Q; role <= GPU_TENSOR_V; role++)
		ret_recipes[role] = (struct gpu_tensor_map_recipe){
			.role = (uint8_t)role,
			.swizzle_bytes = 128,
			.box_columns = 128 / ELEMENT_BYTES,
			.box_rows = (uint16_t)(role == GPU_TENSOR_Q ? tile->tile_m : tile->tile_n)};
}

/* Extents of a tensor's axes: head dim, sequence, head, batch. */
static void find_extents(enum gpu_tensor_role role, const struct abi_fwd_args *a,
			 uint64_t ret_extents[GPU_TENSOR_MAP_AXES])
{
	const struct abi_sequences *s = &a->sequences;
	int is_q = role == GPU_TENSOR_Q, packed = is_q ? s->seqstart_q != NULL : s->seqstart_k != NULL;
	int32_t rows = is_q ? (packed ? s->total_q : s->seqlen_q_max)
			    : (packed ? s->total_k : s->seqlen_k_max);
	int32_t batch = !is_q && a->cache.cache_batch_idx ? a->cache.cache_batch : s->batch;

	ret_extents[0] = (uint64_t)(role == GPU_TENSOR_V ? a->hdim_v : a->hdim_q);
	ret_extents[1] = (uint64_t)(rows > 0 ? rows : 0);
	ret_extents[2] = (uint64_t)(is_q ? a->nhead_q : a->nhead_k);
	ret_extents[3] = (uint64_t)(packed ? 1 : batch > 0 ? batch : 0);
}

const char *gpu_tensor_map_make(const struct gpu_tensor_map_recipe *recipe,
				const struct abi_fwd_args *args, struct gpu_tensor_map *ret_map)
{
	const struct abi_tensor *tensors[] = {&args->q, &args->k, &args->v}, *t = tensors[recipe->role];
	const int64_t strides[] = {t->stride_seq, t->stride_head, t->stride_batch};
	struct gpu_tensor_map map = {.base = t->data,
				     .box = {recipe->box_columns, recipe->box_rows, 1, 1},
				     .swizzle_bytes = recipe->swizzle_bytes,
				     .dtype = (uint32_t)args->dtype};

	if (args->dtype != ABI_F16 && args->dtype != ABI_BF16)
		return "is neither f16 nor bf16";
	if (args->cache.page_size)
		return "lies in pages";
	if (t->stride_dim != 1)
		return "has gaps between the elements of a head";
	if ((uintptr_t)t->data % ALIGNMENT)
		return "does not start at a multiple of 16 bytes";
	find_extents(recipe->role, args, map.extents);
	for (int i = 0; i < GPU_TENSOR_MAP_AXES; i++)
		if (!map.extents[i])
			return "is empty, or its length is not known";
	for (int i = 0; i < GPU_TENSOR_MAP_AXES - 1; i++) {
		/* The stride of an axis of one element may be anything, but not for the engine. */
		int64_t stride = map.extents[i + 1] == 1 ? ALIGNMENT : strides[i] * ELEMENT_BYTES;

		if (stride <= 0 || stride % ALIGNMENT || stride >= MOST_STRIDE)
			return "has a stride that is no multiple of 16 bytes";
		map.strides[i] = (uint64_t)stride;
	}
	*ret_map = map;
	return NULL;
}
