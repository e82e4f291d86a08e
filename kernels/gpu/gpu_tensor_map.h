/* SPDX-License-Identifier: MIT */
/*
 * gpu_tensor_map.h: the tensor maps that Hopper's copy engine reads tiles by, as plain data: what a kernel wants
 * (a recipe) and, with the arguments of a launch, what cuTensorMapEncodeTiled is given. No GPU API. A kernel takes
 * its maps behind its argument struct, in the order of its recipes.
 */
#ifndef FMHA_GPU_TENSOR_MAP_H
#define FMHA_GPU_TENSOR_MAP_H

#include "gpu_kernel.h"

enum gpu_tensor_role { GPU_TENSOR_Q, GPU_TENSOR_K, GPU_TENSOR_V };

struct gpu_tensor_map_recipe {
	uint8_t role;          /* enum gpu_tensor_role */
	uint8_t swizzle_bytes; /* 128: also the width of a box */
	uint16_t box_columns, box_rows;
};

/* Elements have 16 bits. Axes: head dim, sequence, head, batch; what lies outside of them is read as zero. */
#define GPU_TENSOR_MAP_AXES 4
struct gpu_tensor_map {
	void *base;
	uint64_t extents[GPU_TENSOR_MAP_AXES];
	uint64_t strides[GPU_TENSOR_MAP_AXES - 1]; /* bytes, of all axes but the first */
	uint32_t box[GPU_TENSOR_MAP_AXES];
	uint32_t swizzle_bytes;
	uint32_t dtype; /* enum abi_dtype */
};

#define GPU_TENSOR_MAPS 3
/* Q, K and V of a tile of the pipeline of fwd_wgmma.h. */
void gpu_tensor_map_recipes(const struct gpu_tile *tile,
			    struct gpu_tensor_map_recipe ret_recipes[GPU_TENSOR_MAPS]);

/* Return: NULL, or why the engine cannot follow the tensor: the end of a sentence about it. */
const char *gpu_tensor_map_make(const struct gpu_tensor_map_recipe *recipe,
				const struct abi_fwd_args *args, struct gpu_tensor_map *ret_map);

#endif
