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
