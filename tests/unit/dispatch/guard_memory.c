/* SPDX-License-Identifier: MIT */
#include "guard_memory.h"

#include <string.h>
#include <sys/mman.h>

#include <proto/problem.h>

#include "fixture.h"

#define PAGE      4096
#define FILLED    ((uint64_t)8192)    /* bytes at either end of a block */
#define KEEP_MOST ((uint64_t)1 << 20) /* larger blocks give their pages back */

void guard_init(struct guard_memory *memory)
{
	memset(memory, 0, sizeof(*memory));
	for (int i = 0; i < GUARD_N_SLOTS; i++) {
		struct guard_slot *slot = &memory->slots[i];
		char *at = mmap(NULL, GUARD_SLOT_BYTES + 2 * PAGE, PROT_NONE,
				MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

		assert_ptr_not_equal(at, MAP_FAILED);
		slot->begin = at + PAGE;
		slot->end = slot->begin + GUARD_SLOT_BYTES;
		assert_int_equal(mprotect(slot->begin, GUARD_SLOT_BYTES, PROT_READ | PROT_WRITE),
				 0);
	}
}

void guard_deinit(struct guard_memory *memory)
{
	for (int i = 0; i < GUARD_N_SLOTS; i++)
		(void)munmap(memory->slots[i].begin - PAGE, GUARD_SLOT_BYTES + 2 * PAGE);
}

static void slot_clean(struct guard_slot *slot)
{
	if (slot->bytes > KEEP_MOST)
		(void)madvise(slot->begin, GUARD_SLOT_BYTES, MADV_DONTNEED);
	slot->bytes = 0;
}

void *guard_place(struct guard_memory *memory, int slot, uint64_t bytes, uint64_t alignment,
		  bool at_end, int fill)
{
	struct guard_slot *s = &memory->slots[slot];
	uint64_t room = (bytes + alignment - 1) / alignment * alignment;
	uint64_t filled = bytes < FILLED ? bytes : FILLED;

	assert_true(room <= GUARD_SLOT_BYTES);
	slot_clean(s);
	s->block = at_end ? s->end - room : s->begin;
	s->bytes = bytes;
	memset(s->block, fill, filled);
	memset(s->block + bytes - filled, fill, filled);
	return s->block;
}

int guard_slot_of(const struct guard_memory *memory, const void *address)
{
	const char *at = address;

	for (int i = 0; i < GUARD_N_SLOTS; i++)
		if (at >= memory->slots[i].begin - PAGE && at < memory->slots[i].end + PAGE)
			return i;
	return -1;
}

const char *guard_slot_name(int slot)
{
	if (slot == GUARD_PRIVATE)
		return "the plan's workspace";
	return slot == GUARD_SCRATCH ? "scratch" : proto_roles[slot].name;
}
