/* SPDX-License-Identifier: MIT */
#include <kernels/launch_wire.h>

#include <stdbool.h>
#include <string.h>

#include <proto/error.h>

_Static_assert(LAUNCH_HASH_BYTES == PROTO_HASH_BYTES && LAUNCH_MAPS <= PROTO_MAX_MAPS &&
		       LAUNCH_RELOCATIONS <= PROTO_MAX_RELOCATIONS &&
		       LAUNCH_RANGES <= PROTO_MAX_RANGES &&
		       sizeof(union abi_args) <= PROTO_ARGUMENT_BYTES &&
		       LAUNCH_ENTRY_BYTES <= PROTO_NAME_BYTES,
	       "every record fits");

/* ---- out ---- */

static void map_to_wire(const struct launch_map *map, struct proto_tensor_map *ret_map)
{
	*ret_map = (struct proto_tensor_map){
		.offset = map->offset, .dtype = map->dtype, .swizzle = map->swizzle};
	for (int i = 0; i < 4; i++)
		ret_map->box[i] = map->box[i];
	memcpy(ret_map->extents, map->extents, sizeof(map->extents));
	memcpy(ret_map->strides, map->strides, sizeof(map->strides));
}

static int relocations_to_wire(const struct launch_record *record, struct proto_launch *launch,
			       struct fmha_error *err)
{
	launch->n_relocations = record->n_relocations;
	for (uint32_t i = 0; i < record->n_relocations; i++) {
		const struct launch_relocation *r = &record->relocations[i];
		uint32_t role = r->base == LAUNCH_WORKSPACE ? FMHA_T_WORKSPACE : r->base;

		if (r->base > LAUNCH_WORKSPACE || r->base == FMHA_T_WORKSPACE)
			return fmha_error_set(err, FMHA_EINTERNAL,
					      "a launch points where no client has anything");
		launch->relocations[i] = (struct proto_relocation){
			.offset = r->offset, .base = role, .plus = r->plus};
	}
	return 0;
}

int launch_to_wire(const struct launch_record *record, struct proto_launch *ret_launch,
		   struct fmha_error *err)
{
	struct proto_launch *launch = ret_launch;

	memcpy(launch->entry, record->entry, sizeof(record->entry));
	memcpy(launch->code, record->code, sizeof(record->code));
	launch->code_bytes = sizeof(record->code);
	for (int i = 0; i < 3; i++) {
		launch->grid[i] = record->grid[i];
		launch->block[i] = record->block[i];
	}
	launch->lds_bytes = record->lds_bytes;
	launch->dropout_offset = record->dropout_offset;
	launch->sequences_offset = record->sequences_offset;
	launch->k_offset = record->k_offset;
	launch->v_offset = record->v_offset;
	memcpy(launch->arguments, &record->args, record->args_bytes);
	launch->argument_bytes = record->args_bytes;
	launch->overlaps = record->overlaps;
	launch->n_maps = record->n_maps;
	for (uint32_t i = 0; i < record->n_maps; i++)
		map_to_wire(&record->maps[i], &launch->maps[i]);
	launch->n_zeroes = record->n_zeroes;
	for (uint32_t i = 0; i < record->n_zeroes; i++)
		launch->zeroes[i] = (struct proto_range){record->zeroes[i].offset,
							 record->zeroes[i].bytes};
	return relocations_to_wire(record, launch, err);
}

/* ---- in ---- */

static int malformed(struct fmha_error *err, const char *what)
{
	return fmha_error_set(err, FMHA_EPROTO, "a launch with %s", what);
}

static bool is_pointer(uint32_t offset, uint32_t args_bytes)
{
	return offset % sizeof(uint64_t) == 0 && args_bytes >= sizeof(uint64_t) &&
	       offset <= args_bytes - sizeof(uint64_t);
}

static int shape_from_wire(const struct proto_launch *launch, struct launch_record *record,
			   struct fmha_error *err)
{
	for (int i = 0; i < 3; i++) {
		if (launch->grid[i] > INT32_MAX || launch->block[i] == 0 ||
		    launch->block[i] > INT32_MAX)
			return malformed(err, "an impossible grid");
		record->grid[i] = (uint32_t)launch->grid[i];
		record->block[i] = (uint32_t)launch->block[i];
	}
	record->lds_bytes = launch->lds_bytes;
	return 0;
}

static int pointers_from_wire(const struct proto_launch *launch, struct launch_record *record,
			      struct fmha_error *err)
{
	if (launch->n_relocations > LAUNCH_RELOCATIONS)
		return fmha_error_set(err, FMHA_ENOTSUP, "a launch with %u pointers, at most %d",
				      launch->n_relocations, LAUNCH_RELOCATIONS);
	record->n_relocations = launch->n_relocations;
	for (uint32_t i = 0; i < launch->n_relocations; i++) {
		const struct proto_relocation *r = &launch->relocations[i];

		if (!is_pointer(r->offset, record->args_bytes) || r->base >= FMHA_N_TENSORS)
			return malformed(err, "a pointer beside its arguments");
		record->relocations[i] = (struct launch_relocation){
			.offset = (uint16_t)r->offset,
			.base = (uint16_t)(r->base == FMHA_T_WORKSPACE ? LAUNCH_WORKSPACE
								       : r->base),
			.plus = r->plus};
	}
	return 0;
}

