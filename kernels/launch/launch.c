/* SPDX-License-Identifier: MIT */
#include <kernels/launch.h>

#include <string.h>

void launch_bind(const struct launch_record *record, const struct launch_bases *bases,
		 union abi_args *ret_args)
{
	*ret_args = record->args;
	for (uint32_t i = 0; i < record->n_relocations; i++) {
		const struct launch_relocation *r = &record->relocations[i];
		uint64_t base = bases->at[r->base], address = base ? base + r->plus : 0;

		memcpy((char *)ret_args + r->offset, &address, sizeof(address));
	}
}

#define MAP_UINT8       0
#define MAP_FLOAT16     6
#define MAP_FLOAT32     7
#define MAP_BFLOAT16    9
#define MAP_PROMOTE_256 3 /* bytes that the L2 cache fetches */

static int map_type(uint32_t dtype)
{
	switch (dtype) {
	case ABI_F32:
		return MAP_FLOAT32;
	case ABI_F16:
		return MAP_FLOAT16;
	case ABI_BF16:
		return MAP_BFLOAT16;
	default:
		return MAP_UINT8;
	}
}

int launch_encode_map(launch_encoder encode, const struct launch_map *map,
		      const union abi_args *args, struct launch_tensor_map *ret_map)
{
	static const uint32_t steps[4] = {1, 1, 1, 1};
	int swizzle = 0; /* 0, 1, 2, 3: none, 32, 64, 128 bytes */
	uint64_t address;

	memcpy(&address, (const char *)args + map->offset, sizeof(address));
	for (uint32_t bytes = map->swizzle; bytes > 16; bytes /= 2)
		swizzle++;
	return encode(ret_map, map_type(map->dtype), 4, address, map->extents, map->strides,
		      map->box, steps, 0, swizzle, MAP_PROMOTE_256, 0);
}

/* CUlaunchAttribute, CUlaunchConfig */
struct launch_attribute {
	int id, padding;
	int value[16];
};

struct launch_config {
	unsigned grid[3], block[3], shared_bytes;
	void *stream;
	struct launch_attribute *attributes;
	unsigned n_attributes;
};

#define ATTRIBUTE_OVERLAPS 6 /* CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION */

int launch_overlapping(launch_launcher launch, void *function, const struct launch_record *record,
		       void *stream, void **parameters)
{
	const uint32_t *grid = record->grid, *block = record->block;
	struct launch_attribute overlaps = {.id = ATTRIBUTE_OVERLAPS, .value = {1}};
	const struct launch_config config = {.grid = {grid[0], grid[1], grid[2]},
					     .block = {block[0], block[1], block[2]},
					     .shared_bytes = record->lds_bytes,
					     .stream = stream,
					     .attributes = &overlaps,
					     .n_attributes = 1};

	return launch(&config, function, parameters, NULL);
}

void launch_rebase(struct launch_record *record, enum launch_base from, enum launch_base to,
		   uint64_t plus)
{
	for (uint32_t i = 0; i < record->n_relocations; i++) {
		struct launch_relocation *r = &record->relocations[i];

		if (r->base != (uint32_t)from)
			continue;
		r->base = (uint16_t)to;
		r->plus += plus;
	}
}

void launch_set_dropout(const struct launch_record *record, const struct launch_dropout *state,
			union abi_args *args)
{
	struct abi_dropout dropout;

	if (record->dropout_offset == 0)
		return;
	memcpy(&dropout, (char *)args + record->dropout_offset, sizeof(dropout));
	dropout.seed = state->seed;
	dropout.offset = state->offset;
	dropout.seed_at = (const abi_u64 *)(uintptr_t)state->seed_at;
	dropout.offset_at = (const abi_u64 *)(uintptr_t)state->offset_at;
	memcpy((char *)args + record->dropout_offset, &dropout, sizeof(dropout));
}

static void set_strides(union abi_args *args, uint32_t offset, const int64_t strides[2])
{
	struct abi_tensor tensor;

	memcpy(&tensor, (char *)args + offset, sizeof(tensor));
	tensor.stride_batch = strides[0];
	tensor.stride_head = strides[1];
	memcpy((char *)args + offset, &tensor, sizeof(tensor));
}

void launch_set_keys(const struct launch_record *record, const struct launch_keys *keys,
		     union abi_args *args)
{
	struct abi_sequences sequences;
	int64_t total;

	if (record->sequences_offset == 0)
		return;
	memcpy(&sequences, (char *)args + record->sequences_offset, sizeof(sequences));
	total = (int64_t)sequences.batch * keys->seqlen_k;
	sequences.seqlen_k_max = keys->seqlen_k;
	sequences.total_k = total < INT32_MAX ? (abi_i32)total : INT32_MAX;
	memcpy((char *)args + record->sequences_offset, &sequences, sizeof(sequences));
	if (record->k_offset)
		set_strides(args, record->k_offset, keys->k_stride);
	if (record->v_offset)
		set_strides(args, record->v_offset, keys->v_stride);
}

void launch_set_map_keys(const struct launch_record *record, const union abi_args *args,
			 struct launch_map *map)
{
	struct abi_sequences sequences;
	struct abi_tensor tensor;
	uint64_t bytes = map->dtype == ABI_F32 ? 4 : map_type(map->dtype) == MAP_UINT8 ? 1 : 2;

	if (record->sequences_offset == 0 ||
	    (map->offset != record->k_offset && map->offset != record->v_offset))
		return;
	memcpy(&sequences, (const char *)args + record->sequences_offset, sizeof(sequences));
	memcpy(&tensor, (const char *)args + map->offset, sizeof(tensor));
	map->extents[1] = (uint64_t)sequences.seqlen_k_max;
	/* An axis of one element is never stepped along, and its step may be what the engine refuses. */
	if (map->extents[2] > 1)
		map->strides[1] = (uint64_t)tensor.stride_head * bytes;
	if (map->extents[3] > 1)
		map->strides[2] = (uint64_t)tensor.stride_batch * bytes;
}
