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

void launch_set_dropout(const struct launch_record *record, uint64_t seed, uint64_t offset,
			union abi_args *args)
{
	struct abi_dropout dropout;

	if (record->dropout_offset == 0)
		return;
	memcpy(&dropout, (char *)args + record->dropout_offset, sizeof(dropout));
	dropout.seed = seed;
	dropout.offset = offset;
	memcpy((char *)args + record->dropout_offset, &dropout, sizeof(dropout));
}