static int maps_from_wire(const struct proto_launch *launch, struct launch_record *record,
			  struct fmha_error *err)
{
	if (launch->n_maps > LAUNCH_MAPS)
		return fmha_error_set(err, FMHA_ENOTSUP, "a launch with %u tensor maps, at most %d",
				      launch->n_maps, LAUNCH_MAPS);
	record->n_maps = launch->n_maps;
	for (uint32_t i = 0; i < launch->n_maps; i++) {
		const struct proto_tensor_map *map = &launch->maps[i];
		struct launch_map *to = &record->maps[i];

		if (!is_pointer(map->offset, record->args_bytes))
			return malformed(err, "a tensor map beside its arguments");
		*to = (struct launch_map){.offset = (uint16_t)map->offset,
					  .dtype = (uint16_t)map->dtype,
					  .swizzle = map->swizzle};
		for (int k = 0; k < 4; k++) {
			if (map->box[k] == 0 || map->box[k] > UINT16_MAX)
				return malformed(err, "a tensor map without a box");
			to->box[k] = (uint32_t)map->box[k];
		}
		memcpy(to->extents, map->extents, sizeof(to->extents));
		memcpy(to->strides, map->strides, sizeof(to->strides));
	}
	return 0;
}

static int zeroes_from_wire(const struct proto_launch *launch, uint64_t workspace_bytes,
			    struct launch_record *record, struct fmha_error *err)
{
	if (launch->n_zeroes > LAUNCH_RANGES)
		return fmha_error_set(err, FMHA_ENOTSUP, "a launch with %u ranges, at most %d",
				      launch->n_zeroes, LAUNCH_RANGES);
	record->n_zeroes = launch->n_zeroes;
	for (uint32_t i = 0; i < launch->n_zeroes; i++) {
		const struct proto_range *range = &launch->zeroes[i];

		if (range->offset > workspace_bytes ||
		    range->bytes > workspace_bytes - range->offset)
			return malformed(err, "a range outside of the workspace");
		record->zeroes[i] = (struct launch_range){range->offset, range->bytes};
	}
	return 0;
}

/* Is a struct of @bytes that lies at @offset, if any does, in the arguments? */
static bool holds(const struct launch_record *record, uint32_t offset, size_t bytes)
{
	return offset == 0 || (offset % sizeof(uint64_t) == 0 && record->args_bytes >= bytes &&
			       offset <= record->args_bytes - bytes);
}

static bool holds_keys(const struct launch_record *record)
{
	if (record->sequences_offset == 0 && (record->k_offset || record->v_offset))
		return false;
	return holds(record, record->sequences_offset, sizeof(struct abi_sequences)) &&
	       holds(record, record->k_offset, sizeof(struct abi_tensor)) &&
	       holds(record, record->v_offset, sizeof(struct abi_tensor));
}

int launch_from_wire(const struct proto_launch *launch, uint64_t workspace_bytes,
		     struct launch_record *ret_record, struct fmha_error *err)
{
	struct launch_record record = {.args_bytes = launch->argument_bytes,
				       .dropout_offset = launch->dropout_offset,
				       .sequences_offset = launch->sequences_offset,
				       .k_offset = launch->k_offset,
				       .v_offset = launch->v_offset,
				       .overlaps = launch->overlaps};
	int r;

	if (launch->argument_bytes > sizeof(record.args))
		return fmha_error_set(
			err, FMHA_ENOTSUP,
			"a launch with %u bytes of arguments, at most %zu: the daemon "
			"is newer than this library",
			launch->argument_bytes, sizeof(record.args));
	if (launch->code_bytes != sizeof(record.code) || launch->entry[0] == '\0')
		return malformed(err, "no code");
	if (!holds(&record, record.dropout_offset, sizeof(struct abi_dropout)))
		return malformed(err, "its dropout state beside its arguments");
	if (!holds_keys(&record))
		return malformed(err, "its keys beside its arguments");
	memcpy(record.code, launch->code, sizeof(record.code));
	memcpy(record.entry, launch->entry, sizeof(record.entry));
	memcpy(&record.args, launch->arguments, launch->argument_bytes);
	r = shape_from_wire(launch, &record, err);
	if (r == 0)
		r = pointers_from_wire(launch, &record, err);
	if (r == 0)
		r = maps_from_wire(launch, &record, err);
	if (r == 0)
		r = zeroes_from_wire(launch, workspace_bytes, &record, err);
	if (r == 0)
		*ret_record = record;
	return r;
}
