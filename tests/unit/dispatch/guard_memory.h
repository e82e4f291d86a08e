/* SPDX-License-Identifier: MIT */
/*
 * guard_memory.h: memory whose ends are inaccessible pages. Each tensor of a case has a slot of
 * address space of its own; a block lies flush at the slot's end, or at its beginning, so that the
 * first byte beyond it on that side faults.
 */
#ifndef TESTS_DISPATCH_GUARD_MEMORY_H
#define TESTS_DISPATCH_GUARD_MEMORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <fmha/base.h>

/* One slot a role (the role's number), and these. */
#define GUARD_PRIVATE FMHA_N_TENSORS /* the plan's workspace; FMHA_T_WORKSPACE is the client's */
#define GUARD_SCRATCH (FMHA_N_TENSORS + 1)
#define GUARD_N_SLOTS (FMHA_N_TENSORS + 2)

/* Of a slot: address space only, pages come when they are touched. */
#define GUARD_SLOT_BYTES ((uint64_t)8 << 30)

struct guard_memory {
	struct guard_slot {
		char *begin, *end;
		uint64_t bytes; /* of the block in it */
		char *block;
	} slots[GUARD_N_SLOTS];
};

void guard_init(struct guard_memory *memory);
void guard_deinit(struct guard_memory *memory);

/*
 * A block of @bytes at one end of the slot, filled with @fill as far as its first and last
 * kilobytes go. What cannot be flush, because @bytes is no multiple of @alignment, gets the least
 * slack. At most GUARD_SLOT_BYTES.
 */
void *guard_place(struct guard_memory *memory, int slot, uint64_t bytes, uint64_t alignment,
		  bool at_end, int fill);

/* The slot that an address lies in or next to, or -1. */
int guard_slot_of(const struct guard_memory *memory, const void *address);
const char *guard_slot_name(int slot);

#endif
